"""Protocol between data and the training loop: rows that can be read in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "Columns", "Source"]

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Arrays by name. The first axis of each array is the row of the batch."""


@dataclass(frozen=True)
class Batch:
    """Rows of a step: inputs, targets and weights.

    >>> from ortrain.data import Batch
    >>> batch = Batch({"x": x}, {"target": labels}, None)
    >>> len(batch)
    8
    """

    inputs: Columns
    """Arrays by the name of the model's input."""
    targets: Columns
    """Arrays by the name of the target; a single target is named ``target``. Empty for a prediction."""
    weights: npt.NDArray[np.float32] | None = None
    """Weight of each row; ``None`` if all rows count the same."""

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


@runtime_checkable
class Source(Protocol):
    """Rows that can be read in any order.

    A source may also have the members of :class:`FileSource`, such as ``classes`` and ``describe``.

    >>> from ortrain.data import Batch, Source
    >>> class Squares:
    ...     def __len__(self):
    ...         return 100
    ...
    ...     def take(self, rows, seed, training):
    ...         x = rows[:, None].astype(np.float32)
    ...         return Batch({"x": x}, {"target": x**2})
    >>> isinstance(Squares(), Source)
    True
    """

    def __len__(self) -> int: ...

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read rows. The result depends on the arguments alone.

        Args:
            rows: the indices of the rows.
            seed: the seed of the augmentation of this batch.
            training: True if the batch may be augmented.

        >>> import ortrain
        >>> np.savez("digits.npz", x=x, y=labels)
        >>> batch = ortrain.data.open("digits.npz").take(np.array([2, 0]), seed=0, training=True)
        >>> bool((batch.targets["target"] == labels[[2, 0]]).all())
        True

        """
