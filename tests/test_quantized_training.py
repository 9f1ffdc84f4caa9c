"""Training of quantized models: float weights behind the integers, exports with integers again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from test_quantized_operators import CASES, without_optimizer

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

STEPS = 30
# Losses of models with the same integers differ by rounding of float32 only.
SAME_LOSS = 1e-5
CLASSES, FEATURES, BATCH = 5, 12, 32


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_shares = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_shares, labels[..., None], -1).mean())


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the initializers of a model by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


class Training:
    """Artifacts of a model, trained on random labels."""

    def __init__(self, model: str | Path | bytes, folder: Path, x: np.ndarray, **options: Any) -> None:
        artifacts.generate_artifacts(
            model,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
            **options,
        )
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(1e-2)
        self.x = x
        self.labels = np.random.default_rng(3).integers(0, CLASSES, len(x))
        self.exported = folder / "exported.onnx"

    @property
    def trained(self) -> set[str]:
        """Names of the trained parameters."""
        return {name for name, parameter in self.state.parameters if parameter.requires_grad}

    def steps(self, count: int = STEPS) -> list[float]:
        """Train, and return the losses."""
        losses = []
        self.module.train()
        for _ in range(count):
            losses.append(float(self.module(self.x, self.labels)))
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def evaluate(self) -> float:
        """Return the loss of the evaluation model."""
        self.module.eval()
        return float(self.module(self.x, self.labels))

    def export(self) -> tuple[onnx.ModelProto, float]:
        """Export for inference; return the model and the loss of onnxruntime with it."""
        self.module.export_model_for_inferencing(self.exported, ["logits"])
        session = ort.InferenceSession(self.exported, without_optimizer(), providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {session.get_inputs()[0].name: self.x})
        return onnx.load(self.exported), cross_entropy(logits, self.labels)


@pytest.mark.parametrize("name", ["quantized-qdq", "quantized-operators"])
def test_convnet(name: str, tmp_path: Path) -> None:
    """Before the first step the export has the integers of the file; afterwards it has the loss of the module."""
    path = CASES / name / "model.onnx"
    with np.load(CASES / "quantized-qdq" / "case.npz") as stored:
        x, logits = stored["x"], stored["logits"]
    training = Training(path, tmp_path, x)
    # In the form QDQ, x is the name of the dequantized bias.
    bias = "bias_float" if name == "quantized-qdq" else "bias"
    assert training.trained == {f"{layer}.{part}" for layer in (0, 3, 6) for part in ("weight", bias)}
    assert training.evaluate() == pytest.approx(cross_entropy(logits, training.labels), rel=SAME_LOSS)
    original = onnx.load(path)
    untouched, _ = training.export()
    before, kept = initializers(original), initializers(untouched)
    assert before.keys() == kept.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(kept[key], value, err_msg=key)
        assert kept[key].dtype == value.dtype
    losses = training.steps()
    assert losses[-1] < 0.9 * losses[0]
    after, loss = training.export()
    assert loss == pytest.approx(training.evaluate(), rel=SAME_LOSS)
    for model in (untouched, after):
        assert [(node.op_type, node.name) for node in model.graph.node] == [
            (node.op_type, node.name) for node in original.graph.node
        ]
    integers = [key for key in before if key.endswith("_quantized")]
    assert integers
    assert all((initializers(after)[key] != before[key]).any() for key in integers)


def test_scales_are_trained_by_name(tmp_path: Path) -> None:
    path = CASES / "quantized-qdq" / "model.onnx"
    with np.load(CASES / "quantized-qdq" / "case.npz") as stored:
        x = stored["x"]
    training = Training(path, tmp_path, x, requires_grad=["0.weight", "0.weight_scale", "x_scale"])
    before = {name: np.array(training.state.parameters[name].data) for name in training.trained}
    assert before.keys() == {"0.weight", "0.weight_scale", "x_scale"}
    training.steps(3)
    assert all((training.state.parameters[name].data != value).any() for name, value in before.items())
    model, loss = training.export()
    assert loss == pytest.approx(training.evaluate(), rel=SAME_LOSS)
    scale = initializers(model)["0.weight_scale"]
    np.testing.assert_array_equal(scale, training.state.parameters["0.weight_scale"].data)


def test_frozen_integers(tmp_path: Path) -> None:
    path = CASES / "quantized-qdq" / "model.onnx"
    x = np.zeros((16, 1, 8, 8), np.float32)
    training = Training(path, tmp_path, x, quantized="freeze", requires_grad=["6.weight_scale"])
    assert training.trained == {"6.weight_scale"}
    stored = initializers(onnx.load(tmp_path / "training_model.onnx"))
    assert stored["6.weight_quantized"].dtype == np.int8
    with pytest.raises(ortrain.InvalidArgumentError, match="quantized must be 'train' or 'freeze', got 'half'"):
        Training(path, tmp_path, x, quantized="half")


def test_report_of_quantized_tensors(tmp_path: Path) -> None:
    """Scales and ranges come from the file, the clipped share from the weights."""
    path = CASES / "quantized-qdq" / "model.onnx"
    x = np.zeros((16, 1, 8, 8), np.float32)
    for folder in ("train", "freeze"):
        (tmp_path / folder).mkdir()
    training = Training(path, tmp_path / "train", x)
    stored = initializers(onnx.load(path))
    report = {tensor.name: tensor for tensor in training.module.quantization()}
    weight = report["0.weight"]
    np.testing.assert_array_equal(weight.scale, stored["0.weight_scale"])
    np.testing.assert_array_equal(weight.high, (127 - weight.zero_point) * weight.scale)
    np.testing.assert_array_equal(weight.low, (-128 - weight.zero_point) * weight.scale)
    assert (weight.dtype, weight.clipped, weight.is_weight) == ("int8", 0.0, True)
    values = np.array(training.state.parameters["0.weight"].data)
    assert (weight.smallest, weight.largest) == (values.min(), values.max())
    activation = report["x"]
    assert not activation.is_weight
    assert activation.clipped is activation.smallest is activation.largest is None
    assert activation.scale == stored["x_scale"]
    # A quarter of the elements leaves the range.
    changed = np.array(values)
    changed.reshape(-1)[: changed.size // 4] = 10 * np.abs(weight.high).max()
    training.state.parameters["0.weight"] = changed
    (weight,) = (tensor for tensor in training.module.quantization() if tensor.name == "0.weight")
    assert weight.clipped == changed.size // 4 / changed.size
    frozen = Training(path, tmp_path / "freeze", x, quantized="freeze", requires_grad=["6.weight_scale"])
    report = {tensor.name: tensor for tensor in frozen.module.quantization()}
    assert report["0.weight_quantized"].clipped == 0.0
    assert report["0.weight_quantized"].largest == pytest.approx(values.max())


def perceptron(path: Path) -> np.ndarray:
    """Write a float model of two layers, and return a batch."""
    rng = np.random.default_rng(1)
    weights = {
        "fc1.weight": rng.normal(0, 0.4, (FEATURES, 16)),
        "fc1.bias": rng.normal(0, 0.1, 16),
        "fc2.weight": rng.normal(0, 0.4, (16, CLASSES)),
        "fc2.bias": rng.normal(0, 0.1, CLASSES),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "fc1.weight"], ["h"], name="product1"),
        helper.make_node("Add", ["h", "fc1.bias"], ["a"], name="sum1"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "fc2.weight"], ["p"], name="product2"),
        helper.make_node("Add", ["p", "fc2.bias"], ["logits"], name="sum2"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return rng.standard_normal((BATCH, FEATURES)).astype(np.float32)


class Calibration(CalibrationDataReader):
    """One batch for the calibration of a quantizer."""

    def __init__(self, x: np.ndarray) -> None:
        self.rest: Iterator[dict[str, np.ndarray]] = iter([{"x": x}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch."""
        return next(self.rest, None)


@pytest.mark.parametrize("form", ["dynamic", "dynamic per channel", "QDQ", "QDQ per channel", "QOperator"])
def test_files_of_the_quantizer(form: str, tmp_path: Path) -> None:
    """The loss falls, and onnxruntime computes the loss that the module reports."""
    source, path = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    x = perceptron(source)
    per_channel = "channel" in form
    if form.startswith("dynamic"):
        quantize_dynamic(source, path, per_channel=per_channel, weight_type=QuantType.QInt8)
    else:
        quantize_static(
            source,
            path,
            Calibration(x),
            quant_format=QuantFormat.QDQ if form.startswith("QDQ") else QuantFormat.QOperator,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    training = Training(path, tmp_path, x)
    assert {"fc1.weight", "fc2.weight"} <= training.trained
    assert not any(re.search("scale|zero_point|quantized", name) for name in training.trained)
    losses = training.steps()
    assert losses[-1] < 0.7 * losses[0]
    model, loss = training.export()
    assert loss == pytest.approx(training.evaluate(), rel=SAME_LOSS)
    original = onnx.load(path)
    assert [(node.op_type, node.name) for node in model.graph.node] == [
        (node.op_type, node.name) for node in original.graph.node
    ]
    assert {tensor.name: tensor.data_type for tensor in model.graph.initializer} == {
        tensor.name: tensor.data_type for tensor in original.graph.initializer
    }
