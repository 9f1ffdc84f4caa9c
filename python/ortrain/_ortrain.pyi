"""Compiled core. The package around it is the public interface; do not use this module directly."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt

from ortrain._operators import Source

__all__ = [
    "CheckpointState",
    "ClassicSession",
    "DeviceArray",
    "ForwardBackward",
    "GradientGraph",
    "InferenceSession",
    "LinearLRScheduler",
    "LiveForward",
    "LrScheduler",
    "ModelChanges",
    "Module",
    "OperatorLibrary",
    "Optimizer",
    "OrtDevice",
    "OrtValue",
    "OrtValueCache",
    "OrtValueVector",
    "OwnOptimizer",
    "Profile",
    "RankControl",
    "RunOptions",
    "Schedule",
    "TrainingSession",
    "__version__",
    "checkpoint_initializers",
    "curve_steps",
    "declarations",
    "described_optimizer",
    "device_name",
    "devices",
    "draw_curve",
    "dump",
    "generate_artifacts",
    "grad",
    "initializers",
    "inspect",
    "loss_fragment",
    "open_batch",
    "operators",
    "optimizer_model",
    "optimizer_spec",
    "optimizer_table",
    "replace_head",
    "save_checkpoint",
    "schedule_kinds",
    "training_models",
    "vjp",
    "with_initializers",
]

__version__: Final[str]

@final
class OrtValue:
    @staticmethod
    def from_numpy(array: npt.NDArray[Any]) -> OrtValue:
        """Return a value with a private copy of the array."""

    @staticmethod
    def ortvalue_from_numpy(array: npt.NDArray[Any], device: OrtDevice) -> OrtValue: ...
    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(array: npt.NDArray[Any], onnx_element_type: int) -> OrtValue: ...
    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: npt.DTypeLike | int, device: OrtDevice
    ) -> OrtValue: ...
    @staticmethod
    def ortvalue_from_pointer(
        pointer: int,
        element_type: npt.DTypeLike | int,
        shape: Sequence[int],
        device: OrtDevice,
        owner: object | None = None,
    ) -> OrtValue:
        """Return a value in the memory at an address. The owner, or else the caller, keeps the memory valid."""

    @staticmethod
    def from_dlpack(data: Any, is_bool_tensor: bool = False) -> OrtValue: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def array(self) -> npt.NDArray[Any]:
        """Return a copy as a new array."""

    def shape(self) -> list[int]: ...
    def data_type(self) -> str: ...
    def element_type(self) -> int: ...
    def proto_type(self) -> int: ...
    def device_name(self) -> str: ...
    def data_ptr(self) -> int: ...
    def is_tensor(self) -> bool: ...
    def has_value(self) -> bool: ...
    def is_tensor_sequence(self) -> bool: ...
    def is_sparse_tensor(self) -> bool: ...
    def update_inplace(self, data: npt.NDArray[Any] | OrtValue) -> None: ...
    def is_shared(self) -> bool:
        """Return True if arrays, tensors of other libraries or other values share the memory that this value gave."""

    def to_dlpack(self) -> Any: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

@final
class OrtDevice:
    def __new__(cls, device_type: int, memory: int, device_id: int) -> OrtDevice: ...
    @staticmethod
    def cpu() -> int: ...
    @staticmethod
    def cuda() -> int: ...
    @staticmethod
    def default_memory() -> int: ...
    def device_type(self) -> int: ...
    def device_id(self) -> int: ...
    def mem_type(self) -> int: ...
    def __hash__(self) -> int: ...

@final
class OrtValueVector:
    def __new__(cls) -> OrtValueVector: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __getitem__(self, index: int, /) -> OrtValue: ...
    def __iter__(self) -> Iterator[OrtValue]: ...
    def push_back(self, ortvalue: Any, is_bool_tensor: bool = False) -> None: ...
    def push_back_batch(
        self,
        tensors: Sequence[Any],
        data_ptrs: Sequence[int],
        element_types: Sequence[npt.DTypeLike | int],
        shapes: Sequence[Sequence[int]],
        devices: Sequence[OrtDevice],
    ) -> None: ...
    def reserve(self, count: int) -> None: ...
    def _fill(self, values: Sequence[OrtValue]) -> None: ...
    def shrink_to_fit(self) -> None: ...
    def dlpack_at(self, index: int) -> Any: ...
    def to_dlpacks(self, to_tensor: Callable[[Any], Any] | None = None) -> list[Any]: ...
    def element_type_at(self, index: int) -> int: ...
    def bool_tensor_indices(self) -> list[int]: ...

@final
class OrtValueCache:
    def __new__(cls) -> OrtValueCache: ...
    def __len__(self) -> int: ...
    def insert(self, name: str, ortvalue: Any) -> None: ...
    def keys(self) -> list[str]: ...
    def clear(self) -> None: ...
    def count(self, name: str) -> int: ...
    def remove(self, name: str) -> None: ...

def devices() -> list[tuple[str, str, str, str, int | None, int | None, int | None]]:
    """Return name, kind, description, driver, and the bytes of the memory, of a plane and of a tensor."""

def device_name(device: str) -> str: ...

@final
class DeviceArray:
    @property
    def shape(self) -> tuple[int]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def device(self) -> str: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def copy_from(self, array: Any) -> None: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...

@final
class CheckpointState:
    @staticmethod
    def load(path: str) -> CheckpointState: ...
    @staticmethod
    def from_bytes(content: bytes) -> CheckpointState: ...
    @staticmethod
    def of_values(
        parameters: list[tuple[str, OrtValue, bool]],
        slots: dict[str, dict[str, OrtValue]],
        *,
        step: int,
        train_step: int,
        learning_rate: float | None,
    ) -> CheckpointState:
        """Make a state from values: name, value, and True for a trained parameter.

        Slots are keyed by parameter, then by name.
        """

    def to_bytes(self, include_optimizer_state: bool) -> bytes: ...
    def save(self, path: str, include_optimizer_state: bool, external_above: int | None = None) -> None:
        """Write the state. Tensors of more than ``external_above`` bytes in all are stored in a separate file."""

    def device(self) -> str: ...
    def to(self, device: str) -> None: ...
    def load_parameters(self, path: str, strict: bool) -> tuple[list[str], list[str], list[str]]:
        """Return the names that were loaded, the missing names, and the unexpected names."""

    def load_safetensors(
        self, path: str, names: dict[str, str], strict: bool
    ) -> tuple[list[str], list[str], list[str]]:
        """Load parameters, as :meth:`load_parameters` does."""

    def save_safetensors(self, path: str, names: dict[str, str]) -> None: ...
    def require_values(self) -> None: ...
    def parameter_names(self) -> list[str]: ...
    def has_parameter(self, name: str) -> bool: ...
    def requires_grad(self, name: str) -> bool: ...
    def type_of(self, name: str) -> tuple[str, list[int] | None]:
        """Return the element type, and the shape if it is known."""

    def is_nominal(self) -> bool: ...
    def seed(self) -> int: ...
    def set_seed(self, seed: int) -> None: ...
    def steps(self) -> tuple[int, int]:
        """Return the number of training steps and the number of optimizer steps."""

    def scheduler(self) -> str | None:
        """Return the scheduler of the learning rate, as text."""

    def learning_rate(self) -> float | None:
        """Return the learning rate; ``None`` before an optimizer was made."""

    def parameter(self, name: str) -> npt.NDArray[Any]: ...
    def set_parameter(self, name: str, value: OrtValue) -> None: ...
    def gradient(self, name: str) -> npt.NDArray[Any] | None: ...
    def slots(self, name: str) -> list[tuple[str, OrtValue]]: ...
    def average(self, name: str) -> OrtValue: ...
    def averaged(self) -> CheckpointState: ...
    def layout(
        self,
    ) -> tuple[
        list[tuple[str, int, list[tuple[str, list[int], int]]]],
        list[tuple[str, int, list[tuple[str, list[int], int]]]],
    ]:
        """Return trainable and frozen planes: type, elements, and for each tensor name, shape and first element."""

    def planes(self, trainable: bool) -> list[Any]: ...
    def property_names(self) -> list[str]: ...
    def property(self, name: str) -> int | float | str | None: ...
    def set_property(self, name: str, value: int | float | str) -> None: ...

@final
class RunOptions:
    def __new__(
        cls,
        *,
        device: str = "cpu",
        num_threads: int = 0,
        memory_limit: int | None = None,
        iteration_limit: int | None = None,
        precision: str = "f32",
        bf16_fallback: str = "none",
        detect_anomaly: bool = False,
    ) -> RunOptions: ...

@final
class Module:
    def __new__(
        cls,
        train_model: str | bytes,
        state: CheckpointState,
        eval_model: str | bytes | None,
        *,
        options: RunOptions,
    ) -> Module: ...
    def profile(self, inputs: Sequence[OrtValue], training: bool, steps: int, warmup: int) -> Profile: ...
    def precision(self) -> tuple[str, str | None]:
        """Return the name of the precision, and the unit that multiplies bfloat16."""

    def memory(self) -> list[int]:
        """Return the bytes of parameters, gradients, arena and scratch."""

    def memory_of(self, inputs: Sequence[OrtValue], training: bool) -> list[int]:
        """Return the same numbers for a step on these inputs."""

    def step(self, inputs: Sequence[OrtValue], training: bool) -> list[OrtValue]: ...
    def inputs(self, training: bool) -> list[tuple[str, str, list[int | str | None]]]:
        """Return name, type and shape of each input."""

    def lazy_reset_grad(self) -> None: ...
    def input_names(self, training: bool) -> list[str]: ...
    def output_names(self, training: bool) -> list[str]: ...
    def parameters_size(self, trainable_only: bool) -> int: ...
    def copy_parameters_to_buffer(self, trainable_only: bool) -> OrtValue: ...
    def copy_buffer_to_parameters(self, buffer: OrtValue, trainable_only: bool) -> None: ...
    def copy_gradients_to_buffer(self) -> OrtValue: ...
    def copy_buffer_to_gradients(self, buffer: OrtValue) -> None: ...
    def norms(self) -> list[tuple[str, float, float]]:
        """Return name, norm and gradient norm of each trained parameter."""

    def gradient_planes(self) -> list[Any]: ...
    def export_model_for_inferencing(
        self, path: str, output_names: Sequence[str], external_above: int | None = None, average: bool = False
    ) -> None: ...

@final
class Profile:
    def instructions(self) -> list[tuple[str, str, str, str, int, float, float, float, int, int, float]]:
        """Return the fields of :class:`ortrain.api.Instruction` for each instruction."""

    def steps(self) -> list[float]: ...
    def limits(self) -> tuple[float, float]:
        """Return the operations and bytes per second that the machine can do at most."""

    def memory(self) -> int: ...
    def planning(self) -> list[tuple[str, float]]:
        """Return the parts of planning for new shapes, in order, and the seconds of each part."""

    def table(self) -> str: ...
    def chrome_trace(self, path: str) -> None: ...

@final
class Optimizer:
    def __new__(cls, model: str | bytes, module: Module, *, replace: bool = False) -> Optimizer: ...
    def step(self) -> tuple[str | None, float | None]:
        """Run a step. Return a warning about the gradients, if there is one, and the norm of clipped gradients."""

    def spec(self) -> str:
        """Return the current description of the optimizer, as JSON."""

    def change(self, text: str) -> None: ...
    def learning_rate(self) -> float: ...
    def step_count(self) -> int: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...

@final
class Schedule:
    def __new__(cls, name: str, settings: list[tuple[str, object]]) -> Schedule: ...
    @staticmethod
    def parse(text: str) -> Schedule:
        """Parse the text of a schedule."""

    def name(self) -> str: ...
    def text(self) -> str: ...
    def warmup(self) -> int: ...
    def span(self) -> int: ...
    def takes(self) -> str | None:
        """Return the kind of value that a step needs: `metric`, `factor`, or ``None``."""

    def factor(self, t: int, decided: float) -> float:
        """Return the factor after `t` steps, with `decided` as the factor of a metric or function."""

@final
class LrScheduler:
    def __new__(cls, optimizer: Optimizer, schedule: Schedule, lr: float) -> LrScheduler: ...
    @staticmethod
    def resume(optimizer: Optimizer) -> LrScheduler:
        """Return the scheduler that the checkpoint was saved with."""

    def step(self, value: float | None) -> None:
        """Run a step, with a metric or a factor if the schedule needs one."""

    def schedule(self) -> Schedule: ...
    def lr(self) -> float: ...

def schedule_kinds() -> list[tuple[str, list[tuple[str, str | None]]]]:
    """Return the names of all schedules, with their settings and the defaults of the settings."""

def curve_steps(last: int) -> list[int]:
    """Return the steps that a curve shows, from 0 to the last one."""

def draw_curve(factors: Sequence[float], last: int) -> str:
    """Draw a curve as text."""

@final
class LinearLRScheduler:
    def __new__(
        cls, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> LinearLRScheduler: ...
    def step(self) -> None: ...

@final
class TrainingSession:
    def __new__(
        cls,
        state: CheckpointState,
        train_model: str | bytes,
        eval_model: str | bytes | None,
        optimizer_model: str | bytes | None,
        *,
        options: RunOptions,
    ) -> TrainingSession: ...
    def close(self) -> None: ...
    def check_open(self) -> None: ...
    def step(self, inputs: Sequence[OrtValue], training: bool) -> list[OrtValue]: ...
    def step_into(self, inputs: Sequence[OrtValue], outputs: Sequence[npt.NDArray[Any]], training: bool) -> None: ...
    def inputs(self, training: bool) -> list[tuple[str, str, list[int | str | None]]]:
        """Return name, type and shape of each input."""

    def lazy_reset_grad(self) -> None: ...
    def optimizer_step(self) -> tuple[str | None, float | None]:
        """Run a step. Return a warning about the gradients, if there is one, and the norm of clipped gradients."""

    def precision(self) -> tuple[str, str | None]: ...
    def learning_rate(self) -> float: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...
    def register_linear_lr_scheduler(
        self, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None: ...
    def register_lr_scheduler(self, schedule: Schedule, lr: float) -> None: ...
    def resume_lr_scheduler(self) -> Schedule | None: ...
    def scheduler_step(self, value: float | None) -> None:
        """Run a step of the scheduler, with a metric or a factor if the schedule needs one."""

    def spec(self) -> str:
        """Return the current description of the optimizer, as JSON."""

    def change(self, text: str) -> None: ...
    def step_count(self) -> int: ...
    def parameters_size(self, only_trainable: bool) -> int: ...
    def to_buffer(self, only_trainable: bool) -> OrtValue: ...
    def from_buffer(self, buffer: OrtValue, only_trainable: bool | None) -> None: ...
    def input_names(self, training: bool) -> list[str]: ...
    def output_names(self, training: bool) -> list[str]: ...
    def export_model_for_inferencing(
        self, path: str, output_names: Sequence[str], external_above: int | None = None, average: bool = False
    ) -> None: ...
    def set_seed(self, seed: int) -> None: ...

@final
class LiveForward:
    def bytes(self) -> int:
        """Return the number of bytes that the pass holds."""

@final
class ForwardBackward:
    def __new__(
        cls,
        model: Source,
        weights: list[str] | None = None,
        inputs: list[str] | None = None,
        *,
        training: str | None,
        seed: int,
        options: RunOptions,
    ) -> ForwardBackward: ...
    @staticmethod
    def of_session(session: InferenceSession) -> ForwardBackward:
        """Return the passes of a session's training graph."""

    def inputs(self) -> list[tuple[str, str, list[int | str | None]]]:
        """Return name, type and shape of each input."""

    def outputs(self) -> list[tuple[str, str, list[int | str | None]]]: ...
    def differentiable_outputs(self) -> list[str]: ...
    def differentiable_inputs(self) -> list[str]: ...
    def weight_names(self) -> list[str]: ...
    def initial_weights(self) -> list[OrtValue]: ...
    def random_nodes(self) -> list[str]:
        """Return the nodes that draw random numbers in a forward pass, as messages name them."""

    def statistics(self) -> list[tuple[str, OrtValue]]:
        """Return the running statistics that forward passes update. The values share their memory."""

    def gradient_names(self) -> list[str]:
        """Return the names of the gradients: gradients of inputs first, then of weights."""

    def live_bytes(self) -> int: ...
    def training_model(self) -> bytes: ...
    def evaluation_model(self) -> bytes: ...
    def dump(self) -> str: ...
    def forward(
        self, inputs: Sequence[OrtValue], weights: Sequence[OrtValue]
    ) -> tuple[LiveForward, list[OrtValue]]: ...
    def backward(
        self, live: LiveForward, gradients: Sequence[OrtValue], into: Sequence[OrtValue] | None = None
    ) -> list[OrtValue]:
        """Return gradients of inputs, then of weights. Values of ``into`` are the memory for gradients of weights."""

    def evaluate(self, inputs: Sequence[OrtValue], weights: Sequence[OrtValue]) -> list[OrtValue]: ...

def initializers(model: Source) -> list[tuple[str, OrtValue]]:
    """Return the initializers of a model's graph with their names, in the order of the graph."""

def with_initializers(model: Source, values: Sequence[tuple[str, OrtValue]]) -> bytes:
    """Return the model with new values in some of its initializers."""

@final
class OperatorLibrary:
    def add_function(self, function: bytes) -> None: ...
    def add_gradient(self, domain: str, operator: str, node: str | None, function: bytes) -> None: ...

@final
class ModelChanges:
    def __new__(cls) -> ModelChanges: ...
    def initializer(self, name: str, value: OrtValue) -> None: ...
    def size(self, name: str, size: int) -> None: ...
    def size_of_denotation(self, denotation: str, size: int) -> None: ...
    def stop_gradients(self, values: list[str]) -> None: ...

@final
class RankControl:
    def __new__(cls, communicator: Any) -> RankControl: ...
    def exchange_count(self) -> int: ...
    def failed(self, sentence: str) -> None: ...
    def leave(self) -> None: ...

@final
class ClassicSession:
    def __new__(
        cls,
        model: Source,
        parameters: dict[str, Any],
        seed: int | None,
        *,
        options: RunOptions,
        ranks: tuple[RankControl, Any, int, str, bool] | None,
    ) -> ClassicSession: ...
    def precision(self) -> tuple[str, str | None]: ...
    def inputs(self) -> list[tuple[str, str, list[int | str | None]]]: ...
    def outputs(self) -> list[tuple[str, str, list[int | str | None]]]: ...
    def overridable(self) -> list[tuple[str, str, list[int | str | None]]]: ...
    def meta(self) -> tuple[list[str], int, dict[str, str]]: ...
    def loss_scale_input_name(self) -> str | None: ...
    def is_output_fp32_node(self, name: str) -> bool: ...
    def run(
        self,
        feeds: dict[str, OrtValue],
        outputs: Sequence[tuple[int, OrtValue | None]],
        *,
        restricted: bool,
        training_mode: bool | None,
    ) -> list[OrtValue | None]:
        """Compute the outputs at these positions, in their values. Return ``None`` for these, else new values."""

    def state(self) -> dict[str, OrtValue]: ...
    def model_state(self, include_mixed_precision_weights: bool) -> dict[str, dict[str, OrtValue]]: ...
    def optimizer_state(self) -> dict[str, dict[str, OrtValue]]: ...
    def memory(self) -> list[int]: ...
    def model_output_count(self) -> int: ...
    def communication_time(self) -> tuple[int, float, float]: ...
    def shared_weights(self) -> dict[str, list[int]]: ...
    def updated_elements(self, weight: str) -> tuple[int, int]: ...
    def load_state(self, state: dict[str, OrtValue], strict: bool) -> None: ...
    def gathered(self) -> dict[str, OrtValue]:
        """Return the gradients summed so far for the next update, by weight."""

    def load_gathered(self, sums: dict[str, OrtValue]) -> None: ...
    def running_statistics(self) -> dict[str, OrtValue]: ...
    def load_running_statistics(self, given_values: dict[str, OrtValue]) -> None: ...
    def train_steps(self) -> int:
        """Return the number of runs that computed gradients."""

    def set_train_steps(self, count: int) -> None: ...
    def set_seed(self, seed: int) -> None: ...
    def begin_trace(self) -> None: ...
    def end_trace(self) -> str | None: ...
    def dump(self) -> str: ...

@final
class InferenceSession:
    def __new__(
        cls,
        model: Source,
        *,
        options: RunOptions,
        optimized_model: str | None = None,
    ) -> InferenceSession: ...
    def precision(self) -> tuple[str, str | None]:
        """Return the name of the precision, and the unit that multiplies bfloat16."""

    def inputs(self) -> list[tuple[str, str, list[int | str | None]]]:
        """Return name, type and shape of each input."""

    def outputs(self) -> list[tuple[str, str, list[int | str | None]]]: ...
    def overridable(self) -> list[tuple[str, str, list[int | str | None]]]:
        """Return the initializers that a run may override."""

    def set_device(self, device: str, num_threads: int) -> None:
        """Move the session to another device."""

    def begin_trace(self) -> None: ...
    def end_trace(self) -> str | None:
        """Return the recorded events of runs, as JSON."""

    def meta(self) -> tuple[list[str], int, dict[str, str]]:
        """Return producer, graph, domain, description and graph description; the version; further entries."""

    def run(
        self, feeds: dict[str, OrtValue | list[OrtValue]], only: list[int] | None
    ) -> list[OrtValue | list[OrtValue]]: ...
    def run_into(
        self,
        feeds: dict[str, OrtValue | list[OrtValue]],
        outputs: Sequence[tuple[int, OrtValue | None]],
        *,
        restricted: bool = True,
    ) -> list[OrtValue | list[OrtValue] | None]:
        """Compute the outputs at these positions, in their values. Return ``None`` for these, else new values."""

def generate_artifacts(
    model: Source,
    *,
    requires_grad: Sequence[str],
    frozen_params: Sequence[str],
    losses: Sequence[dict[str, Any]],
    optimizer: str | None,
    optimizer_model: bytes | None,
    directory: str,
    prefix: str,
    additional_output_names: Sequence[str],
    nominal_checkpoint: bool,
    loss_input_names: Sequence[str],
    batch_norm: str,
    external_above: int | None,
    optimizer_settings: dict[str, Any] | None,
    master_weights: bool = False,
    optimizer_spec: str | None = None,
    own_optimizer: OwnOptimizer | None = None,
) -> list[str]:
    """Write the artifacts. Return warnings about settings that are probably not intended, a sentence each."""

def dump(model: Source, stage: str, shapes: dict[str, list[int]]) -> str: ...
def loss_fragment(model: Source, term: dict[str, Any], target_is_there: bool, last: int) -> tuple[bytes, str, int]:
    """Return a model with the nodes, the name of the loss, and the last number in generated names."""

def declarations(model: Source, names: Sequence[str]) -> bytes:
    """Return a model with the known types of these values in ``value_info``."""

@final
class GradientGraph:
    def __new__(
        cls, model: bytes, y: list[str], x: list[str], loss: str, plain: bool, stops: list[str]
    ) -> GradientGraph: ...
    def build(self) -> None: ...
    def get_model(self) -> bytes: ...
    def save(self, path: str) -> None: ...

def grad(model: Source, of: list[str], wrt: list[str], plain: bool) -> bytes: ...
def vjp(model: Source, of: list[str], wrt: list[str], plain: bool) -> bytes: ...

@final
class OwnOptimizer:
    def __new__(
        cls, function: bytes, settings: dict[str, float], learning_rate: float, starts: dict[str, str]
    ) -> OwnOptimizer: ...
    def spec(self, text: str) -> str:
        """Return a description of the optimizer, checked and with all defaults."""

def optimizer_table() -> list[
    tuple[
        str,
        str,
        str,
        float,
        list[tuple[str, str]],
        list[tuple[str, float, str, str]],
        list[tuple[str, bool, str]],
    ]
]:
    """Return rows of name, summary, source, rate, slots, settings and flags."""

def described_optimizer(
    spec: str, own: OwnOptimizer | None, dtypes: list[int], opset: int, last: int
) -> tuple[bytes, int]:
    """Return the optimizer model of a description, and the last number in generated names."""

def optimizer_spec(text: str) -> str:
    """Return a description of an optimizer, checked and with all defaults."""

def open_batch(model: Source) -> bytes: ...
def replace_head(model: Source, classes: int, output: str | None, seed: int) -> bytes: ...
def optimizer_model(
    optimizer: str,
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    formula: str,
    opset: int,
    last: int,
) -> tuple[bytes, int]:
    """Return the model, and the last number in generated names."""

def training_models(
    model: Source,
    *,
    requires_grad: Sequence[str],
    input_gradients: Sequence[str],
    frozen_params: Sequence[str],
    additional_output_names: Sequence[str],
    batch_norm: str,
) -> tuple[bytes, bytes]:
    """Return the training model and the eval model."""

def save_checkpoint(trainable: str | bytes, frozen: str | bytes, path: str, only_names: bool) -> None: ...
def checkpoint_initializers(path: str) -> bytes:
    """Return a model with the parameters as initializers."""

def operators() -> list[
    tuple[
        str,
        str,
        bool,
        list[int],
        Literal["row", "instructions", "decomposition", "host", "control flow"],
        tuple[Literal["full", "partial", "zero", "none"], list[int]],
        list[list[str]],
        bool,
    ]
]:
    """Return the fields of :class:`ortrain.OperatorInfo` for each operator."""

def inspect(
    model: Source,
    values: Sequence[str],
    first_output: bool,
    *,
    strict: bool,
    batch_size: int | None,
    shapes: Sequence[tuple[str, Sequence[int]]],
) -> tuple[str, str, str]:
    """Return the report as JSON, as short text and as complete text.

    With ``strict``, an invalid operator of the model is an error.
    """
