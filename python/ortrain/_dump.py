"""Looking inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ortrain import _ortrain
from ortrain._sources import ModelLike, model_source

__all__ = ["dump"]


def dump(
    model: ModelLike,
    stage: Literal["graph", "gradient", "program"] = "graph",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """What becomes of a model, as text.

    ``graph`` is the model as read, ``gradient`` the model with its gradient, ``program`` the schedule that runs:
    segments, steps, offsets and peak bytes. ``shapes`` gives sizes to inputs with open dimensions.
    """
    wanted = {name: [int(size) for size in sizes] for name, sizes in (shapes or {}).items()}
    return _ortrain.dump(model_source(model), stage, wanted)
