"""Command ``ortrain train``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import callbacks, metrics
from ortrain._command.output import say
from ortrain._command.settings import FIT
from ortrain._command.sources import (
    default_metrics,
    describe_data,
    model_file,
    model_to_load,
    require,
    session_options,
    training_data,
)
from ortrain._fit.description import Description, describe
from ortrain._fit.model import Model
from ortrain._fit.run import verbosity
from ortrain._fit.run_folder import RunFolder
from ortrain.data import FileSource
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain._fit.history import History
    from ortrain.callbacks import Callback

__all__ = ["train"]

_MODEL_ARGUMENTS = (
    "loss",
    "optimizer",
    "learning_rate",
    "frozen",
    "lora",
    "device",
    "precision",
    "seed",
    "memory_limit",
)
_CALLBACKS = ("early_stopping", "reduce_on_plateau", "tensorboard")
_DEFAULT_FOLDER = "run"


def train(settings: Mapping[str, Any]) -> int:
    """Train a model on files, and keep the run in a folder."""
    require(settings, "model", "data")
    description = describe(model_file(settings["model"]))
    source, validation = training_data(settings, description)
    model = _model(model_to_load(settings["model"]), settings, source, description)
    folder = _folder(settings)
    say("data", describe_data(source))
    if validation is not None:
        say("validation", describe_data(validation))
    say("run", os.fspath(folder))
    arguments = {option.name: settings[option.name] for option in FIT if option.name in settings}
    for name in (*_CALLBACKS, "class_weight"):
        arguments.pop(name, None)
    verbose = settings.get("verbose")
    if verbose is None:
        verbose = verbosity("auto") or 2
    history = model.fit(
        source,
        **arguments,
        validation_data=validation,
        class_weight=_class_weight(settings.get("class_weight"), source),
        callbacks=_callbacks(settings, has_validation=validation is not None),
        resume=folder,
        verbose=verbose,
        checkpoint_every=float(settings.get("checkpoint_every", 60.0)),
    )
    _print_result(history, folder)
    return 0


def _model(path: str, settings: Mapping[str, Any], source: FileSource, description: Description) -> Model:
    """Return the model with the settings of the command."""
    arguments = {name: settings[name] for name in _MODEL_ARGUMENTS if name in settings}
    if "base" in settings:
        arguments["lora"] = _adapter(arguments.get("lora"), settings["base"])
    if "trainable" in settings:
        which = settings["trainable"]
        arguments["trainable"] = which[0] if len(which) == 1 else which
    chosen, weighted = settings.get("metrics", default_metrics(source)), settings.get("weighted_metrics", ())
    # An unknown name is found before the folder of the run is made.
    metrics.get_all(chosen)
    metrics.get_all(weighted)
    return Model(
        path,
        **arguments,
        classes=_classes(settings.get("classes"), source, description),
        metrics=chosen,
        weighted_metrics=weighted,
        session_options=session_options(settings),
    )


def _adapter(lora: int | Mapping[str, Any] | None, base: str) -> dict[str, Any]:
    """Return the settings of an adapter on a base.

    Raises:
        InvalidArgumentError: if there is no adapter.

    """
    if lora is None:
        raise InvalidArgumentError(f"the base {base!r} is for adapters; set lora, such as --lora 8 --base {base}")
    return {**(lora if isinstance(lora, Mapping) else {"rank": lora}), "base": base}


def _classes(chosen: int | str | None, source: FileSource, description: Description) -> int | None:
    """Return the classes of a new last layer; ``None`` to keep the layer of the model.

    Raises:
        InvalidArgumentError: if the data has no classes, or other ones than the model.

    """
    present = description.outputs[0].classes if len(description.outputs) == 1 else None
    if chosen is None:
        names = source.classes
        if names is not None and present is not None and len(names) != present and (present, len(names)) != (1, 2):
            raise InvalidArgumentError(
                f"the data has {len(names)} classes, the model has {present}; pass --classes auto for a new last layer"
            )
        return None
    if chosen != "auto":
        return int(chosen)
    if source.classes is not None:
        found = len(source.classes)
    elif source.labels is not None:
        found = int(source.labels.max()) + 1
    else:
        raise InvalidArgumentError("the targets of the data are no classes; leave out --classes auto")
    return None if present == found else found


def _class_weight(chosen: Any, source: FileSource) -> Mapping[Any, float] | None:
    """Return the weight of each class by its index."""
    if chosen is None:
        return None
    if source.labels is None:
        raise InvalidArgumentError("the targets of the data are no classes; leave out --class-weight")
    classes = source.classes
    counts = np.bincount(source.labels, minlength=0 if classes is None else len(classes))
    if chosen == "balanced":
        present = counts > 0
        return {int(label): float(len(source) / (present.sum() * counts[label])) for label in np.flatnonzero(present)}
    names = [str(label) for label in range(len(counts))] if classes is None else list(classes)
    weights = {}
    for name, weight in chosen.items():
        if name not in names:
            raise InvalidArgumentError(f"--class-weight names the class {name!r}, which the data does not have")
        weights[names.index(name)] = float(weight)
    return weights


def _callbacks(settings: Mapping[str, Any], *, has_validation: bool) -> list[Callback]:
    found: list[Callback] = []
    monitor = "val_loss" if has_validation else "loss"
    if "early_stopping" in settings:
        patience = settings["early_stopping"]
        found.append(callbacks.EarlyStopping(monitor=monitor, patience=patience, restore_best_weights=True))
    if "reduce_on_plateau" in settings:
        found.append(callbacks.ReduceLROnPlateau(monitor=monitor, patience=settings["reduce_on_plateau"]))
    if "tensorboard" in settings:
        found.append(callbacks.TensorBoard(settings["tensorboard"]))
    return found


def _folder(settings: Mapping[str, Any]) -> Path:
    """Return the folder of the run.

    Raises:
        InvalidArgumentError: if the folder holds a run, and it is not to go on.

    """
    resume = settings.get("resume", False)
    if "out" in settings:
        folder = Path(settings["out"])
        if folder.is_dir() and not resume and RunFolder(folder, None).has_run:
            raise InvalidArgumentError(f"{folder} holds a run; pass --resume to go on with it, or another --out")
        return folder
    number, folder = 1, Path(_DEFAULT_FOLDER)
    last = folder
    while folder.exists():
        last, number = folder, number + 1
        folder = Path(f"{_DEFAULT_FOLDER}-{number}")
    return last if resume else folder


def _print_result(history: History, folder: Path) -> None:
    """Print the last values of the history, and the files of the run."""
    rows = history.rows()
    if rows:
        values = ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items() if isinstance(value, float))
        say("result", values)
    for name, what in (("trained.onnx", "model"), ("report.html", "report")):
        if (folder / name).is_file():
            say(what, os.fspath(folder / name))
