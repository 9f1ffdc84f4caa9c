"""State of a training: parameters, properties and, once there is an optimizer, its moments.

>>> from ortrain.api.checkpoint_state import CheckpointState
>>> state = CheckpointState.load_checkpoint("checkpoint")
>>> state.parameters
Parameters(fc1.bias, fc1.weight, fc2.bias, fc2.weight)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain, _seeds
from ortrain._inputs import native_value
from ortrain._model_source import PathLike
from ortrain._records import record_of
from ortrain._suggest import nearest
from ortrain.errors import InvalidArgumentError, OrtrainError, OutOfRangeError
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "CheckpointState",
    "LoadReport",
    "Parameter",
    "Parameters",
    "PlaneLayout",
    "Properties",
    "StateLayout",
    "TensorLayout",
]


@dataclass(frozen=True)
class LoadReport:
    """Report on a file that was loaded into a state.

    >>> state.save_safetensors("model.safetensors", {"fc2.bias": "classifier.bias"})
    >>> report = state.load_safetensors("model.safetensors", strict=False)
    >>> report.loaded
    ['fc1.bias', 'fc1.weight', 'fc2.weight']
    >>> report.missing, report.unexpected
    (['fc2.bias'], ['classifier.bias'])
    """

    loaded: list[str]
    """Parameters with values from the file, by their names in the state, sorted."""
    missing: list[str]
    """Parameters that are missing in the file, by their names in the state, sorted. Their values do not change."""
    unexpected: list[str]
    """Tensors of the file without a parameter in the state, by their names in the file, sorted."""


class Parameter:
    """Tensor of the model, trainable or frozen; an entry of :attr:`CheckpointState.parameters`.

    Args:
        parameter: the name of the parameter, or another view of it.
        state: the state with the parameter.

    Raises:
        KeyError: if the state has no parameter of this name.
        TypeError: if ``parameter`` is not a name, or ``state`` is not a state.

    >>> state.parameters["fc2.bias"]
    Parameter(name=fc2.bias, requires_grad=True, shape=(10,), dtype=float32)
    >>> float(np.abs(state.parameters["fc2.bias"]).max()) < 1
    True
    >>> from ortrain.api.checkpoint_state import Parameter
    >>> np.shares_memory(Parameter("fc2.bias", state).data, state.parameters["fc2.bias"].data)
    True

    """

    __slots__ = ("_name", "_native")

    def __init__(self, parameter: str | Parameter, state: CheckpointState | _ortrain.CheckpointState) -> None:
        name = parameter.name if isinstance(parameter, Parameter) else parameter
        if not isinstance(name, str):
            raise TypeError(f"parameter must be a name, got {type(name).__name__}")
        native = _native_of(state)
        if not native.has_parameter(name):
            raise KeyError(_not_found("Parameter", name, native.parameter_names()))
        self._name = name
        self._native = native

    @property
    def name(self) -> str:
        """Name of the parameter, which is the name of its initializer in the model.

        >>> [parameter.name for _, parameter in state.parameters]
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        return self._name

    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained; frozen parameters and running statistics are not.

        >>> state.parameters["fc2.bias"].requires_grad
        True
        """
        return self._native.requires_grad(self._name)

    @property
    def data(self) -> npt.NDArray[Any]:
        """Live view of the values: it shows the values of each step, and steps use values that are written to it.

        The view of a frozen parameter is read-only; assign to :attr:`data` instead. A view stays valid as long as it is
        referenced, even without its state. If another thread steps during a write, the order of the values is
        undefined, but nothing worse happens. A bfloat16 parameter is ``ml_dtypes.bfloat16`` if that package is
        installed. Otherwise it is ``uint16``, the upper half of each float32.

        If the state is on a device (:attr:`CheckpointState.device`), this is a read-only copy that each access makes.
        Assigning to :attr:`data` copies the values to the device.

        A parameter without axes accepts a NumPy float of any width, such as ``parameter.data * 0.9``, and rounds it.

        Raises:
            InvalidArgumentError: for an array of another shape or type than the parameter.

        >>> bias = state.parameters["fc2.bias"]
        >>> bias.data.shape, bias.data.dtype
        ((10,), dtype('float32'))
        >>> bias.data[0] = 0.5
        >>> bias.data = np.full(10, 0.25, np.float32)
        >>> float(bias.data[0])
        0.25

        """
        return self._native.parameter(self._name)

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, np.floating) and not self.shape:
            # Arithmetic on an array without axes returns a number, which is float64 before NumPy 2.
            value = np.asarray(value, self.dtype)
        if isinstance(value, (list, tuple, int, float)):
            raise InvalidArgumentError(
                f"the value of parameter {self._name!r} must be an array or an OrtValue, got {type(value).__name__}"
            )
        self._native.set_parameter(self._name, native_value(value))

    @property
    def grad(self) -> npt.NDArray[Any] | None:
        """Live view of the accumulated gradient in the newest :class:`~ortrain.api.Module` on this state.

        ``None`` for a frozen parameter, and before a module was made on the state. The view stays readable after that
        module is gone, until another module is made. If the state is on a device, this is a read-only copy.

        >>> _ = module(x, labels)
        >>> gradient = state.parameters["fc2.bias"].grad
        >>> gradient.shape, gradient.dtype
        ((10,), dtype('float32'))
        >>> bool(gradient.any())
        True
        """
        return self._native.gradient(self._name)

    @property
    def slots(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the optimizer's values for the parameter, by name.

        Empty for a frozen parameter, and before an optimizer was made on the state. The values are float32 for weights
        of 32 or fewer bits, otherwise float64.

        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> slots = state.parameters["fc2.bias"].slots
        >>> sorted(slots), slots["momentum0"].shape
        (['momentum0', 'momentum1'], (10,))
        """
        return {name: OrtValue(value).numpy() for name, value in self._native.slots(self._name)}

    @property
    def average(self) -> npt.NDArray[Any]:
        """Copy of the average of the weights that the optimizer maintains.

        It is the moving average of an optimizer with ``ema_decay``, or the average that a schedule-free optimizer
        trains for. A frozen parameter is its own average.

        Raises:
            OrtrainError: if the optimizer maintains no average.

        >>> import ortrain
        >>> config = ortrain.optim.SGD(ema_decay=0.999)
        >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=ortrain.LossType.MSELoss, optimizer=config)
        >>> state = CheckpointState.load_checkpoint("checkpoint")
        >>> optimizer = Optimizer("optimizer_model.onnx", Module("training_model.onnx", state))
        >>> bias = state.parameters["fc2.bias"]
        >>> np.array_equal(bias.average, bias.data)
        True

        """
        return OrtValue(self._native.average(self._name)).numpy()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes; the values are not accessed.

        >>> state.parameters["fc1.weight"].shape
        (96, 64)
        """
        return tuple(self._native.type_of(self._name)[1] or ())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of :attr:`data`.

        >>> state.parameters["fc1.weight"].dtype
        dtype('float32')
        """
        name = self._native.type_of(self._name)[0]
        # NumPy has no bfloat16 of its own, so the type is the type of the values.
        return self.data.dtype if name == "bfloat16" else np.dtype(name)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the view :attr:`data`, or a copy if another type or a copy is requested.

        Raises:
            ValueError: if a copy is required but forbidden.

        >>> bias = state.parameters["fc2.bias"]
        >>> np.shares_memory(np.asarray(bias), bias.data), np.asarray(bias, np.float64).dtype
        (True, dtype('float64'))

        """
        view = self.data
        if dtype is not None and view.dtype != dtype:
            if copy is False:
                raise ValueError(
                    f"parameter {self._name!r} is {view.dtype}; a conversion to another type requires a copy"
                )
            return view.astype(dtype)
        return view.copy() if copy else view

    def __repr__(self) -> str:
        dtype, shape = self._native.type_of(self._name)
        shape_text = "unknown" if shape is None else str(tuple(shape))
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad}, shape={shape_text}, dtype={dtype})"


class Parameters:
    """Parameters of a state by name. Iteration yields ``(name, Parameter)``, names ascending.

    Args:
        state: the state with the parameters (:attr:`CheckpointState.parameters`).

    Raises:
        TypeError: if ``state`` is not a state.

    >>> len(state.parameters), "fc2.bias" in state.parameters
    (4, True)
    >>> for name, parameter in state.parameters:
    ...     print(name, parameter.data.shape)
    fc1.bias (96,)
    fc1.weight (96, 64)
    fc2.bias (10,)
    fc2.weight (10, 96)
    >>> state.parameters["fc2.wieght"]
    Traceback (most recent call last):
    KeyError: "Parameter fc2.wieght not found. Did you mean 'fc2.weight'?"

    """

    __slots__ = ("_native",)

    def __init__(self, state: CheckpointState | _ortrain.CheckpointState) -> None:
        self._native = _native_of(state)

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(_not_found("Parameter", name, self._native.parameter_names()))
        self._native.require_values()
        return Parameter(name, self._native)

    def __setitem__(self, name: str, value: Any) -> None:
        """Copy an array, or an :class:`~ortrain.OrtValue`, of the parameter's shape and type into the parameter.

        Raises:
            KeyError: if there is no parameter of this name.
            InvalidArgumentError: for a value of another shape or type, and for a list.

        >>> state.parameters["fc2.bias"] = np.ones(10, np.float32)
        >>> float(state.parameters["fc2.bias"].data.sum())
        10.0

        """
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._native.has_parameter(name)

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        self._native.require_values()
        for name in self._native.parameter_names():
            yield name, Parameter(name, self._native)

    def __len__(self) -> int:
        return len(self._native.parameter_names())

    def keys(self) -> list[str]:
        """Return the names in ascending order, also for a nominal state.

        >>> state.parameters.keys()
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        return self._native.parameter_names()

    def values(self) -> list[Parameter]:
        """Return the parameters, in the order of their names.

        >>> sum(parameter.data.size for parameter in state.parameters.values())
        7210
        """
        return [parameter for _, parameter in self]

    def items(self) -> list[tuple[str, Parameter]]:
        """Return names and parameters, as iteration yields them.

        >>> {name: parameter.shape for name, parameter in state.parameters.items()}["fc1.weight"]
        (96, 64)
        """
        return list(self)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._native.parameter_names())})"


class Properties:
    """Values stored in the checkpoint: ``int``, ``float`` and ``str`` by name.

    A float is stored as float32, as the file format requires.

    Args:
        state: the state with the properties (:attr:`CheckpointState.properties`).

    Raises:
        TypeError: if ``state`` is not a state.

    >>> state.properties["epoch"] = 3
    >>> state.properties["best"] = 0.25
    >>> state.properties
    Properties(best=0.25, epoch=3)
    >>> "worst" in state.properties
    False

    """

    __slots__ = ("_native",)

    def __init__(self, state: CheckpointState | _ortrain.CheckpointState) -> None:
        self._native = _native_of(state)

    def __getitem__(self, name: str) -> int | float | str:
        value = self._native.property(name)
        if value is None:
            raise KeyError(_not_found("Property", name, self._native.property_names()))
        return value

    def __setitem__(self, name: str, value: int | float | str | bytes | np.number[Any] | np.bool_) -> None:
        """Set or replace a property; the type may change.

        Raises:
            TypeError: if the value is neither a number nor a text.
            OutOfRangeError: for an integer outside int64, or a float outside float32.

        >>> state.properties["epoch"] = 3
        >>> state.properties["epoch"] = "the last"
        >>> state.properties["epoch"]
        'the last'

        """
        self._native.set_property(name, _property(value))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._native.property(name) is not None

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        for name in self._native.property_names():
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._native.property_names())

    def keys(self) -> list[str]:
        """Return the names in ascending order.

        >>> state.properties["epoch"] = 3
        >>> state.properties.keys()
        ['epoch']
        """
        return self._native.property_names()

    def values(self) -> list[int | float | str]:
        """Return the values, in the order of the names.

        >>> state.properties["epoch"] = 3
        >>> state.properties.values()
        [3]
        """
        return [value for _, value in self]

    def items(self) -> list[tuple[str, int | float | str]]:
        """Return names and values, as iteration yields them.

        >>> state.properties["epoch"] = 3
        >>> state.properties.items()
        [('epoch', 3)]
        """
        return list(self)

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in self)})"


def _native_of(state: object) -> _ortrain.CheckpointState:
    """Return the native state of a :class:`CheckpointState`, or a native state unchanged."""
    native = state._native if isinstance(state, CheckpointState) else state
    if not isinstance(native, _ortrain.CheckpointState):
        raise TypeError(f"state must be a CheckpointState, got {type(state).__name__}")
    return native


def _not_found(kind: str, name: object, names: list[str]) -> str:
    """Return onnxruntime-training's message for an unknown name, with a suggestion of a similar name."""
    near = nearest(name, names)
    return f"{kind} {name} not found." + ("" if near is None else f" Did you mean {near!r}?")


def _property(value: object) -> int | float | str:
    if isinstance(value, (bool, np.bool_, np.integer)):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (int, float, str)):
        return value
    raise TypeError(f"a property must be an int, a float or a str, got {type(value).__name__}")


@dataclass(frozen=True)
class TensorLayout:
    """Position of a parameter in its plane.

    >>> state.layout().trainable[0].tensors[0]
    TensorLayout(name='fc1.bias', shape=(96,), offset=0)
    """

    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    offset: int
    """Position of the first element, counted in elements of the plane."""


@dataclass(frozen=True)
class PlaneLayout:
    """Layout of a plane. The elements between tensors are zero and must stay zero.

    >>> plane = state.layout().trainable[0]
    >>> plane.dtype, plane.size, [tensor.offset for tensor in plane.tensors]
    ('float32', 7296, [0, 128, 6272, 6336])
    """

    dtype: str
    """Element type of the plane."""
    size: int
    """Number of elements, including the elements between tensors."""
    tensors: tuple[TensorLayout, ...]
    """Parameters, sorted by name."""


def _plane_layout(plane: _ortrain.Plane) -> PlaneLayout:
    tensors = (record_of(TensorLayout, tensor, shape=tuple(tensor.shape)) for tensor in plane.tensors)
    return record_of(PlaneLayout, plane, tensors=tuple(tensors))


@dataclass(frozen=True)
class StateLayout:
    """Layout of a state: a plane for each element type. Gradients have the layout of the trainable parameters.

    >>> layout = state.layout()
    >>> len(layout.trainable), len(layout.frozen)
    (1, 0)
    """

    trainable: tuple[PlaneLayout, ...]
    """Planes of the trained parameters."""
    frozen: tuple[PlaneLayout, ...]
    """Planes of the frozen parameters."""


class CheckpointState:
    """All values that training changes; :meth:`load_checkpoint` makes a state.

    A copy (``copy.deepcopy``, ``copy.copy``) or an unpickled state is independent and complete: values, moments, steps,
    the learning rate, the scheduler, properties and the seed, bit for bit. It is made through the bytes of a
    checkpoint. Gradients belong to modules and are not copied.

    >>> state = CheckpointState.load_checkpoint("checkpoint")
    >>> state
    CheckpointState(4 parameters, 4 of them trained, 28840 bytes, step 0)
    >>> state.parameters["fc2.bias"].data.shape
    (10,)
    >>> state.properties["epoch"] = 1
    >>> CheckpointState.save_checkpoint(state, "later")
    >>> import copy
    >>> best = copy.deepcopy(state)
    >>> state.parameters["fc2.weight"] = np.zeros((10, 96), np.float32)
    >>> bool(best.parameters["fc2.weight"].data.any()), best.properties["epoch"]
    (True, 1)
    """

    __slots__ = ("_native", "_parameters", "_properties", "_seeded")

    def __init__(self, state: _ortrain.CheckpointState) -> None:
        if not isinstance(state, _ortrain.CheckpointState):
            raise TypeError(
                "CheckpointState.load_checkpoint(path) creates a CheckpointState; the constructor does not accept "
                f"{type(state).__name__}"
            )
        self._native = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)
        self._seeded = 0
        self._take_seed()

    def _take_seed(self) -> None:
        """Apply the seed of ``onnxruntime.set_seed`` if it was set since the last call (:mod:`ortrain.compat`)."""
        self._seeded = _seeds.apply(self._native, self._seeded)

    def __reduce__(self) -> Any:
        return _from_pickle, (self._native.to_bytes(True), self._native.seed(), self._seeded)

    def __repr__(self) -> str:
        try:
            return f"CheckpointState({self._described()})"
        except OrtrainError as error:
            # repr raises no error, because a debugger may call it at any time.
            return f"CheckpointState(cannot be read now: {error})"

    def _described(self) -> str:
        names = self._native.parameter_names()
        trained = sum(map(self._native.requires_grad, names))
        parts = [f"{len(names)} parameter{'' if len(names) == 1 else 's'}", f"{trained} of them trained"]
        if self._native.is_nominal():
            parts.append("nominal: without values")
        else:
            parts.append(f"{sum(self.parameters[name].data.nbytes for name in names)} bytes")
        parts.append(f"step {self._native.steps()[1]}")
        rate = self._native.learning_rate()
        if rate is not None:
            parts.append(f"learning rate {rate:.6g}")
        properties = self._native.property_names()
        if properties:
            parts.append(f"properties {', '.join(properties)}")
        return ", ".join(parts)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: PathLike | bytes | bytearray | memoryview) -> CheckpointState:
        """Read a checkpoint, full or nominal, written by ortrain or by onnxruntime-training.

        ``checkpoint_uri`` is a path, or the bytes of a checkpoint file, as :meth:`to_bytes` returns them. If another
        process saves to the path meanwhile, the old or the new file is read completely.

        Raises:
            NoSuchFileError: if the file or its ``.data`` file does not exist.
            OrtrainError: if the file is no checkpoint or is damaged; for bytes of a checkpoint with tensors in a
                ``.data`` file, which bytes cannot refer to.

        >>> state = CheckpointState.load_checkpoint("checkpoint")
        >>> with open("checkpoint", "rb") as file:
        ...     same = CheckpointState.load_checkpoint(file.read())
        >>> len(state.parameters), len(same.parameters)
        (4, 4)

        """
        if isinstance(checkpoint_uri, (bytes, bytearray, memoryview)):
            return cls(_ortrain.CheckpointState.from_bytes(bytes(checkpoint_uri)))
        if not isinstance(checkpoint_uri, (str, os.PathLike)):
            raise TypeError(f"a checkpoint must be a path or bytes, got {type(checkpoint_uri).__name__}")
        return cls(_ortrain.CheckpointState.load(os.fspath(checkpoint_uri)))

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: PathLike, include_optimizer_state: bool = False
    ) -> None:
        """Write a checkpoint. An existing file is replaced only when the new one is complete and on disk.

        Args:
            state: the state to write.
            checkpoint_uri: the file.
            include_optimizer_state: True to store the moments, the step, the learning rate and the scheduler as well. A
                loaded run then continues with the same bits.

        Raises:
            NoSuchFileError, OrtrainError: if the file cannot be written.

        >>> state.properties["epoch"] = 7
        >>> CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
        >>> CheckpointState.load_checkpoint("trained").properties["epoch"]
        7

        """
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state must be a CheckpointState, got {type(state).__name__}")
        state._native.save(os.fspath(checkpoint_uri), include_optimizer_state)

    def averaged(self) -> CheckpointState:
        """Return a state with averages (:attr:`Parameter.average`) as its weights, without an optimizer.

        A module on this state evaluates the averages.

        Raises:
            OrtrainError: if the optimizer maintains no averages.

        >>> import ortrain
        >>> config = ortrain.optim.ScheduleFreeAdamW(lr=0.01)
        >>> loss = ortrain.LossType.CrossEntropyLoss
        >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)
        >>> state = CheckpointState.load_checkpoint("checkpoint")
        >>> module = Module("training_model.onnx", state)
        >>> optimizer = Optimizer("optimizer_model.onnx", module)
        >>> for step in range(3):
        ...     _ = module(x, labels)
        ...     optimizer.step()
        ...     module.lazy_reset_grad()
        >>> evaluated = Module("training_model.onnx", state.averaged(), "eval_model.onnx").eval()
        >>> loss = evaluated(x, labels)

        """
        return CheckpointState(self._native.averaged())

    def to_bytes(self, include_optimizer_state: bool = False) -> bytes:
        """Return the bytes of the file that :meth:`save_checkpoint` writes, to send or store elsewhere.

        Raises:
            OrtrainError: if they are more than 2 GiB, the limit of a checkpoint without a ``.data`` file.

        >>> received = CheckpointState.load_checkpoint(state.to_bytes())
        >>> np.array_equal(received.parameters["fc1.bias"].data, state.parameters["fc1.bias"].data)
        True

        """
        return self._native.to_bytes(include_optimizer_state)

    def load_parameters(self, checkpoint_uri: PathLike, strict: bool = True) -> LoadReport:
        """Load the values of the parameters from another checkpoint; optimizer state and properties do not change.

        Args:
            checkpoint_uri: a checkpoint file with values.
            strict: True if the file must have all parameters and no others. Otherwise matching parameters are loaded.

        Returns:
            The names of loaded parameters, of parameters missing in the file, and of unexpected tensors in the file.

        The state, not the file, determines the trained parameters. Floats may become wider (float16 and bfloat16 to
        float32 or float64, float32 to float64), which is exact.

        A nominal state becomes a full one. All of its parameters are loaded at once, strict or not. Their shapes come
        from the training model if a :class:`~ortrain.api.Module` was made on the state, otherwise from the file.

        Raises:
            InvalidArgumentError: for a tensor of another shape or of an incompatible type; for missing names if
                ``strict`` is set or the state is nominal; for unexpected names if ``strict`` is set. Nothing has
                changed then.
            NoSuchFileError, OrtrainError: if the file does not exist or is damaged.

        >>> import ortrain
        >>> from ortrain import artifacts
        >>> artifacts.generate_artifacts(
        ...     ortrain.examples.perceptron(), ["fc1.*"], loss=artifacts.LossType.MSELoss, prefix="pretrained_"
        ... )
        >>> report = state.load_parameters("pretrained_checkpoint", strict=False)
        >>> report.loaded
        ['fc1.bias', 'fc1.weight']
        >>> report.missing
        ['fc2.bias', 'fc2.weight']

        """
        return record_of(LoadReport, self._native.load_parameters(os.fspath(checkpoint_uri), strict))

    def load_safetensors(
        self, path: PathLike, names: Mapping[str, str] | None = None, strict: bool = True
    ) -> LoadReport:
        """Load the values of the parameters from a safetensors file.

        Args:
            path: the file.
            names: the name in the file by the name of the parameter, for names that differ.
            strict: as for :meth:`load_parameters`, which has the same results and errors.

        >>> names = {"fc2.weight": "model.classifier.weight", "fc2.bias": "model.classifier.bias"}
        >>> state.save_safetensors("model.safetensors", names)
        >>> report = state.load_safetensors("model.safetensors", names)
        >>> report.loaded
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']

        """
        return record_of(LoadReport, self._native.load_safetensors(os.fspath(path), dict(names or {}), strict))

    def save_safetensors(self, path: PathLike, names: Mapping[str, str] | None = None) -> None:
        """Write all parameters, including frozen ones, as a safetensors file.

        Args:
            path: the file. An existing file is replaced when the new one is complete and on disk.
            names: the name in the file by the name of the parameter, for names that differ.

        Raises:
            InvalidArgumentError: for an unknown parameter, and for a name that two parameters would have.
            OrtrainError: if the state is nominal, or the file cannot be written.

        >>> state.save_safetensors("model.safetensors")
        >>> len(state.load_safetensors("model.safetensors").loaded)
        4

        """
        self._native.save_safetensors(os.fspath(path), dict(names or {}))

    def layout(self) -> StateLayout:
        """Return the position of each parameter in the planes. It depends only on names, shapes and types.

        Raises:
            OrtrainError: if the state is nominal and no module has set the shapes yet.

        >>> (plane,) = state.layout().trainable
        >>> plane.dtype, [(tensor.name, tensor.shape) for tensor in plane.tensors][:2]
        ('float32', [('fc1.bias', (96,)), ('fc1.weight', (96, 64))])

        """
        native = self._native.layout()
        return StateLayout(tuple(map(_plane_layout, native.trainable)), tuple(map(_plane_layout, native.frozen)))

    @property
    def device(self) -> str:
        """Location of the state: ``"cpu"``, the memory of this process, or a device of :func:`ortrain.devices`.

        The first module for a device moves the state there.

        >>> state.device
        'cpu'
        """
        return self._native.device()

    def to(self, device: str) -> CheckpointState:
        """Move parameters and optimizer values to a device, all or nothing.

        Earlier views and planes keep their values but no longer belong to the state. Each call of a module on the
        device before is an error until the state is moved back.

        Args:
            device: as for :class:`~ortrain.api.Module`. ``"reference"`` uses the memory of this process.

        Returns:
            The state itself.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidArgumentError: if the device name is unknown.
            MemoryLimitError: if the device has too little memory. The state then stays where it is.

        >>> state.to("cpu").device
        'cpu'

        """
        self._native.to(device)
        return self

    def trainable_planes(self) -> list[Any]:
        """Return live views of the memory of all trainable parameters: a vector for each element type.

        They are in the order of ``layout().trainable``. NumPy arrays support DLPack, so other libraries can use them
        directly. The elements between tensors are zero and must stay zero. On a device each view is a
        :class:`~ortrain.DeviceArray`.

        Raises:
            OrtrainError: if the state is nominal.

        >>> (plane,), (layout,) = state.trainable_planes(), state.layout().trainable
        >>> first = layout.tensors[0]
        >>> part = plane[first.offset :][: np.prod(first.shape)].reshape(first.shape)
        >>> np.shares_memory(part, state.parameters[first.name].data)
        True

        """
        return self._native.planes(True)

    def frozen_planes(self) -> list[Any]:
        """Return read-only views of the memory of all frozen parameters, in the order of ``layout().frozen``.

        Raises:
            OrtrainError: if the state is nominal.

        >>> state.frozen_planes()
        []

        """
        return self._native.planes(False)

    @property
    def parameters(self) -> Parameters:
        """Parameters by name.

        >>> state.parameters["fc1.weight"].data.shape
        (96, 64)
        """
        return self._parameters

    @property
    def seed(self) -> int:
        """Seed of random numbers, above all of Dropout masks: an integer of 64 bits; 0 unless it was set.

        The seed and the count of training steps on the state determine all random numbers. The same seed at the same
        step gives the same masks, on every machine and with any number of threads. Nodes with a ``seed`` attribute and
        steps of eval models ignore this seed. Every checkpoint stores it, with and without optimizer state. Weights are
        not drawn from it: they come from the model.

        Raises:
            TypeError: for a value that is not an integer.
            OutOfRangeError: for an integer outside int64.

        >>> state.seed
        0
        >>> state.seed = 7
        >>> CheckpointState.load_checkpoint(state.to_bytes()).seed
        7

        """
        return self._native.seed()

    @seed.setter
    def seed(self, seed: int) -> None:
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"a seed must be an integer, got {seed!r}")
        number = operator.index(seed)
        if not -(1 << 63) <= number < 1 << 63:
            raise OutOfRangeError(f"a seed must be a 64-bit integer, from -2**63 to 2**63 - 1, got {number}")
        self._native.set_seed(number)

    @property
    def properties(self) -> Properties:
        """Properties by name.

        >>> state.properties["epoch"] = 3
        >>> state.properties["epoch"]
        3
        """
        return self._properties


def _from_pickle(content: bytes, seed: int, seeded: int) -> CheckpointState:
    """Return the state that was pickled or copied."""
    state = CheckpointState(_ortrain.CheckpointState.from_bytes(content))
    # The copy has the seed of its original, even if a script for onnxruntime has set another seed.
    if state.seed != seed:
        state._native.set_seed(seed)
    state._seeded = max(state._seeded, seeded)
    return state
