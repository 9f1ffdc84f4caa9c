"""Errors and warnings of ``fit``."""

from __future__ import annotations

from ortrain._public_name import public_name
from ortrain.errors import OrtrainError

__all__ = ["ConvergenceError", "ConvergenceWarning", "EvaluationError", "ProviderError"]


@public_name("ortrain.gradient.excs")
class ConvergenceError(OrtrainError):
    """Training with a loss that is NaN or infinite, usually because the learning rate is too large.

    Source: ``onnxcustom.training.ConvergenceError``.

    >>> from ortrain.gradient.excs import ConvergenceError
    >>> raise ConvergenceError("the loss is nan at a learning rate of 1000.0")
    Traceback (most recent call last):
    ortrain.gradient.excs.ConvergenceError: the loss is nan at a learning rate of 1000.0
    """


@public_name("ortrain.gradient.excs")
class ConvergenceWarning(UserWarning):
    """Warning for the same problem, if the training continues.

    Source: ``onnxcustom.training.ConvergenceWarning``.

    >>> from ortrain.gradient.excs import ConvergenceWarning
    >>> issubclass(ConvergenceWarning, UserWarning)
    True
    """


@public_name("ortrain.gradient.excs")
class EvaluationError(OrtrainError):
    """Evaluation with a loss that is NaN or infinite.

    Source: ``onnxcustom.training.EvaluationError``.

    >>> from ortrain.gradient.excs import EvaluationError
    >>> issubclass(EvaluationError, RuntimeError)
    True
    """


@public_name("ortrain.gradient.excs")
class ProviderError(OrtrainError):
    """Value on another device than the function that reads it.

    Source: ``onnxcustom.training.ProviderError``.

    >>> from ortrain.gradient.excs import ProviderError
    >>> issubclass(ProviderError, RuntimeError)
    True
    """
