"""A run of ``fit``: its arguments, its folder, and the loop."""

from __future__ import annotations

import hashlib
import math
import operator
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._fit.data import Data, read_data
from ortrain._fit.engine import Engine
from ortrain._fit.history import History
from ortrain._fit.loop import Evaluation, Training
from ortrain._fit.meters import Meter
from ortrain._fit.run_folder import RunFolder
from ortrain._fit.saved import choice_settings
from ortrain._fit.scheduling import scheduler_of
from ortrain._model_source import ModelInFolder
from ortrain.errors import InvalidArgumentError, OrtrainError

if TYPE_CHECKING:
    from ortrain._fit.model import Model
    from ortrain._fit.report import Report

__all__ = ["FitArguments", "run_fit", "verbosity"]


@dataclass(frozen=True)
class FitArguments:
    """Arguments of ``fit`` besides the data."""

    batch_size: int | str
    epochs: int
    shuffle: bool
    class_weight: Mapping[Any, float] | None
    accumulate: int
    clip_norm: float | None
    schedule: Any
    callbacks: Any
    resume: Any
    verbose: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int
    validation_split: float
    checkpoint_every: int | float | None

    def checked(self) -> FitArguments:
        """Return the arguments with plain numbers.

        Raises:
            InvalidArgumentError: if a number is out of range.

        """
        for name, least in (
            ("batch_size", 1),
            ("epochs", 0),
            ("accumulate", 1),
            ("initial_epoch", 0),
            ("steps_per_epoch", 1),
            ("validation_steps", 1),
            ("validation_batch_size", 1),
            ("validation_freq", 1),
        ):
            value = getattr(self, name)
            if value is None or (name == "batch_size" and value == "auto"):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
                auto = ", or 'auto'" if name == "batch_size" else ""
                raise InvalidArgumentError(f"{name} must be an integer of at least {least}{auto}, got {value!r}")
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise InvalidArgumentError(f"clip_norm must be a number above 0, got {self.clip_norm!r}")
        every = self.checkpoint_every
        if every is not None and (isinstance(every, bool) or not every > 0):
            raise InvalidArgumentError(f"checkpoint_every must be a number of steps or seconds above 0, got {every!r}")
        if self.class_weight is not None and (not isinstance(self.class_weight, Mapping) or not self.class_weight):
            raise InvalidArgumentError(
                f"class_weight must be a dict with a number for each class, got {self.class_weight!r}"
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Return the arguments that determine the bits of a run, as JSON values."""
        left_out = ("callbacks", "resume", "class_weight")
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        found["schedule"] = None if self.schedule is None else repr(self.schedule)
        weights = self.class_weight
        found["class_weight"] = (
            None if weights is None else {str(name): float(value) for name, value in weights.items()}
        )
        return found


def verbosity(verbose: Any) -> int:
    """Return 0 for silence, 1 for a progress bar, 2 for a line per epoch.

    Raises:
        InvalidArgumentError: for another value.

    """
    if verbose == "auto":
        from ortrain.callbacks._progress import is_watched

        return int(is_watched())
    if isinstance(verbose, (bool, int)) and verbose in (0, 1, 2):
        return int(verbose)
    raise InvalidArgumentError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}")


def run_fit(model: Model, data: Data, validation_data: Any, arguments: FitArguments) -> History:
    """Train a model; see ``Model.fit``."""
    arguments = arguments.checked()
    validation: Data | None = None
    if validation_data is not None:
        validation = _validation_of(model, validation_data)
    elif arguments.validation_split:
        data, validation = data.split(float(arguments.validation_split), model._seed)
    weighted = (
        data.is_weighted or arguments.class_weight is not None or (validation is not None and validation.is_weighted)
    )
    clip_norm, accumulate = arguments.clip_norm, arguments.accumulate
    # The choice of the loss reads a batch, which may have weights.
    model._choose(data)
    weighted = weighted or data.is_weighted
    engine = model._engine_for(data, weighted=weighted, clip_norm=clip_norm, accumulate=accumulate, training=True)
    folder = None if arguments.resume is None else RunFolder(os.fspath(arguments.resume), arguments.checkpoint_every)
    is_resumed = folder is not None and folder.has_run
    if arguments.batch_size == "auto":
        # The free memory may have changed since the first start.
        size = (
            folder.settings()["batch_size"]
            if folder is not None and is_resumed
            else model._find_batch_size(data, engine)
        )
        arguments = replace(arguments, batch_size=size)
    if model._learning_rate == "find":
        if folder is not None and is_resumed:
            model.range_test = folder.range_test()
        else:
            _find_rate(model, engine, data, arguments)
    try:
        return _run_in_folder(model, engine, data, validation, arguments, folder)
    except BaseException:
        # A run that failed before its first checkpoint leaves no folder.
        if folder is not None:
            with suppress(OSError):
                folder.discard()
        raise


def _run_in_folder(
    model: Model,
    engine: Engine,
    data: Data,
    validation: Data | None,
    arguments: FitArguments,
    folder: RunFolder | None,
) -> History:
    position: Mapping[str, Any] | None = None
    if folder is not None:
        folder.begin(_config(model, data, validation, _settings(model, engine, data, arguments)))
        if folder.has_run:
            state, position = folder.load()
            engine = engine.with_state(state)
            model._engine = engine
    model._run_folder = None if folder is None else folder.path
    training = _training(model, engine, data, validation, arguments, folder, position)
    started = time.monotonic()

    def make_report() -> Report:
        from ortrain._fit.run_report import report_of

        config = _config(model, data, validation, _settings(model, engine, data, arguments))
        return report_of(model, training.history, data, validation, config, seconds)

    training.history._make_report = make_report
    _run(model, training, arguments, position)
    seconds = time.monotonic() - started
    if folder is not None and not (position is not None and folder.report.exists() and training.is_unchanged):
        model.export(folder.trained)
        training.history.report(folder.report)
    return training.history


def _validation_of(model: Model, validation_data: Any) -> Data:
    if isinstance(validation_data, tuple) and len(validation_data) in (2, 3):
        x, y, *rest = validation_data
        return read_data(x, y, rest[0] if rest else None, model._description, model._schema)
    return read_data(validation_data, None, None, model._description, model._schema)


def _training(
    model: Model,
    engine: Engine,
    data: Data,
    validation: Data | None,
    arguments: FitArguments,
    folder: RunFolder | None,
    position: Mapping[str, Any] | None,
) -> Training:
    first_pass = model._epochs_done if position is None else int(position["first_pass"])
    layout = model._layout(engine, arguments.class_weight)
    size = int(arguments.batch_size)
    feed = model._feed(data, layout, size, shuffle=arguments.shuffle, training=True, first_pass=first_pass)
    steps = arguments.steps_per_epoch or feed.steps_per_pass
    params = {
        "epochs": arguments.epochs,
        "steps": steps,
        "batch_size": None if data.source is None else layout.fixed or size,
    }
    callbacks = model._callback_list(arguments.callbacks, arguments.verbose, params)
    if model._choice is not None and model._choice.sentence and not model._said:
        model._said = True
        if verbosity(arguments.verbose):
            sys.stderr.write(model._choice.sentence + "\n")
    history = History({**params, "loss": "" if model._choice is None else model._choice.sentence})
    evaluation: Evaluation | None = None
    if validation is not None:
        if validation.class_names or model._class_names:
            model._choose(validation)
        evaluation = model._evaluation(
            engine, validation, arguments.validation_batch_size or size, arguments.validation_steps
        )
    scheduler, by_metric = scheduler_of(
        engine, arguments.schedule, _updates(arguments, steps), resumed=position is not None
    )
    training = Training(
        model=model,
        engine=engine,
        feed=feed,
        layout=layout,
        meter=Meter(model._metrics, layout, engine.module.output_names()),
        callbacks=callbacks,
        history=history,
        epochs=arguments.epochs,
        steps_per_epoch=arguments.steps_per_epoch,
        accumulate=arguments.accumulate,
        scheduler=scheduler,
        is_scheduled_by_metric=by_metric,
        validation=evaluation,
        validation_freq=arguments.validation_freq,
        save=None,
        is_due=None,
        epoch=arguments.initial_epoch,
    )
    if folder is not None:
        training.save = _saver(folder, first_pass)
        training.is_due = folder.is_due if arguments.checkpoint_every is not None else None
    if position is not None:
        training.restore(position)
    return training


def _saver(folder: RunFolder, first_pass: int) -> Any:
    def write(training: Training, is_epoch: bool) -> None:
        state = training.engine.state
        if is_epoch:
            rows = training.history.rows()
            if rows:
                folder.save_best(state, rows[-1])
        folder.save(state, {**training.state(), "first_pass": first_pass})
        if is_epoch:
            folder.write_history(training.history)

    def save(training: Training, is_epoch: bool) -> None:
        try:
            write(training, is_epoch)
        except (OSError, OrtrainError) as error:
            remedy = (
                "the checkpoint before is still there: remove the obstacle, and fit with resume goes on from it"
                if folder.has_run
                else "remove the obstacle, or use another folder"
            )
            raise OrtrainError(f"the run cannot be saved in {folder.path} ({error}); {remedy}") from error

    return save


def _run(model: Model, training: Training, arguments: FitArguments, position: Mapping[str, Any] | None) -> None:
    model.history = training.history
    done = position is not None and bool(position["is_finished"]) and arguments.epochs <= int(position["epochs"])
    if done:
        training.is_finished = training.is_unchanged = True
        return
    first = training.epoch
    try:
        training.run(None if position is None else position["callbacks"])
    finally:
        model._epochs_done += training.epoch - (first if position is None else 0)


def _updates(arguments: FitArguments, steps: int | None) -> int | None:
    """Return the number of updates of all epochs; ``None`` if it is unknown."""
    if steps is None:
        return None
    return -(-steps // arguments.accumulate) * (arguments.epochs - arguments.initial_epoch)


def _find_rate(model: Model, engine: Engine, data: Data, arguments: FitArguments) -> None:
    from ortrain._fit.range_test import find_learning_rate

    if hasattr(data.batches, "__next__"):
        raise InvalidArgumentError(
            "learning_rate='find' reads the data before the training, but a generator is read once; pass an iterable "
            "that can be passed over again"
        )
    layout = model._layout(engine, arguments.class_weight)
    again = replace(data, peeked=None)
    feed = model._feed(again, layout, int(arguments.batch_size), shuffle=arguments.shuffle, training=True)
    model.range_test = find_learning_rate(engine, feed, layout)
    engine.optimizer.set_learning_rate(model.range_test.suggestion)
    if verbosity(arguments.verbose):
        sys.stderr.write(f"{model.range_test}\n")


def _settings(model: Model, engine: Engine, data: Data, arguments: FitArguments) -> dict[str, Any]:
    """Return all choices of a run as JSON values."""
    choice = model._choice
    settings = {
        **arguments.settings(),
        "loss": "" if choice is None else choice.sentence or repr(model._loss),
        "optimizer": repr(engine.plan.optimizer),
        "learning_rate": model._learning_rate,
        "trained": [name for name, each in engine.state.parameters if each.requires_grad],
        "metrics": list(map(_metric_name, model._metrics.plain)),
        "weighted_metrics": list(map(_metric_name, model._metrics.weighted)),
        "seed": model._seed,
        "precision": model._precision,
        "device": model._device,
        "memory_limit": model._memory_limit,
    }
    weights = getattr(data.source, "weights", None)
    if weights is not None:
        settings["sample_weight"] = hashlib.sha256(np.ascontiguousarray(weights).tobytes()).hexdigest()[:32]
    return settings


def _metric_name(metric: Any) -> str:
    return metric if isinstance(metric, str) else str(getattr(metric, "name", getattr(metric, "__name__", "")))


def _config(model: Model, data: Data, validation: Data | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a run, with hashes of the model and the data."""
    # A message that refers to a base has the checksums of its files.
    source = model._source.message if isinstance(model._source, ModelInFolder) else model._source
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    return {
        "model": {"hash": hashlib.sha256(content).hexdigest()},
        "data": data.describe(),
        "validation_data": None if validation is None else validation.describe(),
        "choice": None if model._choice is None else choice_settings(model._choice),
        "range_test": None if model.range_test is None else asdict(model.range_test),
        "settings": settings,
    }
