"""The loop of a peer's process: takes turns, and says how long its steps took.

The peer first says a line of JSON about itself, with its first losses and the norms of its first gradients. Then, for
every line `SECONDS` that it reads, it steps for about that long (at least once) and answers with a line: the seconds of
each step. The end of the input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Turns:
    """The line to the parent. Make it first: from then on, what libraries print goes to the standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def _say(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    def serve(
        self,
        step: Callable[[int], float],
        gradients: Callable[[], dict[str, float]],
        first: int,
        facts: dict[str, Any],
    ) -> None:
        """Take turns with `step`, which is given its number and returns its loss.

        What is told at once: the `first` losses, and after the first step `gradients`, the norms by parameter.
        """
        losses = [step(0)]
        norms = gradients()
        losses += [step(number) for number in range(1, first)]
        self._say({"losses": losses, "gradients": norms, **facts})
        number = first
        for line in sys.stdin:
            times: list[float] = []
            now = time.perf_counter()
            end = now + float(line)
            while not times or now < end:
                step(number)
                number += 1
                before, now = now, time.perf_counter()
                times.append(now - before)
            self._say(times)
