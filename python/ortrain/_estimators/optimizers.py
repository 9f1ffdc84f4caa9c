"""Training of a model with a loss in its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortrain import _files
from ortrain._estimators.data_loader import OrtDataLoader
from ortrain._estimators.estimator import Estimator, failed, finite, names_of, random_like
from ortrain._estimators.excs import ConvergenceError, EvaluationError
from ortrain._estimators.sgd_learning_rate import BaseLearningRate
from ortrain._model_source import PathLike
from ortrain._options import RunOptions
from ortrain._ortrain import OrtDevice
from ortrain._public_name import public_name
from ortrain._suggest import hint
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.gradient.graph import grad
from ortrain.gradient.utils.onnx_helper import get_onnx_opset
from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value

__all__ = ["OrtGradientOptimizer"]

_RATE = "Learning_Rate"

Array = npt.NDArray[Any]


@public_name("ortrain.gradient.optimizers")
class OrtGradientOptimizer(Estimator):
    """Gradient descent on a model with a loss as an output and labels as an input.

    An ``ortrain.classic.TrainingSession`` trains the model, ``train_session_`` after ``fit``: one ``run`` for each
    batch.

    Args:
        model_onnx: the model, with inputs for features, labels and, if rows have weights, row weights, in this order
            (:func:`~ortrain.gradient.utils.orttraining_helper.add_loss_output` adds the inputs).
        weights_to_train: names of initializers, in any order.
        loss_output_name: the name of the loss output.
        max_iter: the number of passes over the data.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: the number of rows of a batch. The learning rate is divided by this number, then rounded to float32.
        learning_rate: a :class:`~ortrain.gradient.sgd_learning_rate.BaseLearningRate` without velocity, its name, or a
            float.
        device: ``"cpu"``, or an :class:`~ortrain.capi.OrtDevice`.
        warm_start: True if ``fit`` starts from the weights of the model, or of the previous ``fit``. Otherwise, the
            initial weights are drawn from the standard normal distribution (``numpy.random``).
        verbose: 1 for a progress bar, which requires the package ``tqdm``.
        validation_every: the number of passes between two evaluations; below 1, a fraction of ``max_iter``.
        saved_gradient: a file that ``fit`` writes the model with its gradients to. ``<file>.training.onnx`` also has
            the updates of the weights.
        sample_weight_name: stored without effect: the third input of the model is the row weights.

    Raises:
        TypeError: for a model that is not an ``onnx.ModelProto``.
        InvalidArgumentError: for an unknown learning rate, and for weights that are not a list of names.
        UnsupportedError: for a learning rate with a velocity. Use
            :class:`~ortrain.gradient.optimizers_partial.OrtGradientForwardBackwardOptimizer` instead.

    Source: ``onnxcustom.training.optimizers.OrtGradientOptimizer``.

    >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
    >>> OrtGradientOptimizer(model, ["fc2.bias"], learning_rate="Nesterov")
    Traceback (most recent call last):
    ortrain.errors.UnsupportedError: LearningRateSGDNesterov has a velocity, which OrtGradientOptimizer does not \
support; use OrtGradientForwardBackwardOptimizer

    """

    def __init__(
        self,
        model_onnx: onnx.ModelProto,
        weights_to_train: Sequence[str],
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: BaseLearningRate | str | float = "SGD",
        device: str | OrtDevice = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        saved_gradient: PathLike | None = None,
        sample_weight_name: str = "weight",
    ) -> None:
        self.max_iter = max_iter
        self._set_common(model_onnx, learning_rate, device, validation_every)
        names_of(weights_to_train)
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.training_optimizer_name = training_optimizer_name
        self.batch_size = batch_size
        self.warm_start = warm_start
        self.verbose = verbose
        self.saved_gradient = saved_gradient
        self.sample_weight_name = sample_weight_name
        if self.learning_rate.needs_grad:
            raise UnsupportedError(
                f"{type(self.learning_rate).__name__} has a velocity, which OrtGradientOptimizer does not support; "
                "use OrtGradientForwardBackwardOptimizer"
            )
        self.build_onnx_function()

    def build_onnx_function(self) -> None:
        """Builds the function of the update; the constructor and ``set_params`` call this method.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> OrtGradientOptimizer(model, ["fc2.bias"]).learning_rate.axpy_onnx_.graph.output[0].name
        'Y'
        """
        opset = get_onnx_opset(self.model_onnx)
        self.learning_rate.build_onnx_function(opset, self.device, len(self.weights_to_train))

    def fit(
        self,
        X: npt.ArrayLike,  # noqa: N803  (the name that scikit-learn's users know)
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
        X_val: npt.ArrayLike | None = None,  # noqa: N803
        y_val: npt.ArrayLike | None = None,
        use_numpy: bool = False,
    ) -> OrtGradientOptimizer:
        """Trains the model.

        Sets ``train_losses_``, the mean of ``loss / rows`` of each pass. Sets ``validation_losses_``, the loss per row
        of each evaluation, and ``trained_coef_``, the weights by name.

        Args:
            X: the features, of the type of the model's first input.
            y: the labels, of the type of the second input. A vector becomes a column.
            sample_weight: a weight for each row, of the type of the third input.
            X_val: the features of the validation data. Their rows have equal weights.
            y_val: the labels of the validation data.
            use_numpy: True if batches are views of arrays instead of values; the results are the same.

        Returns:
            The estimator.

        Raises:
            OrtrainError: for a model with a different number of inputs, or without the loss output.
            UnsupportedError: for another optimizer, or for a device that is not available.
            InvalidArgumentError: for weights that are not initializers. Also for data of different numbers of rows, or
                of a type or shape that differs from the model. Also for a learning rate that is negative or not a
                finite float32, and for a batch without rows.
            ConvergenceError: for a non-finite loss; the weights learned before this batch remain.
            EvaluationError: for a non-finite loss of the validation data.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
        >>> np.random.seed(0)
        >>> descent = OrtGradientOptimizer(add_loss_output(model), ["fc2.bias"], batch_size=8, max_iter=20)
        >>> losses = descent.fit(x, np.zeros((8, 10), np.float32)).train_losses_
        >>> bool(losses[-1] < losses[0])
        True

        """
        inputs = [entry.name for entry in self.model_onnx.graph.input]
        array_count = 2 if sample_weight is None else 3
        if len(inputs) != array_count:
            raise OrtrainError(
                f"expected {len(inputs)} inputs ({', '.join(inputs)}), got {array_count}: features, "
                f"labels{'' if sample_weight is None else ', weights of rows'}"
            )
        if self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be at least 1, got {self.batch_size}")
        self._check_optimizer()
        batches = OrtDataLoader(X, y, sample_weight, batch_size=self.batch_size, device=self.device)
        validation = None
        if X_val is not None and y_val is not None:
            ones = None if sample_weight is None else np.ones(len(np.asarray(X_val)), batches.data_np[2].dtype)
            validation = OrtDataLoader(X_val, y_val, ones, batch_size=0, device=self.device, random_iter=False)
        elif X_val is not None or y_val is not None:
            raise InvalidArgumentError("X_val and y_val must be given together, got only one")
        self._open()
        if self.saved_gradient is not None:
            _save_gradient(self.model_onnx, self._weights(), self.loss_output_name, Path(self.saved_gradient))
        if not self.warm_start:
            # The order of the names equals the order of the state.
            self.set_state(
                {name: random_like(list(value.shape), value.dtype) for name, value in self.get_state().items()}
            )
        self.learning_rate.init_learning_rate()
        self.train_losses_: list[Any] = []
        self.validation_losses_: list[Any] = []
        passes, bar = self._passes()
        for number in passes:
            loss = self._iteration(batches, use_numpy)
            rate = self.learning_rate.update_learning_rate(number).value
            self.train_losses_.append(loss)
            if bar is not None:
                bar.set_description(f"loss={loss:1.3g} lr={rate:1.3g}")
            if validation is not None and self._validation(number):
                self.validation_losses_.append(self._evaluation(validation))
        self.trained_coef_ = self.get_state()
        return self

    def _weights(self) -> list[str]:
        """Returns the names of the trained weights, sorted."""
        names = sorted(names_of(self.weights_to_train))
        if not names:
            raise InvalidArgumentError("weights_to_train is empty; name at least one initializer")
        for name, following in pairwise(names):
            if name == following:
                raise InvalidArgumentError(f"weight {name!r} is named twice")
        return names

    def _open(self) -> None:
        """Creates the training session, with the weights of the previous ``fit`` if it ran."""
        before = self._learned()
        outputs = [entry.name for entry in self.model_onnx.graph.output]
        if self.loss_output_name not in outputs:
            near = hint(self.loss_output_name, outputs)
            raise OrtrainError(
                f"the model has no output {self.loss_output_name!r}{near}; it has {', '.join(outputs) or 'none'}"
            )
        weights = self._weights()
        parameters = TrainingParameters()
        parameters.loss_output_name = self.loss_output_name
        parameters.weights_to_train = set(weights)
        parameters.training_optimizer_name = self.training_optimizer_name
        parameters.lr_params_feed_name = _RATE
        parameters.optimizer_attributes_map = {name: {} for name in weights}
        parameters.optimizer_int_attributes_map = {name: {} for name in weights}
        # SGDOptimizer does not clip gradients, so it needs no norm.
        parameters.enable_grad_norm_clip = False
        self.train_session_ = TrainingSession(self.model_onnx.SerializeToString(), parameters)
        self.input_names_ = [entry.name for entry in self.train_session_.get_inputs()]
        self.output_names_ = outputs
        self.loss_index_ = outputs.index(self.loss_output_name)
        if before is not None and list(before) == weights:
            self.set_state(before)

    def _iteration(self, batches: OrtDataLoader, use_numpy: bool) -> Any:
        """Trains on all batches once; returns the mean loss per row."""
        session = self.train_session_
        bound = session.io_binding()._iobinding
        bound.bind_input(_RATE, _rate(self.learning_rate.value / self.batch_size))
        bound.bind_output(self.loss_output_name, get_ort_device("cpu"))
        bind = bound.bind_input if use_numpy else bound.bind_ortvalue_input
        rows = min(self.batch_size, len(batches))
        losses: list[Array] = []
        for batch in batches.iter_numpy() if use_numpy else batches.iter_ortvalue():
            for name, values in zip(self.input_names_, batch, strict=False):
                bind(name, values)
            # A run updates the weights even if the loss is not finite. The previous state is then restored.
            weights, statistics = session._classic.state(), session._classic.running_statistics()
            session.run_with_iobinding(bound)
            (loss,) = bound.copy_outputs_to_cpu()
            if not finite(loss):
                session._classic.load_state(weights, True)
                session._classic.load_running_statistics(statistics)
                raise ConvergenceError(failed(self.learning_rate, losses))
            losses.append(loss.reshape(-1)[0] / rows)
        return np.array(losses).mean()

    def _evaluation(self, batches: OrtDataLoader) -> Any:
        """Returns the loss of the validation data per row, from a run without updates."""
        options = RunOptions()
        options.only_execute_path_to_fetches = True
        options.training_mode = False
        feeds = dict(zip(self.input_names_, (*batches.data_np, _rate(0.0)), strict=True))
        (loss,) = self.train_session_.run([self.loss_output_name], feeds, options)
        value = loss.reshape(-1)[0]
        if not finite(value):
            raise EvaluationError(f"the loss of the validation data is {value}")
        return value / len(batches)

    def get_state(self) -> dict[str, Array]:
        """Returns copies of the weights by name, sorted.

        Raises:
            AttributeError: before ``fit``.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> OrtGradientOptimizer(model, ["fc2.bias"]).get_state()
        Traceback (most recent call last):
        AttributeError: there is no state before fit

        """
        found = self._learned()
        if found is None:
            raise AttributeError("there is no state before fit")
        return found

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Sets weights by name; other weights do not change.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for a name that is not trained, or for a value of a wrong type or shape.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
        >>> descent = OrtGradientOptimizer(add_loss_output(model), ["fc2.bias"], max_iter=1)
        >>> _ = descent.fit(x, np.zeros((8, 10), np.float32))
        >>> descent.set_state({"fc2.bias": np.ones(10, np.float32)})
        >>> descent.get_state()["fc2.bias"].sum()
        np.float32(10.0)

        """
        session = getattr(self, "train_session_", None)
        if session is None:
            raise AttributeError("the state can be set only after fit")
        there = session.get_state()
        found = {name: np.asarray(array) for name, array in state.items()}
        for name, value in found.items():
            if name not in there:
                raise InvalidArgumentError(f"{name!r} is not a trained weight{hint(name, list(there))}")
            if (value.dtype, value.shape) != (there[name].dtype, there[name].shape):
                raise InvalidArgumentError(
                    f"weight {name!r} is {there[name].dtype}{list(there[name].shape)}, but the value is "
                    f"{value.dtype}{list(value.shape)}"
                )
        session.load_state(found, strict=True)

    def get_trained_onnx(self, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """Returns the model with the learned weights; the loss remains an output.

        Args:
            model: another model with initializers of these names, for example the model without the loss.

        Raises:
            AttributeError: before ``fit``.
            OrtrainError: for a model without one of the weights.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
        >>> descent = OrtGradientOptimizer(add_loss_output(model), ["fc2.bias"], max_iter=1)
        >>> trained = descent.fit(x, np.zeros((8, 10), np.float32)).get_trained_onnx(model)
        >>> trained.graph.output[0].name
        'logits'

        """
        values = {name: numpy_to_ort_value(value, self.device) for name, value in self.get_state().items()}
        return self._with_initializers(model, values)

    def _learned(self) -> dict[str, Array] | None:
        session = getattr(self, "train_session_", None)
        return None if session is None else session.get_state()

    def _learn(self, learned: dict[str, Array]) -> None:
        self._open()
        self.set_state(learned)


def _rate(number: float) -> npt.NDArray[np.float32]:
    """Converts a learning rate to the input of a run; a rate above float32 becomes infinite, which the run rejects."""
    with np.errstate(over="ignore"):
        return np.array([number], np.float32)


def _save_gradient(model: onnx.ModelProto, weights: list[str], loss: str, path: Path) -> None:
    """Writes the model with its gradients, and a second model that also has the updates of the weights."""
    gradients = grad(model, of=loss, wrt=weights)
    _files.write(path, gradients)
    update_model = onnx.load_from_string(gradients)
    types = {entry.name: entry.data_type for entry in update_model.graph.initializer}
    kinds = {types[name] for name in weights}
    element = kinds.pop() if len(kinds) == 1 else onnx.TensorProto.FLOAT
    update_model.graph.input.append(onnx.helper.make_tensor_value_info(_RATE, element, [1]))
    for name in weights:
        rate = _RATE
        if types[name] != element:
            rate = f"{name}_{_RATE}"
            update_model.graph.node.append(onnx.helper.make_node("Cast", [_RATE], [rate], to=types[name]))
        update_model.graph.node.append(onnx.helper.make_node("Mul", [rate, f"{name}_grad"], [f"{name}_step"]))
        update_model.graph.node.append(onnx.helper.make_node("Sub", [name, f"{name}_step"], [f"{name}_updated"]))
        value = next(entry for entry in update_model.graph.initializer if entry.name == name)
        update_model.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}_updated", types[name], value.dims))
    _files.write(f"{path}.training.onnx", update_model.SerializeToString())
