"""The README and the pages of docs/: every example runs as written, every link leads somewhere, and what the README claims is so.

A page runs in an empty folder: whoever has the wheel and no checkout can do what it says.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortrain

if sys.version_info >= (3, 11):
    import tomllib
else:  # what pytest needs there brings it along
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Folders of a checkout that hold what others wrote, or what was built.
NOT_OURS = {".git", ".venv", ".venv-demo", "build", "dist", "node_modules", "target"}


def blocks_of(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if blocks_of(page)]
WITH_MORE = [page for page in WITH_PYTHON if len(blocks_of(page)) > 1]


def run(folder: Path, *arguments: str) -> str:
    """What a process of Python prints, in which a warning is an error."""
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_blocks(folder: Path, blocks: list[str]) -> str:
    # A file, for processes that are started by it read it again.
    (folder / "page.py").write_text("\n".join(blocks))
    return run(folder, "page.py")


@pytest.mark.parametrize("page", WITH_MORE, ids=lambda page: page.stem)
def test_the_first_example_of_a_page_runs_alone(page: Path, tmp_path: Path) -> None:
    run_blocks(tmp_path, blocks_of(page)[:1])


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_pages_run_as_written(page: Path, tmp_path: Path) -> None:
    """All examples of a page as one script, and then the commands that it names for its files."""
    run_blocks(tmp_path, blocks_of(page))
    for line in "\n".join(blocks_of(page, "sh")).splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "ortrain":
            assert run(tmp_path, "-m", "ortrain", *arguments), line
        else:
            assert program in ("", "make", "pip", "python", "cargo"), line


def test_languages_of_examples() -> None:
    """Python runs here and Rust as the documentation of the crates; nothing else is an example that could run."""
    tests = "".join(path.read_text() for path in (ROOT / "crates").glob("*/src/lib.rs"))
    for page in PAGES:
        languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
        assert languages <= {"python", "rust", "sh", "text", "csharp"}, page
        if "rust" in languages:
            assert f"docs/{page.name}" in tests, f"the examples in Rust of {page.name} are not run"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def markdown() -> Iterator[Path]:
    for page in ROOT.rglob("*.md"):
        if not NOT_OURS.intersection(page.relative_to(ROOT).parts):
            yield page


def test_links_lead_to_what_is_there() -> None:
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
    """From the README, or from a page that is."""
    reached: set[Path] = set()
    pages = [README]
    while pages:
        page = pages.pop()
        reached.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text())
        pages += {(page.parent / link).resolve() for link in links} - reached
    assert set(PAGES) <= reached
