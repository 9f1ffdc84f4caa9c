"""From an ONNX model to the files that training needs, once and ahead of time."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Literal

from ortrain import _ortrain
from ortrain._sources import ModelLike, PathLike, model_source
from ortrain.errors import UnsupportedError

__all__ = ["LossType", "OptimType", "generate_artifacts"]


class LossType(enum.IntEnum):
    """The losses that :func:`generate_artifacts` can put on a model."""

    MSELoss = 1
    """The mean of squared differences to ``target``."""
    CrossEntropyLoss = 2
    """Softmax cross-entropy of class scores and the int64 ``labels``, averaged."""
    BCEWithLogitsLoss = 3
    """Binary cross-entropy of logits and ``target``, averaged."""
    L1Loss = 4
    """The mean of absolute differences to ``target``."""


class OptimType(enum.IntEnum):
    """The optimizers that :func:`generate_artifacts` can write."""

    AdamW = 1
    """AdamW with bias correction: betas 0.9 and 0.999, epsilon 1e-6, no weight decay."""
    SGD = 2
    """Plain stochastic gradient descent."""


def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | None = None,
    optimizer: OptimType | None = None,
    artifact_directory: PathLike | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: PathLike | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    batch_norm: Literal["auto", "train", "freeze"] = "auto",
) -> None:
    """Write ``training_model.onnx``, ``eval_model.onnx``, ``checkpoint`` and, if asked for, the others.

    The files load here and in onnxruntime-training. Nothing is written unless everything can be; existing files are
    replaced. The caller's model is not changed.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        requires_grad: initializers to train. A value that the model computes from constants alone (by a
            ``ConstantOfShape``, say) may be named, too, and becomes a parameter with the value it has.
        frozen_params: initializers, or such values, that go into the checkpoint without being trained.
        loss: what to put on the model's outputs; ``None`` if the first output is the loss, a scalar.
        optimizer: what to write as ``optimizer_model.onnx``; ``None`` for no such file.
        artifact_directory: an existing folder; ``None`` for the current one.
        prefix: put before each file name.
        ort_format: not supported; must be ``False``.
        custom_op_library: not supported; must be ``None``.
        additional_output_names: values to return beside the loss, at each training and eval step.
        nominal_checkpoint: whether to write ``nominal_checkpoint`` too, the names and types without the values.
        loss_input_names: the values that the loss is made of, if not the model's outputs.
        batch_norm: which statistics ``BatchNormalization`` uses in training. ``"auto"``: those of the batch where its
            scale or bias is trained, and the running ones are updated at each training step; elsewhere the running
            ones, which stay as they are. ``"train"`` and ``"freeze"``: the one or the other everywhere. What the model
            itself says (``training_mode``) makes no difference. Running statistics that are updated are in the
            checkpoint as frozen parameters, whether ``frozen_params`` names them or not; the eval model uses them.

    """
    if ort_format:
        raise UnsupportedError("ort_format=True is not supported: ortrain writes and reads .onnx files")
    if custom_op_library is not None:
        raise UnsupportedError("custom_op_library is not supported: ortrain runs no operators from shared libraries")
    _ortrain.generate_artifacts(
        model_source(model),
        requires_grad=_names("requires_grad", requires_grad),
        frozen_params=_names("frozen_params", frozen_params),
        loss=_member("loss", loss, LossType),
        optimizer=_member("optimizer", optimizer, OptimType),
        directory="." if artifact_directory is None else os.fspath(artifact_directory),
        prefix=prefix,
        additional_output_names=_names("additional_output_names", additional_output_names),
        nominal_checkpoint=nominal_checkpoint,
        loss_input_names=_names("loss_input_names", loss_input_names),
        batch_norm=batch_norm,
    )


def _names(argument: str, names: Sequence[str] | None) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} is a list of names, not one name")
    return list(names) if names is not None else []


def _member(argument: str, value: object, kind: type[enum.IntEnum]) -> str | None:
    if value is None:
        return None
    if isinstance(value, kind):
        return value.name
    choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise TypeError(
        f"{argument} is one of {choices} or None, not {type(value).__name__}; blocks of onnxblock are not supported"
    )
