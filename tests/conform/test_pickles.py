"""A million damaged pickles and ten thousand generated pickles, in processes with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "pickle_grammar.py"
SEEDS = range(10)
GENERATED, DAMAGED = 1000, 100_000


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_and_damaged_pickles(seed: int) -> None:
    arguments = [f"--seed={seed}", f"--generated={GENERATED}", f"--damaged={DAMAGED}"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
