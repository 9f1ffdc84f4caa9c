"""From parameters to checkpoints and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import onnx

from ortrain import _ortrain
from ortrain._sources import PathLike


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path: PathLike,
    nominal_checkpoint: bool = False,
) -> None:
    """Write a checkpoint.

    Args:
        parameters: those that are trained, and those that are not: :meth:`TrainingBlock.parameters`.
        path: the file; one that is there is replaced when the new one is complete.
        nominal_checkpoint: whether names and types are written without the values.

    Raises:
        OrtrainError: for a name that is there twice, or if the file cannot be written.

    >>> trained = [tensor for tensor in model.graph.initializer if tensor.name.startswith("fc2.")]
    >>> onnxblock.save_checkpoint((trained, []), "second_layer")
    >>> CheckpointState.load_checkpoint("second_layer").parameters
    Parameters(fc2.bias, fc2.weight)

    """
    trained, frozen = parameters
    _ortrain.save_checkpoint(_holding(trained), _holding(frozen), os.fspath(path), nominal_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: PathLike, model: onnx.ModelProto) -> None:
    """Give initializers of a model, in place, the values that a checkpoint has for their names.

    Raises:
        InvalidArgumentError: for a nominal checkpoint, which has no values.
        NoSuchFileError, OrtrainError: if the file is not there or is damaged.

    >>> state.parameters["fc2.bias"] = np.ones(10, np.float32)
    >>> CheckpointState.save_checkpoint(state, "trained")
    >>> onnxblock.load_checkpoint_to_model("trained", model)
    >>> (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "fc2.bias"]
    >>> float(onnx.numpy_helper.to_array(bias).sum())
    10.0

    """
    found = onnx.ModelProto.FromString(_ortrain.checkpoint_initializers(os.fspath(path_to_checkpoint)))
    values = {tensor.name: tensor for tensor in found.graph.initializer}
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(values[tensor.name])


def _holding(tensors: Iterable[onnx.TensorProto]) -> bytes:
    """A model that holds nothing but these initializers."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.append(onnx.helper.make_opsetid("", 17))
    model.graph.name = "parameters"
    model.graph.initializer.extend(tensors)
    return bytes(model.SerializeToString())
