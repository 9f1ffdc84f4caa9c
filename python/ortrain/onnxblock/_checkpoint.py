"""Conversion between ONNX parameters and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import onnx

from ortrain import _ortrain
from ortrain._model_source import PathLike


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path: PathLike,
    nominal_checkpoint: bool = False,
) -> None:
    """Write a checkpoint.

    Args:
        parameters: the trained parameters, and the parameters that are not trained: :meth:`TrainingBlock.parameters`.
        path: the file. An existing file is replaced after the new file is complete.
        nominal_checkpoint: True to write names and types without the values.

    Raises:
        OrtrainError: for a duplicate name, or if the file cannot be written.

    >>> trained = [tensor for tensor in model.graph.initializer if tensor.name.startswith("fc2.")]
    >>> onnxblock.save_checkpoint((trained, []), "second_layer")
    >>> CheckpointState.load_checkpoint("second_layer").parameters
    Parameters(fc2.bias, fc2.weight)

    """
    trained, frozen = parameters
    _ortrain.save_checkpoint(_holding(trained), _holding(frozen), os.fspath(path), nominal_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: PathLike, model: onnx.ModelProto) -> None:
    """Copy the values of a checkpoint into the initializers of the same names, in place.

    Raises:
        InvalidArgumentError: for a nominal checkpoint, which has no values.
        NoSuchFileError, OrtrainError: if the file does not exist or is damaged.

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
    """Serialize a model with only these initializers."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.append(onnx.helper.make_opsetid("", 17))
    model.graph.name = "parameters"
    model.graph.initializer.extend(tensors)
    return bytes(model.SerializeToString())
