"""Members of groups in HDF5 files.

A group in the older layout has a B-tree of symbols and a heap of names. A group in the newer layout has links. A few
links are messages in the header; more links are objects of a fractal heap. The HDF5 library uses the newer layout in
three cases: for names that are not ASCII, for members in creation order, and in files of the newest format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from ortrain._hdf5._dense import heap_objects
from ortrain._hdf5._headers import Header
from ortrain._hdf5._parts import ENTRY, LINKS, NOWHERE, TABLE, Parts, UnreadableError, damaged

__all__ = ["members"]

# Maximum depth of a B-tree, enough for 10**12 names.
_HIGHEST = 8
_IN_ORDER = 1
# Types of links.
_HARD, _SYMBOLIC, _ELSEWHERE = 0, 1, 64
_OTHERS = {_SYMBOLIC: "a symbolic link", _ELSEWHERE: "a link to another file"}


def members(parts: Parts, header: Header) -> dict[str, int] | None:
    """Returns the header addresses of a group's members by name, or ``None`` for an object that is not a group."""
    table, links = header.messages.get(TABLE), header.messages.get(LINKS)
    if table is not None and links is None and not header.links:
        return dict(_symbols(parts, table))
    if links is not None and table is None:
        return _linked(parts, links, header.links)
    if table or links or header.links:
        damaged("the members of a group are inconsistent")
    return None


# Newer layout.


def _linked(parts: Parts, info: bytes, compact: list[bytes]) -> dict[str, int]:
    """Returns the members of a group with links, in creation order if the group stores this order, else by name."""
    version, flags = struct.unpack_from("<2B", info)
    # An optional link count precedes the addresses.
    heap, tree = struct.unpack_from("<2Q", info, 2 + 8 * (flags & _IN_ORDER))
    if version != 0 or (compact and heap != NOWHERE):
        damaged("the link information of a group is invalid")
    found: dict[str, tuple[int, int]] = {}
    links: Iterable[bytes] = compact if heap == NOWHERE else heap_objects(parts, heap, tree)
    for link in links:
        name, order, address = _link(link)
        if name in found:
            damaged("a group has a name twice")
        found[name] = order, address
    # The creation index is 0 for all members if the group does not store an order.
    return {name: found[name][1] for name in sorted(found, key=lambda name: (found[name][0], name.encode()))}


def _link(data: bytes) -> tuple[str, int, int]:
    """Returns the name, the creation index and the address of a link."""
    version, flags = struct.unpack_from("<2B", data)
    # Optional fields: link type, creation index, encoding of the name. The length of the name follows.
    form = "<2x" + "B" * (flags >> 3 & 1) + "Q" * (flags >> 2 & 1) + "x" * (flags >> 4 & 1) + "BHIQ"[flags & 3]
    fields = list(struct.unpack_from(form, data))
    kind = fields.pop(0) if flags & 8 else _HARD
    length = fields.pop()
    start = struct.calcsize(form)
    name = data[start : start + length]
    if version != 1 or len(name) < length or not name or b"/" in name or b"\0" in name:
        damaged("a link of a group is invalid")
    if kind != _HARD:
        raise UnreadableError(f"has {_OTHERS.get(kind, f'a link of the kind {kind}')}, which ORTTrainer does not write")
    return name.decode(), fields[0] if fields else 0, struct.unpack_from("<Q", data, start + length)[0]


# Older layout.


def _symbols(parts: Parts, table: bytes) -> Iterator[tuple[str, int]]:
    """Yields names and header addresses of a group with a symbol table."""
    tree, heap = struct.unpack("<2Q", table)
    magic, version, size, _, start = struct.unpack("<4sB3x3Q", parts.part(heap, 32))
    if magic != b"HEAP" or version != 0:
        damaged("the names of a group have a wrong header")
    texts = parts.part(start, size)
    last = ""
    for leaf in _leaves(parts, tree, None):
        for offset, header, cache, *_ in ENTRY.iter_unpack(leaf):
            if cache == 2:
                raise UnreadableError("has a symbolic link, which ORTTrainer does not write")
            end = texts.find(b"\0", offset)
            parts.spend(max(end - offset, 0))
            name = texts[offset:end].decode() if end >= 0 else ""
            # Names must be in ascending order and not empty.
            if name.encode() <= last.encode() or "/" in name:
                damaged("the names of a group are out of order")
            last = name
            yield name, header


def _leaves(parts: Parts, node: int, above: int | None) -> Iterator[bytes]:
    """Yields the entries of each leaf below a B-tree node. The node must be one level below its parent, ``above``."""
    parts.once(node)
    magic, kind, level, count = struct.unpack("<4s2BH16x", parts.part(node, 24))
    levels = range(_HIGHEST + 1) if above is None else (above - 1,)
    if magic != b"TREE" or kind != 0 or level not in levels:
        damaged("a tree node of a group has a wrong header")
    # Keys and children alternate; the last key has no child.
    for _, child in struct.iter_unpack("<2Q", parts.part(node + 24, 16 * count)):
        if level > 0:
            yield from _leaves(parts, child, level)
            continue
        parts.once(child)
        magic, version, symbols = struct.unpack("<4sBxH", parts.part(child, 8))
        if magic != b"SNOD" or version != 1:
            damaged("the symbols of a group have a wrong header")
        yield parts.part(child + 8, symbols * ENTRY.size)
