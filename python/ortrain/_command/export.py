"""Command ``ortrain export``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortrain import InferenceSession, _ortrain
from ortrain._command.output import say
from ortrain._command.sources import model_to_load
from ortrain._fit.model import Model

__all__ = ["export"]

_ARGUMENTS: Mapping[str, Any] = {"opset": None, "float16": False, "external_data": False}


def export(settings: Mapping[str, Any]) -> int:
    """Write the trained model of a run, or another model, in the chosen form."""
    target = Path(settings["output"])
    path = model_to_load(settings["model"])
    arguments = {name: settings.get(name, default) for name, default in _ARGUMENTS.items()}
    if Path(path).is_dir():
        Model(path).export(target, **arguments)
    else:
        _ortrain.convert_model(path, str(target), **arguments)
    # The file is read again, so that a model that cannot run is found here.
    InferenceSession(target)
    data = target.with_name(f"{target.name}.data")
    say("model", str(target))
    if settings.get("external_data", False) and data.is_file():
        say("weights", str(data))
    say("size", f"{target.stat().st_size:,} bytes" + (f" + {data.stat().st_size:,} bytes" if data.is_file() else ""))
    return 0
