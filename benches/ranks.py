"""Times of ORTTrainer's steps on several ranks of MPI, with and without overlap of sums and backward pass.

    mpiexec -n N python benches/ranks.py [NAME ...] [--steps N] [--strategy data|zero|adasum]

Each rank trains on a batch of the size of the workload, on the usable cores divided by the ranks, or on `--threads`.
Prints medians over the steps of rank 0: the time of a step, of the sums of gradients in MPI, and of the wait for these
sums. Also prints the share of the sums that computations hide, and the time of an exchange of control words.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
import orttrainer
import workloads

from ortrain import SessionOptions
from ortrain.trainer import ORTTrainer, ORTTrainerOptions
from ortrain.trainer.optim import AdamConfig

NAMES = ("mlp", "bert_mini")
WARM = 5
# Exchanges of control words that are measured together.
WORDS = 1000


def trainer_of(name: str, model: onnx.ModelProto, options: dict[str, object], threads: int) -> ORTTrainer:
    """Builds a trainer of a workload with these options of `distributed`."""

    def shape(value: onnx.ValueInfoProto) -> list[int | str]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    description = {
        "inputs": [(value.name, shape(value)) for value in model.graph.input],
        "outputs": [(value.name, shape(value), True) for value in model.graph.output],
    }
    session_options = SessionOptions()
    session_options.intra_op_num_threads = threads
    all_options = {
        "device": {"id": "cpu"},
        "utils": {"frozen_weights": orttrainer.frozen(name, model)},
        "distributed": options,
        "session_options": session_options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ORTTrainer(
            model, description, AdamConfig(lr=workloads.LEARNING_RATE), options=ORTTrainerOptions(all_options)
        )


def measure(trained: ORTTrainer, x: np.ndarray, labels: np.ndarray, steps: int) -> tuple[float, float, float]:
    """Returns the medians of a step, of its sums, and of the wait for its sums, in milliseconds."""
    rows = []
    for step in range(WARM + steps):
        before, start = trained.communication_time(), time.perf_counter()
        trained.train_step(x, labels)
        elapsed, after = time.perf_counter() - start, trained.communication_time()
        if step >= WARM:
            rows.append((elapsed, after.total - before.total, after.waited - before.waited))
    step_time, total, waited = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    return step_time, total, waited


def main() -> None:
    """Prints two lines for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--strategy", choices=("data", "zero", "adasum"), default="data")
    arguments = parser.parse_args()
    for name in arguments.names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            model = orttrainer.with_loss(name, Path(folder))
        for overlaps in (True, False):
            options: dict[str, object] = {
                "allreduce_post_accumulation": not overlaps,
                "deepspeed_zero_optimization": {"stage": int(arguments.strategy == "zero")},
                "enable_adasum": arguments.strategy == "adasum",
            }
            copied = onnx.ModelProto()
            copied.CopyFrom(model)
            trained = trainer_of(name, copied, options, arguments.threads)
            distributed = trained.options.distributed
            rank, size = distributed.world_rank, distributed.world_size
            x, labels = workloads.batch(name, rank)
            step_time, total, waited = measure(trained, x, labels, arguments.steps)
            if rank == 0:
                hidden = max(0.0, 1 - waited / total) if total else 0.0
                print(
                    f"{name} on {size} ranks, {arguments.strategy}, {'with' if overlaps else 'without'} overlap: step "
                    f"{step_time:.2f} ms, sums {total:.2f} ms, wait {waited:.2f} ms, hidden {hidden:.0%}",
                    flush=True,
                )
    if size > 1:
        from mpi4py import MPI

        word = np.zeros(14, np.int64)
        start = time.perf_counter()
        for _ in range(WORDS):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, word, MPI.MAX)
        if rank == 0:
            print(f"control word: {(time.perf_counter() - start) / WORDS * 1e6:.1f} µs", flush=True)


if __name__ == "__main__":
    main()
