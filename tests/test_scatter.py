"""The last of several updates of an element wins, as in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

ROWS, COLUMNS, COUNT = 4, 3, 6


def scatter(op: str, dtype: type, axis: int = 0, loss: bool = False) -> ModelProto:
    """Return `y = op(data, indices, updates)`, and optionally a loss with a weight for each element."""
    indices = [COUNT, COLUMNS] if op == "ScatterElements" and axis == 0 else [ROWS, COUNT]
    updates = indices
    if op == "ScatterND":
        indices, updates = [COUNT, 1], [COUNT, COLUMNS]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    attributes = {"axis": axis} if op == "ScatterElements" else {}
    rng = np.random.default_rng(3)
    tensors, inputs = [], [helper.make_tensor_value_info("indices", TensorProto.INT64, indices)]
    for name, dims in (("data", [ROWS, COLUMNS]), ("updates", updates)):
        if loss:
            tensors.append(numpy_helper.from_array(rng.normal(size=dims).astype(dtype), name))
        else:
            inputs.append(helper.make_tensor_value_info(name, kind, dims))
    nodes = [helper.make_node(op, ["data", "indices", "updates"], ["y"], **attributes)]
    outputs = [helper.make_tensor_value_info("y", kind, [ROWS, COLUMNS])]
    if loss:
        weights = np.arange(1, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS).astype(dtype)
        tensors.append(numpy_helper.from_array(weights, "weights"))
        nodes.append(helper.make_node("Mul", ["y", "weights"], ["weighed"]))
        nodes.append(helper.make_node("ReduceSum", ["weighed"], ["loss"], keepdims=0))
        outputs = [helper.make_tensor_value_info("loss", kind, [])]
    graph = helper.make_graph(nodes, "scatter", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def random_indices(rng: np.random.Generator, op: str, axis: int) -> np.ndarray:
    """Return indices, with many repetitions and with negative values."""
    if op == "ScatterND":
        return rng.integers(-ROWS, ROWS, (COUNT, 1))
    dims, size = ((COUNT, COLUMNS), ROWS) if axis == 0 else ((ROWS, COUNT), COLUMNS)
    return rng.integers(-size, size, dims)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])
@pytest.mark.parametrize(("op", "axis"), [("ScatterElements", 0), ("ScatterElements", 1), ("ScatterND", 0)])
def test_results_are_those_of_onnxruntime(op: str, axis: int, dtype: type) -> None:
    model = scatter(op, dtype, axis).SerializeToString()
    rng = np.random.default_rng(5)
    theirs = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    ours = ortrain.InferenceSession(model)
    for _ in range(10):
        indices = random_indices(rng, op, axis)
        updates = (COUNT, COLUMNS) if op == "ScatterND" else indices.shape
        feeds = {
            "indices": indices,
            "data": rng.integers(0, 2 if dtype is np.bool_ else 100, (ROWS, COLUMNS)).astype(dtype),
            "updates": rng.integers(0, 2 if dtype is np.bool_ else 100, updates).astype(dtype),
        }
        want = theirs.run(None, feeds)[0]
        np.testing.assert_array_equal(ours.run(None, feeds)[0], want)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(("op", "axis"), [("ScatterElements", 0), ("ScatterElements", 1), ("ScatterND", 0)])
def test_overwritten_updates_have_no_gradient(op: str, axis: int, device: str, tmp_path: Path) -> None:
    model = scatter(op, np.float32, axis, loss=True)
    artifacts.generate_artifacts(model, requires_grad=["data", "updates"], loss=None, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, device=device)
    rng = np.random.default_rng(11)
    for _ in range(5):
        indices = random_indices(rng, op, axis)
        module.train()
        module(indices)
        # NumPy also writes in order, and gives the remaining update of each element.
        weights = np.arange(1, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS)
        of_updates = np.zeros(state.parameters["updates"].data.shape)
        owner = np.full((ROWS, COLUMNS), None)
        for at in np.ndindex(of_updates.shape):
            row = indices[at[0], 0] if op == "ScatterND" else indices[at]
            to = (at[0], row) if axis == 1 else (row, at[1])
            owner[to] = at
        for to in np.ndindex(owner.shape):
            if owner[to] is not None:
                of_updates[owner[to]] = weights[to]
        of_data = np.where(owner == None, weights, 0)  # noqa: E711
        np.testing.assert_array_equal(state.parameters["updates"].grad, of_updates)
        np.testing.assert_array_equal(state.parameters["data"].grad, of_data)
        module.lazy_reset_grad()
