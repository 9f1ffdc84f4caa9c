"""Statistics of the GPU kernels of a training step, without a GPU: launches, distinct kernels, operations, bytes.

    python benches/gpu_kernels.py [WORKLOAD ...]

The numbers come from `ortrain dump --stage kernels`, with device limits that every GPU supports.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import workloads

import ortrain
from ortrain import LossType, OptimType


def counts_of(name: str) -> tuple[int, int, int, float, float, float]:
    """Returns instructions, launches and kernels of both entries, GFLOP, MB, and the seconds of the kernel dump."""
    model = workloads.load(name)
    with tempfile.TemporaryDirectory() as folder:
        ortrain.generate_artifacts(
            model,
            requires_grad=workloads.about(name)["trainable_names"],
            loss=LossType.CrossEntropyLoss,
            optimizer=OptimType.AdamW,
            artifact_directory=folder,
        )
        training = Path(folder) / "training_model.onnx"
        session = ortrain.Module(training, ortrain.CheckpointState.load_checkpoint(Path(folder) / "checkpoint"))
        batch = workloads.batch(name, 0)
        shapes = {given: list(array.shape) for given, array in zip(session.input_names(), batch, strict=True)}
        program = ortrain.dump(training, "program", shapes)
        start = time.perf_counter()
        kernels = ortrain.dump(training, "kernels", shapes, device="webgpu")
        seconds = time.perf_counter() - start

    def total(pattern: str, text: str) -> int:
        return sum(int(found) for found in re.findall(pattern, text))

    return (
        total(r"program: (\d+) instructions", program),
        total(r"(\d+) launches", kernels),
        total(r"launches, (\d+) kernels", kernels),
        total(r"a run takes (\d+) flops", program) / 1e9,
        total(r"moves at least (\d+) bytes", program) / 1e6,
        seconds,
    )


def main() -> None:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=workloads.NAMES)
    print(f"{'workload':22} {'instructions':>12} {'launches':>9} {'kernels':>8} {'GFLOP':>9} {'MB':>9} {'s':>6}")
    for name in parser.parse_args().workloads:
        instructions, launches, kernels, flops, moved, seconds = counts_of(name)
        print(f"{name:22} {instructions:12} {launches:9} {kernels:8} {flops:9.3f} {moved:9.1f} {seconds:6.2f}")


if __name__ == "__main__":
    main()
