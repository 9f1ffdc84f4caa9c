"""24 000 damaged files in ordinary use: each is rejected by an ortrain error or works, within 4 GB and 20 s.

A signal, a hang or another error is a failure. The files are models (exported ones and node tests of ONNX), training
artifacts, checkpoints, safetensors, and files with external data (tests/mutated). A failing file is copied to
build/mutated, and its report has the seed and the number that reproduce the file: `python
tests/conform/test_mutated_files.py KIND SEED FIRST END`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path.append(str(TESTS / "mutated"))
import corpus  # noqa: E402

FILES = {"models": 12_000, "artifacts": 4_000, "checkpoints": 4_000, "safetensors": 2_000, "external": 2_000}
SEED = 23
# Limits per file: processor seconds, and elapsed seconds for a process that waits or shares the machine.
SECONDS, PATIENCE = 20.0, 120.0
FAILURE_FOLDER = TESTS.parent / "build" / "mutated"


def processor_time(process: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """Processes that use the files from `first` to `end` in order, and their failures."""

    def __init__(self, material: Path, folder: Path, kind: str, seed: int) -> None:
        self.folder, self.kind, self.seed = folder, kind, seed
        self.command = [sys.executable, str(TESTS / "mutated" / "work.py"), str(material), str(folder), kind, str(seed)]
        self.failures: list[str] = []
        self.outcomes: dict[str, int] = {}
        self.slowest = (0.0, -1, "")

    def run(self, first: int, end: int) -> None:
        variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        while first < end:
            (self.folder / "progress").unlink(missing_ok=True)
            command = [*self.command, str(first), str(end)]
            with (self.folder / "said").open("w+b") as said:
                process = subprocess.Popen(command, env=variables, stdout=said, stderr=subprocess.STDOUT)
                hang = self.watch(process)
                said.seek(0)
                words = said.read().decode(errors="replace")
            index, _, stage = self.progress()
            if process.returncode == 0 and hang is None:
                for outcome, count in json.loads(words.splitlines()[-1]).items():
                    self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count
                break
            if index < 0:
                raise RuntimeError(words)
            how = hang or f"ended with {ended(process.returncode)}"
            self.keep(index)
            self.failures.append(f"{self.kind} {self.seed} {index}, {stage}: {how}\n{words[-1500:]}")
            first = index + 1
        told = self.folder / "failures"
        for line in told.read_text().splitlines() if told.exists() else ():
            entry = json.loads(line)
            self.failures.append(f"{self.kind} {self.seed} {entry['index']}, {entry['stage']}: {entry['error']}")
        for kept in (self.folder / "kept").glob("*"):
            shutil.copytree(kept, FAILURE_FOLDER / kept.name, dirs_exist_ok=True)

    def watch(self, process: subprocess.Popen[bytes]) -> str | None:
        """Wait for the end of a process; returns the reason if this method ended the process."""
        file, since, used = -1, time.monotonic(), 0.0
        while True:
            try:
                process.wait(0.2)
                return None
            except subprocess.TimeoutExpired:
                index, _, stage = self.progress()
            spent = processor_time(process.pid)
            if index != file:
                file, since, used = index, time.monotonic(), spent
            if spent - used > self.slowest[0]:
                self.slowest = (spent - used, index, stage)
            if spent - used > SECONDS or time.monotonic() - since > PATIENCE:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return f"{spent - used:.0f} s of the processor, {time.monotonic() - since:.0f} s of the clock"

    def progress(self) -> tuple[int, float, str]:
        """Return the current file, its processor time, and the name of the current call."""
        try:
            index, spent, stage = (self.folder / "progress").read_text().split(maxsplit=2)
            return int(index), float(spent), stage.strip()
        except (FileNotFoundError, ValueError):
            return -1, 0.0, ""

    def keep(self, index: int) -> None:
        shutil.copytree(self.folder / "now", FAILURE_FOLDER / f"{self.kind}-{self.seed}-{index}", dirs_exist_ok=True)


def ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def survived(material: Path, folder: Path, kind: str, seed: int, first: int, end: int) -> Worker:
    worker = Worker(material, folder, kind, seed)
    worker.run(first, end)
    return worker


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.write(folder)
    return folder


@pytest.mark.parametrize("kind", FILES)
def test_no_file_does_harm(kind: str, material: Path, tmp_path: Path) -> None:
    worker = survived(material, tmp_path, kind, SEED, 0, FILES[kind])
    print(f"{kind}: {FILES[kind]} files; slowest: {worker.slowest}")
    for outcome, count in sorted(worker.outcomes.items()):
        print(f"  {count:6} {outcome}")
    assert not worker.failures, f"{len(worker.failures)} failures\n" + "\n".join(worker.failures[:20])
    # Some files must pass all calls, instead of being rejected at once.
    done = {outcome.split(":")[0] for outcome in worker.outcomes if outcome.endswith(": done")}
    assert len(done) >= len(worker.outcomes) // 5


def main() -> None:
    """Use some files of a kind, by hand."""
    kind, numbers = sys.argv[1], sys.argv[2:]
    arguments: Any = [int(number) for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        material, work = Path(folder) / "corpus", Path(folder) / "work"
        corpus.write(material)
        work.mkdir()
        worker = survived(material, work, kind, *arguments)
    print(json.dumps(worker.outcomes, indent=1), worker.slowest)
    print("\n\n".join(worker.failures) or "nothing failed")


if __name__ == "__main__":
    main()
