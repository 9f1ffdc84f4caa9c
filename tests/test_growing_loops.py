"""Loops that carry values of changing shape, as appending decoders do: against onnxruntime, and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import DEVICES
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((3, 2, 4), np.float32)
WEIGHTS = {"w": RANDOM.standard_normal((4, 4), np.float32), "head": RANDOM.standard_normal((4, 3), np.float32)}
LABELS = np.array([0, 2, 1])
# Rounding of sums in another order, in float32.
CLOSE = 1e-5
# Tolerance of central differences in float32: of losses around 1, with steps of 1e-2.
DIFFERENCES = 2e-3


def decoder(*, by_value: bool = False, forever: bool = False) -> ModelProto:
    """Return a model from x, float32[b, 2, 4], and a count to scores, float32[b, 3].

    Each iteration appends a row to x, computed from all present rows. With ``by_value`` a condition ends the loop.
    """
    declare, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("MatMul", ["rows", "w"], ["keys"]),
        node("Gather", ["rows", "newest"], ["row"], axis=1),
        node("Transpose", ["keys"], ["turned"], perm=[0, 2, 1]),
        node("MatMul", ["row", "turned"], ["scores"]),
        node("Softmax", ["scores"], ["shares"], axis=-1),
        node("MatMul", ["shares", "keys"], ["mixed"]),
        node("Tanh", ["mixed"], ["made"]),
        node("Concat", ["rows", "made"], ["rows_next"], axis=1),
        node("ReduceMean", ["made"], ["energy"], keepdims=0),
    ]
    if by_value:
        nodes.append(node("Less", ["i", "most"], ["go_next"]))
    else:
        nodes.append(node("Identity", ["go"], ["go_next"]))
    body = helper.make_graph(
        nodes,
        "body",
        [declare("i", INT64, []), declare("go", BOOL, []), declare("rows", FLOAT, ["b", None, 4])],
        [declare("go_next", BOOL, []), declare("rows_next", FLOAT, ["b", None, 4]), declare("energy", FLOAT, [])],
    )
    initializers = [numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()]
    initializers += [
        numpy_helper.from_array(np.array(value), name) for name, value in (("newest", [-1]), ("most", 4), ("axis", [1]))
    ]
    graph = helper.make_graph(
        [
            node("Loop", ["" if forever else "count", "", "x"], ["all", "energies"], "decode", body=body),
            node("MatMul", ["all", "head"], ["each"]),
            node("ReduceMean", ["each", "axis"], ["mean"], keepdims=0),
            node("ReduceSum", ["energies"], ["energy_sum"], keepdims=0),
            node("Add", ["mean", "energy_sum"], ["y"]),
        ],
        "graph",
        [declare("x", FLOAT, ["b", 2, 4]), declare("count", INT64, [])],
        [declare("y", FLOAT, ["b", 3])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def trained(model: ModelProto, folder: Path, **options: Any) -> tuple[CheckpointState, Module, Optimizer]:
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **options)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def loss_of_onnxruntime(model: ModelProto, count: int) -> float:
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    scores = theirs.run(None, {"x": X, "count": np.array(count)})[0].astype(np.float64)
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(LABELS)), LABELS]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_value", [False, True])
def test_a_decoder_trains(by_value: bool, device: str, tmp_path: Path) -> None:
    """Losses equal onnxruntime's and gradients their slopes, for any number of iterations; training lowers losses."""
    model = decoder(by_value=by_value)
    assert not ortrain.inspect(model).obstacles
    state, module, optimizer = trained(model, tmp_path, device=device)
    for count in (0, 1, 3, 9):
        module.lazy_reset_grad()
        loss = float(module(X, np.array(count), LABELS))
        assert abs(loss - loss_of_onnxruntime(model, count)) <= CLOSE
        for k, name in enumerate(WEIGHTS):
            direction = np.random.default_rng(count).standard_normal(WEIGHTS[name].shape).astype(np.float32)
            losses = []
            for sign in (1, -1):
                changed = ModelProto()
                changed.CopyFrom(model)
                moved = WEIGHTS[name] + np.float32(sign * 1e-2) * direction
                changed.graph.initializer[k].CopyFrom(numpy_helper.from_array(moved, name))
                losses.append(loss_of_onnxruntime(changed, count))
            slope = (losses[0] - losses[1]) / 2e-2
            gradient = state.parameters[name].grad
            assert gradient is not None
            assert abs(slope - float(np.sum(gradient * direction))) <= DIFFERENCES * max(1.0, abs(slope)), (count, name)
    losses = []
    for _ in range(5):
        module.lazy_reset_grad()
        losses.append(float(module(X, np.array(6), LABELS)))
        optimizer.step()
    assert np.all(np.diff(losses) < 0)


def test_iterations_without_end(tmp_path: Path) -> None:
    """An endless loop stops at the iteration limit, in a training step as in a run."""
    model = decoder(forever=True)
    assert not ortrain.inspect(model).obstacles
    options = ortrain.SessionOptions()
    options.iteration_limit = 50
    state, module, _ = trained(model, tmp_path, session_options=options)
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    with pytest.raises(ortrain.OrtrainError) as error:
        module(X, np.array(0), LABELS)
    for part in ('"decode" (Loop)', "after 50 iterations", "iteration_limit"):
        assert part in str(error.value)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])


def test_the_trained_model_runs_in_onnxruntime(tmp_path: Path) -> None:
    _, module, optimizer = trained(decoder(), tmp_path)
    module(X, np.array(4), LABELS)
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    inputs = {"x": X, "count": np.array(7)}
    theirs = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (got,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, inputs)
    np.testing.assert_allclose(got, theirs.run(None, inputs)[0], rtol=CLOSE, atol=CLOSE)
    onnx.checker.check_model(onnx.load(tmp_path / "training_model.onnx"))


ELEMENTWISE = """
<ir_version: 8, opset_import: ["" : 17]>
net (INPUT, int64 count) => (float[b, 3] y)
<int64[1] axis = {1}, int64[3] shape = {0, -1, 4}, int64[3] row_shape = {-1, 1, 4}>
{
    PREPARE
    scaled = Mul (x, w)
    all = Loop (count, "", scaled) <body = append (int64 i, bool go, float[b, m, 4] rows)
        => (bool go_next, float[b, n, 4] rows_next) {
        weighted = Mul (rows, w)
        sum = ReduceSum (weighted, axis)
        tanh = Tanh (sum)
        row = Reshape (tanh, row_shape)
        rows_next = Concat <axis = 1> (rows, row)
        go_next = Identity (go)
    }>
    known = Reshape (all, shape)
    each = MatMul (known, head)
    y = ReduceMean <axes = [1], keepdims = 0> (each)
}
"""


def elementwise(declaration: str, prepare: str) -> ModelProto:
    model = onnx.parser.parse_model(ELEMENTWISE.replace("INPUT", declaration).replace("PREPARE", prepare))
    for name, value in (("w", WEIGHTS["w"][0]), ("head", WEIGHTS["head"])):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def test_carried_value_of_unknown_rank(tmp_path: Path) -> None:
    """A Squeeze without axes has an unknown rank; losses and gradients equal the loop of known rank."""
    models = [
        elementwise("float[b, 2, 4] x", ""),
        elementwise("float[b, 1, 2, 4] image", "x = Squeeze (image)"),
    ]
    gradients, losses = [], []
    for model, x in zip(models, (X, X[:, None]), strict=True):
        state, module, _ = trained(model, tmp_path)
        losses.append(float(module(x, np.array(3), LABELS)))
        gradients.append({name: parameter.grad for name, parameter in state.parameters})
    assert abs(losses[0] - losses[1]) <= CLOSE
    assert gradients[0].keys() == {"w", "head"}
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=CLOSE, atol=CLOSE)
