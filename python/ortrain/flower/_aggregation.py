"""Mean of the updates of clients, the same bits for every order in which the replies arrive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.flower._updates import Update, dense_update, digest_of
from ortrain.flower._values import Shapes, Values, check_values

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Aggregate", "aggregate", "mean_metrics"]

# The weights of at most 2**32 clients then have an exact sum in float64.
_MAX_EXAMPLES = 1 << 53


@dataclass
class Aggregate:
    """Mean of the accepted updates of a round."""

    trained: dict[str, npt.NDArray[Any]]
    """Trained parameters, float32; empty if no update was accepted."""
    statistics: dict[str, npt.NDArray[Any]]
    """Running statistics, float32."""
    metrics: dict[str, float]
    """Means of the metrics, weighted by examples."""
    accepted: int
    """Number of accepted updates."""
    byte_count: int
    """Bytes of the arrays of accepted updates."""
    refused: list[str]
    """A sentence for each update that was left out, in the order of the clients' names."""


@dataclass(frozen=True)
class _Accepted:
    digest: bytes
    weight: float
    trained: dict[str, npt.NDArray[Any]]
    statistics: Values
    metrics: Mapping[str, float]
    byte_count: int


def aggregate(updates: Sequence[Update], base: Values, trained: Shapes, frozen: Shapes) -> Aggregate:
    """Return the mean of the updates, weighted by their numbers of examples.

    Sums are float64, in the order of the hashes of the updates. They depend neither on the order of the replies nor
    on the names that Flower draws for the nodes. An update that does not fit is left out with a sentence.

    Args:
        updates: the replies, in any order.
        base: the trained parameters that the server sent, float32.
        trained: shapes of the trained parameters.
        frozen: shapes of the others; running statistics are among them.

    """
    accepted: list[_Accepted] = []
    refused = []
    for update in updates:
        try:
            accepted.append(_accepted(update, base, trained, frozen))
        except InvalidArgumentError as error:
            refused.append(f"{update.client}: {error}")
    accepted.sort(key=lambda each: each.digest)
    if not accepted:
        return Aggregate({}, {}, {}, 0, 0, sorted(refused))
    statistics = sorted({name for each in accepted for name in each.statistics})
    return Aggregate(
        trained={name: _mean([(each.weight, each.trained[name]) for each in accepted]) for name in trained},
        statistics={
            name: _mean([(each.weight, each.statistics[name]) for each in accepted if name in each.statistics])
            for name in statistics
        },
        metrics=mean_metrics([(each.weight, each.metrics) for each in accepted]),
        accepted=len(accepted),
        byte_count=sum(each.byte_count for each in accepted),
        refused=sorted(refused),
    )


def _accepted(update: Update, base: Values, trained: Shapes, frozen: Shapes) -> _Accepted:
    examples = update.examples
    if isinstance(examples, bool) or not isinstance(examples, int) or not 0 < examples <= _MAX_EXAMPLES:
        raise InvalidArgumentError(f"num-examples must be an integer above 0, got {examples!r}")
    if not update.arrays:
        raise InvalidArgumentError("the reply has no arrays")
    statistics = {name: array for name, array in update.arrays.items() if name in frozen}
    check_values(statistics, frozen, complete=False)
    rest = {name: array for name, array in update.arrays.items() if name not in frozen}
    parameters = dense_update(replace(update, arrays=rest), base, trained)
    for name, array in (*parameters.items(), *statistics.items()):
        if np.abs(array).max(initial=0.0) > np.finfo(np.float32).max:
            raise InvalidArgumentError(f"parameter {name!r} exceeds float32")
    return _Accepted(digest_of(update), float(examples), parameters, statistics, update.metrics, update.byte_count)


def _mean(weighted: Sequence[tuple[float, npt.NDArray[Any]]]) -> npt.NDArray[Any]:
    total = sum(weight for weight, _ in weighted)
    mean = np.zeros(weighted[0][1].shape)
    for weight, array in weighted:
        mean += array.astype(np.float64) * (weight / total)
    return np.asarray(mean, np.float32)


def mean_metrics(weighted: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of each metric over the clients with a finite value of it."""
    found = {}
    for name in sorted({name for _, metrics in weighted for name in metrics}):
        values = [(weight, metrics[name]) for weight, metrics in weighted if name in metrics]
        values = [(weight, value) for weight, value in values if math.isfinite(value)]
        if values:
            found[name] = sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)
    return found
