"""Bitwise comparison of results before and after a change that must not affect them: ``make pin``.

    python benches/pin.py RECORD             write RECORD, or compare if RECORD exists
    python benches/pin.py RECORD mlp lenet   only these workloads

For the workloads of the comparison and for the digits network, a record has: instructions, bytes of the arena, losses,
and a hash of the parameters after three steps, with one and with two threads. For each case of the testkit, the record
has the line that ``crates/ortrain-testkit/examples/pin.rs`` prints. Everything is computed at the instruction-set level
AVX2. Losses, parameters and arena bytes must not change. Instructions may change their descriptions; the differences
are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
THREADS = (1, 2)
STEPS = 3
DIGITS = "digits"
# Field with allowed differences: the descriptions of instructions.
SPELLING = "instructions"
COUNT = re.compile(r"\d+ instructions")
SHOWN = 20

Record = dict[str, Any]


def digits(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Writes the artifacts of the digits network and returns batches."""
    from sklearn.datasets import load_digits

    from ortrain import artifacts

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)
    blocks = [f"block{number}.{kind}" for number in (1, 2, 3) for kind in ("weight", "scale", "bias")]
    artifacts.generate_artifacts(
        ROOT / "examples" / "convnet.onnx",
        requires_grad=[*blocks, "fc.weight", "fc.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return [(images[64 * k : 64 * (k + 1)], labels[64 * k : 64 * (k + 1)]) for k in range(STEPS)]


def workload(name: str, folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Writes the artifacts of a workload of the comparison and returns batches."""
    import workloads

    from ortrain import artifacts

    artifacts.generate_artifacts(
        workloads.load(name),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return [workloads.batch(name, index) for index in range(STEPS)]


def trained(folder: Path, batches: list[tuple[np.ndarray, np.ndarray]], threads: int) -> Record:
    """Runs some training steps from artifacts and returns their results."""
    from ortrain import SessionOptions
    from ortrain.api import CheckpointState, Module, Optimizer

    options = SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    losses = []
    for x, labels in batches:
        losses.append(np.asarray(module(x, labels)).tobytes().hex())
        optimizer.step()
        module.lazy_reset_grad()
    found = hashlib.sha256()
    for name, parameter in sorted(state.parameters):
        found.update(name.encode() + parameter.data.tobytes())
    profile = module.profile(*batches[0], steps=1, warmup=0)
    return {
        "losses": losses,
        "parameters": found.hexdigest(),
        "arena": module.memory(*batches[0]).work,
        SPELLING: [f"{entry.kind} {entry.flops} {entry.bytes}" for entry in profile.instructions],
    }


def cases() -> Record:
    """Returns the lines of the testkit's cases."""
    command = ["cargo", "run", "--quiet", "--release", "--package", "ortrain-testkit", "--example", "pin"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split(": ", 1) for line in lines)


def differences(before: Record, after: Record) -> tuple[list[str], list[str]]:
    """Returns the differences between two records: changed bits, and changed descriptions of instructions only."""
    bits: list[str] = []
    spelling: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for field in sorted(old.keys() | new.keys()):
                if old.get(field) != new.get(field):
                    (spelling if field == SPELLING else bits).append(f"{name}: {field}")
        elif old != new:
            same = isinstance(old, str) and isinstance(new, str) and COUNT.sub("", old) == COUNT.sub("", new)
            (spelling if same else bits).append(f"{name}: {old} became {new}")
    return bits, spelling


def main() -> int:
    """Writes a record, or compares with an existing one."""
    parser = argparse.ArgumentParser(description="Compare the bits of results before and after a change.")
    parser.add_argument("record", type=Path, help="record file, which is created if it is missing")
    parser.add_argument("names", nargs="*", help="workloads (all, the digits and the cases of the testkit)")
    arguments = parser.parse_args()
    import workloads

    os.environ["ORTRAIN_ISA"] = "avx2"
    found: Record = {}
    for name in arguments.names or [*workloads.NAMES, DIGITS]:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            batches = digits(folder) if name == DIGITS else workload(name, folder)
            for threads in THREADS:
                found[f"{name} at {threads}"] = trained(folder, batches, threads)
        print(name, flush=True)
    if not arguments.names:
        found |= cases()
        print("cases of the testkit", flush=True)
    if not arguments.record.exists():
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(found, indent=1, sort_keys=True))
        print(f"{len(found)} entries written to {arguments.record}")
        return 0
    before: Record = json.loads(arguments.record.read_text())
    if arguments.names:
        before = {name: entry for name, entry in before.items() if name in found}
    bits, spelling = differences(before, found)
    for line in [*spelling[:SHOWN], *bits[:SHOWN]]:
        print(line)
    print(f"{len(found)} entries: {len(bits)} differ in bits, {len(spelling)} in descriptions of instructions")
    return 1 if bits else 0


if __name__ == "__main__":
    sys.exit(main())
