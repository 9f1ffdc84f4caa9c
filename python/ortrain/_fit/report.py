"""Report of a training as one HTML file, which needs no network and no script."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain import _files
from ortrain._fit.charts import Series, line_chart, sparkline
from ortrain._fit.findings import Example, Findings
from ortrain._fit.history import History
from ortrain._fit.markup import Markup, element, join
from ortrain._fit.mistakes import confusion, decisions, residuals
from ortrain._fit.picture import data_address
from ortrain._fit.style import STYLE
from ortrain._fit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ortrain._fit.range_test import RangeTest
    from ortrain._model_source import PathLike

# Rows of the table of parameters that are shown at once.
_SHOWN_PARAMETERS = 12
# The page may load nothing, and run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Parts of settings that are shown in a word each.
_WORDS = {True: "yes", False: "no", None: "none"}


@dataclass(frozen=True)
class TrainedParameter:
    """Parameter that was trained."""

    name: str
    """Name in the model."""
    shape: tuple[int, ...]
    """Sizes of the axes."""

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass
class Report:
    """Content of a report. A part without data is left out."""

    history: History
    """Loss and metrics."""
    title: str = "Training"
    """Heading of the page."""
    subtitle: str = ""
    """Line below the heading: model, data, device."""
    range_test: RangeTest | None = None
    """Test that chose the learning rate."""
    findings: Findings | None = None
    """Mistakes on the validation set, or on the training set without one."""
    findings_of: str = "validation"
    """Name of the set of the mistakes."""
    parameters: Sequence[TrainedParameter] = ()
    """Trained parameters."""
    frozen: int = 0
    """Number of values of frozen parameters."""
    seconds: float | None = None
    """Duration of the training."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds of a step by part, such as ``forward and backward``, ``optimizer``, ``data``."""
    step_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a step by part, such as ``parameters``, ``gradients``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the run."""
    version: str = ""
    """Version of ortrain."""


def write_report(path: PathLike, report: Report) -> Path:
    """Write a report and return its path. An existing file is replaced when the new one is complete."""
    target = Path(os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _files.write(target, page(report).encode())
    return target


def page(report: Report) -> str:
    """Return the HTML of a report."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", report.title),
        element("style", Markup(STYLE)),
    )
    sections = [
        _curves(report),
        _range_test(report),
        _mistakes(report),
        _examples(report),
        _parameters(report),
        _step(report),
        _settings(report),
    ]
    main = element(
        "main",
        element("h1", report.title),
        element("p", report.subtitle, class_="note") if report.subtitle else None,
        _tiles(report),
        *sections,
        element("footer", f"Written by ortrain {report.version}".rstrip() + "."),
    )
    return "<!doctype html>\n" + element("html", head, element("body", main), lang="en") + "\n"


def _section(title: str, *children: object) -> Markup:
    return element("section", element("h2", title), *children)


def _tiles(report: Report) -> Markup | None:
    """Return the numbers that a reader wants first."""
    tiles: list[tuple[str, str]] = []
    history = report.history
    names = [name for name in history if name.startswith("val_")] or list(history)
    for name in names[:3]:
        if name in ("learning_rate", "lr"):
            continue
        value, epoch = _best(history, name)
        if value is not None:
            when = f", epoch {epoch + 1}" if len(history.epoch) > 1 else ""
            tiles.append((_short(value), f"best {_title(name)}{when}"))
    if report.seconds is not None:
        epochs = len(history.epoch)
        tiles.append((format_seconds(report.seconds), f"{epochs} epoch{'' if epochs == 1 else 's'}"))
    if report.step_seconds:
        tiles.append((format_seconds(sum(report.step_seconds.values())), "per step"))
    if report.step_bytes:
        tiles.append((format_bytes(sum(report.step_bytes.values())), "memory of a step"))
    if not tiles:
        return None
    return element(
        "div",
        *(element("div", element("b", value), element("span", name), class_="tile") for value, name in tiles),
        class_="tiles",
    )


def _best(history: History, name: str) -> tuple[float | None, int]:
    """Return the best value of a column and its epoch; the last value if it is unknown which one is good."""
    from ortrain.callbacks._monitor import is_higher_better

    rows = [(row[name], int(row["epoch"])) for row in history.rows() if name in row and math.isfinite(row[name])]
    if not rows:
        return None, 0
    higher = is_higher_better(name, None)
    if higher is None:
        return rows[-1]
    return max(rows, key=lambda row: (row[0] if higher else -row[0], -row[1]))


def _short(value: float) -> str:
    return f"{value:.4g}"


def _title(name: str) -> str:
    """Return the name of a column in words."""
    if name.startswith("val_"):
        return f"validation {_title(name.removeprefix('val_'))}"
    return name.replace("_", " ")


def _curves(report: Report) -> Markup | None:
    """Return one chart per metric, with training and validation, and one of the learning rate."""
    history = report.history
    steps = history.steps
    charts = [_curve(history, steps, name) for name in history.curve_names() if name not in ("learning_rate", "lr")]
    if "loss" in steps and "loss" not in history:
        charts.insert(0, _curve(history, steps, "loss"))
    rates = steps.get("learning_rate")
    if rates:
        per_epoch = _steps_per_epoch(history, len(rates))
        xs = [(index + 1) / per_epoch for index in range(len(rates))]
        line = Series("learning rate", xs, rates, "c1", has_points=False)
        charts.append(_figure("learning rate", [line], (0.0, xs[-1]), may_be_log=False))
    elif "learning_rate" in history:
        charts.append(_curve(history, {}, "learning_rate"))
    return _section("Curves", element("div", *charts, class_="charts")) if charts else None


def _curve(history: History, steps: Mapping[str, Sequence[float]], name: str) -> Markup:
    lines: list[Series] = []
    by_step = steps.get(name, ())
    if by_step:
        per_epoch = _steps_per_epoch(history, len(by_step))
        xs = [(index + 1) / per_epoch for index in range(len(by_step))]
        lines.append(Series("each step", xs, by_step, "faint", has_points=False))
    for key, text, color in ((name, "training", "c1"), (f"val_{name}", "validation", "c2")):
        rows = [(row["epoch"] + 1, row[key]) for row in history.rows() if key in row]
        if rows:
            lines.append(Series(text, [row[0] for row in rows], [row[1] for row in rows], color))
    last = max(max(line.xs) for line in lines)
    first = min(min(line.xs) for line in lines)
    # One epoch is a point at the end of the axis.
    start = 0.0 if by_step or first == last else first
    return _figure(_title(name), lines, (start, last), may_be_log=name == "loss")


def _steps_per_epoch(history: History, steps: int) -> float:
    known = history.params.get("steps")
    return float(known) if known else steps / max(len(history.epoch), 1)


def _figure(title: str, lines: Sequence[Series], x_range: tuple[float, float], may_be_log: bool) -> Markup:
    keys = [element("span", element("i", class_=f"key {line.color}"), line.label) for line in lines]
    legend = element("div", *keys, class_="legend") if len(lines) > 1 else None
    return element("figure", element("h3", title), legend, line_chart(title, lines, "epoch", x_range, may_be_log))


def _range_test(report: Report) -> Markup | None:
    """Return the loss by learning rate, with the chosen rate."""
    test = report.range_test
    if test is None or len(test.rates) < 2:
        return None
    about = element(
        "p",
        f"A trial of {len(test.rates)} steps with a rising learning rate. The training began with ",
        element("b", _short(test.suggestion)),
        " (dashed line): the loss fell fastest there, or a tenth of the rate with the lowest loss.",
        class_="note",
    )
    x_range = (test.rates[0], test.rates[-1])
    line = Series("loss", test.rates, test.losses, "c1", has_points=False)
    chart = line_chart("loss", [line], "learning rate", x_range, is_x_log=True, mark=test.suggestion)
    figure = element("figure", element("h3", "loss by learning rate"), chart, style="max-width:430px")
    return _section("Choice of the learning rate", about, element("div", figure, class_="charts"))


def _mistakes(report: Report) -> Markup | None:
    findings = report.findings
    if findings is None:
        return None
    about = element(
        "p", f"{findings.rows:,} rows of the {report.findings_of} set, at the end of the training.", class_="note"
    )
    if findings.confusion is not None:
        return _section("Confusion matrix", about, confusion(findings))
    if findings.decisions is not None:
        return _section("Decisions by label", about, decisions(findings))
    pairs = findings.sampled_pairs()
    return _section("Residuals", about, residuals(findings)) if pairs and pairs[0] else None


def _examples(report: Report) -> Markup | None:
    if report.findings is None or not report.findings.worst:
        return None
    worst = report.findings.worst
    wide = any(example.picture is None for example in worst)
    cards = element("div", *map(_card, worst), class_="cards", style="--card-width:260px" if wide else None)
    about = f"The {len(worst)} rows of the {report.findings_of} set with the largest loss. Look for wrong labels."
    return _section("Examples that are most wrong", element("p", about, class_="note"), cards)


def _card(example: Example) -> Markup:
    shown: object = None
    if example.picture is not None:
        shown = element("img", src=data_address(example.picture), alt=f"{example.name}: {example.target}")
    elif example.text is not None:
        shown = element("blockquote", example.text)
    elif example.series is not None:
        shown = sparkline(f"{example.name}: {example.target}", example.series)
    verdict = element(
        "div",
        element("span", example.target, class_="is"),
        *((" → ", element("span", example.output, class_="said")) if example.output else ()),
        element("br"),
        element("span", f"loss {_short(example.loss)}, {example.name}".rstrip(", "), class_="note"),
        _columns(example.columns) if example.columns else None,
    )
    return element("div", shown, verdict, class_="example")


def _columns(columns: Mapping[str, Any]) -> Markup:
    rows = [
        element("tr", element("th", name), element("td", _value(value), class_="number"))
        for name, value in columns.items()
    ]
    return element("table", *rows, class_="list")


def _value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _parameters(report: Report) -> Markup | None:
    parameters = report.parameters
    if not parameters:
        return None
    trained = sum(parameter.count for parameter in parameters)
    largest = max(parameter.count for parameter in parameters)
    total = trained + report.frozen
    about = f"{trained:,} values in {len(parameters)} parameter{'' if len(parameters) == 1 else 's'} are trained"
    about += (
        f", {100 * trained / max(total, 1):.3g} % of the {total:,} values of the model."
        if report.frozen
        else ", all of the model."
    )
    shown, rest = parameters[:_SHOWN_PARAMETERS], parameters[_SHOWN_PARAMETERS:]
    more = None
    if rest:
        title = f"{len(rest)} more parameter{'' if len(rest) == 1 else 's'}"
        more = element("details", element("summary", title), _parameter_table(rest, largest))
    return _section("Trained parameters", element("p", about, class_="note"), _parameter_table(shown, largest), more)


def _parameter_table(parameters: Sequence[TrainedParameter], largest: int) -> Markup:
    rows = [
        element(
            "tr",
            element("td", element("code", parameter.name)),
            element("td", " \u00d7 ".join(map(str, parameter.shape)) or "scalar", class_="number"),
            element("td", f"{parameter.count:,}", class_="number"),
            element(
                "td",
                element("div", class_="share", style=f"width:{100 * parameter.count / max(largest, 1):.1f}%"),
                class_="number narrow-hidden",
                style="width:26%;vertical-align:middle",
            ),
        )
        for parameter in parameters
    ]
    return element("table", *rows, class_="list parameters")


def _step(report: Report) -> Markup | None:
    parts = []
    if report.step_seconds:
        parts.append(_stack("Time", report.step_seconds, format_seconds))
    if report.step_bytes:
        parts.append(_stack("Memory", report.step_bytes, format_bytes))
    return _section("Time and memory of a step", *parts) if parts else None


def _stack(title: str, sizes: Mapping[str, Any], write: Any) -> Markup:
    """Return a bar of parts, with their sizes below."""
    total = sum(sizes.values()) or 1
    bar, keys = [], []
    for index, (name, size) in enumerate(sizes.items()):
        color = f"c{index % 5 + 1}"
        bar.append(element("div", class_=f"part {color}", style=f"flex:{max(size, 0) / total:.4f} 1 0"))
        keys.append(element("span", element("i", class_=f"key {color}"), f"{name} {write(size)}"))
    heading = element("h3", f"{title}: {write(sum(sizes.values()))}")
    return join(heading, element("div", *bar, class_="stack"), element("div", *keys, class_="legend"))


def _settings(report: Report) -> Markup | None:
    rows = [
        element("tr", element("th", name), element("td", element("code", value)))
        for name, value in _flat(report.settings)
    ]
    return _section("Settings", element("table", *rows, class_="list settings")) if rows else None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return settings as lines; a mapping in a mapping has names with dots."""
    lines: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            lines += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            lines.append((prefix + name, ", ".join(map(str, value)) or "none"))
        elif value is None or isinstance(value, bool):
            lines.append((prefix + name, _WORDS[value]))
        else:
            lines.append((prefix + name, str(value)))
    return lines
