"""The comparison of steps on a GPU runs on the software driver of CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from test_cuda_memory import SOFTWARE

ROOT = Path(__file__).parent.parent


def test_steps_on_the_software_driver(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--device", "cuda", "--steps", "2", "--side", "64", "--elements", "4096", "--peer", "none"]
    command = [
        sys.executable,
        ROOT / "benches" / "gpu_steps.py",
        *options,
        "--no-optimizer",
        "--json",
        numbers,
        "mlp_tiny",
    ]
    variables = os.environ | {
        "ORTRAIN_CUDA_LIBRARIES": str(SOFTWARE),
        "SOFTWARE_NVRTC_CACHE": str(SOFTWARE / "modules"),
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    assert found["columns"] == ["cuda"]
    product, copy, step = found["rows"]
    assert all(row["values"]["cuda"] > 0 for row in (product, copy, step))
    assert step["same"]
    assert len(step["losses"]["cuda"]) == 2
    assert len(step["first"]["cuda"]) == 2
