"""Replay a recorded training run and measure the distance of the results from the record.

Needs NumPy alone, so that it runs in ortrain's environment and in onnxruntime-training's:

    python replaying.py API CASE=ARTIFACTS...      prints a line of JSON: {case: {kind: distance}}
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

# Distances are relative to the largest magnitude in the recorded tensor.
LOSS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-4
PARAMETER_TOLERANCE = 5e-4
# The scale of gradient distances is at least this share of the largest gradient of the run.
GRADIENT_SCALE = 1e-2
# If the gradients of a parameter never exceed this share of the largest, its true gradient is zero. Its recorded
# gradient is rounding noise, and Adam turns noise into steps of up to the learning rate.
NOISE = 1e-5

TOLERANCE = {"loss": LOSS_TOLERANCE, "gradient": GRADIENT_TOLERANCE}


def above_tolerance(distances: dict[str, float]) -> dict[str, float]:
    """Return the kinds of value that differ by more than their tolerance."""
    return {kind: d for kind, d in distances.items() if not d <= TOLERANCE.get(kind, PARAMETER_TOLERANCE)}


def load_api(name: str) -> Any:
    """Return the module with CheckpointState, Module and Optimizer."""
    if name.startswith("onnxruntime"):
        # Two subpackages of onnxruntime.training import PyTorch; on-device training uses neither.
        for sub in ("optim", "amp"):
            name_of_sub = f"onnxruntime.training.{sub}"
            sys.modules.setdefault(name_of_sub, types.ModuleType(name_of_sub))
    return importlib.import_module(name)


def batches_of(case: Path) -> list[dict[str, np.ndarray]]:
    """Return the recorded batches, in order."""
    batches: dict[int, dict[str, np.ndarray]] = {}
    with np.load(case / "inputs.npz") as stored:
        for key in stored.files:
            batch, name = key.split("/", 1)
            batches.setdefault(int(batch[len("batch") :]), {})[name] = stored[key]
    return [batches[index] for index in sorted(batches)]


class Record:
    """A recorded run, and the largest distance from it so far for each kind of value."""

    def __init__(self, case: Path) -> None:
        with np.load(case / "trajectory.npz") as stored:
            self.values = {key: stored[key] for key in stored.files}
        self.distances: dict[str, float] = {}
        self.compared: set[str] = set()
        sizes: dict[str, float] = {}
        for key, value in self.values.items():
            if key.startswith("grad/"):
                name = key.split("/", 2)[2]
                sizes[name] = max(sizes.get(name, 0.0), float(np.abs(value).max()))
        self.largest_gradient = max(sizes.values(), default=0.0)
        self.noise = {name for name, size in sizes.items() if size < NOISE * self.largest_gradient}

    def compare(
        self, kind: str, got: Any, key: str, *, index: int | None = None, scale: float = 0.0, allowance: float = 0.0
    ) -> None:
        """Measure a value, or the element at `index` of the recorded value; values without a record are skipped."""
        if key not in self.values:
            return
        self.compared.add(key)
        want = self.values[key] if index is None else self.values[key][index]
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if got.shape != want.shape or not np.isfinite(got).all():
            distance = float("inf")
        elif want.size == 0:
            distance = 0.0
        else:
            gap = max(float(np.abs(got - want).max()) - allowance, 0.0)
            distance = gap / max(float(np.abs(want).max()), scale, 1e-12)
        self.distances[kind] = max(self.distances.get(kind, 0.0), distance)

    def forgotten(self, *but: str) -> list[str]:
        """Return the recorded keys that were not compared, except keys with one of these prefixes."""
        return sorted(key for key in self.values if key not in self.compared and not key.startswith(but))


def replay(api: Any, case: Path, artifacts: Path, **module_arguments: Any) -> dict[str, float]:
    """Train with the recorded learning rates, and return the largest distance for each kind of value."""
    record = Record(case)
    batches = batches_of(case)
    losses, rates = record.values["loss"], record.values["lr"]
    micro_steps = len(losses) // len(rates)

    state = api.CheckpointState.load_checkpoint(str(artifacts / "checkpoint"))
    module = api.Module(
        str(artifacts / "training_model.onnx"), state, str(artifacts / "eval_model.onnx"), **module_arguments
    )
    optimizer = api.Optimizer(str(artifacts / "optimizer_model.onnx"), module)

    for name, parameter in state.parameters:
        record.compare("parameter", parameter.data, f"param/init/{name}")
    inputs, outputs = module.input_names(), module.output_names()
    for micro in range(len(losses)):
        results = as_tuple(module(*[batches[micro % len(batches)][name] for name in inputs]))
        record.compare("loss", np.asarray(results[0]).reshape(()), "loss", index=micro)
        for name, value in zip(outputs[1:], results[1:], strict=True):
            record.compare("output", value, f"output/micro{micro + 1}/{name}")
        if micro < micro_steps:
            for name, parameter in state.parameters:
                record.compare("gradient", parameter.grad, f"accum_grad/micro{micro + 1}/{name}")
        if (micro + 1) % micro_steps == 0:
            step = (micro + 1) // micro_steps
            optimizer.set_learning_rate(float(rates[step - 1]))
            optimizer.step()
            for name, parameter in state.parameters:
                drift = 2 * float(rates[:step].sum()) if name in record.noise else 0.0
                record.compare("parameter", parameter.data, f"param/step{step}/{name}", allowance=drift)
                if parameter.requires_grad:
                    scale = GRADIENT_SCALE * record.largest_gradient
                    record.compare("gradient", parameter.grad, f"grad/step{step}/{name}", scale=scale)
            module.lazy_reset_grad()

    drift = 2 * float(rates.sum()) if record.noise else 0.0
    for key, trainable_only in (("contiguous_all", False), ("contiguous_trainable", True)):
        packed = module.get_contiguous_parameters(trainable_only).numpy()
        record.compare("parameter", packed, key, allowance=drift)
    module.eval()
    results = as_tuple(module(*[batches[0][name] for name in module.input_names()]))
    for name, value in zip(module.output_names(), results, strict=True):
        record.compare("eval", value, f"eval/final/{name}")
    # The rates are inputs of the steps; exports and sequences of rates have tests of their own.
    assert not record.forgotten("lr", "infer/"), record.forgotten("lr", "infer/")
    return record.distances


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the outputs as a tuple; a single output comes without one."""
    return results if isinstance(results, tuple) else (results,)


def main() -> None:
    """Replay the cases of the command line."""
    api = load_api(sys.argv[1])
    pairs = [argument.split("=", 1) for argument in sys.argv[2:]]
    print(json.dumps({Path(case).name: replay(api, Path(case), Path(artifacts)) for case, artifacts in pairs}))


if __name__ == "__main__":
    main()
