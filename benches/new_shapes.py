"""Time of the first step with a new batch size, and of the planning for it.

    python benches/new_shapes.py                         the networks with the largest programs
    python benches/new_shapes.py bert_mini               one of them
    python benches/new_shapes.py --old VENV/bin/python   comparison with another version, in turns

New modules run batches of different sizes. Each line is for one size and shows the extra time of the first step over
later steps: in milliseconds, as a fraction of that step, and as a fraction of a step with the workload's own size. The
numbers are medians; the fractions have their range too. The largest size runs first and is not shown. It allocates the
memory for all other sizes, so that no line includes the time that a host needs to provide memory. The last line is the
median time of planning alone, which allocates no memory for values.
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
# Differences from the workload's own batch size, in the order of the steps.
CHANGES = (3, 0, 1, -1, 2, -2)
REPEATS = 5
STEPS = 6
PLANNED = 15


def module_of(name: str, folder: Path) -> Module:
    """Builds a module of a workload for batches of any size."""
    artifacts.generate_artifacts(
        artifacts.open_batch(workloads.load(name)),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=str(folder),
    )
    return new_module(folder)


def new_module(folder: Path) -> Module:
    """Builds a module of the artifacts, without any cached plans."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.train()
    return module


def first_and_later(module: Module, inputs: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Returns the seconds of the first step on these inputs, and the median seconds of later steps."""
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
                f"{name:16} {size:3} rows: first step +{more * 1e3:5.1f} ms, later steps {step * 1e3:6.1f} ms; "
                f"overhead {of_step} of a later step, {more / own:5.2f} of a step with {rows} rows",
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
    parser.add_argument("--old", metavar="PYTHON", help="interpreter with another version of ortrain")
    arguments = parser.parse_args()
    for name in arguments.names:
        if arguments.old:
            print("old", flush=True)
            subprocess.run([arguments.old, __file__, name], check=True)
            print("new", flush=True)
        measure(name)


if __name__ == "__main__":
    main()
