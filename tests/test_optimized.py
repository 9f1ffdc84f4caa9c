"""Models from onnxruntime's optimizer run with the same results, and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import RECORDS
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

EXAMPLES = Path(__file__).parent.parent / "examples"
# Networks of the examples and of the recorded cases, with the contrib operators that the optimizer inserts.
NETS: dict[str, tuple[Path, set[str]]] = {
    "perceptron": (EXAMPLES / "perceptron.onnx", {"FusedGemm"}),
    "convnet": (EXAMPLES / "convnet.onnx", {"FusedConv"}),
    "cnn": (RECORDS / "cnn_bn_adamw_ce" / "forward.onnx", {"FusedConv"}),
    "transformer": (RECORDS / "tiny_transformer_adamw_ce" / "forward.onnx", set()),
    "recurrent": (RECORDS / "lstm_gru_adamw_mse" / "forward.onnx", set()),
}
# Rounding of float32 through a few layers.
TOLERANCE = 1e-5
STEPS, LEARNING_RATE = 20, 1e-2


def optimized(model: Path | ModelProto, folder: Path) -> ModelProto:
    """Optimize a model at the extended level, which does not depend on the machine."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def feeds_of(model: ModelProto) -> dict[str, np.ndarray]:
    """Return random inputs, with 4 for open sizes."""
    rng = np.random.default_rng(0)
    constants = {tensor.name for tensor in model.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        sizes = [dim.dim_value or 4 for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = np.asarray(rng.integers(0, 3, sizes) if dtype.kind == "i" else rng.random(sizes), dtype)
    return feeds


@pytest.mark.parametrize("net", NETS)
def test_nets(net: str, tmp_path: Path) -> None:
    path, fused = NETS[net]
    model = optimized(path, tmp_path)
    assert {node.op_type for node in model.graph.node if node.domain == "com.microsoft"} >= fused
    feeds = feeds_of(model)
    theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    for got, want in zip(ortrain.InferenceSession(model).run(None, feeds), theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)

    output = model.graph.output[0].name
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        loss_input_names=[output],
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert any(parameter.requires_grad for _, parameter in state.parameters)
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    target = np.random.default_rng(1).random(theirs[0].shape, np.float32)
    losses = []
    for _ in range(STEPS):
        losses.append(float(module(*feeds.values(), target)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < 0.9 * losses[0], losses

    # The exported model has the nodes of the optimized model and new weights; onnxruntime runs it.
    module.export_model_for_inferencing(tmp_path / "trained.onnx", [output])
    trained = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (ours,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, feeds)
    np.testing.assert_allclose(ours, trained.run(None, feeds)[0], rtol=TOLERANCE, atol=TOLERANCE)


ACTIVATIONS: dict[str, dict[str, float]] = {
    "Elu": {"alpha": 0.7},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "LeakyRelu": {"alpha": 0.2},
    "Relu": {},
    "Selu": {"alpha": 1.3, "gamma": 0.9},
    "Sigmoid": {},
    "Softplus": {},
    "Softsign": {},
    "Tanh": {},
    "ThresholdedRelu": {"alpha": 0.6},
}


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "Clip"])
@pytest.mark.parametrize("op", ["Gemm", "Conv"])
def test_every_fused_activation(op: str, activation: str, tmp_path: Path) -> None:
    """Activations match for every activation that the optimizer may fuse. Some activations stay separate nodes."""
    rng = np.random.default_rng(2)
    shape = [3, 5] if op == "Gemm" else [2, 4, 6, 6]
    weight = rng.standard_normal((5, 4) if op == "Gemm" else (3, 4, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(weight.shape[1 if op == "Gemm" else 0]).astype(np.float32)
    constants: dict[str, Any] = {"w": weight, "b": bias}
    if activation == "Clip":
        constants |= {"low": np.float32(-0.5), "high": np.float32(0.75)}
    second = ["h", "low", "high"] if activation == "Clip" else ["h"]
    graph = helper.make_graph(
        [
            helper.make_node(op, ["x", "w", "b"], ["h"]),
            helper.make_node(activation, second, ["y"], **ACTIVATIONS.get(activation, {})),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = optimized(plain, tmp_path)
    x = rng.standard_normal(shape).astype(np.float32)
    want = onnxruntime.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    (got,) = ortrain.InferenceSession(model).run(None, {"x": x})
    np.testing.assert_allclose(got, want[0], rtol=TOLERANCE, atol=TOLERANCE)
