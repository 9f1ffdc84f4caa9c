"""Comparison of separate forward and backward calls with a Module's joint step: ratios of time and memory.

    python benches/forward_backward.py [NAME ...] [--rounds N]

A step is forward, loss and backward, without an optimizer. Both variants compute the same function and run in turns.
Separate calls return the loss and receive its gradient in between. A ratio of times is the median over pairs of steps.
A ratio of memory compares the bytes in use during a step: weights, gradients and workspace.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import workloads

from ortrain import OrtValue, _ortrain, artifacts
from ortrain.api import CheckpointState, Module

# Maximum ratio of separate calls to the joint step, by workload.
TIMES = {"mlp": 1.15, "resnet18_224": 1.05, "bert_mini": 1.05}
MEMORY = 1.05
WARM = 5


def milliseconds(step: Callable[[], None]) -> float:
    """Returns the time of a step in milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def compare(name: str, rounds: int, folder: Path) -> tuple[float, float, float]:
    """Returns the ratios of times and of memory, and the milliseconds of the joint step."""
    trained = workloads.about(name)["trainable_names"]
    artifacts.generate_artifacts(
        workloads.load(name),
        requires_grad=trained,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=None,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.train()
    path = folder / "with_loss.onnx"
    module.export_model_for_inferencing(path, [module.output_names()[0]])
    both = _ortrain.ForwardBackward(
        str(path),
        trained,
        [],
        training="auto",
        seed=0,
        options=_ortrain.RunOptions(),
    )
    x, labels = workloads.batch(name, 0)
    inputs = [OrtValue.ortvalue_from_numpy(array) for array in (x, labels)]
    native = [value._ortvalue for value in inputs]
    weights = both.initial_weights()
    live, (loss,) = both.forward(native, weights)
    seed = [OrtValue.ortvalue_from_numpy(np.ones_like(loss.numpy()))._ortvalue]
    rooms = both.backward(live, seed, None)

    def joint() -> None:
        module(*inputs)
        module.lazy_reset_grad()

    def separate() -> None:
        live, _ = both.forward(native, weights)
        both.backward(live, seed, rooms)

    for _ in range(WARM):
        joint()
        separate()
    pairs = [(milliseconds(joint), milliseconds(separate)) for _ in range(rounds)]
    live, _ = both.forward(native, weights)
    kept = live.bytes() + sum(2 * room.numpy().nbytes for room in rooms)
    use = module.memory()
    whole = use.work + use.scratch + sum(2 * state.parameters[parameter].data.nbytes for parameter in trained)
    ratio = statistics.median(second / first for first, second in pairs)
    return ratio, kept / whole, statistics.median(first for first, _ in pairs)


def main() -> int:
    """Prints a line for each workload. The exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TIMES))
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.names or list(TIMES):
        with tempfile.TemporaryDirectory() as folder:
            ratio, memory, step = compare(name, arguments.rounds, Path(folder))
        aim = TIMES.get(name, float("inf"))
        missed += ratio > aim or memory > MEMORY
        print(f"{name}: time {ratio:.3f} (at most {aim}), memory {memory:.3f} (at most {MEMORY}), step {step:.2f} ms")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
