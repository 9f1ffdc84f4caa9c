"""Fractal heaps and version 2 B-trees in HDF5 files: storage of a group's links if the links are many or long.

A heap is a table of blocks. The block size doubles from row to row. The first rows have direct blocks with objects.
Later rows have indirect blocks, which are tables again. Objects above a size limit are stored outside the heap. A
B-tree lists all objects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ortrain._hdf5._parts import Parts, damaged

__all__ = ["heap_objects"]

# Maximum depth of a B-tree, enough for 10**12 names.
_HIGHEST = 8
# B-tree record types, with their sizes. For huge objects: the record size. For names: the sizes of the hash and of the
# object ID.
_HUGE_OBJECT, _NAME = 1, 5
_HUGE_SIZE, _HASH_SIZE, _ID_SIZE = 24, 4, 7


def heap_objects(parts: Parts, heap: int, tree: int) -> Iterator[bytes]:
    """Yields the links of a group: the objects of a heap, in the order of the B-tree that lists them by name."""
    objects = _Heap(parts, heap)
    for record in _records(parts, tree, _NAME, _HASH_SIZE + _ID_SIZE):
        yield objects.object(record[_HASH_SIZE:])


class _Heap:
    """A fractal heap. Its width and block sizes are powers of two and are stored as exponents."""

    def __init__(self, parts: Parts, address: int) -> None:
        parts.once(address)
        self.parts, self.address = parts, address
        magic, version, id_size, filters, flags, largest_object, self.huge_tree, *shape = struct.unpack(
            "<4sB2HBI8xQ80xH2QH2xQH", parts.checked(address, 146)
        )
        width, start, largest, bits, self.root, self.rows = shape
        if magic != b"FRHP" or version != 0 or filters != 0 or id_size != _ID_SIZE:
            damaged("the heap of a group's links has a wrong header")
        if any(size.bit_count() != 1 for size in (width, start, largest)) or not start <= largest <= 2**bits <= 2**64:
            damaged("a heap has invalid block sizes")
        self.width, self.start = width.bit_length() - 1, start.bit_length() - 1
        largest_bits = largest.bit_length() - 1
        # Number of rows with direct blocks. The first two rows have blocks of the same size.
        self.direct_rows = largest_bits - self.start + 2
        if self.rows > max(bits - self.start - self.width, 0) + 1:
            damaged("a heap has too many rows")
        # Sizes in bytes of the offset and the length in an object ID.
        self.offset_size = (bits + 7) // 8
        self.length_size = min((largest_bits + 7) // 8, _encoded_size(largest_object))
        if 1 + self.offset_size + self.length_size > id_size:
            damaged("the object IDs of a heap have a wrong size")
        self.checksums = bool(flags & 2)
        self.blocks: dict[int, bytes] = {}
        self.tables: dict[tuple[int, int], tuple[int, ...]] = {}
        self.huge: dict[int, tuple[int, int]] | None = None

    def object(self, identity: bytes) -> bytes:
        """Returns the object with an ID."""
        kind = identity[0]
        if kind == 0x00:
            data = self.managed(identity[1:])
        elif kind == 0x10:
            return self.huge_object(int.from_bytes(identity[1:], "little"))
        else:
            # An ID can contain a tiny object itself, but links are never that short.
            damaged(f"an object of a heap has the unsupported type {kind:#x}")
        # Overlapping objects could multiply the output, so their bytes count against a budget.
        self.parts.spend(len(data))
        return data

    def managed(self, location: bytes) -> bytes:
        """Returns the object at an offset in a block."""
        offset = int.from_bytes(location[: self.offset_size], "little")
        length = int.from_bytes(location[self.offset_size : self.offset_size + self.length_size], "little")
        # Descends from the root to the direct block. Each block has an offset in the heap, a size, and rows if it is
        # indirect.
        address, at, size, rows = self.root, 0, self.start, self.rows
        while rows:
            table = self.table(address, at, rows)
            row = max((offset - at).bit_length() - self.start - self.width, 0)
            size = self.start + max(row - 1, 0)
            before = (row > 0) << (size + self.width)
            column = (offset - at - before) >> size
            if row >= rows:
                damaged("an object is past the end of its heap")
            address = table[(row << self.width) + column]
            at += before + (column << size)
            if row < self.direct_rows:
                break
            # The number of rows of an indirect block follows from its size.
            rows = row - self.width
            if rows < 1:
                damaged("a heap has invalid block sizes")
        data = self.block(address, at, 1 << size)
        if not 13 + self.offset_size <= offset - at <= len(data) - length:
            damaged("an object is past the end of its block")
        return data[offset - at : offset - at + length]

    def table(self, address: int, at: int, rows: int) -> tuple[int, ...]:
        """Returns the block addresses in an indirect block."""
        if (at, rows) not in self.tables:
            self.parts.once(address)
            count = rows << self.width
            data = self.parts.checked(address, 13 + self.offset_size + 8 * count + 4)
            self.start_of_block(data, b"FHIB", at)
            self.tables[at, rows] = struct.unpack_from(f"<{count}Q", data, 13 + self.offset_size)
        return self.tables[at, rows]

    def block(self, address: int, at: int, size: int) -> bytes:
        """Returns a direct block, including its prefix."""
        if at not in self.blocks:
            self.parts.once(address)
            data = self.parts.part(address, size)
            self.start_of_block(data, b"FHDB", at)
            if self.checksums:
                end = 13 + self.offset_size
                # The checksum is computed with zeros in place of the checksum.
                self.parts.verify(data[:end] + bytes(4) + data[end + 4 :], data[end : end + 4])
            self.blocks[at] = data
        return self.blocks[at]

    def start_of_block(self, data: bytes, signature: bytes, at: int) -> None:
        """Checks the prefix of a block: its type, its heap, and its offset in the heap."""
        magic, version, heap = struct.unpack_from("<4sBQ", data)
        found = int.from_bytes(data[13 : 13 + self.offset_size], "little")
        if (magic, version, heap, found) != (signature, 0, self.address, at):
            damaged("a block of a heap has a wrong header")

    def huge_object(self, number: int) -> bytes:
        """Returns an object that is stored outside the heap."""
        if self.huge is None:
            found = _records(self.parts, self.huge_tree, _HUGE_OBJECT, _HUGE_SIZE)
            self.huge = {number: (address, size) for address, size, number in map(struct.Struct("<3Q").unpack, found)}
        if number not in self.huge:
            damaged("an object of a heap is missing")
        return self.parts.part(*self.huge[number])


def _records(parts: Parts, address: int, kind: int, size: int) -> Iterator[bytes]:
    """Yields the records of a B-tree, in no particular order."""
    parts.once(address)
    magic, version, found_kind, node_size, found_size, depth, root, count, total = struct.unpack(
        "<4s2BI2H2xQHQ", parts.checked(address, 38)
    )
    if (magic, version, found_kind, found_size) != (b"BTHD", 0, kind, size) or depth > _HIGHEST:
        damaged("a tree has a wrong header")
    levels = _levels(node_size, size, depth)
    left = total
    for record in _below(parts, (root, count, depth), kind, size, levels) if total else ():
        left -= 1
        yield record
    if left != 0:
        damaged("the number of records of a tree is wrong")


def _levels(node_size: int, size: int, depth: int) -> list[tuple[int, int, int]]:
    """Returns three numbers for each level of a B-tree, from the leaves to the root.

    The numbers are the maximum number of records of a node, and two field widths of a pointer to the node. The first
    field is the number of the node's records, the second the number of all records below.
    """
    # A node has ten bytes besides records and pointers.
    max_records = total = (node_size - 10) // size
    count_size = _encoded_size(max_records)
    levels = [(max_records, count_size, 0)]
    for _ in range(depth):
        pointer = 8 + count_size + levels[-1][2]
        max_records = (node_size - 10 - pointer) // (size + pointer)
        total = (max_records + 1) * total + max_records
        levels.append((max_records, count_size, _encoded_size(total)))
    if any(max_records < 1 for max_records, _, _ in levels):
        damaged("the nodes of a tree are too small")
    return levels


def _below(
    parts: Parts, node: tuple[int, int, int], kind: int, size: int, levels: list[tuple[int, int, int]]
) -> Iterator[bytes]:
    """Yields the records of a node and of the nodes below. ``node`` is an address, a record count and a level."""
    address, count, level = node
    parts.once(address)
    max_records = levels[level][0]
    _, count_size, total_size = levels[level - 1] if level else (0, 0, 0)
    pointer = 8 + count_size + total_size if level else 0
    if count > max_records:
        damaged("a node of a tree has too many records")
    pointers = 6 + count * size
    data = parts.checked(address, pointers + (count + 1) * pointer + 4)
    if data[:6] != (b"BTIN" if level else b"BTLF") + bytes([0, kind]):
        damaged("a node of a tree has a wrong header")
    for start in range(6, pointers, size):
        yield data[start : start + size]
    for start in range(pointers, len(data), pointer) if level else ():
        child = int.from_bytes(data[start : start + 8], "little")
        within = int.from_bytes(data[start + 8 : start + 8 + count_size], "little")
        yield from _below(parts, (child, within, level - 1), kind, size, levels)


def _encoded_size(maximum: int) -> int:
    """Returns the number of bytes that encode values up to ``maximum``."""
    return (max(maximum, 1).bit_length() - 1) // 8 + 1
