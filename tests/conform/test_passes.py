"""Programs give the same results without each optional pass of the compiler.

``ORTRAIN_PASSES`` disables a pass. Two networks are trained for a few steps, about a second for each pass. Then the
tests of the Rust crates for programs run: two minutes for each pass on two cores, 25 minutes in total. Run as a script,
this file is one training: ``python test_passes.py NETWORK FOLDER`` prints the losses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from sklearn.datasets import load_digits

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

ROOT = Path(__file__).resolve().parent.parent.parent
# Optional passes of crates/ortrain-program/src/passes/mod.rs.
PASSES = (
    "inline_constants",
    "dead_elements",
    "compact_pool_indices",
    "sink_scatter_add",
    "fuse_attention",
    "fuse_chains",
    "precompute_derivatives",
    "fusion",
    "weight_prepacking",
    "mask_packing",
    "batch_tiling",
    "horizontal_fusion",
)

# Tests that check a pass, and so fail without it: by their names in nextest, with the reason.
FUSION = "ortrain-program passes::fusion::tests"
COUNTS = "counts the instructions of the program"
LOOK_AT_PASSES: dict[str, dict[str, str]] = {
    "dead_elements": {
        "ortrain-testkit::narrowing layer_is_computed_for_selection_only": "counts operations",
        "ortrain-testkit::narrowing attention_keeps_required_queries_only": "counts the queries of an attention",
    },
    "compact_pool_indices": {
        f"{FUSION}::gradient_only_positions_become_cells": "checks the type of positions",
        "ortrain-testkit::fusion cell_indices_match_positions": "checks the type of positions",
    },
    "sink_scatter_add": {
        "ortrain-testkit::fusion row_sums_touch_no_other_row": COUNTS,
    },
    "fuse_attention": {
        "ortrain-program passes::fuse_attention::tests::forward_fuses_to_one_instruction": COUNTS,
        "ortrain-program passes::fuse_attention::tests::backward_fuses_to_one_instruction": COUNTS,
        "ortrain-testkit::attention attention_becomes_one_instruction_per_pass": COUNTS,
        "ortrain-testkit::narrowing attention_keeps_required_queries_only": "counts the queries of an attention",
    },
    "fuse_chains": {
        f"{FUSION}::slope_is_saved_instead_of_its_operands": "checks for a slope in a merged map",
    },
    "precompute_derivatives": {
        f"{FUSION}::slope_is_saved_instead_of_its_operands": "checks for a buffer of the slope",
    },
    "fusion": {
        f"{FUSION}::a_product_reads_through_a_transposition": COUNTS,
        f"{FUSION}::a_product_rounds_in_place_of_a_narrow_copy": COUNTS,
        f"{FUSION}::residual_and_activation_fuse_into_convolution": COUNTS,
        f"{FUSION}::slope_is_saved_instead_of_its_operands": COUNTS,
        f"{FUSION}::normalization_backward_takes_two_passes": COUNTS,
        f"{FUSION}::gradient_accumulation_fuses_into_producer": COUNTS,
        f"{FUSION}::normalisation_and_activation_follow_their_statistics": COUNTS,
        f"{FUSION}::shared_operand_is_inlined_into_both_readers": COUNTS,
        f"{FUSION}::expensive_maps_are_computed_once": COUNTS,
        f"{FUSION}::activation_is_recomputed_from_loads": COUNTS,
        f"{FUSION}::clipped_activation_is_recomputed": COUNTS,
        "ortrain-testkit::fusion fused_programs_mean_the_same": "checks that random programs become shorter",
    },
    "weight_prepacking": {
        "ortrain-testkit::panels shared_matrices_are_packed": "counts the instructions that read panels",
    },
    "mask_packing": {
        "ortrain-testkit::fusion bit_masks_are_restored": "checks that random programs have bit masks",
    },
    "batch_tiling": {
        "ortrain-program passes::batch_tiling::tests::tiling_saves_memory_with_equal_results": COUNTS,
    },
    "horizontal_fusion": {
        "ortrain-testkit::groups group_size_is_independent_of_matrix_count": COUNTS,
    },
}
# This test requires a record of every pass.
LOG = "ortrain-program passes::tests::log_records_each_pass"
# Exit code of cargo nextest after failed tests. Other codes except 0 mean that no tests ran.
TESTS_FAILED = 100

NETWORKS = ("convnet", "transformer")
STEPS, BATCH, LEARNING_RATE = 3, 8, 3e-3
LENGTH, HIDDEN_FROM, TOKENS = 24, 20, 256
# Passes that change one of the networks. The Rust tests cover the others.
ACTING = {"inline_constants", "compact_pool_indices", "sink_scatter_add", "fuse_attention", "fuse_chains", "fusion"}
# Passes that change roundings or the order of sums. Without any other pass the losses have the same bits.
OTHER_ROUNDINGS = {"sink_scatter_add", "fuse_attention", "precompute_derivatives"}
# Relative tolerance of their losses: float32 sums of a few dozen terms in another order, and two updates of the
# weights.
TOLERANCE = 1e-5


def without(name: str | None) -> dict[str, str]:
    """Return the environment of a process without a pass, or with all passes."""
    environment = {key: value for key, value in os.environ.items() if key != "ORTRAIN_PASSES"}
    return environment if name is None else environment | {"ORTRAIN_PASSES": f"-{name}"}


def batches(network: str) -> list[np.ndarray]:
    """Return the inputs of all steps, concatenated, and the labels."""
    count = STEPS * BATCH
    if network == "convnet":
        images, digits = load_digits(return_X_y=True)
        x = (images[:count] / 16).astype(np.float32).reshape(count, 1, 8, 8)
        return [x, digits[:count].astype(np.int64)]
    tokens = np.random.default_rng(0).integers(0, TOKENS, (count, LENGTH))
    mask = np.ones((count, LENGTH), np.float32)
    mask[:, HIDDEN_FROM:] = 0
    return [tokens, mask, tokens[:, 0] % 2]


def losses(network: str, folder: Path) -> list[float]:
    """Train; returns the loss of each step."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    inputs = batches(network)
    found = []
    for step in range(STEPS):
        found.append(float(module(*(array[step * BATCH : (step + 1) * BATCH] for array in inputs))))
        optimizer.step()
        module.lazy_reset_grad()
    return found


def losses_without(name: str | None, network: str, folder: Path) -> list[float]:
    """Train in a separate process without a pass; returns the losses."""
    command = [sys.executable, __file__, network, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without(name))
    assert done.returncode == 0, done.stderr
    return list(map(float.fromhex, done.stdout.split()))


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[float]]:
    """Return a network's name, the folder of its artifacts, and the losses of a training with all passes."""
    name: str = request.param
    model = onnx.load(ROOT / "examples" / f"{name}.onnx")
    folder = tmp_path_factory.mktemp(name)
    # Constants and running statistics of normalizations are no parameters.
    weights = [tensor.name for tensor in model.graph.initializer if "." in tensor.name]
    artifacts.generate_artifacts(
        model,
        requires_grad=[weight for weight in weights if not weight.endswith((".mean", ".var"))],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return name, folder, losses_without(None, name, folder)


def test_passes_act(network: tuple[str, Path, list[float]]) -> None:
    """The passes change these networks, so disabling them has an effect."""
    name, folder, _ = network
    inputs = dict(
        zip(["x", "labels"] if name == "convnet" else ["tokens", "mask", "labels"], batches(name), strict=True)
    )
    shapes = {key: [BATCH, *array.shape[1:]] for key, array in inputs.items()}
    printed = ortrain.dump(folder / "training_model.onnx", "passes", shapes)
    rows = re.findall(r"^  (\w+) +(\d+) +\d+$", printed, re.MULTILINE)
    acting = {key for key, changes in rows if int(changes) > 0}
    of_convnet = {"inline_constants", "compact_pool_indices", "fuse_chains", "fusion"}
    assert acting & set(PASSES) == (of_convnet if name == "convnet" else ACTING - {"compact_pool_indices"})


@pytest.mark.parametrize("name", PASSES)
def test_trains_the_same(name: str, network: tuple[str, Path, list[float]]) -> None:
    kind, folder, wanted = network
    found = losses_without(name, kind, folder)
    assert len(found) == len(wanted) == STEPS
    if name in OTHER_ROUNDINGS:
        assert found == pytest.approx(wanted, rel=TOLERANCE)
    else:
        assert found == wanted


def test_all_optional_passes_are_here() -> None:
    """The error for a wrong name lists all optional passes."""
    done = subprocess.run(
        [sys.executable, "-m", "ortrain", "dump", str(ROOT / "examples" / "convnet.onnx"), "--passes"],
        capture_output=True,
        text=True,
        check=False,
        env=without("nothing"),
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f": {', '.join(f'-{name}' for name in PASSES)}")


@pytest.mark.parametrize("name", PASSES)
def test_rust_tests_pass(name: str) -> None:
    """All tests pass, except for tests that check the disabled pass."""
    command = ["cargo", "nextest", "run", "--package", "ortrain-testkit", "--package", "ortrain-program"]
    command += ["--no-fail-fast", "--color", "never", "--status-level", "none", "--final-status-level", "fail"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=without(name))
    assert done.returncode in (0, TESTS_FAILED), done.stderr
    # Each test that did not pass has a line: FAIL, TIMEOUT or the signal that ended the test.
    lines = done.stderr.rpartition("Summary [")[2]
    failed = re.findall(r"^ +[A-Z]+ \[ *[\d.]+s\] (?:\( *\d+/\d+\) )?(\S+ \S+)$", lines, re.MULTILINE)
    (counts,) = re.findall(r"(\d+) tests run: (\d+) passed", lines)
    assert int(counts[0]) - int(counts[1]) == len(set(failed)), done.stderr
    print(f"without {name}: {counts[1]} tests pass, {len(set(failed))} fail because they check the pass")
    assert set(failed) == {LOG, *LOOK_AT_PASSES.get(name, {})}, done.stderr


if __name__ == "__main__":
    print(*(loss.hex() for loss in losses(sys.argv[1], Path(sys.argv[2]))))
