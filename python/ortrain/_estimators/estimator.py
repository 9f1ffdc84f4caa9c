"""Base class of the estimators that train ONNX models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from ortrain import _ortrain
from ortrain._estimators.functions import Learning, Parameters, shown
from ortrain._estimators.sgd_learning_rate import BaseLearningRate
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, ort_device_to_string

Self = TypeVar("Self", bound="Estimator")


class Estimator(Parameters):
    """Base class of estimators: parameters like in scikit-learn, a ``fit`` method, and the trained model."""

    model_onnx: onnx.ModelProto
    learning_rate: BaseLearningRate
    device: OrtDevice
    batch_size: int
    max_iter: int
    training_optimizer_name: str
    verbose: int
    validation_every: int

    def _set_common(
        self,
        model_onnx: onnx.ModelProto,
        learning_rate: BaseLearningRate | str | float,
        device: str | OrtDevice,
        validation_every: float,
    ) -> None:
        if not isinstance(model_onnx, onnx.ModelProto):
            raise TypeError(
                f"model_onnx must be an onnx.ModelProto, got {type(model_onnx).__name__}; read it with onnx.load"
            )
        self.model_onnx = model_onnx
        self.learning_rate = BaseLearningRate.select(learning_rate)
        self.device = get_ort_device(device)
        # Below 1, the fraction of the passes between two evaluations; otherwise the number of passes.
        every = self.max_iter * validation_every if validation_every < 1 else validation_every
        self.validation_every = max(1, int(every))

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """Returns the constructor's parameters; with ``deep``, also parameters of parts as ``part__parameter``.

        A loss, rate or penalty is an object, also if the caller passed a name. The device is a string.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> OrtGradientForwardBackwardOptimizer(model).get_params()["device"]
        'cpu'
        """
        return super().get_params(deep) | {"device": ort_device_to_string(self.device)}

    def set_params(self: Self, **params: Any) -> Self:
        """Sets parameters; ``part__parameter`` sets a parameter of a part, such as ``learning_rate__eta0``.

        Returns:
            The estimator.

        Raises:
            InvalidArgumentError: for an unknown name or an invalid value.

        >>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
        >>> OrtGradientForwardBackwardOptimizer(model).set_params(learning_rate__eta0=0.5).learning_rate.value_ is None
        True

        """
        constructor_params = {name: value for name, value in params.items() if "__" not in name}
        super().set_params(**constructor_params)
        if constructor_params:
            # The constructor converts names to objects.
            type(self).__init__(self, **self.get_params())
        super().set_params(**{name: value for name, value in params.items() if name not in constructor_params})
        self.build_onnx_function()
        return self

    def build_onnx_function(self) -> None:
        """Builds the functions that the estimator runs; the constructor and ``set_params`` call this method.

        >>> from ortrain.gradient.optimizers import OrtGradientOptimizer
        >>> OrtGradientOptimizer(model, ["fc2.bias"]).build_onnx_function()
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = []
        for name, value in self.get_params().items():
            # Parts and rates are shown in full.
            parts.append(f"{name}={value!r}" if isinstance(value, Learning) else f"{name}={shown(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __sklearn_tags__(self) -> Any:
        # Only the searches of scikit-learn call this method, so scikit-learn is installed here.
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=True),
            transformer_tags=None,
            regressor_tags=None,
            classifier_tags=None,
            input_tags=InputTags(),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Stores the parameters and the learned state. Functions are built again on load.
        state = {name: value for name, value in vars(self).items() if not name.endswith("_") and name != "_logger"}
        state |= {name: vars(self)[name] for name in ("train_losses_", "validation_losses_") if name in vars(self)}
        return state | {"device": ort_device_to_string(self.device), "learned": self._learned()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "learned"})
        self.device = get_ort_device(state["device"])
        self.build_onnx_function()
        if state["learned"] is not None:
            self._learn(state["learned"])

    def _learned(self) -> Any:
        """Returns the learned state as arrays; ``None`` before ``fit``."""
        raise NotImplementedError

    def _learn(self, learned: Any) -> None:
        """Restores the learned state."""
        raise NotImplementedError

    def _check_optimizer(self) -> None:
        if self.training_optimizer_name != "SGDOptimizer":
            raise UnsupportedError(
                f"training_optimizer_name must be 'SGDOptimizer', got {self.training_optimizer_name!r}; for other "
                "optimizers, use ortrain.artifacts"
            )

    def _passes(self) -> tuple[Iterator[int], Any]:
        """Returns an iterator over the pass indices, and the progress bar if ``verbose`` is set."""
        if not self.verbose:
            return iter(range(self.max_iter)), None
        try:
            from tqdm import tqdm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "verbose shows a progress bar, which requires the package tqdm: pip install tqdm"
            ) from error
        bar = tqdm(range(self.max_iter))
        return iter(bar), bar

    def _validation(self, number: int) -> bool:
        """Returns True if an evaluation follows this pass."""
        return (number + 1) % self.validation_every == 0

    def _with_initializers(self, model: onnx.ModelProto | None, values: Mapping[str, OrtValue]) -> onnx.ModelProto:
        source_model = self.model_onnx if model is None else model
        names = {entry.name for entry in source_model.graph.initializer}
        for name in values:
            if name not in names:
                raise OrtrainError(f"weight {name!r} was trained, but the model has no initializer of this name")
        serialized = _ortrain.with_initializers(source_model.SerializeToString(), list(values.items()))
        return onnx.load_from_string(serialized)


def random_like(shape: list[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Draws an array from the standard normal distribution, with ``numpy.random``."""
    return np.asarray(np.random.standard_normal(shape), dtype)  # noqa: NPY002  (np.random.seed is to hold)


def finite(loss: npt.NDArray[Any]) -> bool:
    """Returns True if a loss is finite."""
    return bool(np.isfinite(loss).all())


def failed(rate: object, losses: list[Any]) -> str:
    """Returns the message about a loss that is not finite."""
    past = [float(np.asarray(loss).reshape(-1)[0]) for loss in losses[-5:]]
    return f"the loss is not finite at the learning rate {rate!r}; use a smaller rate (losses before: {past})"


def names_of(weights: object) -> list[str]:
    """Returns names of weights as a list.

    Raises:
        InvalidArgumentError: unless the argument is a list, tuple or set of strings.

    """
    if isinstance(weights, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in weights):
        return list(weights)
    raise InvalidArgumentError(f"weights_to_train must be a list of names of initializers, got {shown(weights)}")
