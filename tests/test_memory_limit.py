"""A memory limit is met by recomputing values, and changes no bit of the result."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))
import workloads

STEPS = 2
# Remaining share of the work memory of a step. (lenet is left out: one value and its gradient take nearly all of its
# memory at the same time.)
SHARES = {"mobilenetv2_96": 0.6, "bert_mini": 0.6}


@pytest.mark.parametrize("name", SHARES)
def test_a_limit_changes_no_bit(name: str, tmp_path: Path) -> None:
    settings = workloads.about(name)
    model = workloads.load(name)
    artifacts.generate_artifacts(
        model.SerializeToString(),
        requires_grad=settings["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    batches = [workloads.batch(name, index) for index in range(STEPS)]

    def run(limit: int | None) -> tuple[list[float], np.ndarray, int]:
        options = ortrain.SessionOptions()
        options.memory_limit = limit
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state, session_options=options)
        optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
        planned = module.memory(*batches[0])
        losses = []
        for batch in batches:
            losses.append(float(module(*batch)))
            optimizer.step()
            module.lazy_reset_grad()
        assert module.memory() == planned
        return losses, module.get_contiguous_parameters().numpy(), planned.total - planned.moments

    losses, parameters, total = run(None)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    need = Module(tmp_path / "training_model.onnx", state).memory(*batches[0])
    limit = total - int((1 - SHARES[name]) * need.work) + 4096  # constants of the program count, too
    less_losses, less_parameters, less = run(limit)
    assert less <= limit
    assert less_losses == losses
    np.testing.assert_array_equal(less_parameters, parameters)
