"""What turns gradients into better parameters."""

from __future__ import annotations

from ortrain import _ortrain
from ortrain._sources import ModelLike, model_source
from ortrain.api.module import Module

__all__ = ["Optimizer"]


class Optimizer:
    """An optimizer model on the state of a module. Step and moments live in the state, one set for all optimizers."""

    def __init__(self, optimizer_uri: ModelLike, module: Module) -> None:
        self._module = module
        self._native = _ortrain.Optimizer(model_source(optimizer_uri), module._native)

    def step(self) -> None:
        """Update the trainable parameters from the module's gradients, which stay as they are."""
        self._native.step()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next steps; a scheduler overwrites it at its own next step."""
        self._native.set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """The current rate, a float32; 0.001 unless set, scheduled or loaded."""
        return self._native.learning_rate()
