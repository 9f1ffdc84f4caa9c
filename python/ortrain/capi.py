"""Names of onnxruntime's extension module, ``onnxruntime.capi._pybind_state``.

Scripts import values, vectors of values, devices and the exceptions of sessions from there. The exceptions are the
classes of :mod:`ortrain.errors`.

>>> from ortrain import capi as C
>>> device = C.OrtDevice(C.OrtDevice.cpu(), C.OrtMemType.DEFAULT, 0)
>>> values = C.OrtValueVector()
>>> values.push_back(C.OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32), device))
>>> values[0].device_name()
'Cpu'
"""

from __future__ import annotations

import enum

from ortrain._classic_core import TrainingConfigurationResult, TrainingSession
from ortrain._ortrain import OrtDevice, OrtValue, OrtValueCache, OrtValueVector
from ortrain.classic import TrainingParameters
from ortrain.errors import (
    InvalidArgumentError,
    InvalidModelError,
    NoSuchFileError,
    OrtrainError,
    UnsupportedError,
)
from ortrain.gradient.agent import (
    GraphInfo,
    OrtModuleGraphBuilder,
    OrtModuleGraphBuilderConfiguration,
    PartialGraphExecutionState,
    TrainingAgent,
    TrainingGraphTransformerConfiguration,
)
from ortrain.gradient.builder import GradientGraphBuilder
from ortrain.iobinding import SessionIOBinding

__all__ = [
    "EPFail",
    "EngineError",
    "Fail",
    "GradientGraphBuilder",
    "GraphInfo",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelLoaded",
    "NoModel",
    "NoSuchFile",
    "NotImplemented",
    "OrtDevice",
    "OrtMemType",
    "OrtModuleGraphBuilder",
    "OrtModuleGraphBuilderConfiguration",
    "OrtValue",
    "OrtValueCache",
    "OrtValueVector",
    "PartialGraphExecutionState",
    "RuntimeException",
    "SessionIOBinding",
    "TrainingAgent",
    "TrainingConfigurationResult",
    "TrainingGraphTransformerConfiguration",
    "TrainingParameters",
    "TrainingSession",
]


class OrtMemType(enum.IntEnum):
    """Kinds of memory of a device. On the CPU all kinds are the same.

    >>> from ortrain.capi import OrtMemType
    >>> int(OrtMemType.DEFAULT)
    0
    """

    CPU_INPUT = -2
    """Memory of the CPU that a node reads."""

    CPU_OUTPUT = -1
    """Memory of the CPU that a node writes."""

    CPU = -1
    """Another name of the same kind."""

    DEFAULT = 0
    """Memory of the device itself."""


Fail = OrtrainError
RuntimeException = OrtrainError
InvalidArgument = InvalidArgumentError
NoSuchFile = NoSuchFileError
InvalidProtobuf = InvalidModelError
InvalidGraph = InvalidModelError
NotImplemented = UnsupportedError  # noqa: A001


class NoModel(OrtrainError):  # noqa: N818
    """Use of a session without a model, such as a :class:`TrainingSession` before it is loaded.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.NoModel, OrtrainError)
    True
    """

    _code = (4, "NO_MODEL")


class ModelLoaded(OrtrainError):  # noqa: N818
    """Second model for a session: :class:`TrainingSession` takes one model.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.ModelLoaded, OrtrainError)
    True
    """

    _code = (8, "MODEL_LOADED")


class EngineError(OrtrainError):
    """Failure of onnxruntime's execution engine. It is never raised: ortrain runs nodes itself.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.EngineError, OrtrainError)
    True
    """

    _code = (5, "ENGINE_ERROR")


class EPFail(OrtrainError):  # noqa: N818
    """Failure of an execution provider, followed by a fallback. It is never raised: ortrain has no fallback.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.EPFail, OrtrainError)
    True
    """

    _code = (11, "EP_FAIL")
