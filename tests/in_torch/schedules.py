"""Learning rates of PyTorch's schedulers as JSON, for each schedule of ortrain by its repr: ``schedules.py``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

# Number of steps, and a metric for each step.
STEPS = 40
METRICS = [1, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.9, 0.7, 0.7, 0.7, 0.7, 0.7, *[0.6] * 25]


def rates(make: Callable[[torch.optim.Optimizer], Any], *, metrics: bool = False) -> list[float]:
    """Return the rate of each step, with an initial rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for metric in METRICS:
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step(*[metric] if metrics else [])
    return found


def plateau(**settings: Any) -> list[float]:
    """Return the rates of ReduceLROnPlateau, with PyTorch's argument names."""
    return rates(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, eps=0, **settings), metrics=True)


# SequentialLR triggers a warning by its own call of a scheduler.
warnings.simplefilter("ignore")
SCHEDULES = {
    "Linear(total=20, start=0.25, end=0.9)": rates(lambda o: lr_scheduler.LinearLR(o, 0.25, 0.9, 20)),
    "Cosine(total=40, end=0.1)": rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 40, 0.1)),
    "CosineRestarts(first=5)": rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
    "CosineRestarts(first=4, growth=3, end=0.1)": rates(
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 3, 0.1)
    ),
    "Polynomial(total=30, power=2.5)": rates(lambda o: lr_scheduler.PolynomialLR(o, 30, 2.5)),
    "Exponential(gamma=0.93)": rates(lambda o: lr_scheduler.ExponentialLR(o, 0.93)),
    "Step(every=7, gamma=0.6)": rates(lambda o: lr_scheduler.StepLR(o, 7, 0.6)),
    "MultiStep(milestones=[3, 4, 20], gamma=0.5)": rates(lambda o: lr_scheduler.MultiStepLR(o, [3, 4, 20], 0.5)),
    # OneCycleLR rejects the step after the last one.
    "OneCycle(total=41)": rates(lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=STEPS + 1)),
    "OneCycle(total=45, rise=0.5, start_division=10.0, final_division=100.0)": rates(
        lambda o: lr_scheduler.OneCycleLR(
            o, 1.0, total_steps=45, pct_start=0.5, div_factor=10.0, final_div_factor=100.0
        )
    ),
    "Function(lambda t: 1 / (1 + t))": rates(lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t))),
    "Warmup(steps=5, then=Exponential(gamma=0.9), start=0.2)": rates(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.2, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
        )
    ),
    "ReduceOnPlateau(factor=0.5, patience=1)": plateau(patience=1),
    "ReduceOnPlateau(factor=0.5, patience=2, cooldown=3)": plateau(patience=2, cooldown=3),
    "ReduceOnPlateau(factor=0.5, patience=1, least=0.25)": plateau(patience=1, min_lr=0.25),
    "ReduceOnPlateau(factor=0.5, patience=1, threshold=0.05, maximize=True)": plateau(
        patience=1, threshold=0.05, mode="max"
    ),
    "ReduceOnPlateau(factor=0.5, patience=1, threshold=0.15, absolute=True)": plateau(
        patience=1, threshold=0.15, threshold_mode="abs"
    ),
}
print(json.dumps({"metrics": METRICS, "schedules": SCHEDULES}))
