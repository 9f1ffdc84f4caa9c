"""Models as modules of PyTorch: the checks of tests/in_torch/bridge_*.py, the page, the example, the time of a step."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import environments
import pytest
from test_pages import blocks_of

import ortrain

ROOT = Path(__file__).parent.parent.parent
IN_TORCH = ROOT / "tests" / "in_torch"
PACKAGES = Path(ortrain.__file__).parent.parent
GROUPS = ("errors", "gradients", "modules")
CHECKS = [
    (group, name)
    for group in GROUPS
    for name in re.findall(r"^def (check_\w+)\(\)", (IN_TORCH / f"bridge_{group}.py").read_text(), re.MULTILINE)
]
# Workloads for the time of a module's step, compared with two calls, PyTorch's loss between them, and the same
# optimizer.
WORKLOADS = ("mlp", "bert_mini")


@functools.cache
def found(group: str) -> dict[str, str | None]:
    """Run a group of checks; returns their results."""
    line = environments.in_environment(environments.torch(), IN_TORCH / "bridge.py", str(PACKAGES), group)
    results: dict[str, str | None] = json.loads(line)
    return results


def in_torch(*arguments: str | Path, folder: Path, packages: Path = PACKAGES) -> str:
    """Run a script in PyTorch's environment with ortrain; returns its output."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [environments.torch(), *arguments]
    done = subprocess.run(
        command,
        env=variables | {"PYTHONPATH": str(packages)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("group", "name"), CHECKS)
def test_check(group: str, name: str) -> None:
    reason = found(group)[name]
    assert reason is None, reason


def test_all_checks_are_run() -> None:
    for group in GROUPS:
        assert sorted(found(group)) == sorted(name for other, name in CHECKS if other == group)
    assert len(CHECKS) == len(set(CHECKS)) >= 45


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "pytorch.md")
    assert len(blocks) > 1
    for name, some in (("first", blocks[:1]), ("all", blocks)):
        (tmp_path / f"{name}.py").write_text("\n".join(some))
        in_torch("-W", "error", f"{name}.py", folder=tmp_path)


@pytest.mark.parametrize("module", ["ortrain.torch", "ortrain.torch._module"])
def test_examples_in_docstrings_run(module: str, tmp_path: Path) -> None:
    """Docstrings of names that need PyTorch have examples that run; test_docstrings.py checks their existence."""
    script = tmp_path / "docstrings.py"
    script.write_text(
        "import doctest, importlib, inspect\n"
        "import numpy as np, onnx, ortrain\n"
        f"module = importlib.import_module({module!r})\n"
        "rng = np.random.default_rng(0)\n"
        "given = {'model': onnx.load(ortrain.examples.perceptron()), 'x': rng.random((8, 64), np.float32)}\n"
        "given['labels'] = rng.integers(0, 10, 8)\n"
        "done = doctest.testmod(module, extraglobs=given, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)\n"
        "assert not done.failed\n"
        "if hasattr(module, 'OnnxModule') and module.__name__.endswith('_module'):\n"
        "    for name, member in vars(module.OnnxModule).items():\n"
        "        if inspect.isfunction(member) and not name.startswith('_'):\n"
        "            assert '>>>' in member.__doc__, name\n"
        "print(done.attempted)\n"
    )
    assert int(in_torch(script, folder=tmp_path)) > 0


def test_the_example_trains(tmp_path: Path) -> None:
    lines = in_torch(ROOT / "examples" / "onnx_backbone_in_torch.py", "made", folder=tmp_path).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert losses[-1] < losses[0] / 4
    assert lines[-1] == "right: 64 of 64"
    assert (tmp_path / "made" / "backbone.onnx").exists()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_time_of_a_step(name: str, tmp_path: Path) -> None:
    """The time is measured with the release wheel."""
    (wheel,) = (ROOT / "build" / "wheels").glob("ortrain-*.whl")
    with zipfile.ZipFile(wheel) as stored:
        stored.extractall(tmp_path / "packages")
    script = ROOT / "benches" / "torch_bridge.py"
    line = in_torch(script, name, folder=tmp_path, packages=tmp_path / "packages")
    print(line)
    assert line.startswith(f"{name}: time ")
