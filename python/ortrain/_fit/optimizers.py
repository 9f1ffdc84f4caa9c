"""Optimizer of a model: by name, or with settings, and with the options that ``fit`` adds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ortrain import artifacts, optim
from ortrain._fit.named import create, name_and_settings
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.optim import OptimizerConfig

__all__ = ["config_of", "with_options"]


def config_of(optimizer: Any) -> Any:
    """Return the configuration of an optimizer.

    Raises:
        InvalidArgumentError: if there is no optimizer of this name, or it has no such setting, or the value is no
            optimizer.

    """
    if isinstance(optimizer, (str, Mapping)):
        chosen, settings = name_and_settings(optimizer, "optimizer")
        kinds = {row.name.lower(): row.name for row in optim.table()}
        name = kinds.get(chosen.lower().replace("_", ""))
        if name is None:
            raise InvalidArgumentError(
                f"there is no optimizer {chosen!r}; the names are {', '.join(sorted(kinds))}"
                f"{hint(chosen.lower(), kinds)}"
            )
        return create(getattr(optim, name), f"optimizer {chosen!r}", settings)
    if isinstance(optimizer, artifacts.OptimType):
        optimizer = getattr(artifacts, optimizer.name)()
    if isinstance(optimizer, artifacts.AdamW):
        settings = optimizer._settings()
        flags = {name: settings[name] for name in ("bias_correction", "formula", "max_norm")}
        numbers = {name: settings[name] for name in ("betas", "eps", "weight_decay")}
        return optim.AdamW(**numbers, **flags)
    if isinstance(optimizer, artifacts.SGD):
        return optim.SGD(max_norm=optimizer.max_norm)
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    module = type(optimizer).__module__
    if module == "ortrain.onnxblock" or module.startswith("ortrain.onnxblock."):
        return optimizer
    raise InvalidArgumentError(
        "optimizer must be a name, a dict with a name and settings, an optimizer of ortrain.optim, or an OptimType, "
        f"got {type(optimizer).__name__}"
    )


def with_options(config: Any, clip_norm: float | None, accumulate: int) -> Any:
    """Return the configuration with a maximum norm of the gradients, and with the mean of accumulated gradients.

    Raises:
        InvalidArgumentError: if the optimizer is a block, which cannot be changed.

    """
    if clip_norm is None and accumulate == 1:
        return config
    if not isinstance(config, OptimizerConfig):
        raise InvalidArgumentError(
            "clip_norm and accumulate need an optimizer of ortrain.optim; a block of ortrain.onnxblock has its own "
            "clipping"
        )
    changed = copy.copy(config)
    changed._spec = dict(config._spec)
    if clip_norm is not None:
        changed._spec["max_norm"] = float(clip_norm)
    if accumulate > 1:
        changed._spec["mean_of_gathered"] = True
    return changed
