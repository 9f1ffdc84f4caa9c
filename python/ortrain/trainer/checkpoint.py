"""Merge of checkpoints from several processes, and functions for the older PyTorch files.

Processes that divide a model or its optimizer state save one file each. :func:`aggregate_checkpoints` merges the files
to one state that any trainer can load. The ``experimental_`` functions read and write an older file format of
onnxruntime-training; they need PyTorch.

>>> from ortrain.trainer import _checkpoint_storage, checkpoint
>>> for rank in range(2):
...     moment = np.full(3, rank, np.float32)
...     state = {
...         "model": {"full_precision": {"w": np.zeros((2, 3), np.float32)}},
...         "optimizer": {"w": {"Moment_1": moment}},
...         "partition_info": {"w": {"original_dim": [2, 3], "megatron_row_partition": [-1]}},
...         "trainer_options": {
...             "mixed_precision": False, "optimizer_name": "AdamOptimizer", "world_rank": rank, "world_size": 2,
...             "data_parallel_size": 2, "horizontal_parallel_size": 1, "zero_stage": 1,
...         },
...     }
...     _checkpoint_storage.save(state, f"checkpoint{rank}.ortcp")
>>> state = checkpoint.aggregate_checkpoints(["checkpoint0.ortcp", "checkpoint1.ortcp"], pytorch_format=False)
>>> state["optimizer"]["w"]["Moment_1"]
array([[0., 0., 0.],
       [1., 1., 1.]], dtype=float32)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortrain._model_source import PathLike
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.trainer import _checkpoint_storage
from ortrain.trainer._flat_checkpoint import (  # noqa: F401  (names that programs for onnxruntime-training use)
    _CombineZeroCheckpoint,
    _get_checkpoint_name,
    _list_checkpoint_files,
    _split_state_dict,
    experimental_load_checkpoint,
    experimental_load_state_dict,
    experimental_save_checkpoint,
    experimental_state_dict,
)
from ortrain.trainer._merging import Arrays, add_undivided, differ, shaped
from ortrain.trainer._state import (
    FULL,
    GATHERED,
    INFO,
    MODEL,
    OPTIMIZER,
    OPTIONS,
    PARTITION,
    RANDOM,
    RUN,
    SCALER,
    STATISTICS,
)
from ortrain.trainer.distributed import Topology

if TYPE_CHECKING:
    from ortrain._world import World

__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]

USER = "user_dict"
# Sections that must be the same in all processes.
SHARED = (INFO, SCALER)
# Optimizer values that are divided among processes.
MOMENTS = ("Moment_1", "Moment_2")

Shapes = dict[str, tuple[int, ...]]


class _AggregationMode(Enum):
    """Cause of the division of values among files."""

    Zero = 0
    Megatron = 1


# Files of several processes.


def aggregate_checkpoints(paths: Sequence[PathLike], pytorch_format: bool = True) -> dict[str, Any] | None:
    """Merges the checkpoint files of all processes.

    With ZeRO a process has a part of the optimizer state and, in mixed precision, of the weights. With Megatron a
    process has a part of both. All other values are the same in all files.

    Args:
        paths: one file of each process, in any order.
        pytorch_format: if true, the result is a flat dict of the weights.

    Returns:
        The weights by name: tensors if PyTorch is imported, arrays otherwise. Without ``pytorch_format`` the result is
        a state of one process, as from :meth:`ORTTrainer.state_dict`. ``None`` if each file has a complete state.

    Raises:
        AssertionError: for files with options, ranks or values that contradict each other.
        IndexError: if there are fewer files than processes.
        InvalidArgumentError: for a file that is not a checkpoint, or for parts that do not form a complete weight.
        UnsupportedError: for files with accumulated gradients, saved between two updates of the weights.

    >>> from ortrain.trainer import checkpoint
    >>> checkpoint.aggregate_checkpoints(["nowhere.ortcp"])
    Traceback (most recent call last):
    ortrain.trainer._checkpoint_storage.NoCheckpointError: there is no file nowhere.ortcp

    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise TypeError(f"paths must be a list of paths, got {paths!r}")
    files = [os.fspath(path) for path in paths]
    if not files:
        raise IndexError("there are no files to aggregate")
    options = _options(files[0])
    data, horizontal, world = (
        int(options[name]) for name in ("data_parallel_size", "horizontal_parallel_size", "world_size")
    )
    # Before the groups, which list all ranks: a damaged file may name any number.
    if len(files) != world:
        kind = IndexError if len(files) < world else AssertionError
        raise kind(f"Expected number of files to aggregate: {world}, got {len(files)}")
    _, horizontal_groups = _get_parallellism_groups(data, horizontal, world)
    # Stages of a pipeline have different weights, so ZeRO divides them within one group.
    zero_groups, _ = _get_parallellism_groups(world // horizontal, horizontal, world)
    ordered = _order_paths(files, zero_groups, horizontal_groups)
    if int(options["zero_stage"]) == 0:
        if horizontal == 1:
            return None
        # Files of the first data group of each stage.
        firsts = range(0, len(horizontal_groups), data)
        members = [pair for at in firsts for pair in zip(ordered["H"][at], horizontal_groups[at], strict=True)]
        merged = _merged_files(members, _AggregationMode.Megatron, pytorch_format)
    else:
        parts = [
            _merged_files(zip(*group, strict=True), _AggregationMode.Zero, pytorch_format)
            for group in zip(ordered["D"], zero_groups, strict=True)
        ]
        merged = parts[0]
        if horizontal > 1:
            merged = _Merged(_AggregationMode.Megatron, pytorch_format)
            for part, paths_of_part in zip(parts, ordered["D"], strict=True):
                merged.add(part.partition(horizontal), paths_of_part[0])
    state = merged.finished()
    return _flat(state) if pytorch_format else state


def complete_file(paths: Sequence[PathLike], world: World | None) -> str:
    """Returns the file to load out of complete files of all processes: the own file, or the file of rank 0.

    Raises:
        AssertionError: for several files that are not the complete files of one run, one for each rank.

    """
    files = [os.fspath(path) for path in paths]
    if len(files) == 1:
        return files[0]
    options = [_options(path) for path in files]
    ranks = {int(found["world_rank"]): path for path, found in zip(files, options, strict=True)}
    size = int(options[0]["world_size"])
    if size != len(files):
        raise AssertionError(f"Expected number of files to load: 1, got {len(files)}")
    if sorted(ranks) != list(range(size)) or len({(int(found["world_size"]), found.get(RUN)) for found in options}) > 1:
        raise AssertionError(f"the {size} files are not the files of {size} ranks of one run")
    return ranks[world.rank if world is not None and world.size == size else 0]


def _get_parallellism_groups(
    data_parallel_size: int, horizontal_parallel_size: int, world_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the ranks of each data group and of each horizontal group.

    The horizontal rank varies fastest, the pipeline stage slowest.

    Raises:
        AssertionError: if the world size is not a multiple of the group sizes.

    """
    data, horizontal, world = int(data_parallel_size), int(horizontal_parallel_size), int(world_size)
    if min(data, horizontal, world) < 1 or world % (data * horizontal):
        raise AssertionError(
            f"world_size {world} must be a multiple of data_parallel_size {data} times horizontal_parallel_size "
            f"{horizontal}"
        )
    topology = Topology(world, horizontal, data, world // (data * horizontal))
    # A group is listed at its first rank, which has the index 0 in the group.
    coordinates = [topology.coordinates(rank) for rank in range(world)]
    return (
        [topology.data_group(rank) for rank, at in enumerate(coordinates) if at.data == 0],
        [topology.horizontal_group(rank) for rank, at in enumerate(coordinates) if at.horizontal == 0],
    )


def _order_paths(
    paths: Sequence[str],
    data_groups: Sequence[Sequence[int]],
    horizontal_groups: Sequence[Sequence[int]],
) -> dict[str, list[list[str]]]:
    """Returns the files of each data group (``"D"``) and of each horizontal group (``"H"``), in rank order."""
    ranked = sorted(((int(_options(path)["world_rank"]), path) for path in paths), key=lambda pair: pair[0])
    by_rank = [path for _, path in ranked]
    return {
        name: [[by_rank[rank] for rank in group] for group in groups]
        for name, groups in (("D", data_groups), ("H", horizontal_groups))
    }


def _options(path: str) -> dict[str, Any]:
    """Returns the options in a file after a check."""
    found = _checkpoint_storage.load(path, key=OPTIONS)
    names = ("world_rank", "world_size", "data_parallel_size", "horizontal_parallel_size", "zero_stage")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int | np.integer) for name in names):
        raise InvalidArgumentError(f"{path} is not a checkpoint of a trainer: a number is missing in {OPTIONS}")
    return dict(found)


def _merged_files(members: Iterable[tuple[str, int]], mode: _AggregationMode, pytorch_format: bool) -> _Merged:
    """Merges the states in files, each with its rank."""
    merged = _Merged(mode, pytorch_format)
    for path, rank in members:
        state = _load_state(path)
        _check_sections(state, path)
        found = state[OPTIONS]["world_rank"]
        if found != rank:
            raise AssertionError(f"Unexpected rank in file at path {path}. Expected {rank}, got {found}")
        merged.add(state, path)
    return merged


def _check_sections(state: Mapping[str, Any], path: str) -> None:
    """Raises an error for a state with other sections or groups than a trainer saves."""
    for name in (PARTITION, OPTIONS):
        if name not in state:
            raise AssertionError(f"Missing information: {name}")
    weights, optimizer = state.get(MODEL, {}), state.get(OPTIMIZER, {})
    fits = all(isinstance(group, dict) for group in (state[OPTIONS], state[PARTITION], optimizer, weights))
    if fits:
        fits = all(isinstance(group, dict) for group in (*optimizer.values(), weights.get(FULL, {})))
        fits = fits and all(map(_is_partition, state[PARTITION].values()))
    if not fits:
        raise InvalidArgumentError(f"{path} is not a checkpoint of a trainer: its groups have another structure")


def _is_partition(info: Any) -> bool:
    """Returns true if a value describes the division of a weight: the complete shape, and the axis."""
    if not isinstance(info, dict) or "original_dim" not in info:
        return False
    shape, by_rows = np.asarray(info["original_dim"]), np.asarray(info.get("megatron_row_partition", -1))
    return shape.dtype.kind in "iu" and bool((shape >= 0).all()) and by_rows.dtype.kind in "iu" and by_rows.size == 1


class _Merged:
    """State that merges the states of several processes, one after the other."""

    def __init__(self, mode: _AggregationMode, only_weights: bool) -> None:
        self.mode, self.only_weights = mode, only_weights
        self.state: dict[str, Any] = {}
        # Complete shapes of divided weights, and their partition info.
        self.shapes: Shapes = {}
        self.partitions: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def add(self, state: Mapping[str, Any], path: str) -> None:
        """Merges the state of one more process."""
        self.check_options(state[OPTIONS], path)
        mixed = bool(self.options["mixed_precision"])
        self.partitions.update(state[PARTITION])
        _aggregate_model_states(state, self.shapes, self.state, mixed, self.mode)
        if self.only_weights:
            return
        _aggregate_optimizer_states(state, self.shapes, self.state, self.mode)
        if state.get(GATHERED):
            raise UnsupportedError(
                f"{path} has accumulated gradients, which cannot be merged across processes: save after an update of "
                "the weights"
            )
        for name in SHARED:
            if name in state and differ(self.state.setdefault(name, state[name]), state[name]):
                raise AssertionError(f"{name} mismatch among checkpoint files. File: {path}")
        # Seeds may differ between processes; the seed of the first process is used.
        for name in (USER, RANDOM):
            if name in state:
                self.state.setdefault(name, state[name])
        if state.get(STATISTICS):
            # Each process has statistics of its own batches; the statistics of the first process are used.
            self.state[STATISTICS] = state[STATISTICS] | self.state.get(STATISTICS, {})

    def check_options(self, options: Mapping[str, Any], path: str) -> None:
        """Raises an error for a file of another training than the previous files."""
        for name, words in (
            ("mixed_precision", "Mixed precision state"),
            ("world_size", "World size state"),
            ("zero_stage", "Zero stage"),
            ("optimizer_name", "Optimizer name"),
        ):
            if name not in options:
                raise AssertionError(f"Missing information: {OPTIONS}/{name}. File: {path}")
            if self.options.setdefault(name, options[name]) != options[name]:
                raise AssertionError(f"{words} mismatch among checkpoint files. File: {path}")
        if self.options.setdefault(RUN, options.get(RUN)) != options.get(RUN):
            raise AssertionError(f"Files of two different runs cannot be merged. File: {path}")
        self.options.setdefault("world_rank", options["world_rank"])

    def partition(self, horizontal: int) -> dict[str, Any]:
        """Returns the state, merged from ZeRO parts, as the state of one of several Megatron processes."""

        def own(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
            axis = _axis(self.partitions[name])
            if axis is None:
                return shape
            if not shape or shape[axis] % horizontal:
                raise InvalidArgumentError(
                    f"{name!r} has the shape {shape}, which cannot be divided into {horizontal} equal parts"
                )
            sizes = list(shape)
            sizes[axis] //= horizontal
            return tuple(sizes)

        self.reshape(own)
        divided = {name: info for name, info in self.partitions.items() if _axis(info) is not None}
        return self.state | {PARTITION: divided, OPTIONS: self.options}

    def finished(self) -> dict[str, Any]:
        """Returns the merged state as the state of one process."""
        self.reshape(lambda _, shape: shape)
        one = {
            "zero_stage": 0,
            "world_rank": 0,
            "world_size": 1,
            "data_parallel_size": 1,
            "horizontal_parallel_size": 1,
        }
        retained = {name: self.options[name] for name in ("mixed_precision", "optimizer_name")}
        return self.state | {OPTIONS: retained | one}

    def reshape(self, shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]]) -> None:
        """Reshapes merged values to their complete shapes."""
        weights = self.state.get(MODEL, {}).get(FULL, {})
        divided = self.mode is _AggregationMode.Megatron or bool(self.options["mixed_precision"])
        for name, full_shape in self.shapes.items():
            shape = shape_of(name, full_shape)
            states = self.state.get(OPTIMIZER, {}).get(name, {})
            if divided and name in weights:
                weights[name] = shaped(weights[name], shape, f"the weight {name!r}")
            for key in set(MOMENTS) & states.keys():
                states[key] = shaped(states[key], shape, f"{key} of {name!r}")


def _aggregate_model_states(
    rank_state_dict: Mapping[str, Any],
    sharded_states_original_dims: Shapes,
    state_dict: dict[str, Any],
    mixed_precision_enabled: bool,
    mode: _AggregationMode = _AggregationMode.Zero,
) -> None:
    """Merges the weights of one process into the weights of the previous processes.

    Args:
        rank_state_dict: the state of the process.
        sharded_states_original_dims: receives the complete shapes of divided weights.
        state_dict: receives the weights.
        mixed_precision_enabled: if true, ZeRO divides weights too.
        mode: the cause of the division.

    Raises:
        AssertionError: for an undivided weight that differs between processes.

    """
    if MODEL not in rank_state_dict:
        return
    weights = state_dict.setdefault(MODEL, {}).setdefault(FULL, {})
    partitions = rank_state_dict[PARTITION]
    for name, value in rank_state_dict[MODEL].get(FULL, {}).items():
        divided = name in partitions and (mode is _AggregationMode.Megatron or mixed_precision_enabled)
        if divided and (axis := _part(name, partitions[name], sharded_states_original_dims, mode)) is not None:
            _add_part(weights, name, value, axis, f"the weight {name!r}")
        else:
            add_undivided(weights, name, value, f"Value mismatch for model state {name}")


def _aggregate_optimizer_states(
    rank_state_dict: Mapping[str, Any],
    sharded_states_original_dims: Shapes,
    state_dict: dict[str, Any],
    mode: _AggregationMode = _AggregationMode.Zero,
) -> None:
    """Merges the optimizer state of one process into the state so far, as :func:`_aggregate_model_states`.

    Raises:
        AssertionError: for an undivided value that differs between processes.

    """
    if OPTIMIZER not in rank_state_dict:
        return
    partitions = rank_state_dict[PARTITION]
    for name, values in rank_state_dict[OPTIMIZER].items():
        states = state_dict.setdefault(OPTIMIZER, {}).setdefault(name, {})
        for key, value in values.items():
            divided = name in partitions and key in MOMENTS
            if divided and (axis := _part(name, partitions[name], sharded_states_original_dims, mode)) is not None:
                _add_part(states, key, value, axis, f"{key} of {name!r}")
            else:
                add_undivided(states, key, value, f"Value mismatch for model state {name} and optimizer state {key}")
    state_dict.setdefault(OPTIMIZER, {})


def _part(name: str, info: Mapping[str, Any], shapes: Shapes, mode: _AggregationMode) -> int | None:
    """Returns the axis along which the parts of a weight are joined; ``None`` if the weight is not divided."""
    axis = _axis(info) if mode is _AggregationMode.Megatron else 0
    if axis is not None:
        shapes[name] = tuple(int(size) for size in np.asarray(info["original_dim"]).reshape(-1))
    return axis


def _axis(info: Mapping[str, Any]) -> int | None:
    """Returns the axis that Megatron divides: the first for rows, the last for columns; ``None`` if not divided."""
    by_rows = int(np.asarray(info.get("megatron_row_partition", -1)).reshape(()))
    return {0: -1, 1: 0}.get(by_rows)


def _add_part(states: Arrays, name: str, value: npt.NDArray[Any], axis: int, what: str) -> None:
    """Appends a part to the parts so far."""
    try:
        states[name] = np.concatenate((states[name], value), axis) if name in states else value
    except ValueError as error:
        raise InvalidArgumentError(f"the parts of {what} cannot be joined: {error}") from error


def _load_state(path: PathLike) -> dict[str, Any]:
    """Returns the state in a file with the original weight names. In the file, a name with ``/`` is several groups."""
    state = dict(_checkpoint_storage.load(path))
    if isinstance(state.get(MODEL), dict):
        state[MODEL] = {
            precision: _joined_values(weights) if isinstance(weights, dict) else weights
            for precision, weights in state[MODEL].items()
        }
    for section in (OPTIMIZER, PARTITION):
        if isinstance(state.get(section), dict):
            state[section] = _joined_groups(state[section])
    if isinstance(state.get(STATISTICS), dict):
        state[STATISTICS] = _joined_values(state[STATISTICS])
    return state


def _joined_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values below a group by their paths."""
    joined: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, dict):
            joined |= {f"{name}/{below}": found for below, found in _joined_values(value).items()}
        else:
            joined[name] = value
    return joined


def _joined_groups(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the groups with values below a group by their paths."""
    joined: dict[str, Any] = {}
    for name, value in group.items():
        if not isinstance(value, dict):
            joined[name] = value
            continue
        values = {key: found for key, found in value.items() if not isinstance(found, dict)}
        groups = {key: found for key, found in value.items() if isinstance(found, dict)}
        if values or not groups:
            joined[name] = values
        joined |= {f"{name}/{below}": found for below, found in _joined_groups(groups).items()}
    return joined


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights of a state, as tensors if PyTorch is imported."""
    weights = state.get(MODEL, {}).get(FULL, {})
    torch = sys.modules.get("torch")
    return (
        dict(weights)
        if torch is None
        else {name: torch.from_numpy(np.asarray(value)) for name, value in weights.items()}
    )
