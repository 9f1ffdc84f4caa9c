"""What onnxruntime's extension module has, ``onnxruntime.capi._pybind_state``, in its own names.

Scripts take values, vectors of values and devices from there, and the exceptions by which sessions fail. The exceptions
are those of :mod:`ortrain.errors`.

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
    """The kinds of memory that a device can have. On the CPU all are the same.

    >>> from ortrain.capi import OrtMemType
    >>> int(OrtMemType.DEFAULT)
    0
    """

    CPU_INPUT = -2
    """Memory of the CPU that a node reads."""

    CPU_OUTPUT = -1
    """Memory of the CPU that a node writes."""

    CPU = -1
    """The same, under its other name."""

    DEFAULT = 0
    """The memory of the device itself."""


Fail = OrtrainError
RuntimeException = OrtrainError
InvalidArgument = InvalidArgumentError
NoSuchFile = NoSuchFileError
InvalidProtobuf = InvalidModelError
InvalidGraph = InvalidModelError
NotImplemented = UnsupportedError  # noqa: A001


class NoModel(OrtrainError):  # noqa: N818
    """A session without a model: the one of :class:`TrainingSession` before it is loaded.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.NoModel, OrtrainError)
    True
    """

    _code = (4, "NO_MODEL")


class ModelLoaded(OrtrainError):  # noqa: N818
    """A session that is given a second model: :class:`TrainingSession` takes one.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.ModelLoaded, OrtrainError)
    True
    """

    _code = (8, "MODEL_LOADED")


class EngineError(OrtrainError):
    """A failure of what runs nodes for onnxruntime. It is never raised: ortrain runs them itself.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.EngineError, OrtrainError)
    True
    """

    _code = (5, "ENGINE_ERROR")


class EPFail(OrtrainError):  # noqa: N818
    """A failure of an execution provider, after which another is tried. It is never raised: nothing falls back.

    >>> from ortrain import OrtrainError, capi
    >>> issubclass(capi.EPFail, OrtrainError)
    True
    """

    _code = (11, "EP_FAIL")
