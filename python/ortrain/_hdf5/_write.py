"""Writer of HDF5 files in the default layout of h5py: groups with symbol tables."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from ortrain._hdf5._parts import (
    ENTRY,
    FILL,
    LAYOUT,
    MESSAGE,
    NOWHERE,
    SIGNATURE,
    SMALLEST_COLLECTION,
    SPACE,
    SUPERBLOCK,
    TABLE,
    TYPE,
    padded,
)
from ortrain._hdf5._types import shape_message, text_message, type_message

__all__ = ["Leaf", "Plan", "write"]

Leaf: TypeAlias = npt.NDArray[Any] | str | bytes
"""A value of a file: an array of booleans, integers or floats, or a text."""

# HDF5's K values: a leaf has at most ``2 * _LEAF_K`` symbols, and a node at most ``2 * _NODE_K`` children.
_LEAF_K, _NODE_K = 4, 16


def write(tree: Mapping[str, Any], file: BinaryIO) -> None:
    """Writes groups (mappings) of leaves from the start of an empty file.

    Args:
        tree: groups and leaves by name. A name is not empty, and has no ``/`` and no zero byte.
        file: a file that is open for writing.

    Raises:
        OSError: if the operating system refuses to write.

    """
    plan = Plan()
    root = plan.group(tree)
    file.write(plan.superblock(root))
    at = SUPERBLOCK.size
    for address, part in plan.parts:
        file.write(bytes(address - at))
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        file.write(data)
        at = address + len(data)


class Plan:
    """Layout of a file: its parts with their addresses, in the order of the addresses."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes | npt.NDArray[Any]]] = []
        self.end = SUPERBLOCK.size

    def append(self, part: bytes | npt.NDArray[Any]) -> int:
        """Appends a part to the file and returns its address."""
        address = padded(self.end)
        self.parts.append((address, part))
        self.end = address + (len(part) if isinstance(part, bytes) else part.nbytes)
        return address

    def superblock(self, root: tuple[int, int, int]) -> bytes:
        """Returns the superblock at the start of the file. All other parts must have their addresses."""
        header, tree, heap = root
        return SUPERBLOCK.pack(
            SIGNATURE, 0, 0, 0, 0, 0, 8, 8, 0, _LEAF_K, _NODE_K, 0,
            0, NOWHERE, self.end, NOWHERE, 0, header, 1, 0, tree, heap,
        )  # fmt: skip

    def group(self, members: Mapping[str, Any]) -> tuple[int, int, int]:
        """Places a group. Returns the addresses of its header, its tree and its heap."""
        # The search in a symbol table needs the names in the order of their bytes.
        names = sorted(members, key=str.encode)
        addresses = [self.member(members[name]) for name in names]
        texts = bytearray(8)
        offsets = []
        for name in names:
            offsets.append(len(texts))
            text = name.encode() + b"\0"
            texts += text.ljust(padded(len(text)), b"\0")
        # Offset 1 of the free list means that the heap has no free space.
        heap = self.append(b"HEAP" + struct.pack("<B3x3Q", 0, len(texts), 1, self.append(bytes(texts))))
        tree = self.tree([ENTRY.pack(*entry, 0, 0, 0, 0) for entry in zip(offsets, addresses, strict=True)], offsets)
        return self.header([(TABLE, struct.pack("<2Q", tree, heap))]), tree, heap

    def member(self, value: Any) -> int:
        """Places a member of a group. Returns the address of its header."""
        return self.group(value)[0] if isinstance(value, Mapping) else self.dataset(value)

    def tree(self, entries: list[bytes], offsets: list[int]) -> int:
        """Places the B-tree of a group. Returns the address of the root."""
        # For each child: its address, and the heap offset of the last name below it.
        children: list[tuple[int, int]] = []
        width = 2 * _LEAF_K
        for start in range(0, len(entries), width):
            some = entries[start : start + width]
            leaf = b"SNOD" + struct.pack("<BxH", 1, len(some)) + b"".join(some)
            last = offsets[start + len(some) - 1]
            children.append((self.append(leaf.ljust(8 + width * ENTRY.size, b"\0")), last))
        level = 0
        while True:
            children = self.level(children, level)
            if len(children) == 1:
                return children[0][0]
            level += 1

    def level(self, children: list[tuple[int, int]], level: int) -> list[tuple[int, int]]:
        """Places the nodes of one level of a B-tree. Returns their addresses and last names."""
        width = 2 * _NODE_K
        size = 24 + width * 16 + 8
        starts = range(0, max(len(children), 1), width)
        first = padded(self.end)
        addresses = [first + number * size for number in range(len(starts))]
        placed: list[tuple[int, int]] = []
        before = 0
        for number, start in enumerate(starts):
            some = children[start : start + width]
            left = addresses[number - 1] if number else NOWHERE
            right = addresses[number + 1] if number + 1 < len(addresses) else NOWHERE
            node = b"TREE" + struct.pack("<2BH3Q", 0, level, len(some), left, right, before)
            node += b"".join(struct.pack("<2Q", *child) for child in some)
            before = some[-1][1] if some else 0
            placed.append((self.append(node.ljust(size, b"\0")), before))
        return placed

    def dataset(self, value: Leaf) -> int:
        """Places a dataset. Returns the address of its header."""
        if isinstance(value, str | bytes):
            text = value.encode() if isinstance(value, str) else value
            kind = text_message(value)
            data: bytes | npt.NDArray[Any] = struct.pack("<IQI", len(text), self.collection(text), 1)
            shape: tuple[int, ...] = ()
            fill = b"\x02\x02\x00\x01"
        else:
            kind, data, shape, fill = type_message(value.dtype), value, value.shape, b"\x02\x02\x02\x01"
        size = len(data) if isinstance(data, bytes) else data.nbytes
        layout = struct.pack("<2B2Q", 3, 1, self.append(data) if size else NOWHERE, size)
        return self.header([(SPACE, shape_message(shape)), (TYPE, kind), (FILL, fill + bytes(4)), (LAYOUT, layout)])

    def collection(self, text: bytes) -> int:
        """Places a global heap collection with one text. Returns its address."""
        used = 16 + 16 + padded(len(text))
        size = max(used + 16, SMALLEST_COLLECTION)
        heap = b"GCOL" + struct.pack("<B3xQ", 1, size) + struct.pack("<2H4xQ", 1, 1, len(text))
        free = struct.pack("<2H4xQ", 0, 0, size - used)
        return self.append((heap + text.ljust(padded(len(text)), b"\0") + free).ljust(size, b"\0"))

    def header(self, messages: list[tuple[int, bytes]]) -> int:
        """Places the header of an object. Returns its address."""
        packed = b""
        for kind, data in messages:
            data = data.ljust(padded(len(data)), b"\0")
            packed += MESSAGE.pack(kind, len(data), kind in (TYPE, FILL)) + data
        return self.append(struct.pack("<BxHII4x", 1, len(messages), 1, len(packed)) + packed)
