"""Optimizers with settings, parameter groups, gradient clipping and weight averages, for training artifacts.

Each class is a row of the table of optimizers. Its arguments are the settings of the row. Their defaults are those
of the PyTorch class of the same name, if PyTorch has one. :func:`ortrain.artifacts.generate_artifacts` writes plain
:class:`AdamW` and plain :class:`SGD` as artifacts that onnxruntime-training loads. All other optimizers become
optimizer models in plain ONNX.

>>> import ortrain
>>> from ortrain import optim
>>> config = optim.AdamW(
...     lr=3e-4,
...     weight_decay=0.05,
...     max_norm=1.0,
...     groups=[
...         {"params": "*.bias", "weight_decay": 0},
...         {"params": "fc1.weight", "lr_factor": 0.1, "frozen_steps": 2},
...     ],
... )
>>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=ortrain.LossType.CrossEntropyLoss, optimizer=config)
>>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> _ = module(x, labels)
>>> norm = optimizer.step()
>>> [len(group.parameters) for group in optimizer.groups]
[2, 1, 1]
"""

from ortrain.optim._config import Group, OptimizerConfig, OptimizerRow, table
from ortrain.optim._live import ParameterGroup
from ortrain.optim._own import OwnOptimizer, Value, register

# `make optimizers` writes the rest of this file.
from ortrain.optim._rows import (
    LAMB,
    LARS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    ScheduleFreeAdamW,
)

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Group",
    "Lion",
    "Muon",
    "NAdam",
    "OptimizerConfig",
    "OptimizerRow",
    "OwnOptimizer",
    "ParameterGroup",
    "RAdam",
    "RMSprop",
    "ScheduleFreeAdamW",
    "Value",
    "register",
    "table",
]
