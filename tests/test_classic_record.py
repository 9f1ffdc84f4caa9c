"""The classic TrainingSession against recorded runs of onnxruntime-training 1.15.0 (tests/classic_oracle)."""

from __future__ import annotations

from pathlib import Path

import classic_runs
import numpy as np
import pytest

from ortrain import classic

RUNS = Path(__file__).parent / "data" / "classic" / "train-1.15.0.npz"


def recorded(case: str, run: str) -> dict[str, np.ndarray]:
    """Return the values of one run, by kind."""
    with np.load(RUNS) as stored:
        start = f"{case}/{run}/"
        return {key.removeprefix(start): stored[key] for key in stored.files if key.startswith(start)}


def test_record_is_complete() -> None:
    """The record has every run on every graph with all states and steps, and every weight changes in every step."""
    with np.load(RUNS) as stored:
        assert {tuple(key.split("/", 2)[:2]) for key in stored.files} == {
            (case, run) for case in classic_runs.WEIGHTS for run in classic_runs.RUNS
        }
    for case, weights in classic_runs.WEIGHTS.items():
        for run in classic_runs.RUNS:
            found = recorded(case, run)
            assert set(found) == classic_runs.keys_of(case, run)
            assert len(found["loss"]) == classic_runs.STEPS
            assert all(np.isfinite(value).all() for value in found.values())
            for weight in weights:
                steps = found[f"state/{weight}"]
                assert len(steps) == classic_runs.STEPS
                assert all(not np.array_equal(steps[step], steps[step + 1]) for step in range(classic_runs.STEPS - 1))


@pytest.mark.parametrize("run", classic_runs.RUNS)
@pytest.mark.parametrize("case", classic_runs.WEIGHTS)
def test_trains_as_recorded(case: str, run: str) -> None:
    """Compare losses, norms, weights, moments and counts of ten steps."""
    far = classic_runs.above_tolerance(classic_runs.train(classic, case, run), recorded(case, run))
    assert not far, far


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("loss", lambda value: value * np.float32(1 + 2e-5)),
        ("state/W1", lambda value: value + np.abs(value).max() * np.float32(2e-5)),
        ("state/Update_Count_W1", lambda value: value + 1),
        ("state/W1", lambda value: value.astype(np.float64)),
        ("state/W1", lambda value: value[:, :-1]),
        ("optimizer/W2/Moment_1", lambda value: value * np.nan),
    ],
    ids=["loss", "weight", "count", "type", "shape", "not a number"],
)
def test_a_difference_is_seen(key: str, change: object) -> None:
    """The comparison reports a value with a small error, and a missing value."""
    assert callable(change)
    want = recorded("gemm_mlp", "adam")
    assert not classic_runs.above_tolerance(want, want)
    assert set(classic_runs.above_tolerance(want | {key: change(want[key])}, want)) == {key}
    assert set(classic_runs.above_tolerance({name: value for name, value in want.items() if name != key}, want)) == {
        key
    }
