"""From an ONNX model to the files that training needs, once and ahead of time.

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
from ortrain._near import near_to_pattern
from ortrain._operators import OperatorLibrary, Plain, Source, with_operators, with_stops
from ortrain._sources import ModelLike, PathLike, existing_library, model_source
from ortrain.errors import InvalidArgumentError, TrainingWarning, UnsupportedError
from ortrain.optim import OptimizerConfig
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.onnxblock import Block

__all__ = ["SGD", "AdamW", "Loss", "LossType", "OptimType", "generate_artifacts", "open_batch", "replace_head"]


class LossType(enum.IntEnum):
    """The losses that :func:`generate_artifacts` can put on a model.

    The target has the type and the shape of the scores; ``labels`` are int64 and have the shape of the scores without
    the axis of the classes, axis 1 unless :attr:`Loss.class_axis` names another one. With y the scores, t the target
    and means over all elements:

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
    """The mean of squared differences to ``target``."""
    CrossEntropyLoss = 2
    """Softmax cross-entropy of class scores and the int64 ``labels``, averaged."""
    BCEWithLogitsLoss = 3
    """Binary cross-entropy of logits and ``target``, averaged."""
    L1Loss = 4
    """The mean of absolute differences to ``target``."""


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss with settings, or a term of a sum of losses.

    The sum of two, of which the first counts the last class twentyfold:

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
    """Which loss."""
    reduction: Literal["mean", "sum"] = "mean"
    """What becomes of the losses of all elements. The mean of cross-entropy is weighted by class."""
    weight: npt.ArrayLike | None = None
    """Of ``CrossEntropyLoss``: a float for each class, by which the losses of its elements are multiplied. Of
    ``BCEWithLogitsLoss``: floats that the losses are multiplied by, broadcast to their shape."""
    pos_weight: npt.ArrayLike | None = None
    """Of ``BCEWithLogitsLoss``: floats that the losses of positive targets are multiplied by, broadcast."""
    ignore_index: int | None = None
    """Of ``CrossEntropyLoss``: a label whose elements count for nothing."""
    class_axis: int | None = None
    """Of ``CrossEntropyLoss``: the axis of the classes in the scores, -1 for the last one. ``None`` is axis 1, as in
    ONNX; where that cannot be, as for the scores ``[batch, sequence, classes]`` of a language model, it is the last
    one, and a :class:`~ortrain.TrainingWarning` says so."""
    label_smoothing: float = 0.0
    """Of ``CrossEntropyLoss``: the share of the target, from 0 to 1, that all classes get alike
    (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016). Needs opset 13."""
    scores: str | None = None
    """The value that is compared; ``None`` for the model's output."""
    target: str | None = None
    """The value that the scores are compared to. Without a name, or where there is no such value, it is a new input of
    the models: ``target``, or for class labels ``labels``. Losses of several scores have inputs of their own, called
    after these (``target_boxes``), unless they name the same one. Scores and targets have one shape; neither is
    broadcast."""
    factor: float = 1.0
    """What the loss is multiplied by in a sum of several."""
    name: str | None = None
    """The name under which the loss, before it is multiplied, is an output of each step behind the sum; ``None`` for a
    loss that is no output of its own."""

    def _described(self) -> dict[str, Any]:
        return {
            "loss": _member("loss", self.kind, LossType),
            "reduction": self.reduction,
            "weight": _floats(self.weight),
            "pos_weight": _floats(self.pos_weight),
            "ignore_index": self.ignore_index,
            "class_axis": self.class_axis,
            "label_smoothing": self.label_smoothing,
            "scores": self.scores,
            "target": self.target,
            "factor": self.factor,
            "name": self.name,
        }


class OptimType(enum.IntEnum):
    """The optimizers that :func:`generate_artifacts` can write.

    Both are operators of ``com.microsoft`` (version 1): ``AdamWOptimizer`` (Loshchilov and Hutter, "Decoupled Weight
    Decay Regularization", 2019) and ``SGDOptimizerV2``. Learning rate and count of steps are inputs of the optimizer
    model. :class:`AdamW` and :class:`SGD` are the same with settings, and gradient clipping.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=artifacts.OptimType.SGD)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    """

    AdamW = 1
    """AdamW in onnxruntime's formula: betas 0.9 and 0.999, epsilon 1e-6, no weight decay. PyTorch's is
    ``AdamW(formula="pytorch")``."""
    SGD = 2
    """Plain stochastic gradient descent."""


@dataclass(frozen=True)
class AdamW:
    """AdamW with settings. There are two formulas, of which each has its own defaults.

    With m and v the moments of the gradients after step t (the first is 1), b1 and b2 the betas, w a weight and r the
    learning rate:

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
    """Whose formula it is."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float | None = None
    """What is added to the root of the second moment; ``None`` for 1e-6 in onnxruntime's and 1e-8 in PyTorch's."""
    weight_decay: float | None = None
    """The share of a weight, times the learning rate, that a step takes away; ``None`` for 0 in onnxruntime's and 0.01
    in PyTorch's."""
    bias_correction: bool = True
    """Whether the moments are corrected for starting at zero. PyTorch's formula always does that."""
    max_norm: float | None = None
    """Gradients are scaled so that their norm, over all parameters, is at most this."""

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
    """Plain stochastic gradient descent with settings: a step takes the learning rate times the gradient away.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> clipped = artifacts.SGD(max_norm=1.0)
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=clipped)
    """

    max_norm: float | None = None
    """Gradients are scaled so that their norm, over all parameters, is at most this."""

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
) -> None:
    """Write ``training_model.onnx``, ``eval_model.onnx``, ``checkpoint`` and, if asked for, the others.

    The files load here and in onnxruntime-training. Nothing is written unless everything can be; existing files are
    replaced. The caller's model is not changed.

    What is neither trained nor in the checkpoint, a frozen base, lies in the models; or once for all of them in files
    beside them. What the model has in files of external data in the artifact folder or below stays there, and the
    artifacts name those files. What it has in files elsewhere, and everything else where a model would take more than
    2 GiB, is written to ``frozen.data``, for readers of ONNX find nothing outside the folder of a model.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        requires_grad: initializers to train: names, or patterns (``"encoder.*"``, as of :mod:`fnmatch`), or a
            callable that is given an :class:`~ortrain.ParameterInfo` and says whether it is trained. A pattern may fit
            the name of a parameter, or that of a node that uses it (``"/encoder/layer.11/*"``). Patterns and callables
            choose from what :func:`ortrain.inspect` calls trained; ``None`` trains all of that. A value that the model
            computes from constants alone (by a ``ConstantOfShape``, say) may be named, too, and becomes a parameter
            with the value it has.
        frozen_params: initializers, or such values, that go into the checkpoint without being trained: names,
            patterns, or a callable, which choose from all floats.
        loss: what to put on the model's outputs: one loss, or several, of which the sum is trained, or a block of
            :mod:`ortrain.onnxblock`, which is called with the names of the outputs; ``None`` if the first output is
            the loss, one number. Losses that have a name are outputs of each step, too, behind the sum.
        optimizer: what to write as ``optimizer_model.onnx``: an optimizer of :mod:`ortrain.optim` with its settings and
            groups of parameters, one of onnxruntime-training's (:class:`OptimType`, :class:`AdamW`, :class:`SGD`), or a
            block of :mod:`ortrain.onnxblock`; ``None`` for no such file.
        artifact_directory: an existing folder; ``None`` for the current one.
        prefix: put before each file name.
        ort_format: not supported; must be ``False``.
        custom_op_library: a shared library with operators. It has to be there and is not loaded: ortrain has
            operators of its own and those of ``operators``, and refuses a model that uses others, with their names.
        additional_output_names: values to return beside the loss, at each training and eval step.
        nominal_checkpoint: whether to write ``nominal_checkpoint`` too, the names and types without the values.
        loss_input_names: the values that the loss is made of, if not the model's outputs. Where the first output is a
            choice, as the label of a classifier, that is by default what the one output of floats is made of: the
            logits before the softmax or the sigmoid for losses that take logits, else that output itself.
        batch_norm: which statistics ``BatchNormalization`` uses in training. ``"auto"``: those of the batch where its
            scale or bias is trained, and the running ones are updated at each training step; elsewhere the running
            ones, which stay as they are. ``"train"`` and ``"freeze"``: the one or the other everywhere. What the model
            itself says (``training_mode``) makes no difference. Running statistics that are updated are in the
            checkpoint as frozen parameters, whether ``frozen_params`` names them or not; the eval model uses them.
        operators: operators and gradients of one's own; the artifacts hold plain nodes and need none.
        external_data: whether initializers lie in ``frozen.data`` also where the models would take less than 2 GiB.
        last: train the parameters of this many layers, from the end (:attr:`ortrain.ParameterInfo.layer`), instead of
            ``requires_grad``.
        master_weights: ``"float32"`` for trained weights of float16 or bfloat16 that are float32 in the checkpoint: the
            models read them through a cast, so that small updates add up, and exports have the type of the model again.
            ``None`` trains them in their own type. An error where no weight that is trained is as narrow.
        stop_gradients: values that pass no gradient, as those that PyTorch computes behind ``detach`` or under
            ``no_grad``, which leave no trace in a file: names of floats that nodes compute, in subgraphs too, or
            patterns (``"*/assigner/*"``). :func:`ortrain.inspect` lists values that look like it
            (:attr:`~ortrain.Inspection.stop_candidates`).

    Warns:
        TrainingWarning: if a loss is put on what it was not made for: one that takes logits on a softmax or a sigmoid,
            the negative log-likelihood on logits. The sentence names the value to take instead. If weights of float16
            or bfloat16 are trained in that type, for small updates are lost. If a constant is trained by default that
            may be no parameter (:attr:`ortrain.ParameterInfo.confidence` is ``"guess"``).

    Raises:
        InvalidArgumentError: for a name or a pattern that fits nothing, a parameter that is to be both trained and
            frozen, if nothing is left to train, and for one of ``stop_gradients`` that is a weight, an input or no
            float.
        InvalidModelError, UnsupportedError: if the model cannot be read or differentiated, or a loss cannot be put on
            it: scores of another type or rank, a setting that the loss does not have, an opset before 12 or 13.
        NoSuchFileError, OrtrainError: if a file is not there or cannot be written.
        TypeError: for arguments of other types.

    Here the second layer is trained and the first one is frozen; each step gives the logits beside the loss:

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
            f"master_weights is 'float32' or None, not {master_weights!r}; weights of float32 and float64 "
            "are trained in their own type"
        )
    given = model_source(model)
    source: Plain = given
    optimizer_model = None
    chosen = _Choice(with_stops(with_operators(source, operators), stop_gradients), loss, loss_input_names)
    frozen = chosen.frozen(frozen_params)
    trained = chosen.trained(requires_grad, frozen, last)
    if _is_block(loss) or _is_block(optimizer):
        # Only blocks need `onnx`.
        from ortrain.onnxblock import _artifacts

        if _is_block(loss):
            names = _names("loss_input_names", loss_input_names)
            additional = _names("additional_output_names", additional_output_names)
            source = _artifacts.with_loss(given, loss, names, additional, operators)
            loss, loss_input_names = None, None
        if _is_block(optimizer):
            optimizer_model, optimizer = _artifacts.optimizer_model(given, optimizer, trained, frozen), None
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
        master_weights=master_weights is not None,
        optimizer_spec=spec,
        own_optimizer=own,
    )
    by_default = requires_grad is None or last is not None
    for sentence in [*(chosen.about_guesses(trained) if by_default else []), *doubts]:
        warnings.warn(sentence, TrainingWarning, stacklevel=2)


def open_batch(model: ModelLike) -> bytes:
    """Return the model for batches of any size, made of one for batches of one size.

    The first axis of the first input is called ``batch``, and so are those of other inputs that have its size. What
    repeats the size inside follows it: a Reshape to a shape that is a constant (also where the batch is not in front,
    or shares its axis with the heads of an attention); an Expand or a ConstantOfShape whose shape begins with the
    batch; constants that are the same for each row (the token of a class, a mask); first states of zeros of a
    recurrent layer. A model that is open already comes back as it is.

    The rows of a larger batch get what the model gave them alone: this is tried with numbers drawn by lot, where the
    model runs on such.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.

    Raises:
        InvalidModelError: if the model cannot be read, its first input has no axes, or something inside depends on the
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
    """Return the model with a new last layer, for other classes than those it was trained for.

    Its weights and its bias are drawn evenly from ``-1 / sqrt(n)`` to ``1 / sqrt(n)``, where n is how many numbers each
    score is the sum of (as ``torch.nn.Linear`` draws them). They keep their names, and what lies behind the scores (a
    softmax, a pooling over everything) stays.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        classes: how many scores there are to be.
        output: the value that ends in the layer; ``None`` for the first output of the model.
        seed: of what is drawn: the same numbers on every machine.

    Raises:
        InvalidModelError: if the model cannot be read, or ends in no Gemm, no MatMul (with an Add) and no Conv with a
            kernel of one cell, or shares the weights of that layer.
        InvalidArgumentError: if there is no such value, or what lies behind the layer fits its old classes only.

    >>> import ortrain
    >>> from ortrain import artifacts
    >>> model = artifacts.replace_head(ortrain.examples.perceptron(), classes=4)
    >>> artifacts.generate_artifacts(model, requires_grad=["fc2.*"], loss=artifacts.LossType.CrossEntropyLoss)
    >>> CheckpointState.load_checkpoint("checkpoint").parameters["fc2.bias"].data.shape
    (4,)

    """
    return _ortrain.replace_head(model_source(model), operator.index(classes), output, operator.index(seed))


class _Choice:
    """Names from names, patterns and callables. The model is looked into only if that is needed."""

    def __init__(
        self,
        source: Source,
        loss: LossType | Loss | Sequence[Loss] | Block | None,
        loss_input_names: Sequence[str] | None,
    ) -> None:
        self._source = source
        values = _names("loss_input_names", loss_input_names)
        if not values and not _is_block(loss):
            # A term without scores of its own compares the outputs.
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
        """The sentence about parameters that are trained by default and may be constants, if there are any."""
        names = set(trained)
        guesses = any(info.confidence == "guess" and info.name in names for info in self._found)
        sentence = self._inspection._about_guesses if guesses else None
        return [] if sentence is None else [sentence]

    def trained(
        self,
        wanted: Sequence[str] | Callable[[ParameterInfo], bool] | None,
        frozen: Sequence[str],
        last: int | None,
    ) -> list[str]:
        if last is not None:
            return self._last(last, wanted, frozen)
        if wanted is None:
            return [info.name for info in self._found if info.role == "trained" and info.name not in frozen]
        return self._select("requires_grad", wanted, lambda info: info.role == "trained")

    def _last(self, last: int, wanted: object, frozen: Sequence[str]) -> list[str]:
        """The parameters of so many layers, from the end."""
        if wanted is not None:
            raise InvalidArgumentError("requires_grad and last both say what is trained; give one of them")
        count = operator.index(last)
        there = max((info.layer for info in self._found if info.layer is not None), default=0)
        if not 1 <= count <= there:
            raise InvalidArgumentError(
                f"last is a number of layers from 1 to {there}, for so many of the model can be trained, not {count}"
            )
        layers = [(info.name, info.layer) for info in self._found if info.name not in frozen]
        return [name for name, layer in layers if layer is not None and layer <= count]

    def described(self, config: OptimizerConfig, trained: Sequence[str]) -> str:
        """The description of an optimizer for the parameters that are trained."""
        among = set(trained)

        def select(argument: str, wanted: str | Sequence[str] | Callable[[ParameterInfo], bool]) -> list[str]:
            wanted = [wanted] if isinstance(wanted, str) else wanted
            names = self._select(argument, wanted, lambda info: info.name in among)
            if not names:
                raise InvalidArgumentError(f"{argument}: no parameter that is trained is chosen")
            return names

        return config._for(trained, select, lambda: {info.name: info.layer for info in self._found})

    def frozen(self, wanted: Sequence[str] | Callable[[ParameterInfo], bool] | None) -> list[str]:
        return self._select("frozen_params", wanted or (), lambda info: "float" in info.dtype)

    def _select(
        self,
        argument: str,
        wanted: Sequence[str] | Callable[[ParameterInfo], bool],
        among: Callable[[ParameterInfo], bool],
    ) -> list[str]:
        if callable(wanted):
            return [info.name for info in self._found if among(info) and wanted(info)]
        names = _names(argument, wanted)
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
                    f"{argument}: the pattern {name!r} matches no parameter of the model, and no node that uses one"
                    f"{near}"
                )
            chosen.update(dict.fromkeys(matching))
        return list(chosen)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _is_block(value: object) -> TypeGuard[Block]:
    """Whether it is a block; if there is one, its module is there, too."""
    module = sys.modules.get("ortrain.onnxblock")
    return module is not None and isinstance(value, module.Block)


def _names(argument: str, names: Sequence[str] | None) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{argument} is a list of names, not one name")
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
    """As the core takes them: a float64 array holds any float exactly."""
    return None if values is None else OrtValue.ortvalue_from_numpy(np.asarray(values, np.float64))._ortvalue


def _member(argument: str, value: object, kind: type[enum.IntEnum]) -> str | None:
    if value is None or isinstance(value, kind):
        return None if value is None else value.name
    raise _no_member(argument, value, kind)


def _no_member(argument: str, value: object, kind: type[enum.IntEnum]) -> TypeError:
    choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    return TypeError(
        f"{argument} is one of {choices}, a block of ortrain.onnxblock or None, not {type(value).__name__}"
    )
