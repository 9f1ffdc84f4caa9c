"""Error messages for invalid models and feeds. Every sentence is quoted in full."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import DEVICES, Run
from onnx import ModelProto, TensorProto, helper, numpy_helper
from opsets import Words, write_artifacts

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

X = np.ones((3, 2), np.float32)
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
INVALID, UNSUPPORTED, ARGUMENT = ortrain.InvalidModelError, ortrain.UnsupportedError, ortrain.InvalidArgumentError


def model(*nodes: Any, inputs: Any = None, outputs: Any = None, weights: Any = (), opset: int = 17) -> ModelProto:
    """Return a model from x, float32[n, 2], to y, unless other inputs and outputs are declared."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, ins, outs, f"a {op}", **dict(*attributes)) for op, ins, outs, *attributes in nodes],
        "graph",
        [declare(name, kind, shape) for name, kind, shape in inputs or [("x", FLOAT, ["n", 2])]],
        [declare(name, kind, None) for name, kind in outputs or [("y", FLOAT)]],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def changed(proto: ModelProto, change: Callable[[ModelProto], Any]) -> ModelProto:
    change(proto)
    return proto


def branch(op: str, name: str) -> onnx.GraphProto:
    nodes = [helper.make_node(op, [name], ["z"], f"an inner {op}")]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("z", FLOAT, None)])


def conditional(*, yes: onnx.GraphProto, no: onnx.GraphProto) -> Any:
    return ("If", ["c"], ["y"], {"then_branch": yes, "else_branch": no})


def body(inputs: dict[str, int], *nodes: Any, outputs: Sequence[str]) -> onnx.GraphProto:
    """Return a body with inputs by element type; its outputs have no declared type."""
    made = [helper.make_node(op, taken, given, f"an inner {op}") for op, taken, given in nodes]
    given = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in inputs.items()]
    return helper.make_graph(made, "body", given, [onnx.ValueInfoProto(name=name) for name in outputs])


def scan(of: onnx.GraphProto, outputs: Sequence[str] = ("y",), **attributes: Any) -> Any:
    return ("Scan", ["x"], list(outputs), {"body": of, "num_scan_inputs": 1} | attributes)


def loop(of: onnx.GraphProto, inputs: Sequence[str] = ("", "", "x"), outputs: Sequence[str] = ("y",)) -> Any:
    return ("Loop", list(inputs), list(outputs), {"body": of})


def weight(name: str = "w", **changes: Any) -> TensorProto:
    """Return a float32[2, 3] tensor; its values and other fields are arguments."""
    return TensorProto(name=name, **({"data_type": FLOAT, "dims": [2, 3]} | changes))


def of_image(op: str, *weights: Any, shape: Any = (2, 3, 4, 5), **attributes: Any) -> ModelProto:
    """Return a model of one node. Its first input is an image; weights a, b, c ... follow, omitted if `None`."""
    named = {name: value for name, value in zip("abcd", weights, strict=False) if value is not None}
    inputs = ["x", *(name if name in named else "" for name in "abcd"[: len(weights)])]
    return model(
        (op, inputs, ["y"], attributes),
        inputs=[("x", FLOAT, shape)],
        weights=[numpy_helper.from_array(np.array(value), name) for name, value in named.items()],
        opset=18,
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def convolution(image: list[int], kernel: list[int], op: str = "Conv", **attributes: Any) -> ModelProto:
    kernels = numpy_helper.from_array(np.zeros(kernel, np.float32), "w")
    return model((op, ["x", "w"], ["y"], attributes), inputs=[("x", FLOAT, image)], weights=[kernels])


RELU = ("Relu", ["x"], ["y"])
MATMUL = ("MatMul", ["x", "w"], ["y"])
WITH_CONDITION = [("x", FLOAT, ["n", 2]), ("c", BOOL, [])]

MODELS: dict[str, tuple[ModelProto, type[Exception], str]] = {
    "made twice, by an initializer and a node": (
        model(RELU, weights=[weight("y", float_data=[0] * 6)]),
        INVALID,
        'the model: "y" is defined twice, the second time by node "a Relu" (Relu)',
    ),
    "made twice, by two initializers": (
        model(RELU, weights=[weight(float_data=[0] * 6)] * 2),
        INVALID,
        'the model: "w" is defined twice, the second time by an initializer',
    ),
    "an output that nothing makes": (
        model(RELU, outputs=[("z", FLOAT)]),
        INVALID,
        'the model: the list of the graph\'s outputs uses "z", which is not an input, an initializer or an '
        "output of another node",
    ),
    "a node that uses its own result": (
        model(("Add", ["x", "y"], ["y"])),
        INVALID,
        'the model: the graph has a cycle through node "a Add" (Add)',
    ),
    "an attribute twice": (
        changed(
            model(("Selu", ["x"], ["y"], {"alpha": 1.0})),
            lambda proto: proto.graph.node[0].attribute.append(helper.make_attribute("alpha", 2.0)),
        ),
        INVALID,
        'the model: attribute "alpha" of node "a Selu" (Selu) occurs twice; a node can have each attribute only once',
    ),
    "a body twice, the second with fewer inputs": (
        changed(
            model(scan(body({"x": FLOAT}, ("Relu", ["x"], ["s"]), outputs=["s"]))),
            lambda proto: proto.graph.node[0].attribute.append(
                helper.make_attribute("body", body({}, ("Relu", ["x"], ["s"]), outputs=["s"]))
            ),
        ),
        INVALID,
        'the model: attribute "body" of node "a Scan" (Scan) occurs twice; a node can have each attribute only once',
    ),
    "no graph": (
        changed(model(RELU), lambda proto: proto.ClearField("graph")),
        INVALID,
        "the model is not an ONNX model: it has no graph",
    ),
    "no opset": (
        changed(model(RELU), lambda proto: proto.ClearField("opset_import")),
        INVALID,
        'the model: it uses operators of "ai.onnx", but imports no version of this operator set',
    ),
    "an operator younger than the opset": (
        model(("Erf", ["x"], ["y"]), opset=8),
        INVALID,
        'the model: node "a Erf" (Erf) with inputs (x: float32[n, 2]): the model uses opset 8, but the operator '
        "needs opset 9 or newer",
    ),
    "sizes that overflow": (
        model(RELU, inputs=[("x", FLOAT, [2**62, 2**62])]),
        INVALID,
        'the model: node "a Relu" (Relu) with inputs (x: float32[4611686018427387904, 4611686018427387904]): "x": a '
        "tensor of shape [4611686018427387904, 4611686018427387904] and type float32 is too large to address",
    ),
    "texts": (
        model(RELU, inputs=[("x", TensorProto.STRING, ["n", 2])]),
        UNSUPPORTED,
        'the model: "x" has type string[n, 2], which is not supported (node "a Relu" (Relu) uses it); expected a '
        "tensor of numbers or a sequence of such tensors; convert strings to numbers outside of the model "
        "(scikit-learn: encode columns before the pipeline, fit with numbers as classes)",
    ),
    "a type that is not declared": (
        model(RELU, inputs=[("x", 0, ["n", 2])]),
        INVALID,
        'the model: node "a Relu" (Relu) with inputs (x: ?): the type of input 0 is not declared anywhere',
    ),
    "types that differ": (
        model(("Add", ["x", "i"], ["y"]), inputs=[("x", FLOAT, [2]), ("i", INT64, [2])]),
        INVALID,
        'the model: node "a Add" (Add) with inputs (x: float32[2], i: int64[2]): input 0 is of type float32, but '
        "input 1 is of type int64; insert a Cast",
    ),
    "a missing attribute": (
        model(("Cast", ["x"], ["y"])),
        INVALID,
        'the model: node "a Cast" (Cast) with inputs (x: float32[n, 2]): attribute "to" is missing',
    ),
    "an attribute of another kind": (
        model(("Cast", ["x"], ["y"], {"to": "float"})),
        INVALID,
        'the model: node "a Cast" (Cast) with inputs (x: float32[n, 2]): attribute "to" must be INT, got STRING',
    ),
    "too many inputs": (
        model(("Relu", ["x", "x"], ["y"])),
        INVALID,
        'the model: node "a Relu" (Relu) with inputs (x: float32[n, 2], x: float32[n, 2]): expected 1 inputs, got 2',
    ),
    "too many outputs": (
        model(("Relu", ["x"], ["y", "z"])),
        INVALID,
        'the model: node "a Relu" (Relu) with inputs (x: float32[n, 2]): expected at most 1 outputs, got 2',
    ),
    "an axis out of range": (
        model(("Softmax", ["x"], ["y"], {"axis": -(2**63)})),
        INVALID,
        'the model: node "a Softmax" (Softmax) with inputs (x: float32[n, 2]): axis -9223372036854775808 is out of '
        "range for rank 2",
    ),
    "a branch that is missing": (
        model(("If", ["c"], ["y"], {"then_branch": branch("Relu", "x")}), inputs=WITH_CONDITION),
        INVALID,
        'the model: node "a If" (If) with inputs (c: bool[], x: float32[n, 2]): attribute "else_branch" is missing',
    ),
    "a branch that uses what is not there": (
        model(conditional(yes=branch("Relu", "x"), no=branch("Tanh", "q")), inputs=WITH_CONDITION),
        INVALID,
        'the model: node "an inner Tanh" (Tanh) uses "q", which is not an input, an initializer or an '
        "output of another node",
    ),
    "a Scan whose body takes more": (
        model(scan(body({"a": FLOAT, "b": FLOAT}, ("Add", ["a", "b"], ["z"]), outputs=["z"]))),
        INVALID,
        'the model: node "a Scan" (Scan) with inputs (x: float32[n, 2]): body has 2 inputs, but 1 are needed: 0 '
        "states and 1 slices",
    ),
    "a Scan along an axis that is not there": (
        model(scan(body({"a": FLOAT}, ("Relu", ["a"], ["z"]), outputs=["z"]), scan_input_axes=[2])),
        INVALID,
        'the model: node "a Scan" (Scan) with inputs (x: float32[n, 2]): scan_input_axes: axis 2 is out of range for '
        "rank 2",
    ),
    "a Scan whose body takes other elements": (
        model(scan(body({"a": BOOL}, ("Not", ["a"], ["z"]), outputs=["z"]))),
        INVALID,
        'the model: node "a Scan" (Scan) with inputs (x: float32[n, 2]): input "a" of body is declared as bool[..], '
        "but gets float32[2]",
    ),
    "a Scan with an attribute of another kind": (
        model(scan(body({"a": FLOAT}, ("Relu", ["a"], ["z"]), outputs=["z"]), num_scan_inputs=1.0)),
        INVALID,
        'the model: node "a Scan" (Scan) with inputs (x: float32[n, 2]): attribute "num_scan_inputs" must be INT, '
        "got FLOAT",
    ),
    "a Loop without a body": (
        model(("Loop", ["", "", "x"], ["y"])),
        INVALID,
        'the model: node "a Loop" (Loop) with inputs (none, none, x: float32[n, 2]): attribute "body" is missing',
    ),
    "a Loop whose body gives no condition": (
        model(loop(body({"i": INT64, "c": BOOL, "v": FLOAT}, ("Relu", ["v"], ["z"]), outputs=["z"]))),
        INVALID,
        'the model: node "a Loop" (Loop) with inputs (none, none, x: float32[n, 2]): body has 1 outputs, but 2 are '
        "needed: the condition and 1 carried values",
    ),
    "a Loop whose body makes other elements of what it carries": (
        model(
            loop(
                body(
                    {"i": INT64, "c": BOOL, "v": FLOAT},
                    ("Equal", ["v", "v"], ["z"]),
                    ("Identity", ["c"], ["d"]),
                    outputs=["d", "z"],
                )
            )
        ),
        INVALID,
        'the model: node "a Loop" (Loop) with inputs (none, none, x: float32[n, 2]): the carried value "v" is '
        "float32[n, 2], but body returns bool[n, 2]; its type must not change",
    ),
    "a mistake in a body": (
        model(scan(body({"a": FLOAT}, ("MatMul", ["a", "x"], ["z"]), ("Not", ["z"], ["q"]), outputs=["q"]))),
        INVALID,
        'the model: node "a Scan" (Scan) with inputs (x: float32[n, 2]): in its subgraph: node "an '
        'inner Not" (Not) with inputs (z: float32[2]): input 0 is of type float32, expected bool',
    ),
    "unknown operators in branches": (
        model(
            conditional(yes=branch("Frob", "x"), no=branch("Grob", "x")), ("Frob", ["y"], ["z"]), inputs=WITH_CONDITION
        ),
        UNSUPPORTED,
        "the model: the model uses operators that are not supported: "
        'Frob ("an inner Frob", "a Frob"); Grob ("an inner Grob"); an operator can be added as a function of ONNX '
        "(docs/extending.md)",
    ),
    "too few values": (
        model(MATMUL, weights=[weight(float_data=[1, 2])]),
        INVALID,
        "the model: tensor `w` should have 6 elements by its dimensions and type, but float_data holds 2",
    ),
    "values in the wrong field": (
        model(MATMUL, weights=[weight(int32_data=[1] * 6)]),
        INVALID,
        "the model: tensor `w` has the element type FLOAT, whose values cannot be in int32_data",
    ),
    "no elements, but sizes that overflow": (
        model(MATMUL, weights=[weight(dims=[0, 2**62, 2**62])]),
        INVALID,
        'the model: tensor "w": a tensor of shape [0, 4611686018427387904, 4611686018427387904] and type float32 is '
        "too large to address",
    ),
    "a kernel larger than the image": (
        convolution([2, 1, 4, 4], [1, 1, 3, 5]),
        INVALID,
        'the model: node "a Conv" (Conv) with inputs (x: float32[2, 1, 4, 4], w: float32[1, 1, 3, 5]): spatial axis '
        "1: a window of 5 does not fit 4 elements with padding of 0 before and 0 after",
    ),
    "a kernel on one pixel": (
        convolution([1, 3, 1, 1], [8, 3, 3, 3], pads=[1, 0, 1, 1]),
        INVALID,
        'the model: node "a Conv" (Conv) with inputs (x: float32[1, 3, 1, 1], w: float32[8, 3, 3, 3]): spatial axis '
        "1: a window of 3 does not fit 1 elements with padding of 0 before and 1 after",
    ),
    "channels that do not fit the groups": (
        convolution([1, 6, 4, 4], [4, 2, 3, 3], group=2),
        INVALID,
        'the model: node "a Conv" (Conv) with inputs (x: float32[1, 6, 4, 4], w: float32[4, 2, 3, 3]): an image of '
        "shape [1, 6, 4, 4] has 6 channels, but a filter of shape [4, 2, 3, 3] takes 2 in each of 2 groups",
    ),
    "a dilation that overflows": (
        convolution([1, 1, 4, 4], [1, 1, 3, 3], dilations=[1, 2**63 - 1], pads=[0, 2**62, 0, 2**62]),
        INVALID,
        'the model: node "a Conv" (Conv) with inputs (x: float32[1, 1, 4, 4], w: float32[1, 1, 3, 3]): spatial axis '
        "1: a window of 3, dilated by 9223372036854775807, does not fit 4 elements with padding of "
        "4611686018427387904 before and 4611686018427387904 after",
    ),
    "sizes whose product overflows": (
        convolution([1, 1, 4, 4], [1, 1, 3, 3], pads=[2**40] * 4),
        UNSUPPORTED,
        'the model: node "a Conv" (Conv) with inputs (x: float32[1, 1, 4, 4], w: float32[1, 1, 3, 3]): spatial axis '
        "0: 4 elements with padding of 1099511627776 before and 1099511627776 after are not supported; the "
        "padding is at most 16777216 at each end",
    ),
    "a transposed convolution of which nothing is left": (
        convolution([1, 2, 1, 1], [2, 1, 3, 3], op="ConvTranspose", pads=[1, 2, 1, 1]),
        INVALID,
        'the model: node "a ConvTranspose" (ConvTranspose) with inputs (x: float32[1, 2, 1, 1], w: float32[2, 1, 3, '
        "3]): the result is empty along spatial axis 1: windows of size 3 at 1 positions cover 3 elements; padding "
        "removes 2 at the start and 1 at the end",
    ),
    "a window larger than the image": (
        of_image("MaxPool", kernel_shape=[5, 3]),
        INVALID,
        'the model: node "a MaxPool" (MaxPool) with inputs (x: float32[2, 3, 4, 5]): spatial axis 0: a window of 5 '
        "does not fit 4 elements with padding of 0 before and 0 after",
    ),
    "padding of a window that overflows": (
        of_image("AveragePool", kernel_shape=[3, 3], pads=[2**62] * 4),
        INVALID,
        'the model: node "a AveragePool" (AveragePool) with inputs (x: float32[2, 3, 4, 5]): spatial axis 0 is too '
        "large to count: 4 elements with padding of 4611686018427387904 before and 4611686018427387904 after, and "
        "a window of 3 with stride 1 and dilation 1",
    ),
    "a window that does not move": (
        of_image("AveragePool", kernel_shape=[3, 3], strides=[0, 1]),
        INVALID,
        'the model: node "a AveragePool" (AveragePool) with inputs (x: float32[2, 3, 4, 5]): strides '
        "must be at least 1, got [0, 1]",
    ),
    "statistics of other channels": (
        of_image("BatchNormalization", floats(1, 1, 1, 1), *[floats(1, 1, 1)] * 3),
        INVALID,
        'the model: node "a BatchNormalization" (BatchNormalization) with inputs (x: float32[2, 3, 4, '
        "5], a: float32[4], b: float32[3], c: float32[3], d: float32[3]): input 1 has shape [4], but [3]"
        " is needed: one element for each channel of input 0",
    ),
    "a reflection beyond the image": (
        of_image("Pad", [0, 0, 4, 0, 0, 0, 0, 0], mode="reflect"),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 4, 5], a: int64[8]): mode "reflect" pads axis 2 '
        "by 4 elements, but the axis has only 3 elements to copy",
    ),
    "the edge of nothing": (
        of_image("Pad", [0, 0, 1, 0, 0, 0, 0, 0], mode="edge", shape=(2, 3, 0, 5)),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 0, 5], a: int64[8]): mode "edge" pads axis 2 by '
        "1 elements, but the axis has only 0 elements to copy",
    ),
    "too few pads": (
        of_image("Pad", [0, 0, 4, 0]),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 4, 5], a: int64[4]): got 4 pads for 4 axes, '
        "expected 8 (one before and one after each axis)",
    ),
    "pads that overflow": (
        of_image("Pad", [0, 0, 2**62, 0, 0, 0, 2**62, 0]),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 4, 5], a: int64[8]): pads '
        "4611686018427387904 and 4611686018427387904 make axis 2 too long to count",
    ),
    "pads that take more than there is": (
        of_image("Pad", [0, 0, -3, 0, 0, 0, -3, 0]),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 4, 5], a: int64[8]): pads -3 and -3 remove more '
        "than the 4 elements of axis 2",
    ),
    "pads of an axis that is not there": (
        of_image("Pad", [1, 1], None, [7]),
        INVALID,
        'the model: node "a Pad" (Pad) with inputs (x: float32[2, 3, 4, 5], a: int64[2], none, c: '
        "int64[1]): axis 7 is out of range for rank 4",
    ),
    "scales and sizes": (
        of_image("Resize", None, floats(1, 1, 1, 1), [2, 3, 8, 8]),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4], '
        "c: int64[4]): both scales and sizes are given",
    ),
    "neither scales nor sizes": (
        of_image("Resize"),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5]): neither scales nor sizes are given',
    ),
    "a scale of zero": (
        of_image("Resize", None, floats(1, 1, 0, 2)),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4]): '
        "the scale of axis 2 must be a number above 0, got 0",
    ),
    "a scale that is not a number": (
        of_image("Resize", None, floats(1, 1, float("nan"), 2)),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4]): '
        "the scale of axis 2 must be a number above 0, got NaN",
    ),
    "an endless scale": (
        of_image("Resize", None, floats(1, 1, 2, float("inf"))),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4]): '
        "the scale of axis 3 must be a number above 0, got inf",
    ),
    "scales whose product overflows": (
        of_image("Resize", None, floats(1, 1, 2**50, 2**50)),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4]): '
        '"y": a tensor of shape [2, 3, 4503599627370496, 5629499534213120] and type float32 is too large'
        " to address",
    ),
    "a negative size of an image": (
        of_image("Resize", None, None, [2, 3, -8, 8]),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, none, c: '
        "int64[4]): the size of axis 2 must be at least 0, got -8",
    ),
    "an unknown way of sampling": (
        of_image("Resize", None, floats(1, 1, 2, 2), mode="bilinear"),
        INVALID,
        'the model: node "a Resize" (Resize) with inputs (x: float32[2, 3, 4, 5], none, b: float32[4]): '
        'mode must be one of nearest, linear, cubic, got "bilinear"',
    ),
    "a window of no channels": (
        of_image("LRN", size=0),
        INVALID,
        'the model: node "a LRN" (LRN) with inputs (x: float32[2, 3, 4, 5]): size must be at least 1, got 0',
    ),
    "slopes that do not fit": (
        of_image("PRelu", floats(1, 1, 1, 1)),
        INVALID,
        'the model: node "a PRelu" (PRelu) with inputs (x: float32[2, 3, 4, 5], a: float32[4]): shapes '
        "[2, 3, 4, 5] and [4] do not broadcast: axis 3 is 5 in one and 4 in the other",
    ),
    "bounds of another type": (
        of_image("Clip", np.float64(0)),
        INVALID,
        'the model: node "a Clip" (Clip) with inputs (x: float32[2, 3, 4, 5], a: float64[]): input 0 is of type '
        "float32, but input 1 is of type float64; insert a Cast",
    ),
    "a data file, but no folder": (
        model(
            MATMUL,
            weights=[
                weight(
                    data_location=TensorProto.EXTERNAL,
                    external_data=[onnx.StringStringEntryProto(key="location", value="w.bin")],
                )
            ],
        ),
        INVALID,
        "the model: tensor `w` has its data in the file `w.bin`, but the model was loaded from bytes; load it from its "
        "path, name its folder, or provide the file's bytes",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    """InferenceSession and generate_artifacts both refuse the model, and no file is written."""
    proto, kind, sentence = MODELS[name]
    with pytest.raises(kind) as error:
        ortrain.InferenceSession(proto)
    assert str(error.value) == sentence
    with pytest.raises((kind, ortrain.InvalidArgumentError)):
        artifacts.generate_artifacts(proto, ["w"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_shorter_file(tmp_path: Path) -> None:
    """A file truncated at any byte is refused."""
    content = model(MATMUL, weights=[weight(float_data=[1] * 6)]).SerializeToString()
    for length in range(len(content)):
        with pytest.raises(ortrain.InvalidModelError):
            ortrain.InferenceSession(content[:length])


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            {"location": "w.bin", "offset": "10"},
            "should have 24 bytes at offset 10 of the file `w.bin`, which has only 30 bytes; was it copied or "
            "downloaded completely?",
        ),
        (
            {"location": "w.bin", "offset": "-4"},
            "has an invalid description of its external data: `offset` is `-4`, not a number",
        ),
        (
            {"location": "w.bin", "length": "20"},
            "should have 24 bytes by its dimensions and type, but external_data holds 20",
        ),
        ({"length": "24"}, "has an invalid description of its external data: it has no `location`"),
        (
            {"location": "link.bin"},
            "has its data in the file `link.bin`, which is refused: it is a link that leads out of the model's folder",
        ),
        ({"location": "pipe"}, "has its data in the file `pipe`, which is refused: it is not a regular file"),
        ({"location": "."}, "has its data in the file `.`, which is refused: it is not a regular file"),
        (
            {"location": "in/../../w.bin"},
            "has its data in the file `in/../../w.bin`, which is refused: it leads out of the model's folder by `..`",
        ),
    ],
)
def test_external_data(entries: dict[str, str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(30))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "w.bin").write_bytes(bytes(30))
    (folder / "link.bin").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    described = [onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()]
    tensor = weight(data_location=TensorProto.EXTERNAL, external_data=described)
    path = folder / "model.onnx"
    path.write_bytes(model(MATMUL, weights=[tensor]).SerializeToString())
    with pytest.raises(ortrain.InvalidModelError) as error:
        ortrain.InferenceSession(path)
    assert str(error.value) == f"the model {path}: tensor `w` {reason}"


TWO = [("x", FLOAT, ["n", 2]), ("s", INT64, [2])]
AT_RUN = "the model cannot run on inputs of these shapes: "


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize(
    ("op", "second", "sentence"),
    [
        (
            "Expand",
            [2**31, 2**31],
            f'{AT_RUN}node "a Expand" (Expand) with inputs (x: float32[1, 1], s: int64[2]): "y": a tensor of shape '
            "[2147483648, 2147483648] and type float32 is too large to address",
        ),
        (
            "Expand",
            [-1, 3],
            f'{AT_RUN}node "a Expand" (Expand) with inputs (x: float32[1, 1], s: int64[2]): a size '
            "must be at least 0, got -1",
        ),
        (
            "Reshape",
            [4, 5],
            f'{AT_RUN}node "a Reshape" (Reshape) with inputs (x: float32[1, 1], s: int64[2]): shape [1, 1] of 1 '
            "elements cannot be reshaped to 4x5",
        ),
        ("Gather", [0, 1], 'node "a Gather" (Gather): index 1 in row 1 is out of range for 1 entries (0 to 0)'),
        ("Gather", [0, -2], 'node "a Gather" (Gather): index -2 in row 1 is out of range for 1 entries (0 to 0)'),
    ],
)
def test_values_that_do_not_fit(op: str, second: list[int], sentence: str, backend: str) -> None:
    inputs = [("x", FLOAT, ["n", "m"]), ("s", INT64, [2])]
    session = ortrain.InferenceSession(model((op, ["x", "s"], ["y"]), inputs=inputs), providers=[backend])
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        session.run(None, {"x": X[:1, :1], "s": np.asarray(second)})
    assert str(error.value) == sentence
    # The session still accepts valid values.
    session.run(None, {"x": X[:1, :1], "s": np.asarray([0, 0] if op == "Gather" else [1, 1])})


@pytest.mark.parametrize(
    ("feeds", "kind", "sentence"),
    [
        ({"x": X}, ARGUMENT, 'no value was given for input "z"; values were given for "x"'),
        ({"x": X, "z": np.eye(3, dtype="f4"), "q": X}, ARGUMENT, 'the model has no input "q"; it has x, z'),
        (
            {"x": X, "z": np.eye(2, dtype="f4")},
            ARGUMENT,
            'input "z" must be float32[n, n], got float32[2, 2]: axis 0 is 2, but "n" is 3 in input "x"',
        ),
        (
            {"x": X, "z": np.ones((3, 2), np.float32)},
            ARGUMENT,
            'input "z" must be float32[n, n], got float32[3, 2]: axis 1 is 2, but "n" is 3 in input "x"',
        ),
        ({"x": np.asarray([[None, 1]]), "z": X}, UNSUPPORTED, "arrays of object are not supported"),
        ({"x": X.astype(complex), "z": X}, UNSUPPORTED, "arrays of complex128 are not supported"),
    ],
)
def test_feeds(feeds: dict[str, np.ndarray], kind: type[Exception], sentence: str) -> None:
    inputs = [("x", FLOAT, ["n", 2]), ("z", FLOAT, ["n", "n"])]
    session = ortrain.InferenceSession(model(RELU, inputs=inputs))
    with pytest.raises(kind) as error:
        session.run(None, feeds)
    assert str(error.value) == sentence


def test_arrays_of_any_layout() -> None:
    """Arrays of any byte order and strides are accepted and read correctly."""
    session = ortrain.InferenceSession(model(RELU))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for same in (x.astype(">f4"), np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x[::-1].copy()[::-1]):
        np.testing.assert_array_equal(session.run(None, {"x": same})[0], x)


def memory(run: Run, folder: Path) -> tuple[dict[str, np.ndarray], bytes]:
    """Return the gradients, and the checkpoint with all parameters, moments and the step."""
    gradients = {name: parameter.grad.copy() for name, parameter in run.state.parameters}
    CheckpointState.save_checkpoint(run.state, folder / "state", include_optimizer_state=True)
    return gradients, (folder / "state").read_bytes()


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("label", [5, -1, 2**40, -(2**63)])
def test_a_label_out_of_range(
    label: int, accumulating: bool, device: str, ours: Callable[[str], Path], tmp_path: Path
) -> None:
    """The state stays the same to the bit: parameters, gradients and moments, in training and in evaluation."""
    run = Run(ours("mlp_adamw_ce"), device=device)
    x, labels = np.ones((4, 10), np.float32), np.asarray([0, 1, 4, 2])
    for _ in range(2):
        run.module(x, labels)
        run.optimizer.step()
    if not accumulating:
        run.module.lazy_reset_grad()
    gradients, state = memory(run, tmp_path)
    wrong = np.asarray([0, 1, label, 2])
    sentence = (
        'node "onnx::SoftmaxCrossEntropyLoss::4" (SoftmaxCrossEntropyLoss): '
        f"label {label} in row 2 is not one of the 5 classes (0 to 4)"
    )
    for mode in (run.module.train, run.module.eval):
        mode()
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            run.module(x, wrong)
        assert str(error.value) == sentence
        same, still = memory(run, tmp_path)
        assert still == state
        for name, gradient in gradients.items():
            assert same[name].tobytes() == gradient.tobytes(), name


def test_an_index_out_of_range_in_training(tmp_path: Path) -> None:
    """Indices into a trained table are checked in the forward and the backward pass, before anything is written."""
    w = Words(17)
    table = w.weight(np.ones((5, 3), np.float32), "table")
    scores = w.node("Gather", [table, "rows"])
    proto = w.model(w.graph({"rows": (np.int64, ["n"])}, {scores: np.float32}))
    artifacts.generate_artifacts(proto, ["table"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    target = np.zeros((2, 3), np.float32)
    module(np.asarray([0, -5]), target)
    gradient = state.parameters["table"].grad.copy()
    assert np.abs(gradient).sum(axis=1).nonzero()[0].tolist() == [0]
    for row in (5, -6):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            module(np.asarray([0, row]), target)
        assert (
            str(error.value) == f'node "Gather_0" (Gather): index {row} in row 1 is out of range for 5 entries (0 to 4)'
        )
        np.testing.assert_array_equal(state.parameters["table"].grad, gradient)


@pytest.mark.parametrize("backend", DEVICES)
def test_empty_batch(backend: str) -> None:
    """No rows in, no rows out."""
    value = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    session = ortrain.InferenceSession(model(MATMUL, weights=[value]), providers=[backend])
    (y,) = session.run(None, {"x": X[:0]})
    assert y.shape == (0, 3)


# Networks with means over rows as losses. At opsets 11 and 17 their gradients consist of different operators.
@pytest.mark.parametrize("opset", [7, 11, 17])
@pytest.mark.parametrize("network", ["perceptron", "middle_softmax", "heads", "branches", "convolved", "transposed"])
def test_empty_batch_in_training(network: str, opset: int, tmp_path: Path) -> None:
    """The mean over nothing is NaN, and every gradient is zero."""
    made = write_artifacts(tmp_path, network, "MSELoss", opset, "batch")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert np.isnan(module(*[made.feeds[name][:0] for name in module.input_names()]))
    for name, parameter in state.parameters:
        assert not parameter.grad.any(), name
    assert np.isfinite(module(*[made.feeds[name] for name in module.input_names()]))
