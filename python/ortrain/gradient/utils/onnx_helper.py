"""Versions, types and initializers of models (``onnxcustom.utils.onnx_helper``).

>>> from ortrain.gradient.utils.onnx_helper import get_onnx_opset, onnx_rename_weights
>>> get_onnx_opset(model)
17
>>> [entry.name for entry in onnx_rename_weights(model).graph.initializer]
['I0_fc1.weight', 'I1_fc1.bias', 'I2_fc2.weight', 'I3_fc2.bias']
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from ortrain import _ortrain
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.gradient.utils._graphs import checked_model, names_of, rename, unique_name
from ortrain.ortvalue import OrtValue

__all__ = [
    "add_initializer",
    "dtype_to_var_type",
    "get_onnx_opset",
    "onnx_rename_weights",
    "proto_type_to_dtype",
    "remove_initializer",
    "replace_initializers_into_onnx",
]

_Tensor: TypeAlias = npt.NDArray[Any] | OrtValue | _ortrain.OrtValue | onnx.TensorProto
_VAR_TYPES = {"float32": "FloatTensorType", "float64": "DoubleTensorType"} | {
    "int64": "Int64TensorType",
    "int32": "Int32TensorType",
}


def get_onnx_opset(onx: onnx.ModelProto, domain: str = "") -> int:
    """Returns the opset version of a domain in a model.

    Args:
        onx: the model.
        domain: the domain; by default ``""``, which is ``"ai.onnx"``.

    Raises:
        InvalidArgumentError: for a domain that the model does not import.

    Source: ``onnxcustom.utils.onnx_helper.get_onnx_opset``.

    >>> from ortrain.gradient.utils.onnx_helper import get_onnx_opset
    >>> get_onnx_opset(model)
    17
    >>> get_onnx_opset(model, "ai.onnx.ml")
    Traceback (most recent call last):
    ortrain.errors.InvalidArgumentError: the model imports no operators of domain 'ai.onnx.ml'; it imports 'ai.onnx'

    """
    imported = {entry.domain or "ai.onnx": entry.version for entry in checked_model(onx).opset_import}
    domain_name = domain or "ai.onnx"
    if domain_name not in imported:
        there = ", ".join(map(repr, imported)) or "none"
        raise InvalidArgumentError(f"the model imports no operators of domain {domain_name!r}; it imports {there}")
    return int(imported[domain_name])


def proto_type_to_dtype(proto_type: int | str) -> type[np.float32] | type[np.float64]:
    """Returns the NumPy type of an ONNX element type, float32 or float64.

    Args:
        proto_type: ``TensorProto.FLOAT`` (1) or ``TensorProto.DOUBLE`` (11); ``"tensor(float)"`` or
            ``"tensor(double)"``.

    Raises:
        InvalidArgumentError: for another type.

    Source: ``onnxcustom.utils.onnx_helper.proto_type_to_dtype``.

    >>> from ortrain.gradient.utils.onnx_helper import proto_type_to_dtype
    >>> proto_type_to_dtype("tensor(double)")
    <class 'numpy.float64'>

    """
    if proto_type in (onnx.TensorProto.FLOAT, "tensor(float)"):
        return np.float32
    if proto_type in (onnx.TensorProto.DOUBLE, "tensor(double)"):
        return np.float64
    raise InvalidArgumentError(
        f"a type must be TensorProto.FLOAT, TensorProto.DOUBLE, 'tensor(float)' or 'tensor(double)', got {proto_type!r}"
    )


def dtype_to_var_type(dtype: npt.DTypeLike) -> type[Any]:
    """Returns the skl2onnx type of tensors of a NumPy type; needs the package ``skl2onnx``.

    Args:
        dtype: ``float32``, ``float64``, ``int32`` or ``int64``.

    Raises:
        InvalidArgumentError: for another type.
        ModuleNotFoundError: without ``skl2onnx``.

    Source: ``onnxcustom.utils.onnx_helper.dtype_to_var_type``.

    >>> from ortrain.gradient.utils.onnx_helper import dtype_to_var_type
    >>> dtype_to_var_type(np.float64).__name__
    'DoubleTensorType'

    """
    name = np.dtype(dtype).name
    if name not in _VAR_TYPES:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_VAR_TYPES)}, got {name}")
    found: type[Any] = getattr(importlib.import_module("skl2onnx.common.data_types"), _VAR_TYPES[name])
    return found


def onnx_rename_weights(onx: onnx.ModelProto) -> onnx.ModelProto:
    """Renames initializers in place so that their order is alphabetical; returns the same model.

    The initializer at index ``k`` becomes ``I<k>_<name>``. The index is padded with zeros to the number of digits of
    the number of initializers. Outputs keep their names.

    Source: ``onnxcustom.utils.onnx_helper.onnx_rename_weights``, which does not rename in subgraphs.

    >>> from ortrain.gradient.utils.onnx_helper import onnx_rename_weights
    >>> onnx_rename_weights(model) is model
    True
    >>> model.graph.node[0].input
    ['x', 'I0_fc1.weight', 'I1_fc1.bias']

    """
    graph = checked_model(onx).graph
    names = [entry.name for entry in graph.initializer]
    existing_names, digits = names_of(graph), len(str(len(names)))
    new = {name: unique_name(existing_names, f"I{at:0{digits}}_{name}") for at, name in enumerate(names)}
    outputs = {entry.name for entry in graph.output}
    rename(graph, new)
    for entry in graph.output:
        entry.name = next((old for old, name in new.items() if name == entry.name), entry.name)
    graph.node.extend(helper.make_node("Identity", [new[name]], [name]) for name in names if name in outputs)
    return onx


def _initializer_index(model: onnx.ModelProto, name: str) -> int:
    names = [entry.name for entry in model.graph.initializer]
    if name not in names:
        raise InvalidArgumentError(
            f"the model has no initializer {name!r}; it has {', '.join(names) or 'none'}{hint(name, names)}"
        )
    return names.index(name)


def _tensor(value: _Tensor, name: str) -> onnx.TensorProto:
    """Converts a value to a tensor of this name."""
    if isinstance(value, onnx.TensorProto):
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = name
        return tensor
    if isinstance(value, (OrtValue, _ortrain.OrtValue)):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return numpy_helper.from_array(np.asarray(value), name)
    raise TypeError(
        f"the value of initializer {name!r} must be an array, an OrtValue or an onnx.TensorProto, got "
        f"{type(value).__name__}"
    )


def add_initializer(model: onnx.ModelProto, name: str, value: _Tensor) -> onnx.ModelProto:
    """Returns a model with an additional initializer. An input of the same name becomes optional.

    Args:
        model: the model; it is not changed.
        name: the name of the initializer.
        value: an array, a value, or a tensor.

    Raises:
        InvalidArgumentError: for the name of an existing initializer or node result.
        TypeError: for a value that is not a tensor.

    Source: ``onnxcustom.utils.onnx_helper.add_initializer``.

    >>> from ortrain.gradient.utils.onnx_helper import add_initializer
    >>> [entry.name for entry in add_initializer(model, "scale", np.ones(3, np.float32)).graph.initializer][-1]
    'scale'

    """
    graph = checked_model(model, "model").graph
    if any(entry.name == name for entry in graph.initializer) or any(name in node.output for node in graph.node):
        raise InvalidArgumentError(f"the model already has a value {name!r}; choose another name for the initializer")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.initializer.append(_tensor(value, name))
    return copy


def remove_initializer(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Returns a model without the default value of an input, so that every run must supply the input.

    ortrain treats initializers as constants, also if an input has the same name. Functions of
    :func:`~ortrain.gradient.utils.onnx_function.function_onnx_graph` therefore read row weights from their caller only
    after the initializer is removed.

    Args:
        model: the model; it is not changed.
        name: the name of the initializer and the input.

    Raises:
        InvalidArgumentError: for a name that is not both an initializer and an input.

    >>> import ortrain
    >>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
    >>> from ortrain.gradient.utils.onnx_helper import remove_initializer
    >>> function = remove_initializer(function_onnx_graph("square_error", weight_name="weight"), "weight")
    >>> feeds = {"X1": np.zeros((2, 1), np.float32), "X2": np.ones((2, 1), np.float32)}
    >>> ortrain.InferenceSession(function).run(None, feeds | {"weight": np.float32([2, 3])})
    [array([5.], dtype=float32)]

    """
    at = _initializer_index(checked_model(model, "model"), name)
    if not any(entry.name == name for entry in model.graph.input):
        raise InvalidArgumentError(
            f"initializer {name!r} is not an input of the model, so no run could supply its value"
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.initializer[at]
    return copy


def replace_initializers_into_onnx(model: onnx.ModelProto, results: Mapping[str, _Tensor]) -> onnx.ModelProto:
    """Returns a model with new values for some of its initializers, for example trained values.

    Args:
        model: the model; it is not changed.
        results: an array, a value or a tensor for each name, of the element type and shape of the initializer.

    Raises:
        InvalidArgumentError: for an unknown initializer, or a different element type or shape.
        TypeError: for a value that is not a tensor.

    Source: ``onnxcustom.utils.onnx_helper.replace_initializers_into_onnx``.

    >>> from ortrain.gradient.utils.onnx_helper import replace_initializers_into_onnx
    >>> trained = replace_initializers_into_onnx(model, {"fc2.bias": np.ones(10, np.float32)})
    >>> onnx.numpy_helper.to_array(trained.graph.initializer[3])[:3]
    array([1., 1., 1.], dtype=float32)

    """
    copy = onnx.ModelProto()
    copy.CopyFrom(checked_model(model, "model"))
    for name, value in results.items():
        old = copy.graph.initializer[_initializer_index(copy, name)]
        new = _tensor(value, name)
        if (new.data_type, list(new.dims)) != (old.data_type, list(old.dims)):
            raise InvalidArgumentError(
                f"initializer {name!r} is {_described(old)}, but its new value is {_described(new)}"
            )
        old.CopyFrom(new)
    return copy


def _described(tensor: onnx.TensorProto) -> str:
    return f"{onnx.TensorProto.DataType.Name(tensor.data_type).lower()}{list(tensor.dims)}"
