"""Train ONNX models where they run.

============================  =========================================================================
:mod:`ortrain.artifacts`      once, from an ONNX model: the files that training needs
:mod:`ortrain.onnxblock`      losses and optimizers of one's own for them, made of blocks; needs ``onnx``
:mod:`ortrain.api`            train: ``CheckpointState``, ``Module``, ``Optimizer``, ``LinearLRScheduler``
:mod:`ortrain.session`        the same behind one object: the ``TrainingSession`` of C#
:class:`InferenceSession`     run a model
``python -m ortrain inspect`` say what of a model would be trained, what would not, and why
``python -m ortrain dump``    print what becomes of a model, stage by stage
============================  =========================================================================

Names and meanings follow ``onnxruntime.training``; every difference is listed in ``docs/migrating.md``. NumPy is
the only requirement, except where another is named. The library prints nothing; whatever goes wrong is an
:class:`OrtrainError` whose text says where, and what would help.
"""

from ortrain import api, artifacts, session
from ortrain._dump import dump
from ortrain._inspect import Inspection, ParameterInfo, inspect
from ortrain._ortrain import __version__
from ortrain.errors import (
    InvalidArgumentError,
    InvalidModelError,
    MemoryLimitError,
    NoSuchFileError,
    OrtrainError,
    UnsupportedError,
)
from ortrain.inference import InferenceSession, NodeArg, SessionOptions
from ortrain.ortvalue import OrtValue

__all__ = [
    "InferenceSession",
    "Inspection",
    "InvalidArgumentError",
    "InvalidModelError",
    "MemoryLimitError",
    "NoSuchFileError",
    "NodeArg",
    "OrtValue",
    "OrtrainError",
    "ParameterInfo",
    "SessionOptions",
    "UnsupportedError",
    "__version__",
    "api",
    "artifacts",
    "dump",
    "inspect",
    "session",
]
