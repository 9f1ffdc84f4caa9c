"""Data of a command: training and validation rows, and the model that they are for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortrain import SessionOptions
from ortrain._command.option import UsageError
from ortrain._command.settings import READING
from ortrain._fit.description import Description
from ortrain.data import FileSource, split
from ortrain.data import open as open_source
from ortrain.errors import InvalidArgumentError, NoSuchFileError

__all__ = [
    "default_metrics",
    "describe_data",
    "model_file",
    "model_to_load",
    "open_data",
    "require",
    "run_config",
    "session_options",
    "training_data",
]

# Names of the folders of a data set that is split into parts.
_TRAIN, _VALIDATION = ("train", "training"), ("val", "valid", "validation", "test")
# Maximum number of classes with a printed count.
_MAX_SHOWN_CLASSES = 10
_COLOURS = {1: "gray", 3: "RGB", 4: "RGBA"}


def model_file(path: str) -> str:
    """Return the model of a path: an ONNX file, or the trained model in the folder of a run or of ``Model.save``.

    Raises:
        NoSuchFileError: if there is no such file, or the folder has no model.

    """
    folder = Path(path)
    if not folder.exists():
        raise NoSuchFileError(f"there is no file {path}")
    if not folder.is_dir():
        return path
    for name in ("trained.onnx", "model.onnx"):
        if (folder / name).is_file():
            return os.fspath(folder / name)
    raise NoSuchFileError(f"the folder {path} has no trained.onnx; name an ONNX file, or the folder of a run")


def model_to_load(path: str) -> str:
    """Return the argument of ``Model``: a folder of ``Model.save``, which has the trained weights, or an ONNX file."""
    found = model_file(path)
    return path if Path(path).is_dir() and Path(found).name == "model.onnx" else found


def run_config(path: str) -> Mapping[str, Any]:
    """Return the choices of the run in a folder; empty for a model without them."""
    config = Path(path, "config.json")
    if not config.is_file():
        return {}
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(f"{config} is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


def open_data(
    path: str,
    settings: Mapping[str, Any],
    model: Description,
    *,
    like: FileSource | Mapping[str, Any] | None = None,
    labelled: bool = True,
) -> FileSource:
    """Open data with the settings of a command."""
    chosen = {option.name: settings[option.name] for option in READING if option.name in settings}
    target = chosen.pop("target", None)
    if target is not None:
        chosen["target"] = target[0] if len(target) == 1 else target
    if "model" not in settings:
        return open_source(path, model_inputs=model.inputs, like=like, labelled=labelled, **chosen)
    # Size, normalization and class names may be in the files of the model.
    start = model_file(settings["model"])
    keeps_classes = "classes" not in settings
    return open_source(path, model=start, model_classes=keeps_classes, like=like, labelled=labelled, **chosen)


def training_data(settings: Mapping[str, Any], model: Description) -> tuple[FileSource, FileSource | None]:
    """Return training data and validation data."""
    path, validation = settings["data"], settings.get("val")
    parts = {name: Path(path, name) for name in (*_TRAIN, *_VALIDATION) if Path(path, name).is_dir()}
    train = next((parts[name] for name in _TRAIN if name in parts), None)
    if train is not None and any(name in parts for name in _VALIDATION):
        path = os.fspath(train)
        if validation is None:
            validation = os.fspath(next(parts[name] for name in _VALIDATION if name in parts))
    source = open_data(path, settings, model)
    if validation is None:
        return source, None
    share = _share(validation)
    if share is None:
        return source, open_data(validation, {}, model, like=source)
    return split(source, share, settings.get("seed", 0))


def _share(text: str) -> float | None:
    """Return the share that a text is; ``None`` for a path."""
    if Path(text).exists():
        return None
    try:
        share = float(text)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise UsageError(f"--val must be a path, or a share above 0 and below 1, got {text}")
    return share


def default_metrics(source: FileSource) -> list[str]:
    """Return the metrics that fit the targets of data."""
    if source.labels is not None:
        return ["accuracy"]
    return ["perplexity"] if source.describe()["settings"].get("task") in ("causal-lm", "masked-lm") else []


def session_options(settings: Mapping[str, Any]) -> SessionOptions | None:
    """Return the options of the settings; ``None`` for the defaults."""
    names = {"threads": "intra_op_num_threads", "bf16_fallback": "bf16_fallback"}
    if not names.keys() & settings.keys():
        return None
    options = SessionOptions()
    for name in names.keys() & settings.keys():
        setattr(options, names[name], settings[name])
    return options


def require(settings: Mapping[str, Any], *names: str) -> None:
    """Check that arguments are present.

    Raises:
        UsageError: if one is missing.

    """
    for name in names:
        if name not in settings:
            flag = "MODEL" if name == "model" else f"--{name}"
            raise UsageError(f"{flag} is missing")


def describe_data(source: FileSource) -> str:
    """Return a line about data: kind, rows, classes."""
    description = source.describe()
    nouns = {"images": "images", "audio": "audio files", "text": "blocks of tokens"}
    parts = [f"{len(source):,} {nouns.get(description['kind'], 'rows')}"]
    if source.labels is not None and source.classes is not None:
        parts.append(f"{len(source.classes)} classes: {_counts(source.labels, source.classes)}")
    skipped = description.get("skipped")
    if skipped:
        parts.append(f"{skipped} broken files left out")
    form = _form(description["settings"])
    if "preprocessing" in description:
        form += f" (from {description['preprocessing']})"
    return "; ".join([*parts, form] if form else parts)


def _counts(labels: Any, classes: Sequence[str]) -> str:
    counts = np.bincount(labels, minlength=len(classes)).tolist()
    shown = [f"{name} {count:,}" for name, count in zip(classes, counts, strict=True)][:_MAX_SHOWN_CLASSES]
    return ", ".join(shown) + (", ..." if len(classes) > len(shown) else "")


def _form(settings: Mapping[str, Any]) -> str:
    """Return the form of the rows: sizes, normalization, task."""
    parts = []
    if "size" in settings:
        height, width = settings["size"]
        parts.append(f"{width} x {height} pixels, {_COLOURS[settings['channels']]}, {settings['layout']}")
    if "mean" in settings:
        numbers = [", ".join(f"{value:g}" for value in settings[name]) for name in ("mean", "std")]
        parts.append("mean ({}), std ({})".format(*numbers))
    if "task" in settings:
        parts.append(f"{settings['task']}, at most {settings['length']} tokens")
    if "sample_rate" in settings:
        parts.append(f"{settings['seconds']:g} s at {settings['sample_rate']} Hz")
    return ", ".join(parts)
