"""What bridges to other libraries share: the model as it is now, the choice of weights, the inputs of a call."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ortrain import _files, _ortrain
from ortrain._inspect import inspection
from ortrain._near import hint
from ortrain._operators import Plain, Source
from ortrain._sources import ModelLike, PathLike, model_source
from ortrain.errors import InvalidArgumentError, NoSuchFileError
from ortrain.gradient._names import listed


def kept_source(model: ModelLike) -> Plain:
    """What a model says now, so that nothing depends on its file; external data stays where it is.

    Raises:
        NoSuchFileError: for a path that leads nowhere.
        OrtrainError: for a path that is no regular file.
        TypeError: for what is no model.

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
    """The weights that names and patterns choose, in the order of ``reached``: what a gradient reaches.

    ``None`` chooses what :func:`ortrain.artifacts.generate_artifacts` would train. Running statistics are no weights:
    patterns leave them out.

    Raises:
        InvalidArgumentError: for a name or a pattern that fits no initializer, a running statistic by its name, or an
            initializer that no gradient reaches.
        TypeError: for what is no name.

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
            raise InvalidArgumentError(f"wrt has {name!r}, which fits no initializer{hint(name, known)}")
        chosen.update(fitting)
    return [name for name in reached if name in chosen]


def _trainable(name: str, role: str | None, reached: Sequence[str]) -> str:
    """An initializer that is named, if it can be a weight."""
    if role == "statistic":
        raise InvalidArgumentError(f"wrt has {name!r}, a running statistic, which no gradient trains; take it out")
    if name not in reached:
        raise InvalidArgumentError(
            f"wrt has {name!r}, which no gradient reaches: it is no float, or no output of floats depends on it"
        )
    return name


def trained_model(source: Source, values: Sequence[tuple[str, _ortrain.OrtValue]], path: PathLike | None) -> bytes:
    """A model with other values in its initializers, which is written to a path, too, if there is one.

    Raises:
        NoSuchFileError: for a path in a folder that is not there.

    """
    model = _ortrain.with_initializers(source, values)
    if path is not None:
        _files.write(path, model)
    return model


def in_order(names: Sequence[str], inputs: Sequence[Any], by_name: Mapping[str, Any]) -> list[Any]:
    """What a call is given for each input of a model, by places and by names.

    Raises:
        InvalidArgumentError: for another number of inputs, an unknown name, an input that is given twice or not at all.

    """
    wanted = f"the model has {len(names)} input{'s' * (len(names) != 1)} ({', '.join(names)})"
    if len(inputs) > len(names):
        raise InvalidArgumentError(f"{wanted}, but {len(inputs)} are given")
    found = dict(zip(names, inputs, strict=False))
    for name, value in by_name.items():
        if name not in names:
            raise InvalidArgumentError(f"{wanted}, but none is called {name!r}{hint(name, names)}")
        if name in found:
            raise InvalidArgumentError(f"input {name!r} is given twice: by its place and by its name")
        found[name] = value
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidArgumentError(f"{wanted}, but nothing is given for {', '.join(missing)}")
    return [found[name] for name in names]
