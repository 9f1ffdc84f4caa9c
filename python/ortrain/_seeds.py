"""The seed that ``onnxruntime.set_seed`` sets for a process whose scripts run on :mod:`ortrain.compat`.

Nothing else sets it: without ``ortrain.compat`` a seed is always that of one state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortrain import _ortrain


class _Process:
    """The seed, and how often one was set: a state that knows the last of these keeps what it has."""

    seed: int | None = None
    count: int = 0


def set_seed(seed: int | None) -> None:
    """Set the seed of all states that are loaded, or used by a new module, from now on; ``None`` ends it."""
    _Process.seed = seed
    _Process.count += 1


def of_process() -> int | None:
    """The seed of what is made from now on, if one was set."""
    return _Process.seed


def apply(state: _ortrain.CheckpointState, known: int) -> int:
    """Give the process's seed to a state that does not know it yet; what the state knows then."""
    if known != _Process.count and _Process.seed is not None:
        state.set_seed(_Process.seed)
    return _Process.count
