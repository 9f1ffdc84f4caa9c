"""Running a model.

>>> import ortrain
>>> from ortrain.inference import InferenceSession
>>> session = InferenceSession(ortrain.examples.perceptron())
>>> (logits,) = session.run(["logits"], {"x": x})
>>> logits.argmax(axis=1).shape
(8,)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ortrain import _files, _ortrain
from ortrain._inputs import Described, as_given, input_value, is_ortvalue, native_value
from ortrain._near import hint
from ortrain._operators import OperatorLibrary, with_operators
from ortrain._options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
    check_begin,
    is_restricted,
    native_options,
    own_options,
    with_changes,
)
from ortrain._sources import ModelLike, model_source
from ortrain.errors import InvalidArgumentError, NoSuchFileError, OrtrainError, UnsupportedError, _Beginnings
from ortrain.iobinding import IOBinding, SessionIOBinding, check_device
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "RunOptions",
    "SessionOptions",
]

# A value as the core takes and gives it: a tensor, or a list of them for a sequence.
Native: TypeAlias = _ortrain.OrtValue | list[_ortrain.OrtValue]
ProviderLike: TypeAlias = str | tuple[str, dict[Any, Any]]


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
    """A model that runs, as ``onnxruntime.InferenceSession``.

    Several threads may use one session: runs take turns, with the interpreter released.

    Args:
        path_or_bytes: a path, the bytes of a model, or an ``onnx.ModelProto``. Initializers are constants; those that
            the model lists as inputs, too, may be given by a run.
        sess_options: threads, bytes, precision, profiling, changes of the model.
        providers: where it runs: ``["CPUExecutionProvider"]`` (the default), ``["WebGpuExecutionProvider"]`` for the
            best GPU, or a name of :func:`ortrain.devices`. The first one counts.
            One that is not there is an error, never a silent fallback.
        provider_options: a dict for each of the providers, instead of pairs in ``providers``. They are kept
            (:meth:`get_provider_options`); the providers that there are have none.
        operators: operators of one's own.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or run, there is no such
            provider, or the machine has nothing that computes the precision and may be used.
        InvalidArgumentError: if there is no such precision; if providers are no list of names, or of pairs of a name
            and a dict; if the options change what the model does not have.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> (logits,) = session.run(None, {"x": x})
    >>> logits.shape, logits.dtype
    ((8, 10), dtype('float32'))

    """

    _native: _ortrain.InferenceSession

    def __init__(
        self,
        path_or_bytes: ModelLike,
        sess_options: SessionOptions | None = None,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        operators: OperatorLibrary | None = None,
    ) -> None:
        options = self._set_up(sess_options, providers, provider_options)
        if options.detect_anomaly:
            raise UnsupportedError("detect_anomaly is for trainings: a Module or a TrainingSession takes it")
        source = with_changes(with_operators(model_source(path_or_bytes), operators), options)
        self._native = _ortrain.InferenceSession(
            source,
            device=self._device,
            **native_options(options, of_session=True),
            optimized_model=options.optimized_model_filepath or None,
        )
        self._begin_profile()

    def _set_up(
        self,
        sess_options: SessionOptions | None,
        providers: Sequence[ProviderLike] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
    ) -> SessionOptions:
        """What every session has beside its native object. Returns the options as ours."""
        self._providers = _normalised(providers, provider_options)
        self._device = _device_of(self._providers)
        self._options = own_options(sess_options, of_session=True)
        self._given_options = self._options if sess_options is None else sess_options
        self._enable_fallback = True
        self._profile_began: int | None = None
        self._profile: str | None = None
        return self._options

    # What touches the native session. A session of another kind overrides these.

    def _described_inputs(self) -> list[Described]:
        """Name, type and shape of what a run must be given."""
        return self._native.inputs()

    def _described_outputs(self) -> list[Described]:
        """Name, type and shape of what a run gives."""
        return self._native.outputs()

    def _described_overridable(self) -> list[Described]:
        """Name, type and shape of what a run may be given beside."""
        return self._native.overridable()

    def _described_model(self) -> tuple[list[str], int, dict[str, str]]:
        """What the model says about itself."""
        return self._native.meta()

    def _run_native(
        self, feeds: dict[str, Native], wanted: list[str], run_options: RunOptions | None, restricted: bool
    ) -> list[Native]:
        """The outputs of these names; if ``restricted``, nothing is computed but what they need."""
        names = [name for name, *_ in self._described_outputs()]
        if restricted:
            return self._native.run(feeds, [names.index(name) for name in wanted])
        results = dict(zip(names, self._native.run(feeds, None), strict=True))
        return [results[name] for name in wanted]

    def _run_native_into(
        self,
        feeds: dict[str, Native],
        outputs: list[tuple[str, _ortrain.OrtValue | None]],
        run_options: RunOptions | None,
    ) -> list[Native]:
        """The outputs of these names, each where its value lies or, without one, in a value of its own."""
        names = [name for name, *_ in self._described_outputs()]
        places = [(names.index(name), value) for name, value in outputs]
        found = self._native.run_into(feeds, places, restricted=is_restricted(run_options))
        made: list[Native] = []
        for (_, place), value in zip(places, found, strict=True):
            result = place if value is None else value
            assert result is not None
            made.append(result)
        return made

    def _input_value(self, value: Any, described: Described) -> _ortrain.OrtValue:
        """What is given for an input, as the core takes it."""
        return input_value(value, described)

    def _begin_native_trace(self) -> None:
        """Take down what runs do."""
        self._native.begin_trace()

    def _end_native_trace(self) -> str | None:
        """What runs did, as JSON."""
        return self._native.end_trace()

    def _set_native_device(self, device: str) -> None:
        """Go on on another device."""
        self._native.set_device(device, self._options.intra_op_num_threads)

    def __repr__(self) -> str:
        def listed(values: list[NodeArg]) -> str:
            return ", ".join(f"{value.name}: {value.type} {value.shape}" for value in values)

        try:
            inputs, outputs = listed(self.get_inputs()), listed(self.get_outputs())
        except OrtrainError as error:
            return f"{type(self).__name__}(device={self._device!r}, cannot be read now: {error})"
        return f"{type(self).__name__}(inputs=[{inputs}], outputs=[{outputs}], device={self._device!r})"

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
        return [NodeArg(*description) for description in self._described_inputs()]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs that :meth:`run` returns.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_outputs()
        [NodeArg(name='logits', type='tensor(float)', shape=['batch', 10])]
        """
        return [NodeArg(*description) for description in self._described_outputs()]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The initializers that a run may be given, besides its inputs: those that the model lists as inputs, too.

        A run that is not given one has the value of the model.

        >>> import ortrain
        >>> model.graph.input.extend([onnx.helper.make_tensor_value_info("fc2.bias", onnx.TensorProto.FLOAT, [10])])
        >>> session = ortrain.InferenceSession(model)
        >>> session.get_overridable_initializers()
        [NodeArg(name='fc2.bias', type='tensor(float)', shape=[10])]
        >>> (logits,) = session.run(None, {"x": x, "fc2.bias": np.full(10, 100, np.float32)})
        >>> bool(logits.min() > 90)
        True
        """
        return [NodeArg(*description) for description in self._described_overridable()]

    def get_modelmeta(self) -> ModelMetadata:
        """What the model says about itself.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_modelmeta().graph_name
        'perceptron'
        """
        (producer, graph, domain, description, graph_description), version, custom = self._described_model()
        return ModelMetadata(producer, graph, domain, description, graph_description, version, custom)

    def get_session_options(self) -> SessionOptions:
        """The options that the session was made with. What is set there now changes nothing of the session.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.get_session_options() is options
        True
        """
        return self._given_options

    def get_providers(self) -> list[str]:
        """The providers that the session was made with. It runs on the first one.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_providers()
        ['CPUExecutionProvider']
        """
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options that were given with each provider, as texts.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_provider_options()
        {'CPUExecutionProvider': {}}
        """
        return {name: dict(options) for name, options in self._providers.items()}

    def set_providers(
        self,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Go on on other providers. Programs are made anew for them; everything else stays.

        Raises:
            InvalidArgumentError, UnsupportedError: as for a new session; it stays where it is then.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> session.set_providers(["reference"])
        >>> session.get_providers()
        ['reference']

        """
        found = _normalised(providers, provider_options)
        device = _device_of(found)
        self._set_native_device(device)
        self._providers, self._device = found, device

    def disable_fallback(self) -> None:
        """Note that runs are not to fall back to another provider, which they never do.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).disable_fallback()
        """
        self._enable_fallback = False

    def enable_fallback(self) -> None:
        """Note that runs may fall back to another provider. They do not: what fails says so.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).enable_fallback()
        """
        self._enable_fallback = True

    def get_tuning_results(self) -> list[dict[str, Any]]:
        """Which kernels were chosen by trying them: none on the CPU.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_tuning_results()
        []
        """
        return []

    def set_tuning_results(self, results: Sequence[dict[str, Any]], *, error_on_invalid: bool = False) -> None:
        """Choose kernels as another session did. Results of providers that are not here mean nothing, and are left out.

        Raises:
            InvalidArgumentError: for results that mean nothing, with ``error_on_invalid``.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).set_tuning_results([])

        """
        if results and error_on_invalid:
            raise InvalidArgumentError("kernels of the CPU are not tuned, so that there are no results to be set")

    # Profiles.

    def _begin_profile(self) -> None:
        if self._options.enable_profiling:
            self._profile_began = time.time_ns()
            self._begin_native_trace()

    def get_profiling_start_time_ns(self) -> int:
        """When the profile began, in nanoseconds since 1970; 0 without one.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_profiling_start_time_ns()
        0
        """
        return self._profile_began or 0

    def end_profiling(self) -> str:
        """Write the profile that :attr:`SessionOptions.enable_profiling` asked for, and return the path of the file.

        The file is a list of events of the format of Chrome: for each run ``model_run``, and for each of its
        instructions the kind, the node, the sizes, operations and bytes. What runs do later is not taken down. Without
        this call nothing is written.

        Returns:
            The path; the empty text without a profile, and where this was called before.

        Raises:
            NoSuchFileError: if the folder is not there; the profile can be written by another call then.

        >>> import json
        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.enable_profiling = True
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> (logits,) = session.run(None, {"x": x})
        >>> path = session.end_profiling()
        >>> with open(path) as file:
        ...     events = json.load(file)
        >>> events[-1]["name"]
        'model_run'
        >>> session.end_profiling()
        ''

        """
        if self._profile is None:
            self._profile = self._end_native_trace()
        if self._profile is None or self._profile_began is None:
            return ""
        second = self._profile_began // 10**9
        while True:
            moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(second))
            path = Path(f"{self._options.profile_file_prefix}_{moment}.json")
            try:
                with _files.placed(path) as file:
                    file.write(self._profile.encode())
                break
            except FileExistsError:
                # Another session began in this second.
                second += 1
            except FileNotFoundError as error:
                raise NoSuchFileError(f"there is no folder {path.parent} for the profile") from error
            except OSError as error:
                raise OrtrainError(f"the profile cannot be written to {path}: {error}") from error
        self._profile = None
        return str(path)

    # Runs.

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
        wanted = self._wanted(output_names)
        self._check_feed(input_feed)
        inputs = [*self._described_inputs(), *self._described_overridable()]
        described = {description[0]: description for description in inputs}
        sequences = {name for name, kind, _ in inputs if kind.startswith("seq(")}
        feeds: dict[str, Native] = {}
        for name, value in input_feed.items():
            if name in sequences and isinstance(value, list | tuple):
                feeds[name] = [native_value(tensor) for tensor in value]
            else:
                feeds[name] = self._input_value(value, described[name]) if name in described else native_value(value)
        return [_arrays(value) for value in self._run_native(feeds, wanted, run_options, is_restricted(run_options))]

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """As :meth:`run`, from ``OrtValue`` to ``OrtValue``.

        Floats are read where they lie, without a copy: what is written there while a run goes changes what it computes.
        If all values are onnxruntime's, so are the results.

        Raises:
            TypeError: for what is no ``OrtValue``.
            InvalidArgumentError, OrtrainError: as :meth:`run`.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> session.run_with_ort_values(["logits"], {"x": ortrain.OrtValue.ortvalue_from_numpy(x)})
        [OrtValue(tensor(float), shape=[8, 10])]

        """
        check_begin(run_options)
        wanted = self._wanted(output_names)
        self._check_feed(input_dict_ort_values)
        for name, value in input_dict_ort_values.items():
            if not is_ortvalue(value):
                raise TypeError(f"the value for {name!r} is an OrtValue, not {type(value).__name__}; run takes arrays")
        feeds: dict[str, Native] = {name: native_value(value) for name, value in input_dict_ort_values.items()}
        found = self._run_native(feeds, wanted, run_options, is_restricted(run_options))
        tensors = [value for value in found if not isinstance(value, list)]
        if len(tensors) == len(found) and feeds:
            return as_given(tensors, list(input_dict_ort_values.values()))
        wrapped: list[Any] = [
            [OrtValue(tensor) for tensor in value] if isinstance(value, list) else OrtValue(value) for value in found
        ]
        return wrapped

    def io_binding(self) -> IOBinding:
        """Inputs and outputs of this session in memory of the caller, for :meth:`run_with_iobinding`.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> binding = session.io_binding()
        >>> binding.bind_cpu_input("x", x)
        >>> binding.bind_output("logits")
        >>> session.run_with_iobinding(binding)
        >>> binding.copy_outputs_to_cpu()[0].shape
        (8, 10)
        """
        return IOBinding(self)

    def run_with_iobinding(
        self, iobinding: IOBinding | SessionIOBinding, run_options: RunOptions | None = None
    ) -> None:
        """Run from what is bound as inputs to what is bound as outputs.

        Raises:
            InvalidArgumentError: for a binding of another session, an input that is missing, an output that the model
                does not have, and memory that does not fit. Nothing has been written then.
            OrtrainError: if ``terminate`` is set in the run options.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> binding = session.io_binding()
        >>> logits = np.zeros((8, 10), np.float32)
        >>> binding.bind_cpu_input("x", x)
        >>> binding.bind_ortvalue_output("logits", ortrain.OrtValue.ortvalue_from_numpy(logits))
        >>> session.run_with_iobinding(binding)
        >>> bool(logits.any())
        True

        """
        check_begin(run_options)
        binding = iobinding._iobinding if isinstance(iobinding, IOBinding) else iobinding
        if not isinstance(binding, SessionIOBinding):
            raise TypeError(f"a binding is made by io_binding() of a session, not {type(iobinding).__name__}")
        if binding._session is not self:
            raise InvalidArgumentError("the binding belongs to another session; this one makes its own: io_binding()")
        outputs = list(binding._outputs.items())
        if not outputs:
            raise InvalidArgumentError("no output is bound; bind_output says which ones are wanted")
        names = self._wanted([name for name, _ in outputs])
        self._check_feed(binding._inputs)
        made = self._run_native_into(dict(binding._inputs), outputs, run_options)
        for name, value in zip(names, made, strict=True):
            if isinstance(value, list):
                raise InvalidArgumentError(f"output {name!r} is a sequence of tensors, which only run returns")
            binding._values[name] = value

    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: _ortrain.OrtValueVector,
        fetch_names: Sequence[str],
        fetches: _ortrain.OrtValueVector,
        fetch_devices: Sequence[_ortrain.OrtDevice],
    ) -> None:
        """As :meth:`run_with_ort_values`, from a vector of values to another one.

        Args:
            run_options: how it goes.
            feed_names: the inputs.
            feeds: a value for each of them.
            fetch_names: the outputs.
            fetches: where they go: an empty vector is filled; values that are in it are written to.
            fetch_devices: a device for each output: the CPU.

        Raises:
            InvalidArgumentError: for other numbers of values than names; as :meth:`run`.
            UnsupportedError: for another device than the CPU.

        >>> import ortrain
        >>> from ortrain.capi import OrtDevice, OrtValue, OrtValueVector
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> cpu = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        >>> feeds, fetches = OrtValueVector(), OrtValueVector()
        >>> feeds.push_back(OrtValue.ortvalue_from_numpy(x, cpu))
        >>> session.run_with_ortvaluevector(None, ["x"], feeds, ["logits"], fetches, [cpu])
        >>> fetches[0].shape()
        [8, 10]

        """
        check_begin(run_options)
        if isinstance(feed_names, str) or isinstance(fetch_names, str):
            raise TypeError("feed_names and fetch_names are lists of names, not one name")
        given, wanted = list(feed_names), self._wanted(list(fetch_names))
        for count, names, what in ((len(feeds), given, "feeds"), (len(fetch_devices), wanted, "fetch_devices")):
            if count != len(names):
                raise InvalidArgumentError(f"there are {len(names)} names, but {count} values of {what}")
        for name in given:
            if given.count(name) > 1:
                raise InvalidArgumentError(f"input {name!r} is given twice")
        for device in fetch_devices:
            check_device(device)
        there: list[_ortrain.OrtValue | None] = list(fetches) or [None] * len(wanted)
        if len(there) != len(wanted):
            raise InvalidArgumentError(f"there are {len(wanted)} names, but {len(there)} values of fetches")
        values: dict[str, Native] = dict(zip(given, feeds, strict=True))
        self._check_feed(values)
        found = self._run_native_into(values, list(zip(wanted, there, strict=True)), run_options)
        if any(isinstance(value, list) for value in found):
            raise InvalidArgumentError("a vector holds tensors; only run returns sequences of them")
        fetches._fill([value for value in found if not isinstance(value, list)])

    def _wanted(self, output_names: Sequence[str] | None) -> list[str]:
        """The outputs of these names, or all."""
        if isinstance(output_names, str):
            raise TypeError("output_names is a list of names, not one name")
        outputs = [description[0] for description in self._described_outputs()]
        wanted = list(output_names) if output_names else outputs
        for name in wanted:
            if name not in outputs:
                near = hint(name, outputs)
                raise InvalidArgumentError(f"the model has no output {name!r}; it has {', '.join(outputs)}{near}")
        return wanted

    def _check_feed(self, feed: Mapping[str, object]) -> None:
        """Check that every input is given. Of other names, say which input may have been meant."""
        inputs = [name for name, *_ in self._described_inputs()]
        missing = [name for name in inputs if name not in feed]
        overridable = [name for name, *_ in self._described_overridable()]
        for given in feed:
            if given in inputs or given in overridable:
                continue
            near = hint(given, missing)
            if near:
                there = ", ".join(inputs)
                raise InvalidArgumentError(f'the model has no input "{given}"; it has {there}{near}')
        if missing:
            given_names = ", ".join(f'"{name}"' for name in feed)
            names = ", ".join(f'"{name}"' for name in missing)
            beside = f"given were {given_names}" if given_names else "none was given"
            raise InvalidArgumentError(f"no value was given for input{'s' * (len(missing) > 1)} {names}; {beside}")


def _normalised(
    providers: Sequence[ProviderLike] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> dict[str, dict[str, str]]:
    """The options of each provider, in order."""
    if providers is None:
        providers = ["CPUExecutionProvider"]
    if isinstance(providers, str) or not isinstance(providers, Sequence):
        raise InvalidArgumentError(f"providers is a list of names, not {providers!r}")
    pairs: list[tuple[str, dict[Any, Any]]] = []
    if provider_options is not None:
        if isinstance(provider_options, str) or not isinstance(provider_options, Sequence):
            raise InvalidArgumentError(f"provider_options is a list of dicts, not {provider_options!r}")
        if len(providers) != len(provider_options):
            raise InvalidArgumentError(
                f"there are {len(providers)} providers, but options for {len(provider_options)} were given"
            )
        for provider, options in zip(providers, provider_options, strict=True):
            if not isinstance(provider, str):
                raise InvalidArgumentError(f"providers are names where provider_options is given, not {provider!r}")
            if not isinstance(options, dict):
                raise InvalidArgumentError(f"the options of provider {provider!r} are a dict, not {options!r}")
            pairs.append((provider, options))
    else:
        for provider in providers:
            if isinstance(provider, str):
                pairs.append((provider, {}))
            elif (
                isinstance(provider, tuple)
                and len(provider) == 2
                and isinstance(provider[0], str)
                and isinstance(provider[1], dict)
            ):
                pairs.append(provider)
            else:
                raise InvalidArgumentError(f"a provider is a name, or a pair of a name and a dict, not {provider!r}")
    from ortrain._devices import device_of_provider, provider_names

    found: dict[str, dict[str, str]] = {}
    for name, options in pairs or [("CPUExecutionProvider", {})]:
        if device_of_provider(name) is None:
            sentence = f"there is no provider {name!r} here; there are {', '.join(provider_names())}"
            if _Beginnings.shown:
                # Scripts for onnxruntime are warned first.
                warnings.warn(sentence, stacklevel=4)
            raise UnsupportedError(sentence)
        if name in found:
            warnings.warn(f"provider {name!r} is named twice; the second time does not count", stacklevel=4)
            continue
        found[name] = {str(key): str(value) for key, value in options.items()}
    return found


def _device_of(providers: dict[str, dict[str, str]]) -> str:
    """The device that the first of some providers runs on."""
    from ortrain._devices import device_of_provider

    name = next(iter(providers))
    return _ortrain.device_name(device_of_provider(name) or name)


def _arrays(value: Native) -> Any:
    """An output as ndarrays."""
    return [tensor.array() for tensor in value] if isinstance(value, list) else value.array()
