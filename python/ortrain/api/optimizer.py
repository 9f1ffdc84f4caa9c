"""Optimizers: models that update the parameters from the gradients.

>>> from ortrain.api.optimizer import Optimizer
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> round(optimizer.get_learning_rate(), 6)
0.001
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ortrain import _numbers, _ortrain
from ortrain._model_source import ModelLike, model_source
from ortrain.api.module import Module
from ortrain.errors import OrtrainError, _warn_of_gradients

if TYPE_CHECKING:
    from ortrain.optim import ParameterGroup

__all__ = ["Optimizer"]


class Optimizer:
    """Optimizer model on the state of a module. The state holds the step and the moments once, for all optimizers.

    A copy (``copy.deepcopy``) or an unpickled optimizer has a module and a state of its own. Copy a module and its
    optimizer together, ``copy.deepcopy((module, optimizer))``: the two copies then share one state. Gradients are not
    kept.

    Args:
        optimizer_uri: a path, the bytes of a model, or an ``onnx.ModelProto``.
        module: the module with the gradients.
        replace: True to replace another optimizer on the state. Its slots are kept if their names and shapes are the
            same. Other slots start anew, and settings come from the model.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or is no optimizer model.
        OrtrainError: if the state has the slots of another optimizer and ``replace`` is false.

    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> optimizer
    Optimizer(step=0, learning_rate=0.001)
    >>> _ = module(x, labels)
    >>> before = state.parameters["fc2.bias"].data.copy()
    >>> optimizer.step()
    >>> np.array_equal(state.parameters["fc2.bias"].data, before)
    False

    """

    def __init__(self, optimizer_uri: ModelLike, module: Module, *, replace: bool = False) -> None:
        source = model_source(optimizer_uri)
        if not isinstance(module, Module):
            raise TypeError(f"module must be a Module, got {type(module).__name__}")
        self._module = module
        self._source = source
        self._native = _ortrain.Optimizer(source, module._native, replace=replace)

    def __reduce__(self) -> Any:
        return Optimizer, (self._source, self._module)

    def __repr__(self) -> str:
        try:
            step, rate = self._module._state._native.steps()[1], self.get_learning_rate()
        except OrtrainError as error:
            return f"Optimizer(cannot be read now: {error})"
        return f"Optimizer(step={step}, learning_rate={rate:.6g})"

    def step(self) -> float | None:
        """Update the trainable parameters from the module's gradients.

        The gradients do not change, unless the optimizer model clips them (``max_norm``): then they are the clipped
        gradients.

        Returns:
            The L2 norm of all gradients together before they were clipped; ``None`` without clipping.

        Raises:
            OrtrainError: if the state is nominal, and if the module ran no training step since
                :meth:`Module.lazy_reset_grad`.

        Warns:
            TrainingWarning: if the module ran no training step at all, or the step before used the same gradients.

        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> module.lazy_reset_grad()

        """
        update = self._native.step()
        _warn_of_gradients(update.warning)
        return update.norm

    @property
    def groups(self) -> list[ParameterGroup]:
        """Parameter groups of the artifacts, followed by the group of all other parameters.

        The last group only exists if there are other parameters. Settings of groups can be changed and take effect at
        the next step. Settings of onnxruntime-training's optimizers (plain AdamW and SGD) are in the optimizer model
        and cannot be changed.

        >>> optimizer.groups
        [ParameterGroup(4 parameters, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0)]
        """
        # Scripts without groups do not import this module.
        from ortrain.optim._live import groups_of

        return groups_of(self._native, self._module._state._native)

    @property
    def max_norm(self) -> float | None:
        """Maximum norm of all gradients together, to which they are clipped; ``None`` without clipping by the norm.

        It can be set to another number, unless the optimizer is one of onnxruntime-training's.

        >>> optimizer.max_norm is None
        True
        """
        norm: float | None = json.loads(self._native.spec()).get("max_norm")
        return norm

    @max_norm.setter
    def max_norm(self, norm: float) -> None:
        self._native.change(json.dumps(json.loads(self._native.spec()) | {"max_norm": float(norm)}))

    @property
    def step_count(self) -> int:
        """Number of completed steps, including the steps before the checkpoint; schedules use this number.

        A step that the optimizer model skips, because gradients are not finite, does not count.

        >>> optimizer.step_count
        0
        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> optimizer.step_count
        1
        """
        return self._native.step_count()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next steps; a scheduler overwrites it at its own next step.

        >>> optimizer.set_learning_rate(0.5)
        >>> optimizer.get_learning_rate()
        0.5
        """
        self._native.set_learning_rate(_numbers.rate("learning_rate", learning_rate))

    def get_learning_rate(self) -> float:
        """Return the current rate, a float32. It is 0.001 unless it was set, scheduled or loaded.

        >>> round(optimizer.get_learning_rate(), 6)
        0.001
        """
        return self._native.learning_rate()
