"""The scripts that run test suites of other projects. The suites themselves and PyTorch are not needed here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import other_suites
import pytest

SCRIPT = Path(__file__).parent / "upstream" / "run.py"
CUSTOM = Path(__file__).parent / "suite_of_onnxcustom" / "run.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("upstream_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_without_tests(tmp_path: Path) -> None:
    (tmp_path / "orttraining_test_ort_apis.py").write_text("def main(): ...\n")
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "ortrain.whl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"there are no tests of the training API in {tmp_path}" in done.stderr
    assert "orttraining/orttraining/test/python of microsoft/onnxruntime" in done.stderr


def test_a_folder_without_tests_of_onnxcustom(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CUSTOM, tmp_path, "ortrain.whl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"there are no tests in {tmp_path}" in done.stderr


def test_the_copy_takes_any_wording(tmp_path: Path) -> None:
    there, work = tmp_path / "repository" / "python", tmp_path / "work"
    there.mkdir(parents=True)
    work.mkdir()
    text = 'def test_it():\n    assert "so" in str(error.value)\n    assert "so" in str(value)\n'
    path = there / "orttraining_test_ort_apis_mine.py"
    path.write_text(text)
    (there / "orttraining_test_other.py").write_text(text)
    data = tmp_path / "repository" / "onnxruntime" / "test" / "testdata" / "custom_op_library"
    data.mkdir(parents=True)
    (data / "model.onnx").touch()
    run = script()
    assert run.files_with_tests(there) == [path]
    run.copy([path], work)
    assert path.read_text() == text
    changed = text.replace("str(error.value)", '__import__("through_compat").Wording(error.value)')
    assert (work / path.name).read_text() == changed
    assert (work / "testdata" / "custom_op_library" / "model.onnx").exists()


def test_unexpected_failures_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def result(test: str, outcome: str, *changed: str) -> dict[str, Any]:
        return {"test": f"file.py::{test}", "outcome": outcome, "reason": "Error: it\nis so", "changed": list(changed)}

    results = [result("test_a", "passed", "x"), result("test_b[1]", "failed"), result("test_c", "skipped")]
    assert other_suites.judge(results, {"test_b[1]": "no GPU", "test_c": "no file"}) == []
    assert capsys.readouterr().out.splitlines() == [
        "1 passed, 1 failed, 1 skipped",
        "  1 of the passed tests with x",
        "  failed test_b[1]: no GPU",
        "    Error: it is so",
        "  skipped test_c: no file",
        "    Error: it is so",
    ]
    assert other_suites.judge(results, {"test_a": "no GPU", "test_d": "no GPU", "test_c": "no file"}) == [
        "test_d is expected to fail, but does not exist",
        "test_a is expected to fail, but passes",
        "test_b[1] failed: Error: it is so",
    ]
