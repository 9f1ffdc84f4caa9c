"""Main loop of a peer's process: it creates a session, takes turns, and reports all times.

The peer and its parent exchange lines of JSON:

1. After the import of the library and the reading of the batches, the peer sends `{"ready": true}`. From then on
   the parent watches the peer's memory.
2. The parent answers `{"first": N, "gradients": BOOL}`. The peer creates its session, runs N steps, and sends a line
   about itself: name and version, the seconds of import, creation and first step, and the losses of the N steps. If
   "gradients" is true, the line has the norms of the gradients of the first step too.
3. For each further line `SECONDS`, the peer runs steps for about this time (at least one step). It answers with a
   line: the seconds of each step. The peer ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Session:
    """Training of a workload by a library."""

    step: Callable[[int], float]
    """Runs a complete training step on the batch with this index and returns its loss."""
    gradients: Callable[[], dict[str, float]]
    """Returns the gradient norms of the first step by parameter. Called after this step."""
    optimize: Callable[[], None] | None = None
    """Runs a step of the optimizer only, for workloads that time nothing else."""


class Turns:
    """Connection to the parent.

    Create it before any import: afterwards, the libraries' output goes to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._seconds: dict[str, float] = {}

    def _say(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Context manager that records the time of a phase, for example "import" (NumPy is already imported)."""
        start = time.perf_counter()
        yield
        self._seconds[what] = time.perf_counter() - start

    def serve(self, create: Callable[[bool], Session], facts: dict[str, Any]) -> None:
        """Communicates with the parent until the input ends.

        The argument of `create` is true if gradients are requested.
        """
        self._say({"ready": True})
        asked = json.loads(sys.stdin.readline())
        with self.timed("create"):
            session = create(asked["gradients"])
        with self.timed("first_step"):
            losses = [session.step(0)]
        norms = session.gradients() if asked["gradients"] else {}
        losses += [session.step(number) for number in range(1, asked["first"])]
        self._say({"losses": losses, "gradients": norms, "seconds": self._seconds, **facts})
        number = asked["first"]
        for line in sys.stdin:
            times: list[float] = []
            if session.optimize is not None:
                # With constant gradients, the moments of zero gradients would decay to denormal numbers.
                session.step(number)
                number += 1
            now = time.perf_counter()
            end = now + float(line)
            while not times or now < end:
                if session.optimize is not None:
                    session.optimize()
                else:
                    session.step(number)
                    number += 1
                before, now = now, time.perf_counter()
                times.append(now - before)
            self._say(times)
