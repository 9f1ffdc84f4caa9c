"""Choice of the loss by model and targets, and its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fit_models import language_model, net, rows, two_ways

import ortrain
from ortrain import artifacts


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scores_of(model: bytes, x: Any, name: str = "y") -> Any:
    return ortrain.InferenceSession(model).run([name], {"x": x})[0].astype(np.float64)


@pytest.mark.parametrize("end", [None, "Softmax", "LogSoftmax"])
@pytest.mark.parametrize("form", ["indices", "column", "one-hot", "floats", "texts"])
def test_cross_entropy(end: str | None, form: str) -> None:
    x, labels = rows()
    targets: Any = {
        "indices": labels,
        "column": labels[:, None].astype(np.int32),
        "one-hot": np.eye(3, dtype=np.float32)[labels],
        "floats": labels.astype(np.float64),
        "texts": np.array(["ant", "bee", "cat"])[labels],
    }[form]
    model = ortrain.Model(net(3, end), metrics=["accuracy"])
    loss, accuracy = model.evaluate(x, targets)
    p = softmax(scores_of(net(3), x))
    assert loss == pytest.approx(-np.log(p[np.arange(40), labels]).mean(), rel=1e-5)
    assert accuracy == pytest.approx((p.argmax(1) == labels).mean())
    assert "cross-entropy of 'y', because" in model.summary()
    if form == "texts":
        assert model.class_names == ["ant", "bee", "cat"]


@pytest.mark.parametrize("end", [None, "Sigmoid"])
def test_binary_cross_entropy(end: str | None) -> None:
    x, labels = rows()
    hot = (np.eye(3)[labels] + np.eye(3)[0]).clip(0, 1)
    p = 1 / (1 + np.exp(-scores_of(net(3), x)))
    expected = -(hot * np.log(p) + (1 - hot) * np.log(1 - p)).mean()
    assert ortrain.Model(net(3, end)).evaluate(x, hot.astype(np.int64)) == pytest.approx(expected, rel=1e-5)
    assert ortrain.Model(net(3, end), loss="bce").evaluate(x, hot) == pytest.approx(expected, rel=1e-5)
    # One score, two classes.
    p = 1 / (1 + np.exp(-scores_of(net(1), x)[:, 0]))
    t = (labels > 0).astype(np.int64)
    expected = -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean()
    model = ortrain.Model(net(1, end), metrics=["accuracy"])
    assert model.evaluate(x, t) == pytest.approx([expected, ((p > 0.5) == t).mean()], rel=1e-5)


def test_binary_cross_entropy_is_finite_for_large_logits() -> None:
    x = np.full((4, 4), 1000, np.float32)
    model = ortrain.Model(net(2, "Sigmoid"), loss="bce", learning_rate=0.001)
    history = model.fit(x, np.array([[0, 1], [1, 0]] * 2))
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(parameter.data).all() for _, parameter in model.state.parameters)


def test_squared_and_absolute_error() -> None:
    x, labels = rows()
    y = labels * 0.5
    scores = scores_of(net(1), x)[:, 0]
    for target in (y, y[:, None], y.astype(np.float32)):
        assert ortrain.Model(net(1)).evaluate(x, target) == pytest.approx(((scores - y) ** 2).mean(), rel=1e-5)
    assert ortrain.Model(net(1), loss="mae").evaluate(x, y) == pytest.approx(np.abs(scores - y).mean(), rel=1e-5)
    assert ortrain.Model(net(1), loss=ortrain.LossType.L1Loss).evaluate(x, y) == pytest.approx(
        np.abs(scores - y).mean()
    )


def test_soft_labels() -> None:
    x, _ = rows()
    t = softmax(np.random.default_rng(1).standard_normal((40, 3)))
    expected = -(t * np.log(softmax(scores_of(net(3), x)))).sum(1).mean()
    model = ortrain.Model(net(3, "Softmax"))
    assert model.evaluate(x, t) == pytest.approx(expected, rel=1e-5)
    assert "cross-entropy of probabilities" in model.summary()


def test_tokens_that_are_ignored_do_not_count() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (6, 5))
    labels = rng.integers(0, 11, (6, 5))
    labels[rng.random((6, 5)) < 0.4] = -100
    logits = ortrain.InferenceSession(language_model()).run(None, {"ids": ids})[0].astype(np.float64)
    each = -np.log(np.take_along_axis(softmax(logits), labels.clip(0)[..., None], 2)[..., 0])
    expected = each[labels >= 0].mean()
    for size in (6, 4, 1):
        model = ortrain.Model(language_model(), metrics=["perplexity"])
        assert model.evaluate(ids, labels, batch_size=size) == pytest.approx([expected, np.exp(expected)], rel=1e-5)


def test_several_inputs_and_outputs() -> None:
    rng = np.random.default_rng(0)
    x = {"a": rng.standard_normal((20, 2)), "b": rng.standard_normal((20, 3))}
    y = {"label": rng.integers(0, 3, 20), "size": rng.standard_normal(20)}
    outputs = ortrain.InferenceSession(two_ways()).run(
        None, {name: value.astype(np.float32) for name, value in x.items()}
    )
    p = softmax(outputs[0].astype(np.float64))
    expected = -np.log(p[np.arange(20), y["label"]]).mean() + ((outputs[1][:, 0] - y["size"]) ** 2).mean()
    model = ortrain.Model(two_ways())
    assert model.evaluate(x, y) == pytest.approx(expected, rel=1e-5)
    assert model.evaluate([x["a"], x["b"]], y) == pytest.approx(expected, rel=1e-5)
    assert ortrain.Model(two_ways(), loss={"label": "cross_entropy", "size": "mse"}).evaluate(x, y) == pytest.approx(
        expected
    )
    # One target belongs to the output of its name; a target without a name to the first output.
    assert ortrain.Model(two_ways()).evaluate(x, {"size": y["size"]}) == pytest.approx(
        ((outputs[1][:, 0] - y["size"]) ** 2).mean()
    )
    history = ortrain.Model(two_ways(), metrics=["mae"], loss={"size": "mse"}).fit(x, {"size": y["size"]}, epochs=2)
    assert list(history) == ["loss", "mae"]
    predicted = model.predict(x)
    assert {name: value.shape for name, value in predicted.items()} == {"label": (20, 3), "size": (20, 1)}


def test_losses_with_settings() -> None:
    x, labels = rows()
    weight = np.array([1.0, 2.0, 5.0])
    loss = artifacts.Loss(artifacts.LossType.CrossEntropyLoss, weight=weight)
    p = softmax(scores_of(net(3), x))
    each = -np.log(p[np.arange(40), labels])
    expected = (each * weight[labels]).sum() / weight[labels].sum()
    # The loss of logits is computed before the softmax.
    assert ortrain.Model(net(3, "Softmax"), loss=loss).evaluate(x, labels, batch_size=40) == pytest.approx(
        expected, rel=1e-5
    )
    rows_weight = np.linspace(0.5, 2, 40)
    weighted = (each * weight[labels] * rows_weight).sum() / weight[labels].sum()
    found = ortrain.Model(net(3), loss=loss).evaluate(x, labels, batch_size=40, sample_weight=rows_weight)
    assert found == pytest.approx(weighted, rel=1e-5)
    # A block has its own targets.
    from ortrain import onnxblock

    block = onnxblock.loss.MSELoss()
    assert ortrain.Model(net(1), loss=block).evaluate(x, labels[:, None].astype(np.float32), batch_size=40) > 0


def test_a_model_with_its_own_loss() -> None:
    from onnx import ModelProto, helper

    proto = ModelProto.FromString(net(3))
    graph = proto.graph
    graph.input.append(helper.make_tensor_value_info("labels", 7, ["batch"]))
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["y", "labels"], ["loss"]))
    graph.output.insert(0, helper.make_tensor_value_info("loss", 1, []))
    x, labels = rows()
    model = ortrain.Model(proto, learning_rate=0.05)
    history = model.fit({"x": x, "labels": labels}, epochs=5, batch_size=8)
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (
            np.full(40, 3),
            "the label of row 0 is 3, but 'y' has 3 classes, 0 to 2; correct the label, .*ortrain train --classes 4",
        ),
        (-np.ones(40, np.int64), "the label of row 0 is -1, but .* 0 to 2; correct the label$"),
        (np.full(40, 0.5), "targets of the shape"),
        (np.zeros((40, 2, 2)), "do not fit|takes"),
        (np.array([None] * 40), "the targets are object"),
        (np.zeros(39, np.int64), "x has 40 rows, but y has 39; each row needs one target"),
    ],
)
def test_targets_that_do_not_fit(targets: Any, sentence: str) -> None:
    x, _ = rows()
    with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
        ortrain.Model(net(3, "Softmax")).fit(x, targets)


def test_unknown_names() -> None:
    with pytest.raises(
        ortrain.InvalidArgumentError, match=r"there is no loss 'crossentropy'; .* did you mean 'cross_entropy'"
    ):
        ortrain.Model(net(), loss="crossentropy").fit(*rows())
    with pytest.raises(ortrain.InvalidArgumentError, match="there is no optimizer 'adamx'"):
        ortrain.Model(net(), optimizer="adamx")
    with pytest.raises(
        ortrain.InvalidArgumentError, match="binary cross-entropy does not fit the output 'y': its softmax"
    ):
        ortrain.Model(net(3, "Softmax"), loss="bce").fit(*rows())
    with pytest.raises(ortrain.InvalidArgumentError, match="the model has no output 'z' for a loss; it has y"):
        ortrain.Model(net(), loss={"z": "mse"}).fit(*rows())
    with pytest.raises(ortrain.OrtrainError, match="the loss is not chosen yet"):
        _ = ortrain.Model(net()).module


def linear(outputs: int) -> Any:
    """Return a model that is one product, so that its gradient is known."""
    from onnx import TensorProto, helper, numpy_helper

    w = np.random.default_rng(0).standard_normal((4, outputs)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(w, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), w.astype(np.float64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["labels", "soft", "binary", "squares", "distances"])
def test_gradients(kind: str, weighted: bool) -> None:
    x, labels = rows()
    proto, w = linear(3)
    z = x.astype(np.float64) @ w
    rng = np.random.default_rng(1)
    y: Any = {
        "labels": labels,
        "soft": softmax(rng.standard_normal((40, 3))),
        "binary": rng.integers(0, 2, (40, 3)),
    }.get(kind, rng.standard_normal((40, 3)))
    name = {"binary": "bce", "squares": "mse", "distances": "mae"}.get(kind)
    by_scores = {
        "labels": lambda: softmax(z) - np.eye(3)[labels],
        "soft": lambda: softmax(z) - y,
        "binary": lambda: (1 / (1 + np.exp(-z)) - y) / 3,
        "squares": lambda: 2 * (z - y) / 3,
        "distances": lambda: np.sign(z - y) / 3,
    }[kind]()
    weight = rng.uniform(0.1, 3, 40) if weighted else None
    if weight is not None:
        by_scores = by_scores * weight[:, None]
    model = ortrain.Model(proto, loss=name, optimizer="sgd", learning_rate=1.0, device="cpu")
    model.fit(x, y, batch_size=40, sample_weight=weight)
    assert model.state.parameters["w"].data == pytest.approx(w - x.T @ by_scores / 40, abs=2e-5)


def test_settings_that_a_loss_does_not_have(tmp_path: Path) -> None:
    kinds = artifacts.LossType
    for loss, sentence in (
        (
            artifacts.Loss(kinds.CrossEntropyLoss, soft=True, ignore_index=3),
            "of probabilities .soft. has no ignore_index",
        ),
        (artifacts.Loss(kinds.MSELoss, stable=True), "the squared error has no stable"),
        (artifacts.Loss(kinds.L1Loss, soft=True), "the absolute error has no soft"),
    ):
        with pytest.raises(ortrain.OrtrainError, match=sentence):
            artifacts.generate_artifacts(net(3), loss=loss, artifact_directory=tmp_path)


def test_a_sum_of_weighted_losses(tmp_path: Path) -> None:
    kinds = artifacts.LossType
    terms = [artifacts.Loss(kind, sample_weight="rows", reduction="sum") for kind in (kinds.MSELoss, kinds.L1Loss)]
    artifacts.generate_artifacts(net(3), loss=terms, artifact_directory=tmp_path)
    state = ortrain.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = ortrain.Module(tmp_path / "training_model.onnx", state)
    assert module.input_names() == ["x", "target", "rows"]
    x, _ = rows()
    y, weight = np.zeros((40, 3), np.float32), np.linspace(0, 2, 40).astype(np.float32)
    z = scores_of(net(3), x)
    expected = ((z**2 + np.abs(z)).sum(1) * weight).sum()
    assert float(module(x, y, weight)) == pytest.approx(expected, rel=1e-5)
