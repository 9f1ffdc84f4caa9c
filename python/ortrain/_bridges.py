"""Shared parts of the bridges to other libraries: content of a model, selection of weights, inputs of a call."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortrain import _files, _ortrain
from ortrain._inspect import inspection
from ortrain._model_source import ModelLike, PathLike, model_source
from ortrain._operators import Plain, Source
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, NoSuchFileError
from ortrain.gradient._names import listed


def source_snapshot(model: ModelLike) -> Plain:
    """Return the current content of a model; external data stays in its files.

    Later changes of the model file then have no effect.

    Raises:
        NoSuchFileError: if the path does not exist.
        OrtrainError: if the path is not a regular file.
        TypeError: if the argument is not a model.

    """
    source = model_source(model)
    if isinstance(source, bytes):
        return source
    path = Path(source)
    _files.check_regular(path)
    try:
        return path.read_bytes(), str(path.parent.resolve())
    except FileNotFoundError as error:
        raise NoSuchFileError(f"there is no file {source}") from error


def chosen_weights(source: Source, wrt: str | Iterable[str] | None, reached: Sequence[str]) -> list[str]:
    """Return the weights that names and patterns select, in the order of ``reached``.

    ``reached`` names the initializers that a gradient reaches. ``None`` selects the weights that
    :func:`ortrain.artifacts.generate_artifacts` trains by default. Running statistics are no weights: patterns skip
    them.

    Raises:
        InvalidArgumentError: for a name or pattern that matches no initializer, for the name of a running statistic,
            and for an initializer that no gradient reaches.
        TypeError: if an entry is not a name.

    """
    roles = {found.name: found.role for found in inspection(source, []).parameters}
    if wrt is None:
        return [name for name in reached if roles.get(name, "trained") == "trained"]
    known = list(dict.fromkeys([name for name, _ in _ortrain.initializers(source)] + [*reached]))
    chosen: set[str] = set()
    for name in [wrt] if isinstance(wrt, str) else listed(wrt, "wrt"):
        if name in known:
            chosen.add(_trainable(name, roles.get(name), reached))
            continue
        fitting = fnmatch.filter([other for other in reached if roles.get(other) != "statistic"], name)
        if not fitting:
            raise InvalidArgumentError(f"wrt: {name!r} matches no initializer{hint(name, known)}")
        chosen.update(fitting)
    return [name for name in reached if name in chosen]


def _trainable(name: str, role: str | None, reached: Sequence[str]) -> str:
    """Return the name of an initializer if it can be trained; otherwise raise an error."""
    if role == "statistic":
        raise InvalidArgumentError(f"wrt: {name!r} is a running statistic, which has no gradient; remove the name")
    if name not in reached:
        raise InvalidArgumentError(
            f"wrt: no gradient reaches {name!r}: it is not a float tensor, or no float output depends on it"
        )
    return name


def trained_model(source: Source, values: Sequence[tuple[str, _ortrain.OrtValue]], path: PathLike | None) -> bytes:
    """Return the model with new values in its initializers, and also write it to the path if there is one.

    Raises:
        NoSuchFileError: if the folder of the path does not exist.

    """
    model = _ortrain.with_initializers(source, values)
    if path is not None:
        _files.write(path, model)
    return model


def in_order(names: Sequence[str], inputs: Sequence[Any], by_name: Mapping[str, Any]) -> list[Any]:
    """Return one value for each input of a model, from positional and named arguments.

    Raises:
        InvalidArgumentError: for too many inputs, an unknown name, and an input that is given twice or not at all.

    """
    expected = f"expected {len(names)} input{'s' * (len(names) != 1)} ({', '.join(names)})"
    if len(inputs) > len(names):
        raise InvalidArgumentError(f"{expected}, got {len(inputs)}")
    found = dict(zip(names, inputs, strict=False))
    for name, value in by_name.items():
        if name not in names:
            raise InvalidArgumentError(f"{expected}, got an input {name!r}{hint(name, names)}")
        if name in found:
            raise InvalidArgumentError(f"input {name!r} is given twice: by position and by name")
        found[name] = value
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidArgumentError(f"{expected}; missing: {', '.join(missing)}")
    return [found[name] for name in names]
