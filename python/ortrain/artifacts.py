"""Generation of the files that training needs, from an ONNX model, once and ahead of time.

>>> from pathlib import Path
>>> import ortrain
>>> from ortrain import artifacts
>>> artifacts.generate_artifacts(
...     ortrain.examples.perceptron(),
...     loss=artifacts.LossType.CrossEntropyLoss,
...     optimizer=artifacts.OptimType.AdamW,
...     prefix="digits_",
... )
>>> sorted(path.name for path in Path().glob("digits_*"))
['digits_checkpoint', 'digits_eval_model.onnx', 'digits_optimizer_model.onnx', 'digits_training_model.onnx']
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import operator
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np

from ortrain import _ortrain
from ortrain._inspect import Inspection, ParameterInfo, inspection
from ortrain._model_source import ModelLike, PathLike, existing_library, model_source, source_of
from ortrain._operators import OperatorLibrary, Plain, Source, with_operators, with_stops
from ortrain._suggest import near_to_pattern
from ortrain.errors import InvalidArgumentError, TrainingWarning, UnsupportedError
from ortrain.optim import OptimizerConfig
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.onnxblock import Block

__all__ = ["SGD", "AdamW", "Loss", "LossType", "OptimType", "generate_artifacts", "open_batch", "replace_head"]


class LossType(enum.IntEnum):
    """Losses that :func:`generate_artifacts` can add to a model.

    The target has the type and the shape of the scores. ``labels`` are int64 and have the shape of the scores without
    the class axis. That is axis 1 unless :attr:`Loss.class_axis` names another one. In this table, y are the scores,
    t is the target, and means are over all elements:

    ======================  ========================================================================================
    ``MSELoss``             mean of ``(y - t)**2``
    ``L1Loss``              mean of ``abs(y - t)``
    ``BCEWithLogitsLoss``   mean of ``-(t * log(p) + (1 - t) * log(1 - p))`` with ``p = 1 / (1 + exp(-y))``
    ``CrossEntropyLoss``    ``SoftmaxCrossEntropyLoss`` (ONNX 12): mean of ``-log(softmax(y, axis=1)[labels])``
    ======================  ========================================================================================

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=artifacts.LossType.MSELoss)
    >>> Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint")).input_names()
    ['x', 'target']
    """

    MSELoss = 1
    """Mean of squared differences to ``target``."""
    CrossEntropyLoss = 2
    """Softmax cross-entropy of class scores and int64 ``labels``, averaged."""
    BCEWithLogitsLoss = 3
    """Binary cross-entropy of logits and ``target``, averaged."""
    L1Loss = 4
    """Mean of absolute differences to ``target``."""


@dataclass(frozen=True, eq=False)
class Loss:
    """Loss with settings, or a term of a sum of losses.

    This example is the sum of two losses. The first one counts the last class twentyfold:

    >>> import ortrain
    >>> from ortrain.artifacts import Loss, LossType, generate_artifacts
    >>> rare = Loss(LossType.CrossEntropyLoss, weight=[1, 1, 1, 1, 1, 1, 1, 1, 1, 20], label_smoothing=0.1)
    >>> small = Loss(LossType.L1Loss, target="wanted", factor=0.01)
    >>> generate_artifacts(ortrain.examples.perceptron(), loss=[rare, small])
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> module.input_names()
    ['x', 'labels', 'wanted']
    """

    kind: LossType
    """Kind of the loss."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the losses of all elements. The mean of cross-entropy is weighted by class."""
    weight: npt.ArrayLike | None = None
    """``CrossEntropyLoss``: a float for each class, which multiplies the losses of its elements.
    ``BCEWithLogitsLoss``: floats that multiply the losses, broadcast to their shape."""
    pos_weight: npt.ArrayLike | None = None
    """``BCEWithLogitsLoss``: floats that multiply the losses of positive targets, broadcast."""
    ignore_index: int | None = None
    """``CrossEntropyLoss``: a label of elements that are ignored."""
    class_axis: int | None = None
    """``CrossEntropyLoss``: the axis of the classes in the scores, -1 for the last one. ``None`` is axis 1, as in ONNX.
    If that is impossible, as for the scores ``[batch, sequence, classes]`` of a language model, it is the last axis,
    and a :class:`~ortrain.TrainingWarning` says so."""
    label_smoothing: float = 0.0
    """``CrossEntropyLoss``: the share of the target, from 0 to 1, that is divided equally among all classes
    (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016). Needs opset 13."""
    sample_weight: str | None = None
    """Name of an input with a float for each row, which multiplies the loss of the row. A mean is divided by the same
    number as without the weights. Losses of several scores may share the input."""
    stable: bool = False
    """``BCEWithLogitsLoss``: True for a formula that is finite for all logits. The formula of onnxruntime-training is
    not finite from logits of about 17 on."""
    soft: bool = False
    """``CrossEntropyLoss``: True if the target has a probability for each class instead of a label."""
    scores: str | None = None
    """Value that is compared; ``None`` for the model's output."""
    target: str | None = None
    """Value that the scores are compared to. Without a name, or if there is no such value, it is a new input of the
    models: ``target``, or ``labels`` for class labels. Losses of several scores have their own inputs, named after the
    scores (``target_boxes``), unless they name the same one. Scores and targets have the same shape, without
    broadcasting."""
    factor: float = 1.0
    """Factor of the loss in a sum of several losses."""
    name: str | None = None
    """Name under which the loss, before the multiplication, is an output of each step after the sum; ``None`` if the
    loss is not an output of its own."""

    def _described(self) -> dict[str, Any]:
        return {
            "loss": _member("loss", self.kind, LossType),
            "reduction": self.reduction,
            "weight": _floats(self.weight),
            "pos_weight": _floats(self.pos_weight),
            "ignore_index": self.ignore_index,
            "class_axis": self.class_axis,
            "label_smoothing": self.label_smoothing,
            "sample_weight": self.sample_weight,
            "stable": self.stable,
            "soft": self.soft,
            "scores": self.scores,
            "target": self.target,
            "factor": self.factor,
            "name": self.name,
        }


class OptimType(enum.IntEnum):
    """Optimizers that :func:`generate_artifacts` can write.

    Both are operators of ``com.microsoft`` (version 1): ``AdamWOptimizer`` (Loshchilov and Hutter, "Decoupled Weight
    Decay Regularization", 2019) and ``SGDOptimizerV2``. The learning rate and the step count are inputs of the
    optimizer model. :class:`AdamW` and :class:`SGD` are the same optimizers with settings and gradient clipping.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=artifacts.OptimType.SGD)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    """

    AdamW = 1
    """AdamW with the formula of onnxruntime: betas 0.9 and 0.999, epsilon 1e-6, no weight decay. The formula of PyTorch
    is ``AdamW(formula="pytorch")``."""
    SGD = 2
    """Plain stochastic gradient descent."""


@dataclass(frozen=True)
class AdamW:
    """AdamW with settings. There are two formulas, and each has its own defaults.

    In this table, m and v are the moments of the gradients after step t (the first step is 1). Further, b1 and b2 are
    the betas, w is a weight, and r is the learning rate:

    ==================  ============================================================================================
    ``"onnxruntime"``   ``w -= r * sqrt(1 - b2**t) / (1 - b1**t) * m / (sqrt(v) + eps)``, and then
                        ``w -= r * weight_decay * w``: ``adam_mode`` 1 of ``AdamWOptimizer``, which
                        onnxruntime-training writes
    ``"pytorch"``       ``w -= r * weight_decay * w``, and then
                        ``w -= r / (1 - b1**t) * m / (sqrt(v / (1 - b2**t)) + eps)``: ``adam_mode`` 0, the formula of
                        ``torch.optim.AdamW``
    ==================  ============================================================================================

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> as_torch = artifacts.AdamW(formula="pytorch")
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=as_torch)
    """

    formula: Literal["onnxruntime", "pytorch"] = "onnxruntime"
    """Source of the formula."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float | None = None
    """Term added to the root of the second moment; ``None`` for 1e-6 in onnxruntime's formula and 1e-8 in PyTorch's."""
    weight_decay: float | None = None
    """Share of a weight, times the learning rate, that a step subtracts; ``None`` for 0 in onnxruntime's formula and
    0.01 in PyTorch's."""
    bias_correction: bool = True
    """True to correct the moments for starting at zero. PyTorch's formula always does."""
    max_norm: float | None = None
    """Maximum norm of the gradients over all parameters; larger gradients are scaled down to it."""

    def _settings(self) -> dict[str, Any]:
        torch = self.formula == "pytorch"
        return {
            "betas": self.betas,
            "eps": (1e-8 if torch else 1e-6) if self.eps is None else self.eps,
            "weight_decay": (0.01 if torch else 0.0) if self.weight_decay is None else self.weight_decay,
            "bias_correction": self.bias_correction,
            "formula": self.formula,
            "max_norm": self.max_norm,
        }


@dataclass(frozen=True)
class SGD:
    """Plain stochastic gradient descent with settings: a step subtracts the learning rate times the gradient.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> clipped = artifacts.SGD(max_norm=1.0)
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=clipped)
    """

    max_norm: float | None = None
    """Maximum norm of the gradients over all parameters; larger gradients are scaled down to it."""

    def _settings(self) -> dict[str, Any]:
        return AdamW(max_norm=self.max_norm)._settings()


def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | Callable[[ParameterInfo], bool] | None = None,
    frozen_params: Sequence[str] | Callable[[ParameterInfo], bool] | None = None,
    loss: LossType | Loss | Sequence[Loss] | Block | None = None,
    optimizer: OptimType | AdamW | SGD | OptimizerConfig | Block | None = None,
    artifact_directory: PathLike | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: PathLike | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    batch_norm: Literal["auto", "train", "freeze"] = "auto",
    operators: OperatorLibrary | None = None,
    external_data: bool = False,
    last: int | None = None,
    master_weights: Literal["float32"] | None = None,
    stop_gradients: Sequence[str] | None = None,
    quantized: Literal["train", "freeze"] = "train",
    embed: bool = False,
    data_folder: PathLike | None = None,
) -> None:
    """Write ``training_model.onnx``, ``eval_model.onnx``, ``checkpoint`` and, on request, the other files.

    The files load in ortrain and in onnxruntime-training. All files are written, or no file is. Existing files are
    replaced. The caller's model is not changed.

    Constants that are neither trained nor in the checkpoint (a frozen base) are stored in the models, or once for all
    models in external files. External data of the model in the artifact folder or below it stays there, and the
    artifacts name its files. External data in other folders is written to ``frozen.data``, because readers of ONNX
    find no files outside the folder of a model. All other constants join it if a model would exceed 2 GiB.

    Artifacts of a model with adapters (:mod:`ortrain.lora`) have the SHA-1 of the files to which they refer. ortrain
    compares it when it loads them.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        requires_grad: initializers to train: names, patterns (``"encoder.*"``, as of :mod:`fnmatch`), or a callable
            that takes an :class:`~ortrain.ParameterInfo` and returns True to train it. A pattern may match the name of
            a parameter, or the name of a node that uses it (``"/encoder/layer.11/*"``). Patterns and callables select
            from the parameters that :func:`ortrain.inspect` calls trained; ``None`` trains all of them. A name may also
            be a value that the model computes from constants alone (by a ``ConstantOfShape``, say). The value then
            becomes a parameter with its current content.
        frozen_params: initializers, or computed values as above, that are stored in the checkpoint but not trained:
            names, patterns, or a callable. They select from all floats.
        loss: the loss on the model's outputs: one loss, several losses, or a block of :mod:`ortrain.onnxblock`. Of
            several losses the sum is trained. A block is called with the names of the outputs. With ``None``, the first
            output is the loss, a single number. A loss with a name is also an output of each step, after the sum.
        optimizer: the optimizer of ``optimizer_model.onnx``: an optimizer of :mod:`ortrain.optim` with settings and
            parameter groups, an optimizer of onnxruntime-training (:class:`OptimType`, :class:`AdamW`, :class:`SGD`),
            or a block of :mod:`ortrain.onnxblock`; ``None`` writes no such file.
        artifact_directory: an existing folder; ``None`` for the current one.
        prefix: text before each file name.
        ort_format: not supported; must be ``False``.
        custom_op_library: a shared library of operators. The file must exist and is not loaded. A model with operators
            that neither ortrain nor ``operators`` has is an error that names them.
        additional_output_names: values that each training and eval step returns in addition to the loss.
        nominal_checkpoint: True to write ``nominal_checkpoint``, too: the names and types without the values.
        loss_input_names: the values that the loss is computed from; by default the model's outputs. If the first output
            is a choice, such as the label of a classifier, the only float output is the default instead. Losses that
            take logits then use the logits before its softmax or sigmoid; other losses use that output itself.
        batch_norm: the statistics that ``BatchNormalization`` uses in training. ``"auto"``: a node with a trained scale
            or bias uses the statistics of the batch, and each training step updates the running statistics. Other nodes
            use the running statistics, which do not change. ``"train"`` and ``"freeze"``: the first or the second of
            these for all nodes. The attribute ``training_mode`` of the model is ignored. Updated running statistics are
            in the checkpoint as frozen parameters, even if ``frozen_params`` does not name them. The eval model uses
            the running statistics.
        operators: operators and gradients of your own. The artifacts contain plain nodes and need no library.
        external_data: True to store initializers in ``frozen.data`` even if the models take less than 2 GiB.
        last: the number of layers to train, counted from the end (:attr:`ortrain.ParameterInfo.layer`), instead of
            ``requires_grad``.
        master_weights: ``"float32"`` stores trained weights of float16 or bfloat16 as float32 in the checkpoint. The
            models read them through a cast, so that small updates add up, and exports have the type of the model again.
            ``None`` trains each weight in its own type. An error if no trained weight is float16 or bfloat16.
        stop_gradients: values that pass no gradient, such as results that PyTorch computes after ``detach`` or under
            ``no_grad``, which leave no trace in a file. Each entry is the name of a float that a node computes, also in
            subgraphs, or a pattern (``"*/assigner/*"``). :func:`ortrain.inspect` lists candidates
            (:attr:`~ortrain.Inspection.stop_candidates`).
        quantized: the integer weights of a model from a quantizer. ``"train"``: float32 weights that the models read
            through ``QuantizeLinear``, with straight-through gradients. An export has integers again, in the nodes of
            the quantized model. Integers with the name ``x_quantized`` become the weight ``x``. ``"freeze"``: the
            integers stay. Scales are trained only if ``requires_grad`` names them. Packed weights of two, four and
            eight bits (``MatMulNBits``) are always frozen, and so are the integers of a model with adapters.
        embed: True to store all constants in the models, also external data, up to 2 GiB.
        data_folder: the folder in which the reader of the artifacts will look for external data, if it is not the
            artifact folder. No files are written there.

    Warns:
        TrainingWarning: if a loss does not fit its input: a loss of logits on a softmax or a sigmoid, or the negative
            log-likelihood on logits. The message names the value to use instead. If weights of float16 or bfloat16 are
            trained in that type, because small updates are lost. If a constant is trained by default that may not be a
            parameter (:attr:`ortrain.ParameterInfo.confidence` is ``"guess"``).

    Raises:
        InvalidArgumentError: for a name or a pattern without a match, for a parameter that is both trained and frozen,
            and if no parameter is left to train. Also for an entry of ``stop_gradients`` that is a weight, an input or
            no float.
        InvalidModelError, UnsupportedError: if the model cannot be read or differentiated, or a loss does not fit it:
            scores of another type or rank, a setting that the loss does not have, an opset before 12 or 13.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.
        TypeError: for arguments of other types.

    This example trains the second layer and freezes the first one. Each step returns the logits after the loss:

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> artifacts.generate_artifacts(
    ...     ortrain.examples.perceptron(),
    ...     requires_grad=["fc2.*"],
    ...     frozen_params=["fc1.*"],
    ...     loss=artifacts.Loss(artifacts.LossType.CrossEntropyLoss, label_smoothing=0.1),
    ...     optimizer=artifacts.OptimType.AdamW,
    ...     additional_output_names=["logits"],
    ... )
    >>> state = CheckpointState.load_checkpoint("checkpoint")
    >>> [name for name, parameter in state.parameters if parameter.requires_grad]
    ['fc2.bias', 'fc2.weight']
    >>> loss, logits = Module("training_model.onnx", state)(x, labels)
    >>> logits.shape
    (8, 10)

    """
    if ort_format:
        raise UnsupportedError("ort_format=True is not supported: ortrain writes and reads .onnx files")
    if custom_op_library is not None:
        existing_library(custom_op_library)
    if master_weights not in (None, "float32"):
        raise InvalidArgumentError(
            f"master_weights must be 'float32' or None, got {master_weights!r}; weights of float32 and float64 are "
            "trained in their own type"
        )
    if quantized not in ("train", "freeze"):
        raise InvalidArgumentError(f"quantized must be 'train' or 'freeze', got {quantized!r}")
    source: Plain = source_of(model)
    if quantized == "train":
        source = _ortrain.with_float_weights(source) or source
    optimizer_model = None
    chosen = _Choice(with_stops(with_operators(source, operators), stop_gradients), loss, loss_input_names)
    frozen = chosen.frozen(frozen_params)
    trained = chosen.trained(requires_grad, frozen, last)
    if _is_block(loss) or _is_block(optimizer):
        # Only blocks need `onnx`.
        from ortrain.onnxblock import _artifacts

        forward_model = _ortrain.with_initializers(source, []) if isinstance(source, tuple) else source
        if _is_block(loss):
            names = _names("loss_input_names", loss_input_names)
            additional = _names("additional_output_names", additional_output_names)
            source = _artifacts.with_loss(forward_model, loss, names, additional, operators)
            loss, loss_input_names = None, None
        if _is_block(optimizer):
            optimizer_model, optimizer = _artifacts.optimizer_model(forward_model, optimizer, trained, frozen), None
    settings, spec, own = None, None, None
    if isinstance(optimizer, OptimizerConfig):
        spec, own, optimizer = chosen.described(optimizer, trained), optimizer._own, None
    if isinstance(optimizer, AdamW | SGD):
        settings, optimizer = optimizer._settings(), OptimType[type(optimizer).__name__]
    doubts = _ortrain.generate_artifacts(
        with_stops(with_operators(source, operators), stop_gradients),
        requires_grad=trained,
        frozen_params=frozen,
        losses=[term._described() for term in _losses(loss)],
        optimizer=_member("optimizer", optimizer, OptimType),
        optimizer_model=optimizer_model,
        directory="." if artifact_directory is None else os.fspath(artifact_directory),
        prefix=prefix,
        additional_output_names=_names("additional_output_names", additional_output_names),
        nominal_checkpoint=nominal_checkpoint,
        loss_input_names=_names("loss_input_names", loss_input_names),
        batch_norm=batch_norm,
        external_above=0 if external_data else None,
        optimizer_settings=settings,
        embed=embed,
        data_folder=None if data_folder is None else os.fspath(data_folder),
        master_weights=master_weights is not None,
        optimizer_spec=spec,
        own_optimizer=own,
    )
    by_default = requires_grad is None or last is not None
    for sentence in [*(chosen.about_guesses(trained) if by_default else []), *doubts]:
        warnings.warn(sentence, TrainingWarning, stacklevel=2)


def open_batch(model: ModelLike) -> bytes:
    """Return a model for batches of any size, from a model for batches of one size.

    The first axis of the first input is renamed to ``batch``, and so are the first axes of other inputs with the same
    size. The parts of the model that repeat the size are adapted:

    - a Reshape to a constant shape, also if the batch is not the first axis or shares an axis with attention heads;
    - an Expand or a ConstantOfShape with a shape that begins with the batch;
    - constants with equal rows: a class token, a mask;
    - initial states of zeros of a recurrent layer.

    A model with an open batch axis is returned unchanged. Each row of a larger batch gets the result of the original
    model. A run on random inputs checks this, if the model can run on them.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.

    Raises:
        InvalidModelError: if the model cannot be read, or its first input has no axes. Also if a node depends on the
            size of the batch, or mixes its rows; the error names the node.

    >>> import ortrain
    >>> from onnx import TensorProto, helper
    >>> declare = helper.make_tensor_value_info
    >>> x, y = (declare(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    >>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    >>> fixed = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    >>> session = ortrain.InferenceSession(ortrain.artifacts.open_batch(fixed))
    >>> session.get_inputs()[0].shape
    ['batch', 4]

    """
    return _ortrain.open_batch(model_source(model))


def replace_head(model: ModelLike, classes: int, *, output: str | None = None, seed: int = 0) -> bytes:
    """Return the model with a new last layer, for another number of classes.

    Its weights and its bias are drawn uniformly from ``-1 / sqrt(n)`` to ``1 / sqrt(n)``, as in ``torch.nn.Linear``;
    n is the number of terms in the sum of each score. They keep their names. Nodes after the scores (a softmax, a
    global pooling) stay.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        classes: the new number of scores.
        output: the value that the layer computes, possibly through a softmax or a global pooling; ``None`` for the
            first output of the model.
        seed: the seed of the random values, which are the same on every machine.

    Raises:
        InvalidModelError: if the model cannot be read, or shares the weights of the layer. Also if the layer is neither
            a Gemm, nor a MatMul (with an Add), nor a Conv with a kernel of one element.
        InvalidArgumentError: if the value does not exist, or if a node after the layer fits the old classes only.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> model = artifacts.replace_head(ortrain.examples.perceptron(), classes=4)
    >>> artifacts.generate_artifacts(model, requires_grad=["fc2.*"], loss=artifacts.LossType.CrossEntropyLoss)
    >>> CheckpointState.load_checkpoint("checkpoint").parameters["fc2.bias"].data.shape
    (4,)

    """
    return _ortrain.replace_head(model_source(model), operator.index(classes), output, operator.index(seed))


class _Choice:
    """Selection of parameters by names, patterns and callables. The model is inspected only on demand."""

    def __init__(
        self,
        source: Source,
        loss: LossType | Loss | Sequence[Loss] | Block | None,
        loss_input_names: Sequence[str] | None,
    ) -> None:
        self._source = source
        values = _names("loss_input_names", loss_input_names)
        if not values and not _is_block(loss):
            # A loss without `scores` compares the outputs of the model.
            scores = [term.scores for term in _losses(loss)]
            values = [name for name in scores if name is not None] if None not in scores else []
        self._values, self._first_output = values, loss is None

    @functools.cached_property
    def _inspection(self) -> Inspection:
        return inspection(self._source, self._values, first_output=self._first_output)

    @property
    def _found(self) -> list[ParameterInfo]:
        return self._inspection.parameters

    def about_guesses(self, trained: Sequence[str]) -> list[str]:
        """Return the warning about parameters that are trained by default but may be constants, if there are any."""
        names = set(trained)
        guesses = any(info.confidence == "guess" and info.name in names for info in self._found)
        sentence = self._inspection._about_guesses if guesses else None
        return [] if sentence is None else [sentence]

    def trained(
        self,
        selection: Sequence[str] | Callable[[ParameterInfo], bool] | None,
        frozen: Sequence[str],
        last: int | None,
    ) -> list[str]:
        if last is not None:
            return self._last(last, selection, frozen)
        if selection is None:
            return [info.name for info in self._found if info.role == "trained" and info.name not in frozen]
        return self._select("requires_grad", selection, lambda info: info.role == "trained")

    def _last(self, last: int, selection: object, frozen: Sequence[str]) -> list[str]:
        """Return the parameters of the last layers."""
        if selection is not None:
            raise InvalidArgumentError("requires_grad and last both select the trained parameters; pass only one")
        count = operator.index(last)
        there = max((info.layer for info in self._found if info.layer is not None), default=0)
        if not 1 <= count <= there:
            raise InvalidArgumentError(
                f"last must be from 1 to {there}, the number of layers that can be trained, got {count}"
            )
        layers = [(info.name, info.layer) for info in self._found if info.name not in frozen]
        return [name for name, layer in layers if layer is not None and layer <= count]

    def described(self, config: OptimizerConfig, trained: Sequence[str]) -> str:
        """Return the description of an optimizer for the trained parameters."""
        among = set(trained)

        def select(argument: str, selection: str | Sequence[str] | Callable[[ParameterInfo], bool]) -> list[str]:
            selection = [selection] if isinstance(selection, str) else selection
            names = self._select(argument, selection, lambda info: info.name in among)
            if not names:
                raise InvalidArgumentError(f"{argument} selects no trained parameter")
            return names

        return config._for(trained, select, lambda: {info.name: info.layer for info in self._found})

    def frozen(self, selection: Sequence[str] | Callable[[ParameterInfo], bool] | None) -> list[str]:
        return self._select("frozen_params", selection or (), lambda info: "float" in info.dtype)

    def _select(
        self,
        argument: str,
        selection: Sequence[str] | Callable[[ParameterInfo], bool],
        among: Callable[[ParameterInfo], bool],
    ) -> list[str]:
        if callable(selection):
            return [info.name for info in self._found if among(info) and selection(info)]
        names = _names(argument, selection)
        if not any(map(_is_pattern, names)):
            return names
        there = {info.name for info in self._found}
        chosen: dict[str, None] = {}
        for name in names:
            if name in there or not _is_pattern(name):
                chosen[name] = None
                continue
            fits = functools.partial(fnmatch.fnmatchcase, pat=name)
            matching = [info.name for info in self._found if among(info) and any(map(fits, (info.name, *info.nodes)))]
            if not matching:
                near = near_to_pattern(name, [info.name for info in self._found if among(info)])
                raise InvalidArgumentError(
                    f"{argument}: the pattern {name!r} matches no parameter of the model and no node that uses a "
                    f"parameter{near}"
                )
            chosen.update(dict.fromkeys(matching))
        return list(chosen)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _is_block(value: object) -> TypeGuard[Block]:
    """Return True if a value is a block. A block can only exist after its module was imported."""
    module = sys.modules.get("ortrain.onnxblock")
    return module is not None and isinstance(value, module.Block)


def _names(argument: str, names: Sequence[str] | None) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, got one name")
    return list(names) if names is not None else []


def _losses(loss: LossType | Loss | Sequence[Loss] | Block | None) -> Sequence[Loss]:
    if loss is None:
        return []
    if isinstance(loss, Loss):
        return [loss]
    if isinstance(loss, Sequence) and all(isinstance(term, Loss) for term in loss):
        return loss
    if isinstance(loss, LossType):
        return [Loss(loss)]
    raise _no_member("loss", loss, LossType)


def _floats(values: npt.ArrayLike | None) -> object:
    """Convert floats for the core, as a float64 array, which holds any float exactly."""
    return None if values is None else OrtValue.ortvalue_from_numpy(np.asarray(values, np.float64))._ortvalue


def _member(argument: str, value: object, kind: type[enum.IntEnum]) -> str | None:
    if value is None or isinstance(value, kind):
        return None if value is None else value.name
    raise _no_member(argument, value, kind)


def _no_member(argument: str, value: object, kind: type[enum.IntEnum]) -> TypeError:
    choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    return TypeError(
        f"{argument} must be one of {choices}, a block of ortrain.onnxblock or None, got {type(value).__name__}"
    )
