"""Options of :class:`ortrain.trainer.ORTTrainer`: a tree of settings, validated at construction.

>>> from ortrain.trainer.orttrainer_options import ORTTrainerOptions
>>> options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}, "device": {"id": "cpu"}})
>>> options.batch.gradient_accumulation_steps, options.utils.grad_norm_clip
(4, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, unique
from typing import TYPE_CHECKING, Any

from ortrain._options import SessionOptions
from ortrain._suggest import hint
from ortrain.trainer._validation import Rules, instances, validated
from ortrain.trainer.amp.loss_scaler import LossScaler
from ortrain.trainer.optim.lr_scheduler import _LRScheduler

__all__ = ["ORTTrainerOptions", "PropagateCastOpsStrategy"]


@unique
class PropagateCastOpsStrategy(IntEnum):
    """Strategies to move casts through a graph in mixed precision. They are accepted but have no effect in ortrain.

    >>> from ortrain.trainer.orttrainer_options import ORTTrainerOptions, PropagateCastOpsStrategy
    >>> casts = {"strategy": PropagateCastOpsStrategy.INSERT_AND_REDUCE, "level": 2}
    >>> options = ORTTrainerOptions({"graph_transformer": {"propagate_cast_ops_config": casts}})
    >>> options.graph_transformer.propagate_cast_ops_config.strategy.name
    'INSERT_AND_REDUCE'
    """

    NONE = 0
    """Casts stay where they are."""
    INSERT_AND_REDUCE = 1
    """Casts are inserted around nodes, and pairs of inverse casts are removed."""
    FLOOD_FILL = 2
    """Casts are moved along the graph, so that whole regions compute in the narrow type."""


class _Section:
    """A section of the options, with its keys as attributes."""

    _main_class_name: str
    """Name of the class of the whole tree."""
    _validated_opts: dict[str, Any]
    """The checked settings of this part; a change of an attribute does not change them."""
    _assigned: set[str]
    """Names of attributes that were set after the construction."""

    def __init__(self, main_class_name: str, options: dict[str, Any]) -> None:
        # Provider settings and tensor names may be any strings, even the names of the attributes below.
        vars(self).update({name: _wrapped(main_class_name, value) for name, value in options.items()})
        vars(self).update(_main_class_name=main_class_name, _validated_opts=options, _assigned=set())

    # A type checker reads the attributes from the class annotations below instead.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # A trainer must distinguish a device set by the user from the default device.
            self._assigned.add(name)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            near = "" if name.startswith("_") else hint(name, vars(self))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{near}")

    def __repr__(self) -> str:
        settings = (f"{name!r}: {value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{{{', '.join(settings)}}}"


class _ORTTrainerOptionsInternal(_Section):
    """A nested section of the options, with its validated settings."""


class ORTTrainerOptions(_Section):
    """Settings of an :class:`ortrain.trainer.ORTTrainer`: a validated dictionary, completed with defaults.

    All keys are optional. Each key is an attribute, and so are the keys of nested dictionaries. Attributes can be set;
    new values are not validated. A trainer reads and changes its options object, so two trainers with the same object
    share the changes. ``docs/orttrainer.md`` lists all keys with their effects.

    Args:
        options: the settings, as a dictionary or pairs. The argument is copied and never changed. ``None`` selects the
            default of a setting, unless the default is ``None`` itself.

    Raises:
        ValueError: for unknown keys, and for values of another type or out of range. The message begins ``Invalid
            options:`` and lists all errors by key.
        TypeError: if ``options`` is neither a dictionary nor convertible to one.
        ImportError: if the package ``cerberus`` is not installed: ``pip install ortrain[trainer]``.

    >>> from ortrain.trainer.orttrainer_options import ORTTrainerOptions
    >>> options = ORTTrainerOptions({"utils": {"frozen_weights": ["fc1.weight"]}})
    >>> options.utils
    {'frozen_weights': ['fc1.weight'], 'grad_norm_clip': True, 'memory_efficient_gradient': False, \
'run_symbolic_shape_infer': False}
    >>> options.device.id = "cpu"
    >>> ORTTrainerOptions({"mixed_precision": {"enabled": 1}, "batch": {"gradient_accumulation_steps": 0}})
    Traceback (most recent call last):
    ValueError: Invalid options: {'batch': [{'gradient_accumulation_steps': ['min value is 1']}], \
'mixed_precision': [{'enabled': ['must be of boolean type']}]}
    >>> options.utils.frozen_weight
    Traceback (most recent call last):
    AttributeError: '_ORTTrainerOptionsInternal' object has no attribute 'frozen_weight'; did you mean 'frozen_weights'?

    """

    batch: Any
    """Number of batches for each update."""
    device: Any
    """The device of the training and its outputs, and a limit of memory."""
    distributed: Any
    """Ranks and sizes of a training in several processes."""
    lr_scheduler: Any
    """The scheduler that gives the learning rate of each step, or ``None``."""
    mixed_precision: Any
    """Switch for mixed precision, and the loss scaler."""
    graph_transformer: Any
    """Recomputation in the backward pass, and positions of casts."""
    utils: Any
    """Weights that are not trained, the clipping of gradients, and the building of the graph."""
    debug: Any
    """Paths that graphs are written to, and checks."""
    _internal_use: Any
    """The post-processing of the model, and its export."""
    provider_options: Any
    """Settings of execution providers by their names."""
    session_options: Any
    """Options of the session that runs the training, or ``None``."""

    _original_opts: dict[str, Any]
    """The original dictionary of the user."""

    def __init__(self, options: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        original = dict(options)
        super().__init__("ORTTrainerOptions", validated("options", _plain(original), _RULES))
        vars(self)["_original_opts"] = original


def _plain(value: Any) -> Any:
    """Returns a copy of nested dictionaries and sequences. Their other elements stay the same objects."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return set(value) if isinstance(value, set) else value


def _wrapped(main_class_name: str, value: Any) -> Any:
    """Converts a setting to an attribute: a dictionary with text keys becomes an object, also within a sequence."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _ORTTrainerOptionsInternal(main_class_name, value)
    if type(value) in (list, tuple, set):
        return type(value)(_wrapped(main_class_name, item) for item in value)
    return value


class _KindOfSessionOptions(type):
    def __instancecheck__(cls, value: object) -> bool:
        kind = type(value)
        theirs = (kind.__module__.partition(".")[0], kind.__name__) == ("onnxruntime", SessionOptions.__name__)
        return theirs or isinstance(value, SessionOptions)


class _AnySessionOptions(metaclass=_KindOfSessionOptions):
    """Session options of ortrain or of an installed onnxruntime."""


# Validation rules. Mutable defaults are created anew for each object.


def _section(**fields: Any) -> dict[str, Any]:
    return {"type": "dict", "default_setter": lambda _: {}, "schema": fields}


def _flag(default: bool = False) -> dict[str, Any]:
    return {"type": "boolean", "default": default}


def _count(default: int, **limits: int) -> dict[str, Any]:
    return {"type": "integer", "default": default, **limits}


def _text(default: str = "") -> dict[str, Any]:
    return {"type": "string", "default": default}


def _list(**elements: Any) -> dict[str, Any]:
    # A trainer appends to lists, so tuples are converted.
    rules = {"type": "list", "default_setter": lambda _: [], "coerce": _as_list}
    return rules | {"schema": elements} if elements else rules


def _table(**rules: Any) -> dict[str, Any]:
    """Returns the rule for a dictionary with any texts as keys."""
    return {"type": "dict", "default_setter": lambda _: {}, "keysrules": {"type": "string"}, **rules}


def _instance(kind: str, default: Any = None) -> dict[str, Any]:
    return {"type": kind, "nullable": True, "default": default}


def _misnamed(key: str) -> dict[str, Any]:
    """Returns the rule that refuses a wrong name of a key found in some documentation."""
    return {"nullable": True, "check_with": f"misnamed_{key}"}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_callable(_beside: Mapping[Any, Any], _key: Any, value: Any) -> Iterable[str]:
    if value is not None and not callable(value):
        yield "Must be callable or None"


def _refusal(key: str) -> Any:
    return lambda _beside, _key, _value: [f"unknown field: the key is {key!r}"]


_CAST_KEYS = ("strategy", "level", "allow")

_SCHEMA = {
    "batch": _section(gradient_accumulation_steps=_count(1, min=1)),
    "device": _section(id=_text("cuda"), mem_limit=_count(0, min=0)),
    "distributed": _section(
        world_rank=_count(0, min=0),
        world_size=_count(1, min=1),
        local_rank=_count(0, min=0),
        data_parallel_size=_count(1, min=1),
        horizontal_parallel_size=_count(1, min=1),
        pipeline_parallel=_section(
            pipeline_parallel_size=_count(1, min=1),
            num_pipeline_micro_batches=_count(1, min=1),
            pipeline_cut_info_string=_text(),
            sliced_schema=_table(valuesrules={"type": "list", "schema": {"type": "integer"}}),
            sliced_axes=_table(valuesrules={"type": "integer"}),
            sliced_tensor_names=_list(type="string"),
        ),
        allreduce_post_accumulation=_flag(),
        deepspeed_zero_optimization=_section(stage=_count(0, min=0, max=1)),
        enable_adasum=_flag(),
    ),
    "lr_scheduler": _instance("lr_scheduler"),
    "mixed_precision": _section(enabled=_flag(), loss_scaler=_instance("loss_scaler")),
    "graph_transformer": _section(
        attn_dropout_recompute=_flag(),
        gelu_recompute=_flag(),
        transformer_layer_recompute=_flag(),
        number_recompute_layers=_count(0, min=0),
        propagate_cast_ops_config=_section(
            strategy=_instance("propagate_cast_ops_strategy", PropagateCastOpsStrategy.FLOOD_FILL),
            level=_count(1, min=-1),
            allow=_list(type="string"),
            **{f"propagate_cast_ops_{key}": _misnamed(key) for key in _CAST_KEYS},
        ),
    ),
    "utils": _section(
        frozen_weights=_list(),
        grad_norm_clip=_flag(True),
        memory_efficient_gradient=_flag(),
        run_symbolic_shape_infer=_flag(),
    ),
    "debug": _section(
        deterministic_compute=_flag(),
        check_model_export=_flag(),
        graph_save_paths=_section(
            model_after_graph_transforms_path=_text(),
            model_with_gradient_graph_path=_text(),
            model_with_training_graph_path=_text(),
            model_with_training_graph_after_optimization_path=_text(),
        ),
    ),
    "_internal_use": _section(
        enable_internal_postprocess=_flag(True),
        extra_postprocess={"nullable": True, "default": None, "check_with": "callable"},
        onnx_opset_version=_count(14, min=12, max=14),
        enable_onnx_contrib_ops=_flag(True),
    ),
    "provider_options": _table(),
    "session_options": _instance("session_options"),
}

_RULES = Rules(
    _SCHEMA,
    types={
        "list": ((Sequence,), (str, bytes, bytearray, memoryview)),
        "lr_scheduler": instances(_LRScheduler),
        "loss_scaler": instances(LossScaler),
        "session_options": instances(_AnySessionOptions),
        "propagate_cast_ops_strategy": instances(PropagateCastOpsStrategy),
    },
    checks={"callable": _check_callable, **{f"misnamed_{key}": _refusal(key) for key in _CAST_KEYS}},
)
