"""Comments, docstrings, pages and names keep to docs/style.md; older findings are listed and can only become fewer."""

from __future__ import annotations

from pathlib import Path

import language
import pytest

KINDS_BY_TEXT = {
    ".rs": {
        "/// What the kernel reads.\nfn read() {}": ["opening", "reference"],
        "/// Returns true if the kernel accepts this shape.\nfn accepts() {}": [],
        "// Whether it is contiguous.\nlet x = 1;": [],
        "//! Kernels for those that ask.": ["reference"],
        "/// Packs a matrix.\n///\n/// ```\n/// let what = 1;\n/// ```\nfn pack() {}": [],
        "/// Packs `what` is there.\nfn pack() {}": [],
        "/// " + "word " * 31 + ".": ["long"],
        "/// " + "word " * 29 + ".": [],
        "fn kept_rows() {}": ["name"],
        "struct Given;\nconst MOST_ROWS: usize = 1;": ["name", "name"],
        'let text = "fn kept() {}"; // fn given()': [],
    },
    ".py": {
        '"""How a file is read."""': ["opening"],
        'def read():\n    """Read a file: nobody else does."""': ["reference"],
        "x = 1  # what is this\n# A comment of nobody\n": ["reference"],
        "def given():\n    pass": ["name"],
        "class Wanted:\n    pass": ["name"],
        "MOST_FILES = 3": ["name"],
        '"""Read a file.\n\n>>> what = 1\n"""': [],
    },
    ".md": {
        "# What it is\n\nA text.": [],
        "A text for whoever reads.\n\n- an item of those that are listed\n- an item": ["reference", "reference"],
        "| what | who |\n|---|---|\n| what | nobody |": [],
        "```\nwhat\n```\n\nRun `what` first.": [],
    },
}


@pytest.mark.parametrize(
    ("suffix", "text", "kinds"),
    [(suffix, text, kinds) for suffix in KINDS_BY_TEXT for text, kinds in KINDS_BY_TEXT[suffix].items()],
)
def test_kinds(suffix: str, text: str, kinds: list[str], tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    assert [finding.kind for finding in language.findings(path)] == kinds


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "file.rs"
    path.write_text("fn f() {\n    // Rows of those that wait,\n    // in vain.\n}\n\nfn made() {}\n")
    assert [(finding.line, finding.kind) for finding in language.findings(path)] == [(2, "reference"), (6, "name")]


def test_findings_become_fewer() -> None:
    """A file has no finding beyond its number in tests/language.json, and this number is its number of findings."""
    allowed, today = language.recorded(), language.counted(language.source_files())
    messages = []
    for name in sorted(allowed.keys() | today.keys()):
        before, now = allowed.get(name, {}), today.get(name, {})
        for kind in language.KINDS:
            if now.get(kind, 0) > before.get(kind, 0):
                lines = [
                    f"  {one.line}: {one.content[:100]}"
                    for one in language.findings(language.ROOT / name)
                    if one.kind == kind
                ]
                messages += [
                    f"{name}: {now[kind]} of kind {kind}, {before.get(kind, 0)} allowed (docs/style.md)",
                    *lines,
                ]
        if before != now and not messages:
            messages.append(f"{name} has fewer findings: run python tests/language.py --record")
    assert not messages, "\n".join(messages[:60])
