"""Comparison of ortrain's training step with other libraries: time, memory, cold start, losses.

    make compare                                  all workloads, with the release wheel
    make compare ARGUMENTS="mlp --rounds 5"
    python benches/compare.py --help

    make compare ARGUMENTS="bert_mini --peers --memory-limit 0.6"
    make compare ARGUMENTS="bert_base --precision bf16"
    make compare ARGUMENTS="--peers --old OTHER/bin/python"     with another version of ortrain

A step is forward, cross-entropy, backward, AdamW and the reset of the gradients, from the same weights and on the same
batches. For adamw_25m only the optimizer is timed. Everything is float32, except the factors of products at another
--precision and in torch-bf16. Each library runs in its own process and environment; the first run creates the
environments. The processes take turns of about half a second. A ratio is the median over rounds of (our median step /
their median step), because absolute times from different minutes are not comparable on a shared machine. A ratio below
1 means that ours is faster. The first losses and gradients are compared too: the run fails if a library computes
another function. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import workloads
from report import Limits, Measured, Startup, Workload

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import environments  # noqa: E402  (found in tests/)

PEERS = Path(__file__).resolve().parent / "peers"
RESULTS = Path(__file__).resolve().parent / "results"
# Number of steps with compared losses, each on its own batch.
FIRST_LOSSES = 20
# Number of steps with observed memory. Later steps allocate nothing new.
WATCHED_STEPS = 4
# Interval between two memory measurements, in seconds.
LOOK = 1e-3


def without_images(workload: str) -> bool:
    """Returns true if the workload has no images, so that there is no image layout to choose."""
    return not workload.startswith(("lenet", "mobilenet", "resnet"))


def with_frozen_statistics(workload: str) -> bool:
    """Returns true if onnxruntime-training computes another function: it ignores the frozen statistics."""
    return workload == "mobilenetv2_224_head"


@dataclass(frozen=True)
class Peer:
    """A library in the comparison: a script in peers/ with the protocol of turns.py, and its interpreter."""

    name: str
    serve: tuple[str, ...]
    """Script and first arguments. The workload folder, the own folder and the thread count follow."""
    python: Callable[[], Path]
    """Interpreter of the peer's environment, which is created if missing."""
    make: tuple[str, ...] = ()
    """Script and first arguments that prepare the own folder."""
    excludes: Callable[[str], bool] = lambda _: False
    """True for workloads without this peer."""
    more: tuple[str, ...] = ()
    """Arguments of the script after the thread count."""
    precision: str = "f32"
    """Precision of the factors of products."""

    def command(self, what: tuple[str, ...], *arguments: object) -> list[str]:
        """Returns a command line for the peer's interpreter."""
        return [str(self.python()), str(PEERS / what[0]), *what[1:], *map(str, arguments)]


def on_device(name: str, short: str, python: Callable[[], Path], **more: Any) -> Peer:
    """Returns a peer with the on-device API."""
    return Peer(name, ("on_device.py", short, "serve"), python, make=("on_device.py", short, "make"), **more)


def torch(name: str, variant: str, **more: Any) -> Peer:
    """Returns a peer with a variant of PyTorch."""
    return Peer(name, ("with_torch.py", variant), environments.torch, **more)


def ours(precision: str = "f32", fallback: str = "none") -> Peer:
    """Returns ortrain as a peer, at a precision."""
    name = "ortrain" if precision == "f32" else f"ortrain-{precision}"
    return on_device(name, "ortrain", lambda: Path(sys.executable), more=(precision, fallback), precision=precision)


OURS = ours()
OTHERS = {
    peer.name: peer
    for peer in [
        OURS,
        on_device("onnxruntime-training", "onnxruntime", environments.oracle, excludes=with_frozen_statistics),
        torch("torch", "eager"),
        torch("torch-channels-last", "channels-last", excludes=without_images),
        torch("torch-compile", "compile"),
        torch("torch-bf16", "bf16", precision="bf16"),
        torch("torch-bf16-channels-last", "bf16+channels-last", precision="bf16", excludes=without_images),
        Peer("jax", ("with_jax.py",), environments.jax),
    ]
}
# ortrain with a memory limit: the step may use only a fraction of its arena.
LIMITED = "ortrain-limited"


def within(share: float) -> Peer:
    """Returns the peer ``LIMITED``."""
    return on_device(LIMITED, f"ortrain@{share}", lambda: Path(sys.executable))


# Another version of ortrain, in its own environment.
OLD = "ortrain-old"


def old(python: Path) -> Peer:
    """Returns the peer ``OLD``."""
    return on_device(OLD, "ortrain", lambda: python)


PRECISIONS = ("f32", "bf16", "bf16x3", "bf16x6")
DEFAULT = ["onnxruntime-training", "torch", "torch-channels-last", "jax"]
# Default peers for ortrain at another precision than float32.
DEFAULT_BF16 = ["onnxruntime-training", "ortrain", "torch-bf16", "torch-bf16-channels-last"]


def peer_environment() -> dict[str, str]:
    """Returns the environment of a peer without PYTHON* and OMP_*: the scripts set the number of threads."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_"))}


class Process:
    """Running process of a peer on one workload."""

    def __init__(self, peer: Peer, folder: Path, threads: int) -> None:
        self.peer = peer
        own = folder / peer.name
        self._log = own / "log.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                peer.command(peer.serve, folder, own, threads, *peer.more),
                env=peer_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._heard()
        self.pid = self._process.pid

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.peer.name} ended: {self._log.read_text()[-4000:]}")
        return json.loads(line)

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._heard()

    def begin(self, first: int, gradients: bool = False) -> dict[str, Any]:
        """Creates the session, runs ``first`` steps, and returns the peer's report on itself and these steps."""
        facts: dict[str, Any] = self._ask(json.dumps({"first": first, "gradients": gradients}))
        return facts

    def turn(self, seconds: float) -> list[float]:
        """Runs steps for some seconds and returns the seconds of each step."""
        times: list[float] = self._ask(str(seconds))
        return times

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Watch:
    """Context manager that measures the memory of a process with data from the operating system.

    `anonymous` is the peak of RssAnon (pages that belong to no file) above the initial value, sampled every
    millisecond. `resident` is the peak of all resident pages, which the system itself records. Unknown values become
    None.
    """

    def __init__(self, pid: int) -> None:
        self.anonymous: int | None = None
        self.resident: int | None = None
        self._folder = Path(f"/proc/{pid}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        if (self._folder / "statm").exists():
            self._start, self._peak = self._now(), 0
            try:
                # Resets the peak of the resident set.
                (self._folder / "clear_refs").write_text("5")
                self._resident_start = self._status("VmRSS")
            except OSError:
                self._resident_start = 0
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
            self.anonymous = max(self._peak - self._start, 0)
            if self._resident_start:
                self.resident = max(self._status("VmHWM") - self._resident_start, 0)

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        """Returns the resident memory that is not file-backed: RssAnon of `status`, but faster to read."""
        _, resident, shared, *_ = (self._folder / "statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def _status(self, key: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
        return 0


def prepare(workload: str, peers: Sequence[Peer], folder: Path) -> None:
    """Writes the workload to a folder, and the artifacts of each peer to a subfolder."""
    workloads.write(workload, folder, FIRST_LOSSES)
    for peer in peers:
        own = folder / peer.name
        own.mkdir(exist_ok=True)
        if peer.make:
            command = peer.command(peer.make, folder, own)
            done = subprocess.run(command, env=peer_environment(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{peer.name} cannot prepare {workload}: {done.stderr[-4000:]}")


def start(peer: Peer, folder: Path, threads: int, repeats: int) -> Startup:
    """Starts a peer several times with its files in the page cache. Memory is measured at the first start."""
    found = Startup()
    for repeat in range(repeats):
        process = Process(peer, folder, threads)
        try:
            if repeat == 0:
                with Watch(process.pid) as watch:
                    facts = process.begin(WATCHED_STEPS)
                found.anonymous, found.resident = watch.anonymous, watch.resident
            else:
                facts = process.begin(1)
        finally:
            process.end()
        found.seconds.append(facts["seconds"])
    return found


def limits(folder: Path, threads: int) -> Limits:
    """Measures the current limits of the machine."""
    command = [sys.executable, str(PEERS / "limits.py"), str(folder), str(folder / OURS.name), str(threads)]
    done = subprocess.run(command, env=peer_environment(), capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def compare(workload: str, peers: Sequence[Peer], options: argparse.Namespace) -> Workload:
    """Runs ours and the other libraries in turns on a workload."""
    everybody = [options.ours, *(peer for peer in peers if not peer.excludes(workload))]
    folder: Path = options.folder / workload
    prepare(workload, everybody, folder)
    startups = [start(peer, folder, options.threads, options.starts) for peer in everybody]
    able = [limits(options.folder / "limits", options.threads)]
    processes: list[Process] = []
    try:
        facts = []
        for peer in everybody:
            processes.append(Process(peer, folder, options.threads))
            facts.append(processes[-1].begin(FIRST_LOSSES, gradients=True))
        for process in processes:
            process.turn(options.seconds / 2)  # warm-up, before the first measured turn
        medians: list[list[float]] = [[] for _ in processes]
        least = [float("inf") for _ in processes]
        for number in range(options.rounds):
            # The order alternates, so that no library always runs after the same other one.
            order = range(len(processes)) if number % 2 == 0 else reversed(range(len(processes)))
            for index in order:
                times = processes[index].turn(options.seconds)
                medians[index].append(statistics.median(times))
                least[index] = min(least[index], *times)
    finally:
        for process in processes:
            process.end()
    able.append(limits(options.folder / "limits", options.threads))
    measured = [
        Measured(
            peer.name,
            about["version"],
            rounds,
            fastest,
            about["losses"],
            about["gradients"],
            startup,
            peer.precision,
            about.get("unit"),
        )
        for peer, about, rounds, fastest, startup in zip(everybody, facts, medians, least, startups, strict=True)
    ]
    # The best of both measurements is the limit of the machine.
    best = Limits(max(limit.flops for limit in able), max(limit.bandwidth for limit in able))
    path = folder / LIMITED / "limit.json"
    limit = json.loads(path.read_text()) if any(peer.name == LIMITED for peer in peers) else None
    return Workload(workload, workloads.about(workload), best, measured[0], measured[1:], limit)


def machine(threads: int) -> dict[str, Any]:
    """Returns a description of the machine."""
    about: dict[str, Any] = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
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
        kibibytes = Path("/proc/meminfo").read_text().split()[1]
        about["memory"] = f"{int(kibibytes) / (1 << 20):.0f} GiB"
        for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index[0-9]")):
            kind = (cache / "type").read_text().strip()
            if kind != "Instruction":
                about[f"L{(cache / 'level').read_text().strip()}"] = (cache / "size").read_text().strip()
    except OSError:
        pass
    return about


def main() -> None:
    """Prints and writes the report.

    Fails if results differ or, with ``--aims`` or ``--at-most``, a target is missed.
    """
    parser = argparse.ArgumentParser(description="Compare the training step of ortrain with other libraries.")
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"workloads: {', '.join(workloads.NAMES)} (all)"
    )
    names = ", ".join(OTHERS)
    parser.add_argument("--peers", nargs="*", choices=list(OTHERS), metavar="PEER", help=f"libraries: {names}")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="f32", help="precision of ortrain's matrix products (f32)"
    )
    parser.add_argument(
        "--bf16-fallback",
        choices=["none", "avx512_bf16", "emulated"],
        default="none",
        help="unit that multiplies bfloat16 on processors without AMX (none)",
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads of each library (2)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="number of rounds; each library runs once in a round (15)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of a run in a round (0.5)")
    parser.add_argument("--starts", type=int, default=3, help="number of cold starts; the best one counts (3)")
    parser.add_argument(
        "--memory-limit", type=float, metavar="SHARE", help="also measure ortrain with this share of its arena"
    )
    parser.add_argument("--old", type=Path, metavar="PYTHON", help="interpreter with another version of ortrain")
    parser.add_argument("--at-most", type=float, metavar="RATIO", help="fail if a ratio exceeds this limit")
    parser.add_argument("--aims", action="store_true", help="fail if a target of aims.py is missed")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compare", help="folder for artifacts and logs")
    parser.add_argument("--json", type=Path, help="output file (FOLDER/results.json); the table is next to it")
    parser.add_argument("--save", metavar="NAME", help="write both to benches/results/NAME.json and .md instead")
    options = parser.parse_args()
    for name in options.workloads:
        if name not in workloads.NAMES:
            parser.error(f"unknown workload {name!r}; known workloads: {', '.join(workloads.NAMES)}")
    chosen = (DEFAULT if options.precision == "f32" else DEFAULT_BF16) if options.peers is None else options.peers
    options.ours = ours(options.precision, options.bf16_fallback)
    if options.ours.name in chosen:
        parser.error("the peer ortrain needs a --precision other than f32")

    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(report.SMALLEST, [OURS], options.folder / "limits")
    peers = [OTHERS[peer] for peer in chosen]
    if options.memory_limit is not None:
        if not 0 < options.memory_limit <= 1:
            parser.error("--memory-limit is a share: greater than 0 and at most 1")
        peers.append(within(options.memory_limit))
    if options.old is not None:
        if not options.old.exists():
            parser.error(f"the file {options.old} does not exist")
        peers.append(old(options.old.absolute()))
    run = report.Run(
        machine=machine(options.threads),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        rounds=options.rounds,
        seconds=options.seconds,
    )
    begin = time.monotonic()
    for name in options.workloads or workloads.NAMES:
        found = compare(name, peers, options)
        run.workloads.append(found)
        minutes = (time.monotonic() - begin) / 60
        print(f"{name} ({minutes:.0f} min)", *(f"{other.peer} {found.ratio(other):.2f}" for other in found.others))
        for who in (found.ours, *found.others):
            print(f"  first losses {who.peer:<21} {' '.join(f'{loss:.6f}' for loss in who.losses[:5])}", flush=True)
    text = report.text(run)
    print(f"\n{text}")
    if options.old is not None:
        ratios = [found.ratio(other) for found in run.workloads for other in found.others if other.peer == OLD]
        print(f"geometric mean of the ratios to {OLD}: {report.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")
    path = RESULTS / f"{options.save}.json" if options.save else options.json or options.folder / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_json(run), indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print(f"results: {path}")
    wrong = report.disagreements(run) + report.limit_violations(run)
    if options.at_most is not None:
        wrong += [
            f"{found.name}: ratio to {other.peer} {found.ratio(other):.2f} exceeds {options.at_most}"
            for found in run.workloads
            for other in found.others
            if not found.ratio(other) <= options.at_most
        ]
    if options.aims:
        wrong += report.missed(run)
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
