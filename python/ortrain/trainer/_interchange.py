"""From a trainer to :class:`ortrain.api.CheckpointState` and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain
from ortrain._inputs import native_value
from ortrain._near import hint
from ortrain.errors import InvalidArgumentError
from ortrain.trainer._state import FULL, INFO, MODEL, OPTIMIZER, OPTIONS, model_state

if TYPE_CHECKING:
    from ortrain.api import CheckpointState
    from ortrain.classic import TrainingSession
    from ortrain.trainer.orttrainer import ORTTrainer

__all__ = ["checkpoint_of", "state_dict_of"]

# What the two moments are called in a CheckpointState.
_SLOTS = {"Moment_1": "momentum0", "Moment_2": "momentum1"}
_SHARED, _STEP, _COUNT = "shared_optimizer_state", "Step", "Update_Count"


def checkpoint_of(trainer: ORTTrainer, session: TrainingSession) -> CheckpointState:
    """Weights, moments and steps of a trainer as a state of :mod:`ortrain.api`."""
    from ortrain.api import CheckpointState

    assert trainer._onnx_model is not None
    weights = model_state(session, trainer._onnx_model, trainer.options)
    trained = session.get_model_state()[FULL]
    info = trainer._train_step_info
    slots = {
        weight: {_SLOTS[name]: native_value(value) for name, value in own.items() if name in _SLOTS}
        for weight, own in session.get_optimizer_state().items()
        if weight != _SHARED
    }
    native = _ortrain.CheckpointState.of_values(
        [(name, native_value(value), name in trained) for name, value in weights.items()],
        slots,
        step=info.optimization_step,
        train_step=info.step,
        learning_rate=float(trainer.optim_config.lr),
    )
    return CheckpointState(native)


def state_dict_of(state: CheckpointState, trainer: ORTTrainer, session: TrainingSession) -> dict[str, Any]:
    """A state of :mod:`ortrain.api` as the state of a trainer.

    Raises:
        InvalidArgumentError: for a parameter that is no initializer of the trainer's model, a trained weight that the
            state does not have, and a state of another optimizer.

    """
    assert trainer._onnx_model is not None
    initializers = [tensor.name for tensor in trainer._onnx_model.graph.initializer]
    trained = session.get_model_state()[FULL]
    parameters = dict(state.parameters)
    strange = [name for name in parameters if name not in initializers]
    if strange:
        raise InvalidArgumentError(
            f"the state has the parameter {strange[0]!r}, which is no initializer of the model"
            f"{hint(strange[0], initializers)}"
        )
    missing = [name for name in trained if name not in parameters]
    if missing:
        raise InvalidArgumentError(f"the state has no parameter {missing[0]!r}, which the trainer trains")
    updates = state._native.steps()[1]
    there = session.get_optimizer_state()
    optimizer: dict[str, dict[str, Any]] = {}
    for weight in trained:
        slots = parameters[weight].slots
        if slots and set(slots) != set(_SLOTS.values()):
            raise InvalidArgumentError(
                f"the optimizer of the state keeps {', '.join(slots)} of {weight!r}, but {trainer.optim_config.name} "
                f"starts from {', '.join(_SLOTS.values())}"
            )
        if slots and weight in there:
            optimizer[weight] = {name: slots[slot] for name, slot in _SLOTS.items()}
            if _COUNT in there[weight]:
                optimizer[weight][_COUNT] = np.array([updates + 1], np.int64)
    if optimizer and _SHARED in there:
        optimizer[_SHARED] = {_STEP: np.array([updates + 1], np.int64)}
    return {
        MODEL: {FULL: {name: parameter.data for name, parameter in parameters.items()}},
        OPTIMIZER: optimizer,
        OPTIONS: {"optimizer_name": trainer.optim_config.name},
        INFO: {"step": updates * trainer._accumulated, "optimization_step": updates},
    }
