"""Numbers of a distributed training: coordinates and groups of ranks, the division of ZeRO, and the sum of Adasum.

The functions give the same numbers as the ranks of onnxruntime-training. They communicate nothing.

>>> from ortrain.trainer.distributed import Topology
>>> topology = Topology(4, horizontal_parallel_size=2)
>>> topology.data_parallel_size, topology.data_group(1), topology.horizontal_group(1)
(2, [1, 3], [0, 1])
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ortrain.errors import InvalidArgumentError

__all__ = ["Coordinates", "Topology", "ZeroPartition", "adasum", "zero_partition"]

# The part of each rank begins at a multiple of this number of elements.
_ALIGNMENT = 32
# Squared norm below which a vector counts as zero: the square root of the smallest normal float64.
_ZERO_NORM = math.sqrt(np.finfo(np.float64).tiny)


class Coordinates(NamedTuple):
    """Position of a rank in the three groups that it belongs to.

    >>> from ortrain.trainer.distributed import Coordinates
    >>> Coordinates(horizontal=1, data=0, pipeline=2).pipeline
    2
    """

    horizontal: int
    """Index in the horizontal group, which divides each tensor."""
    data: int
    """Index in the data group, which divides each batch."""
    pipeline: int
    """Index of the pipeline stage, which divides the layers."""


@dataclass(frozen=True, init=False)
class Topology:
    """Arrangement of ranks in a grid. The horizontal index varies fastest, the pipeline stage slowest.

    Args:
        world_size: number of ranks.
        horizontal_parallel_size: ranks that share each tensor.
        data_parallel_size: ranks that share each batch; ``None`` for all ranks that the other sizes leave.
        pipeline_parallel_size: number of pipeline stages.

    Raises:
        InvalidArgumentError: a ``ValueError``, for a size below 1, and for sizes with a product other than
            ``world_size``.
        TypeError: for a size that is not an integer.

    Source: ``DistributedRunContext`` of onnxruntime-training 1.15.

    >>> from ortrain.trainer.distributed import Topology
    >>> topology = Topology(8, horizontal_parallel_size=2, pipeline_parallel_size=2)
    >>> topology.data_parallel_size, topology.coordinates(5)
    (2, Coordinates(horizontal=1, data=0, pipeline=1))
    >>> Topology(6, horizontal_parallel_size=4)
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: world_size must be a multiple of horizontal_parallel_size times \
pipeline_parallel_size, got 6 for 4 * 1

    """

    world_size: int
    """Number of ranks."""
    horizontal_parallel_size: int
    """Ranks that share each tensor."""
    data_parallel_size: int
    """Ranks that share each batch."""
    pipeline_parallel_size: int
    """Number of pipeline stages."""

    def __init__(
        self,
        world_size: int,
        horizontal_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int = 1,
    ) -> None:
        world = _count("world_size", world_size)
        horizontal = _count("horizontal_parallel_size", horizontal_parallel_size)
        pipeline = _count("pipeline_parallel_size", pipeline_parallel_size)
        if world % (horizontal * pipeline):
            raise InvalidArgumentError(
                "world_size must be a multiple of horizontal_parallel_size times pipeline_parallel_size, got "
                f"{world} for {horizontal} * {pipeline}"
            )
        data = world // (horizontal * pipeline)
        if data_parallel_size is not None and _count("data_parallel_size", data_parallel_size) != data:
            raise InvalidArgumentError(
                f"data_parallel_size must be {data}, got {data_parallel_size}: {world} ranks are divided by "
                f"horizontal_parallel_size {horizontal} and pipeline_parallel_size {pipeline}"
            )
        for name, size in (
            ("world_size", world),
            ("horizontal_parallel_size", horizontal),
            ("data_parallel_size", data),
            ("pipeline_parallel_size", pipeline),
        ):
            object.__setattr__(self, name, size)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the position of a rank in its groups.

        Raises:
            InvalidArgumentError: for a rank below 0, or not below ``world_size``.
            TypeError: for a rank that is not an integer.

        >>> from ortrain.trainer.distributed import Topology
        >>> Topology(4, horizontal_parallel_size=2).coordinates(3)
        Coordinates(horizontal=1, data=1, pipeline=0)

        """
        rank = _index("rank", rank)
        if not 0 <= rank < self.world_size:
            raise InvalidArgumentError(f"rank must be from 0 to {self.world_size - 1}, got {rank}")
        rest, horizontal = divmod(rank, self.horizontal_parallel_size)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinates(horizontal, data, pipeline)

    def data_group(self, rank: int) -> list[int]:
        """Returns the ranks that share each batch with a rank, in rising order.

        Raises:
            InvalidArgumentError: for a rank below 0, or not below ``world_size``.
            TypeError: for a rank that is not an integer.

        >>> from ortrain.trainer.distributed import Topology
        >>> Topology(4, horizontal_parallel_size=2).data_group(3)
        [1, 3]

        """
        return self._group(rank, "data")

    def horizontal_group(self, rank: int) -> list[int]:
        """Returns the ranks that share each tensor with a rank, in rising order.

        Raises:
            InvalidArgumentError: for a rank below 0, or not below ``world_size``.
            TypeError: for a rank that is not an integer.

        >>> from ortrain.trainer.distributed import Topology
        >>> Topology(4, horizontal_parallel_size=2).horizontal_group(3)
        [2, 3]

        """
        return self._group(rank, "horizontal")

    def pipeline_group(self, rank: int) -> list[int]:
        """Returns the ranks of a pipeline with a rank, in the order of the stages.

        Raises:
            InvalidArgumentError: for a rank below 0, or not below ``world_size``.
            TypeError: for a rank that is not an integer.

        >>> from ortrain.trainer.distributed import Topology
        >>> Topology(4, pipeline_parallel_size=2).pipeline_group(3)
        [1, 3]

        """
        return self._group(rank, "pipeline")

    def _group(self, rank: int, axis: str) -> list[int]:
        """Returns the ranks that differ from a rank in one coordinate only."""
        sizes = (self.horizontal_parallel_size, self.data_parallel_size, self.pipeline_parallel_size)
        at = Coordinates._fields.index(axis)
        step = math.prod(sizes[:at])
        first = operator.index(rank) - step * self.coordinates(rank)[at]
        return list(range(first, first + step * sizes[at], step))


@dataclass(frozen=True)
class ZeroPartition:
    """Division of the optimizer state among the ranks of a data group, from :func:`zero_partition`.

    >>> from ortrain.trainer.distributed import zero_partition
    >>> zero_partition({"w": [3]}, 2)
    ZeroPartition(padded=64, chunk=32, ranks=[[('w', 0, 3)], []])
    """

    padded: int
    """Elements of all tensors, and of the padding behind them."""
    chunk: int
    """Elements of each rank, padding included."""
    ranks: list[list[tuple[str, int, int]]]
    """For each rank the ranges that it updates: name of a tensor, and its elements from ``start`` to below ``stop``."""


def zero_partition(shapes: Mapping[str, Sequence[int]], data_parallel_size: int) -> ZeroPartition:
    """Returns the division of trained tensors among the ranks of ZeRO stage 1.

    The tensors follow each other in the order of their names (as UTF-8 bytes). Padding makes the number of elements a
    multiple of ``32 * data_parallel_size``; a number that is a multiple already gets a whole block of padding. Each
    rank updates a part of equal length. A tensor across a boundary has a range on several ranks.

    Args:
        shapes: the shape of each trained tensor by its name.
        data_parallel_size: number of ranks in the data group.

    Raises:
        InvalidArgumentError: for a size below 1, and for a negative axis.
        TypeError: for a name that is not a text, and for a size or an axis that is not an integer.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020. Order and
    padding follow ``ZeROOptimizerGraphBuilder`` of onnxruntime-training 1.15.

    >>> from ortrain.trainer.distributed import zero_partition
    >>> partition = zero_partition({"bias": [10], "weight": [6, 10]}, 2)
    >>> partition.padded, partition.chunk
    (128, 64)
    >>> partition.ranks
    [[('bias', 0, 10), ('weight', 0, 54)], [('weight', 54, 60)]]

    """
    ranks = _count("data_parallel_size", data_parallel_size)
    sizes = {}
    for name, shape in shapes.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, got {type(name).__name__}")
        axes = [_index(f"the shape of {name!r}", axis) for axis in shape]
        if min(axes, default=0) < 0:
            raise InvalidArgumentError(f"the axes of {name!r} must be at least 0, got {axes}")
        sizes[name] = math.prod(axes)
    total, block = sum(sizes.values()), _ALIGNMENT * ranks
    padded = total + block - total % block
    chunk = padded // ranks
    owned: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    first = 0
    for name in sorted(sizes, key=str.encode):
        end = first + sizes[name]
        for rank in range(first // chunk, -(-end // chunk)):
            start, stop = max(first, rank * chunk), min(end, (rank + 1) * chunk)
            if start < stop:
                owned[rank].append((name, start - first, stop - first))
        first = end
    return ZeroPartition(padded, chunk, owned)


def adasum(vectors: Sequence[npt.ArrayLike]) -> npt.NDArray[Any]:
    """Returns the Adasum of vectors: their sum if they are orthogonal, and one of them if they are equal.

    Neighbours are combined in pairs, then neighbouring results, until one vector is left. A pair of ``a`` and ``b``
    becomes ``(1 - a.b / (2 * a.a)) * a + (1 - a.b / (2 * b.b)) * b``, computed in float64. A factor is 1 if the squared
    norm in its denominator is below 1.5e-154.

    Args:
        vectors: one array for each rank, a power of two in number, of one shape and one float type.

    Returns:
        An array of the shape and the type of the vectors.

    Raises:
        InvalidArgumentError: for another number of vectors, and for vectors of different shapes or types.
        TypeError: for a vector that is not of floats.

    Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2021.

    >>> from ortrain.trainer.distributed import adasum
    >>> adasum([np.array([1.0, 0.0]), np.array([0.0, 2.0])])
    array([1., 2.])
    >>> adasum([np.array([1.0, 3.0]), np.array([1.0, 3.0])])
    array([1., 3.])

    """
    arrays: list[npt.NDArray[Any]] = [np.asarray(vector) for vector in vectors]
    if not arrays or len(arrays) & (len(arrays) - 1):
        raise InvalidArgumentError(f"the number of vectors must be a power of two, got {len(arrays)}")
    for k, array in enumerate(arrays):
        if array.dtype.kind != "f":
            raise TypeError(f"vector {k} must be of floats, got {array.dtype}")
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise InvalidArgumentError(
                f"vector {k} must be {arrays[0].dtype}{list(arrays[0].shape)} like vector 0, got "
                f"{array.dtype}{list(array.shape)}"
            )
    while len(arrays) > 1:
        arrays = [_combined(a, b) for a, b in zip(arrays[::2], arrays[1::2], strict=True)]
    combined: npt.NDArray[Any] = arrays[0].copy()
    return combined


def _combined(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the Adasum of two vectors."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    # Vectors with NaN or infinity have a result with NaN or infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        dot = float(np.vdot(wide_a, wide_b))
        factors = []
        for vector in (wide_a, wide_b):
            norm = float(np.vdot(vector, vector))
            factors.append(1.0 if norm < _ZERO_NORM else 1.0 - dot / (2.0 * norm))
        return np.asarray(factors[0] * wide_a + factors[1] * wide_b).astype(a.dtype)


def _index(name: str, value: int) -> int:
    """Returns an integer as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r:.60}") from None


def _count(name: str, value: int) -> int:
    """Returns an integer of at least 1 as an int."""
    count = _index(name, value)
    if count < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {count}")
    return count
