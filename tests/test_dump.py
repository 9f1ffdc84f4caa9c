"""python -m ortrain dump."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RECORDS, Run

import ortrain
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
