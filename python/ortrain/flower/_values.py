"""Values of a state by name, in and out, for full and nominal states."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _files
from ortrain._suggest import nearest
from ortrain.api import CheckpointState
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Shapes", "Values", "check_values", "frozen_values", "set_values", "shapes_of", "size_of", "trained_values"]

Values = Mapping[str, "npt.NDArray[Any]"]
"""Arrays by the names of their parameters."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by the names of their parameters."""

# Names of element types in safetensors files.
_SAFETENSORS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def shapes_of(state: CheckpointState, *, trained: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained parameters, or of the other floats, by name, also for a nominal state.

    Raises:
        InvalidArgumentError: if the state is nominal and no module has set its shapes.

    """
    found = {}
    for name in state._native.parameter_names():
        if state._native.requires_grad(name) != trained:
            continue
        dtype, shape = state._native.type_of(name)
        if dtype not in _SAFETENSORS:
            continue
        if shape is None:
            raise InvalidArgumentError(
                f"the state is nominal and the shape of {name!r} is unknown; make a Module on it"
            )
        found[name] = tuple(shape)
    return found


def _values(state: CheckpointState, names: Shapes) -> dict[str, npt.NDArray[Any]]:
    return {name: _as_float32(state, name) for name in names}


def trained_values(state: CheckpointState) -> dict[str, npt.NDArray[Any]]:
    """Return float32 copies of the trained parameters by name, in ascending order of the names."""
    return _values(state, shapes_of(state, trained=True))


def frozen_values(state: CheckpointState) -> dict[str, npt.NDArray[Any]]:
    """Return float32 copies of all floats that are not trained: frozen parameters and running statistics."""
    return _values(state, shapes_of(state, trained=False))


def _as_float32(state: CheckpointState, name: str) -> npt.NDArray[Any]:
    data = state.parameters[name].data
    if data.dtype == np.uint16:
        # bfloat16 without the package ml_dtypes: the upper half of each float32.
        return (data.astype(np.uint32) << 16).view(np.float32)
    return np.array(data, np.float32)


def _in_type(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return values in the element type of a parameter; bfloat16 as uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return rounded.astype(np.uint16)


def check_values(values: Values, shapes: Shapes, *, complete: bool = True) -> None:
    """Check that arrays have known names, the right shapes, and finite floats.

    Args:
        values: the arrays.
        shapes: the expected shapes.
        complete: True if every name must be there.

    Raises:
        InvalidArgumentError: with the first name that is wrong.

    """
    for name, shape in shapes.items():
        if name not in values:
            if complete:
                raise InvalidArgumentError(f"parameter {name!r} is missing")
            continue
        array = values[name]
        if array.dtype.kind != "f":
            raise InvalidArgumentError(f"parameter {name!r} has elements of {array.dtype}, expected floats")
        if array.shape != shape:
            raise InvalidArgumentError(f"parameter {name!r} has the shape {array.shape}, expected {shape}")
        if not np.isfinite(array).all():
            raise InvalidArgumentError(f"parameter {name!r} has NaN or infinities")
    for name in values:
        if name not in shapes:
            near = nearest(name, list(shapes))
            raise InvalidArgumentError(
                f"there is no parameter {name!r}" + ("" if near is None else f"; did you mean {near!r}?")
            )


def set_values(state: CheckpointState, trained: Values, frozen: Values) -> None:
    """Set all trained parameters, and some or all of the others; all or nothing.

    A nominal state takes all of its parameters at once.

    Raises:
        InvalidArgumentError: for missing or unknown names, other shapes, NaN and infinities.

    """
    check_values(trained, shapes_of(state, trained=True))
    known = shapes_of(state, trained=False)
    check_values(frozen, known, complete=False)
    values = {**trained, **frozen}
    if state._native.is_nominal():
        missing = [name for name in known if name not in values]
        if missing:
            raise InvalidArgumentError(
                f"the state is nominal and has no values of {missing[0]!r}; let the server send them: "
                "server_app(..., send_frozen=True)"
            )
        _fill(state, values)
        return
    for name, array in values.items():
        converted = _in_type(array, state._native.type_of(name)[0])
        target = state.parameters[name]
        target.data = converted.view(target.dtype) if converted.dtype != target.dtype else converted


def _fill(state: CheckpointState, values: Values) -> None:
    """Load values into a nominal state through a safetensors file."""
    header: dict[str, Any] = {}
    parts = []
    offset = 0
    for name in sorted(values):
        dtype = state._native.type_of(name)[0]
        content = np.ascontiguousarray(_in_type(values[name], dtype)).tobytes()
        header[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(values[name].shape),
            "data_offsets": [offset, offset + len(content)],
        }
        offset += len(content)
        parts.append(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with tempfile.TemporaryDirectory(prefix="ortrain-") as folder:
        path = Path(folder) / "values.safetensors"
        _files.write(path, len(text).to_bytes(8, "little") + text + b"".join(parts))
        state.load_safetensors(path)


def size_of(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())
