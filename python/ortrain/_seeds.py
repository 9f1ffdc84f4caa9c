"""Process-wide seed that ``onnxruntime.set_seed`` sets for scripts that run on :mod:`ortrain.compat`.

Nothing else sets it: without ``ortrain.compat`` each state has its own seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortrain import _ortrain


class _Process:
    """Seed, and the number of times it was set. A state compares the number, so each setting applies to it once."""

    seed: int | None = None
    count: int = 0


def set_seed(seed: int | None) -> None:
    """Set the seed of all states that are loaded, or used by a new module, from now on; ``None`` ends this."""
    _Process.seed = seed
    _Process.count += 1


def of_process() -> int | None:
    """Return the seed of new objects; ``None`` if no seed is set."""
    return _Process.seed


def apply(state: _ortrain.CheckpointState, known: int) -> int:
    """Apply the process's seed to a state that has not seen it; return the number of settings it has seen now."""
    if known != _Process.count and _Process.seed is not None:
        state.set_seed(_Process.seed)
    return _Process.count
