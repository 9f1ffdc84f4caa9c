"""A script with TrainingSession prints the same as under onnxruntime-training 1.15.0 (tests/classic_oracle)."""

from __future__ import annotations

import re

import pytest
from classic_transcript import DECIDED, RECORD, TESTS, Decided, chapters, differences, expected, transcript_of_ortrain

PAGE = TESTS.parent / "docs" / "migrating.md"


@pytest.fixture(scope="module")
def printed() -> str:
    return transcript_of_ortrain(hidden=True)


def test_a_script_prints_the_same(printed: str) -> None:
    """Keys, shapes and types of every state agree, and the classes of errors, except for decided differences."""
    found = differences(printed, RECORD.read_text())
    assert not found, "\n".join(found)
    assert "stopped by" not in printed


@pytest.mark.parametrize("name", DECIDED)
def test_differences_have_reasons_and_are_documented(name: str) -> None:
    each = DECIDED[name]
    assert len(each.reason.split()) > 3
    assert each.page in re.sub(r"\s+", " ", PAGE.read_text())


@pytest.mark.parametrize("name", DECIDED)
def test_a_difference_that_disappears_is_seen(name: str, printed: str) -> None:
    """If ortrain prints the release's lines again, the row of the table must be removed."""
    each = DECIDED[name]
    without = {other: one for other, one in DECIDED.items() if other != name}
    same = expected(RECORD.read_text(), without)[each.chapter]
    lines = [
        part for title, lines in (chapters(printed) | {each.chapter: same}).items() for part in (f"== {title}", *lines)
    ]
    found = differences("\n".join(lines), RECORD.read_text())
    assert f"the difference {name!r} no longer exists" in found[0]
    # A line without a decided difference is reported, too.
    assert differences(printed, RECORD.read_text(), without)


def test_other_lines_are_seen(printed: str) -> None:
    record = RECORD.read_text()
    for changed in (printed.replace("state B1: float32 (12,)", "state B1: float32 (13,)", 1), printed + "one more\n"):
        assert differences(changed, record)
    lines = printed.splitlines()
    at = lines.index("returns: None")
    assert "-returns: None" in differences("\n".join(lines[:at] + lines[at + 1 :]), record)
    wrong = Decided("run", ("never printed",), (), "no reason", "no sentence")
    with pytest.raises(ValueError, match="does not print the lines of the difference 'wrong'"):
        expected(record, {"wrong": wrong})
