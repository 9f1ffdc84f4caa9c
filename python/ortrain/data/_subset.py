"""Some rows of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain.data._common import generator
from ortrain.data._source import Batch, Source
from ortrain.errors import InvalidArgumentError

__all__ = ["Subset", "split"]


class Subset:
    """Chosen rows of a source, in their order."""

    def __init__(self, source: Source, rows: npt.NDArray[np.int64]) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes of the source."""
        return getattr(self._source, "classes", None)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row."""
        labels = getattr(self._source, "labels", None)
        return None if labels is None else labels[self._rows]

    @property
    def several_labels(self) -> bool:
        """True if a row may have several labels."""
        return bool(getattr(self._source, "several_labels", False))

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read rows by their index in the subset."""
        return self._source.take(self._rows[rows], seed, training)

    def row_name(self, row: int) -> str:
        """Return the name of a row in the source."""
        number = int(self._rows[row])
        name = getattr(self._source, "row_name", None)
        return f"row {number}" if name is None else str(name(number))

    def preview(self, row: int) -> Any:
        """Return the preview of a row of the source."""
        return self._source.preview(int(self._rows[row]))  # type: ignore[attr-defined]

    def describe(self) -> Mapping[str, Any]:
        """Return the description of the source, with the number of the chosen rows."""
        describe = getattr(self._source, "describe", dict)
        return {**describe(), "rows": len(self), "of_rows": len(self._source)}


def split(source: Source, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Split rows at random into a training part and a validation part.

    Each class gives the same share of its rows. The parts depend on the rows, the share and the seed alone.

    Args:
        source: the rows.
        share: the share of the validation part, above 0 and below 1.
        seed: the seed of the choice.

    Raises:
        InvalidArgumentError: if a part would be empty.

    >>> import ortrain
    >>> np.savez("digits.npz", x=np.zeros((20, 64), np.float32), y=np.arange(20) % 2)
    >>> train, validation = ortrain.data.split(ortrain.data.open("digits.npz"), 0.2)
    >>> len(train), len(validation)
    (16, 4)

    """
    if not 0 < share < 1:
        raise InvalidArgumentError(f"the share of the validation part must be above 0 and below 1, got {share}")
    count = len(source)
    order = generator(seed, 0).permutation(count)
    labels = getattr(source, "labels", None)
    if labels is None:
        chosen = order[: round(count * share)]
    else:
        # Rows of each class in random order; each class gives the nearest number to its share.
        by_class = [order[labels[order] == label] for label in np.unique(labels)]
        chosen = np.concatenate([rows[: round(len(rows) * share)] for rows in by_class])
    if not 0 < len(chosen) < count:
        raise InvalidArgumentError(f"a share of {share} of {count} rows leaves no row for one of the parts")
    validation = np.sort(chosen).astype(np.int64)
    return Subset(source, np.setdiff1d(np.arange(count), validation)), Subset(source, validation)
