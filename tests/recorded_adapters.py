"""Comparison with the trainings of PEFT that tests/in_torch/adapters.py records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

LOSS_TOLERANCE, OUTPUT_TOLERANCE = 1e-5, 1e-5
"""Relative tolerance of the loss of each of 20 steps, and tolerance of outputs relative to the largest."""
CASES = (
    "perceptron",
    "attention",
    "attention-dynamo",
    "embedding",
    "convolutions",
    "dora-perceptron",
    "dora-attention",
    "dora-embedding",
    "dora-convolution",
    "pissa",
    "olora",
    "bias-all",
    "bias-lora-only",
    "decoder",
)


def outputs(model: ortrain.lora.ModelLike, x: np.ndarray) -> np.ndarray:
    (found,) = ortrain.InferenceSession(model).run(None, {"x": x})
    return found


def check_training(folder: Path, work: Path) -> None:
    """Load the initial adapter of PEFT, train it, and compare losses, outputs and factors with PEFT's."""
    with np.load(folder / "record.npz") as stored:
        record = dict(stored)
    x, target = record["x"], record["target"]
    model = ortrain.lora.load_adapter(folder / "model.onnx", folder / "initial")
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.AdamW(formula="pytorch"),
        artifact_directory=work,
    )
    state = CheckpointState.load_checkpoint(work / "checkpoint")
    module = Module(work / "training_model.onnx", state, work / "eval_model.onnx")
    optimizer = Optimizer(work / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(float(record["rate"]))
    losses = []
    for _ in record["losses"]:
        losses.append(float(module(x, target)))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, record["losses"], rtol=LOSS_TOLERANCE)
    module.export_model_for_inferencing(work / "adapted.onnx", ["y"])
    tolerance = OUTPUT_TOLERANCE * np.abs(record["y"]).max()
    np.testing.assert_allclose(outputs(work / "adapted.onnx", x), record["y"], rtol=0, atol=tolerance)
    loaded = ortrain.lora.load_adapter(folder / "model.onnx", folder / "trained")
    np.testing.assert_allclose(outputs(loaded.SerializeToString(), x), record["y"], rtol=0, atol=tolerance)
    ortrain.lora.save_adapter(work / "adapted.onnx", work / "adapter")
