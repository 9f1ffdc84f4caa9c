"""Training of quantized models regains the accuracy that the rounding to four bits loses, and exports keep it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from quantized_nets import Graph
from sklearn.datasets import load_digits
from test_quantized_operators import without_optimizer
from test_quantized_training import SAME_LOSS, Calibration, cross_entropy

from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

CLASSES, BATCH, TESTED = 10, 64, 500
FLOAT_STEPS, STEPS = 200, 200
# Minimum accuracy of the float model, and minimum loss of accuracy by the rounding.
ACCURATE, GAP = 0.9, 0.04


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8 by 8 pixels."""

    x: np.ndarray
    labels: np.ndarray

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(5)
        for _ in range(count):
            chosen = rng.integers(0, len(self.x), BATCH)
            yield self.x[chosen], self.labels[chosen]


def digits() -> tuple[Digits, Digits]:
    """Return the digits for training and for tests."""
    loaded = load_digits()
    order = np.random.default_rng(2).permutation(len(loaded.target))
    x, labels = (loaded.images[order] / 8 - 1).astype(np.float32), loaded.target[order]
    return Digits(x[TESTED:], labels[TESTED:]), Digits(x[:TESTED], labels[:TESTED])


def convnet() -> onnx.ModelProto:
    """Return a network of depthwise and pointwise convolutions."""
    g = Graph("convnet of digits")
    h = g.node("Reshape", ["x", g.constant("image", [-1, 1, 8, 8], np.int64)], "image.x")
    h = g.node("Relu", [g.image("stem", h, 1, 8, 3)], "stem.relu")
    for at, (inputs, outputs) in enumerate([(8, 16), (16, 24)]):
        h = g.node("Relu", [g.image(f"depthwise{at}", h, inputs, inputs, 3, group=inputs)], f"depthwise{at}.relu")
        h = g.node("Relu", [g.image(f"pointwise{at}", h, inputs, outputs, 1)], f"pointwise{at}.relu")
        h = g.node("MaxPool", [h], f"pool{at}", kernel_shape=[2, 2], strides=[2, 2])
    g.gemm("logits", g.node("Flatten", [h], "flat"), 96, CLASSES)
    return g.finished(digits()[0].x[:1], [CLASSES])


def transformer() -> onnx.ModelProto:
    """Return two layers on the rows of an image."""
    g = Graph("transformer of digits")
    h = g.linear("rows", "x", 8, 16, bias=False)
    h = g.node("Add", [h, g.weight("positions.weight", [8, 16], 16)], "embedded")
    for at in (0, 1):
        h = g.layer_norm(f"l{at}.norm1", g.node("Add", [h, g.attention(f"l{at}", h)], f"l{at}.sum1"), 16)
        wide = g.node("Relu", [g.linear(f"l{at}.up", h, 16, 32)], f"l{at}.relu")
        h = g.node("Add", [h, g.linear(f"l{at}.down", wide, 32, 16)], f"l{at}.sum2")
        h = g.layer_norm(f"l{at}.norm2", h, 16)
    g.linear("logits", g.mean(h), 16, CLASSES)
    return g.finished(digits()[0].x[:1], [CLASSES])


class Training:
    """Artifacts of a model, and their training."""

    def __init__(self, model: Path, folder: Path, rate: float) -> None:
        folder.mkdir()
        artifacts.generate_artifacts(
            model,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.rate, self.exported = rate, folder / "exported.onnx"

    def steps(self, count: int, data: Digits) -> Path:
        """Train with a rate that falls to zero; returns the export."""
        self.module.train()
        for step, (x, labels) in enumerate(data.batches(count)):
            self.optimizer.set_learning_rate(self.rate * (1 - step / count))
            self.module(x, labels)
            self.optimizer.step()
            self.module.lazy_reset_grad()
        self.module.export_model_for_inferencing(self.exported, ["logits"])
        return self.exported

    def loss(self, data: Digits) -> float:
        self.module.eval()
        return float(self.module(data.x, data.labels))


def scores(path: Path, data: Digits) -> tuple[float, float]:
    """Return the accuracy and the loss in onnxruntime."""
    session = ort.InferenceSession(path, without_optimizer(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"x": data.x})
    return float((logits.argmax(1) == data.labels).mean()), cross_entropy(logits, data.labels)


@pytest.mark.parametrize("make", [convnet, transformer])
def test_half_of_the_gap_is_regained(
    make: Callable[[], onnx.ModelProto], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    train, test = digits()
    onnx.save(make(), tmp_path / "start.onnx")
    source = Training(tmp_path / "start.onnx", tmp_path / "float", 1e-2).steps(FLOAT_STEPS, train)
    path = tmp_path / "quantized.onnx"
    logging.disable(logging.WARNING)
    try:
        quantize_static(
            source,
            path,
            Calibration(train.x[:BATCH]),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt4 if make is convnet else QuantType.QUInt8,
            weight_type=QuantType.QInt4,
        )
    finally:
        logging.disable(logging.NOTSET)
    exact, rounded = scores(source, test)[0], scores(path, test)[0]
    training = Training(path, tmp_path / "trained", 5e-3)
    exported = training.steps(STEPS, train)
    accuracy, loss = scores(exported, test)
    with capsys.disabled():
        print(f"\n{make.__name__}: {exact:.3f}, {rounded:.3f}, {accuracy:.3f} in {time.monotonic() - start:.1f} s")
    assert exact >= ACCURATE
    assert exact - rounded >= GAP
    assert exact - accuracy <= (exact - rounded) / 2
    assert loss == pytest.approx(training.loss(test), rel=SAME_LOSS)
    types = {tensor.name: tensor.data_type for tensor in onnx.load(exported).graph.initializer}
    assert types == {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert TensorProto.INT4 in types.values()
