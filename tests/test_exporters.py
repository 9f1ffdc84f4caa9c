"""Networks from tf2onnx and skl2onnx (tests/exporters/make_models.py): they run, train, and are exported again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FOLDER = Path(__file__).parent / "data" / "exporters"
MODELS: dict[str, dict[str, str]] = {
    entry["file"].removesuffix(".onnx"): entry for entry in json.loads((FOLDER / "models.json").read_text())
}
# Models with weights in attributes, which become initializers first (tests/test_sklearn.py has more of these).
ATTRIBUTES = [name for name in MODELS if name.startswith("skl2onnx-attributes")]
TRAINED = [name for name in MODELS if name not in ATTRIBUTES]
# A session refuses a model with a tail of ZipMap, which ortrain does not run. Names of classes are constants of type
# string, which is not supported.
MAPS = 'node "ZipMap" (ai.onnx.ml:ZipMap) with inputs ('
REFUSED = {False: MAPS, True: '"classes" has type string[3], which is not supported (node '}
STEPS, LEARNING_RATE = 20, 5e-4
# Tolerance of outputs, relative to the largest: float32 sums in another order.
TOLERANCE = 1e-4
# Step of central differences of float32 losses, with rounding errors of losses over twice the step. The tolerance is
# relative to the norm of the gradient.
DISTANCE, SLOPE_TOLERANCE = 1e-2, 1e-2


class Exported:
    """A model, its input, and the recorded output of its framework."""

    def __init__(self, name: str) -> None:
        entry = MODELS[name]
        self.path, self.scores, self.loss = FOLDER / entry["file"], entry["scores"], entry["loss"]
        self.model = onnx.load(self.path)
        with np.load(FOLDER / entry["record"]) as stored:
            self.x, self.y = stored["x"], stored["y"]
            self.label = stored.get("label")
        self.feeds = {self.model.graph.input[0].name: self.x}
        # skl2onnx writes ZipMap nodes after the probabilities, which only onnxruntime runs.
        tails = [node.input[0] for node in self.model.graph.node if node.op_type == "ZipMap"]
        self.output = tails[0] if tails else self.model.graph.output[0].name
        self.has_tail = bool(tails)
        self.names = self.label is not None and self.label.dtype.kind == "U"

    def theirs(self, model: onnx.ModelProto | Path) -> dict[str, Any]:
        content = model.read_bytes() if isinstance(model, Path) else model.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        return dict(zip([info.name for info in session.get_outputs()], session.run(None, self.feeds), strict=True))

    def target(self, scores: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(3)
        if self.loss == "CrossEntropyLoss":
            return rng.integers(0, scores.shape[1], len(scores))
        if self.loss == "BCEWithLogitsLoss":
            return np.asarray(rng.integers(0, 2, scores.shape), np.float32)
        return rng.standard_normal(scores.shape, np.float32)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


class Training:
    """Artifacts of an exported model, with all trainable parameters trained."""

    def __init__(self, name: str, folder: Path, optimizer: artifacts.OptimType = artifacts.OptimType.AdamW) -> None:
        self.exported = Exported(name)
        artifacts.generate_artifacts(
            self.exported.path,
            loss=artifacts.LossType[self.exported.loss],
            optimizer=optimizer,
            loss_input_names=[self.exported.scores],
            artifact_directory=folder,
        )
        self.folder = folder
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(LEARNING_RATE)
        before = self.export("before.onnx", [self.exported.scores])
        self.scores = ortrain.InferenceSession(before).run(None, self.exported.feeds)[0]
        self.batch = (self.exported.x, self.exported.target(self.scores))

    def export(self, name: str, outputs: list[str]) -> Path:
        self.module.export_model_for_inferencing(self.folder / name, outputs)
        return self.folder / name


@pytest.mark.parametrize("name", TRAINED)
def test_runs_as_it_did_in_its_framework(name: str, tmp_path: Path) -> None:
    exported = Exported(name)
    model: Path = exported.path
    if exported.has_tail:
        model = Training(name, tmp_path).export("probabilities.onnx", [exported.output])
    (got,) = ortrain.InferenceSession(model).run(None, exported.feeds)
    same(np.reshape(got, exported.y.shape), exported.y)
    same(got, exported.theirs(model)[exported.output])


@pytest.mark.parametrize("name", TRAINED)
def test_learns(name: str, tmp_path: Path) -> None:
    """Every step lowers the loss; onnxruntime gives the same outputs for the trained model."""
    training = Training(name, tmp_path)
    losses = []
    for _ in range(STEPS):
        losses.append(float(training.module(*training.batch)))
        training.optimizer.step()
        training.module.lazy_reset_grad()
    assert np.all(np.diff(losses) < 0), losses
    exported = training.exported
    trained = training.export("trained.onnx", [exported.output, exported.scores])
    ours = ortrain.InferenceSession(trained)
    theirs = exported.theirs(trained)
    for info, got in zip(ours.get_outputs(), ours.run(None, exported.feeds), strict=True):
        same(got, theirs[info.name])


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, tmp_path: Path) -> None:
    """Slopes agree with central differences: along the gradient, and in a direction of all parameters."""
    training = Training(name, tmp_path)
    parameters = {key: value for key, value in training.state.parameters if value.requires_grad}
    training.module(*training.batch)
    gradients = {key: value.grad.astype(np.float64) for key, value in parameters.items()}
    starts = {key: value.data.copy() for key, value in parameters.items()}
    rng = np.random.default_rng(4)
    length = np.sqrt(sum(float(np.square(value).sum()) for value in gradients.values()))
    drawn = {key: rng.standard_normal(value.shape) * np.abs(value) for key, value in gradients.items()}
    for direction in (gradients, drawn):
        size = np.sqrt(sum(float(np.square(value).sum()) for value in direction.values()))
        losses = []
        for sign in (1, -1):
            for key, value in parameters.items():
                value.data = (starts[key] + sign * DISTANCE / size * direction[key]).astype(np.float32)
            losses.append(float(training.module(*training.batch)))
        slope = (losses[0] - losses[1]) / (2 * DISTANCE)
        wanted = sum(float((gradients[key] * direction[key]).sum()) for key in parameters) / size
        assert abs(slope - wanted) <= SLOPE_TOLERANCE * length, (slope, wanted, length)


@pytest.mark.parametrize("name", [name for name in TRAINED if Exported(name).has_tail])
def test_tail_is_exported(name: str, tmp_path: Path) -> None:
    """Class names and maps of probabilities are exported with the trained weights, and onnxruntime runs them."""
    exported = Exported(name)
    outputs = [info.name for info in exported.model.graph.output]
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(exported.path)
    assert str(refused.value).removeprefix(f"the model {exported.path}: ").startswith(REFUSED[exported.names])
    training = Training(name, tmp_path)
    untouched = exported.theirs(training.export("untouched.onnx", outputs))
    assert exported.label is not None
    np.testing.assert_array_equal(untouched[outputs[0]], exported.label)
    for _ in range(STEPS):
        training.module(*training.batch)
        training.optimizer.step()
        training.module.lazy_reset_grad()
    training.module.eval()
    assert float(training.module(*training.batch)) > 0
    trained = exported.theirs(training.export("trained.onnx", [*outputs, exported.output]))
    maps = np.asarray([list(row.values()) for row in trained[outputs[1]]], np.float32)
    np.testing.assert_array_equal(maps, trained[exported.output])
    assert np.abs(maps - exported.y).max() > TOLERANCE
    kept = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in kept.graph.node].count("ZipMap") == 1
    evaluated = onnx.load(tmp_path / "eval_model.onnx").graph.node
    assert {"ZipMap", "ArrayFeatureExtractor"} <= {node.op_type for node in evaluated}
    assert all(node.domain != "ai.onnx.ml" for node in onnx.load(tmp_path / "training_model.onnx").graph.node)


@pytest.mark.parametrize("name", [name for name in TRAINED if Exported(name).has_tail])
def test_a_loss_after_the_tail_is_an_error(name: str, tmp_path: Path) -> None:
    """The error names the value that has the probabilities."""
    exported = Exported(name)
    maps = exported.model.graph.output[-1].name
    with pytest.raises(ortrain.UnsupportedError) as refused:
        artifacts.generate_artifacts(
            exported.path,
            loss=artifacts.LossType.MSELoss,
            loss_input_names=[maps],
            artifact_directory=tmp_path,
        )
    assert str(refused.value).startswith(f"the model {exported.path}: {MAPS}{exported.output}: ")
    assert "; make its input, the probabilities, an output of the model instead (" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*ATTRIBUTES, *(name for name in TRAINED if Exported(name).has_tail)])
def test_the_loss_of_a_classifier_is_found(name: str, tmp_path: Path) -> None:
    """A loss without names is found, also with weights in attributes; it equals the loss of scikit-learn's output."""
    exported = Exported(name)
    found = ortrain.inspect(exported.path)
    assert found.obstacle is None
    binary = exported.loss == "BCEWithLogitsLoss"
    # Cross-entropy needs opset 12; a model of few nodes is converted to it.
    loss = "CrossEntropyLoss" if name in ATTRIBUTES else exported.loss
    artifacts.generate_artifacts(
        exported.path,
        loss=artifacts.LossType[loss],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    y = exported.y.astype(np.float64)
    if loss == "MSELoss":
        target = np.zeros_like(exported.y)
        wanted = np.square(y).mean()
    else:
        target = np.arange(len(y)) % y.shape[1]
        wanted = -np.log(y[np.arange(len(y)), target]).mean()
        target = target.astype(np.float32)[:, None] if binary else target
    assert float(module(exported.x, target)) == pytest.approx(wanted, rel=TOLERANCE)
    if name in ATTRIBUTES:
        assert {key for key, _ in state.parameters} == {
            f"LinearClassifier/{kind}" for kind in ("coefficients", "intercepts")
        }
