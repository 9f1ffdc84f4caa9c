"""Time that ``Model.fit`` adds to a step of a bare loop, with metrics and a progress bar. `make bench` runs this.

Both shuffle the rows and gather each batch. ``fit`` also updates the loss, the accuracy and a bar. Both take turns,
and each number is the minimum over the rounds.
"""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass

import numpy as np
import workloads

import ortrain
from ortrain.callbacks import ProgressBar

ROUNDS = 9


@dataclass(frozen=True)
class Aim:
    """Limit of the time that ``fit`` adds to a step."""

    steps: int
    microseconds: float | None = None
    share: float | None = None


AIMS = {
    "mlp_tiny": Aim(2000, microseconds=15),
    "mlp": Aim(200, share=0.02),
    "lenet": Aim(60, share=0.02),
    "bert_mini": Aim(8, share=0.02),
}


def step_seconds(name: str, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step: in a bare loop, and in ``fit``."""
    source = workloads.load(name)
    batches = [workloads.batch(name, index) for index in range(min(steps, 50))]
    batches = [batches[at % len(batches)] for at in range(steps)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    rows = len(batches[0][0])
    bare = ortrain.Model(source, loss="cross_entropy", device="cpu")
    module, optimizer = bare.module, bare.optimizer
    model = ortrain.Model(source, metrics=["accuracy"], device="cpu")
    best = [float("inf")] * 2
    generator = np.random.default_rng(0)
    for _ in range(ROUNDS):
        start = time.perf_counter()
        order = generator.permutation(len(x))
        for first in range(0, len(x), rows):
            chosen = order[first : first + rows]
            module(x[chosen], y[chosen])
            optimizer.step()
            module.lazy_reset_grad()
        middle = time.perf_counter()
        model.fit(x, y, batch_size=rows, callbacks=[ProgressBar(file=io.StringIO())])
        end = time.perf_counter()
        best = [min(best[0], (middle - start) / steps), min(best[1], (end - middle) / steps)]
    return best[0], best[1]


def main() -> None:
    """Prints a table; names of workloads as arguments choose its rows."""
    print("a step with its optimizer step: bare loop, Model.fit with accuracy and bar")
    for name in sys.argv[1:] or AIMS:
        aim = AIMS[name]
        bare, fit = step_seconds(name, aim.steps)
        more = (fit - bare) * 1e6
        limit = aim.microseconds if aim.microseconds is not None else (aim.share or 0) * bare * 1e6
        verdict = "within" if more <= limit else "ABOVE"
        print(f"  {name:10} {bare * 1e6:10.1f} µs {fit * 1e6:10.1f} µs  {more:+8.1f} µs, {verdict} {limit:.1f} µs")


if __name__ == "__main__":
    main()
