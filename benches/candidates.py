"""Gain of each kernel that a workload picks: time of the instructions without the kernel / time with the kernel.

    python benches/candidates.py                      every workload of the comparison
    python benches/candidates.py mlp lenet --isa avx2 these workloads, at this instruction-set level

A run is a process of its own, because `ORTRAIN_KERNELS` is read once. Runs with and without a kernel take turns, and
the fastest call of each instruction counts. A workload has a row for each kernel that it picks. If the other
kernel needs other instructions, the row compares steps. The column "same bits" says whether losses and parameters stay
the same without the kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pin
import workloads


def measured(folder: Path, name: str, seconds: float, threads: int) -> dict[str, Any]:
    """Returns kernel and seconds of each instruction, the seconds of a step, and a hash of losses and parameters."""
    from ortrain import SessionOptions
    from ortrain.api import CheckpointState, Module, Optimizer

    options = SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    results = hashlib.sha256()
    began = time.perf_counter()
    for index in range(pin.STEPS):
        batch = workloads.batch(name, index)
        began = time.perf_counter()
        results.update(np.asarray(module(*batch)).tobytes())
        optimizer.step()
        module.lazy_reset_grad()
    steps = max(3, int(seconds / (time.perf_counter() - began)))
    for _, parameter in sorted(state.parameters):
        results.update(parameter.data.tobytes())
    profile = module.profile(*batch, steps=steps, warmup=1)
    instructions: dict[str, tuple[str | None, float]] = {}
    for entry in profile.instructions:
        key = f"{entry.kind} {entry.node} {entry.shapes}"
        while key in instructions:
            key += " again"
        instructions[key] = (kernel_of(entry.kernel), entry.min)
    return {"instructions": instructions, "step": min(profile.steps), "results": results.hexdigest()}


def kernel_of(description: str) -> str | None:
    """Returns the name of a kernel of a table from the description of an instruction's kernel."""
    words = description.replace(",", " ").replace(";", " ").split()
    return next((word for word in words if word.startswith(("product.", "conv.", "window."))), None)


def run(name: str, folder: Path, arguments: argparse.Namespace, without: str | None) -> dict[str, Any]:
    """Measures a workload in another process, without one kernel."""
    environment = os.environ | ({"ORTRAIN_KERNELS": f"-{without}"} if without else {})
    if arguments.isa:
        environment["ORTRAIN_ISA"] = arguments.isa
    command = [sys.executable, __file__, name, "--serve", str(folder)]
    command += ["--seconds", str(arguments.seconds), "--threads", str(arguments.threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Measure each kernel that a workload picks.")
    parser.add_argument("names", nargs="*", default=list(workloads.NAMES), metavar="WORKLOAD")
    parser.add_argument("--isa", help="level of the instruction set (that of the machine)")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a run (1)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each choice (3)")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (2)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        print(json.dumps(measured(arguments.serve, arguments.names[0], arguments.seconds, arguments.threads)))
        return
    print("| kernel | workload | instructions | share of the step | time without it | same bits |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            pin.workload(name, folder)
            first = run(name, folder, arguments, None)
            kernels = sorted({kernel for kernel, _ in first["instructions"].values() if kernel})
            runs: dict[str | None, list[dict[str, Any]]] = {choice: [] for choice in (None, *kernels)}
            for _ in range(arguments.rounds):
                for choice, found in runs.items():
                    found.append(run(name, folder, arguments, choice))
            step = min(found["step"] for found in runs[None])
            for kernel in kernels:
                own = [key for key, (picked, _) in first["instructions"].items() if picked == kernel]
                time_with, time_without = (seconds_of(own, found) for found in (runs[None], runs[kernel]))
                ratio, same = "no other kernel", ""
                if not any("error" in found for found in runs[kernel]):
                    other_step = min(found["step"] for found in runs[kernel])
                    ratio = f"{other_step / step:.2f} x of the step"
                    same = "yes" if runs[kernel][0]["results"] == first["results"] else "no"
                if time_without is not None and time_with is not None:
                    ratio = f"{time_without / time_with:.2f} x"
                share = 100 * (time_with or 0.0) / step
                print(f"| {kernel} | {name} | {len(own)} | {share:.1f} % | {ratio} | {same} |", flush=True)


def seconds_of(instructions: list[str], runs: list[dict[str, Any]]) -> float | None:
    """Returns the seconds of the fastest calls of some instructions; None if a run failed or has other instructions."""
    if any("error" in run or instruction not in run["instructions"] for run in runs for instruction in instructions):
        return None
    fastest = (min(float(run["instructions"][instruction][1]) for run in runs) for instruction in instructions)
    return sum(fastest)


if __name__ == "__main__":
    main()
