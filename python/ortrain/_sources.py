"""What a caller may pass for a model."""

from __future__ import annotations

import os
from typing import Protocol, TypeAlias, runtime_checkable


@runtime_checkable
class SupportsSerializeToString(Protocol):
    """A protobuf message, such as ``onnx.ModelProto``; ``onnx`` itself is never imported."""

    def SerializeToString(self) -> bytes:  # noqa: N802  (the name protobuf gives it)
        """The message as bytes."""
        ...


PathLike: TypeAlias = str | os.PathLike[str]
ModelLike: TypeAlias = str | os.PathLike[str] | bytes | SupportsSerializeToString


def model_source(model: ModelLike) -> str | bytes:
    """A path as ``str``, or the bytes of the model."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if isinstance(model, SupportsSerializeToString):
        return model.SerializeToString()
    raise TypeError(f"a model is a path, bytes or an onnx.ModelProto, not {type(model).__name__}")
