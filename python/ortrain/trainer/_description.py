"""Checks of a description against the model, and of inputs against the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from onnx import ModelProto

    from ortrain.classic import TrainingSession
    from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc

__all__ = ["add_types", "check_description", "check_shape", "narrow_type", "shapes_of_losses"]


def narrow_type(precision: str | None) -> np.dtype[Any]:
    """Returns the NumPy type of an output that mixed precision computes.

    Without ``ml_dtypes``, bfloat16 is ``uint16``.
    """
    if precision == "float16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind


def check_description(description: _ORTTrainerModelDesc, model: ModelProto) -> None:
    """Checks that the shapes of a description match the model."""
    for kind, described, values in (
        ("input", description.inputs, model.graph.input),
        ("output", description.outputs, model.graph.output),
    ):
        shapes = {value.name: value.type.tensor_type for value in values}
        for value in described:
            if getattr(value, "is_loss", False) and any(size != 1 for size in value.shape if isinstance(size, int)):
                raise InvalidArgumentError(
                    f"the loss {value.name!r} has the shape {list(value.shape)} in model_desc, but a loss must be "
                    "one number: []"
                )
            tensor = shapes.get(value.name)
            # A loss is one number, so its shape may differ.
            if tensor is not None and tensor.HasField("shape") and not getattr(value, "is_loss", False):
                _check_shape_of_graph(kind, value.name, value.shape, tensor.shape.dim)


def _check_shape_of_graph(kind: str, name: str, shape: Sequence[int | str], dims: Sequence[Any]) -> None:
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]
    fits = len(sizes) == len(shape) and all(
        own == size for own, size in zip(shape, sizes, strict=True) if isinstance(own, int) and isinstance(size, int)
    )
    if not fits:
        raise InvalidArgumentError(
            f"{kind} {name!r} has the shape {list(shape)} in model_desc, but {sizes} in the model"
        )


def add_types(description: _ORTTrainerModelDesc, model: ModelProto) -> None:
    """Adds the element types of the model to a description."""
    for kind, described, values, add in (
        ("input", description.inputs, model.graph.input, description.add_type_to_input_description),
        ("output", description.outputs, model.graph.output, description.add_type_to_output_description),
    ):
        types = {value.name: value.type.tensor_type.elem_type for value in values}
        for index, value in enumerate(list(described)):
            if not types.get(value.name):
                raise AssertionError(
                    f"ONNX model with unknown {kind} type ({value.name}); it has {', '.join(types)}"
                    f"{hint(value.name, types)}"
                )
            add(index, _numpy_type(types[value.name]))


def _numpy_type(element_type: int) -> np.dtype[Any]:
    from onnx import helper

    return np.dtype(helper.tensor_dtype_to_np_dtype(element_type))


def shapes_of_losses(description: _ORTTrainerModelDesc, session: TrainingSession) -> dict[str, list[int]]:
    """Returns the described shape of each loss that has another rank in the model."""
    found = {output.name: output.shape for output in session._described_outputs()}
    return {
        output.name: [1] * len(output.shape)
        for output in description.outputs
        if output.is_loss and len(output.shape) != len(found.get(output.name, output.shape))
    }


def check_shape(name: str, shape: Sequence[int | str], actual: Sequence[int], sizes: dict[str, int]) -> None:
    """Checks the shape of an input against the description. ``sizes`` holds the known named sizes and is extended."""
    if len(actual) != len(shape):
        raise InvalidArgumentError(
            f"input {name!r} has the shape {list(actual)}, but {list(shape)} in model_desc: the numbers of axes differ"
        )
    for size, expected in zip(actual, shape, strict=True):
        if isinstance(expected, str):
            if sizes.setdefault(expected, size) != size:
                raise AssertionError(
                    f"Mismatch in dynamic shape {expected}: {sizes[expected]} in an earlier input, "
                    f"{size} in input {name!r}"
                )
        elif size != expected:
            raise InvalidArgumentError(f"input {name!r} has the shape {list(actual)}, but {list(shape)} in model_desc")
