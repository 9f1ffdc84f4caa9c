"""python -m ortrain dump."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import RECORDS, Run
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.__main__ import main

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("graph", ["Gemm", "Relu", "fc1.weight", "float32[batch, 64]"]),
        ("program", ["MatMul", "bytes"]),
    ],
)
def test_stages(stage: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(PERCEPTRON), "--stage", stage, "--shape", "x=32,64"]) == 0
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
    assert printed == ortrain.dump(PERCEPTRON, stage, {"x": [32, 64]})


def test_shapes_decide_sizes() -> None:
    small, large = (ortrain.dump(PERCEPTRON, "program", {"x": [batch, 64]}) for batch in (32, 64))
    assert "float32[2048]" in small
    assert "float32[4096]" in large


def test_gradient() -> None:
    """Of a model that ends in its loss; a training model has its gradient."""
    loss = ortrain.dump(RECORDS / "mlp_sgd_mse" / "eval_model.onnx", "gradient")
    assert "ReduceMean" in loss
    training = ortrain.dump(RECORDS / "mlp_adamw_ce" / "training_model.onnx", "gradient")
    assert "ReluGrad" in training
    # An output that is no scalar: its gradient is one more input.
    product = ortrain.dump(PERCEPTRON, "gradient")
    assert "input    logits_grad: float32[batch, 10]" in product
    assert "output   fc1.weight_grad: float32[96, 64]" in product


def test_training_model(run: Run) -> None:
    printed = ortrain.dump(run.folder / "training_model.onnx", "program", {"x": [8, 10], "labels": [8]})
    assert "fc1.weight_grad.accumulation.buffer" in printed
    assert "(overwrite)" in printed
    assert "(accumulate)" in printed


def test_optimizer_model(run: Run) -> None:
    printed = ortrain.dump(run.folder / "optimizer_model.onnx", "program", {"params": [1000]})
    assert "plane" in printed
    assert "Sqrt" in printed


def test_command_line() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ortrain", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("dump", str(PERCEPTRON))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ortrain.dump(PERCEPTRON)
    done = run("dump", "nowhere.onnx")
    assert (done.returncode, done.stdout) == (1, "")
    sentence = "cannot read nowhere.onnx: No such file or directory (os error 2)"
    assert done.stderr == f"python -m ortrain: {sentence}\n"
    done = run("dump", str(PERCEPTRON), "--shape", "x=a,b")
    assert done.returncode == 2
    assert "'x=a,b' is not of the form NAME=2,3" in done.stderr
    assert run().returncode == 2


@pytest.mark.parametrize("op", ["Relu", "LeakyRelu", "Elu", "Clip", "Abs", "HardSwish", "Softplus", "Max", "Min"])
def test_activations_keep_no_mask(op: str, tmp_path: Path) -> None:
    """From the way there to the way back: a comparison is made again of what is there anyhow."""
    rows, size = 64, 128
    more = {"Clip": ["zero", "six"], "Max": ["other"], "Min": ["other"]}.get(op, [])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["hidden"]),
        helper.make_node("MatMul", ["x", "v"], ["other"]),
        helper.make_node(op, ["hidden", *more], ["active"]),
        helper.make_node("MatMul", ["active", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, size]) for name in "xy")
    weights = {"w": np.eye(size), "v": np.eye(size), "zero": np.zeros(()), "six": np.full((), 6.0)}
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, op, [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model, requires_grad=["w", "v"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    printed = ortrain.dump(tmp_path / "training_model.onnx", "program", {"x": [rows, size], "target": [rows, size]})
    assert f"float32[{rows * size}]" in printed
    assert f"bool[{rows * size}]" not in printed
