"""Train a network of nets.py in jax: train.py FOLDER NET... writes FOLDER/NET.npz.

jax computes in float64, so that only the rounding of the other library is visible. Keys: `loss` of each step,
`gradient/NAME` of the first step, `statistic/NAME` after the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nets
from onnx_in_jax import LOSSES, adamw, forward

jax.config.update("jax_enable_x64", True)


def train(net: nets.Net) -> dict[str, np.ndarray]:
    """Train a network; returns its record."""
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in net.model.graph.initializer}
    values = {name: value.astype(np.float64) for name, value in given.items()}
    weights = {name: values.pop(name) for name in net.trained}
    statistics = {name: values.pop(name) for name in net.statistics}

    def loss_of(weights: dict, statistics: dict, x: np.ndarray, target: np.ndarray) -> tuple:
        scores, after = forward(net.model, {**values, **weights}, x, statistics)
        return LOSSES[net.loss](scores, target), after

    step_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    moments = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in weights.items()}
    record: dict[str, np.ndarray] = {}
    losses = []
    for step in range(nets.STEPS):
        x, target = net.batches[step % len(net.batches)]
        target = target if target.dtype == np.int64 else target.astype(np.float64)
        (loss, statistics), gradients = step_of(weights, statistics, x.astype(np.float64), target)
        losses.append(float(loss))
        if step == 0:
            record |= {f"gradient/{name}": np.asarray(value, np.float32) for name, value in gradients.items()}
        for name, gradient in gradients.items():
            weights[name], *moments[name] = adamw(
                step + 1,
                nets.LEARNING_RATE,
                nets.BETAS,
                nets.EPSILON,
                nets.WEIGHT_DECAY,
                weights[name],
                gradient,
                *moments[name],
            )
    record["loss"] = np.asarray(losses)
    return record | {f"statistic/{name}": np.asarray(value, np.float32) for name, value in statistics.items()}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        np.savez_compressed(Path(sys.argv[1]) / f"{name}.npz", **train(nets.NETS[name]()))
    print("done")
