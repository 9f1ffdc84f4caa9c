"""Train a network of nets.py and measure its distance from the values that jax computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import nets
import numpy as np

from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# Largest difference, relative to the largest magnitude in the tensor. jax computes in float64, so the difference is the
# rounding of ortrain.
TOLERANCE = 1e-4


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest relative difference; infinity if the shapes differ or an element is not finite."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def distances(net: nets.Net, record: Mapping[str, np.ndarray], folder: Path, device: str) -> dict[str, float]:
    """Train the network and return the distance of each value of the record."""
    artifacts.generate_artifacts(
        net.model,
        requires_grad=net.trained,
        loss=artifacts.LossType[net.loss],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", device=device)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(nets.LEARNING_RATE)
    found: dict[str, np.ndarray] = {}
    losses = []
    for step in range(nets.STEPS):
        losses.append(float(module(*net.batches[step % len(net.batches)])))
        if step == 0:
            found |= {f"gradient/{name}": state.parameters[name].grad.copy() for name in net.trained}
        optimizer.step()
        module.lazy_reset_grad()
    found["loss"] = np.asarray(losses)
    found |= {f"statistic/{name}": state.parameters[name].data for name in net.statistics}
    assert found.keys() == set(record)
    return {key: distance(found[key], value) for key, value in record.items()}


def above_tolerance(found: Mapping[str, float]) -> dict[str, float]:
    """Return the distances above the tolerance."""
    return {key: value for key, value in found.items() if not value <= TOLERANCE}
