"""Scripts written for onnxruntime-training and for onnxcustom, unchanged.

>>> import ortrain.compat
>>> ortrain.compat.install()
>>> from onnxruntime.training import artifacts
>>> artifacts.generate_artifacts.__module__
'ortrain.artifacts'
>>> ortrain.compat.uninstall()
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
import types
from collections.abc import Callable, Sequence

import ortrain
from ortrain import _seeds, api, artifacts, capi, classic
from ortrain._classic_core import InferenceSession
from ortrain.api import checkpoint_state, lr_scheduler, module, optimizer
from ortrain.errors import OutOfRangeError, _Beginnings
from ortrain.gradient import excs

__all__ = ["install", "uninstall"]

_TRAINING = "onnxruntime.training"
_MODULES: dict[str, types.ModuleType] = {
    f"{_TRAINING}.api": api,
    f"{_TRAINING}.api.checkpoint_state": checkpoint_state,
    f"{_TRAINING}.api.lr_scheduler": lr_scheduler,
    f"{_TRAINING}.api.module": module,
    f"{_TRAINING}.api.optimizer": optimizer,
    f"{_TRAINING}.artifacts": artifacts,
}
# What is found when it is asked for: it needs the package `onnx`.
_LATER = {f"{_TRAINING}.onnxblock": "ortrain.onnxblock"} | {
    f"{_TRAINING}.onnxblock.{name}": f"ortrain.onnxblock.{name}" for name in ("blocks", "loss", "optim")
}
# What is about ORTTrainer, which needs more packages.
_TRAINER = ("ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo")
_TRAINER_MODULES = (
    "_checkpoint_storage",
    "amp",
    "checkpoint",
    "model_desc_validation",
    "optim",
    "orttrainer",
    "orttrainer_options",
    "postprocess",
)
_LATER |= {
    f"{_TRAINING}.{name}": f"ortrain.trainer.{name}"
    for name in (
        *_TRAINER_MODULES,
        "amp.loss_scaler",
        "optim.config",
        "optim.lr_scheduler",
    )
}
_OLDER_TRAINER = "onnxruntime.capi.ort_trainer"
_LATER[_OLDER_TRAINER] = "ortrain.trainer.legacy"
# The same of onnxcustom, which trains by onnxruntime-training.
_CUSTOM = "onnxcustom"
_PACKAGES = (_CUSTOM, f"{_CUSTOM}.training", f"{_CUSTOM}.utils")
_LATER |= {
    f"{_CUSTOM}.training.{name}": f"ortrain.gradient.{name}"
    for name in (
        "data_loader",
        "excs",
        "grad_helper",
        "optimizers",
        "optimizers_partial",
        "ortgradient",
        "sgd_learning_loss",
        "sgd_learning_penalty",
        "sgd_learning_rate",
    )
} | {
    f"{_CUSTOM}.utils.{name}": f"ortrain.gradient.utils.{name}"
    for name in ("onnx_function", "onnx_helper", "onnx_rewriter", "onnxruntime_helper", "orttraining_helper")
}
# What its package says of itself: the newest opset that it was made for.
_NEWEST = 15


def _level_of_log(level: int) -> None:
    """As ``onnxruntime.set_default_logger_severity`` and ``_verbosity``: any level is obeyed, for nothing is logged."""
    operator.index(level)


def _available_providers() -> list[str]:
    """Names of what runs models here, the fastest first, as onnxruntime lists them."""
    from ortrain._devices import devices

    has_gpu = any(device.kind in ("discrete", "integrated") for device in devices())
    return [*(["WebGpuExecutionProvider"] if has_gpu else []), "CPUExecutionProvider"]


# What a script takes from onnxruntime itself, where that is not installed.
_CORE = {
    "ExecutionMode": ortrain.ExecutionMode,
    "ExecutionOrder": ortrain.ExecutionOrder,
    "GraphOptimizationLevel": ortrain.GraphOptimizationLevel,
    "IOBinding": ortrain.IOBinding,
    "InferenceSession": ortrain.InferenceSession,
    "NodeArg": ortrain.NodeArg,
    "ModelMetadata": ortrain.ModelMetadata,
    "OrtDevice": capi.OrtDevice,
    "OrtValue": ortrain.OrtValue,
    "RunOptions": ortrain.RunOptions,
    "SessionOptions": ortrain.SessionOptions,
    "__version__": "1.19.2",
    "get_available_providers": _available_providers,
    "get_device": lambda: "CPU" if len(_available_providers()) == 1 else "GPU",
    "set_default_logger_severity": _level_of_log,
    "set_default_logger_verbosity": _level_of_log,
}
# What onnxruntime itself had until its release 1.15, of the package and of `onnxruntime.capi.training`.
_CLASSIC = {"TrainingParameters": classic.TrainingParameters, "TrainingSession": classic.TrainingSession}
_CAPI_TRAINING = "onnxruntime.capi.training"
# The same that an onnxruntime which is installed had.
_classic_before: dict[str, object] = {}
# What an onnxruntime that is installed had under a name of ours.
_kept: dict[str, Callable[[int], None]] = {}
# And from the module behind it, which scripts ask for providers, too. What it has of ours is what `capi` names.
_BEHIND = "onnxruntime.capi._pybind_state"
# Where exceptions are taken from, mostly.
_EXTENSION = "onnxruntime.capi.onnxruntime_pybind11_state"
_ABOUT = (
    "RunOptions",
    "SessionOptions",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
)
_EXCEPTIONS = {
    name: kind
    for name, kind in ((name, getattr(capi, name)) for name in capi.__all__)
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_VALUES = {name: getattr(capi, name) for name in capi.__all__ if name not in _EXCEPTIONS}
# The bases that our exceptions had before those of an onnxruntime that is installed were added.
_bases: dict[type[BaseException], tuple[type, ...]] = {}

# What onnxruntime-training has and ortrain has not, and what does the same work here.
_EXPORT = (
    "write the model once as an .onnx file (torch.onnx.export) and train that: artifacts.generate_artifacts, then "
    "CheckpointState, Module and Optimizer of onnxruntime.training.api"
)
_OPTIMIZERS = (
    "write artifacts with optimizer=OptimType.AdamW (or OptimType.SGD; their settings and gradient clipping: "
    "onnxruntime.training.onnxblock.optim) and make an Optimizer of onnxruntime.training.api"
)
_PRECISION = "set the precision of a Module (precision='bf16'), whose sums stay float32: no loss is scaled"
_ABSENT = {
    "ORTModule": f"it wraps modules of PyTorch, and ortrain trains ONNX models: {_EXPORT}",
    "ortmodule": f"it wraps modules of PyTorch, and ortrain trains ONNX models: {_EXPORT}",
    "is_ortmodule_available": f"there is no ORTModule, so it never is: {_EXPORT}",
    "TrainingAgent": "it is where ORTModule takes it from: onnxruntime.capi._pybind_state.TrainingAgent, of a session",
    "FusedAdam": f"it updates parameters of PyTorch: {_OPTIMIZERS}",
    "FP16_Optimizer": f"it wraps optimizers of PyTorch: {_OPTIMIZERS}; {_PRECISION}",
    "hooks": f"they watch modules of PyTorch: {_EXPORT}",
    "utils": f"they are helpers for PyTorch: {_EXPORT}",
    "experimental": f"it is about ORTModule: {_EXPORT}",
}
# The same of the package of optimizers, under both of its names.
_ABSENT_IN_OPTIM = {
    **{name: _ABSENT[name] for name in ("FusedAdam", "FP16_Optimizer")},
    "fp16_optimizer": _ABSENT["FP16_Optimizer"],
    "fused_adam": _ABSENT["FusedAdam"],
}
_OPTIM_PACKAGES = (f"{_TRAINING}.optim", "ortrain.trainer.optim")
# Names that a module which is not there had, where they are better known than the module.
_INSIDE = {"fp16_optimizer": "FP16_Optimizer", "fused_adam": "FusedAdam", "ortmodule": "ORTModule"}

_before: dict[str, types.ModuleType | None] = {}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of ortrain under the names that onnxruntime-training has for them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package == _TRAINING and name in _ABSENT:
            raise ImportError(_absent(name), name=fullname)
        if package in _OPTIM_PACKAGES and name in _ABSENT_IN_OPTIM:
            raise ImportError(_absent(name, "optim."), name=fullname)
        if package in _PACKAGES and fullname not in _LATER:
            there = ", ".join(known for known in [*_PACKAGES, *_LATER] if known.rpartition(".")[0] == package)
            raise ImportError(f"{fullname} is not in ortrain, which has {there}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _LATER else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        found = importlib.import_module(_LATER[spec.name])
        self._own = (found, found.__spec__)
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        # It stays the module that it is, with the name it has.
        found, spec = self._own
        found.__spec__ = spec


_FINDER = _Finder()


class _Training(types.ModuleType):
    """The package ``onnxruntime.training``, which says what to use for a name that it does not have."""

    def __getattr__(self, name: str) -> object:
        if name in _ABSENT:
            raise AttributeError(_absent(name))
        if name in _TRAINER:
            return getattr(importlib.import_module("ortrain.trainer"), name)
        if name in _TRAINER_MODULES:
            return importlib.import_module(f"{_TRAINING}.{name}")
        from ortrain._near import hint

        there = ["api", "artifacts", "onnxblock", *_CLASSIC, *_TRAINER, *_TRAINER_MODULES]
        near = "" if name.startswith("__") else hint(name, [*_ABSENT, *there])
        raise AttributeError(f"module {_TRAINING!r} has no attribute {name!r}{near}")


def _absent(name: str, package: str = "") -> str:
    inside = f" (with {_INSIDE[name]})" if name in _INSIDE else ""
    reason = (_ABSENT_IN_OPTIM if package else _ABSENT)[name]
    return f"{_TRAINING}.{package}{name}{inside} is not in ortrain: {reason}"


def _set_seed(seed: int) -> None:
    """As ``onnxruntime.set_seed``: the seed of Dropout's masks, of all states loaded, or used by a module, afterwards.

    An onnxruntime that is installed is told as well.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"a seed is an integer, not {seed!r}")
    if not -(1 << 63) <= operator.index(seed) < 1 << 63:
        raise OutOfRangeError(f"a seed is an integer of 64 bits, from -2**63 to 2**63 - 1, not {seed}")
    _seeds.set_seed(operator.index(seed))
    theirs = _kept.get("set_seed")
    if theirs is not None:
        theirs(operator.index(seed))


def install() -> None:
    """Let ``onnxruntime.training.api``, ``.artifacts`` and ``.onnxblock`` be those of ortrain, in this process.

    ``onnxruntime.training.ORTTrainer``, and what belongs to it, are those of :mod:`ortrain.trainer`, and
    ``onnxruntime.capi.ort_trainer`` is :mod:`ortrain.trainer.legacy`.

    ``onnxcustom.training`` and ``onnxcustom.utils`` are :mod:`ortrain.gradient` and what lies below it: estimators that
    train ONNX models, and their helpers.

    An onnxruntime that is installed stays, and its ``OrtValue`` and ``SessionOptions`` are taken; where none is,
    ``onnxruntime`` has the part of ``InferenceSession``, ``OrtValue``, ``SessionOptions`` and ``RunOptions`` that
    ortrain has. Levels of its log may be set (``set_default_logger_severity``); ortrain logs nothing. A provider that
    is not there is a warning before the error, as it is for onnxruntime. Calling it again changes nothing.

    ``onnxruntime.set_seed`` sets the seed of every :class:`~ortrain.api.CheckpointState` that is loaded afterwards, or
    that a module or session is made on; a seed that is set on a state (``state.seed = 7``) after that stays. It is
    forgotten by :func:`uninstall`. Names of onnxruntime-training that ortrain does not have (``ORTModule``,
    ``FusedAdam``) are an ``ImportError`` that says what to use.

    ``onnxruntime.capi._pybind_state`` has the values, vectors and devices of :mod:`ortrain.capi`, and its exceptions.
    Where an onnxruntime is installed the rest of that module is its own, and so are the exceptions: those of ortrain
    are then theirs as well, so a handler for ``InvalidArgument`` catches both. Its own sessions take its own values.

    >>> import ortrain.compat
    >>> ortrain.compat.install()
    >>> from onnxruntime.capi._pybind_state import OrtDevice, OrtValue, OrtValueVector
    >>> OrtValueVector is ortrain.capi.OrtValueVector
    True
    >>> from onnxruntime.training.api import CheckpointState
    >>> CheckpointState.__module__
    'ortrain.api.checkpoint_state'
    >>> ortrain.compat.uninstall()
    """
    if _before:
        return
    core = _core()
    package = _Training(_TRAINING, "The training API of ortrain under the names of onnxruntime-training.")
    package.__path__ = []
    modules = {"onnxruntime": core, _TRAINING: package, **_MODULES, **_custom()}
    modules |= _stand_in(core) if core.__spec__ is None else _beside()
    training = types.ModuleType(_CAPI_TRAINING, "The classic training session of ortrain.")
    vars(training).update(_CLASSIC)
    modules[_CAPI_TRAINING] = training
    # What an onnxruntime-training that is installed has imported of its own is hidden, too.
    ours = (f"{_TRAINING}.", f"{_CUSTOM}.", _OLDER_TRAINER)
    hidden = [name for name in sys.modules if name.startswith(ours) and name not in modules]
    for name in [*modules, *hidden]:
        _before[name] = sys.modules.get(name)
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    core.capi._pybind_state = modules[_BEHIND]
    core.capi.training = training
    vars(core.capi).pop("ort_trainer", None)
    for name, kind in _CLASSIC.items():
        _classic_before[name] = getattr(core, name, None)
        setattr(core, name, kind)
    core.training = package  # type: ignore[attr-defined]
    if hasattr(core, "set_seed"):
        _kept["set_seed"] = core.set_seed
    core.set_seed = _set_seed  # type: ignore[attr-defined]
    for name in ("api", "artifacts"):
        setattr(package, name, _MODULES[f"{_TRAINING}.{name}"])
    vars(package).update(_CLASSIC)
    sys.meta_path.insert(0, _FINDER)
    _Beginnings.shown = True


def uninstall() -> None:
    """Undo :func:`install`: what was imported before is there again. Objects made meanwhile stay what they are.

    >>> import sys
    >>> import ortrain.compat
    >>> ortrain.compat.install()
    >>> ortrain.compat.uninstall()
    >>> "onnxruntime.training.api" in sys.modules
    False
    """
    if not _before:
        return
    sys.meta_path.remove(_FINDER)
    _Beginnings.shown = False
    core = sys.modules["onnxruntime"]
    if "set_seed" in _kept:
        core.set_seed = _kept.pop("set_seed")  # type: ignore[attr-defined]
    else:
        del core.set_seed
    _seeds.set_seed(None)
    if _before[_BEHIND] is not None:
        core.capi._pybind_state = _before[_BEHIND]
    if hasattr(core.capi, "training"):
        del core.capi.training
    sys.modules.pop(_OLDER_TRAINER, None)
    vars(core.capi).pop("ort_trainer", None)
    if _before.get(_OLDER_TRAINER) is not None:
        core.capi.ort_trainer = _before[_OLDER_TRAINER]
    for name, kind in _classic_before.items():
        if kind is None:
            delattr(core, name)
        else:
            setattr(core, name, kind)
    _classic_before.clear()
    for kind, bases in _bases.items():
        kind.__bases__ = bases
    _bases.clear()
    if _before[_TRAINING] is None:
        del core.training
    else:
        core.training = _before[_TRAINING]  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith((_TRAINING, f"{_CUSTOM}.")) or name == _CUSTOM]:
        del sys.modules[name]
    for name, value in _before.items():
        sys.modules.pop(name, None)
        if value is not None:
            sys.modules[name] = value
    _before.clear()


def _core() -> types.ModuleType:
    """``onnxruntime``, or what stands for it."""
    try:
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
    core = types.ModuleType("onnxruntime", "The part of onnxruntime that ortrain has.")
    core.__path__ = []
    vars(core).update(_CORE)
    return core


def _custom() -> dict[str, types.ModuleType]:
    """The packages of onnxcustom; their modules are found when they are asked for."""
    made = {name: types.ModuleType(name, f"{name}, as far as ortrain has it.") for name in _PACKAGES}
    for packaged in made.values():
        packaged.__path__ = []
    whole, training = made[_CUSTOM], made[f"{_CUSTOM}.training"]
    vars(whole).update({"__version__": "0.4.344", "__max_supported_opset__": _NEWEST})
    whole.__max_supported_opsets__ = {"": _NEWEST, "ai.onnx.ml": 2}  # type: ignore[attr-defined]
    vars(training).update({name: getattr(excs, name) for name in excs.__all__})
    for name, packaged in made.items():
        package, _, own = name.rpartition(".")
        if package:
            setattr(made[package], own, packaged)
    return made


def _stand_in(core: types.ModuleType) -> dict[str, types.ModuleType]:
    """What stands behind the ``onnxruntime`` that stands for one."""
    behind = types.ModuleType(_BEHIND, "The part of onnxruntime's extension module that ortrain has.")
    beside = {"InferenceSession": InferenceSession, "set_seed": _set_seed}
    vars(behind).update({name: _CORE[name] for name in _ABOUT} | beside | _VALUES | _EXCEPTIONS)
    package = types.ModuleType(_BEHIND.rpartition(".")[0])
    package.__path__ = []
    package.onnxruntime_pybind11_state = behind  # type: ignore[attr-defined]
    core.capi = package  # type: ignore[attr-defined]
    return {package.__name__: package, _BEHIND: behind, _EXTENSION: behind}


def _beside() -> dict[str, types.ModuleType]:
    """The module behind an ``onnxruntime`` that is installed, with what ortrain has of it."""
    theirs = importlib.import_module(_BEHIND)
    behind = types.ModuleType(_BEHIND, theirs.__doc__)
    vars(behind).update(vars(theirs) | _VALUES)
    for name, kind in _EXCEPTIONS.items():
        # A name that they do not have (any more) is ours.
        same = vars(behind).setdefault(name, kind)
        if same is not kind:
            _bases.setdefault(kind, kind.__bases__)
            kind.__bases__ = (*kind.__bases__, same)
    return {_BEHIND: behind}
