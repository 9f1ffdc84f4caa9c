"""Exceptions and warnings. Every exception is a ``RuntimeError``, as in onnxruntime, so existing handlers work.

>>> import ortrain
>>> from ortrain.api import CheckpointState
>>> try:
...     state = CheckpointState.load_checkpoint("nowhere")
... except ortrain.OrtrainError as error:
...     print(type(error).__name__)
NoSuchFileError
"""

from __future__ import annotations

import warnings

__all__ = [
    "AnomalyError",
    "DeviceLostError",
    "DeviceUnavailableError",
    "InvalidArgumentError",
    "InvalidModelError",
    "MemoryLimitError",
    "NoSuchFileError",
    "OrtrainError",
    "OutOfRangeError",
    "RankError",
    "TrainingWarning",
    "UnsupportedError",
]


class _Beginnings:
    """Switch for the prefix of messages, which begin as in onnxruntime while :mod:`ortrain.compat` is installed."""

    shown = False


class OrtrainError(RuntimeError):
    """Base class of all exceptions of ortrain.

    It is raised itself for a failing disk, a damaged checkpoint, and calls in the wrong order.

    >>> import ortrain
    >>> nominal = CheckpointState.load_checkpoint("nominal_checkpoint")
    >>> try:
    ...     nominal.parameters["fc1.bias"]
    ... except ortrain.OrtrainError as error:
    ...     print(str(error).partition(":")[0])
    the state is nominal
    """

    _code = (1, "FAIL")

    def __str__(self) -> str:
        text = super().__str__()
        code, name = self._code
        return f"[ONNXRuntimeError] : {code} : {name} : {text}" if _Beginnings.shown else text


class InvalidArgumentError(OrtrainError, ValueError):
    """Argument that does not fit: another type or shape, a label out of range, an unknown name.

    >>> state.parameters["fc2.bias"].data = np.zeros(5, np.float32)
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: parameter "fc2.bias" is float32[10], but a value of float32[5] was given
    """

    output: str | None = None
    """Output that does not fit its memory, if the error is about an output."""

    shape: tuple[int, ...] | None = None
    """Shape of that output; ``None`` if it depends on values."""

    _code = (2, "INVALID_ARGUMENT")


class OutOfRangeError(InvalidArgumentError, OverflowError):
    """Number that its storage type cannot hold: an integer outside int64, a float outside float32.

    >>> state.seed = 2**63
    Traceback (most recent call last):
    ortrain.errors.OutOfRangeError: a seed must be a 64-bit integer, from -2**63 to 2**63 - 1, got 9223372036854775808
    """


class NoSuchFileError(OrtrainError, FileNotFoundError):
    """File or folder that does not exist.

    >>> import ortrain
    >>> try:
    ...     session = ortrain.InferenceSession("nowhere.onnx")
    ... except FileNotFoundError as error:
    ...     print(type(error).__name__)
    NoSuchFileError
    """

    _code = (3, "NO_SUCHFILE")


class RankError(OrtrainError):
    """Failure of another rank of a distributed training, or ranks that do not make the same step.

    All ranks raise an error, and no rank has changed. If all ranks handle the error, they can train on.

    >>> from ortrain.errors import RankError
    >>> issubclass(RankError, ortrain.OrtrainError)
    True
    """


class InvalidModelError(OrtrainError):
    """Model that cannot be read, contradicts itself, or does not belong to its checkpoint.

    >>> import ortrain
    >>> ortrain.InferenceSession(b"not a model")
    Traceback (most recent call last):
    ortrain.errors.InvalidModelError: the model is not an ONNX model: it looks like text
    """

    _code = (7, "INVALID_PROTOBUF")


class MemoryLimitError(OrtrainError, MemoryError):
    """Run that would take more bytes than ``memory_limit``, or than its device has.

    An error about ``memory_limit`` names the largest buffers. Nothing was allocated, and nothing has changed.

    >>> import ortrain
    >>> options = ortrain.SessionOptions()
    >>> options.memory_limit = 1000
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    >>> try:
    ...     session.run(None, {"x": x})
    ... except ortrain.MemoryLimitError as error:
    ...     print(str(error).partition(";")[0])
    this takes 33960 bytes of memory (28840 constants, 5120 values of a step), but memory_limit is 1000
    """


class DeviceUnavailableError(OrtrainError):
    """Device that this machine does not have. The message gives the reason and the repair; there is no fallback.

    >>> import ortrain
    >>> try:
    ...     session = ortrain.InferenceSession(ortrain.examples.perceptron(), providers=["cuda:99"])
    ... except ortrain.DeviceUnavailableError as error:
    ...     print(str(error).partition(":99")[0])
    there is no device "cuda
    """

    _code = (9, "NOT_IMPLEMENTED")


class DeviceLostError(OrtrainError):
    """Device that failed during its use and no longer works.

    Every later call on the device raises this error, and so do calls on a device that was opened before a process was
    forked. Checkpoints on disk are not affected: load one, and make the module again on the same device or another.

    >>> import ortrain
    >>> issubclass(ortrain.DeviceLostError, ortrain.OrtrainError)
    True
    """


class AnomalyError(OrtrainError, FloatingPointError):
    """Step that produced NaN or infinities. The message names the first node, tensor and index; nothing was changed.

    Raised if :attr:`SessionOptions.detect_anomaly <ortrain.SessionOptions.detect_anomaly>` is set.

    >>> import ortrain
    >>> options = ortrain.SessionOptions()
    >>> options.detect_anomaly = True
    >>> careful = Module("training_model.onnx", state, session_options=options)
    >>> broken = x.copy()
    >>> broken[2, 5] = np.nan
    >>> try:
    ...     careful(broken, labels)
    ... except ortrain.AnomalyError as error:
    ...     print(str(error).partition(";")[0])
    the step computed NaN in the loss: "x", an input of the step, has NaN at [2, 5]
    """


class UnsupportedError(OrtrainError, NotImplementedError):
    """Well-defined request that ortrain does not support. The message names all such operators with their nodes.

    >>> import ortrain
    >>> ortrain.artifacts.generate_artifacts(ortrain.examples.perceptron(), ort_format=True)
    Traceback (most recent call last):
    ortrain.errors.UnsupportedError: ort_format=True is not supported: ortrain writes and reads .onnx files
    """

    _code = (9, "NOT_IMPLEMENTED")


class TrainingWarning(UserWarning):
    """Training that runs but is probably not intended.

    Examples are a loss of logits on probabilities, and an optimizer step that uses the gradients of the step before.
    The message names the value or the call to use instead. Like any warning it can be made an error:

    >>> import ortrain
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", ortrain.TrainingWarning)
    ...     for images, classes in [(x, labels)]:
    ...         loss = module(images, classes)
    ...         optimizer.step()
    ...         module.lazy_reset_grad()
    """


def _warn_of_gradients(doubt: str | None) -> None:
    """Warn about the gradients of an optimizer step. The warning points to the caller of that step."""
    if doubt is not None:
        sentence = f"{doubt}; call the module in training mode before each step of the optimizer"
        warnings.warn(sentence, TrainingWarning, stacklevel=3)
