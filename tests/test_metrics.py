"""Metrics: equal to scikit-learn over batches of unequal sizes, with weights of rows, and through their states."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from ortrain import metrics
from ortrain.errors import InvalidArgumentError

ROWS = 157
RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, 4, ROWS)
SCORES = (RNG.normal(size=(ROWS, 4)) + 1.5 * np.eye(4)[LABELS]).astype(np.float32)
LIKELY = np.exp(SCORES.astype(np.float64))
LIKELY /= LIKELY.sum(1, keepdims=True)
CLASS = SCORES.argmax(1)
# Rounded: ties between rows.
YES = RNG.integers(0, 2, ROWS)
RISK = np.round(np.clip(0.3 * RNG.normal(size=ROWS) + 0.3 + 0.4 * YES, 0, 1), 1).astype(np.float32)
TAGS = RNG.integers(0, 2, (ROWS, 3))
TAG_RISKS = np.round(np.clip(0.4 * RNG.normal(size=(ROWS, 3)) + 0.3 + 0.4 * TAGS, 0, 1), 2)
VALUES = RNG.normal(size=(ROWS, 2)) + np.array([1e4, 0])
GUESSES = (VALUES + 0.3 * RNG.normal(size=(ROWS, 2))).astype(np.float64)
WEIGHTS = RNG.integers(0, 4, ROWS).astype(np.float32) / 2


def in_batches(metric: metrics.Metric, targets: Any, outputs: Any, weights: Any = None) -> metrics.Metric:
    """Add rows in batches of unequal sizes. Half-way, the state moves to a new metric, through JSON where it can."""
    start = 0
    for index, size in enumerate((1, 50, 3, 0, 7, 64, 32)):
        rows = slice(start, start + size)
        if index == 4:
            state = metric.state()
            arrays = any(isinstance(value, np.ndarray) for value in state.values())
            metric.reset()
            assert math.isnan(metric.result())
            metric.restore(state if arrays else json.loads(json.dumps(state)))
        metric.update(targets[rows], outputs[rows], None if weights is None else weights[rows])
        start += size
    assert start == ROWS
    return metric


CASES: dict[str, tuple[Callable[[], metrics.Metric], Any, Any, Callable[..., float]]] = {
    "accuracy": (
        lambda: metrics.get("accuracy"),
        LABELS,
        SCORES,
        lambda w: sk.accuracy_score(LABELS, CLASS, sample_weight=w),
    ),
    "accuracy of one decision": (
        lambda: metrics.get("accuracy"),
        YES,
        RISK[:, None],
        lambda w: sk.accuracy_score(YES, RISK > 0.5, sample_weight=w),
    ),
    "accuracy of several labels": (
        lambda: metrics.get("accuracy"),
        TAGS,
        TAG_RISKS,
        lambda w: np.average((TAG_RISKS > 0.5) == TAGS, 0, w).mean(),
    ),
    "top2": (
        lambda: metrics.get("top2"),
        LABELS,
        SCORES,
        lambda w: sk.top_k_accuracy_score(LABELS, SCORES, k=2, sample_weight=w),
    ),
    "r2": (lambda: metrics.get("r2"), VALUES, GUESSES, lambda w: sk.r2_score(VALUES, GUESSES, sample_weight=w)),
    "mae": (
        lambda: metrics.get("mae"),
        VALUES,
        GUESSES,
        lambda w: sk.mean_absolute_error(VALUES, GUESSES, sample_weight=w),
    ),
    "mse": (
        lambda: metrics.get("mse"),
        VALUES,
        GUESSES,
        lambda w: sk.mean_squared_error(VALUES, GUESSES, sample_weight=w),
    ),
    "rmse": (
        lambda: metrics.get("rmse"),
        VALUES,
        GUESSES,
        lambda w: math.sqrt(sk.mean_squared_error(VALUES, GUESSES, sample_weight=w)),
    ),
    "perplexity": (
        lambda: metrics.get("perplexity"),
        LABELS,
        SCORES,
        lambda w: math.exp(sk.log_loss(LABELS, LIKELY, sample_weight=w)),
    ),
    "perplexity of probabilities": (
        lambda: metrics.get("perplexity", metrics.OutputForm(logits=False)),
        LABELS,
        LIKELY,
        lambda w: math.exp(sk.log_loss(LABELS, LIKELY, sample_weight=w)),
    ),
    "auroc": (lambda: metrics.get("auroc"), YES, RISK, lambda w: sk.roc_auc_score(YES, RISK, sample_weight=w)),
    "auroc of two classes": (
        lambda: metrics.get("auroc"),
        YES,
        np.stack([1 - RISK, RISK], 1),
        lambda w: sk.roc_auc_score(YES, RISK, sample_weight=w),
    ),
    "auroc of classes": (
        lambda: metrics.get("auroc"),
        LABELS,
        SCORES,
        lambda w: np.mean([sk.roc_auc_score(k == LABELS, LIKELY[:, k], sample_weight=w) for k in range(4)]),
    ),
    "auroc of several labels": (
        lambda: metrics.get("auroc"),
        TAGS,
        TAG_RISKS,
        lambda w: sk.roc_auc_score(TAGS, TAG_RISKS, sample_weight=w),
    ),
    "function": (
        lambda: metrics.get(sk.mean_pinball_loss),
        VALUES,
        GUESSES,
        lambda w: sk.mean_pinball_loss(VALUES, GUESSES, sample_weight=w),
    ),
}
for _name, _function in (
    ("precision", sk.precision_score),
    ("recall", sk.recall_score),
    ("f1", sk.f1_score),
):
    for _average in ("macro", "micro", "weighted"):
        CASES[f"{_name}_{_average}"] = (
            lambda name=_name, average=_average: metrics.get(f"{name}_{average}"),
            LABELS,
            SCORES,
            lambda w, function=_function, average=_average: function(LABELS, CLASS, average=average, sample_weight=w),
        )
    CASES[_name] = (
        lambda name=_name: metrics.get(name),
        YES,
        RISK,
        lambda w, function=_function: function(YES, RISK > 0.5, sample_weight=w),
    )
    CASES[f"{_name} of several labels"] = (
        lambda name=_name: metrics.get(name),
        TAGS,
        TAG_RISKS,
        lambda w, function=_function: function(TAGS, TAG_RISKS > 0.5, average="macro", sample_weight=w),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_scikit_learn(name: str, weighted: bool) -> None:
    make, targets, outputs, expected = CASES[name]
    weights = WEIGHTS if weighted else None
    metric = in_batches(make(), targets, outputs, weights)
    assert metric.result() == pytest.approx(expected(weights), rel=1e-6, abs=1e-9)
    # Counts, and totals in float64, do not depend on the sizes of the batches.
    whole = make()
    whole.update(targets, outputs, weights)
    assert metric.result() == pytest.approx(whole.result(), rel=1e-12)


def test_scores_of_sequences() -> None:
    """Classes may be the last axis or axis 1, and labels that are ignored do not count."""
    labels = np.array([[0, 1, 2], [2, -100, 1]])
    scores = np.zeros((2, 3, 5), np.float32)
    for row, column in np.ndindex(2, 3):
        scores[row, column, 0 if row == 1 and column == 2 else labels[row, column] % 5] = 3
    for outputs in (scores, np.moveaxis(scores, 2, 1)):
        accuracy = metrics.Accuracy(ignore_index=-100)
        accuracy.update(labels, outputs)
        assert accuracy.result() == 4 / 5
        weighted = metrics.Accuracy(ignore_index=-100)
        weighted.update(labels, outputs, [1, 3])
        assert weighted.result() == 6 / 9
    square = np.zeros((2, 5, 5), np.float32)
    with pytest.raises(InvalidArgumentError, match="set class_axis"):
        metrics.Accuracy().update(np.zeros((2, 5), int), square)
    metrics.Accuracy(class_axis=1).update(np.zeros((2, 5), int), square)


def test_perplexity_from_losses() -> None:
    """Losses of batches, weighted by their tokens, are as good as scores."""
    by_scores, by_loss = metrics.Perplexity(), metrics.Perplexity()
    for rows in (slice(0, 10), slice(10, ROWS)):
        by_scores.update(LABELS[rows], SCORES[rows])
        loss = sk.log_loss(LABELS[rows], LIKELY[rows], labels=range(4))
        by_loss.update_loss(loss, len(LABELS[rows]))
    assert by_loss.result() == pytest.approx(by_scores.result(), rel=1e-6)
    by_loss.update_loss(1e6, 1000)
    assert by_loss.result() == math.inf


def test_soft_labels() -> None:
    """The class of a soft label, as mixup makes it, is the likeliest one."""
    accuracy = metrics.get("accuracy", metrics.OutputForm(task="multiclass"))
    accuracy.update([[0.7, 0.3, 0], [0, 0.4, 0.6]], [[5, 1, 1], [2, 1, 0]])
    assert accuracy.result() == 0.5


def test_logits_of_one_decision() -> None:
    accuracy = metrics.get("accuracy", metrics.OutputForm(logits=True))
    accuracy.update([1, 0], [0.25, -0.25])
    assert accuracy.result() == 1
    own = metrics.Accuracy(threshold=0.3)
    own.configure(metrics.OutputForm(logits=True))
    own.update([1, 0], [0.25, -0.25])
    assert own.result() == 0.5


def test_auroc_of_a_missing_class() -> None:
    """Classes without targets do not count; a set of one class has no area."""
    auroc = metrics.AUROC()
    auroc.update([0, 1, 0], np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.3, 0.6, 0.1]]))
    assert auroc.result() == 1
    auroc.reset()
    auroc.update(np.zeros(0, int), np.zeros(0))
    assert math.isnan(auroc.result())
    auroc.update([1, 1], [0.5, 0.6])
    assert math.isnan(auroc.result())
    auroc.update([0], [np.nan])
    assert math.isnan(auroc.result())


def test_constant_targets() -> None:
    r2 = metrics.R2()
    r2.update([1.0], [1.0])
    assert math.isnan(r2.result())
    r2.update([1.0], [1.0])
    assert r2.result() == 1
    r2.update([1.0], [2.0])
    assert r2.result() == 0


def test_rows_with_nan_are_not_among_the_best() -> None:
    top = metrics.TopK(2)
    top.update([0], [[np.nan, 1, 2]])
    top.update([0], [[3, np.nan, 2]])
    assert top.result() == 0


def test_functions() -> None:
    def gap(targets: Any, outputs: Any) -> float:
        return float((outputs - targets).mean())

    metric = metrics.get(gap)
    buffer = np.array([1.0, 2.0])
    metric.update([0.0, 0.0], buffer)
    # The memory of a step is used again.
    buffer[:] = 100
    assert (metric.name, metric.result()) == ("gap", 1.5)
    with pytest.raises(InvalidArgumentError, match="no argument sample_weight"):
        metric.update([0.0], [1.0], [2.0])
    with pytest.raises(InvalidArgumentError, match="1 targets, but 2 outputs"):
        metric.update([0.0], [1.0, 2.0])
    assert metrics.get(len).name == "len"


def test_functions_of_scikit_learn() -> None:
    """By the names of their arguments, they get classes or probabilities; regressions get values."""
    form = metrics.OutputForm(logits=True, class_axis=1, task="multiclass")
    area = functools.partial(sk.roc_auc_score, multi_class="ovr")
    for function, expected in (
        (sk.balanced_accuracy_score, sk.balanced_accuracy_score(LABELS, CLASS)),
        (sk.log_loss, sk.log_loss(LABELS, LIKELY)),
        (sk.top_k_accuracy_score, sk.top_k_accuracy_score(LABELS, SCORES)),
        (area, area(LABELS, LIKELY)),
    ):
        for made in (metrics.get(function, form), metrics.get(function)):
            assert in_batches(made, LABELS, SCORES).result() == pytest.approx(expected, rel=1e-6), made.name
    kappa = metrics.FunctionMetric(sk.cohen_kappa_score, takes="classes")
    assert in_batches(kappa, LABELS, SCORES).result() == sk.cohen_kappa_score(LABELS, CLASS)
    logits = np.log(np.clip(RISK, 0.01, 0.99) / (1 - np.clip(RISK, 0.01, 0.99)))
    for function, expected in (
        (sk.matthews_corrcoef, sk.matthews_corrcoef(YES, RISK > 0.5)),
        (sk.average_precision_score, sk.average_precision_score(YES, RISK)),
        (sk.brier_score_loss, sk.brier_score_loss(YES, np.clip(RISK, 0.01, 0.99))),
    ):
        two = metrics.get(function, metrics.OutputForm(logits=True, task="binary"))
        assert in_batches(two, YES, logits[:, None]).result() == pytest.approx(expected, rel=1e-5)
    hamming = metrics.get(sk.hamming_loss, metrics.OutputForm(logits=False, task="multilabel"))
    assert in_batches(hamming, TAGS, TAG_RISKS).result() == sk.hamming_loss(TAGS, TAG_RISKS > 0.5)
    counts = metrics.get(sk.mean_absolute_error)
    assert in_batches(counts, YES, RISK).result() == sk.mean_absolute_error(YES, RISK)
    error = metrics.get(sk.median_absolute_error)
    assert in_batches(error, VALUES, GUESSES).result() == sk.median_absolute_error(VALUES, GUESSES)
    with pytest.raises(InvalidArgumentError, match="takes must be one of"):
        metrics.FunctionMetric(sk.f1_score, takes="labels")


def test_names() -> None:
    assert [metric.name for metric in metrics.get_all(["acc", "top_5", "f1_macro", "auc"])] == [
        "acc",
        "top_5",
        "f1_macro",
        "auc",
    ]
    assert metrics.get_all(None) == []
    assert [metric.name for metric in metrics.get_all("mse")] == ["mse"]
    with pytest.raises(InvalidArgumentError, match="did you mean 'precision'"):
        metrics.get("precison")
    with pytest.raises(InvalidArgumentError, match="two values of the history are named 'acc'"):
        metrics.get_all(["acc", "acc"])
    with pytest.raises(TypeError, match=r"call it: Accuracy\(\)"):
        metrics.get(metrics.Accuracy)
    with pytest.raises(TypeError, match="a name, a Metric or a function, got int"):
        metrics.get(3)
    for name in metrics.names():
        assert metrics.get(name).higher_is_better is not None


@pytest.mark.parametrize(
    ("make", "targets", "outputs", "message"),
    [
        (metrics.Accuracy, np.zeros(3, int), np.zeros((4, 2)), r"targets have shape \(3,\), but outputs have shape"),
        (metrics.TopK, np.array([0, 7]), np.zeros((2, 6)), "the label 7 is not one of the 6 classes"),
        (metrics.TopK, np.array([0, -1]), np.zeros((2, 6)), "the label -1 is not one of the 6 classes"),
        (metrics.F1, np.array([0, 7]), np.zeros((2, 6)), "the label 7"),
        (metrics.Perplexity, np.array([0, 7]), np.zeros((2, 6)), "the label 7"),
        (metrics.AUROC, np.array([0, 7]), np.zeros((2, 6)), "the label 7"),
        (metrics.R2, np.zeros(3), np.zeros((3, 2)), "mae|r2: targets have shape"),
        (metrics.MeanAbsoluteError, np.zeros(3), np.zeros(4), "mae: targets have shape"),
        (metrics.Accuracy, np.array(1), np.zeros(1), "a first axis of rows"),
    ],
)
def test_bad_input(make: Callable[[], metrics.Metric], targets: Any, outputs: Any, message: str) -> None:
    metric = make()
    with pytest.raises(InvalidArgumentError, match=message):
        metric.update(targets, outputs)
    # A batch that is refused does not count.
    assert math.isnan(metric.result())


def test_bad_settings() -> None:
    with pytest.raises(InvalidArgumentError, match="average must be one of"):
        metrics.F1(average="mean")
    with pytest.raises(InvalidArgumentError, match="k must be at least 1"):
        metrics.TopK(0)
    binary = metrics.F1(average="binary")
    binary.update(LABELS, SCORES)
    with pytest.raises(InvalidArgumentError, match="needs two classes"):
        binary.result()
    with pytest.raises(InvalidArgumentError, match="3 classes, but earlier ones have 4"):
        binary.update([0], [[1, 2, 3]])
    with pytest.raises(InvalidArgumentError, match="weights have shape"):
        metrics.Accuracy().update(LABELS, SCORES, np.ones(3))
