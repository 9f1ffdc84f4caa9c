"""Command ``ortrain evaluate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from ortrain._command.output import say
from ortrain._command.sources import (
    default_metrics,
    describe_data,
    model_file,
    model_to_load,
    open_data,
    require,
    run_config,
    session_options,
)
from ortrain._fit.description import describe
from ortrain._fit.model import Model

__all__ = ["evaluate"]


def evaluate(settings: Mapping[str, Any]) -> int:
    """Print the loss and the metrics of a model on files."""
    require(settings, "data")
    path, config = model_file(settings["model"]), run_config(settings["model"])
    source = open_data(settings["data"], settings, describe(path), like=config.get("data"))
    metrics = settings.get("metrics") or config.get("settings", {}).get("metrics") or default_metrics(source)
    arguments = {name: settings[name] for name in ("loss", "device", "precision", "memory_limit") if name in settings}
    model = Model(
        model_to_load(settings["model"]), metrics=metrics, session_options=session_options(settings), **arguments
    )
    values = model.evaluate(source, batch_size=settings.get("batch_size"), return_dict=True)
    if settings.get("json"):
        sys.stdout.write(json.dumps(values) + "\n")
        return 0
    say("data", describe_data(source))
    for name, value in values.items():
        say(name, f"{value:.6g}")
    return 0
