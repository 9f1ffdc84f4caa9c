"""Files of ortrain in onnxruntime-training 1.19.2, which runs in its own environment."""

from __future__ import annotations

import hashlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import environments
import numpy as np
import onnx
import pytest
from conftest import CASES, RECORDS, Run, meta_of
from environments import in_environment
from opsets import NETWORKS, NOT_IN_THE_REFERENCE, OPSETS, TRAINED, write_artifacts
from replaying import GRADIENT_TOLERANCE, LOSS_TOLERANCE, above_tolerance, batches_of, replay
from resuming import Outcome, resume

from ortrain import api
from ortrain.api import CheckpointState, Module
from ortrain.schedules import LRScheduler, ReduceOnPlateau, Warmup

TESTS = Path(__file__).parent
# The newest opset that the reference reads.
NEWEST_OPSET = 21
# Networks with dropout: ortrain and the reference drop different elements.
RANDOM = ("dropped",)


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Return the interpreter of the environment, which is rebuilt whenever the requirements change."""
    return environments.oracle()


def test_our_artifacts_train_there(oracle: Path, ours: Callable[[str], Path]) -> None:
    """All cases follow the record, within the tolerances of ortrain itself."""
    pairs = [f"{RECORDS / case}={ours(case)}" for case in CASES]
    printed = in_environment(oracle, TESTS / "replaying.py", "onnxruntime.training.api", *pairs)
    distances: dict[str, dict[str, float]] = json.loads(printed)
    assert list(distances) == list(CASES)
    assert not {case: found for case, found in distances.items() if above_tolerance(found)}, distances


@pytest.mark.parametrize(
    ("case", "operators"),
    [
        ("l2_norm_adamw_ce", {"DivGrad"}),
        ("silu_div_sgd_mse", {"DivGrad"}),
        ("rms_norm_adamw_ce", {"DivGrad"}),
        ("fake_quant_sgd_mse", {"FakeQuant", "FakeQuantGrad"}),
    ],
)
def test_artifacts_of_onnxruntime_train_in_ortrain(
    case: str, operators: set[str], oracle: Path, tmp_path: Path
) -> None:
    """Their artifacts, with gradient operators that ours lack, give the same losses, gradients and parameters."""
    in_environment(oracle, TESTS / "oracle" / "record_artifacts.py", str(tmp_path), case)
    nodes = onnx.load(tmp_path / case / "training_model.onnx").graph.node
    assert operators <= {node.op_type for node in nodes}
    distances = replay(api, tmp_path / case, tmp_path / case)
    assert not above_tolerance(distances), distances


def test_nodes_of_training_graphs_are_recorded_as_they_run_there(oracle: Path, tmp_path: Path) -> None:
    """The reference runs every case and computes the record that test_training_nodes.py compares with."""
    script = TESTS / "oracle" / "record_nodes.py"
    assert json.loads(in_environment(oracle, script, str(tmp_path / "nodes.npz"))) == {}
    with np.load(tmp_path / "nodes.npz") as found, np.load(TESTS / "data" / "training-nodes.npz") as kept:
        assert sorted(found.files) == sorted(kept.files)
        for name in kept.files:
            np.testing.assert_allclose(found[name], kept[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["mlp_adamw_ce", "mlp_sgd_mse", "frozen_params"])
def test_a_checkpoint_goes_there_and_back(case: str, oracle: Path, ours: Callable[[str], Path], tmp_path: Path) -> None:
    """The reference continues a saved run with the same results; parameters, moments, step and properties come back."""
    folder, batches, run = ours(case), batches_of(RECORDS / case), Run(ours(case))

    def step(run: Run, batch: dict[str, np.ndarray]) -> float:
        run.optimizer.set_learning_rate(0.01)
        loss = float(run.module(*[batch[name] for name in run.module.input_names()]))
        run.optimizer.step()
        run.module.lazy_reset_grad()
        return loss

    def assert_like(found: dict[str, np.ndarray]) -> None:
        for name, parameter in run.state.parameters:
            np.testing.assert_allclose(found[name], parameter.data, rtol=5e-4, atol=1e-5, err_msg=name)

    for batch in batches[:3]:
        step(run, batch)
    run.state.properties["epoch"] = 3
    run.state.properties["tag"] = "ünïcode"
    # The reference ignores a schedule.
    LRScheduler(run.optimizer, Warmup(1, ReduceOnPlateau()), lr=0.01)
    CheckpointState.save_checkpoint(run.state, tmp_path / "saved", include_optimizer_state=True)
    losses = [step(run, batch) for batch in batches]

    arguments = [str(path) for path in (folder, tmp_path / "saved", RECORDS / case, tmp_path / "back")]
    there = json.loads(in_environment(oracle, TESTS / "oracle" / "go_on.py", *arguments, "0.01"))
    assert there["properties"] == {"epoch": 3, "tag": "ünïcode"}
    np.testing.assert_allclose(there["losses"], losses, rtol=LOSS_TOLERANCE)
    assert_like({name: np.array(values, np.float32) for name, values in there["parameters"].items()})

    back = Run(folder, str(tmp_path / "back"))
    assert dict(back.state.properties) == there["properties"]
    again = [step(back, batch) for batch in batches]
    np.testing.assert_allclose(again, [step(run, batch) for batch in batches], rtol=LOSS_TOLERANCE)
    assert_like({name: parameter.data for name, parameter in back.state.parameters})


def test_resume_from_each_others_checkpoints(oracle: Path, ours: Callable[[str], Path], tmp_path: Path) -> None:
    """Recorded continuations of the third step: the reference with our files, ortrain with the reference's files."""
    case, meta = RECORDS / "checkpoint_resume", meta_of("checkpoint_resume")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    resume("ortrain.api", case, ours("checkpoint_resume"), None, here)
    script = TESTS / "resuming.py"
    arguments = [str(path) for path in (case, ours("checkpoint_resume"), there, here)]
    printed = in_environment(oracle, script, "onnxruntime.training.api", *arguments)
    for outcome in (
        Outcome(**json.loads(printed)),
        resume("ortrain.api", case, ours("checkpoint_resume"), there, tmp_path),
    ):
        assert not above_tolerance(outcome.distances), outcome.distances
        for kind in ("optim", "plain"):
            assert outcome.properties[kind] == meta[f"properties_after_load_{kind}"]
            assert outcome.rates[kind] == meta[f"lr_after_load_{kind}"]


def test_our_checkpoint_of_two_files_is_read_there(oracle: Path, run: Run, tmp_path: Path) -> None:
    """The reference reads a checkpoint of two files, as above 1800 MiB, and saves the same values."""
    run.module(*[batches_of(RECORDS / "mlp_adamw_ce")[0][name] for name in run.module.input_names()])
    run.optimizer.step()
    run.state._native.save(str(tmp_path / "saved"), True, external_above=0)
    assert (tmp_path / "saved.data").stat().st_size >= 3 * 4 * 389
    script = TESTS / "oracle" / "digests.py"
    there = json.loads(in_environment(oracle, script, str(tmp_path / "saved"), str(tmp_path / "copy")))
    copy = CheckpointState.load_checkpoint(tmp_path / "copy")
    for name, parameter in run.state.parameters:
        assert there[name] == hashlib.blake2b(parameter.data.tobytes()).hexdigest()
        np.testing.assert_array_equal(copy.parameters[name].data, parameter.data)


@pytest.mark.parametrize(
    "network",
    [name for name, (_, oldest) in NETWORKS.items() if oldest <= NEWEST_OPSET and name not in NOT_IN_THE_REFERENCE],
)
def test_our_training_models_of_every_opset(network: str, oracle: Path, tmp_path: Path) -> None:
    """Models for any opset of the reference have the same loss and gradients there and here.

    Trained normalizations also have the same running statistics.
    """
    wanted = {}
    for name, loss, opset in TRAINED:
        if name != network or opset not in OPSETS or opset > NEWEST_OPSET:
            continue
        folder = tmp_path / f"{loss} at {opset}"
        folder.mkdir()
        made = write_artifacts(folder, network, loss, opset, "batch")
        np.savez(folder / "feeds.npz", **made.feeds)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state)
        value = float(module(*[made.feeds[name] for name in module.input_names()]))
        outcomes = {name: p.grad if p.requires_grad else p.data for name, p in state.parameters}
        wanted[folder.name] = (value, {name: np.array(array) for name, array in outcomes.items()})
    script = TESTS / "oracle" / "one_step.py"
    found = json.loads(in_environment(oracle, script, *[str(tmp_path / name) for name in wanted]))
    assert found.keys() == wanted.keys()
    for name, (value, outcomes) in wanted.items():
        assert found[name]["outcomes"].keys() == outcomes.keys()
        if network in RANDOM:
            assert np.isfinite(found[name]["loss"])
            continue
        np.testing.assert_allclose(found[name]["loss"], value, rtol=LOSS_TOLERANCE, err_msg=name)
        for parameter, outcome in outcomes.items():
            there, scale = found[name]["outcomes"][parameter], np.abs(outcome).max()
            np.testing.assert_allclose(there, outcome, rtol=0, atol=GRADIENT_TOLERANCE * scale, err_msg=name)


def test_operators_and_gradients_of_ones_own_train_there(oracle: Path, tmp_path: Path) -> None:
    """Artifacts that a library helped to generate contain plain nodes."""
    examples = TESTS.parent / "examples"
    feeds = {
        "custom_operator": {"x": np.linspace(-2, 2, 16), "target": np.sin(np.linspace(-6, 6, 16))},
        "custom_gradient": {"x": np.random.default_rng(0).random((8, 64)), "labels": np.arange(8)},
    }
    wanted = {}
    for name, given in feeds.items():
        folder = tmp_path / name
        runpy.run_path(str(examples / f"{name}.py"))["main"](folder)
        arrays = {
            key: value if key == "labels" else value.astype(np.float32).reshape(len(value), -1)
            for key, value in given.items()
        }
        np.savez(folder / "feeds.npz", **arrays)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        result = module(*[arrays[key] for key in module.input_names()])
        loss = result[0] if isinstance(result, tuple) else result
        wanted[name] = (float(loss), {key: np.array(parameter.grad) for key, parameter in state.parameters})
    script = TESTS / "oracle" / "one_step.py"
    found = json.loads(in_environment(oracle, script, *[str(tmp_path / name) for name in wanted]))
    for name, (loss, gradients) in wanted.items():
        np.testing.assert_allclose(found[name]["loss"], loss, rtol=LOSS_TOLERANCE, err_msg=name)
        for key, gradient in gradients.items():
            there, scale = found[name]["outcomes"][key], np.abs(gradient).max()
            np.testing.assert_allclose(there, gradient, rtol=0, atol=GRADIENT_TOLERANCE * scale, err_msg=key)
