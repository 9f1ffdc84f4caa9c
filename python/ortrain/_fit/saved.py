"""Folder that ``Model.save`` writes: the files of the training, and the choices of the model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortrain import _files, _ortrain, optim
from ortrain._fit.description import Description
from ortrain._fit.engine import FILES, Engine
from ortrain._fit.losses import Choice, Target
from ortrain._fit.tables import Schema
from ortrain._model_source import ModelInFolder
from ortrain._ortrain import __version__
from ortrain.api import CheckpointState
from ortrain.artifacts import Loss, LossType
from ortrain.errors import InvalidArgumentError, InvalidModelError, NoSuchFileError
from ortrain.optim import OptimizerConfig

__all__ = ["choice_of", "choice_settings", "model_of", "optimizer_of", "read_settings", "schema_of", "write"]

_SETTINGS, _MODEL = "model.json", "model.onnx"


def write(
    folder: Path,
    model: bytes | str | ModelInFolder,
    engine: Engine | None,
    *,
    outputs: Sequence[str],
    class_names: Mapping[str, Sequence[Any]],
    schema: Schema,
    epochs_done: int,
) -> None:
    """Write a model with its training to a folder, which is created.

    Raises:
        InvalidArgumentError: if the path is a file.
        OrtrainError, OSError: if a file cannot be written.

    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is a file, but a model is saved to a folder; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "version": __version__,
        "class_names": {name: list(map(str, names)) for name, names in class_names.items()},
        "features": schema.features,
        "targets": schema.targets,
        "epochs_done": epochs_done,
        "training": None if engine is None else _training(engine),
    }
    if engine is not None:
        engine.plan.generate(folder)
        CheckpointState.save_checkpoint(engine.state, folder / FILES[-1], include_optimizer_state=True)
        # The model has the current weights, so that any program can run it.
        engine.export(folder / _MODEL, outputs, external_data=False, average=False, embed=False)
    else:
        # Without new values, this reads the model with its external data.
        _files.write(folder / _MODEL, _ortrain.with_initializers(model, []))
    # Written last: a folder with settings is complete.
    _files.write(folder / _SETTINGS, json.dumps(settings, indent=2).encode() + b"\n")


def _training(engine: Engine) -> dict[str, Any]:
    plan = engine.plan
    trained = [name for name, parameter in engine.state.parameters if parameter.requires_grad]
    return {
        "trained": trained,
        "outputs": list(plan.outputs),
        "clip_norm": plan.clip_norm,
        "accumulate": plan.accumulate,
        "weighted": plan.weighted,
        "optimizer": _optimizer(plan.optimizer),
        "loss": choice_settings(plan.choice),
    }


def _optimizer(config: Any) -> dict[str, Any] | None:
    """Return the configuration of an optimizer as JSON values; ``None`` if it has callables or is a block."""
    if not isinstance(config, OptimizerConfig) or type(config).__module__.partition(".")[0] != "ortrain":
        return None
    if any(callable(chosen) for chosen in config._chosen):
        return None
    chosen = [each if isinstance(each, str) else list(each) for each in config._chosen]  # type: ignore[arg-type]
    return {
        "name": type(config).__name__,
        "spec": config._spec,
        "groups": config._groups,
        "chosen": chosen,
        "layer_decay": config._layer_decay,
    }


def optimizer_of(saved: Mapping[str, Any] | None) -> OptimizerConfig | None:
    """Return the configuration that :func:`write` stored."""
    if saved is None:
        return None
    kind: type[OptimizerConfig] = getattr(optim, saved["name"])
    config = kind.__new__(kind)
    config._spec, config._groups = dict(saved["spec"]), list(saved["groups"])
    config._chosen, config._layer_decay = list(saved["chosen"]), saved["layer_decay"]
    return config


def choice_settings(choice: Choice) -> dict[str, Any] | None:
    """Return losses and targets as JSON values; ``None`` if the loss is a block."""
    if choice.losses is not None and not isinstance(choice.losses, tuple):
        return None
    losses = None
    if choice.losses is not None:
        losses = []
        for loss in choice.losses:
            fields = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
            for name in ("weight", "pos_weight"):
                fields[name] = None if fields[name] is None else np.asarray(fields[name], np.float64).tolist()
            losses.append(fields | {"kind": loss.kind.name})
    targets = [
        {
            "name": target.name,
            "input": target.input,
            "kind": target.kind,
            "output": None if target.output is None else target.output.name,
            "reason": target.reason,
        }
        for target in choice.targets
    ]
    return {"losses": losses, "targets": targets, "sentence": choice.sentence}


def choice_of(saved: Mapping[str, Any], description: Description) -> Choice:
    """Return the losses that :func:`choice_settings` described."""
    losses = saved["losses"]
    found = None
    if losses is not None:
        found = tuple(Loss(**{**fields, "kind": LossType[fields["kind"]]}) for fields in losses)
    targets = tuple(
        Target(
            each["name"],
            each["input"],
            each["kind"],
            None if each["output"] is None else description.output(each["output"]),
            each["reason"],
        )
        for each in saved["targets"]
    )
    return Choice(found, targets, saved["sentence"])


def schema_of(settings: Mapping[str, Any]) -> Schema:
    """Return the columns of the table of the training."""
    features = settings.get("features")
    return Schema(None if features is None else tuple(features), tuple(settings.get("targets", ())))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a saved model.

    Raises:
        NoSuchFileError: if the folder has no saved model.
        InvalidModelError: if the settings are damaged.

    """
    path = folder / _SETTINGS
    if not path.is_file():
        entries = sorted(os.listdir(folder))[:5]  # noqa: PTH208
        raise NoSuchFileError(
            f"the folder {folder} has no {_SETTINGS}, so no saved model (it has {', '.join(entries) or 'no files'}); "
            "name an ONNX file, or a folder of Model.save"
        )
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidModelError(f"{path} is damaged ({error}); save the model again") from error
    return found


def model_of(folder: Path) -> str:
    """Return the path of the model."""
    return os.fspath(folder / _MODEL)
