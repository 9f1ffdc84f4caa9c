"""Learning-rate schedulers of the trainer: formulas, order of arguments, users' schedulers, bad input."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ortrain.errors import InvalidArgumentError
from ortrain.trainer import TrainStepInfo, optim
from ortrain.trainer.optim import SGDConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
    checked_rate,
)

STEPS = 10_000
SETTINGS = 1_000 if "ORTRAIN_CONFORM" in os.environ else 50
SEED = 20_232
# Tolerance relative to the rate: a cosine of up to a million radians loses this much of float64.
CLOSE = 1e-9
# Expected rates have six digits.
SIX_DIGITS = 1e-6

KINDS = (ConstantWarmupLRScheduler, CosineWarmupLRScheduler, LinearWarmupLRScheduler, PolyWarmupLRScheduler)
Array = npt.NDArray[np.float64]


def rates_of(scheduler: _LRScheduler, lr: float, steps: int) -> Array:
    info = TrainStepInfo(SGDConfig(lr=lr))
    found = []
    for t in range(steps):
        info.optimization_step = t
        found += scheduler.get_lr(info)
    return np.array(found)


def test_linear_lr_scheduler_creation() -> None:
    """F11: testLinearLRSchedulerCreation."""
    scheduler = LinearWarmupLRScheduler(10, 0.05)
    assert (scheduler.total_steps, scheduler.warmup, scheduler.get_last_lr()) == (10, 0.05, [])
    assert isinstance(scheduler, optim._LRScheduler)
    assert optim.lr_scheduler.LinearWarmupLRScheduler is optim.LinearWarmupLRScheduler


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ConstantWarmupLRScheduler, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # The second argument of two kinds is not the warm-up.
        (
            CosineWarmupLRScheduler,
            [0.0, 0.976396, 0.905984, 0.795672, 0.656304, 0.501574, 0.346690, 0.206872, 0.095862, 0.024569],
        ),
        (LinearWarmupLRScheduler, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            PolyWarmupLRScheduler,
            [0.0, 0.950902, 0.900802, 0.850701, 0.800601, 0.750501, 0.700401, 0.650301, 0.600200, 0.550100],
        ),
    ],
)
def test_lr_scheduler_update_impl(kind: Callable[[int, float], _LRScheduler], expected: list[float]) -> None:
    """F12: testLRSchedulerUpdateImpl."""
    scheduler = kind(10, 0.5)
    for t, rate in enumerate(expected):
        found = scheduler._step(TrainStepInfo(SGDConfig(lr=1), optimization_step=t))
        assert scheduler.get_last_lr() == found
        assert found == pytest.approx([rate], abs=SIX_DIGITS)


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (ConstantWarmupLRScheduler(7), {"total_steps": 7, "warmup": 0.002}),
        (ConstantWarmupLRScheduler(7, 0.25), {"total_steps": 7, "warmup": 0.25}),
        (CosineWarmupLRScheduler(7), {"total_steps": 7, "cycles": 0.5, "warmup": 0.002}),
        (CosineWarmupLRScheduler(7, 2.5, 0.25), {"total_steps": 7, "cycles": 2.5, "warmup": 0.25}),
        (LinearWarmupLRScheduler(7), {"total_steps": 7, "warmup": 0.002}),
        (LinearWarmupLRScheduler(7, 0.25), {"total_steps": 7, "warmup": 0.25}),
        (PolyWarmupLRScheduler(7), {"total_steps": 7, "lr_end": 1e-7, "power": 1.0, "warmup": 0.002}),
        (PolyWarmupLRScheduler(7, 0.5, 2.0, 0.25), {"total_steps": 7, "lr_end": 0.5, "power": 2.0, "warmup": 0.25}),
    ],
)
def test_order_of_arguments(scheduler: _LRScheduler, settings: dict[str, float]) -> None:
    assert {name: getattr(scheduler, name) for name in settings} == settings


def with_warmup(t: Array, warm: float, behind: Array) -> Array:
    return np.where(t < warm, t / max(1.0, warm), behind)


def constant(t: Array, lr: float, total: int, warmup: float) -> Array:
    return lr * with_warmup(t, warmup * total, np.ones_like(t))


def cosine(t: Array, lr: float, total: int, warmup: float, cycles: float) -> Array:
    warm = warmup * total
    progress = (t - warm) / max(1.0, total - warm)
    return lr * with_warmup(t, warm, np.maximum(0.0, (1 + np.cos(2 * np.pi * cycles * progress)) / 2))


def linear(t: Array, lr: float, total: int, warmup: float) -> Array:
    warm = warmup * total
    return lr * with_warmup(t, warm, np.maximum(0.0, (total - t) / max(1.0, total - warm)))


def poly(t: Array, lr: float, total: int, warmup: float, lr_end: float, power: float) -> Array:
    warm = warmup * total
    left = 1 - (np.minimum(t, total) - warm) / (total - warm)
    # During the warm-up, the base exceeds 1 and the result is unused.
    behind = np.where(t > total, lr_end, (lr - lr_end) * left**power + lr_end)
    return lr * with_warmup(t, warm, behind / lr)


FORMULAS: dict[type[_LRScheduler], Callable[..., Array]] = {
    ConstantWarmupLRScheduler: constant,
    CosineWarmupLRScheduler: cosine,
    LinearWarmupLRScheduler: linear,
    PolyWarmupLRScheduler: poly,
}


@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind: Callable[..., _LRScheduler]) -> None:
    """Rates equal the formula for random settings, from no warm-up to a long one, and after the last step."""
    rng = np.random.default_rng(SEED)
    t = np.arange(STEPS, dtype=np.float64)
    for at in range(SETTINGS):
        lr = float(10 ** rng.uniform(-6, 1))
        settings: dict[str, Any] = {"warmup": float(rng.choice([0.0, 1e-5, 0.002, rng.random(), 0.999]))}
        if kind is CosineWarmupLRScheduler:
            settings["cycles"] = float(rng.uniform(0.1, 8))
        if kind is PolyWarmupLRScheduler:
            settings["lr_end"], settings["power"] = (
                lr * float(rng.choice([0.0, rng.random()])),
                float(rng.uniform(0, 4)),
            )
        total = 1 + at if at < 3 else int(rng.integers(1, 2 * STEPS))
        found = rates_of(kind(total, **settings), lr, STEPS)
        expected = FORMULAS[kind](t, lr, total, **settings)
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * lr, err_msg=f"{total} steps, {settings}")


@pytest.mark.parametrize("kind", [ConstantWarmupLRScheduler, LinearWarmupLRScheduler])
def test_a_warmup_shorter_than_a_step(kind: Callable[..., _LRScheduler]) -> None:
    """Step 0 is in the warm-up, step 1 after the warm-up."""
    rates = rates_of(kind(10, warmup=0.05), 1.0, 2)
    assert rates[0] == 0.0
    assert rates[1] > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_no_warmup(kind: Callable[..., _LRScheduler]) -> None:
    assert rates_of(kind(10, warmup=0.0), 1.0, 1) == [1.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *(
            (lambda kind=kind, total=total: kind(total), f"'total_steps' must be an int of 1 or more, got {total!r}")
            for kind in KINDS
            for total in (0, -1, 10.0, "10", None, True)
        ),
        *(
            (
                lambda kind=kind, warmup=warmup: kind(10, warmup=warmup),
                f"'warmup' must be a float of 0.0 or more and below 1.0, got {warmup!r}",
            )
            for kind in KINDS
            for warmup in (-0.1, 1.0, 1.5, 0, 1, math.nan, "0.1", None)
        ),
        *(
            (
                lambda cycles=cycles: CosineWarmupLRScheduler(10, cycles),
                f"'cycles' must be a float above 0.0, got {cycles!r}",
            )
            for cycles in (0.0, -0.5, 1, math.nan, math.inf, None)
        ),
        *(
            (
                lambda lr_end=lr_end: PolyWarmupLRScheduler(10, lr_end),
                f"'lr_end' must be a float of 0.0 or more, got {lr_end!r}",
            )
            for lr_end in (-1e-7, 0, math.nan, math.inf, None)
        ),
        *(
            (
                lambda power=power: PolyWarmupLRScheduler(10, power=power),
                f"'power' must be a float of 0.0 or more, got {power!r}",
            )
            for power in (-1.0, 1, math.nan, math.inf, None)
        ),
    ],
)
def test_bad_input(make: Callable[[], _LRScheduler], text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize("lr", [0.25, 0.5])
def test_a_last_rate_that_is_not_below_the_first(lr: float) -> None:
    scheduler = PolyWarmupLRScheduler(10, lr_end=0.5)
    with pytest.raises(AssertionError) as caught:
        scheduler.get_lr(TrainStepInfo(SGDConfig(lr=lr)))
    assert str(caught.value) == f"'lr_end' (0.5) must be below the learning rate of the optimizer ({lr})"


class InSteps(_LRScheduler):
    """A user's scheduler."""

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        return [train_step_info.optimizer_config.lr * 0.5 ** (train_step_info.optimization_step // 2)]


def test_a_scheduler_of_ones_own() -> None:
    scheduler = InSteps()
    assert scheduler.get_last_lr() == []
    info = TrainStepInfo(SGDConfig(lr=1))
    found = []
    for t in range(5):
        info.optimization_step = t
        found.append(checked_rate(scheduler._step(info)))
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert scheduler.get_last_lr() == [0.25]


def test_the_base_has_no_rate() -> None:
    with pytest.raises(NotImplementedError) as caught:
        _LRScheduler()._step(TrainStepInfo(SGDConfig()))
    assert str(caught.value) == "_LRScheduler has no get_lr(train_step_info), which every scheduler needs"


@pytest.mark.parametrize(
    "rates", [[0.5], (0.5,), np.array([0.5], np.float32), [np.float32(0.5)], [np.array(0.5)], [np.array([[0.5]])[0, 0]]]
)
def test_a_rate_that_is_one(rates: Any) -> None:
    rate = checked_rate(rates)
    assert rate == 0.5
    assert type(rate) is float


@pytest.mark.parametrize("rate", [0, 1, 3.4028234663852886e38])
def test_ends_of_the_range(rate: float) -> None:
    assert checked_rate([rate]) == rate


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (None, "expected a list of 1 learning rate from the scheduler, got None"),
        (0.1, "expected a list of 1 learning rate from the scheduler, got 0.1"),
        ([], "expected 1 learning rate from the scheduler, got 0: []"),
        ([0.1, 0.2], "expected 1 learning rate from the scheduler, got 2: [0.1, 0.2]"),
        (np.array([0.5, 0.25]), "expected 1 learning rate from the scheduler, got 2: array([0.5 , 0.25])"),
        *(
            (
                [value],
                f"the learning rate from the scheduler must be a number from 0 to the largest float32, got {value!r}",
            )
            for value in (math.nan, math.inf, -math.inf, -0.1, 1e39, 10**400, "0.1", b"1", True, None, 1j, [0.1])
        ),
    ],
)
def test_a_rate_that_is_none(rates: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_rate(rates)
    assert str(caught.value) == text
