"""The transcript of tests/classic_oracle/transcript.py by ortrain, and its differences from the recorded one.

A table lists the intended differences, each with its reason and its sentence in docs/migrating.md.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPT = TESTS / "classic_oracle" / "transcript.py"
RECORD = TESTS / "data" / "classic" / "transcript-1.15.0.txt"
# Makes an import of onnxruntime fail, as if it were not installed.
HIDE = 'import sys\n\nsys.modules["onnxruntime"] = None\n'
RUN = f"""
import runpy, sys

sys.argv = [{str(SCRIPT)!r}, "ortrain"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def transcript_of_ortrain(*, hidden: bool) -> str:
    """Return the output of the script through ``ortrain.compat`` in a process of its own.

    ``hidden`` hides an installed onnxruntime.
    """
    code = HIDE + RUN if hidden else RUN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SCRIPT.name} failed after {done.stdout[-1000:]}: {done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True)
class Decided:
    """An intended difference: lines of a chapter that differ here."""

    chapter: str
    there: tuple[str, ...] | None
    """The lines that the release prints; None for all lines of the chapter."""
    here: tuple[str, ...]
    reason: str
    page: str
    """The sentence of docs/migrating.md that says so."""


WORDING = "messages differ: they use NumPy's names of types, and do not quote an empty name"
WORDED = "Their wording is another one; a script should look at the class, not at the text."
DECIDED = {
    "unknown weight": Decided(
        chapter="a weight that no node reads",
        there=None,
        here=("refused: InvalidArgument",),
        reason="a misspelled name would silently leave its weight untrained",
        page="A weight that is no initializer of the model, or an input of it, is refused by the constructor.",
    ),
    "moments in float16": Decided(
        chapter="moments in half precision",
        there=None,
        here=("refused: UnsupportedError",),
        reason="small moments are lost in float16; ortrain keeps them in float32",
        page="`use_fp16_moments`, pipelines and horizontal partitions are refused when the session is made",
    ),
    "message about a missing loss": Decided(
        chapter="errors of the constructor",
        there=("the loss '': RuntimeError names '', pred",),
        here=("the loss '': RuntimeError names pred",),
        reason=WORDING,
        page=WORDED,
    ),
    "gradient of Det": Decided(
        chapter="errors of the constructor",
        there=("an operator without gradient: RuntimeError names Det",),
        here=("an operator without gradient: no error",),
        reason="ortrain has a gradient of determinants",
        page="More operators have gradients, `Det` for one.",
    ),
    "message about types": Decided(
        chapter="run",
        there=(
            "another type: InvalidArgument [ONNXRuntimeError] : 2 : INVALID_ARGUMENT "
            "names tensor(double), tensor(float)",
            "integers: InvalidArgument [ONNXRuntimeError] : 2 : INVALID_ARGUMENT names tensor(int64), tensor(float)",
        ),
        here=(
            "another type: InvalidArgument [ONNXRuntimeError] : 2 : INVALID_ARGUMENT",
            "integers: InvalidArgument [ONNXRuntimeError] : 2 : INVALID_ARGUMENT",
        ),
        reason=WORDING,
        page=WORDED,
    ),
    "message about the type of a bound value": Decided(
        chapter="IOBinding",
        there=("another type: RuntimeError names tensor(double), tensor(float)",),
        here=("another type: RuntimeError",),
        reason=WORDING,
        page=WORDED,
    ),
    "missing model version": Decided(
        chapter="the classes of the extension module",
        there=("model: ['transcript', 'transcript', '', '', 9223372036854775807, {}]",),
        here=("model: ['transcript', 'transcript', '', '', 0, {}]",),
        reason="ONNX uses the common part of protobuf 2 and 3, in which a missing number is 0",
        page="`get_modelmeta().version` is 0 where a model says no version.",
    ),
}


def chapters(text: str) -> dict[str, list[str]]:
    """Return the lines of each chapter of a transcript."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
            if title in found:
                raise ValueError(f"two chapters have the title {title!r}")
            found[title] = []
        elif line:
            found[title].append(line)
    return found


def place(lines: list[str], part: tuple[str, ...] | None) -> slice | None:
    """Return the position of consecutive lines that occur once in a chapter; ``part`` None stands for all lines."""
    if part is None:
        return slice(0, len(lines))
    starts = [at for at in range(len(lines)) if tuple(lines[at : at + len(part)]) == part]
    return slice(starts[0], starts[0] + len(part)) if len(starts) == 1 else None


def expected(record: str, decided: Mapping[str, Decided] = DECIDED) -> dict[str, list[str]]:
    """Return the chapters to be printed here: the chapters of the release, with the intended differences."""
    found = chapters(record)
    for name, each in decided.items():
        lines = found[each.chapter]
        where = place(lines, each.there)
        if where is None:
            raise ValueError(f"the release does not print the lines of the difference {name!r}")
        lines[where] = each.here
    return found


def differences(got: str, record: str, decided: Mapping[str, Decided] = DECIDED) -> list[str]:
    """Return the unexpected differences: intended differences that no longer exist, then lines of one side only."""
    here = chapters(got)
    gone = [
        f"the difference {name!r} no longer exists; remove it from DECIDED and docs/migrating.md"
        for name, each in decided.items()
        if place(here.get(each.chapter, []), each.here) is None
    ]

    def flat(text: Mapping[str, list[str]]) -> list[str]:
        return [line for title, lines in text.items() for line in (f"== {title}", *lines)]

    pair = flat(expected(record, decided)), flat(here)
    lines = difflib.unified_diff(*pair, "onnxruntime-training 1.15.0, as decided", "here", "", "", 1)
    return gone + [line.rstrip("\n") for line in lines]
