"""A perceptron learns handwritten digits: train, save, load, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ortrain import artifacts
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
EPOCHS, BATCH, LEARNING_RATE, WARMUP, SEED = 30, 32, 0.004, 50, 0
# Accuracy on the test images.
MIN_ACCURACY = 0.96


def test_perceptron_learns_digits(tmp_path: Path) -> None:
    images, digits = load_digits(return_X_y=True)
    images, digits = (images / 16).astype(np.float32), digits.astype(np.int64)
    x, x_held, labels, labels_held = train_test_split(images, digits, stratify=digits, random_state=SEED)
    artifacts.generate_artifacts(
        PERCEPTRON,
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=tmp_path,
    )

    def predictions(module: Module) -> np.ndarray:
        return module.eval()(x_held, labels_held)[1].argmax(axis=1)

    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, WARMUP, EPOCHS * (len(x) // BATCH), LEARNING_RATE)
    rng = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        for batch in rng.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
            module(x[batch], labels[batch])
            optimizer.step()
            scheduler.step()
            module.lazy_reset_grad()
    learned = predictions(module)
    assert (learned == labels_held).mean() > MIN_ACCURACY

    CheckpointState.save_checkpoint(state, tmp_path / "trained", include_optimizer_state=True)
    loaded = CheckpointState.load_checkpoint(tmp_path / "trained")
    again = Module(tmp_path / "training_model.onnx", loaded, tmp_path / "eval_model.onnx")
    np.testing.assert_array_equal(predictions(again), learned)

    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["logits"])
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["logits"], {"x": x_held})[0].argmax(axis=1), learned)
