"""The README and the pages of docs/: examples run as written, links resolve, and the README's claims are correct.

A page runs in an empty folder: a user with the wheel and no checkout can follow the page.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import speed_page

import ortrain

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest requires tomli on older Python
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Folders of a checkout with files of others or with build outputs.
NOT_OURS = {".git", ".venv", ".venv-demo", ".venv-openmpi", "build", "dist", "node_modules", "target"}


def blocks_of(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# Pages about other libraries. `make conform` runs their examples, because it has the libraries.
ELSEWHERE = {"pytorch": "test_torch_bridge.py", "jax": "test_jax_bridge.py", "federated": "test_flower.py"}
WITH_PYTHON = [page for page in PAGES if blocks_of(page) and page.stem not in ELSEWHERE]
WITH_MORE = [page for page in WITH_PYTHON if len(blocks_of(page)) > 1]


def run(folder: Path, *arguments: str) -> str:
    """Return the output of a Python process that treats warnings as errors."""
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_blocks(folder: Path, blocks: list[str]) -> str:
    # The script needs a file, because child processes read it again.
    (folder / "page.py").write_text("\n".join(blocks))
    return run(folder, "page.py")


@pytest.mark.parametrize("page", WITH_MORE, ids=lambda page: page.stem)
def test_first_example_of_a_page_runs_by_itself(page: Path, tmp_path: Path) -> None:
    run_blocks(tmp_path, blocks_of(page)[:1])


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_pages_run_as_written(page: Path, tmp_path: Path) -> None:
    """All examples of a page run as one script, followed by the page's commands on its files."""
    run_blocks(tmp_path, blocks_of(page))
    for line in "\n".join(blocks_of(page, "sh")).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "ortrain":
            assert run(tmp_path, "-m", "ortrain", *arguments), line
        else:
            assert program in ("", "make", "pip", "python", "cargo"), line


@pytest.mark.parametrize("page", list(ELSEWHERE))
def test_pages_about_other_libraries_run_elsewhere(page: str) -> None:
    assert blocks_of(ROOT / "docs" / f"{page}.md")
    assert f'"{page}.md"' in (ROOT / "tests" / "conform" / ELSEWHERE[page]).read_text()


def test_languages_of_examples() -> None:
    """Examples in Python run here, and examples in Rust as crate documentation; other languages do not run."""
    tests = "".join(path.read_text() for path in (ROOT / "crates").glob("*/src/lib.rs"))
    for page in PAGES:
        languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
        assert languages <= {"python", "rust", "sh", "text", "csharp"}, page
        if "rust" in languages:
            assert f"docs/{page.name}" in tests, f"the examples in Rust of {page.name} are not run"


def anchors_of(page: Path) -> set[str]:
    """Return the heading anchors of a page, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def markdown() -> Iterator[Path]:
    for page in ROOT.rglob("*.md"):
        if not NOT_OURS.intersection(page.relative_to(ROOT).parts):
            yield page


def test_link_targets_exist() -> None:
    wrong = []
    for page in markdown():
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:", link):
                continue
            path, _, anchor = link.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and anchor not in anchors_of(there)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_every_page_is_linked() -> None:
    """The README, or a page linked from it, links to every page."""
    reached: set[Path] = set()
    pages = [README]
    while pages:
        page = pages.pop()
        reached.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text())
        pages += {(page.parent / link).resolve() for link in links} - reached
    assert set(PAGES) <= reached


def test_the_first_screen_of_the_readme() -> None:
    """The first fifteen lines state the purpose, the installation and a program that trains."""
    text = README.read_text()
    first = text[: text.index("```", text.index("```python") + 3)]
    lines = [line for line in first.splitlines() if line and not line.startswith(("#", "```"))]
    assert len(lines) <= 15, len(lines)
    assert "Train ONNX models" in lines[0]
    assert any("pip install" in line for line in lines)
    assert any("model.fit(" in line for line in lines)


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    program = "\n".join([*blocks_of(README)[:1], "history.to_csv('history.csv')"])
    printed = run_blocks(tmp_path, [program])
    history = ortrain.History.read_csv(tmp_path / "history.csv")
    assert history["loss"][-1] < history["loss"][0] / 4
    assert history["val_accuracy"][-1] > 0.95
    assert (tmp_path / "trained.onnx").exists()
    # The page shows the values of one machine.
    shown = blocks_of(README, "text")[0]
    assert re.sub(r"[\d.]+", "0", shown) == re.sub(r"[\d.]+", "0", printed)


# Arguments of keras.Model in Keras 3.
KERAS = {
    "compile": "optimizer loss loss_weights metrics weighted_metrics run_eagerly steps_per_execution jit_compile "
    "auto_scale_loss",
    "fit": "x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight "
    "sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq",
    "evaluate": "x y batch_size verbose sample_weight steps callbacks return_dict",
    "predict": "x batch_size verbose steps callbacks",
}


def test_every_argument_of_keras_is_on_its_page() -> None:
    """An argument that ortrain does not have is described as not accepted or translated."""
    page = ROOT / "docs" / "from-keras.md"
    for method, arguments in KERAS.items():
        heading = "evaluate and predict" if method in ("evaluate", "predict") else method
        cells = [row.split("|")[1:3] for row in section(page, heading).splitlines() if row.startswith("| `")]
        ours = inspect.signature(ortrain.Model if method == "compile" else getattr(ortrain.Model, method)).parameters
        for argument in arguments.split():
            rows = [text for name, text in cells if re.search(rf"\b{argument}\b", name)]
            assert rows, f"{method} has no row for {argument}"
            if any("the same" in text for text in rows):
                assert argument in ours, f"{method} does not have {argument}"


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def section(page: Path, heading: str) -> str:
    """Return the text of a section."""
    _, _, after = page.read_text().partition(f"## {heading}\n")
    assert after, heading
    return after.partition("\n## ")[0]


def operators_of(domain: str) -> dict[str, str]:
    """Return names and gradients from the page of operators, which test_operators.py compares with the registry."""
    rows = section(ROOT / "docs" / "operators.md", f"`{domain}`").splitlines()
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows if row.startswith("| `")]
    return {name: gradient for name, _versions, _types, gradient, *_ in cells}


def test_claims_on_operators() -> None:
    """The claims of the README and of docs/not-here.md are correct."""
    standard = operators_of("ai.onnx")
    with_gradient = [name for name, gradient in standard.items() if gradient != "none"]
    text = README.read_text()
    assert f"{len(standard)} operators of the ONNX standard" in text
    assert f"{len(with_gradient)} of the {len(standard)} have a gradient" in text
    assert f"{len(standard)} operators of the standard" in (ROOT / "docs" / "not-here.md").read_text()
    assert {"RNN", "GRU", "LSTM", "Attention", "If", "Loop", "Scan"} <= set(with_gradient)
    assert "MultiHeadAttention" in operators_of("com.microsoft")
    absent = re.findall(r"`([A-Z][A-Za-z]+)`", section(ROOT / "docs" / "not-here.md", "Operators that are not here"))
    assert {name for name in absent if name != "Dropout"}.isdisjoint(standard)
    assert {"Dropout", "ImageDecoder", "RoiAlign"} <= set(absent)


def test_claims_on_platforms_and_versions() -> None:
    """The README agrees with the metadata of the package."""
    text, metadata = README.read_text(), project()
    classifiers = metadata["classifiers"]
    assert isinstance(classifiers, list)
    minors = sorted(
        int(found[1]) for line in classifiers if (found := re.fullmatch(r".*:: Python :: 3\.(\d+)", str(line)))
    )
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert metadata["requires-python"] == f">=3.{minors[0]}"
    assert f"Python 3.{minors[0]} or newer" in text
    assert f"in Python 3.{minors[0]} to 3.{minors[-1]}" in text
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    for versions in re.findall(r"python-version: \|\n((?: +3\.\d+\n)+)", workflow):
        assert sorted(versions.split()) == [f"3.{minor}" for minor in minors]
    systems = [line for line in classifiers if str(line).startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    tested = [line for line in section(README, "State").splitlines() if "tested at every change" in line]
    assert [line.split("|")[1].strip() for line in tested] == ["Linux on x86-64"]
    assert ("Development Status :: 3 - Alpha" in classifiers) == ("Alpha:" in text)
    assert metadata["dependencies"] == ["numpy>=1.24"]
    assert "NumPy is the only requirement" in text
    rust = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert f"Rust {rust} or newer" in text
    assert f"rustup default {rust}" in workflow
    first = re.search(r"^PYTHON \?= .*command -v python(3\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert first is not None
    assert f"tested at every change, in Python {first[1]}" in text


def test_tables_of_speed() -> None:
    """The README's table is part of the page's table, and both come from the recorded run."""
    for page, name, table in speed_page.TABLES:
        assert speed_page.table_of(page, name) == table()
    # The cells are a workload, its time and its ratios.
    some = [line.split("|")[1:2] + line.split("|")[4:8] for line in speed_page.steps().splitlines()[2:]]
    assert some == [line.split("|")[1:6] for line in speed_page.times().splitlines()[2:]]
    text = speed_page.RUN.with_suffix(".md").read_text()
    for found in speed_page.recorded()["workloads"]:
        assert f"| {found['name']} " in text
    assert speed_page.RUN.stem in speed_page.PERFORMANCE.read_text()
    assert len(some) == 13
    assert "thirteen workloads" in speed_page.PERFORMANCE.read_text()


def test_commands_of_make_are_there() -> None:
    """Every page names only targets of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        named = re.findall(r"`make ([a-z]+)", text) + re.findall(r"^(?: {4})?make ([a-z]+)", text, re.MULTILINE)
        assert set(named) <= targets, page
