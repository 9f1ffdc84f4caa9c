"""Operators and gradients of the caller's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

from ortrain import _ortrain
from ortrain._model_source import SupportsSerializeToString

__all__ = ["OperatorLibrary"]


@runtime_checkable
class SupportsToFunctionProto(Protocol):
    """Source of an ONNX function, such as a function of onnxscript; onnxscript itself is never imported."""

    def to_function_proto(self) -> SupportsSerializeToString:
        """Return the function as a message."""
        ...


FunctionLike: TypeAlias = bytes | SupportsSerializeToString | SupportsToFunctionProto


class OperatorLibrary:
    """Operators and gradients of your own, all of them ONNX functions: nodes define the computation.

    Every reader of a forward model takes a library as ``operators``: :func:`ortrain.artifacts.generate_artifacts`,
    :class:`InferenceSession`, :func:`inspect`, :func:`dump`, :func:`ortrain.onnxblock.base` and
    :func:`ortrain.backend.prepare`. Written files (artifacts, exported models) contain plain nodes and need no
    library.

    A function is an ``onnx.FunctionProto``, its bytes, or a function of onnxscript.

    >>> import onnx
    >>> from ortrain import OperatorLibrary
    >>> square = onnx.parser.parse_function('''
    ... <domain: "examples", opset_import: ["" : 17]>
    ... Square (x) => (y) { y = Mul (x, x) }
    ... ''')
    >>> library = OperatorLibrary()
    >>> library.add_function(square)
    """

    def __init__(self) -> None:
        self._native = _ortrain.OperatorLibrary()

    def add_function(self, function: FunctionLike) -> None:
        """Add an operator. Nodes with the function's domain, name and overload call it.

        Models that use the operator need not contain the function. If a model does, the functions must be equal.

        Raises:
            InvalidArgumentError: if the function is invalid, is already in the library, or has the name of an operator
                of ortrain.

        >>> import onnx
        >>> import ortrain
        >>> library = ortrain.OperatorLibrary()
        >>> library.add_function(onnx.parser.parse_function('''
        ... <domain: "examples", opset_import: ["" : 17]>
        ... Square (x) => (y) { y = Mul (x, x) }
        ... '''))
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["" : 17, "examples" : 1]>
        ... net (float[n] x) => (float[n] y) { y = examples.Square (x) }
        ... ''')
        >>> session = ortrain.InferenceSession(model, operators=library)
        >>> session.run(None, {"x": np.array([3.0], np.float32)})
        [array([9.], dtype=float32)]

        """
        self._native.add_function(_message(function))

    def add_gradient(self, operator: str, gradient: FunctionLike, *, domain: str = "", node: str | None = None) -> None:
        """Add a gradient of an operator, which replaces the operator's usual gradient.

        Let x be the inputs of the operator, y its outputs and dy the gradients of the outputs. The inputs of
        ``gradient`` are all x, all y and all dy, in this order. Its outputs are the gradients of all x, with an empty
        name for an input without a gradient. An operator with one input and one output thus has a gradient
        ``(x, y, dy) => (dx)``; the names are free. If the node omits an input or output, the function does not receive
        it either. For an output without a gradient, dy is zeros. The function receives the attributes of the node that
        it declares.

        Args:
            operator: an operator of ortrain or of this library, or a function that a model contains. The nodes inside
                that function are then not differentiated.
            gradient: the function. Its own name and domain only appear in messages.
            domain: the operator's domain.
            node: the name of a node, if the gradient is only for this node. A model without the node cannot be
                differentiated with this library.

        Raises:
            InvalidArgumentError: if the function is invalid or has other inputs, or if a gradient is already there.

        >>> import onnx
        >>> import ortrain
        >>> library = ortrain.OperatorLibrary()
        >>> library.add_gradient("Sign", onnx.parser.parse_function('''
        ... <domain: "examples", opset_import: ["" : 17]>
        ... StraightThrough (x, y, dy) => (dx) { dx = Identity (dy) }
        ... '''))

        """
        self._native.add_gradient(domain, operator, node, _message(gradient))


# A path, the bytes of a model, or a pair of these bytes and the folder of the external data.
Plain: TypeAlias = str | bytes | tuple[bytes, str]
WithOperators: TypeAlias = Plain | tuple[Plain, _ortrain.OperatorLibrary]
Source: TypeAlias = WithOperators | tuple[WithOperators, _ortrain.ModelChanges]


def with_operators(source: Plain, operators: OperatorLibrary | None) -> WithOperators:
    """Combine a path or the bytes of a model with the caller's operators, if there are any."""
    if operators is None:
        return source
    if not isinstance(operators, OperatorLibrary):
        raise TypeError(f"operators must be an ortrain.OperatorLibrary, got {type(operators).__name__}")
    return source, operators._native


def _message(function: FunctionLike) -> bytes:
    """Return the bytes of a function."""
    if isinstance(function, SupportsToFunctionProto):
        function = function.to_function_proto()
    if isinstance(function, (bytes, bytearray, memoryview)):
        return bytes(function)
    if isinstance(function, SupportsSerializeToString):
        return function.SerializeToString()
    raise TypeError(f"a function must be bytes or an onnx.FunctionProto, got {type(function).__name__}")


def stopped_names(stop_gradients: str | Iterable[str] | None) -> list[str]:
    """Return the names and patterns of values that pass no gradient.

    Raises:
        TypeError: for anything but a text or a list of texts.

    """
    if stop_gradients is None:
        return []
    names = [stop_gradients] if isinstance(stop_gradients, str) else list(stop_gradients)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"stop_gradients must be a list of names of values, got an entry {name!r}")
    return names


def with_stops(source: WithOperators, stop_gradients: str | Iterable[str] | None) -> Source:
    """Combine a model with the values that pass no gradient, if there are any."""
    names = stopped_names(stop_gradients)
    if not names:
        return source
    changes = _ortrain.ModelChanges()
    changes.stop_gradients(names)
    return source, changes
