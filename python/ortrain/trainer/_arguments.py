"""Checks of a trainer's arguments, and choice of its compute precision."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.trainer.amp.loss_scaler import DynamicLossScaler, LossScaler
from ortrain.trainer.optim.config import _OptimizerConfig
from ortrain.trainer.orttrainer_options import ORTTrainerOptions

__all__ = ["check_arguments", "is_onnx_model", "precision_of"]

_PRECISIONS = ("float16", "bfloat16")


def check_arguments(model: object, model_desc: object, optim_config: object, loss_fn: object, options: object) -> None:
    """Raises an AssertionError for an argument of the wrong type."""
    if model is None:
        raise AssertionError("'model' is required and must be either a 'torch.nn.Module' or an 'onnx.ModelProto'")
    if not isinstance(model_desc, dict):
        raise AssertionError(f"'model_desc' must be a dict, got {type(model_desc).__name__}")
    if not isinstance(optim_config, _OptimizerConfig):
        raise AssertionError(
            f"'optim_config' must be an AdamConfig, LambConfig or SGDConfig, got {type(optim_config).__name__}"
        )
    if loss_fn is not None and not _takes_two(loss_fn):
        raise AssertionError("'loss_fn' must be either None or a callable with two parameters")
    if options is not None and not isinstance(options, ORTTrainerOptions):
        raise AssertionError(f"'options' must be either None or an ORTTrainerOptions, got {type(options).__name__}")


def _takes_two(function: Any) -> bool:
    """Returns true for a callable with exactly two parameters. Some built-in functions have no signature."""
    try:
        return len(inspect.signature(function).parameters) == 2
    except (TypeError, ValueError):
        return False


def is_onnx_model(model: object) -> bool:
    """Returns true for an ``onnx.ModelProto``. Its owner must have imported onnx."""
    onnx = sys.modules.get("onnx")
    return onnx is not None and isinstance(model, onnx.ModelProto)


def precision_of(options: Any, dtype: str) -> str | None:
    """Returns the compute type of mixed precision, or None. Adds the loss scaler that float16 needs to the options."""
    if dtype not in _PRECISIONS:
        raise ValueError(
            f"mixed_precision_dtype must be one of {', '.join(map(repr, _PRECISIONS))}, got "
            f"{dtype!r}{hint(dtype, _PRECISIONS)}"
        )
    mixed = options.mixed_precision
    if not mixed.enabled:
        if mixed.loss_scaler is not None:
            raise ValueError("mixed_precision.loss_scaler needs mixed precision: set mixed_precision.enabled")
        if dtype != _PRECISIONS[0]:
            raise ValueError(f"mixed_precision_dtype is {dtype!r}, which needs mixed_precision.enabled")
        return None
    scaler = mixed.loss_scaler
    if scaler is not None and getattr(scaler.update, "__func__", None) is LossScaler.update:
        raise InvalidArgumentError(
            f"mixed_precision.loss_scaler: {type(scaler).__name__} does not override update(train_step_info); use "
            "DynamicLossScaler"
        )
    if scaler is None and dtype == "float16":
        mixed.loss_scaler = DynamicLossScaler()
    return dtype
