"""Attention with a padding mask: rows of -inf only have no softmax, and exporters replace their weights by zeros."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ortrain import artifacts
from ortrain.api import CheckpointState, Module

BATCH, HEADS, SIZE = 3, 2, 4
WIDTH = HEADS * SIZE
# Rounding of sums of some products in float32, of numbers of magnitude 1.
ROUNDING = 5e-6


def attention(length: int, spelling: str) -> ModelProto:
    """Return one layer of causal attention; `mask` has -inf at padded keys. The output is the loss."""
    rng = np.random.default_rng(length)
    weights = {name: rng.normal(0, 0.6, (WIDTH, WIDTH)).astype(np.float32) for name in ("wq", "wk", "wv")}
    weights["seen"] = rng.normal(0, 1, (BATCH, HEADS, length, SIZE)).astype(np.float32)
    weights["causal"] = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    weights["scale"] = np.float32(SIZE**-0.5)
    weights["zero"] = np.float32(0)
    weights["never"] = np.float32(-np.inf)
    shapes = {"heads": [BATCH, length, HEADS, SIZE], "last": [-1]}
    nodes = []
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"]),
            helper.make_node("Reshape", [f"{name}0", "heads"], [f"{name}1"]),
            helper.make_node("Transpose", [f"{name}1"], [name], perm=perm),
        ]
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["product"]),
        helper.make_node("Mul", ["product", "scale"], ["scaled"]),
        helper.make_node("Add", ["causal", "mask"], ["both"]),
        helper.make_node("Add", ["scaled", "both"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["softmax"], axis=-1),
    ]
    if spelling == "isnan":
        nodes += [
            helper.make_node("IsNaN", ["softmax"], ["broken"]),
            helper.make_node("Where", ["broken", "zero", "softmax"], ["weights"]),
        ]
    else:
        # PyTorch's safe softmax, decomposed.
        nodes += [
            helper.make_node("Equal", ["scores", "never"], ["hidden"]),
            helper.make_node("Cast", ["hidden"], ["hidden_number"], to=TensorProto.INT64),
            helper.make_node("ReduceMin", ["hidden_number", "last"], ["row_number"], keepdims=1),
            helper.make_node("Cast", ["row_number"], ["row"], to=TensorProto.BOOL),
            helper.make_node("Where", ["row", "zero", "softmax"], ["weights"]),
        ]
    nodes += [
        helper.make_node("MatMul", ["weights", "v"], ["attended"]),
        helper.make_node("Mul", ["attended", "seen"], ["weighed"]),
        helper.make_node("ReduceSum", ["weighed"], ["loss"], keepdims=0),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    tensors += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in shapes.items()]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, length, WIDTH]),
        helper.make_tensor_value_info("mask", TensorProto.FLOAT, [BATCH, 1, 1, length]),
    ]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def expected(model: ModelProto, x: np.ndarray, mask: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss and its gradients by PyTorch's formula: a row without visible keys has weights of zero."""
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    length = x.shape[1]

    def heads(value: np.ndarray) -> np.ndarray:
        return value.reshape(BATCH, length, HEADS, SIZE).transpose(0, 2, 1, 3)

    q, k, v = (heads(x @ w[name]) for name in ("wq", "wk", "wv"))
    scores = q @ k.transpose(0, 1, 3, 2) * w["scale"] + w["causal"] + mask
    sees = np.isfinite(scores).any(-1, keepdims=True)
    powers = np.exp(scores - np.where(sees, scores.max(-1, keepdims=True), 0))
    p = np.where(sees, powers / np.where(sees, powers.sum(-1, keepdims=True), 1), 0)
    of_weights = w["seen"] @ v.transpose(0, 1, 3, 2)
    of_scores = p * (of_weights - (of_weights * p).sum(-1, keepdims=True)) * w["scale"]

    def flat(value: np.ndarray) -> np.ndarray:
        return np.einsum("bti,bto->io", x, value.transpose(0, 2, 1, 3).reshape(BATCH, length, WIDTH))

    gradients = {
        "wq": flat(of_scores @ k),
        "wk": flat(of_scores.transpose(0, 1, 3, 2) @ q),
        "wv": flat(p.transpose(0, 1, 3, 2) @ w["seen"]),
    }
    return float((p @ v * w["seen"]).sum()), gradients


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("spelling", ["isnan", "rows"])
@pytest.mark.parametrize("length", [1, 5, 17])
def test_gradients_are_those_of_pytorch(length: int, spelling: str, device: str, tmp_path: Path) -> None:
    model = attention(length, spelling)
    trained = ["wq", "wk", "wv"]
    artifacts.generate_artifacts(model, requires_grad=trained, loss=None, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, device=device)
    rng = np.random.default_rng(7)
    x = rng.normal(0, 1, (BATCH, length, WIDTH)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for paddings in ([0, 0, 0], [0, length // 2, length - 1], [length, 1, 0], [length] * 3):
        mask = np.zeros((BATCH, 1, 1, length), np.float32)
        for row, padding in enumerate(paddings):
            mask[row, :, :, :padding] = -np.inf
        loss, gradients = expected(model, x, mask)
        module.train()
        got = float(module(x, mask))
        assert got == pytest.approx(loss, rel=ROUNDING, abs=ROUNDING)
        assert got == pytest.approx(float(session.run(None, {"x": x, "mask": mask})[0]), rel=ROUNDING, abs=ROUNDING)
        for name, want in gradients.items():
            scale = max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(
                state.parameters[name].grad, want, rtol=0, atol=scale * ROUNDING, err_msg=f"{name} {paddings}"
            )
        module.lazy_reset_grad()
