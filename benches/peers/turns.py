"""The loop of a peer's process: starts as it is told, takes turns, and says how long everything took.

It speaks JSON, a line at a time:

1. When the library is imported and the batches are read, the peer says `{"ready": true}`. From here on the parent
   watches its memory.
2. The parent answers `{"first": N, "gradients": BOOL}`. The peer creates its session, makes N steps, and says a line
   about itself: what it is, the seconds that import, creation and the first step took, the losses of the N steps and,
   if they are asked for, the norms of the gradients of the first one.
3. For every line `SECONDS` that follows it steps for about that long (at least once) and answers with a line: the
   seconds of each step. The end of the input ends it.
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
    """What a library made of a workload."""

    step: Callable[[int], float]
    """A whole training step on the batch of that number; its loss."""
    gradients: Callable[[], dict[str, float]]
    """The norms of the gradients of the first step, by parameter; called after it."""
    optimize: Callable[[], None] | None = None
    """A step of the optimizer alone, where nothing else is timed."""


class Turns:
    """The line to the parent. Make it first: from then on, what libraries print goes to the standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._seconds: dict[str, float] = {}

    def _say(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long this takes: "import" (NumPy is there already)."""
        start = time.perf_counter()
        yield
        self._seconds[what] = time.perf_counter() - start

    def serve(self, create: Callable[[bool], Session], facts: dict[str, Any]) -> None:
        """Speak with the parent until it is done. `create` is told whether gradients will be asked for."""
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
                # With the same gradients for ever the moments of those that are zero would fade into denormals.
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
