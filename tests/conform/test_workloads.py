"""The workloads of benches/ in jax, in its own environment: losses and gradients equal ours."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import environments
import numpy as np
import pytest
from against_jax import distance

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent / "benches"), str(TESTS.parent / "benches" / "peers")]
import on_device  # noqa: E402
import workloads  # noqa: E402

STEPS = 20
# Tolerance relative to each loss: float32 here, float64 in jax, and twenty steps that amplify rounding.
LOSS_TOLERANCE = 1e-4
# Tolerance of a gradient, relative to its largest element.
GRADIENT_TOLERANCE = 1e-3
# Tolerance of key biases, relative to the largest gradient of all. A key bias shifts all scores of a query alike, so
# the softmax ignores it, and its gradient is only rounding.
NO_GRADIENT = 1e-6


@pytest.mark.parametrize("name", ["lstm", "bert_mini", "gpt2_small6"])
def test_trains_as_jax(name: str, tmp_path: Path) -> None:
    workloads.write(name, tmp_path, STEPS)
    environments.in_environment(environments.jax(), TESTS / "in_jax" / "train_workload.py", str(tmp_path), str(STEPS))
    settings: dict[str, Any] = json.loads((tmp_path / "settings.json").read_text())
    on_device.make_ours(tmp_path, tmp_path, settings)
    api: Any = importlib.import_module("ortrain.api")
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = api.Module(tmp_path / "training_model.onnx", state)
    optimizer = api.Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(settings["learning_rate"])
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    with np.load(tmp_path / "batches.npz") as stored:
        for step in range(STEPS):
            losses.append(float(module(stored[f"x{step}"], stored[f"labels{step}"])))
            if step == 0:
                gradients = {key: state.parameters[key].grad.copy() for key in settings["trainable"]}
            optimizer.step()
            module.lazy_reset_grad()
    with np.load(tmp_path / "jax.npz") as stored:
        wanted = {key: stored[f"gradient/{key}"] for key in gradients}
        largest = max(float(np.abs(value).max()) for value in wanted.values())
        some = {key: value for key, value in wanted.items() if np.abs(value).max() > NO_GRADIENT * largest}
        for key in wanted.keys() - some.keys():
            assert np.abs(gradients[key]).max() <= NO_GRADIENT * largest, key
        far = {key: distance(gradients[key], value) for key, value in some.items()}
        apart = np.abs(np.asarray(losses) - stored["loss"]) / np.abs(stored["loss"])
    print(f"{name}: {STEPS} losses, worst {apart.max():.1e}; {len(far)} gradients, worst {max(far.values()):.1e}")
    assert apart.max() <= LOSS_TOLERANCE, apart
    assert max(far.values()) <= GRADIENT_TOLERANCE, far
