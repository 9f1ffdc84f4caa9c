"""Conversion between a trainer's state and :class:`ortrain.api.CheckpointState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortrain import _ortrain
from ortrain._inputs import native_value
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.trainer._state import (
    FULL,
    INFO,
    MODEL,
    OPTIMIZER,
    OPTIONS,
    RANDOM,
    STATISTICS,
    Arrays,
    model_state,
    statistics_of,
)

if TYPE_CHECKING:
    from ortrain._ortrain import OrtValue
    from ortrain.api import CheckpointState
    from ortrain.classic import TrainingSession
    from ortrain.trainer.orttrainer import ORTTrainer

__all__ = ["checkpoint_of", "state_dict_of"]

# Names of the two moments in a CheckpointState.
_MOMENTUM = "momentum0"
_SLOTS = {"Moment_1": _MOMENTUM, "Moment_2": "momentum1"}
_SHARED, _STEP, _COUNT = "shared_optimizer_state", "Step", "Update_Count"


def checkpoint_of(trainer: ORTTrainer, session: TrainingSession) -> CheckpointState:
    """Converts a trainer's weights, statistics, moments, steps and seed to a state of :mod:`ortrain.api`."""
    from ortrain.api import CheckpointState

    assert trainer._onnx_model is not None
    values = model_state(session, trainer._onnx_model, trainer.options) | statistics_of(session)
    trained = session.get_model_state()[FULL]
    optimizer = session.get_optimizer_state()
    updates = _updates(optimizer)
    native = _ortrain.CheckpointState.of_values(
        [(name, native_value(value), name in trained) for name, value in values.items()],
        _slots_of(optimizer, trained),
        step=trainer._train_step_info.optimization_step if updates is None else updates,
        train_step=session._classic.train_steps(),
        learning_rate=float(trainer.optim_config.lr),
    )
    state = CheckpointState(native)
    # The seed of the session. The process seed may have changed since the session was built.
    native.set_seed(trainer._seed)
    return state


def _slots_of(optimizer: Mapping[str, Arrays], trained: Arrays) -> dict[str, dict[str, OrtValue]]:
    """Returns the moments as slots of a state.

    For SGD the slots are a momentum of zeros, which a state of SGD requires.
    """
    if not optimizer:
        wide = {weight: np.float64 if value.dtype.itemsize > 4 else np.float32 for weight, value in trained.items()}
        return {
            weight: {_MOMENTUM: native_value(np.zeros(value.shape, wide[weight]))} for weight, value in trained.items()
        }
    return {
        weight: {_SLOTS[name]: native_value(value) for name, value in own.items() if name in _SLOTS}
        for weight, own in optimizer.items()
        if weight != _SHARED
    }


def _updates(optimizer: Mapping[str, Arrays]) -> int | None:
    """Returns the largest update count of all weights, or ``None`` for an optimizer that does not count."""
    counts = [own[name] for own in optimizer.values() for name in (_COUNT, _STEP) if name in own]
    return max(int(count.reshape(())) for count in counts) - 1 if counts else None


def state_dict_of(state: CheckpointState, trainer: ORTTrainer, session: TrainingSession) -> dict[str, Any]:
    """Converts a state of :mod:`ortrain.api` to the state of a trainer.

    Raises:
        InvalidArgumentError: for a parameter that is not an initializer of the trainer's model, a trained weight that
            is missing from the state, or the state of another optimizer.

    """
    assert trainer._onnx_model is not None
    initializers = [tensor.name for tensor in trainer._onnx_model.graph.initializer]
    trained = session.get_model_state()[FULL]
    parameters = dict(state.parameters)
    strange = [name for name in parameters if name not in initializers]
    if strange:
        raise InvalidArgumentError(
            f"parameter {strange[0]!r} of the state is not an initializer of the model{hint(strange[0], initializers)}"
        )
    missing = [name for name in trained if name not in parameters]
    if missing:
        raise InvalidArgumentError(f"parameter {missing[0]!r}, which the trainer trains, is missing in the state")
    train_steps, updates = state._native.steps()
    there = session.get_optimizer_state()
    optimizer: dict[str, dict[str, Any]] = {}
    for weight in trained:
        slots = parameters[weight].slots
        keeps = weight in there
        has_moments = _has_moments(weight, slots, trainer.optim_config.name, keeps)
        if has_moments and keeps:
            optimizer[weight] = {name: slots[slot] for name, slot in _SLOTS.items()}
            if _COUNT in there[weight]:
                optimizer[weight][_COUNT] = np.array([updates + 1], np.int64)
    if optimizer and _SHARED in there:
        optimizer[_SHARED] = {_STEP: np.array([updates + 1], np.int64)}
    statistics = statistics_of(session)
    values = {name: parameter.data for name, parameter in parameters.items()}
    return {
        MODEL: {FULL: {name: value for name, value in values.items() if name not in statistics}},
        STATISTICS: {name: value for name, value in values.items() if name in statistics},
        RANDOM: {"seed": state.seed, "train_steps": train_steps},
        OPTIMIZER: optimizer,
        OPTIONS: {"optimizer_name": trainer.optim_config.name},
        INFO: {"step": updates * trainer._accumulated, "optimization_step": updates},
    }


def _has_moments(weight: str, slots: Mapping[str, npt.NDArray[Any]], optimizer: str, keeps: bool) -> bool:
    """Returns true if a state has two moments of a weight. Raises an error for slots that the optimizer cannot use."""
    if set(slots) == set(_SLOTS.values()):
        return True
    if not slots:
        return False
    if set(slots) == {_MOMENTUM}:
        # A state of SGD always has a momentum, which stays zero if the momentum setting is off.
        if not slots[_MOMENTUM].any():
            return False
        if not keeps:
            raise InvalidArgumentError(
                f"the state has a momentum of {weight!r} that is not 0, but {optimizer} has no momentum and cannot "
                "continue from it"
            )
    raise InvalidArgumentError(
        f"the state has {', '.join(slots)} of {weight!r}, but {optimizer} uses "
        f"{', '.join(_SLOTS.values()) if keeps else 'no moments'}"
    )
