"""Writing of HDF5 files, in the layout that h5py writes by default: groups with symbol tables, whatever the names."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from ortrain.trainer._hdf5_parts import (
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
from ortrain.trainer._hdf5_types import shape_message, text_message, type_message

__all__ = ["Leaf", "Plan", "write"]

Leaf: TypeAlias = npt.NDArray[Any] | str | bytes
"""A value of a file: an array of booleans, integers or floats, or a text."""

# Symbols of a leaf, and children of a node, are at most twice as many as these.
_LEAF_K, _NODE_K = 4, 16


def write(tree: Mapping[str, Any], file: BinaryIO) -> None:
    """Write groups (mappings) of leaves from the start of an empty file.

    Args:
        tree: names are not empty, and have neither ``/`` nor a zero.
        file: a file that is open for writing.

    Raises:
        OSError: when the operating system refuses.

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
    """The parts of a file, each with its address, in the order of their addresses."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes | npt.NDArray[Any]]] = []
        self.end = SUPERBLOCK.size

    def place(self, part: bytes | npt.NDArray[Any]) -> int:
        """The address of a new part."""
        address = padded(self.end)
        self.parts.append((address, part))
        self.end = address + (len(part) if isinstance(part, bytes) else part.nbytes)
        return address

    def superblock(self, root: tuple[int, int, int]) -> bytes:
        """The start of the file, when all else has its place."""
        header, tree, heap = root
        return SUPERBLOCK.pack(
            SIGNATURE, 0, 0, 0, 0, 0, 8, 8, 0, _LEAF_K, _NODE_K, 0,
            0, NOWHERE, self.end, NOWHERE, 0, header, 1, 0, tree, heap,
        )  # fmt: skip

    def group(self, members: Mapping[str, Any]) -> tuple[int, int, int]:
        """Place a group: the addresses of its header, its tree and its heap."""
        # Names are in the order of their bytes, which a search relies on.
        names = sorted(members, key=str.encode)
        addresses = [self.member(members[name]) for name in names]
        texts = bytearray(8)
        offsets = []
        for name in names:
            offsets.append(len(texts))
            text = name.encode() + b"\0"
            texts += text.ljust(padded(len(text)), b"\0")
        # 1 says that nothing of the heap is free.
        heap = self.place(b"HEAP" + struct.pack("<B3x3Q", 0, len(texts), 1, self.place(bytes(texts))))
        tree = self.tree([ENTRY.pack(*entry, 0, 0, 0, 0) for entry in zip(offsets, addresses, strict=True)], offsets)
        return self.header([(TABLE, struct.pack("<2Q", tree, heap))]), tree, heap

    def member(self, value: Any) -> int:
        """Place a member of a group: the address of its header."""
        return self.group(value)[0] if isinstance(value, Mapping) else self.dataset(value)

    def tree(self, entries: list[bytes], offsets: list[int]) -> int:
        """Place the B-tree of a group."""
        # The address of each child, and the place in the heap of the last name below the child.
        children: list[tuple[int, int]] = []
        width = 2 * _LEAF_K
        for start in range(0, len(entries), width):
            some = entries[start : start + width]
            leaf = b"SNOD" + struct.pack("<BxH", 1, len(some)) + b"".join(some)
            last = offsets[start + len(some) - 1]
            children.append((self.place(leaf.ljust(8 + width * ENTRY.size, b"\0")), last))
        level = 0
        while True:
            children = self.level(children, level)
            if len(children) == 1:
                return children[0][0]
            level += 1

    def level(self, children: list[tuple[int, int]], level: int) -> list[tuple[int, int]]:
        """Place the nodes of a level of a B-tree: their addresses and last names."""
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
            placed.append((self.place(node.ljust(size, b"\0")), before))
        return placed

    def dataset(self, value: Leaf) -> int:
        """Place a dataset: the address of its header."""
        if isinstance(value, str | bytes):
            text = value.encode() if isinstance(value, str) else value
            kind = text_message(value)
            data: bytes | npt.NDArray[Any] = struct.pack("<IQI", len(text), self.collection(text), 1)
            shape: tuple[int, ...] = ()
            fill = b"\x02\x02\x00\x01"
        else:
            kind, data, shape, fill = type_message(value.dtype), value, value.shape, b"\x02\x02\x02\x01"
        size = len(data) if isinstance(data, bytes) else data.nbytes
        layout = struct.pack("<2B2Q", 3, 1, self.place(data) if size else NOWHERE, size)
        return self.header([(SPACE, shape_message(shape)), (TYPE, kind), (FILL, fill + bytes(4)), (LAYOUT, layout)])

    def collection(self, text: bytes) -> int:
        """Place a heap with one text: its address."""
        used = 16 + 16 + padded(len(text))
        size = max(used + 16, SMALLEST_COLLECTION)
        heap = b"GCOL" + struct.pack("<B3xQ", 1, size) + struct.pack("<2H4xQ", 1, 1, len(text))
        free = struct.pack("<2H4xQ", 0, 0, size - used)
        return self.place((heap + text.ljust(padded(len(text)), b"\0") + free).ljust(size, b"\0"))

    def header(self, messages: list[tuple[int, bytes]]) -> int:
        """Place the header of an object: its address."""
        packed = b""
        for kind, data in messages:
            data = data.ljust(padded(len(data)), b"\0")
            packed += MESSAGE.pack(kind, len(data), kind in (TYPE, FILL)) + data
        return self.place(struct.pack("<BxHII4x", 1, len(messages), 1, len(packed)) + packed)
