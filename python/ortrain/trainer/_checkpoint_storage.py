"""Checkpoint files of the trainer: nested dicts in HDF5, in the layout of onnxruntime-training.

A dict is stored as a group, and a value as a dataset. Scalar booleans, integers and floats have rank 0. A text is UTF-8
of variable length. There are no attributes. ``save`` publishes a file only after it is complete, and never replaces an
existing file.

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

from ortrain import _hdf5, _unpickler
from ortrain._files import placed
from ortrain._model_source import PathLike
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, NoSuchFileError
from ortrain.trainer._values import as_array

__all__ = ["NoCheckpointError", "check_readable", "from_serialized_hex", "load", "placed", "save", "to_serialized_hex"]

# Pickle protocol 4: every Python version that onnxruntime-training ran on reads it.
_PROTOCOL = 4


class NoCheckpointError(NoSuchFileError, InvalidArgumentError):
    """Error for a path without a file. It is also a ``ValueError``, the error of onnxruntime-training."""


def save(save_obj: Mapping[str, Any], path: PathLike) -> None:
    """Writes a nested dict to a new file.

    Args:
        save_obj: a dict with texts as keys. A value is a dict, an array or tensor of booleans, integers or floats, a
            list of numbers, a number, or a text (``str`` or ``bytes``). A key with ``/`` is a path of groups, as in
            HDF5.
        path: the new file. Its folder must exist, the file must not.

    Raises:
        InvalidArgumentError: if ``save_obj`` is not a dict, or for a key or a text that HDF5 cannot store. Nothing is
            written.
        TypeError: for a value of another type. Nothing is written.
        FileExistsError: if the file exists, or another process creates the file at the same time. That file stays
            unchanged.
        NoSuchFileError: if the folder does not exist.
        OSError: if the operating system refuses to write.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.save({"a": {1, 2}}, "sets.ortcp")
    Traceback (most recent call last):
    TypeError: 'a' is a set, but a checkpoint holds dicts, arrays of numbers, numbers and texts

    """
    if not isinstance(save_obj, Mapping):
        raise InvalidArgumentError(f"a checkpoint must be a dict with names as keys, got {type(save_obj).__name__}")
    tree = _tree(save_obj)
    with placed(path) as file:
        _hdf5.write(tree, file)


def load(path: PathLike, key: str | None = None) -> Any:
    """Reads a file of :func:`save`, or a part of the file.

    Args:
        path: the file.
        key: the path of a part, with ``/`` between the names; ``None`` for the whole file.

    Returns:
        a dict for a group, ``bytes`` for a text, a NumPy scalar for a dataset of rank 0, an array for other datasets.

    Raises:
        InvalidArgumentError: if the file does not exist, is not HDF5 or is damaged; also for features that the trainer
            does not write: links, compressed data, data in other files. No other file is read.
        KeyError: for a key that the file does not have.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.save({"info": {"step": 5, "name": "Adam"}}, "info.ortcp")
    >>> _checkpoint_storage.load("info.ortcp")
    {'info': {'name': b'Adam', 'step': np.int64(5)}}
    >>> _checkpoint_storage.load("info.ortcp", key="info/name")
    b'Adam'

    """
    location = Path(os.fspath(path))
    names = [part for part in (key or "").split("/") if part]
    try:
        found = location.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoCheckpointError(f"there is no file {location}") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(f"{location} is not an HDF5 file, but a folder, a pipe or a device")
    with location.open("rb") as file:
        try:
            return _hdf5.read(file, os.fstat(file.fileno()).st_size, names)
        except _hdf5.UnreadableError as error:
            raise InvalidArgumentError(f"{location} {error}") from error
        except KeyError as error:
            missing, there = error.args
            raise KeyError(f"{location} has no {key!r}{hint(missing, there)}") from None


def to_serialized_hex(user_dict: Any) -> str:
    """Returns ``user_dict`` as a pickle in hexadecimal digits.

    >>> from ortrain.trainer import _checkpoint_storage
    >>> _checkpoint_storage.to_serialized_hex([1])
    '80049506000000000000005d944b01612e'
    """
    return pickle.dumps(user_dict, protocol=_PROTOCOL).hex()


def check_readable(serialized_hex: str) -> None:
    """Checks that :func:`from_serialized_hex` reads a text without ``allow_pickle``.

    Raises:
        InvalidArgumentError: for a value that ``from_serialized_hex`` would refuse. The error names the class of the
            value.

    """
    try:
        from_serialized_hex(serialized_hex)
    except _unpickler.UnknownClassError as error:
        raise InvalidArgumentError(
            f"user_dict has {error.name}, but load_checkpoint reads only numbers, texts, containers, arrays and "
            f"dates; {_WRITTEN}"
        ) from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"user_dict cannot be read again: {error}; {_WRITTEN}") from error


_WRITTEN = "pass allow_pickle=True to save_checkpoint and to load_checkpoint for objects of all classes"


def from_serialized_hex(serialized_hex: str | bytes, *, allow_pickle: bool = False) -> Any:
    """Returns the values in a text of :func:`to_serialized_hex`.

    Args:
        serialized_hex: the text.
        allow_pickle: if true, objects of every class are created. This runs code of the text's author.

    Raises:
        InvalidArgumentError: for an invalid text, and for an object that is not a number, text, container, array or
            date. The error names the class.

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
        raise InvalidArgumentError("user_dict is not a text of hexadecimal digits") from error
    return pickle.loads(data) if allow_pickle else _unpickler.loads(data)


# Conversion of the values to save.


def _tree(nested_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the groups and leaves of a dict after checks. A name with ``/`` becomes nested groups."""
    tree: dict[str, Any] = {}
    for path, value in _members(nested_dict, ()):
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


_TWICE = "{!r} is the name of a value and of a group, but HDF5 allows only one of them"


def _group(above: dict[str, Any], name: str, path: tuple[str, ...]) -> dict[str, Any]:
    """Returns the group with a name, which is created if it does not exist."""
    group = above.setdefault(name, {})
    if not isinstance(group, dict):
        raise InvalidArgumentError(_TWICE.format("/".join(path)))
    return group


def _members(nested_dict: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each path in a dict with its leaf or its dict. A dict precedes its members."""
    for name, value in nested_dict.items():
        path = (*above, *_parts(name))
        if len(path) > _hdf5.DEEPEST:
            raise InvalidArgumentError(f"a checkpoint can have at most {_hdf5.DEEPEST} nested dicts")
        if isinstance(value, Mapping):
            yield path, value
            yield from _members(value, path)
        else:
            yield path, _leaf(value, "/".join(path))


def _parts(name: object) -> list[str]:
    """Splits a name at ``/``: the groups, then the last part."""
    if not isinstance(name, str):
        raise TypeError(f"a name in a checkpoint must be a str, got {name!r}")
    parts = name.split("/")
    # HDF5 ignores empty parts and dots in a path, so two names could mean the same dataset.
    if 0 in _encoded(name) or any(part in ("", ".") for part in parts):
        raise InvalidArgumentError(
            f"{name!r} cannot be a name in HDF5: parts between '/' must not be empty or '.', and NUL is not allowed"
        )
    return parts


def _encoded(text: str) -> bytes:
    """Encodes a text in UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{text!r:.60} has half of a surrogate pair, which UTF-8 cannot encode") from error


def _leaf(value: Any, where: str) -> _hdf5.Leaf:
    """Converts a value to a leaf of the file: a text, or an array of a type that HDF5 files can store."""
    if isinstance(value, str | bytes):
        if 0 in (_encoded(value) if isinstance(value, str) else value):
            raise InvalidArgumentError(f"{where!r} is a text with the character NUL, which HDF5 cannot store")
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
