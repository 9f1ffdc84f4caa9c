"""jax itself, in its own environment: jax computes the records of tests/data/jax, and ortrain agrees."""

from __future__ import annotations

from pathlib import Path

import environments
import nets
import numpy as np
import pytest
from against_jax import above_tolerance, distance, distances

TESTS = Path(__file__).parent.parent
# Tolerance of jax in float64 on another machine.
RECORD_TOLERANCE = 1e-6


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the current results of jax."""
    folder = tmp_path_factory.mktemp("jax")
    environments.in_environment(environments.jax(), TESTS / "in_jax" / "train.py", str(folder), *nets.NETS)
    return folder


@pytest.mark.parametrize("name", nets.NETS)
def test_trains_as_jax(name: str, records: Path, tmp_path: Path) -> None:
    with np.load(records / f"{name}.npz") as stored:
        computed = {key: stored[key] for key in stored.files}
    with np.load(TESTS / "data" / "jax" / f"{name}.npz") as stored:
        assert set(stored.files) == set(computed)
        drift = {key: distance(computed[key], stored[key]) for key in stored.files}
    assert max(drift.values()) <= RECORD_TOLERANCE, drift
    found = distances(nets.NETS[name](), computed, tmp_path, "cpu")
    print(f"{name}: {nets.STEPS} losses, {len(found) - 1} gradients and statistics; worst {max(found.values()):.1e}")
    assert not above_tolerance(found), found
