"""Steps of batches of new sizes, and what planning for them takes.

    python benches/new_shapes.py                         the networks whose programs are the largest
    python benches/new_shapes.py bert_mini               one of them
    python benches/new_shapes.py --old VENV/bin/python   beside another version of ours, in turns

Sizes of batches change, in modules that begin anew. For each but the largest a line has how much longer the first step
takes than a later one, as a share of that step and of a step of the workload's own size; medians, and all shares from
the least to the largest. The largest size comes first, so that the memory of a step is there for the others: a machine
may get it from a host only then. The last line has the median of planning alone, which needs no memory for values.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import workloads

from ortrain import artifacts
from ortrain.api import CheckpointState, Module

NAMES = ("resnet18_224", "mobilenetv2_224", "bert_mini", "gpt2_small6")
# Sizes in order, beside the workload's own.
CHANGES = (3, 0, 1, -1, 2, -2)
REPEATS = 5
STEPS = 6
PLANNED = 15


def module_of(name: str, folder: Path) -> Module:
    """A module of a workload that takes batches of any size."""
    artifacts.generate_artifacts(
        artifacts.open_batch(workloads.load(name)),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=str(folder),
    )
    return new_module(folder)


def new_module(folder: Path) -> Module:
    """A module of artifacts, which has planned nothing."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.train()
    return module


def first_and_later(module: Module, inputs: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """The seconds of the first step on inputs of a size, and of later ones, the median."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        module(*inputs)
        times.append(time.perf_counter() - start)
        module.lazy_reset_grad()
    return times[0], statistics.median(times[1:])


def measure(name: str) -> None:
    """Prints the lines of a network."""
    x, labels = workloads.batch(name, 0)
    rows, each = len(x), len(labels) // len(x)

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.resize(x, (size, *x.shape[1:])), np.resize(labels, size * each)

    with tempfile.TemporaryDirectory() as folder:
        module_of(name, Path(folder))
        times: dict[int, list[tuple[float, float]]] = {}
        for _ in range(REPEATS):
            module = new_module(Path(folder))
            for change in CHANGES:
                pair = first_and_later(module, batch(rows + change))
                times.setdefault(rows + change, []).append(pair)
        own = statistics.median(later for _, later in times[rows])
        for size in sorted(times)[:-1]:
            more = statistics.median(first - later for first, later in times[size])
            step = statistics.median(later for _, later in times[size])
            shares = sorted(first / later - 1 for first, later in times[size])
            of_step = f"{statistics.median(shares):5.2f} ({shares[0]:5.2f} to {shares[-1]:5.2f})"
            print(
                f"{name:16} {size:3} rows: first step more by {more * 1e3:5.1f} ms, later {step * 1e3:6.1f} ms; "
                f"a share of {of_step}, {more / own:5.2f} of a step of {rows} rows",
                flush=True,
            )
        planned = []
        for size in range(rows + max(CHANGES) + 1, rows + max(CHANGES) + 1 + PLANNED):
            inputs = batch(size)
            start = time.perf_counter()
            module.memory(*inputs)
            planned.append(time.perf_counter() - start)
        print(f"{name:16} planning {statistics.median(planned) * 1e3:.2f} ms", flush=True)


def main() -> None:
    """Measures the networks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--old", metavar="PYTHON", help="the Python of an environment with another version of ours")
    arguments = parser.parse_args()
    for name in arguments.names:
        if arguments.old:
            print("old", flush=True)
            subprocess.run([arguments.old, __file__, name], check=True)
            print("new", flush=True)
        measure(name)


if __name__ == "__main__":
    main()
