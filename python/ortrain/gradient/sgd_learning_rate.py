"""Learning rates and their weight updates, with the names of onnxcustom (``onnxcustom.training.sgd_learning_rate``).

>>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
>>> [round(rate, 5) for rate in LearningRateSGD(0.01).loop(4)]
[0.01, 0.00841, 0.0076, 0.00707]
"""

from ortrain._estimators.sgd_learning_rate import BaseLearningRate, LearningRateSGD, LearningRateSGDNesterov

__all__ = ["BaseLearningRate", "LearningRateSGD", "LearningRateSGDNesterov"]
