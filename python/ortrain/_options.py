"""Options of sessions and runs."""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ortrain import _ortrain
from ortrain._inputs import is_ortvalue, native_value
from ortrain._model_source import existing_library
from ortrain._operators import Source, WithOperators
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError

if TYPE_CHECKING:
    from ortrain.ortvalue import OrtValue

__all__ = ["ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "RunOptions", "SessionOptions"]


class GraphOptimizationLevel(enum.IntEnum):
    """Values of :attr:`SessionOptions.graph_optimization_level`, as in onnxruntime.

    >>> from ortrain import GraphOptimizationLevel
    >>> int(GraphOptimizationLevel.ORT_ENABLE_ALL)
    99
    """

    ORT_DISABLE_ALL = 0
    """No optimization."""
    ORT_ENABLE_BASIC = 1
    """Optimizations without fused kernels."""
    ORT_ENABLE_EXTENDED = 2
    """Fused kernels as well."""
    ORT_ENABLE_ALL = 99
    """Changes of layout as well."""


class ExecutionMode(enum.IntEnum):
    """Values of :attr:`SessionOptions.execution_mode`, as in onnxruntime.

    >>> from ortrain import ExecutionMode
    >>> ExecutionMode.ORT_SEQUENTIAL.name
    'ORT_SEQUENTIAL'
    """

    ORT_SEQUENTIAL = 0
    """One node after the other."""
    ORT_PARALLEL = 1
    """Several nodes at once."""


class ExecutionOrder(enum.IntEnum):
    """Values of :attr:`SessionOptions.execution_order`, as in onnxruntime.

    >>> from ortrain import ExecutionOrder
    >>> ExecutionOrder.DEFAULT.name
    'DEFAULT'
    """

    DEFAULT = 0
    """Order of the model."""
    PRIORITY_BASED = 1
    """Order by the priorities of nodes."""
    MEMORY_EFFICIENT = 2
    """Order with the fewest live values."""


class SessionOptions:
    """Options of a session. Setting an unknown name is an error that suggests a similar option.

    An invalid value is an error when it is set, not when a session is made. Some options only concern the internals of
    onnxruntime: ortrain stores their values without an effect. The documentation of each such option says so.

    >>> import ortrain
    >>> options = ortrain.SessionOptions()
    >>> options.intra_op_num_threads = 2
    >>> options.memory_limit = 256 << 20
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    >>> options.intra_op_threads = 2
    Traceback (most recent call last):
    AttributeError: 'SessionOptions' object has no attribute 'intra_op_threads'; did you mean 'intra_op_num_threads'?
    >>> options.memory_limit = "1GB"
    Traceback (most recent call last):
    TypeError: memory_limit must be a number of bytes or None, got '1GB'; 1GB is 1_000_000_000
    """

    __slots__ = (
        "_config",
        "_denoted",
        "_initializers",
        "_sizes",
        "bf16_fallback",
        "detect_anomaly",
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "enable_profiling",
        "execution_mode",
        "execution_order",
        "graph_optimization_level",
        "inter_op_num_threads",
        "intra_op_num_threads",
        "iteration_limit",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "memory_limit",
        "optimized_model_filepath",
        "precision",
        "profile_file_prefix",
        "use_deterministic_compute",
    )

    enable_cpu_mem_arena: bool
    """Stored without an effect, ``True`` by default: a session always has one arena for the values of a run."""

    enable_mem_pattern: bool
    """Stored without an effect, ``True`` by default: offsets in the arena are always planned before a run."""

    enable_mem_reuse: bool
    """Stored without an effect, ``True`` by default: the memory of dead values is always reused."""

    enable_profiling: bool
    """True to record every call of the runs of an :class:`InferenceSession`; ``False`` by default.

    :meth:`InferenceSession.end_profiling` writes the record to a file for ``chrome://tracing`` and Perfetto. It has the
    first million calls. A :class:`~ortrain.api.Module` has :meth:`~ortrain.api.Module.profile` instead.
    """

    execution_mode: ExecutionMode
    """Stored without an effect, ``ORT_SEQUENTIAL`` by default: instructions run in sequence, each on all threads."""

    execution_order: ExecutionOrder
    """Stored without an effect, ``DEFAULT`` by default: the order is the model's, or one that takes less memory."""

    graph_optimization_level: GraphOptimizationLevel
    """Stored without an effect, ``ORT_ENABLE_ALL`` by default: optimizations that change no result are always done."""

    inter_op_num_threads: int
    """Stored without an effect, 0 by default: there is one thread pool, :attr:`intra_op_num_threads`."""

    optimized_model_filepath: str
    """File to which an :class:`InferenceSession` writes its model when it is made; empty, the default, for no file.

    It is the model as the session runs it before sizes are known: functions are inlined, and values have their inferred
    types. It is plain ONNX, because fused kernels are chosen later.

    An ``ortrain.classic.TrainingSession`` writes the model with its gradients and the updates of its weights
    there, as :attr:`~ortrain.classic.TrainingParameters.model_with_training_graph_path` does.
    """

    profile_file_prefix: str
    """First part of the name of a profile, ``"onnxruntime_profile_"`` by default: see :attr:`enable_profiling`.

    It is followed by ``_``, the time at which the session was made, and ``.json``.
    """

    use_deterministic_compute: bool
    """Stored without an effect, ``False`` by default: results always have the same bits, for any number of threads."""

    log_severity_level: int
    """Stored without an effect, -1 by default: ortrain logs nothing."""

    log_verbosity_level: int
    """Stored without an effect, 0 by default: ortrain logs nothing."""

    logid: str
    """Stored without an effect, empty by default: ortrain logs nothing."""

    intra_op_num_threads: int
    """Number of threads of a run; 0 keeps the current number, initially one per core.

    The process has one pool: the last number that was set applies to all runs. Results have the same bits for any
    number.
    """

    iteration_limit: int | None
    """Maximum number of iterations of a Loop or Scan; ``None``, the default, means 1 000 000.

    A loop that reaches it is stopped by an error that names the loop, because it is probably endless.
    """

    memory_limit: int | None
    """Maximum number of bytes of a run; ``None``, the default, sets no limit.

    For a :class:`~ortrain.api.Module` the limit covers the parameters (also frozen ones), their gradients, the
    constants of the program, the arena of its values and the scratch memory of its kernels. For an
    :class:`InferenceSession` it covers the last three. The bytes are known before a run: a run above the limit raises
    :class:`~ortrain.errors.MemoryLimitError`, which names the largest buffers, before anything is allocated.
    Optimizer moments and the caller's arrays do not count.
    """

    precision: str
    """Precision of inner products: ``"f32"``, the default, ``"bf16x6"``, ``"bf16x3"`` or ``"bf16"``.

    It applies only to matrix products and convolutions of float32. Their factors become bfloat16 (``"bf16"``), or sums
    of two (``"bf16x3"``: three products) or three bfloat16 numbers (``"bf16x6"``: six products). Sums and all other
    operations stay float32, and so do inputs, outputs, parameters and gradients. The precision needs AMX, or a unit
    that :attr:`bf16_fallback` permits. Otherwise an :class:`~ortrain.errors.UnsupportedError` names the units of the
    machine. ``docs/performance.md`` gives the accuracy of each precision.
    """

    detect_anomaly: bool
    """True if a training step that makes NaN or infinities is an error; ``False`` by default, which costs nothing.

    After each training step the loss, the gradients and the running statistics are checked, and the other results for
    NaN; after an evaluation step its results. If a value is not finite, the state is restored and the step runs again
    with every value visible. :class:`~ortrain.errors.AnomalyError` then names the first node, tensor and index, in the
    forward or in the backward pass. For this, a step copies the gradients and the frozen parameters; the second run may
    take more than :attr:`memory_limit`.
    """

    bf16_fallback: str
    """Unit that may multiply bfloat16 without AMX: ``"none"``, the default, ``"avx512_bf16"`` or ``"emulated"``.

    ``"avx512_bf16"`` permits these instructions. ``"emulated"`` permits every unit, finally float32 arithmetic on
    rounded factors, which is slower than ``"f32"``. No unit is used without a permission here;
    :attr:`Module.bf16_unit <ortrain.api.Module.bf16_unit>` names the unit in use.
    """

    def __init__(self) -> None:
        self.bf16_fallback = "none"
        self.detect_anomaly = False
        self.enable_cpu_mem_arena = True
        self.enable_mem_pattern = True
        self.enable_mem_reuse = True
        self.enable_profiling = False
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.execution_order = ExecutionOrder.DEFAULT
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.inter_op_num_threads = 0
        self.intra_op_num_threads = 0
        self.iteration_limit = None
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.memory_limit = None
        self.optimized_model_filepath = ""
        self.precision = "f32"
        self.profile_file_prefix = "onnxruntime_profile_"
        self.use_deterministic_compute = False
        self._config: dict[str, str]
        self._initializers: dict[str, _ortrain.OrtValue]
        self._sizes: dict[str, int]
        self._denoted: dict[str, int]
        for name in ("_config", "_initializers", "_sizes", "_denoted"):
            object.__setattr__(self, name, {})

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        # setattr accepts no private names.
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        names = _public(SessionOptions)
        if name not in names:
            raise _no_option(self, name, names)
        super().__setattr__(name, _checked(name, value))

    def __repr__(self) -> str:
        return _repr_of_options(self, _public(SessionOptions))

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Store an entry of onnxruntime's configuration. ortrain reads no entry.

        Raises:
            TypeError: if the key or the value is not a ``str``.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.add_session_config_entry("session.disable_prepacking", "1")

        """
        self._config[_text("the key of an entry", key)] = _text("the value of an entry", value)

    def get_session_config_entry(self, key: str) -> str:
        """Return the value of an entry.

        Raises:
            InvalidArgumentError: if no entry with this key was added.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.add_session_config_entry("session.disable_prepacking", "1")
        >>> options.get_session_config_entry("session.disable_prepacking")
        '1'

        """
        return _entry(self, self._config, key)

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Set the size of every axis with this name, such as the open batch axis of a model.

        Making a session raises an :class:`~ortrain.errors.InvalidArgumentError` if no input has an axis of this name.

        Raises:
            TypeError: if the name is not a ``str``, or the size is not an integer.
            InvalidArgumentError: if the size is negative.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.add_free_dimension_override_by_name("batch", 8)
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.get_inputs()[0].shape
        [8, 64]

        """
        self._sizes[_text("the name of an axis", dim_name)] = _size(dim_value)

    def add_free_dimension_override_by_denotation(self, dim_denotation: str, dim_value: int) -> None:
        """Set the size of every axis with a denotation, such as ``"DATA_BATCH"``, and of axes with the same names.

        Making a session raises an :class:`~ortrain.errors.InvalidArgumentError` if no input has an axis like this.

        Raises:
            TypeError: if the denotation is not a ``str``, or the size is not an integer.
            InvalidArgumentError: if the size is negative.

        >>> import ortrain
        >>> model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
        >>> options = ortrain.SessionOptions()
        >>> options.add_free_dimension_override_by_denotation("DATA_BATCH", 8)
        >>> ortrain.InferenceSession(model, options).get_outputs()[0].shape
        [8, 10]

        """
        self._denoted[_text("the denotation of an axis", dim_denotation)] = _size(dim_value)

    def add_initializer(self, name: str, ort_value: OrtValue) -> None:
        """Replace the value of an initializer of the model.

        The session copies the value when the session is made. It then raises an
        :class:`~ortrain.errors.InvalidArgumentError` for another type or shape, and for a name without an initializer.

        Raises:
            TypeError: if the name is not a ``str``, or the value is not an ``OrtValue``.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.add_initializer("fc2.bias", ortrain.OrtValue.ortvalue_from_numpy(np.full(10, 7, np.float32)))
        >>> options.add_initializer("fc2.weight", ortrain.OrtValue.ortvalue_from_shape_and_type([10, 96], np.float32))
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.run(None, {"x": x})[0].max()
        np.float32(7.0)

        """
        if not is_ortvalue(ort_value):
            raise TypeError(f"the value of an initializer must be an OrtValue, got {type(ort_value).__name__}")
        self._initializers[_text("the name of an initializer", name)] = native_value(ort_value)

    def add_external_initializers(self, names: Sequence[str], values: Sequence[OrtValue]) -> None:
        """Replace the values of several initializers, as :meth:`add_initializer` does.

        The old values are not read: the external files with these values need not exist.

        Raises:
            InvalidArgumentError: if the numbers of names and values differ.
            TypeError: as for :meth:`add_initializer`.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.add_external_initializers(
        ...     ["fc2.bias"], [ortrain.OrtValue.ortvalue_from_numpy(np.zeros(10, np.float32))]
        ... )

        """
        if len(names) != len(values):
            raise InvalidArgumentError(
                f"expected one value for each initializer, got {len(names)} names and {len(values)} values"
            )
        for name, value in zip(names, values, strict=True):
            self.add_initializer(name, value)

    def register_custom_ops_library(self, path: str | os.PathLike[str]) -> None:
        """Check that a shared library of operators exists. The library is not loaded.

        A model that uses its operators is an error that names them. Operators of your own belong in an
        :class:`~ortrain.OperatorLibrary`.

        Raises:
            NoSuchFileError: if the file does not exist.

        >>> import ortrain
        >>> ortrain.SessionOptions().register_custom_ops_library("nowhere.so")
        Traceback (most recent call last):
        ortrain.errors.NoSuchFileError: there is no file nowhere.so

        """
        existing_library(path)


# Unit of each numeric option, and True if None is a valid value.
_COUNTED = {
    "inter_op_num_threads": ("threads", False),
    "intra_op_num_threads": ("threads", False),
    "iteration_limit": ("iterations", True),
    "memory_limit": ("bytes", True),
}
_FLAGS = {
    "detect_anomaly",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "only_execute_path_to_fetches",
    "terminate",
    "training_mode",
    "use_deterministic_compute",
}
_LEVELS = {"log_severity_level", "log_verbosity_level"}
_TEXTS = {"logid", "optimized_model_filepath", "profile_file_prefix"}
_ENUMS: dict[str, type[enum.IntEnum]] = {
    "execution_mode": ExecutionMode,
    "execution_order": ExecutionOrder,
    "graph_optimization_level": GraphOptimizationLevel,
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _name(option: str, value: object) -> str:
    if not isinstance(value, str):
        first = "f32" if option == "precision" else "none"
        raise TypeError(f"{option} must be a str such as {first!r}, got {value!r}")
    return value


def _checked(name: str, value: object) -> object:
    """Return the value of an option; raise an error if the option has another type."""
    if name in ("precision", "bf16_fallback"):
        return _name(name, value)
    if name in _FLAGS:
        # Compared by name, which includes the booleans of NumPy.
        if type(value).__name__ not in ("bool", "bool_"):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return bool(value)
    if name in _TEXTS:
        return _text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    if name in _ENUMS:
        return _member(name, value)
    if name in _LEVELS:
        if not hasattr(value, "__index__") or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        return operator.index(value)
    unit, optional = _COUNTED[name]
    if (value is None and optional) or (hasattr(value, "__index__") and not isinstance(value, bool)):
        return value if value is None else operator.index(value)
    kinds = f"a number of {unit}" + (" or None" if optional else "")
    meant = _number_in(value, bytes_too=name == "memory_limit")
    raise TypeError(f"{name} must be {kinds}, got {value!r}" + ("" if meant is None else f"; {value} is {meant:_}"))


def _member(option: str, value: object) -> enum.IntEnum:
    """Return a member of our enumeration, from that member or onnxruntime's member of the same name."""
    kind = _ENUMS[option]
    name = getattr(value, "name", None)
    if type(value).__name__ == kind.__name__ and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise TypeError(
        f"{option} must be a member of ortrain.{kind.__name__} ({', '.join(kind.__members__)}), got {value!r}"
    )


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {value!r}")
    return value


def _size(value: object) -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise TypeError(f"the size of an axis must be an integer, got {value!r}")
    size = operator.index(value)
    if size < 0:
        raise InvalidArgumentError(f"the size of an axis must be at least 0, got {size}")
    return size


def _entry(options: object, entries: dict[str, str], key: str) -> str:
    """Return the value of a configuration entry."""
    if key not in entries:
        kind = type(options).__name__
        raise InvalidArgumentError(f"{kind} has no entry {key!r}{hint(key, entries)}")
    return entries[key]


def _public(kind: Any) -> list[str]:
    """Return the public options of a class."""
    return [name for name in kind.__slots__ if not name.startswith("_")]


def _number_in(value: object, *, bytes_too: bool) -> int | None:
    """Return the whole number in a float or a text such as ``"1.5 GiB"``; ``None`` without a number."""
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
    """Return Python's error for an unknown attribute, with a suggestion of a similar option."""
    return AttributeError(f"{type(options).__name__!r} object has no attribute {name!r}{hint(name, names)}")


def _repr_of_options(options: object, names: Sequence[str]) -> str:
    return f"{type(options).__name__}({', '.join(f'{name}={getattr(options, name)!r}' for name in names)})"


class RunOptions:
    """Options of one run. Setting an unknown name is an error that suggests a similar option.

    Runs of an :class:`InferenceSession` and steps of a :class:`~ortrain.session.TrainingSession` take these options.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> options = ortrain.RunOptions()
    >>> options.log_severity_level = 3
    >>> (logits,) = session.run(None, {"x": x}, options)
    >>> options.terminate = True
    >>> session.run(None, {"x": x}, options)
    Traceback (most recent call last):
    ortrain.errors.OrtrainError: the run did not start: terminate is set in its run options
    """

    __slots__ = (
        "_config",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "only_execute_path_to_fetches",
        "terminate",
        "training_mode",
    )

    log_severity_level: int
    """Stored without an effect, -1 by default: ortrain logs nothing."""

    log_verbosity_level: int
    """Stored without an effect, 0 by default: ortrain logs nothing."""

    logid: str
    """Stored without an effect, empty by default: ortrain logs nothing."""

    terminate: bool
    """True if a run that begins with these options is an :class:`~ortrain.errors.OrtrainError`.

    ``False`` by default. A run that has begun is not stopped.
    """

    only_execute_path_to_fetches: bool
    """True if a run computes only the values that the requested outputs need; ``False`` by default.

    Otherwise a run of an :class:`InferenceSession` computes every output. Training steps return all outputs.
    """

    training_mode: bool
    """True if a run of a session that trains a graph is a training run; ``True`` by default.

    A session that does not train ignores it: nodes behave as in their model. Steps of a
    :class:`~ortrain.session.TrainingSession` ignore it, too: their names say what they do.
    """

    def __init__(self) -> None:
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.only_execute_path_to_fetches = False
        self.terminate = False
        self.training_mode = True
        self._config: dict[str, str]
        object.__setattr__(self, "_config", {})

    def __setattr__(self, name: str, value: object) -> None:
        names = _public(RunOptions)
        if name not in names:
            raise _no_option(self, name, names)
        super().__setattr__(name, _checked(name, value))

    def __repr__(self) -> str:
        return _repr_of_options(self, _public(RunOptions))

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Store an entry of onnxruntime's configuration. ortrain reads no entry.

        Raises:
            TypeError: if the key or the value is not a ``str``.

        >>> import ortrain
        >>> options = ortrain.RunOptions()
        >>> options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

        """
        self._config[_text("the key of an entry", key)] = _text("the value of an entry", value)

    def get_run_config_entry(self, key: str) -> str:
        """Return the value of an entry.

        Raises:
            InvalidArgumentError: if no entry with this key was added.

        >>> import ortrain
        >>> options = ortrain.RunOptions()
        >>> options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        >>> options.get_run_config_entry("memory.enable_memory_arena_shrinkage")
        'cpu:0'

        """
        return _entry(self, self._config, key)


def _of_onnxruntime(options: object) -> bool:
    return type(options).__module__.partition(".")[0] == "onnxruntime"


def check_begin(options: RunOptions | None) -> None:
    """Raise an error if the options forbid a run. Of onnxruntime's options, only ``terminate`` has an effect.

    Raises:
        OrtrainError: if ``terminate`` is set.

    """
    if options is None:
        return
    if not (isinstance(options, RunOptions) or (_of_onnxruntime(options) and hasattr(options, "terminate"))):
        raise TypeError(f"run options must be an ortrain.RunOptions, got options of {type(options).__module__}")
    if options.terminate:
        raise OrtrainError("the run did not start: terminate is set in its run options")


def native_options(
    options: SessionOptions | None,
    device: str = "cpu",
    *,
    precision: str | None = None,
    bf16_fallback: str | None = None,
    num_threads: int = 0,
    of_session: bool = False,
) -> _ortrain.RunOptions:
    """Return the session options for the core, with a device.

    The arguments ``precision`` and ``bf16_fallback`` override the options, and ``num_threads`` replaces a default
    number of threads. Of onnxruntime's options, only the number of threads has an effect. An option for inference
    sessions is an error unless ``of_session`` is set.
    """
    options = own_options(options)
    if not of_session:
        only = {
            "enable_profiling": options.enable_profiling,
            "optimized_model_filepath": options.optimized_model_filepath,
            "add_initializer": options._initializers,
            "add_free_dimension_override_by_name": options._sizes,
            "add_free_dimension_override_by_denotation": options._denoted,
        }
        for name, value in only.items():
            if value:
                help_ = "; Module.profile measures the time of each instruction" if name == "enable_profiling" else ""
                raise UnsupportedError(f"{name} is not supported here: only an InferenceSession has this option{help_}")
    if options.memory_limit is not None and options.memory_limit < 0:
        raise InvalidArgumentError(f"memory_limit must be at least 0 bytes, got {options.memory_limit}")
    if options.iteration_limit is not None and options.iteration_limit < 0:
        raise InvalidArgumentError(f"iteration_limit must be at least 0, got {options.iteration_limit}")
    return _ortrain.RunOptions(
        device=device,
        num_threads=options.intra_op_num_threads or num_threads,
        memory_limit=options.memory_limit,
        iteration_limit=options.iteration_limit,
        precision=options.precision if precision is None else _name("precision", precision),
        bf16_fallback=options.bf16_fallback if bf16_fallback is None else _name("bf16_fallback", bf16_fallback),
        detect_anomaly=options.detect_anomaly,
    )


def own_options(options: SessionOptions | None, *, of_session: bool = False) -> SessionOptions:
    """Convert onnxruntime's options to ours: the number of threads and, for a session, the options for files."""
    if options is None:
        return SessionOptions()
    if _of_onnxruntime(options):
        theirs, options = options, SessionOptions()
        options.intra_op_num_threads = theirs.intra_op_num_threads
        if of_session:
            for name in ("enable_profiling", "optimized_model_filepath", "profile_file_prefix"):
                setattr(options, name, getattr(theirs, name))
    if not isinstance(options, SessionOptions):
        raise TypeError(f"session options must be an ortrain.SessionOptions, got options of {type(options).__module__}")
    return options


def with_changes(source: WithOperators, options: SessionOptions) -> Source:
    """Combine a model with the changes that the options make, if there are any."""
    if not (options._initializers or options._sizes or options._denoted):
        return source
    changes = _ortrain.ModelChanges()
    for name, value in options._initializers.items():
        changes.initializer(name, value)
    for name, size in options._sizes.items():
        changes.size(name, size)
    for denotation, size in options._denoted.items():
        changes.size_of_denotation(denotation, size)
    return source, changes


def is_restricted(options: RunOptions | None) -> bool:
    """Return True if a run computes only the requested outputs. onnxruntime's options have the same attribute."""
    return options is not None and options.only_execute_path_to_fetches
