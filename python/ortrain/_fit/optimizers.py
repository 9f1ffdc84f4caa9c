"""Optimizer of a model: by name, or with settings, and with the options that ``fit`` adds."""

from __future__ import annotations

import copy
from typing import Any

from ortrain import artifacts, optim
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.optim import OptimizerConfig

__all__ = ["config_of", "with_options"]


def config_of(optimizer: Any) -> Any:
    """Return the configuration of an optimizer.

    Raises:
        InvalidArgumentError: if there is no optimizer of this name, or the value is no optimizer.

    """
    if isinstance(optimizer, str):
        kinds = {row.name.lower(): row.name for row in optim.table()}
        name = kinds.get(optimizer.lower().replace("_", ""))
        if name is None:
            raise InvalidArgumentError(
                f"there is no optimizer {optimizer!r}; the names are {', '.join(sorted(kinds))}"
                f"{hint(optimizer.lower(), kinds)}"
            )
        return getattr(optim, name)()
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
        f"optimizer must be a name, an optimizer of ortrain.optim, or an OptimType, got {type(optimizer).__name__}"
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
