"""Construction of a trainer's session: parameters, providers and files, from options and an optimizer's config."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ortrain import _ortrain
from ortrain._devices import device_of_provider, provider_names
from ortrain._model_source import model_source
from ortrain._options import SessionOptions
from ortrain._stacklevel import level_of_user
from ortrain._suggest import hint
from ortrain._world import World, open_world, warn_of_no_effect
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.errors import DeviceUnavailableError, InvalidArgumentError, UnsupportedError
from ortrain.inference import InferenceSession
from ortrain.trainer.distributed import Topology

if TYPE_CHECKING:
    from onnx import ModelProto

    from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
    from ortrain.trainer.optim.config import _OptimizerConfig
    from ortrain.trainer.orttrainer_options import ORTTrainerOptions

__all__ = ["States", "check_world", "make_session", "providers_of"]

# Initial state of the optimizer: arrays by weight, then by name of the state.
States = Mapping[str, Mapping[str, npt.NDArray[Any]]]

# Provider for the device id ``cpu``.
_CPU = "CPUExecutionProvider"
_DEFAULT_DEVICE = "cuda"
# Attribute of options after the warning about the default device, so that the warning appears once.
_WARNED = "_warned_of_device"
# Optimizer settings with integer values (choices). All other settings are floats.
_CHOICES = ("do_bias_correction", "weight_decay_mode")
# Keys of a group that are not settings.
_OF_GROUPS = ("params", "lr")


_RANKS = ("world_rank", "local_rank", "world_size", "data_parallel_size")


def check_world(options: ORTTrainerOptions) -> World | None:
    """Returns the ranks that train together, and sets the options to the values of MPI; ``None`` for one process.

    Raises:
        InvalidArgumentError: for sizes that do not fit the number of ranks.
        UnsupportedError: for sizes above 1 in one process, and for settings that divide a model among processes; for
            several processes of a launcher (``mpiexec``, ``srun``) that cannot form one training.

    Warns:
        UserWarning: for options that differ from MPI, and for ZeRO or Adasum in one process.

    """
    distributed: Any = options.distributed
    pipeline = distributed.pipeline_parallel
    world = open_world({name: getattr(distributed, name) for name in _RANKS}, "distributed.")
    sizes = {
        "distributed.horizontal_parallel_size": distributed.horizontal_parallel_size,
        "distributed.pipeline_parallel.pipeline_parallel_size": pipeline.pipeline_parallel_size,
        "distributed.pipeline_parallel.num_pipeline_micro_batches": pipeline.num_pipeline_micro_batches,
    }
    if world is not None:
        # Sizes that do not fit the number of ranks are an error of their own.
        Topology(
            world.size,
            distributed.horizontal_parallel_size,
            pipeline_parallel_size=pipeline.pipeline_parallel_size,
        )
    for name, size in sizes.items():
        if size != 1:
            raise UnsupportedError(f"{name} must be 1, got {size}: ortrain does not divide a model among processes")
    for name in ("pipeline_cut_info_string", "sliced_schema", "sliced_axes", "sliced_tensor_names"):
        value = getattr(pipeline, name)
        # A dictionary in the options is wrapped in an object with the attribute ``_validated_opts``.
        if getattr(value, "_validated_opts", value):
            raise UnsupportedError(
                f"distributed.pipeline_parallel.{name} must not be set: it divides a model among processes, which "
                "ortrain does not support"
            )
    if world is None:
        distributed.data_parallel_size = 1
        warn_of_no_effect(
            {
                "distributed.deepspeed_zero_optimization.stage": distributed.deepspeed_zero_optimization.stage,
                "distributed.enable_adasum": distributed.enable_adasum,
            }
        )
    else:
        for name in _RANKS:
            setattr(distributed, name, world.sizes()[name])
    return world


def providers_of(options: ORTTrainerOptions) -> list[tuple[str, dict[Any, Any]]]:
    """Returns the providers of a trainer: providers named in the options, then the provider of the device.

    Raises:
        InvalidArgumentError: if the settings of a provider are not a dict.
        UnsupportedError: for an unknown device name.
        DeviceUnavailableError: for a device that this machine does not have.

    Warns:
        UserWarning: if the options choose no device, and the default, a GPU through CUDA, is not available. The CPU
            trains. Shown once per options object.

    """
    provider_options = options._validated_opts["provider_options"]
    for name, settings in provider_options.items():
        if settings is not None and not isinstance(settings, Mapping):
            raise InvalidArgumentError(f"provider_options[{name!r}] must be a dict of settings, got {settings!r}")
    named = [(name, dict(settings or {})) for name, settings in provider_options.items()]
    device = options.device.id
    last = _default_provider(options, warns=not named) if not _is_chosen(options) else _provider_of(device)
    return named if any(name == last for name, _ in named) else [*named, (last, {})]


def _default_provider(options: ORTTrainerOptions, *, warns: bool) -> str:
    """Returns the provider for the device of options that choose none: the first GPU through CUDA, or the CPU."""
    try:
        return _ortrain.device_name(_DEFAULT_DEVICE)
    except DeviceUnavailableError as error:
        if warns and not vars(options).get(_WARNED):
            vars(options)[_WARNED] = True
            warnings.warn(
                f"device.id is {_DEFAULT_DEVICE!r} by default, but {error}. This trainer runs on the CPU; set "
                "ORTTrainerOptions({'device': {'id': 'cpu'}}) to avoid this warning, or 'auto' for a GPU",
                UserWarning,
                stacklevel=level_of_user(),
            )
        return _CPU


def _provider_of(device: Any) -> str:
    """Returns the provider for a device in the options."""
    names = provider_names()
    name = device_of_provider(str(device).lower())
    if name is None:
        raise UnsupportedError(
            f"unknown device.id {device!r}; expected one of {', '.join(map(repr, names))}{hint(device, names)}"
        )
    try:
        known = _ortrain.device_name(name)
    except DeviceUnavailableError as error:
        raise DeviceUnavailableError(f"device.id is {device!r}: {error}") from None
    return _CPU if known == "cpu" else known


def _is_chosen(options: ORTTrainerOptions) -> bool:
    """Returns true if the user's dictionary has a device, or the user has set the attribute."""
    device = dict(options._original_opts).get("device")
    has_id = isinstance(device, Mapping) and device.get("id") is not None
    return has_id or "device" in options._assigned or "id" in getattr(options.device, "_assigned", ())


def make_session(
    model: ModelProto,
    description: _ORTTrainerModelDesc,
    config: _OptimizerConfig,
    options: ORTTrainerOptions,
    providers: list[tuple[str, dict[Any, Any]]],
    precision: str | None,
    states: States,
) -> TrainingSession:
    """Builds a session that trains a model with these options.

    Args:
        model: the forward model.
        description: the inputs and outputs of the model.
        config: the optimizer.
        options: the options.
        providers: the execution providers, with their settings.
        precision: the compute type of mixed precision, ``"float16"`` or ``"bfloat16"``; ``None`` keeps the model's
            types.
        states: initial state of the optimizer.

    """
    source = model_source(model)
    parameters = _parameters(model, description, config, options)
    if precision is not None:
        _check_float32(model, parameters.weights_not_to_train)
        parameters.use_mixed_precision = True
    if precision == "bfloat16":
        parameters.mixed_precision_dtype = precision
    parameters.set_optimizer_initial_state(states)
    paths: Any = options.debug.graph_save_paths
    parameters.model_after_graph_transforms_path = paths.model_after_graph_transforms_path
    parameters.model_with_gradient_graph_path = paths.model_with_gradient_graph_path
    parameters.model_with_training_graph_path = paths.model_with_training_graph_path
    optimized = paths.model_with_training_graph_after_optimization_path
    session_options = options.session_options
    if not optimized:
        return TrainingSession(source, parameters, session_options, providers)
    with tempfile.TemporaryDirectory() as folder:
        path = paths.model_with_training_graph_path or str(Path(folder) / "training.onnx")
        parameters.model_with_training_graph_path = path
        session = TrainingSession(source, parameters, session_options, providers)
        of_file = SessionOptions()
        of_file.optimized_model_filepath = os.fspath(optimized)
        InferenceSession(path, of_file)
    return session


def _parameters(
    model: ModelProto,
    description: _ORTTrainerModelDesc,
    config: _OptimizerConfig,
    options: Any,
) -> TrainingParameters:
    """Returns the parameters of a session, from the options and the config of the optimizer."""
    names = [tensor.name for tensor in model.graph.initializer]
    frozen = _frozen(names, options.utils.frozen_weights)
    settings = {name: _settings(name, config) for name in names if name not in frozen}
    parameters = TrainingParameters()
    parameters.loss_output_name = _loss(description)
    parameters.weights_not_to_train = frozen
    parameters.training_optimizer_name = config.name
    parameters.lr_params_feed_name = description.learning_rate.name
    parameters.optimizer_attributes_map = {name: floats for name, (floats, _) in settings.items()}
    parameters.optimizer_int_attributes_map = {name: choices for name, (_, choices) in settings.items()}
    parameters.gradient_accumulation_steps = options.batch.gradient_accumulation_steps
    parameters.enable_grad_norm_clip = options.utils.grad_norm_clip
    parameters.use_memory_efficient_gradient = options.utils.memory_efficient_gradient
    distributed = options.distributed
    # In one process, ``check_world`` has warned of options for several processes.
    if distributed.world_size > 1:
        for name in ("world_rank", "world_size", "data_parallel_size", "allreduce_post_accumulation", "enable_adasum"):
            setattr(parameters, name, getattr(distributed, name))
        parameters.deepspeed_zero_stage = distributed.deepspeed_zero_optimization.stage
    transforms = options.graph_transformer
    parameters.attn_dropout_recompute = transforms.attn_dropout_recompute
    parameters.gelu_recompute = transforms.gelu_recompute
    parameters.transformer_layer_recompute = transforms.transformer_layer_recompute
    parameters.number_recompute_layers = transforms.number_recompute_layers
    parameters.propagate_cast_ops_level = transforms.propagate_cast_ops_config.level
    parameters.propagate_cast_ops_allow = list(transforms.propagate_cast_ops_config.allow)
    return parameters


def _check_float32(model: ModelProto, frozen: Iterable[str]) -> None:
    """Checks that no trained weight is float64, which mixed precision does not support."""
    for tensor in model.graph.initializer:
        if tensor.data_type == tensor.DOUBLE and tensor.name not in frozen:
            raise InvalidArgumentError(
                f"weight {tensor.name!r} is float64, but mixed precision supports only float32: train the model "
                "without mixed_precision.enabled"
            )


def _loss(description: _ORTTrainerModelDesc) -> str:
    losses: list[str] = [output.name for output in description.outputs if output.is_loss]
    if len(losses) != 1:
        raise AssertionError(
            f"Only one loss output is supported ({len(losses)} were specified): exactly one output of model_desc "
            "must be (name, shape, True)"
        )
    return losses[0]


def _frozen(names: list[str], frozen: list[str]) -> set[str]:
    """Returns the frozen weights after a check of their names."""
    unknown = [name for name in frozen if name not in names]
    if unknown:
        listed = ", ".join(map(repr, unknown))
        raise InvalidArgumentError(
            f"utils.frozen_weights has names without an initializer in the model: {listed}{hint(unknown[0], names)}"
        )
    return set(frozen)


def _settings(weight: str, config: _OptimizerConfig) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the float settings and the choices of a weight: from the last group with the weight, or the defaults."""
    own: Mapping[str, Any] = config.defaults
    for group in config.params:
        if weight in group["params"]:
            own = group
    floats: dict[str, float] = {}
    choices: dict[str, int] = {}
    for name, value in own.items():
        if name in _OF_GROUPS:
            continue
        try:
            if name in _CHOICES:
                choices[name] = int(value)
            else:
                floats[name] = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{name} of weight {weight!r} must be a number, got {value!r}") from error
    return floats, choices
