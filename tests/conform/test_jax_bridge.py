"""Models as functions of jax, in jax's environment: their gradients equal the same networks in jax."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments
import pytest
from test_pages import blocks_of

import ortrain

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "in_jax" / "bridge.py"
PACKAGES = Path(ortrain.__file__).parent.parent
# Tolerance of float32 gradients and losses, compared with float64, relative to the largest magnitude.
TOLERANCE = 1e-4
# Checks that return a distance, and checks without a result.
MEASURED = (
    "gradients_of_a_cnn",
    "gradients_of_a_transformer",
    "training_a_cnn",
    "training_a_transformer",
    "transformations",
    "double_precision",
    "gradients_of_gradients",
    "large_values",
)
ASSERTED = (
    "inputs_by_name",
    "several_outputs",
    "integers",
    "batches_of_any_size",
    "half_precision",
    "gradients_that_are_not_there",
    "threads",
    "same_bits",
    "choice_of_weights",
    "choice_of_gradients",
    "models_that_are_no_functions",
    "wrong_calls",
    "models_with_new_weights",
    "options",
)
# Checks for which callbacks of other platforms differ. Large values may wait forever there: see docs/jax.md.
ANYWHERE = ("several_outputs", "integers", "batches_of_any_size", "half_precision", "wrong_calls")


def run(folder: Path, *arguments: str | Path, first: Callable[[], None] | None = None) -> str:
    """Run a script in jax's environment with ortrain; returns its output. The child process first calls `first`."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [environments.jax(), *arguments],
        env=variables | {"PYTHONPATH": str(PACKAGES)},
        cwd=folder,
        preexec_fn=first,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def results_of(folder: Path, *arguments: str, first: Callable[[], None] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(folder, SCRIPT, PACKAGES, *arguments, first=first).splitlines()[-1])
    return found


def stay_on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(tmp_path_factory.mktemp("bridge"), *MEASURED, *ASSERTED)


@pytest.mark.parametrize("check", MEASURED)
def test_as_jax(check: str, results: dict[str, Any]) -> None:
    distance = results[check]
    assert isinstance(distance, float), distance
    print(f"{check}: {distance:.1e}")
    assert distance < TOLERANCE


@pytest.mark.parametrize("check", ASSERTED)
def test_jax_transformations(check: str, results: dict[str, Any]) -> None:
    assert results[check] is None, results[check]


def test_callbacks_of_other_platforms(tmp_path: Path) -> None:
    found = results_of(tmp_path, "--anywhere", "transformations", *ANYWHERE)
    assert found.pop("transformations") < TOLERANCE
    assert found == dict.fromkeys(ANYWHERE)


def test_one_core_is_enough(tmp_path: Path) -> None:
    """A callback that waits for a thread of jax would never return."""
    found = results_of(tmp_path, "large_values", "threads", first=stay_on_one_core)
    assert found["large_values"] < TOLERANCE
    assert found["threads"] is None, found["threads"]


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(blocks_of(ROOT / "docs" / "jax.md")))
    run(tmp_path, "-W", "error", "page.py")


def test_the_example(tmp_path: Path) -> None:
    printed = run(tmp_path, "-W", "error", ROOT / "examples" / "onnx_backbone_in_jax.py", "trained.onnx")
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "trained.onnx").exists()


def test_docstrings_where_jax_is_there(tmp_path: Path) -> None:
    """Examples in docstrings check more if jax is installed."""
    script = """
import doctest, numpy as np, onnx, ortrain, ortrain.jax
given = {"np": np, "ortrain": ortrain, "model": onnx.load(ortrain.examples.perceptron())}
given["x"] = np.random.default_rng(0).random((8, 64), np.float32)
print(*doctest.testmod(ortrain.jax, extraglobs=given))
"""
    failed, attempted = map(int, run(tmp_path, "-c", script).split())
    assert failed == 0
    assert attempted > 10
