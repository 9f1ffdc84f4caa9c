"""Scales, ranges and clipped weights of quantized models.

>>> largest_share = max((tensor.clipped or 0.0 for tensor in module.quantization()), default=0.0)
>>> largest_share
0.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain import _ortrain

__all__ = ["QuantizedTensor"]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Tensor of a model that integers stand for, as :meth:`Module.quantization` returns it.

    An element ``q`` of the integers stands for ``(q - zero_point) * scale``.

    >>> import numpy as np
    >>> from ortrain.api import QuantizedTensor
    >>> scale, zero_point = np.array(0.5), np.array(0.0)
    >>> low, high = np.array(-64.0), np.array(63.5)
    >>> weight = QuantizedTensor(
    ...     "fc1.weight", "quantize", "int8", None, None, scale, zero_point, low, high, -70.0, 60.0, 0.01
    ... )
    >>> weight.clipped
    0.01
    """

    name: str
    """Name of the float tensor. For integers that are not trained, the name of the integers."""
    node: str
    """Node that quantizes the tensor, or that reads the integers."""
    dtype: str
    """Element type of the integers, for example ``int8`` or ``int4``."""
    axis: int | None
    """Axis along which the scales differ; None for one scale."""
    block_size: int | None
    """Number of elements along the axis that share a scale; None unless scales belong to blocks."""
    scale: npt.NDArray[np.float64]
    """Scales, as the model has them now."""
    zero_point: npt.NDArray[np.float64]
    """Zero point of each scale."""
    low: npt.NDArray[np.float64]
    """Smallest number that each scale represents."""
    high: npt.NDArray[np.float64]
    """Largest number that each scale represents."""
    smallest: float | None
    """Smallest element of a weight; None for an activation, which has elements only during a step."""
    largest: float | None
    """Largest element of a weight; None for an activation."""
    clipped: float | None
    """Share of the elements of a weight outside of ``low`` and ``high``, which pass no gradient; None for an
    activation. Integers that are not trained have the share 0.
    """

    @property
    def is_weight(self) -> bool:
        """True for a weight, False for an activation.

        >>> from ortrain.api import QuantizedTensor
        >>> scale = np.array(0.5)
        >>> numbers = QuantizedTensor(
        ...     "hidden", "quantize", "uint8", None, None, scale, 0 * scale, 0 * scale, 255 * scale, None, None, None
        ... )
        >>> numbers.is_weight
        False
        """
        return self.clipped is not None


def _tensor_of(native: _ortrain.QuantizedTensor) -> QuantizedTensor:
    """Return the public record of a native one."""

    def shaped(numbers: list[float]) -> npt.NDArray[np.float64]:
        return np.array(numbers, np.float64).reshape(native.shape)

    return QuantizedTensor(
        name=native.name,
        node=native.node,
        dtype=native.dtype,
        axis=native.axis,
        block_size=native.block_size,
        scale=shaped(native.scale),
        zero_point=shaped(native.zero_point),
        low=shaped(native.low),
        high=shaped(native.high),
        smallest=native.smallest,
        largest=native.largest,
        clipped=native.clipped,
    )
