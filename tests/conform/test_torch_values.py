"""Values share memory with PyTorch tensors in both directions, through capsules and the protocol."""

from __future__ import annotations

from pathlib import Path

import environments

import ortrain

SCRIPT = Path(__file__).parent.parent / "in_torch" / "values.py"
# Number of the script's element types that ortrain, PyTorch and DLPack share.
ELEMENT_TYPES = 10


def test_memory_is_shared() -> None:
    packages = Path(ortrain.__file__).parent.parent
    shared = environments.in_environment(environments.torch(), SCRIPT, str(packages))
    assert int(shared) == ELEMENT_TYPES
