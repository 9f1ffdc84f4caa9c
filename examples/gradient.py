"""Turn images into threes: gradient ascent on the image, with the gradient of a network with respect to its input.

    python examples/gradient.py [FOLDER]

The network is the perceptron of ortrain.examples. It is trained briefly on synthetic images: each class is a pattern
with noise. Then its gradient with respect to the image is exported as a model, which onnxruntime or any other ONNX
runtime can run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import ortrain
from ortrain.gradient import vjp

TARGET_CLASS, CLASSES, PIXELS = 3, 10, 64


def train(folder: Path, patterns: np.ndarray, rng: np.random.Generator) -> Path:
    """Trains the network to distinguish the patterns, and returns the path of the trained model."""
    ortrain.generate_artifacts(
        ortrain.examples.perceptron(),
        loss=ortrain.LossType.CrossEntropyLoss,
        optimizer=ortrain.OptimType.AdamW,
        artifact_directory=folder,
    )
    state = ortrain.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = ortrain.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = ortrain.Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    for step in range(60):
        labels = rng.integers(0, CLASSES, 64)
        images = patterns[labels] + rng.normal(0, 0.3, (64, PIXELS))
        loss = module(images.astype(np.float32), labels)
        optimizer.step()
        module.lazy_reset_grad()
        if step % 20 == 19:
            print(f"step {step + 1}  loss {float(loss):.4f}")
    module.export_model_for_inferencing(folder / "trained.onnx", ["logits"])
    return folder / "trained.onnx"


def main(folder: Path) -> None:
    """Trains, exports the gradient as a model, and runs gradient ascent."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    patterns = rng.random((CLASSES, PIXELS))
    trained = train(folder, patterns, rng)

    # Model of the gradient: derivatives of the scores with respect to each pixel, weighted by the input logits_grad.
    (folder / "gradient.onnx").write_bytes(vjp(trained, of="logits", wrt="x"))
    session = ortrain.InferenceSession(folder / "gradient.onnx")

    images = np.asarray(patterns, np.float32)
    for _ in range(40):
        (logits,) = session.run(["logits"], {"x": images, "logits_grad": np.zeros((CLASSES, CLASSES), np.float32)})
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        # Gradient of the logarithm of a softmax.
        uphill = np.eye(CLASSES, dtype=np.float32)[[TARGET_CLASS] * CLASSES] - chances
        (pixels,) = session.run(["x_grad"], {"x": images, "logits_grad": uphill})
        images = np.clip(images + 0.1 * np.sign(pixels), 0, 1)
    (logits,) = session.run(["logits"], {"x": images, "logits_grad": np.zeros((CLASSES, CLASSES), np.float32)})
    print(f"taken for a {TARGET_CLASS}: {(logits.argmax(1) == TARGET_CLASS).sum()} of {CLASSES}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/gradient"))
