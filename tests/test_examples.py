"""The examples. digits_files.py, finetune_digits.py and finetune_digits_orttrainer.py run in `make demo`."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import ortrain

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ortrain.examples.__all__)
def test_scripts_create_the_stored_models(name: str) -> None:
    made = runpy.run_path(str(ROOT / "examples" / f"make_{name}.py"))[name]()
    assert made == onnx.load(getattr(ortrain.examples, name)()) == onnx.load(ROOT / "examples" / f"{name}.onnx")
    assert ortrain.inspect(made).obstacle is None


def test_the_gradient_of_a_model(tmp_path: Path) -> None:
    script = ROOT / "examples" / "gradient.py"
    done = subprocess.run([sys.executable, script, tmp_path / "made"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "taken for a 3: 10 of 10"
    onnx.checker.check_model(tmp_path / "made" / "gradient.onnx", full_check=True)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    script = ROOT / "examples" / "loss_in_numpy.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    script = ROOT / "examples" / "own_optimizer.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    for name in ("Lion", "AdamW"):
        losses = [float(loss) for loss in re.findall(rf"{name} ([\d.]+)", done.stdout)]
        assert len(losses) == 4
        assert losses[-1] < losses[0] / 4


def test_a_script_of_onnxcustom(tmp_path: Path) -> None:
    script = ROOT / "examples" / "onnxcustom_script.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after, rate = (float(line.rpartition(" ")[2]) for line in done.stdout.splitlines())
    assert after < 0.1 * before
    assert rate == 0.01


@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_operator", r"largest difference to the sine: 0\.0\d"), ("custom_gradient", r"exported: right [5-9]\d%")],
)
def test_operators_and_gradients_of_ones_own(name: str, last: str, tmp_path: Path) -> None:
    """The examples in Rust have their own tests."""
    script = ROOT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script, tmp_path / "made"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *steps, result = done.stdout.splitlines()
    losses = [float(re.search(r"loss +([\d.]+)", line)[1]) for line in steps]  # type: ignore[index]
    assert losses[-1] < losses[0] / 2
    assert re.fullmatch(last, result), result
    onnx.checker.check_model(tmp_path / "made" / "trained.onnx", full_check=True)
