"""What can go wrong. Every class is a ``RuntimeError``, as in onnxruntime, so existing handlers keep working."""

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "FileError",
    "ModelError",
    "OrtrainError",
    "StateError",
    "UnsupportedError",
]


class OrtrainError(RuntimeError):
    """The root: anything that ortrain refuses or fails to do."""


class ModelError(OrtrainError):
    """A model that cannot be read, or that contradicts itself."""


class CheckpointError(OrtrainError):
    """A checkpoint that cannot be read, or whose bytes are not those that were written."""


class FileError(OrtrainError):
    """A file that cannot be opened, read or written."""


class UnsupportedError(OrtrainError, NotImplementedError):
    """Something well-defined that ortrain does not do. Operators are named all at once, with their nodes."""


class ArgumentError(OrtrainError, ValueError):
    """A value that does not fit: an input of another type or shape, a label out of range, an unknown name."""


class StateError(OrtrainError):
    """A call out of order: a nominal state that holds no values yet, a state used again inside its own step."""
