"""Pictures as PNG files, without an image library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_PIXELS_PER_SIDE = 256


def is_picture(shape: tuple[int, ...]) -> bool:
    """Returns true if an array of this shape can be a picture: one, three or four channels."""
    if len(shape) == 2:
        return min(shape) > 3
    return len(shape) == 3 and ((shape[0] in (1, 3) and min(shape[1:]) > 3) or shape[2] in (1, 3, 4))


def png(values: Any) -> bytes:
    """Return a picture as a PNG file.

    Args:
        values: an array ``[height, width]``, ``[channels, height, width]`` or ``[height, width, channels]``. Bytes stay
            as they are; the lowest value of other types becomes black and the highest white. A large picture loses rows
            and columns.

    Raises:
        ValueError: for an array of another shape.

    """
    pixels = np.asarray(values)
    if not is_picture(pixels.shape):
        raise ValueError(f"an array of shape {pixels.shape} is not a picture")
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    stride = -(-max(pixels.shape[:2]) // MAX_PIXELS_PER_SIDE)
    pixels = pixels[::stride, ::stride]
    if pixels.dtype != np.uint8:
        pixels = _to_bytes(pixels)
    return _file(pixels)


def rgba_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an array ``[height, width, 4]`` of any size as a PNG file."""
    return _file(pixels)


def _to_bytes(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return values scaled to bytes. Values that are not finite are black."""
    real = pixels.astype(np.float64)
    finite = np.isfinite(real)
    low, high = (real[finite].min(), real[finite].max()) if finite.any() else (0.0, 1.0)
    scaled = np.where(finite, (real - low) / ((high - low) or 1.0), 0.0)
    scaled_bytes: npt.NDArray[np.uint8] = np.round(255 * scaled).astype(np.uint8)
    return scaled_bytes


def _file(pixels: npt.NDArray[np.uint8]) -> bytes:
    height, width, channels = pixels.shape
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    # Each row begins with its filter: none.
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_address(file: bytes) -> str:
    """Return the address of a PNG file inside a page."""
    return "data:image/png;base64," + base64.b64encode(file).decode()
