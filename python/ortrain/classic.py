"""Training in one session: each run computes the model, its gradients, and an update of the weights.

Names and behaviour follow ``onnxruntime.TrainingSession`` and ``onnxruntime.TrainingParameters``, which
onnxruntime-training had until its release 1.15. ``docs/classic-session.md`` helps to choose between this module and
:mod:`ortrain.api`.

>>> from ortrain.classic import TrainingParameters, TrainingSession
>>> parameters = TrainingParameters()
>>> parameters.loss_output_name = "loss"
>>> parameters.training_optimizer_name = "AdamOptimizer"
>>> parameters.weights_to_train = {"fc2.weight", "fc2.bias"}
>>> parameters.optimizer_attributes_map = {name: {} for name in parameters.weights_to_train}
>>> parameters.optimizer_int_attributes_map = {name: {} for name in parameters.weights_to_train}
>>> session = TrainingSession(model_with_loss.SerializeToString(), parameters)
>>> rate = np.array([0.01], np.float32)
>>> losses = [float(session.run(["loss"], {"x": x, "labels": labels, "Learning_Rate": rate})[0]) for _ in range(5)]
>>> losses[-1] < losses[0]
True
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from ortrain import _ortrain, _seeds
from ortrain._inputs import Described, input_value, native_value
from ortrain._model_source import model_source
from ortrain._operators import with_operators
from ortrain._options import RunOptions, SessionOptions, is_restricted, native_options, with_changes
from ortrain._records import record_of
from ortrain._suggest import hint
from ortrain._world import World, open_world, reporting, warn_of_no_effect
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.inference import InferenceSession, Native, ProviderLike

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.api.profile import MemoryUse

__all__ = ["CommunicationTime", "TrainingParameters", "TrainingSession"]

T = TypeVar("T")


class _Setting(Generic[T]):
    """Property of the parameters: a plain value of one kind. Reading it returns a copy."""

    def __init__(self, default: T, kind: str, checked: Callable[[Any], T]) -> None:
        self.default, self.kind, self.checked = default, kind, checked
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, parameters: None, owner: type) -> _Setting[T]: ...

    @overload
    def __get__(self, parameters: TrainingParameters, owner: type) -> T: ...

    def __get__(self, parameters: TrainingParameters | None, owner: type) -> _Setting[T] | T:
        if parameters is None:
            return self
        value: T = copy.deepcopy(parameters._values.get(self.name, self.default))
        return value

    def __set__(self, parameters: TrainingParameters, value: T) -> None:
        try:
            parameters._values[self.name] = copy.deepcopy(self.checked(value))
        except TypeError as error:
            raise TypeError(f"{self.name} must be {self.kind}, got {value!r}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError
    return float(value)


def _names(value: Any) -> set[str]:
    if not isinstance(value, set | frozenset):
        raise TypeError
    return {_text(name) for name in value}


def _list_of(item: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    def checked(value: Any) -> list[T]:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError
        return [item(each) for each in value]

    return checked


def _dict_of(item: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    def checked(value: Any) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_text(name): item(each) for name, each in value.items()}

    return checked


def _slot(value: Any) -> tuple[int, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError
    return _integer(value[0]), _number(value[1])


def _setting_text(default: str) -> _Setting[str]:
    return _Setting(default, "a str", _text)


def _setting_flag(default: bool) -> _Setting[bool]:
    return _Setting(default, "True or False", _flag)


def _setting_integer(default: int) -> _Setting[int]:
    return _Setting(default, "an integer", _integer)


class TrainingParameters:
    """Settings of a :class:`TrainingSession`. Properties are plain values; reading one returns a copy.

    The documentation of a property says if its effect differs from onnxruntime-training, or if it has no effect. A
    value that needs a feature without support in ortrain is an error when a session is made. No property is ignored
    silently.

    >>> from ortrain.classic import TrainingParameters
    >>> parameters = TrainingParameters()
    >>> parameters.weights_to_train = {"fc2.bias"}
    >>> parameters.weights_to_train.add("fc1.bias")
    >>> parameters.weights_to_train
    {'fc2.bias'}
    >>> parameters.weights_to_train = ["fc2.bias"]
    Traceback (most recent call last):
    TypeError: weights_to_train must be a set of names, got ['fc2.bias']
    """

    __slots__ = ("_states", "_values")

    loss_output_name = _setting_text("")
    """Value to minimize: any result of the model that is one number. Required."""

    weights_to_train = _Setting[set[str]](set(), "a set of names", _names)
    """Initializers to train. An empty set selects all initializers that the loss depends on."""

    weights_not_to_train = _Setting[set[str]](set(), "a set of names", _names)
    """Initializers that are not trained, even if other properties name them."""

    immutable_weights = _Setting[dict[str, list[tuple[int, float]]]](
        {}, "a dict of lists of pairs of an input index and a value", _dict_of(_list_of(_slot))
    )
    """Scalars that are not trained by default: for an operator, pairs of an input and a value.

    With ``{"Mul": [(1, 2.0)]}``, a factor 2.0 is not trained.
    """

    training_optimizer_name = _setting_text("")
    """``"SGDOptimizer"``, ``"AdamOptimizer"``, ``"LambOptimizer"``; empty to compute gradients without an update."""

    lr_params_feed_name = _setting_text("Learning_Rate")
    """Name of the input for the learning rate, float32 of shape ``[1]``."""

    optimizer_attributes_map = _Setting[dict[str, dict[str, float]]](
        {}, "a dict of dicts of numbers", _dict_of(_dict_of(_number))
    )
    """Settings of each trained weight: ``alpha``, ``beta``, ``lambda``, ``epsilon``, ``max_norm_clip``.

    LAMB also has ``ratio_min`` and ``ratio_max``. Each trained weight has an entry; ``{}`` selects the defaults.
    """

    optimizer_int_attributes_map = _Setting[dict[str, dict[str, int]]](
        {}, "a dict of dicts of integers", _dict_of(_dict_of(_integer))
    )
    """Settings of each trained weight: ``do_bias_correction`` and, for Adam, ``weight_decay_mode``: 0 or 1."""

    use_mixed_precision = _setting_flag(False)
    """True for a model that computes in half precision, except for its loss. Weights stay float32.

    A run takes the input ``loss_scale``, float32 of shape ``[1]``. A run with gradients that are not finite changes
    nothing.
    """

    mixed_precision_dtype = _setting_text("float16")
    """Type that the model computes in with ``use_mixed_precision``: ``"float16"`` or ``"bfloat16"``.

    onnxruntime only has float16.
    """

    use_fp16_moments = _setting_flag(False)
    """``True`` is an error: moments are float32 here, so that small ones are not lost."""

    loss_scale = _Setting(0.0, "a number", _number)
    """Stored without an effect: runs take the scale as an input."""

    gradient_accumulation_steps = _setting_integer(1)
    """Number of runs with gradients that are summed for one update, which uses their mean."""

    enable_grad_norm_clip = _setting_flag(True)
    """True to compute ``global_gradient_norm``, and to clip gradients by it.

    Adam and LAMB scale the gradients of a weight by ``max_norm_clip / norm`` if the norm is larger. (The CPU kernel of
    Adam in onnxruntime-training omitted that; ``False`` gives the same numbers.)
    """

    set_gradients_as_graph_outputs = _setting_flag(False)
    """True if ``<weight>_grad`` is an output for each trained weight."""

    use_memory_efficient_gradient = _setting_flag(False)
    """Stored without an effect: memory is planned before the first run."""

    allreduce_post_accumulation = _setting_flag(False)
    """False to sum gradients of several processes while the backward pass still computes others."""

    world_rank = _setting_integer(0)
    """Index of the process. MPI sets it."""

    world_size = _setting_integer(1)
    """Number of training processes. MPI sets it."""

    data_parallel_size = _setting_integer(1)
    """Number of processes that each train on their own part of a batch. MPI sets it."""

    horizontal_parallel_size = _setting_integer(1)
    """Must be 1."""

    pipeline_parallel_size = _setting_integer(1)
    """Must be 1."""

    num_pipeline_micro_batches = _setting_integer(1)
    """Must be 1."""

    pipeline_cut_info_string = _setting_text("")
    """Must be empty."""

    deepspeed_zero_stage = _setting_integer(0)
    """0 or 1. Stage 1 divides the optimizer state among processes; in one process it has no effect, with a warning."""

    enable_adasum = _setting_flag(False)
    """True to combine gradients of processes by Adasum; in one process it has no effect, with a warning."""

    sliced_schema = _Setting[dict[str, list[int]]]({}, "a dict of lists of integers", _dict_of(_list_of(_integer)))
    """Must be empty."""

    sliced_axes = _Setting[dict[str, int]]({}, "a dict of integers", _dict_of(_integer))
    """Must be empty."""

    sliced_tensor_names = _Setting[list[str]]([], "a list of names", _list_of(_text))
    """Must be empty."""

    attn_dropout_recompute = _setting_flag(False)
    """Stored without an effect on results: ``SessionOptions.memory_limit`` recomputes values."""

    gelu_recompute = _setting_flag(False)
    """Stored without an effect on results: ``SessionOptions.memory_limit`` recomputes values."""

    transformer_layer_recompute = _setting_flag(False)
    """Stored without an effect on results: ``SessionOptions.memory_limit`` recomputes values."""

    number_recompute_layers = _setting_integer(0)
    """Stored without an effect on results: ``SessionOptions.memory_limit`` recomputes values."""

    propagate_cast_ops_level = _setting_integer(1)
    """Stored without an effect on results."""

    propagate_cast_ops_allow = _Setting[list[str]]([], "a list of names", _list_of(_text))
    """Stored without an effect on results."""

    model_after_graph_transforms_path = _setting_text("")
    """File for the model as it is trained, before gradients are added."""

    model_with_gradient_graph_path = _setting_text("")
    """File for the model with its gradients."""

    model_with_training_graph_path = _setting_text("")
    """File for the model with its gradients and the updates of the weights."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._states: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        known = [own for own in vars(TrainingParameters) if not own.startswith("__")]
        if name not in known:
            raise AttributeError(f"'TrainingParameters' object has no attribute {name!r}{hint(name, known)}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in sorted(self._values.items()))
        return f"TrainingParameters({changed})"

    def set_optimizer_initial_state(self, states: Mapping[str, Mapping[str, npt.ArrayLike]]) -> None:
        """Set the initial state of the optimizer: copies of ``get_optimizer_state()``, or of a part of it.

        >>> from ortrain.classic import TrainingParameters
        >>> TrainingParameters().set_optimizer_initial_state({"w": {"Update_Count": np.array([5])}})

        Raises:
            TypeError: for anything but a dict of dicts of arrays.

        """
        if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
            raise TypeError("states must be a dict of dicts of arrays, by weight and by name")
        copies = {weight: {name: np.array(value) for name, value in state.items()} for weight, state in states.items()}
        names = [*copies, *(name for state in copies.values() for name in state)]
        arrays = [array for state in copies.values() for array in state.values()]
        if not all(isinstance(name, str) for name in names) or any(array.dtype.kind in "OSUV" for array in arrays):
            raise TypeError("states must be a dict of dicts of arrays of numbers, by weight and by name")
        self._states = copies


# Settings of a division of the model, which ortrain does not support, with their required values.
_REQUIRED_VALUES: dict[str, Any] = {
    "horizontal_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "num_pipeline_micro_batches": 1,
    "pipeline_cut_info_string": "",
    "sliced_schema": {},
    "sliced_axes": {},
    "sliced_tensor_names": [],
}
_RANKS = ("world_rank", "world_size", "data_parallel_size")


def _open_world(parameters: TrainingParameters) -> World | None:
    """Returns the ranks that train together, and sets the parameters to the values of MPI."""
    world = open_world({name: getattr(parameters, name) for name in _RANKS})
    for name, required in _REQUIRED_VALUES.items():
        value = getattr(parameters, name)
        if value != required:
            raise UnsupportedError(
                f"{name} must be {required!r}, got {value!r}: ortrain does not divide a model among processes"
            )
    if parameters.deepspeed_zero_stage not in (0, 1):
        raise UnsupportedError(f"deepspeed_zero_stage must be 0 or 1, got {parameters.deepspeed_zero_stage}")
    if world is None:
        warn_of_no_effect({name: getattr(parameters, name) for name in ("deepspeed_zero_stage", "enable_adasum")})
    else:
        for name in _RANKS:
            setattr(parameters, name, world.sizes()[name])
    return world


def _session_ranks(
    world: World | None, parameters: TrainingParameters
) -> tuple[_ortrain.RankControl, Any, int, str, bool] | None:
    """Returns the ranks of a new session for the core. ZeRO has precedence over Adasum."""
    if world is None:
        return None
    strategy = "zero" if parameters.deepspeed_zero_stage else "adasum" if parameters.enable_adasum else "all-reduce"
    return world.session_ranks(strategy, not parameters.allreduce_post_accumulation)


def _native_parameters(parameters: TrainingParameters) -> dict[str, Any]:
    """Convert the parameters for the core."""
    if parameters.use_fp16_moments:
        raise UnsupportedError("use_fp16_moments=True is not supported: moments are always float32")
    paths = ("model_after_graph_transforms_path", "model_with_gradient_graph_path", "model_with_training_graph_path")
    names = (
        "loss_output_name",
        "weights_to_train",
        "weights_not_to_train",
        "immutable_weights",
        "training_optimizer_name",
        "lr_params_feed_name",
        "optimizer_attributes_map",
        "optimizer_int_attributes_map",
        "use_mixed_precision",
        "mixed_precision_dtype",
        "gradient_accumulation_steps",
        "enable_grad_norm_clip",
        "set_gradients_as_graph_outputs",
    )
    states = {
        weight: {name: native_value(value) for name, value in state.items()}
        for weight, state in parameters._states.items()
    }
    return {
        **{name: getattr(parameters, name) for name in names},
        **{name: getattr(parameters, name) or None for name in paths},
        "initial_optimizer_state": states,
    }


@dataclass(frozen=True)
class CommunicationTime:
    """Time of the exchange of gradients between processes.

    >>> from ortrain.classic import CommunicationTime
    >>> CommunicationTime(updates=10, total=2.0, waited=0.5).hidden_share
    0.75
    """

    updates: int
    """Number of updates of the weights."""
    total: float
    """Seconds of the sums of gradients, without the time until all processes have begun the step."""
    waited: float
    """Seconds in which the session waited for the sums, and computed nothing."""

    @property
    def hidden_share(self) -> float:
        """Share of the time that computations hide, from 0 to 1.

        >>> from ortrain.classic import CommunicationTime
        >>> CommunicationTime(updates=0, total=0.0, waited=0.0).hidden_share
        0.0
        """
        return max(0.0, 1.0 - self.waited / self.total) if self.total else 0.0


# Suffix of the name of an updated weight, by optimizer.
_UPDATED = {"SGDOptimizer": "SGD_out", "AdamOptimizer": "Adam_out", "LambOptimizer": "Lamb_out"}


def _arrays(state: Mapping[str, _ortrain.OrtValue]) -> dict[str, npt.NDArray[Any]]:
    """Convert values to arrays, sorted by name."""
    return {name: np.array(state[name].array()) for name in sorted(state)}


class TrainingSession(InferenceSession):
    """Model, gradients and optimizer behind one ``run``.

    Args:
        path_or_bytes: the path of a forward model that ends in a loss, or its bytes.
        parameters: the settings of the training.
        sess_options: options for threads, memory and precision.
        providers: the providers to run on; by default the CPU.
        provider_options: a dict for each provider.

    Raises:
        TypeError: for a model, parameters or options of another type.
        NoSuchFileError, InvalidModelError: if the model cannot be read.
        InvalidArgumentError, OrtrainError: if the parameters name something that the model does not have, or the bytes
            are empty.
        UnsupportedError: for an operator without a gradient, and for parameters that divide the model. Also for sizes
            above 1 in one process, and for processes of ``mpiexec`` or ``srun`` that cannot form one training.
        RankError: on several ranks, if model, parameters or weights differ, or another rank fails here.

    Warns:
        UserWarning: for ``deepspeed_zero_stage`` and ``enable_adasum``, which have no effect in one process, and for
            parameters that differ from MPI.

    >>> from ortrain.classic import TrainingParameters, TrainingSession
    >>> parameters = TrainingParameters()
    >>> parameters.loss_output_name = "loss"
    >>> session = TrainingSession(model_with_loss.SerializeToString(), parameters)
    >>> [output.name for output in session.get_outputs()]
    ['loss', 'logits']

    """

    _classic: _ortrain.ClassicSession

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        parameters: TrainingParameters,
        sess_options: SessionOptions | None = None,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            raise TypeError(f"the model must be a path or bytes, got {type(path_or_bytes).__name__}")
        if not isinstance(parameters, TrainingParameters):
            raise TypeError(f"parameters must be a TrainingParameters, got {type(parameters).__name__}")
        if path_or_bytes == b"":
            raise InvalidArgumentError("the model is empty; expected an ONNX model")
        self._world = _open_world(parameters)
        # True if a trainer runs the session and tells other ranks about its errors.
        self._has_trainer = False
        with reporting(self._world):
            self._create(path_or_bytes, parameters, self._set_up(sess_options, providers, provider_options))
        self._begin_profile()

    def _create(
        self, path_or_bytes: str | bytes | os.PathLike[str], parameters: TrainingParameters, options: SessionOptions
    ) -> None:
        """Create the session of the core."""
        settings = _native_parameters(parameters)
        if options.optimized_model_filepath:
            # This file has the complete training graph: forward pass, gradients and updates.
            written = settings["model_with_training_graph_path"]
            if written not in (None, options.optimized_model_filepath):
                raise UnsupportedError(
                    "optimized_model_filepath and model_with_training_graph_path name two files for the same model; "
                    "set one of them"
                )
            settings["model_with_training_graph_path"] = options.optimized_model_filepath
        self._optimizer_name: str = settings["training_optimizer_name"]
        threads = 0 if self._world is None else self._world.threads
        self._classic = _ortrain.ClassicSession(
            with_changes(with_operators(model_source(path_or_bytes), None), options),
            settings,
            _seeds.of_process(),
            options=native_options(options, self._device, num_threads=threads, of_session=True),
            ranks=_session_ranks(self._world, parameters),
        )

    def __reduce__(self) -> Any:
        raise TypeError("a TrainingSession cannot be pickled; get_state() returns its weights and optimizer state")

    @property
    def loss_scale_input_name(self) -> str | None:
        """Name of the input with the loss scale; ``None`` without mixed precision.

        >>> classic_session.loss_scale_input_name is None
        True
        """
        return self._classic.loss_scale_input_name()

    @property
    def precision(self) -> str:
        """Precision of inner products: :attr:`SessionOptions.precision <ortrain.SessionOptions.precision>`.

        >>> classic_session.precision
        'f32'
        """
        return self._classic.precision().name

    @property
    def bf16_unit(self) -> str | None:
        """Unit that multiplies bfloat16; ``None`` at the precision ``"f32"``.

        >>> classic_session.bf16_unit is None
        True
        """
        return self._classic.precision().bf16_unit

    def _described_inputs(self) -> list[Described]:
        return self._classic.inputs()

    def _described_outputs(self) -> list[Described]:
        return self._classic.outputs()

    def _described_overridable(self) -> list[Described]:
        return self._classic.overridable()

    def _described_model(self) -> _ortrain.ModelMetadata:
        return self._classic.meta()

    def _input_value(self, value: Any, described: Described) -> _ortrain.OrtValue:
        # An array must already have the type of the input; a list has no type and is converted.
        return input_value(value, described) if isinstance(value, list | tuple) else native_value(value)

    @property
    def _sess(self) -> Any:
        from ortrain._classic_core import core_of

        return core_of(self)

    def _begin_native_trace(self) -> None:
        self._classic.begin_trace()

    def _end_native_trace(self) -> str | None:
        return self._classic.end_trace()

    def _set_native_device(self, device: str) -> None:
        if device != self._device:
            raise UnsupportedError(
                "a TrainingSession cannot change its device; create another session and call load_state"
            )

    def _reporting(self, run_options: RunOptions | None) -> AbstractContextManager[None]:
        # The run checks the type of the options.
        restricted = getattr(run_options, "only_execute_path_to_fetches", False)
        return reporting(None if restricted or self._has_trainer else self._world)

    def _run_native(
        self, feeds: dict[str, Native], requested_names: list[str], run_options: RunOptions | None, restricted: bool
    ) -> list[Native]:
        return self._run_classic(feeds, [(name, None) for name in requested_names], run_options)

    def _run_native_into(
        self,
        feeds: dict[str, Native],
        outputs: list[tuple[str, _ortrain.OrtValue | None]],
        run_options: RunOptions | None,
    ) -> list[Native]:
        return self._run_classic(feeds, outputs, run_options)

    def _run_classic(
        self,
        feeds: dict[str, Native],
        outputs: list[tuple[str, _ortrain.OrtValue | None]],
        run_options: RunOptions | None,
    ) -> list[Native]:
        tensors: dict[str, _ortrain.OrtValue] = {}
        for name, value in feeds.items():
            if isinstance(value, list):
                raise InvalidArgumentError(f"input {name!r} must be a tensor, got a sequence of {len(value)}")
            tensors[name] = value
        names = [output.name for output in self._described_outputs()]
        restricted = is_restricted(run_options)
        mode = False if run_options is not None and not getattr(run_options, "training_mode", True) else None
        indices = [names.index(name) for name, _ in outputs]
        trains = not restricted or max(indices, default=0) >= self._classic.model_output_count()
        with reporting(self._world if trains and not self._has_trainer else None):
            found = self._classic.run(
                tensors,
                [(index, buffer) for index, (_, buffer) in zip(indices, outputs, strict=True)],
                restricted=restricted,
                training_mode=mode,
            )
        results: list[Native] = []
        for (_, buffer), returned in zip(outputs, found, strict=True):
            result = buffer if returned is None else returned
            assert result is not None
            results.append(result)
        return results

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the weights and of their optimizer state, by name.

        >>> sorted(classic_session.get_state())
        ['Moment_1_fc2.bias', 'Moment_2_fc2.bias', 'Update_Count_fc2.bias', 'fc2.bias']
        """
        return _arrays(self._classic.state())

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Return the weights under ``full_precision`` and, on request, float16 copies under ``mixed_precision``.

        >>> classic_session.get_model_state()["full_precision"]["fc2.bias"].shape
        (10,)
        """
        states = self._classic.model_state(include_mixed_precision_weights)
        return {name: _arrays(states[name]) for name in sorted(states)}

    def get_optimizer_state(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Return the optimizer state by weight, as :meth:`TrainingParameters.set_optimizer_initial_state` takes it.

        >>> classic_session.get_optimizer_state()["fc2.bias"]["Update_Count"]
        array([1])
        """
        states = self._classic.optimizer_state()
        return {name: _arrays(states[name]) for name in sorted(states)}

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """Return the shapes of weights with an optimizer state that ZeRO divides among several processes.

        Returns:
            for each of these weights ``{"original_dim": shape, "megatron_row_partition": [-1]}``. The weights with a
            part on this process are listed. An empty dict without ZeRO.

        >>> classic_session.get_partition_info_map()
        {}

        """
        shapes = self._classic.shared_weights()
        return {name: {"original_dim": shapes[name], "megatron_row_partition": [-1]} for name in sorted(shapes)}

    def memory(self) -> MemoryUse:
        """Return the bytes that the session holds now; after a run, these are all bytes of the run.

        >>> memory = classic_session.memory()
        >>> memory.parameters == memory.gradients, memory.moments == 2 * memory.gradients
        (True, True)

        """
        from ortrain.api.profile import MemoryUse

        return record_of(MemoryUse, self._classic.memory())

    def communication_time(self) -> CommunicationTime:
        """Return the time that several processes have needed to exchange gradients.

        >>> classic_session.communication_time()
        CommunicationTime(updates=0, total=0.0, waited=0.0)

        """
        return record_of(CommunicationTime, self._classic.communication_time())

    def load_state(self, dict: Mapping[str, npt.ArrayLike], strict: bool = False) -> None:  # noqa: A002
        """Set some or all values of :meth:`get_state`. With ``strict`` an unknown name is an error.

        Raises:
            OrtrainError: for a value of another type or shape, and with ``strict`` for an unknown name. Nothing has
                changed then.

        >>> classic_session.load_state({"fc2.bias": np.zeros(10, np.float32)})
        >>> classic_session.load_state({"fc9.bias": np.zeros(10, np.float32)}, strict=True)
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: the session has no state "fc9.bias"; did you mean "fc2.bias"?

        """
        if not isinstance(dict, Mapping):
            raise TypeError(f"a state must be a dict of arrays, got {type(dict).__name__}")
        self._classic.load_state({name: native_value(np.asarray(value)) for name, value in dict.items()}, bool(strict))

    def is_output_fp32_node(self, output_name: str) -> bool:
        """Return True if a node computes the value and the value is float32.

        The nodes include the gradients and the optimizer. The names of the optimizer's results are in the file of
        :attr:`TrainingParameters.model_with_training_graph_path`.

        Raises:
            OrtrainError: if no node computes the value.

        >>> classic_session.is_output_fp32_node("logits")
        True
        >>> classic_session.is_output_fp32_node("fc2.bias_grad_Step_Out")
        False

        """
        is_float32 = self._optimizer_results().get(output_name)
        return self._classic.is_output_fp32_node(output_name) if is_float32 is None else is_float32

    def _optimizer_results(self) -> dict[str, bool]:
        """Return the results of the optimizer's nodes by name, with True for float32."""
        ending = _UPDATED.get(self._optimizer_name)
        if ending is None:
            return {}
        states = self._classic.model_state(True)
        weights, copies = states["full_precision"], states.get("mixed_precision", {})
        results = {f"{name}_{ending}": value for name, value in weights.items()}
        if self._optimizer_name != "SGDOptimizer":
            results |= {f"{name}_fp16_{ending}": value for name, value in copies.items()}
        for weight, state in self._classic.optimizer_state().items():
            for name, value in state.items():
                if weight not in weights:
                    results[f"{name}_Out"] = value
                elif name == "Update_Count":
                    results[f"{weight}_grad_Step_Out"] = value
                else:
                    results[f"{name}_{weight}_Out"] = value
        return {name: value.data_type() == "tensor(float)" for name, value in results.items()}

    def set_providers(
        self,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Keep the provider of the session. Another provider is an error, and the session stays as it is.

        Raises:
            UnsupportedError: for another provider.

        >>> classic_session.set_providers(["CPUExecutionProvider"])

        """
        super().set_providers(providers, provider_options)
