"""Gradients where a convention must choose: at kinks, ties, zeros and masks, and for unusual shapes.

Rows have the numbers of the page of conventions, ``operators``, section 3. Each row is one or a few nodes from weights
to outputs, the gradients of the outputs, and the gradients of the weights by the convention, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BACKENDS
from onnx import TensorProto, helper, numpy_helper

from ortrain import artifacts
from ortrain.api import CheckpointState, Module

OPSET = 23
INF, NAN = math.inf, math.nan
# Rounding of a few operations in float64.
TOLERANCE = 1e-12
# Away from kinks, central differences give the expected gradient, with the rounding of losses over the step.
DIFFERENCES, STEP, TOLERANCE_OF_DIFFERENCES = "differences", 1e-6, 1e-7

# Numbers without rows. Sums (6) and the method of checks (7) have no single example. These operators are not supported:
# pooling of regions, MaxUnpool and DeformConv (46, 47, 48), sequences (112), quantisation (120, 121), random generators
# (123). Weights inside branches (111) are in test_inspect.py.
WITHOUT_ROWS = {6, 7, 46, 47, 48, 111, 112, 120, 121, 123}
CONVENTIONS = {
    *range(1, 8),
    *range(10, 18),
    *range(20, 27),
    *range(30, 33),
    *range(40, 49),
    *range(50, 58),
    *range(60, 67),
    *range(70, 76),
    *range(80, 82),
    *range(90, 94),
    *range(100, 103),
    *range(110, 113),
    *range(120, 124),
}


@dataclass
class Row:
    """Nodes from weights to outputs, the gradient of each output, and the expected gradients of weights."""

    nodes: list[Any]
    weights: dict[str, Any]
    arriving: dict[str, Any]
    gradients: dict[str, Any] | str
    opset: int = OPSET
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    batch_norm: Any = "freeze"


ROWS: dict[str, Row] = {}
# The feed of networks that have only weights.
NOTHING = np.zeros(())


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    """Return a node; inputs and outputs are words, and a dash stands for an omitted one."""
    names = [["" if name == "-" else name for name in words.split()] for words in (inputs, outputs)]
    return helper.make_node(op, *names, name=f"the {op}", **attributes)


def row(name: str, nodes: Any, weights: dict[str, Any], arriving: Any, gradients: Any, **more: Any) -> None:
    assert name not in ROWS
    nodes = nodes if isinstance(nodes, list) else [nodes]
    arriving = arriving if isinstance(arriving, dict) else {"y": arriving}
    ROWS[name] = Row(nodes, weights, arriving, gradients, **more)


def unary(name: str, op: str, x: list[float], gradient: list[float], g: float = 1.0, **attributes: Any) -> None:
    """Add a row for a function of one number at some points, with the output gradient `g` at each."""
    row(name, node(op, "x", **attributes), {"x": x}, [g] * len(x), {"x": gradient})


def array(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else np.asarray(values, np.float64)


def module_of(one: Row, folder: Path, device: str) -> tuple[CheckpointState, Module]:
    """Return the state and module of a network with the sum of outputs times their gradients as its loss."""
    weights = {name: array(value) for name, value in one.weights.items()}
    arriving = {f"arriving {name}": array(value) for name, value in one.arriving.items()}
    nodes, terms = list(one.nodes), []
    for name in one.arriving:
        nodes.append(helper.make_node("Mul", [name, f"arriving {name}"], [f"{name} times what arrives"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name} times what arrives"], [f"term {name}"], keepdims=0))
        terms.append(f"term {name}")
    nodes.append(helper.make_node("Sum", [*terms, "nothing"], ["sum"]))
    initializers = weights | one.constants | arriving
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("nothing", TensorProto.DOUBLE, [])],
        [
            helper.make_tensor_value_info("sum", TensorProto.DOUBLE, []),
            *(helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in one.outputs),
        ],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", one.opset)], ir_version=10)
    artifacts.generate_artifacts(
        model,
        requires_grad=list(one.weights),
        loss=None,
        additional_output_names=list(one.outputs),
        artifact_directory=folder,
        batch_norm=one.batch_norm,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state, device=device)


def by_differences(state: CheckpointState, module: Module) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in state.parameters:
        data = parameter.data
        found[name] = np.zeros_like(data)
        for at in np.ndindex(data.shape):
            value, losses = data[at], []
            for step in (STEP, -STEP):
                data[at] = value + step
                losses.append(float(module(NOTHING)))
            data[at] = value
            found[name][at] = (losses[0] - losses[1]) / (2 * STEP)
    return found


# General: shapes, broadcasting, selection.
row(
    "C1 broadcast axes are summed and a single number gets one",
    node("Mul", "a b"),
    {"a": [[1, 2, 3]], "b": 2.0},
    [[1, 10, 100]],
    {"a": [[2, 20, 200]], "b": 321.0},
)
row(
    "C1 axes of both operands",
    node("Mul", "a b"),
    {"a": [[1], [2]], "b": [[3, 4, 5]]},
    [[1, 1, 1], [10, 10, 10]],
    {"a": [[12], [120]], "b": [[21, 21, 21]]},
)
row(
    "C2 an output that does not reach the loss",
    node("Split", "x", "y other", axis=0, num_outputs=2),
    {"x": [1, 2, 3, 4]},
    [1, 10],
    {"x": [1, 10, 0, 0]},
)
row("C3 one tensor as both operands", node("Div", "x x"), {"x": [2, 4]}, [1, 10], {"x": [0, 0]})
row(
    "C3 one tensor in two nodes",
    [node("Exp", "x", "a"), node("Sin", "x", "b")],
    {"x": [0.0, 1.0]},
    {"a": [1, 1], "b": [1, 1]},
    {"x": [2.0, math.e + math.cos(1.0)]},
)
unary("C4 Relu does not let infinity through", "Relu", [-1, 2], [0, INF], INF)
row("C4 Clip does not let NaN through", node("Clip", "x zero one"), {"x": [-1, 0.5, 2]}, [NAN] * 3, {"x": [0, NAN, 0]})
ROWS["C4 Clip does not let NaN through"].constants.update(zero=np.asarray(0.0), one=np.asarray(1.0))
row(
    "C4 Where does not let infinity through",
    node("Where", "c a b"),
    {"a": [1, 2], "b": [3, 4]},
    [INF, NAN],
    {"a": [INF, 0], "b": [0, NAN]},
    constants={"c": np.asarray([True, False])},
)
row(
    "C5 a cast to integers stops the gradient, one of floats casts back",
    [
        node("Cast", "x", "whole", to=TensorProto.INT64),
        node("Cast", "whole", "back", to=TensorProto.DOUBLE),
        node("Cast", "x", "narrow", to=TensorProto.FLOAT),
        node("Cast", "narrow", "wide", to=TensorProto.DOUBLE),
        node("Mul", "back wide"),
    ],
    {"x": [1.5, 2.5]},
    [1, 10],
    {"x": [1, 20]},
)

# Functions of one number at their kinks.
unary("C10 Abs", "Abs", [-1, 0, 1], [-1, 0, 1])
unary("C10 Relu", "Relu", [-1, 0, 1], [0, 0, 1])
unary("C10 LeakyRelu", "LeakyRelu", [-1, 0, 1], [0.25, 0.25, 1], alpha=0.25)
row(
    "C10 PRelu",
    node("PRelu", "x slope"),
    {"x": [-2, 0, 2], "slope": [0.25, 0.25, 0.25]},
    [1, 1, 1],
    {"x": [0.25, 0.25, 1], "slope": [-2, 0, 0]},
)
unary("C10 Elu", "Elu", [0, 1], [2, 1], alpha=2.0)
unary("C10 Selu", "Selu", [0, 1], [3, 1.5], alpha=2.0, gamma=1.5)
unary("C10 Celu", "Celu", [0, 1], [1, 1], alpha=2.0)
unary("C10 ThresholdedRelu", "ThresholdedRelu", [0.5, 1, 1.5], [0, 0, 1], alpha=1.0)
unary("C10 Shrink", "Shrink", [-1, -0.5, 0, 0.5, 1], [1, 0, 0, 0, 1], lambd=0.5, bias=0.1)
unary("C10 HardSigmoid", "HardSigmoid", [-3, -2, 0, 2, 3], [0, 0, 0.25, 0, 0], alpha=0.25, beta=0.5)
unary("C10 HardSwish", "HardSwish", [-4, -3, -1.5, 0, 1.5, 3, 4], [0, 0, 0, 0.5, 1, 1, 1])
row(
    "C11 Clip passes at both ends, and bounds get what is cut off",
    node("Clip", "x low high"),
    {"x": [-2, -1, 0, 1, 2], "low": -1.0, "high": 1.0},
    [1, 10, 100, 1000, 10000],
    {"x": [0, 10, 100, 1000, 0], "low": 1.0, "high": 10000.0},
)
row(
    "C11 Clip with bounds that cross is the upper one",
    node("Clip", "x low high"),
    {"x": [-2, 0, 2], "low": 1.0, "high": -1.0},
    [1, 10, 100],
    {"x": [0, 0, 0], "low": 0.0, "high": 111.0},
)
for op, sign in (("Max", 1.0), ("Min", -1.0)):
    row(
        f"C12 {op} of two that tie",
        node(op, "a b"),
        {"a": [1, sign * 2], "b": [1, sign]},
        [1, 10],
        {"a": [0.5, 10], "b": [0.5, 0]},
    )
    row(
        f"C12 {op} of three, of which two or three tie",
        node(op, "a b c"),
        {"a": [1, sign * 2], "b": [1, sign * 2], "c": [1, sign]},
        [3, 10],
        {"a": [1, 5], "b": [1, 5], "c": [1, 0]},
    )
row(
    "C13 Pow: a base of zero, an exponent of zero",
    node("Pow", "x e"),
    {"x": [0, 0, 2, -2, 0], "e": [0, 2, 0, 0, 1]},
    [1] * 5,
    {"x": [0, 0, 0, 0, 1], "e": [0, 0, math.log(2.0), NAN, 0]},
)
row(
    "C13 Pow: a negative base has no logarithm",
    node("Pow", "x e"),
    {"x": [-2, 2], "e": [3, 3]},
    [1, 1],
    {"x": [12, 12], "e": [NAN, 8 * math.log(2.0)]},
)
row(
    "C13 Pow: an integer exponent",
    node("Pow", "x e"),
    {"x": [-2, 0, 3]},
    [1, 1, 1],
    {"x": [12, 0, 27]},
    constants={"e": np.asarray([3], np.int64)},
)
unary("C14 Sqrt", "Sqrt", [0, 4], [INF, 0.25])
unary("C14 Log", "Log", [0, 4], [INF, 0.25])
unary("C14 Reciprocal", "Reciprocal", [0, 2], [-INF, -0.25])
row(
    "C15 Mod with the sign of the dividend",
    node("Mod", "a b", fmod=1),
    {"a": [-5.5, 5.5], "b": [2, 2]},
    [1, 10],
    {"a": [1, 10], "b": [2, -20]},
)
row(
    "C15 Mod with the sign of the divisor",
    node("Mod", "a b", fmod=0),
    {"a": [-5.5, 5.5], "b": [2, 2]},
    [1, 10],
    {"a": [1, 10], "b": [3, -20]},
)
for op in ("Ceil", "Floor", "Round", "Sign"):
    row(f"C16 {op}", [node(op, "x", "a"), node("Add", "a x")], {"x": [-1, 0, 0.5, 2]}, [1] * 4, {"x": [1] * 4})
for op in ("Sum", "Mean", "Max", "Min"):
    row(f"C17 {op} of one", node(op, "x"), {"x": [1, NAN, 0]}, [1, 10, 100], {"x": [1, 10, 100]})

# Reductions, softmax, cumulative operators.
ALONG = {"axes": np.asarray([1])}
for op, sign in (("ReduceMax", 1.0), ("ReduceMin", -1.0)):
    row(
        f"C20 {op} shares among ties",
        node(op, "x axes", keepdims=0),
        {"x": [[sign, sign * 3, sign * 3], [2, 2, 2]]},
        [10, 3],
        {"x": [[0, 5, 5], [1, 1, 1]]},
        constants=ALONG,
    )
row(
    "C21 ReduceProd with no, one and two zeros",
    node("ReduceProd", "x axes", keepdims=0),
    {"x": [[2, 3, 4], [0, 3, 4], [0, 0, 4]]},
    [1, 1, 1],
    {"x": [[12, 8, 6], [12, 0, 0], [0, 0, 0]]},
    constants=ALONG,
)
row(
    "C21 CumProd with a zero",
    node("CumProd", "x axis"),
    {"x": [2, 0, 3]},
    [1, 1, 1],
    # y = (x0, x0 x1, x0 x1 x2)
    {"x": [1, 2 + 6, 0]},
    opset=26,
    constants={"axis": np.asarray(0)},
)
row(
    "C22 ReduceL2 of zeros",
    node("ReduceL2", "x axes", keepdims=0),
    {"x": [[0, 0], [3, 4]]},
    [1, 5],
    {"x": [[0, 0], [3, 4]]},
    constants=ALONG,
)
row(
    "C22 ReduceL1 at zero",
    node("ReduceL1", "x axes", keepdims=0),
    {"x": [[0, -2], [3, 0]]},
    [1, 5],
    {"x": [[0, -1], [5, 0]]},
    constants=ALONG,
)
row(
    "C22 ReduceLogSumExp of minus infinities",
    node("ReduceLogSumExp", "x axes", keepdims=0),
    {"x": [[-INF, -INF], [-INF, 0], [1000, 1000]]},
    [1, 1, 1],
    {"x": [[NAN, NAN], [0, 1], [0.5, 0.5]]},
    constants=ALONG,
)
row(
    "C23 no axes and no reduction: the part of each element",
    [
        node("ReduceSumSquare", "x", "a", noop_with_empty_axes=1),
        node("ReduceSum", "x", "b", noop_with_empty_axes=1),
    ],
    {"x": [[1, -2]]},
    {"a": [[1, 10]], "b": [[100, 1000]]},
    {"x": [[102, 960]]},
)
row(
    "C23 no axes: all of them",
    node("ReduceMean", "x", keepdims=0),
    {"x": [[1, 2], [3, 4]]},
    4.0,
    {"x": [[1, 1], [1, 1]]},
)
row(
    "C23 an empty axis",
    node("ReduceSum", "x axes", keepdims=0),
    {"x": np.zeros((2, 0))},
    [1, 1],
    {"x": np.zeros((2, 0))},
    constants=ALONG,
)
row(
    "C24 Softmax before opset 13 is over all axes from the given one",
    node("Softmax", "x", axis=1),
    {"x": np.zeros((1, 2, 2))},
    [[[4, 0], [0, 0]]],
    {"x": [[[0.75, -0.25], [-0.25, -0.25]]]},
    opset=11,
)
row(
    "C24 Softmax from opset 13 on is over one axis",
    node("Softmax", "x", axis=1),
    {"x": np.zeros((1, 2, 2))},
    [[[4, 0], [0, 0]]],
    {"x": [[[1, 0], [-1, 0]]]},
    opset=13,
)
row(
    "C24 LogSoftmax before opset 13",
    node("LogSoftmax", "x", axis=1),
    {"x": np.zeros((1, 2, 2))},
    [[[4, 0], [0, 0]]],
    {"x": [[[3, -1], [-1, -1]]]},
    opset=11,
)
row(
    "C24 a row that is all masked is NaN",
    node("Softmax", "x", axis=1),
    {"x": [[-INF, -INF], [-INF, 0]]},
    [[1, 0], [1, 0]],
    {"x": [[NAN, NAN], [0, 0]]},
    outputs={"y": [[NAN, NAN], [0, 1]]},
)
row("C24 Hardmax", [node("Hardmax", "x", "a"), node("Add", "a x")], {"x": [[1, 3, 3]]}, [[1, 1, 1]], {"x": [[1, 1, 1]]})
for exclusive, reverse, gradient in (
    (0, 0, [111, 110, 100]),
    (1, 0, [110, 100, 0]),
    (0, 1, [1, 11, 111]),
    (1, 1, [0, 1, 11]),
):
    row(
        f"C25 CumSum, exclusive {exclusive}, reverse {reverse}",
        node("CumSum", "x axis", exclusive=exclusive, reverse=reverse),
        {"x": [1, 2, 3]},
        [1, 10, 100],
        {"x": gradient},
        constants={"axis": np.asarray(0)},
    )

# Products.
MATRIX = [[1, 2], [3, 4], [5, 6]]
row(
    "C30 a vector and a vector", node("MatMul", "a b"), {"a": [1, 2], "b": [3, 4]}, 10.0, {"a": [30, 40], "b": [10, 20]}
)
row(
    "C30 a vector and a matrix",
    node("MatMul", "a b"),
    {"a": [1, 2, 3], "b": MATRIX},
    [1, 10],
    {"a": [21, 43, 65], "b": [[1, 10], [2, 20], [3, 30]]},
)
row(
    "C30 a matrix and a vector",
    node("MatMul", "a b"),
    {"a": MATRIX, "b": [7, 8]},
    [1, 10, 100],
    {"a": [[7, 8], [70, 80], [700, 800]], "b": [531, 642]},
)
row(
    "C30 batches that are broadcast are summed",
    node("MatMul", "a b"),
    {"a": np.asarray([[[1.0, 2]], [[3, 4]]]), "b": [[5], [6]]},
    np.asarray([[[1.0]], [[10]]]),
    {"a": np.asarray([[[5.0, 6]], [[50, 60]]]), "b": [[31], [42]]},
)
for first in (0, 1):
    for second in (0, 1):
        _a, _b, _g = (
            np.asarray([[1.0, 2], [3, 4]]),
            np.asarray([[5.0, 6], [7, 8]]),
            np.asarray([[1.0, 10], [100, 1000]]),
        )
        _left, _right = _a.T if first else _a, _b.T if second else _b
        _of_left, _of_right = 2 * _g @ _right.T, 2 * _left.T @ _g
        row(
            f"C31 Gemm, transA {first}, transB {second}",
            node("Gemm", "a b c", transA=first, transB=second, alpha=2.0, beta=0.5),
            {"a": _a, "b": _b, "c": [1, 2]},
            _g,
            {"a": _of_left.T if first else _of_left, "b": _of_right.T if second else _of_right, "c": [50.5, 505]},
        )
row("C31 Gemm without a third input", node("Gemm", "a b"), {"a": [[2]], "b": [[3]]}, [[10]], {"a": [[30]], "b": [[20]]})
row(
    "C32 Einsum: an index of one operand alone",
    node("Einsum", "a b", equation="ij,k->k"),
    {"a": [[1, 2]], "b": [3, 4]},
    [1, 10],
    {"a": [[43, 43]], "b": [3, 30]},
)
row(
    "C32 Einsum: a diagonal",
    node("Einsum", "a", equation="ii->i"),
    {"a": [[1, 2], [3, 4]]},
    [1, 10],
    {"a": [[1, 0], [0, 10]]},
)
row(
    "C32 Einsum: axes of an ellipsis are broadcast and summed",
    node("Einsum", "a b", equation="...i,...i->..."),
    {"a": [[1, 2], [3, 4]], "b": [5, 6]},
    [1, 10],
    {"a": [[5, 6], [50, 60]], "b": [31, 42]},
)

# Convolution and pooling.
row(
    "C40 SAME_UPPER pads more behind, SAME_LOWER before",
    [
        node("Conv", "x w", "a", auto_pad="SAME_UPPER", strides=[2]),
        node("Conv", "x w", "b", auto_pad="SAME_LOWER", strides=[2]),
    ],
    {"x": [[[1, 2]]], "w": [[[1, 10, 100]]]},
    {"a": [[[1]]], "b": [[[1000]]]},
    # Windows are (x0, x1, 0) and (0, x0, x1).
    {"x": [[[1 + 10_000, 10 + 100_000]]], "w": [[[1, 2 + 1000, 2000]]]},
)
row(
    "C41 places that no window touches get nothing",
    node("Conv", "x w", strides=[3]),
    {"x": [[[1, 2, 3, 4, 5, 6]]], "w": [[[10, 20]]]},
    [[[1, 100]]],
    {"x": [[[10, 20, 0, 1000, 2000, 0]]], "w": [[[401, 502]]]},
)
row(
    "C42 padding at the end of a transposed convolution takes no part",
    node("ConvTranspose", "x w", strides=[2], output_padding=[1]),
    {"x": [[[1, 2]]], "w": [[[10]]]},
    [[[1, 7, 100, 1000]]],
    {"x": [[[10, 1000]]], "w": [[[201]]]},
)
row(
    "C43 the first of the largest takes all",
    node("MaxPool", "x", kernel_shape=[3], strides=[3]),
    {"x": [[[2, 5, 5, -1, -1, -1, 1, 4, 4]]]},
    [[[1, 10, 100]]],
    {"x": [[[0, 1, 0, 10, 0, 0, 0, 100, 0]]]},
)
row(
    "C43 padding never wins, NaN does",
    node("MaxPool", "x", kernel_shape=[3], strides=[3], pads=[1, 1]),
    {"x": [[[-5, -6, 1, NAN, 9, 2, -7]]]},
    [[[1, 10, 100]]],
    {"x": [[[1, 0, 0, 10, 0, 100, 0]]]},
    outputs={"y": [[[-5, NAN, 2]]]},
)
row(
    "C43 GlobalMaxPool",
    node("GlobalMaxPool", "x"),
    {"x": [[[3, 3], [1, 2]]]},
    [[[1], [10]]],
    {"x": [[[1, 0], [0, 10]]]},
)
for count, parts in ((0, [1, 0.5 + 5, 5]), (1, [0.5, 0.5 + 5, 5])):
    row(
        f"C44 AveragePool, count_include_pad {count}",
        node("AveragePool", "x", kernel_shape=[2], pads=[1, 0], count_include_pad=count),
        {"x": [[[1, 2, 3]]]},
        [[[1, 1, 10]]],
        {"x": [[[parts[0] + 0.5, parts[1], parts[2]]]]},
    )
row(
    "C44 a window that is cut off by ceil_mode counts its own",
    node("AveragePool", "x", kernel_shape=[2], strides=[2], ceil_mode=1, count_include_pad=1),
    {"x": [[[1, 2, 3]]]},
    [[[2, 10]]],
    {"x": [[[1, 1, 10]]]},
)
for op, more in (("LpPool", {"kernel_shape": [2], "strides": [2]}), ("GlobalLpPool", {})):
    row(
        f"C45 {op} of zeros",
        node(op, "x", p=2, **more),
        {"x": [[[0, 0], [3, 4]]]},
        [[[1], [5]]],
        {"x": [[[0, 0], [3, 4]]]},
    )

# Normalization.
row(
    "C50 what is the same everywhere is taken out",
    node("LayerNormalization", "x s b"),
    {"x": [[1, 2, 6]], "s": [1, 1, 1], "b": [0, 0, 0]},
    [[5, 5, 5]],
    {"x": [[0, 0, 0]], "s": np.asarray([-2.0, -1, 3]) * 5 / math.sqrt(14 / 3 + 1e-5), "b": [5, 5, 5]},
)
row(
    "C51 BatchNormalization in training: the statistics of the batch are part of the function",
    node("BatchNormalization", "x s b mean var", "y mean2 var2", epsilon=0.0, training_mode=1),
    {"x": [[1], [3]], "s": [2], "b": [1]},
    [[1], [10]],
    # Two numbers are always normalized to -1 and 1.
    {"x": [[0], [0]], "s": [9], "b": [11]},
    constants={"mean": np.asarray([1.0]), "var": np.asarray([4.0])},
    batch_norm="train",
)
row(
    "C52 BatchNormalization with the given statistics",
    node("BatchNormalization", "x s b mean var", epsilon=0.0),
    {"s": [2], "b": [1]},
    [[1], [10]],
    {"s": [0 * 1 + 10 * 1.0], "b": [11]},
    constants={"x": np.asarray([[1.0], [3]]), "mean": np.asarray([1.0]), "var": np.asarray([4.0])},
)
row(
    "C53 GroupNormalization at opset 18 has a scale for each group",
    node("GroupNormalization", "x s b", num_groups=1, epsilon=0.0),
    {"s": [2], "b": [1]},
    [[[1], [10]]],
    {"s": [9], "b": [11]},
    opset=18,
    constants={"x": np.asarray([[[1.0], [3]]])},
)
row(
    "C53 GroupNormalization from opset 21 on has one for each channel",
    node("GroupNormalization", "x s b", num_groups=1, epsilon=0.0),
    {"s": [2, 3], "b": [1, 1]},
    [[[1], [10]]],
    {"s": [-1, 10], "b": [1, 10]},
    opset=21,
    constants={"x": np.asarray([[[1.0], [3]]])},
)
_R = 1 / math.sqrt(12.5)
row(
    "C54 RMSNormalization",
    node("RMSNormalization", "x s", epsilon=0.0),
    {"x": [[3, 4]], "s": [1, 2]},
    [[1, 10]],
    {
        "x": [[_R * 1 - 3 * _R**3 * (3 + 80) / 2, _R * 20 - 4 * _R**3 * (3 + 80) / 2]],
        "s": [3 * _R, 40 * _R],
    },
)
row(
    "C55 the mean and the deviation are outputs like any other",
    [
        node("LayerNormalization", "x s", "y m d", epsilon=0.0),
        *(node("Cast", short, name, to=TensorProto.DOUBLE) for short, name in (("m", "mean"), ("d", "deviation"))),
    ],
    {"x": [[1, 3]]},
    {"mean": [[10]], "deviation": [[8]]},
    # The deviation is 1 / sqrt(var): its slope is -(x - mean) / n * deviation^3.
    {"x": [[5 + 4, 5 - 4]]},
    constants={"s": np.ones(2)},
)
row(
    "C56 LRN of an even size reaches further behind",
    node("LRN", "x", size=2, alpha=2.0, beta=1.0, bias=1.0),
    {"x": [[[1], [2], [3]]]},
    [[[1], [0], [0]]],
    # y0 = x0 / (1 + x0^2 + x1^2)
    {"x": [[[1 / 6 - 2 / 36], [-4 / 36], [0]]]},
)
for p in (1, 2):
    row(
        f"C57 LpNormalization of zeros, p {p}",
        node("LpNormalization", "x", axis=1, p=p),
        {"x": [[0, 0]]},
        [[1, 10]],
        {"x": [[0, 0]]},
        outputs={"y": [[0, 0]]},
    )

# Attention.
_RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape)


QKV = {"q": numbers(1, 2, 2, 3), "k": numbers(1, 2, 3, 3), "v": numbers(1, 2, 3, 2)}
_HIDDEN = np.asarray([[False, False, False], [True, False, True]])
row(
    "C60 a query from which all keys are hidden gives zeros and passes none back",
    node("Attention", "q k v mask"),
    {"q": [[[[1.0]]]], "k": [[[[1.0], [2]]]], "v": [[[[1.0], [2]]]]},
    [[[[10]]]],
    {"q": [[[[0]]]], "k": [[[[0], [0]]]], "v": [[[[0], [0]]]]},
    constants={"mask": np.asarray([[False, False]])},
    outputs={"y": [[[[0]]]]},
)
row(
    "C61 a mask of truth values selects",
    node("Attention", "q k v mask"),
    {"q": [[[[1.0]]]], "k": [[[[1.0], [5]]]], "v": [[[[3.0], [7]]]]},
    [[[[10]]]],
    {"q": [[[[0]]]], "k": [[[[0], [0]]]], "v": [[[[10], [0]]]]},
    constants={"mask": np.asarray([[True, False]])},
    outputs={"y": [[[[3]]]]},
)
row(
    "C61 a mask of floats gets a gradient, summed over the axes along which it is broadcast",
    node("Attention", "q k v mask", softcap=1.5, scale=0.7),
    QKV | {"mask": numbers(2, 3)},
    numbers(1, 2, 2, 2),
    DIFFERENCES,
)
row(
    "C61 keys behind the end of a mask are hidden",
    node("Attention", "q k v mask"),
    QKV,
    numbers(1, 2, 2, 2),
    DIFFERENCES,
    opset=24,
    constants={"mask": np.asarray([[True, True], [False, True]])},
)
row(
    "C62 query heads that share a head of keys and values",
    node("Attention", "q k v"),
    {"q": numbers(1, 4, 2, 3), "k": numbers(1, 2, 3, 3), "v": numbers(1, 2, 3, 2)},
    numbers(1, 4, 2, 2),
    DIFFERENCES,
)
row(
    "C63 the past gets a gradient, and what is present passes one on",
    node("Attention", "q k v - past_k past_v", "y present_k present_v"),
    QKV | {"past_k": numbers(1, 2, 2, 3), "past_v": numbers(1, 2, 2, 2)},
    {"y": numbers(1, 2, 2, 2), "present_k": numbers(1, 2, 5, 3), "present_v": numbers(1, 2, 5, 2)},
    DIFFERENCES,
)
for mode in range(4):
    row(
        f"C63 scores are an output like any other, mode {mode}",
        node("Attention", "q k v mask", "y - - scores", qk_matmul_output_mode=mode, softcap=2.0),
        QKV | {"mask": numbers(2, 3)},
        {"y": numbers(1, 2, 2, 2), "scores": numbers(1, 2, 2, 3)},
        DIFFERENCES,
    )
row(
    "C64 with a past the first query sees all of it",
    node("Attention", "q k v - past_k past_v", is_causal=1),
    {"q": [[[[0], [0]]]], "k": [[[[0], [0]]]], "v": [[[[1], [2]]]], "past_k": [[[[0]]]], "past_v": [[[[3]]]]},
    [[[[2], [30]]]],
    {
        "q": [[[[0], [0]]]],
        "k": [[[[0], [0]]]],
        "past_k": [[[[0]]]],
        "v": [[[[1 + 10], [10]]]],
        "past_v": [[[[1 + 10]]]],
    },
)
for interleaved in (0, 1):
    row(
        f"C65 rotations, interleaved {interleaved}, of a part, with tables that are trained",
        node("RotaryEmbedding", "x cos sin at", interleaved=interleaved, rotary_embedding_dim=4),
        {"x": numbers(2, 2, 2, 6), "cos": numbers(3, 2), "sin": numbers(3, 2)},
        numbers(2, 2, 2, 6),
        DIFFERENCES,
        # A position occurs twice: its rows of the tables get the sum.
        constants={"at": np.asarray([[0, 2], [2, 1]])},
    )

# Indices and shapes.
row(
    "C70 Gather adds, also from behind",
    node("Gather", "x at"),
    {"x": [1, 2, 3]},
    [1, 10, 100],
    {"x": [0, 0, 111]},
    constants={"at": np.asarray([2, -1, 2])},
)
row(
    "C70 GatherElements adds, also from behind",
    node("GatherElements", "x at", axis=1),
    {"x": [[1, 2], [3, 4]]},
    [[1, 10], [100, 1000]],
    {"x": [[11, 0], [1000, 100]]},
    constants={"at": np.asarray([[0, -2], [1, 0]])},
)
row(
    "C70 GatherND adds, also from behind",
    node("GatherND", "x at"),
    {"x": [[1, 2], [3, 4]]},
    [1, 10],
    {"x": [[0, 0], [0, 11]]},
    constants={"at": np.asarray([[1, 1], [-1, -1]])},
)
AT = {"at": np.asarray([2, -3])}
row(
    "C71 ScatterElements: what is written over passes nothing back",
    node("ScatterElements", "x at u"),
    {"x": [1, 2, 3], "u": [4, 5]},
    [1, 10, 100],
    {"x": [0, 10, 0], "u": [100, 1]},
    constants=AT,
)
row(
    "C71 ScatterND: what is written over passes nothing back",
    node("ScatterND", "x at u"),
    {"x": [1, 2, 3], "u": [4, 5]},
    [1, 10, 100],
    {"x": [0, 10, 0], "u": [100, 1]},
    constants={"at": np.asarray([[2], [-3]])},
)
for op, indices in (("ScatterElements", [0, 0, 1]), ("ScatterND", [[0], [0], [1]])):
    for reduction, of_x, of_u in (
        ("add", [1, 10, 100], [1, 1, 10]),
        # 2 * 0 * 3 and 5 * 4
        ("mul", [0, 40, 100], [6, 0, 50]),
        ("max", [0, 5, 100], [0, 1, 5]),
        ("min", [0, 5, 100], [1, 0, 5]),
    ):
        u = [0, 3, 4] if reduction == "mul" else [-2, 3, 5]
        row(
            f"C72 {op} that reduces by {reduction}",
            node(op, "x at u", reduction=reduction),
            {"x": [2, 5, 7], "u": u},
            [1, 10, 100],
            {"x": of_x, "u": of_u},
            constants={"at": np.asarray(indices)},
        )
    row(
        f"C72 {op}: data and updates that tie share",
        node(op, "x at u", reduction="max"),
        {"x": [4, 1], "u": [4, 4, 0]},
        [3, 10],
        {"x": [1, 10], "u": [1, 1, 0]},
        constants={"at": np.asarray(indices)},
    )
PADS = {"pads": np.asarray([2, 1])}
row(
    "C73 Pad: the constant gets what arrives at the border",
    node("Pad", "x pads c"),
    {"x": [1, 2, 3], "c": 9.0},
    [1, 2, 10, 20, 30, 100],
    {"x": [10, 20, 30], "c": 103.0},
    constants=PADS,
)
for mode, gradient in (("reflect", [10, 22 + 100, 31]), ("edge", [13, 20, 130]), ("wrap", [110, 21, 32])):
    row(
        f"C73 Pad by {mode} adds to where it comes from",
        node("Pad", "x pads", mode=mode),
        {"x": [1, 2, 3]},
        [1, 2, 10, 20, 30, 100],
        {"x": gradient},
        constants=PADS,
    )
row(
    "C73 Pad: what is cropped gets nothing",
    node("Pad", "x pads"),
    {"x": [1, 2, 3]},
    [1, 10],
    {"x": [0, 1, 10]},
    constants={"pads": np.asarray([-1, 0])},
)
row(
    "C73 Slice backwards, from behind the end",
    node("Slice", "x from to axes step"),
    {"x": [1, 2, 3, 4]},
    [1, 10],
    {"x": [0, 10, 0, 1]},
    constants={name: np.asarray([at]) for name, at in (("from", 9), ("to", -9), ("axes", 0), ("step", -2))},
)
row(
    "C74 TopK: among equals the first",
    node("TopK", "x k", "y at"),
    {"x": [2, 3, 3, 3]},
    [1, 10],
    {"x": [0, 1, 10, 0]},
    constants={"k": np.asarray([2])},
)
row(
    "C74 OneHot: the values",
    node("OneHot", "at depth values", axis=0),
    {"values": [0, 1]},
    [[1, 10], [100, 1000], [10_000, 100_000]],
    {"values": [110_110, 1001]},
    constants={"at": np.asarray([-3, 1]), "depth": np.asarray(3)},
)
row(
    "C74 Unique: where each is first",
    node("Unique", "x"),
    {"x": [3, 1, 3, 2, 1]},
    [1, 10, 100],
    {"x": [100, 1, 0, 10, 0]},
)
row(
    "C75 shapes are those of the run",
    [node("Compress", "x keep", "a", axis=0), node("Unsqueeze", "a axes", "b"), node("Flatten", "b", "y", axis=2)],
    {"x": [[1, 2], [3, 4], [5, 6]]},
    [[1, 10, 100, 1000]],
    {"x": [[1, 10], [0, 0], [100, 1000]]},
    constants={"keep": np.asarray([True, False, True]), "axes": np.asarray([0, 1])},
)
row(
    "C80 Resize: what is beyond the picture gets the value of extrapolation, and passes nothing back",
    node(
        "Resize",
        "x roi - sizes",
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=5.0,
    ),
    {"x": [1, 2, 3]},
    [1, 10, 100],
    # The samples are at 0, 2 and 4.
    {"x": [1, 0, 10]},
    constants={"roi": np.asarray([0.0, 2.0]), "sizes": np.asarray([3])},
)
for mode in ("nearest", "linear", "cubic"):
    for more in (
        {"coordinate_transformation_mode": "align_corners"},
        {"coordinate_transformation_mode": "half_pixel_symmetric"},
        {"antialias": 1} if mode != "nearest" else {"nearest_mode": "ceil"},
        {"exclude_outside": 1, "cubic_coeff_a": -0.5} if mode == "cubic" else {},
    ):
        row(
            f"C80 Resize, {mode}, {more}",
            node("Resize", "x - - sizes", mode=mode, **more),
            {"x": numbers(1, 1, 4, 5)},
            numbers(1, 1, 3, 7),
            DIFFERENCES,
            constants={"sizes": np.asarray([1, 1, 3, 7])},
        )

# Recurrent networks.
SIZES = {"RNN": 1, "GRU": 3, "LSTM": 4}
for op, gates in SIZES.items():
    for direction in ("forward", "reverse", "bidirectional"):
        both = 2 if direction == "bidirectional" else 1
        row(
            f"C91 {op}, {direction}, lengths: what arrives behind the end of a sequence goes nowhere",
            node(op, "x w r b lengths", "y last", hidden_size=2, direction=direction),
            {
                "x": numbers(3, 2, 2),
                "w": numbers(both, 2 * gates, 2),
                "r": numbers(both, 2 * gates, 2),
                "b": numbers(both, 4 * gates),
            },
            {"y": numbers(3, both, 2, 2), "last": numbers(both, 2, 2)},
            DIFFERENCES,
            constants={"lengths": np.asarray([3, 1], np.int32)},
        )
    row(
        f"C93 {op} without bias and states, and with no output but the last",
        node(op, "x w r", "- y", hidden_size=2),
        {"x": numbers(3, 2, 2), "w": numbers(1, 2 * gates, 2), "r": numbers(1, 2 * gates, 2)},
        numbers(1, 2, 2),
        DIFFERENCES,
    )
# One step from a zero state: h = o * tanh(i * g) with gates i o f g, one number each.
_I, _O, _G = (1 / (1 + math.exp(-value)) for value in (0.3, -0.2, 0.0))
_G = math.tanh(0.5)
_C = math.tanh(_I * _G)
row(
    "C90 LSTM: the order of gates is i o f c",
    node("LSTM", "x w r", "- y", hidden_size=1),
    {"w": [[[0.3], [-0.2], [0.9], [0.5]]]},
    [[[1]]],
    {
        "w": [
            [
                [_O * (1 - _C**2) * _G * _I * (1 - _I)],
                [_C * _O * (1 - _O)],
                [0],
                [_O * (1 - _C**2) * _I * (1 - _G**2)],
            ]
        ]
    },
    constants={"x": np.ones((1, 1, 1)), "r": np.ones((1, 4, 1))},
)
row(
    "C92 clip cuts the gradient, ends pass",
    node("RNN", "x w r", "y", hidden_size=1, clip=1.0, activations=["Affine"], activation_alpha=[2.0]),
    {"x": [[[0.5]], [[3.0]]]},
    [[[[1]]], [[[10]]]],
    {"x": [[[2]], [[0]]]},
    constants={"w": np.ones((1, 1, 1)), "r": np.zeros((1, 1, 1))},
)
for more in ({"input_forget": 1}, {"clip": 0.8}, {"layout": 1}):
    first = "layout" in more
    row(
        f"C92 LSTM with peepholes and {more}",
        node("LSTM", "x w r b - h c p", "y", hidden_size=2, **more),
        {
            "x": numbers(3, 3, 2),
            "w": numbers(1, 8, 2),
            "r": numbers(1, 8, 2),
            "b": numbers(1, 16),
            "h": numbers(*((3, 1, 2) if first else (1, 3, 2))),
            "c": numbers(*((3, 1, 2) if first else (1, 3, 2))),
            "p": numbers(1, 6),
        },
        numbers(*((3, 3, 1, 2) if first else (3, 1, 3, 2))),
        DIFFERENCES,
    )

# Losses and regularisation.
row(
    "C100 Dropout of everything",
    node("Dropout", "x ratio train"),
    {"x": [1, 2]},
    [1, 10],
    {"x": [0, 0]},
    constants={"ratio": np.asarray(1.0), "train": np.asarray(True)},
)
SCORES = {"x": np.zeros((3, 2))}
LABELS = {"at": np.asarray([0, 1, -7]), "weights": np.asarray([1.0, 3.0])}
row(
    "C101 SoftmaxCrossEntropyLoss: the mean is over the weights of the labels that count",
    node("SoftmaxCrossEntropyLoss", "x at weights", ignore_index=-7),
    SCORES,
    8.0,
    {"x": [[-1, 1], [3, -3], [0, 0]]},
    constants=LABELS,
)
row(
    "C101 NegativeLogLikelihoodLoss: the mean is over the weights of the labels that count",
    node("NegativeLogLikelihoodLoss", "x at weights", ignore_index=-7),
    SCORES,
    8.0,
    {"x": [[-2, 0], [0, -6], [0, 0]]},
    constants=LABELS,
)
for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    row(
        f"C101 {op}: the mean of nothing",
        node(op, "x at", ignore_index=1),
        {"x": [[1, 2]]},
        1.0,
        {"x": [[0, 0]]},
        constants={"at": np.asarray([1])},
        outputs={"y": NAN},
    )
row(
    "C102 SoftmaxCrossEntropyLoss: what arrives at the logarithms",
    node("SoftmaxCrossEntropyLoss", "x at", "y logs", reduction="sum"),
    {"x": numbers(2, 3)},
    {"y": 2.0, "logs": numbers(2, 3)},
    DIFFERENCES,
    constants={"at": np.asarray([2, 0])},
)


# Control flow.
def branch(nodes: list[Any], *outputs: str) -> Any:
    return helper.make_graph(
        nodes, "branch", [], [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in outputs]
    )


for chosen in (True, False):
    row(
        f"C110 If: the branch that ran, {chosen}",
        node(
            "If",
            "chosen",
            then_branch=branch([helper.make_node("Mul", ["x", "ten"], ["a"])], "a"),
            else_branch=branch([helper.make_node("Identity", ["x"], ["b"])], "b"),
        ),
        {"x": [1, 2]},
        [1, 10],
        {"x": [10, 100] if chosen else [1, 10]},
        constants={"chosen": np.asarray(chosen), "ten": np.asarray(10.0)},
    )
for turns, of_x, of_w in ((0, 10.0, 0.0), (3, 10 * 8.0, 10 * 3 * 4 * 3.0)):
    turn = helper.make_graph(
        [helper.make_node("Mul", ["h", "w"], ["next"]), helper.make_node("Identity", ["on"], ["still"])],
        "turn",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.DOUBLE, []),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.DOUBLE, []),
        ],
    )
    row(
        f"C110 Loop of {turns} turns",
        node("Loop", "turns - x", body=turn),
        {"x": 3.0, "w": 2.0},
        10.0,
        {"x": of_x, "w": of_w},
        constants={"turns": np.asarray(turns)},
    )
for axis, backwards in ((0, 0), (1, 0), (0, 1), (1, 1)):
    step = helper.make_graph(
        [helper.make_node("Mul", ["h", "x"], ["next"]), helper.make_node("Add", ["next", "w"], ["out"])],
        "step",
        [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in ("h", "x")],
        [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in ("next", "out")],
    )
    row(
        f"C110 Scan along axis {axis}, backwards {backwards}",
        node(
            "Scan",
            "h x",
            "y all",
            body=step,
            num_scan_inputs=1,
            scan_input_axes=[axis],
            scan_input_directions=[backwards],
            scan_output_directions=[backwards],
        ),
        {"h": numbers(2), "x": numbers(2, 2), "w": numbers(2)},
        {"y": numbers(2), "all": numbers(2, 2)},
        DIFFERENCES,
    )

# Determinants of singular matrices: the gradient is the cofactors, while PyTorch returns zeros.
row("C26 Det", node("Det", "x"), {"x": [[1, 2], [3, 5]]}, 2, {"x": [[10, -6], [-4, 2]]})
row("C26 Det of a singular matrix", node("Det", "x"), {"x": [[1, 2], [2, 4]]}, 1, {"x": [[4, -2], [-2, 1]]})
row("C26 Det of a column of zeros", node("Det", "x"), {"x": [[0, 1], [0, 2]]}, 1, {"x": [[2, 0], [-1, 0]]})
row("C26 Det of nothing but zeros", node("Det", "x"), {"x": np.zeros((3, 3))}, 1, {"x": np.zeros((3, 3))})


def looked_at(name: str, place: float, slope: float, **attributes: Any) -> None:
    """Add a row that samples the middle one of three equal lines at one position, with the position's gradient."""
    line = np.tile([1.0, 3.0, 7.0], 3).reshape(1, 1, 3, 3)
    row(
        f"C81 GridSample {name}",
        node("GridSample", "x grid", **attributes),
        {"grid": np.asarray([place, 0.0]).reshape(1, 1, 1, 2)},
        np.ones((1, 1, 1, 1)),
        {"grid": np.asarray([slope, 0.0]).reshape(1, 1, 1, 2)},
        constants={"x": line},
    )


looked_at("between elements", 0.5, 4, align_corners=1, padding_mode="border")
looked_at("on the edge that border clips", 1, 0, align_corners=1, padding_mode="border")
looked_at("beyond the edge that border clips", 1.5, 0, align_corners=1, padding_mode="border")
looked_at("reflected", 1.5, -4, align_corners=1, padding_mode="reflection")
looked_at("in the last half of a cell", 0.9, -10.5, padding_mode="zeros")
for mode in ("linear", "cubic"):
    for padding in ("zeros", "border", "reflection"):
        row(
            f"C81 GridSample {mode} {padding}",
            node("GridSample", "x grid", mode=mode, padding_mode=padding),
            {"x": np.arange(12.0).reshape(1, 1, 3, 4) ** 2, "grid": np.linspace(-1.37, 1.53, 12).reshape(1, 2, 3, 2)},
            np.linspace(0.5, 1, 6).reshape(1, 1, 2, 3),
            DIFFERENCES,
        )

# A past state gets a gradient, and the present state passes its gradient on.
row(
    "C66 LinearAttention",
    node(
        "LinearAttention",
        "q k v past decay beta",
        "y present",
        q_num_heads=2,
        kv_num_heads=1,
        update_rule="gated_delta",
    ),
    {
        "q": np.linspace(-1, 1, 12).reshape(1, 3, 4),
        "k": np.linspace(0.3, -0.8, 6).reshape(1, 3, 2),
        "v": np.linspace(-0.5, 0.9, 9).reshape(1, 3, 3),
        "past": np.linspace(1, -1, 6).reshape(1, 1, 2, 3),
        "decay": np.linspace(-0.9, 0.1, 3).reshape(1, 3, 1),
        "beta": np.linspace(0.2, 0.8, 3).reshape(1, 3, 1),
    },
    {"y": np.linspace(0.5, 1.5, 18).reshape(1, 3, 6), "present": np.linspace(-1, 1, 6).reshape(1, 1, 2, 3)},
    DIFFERENCES,
    opset=27,
)
row(
    "C66 CausalConvWithState",
    node("CausalConvWithState", "x w b past", "y present", activation="silu"),
    {
        "x": np.linspace(-1, 1, 6).reshape(1, 2, 3),
        "w": np.linspace(0.4, -0.7, 8).reshape(2, 1, 4),
        "b": np.asarray([0.3, -0.2]),
        "past": np.linspace(0.8, -0.5, 6).reshape(1, 2, 3),
    },
    {"y": np.linspace(0.5, 1.5, 6).reshape(1, 2, 3), "present": np.linspace(-1, 1, 6).reshape(1, 2, 3)},
    DIFFERENCES,
    opset=27,
)

# The conjugate transform, without the division of the inverse.
row(
    "C122 DFT",
    node("DFT", "x - axis"),
    {"x": np.zeros((1, 2, 2))},
    [[[1, 2], [3, 5]]],
    {"x": [[[4, 7], [-2, -3]]]},
    constants={"axis": np.asarray(1)},
)
row(
    "C122 DFT, inverse",
    node("DFT", "x - axis", inverse=1),
    {"x": np.zeros((1, 2, 2))},
    [[[1, 2], [3, 5]]],
    {"x": [[[2, 3.5], [-1, -1.5]]]},
    constants={"axis": np.asarray(1)},
)
for size, parts, inverse, onesided in ((5, 1, 0, 1), (6, 1, 0, 1), (4, 2, 1, 1), (5, 2, 0, 0), (5, 2, 1, 0)):
    for length in (None, 3, 8):
        wanted = length or (2 * (size - 1) if inverse and onesided else size)
        shape = (1, wanted // 2 + 1 if onesided and not inverse else wanted, 1 if inverse and onesided else 2)
        row(
            f"C122 DFT of {size}, {parts} parts, to {length}, {inverse} {onesided}",
            node("DFT", "x length axis" if length else "x - axis", inverse=inverse, onesided=onesided),
            {"x": np.linspace(-1, 2, size * parts).reshape(1, size, parts)},
            np.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape),
            DIFFERENCES,
            constants={"axis": np.asarray(1)} | ({"length": np.asarray(length)} if length else {}),
        )


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_gradient(name: str, device: str, tmp_path: Path) -> None:
    one = ROWS[name]
    state, module = module_of(one, tmp_path, device)
    found = module(NOTHING)
    for output, (wanted, got) in enumerate(zip(one.outputs.values(), found[1:] if one.outputs else [], strict=True)):
        np.testing.assert_allclose(got, array(wanted), rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"output {output}")
    gradients = {key: np.array(parameter.grad) for key, parameter in state.parameters if parameter.requires_grad}
    assert set(gradients) == set(one.weights)
    if isinstance(one.gradients, str):
        expected, tolerance = by_differences(state, module), TOLERANCE_OF_DIFFERENCES
    else:
        expected, tolerance = {key: array(value) for key, value in one.gradients.items()}, TOLERANCE
    for key, wanted in expected.items():
        np.testing.assert_allclose(gradients[key], wanted, rtol=tolerance, atol=tolerance, strict=True, err_msg=key)


def test_every_convention_has_rows() -> None:
    found = {int(name.split()[0].removeprefix("C")) for name in ROWS}
    assert found | WITHOUT_ROWS == CONVENTIONS
    assert not found & WITHOUT_ROWS
