"""Schedules: formulas of PyTorch, contents of checkpoints, errors, and printing."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RECORDS, Run

from ortrain import OrtrainError, _ortrain, schedules
from ortrain.__main__ import main
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from ortrain.errors import InvalidArgumentError
from ortrain.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Function,
    InverseSquareRoot,
    Linear,
    LRScheduler,
    MultiStep,
    OneCycle,
    Polynomial,
    ReduceOnPlateau,
    Schedule,
    Step,
    Warmup,
    resume,
)

CASE = RECORDS / "mlp_adamw_ce"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 10), np.float32)
LABELS = RNG.integers(0, 5, 8)
# Tolerance of recurrences and closed forms, which differ by a few roundings of float64 per step.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
STEPS = 40


def kinds() -> dict[str, dict[str, str | None]]:
    """Return all schedules with their settings, as the core lists them."""
    return {kind.name: dict(kind.settings) for kind in _ortrain.schedule_kinds()}


def halving(t: int) -> float:
    return 0.5**t


# One schedule of each class, by name.
ONE_OF_EACH: dict[str, Schedule] = {
    type(schedule).__name__: schedule
    for schedule in (
        Constant(),
        Linear(total=7, end=0.1),
        Cosine(total=8, end=0.05, cycles=2),
        CosineRestarts(first=2, growth=2, end=0.1),
        Polynomial(total=7, power=1.7, end=0.02),
        Exponential(gamma=0.83),
        Step(every=2, gamma=0.3),
        MultiStep([2, 5], gamma=0.3),
        OneCycle(total=9),
        InverseSquareRoot(scale=3),
        ReduceOnPlateau(factor=0.3, patience=0, cooldown=1),
        Function(halving),
        Warmup(steps=3, then=Cosine(total=9), start=0.1),
    )
}


# The list.


def test_the_classes_are_those_of_the_core() -> None:
    assert list(ONE_OF_EACH) == list(kinds())
    classes = {kind.__name__ for kind in Schedule.__subclasses__()}
    assert classes == set(kinds())
    assert classes <= set(schedules.__all__)


@pytest.mark.parametrize("name", kinds())
def test_settings_and_defaults_are_those_of_the_core(name: str) -> None:
    signature = inspect.signature(getattr(schedules, name).__init__)
    found = {
        key: None if parameter.default is inspect.Parameter.empty else parameter.default
        for key, parameter in signature.parameters.items()
        if key not in ("self", "function")
    }
    # The core spells booleans in lower case.
    wanted = {key: None if text is None else eval(text.capitalize()) for key, text in kinds()[name].items()}
    assert found == wanted


# The formulas, written as PyTorch and transformers compute them.


def chained(first: float, then: Callable[[int, float], float]) -> list[float]:
    """Return factors of a recurrence: each factor follows from the previous one."""
    factors = [first]
    for t in range(1, STEPS):
        factors.append(then(t, factors[-1]))
    return factors


def cosine_restarts(first: int, growth: int, end: float) -> Iterator[float]:
    """Yield the factors of CosineAnnealingWarmRestarts.step()."""
    current, period = 0, first
    while True:
        yield end + (1 - end) * (1 + math.cos(math.pi * current / period)) / 2
        current += 1
        if current >= period:
            current, period = current - period, period * growth


def one_cycle(total: int, rise: float, start: float, final: float) -> list[float]:
    """Return factors of OneCycleLR with max_lr=1, anneal_strategy="cos". It ends at `total`; ours stays constant."""

    def anneal(a: float, b: float, share: float) -> float:
        return b + (a - b) / 2 * (math.cos(math.pi * share) + 1)

    first, last = 1 / start, 1 / start / final
    peak = rise * total - 1
    factors = []
    for t in range(total):
        if t <= peak:
            factors.append(anneal(first, 1, t / peak))
        else:
            factors.append(anneal(1, last, (t - peak) / (total - 1 - peak)))
    return factors + [factors[-1]] * (STEPS - total)


def closed(formula: Callable[[int], float]) -> list[float]:
    return [formula(t) for t in range(STEPS)]


FORMULAS: list[tuple[Schedule, list[float]]] = [
    (Constant(), [1.0] * STEPS),
    # LinearLR(start_factor=0.25, end_factor=0.9, total_iters=20).
    (
        Linear(total=20, start=0.25, end=0.9),
        chained(0.25, lambda t, f: f if t > 20 else f * (1 + 0.65 / (20 * 0.25 + (t - 1) * 0.65))),
    ),
    # CosineAnnealingLR(T_max=25, eta_min=0.1), up to T_max.
    (
        Cosine(total=25, end=0.1),
        chained(
            1.0,
            lambda t, f: (
                0.1
                if t >= 25
                else (1 + math.cos(math.pi * t / 25)) / (1 + math.cos(math.pi * (t - 1) / 25)) * (f - 0.1) + 0.1
            ),
        ),
    ),
    # get_cosine_with_hard_restarts_schedule_with_warmup(0, 32, num_cycles=4); powers of two avoid rounding.
    (
        Cosine(total=32, cycles=4),
        closed(lambda t: 0.0 if t >= 32 else 0.5 * (1 + math.cos(math.pi * ((4 * (t / 32)) % 1)))),
    ),
    (CosineRestarts(first=5, end=0.2), [f for f, _ in zip(cosine_restarts(5, 1, 0.2), range(STEPS), strict=False)]),
    (CosineRestarts(first=4, growth=3), [f for f, _ in zip(cosine_restarts(4, 3, 0.0), range(STEPS), strict=False)]),
    # PolynomialLR(total_iters=30, power=2.5).
    (
        Polynomial(total=30, power=2.5),
        chained(1.0, lambda t, f: 0.0 if t >= 30 else f * ((1 - t / 30) / (1 - (t - 1) / 30)) ** 2.5),
    ),
    # get_polynomial_decay_schedule_with_warmup(0, 30, lr_end=0.05, power=2) at lr=1.
    (Polynomial(total=30, power=2.0, end=0.05), closed(lambda t: 0.05 if t > 30 else 0.95 * (1 - t / 30) ** 2 + 0.05)),
    (Exponential(gamma=0.93), chained(1.0, lambda _, f: f * 0.93)),
    (Step(every=7, gamma=0.6), chained(1.0, lambda t, f: f * 0.6 if t % 7 == 0 else f)),
    (MultiStep([3, 4, 20], gamma=0.5), chained(1.0, lambda t, f: f * 0.5 if t in (3, 4, 20) else f)),
    (OneCycle(total=30), one_cycle(30, 0.3, 25.0, 1e4)),
    (OneCycle(total=17, rise=0.5, start_division=10.0, final_division=100.0), one_cycle(17, 0.5, 10.0, 100.0)),
    (InverseSquareRoot(scale=9), closed(lambda t: 1 / math.sqrt((t + 9) / 9))),
    # get_inverse_sqrt_schedule(num_warmup_steps=6, timescale=9), with a shift of 9 - 6.
    (Warmup(6, InverseSquareRoot(scale=9)), closed(lambda t: t / 6 if t < 6 else 1 / math.sqrt((t + 3) / 9))),
    # get_linear_schedule_with_warmup(8, 30), get_cosine_schedule_with_warmup(8, 30).
    (Warmup(8, Linear(total=30)), closed(lambda t: t / 8 if t < 8 else max(0.0, (30 - t) / 22))),
    (
        Warmup(8, Cosine(total=30)),
        closed(lambda t: t / 8 if t < 8 else 0.5 * (1 + math.cos(math.pi * min(1, (t - 8) / 22)))),
    ),
    # SequentialLR([LinearLR(start_factor=0.2, total_iters=5), ExponentialLR(0.9)], [5]).
    (Warmup(5, Exponential(gamma=0.9), start=0.2), closed(lambda t: 0.2 + 0.8 * t / 5 if t < 5 else 0.9 ** (t - 5))),
    (Warmup(5, MultiStep([10, 20])), closed(lambda t: t / 5 if t < 5 else 0.1 ** ((t >= 10) + (t >= 20)))),
    (Function(halving), closed(halving)),
    (Warmup(4, halving), closed(lambda t: 0.5**4 * t / 4 if t < 4 else 0.5**t)),
]


@pytest.mark.parametrize(("schedule", "expected"), FORMULAS, ids=lambda value: repr(value) if callable(value) else "")
def test_formula(schedule: Schedule, expected: list[float]) -> None:
    np.testing.assert_allclose([schedule(t) for t in range(STEPS)], expected, **CLOSE)


def test_every_schedule_without_a_memory_has_a_formula_here() -> None:
    assert {type(schedule).__name__ for schedule, _ in FORMULAS} == set(kinds()) - {"ReduceOnPlateau"}


@pytest.mark.parametrize("then", [schedule for name, schedule in ONE_OF_EACH.items() if name != "Warmup"], ids=repr)
def test_warm_up_ends_at_the_start_of_the_schedule(then: Schedule) -> None:
    warm = Warmup(2, then, start=0.5)
    top = then(2) if isinstance(then, Function) else then(0) if not isinstance(then, MultiStep) else then(2)
    np.testing.assert_allclose([warm(t) for t in range(3)], [0.5 * top, 0.75 * top, top], **CLOSE)


def test_a_linear_schedule_with_a_warm_up_is_the_linear_scheduler(run: Run) -> None:
    warm = Warmup(3, Linear(total=9))
    other = LinearLRScheduler(run.optimizer, 3, 9, 1.0)
    for t in range(12):
        assert np.float32(warm(t)) == pytest.approx(run.optimizer.get_learning_rate(), rel=1e-6)
        train(run)
        other.step()


def plateau(metrics: list[float], **settings: Any) -> list[float]:
    """Return the rates of PyTorch's ReduceLROnPlateau.step() at lr=1, eps=0."""
    s = SimpleNamespace(factor=0.1, patience=10, threshold=1e-4, cooldown=0, least=0.0, maximize=False, absolute=False)
    vars(s).update(settings)
    best, bad, cooling, rate, rates = (-math.inf if s.maximize else math.inf), 0, 0, 1.0, []
    for metric in metrics:
        if s.maximize:
            better = metric > (best + s.threshold if s.absolute else best * (1 + s.threshold))
        else:
            better = metric < (best - s.threshold if s.absolute else best * (1 - s.threshold))
        best, bad = (metric, 0) if better else (best, bad + 1)
        if cooling > 0:
            cooling, bad = cooling - 1, 0
        if bad > s.patience:
            rate, cooling, bad = max(rate * s.factor, s.least), s.cooldown, 0
        rates.append(rate)
    return rates


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 0.9, "patience": 0},
        {"factor": 0.5, "patience": 2, "cooldown": 3},
        {"factor": 0.5, "patience": 1, "least": 0.2},
        {"factor": 0.5, "patience": 1, "maximize": True, "threshold": 0.05},
        {"factor": 0.5, "patience": 1, "absolute": True, "threshold": 0.3},
        {"factor": 0.5, "patience": 1, "absolute": True, "maximize": True, "threshold": 0.3},
    ],
    ids=str,
)
def test_reduction_on_a_plateau(run: Run, settings: dict[str, Any]) -> None:
    metrics = [float(value) for value in 1 + np.round(np.random.default_rng(3).standard_normal(60), 1)]
    scheduler = LRScheduler(run.optimizer, ReduceOnPlateau(**settings), lr=1.0)
    rates = []
    for metric in metrics:
        scheduler.step(metric)
        rates.append(scheduler.get_last_lr())
    wanted = plateau(metrics, **settings)
    assert len(set(wanted)) > 2
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


# A training.


def train(run: Run) -> float:
    loss = float(run.module(X, LABELS))
    run.optimizer.step()
    run.module.lazy_reset_grad()
    return loss


def metric_of(schedule: Schedule, run: Run) -> float | None:
    """Return a metric that is constant for three steps at a time, if the schedule reads a metric."""
    return 1 / (1 + run.optimizer.step_count // 3) if "ReduceOnPlateau" in repr(schedule) else None


def parameters_of(run: Run) -> bytes:
    return b"".join(parameter.data.tobytes() for _, parameter in run.state.parameters)


RESUMED = [
    *ONE_OF_EACH.values(),
    Warmup(2, ReduceOnPlateau(factor=0.7, patience=0)),
    Warmup(2, halving, start=0.3),
    Warmup(2, OneCycle(total=9)),
]


@pytest.mark.parametrize("moment", ["between the steps of optimizer and scheduler", "after both"])
@pytest.mark.parametrize("schedule", RESUMED, ids=repr)
def test_a_training_goes_on_bit_for_bit(schedule: Schedule, moment: str, tmp_path: Path) -> None:
    """A run that is saved and loaded at each step has the bits of an uninterrupted run."""

    def killed(run: Run) -> tuple[Run, LRScheduler]:
        CheckpointState.save_checkpoint(run.state, tmp_path / "checkpoint", include_optimizer_state=True)
        again = Run(CASE, str(tmp_path / "checkpoint"))
        scheduler = resume(again.optimizer, schedule._function)
        assert (again.optimizer.step_count, scheduler.schedule) == (run.optimizer.step_count, schedule)
        return again, scheduler

    whole, parts = Run(CASE), Run(CASE)
    whole_scheduler = LRScheduler(whole.optimizer, schedule, lr=0.03)
    scheduler = LRScheduler(parts.optimizer, schedule, lr=0.03)
    rates = set()
    for _ in range(7):
        train(whole)
        whole_scheduler.step(metric_of(schedule, whole))
        rates.add(whole_scheduler.get_last_lr())

        train(parts)
        if moment.startswith("between"):
            parts, scheduler = killed(parts)
        scheduler.step(metric_of(schedule, parts))
        if moment.startswith("after"):
            parts, scheduler = killed(parts)
        assert scheduler.get_last_lr() == whole_scheduler.get_last_lr()
    assert isinstance(schedule, Constant) or len(rates) > 1
    assert parameters_of(parts) == parameters_of(whole)


def test_new_scheduler_counts_completed_steps(run: Run) -> None:
    train(run)
    train(run)
    scheduler = LRScheduler(run.optimizer, Exponential(gamma=0.5), lr=0.8)
    assert scheduler.get_last_lr() == np.float32(0.2)
    run.optimizer.set_learning_rate(7.0)
    scheduler.step()
    assert scheduler.get_last_lr() == np.float32(0.2)
    assert repr(scheduler) == "LRScheduler(Exponential(gamma=0.5), lr=0.8)"


def test_a_rate_is_rounded_once(run: Run) -> None:
    scheduler = LRScheduler(run.optimizer, Linear(total=3), lr=0.1)
    train(run)
    scheduler.step()
    assert scheduler.get_last_lr() == np.float32(np.float64(np.float32(0.1)) * (1 - 1 / 3))


def test_steps_are_counted(run: Run) -> None:
    assert run.optimizer.step_count == 0
    train(run)
    assert run.optimizer.step_count == 1
    with pytest.raises(AttributeError):
        run.optimizer.step_count = 3  # type: ignore[misc]


# Contents of a checkpoint.


def test_a_checkpoint_without_a_schedule_has_none_to_resume() -> None:
    run = Run(CASE)
    with pytest.raises(OrtrainError) as error:
        resume(run.optimizer)
    assert str(error.value) == (
        "the state has no schedule to resume; save it with its optimizer state while a scheduler exists,"
        " or make a new scheduler"
    )


def test_a_checkpoint_of_the_reference_takes_a_schedule() -> None:
    """A schedule continues from the three steps and the moments of a checkpoint of the reference."""
    state = CheckpointState.load_checkpoint(RECORDS / "checkpoint_resume" / "checkpoint_step3_optim")
    folder = RECORDS / "checkpoint_resume"
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    assert optimizer.step_count == 3
    with pytest.raises(OrtrainError, match="the state has no schedule to resume"):
        resume(optimizer)
    assert LRScheduler(optimizer, Linear(total=4), lr=1.0).get_last_lr() == 0.25


def test_linear_scheduler_must_be_created_again(tmp_path: Path) -> None:
    run = Run(CASE)
    LinearLRScheduler(run.optimizer, 2, 10, 0.5)
    CheckpointState.save_checkpoint(run.state, tmp_path / "checkpoint", include_optimizer_state=True)
    with pytest.raises(OrtrainError) as error:
        resume(Run(CASE, str(tmp_path / "checkpoint")).optimizer)
    assert str(error.value) == (
        "the learning rates of this state came from a LinearLRScheduler; make it again, with warmup_step_count=2, "
        "total_step_count=10, initial_lr=0.5"
    )


def test_function_must_be_passed_again(tmp_path: Path) -> None:
    run = Run(CASE)
    LRScheduler(run.optimizer, Warmup(2, halving), lr=0.5)
    with pytest.raises(InvalidArgumentError) as error:
        resume(run.optimizer)
    assert str(error.value) == (
        "the schedule of the checkpoint, Warmup(steps=2, then=Function(), start=0.0), has a Python function, which "
        "a checkpoint cannot store; pass the function: resume(optimizer, function)"
    )
    LRScheduler(run.optimizer, Constant(), lr=0.5)
    with pytest.raises(InvalidArgumentError, match="has no function; call resume"):
        resume(run.optimizer, halving)


def test_a_checkpoint_has_the_size_it_had(tmp_path: Path) -> None:
    """The schedule adds a few bytes to a part that onnxruntime-training does not read; tensors keep their offsets."""
    run = Run(CASE)
    run.state.properties["epoch"] = 3
    sizes = []
    for schedule in (None, Constant(), Warmup(2, ReduceOnPlateau())):
        if schedule is not None:
            LRScheduler(run.optimizer, schedule, lr=0.001)
        CheckpointState.save_checkpoint(run.state, tmp_path / "checkpoint", include_optimizer_state=True)
        sizes.append((tmp_path / "checkpoint").stat().st_size)
        assert dict(CheckpointState.load_checkpoint(tmp_path / "checkpoint").properties) == {"epoch": 3}
    assert max(sizes) - sizes[0] < 400


def test_command_shows_the_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(CASE)
    path = tmp_path / "checkpoint"
    for make, text in (
        (
            lambda: LRScheduler(run.optimizer, Warmup(2, halving), lr=0.003),
            "LRScheduler(Warmup(steps=2, then=Function()",
        ),
        (
            lambda: LinearLRScheduler(run.optimizer, 2, 10, 0.5),
            "LinearLRScheduler(warmup_step_count=2, total_step_count=10",
        ),
    ):
        make()
        CheckpointState.save_checkpoint(run.state, path, include_optimizer_state=True)
        main(["checkpoint", str(path)])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("scheduler"))
        assert line.partition("  ")[2].strip().startswith(text)


# Errors.


class FunctionError(Exception):
    pass


def raises(t: int) -> float:
    raise FunctionError


@pytest.mark.parametrize(
    ("function", "kind", "sentence"),
    [
        (
            lambda t: math.nan,
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be finite and at least 0, got nan",
        ),
        (
            lambda t: math.inf,
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be finite and at least 0, got inf",
        ),
        (
            lambda t: -0.5,
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be finite and at least 0, got -0.5",
        ),
        (
            lambda t: None,
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be a number, got NoneType",
        ),
        (
            lambda t: np.ones(1),
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be a number, got ndarray",
        ),
        (
            lambda t: "1",
            InvalidArgumentError,
            "the result of the schedule's function for step 0 must be a number, got str",
        ),
        (lambda: 1.0, TypeError, "takes 0 positional arguments"),
        (raises, FunctionError, ""),
    ],
)
def test_functions_without_a_valid_factor(run: Run, function: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as error:
        LRScheduler(run.optimizer, function, lr=0.5)
    assert sentence in str(error.value)
    assert run.optimizer.get_learning_rate() == np.float32(0.001)
    with pytest.raises(OrtrainError, match="the state has no schedule"):
        resume(run.optimizer)


def test_a_function_that_fails_later_leaves_the_rate(run: Run) -> None:
    scheduler = LRScheduler(run.optimizer, lambda t: 1.0 if t == 0 else math.nan, lr=0.5)
    train(run)
    with pytest.raises(InvalidArgumentError, match="for step 1 must be finite and at least 0, got nan"):
        scheduler.step()
    assert scheduler.get_last_lr() == 0.5


@pytest.mark.parametrize("factor", [1, True, np.float32(0.5), np.int64(2), np.float64(0.25)])
def test_numbers_of_every_kind_are_factors(run: Run, factor: Any) -> None:
    assert LRScheduler(run.optimizer, lambda t: factor, lr=0.5).get_last_lr() == 0.5 * float(factor)


# Settings, and the end of the message.
WRONG: list[tuple[Callable[[], Schedule], str]] = [
    (lambda: Linear(total=0), "total of Linear must be 1 or more, got 0"),
    (lambda: Linear(total=-5), "total of Linear must be 1 or more, got -5"),
    (lambda: Linear(total=2.5), "total of Linear must be a whole number, got 2.5"),  # type: ignore[arg-type]
    (lambda: Linear(total=2**70), "total of Linear must be a whole number, got 1.1805916207174113e21"),
    (
        lambda: Linear(total=5, end=math.nan),
        "end of Linear must be a finite number that is not negative, got NaN",
    ),
    (lambda: Cosine(total=5, end=-1), "end of Cosine must be a finite number that is not negative, got -1.0"),
    (lambda: Cosine(total=5, cycles=0), "cycles of Cosine must be 1 or more, got 0"),
    (lambda: CosineRestarts(first=3, growth=0), "growth of CosineRestarts must be 1 or more, got 0"),
    (
        lambda: Polynomial(total=5, power=math.inf),
        "power of Polynomial must be a finite number that is not negative, got inf",
    ),
    (lambda: Exponential(gamma=-0.9), "gamma of Exponential must be a finite number above 0, got -0.9"),
    (lambda: Exponential(gamma=math.nan), "gamma of Exponential must be a finite number above 0, got NaN"),
    (lambda: Step(every=0), "every of Step must be 1 or more, got 0"),
    (
        lambda: MultiStep([]),
        "milestones of MultiStep must be increasing steps, the first at least 1, got []",
    ),
    (
        lambda: MultiStep([9, 3]),
        "milestones of MultiStep must be increasing steps, the first at least 1, got [9, 3]",
    ),
    (lambda: OneCycle(total=9, rise=1.5), "rise of OneCycle must be a number from 0 to 1, got 1.5"),
    (lambda: InverseSquareRoot(scale=0), "scale of InverseSquareRoot must be 1 or more, got 0"),
    (
        lambda: ReduceOnPlateau(factor=1.0),
        "factor of ReduceOnPlateau must be a number between 0 and 1, got 1.0",
    ),
    (lambda: ReduceOnPlateau(patience=-1), "patience of ReduceOnPlateau must be 0 or more, got -1"),
    (lambda: Warmup(-1, Constant()), "steps of Warmup must be 0 or more, got -1"),
    (lambda: Warmup(2, Constant(), start=2.0), "start of Warmup must be a number from 0 to 1, got 2.0"),
    (
        lambda: Warmup(9, Linear(total=8)),
        "a warm-up of 9 steps is longer than the training of 8; the total of Linear includes the warm-up",
    ),
    (
        lambda: Warmup(9, MultiStep([8])),
        "milestone 8 is in the warm-up of 9 steps; milestones count from the first step",
    ),
    (lambda: Warmup(1, Warmup(1, Constant())), "a warm-up cannot contain another warm-up; merge them into one"),
]


@pytest.mark.parametrize(("make", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_settings_that_make_no_sense(make: Callable[[], Schedule], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make()
    assert str(error.value).startswith(sentence)


def test_numpy_settings_are_accepted() -> None:
    assert MultiStep(np.array([3, 5])) == MultiStep((3, 5))
    assert Linear(total=np.int64(4), end=np.float64(0.5))(np.int64(2)) == 0.75


def test_things_of_another_type(run: Run) -> None:
    with pytest.raises(TypeError, match=r"total of Linear must be a number, .*, got '9' \(str\)"):
        Linear(total="9")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="then must be a schedule or a function from steps to a factor, got int"):
        Warmup(3, 5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="schedule must be a schedule or a function from steps to a factor, got Constant"
    ):
        LRScheduler(run.optimizer, Constant, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer must be an Optimizer, got Module"):
        LRScheduler(run.module, Constant(), lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer must be an Optimizer, got Module"):
        resume(run.module)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Schedule is an abstract base class"):
        Schedule()
    with pytest.raises(TypeError, match="function must be a function from steps to a factor, got float"):
        Function(0.5)  # type: ignore[arg-type]


def test_rates_that_are_none(run: Run) -> None:
    for rate in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match="the initial learning rate must be finite"):
            LRScheduler(run.optimizer, Constant(), lr=rate)
    scheduler = LRScheduler(run.optimizer, Exponential(gamma=1e30), lr=1e30)
    train(run)
    with pytest.raises(InvalidArgumentError) as error:
        scheduler.step()
    assert str(error.value) == (
        "Exponential(gamma=1e30) makes the learning rate inf after 1 steps, but a rate must be finite"
    )
    assert scheduler.get_last_lr() == np.float32(1e30)


def test_metrics(run: Run) -> None:
    scheduler = LRScheduler(run.optimizer, ReduceOnPlateau(patience=0), lr=0.5)
    with pytest.raises(InvalidArgumentError, match="needs a metric, and none was given"):
        scheduler.step()
    for metric in (math.nan, math.inf):
        with pytest.raises(
            InvalidArgumentError, match=f"the metric must be a finite number, got {str(metric).replace('nan', 'NaN')}"
        ):
            scheduler.step(metric)
    with pytest.raises(InvalidArgumentError, match="the metric must be a number, got list"):
        scheduler.step([1.0])  # type: ignore[arg-type]
    for schedule in (Constant(), Function(halving)):
        with pytest.raises(InvalidArgumentError, match="takes no metric"):
            LRScheduler(run.optimizer, schedule, lr=0.5).step(1.0)
    scheduler.step(run.module(X, LABELS))  # the result of a module is a number
    assert scheduler.get_last_lr() == 0.5


# Printing.


def test_a_schedule_prints_itself_as_a_curve() -> None:
    assert str(Warmup(steps=15, then=Linear(total=59, end=0.2))) == (
        """Warmup(steps=15, then=Linear(total=59, end=0.2, start=1.0), start=0.0)
    1 ┤             ▃▅█▇▇▆▅▄▄▃▂▁▁
      │          ▃▅███████████████▇▇▆▅▄▄▃▂▁▁
      │       ▃▅█████████████████████████████▇▇▆▅▄▄▃▂▁▁
      │    ▃▅███████████████████████████████████████████▇▇▆▅▄▄▃▂▁▁
      │ ▃▅█████████████████████████████████████████████████████████
    0 └────────────────────────────────────────────────────────────
       0                                                    step 59"""
    )
    assert str(Function(lambda t: 0.0)).splitlines()[1] == "    1 ┤"


@pytest.mark.parametrize("schedule", ONE_OF_EACH.values(), ids=repr)
def test_every_schedule_prints(schedule: Schedule) -> None:
    lines = str(schedule).splitlines()
    assert lines[0] == repr(schedule)
    assert len(lines) == 8
    assert max(map(len, lines[1:])) == 67


@pytest.mark.parametrize("schedule", ONE_OF_EACH.values(), ids=repr)
def test_copies_are_equal(schedule: Schedule) -> None:
    assert copy.deepcopy(schedule) == schedule
    again = pickle.loads(pickle.dumps(schedule))
    assert (again, hash(again)) == (schedule, hash(schedule))
    if not isinstance(schedule, Function):
        assert eval(repr(schedule), vars(schedules)) == schedule
    assert (schedule == Linear(total=12345), schedule == 5) == (False, False)


class Axes:
    """Stub of matplotlib's axes for `plot`."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, list[float]]] = []
        self.words: dict[str, str] = {}

    def plot(self, x: Any, y: list[float]) -> None:
        self.lines.append((x, y))

    def set(self, **words: str) -> None:
        self.words.update(words)

    def set_title(self, title: str, **style: object) -> None:
        self.words["title"] = title


def test_a_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = Axes()
    assert Linear(total=4).plot(ax=axes) is axes
    assert Linear(total=9).plot(steps=2, ax=axes) is axes
    assert [(list(x), y) for x, y in axes.lines] == [
        ([0, 1, 2, 3, 4], [1.0, 0.75, 0.5, 0.25, 0.0]),
        ([0, 1, 2], [1.0, 1 - 1 / 9, 1 - 2 / 9]),
    ]
    assert axes.words["ylabel"] == "factor of the learning rate"
    assert axes.words["title"] == "Linear(total=9, end=0.0, start=1.0)"
    with pytest.raises(InvalidArgumentError, match="steps must be at least 1, got 0"):
        Linear(total=4).plot(steps=0, ax=axes)
    for module in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as error:
        Linear(total=4).plot()
    assert str(error.value) == (
        "a plot needs matplotlib, which is not installed; install it, or print the schedule for a curve of text"
    )
