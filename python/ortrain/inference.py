"""Running a model.

>>> import ortrain
>>> from ortrain.inference import InferenceSession
>>> session = InferenceSession(ortrain.examples.perceptron())
>>> (logits,) = session.run(["logits"], {"x": x})
>>> logits.argmax(axis=1).shape
(8,)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from ortrain import _ortrain
from ortrain._inputs import input_value, native_value
from ortrain._near import hint
from ortrain._operators import OperatorLibrary, with_operators
from ortrain._sources import ModelLike, model_source
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["InferenceSession", "ModelMetadata", "NodeArg", "RunOptions", "SessionOptions"]

_PROVIDERS = {"CPUExecutionProvider": "cpu", "cpu": "cpu", "reference": "reference"}


class SessionOptions:
    """How a session runs. An option that ortrain does not have cannot be set: no option is ignored in silence.

    A value that an option cannot have is refused when it is set, not when a session is made.

    >>> import ortrain
    >>> options = ortrain.SessionOptions()
    >>> options.intra_op_num_threads = 2
    >>> options.memory_limit = 256 << 20
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    >>> options.graph_optimization_level = 99
    Traceback (most recent call last):
    AttributeError: 'SessionOptions' object has no attribute 'graph_optimization_level'
    >>> options.memory_limit = "1GB"
    Traceback (most recent call last):
    TypeError: memory_limit is a number of bytes or None, not '1GB'; 1GB is 1_000_000_000
    """

    __slots__ = (
        "bf16_fallback",
        "detect_anomaly",
        "intra_op_num_threads",
        "iteration_limit",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "memory_limit",
        "precision",
    )

    log_severity_level: int
    """Kept for scripts that set it, -1 at first: ortrain logs nothing, so every level is obeyed."""

    log_verbosity_level: int
    """Likewise, 0 at first."""

    logid: str
    """Likewise, empty at first."""

    intra_op_num_threads: int
    """Threads that runs may take; 0 leaves the number as it is, at first one per core.

    The process has one pool: the number set last holds for all. Results are the same bits for every number.
    """

    iteration_limit: int | None
    """Most iterations of a Loop or Scan; ``None``, the default, stands for 1 000 000.

    A loop that still runs then is stopped by an error that names it: most likely it is endless.
    """

    memory_limit: int | None
    """Most bytes that a run may take; ``None``, the default, is no limit.

    For a :class:`~ortrain.api.Module` these are the parameters (frozen ones too), their gradients, the constants of
    the program, the arena of its values and the scratch of its kernels; for an :class:`InferenceSession` the last
    three. All of it is known before a run: what would take more raises
    :class:`~ortrain.errors.MemoryLimitError`, with the largest buffers in its text, before anything is allocated.
    Optimizer moments and the caller's arrays do not count.
    """

    precision: str
    """How exactly inner products are computed: ``"f32"``, the default, ``"bf16x6"``, ``"bf16x3"`` or ``"bf16"``.

    Of matrix products and convolutions of float32 alone, whose factors become bfloat16 (``"bf16"``) or sums of two
    (``"bf16x3"``: three products) or three of them (``"bf16x6"``: six products). Sums and everything else stay float32,
    and so do inputs, outputs, parameters and gradients. Needs AMX, or what :attr:`bf16_fallback` allows; without, there
    is an :class:`~ortrain.errors.UnsupportedError` that says what the machine has. How exact each one is:
    ``docs/performance.md``.
    """

    detect_anomaly: bool
    """Whether a step of a training fails where it makes NaN or infinities; ``False`` at first, which costs nothing.

    After each training step the loss, the gradients and the running statistics are looked at, and the other results
    for NaN; after an evaluation step its results. If one is not finite the state is put back as it was, the step is run
    again so that every value can be seen, and :class:`~ortrain.errors.AnomalyError` names the node, the tensor and the
    index that came first, in the forward or in the backward pass. A step copies the gradients for that, and the frozen
    parameters; the run that looks for the place may take more than :attr:`memory_limit`.
    """

    bf16_fallback: str
    """What may multiply bfloat16 where there is no AMX: ``"none"``, the default, ``"avx512_bf16"`` or ``"emulated"``.

    With ``"avx512_bf16"`` those instructions may; with ``"emulated"`` whatever the machine has, float32 arithmetic on
    rounded factors at the last, which is slower than ``"f32"``. Nothing is used without being allowed here;
    :attr:`Module.bf16_unit <ortrain.api.Module.bf16_unit>` says what is.
    """

    def __init__(self) -> None:
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.intra_op_num_threads = 0
        self.iteration_limit = None
        self.memory_limit = None
        self.precision = "f32"
        self.bf16_fallback = "none"
        self.detect_anomaly = False

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SessionOptions.__slots__:
            raise _no_option(self, name, SessionOptions.__slots__)
        super().__setattr__(name, _checked(name, value))

    def __repr__(self) -> str:
        return _repr_of_options(self, SessionOptions.__slots__)


# What an option that is a number counts, and whether None is one of its values.
_COUNTED = {
    "intra_op_num_threads": ("threads", False),
    "iteration_limit": ("iterations", True),
    "memory_limit": ("bytes", True),
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _name(option: str, value: object) -> str:
    if not isinstance(value, str):
        first = "f32" if option == "precision" else "none"
        raise TypeError(f"{option} is a name, a str such as {first!r}, not {value!r}")
    return value


def _checked(name: str, value: object) -> object:
    """The value of an option, if it is of the kind that the option has."""
    if name in ("precision", "bf16_fallback"):
        return _name(name, value)
    if name == "detect_anomaly":
        if not isinstance(value, bool):
            raise TypeError(f"detect_anomaly is True or False, not {value!r}")
        return value
    if name not in _COUNTED:
        return value
    unit, optional = _COUNTED[name]
    if (value is None and optional) or (hasattr(value, "__index__") and not isinstance(value, bool)):
        return value if value is None else operator.index(value)
    kinds = f"a number of {unit}" + (" or None" if optional else "")
    meant = _number_in(value, bytes_too=name == "memory_limit")
    raise TypeError(f"{name} is {kinds}, not {value!r}" + ("" if meant is None else f"; {value} is {meant:_}"))


def _number_in(value: object, *, bytes_too: bool) -> int | None:
    """The whole number that a text such as ``"1.5 GiB"``, or a float, stands for."""
    text = repr(value) if isinstance(value, float) else value
    if not isinstance(text, str):
        return None
    digits = text.strip().lower().rstrip("abcdfghijklmnopqrstuvwxyz").rstrip()
    unit = text.strip().lower()[len(digits) :].strip().removesuffix("bytes").removesuffix("b")
    if unit not in _UNITS or (unit and not bytes_too):
        return None
    try:
        number = float(digits) * _UNITS[unit]
    except ValueError:
        return None
    return int(number) if number.is_integer() and number >= 0 else None


def _no_option(options: object, name: str, names: Sequence[str]) -> AttributeError:
    """The error that Python has for it, and the option that may have been meant."""
    return AttributeError(f"{type(options).__name__!r} object has no attribute {name!r}{hint(name, names)}")


def _repr_of_options(options: object, names: Sequence[str]) -> str:
    return f"{type(options).__name__}({', '.join(f'{name}={getattr(options, name)!r}' for name in names)})"


class RunOptions:
    """How one run goes. An option that ortrain does not have cannot be set: no option is ignored in silence.

    Taken by :meth:`InferenceSession.run` and by the steps of a :class:`~ortrain.session.TrainingSession`.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> options = ortrain.RunOptions()
    >>> options.log_severity_level = 3
    >>> (logits,) = session.run(None, {"x": x}, options)
    >>> options.terminate = True
    >>> session.run(None, {"x": x}, options)
    Traceback (most recent call last):
    ortrain.errors.OrtrainError: the run was not begun: terminate is set in its run options
    """

    __slots__ = ("log_severity_level", "log_verbosity_level", "logid", "only_execute_path_to_fetches", "terminate")

    log_severity_level: int
    """Kept for scripts that set it, -1 at first: ortrain logs nothing, so every level is obeyed."""

    log_verbosity_level: int
    """Likewise, 0 at first."""

    logid: str
    """Likewise, empty at first."""

    terminate: bool
    """Whether a run that begins with these options is refused with an :class:`~ortrain.errors.OrtrainError`.

    ``False`` at first. A run that has begun goes on to its end.
    """

    only_execute_path_to_fetches: bool
    """Whether a run computes nothing but what the outputs asked for need; ``False`` at first.

    Otherwise a run of an :class:`InferenceSession` computes every output. Steps of a training return all outputs.
    """

    def __init__(self) -> None:
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.terminate = False
        self.only_execute_path_to_fetches = False

    def __setattr__(self, name: str, value: object) -> None:
        if name not in RunOptions.__slots__:
            raise _no_option(self, name, RunOptions.__slots__)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return _repr_of_options(self, RunOptions.__slots__)


def _of_onnxruntime(options: object) -> bool:
    return type(options).__module__.partition(".")[0] == "onnxruntime"


def check_begin(options: RunOptions | None) -> None:
    """Refuse a run whose options say so. Of onnxruntime's, terminate; all else there is about how onnxruntime works.

    Raises:
        OrtrainError: if terminate is set.

    """
    if options is None:
        return
    if not (isinstance(options, RunOptions) or (_of_onnxruntime(options) and hasattr(options, "terminate"))):
        raise TypeError(f"run options are an ortrain.RunOptions, not {type(options).__module__} ones")
    if options.terminate:
        raise OrtrainError("the run was not begun: terminate is set in its run options")


class NativeOptions(TypedDict):
    """Session options as the core takes them."""

    num_threads: int
    memory_limit: int | None
    iteration_limit: int | None
    precision: str
    bf16_fallback: str


class NativeTrainingOptions(NativeOptions):
    """Those of a module."""

    detect_anomaly: bool


def training_options(
    options: SessionOptions | None, precision: str | None = None, bf16_fallback: str | None = None
) -> NativeTrainingOptions:
    """As :func:`native_options`, with what only a training has."""
    detect = isinstance(options, SessionOptions) and options.detect_anomaly
    return NativeTrainingOptions(**native_options(options, precision, bf16_fallback), detect_anomaly=detect)


def native_options(
    options: SessionOptions | None, precision: str | None = None, bf16_fallback: str | None = None
) -> NativeOptions:
    """What the options say, or what is given in their place.

    Of onnxruntime's the number of threads; all else there is about how onnxruntime works.
    """
    if options is None:
        options = SessionOptions()
    elif _of_onnxruntime(options):
        threads, options = options.intra_op_num_threads, SessionOptions()
        options.intra_op_num_threads = threads
    if not isinstance(options, SessionOptions):
        raise TypeError(f"session options are an ortrain.SessionOptions, not {type(options).__module__} ones")
    if options.memory_limit is not None and options.memory_limit < 0:
        raise InvalidArgumentError(f"memory_limit is a number of bytes, not {options.memory_limit}")
    if options.iteration_limit is not None and options.iteration_limit < 0:
        raise InvalidArgumentError(f"iteration_limit is a number of iterations, not {options.iteration_limit}")
    return NativeOptions(
        num_threads=options.intra_op_num_threads,
        memory_limit=options.memory_limit,
        iteration_limit=options.iteration_limit,
        precision=options.precision if precision is None else _name("precision", precision),
        bf16_fallback=options.bf16_fallback if bf16_fallback is None else _name("bf16_fallback", bf16_fallback),
    )


class NodeArg:
    """The name, type and shape of an input or output.

    >>> import ortrain
    >>> (x,) = ortrain.InferenceSession(ortrain.examples.perceptron()).get_inputs()
    >>> x.name, x.type, x.shape
    ('x', 'tensor(float)', ['batch', 64])
    """

    __slots__ = ("name", "shape", "type")

    name: str
    """The name."""
    type: str
    """The type as onnxruntime spells it: ``tensor(float)``."""
    shape: list[int | str | None]
    """A number, a name, or ``None`` per axis."""

    def __init__(self, name: str, type: str, shape: list[int | str | None]) -> None:  # noqa: A002
        self.name = name
        self.type = type
        self.shape = shape

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


@dataclass(frozen=True)
class ModelMetadata:
    """What a model says about itself.

    >>> import ortrain
    >>> meta = ortrain.InferenceSession(ortrain.examples.perceptron()).get_modelmeta()
    >>> meta.graph_name, meta.version
    ('perceptron', 0)
    """

    producer_name: str
    """What made it."""
    graph_name: str
    """The name of its graph."""
    domain: str
    """The domain it belongs to, as a reversed host name."""
    description: str
    """A text about the model."""
    graph_description: str
    """A text about its graph."""
    version: int
    """The version of the model; 0 where it says none."""
    custom_metadata_map: dict[str, str]
    """Further entries, by key."""


class InferenceSession:
    """A model that runs; the part of ``onnxruntime.InferenceSession`` that scripts use.

    Args:
        path_or_bytes: a path, the bytes of a model, or an ``onnx.ModelProto``. Initializers are constants.
        sess_options: threads, bytes, precision.
        providers: where it runs: ``["CPUExecutionProvider"]`` (the default) or ``["reference"]``. One that is not there
            is an error, never a silent fallback.
        operators: operators of one's own.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or run, there is no such
            provider, or the machine has nothing that computes the precision and may be used.
        InvalidArgumentError: if there is no such precision.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> (logits,) = session.run(None, {"x": x})
    >>> logits.shape, logits.dtype
    ((8, 10), dtype('float32'))

    """

    def __init__(
        self,
        path_or_bytes: ModelLike,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str] | None = None,
        *,
        operators: OperatorLibrary | None = None,
    ) -> None:
        if isinstance(providers, str):
            raise TypeError("providers is a list of names, not one name")
        wanted = list(providers) if providers else ["CPUExecutionProvider"]
        for provider in wanted:
            if provider not in _PROVIDERS:
                raise UnsupportedError(
                    f"there is no provider {provider!r} here; there are {', '.join(sorted(_PROVIDERS))}"
                )
        if isinstance(sess_options, SessionOptions) and sess_options.detect_anomaly:
            raise UnsupportedError("detect_anomaly is for trainings: a Module or a TrainingSession takes it")
        self._device = _PROVIDERS[wanted[0]]
        self._native = _ortrain.InferenceSession(
            with_operators(model_source(path_or_bytes), operators),
            device=self._device,
            **native_options(sess_options),
        )

    def __repr__(self) -> str:
        def listed(values: list[NodeArg]) -> str:
            return ", ".join(f"{value.name}: {value.type} {value.shape}" for value in values)

        try:
            inputs, outputs = listed(self.get_inputs()), listed(self.get_outputs())
        except OrtrainError as error:
            return f"InferenceSession(device={self._device!r}, cannot be read now: {error})"
        return f"InferenceSession(inputs=[{inputs}], outputs=[{outputs}], device={self._device!r})"

    @property
    def precision(self) -> str:
        """How exactly inner products are computed: :attr:`SessionOptions.precision`.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).precision
        'f32'
        """
        return self._native.precision()[0]

    @property
    def bf16_unit(self) -> str | None:
        """What multiplies bfloat16: ``"amx"``, ``"avx512_bf16"`` or ``"emulated"``.

        ``None`` at the precision ``"f32"``, and on the reference.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.precision, options.bf16_fallback = "bf16", "emulated"
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.bf16_unit in ("amx", "avx512_bf16", "emulated")
        True
        """
        return self._native.precision()[1]

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that :meth:`run` takes.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_inputs()
        [NodeArg(name='x', type='tensor(float)', shape=['batch', 64])]
        """
        return [NodeArg(*description) for description in self._native.inputs()]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs that :meth:`run` returns.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_outputs()
        [NodeArg(name='logits', type='tensor(float)', shape=['batch', 10])]
        """
        return [NodeArg(*description) for description in self._native.outputs()]

    def get_modelmeta(self) -> ModelMetadata:
        """What the model says about itself.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_modelmeta().graph_name
        'perceptron'
        """
        (producer, graph, domain, description, graph_description), version, custom = self._native.meta()
        return ModelMetadata(producer, graph, domain, description, graph_description, version, custom)

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, npt.ArrayLike | OrtValue | Sequence[npt.ArrayLike | OrtValue]],
        run_options: RunOptions | None = None,
    ) -> list[npt.NDArray[Any]]:
        """The named outputs (all, in the model's order, for ``None``) for the named inputs.

        Outputs are ndarrays. Where the model takes or returns a sequence of tensors, it is a list of them. Nothing that
        is given changes, also where the model changes sequences in place.

        Raises:
            InvalidArgumentError: for inputs that do not fit, and names that are not there.
            OrtrainError: if ``terminate`` is set in the run options.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> (logits,) = session.run(["logits"], {"x": x})
        >>> logits.shape
        (8, 10)
        >>> session.run(["hidden"], {"x": x})
        Traceback (most recent call last):
        ortrain.errors.InvalidArgumentError: the model has no output 'hidden'; it has logits

        """
        check_begin(run_options)
        if isinstance(output_names, str):
            raise TypeError("output_names is a list of names, not one name")
        outputs = [description[0] for description in self._native.outputs()]
        wanted = outputs if not output_names else list(output_names)
        for name in wanted:
            if name not in outputs:
                near = hint(name, outputs)
                raise InvalidArgumentError(f"the model has no output {name!r}; it has {', '.join(outputs)}{near}")
        inputs = self._native.inputs()
        described = {description[0]: description for description in inputs}
        sequences = {name for name, kind, _ in inputs if kind.startswith("seq(")}
        _check_names(input_feed, [name for name, *_ in inputs])
        feeds: dict[str, _ortrain.OrtValue | list[_ortrain.OrtValue]] = {}
        for name, value in input_feed.items():
            if name in sequences and isinstance(value, list | tuple):
                feeds[name] = [native_value(tensor) for tensor in value]
            else:
                feeds[name] = input_value(value, described[name]) if name in described else native_value(value)
        # onnxruntime's own options say the same by the same name.
        if run_options is not None and run_options.only_execute_path_to_fetches:
            return [_arrays(value) for value in self._native.run(feeds, [outputs.index(name) for name in wanted])]
        results = dict(zip(outputs, self._native.run(feeds, None), strict=True))
        return [_arrays(results[name]) for name in wanted]


def _check_names(feed: Mapping[str, object], inputs: Sequence[str]) -> None:
    """Say which name of an input may have been meant by one that no input has."""
    missing = [name for name in inputs if name not in feed]
    for given in feed:
        if given in inputs:
            continue
        near = hint(given, missing)
        if near:
            there = ", ".join(inputs)
            raise InvalidArgumentError(f'the model has no input "{given}"; it has {there}{near}')


def _arrays(value: _ortrain.OrtValue | list[_ortrain.OrtValue]) -> Any:
    """An output as ndarrays."""
    return [tensor.array() for tensor in value] if isinstance(value, list) else value.array()
