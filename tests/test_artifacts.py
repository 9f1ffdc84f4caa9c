"""Tests of generate_artifacts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import CASES, RECORDS, generate, meta_of

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState

FORWARD = RECORDS / "mlp_adamw_ce" / "forward.onnx"
WEIGHTS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
FILES = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"}
CROSS_ENTROPY = artifacts.LossType.CrossEntropyLoss


def test_enums() -> None:
    assert {member.name: member.value for member in artifacts.LossType} == {
        "MSELoss": 1,
        "CrossEntropyLoss": 2,
        "BCEWithLogitsLoss": 3,
        "L1Loss": 4,
    }
    assert {member.name: member.value for member in artifacts.OptimType} == {"AdamW": 1, "SGD": 2}


@pytest.mark.parametrize("case", CASES)
def test_interface_is_theirs(case: str, tmp_path: Path) -> None:
    """Inputs and outputs agree by name, type, shape and order; so do the header and the checkpoint."""
    generate(case, tmp_path)
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        ours, theirs = onnx.load(tmp_path / file), onnx.load(RECORDS / case / file)
        if file == "eval_model.onnx":
            onnx.checker.check_model(ours)
        assert list(ours.graph.input) == list(theirs.graph.input), file
        assert [value.type for value in ours.graph.output] == [value.type for value in theirs.graph.output]
        if file != "optimizer_model.onnx":
            assert (ours.ir_version, ours.graph.name) == (theirs.ir_version, theirs.graph.name)
        assert {opset.domain: opset.version for opset in ours.opset_import} == {
            opset.domain: opset.version for opset in theirs.opset_import
        }, file
    ours_state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    theirs_state = CheckpointState.load_checkpoint(RECORDS / case / "checkpoint")
    assert len(ours_state.parameters) == len(theirs_state.parameters)
    for name, parameter in theirs_state.parameters:
        np.testing.assert_array_equal(ours_state.parameters[name].data, parameter.data)
        assert ours_state.parameters[name].requires_grad == parameter.requires_grad


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate("mlp_adamw_ce", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    generate("mlp_adamw_ce", tmp_path, optimizer=None, nominal_checkpoint=True, prefix="a_")
    made = {"a_training_model.onnx", "a_eval_model.onnx", "a_checkpoint", "a_nominal_checkpoint"}
    assert {path.name for path in tmp_path.iterdir()} == FILES | made
    there = tmp_path / "here"
    there.mkdir()
    monkeypatch.chdir(there)
    generate("mlp_adamw_ce", there, artifact_directory=None)
    assert {path.name for path in there.iterdir()} == FILES
    for name in FILES:
        assert (there / name).read_bytes() == (tmp_path / name).read_bytes()


def test_ways_to_give_a_model(tmp_path: Path) -> None:
    model = onnx.load(FORWARD)
    before = model.SerializeToString()
    found = []
    ways: tuple[Any, ...] = (FORWARD, os.fspath(FORWARD), FORWARD.read_bytes(), model)
    for k, given in enumerate(ways):
        folder = tmp_path / str(k)
        folder.mkdir()
        artifacts.generate_artifacts(given, requires_grad=WEIGHTS, loss=CROSS_ENTROPY, artifact_directory=folder)
        found.append((folder / "training_model.onnx").read_bytes())
    assert all(content == found[0] for content in found)
    assert model.SerializeToString() == before


def test_nominal_checkpoint_has_names_only(tmp_path: Path) -> None:
    generate("mlp_adamw_ce", tmp_path, nominal_checkpoint=True)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    assert len(state.parameters) == len(WEIGHTS)
    assert all(name in state.parameters for name in WEIGHTS)
    with pytest.raises(ortrain.OrtrainError, match="nominal"):
        state.parameters["fc1.weight"]
    with pytest.raises(ortrain.OrtrainError, match="nominal"):
        list(state.parameters)


def test_model_that_has_its_loss(tmp_path: Path) -> None:
    """Without a loss argument, the first output of the model is the loss."""
    model = onnx.load(RECORDS / "mlp_sgd_mse" / "eval_model.onnx")
    weights = {tensor.name: tensor for tensor in onnx.load(RECORDS / "mlp_sgd_mse" / "forward.onnx").graph.initializer}
    model.graph.initializer.extend(weights.values())
    kept = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    artifacts.generate_artifacts(
        model,
        requires_grad=meta_of("mlp_sgd_mse")["requires_grad"],
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    assert {path.name for path in tmp_path.iterdir()} == FILES


class Block:
    """A class with the name of a user's own onnxblock.Block."""


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (
            {"requires_grad": ["fc1.weight", "zz"]},
            ortrain.InvalidArgumentError,
            "zz",
        ),
        (
            {"requires_grad": WEIGHTS, "frozen_params": ["fc1.weight"]},
            ortrain.InvalidArgumentError,
            "fc1.weight",
        ),
        ({"requires_grad": []}, ortrain.InvalidArgumentError, "train"),
        (
            {"additional_output_names": ["nothing"]},
            ortrain.InvalidArgumentError,
            "nothing",
        ),
        ({"artifact_directory": "no/such/folder"}, ortrain.NoSuchFileError, "no/such/folder"),
        (
            {"ort_format": True},
            ortrain.UnsupportedError,
            "ort_format=True is not supported: ortrain writes and reads .onnx files",
        ),
        (
            {"custom_op_library": "operators.so"},
            ortrain.NoSuchFileError,
            "there is no file operators.so",
        ),
        (
            {"loss": Block()},
            TypeError,
            "loss must be one of LossType.MSELoss, LossType.CrossEntropyLoss, LossType.BCEWithLogitsLoss, "
            "LossType.L1Loss, a block of ortrain.onnxblock or None, got Block",
        ),
        (
            {"optimizer": Block()},
            TypeError,
            "optimizer must be one of OptimType.AdamW, OptimType.SGD, a block of ortrain.onnxblock or None, got Block",
        ),
        ({"optimizer": 1}, TypeError, "got int"),
        ({"requires_grad": "fc1.weight"}, TypeError, "requires_grad must be a list of names, got one name"),
    ],
)
def test_refusals(arguments: dict[str, object], kind: type[Exception], sentence: str, tmp_path: Path) -> None:
    """Each error names the problem, and no file is written."""
    with pytest.raises(kind) as error:
        generate("mlp_adamw_ce", tmp_path, **arguments)
    assert sentence in str(error.value)
    assert list(tmp_path.iterdir()) == []
