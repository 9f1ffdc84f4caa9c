"""Adapters of PEFT itself: its training, and its reading of files of ortrain. tests/test_lora.py has recorded ones."""

from __future__ import annotations

import sys
from pathlib import Path

import environments
import numpy as np
import pytest

import ortrain

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS))
from recorded_adapters import CASES, OUTPUT_TOLERANCE, check_training  # noqa: E402

SCRIPT = TESTS / "in_torch" / "adapters.py"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a process of PEFT writes."""
    folder = tmp_path_factory.mktemp("peft")
    environments.in_environment(environments.torch(), SCRIPT, str(folder))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_trains_as_peft(case: str, recorded: Path, tmp_path: Path) -> None:
    """Losses and outputs are equal, and PEFT computes the same with the adapter that ortrain saved."""
    check_training(recorded / case, tmp_path)
    environments.in_environment(
        environments.torch(), SCRIPT, str(recorded), case, str(tmp_path / "adapter"), str(tmp_path / "y.npy")
    )
    with np.load(recorded / case / "record.npz") as stored:
        x = stored["x"]
    (ours,) = ortrain.InferenceSession(tmp_path / "adapted.onnx").run(None, {"x": x})
    theirs = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=OUTPUT_TOLERANCE * np.abs(theirs).max())
