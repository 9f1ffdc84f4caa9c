"""What turns gradients into better parameters.

>>> from ortrain.api.optimizer import Optimizer
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> round(optimizer.get_learning_rate(), 6)
0.001
"""

from __future__ import annotations

from ortrain import _ortrain
from ortrain._sources import ModelLike, model_source
from ortrain.api.module import Module
from ortrain.errors import OrtrainError, _warn_of_gradients

__all__ = ["Optimizer"]


class Optimizer:
    """An optimizer model on the state of a module. Step and moments live in the state, one set for all optimizers.

    Args:
        optimizer_uri: a path, the bytes of a model, or an ``onnx.ModelProto``.
        module: whose gradients it uses.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or is no optimizer model.
        OrtrainError: if the state has the moments of another kind of optimizer.

    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> optimizer
    Optimizer(step=0, learning_rate=0.001)
    >>> _ = module(x, labels)
    >>> before = state.parameters["fc2.bias"].data.copy()
    >>> optimizer.step()
    >>> np.array_equal(state.parameters["fc2.bias"].data, before)
    False

    """

    def __init__(self, optimizer_uri: ModelLike, module: Module) -> None:
        source = model_source(optimizer_uri)
        if not isinstance(module, Module):
            raise TypeError(f"module is a Module, not {type(module).__name__}")
        self._module = module
        self._native = _ortrain.Optimizer(source, module._native)

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
        self._native.set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """The current rate, a float32; 0.001 unless set, scheduled or loaded.

        >>> round(optimizer.get_learning_rate(), 6)
        0.001
        """
        return self._native.learning_rate()
