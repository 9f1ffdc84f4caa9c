"""Copies and pickles of modules and optimizers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from conftest import Run

from ortrain import SessionOptions
from ortrain.api import Module, Optimizer

rng = np.random.default_rng(3)
X, LABELS = rng.normal(size=(8, 10)).astype(np.float32), rng.integers(0, 5, 8)


def step(module: Module, optimizer: Optimizer) -> float:
    loss = float(module(X, LABELS))
    optimizer.step()
    module.lazy_reset_grad()
    return loss


@pytest.mark.parametrize("is_pickle", [False, True])
def test_copies_train_on_to_the_same_bits(run: Run, is_pickle: bool) -> None:
    for _ in range(3):
        step(run.module, run.optimizer)
    pair = run.module, run.optimizer
    module, optimizer = pickle.loads(pickle.dumps(pair)) if is_pickle else copy.deepcopy(pair)
    assert optimizer._module is module
    assert optimizer.step_count == 3
    before = run.state.to_bytes(True)
    losses = [step(module, optimizer) for _ in range(3)]
    assert run.state.to_bytes(True) == before
    assert losses == [step(run.module, run.optimizer) for _ in range(3)]
    assert run.state.to_bytes(True) == module._state.to_bytes(True)


def test_copies_have_mode_and_options(run: Run) -> None:
    options = SessionOptions()
    options.memory_limit = 1 << 30
    module = Module(
        (run.folder / "training_model.onnx").read_bytes(), run.state, run.folder / "eval_model.onnx", "cpu", options
    )
    other = pickle.loads(pickle.dumps(module.eval()))
    assert not other.training
    assert other.device == module.device
    assert other(X, LABELS) == module(X, LABELS)
    assert other._made_from[2].memory_limit == 1 << 30


def test_copies_have_no_gradients(run: Run) -> None:
    run.module(X, LABELS)
    other = copy.deepcopy(run.module)
    assert run.module.get_contiguous_gradients().numpy().any()
    assert not other.get_contiguous_gradients().numpy().any()
