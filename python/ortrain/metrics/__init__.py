"""Metrics: accuracy, errors, areas. They accumulate over batches, and equal the metrics of one large batch.

``Model(..., metrics=["accuracy", "top5"])`` takes their names, the classes below, and functions
``(targets, outputs) -> float`` such as ``sklearn.metrics.log_loss``.

=======================================  ==================================================================
``"accuracy"``, ``"acc"``                :class:`Accuracy`: share of right decisions
``"top5"``, ``"top3"`` ...               :class:`TopK`: the right class is among the k highest scores
``"precision"``, ``"precision_macro"``   :class:`Precision`; also ``_micro``, ``_weighted``
``"recall"``, ``"recall_macro"``         :class:`Recall`; likewise
``"f1"``, ``"f1_macro"``                 :class:`F1`; likewise
``"auroc"``, ``"auc"``                   :class:`AUROC`: area under the ROC curve, exact
``"mae"``, ``"mse"``, ``"rmse"``         :class:`MeanAbsoluteError` and so on
``"r2"``                                 :class:`R2`: coefficient of determination
``"perplexity"``                         :class:`Perplexity`: exponential of the cross-entropy per token
=======================================  ==================================================================

>>> from ortrain import metrics
>>> accuracy = metrics.get("accuracy")
>>> accuracy.update([0, 1, 1], [[0.75, 0.25], [0.25, 0.75], [0.75, 0.25]])
>>> accuracy.update([0], [[0.75, 0.25]])
>>> accuracy.result()
0.75
"""

from ortrain.metrics._classification import F1, Accuracy, Precision, Recall, TopK
from ortrain.metrics._function import FunctionMetric
from ortrain.metrics._metric import Metric, OutputForm
from ortrain.metrics._names import get, get_all, names
from ortrain.metrics._ranking import AUROC
from ortrain.metrics._regression import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from ortrain.metrics._text import Perplexity

__all__ = [
    "AUROC",
    "F1",
    "R2",
    "Accuracy",
    "FunctionMetric",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "OutputForm",
    "Perplexity",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "TopK",
    "get",
    "get_all",
    "names",
]
