"""The older trainer, as ``onnxruntime.capi.ort_trainer``: each step may be given its learning rate and loss scale.

:class:`ortrain.trainer.ORTTrainer` trains inside of it, so both give the same weights and losses.

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

from ortrain._near import hint
from ortrain._sources import PathLike
from ortrain.errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from ortrain.trainer import _flat_checkpoint, _state
from ortrain.trainer._arguments import is_onnx_model
from ortrain.trainer._runner import given_inputs
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
# The keyword of the scale of the loss in scripts that do not ask a trainer for the name of the input.
_DEFAULT_SCALE = "default_loss_scale_input_name"
_LARGEST = float(np.finfo(np.float32).max)


class IODescription:
    """The description of an input, an output or a learning rate. Nothing is checked before a trainer reads it.

    Args:
        name: the name.
        shape: a list of sizes: numbers, or names of sizes that may differ from call to call.
        dtype: the element type, of NumPy or PyTorch, that :func:`generate_sample` takes. A trainer takes types from the
            model.
        num_classes: of integers, the number of values that :func:`generate_sample` draws from.

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
    """The descriptions of a model's inputs and outputs. Nothing is checked before a trainer reads them.

    Args:
        inputs: descriptions of the inputs, in the order in which steps are given values.
        outputs: descriptions of the outputs, in the order in which steps return values.

    >>> from ortrain.trainer.legacy import IODescription, ModelDescription
    >>> ModelDescription([IODescription("x", [2])], [IODescription("loss", [])]).outputs_
    [IODescription('loss', [], None, None)]

    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_, self.outputs_ = inputs, outputs


def generate_sample(desc: IODescription, device: Any = None) -> Any:
    """Random values that fit a description: a tensor if PyTorch is imported, otherwise an array.

    With ``num_classes_`` they are whole numbers from 0 up to it, otherwise they are normally distributed. NumPy's
    global generator draws arrays (``np.random.seed``), PyTorch's draws tensors (``torch.manual_seed``).

    Args:
        desc: the description. A named size becomes 1. Without ``dtype_``, whole numbers are int64 and others float32.
        device: the device of a tensor. An array is on the CPU.

    Raises:
        UnsupportedError: for another device than the CPU, if PyTorch is not imported.

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
        raise UnsupportedError(f"device is {device!r}, but without PyTorch a sample is an array of NumPy, on the CPU")
    if classes:
        drawn = np.random.randint(0, classes, shape)  # noqa: NPY002  (np.random.seed is to hold)
        return drawn.astype(np.int64 if dtype is None else dtype)
    normal = np.random.standard_normal(shape)  # noqa: NPY002  (np.random.seed is to hold)
    return normal.astype(np.float32 if dtype is None else dtype)


class _GivenRate(_LRScheduler):
    """The learning rate that a step was given."""

    rate = 0.0

    def get_lr(self, train_step_info: object) -> list[float]:
        return [self.rate]


class _GivenScale(_NewLossScaler):
    """The scale of the loss that a step was given, and what the step says of its gradients."""

    # One bool of the last step, if the step made an update and fetched nothing.
    is_all_finite: Any = None

    def update(self, train_step_info: TrainStepInfo) -> float:
        self.is_all_finite = train_step_info.all_finite
        return self.loss_scale


class ORTTrainer:
    """A model that is trained by one call for each batch, as ``onnxruntime.capi.ort_trainer.ORTTrainer``.

    The arguments are those of the older interface, and :class:`ortrain.trainer.ORTTrainer` does the work. Without
    ``get_lr_this_step`` each ``train_step`` is given the learning rate, behind the inputs or by its name. In mixed
    precision without ``loss_scaler``, it is given the scale of the loss behind that.

    Args:
        model: an ``onnx.ModelProto`` whose first output is its loss, or a ``torch.nn.Module``, which the first step
            exports.
        loss_fn: the loss of a module, as of :class:`ortrain.trainer.ORTTrainer`, which may have more parameters than
            two if they have defaults; ``None`` for an ONNX model.
        model_desc: the description of inputs and outputs, the loss among them. Of a module the loss is the first one.
        training_optimizer_name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        map_optimizer_attributes: a function from the name of a weight to a dict of settings of the optimizer, floats or
            ints; settings that are not there, and ``None`` for the function, mean the optimizer's own.
        learning_rate_description: the description of the learning rate, whose name is a keyword of ``train_step``.
        device: where it runs, ``"cpu"`` say.
        gradient_accumulation_steps: the number of calls that make an update.
        world_rank: 0.
        world_size: 1.
        use_mixed_precision: whether the model computes in float16.
        allreduce_post_accumulation: without an effect in one process.
        global_step: the first value of ``global_step_``.
        get_lr_this_step: a function from ``global_step_`` to the learning rate.
        loss_scaler: what scales the loss in mixed precision.
        deepspeed_zero_stage: 0 or 1, without an effect in one process.
        enable_grad_norm_clip: whether gradients are clipped by their norm; of Adam and LAMB.
        frozen_weights: weights that are not trained.
        _opset_version: the opset that a module is exported to, 12 to 14.
        _enable_internal_postprocess: whether :func:`ortrain.trainer.postprocess.run_postprocess` changes the model.
        _extra_postprocess: a function that changes the model after that, in place, or returns another one.
        _use_deterministic_compute: without an effect: results always repeat.
        use_memory_efficient_gradient: without an effect.
        run_symbolic_shape_infer: as the option ``utils.run_symbolic_shape_infer``.
        enable_adasum: without an effect in one process.
        optimized_model_filepath: a file for the optimized training graph; empty for none.

    Raises:
        TypeError: for a description of another kind, and a loss scaler that is none of this module.
        ValueError: for an optimizer that is not there, settings that are no numbers or that the optimizer does not
            have, and options out of their range.
        InvalidArgumentError: for a first output that is not described, and a learning rate named as an input.
        AssertionError, UnsupportedError, OrtrainError: as :class:`ortrain.trainer.ORTTrainer`.

    Warns:
        FutureWarning: each time: the class is there for scripts that have it.
        UserWarning: for a ``loss_fn`` beside an ONNX model, which is not used.

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
            "ORTTrainer of ortrain.trainer.legacy is there for scripts that were written for onnxruntime-training up "
            "to 1.15; new ones use ortrain.api",
            FutureWarning,
            stacklevel=2,
        )
        if loss_fn is not None and is_onnx_model(model):
            warnings.warn(
                "loss_fn is not used: the model is an ONNX model, whose loss is its first output", stacklevel=2
            )
            loss_fn = None
        _check_kinds(model_desc, learning_rate_description, loss_scaler)
        if training_optimizer_name not in _CONFIGS:
            raise ValueError(
                f"training_optimizer_name is one of {', '.join(_CONFIGS)}, not {training_optimizer_name!r}"
                f"{hint(training_optimizer_name, _CONFIGS)}"
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
        self._rate, self._scale = _GivenRate(), _GivenScale(1.0)
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
        self.global_step_ = global_step

    def _complete(self, model: Any) -> Any:
        """Change the model as the user says, and take the settings of its weights."""
        if self._extra_postprocess is not None:
            returned = self._extra_postprocess(model)
            model = model if returned is None else returned
        if self._map_optimizer_attributes is not None and is_onnx_model(model):
            frozen = self._options.utils.frozen_weights
            names = [tensor.name for tensor in model.graph.initializer if tensor.name not in frozen]
            groups = [self._settings(name, self._map_optimizer_attributes(name)) for name in names]
            self._config.params = [group for group in groups if group]
        return model

    def _settings(self, weight: str, given: Mapping[str, float]) -> dict[str, Any] | None:
        """The settings of a weight as a group of the optimizer's config; ``None`` for the optimizer's own."""
        if not isinstance(given, Mapping):
            raise ValueError(f"map_optimizer_attributes({weight!r}) is a dict of settings, not {given!r:.60}")
        for name, value in given.items():
            if not isinstance(value, int | float | np.integer | np.floating):
                raise ValueError(
                    f"map_optimizer_attributes({weight!r}) has {name!r}: {value!r}, but a setting is a float or an int"
                )
        if given and isinstance(self._config, SGDConfig):
            raise ValueError(f"map_optimizer_attributes({weight!r}) is {given!r}, but SGDOptimizer has no settings")
        group = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
        if not group:
            return None
        try:
            return self._make_config([{"params": [weight], **group}]).params[0]
        except AssertionError as error:
            raise ValueError(f"map_optimizer_attributes({weight!r}): {error}") from error

    # What it has.

    @property
    def session(self) -> Any:
        """The ``ortrain.classic.TrainingSession`` that computes; ``None`` before the first step of a module.

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
        """The keyword of the scale of the loss in ``train_step``; ``default_loss_scale_input_name`` is one, too.

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
        """The number of updates, which ``get_lr_this_step`` is given. It can be set.

        Raises:
            TypeError, ValueError: if it is set to anything but a whole number of 0 or more.

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
        """The number of calls of ``train_step``. It can be set.

        Raises:
            TypeError, ValueError: if it is set to anything but a whole number of 0 or more.

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
        """Let a call of the trainer be a ``train_step``, as the call is at first.

        >>> legacy_trainer.eval()
        >>> legacy_trainer.train()
        >>> loss, logits = legacy_trainer(x, labels, 0.1)
        >>> legacy_trainer.current_step
        1
        """
        self.is_train = True

    def eval(self) -> None:
        """Let a call of the trainer be an ``eval_step``.

        >>> legacy_trainer.eval()
        >>> loss, logits = legacy_trainer(x, labels)
        >>> legacy_trainer.current_step
        0
        """
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A ``train_step``, or after :meth:`eval` an ``eval_step``.

        >>> loss, logits = legacy_trainer(x, labels, Learning_Rate=0.1)
        >>> loss.shape, logits.shape
        ((), (8, 10))
        """
        return self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a batch, and train on it.

        Values are given in order: the inputs, the learning rate unless the trainer has ``get_lr_this_step``, and in
        mixed precision the scale of the loss unless the trainer has a ``loss_scaler``. Each of them may be given by its
        name instead; a single list is taken as all of them. A learning rate or a scale is a number, or an array or a
        tensor of one.

        Args:
            *args: values at their places.
            **kwargs: values by their names, and ``fetches``, a list of names of outputs.

        Returns:
            The described outputs as they were before the update, or those of ``fetches`` alone, in their order. One is
            bare, several are a list. In mixed precision without a ``loss_scaler``, a call that makes an update and
            fetches nothing gives another one at the end: one bool, true if all gradients were finite.

        Raises:
            AssertionError: for another number of values, and a learning rate where the trainer computes its own.
            InvalidArgumentError: for a learning rate that is no finite number of 0 or more, a scale that is 0.
            AssertionError, KeyError, InvalidArgumentError: as :meth:`ortrain.trainer.ORTTrainer.train_step`.

        >>> loss, logits = legacy_trainer.train_step(x, labels, Learning_Rate=np.array([0.01], np.float32))
        >>> legacy_trainer.train_step(x, labels, 0.01, fetches=["logits"]).shape
        (8, 10)

        """
        fetches = list(kwargs.pop("fetches", None) or [])
        inputs = self._taken(args, kwargs)
        self._scale.is_all_finite = None
        results = self._run(self._trainer.train_step, fetches, [inputs], {})
        if self._scale.is_all_finite is None:
            return results
        if self.loss_scaler_ is None:
            return [*(results if isinstance(results, list) else [results]), self._scale.is_all_finite]
        self.loss_scaler_.update_loss_scale(bool(self._scale.is_all_finite))
        return results

    def _taken(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs that a ``train_step`` is given. The learning rate and the scale of the step are set."""
        names = list(self._inputs)
        rate_name, scale_name = self.learning_rate_description_.name_, self.loss_scale_input_name
        if self.get_lr_this_step_ is None:
            names.append(rate_name)
        elif rate_name in kwargs:
            raise AssertionError(f"{rate_name!r} is given, but get_lr_this_step gives the learning rate")
        if self.use_mixed_precision and self.loss_scaler_ is None:
            names.append(scale_name)
            if _DEFAULT_SCALE in kwargs:
                kwargs.setdefault(scale_name, kwargs[_DEFAULT_SCALE])
        values = given_inputs(names, args, kwargs)
        rate = values[rate_name] if self.get_lr_this_step_ is None else self.get_lr_this_step_(self.global_step_)
        self._rate.rate = _number("the learning rate", rate)
        if self.use_mixed_precision:
            scale = values[scale_name] if self.loss_scaler_ is None else self.loss_scaler_.loss_scale_
            self._scale.loss_scale = _number("the scale of the loss", scale, above_zero=True)
        return [values[name] for name in self._inputs]

    def _run(
        self,
        step: Callable[..., Any],
        fetches: list[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A step of the trainer inside that fetches these outputs; all of an empty list."""
        info = self._trainer._train_step_info
        info.fetches = fetches
        try:
            return step(*args, **kwargs)
        finally:
            info.fetches = []

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a batch as at inference: Dropout drops nothing, and nothing is trained or counted.

        Args:
            *args: inputs at their places, without a learning rate.
            **kwargs: inputs by their names, and ``fetches``, a list of names of outputs.

        Returns:
            The described outputs, or those of ``fetches`` alone, in their order. One is bare, several are a list.

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

    # States and files.

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Any]:
        """The weights and what the optimizer keeps of them, as one flat dict.

        Args:
            include_optimizer_state: whether other values than those of the model are there: ``Moment_1_<weight>``,
                ``Moment_2_<weight>``, ``Update_Count_<weight>`` or ``Step``.

        Returns:
            Copies by name, all initializers of the model among them: tensors if PyTorch is imported, otherwise arrays.
            Of a module without the optimizer's, what its ``load_state_dict`` takes. Before the first step of a module
            ``{}``.

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
        """Set values of a dict as of :meth:`state_dict`, some or all.

        Args:
            state_dict: arrays or tensors by name. Before the first step of a module they wait for the step.
            strict: whether a name that the trainer does not have is an error. Otherwise its value is left out.

        Raises:
            InvalidArgumentError: for a value of another shape or type, and if strict for an unknown name, which is a
                ``RuntimeError``. Nothing has changed then.

        >>> state = legacy_trainer.state_dict()
        >>> first, _ = legacy_trainer.train_step(x, labels, 0.01)
        >>> legacy_trainer.load_state_dict(state)
        >>> bool(legacy_trainer.train_step(x, labels, 0.01)[0] == first)
        True

        """
        _flat_checkpoint._load_flat(self._trainer, state_dict, strict)

    def save_as_onnx(self, path: str) -> None:
        """Write the forward model with the weights as they are now, as :meth:`ortrain.trainer.ORTTrainer.save_as_onnx`.

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
    """Write :meth:`ORTTrainer.state_dict` to a file of ``torch.save``, with other values. Needs PyTorch.

    Args:
        model: the trainer.
        checkpoint_dir: a folder. The file is ``<prefix>.ort.pt``; with ZeRO
            ``<prefix>.ZeRO.<rank>.<last rank>.ort.pt``.
        checkpoint_prefix: the start of the name of the file.
        checkpoint_state_dict: other values, by name. ``"model"`` is the name of the state.
        include_optimizer_state: as of :meth:`ORTTrainer.state_dict`.

    Raises:
        AssertionError: if there is no such folder.
        ImportError: without PyTorch.

    Warns:
        UserWarning: if there is such a file, which is replaced.

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
    """Go on from a file of :func:`save_checkpoint`, or from those of all ZeRO processes. Needs PyTorch.

    Args:
        model: the trainer.
        checkpoint_dir: the folder.
        checkpoint_prefix: the start of the name of the file.
        strict: as of :meth:`ORTTrainer.load_state_dict`.
        allow_pickle: whether objects of every class are made. That runs code of whoever wrote the file. Without,
            ``torch.load`` makes what ``weights_only=True`` lets it make.

    Returns:
        The other values of the file, or of all files.

    Raises:
        AssertionError: if there is no such file, or not one of each process.
        InvalidArgumentError: for a file that cannot be read, and for values that do not fit.
        ImportError: without PyTorch.

    Warns:
        UserWarning: if there are files of several processes.

    >>> from ortrain.trainer import legacy
    >>> legacy.load_checkpoint(legacy_trainer, ".")
    Traceback (most recent call last):
    AssertionError: No checkpoint found with prefix 'ORT_checkpoint' at '.'

    """
    with warnings.catch_warnings():
        # It warns of its own name.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _flat_checkpoint.experimental_load_checkpoint(
            model._trainer, checkpoint_dir, checkpoint_prefix, strict, allow_pickle=allow_pickle
        )


def _check_kinds(model_desc: object, learning_rate_description: object, loss_scaler: object) -> None:
    """A TypeError for descriptions and a loss scaler of another kind."""
    if not isinstance(model_desc, ModelDescription):
        raise TypeError(f"model_desc is a ModelDescription, not {type(model_desc).__name__}")
    for value in (*model_desc.inputs_, *model_desc.outputs_, learning_rate_description):
        if not isinstance(value, IODescription):
            raise TypeError(f"inputs, outputs and the learning rate are an IODescription each, not {value!r:.60}")
    if loss_scaler is not None and not hasattr(loss_scaler, "update_loss_scale"):
        raise TypeError(
            f"loss_scaler is a LossScaler of ortrain.trainer.legacy, not {type(loss_scaler).__name__} of "
            f"{type(loss_scaler).__module__}"
        )


def _of_two(loss_fn: Any) -> Any:
    """A loss as the trainer inside takes it: with two parameters, where a function has more that may be left out."""
    if not callable(loss_fn) or is_torch_module(loss_fn):
        return loss_fn
    return lambda outputs, labels: loss_fn(outputs, labels)


def _new_description(
    description: ModelDescription, learning_rate: IODescription, model: Any
) -> dict[str, list[tuple[Any, ...]]]:
    """A description as the trainer inside takes it."""
    inputs, outputs = description.inputs_, description.outputs_
    if any(value.name_ == learning_rate.name_ for value in inputs):
        raise InvalidArgumentError(
            f"learning_rate_description is named {learning_rate.name_!r}, and so is an input of the model: the "
            "learning rate needs another name"
        )
    loss = outputs[0].name_ if outputs else ""
    if is_onnx_model(model) and model.graph.output:
        loss = model.graph.output[0].name
        names = [value.name_ for value in outputs]
        if loss not in names:
            raise InvalidArgumentError(
                f"the first output of the model, {loss!r}, is its loss, but model_desc describes {', '.join(names)}"
                f"{hint(loss, names)}"
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
        raise TypeError(f"{name} is a whole number, not {count!r}")
    if operator.index(count) < 0:
        raise InvalidArgumentError(f"{name} is a whole number of 0 or more, not {count}")
    if operator.index(count) >= 1 << 63:
        raise OutOfRangeError(f"{name} is a whole number below 2**63, not {operator.index(count)}")
    return operator.index(count)


def _number(name: str, value: Any, *, above_zero: bool = False) -> float:
    """A number, or the one number of an array, a tensor or a list, as float32 can have it."""
    array = as_array(value)
    number = float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else np.nan
    if not 0 <= number <= _LARGEST or (above_zero and number == 0):
        limit = "above 0" if above_zero else "of 0 or more"
        raise InvalidArgumentError(f"{name} is one finite number {limit}, not {value!r:.60}")
    return number
