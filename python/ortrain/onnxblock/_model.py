"""The model that blocks edit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import onnx

from ortrain._operators import OperatorLibrary, Plain
from ortrain._sources import PathLike, existing_library
from ortrain.errors import InvalidArgumentError

# What onnxruntime-training 1.19.2 reads; the core writes its optimizer models with the same.
_IR_VERSION = 10
_GENERATED = re.compile(r"onnx::.*::(\d+)")

Message = TypeVar("Message", onnx.ValueInfoProto, onnx.TensorProto)


class ModelAccessor:
    """The model that blocks edit in a context, and where its file lies if one was named."""

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
        # Names count on from those that another context has put into the model.
        # Blocks that are being built, one inside of the other.
        self.depth = 0
        self.last_number = max((int(match[1]) for match in found if match), default=0)

    @property
    def model(self) -> onnx.ModelProto:
        """The model."""
        return self._model

    @property
    def operators(self) -> OperatorLibrary | None:
        """The operators and gradients of the caller's that were given with the model."""
        return self._operators

    @property
    def path(self) -> str:
        """The path that was given with the model.

        Raises:
            InvalidArgumentError: if none was.

        """
        if self._path is None:
            raise InvalidArgumentError("no path was given with this model")
        return self._path

    def source(self, model: onnx.ModelProto) -> Plain:
        """A model with the external data that this one has beside its path, if there is one."""
        message = model.SerializeToString()
        return message if self._path is None else (message, os.path.dirname(self._path) or ".")  # noqa: PTH120

    @property
    def has_path(self) -> bool:
        """Whether a path was given with the model."""
        return self._path is not None

    def name(self, token: str) -> str:
        """A new name, ``onnx::<token>::<n>``."""
        self.last_number += 1
        return f"onnx::{token}::{self.last_number}"

    def opset(self) -> int:
        """The version of the standard operators that the model uses."""
        return opset_of(self._model)


_CURRENT: ContextVar[ModelAccessor | None] = ContextVar("ortrain.onnxblock.model", default=None)
_LIBRARY: ContextVar[str | None] = ContextVar("ortrain.onnxblock.custom_op_library", default=None)


def current() -> ModelAccessor:
    """The model of the context that is open in this thread."""
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
    """A context in which blocks edit a copy of a model.

    Args:
        model: the model; it is not changed.
        model_path: where its file lies: its external data is found beside it, if the model was loaded without, as
            models of more than 2 GiB have to be. Kept for :attr:`ModelAccessor.path`, too.
        operators: operators and gradients of one's own that the model, or what blocks add to it, uses.

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
        raise InvalidArgumentError(f"onnxblock.base needs an onnx.ModelProto, not {type(model).__name__}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _open(ModelAccessor(copy, model_path, operators)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """A context in which blocks build a model from nothing.

    Args:
        opset_version: the version of the standard operators; the newest that ``onnx`` knows unless given. The model's
            IR version is 10, which onnxruntime-training 1.19.2 reads, or the oldest that these operators need.

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
    """A context for models whose operators are in a shared library.

    ortrain has operators of its own alone and loads no library. So whatever the library does not take part in is built
    as usual, and a model that uses one of its operators is refused where it is read, with the names of the operators
    and their nodes.

    Args:
        custom_op_library_path: the library.

    Raises:
        NoSuchFileError: if there is no such file.
        InvalidArgumentError: inside another such context.

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
    """The version of the standard operators that a model uses."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def is_defined(model: onnx.ModelProto, name: str) -> bool:
    """Whether a value of this name is there or is used."""
    graph = model.graph
    return any(entry.name == name for entry in [*graph.input, *graph.initializer]) or any(
        name in node.input or name in node.output for node in graph.node
    )


def find(entries: Iterable[Message], name: str) -> Message | None:
    """The first entry of this name."""
    return next((entry for entry in entries if entry.name == name), None)
