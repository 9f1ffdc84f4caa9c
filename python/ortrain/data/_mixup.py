"""Mixup: rows and labels of a batch are blended in pairs (Zhang et al., 2018)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain.data._common import generator

__all__ = ["mix"]

# Row of the random numbers of a whole batch. No row of data has this index.
_BATCH = 2**64 - 1


def mix(
    values: npt.NDArray[Any], labels: npt.NDArray[np.int64], classes: int, alpha: float, seed: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Blend each row with another one of the batch. Return the rows and the probabilities of their classes.

    Args:
        values: the rows.
        labels: the class of each row.
        classes: the number of classes.
        alpha: the parameter of the beta distribution of the shares; larger values blend more.
        seed: the seed of this batch.

    """
    rng = generator(seed, _BATCH)
    share = rng.beta(alpha, alpha, len(labels)).astype(np.float32)
    partner = rng.permutation(len(labels))
    one_hot = np.eye(classes, dtype=np.float32)[labels]
    of_rows = share.reshape(-1, *[1] * (values.ndim - 1))
    mixed = values * of_rows + values[partner] * (1 - of_rows)
    return mixed.astype(values.dtype), one_hot * share[:, None] + one_hot[partner] * (1 - share[:, None])
