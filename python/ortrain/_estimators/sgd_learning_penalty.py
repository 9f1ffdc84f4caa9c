"""Penalties on weights."""

from __future__ import annotations

from typing import Any

import onnx

from ortrain._estimators.functions import Learning, Typed, built, chosen
from ortrain._ortrain import OrtDevice, OrtValue
from ortrain._public_name import public_name
from ortrain.errors import OrtrainError

__all__ = ["BaseLearningPenalty", "ElasticLearningPenalty", "NoLearningPenalty"]


@public_name("ortrain.gradient.sgd_learning_penalty")
class BaseLearningPenalty(Learning):
    """Penalty on large weights: a term of the loss, and an update of the weights.

    Source: ``onnxcustom.training.sgd_learning_penalty.BaseLearningPenalty``.

    >>> from ortrain.gradient.sgd_learning_penalty import BaseLearningPenalty
    >>> BaseLearningPenalty.select("elastic", l1=0.0)
    ElasticLearningPenalty(l1=0.0, l2=0.5)
    """

    @staticmethod
    def select(class_name: BaseLearningPenalty | str | None, **kwargs: Any) -> BaseLearningPenalty:
        """Returns a penalty by its name.

        Args:
            class_name: a penalty, which is returned unchanged; ``None`` or ``""`` for no penalty; ``"elastic"``,
                ``"l1l2"``, or the name of a class.
            kwargs: parameters of the class.

        Raises:
            InvalidArgumentError: for any other value.

        >>> from ortrain.gradient.sgd_learning_penalty import BaseLearningPenalty
        >>> BaseLearningPenalty.select(None)
        NoLearningPenalty()

        """
        if isinstance(class_name, BaseLearningPenalty):
            return class_name
        names: dict[str | None, type[BaseLearningPenalty]] = {
            None: NoLearningPenalty,
            "": NoLearningPenalty,
            "elastic": ElasticLearningPenalty,
            "l1l2": ElasticLearningPenalty,
        }
        names |= {kind.__name__: kind for kind in names.values()}
        return chosen("penalty", names, class_name)(**kwargs)

    def penalty_loss(self, device: OrtDevice, loss: OrtValue, *weights: OrtValue) -> OrtValue:
        """Adds the penalty to a loss, in place.

        Args:
            device: the device of the values.
            loss: the loss, of shape ``(1,)``.
            weights: the weights; their number is the argument of :meth:`build_onnx_function`.

        Returns:
            The loss.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`, and for a wrong number of weights.

        >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, penalty = get_ort_device("cpu"), ElasticLearningPenalty(l1=0.1, l2=0.2)
        >>> penalty.build_onnx_function(15, cpu, 2)
        >>> values = ([10], [1, -2, 0], [[3]])
        >>> loss, *weights = (numpy_to_ort_value(np.array(value, np.float32)) for value in values)
        >>> penalty.penalty_loss(cpu, loss, *weights).numpy()
        array([13.4], dtype=float32)

        """
        raise NotImplementedError(f"{type(self).__name__} has no penalty_loss")

    def update_weights(self, n_bind: int, device: OrtDevice, statei: OrtValue) -> OrtValue:
        """Updates a weight by the penalty, in place; the learning rate does not scale this update.

        Args:
            n_bind: the index of the weight.
            device: the device of the weight.
            statei: the weight, of float32 or float64.

        Returns:
            The weight.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`.

        >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, penalty = get_ort_device("cpu"), ElasticLearningPenalty(l1=0.0, l2=0.25)
        >>> penalty.build_onnx_function(15, cpu, 1)
        >>> penalty.update_weights(0, cpu, numpy_to_ort_value(np.ones(2, np.float32))).numpy()
        array([0.5, 0.5], dtype=float32)

        """
        raise NotImplementedError(f"{type(self).__name__} has no update_weights")


@public_name("ortrain.gradient.sgd_learning_penalty")
class NoLearningPenalty(BaseLearningPenalty):
    """No penalty: losses and weights do not change.

    Source: ``onnxcustom.training.sgd_learning_penalty.NoLearningPenalty``.

    >>> from ortrain.gradient.sgd_learning_penalty import NoLearningPenalty
    >>> NoLearningPenalty()
    NoLearningPenalty()
    """

    def __init__(self) -> None:
        pass

    def build_onnx_function(self, opset: int, device: OrtDevice, n_tensors: int) -> None:
        """Does nothing, because there is no function.

        >>> from ortrain.gradient.sgd_learning_penalty import NoLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> NoLearningPenalty().build_onnx_function(15, get_ort_device("cpu"), 2)
        """

    def penalty_loss(self, device: OrtDevice, loss: OrtValue, *weights: OrtValue) -> OrtValue:
        """Returns the loss unchanged.

        >>> from ortrain.gradient.sgd_learning_penalty import NoLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> loss = numpy_to_ort_value(np.ones(1, np.float32))
        >>> NoLearningPenalty().penalty_loss(get_ort_device("cpu"), loss) is loss
        True
        """
        return loss

    def update_weights(self, n_bind: int, device: OrtDevice, statei: OrtValue) -> OrtValue:
        """Returns the weight unchanged.

        >>> from ortrain.gradient.sgd_learning_penalty import NoLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> weight = numpy_to_ort_value(np.ones(2, np.float32))
        >>> NoLearningPenalty().update_weights(0, get_ort_device("cpu"), weight) is weight
        True
        """
        return statei


@public_name("ortrain.gradient.sgd_learning_penalty")
class ElasticLearningPenalty(BaseLearningPenalty):
    """The sum of ``l1 * abs(w) + l2 * w ** 2`` over all weights.

    A step changes a weight to ``w * (1 - 2 * l2) - l1 * sign(w)``.

    Args:
        l1: the factor of the absolute values.
        l2: the factor of the squares.

    Source: ``onnxcustom.training.sgd_learning_penalty.ElasticLearningPenalty``; Zou and Hastie, Regularization and
    variable selection via the elastic net, 2005.

    >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
    >>> ElasticLearningPenalty(l1=1e-3, l2=1e-4)
    ElasticLearningPenalty(l1=0.001, l2=0.0001)

    """

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        self.l1 = l1
        self.l2 = l2
        self._loss: Typed | None = None
        self._update: Typed | None = None
        self._count = 0

    def build_onnx_function(self, opset: int, device: OrtDevice, n_tensors: int) -> None:
        """Builds the functions of the penalty.

        Args:
            opset: the opset of the functions.
            device: the device of the functions.
            n_tensors: the number of weights.

        >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> penalty = ElasticLearningPenalty()
        >>> penalty.build_onnx_function(15, get_ort_device("cpu"), 2)
        >>> len(penalty.penalty_onnx_.graph.input)
        3

        """
        self._count = n_tensors
        self._loss = Typed(
            "n_penalty_elastic_error",
            target_opset=opset,
            n_tensors=n_tensors,
            loss_shape=(1,),
            l1_weight=self.l1,
            l2_weight=self.l2,
        )
        self._update = Typed("update_penalty_elastic_error", target_opset=opset, l1=self.l1, l2=self.l2)
        self.penalty_onnx_: onnx.ModelProto = self._loss.model
        self.penalty_grad_onnx_: onnx.ModelProto = self._update.model

    def penalty_loss(self, device: OrtDevice, loss: OrtValue, *weights: OrtValue) -> OrtValue:
        """Adds the penalty of all weights to a loss, in place.

        Args:
            device: the device of the values.
            loss: the loss, of shape ``(1,)``, of float32 or float64.
            weights: the weights, of the type of the loss.

        Returns:
            The loss.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`, and for a wrong number of weights.

        >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, penalty = get_ort_device("cpu"), ElasticLearningPenalty(l1=1.0, l2=0.0)
        >>> penalty.build_onnx_function(15, cpu, 1)
        >>> loss, weight = (numpy_to_ort_value(np.ones(count, np.float32)) for count in (1, 3))
        >>> penalty.penalty_loss(cpu, loss, weight).numpy()
        array([4.], dtype=float32)

        """
        function = built(self._loss, self).of(loss)
        if len(weights) != self._count:
            raise OrtrainError(f"the penalty was built for {self._count} weights, got {len(weights)}")
        function.write({"Y": loss}, loss=loss, **{f"W{at}": weight for at, weight in enumerate(weights)})
        return loss

    def update_weights(self, n_bind: int, device: OrtDevice, statei: OrtValue) -> OrtValue:
        """Changes a weight to ``w * (1 - 2 * l2) - l1 * sign(w)``, in place.

        Args:
            n_bind: the index of the weight.
            device: the device of the weight.
            statei: the weight, of float32 or float64.

        Returns:
            The weight.

        Raises:
            OrtrainError: before :meth:`build_onnx_function`.

        >>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
        >>> cpu, penalty = get_ort_device("cpu"), ElasticLearningPenalty(l1=1.0, l2=0.0)
        >>> penalty.build_onnx_function(15, cpu, 1)
        >>> penalty.update_weights(0, cpu, numpy_to_ort_value(np.array([3, -3], np.float32))).numpy()
        array([ 2., -2.], dtype=float32)

        """
        function = built(self._update, self).of(statei)
        function.write({"Y": statei}, X=statei)
        return statei
