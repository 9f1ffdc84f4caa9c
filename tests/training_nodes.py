"""Nodes of operators in training graphs of onnxruntime-training, each as a model with inputs.

``data/training-nodes.npz`` has the inputs and the results of 1.19.2:

    build/oracle/venv/bin/python tests/oracle/record_nodes.py tests/data/training-nodes.npz

records them anew after a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

MICROSOFT = "com.microsoft"
# The opset of the models, except for operators with functions of an older opset.
OPSET = 17
# An omitted input.
NONE = None


@dataclass
class Node:
    """A node of an operator with its inputs."""

    op: str
    name: str
    inputs: list[np.ndarray | None]
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = MICROSOFT
    opset: int = OPSET
    shapes: list[list[int]] | None = None
    """Declared shapes of the results, where these cannot be found otherwise."""
    types: dict[int, int] = field(default_factory=dict)
    """Element types of the results that are no floats."""
    left_out: tuple[int, ...] = ()
    """Optional results that the node does not compute: their names are empty."""

    @property
    def key(self) -> str:
        """Return the name of the case in the record."""
        return f"{self.op}, {self.name}"

    def feeds(self) -> dict[str, np.ndarray]:
        """Return the inputs by name."""
        return {f"x{k}": value for k, value in enumerate(self.inputs) if value is not None}

    def model(self) -> onnx.ModelProto:
        """Return the model of the node."""
        names = ["" if value is None else f"x{k}" for k, value in enumerate(self.inputs)]
        kept = [k for k in range(self.outputs) if k not in self.left_out]
        results = [f"y{k}" if k in kept else "" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, results, name="node", domain=self.domain, **self.attributes)
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in self.feeds().items()
        ]
        made = [
            helper.make_tensor_value_info(
                f"y{k}", self.types.get(k, TensorProto.FLOAT), None if self.shapes is None else self.shapes[k]
            )
            for k in kept
        ]
        graph = helper.make_graph([node], "graph", given, made)
        sets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=sets, ir_version=8)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Return numbers around zero."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Return numbers from 0.5 to 2."""
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    """Return a vector of int64."""
    return np.array(values, np.int64)


def log_softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Compute the logarithm of the softmax."""
    shifted = scores - scores.max(axis=axis, keepdims=True)
    result: np.ndarray = (shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))).astype(np.float32)
    return result


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Compute the softmax."""
    return np.exp(log_softmax(scores, axis))


def activations() -> Iterator[Node]:
    """Yield element-wise activations."""
    g, x, bias = floats(2, 3, 4), floats(2, 3, 4, seed=1), floats(4, seed=2)
    for op in ("ReluGrad", "SigmoidGrad", "TanhGrad", "LeakyReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad"):
        yield Node(op, "plain", [g, x])
    yield Node("LeakyReluGrad", "alpha", [g, x], attributes={"alpha": 0.25})
    yield Node("QuickGeluGrad", "alpha", [g, x], attributes={"alpha": 0.75})
    for op in ("BiasGeluGrad_dX", "BiasFastGeluGrad_dX"):
        yield Node(op, "plain", [g, x, bias])
    for op in ("Gelu", "FastGelu", "QuickGelu"):
        yield Node(op, "plain", [x])
    yield Node("FastGelu", "bias", [x, bias])
    yield Node("QuickGelu", "alpha", [x], attributes={"alpha": 0.75})
    yield Node("BiasGelu", "plain", [x, bias])


def quotients() -> Iterator[Node]:
    """Yield gradients of divisions, with broadcasts in each direction, and with one gradient only."""
    a, b = floats(2, 3, seed=1), positive(2, 3, seed=2)
    shapes = {
        "alike": (a, b),
        "row": (a, positive(3, seed=2)),
        "column": (a, positive(2, 1, seed=2)),
        "scalar": (a, positive(seed=2)),
        "numerator": (floats(3, seed=1), b),
        "both": (floats(2, 1, seed=1), positive(1, 3, seed=2)),
    }
    for name, (top, bottom) in shapes.items():
        yield Node("DivGrad", name, [floats(2, 3), top, bottom], 2)
    yield Node("DivGrad", "divisor alone", [floats(2, 3), a, b], 2, left_out=(0,))
    yield Node("DivGrad", "dividend alone", [floats(2, 3), a, b])


def softmaxes() -> Iterator[Node]:
    """Yield gradients of softmaxes, before and since opset 13."""
    g, scores = floats(2, 3, 4), floats(2, 3, 4, seed=1)
    for op, of in (("Softmax", softmax), ("LogSoftmax", log_softmax)):
        for axis in (0, 1, 2, -1):
            rows = scores.reshape(int(np.prod(scores.shape[: axis % 3])), -1)
            yield Node(f"{op}Grad", f"axis {axis}", [g, of(rows).reshape(2, 3, 4)], attributes={"axis": axis})
            yield Node(f"{op}Grad_13", f"axis {axis}", [g, of(scores, axis)], attributes={"axis": axis})
        yield Node(f"{op}Grad", "no axis", [g, of(scores.reshape(2, 12)).reshape(2, 3, 4)])
        yield Node(f"{op}Grad_13", "no axis", [g, of(scores)])


def losses() -> Iterator[Node]:
    """Yield losses with class labels, weights and an ignored class, and with distributions as labels."""
    scores, weight = floats(4, 3, 2, seed=1), positive(3, seed=2)
    log_prob = log_softmax(scores, 1)
    labels = np.array([[0, 2], [1, 1], [2, 0], [2, 1]])
    for reduction in ("none", "sum", "mean"):
        said: dict[str, Any] = {"reduction": reduction}
        g = floats(4, 2) if reduction == "none" else floats()
        for dtype in (np.int32, np.int64):
            for given in (NONE, weight):
                kind = f"{reduction}, {np.dtype(dtype)}, {'one' if given is None else 'weights'}"
                inputs = [g, log_prob, labels.astype(dtype), *([] if given is None else [given])]
                yield Node("SoftmaxCrossEntropyLossGrad", kind, inputs, attributes=said)
                yield Node(
                    "SoftmaxCrossEntropyLossGrad",
                    f"{kind}, one ignored",
                    inputs,
                    attributes={**said, "ignore_index": 2},
                )
        label = labels.astype(np.int64)
        for given in (NONE, weight):
            for ignored in (NONE, np.array(1)):
                kind = f"{reduction}, {'one' if given is None else 'weights'}"
                kind += ", all" if ignored is None else ", one ignored"
                inputs = [scores, label, given, ignored]
                while inputs[-1] is None:
                    inputs.pop()
                yield Node("SoftmaxCrossEntropyLossInternal", kind, inputs, 2, said)
                yield Node("SoftmaxCrossEntropyLossInternalGrad", kind, [g, log_prob, *inputs[1:]], attributes=said)
                inputs = [log_prob, *inputs[1:]]
                yield Node("NegativeLogLikelihoodLossInternal", kind, inputs, attributes=said, opset=12)
                yield Node("NegativeLogLikelihoodLossInternal2", kind, inputs, attributes=said)
        inputs = [g, log_prob, label, weight, np.array(1), floats(4, 3, 2, seed=5)]
        yield Node("SoftmaxCrossEntropyLossInternalGrad", f"{reduction}, bias", inputs, attributes=said)
    rows, each = floats(2, 3, 4, seed=1), positive(2, 3, seed=2)
    one_hot = np.eye(4, dtype=np.float32)[[[0, 3, 1], [2, 2, 0]]]
    classes = np.array([[0, 3, 1], [2, 2, 0]])
    for reduction in ("sum", "mean"):
        said = {"reduction": reduction}
        yield Node("SoftmaxCrossEntropy", reduction, [rows, one_hot], 2, said)
        yield Node("SoftmaxCrossEntropyGrad", reduction, [floats(), log_softmax(rows), one_hot], attributes=said)
        for given in (NONE, each):
            kind = f"{reduction}, {'one' if given is None else 'weights'}"
            last = [classes, *([] if given is None else [given])]
            yield Node("SparseSoftmaxCrossEntropy", kind, [rows, *last], 2, said, domain="")
            inputs = [floats(), log_softmax(rows), *last]
            yield Node("SparseSoftmaxCrossEntropyGrad", kind, inputs, attributes=said, domain="")


def convolutions() -> Iterator[Node]:
    """Yield convolutions with strides, padding, dilations and groups, in one, two and three dimensions."""
    for name, x, w, y, said in (
        ("plain", (2, 3, 6, 5), (4, 3, 3, 2), (2, 4, 4, 4), {}),
        ("padded", (1, 2, 5, 5), (3, 2, 3, 3), (1, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("dilated", (1, 2, 7, 7), (3, 2, 3, 3), (1, 3, 3, 3), {"dilations": [2, 2]}),
        ("groups", (1, 4, 4, 4), (6, 2, 3, 3), (1, 6, 2, 2), {"group": 2}),
        ("one axis", (2, 3, 8), (4, 3, 3), (2, 4, 6), {}),
    ):
        attributes = {"kernel_shape": list(w[2:]), **said}
        yield Node("ConvGrad", name, [floats(*y), floats(*x, seed=1), floats(*w, seed=2)], 3, attributes)
    filters = [floats(1, 3, 3, 3), floats(1, 2, 5, 5, seed=1), floats(3, 2, 3, 3, seed=2)]
    yield Node("ConvGrad", "filter alone", filters, 2, {"kernel_shape": [3, 3]}, left_out=(0,))


def pools() -> Iterator[Node]:
    """Yield poolings that need declared shapes."""
    apart, one = np.array([[[[0, 2], [13, 15]]]]), np.array([[[[5, 5], [5, 10]]]])
    windows = {"kernel_shape": [2, 2], "strides": [2, 2]}
    inputs = [floats(1, 1, 2, 2), apart]
    yield Node("MaxPoolGrad", "plain", inputs, attributes=windows, shapes=[[1, 1, 4, 4]], domain="")
    windows = {"kernel_shape": [3, 3]}
    inputs = [floats(1, 1, 2, 2), one]
    yield Node("MaxPoolGrad", "overlapping", inputs, attributes=windows, shapes=[[1, 1, 4, 4]], domain="")
    for name, size, said in (
        ("plain", 4, {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("padded", 4, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("counted", 4, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ):
        shapes = [[1, 2, size, size]]
        yield Node("AveragePoolGrad", name, [floats(1, 2, 2, 2)], attributes=said, shapes=shapes, domain="")


def gathers() -> Iterator[Node]:
    """Yield gathers with equal and negative indices."""
    for axis in (0, 1, -1):
        rows, size = (2, 3), [4, 3, 5]
        taken = [*size[: axis % 3], *rows, *size[axis % 3 + 1 :]]
        for dtype in (np.int32, np.int64):
            indices = np.array([[0, 2, -1], [2, 1, 0]], dtype)
            name = f"axis {axis}, {np.dtype(dtype)}"
            yield Node("GatherGrad", name, [ints(*size), indices, floats(*taken)], attributes={"axis": axis})
    for axis in (0, 1):
        indices = np.array([[0, 1], [1, 1], [0, 0]]) if axis == 0 else np.array([[0, 1], [1, 1], [2, 0]])
        size = (2, 2) if axis == 0 else (3, 3)
        yield Node(
            "GatherElementsGrad", f"axis {axis}", [floats(3, 2), ints(*size), indices], attributes={"axis": axis}
        )
    yield Node("GatherNDGrad", "rows", [ints(3, 4), np.array([[0], [2], [0]]), floats(3, 4)])
    yield Node("GatherNDGrad", "elements", [ints(3, 4), np.array([[0, 1], [2, 3], [0, 1]]), floats(3)])
    batch = [ints(2, 3, 4), np.array([[[0], [0]], [[2], [1]]]), floats(2, 2, 4)]
    yield Node("GatherNDGrad", "batch", batch, attributes={"batch_dims": 1})
    yield Node("ShrunkenGather", "plain", [floats(5, 3), np.array([4, 0, 2])])


def slices() -> Iterator[Node]:
    """Yield slices with steps, and slices of some axes."""
    yield Node("SliceGrad", "plain", [floats(2, 3), ints(4, 5), ints(1, 1), ints(3, 4)])
    yield Node("SliceGrad", "axes", [floats(4, 2), ints(4, 5), ints(1), ints(3), ints(1)])
    yield Node("SliceGrad", "steps", [floats(2, 5), ints(4, 5), ints(0), ints(4), ints(0), ints(2)])


def norms() -> Iterator[Node]:
    """Yield normalizations along the last axes, and along the channels."""
    for name, axis, own in (("last", -1, 4), ("two", 1, 12)):
        shape, rest = (2, 3, 4), (2, 3, 1) if axis == -1 else (2, 1, 1)
        scale, x = positive(*shape[axis:], seed=2), floats(*shape, seed=1)
        rows = x.reshape(-1, own)
        mean, inverse = rows.mean(1), 1 / np.sqrt(rows.var(1) + 1e-5)
        result = [floats(*shape), x, scale, mean.reshape(rest), inverse.reshape(rest)]
        yield Node("LayerNormalizationGrad", name, result, 3, {"axis": axis})
        root = (1 / np.sqrt((rows**2).mean(1) + 1e-5)).reshape(rest)
        result = [floats(*shape), x, scale, root]
        yield Node("SimplifiedLayerNormalizationGrad", name, result, 2, {"axis": axis})
        bias = floats(*shape[axis:], seed=3)
        made = ((rows - mean[:, None]) * inverse[:, None]).reshape(shape) * scale + bias
        result = [floats(*shape), made, scale, bias, inverse.reshape(rest)]
        yield Node("InvertibleLayerNormalizationGrad", name, result, 3, {"axis": axis})
    channels = [positive(3, seed=2), floats(3, seed=3), floats(3, seed=4), positive(3, seed=5)]
    x = floats(2, 3, 4, 4, seed=1)
    yield Node("BatchNormInternal", "training", [x, *channels], 5, {"training_mode": 1})
    yield Node("BatchNormInternal", "evaluation", [x, *channels], 1, {"training_mode": 0})
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    inverse = 1 / np.sqrt(variance + np.float32(1e-5))
    inputs = [floats(2, 3, 4, 4), x, channels[0], mean, inverse]
    yield Node("BatchNormalizationGrad", "plain", inputs, 3, {"epsilon": 1e-5})


def dropouts() -> Iterator[Node]:
    """Yield dropouts with an explicit mask, so that nothing is random."""
    mask = np.array([[True, False, True], [False, True, True]])
    yield Node("DropoutGrad", "not in training, no ratio", [floats(2, 3), mask])
    yield Node("DropoutGrad", "ratio 0", [floats(2, 3), mask | True, np.array(0, np.float32), np.array(True)])
    for ratio in (0.25, 0.75):
        inputs = [floats(2, 3), mask, np.array(ratio, np.float32)]
        yield Node("DropoutGrad", f"ratio {ratio}", [*inputs, np.array(True)])
        yield Node("DropoutGrad", f"not in training, ratio {ratio}", inputs)
        yield Node("DropoutGrad", f"not in training, as it says, ratio {ratio}", [*inputs, np.array(False)])


def shapes() -> Iterator[Node]:
    """Yield concatenations, splits, sums over broadcast axes, and scales by one number."""
    whole = [np.float32, np.float64, np.int32, np.int64]
    for dtype in whole:
        scale = np.array(3, dtype)
        yield Node("Scale", f"by {np.dtype(dtype)}", [floats(2, 3), scale])
        yield Node("Scale", f"down by {np.dtype(dtype)}", [floats(2, 3), scale], attributes={"scale_down": 1})
    yield Node("ConcatTraining", "rows", [floats(2, 3), floats(1, 3)], 2, {"axis": 0}, types={1: TensorProto.INT64})
    yield Node("ConcatTraining", "one output", [floats(2, 3), floats(2, 1)], 1, {"axis": -1})
    yield Node("SplitTraining", "rows", [floats(5, 2), ints(2, 3)], 2, {"axis": 0})
    yield Node("SplitTraining", "columns", [floats(2, 6), ints(1, 3, 2)], 3, {"axis": -1})
    both = {0: TensorProto.INT64, 1: TensorProto.INT64}
    for name, first, second in (
        ("alike", (2, 3), (2, 3)),
        ("row", (2, 3), (3,)),
        ("both", (4, 1, 3), (2, 1)),
        ("scalar", (2, 3), ()),
    ):
        yield Node("BroadcastGradientArgs", name, [ints(*first), ints(*second)], 2, types=both)
    for keep in (0, 1):
        yield Node(
            "ReduceSumTraining", f"keepdims {keep}", [floats(2, 3, 4), ints(0, -1)], attributes={"keepdims": keep}
        )
        for noop in (0, 1):
            said = {"keepdims": keep, "noop_with_empty_axes": noop}
            yield Node("ReduceSumTraining", f"no axes, {said}", [floats(2, 3), ints()], attributes=said)
    yield Node("ReduceAllL2", "several", [floats(2, 3), floats(4, seed=1), floats(1, 1, 2, seed=2)])
    yield Node("ReduceAllL2", "one", [floats(2, 3)])
    yield Node("ReduceAllL2", "nothing", [floats(0), np.zeros((2, 2), np.float32)])


def recurrent() -> Iterator[Node]:
    """Yield forward recurrent nodes with initial states, for which 1.19.2 has kernels."""
    steps, batch, size, hidden = 3, 2, 4, 5
    x, h, c = floats(steps, batch, size), floats(1, batch, hidden, seed=3), floats(1, batch, hidden, seed=4)
    said: dict[str, Any] = {"hidden_size": hidden}
    for gates, name in ((4, "LSTM"), (3, "GRU")):
        w = floats(1, gates * hidden, size, seed=1) / 2
        r = floats(1, gates * hidden, hidden, seed=2) / 2
        b = floats(1, 2 * gates * hidden, seed=5) / 2
        for kind in (0, 1) if name == "GRU" else (None,):
            own = said if kind is None else {**said, "linear_before_reset": kind}
            label = "plain" if kind is None else f"linear_before_reset {kind}"
            states = [h, c] if name == "LSTM" else [h]
            yield Node(f"{name}Training", label, [x, w, r, b, NONE, *states], 5 if name == "LSTM" else 3, own)
            every = (steps, 1, batch, hidden)
            gate = 1 / (1 + np.exp(-floats(steps, 1, batch, gates * hidden, seed=7)))
            if name == "LSTM":
                kept = [floats(*every, seed=6) / 2, floats(*every, seed=8) / 2, gate.astype(np.float32)]
                grads = [floats(*every, seed=9), floats(1, batch, hidden, seed=10), floats(1, batch, hidden, seed=11)]
                yield Node("LSTMGrad", label, [x, w, r, NONE, h, c, *kept, *grads], 6, own)
                grads = [floats(*every, seed=9)]
                yield Node("LSTMGrad", f"{label}, of all states", [x, w, r, NONE, h, c, *kept, *grads], 6, own)
            else:
                kept = [floats(*every, seed=6) / 2, gate.astype(np.float32)]
                grads = [floats(*every, seed=9), floats(1, batch, hidden, seed=10)]
                yield Node("GRUGrad", label, [x, w, r, b, NONE, h, *kept, *grads], 5, own)


def quantized() -> Iterator[Node]:
    """Yield quantizations with ties and with values outside of the range."""
    x = np.array([-40, -0.75, -0.25, 0.25, 0.75, 1.25, 20.1, 63.5, 200], np.float32)
    for name, scale, zero, said in (
        ("plain", 0.5, 3, {}),
        ("bounds", 0.25, 0, {"quant_min": -8, "quant_max": 7}),
        ("128", 0.5, 128, {}),
    ):
        numbers = [np.array(scale, np.float32), np.array(zero, np.float32)]
        yield Node("FakeQuant", name, [x, *numbers], 2, said, types={1: TensorProto.BOOL})
    yield Node("FakeQuantGrad", "plain", [floats(2, 3), floats(2, 3, seed=1) > 0])


def products() -> Iterator[Node]:
    """Yield matrix products: transposed, scaled, and batched."""
    a, b = floats(2, 3, 4), floats(2, 4, 5, seed=1)
    yield Node("FusedMatMul", "plain", [a, b])
    said = {"transA": 1, "transB": 1, "alpha": 0.5}
    yield Node("FusedMatMul", "transposed", [a.swapaxes(1, 2).copy(), b.swapaxes(1, 2).copy()], attributes=said)
    said = {"transBatchA": 1, "transBatchB": 1}
    yield Node("FusedMatMul", "batches", [floats(3, 2, 4), floats(4, 2, 5, seed=1)], attributes=said)
    yield Node("FusedMatMul", "flat", [a, floats(4, 5, seed=1)])
    for upper in (0, 1):
        yield Node("Trilu", f"upper {upper}", [floats(2, 4, 3)], attributes={"upper": upper})
        yield Node("Trilu", f"upper {upper}, k", [floats(4, 3), np.array(-1)], attributes={"upper": upper})


FAMILIES: list[Callable[[], Iterator[Node]]] = [
    activations,
    quotients,
    softmaxes,
    losses,
    convolutions,
    pools,
    gathers,
    slices,
    norms,
    dropouts,
    shapes,
    recurrent,
    quantized,
    products,
]


def nodes() -> list[Node]:
    """Return every case."""
    return [node for family in FAMILIES for node in family()]
