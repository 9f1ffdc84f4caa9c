"""What turns gradients into better parameters.

>>> from ortrain.api.optimizer import Optimizer
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> round(optimizer.get_learning_rate(), 6)
0.001
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ortrain import _numbers, _ortrain
from ortrain._sources import ModelLike, model_source
from ortrain.api.module import Module
from ortrain.errors import OrtrainError, _warn_of_gradients

if TYPE_CHECKING:
    from ortrain.optim import ParameterGroup

__all__ = ["Optimizer"]


class Optimizer:
    """An optimizer model on the state of a module. Step and moments live in the state, one set for all optimizers.

    Args:
        optimizer_uri: a path, the bytes of a model, or an ``onnx.ModelProto``.
        module: whose gradients it uses.
        replace: take the place of another optimizer on the state. Slots of the other one are kept where name and shape
            are the same; others start anew, and settings are those of the model.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or is no optimizer model.
        OrtrainError: if the state has the slots of another optimizer, and it is not to be replaced.

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
            raise TypeError(f"module is a Module, not {type(module).__name__}")
        self._module = module
        self._native = _ortrain.Optimizer(source, module._native, replace=replace)

    def __repr__(self) -> str:
        try:
            step, rate = self._module._state._native.steps()[1], self.get_learning_rate()
        except OrtrainError as error:
            return f"Optimizer(cannot be read now: {error})"
        return f"Optimizer(step={step}, learning_rate={rate:.6g})"

    def step(self) -> float | None:
        """Update the trainable parameters from the module's gradients.

        These stay as they are, unless the optimizer model clips them (``max_norm``): then they are the clipped ones.

        Returns:
            The L2 norm that all gradients had together before they were clipped; ``None`` if nothing clips them.

        Raises:
            OrtrainError: if the state is nominal, and if the module ran no training step since
                :meth:`Module.lazy_reset_grad`.

        Warns:
            TrainingWarning: if the module ran no training step at all, or the step before took the same gradients.

        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> module.lazy_reset_grad()

        """
        doubt, norm = self._native.step()
        _warn_of_gradients(doubt)
        return norm

    @property
    def groups(self) -> list[ParameterGroup]:
        """The groups of parameters that were given when the artifacts were made, and last that of all others.

        The last one is there if there are others. Settings of groups can be set, and count from the next step on; those
        of onnxruntime-training's optimizers (plain AdamW and SGD) are in the optimizer model and cannot.

        >>> optimizer.groups
        [ParameterGroup(4 parameters, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0)]
        """
        # Scripts that use none do not import what groups are.
        from ortrain.optim._live import groups_of

        return groups_of(self._native, self._module._state._native)

    @property
    def max_norm(self) -> float | None:
        """The norm that all gradients together are clipped to; ``None`` if they are not clipped by it.

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
        """The number of steps done, those before the checkpoint among them; schedules count by it.

        A step that the optimizer model skips (gradients that are not finite) does not count.

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
        """The current rate, a float32; 0.001 unless set, scheduled or loaded.

        >>> round(optimizer.get_learning_rate(), 6)
        0.001
        """
        return self._native.learning_rate()
