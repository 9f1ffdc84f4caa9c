"""The report: one page with nothing from outside, drawings inside their frames, and every text escaped."""

from __future__ import annotations

import math
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortrain._fit import charts
from ortrain._fit.findings import Findings
from ortrain._fit.history import History
from ortrain._fit.markup import Markup, element, join
from ortrain._fit.picture import is_picture, png
from ortrain._fit.range_test import RangeTest
from ortrain._fit.report import Report, TrainedParameter, page, write_report
from ortrain._fit.units import format_bytes, format_seconds, format_speed
from ortrain.metrics import OutputForm

HOSTILE = "<script>alert('x')</script>&\"é"
EMPTY = {"img", "meta", "br"}


class Page(HTMLParser):
    """Elements, texts and attributes of a page. Tags have to be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def history(epochs: int = 3, steps: int = 40) -> History:
    result = History({"epochs": epochs, "steps": steps})
    losses = 2.5 * np.exp(-np.arange(epochs * steps) / 30)
    result.add_steps(loss=losses, learning_rate=np.linspace(1e-3, 0, epochs * steps))
    for epoch in range(epochs):
        logs = {"loss": losses[epoch * steps], "accuracy": 0.5 + 0.1 * epoch, "val_loss": 1.5 - 0.3 * epoch}
        result.add_epoch(epoch, logs | {"val_accuracy": 0.6 + 0.1 * epoch})
    return result


def classified(classes: list[str] | None = None, count: int = 4) -> Findings:
    rng = np.random.default_rng(1)
    findings = Findings(OutputForm(logits=True), classes)
    for rows in (30, 7):
        labels = rng.integers(0, count, rows)
        scores = rng.normal(size=(rows, count)) + 2 * np.eye(count)[labels]
        findings.update({"image": rng.random((rows, 3, 8, 9), np.float32)}, labels, scores)
    return findings


def full_report(findings: Findings | None) -> Report:
    return Report(
        history=history(),
        title=f"Training of {HOSTILE}",
        subtitle="400 images",
        findings=findings,
        parameters=[TrainedParameter(f"layer{index}.{HOSTILE}", (3, index + 1)) for index in range(20)],
        frozen=1000,
        seconds=83.0,
        step_seconds={"forward and backward": 0.01, "optimizer": 0.002},
        step_bytes={"parameters": 4000, "work": 10**6},
        settings={"model": HOSTILE, "optimizer": {"name": "adamw", "lr": 1e-3}, "shuffle": True, "clip_norm": None},
        version="1.2.3",
    )


def range_test() -> RangeTest:
    rates = np.geomspace(1e-7, 0.5, 80)
    losses = 2.3 - np.clip(np.log10(rates / 1e-4), 0, 3) * 0.6 + (rates / 0.2) ** 2
    return RangeTest(rates.tolist(), losses.tolist(), 0.0031)


def regression() -> Findings:
    rng = np.random.default_rng(2)
    findings = Findings(is_regression=True)
    targets = rng.normal(size=(50, 1))
    inputs = {"age": rng.random(50), "income": rng.random((50, 1)), HOSTILE: np.array([HOSTILE] * 50)}
    findings.update(inputs, targets, targets[:, 0] + rng.normal(size=50))
    return findings


def series() -> Findings:
    findings = Findings(is_regression=True)
    waves = np.sin(np.arange(500) / np.linspace(5, 20, 9)[:, None]).astype(np.float32)
    waves[0, 100] = np.nan
    findings.update({"wave": waves[:, None]}, np.zeros(9), np.linspace(1, 2, 9))
    return findings


def texts() -> Findings:
    findings = classified([HOSTILE, "b", "c", "d"])
    lines = [f"{HOSTILE} {index}" for index in range(5)]
    scores = np.array([[0.0, 9, 0, 0]] * 5)
    findings.update(
        {"ids": np.zeros((5, 3), int)}, np.zeros(5, int), scores, lambda row: "a.txt", lambda row: lines[row]
    )
    return findings


CASES = {
    "images": lambda: full_report(classified()),
    "texts": lambda: full_report(texts()),
    "many classes": lambda: full_report(classified(count=50)),
    "rows": lambda: replace(full_report(regression()), range_test=range_test()),
    "series": lambda: full_report(series()),
    "nothing found": lambda: full_report(None),
    "history alone": lambda: Report(history()),
    "empty": lambda: Report(History()),
}


@pytest.mark.parametrize("name", CASES)
def test_one_page_without_network(name: str) -> None:
    read = Page(page(CASES[name]()))
    # A text of a stranger stays a text.
    assert not read.all("script")
    assert not any(key.startswith("on") for _, attributes in read.elements for key in attributes)
    for tag, attributes in read.elements:
        for key in ("src", "href", "action", "data", "srcset", "xlink:href"):
            assert attributes.get(key, "data:").startswith("data:"), (tag, attributes)
    style = next(text for text in read.texts if ":root" in text)
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme:dark" in style
    assert "@media print" in style
    assert "default-src 'none'" in next(meta for meta in read.all("meta") if "http-equiv" in meta)["content"]
    assert {"width=device-width, initial-scale=1"} <= {meta.get("content") for meta in read.all("meta")}


@pytest.mark.parametrize("name", CASES)
def test_drawings_are_inside_their_frames(name: str) -> None:
    read = Page(page(CASES[name]()))
    drawings = read.all("svg")
    assert len(drawings) == {"empty": 0, "rows": 6, "series": 14}.get(name, 3)
    for drawing in drawings:
        assert drawing["viewbox"] in (f"0 0 {charts.WIDTH} {charts.HEIGHT}", "0 0 240 80")
        assert drawing["aria-label"]
    for tag, attributes in read.elements:
        for key in ("x", "x1", "x2", "cx"):
            assert 0 <= float(attributes.get(key, 0)) <= charts.WIDTH, (tag, attributes)
        for key in ("y", "y1", "y2", "cy"):
            assert 0 <= float(attributes.get(key, 0)) <= charts.HEIGHT, (tag, attributes)
        if tag == "path":
            numbers = [float(text) for text in re.findall(r"-?[\d.]+", attributes["d"])]
            assert all(0 <= x <= charts.WIDTH for x in numbers[::2])
            assert all(0 <= y <= charts.HEIGHT for y in numbers[1::2])
        if tag == "rect":
            assert float(attributes["y"]) + float(attributes["height"]) <= charts.HEIGHT
            assert min(float(attributes["width"]), float(attributes["height"])) >= 0


def test_sections() -> None:
    read = Page(page(full_report(classified())))
    wanted = [
        "Curves",
        "Confusion matrix",
        "Examples that are most wrong",
        "Trained parameters",
        "Time and memory of a step",
        "Settings",
    ]
    assert [text for text in read.texts if text in wanted] == wanted
    shown = " ".join(read.texts)
    assert HOSTILE in shown
    assert "best validation accuracy, epoch 3" in shown
    assert "0.8" in read.texts
    # 3 * (1 + ... + 20) trained values.
    assert "630 values in 20 parameters are trained, 38.7 % of the 1,630 values" in shown
    assert "optimizer.lr" in read.texts
    assert "1 min 23 s" in read.texts
    assert "37 rows of the validation set" in shown
    assert len(read.all("img")) == 12
    chosen = Page(page(CASES["rows"]())).texts
    assert chosen[chosen.index("Choice of the learning rate") + 2] == "0.0031"


def test_worst_rows() -> None:
    """The rows with the largest losses of all batches, the largest first; right and sure rows are not among them."""
    findings = Findings(OutputForm(logits=False), classes=["cat", "dog"], keep=3)
    likely = np.array([[1.0, 0.0], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    for batch in (slice(0, 2), slice(2, 4)):
        names = "abcd"[batch]
        findings.update({"x": np.zeros((2, 3))}, np.array([0, 1, 0, 0])[batch], likely[batch], names.__getitem__)
    worst = findings.worst
    assert [(example.name, example.target, example.output) for example in worst] == [
        ("b", "dog", "cat (90%)"),
        ("c", "cat", "dog (80%)"),
        ("d", "cat", "cat (60%)"),
    ]
    assert worst[0].loss == pytest.approx(-math.log(0.1))
    assert worst[0].columns == {"x[0]": 0.0, "x[1]": 0.0, "x[2]": 0.0}
    assert findings.confusion is not None
    assert findings.confusion.tolist() == [[2, 1], [1, 0]]
    assert findings.rows == 4


def test_pixels_in_a_row_are_a_picture() -> None:
    findings = Findings(OutputForm(logits=True), keep=1)
    findings.update({"x": np.zeros((1, 64), np.float32)}, np.array([0]), np.array([[0.0, 1]]))
    assert findings.worst[0].picture is not None
    assert pixels_of(findings.worst[0].picture).shape == (8, 8, 1)


def test_decisions_and_sequences() -> None:
    binary = Findings(OutputForm(logits=True))
    binary.update({"x": np.zeros(3)}, np.array([1, 0, 1]), np.array([[2.0], [3.0], [-1.0]]))
    assert binary.confusion is not None
    assert binary.confusion.tolist() == [[0, 1], [1, 1]]
    assert [(example.target, example.output) for example in binary.worst][:2] == [("0", "1 (95%)"), ("1", "0 (73%)")]
    several = Findings(OutputForm(logits=False), classes=["red", "green", "blue"], keep=1)
    several.update({"x": np.zeros(2)}, np.array([[1, 0, 1], [0, 0, 0]]), np.array([[0.1, 0.9, 0.8], [0.1, 0.1, 0.1]]))
    assert (several.worst[0].target, several.worst[0].output) == ("red, blue", "green, blue")
    assert several.decisions is not None
    assert several.decisions.tolist() == [[0, 0, 1], [0, 1, 1], [1, 0, 1]]
    shown = Page(page(Report(History(), findings=several))).texts
    assert "Decisions by label" in shown
    assert shown[shown.index("blue") :][:5] == ["blue", "1", "1", "100%", "100%"]
    # The loss of a sequence is the mean over its tokens that count. A vocabulary has no confusion matrix.
    tokens = Findings(OutputForm(logits=True, ignore_index=-100), keep=1)
    scores = np.zeros((2, 3, 1001))
    scores[1, 1, 0] = -4
    tokens.update({"ids": np.zeros((2, 3), int)}, np.array([[0, 0, 0], [-100, 0, -100]]), scores)
    assert (tokens.worst[0].name, tokens.worst[0].target) == ("row 1", "1 tokens")
    assert tokens.worst[0].loss == pytest.approx(4 + math.log(1001), rel=1e-3)
    assert tokens.confusion is None
    Page(page(Report(History(), findings=tokens)))


def test_values_that_are_not_finite() -> None:
    broken = History()
    for epoch, loss in enumerate([1.0, math.nan, math.inf, 0.5]):
        broken.add_epoch(epoch, {"loss": loss, "val_loss": math.nan})
    read = Page(page(Report(broken)))
    paths = [path["d"] for path in read.all("path")]
    # A line that is interrupted begins anew.
    assert paths[0].count("M") == 2
    assert paths[1] == ""
    findings = Findings(OutputForm(logits=True))
    findings.update({"x": np.zeros((2, 2))}, np.array([0, 1]), np.array([[np.nan, 1], [1, 2]]))
    assert math.isinf(findings.worst[0].loss)
    values = Findings(is_regression=True)
    values.update({"x": np.zeros(2)}, np.array([1.0, np.nan]), np.array([np.inf, 1.0]))
    Page(page(Report(History(), findings=values)))


def test_ticks() -> None:
    assert charts.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert charts.ticks(0.13, 97) == [20, 40, 60, 80]
    assert charts.ticks(3, 3) == [3]
    assert charts.log_ticks(1e-4, 1) == [1e-4, 1e-3, 1e-2, 0.1, 1]
    assert [charts.label(value) for value in (0, 0.25, 1234, 45678, 2.5e7, 3e-5, -1e-6)] == [
        "0",
        "0.25",
        "1234",
        "45,678",
        "2.5e7",
        "3e-5",
        "-1e-6",
    ]
    rng = np.random.default_rng(3)
    for low, span in zip(
        rng.normal(size=100) * 10.0 ** rng.integers(-6, 6, 100), 10.0 ** rng.integers(-6, 6, 100), strict=True
    ):
        marks = charts.ticks(low, low + span)
        assert 2 <= len(marks) <= 6
        assert all(low - 1e-9 * span <= mark <= low + span * (1 + 1e-9) for mark in marks)


def test_long_lines_are_thinned() -> None:
    xs, ys = charts.thinned(list(range(10_000)), [1.0] * 10_000)
    assert len(xs) == len(ys) <= 300
    assert ys == [1.0] * len(ys)
    many = history(3, 20_000)
    assert len(page(Report(many))) < 60_000


def test_log_axis_for_small_losses() -> None:
    small = History()
    for epoch in range(6):
        small.add_epoch(epoch, {"loss": 10.0**-epoch})
    read = Page(page(Report(small)))
    assert {"1", "0.1", "0.01", "0.001", "0.0001", "1e-5"} <= set(read.texts)


def pixels_of(file: bytes) -> Any:
    """Decode a PNG file without filters."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", file[16:26])
    start = file.index(b"IDAT") + 4
    length = struct.unpack(">I", file[start - 8 : start - 4])[0]
    data = file[start : start + length]
    assert struct.unpack(">I", file[start + length : start + length + 4])[0] == zlib.crc32(b"IDAT" + data)
    channels = {0: 1, 2: 3, 6: 4}[kind]
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def test_pictures() -> None:
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(pixels_of(png(colors)), colors)
    assert np.array_equal(pixels_of(png(np.moveaxis(colors, 2, 0))), colors)
    gray = np.linspace(-2, 3, 48, dtype=np.float32).reshape(6, 8)
    assert np.array_equal(
        pixels_of(png(gray))[:, :, 0], np.round(np.linspace(0, 255, 48)).astype(np.uint8).reshape(6, 8)
    )
    gray[0, 0] = np.nan
    assert pixels_of(png(gray))[0, 0, 0] == 0
    assert pixels_of(png(np.zeros((1, 600, 300)))).shape == (200, 100, 1)
    assert not any(map(is_picture, [(5,), (2, 9), (5, 5, 5), (3, 3, 3, 3), ()]))
    with pytest.raises(ValueError, match="not a picture"):
        png(np.zeros(4))


def test_markup() -> None:
    inner = element("b", "<&>", title='"quoted"')
    assert inner == '<b title="&quot;quoted&quot;">&lt;&amp;&gt;</b>'
    assert join(inner, None, 3) == inner + "3"
    assert element("line", x1=1.234567, class_="a", aria_label=None) == '<line x1="1.23" class="a"></line>'
    assert isinstance(inner, Markup)


def test_units() -> None:
    assert [format_seconds(value) for value in (3.2e-5, 0.0123, 5.0, 83.4, 7500.0)] == [
        "32 µs",
        "12.3 ms",
        "5 s",
        "1 min 23 s",
        "2 h 5 min",
    ]
    assert [format_bytes(value) for value in (12, 4300, 12_345_678, 3 * 10**9)] == ["12 B", "4.3 kB", "12.3 MB", "3 GB"]
    assert [format_speed(value, "rows") for value in (3.0, 4321.0, 5e6)] == ["3 rows/s", "4.32k rows/s", "5M rows/s"]


def test_an_existing_report_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    assert write_report(path, Report(history())) == path
    first = path.read_text(encoding="utf-8")
    assert history(4).report(path) == path
    assert path.read_text(encoding="utf-8") != first
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
