"""Values share memory with tensors of PyTorch, in both directions, by its capsules and by the protocol."""

from __future__ import annotations

from pathlib import Path

import environments

import ortrain

SCRIPT = Path(__file__).parent.parent / "in_torch" / "values.py"
# Of the script: those that ortrain, PyTorch and DLPack have.
ELEMENT_TYPES = 10


def test_memory_is_shared() -> None:
    packages = Path(ortrain.__file__).parent.parent
    shared = environments.in_environment(environments.torch(), SCRIPT, str(packages))
    assert int(shared) == ELEMENT_TYPES
