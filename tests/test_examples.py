"""The examples. finetune_digits.py is run by `make demo`."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["convnet", "perceptron"])
def test_models_are_what_their_scripts_make(name: str) -> None:
    made = runpy.run_path(str(ROOT / "examples" / f"make_{name}.py"))[name]()
    assert made == onnx.load(ROOT / "examples" / f"{name}.onnx")


def test_readme_runs_as_written(tmp_path: Path) -> None:
    """The first example of the README, in an empty folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "trained.onnx").exists()
