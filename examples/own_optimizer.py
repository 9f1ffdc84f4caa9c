"""Define a custom optimizer as a Python function, and compare it with AdamW: `python own_optimizer.py`.

The optimizer is Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023). Its function is called once,
with symbolic values, and becomes an ONNX function in the optimizer model. Training calls no Python code.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import ortrain
from ortrain import CheckpointState, Module, Optimizer, optim
from ortrain.optim import OptimizerConfig, Value

STEPS, PRINTED = 300, 100


@optim.register(lr=1e-4)
def SimpleLion(  # noqa: N802 - the name of a class
    parameter: Value,
    gradient: Value,
    momentum: Value,
    *,
    rate: Value,
    beta1: Value | float = 0.9,
    beta2: Value | float = 0.99,
    weight_decay: Value | float = 0.0,
) -> tuple[Value, Value]:
    """Updates by the sign of a momentum."""
    direction = np.sign(beta1 * momentum + (1 - beta1) * gradient)
    momentum = beta2 * momentum + (1 - beta2) * gradient
    return parameter - rate * (direction + weight_decay * parameter), momentum


def losses(config: OptimizerConfig, folder: Path) -> list[float]:
    """Returns the loss at each step of a training."""
    ortrain.generate_artifacts(
        ortrain.examples.perceptron(),
        loss=ortrain.LossType.CrossEntropyLoss,
        optimizer=config,
        artifact_directory=folder,
    )
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    rng = np.random.default_rng(0)
    x = rng.random((256, 64), np.float32)
    labels = x.reshape(-1, 8, 8).sum(axis=2).argmax(axis=1)  # the largest of eight groups of numbers
    found = []
    for _ in range(STEPS + 1):
        found.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    return found


def main() -> None:
    """Trains with both optimizers and prints the decreasing losses."""
    no_decay = {"params": "*.bias", "weight_decay": 0}
    with tempfile.TemporaryDirectory() as folder:
        lion = losses(SimpleLion(lr=1e-3, weight_decay=0.1, groups=[no_decay]), Path(folder))
        adamw = losses(optim.AdamW(lr=1e-3, groups=[no_decay]), Path(folder))
    for step in range(0, STEPS + 1, PRINTED):
        print(f"step {step:3}: Lion {lion[step]:.4f}, AdamW {adamw[step]:.4f}")


if __name__ == "__main__":
    main()
