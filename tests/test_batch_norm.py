"""BatchNormalization, from the forward model to the export: which statistics are used, where they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FEATURES, HIDDEN, CLASSES, ROWS = 6, 4, 3, 8
MOMENTUM, EPSILON = 0.75, 1e-3
STATISTICS = ("bn.mean", "bn.var")
TRAINED = ("w1", "bn.scale", "bn.bias", "w2")
# Rounding of a few operations in float32 on numbers of magnitude 1.
ROUNDING = 2e-6


def forward(*, opset: int = 17, training: bool = False) -> ModelProto:
    """Return a model of two matrix products with a normalization between them."""
    rng = np.random.default_rng(3)
    weights = {
        "w1": rng.standard_normal((FEATURES, HIDDEN)),
        "bn.scale": rng.uniform(0.5, 1.5, HIDDEN),
        "bn.bias": rng.standard_normal(HIDDEN),
        "bn.mean": rng.standard_normal(HIDDEN),
        "bn.var": rng.uniform(0.5, 1.5, HIDDEN),
        "w2": rng.standard_normal((HIDDEN, CLASSES)),
    }
    outputs, attributes = ["normal"], {"momentum": MOMENTUM, "epsilon": EPSILON}
    if training:
        # The form in which exporters write a model in training mode.
        outputs += ["new_mean", "new_var"] if opset >= 14 else ["new_mean", "new_var", "saved_mean", "saved_var"]
        attributes |= {"training_mode": 1} if opset >= 14 else {}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["hidden"], "first"),
        helper.make_node(
            "BatchNormalization", ["hidden", "bn.scale", "bn.bias", *STATISTICS], outputs, "bn", **attributes
        ),
        helper.make_node("Relu", ["normal"], ["active"], "relu"),
        helper.make_node("MatMul", ["active", "w2"], ["scores"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def make(folder: Path, model: ModelProto, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "requires_grad": TRAINED,
        "loss": artifacts.LossType.CrossEntropyLoss,
        "optimizer": artifacts.OptimType.AdamW,
        "artifact_directory": folder,
    }
    artifacts.generate_artifacts(model, **(arguments | changes))
    return folder


class Run:
    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx", **arguments)
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)

    def step(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        self.module.train()
        loss = float(self.module(*batch))
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return loss

    def evaluate(self, batch: tuple[np.ndarray, np.ndarray]) -> float:
        self.module.eval()
        return float(self.module(*batch))


def batch(seed: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, rows)


def loss_of(scores: np.ndarray, labels: np.ndarray) -> float:
    wide = scores.astype(np.float64)
    picked = wide[np.arange(len(labels)), labels]
    return float(np.mean(np.log(np.exp(wide).sum(axis=1)) - picked))


def scores_of(x: np.ndarray, p: dict[str, np.ndarray], mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    hidden = x.astype(np.float64) @ p["w1"]
    normal = (hidden - mean) / np.sqrt(var + EPSILON) * p["bn.scale"] + p["bn.bias"]
    return np.asarray(np.maximum(normal, 0) @ p["w2"])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_statistics_follow_numpy(device: str, tmp_path: Path) -> None:
    """The loss in training uses the statistics of the batch, the loss in evaluation the running ones."""
    run = Run(make(tmp_path, forward()), device=device)
    views = {name: run.state.parameters[name].data for name in STATISTICS}
    mean, var = (views[name].astype(np.float64) for name in STATISTICS)
    for seed in range(4):
        x, labels = batch(seed)
        parameters = {name: p.data.astype(np.float64) for name, p in run.state.parameters}
        hidden = x.astype(np.float64) @ parameters["w1"]
        now = hidden.mean(axis=0), hidden.var(axis=0)
        expected = loss_of(scores_of(x, parameters, *now), labels)
        np.testing.assert_allclose(run.step((x, labels)), expected, rtol=ROUNDING)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * now[0]
        var = MOMENTUM * var + (1 - MOMENTUM) * now[1]
        # The views show the new values.
        np.testing.assert_allclose(views["bn.mean"], mean, rtol=ROUNDING, atol=ROUNDING)
        np.testing.assert_allclose(views["bn.var"], var, rtol=ROUNDING, atol=ROUNDING)
        parameters = {name: p.data.astype(np.float64) for name, p in run.state.parameters}
        expected = loss_of(scores_of(x, parameters, mean, var), labels)
        np.testing.assert_allclose(run.evaluate((x, labels)), expected, rtol=ROUNDING)


def test_statistics_are_frozen_parameters(tmp_path: Path) -> None:
    state = Run(make(tmp_path, forward())).state
    assert {name for name, p in state.parameters if not p.requires_grad} == set(STATISTICS)
    parameter = state.parameters["bn.mean"]
    assert parameter.grad is None
    with pytest.raises(ValueError, match="read-only"):
        parameter.data[0] = 1
    parameter.data = np.full(HIDDEN, 2, np.float32)
    np.testing.assert_array_equal(state.parameters["bn.mean"].data, np.full(HIDDEN, 2))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("opset", [12, 13, 14, 15, 17])
def test_eval_model_and_export_in_onnxruntime(opset: int, training: bool, tmp_path: Path) -> None:
    """onnxruntime loads them and gives the same results, also for a model that was exported in training mode."""
    run = Run(make(tmp_path, forward(opset=opset, training=training)))
    for seed in range(3):
        run.step(batch(seed))
    x, labels = batch(9)
    evaluated = run.evaluate((x, labels))
    onnx.checker.check_model(onnx.load(tmp_path / "eval_model.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "eval_model.onnx", providers=["CPUExecutionProvider"])
    feeds = {name: parameter.data for name, parameter in run.state.parameters} | {"x": x, "labels": labels}
    np.testing.assert_allclose(session.run(None, feeds)[0], evaluated, rtol=ROUNDING)
    path = tmp_path / "inference.onnx"
    run.module.export_model_for_inferencing(path, ["scores"])
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    scores = session.run(None, {"x": x})[0]
    np.testing.assert_allclose(loss_of(scores, labels), evaluated, rtol=ROUNDING)
    np.testing.assert_allclose(ortrain.InferenceSession(path).run(None, {"x": x})[0], scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_frozen(training: bool, tmp_path: Path) -> None:
    """The stored statistics are used and do not change: training and evaluation give the same loss."""
    for name, changes in (("freeze", {"batch_norm": "freeze"}), ("auto", {"requires_grad": ["w1", "w2"]})):
        folder = tmp_path / name
        folder.mkdir()
        run = Run(make(folder, forward(training=training), frozen_params=STATISTICS, **changes))
        before = {name: run.state.parameters[name].data.copy() for name in STATISTICS}
        expected = run.evaluate(batch(1))
        assert run.step(batch(1)) == expected
        for name in STATISTICS:
            np.testing.assert_array_equal(run.state.parameters[name].data, before[name])


def test_trained_everywhere(tmp_path: Path) -> None:
    run = Run(make(tmp_path, forward(), requires_grad=["w2"], batch_norm="train"))
    before = run.state.parameters["bn.mean"].data.copy()
    run.step(batch(1))
    assert (run.state.parameters["bn.mean"].data != before).all()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match='there is no batch_norm "frozen"'):
        make(tmp_path, forward(), batch_norm="frozen")
    with pytest.raises(ortrain.InvalidModelError, match=r'"bn\.mean" cannot be trained by gradients'):
        make(tmp_path, forward(), requires_grad=["w2", "bn.mean"])
    assert not list(tmp_path.iterdir())


def test_failed_step_keeps_statistics(tmp_path: Path) -> None:
    run = Run(make(tmp_path, forward()))
    before = [run.state.parameters[name].data.copy() for name in STATISTICS]
    x, labels = batch(1)
    with pytest.raises(ortrain.InvalidArgumentError):
        run.module(x, np.full_like(labels, CLASSES))
    empty = batch(1, rows=0)
    assert np.isnan(run.module(*empty))
    for name, values in zip(STATISTICS, before, strict=True):
        np.testing.assert_array_equal(run.state.parameters[name].data, values)


def with_nodes(
    before: list[Any], bn: list[str], weights: dict[str, np.ndarray], after: list[Any] | None = None
) -> ModelProto:
    """Return a model that computes `scores = BatchNormalization(bn) w2` after the nodes in `before`."""
    nodes = [
        *before,
        helper.make_node("BatchNormalization", bn, ["normal"], "bn", momentum=MOMENTUM, epsilon=EPSILON),
        *(after or [helper.make_node("MatMul", ["normal", "w2"], ["scores"], "second")]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            numpy_helper.from_array(value if value.dtype == np.int64 else value.astype(np.float32), name)
            for name, value in weights.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def some(*dims: int) -> np.ndarray:
    return np.random.default_rng(sum(dims)).standard_normal(dims)


def test_ones_like_something_trained_are_not_trained(tmp_path: Path) -> None:
    """PyTorch's new exporter writes `affine=False` like this: running statistics are used, and do not change."""
    like = [
        helper.make_node("MatMul", ["x", "w1"], ["hidden"], "first"),
        helper.make_node("Shape", ["hidden"], ["columns"], start=1, end=2),
    ]
    for name, value in (("ones", "one"), ("zeros", "zero")):
        like.append(helper.make_node("CastLike", [value, "hidden"], [f"{name}_like"]))
        like.append(helper.make_node("Expand", [f"{name}_like", "columns"], [name]))
    mean, var = some(HIDDEN), np.random.default_rng(1).uniform(0.5, 1.5, HIDDEN)
    weights = {"w1": some(FEATURES, HIDDEN), "w2": some(HIDDEN, CLASSES), "mean": mean, "var": var}
    weights |= {"one": np.float32(1), "zero": np.float32(0)}
    model = with_nodes(like, ["hidden", "ones", "zeros", "mean", "var"], {k: np.asarray(v) for k, v in weights.items()})
    run = Run(make(tmp_path, model, requires_grad=["w1", "w2"]))
    x, labels = batch(1)
    scores = (x @ weights["w1"] - mean) / np.sqrt(var + EPSILON) @ weights["w2"]
    np.testing.assert_allclose(run.step((x, labels)), loss_of(scores, labels), rtol=ROUNDING)
    assert {name for name, _ in run.state.parameters} == {"w1", "w2"}


@pytest.mark.parametrize("trained", [["gain", "w1", "w2"], ["gain", "w2"]], ids=["trained", "frozen"])
def test_standardized_weights(trained: list[str], tmp_path: Path) -> None:
    """A weight normalized by its own statistics (`F.batch_norm`): its gradient flows through the statistics."""
    rows = [
        helper.make_node("Transpose", ["w1"], ["rows"], perm=[1, 0]),
        helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("ReduceMean", ["rows"], ["column"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["rows", "column"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["var"], axes=[1], keepdims=0),
    ]
    after = [
        helper.make_node("MatMul", ["x", "normal"], ["hidden"], "first"),
        helper.make_node("MatMul", ["hidden", "w2"], ["scores"], "second"),
    ]
    weights = {
        "w1": some(FEATURES, HIDDEN),
        "w2": some(HIDDEN, CLASSES),
        "gain": some(HIDDEN),
        "zeros": np.zeros(HIDDEN),
    }
    model = with_nodes(rows, ["w1", "gain", "zeros", "mean", "var"], weights, after)
    run = Run(make(tmp_path, model, requires_grad=trained))
    assert {name for name, _ in run.state.parameters} == set(trained)
    data = x, labels = batch(1)

    def loss(changed: dict[str, np.ndarray]) -> float:
        p = {name: value.astype(np.float32).astype(np.float64) for name, value in weights.items()} | changed
        normal = (p["w1"] - p["w1"].mean(0)) / np.sqrt(p["w1"].var(0) + EPSILON) * p["gain"]
        return loss_of(x @ normal @ p["w2"], labels)

    run.module.train()
    np.testing.assert_allclose(float(run.module(*data)), loss({}), rtol=ROUNDING)
    for name in trained:
        value = weights[name].astype(np.float32).astype(np.float64)
        along = some(*value.shape)
        slope = (loss({name: value + 1e-5 * along}) - loss({name: value - 1e-5 * along})) / 2e-5
        got = float((run.state.parameters[name].grad * along).sum())
        assert got == pytest.approx(slope, rel=1e-4, abs=1e-5), name
