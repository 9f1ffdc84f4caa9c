"""Recorded runs of onnxruntime-training 1.19.2, replayed by ortrain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import CASES, DEVICES, RECORDS, Run, meta_of
from replaying import Record, above_tolerance, batches_of, replay
from resuming import RATE, resume

import ortrain
from ortrain import api
from ortrain.api import CheckpointState, LinearLRScheduler

# Rounding of a float32 sum in another order.
ROUNDING = 1e-6
# Cases with operators that have kernels in onnxruntime-training, but not in onnxruntime.
NOT_IN_INFERENCE = ("fake_quant_sgd_mse",)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_our_artifacts(case: str, device: str, ours: Callable[[str], Path]) -> None:
    distances = replay(api, RECORDS / case, ours(case), device=device)
    assert not above_tolerance(distances), distances


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_their_artifacts(case: str, device: str) -> None:
    distances = replay(api, RECORDS / case, RECORDS / case, device=device)
    assert not above_tolerance(distances), distances


@pytest.mark.parametrize("case", CASES)
def test_names_and_sizes(case: str, ours: Callable[[str], Path]) -> None:
    meta, run = meta_of(case), Run(ours(case))
    assert run.module.input_names() == meta["train_input_names"]
    assert len(run.module.output_names()) == len(meta["train_output_names"])
    assert run.module.get_parameters_size() == meta["parameters_size"]["trainable"]
    assert run.module.get_parameters_size(trainable_only=False) == meta["parameters_size"]["all"]
    assert run.optimizer.get_learning_rate() == meta["default_lr"]
    run.module.eval()
    assert run.module.input_names() == meta["eval_input_names"]
    assert len(run.module.output_names()) == len(meta["eval_output_names"])


@pytest.mark.parametrize("case", CASES)
def test_exported_model(case: str, ours: Callable[[str], Path], tmp_path: Path) -> None:
    """An export of the recorded final state gives the recorded outputs, in ortrain and onnxruntime."""
    record, run, meta = Record(RECORDS / case), Run(ours(case)), meta_of(case)
    buffer = ortrain.OrtValue.ortvalue_from_numpy(record.values["contiguous_all"])
    run.module.copy_buffer_to_parameters(buffer, trainable_only=False)
    path = tmp_path / "inference.onnx"
    run.module.export_model_for_inferencing(path, meta["inference_outputs"])

    sessions: list[Any] = [ortrain.InferenceSession(path)]
    if case not in NOT_IN_INFERENCE:
        sessions.append(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))
    for session in sessions:
        assert [value.name for value in session.get_inputs()] == meta["inference_inputs"]
        feeds = {name: batches_of(RECORDS / case)[0][name] for name in meta["inference_inputs"]}
        for name, value in zip(meta["inference_outputs"], session.run(None, feeds), strict=True):
            record.compare("infer", value, f"infer/{name}")
    assert not above_tolerance(record.distances), record.distances


RATES = [key for key in Record(RECORDS / "linear_lr").values if key.startswith("lr_sequence/")]


@pytest.mark.filterwarnings("ignore:the module ran no training step yet", "ignore:the previous step used the same")
@pytest.mark.parametrize("key", RATES)
def test_linear_learning_rates(key: str, run: Run) -> None:
    """Learning rates equal the record, with the two counts as documented. 1.19.2 swapped their names."""
    words = key.removeprefix("lr_sequence/").split("_")
    their_warmup, their_total = int(words[1].removeprefix("warmup")), int(words[3].removeprefix("total"))
    if their_total > their_warmup:
        with pytest.raises(ortrain.InvalidArgumentError, match="is longer than the training of"):
            LinearLRScheduler(run.optimizer, their_total, their_warmup, 0.1)
        return
    scheduler = LinearLRScheduler(
        run.optimizer, warmup_step_count=their_total, total_step_count=their_warmup, initial_lr=0.1
    )
    rates = [run.optimizer.get_learning_rate()]
    for _ in range(12):
        run.optimizer.step()
        scheduler.step()
        rates.append(run.optimizer.get_learning_rate())
    np.testing.assert_allclose(rates, Record(RECORDS / "linear_lr").values[key], rtol=ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saved", ["recorded", "own"])
@pytest.mark.parametrize("origin", ["theirs", "ours"])
def test_resume(origin: str, saved: str, device: str, ours: Callable[[str], Path], tmp_path: Path) -> None:
    """All records of checkpoint_resume match, from their checkpoints of the third step and from ours."""
    case, meta = RECORDS / "checkpoint_resume", meta_of("checkpoint_resume")
    artifacts = case if origin == "theirs" else ours("checkpoint_resume")
    checkpoints = case if saved == "recorded" else None
    outcome = resume("ortrain.api", case, artifacts, checkpoints, tmp_path, device=device)
    assert not above_tolerance(outcome.distances), outcome.distances
    for kind in ("optim", "plain"):
        assert outcome.properties[kind] == meta[f"properties_after_load_{kind}"]
    # Their files have no learning rate; our files have one if they contain the optimizer state.
    kept = np.float32(RATE) if saved == "own" else meta["lr_after_load_optim"]
    assert outcome.rates == {"optim": kept, "plain": meta["lr_after_load_plain"]}


def test_resume_has_the_same_bits(run: Run, tmp_path: Path) -> None:
    """A saved and loaded run continues exactly like an uninterrupted run."""
    batches = batches_of(RECORDS / "mlp_adamw_ce")

    def steps(run: Run, scheduler: LinearLRScheduler, count: int) -> list[float]:
        losses = []
        for step in range(count):
            batch = batches[step % len(batches)]
            losses.append(float(run.module(*[batch[name] for name in run.module.input_names()])))
            run.optimizer.step()
            scheduler.step()
            run.module.lazy_reset_grad()
        return losses

    scheduler = LinearLRScheduler(run.optimizer, 2, 20, 0.01)
    steps(run, scheduler, 4)
    CheckpointState.save_checkpoint(run.state, tmp_path / "checkpoint", include_optimizer_state=True)
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        (tmp_path / file).write_bytes((run.folder / file).read_bytes())
    again = Run(tmp_path)
    assert again.optimizer.get_learning_rate() == run.optimizer.get_learning_rate()
    assert steps(again, LinearLRScheduler(again.optimizer, 2, 20, 0.01), 4) == steps(run, scheduler, 4)
    for name, parameter in run.state.parameters:
        np.testing.assert_array_equal(parameter.data, again.state.parameters[name].data)


def test_nominal_state_has_no_values() -> None:
    case = RECORDS / "checkpoint_resume"
    record, batches = Record(case), batches_of(case)
    run = Run(case, "nominal_checkpoint")
    with pytest.raises(ortrain.OrtrainError, match="nominal"):
        run.state.parameters["fc1.weight"]
    with pytest.raises(ortrain.OrtrainError, match="nominal"):
        run.module(*[batches[0][name] for name in run.module.input_names()])
    buffer = ortrain.OrtValue.ortvalue_from_numpy(record.values["nominal_buffer_all"])
    with pytest.raises(ortrain.OrtrainError, match="nominal"):
        run.module.copy_buffer_to_parameters(buffer, trainable_only=True)
