"""Common parts of the HDF5 reader and writer.

The reader checks every address and size before use. Signatures and fields have their names from the HDF5 File Format
Specification, version 3.0.
"""

from __future__ import annotations

import struct
from io import BufferedReader
from typing import NoReturn

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONTINUED",
    "ENTRY",
    "FILL",
    "LAYOUT",
    "LINK",
    "LINKS",
    "MAX_CHECKED",
    "MESSAGE",
    "NOWHERE",
    "SIGNATURE",
    "SMALLEST_COLLECTION",
    "SPACE",
    "SUPERBLOCK",
    "TABLE",
    "TYPE",
    "Parts",
    "UnreadableError",
    "checksum",
    "damaged",
    "padded",
]

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NOWHERE = 2**64 - 1
"""Address of a missing part (undefined address)."""

SUPERBLOCK = struct.Struct("<8s8B2HI4Q2Q2I2Q")
"""Superblock, version 0."""
ENTRY = struct.Struct("<2Q2I2Q")
"""Symbol table entry."""
MESSAGE = struct.Struct("<HHB3x")
"""Message prefix in an object header of version 1."""
SPACE, LINKS, TYPE, FILL, LINK, LAYOUT, CONTINUED, TABLE = 0x01, 0x02, 0x03, 0x05, 0x06, 0x08, 0x10, 0x11
"""Types of header messages."""
SMALLEST_COLLECTION = 4096
"""Minimum size of a global heap collection in bytes."""
MAX_CHECKED = 2**26
"""Maximum bytes under checksums. Hundreds of thousands of names need fewer, and take seconds to check."""


class UnreadableError(Exception):
    """Error for a file that is damaged or has unsupported features. The text continues after the file name."""


def damaged(what: str) -> NoReturn:
    """Raises the error of a damaged file."""
    raise UnreadableError(f"is damaged: {what}")


def padded(size: int) -> int:
    """Rounds up to a multiple of 8."""
    return size + -size % 8


class Parts:
    """Bounded access to a file: each byte is read at most about twice, regardless of the file's contents."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self.file, self.size = file, size
        self.left = 2 * size + SMALLEST_COLLECTION
        self.unchecked = MAX_CHECKED
        self.visited: set[int] = set()

    def part(self, address: int, count: int) -> bytes:
        """Returns some bytes of the file."""
        self.check(address, count)
        self.file.seek(address)
        found = self.file.read(count)
        if len(found) < count:
            damaged("the file became shorter during the read")
        return found

    def checked(self, address: int, count: int) -> bytes:
        """Returns some bytes of the file without the checksum in the last four bytes, which must be correct."""
        found = self.part(address, count)
        self.verify(found[:-4], found[-4:])
        return found[:-4]

    def verify(self, data: bytes, expected: bytes) -> None:
        """Raises an error if the checksum of the bytes is wrong."""
        self.unchecked -= len(data)
        if self.unchecked < 0:
            raise UnreadableError(f"has more than {MAX_CHECKED} bytes of names, which ORTTrainer does not write")
        if checksum(data) != int.from_bytes(expected, "little"):
            damaged("a checksum is wrong")

    def fill(self, buffer: npt.NDArray[np.uint8], address: int) -> None:
        """Reads bytes that were checked before into an array."""
        self.file.seek(address)
        if self.file.readinto(buffer.data) != buffer.size:
            damaged("the file became shorter during the read")

    def check(self, address: int, count: int) -> None:
        """Raises an error for bytes outside the file, and for repeated reads of the same bytes."""
        if count > self.size or address > self.size - count:
            damaged(f"{count} bytes at {address} are past its end")
        self.spend(count)

    def spend(self, count: int) -> None:
        """Subtracts from the budget of bytes to read. Raises an error if parts of the file overlap too much."""
        self.left -= count
        if self.left < 0:
            damaged("its parts overlap")

    def once(self, address: int) -> None:
        """Raises an error for a part that was read before: a part with two parents, or a cycle."""
        if address in self.visited:
            damaged("two references have the same address")
        self.visited.add(address)


def checksum(data: bytes) -> int:
    """Returns the checksum of metadata: the 32-bit hash lookup3 of Bob Jenkins.

    Args:
        data: at least one byte.

    """
    mask = 0xFFFFFFFF
    a = b = c = (0xDEADBEEF + len(data)) & mask
    # Full blocks of twelve bytes. The last 1 to 12 bytes are separate.
    full_size = (len(data) - 1) // 12 * 12
    for x, y, z in struct.iter_unpack("<3I", memoryview(data)[:full_size]):
        a, b, c = a + x & mask, b + y & mask, c + z & mask
        a = (a - c & mask) ^ (c << 4 & mask | c >> 28)
        c = c + b & mask
        b = (b - a & mask) ^ (a << 6 & mask | a >> 26)
        a = a + c & mask
        c = (c - b & mask) ^ (b << 8 & mask | b >> 24)
        b = b + a & mask
        a = (a - c & mask) ^ (c << 16 & mask | c >> 16)
        c = c + b & mask
        b = (b - a & mask) ^ (a << 19 & mask | a >> 13)
        a = a + c & mask
        c = (c - b & mask) ^ (b << 4 & mask | b >> 28)
        b = b + a & mask
    x, y, z = struct.unpack("<3I", data[full_size:].ljust(12, b"\0"))
    a, b, c = a + x & mask, b + y & mask, c + z & mask
    c = (c ^ b) - (b << 14 & mask | b >> 18) & mask
    a = (a ^ c) - (c << 11 & mask | c >> 21) & mask
    b = (b ^ a) - (a << 25 & mask | a >> 7) & mask
    c = (c ^ b) - (b << 16 & mask | b >> 16) & mask
    a = (a ^ c) - (c << 4 & mask | c >> 28) & mask
    b = (b ^ a) - (a << 14 & mask | a >> 18) & mask
    return int((c ^ b) - (b << 24 & mask | b >> 8) & mask)
