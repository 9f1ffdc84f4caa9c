"""Blocks of a few nodes. Values are given by their names, and so are results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortrain.errors import InvalidArgumentError
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import current, find, is_defined

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


def _node(block: Block, op: str, inputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
    """Append a node with one output."""
    accessor = current()
    output = accessor.name(f"{op.lower()}_output")
    block.base.graph.node.append(helper.make_node(op, inputs, [output], accessor.name(op), domain=domain, **attributes))
    return output


def _initializer(block: Block, token: str, values: npt.ArrayLike) -> str:
    """Append an initializer of float32."""
    name = current().name(token)
    block.base.graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
    return name


class _Binary(Block):
    def build(self, input_name1: str, input_name2: str) -> str:
        """Return the name of the result of two values."""
        return _node(self, type(self).__name__, [input_name1, input_name2])


class Add(_Binary):
    """``a + b``, broadcast."""


class Sub(_Binary):
    """``a - b``, broadcast."""


class Mul(_Binary):
    """``a * b``, broadcast."""


class Div(_Binary):
    """``a / b``, broadcast."""


class Pow(Block):
    """A value to the power of a number."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Return the name of the power."""
        exponent = _initializer(self, "pow_exponent", [self._exponent])
        return _node(self, "Pow", [pow_input_name, exponent])


class _Reduction(Block):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, reduce_input_name: str) -> str:
        """Return the name of what is left of all elements: one, of rank 0 unless axes are kept."""
        return _node(self, type(self).__name__, [reduce_input_name], keepdims=int(self._keepdims))


class ReduceMean(_Reduction):
    """The mean of all elements."""


class ReduceSum(_Reduction):
    """The sum of all elements."""


class _Unary(Block):
    def build(self, input_name: str) -> str:
        """Return the name of the result, element by element."""
        return _node(self, type(self).__name__, [input_name])


class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``."""


class Log(_Unary):
    """The natural logarithm."""


class Neg(_Unary):
    """``-x``."""


class Abs(_Unary):
    """The magnitude."""


class Constant(Block):
    """A float32 of shape [1]."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """Return the name of an initializer."""
        return _initializer(self, "constant", [self._value])


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *sequence_input_names: str) -> str:
        """Return the name of the sequence."""
        return _node(self, "SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """The root of the sum of all squares of some tensors: ``ReduceAllL2`` of ``com.microsoft``."""

    def build(self, *reduce_node_input_names: str) -> str:
        """Return the name of the norm, a float32 of shape [1]."""
        norm = _node(self, "ReduceAllL2", reduce_node_input_names, domain="com.microsoft")
        import_set(self.base, "com.microsoft")
        self.base.graph.value_info.append(helper.make_tensor_value_info(norm, TensorProto.FLOAT, [1]))
        return norm


class Clip(Block):
    """A value kept between two bounds, each of which may be missing."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = (clip_min, clip_max)

    def build(self, clip_input_name: str) -> str:
        """Return the name of the clipped value."""
        inputs = [clip_input_name]
        for token, bound in zip(("clip_min", "clip_max"), self._bounds, strict=True):
            inputs.append("" if bound is None else _initializer(self, token, bound))
        while not inputs[-1]:
            inputs.pop()
        return _node(self, "Clip", inputs)


class PassThrough(Block):
    """Its inputs as they are, for models that have their loss already."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the names."""
        return input_names


class InputLike(Block):
    """A new input of the model, with the type and shape of another input or of an output.

    Args:
        like: the name of that input or output.

    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Return the name of the input: ``input_name``, or a new one.

        Raises:
            InvalidArgumentError: if the model has no such input or output; it is a ``LookupError``, too.

        """
        graph = self.base.graph
        found = find([*graph.output, *graph.input], self._like)
        if found is None:
            raise UnknownNameError(f"the model has no input and no output {self._like!r}")
        entry = onnx.ValueInfoProto()
        entry.CopyFrom(found)
        entry.name = input_name or current().name("input")
        if not is_defined(self.base, entry.name):
            graph.input.append(entry)
        elif find(graph.input, entry.name) is None:
            raise InvalidArgumentError(f"{entry.name!r} cannot become an input: a value of the model has that name")
        return entry.name


class LabelEncoder(Block):
    """Other values for given ones: ``LabelEncoder`` of ``ai.onnx.ml``.

    Args:
        default_float, default_int64, default_string: for values that are not among the keys.
        keys_floats, keys_int64s, keys_strings: what is looked for; one of them is given.
        values_floats, values_int64s, values_strings: what stands for it; one of them is given.

    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        given = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        self._attributes = {name: value for name, value in given.items() if value is not None}

    def build(self, label_encoder_input_name: str) -> str:
        """Return the name of the result."""
        import_set(self.base, "ai.onnx.ml", 2)
        return _node(self, "LabelEncoder", [label_encoder_input_name], domain="ai.onnx.ml", **self._attributes)


class Cast(Block):
    """A value as another type.

    Args:
        to: a number of ``onnx.TensorProto.DataType``.

    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        """Return the name of the converted value."""
        return _node(self, "Cast", [cast_input_name], to=self._to)


class Linear(Block):
    """``alpha * x W + beta * b`` with new weights, drawn from a normal distribution.

    Args:
        in_features: the columns of ``x``.
        out_features: the columns of the result.
        bias: whether there is a ``b``.
        alpha, beta: factors.

    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._sizes = (in_features, out_features)
        self._bias = bias
        self._alpha, self._beta = alpha, beta

    def build(self, linear_input_name: str) -> str:
        """Return the name of the product. The weights are ``linear.weight`` and ``linear.bias``, with numbers."""
        rng = np.random.default_rng()
        inputs = [linear_input_name]
        inputs.append(_initializer(self, "linear.weight", rng.standard_normal(self._sizes)))
        if self._bias:
            inputs.append(_initializer(self, "linear.bias", rng.standard_normal(self._sizes[1])))
        return _node(self, "Gemm", inputs, alpha=self._alpha, beta=self._beta)


class UnknownNameError(InvalidArgumentError, LookupError):
    """A value that the model does not have. It is a ``LookupError``, too, as in onnxruntime-training."""


def import_set(model: onnx.ModelProto, domain: str, version: int = 1) -> None:
    """Let the model use a set of operators."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))
