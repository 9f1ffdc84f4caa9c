"""Model descriptions for :class:`ortrain.trainer.ORTTrainer`: names and shapes of inputs and outputs.

>>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
>>> description = _ORTTrainerModelDesc({"inputs": [("x", ["batch", 64])], "outputs": [("loss", [], True)]})
>>> description.inputs[0].shape, description.outputs[0].is_loss
(['batch', 64], True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ortrain.trainer._dtypes import as_dtype
from ortrain.trainer._validation import Rules, instances, validated

__all__ = [
    "ALL_FINITE_IO_DESCRIPTION_NAME",
    "GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME",
    "LEARNING_RATE_IO_DESCRIPTION_NAME",
    "LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME",
    "MODEL_DESC_SCHEMA",
    "InputDescription",
    "InputDescriptionTyped",
    "OutputDescription",
    "OutputDescriptionTyped",
    "_ORTTrainerModelDesc",
]

LEARNING_RATE_IO_DESCRIPTION_NAME = "__learning_rate"
ALL_FINITE_IO_DESCRIPTION_NAME = "__all_finite"
LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME = "__loss_scale_input_name"
GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME = "__gradient_accumulation_name"

# A size is a number, or a name for a size that may differ between runs.
Shape = list[int | str]


class InputDescription(NamedTuple):
    """An input of a model.

    >>> from ortrain.trainer.model_desc_validation import InputDescription
    >>> InputDescription("x", ["batch", 64]).shape
    ['batch', 64]
    """

    name: str
    """Name of the input in the model."""
    shape: Shape
    """Sizes: numbers, and names for sizes that runs may choose."""


class InputDescriptionTyped(NamedTuple):
    """An input of a model with a known element type.

    >>> from ortrain.trainer.model_desc_validation import InputDescriptionTyped
    >>> InputDescriptionTyped("x", ["batch", 64], np.dtype("float32")).dtype
    dtype('float32')
    """

    name: str
    """Name of the input in the model."""
    shape: Shape
    """Sizes: numbers, and names for sizes that runs may choose."""
    dtype: Any
    """Element type, of NumPy or PyTorch."""


class OutputDescription(NamedTuple):
    """An output of a model.

    >>> from ortrain.trainer.model_desc_validation import OutputDescription
    >>> OutputDescription("loss", [], True).is_loss
    True
    """

    name: str
    """Name of the output in the model."""
    shape: Shape
    """Sizes: numbers, and names for sizes that runs may choose."""
    is_loss: bool
    """True for the output that the training makes small."""


class OutputDescriptionTyped(NamedTuple):
    """An output of a model with a known element type.

    >>> from ortrain.trainer.model_desc_validation import OutputDescriptionTyped
    >>> OutputDescriptionTyped("loss", [], True, np.dtype("float32")).dtype_amp is None
    True
    """

    name: str
    """Name of the output in the model."""
    shape: Shape
    """Sizes: numbers, and names for sizes that runs may choose."""
    is_loss: bool
    """True for the output that the training makes small."""
    dtype: Any
    """Element type in the model, of NumPy or PyTorch."""
    dtype_amp: Any = None
    """Element type that mixed precision gives, or ``None``."""


class _ORTTrainerModelDesc:
    """Validated inputs and outputs of a model, and the inputs and outputs that a trainer adds.

    Args:
        model_desc: a dictionary with two lists that are not empty. ``inputs`` has tuples ``(name, shape)``. ``outputs``
            has tuples ``(name, shape)`` or ``(name, shape, is_loss)``. A shape is a list of sizes: an int of 0 or more,
            or a name. The same name means the same size everywhere.

    Raises:
        ValueError: for another layout, duplicate or empty names, negative sizes, or two losses. The message begins
            ``Invalid model_desc:`` and lists all errors by index in the lists.
        ImportError: if the package ``cerberus`` is not installed: ``pip install ortrain[trainer]``.

    >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
    >>> layout = {"inputs": [("x", ["batch", 64]), ("labels", ["batch"])], "outputs": [("loss", [], True)]}
    >>> description = _ORTTrainerModelDesc(layout)
    >>> description.add_type_to_input_description(1, np.int64)
    >>> description
    Model description:
        Inputs:
            InputDescription(name='x', shape=['batch', 64])
            InputDescriptionTyped(name='labels', shape=['batch'], dtype=dtype('int64'))
        Outputs:
            OutputDescription(name='loss', shape=[], is_loss=True)
        Learning rate:
            InputDescriptionTyped(name='__learning_rate', shape=[1], dtype=dtype('float32'))
        Mixed precision:
            None
            None
        Gradient accumulation:
            None
    >>> _ORTTrainerModelDesc({"inputs": [("x",)], "outputs": [("loss", [], True)]})
    Traceback (most recent call last):
    ValueError: Invalid model_desc: {'inputs': [{0: ['must be a tuple with size 2']}]}

    """

    inputs: list[InputDescription | InputDescriptionTyped]
    """Inputs in the order of the user: :class:`InputDescription`, or :class:`InputDescriptionTyped` with a type."""
    outputs: list[OutputDescription | OutputDescriptionTyped]
    """Outputs in the order of the user: :class:`OutputDescription`, or :class:`OutputDescriptionTyped` with a type."""
    learning_rate: InputDescriptionTyped
    """The input of the learning rate: one float32."""

    _InputDescription: ClassVar = InputDescription
    _InputDescriptionTyped: ClassVar = InputDescriptionTyped
    _OutputDescription: ClassVar = OutputDescription
    _OutputDescriptionTyped: ClassVar = OutputDescriptionTyped

    def __init__(self, model_desc: Mapping[str, Any]) -> None:
        if not isinstance(model_desc, Mapping):
            raise ValueError(
                "Invalid model_desc: expected a dict with the keys 'inputs' and 'outputs', got "
                f"{type(model_desc).__name__}"
            )
        checked = validated("model_desc", dict(model_desc), _RULES)
        self.inputs = [InputDescription(name, list(shape)) for name, shape in checked["inputs"]]
        self.outputs = [
            OutputDescription(name, list(shape), is_loss == [True]) for name, shape, *is_loss in checked["outputs"]
        ]
        self.learning_rate = InputDescriptionTyped(LEARNING_RATE_IO_DESCRIPTION_NAME, [1], np.dtype(np.float32))

    @property
    def gradient_accumulation(self) -> OutputDescriptionTyped | None:
        """The flag output of gradient accumulation: one bool, or None. Set a name to create the description.

        Raises:
            AssertionError: for a new value that is not a name, or is empty.

        >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
        >>> description = _ORTTrainerModelDesc({"inputs": [("x", [2])], "outputs": [("loss", [], True)]})
        >>> description.gradient_accumulation = "gathered"
        >>> description.gradient_accumulation.shape, description.gradient_accumulation.dtype
        ([1], dtype('bool'))

        """
        return vars(self).get(GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME)

    @gradient_accumulation.setter
    def gradient_accumulation(self, name: Any) -> None:
        setattr(self, GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME, _flag(name))

    @property
    def all_finite(self) -> OutputDescriptionTyped | None:
        """The output that is true if all gradients were finite: one bool, or None. Set a name to create it.

        Raises:
            AssertionError: for a new value that is not a name, or is empty.

        >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
        >>> description = _ORTTrainerModelDesc({"inputs": [("x", [2])], "outputs": [("loss", [], True)]})
        >>> description.all_finite = "all_finite"
        >>> description.all_finite.name, description.all_finite.is_loss
        ('all_finite', False)

        """
        return vars(self).get(ALL_FINITE_IO_DESCRIPTION_NAME)

    @all_finite.setter
    def all_finite(self, name: Any) -> None:
        setattr(self, ALL_FINITE_IO_DESCRIPTION_NAME, _flag(name))

    @property
    def loss_scale_input(self) -> InputDescriptionTyped | None:
        """The input of the loss scale: a float32 scalar, or None. Set a name to create the description.

        Raises:
            AssertionError: for a new value that is not a name, or is empty.

        >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
        >>> description = _ORTTrainerModelDesc({"inputs": [("x", [2])], "outputs": [("loss", [], True)]})
        >>> description.loss_scale_input = "loss_scale"
        >>> description.loss_scale_input.shape
        []

        """
        return vars(self).get(LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME)

    @loss_scale_input.setter
    def loss_scale_input(self, name: Any) -> None:
        scale = InputDescriptionTyped(_checked_name(name), [], np.dtype(np.float32))
        setattr(self, LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME, scale)

    def add_type_to_input_description(self, index: int, dtype: Any) -> None:
        """Sets or replaces the element type of an input.

        Args:
            index: the index of the input in the description.
            dtype: a NumPy or PyTorch type.

        Raises:
            AssertionError: for an index that is negative or not an int, or for a value that is not an element type.
            IndexError: for an index after the last input.

        >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
        >>> description = _ORTTrainerModelDesc({"inputs": [("x", [2])], "outputs": [("loss", [], True)]})
        >>> description.add_type_to_input_description(0, np.float64)
        >>> description.inputs
        [InputDescriptionTyped(name='x', shape=[2], dtype=dtype('float64'))]

        """
        _check_index("input", index, self.inputs)
        described = self.inputs[index]
        self.inputs[index] = InputDescriptionTyped(described.name, described.shape, as_dtype(dtype))

    def add_type_to_output_description(self, index: int, dtype: Any, dtype_amp: Any = None) -> None:
        """Sets or replaces the element type of an output.

        Args:
            index: the index of the output in the description.
            dtype: the type in the model, a NumPy or PyTorch type.
            dtype_amp: the type under mixed precision, if it differs.

        Raises:
            AssertionError: for an index that is negative or not an int, or for a value that is not an element type.
            IndexError: for an index after the last output.

        >>> from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
        >>> description = _ORTTrainerModelDesc({"inputs": [("x", [2])], "outputs": [("y", [2], True)]})
        >>> description.add_type_to_output_description(0, np.float32, np.float16)
        >>> description.outputs[0].dtype_amp
        dtype('float16')

        """
        _check_index("output", index, self.outputs)
        narrow = None if dtype_amp is None else as_dtype(dtype_amp)
        described = self.outputs[index]
        self.outputs[index] = OutputDescriptionTyped(
            described.name, described.shape, described.is_loss, as_dtype(dtype), narrow
        )

    def __repr__(self) -> str:
        parts: dict[str, Sequence[object]] = {
            "Inputs": self.inputs,
            "Outputs": self.outputs,
            "Learning rate": [self.learning_rate],
            "Mixed precision": [self.loss_scale_input, self.all_finite],
            "Gradient accumulation": [self.gradient_accumulation],
        }
        lines = ["Model description:"]
        for title, descriptions in parts.items():
            lines += [f"    {title}:", *(f"        {description!r}" for description in descriptions)]
        return "\n".join(lines)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise AssertionError(f"the name of an input or output must be a string that is not empty, got {name!r}")
    return name


def _flag(name: object) -> OutputDescriptionTyped:
    return OutputDescriptionTyped(_checked_name(name), [1], False, np.dtype(np.bool_))


def _check_index(kind: str, index: object, descriptions: Sequence[object]) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise AssertionError(f"'index' must be an int of 0 or more, got {index!r}")
    if index >= len(descriptions):
        raise IndexError(f"{kind} index {index} is out of range: the number of descriptions is {len(descriptions)}")


# Validation rules. One error lists all invalid elements, each with all its problems.


def _check_input(beside: Mapping[Any, Any], index: Any, value: Any) -> Iterator[str]:
    if not isinstance(value, tuple) or len(value) != 2:
        yield "must be a tuple with size 2"
    yield from _check_name_and_shape(beside, index, value)


def _check_output(beside: Mapping[Any, Any], index: Any, value: Any) -> Iterator[str]:
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        yield "must be a tuple with size 2 or 3"
    if isinstance(value, tuple) and len(value) == 3:
        if not isinstance(value[2], bool):
            yield "the third element of the tuple (aka is_loss) must be a boolean"
        elif value[2] and any(_is_loss(beside[other]) for other in range(index)):
            yield "only one is_loss can bet set to True"
    yield from _check_name_and_shape(beside, index, value)


def _is_loss(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and value[2] is True


def _check_name_and_shape(beside: Mapping[Any, Any], index: Any, value: Any) -> Iterator[str]:
    """Yields messages about the first two elements, if they exist."""
    if not isinstance(value, (tuple, list)):
        return
    for name in value[:1]:
        if not isinstance(name, str):
            yield "the first element of the tuple (aka name) must be a string"
        elif not name:
            yield "the first element of the tuple (aka name) must not be an empty string"
        elif any(_name_of(beside[other]) == name for other in range(index)):
            yield f"the name {name!r} is described twice"
    for shape in value[1:2]:
        if not isinstance(shape, list):
            yield "the second element of the tuple (aka shape) must be a list"
        else:
            yield from _check_sizes(shape)


def _name_of(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and value else None


def _check_sizes(shape: list[Any]) -> Iterable[str]:
    """Returns the messages about sizes without duplicates."""
    found = (_complaint(size) for size in shape)
    return dict.fromkeys(complaint for complaint in found if complaint is not None)


def _complaint(size: Any) -> str | None:
    if not isinstance(size, (str, int)) or isinstance(size, bool):
        return "each shape must be either a string or integer"
    if size == "":
        return "a name in a shape must not be an empty string"
    if isinstance(size, int) and size < 0:
        return f"a size must not be negative, got {size}"
    return None


def _described(check: str) -> dict[str, Any]:
    return {"type": "list", "required": True, "minlength": 1, "schema": {"check_with": check}}


MODEL_DESC_SCHEMA = {"inputs": _described("input_description"), "outputs": _described("output_description")}

_RULES = Rules(
    MODEL_DESC_SCHEMA,
    types={"list": instances(list)},
    checks={"input_description": _check_input, "output_description": _check_output},
)
