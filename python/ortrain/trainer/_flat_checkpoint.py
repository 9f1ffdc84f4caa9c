"""Flat checkpoints: dicts of tensors in PyTorch files, the first format of onnxruntime-training."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortrain import _files
from ortrain._model_source import PathLike
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.trainer._merging import Arrays, add_undivided, shaped
from ortrain.trainer._state import FULL, INFO, MODEL, OPTIMIZER, OPTIONS, RANDOM, model_state, statistics_of
from ortrain.trainer._values import as_array

if TYPE_CHECKING:
    from ortrain.trainer.orttrainer import ORTTrainer

__all__ = [
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]

STEP, SHARED_STATE = "Step", "shared_optimizer_state"
# Prefixes and suffix of a weight's name in the keys of a flat state.
PREFIXES = ("Moment_1_", "Moment_2_", "Update_Count_")
HALF = "_fp16"


def experimental_state_dict(ort_trainer: ORTTrainer, include_optimizer_state: bool = True) -> dict[str, Any]:
    """Returns the weights and the optimizer state as one flat dict of tensors. Needs PyTorch.

    Args:
        ort_trainer: the trainer.
        include_optimizer_state: if true, the dict also has values other than weights: ``Moment_1_<weight>``,
            ``Moment_2_<weight>``, ``Update_Count_<weight>`` or ``Step``.

    Returns:
        Copies by name, including frozen weights. Without a session, the dict that was stored for the session.

    Raises:
        ImportError: if PyTorch is not installed.

    Warns:
        DeprecationWarning: always. :meth:`ORTTrainer.state_dict` needs no PyTorch and also stores counts.
        UserWarning: if there is no session yet.

    >>> import warnings
    >>> from contextlib import suppress
    >>> from ortrain.trainer import checkpoint
    >>> warnings.simplefilter("ignore")
    >>> with suppress(ImportError):  # raised where there is no PyTorch
    ...     state = checkpoint.experimental_state_dict(trainer, include_optimizer_state=False)
    ...     assert sorted(state) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]

    """
    _warn("experimental_state_dict", "ORTTrainer.state_dict")
    return _flat_state(ort_trainer, include_optimizer_state)


def experimental_load_state_dict(ort_trainer: ORTTrainer, state_dict: Mapping[str, Any], strict: bool = False) -> None:
    """Sets some or all values from a dict of :func:`experimental_state_dict`.

    Args:
        ort_trainer: the trainer. Without a session, the trainer stores the dict for the session.
        state_dict: tensors or arrays by name. Copies in float16 (``<weight>_fp16``) are ignored, because the trainer
            creates its own copies.
        strict: if true, an unknown name is an error. Otherwise its value is ignored.

    Raises:
        InvalidArgumentError: for a value of another shape or type; with ``strict``, also for an unknown name. The error
            is a ``RuntimeError`` too. In this case no value is changed.

    Warns:
        DeprecationWarning: always.

    >>> import warnings
    >>> from ortrain.trainer import checkpoint
    >>> warnings.simplefilter("ignore")
    >>> checkpoint.experimental_load_state_dict(trainer, {"fc2.bias": np.ones(10, np.float32)})
    >>> trainer.state_dict()["model"]["full_precision"]["fc2.bias"][:3]
    array([1., 1., 1.], dtype=float32)

    """
    _warn("experimental_load_state_dict", "ORTTrainer.load_state_dict")
    _load_flat(ort_trainer, state_dict, strict)


def experimental_save_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes :func:`experimental_state_dict` and other values to a file of ``torch.save``. Needs PyTorch.

    Args:
        ort_trainer: the trainer.
        checkpoint_dir: the folder. The file is ``<prefix>.ort.pt``, and with ZeRO ``<prefix>.ZeRO.<rank>.<last
            rank>.ort.pt``.
        checkpoint_prefix: the start of the file name.
        checkpoint_state_dict: other values by name. The name ``"model"`` is reserved for the weights.
        include_optimizer_state: as in :func:`experimental_state_dict`.

    Raises:
        AssertionError: if the folder does not exist.
        ImportError: if PyTorch is not installed.

    Warns:
        DeprecationWarning: always. :meth:`ORTTrainer.save_checkpoint` needs no PyTorch.
        UserWarning: if the file exists. It is replaced.

    >>> import warnings
    >>> from contextlib import suppress
    >>> from ortrain.trainer import checkpoint
    >>> warnings.simplefilter("ignore")
    >>> with suppress(ImportError):  # raised where there is no PyTorch
    ...     checkpoint.experimental_save_checkpoint(trainer, ".", checkpoint_state_dict={"epoch": 3})
    ...     assert checkpoint.experimental_load_checkpoint(trainer, ".") == {"epoch": 3}

    """
    _warn("experimental_save_checkpoint", "ORTTrainer.save_checkpoint")
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise AssertionError(f"checkpoint_dir ({folder}) directory doesn't exist")
    torch = _torch()
    distributed = ort_trainer.options.distributed
    zero = distributed.deepspeed_zero_optimization.stage > 0
    name = _get_checkpoint_name(checkpoint_prefix, zero, distributed.world_rank, distributed.world_size)
    values = dict(checkpoint_state_dict or {}) | {MODEL: _flat_state(ort_trainer, include_optimizer_state)}
    _torch_save(torch, folder / name, values)


def experimental_load_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
    *,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Restores a file of :func:`experimental_save_checkpoint`, or the files of all ZeRO processes. Needs PyTorch.

    Args:
        ort_trainer: the trainer.
        checkpoint_dir: the folder.
        checkpoint_prefix: the start of the file name.
        strict: as in :func:`experimental_load_state_dict`.
        allow_pickle: if true, objects of every class are created. This runs code of the file's author. If false,
            ``torch.load`` runs with ``weights_only=True``.

    Returns:
        The other values of the file, or of all files.

    Raises:
        AssertionError: if the file does not exist, or the file of a process is missing.
        InvalidArgumentError: for a file that cannot be read, or for values that do not match the trainer.
        ImportError: if PyTorch is not installed.

    Warns:
        DeprecationWarning: always.
        UserWarning: if the files are from several processes.

    >>> import warnings
    >>> from ortrain.trainer import checkpoint
    >>> warnings.simplefilter("ignore")
    >>> checkpoint.experimental_load_checkpoint(None, ".")
    Traceback (most recent call last):
    AssertionError: No checkpoint found with prefix 'ORT_checkpoint' at '.'

    """
    _warn("experimental_load_checkpoint", "ORTTrainer.load_checkpoint")
    files = _list_checkpoint_files(checkpoint_dir, checkpoint_prefix)
    shards = [file for file in files if _SHARD.fullmatch(Path(file).name[len(checkpoint_prefix) :])]
    distributed = ort_trainer.options.distributed
    zero = distributed.deepspeed_zero_optimization.stage > 0
    if len(shards) > 1:
        warnings.warn(
            f"Found more than one file with prefix {checkpoint_prefix} in directory {checkpoint_dir}. "
            "Attempting to load ZeRO checkpoint.",
            stacklevel=2,
        )
    if shards and not zero:
        merged = _CombineZeroCheckpoint(shards, allow_pickle=allow_pickle)
        model = merged.merged()
        others = merged.others
    else:
        name = _get_checkpoint_name(checkpoint_prefix, bool(shards), distributed.world_rank, distributed.world_size)
        file = str(Path(checkpoint_dir) / name)
        if not Path(file).exists():
            raise AssertionError(f"Couldn't find checkpoint file {file}{hint(file, files)}")
        model, others = _torch_load(file, allow_pickle)
    _load_flat(ort_trainer, model, strict)
    return others


_SHARD = re.compile(r"\.ZeRO\.(\d+)\.(\d+)\.ort\.pt")
_VIEW = re.compile(r"(.+)_view_\d+")


def _get_checkpoint_name(
    prefix: str, is_partitioned: bool, world_rank: int | None = None, world_size: int | None = None
) -> str:
    """Returns the name of the single checkpoint file, or of the file of one process."""
    if not is_partitioned:
        return f"{prefix}.ort.pt"
    if world_rank is None or world_size is None:
        raise InvalidArgumentError("world_rank and world_size must be set: they are in the file name of a process")
    return f"{prefix}.ZeRO.{world_rank}.{world_size - 1}.ort.pt"


def _list_checkpoint_files(checkpoint_dir: PathLike, checkpoint_prefix: str, extension: str = ".ort.pt") -> list[str]:
    """Returns the files of a folder with this prefix and extension, sorted.

    Raises:
        AssertionError: if there is no such file.

    """
    found = sorted(Path(checkpoint_dir).iterdir())
    files = [str(file) for file in found if file.name.startswith(checkpoint_prefix) and file.name.endswith(extension)]
    if not files:
        raise AssertionError(f"No checkpoint found with prefix '{checkpoint_prefix}' at '{checkpoint_dir}'")
    return files


def _split_state_dict(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Splits a flat state into three dicts: ``"optimizer"``, ``"fp32_param"`` and ``"fp16_param"``."""
    split: dict[str, dict[str, Any]] = {"optimizer": {}, "fp32_param": {}, "fp16_param": {}}
    for name, value in state_dict.items():
        part = "optimizer" if name.startswith((*PREFIXES, STEP)) else "fp32_param"
        split["fp16_param" if name.endswith(HALF) else part][name] = value
    return split


class _CombineZeroCheckpoint:
    """Merge of the older files of ZeRO processes.

    The file of a process has pieces of weights, ``<weight>_view_<number>``, and complete values.

    Args:
        checkpoint_files: one file of each process, in any order.
        clean_state_dict: function that filters the state of each process; ``None`` keeps everything.
        allow_pickle: as in :func:`experimental_load_checkpoint`.

    Raises:
        AssertionError: if there are no files, or the file of a process is missing.

    """

    def __init__(
        self,
        checkpoint_files: Sequence[str],
        clean_state_dict: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        if not checkpoint_files:
            raise AssertionError("No checkpoint files passed")
        ranks: dict[int, str] = {}
        for file in checkpoint_files:
            found = _SHARD.search(Path(file).name)
            if found is None:
                raise AssertionError(
                    f"{file} does not have the name of a ZeRO file, <prefix>.ZeRO.<rank>.<last rank>.ort.pt"
                )
            ranks[int(found[1])] = file
            self.world_size = int(found[2]) + 1
        if sorted(ranks) != list(range(self.world_size)) or len(checkpoint_files) != self.world_size:
            raise AssertionError(f"Could not find {self.world_size} files")
        self.checkpoint_files = [ranks[rank] for rank in range(self.world_size)]
        self.clean_state_dict, self.allow_pickle = clean_state_dict, allow_pickle
        self.others: dict[str, Any] = {}
        """Other values of the files, by name. For a name in several files, the last file counts."""

    def aggregate_checkpoints(self) -> dict[str, Any]:
        """Returns the merged state of all processes: tensors by name.

        Warns:
            DeprecationWarning: always.

        """
        _warn("_CombineZeroCheckpoint.aggregate_checkpoints", "aggregate_checkpoints")
        torch = _torch()
        return {name: torch.from_numpy(value) for name, value in self.merged().items()}

    def merged(self) -> Arrays:
        """Returns the merged state of all processes: arrays by name."""
        merged: Arrays = {}
        pieces: dict[str, list[npt.NDArray[Any]]] = {}
        for file in self.checkpoint_files:
            state, others = _torch_load(file, self.allow_pickle)
            self.others |= others
            if self.clean_state_dict is not None:
                state = self.clean_state_dict(state)
            for name, value in state.items():
                view = _VIEW.fullmatch(name)
                array = np.array(as_array(value))
                if view is None or name.startswith(PREFIXES[2]):
                    add_undivided(merged, name if view is None else view[1], array, f"Value mismatch for state {name}")
                else:
                    pieces.setdefault(view[1], []).append(array)
        # The shape of a weight is the shape of any complete value of the weight, such as its float16 copy.
        shapes = {_weight_of(name): value.shape for name, value in merged.items() if not name.startswith(PREFIXES[2])}
        for name, found in pieces.items():
            shape = shapes.get(_weight_of(name))
            if shape is None:
                raise InvalidArgumentError(f"the shape of {name!r} is unknown: the files have only parts of it")
            merged[name] = shaped(np.concatenate([piece.reshape(-1) for piece in found]), shape, repr(name))
        return merged


def _weight_of(name: str) -> str:
    """Returns the weight that a value of a flat state belongs to."""
    return next((name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)), name).removesuffix(HALF)


def _flat_state(trainer: ORTTrainer, include_optimizer_state: bool) -> dict[str, Any]:
    """Returns the flat state of a trainer as tensors."""
    torch = _torch()
    session, model = trainer._training_session, trainer._onnx_model
    if session is None or model is None:
        warnings.warn(
            "ONNX Runtime training session is not initialized yet. "
            "Please run train_step or eval_step at least once before calling state_dict().",
            stacklevel=3,
        )
        return dict(trainer._state_dict)
    own = session.get_state()
    for weight in session.get_partition_info_map():
        # A part of a moment has the number of the part: 0 if the part is the first one of the weight, else 1.
        start, _ = session._classic.updated_elements(weight)
        for prefix in PREFIXES[:2]:
            own[f"{prefix}{weight}_view_{int(start > 0)}"] = own.pop(f"{prefix}{weight}")
    values = own | model_state(session, model, trainer.options) | statistics_of(session)
    initializers = {tensor.name for tensor in model.graph.initializer}
    return {
        name: torch.from_numpy(value)
        for name, value in values.items()
        if include_optimizer_state or name in initializers
    }


def _load_flat(trainer: ORTTrainer, state: Mapping[str, Any], strict: bool) -> None:
    """Sets the values of a flat state, or stores the state until the trainer has a session."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state must be a dict of tensors, got {type(state).__name__}")
    session, model = trainer._training_session, trainer._onnx_model
    if session is None or model is None:
        trainer._state_dict = dict(state)
        trainer._load_state_dict = lambda: _load_flat(trainer, state, strict)
        return
    there = trainer.state_dict()
    weights = {tensor.name for tensor in model.graph.initializer}
    full: Arrays = {}
    optimizer: dict[str, Arrays] = {}
    unknown: list[str] = []
    for name, value in state.items():
        slot = _slot_of(name, weights)
        if slot is not None:
            optimizer.setdefault(slot[0], {})[slot[1]] = as_array(value)
        elif name in weights:
            full[name] = as_array(value)
        elif name.removesuffix(HALF) not in weights:
            unknown.append(name)
    if strict and unknown:
        near = hint(unknown[0], weights) or "."
        raise InvalidArgumentError(f"Checkpoint tensor: {unknown[0]} is not present in the model{near}")
    nested_state = {MODEL: {FULL: full}, OPTIMIZER: optimizer}
    trainer.load_state_dict(
        nested_state | {name: there[name] for name in (OPTIONS, INFO, RANDOM) if name in there}, strict=False
    )


def _slot_of(name: str, weights: set[str]) -> tuple[str, str] | None:
    """Returns the weight and the state name of an optimizer value, or None for another value."""
    if name in weights:
        return None
    if name == STEP:
        return SHARED_STATE, STEP
    for prefix in PREFIXES:
        if name.startswith(prefix):
            weight = name[len(prefix) :]
            view = _VIEW.fullmatch(weight)
            if weight not in weights and view is not None:
                # The part of this process in a weight that ZeRO divides.
                weight = view[1]
            if weight in weights:
                return weight, prefix[:-1]
    return None


def _torch_load(file: str, allow_pickle: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the flat state in a file, and the other values."""
    torch = _torch()
    try:
        values = torch.load(file, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        # PyTorch raises many types of errors for a damaged file.
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = str(error).partition("\n")[0] if named is None else f"the file asks for {named[1]}"
        more = "" if allow_pickle else "; allow_pickle=True allows objects of all classes, but runs code of the file"
        raise InvalidArgumentError(f"{file} cannot be read: {reason}{more}") from error
    if not isinstance(values, dict) or not isinstance(values.get(MODEL), dict):
        raise InvalidArgumentError(f"{file} is not a checkpoint of a trainer: the file has no dict {MODEL!r}")
    return values[MODEL], {name: value for name, value in values.items() if name != MODEL}


def _torch_save(torch: Any, file: Path, values: dict[str, Any]) -> None:
    """Writes values to a file atomically. Warns the caller's caller if the file is replaced."""
    if file.exists():
        warnings.warn(f"{file} already exists, overwriting.", stacklevel=3)
    with _files.placed(file, replace=True) as written:
        torch.save(values, written)


def _torch() -> Any:
    """Imports and returns PyTorch, which only these functions need.

    Raises:
        ImportError: if PyTorch is not installed.

    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "experimental checkpoints need PyTorch, which is not installed: pip install torch",
            name="torch",
        ) from error
    return torch


def _warn(name: str, instead: str) -> None:
    message = f"{name}() will be deprecated soon. Please use {instead}() instead."
    warnings.warn(message, DeprecationWarning, stacklevel=3)
