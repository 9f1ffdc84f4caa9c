"""Elements of parameters, found by their values: exporters transpose, reorder, split and join tensors."""

from __future__ import annotations

import numpy as np


class Elements:
    """What a record of torch says of parameters: value/NAME and gradient/NAME."""

    def __init__(self, record: dict[str, np.ndarray]) -> None:
        names = [key.removeprefix("value/") for key in record if key.startswith("value/")]
        values = np.concatenate([record[f"value/{name}"].ravel() for name in names])
        gradients = np.concatenate([record[f"gradient/{name}"].ravel() for name in names])
        self.values, which = np.unique(values, return_inverse=True)
        # Of those that are equal together: which is which cannot be told.
        self.gradients = np.bincount(which.ravel(), gradients)
        self.largest = float(np.abs(gradients).max())
        # How many of them get some gradient: rows of a table that are not read may be left out.
        self.reached = np.bincount(which.ravel(), gradients != 0)

    def has(self, tensor: np.ndarray) -> bool:
        """Whether all elements are those of parameters."""
        return tensor.dtype == np.float32 and tensor.size > 0 and bool(np.isin(tensor, self.values).all())

    def summed(self, tensors: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """The gradient of each element, in the order of `values`, of tensors and their gradients; NaN where none is.

        What a network uses twice an exporter may write twice, in one tensor or two: each copy has its part.
        """
        total, there = np.zeros(len(self.values)), np.zeros(len(self.values), bool)
        for tensor, gradient in tensors:
            places = np.searchsorted(self.values, tensor.ravel())
            np.add.at(total, places, gradient.ravel())
            there[places] = True
        return np.where(there, total, np.nan)
