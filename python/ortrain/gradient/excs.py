"""Errors and warnings of ``fit``, with the names of onnxcustom (``onnxcustom.training.excs``).

>>> from ortrain.gradient.excs import ConvergenceError
>>> issubclass(ConvergenceError, RuntimeError)
True
"""

from ortrain._estimators.excs import ConvergenceError, ConvergenceWarning, EvaluationError, ProviderError

__all__ = ["ConvergenceError", "ConvergenceWarning", "EvaluationError", "ProviderError"]
