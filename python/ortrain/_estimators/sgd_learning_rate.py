"""Learning rates and the updates of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import onnx

from ortrain._estimators.functions import Learning, Typed, built, chosen
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain._public_name import public_name
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.gradient.utils.onnxruntime_helper import numpy_to_ort_value

__all__ = ["BaseLearningRate", "LearningRateSGD", "LearningRateSGDNesterov"]

_SCHEDULES = ("invscaling", "optimal", "constant")

_Rate = TypeVar("_Rate", bound="LearningRateSGD")


@public_name("ortrain.gradient.sgd_learning_rate")
class BaseLearningRate(Learning):
    """Learning rate that changes from pass to pass over the data, with its weight update.

    Source: ``onnxcustom.training.sgd_learning_rate.BaseLearningRate``.

    >>> from ortrain.gradient.sgd_learning_rate import BaseLearningRate
    >>> BaseLearningRate.select("SGD")
    LearningRateSGD(eta0=0.01, alpha=0.0001, power_t=0.25, learning_rate='invscaling')
    """

    @staticmethod
    def select(class_name: BaseLearningRate | str | float, **kwargs: Any) -> BaseLearningRate:
        """Returns a learning rate by its name, or from a number.

        Args:
            class_name: a learning rate, which is returned unchanged; a float, the first value of a
                :class:`LearningRateSGD`; ``"SGD"``, ``"SGDNesterov"``, ``"Nesterov"``, or the name of a class.
            kwargs: parameters of the class.

        Raises:
            InvalidArgumentError: for any other value.

        >>> from ortrain.gradient.sgd_learning_rate import BaseLearningRate
        >>> BaseLearningRate.select("Nesterov", momentum=0.8).momentum
        0.8
        >>> BaseLearningRate.select("Adam")
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: unknown learning rate 'Adam'; expected one of 'SGD', 'SGDNesterov', \
'Nesterov', 'LearningRateSGD', 'LearningRateSGDNesterov'

        """
        if isinstance(class_name, BaseLearningRate):
            return class_name
        if isinstance(class_name, float):
            return LearningRateSGD(class_name, **kwargs)
        names = {
            "SGD": LearningRateSGD,
            "SGDNesterov": LearningRateSGDNesterov,
            "Nesterov": LearningRateSGDNesterov,
            "LearningRateSGD": LearningRateSGD,
            "LearningRateSGDNesterov": LearningRateSGDNesterov,
        }
        return chosen("learning rate", names, class_name)(**kwargs)

    @property
    def value(self) -> float:
        """The current learning rate.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).init_learning_rate().value
        0.5
        """
        raise NotImplementedError(f"{type(self).__name__} has no value")

    @property
    def needs_grad(self) -> bool:
        """True if the update needs a velocity: a state that accumulates previous gradients.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD, LearningRateSGDNesterov
        >>> LearningRateSGD().needs_grad, LearningRateSGDNesterov().needs_grad
        (False, True)
        """
        raise NotImplementedError(f"{type(self).__name__} has no needs_grad")

    def init_learning_rate(self) -> BaseLearningRate:
        """Resets the learning rate to its first value; returns the object itself.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).init_learning_rate().value
        0.5
        """
        raise NotImplementedError(f"{type(self).__name__} has no init_learning_rate")

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        """Sets the value after pass ``t``; returns the object itself.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).init_learning_rate().update_learning_rate(15).value
        0.25
        """
        raise NotImplementedError(f"{type(self).__name__} has no update_learning_rate")

    def update_weights(
        self,
        n_bind: int,
        device: OrtDevice,
        statei: OrtValue,
        gradienti: OrtValue,
        batch_size: int,
        velocity: OrtValue | None = None,
    ) -> OrtValue:
        """Updates a weight by its gradient, in place.

        Args:
            n_bind: the index of the weight.
            device: the device of the weight.
            statei: the weight.
            gradienti: the gradient of the loss of a batch, of the weight's type and shape.
            batch_size: the divisor of the learning rate.
            velocity: the state of the update, of the weight's type and shape; it is also updated.

        Returns:
            The weight.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`; for a missing or an unnecessary velocity.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, rate = get_ort_device("cpu"), LearningRateSGD(0.5)
        >>> rate.init_learning_rate().build_onnx_function(15, cpu, 1)
        >>> weight, gradient = (numpy_to_ort_value(np.ones(2, np.float32)) for _ in range(2))
        >>> rate.update_weights(0, cpu, weight, gradient, batch_size=2).numpy()
        array([0.75, 0.75], dtype=float32)

        """
        raise NotImplementedError(f"{type(self).__name__} has no update_weights")

    def loop(self, n: int = 1000) -> Iterator[float]:
        """Yields the first ``n`` values.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> list(LearningRateSGD(0.5, learning_rate="constant").loop(3))
        [0.5, 0.5, 0.5]
        """
        self.init_learning_rate()
        for t in range(n):
            yield self.value
            self.update_learning_rate(t + 1)


@public_name("ortrain.gradient.sgd_learning_rate")
class LearningRateSGD(BaseLearningRate):
    """Gradient descent with the schedules of scikit-learn's ``SGDRegressor``: ``w - value / batch_size * g``.

    Args:
        eta0: the first value.
        alpha: the parameter of the schedule ``"optimal"``.
        power_t: the exponent of the schedule ``"invscaling"``.
        learning_rate: the schedule: ``"constant"``; ``"invscaling"``, ``eta0 / (t + 1) ** power_t`` after pass ``t``;
            ``"optimal"``, ``eta0 * opt / (opt + t)`` with ``opt = max(1, 2 (1 + s)) / (s alpha)``,
            ``s = alpha ** -0.25``.

    Raises:
        InvalidArgumentError: for an unknown schedule.

    Source: ``onnxcustom.training.sgd_learning_rate.LearningRateSGD``; Bottou, Stochastic Gradient Descent Tricks, 2012.

    >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
    >>> [round(rate, 9) for rate in LearningRateSGD(learning_rate="optimal").loop(3)]
    [0.01, 0.009999545, 0.009999091]

    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
    ) -> None:
        if learning_rate not in _SCHEDULES:
            raise InvalidArgumentError(f"unknown schedule {learning_rate!r}; expected one of {', '.join(_SCHEDULES)}")
        self.eta0 = eta0
        self.alpha = alpha
        self.power_t = power_t
        self.learning_rate = learning_rate
        self.value_: float | None = None
        self._update: Typed | None = None

    def _suffix(self) -> str:
        return "" if self.value_ is None else f", value={self.value_!r}"

    @property
    def value(self) -> float:
        """The current learning rate.

        Raises:
            OrtrainError: before :meth:`init_learning_rate`.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD().value
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: the learning rate has no value yet; call init_learning_rate first

        """
        if self.value_ is None:
            raise OrtrainError("the learning rate has no value yet; call init_learning_rate first")
        return self.value_

    @property
    def needs_grad(self) -> bool:
        """False: the update needs no velocity.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD().needs_grad
        False
        """
        return False

    def init_learning_rate(self: _Rate) -> _Rate:
        """Resets the value to ``eta0``; returns the object itself.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).init_learning_rate()
        LearningRateSGD(eta0=0.5, alpha=0.0001, power_t=0.25, learning_rate='invscaling'), value=0.5
        """
        self.value_ = self.eta0
        return self

    def update_learning_rate(self: _Rate, t: int) -> _Rate:
        """Sets the value after pass ``t``; returns the object itself.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(1.0, power_t=0.5).init_learning_rate().update_learning_rate(3).value
        0.5
        """
        if self.learning_rate == "invscaling":
            self.value_ = self.eta0 / (t + 1) ** self.power_t
        elif self.learning_rate == "optimal":
            typical = math.sqrt(1 / math.sqrt(self.alpha))
            optimal = max(1.0, 2 * (1 + typical)) / (typical * self.alpha)
            self.value_ = self.eta0 * optimal / (optimal + t)
        return self

    def build_onnx_function(self, opset: int, device: OrtDevice, n_tensors: int) -> None:
        """Builds the function of the update.

        Args:
            opset: unused, because the function exists at any opset.
            device: the device of the function.
            n_tensors: the number of weights.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> rate = LearningRateSGD()
        >>> rate.build_onnx_function(15, get_ort_device("cpu"), 2)
        >>> [entry.name for entry in rate.axpy_onnx_.graph.input]
        ['X1', 'X2', 'alpha']

        """
        self._update = Typed("axpy")
        self.axpy_onnx_: onnx.ModelProto = self._update.model

    def update_weights(
        self,
        n_bind: int,
        device: OrtDevice,
        statei: OrtValue,
        gradienti: OrtValue,
        batch_size: int,
        velocity: OrtValue | None = None,
    ) -> OrtValue:
        """Updates a weight by its gradient, in place: ``w - value / batch_size * g``.

        Args:
            n_bind: the index of the weight.
            device: the device of the weight.
            statei: the weight, of float32 or float64.
            gradienti: the gradient of the loss of a batch, of the weight's type and shape.
            batch_size: the divisor of the learning rate.
            velocity: ``None``.

        Returns:
            The weight.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`, and for a velocity.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, rate = get_ort_device("cpu"), LearningRateSGD(0.5)
        >>> rate.init_learning_rate().build_onnx_function(15, cpu, 1)
        >>> weight, gradient = (numpy_to_ort_value(np.ones(2, np.float32)) for _ in range(2))
        >>> rate.update_weights(0, cpu, weight, gradient, batch_size=2) is weight
        True

        """
        update = built(self._update, self).of(statei)
        if velocity is not None:
            raise OrtrainError("LearningRateSGD has no velocity; omit it, or use LearningRateSGDNesterov")
        alpha = _scalar(-self.value / batch_size, statei)
        update.write({"Y": statei}, X1=gradienti, X2=statei, alpha=alpha)
        return statei


@public_name("ortrain.gradient.sgd_learning_rate")
class LearningRateSGDNesterov(LearningRateSGD):
    """Gradient descent with Nesterov momentum or classical momentum.

    With ``a = -value / batch_size``, the velocity ``v`` becomes ``z = momentum * v + a * g``. The weight becomes
    ``w + momentum * z + a * g`` with ``nesterov``, and ``w + z`` without.

    Args:
        eta0: the first value.
        alpha: the parameter of the schedule ``"optimal"``.
        power_t: the exponent of the schedule ``"invscaling"``.
        learning_rate: the schedule, like in :class:`LearningRateSGD`.
        momentum: the decay factor of the velocity.
        nesterov: True for Nesterov momentum, False for classical momentum.

    Raises:
        InvalidArgumentError: for an unknown schedule.

    Source: ``onnxcustom.training.sgd_learning_rate.LearningRateSGDNesterov``; Sutskever et al., On the importance of
    initialization and momentum in deep learning, 2013.

    >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGDNesterov
    >>> LearningRateSGDNesterov(1e-4, nesterov=False).needs_grad
    True

    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        super().__init__(eta0, alpha, power_t, learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def needs_grad(self) -> bool:
        """True: the update needs a velocity.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGDNesterov
        >>> LearningRateSGDNesterov().needs_grad
        True
        """
        return True

    def build_onnx_function(self, opset: int, device: OrtDevice, n_tensors: int) -> None:
        """Builds the function of the update.

        Args:
            opset: unused, because the function exists at any opset.
            device: the device of the function.
            n_tensors: the number of weights.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGDNesterov
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> rate = LearningRateSGDNesterov()
        >>> rate.build_onnx_function(15, get_ort_device("cpu"), 2)
        >>> [entry.name for entry in rate.axpyw_onnx_.graph.input]
        ['X1', 'X2', 'G', 'alpha', 'beta']

        """
        self._update = Typed("axpyw2" if self.nesterov else "axpyw")
        self.axpyw_onnx_: onnx.ModelProto = self._update.model

    def update_weights(
        self,
        n_bind: int,
        device: OrtDevice,
        statei: OrtValue,
        gradienti: OrtValue,
        batch_size: int,
        velocity: OrtValue | None = None,
    ) -> OrtValue:
        """Updates a weight and its velocity, in place.

        Args:
            n_bind: the index of the weight.
            device: the device of the weight.
            statei: the weight, of float32 or float64.
            gradienti: the gradient of the loss of a batch, of the weight's type and shape.
            batch_size: the divisor of the learning rate.
            velocity: the velocity, of the weight's type and shape.

        Returns:
            The weight.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`, and without a velocity.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGDNesterov
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, rate = get_ort_device("cpu"), LearningRateSGDNesterov(0.1)
        >>> rate.init_learning_rate().build_onnx_function(15, cpu, 1)
        >>> values = [[1, 2], [1, -1], [0.5, 0.5]]
        >>> w, g, v = (numpy_to_ort_value(np.array(value, np.float32)) for value in values)
        >>> rate.update_weights(0, cpu, w, g, batch_size=10, velocity=v).numpy(), v.numpy().round(6)
        (array([1.386, 2.424], dtype=float32), array([0.44, 0.46], dtype=float32))

        """
        update = built(self._update, self).of(statei)
        if velocity is None:
            raise OrtrainError(
                "LearningRateSGDNesterov requires a velocity for each weight; pass zeros at the beginning"
            )
        alpha, beta = _scalar(-self.value / batch_size, statei), _scalar(self.momentum, statei)
        update.write({"Y": statei, "Z": velocity}, X1=gradienti, X2=statei, G=velocity, alpha=alpha, beta=beta)
        return statei


def _scalar(number: float, like: OrtValue) -> OrtValue:
    """Returns a number as a value of one element, of the type of another value."""
    return numpy_to_ort_value(np.array([number], like.numpy().dtype))
