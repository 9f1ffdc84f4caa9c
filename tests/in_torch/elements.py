"""Lookup of parameter elements by their values: exporters transpose, reorder, split and join tensors."""

from __future__ import annotations

import numpy as np


class Elements:
    """The parameters of a torch record: value/NAME and gradient/NAME."""

    def __init__(self, record: dict[str, np.ndarray]) -> None:
        names = [key.removeprefix("value/") for key in record if key.startswith("value/")]
        values = np.concatenate([record[f"value/{name}"].ravel() for name in names])
        gradients = np.concatenate([record[f"gradient/{name}"].ravel() for name in names])
        self.values, which = np.unique(values, return_inverse=True)
        # Equal elements cannot be distinguished, so their gradients are summed.
        self.gradients = np.bincount(which.ravel(), gradients)
        self.largest = float(np.abs(gradients).max())
        # Number of elements with a gradient. Rows of a table without lookups may be missing in the export.
        self.reached = np.bincount(which.ravel(), gradients != 0)

    def has(self, tensor: np.ndarray) -> bool:
        """Return true if all elements belong to parameters."""
        return tensor.dtype == np.float32 and tensor.size > 0 and bool(np.isin(tensor, self.values).all())

    def summed(self, tensors: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Return the gradient of each element, in the order of `values`, from tensors and their gradients.

        Elements without a tensor are NaN. An exporter may write a weight with two uses twice, in one tensor or two: the
        gradients of all copies are summed.
        """
        total, there = np.zeros(len(self.values)), np.zeros(len(self.values), bool)
        for tensor, gradient in tensors:
            places = np.searchsorted(self.values, tensor.ravel())
            np.add.at(total, places, gradient.ravel())
            there[places] = True
        return np.where(there, total, np.nan)
