"""Gradient descent on a model that ends in its loss, by the names of onnxcustom (``onnxcustom.training.optimizers``).

>>> from ortrain.gradient.optimizers import OrtGradientOptimizer
>>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
>>> np.random.seed(0)
>>> inputs = np.random.randn(40, 2).astype(np.float32)
>>> targets = (inputs @ np.array([[1], [2]]) + 3).astype(np.float32)
>>> nodes = [onnx.helper.make_node("Gemm", ["X", "coef", "intercept"], ["Y"])]
>>> x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, width]) for name, width in (("X", 2), ("Y", 1)))
>>> zeros = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
...          for name, shape in (("coef", (2, 1)), ("intercept", (1,)))]
>>> graph = onnx.helper.make_graph(nodes, "line", [x], [y], zeros)
>>> line = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])
>>> descent = OrtGradientOptimizer(add_loss_output(line), ["coef", "intercept"], learning_rate=0.05)
>>> {name: value.round(2).tolist() for name, value in descent.fit(inputs, targets).get_state().items()}
{'coef': [[1.0], [2.0]], 'intercept': [3.0]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortrain import _files
from ortrain._near import hint
from ortrain._options import RunOptions
from ortrain._ortrain import OrtDevice
from ortrain._sources import PathLike
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.gradient._estimator import Estimator, failed, finite, names_of, random_like
from ortrain.gradient.data_loader import OrtDataLoader
from ortrain.gradient.excs import ConvergenceError, EvaluationError
from ortrain.gradient.graph import grad
from ortrain.gradient.sgd_learning_rate import BaseLearningRate
from ortrain.gradient.utils.onnx_helper import get_onnx_opset
from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value

__all__ = ["OrtGradientOptimizer"]

_RATE = "Learning_Rate"

Array = npt.NDArray[Any]


class OrtGradientOptimizer(Estimator):
    """Gradient descent on a model that has its loss as an output, and labels as an input.

    The model is trained by a ``ortrain.classic.TrainingSession``, ``train_session_`` after ``fit``: one ``run``
    for each batch.

    Args:
        model_onnx: the model, with inputs for features, labels and, where rows have weights, these, in this order
            (:func:`~ortrain.gradient.utils.orttraining_helper.add_loss_output` makes it).
        weights_to_train: names of initializers, in any order.
        loss_output_name: the output with the loss.
        max_iter: how often the data are gone over.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: the rows of a batch; the learning rate is divided by it, and is float32 then.
        learning_rate: a :class:`~ortrain.gradient.sgd_learning_rate.BaseLearningRate` without velocity, its name, or a
            float.
        device: ``"cpu"``, or an :class:`~ortrain.capi.OrtDevice`.
        warm_start: whether ``fit`` goes on from the weights of the model, or of the ``fit`` before; otherwise weights
            are drawn from the standard normal distribution (``numpy.random``).
        verbose: 1 for a bar, which the package ``tqdm`` draws.
        validation_every: how many passes lie between two evaluations; below 1 as a share of ``max_iter``.
        saved_gradient: a file for the model with its gradients, which ``fit`` writes; ``<file>.training.onnx`` has the
            updates of the weights, too.
        sample_weight_name: kept for whoever reads it: weights of rows are the third input.

    Raises:
        TypeError: for a model that is no ``onnx.ModelProto``.
        InvalidArgumentError: for a learning rate that is unknown, weights that are no list of names.
        UnsupportedError: for a learning rate with a velocity; take
            :class:`~ortrain.gradient.optimizers_partial.OrtGradientForwardBackwardOptimizer` for these.

    Source: ``onnxcustom.training.optimizers.OrtGradientOptimizer``.

    >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
    >>> OrtGradientOptimizer(model, ["fc2.bias"], learning_rate="Nesterov")
    Traceback (most recent call last):
    ortrain.errors.UnsupportedError: LearningRateSGDNesterov has a velocity, which OrtGradientOptimizer has not; take \
OrtGradientForwardBackwardOptimizer

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
                f"{type(self.learning_rate).__name__} has a velocity, which OrtGradientOptimizer has not; take "
                "OrtGradientForwardBackwardOptimizer"
            )
        self.build_onnx_function()

    def build_onnx_function(self) -> None:
        """Builds the function of the update; constructor and ``set_params`` do it.

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

        Afterwards ``train_losses_`` has the mean of ``loss / rows`` of each pass, ``validation_losses_`` the loss of
        each evaluation by row, ``trained_coef_`` the weights by their names.

        Args:
            X: the features, of the type of the model's first input.
            y: the labels, of the type of the second. A vector is a column.
            sample_weight: a weight for each row, of the type of the third input.
            X_val: features for evaluations. Their rows weigh the same.
            y_val: labels of these.
            use_numpy: whether batches are views of arrays instead of values; the numbers are the same.

        Returns:
            The estimator itself.

        Raises:
            OrtrainError: for a model with another number of inputs, an output that is not there.
            UnsupportedError: for another optimizer, a device that is not there.
            InvalidArgumentError: for weights that are no initializers, data of other numbers of rows, of another type
                or shape than the model's; for a learning rate that is negative or no finite float32, a batch without
                rows.
            ConvergenceError: for a loss that is no number; what was learned before this batch stays.
            EvaluationError: for a loss of the validation data that is no number.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
        >>> np.random.seed(0)
        >>> descent = OrtGradientOptimizer(add_loss_output(model), ["fc2.bias"], batch_size=8, max_iter=20)
        >>> losses = descent.fit(x, np.zeros((8, 10), np.float32)).train_losses_
        >>> bool(losses[-1] < losses[0])
        True

        """
        inputs = [entry.name for entry in self.model_onnx.graph.input]
        wanted = 2 if sample_weight is None else 3
        if len(inputs) != wanted:
            raise OrtrainError(
                f"the model has {len(inputs)} inputs ({', '.join(inputs)}), but {wanted} are fed: features, labels"
                f"{'' if sample_weight is None else ', weights of rows'}"
            )
        if self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size is {self.batch_size}; a batch has at least one row")
        self._check_optimizer()
        batches = OrtDataLoader(X, y, sample_weight, batch_size=self.batch_size, device=self.device)
        validation = None
        if X_val is not None and y_val is not None:
            ones = None if sample_weight is None else np.ones(len(np.asarray(X_val)), batches.data_np[2].dtype)
            validation = OrtDataLoader(X_val, y_val, ones, batch_size=0, device=self.device, random_iter=False)
        elif X_val is not None or y_val is not None:
            raise InvalidArgumentError("X_val and y_val belong together: one is given, the other is not")
        self._open()
        if self.saved_gradient is not None:
            _save_gradient(self.model_onnx, self._weights(), self.loss_output_name, Path(self.saved_gradient))
        if not self.warm_start:
            # In the order of the names, as the state has them.
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
        """The names of the trained weights, sorted."""
        names = sorted(names_of(self.weights_to_train))
        if not names:
            raise InvalidArgumentError("weights_to_train is empty; name at least one initializer")
        for name, following in pairwise(names):
            if name == following:
                raise InvalidArgumentError(f"weight {name!r} is named twice")
        return names

    def _open(self) -> None:
        """Makes the session of the training, with the weights of the ``fit`` before if there was one."""
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
        # SGDOptimizer clips no gradient, so that no norm is needed.
        parameters.enable_grad_norm_clip = False
        self.train_session_ = TrainingSession(self.model_onnx.SerializeToString(), parameters)
        self.input_names_ = [entry.name for entry in self.train_session_.get_inputs()]
        self.output_names_ = outputs
        self.loss_index_ = outputs.index(self.loss_output_name)
        if before is not None and list(before) == weights:
            self.set_state(before)

    def _iteration(self, batches: OrtDataLoader, use_numpy: bool) -> Any:
        """Goes over the data once; returns the mean of the losses by row."""
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
            # A run updates whatever its loss is: what was there before is put back if the loss is no number.
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
        """The loss of the validation data, divided by the number of rows: by a run that updates nothing."""
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
        """The weights by their names, sorted: copies.

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
        """Sets weights by their names; those that are not named stay.

        Raises:
            AttributeError: before ``fit``.
            InvalidArgumentError: for a name that is not trained, a value of another type or shape.

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
            raise AttributeError("the state is set after fit")
        there = session.get_state()
        found = {name: np.asarray(array) for name, array in state.items()}
        for name, value in found.items():
            if name not in there:
                raise InvalidArgumentError(f"no weight {name!r} is trained{hint(name, list(there))}")
            if (value.dtype, value.shape) != (there[name].dtype, there[name].shape):
                raise InvalidArgumentError(
                    f"weight {name!r} is {there[name].dtype}{list(there[name].shape)}, but the value is "
                    f"{value.dtype}{list(value.shape)}"
                )
        session.load_state(found, strict=True)

    def get_trained_onnx(self, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """The model with the weights that were learned; it has the loss as an output still.

        Args:
            model: another model with initializers of these names, such as the one without the loss.

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
    """A learning rate as a run takes it. One that is too large is infinite, which the session refuses."""
    with np.errstate(over="ignore"):
        return np.array([number], np.float32)


def _save_gradient(model: onnx.ModelProto, weights: list[str], loss: str, path: Path) -> None:
    """Writes the model with its gradients, and with the updates of the weights as well."""
    gradients = grad(model, of=loss, wrt=weights)
    _files.write(path, gradients)
    whole = onnx.load_from_string(gradients)
    types = {entry.name: entry.data_type for entry in whole.graph.initializer}
    kinds = {types[name] for name in weights}
    element = kinds.pop() if len(kinds) == 1 else onnx.TensorProto.FLOAT
    whole.graph.input.append(onnx.helper.make_tensor_value_info(_RATE, element, [1]))
    for name in weights:
        rate = _RATE
        if types[name] != element:
            rate = f"{name}_{_RATE}"
            whole.graph.node.append(onnx.helper.make_node("Cast", [_RATE], [rate], to=types[name]))
        whole.graph.node.append(onnx.helper.make_node("Mul", [rate, f"{name}_grad"], [f"{name}_step"]))
        whole.graph.node.append(onnx.helper.make_node("Sub", [name, f"{name}_step"], [f"{name}_updated"]))
        value = next(entry for entry in whole.graph.initializer if entry.name == name)
        whole.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}_updated", types[name], value.dims))
    _files.write(f"{path}.training.onnx", whole.SerializeToString())
