"""Schedules of the learning rate by name, and their schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortrain import schedules
from ortrain._fit.engine import Engine
from ortrain._fit.named import create, name_and_settings
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

__all__ = ["SCHEDULES", "scheduler_of"]

SCHEDULES: Mapping[str, type[schedules.Schedule]] = {
    "constant": schedules.Constant,
    "linear": schedules.Linear,
    "cosine": schedules.Cosine,
    "one_cycle": schedules.OneCycle,
    "polynomial": schedules.Polynomial,
    "cosine_restarts": schedules.CosineRestarts,
    "exponential": schedules.Exponential,
    "inverse_square_root": schedules.InverseSquareRoot,
    "step": schedules.Step,
    "multi_step": schedules.MultiStep,
}
"""Schedules by name. If a schedule has a total, it ends at the last step."""


def scheduler_of(engine: Engine, schedule: Any, updates: int | None, *, resumed: bool) -> tuple[Any, bool]:
    """Return the scheduler of the learning rate, and true if a metric decides.

    Args:
        engine: the engine with the optimizer.
        schedule: the argument of ``fit``.
        updates: the number of updates of the training; ``None`` if it is unknown.
        resumed: True if the state of the optimizer has the schedule.

    Raises:
        InvalidArgumentError: for an unknown name or setting, and for an unknown number of updates that a name needs.

    """
    if schedule is None:
        return None, False
    if isinstance(schedule, (str, Mapping)):
        total = None if updates is None else max(updates, 1) + (0 if resumed else engine.optimizer.step_count)
        schedule = _by_name(schedule, total)
    is_schedule = isinstance(schedule, schedules.Schedule)
    by_metric = is_schedule and schedule._native.takes() == "metric"
    if resumed:
        function = schedule._function if is_schedule else schedule
        return schedules.resume(engine.optimizer, function), by_metric
    return schedules.LRScheduler(engine.optimizer, schedule), by_metric


def _by_name(chosen: str | Mapping[str, Any], total: int | None) -> schedules.Schedule:
    name, settings = name_and_settings(chosen, "schedule")
    if name not in SCHEDULES:
        raise InvalidArgumentError(
            f"there is no schedule {name!r}; the names are {', '.join(SCHEDULES)}{hint(name, SCHEDULES)}"
        )
    steps = settings.pop("warmup", None)
    if total is None and "total" not in settings and name in ("linear", "cosine", "one_cycle", "polynomial"):
        raise InvalidArgumentError(
            f"schedule={name!r} needs the number of steps; pass steps_per_epoch, or one of ortrain.schedules"
        )
    defaults, others = {"total": total}, ["warmup"]
    schedule: schedules.Schedule = create(SCHEDULES[name], f"schedule {name!r}", settings, defaults, others)
    return schedule if steps is None else create(schedules.Warmup, "warmup", {"steps": steps, "then": schedule})
