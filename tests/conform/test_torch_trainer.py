"""ORTTrainer on modules of PyTorch, new and legacy: the checks of tests/in_torch/bridge_trainer.py, and the example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_torch_bridge import IN_TORCH, ROOT, found, in_torch

CHECKS = re.findall(r"^def (check_\w+)\(\)", (IN_TORCH / "bridge_trainer.py").read_text(), re.MULTILINE)
# Rows of the checklist in the specification.
ROWS = ("f13", "f15", "f16", "f17", "f19", "f21", "f22", "f23", "f24", "f25", "f26", "f28", "f32", "d4", "d5")


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    reason = found("trainer")[name]
    assert reason is None, reason


def test_all_checks_are_run() -> None:
    assert sorted(found("trainer")) == sorted(CHECKS)
    assert {name.split("_")[1] for name in CHECKS} >= set(ROWS)


def test_the_example_trains(tmp_path: Path) -> None:
    lines = in_torch(ROOT / "examples" / "orttrainer_with_torch.py", "made", folder=tmp_path).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert losses[-1] < losses[0] / 4
    assert lines[-1] == "right: 64 of 64"
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["checkpoint.ortcp", "trained.onnx"]
