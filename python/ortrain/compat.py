"""Layer that runs scripts for onnxruntime-training and for onnxcustom without changes.

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
# Modules that need the package `onnx` and are imported on demand.
_LATER = {f"{_TRAINING}.onnxblock": "ortrain.onnxblock"} | {
    f"{_TRAINING}.onnxblock.{name}": f"ortrain.onnxblock.{name}" for name in ("blocks", "loss", "optim")
}
# Names of ORTTrainer, which needs more packages.
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
# Modules of onnxcustom, which trains with onnxruntime-training; also imported on demand.
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
# Newest opset that onnxcustom declares to support.
_NEWEST = 15


def _level_of_log(level: int) -> None:
    """Accept any log level, as ``onnxruntime.set_default_logger_severity`` and ``_verbosity``: nothing is logged."""
    operator.index(level)


def _available_providers() -> list[str]:
    """Return the names of the providers of this machine, the fastest first, as onnxruntime lists them."""
    from ortrain._devices import devices, is_cuda, is_gpu

    gpus = [device.name for device in devices() if device.kind in ("discrete", "integrated")]
    has_cuda, has_other = any(map(is_cuda, gpus)), any(map(is_gpu, gpus))
    cuda = ["CUDAExecutionProvider"] if has_cuda else []
    return [*cuda, *(["WebGpuExecutionProvider"] if has_other else []), "CPUExecutionProvider"]


# Names that scripts import from onnxruntime itself, for machines without onnxruntime.
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
# Names of the package onnxruntime and of `onnxruntime.capi.training` until release 1.15.
_CLASSIC = {"TrainingParameters": classic.TrainingParameters, "TrainingSession": classic.TrainingSession}
_CAPI_TRAINING = "onnxruntime.capi.training"
# Previous values of these names in an installed onnxruntime.
_classic_before: dict[str, object] = {}
# Functions of an installed onnxruntime that ortrain replaces.
_saved: dict[str, Callable[[int], None]] = {}
# Module behind onnxruntime, which scripts also ask for providers. ortrain adds the names of `capi` to it.
_PYBIND_STATE = "onnxruntime.capi._pybind_state"
# Module that scripts usually import exceptions from.
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
# Base classes of our exceptions before an installed onnxruntime added its own.
_bases: dict[type[BaseException], tuple[type, ...]] = {}

# Features of onnxruntime-training that ortrain does not have, and their replacements.
_EXPORT = (
    "export the model to an .onnx file (torch.onnx.export) and train the file: artifacts.generate_artifacts, then "
    "CheckpointState, Module and Optimizer of onnxruntime.training.api"
)
_OPTIMIZERS = (
    "write artifacts with optimizer=OptimType.AdamW or OptimType.SGD (for settings and gradient clipping: "
    "onnxruntime.training.onnxblock.optim), then use Optimizer of onnxruntime.training.api"
)
_PRECISION = "set precision='bf16' of a Module, which needs no loss scale because sums stay float32"
_ABSENT = {
    "ORTModule": f"it wraps modules of PyTorch, and ortrain trains ONNX models: {_EXPORT}",
    "ortmodule": f"it wraps modules of PyTorch, and ortrain trains ONNX models: {_EXPORT}",
    "is_ortmodule_available": f"ortrain has no ORTModule: {_EXPORT}",
    "TrainingAgent": "use onnxruntime.capi._pybind_state.TrainingAgent, which takes a session",
    "FusedAdam": f"it updates parameters of PyTorch: {_OPTIMIZERS}",
    "FP16_Optimizer": f"it wraps optimizers of PyTorch: {_OPTIMIZERS}; {_PRECISION}",
    "hooks": f"they watch modules of PyTorch: {_EXPORT}",
    "utils": f"they are helpers for PyTorch: {_EXPORT}",
    "experimental": f"it belongs to ORTModule: {_EXPORT}",
}
# The same for the package of optimizers, under both of its names.
_ABSENT_IN_OPTIM = {
    **{name: _ABSENT[name] for name in ("FusedAdam", "FP16_Optimizer")},
    "fp16_optimizer": _ABSENT["FP16_Optimizer"],
    "fused_adam": _ABSENT["FusedAdam"],
}
_OPTIM_PACKAGES = (f"{_TRAINING}.optim", "ortrain.trainer.optim")
# Class names that are better known than the absent modules that contained them.
_INSIDE = {"fp16_optimizer": "FP16_Optimizer", "fused_adam": "FusedAdam", "ortmodule": "ORTModule"}

_before: dict[str, types.ModuleType | None] = {}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that finds modules of ortrain under their names in onnxruntime-training."""

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
        # The module keeps its own name and spec.
        found, spec = self._own
        found.__spec__ = spec


_FINDER = _Finder()


class _Training(types.ModuleType):
    """Package ``onnxruntime.training``, with error messages that name the replacement of an absent name."""

    def __getattr__(self, name: str) -> object:
        if name in _ABSENT:
            raise AttributeError(_absent(name))
        if name in _TRAINER:
            return getattr(importlib.import_module("ortrain.trainer"), name)
        if name in _TRAINER_MODULES:
            return importlib.import_module(f"{_TRAINING}.{name}")
        from ortrain._suggest import hint

        there = ["api", "artifacts", "onnxblock", *_CLASSIC, *_TRAINER, *_TRAINER_MODULES]
        near = "" if name.startswith("__") else hint(name, [*_ABSENT, *there])
        raise AttributeError(f"module {_TRAINING!r} has no attribute {name!r}{near}")


def _absent(name: str, package: str = "") -> str:
    inside = f" (with {_INSIDE[name]})" if name in _INSIDE else ""
    reason = (_ABSENT_IN_OPTIM if package else _ABSENT)[name]
    return f"{_TRAINING}.{package}{name}{inside} is not in ortrain: {reason}"


def _set_seed(seed: int) -> None:
    """Set the seed of Dropout masks, as ``onnxruntime.set_seed``, for all states that are loaded or used afterwards.

    An installed onnxruntime gets the seed as well.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"a seed must be an integer, got {seed!r}")
    if not -(1 << 63) <= operator.index(seed) < 1 << 63:
        raise OutOfRangeError(f"a seed must be a 64-bit integer, from -2**63 to 2**63 - 1, got {seed}")
    _seeds.set_seed(operator.index(seed))
    theirs = _saved.get("set_seed")
    if theirs is not None:
        theirs(operator.index(seed))


def install() -> None:
    """Replace ``onnxruntime.training.api``, ``.artifacts`` and ``.onnxblock`` by the modules of ortrain.

    The replacement holds for this process. ``onnxruntime.training.ORTTrainer`` and related names come from
    :mod:`ortrain.trainer`, and ``onnxruntime.capi.ort_trainer`` is :mod:`ortrain.trainer.legacy`.

    ``onnxcustom.training`` and ``onnxcustom.utils`` are :mod:`ortrain.gradient` and its submodules: estimators that
    train ONNX models, and their helpers.

    An installed onnxruntime stays, and its ``OrtValue`` and ``SessionOptions`` are accepted. Without it,
    ``onnxruntime`` has ortrain's part of ``InferenceSession``, ``OrtValue``, ``SessionOptions`` and ``RunOptions``.
    Log levels may be set (``set_default_logger_severity``), but ortrain logs nothing. An unavailable provider causes a
    warning before the error, as in onnxruntime. A second call of this function changes nothing.

    ``onnxruntime.set_seed`` sets the seed of every :class:`~ortrain.api.CheckpointState` that is loaded afterwards, or
    that a module or session is then made on. A later ``state.seed = 7`` keeps its effect. :func:`uninstall` clears the
    seed. A name of onnxruntime-training that ortrain does not have (``ORTModule``, ``FusedAdam``) is an
    ``ImportError`` that names the replacement.

    ``onnxruntime.capi._pybind_state`` has the values, vectors, devices and exceptions of :mod:`ortrain.capi`. If
    onnxruntime is installed, the other names of that module, and the exceptions, are its own. The exceptions of ortrain
    then derive from them as well, so a handler for ``InvalidArgument`` catches both. Sessions of onnxruntime take
    values of onnxruntime.

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
    # Modules that an installed onnxruntime-training has already imported are hidden, too.
    ours = (f"{_TRAINING}.", f"{_CUSTOM}.", _OLDER_TRAINER)
    hidden = [name for name in sys.modules if name.startswith(ours) and name not in modules]
    for name in [*modules, *hidden]:
        _before[name] = sys.modules.get(name)
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    core.capi._pybind_state = modules[_PYBIND_STATE]
    core.capi.training = training
    vars(core.capi).pop("ort_trainer", None)
    for name, kind in _CLASSIC.items():
        _classic_before[name] = getattr(core, name, None)
        setattr(core, name, kind)
    core.training = package  # type: ignore[attr-defined]
    if hasattr(core, "set_seed"):
        _saved["set_seed"] = core.set_seed
    core.set_seed = _set_seed  # type: ignore[attr-defined]
    for name in ("api", "artifacts"):
        setattr(package, name, _MODULES[f"{_TRAINING}.{name}"])
    vars(package).update(_CLASSIC)
    sys.meta_path.insert(0, _FINDER)
    _Beginnings.shown = True


def uninstall() -> None:
    """Undo :func:`install` and restore the modules imported before. Objects made meanwhile do not change.

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
    if "set_seed" in _saved:
        core.set_seed = _saved.pop("set_seed")  # type: ignore[attr-defined]
    else:
        del core.set_seed
    _seeds.set_seed(None)
    if _before[_PYBIND_STATE] is not None:
        core.capi._pybind_state = _before[_PYBIND_STATE]
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
    """Return ``onnxruntime``, or a substitute module if it is not installed."""
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
    """Return the packages of onnxcustom; their modules are imported on demand."""
    modules = {name: types.ModuleType(name, f"{name}, as far as ortrain has it.") for name in _PACKAGES}
    for packaged in modules.values():
        packaged.__path__ = []
    root, training = modules[_CUSTOM], modules[f"{_CUSTOM}.training"]
    vars(root).update({"__version__": "0.4.344", "__max_supported_opset__": _NEWEST})
    root.__max_supported_opsets__ = {"": _NEWEST, "ai.onnx.ml": 2}  # type: ignore[attr-defined]
    vars(training).update({name: getattr(excs, name) for name in excs.__all__})
    for name, packaged in modules.items():
        package, _, own = name.rpartition(".")
        if package:
            setattr(modules[package], own, packaged)
    return modules


def _stand_in(core: types.ModuleType) -> dict[str, types.ModuleType]:
    """Return the extension modules of the substitute for ``onnxruntime``."""
    extension = types.ModuleType(_PYBIND_STATE, "The part of onnxruntime's extension module that ortrain has.")
    beside = {"InferenceSession": InferenceSession, "set_seed": _set_seed}
    vars(extension).update({name: _CORE[name] for name in _ABOUT} | beside | _VALUES | _EXCEPTIONS)
    package = types.ModuleType(_PYBIND_STATE.rpartition(".")[0])
    package.__path__ = []
    package.onnxruntime_pybind11_state = extension  # type: ignore[attr-defined]
    core.capi = package  # type: ignore[attr-defined]
    return {package.__name__: package, _PYBIND_STATE: extension, _EXTENSION: extension}


def _beside() -> dict[str, types.ModuleType]:
    """Return the extension module of an installed ``onnxruntime``, with the names of ortrain added."""
    theirs = importlib.import_module(_PYBIND_STATE)
    extension = types.ModuleType(_PYBIND_STATE, theirs.__doc__)
    vars(extension).update(vars(theirs) | _VALUES)
    for name, kind in _EXCEPTIONS.items():
        # Our exception is used if onnxruntime does not have the name (any more).
        same = vars(extension).setdefault(name, kind)
        if same is not kind:
            _bases.setdefault(kind, kind.__bases__)
            kind.__bases__ = (*kind.__bases__, same)
    return {_PYBIND_STATE: extension}
