"""Low-rank adapters of a model that trains itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ortrain import _ortrain
from ortrain._adapter_options import as_texts, core_options
from ortrain._inspect import inspection
from ortrain._model_source import ModelInFolder, in_folder
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

__all__ = ["with_adapter"]


def with_adapter(
    model: bytes | str, settings: int | Mapping[str, Any], *, seed: int, has_new_head: bool
) -> bytes | ModelInFolder:
    """Return a model with an adapter, from the argument ``lora`` of a model. A new head is trained beside it.

    The base stays in its files.

    Raises:
        InvalidArgumentError: for an unknown setting, and as :func:`ortrain.lora.add`.

    """
    arguments: dict[str, Any] = dict(settings) if isinstance(settings, Mapping) else {"rank": settings}
    known = list(inspect.signature(core_options).parameters)
    for name in arguments:
        if name not in known:
            raise InvalidArgumentError(f"lora has no setting {name!r}{hint(name, known)}")
    if has_new_head:
        head = [info.name for info in inspection(model, [], first_output=True).parameters if info.layer == 1]
        arguments["train_also"] = [*as_texts("train_also", arguments.get("train_also", ())), *head]
    return in_folder(_ortrain.add_adapter_by_reference(model, core_options(**{"seed": seed, **arguments})))
