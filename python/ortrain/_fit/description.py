"""Inputs and outputs of a model, with the values that a loss compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortrain import _ortrain
from ortrain._inputs import _TYPES
from ortrain._model_source import ModelInFolder, ModelLike, source_of

Array: TypeAlias = npt.NDArray[Any]
Size: TypeAlias = int | str | None


@dataclass(frozen=True)
class Value:
    """Input or output: name, element type, and the size of each axis."""

    name: str
    type: str
    shape: tuple[Size, ...]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Element type; ``None`` if NumPy does not have it, as for bfloat16."""
        return np.dtype(bool) if self.type == "tensor(bool)" else _TYPES.get(self.type)

    @property
    def is_float(self) -> bool:
        """True for a tensor of floats."""
        return self.type in ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        element = self.type.removeprefix("tensor(").removesuffix(")")
        return f"{'float32' if element == 'float' else element}[{sizes}]"


@dataclass(frozen=True)
class Output:
    """Output of the model, and the scores that a loss compares instead of it."""

    value: Value
    activation: str
    """Function from the scores to the output: identity, softmax, log_softmax, sigmoid or choice."""
    scores: Value
    class_axis: int

    @property
    def name(self) -> str:
        """Name of the output."""
        return self.value.name

    @property
    def is_scored(self) -> bool:
        """True if a loss can compare this output: it has floats with a gradient."""
        return self.activation != "choice" and self.scores.is_float

    @property
    def classes(self) -> int | None:
        """Size of the class axis; ``None`` if it is open or does not exist."""
        if self.class_axis >= len(self.scores.shape):
            return None
        size = self.scores.shape[self.class_axis]
        return size if isinstance(size, int) else None


@dataclass(frozen=True)
class Description:
    """Inputs and outputs of a model."""

    inputs: tuple[Value, ...]
    outputs: tuple[Output, ...]

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs."""
        return [value.name for value in self.inputs]

    @property
    def fixed_batch(self) -> int | None:
        """Size of the first axis of the first input, if the model fixes it."""
        shape = self.inputs[0].shape if self.inputs else ()
        return shape[0] if shape and isinstance(shape[0], int) else None

    def output(self, name: str) -> Output | None:
        """Return the output of a name."""
        return next((output for output in self.outputs if output.name == name), None)


def describe(model: ModelLike | ModelInFolder) -> Description:
    """Describe the inputs and outputs of a model.

    Raises:
        InvalidModelError, UnsupportedError, NoSuchFileError: if the model cannot be read.

    """
    found = _ortrain.describe_model(source_of(model))
    outputs = [
        Output(_value(each.output), each.activation, _value(each.scores), each.class_axis) for each in found.outputs
    ]
    return Description(tuple(map(_value, found.inputs)), tuple(outputs))


def _value(native: _ortrain.ValueDescription) -> Value:
    return Value(native.name, native.type, tuple(native.shape))


def listed(names: Sequence[object], most: int = 8) -> str:
    """Return names for a message; a long list is cut."""
    texts = list(map(str, names))
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")
