"""Choice of the loss from the model and its targets, and conversion of the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._fit.description import Array, Description, Output, listed
from ortrain._suggest import hint
from ortrain.artifacts import Loss, LossType
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain.onnxblock import Block

__all__ = ["SAMPLE_WEIGHT", "TARGET", "Choice", "RowError", "Target", "choose", "find_labels"]

TARGET = "target"
"""Name of a single target in a batch."""
SAMPLE_WEIGHT = "sample_weight"
"""Input of the training model with a weight for each row."""
IGNORED_LABEL = -100
"""Label of tokens that are ignored, as in PyTorch and Hugging Face."""

# Names of losses: the names of Keras, and shorter ones.
_NAMES = {
    "cross_entropy": "labels",
    "sparse_categorical_crossentropy": "labels",
    "categorical_crossentropy": "labels",
    "mse": "squares",
    "mean_squared_error": "squares",
    "mae": "distances",
    "mean_absolute_error": "distances",
    "l1": "distances",
    "bce": "binary",
    "binary_crossentropy": "binary",
    "binary_cross_entropy": "binary",
}
_TYPES = {
    LossType.CrossEntropyLoss: "labels",
    LossType.MSELoss: "squares",
    LossType.L1Loss: "distances",
    LossType.BCEWithLogitsLoss: "binary",
}
_LABELS = {
    "labels": "cross-entropy",
    "soft": "cross-entropy of probabilities",
    "squares": "mean squared error",
    "distances": "mean absolute error",
    "binary": "binary cross-entropy",
}


class RowError(InvalidArgumentError):
    """Error about a row of a batch; the data knows the name of the row.

    Args:
        sentence: the message, with ``{row}`` for the name of the row.
        row: the index of the row in the batch.

    """

    def __init__(self, sentence: str, row: int) -> None:
        super().__init__(sentence.replace("{row}", f"row {row}"))
        self.sentence, self.row = sentence, row

    def named(self, name: str) -> InvalidArgumentError:
        """Return the error with the name of the row."""
        return InvalidArgumentError(self.sentence.replace("{row}", name))


@dataclass(frozen=True)
class Target:
    """Target of a loss: its name in a batch, its input of the training model, and its conversion."""

    name: str
    """Name in the batches."""
    input: str
    """Name of the input of the training model."""
    kind: str
    """``"labels"``, ``"soft"``, ``"squares"``, ``"distances"``, ``"binary"``, or ``"raw"`` for a loss of the caller."""
    output: Output | None
    """Output that is compared; ``None`` for a loss of the caller."""
    reason: str
    """Reason for the choice; empty if the caller chose."""

    def convert(self, values: Any, names: Sequence[Any] | None = None) -> Array:
        """Convert targets to the type and the shape that the loss takes.

        Args:
            values: targets of some rows.
            names: texts of the classes, if the targets are texts.

        Raises:
            InvalidArgumentError: if the targets do not fit the loss.

        """
        array = np.asarray(values)
        if self.output is None:
            return array
        if self.kind == "labels":
            return self._labels(_indices(array, names))
        if self.kind == "soft" and array.ndim < len(self.output.scores.shape) and self.output.classes is not None:
            # Rows without augmentation have labels.
            hot: Array = np.eye(self.output.classes)[self._labels(array)]
            array = np.moveaxis(hot, -1, self.output.class_axis)
        return self._numbers(array if names is None or array.dtype.kind not in "OUS" else _indices(array, names))

    def _labels(self, array: Array) -> Array:
        assert self.output is not None
        rank, classes = len(self.output.scores.shape), self.output.classes
        if array.ndim == rank and rank > 1 and array.shape[1:] != (1,) and _is_one_hot(array, self.output.class_axis):
            found: Array = array.argmax(self.output.class_axis)
            return found.astype(np.int64)
        if array.ndim == rank and array.shape[-1] == 1:
            array = array[..., 0]
        if array.dtype.kind == "f":
            rounded = array.astype(np.int64)
            if not np.array_equal(rounded, array):
                at = np.argwhere(rounded != array)[0]
                raise RowError(
                    f"the target of {{row}} is {array[tuple(at)]}, which is no class; {_LABELS['labels']} of "
                    f"{self.output.name!r} takes class indices from 0 to {_last(classes)}",
                    int(at[0]),
                )
            array = rounded
        if rank and array.ndim != rank - 1:
            raise InvalidArgumentError(
                f"the targets have the shape {list(array.shape)}, but cross-entropy of {self.output.name!r} "
                f"({self.output.scores}) takes class indices of {rank - 1} "
                f"{'axis' if rank == 2 else 'axes'}, or one-hot rows of {_last(classes, 0)} numbers"
            )
        array = array.astype(np.int64, copy=False)
        if classes is not None and array.size:
            wrong = (
                ((array < 0) | (array >= classes)) & (array != IGNORED_LABEL)
                if rank > 2
                else (array < 0) | (array >= classes)
            )
            if wrong.any():
                at = np.argwhere(wrong)[0]
                label, count = int(array[tuple(at)]), int(array.max()) + 1
                # A new head has no class below 0.
                head = f", or train it with a new head: Model(classes={count}), ortrain train --classes {count}"
                raise RowError(
                    f"the label of {{row}} is {label}, but {self.output.name!r} has {classes} classes, 0 to "
                    f"{classes - 1}; correct the label{head if label >= classes else ''}",
                    int(at[0]),
                )
        return array

    def _numbers(self, array: Array) -> Array:
        assert self.output is not None
        scores = self.output.scores
        dtype = scores.dtype or np.dtype(np.float32)
        if array.dtype.kind not in "biuf":
            raise InvalidArgumentError(
                f"the targets are {array.dtype}, but {_LABELS[self.kind]} of {self.output.name!r} takes numbers"
            )
        rank = len(scores.shape)
        if (rank and array.ndim == rank - 1 and scores.shape[-1] in (1, None)) or (rank > 1 and array.ndim == 1):
            array = array[..., None]
        while rank and array.ndim > rank and array.shape[-1] == 1:
            array = array[..., 0]
        wanted = scores.shape[1:]
        fits = array.ndim == rank and all(
            not isinstance(size, int) or size == have for size, have in zip(wanted, array.shape[1:], strict=True)
        )
        if rank and not fits:
            raise InvalidArgumentError(
                f"the targets have the shape {list(array.shape)}, but {_LABELS[self.kind]} of {self.output.name!r} "
                f"takes the shape of the scores, {scores}"
            )
        return np.ascontiguousarray(array, dtype)


@dataclass(frozen=True)
class Choice:
    """Losses of a training, and their targets."""

    losses: tuple[Loss, ...] | Block | None
    """Argument of ``generate_artifacts``; ``None`` if the first output of the model is the loss."""
    targets: tuple[Target, ...]
    sentence: str
    """What was chosen and why; empty if the caller chose."""

    @property
    def can_weigh(self) -> bool:
        """True if the loss can have a weight for each row."""
        return isinstance(self.losses, tuple)

    def weighted(self, fixed: bool) -> Choice:
        """Return the losses with an input for the weights of rows.

        With ``fixed``, labels can be ignored: the rows that fill up a batch must not count in the mean of weighted
        classes.
        """
        assert isinstance(self.losses, tuple)
        changed = []
        for loss in self.losses:
            loss = dataclasses.replace(loss, sample_weight=SAMPLE_WEIGHT)
            if (
                fixed
                and loss.weight is not None
                and loss.kind is LossType.CrossEntropyLoss
                and loss.ignore_index is None
            ):
                loss = dataclasses.replace(loss, ignore_index=IGNORED_LABEL)
            changed.append(loss)
        return dataclasses.replace(self, losses=tuple(changed))


def choose(
    chosen: Any,
    description: Description,
    targets: Mapping[str, Any],
    names: Mapping[str, Sequence[Any]],
    *,
    several_labels: bool = False,
) -> Choice:
    """Choose the losses of a training.

    Args:
        chosen: the argument ``loss`` of the model.
        description: inputs and outputs of the model.
        targets: targets of some rows by their names; a single one is ``"target"``.
        names: texts of the classes by target.
        several_labels: True if each label is a list. Rows of zeros and ones are then multi-hot, even if each of the
            rows has a single one.

    Raises:
        InvalidArgumentError: if no loss fits, or the loss is unknown.

    """
    if isinstance(chosen, Mapping):
        return _by_output(chosen, description)
    if chosen is not None and not isinstance(chosen, (str, LossType)):
        return _of_caller(chosen, description)
    if chosen is None and not targets:
        first = description.outputs[0] if description.outputs else None
        if first is not None and not first.value.shape and first.value.is_float:
            return Choice(None, (), f"the loss is the output {first.name!r} of the model, because there are no targets")
        raise InvalidArgumentError(
            "there are no targets to choose a loss from; pass y, or a model whose first output is the loss"
        )
    if not targets:
        targets = {TARGET: None}
    found, losses = [], []
    for name, values in targets.items():
        output = _output_of(description, name)
        if isinstance(chosen, (str, LossType)):
            kind, reason = _kind_of(chosen), ""
        else:
            array = np.asarray(values)
            texts = names.get(name) if array.dtype.kind in "OUS" else None
            kind, reason = _chosen_kind(output, array, texts, several_labels)
        target = _target(name, kind, output, reason, only=len(targets) == 1)
        found.append(target)
        losses.append(_loss_of(target))
    sentences = [
        f"loss: {_LABELS[target.kind]} of {target.output.name!r}, because {target.reason}"
        for target in found
        if target.reason and target.output
    ]
    return Choice(tuple(losses), tuple(found), "; ".join(sentences))


def _by_output(chosen: Mapping[str, Any], description: Description) -> Choice:
    found, losses = [], []
    for name, loss in chosen.items():
        output = description.output(name)
        if output is None:
            known = [output.name for output in description.outputs]
            raise InvalidArgumentError(
                f"the model has no output {name!r} for a loss; it has {listed(known)}{hint(name, known)}"
            )
        target = _target(name, _kind_of(loss), output, "", only=False)
        found.append(target)
        losses.append(_loss_of(target))
    return Choice(tuple(losses), tuple(found), "")


def _of_caller(chosen: Any, description: Description) -> Choice:
    """Return losses with settings, or a block with targets that the training model determines."""
    if isinstance(chosen, Loss):
        chosen = [chosen]
    if isinstance(chosen, Sequence) and chosen and all(isinstance(loss, Loss) for loss in chosen):
        losses = []
        targets: dict[str, Target] = {}
        for loss in chosen:
            output = None if loss.scores is None else description.output(loss.scores)
            if loss.scores is None and description.outputs and description.outputs[0].is_scored:
                output = description.outputs[0]
            if output is not None and loss.kind in (LossType.CrossEntropyLoss, LossType.BCEWithLogitsLoss):
                axis = loss.class_axis
                if axis is None and loss.kind is LossType.CrossEntropyLoss and output.class_axis != 1:
                    axis = output.class_axis
                loss = dataclasses.replace(loss, scores=output.scores.name, class_axis=axis)
            kind = _TYPES[loss.kind]
            usual = "labels" if kind == "labels" else TARGET
            name = loss.target or (usual if len(chosen) == 1 else f"{usual}_{loss.scores}")
            loss = dataclasses.replace(loss, target=name)
            known = (
                loss.class_axis is None
                or output is None
                or loss.class_axis % max(len(output.scores.shape), 1) == output.class_axis
            )
            targets.setdefault(
                name, Target(TARGET if len(chosen) == 1 else name, name, kind, output if known else None, "")
            )
            losses.append(loss)
        return Choice(tuple(losses), tuple(targets.values()), "")
    if callable(chosen):
        return Choice(chosen, (), "")
    raise InvalidArgumentError(
        "loss must be a name, a LossType, a Loss, a list of losses, a dict by output, a block of ortrain.onnxblock, or "
        f"None, got {type(chosen).__name__}"
    )


def _kind_of(chosen: Any) -> str:
    if isinstance(chosen, LossType):
        return _TYPES[chosen]
    if not isinstance(chosen, str) or chosen not in _NAMES:
        raise InvalidArgumentError(
            f"there is no loss {chosen!r}; the names are {', '.join(_NAMES)}{hint(chosen, _NAMES)}"
        )
    return _NAMES[chosen]


def _output_of(description: Description, name: str) -> Output:
    """Return the output that a target belongs to: the output of its name, otherwise the first with a gradient."""
    named = description.output(name)
    if named is not None:
        return named
    scored = [output for output in description.outputs if output.is_scored]
    if name not in (TARGET, "labels", "label") and len(scored) != 1:
        known = [output.name for output in description.outputs]
        raise InvalidArgumentError(
            f"no output of the model belongs to the target {name!r}; the outputs are {listed(known)}{hint(name, known)}"
        )
    if not scored:
        if description.outputs:
            return description.outputs[0]
        raise InvalidArgumentError("the model has no output that a loss can compare")
    return scored[0]


def _target(name: str, kind: str, output: Output, reason: str, *, only: bool) -> Target:
    usual = "labels" if kind == "labels" else TARGET
    return Target(name, usual if only else f"{usual}_{output.name}", kind, output, reason)


def _loss_of(target: Target) -> Loss:
    """Return the loss of a target. Losses of logits are put on the logits."""
    output = target.output
    assert output is not None
    if target.kind == "labels":
        if not output.is_scored:
            # The core finds the logits behind a label.
            return Loss(LossType.CrossEntropyLoss, target=target.input)
        rank = len(output.scores.shape)
        return Loss(
            LossType.CrossEntropyLoss,
            scores=output.scores.name,
            target=target.input,
            class_axis=output.class_axis if output.class_axis != 1 else None,
            ignore_index=IGNORED_LABEL if rank > 2 else None,
        )
    if target.kind == "soft":
        return Loss(
            LossType.CrossEntropyLoss,
            scores=output.scores.name,
            target=target.input,
            class_axis=output.class_axis if output.class_axis != 1 else None,
            soft=True,
        )
    if target.kind == "binary":
        if output.activation in ("softmax", "log_softmax"):
            raise InvalidArgumentError(
                f"binary cross-entropy does not fit the output {output.name!r}: its softmax makes one probability of "
                "all classes; use cross_entropy with one label for each row"
            )
        return Loss(LossType.BCEWithLogitsLoss, scores=output.scores.name, target=target.input, stable=True)
    kind = LossType.MSELoss if target.kind == "squares" else LossType.L1Loss
    return Loss(kind, scores=output.name, target=target.input)


def _chosen_kind(output: Output, values: Array, names: Sequence[Any] | None, several_labels: bool) -> tuple[str, str]:
    """Return the kind of the loss that fits targets and output, and the reason."""
    ends = {"softmax": " behind a softmax", "log_softmax": " behind a log-softmax", "sigmoid": " behind a sigmoid"}
    scores, rank = output.scores, len(output.scores.shape)
    columns = scores.shape[-1] if rank > 1 else 1
    what = f"the model has scores {scores}{ends.get(output.activation, '')}"
    is_mixture = values.dtype.kind == "f" and values.ndim == rank and columns != 1
    if names is not None and not is_mixture:
        kind = "binary" if columns == 1 else "labels"
        return kind, f"the targets are {len(names)} texts and {what}"
    if values.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"the targets are {values.dtype}; a loss takes numbers, class indices or texts")
    is_binary = bool(np.isin(values, (0, 1)).all())
    same_shape = values.ndim == rank and rank > 1 and columns != 1
    if same_shape and is_binary and several_labels:
        return "binary", f"the labels are lists (multi-hot) and {what}"
    if same_shape and is_binary:
        if output.activation in ("softmax", "log_softmax") or (
            output.activation == "identity" and _is_one_hot(values, output.class_axis)
        ):
            return "labels", f"each row has a single one (one-hot labels) and {what}"
        return "binary", f"the targets are zeros and ones for each class (multi-hot) and {what}"
    if same_shape and output.activation != "sigmoid" and _is_distribution(values, output.class_axis):
        return "soft", f"each row is a distribution over the classes and {what}"
    if not output.is_scored:
        return "labels", "the first output of the model is a label"
    if columns == 1 and is_binary and (values.dtype.kind != "f" or output.activation == "sigmoid"):
        return "binary", f"the targets are 0 and 1 and {what}"
    whole = values.dtype.kind != "f" or bool((np.trunc(values) == values).all())
    is_index = values.ndim == rank - 1 or (values.ndim == rank and values.shape[-1] == 1)
    if columns != 1 and is_index and (values.dtype.kind != "f" or (whole and values.ndim == rank - 1)):
        return "labels", f"the targets are integers and {what}"
    if output.activation in ("softmax", "log_softmax"):
        raise InvalidArgumentError(
            f"targets of the shape {list(values.shape)} and the type {values.dtype} do not fit {output.name!r}, which "
            "ends in a softmax; pass class indices or one-hot rows, or choose a loss: Model(..., loss='mse')"
        )
    return "squares", f"the targets are {'floats' if values.dtype.kind == 'f' else 'integers'} and {what}"


def find_labels(values: Any) -> list[Any] | None:
    """Return the sorted texts of targets, or ``None`` if the targets are numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "OUS":
        return None
    try:
        found: list[Any] = np.unique(array.astype(object)).tolist()
    except TypeError:
        return None
    return found if all(isinstance(each, (str, bytes)) for each in found) else None


def _indices(array: Array, names: Sequence[Any] | None) -> Array:
    if names is None or array.dtype.kind not in "OUS":
        return array
    index: Callable[[Any], int | None] = {name: at for at, name in enumerate(names)}.get
    found = [index(each) for each in array.ravel().tolist()]
    if None in found:
        at = found.index(None)
        raise RowError(
            f"{{row}} has the class {array.ravel()[at]!r}, which is not one of {listed(list(map(repr, names)))}",
            at * len(array) // max(array.size, 1),
        )
    return np.array(found, np.int64).reshape(array.shape)


def _is_one_hot(array: Array, axis: int) -> bool:
    if axis >= array.ndim or not np.isin(array, (0, 1)).all():
        return False
    return bool((array.sum(axis) == 1).all())


def _is_distribution(array: Array, axis: int) -> bool:
    if axis >= array.ndim or array.dtype.kind != "f" or not array.size or array.min() < 0:
        return False
    return bool(np.allclose(array.sum(axis), 1, atol=1e-3))


def _last(classes: int | None, less: int = 1) -> str:
    return "the last class" if classes is None else str(classes - less)
