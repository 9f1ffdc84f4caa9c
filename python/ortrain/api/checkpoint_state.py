"""The state of a training run: parameters, properties, and (once there is an optimizer) its moments.

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
from ortrain._near import nearest
from ortrain._sources import PathLike
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
    """What a file had for a state.

    >>> state.save_safetensors("model.safetensors", {"fc2.bias": "classifier.bias"})
    >>> report = state.load_safetensors("model.safetensors", strict=False)
    >>> report.loaded
    ['fc1.bias', 'fc1.weight', 'fc2.weight']
    >>> report.missing, report.unexpected
    (['fc2.bias'], ['classifier.bias'])
    """

    loaded: list[str]
    """Parameters that got their values from the file, by their names in the state, sorted."""
    missing: list[str]
    """Parameters that the file does not have, by their names in the state, sorted. They stay as they are."""
    unexpected: list[str]
    """Tensors of the file that the state does not have, by their names in the file, sorted."""


class Parameter:
    """One tensor of the model, trainable or frozen; what :attr:`CheckpointState.parameters` holds.

    Args:
        parameter: its name, or another view of it.
        state: the state that it is a parameter of.

    Raises:
        KeyError: if the state has no parameter of this name.
        TypeError: for a ``parameter`` that is no name, or a ``state`` that is none.

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
            raise TypeError(f"parameter is the name of one, not {type(name).__name__}")
        native = _native_of(state)
        if not native.has_parameter(name):
            raise KeyError(_not_found("Parameter", name, native.parameter_names()))
        self._name = name
        self._native = native

    @property
    def name(self) -> str:
        """The name of the initializer that it was.

        >>> [parameter.name for _, parameter in state.parameters]
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        return self._name

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained; frozen parameters and running statistics are not.

        >>> state.parameters["fc2.bias"].requires_grad
        True
        """
        return self._native.requires_grad(self._name)

    @property
    def data(self) -> npt.NDArray[Any]:
        """A live view of the values: what a step writes shows here, and what is written here is trained on.

        The view of a frozen parameter is read-only; assign to :attr:`data` instead. Views stay valid for as long as
        somebody holds them, whatever becomes of the state. Writing while another thread steps gives values in no
        particular order, and nothing worse. A bfloat16 parameter comes as ``ml_dtypes.bfloat16`` if that package is
        installed, else as ``uint16``, the upper half of each float32.

        Where the state lies on a device (:attr:`CheckpointState.device`), this is a read-only copy, made when it is
        asked for; assigning to :attr:`data` copies there.

        A parameter without axes takes a float of NumPy of any width, as ``parameter.data * 0.9`` is one; it is rounded.

        Raises:
            InvalidArgumentError: for an array of another shape or type than the parameter's.

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
            # Arithmetic on an array without axes gives a number, of float64 before NumPy 2.
            value = np.asarray(value, self.dtype)
        if isinstance(value, (list, tuple, int, float)):
            raise InvalidArgumentError(
                f"parameter {self._name!r} is set from an array or an OrtValue, not {type(value).__name__}"
            )
        self._native.set_parameter(self._name, native_value(value))

    @property
    def grad(self) -> npt.NDArray[Any] | None:
        """A live view of the accumulated gradient in the newest :class:`~ortrain.api.Module` on this state.

        ``None`` for a frozen parameter, and as long as no module was made on the state. Still readable after that
        module is gone, until another one is made. Where the state lies on a device, a read-only copy.

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
        """Copies of the values that the optimizer keeps for the parameter, by name.

        Empty for a frozen parameter, and before an optimizer was made on the state. They are float32 for weights of
        float32 and fewer bits, else float64.

        >>> _ = module(x, labels)
        >>> optimizer.step()
        >>> slots = state.parameters["fc2.bias"].slots
        >>> sorted(slots), slots["momentum0"].shape
        (['momentum0', 'momentum1'], (10,))
        """
        return {name: OrtValue(value).numpy() for name, value in self._native.slots(self._name)}

    @property
    def average(self) -> npt.NDArray[Any]:
        """A copy of the average of the weights that the optimizer keeps.

        That is the moving average of an optimizer with ``ema_decay``, or the average that a schedule-free optimizer
        trains for. A frozen parameter is its own average.

        Raises:
            OrtrainError: if the optimizer keeps no average.

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
        """The sizes of the axes, without touching the values.

        >>> state.parameters["fc1.weight"].shape
        (96, 64)
        """
        return tuple(self._native.type_of(self._name)[1] or ())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements of :attr:`data`.

        >>> state.parameters["fc1.weight"].dtype
        dtype('float32')
        """
        name = self._native.type_of(self._name)[0]
        # NumPy has no bfloat16 of its own: it is as the values come.
        return self.data.dtype if name == "bfloat16" else np.dtype(name)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The view that :attr:`data` is, unless another type or a copy is asked for.

        Raises:
            ValueError: if a copy is needed and forbidden.

        >>> bias = state.parameters["fc2.bias"]
        >>> np.shares_memory(np.asarray(bias), bias.data), np.asarray(bias, np.float64).dtype
        (True, dtype('float64'))

        """
        view = self.data
        if dtype is not None and view.dtype != dtype:
            if copy is False:
                raise ValueError(f"parameter {self._name!r} is {view.dtype}; another type needs a copy")
            return view.astype(dtype)
        return view.copy() if copy else view

    def __repr__(self) -> str:
        dtype, shape = self._native.type_of(self._name)
        shape_text = "unknown" if shape is None else str(tuple(shape))
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad}, shape={shape_text}, dtype={dtype})"


class Parameters:
    """The parameters of a state by name. Iteration yields ``(name, Parameter)``, names ascending.

    Args:
        state: the state, whose :attr:`CheckpointState.parameters` these are.

    Raises:
        TypeError: for a ``state`` that is none.

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
        """Copy an array, or an :class:`~ortrain.OrtValue`, of the parameter's shape and type into it.

        Raises:
            KeyError: if there is no parameter of this name.
            InvalidArgumentError: for a value of another shape or type, or a list.

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
        """The names, ascending; also of a nominal state.

        >>> state.parameters.keys()
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        return self._native.parameter_names()

    def values(self) -> list[Parameter]:
        """The parameters, in the order of their names.

        >>> sum(parameter.data.size for parameter in state.parameters.values())
        7210
        """
        return [parameter for _, parameter in self]

    def items(self) -> list[tuple[str, Parameter]]:
        """Names and parameters: what iteration yields.

        >>> {name: parameter.shape for name, parameter in state.parameters.items()}["fc1.weight"]
        (96, 64)
        """
        return list(self)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._native.parameter_names())})"


class Properties:
    """Values that travel with the checkpoint: ``int``, ``float`` and ``str`` by name.

    A float is kept as float32, as the file format has it.

    Args:
        state: the state, whose :attr:`CheckpointState.properties` these are.

    Raises:
        TypeError: for a ``state`` that is none.

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
            TypeError: for what is no number and no text.
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
        """The names, ascending.

        >>> state.properties["epoch"] = 3
        >>> state.properties.keys()
        ['epoch']
        """
        return self._native.property_names()

    def values(self) -> list[int | float | str]:
        """The values, in the order of the names.

        >>> state.properties["epoch"] = 3
        >>> state.properties.values()
        [3]
        """
        return [value for _, value in self]

    def items(self) -> list[tuple[str, int | float | str]]:
        """Names and values: what iteration yields.

        >>> state.properties["epoch"] = 3
        >>> state.properties.items()
        [('epoch', 3)]
        """
        return list(self)

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in self)})"


def _native_of(state: object) -> _ortrain.CheckpointState:
    """The native state, of the object that users have or as it is."""
    native = state._native if isinstance(state, CheckpointState) else state
    if not isinstance(native, _ortrain.CheckpointState):
        raise TypeError(f"state is a CheckpointState, not {type(state).__name__}")
    return native


def _not_found(kind: str, name: object, names: list[str]) -> str:
    """What onnxruntime-training says, and the name that may have been meant."""
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
    raise TypeError(f"a property is an int, a float or a str, not {type(value).__name__}")


@dataclass(frozen=True)
class TensorLayout:
    """Where one parameter lies in its plane.

    >>> state.layout().trainable[0].tensors[0]
    TensorLayout(name='fc1.bias', shape=(96,), offset=0)
    """

    name: str
    """The name of the parameter."""
    shape: tuple[int, ...]
    """Its shape."""
    offset: int
    """The first of its elements, counted in elements of the plane."""


@dataclass(frozen=True)
class PlaneLayout:
    """What lies in one plane. What lies between tensors is zero and has to stay so.

    >>> plane = state.layout().trainable[0]
    >>> plane.dtype, plane.size, [tensor.offset for tensor in plane.tensors]
    ('float32', 7296, [0, 128, 6272, 6336])
    """

    dtype: str
    """The element type of the plane."""
    size: int
    """The number of elements, what lies between tensors included."""
    tensors: tuple[TensorLayout, ...]
    """The parameters, sorted by name."""


@dataclass(frozen=True)
class StateLayout:
    """What lies where in a state: a plane for each element type. Gradients lie as the trainable parameters do.

    >>> layout = state.layout()
    >>> len(layout.trainable), len(layout.frozen)
    (1, 0)
    """

    trainable: tuple[PlaneLayout, ...]
    """Of the parameters that are trained."""
    frozen: tuple[PlaneLayout, ...]
    """Of those that are not."""


class CheckpointState:
    """Everything that training changes; made by :meth:`load_checkpoint`.

    A copy (``copy.deepcopy``, ``copy.copy``) and what comes out of a pickle are states of their own that have all of
    it: values, moments, steps, the learning rate, the scheduler, properties and the seed, bit for bit, by way of the
    bytes of a checkpoint. Gradients belong to modules and do not go along.

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
                f"CheckpointState is made by CheckpointState.load_checkpoint(path), not from {type(state).__name__}"
            )
        self._native = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)
        self._seeded = 0
        self._take_seed()

    def _take_seed(self) -> None:
        """Take the seed that ``onnxruntime.set_seed`` set since the last time, where :mod:`ortrain.compat` is used."""
        self._seeded = _seeds.apply(self._native, self._seeded)

    def __reduce__(self) -> Any:
        return _from_pickle, (self._native.to_bytes(True), self._native.seed(), self._seeded)

    def __repr__(self) -> str:
        try:
            return f"CheckpointState({self._described()})"
        except OrtrainError as error:
            # What is shown in the middle of something else, by a debugger say, raises nothing.
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

        ``checkpoint_uri`` is a path, or the bytes of a checkpoint file, as :meth:`to_bytes` gives them. What another
        process saves to the path meanwhile is read whole or not at all.

        Raises:
            NoSuchFileError: if the file, or its ``.data`` file, is not there.
            OrtrainError: if it is no checkpoint, or a damaged one; for bytes of a checkpoint whose tensors lie in a
                ``.data`` file, which bytes cannot point to.

        >>> state = CheckpointState.load_checkpoint("checkpoint")
        >>> with open("checkpoint", "rb") as file:
        ...     same = CheckpointState.load_checkpoint(file.read())
        >>> len(state.parameters), len(same.parameters)
        (4, 4)

        """
        if isinstance(checkpoint_uri, (bytes, bytearray, memoryview)):
            return cls(_ortrain.CheckpointState.from_bytes(bytes(checkpoint_uri)))
        if not isinstance(checkpoint_uri, (str, os.PathLike)):
            raise TypeError(f"a checkpoint is a path or bytes, not {type(checkpoint_uri).__name__}")
        return cls(_ortrain.CheckpointState.load(os.fspath(checkpoint_uri)))

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: PathLike, include_optimizer_state: bool = False
    ) -> None:
        """Write a checkpoint, replacing the file only when the new one is complete and on disk.

        Args:
            state: what is written.
            checkpoint_uri: the file.
            include_optimizer_state: whether the moments, the step, the learning rate and the scheduler go along, so
                that a loaded run goes on with the same bits.

        Raises:
            NoSuchFileError, OrtrainError: if the file cannot be written.

        >>> state.properties["epoch"] = 7
        >>> CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
        >>> CheckpointState.load_checkpoint("trained").properties["epoch"]
        7

        """
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a CheckpointState, not {type(state).__name__}")
        state._native.save(os.fspath(checkpoint_uri), include_optimizer_state)

    def averaged(self) -> CheckpointState:
        """A state with the averages of the weights (:attr:`Parameter.average`) in their place, without optimizer.

        A module on it evaluates the averages.

        Raises:
            OrtrainError: if the optimizer keeps no averages.

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
        """The bytes of the file that :meth:`save_checkpoint` writes, to send or to keep elsewhere.

        Raises:
            OrtrainError: if they are more than the 2 GiB that a checkpoint without a ``.data`` file can have.

        >>> received = CheckpointState.load_checkpoint(state.to_bytes())
        >>> np.array_equal(received.parameters["fc1.bias"].data, state.parameters["fc1.bias"].data)
        True

        """
        return self._native.to_bytes(include_optimizer_state)

    def load_parameters(self, checkpoint_uri: PathLike, strict: bool = True) -> LoadReport:
        """Take the values of the parameters from another checkpoint; optimizer state and properties stay.

        Args:
            checkpoint_uri: a checkpoint file with values.
            strict: whether the file must have all parameters and no others. Otherwise what fits is taken.

        Returns:
            which parameters were loaded, which the file lacks, and what else it has.

        Whether a parameter is trained says the state, not the file. Floats may become wider (float16 and bfloat16 to
        float32 or float64, float32 to float64), which is exact.

        A nominal state becomes a full one. It takes all of its parameters at once, strict or not. Their shapes are
        those of the training model if a :class:`~ortrain.api.Module` was made on the state, otherwise those of the
        file.

        Raises:
            InvalidArgumentError: for a tensor of another shape or a type that does not fit, and for missing names if
                strict or if the state is nominal, for unexpected names if strict. Nothing has changed then.
            NoSuchFileError, OrtrainError: if the file is not there or is damaged.

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
        return LoadReport(*self._native.load_parameters(os.fspath(checkpoint_uri), strict))

    def load_safetensors(
        self, path: PathLike, names: Mapping[str, str] | None = None, strict: bool = True
    ) -> LoadReport:
        """Take the values of the parameters from a safetensors file.

        Args:
            path: the file.
            names: what a parameter is called in the file, where it is called otherwise.
            strict: as in :meth:`load_parameters`, and so are results and errors.

        >>> names = {"fc2.weight": "model.classifier.weight", "fc2.bias": "model.classifier.bias"}
        >>> state.save_safetensors("model.safetensors", names)
        >>> report = state.load_safetensors("model.safetensors", names)
        >>> report.loaded
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']

        """
        return LoadReport(*self._native.load_safetensors(os.fspath(path), dict(names or {}), strict))

    def save_safetensors(self, path: PathLike, names: Mapping[str, str] | None = None) -> None:
        """Write all parameters, frozen ones too, as a safetensors file.

        Args:
            path: the file; one that is there is replaced when the new one is complete and on disk.
            names: what a parameter is to be called there, where it is to be called otherwise.

        Raises:
            InvalidArgumentError: for a name that is no parameter, or one that two would have.
            OrtrainError: if the state is nominal, or the file cannot be written.

        >>> state.save_safetensors("model.safetensors")
        >>> len(state.load_safetensors("model.safetensors").loaded)
        4

        """
        self._native.save_safetensors(os.fspath(path), dict(names or {}))

    def layout(self) -> StateLayout:
        """Where each parameter lies in the planes. It depends on names, shapes and types alone.

        Raises:
            OrtrainError: if the state is nominal and no module has said the shapes yet.

        >>> (plane,) = state.layout().trainable
        >>> plane.dtype, [(tensor.name, tensor.shape) for tensor in plane.tensors][:2]
        ('float32', [('fc1.bias', (96,)), ('fc1.weight', (96, 64))])

        """
        trainable, frozen = (
            tuple(
                PlaneLayout(dtype, size, tuple(TensorLayout(name, tuple(shape), at) for name, shape, at in tensors))
                for dtype, size, tensors in planes
            )
            for planes in self._native.layout()
        )
        return StateLayout(trainable, frozen)

    @property
    def device(self) -> str:
        """Where the state lies: ``"cpu"``, the memory of this process, or a device of :func:`ortrain.devices`.

        The first module that is made for a device moves the state there.

        >>> state.device
        'cpu'
        """
        return self._native.device()

    def to(self, device: str) -> CheckpointState:
        """Move parameters and the values of the optimizer to a device, all or nothing.

        Views and planes that were taken before keep what they hold, and are no part of the state any more. A module of
        the device before says so in each call until the state is moved back.

        Args:
            device: as :class:`~ortrain.api.Module` takes it. ``"reference"`` lies in the memory of this process.

        Returns:
            The state itself.

        Raises:
            DeviceUnavailableError: if the device is not here.
            InvalidArgumentError: if no device has such a name.
            MemoryLimitError: if the device has too little memory. The state stays where it is.

        >>> state.to("cpu").device
        'cpu'

        """
        self._native.to(device)
        return self

    def trainable_planes(self) -> list[Any]:
        """Live views of the memory that all trainable parameters lie in: a vector for each element type.

        In the order of ``layout().trainable``. NumPy arrays speak DLPack, so another library takes them as they are.
        What lies between tensors is zero and has to stay so. On a device each is a :class:`~ortrain.DeviceArray`.

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
        """The same for frozen parameters, in the order of ``layout().frozen``: read-only.

        Raises:
            OrtrainError: if the state is nominal.

        >>> state.frozen_planes()
        []

        """
        return self._native.planes(False)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name.

        >>> state.parameters["fc1.weight"].data.shape
        (96, 64)
        """
        return self._parameters

    @property
    def seed(self) -> int:
        """The seed of random numbers, of Dropout's masks above all: an integer of 64 bits; 0 unless it was set.

        With the count of training steps on the state it determines all random numbers: the same seed at the same step
        gives the same masks, on every machine and with any number of threads. Nodes with a ``seed`` of their own and
        steps of eval models do not look at it. It is saved with every checkpoint, with and without optimizer state.
        Weights are not drawn here: they are those of the model.

        Raises:
            TypeError: when it is set to what is no integer.
            OutOfRangeError: when it is set to an integer outside int64.

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
            raise TypeError(f"a seed is an integer, not {seed!r}")
        number = operator.index(seed)
        if not -(1 << 63) <= number < 1 << 63:
            raise OutOfRangeError(f"a seed is an integer of 64 bits, from -2**63 to 2**63 - 1, not {number}")
        self._native.set_seed(number)

    @property
    def properties(self) -> Properties:
        """The properties by name.

        >>> state.properties["epoch"] = 3
        >>> state.properties["epoch"]
        3
        """
        return self._properties


def _from_pickle(content: bytes, seed: int, seeded: int) -> CheckpointState:
    """The state that was pickled or copied."""
    state = CheckpointState(_ortrain.CheckpointState.from_bytes(content))
    # The copy is as its original, whatever seed a script for onnxruntime has set.
    if state.seed != seed:
        state._native.set_seed(seed)
    state._seeded = max(state._seeded, seeded)
    return state
