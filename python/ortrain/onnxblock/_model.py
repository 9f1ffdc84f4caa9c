"""Context of the model that blocks edit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import onnx

from ortrain._model_source import PathLike, existing_library
from ortrain._operators import OperatorLibrary, Plain
from ortrain.errors import InvalidArgumentError

# IR version that onnxruntime-training 1.19.2 reads. The core writes its optimizer models with the same version.
_IR_VERSION = 10
_GENERATED = re.compile(r"onnx::.*::(\d+)")

Message = TypeVar("Message", onnx.ValueInfoProto, onnx.TensorProto)


class ModelAccessor:
    """Model that blocks edit in a context, and the path of its file if the caller passed a path."""

    def __init__(
        self, model: onnx.ModelProto, path: PathLike | None = None, operators: OperatorLibrary | None = None
    ) -> None:
        self._model = model
        self._operators = operators
        self._path = None if path is None else os.fspath(path)
        graph = model.graph
        names = {name for node in graph.node for name in [node.name, *node.input, *node.output]}
        names.update(entry.name for entry in [*graph.input, *graph.initializer])
        found = (_GENERATED.fullmatch(name) for name in names)
        # Nesting depth of the blocks under construction.
        self.depth = 0
        # Generated names continue after the names from an earlier context.
        self.last_number = max((int(match[1]) for match in found if match), default=0)

    @property
    def model(self) -> onnx.ModelProto:
        """The model to edit."""
        return self._model

    @property
    def operators(self) -> OperatorLibrary | None:
        """The custom operators and gradients that the caller passed with the model."""
        return self._operators

    @property
    def path(self) -> str:
        """The path that the caller passed with the model.

        Raises:
            InvalidArgumentError: without a path.

        """
        if self._path is None:
            raise InvalidArgumentError("no path was given with this model")
        return self._path

    def source(self, model: onnx.ModelProto) -> Plain:
        """Return a serialized model, with the folder of the external data if the path is known."""
        message = model.SerializeToString()
        return message if self._path is None else (message, os.path.dirname(self._path) or ".")  # noqa: PTH120

    @property
    def has_path(self) -> bool:
        """True if the caller passed a path with the model."""
        return self._path is not None

    def name(self, token: str) -> str:
        """Return a new name, ``onnx::<token>::<n>``."""
        self.last_number += 1
        return f"onnx::{token}::{self.last_number}"

    def opset(self) -> int:
        """Return the opset version of the model."""
        return opset_of(self._model)


_CURRENT: ContextVar[ModelAccessor | None] = ContextVar("ortrain.onnxblock.model", default=None)
_LIBRARY: ContextVar[str | None] = ContextVar("ortrain.onnxblock.custom_op_library", default=None)


def current() -> ModelAccessor:
    """Return the model of the context that is open in this thread."""
    accessor = _CURRENT.get()
    if accessor is None:
        raise InvalidArgumentError(
            "there is no model to edit: call blocks inside `with onnxblock.base(model)` or "
            "`with onnxblock.empty_base()`"
        )
    return accessor


@contextmanager
def _open(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    if _CURRENT.get() is not None:
        raise InvalidArgumentError("onnxblock.base and onnxblock.empty_base do not nest: leave the open context first")
    token = _CURRENT.set(accessor)
    try:
        yield accessor
    finally:
        _CURRENT.reset(token)


@contextmanager
def base(
    model: onnx.ModelProto, model_path: PathLike | None = None, *, operators: OperatorLibrary | None = None
) -> Iterator[ModelAccessor]:
    """Open a context in which blocks edit a copy of a model.

    Args:
        model: the model; it is not changed.
        model_path: the path of the model file, also the value of :attr:`ModelAccessor.path`. If the model was loaded
            without external data, the data is read from the folder of this file. Models of more than 2 GiB must be
            loaded without external data.
        operators: custom operators and gradients for the nodes of the model and of blocks.

    Raises:
        InvalidArgumentError: without a model, or inside another context.

    >>> import onnx, ortrain
    >>> from ortrain import onnxblock
    >>> model = onnx.load(ortrain.examples.perceptron())
    >>> with onnxblock.base(model) as accessor:
    ...     onnxblock.blocks.Abs()("logits")
    'onnx::abs_output::1'
    >>> len(accessor.model.graph.node), len(model.graph.node)
    (4, 3)

    """
    if not isinstance(model, onnx.ModelProto):
        raise InvalidArgumentError(f"onnxblock.base expects an onnx.ModelProto, got {type(model).__name__}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _open(ModelAccessor(copy, model_path, operators)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Open a context in which blocks build a new model.

    Args:
        opset_version: the opset version; the newest version of ``onnx`` by default. The model has IR version 10, which
            onnxruntime-training 1.19.2 reads, or the oldest later version that the opset requires.

    >>> from ortrain import onnxblock
    >>> with onnxblock.empty_base(17) as accessor:
    ...     [(entry.domain, entry.version) for entry in accessor.model.opset_import]
    [('com.microsoft', 1), ('', 17)]

    """
    newest = onnx.defs.onnx_opset_version()
    graph = onnx.GraphProto(name="graph")
    imports = [onnx.helper.make_opsetid("com.microsoft", 1), onnx.helper.make_opsetid("", opset_version or newest)]
    needed = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    model = onnx.helper.make_model(
        graph, producer_name="orttraining", opset_imports=imports, ir_version=max(needed, _IR_VERSION)
    )
    with _open(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def custom_op_library(custom_op_library_path: PathLike) -> Iterator[None]:
    """Open a context for models with custom operators in a shared library.

    ortrain never loads the library, because it implements all operators itself. Models without operators of the library
    work as usual. A model with an operator of the library is rejected when it is read; the error names the operators
    and their nodes.

    Args:
        custom_op_library_path: the path of the library.

    Raises:
        NoSuchFileError: if the file does not exist.
        InvalidArgumentError: inside another context of this kind.

    >>> from ortrain import onnxblock
    >>> with onnxblock.custom_op_library("nowhere.so"):
    ...     pass
    Traceback (most recent call last):
    ortrain.errors.NoSuchFileError: there is no file nowhere.so

    """
    if _LIBRARY.get() is not None:
        raise InvalidArgumentError("onnxblock.custom_op_library does not nest: leave the open context first")
    token = _LIBRARY.set(existing_library(custom_op_library_path))
    try:
        yield
    finally:
        _LIBRARY.reset(token)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the opset version of a model."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def is_defined(model: onnx.ModelProto, name: str) -> bool:
    """Return True if the model defines or uses a value of this name."""
    graph = model.graph
    return any(entry.name == name for entry in [*graph.input, *graph.initializer]) or any(
        name in node.input or name in node.output for node in graph.node
    )


def find(entries: Iterable[Message], name: str) -> Message | None:
    """Return the first entry of this name."""
    return next((entry for entry in entries if entry.name == name), None)
