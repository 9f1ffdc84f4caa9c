"""Builders for nodes in the syntax of each version of ai.onnx, and models to train that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs, helper, numpy_helper

from ortrain import artifacts

# From the oldest supported opset to the newest one.
OLDEST_OPSET = 7
NEWEST_OPSET = min(defs.onnx_opset_version(), 28)
OPSETS = tuple(range(OLDEST_OPSET, NEWEST_OPSET + 1))
# The IR version that came with opset 7 requires every weight among the inputs.
IR_VERSION = 8


def since(op: str, opset: int) -> int:
    """Return the version of an operator that a model of this opset uses; 0 if the operator does not exist yet."""
    try:
        return int(defs.get_schema(op, opset).since_version)
    except defs.SchemaError:
        return 0


def has(op: str, opset: int) -> bool:
    return since(op, opset) > 0


class Words:
    """A graph under construction, in the syntax of one opset."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its first output."""
        names = list(outputs) or [f"{op.lower()}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), names, f"{op}_{len(self.nodes)}", **attributes))
        return names[0]

    def weight(self, value: Any, name: str = "", dtype: Any = None) -> str:
        name = name or f"given_{len(self.weights)}"
        self.weights[name] = np.asarray(value, dtype)
        return name

    def ints(self, values: Sequence[int]) -> str:
        return self.weight(values, dtype=np.int64)

    def _with_axes(self, op: str, x: str, axes: Sequence[int] | None, as_input_since: int, **attributes: Any) -> str:
        if axes is None:
            return self.node(op, [x], **attributes)
        if self.opset < as_input_since:
            return self.node(op, [x], axes=list(axes), **attributes)
        return self.node(op, [x, self.ints(axes)], **attributes)

    def squeeze(self, x: str, axes: Sequence[int] | None) -> str:
        return self._with_axes("Squeeze", x, axes, 13)

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        return self._with_axes("Unsqueeze", x, axes, 13)

    def reduce_sum(self, x: str, axes: Sequence[int] | None, **attributes: Any) -> str:
        return self._with_axes("ReduceSum", x, axes, 13, **attributes)

    def reduce_mean(self, x: str, axes: Sequence[int] | None, **attributes: Any) -> str:
        return self._with_axes("ReduceMean", x, axes, 18, **attributes)

    def reduce_max(self, x: str, axes: Sequence[int] | None, **attributes: Any) -> str:
        return self._with_axes("ReduceMax", x, axes, 18, **attributes)

    def reduce_min(self, x: str, axes: Sequence[int] | None, **attributes: Any) -> str:
        return self._with_axes("ReduceMin", x, axes, 18, **attributes)

    def reduce(self, op: str, x: str, axes: Sequence[int] | None, **attributes: Any) -> str:
        """Add a reduction other than ReduceSum."""
        return self._with_axes(op, x, axes, 18, **attributes)

    def split(self, x: str, lengths: Sequence[int], axis: int) -> list[str]:
        names = [f"part_{len(self.nodes)}_{k}" for k in range(len(lengths))]
        if self.opset < 13:
            self.node("Split", [x], *names, axis=axis, split=list(lengths))
        else:
            self.node("Split", [x, self.ints(lengths)], *names, axis=axis)
        return names

    def top(self, x: str, count: int, axis: int) -> tuple[str, str]:
        names = f"top_{len(self.nodes)}", f"where_{len(self.nodes)}"
        if self.opset < 10:
            self.node("TopK", [x], *names, axis=axis, k=count)
        else:
            self.node("TopK", [x, self.ints([count])], *names, axis=axis)
        return names

    def clip(self, x: str, low: float | None, high: float | None) -> str:
        if self.opset < 11:
            bounds = {"min": low, "max": high}
            return self.node("Clip", [x], **{name: float(value) for name, value in bounds.items() if value is not None})
        inputs = ["" if bound is None else self.weight(bound, dtype=np.float32) for bound in (low, high)]
        return self.node("Clip", [x, *inputs] if high is not None else [x, *inputs[:1]])

    def pad(self, x: str, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> str:
        if self.opset < 11:
            return self.node("Pad", [x], pads=list(pads), mode=mode, value=value)
        return self.node("Pad", [x, self.ints(pads), self.weight(value, dtype=np.float32)], mode=mode)

    def upsample(self, x: str, scales: Sequence[float], mode: str) -> str:
        """Enlarge an image as opsets before 11 do: asymmetric coordinates, and the nearest element by rounding down."""
        if self.opset < 9:
            return self.node("Upsample", [x], scales=[float(scale) for scale in scales], mode=mode)
        factors = self.weight(scales, dtype=np.float32)
        if self.opset < 11:
            return self.node("Upsample" if self.opset < 10 else "Resize", [x, factors], mode=mode)
        attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return self.node("Resize", [x, self.nothing(), factors], mode=mode, **attributes)

    def nothing(self) -> str:
        """Return an omitted input: an empty tensor before opset 13, where the input is required, later no name."""
        return self.weight([], dtype=np.float32) if self.opset < 13 else ""

    def slice(self, x: str, starts: list[int], ends: list[int], axes: list[int]) -> str:
        if self.opset < 10:
            return self.node("Slice", [x], starts=starts, ends=ends, axes=axes)
        return self.node("Slice", [x, self.ints(starts), self.ints(ends), self.ints(axes)])

    def dropout(self, x: str, ratio: float) -> str:
        """Add a Dropout in inference form, which drops nothing."""
        if self.opset < 12:
            return self.node("Dropout", [x], ratio=ratio)
        return self.node("Dropout", [x, self.weight(ratio, dtype=np.float32)])

    def constant(self, value: np.ndarray) -> str:
        return self.node("Constant", [], value=numpy_helper.from_array(value))

    def graph(self, inputs: dict[str, tuple[Any, Sequence[int | str] | None]], outputs: dict[str, Any]) -> GraphProto:
        """Return the graph; inputs are declared by NumPy type and shape, outputs by NumPy type."""
        kind = helper.np_dtype_to_tensor_dtype
        return helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(name, kind(np.dtype(d)), shape) for name, (d, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, kind(np.dtype(d)), None) for name, d in outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )

    def model(self, graph: GraphProto) -> ModelProto:
        domains = {node.domain for node in self.nodes if node.domain}
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="tests")


FEATURES, HIDDEN, BATCH = 6, 8, 5
CLASSES = 3


def parameter(name: str, *shape: int) -> np.ndarray:
    """Return values that depend on the name only, and are the same on every run."""
    seed = int.from_bytes(name.encode(), "little") % 2**32
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(shape[0], 1))).astype(np.float32)


@dataclass
class Trainee:
    """A model to train, in the syntax of an opset."""

    model: ModelProto
    trainable: list[str]
    feeds: dict[str, np.ndarray] = field(default_factory=dict)


def value_graph(name: str, nodes: list[NodeProto], inputs: dict[str, Any], outputs: Sequence[str]) -> GraphProto:
    """Return a subgraph without declared shapes of floats, which may have any shape. Other types are scalars."""
    kind = helper.np_dtype_to_tensor_dtype
    given = [
        helper.make_tensor_value_info(given_name, kind(np.dtype(d)), None if d is np.float32 else [])
        for given_name, d in inputs.items()
    ]
    made = [
        helper.make_tensor_value_info(output, TensorProto.BOOL if output == "loop_still" else TensorProto.FLOAT, None)
        for output in outputs
    ]
    return helper.make_graph(nodes, name, given, made)


def perceptron(w: Words, x: str) -> str:
    """Compute scores of CLASSES classes by a wide range of the operators of opset 7."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("Gemm", [x, weight("w1", HIDDEN, FEATURES), weight("b1", HIDDEN)], transB=1, alpha=0.9, beta=1.1)
    hidden = w.dropout(w.node("Relu", [hidden]), 0.0)
    left = w.node("Sigmoid", [w.slice(hidden, [0], [HIDDEN // 2], [1])])
    right = w.node("Tanh", [w.slice(hidden, [HIDDEN // 2], [2**31], [1])])
    joined = w.node("Concat", [left, right], axis=1)
    product = w.node("MatMul", [joined, weight("w2", HIDDEN, 4 * CLASSES)])
    total = w.node("Add", [product, weight("b2", 4 * CLASSES)])
    # Sizes computed from shapes, as exporters write them.
    batch = w.node("Gather", [w.node("Shape", [total]), w.weight(0, dtype=np.int64)], axis=0)
    shape = w.node("Concat", [w.unsqueeze(batch, [0]), w.constant(np.asarray([4, -1]))], axis=0)
    stack = w.node("Reshape", [total, shape])
    turned = w.node("Transpose", [stack], perm=[0, 2, 1])
    shares = w.node("Softmax", [turned], axis=2)
    logs = w.node("LogSoftmax", [turned], axis=2)
    rows = w.node("Gather", [weight("table", 5, 4), w.weight([2, 0, 2], dtype=np.int64)], axis=0)
    mixed = w.node("Add", [w.node("Sum", [shares, w.node("Mul", [logs, weight("scale", 4)])]), rows])
    spread = w.node("Exp", [w.node("Neg", [w.node("Abs", [mixed])])])
    root = w.node("Sqrt", [w.node("Add", [spread, w.weight(0.5, dtype=np.float32)])])
    wide = w.node("Cast", [root], to=TensorProto.DOUBLE)
    power = w.node("Pow", [w.node("Cast", [wide], to=TensorProto.FLOAT), w.weight([1.5], dtype=np.float32)])
    log = w.node("Log", [w.node("Div", [power, w.node("Add", [spread, root])])])
    mean = w.reduce_mean(log, [2], keepdims=1)
    centred = w.node("Sub", [mixed, mean])
    summed = w.reduce_sum(centred, [2], keepdims=1)
    squeezed = w.squeeze(summed, [2])
    flat = w.node("Flatten", [w.node("Identity", [squeezed])], axis=1)
    return w.node("MatMul", [flat, weight("w3", CLASSES, CLASSES)])


def learnt_power(w: Words, x: str) -> str:
    """Train the exponents of a Pow."""
    base = w.node("Exp", [w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])])
    return w.node("Pow", [base, w.weight(np.asarray([1.5, 0.5, 2], np.float32), "exponent")])


def middle_softmax(w: Words, x: str) -> str:
    """Compute both softmaxes with axis 1 of three: over axes 1 and 2 together before opset 13, later over axis 1."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, 12), "w")])
    stack = w.node("Reshape", [product, w.ints([-1, 4, CLASSES])])
    shares, logs = w.node("Softmax", [stack], axis=1), w.node("LogSoftmax", [stack], axis=1)
    return w.reduce_mean(w.node("Sub", [shares, logs]), [1], keepdims=0)


def branches(w: Words, x: str) -> str:
    """Use the same weights in both branches of an If, by different operators."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    bias = w.weight(parameter("b", CLASSES), "b")
    total = w.reduce_sum(x, None, keepdims=0)
    condition = w.node("Less", [w.weight(0, dtype=np.float32), total])
    halves = {}
    for name, ops in [("then_branch", ["Add", "Tanh"]), ("else_branch", ["Mul", "Sigmoid"])]:
        inner = [
            helper.make_node(ops[0], [product, bias], [f"{name}_a"]),
            helper.make_node(ops[1], [f"{name}_a"], [f"{name}_b"]),
        ]
        output = helper.make_tensor_value_info(f"{name}_b", TensorProto.FLOAT, None)
        halves[name] = helper.make_graph(inner, name, [], [output])
    return w.node("If", [condition], **halves)


def lonely_branch(w: Words, x: str) -> str:
    """Use a weight in one branch of an If only: its gradient in the other branch is zero."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    bias = w.weight(parameter("b", CLASSES), "b")
    total = w.reduce_sum(x, None, keepdims=0)
    condition = w.node("Less", [w.weight(0, dtype=np.float32), total])
    halves = {}
    for name, op, inputs in [("then_branch", "Relu", [product]), ("else_branch", "Add", [product, bias])]:
        inner = [helper.make_node(op, inputs, [f"{name}_y"])]
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        halves[name] = helper.make_graph(inner, name, [], [output])
    return w.node("If", [condition], **halves)


def expanded(w: Words, x: str) -> str:
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    row = w.weight(parameter("row", 1, CLASSES), "row")
    wide = w.node("Expand", [row, w.node("Shape", [product])])
    return w.node("Mul", [product, wide])


def chosen(w: Words, x: str) -> str:
    """Use Where, Erf, Sign, Sin, Cos, comparisons, logic, ConstantOfShape."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    bias = w.weight(parameter("b", CLASSES), "b")
    value = numpy_helper.from_array(np.asarray([0.25], np.float32))
    quarter = w.node("ConstantOfShape", [w.node("Shape", [product])], value=value)
    above, below = w.node("Greater", [product, quarter]), w.node("Less", [bias, product])
    odd = w.node("Equal", [w.node("Shape", [product]), w.node("Reshape", [w.node("Size", [bias]), w.ints([1])])])
    width = w.node("Gather", [odd, w.weight(1, dtype=np.int64)])
    both = w.node("And", [w.node("And", [above, w.node("Not", [below])]), width])
    bell = w.node("Erf", [w.node("Add", [product, bias])])
    picked = w.node("Where", [both, w.node("Mul", [bell, bias]), w.node("Sub", [bell, product])])
    wave = w.node("Mul", [w.node("Sin", [product]), w.node("Cos", [bias])])
    return w.node("Sum", [picked, wave, w.node("Mul", [w.node("Sign", [product]), bias])])


def selected(w: Words, x: str) -> str:
    """Select rows by their values: a host function, and a program after it."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    sums = w.reduce_sum(x, [1], keepdims=0)
    rows = w.node("NonZero", [w.node("Greater", [sums, w.weight(-100, dtype=np.float32)])])
    rows = w.squeeze(rows, [0])
    picked = w.node("Gather", [w.node("Tanh", [product]), rows], axis=0)
    return w.node("Add", [picked, w.weight(parameter("b", CLASSES), "b")])


def gelus(w: Words, x: str) -> str:
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    smooth = w.node("Gelu", [product])
    return w.node("Mul", [smooth, w.node("Gelu", [w.weight(parameter("b", CLASSES), "b")], approximate="tanh")])


def dropped(w: Words, x: str) -> str:
    """Use a Dropout in training mode."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    settings = [w.weight(0.4, dtype=np.float32), w.weight(True, dtype=np.bool_)]
    return w.node("Dropout", [product, *settings])


def heads(w: Words, x: str) -> str:
    """Compute attention of two heads, as exporters write it: with computed sizes and a -1 in shapes."""

    def split(value: str) -> str:
        batch = w.node("Gather", [w.node("Shape", [value]), w.weight(0, dtype=np.int64)], axis=0)
        shape = w.node("Concat", [w.unsqueeze(batch, [0]), w.ints([-1, 2, 2])], axis=0)
        return w.node("Transpose", [w.node("Reshape", [value, shape])], perm=[0, 2, 1, 3])

    products = [w.node("MatMul", [x, w.weight(parameter(name, FEATURES, 12), name)]) for name in ("q", "k", "v")]
    queries, keys, values = [split(product) for product in products]
    turned = w.node("Transpose", [keys], perm=[0, 1, 3, 2])
    scores = w.node("Mul", [w.node("MatMul", [queries, turned]), w.weight(0.7, dtype=np.float32)])
    mixed = w.node("MatMul", [w.node("Softmax", [scores], axis=3), values])
    batch = w.node("Gather", [w.node("Shape", [x]), w.ints([0])], axis=0)
    shape = w.node("Concat", [batch, w.ints([12])], axis=0)
    joined = w.node("Reshape", [w.node("Transpose", [mixed], perm=[0, 2, 1, 3]), shape])
    return w.node("MatMul", [joined, w.weight(parameter("out", 12, CLASSES), "out")])


def convolved(w: Words, x: str) -> str:
    """Use every padding mode of Conv; strides, dilations, groups, with and without a bias."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [x, w.ints([-1, 1, 2, 3])])
    full = w.node("Conv", [image, weight("k1", 4, 1, 2, 2), weight("b1", 4)], auto_pad="SAME_UPPER")
    full = w.node("Tanh", [full])
    deep = w.node("Conv", [full, weight("k2", 4, 1, 2, 2)], auto_pad="SAME_LOWER", group=4, strides=[1, 2])
    point = w.node("Conv", [deep, weight("k3", 6, 4, 1, 1), weight("b3", 6)], kernel_shape=[1, 1])
    attributes = {"dilations": [2, 2], "pads": [1, 2, 1, 1], "strides": [2, 1], "group": 2}
    wide = w.node("Conv", [w.node("Tanh", [point]), weight("k4", 4, 3, 2, 2)], **attributes)
    # A convolution over one axis.
    line = w.node("Reshape", [wide, w.ints([-1, 4, 3])])
    line = w.node("Conv", [line, weight("k5", 2, 4, 2), weight("b5", 2)], auto_pad="VALID")
    return w.node("MatMul", [w.node("Flatten", [line], axis=1), weight("out", 4, CLASSES)])


def transposed(w: Words, x: str) -> str:
    """Use every form of the output size of a transposed convolution."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [x, w.ints([-1, 2, 1, 3])])
    attributes: dict[str, Any] = {"strides": [2, 1], "output_padding": [1, 0], "pads": [0, 1, 1, 0]}
    full = w.node("ConvTranspose", [image, weight("k1", 2, 3, 2, 2), weight("b1", 3)], **attributes)
    full = w.node("Tanh", [full])
    same = w.node("ConvTranspose", [full, weight("k2", 3, 1, 3, 2)], auto_pad="SAME_UPPER", group=3, strides=[1, 2])
    attributes = {"output_shape": [6, 7], "strides": [2, 1], "dilations": [1, 2]}
    asked = w.node("ConvTranspose", [w.node("Tanh", [same]), weight("k3", 3, 2, 3, 2)], **attributes)
    return w.node("MatMul", [w.node("Flatten", [asked], axis=1), weight("out", 84, CLASSES)])


def features_of(w: Words, x: str, shape: Sequence[int]) -> str:
    """Reshape the input to an image and convolve it."""
    image = w.node("Reshape", [x, w.ints(shape)])
    return w.node("Conv", [image, w.weight(parameter("k1", 4, 1, 2, 2), "k1")], pads=[2, 2, 2, 2])


def classified(w: Words, largest: str, average: str) -> str:
    """Compute scores from the maximum of one image and the average of another."""
    parts = [w.node("GlobalMaxPool", [largest]), w.node("GlobalAveragePool", [average])]
    both = w.node("Concat", [w.node("Flatten", [part], axis=1) for part in parts], axis=1)
    return w.node("MatMul", [both, w.weight(parameter("out", 8, CLASSES), "out")])


def averaged(w: Words, image: str) -> str:
    """Average under windows, twice."""
    average = w.node("AveragePool", [image], kernel_shape=[3, 2], strides=[1, 2], auto_pad="SAME_UPPER")
    return w.node("AveragePool", [average], kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1)


def pooled(w: Words, x: str) -> str:
    """Compute maxima and averages, under windows and over the whole image."""
    image = features_of(w, x, [-1, 1, 2, 3])
    largest = w.node("MaxPool", [image], kernel_shape=[2, 3], strides=[1, 2], pads=[1, 0, 0, 1])
    return classified(w, largest, averaged(w, image))


def pooled_sized(w: Words, x: str) -> str:
    """Compute the maximum over the whole image and the average under windows."""
    image = features_of(w, x, [-1, 1, 2, 3])
    return classified(w, image, averaged(w, image))


def pooled_unsized(w: Words, x: str) -> str:
    """Pool images with a width that is known at run time only.

    MaxPool is left out: the MaxPoolGrad of onnxruntime-training 1.19.2 gives no result for such images.
    """
    image = features_of(w, x, [0, 1, 2, -1])
    return classified(w, image, averaged(w, image))


def statistics(w: Words, count: int) -> list[str]:
    """Add a running mean and variance, which are not trained."""
    mean, var = np.linspace(-0.5, 0.5, count), np.linspace(0.5, 1.5, count)
    return [w.weight(mean, dtype=np.float32), w.weight(var, dtype=np.float32)]


def normalized(w: Words, x: str) -> str:
    """Normalize inputs of two, three and four axes, with trained scale and bias, and once without training."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 12)])
    rows = [weight("s1", 12), weight("b1", 12), *statistics(w, 12)]
    rows = w.node("Tanh", [w.node("BatchNormalization", [hidden, *rows], epsilon=0.01)])
    image = w.node("Reshape", [rows, w.ints([-1, 3, 2, 2])])
    planes = [weight("s2", 3), weight("b2", 3), *statistics(w, 3)]
    image = w.node("Tanh", [w.node("BatchNormalization", [image, *planes], epsilon=0.02, momentum=0.8)])
    line = w.node("Reshape", [image, w.ints([-1, 2, 6])])
    given = [w.weight([0.5, 1.5], dtype=np.float32), w.weight([0.1, -0.1], dtype=np.float32), *statistics(w, 2)]
    line = w.node("BatchNormalization", [line, *given])
    # Only the bias is trained.
    one = [w.weight([1.5, -0.5], dtype=np.float32), weight("b3", 2), *statistics(w, 2)]
    line = w.node("BatchNormalization", [line, *one], momentum=0.6)
    return w.node("MatMul", [w.node("Flatten", [line], axis=1), weight("out", 12, CLASSES)])


def layered(w: Words, x: str) -> str:
    """Apply LayerNormalization over all axes from one axis on.

    onnxruntime differentiates only LayerNormalization nodes that name all results.
    """
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 12)])
    rows = w.node("LayerNormalization", [hidden, weight("s1", 12), weight("b1", 12)], epsilon=0.01)
    stack = w.node("Reshape", [w.node("Tanh", [rows]), w.ints([-1, 3, 4])])
    # Over two axes, and without a bias.
    both = w.node("LayerNormalization", [stack, weight("s2", 3, 4)], axis=1, epsilon=0.02)
    names = ["last", "last_mean", "last_inverse"]
    last = w.node("LayerNormalization", [w.node("Tanh", [both]), weight("s3", 4), weight("b3", 4)], *names, axis=2)
    # The statistics are results like any other.
    mixed = w.node("Sum", [last, w.node("Mul", [names[1], weight("m", 3, 1)]), w.node("Sqrt", [names[2]])])
    return w.node("MatMul", [w.node("Flatten", [mixed], axis=1), weight("out", 12, CLASSES)])


def layered_without_mean(w: Words, x: str) -> str:
    """Apply RMSNormalization over all axes from one axis on."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 12)])
    rows = w.node("RMSNormalization", [hidden, weight("s1", 12)], epsilon=0.01)
    stack = w.node("Reshape", [w.node("Tanh", [rows]), w.ints([-1, 3, 4])])
    both = w.node("RMSNormalization", [stack, weight("s2", 3, 4)], axis=1)
    return w.node("MatMul", [w.node("Flatten", [both], axis=1), weight("out", 12, CLASSES)])


def fused(w: Words, x: str) -> str:
    """Use the fused operators that onnxruntime's optimizer creates."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    own = {"domain": "com.microsoft"}
    hidden = w.node("FusedMatMul", [x, weight("w", 12, FEATURES)], transB=1, alpha=0.8, **own)
    hidden = w.node("BiasGelu", [hidden, weight("b1", 12)], **own)
    hidden = w.node("FastGelu", [hidden, weight("b2", 12)], **own)
    hidden = w.node("QuickGelu", [w.node("Add", [hidden, weight("b3", 12)])], alpha=1.3, **own)
    hidden = w.node("Gelu", [w.node("Mul", [hidden, weight("b4", 12)])], **own)
    rows = w.node("SimplifiedLayerNormalization", [hidden, weight("s", 12)], axis=-1, epsilon=0.01)
    return w.node("MatMul", [rows, weight("out", 12, CLASSES)])


def optimized(w: Words, x: str) -> str:
    """Build transformer blocks as onnxruntime's optimizer leaves them."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    own = {"domain": "com.microsoft"}
    above = w.node("Greater", [x, w.weight(0, dtype=np.float32)])
    words = w.node("Cast", [above], to=TensorProto.INT32)
    tables = [weight("words", 2, 8), weight("places", FEATURES, 8), weight("parts", 2, 8)]
    inputs = [words, words, *tables, weight("s1", 8), weight("b1", 8), words]
    w.node("EmbedLayerNormalization", inputs, "embedded", "lengths", epsilon=1e-5, **own)
    inputs = ["embedded", weight("qkv", 8, 24), weight("b_qkv", 24), "lengths"]
    mixed = w.node("Attention", inputs, num_heads=2, **own)
    inputs = [mixed, "embedded", weight("s2", 8), weight("b2", 8), weight("b3", 8)]
    hidden = w.node("SkipLayerNormalization", inputs, epsilon=1e-5, **own)
    parts = [w.node("MatMul", [hidden, weight(name, 8, 8)]) for name in ("q", "k", "v")]
    turned = [w.weight(np.cos(np.arange(2 * FEATURES)).reshape(-1, 2), dtype=np.float32)]
    turned += [w.weight(np.sin(np.arange(2 * FEATURES)).reshape(-1, 2), dtype=np.float32)]
    for k in (0, 1):
        inputs = [parts[k], w.weight([0], dtype=np.int64), *turned]
        parts[k] = w.node("RotaryEmbedding", inputs, interleaved=k, num_heads=2, **own)
    mixed = w.node("MultiHeadAttention", [*parts, weight("b4", 24)], num_heads=2, unidirectional=1, **own)
    hidden = w.node("SkipSimplifiedLayerNormalization", [mixed, hidden, weight("s3", 8)], epsilon=1e-5, **own)
    return w.node("MatMul", [w.reduce_mean(hidden, [1], keepdims=0), weight("out", 8, CLASSES)])


def named_axes(w: Words, x: str) -> str:
    """Compute attention of two heads by Einsum."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    rows = w.node("Reshape", [x, w.ints([-1, 3, 2])])
    parts = [w.node("Einsum", [rows, weight(name, 2, 2, 4)], equation="btd,dhk->bhtk") for name in ("q", "k", "v")]
    products = w.node("Einsum", parts[:2], equation="...qk, ...sk -> ...qs")
    shares = w.node("Softmax", [products], axis=-1 if w.opset > 12 else 3)
    mixed = w.node("Einsum", [shares, parts[2]], equation="bhts,bhsk->bthk")
    result = w.node("Einsum", [mixed, weight("out", 2, 4, CLASSES)], equation="bthk,hkc")
    own = w.node("Einsum", [shares, weight("gates", 2, CLASSES)], equation="bhtt,hc->bc")
    return w.node("Add", [w.reduce_sum(w.node("Tanh", [result]), [1], keepdims=0), own])


def attending(w: Words, x: str) -> str:
    """Compute grouped-query attention: four query heads share two key heads, with rotary position embedding."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    rows = w.node("Reshape", [x, w.ints([-1, 3, 2])])
    angles = np.arange(6).reshape(3, 2)
    caches = [w.weight(values, dtype=np.float32) for values in (np.cos(angles), np.sin(angles))]
    places = w.node("Cast", [w.node("Greater", [rows, rows])], to=TensorProto.INT64)
    places = w.reduce_sum(places, [2], keepdims=0)
    places = w.node("Add", [places, w.weight([0, 1, 2], dtype=np.int64)])
    parts = []
    for name, heads in (("q", 4), ("k", 2)):
        product = w.node("MatMul", [rows, weight(name, 2, 4 * heads)])
        parts.append(w.node("RotaryEmbedding", [product, *caches, places], num_heads=heads))
    parts.append(w.node("MatMul", [rows, weight("v", 2, 6)]))
    mask = weight("mask", 4, 1, 3)
    settings: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1, "softcap": 2.0}
    mixed = w.node("Attention", [*parts, mask], **settings)
    return w.node("MatMul", [w.node("Flatten", [mixed], axis=1), weight("out", 36, CLASSES)])


def responding(w: Words, x: str) -> str:
    """Normalize across channels by LRN. onnxruntime supports windows of odd size and images of two axes."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 20)]), w.ints([-1, 5, 2, 2])])
    image = w.node("Tanh", [w.node("LRN", [image], size=3, alpha=0.5, beta=0.6, bias=1.5)])
    image = w.node("LRN", [image], size=5, alpha=0.9)
    return w.node("MatMul", [w.node("Flatten", [image], axis=1), weight("out", 20, CLASSES)])


def normalized_branch(w: Words, x: str) -> str:
    """Use a BatchNormalization in the branch of an If that is taken."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    inputs = [product, w.weight(parameter("s", CLASSES), "s"), w.weight(parameter("b", CLASSES), "b")]
    inputs += statistics(w, CLASSES)
    condition = w.node("Less", [w.weight(-100, dtype=np.float32), w.reduce_sum(x, None, keepdims=0)])
    halves = {}
    for name, op, given in [("then_branch", "BatchNormalization", inputs), ("else_branch", "Mul", inputs[:2])]:
        inner = [helper.make_node(op, given, [f"{name}_y"])]
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        halves[name] = helper.make_graph(inner, name, [], [output])
    return w.node("If", [condition], **halves)


def scanned(w: Words, x: str) -> str:
    """Build a recurrent cell as a Scan over the middle axis, from last to first, with weights of the outer graph."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    steps = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 20)]), w.ints([-1, 4, 5])])
    start = w.node("MatMul", [x, weight("start", FEATURES, HIDDEN)])
    given = [weight("in", 5, HIDDEN), weight("r", HIDDEN, HIDDEN), weight("b", HIDDEN)]
    inner = [
        helper.make_node("MatMul", ["cell_x", given[0]], ["cell_xw"]),
        helper.make_node("MatMul", ["cell_h", given[1]], ["cell_hr"]),
        helper.make_node("Sum", ["cell_xw", "cell_hr", given[2]], ["cell_sum"]),
        helper.make_node("Tanh", ["cell_sum"], ["cell_next"]),
        helper.make_node("Mul", ["cell_next", "cell_xw"], ["cell_out"]),
    ]
    body = value_graph("cell", inner, {"cell_h": np.float32, "cell_x": np.float32}, ["cell_next", "cell_out"])
    attributes = {"scan_input_axes": [1], "scan_input_directions": [1], "scan_output_axes": [1]}
    w.node("Scan", [start, steps], "last", "all", body=body, num_scan_inputs=1, **attributes)
    mixed = w.node("Add", ["last", w.reduce_mean("all", [1], keepdims=0)])
    return w.node("MatMul", [mixed, weight("out", HIDDEN, CLASSES)])


def looped(w: Words, x: str) -> str:
    """Build a Loop with an input-dependent number of iterations and an If inside.

    The graph uses its loop-carried result and its scan output.
    """
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    start = w.node("MatMul", [x, weight("w", FEATURES, HIDDEN)])
    above = w.node("Less", [w.weight(-100, dtype=np.float32), w.reduce_sum(x, None, keepdims=0)])
    count = w.node("Add", [w.node("Cast", [above], to=TensorProto.INT64), w.weight(2, dtype=np.int64)])
    recurrent, scale = weight("r", HIDDEN, HIDDEN), weight("scale", HIDDEN)
    yes = value_graph("yes", [helper.make_node("Mul", ["loop_vr", scale], ["yes_y"])], {}, ["yes_y"])
    no = value_graph("no", [helper.make_node("Sigmoid", ["loop_vr"], ["no_y"])], {}, ["no_y"])
    inner = [
        helper.make_node("MatMul", ["loop_v", recurrent], ["loop_vr"]),
        helper.make_node("Cast", ["loop_i"], ["loop_number"], to=TensorProto.FLOAT),
        helper.make_node("Less", ["loop_number", w.weight(0.5, dtype=np.float32)], ["loop_first"]),
        helper.make_node("If", ["loop_first"], ["loop_chosen"], then_branch=yes, else_branch=no),
        helper.make_node("Add", ["loop_chosen", "loop_number"], ["loop_moved"]),
        helper.make_node("Tanh", ["loop_moved"], ["loop_next"]),
        helper.make_node("Mul", ["loop_next", scale], ["loop_out"]),
        helper.make_node("Identity", ["loop_on"], ["loop_still"]),
    ]
    formal = {"loop_i": np.int64, "loop_on": np.bool_, "loop_v": np.float32}
    body = value_graph("body", inner, formal, ["loop_still", "loop_next", "loop_out"])
    w.node("Loop", [count, "", start], "final", "each", body=body)
    mixed = w.node("Add", ["final", w.reduce_sum("each", [0], keepdims=0)])
    return w.node("MatMul", [mixed, weight("out", HIDDEN, CLASSES)])


def activated(w: Words, x: str) -> str:
    """Use the activations of opset 7, with attributes other than the defaults, and minima and maxima."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 12)])
    stack = w.node("Reshape", [hidden, w.ints([-1, 4, 3])])
    stack = w.node("PRelu", [stack, weight("slope", 4, 1)])
    stack = w.node("LeakyRelu", [w.node("Add", [stack, weight("b1", 3)])], alpha=0.2)
    stack = w.node("LeakyRelu", [w.node("Add", [stack, weight("b2", 3)])], alpha=-0.4)
    stack = w.node("Elu", [w.node("Sub", [stack, weight("b3", 3)])], alpha=0.7)
    stack = w.node("Selu", [w.node("Mul", [stack, weight("b4", 3)])])
    stack = w.node("Softplus", [w.node("Add", [stack, weight("b5", 3)])])
    stack = w.node("Softsign", [w.node("Sub", [stack, weight("b6", 3)])])
    stack = w.node("HardSigmoid", [w.node("Add", [stack, weight("b7", 3)])], alpha=0.3)
    stack = w.clip(w.node("Mul", [stack, weight("b8", 3)]), -0.15, 0.2)
    stack = w.clip(w.node("Add", [stack, weight("b9", 3)]), -1.1, None)
    highest, lowest = w.reduce_max(stack, [1], keepdims=0), w.reduce_min(stack, [1], keepdims=1)
    lowest = w.reduce_max(lowest, [1], keepdims=0)
    whole = w.reduce_min(stack, None, keepdims=0)
    return w.node("MatMul", [w.node("Sum", [highest, lowest, w.node("Mul", [lowest, whole])]), weight("out", 3, 3)])


def lately_activated(w: Words, x: str) -> str:
    """Use activations of later opsets, and comparisons."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, CLASSES)])
    hidden = w.node("Celu", [w.node("Add", [hidden, weight("b1", CLASSES)])], alpha=0.6)
    hidden = w.node("HardSwish", [w.node("Mul", [hidden, w.weight(parameter("b2", CLASSES) + 3, "b2")])])
    hidden = w.node("Mish", [w.node("Add", [hidden, weight("b3", CLASSES)])])
    kept = w.node("ThresholdedRelu", [w.node("Add", [hidden, weight("b4", CLASSES)])], alpha=0.3)
    low, high = w.weight(-0.02, "low", np.float32), w.weight(0.05, "high", np.float32)
    bounded = w.node("Clip", [w.node("Mul", [hidden, weight("b5", CLASSES)]), low, high])
    above, below = w.node("GreaterOrEqual", [hidden, bounded]), w.node("LessOrEqual", [kept, hidden])
    either = w.node("Where", [above, kept, w.node("Where", [below, bounded, hidden])])
    return w.node("MatMul", [w.node("Sum", [either, kept, bounded]), weight("out", CLASSES, CLASSES)])


def enlarged(w: Words, x: str) -> str:
    """Pad in every mode, and enlarge images."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 12)]), w.ints([-1, 1, 3, 4])])
    image = w.pad(image, [0, 0, 1, 2, 0, 0, 0, 1], value=0.5)
    image = w.node("Tanh", [w.pad(w.node("Mul", [image, weight("b1", 7)]), [0, 0, 1, 1, 0, 0, 2, 0], "reflect")])
    image = w.pad(w.node("Mul", [image, weight("b2", 8)]), [0, 0, -2, 0, 0, 0, 0, 2], "edge")
    image = w.upsample(w.node("Mul", [image, weight("b3", 10)]), [1, 1, 2, 1.5], "nearest")
    image = w.upsample(w.node("Mul", [image, weight("b4", 15)]), [1, 1, 1.5, 2], "linear")
    image = w.upsample(w.node("Mul", [image, weight("b5", 30)]), [1, 1, 2, 3], "nearest")
    return w.node("MatMul", [w.reduce_mean(image, [1, 2], keepdims=0), weight("out", 90, CLASSES)])


def sampled(w: Words, x: str) -> str:
    """Resize images, in the syntax of opset 11."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    sizes = lambda image, *rest: w.node(  # noqa: E731
        "Concat", [w.slice(w.node("Shape", [image]), [0], [2], [0]), w.ints(rest)], axis=0
    )
    image = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 12)]), w.ints([-1, 1, 3, 4])])
    scales, none = w.weight([1, 1, 2, 2], dtype=np.float32), w.nothing()
    image = w.node("Resize", [image, none, scales], mode="linear")
    image = w.node("Mul", [image, weight("b1", 8)])
    image = w.node("Resize", [image, none, none, sizes(image, 4, 5)], mode="cubic", cubic_coeff_a=-0.5)
    image = w.node("Mul", [image, weight("b2", 5)])
    corners = {"coordinate_transformation_mode": "align_corners"}
    image = w.node("Resize", [image, none, none, sizes(image, 7, 3)], mode="linear", **corners)
    image = w.node("Mul", [image, weight("b3", 3)])
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 0.4}
    roi = w.weight([0, 0, 0.1, -0.1, 1, 1, 0.8, 1.2], dtype=np.float32)
    image = w.node("Resize", [image, roi, none, sizes(image, 3, 5)], mode="linear", **crop)
    return w.node("MatMul", [w.reduce_mean(image, [1, 2], keepdims=0), weight("out", 5, CLASSES)])


def lately_sampled(w: Words, x: str) -> str:
    """Resize and pad images, in the syntax of opset 19."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 12)]), w.ints([-1, 1, 3, 4])])
    image = w.node("Pad", [image, w.ints([2, 3]), "", w.ints([-1])], mode="wrap")
    image = w.node("Mul", [image, weight("b1", 9)])
    attributes = {"antialias": 1, "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}
    image = w.node("Resize", [image, "", "", w.ints([2, 9])], mode="linear", **attributes)
    image = w.node("Mul", [image, weight("b2", 6)])
    border = w.weight(0.3, "border", np.float32)
    image = w.node("Pad", [image, w.ints([1, 0, -1, 2]), border, w.ints([3, 2])])
    attributes = {"coordinate_transformation_mode": "half_pixel_symmetric", "axes": [3]}
    image = w.node("Resize", [image, "", w.weight([1.7], dtype=np.float32)], mode="nearest", **attributes)
    return w.node("MatMul", [w.reduce_mean(image, [1, 2], keepdims=0), weight("out", 10, CLASSES)])


def mirrored(w: Words, x: str) -> str:
    """Pad the batch axis by reflection at one end, and remove the same number of rows at the other."""
    product = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, CLASSES), "w")])
    return w.node("Mul", [w.pad(product, [1, 0, -1, 0], "reflect"), w.weight(parameter("b", CLASSES), "b")])


def functions(w: Words, x: str) -> str:
    """Use functions of opset 7, Max, Min and TopK, and parts of a Split."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 12)])
    first, second, third = w.split(w.node("Tanh", [hidden]), [4, 3, 5], 1)
    turned = w.node("Tan", [w.node("Mul", [first, weight("b1", 4)])])
    inside = w.clip(w.node("Mul", [first, weight("b2", 4)]), -0.9, 0.9)
    angles = w.node("Add", [w.node("Asin", [inside]), w.node("Atan", [turned])])
    angles = w.node("Sub", [angles, w.node("Acos", [inside])])
    rest = w.node("Sub", [angles, w.node("Floor", [angles])])
    rest = w.node("Mul", [rest, w.node("Sub", [w.node("Ceil", [angles]), angles])])
    # Before opset 8 the inputs of Max, Min and Mean must have one shape.
    shift = w.node("Add", [rest, weight("b3", 4)])
    highest = w.node("Max", [rest, shift, angles])
    lowest = w.node("Min", [rest, shift, w.node("Mean", [angles, highest, rest])])
    best, _ = w.top(w.node("Mul", [third, weight("b4", 5)]), 3, 1)
    mixed = w.node("Sub", [highest, lowest])
    flags = w.node("Less", [second, best]), w.node("Greater", [best, w.weight([0.1], dtype=np.float32)])
    either, both = w.node("Or", list(flags)), w.node("Xor", list(flags))
    marks = [w.node("Cast", [flag], to=TensorProto.FLOAT) for flag in (either, both)]
    third = w.node("Mul", [best, w.node("Sub", marks)])
    largest = w.node("Cast", [w.node("ArgMax", [best], axis=1, keepdims=1)], to=TensorProto.FLOAT)
    least = w.node("Cast", [w.node("ArgMin", [best], axis=1, keepdims=1)], to=TensorProto.FLOAT)
    third = w.node("Add", [third, w.node("Mul", [best, w.node("Sub", [largest, least])])])
    below = w.node("Add", [w.node("Abs", [mixed]), w.weight([0.5], dtype=np.float32)])
    mixed = w.node("Mul", [mixed, w.node("Reciprocal", [below])])
    joined = w.node("Concat", [mixed, third, w.node("Mul", [w.node("Hardmax", [second], axis=1), second])], axis=1)
    return w.node("MatMul", [w.node("Tile", [joined, w.ints([1, 2])]), weight("out", 20, CLASSES)])


def reduced(w: Words, x: str) -> str:
    """Use every reduction of opset 7."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    stack = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 24)]), w.ints([-1, 2, 3, 4])])
    positive = w.node("Exp", [w.node("Mul", [stack, weight("b1", 4)])])
    rows = [
        w.reduce("ReduceL1", w.node("Mul", [stack, weight("b2", 4)]), [1, 2], keepdims=0),
        w.reduce("ReduceL2", w.node("Add", [stack, weight("b3", 4)]), [1, 2], keepdims=0),
        w.reduce("ReduceSumSquare", w.node("Sub", [stack, weight("b4", 4)]), [1, 2], keepdims=0),
        w.reduce("ReduceLogSum", positive, [1, 2], keepdims=0),
        w.reduce("ReduceLogSumExp", w.node("Mul", [stack, weight("b5", 4)]), [1, 2], keepdims=0),
        w.reduce("ReduceProd", positive, [1, 2], keepdims=0),
    ]
    return w.node("MatMul", [w.node("Concat", rows, axis=1), weight("out", 24, CLASSES)])


def rearranged(w: Words, x: str) -> str:
    """Rearrange images in blocks, normalize them, and pool them by norms."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    image = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 32)]), w.ints([-1, 2, 4, 4])])
    deep = w.node("SpaceToDepth", [image], blocksize=2)
    deep = w.node("InstanceNormalization", [deep, weight("scale", 8), weight("bias", 8)], epsilon=0.01)
    image = w.node("DepthToSpace", [deep], blocksize=2)
    pooled = w.node("LpPool", [w.node("Mul", [image, weight("b1", 4)])], kernel_shape=[2, 2], strides=[2, 2], p=2)
    pooled = w.node("LpNormalization", [w.node("Add", [pooled, weight("b2", 2)])], axis=1, p=2)
    total = w.node("GlobalLpPool", [w.node("Mul", [pooled, weight("b3", 2)])], p=3)
    flat = w.node("Concat", [w.node("Flatten", [pooled]), w.node("Flatten", [total])], axis=1)
    return w.node("MatMul", [flat, weight("out", 10, CLASSES)])


def hyperbolic(w: Words, x: str) -> str:
    """Use hyperbolic functions, and other operators of opset 9."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("Tanh", [w.node("MatMul", [x, weight("w", FEATURES, 4)])])
    grown = w.node("Cosh", [w.node("Mul", [hidden, weight("b1", 4)])])
    grown = w.node("Acosh", [w.node("Add", [grown, w.weight([0.2], dtype=np.float32)])])
    bent = w.node("Sinh", [w.node("Asinh", [w.node("Add", [hidden, weight("b2", 4)])])])
    bent = w.node("Atanh", [w.node("Tanh", [w.node("Mul", [bent, grown])])])
    bent = w.node("Shrink", [w.node("Mul", [bent, w.weight(parameter("b3", 4) + 2, "b3")])], lambd=0.1, bias=0.05)
    numbers = w.node("Cast", [w.node("Not", [w.node("IsNaN", [bent])])], to=TensorProto.FLOAT)
    bent = w.node("MeanVarianceNormalization", [w.node("Mul", [bent, numbers])], axes=[1])
    kept = w.weight([True, False, True, True], dtype=np.bool_)
    chosen = w.node("Compress", [w.node("Mul", [bent, weight("b4", 4)]), kept], axis=1)
    eye = w.node("EyeLike", [w.weight(np.zeros((3, 3)), dtype=np.float32)], k=1)
    chosen = w.node("Add", [w.node("MatMul", [chosen, eye]), chosen])
    labels, depth = w.weight([2, 0, 1], dtype=np.int64), w.weight(3, dtype=np.int64)
    hot = w.node("OneHot", [labels, depth, weight("values", 2)])
    return w.node("MatMul", [w.node("MatMul", [chosen, hot]), weight("out", 3, CLASSES)])


def indexed(w: Words, x: str) -> str:
    """Use every kind of indexing, in the syntax of opset 11."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    numbers = lambda *values: w.weight(np.asarray(values), dtype=np.int64)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 4)])
    table = w.node("Mul", [weight("table", 5, 4), w.weight(parameter("b1", 4) + 2, "b1")])
    picked = w.node("GatherElements", [table, numbers([0, 1, -1, 2], [4, 4, 0, 1])], axis=0)
    slices = w.node("GatherND", [table, numbers([2], [-1])])
    places = numbers([1, 0, 2, 3], [0, 2, 1, 4])
    table = w.node("ScatterElements", [table, places, w.node("Neg", [picked])], axis=0)
    table = w.node("ScatterND", [table, numbers([3], [0]), w.node("Tanh", [slices])])
    running = w.node("CumSum", [table, w.weight(1, dtype=np.int64)], exclusive=1, reverse=1)
    rows = w.node("Range", [w.weight(0, dtype=np.int64), w.weight(5, dtype=np.int64), w.weight(1, dtype=np.int64)])
    rows = w.node(
        "BitShift", [w.node("Cast", [rows], to=TensorProto.UINT8), w.weight([1], dtype=np.uint8)], direction="LEFT"
    )
    rows = w.node("Cast", [rows], to=TensorProto.FLOAT)
    turned = w.node("Add", [running, w.unsqueeze(w.node("Mul", [rows, weight("b2", 5)]), [1])])
    cut = w.node("Mod", [turned, w.weight([0.7], dtype=np.float32)], fmod=1)
    whole = w.node("Round", [w.node("Mul", [cut, w.weight([3.0], dtype=np.float32)])])
    numbers_found = w.node("Cast", [w.node("Not", [w.node("IsInf", [whole])])], to=TensorProto.FLOAT)
    cut = w.node("Mul", [w.node("Mul", [cut, whole]), numbers_found])
    different = w.node("Unique", [w.node("Mul", [cut, weight("b3", 4)])], axis=1)
    mixed = w.node("MatMul", [hidden, w.node("Transpose", [different], perm=[1, 0])])
    return w.node("MatMul", [mixed, weight("out", 5, CLASSES)])


def lately_indexed(w: Words, x: str) -> str:
    """Use scatters with reductions, groups of channels, and bitwise operators, in the syntax of opset 18."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    numbers = lambda *values: w.weight(np.asarray(values), dtype=np.int64)  # noqa: E731
    hidden = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 16)]), w.ints([-1, 4, 4])])
    # The GroupNormalization of opset 18 is deprecated.
    grouped = {"op": "GroupNormalization", "num_groups": 4} if w.opset >= 21 else {"op": "InstanceNormalization"}
    hidden = w.node(inputs=[hidden, weight("scale", 4), weight("bias", 4)], **grouped)
    hidden = w.node("Mul", [w.node("Trilu", [hidden], upper=0), weight("b1", 4)])
    table = weight("table", 4, 4)
    indices = numbers([1, 0, 2, 3], [0, 2, 2, 0])
    for reduction in ("add", "mul", "max"):
        updates = weight(f"updates_{reduction}", 2, 4)
        table = w.node("ScatterElements", [table, indices, updates], axis=0, reduction=reduction)
    for reduction in ("add", "mul", "min"):
        updates = weight(f"slices_{reduction}", 2, 4)
        table = w.node("ScatterND", [table, numbers([3], [1]), updates], reduction=reduction)
    bits = w.weight([5, 6, 3, 8], dtype=np.int32), w.weight([3], dtype=np.int32)
    bits = [w.node(f"Bitwise{op}", list(bits)) for op in ("And", "Or", "Xor")]
    bits = w.node("CastLike", [w.node("BitwiseNot", [w.node("Add", [w.node("Add", bits[:2]), bits[2]])]), table])
    scaled = w.node("Mul", [table, w.node("Div", [bits, w.weight([20.0], dtype=np.float32)])])
    mixed = w.reduce_mean(w.node("MatMul", [hidden, scaled]), [1], keepdims=0)
    return w.node("MatMul", [mixed, weight("out", 4, CLASSES)])


def lately_computed(w: Words, x: str) -> str:
    """Use the operators of the newest opsets."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    hidden = w.node("MatMul", [x, weight("w", FEATURES, 6)])
    gate = w.node("Swish", [w.node("Mul", [hidden, weight("b1", 6)])], alpha=1.3)
    hidden = w.node("SwiGLU", [gate, w.node("Add", [hidden, weight("b2", 6)])], alpha=0.8)
    hidden = w.node("CumProd", [w.node("Tanh", [hidden]), w.weight(1, dtype=np.int64)], reverse=1)
    return w.node("MatMul", [hidden, weight("out", 6, CLASSES)])


def likely(w: Words, x: str) -> str:
    """Use a NegativeLogLikelihoodLoss inside of a model."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    scores = w.node("LogSoftmax", [w.node("MatMul", [x, weight("w", FEATURES, CLASSES)])], axis=1)
    labels = w.node("Cast", [w.node("ArgMax", [x], axis=1, keepdims=0)], to=TensorProto.INT64)
    labels = w.node("Clip", [labels, w.weight(0, dtype=np.int64), w.weight(CLASSES - 1, dtype=np.int64)])
    given = w.weight([0.5, 1.5, 1.0], dtype=np.float32)
    loss = w.node("NegativeLogLikelihoodLoss", [scores, labels, given], ignore_index=1, reduction="none")
    return w.node("Mul", [w.unsqueeze(loss, [1]), weight("out", 1, CLASSES)])


def located(w: Words, x: str) -> str:
    """Sample images at affine grids, join blocks by Col2Im, and compute a determinant, in the syntax of opset 20."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    images = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 16)]), w.ints([-1, 1, 4, 4])])
    matrices = w.node("Tanh", [w.node("MatMul", [x, weight("b1", FEATURES, 6)])])
    matrices = w.node("Reshape", [matrices, w.ints([-1, 2, 3])])
    rows = w.node("Slice", [w.node("Shape", [x]), w.ints([0]), w.ints([1])])
    size = w.node("Concat", [rows, w.ints([1, 4, 4])], axis=0)
    grids = [w.node("AffineGrid", [matrices, size], align_corners=k) for k in (0, 1)]
    seen = w.node("GridSample", [images, grids[0]], padding_mode="reflection")
    wave = w.node("GridSample", [images, grids[1]], mode="cubic", padding_mode="border", align_corners=1)
    columns = w.node("Reshape", [w.node("Add", [seen, wave]), w.ints([-1, 4, 4])])
    square = w.node("Col2Im", [columns, w.ints([3, 3]), w.ints([2, 2])])
    volume = w.unsqueeze(w.node("Det", [w.node("Add", [square, weight("b2", 3, 3)])]), [2])
    flat = [w.node("Reshape", [part, w.ints([-1, size])]) for part, size in ((volume, 1), (square, 9))]
    return w.node("MatMul", [w.node("Concat", flat, axis=1), weight("out", 10, CLASSES)])


def transformed(w: Words, x: str) -> str:
    """Compute frequencies by DFT.

    The training model needs Cos and Sin of float64, for which onnxruntime-training 1.19.2 has no kernels.
    """
    rows = w.node("MatMul", [x, w.weight(parameter("w", FEATURES, 6), "w")])
    parts = w.node("DFT", [w.unsqueeze(rows, [2]), "", w.weight(1, dtype=np.int64)], onesided=1)
    flat = w.node("Reshape", [parts, w.ints([-1, 8])])
    return w.node("MatMul", [flat, w.weight(parameter("out", 8, CLASSES), "out")])


def remembering(w: Words, x: str) -> str:
    """Use operators with a state of the past, in the syntax of opset 27."""
    weight = lambda name, *shape: w.weight(parameter(name, *shape), name)  # noqa: E731
    line = w.node("Reshape", [w.node("MatMul", [x, weight("w", FEATURES, 8)]), w.ints([-1, 2, 4])])
    kernels, bias = weight("kernels", 2, 1, 3), weight("bias", 2)
    past = w.node("CausalConvWithState", [line, kernels, bias], "first", "left", activation="silu")
    again = w.node("CausalConvWithState", [past, kernels, bias, "left"], "second", "right")
    # Positions come last: heads of two elements.
    rows = w.node("Transpose", [w.node("Concat", [past, again], axis=1)], perm=[0, 2, 1])
    decay, beta = (w.node("MatMul", [rows, weight(name, 4, 1)]) for name in ("decay", "beta"))
    decay, beta = w.node("Log", [w.node("Sigmoid", [decay])]), w.node("Sigmoid", [beta])
    heads = {"q_num_heads": 2, "kv_num_heads": 1, "update_rule": "gated_delta"}
    keys, known = (w.node("MatMul", [rows, weight(name, 4, 2)]) for name in ("keys", "known"))
    seen = w.node("LinearAttention", [rows, keys, known, "", decay, beta], "seen", "state", **heads)
    return w.node("MatMul", [w.node("Reshape", [seen, w.ints([-1, 16])]), weight("out", 16, CLASSES)])


# Networks to train, each with the oldest opset that has all its operators.
NETWORKS: dict[str, tuple[Callable[[Words, str], str], int]] = {
    "perceptron": (perceptron, 7),
    "learnt_power": (learnt_power, 7),
    "middle_softmax": (middle_softmax, 7),
    "heads": (heads, 7),
    "branches": (branches, 7),
    "lonely_branch": (lonely_branch, 7),
    "scanned": (scanned, 9),
    "looped": (looped, 9),
    "expanded": (expanded, 8),
    "chosen": (chosen, 9),
    "selected": (selected, 9),
    "dropped": (dropped, 12),
    "gelus": (gelus, 20),
    "convolved": (convolved, 7),
    "transposed": (transposed, 7),
    "pooled": (pooled, 9),
    "pooled_sized": (pooled_sized, 9),
    "pooled_unsized": (pooled_unsized, 10),
    "normalized": (normalized, 7),
    "normalized_branch": (normalized_branch, 7),
    "layered": (layered, 17),
    "layered_without_mean": (layered_without_mean, 23),
    "fused": (fused, 7),
    "optimized": (optimized, 10),
    "named_axes": (named_axes, 12),
    "attending": (attending, 23),
    "responding": (responding, 7),
    "activated": (activated, 7),
    "lately_activated": (lately_activated, 18),
    "enlarged": (enlarged, 7),
    "sampled": (sampled, 11),
    "lately_sampled": (lately_sampled, 19),
    "mirrored": (mirrored, 9),
    "functions": (functions, 7),
    "reduced": (reduced, 9),
    "rearranged": (rearranged, 7),
    "hyperbolic": (hyperbolic, 9),
    "indexed": (indexed, 11),
    "lately_indexed": (lately_indexed, 18),
    "lately_computed": (lately_computed, 28),
    "likely": (likely, 12),
    "located": (located, 20),
    "transformed": (transformed, 20),
    "remembering": (remembering, 27),
}
# Networks not compared with onnxruntime-training 1.19.2, which lacks kernels for their training models.
NOT_IN_THE_REFERENCE = ("transformed",)
# Networks with an unknown number of features.
UNSIZED = ("pooled_unsized",)
# Networks with operators that change their meaning, by the first opset with the new meaning.
CHANGED = {"middle_softmax": 13}
LOSSES = ("MSELoss", "L1Loss", "BCEWithLogitsLoss", "CrossEntropyLoss")
OLDEST_OF_LOSS = {"CrossEntropyLoss": 12}
# Trained combinations of network, loss and opset: every network with one loss, and one network with every loss.
TRAINED = [
    (network, loss, opset)
    for network, (_, oldest_opset) in NETWORKS.items()
    for loss in (LOSSES if network == "perceptron" else LOSSES[:1])
    for opset in OPSETS
    if opset >= max(oldest_opset, OLDEST_OF_LOSS.get(loss, OLDEST_OPSET))
]


def trainee(network: str, opset: int, batch: int | str) -> Trainee:
    """Return a network at an opset, for a fixed or symbolic number of rows."""
    w = Words(opset)
    scores = NETWORKS[network][0](w, "x")
    features = "features" if network in UNSIZED else FEATURES
    model = w.model(w.graph({"x": (np.float32, [batch, features])}, {scores: np.float32}))
    rank = 2
    shape = model.graph.output[0].type.tensor_type.shape
    for _ in range(rank):
        shape.dim.add()
    constants = [name for name in w.weights if not name.startswith("given_")]
    return Trainee(model, constants, feeds())


def write_artifacts(folder: Path, network: str, loss: str, opset: int, batch: int | str) -> Trainee:
    """Write the artifacts of a network at an opset."""
    made = trainee(network, opset, batch)
    artifacts.generate_artifacts(
        made.model,
        requires_grad=made.trainable,
        loss=artifacts.LossType[loss],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return made


def feeds() -> dict[str, np.ndarray]:
    """Return values for the inputs of a training step with any loss."""
    rng = np.random.default_rng(7)
    return {
        "x": rng.standard_normal((BATCH, FEATURES)).astype(np.float32),
        "target": rng.uniform(0, 1, (BATCH, CLASSES)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, BATCH),
    }
