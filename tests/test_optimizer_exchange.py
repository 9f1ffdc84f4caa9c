"""Optimizers of ortrain.optim in onnxruntime-training 1.19.2: supported and rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import environments
import numpy as np
import pytest
from conftest import RECORDS, Run, generate
from environments import in_environment
from replaying import LOSS_TOLERANCE, PARAMETER_TOLERANCE, batches_of

from ortrain import optim
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.optim import OptimizerConfig

SCRIPTS = Path(__file__).parent / "oracle"
CASE = RECORDS / "mlp_adamw_ce"
BATCHES = batches_of(CASE)
# Models that 1.19.2 made.
THEIR_MODELS = CASE / "training_model.onnx", CASE / "optimizer_model.onnx"
RATE = 0.01
# Optimizers that are operators of onnxruntime-training.
THEIRS: dict[str, OptimizerConfig] = {
    "AdamW": optim.AdamW(),
    "AdamW-onnxruntime": optim.AdamW(formula="onnxruntime"),
    "AdamW-settings": optim.AdamW(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3),
    "AdamW-clipped": optim.AdamW(max_norm=0.5),
    "SGD": optim.SGD(),
    "SGD-clipped": optim.SGD(max_norm=0.5),
}
# Optimizers that are not operators of onnxruntime-training. AdamW with groups has the slot names and shapes of
# AdamWOptimizer.
OURS: dict[str, OptimizerConfig] = {
    "Lion": optim.Lion(),
    "LAMB": optim.LAMB(),
    "AdamW-groups": optim.AdamW(groups=[{"params": "*.bias", "weight_decay": 0.0}]),
    "ScheduleFreeAdamW": optim.ScheduleFreeAdamW(),
}


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Return the interpreter of the environment, which is rebuilt whenever the requirements change."""
    return environments.oracle()


def go_on(run: Run, rate: float | None = None) -> list[float]:
    """Train one step on each batch of the case; returns the losses."""
    losses = []
    for batch in BATCHES:
        if rate is not None:
            run.optimizer.set_learning_rate(rate)
        losses.append(float(run.module(*[batch[name] for name in run.module.input_names()])))
        run.optimizer.step()
        run.module.lazy_reset_grad()
    return losses


def saved(run: Run, name: str, *, optimizer: bool = True) -> Path:
    """Save a checkpoint of a run in its folder; returns the path."""
    CheckpointState.save_checkpoint(run.state, run.folder / name, include_optimizer_state=optimizer)
    return run.folder / name


def arrays(run: Run) -> dict[str, np.ndarray]:
    """Return copies of parameters and slots."""
    found = {}
    for name, parameter in run.state.parameters:
        found[name] = parameter.data.copy()
        found |= {f"{slot} of {name}": np.array(values) for slot, values in parameter.slots.items()}
    return found


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Compare arrays, each relative to its largest element."""
    for name, values in found.items():
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(values, wanted[name], rtol=0, atol=PARAMETER_TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("first", ["here", "there"])
@pytest.mark.parametrize("name", THEIRS)
def test_a_training_goes_to_and_fro(name: str, first: str, oracle: Path, tmp_path: Path) -> None:
    """Ortrain and 1.19.2 train four legs in turn, each from the last checkpoint. The result equals ortrain alone."""
    generate(CASE.name, tmp_path, optimizer=THEIRS[name])
    alone, checkpoint, here = Run(tmp_path), tmp_path / "checkpoint", first == "here"
    for leg in range(4):
        wanted = go_on(alone, RATE)
        if here:
            run = Run(tmp_path, checkpoint.name)
            assert run.optimizer.step_count == leg * len(BATCHES)
            losses = go_on(run, RATE)
            assert_close(arrays(run), arrays(alone))
            checkpoint = saved(run, f"leg{leg}")
        else:
            files = [str(path) for path in (tmp_path, checkpoint, CASE, tmp_path / f"leg{leg}")]
            there = json.loads(in_environment(oracle, SCRIPTS / "go_on.py", *files, str(RATE)))
            losses, checkpoint = there["losses"], tmp_path / f"leg{leg}"
            assert_close({name: np.array(values) for name, values in there["parameters"].items()}, arrays(alone))
        np.testing.assert_allclose(losses, wanted, rtol=LOSS_TOLERANCE, err_msg=f"leg {leg}")
        here = not here


def tried(oracle: Path, training: Path, optimizer: Path, checkpoint: Path, result: Path) -> dict[str, Any]:
    """Train with 1.19.2; returns the result or the error. A crash of the process fails the test."""
    files = [str(path) for path in (training, optimizer, checkpoint, CASE, result)]
    found: dict[str, Any] = json.loads(in_environment(oracle, SCRIPTS / "try_optimizer.py", *files))
    return found


@pytest.mark.parametrize("name", OURS)
def test_models_in_plain_onnx_are_refused_there(name: str, oracle: Path, tmp_path: Path) -> None:
    """1.19.2 rejects the models with a fresh checkpoint and with a checkpoint that has optimizer state."""
    run = Run(generate(CASE.name, tmp_path, optimizer=OURS[name]))
    go_on(run)
    models = tmp_path / "training_model.onnx", tmp_path / "optimizer_model.onnx"
    for checkpoint in (tmp_path / "checkpoint", saved(run, "saved")):
        found = tried(oracle, *models, checkpoint, tmp_path / "never")
        assert found["call"] == "Optimizer"
        assert found["error"].startswith("RuntimeError: ")
        assert "Only support one type of optimizer algorithm, but got: 0" in found["error"]


@pytest.mark.parametrize("name", OURS)
def test_their_adamw_refuses_a_checkpoint_of_another_optimizer(name: str, oracle: Path, tmp_path: Path) -> None:
    """Slots have other names than the moments of AdamW. A checkpoint without optimizer state loads as usual."""
    run = Run(generate(CASE.name, tmp_path, optimizer=OURS[name]))
    go_on(run)
    refused = tried(oracle, *THEIR_MODELS, saved(run, "saved"), tmp_path / "back")
    assert refused["call"] == "Optimizer"
    assert refused["error"].startswith(("IndexError: ", "RuntimeError: ")), refused["error"]
    plain = tried(oracle, *THEIR_MODELS, saved(run, "plain", optimizer=False), tmp_path / "other")
    assert len(plain["losses"]) == len(BATCHES)


@pytest.mark.parametrize("name", OURS)
def test_another_optimizer_takes_over_again(name: str, oracle: Path, tmp_path: Path) -> None:
    """A training that continued in their AdamW continues here in its first optimizer."""
    run = Run(generate(CASE.name, tmp_path, optimizer=OURS[name]))
    go_on(run)
    tried(oracle, *THEIR_MODELS, saved(run, "plain", optimizer=False), tmp_path / "back")
    run.state = CheckpointState.load_checkpoint(tmp_path / "back")
    run.module = Module(tmp_path / "training_model.onnx", run.state)
    run.optimizer = Optimizer(tmp_path / "optimizer_model.onnx", run.module, replace=True)
    go_on(run)
    saved(run, "again")
    again = Run(tmp_path, "again")
    assert again.optimizer.step_count == run.optimizer.step_count
    wanted = arrays(run)
    for key, values in arrays(again).items():
        np.testing.assert_array_equal(values, wanted[key], err_msg=key)
