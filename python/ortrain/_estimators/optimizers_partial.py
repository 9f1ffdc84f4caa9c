"""Training of a model with a loss function outside of its graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortrain._estimators.data_loader import OrtDataLoader
from ortrain._estimators.estimator import Estimator, failed, finite, random_like
from ortrain._estimators.excs import ConvergenceError, ConvergenceWarning
from ortrain._estimators.functions import Typed
from ortrain._estimators.sgd_learning_loss import BaseLearningLoss
from ortrain._estimators.sgd_learning_penalty import BaseLearningPenalty
from ortrain._estimators.sgd_learning_rate import BaseLearningRate
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain._public_name import public_name
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient.ortgradient import OrtGradientForwardBackward, OrtGradientForwardBackwardFunction
from ortrain.gradient.utils.onnx_helper import get_onnx_opset
from ortrain.gradient.utils.onnxruntime_helper import device_to_providers, numpy_to_ort_value
from ortrain.gradient.utils.orttraining_helper import get_train_initializer

__all__ = ["OrtGradientForwardBackwardOptimizer"]

_LOGGER = "onnxcustom"
_KINDS = {"weight": "state_", "grad": "state_grad_"}

Array = npt.NDArray[Any]
State = list["OrtValue | None"]


@public_name("ortrain.gradient.optimizers_partial")
class OrtGradientForwardBackwardOptimizer(Estimator):
    """Gradient descent on a model without a loss: separate functions compute the loss, a penalty and the update.

    A batch runs forward through the model and the loss, then backward through the gradient of the loss and the model.
    The penalty and the learning rate then update each weight in place. The model has one input. Its first output is the
    prediction.

    Args:
        model_onnx: the model.
        weights_to_train: names of initializers, in alphabetical order and in the order of the model;
            ``onnx_rename_weights`` gives a model names in this order. ``None``: all float initializers.
        loss_output_name: stored without effect, because the model has no loss.
        max_iter: the number of passes over the data.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: the number of rows of a batch; learning rates and recorded losses are divided by this number.
        learning_rate: a :class:`~ortrain.gradient.sgd_learning_rate.BaseLearningRate`, its name, or a float.
        device: ``"cpu"``, or an :class:`~ortrain.capi.OrtDevice`.
        warm_start: True if ``fit`` starts from the weights of the model, or of the previous ``fit``. Otherwise, the
            initial weights are drawn from the standard normal distribution (``numpy.random``).
        verbose: 1 for a progress bar, which requires the package ``tqdm``.
        validation_every: the number of passes between two evaluations; below 1, a fraction of ``max_iter``.
        learning_loss: a :class:`~ortrain.gradient.sgd_learning_loss.BaseLearningLoss`, or its name.
        enable_logging: True to log to the logger ``onnxcustom``.
        weight_name: ``"weight"`` if rows have weights.
        learning_penalty: a :class:`~ortrain.gradient.sgd_learning_penalty.BaseLearningPenalty`, its name, or ``None``.
        exc: True if a non-finite loss is an error; otherwise it is a warning, and training continues.

    Raises:
        TypeError: for a model that is not an ``onnx.ModelProto``.
        InvalidArgumentError: for an unknown name of a loss, a rate or a penalty.

    Source: ``onnxcustom.training.optimizers_partial.OrtGradientForwardBackwardOptimizer``.

    >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
    >>> OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], learning_loss="absolute").learning_loss
    AbsoluteLearningLoss()

    """

    def __init__(
        self,
        model_onnx: onnx.ModelProto,
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: BaseLearningRate | str | float = "SGD",
        device: str | OrtDevice = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        learning_loss: BaseLearningLoss | str = "square_error",
        enable_logging: bool = False,
        weight_name: str | None = None,
        learning_penalty: BaseLearningPenalty | str | None = None,
        exc: bool = True,
    ) -> None:
        self.max_iter = max_iter
        self._set_common(model_onnx, learning_rate, device, validation_every)
        if weights_to_train is None:
            weights_to_train = list(get_train_initializer(model_onnx))
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.training_optimizer_name = training_optimizer_name
        self.batch_size = batch_size
        self.warm_start = warm_start
        self.verbose = verbose
        self.learning_loss = BaseLearningLoss.select(learning_loss)
        self.enable_logging = enable_logging
        self.weight_name = weight_name
        self.learning_penalty = BaseLearningPenalty.select(learning_penalty)
        self.exc = exc
        self.build_onnx_function()

    @property
    def needs_grad(self) -> bool:
        """True if the learning rate needs a velocity for each weight.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> OrtGradientForwardBackwardOptimizer(model, learning_rate="Nesterov").needs_grad
        True
        """
        return self.learning_rate.needs_grad

    def build_onnx_function(self) -> None:
        """Builds the functions of loss, penalty and update; the constructor and ``set_params`` call this method.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> descent = OrtGradientForwardBackwardOptimizer(model)
        >>> descent.build_onnx_function()
        >>> descent.zero_onnx_.graph.output[0].name
        'Y'
        """
        opset, count = get_onnx_opset(self.model_onnx), len(self.weights_to_train)
        self.learning_loss.build_onnx_function(opset, self.device, self.weight_name)
        self.learning_rate.build_onnx_function(opset, self.device, count)
        self.learning_penalty.build_onnx_function(opset, self.device, count)
        self._zero = Typed("zero")
        self.zero_onnx_: onnx.ModelProto = self._zero.model
        self._logger = logging.getLogger(_LOGGER) if self.enable_logging else None

    def get_full_state(self, kind: str | Sequence[str] = "weight") -> Any:
        """Returns a value for each input of the training graph: ``None`` for inputs of the model, then the weights.

        Args:
            kind: ``"weight"``; ``"grad"`` for the velocities; or a list of these, which returns a list of lists.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for an unknown kind.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1)
        >>> _ = descent.fit(x, np.zeros((8, 10), np.float32))
        >>> [value and value.shape() for value in descent.get_full_state()]
        [None, [10]]

        """
        if not isinstance(kind, str):
            return [self.get_full_state(one) for one in kind]
        state = getattr(self, _attribute(kind), None)
        if state is None:
            raise AttributeError(f"there is no state of kind {kind!r} before fit")
        return list(state)

    def get_state(self, kind: str = "weight") -> list[OrtValue]:
        """Returns the weights or velocities that training updates, in the order of ``weights_to_train``.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for an unknown kind.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> OrtGradientForwardBackwardOptimizer(model).get_state()
        Traceback (most recent call last):
        AttributeError: there is no state of kind 'weight' before fit

        """
        state: State = self.get_full_state(kind)
        return [value for value in state[len(state) - len(self.weights_to_train) :] if value is not None]

    def set_state(
        self,
        state: Sequence[OrtValue | Array | None],
        check_trained: bool = True,
        kind: str = "weight",
        zero: bool = False,
    ) -> None:
        """Sets the weights, or the velocities.

        Args:
            state: a value or an array for each weight, or for each input of the training graph, with ``None`` for
                inputs of the model. Arrays are copied.
            check_trained: True if a call before ``fit`` is an error.
            kind: ``"weight"`` or ``"grad"``.
            zero: True to set zeros of the same shapes instead.

        Raises:
            AttributeError: before ``fit``, unless ``check_trained`` is ``False``.
            TypeError: for an element that is neither a value nor an array.
            InvalidArgumentError: for a wrong number of values, or if the type or shape of a value differs from the
                weight.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1)
        >>> _ = descent.fit(x, np.zeros((8, 10), np.float32))
        >>> descent.set_state([np.ones(10, np.float32)])
        >>> descent.get_state()[0].numpy().sum()
        np.float32(10.0)

        """
        if check_trained and getattr(self, "state_", None) is None:
            raise AttributeError("the state can be set only after fit")
        values: State = [self._value(value, at, zero) for at, value in enumerate(state)]
        count = len(self.weights_to_train)
        if len(values) == count:
            # The values of the weights only: add None for the single input of the model.
            values = [None, *values]
        if len(values) != count + 1 or any(value is None for value in values[1:]):
            raise InvalidArgumentError(
                f"expected one value for each of the {count} weights, after an optional None for the input, got "
                f"{len(state)} values"
            )
        initial = get_train_initializer(self.model_onnx)
        for name, value in zip(self.weights_to_train, values[1:], strict=True):
            if value is None or name not in initial:
                continue
            expected, found = initial[name][0], value.numpy()
            if (expected.dtype, expected.shape) != (found.dtype, found.shape):
                raise InvalidArgumentError(
                    f"weight {name!r} is {expected.dtype}{list(expected.shape)}, but the value is "
                    f"{found.dtype}{list(found.shape)}"
                )
        setattr(self, _attribute(kind), values)

    def _value(self, value: OrtValue | Array | None, at: int, zero: bool) -> OrtValue | None:
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            value = numpy_to_ort_value(np.array(value, order="C"), self.device)
        elif not isinstance(value, OrtValue):
            raise TypeError(f"state {at} must be an array, an OrtValue or None, got {type(value).__name__}")
        return self._zero.of(value)(X=value)[0] if zero else value

    @property
    def trained_coef_(self) -> dict[str, OrtValue]:
        """The weights by name.

        Raises:
            AttributeError: before ``fit``.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1)
        >>> list(descent.fit(x, np.zeros((8, 10), np.float32)).trained_coef_)
        ['fc2.bias']

        """
        return dict(zip(self.weights_to_train, self.get_state(), strict=True))

    def get_trained_onnx(self, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """Returns the model with the learned weights.

        Args:
            model: another model with initializers of these names; the trained model by default.

        Raises:
            AttributeError: before ``fit``.
            OrtrainError: for a model without one of the weights.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1)
        >>> trained = descent.fit(x, np.zeros((8, 10), np.float32)).get_trained_onnx()
        >>> trained.graph.output[0].name
        'logits'

        """
        return self._with_initializers(model, self.trained_coef_)

    def _learned(self) -> dict[str, list[Array]] | None:
        kinds = [kind for kind, name in _KINDS.items() if getattr(self, name, None) is not None]
        return {kind: [value.numpy() for value in self.get_state(kind)] for kind in kinds} or None

    def _learn(self, learned: dict[str, list[Array]]) -> None:
        for kind, values in learned.items():
            self.set_state(values, check_trained=False, kind=kind)

    def _info(self, message: str, *values: object) -> None:
        if self._logger is not None:
            self._logger.info(f"[{type(self).__name__}.fit] {message}", *values)

    def _debug(self, where: str, message: str, *values: object) -> None:
        if self._logger is not None:
            self._logger.debug(f"[{type(self).__name__}.{where}] {message}", *values)

    def fit(
        self,
        X: npt.ArrayLike,  # noqa: N803  (the name that scikit-learn's users know)
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
        X_val: npt.ArrayLike | None = None,  # noqa: N803
        y_val: npt.ArrayLike | None = None,
    ) -> OrtGradientForwardBackwardOptimizer:
        """Trains the model.

        Sets ``train_losses_``, the mean of ``loss / batch_size`` of each pass. Sets ``validation_losses_``, the loss
        per row of each evaluation, or ``None`` without validation data.

        Args:
            X: the features, of the type of the model's input.
            y: the targets, of the type of the output; int64 for the log loss. A vector becomes a column.
            sample_weight: a weight for each row; requires ``weight_name``.
            X_val: the features of the validation data.
            y_val: the targets of the validation data.

        Returns:
            The estimator.

        Raises:
            UnsupportedError: for another optimizer, an unavailable device, or a model with several inputs.
            InvalidArgumentError: for weights that are not in order or not initializers. Also for data of different
                numbers of rows, or of a type or shape that differs from the model. Also for row weights without
                ``weight_name``, and for ``weight_name`` without row weights.
            ConvergenceError: for a non-finite loss; the weights learned so far remain.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> np.random.seed(0)
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], batch_size=8, max_iter=20)
        >>> losses = descent.fit(x, np.zeros((8, 10), np.float32)).train_losses_
        >>> bool(losses[-1] < losses[0])
        True

        """
        self._check_optimizer()
        if sample_weight is not None and self.weight_name is None:
            raise InvalidArgumentError("sample_weight requires weight_name, which is None; set it to 'weight'")
        batches = OrtDataLoader(X, y, sample_weight, batch_size=self.batch_size, device=self.device)
        validation = self._validation_data(X_val, y_val)
        self._open()
        self._start()
        self.learning_rate.init_learning_rate()
        self.train_losses_: list[Any] = []
        self.validation_losses_: list[Any] | None = None if validation is None else []
        passes, bar = self._passes()
        for number in passes:
            loss = self._iteration(batches)
            rate = self.learning_rate.update_learning_rate(number).value
            self._info("lr value=%r", rate)
            self.train_losses_.append(loss)
            if bar is not None:
                bar.set_description(f"loss={loss:1.3g} lr={rate:1.3g}")
            if validation is not None and self.validation_losses_ is not None and self._validation(number):
                self.validation_losses_.append(self._evaluation(validation))
        self._info("end loss=%r", self.train_losses_[-1] if self.train_losses_ else None)
        return self

    def _validation_data(self, X: npt.ArrayLike | None, y: npt.ArrayLike | None) -> OrtDataLoader | None:  # noqa: N803
        if X is None and y is None:
            return None
        if X is None or y is None:
            raise InvalidArgumentError("X_val and y_val must be given together, got only one")
        return OrtDataLoader(X, y, batch_size=0, device=self.device, random_iter=False)

    def _open(self) -> None:
        """Creates the session that runs the passes."""
        self.train_session_ = OrtGradientForwardBackward(
            self.model_onnx,
            weights_to_train=self.weights_to_train,
            providers=device_to_providers(self.device),
        )
        cls = self.train_session_.cls_type_
        if len(cls._input_names) != 1:
            raise UnsupportedError(
                f"expected a model with one input for the rows of X, got {len(cls._input_names)} inputs "
                f"({', '.join(cls._input_names)})"
            )
        self.train_function_: OrtGradientForwardBackwardFunction = self.train_session_.new_instance()
        self.input_names_: list[str] = cls._grad_input_names
        self.output_names_: list[str] = cls._bw_fetches_names
        self._info("input_names=%r", self.input_names_)
        self._info("output_names=%r", self.output_names_)
        self._info("weights_to_train=%r", self.weights_to_train)
        self._info("device=%r|%r", self.device.device_id(), self.device.device_type())
        self._info("warm_start=%r", self.warm_start)

    def _start(self) -> None:
        """Sets the initial weights, and velocities of zero."""
        initial = [self.train_session_.get_initializer(name) for name in self.weights_to_train]
        if not self.warm_start:
            initial = [None if array is None else random_like(list(array.shape), array.dtype) for array in initial]
        if not self.warm_start or getattr(self, "state_", None) is None:
            self.set_state(initial, check_trained=False)
            self.state_grad_: State | None = None
        if not self.needs_grad:
            self.state_grad_ = None
        elif self.state_grad_ is None:
            self.set_state(initial, check_trained=False, kind="grad", zero=True)

    def _iteration(self, batches: OrtDataLoader) -> Any:
        """Trains on all batches once; returns the mean loss."""
        losses: list[Array] = []
        self._debug("_iteration", "iteration begin learning_rate=%r", self.learning_rate)
        weights = self.get_state()
        velocities: Sequence[OrtValue | None] = self.get_state("grad") if self.needs_grad else [None] * len(weights)
        for number, (features, labels, *rest) in enumerate(batches.iter_ortvalue()):
            self._debug("_iteration", "batch %d", number)
            loss, gradient = self._forward(features, labels, rest[0] if rest else None, weights, losses)
            gradients = list(self.train_function_.backward(gradient))[-len(weights) :]
            for at, (weight, velocity) in enumerate(zip(weights, velocities, strict=True)):
                self.learning_penalty.update_weights(at, self.device, weight)
                self.learning_rate.update_weights(at, self.device, weight, gradients[at], self.batch_size, velocity)
            self._debug("_iteration", "loss=%g n_weights=%d", loss, len(weights))
            losses.append(loss / self.batch_size)
        self._debug("_iteration", "iteration end")
        return np.array(losses).mean()

    def _forward(
        self,
        features: OrtValue,
        labels: OrtValue,
        row_weights: OrtValue | None,
        weights: list[OrtValue],
        losses: list[Array],
    ) -> tuple[Array, list[Array | OrtValue]]:
        """Returns the loss of a batch, and the gradients of the model's outputs."""
        outputs = self.train_function_.forward([features, *weights], training=True)
        try:
            value, gradient = self._loss(labels, outputs[0], row_weights)
            value = self.learning_penalty.penalty_loss(self.device, value, *weights)
            loss = value.numpy().reshape(-1)[0]
            if not finite(loss):
                self._diverged(failed(self.learning_rate, losses))
                loss = np.full_like(loss, np.nan)
        except BaseException:
            # The pass has no gradient and needs no backward pass.
            self.train_function_.states_.pop()
            raise
        others = [np.zeros(outputs[at].shape(), outputs[at].numpy().dtype) for at in range(1, len(outputs))]
        return loss, [gradient, *others]

    def _loss(self, labels: OrtValue, predicted: OrtValue, row_weights: OrtValue | None) -> tuple[OrtValue, OrtValue]:
        """Returns the loss of the predictions, and its gradient."""
        if labels.shape() != predicted.shape():
            raise InvalidArgumentError(
                f"y has rows of shape {labels.shape()[1:]}, but output {self.train_session_.output_names[0]!r} of "
                f"the model has {predicted.shape()[1:]}; {type(self.learning_loss).__name__} requires equal shapes"
            )
        return self.learning_loss.loss_gradient(self.device, labels, predicted, weight=row_weights)

    def _diverged(self, sentence: str) -> None:
        if self.exc:
            raise ConvergenceError(sentence)
        warnings.warn(sentence, ConvergenceWarning, stacklevel=2)

    def _evaluation(self, batches: OrtDataLoader) -> Any:
        """Returns the loss of the validation data, divided by the number of rows."""
        losses: list[Array] = []
        weights = self.get_state()
        for number, (features, labels) in enumerate(batches.iter_ortvalue()):
            self._debug("_evaluation", "batch %d", number)
            outputs = self.train_function_.forward([features, *weights], training=False)
            loss = self._loss(labels, outputs[0], None)[0].numpy().reshape(-1)[0]
            if not finite(loss):
                self._diverged(f"the loss of the validation data is not finite (losses before: {losses[-5:]})")
                loss = np.full_like(loss, np.nan)
            losses.append(loss)
        return np.array(losses).sum() / len(batches)

    def losses(
        self,
        X: npt.ArrayLike,  # noqa: N803
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
    ) -> Array:
        """Returns the loss of each row, in the order of the rows.

        Args:
            X: the features.
            y: the targets.
            sample_weight: a weight for each row.

        Returns:
            The losses, ``(rows,)``, of the type of ``X``, summed over columns.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for data that do not fit the model.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> targets = np.zeros((8, 10), np.float32)
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1).fit(x, targets)
        >>> descent.losses(x, targets).shape
        (8,)

        """
        weights = self.get_state()
        if not hasattr(self, "train_function_"):
            self._open()
        rows = OrtDataLoader(X, y, sample_weight, batch_size=0, device=self.device)
        found = np.empty(len(rows), rows.X_np.dtype)
        size = self.batch_size if self.batch_size > 0 else len(rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            features, labels, *rest = (numpy_to_ort_value(array[part], self.device) for array in rows.data_np)
            outputs = self.train_function_.forward([features, *weights], training=False)
            scores = self.learning_loss.loss_scores(self.device, labels, outputs[0], rest[0] if rest else None)
            found[part] = scores.numpy().reshape((len(found[part]), -1)).sum(axis=1)
        return found

    def score(
        self,
        X: npt.ArrayLike,  # noqa: N803
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
    ) -> float:
        """Returns the negative mean of the losses of the rows: a larger score is better.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for data that do not fit the model.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> targets = np.zeros((8, 10), np.float32)
        >>> descent = OrtGradientForwardBackwardOptimizer(model, ["fc2.bias"], max_iter=1).fit(x, targets)
        >>> descent.score(x, targets) == -descent.losses(x, targets).mean()
        np.True_

        """
        losses = self.losses(X, y, sample_weight)
        return float(-losses.sum() / len(losses))


def _attribute(kind: str) -> str:
    if kind not in _KINDS:
        raise InvalidArgumentError(f"unknown kind of state {kind!r}; expected one of {', '.join(map(repr, _KINDS))}")
    return _KINDS[kind]
