"""Sessions that run a model.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ortrain import _files, _ortrain
from ortrain._inputs import Described, input_value, is_ortvalue, native_value, outputs_like_inputs
from ortrain._model_source import ModelLike, source_of
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
from ortrain._records import record_of
from ortrain._suggest import hint
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

# A value in the core: a tensor, or a list of tensors for a sequence.
Native: TypeAlias = _ortrain.OrtValue | list[_ortrain.OrtValue]
ProviderLike: TypeAlias = str | tuple[str, dict[Any, Any]]


class NodeArg:
    """Name, type and shape of an input or output.

    >>> import ortrain
    >>> (x,) = ortrain.InferenceSession(ortrain.examples.perceptron()).get_inputs()
    >>> x.name, x.type, x.shape
    ('x', 'tensor(float)', ['batch', 64])
    """

    __slots__ = ("name", "shape", "type")

    name: str
    """Name of the input or output."""
    type: str
    """Type in the notation of onnxruntime: ``tensor(float)``."""
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
    """Metadata of a model.

    >>> import ortrain
    >>> meta = ortrain.InferenceSession(ortrain.examples.perceptron()).get_modelmeta()
    >>> meta.graph_name, meta.version
    ('perceptron', 0)
    """

    producer_name: str
    """Program that made the model."""
    graph_name: str
    """Name of the graph."""
    domain: str
    """Domain of the model, as a reversed host name."""
    description: str
    """Description of the model."""
    graph_description: str
    """Description of the graph."""
    version: int
    """Version of the model; 0 without a version."""
    custom_metadata_map: dict[str, str]
    """Further entries, by key."""


class InferenceSession:
    """Session that runs a model, like ``onnxruntime.InferenceSession``.

    Several threads may use one session: runs take turns and release the interpreter lock.

    Args:
        path_or_bytes: a path, the bytes of a model, or an ``onnx.ModelProto``. Initializers are constants; a run may
            override an initializer that the model also lists as an input.
        sess_options: options for threads, memory, precision, profiling, and changes of the model.
        providers: the provider to run on: ``["CPUExecutionProvider"]`` (the default), ``["CUDAExecutionProvider"]``
            for a GPU of NVIDIA, ``["WebGpuExecutionProvider"]`` for the best GPU of another interface, or a name of
            :func:`ortrain.devices`. The first entry is used. An unavailable provider is an error, never a silent
            fallback.
        provider_options: a dict for each of the providers, instead of pairs in ``providers``. ``device_id`` is the
            index of the GPU of ``CUDAExecutionProvider``. The session stores other options
            (:meth:`get_provider_options`), but they change no run.
        operators: operators of your own.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read or run, the provider is
            unknown, or the machine has no permitted unit for the precision.
        InvalidArgumentError: if the precision is unknown; if providers are no list of names, or of pairs of a name and
            a dict; if the options change a part that the model does not have.

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
            raise UnsupportedError(
                "detect_anomaly is not supported for inference; set it on a Module or a TrainingSession"
            )
        source = with_changes(with_operators(source_of(path_or_bytes), operators), options)
        self._native = _ortrain.InferenceSession(
            source,
            options=native_options(options, self._device, of_session=True),
            optimized_model=options.optimized_model_filepath or None,
        )
        self._begin_profile()

    def _set_up(
        self,
        sess_options: SessionOptions | None,
        providers: Sequence[ProviderLike] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
    ) -> SessionOptions:
        """Set up the parts of a session besides its native object. Return the options as ours."""
        self._providers = _normalised(providers, provider_options)
        self._device = _device_of(self._providers)
        self._options = own_options(sess_options, of_session=True)
        self._given_options = self._options if sess_options is None else sess_options
        self._enable_fallback = True
        self._profile_began: int | None = None
        self._profile: str | None = None
        return self._options

    # Access to the native session. A subclass with another native session overrides these methods.

    def _described_inputs(self) -> list[Described]:
        """Return name, type and shape of the required inputs."""
        return self._native.inputs()

    def _described_outputs(self) -> list[Described]:
        """Return name, type and shape of the outputs."""
        return self._native.outputs()

    def _described_overridable(self) -> list[Described]:
        """Return name, type and shape of the optional inputs."""
        return self._native.overridable()

    def _described_model(self) -> _ortrain.ModelMetadata:
        """Return the metadata of the model."""
        return self._native.meta()

    def _run_native(
        self, feeds: dict[str, Native], requested_names: list[str], run_options: RunOptions | None, restricted: bool
    ) -> list[Native]:
        """Return the outputs with these names; if ``restricted``, compute only the values that they need."""
        names = [output.name for output in self._described_outputs()]
        if restricted:
            return self._native.run(feeds, [names.index(name) for name in requested_names])
        results = dict(zip(names, self._native.run(feeds, None), strict=True))
        return [results[name] for name in requested_names]

    def _run_native_into(
        self,
        feeds: dict[str, Native],
        outputs: list[tuple[str, _ortrain.OrtValue | None]],
        run_options: RunOptions | None,
    ) -> list[Native]:
        """Return the outputs with these names, each in the memory of its value or, without one, in a new value."""
        names = [output.name for output in self._described_outputs()]
        targets = [(names.index(name), value) for name, value in outputs]
        found = self._native.run_into(feeds, targets, restricted=is_restricted(run_options))
        results: list[Native] = []
        for (_, buffer), value in zip(targets, found, strict=True):
            result = buffer if value is None else value
            assert result is not None
            results.append(result)
        return results

    def _input_value(self, value: Any, described: Described) -> _ortrain.OrtValue:
        """Convert the value of an input for the core."""
        return input_value(value, described)

    def _begin_native_trace(self) -> None:
        """Start the recording of runs."""
        self._native.begin_trace()

    def _end_native_trace(self) -> str | None:
        """End the recording of runs and return it as JSON."""
        return self._native.end_trace()

    def _set_native_device(self, device: str) -> None:
        """Move the session to another device."""
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
        """Precision of inner products: :attr:`SessionOptions.precision`.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).precision
        'f32'
        """
        return self._native.precision().name

    @property
    def bf16_unit(self) -> str | None:
        """Unit that multiplies bfloat16: ``"amx"``, ``"avx512_bf16"`` or ``"emulated"``.

        ``None`` at the precision ``"f32"``, and on the reference evaluator.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> options.precision, options.bf16_fallback = "bf16", "emulated"
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.bf16_unit in ("amx", "avx512_bf16", "emulated")
        True
        """
        return self._native.precision().bf16_unit

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs that :meth:`run` takes.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_inputs()
        [NodeArg(name='x', type='tensor(float)', shape=['batch', 64])]
        """
        return [NodeArg(found.name, found.type, found.shape) for found in self._described_inputs()]

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs that :meth:`run` returns.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_outputs()
        [NodeArg(name='logits', type='tensor(float)', shape=['batch', 10])]
        """
        return [NodeArg(found.name, found.type, found.shape) for found in self._described_outputs()]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the initializers that a run may override, because the model also lists them as inputs.

        A run without a value for an initializer uses the value in the model.

        >>> import ortrain
        >>> model.graph.input.extend([onnx.helper.make_tensor_value_info("fc2.bias", onnx.TensorProto.FLOAT, [10])])
        >>> session = ortrain.InferenceSession(model)
        >>> session.get_overridable_initializers()
        [NodeArg(name='fc2.bias', type='tensor(float)', shape=[10])]
        >>> (logits,) = session.run(None, {"x": x, "fc2.bias": np.full(10, 100, np.float32)})
        >>> bool(logits.min() > 90)
        True
        """
        return [NodeArg(found.name, found.type, found.shape) for found in self._described_overridable()]

    def get_modelmeta(self) -> ModelMetadata:
        """Return the metadata of the model.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_modelmeta().graph_name
        'perceptron'
        """
        return record_of(ModelMetadata, self._described_model())

    def get_session_options(self) -> SessionOptions:
        """Return the options that the session was made with. Later changes of the options do not affect the session.

        >>> import ortrain
        >>> options = ortrain.SessionOptions()
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
        >>> session.get_session_options() is options
        True
        """
        return self._given_options

    def get_providers(self) -> list[str]:
        """Return the providers of the session. The session runs on the first one.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_providers()
        ['CPUExecutionProvider']
        """
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each provider, as texts.

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
        """Move the session to other providers. Its programs are compiled again; everything else stays.

        Raises:
            InvalidArgumentError, UnsupportedError: as for a new session; the session then stays where it is.

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
        """Forbid the fallback of runs to another provider, which never happens.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).disable_fallback()
        """
        self._enable_fallback = False

    def enable_fallback(self) -> None:
        """Permit the fallback of runs to another provider. It never happens: a failing run raises an error.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).enable_fallback()
        """
        self._enable_fallback = True

    def get_tuning_results(self) -> list[dict[str, Any]]:
        """Return the kernels that were chosen by tuning: an empty list on the CPU.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_tuning_results()
        []
        """
        return []

    def set_tuning_results(self, results: Sequence[dict[str, Any]], *, error_on_invalid: bool = False) -> None:
        """Choose kernels by the tuning results of another session. Results of absent providers are ignored.

        Raises:
            InvalidArgumentError: for results that would be ignored, with ``error_on_invalid``.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).set_tuning_results([])

        """
        if results and error_on_invalid:
            raise InvalidArgumentError("tuning results are not supported: kernels of the CPU are not tuned")

    # Profiles.

    def _begin_profile(self) -> None:
        if self._options.enable_profiling:
            self._profile_began = time.time_ns()
            self._begin_native_trace()

    def get_profiling_start_time_ns(self) -> int:
        """Return the start of the profile, in nanoseconds since 1970; 0 without a profile.

        >>> import ortrain
        >>> ortrain.InferenceSession(ortrain.examples.perceptron()).get_profiling_start_time_ns()
        0
        """
        return self._profile_began or 0

    def end_profiling(self) -> str:
        """Write the profile that :attr:`SessionOptions.enable_profiling` requests, and return the path of the file.

        The file is a list of events in Chrome's trace format: for each run ``model_run``, and for each of its
        instructions the kind, the node, the sizes, operations and bytes. Later runs are not recorded. Without this call
        nothing is written.

        Returns:
            The path; an empty text without a profile, and if an earlier call wrote the profile.

        Raises:
            NoSuchFileError: if the folder does not exist; another call can then write the profile.

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
                # Another session started in this second.
                second += 1
            except FileNotFoundError as error:
                raise NoSuchFileError(f"there is no folder {path.parent} for the profile") from error
            except OSError as error:
                raise OrtrainError(f"the profile cannot be written to {path}: {error}") from error
        self._profile = None
        return str(path)

    # Runs.

    def _reporting(self, run_options: RunOptions | None) -> AbstractContextManager[None]:
        """Return the context of a run; other ranks of a distributed training receive its exceptions."""
        return nullcontext()

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, npt.ArrayLike | OrtValue | Sequence[npt.ArrayLike | OrtValue]],
        run_options: RunOptions | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Return the named outputs for the named inputs; ``None`` names all outputs, in the model's order.

        Outputs are ndarrays. A sequence of tensors is a list of ndarrays, as an input and as an output. The inputs
        never change, even if the model changes sequences in place.

        Raises:
            InvalidArgumentError: for inputs that do not fit, and for unknown names.
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
        with self._reporting(run_options):
            check_begin(run_options)
            requested_names = self._requested_outputs(output_names)
            self._check_feed(input_feed)
            inputs = [*self._described_inputs(), *self._described_overridable()]
            described = {found.name: found for found in inputs}
            sequences = {found.name for found in inputs if found.type.startswith("seq(")}
            feeds: dict[str, Native] = {}
            for name, value in input_feed.items():
                if name in sequences and isinstance(value, list | tuple):
                    feeds[name] = [native_value(tensor) for tensor in value]
                else:
                    feeds[name] = (
                        self._input_value(value, described[name]) if name in described else native_value(value)
                    )
            return [
                _arrays(value)
                for value in self._run_native(feeds, requested_names, run_options, is_restricted(run_options))
            ]

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Run the model like :meth:`run`, from ``OrtValue`` to ``OrtValue``.

        Inputs of floats are read in place, without a copy: a write to their memory during a run changes the result. If
        all inputs are values of onnxruntime, so are the outputs.

        Raises:
            TypeError: if an input is not an ``OrtValue``.
            InvalidArgumentError, OrtrainError: as for :meth:`run`.

        >>> import ortrain
        >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
        >>> session.run_with_ort_values(["logits"], {"x": ortrain.OrtValue.ortvalue_from_numpy(x)})
        [OrtValue(tensor(float), shape=[8, 10])]

        """
        with self._reporting(run_options):
            check_begin(run_options)
            requested_names = self._requested_outputs(output_names)
            self._check_feed(input_dict_ort_values)
            for name, value in input_dict_ort_values.items():
                if not is_ortvalue(value):
                    raise TypeError(
                        f"the value for {name!r} must be an OrtValue, got {type(value).__name__}; run accepts arrays"
                    )
            feeds: dict[str, Native] = {name: native_value(value) for name, value in input_dict_ort_values.items()}
            found = self._run_native(feeds, requested_names, run_options, is_restricted(run_options))
            tensors = [value for value in found if not isinstance(value, list)]
            if len(tensors) == len(found) and feeds:
                return outputs_like_inputs(tensors, list(input_dict_ort_values.values()))
            wrapped: list[Any] = [
                [OrtValue(tensor) for tensor in value] if isinstance(value, list) else OrtValue(value)
                for value in found
            ]
            return wrapped

    def io_binding(self) -> IOBinding:
        """Return a binding of this session's inputs and outputs to memory of the caller.

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
        """Run the model on the bound inputs and write the bound outputs.

        Raises:
            InvalidArgumentError: for a binding of another session, a missing input, an unknown output, and memory that
                does not fit. Nothing has been written then.
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
        with self._reporting(run_options):
            check_begin(run_options)
            binding = iobinding._iobinding if isinstance(iobinding, IOBinding) else iobinding
            if not isinstance(binding, SessionIOBinding):
                raise TypeError(f"expected a binding from io_binding() of the session, got {type(iobinding).__name__}")
            if binding._session is not self:
                raise InvalidArgumentError("the binding belongs to another session; call io_binding() of this session")
            outputs = list(binding._outputs.items())
            if not outputs:
                raise InvalidArgumentError("no output is bound; call bind_output first")
            names = self._requested_outputs([name for name, _ in outputs])
            self._check_feed(binding._inputs)
            results = self._run_native_into(dict(binding._inputs), outputs, run_options)
            for name, value in zip(names, results, strict=True):
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
        """Run the model like :meth:`run_with_ort_values`, from one vector of values to another.

        Args:
            run_options: the options of the run.
            feed_names: the inputs.
            feeds: a value for each of these inputs.
            fetch_names: the outputs.
            fetches: the vector of the outputs: an empty vector is filled; existing values are overwritten in place.
            fetch_devices: a device for each output, which must be the CPU.

        Raises:
            InvalidArgumentError: if the numbers of names and values differ; as for :meth:`run`.
            UnsupportedError: for a device other than the CPU.

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
        with self._reporting(run_options):
            check_begin(run_options)
            if isinstance(feed_names, str) or isinstance(fetch_names, str):
                raise TypeError("feed_names and fetch_names must be lists of names, got one name")
            input_names, output_names = list(feed_names), self._requested_outputs(list(fetch_names))
            for count, names, what in (
                (len(feeds), input_names, "feeds"),
                (len(fetch_devices), output_names, "fetch_devices"),
            ):
                if count != len(names):
                    raise InvalidArgumentError(f"expected {len(names)} values in {what}, got {count}")
            for name in input_names:
                if input_names.count(name) > 1:
                    raise InvalidArgumentError(f"input {name!r} is given twice")
            for device in fetch_devices:
                check_device(device)
            there: list[_ortrain.OrtValue | None] = list(fetches) or [None] * len(output_names)
            if len(there) != len(output_names):
                raise InvalidArgumentError(f"expected {len(output_names)} values in fetches, got {len(there)}")
            values: dict[str, Native] = dict(zip(input_names, feeds, strict=True))
            self._check_feed(values)
            found = self._run_native_into(values, list(zip(output_names, there, strict=True)), run_options)
            if any(isinstance(value, list) for value in found):
                raise InvalidArgumentError("an output is a sequence of tensors, which only run returns")
            fetches._fill([value for value in found if not isinstance(value, list)])

    def _requested_outputs(self, output_names: Sequence[str] | None) -> list[str]:
        """Return the requested output names, or all output names."""
        if isinstance(output_names, str):
            raise TypeError("output_names must be a list of names, got one name")
        outputs = [output.name for output in self._described_outputs()]
        requested_names = list(output_names) if output_names else outputs
        for name in requested_names:
            if name not in outputs:
                near = hint(name, outputs)
                raise InvalidArgumentError(f"the model has no output {name!r}; it has {', '.join(outputs)}{near}")
        return requested_names

    def _check_feed(self, feed: Mapping[str, object]) -> None:
        """Check that every input has a value. The error for an unknown name suggests a similar missing input."""
        inputs = [given.name for given in self._described_inputs()]
        missing = [name for name in inputs if name not in feed]
        overridable = [given.name for given in self._described_overridable()]
        for feed_name in feed:
            if feed_name in inputs or feed_name in overridable:
                continue
            near = hint(feed_name, missing)
            if near:
                there = ", ".join(inputs)
                raise InvalidArgumentError(f'the model has no input "{feed_name}"; it has {there}{near}')
        if missing:
            feed_names = ", ".join(f'"{name}"' for name in feed)
            names = ", ".join(f'"{name}"' for name in missing)
            beside = f"values were given for {feed_names}" if feed_names else "none was given"
            raise InvalidArgumentError(f"no value was given for input{'s' * (len(missing) > 1)} {names}; {beside}")


def _normalised(
    providers: Sequence[ProviderLike] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> dict[str, dict[str, str]]:
    """Return the options of each provider, in order."""
    if providers is None:
        providers = ["CPUExecutionProvider"]
    if isinstance(providers, str) or not isinstance(providers, Sequence):
        raise InvalidArgumentError(f"providers must be a list of names, got {providers!r}")
    pairs: list[tuple[str, dict[Any, Any]]] = []
    if provider_options is not None:
        if isinstance(provider_options, str) or not isinstance(provider_options, Sequence):
            raise InvalidArgumentError(f"provider_options must be a list of dicts, got {provider_options!r}")
        if len(providers) != len(provider_options):
            raise InvalidArgumentError(
                f"expected {len(providers)} dicts in provider_options, one for each provider, got "
                f"{len(provider_options)}"
            )
        for provider, options in zip(providers, provider_options, strict=True):
            if not isinstance(provider, str):
                raise InvalidArgumentError(f"providers must be names if provider_options is given, got {provider!r}")
            if not isinstance(options, dict):
                raise InvalidArgumentError(f"the options of provider {provider!r} must be a dict, got {options!r}")
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
                raise InvalidArgumentError(
                    f"a provider must be a name, or a pair of a name and a dict, got {provider!r}"
                )
    from ortrain._devices import device_of_provider, provider_names

    found: dict[str, dict[str, str]] = {}
    for name, options in pairs or [("CPUExecutionProvider", {})]:
        if device_of_provider(name) is None:
            sentence = f"unknown provider {name!r}; expected one of {', '.join(provider_names())}"
            if _Beginnings.shown:
                # onnxruntime gives its scripts a warning before the error.
                warnings.warn(sentence, stacklevel=4)
            raise UnsupportedError(sentence)
        if name in found:
            warnings.warn(f"provider {name!r} is named twice; the second entry is ignored", stacklevel=4)
            continue
        found[name] = {str(key): str(value) for key, value in options.items()}
    return found


def _device_of(providers: dict[str, dict[str, str]]) -> str:
    """Return the device of the first provider."""
    from ortrain._devices import device_of_provider

    name, options = next(iter(providers.items()))
    return _ortrain.device_name(device_of_provider(name, options.get("device_id", "0")) or name)


def _arrays(value: Native) -> Any:
    """Convert an output to ndarrays."""
    return [tensor.result_array() for tensor in value] if isinstance(value, list) else value.result_array()
