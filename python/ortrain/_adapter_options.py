"""Options of adapters in the form of the core."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from ortrain.errors import InvalidArgumentError

__all__ = ["BASES", "Texts", "as_texts", "core_options"]

Texts: TypeAlias = str | Sequence[str]
BASES = ("keep", "int8", "int4", "nf4")


def core_options(
    *,
    rank: int = 8,
    targets: Texts = "auto",
    exclude: Texts = (),
    alpha: float | None = None,
    dropout: float = 0.0,
    init: str = "kaiming",
    use_rslora: bool = False,
    use_dora: bool = False,
    bias: str = "none",
    train_also: Texts = (),
    base: str = "keep",
    name: str = "default",
    seed: int = 0,
) -> dict[str, Any]:
    """Return the options of an adapter for the core.

    Raises:
        InvalidArgumentError: if the rank or the seed is out of range.
        TypeError: for arguments of other types.

    """
    if operator.index(rank) < 1:
        raise InvalidArgumentError(f"the rank of an adapter must be at least 1, got {rank}")
    if not 0 <= operator.index(seed) < 1 << 64:
        raise InvalidArgumentError(f"the seed of an adapter must be from 0 to 2**64 - 1, got {seed}")
    return {
        "rank": operator.index(rank),
        "alpha": None if alpha is None else float(alpha),
        "targets": None if isinstance(targets, str) and targets == "auto" else as_texts("targets", targets),
        "exclude": as_texts("exclude", exclude),
        "dropout": float(dropout),
        "init": init,
        "use_rslora": bool(use_rslora),
        "use_dora": bool(use_dora),
        "bias": bias,
        "train_also": as_texts("train_also", train_also),
        "base": base_name(base),
        "name": name,
        "seed": operator.index(seed),
    }


def base_name(base: str) -> str:
    """Return the form of the adapted weights.

    Raises:
        InvalidArgumentError: for an unknown form.

    """
    if base not in BASES:
        raise InvalidArgumentError(f"the base must be one of {', '.join(map(repr, BASES))}, got {base!r}")
    return base


def as_texts(argument: str, texts: Texts) -> list[str]:
    found = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{argument} must be a name, a pattern or a list of them, got {texts!r}")
    return found
