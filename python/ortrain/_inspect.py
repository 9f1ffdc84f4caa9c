"""What of a model would be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ortrain import _ortrain
from ortrain._operators import OperatorLibrary, Source, with_operators
from ortrain._sources import ModelLike, model_source

__all__ = ["Inspection", "ParameterInfo", "inspect"]


@dataclass(frozen=True)
class ParameterInfo:
    """A constant of a model.

    >>> import ortrain
    >>> found = ortrain.inspect("examples/perceptron.onnx")
    >>> first = found.parameters[0]
    >>> first.name, first.dtype, first.shape, first.role
    ('fc1.weight', 'float32', (96, 64), 'trained')
    >>> first.reason
    'it is a weight of node "fc1" (Gemm)'
    """

    name: str
    """Its name."""
    dtype: str
    """Its element type, as NumPy spells it."""
    shape: tuple[int, ...]
    """Its shape."""
    role: Literal["trained", "statistic", "constant"]
    """What becomes of it if nobody says otherwise: it is trained; it is a running statistic, in the checkpoint but not
    trained; or it stays in the models as it is."""
    reason: str
    """Why."""


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found. ``str`` of it is a report.

    >>> import ortrain
    >>> print(ortrain.inspect("examples/perceptron.onnx"))
    trained: 4 tensors, 7210 elements
      fc1.weight: float32[96, 64]: it is a weight of node "fc1" (Gemm)
      fc1.bias: float32[96]: it is a weight of node "fc1" (Gemm)
      fc2.weight: float32[10, 96]: it is a weight of node "fc2" (Gemm)
      fc2.bias: float32[10]: it is a weight of node "fc2" (Gemm)
    statistics, in the checkpoint but not trained: 0 tensors, 0 elements
    not trained: 0 tensors, 0 elements
    <BLANKLINE>
    """

    parameters: list[ParameterInfo]
    """The initializers of the model, in its order, then the values of its Constant nodes."""
    obstacle: str | None
    """Why the model cannot be trained as it is, if it cannot: the error that making artifacts would give."""
    _text: str = field(repr=False)

    def names(self, role: Literal["trained", "statistic", "constant"]) -> list[str]:
        """The names of a role, in the model's order.

        >>> import ortrain
        >>> ortrain.inspect("examples/convnet.onnx").names("statistic")
        ['block1.mean', 'block1.var', 'block2.mean', 'block2.var', 'block3.mean', 'block3.var']
        """
        return [info.name for info in self.parameters if info.role == role]

    def __str__(self) -> str:
        return self._text


def inspect(
    model: ModelLike,
    loss_input_names: Sequence[str] | None = None,
    *,
    operators: OperatorLibrary | None = None,
) -> Inspection:
    """Say which constants of a model would be trained, which would not, and why. Nothing is written.

    Trained are floats that reach the loss through operators with a gradient: initializers and the values of Constant
    nodes. Running statistics are not, nor are single numbers in arithmetic (an epsilon, an exponent, a scale).

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        loss_input_names: the values that the loss is made of, if not the model's outputs.
        operators: operators and gradients of one's own.

    Raises:
        InvalidModelError, UnsupportedError: if the model cannot be read.
        InvalidArgumentError: if a value is not there.

    >>> import ortrain
    >>> found = ortrain.inspect("examples/convnet.onnx")
    >>> found.names("trained")[:3]
    ['block1.weight', 'block1.scale', 'block1.bias']
    >>> found.names("statistic")[:2]
    ['block1.mean', 'block1.var']
    >>> found.parameters[0].reason
    'it is a weight of node "block1.conv" (Conv)'

    """
    if isinstance(loss_input_names, str):
        raise TypeError("loss_input_names is a list of names, not one name")
    return inspection(with_operators(model_source(model), operators), list(loss_input_names or []))


def inspection(source: Source, values: Sequence[str], *, first_output: bool = False) -> Inspection:
    """As :func:`inspect`; ``first_output`` leaves out all outputs but one."""
    found, obstacle, text = _ortrain.inspect(source, values, first_output)
    infos = [ParameterInfo(name, dtype, tuple(shape), role, reason) for name, dtype, shape, role, reason in found]
    return Inspection(infos, obstacle, text)
