"""A run over many seeds: numbers of comparisons, failures, and their shrunk graphs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from random_graphs.cases import Case, generate
from random_graphs.checks import Report, check
from random_graphs.shrinking import shrink
from random_graphs.workers import INVALID, Checker, Worker, check_all

# Time limit in seconds for a candidate during shrinking. A slower candidate does not count as the same failure.
SHRINK_TIMEOUT = 20.0


def default_processes() -> int:
    return max(1, min(2, os.cpu_count() or 1))


@dataclass
class Failure:
    """A failed graph, and the smallest graph with the same kind of failure."""

    seed: int
    report: Report
    smallest: Case | None = None
    path: Path | None = None


class Run:
    """Checks of many seeds in separate processes; failures are shrunk and written to files."""

    def __init__(
        self,
        processes: int,
        timeout: float,
        shrink_seconds: float,
        folder: Path | None,
        each: int = 1,
        checker: Checker = check,
        *,
        verbose: bool = True,
    ) -> None:
        self.verbose = verbose
        self.processes, self.timeout, self.shrink_seconds = processes, timeout, shrink_seconds
        self.folder, self.each, self.checker = folder, each, checker
        self.compared: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.checked = 0

    def over(self, seeds: Iterable[int], say: Callable[[str], None] = lambda line: None) -> list[Failure]:
        """Check the seeds; returns the failures in order of completion."""
        failures = []
        for seed, report in check_all(seeds, self.processes, self.timeout, self.checker):
            assert isinstance(seed, int)
            self.checked += 1
            self.compared.update(report.compared)
            self.operators.update(report.operators)
            if report.kind == INVALID:
                # Each node runs in a model of its own, but onnxruntime rejects the complete model.
                self.compared["rejected by the oracle"] += 1
                continue
            if report.kind is None:
                continue
            self.kinds[report.kind] += 1
            say(f"seed {seed}, graph {self.checked}: {report.kind}: {report.detail[:600]}")
            failure = Failure(seed, report)
            failures.append(failure)
            if self.shrink_seconds > 0 and self.kinds[report.kind] <= self.each:
                self.make_small(failure)
                if failure.smallest is not None:
                    say(
                        f"  smallest: {failure.path}\n{failure.smallest.text()}"
                        if self.verbose
                        else f"  smallest: {failure.path}: {failure.smallest.line()}"
                    )
        return failures

    def make_small(self, failure: Failure) -> None:
        worker = Worker(min(self.timeout, SHRINK_TIMEOUT), self.checker)

        def fails(case: Case) -> Case | None:
            report = worker.check(case.stored())
            if report.kind != failure.report.kind:
                return None
            return Case.restored(report.settled) if report.settled is not None else case

        try:
            failure.smallest = shrink(generate(failure.seed), fails, self.shrink_seconds)
            report = worker.check(failure.smallest.stored())
        finally:
            worker.stop()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stem = re.sub(r"\W+", "_", str(failure.report.kind))[:60].strip("_")
            failure.path = self.folder / f"{stem}-{failure.seed}.onnx"
            onnx.save(failure.smallest.model, failure.path)
            failure.path.with_suffix(".case").write_bytes(failure.smallest.stored())
            text = f"seed {failure.seed}\n{report.kind}: {report.detail}\n\n{failure.smallest.text()}\n"
            failure.path.with_suffix(".txt").write_text(text)

    def summary(self) -> str:
        lines = [f"{len(self.operators)} operators"]
        lines += [f"{count:6} {what}" for what, count in sorted(self.compared.items())]
        lines += [f"{count:6} failed: {kind}" for kind, count in self.kinds.most_common()]
        return "\n".join(lines)
