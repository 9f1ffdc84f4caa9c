"""onnxruntime-training 1.15.0 itself, in its own environment: it computes its records, and ortrain agrees."""

from __future__ import annotations

from pathlib import Path

import classic_runs
import environments
import numpy as np
import pytest
from classic_transcript import RECORD, SCRIPT, differences, transcript_of_ortrain

from ortrain import classic

TESTS = Path(__file__).parent.parent
# Tolerance of the release on another machine, in float32: losses relative to their value, states to their largest
# element.
RECORD_TOLERANCE = 5e-6


@pytest.fixture(scope="session")
def release() -> Path:
    """Return the interpreter of the environment, which is rebuilt whenever the requirements change."""
    return environments.classic_oracle()


@pytest.fixture(scope="session")
def trained(release: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Return all runs as the release computes them now, by ``CASE/RUN/KIND``."""
    file = tmp_path_factory.mktemp("classic") / "train.npz"
    environments.in_environment(release, TESTS / "classic_oracle" / "train_graphs.py", str(file))
    with np.load(file) as stored:
        return {key: stored[key] for key in stored.files}


def test_record_matches_the_release(trained: dict[str, np.ndarray]) -> None:
    with np.load(TESTS / "data" / "classic" / "train-1.15.0.npz") as stored:
        record = {key: stored[key] for key in stored.files}
    assert set(record) == set(trained)
    drift = {key: classic_runs.distance(key.split("/", 2)[2], trained[key], record[key]) for key in record}
    assert max(drift.values()) <= RECORD_TOLERANCE, drift


@pytest.mark.parametrize("run", classic_runs.RUNS)
@pytest.mark.parametrize("case", classic_runs.WEIGHTS)
def test_trains_as_it_does(case: str, run: str, trained: dict[str, np.ndarray]) -> None:
    """Losses, norms, weights, moments and counts of ten steps are equal."""
    start = f"{case}/{run}/"
    want = {key.removeprefix(start): value for key, value in trained.items() if key.startswith(start)}
    assert set(want) == classic_runs.keys_of(case, run)
    ours = classic_runs.train(classic, case, run)
    worst = max(classic_runs.distance(key, ours[key], want[key]) for key in want)
    print(f"{case}, {run}: {len(want)} values of {classic_runs.STEPS} steps; worst {worst:.1e}")
    far = classic_runs.above_tolerance(ours, want)
    assert not far, far


def test_a_script_prints_the_same(release: Path) -> None:
    """A script prints the same keys, shapes, types and errors in the release and here; the record is the release's
    output.

    tests/classic_transcript.py lists the intended differences.
    """
    theirs = environments.printed_in_environment(release, SCRIPT, "onnxruntime")
    assert theirs == RECORD.read_text()
    found = differences(transcript_of_ortrain(hidden=True), theirs)
    print(f"{len(theirs.splitlines())} lines")
    assert not found, "\n".join(found)
