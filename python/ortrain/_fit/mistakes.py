"""Pictures of mistakes: the confusion matrix, the decisions by label, and the residuals."""

from __future__ import annotations

import numpy as np

from ortrain._fit.charts import histogram, scatter
from ortrain._fit.findings import Findings
from ortrain._fit.markup import Markup, element, join
from ortrain._fit.picture import data_address, rgba_png

# Classes of a matrix with numbers; more become a picture.
_MAX_NUMBERED = 20
_SHOWN_CONFUSIONS = 10


def confusion(findings: Findings) -> Markup:
    """Return the confusion matrix and the most frequent confusions."""
    counts = findings.confusion
    assert counts is not None
    matrix = _numbers(findings) if len(counts) <= _MAX_NUMBERED else _pixels(findings)
    return element("div", element("div", matrix, class_="wide"), _confusions(findings), class_="beside")


def _numbers(findings: Findings) -> Markup:
    counts = findings.confusion
    assert counts is not None
    names = [findings.class_name(index) for index in range(len(counts))]
    columns = [element("th", name, class_="column", title=name) for name in names]
    heads = element("tr", element("th", "target \\ output"), *columns, element("th", "recall", class_="column"))
    rows = []
    for index, row in enumerate(counts):
        total = int(row.sum())
        cells = [
            _cell(int(count), total, index == column, names[index], names[column]) for column, count in enumerate(row)
        ]
        recall = f"{row[index] / total:.0%}" if total else "none"
        rows.append(element("tr", element("th", names[index], title=names[index]), *cells, element("td", recall)))
    return element("table", heads, *rows, class_="matrix")


def _cell(count: int, total: int, is_right: bool, target: str, output: str) -> Markup:
    """Return a cell, colored by the share of the target's rows."""
    if not count:
        return element("td", "·", class_="zero")
    share = count / total
    # Few mistakes are visible, too.
    opacity = 0.12 + 0.5 * (share if is_right else share**0.5)
    color = "good" if is_right else "bad"
    title = f"{target} → {output}: {count:,} of {total:,}"
    return element("td", f"{count:,}", style=f"background:rgba(var(--{color}),{opacity:.2f})", title=title)


def _pixels(findings: Findings) -> Markup:
    """Return the matrix as a picture, one point per pair of classes."""
    counts = findings.confusion
    assert counts is not None
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    pixels = np.zeros((*counts.shape, 4), np.uint8)
    right = np.eye(len(counts), dtype=bool)
    pixels[right, :3] = (42, 120, 214)
    pixels[~right, :3] = (217, 89, 31)
    pixels[..., 3] = np.where(counts > 0, np.round(255 * (0.25 + 0.75 * share**0.5)), 0)
    picture = element("img", src=data_address(rgba_png(pixels)), class_="pixels", alt="confusion matrix")
    about = element(
        "p", f"{len(counts)} classes: targets from top to bottom, outputs from left to right.", class_="note"
    )
    return join(about, picture)


def _confusions(findings: Findings) -> Markup | None:
    counts = findings.confusion
    assert counts is not None
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_SHOWN_CONFUSIONS]
    rows = []
    for place in order:
        target, output = divmod(int(place), len(counts))
        if not wrong[target, output]:
            break
        total = counts[target].sum()
        rows.append(
            element(
                "tr",
                element(
                    "td",
                    element("span", findings.class_name(target), class_="is"),
                    " → ",
                    element("span", findings.class_name(output), class_="said"),
                ),
                element("td", f"{wrong[target, output]:,}", class_="number"),
                element("td", f"{wrong[target, output] / total:.0%}", class_="number"),
            )
        )
    right, total = int(np.trace(counts)), int(counts.sum())
    about = element("p", f"{right:,} of {total:,} right ({right / max(total, 1):.2%}).", class_="note")
    if not rows:
        return element("div", about)
    return element("div", about, element("h3", "Most frequent mistakes"), element("table", *rows, class_="list"))


def decisions(findings: Findings) -> Markup:
    """Return precision and recall of each label, for rows with several."""
    counts = findings.decisions
    assert counts is not None
    heads = [element("th", name, class_="number") for name in ("targets", "outputs", "precision", "recall")]
    rows = [element("tr", element("th", "label"), *heads)]
    for index, (right, outputs, targets) in enumerate(counts.T.tolist()):
        cells = [f"{targets:,}", f"{outputs:,}"] + [
            f"{right / all_:.0%}" if all_ else "none" for all_ in (outputs, targets)
        ]
        name = element("td", findings.class_name(index))
        rows.append(element("tr", name, *(element("td", cell, class_="number") for cell in cells)))
    return element("table", *rows, class_="list")


def residuals(findings: Findings) -> Markup:
    """Return outputs over targets, and the distribution of their differences."""
    pairs = findings.sampled_pairs()
    assert pairs is not None
    targets, outputs = pairs
    shown = element("figure", element("h3", "output by target"), scatter("output by target", targets, outputs))
    difference = np.subtract(outputs, targets)
    counts, edges = np.histogram(difference, bins=min(40, max(5, int(len(difference) ** 0.5))))
    bars = histogram("distribution of output minus target", edges.tolist(), counts.tolist(), "output minus target")
    return element("div", shown, element("figure", element("h3", "output minus target"), bars), class_="charts")
