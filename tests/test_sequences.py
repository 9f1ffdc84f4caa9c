"""Sequences with statically known lengths and positions: the same as onnxruntime, and trained like Split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import DEVICES
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.random.default_rng(1).standard_normal((7, 4), np.float32)
# Tolerance of central differences in float32: losses around 1, steps of 1e-2.
DIFFERENCES = 2e-3


def node(op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), f"{op}_{outputs[0]}", **attributes)


def constant(name: str, value: Any) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))


def untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def model(
    *nodes: NodeProto,
    opset: int = 18,
    rows: int | str = "n",
    weights: dict[str, np.ndarray] | None = None,
    inputs: Sequence[onnx.ValueInfoProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> ModelProto:
    """Return a model from x, float32[rows, 4], to y."""
    declare = helper.make_tensor_value_info
    initializers = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(
        nodes, "graph", [declare("x", FLOAT, [rows, 4]), *inputs], [declare("y", FLOAT, None)], initializers
    )
    opsets = [helper.make_opsetid("", opset)]
    if functions:
        opsets.append(helper.make_opsetid("own", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def split_nodes(*lengths: Any, at: int = 0, axis: int = 1, **attributes: Any) -> list[NodeProto]:
    """Return nodes that split x by lengths and take position `at`."""
    return [
        *(constant("lengths", length) for length in lengths),
        constant("at", at),
        node("SplitToSequence", ["x", *("lengths" for _ in lengths)], "parts", axis=axis, **attributes),
        node("SequenceAt", ["parts", "at"], "y"),
    ]


LISTS: dict[str, list[NodeProto]] = {
    "sizes": split_nodes([1, 3], at=1),
    "sizes, from the end": split_nodes([1, 1, 2], at=-3, axis=-1),
    "one size": split_nodes([4]),
    "sizes without keepdims, which says nothing then": split_nodes([2, 2], keepdims=0),
    "sizes of 32 bits": split_nodes(np.array([1, 3], np.int32)),
    "each of two": split_nodes(2, at=1),
    "each of three, the rest last": split_nodes(3, at=-1),
    "single columns": split_nodes(at=2),
    "single columns without their axis": split_nodes(at=-4, keepdims=0),
    "sizes and position from shapes": [
        node("Shape", ["x"], "columns", start=1),
        constant("two", [2]),
        constant("three", [3]),
        node("Div", ["columns", "two"], "half"),
        node("Squeeze", ["half"], "each"),
        node("Sub", ["columns", "three"], "one"),
        node("Squeeze", ["one"], "at"),
        node("SplitToSequence", ["x", "each"], "parts", axis=1),
        node("Identity", ["parts"], "same"),
        node("SequenceAt", ["same", "at"], "y"),
    ],
    "concatenated": [*split_nodes([1, 3], at=1)[:-1], node("ConcatFromSequence", ["parts"], "y", axis=1)],
    "stacked": [
        node("Neg", ["x"], "minus"),
        node("SequenceConstruct", ["x", "minus"], "list"),
        node("ConcatFromSequence", ["list"], "y", axis=-1, new_axis=1),
    ],
    "put in and taken out": [
        node("Neg", ["x"], "minus"),
        node("Abs", ["x"], "size"),
        node("SequenceConstruct", ["x", "minus"], "list"),
        constant("end", 2),
        constant("second", -2),
        node("SequenceInsert", ["list", "size", "end"], "three"),
        node("SequenceInsert", ["three", "size", "second"], "four"),
        node("SequenceErase", ["four"], "last_gone"),
        node("ConcatFromSequence", ["last_gone"], "y", axis=0),
    ],
    "counted": [
        node("SequenceEmpty", [], "empty"),
        node("SequenceInsert", ["empty", "x"], "one"),
        node("SequenceLength", ["one"], "length"),
        node("Cast", ["length"], "y", to=FLOAT),
    ],
}


def assert_like_onnxruntime(proto: ModelProto, backend: str, **feeds: np.ndarray) -> None:
    theirs = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = ortrain.InferenceSession(proto, providers=[backend])
    for got, want in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("opset", [13, 18, 23])
@pytest.mark.parametrize("name", LISTS)
def test_like_onnxruntime(name: str, opset: int, backend: str) -> None:
    if "Shape" in {made.op_type for made in LISTS[name]} and opset < 15:
        opset = 15
    assert_like_onnxruntime(model(*LISTS[name], opset=opset), backend, x=X)


@pytest.mark.parametrize("backend", DEVICES)
def test_rows_are_split_where_their_number_is_declared(backend: str) -> None:
    assert_like_onnxruntime(model(*split_nodes(3, at=-1, axis=0), rows=7), backend, x=X)


@pytest.mark.parametrize("backend", DEVICES)
def test_branches_read_an_outer_sequence(backend: str) -> None:
    def branch(at: int) -> onnx.GraphProto:
        nodes = [constant(f"at{at}", at), node("SequenceAt", ["parts", f"at{at}"], f"z{at}")]
        return helper.make_graph(nodes, "branch", [], [untyped(f"z{at}")])

    chosen = node("If", ["c"], "y", then_branch=branch(0), else_branch=branch(-1))
    inputs = [helper.make_tensor_value_info("c", BOOL, [])]
    proto = model(*split_nodes(2)[:1], *split_nodes(2)[2:-1], chosen, inputs=inputs)
    for holds in (True, False):
        assert_like_onnxruntime(proto, backend, x=X, c=np.array(holds))


@pytest.mark.parametrize("backend", DEVICES)
def test_functions_and_loop_bodies_split_their_inputs(backend: str) -> None:
    halves = [constant("each", 2), constant("first", 0), constant("last", -1)]
    halves += [node("SplitToSequence", ["v", "each"], "parts", axis=-1), node("SequenceAt", ["parts", "first"], "a")]
    halves += [node("SequenceAt", ["parts", "last"], "b"), node("SequenceConstruct", ["b", "a"], "turned")]
    halves += [node("ConcatFromSequence", ["turned"], "w", axis=-1)]
    function = helper.make_function("own", "Turn", ["v"], ["w"], halves, [helper.make_opsetid("", 18)])
    called = helper.make_node("Turn", ["x"], ["y"], domain="own")
    assert_like_onnxruntime(model(called, functions=[function]), backend, x=X)

    declare = helper.make_tensor_value_info
    body = helper.make_graph(
        [*halves, node("Identity", ["on"], "still")],
        "body",
        [declare("i", INT64, []), declare("on", BOOL, []), declare("v", FLOAT, None)],
        [declare("still", BOOL, []), declare("w", FLOAT, None)],
    )
    repeated = node("Loop", ["times", "", "x"], "y", body=body)
    assert_like_onnxruntime(model(constant("times", 3), repeated), backend, x=X)


def gated(*, sequences: bool) -> ModelProto:
    """Return a linear layer; one half of its results gates the other half."""
    both = ["left", "right"]
    if sequences:
        split = [constant("each", 3), node("SplitToSequence", ["wide", "each"], "parts", axis=-1)]
        for k, name in enumerate(both):
            split += [constant(f"at{k}", k), node("SequenceAt", ["parts", f"at{k}"], name)]
        together = [node("SequenceConstruct", ["product", "left"], "list")]
        together += [node("ConcatFromSequence", ["list"], "y", axis=-1)]
    else:
        split = [constant("lengths", [3, 3]), node("Split", ["wide", "lengths"], *both, axis=-1)]
        together = [node("Concat", ["product", "left"], "y", axis=-1)]
    weights = {"w": np.random.default_rng(2).standard_normal((4, 6), np.float32) / 2}
    product = [node("Sigmoid", ["right"], "gate"), node("Mul", ["left", "gate"], "product")]
    return model(node("MatMul", ["x", "w"], "wide"), *split, *product, *together, weights=weights)


@pytest.mark.parametrize("device", DEVICES)
def test_trains_like_split(device: str, tmp_path: Path) -> None:
    """Losses and gradients equal Split's bit by bit, the gradient is the slope of the loss, and the export runs."""
    target = np.zeros((7, 6), np.float32)
    losses: dict[bool, list[float]] = {}
    gradients = {}
    for sequences in (True, False):
        folder = tmp_path / str(sequences)
        folder.mkdir()
        artifacts.generate_artifacts(
            gated(sequences=sequences),
            requires_grad=["w"],
            loss=artifacts.LossType.MSELoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", device=device)
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        losses[sequences] = []
        for step in range(5):
            losses[sequences].append(float(module(X, target)))
            if step == 0:
                gradients[sequences] = np.array(state.parameters["w"].grad)
            optimizer.step()
            module.lazy_reset_grad()
        assert np.all(np.diff(losses[sequences]) < 0)
        if sequences:
            module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
            assert_close_to_onnxruntime(folder / "trained.onnx")
    assert losses[True] == losses[False]
    np.testing.assert_array_equal(gradients[True], gradients[False])

    proto = gated(sequences=True)
    (w,) = (numpy_helper.to_array(tensor) for tensor in proto.graph.initializer)
    direction = np.random.default_rng(3).standard_normal(w.shape).astype(np.float32)

    def loss(step: float) -> float:
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w + np.float32(step) * direction, "w"))
        theirs = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return float(np.mean(theirs.run(None, {"x": X})[0].astype(np.float64) ** 2))

    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert abs(slope - float(np.sum(gradients[True] * direction))) <= DIFFERENCES * max(1.0, abs(slope))


def assert_close_to_onnxruntime(path: Path) -> None:
    theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,), (want,) = ortrain.InferenceSession(path).run(None, {"x": X}), theirs.run(None, {"x": X})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_pieces_of_one(keepdims: int, tmp_path: Path) -> None:
    """Splits with the scalar 1 remove the axis without ``keepdims``, as onnxruntime and PyTorch's ``unbind`` do."""
    nodes = [
        node("MatMul", ["x", "w"], "wide"),
        constant("one", 1),
        node("SplitToSequence", ["wide", "one"], "parts", axis=1, keepdims=keepdims),
        constant("at", 2),
        node("SequenceAt", ["parts", "at"], "part"),
        node("Mul", ["part", "part"], "y"),
    ]
    weights = {"w": np.random.default_rng(2).standard_normal((4, 6), np.float32)}
    proto = model(*nodes, weights=weights)
    theirs = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = theirs.run(None, {"x": X})
    assert want.shape == ((7, 1) if keepdims else (7,))
    (got,) = ortrain.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, strict=True)
    artifacts.generate_artifacts(proto, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    Module(tmp_path / "training_model.onnx", state)(X, np.zeros_like(want))
    gradient = np.zeros((4, 6), np.float32)
    column = X @ weights["w"][:, 2]
    gradient[:, 2] = X.T @ (4 * column**3) / len(column)
    np.testing.assert_allclose(state.parameters["w"].grad, gradient, rtol=1e-4, atol=1e-4)
    declared = {value.name for value in onnx.load(tmp_path / "eval_model.onnx").graph.value_info}
    assert not declared & {"wide", "part", "parts"}


KNOWN = "a sequence is supported only if its length and positions are known before the model runs"
REFUSED: dict[str, tuple[ModelProto, str]] = {
    "a position as an input": (
        model(
            *split_nodes([1, 3])[:-1],
            node("SequenceAt", ["parts", "k"], "y"),
            inputs=[helper.make_tensor_value_info("k", INT64, [])],
        ),
        f'the model: node "SequenceAt_y" (SequenceAt) with inputs (parts: ?, k: int64[]): its position, "k", is not '
        f"constant; {KNOWN}",
    ),
    "rows of open number": (
        model(*split_nodes(3, axis=0)),
        'the model: node "SplitToSequence_parts" (SplitToSequence) with inputs (x: float32[n, 4], lengths: int64[]): '
        'the number of parts of "x" depends on the size of axis 0, which is not known before the model runs; declare '
        "the size, or make the sizes of the parts a constant vector",
    ),
    "a list that is an output": (
        model(node("SequenceConstruct", ["x", "x"], "y")),
        'the model: node "SequenceConstruct_y" (SequenceConstruct) with inputs (x: float32[n, 4], x: float32[n, 4]): '
        'its result "y", a sequence, is an output; make each of its tensors an output',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_unsupported_sequences(name: str, tmp_path: Path) -> None:
    proto, sentence = REFUSED[name]
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(proto)
    assert str(refused.value) == sentence
    with pytest.raises(ortrain.UnsupportedError) as refused:
        artifacts.generate_artifacts(proto, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    assert str(refused.value) == sentence
    assert sentence.removeprefix("the model: ") in str(ortrain.inspect(proto))


def test_training_model_omits_a_sequence_output(tmp_path: Path) -> None:
    """The training model omits an output that ortrain cannot compute and the loss does not use. The export keeps it."""
    proto = gated(sequences=True)
    proto.graph.node.extend([node("SplitToSequence", ["y"], "rows", axis=0)])
    proto.graph.output.extend([helper.make_tensor_sequence_value_info("rows", FLOAT, None)])
    artifacts.generate_artifacts(
        proto,
        requires_grad=["w"],
        loss=artifacts.LossType.MSELoss,
        loss_input_names=["y"],
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert float(module(X, np.zeros((7, 6), np.float32))) > 0
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y", "rows"])
    theirs = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    y, rows = theirs.run(None, {"x": X})
    np.testing.assert_array_equal(np.concatenate(rows), y)
