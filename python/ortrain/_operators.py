"""Operators and gradients of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

from ortrain import _ortrain
from ortrain._sources import SupportsSerializeToString

__all__ = ["OperatorLibrary"]


@runtime_checkable
class SupportsToFunctionProto(Protocol):
    """What makes a function of ONNX: functions of onnxscript do; onnxscript itself is never imported."""

    def to_function_proto(self) -> SupportsSerializeToString:
        """The function as a message."""
        ...


FunctionLike: TypeAlias = bytes | SupportsSerializeToString | SupportsToFunctionProto


class OperatorLibrary:
    """Operators and gradients of one's own, all of them functions of ONNX: nodes say what they compute.

    Whatever reads a forward model takes a library as ``operators``: :func:`ortrain.artifacts.generate_artifacts`,
    :class:`InferenceSession`, :func:`inspect`, :func:`dump`, :func:`ortrain.onnxblock.base` and
    :func:`ortrain.backend.prepare`. What is written, be it artifacts or exported models, holds plain nodes and needs no
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
        """Add an operator: nodes of the function's domain, name and overload call it.

        Models that use it need not bring the function along. If a model does, it has to be the same one.

        Raises:
            InvalidArgumentError: if it is no sound function, is there already, or has the name of an operator that
                ortrain has itself.

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
        """Add a gradient of an operator, in the place of the one it would have.

        With the operator's inputs x, its outputs y and the gradients dy of the outputs, the inputs of ``gradient`` are
        all x, all y and all dy, in this order; its outputs are the gradients of all x, an empty name where there is
        none. An operator of one input and one output thus has a gradient ``(x, y, dy) => (dx)``; the names are free.
        What a node leaves out, the function is not given. Where no gradient arrives at an output it is given zeros. The
        function has those attributes of the node that it declares.

        Args:
            operator: an operator of ortrain's, or one of this library, or a function that a model brings along: that is
                then not differentiated through what it consists of.
            gradient: the function. Its own name and domain are for messages alone.
            domain: the operator's domain.
            node: the name of the only node it is for. A model without it cannot be differentiated with this library.

        Raises:
            InvalidArgumentError: if it is no sound function or not one of these inputs, or there is a gradient already.

        >>> import onnx
        >>> import ortrain
        >>> library = ortrain.OperatorLibrary()
        >>> library.add_gradient("Sign", onnx.parser.parse_function('''
        ... <domain: "examples", opset_import: ["" : 17]>
        ... StraightThrough (x, y, dy) => (dx) { dx = Identity (dy) }
        ... '''))

        """
        self._native.add_gradient(domain, operator, node, _message(gradient))


# A path, the bytes of a model, or these and the folder of its external data.
Plain: TypeAlias = str | bytes | tuple[bytes, str]
WithOperators: TypeAlias = Plain | tuple[Plain, _ortrain.OperatorLibrary]
Source: TypeAlias = WithOperators | tuple[WithOperators, _ortrain.ModelChanges]


def with_operators(source: Plain, operators: OperatorLibrary | None) -> WithOperators:
    """A path or the bytes of a model, with operators of the caller's if there are any."""
    if operators is None:
        return source
    if not isinstance(operators, OperatorLibrary):
        raise TypeError(f"operators are an ortrain.OperatorLibrary, not {type(operators).__name__}")
    return source, operators._native


def _message(function: FunctionLike) -> bytes:
    """The bytes of a function."""
    if isinstance(function, SupportsToFunctionProto):
        function = function.to_function_proto()
    if isinstance(function, (bytes, bytearray, memoryview)):
        return bytes(function)
    if isinstance(function, SupportsSerializeToString):
        return function.SerializeToString()
    raise TypeError(f"a function is bytes or an onnx.FunctionProto, not {type(function).__name__}")


def stopped_names(stop_gradients: str | Iterable[str] | None) -> list[str]:
    """The names and patterns of values that pass no gradient.

    Raises:
        TypeError: for anything but a text or a list of texts.

    """
    if stop_gradients is None:
        return []
    names = [stop_gradients] if isinstance(stop_gradients, str) else list(stop_gradients)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"stop_gradients is a list of names of values, but has {name!r}")
    return names


def with_stops(source: WithOperators, stop_gradients: str | Iterable[str] | None) -> Source:
    """A model with values that pass no gradient, if there are any."""
    names = stopped_names(stop_gradients)
    if not names:
        return source
    changes = _ortrain.ModelChanges()
    changes.stop_gradients(names)
    return source, changes
