"""Execution of a session for a trainer: conversion of the user's inputs, the run, conversion of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain
from ortrain._inputs import Described, native_value
from ortrain._options import RunOptions
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.trainer._description import check_shape, shapes_of_losses
from ortrain.trainer._values import as_torch, is_torch_tensor, native_of_torch, torch_of

if TYPE_CHECKING:
    from ortrain.classic import TrainingSession
    from ortrain.iobinding import IOBinding
    from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc

__all__ = ["ALL_FINITE", "GATHERED", "Inputs", "Results", "Runner", "inputs_by_name"]

GATHERED, ALL_FINITE = "Group_Accumulated_Gradients", "all_gradients_finite"

Inputs = dict[str, Any]
Results = dict[str, _ortrain.OrtValue]


def inputs_by_name(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], *, fetching: bool = False
) -> Inputs:
    """Returns the inputs by name, from positional and keyword values. Without ``fetching`` every input is required."""
    if len(args) == 1 and isinstance(args[0], list):
        args = args[0]
    named = [name for name in names if name in kwargs]
    count = len(args) + len(named)
    if count != len(names) and not fetching:
        raise AssertionError(f"expected {len(names)} inputs of model_desc ({', '.join(names)}), got {count}")
    values = dict(zip(names, args, strict=False))
    twice = [name for name in named if name in values]
    if twice:
        raise AssertionError(f"input {twice[0]!r} is given twice: by position and by name")
    return values | {name: kwargs[name] for name in named}


class Runner:
    """Runs a session with the inputs and outputs of a description."""

    def __init__(self, session: TrainingSession, description: _ORTTrainerModelDesc) -> None:
        self.session, self.description = session, description
        self.outputs = [output.name for output in description.outputs]
        self.updating, self.gathering, self.evaluating = RunOptions(), RunOptions(), RunOptions()
        self.gathering.only_execute_path_to_fetches = True
        self.evaluating.only_execute_path_to_fetches = True
        self.evaluating.training_mode = False
        self._inputs = [(value.name, value.shape) for value in description.inputs]
        described = [*session._described_inputs(), *session._described_overridable()]
        self._kinds: dict[str, Described] = {given.name: given for given in described}
        self._shapes = shapes_of_losses(description, session)
        # A loss is one number, so its shape need not match the description.
        self._described_shapes = {output.name: output.shape for output in description.outputs if not output.is_loss}
        # Outputs with shapes that depend on values: a run must compute them to know the shape.
        self._by_values: set[str] = set()
        self._session_outputs: dict[str, Described] = {output.name: output for output in session._described_outputs()}
        named = {size for _, shape in self._inputs for size in shape}
        # Named sizes of outputs that no input has. A run cannot determine these sizes.
        self._unknown = {
            output.name: [size for size in output.shape if isinstance(size, str) and size not in named]
            for output in description.outputs
        }

    def fetched(self, fetches: Sequence[str]) -> list[str]:
        """Returns the fetched outputs in the order of the description."""
        if isinstance(fetches, str) or not isinstance(fetches, Sequence):
            raise InvalidArgumentError(f"fetches must be a list of output names, got {fetches!r}")
        for name in fetches:
            if name not in self.outputs:
                raise InvalidArgumentError(
                    f"fetches: unknown output {name!r}; expected one of "
                    f"{', '.join(self.outputs)}{hint(name, self.outputs)}"
                )
        if len(set(fetches)) != len(fetches):
            raise InvalidArgumentError(f"fetches has an output twice: {', '.join(fetches)}")
        return [name for name in self.outputs if name in fetches]

    def inputs_by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any], fetching: bool) -> Inputs:
        """Returns the inputs by name, from positional and keyword values."""
        return inputs_by_name([name for name, _ in self._inputs], args, kwargs, fetching=fetching)

    def run(
        self,
        binding: IOBinding,
        inputs: Inputs,
        numbers: Mapping[str, float],
        outputs: Sequence[str],
        options: RunOptions,
    ) -> Results:
        """Runs the session and returns the requested outputs, each in its own memory."""
        feeds: dict[str, _ortrain.OrtValue] = {}
        sizes: dict[str, int] = {}
        for name, shape in self._inputs:
            if name not in inputs:
                continue
            feed = self._native(name, inputs[name])
            check_shape(name, shape, feed.shape(), sizes)
            # An input that no node reads may be missing from the session.
            if name in self._kinds:
                feeds[name] = feed
        for name in outputs:
            if self._unknown.get(name):
                raise KeyError(f"{self._unknown[name][0]}: no input in model_desc has this size of output {name!r}")
        for name, number in numbers.items():
            feeds[name] = native_value(np.array([number], np.float32))
        buffers = self._output_buffers(outputs, feeds, sizes)
        inside = binding._iobinding
        inside._inputs, inside._outputs, inside._values = feeds, {name: buffers.get(name) for name in outputs}, {}
        try:
            self.session.run_with_iobinding(binding, options)
        except InvalidArgumentError as error:
            unfit = error.output
            if unfit is None or unfit not in buffers:
                raise
            # The session reports this error before it runs anything.
            expected = buffers[unfit].shape()
            found = self._foreseen(unfit, self._own_sizes(feeds)) if error.shape is None else list(error.shape)
            if error.shape is None and _may_be(found, expected):
                self._by_values.add(unfit)
                return self.run(binding, inputs, numbers, outputs, options)
            sizes_found = ", ".join("?" if size is None else str(size) for size in found)
            raise InvalidArgumentError(
                f"output {unfit!r} has the shape {list(self._described_shapes[unfit])} in model_desc, "
                f"{list(expected)} for these inputs, but the model computes [{sizes_found}]"
            ) from error
        return inside._values | buffers

    def _output_buffers(
        self, outputs: Sequence[str], feeds: Mapping[str, _ortrain.OrtValue], sizes: Mapping[str, int]
    ) -> dict[str, _ortrain.OrtValue]:
        """Allocates outputs with a described shape that differs from the session's predicted shape.

        The session refuses memory of another shape before any weight changes.
        """
        own = self._own_sizes(feeds)
        buffers: dict[str, _ortrain.OrtValue] = {}
        for name in outputs:
            if name not in self._described_shapes:
                continue
            expected = [sizes.get(size) if isinstance(size, str) else size for size in self._described_shapes[name]]
            known = [size for size in expected if size is not None]
            if len(known) < len(expected):
                # Without the input that defines a named size, a fetch has no size to check.
                continue
            foreseen = self._foreseen(name, own)
            if known != foreseen and not (name in self._by_values and _may_be(foreseen, known)):
                buffers[name] = _new_buffer(known, self._session_outputs[name].type)
        return buffers

    def _own_sizes(self, feeds: Mapping[str, _ortrain.OrtValue]) -> dict[int | str | None, int]:
        """Returns the sizes of the inputs by the session's names for the sizes."""
        return {
            size: found
            for name, feed in feeds.items()
            if name in self._kinds
            for size, found in zip(self._kinds[name].shape, feed.shape(), strict=False)
        }

    def _foreseen(self, name: str, own: Mapping[int | str | None, int]) -> list[int | None]:
        """Returns the predicted shape of an output. A size that does not follow from the inputs is ``None``."""
        return [size if isinstance(size, int) else own.get(size) for size in self._session_outputs[name].shape]

    def _native(self, name: str, value: Any) -> _ortrain.OrtValue:
        if is_torch_tensor(value):
            return native_of_torch(name, value)
        return self.session._input_value(value, self._kinds[name]) if name in self._kinds else native_value(value)

    def answer(self, names: Sequence[str], results: Results, inputs: Inputs) -> Any:
        """Converts results to the kind of the inputs: a single result is returned alone, several as a list."""
        torch = torch_of(inputs.values())
        answers: list[Any] = []
        for name in names:
            value = results[name]
            answer = value.array() if torch is None else as_torch(torch, value)
            answers.append(answer.reshape(self._shapes[name]) if name in self._shapes else answer)
        return answers[0] if len(answers) == 1 else answers


def _may_be(foreseen: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Returns true if a predicted shape with unknown sizes can become ``shape``."""
    return len(foreseen) == len(shape) and all(
        size is None or size == other for size, other in zip(foreseen, shape, strict=True)
    )


def _new_buffer(shape: Sequence[int], kind: str) -> _ortrain.OrtValue:
    """Allocates a tensor of a shape and of a type such as ``tensor(float)``."""
    from onnx import TensorProto

    device = _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), 0)
    number = TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper())
    return _ortrain.OrtValue.ortvalue_from_shape_and_type(list(shape), number, device)
