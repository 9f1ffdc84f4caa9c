"""What can go wrong. Every class is a ``RuntimeError``, as in onnxruntime, so existing handlers keep working."""

__all__ = [
    "InvalidArgumentError",
    "InvalidModelError",
    "MemoryLimitError",
    "NoSuchFileError",
    "OrtrainError",
    "UnsupportedError",
]


class OrtrainError(RuntimeError):
    """The root: whatever ortrain refuses or fails to do.

    Raised itself for a failing disk, a damaged checkpoint, a call out of order.
    """


class InvalidArgumentError(OrtrainError, ValueError):
    """An argument that does not fit: another type or shape, a label out of range, an unknown name."""


class NoSuchFileError(OrtrainError, FileNotFoundError):
    """A file or folder that is not there."""


class InvalidModelError(OrtrainError):
    """A model that cannot be read, contradicts itself, or does not belong to its checkpoint."""


class MemoryLimitError(OrtrainError, MemoryError):
    """A run that would take more bytes than ``memory_limit``. Names the largest buffers; nothing was allocated."""


class UnsupportedError(OrtrainError, NotImplementedError):
    """Something well defined that ortrain does not do. Operators are named all at once, with their nodes."""
