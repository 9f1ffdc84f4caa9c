"""AdamW in PyTorch's formula compared with torch.optim.AdamW, each with its defaults."""

from __future__ import annotations

import json
from pathlib import Path

import environments
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

SCRIPT = Path(__file__).parent.parent / "in_torch" / "adamw.py"
RATE = 0.01
# Relative tolerance of losses in float32 on both sides.
TOLERANCE = 1e-5


def test_ten_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shapes = {"w": (8, 16), "v": (16, 3), "x": (32, 8), "target": (32, 3)}
    record = {name: rng.standard_normal(dims, np.float32) for name, dims in shapes.items()}
    np.savez(tmp_path / "record.npz", **record)
    wanted = json.loads(environments.in_environment(environments.torch(), SCRIPT, str(tmp_path / "record.npz")))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["before"]),
        helper.make_node("Tanh", ["before"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 8), ("y", 3)))
    weights = [numpy_helper.from_array(record[name], name) for name in ("w", "v")]
    graph = helper.make_graph(nodes, "graph", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.AdamW(formula="pytorch"),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for _ in wanted:
        losses.append(float(module(record["x"], record["target"])))
        optimizer.step()
        module.lazy_reset_grad()
    apart = np.max(np.abs(np.array(losses) / wanted - 1))
    print(f"largest difference {apart:.1e}, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
