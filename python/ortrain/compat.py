"""Scripts written for onnxruntime-training, unchanged.

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
import sys
import types
from collections.abc import Sequence

import ortrain
from ortrain import api, artifacts
from ortrain.api import checkpoint_state, lr_scheduler, module, optimizer

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
# What a script takes from onnxruntime itself, where that is not installed.
_CORE = {
    "InferenceSession": ortrain.InferenceSession,
    "NodeArg": ortrain.NodeArg,
    "OrtValue": ortrain.OrtValue,
    "RunOptions": ortrain.RunOptions,
    "SessionOptions": ortrain.SessionOptions,
    "__version__": "1.19.2",
    "get_available_providers": lambda: ["CPUExecutionProvider"],
    "get_device": lambda: "CPU",
}
# And from the module behind it, which scripts ask for providers.
_BEHIND = "onnxruntime.capi._pybind_state"
_ABOUT = ("RunOptions", "SessionOptions", "get_available_providers", "get_device")

_before: dict[str, types.ModuleType | None] = {}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of ortrain under the names that onnxruntime-training has for them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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


def install() -> None:
    """Let ``onnxruntime.training.api``, ``.artifacts`` and ``.onnxblock`` be those of ortrain, in this process.

    An onnxruntime that is installed stays, and its ``OrtValue`` and ``SessionOptions`` are taken; where none is,
    ``onnxruntime`` has the part of ``InferenceSession``, ``OrtValue``, ``SessionOptions`` and ``RunOptions`` that
    ortrain has. Calling it again changes nothing.

    >>> import ortrain.compat
    >>> ortrain.compat.install()
    >>> from onnxruntime.training.api import CheckpointState
    >>> CheckpointState.__module__
    'ortrain.api.checkpoint_state'
    >>> ortrain.compat.uninstall()
    """
    if _before:
        return
    core = _core()
    package = types.ModuleType(_TRAINING, "The training API of ortrain under the names of onnxruntime-training.")
    package.__path__ = []
    modules = {"onnxruntime": core, _TRAINING: package, **_MODULES}
    if core.__spec__ is None:
        modules |= _capi(core)
    # What an onnxruntime-training that is installed has imported of its own is hidden, too.
    hidden = [name for name in sys.modules if name.startswith(f"{_TRAINING}.") and name not in modules]
    for name in [*modules, *hidden]:
        _before[name] = sys.modules.get(name)
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    core.training = package  # type: ignore[attr-defined]
    for name in ("api", "artifacts"):
        setattr(package, name, _MODULES[f"{_TRAINING}.{name}"])
    sys.meta_path.insert(0, _FINDER)


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
    core = sys.modules["onnxruntime"]
    if _before[_TRAINING] is None:
        del core.training
    else:
        core.training = _before[_TRAINING]  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith(_TRAINING)]:
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


def _capi(core: types.ModuleType) -> dict[str, types.ModuleType]:
    """What stands behind the ``onnxruntime`` that stands for one."""
    behind = types.ModuleType(_BEHIND, "The part of onnxruntime's extension module that ortrain has.")
    vars(behind).update({name: _CORE[name] for name in _ABOUT})
    capi = types.ModuleType(_BEHIND.rpartition(".")[0])
    capi.__path__ = []
    capi._pybind_state = behind  # type: ignore[attr-defined]
    core.capi = capi  # type: ignore[attr-defined]
    return {capi.__name__: capi, _BEHIND: behind}
