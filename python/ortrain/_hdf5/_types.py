"""Datatype and dataspace messages of HDF5 files, written and read."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ortrain._hdf5._parts import UnreadableError

__all__ = ["dtype_of", "holds", "is_text", "shape_message", "shape_of", "text_message", "type_message"]

_LARGEST_RANK = 32

# Datatype message of booleans: class and version, bit field, size, properties.
_BOOLEAN = (
    b"\x18\x02\x00\x00" + b"\x01\x00\x00\x00"
    # int8, the names of two members, and their values.
    + b"\x10\x08\x00\x00\x01\x00\x00\x00\x00\x00\x08\x00" + b"FALSE\0\0\0TRUE\0\0\0\0" + b"\x00\x01"
)  # fmt: skip
# Since version 3, names have no padding.
_NEWER_BOOLEAN = _BOOLEAN.replace(b"FALSE\0\0\0TRUE\0\0\0\0", b"FALSE\0TRUE\0")
_TEXT = b"\x10\x00\x00\x00" + b"\x10\x00\x00\x00\x01\x00\x00\x00\x00\x00\x08\x00"
# Datatype message of floats by size: bit field, then offset, precision, location and size of exponent and of mantissa,
# bias.
_FLOATS = {
    2: (0x0F20, struct.pack("<2H4BI", 0, 16, 10, 5, 0, 10, 15)),
    4: (0x1F20, struct.pack("<2H4BI", 0, 32, 23, 8, 0, 23, 127)),
    8: (0x3F20, struct.pack("<2H4BI", 0, 64, 52, 11, 0, 52, 1023)),
}


def type_message(dtype: np.dtype[Any]) -> bytes:
    """Returns the datatype message of an array type."""
    size = dtype.itemsize
    if dtype.kind == "b":
        return _BOOLEAN
    big = dtype.newbyteorder("<") != dtype
    if dtype.kind == "f":
        bits, properties = _FLOATS[size]
        return struct.pack("<BHxI", 0x11, bits | big, size) + properties
    return struct.pack("<BHxI2H", 0x10, big | (dtype.kind == "i") << 3, size, 0, 8 * size)


def text_message(text: str | bytes) -> bytes:
    """Returns the datatype message of a text."""
    # The bit field means a null-terminated text in ASCII or UTF-8.
    return b"\x19\x01" + bytes([isinstance(text, str), 0]) + _TEXT


def shape_message(shape: tuple[int, ...]) -> bytes:
    """Returns the dataspace message of a shape."""
    return struct.pack("<3B5x", 1, len(shape), bool(shape)) + struct.pack(f"<{2 * len(shape)}Q", *shape, *shape)


# NumPy types by their datatype messages.
_TYPES: dict[bytes, np.dtype[Any]] = {type_message(np.dtype(code)): np.dtype(code) for code in "? i1 u1".split()} | {
    type_message(np.dtype(order + code)): np.dtype(order + code)
    for code in "i2 i4 i8 u2 u4 u8 f2 f4 f8".split()
    for order in "<>"
}


def holds(dtype: np.dtype[Any]) -> bool:
    """Returns true if files can store an array type: booleans, integers of 1 to 8 bytes, floats of 2 to 8 bytes."""
    return any(dtype == known for known in _TYPES.values())


def dtype_of(kind: bytes) -> np.dtype[Any]:
    """Returns the NumPy type of a datatype message."""
    first, size = struct.unpack_from("<B3xI", kind)
    version, normalized = first >> 4, _of_version_1(kind)
    for message, dtype in _TYPES.items():
        if normalized.startswith(_NEWER_BOOLEAN if dtype.kind == "b" and version > 2 else message):
            return dtype
    raise UnreadableError(f"has an array of a type that ORTTrainer does not write: {first & 15:#x} of {size} bytes")


def is_text(kind: bytes) -> bool:
    """Returns true if a datatype message describes a variable-length text."""
    message = _of_version_1(kind)
    return message[:2] == b"\x19\x01" and message[3:20] == b"\0" + _TEXT


def _of_version_1(kind: bytes) -> bytes:
    """Rewrites a message of versions 2 to 5 as version 1, which describes numbers and texts identically."""
    message = bytearray(kind)
    # A text or boolean type contains a base type after its eight bytes.
    for at in (0, 8) if kind[:1] and kind[0] & 15 in (8, 9) else (0,):
        if at < len(message) and message[at] >> 4 in range(1, 6):
            message[at] = message[at] & 15 | 0x10
    return bytes(message)


def shape_of(space: bytes) -> tuple[int, ...]:
    """Returns the shape in a dataspace message."""
    version, rank, _, form = struct.unpack_from("<4B", space)
    # The newer version has a code for a dataset without values.
    if (version == 2 and form > 1) or version not in (1, 2) or rank > _LARGEST_RANK:
        raise UnreadableError("is damaged, or has an array of a newer format")
    return struct.unpack_from(f"<{rank}Q", space, 8 if version == 1 else 4)
