"""Conversion of the values that a caller may pass as a model."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

from ortrain.errors import InvalidArgumentError, NoSuchFileError


@runtime_checkable
class SupportsSerializeToString(Protocol):
    """Protobuf message, such as ``onnx.ModelProto``; ``onnx`` itself is never imported."""

    def SerializeToString(self) -> bytes:  # noqa: N802  (the name protobuf gives it)
        """Return the message as bytes."""
        ...


class ModelInFolder(NamedTuple):
    """Message of a model, and the folder of its external data."""

    message: bytes
    folder: str


PathLike: TypeAlias = str | os.PathLike[str]
ModelLike: TypeAlias = str | os.PathLike[str] | bytes | SupportsSerializeToString


@overload
def in_folder(model: tuple[bytes, PathLike | None]) -> bytes | ModelInFolder: ...
@overload
def in_folder(model: tuple[bytes, PathLike | None] | None) -> bytes | ModelInFolder | None: ...
def in_folder(model: tuple[bytes, PathLike | None] | None) -> bytes | ModelInFolder | None:
    """Return a message with the folder of its external data, or the message alone if it has no such data."""
    if model is None:
        return None
    message, folder = model
    return message if folder is None else ModelInFolder(message, os.fspath(folder))


def source_of(model: ModelLike | ModelInFolder) -> str | bytes | ModelInFolder:
    """Work like :func:`model_source`, also for a message with the folder of its external data."""
    return model if isinstance(model, ModelInFolder) else model_source(model)


def model_source(model: ModelLike) -> str | bytes:
    """Return a path as ``str``, or the bytes of the model."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if isinstance(model, SupportsSerializeToString):
        try:
            return model.SerializeToString()
        except Exception as error:
            # protobuf may be absent, so its errors are matched by name. Models have no required fields to be missing.
            if type(error).__name__ not in ("EncodeError", "ValueError"):
                raise
            raise InvalidArgumentError(
                "the model has more than 2 GiB, the limit of a protobuf message; save its weights in a separate "
                "file (onnx.save_model(..., save_as_external_data=True)), and pass the path of the model"
            ) from error
    raise TypeError(f"a model must be a path, bytes or an onnx.ModelProto, got {type(model).__name__}")


def existing_library(path: PathLike) -> str:
    """Return the path of a shared library of operators. It is not loaded: a model with its operators is an error."""
    if not os.path.exists(path):  # noqa: PTH110  (pathlib would be all that it is imported for)
        raise NoSuchFileError(f"there is no file {os.fspath(path)}")
    return os.fspath(path)
