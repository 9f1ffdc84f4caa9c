"""Flower's messages: records to arrays, and back. Flower is imported at first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._extras import required
from ortrain.errors import InvalidArgumentError
from ortrain.flower._updates import Update

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "ARRAYS",
    "CONFIG",
    "FROZEN",
    "METRICS",
    "array_record",
    "arrays_of",
    "bytes_of",
    "flower",
    "reply_record",
    "update_of",
]

ARRAYS, FROZEN, CONFIG, METRICS = "arrays", "frozen", "config", "metrics"
"""Keys of the records of a message, as Flower's strategies name them; ``frozen`` is ours."""
_EXAMPLES, _FORM = "num-examples", "form"


def flower(module: str) -> Any:
    """Import a module of Flower.

    Raises:
        ImportError: if Flower is not installed.

    """
    return required(f"flwr.{module}", "flwr", "flower", "ortrain.flower")


def array_record(values: Mapping[str, npt.NDArray[Any]]) -> Any:
    """Return arrays as an ``ArrayRecord``."""
    app = flower("app")
    return app.ArrayRecord({name: app.Array(np.asarray(array)) for name, array in values.items()})


def arrays_of(record: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an ``ArrayRecord`` by name.

    Raises:
        InvalidArgumentError: if an array cannot be read.

    """
    found = {}
    for name, array in record.items():
        try:
            found[str(name)] = np.asarray(array.numpy())
        except Exception as error:
            # The bytes come from a stranger, and numpy.load raises many kinds of errors.
            reason = " ".join(str(error).split())[:200]
            raise InvalidArgumentError(f"the array {name!r} cannot be read ({reason})") from error
    return found


def bytes_of(record: Any) -> int:
    """Return the number of bytes of all arrays of a message's content."""
    return sum(len(array.data) for arrays in record.array_records.values() for array in arrays.values())


def reply_record(update: Update) -> Any:
    """Return an update as the content of a reply.

    It has one ``ArrayRecord`` and one ``MetricRecord``, as the strategies of Flower expect.
    """
    app = flower("app")
    return app.RecordDict(
        {
            ARRAYS: array_record(update.arrays),
            METRICS: app.MetricRecord({**update.metrics, _EXAMPLES: update.examples}),
            CONFIG: app.ConfigRecord({_FORM: update.form}),
        }
    )


def update_of(message: Any, client: str) -> Update:
    """Return the update in a reply.

    Raises:
        InvalidArgumentError: if the reply is an error, or its records are missing or damaged.

    """
    if message.has_error():
        reason = " ".join(str(message.error.reason).split()) or f"error {message.error.code}"
        raise InvalidArgumentError(f"the client failed: {reason[:300]}")
    content = message.content
    arrays = content.array_records.get(ARRAYS)
    metrics = content.metric_records.get(METRICS)
    if not arrays or metrics is None:
        raise InvalidArgumentError("the reply has no arrays or no metrics")
    config = content.config_records.get(CONFIG) or {}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    numbers.pop(_EXAMPLES, None)
    form = str(config.get(_FORM, "values"))
    return Update(arrays_of(arrays), metrics.get(_EXAMPLES, 0), form, numbers, client, bytes_of(content))
