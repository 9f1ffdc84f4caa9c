"""The nine `light_*` models of the onnx package: real architectures with ConstantOfShape nodes as weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
STEPS, LEARNING_RATE = 10, 1e-4
# Tolerance of outputs, relative to the largest: dozens of layers of float32 sums in another order.
TOLERANCE = 1e-4


class Light:
    """A model, and the roles of its constants."""

    def __init__(self, name: str) -> None:
        self.model = onnx.load(FOLDER / f"light_{name}.onnx")
        graph = self.model.graph
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        (self.x,) = [value for value in graph.input if value.name not in constants]
        (self.y,) = graph.output
        shapes = {key: list(value.shape) for key, value in constants.items() if value.dtype == np.float32}
        for node in graph.node:
            if node.op_type == "ConstantOfShape":
                shapes[node.output[0]] = constants[node.input[0]].tolist()
        shaped = {node.output[0]: node.input[0] for node in graph.node if node.op_type in ("Unsqueeze", "Reshape")}

        # Channel scales and running variances start at one; biases and running means start at zero.
        ones: set[str] = set()
        zeros: set[str] = set()
        self.statistics: set[str] = set()
        used: dict[str, list[int]] = {}
        for node in graph.node:
            names = [shaped.get(name, name) for name in node.input]
            if node.op_type == "BatchNormalization":
                ones |= {names[1], names[4]}
                zeros |= {names[2], names[3]}
                self.statistics |= {names[3], names[4]}
            elif node.op_type in ("Conv", "Gemm"):
                zeros |= set(names[2:])
            elif node.op_type == "Mul":
                ones.add(names[1])
            elif node.op_type == "Add":
                zeros.add(names[1])
            if node.op_type not in ("ConstantOfShape", "Unsqueeze", "Reshape"):
                used |= {name: shapes[name] for name in names if name in shapes}
        self.trained = {name: shape for name, shape in used.items() if name not in self.statistics}
        self.starts = {name: float(name in ones) for name in self.trained if name in ones | zeros}
        last = graph.node[-1]
        # The input of a final softmax, or the output of the model.
        self.scores = last.input[0] if last.op_type == "Softmax" else last.output[0]

    def image(self) -> dict[str, np.ndarray]:
        return {self.x.name: np.random.default_rng(1).standard_normal(sizes(self.x), np.float32)}

    def drawn(self) -> dict[str, np.ndarray]:
        """Return values that the model learns from: He initialization for weights."""
        rng = np.random.default_rng(2)
        values = {}
        for name, shape in self.trained.items():
            if name in self.starts:
                values[name] = np.full(shape, self.starts[name], np.float32)
            else:
                scale = np.float32(np.sqrt(2 / np.prod(shape[1:])))
                values[name] = rng.standard_normal(shape, np.float32) * scale
        return values


def sizes(value: onnx.ValueInfoProto) -> list[int]:
    return [size.dim_value for size in value.type.tensor_type.shape.dim]


def test_there_are_nine() -> None:
    assert sorted(path.stem.removeprefix("light_") for path in FOLDER.glob("*.onnx")) == list(NAMES)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.isfinite(want).all()
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("name", NAMES)
def test_runs_like_onnxruntime(name: str) -> None:
    light = Light(name)
    feeds = light.image()
    theirs = onnxruntime.InferenceSession(light.model.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = ortrain.InferenceSession(light.model)
    for got, want in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
        same(got, want)


def prepared(light: Light, folder: Path, loss_input: str) -> tuple[CheckpointState, Module, Optimizer]:
    """Generate artifacts with all trainable values; returns state, module and optimizer."""
    artifacts.generate_artifacts(
        light.model,
        requires_grad=list(light.trained),
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        loss_input_names=[loss_input],
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    return state, module, optimizer


def train(module: Module, optimizer: Optimizer, x: np.ndarray, target: np.ndarray) -> list[float]:
    losses = []
    for _ in range(STEPS):
        losses.append(float(module(x, target)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_trains_from_its_constants(name: str, tmp_path: Path) -> None:
    """All weights of a layer are equal and stay equal; the loss of probabilities is nevertheless finite."""
    light = Light(name)
    target = np.zeros(sizes(light.y), np.float32)
    target[:, 7] = 1
    state, module, optimizer = prepared(light, tmp_path, light.y.name)
    assert {key for key, value in state.parameters if value.requires_grad} == set(light.trained)
    assert light.statistics <= {key for key, value in state.parameters if not value.requires_grad}
    losses = train(module, optimizer, *light.image().values(), target)
    assert np.isfinite(losses).all(), losses


@pytest.mark.parametrize("name", NAMES)
def test_learns_from_drawn_weights(name: str, tmp_path: Path) -> None:
    """Ten steps bring the scores nearer to a target; onnxruntime and ortrain run the trained model alike."""
    light = Light(name)
    feeds = light.image()
    state, module, optimizer = prepared(light, tmp_path, light.scores)
    for key, value in light.drawn().items():
        state.parameters[key].data = value
    target = np.random.default_rng(3).standard_normal(sizes(light.y), np.float32)
    losses = train(module, optimizer, *feeds.values(), target)
    print(f"{name}: {sum(map(np.prod, light.trained.values()))} parameters, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert np.isfinite(losses).all(), losses
    assert losses[-1] < losses[0]
    module.eval()
    module.export_model_for_inferencing(tmp_path / "trained.onnx", [light.scores])
    theirs = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    ours = ortrain.InferenceSession(tmp_path / "trained.onnx")
    same(ours.run(None, feeds)[0], theirs.run(None, feeds)[0])
