"""Shared code of the scripts that run test suites of other projects on ortrain, in an environment of their own.

The tests run on a copy, with a pytest plugin ``through_compat`` that records the outcome of each. An unexpected failure
is an error, and so is an expected failure that passes. Needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any


def install(python: Path, wheel: Path) -> None:
    """Install ortrain's wheel in an environment."""
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    subprocess.run([python, "-m", "pip", *install, wheel], check=True)


def run(python: Path, plugin: Path, work: Path, files: list[str], *arguments: str) -> list[dict[str, Any]]:
    """Run test files in a folder and return the outcome of each test.

    ``plugin`` is the folder of the pytest plugin ``through_compat``.
    """
    results = work / "results.json"
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [python, "-m", "pytest", "-q", "-p", "through_compat", "-p", "no:cacheprovider", "--no-header"]
    command += ["--tb=short", "-W", "ignore", f"--rootdir={work}", f"--results={results}", *arguments, *files]
    done = subprocess.run(
        command, cwd=work, env=variables | {"PYTHONPATH": str(plugin)}, capture_output=True, text=True, check=False
    )
    # 0: all passed; 1: some failed.
    if done.returncode not in (0, 1) or not results.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def judge(results: list[dict[str, Any]], expected: dict[str, str]) -> list[str]:
    """Print the counts and the failures, and return the unexpected outcomes."""
    names = [result["test"].partition("::")[2] or result["test"] for result in results]
    wrong = [f"{name} is expected to fail, but does not exist" for name in expected if name not in names]
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(entry["outcome"] for entry in results).items()))
    changes = Counter(change for result in results if result["outcome"] == "passed" for change in result["changed"])
    for change, count in changes.items():
        print(f"  {count} of the passed tests with {change}")
    for name, result in zip(names, results, strict=True):
        if result["outcome"] == "passed":
            if name in expected:
                wrong.append(f"{name} is expected to fail, but passes")
            continue
        reason = " ".join(result["reason"].split())
        print(f"  {result['outcome']} {name}: {expected.get(name, 'UNEXPECTED')}\n    {reason[:400]}")
        if name not in expected:
            wrong.append(f"{name} {result['outcome']}: {reason[:400]}")
    return wrong
