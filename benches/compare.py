"""ortrain's training step beside that of other libraries, in one run.

    make compare                                  all workloads, with the release wheel
    make compare ARGUMENTS="mlp --rounds 5"
    python benches/compare.py --help

A step is forward, cross-entropy, backward, AdamW and the reset of the gradients, in float32, from the same weights on
the same batches. Every library runs in a process and an environment of its own, made on the first run. The processes
take turns of about half a second; a ratio is the median over rounds of (median step of ours / median step of theirs) of
one round, as milliseconds of different minutes say little on a shared machine. Below 1, ours is faster. The first
losses and gradients are compared too: a fast step that computes something else is worth nothing, and the run fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import workloads

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import environments  # noqa: E402  (found in tests/)

PEERS = Path(__file__).resolve().parent / "peers"
# The loss of the first step is that of the same weights: what differs is the order of float32 sums.
FIRST_TOLERANCE = 2e-5
# The norm of each parameter's gradient in the first step, relative to itself or to a share of the largest one: a bias
# in front of a normalization has no gradient but rounding.
GRADIENT_TOLERANCE, GRADIENT_FLOOR = 1e-2, 1e-3
# Then the optimizer turns rounding into steps: AdamW moves a weight by about the learning rate, however small its
# gradient is. On mobilenetv2_96 the fifth losses of float32 and float64 differ by half a percent.
LATER_TOLERANCE = 3e-2
FIRST_LOSSES, BATCHES = 5, 16
# What a step is to take at most, measured by that of onnxruntime-training.
AIMS = {
    "mlp_tiny": 0.70,
    "mlp": 0.63,
    "lenet": 0.33,
    "mobilenetv2_96": 0.32,
    "resnet18_224": 0.50,
    "lstm": 0.06,
    "bert_mini": 0.43,
    "gpt2_small6": 0.54,
}


@dataclass(frozen=True)
class Peer:
    """A library that takes part: a script under peers/ that speaks the protocol of turns.py, and where it runs."""

    name: str
    script: str
    arguments: tuple[str, ...]
    python: Callable[[], Path]
    """The interpreter of its environment, which is made if it is not there."""


OURS = Peer("ortrain", "on_device.py", ("ortrain",), lambda: Path(sys.executable))
REFERENCE = Peer("onnxruntime-training", "on_device.py", ("onnxruntime",), environments.oracle)
OTHERS = {peer.name: peer for peer in [REFERENCE, Peer("jax", "with_jax.py", (), environments.jax)]}


class Process:
    """A peer at work on one workload."""

    def __init__(self, peer: Peer, folder: Path, threads: int) -> None:
        self.peer = peer
        self._log = folder / "log.txt"
        # Thread counts are told to the libraries; what the environment says must not get between.
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_"))}
        arguments = [*peer.arguments, str(folder), str(threads), str(FIRST_LOSSES)]
        command = [str(peer.python()), str(PEERS / peer.script), *arguments]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.facts: dict[str, Any] = self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.peer.name} ended: {self._log.read_text()[-4000:]}")
        return json.loads(line)

    def turn(self, seconds: float) -> list[float]:
        """Let it run; the seconds of each of its steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        times: list[float] = self._heard()
        return times

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@dataclass
class Result:
    """A workload in ours and in another library."""

    workload: str
    peer: str
    version: str
    ours_ms: float
    theirs_ms: float
    ratio: float
    ratios: list[float]
    aim: float | None
    ours_losses: list[float]
    theirs_losses: list[float]
    gradient_distance: float
    ours_rounds_ms: list[float] = field(default_factory=list)
    theirs_rounds_ms: list[float] = field(default_factory=list)

    def distances(self) -> list[float]:
        """How far the first losses lie apart, relative to theirs."""
        pairs = zip(self.ours_losses, self.theirs_losses, strict=True)
        return [abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs]

    def agrees(self) -> bool:
        """Whether both computed the same thing. Not-a-number agrees with nothing."""
        first, *later = self.distances()
        return (
            first <= FIRST_TOLERANCE
            and self.gradient_distance <= GRADIENT_TOLERANCE
            and all(distance <= LATER_TOLERANCE for distance in later)
        )


def gradient_distance(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The largest difference of norms, infinite where a gradient is missing or not a number."""
    if ours.keys() != theirs.keys():
        return float("inf")
    floor = GRADIENT_FLOOR * max(theirs.values())
    distances = [abs(ours[name] - norm) / max(norm, floor) for name, norm in theirs.items()]
    return max(distances) if all(map(math.isfinite, distances)) else float("inf")


def compare(
    workload: str, peers: Sequence[Peer], threads: int, rounds: int, seconds: float, folder: Path
) -> list[Result]:
    """Let ours and the others take turns on a workload."""
    processes = []
    try:
        for peer in [OURS, *peers]:
            place = folder / workload / peer.name
            workloads.write(workload, place, BATCHES)
            processes.append(Process(peer, place, threads))
        for process in processes:
            process.turn(seconds / 2)  # warm, and asleep again before the first turn that counts
        medians: list[list[float]] = [[] for _ in processes]
        for number in range(rounds):
            # Nobody is always the one that comes after a certain other.
            order = range(len(processes)) if number % 2 == 0 else reversed(range(len(processes)))
            for index in order:
                medians[index].append(statistics.median(processes[index].turn(seconds)))
    finally:
        for process in processes:
            process.end()
    ours = processes[0]
    results = []
    for process, theirs in zip(processes[1:], medians[1:], strict=True):
        ratios = [a / b for a, b in zip(medians[0], theirs, strict=True)]
        results.append(
            Result(
                workload=workload,
                peer=process.peer.name,
                version=process.facts["version"],
                ours_ms=statistics.median(medians[0]) * 1e3,
                theirs_ms=statistics.median(theirs) * 1e3,
                ratio=statistics.median(ratios),
                ratios=ratios,
                aim=AIMS.get(workload) if process.peer is REFERENCE else None,
                ours_losses=ours.facts["losses"],
                theirs_losses=process.facts["losses"],
                gradient_distance=gradient_distance(ours.facts["gradients"], process.facts["gradients"]),
                ours_rounds_ms=[value * 1e3 for value in medians[0]],
                theirs_rounds_ms=[value * 1e3 for value in theirs],
            )
        )
    return results


def machine() -> dict[str, Any]:
    """Where this was measured."""
    about: dict[str, Any] = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        pairs = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        interesting = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd")
        flags = set(pairs.get("flags", pairs.get("Features", "")).split())
        about["processor"] = pairs.get("model name", about["processor"])
        about["instructions"] = [name for name in interesting if name in flags]
        about["load"] = os.getloadavg()
    except OSError:
        pass
    return about


HEADER = ("workload", "ours ms", "theirs ms", "ratio", "rounds", "aim", "first loss, gradients, later losses")


def row(result: Result) -> tuple[str, ...]:
    """A line of the table."""
    return (
        result.workload,
        f"{result.ours_ms:.2f}",
        f"{result.theirs_ms:.2f}",
        f"{result.ratio:.2f}",
        f"{min(result.ratios):.2f}-{max(result.ratios):.2f}",
        "" if result.aim is None else f"{result.aim:.2f}",
        f"{'agree' if result.agrees() else 'DIFFER'}: {result.distances()[0]:.0e}, {result.gradient_distance:.0e}, "
        f"{max(result.distances()[1:]):.0e}",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Print a table for every peer; fail where losses differ or a ratio is too large."""
    parser = argparse.ArgumentParser(description="ortrain's training step beside that of other libraries.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(workloads.NAMES)} (all)")
    parser.add_argument("--peers", nargs="+", choices=list(OTHERS), default=[REFERENCE.name], help="(the first)")
    parser.add_argument("--threads", type=int, default=2, help="for every library (2)")
    parser.add_argument("--rounds", type=int, default=15, help="in which each has a turn (15)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn (0.5)")
    parser.add_argument("--at-most", type=float, metavar="RATIO", help="fail if a ratio is larger")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compare", help="for artifacts and logs")
    parser.add_argument("--json", type=Path, help="where the numbers go (FOLDER/results.json)")
    options = parser.parse_args()
    for name in options.workloads:
        if name not in workloads.NAMES:
            parser.error(f"there is no workload {name!r}; there are {', '.join(workloads.NAMES)}")

    where = machine()
    load = where.get("load", ["?"])[0]
    print(f"{where['processor']}, {where['cores']} cores, load {load}; {options.threads} threads")
    results: list[Result] = []
    for name in options.workloads or workloads.NAMES:
        found = compare(
            name,
            [OTHERS[peer] for peer in options.peers],
            options.threads,
            options.rounds,
            options.seconds,
            options.folder,
        )
        results += found
        for result in found:
            print(f"{name}: {result.ratio:.2f} of {result.peer} {result.version}", flush=True)
            for who, losses in (("ortrain", result.ours_losses), (result.peer, result.theirs_losses)):
                print(f"  first losses {who:<21} {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    for peer in options.peers:
        lines = [row(result) for result in results if result.peer == peer]
        print(f"\nortrain beside {peer}: median milliseconds of a step; ratio below 1: ours is faster")
        print(table([HEADER, *lines]))

    path = options.json or options.folder / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {
        "machine": where,
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "precision": "float32",
        "optimizer": "AdamW, adam_mode 1",
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(run, indent=1) + "\n")
    print(f"\nall numbers: {path}")
    wrong = [f"{result.workload}: losses or gradients differ" for result in results if not result.agrees()]
    if options.at_most is not None:
        slow = [result for result in results if not result.ratio <= options.at_most]
        wrong += [f"{result.workload}: {result.ratio:.2f} is more than {options.at_most}" for result in slow]
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
