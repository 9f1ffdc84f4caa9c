"""jax as a peer: the graph is interpreted once and compiled as one function.

python with_jax.py FOLDER OWN THREADS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from turns import Session, Turns


def main() -> None:
    """Prepares the workload, then takes turns."""
    turns = Turns()
    folder, threads = Path(sys.argv[1]), int(sys.argv[3])
    # jax uses one thread for each available core and has no setting for another number.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    with turns.timed("import"):
        import jax
        import jax.numpy as jnp
    import onnx

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "in_jax"))
    from onnx_in_jax import adamw, cross_entropy, forward

    settings = json.loads((folder / "settings.json").read_text())
    model = onnx.load(folder / "graph.onnx")
    rate, betas, mode = settings["learning_rate"], tuple(settings["betas"]), settings["adam_mode"]
    epsilon, decay = settings["epsilon"], settings["weight_decay"]
    with np.load(folder / "batches.npz") as stored:
        batches = [(stored[f"x{index}"], stored[f"labels{index}"]) for index in range(settings["batches"])]

    def create(gradients: bool) -> Session:
        with np.load(folder / "weights.npz") as stored:
            constants = {name: stored[name] for name in stored.files}
        weights = {name: constants.pop(name) for name in settings["trainable"]}
        statistics: dict[str, Any] = {}
        for node in model.graph.node:
            if node.op_type == "BatchNormalization" and not weights.keys().isdisjoint(node.input[1:3]):
                statistics |= {name: constants.pop(name) for name in node.input[3:]}
        # Integers are sizes, which jax must know when it compiles. Floats are arguments, so that jax cannot fold them.
        known = {name: value for name, value in constants.items() if value.dtype.kind != "f"}
        frozen = {name: jnp.asarray(value) for name, value in constants.items() if name not in known}

        def loss_of(weights: Any, statistics: Any, frozen: Any, x: Any, labels: Any) -> Any:
            scores, after = forward(model, {**known, **frozen, **weights}, x, statistics)
            return cross_entropy(scores, labels), after

        def updated(weights: Any, moments: Any, gradients: Any, number: Any) -> tuple[Any, Any]:
            after, kept = {}, {}
            for name, weight in weights.items():
                m, v = moments[name]
                found = adamw(number, rate, betas, epsilon, decay, weight, gradients[name], m, v, mode)
                after[name], kept[name] = found[0], found[1:]
            return after, kept

        def stepped(weights: Any, moments: Any, statistics: Any, frozen: Any, number: Any, x: Any, labels: Any) -> Any:
            (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                weights, statistics, frozen, x, labels
            )
            weights, moments = updated(weights, moments, gradients, number)
            return (weights, moments, statistics), loss, gradients if settings["only_optimizer"] else {}

        def norms(*arguments: Any) -> Any:
            return jax.tree.map(jnp.linalg.norm, jax.grad(loss_of, has_aux=True)(*arguments)[0])

        compiled = jax.jit(stepped, donate_argnums=(0, 1, 2))
        optimized = jax.jit(updated, donate_argnums=(0, 1))
        moments = {name: (jnp.zeros_like(weight), jnp.zeros_like(weight)) for name, weight in weights.items()}
        state = jax.tree.map(jnp.asarray, (weights, moments, statistics))
        del weights, constants, moments
        kept: Any = {}
        first: dict[str, float] = {}
        if gradients:
            found = jax.jit(norms)(state[0], state[2], frozen, *batches[0])
            first = {name: float(norm) for name, norm in found.items()}

        def step(number: int) -> float:
            nonlocal state, kept
            state, loss, kept = compiled(*state, frozen, np.float32(number + 1), *batches[number % len(batches)])
            # Waits for the complete step, not only for the loss.
            jax.block_until_ready(state)
            return float(loss)

        def optimize() -> None:
            nonlocal state
            weights, moments = optimized(state[0], state[1], kept, np.float32(settings["batches"]))
            state = jax.block_until_ready((weights, moments, state[2]))

        return Session(step, lambda: first, optimize if settings["only_optimizer"] else None)

    turns.serve(create, {"library": "jax", "version": jax.__version__})


if __name__ == "__main__":
    main()
