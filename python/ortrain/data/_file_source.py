"""Protocol of the sources that :func:`ortrain.data.open` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortrain.data._source import Source

__all__ = ["FileSource"]


class FileSource(Source, Protocol):
    """Rows of files, which :func:`ortrain.data.open` returns.

    >>> import ortrain
    >>> np.savez("digits.npz", x=x, y=labels)
    >>> source = ortrain.data.open("digits.npz")
    >>> len(source), source.describe()["kind"]
    (8, 'arrays')
    """

    @property
    def classes(self) -> Sequence[str] | None:
        r"""Name of each class, or ``None`` if the targets are no names.

        >>> import ortrain
        >>> from pathlib import Path
        >>> _ = Path("reviews.csv").write_text("words,label\n12,good\n40,bad\n")
        >>> ortrain.data.open("reviews.csv").classes
        ('bad', 'good')
        """

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row, or ``None`` if the targets are no labels.

        >>> import ortrain
        >>> np.savez("digits.npz", x=np.zeros((3, 64), np.float32), y=np.array([7, 0, 7]))
        >>> ortrain.data.open("digits.npz").labels
        array([7, 0, 7])
        """

    def row_name(self, row: int) -> str:
        """Return the name of a row for messages: a file, or its index.

        >>> import ortrain
        >>> np.savez("digits.npz", x=x, y=labels)
        >>> ortrain.data.open("digits.npz").row_name(3)
        'row 3'
        """

    def preview(self, row: int) -> Any:
        r"""Return a row for a report: a picture as PNG bytes, a text, or numbers by column.

        >>> import ortrain
        >>> from pathlib import Path
        >>> _ = Path("reviews.csv").write_text("words,label\n12,good\n40,bad\n")
        >>> ortrain.data.open("reviews.csv").preview(1)
        {'words': 40}
        """

    def describe(self) -> Mapping[str, Any]:
        """Return JSON values: kind, rows, a hash, and the settings that other data is read with.

        >>> import ortrain
        >>> np.savez("digits.npz", x=x, y=labels)
        >>> ortrain.data.open("digits.npz").describe()["settings"]
        {'target': 'y', 'columns': ['x']}
        """
