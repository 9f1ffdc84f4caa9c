"""Small ONNX functions of values, and the base classes of objects with such functions."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from ortrain import _files, _ortrain
from ortrain._model_source import PathLike
from ortrain._options import native_options
from ortrain._ortrain import OrtValue
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, NoSuchFileError, OrtrainError
from ortrain.gradient.utils.onnx_function import function_onnx_graph
from ortrain.gradient.utils.onnx_helper import proto_type_to_dtype

# Abbreviations of class names in file names.
_SHORT = {"Learning": "L", "OrtGradient": "Grad", "ForwardBackward": "FB"}
# Length above which a value is truncated in the text of an object, and the length of the truncated text.
_LONGEST, _SHOWN = 50, 10

Self = TypeVar("Self", bound="Parameters")


class OnnxFunction:
    """ONNX model as a function of values, compiled once; a pickle contains its bytes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._bytes = model.SerializeToString()
        self._session = _ortrain.InferenceSession(self._bytes, options=native_options(None))
        self._outputs = [output.name for output in self._session.outputs()]

    def __reduce__(self) -> Any:
        return _loaded, (self._bytes,)

    def __call__(self, **feeds: OrtValue) -> list[OrtValue]:
        """Returns the outputs, in the order of the model."""
        found = self._session.run(dict(feeds), None)
        assert all(isinstance(value, OrtValue) for value in found)
        return found  # type: ignore[return-value]

    def write(self, outputs: Mapping[str, OrtValue], **feeds: OrtValue) -> None:
        """Writes outputs into existing values, which may also be inputs of the function."""
        indexed_outputs = [(self._outputs.index(name), value) for name, value in outputs.items()]
        self._session.run_into(dict(feeds), indexed_outputs)


def _loaded(model: bytes) -> OnnxFunction:
    return OnnxFunction(onnx.load_from_string(model))


class Typed:
    """Function of :mod:`~ortrain.gradient.utils.onnx_function`, compiled for each element type at its first use.

    ``model`` is the function for float32. ``change`` rewrites the model of each type before its use.
    """

    def __init__(
        self, name: str, change: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None, **settings: Any
    ) -> None:
        self._name, self._change, self._settings = name, change, settings
        self._functions: dict[tuple[int, bool], OnnxFunction] = {}
        self.model = self._build_model(np.float32)

    def _build_model(self, dtype: Any) -> onnx.ModelProto:
        model = function_onnx_graph(self._name, dtype=dtype, **self._settings)
        return model if self._change is None else self._change(model)

    def of(self, value: OrtValue, overrides: bool = False) -> OnnxFunction:
        """Returns the function for the element type of a value; ``overrides`` if the call passes inputs with a default.

        Raises:
            InvalidArgumentError: for element types other than float32 and float64.

        """
        key = (value.element_type(), overrides)
        if key not in self._functions:
            model = self._build_model(proto_type_to_dtype(key[0]))
            if overrides:
                input_names = {entry.name for entry in model.graph.input}
                constants = [entry for entry in model.graph.initializer if entry.name not in input_names]
                del model.graph.initializer[:]
                model.graph.initializer.extend(constants)
            self._functions[key] = OnnxFunction(model)
        return self._functions[key]


class Parameters:
    """Base class of objects with constructor parameters, which can save their ONNX functions."""

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """Returns the parameters of the constructor, with their defaults."""
        found = inspect.signature(cls.__init__).parameters.values()
        return {entry.name: entry.default for entry in found if entry.name != "self"}

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """Returns the constructor's parameters; with ``deep``, also parameters of parts as ``part__parameter``.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).get_params()
        {'eta0': 0.5, 'alpha': 0.0001, 'power_t': 0.25, 'learning_rate': 'invscaling'}
        """
        found = {name: getattr(self, name) for name in self._defaults()}
        if deep:
            for name, part in list(found.items()):
                if isinstance(part, Parameters):
                    found |= {f"{name}__{inner}": value for inner, value in part.get_params(deep=True).items()}
        return found

    def set_params(self: Self, **params: Any) -> Self:
        """Sets parameters; ``part__parameter`` sets a parameter of a part.

        Returns:
            The object.

        Raises:
            InvalidArgumentError: for an unknown name.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> LearningRateSGD(0.5).set_params(eta0=0.25).eta0
        0.25

        """
        names = list(self._defaults())
        for name, value in params.items():
            own, _, inner = name.partition("__")
            if own not in names:
                raise InvalidArgumentError(f"{type(self).__name__} has no parameter {own!r}{hint(own, names)}")
            if inner:
                getattr(self, own).set_params(**{inner: value})
            else:
                setattr(self, own, value)
        return self

    def save_onnx_graph(
        self, folder: PathLike | type[bytes], prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Saves the models of the object, and the models of its parts.

        Args:
            folder: the folder of the files; or the type ``bytes``, to return bytes instead.
            prefix: a text before the class name in the file names.
            suffix: a text after the class name.

        Returns:
            The path or the bytes of each model, by the name of its attribute. A part has a dictionary of its models.

        Raises:
            NoSuchFileError: if the folder does not exist.

        Warns:
            UserWarning: for an existing file, which is overwritten.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> rate = LearningRateSGD()
        >>> rate.build_onnx_function(15, get_ort_device("cpu"), 1)
        >>> rate.save_onnx_graph(".")
        {'axpy_onnx_': 'LRateSGD.axpy_onnx_.onnx'}

        """
        prefix, suffix = prefix or "", suffix or ""
        if folder is not bytes and not os.path.isdir(folder):  # type: ignore[arg-type]  # noqa: PTH112
            raise NoSuchFileError(f"there is no folder {os.fspath(folder)}")  # type: ignore[arg-type]
        saved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, onnx.ModelProto):
                if folder is bytes:
                    saved[name] = value.SerializeToString()
                else:
                    saved[name] = _save(value, folder, f"{prefix}{type(self).__name__}{suffix}.{name}.onnx")  # type: ignore[arg-type]
            elif hasattr(value, "save_onnx_graph"):
                saved[name] = value.save_onnx_graph(folder, prefix=prefix, suffix=f"{suffix}.{name}")
        return saved


def _save(model: onnx.ModelProto, folder: PathLike, name: str) -> str:
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    path = Path(folder) / name
    if path.exists():
        warnings.warn(f"{path} is overwritten", UserWarning, stacklevel=3)
    _files.write(path, model.SerializeToString())
    return str(path)


def shown(value: object) -> str:
    """Returns the text of a parameter, truncated if it is long."""
    # `str` of a message shows its content in every version of protobuf.
    text = str(value) if isinstance(value, onnx.ModelProto) else repr(value)
    if len(text) > _LONGEST or "\n" in text:
        return repr(text[:_SHOWN].replace("\n", " ") + "...")
    return text


class Learning(Parameters):
    """Base class of losses, penalties and learning rates: their functions are built before use."""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({values}){self._suffix()}"

    def _suffix(self) -> str:
        return ""

    def build_onnx_function(self, opset: int, device: _ortrain.OrtDevice, third: Any) -> None:
        """Builds the functions; computations without them are errors.

        >>> from ortrain.gradient.sgd_learning_rate import LearningRateSGD
        >>> from ortrain.gradient.utils.onnxruntime_helper import get_ort_device
        >>> LearningRateSGD().build_onnx_function(15, get_ort_device("cpu"), 2)
        """
        raise NotImplementedError(f"{type(self).__name__} has no build_onnx_function")


def built(found: Typed | None, kind: object) -> Typed:
    """Returns functions that must already be built.

    Raises:
        OrtrainError: if the functions are not built.

    """
    if found is None:
        raise OrtrainError(f"{type(kind).__name__} has no functions yet; call build_onnx_function first")
    return found


Kind = TypeVar("Kind")


def chosen(what: str, names: Mapping[Any, Kind], name: object) -> Kind:
    """Looks up a name.

    Raises:
        InvalidArgumentError: for an unknown name.

    """
    if isinstance(name, (str, type(None))) and name in names:
        return names[name]
    raise InvalidArgumentError(f"unknown {what} {name!r}; expected one of {', '.join(map(repr, names))}")
