"""Atomic writes of files: into a temporary file beside the path, flushed, renamed.

The core writes its files in the same way (``ortrain-files``). A reader of the path finds the old file or the complete
new one, even if the process is killed.

>>> from ortrain import _files
>>> _files.write("greeting.txt", b"hello")
>>> with open("greeting.txt", "rb") as file:
...     file.read()
b'hello'
"""

from __future__ import annotations

import io
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ortrain._model_source import PathLike
from ortrain.errors import NoSuchFileError, OrtrainError

__all__ = ["check_regular", "log", "npz", "placed", "write"]

# Bytes of a file name. The suffix of a temporary file has two numbers and an extension.
_LONGEST_NAME, _LONGEST_SUFFIX = 255, 40
_counter = itertools.count()
# Windows has no `fcntl`. There, an open file can be neither removed nor renamed, which replaces the lock.
_lock: Callable[[int], None] | None
try:
    import fcntl
except ImportError:
    _lock = None
else:

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_OPEN_FILES_STAY = os.name == "nt"


def check_regular(path: PathLike) -> None:
    """Raise an error for an input path that is a pipe or a device: opening a pipe waits for its writer.

    Raises:
        OrtrainError: for a pipe, a socket or a device.

    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  (the text is the caller's)
    except OSError:
        return  # The read that follows reports the error.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OrtrainError(f"cannot read {os.fspath(path)!s}: it is not a regular file")


def write(path: PathLike, data: bytes) -> None:
    """Write a file atomically. An existing file is replaced.

    Raises:
        NoSuchFileError: if the folder does not exist.
        OrtrainError: if the path is a pipe or a device.
        OSError: if the operating system reports an error.

    """
    with placed(path, replace=True) as file:
        file.write(data)


def log(path: PathLike, kept: int) -> BinaryIO:
    """Open a file that grows at its end. The bytes behind the first ``kept`` bytes are removed.

    A file of this kind is never replaced as a whole: a killed process loses only bytes that it has not flushed.
    """
    file = Path(path).open("r+b" if kept else "wb")  # noqa: SIM115  (the caller closes it)
    file.truncate(kept)
    file.seek(kept)
    return file


def npz(arrays: Mapping[str, Any]) -> bytes:
    """Return the content of an NPZ file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@contextmanager
def placed(path: PathLike, *, replace: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside the path, and rename it to the path at the end.

    A killed process leaves the path unchanged. The next call for the same path removes the leftover temporary file, and
    so does a call for a path that differs in numbers only.

    Args:
        path: the final path.
        replace: True to replace an existing file. Its mode stays, and a symbolic link then points to the new file.

    Raises:
        FileExistsError: if the file exists and ``replace`` is false.
        NoSuchFileError: if the folder does not exist.
        OrtrainError: if the path is a pipe or a device.
        OSError: if the operating system reports an error.

    """
    target = Path(os.path.realpath(path) if replace else os.fspath(path))
    if not target.parent.is_dir():
        raise NoSuchFileError(f"there is no folder {target.parent}; create it first")
    mode = _mode_of(target, path) if replace else None
    _sweep(target)
    if not replace and os.path.lexists(target):
        raise _exists(target)
    file = _beside(target)
    try:
        if mode is not None:
            with suppress(OSError):
                Path(file.name).chmod(mode)
        yield file
        file.flush()
        os.fsync(file.fileno())
        if _OPEN_FILES_STAY:
            file.close()
        _put(Path(file.name), target, replace)
    finally:
        if _OPEN_FILES_STAY:
            file.close()
        with suppress(FileNotFoundError):
            Path(file.name).unlink()
        _close(file)
    _flush_folder(target.parent)


def _mode_of(target: Path, path: PathLike) -> int | None:
    """Return the mode of the file to replace; ``None`` if the file does not exist."""
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(f"cannot write {os.fspath(path)}: it is a folder; name a file in it")
    if not stat.S_ISREG(found):
        kind = "pipe" if stat.S_ISFIFO(found) else "socket" if stat.S_ISSOCK(found) else "device"
        raise OrtrainError(
            f"cannot write {os.fspath(path)}: it is a {kind}, and only regular files are replaced; name another file"
        )
    return stat.S_IMODE(found)


def _close(file: BinaryIO) -> None:
    """Close a file and ignore errors: an earlier flush has already raised errors of its buffer."""
    try:
        file.close()
    except OSError:
        with suppress(OSError):
            file.close()


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a loss of power. Windows cannot open folders, so nothing happens there."""
    if _OPEN_FILES_STAY:
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _put(file: Path, target: Path, replace: bool) -> None:
    """Move a finished file to its path."""
    if replace:
        file.replace(target)
        return
    try:
        # Unlike a rename, a link fails if another process has created the file meanwhile.
        os.link(file, target)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError:
        _put_without_links(file, target)


def _put_without_links(file: Path, target: Path) -> None:
    """Move a file to its path on a file system without links; an empty file reserves the path for a moment."""
    try:
        target.open("xb").close()
    except FileExistsError as error:
        raise _exists(target) from error
    try:
        file.replace(target)
    except OSError:
        target.unlink()
        raise


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(f"the file {target} already exists; a checkpoint must be a new file")


def _beside(target: Path) -> BinaryIO:
    """Create a temporary file beside a path. The file is locked, so that a sweep does not remove it."""
    while True:
        name = target.with_name(f"{_stem(target)}.{os.getpid()}-{next(_counter)}.tmp")
        try:
            file = name.open("xb")
        except FileExistsError:
            # A killed process with the same process ID left this file.
            continue
        _locked(file)
        # A sweep may have removed the file before the lock.
        if name.exists():
            return file
        file.close()


def _stem(target: Path) -> str:
    """Return the first part of temporary names: the name of the file, or a hash of a name near the length limit."""
    name = os.fsencode(target.name)
    if len(name) + _LONGEST_SUFFIX <= _LONGEST_NAME:
        return target.name
    # FNV-1a gives the same hash in every process.
    number = 0xCBF29CE484222325
    for byte in name:
        number = (number ^ byte) * 0x0100000001B3 % 2**64
    return f"~{number:016x}"


def _sweep(target: Path) -> None:
    """Remove temporary files of killed processes, for this path and for paths that differ in numbers only.

    A training that numbers its checkpoints never writes to one path twice. A file that cannot be removed stays.
    """
    stem = _stem(target)
    alike = "~[0-9a-f]{16}" if stem != target.name else "[0-9]+".join(map(re.escape, re.split("[0-9]+", stem)))
    left = re.compile(rf"(?:{alike})\.[0-9]+-[0-9]+\.tmp", re.DOTALL)
    with suppress(OSError):
        for found in target.parent.iterdir():
            if left.fullmatch(found.name) and found.is_file() and not found.is_symlink():
                with suppress(OSError):
                    _remove_left(found)


def _remove_left(found: Path) -> None:
    """Remove a leftover file if no process writes it."""
    if _OPEN_FILES_STAY:
        found.unlink()
        return
    with found.open("rb") as file:
        if _locked(file):
            found.unlink()


def _locked(file: BinaryIO) -> bool:
    """Lock a file and return True; return False if that fails. Without locks, leftover files stay."""
    if _lock is None:
        return False
    try:
        _lock(file.fileno())
    except OSError:
        return False
    return True
