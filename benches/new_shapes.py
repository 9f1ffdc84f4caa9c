"""Steps of batches of new sizes, and what planning for them takes.

    python benches/new_shapes.py                         the networks whose programs are the largest
    python benches/new_shapes.py bert_mini               one of them
    python benches/new_shapes.py --old VENV/bin/python   beside another version of ours, in turns

Sizes of batches grow, shrink, and grow again. For each, a line has the time of the first step, that of later ones, and
the difference as a share of a later step; the last line has the median of planning alone, which needs no memory for
values. A step of a larger batch touches memory for the first time: on a machine that gets it from a host only then,
run something large before.
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
# Sizes in order, beside the first one.
CHANGES = (0, 1, -1, 2, 3, -2)
STEPS = 5
PLANNED = 15


def module_of(name: str, folder: Path) -> Module:
    """A module of a workload that takes batches of any size."""
    artifacts.generate_artifacts(
        artifacts.open_batch(workloads.load(name)),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=str(folder),
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.train()
    return module


def measure(name: str) -> None:
    """Prints the lines of a network."""
    x, labels = workloads.batch(name, 0)
    rows, each = len(x), len(labels) // len(x)

    def batch(size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.resize(x, (size, *x.shape[1:])), np.resize(labels, size * each)

    with tempfile.TemporaryDirectory() as folder:
        module = module_of(name, Path(folder))
        for change in CHANGES:
            inputs = batch(rows + change)
            times = []
            for _ in range(STEPS):
                start = time.perf_counter()
                module(*inputs)
                times.append(time.perf_counter() - start)
                module.lazy_reset_grad()
            later = statistics.median(times[1:])
            print(
                f"{name:16} {rows + change:3} rows: first step {times[0] * 1e3:7.1f} ms, later {later * 1e3:7.1f} ms, "
                f"more by {(times[0] - later) / later:5.2f}",
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
