"""Checkpoints of the trainer as files: nested dicts in HDF5, in the layout of onnxruntime-training.

A dict is a group, a value a dataset. Booleans, integers and floats without a shape have rank 0, a text is UTF-8 of any
length, and nothing has attributes. A file gets to its place whole, and never in the place of another one.

>>> from ortrain.trainer import _checkpoint_storage
>>> _checkpoint_storage.save({"weights": {"fc1.bias": np.zeros(3, np.float32)}, "step": 5}, "state.ortcp")
>>> _checkpoint_storage.load("state.ortcp", key="weights/fc1.bias")
array([0., 0., 0.], dtype=float32)
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortrain._files import placed
from ortrain._near import hint
from ortrain._sources import PathLike
from ortrain.errors import InvalidArgumentError, NoSuchFileError
from ortrain.trainer import _hdf5, _unpickler
from ortrain.trainer._values import as_array

__all__ = ["NoCheckpointError", "check_readable", "from_serialized_hex", "load", "placed", "save", "to_serialized_hex"]

# The protocol of every Python that onnxruntime-training ran on.
_PROTOCOL = 4


class NoCheckpointError(NoSuchFileError, InvalidArgumentError):
    """A path without a file. onnxruntime-training raises a ``ValueError``."""


def save(save_obj: Mapping[str, Any], path: PathLike) -> None:
    """Write a nested dict to a new file.

    Args:
        save_obj: a dict by names. Values are dicts, arrays or tensors of booleans, integers or floats, lists of
            numbers, numbers, or texts (``str`` or ``bytes``). A name with ``/`` is a path of groups, as in HDF5.
        path: the file, which is not there yet. Its folder is.

    Raises:
        InvalidArgumentError: for what is no dict, and for a name or a text that HDF5 cannot have. Nothing is written.
        TypeError: for a value of another type. Nothing is written.
        FileExistsError: if there is a file already, or another process makes one meanwhile. That file stays.
        NoSuchFileError: if there is no such folder.
        OSError: when the operating system refuses.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.save({"a": {1, 2}}, "sets.ortcp")
    Traceback (most recent call last):
    TypeError: 'a' is a set, but a checkpoint holds dicts, arrays of numbers, numbers and texts

    """
    if not isinstance(save_obj, Mapping):
        raise InvalidArgumentError(f"a checkpoint is a dict by names, not {type(save_obj).__name__}")
    tree = _tree(save_obj)
    with placed(path) as file:
        _hdf5.write(tree, file)


def load(path: PathLike, key: str | None = None) -> Any:
    """Read a file of :func:`save`, or a part of it.

    Args:
        path: the file.
        key: the names that lead to a part, with ``/`` between them; ``None`` for the whole file.

    Returns:
        a dict for a group, ``bytes`` for a text, a NumPy scalar for a dataset without a shape, an array for others.

    Raises:
        InvalidArgumentError: for no file, for a file that is no HDF5 or is damaged, and for what the trainer does not
            write: links, compressed data, data in other files. No other file is read.
        KeyError: for a key that is not there.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.save({"info": {"step": 5, "name": "Adam"}}, "info.ortcp")
    >>> _checkpoint_storage.load("info.ortcp")
    {'info': {'name': b'Adam', 'step': np.int64(5)}}
    >>> _checkpoint_storage.load("info.ortcp", key="info/name")
    b'Adam'

    """
    place = Path(os.fspath(path))
    names = [part for part in (key or "").split("/") if part]
    try:
        found = place.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoCheckpointError(f"there is no file {place}") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(f"{place} is not an HDF5 file, but a folder, a pipe or a device")
    with place.open("rb") as file:
        try:
            return _hdf5.read(file, os.fstat(file.fileno()).st_size, names)
        except _hdf5.UnreadableError as error:
            raise InvalidArgumentError(f"{place} {error}") from error
        except KeyError as error:
            missing, there = error.args
            raise KeyError(f"{place} has no {key!r}{hint(missing, there)}") from None


def to_serialized_hex(user_dict: Any) -> str:
    """Values of a user as a text: a pickle in hexadecimal digits.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.to_serialized_hex([1])
    '80049506000000000000005d944b01612e'
    """
    return pickle.dumps(user_dict, protocol=_PROTOCOL).hex()


def check_readable(serialized_hex: str) -> None:
    """Check that :func:`from_serialized_hex` reads a text without ``allow_pickle``.

    Raises:
        InvalidArgumentError: for values that it would refuse. The error names their class.

    """
    try:
        from_serialized_hex(serialized_hex)
    except _unpickler.UnknownClassError as error:
        raise InvalidArgumentError(
            f"user_dict has {error.name}, which is no class of numbers, texts, containers, arrays or dates, so that "
            f"load_checkpoint would refuse the file; {_WRITTEN}"
        ) from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"user_dict cannot be read again: {error}; {_WRITTEN}") from error


_WRITTEN = (
    "save_checkpoint(..., allow_pickle=True) writes such values, and load_checkpoint needs that argument then, too"
)


def from_serialized_hex(serialized_hex: str | bytes, *, allow_pickle: bool = False) -> Any:
    """The values of a text of :func:`to_serialized_hex`.

    Args:
        serialized_hex: the text.
        allow_pickle: whether objects of every class are made. That runs code of whoever wrote the text.

    Raises:
        InvalidArgumentError: for another text, and for a class that is none of numbers, texts, containers, arrays or
            dates. The error names the class.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.from_serialized_hex(_checkpoint_storage.to_serialized_hex({"epoch": 3}))
    {'epoch': 3}
    >>> import os
    >>> text = _checkpoint_storage.to_serialized_hex(os.getcwd)
    >>> try:
    ...     _checkpoint_storage.from_serialized_hex(text)
    ... except ValueError as error:
    ...     print(str(error).partition(",")[0])
    the pickle asks for posix.getcwd

    """
    try:
        text = serialized_hex if isinstance(serialized_hex, str) else bytes(serialized_hex).decode("ascii")
        data = bytes.fromhex(text)
    except ValueError as error:
        raise InvalidArgumentError("the values of the user are no text of hexadecimal digits") from error
    return pickle.loads(data) if allow_pickle else _unpickler.loads(data)


# Values that are saved.


def _tree(given: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and leaves of a dict, all checked. A name with ``/`` is a group and what lies in it."""
    tree: dict[str, Any] = {}
    for path, value in _members(given, ()):
        group = tree
        for part in path[:-1]:
            group = _group(group, part, path)
        if isinstance(value, Mapping):
            _group(group, path[-1], path)
        elif path[-1] in group:
            raise InvalidArgumentError(_TWICE.format("/".join(path)))
        else:
            group[path[-1]] = value
    return tree


_TWICE = "{!r} is a value and a group of values, which a name in HDF5 cannot be at once"


def _group(above: dict[str, Any], name: str, path: tuple[str, ...]) -> dict[str, Any]:
    """The group of a name. Where none is, one is made."""
    group = above.setdefault(name, {})
    if not isinstance(group, dict):
        raise InvalidArgumentError(_TWICE.format("/".join(path)))
    return group


def _members(given: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each path in a dict, with its leaf or its dict. A dict comes before its members."""
    for name, value in given.items():
        path = (*above, *_parts(name))
        if len(path) > _hdf5.DEEPEST:
            raise InvalidArgumentError(f"a checkpoint has at most {_hdf5.DEEPEST} dicts, one in the other")
        if isinstance(value, Mapping):
            yield path, value
            yield from _members(value, path)
        else:
            yield path, _leaf(value, "/".join(path))


def _parts(name: object) -> list[str]:
    """The groups of a name, and the last part."""
    if not isinstance(name, str):
        raise TypeError(f"names in a checkpoint are texts, not {name!r}")
    parts = name.split("/")
    # HDF5 leaves out empty parts and dots.
    if 0 in _encoded(name) or any(part in ("", ".") for part in parts):
        raise InvalidArgumentError(
            f"{name!r} cannot be a name in HDF5, which has no empty parts between '/' and no NUL"
        )
    return parts


def _encoded(text: str) -> bytes:
    """A text in UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{text!r:.60} has half a character, which UTF-8 cannot have") from error


def _leaf(value: Any, where: str) -> _hdf5.Leaf:
    """A leaf of a file: a text, or an array of a type that files have."""
    if isinstance(value, str | bytes):
        if 0 in (_encoded(value) if isinstance(value, str) else value):
            raise InvalidArgumentError(f"{where!r} is a text with the character NUL, which HDF5 cannot have")
        return value
    try:
        array = as_array(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong(value, where) from error
    if not _hdf5.holds(array.dtype):
        raise _wrong(value, where)
    return array


def _wrong(value: Any, where: str) -> TypeError:
    of = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    kind = type(value).__name__
    return TypeError(f"{where!r} is a {kind}{of}, but a checkpoint holds dicts, arrays of numbers, numbers and texts")
