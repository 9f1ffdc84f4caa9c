"""State of a trainer: construction for ``state_dict``, and checks and loading for ``load_state_dict``."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortrain._inputs import native_value
from ortrain._stacklevel import level_of_user
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from ortrain.trainer._values import as_array

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

    from ortrain._ortrain import OrtValue
    from ortrain._world import World
    from ortrain.classic import TrainingSession
    from ortrain.trainer.orttrainer import ORTTrainer

__all__ = [
    "Loaded",
    "check_ranks",
    "checked",
    "copy_of",
    "draws_random_numbers",
    "is_divided",
    "model_state",
    "named_for_files",
    "parts_of_rank",
    "put_rest",
    "put_weights",
    "restored_nodes",
    "state_of",
    "statistics_of",
]

Arrays = dict[str, npt.NDArray[Any]]

FULL = "full_precision"
MODEL, OPTIMIZER, OPTIONS, INFO = "model", "optimizer", "trainer_options", "train_step_info"
PARTITION, GATHERED, SCALER = "partition_info", "accumulated_gradients", "loss_scaler"
STATISTICS, RANDOM = "running_statistics", "random_numbers"
# Key of the number of calls in the current accumulation window. Stored only together with accumulated gradients.
IN_WINDOW = "accumulated_steps"
# Options in files of several processes: number of the job; true if the moments of the processes differ.
RUN, ADASUM = "run", "adasum"
# Name of the number of updates in the state of a weight. Other values have the shape of the weight.
COUNT = "Update_Count"
# Range of a seed: a signed 64-bit integer.
_SEEDS = range(-(2**63), 2**63)
# Index of the Dropout input that turns dropping on.
_TRAINING_MODE = 2


@dataclass
class Loaded:
    """A checked state that matches a trainer."""

    weights: Arrays
    """All weights, trained or frozen."""
    optimizer: dict[str, Arrays]
    """State of the optimizer, by weight and name."""
    statistics: Arrays
    """All running statistics."""
    seed: int
    """The seed of random numbers."""
    train_steps: int
    """Number of runs with gradients, which selects the random numbers."""
    steps: tuple[int, int] | None = None
    """Numbers of calls and updates, if the state has them."""
    gathered: Arrays = field(default_factory=dict)
    """Accumulated gradients within an accumulation window."""
    in_window: int = 0
    """Number of calls in the accumulated gradients."""
    scaler: tuple[float, int] | None = None
    """Loss scale, and number of steps since its last change."""


# Current state.


def model_state(session: TrainingSession, model: ModelProto, options: Any) -> Arrays:
    """Returns trained weights, and weights frozen in the options, including frozen running statistics."""
    weights: Arrays = session.get_model_state()[FULL]
    frozen, statistics = set(options.utils.frozen_weights), statistics_of(session)
    for tensor in model.graph.initializer:
        if tensor.name in frozen:
            weights[tensor.name] = statistics[tensor.name] if tensor.name in statistics else _array_of(tensor)
    return weights


def state_of(session: TrainingSession, model: ModelProto, trainer: ORTTrainer) -> dict[str, Any]:
    """Returns the complete state."""
    options, info = trainer.options, trainer._train_step_info
    distributed = options.distributed
    stage = distributed.deepspeed_zero_optimization.stage
    state: dict[str, Any] = {
        MODEL: {FULL: model_state(session, model, options)},
        OPTIMIZER: session.get_optimizer_state(),
        OPTIONS: {
            "mixed_precision": bool(options.mixed_precision.enabled),
            "zero_stage": int(stage),
            "world_rank": int(distributed.world_rank),
            "world_size": int(distributed.world_size),
            "optimizer_name": trainer.optim_config.name,
            "data_parallel_size": int(distributed.data_parallel_size),
            "horizontal_parallel_size": int(distributed.horizontal_parallel_size),
        },
        INFO: {"optimization_step": int(info.optimization_step), "step": int(info.step)},
    }
    if trainer._world is not None:
        state[OPTIONS][RUN] = trainer._world.run
        if distributed.enable_adasum and not stage:
            state[OPTIONS][ADASUM] = True
    if stage > 0 or distributed.horizontal_parallel_size > 1:
        state[PARTITION] = session.get_partition_info_map()
    scaler = options.mixed_precision.loss_scaler
    if scaler is not None:
        count = getattr(scaler, "_stable_steps_count", 0)
        state[SCALER] = {"loss_scale": np.array([scaler.loss_scale]), "stable_steps": int(count)}
    rest = {STATISTICS: statistics_of(session), GATHERED: _arrays(session._classic.gathered())}
    state |= {name: section for name, section in rest.items() if section}
    if GATHERED in state:
        state[INFO][IN_WINDOW] = trainer._in_window
    if draws_random_numbers(model):
        state[RANDOM] = {"seed": trainer._seed, "train_steps": session._classic.train_steps()}
    return state


def parts_of_rank(state: dict[str, Any], session: TrainingSession, frozen: Sequence[str]) -> dict[str, Any]:
    """Returns a state for the file of this process. ZeRO in mixed precision saves weights where they are updated."""
    options = state[OPTIONS]
    if not (options["zero_stage"] and options["mixed_precision"] and options["world_size"] > 1):
        return state
    weights: Arrays = {}
    for name, value in state[MODEL][FULL].items():
        start, stop = (0, value.size) if name in frozen else session._classic.updated_elements(name)
        if stop - start == value.size:
            weights[name] = value
        elif start < stop:
            weights[name] = value.reshape(-1)[start:stop]
    return {**state, MODEL: {FULL: weights}}


def check_ranks(state: Mapping[str, Any], world: World | None, path: str) -> None:
    """Raises an error for a file with values of one process that this process cannot continue from.

    Raises:
        UnsupportedError: for moments of Adasum, and for accumulated gradients, of another rank or another number of
            ranks.

    """
    options = state.get(OPTIONS)
    if not isinstance(options, Mapping):
        return
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    saved = tuple(int(options.get(name, default)) for name, default in (("world_rank", 0), ("world_size", 1)))
    if saved == (rank, size) or saved[1] == 1:
        return
    here = f"rank {rank} of {size}" if size > 1 else "one process"
    if options.get(ADASUM) and OPTIMIZER in state:
        raise UnsupportedError(
            f"{path} has the moments of rank {saved[0]} of {saved[1]}. With Adasum the moments of each rank differ, so "
            f"{here} cannot continue from them: start {saved[1]} ranks and load the file of each rank, or save with "
            "include_optimizer_states=False"
        )
    if state.get(GATHERED):
        raise UnsupportedError(
            f"{path} has the accumulated gradients of rank {saved[0]} of {saved[1]}, which {here} cannot use: save "
            "after an update of the weights"
        )


def statistics_of(session: TrainingSession) -> Arrays:
    """Returns the running statistics that the training updates."""
    return _arrays(session._classic.running_statistics())


def draws_random_numbers(model: ModelProto) -> bool:
    """Returns true if the model, a subgraph or a function has a Dropout with a training mode."""
    return _has_dropout(model.graph.node) or any(_has_dropout(function.node) for function in model.functions)


def _has_dropout(nodes: Iterable[NodeProto]) -> bool:
    for node in nodes:
        if node.op_type == "Dropout" and len(node.input) > _TRAINING_MODE and node.input[_TRAINING_MODE]:
            return True
        if any(_has_dropout(graph.node) for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)):
            return True
    return False


def _arrays(values: Mapping[str, OrtValue]) -> Arrays:
    return {name: np.array(values[name].array()) for name in sorted(values)}


# Checks of a state to load.


def checked(
    state: Mapping[str, Any], session: TrainingSession, model: ModelProto, trainer: ORTTrainer, strict: bool
) -> Loaded:
    """Checks a state and completes it with current values. Nothing is changed."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state must be a dict, got {type(state).__name__}")
    steps = _steps(state)
    current: dict[str, dict[str, Any]] = {
        MODEL: {FULL: model_state(session, model, trainer.options)},
        OPTIMIZER: session.get_optimizer_state(),
    }
    sections: dict[str, Mapping[str, Any]] = {}
    for name in (MODEL, OPTIMIZER):
        section = _section(state, name)
        if section is not None:
            sections[name] = section
    if FULL in sections.get(MODEL, {}):
        names = [tensor.name for tensor in model.graph.initializer]
        sections[MODEL] = {**sections[MODEL], FULL: _joined(sections[MODEL][FULL], names)}
    if OPTIMIZER in sections:
        sections[OPTIMIZER] = _joined(sections[OPTIMIZER], current[OPTIMIZER], of_dicts=True)
    if strict:
        divided = trainer.options.distributed.deepspeed_zero_optimization.stage > 0
        for name, loaded in sections.items():
            reason = _another_optimizer(state, trainer) if name == OPTIMIZER else ""
            _check_names(current[name], loaded, f"state_dict[{name}]", divided, reason)
            for key, there in current[name].items():
                _check_names(there, loaded[key], f"state_dict[{name}][{key}]", divided, reason)
    weights = _weights(sections.get(MODEL, {}).get(FULL, {}), session, model, strict)
    optimizer: dict[str, Arrays] = session.get_optimizer_state()
    if OPTIMIZER in sections:
        _check_optimizer(state, trainer)
        optimizer = _optimizer(optimizer, sections[OPTIMIZER], session)
    seed, train_steps = _random_numbers(state, session, trainer, steps)
    gathered = _gathered(state, weights, session)
    return Loaded(
        weights,
        optimizer,
        _statistics(state, session, weights),
        seed,
        train_steps,
        steps,
        gathered,
        _calls_in_window(state, trainer, steps) if gathered else 0,
        _scaler(state, trainer),
    )


def _section(state: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns a section of a state. Warns and returns None if the section is missing."""
    if name not in state:
        warnings.warn(f"Missing key: {name} in state_dict", UserWarning, stacklevel=level_of_user())
        return None
    section = state[name]
    if not isinstance(section, Mapping) or not all(isinstance(part, Mapping) for part in section.values()):
        raise InvalidArgumentError(f"state_dict[{name}] must be a dict of dicts of arrays, got {section!r:.60}")
    return section


def _joined(section: Mapping[str, Any], names: Iterable[str], *, of_dicts: bool = False) -> dict[str, Any]:
    """Returns a section by weight names. A file splits a name with slashes into groups, which are joined again here."""
    if not isinstance(section, Mapping):
        raise InvalidArgumentError(f"a section of a state must be a dict with names as keys, got {section!r:.60}")
    known = {_parts(name): name for name in names}
    found: dict[str, Any] = {}

    def visit(above: tuple[str, ...], group: Mapping[str, Any]) -> None:
        for key, value in group.items():
            path = (*above, *_parts(key))
            is_group = isinstance(value, Mapping)
            if of_dicts:
                is_group = is_group and any(isinstance(item, Mapping) for item in value.values())
            if is_group and path not in known:
                visit(path, value)
            else:
                found[known.get(path, key if not above else "/".join(path))] = value

    visit((), section)
    return found


def named_for_files(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with names that HDF5 can store: no slash at the start or end, and no two in a row."""
    named: dict[str, Any] = {}
    for name, value in state.items():
        path = "/".join(_parts(name))
        if path in named:
            raise InvalidArgumentError(f"the weight {name!r} and another weight have the same name in a file, {path!r}")
        named[path] = named_for_files(value) if isinstance(value, Mapping) else value
    return named


def _parts(name: str) -> tuple[str, ...]:
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a name in a state must be a str, got {name!r:.60}")
    return tuple(part for part in name.split("/") if part)


def _steps(state: Mapping[str, Any]) -> tuple[int, int] | None:
    if INFO not in state:
        warnings.warn(f"Missing key: {INFO} in state_dict", UserWarning, stacklevel=level_of_user())
        return None
    counts = [_count(state[INFO], INFO, name) for name in ("step", "optimization_step")]
    return counts[0], counts[1]


def _count(section: Any, where: str, name: str) -> int:
    """Returns a checked count from a section of a state."""
    value: Any = section.get(name) if isinstance(section, Mapping) else None
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidArgumentError(f"state_dict[{where}][{name}] must be an integer of at least 0, got {value!r:.60}")
    if count >= 1 << 63:
        raise OutOfRangeError(f"state_dict[{where}][{name}] must be below 2**63, got {value!r:.60}")
    return count


def is_divided(options: Any) -> bool:
    """Returns true if a file with these ``trainer_options`` has only a part of a state.

    Raises:
        InvalidArgumentError: for options without the required counts.

    """
    return _count(options, OPTIONS, "zero_stage") > 0 or _count(options, OPTIONS, "horizontal_parallel_size") > 1


def _check_names(
    there: Mapping[str, Any], loaded: Mapping[str, Any], where: str, divided: bool, reason: str = ""
) -> None:
    missing = [name for name in there if name not in loaded]
    if missing:
        raise InvalidArgumentError(f"Missing keys: {missing} in {where}{reason}")
    unexpected = [name for name in loaded if name not in there]
    if unexpected and not divided:
        near = reason or hint(unexpected[0], there)
        raise InvalidArgumentError(f"Unexpected keys: {unexpected} in {where}{near}")


def _weights(loaded: Mapping[str, Any], session: TrainingSession, model: ModelProto, strict: bool) -> Arrays:
    """Returns the trained weights, replaced and extended by the weights of the state."""
    weights: Arrays = session.get_model_state()[FULL]
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in loaded.items():
        if name not in initializers:
            if strict:
                raise InvalidArgumentError(
                    f"weight {name!r} of the state is not an initializer of the model{hint(name, initializers)}"
                )
            continue
        weights[name] = _fitting(f"weight {name!r}", value, _array_of(initializers[name]))
    return weights


def _fitting(what: str, value: Any, there: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a value of a state as an array after a check of its type and shape against the current value."""
    array = as_array(value)
    if array.dtype != there.dtype or array.shape != there.shape:
        raise InvalidArgumentError(
            f"{what} is {there.dtype}{list(there.shape)}, but the state has {array.dtype}{list(array.shape)}"
        )
    return array


def _optimizer_name(state: Mapping[str, Any]) -> Any:
    """Returns the name of the optimizer that a state belongs to."""
    options = state.get(OPTIONS)
    found: Any = options.get("optimizer_name") if isinstance(options, Mapping) else None
    return found.decode(errors="replace") if isinstance(found, bytes) else found


def _another_optimizer(state: Mapping[str, Any], trainer: ORTTrainer) -> str:
    """Returns the end of the error message about state names if the state belongs to another optimizer."""
    found, own = _optimizer_name(state), trainer.optim_config.name
    return "" if found is None or found == own else f": the state belongs to {found}, but the trainer has {own}"


def _check_optimizer(state: Mapping[str, Any], trainer: ORTTrainer) -> None:
    if OPTIONS not in state:
        raise KeyError(f"{OPTIONS}: this section, with the name of the optimizer, is missing in the state")
    found = _optimizer_name(state)
    if not isinstance(found, str):
        raise InvalidArgumentError(f"state_dict[{OPTIONS}][optimizer_name] must be a text, got {found!r:.60}")
    if found != trainer.optim_config.name:
        raise AssertionError(f"Optimizer mismatch: expected {trainer.optim_config.name}, got {found}")


def _optimizer(
    there: dict[str, Arrays], loaded: Mapping[str, Mapping[str, Any]], session: TrainingSession
) -> dict[str, Arrays]:
    """Returns the optimizer state, replaced by the values of the loaded state. Unknown names are ignored.

    With ZeRO, a process takes its own parts out of complete values.
    """
    shared = session.get_partition_info_map()

    def fitted(weight: str, name: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = as_array(loaded[weight][name])
        if weight in shared and name != COUNT and list(found.shape) == shared[weight]["original_dim"]:
            start, stop = session._classic.updated_elements(weight)
            found = found.reshape(-1)[start:stop]
        return _fitting(f"{name} of {weight!r}", found, value)

    return {
        weight: {
            name: fitted(weight, name, value) if name in loaded.get(weight, {}) else value
            for name, value in own.items()
        }
        for weight, own in there.items()
    }


def _random_numbers(
    state: Mapping[str, Any], session: TrainingSession, trainer: ORTTrainer, steps: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns the seed and the run count for random numbers, from the state or else from the current values."""
    section = state.get(RANDOM)
    if section is None:
        return trainer._seed, session._classic.train_steps() if steps is None else steps[0]
    seed: Any = section.get("seed") if isinstance(section, Mapping) else None
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or int(seed) not in _SEEDS:
        raise InvalidArgumentError(f"state_dict[{RANDOM}][seed] must be a 64-bit integer, got {seed!r}")
    return int(seed), _count(section, RANDOM, "train_steps")


def _statistics(state: Mapping[str, Any], session: TrainingSession, weights: Arrays) -> Arrays:
    """Returns the running statistics, replaced by the values of the state. Frozen statistics come from the weights."""
    there = statistics_of(session)
    there |= {name: weights[name] for name in there if name in weights}
    section = _joined(state.get(STATISTICS, {}), there)
    strange = [name for name in section if name not in there]
    if strange:
        raise InvalidArgumentError(f"Unexpected keys: {strange} in state_dict[{STATISTICS}]{hint(strange[0], there)}")
    return there | {name: _fitting(f"{name!r}", value, there[name]) for name, value in section.items()}


def _gathered(state: Mapping[str, Any], weights: Arrays, session: TrainingSession) -> Arrays:
    """Returns the accumulated gradients of a state that was saved within an accumulation window."""
    section = state.get(GATHERED)
    if not section:
        return {}
    trained = session.get_model_state()[FULL]
    section = _joined(section, trained)
    _check_names(trained, section, f"state_dict[{GATHERED}]", False)
    return {name: _fitting(f"the gradient of {name!r}", section[name], weights[name]) for name in trained}


def _calls_in_window(state: Mapping[str, Any], trainer: ORTTrainer, steps: tuple[int, int] | None) -> int:
    """Returns the number of calls in the accumulated gradients. It must be less than the window of the options."""
    window = int(trainer.options.batch.gradient_accumulation_steps)
    if steps is not None and IN_WINDOW in state[INFO]:
        calls = _count(state[INFO], INFO, IN_WINDOW)
    else:
        calls = (trainer._train_step_info.step if steps is None else steps[0]) % window
    if not 0 < calls < window:
        raise InvalidArgumentError(
            f"the state was saved after {calls} calls of a gradient accumulation window, but "
            f"batch.gradient_accumulation_steps is {window}"
        )
    return calls


def _scaler(state: Mapping[str, Any], trainer: ORTTrainer) -> tuple[float, int] | None:
    section = state.get(SCALER)
    if section is None or trainer._scaler is None:
        return None
    value: Any = section.get("loss_scale") if isinstance(section, Mapping) else None
    try:
        scale = float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise InvalidArgumentError(
            f"state_dict[{SCALER}][loss_scale] must be a finite number above 0, got {value!r:.60}"
        )
    return scale, _count(section, SCALER, "stable_steps")


# Loading of a checked state.


def put_rest(session: TrainingSession, trainer: ORTTrainer, loaded: Loaded) -> None:
    """Sets the values that a new session does not start from: accumulated gradients, counts, the loss scale."""
    classic = session._classic
    classic.load_running_statistics({name: native_value(value) for name, value in loaded.statistics.items()})
    classic.load_gathered({name: native_value(value) for name, value in loaded.gathered.items()})
    classic.set_seed(loaded.seed)
    classic.set_train_steps(loaded.train_steps)
    scaler = trainer._scaler
    # A user's scaler may refuse a scale, so it is set before anything else in the trainer.
    if scaler is not None and loaded.scaler is not None:
        scaler.loss_scale, count = loaded.scaler
        if hasattr(scaler, "_stable_steps_count"):
            scaler._stable_steps_count = count
    trainer._seed, trainer._in_window = loaded.seed, loaded.in_window
    info = trainer._train_step_info
    if loaded.steps is not None:
        info.step, info.optimization_step = loaded.steps


def copy_of(model: ModelProto) -> ModelProto:
    """Returns a copy of a model."""
    copied = type(model)()
    copied.CopyFrom(model)
    return copied


@contextmanager
def restored_nodes(model: ModelProto) -> Iterator[None]:
    """Restores the nodes of a model and the types of its values after an exception."""
    graph = type(model.graph)()
    graph.node.extend(model.graph.node)
    graph.value_info.extend(model.graph.value_info)
    try:
        yield
    except BaseException:
        del model.graph.node[:], model.graph.value_info[:]
        model.graph.node.extend(graph.node)
        model.graph.value_info.extend(graph.value_info)
        raise


def put_weights(model: ModelProto, weights: Arrays) -> None:
    """Replaces values of initializers. The replaced initializers move to the end and keep their order."""
    from onnx import numpy_helper

    initializers = model.graph.initializer
    names = [tensor.name for tensor in initializers if tensor.name in weights]
    retained = [tensor for tensor in initializers if tensor.name not in weights]
    replacements = [numpy_helper.from_array(np.asarray(weights[name], order="C"), name) for name in names]
    copies = [type(tensor).FromString(tensor.SerializeToString()) for tensor in retained]
    del initializers[:]
    initializers.extend([*copies, *replacements])


def _array_of(tensor: TensorProto) -> npt.NDArray[Any]:
    from onnx import numpy_helper

    return np.array(numpy_helper.to_array(tensor))
