"""AdamW in both formulas against NumPy in float64, and gradient clipping with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer

RATE, STEPS = 0.01, 10
# Difference between steps in float32 and in float64, summed over ten steps.
TOLERANCE = 1e-6
SHAPE = (4, 3)


def model() -> Any:
    """Return a model with the mean of the squares of ``x w`` as its loss."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["loss"], keepdims=0),
    ]
    weights = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", SHAPE[0]])
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "graph", [x], [loss], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    # Small gradients, for which epsilon matters.
    return [1e-3 * rng.standard_normal((5, SHAPE[0]), np.float32) for _ in range(STEPS)]


def trained(optimizer: Any, folder: Path) -> np.ndarray:
    artifacts.generate_artifacts(model(), optimizer=optimizer, artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    steps = Optimizer(folder / "optimizer_model.onnx", module)
    steps.set_learning_rate(RATE)
    for x in batches():
        module(x)
        steps.step()
        module.lazy_reset_grad()
    return np.array(state.parameters["w"].data)


def expected(*, torch: bool, eps: float, decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> np.ndarray:
    """Compute the formulas of the AdamW docstring in float64."""
    (w,) = (numpy_helper.to_array(tensor).astype(np.float64) for tensor in model().graph.initializer)
    m = v = np.zeros(SHAPE)
    (b1, b2), rate = betas, float(np.float32(RATE))
    for t, batch in enumerate(batches(), 1):
        x = batch.astype(np.float64)
        gradient = 2 * x.T @ (x @ w) / (len(x) * SHAPE[1])
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        if torch:
            w = w - rate * decay * w
            w = w - rate / (1 - b1**t) * m / (np.sqrt(v / (1 - b2**t)) + eps)
        else:
            w = w - rate * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + eps)
            w = w - rate * decay * w
    return np.asarray(w)


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (artifacts.OptimType.AdamW, {"torch": False, "eps": 1e-6, "decay": 0.0}),
        (artifacts.AdamW(), {"torch": False, "eps": 1e-6, "decay": 0.0}),
        (artifacts.AdamW(formula="pytorch"), {"torch": True, "eps": 1e-8, "decay": 0.01}),
        (
            artifacts.AdamW("pytorch", eps=1e-4, weight_decay=0.3, betas=(0.8, 0.99)),
            {"torch": True, "eps": 1e-4, "decay": 0.3, "betas": (0.8, 0.99)},
        ),
        (artifacts.AdamW(eps=1e-4, weight_decay=0.3), {"torch": False, "eps": 1e-4, "decay": 0.3}),
        (
            onnxblock.optim.AdamW(eps=1e-8, weight_decay=0.01, formula="pytorch"),
            {"torch": True, "eps": 1e-8, "decay": 0.01},
        ),
    ],
)
def test_both_formulas(optimizer: Any, formula: dict[str, Any], tmp_path: Path) -> None:
    np.testing.assert_allclose(trained(optimizer, tmp_path), expected(**formula), rtol=0, atol=TOLERANCE)


def test_the_formulas_differ() -> None:
    """The formulas differ by more than the tolerance, so that one does not pass for the other."""
    one, other = (expected(torch=torch, eps=1e-6, decay=0.0) for torch in (False, True))
    assert np.abs(one - other).max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", [artifacts.SGD, artifacts.AdamW])
def test_clipping_without_blocks(kind: Any, tmp_path: Path) -> None:
    """The optimizer model equals the model that onnxblock makes."""
    artifacts.generate_artifacts(model(), optimizer=kind(max_norm=0.25), artifact_directory=tmp_path)
    made = onnx.load(tmp_path / "optimizer_model.onnx").graph
    block = getattr(onnxblock.optim, kind.__name__)(clip_grad=onnxblock.optim.ClipGradNorm(0.25))
    artifacts.generate_artifacts(model(), optimizer=block, artifact_directory=tmp_path)
    wanted = onnx.load(tmp_path / "optimizer_model.onnx").graph
    assert [(node.op_type, node.attribute) for node in made.node] == [
        (node.op_type, node.attribute) for node in wanted.node
    ]
    assert made.node[0].op_type == "InplaceClipGradNorm"


def test_unsupported_settings_of_a_formula(tmp_path: Path) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        trained(artifacts.AdamW("pytorch", bias_correction=False), tmp_path)
    sentence = (
        "PyTorch's formula of AdamW always corrects the bias of the moments; use onnxruntime's formula without "
        "bias_correction"
    )
    assert str(error.value) == sentence
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        onnxblock.optim.AdamW(bias_correction=False, formula="pytorch")
    assert str(error.value) == sentence
    with pytest.raises(ortrain.InvalidArgumentError, match='there is no formula "tensorflow"'):
        trained(artifacts.AdamW("tensorflow"), tmp_path)  # type: ignore[arg-type]
