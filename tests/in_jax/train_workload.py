"""Train a workload of benches/ in jax: train_workload.py FOLDER STEPS, with a folder of workloads.write.

Writes FOLDER/jax.npz: `loss` of each step, and `gradient/NAME` of the first step, in float64, so that only the rounding
of the other library is visible.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
from onnx import numpy_helper
from onnx_in_jax import adamw, cross_entropy, forward

jax.config.update("jax_enable_x64", True)


def main() -> None:
    """Train one workload in this process."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text())
    model = onnx.load(folder / "forward.onnx")
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = {name: value if value.dtype.kind != "f" else value.astype(np.float64) for name, value in given.items()}
    weights = {name: values.pop(name) for name in settings["trainable"]}
    rate, betas = settings["learning_rate"], tuple(settings["betas"])
    epsilon, decay = settings["epsilon"], settings["weight_decay"]

    def loss_of(weights: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(forward(model, {**values, **weights}, x, {})[0], labels)

    def stepped(weights: Any, moments: Any, number: Any, x: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, labels)
        updated, after = {}, {}
        for name, weight in weights.items():
            updated[name], *after[name] = adamw(
                number,
                rate,
                betas,
                epsilon,
                decay,
                weight,
                gradients[name],
                *moments[name],
                mode=settings["adam_mode"],
            )
        return updated, after, loss, gradients

    compiled = jax.jit(stepped)
    moments: Any = {name: [np.zeros_like(weight), np.zeros_like(weight)] for name, weight in weights.items()}
    record: dict[str, np.ndarray] = {}
    losses = []
    with np.load(folder / "batches.npz") as stored:
        for step in range(steps):
            index = step % settings["batches"]
            x, labels = stored[f"x{index}"], stored[f"labels{index}"]
            x = x.astype(np.float64) if x.dtype.kind == "f" else x
            weights, moments, loss, gradients = compiled(weights, moments, step + 1.0, x, labels)
            losses.append(float(loss))
            if step == 0:
                record = {f"gradient/{name}": np.asarray(value) for name, value in gradients.items()}
    np.savez(folder / "jax.npz", loss=np.asarray(losses), **record)
    print("done")


if __name__ == "__main__":
    main()
