"""jax as a peer: the same graph, interpreted once and compiled as a whole.

Arguments: FOLDER THREADS FIRST_LOSSES.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import numpy_helper
from turns import Turns

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "in_jax"))
from onnx_in_jax import adamw, cross_entropy, forward


def main() -> None:
    """Prepare, then take turns."""
    turns = Turns()
    folder, threads, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # It takes as many threads as there are cores, and knows no other number.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    settings = json.loads((folder / "settings.json").read_text())
    model = onnx.load(folder / "forward.onnx")
    constants: dict[str, Any] = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights = {name: constants.pop(name) for name in settings["trainable"]}
    statistics: dict[str, Any] = {}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            statistics |= {name: constants.pop(name) for name in node.input[3:]}
    rate, betas = settings["learning_rate"], tuple(settings["betas"])
    epsilon, decay = settings["epsilon"], settings["weight_decay"]

    def loss_of(weights: Any, statistics: Any, x: Any, labels: Any) -> Any:
        scores, after = forward(model, {**constants, **weights}, x, statistics)
        return cross_entropy(scores, labels), after

    def stepped(weights: Any, moments: Any, statistics: Any, number: Any, x: Any, labels: Any) -> Any:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, statistics, x, labels)
        updated, after = {}, {}
        for name, weight in weights.items():
            found = adamw(number, rate, betas, epsilon, decay, weight, gradients[name], *moments[name])
            updated[name], after[name] = found[0], found[1:]
        norms = {name: jnp.linalg.norm(gradient) for name, gradient in gradients.items()}
        return (updated, after, statistics), loss, norms

    compiled = jax.jit(stepped, donate_argnums=(0, 1, 2))
    moments = {name: (jnp.zeros_like(weight), jnp.zeros_like(weight)) for name, weight in weights.items()}
    state = jax.tree.map(jnp.asarray, (weights, moments, statistics))
    norms: dict[str, Any] = {}
    with np.load(folder / "batches.npz") as stored:
        batches = [(stored[f"x{index}"], stored[f"labels{index}"]) for index in range(settings["batches"])]

    def step(number: int) -> float:
        nonlocal state, norms
        state, loss, norms = compiled(*state, np.float32(number + 1), *batches[number % len(batches)])
        # All of the step, not the loss alone.
        jax.block_until_ready(state)
        return float(loss)

    def gradients() -> dict[str, float]:
        return {name: float(norm) for name, norm in norms.items()}

    turns.serve(step, gradients, first, {"library": "jax", "version": jax.__version__})


if __name__ == "__main__":
    main()
