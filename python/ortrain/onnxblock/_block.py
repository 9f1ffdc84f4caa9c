"""Base class of all blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import PurePath
from typing import Any

import onnx

from ortrain._model_source import PathLike
from ortrain.errors import InvalidArgumentError
from ortrain.onnxblock._model import current

# Larger messages cannot be serialized; the checker needs serialized models.
_LARGEST = 2**31 - 1


class Block(ABC):
    """Base class of objects that edit the model of the open context.

    A subclass implements :meth:`build`. A call of the block calls :meth:`build`; the outermost block then checks the
    model with ``onnx.checker``.

    Args:
        temp_file_name: a relative path. onnxruntime-training writes large models there to check them; ortrain writes no
            file.

    >>> import onnx
    >>> from ortrain import onnxblock
    >>> class Double(onnxblock.Block):
    ...     def build(self, x):
    ...         self.base.graph.node.append(onnx.helper.make_node("Add", [x, x], ["doubled"]))
    ...         return "doubled"
    >>> with onnxblock.base(model):
    ...     Double()("logits")
    'doubled'

    """

    def __init__(self, temp_file_name: PathLike = "temp.onnx") -> None:
        if PurePath(temp_file_name).is_absolute():
            raise InvalidArgumentError(f"temp_file_name must be a relative path, got {temp_file_name}")
        self._base: onnx.ModelProto | None = None

    @property
    def base(self) -> onnx.ModelProto:
        """The model to edit: the model of the open context, or of the context of the block's last call.

        >>> block = onnxblock.blocks.Abs()
        >>> with onnxblock.base(model):
        ...     absolute = block("logits")
        >>> [node.op_type for node in block.base.graph.node]
        ['Gemm', 'Relu', 'Gemm', 'Abs']
        """
        if self._base is None:
            self._base = current().model
        return self._base

    @base.setter
    def base(self, model: onnx.ModelProto | None) -> None:
        self._base = model

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Edit :attr:`base`, and return the name of the result or a tuple of names.

        >>> class MeanOfSquares(onnxblock.Block):
        ...     def build(self, name):
        ...         return onnxblock.blocks.ReduceMean(keepdims=False)(onnxblock.blocks.Pow(2.0)(name))
        >>> with onnxblock.base(model):
        ...     MeanOfSquares()("logits")
        'onnx::reducemean_output::4'
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`build` on the model of the open context.

        Raises:
            InvalidArgumentError: outside of a context.
            onnx.checker.ValidationError: if the edited model is not valid.

        >>> with onnxblock.base(model):
        ...     onnxblock.blocks.Abs()("logits")
        'onnx::abs_output::1'
        >>> import ortrain
        >>> try:
        ...     onnxblock.blocks.Abs()("logits")
        ... except ortrain.InvalidArgumentError as error:
        ...     print(str(error).partition(":")[0])
        there is no model to edit

        """
        accessor = current()
        self._base = accessor.model
        accessor.depth += 1
        try:
            result = self.build(*args, **kwargs)
        finally:
            accessor.depth -= 1
        self._finish(result)
        # Only the outermost block checks the model, because a check covers the whole model.
        if accessor.depth == 0:
            check(self._base)
        return result

    def _finish(self, result: Any) -> None:  # noqa: B027  (most blocks have nothing left to do)
        """Process the result of :meth:`build`. The default does nothing."""

    def infer_shapes_on_base(self) -> None:
        """Add the types that can be inferred from the model to its ``value_info``.

        >>> block = onnxblock.blocks.ReduceMean(keepdims=False)
        >>> with onnxblock.base(model):
        ...     mean = block("logits")
        >>> block.infer_shapes_on_base()
        >>> (found,) = [entry for entry in block.base.graph.value_info if entry.name == mean]
        >>> len(found.type.tensor_type.shape.dim)
        0
        """
        if self.base.ByteSize() <= _LARGEST:
            inferred = onnx.shape_inference.infer_shapes(self.base)
            del self.base.graph.value_info[:]
            self.base.graph.value_info.extend(inferred.graph.value_info)


def check(model: onnx.ModelProto) -> None:
    """Raise the error that ``onnx.checker`` finds; a model that is too large for the checker passes."""
    if model.ByteSize() <= _LARGEST:
        onnx.checker.check_model(_without_external_data(model), full_check=True)


def _without_external_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inputs in place of initializers with external data; the checker would open their files."""
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    if not outside:
        return model
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    graph = checked.graph
    names, inputs = {tensor.name for tensor in outside}, {entry.name for entry in graph.input}
    inside = [tensor for tensor in graph.initializer if tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(inside)
    for tensor in outside:
        if tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return checked
