"""Messages about a step that fails: the row and the column of the value that is wrong."""

from __future__ import annotations

import numpy as np

from ortrain._fit.arrays import Column
from ortrain._fit.description import Array
from ortrain._fit.feeds import Feed, Layout, Step
from ortrain._fit.losses import SAMPLE_WEIGHT
from ortrain.errors import AnomalyError, InvalidArgumentError

__all__ = ["explained", "not_finite"]


def not_finite(loss: float, where: str, step: Step, layout: Layout, feed: Feed) -> AnomalyError | InvalidArgumentError:
    """Return the error about a loss that is not finite. A batch with NaN or infinities is the reason."""
    for name, values in zip(layout.names, step.arguments, strict=True):
        if values.dtype.kind != "f" or name == SAMPLE_WEIGHT:
            continue
        finite = np.isfinite(values[: step.rows])
        if not finite.all():
            at = np.argwhere(~finite)[0].tolist()
            found = values[tuple(at)]
            is_target = any(target.input == name for target in layout.targets)
            what = "the target" if is_target else f"input {name!r}"
            return InvalidArgumentError(
                f"{feed.row_name(step, at[0])} has {found} in {what}{_place(feed, name, at[1:])}; remove the row, or "
                "replace the value"
            )
    return AnomalyError(
        f"the loss is {loss} {where}, though the data of the batch is finite; use a smaller learning_rate, or "
        "clip_norm=1.0. The weights are those of the step before"
    )


def _place(feed: Feed, name: str, at: list[int]) -> str:
    if not at:
        return ""
    columns: list[Column] | None = getattr(feed, "_columns", None)
    column = next((each for each in columns or () if each.name == name), None)
    if len(at) == 1:
        names = None if column is None else column.names
        return f", column {names[at[0]]!r}" if names is not None else f", column {at[0]}"
    return f" at {at}"


def explained(error: InvalidArgumentError, step: Step, layout: Layout, feed: Feed) -> InvalidArgumentError:
    """Return an error of a step with the row of a label that is no class."""
    for target, position in zip(layout.targets, layout.target_positions, strict=True):
        classes = None if target.output is None else target.output.classes
        if target.kind != "labels" or classes is None:
            continue
        labels: Array = step.arguments[position][: step.rows]
        wrong = np.argwhere((labels < 0) | (labels >= classes))
        if len(wrong) and "label" in str(error):
            at = wrong[0].tolist()
            return InvalidArgumentError(
                f"{feed.row_name(step, at[0])} has the label {labels[tuple(at)]}, but there are {classes} classes, 0 "
                f"to {classes - 1}; correct the label, or give the model a new head: classes={int(labels.max()) + 1}"
            )
    return error
