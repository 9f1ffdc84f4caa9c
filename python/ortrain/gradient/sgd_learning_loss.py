"""Losses with their gradients as ONNX functions: ``onnxcustom.training.sgd_learning_loss``.

>>> from ortrain.gradient.sgd_learning_loss import SquareLearningLoss
>>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
>>> cpu, loss = get_ort_device("cpu"), SquareLearningLoss()
>>> loss.build_onnx_function(15, cpu, None)
>>> expected, predicted = (numpy_to_ort_value(np.array(rows, np.float32)) for rows in ([[1], [2]], [[3], [1]]))
>>> value, gradient = loss.loss_gradient(cpu, expected, predicted)
>>> value.numpy(), gradient.numpy().ravel()
(array([2.5], dtype=float32), array([ 2., -1.], dtype=float32))
"""

from ortrain._estimators.sgd_learning_loss import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)

__all__ = [
    "AbsoluteLearningLoss",
    "BaseLearningLoss",
    "ElasticLearningLoss",
    "NegLogLearningLoss",
    "SquareLearningLoss",
]
