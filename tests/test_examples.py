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
    """The examples of the README, one after the other, in a folder that has only the networks."""
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(code: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    steps = run(first)
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "trained.onnx").exists()

    table = "\n".join(run("\n".join([first, *others]))[len(steps) :])
    assert "Conv" in table
    assert (tmp_path / "step.json").exists()
