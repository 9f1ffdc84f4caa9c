"""Order of the rows, and seeds of the batches: functions of the seed and a position alone."""

from __future__ import annotations

import numpy as np

from ortrain._fit.description import Array

__all__ = ["batch_seed", "permutation"]

_MASK = (1 << 64) - 1


def permutation(count: int, seed: int, pass_index: int) -> Array:
    """Return the order of the rows in a pass over the data."""
    key = np.array([seed & _MASK, pass_index & _MASK], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


def batch_seed(seed: int, step: int) -> int:
    """Return the seed of a batch, a number of 63 bits (SplitMix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) >> 1
