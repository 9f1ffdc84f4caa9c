"""The examples. finetune_digits.py is run by `make demo`."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import ortrain

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ortrain.examples.__all__)
def test_models_are_what_their_scripts_make(name: str) -> None:
    made = runpy.run_path(str(ROOT / "examples" / f"make_{name}.py"))[name]()
    assert made == onnx.load(getattr(ortrain.examples, name)()) == onnx.load(ROOT / "examples" / f"{name}.onnx")
    assert ortrain.inspect(made).obstacle is None


@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_operator", r"largest difference to the sine: 0\.0\d"), ("custom_gradient", r"exported: right [5-9]\d%")],
)
def test_operators_and_gradients_of_ones_own(name: str, last: str, tmp_path: Path) -> None:
    """Those in Rust are run by its own tests."""
    script = ROOT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script, tmp_path / "made"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *steps, result = done.stdout.splitlines()
    losses = [float(re.search(r"loss +([\d.]+)", line)[1]) for line in steps]  # type: ignore[index]
    assert losses[-1] < losses[0] / 2
    assert re.fullmatch(last, result), result
    onnx.checker.check_model(tmp_path / "made" / "trained.onnx", full_check=True)


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if blocks_of(page)]


@pytest.fixture(scope="module")
def artifacts_of_perceptron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    ortrain.artifacts.generate_artifacts(
        ROOT / "examples" / "perceptron.onnx",
        loss=ortrain.artifacts.LossType.CrossEntropyLoss,
        optimizer=ortrain.artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_run_as_written(page: Path, artifacts_of_perceptron: Path, tmp_path: Path) -> None:
    """All examples of a page as one script, in a folder that has the networks and artifacts of one of them."""
    folder = tmp_path / "folder"
    shutil.copytree(artifacts_of_perceptron, folder, symlinks=True)
    # A file, for processes that are started by it read it again.
    (folder / "page.py").write_text("\n".join(blocks_of(page)))
    done = subprocess.run([sys.executable, "page.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_page_is_linked() -> None:
    """From the README, or from a page that is."""
    reached, pages = set(), [ROOT / "README.md"]
    while pages:
        page = pages.pop()
        reached.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)\)", page.read_text())
        found = {(page.parent / link).resolve() for link in links}
        assert all(other.exists() for other in found), found
        pages += found - reached
    assert set((ROOT / "docs").glob("*.md")) <= reached


def test_readme_runs_as_written(tmp_path: Path) -> None:
    """The examples of the README, one after the other, in a folder that has only the networks."""
    first, *others = blocks_of(ROOT / "README.md")
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(code: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    steps = run(first)
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "trained.onnx").exists()

    table = "\n".join(run("\n".join([first, *others]))[len(steps) :])
    assert "Conv" in table
    assert (tmp_path / "step.json").exists()

    # What the demo makes are the same artifacts.
    shutil.copytree(tmp_path, tmp_path / "build" / "digits", ignore=lambda *_: ["examples", "build"])
    commands = re.findall(r"^python (-m ortrain .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
