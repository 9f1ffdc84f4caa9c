"""The files, the code and the tests that docs/guides.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides.md"
TEXT = PAGE.read_text()
# Minimum numbers of blocks, commands and paths on the page.
MIN_BLOCKS, MIN_COMMANDS, MIN_PATHS = 14, 20, 20
# Maximum number of lines of a guide.
MAX_LINES = 45


def lines_of(text: str) -> str:
    """Return a text without indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


def test_blocks_are_parts_of_their_files() -> None:
    """The last link before a block leads to the file of the block."""
    blocks = list(re.finditer(r"^ *```rust\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= MIN_BLOCKS
    for block in blocks:
        file = re.findall(r"\]\(\.\./(crates/[\w./-]+\.rs)\)", TEXT[: block.start()])[-1]
        assert lines_of(block[1]) in lines_of((ROOT / file).read_text()), f"{file} does not contain:\n{block[1]}"


def test_commands_run_tests() -> None:
    found = re.findall(r"cargo nextest run -p ([\w-]+)(?: --test (\w+))?(?: (\w+))?", TEXT)
    for crate, target, name in found:
        files = list((ROOT / "crates" / crate).rglob(f"tests/{target}.rs" if target else "*.rs"))
        assert files, f"{crate} has no tests {target}"
        assert not name or any(re.search(rf"\bfn {name}\b", path.read_text()) for path in files), f"{crate}: {name}"
    selected = re.findall(r"(tests/\w+\.py)(?: -k (\w+))?", TEXT)
    for file, name in selected:
        assert not name.startswith("test_") or f"def {name}" in (ROOT / file).read_text(), f"{file}: {name}"
    assert len(found) + len(selected) >= MIN_COMMANDS


def test_paths_exist() -> None:
    paths = re.findall(r"`((?:crates|python|tests|docs)/[\w./-]+)`", TEXT)
    assert len(paths) >= MIN_PATHS
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_guides_are_short() -> None:
    for guide in TEXT.split("\n## ")[1:]:
        assert len(guide.splitlines()) <= MAX_LINES, guide.splitlines()[0]
