"""Base class of both estimators: the scikit-learn interface to a training."""

# ruff: noqa: N803, N806  (X is the name that scikit-learn has for a matrix)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ortrain import artifacts
from ortrain._model_source import ModelLike
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.sklearn import _checks, _convert, _graphs, _networks
from ortrain.sklearn._graphs import Array, ModelBuilder
from ortrain.sklearn._networks import Network, Selection
from ortrain.sklearn._training import Batches, Training

Estimator = TypeVar("Estimator", bound="OnnxEstimator")
OptimizerLike: TypeAlias = str | artifacts.OptimType | artifacts.AdamW | artifacts.SGD


class _Shown:
    """Placeholder for a model in the repr of an estimator, which omits the bytes of the model."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@dataclass(frozen=True)
class Targets:
    """Properties of the targets, known before the training starts."""

    outputs: int
    """How many outputs a model for them has."""
    attributes: dict[str, Any]
    """What the estimator keeps of them, once the model turns out to fit."""


class OnnxEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators. The two subclasses document their parameters."""

    n_iter_: int
    loss_curve_: list[float]
    validation_scores_: list[float] | None
    best_validation_score_: float | None
    _training: Training
    _input: _graphs.Input
    _losses: dict[str, artifacts.LossType | None]
    _classifies: bool

    def __init__(
        self,
        model: ModelLike | ModelBuilder,
        *,
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
        self.model = model
        self.output = output
        self.loss = loss
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.warm_start = warm_start
        self.train = train
        self.allow_nan = allow_nan
        self.on_epoch = on_epoch
        self.num_threads = num_threads

    # Methods that differ between a classifier and a regressor.

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        raise NotImplementedError

    def _new_targets(self, y: Array) -> Targets:
        """Inspect the targets before the training starts."""
        raise NotImplementedError

    def _previous_targets(self) -> Targets:
        """Return the properties of the targets of the previous training."""
        raise NotImplementedError

    def _check_columns(self, network: Network, targets: Targets) -> None:
        """Raise an error if the model has a different number of outputs."""
        raise NotImplementedError

    def _targets(self, y: Array) -> Array:
        """Return the targets in the form that the loss compares with the scores."""
        raise NotImplementedError

    def _usual(self, targets: Array) -> float:
        """Return the approximate loss of a constant prediction."""
        raise NotImplementedError

    def _decided(self, scores: Array) -> Array:
        """Convert scores to predictions."""
        raise NotImplementedError

    def _scored(self, y: Array, predicted: Array, weights: Array) -> float:
        """Return the score of predictions; a larger score is better."""
        raise NotImplementedError

    # Methods that both estimators share.

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_training")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.allow_nan
        return tags

    def _more_tags(self) -> dict[str, Any]:
        """Return the tags for scikit-learn before 1.6."""
        return {"allow_nan": self.allow_nan}

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        parameters = self.get_params(deep=False)
        model = parameters["model"]
        size = len(model) if isinstance(model, bytes) else model.ByteSize() if hasattr(model, "ByteSize") else None
        if size is not None:
            parameters["model"] = _Shown(f"<ONNX model of {size} bytes>")
        return str(BaseEstimator.__repr__(type(self)(**parameters), N_CHAR_MAX))

    def fit(self: Estimator, X: Any, y: Any, sample_weight: Any = None) -> Estimator:
        """Train from the weights of the model, or with ``warm_start`` from the weights of the previous training.

        Args:
            X: a matrix with one row for each sample, or an array of rows of the model's input shape.
            y: a target for each row.
            sample_weight: a non-negative weight for each row. A row contributes its loss, times its weight, divided by
                the mean of all weights; the loss of a batch is the mean over its rows. Rows of weight 0 are omitted.
                If all rows are in one batch, a weight of k is equivalent to k copies of the row.

        Returns:
            The estimator.

        Raises:
            ValueError: for data that scikit-learn rejects: NaN, infinities, sparse or ragged matrices.
            InvalidArgumentError: a ``ValueError``, for invalid parameters or weights. Also for targets that do not fit
                the outputs of the model, and for a loss that does not fit the outputs.
            ConvergenceError: if the loss or a weight is no longer finite, or the loss is far above its first value; the
                estimator then has the weights from before that pass.
            InvalidModelError, UnsupportedError, NoSuchFileError: if the model cannot be read or trained.

        >>> from ortrain.sklearn import OnnxClassifier
        >>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), max_iter=30)
        >>> classifier.fit(x, labels, sample_weight=np.arange(1.0, 9.0)).n_iter_ <= 30
        True

        """
        with self._as_it_was():
            _checks.check_parameters(self)
            X, y = self._validated(X, y, reset=True)
            X, y, weights = _counting(X, y, sample_weight)
            rng = check_random_state(self.random_state)
            warm = self.warm_start and self.__sklearn_is_fitted__()
            self._start(
                X, rng, self._previous_targets() if warm else self._new_targets(y), self._training if warm else None
            )
            validation: tuple[Batches, Array] | None = None
            if self.early_stopping:
                X, X_holdout, y, y_holdout, weights, holdout_weights = self._split(X, y, weights, rng)
                validation = self._batches(X_holdout, y_holdout, holdout_weights), y_holdout
            batches = self._batches(X, y, weights)
        if validation is not None:
            self.validation_scores_ = []
        self._learn(batches, validation, rng)
        return self

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restore the attributes of the estimator if the block raises an error."""
        before = self.__dict__.copy()
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _start(self, X: Array, rng: np.random.RandomState, targets: Targets, earlier: Training | None = None) -> None:
        """Create the training from the model, or from the weights of an earlier training."""
        if earlier is None:
            proto = _graphs.read_model(self.model, math.prod(X.shape[1:]), targets.outputs)
            model_input = _graphs.input_of(proto)
            rows = _checks.rows_of(X[:1], model_input)
            network = _networks.network(
                proto, classifier=self._classifies, output=self.output, train=self.train, rows=rows
            )
        else:
            model_input, network = self._input, _networks.with_weights(earlier.network, earlier.values(), self.train)
        self._begin(model_input, network, targets, rng)

    def _begin(
        self, model_input: _graphs.Input, network: Network, targets: Targets, rng: np.random.RandomState
    ) -> None:
        self._check_columns(network, targets)
        self._training = Training(
            network,
            loss=self._loss(network),
            optimizer=_checks.optimizer_of(self.optimizer, self.weight_decay),
            num_threads=self.num_threads,
            seed=int(rng.randint(np.iinfo(np.int32).max)),
        )
        self._input, self._rng = model_input, rng
        self.n_iter_ = 0
        self.loss_curve_ = []
        self.validation_scores_ = self.best_validation_score_ = None
        self.__dict__.update(targets.attributes)

    def _loss(self, network: Network) -> str:
        """Return the name of the loss; an unknown loss is an error."""
        known: dict[Any, str] = {name: name for name in self._losses}
        known |= {kind: name for name, kind in self._losses.items() if kind is not None}
        if self.loss == "auto":
            return next(iter(self._losses))
        if not isinstance(self.loss, (str, artifacts.LossType)) or self.loss not in known:
            names = ", ".join(map(repr, ["auto", *self._losses]))
            raise InvalidArgumentError(
                f'loss={self.loss!r} does not fit the output "{network.shown}" of shape {network.shape}; the losses '
                f"of {type(self).__name__} are {names}{hint(self.loss, self._losses)}"
            )
        return known[self.loss]

    def _split(self, X: Array, y: Array, weights: Array, rng: np.random.RandomState) -> Any:
        stratify = y if self._classifies else None
        parts = train_test_split(X, y, weights, test_size=self.validation_fraction, random_state=rng, stratify=stratify)
        if len(parts[1]) < 2:
            raise InvalidArgumentError(
                f"early stopping requires at least 2 validation rows, got {len(parts[1])} of {len(X)}; pass more "
                "rows, or a larger validation_fraction"
            )
        return parts

    def _batches(self, X: Array, y: Array, weights: Array) -> Batches:
        dtype = self._training.network.dtype
        targets = self._targets(y)
        return Batches(
            _checks.rows_of(X, self._input),
            targets,
            (weights / weights.mean()).astype(dtype)[:, None],
            self._usual(targets),
        )

    def _learn(self, batches: Batches, validation: tuple[Batches, Array] | None, rng: np.random.RandomState) -> None:
        best, best_values, waited = -math.inf, None, 0
        for _ in range(self.max_iter):
            self._pass(batches, rng)
            quality = -self.loss_curve_[-1]
            if validation is not None:
                quality = self._validation_score(*validation)
                assert self.validation_scores_ is not None
                self.validation_scores_.append(quality)
            waited = 0 if quality > best + self.tol else waited + 1
            if quality > best:
                best = quality
                if validation is not None:
                    self.best_validation_score_ = quality
                    best_values = self._training.values()
            stop_requested = self.on_epoch is not None and self.on_epoch(self) is True
            if stop_requested or waited >= self.n_iter_no_change:
                break
        if best_values is not None:
            self._training.restore(best_values)

    def _pass(self, batches: Batches, rng: np.random.RandomState) -> None:
        order = rng if self.shuffle else None
        loss = self._training.run(batches, self.batch_size, order, float(self.learning_rate))
        self.n_iter_ += 1
        self.loss_curve_.append(loss)

    def _validation_score(self, batches: Batches, y: Array) -> float:
        size = self._training.block(self.batch_size, batches.rows.shape[1:])
        scores = self._training.scores(batches, size)
        if not np.isfinite(scores).all():
            # No score is worse. The next pass reports the non-finite loss as an error.
            return -math.inf
        return self._scored(y, self._decided(scores), batches.weights[:, 0])

    def _fitted_partially(
        self: Estimator, X: Any, y: Any, sample_weight: Any, targets: Targets | None = None
    ) -> Estimator:
        with self._as_it_was():
            _checks.check_parameters(self)
            if self.early_stopping:
                raise InvalidArgumentError(
                    "partial_fit does not support early_stopping: it makes one pass over all rows, without "
                    "validation rows"
                )
            first = not self.__sklearn_is_fitted__()
            X, y = self._validated(X, y, reset=first)
            X, y, weights = _counting(X, y, sample_weight)
            if first:
                self._start(X, check_random_state(self.random_state), targets or self._new_targets(y))
            batches = self._batches(X, y, weights)
        self._pass(batches, self._rng)
        return self

    def _predictions(self, X: Any) -> tuple[Array, ...]:
        check_is_fitted(self)
        X = _checks.validated(self, X, allow_nan=self.allow_nan, reset=False)
        rows = _checks.rows_of(X, self._input)
        return self._training.predict(rows, self._training.block(self.batch_size, rows.shape[1:]))

    def predict(self, X: Any) -> Array:
        """Predict a label for each row (classifier), or numbers of the shape of ``y`` (regressor).

        Args:
            X: like the X of :meth:`fit`.

        Raises:
            NotFittedError: of scikit-learn, before :meth:`fit`.
            ValueError: for data that scikit-learn rejects, and for a different number of features.

        >>> from ortrain.sklearn import OnnxClassifier
        >>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), max_iter=1)
        >>> classifier.fit(x, labels).predict(x).shape
        (8,)

        """
        return self._decided(self._predictions(X)[0])

    def to_onnx(self) -> bytes:
        """Return the trained model for inference, with its original inputs and outputs, for batches of any size.

        Raises:
            NotFittedError: of scikit-learn, before :meth:`fit`.

        >>> from ortrain.sklearn import OnnxClassifier
        >>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), max_iter=5).fit(x, labels)
        >>> session = ortrain.InferenceSession(classifier.to_onnx())
        >>> (logits,) = session.run(["logits"], {"x": x})
        >>> bool((classifier.classes_[logits.argmax(axis=1)] == classifier.predict(x)).all())
        True

        """
        check_is_fitted(self)
        return self._training.to_onnx()

    @classmethod
    def from_estimator(cls: type[Estimator], fitted: Any, X: Any = None, **parameters: Any) -> Estimator:
        """Create an estimator from a fitted scikit-learn estimator: it predicts the same and can be trained further.

        The package skl2onnx converts ``fitted`` and must be installed. Each ``fit`` starts from the converted weights,
        and so does the first ``partial_fit``. The training changes the coefficients and intercepts of linear models and
        networks. The constants of scalers and imputers before them do not change.

        Args:
            fitted: a fitted estimator or pipeline that has a gradient: ``MLPClassifier``, ``LogisticRegression``,
                ``Ridge`` and so on, but no trees.
            X: example rows like the rows of its training, of float32, float64 or integers, which set the input type of
                the model. ``None`` for float32.
            parameters: parameters of the constructor, except the model, the classes and the output.

        Raises:
            NotFittedError: of scikit-learn, if ``fitted`` is not fitted.
            InvalidArgumentError: if ``fitted`` is a classifier and this class a regressor, or vice versa.
            UnsupportedError: if skl2onnx or ortrain does not support the estimator. Decision trees have no gradient.
            ModuleNotFoundError: without skl2onnx.

        >>> from sklearn.linear_model import LogisticRegression
        >>> from ortrain.sklearn import OnnxClassifier
        >>> fitted = LogisticRegression().fit(x, labels)
        >>> classifier = OnnxClassifier.from_estimator(fitted, max_iter=20, random_state=0)
        >>> bool((classifier.predict(x) == fitted.predict(x)).all())
        True
        >>> classifier.fit(x, labels).loss_curve_[-1] < classifier.loss_curve_[0]
        True

        """
        check_is_fitted(fitted)
        if not (is_classifier if cls._classifies else is_regressor)(fitted):
            kind = "classifier" if cls._classifies else "regressor"
            raise InvalidArgumentError(f"{cls.__name__}.from_estimator requires a {kind}, got {type(fitted).__name__}")
        fixed = sorted({"model", "classes", "output"}.intersection(parameters))
        if fixed:
            raise InvalidArgumentError(
                f"{', '.join(fixed)} cannot be passed here: the fitted estimator determines the values"
            )
        found = _convert.converted(fitted, X, parameters.get("train", "all"), classifier=cls._classifies)
        estimator = cls(found.model, output=found.output, **cls._of_fitted(fitted), **parameters)
        _checks.check_parameters(estimator)
        estimator.n_features_in_ = found.rows.shape[1]
        if hasattr(fitted, "feature_names_in_"):
            estimator.feature_names_in_ = fitted.feature_names_in_
        rng = check_random_state(estimator.random_state)
        estimator._begin(found.input, found.network, estimator._new_targets(found.predicted), rng)
        return estimator

    @classmethod
    def _of_fitted(cls, fitted: Any) -> dict[str, Any]:
        """Return the parameters that follow from a fitted estimator."""
        return {"allow_nan": _convert.takes_nan(fitted)}


def _counting(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array]:
    """Return the rows of positive weight, with their targets and weights."""
    weights = _checks.weights_of(sample_weight, len(X))
    counts = weights > 0
    return (X, y, weights) if counts.all() else (X[counts], y[counts], weights[counts])
