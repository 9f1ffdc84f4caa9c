"""Object headers of HDF5 files: lists of messages, in version 1 and version 2 of the format."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ortrain._hdf5._parts import (
    CONTINUED,
    FILL,
    LAYOUT,
    LINK,
    LINKS,
    MESSAGE,
    SPACE,
    TABLE,
    TYPE,
    Parts,
    UnreadableError,
    damaged,
)

__all__ = ["Header", "read_header"]

# Unsupported message types, with the end of the error message.
_REFUSED = {
    0x07: "has data in other files, which ORTTrainer does not write",
    0x0B: "has compressed data, which ORTTrainer does not write",
}
_SUPPORTED = {SPACE, LINKS, TYPE, LINK, LAYOUT, TABLE}
# Ignored messages: padding, old and new fill value, group info, comment, attributes, times, reference counts.
_PASSED = {0x00, 0x04, FILL, 0x0A, 0x0C, 0x0D, 0x0E, 0x12, 0x15, 0x16}
# Maximum size of a header in bytes. A message has at most 64 KiB, and a group with many links stores them elsewhere.
_LARGEST = 2**24
_SHARED = 2


@dataclass
class Header:
    """Messages of an object: its links, and other messages by type."""

    messages: dict[int, bytes] = field(default_factory=dict)
    links: list[bytes] = field(default_factory=list)

    def take(self, kind: int, flags: int, data: bytes) -> None:
        """Stores a message, ignores it, or raises an error for an unsupported one."""
        if kind in _PASSED:
            return
        if kind in _REFUSED:
            raise UnreadableError(_REFUSED[kind])
        if flags & _SHARED or kind in self.messages or kind not in _SUPPORTED:
            raise UnreadableError(f"is damaged, or has a header message that ORTTrainer does not write: {kind:#x}")
        if kind == LINK:
            self.links.append(data)
        else:
            self.messages[kind] = data


def read_header(parts: Parts, address: int) -> Header:
    """Reads the header at an address."""
    parts.once(address)
    newer = parts.part(address, 4) == b"OHDR"
    block, form, count = _newer(parts, address) if newer else _older(parts, address)
    header = Header()
    total = len(block)
    # Continuation blocks. A block may list further blocks.
    blocks: list[tuple[int, int]] = []
    count -= _take(header, block, form, count, blocks)
    for start, length in blocks:
        parts.once(start)
        total += length
        _bound(total)
        block = _continued(parts, start, length) if newer else parts.part(start, length)
        count -= _take(header, block, form, count, blocks)
    return header


def _older(parts: Parts, address: int) -> tuple[bytes, struct.Struct, int]:
    """Returns the first messages of a header of version 1, the format of a message prefix, and the message count."""
    version, count, size = struct.unpack("<BxH4xI4x", parts.part(address, 16))
    if version != 1:
        raise UnreadableError("is damaged, or has objects of a newer format")
    _bound(size)
    return parts.part(address + 16, size), MESSAGE, count


def _newer(parts: Parts, address: int) -> tuple[bytes, struct.Struct, int]:
    """Returns the first messages of a header of version 2, the message prefix format, and an unlimited count."""
    version, flags = struct.unpack("<4x2B", parts.part(address, 6))
    if version != 2:
        raise UnreadableError("is damaged, or has objects of a newer format")
    # Optional times and limits precede the size.
    before = 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
    width = 1 << (flags & 3)
    size = int.from_bytes(parts.part(address + before, width), "little")
    before += width
    _bound(size)
    # An optional creation index follows the flags of each message.
    form = struct.Struct("<BHB2x" if flags & 4 else "<BHB")
    return parts.checked(address, before + size + 4)[before:], form, _LARGEST


def _continued(parts: Parts, address: int, length: int) -> bytes:
    """Reads a continuation block of a header of version 2."""
    block = parts.checked(address, max(length, 8))
    if block[:4] != b"OCHK":
        damaged("the continuation of a header has a wrong signature")
    return block[4:]


def _bound(size: int) -> None:
    """Raises an error if a header is too large."""
    if size > _LARGEST:
        raise UnreadableError(f"has a header of more than {_LARGEST} bytes, which ORTTrainer does not write")


def _take(header: Header, block: bytes, form: struct.Struct, limit: int, blocks: list[tuple[int, int]]) -> int:
    """Reads the messages of a block and returns their number. Appends continuation blocks to ``blocks``."""
    count = at = 0
    while count < limit and at + form.size <= len(block):
        kind, width, flags = form.unpack_from(block, at)
        data = block[at + form.size : at + form.size + width]
        at += form.size + width
        count += 1
        if at > len(block):
            damaged("a message is longer than its header")
        if kind == CONTINUED:
            blocks.append(struct.unpack_from("<2Q", data))
        else:
            header.take(kind, flags, data)
    return count
