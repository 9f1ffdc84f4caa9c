"""Train ONNX models where they run.

============================  =========================================================================
:class:`Model`                train in two lines: ``fit``, ``evaluate``, ``predict``, ``save``, ``export``
:mod:`ortrain.callbacks`      callbacks of ``fit``: early stopping, checkpoints, logs
:mod:`ortrain.metrics`        metrics of ``fit``: accuracy, F1, AUROC and more
:mod:`ortrain.data`           data in files for ``fit``: images, tables, arrays, texts, audio
:mod:`ortrain.artifacts`      write the files that training needs, once per ONNX model
:mod:`ortrain.onnxblock`      build losses and optimizers of your own from blocks; needs ``onnx``
:mod:`ortrain.api`            train: ``CheckpointState``, ``Module``, ``Optimizer``, ``LinearLRScheduler``
:mod:`ortrain.optim`          optimizers with settings and parameter groups: Adam, LAMB, Lion and more
:mod:`ortrain.schedules`      learning rate schedules: cosine, one-cycle, plateau and more; warm-up
:mod:`ortrain.lora`           low-rank adapters: train large models with few parameters; PEFT's files
:mod:`ortrain.gradient`       the gradient of any model, as a model
:mod:`ortrain.data`           images, tables, arrays, texts and audio in files as rows for training
:mod:`ortrain.flower`         federated training with Flower; needs ``flwr``
:mod:`ortrain.session`        training through one object: the ``TrainingSession`` of C#
:mod:`ortrain.classic`        the ``TrainingSession`` of onnxruntime 1.15: model, gradients, update in one ``run``
:class:`InferenceSession`     run a model
:class:`OperatorLibrary`      custom definitions: operators and gradients for all of these modules
:mod:`ortrain.compat`         run scripts written for ``onnxruntime.training`` unchanged
:mod:`ortrain.backend`        the backend interface of ONNX, for its tests; needs ``onnx``
:mod:`ortrain.examples`       small ONNX models of the package, for first experiments
``ortrain inspect``           report on a model: trained parameters, obstacles, the cost of a step
``ortrain checkpoint``        list the contents of a checkpoint: parameters, step, learning rate, properties
``ortrain dump``              print a model at one stage of its compilation
``ortrain.devices()``         devices of this machine: the processor and the GPUs, with the names for ``device=``
:func:`operators`             all operators: versions, types, gradient, implementation
============================  =========================================================================

The most used names are also in this package: ``from ortrain import CheckpointState, Module, Optimizer,
generate_artifacts``. Modules are imported at first use; ``import ortrain`` is enough to reach all of them.

Names and meanings follow ``onnxruntime.training``; ``docs/migrating.md`` lists every difference. NumPy is the only
required package, except where the table names another one. The library prints nothing. Every error is an
:class:`OrtrainError`; its text names the place and the repair.

>>> import ortrain
>>> from ortrain import CheckpointState, LossType, Module, Optimizer, OptimType
>>> model = ortrain.examples.perceptron()
>>> ortrain.generate_artifacts(model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW)
>>> state = CheckpointState.load_checkpoint("checkpoint")
>>> module = Module("training_model.onnx", state, "eval_model.onnx")
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> losses = []
>>> for step in range(10):
...     losses.append(float(module(x, labels)))
...     optimizer.step()
...     module.lazy_reset_grad()
>>> losses[-1] < losses[0]
True
>>> module.export_model_for_inferencing("trained.onnx", ["logits"])
>>> (logits,) = ortrain.InferenceSession("trained.onnx").run(None, {"x": x})
>>> logits.shape
(8, 10)
"""

import importlib
from typing import TYPE_CHECKING, Any

from ortrain import api
from ortrain._operators import OperatorLibrary
from ortrain._ortrain import DeviceArray, __version__
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from ortrain.errors import (
    AnomalyError,
    DeviceLostError,
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidModelError,
    MemoryLimitError,
    NoSuchFileError,
    OrtrainError,
    OutOfRangeError,
    TrainingWarning,
    UnsupportedError,
)
from ortrain.inference import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    InferenceSession,
    ModelMetadata,
    NodeArg,
    RunOptions,
    SessionOptions,
)
from ortrain.iobinding import IOBinding
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    from ortrain import (
        artifacts,
        callbacks,
        classic,
        compat,
        data,
        examples,
        gradient,
        lora,
        metrics,
        optim,
        schedules,
        session,
    )
    from ortrain._catalogue import OperatorInfo, operators
    from ortrain._devices import DeviceInfo, devices
    from ortrain._dump import dump
    from ortrain._fit.history import History
    from ortrain._fit.model import Model
    from ortrain._inspect import (
        GradientStop,
        Inspection,
        NodeNote,
        Obstacle,
        ParameterInfo,
        StepCost,
        StopCandidate,
        inspect,
    )
    from ortrain.artifacts import Loss, LossType, OptimType, generate_artifacts
    from ortrain.session import TrainingSession

__all__ = [
    "AnomalyError",
    "CheckpointState",
    "DeviceArray",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceUnavailableError",
    "ExecutionMode",
    "ExecutionOrder",
    "GradientStop",
    "GraphOptimizationLevel",
    "History",
    "IOBinding",
    "InferenceSession",
    "Inspection",
    "InvalidArgumentError",
    "InvalidModelError",
    "LinearLRScheduler",
    "Loss",
    "LossType",
    "MemoryLimitError",
    "Model",
    "ModelMetadata",
    "Module",
    "NoSuchFileError",
    "NodeArg",
    "NodeNote",
    "Obstacle",
    "OperatorInfo",
    "OperatorLibrary",
    "OptimType",
    "Optimizer",
    "OrtValue",
    "OrtrainError",
    "OutOfRangeError",
    "ParameterInfo",
    "RunOptions",
    "SessionOptions",
    "StepCost",
    "StopCandidate",
    "TrainingSession",
    "TrainingWarning",
    "UnsupportedError",
    "__version__",
    "api",
    "artifacts",
    "callbacks",
    "classic",
    "compat",
    "data",
    "devices",
    "dump",
    "examples",
    "generate_artifacts",
    "gradient",
    "inspect",
    "lora",
    "metrics",
    "operators",
    "optim",
    "schedules",
    "session",
]

# Modules that training does not need. Importing them at first use makes the start of a training faster.
_MODULES = {
    "artifacts",
    "backend",
    "callbacks",
    "capi",
    "classic",
    "compat",
    "data",
    "examples",
    "flower",
    "gradient",
    "jax",
    "lora",
    "metrics",
    "onnxblock",
    "optim",
    "schedules",
    "session",
    "sklearn",
    "torch",
}
_LATER = {
    "DeviceInfo": "_devices",
    "GradientStop": "_inspect",
    "History": "_fit.history",
    "Inspection": "_inspect",
    "Loss": "artifacts",
    "LossType": "artifacts",
    "Model": "_fit.model",
    "NodeNote": "_inspect",
    "Obstacle": "_inspect",
    "OperatorInfo": "_catalogue",
    "OptimType": "artifacts",
    "ParameterInfo": "_inspect",
    "StepCost": "_inspect",
    "StopCandidate": "_inspect",
    "TrainingSession": "session",
    "devices": "_devices",
    "dump": "_dump",
    "generate_artifacts": "artifacts",
    "inspect": "_inspect",
    "operators": "_catalogue",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return importlib.import_module(f"ortrain.{name}")
        except ModuleNotFoundError as error:
            # help() and other callers that list all attributes continue after an AttributeError.
            raise AttributeError(
                f"ortrain.{name} needs the package {error.name!r}, which is not installed here"
            ) from error
    if name not in _LATER:
        from ortrain._suggest import hint

        near = "" if name.startswith("_") else hint(name, __dir__())
        raise AttributeError(f"module 'ortrain' has no attribute {name!r}{near}")
    value = globals()[name] = getattr(importlib.import_module(f"ortrain.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_LATER})
