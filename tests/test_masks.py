"""The mask of Dropout is stored for the backward pass with one bit for each element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

ROWS = 211
WIDTH = 101
LAYERS = 6
# 21 311 elements, which is not a multiple of eight.
ELEMENTS = ROWS * WIDTH


def generate(folder: Path, drops: bool) -> None:
    """Write the artifacts of square layers, with or without a Dropout after each."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for layer in range(LAYERS):
        weight = rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"weight{layer}"))
        product = "scores" if layer == LAYERS - 1 else f"product{layer}"
        nodes.append(helper.make_node("MatMul", [x, f"weight{layer}"], [product]))
        x = product
        if drops and layer < LAYERS - 1:
            x = f"kept{layer}"
            nodes.append(helper.make_node("Dropout", [product], [x]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", "scores")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    folder.mkdir()
    artifacts.generate_artifacts(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        requires_grad=[weight.name for weight in weights],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def train(folder: Path, limit: int | None = None, threads: int = 1) -> tuple[list[float], np.ndarray, int]:
    """Return the losses and parameters of three steps, and the bytes of a step's work memory."""
    options = ortrain.SessionOptions()
    options.memory_limit = limit
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(ROWS, WIDTH)).astype(np.float32), rng.integers(0, WIDTH, ROWS)
    planned = module.memory(x, labels)
    losses = []
    for _ in range(3):
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    assert module.memory() == planned
    return losses, module.get_contiguous_parameters().numpy(), planned.work


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "without", tmp_path / "with"]
    for folder, drops in zip(folders, (False, True), strict=True):
        generate(folder, drops)
    return folders


def test_masks_take_a_bit(folders: list[Path]) -> None:
    without, with_masks = (train(folder)[2] for folder in folders)
    # A mask of bytes would take one for each element of every layer but the last.
    assert with_masks - without < (LAYERS - 1) * ELEMENTS / 2
    model = onnx.load(folders[1] / "training_model.onnx")
    text = ortrain.dump(model, "program", {"x": [ROWS, WIDTH], "labels": [ROWS]})
    assert f"uint8[{-(-ELEMENTS // 8)}]" in text


def test_masks_are_the_same_masks(folders: list[Path]) -> None:
    losses, parameters, work = train(folders[1])
    assert losses[0] != train(folders[0])[0][0]
    state = CheckpointState.load_checkpoint(folders[1] / "checkpoint")
    module = Module(folders[1] / "training_model.onnx", state)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(ROWS, WIDTH)).astype(np.float32), rng.integers(0, WIDTH, ROWS)
    limit = module.memory(x, labels).total - work // 5
    for other in (train(folders[1], threads=2), train(folders[1], limit=limit)):
        assert other[0] == losses
        np.testing.assert_array_equal(other[1], parameters)
    assert other[2] < work
