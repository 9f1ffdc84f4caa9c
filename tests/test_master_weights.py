"""Weights of float16 and bfloat16: a warning, and float32 master weights, which accumulate small updates."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# Fifty steps of AdamW at a rate of 1e-5 do not change most 16-bit weights.
STEPS, RATE = 50, 1e-5


def network(dtype: int, *, branch: bool = False) -> onnx.ModelProto:
    """Return a perceptron with 16-bit weights; with a branch, an If uses one of them."""
    rng = np.random.default_rng(1)
    kind: Any = {TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}[dtype]
    initializers = {
        "w": rng.standard_normal((16, 32)) / 4,
        "b": rng.standard_normal(32),
        "v": rng.standard_normal((32, 4)) / 6,
    }
    declare = helper.make_tensor_value_info
    last: list[onnx.NodeProto] = [helper.make_node("MatMul", ["r", "v"], ["y"], "last")]
    if branch:
        made = [
            helper.make_graph(
                [helper.make_node("MatMul", ["r", "v"], [f"y{k}"])], f"branch{k}", [], [declare(f"y{k}", dtype, None)]
            )
            for k in range(2)
        ]
        last = [
            helper.make_node("ReduceSum", ["narrow"], ["sum"], keepdims=0),
            helper.make_node("Cast", ["sum"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Greater", ["wide", "zero"], ["positive"]),
            helper.make_node("If", ["positive"], ["y"], "either", then_branch=made[0], else_branch=made[1]),
        ]
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["narrow"], to=dtype),
            helper.make_node("Gemm", ["narrow", "w", "b"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"]),
            *last,
            helper.make_node("Cast", ["y"], ["scores"], to=TensorProto.FLOAT),
        ],
        "graph",
        [declare("x", TensorProto.FLOAT, ["n", 16])],
        [declare("scores", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(array.astype(kind), name) for name, array in initializers.items()]
        + ([numpy_helper.from_array(np.float32(0), "zero")] if branch else []),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def trained(folder: Path, model: onnx.ModelProto, **options: Any) -> tuple[CheckpointState, Module, float]:
    """Train for some steps, and return the state, the module and the share of unchanged elements."""
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        **options,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    before = {name: parameter.data.astype(np.float32) for name, parameter in state.parameters}
    rng = np.random.default_rng(2)
    x, labels = rng.standard_normal((64, 16)).astype(np.float32), rng.integers(0, 4, 64)
    for _ in range(STEPS):
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    same = [(parameter.data.astype(np.float32) == before[name]).ravel() for name, parameter in state.parameters]
    return state, module, float(np.concatenate(same).mean())


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
def test_small_updates_add_up(dtype: int, tmp_path: Path) -> None:
    model = network(dtype)
    name, part = ("float16", 4096) if dtype == TensorProto.FLOAT16 else ("bfloat16", 512)
    sentence = (
        f'3 of the 3 trained tensors are {name} ("w", "b", "v"), which loses steps that change a weight by less than '
        f'1/{part} of its value. master_weights="float32" trains them in float32 and exports {name}'
    )
    assert ortrain.inspect(model).warnings == [sentence]
    with pytest.warns(ortrain.TrainingWarning) as caught:
        _, _, unmoved = trained(tmp_path, model)
    assert [str(warning.message) for warning in caught] == [sentence]
    assert unmoved > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, module, unmoved = trained(tmp_path, model, master_weights="float32")
    assert unmoved < 0.05
    assert {parameter.data.dtype for _, parameter in state.parameters} == {np.dtype(np.float32)}
    # The export has the type, the names and the nodes of the model, and the values of the eval model.
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    exported = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(exported, full_check=True)
    assert list(exported.graph.node) == list(model.graph.node)
    assert {tensor.name: tensor.data_type for tensor in exported.graph.initializer} == {
        "w": dtype,
        "b": dtype,
        "v": dtype,
    }
    w = next(tensor for tensor in exported.graph.initializer if tensor.name == "w")
    narrow = state.parameters["w"].data.astype(numpy_helper.to_array(w).dtype)
    np.testing.assert_array_equal(numpy_helper.to_array(w), narrow)


def test_in_onnxruntime(tmp_path: Path) -> None:
    _, module, _ = trained(tmp_path, network(TensorProto.FLOAT16), master_weights="float32")
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    x = np.random.default_rng(5).standard_normal((8, 16)).astype(np.float32)
    theirs = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (ours,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    np.testing.assert_allclose(ours, theirs.run(None, {"x": x})[0], atol=0.01)


def test_weights_in_branches(tmp_path: Path) -> None:
    """A branch reads the weight through the cast, and by its own name in the export."""
    model = network(TensorProto.FLOAT16, branch=True)
    state, module, unmoved = trained(tmp_path, model, master_weights="float32")
    assert unmoved < 0.05
    assert state.parameters["v"].data.dtype == np.float32
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    exported = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in exported.graph.node] == [node.op_type for node in model.graph.node]
    either = next(node for node in exported.graph.node if node.op_type == "If")
    assert [list(branch.g.node[0].input) for branch in either.attribute] == [["r", "v"], ["r", "v"]]


def test_frozen_parameters_keep_their_type(tmp_path: Path) -> None:
    state, _, _ = trained(
        tmp_path, network(TensorProto.FLOAT16), master_weights="float32", requires_grad=["v"], frozen_params=["w"]
    )
    assert {name: str(parameter.data.dtype) for name, parameter in state.parameters} == {"v": "float32", "w": "float16"}


def test_master_weights_need_a_half_type() -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(
            ortrain.examples.perceptron(), loss=artifacts.LossType.CrossEntropyLoss, master_weights="float32"
        )
    assert str(error.value) == (
        "master_weights needs a trained weight of float16 or bfloat16, and there is none; leave master_weights out"
    )


def test_another_type() -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(ortrain.examples.perceptron(), master_weights="float64")  # type: ignore[arg-type]
    assert str(error.value) == (
        "master_weights must be 'float32' or None, got 'float64'; weights of float32 and float64 are trained in "
        "their own type"
    )
