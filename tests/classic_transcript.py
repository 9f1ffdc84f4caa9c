"""The transcript of tests/classic_oracle/transcript.py by ortrain, and its differences from the recorded one."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPT = TESTS / "classic_oracle" / "transcript.py"
RECORD = TESTS / "data" / "classic" / "transcript-1.15.0.txt"
# An import of it fails as it does where it is not installed.
HIDE = 'import sys\n\nsys.modules["onnxruntime"] = None\n'
RUN = f"""
import runpy, sys

sys.argv = [{str(SCRIPT)!r}, "ortrain"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def transcript_of_ortrain(*, hidden: bool) -> str:
    """What the script prints through ``ortrain.compat``, in a process of its own; an onnxruntime may be hidden."""
    code = HIDE + RUN if hidden else RUN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SCRIPT.name} failed after {done.stdout[-1000:]}: {done.stderr[-4000:]}")
    return done.stdout


def differences(got: str, want: str) -> list[str]:
    """Lines that only one of two transcripts has, with a line around each."""
    lines = difflib.unified_diff(want.splitlines(), got.splitlines(), "onnxruntime-training 1.15.0", "here", "", "", 1)
    return [line.rstrip("\n") for line in lines]
