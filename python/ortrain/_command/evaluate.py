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
from ortrain._fit.saved import choice_of
from ortrain.errors import InvalidArgumentError
from ortrain.metrics import get

__all__ = ["evaluate"]


def evaluate(settings: Mapping[str, Any]) -> int:
    """Print the loss and the metrics of a model on files."""
    require(settings, "data")
    path, config = model_file(settings["model"]), run_config(settings["model"])
    source = open_data(settings["data"], settings, describe(path), like=config.get("data"))
    metrics = settings.get("metrics") or _named_metrics(config, "metrics") or default_metrics(source)
    weighted = settings.get("weighted_metrics") or _named_metrics(config, "weighted_metrics")
    arguments = {name: settings[name] for name in ("loss", "device", "precision", "memory_limit") if name in settings}
    model = Model(
        model_to_load(settings["model"]),
        metrics=metrics,
        weighted_metrics=weighted,
        session_options=session_options(settings),
        **arguments,
    )
    if "loss" not in settings and config.get("choice") is not None:
        # The loss of the run, which these rows might not lead to.
        model._choice = choice_of(config["choice"], model._description)
    values = model.evaluate(source, batch_size=settings.get("batch_size"), return_dict=True)
    if settings.get("json"):
        sys.stdout.write(json.dumps(values) + "\n")
        return 0
    say("data", describe_data(source))
    for name, value in values.items():
        say(name, f"{value:.6g}")
    return 0


def _named_metrics(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the metrics of a run that have a name here; functions of a program have none."""
    found = []
    for name in config.get("settings", {}).get(key) or ():
        try:
            get(name)
        except InvalidArgumentError:
            continue
        found.append(name)
    return found
