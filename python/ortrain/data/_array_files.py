"""Arrays in NPY, NPZ, HDF5 and safetensors files, read without loading them whole."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from ortrain import _hdf5
from ortrain._extras import required
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "LazyArray", "open_arrays"]

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5", ".safetensors")

# End of the local header of a member of a ZIP file: lengths of its name and of its extra field.
_LOCAL_HEADER = struct.Struct("<26xHH")
# Bytes that are decompressed at once.
_BLOCK_BYTES = 1 << 20
# Maximum size of the header of a safetensors file, from its specification.
_MAX_HEADER_BYTES = 100_000_000
_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
    # Bits of bfloat16, which NumPy does not have.
    "BF16": "<u2",
}


class LazyArray(Protocol):
    """Array in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the array."""

    def __getitem__(self, rows: Any) -> Any: ...


def open_arrays(path: Path) -> Mapping[str, LazyArray]:
    """Return the arrays of a file by name, or of a folder of NPY files by the names of the files.

    Raises:
        InvalidArgumentError: if the file is damaged.

    """
    if path.is_dir():
        return {file.stem: _open_npy(file) for file in sorted(path.glob("*.npy"))}
    readers: dict[str, Callable[[Path], Mapping[str, LazyArray]]] = {
        ".npy": lambda file: {file.stem: _open_npy(file)},
        ".npz": _open_npz,
        ".h5": _open_hdf5,
        ".hdf5": _open_hdf5,
        ".safetensors": _open_safetensors,
    }
    return readers[path.suffix.lower()](path)


def _unreadable(path: Path, problem: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} cannot be read as arrays: {problem}")


def _open_npy(path: Path) -> LazyArray:
    try:
        found: LazyArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _unreadable(path, error) from error
    return found


def _open_npz(path: Path) -> Mapping[str, LazyArray]:
    """Map stored members, and uncompressed copies of the other members."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return {
                info.filename.removesuffix(".npy"): _member(archive, info, file)
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, struct.error) as error:
        raise _unreadable(path, error) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: BinaryIO) -> LazyArray:
    """Map a member of a NPZ file."""
    if info.compress_type == zipfile.ZIP_STORED:
        file.seek(info.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(name_length + extra_length, os.SEEK_CUR)
        return _mapped(file, info.filename, file.tell() + info.file_size)
    with archive.open(info) as member, tempfile.TemporaryFile() as spool:
        while block := member.read(_BLOCK_BYTES):
            spool.write(block)
        size = spool.tell()
        spool.seek(0)
        return _mapped(spool, info.filename, size)


def _mapped(file: BinaryIO, name: str, end: int) -> LazyArray:
    """Map the array of the NPY format at the position of a file. The map outlives the file object."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"the array {name} has Python objects")
    count = math.prod(shape)
    if file.tell() + count * dtype.itemsize > end:
        raise ValueError(f"the array {name} is cut short")
    if not count:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _open_safetensors(path: Path) -> Mapping[str, LazyArray]:
    size = path.stat().st_size
    with path.open("rb") as file:
        count = int.from_bytes(file.read(8), "little")
        if not 2 <= count <= min(size - 8, _MAX_HEADER_BYTES):
            raise _unreadable(path, "the header of a safetensors file is missing")
        try:
            header = json.loads(file.read(count))
            return {
                name: _tensor(path, entry, 8 + count, size) for name, entry in header.items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(path, f"its header is damaged ({error})") from error


def _tensor(path: Path, entry: Mapping[str, Any], start: int, size: int) -> LazyArray:
    """Map a tensor of a safetensors file."""
    begin, end = entry["data_offsets"]
    dtype, shape = np.dtype(_SAFETENSORS[entry["dtype"]]), tuple(map(int, entry["shape"]))
    if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= size - start:
        raise ValueError("a tensor is outside the file")
    if begin == end:
        return np.empty(shape, dtype)
    mapped = np.memmap(path, dtype, "r", start + begin, shape)
    return _Bfloat16(mapped) if entry["dtype"] == "BF16" else mapped


class _Bfloat16:
    """Array of bfloat16. Its rows are read as float32."""

    def __init__(self, bits: npt.NDArray[np.uint16]) -> None:
        self._bits = bits
        self.shape, self.dtype = bits.shape, np.dtype(np.float32)

    def __getitem__(self, rows: Any) -> npt.NDArray[np.float32]:
        return (np.asarray(self._bits[rows]).astype(np.uint32) << 16).view(np.float32)


def _open_hdf5(path: Path) -> Mapping[str, LazyArray]:
    """Read plain arrays with the reader of the package, and all other files with h5py."""
    try:
        with path.open("rb") as file:
            found = _hdf5.read(file, path.stat().st_size, [], mapped=True)
        return dict(_leaves(found, ""))
    except _hdf5.UnreadableError as error:
        if str(error).startswith(("is damaged", "is not")):
            raise _unreadable(path, f"it {error}") from error
    h5py = required("h5py", "h5py", "hdf5", "an HDF5 file with compressed or chunked data")
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise _unreadable(path, error) from error
    arrays: dict[str, LazyArray] = {}
    opened.visititems(lambda name, item: _add_dataset(arrays, name, item, h5py))
    return arrays


def _add_dataset(arrays: dict[str, LazyArray], name: str, item: Any, h5py: Any) -> None:
    if isinstance(item, h5py.Dataset) and item.dtype.kind in "biuf":
        arrays[name] = _Dataset(item)


def _leaves(group: Mapping[str, Any], prefix: str) -> list[tuple[str, LazyArray]]:
    """Return the arrays of nested groups, with the path of each as its name."""
    found: list[tuple[str, LazyArray]] = []
    for name, value in group.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{name}/")
        elif isinstance(value, np.ndarray):
            found.append((prefix + name, value))
    return found


class _Dataset:
    """Dataset of h5py, which reads only sorted rows without duplicates."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[Any] = dataset.dtype

    def __getitem__(self, rows: Any) -> npt.NDArray[Any]:
        unique, back = np.unique(rows, return_inverse=True)
        found: npt.NDArray[Any] = self._dataset[unique]
        return found[back]
