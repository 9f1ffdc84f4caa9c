"""Ten thousand random graphs with the release wheel of `.venv-demo`; they differ from the 300 of CI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-demo" / "bin" / "python"
SEED = int(os.environ.get("ORTRAIN_GRAPH_SEED", "1000000"))
COUNT = int(os.environ.get("ORTRAIN_GRAPHS", "10000"))


def test_ten_thousand_random_graphs(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "random_graphs", "--count", str(COUNT), "--seed", str(SEED), "--folder", tmp_path]
    result = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    print(result.stdout[-20_000:])
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
