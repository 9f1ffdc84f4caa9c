"""Validation of an estimator's arguments, and their conversion to the types and shapes of the model."""

# ruff: noqa: N803  (X is the name that scikit-learn has for a matrix)

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import sklearn
from sklearn.base import BaseEstimator
from sklearn.utils import validation

from ortrain import artifacts
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.sklearn._graphs import Array, Input

# scikit-learn 1.6 renamed this argument.
_FINITE = "ensure_all_finite" if tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 6) else "force_all_finite"
_ROWS_IN_MESSAGES = 5


def validated(estimator: BaseEstimator, X: Any, *, allow_nan: bool, **options: Any) -> Any:
    """Validate X, or X and y, with scikit-learn; X may have more than two axes, for example images."""
    options |= {"allow_nd": True, _FINITE: "allow-nan" if allow_nan else True}
    # Before scikit-learn 1.6, the check is a method.
    check = getattr(validation, "validate_data", None)
    return estimator._validate_data(X, **options) if check is None else check(estimator, X, **options)


def rows_of(X: Array, model_input: Input) -> Array:
    """Convert rows to the element type and the shape of the model input."""
    sizes = X.shape[1:]
    row = model_input.row
    if row is None or _fits(sizes, row):
        shape = sizes
    else:
        count = math.prod(sizes)
        known = math.prod(size for size in row if size is not None)
        unknown = row.count(None)
        fits = unknown <= 1 and len(sizes) == 1 and known > 0 and count % known == 0 and (unknown or count == known)
        if not fits:
            names = ", ".join("?" if size is None else str(size) for size in row)
            raise InvalidArgumentError(
                f'X has rows of shape {list(sizes)}, but the input "{model_input.name}" of the model has rows of shape '
                f"[{names}]; pass rows of that shape, or flat rows of equal size"
            )
        shape = tuple(count // known if size is None else size for size in row)
    return np.ascontiguousarray(_converted(X, model_input).reshape(len(X), *shape))


def _fits(sizes: tuple[int, ...], row: tuple[int | None, ...]) -> bool:
    return len(row) == len(sizes) and all(size in (None, there) for size, there in zip(row, sizes, strict=True))


def _converted(X: Array, model_input: Input) -> Array:
    """Convert X to the element type of the input; a conversion that changes a value is an error."""
    if X.dtype == model_input.dtype:
        return X
    with np.errstate(over="ignore", invalid="ignore"):
        converted = X.astype(model_input.dtype)
    if model_input.dtype.kind == "f":
        lost = np.isinf(converted) & np.isfinite(X)
        what = f"is too large for {model_input.dtype}"
    else:
        lost = converted != X
        what = f"cannot be represented in {model_input.dtype}"
    if lost.any():
        at = tuple(int(index) for index in np.argwhere(lost)[0])
        raise InvalidArgumentError(
            f'X has {X[at]} at {list(at)}, which {what}, the element type of the input "{model_input.name}" of the '
            "model"
        )
    return converted


def weights_of(sample_weight: Any, count: int) -> Array:
    """Return the weight of each row."""
    if sample_weight is None:
        return np.ones(count)
    try:
        weights = np.asarray(sample_weight, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"sample_weight must be an array of numbers, one for each row: {error}") from error
    if weights.ndim == 0:
        weights = np.full(count, float(weights))
    if weights.shape != (count,):
        raise InvalidArgumentError(
            f"sample_weight has the shape {list(weights.shape)}, but X has {count} rows; pass one weight for each row"
        )
    for wrong, what in ((~np.isfinite(weights), "a finite number"), (weights < 0, "at least 0")):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise InvalidArgumentError(f"the sample_weight of row {at} is {weights[at]}; each weight must be {what}")
    if not weights.any():
        raise InvalidArgumentError("every sample_weight is zero, so there is no row to train on")
    return weights


def positions_of(y: Array, classes: Array) -> Array:
    """Return the position of each label among the sorted classes."""
    positions = np.searchsorted(classes, y).clip(0, len(classes) - 1)
    unseen = np.unique(y[classes[positions] != y])
    if len(unseen):
        more = ", ..." if len(unseen) > _ROWS_IN_MESSAGES else ""
        raise InvalidArgumentError(
            f"y has the label{'' if len(unseen) == 1 else 's'} {listed(unseen)}{more}, which "
            f"{'is' if len(unseen) == 1 else 'are'} not among the classes {listed(classes)}"
        )
    return positions


def listed(values: Array) -> str:
    """Format the first values for a message."""
    shown = ", ".join(repr(value) for value in values[:_ROWS_IN_MESSAGES].tolist())
    return shown + (f", ... ({len(values)} of them)" if len(values) > _ROWS_IN_MESSAGES else "")


def _number(name: str, value: Any, fits: bool, range_: str) -> None:
    if not fits:
        raise InvalidArgumentError(f"{name} must be {range_}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def check_parameters(estimator: Any) -> None:
    """Check the numeric parameters of the constructor, and `on_epoch`."""
    largest = float(np.finfo(np.float32).max)
    rate = estimator.learning_rate
    _number("learning_rate", rate, _is_number(rate) and 0 < rate <= largest, "a positive float32")
    for name in ("max_iter", "n_iter_no_change"):
        value = getattr(estimator, name)
        _number(name, value, _is_count(value), "an integer of at least 1")
    size = estimator.batch_size
    _number("batch_size", size, size is None or _is_count(size), "an integer of at least 1, or None for all rows")
    part = estimator.validation_fraction
    _number("validation_fraction", part, _is_number(part) and 0 < part < 1, "a number between 0 and 1")
    tol = estimator.tol
    _number("tol", tol, _is_number(tol) and tol >= 0, "a number of at least 0")
    if estimator.on_epoch is not None and not callable(estimator.on_epoch):
        raise InvalidArgumentError(f"on_epoch must be a callable or None, got {estimator.on_epoch!r}")


def optimizer_of(optimizer: Any, weight_decay: Any) -> artifacts.OptimType | artifacts.AdamW | artifacts.SGD:
    """Return the optimizer that the parameters `optimizer` and `weight_decay` describe."""
    _number("weight_decay", weight_decay, _is_number(weight_decay) and weight_decay >= 0, "a number of at least 0")
    if optimizer == "adamw":
        return artifacts.AdamW(weight_decay=float(weight_decay))
    names = {"sgd": artifacts.OptimType.SGD}
    known = isinstance(optimizer, (artifacts.OptimType, artifacts.AdamW, artifacts.SGD))
    if not known and (not isinstance(optimizer, str) or optimizer not in names):
        raise InvalidArgumentError(
            "optimizer must be 'adamw', 'sgd', an artifacts.AdamW or an artifacts.SGD, got "
            f"{optimizer!r}{hint(optimizer, ['adamw', 'sgd'])}"
        )
    if weight_decay:
        raise InvalidArgumentError(
            f"weight_decay={weight_decay!r} is a setting of optimizer='adamw' and has no effect on {optimizer!r}; an "
            "artifacts.AdamW has its own weight_decay"
        )
    found: artifacts.OptimType | artifacts.AdamW | artifacts.SGD = optimizer if known else names[optimizer]
    return found
