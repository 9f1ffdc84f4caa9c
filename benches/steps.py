"""Times that users notice: the import of ortrain, and a train step with its optimizer step. `make bench` runs this."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ortrain import SessionOptions, artifacts
from ortrain.api import CheckpointState, Module, Optimizer

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
WEIGHTS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
IMPORTS, WARM_UP, STEPS, REPEATS = 10, 50, 500, 5
BATCHES, THREADS = (1, 32, 256), (1, 2)


def import_seconds(statement: str) -> float:
    """Returns the shortest time of an import in a fresh interpreter, with all files in the page cache."""
    script = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(IMPORTS)
    ]
    return min(map(float, runs))


def step_seconds(folder: Path, batch: int, threads: int) -> float:
    """Returns the shortest mean time of a train step, an optimizer step and a gradient reset."""
    options = SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    rng = np.random.default_rng(0)
    x, labels = rng.random((batch, 64), np.float32), rng.integers(0, 10, batch)
    best = float("inf")
    for repeat in range(REPEATS + 1):
        count = STEPS if repeat else WARM_UP
        start = time.perf_counter()
        for _ in range(count):
            module(x, labels)
            optimizer.step()
            module.lazy_reset_grad()
        if repeat:
            best = min(best, (time.perf_counter() - start) / count)
    return best


def main() -> None:
    """Prints a table."""
    numpy, everything = import_seconds("import numpy"), import_seconds("import numpy, ortrain")
    print(f"import: {numpy * 1e3:.0f} ms for NumPy, {(everything - numpy) * 1e3:.0f} ms more for ortrain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            PERCEPTRON,
            requires_grad=WEIGHTS,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
        )
        print("perceptron 64-96-10, cross-entropy, AdamW: train step + optimizer step")
        for batch in BATCHES:
            times = [f"{step_seconds(folder, batch, threads) * 1e6:7.1f} µs" for threads in THREADS]
            columns = ", ".join(f"{t} with {n} thread{'s' * (n > 1)}" for n, t in zip(THREADS, times, strict=True))
            print(f"  batch {batch:3d}: {columns}")


if __name__ == "__main__":
    main()
