"""HDF5 files of the layout that h5py writes by default: groups with symbol tables, datasets in one piece.

The library behind h5py ends the process on some damaged files, and on a full disk. This module needs nothing but NumPy:
reading checks every address and every size before use, and a failing disk is an ``OSError``. The layout is that of the
HDF5 File Format Specification, version 2.0: superblock 0, object headers 1, B-trees 1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DEEPEST", "SIGNATURE", "Leaf", "UnreadableError", "holds", "read", "write"]

SIGNATURE = b"\x89HDF\r\n\x1a\n"
DEEPEST = 64
"""Groups within groups that a file may have."""

Leaf: TypeAlias = npt.NDArray[Any] | str | bytes
"""A value of a file: an array of booleans, integers or floats, or a text."""

_NOWHERE = 2**64 - 1
_SUPERBLOCK = struct.Struct("<8s8B2HI4Q2Q2I2Q")
_ENTRY = struct.Struct("<2Q2I2Q")
_MESSAGE = struct.Struct("<HHB3x")
_SPACE, _TYPE, _FILL, _LAYOUT, _CONTINUED, _TABLE = 0x01, 0x03, 0x05, 0x08, 0x10, 0x11
# Symbols of a leaf, and children of a node, are at most twice as many as these.
_LEAF_K, _NODE_K = 4, 16
_SMALLEST_COLLECTION = 4096
_LARGEST_RANK = 32
# Levels of a B-tree, with a million of millions of names.
_HIGHEST = 8

# The message of booleans: class and version, bits that say more, the size, and properties.
_BOOLEAN = (
    b"\x18\x02\x00\x00" + b"\x01\x00\x00\x00"
    # int8, the names of two members, and their values.
    + b"\x10\x08\x00\x00\x01\x00\x00\x00\x00\x00\x08\x00" + b"FALSE\0\0\0TRUE\0\0\0\0" + b"\x00\x01"
)  # fmt: skip
_TEXT = b"\x10\x00\x00\x00" + b"\x10\x00\x00\x00\x01\x00\x00\x00\x00\x00\x08\x00"
# Bits of the message of floats, and the places of exponent and mantissa with the bias, by the size.
_FLOATS = {
    2: (0x0F20, struct.pack("<2H4BI", 0, 16, 10, 5, 0, 10, 15)),
    4: (0x1F20, struct.pack("<2H4BI", 0, 32, 23, 8, 0, 23, 127)),
    8: (0x3F20, struct.pack("<2H4BI", 0, 64, 52, 11, 0, 52, 1023)),
}


class UnreadableError(Exception):
    """A file that is damaged, or has what is not read here. The text goes on after the name of the file."""


# Writing.


def write(tree: Mapping[str, Any], file: BinaryIO) -> None:
    """Write groups (mappings) of leaves from the start of an empty file.

    Args:
        tree: names are not empty, and have neither ``/`` nor a zero.
        file: a file that is open for writing.

    Raises:
        OSError: when the operating system refuses.

    """
    plan = _Plan()
    root = plan.group(tree)
    file.write(plan.superblock(root))
    at = _SUPERBLOCK.size
    for address, part in plan.parts:
        file.write(bytes(address - at))
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        file.write(data)
        at = address + len(data)


class _Plan:
    """The parts of a file, each with its address, in the order of their addresses."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes | npt.NDArray[Any]]] = []
        self.end = _SUPERBLOCK.size

    def place(self, part: bytes | npt.NDArray[Any]) -> int:
        """The address of a new part."""
        address = _padded(self.end)
        self.parts.append((address, part))
        self.end = address + (len(part) if isinstance(part, bytes) else part.nbytes)
        return address

    def superblock(self, root: tuple[int, int, int]) -> bytes:
        """The start of the file, when all else has its place."""
        header, tree, heap = root
        return _SUPERBLOCK.pack(
            SIGNATURE, 0, 0, 0, 0, 0, 8, 8, 0, _LEAF_K, _NODE_K, 0,
            0, _NOWHERE, self.end, _NOWHERE, 0, header, 1, 0, tree, heap,
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
            texts += text.ljust(_padded(len(text)), b"\0")
        # 1 says that nothing of the heap is free.
        heap = self.place(b"HEAP" + struct.pack("<B3x3Q", 0, len(texts), 1, self.place(bytes(texts))))
        tree = self.tree([_ENTRY.pack(*entry, 0, 0, 0, 0) for entry in zip(offsets, addresses, strict=True)], offsets)
        return self.header([(_TABLE, struct.pack("<2Q", tree, heap))]), tree, heap

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
            children.append((self.place(leaf.ljust(8 + width * _ENTRY.size, b"\0")), last))
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
        first = _padded(self.end)
        addresses = [first + number * size for number in range(len(starts))]
        placed: list[tuple[int, int]] = []
        before = 0
        for number, start in enumerate(starts):
            some = children[start : start + width]
            left = addresses[number - 1] if number else _NOWHERE
            right = addresses[number + 1] if number + 1 < len(addresses) else _NOWHERE
            node = b"TREE" + struct.pack("<2BH3Q", 0, level, len(some), left, right, before)
            node += b"".join(struct.pack("<2Q", *child) for child in some)
            before = some[-1][1] if some else 0
            placed.append((self.place(node.ljust(size, b"\0")), before))
        return placed

    def dataset(self, value: Leaf) -> int:
        """Place a dataset: the address of its header."""
        if isinstance(value, str | bytes):
            text = value.encode() if isinstance(value, str) else value
            # The bits are those of a text that ends, in ASCII or in UTF-8.
            kind = b"\x19\x01" + bytes([isinstance(value, str), 0]) + _TEXT
            data: bytes | npt.NDArray[Any] = struct.pack("<IQI", len(text), self.collection(text), 1)
            shape: tuple[int, ...] = ()
            fill = b"\x02\x02\x00\x01"
        else:
            kind, data, shape, fill = _type_message(value.dtype), value, value.shape, b"\x02\x02\x02\x01"
        size = len(data) if isinstance(data, bytes) else data.nbytes
        layout = struct.pack("<2B2Q", 3, 1, self.place(data) if size else _NOWHERE, size)
        space = struct.pack("<3B5x", 1, len(shape), bool(shape)) + struct.pack(f"<{2 * len(shape)}Q", *shape, *shape)
        return self.header([(_SPACE, space), (_TYPE, kind), (_FILL, fill + bytes(4)), (_LAYOUT, layout)])

    def collection(self, text: bytes) -> int:
        """Place a heap with one text: its address."""
        used = 16 + 16 + _padded(len(text))
        size = max(used + 16, _SMALLEST_COLLECTION)
        heap = b"GCOL" + struct.pack("<B3xQ", 1, size) + struct.pack("<2H4xQ", 1, 1, len(text))
        free = struct.pack("<2H4xQ", 0, 0, size - used)
        return self.place((heap + text.ljust(_padded(len(text)), b"\0") + free).ljust(size, b"\0"))

    def header(self, messages: list[tuple[int, bytes]]) -> int:
        """Place the header of an object: its address."""
        packed = b""
        for kind, data in messages:
            data = data.ljust(_padded(len(data)), b"\0")
            packed += _MESSAGE.pack(kind, len(data), kind in (_TYPE, _FILL)) + data
        return self.place(struct.pack("<BxHII4x", 1, len(messages), 1, len(packed)) + packed)


def _padded(size: int) -> int:
    """The next multiple of 8."""
    return size + -size % 8


def _type_message(dtype: np.dtype[Any]) -> bytes:
    """The message with a type of arrays."""
    size = dtype.itemsize
    if dtype.kind == "b":
        return _BOOLEAN
    big = dtype.newbyteorder("<") != dtype
    if dtype.kind == "f":
        bits, properties = _FLOATS[size]
        return struct.pack("<BHxI", 0x11, bits | big, size) + properties
    return struct.pack("<BHxI2H", 0x10, big | (dtype.kind == "i") << 3, size, 0, 8 * size)


# Reading.

# Messages that a header may have, and why they are not read.
_NEWER = "has a group of a newer format, which is not read; HDF5 makes such groups of names that are not ASCII"
_REFUSED = {
    0x02: _NEWER,
    0x06: _NEWER,
    0x07: "has data in other files, which ORTTrainer does not write",
    0x0A: _NEWER,
    0x0B: "has compressed data, which ORTTrainer does not write",
}
# Padding, an old and a new fill value, comments, attributes, times.
_PASSED = {0x00, 0x04, _FILL, 0x0C, 0x0D, 0x0E, 0x12}


def read(file: BufferedReader, size: int, path: list[str]) -> Any:
    """Read the group (a dict) or the value at a path of names.

    Args:
        file: a file that is open for reading.
        size: the bytes of the file.
        path: names of groups, and of a value at most at its end; empty for the whole file.

    Returns:
        dicts of NumPy arrays, of NumPy scalars where the rank is 0, and of ``bytes`` for texts.

    Raises:
        UnreadableError: for a file that is damaged, or has what :func:`write` does not write.
        KeyError: for a path that is not there; with the names that are, by way of the second argument.
        OSError: when the operating system refuses.

    """
    try:
        return _Reading(file, size).value(path)
    except (struct.error, UnicodeDecodeError) as error:
        raise UnreadableError("is damaged: a part is shorter or longer than the format allows") from error


class _Reading:
    """A file that is read. Each byte is read about twice at most, whatever the file says."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self.file, self.size = file, size
        self.left = 2 * size + _SMALLEST_COLLECTION
        self.seen: set[int] = set()
        self.collections: dict[int, dict[int, bytes]] = {}

    def value(self, path: list[str]) -> Any:
        """The value at a path."""
        header = self.root()
        for name in path:
            messages = self.messages(header)
            members = dict(self.members(messages[_TABLE])) if _TABLE in messages else {}
            if name not in members:
                raise KeyError(name, list(members))
            header = members[name]
        found = self.object(header, 0)
        if not path and not isinstance(found, dict):
            raise UnreadableError("is damaged: the first object is no group")
        return found

    def root(self) -> int:
        """The address of the header of the first group."""
        start = self.part(0, min(self.size, _SUPERBLOCK.size))
        if not start.startswith(SIGNATURE):
            raise UnreadableError("is not an HDF5 file")
        if start[8:9] != b"\0":
            raise UnreadableError(f"is HDF5 of a newer format ({start[8:9].hex()}), which ORTTrainer does not write")
        fields = _SUPERBLOCK.unpack(start)
        versions, widths, base, end = (*fields[2:4], fields[5]), fields[6:8], fields[12], fields[14]
        if any(versions) or widths != (8, 8) or base != 0:
            raise UnreadableError("is damaged: no file of ORTTrainer starts so")
        if end > self.size:
            raise UnreadableError(f"is damaged: the file ends after {self.size} of {end} bytes")
        self.size = end
        return int(fields[17])

    def part(self, address: int, count: int) -> bytes:
        """Some bytes of the file."""
        self.check(address, count)
        self.file.seek(address)
        found = self.file.read(count)
        if len(found) < count:
            raise UnreadableError("is damaged: the file became shorter meanwhile")
        return found

    def check(self, address: int, count: int) -> None:
        """Refuse bytes that the file does not have, and bytes that are read over and over."""
        if count > self.size or address > self.size - count:
            raise UnreadableError(f"is damaged: {count} bytes at {address} are past its end")
        self.spend(count)

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UnreadableError("is damaged: its parts overlap")

    def once(self, address: int) -> None:
        """Refuse a part that was read before: a part in two places, or below itself."""
        if address in self.seen:
            raise UnreadableError("is damaged: two names lead to one place")
        self.seen.add(address)

    def object(self, header: int, depth: int) -> Any:
        """The group or the value behind a header."""
        if depth > DEEPEST:
            raise UnreadableError(f"has more than {DEEPEST} groups, one in the other")
        messages = self.messages(header)
        if _TABLE in messages:
            return {name: self.object(address, depth + 1) for name, address in self.members(messages[_TABLE])}
        if not {_SPACE, _TYPE, _LAYOUT} <= messages.keys():
            raise UnreadableError("is damaged: there is an object that is neither a group nor an array")
        return self.dataset(messages[_SPACE], messages[_TYPE], messages[_LAYOUT])

    def messages(self, header: int) -> dict[int, bytes]:
        """The messages in the header of an object, by kinds."""
        self.once(header)
        version, count, size = struct.unpack("<BxH4xI4x", self.part(header, 16))
        if version != 1:
            raise UnreadableError("is damaged, or has objects of a newer format")
        found: dict[int, bytes] = {}
        blocks = [(header + 16, size)]
        for start, length in blocks:
            block = self.part(start, length)
            at = 0
            while count and at + _MESSAGE.size <= length:
                kind, width, flags = _MESSAGE.unpack_from(block, at)
                data = block[at + _MESSAGE.size : at + _MESSAGE.size + width]
                at += _MESSAGE.size + width
                count -= 1
                if at > length:
                    raise UnreadableError("is damaged: what a header says is longer than the header")
                if kind in _PASSED:
                    continue
                if kind in _REFUSED:
                    raise UnreadableError(_REFUSED[kind])
                if kind == _CONTINUED:
                    blocks.append(struct.unpack("<2Q", data))
                elif kind in found or kind not in (_SPACE, _TYPE, _LAYOUT, _TABLE) or flags & 2:
                    raise UnreadableError(f"is damaged, or has what ORTTrainer does not write: message {kind:#x}")
                else:
                    found[kind] = data
        return found

    def members(self, table: bytes) -> Iterator[tuple[str, int]]:
        """Names of a group, each with the address of a header."""
        tree, heap = struct.unpack("<2Q", table)
        magic, version, size, _, start = struct.unpack("<4sB3x3Q", self.part(heap, 32))
        if magic != b"HEAP" or version != 0:
            raise UnreadableError("is damaged: there are no names where names should be")
        texts = self.part(start, size)
        last = ""
        for leaf in self.leaves(tree, None):
            for offset, header, cache, *_ in _ENTRY.iter_unpack(leaf):
                if cache == 2:
                    raise UnreadableError("has a symbolic link, which ORTTrainer does not write")
                end = texts.find(b"\0", offset)
                self.spend(max(end - offset, 0))
                name = texts[offset:end].decode() if end >= 0 else ""
                # Names ascend, and none is empty.
                if name.encode() <= last.encode() or "/" in name:
                    raise UnreadableError("is damaged: the names of a group are out of order")
                last = name
                yield name, header

    def leaves(self, node: int, above: int | None) -> Iterator[bytes]:
        """The entries of each leaf below a node of a B-tree, which stands at a level below another one's."""
        self.once(node)
        magic, kind, level, count = struct.unpack("<4s2BH16x", self.part(node, 24))
        levels = range(_HIGHEST + 1) if above is None else (above - 1,)
        if magic != b"TREE" or kind != 0 or level not in levels:
            raise UnreadableError("is damaged: there is no group where a group should be")
        # Keys and children by turns; the last key stands alone.
        for _, child in struct.iter_unpack("<2Q", self.part(node + 24, 16 * count)):
            if level > 0:
                yield from self.leaves(child, level)
                continue
            self.once(child)
            magic, version, symbols = struct.unpack("<4sBxH", self.part(child, 8))
            if magic != b"SNOD" or version != 1:
                raise UnreadableError("is damaged: there are no members where members of a group should be")
            yield self.part(child + 8, symbols * _ENTRY.size)

    def dataset(self, space: bytes, kind: bytes, layout: bytes) -> Any:
        """The value of a dataset."""
        shape = _shape(space)
        version, form = struct.unpack_from("<2B", layout)
        if version != 3 or form not in (0, 1):
            raise UnreadableError("has data in chunks or of a newer format, which ORTTrainer does not write")
        if form == 1:
            address, size = struct.unpack_from("<2Q", layout, 2)
            within = None
        else:
            (size,) = struct.unpack_from("<H", layout, 2)
            address, within = 0, layout[4 : 4 + size]
        if kind[:2] == b"\x19\x01" and kind[3:20] == b"\0" + _TEXT:
            if shape != () or size != 16:
                raise UnreadableError("has an array of texts, which ORTTrainer does not write")
            return self.text(self.part(address, size) if within is None else within)
        dtype = _dtype(kind)
        count = math.prod(shape)
        if count * dtype.itemsize != size:
            raise UnreadableError(f"is damaged: an array of {count} {dtype} has {size} bytes")
        if within is None and size:
            self.check(address, size)
        try:
            array = np.empty(shape, dtype)
        except ValueError as error:
            raise UnreadableError("is damaged: an array has more elements than arrays can have") from error
        if size:
            self.fill(array.reshape(-1).view(np.uint8), address, within)
        if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            raise UnreadableError("is damaged: a truth value is neither 0 nor 1")
        return array[()]

    def fill(self, place: npt.NDArray[np.uint8], address: int, within: bytes | None) -> None:
        """Read bytes into an array."""
        if within is not None:
            place[:] = np.frombuffer(within, np.uint8)
            return
        self.file.seek(address)
        if self.file.readinto(place.data) != place.size:
            raise UnreadableError("is damaged: the file became shorter meanwhile")

    def text(self, reference: bytes) -> bytes:
        """The text that a reference leads to."""
        length, address, index = struct.unpack("<IQI", reference)
        if length == 0:
            return b""
        if address not in self.collections:
            self.collections[address] = dict(self.heap(address))
        text = self.collections[address].get(index, b"")
        self.spend(length)
        if len(text) != length:
            raise UnreadableError("is damaged: there is another text where a text should be")
        return text

    def heap(self, address: int) -> Iterator[tuple[int, bytes]]:
        """The texts of a heap, by numbers."""
        magic, version, size = struct.unpack("<4sB3xQ", self.part(address, 16))
        if magic != b"GCOL" or version != 1 or size < 16:
            raise UnreadableError("is damaged: there are no texts where texts should be")
        data = self.part(address + 16, size - 16)
        at = 0
        while at + 16 <= len(data):
            index, _, length = struct.unpack_from("<2H4xQ", data, at)
            if index == 0:
                return
            at += 16
            if length > len(data) - at:
                raise UnreadableError("is damaged: a text is longer than its heap")
            yield index, data[at : at + length]
            at += _padded(length)


def _shape(space: bytes) -> tuple[int, ...]:
    """The shape that a message tells."""
    version, rank = struct.unpack_from("<2B", space)
    if version != 1 or rank > _LARGEST_RANK:
        raise UnreadableError("is damaged, or has an array of a newer format")
    return struct.unpack_from(f"<{rank}Q", space, 8)


# Types of arrays by their messages.
_TYPES = {_type_message(np.dtype(code)): np.dtype(code) for code in "? i1 u1".split()} | {
    _type_message(np.dtype(order + code)): np.dtype(order + code)
    for code in "i2 i4 i8 u2 u4 u8 f2 f4 f8".split()
    for order in "<>"
}


def holds(dtype: np.dtype[Any]) -> bool:
    """If files hold arrays of a type: booleans, integers of 1 to 8 bytes, floats of 2 to 8."""
    return any(dtype == known for known in _TYPES.values())


def _dtype(kind: bytes) -> np.dtype[Any]:
    """The type that a message tells."""
    for message, dtype in _TYPES.items():
        if kind.startswith(message):
            return dtype
    first, size = struct.unpack_from("<B3xI", kind)
    raise UnreadableError(f"has an array of a type that ORTTrainer does not write: {first & 15:#x} of {size} bytes")
