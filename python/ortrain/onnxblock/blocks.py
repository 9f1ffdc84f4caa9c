"""Blocks of a few nodes. Arguments and results are names of values.

A call of a block appends a node, in the version of the model's opset, and returns the name of its result:

>>> from ortrain.onnxblock import base, blocks
>>> with base(model):
...     blocks.Mul()("logits", blocks.Constant(0.5)())
'onnx::mul_output::2'
"""

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
    "StopGradient",
    "Sub",
]


# Domain and name of the function that stops the gradient.
_STOP_GRADIENT = ("ai.ortrain", "StopGradient")
# First IR version in which models contain functions.
_IR_OF_FUNCTIONS = 8


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
        """Return the name of the result of a binary operator.

        Raises:
            onnx.checker.ValidationError: if the types or shapes of the two operands are not compatible.

        >>> with onnxblock.base(model):
        ...     onnxblock.blocks.Add()("logits", "fc2.bias")
        'onnx::add_output::1'

        """
        return _node(self, type(self).__name__, [input_name1, input_name2])


class Add(_Binary):
    """``a + b``, broadcast: ``Add`` (ONNX 7 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Add()("logits", "fc2.bias")
    'onnx::add_output::1'
    """


class Sub(_Binary):
    """``a - b``, broadcast: ``Sub`` (ONNX 7 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Sub()("logits", "fc2.bias")
    'onnx::sub_output::1'
    """


class Mul(_Binary):
    """``a * b``, broadcast: ``Mul`` (ONNX 7 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Mul()("logits", "logits")
    'onnx::mul_output::1'
    """


class Div(_Binary):
    """``a / b``, broadcast: ``Div`` (ONNX 7 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Div()("logits", onnxblock.blocks.Constant(2.0)())
    'onnx::div_output::2'
    """


class Pow(Block):
    """Power with a constant exponent: ``Pow`` (ONNX 7 and newer).

    Args:
        exponent: the exponent, stored as a float32 initializer of shape [1].

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Pow(2.0)("logits")
    'onnx::pow_output::2'

    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Return the name of the power.

        >>> with onnxblock.base(model) as accessor:
        ...     square = onnxblock.blocks.Pow(2.0)("logits")
        >>> onnx.numpy_helper.to_array(accessor.model.graph.initializer[-1])
        array([2.], dtype=float32)
        """
        exponent = _initializer(self, "pow_exponent", [self._exponent])
        return _node(self, "Pow", [pow_input_name, exponent])


class _Reduction(Block):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, reduce_input_name: str) -> str:
        """Return the name of the reduction over all axes; without ``keepdims``, a scalar of rank 0.

        >>> with onnxblock.base(model):
        ...     onnxblock.blocks.ReduceSum(keepdims=False)("logits")
        'onnx::reducesum_output::1'
        """
        return _node(self, type(self).__name__, [reduce_input_name], keepdims=int(self._keepdims))


class ReduceMean(_Reduction):
    """The mean of all elements: ``ReduceMean`` (ONNX 1 and newer).

    Args:
        keepdims: True to keep the reduced axes, with size 1.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.ReduceMean(keepdims=False)("logits")
    'onnx::reducemean_output::1'

    """


class ReduceSum(_Reduction):
    """The sum of all elements: ``ReduceSum`` (ONNX 1 and newer).

    Args:
        keepdims: True to keep the reduced axes, with size 1.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.ReduceSum(keepdims=False)("logits")
    'onnx::reducesum_output::1'

    """


class _Unary(Block):
    def build(self, input_name: str) -> str:
        """Return the name of the element-wise result.

        >>> with onnxblock.base(model):
        ...     onnxblock.blocks.Neg()("logits")
        'onnx::neg_output::1'
        """
        return _node(self, type(self).__name__, [input_name])


class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``: ``Sigmoid`` (ONNX 6 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Sigmoid()("logits")
    'onnx::sigmoid_output::1'
    """


class Log(_Unary):
    """The natural logarithm: ``Log`` (ONNX 6 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Log()(onnxblock.blocks.Sigmoid()("logits"))
    'onnx::log_output::3'
    """


class Neg(_Unary):
    """``-x``: ``Neg`` (ONNX 6 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Neg()("logits")
    'onnx::neg_output::1'
    """


class Abs(_Unary):
    """The absolute value: ``Abs`` (ONNX 6 and newer).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Abs()("logits")
    'onnx::abs_output::1'
    """


class Constant(Block):
    """Float32 initializer of shape [1].

    Args:
        value_float: the value.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Constant(0.5)()
    'onnx::constant::1'

    """

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """Return the name of the initializer.

        >>> with onnxblock.base(model) as accessor:
        ...     half = onnxblock.blocks.Constant(0.5)()
        >>> onnx.numpy_helper.to_array(accessor.model.graph.initializer[-1])
        array([0.5], dtype=float32)
        """
        return _initializer(self, "constant", [self._value])


class SequenceConstruct(Block):
    """A sequence of tensors: ``SequenceConstruct`` (ONNX 11).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.SequenceConstruct()("logits", "hidden")
    'onnx::sequenceconstruct_output::1'
    """

    def build(self, *sequence_input_names: str) -> str:
        """Return the name of the sequence.

        >>> with onnxblock.base(model) as accessor:
        ...     sequence = onnxblock.blocks.SequenceConstruct()("logits", "hidden")
        >>> list(accessor.model.graph.node[-1].input)
        ['logits', 'hidden']
        """
        return _node(self, "SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """Global L2 norm of several tensors: ``ReduceAllL2`` of ``com.microsoft`` (version 1).

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.ReduceAllL2()("fc1.weight", "fc2.weight")
    'onnx::reducealll2_output::1'
    """

    def build(self, *reduce_node_input_names: str) -> str:
        """Return the name of the norm, a float32 of rank 0.

        >>> with onnxblock.base(model) as accessor:
        ...     norm = onnxblock.blocks.ReduceAllL2()("fc1.weight", "fc2.weight")
        >>> accessor.model.graph.node[-1].domain
        'com.microsoft'
        """
        norm = _node(self, "ReduceAllL2", reduce_node_input_names, domain="com.microsoft")
        import_set(self.base, "com.microsoft")
        self.base.graph.value_info.append(helper.make_tensor_value_info(norm, TensorProto.FLOAT, []))
        return norm


class Clip(Block):
    """Clipping to optional bounds: ``Clip`` (ONNX 11 and newer).

    Args:
        clip_min: the lower bound.
        clip_max: the upper bound.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Clip(-1.0, 1.0)("logits")
    'onnx::clip_output::3'

    """

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = (clip_min, clip_max)

    def build(self, clip_input_name: str) -> str:
        """Return the name of the clipped value.

        >>> with onnxblock.base(model) as accessor:
        ...     clipped = onnxblock.blocks.Clip(clip_max=1.0)("logits")
        >>> list(accessor.model.graph.node[-1].input)
        ['logits', '', 'onnx::clip_max::1']
        """
        inputs = [clip_input_name]
        for token, bound in zip(("clip_min", "clip_max"), self._bounds, strict=True):
            inputs.append("" if bound is None else _initializer(self, token, bound))
        while not inputs[-1]:
            inputs.pop()
        return _node(self, "Clip", inputs)


class PassThrough(Block):
    """Block that returns its inputs unchanged, for models that contain their loss.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.PassThrough()("logits", "hidden")
    ('logits', 'hidden')
    """

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the input names.

        >>> class AsItIs(onnxblock.ForwardBlock):
        ...     def build(self):
        ...         return onnxblock.blocks.PassThrough()("logits", "hidden")
        >>> block = AsItIs()
        >>> with onnxblock.base(model):
        ...     block()
        ('logits', 'hidden')
        """
        return input_names


class InputLike(Block):
    """New input of the model, with the type and shape of an existing input or output.

    Args:
        like: the name of the existing input or output.

    >>> with onnxblock.base(model) as accessor:
    ...     onnxblock.blocks.InputLike("logits")("wanted")
    'wanted'
    >>> [entry.name for entry in accessor.model.graph.input]
    ['x', 'wanted']

    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Return the name of the input: ``input_name``, or a new one.

        Raises:
            InvalidArgumentError: if the model has no such input or output; the error is also a ``LookupError``.

        >>> with onnxblock.base(model):
        ...     onnxblock.blocks.InputLike("logits")()
        'onnx::input::1'

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
            raise InvalidArgumentError(
                f"{entry.name!r} cannot become an input: the model already has a value of this name"
            )
        return entry.name


class LabelEncoder(Block):
    """Mapping of values by a table: ``LabelEncoder`` of ``ai.onnx.ml`` (version 2).

    Args:
        default_float, default_int64, default_string: the result for values that are not among the keys.
        keys_floats, keys_int64s, keys_strings: the keys, in exactly one of these arguments.
        values_floats, values_int64s, values_strings: the result for each key, in exactly one of these arguments.

    >>> label = onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"])
    >>> model.graph.input.extend([label])
    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.LabelEncoder(keys_int64s=[1, 7], values_int64s=[0, 1])("label")
    'onnx::labelencoder_output::1'

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
        attributes = {
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
        self._attributes = {name: value for name, value in attributes.items() if value is not None}

    def build(self, label_encoder_input_name: str) -> str:
        """Return the name of the result.

        >>> label = onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["batch"])
        >>> model.graph.input.extend([label])
        >>> with onnxblock.base(model) as accessor:
        ...     weight = onnxblock.blocks.LabelEncoder(keys_int64s=[1, 7], values_floats=[0.5, 2.0])("label")
        >>> accessor.model.graph.node[-1].domain
        'ai.onnx.ml'
        """
        import_set(self.base, "ai.onnx.ml", 2)
        return _node(self, "LabelEncoder", [label_encoder_input_name], domain="ai.onnx.ml", **self._attributes)


class Cast(Block):
    """Conversion to another element type: ``Cast`` (ONNX 6 and newer).

    Args:
        to: the element type, a value of ``onnx.TensorProto.DataType``.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Cast(onnx.TensorProto.FLOAT16)("logits")
    'onnx::cast_output::1'

    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        """Return the name of the converted value.

        >>> with onnxblock.base(model) as accessor:
        ...     half = onnxblock.blocks.Cast(onnx.TensorProto.FLOAT16)("logits")
        >>> accessor.model.graph.node[-1].attribute[0].i == onnx.TensorProto.FLOAT16
        True
        """
        return _node(self, "Cast", [cast_input_name], to=self._to)


class Linear(Block):
    """``alpha * x W + beta * b`` with new weights: ``Gemm`` (ONNX 7 and newer).

    ``W`` is a float32 of shape [in_features, out_features], ``b`` a float32 of shape [out_features]. Each call draws
    them from a normal distribution of mean 0 and variance 1.

    Args:
        in_features: the number of columns of ``x``.
        out_features: the number of columns of the result.
        bias: True to add ``b``.
        alpha, beta: the factors of the formula.

    >>> with onnxblock.base(model) as accessor:
    ...     onnxblock.blocks.Linear(10, 3)("logits")
    'onnx::gemm_output::3'
    >>> [(tensor.name, list(tensor.dims)) for tensor in accessor.model.graph.initializer[-2:]]
    [('onnx::linear.weight::1', [10, 3]), ('onnx::linear.bias::2', [3])]

    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._sizes = (in_features, out_features)
        self._bias = bias
        self._alpha, self._beta = alpha, beta

    def build(self, linear_input_name: str) -> str:
        """Return the name of the result. The weights are ``linear.weight`` and ``linear.bias``, with a unique suffix.

        >>> with onnxblock.base(model) as accessor:
        ...     _ = onnxblock.blocks.Linear(10, 3, bias=False)("logits")
        >>> list(accessor.model.graph.node[-1].input)
        ['logits', 'onnx::linear.weight::1']
        """
        rng = np.random.default_rng()
        inputs = [linear_input_name]
        inputs.append(_initializer(self, "linear.weight", rng.standard_normal(self._sizes)))
        if self._bias:
            inputs.append(_initializer(self, "linear.bias", rng.standard_normal(self._sizes[1])))
        return _node(self, "Gemm", inputs, alpha=self._alpha, beta=self._beta)


class UnknownNameError(InvalidArgumentError, LookupError):
    """Unknown name of a value. The error is also a ``LookupError``, like in onnxruntime-training."""


def import_set(model: onnx.ModelProto, domain: str, version: int = 1) -> None:
    """Import an operator set into the model, unless its domain is already imported."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


class StopGradient(Block):
    """Value without a gradient, like ``detach`` of PyTorch.

    The node calls a function of the model, an ``Identity``, so every runtime of ONNX 15 and newer executes it.
    Artifacts contain only the ``Identity``.

    >>> with onnxblock.base(model):
    ...     onnxblock.blocks.Mul()("logits", onnxblock.blocks.StopGradient()("logits"))
    'onnx::mul_output::3'
    """

    def build(self, stop_gradient_input_name: str) -> str:
        """Return the name of the value without a gradient.

        >>> with onnxblock.base(model) as accessor:
        ...     detached = onnxblock.blocks.StopGradient()("logits")
        >>> accessor.model.functions[0].name
        'StopGradient'

        """
        model, (domain, name) = self.base, _STOP_GRADIENT
        if not any((function.domain, function.name) == _STOP_GRADIENT for function in model.functions):
            # Identity has the same meaning in all versions.
            imports = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
            body = [helper.make_node("Identity", ["x"], ["y"])]
            model.functions.append(helper.make_function(domain, name, ["x"], ["y"], body, imports))
        if all(entry.domain != domain for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(domain, 1))
        model.ir_version = max(model.ir_version, _IR_OF_FUNCTIONS)
        return _node(self, name, [stop_gradient_input_name], domain)
