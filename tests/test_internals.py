"""docs/internals.md is the output of ``ortrain dump``, and every file and item that the page names exists."""

from __future__ import annotations

import re

import internals_page
import pytest

ROOT = internals_page.ROOT
PAGE = internals_page.PAGE
# Questions that the page answers without a look at other files, with the file of the answer.
QUESTIONS = {
    "convolution kernel": "crates/ortrain-kernels/src/conv/mod.rs",
    "packs a mask": "crates/ortrain-program/src/passes/mask_packing.rs",
    "`Upsample` of opset 9": "crates/ortrain-ops/src/families/resize/versions.rs",
    "checksum of a checkpoint": "crates/ortrain-checkpoint/src/trailer.rs",
    "text of WGSL": "crates/ortrain-codegen/src/wgsl/mod.rs",
    "converts arrays": "python/ortrain/api/module.py",
    "turns each instruction into a kernel": "crates/ortrain-cpu/src/executable.rs",
}
# Longer pages are not read.
MAX_LINES = 500


def rows() -> list[tuple[str, str, str]]:
    """Return question, file and item of the tables of files."""
    return re.findall(r"^\| (.*?) \| \[(.*?)\]\(\.\./.*?\) \| `(.*?)` \|$", PAGE.read_text(), re.MULTILINE)


def definition(item: str) -> str:
    """Return a pattern of the definition of an item, in Rust or Python."""
    return rf"\b(?:fn|struct|enum|trait|const|static|type|def|class) {re.escape(item)}\b"


def test_page_is_the_output() -> None:
    assert internals_page.page() == PAGE.read_text(), "make internals"


@pytest.mark.parametrize("name", list(internals_page.DRAWINGS))
def test_drawings_are_the_output(name: str) -> None:
    assert internals_page.DRAWINGS[name]() == PAGE.with_name(name).read_text(), "make internals"
    assert f"({name})" in PAGE.read_text()


@pytest.mark.parametrize(("question", "file", "item"), rows())
def test_items_are_in_their_files(question: str, file: str, item: str) -> None:
    assert re.search(definition(item), (ROOT / file).read_text()), f"{question}: no definition of {item} in {file}"
    assert f"[{file}](../{file})" in PAGE.read_text()


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_the_page_answers(question: str) -> None:
    found = [file for asked, file, _ in rows() if question in asked]
    assert found == [QUESTIONS[question]]


def test_named_files_exist() -> None:
    """Paths in code, outside of blocks, lead to files."""
    text = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`([\w./-]+/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_named_items_exist() -> None:
    """Each name in code, outside of blocks, occurs in the sources."""
    sources = [*(ROOT / "crates").rglob("*.rs"), *(ROOT / "crates").glob("*/Cargo.toml")]
    sources += [*(ROOT / "python").rglob("*.py"), ROOT / "Makefile"]
    words = set(re.findall(r"[A-Za-z_][\w-]*", "\n".join(path.read_text() for path in sources)))
    text = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([A-Za-z_][\w.:-]*)(?:\(.*?\))?`", text):
        assert all(word in words for word in re.split(r"\.|::", code)), code


def test_length_of_the_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= MAX_LINES
