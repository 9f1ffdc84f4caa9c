"""Batches of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._ortrain import OrtDevice, OrtValue
from ortrain._public_name import public_name
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value, ort_device_to_string

__all__ = ["OrtDataLoader"]

Array = npt.NDArray[Any]


@public_name("ortrain.gradient.data_loader")
class OrtDataLoader:
    """Loader of batches of consecutive rows from arrays with the same first axis.

    Args:
        X: the features, ``(rows, ...)``.
        y: the targets, ``(rows,)`` or ``(rows, columns)``. A vector becomes a column.
        sample_weight: a weight for each row, ``(rows,)`` or ``(rows, 1)``, or ``None``.
        batch_size: the number of rows of a batch. With 0, or at least the number of rows, one batch has all rows.
        device: the device of the values: ``"cpu"`` or an :class:`~ortrain.capi.OrtDevice`.
        random_iter: True if each batch starts at a random row (``numpy.random``), so that batches may overlap.
            Otherwise, batches are consecutive, and the last batch starts earlier to have the full size.

    Raises:
        InvalidArgumentError: for arrays of different numbers of rows, for no rows, and for an unknown device.
        UnsupportedError: for a device that is not available.

    Source: ``onnxcustom.training.data_loader.OrtDataLoader``.

    >>> from ortrain.gradient.data_loader import OrtDataLoader
    >>> OrtDataLoader(x, labels, batch_size=5)
    OrtDataLoader(..., ..., batch_size=5, device='cpu')
    >>> len(OrtDataLoader(x, labels))
    8

    """

    def __init__(
        self,
        X: npt.ArrayLike,  # noqa: N803  (the name that scikit-learn's users know)
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
        batch_size: int = 20,
        device: str | OrtDevice = "cpu",
        random_iter: bool = True,
    ) -> None:
        features, labels = np.asarray(X), np.asarray(y)
        rows = _rows("X", features)
        _same_rows("y", labels, rows)
        self.batch_size = batch_size
        self.device = get_ort_device(device)
        self.random_iter = random_iter
        self.X_np: Array = np.ascontiguousarray(features)
        self.y_np: Array = np.ascontiguousarray(labels.reshape((-1, 1)) if labels.ndim == 1 else labels)
        self.w_np: Array | None = None
        if sample_weight is not None:
            weights = np.asarray(sample_weight)
            _same_rows("sample_weight", weights, rows)
            if weights.size != rows:
                raise InvalidArgumentError(
                    f"sample_weight must have one weight for each of the {rows} rows, got shape {weights.shape}"
                )
            self.w_np = np.ascontiguousarray(weights).reshape((-1,))
        self._share()

    def _share(self) -> None:
        """Creates values that share the memory of the arrays."""
        self.X_ort = numpy_to_ort_value(self.X_np, self.device)
        self.y_ort = numpy_to_ort_value(self.y_np, self.device)
        self.w_ort = None if self.w_np is None else numpy_to_ort_value(self.w_np, self.device)

    @property
    def desc(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and element type of each array.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> OrtDataLoader(x, labels).desc
        [((8, 64), dtype('float32')), ((8, 1), dtype('int64'))]
        """
        return [(array.shape, array.dtype) for array in self.data_np]

    @property
    def data_np(self) -> tuple[Array, ...]:
        """The arrays: features, labels, and weights if rows have weights.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> [array.shape for array in OrtDataLoader(x, labels).data_np]
        [(8, 64), (8, 1)]
        """
        return (self.X_np, self.y_np) if self.w_np is None else (self.X_np, self.y_np, self.w_np)

    @property
    def data_ort(self) -> tuple[OrtValue, ...]:
        """The arrays as values that share their memory.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> [value.shape() for value in OrtDataLoader(x, labels).data_ort]
        [[8, 64], [8, 1]]
        """
        return (self.X_ort, self.y_ort) if self.w_ort is None else (self.X_ort, self.y_ort, self.w_ort)

    def __len__(self) -> int:
        return len(self.X_np)

    def __repr__(self) -> str:
        return f"OrtDataLoader(..., ..., batch_size={self.batch_size!r}, device={ort_device_to_string(self.device)!r})"

    def __getstate__(self) -> dict[str, Any]:
        attribute_names = ("X_np", "y_np", "w_np", "batch_size", "random_iter")
        return {name: getattr(self, name) for name in attribute_names} | {"device": ort_device_to_string(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.device = get_ort_device(self.device)
        self._share()

    def _slices(self) -> Iterator[slice]:
        """Yields the rows of each batch."""
        rows, size = len(self), self.batch_size
        if size <= 0 or rows <= size:
            yield slice(0, rows)
            return
        for number in range(math.ceil(rows / size)):
            last = rows - size
            start = _drawn(last) if self.random_iter else min(number * size, last)
            yield slice(start, start + size)

    def iter_numpy(self) -> Iterator[tuple[Array, ...]]:
        """Yields batches as views of the arrays: features, labels, and weights if rows have weights.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> batches = OrtDataLoader(x, labels, batch_size=4, random_iter=False)
        >>> [bool((rows == x[4 * at : 4 * at + 4]).all()) for at, (rows, _) in enumerate(batches.iter_numpy())]
        [True, True]
        """
        for rows in self._slices():
            yield tuple(array[rows] for array in self.data_np)

    def iter_ortvalue(self) -> Iterator[tuple[OrtValue, ...]]:
        """Yields batches as values that share the memory of the arrays.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> batches = OrtDataLoader(x, labels, batch_size=4)
        >>> [[value.shape() for value in batch] for batch in batches.iter_ortvalue()]
        [[[4, 64], [4, 1]], [[4, 64], [4, 1]]]
        """
        for batch in self.iter_numpy():
            yield tuple(numpy_to_ort_value(array, self.device) for array in batch)

    def iter_bind(self, bind: Any, names: Sequence[str]) -> Iterator[int]:
        """Binds each batch to inputs, by address.

        Args:
            bind: the binding, with a method ``bind_input(name, device, element_type, shape, address)``.
            names: the inputs: features, label, weight if rows have weights, learning rate. The last one is not bound.

        Returns:
            An iterator over the number of rows of each batch.

        Raises:
            UnsupportedError: for a wrong number of names.

        >>> from ortrain.gradient.data_loader import OrtDataLoader
        >>> class Bound:
        ...     def bind_input(self, name, device, element_type, shape, address):
        ...         print(name, np.dtype(element_type), shape)
        >>> for rows in OrtDataLoader(x, labels, batch_size=8).iter_bind(Bound(), ["X", "label", "rate"]):
        ...     print(rows)
        X float32 (8, 64)
        label int64 (8, 1)
        8

        """
        if len(names) not in (3, 4):
            raise UnsupportedError(
                "expected 3 names (features, label, learning rate), or 4 with a weight before the learning rate, "
                f"got {len(names)}"
            )
        for batch in self.iter_numpy():
            for name, array in zip(names, batch, strict=False):
                bind.bind_input(name, self.device, array.dtype, array.shape, array.ctypes.data)
            yield len(batch[0])


def _drawn(last: int) -> int:
    """Draws a row index from 0 to ``last``, inclusive."""
    return int(np.random.randint(0, last + 1))  # noqa: NPY002  (np.random.seed is to hold)


def _rows(name: str, array: Array) -> int:
    if array.ndim == 0 or len(array) == 0:
        raise InvalidArgumentError(f"{name} must have at least one row, got shape {array.shape}")
    return len(array)


def _same_rows(name: str, array: Array, rows: int) -> None:
    if array.ndim == 0 or len(array) != rows:
        raise InvalidArgumentError(f"X has {rows} rows, but {name} has shape {array.shape}")
