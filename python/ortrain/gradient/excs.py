"""What can go wrong in a ``fit``, by the names of onnxcustom (``onnxcustom.training.excs``).

>>> from ortrain.gradient.excs import ConvergenceError
>>> issubclass(ConvergenceError, RuntimeError)
True
"""

from __future__ import annotations

from ortrain.errors import OrtrainError

__all__ = ["ConvergenceError", "ConvergenceWarning", "EvaluationError", "ProviderError"]


class ConvergenceError(OrtrainError):
    """A training whose loss is no number any more, or infinite: its learning rate is too large, mostly.

    Source: ``onnxcustom.training.ConvergenceError``.

    >>> from ortrain.gradient.excs import ConvergenceError
    >>> raise ConvergenceError("the loss is nan at a learning rate of 1000.0")
    Traceback (most recent call last):
    ortrain.gradient.excs.ConvergenceError: the loss is nan at a learning rate of 1000.0
    """


class ConvergenceWarning(UserWarning):
    """The same as a warning, of a training that goes on all the same.

    Source: ``onnxcustom.training.ConvergenceWarning``.

    >>> from ortrain.gradient.excs import ConvergenceWarning
    >>> issubclass(ConvergenceWarning, UserWarning)
    True
    """


class EvaluationError(OrtrainError):
    """A loss that is no number, or infinite, on the data that a training is evaluated with.

    Source: ``onnxcustom.training.EvaluationError``.

    >>> from ortrain.gradient.excs import EvaluationError
    >>> issubclass(EvaluationError, RuntimeError)
    True
    """


class ProviderError(OrtrainError):
    """A value that lies on another device than the one that a function runs on.

    Source: ``onnxcustom.training.ProviderError``.

    >>> from ortrain.gradient.excs import ProviderError
    >>> issubclass(ProviderError, RuntimeError)
    True
    """
