"""Loss functions."""

from __future__ import annotations

import functools
from typing import Any

import onnx

from ortrain._estimators.functions import Learning, Typed, built, chosen
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain._public_name import public_name
from ortrain.errors import InvalidArgumentError
from ortrain.gradient.utils.onnx_rewriter import unreduced_onnx_loss

__all__ = [
    "AbsoluteLearningLoss",
    "BaseLearningLoss",
    "ElasticLearningLoss",
    "NegLogLearningLoss",
    "SquareLearningLoss",
]


@public_name("ortrain.gradient.sgd_learning_loss")
class BaseLearningLoss(Learning):
    """Loss between expected and predicted values, with its gradient with respect to the predicted values.

    In the formulas, ``d`` is ``expected - predicted``, and ``s`` is the weight of a row, 1 by default.

    Source: ``onnxcustom.training.sgd_learning_loss.BaseLearningLoss``.

    >>> from ortrain.gradient.sgd_learning_loss import BaseLearningLoss
    >>> BaseLearningLoss.select("elastic", l1_weight=0.1)
    ElasticLearningLoss(l1_weight=0.1, l2_weight=0.5)
    """

    def __init__(self) -> None:
        self._gradient: Typed | None = None
        self._scores: Typed | None = None
        self.weight_name_: str | None = None

    @staticmethod
    def select(class_name: BaseLearningLoss | str, **kwargs: Any) -> BaseLearningLoss:
        """Returns a loss by its name.

        Args:
            class_name: a loss, which is returned unchanged; ``"square_error"``, ``"square"``, ``"absolute_error"``,
                ``"absolute"``, ``"elastic_error"``, ``"elastic"``, ``"log"``, ``"neglog"``, ``"logloss"``, or the
                name of a class.
            kwargs: parameters of the class.

        Raises:
            InvalidArgumentError: for any other value.

        >>> from ortrain.gradient.sgd_learning_loss import BaseLearningLoss
        >>> BaseLearningLoss.select("log")
        NegLogLearningLoss(eps=1e-05, probability_function='sigmoid')

        """
        if isinstance(class_name, BaseLearningLoss):
            return class_name
        names: dict[str, type[BaseLearningLoss]] = {
            "square_error": SquareLearningLoss,
            "square": SquareLearningLoss,
            "absolute_error": AbsoluteLearningLoss,
            "absolute": AbsoluteLearningLoss,
            "elastic_error": ElasticLearningLoss,
            "elastic": ElasticLearningLoss,
            "log": NegLogLearningLoss,
            "neglog": NegLogLearningLoss,
            "logloss": NegLogLearningLoss,
        }
        names |= {kind.__name__: kind for kind in names.values()}
        return chosen("loss", names, class_name)(**kwargs)

    def _function(self) -> tuple[str, dict[str, Any]]:
        """Returns the name and the settings of the function that computes the loss and its gradient."""
        raise NotImplementedError(f"{type(self).__name__} is an abstract base class: it has no loss")

    def build_onnx_function(self, opset: int, device: OrtDevice, weight_name: str | None) -> None:
        """Builds the functions of the loss.

        Args:
            opset: the opset of the functions.
            device: the device of the functions.
            weight_name: the name of the input for row weights; ``None`` for a loss without row weights.

        >>> from ortrain.gradient.sgd_learning_loss import SquareLearningLoss
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> loss = SquareLearningLoss()
        >>> loss.build_onnx_function(15, get_ort_device("cpu"), "weight")
        >>> [entry.name for entry in loss.loss_grad_onnx_.graph.input]
        ['X1', 'X2', 'weight']

        """
        name, settings = self._function()
        settings |= {"target_opset": opset, "weight_name": weight_name}
        self.weight_name_ = weight_name
        self._gradient = Typed(name, **settings)
        self._scores = Typed(name, functools.partial(unreduced_onnx_loss, output_name="Y"), **settings)
        self.loss_grad_onnx_: onnx.ModelProto = self._gradient.model
        self.loss_score_onnx_: onnx.ModelProto = self._scores.model

    def loss_gradient(
        self, device: OrtDevice, expected: OrtValue, predicted: OrtValue, weight: OrtValue | None = None
    ) -> tuple[OrtValue, OrtValue]:
        """Returns the loss, summed over rows and columns, and its gradient.

        Args:
            device: the device of the values.
            expected: the targets, ``(rows, columns)``; of the type of ``predicted``, or int64 for the log loss.
            predicted: the predictions of the model, of float32 or float64.
            weight: a weight for each row, ``(rows,)``.

        Returns:
            The loss, of shape ``(1,)``, and its gradient with respect to ``predicted``, of the shape of ``predicted``.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`.
            InvalidArgumentError: for a value of a wrong type or shape. Also for row weights if the functions were
                built without a ``weight_name``.

        >>> from ortrain.gradient.sgd_learning_loss import AbsoluteLearningLoss
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, loss = get_ort_device("cpu"), AbsoluteLearningLoss()
        >>> loss.build_onnx_function(15, cpu, None)
        >>> y, z = (numpy_to_ort_value(np.array(rows, np.float32)) for rows in ([[1], [2]], [[3], [1.5]]))
        >>> [value.numpy().ravel() for value in loss.loss_gradient(cpu, y, z)]
        [array([2.5], dtype=float32), array([ 1., -1.], dtype=float32)]

        """
        function = built(self._gradient, self).of(predicted, weight is not None)
        loss, gradient = function(X1=expected, X2=predicted, **self._weights(weight))
        return loss, gradient

    def loss_scores(
        self, device: OrtDevice, expected: OrtValue, predicted: OrtValue, weight: OrtValue | None = None
    ) -> OrtValue:
        """Returns the losses before the sum, without the constant factor of the total loss.

        Args:
            device: the device of the values.
            expected: the targets, like the targets of :meth:`loss_gradient`.
            predicted: the predictions of the model.
            weight: a weight for each row.

        Returns:
            The losses, of the shape of ``predicted``.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`.
            InvalidArgumentError: for a value of a wrong type or shape.

        >>> from ortrain.gradient.sgd_learning_loss import SquareLearningLoss
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, loss = get_ort_device("cpu"), SquareLearningLoss()
        >>> loss.build_onnx_function(15, cpu, None)
        >>> y, z = (numpy_to_ort_value(np.array(rows, np.float32)) for rows in ([[1], [2]], [[3], [1.5]]))
        >>> loss.loss_scores(cpu, y, z).numpy().ravel()
        array([4.  , 0.25], dtype=float32)

        """
        function = built(self._scores, self).of(predicted, weight is not None)
        return function(X1=expected, X2=predicted, **self._weights(weight))[0]

    def _weights(self, weight: OrtValue | None) -> dict[str, OrtValue]:
        if weight is None:
            return {}
        if self.weight_name_ is None:
            raise InvalidArgumentError("the loss was built without row weights; build it with a weight_name")
        return {self.weight_name_: weight}


@public_name("ortrain.gradient.sgd_learning_loss")
class SquareLearningLoss(BaseLearningLoss):
    """Half the sum of the squares of the errors, ``0.5 * s * d ** 2``; its gradient is ``-s * d``.

    Source: ``onnxcustom.training.sgd_learning_loss.SquareLearningLoss``.

    >>> from ortrain.gradient.sgd_learning_loss import SquareLearningLoss
    >>> SquareLearningLoss()
    SquareLearningLoss()
    """

    def _function(self) -> tuple[str, dict[str, Any]]:
        return "grad_loss_square_error", {"multiply": 1}


@public_name("ortrain.gradient.sgd_learning_loss")
class AbsoluteLearningLoss(BaseLearningLoss):
    """The sum of the absolute errors, ``s * abs(d)``; its gradient is ``-s * sign(d)``.

    Source: ``onnxcustom.training.sgd_learning_loss.AbsoluteLearningLoss``.

    >>> from ortrain.gradient.sgd_learning_loss import AbsoluteLearningLoss
    >>> AbsoluteLearningLoss()
    AbsoluteLearningLoss()
    """

    def _function(self) -> tuple[str, dict[str, Any]]:
        return "grad_loss_absolute_error", {}


@public_name("ortrain.gradient.sgd_learning_loss")
class ElasticLearningLoss(BaseLearningLoss):
    """Elastic loss, ``s * (l1 * abs(d) + l2 * d ** 2)``; its gradient is ``-s * (l1 * sign(d) + 2 * l2 * d)``.

    Args:
        l1_weight: the factor of the absolute errors.
        l2_weight: the factor of the squares.

    Source: ``onnxcustom.training.sgd_learning_loss.ElasticLearningLoss``.

    >>> from ortrain.gradient.sgd_learning_loss import ElasticLearningLoss
    >>> ElasticLearningLoss(l1_weight=0.1)
    ElasticLearningLoss(l1_weight=0.1, l2_weight=0.5)

    """

    def __init__(self, l1_weight: float = 0.5, l2_weight: float = 0.5) -> None:
        super().__init__()
        self.l1_weight = l1_weight
        self.l2_weight = l2_weight

    def _function(self) -> tuple[str, dict[str, Any]]:
        return "grad_loss_elastic_error", {"l1_weight": self.l1_weight, "l2_weight": self.l2_weight}


@public_name("ortrain.gradient.sgd_learning_loss")
class NegLogLearningLoss(BaseLearningLoss):
    """Log loss of a raw score, for two classes 0 and 1.

    With ``p = clip(sigmoid(score), eps, 1 - eps)``, the loss is ``-s * ((1 - y) * log(1 - p) + y * log(p))``. Its
    gradient is ``s * (p - y)``. The targets are int64.

    Args:
        eps: the minimum distance of a probability from 0 and 1.
        probability_function: ``"sigmoid"``.

    Raises:
        InvalidArgumentError: for another probability function; raised by :meth:`build_onnx_function`.

    Source: ``onnxcustom.training.sgd_learning_loss.NegLogLearningLoss``.

    >>> from ortrain.gradient.sgd_learning_loss import NegLogLearningLoss
    >>> NegLogLearningLoss().eps
    1e-05

    """

    def __init__(self, eps: float = 1e-5, probability_function: str = "sigmoid") -> None:
        super().__init__()
        self.eps = eps
        self.probability_function = probability_function

    def _function(self) -> tuple[str, dict[str, Any]]:
        name = chosen(
            "function of probabilities", {"sigmoid": "grad_sigmoid_neg_log_loss_error"}, self.probability_function
        )
        return name, {"eps": self.eps}
