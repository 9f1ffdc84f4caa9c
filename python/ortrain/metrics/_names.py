"""Metrics by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.metrics._classification import F1, Accuracy, Precision, Recall, TopK
from ortrain.metrics._function import FunctionMetric
from ortrain.metrics._metric import Metric, OutputForm
from ortrain.metrics._ranking import AUROC
from ortrain.metrics._regression import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from ortrain.metrics._text import Perplexity

_BY_NAME: dict[str, Callable[..., Metric]] = {
    "accuracy": Accuracy,
    "acc": Accuracy,
    "auroc": AUROC,
    "auc": AUROC,
    "roc_auc": AUROC,
    "mae": MeanAbsoluteError,
    "mean_absolute_error": MeanAbsoluteError,
    "mse": MeanSquaredError,
    "mean_squared_error": MeanSquaredError,
    "rmse": RootMeanSquaredError,
    "root_mean_squared_error": RootMeanSquaredError,
    "r2": R2,
    "perplexity": Perplexity,
    **{
        name + ending: partial(kind, average=average)
        for name, kind in (("precision", Precision), ("recall", Recall), ("f1", F1))
        for ending, average in (("", "auto"), ("_macro", "macro"), ("_micro", "micro"), ("_weighted", "weighted"))
    },
}


def names() -> list[str]:
    """Return the names of metrics; ``top`` with any number is one as well.

    >>> from ortrain import metrics
    >>> "accuracy" in metrics.names()
    True
    """
    return sorted([*_BY_NAME, "top5"])


def get(metric: Any, form: OutputForm | None = None) -> Metric:
    """Return a metric by its name, or of a function ``(targets, outputs) -> float``; a metric is returned itself.

    Args:
        metric: the name, the metric, or the function.
        form: the form of the model's outputs, for arguments that the metric was made without.

    Raises:
        InvalidArgumentError: for an unknown name.
        TypeError: for anything else.

    >>> from ortrain import metrics
    >>> metrics.get("top3")
    TopK(name='top3')
    >>> metrics.get("acuracy")
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: there is no metric 'acuracy'; did you mean 'accuracy'?

    """
    found = _named(metric) if isinstance(metric, str) else metric
    if isinstance(found, type) and issubclass(found, Metric):
        raise TypeError(f"a metric is the class {found.__name__}; call it: {found.__name__}()")
    if not isinstance(found, Metric):
        found = FunctionMetric(found)
    if form is not None:
        found.configure(form)
    return found


def _named(name: str) -> Metric:
    top = re.fullmatch(r"top_?(\d+)", name)
    if top and int(top[1]):
        return TopK(int(top[1]), name=name)
    if name not in _BY_NAME:
        near = hint(name, names())
        raise InvalidArgumentError(f"there is no metric {name!r}{near or '; there are ' + ', '.join(names())}")
    return _BY_NAME[name](name=name)


def get_all(metrics: Iterable[Any] | Any, form: OutputForm | None = None) -> list[Metric]:
    """Return metrics from one or several names, metrics and functions.

    Raises:
        InvalidArgumentError: for an unknown name, and for two metrics of one name.

    >>> from ortrain import metrics
    >>> metrics.get_all(["accuracy", "auroc"])
    [Accuracy(name='accuracy'), AUROC(name='auroc')]

    """
    if metrics is None:
        metrics = ()
    elif isinstance(metrics, (str, Metric)) or callable(metrics):
        metrics = (metrics,)
    found = [get(metric, form) for metric in metrics]
    taken: set[str] = set()
    for metric in found:
        if metric.name in taken or metric.name == "loss":
            raise InvalidArgumentError(f"two values of the history are named {metric.name!r}; set name= of the metric")
        taken.add(metric.name)
    return found
