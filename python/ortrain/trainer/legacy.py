"""The older trainer ``onnxruntime.capi.ort_trainer``. Each step can receive its own learning rate and loss scale.

:class:`ortrain.trainer.ORTTrainer` does the training internally, so both trainers give the same weights and losses.

>>> import warnings
>>> from ortrain.trainer.legacy import IODescription, ModelDescription, ORTTrainer
>>> warnings.simplefilter("ignore", FutureWarning)
>>> inputs = [IODescription("x", ["batch", 64]), IODescription("labels", ["batch"])]
>>> description = ModelDescription(inputs, [IODescription("loss", [])])
>>> rate = IODescription("Learning_Rate", [1])
>>> trainer = ORTTrainer(model_with_loss, None, description, "AdamOptimizer", None, rate, "cpu")
>>> losses = [float(trainer.train_step(x, labels, 0.01)) for _ in range(5)]
>>> losses[-1] < losses[0]
True
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._model_source import PathLike
from ortrain._suggest import hint
from ortrain._world import reporting
from ortrain.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from ortrain.trainer import _flat_checkpoint, _state
from ortrain.trainer._arguments import is_onnx_model
from ortrain.trainer._runner import inputs_by_name
from ortrain.trainer._values import as_array, is_torch_module
from ortrain.trainer.amp.loss_scaler import LossScaler as _NewLossScaler
from ortrain.trainer.legacy_loss_scaler import LossScaler
from ortrain.trainer.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import _LRScheduler
from ortrain.trainer.orttrainer import ORTTrainer as _NewORTTrainer
from ortrain.trainer.orttrainer_options import ORTTrainerOptions

if TYPE_CHECKING:
    from ortrain.trainer.train_step_info import TrainStepInfo

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "generate_sample",
    "load_checkpoint",
    "save_checkpoint",
]

_CONFIGS: dict[str, Callable[..., _OptimizerConfig]] = {
    "AdamOptimizer": AdamConfig,
    "LambOptimizer": LambConfig,
    "SGDOptimizer": SGDConfig,
}
# Keyword of the loss scale in scripts that do not read the input name from the trainer.
_DEFAULT_SCALE = "default_loss_scale_input_name"
_LARGEST = float(np.finfo(np.float32).max)


class IODescription:
    """The description of an input, an output or a learning rate. The trainer checks it, not the constructor.

    Args:
        name: the name.
        shape: a list of sizes: numbers, or names of sizes that may differ between calls.
        dtype: the element type, of NumPy or PyTorch, for :func:`generate_sample`. A trainer reads the types from the
            model.
        num_classes: for integers, the number of different values that :func:`generate_sample` draws.

    >>> from ortrain.trainer.legacy import IODescription
    >>> labels = IODescription("labels", ["batch"], np.int64, num_classes=10)
    >>> labels.name_, labels.shape_, labels.num_classes_
    ('labels', ['batch'], 10)

    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: Any = None, num_classes: int | None = None
    ) -> None:
        self.name_, self.shape_, self.dtype_, self.num_classes_ = name, shape, dtype, num_classes

    def __repr__(self) -> str:
        return f"IODescription({self.name_!r}, {self.shape_!r}, {self.dtype_!r}, {self.num_classes_!r})"


class ModelDescription:
    """The descriptions of a model's inputs and outputs. The trainer checks them, not the constructor.

    Args:
        inputs: descriptions of the inputs, in the order of a step's arguments.
        outputs: descriptions of the outputs, in the order of a step's results.

    >>> from ortrain.trainer.legacy import IODescription, ModelDescription
    >>> ModelDescription([IODescription("x", [2])], [IODescription("loss", [])]).outputs_
    [IODescription('loss', [], None, None)]

    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_, self.outputs_ = inputs, outputs


def generate_sample(desc: IODescription, device: Any = None) -> Any:
    """Draws random values for a description: a tensor if PyTorch is imported, otherwise an array.

    With ``num_classes_`` the values are integers from 0 to ``num_classes_ - 1``, otherwise they are normally
    distributed. Arrays come from NumPy's global generator (``np.random.seed``), tensors from PyTorch's
    (``torch.manual_seed``).

    Args:
        desc: the description. A named size becomes 1. Without ``dtype_``, integers are int64 and floats are float32.
        device: the device of a tensor. An array is on the CPU.

    Raises:
        UnsupportedError: for a device other than the CPU, if PyTorch is not imported.

    >>> from ortrain.trainer.legacy import IODescription, generate_sample
    >>> labels = generate_sample(IODescription("labels", ["batch", 8], np.int64, num_classes=10))
    >>> labels.shape, bool(((0 <= labels) & (labels < 10)).all())
    ((1, 8), True)

    """
    shape = [1 if isinstance(size, str) else int(size) for size in desc.shape_]
    classes, dtype = desc.num_classes_, desc.dtype_
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        if classes:
            return torch.randint(0, classes, shape, dtype=dtype or torch.int64, device=device)
        return torch.randn(shape, dtype=dtype or torch.float32, device=device)
    if device is not None and not str(device).lower().startswith("cpu"):
        raise UnsupportedError(
            f"device {device!r} is not supported without PyTorch: samples are NumPy arrays on the CPU"
        )
    if classes:
        drawn = np.random.randint(0, classes, shape)  # noqa: NPY002  (np.random.seed is to hold)
        return drawn.astype(np.int64 if dtype is None else dtype)
    normal = np.random.standard_normal(shape)  # noqa: NPY002  (np.random.seed is to hold)
    return normal.astype(np.float32 if dtype is None else dtype)


class _StepRate(_LRScheduler):
    """Scheduler with the learning rate of the current step's argument."""

    rate = 0.0

    def get_lr(self, train_step_info: object) -> list[float]:
        return [self.rate]


class _StepScale(_NewLossScaler):
    """Loss scaler with the scale of the current step's argument. Stores if the step's gradients are finite."""

    # A bool if the last step updated the weights and fetched nothing, otherwise None.
    is_all_finite: Any = None

    def update(self, train_step_info: TrainStepInfo) -> float:
        self.is_all_finite = train_step_info.all_finite
        return self.loss_scale


class ORTTrainer:
    """A trainer with one call for each batch, as ``onnxruntime.capi.ort_trainer.ORTTrainer``.

    The arguments follow the older interface. :class:`ortrain.trainer.ORTTrainer` does the work. Without
    ``get_lr_this_step``, pass the learning rate to each ``train_step``, after the inputs or by its name. In mixed
    precision without ``loss_scaler``, pass the loss scale after the learning rate.

    Args:
        model: an ``onnx.ModelProto`` with the loss as its first output, or a ``torch.nn.Module``, which the first step
            exports.
        loss_fn: the loss of a module, as in :class:`ortrain.trainer.ORTTrainer`. It may have more than two parameters
            if the others have defaults. ``None`` for an ONNX model.
        model_desc: the description of inputs and outputs, including the loss. For a module the loss is the first
            output.
        training_optimizer_name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        map_optimizer_attributes: a function from the name of a weight to a dict of optimizer settings, floats or ints.
            Missing settings, and ``None`` for the function, select the optimizer's defaults.
        learning_rate_description: the description of the learning rate. Its name is a keyword of ``train_step``.
        device: the device of the training, for example ``"cpu"``.
        gradient_accumulation_steps: the number of calls for each update.
        world_rank: index of the process, which MPI sets.
        world_size: number of processes, which MPI sets.
        use_mixed_precision: if true, the model computes in float16.
        allreduce_post_accumulation: if false, gradients of several processes are summed during the backward pass.
        global_step: the first value of ``global_step_``.
        get_lr_this_step: a function from ``global_step_`` to the learning rate.
        loss_scaler: computes the loss scale in mixed precision.
        deepspeed_zero_stage: 0 or 1; 1 divides the moments among several processes. In one process 1 gives a warning.
        enable_grad_norm_clip: if true, Adam and LAMB clip gradients by their norm.
        frozen_weights: names of weights that are not trained.
        _opset_version: the opset of the export of a module, 12 to 14.
        _enable_internal_postprocess: if true, :func:`ortrain.trainer.postprocess.run_postprocess` changes the model.
        _extra_postprocess: a function that then changes the model in place, or returns another model.
        _use_deterministic_compute: no effect: results are always reproducible.
        use_memory_efficient_gradient: no effect.
        run_symbolic_shape_infer: as the option ``utils.run_symbolic_shape_infer``.
        enable_adasum: if true, changes of several processes are combined by Adasum; in one process with a warning.
        optimized_model_filepath: a file for the optimized training graph; empty to write no file.

    Raises:
        TypeError: for a description of another type, or a loss scaler that is not one of this module.
        ValueError: for an unknown optimizer, settings that are not numbers or that the optimizer does not have, or
            options out of their range.
        InvalidArgumentError: if the first output has no description, or the learning rate has the name of an input.
        AssertionError, UnsupportedError, OrtrainError: as :class:`ortrain.trainer.ORTTrainer`.

    Warns:
        FutureWarning: always. The class exists for scripts that already use it.
        UserWarning: for a ``loss_fn`` together with an ONNX model. The function is not used.

    >>> import warnings
    >>> from ortrain.trainer.legacy import IODescription, ModelDescription, ORTTrainer
    >>> warnings.simplefilter("ignore", FutureWarning)
    >>> inputs = [IODescription("x", ["batch", 64]), IODescription("labels", ["batch"])]
    >>> description = ModelDescription(inputs, [IODescription("loss", [])])
    >>> rate = IODescription("Learning_Rate", [1])
    >>> trainer = ORTTrainer(
    ...     model_with_loss, None, description, "LambOptimizer", lambda name: {"lambda": 0.01}, rate, "cpu",
    ...     get_lr_this_step=lambda step: 0.001 * (step + 1),
    ... )
    >>> loss = trainer(x, labels)
    >>> trainer.global_step_
    1

    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping[str, float]] | None,
        learning_rate_description: IODescription,
        device: Any,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: LossScaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = 14,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[[Any], Any] | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        warnings.warn(
            "ORTTrainer of ortrain.trainer.legacy is for existing scripts of onnxruntime-training up to 1.15; use "
            "ortrain.api for new scripts",
            FutureWarning,
            stacklevel=2,
        )
        if loss_fn is not None and is_onnx_model(model):
            warnings.warn("loss_fn is ignored: the loss of an ONNX model is its first output", stacklevel=2)
            loss_fn = None
        _check_kinds(model_desc, learning_rate_description, loss_scaler)
        if training_optimizer_name not in _CONFIGS:
            raise ValueError(
                f"training_optimizer_name must be one of {', '.join(_CONFIGS)}, got "
                f"{training_optimizer_name!r}{hint(training_optimizer_name, _CONFIGS)}"
            )
        self.model_desc_, self.learning_rate_description_ = model_desc, learning_rate_description
        self.torch_model_ = None if is_onnx_model(model) else model
        self.loss_fn_, self.device_ = loss_fn, device
        self.world_rank, self.world_size = world_rank, world_size
        self.use_mixed_precision, self.gradient_accumulation_steps = use_mixed_precision, gradient_accumulation_steps
        self.deepspeed_zero_stage_ = deepspeed_zero_stage
        self.get_lr_this_step_, self.loss_scaler_ = get_lr_this_step, loss_scaler
        self.is_train = True
        self._map_optimizer_attributes, self._extra_postprocess = map_optimizer_attributes, _extra_postprocess
        self._inputs = [description.name_ for description in model_desc.inputs_]
        self._rate, self._scale = _StepRate(), _StepScale(1.0)
        self._make_config = _CONFIGS[training_optimizer_name]
        self._config = self._make_config()
        options = {
            "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
            "device": {"id": str(device)},
            "distributed": {
                "world_rank": world_rank,
                "world_size": world_size,
                "allreduce_post_accumulation": allreduce_post_accumulation,
                "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                "enable_adasum": enable_adasum,
            },
            "lr_scheduler": self._rate,
            "mixed_precision": {
                "enabled": use_mixed_precision,
                "loss_scaler": self._scale if use_mixed_precision else None,
            },
            "utils": {
                "frozen_weights": list(frozen_weights),
                "grad_norm_clip": enable_grad_norm_clip,
                "memory_efficient_gradient": use_memory_efficient_gradient,
                "run_symbolic_shape_infer": run_symbolic_shape_infer,
            },
            "debug": {
                "deterministic_compute": _use_deterministic_compute,
                "graph_save_paths": {"model_with_training_graph_after_optimization_path": optimized_model_filepath},
            },
            "_internal_use": {
                "enable_internal_postprocess": _enable_internal_postprocess,
                "extra_postprocess": self._complete,
                "onnx_opset_version": _opset_version,
            },
        }
        self._options = ORTTrainerOptions(options)
        description = _new_description(model_desc, learning_rate_description, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self._trainer = _NewORTTrainer(model, description, self._config, _of_two(loss_fn), self._options)
        # MPI has set the ranks of the options.
        distributed = self._options.distributed
        self.world_rank, self.world_size = distributed.world_rank, distributed.world_size
        self.global_step_ = global_step

    def _complete(self, model: Any) -> Any:
        """Applies the user's post-processing to the model, and reads the settings of its weights."""
        if self._extra_postprocess is not None:
            returned = self._extra_postprocess(model)
            model = model if returned is None else returned
        if self._map_optimizer_attributes is not None and is_onnx_model(model):
            frozen = self._options.utils.frozen_weights
            names = [tensor.name for tensor in model.graph.initializer if tensor.name not in frozen]
            groups = [self._settings(name, self._map_optimizer_attributes(name)) for name in names]
            self._config.params = [group for group in groups if group]
        return model

    def _settings(self, weight: str, settings: Mapping[str, float]) -> dict[str, Any] | None:
        """Returns the settings of a weight as a group of the optimizer's config, or ``None`` for default settings."""
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"map_optimizer_attributes({weight!r}) must return a dict of settings, got {settings!r:.60}"
            )
        for name, value in settings.items():
            if not isinstance(value, int | float | np.integer | np.floating):
                raise ValueError(
                    f"map_optimizer_attributes({weight!r}): setting {name!r} must be a float or an int, got {value!r}"
                )
        if settings and isinstance(self._config, SGDConfig):
            raise ValueError(
                f"map_optimizer_attributes({weight!r}) returned {settings!r}, but SGDOptimizer has no settings"
            )
        group = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
        if not group:
            return None
        try:
            return self._make_config([{"params": [weight], **group}]).params[0]
        except AssertionError as error:
            raise ValueError(f"map_optimizer_attributes({weight!r}): {error}") from error

    # State of the trainer.

    @property
    def session(self) -> Any:
        """The ``ortrain.classic.TrainingSession`` of the trainer; ``None`` before the first step of a module.

        >>> type(legacy_trainer.session).__name__
        'TrainingSession'
        """
        return self._trainer._training_session

    @property
    def onnx_model_(self) -> Any:
        """The forward model; ``None`` before the first step of a module.

        >>> legacy_trainer.onnx_model_ is model_with_loss
        True
        """
        return self._trainer._onnx_model

    @property
    def loss_scale_input_name(self) -> str:
        """The keyword of the loss scale in ``train_step``. ``default_loss_scale_input_name`` is accepted too.

        >>> import warnings
        >>> from ortrain.trainer.legacy import IODescription, ModelDescription, ORTTrainer
        >>> warnings.simplefilter("ignore", FutureWarning)
        >>> inputs = [IODescription("x", ["batch", 64]), IODescription("labels", ["batch"])]
        >>> description = ModelDescription(inputs, [IODescription("loss", [])])
        >>> rate = IODescription("Learning_Rate", [1])
        >>> trainer = ORTTrainer(
        ...     model_with_loss, None, description, "AdamOptimizer", None, rate, "cpu", use_mixed_precision=True
        ... )
        >>> loss, is_all_finite = trainer.train_step(x, labels, 0.01, **{trainer.loss_scale_input_name: 128.0})
        >>> bool(is_all_finite)
        True
        """
        described = self._trainer.model_desc.loss_scale_input
        return _DEFAULT_SCALE if described is None else described.name

    @property
    def global_step_(self) -> int:
        """The number of updates, which is the argument of ``get_lr_this_step``. The number can be set.

        Raises:
            TypeError, ValueError: for a new value that is not an integer of 0 or more.

        >>> legacy_trainer.global_step_ = 7
        >>> loss, logits = legacy_trainer.train_step(x, labels, 0.1)
        >>> legacy_trainer.global_step_, legacy_trainer.current_step
        (8, 1)

        """
        return self._trainer._train_step_info.optimization_step

    @global_step_.setter
    def global_step_(self, count: int) -> None:
        self._trainer._train_step_info.optimization_step = _count("global_step", count)

    @property
    def current_step(self) -> int:
        """The number of calls of ``train_step``. The number can be set.

        Raises:
            TypeError, ValueError: for a new value that is not an integer of 0 or more.

        >>> import warnings
        >>> from ortrain.trainer.legacy import IODescription, ModelDescription, ORTTrainer
        >>> warnings.simplefilter("ignore", FutureWarning)
        >>> inputs = [IODescription("x", ["batch", 64]), IODescription("labels", ["batch"])]
        >>> description = ModelDescription(inputs, [IODescription("loss", [])])
        >>> rate = IODescription("Learning_Rate", [1])
        >>> trainer = ORTTrainer(
        ...     model_with_loss, None, description, "SGDOptimizer", None, rate, "cpu", gradient_accumulation_steps=2
        ... )
        >>> losses = [trainer.train_step(x, labels, 0.1) for _ in range(3)]
        >>> trainer.current_step, trainer.global_step_
        (3, 1)

        """
        return self._trainer._train_step_info.step

    @current_step.setter
    def current_step(self, count: int) -> None:
        self._trainer._train_step_info.step = _count("current_step", count)

    # Steps.

    def train(self) -> None:
        """Makes a call of the trainer a ``train_step``. This is the initial state.

        >>> legacy_trainer.eval()
        >>> legacy_trainer.train()
        >>> loss, logits = legacy_trainer(x, labels, 0.1)
        >>> legacy_trainer.current_step
        1
        """
        self.is_train = True

    def eval(self) -> None:
        """Makes a call of the trainer an ``eval_step``.

        >>> legacy_trainer.eval()
        >>> loss, logits = legacy_trainer(x, labels)
        >>> legacy_trainer.current_step
        0
        """
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a ``train_step``, or an ``eval_step`` after :meth:`eval`.

        >>> loss, logits = legacy_trainer(x, labels, Learning_Rate=0.1)
        >>> loss.shape, logits.shape
        ((), (8, 10))
        """
        return self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs of a batch and trains on the batch.

        The arguments are in this order: the inputs, then the learning rate, then the loss scale. The learning rate is
        left out if the trainer has ``get_lr_this_step``. The loss scale is only for mixed precision without
        ``loss_scaler``. Each argument may be passed by name instead; a single list counts as all positional arguments.
        A learning rate or loss scale is a number, or an array or tensor with one number.

        Args:
            *args: positional values.
            **kwargs: values by name, and ``fetches``, a list of output names.

        Returns:
            The described outputs before the update, or only the outputs in ``fetches``, in their order. A single output
            is returned alone, several as a list. In mixed precision without ``loss_scaler``, a call that updates the
            weights and has no ``fetches`` returns one more value at the end: a bool, true if all gradients were finite.

        Raises:
            AssertionError: for a wrong number of values, or a learning rate if the trainer has ``get_lr_this_step``.
            InvalidArgumentError: for a learning rate that is not a finite number of 0 or more, or a loss scale of 0.
            AssertionError, KeyError, InvalidArgumentError: as :meth:`ortrain.trainer.ORTTrainer.train_step`.

        >>> loss, logits = legacy_trainer.train_step(x, labels, Learning_Rate=np.array([0.01], np.float32))
        >>> legacy_trainer.train_step(x, labels, 0.01, fetches=["logits"]).shape
        (8, 10)

        """
        fetches = list(kwargs.pop("fetches", None) or [])
        with reporting(self._trainer._world):
            inputs = self._step_inputs(args, kwargs)
            self._scale.is_all_finite = None
            results = self._run(self._trainer.train_step, fetches, [inputs], {})
        if self._scale.is_all_finite is None:
            return results
        if self.loss_scaler_ is None:
            return [*(results if isinstance(results, list) else [results]), self._scale.is_all_finite]
        self.loss_scaler_.update_loss_scale(bool(self._scale.is_all_finite))
        return results

    def _step_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the inputs of a ``train_step``. Stores the learning rate and the loss scale of the step."""
        names = list(self._inputs)
        rate_name, scale_name = self.learning_rate_description_.name_, self.loss_scale_input_name
        if self.get_lr_this_step_ is None:
            names.append(rate_name)
        elif rate_name in kwargs:
            raise AssertionError(
                f"{rate_name!r} must not be passed together with get_lr_this_step, which returns the learning rate"
            )
        if self.use_mixed_precision and self.loss_scaler_ is None:
            names.append(scale_name)
            if _DEFAULT_SCALE in kwargs:
                kwargs.setdefault(scale_name, kwargs[_DEFAULT_SCALE])
        values = inputs_by_name(names, args, kwargs)
        rate = values[rate_name] if self.get_lr_this_step_ is None else self.get_lr_this_step_(self.global_step_)
        self._rate.rate = _number("the learning rate", rate)
        if self.use_mixed_precision:
            scale = values[scale_name] if self.loss_scaler_ is None else self.loss_scaler_.loss_scale_
            self._scale.loss_scale = _number("the loss scale", scale, above_zero=True)
        return [values[name] for name in self._inputs]

    def _run(
        self,
        step: Callable[..., Any],
        fetches: list[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a step of the inner trainer that fetches some outputs; an empty list fetches all of them."""
        info = self._trainer._train_step_info
        info.fetches = fetches
        try:
            return step(*args, **kwargs)
        finally:
            info.fetches = []

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs of a batch in inference mode: without Dropout, training or counting.

        Args:
            *args: positional inputs, without a learning rate.
            **kwargs: inputs by name, and ``fetches``, a list of output names.

        Returns:
            The described outputs, or only the outputs in ``fetches``, in their order. A single output is returned
            alone, several as a list.

        Raises:
            AssertionError, KeyError, InvalidArgumentError: as :meth:`ortrain.trainer.ORTTrainer.eval_step`.

        >>> legacy_trainer.eval_step(x, labels, fetches=["logits"]).shape
        (8, 10)

        """
        fetches = list(kwargs.pop("fetches", None) or [])
        results = self._run(self._trainer.eval_step, fetches, args, kwargs)
        if len(fetches) < 2:
            return results
        described = [output.name_ for output in self.model_desc_.outputs_ if output.name_ in fetches]
        by_name = dict(zip(described, results, strict=True))
        return [by_name[name] for name in fetches]

    # State and files.

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Any]:
        """Returns the weights and the optimizer state as one flat dict.

        Args:
            include_optimizer_state: if true, the dict also has values that are not in the model: ``Moment_1_<weight>``,
                ``Moment_2_<weight>``, ``Update_Count_<weight>`` or ``Step``.

        Returns:
            Copies by name, including all initializers of the model: tensors if PyTorch is imported, otherwise arrays.
            For a module without the optimizer state, the dict fits the module's ``load_state_dict``. Before the first
            step of a module the dict is empty.

        Warns:
            UserWarning: before the first step of a module.

        >>> sorted(legacy_trainer.state_dict(include_optimizer_state=False))
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        >>> len(legacy_trainer.state_dict())
        16

        """
        if self.session is None:
            warnings.warn(
                "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least "
                "once before calling state_dict().",
                stacklevel=2,
            )
            return {}
        if not include_optimizer_state and self.torch_model_ is not None:
            return self._trainer.state_dict(pytorch_format=True)
        from onnx import numpy_helper

        initializers = {tensor.name: tensor for tensor in self.onnx_model_.graph.initializer}
        values = self.session.get_state() | _state.statistics_of(self.session)
        for name, tensor in initializers.items():
            if name not in values:
                values[name] = np.array(numpy_helper.to_array(tensor))
        if not include_optimizer_state:
            values = {name: values[name] for name in initializers}
        torch: Any = sys.modules.get("torch")
        return values if torch is None else {name: torch.from_numpy(value) for name, value in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Sets some or all values from a dict of :meth:`state_dict`.

        Args:
            state_dict: arrays or tensors by name. Before the first step of a module, the trainer stores them for that
                step.
            strict: if true, an unknown name is an error. Otherwise its value is ignored.

        Raises:
            InvalidArgumentError: for a value of another shape or type; with ``strict``, also for an unknown name. The
                error is a ``RuntimeError`` too. In this case no value is changed.

        >>> state = legacy_trainer.state_dict()
        >>> first, _ = legacy_trainer.train_step(x, labels, 0.01)
        >>> legacy_trainer.load_state_dict(state)
        >>> bool(legacy_trainer.train_step(x, labels, 0.01)[0] == first)
        True

        """
        _flat_checkpoint._load_flat(self._trainer, state_dict, strict)

    def save_as_onnx(self, path: str) -> None:
        """Writes the forward model with the current weights, as :meth:`ortrain.trainer.ORTTrainer.save_as_onnx`.

        >>> legacy_trainer.save_as_onnx("trained.onnx")
        >>> onnx.load("trained.onnx") == legacy_trainer.onnx_model_
        True
        """
        self._trainer.save_as_onnx(path)


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes :meth:`ORTTrainer.state_dict` and other values to a file of ``torch.save``. Needs PyTorch.

    Args:
        model: the trainer.
        checkpoint_dir: the folder. The file is ``<prefix>.ort.pt``, and with ZeRO ``<prefix>.ZeRO.<rank>.<last
            rank>.ort.pt``.
        checkpoint_prefix: the start of the file name.
        checkpoint_state_dict: other values by name. The name ``"model"`` is reserved for the state.
        include_optimizer_state: as in :meth:`ORTTrainer.state_dict`.

    Raises:
        AssertionError: if the folder does not exist.
        ImportError: if PyTorch is not installed.

    Warns:
        UserWarning: if the file exists. It is replaced.

    >>> from ortrain.trainer import legacy
    >>> legacy.save_checkpoint(None, "nowhere")
    Traceback (most recent call last):
    AssertionError: checkpoint_dir (nowhere) directory doesn't exist

    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise AssertionError(f"checkpoint_dir ({folder}) directory doesn't exist")
    torch = _flat_checkpoint._torch()
    is_divided = model.deepspeed_zero_stage_ > 0
    name = _flat_checkpoint._get_checkpoint_name(checkpoint_prefix, is_divided, model.world_rank, model.world_size)
    values = dict(checkpoint_state_dict or {}) | {_state.MODEL: model.state_dict(include_optimizer_state)}
    _flat_checkpoint._torch_save(torch, folder / name, values)


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: PathLike,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
    *,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Restores a file of :func:`save_checkpoint`, or the files of all ZeRO processes. Needs PyTorch.

    Args:
        model: the trainer.
        checkpoint_dir: the folder.
        checkpoint_prefix: the start of the file name.
        strict: as in :meth:`ORTTrainer.load_state_dict`.
        allow_pickle: if true, objects of every class are created. This runs code of the file's author. If false,
            ``torch.load`` runs with ``weights_only=True``.

    Returns:
        The other values of the file, or of all files.

    Raises:
        AssertionError: if the file does not exist, or the file of a process is missing.
        InvalidArgumentError: for a file that cannot be read, or for values that do not match the trainer.
        ImportError: if PyTorch is not installed.

    Warns:
        UserWarning: if the files are from several processes.

    >>> from ortrain.trainer import legacy
    >>> legacy.load_checkpoint(legacy_trainer, ".")
    Traceback (most recent call last):
    AssertionError: No checkpoint found with prefix 'ORT_checkpoint' at '.'

    """
    with warnings.catch_warnings():
        # The callee warns that its own name is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _flat_checkpoint.experimental_load_checkpoint(
            model._trainer, checkpoint_dir, checkpoint_prefix, strict, allow_pickle=allow_pickle
        )


def _check_kinds(model_desc: object, learning_rate_description: object, loss_scaler: object) -> None:
    """Raises a TypeError for descriptions or a loss scaler of another type."""
    if not isinstance(model_desc, ModelDescription):
        raise TypeError(f"model_desc must be a ModelDescription, got {type(model_desc).__name__}")
    for value in (*model_desc.inputs_, *model_desc.outputs_, learning_rate_description):
        if not isinstance(value, IODescription):
            raise TypeError(
                f"each input, each output and the learning rate must be an IODescription, got {value!r:.60}"
            )
    if loss_scaler is not None and not hasattr(loss_scaler, "update_loss_scale"):
        raise TypeError(
            f"loss_scaler must be a LossScaler of ortrain.trainer.legacy, got {type(loss_scaler).__name__} of "
            f"{type(loss_scaler).__module__}"
        )


def _of_two(loss_fn: Any) -> Any:
    """Returns the loss with exactly two parameters, as the inner trainer requires."""
    if not callable(loss_fn) or is_torch_module(loss_fn):
        return loss_fn
    return lambda outputs, labels: loss_fn(outputs, labels)


def _new_description(
    description: ModelDescription, learning_rate: IODescription, model: Any
) -> dict[str, list[tuple[Any, ...]]]:
    """Converts the descriptions to the format of the inner trainer."""
    inputs, outputs = description.inputs_, description.outputs_
    if any(value.name_ == learning_rate.name_ for value in inputs):
        raise InvalidArgumentError(
            f"learning_rate_description and an input of the model have the same name, {learning_rate.name_!r}; "
            "rename one of them"
        )
    loss = outputs[0].name_ if outputs else ""
    if is_onnx_model(model) and model.graph.output:
        loss = model.graph.output[0].name
        names = [value.name_ for value in outputs]
        if loss not in names:
            raise InvalidArgumentError(
                f"model_desc does not describe {loss!r}, the loss and first output of the model; it describes "
                f"{', '.join(names)}{hint(loss, names)}"
            )
    return {
        "inputs": [(value.name_, _shape(value)) for value in inputs],
        "outputs": [(value.name_, _shape(value), value.name_ == loss) for value in outputs],
    }


def _shape(description: IODescription) -> Any:
    shape = description.shape_
    return list(shape) if isinstance(shape, tuple) else shape


def _count(name: str, count: Any) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{name} must be an integer, got {count!r}")
    if operator.index(count) < 0:
        raise InvalidArgumentError(f"{name} must be at least 0, got {count}")
    if operator.index(count) >= 1 << 63:
        raise OutOfRangeError(f"{name} must be below 2**63, got {operator.index(count)}")
    return operator.index(count)


def _number(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Returns a number, or the only number of an array, a tensor or a list, as a finite float32 value."""
    array = as_array(value)
    number = float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else np.nan
    if not 0 <= number <= _LARGEST or (above_zero and number == 0):
        limit = "above 0" if above_zero else "of 0 or more"
        raise InvalidArgumentError(f"{name} must be one finite number {limit}, got {value!r:.60}")
    return number
