"""Penalties on large weights as ONNX functions, with the names of onnxcustom.

The original module is ``onnxcustom.training.sgd_learning_penalty``.

>>> from ortrain.gradient.sgd_learning_penalty import ElasticLearningPenalty
>>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device, numpy_to_ort_value
>>> cpu, penalty = get_ort_device("cpu"), ElasticLearningPenalty(l1=0.1, l2=0.2)
>>> penalty.build_onnx_function(15, cpu, 1)
>>> weight = numpy_to_ort_value(np.array([1, -2, 0], np.float32))
>>> penalty.update_weights(0, cpu, weight).numpy()
array([ 0.5, -1.1,  0. ], dtype=float32)
"""

from ortrain._estimators.sgd_learning_penalty import BaseLearningPenalty, ElasticLearningPenalty, NoLearningPenalty

__all__ = ["BaseLearningPenalty", "ElasticLearningPenalty", "NoLearningPenalty"]
