"""Small functions as models: losses with their gradients, penalties, updates (``onnxcustom.utils.onnx_function``).

Each model has a few nodes, and inputs and outputs with fixed names. Trainings run these models between a forward and a
backward pass: a loss, its gradient, the penalty of weights, the step of an optimizer.

>>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
>>> model = function_onnx_graph("axpy")
>>> [value.name for value in model.graph.input], [value.name for value in model.graph.output]
(['X1', 'X2', 'alpha'], ['Y'])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.gradient.utils._graphs import GraphWriter, check_keywords, checked_opset, finite

__all__ = ["function_onnx_graph", "get_supported_functions"]

# First IR version in which initializers need not be inputs.
_IR_VERSION = 4
_Shape = Sequence[int | str | None] | None
# Rows and columns of expected and predicted values; a tensor of any rank; a vector of one element.
_MATRIX, _ANY, _ONE = ("rows", "columns"), None, (1,)

_Writer = TypeVar("_Writer", bound=Callable[..., None])


class _Function(GraphWriter):
    """Writer of a function."""

    def __init__(self, opset: int, dtype: npt.DTypeLike, weight_name: str | None) -> None:
        super().__init__(opset, dtype)
        self.weight_name = weight_name
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._weights: str | None = None
        self._scalars: dict[str, str] = {}

    def _declare(self, values: list[onnx.ValueInfoProto], name: str, shape: _Shape, element_type: int) -> str:
        if name in self.names:
            raise InvalidArgumentError(f"weight_name {name!r} is the name of another input or output of the function")
        self.names.add(name)
        values.append(helper.make_tensor_value_info(name, element_type, shape))
        return name

    def inputs(self, shape: _Shape, *names: str) -> None:
        """Declares inputs of one shape."""
        for name in names:
            self._declare(self._inputs, name, shape, self.element_type)

    def outputs(self, **shapes: _Shape) -> None:
        """Declares outputs."""
        for name, shape in shapes.items():
            self._declare(self._outputs, name, shape, self.element_type)

    def pairs(self, expected: int | None = None, **outputs: _Shape) -> None:
        """Declares the inputs and outputs of a loss: expected and predicted values, row weights, and outputs."""
        self._declare(self._inputs, "X1", _MATRIX, self.element_type if expected is None else expected)
        self.inputs(_MATRIX, "X2")
        self.outputs(**outputs)
        if self.weight_name is not None:
            self.inputs((None,), self.weight_name)
            self.initializers.append(helper.make_tensor(self.weight_name, self.element_type, [1], [1]))

    def times(self, value: str, factor: float, name: str, constant: str = "factor") -> str:
        """Multiplies a value by a constant."""
        return self.op("Mul", value, self.number(factor, constant), name=name)

    def scaled(self, value: str, factor: str, name: str) -> str:
        """Multiplies a value of any shape by an input of one element; the shape does not change."""
        if factor not in self._scalars:
            self._scalars[factor] = self.op("Reshape", factor, self.sizes([], "scalar_shape"), name=f"{factor}_scalar")
        return self.op("Mul", value, self._scalars[factor], name=name)

    def difference(self) -> str:
        """Computes ``X1 - X2``."""
        return self.op("Sub", "X1", "X2", name="difference")

    def _weighted(self, kind: str, *inputs: str, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the operator and the inputs of a node that computes another node's result times the row weights."""
        if self.weight_name is None:
            return kind, inputs
        if self._weights is None:
            self._weights = self.column(self.weight_name, "weight_column")
        return "Mul", (self.op(kind, *inputs, name=name), self._weights)

    def total(self, kind: str, *inputs: str, factor: float | None = None) -> None:
        """Writes the sum of a node's result to the output ``Y``; row weights scale its elements."""
        kind, inputs = self._weighted(kind, *inputs, name="unweighted_score")
        total = self.op("ReduceSum", self.op(kind, *inputs, name="scores"), name="total", keepdims=0)
        if factor is not None:
            total = self.times(total, factor, "scaled_total", "total_factor")
        self.vector(total)

    def gradient(self, kind: str, *inputs: str) -> None:
        """Writes a node's result to the output ``Y_grad``; row weights scale its elements."""
        kind, inputs = self._weighted(kind, *inputs, name="unweighted_gradient")
        self.result(kind, *inputs, name="Y_grad")

    def vector(self, value: str) -> None:
        """Writes a value of one element to the output ``Y``, as a vector."""
        self.result("Reshape", value, self.sizes([1], "vector_shape"), name="Y")

    def elastic_penalty(self, value: str, l1: float, l2: float) -> str:
        """Computes ``l1`` times the sum of absolute values plus ``l2`` times the sum of squares."""
        absolute = self.op("ReduceSum", self.op("Abs", value, name="absolute"), name="absolute_sum", keepdims=0)
        square = self.op("ReduceSumSquare", value, name="square_sum", keepdims=0)
        return self.op(
            "Add",
            self.times(absolute, l1, "l1_penalty", "l1"),
            self.times(square, l2, "l2_penalty", "l2"),
            name="penalty",
        )

    def model(self, name: str, description: str) -> onnx.ModelProto:
        """Returns the model of the function."""
        graph = helper.make_graph(
            self.nodes, name, self._inputs, self._outputs, self.initializers, doc_string=description
        )
        imports = [helper.make_opsetid("", self.opset)]
        ir_version = max(_IR_VERSION, helper.find_min_ir_version_for(imports))
        return helper.make_model(graph, producer_name="ortrain", opset_imports=imports, ir_version=ir_version)


class _Known(NamedTuple):
    write: Callable[..., None]
    """Writes the function."""
    weights: bool
    """Whether rows can have weights."""
    options: list[str]
    """What else a caller can say."""


_FUNCTIONS: dict[str, _Known] = {}


def _known(weights: bool = False) -> Callable[[_Writer], _Writer]:
    """Registers a function by its name."""

    def noted(write: _Writer) -> _Writer:
        options = list(inspect.signature(write).parameters)[1:]
        _FUNCTIONS[write.__name__.removeprefix("_")] = _Known(write, weights, options)
        return write

    return noted


def get_supported_functions() -> dict[str, str]:
    """Returns the functions that :func:`function_onnx_graph` supports: their names, with a description of each.

    Source: ``onnxcustom.utils.onnx_function.get_supported_functions``.

    >>> from ortrain.gradient.utils.onnx_function import get_supported_functions
    >>> get_supported_functions()["axpy"]
    'Y = alpha X1 + X2, for tensors of any shape.'

    """
    return {name: inspect.getdoc(known.write) or "" for name, known in _FUNCTIONS.items()}


def function_onnx_graph(
    name: str,
    target_opset: int | None = None,
    dtype: npt.DTypeLike = np.float32,
    weight_name: str | None = None,
    **kwargs: Any,
) -> onnx.ModelProto:
    """Returns a function as a model, by its name.

    Losses have matrix inputs: ``X1`` is expected, ``X2`` is predicted, with one row for each observation. Their ``Y``
    has shape ``(1,)``. Their ``Y_grad`` is the derivative of ``Y`` with respect to ``X2``, of the shape of ``X2``.

    =================================== ======================== ===================================================
    name                                inputs                   outputs
    =================================== ======================== ===================================================
    ``axpy``                            ``X1 X2 alpha``          ``Y = alpha X1 + X2``
    ``axpyw``                           ``X1 X2 G alpha beta``   ``Y = Z + X2``, ``Z = beta G + alpha X1``
    ``axpyw2``                          ``X1 X2 G alpha beta``   ``Y = beta Z + alpha X1 + X2``, ``Z`` as above
    ``copy``, ``zero``                  ``X``                    ``Y = X``, ``Y = 0 X``
    ``linear_regression``               ``X A B``                ``Y = X A + B``
    ``square_error``                    ``X1 X2 [weight]``       ``Y``: the sum of squares of ``X1 - X2``
    ``grad_square_error``               ``X1 X2 [weight]``       ``Y_grad`` of the sum of squares
    ``grad_loss_square_error``          ``X1 X2 [weight]``       ``Y``: ``multiply / 2`` times the sum of squares, and
                                                                 ``Y_grad``
    ``grad_loss_absolute_error``        ``X1 X2 [weight]``       ``Y``: the sum of absolute values, and ``Y_grad``
    ``grad_loss_elastic_error``         ``X1 X2 [weight]``       ``Y``: ``l1_weight`` times the sum of absolute values
                                                                 plus ``l2_weight`` times the sum of squares, and
                                                                 ``Y_grad``
    ``grad_sigmoid_neg_log_loss_error`` ``X1 X2 [weight]``       ``Y``: the sum of log losses of scores ``X2`` for
                                                                 classes ``X1`` (int64, 0 or 1), and ``Y_grad``
    ``grad_penalty_elastic_error``      ``X``                    ``Y``: the elastic penalty of a matrix, and ``Y_grad``
    ``n_penalty_elastic_error``         ``loss W0 W1 …``         ``Y``: ``loss`` plus the elastic penalty of each weight
    ``update_penalty_elastic_error``    ``X``                    ``Y = (1 - 2 l2) X - l1 sign(X)``
    =================================== ======================== ===================================================

    Vectors ``alpha`` and ``beta`` have one element. ``axpy``, ``copy``, ``zero``, the weights of a penalty and their
    update accept tensors of any rank. These inputs are declared without a shape, which ``onnx.checker`` requires.

    Args:
        name: the name of the function; see :func:`get_supported_functions`.
        target_opset: the opset version, 9 or newer; 15 by default.
        dtype: the type of all floats: ``float32`` or ``float64``.
        weight_name: the name of an input with a weight for each row, of shape ``(rows,)``. The input has an
            initializer: runtimes in which inputs override initializers use 1 for all rows by default. ``None`` for a
            function without this input.
        kwargs: numbers: ``multiply=2`` of ``grad_loss_square_error``; ``l1_weight=0.01`` and ``l2_weight=0.01`` of the
            elastic loss and penalties; ``l1=1e-4`` and ``l2=1e-4`` of ``update_penalty_elastic_error``; ``n_tensors=1``
            and ``loss_shape=(1, 1)`` (``None`` for any) of ``n_penalty_elastic_error``; ``eps=1e-5``, the minimum
            distance of probabilities from 0 and 1 in ``grad_sigmoid_neg_log_loss_error``.

    Raises:
        InvalidArgumentError: for an unknown name; for an invalid version, type or number; for ``weight_name`` with a
            function without row weights.
        TypeError: for an unknown keyword.

    Source: ``onnxcustom.utils.onnx_function.function_onnx_graph``. There, the derivatives of absolute values have the
    opposite sign.

    >>> import ortrain
    >>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
    >>> session = ortrain.InferenceSession(function_onnx_graph("grad_loss_absolute_error", dtype=np.float64))
    >>> loss, gradient = session.run(None, {"X1": np.array([[1.0], [2.0]]), "X2": np.array([[3.0], [1.5]])})
    >>> loss, gradient.ravel()
    (array([2.5]), array([ 1., -1.]))

    """
    if name not in _FUNCTIONS:
        near = hint(name, _FUNCTIONS)
        raise InvalidArgumentError(f"unknown function {name!r}; expected one of {', '.join(sorted(_FUNCTIONS))}{near}")
    known = _FUNCTIONS[name]
    if weight_name is not None:
        if not isinstance(weight_name, str) or not weight_name:
            raise InvalidArgumentError(f"weight_name must be the name of an input, got {weight_name!r}")
        if not known.weights:
            raise InvalidArgumentError(f"function {name!r} has no row weights; omit weight_name")
    check_keywords(f"function {name!r}", known.options, kwargs)
    element = np.dtype(dtype)
    if element not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InvalidArgumentError(f"dtype must be float32 or float64, got {element}")
    function = _Function(checked_opset(target_opset), element, weight_name)
    known.write(function, **kwargs)
    return function.model(name, inspect.getdoc(known.write) or "")


@_known()
def _axpy(f: _Function) -> None:
    """Y = alpha X1 + X2, for tensors of any shape."""
    f.inputs(_ANY, "X1", "X2")
    f.inputs(_ONE, "alpha")
    f.outputs(Y=_ANY)
    f.result("Add", f.scaled("X1", "alpha", name="step"), "X2", name="Y")


def _velocity(f: _Function) -> str:
    """Declares the inputs and outputs of both momentum functions and writes ``Z``; returns ``alpha X1``."""
    f.inputs(_ANY, "X1", "X2", "G")
    f.inputs(_ONE, "alpha", "beta")
    f.outputs(Y=_ANY, Z=_ANY)
    step = f.scaled("X1", "alpha", name="step")
    f.result("Add", step, f.scaled("G", "beta", name="momentum"), name="Z")
    return step


@_known()
def _axpyw(f: _Function) -> None:
    """Z = beta G + alpha X1 and Y = Z + X2, for tensors of any shape: a step with momentum."""
    _velocity(f)
    f.result("Add", "Z", "X2", name="Y")


@_known()
def _axpyw2(f: _Function) -> None:
    """Z = beta G + alpha X1 and Y = beta Z + alpha X1 + X2, for tensors of any shape: a step of Nesterov's."""
    step = _velocity(f)
    ahead = f.op("Add", step, f.scaled("Z", "beta", name="ahead"), name="step_ahead")
    f.result("Add", ahead, "X2", name="Y")


@_known()
def _copy(f: _Function) -> None:
    """Y = X, for a tensor of any shape."""
    f.inputs(_ANY, "X")
    f.outputs(Y=_ANY)
    f.result("Identity", "X", name="Y")


@_known()
def _zero(f: _Function) -> None:
    """Y = 0 X, for a tensor of any shape."""
    f.inputs(_ANY, "X")
    f.outputs(Y=_ANY)
    f.result("Mul", "X", f.number(0, "zero"), name="Y")


@_known()
def _linear_regression(f: _Function) -> None:
    """Y = X A + B, for matrices."""
    f.inputs(("rows", "features"), "X")
    f.inputs(("features", "columns"), "A")
    f.inputs((None, None), "B")
    f.outputs(Y=(None, None))
    f.result("Add", f.op("MatMul", "X", "A", name="product"), "B", name="Y")


@_known(weights=True)
def _square_error(f: _Function) -> None:
    """Y = the sum of squares of X1 - X2, each times the weight of its row."""
    f.pairs(Y=_ONE)
    difference = f.difference()
    f.total("Mul", difference, difference)


@_known(weights=True)
def _grad_square_error(f: _Function) -> None:
    """Y_grad = the derivative of the sum of squares of X1 - X2 with respect to X2."""
    f.pairs(Y_grad=_MATRIX)
    f.gradient("Mul", f.difference(), f.number(-2, "minus_two"))


@_known(weights=True)
def _grad_loss_square_error(f: _Function, multiply: float = 2) -> None:
    """Y = multiply / 2 times the sum of squares of X1 - X2, and its derivative Y_grad with respect to X2."""
    multiply = finite(multiply, "multiply")
    f.pairs(Y=_ONE, Y_grad=_MATRIX)
    difference = f.difference()
    f.total("Mul", difference, difference, factor=multiply / 2)
    f.gradient("Mul", difference, f.number(-multiply, "minus_multiply"))


@_known(weights=True)
def _grad_loss_absolute_error(f: _Function) -> None:
    """Y = the sum of absolute values of X1 - X2, and its derivative Y_grad with respect to X2."""
    f.pairs(Y=_ONE, Y_grad=_MATRIX)
    difference = f.difference()
    f.total("Abs", difference)
    f.gradient("Neg", f.op("Sign", difference, name="sign"))


@_known(weights=True)
def _grad_loss_elastic_error(f: _Function, l1_weight: float = 0.01, l2_weight: float = 0.01) -> None:
    """Y = the sum of l1_weight |X1 - X2| + l2_weight (X1 - X2)², and its derivative Y_grad with respect to X2."""
    l1, l2 = finite(l1_weight, "l1_weight"), finite(l2_weight, "l2_weight")
    f.pairs(Y=_ONE, Y_grad=_MATRIX)
    difference = f.difference()
    f.total(
        "Add",
        f.times(f.op("Abs", difference, name="absolute"), l1, "l1_score", "l1"),
        f.times(f.op("Mul", difference, difference, name="square"), l2, "l2_score", "l2"),
    )
    f.gradient(
        "Add",
        f.times(f.op("Sign", difference, name="sign"), -l1, "l1_gradient", "minus_l1"),
        f.times(difference, -2 * l2, "l2_gradient", "minus_two_l2"),
    )


@_known(weights=True)
def _grad_sigmoid_neg_log_loss_error(f: _Function, eps: float = 1e-5) -> None:
    """Y = the sum of log losses of classes X1 (int64, 0 or 1) for scores X2, and Y_grad = p - X1.

    The probability p of class 1 is the sigmoid of a score, at least eps and at most 1 - eps.
    """
    eps = finite(eps, "eps")
    if not 0 <= eps < 0.5:
        raise InvalidArgumentError(
            f"eps must be at least 0 and less than 0.5, got {eps}: it is the smallest probability"
        )
    f.pairs(expected=onnx.TensorProto.INT64, Y=_ONE, Y_grad=_MATRIX)
    one = f.number(1, "one")
    above = f.op("Max", f.op("Sigmoid", "X2", name="sigmoid"), f.number(eps, "least"), name="above")
    second = f.op("Min", above, f.number(1 - eps, "most"), name="probability")
    first = f.op("Sub", one, second, name="other_probability")
    in_second = f.op("Cast", "X1", name="class", to=f.element_type)
    in_first = f.op("Sub", one, in_second, name="other_class")
    likelihood = f.op(
        "Add",
        f.op("Mul", in_first, f.op("Log", first, name="other_log"), name="other_likelihood"),
        f.op("Mul", in_second, f.op("Log", second, name="log"), name="likelihood_of_class"),
        name="likelihood",
    )
    f.total("Neg", likelihood)
    f.gradient("Sub", second, in_second)


@_known()
def _grad_penalty_elastic_error(f: _Function, l1_weight: float = 0.01, l2_weight: float = 0.01) -> None:
    """Y = l1_weight times the sum of |X| + l2_weight times the sum of X², and its derivative Y_grad."""
    l1, l2 = finite(l1_weight, "l1_weight"), finite(l2_weight, "l2_weight")
    f.inputs(_MATRIX, "X")
    f.outputs(Y=_ONE, Y_grad=_MATRIX)
    f.vector(f.elastic_penalty("X", l1, l2))
    f.result(
        "Add",
        f.times(f.op("Sign", "X", name="sign"), l1, "l1_gradient", "l1"),
        f.times("X", 2 * l2, "l2_gradient", "two_l2"),
        name="Y_grad",
    )


@_known(weights=True)
def _n_penalty_elastic_error(
    f: _Function,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
    n_tensors: int = 1,
    loss_shape: Sequence[int | str | None] | None = (1, 1),
) -> None:
    """Y = loss + the sum over weights W0, W1, … of l1_weight times the sum of |W| + l2_weight times that of W².

    The loss has one element. Weights of rows are part of the loss, so that weight_name changes nothing.
    """
    l1, l2 = finite(l1_weight, "l1_weight"), finite(l2_weight, "l2_weight")
    if isinstance(n_tensors, bool) or not isinstance(n_tensors, (int, np.integer)) or n_tensors < 1:
        raise InvalidArgumentError(f"n_tensors must be the number of weights, at least 1, got {n_tensors!r}")
    weights = [f"W{at}" for at in range(n_tensors)]
    f.inputs(None if loss_shape is None else tuple(loss_shape), "loss")
    f.inputs(_ANY, *weights)
    f.outputs(Y=_ONE)
    total = f.elastic_penalty(weights[0], l1, l2)
    for weight in weights[1:]:
        total = f.op("Add", total, f.elastic_penalty(weight, l1, l2), name="penalties")
    loss = f.op("Reshape", "loss", f.sizes([1], "vector_shape"), name="loss_vector")
    f.result("Add", loss, total, name="Y")


@_known()
def _update_penalty_elastic_error(f: _Function, l1: float = 1e-4, l2: float = 1e-4) -> None:
    """Y = (1 - 2 l2) X - l1 sign(X), for a weight of any shape."""
    l1, l2 = finite(l1, "l1"), finite(l2, "l2")
    f.inputs(_ANY, "X")
    f.outputs(Y=_ANY)
    decayed_weight = f.times("X", 1 - 2 * l2, "kept", "kept_part")
    f.result("Sub", decayed_weight, f.times(f.op("Sign", "X", name="sign"), l1, "l1_step", "l1"), name="Y")
