"""Classifier with an ONNX model."""

# ruff: noqa: N803  (X is the name that scikit-learn has for a matrix)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets

from ortrain import artifacts
from ortrain._model_source import ModelLike
from ortrain.errors import InvalidArgumentError
from ortrain.sklearn import _checks
from ortrain.sklearn._estimator import OnnxEstimator, OptimizerLike, Targets
from ortrain.sklearn._graphs import Array, ModelBuilder
from ortrain.sklearn._networks import Network, Selection


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]
    """Classifier that trains an ONNX model.

    The loss applies to logits: the output of the model, or the input of its final Softmax, LogSoftmax or Sigmoid. For a
    converted scikit-learn classifier, they are the values from which it computes its probabilities. For two or more
    columns, the probabilities are a softmax and the loss is cross-entropy. A single column is the logit of the second
    of two classes: the probability is its sigmoid and the loss is binary cross-entropy.

    Args:
        model: an ONNX model with one input and one output column for each class; the first axis is the batch. It is a
            path, bytes, an ``onnx.ModelProto``, or a callable ``(n_features, n_classes)`` that returns a model.
        classes: the label of each column of the model. ``None`` for the sorted labels of ``y``, which must then contain
            all classes.
        output: the value to use as the output of the model. ``None`` for its first output or, if the first output is a
            label, for the probabilities of the label.
        loss: ``"cross_entropy"``, ``"binary_cross_entropy"``, their members of :class:`ortrain.LossType`, or ``"auto"``
            for the loss that fits the output.
        optimizer: ``"adamw"``, ``"sgd"``, or an :class:`ortrain.artifacts.AdamW` or :class:`ortrain.artifacts.SGD` with
            settings.
        learning_rate: the learning rate of each step.
        weight_decay: the weight decay of ``"adamw"``.
        batch_size: the number of rows of a step; the last batch of a pass may be smaller. ``None`` for all rows at
            once.
        max_iter: the maximum number of passes of a ``fit``.
        shuffle: True if each pass shuffles the rows.
        random_state: the source of random numbers for the order of rows, the held-out rows and Dropout masks. The same
            number gives bit-identical results.
        early_stopping: True to hold out validation rows. The training ends if their score, the accuracy, does not
            improve; the weights are then the weights of the best score. If False, the training ends if the loss does
            not improve.
        validation_fraction: the fraction of the rows to hold out, stratified by class.
        n_iter_no_change: the number of consecutive passes without improvement after which the training ends.
        tol: the minimum improvement, of the score or the loss.
        warm_start: True if ``fit`` starts from the weights of the previous training.
        train: ``"all"`` parameters that :func:`ortrain.inspect` reports as trained; a number of layers from the end; or
            names, patterns or a callable, like ``requires_grad`` of :func:`ortrain.artifacts.generate_artifacts`.
        allow_nan: True if X may have NaN, for models that replace NaN.
        on_epoch: a callable that receives the estimator after each pass of a ``fit``, for example to read
            ``loss_curve_`` or to save a file. The training ends if it returns ``True``.
        num_threads: the number of threads of the process; ``None`` does not change the number.

    Attributes: ``classes_``, sorted; ``n_features_in_``; ``feature_names_in_`` if X has names; ``n_iter_``, the number
    of passes; ``loss_curve_``, the mean loss of each pass; ``validation_scores_`` and ``best_validation_score_``,
    ``None`` without early stopping.

    Source: estimators of scikit-learn (``sklearn.neural_network.MLPClassifier``), with an ONNX model as a parameter.

    >>> import ortrain
    >>> from ortrain.sklearn import OnnxClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), learning_rate=0.01)
    >>> pipeline = make_pipeline(StandardScaler(), classifier).fit(x, labels)
    >>> pipeline.score(x, labels)
    1.0

    """

    _classifies = True
    _losses = {  # noqa: RUF012
        "cross_entropy": artifacts.LossType.CrossEntropyLoss,
        "binary_cross_entropy": artifacts.LossType.BCEWithLogitsLoss,
    }

    def __init__(
        self,
        model: ModelLike | ModelBuilder,
        *,
        classes: Sequence[Any] | npt.NDArray[Any] | None = None,
        output: str | None = None,
        loss: str | artifacts.LossType = "auto",
        optimizer: OptimizerLike = "adamw",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        batch_size: int | None = 32,
        max_iter: int = 100,
        shuffle: bool = True,
        random_state: int | np.random.RandomState | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        warm_start: bool = False,
        train: Selection = "all",
        allow_nan: bool = False,
        on_epoch: Callable[[Any], bool | None] | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(
            model,
            output=output,
            loss=loss,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            max_iter=max_iter,
            shuffle=shuffle,
            random_state=random_state,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            tol=tol,
            warm_start=warm_start,
            train=train,
            allow_nan=allow_nan,
            on_epoch=on_epoch,
            num_threads=num_threads,
        )
        self.classes = classes

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> OnnxClassifier:
        """Train for one pass over these rows, from the current weights and the current state of the optimizer.

        Args:
            X: like the X of :meth:`fit`, with the features of the first call.
            y: a label for each row; a batch may lack some of the classes.
            classes: all labels of the training. Required at the first call, unless the constructor or
                :meth:`from_estimator` sets the classes.
            sample_weight: like the weights of :meth:`fit`, but divided by the mean of the weights of this call.

        Returns:
            The estimator.

        Raises:
            ValueError: like :meth:`fit`; for a first call without classes, for different classes later, for a label
                outside of the classes, and with ``early_stopping``.
            ConvergenceError: like :meth:`fit`.

        >>> from ortrain.sklearn import OnnxClassifier
        >>> classifier = OnnxClassifier(ortrain.examples.perceptron())
        >>> for _ in range(3):
        ...     _ = classifier.partial_fit(x, labels, classes=range(10))
        >>> classifier.n_iter_
        3

        """
        known = self.__sklearn_is_fitted__()
        if classes is None:
            if self.classes is None and not known:
                raise InvalidArgumentError(
                    "the first call of partial_fit requires classes, because a batch need not have every label"
                )
            return self._fitted_partially(X, y, sample_weight)
        labels, order = _sorted_classes(classes)
        if known or self.classes is not None:
            there, order = (self.classes_, order) if known else _sorted_classes(self.classes)
            if not np.array_equal(labels, there):
                raise InvalidArgumentError(
                    f"classes must not change: they are {_checks.listed(labels)} here, but {_checks.listed(there)} "
                    + ("before" if known else "in the constructor")
                )
        else:
            # The order of the classes has no meaning here, like in scikit-learn.
            order = np.arange(len(labels))
        return self._fitted_partially(X, y, sample_weight, _targets(labels, order))

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        rows, labels = _checks.validated(self, X, y=y, allow_nan=self.allow_nan, reset=reset)
        check_classification_targets(labels)
        return rows, labels

    def _new_targets(self, y: Array) -> Targets:
        if self.classes is not None:
            return _targets(*_sorted_classes(self.classes))
        found = np.unique(y)
        if len(found) < 2:
            raise InvalidArgumentError(
                f"y has only one class, {_checks.listed(found)}; a classifier requires at least two (pass classes "
                "for labels that y does not have)"
            )
        return _targets(found, np.arange(len(found)))

    def _previous_targets(self) -> Targets:
        return _targets(self.classes_, self._column_of)

    def _check_columns(self, network: Network, targets: Targets) -> None:
        if max(network.columns, 2) != targets.outputs:
            raise InvalidArgumentError(
                f"there are {targets.outputs} classes, {_checks.listed(targets.attributes['classes_'])}, but the "
                f'output "{network.shown}" has the shape {network.shape}; name the class of each column in classes, or '
                f"replace the head: artifacts.replace_head(model, {targets.outputs})"
            )

    def _loss(self, network: Network) -> str:
        loss = super()._loss(network)
        fits = {"cross_entropy": network.columns > 1, "binary_cross_entropy": network.columns == 1}
        if self.loss != "auto" and not fits[loss]:
            wants, other = (
                ("a column for each class", "binary_cross_entropy")
                if loss == "cross_entropy"
                else ("one column, the logit of the second class", "cross_entropy")
            )
            raise InvalidArgumentError(
                f'loss={loss!r} requires {wants}, but the output "{network.shown}" has the shape {network.shape}; '
                f"use {other!r}"
            )
        return loss

    def _targets(self, y: Array) -> Array:
        return np.asarray(self._column_of[_checks.positions_of(y, self.classes_)], np.int64)[:, None]

    def _usual(self, targets: Array) -> float:
        return math.log(len(self.classes_))

    def _decided(self, scores: Array) -> Array:
        found: Array = self.classes_[scores[:, self._column_of].argmax(axis=1)]
        return found

    def _scored(self, y: Array, predicted: Array, weights: Array) -> float:
        return float(accuracy_score(y, predicted, sample_weight=weights))

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class for each row, in the order of ``classes_`` and the type of the scores.

        The probabilities are the softmax of the logits of the loss. For a single logit, the sigmoid is the probability
        of the second class.

        Args:
            X: like the X of :meth:`fit`.

        Raises:
            NotFittedError: of scikit-learn, before :meth:`fit`.
            ValueError: for data that scikit-learn rejects, and for a different number of features.

        >>> from ortrain.sklearn import OnnxClassifier
        >>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), max_iter=1).fit(x, labels)
        >>> probabilities = classifier.predict_proba(x)
        >>> probabilities.shape, np.allclose(probabilities.sum(axis=1), 1)
        ((8, 10), True)

        """
        return np.ascontiguousarray(self._predictions(X)[1][:, self._column_of])

    @classmethod
    def _of_fitted(cls, fitted: Any) -> dict[str, Any]:
        return super()._of_fitted(fitted) | {"classes": np.asarray(fitted.classes_)}


def _targets(classes: Array, order: Array) -> Targets:
    return Targets(len(classes), {"classes_": classes, "_column_of": order})


def _sorted_classes(classes: Any) -> tuple[Array, Array]:
    """Return the sorted labels, and the model column of each label."""
    labels = np.asarray(list(classes))
    if labels.ndim != 1 or len(labels) < 2:
        raise InvalidArgumentError(f"classes must be two labels or more, got {classes!r}")
    found, order = np.unique(labels, return_index=True)
    if len(found) != len(labels):
        raise InvalidArgumentError(f"classes must be different labels, got {_checks.listed(labels)}")
    return found, order
