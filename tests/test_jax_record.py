"""Training with ortrain compared with the losses, gradients and running statistics that jax recorded (tests/in_jax)."""

from __future__ import annotations

from pathlib import Path

import nets
import numpy as np
import pytest
from against_jax import above_tolerance, distances
from conftest import DEVICES

RECORDS = Path(__file__).parent / "data" / "jax"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", nets.NETS)
def test_trains_as_jax_recorded(name: str, device: str, tmp_path: Path) -> None:
    with np.load(RECORDS / f"{name}.npz") as stored:
        record = {key: stored[key] for key in stored.files}
    found = distances(nets.NETS[name](), record, tmp_path, device)
    assert not above_tolerance(found), found
