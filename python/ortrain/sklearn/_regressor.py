"""Regressor with an ONNX model."""

# ruff: noqa: N803  (X is the name that scikit-learn has for a matrix)

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from ortrain import artifacts
from ortrain.errors import InvalidArgumentError
from ortrain.sklearn import _checks
from ortrain.sklearn._estimator import OnnxEstimator, Targets
from ortrain.sklearn._graphs import Array
from ortrain.sklearn._networks import Network


class OnnxRegressor(RegressorMixin, OnnxEstimator):  # type: ignore[misc]
    """Regressor that trains an ONNX model.

    Args:
        model: an ONNX model with one input and one output column for each target; the first axis is the batch. It is a
            path, bytes, an ``onnx.ModelProto``, or a callable ``(n_features, n_targets)`` that returns a model.
        output: the value to use as the output of the model; ``None`` for its first output.
        loss: ``"auto"``, the name of a loss, or its member of :class:`ortrain.LossType`. With d = output - target, the
            losses are ``"squared_error"``: d², ``"absolute_error"``: abs(d), and ``"huber"``: d²/2 if abs(d) is below
            1, else abs(d) - 1/2. ``"auto"`` is the first. The loss of a row is the mean over its elements.
        optimizer: an optimizer; :class:`OnnxClassifier` describes this and the following parameters in detail. The
            score of early stopping is the coefficient of determination, R².
        learning_rate: the learning rate of each step.
        weight_decay: the weight decay of ``"adamw"``.
        batch_size: the number of rows of a step; ``None`` for all rows at once.
        max_iter: the maximum number of passes of a ``fit``.
        shuffle: True if each pass shuffles the rows.
        random_state: the source of random numbers.
        early_stopping: True to hold out validation rows and to end the training when their score does not improve.
        validation_fraction: the fraction of the rows to hold out.
        n_iter_no_change: the number of consecutive passes without improvement after which the training ends.
        tol: the minimum improvement, of the score or the loss.
        warm_start: True if ``fit`` starts from the weights of the previous training.
        train: the parameters to train.
        allow_nan: True if X may have NaN.
        on_epoch: a callable that receives the estimator after each pass of a ``fit``.
        num_threads: the number of threads of the process; ``None`` does not change the number.

    Attributes: the attributes of :class:`OnnxClassifier`, except ``classes_``.

    Source: estimators of scikit-learn (``sklearn.neural_network.MLPRegressor``), with an ONNX model as a parameter.

    >>> import ortrain
    >>> from ortrain.sklearn import OnnxRegressor
    >>> regressor = OnnxRegressor(ortrain.examples.perceptron(), max_iter=50, random_state=0)
    >>> wanted = x[:, :10] - x[:, 10:20]
    >>> regressor.fit(x, wanted).predict(x).shape
    (8, 10)
    >>> regressor.score(x, wanted) > 0.5
    True

    """

    _classifies = False
    _losses = {  # noqa: RUF012
        "squared_error": artifacts.LossType.MSELoss,
        "absolute_error": artifacts.LossType.L1Loss,
        "huber": None,
    }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _more_tags(self) -> dict[str, Any]:
        return super()._more_tags() | {"multioutput": True}

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        rows, numbers = _checks.validated(
            self, X, y=y, allow_nan=self.allow_nan, reset=reset, multi_output=True, y_numeric=True
        )
        if numbers.ndim > 2:
            shape = list(numbers.shape)
            raise InvalidArgumentError(f"y must have a number or a row for each row of X, got the shape {shape}")
        return rows, numbers

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train for one pass over these rows, from the current weights and the current state of the optimizer.

        The first call starts from the weights of the model. It fixes the model, the loss, the optimizer and the
        selection of trained parameters. Changes of the learning rate and the batch size take effect at each call.

        Args:
            X: like the X of :meth:`fit`, with the features of the first call.
            y: a target for each row.
            sample_weight: like the weights of :meth:`fit`, but divided by the mean of the weights of this call.

        Returns:
            The estimator.

        Raises:
            ValueError: like :meth:`fit`; for a different number of features, and with ``early_stopping``.
            ConvergenceError: like :meth:`fit`.

        >>> from ortrain.sklearn import OnnxRegressor
        >>> regressor = OnnxRegressor(ortrain.examples.perceptron())
        >>> for _ in range(3):
        ...     _ = regressor.partial_fit(x, np.zeros((8, 10)))
        >>> regressor.n_iter_
        3

        """
        return self._fitted_partially(X, y, sample_weight)

    def _new_targets(self, y: Array) -> Targets:
        return Targets(1 if y.ndim == 1 else int(y.shape[1]), {"_single": y.ndim == 1})

    def _previous_targets(self) -> Targets:
        return Targets(self._training.network.columns, {"_single": self._single})

    def _check_columns(self, network: Network, targets: Targets) -> None:
        if network.columns != targets.outputs:
            raise InvalidArgumentError(
                f"y has {targets.outputs} number{'' if targets.outputs == 1 else 's'} for each row, but the output "
                f'"{network.shown}" has the shape {network.shape}'
            )

    def _targets(self, y: Array) -> Array:
        dtype = self._training.network.dtype
        self._check_columns(self._training.network, self._new_targets(y))
        with np.errstate(over="ignore"):
            targets = np.asarray(y, dtype).reshape(len(y), -1)
        if not np.isfinite(targets).all():
            raise InvalidArgumentError(f"y has a value that is too large for {dtype}, the element type of the output")
        return targets

    def _usual(self, targets: Array) -> float:
        sizes = np.abs(targets.astype(np.float64))
        squared = self._loss(self._training.network) == "squared_error"
        return max(1.0, float(np.mean(sizes**2 if squared else sizes)))

    def _decided(self, scores: Array) -> Array:
        return scores[:, 0] if self._single else scores

    def _scored(self, y: Array, predicted: Array, weights: Array) -> float:
        # Squares of large float32 numbers overflow float32.
        y, predicted = (np.asarray(values, np.float64) for values in (y, predicted))
        return float(r2_score(y, predicted, sample_weight=weights))
