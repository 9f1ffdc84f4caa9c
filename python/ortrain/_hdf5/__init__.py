"""Reader of HDF5 files with groups and contiguous datasets.

h5py is not a dependency: its C library ends the process on a full disk (HDF5 2.0.0 with SIGSEGV, at a limit of 300 000
bytes) and has ended it on damaged files. This module needs only NumPy. The reader checks every address and size before
use, and a failing disk is an ``OSError``. ``tests/test_trainer_checkpoint_storage.py`` tests the limits: damaged files
of each layout, overlapping parts, endless links, memory, and full disks.

Files are written in the default layout of h5py, for all names: superblock 0, object headers 1 and B-trees 1 of the HDF5
File Format Specification, version 2.0. h5py uses newer structures for names that are not ASCII, for groups in creation
order and for files of the newest format. The reader supports these too: superblocks 2 and 3, object headers 2, links,
fractal heaps and B-trees 2, all with their checksums.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

import numpy as np

from ortrain._hdf5._groups import members
from ortrain._hdf5._headers import read_header
from ortrain._hdf5._parts import (
    LAYOUT,
    SIGNATURE,
    SPACE,
    SUPERBLOCK,
    TYPE,
    Parts,
    UnreadableError,
    damaged,
    padded,
)
from ortrain._hdf5._types import dtype_of, holds, is_text, shape_of
from ortrain._hdf5._write import Leaf, write

__all__ = ["DEEPEST", "SIGNATURE", "Leaf", "UnreadableError", "holds", "read", "write"]

DEEPEST = 64
"""Maximum nesting of groups."""

# Superblock in versions 2 and 3, without its checksum.
_NEWER_SUPERBLOCK = struct.Struct("<8s4B4Q")
# Supported versions of the layout message, which are identical for contiguous data.
_LAYOUTS = (3, 4, 5)


def read(file: BufferedReader, size: int, path: list[str], *, mapped: bool = False) -> Any:
    """Reads the group (a dict) or the value at a path of names.

    Args:
        file: a file that is open for reading.
        size: the size of the file in bytes.
        path: names of groups; the last name may be a value. Empty for the whole file.
        mapped: True to map arrays of numbers instead of reading them. The maps outlive the file object.

    Returns:
        dicts of NumPy arrays, of NumPy scalars for rank 0, and of ``bytes`` for texts.

    Raises:
        UnreadableError: for a damaged file, or for features that :func:`write` does not write.
        KeyError: for a path that does not exist. The second argument of the error is the list of existing names.
        OSError: if the operating system refuses to read.

    """
    try:
        return _Reading(file, size, mapped=mapped).value(path)
    except UnicodeDecodeError as error:
        raise UnreadableError("is damaged: a name is not UTF-8") from error
    except struct.error as error:
        raise UnreadableError("is damaged: a part is shorter or longer than the format allows") from error


class _Reading:
    """State of reading one file."""

    def __init__(self, file: BufferedReader, size: int, *, mapped: bool = False) -> None:
        self.parts, self.mapped = Parts(file, size), mapped
        self.collections: dict[int, dict[int, bytes]] = {}

    def value(self, path: list[str]) -> Any:
        """Returns the value at a path."""
        address = self.root()
        for name in path:
            found = members(self.parts, read_header(self.parts, address)) or {}
            if name not in found:
                raise KeyError(name, list(found))
            address = found[name]
        value = self.object(address, 0)
        if not path and not isinstance(value, dict):
            damaged("the root object is not a group")
        return value

    def root(self) -> int:
        """Returns the address of the root group's header."""
        parts = self.parts
        start = parts.part(0, min(parts.size, SUPERBLOCK.size))
        if not start.startswith(SIGNATURE):
            raise UnreadableError("is not an HDF5 file")
        version = start[8:9]
        if version == b"\0":
            fields = SUPERBLOCK.unpack(start)
            base, end, root = fields[12], fields[14], fields[17]
            plain = not any((*fields[2:4], fields[5])) and fields[6:8] == (8, 8)
        elif version in (b"\2", b"\3"):
            # The flag means that a program has the file open for writing. The reader does not need the superblock
            # extension.
            _, _, *widths, flag, base, _, end, root = _NEWER_SUPERBLOCK.unpack(parts.checked(0, 48))
            plain = flag == 0 and widths == [8, 8]
        else:
            raise UnreadableError(f"is HDF5 of a newer format ({version.hex()}), which ORTTrainer does not write")
        if not plain or base != 0:
            damaged("the superblock has unsupported sizes or flags")
        if end > parts.size:
            damaged(f"the file ends after {parts.size} of {end} bytes")
        parts.size = end
        return int(root)

    def object(self, address: int, depth: int) -> Any:
        """Returns the group or the value at a header address."""
        if depth > DEEPEST:
            raise UnreadableError(f"has more than {DEEPEST} nested groups")
        header = read_header(self.parts, address)
        found = members(self.parts, header)
        if found is not None:
            return {name: self.object(member, depth + 1) for name, member in found.items()}
        messages = header.messages
        if not {SPACE, TYPE, LAYOUT} <= messages.keys():
            damaged("an object is neither a group nor an array")
        return self.dataset(messages[SPACE], messages[TYPE], messages[LAYOUT])

    def dataset(self, space: bytes, kind: bytes, layout: bytes) -> Any:
        """Returns the value of a dataset."""
        shape = shape_of(space)
        version, form = struct.unpack_from("<2B", layout)
        if version not in _LAYOUTS or form not in (0, 1):
            raise UnreadableError("has chunked data or data of a newer format, which ORTTrainer does not write")
        if form == 1:
            address, size = struct.unpack_from("<2Q", layout, 2)
            within = None
        else:
            (size,) = struct.unpack_from("<H", layout, 2)
            address, within = 0, layout[4 : 4 + size]
            if len(within) < size:
                damaged("an array in a header is longer than the header")
        if is_text(kind):
            if shape != () or size != 16:
                raise UnreadableError("has an array of texts, which ORTTrainer does not write")
            return self.text(self.parts.part(address, size) if within is None else within)
        dtype = dtype_of(kind)
        count = math.prod(shape)
        if count * dtype.itemsize != size:
            damaged(f"an array of {count} elements of the type {dtype} has {size} bytes")
        if within is None and size:
            self.parts.check(address, size)
            if self.mapped and dtype.kind in "iuf" and shape:
                return np.memmap(self.parts.file, dtype, "r", address, shape)
        try:
            array = np.empty(shape, dtype)
        except ValueError as error:
            raise UnreadableError("is damaged: an array has too many elements") from error
        if size:
            buffer = array.reshape(-1).view(np.uint8)
            if within is None:
                self.parts.fill(buffer, address)
            else:
                buffer[:] = np.frombuffer(within, np.uint8)
        if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            damaged("a boolean is neither 0 nor 1")
        return array[()]

    def text(self, reference: bytes) -> bytes:
        """Returns the text for a global heap reference."""
        length, address, index = struct.unpack("<IQI", reference)
        if length == 0:
            return b""
        if address not in self.collections:
            self.collections[address] = dict(self.heap(address))
        text = self.collections[address].get(index, b"")
        self.parts.spend(length)
        if len(text) != length:
            damaged("a text does not have the length of its reference")
        return text

    def heap(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Yields the texts of a global heap with their indices."""
        magic, version, size = struct.unpack("<4sB3xQ", self.parts.part(address, 16))
        if magic != b"GCOL" or version != 1 or size < 16:
            damaged("the heap of a text has a wrong header")
        data = self.parts.part(address + 16, size - 16)
        at = 0
        while at + 16 <= len(data):
            index, _, length = struct.unpack_from("<2H4xQ", data, at)
            if index == 0:
                return
            at += 16
            if length > len(data) - at:
                damaged("a text is longer than its heap")
            yield index, data[at : at + length]
            at += padded(length)
