"""Text of ``Model.summary``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

from ortrain._fit.trainable import arguments_of

if TYPE_CHECKING:
    from ortrain._fit.model import Model
    from ortrain._inspect import ParameterInfo

__all__ = ["summary_of"]

_MAX_ROWS = 40


def summary_of(model: Model) -> str:
    """Return inputs, outputs, parameters, loss and optimizer as text."""
    description = model._description
    lines = [
        "inputs: " + ", ".join(f"{value.name} {value}" for value in description.inputs),
        "outputs: " + ", ".join(f"{output.name} {output.value}" for output in description.outputs),
    ]
    rows = _parameters(model)
    width = max([len("parameter"), *(len(name) for name, *_ in rows)])
    lines.append(f"{'parameter':<{width}}  {'shape':<20}  {'elements':>12}  trained")
    for name, shape, trained in rows[:_MAX_ROWS]:
        lines.append(f"{name:<{width}}  {list(shape)!s:<20}  {prod(shape):>12,}  {'yes' if trained else 'no'}")
    if len(rows) > _MAX_ROWS:
        lines.append(f"and {len(rows) - _MAX_ROWS} more")
    count = sum(prod(shape) for _, shape, is_trained in rows if is_trained)
    lines.append(f"parameters: {sum(prod(shape) for _, shape, _ in rows):,}, {count:,} of them trained")
    choice = model._choice
    if choice is not None and choice.sentence:
        lines.append(choice.sentence)
    elif model._loss is not None:
        lines.append(f"loss: {model._loss}")
    else:
        lines.append("loss: chosen by fit, from the targets")
    rate = model._learning_rate if model._engine is None else model._engine.optimizer.get_learning_rate()
    lines.append(f"optimizer: {model._optimizer!r}")
    if rate is not None:
        lines.append(f"learning rate: {rate if isinstance(rate, str) else format(rate, '.6g')}")
    return "\n".join(lines)


def _parameters(model: Model) -> list[tuple[str, tuple[int, ...], bool]]:
    from ortrain._inspect import inspect

    source: Any = model._source
    found = [info for info in inspect(source).parameters if info.role == "trained"]
    if model._engine is not None:
        trained = {name for name, parameter in model._engine.state.parameters if parameter.requires_grad}
        return [(info.name, info.shape, info.name in trained) for info in found]
    arguments = arguments_of(model._trainable, model._frozen)
    last, names, frozen = arguments.get("last"), arguments.get("requires_grad"), arguments.get("frozen_params", ())

    def is_trained(info: ParameterInfo) -> bool:
        if _is_selected(frozen, info):
            return False
        if last is not None:
            return info.layer is not None and info.layer <= int(last)
        return names is None or _is_selected(names, info)

    return [(info.name, info.shape, is_trained(info)) for info in found]


def _is_selected(selection: Any, info: ParameterInfo) -> bool:
    if callable(selection):
        return bool(selection(info))
    return any(fnmatchcase(name, pattern) for pattern in selection for name in (info.name, *info.nodes))
