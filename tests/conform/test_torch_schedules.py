"""Schedules give the learning rates of PyTorch's schedulers, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import environments
import numpy as np

import ortrain
from ortrain import schedules
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.schedules import LRScheduler

SCRIPT = Path(__file__).parent.parent / "in_torch" / "schedules.py"
# PyTorch computes each rate from the previous rate, and our rates are rounded to float32.
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


def optimizer_of(folder: Path) -> Optimizer:
    model = ortrain.examples.perceptron()
    kinds = ortrain.LossType.CrossEntropyLoss, ortrain.OptimType.SGD
    ortrain.generate_artifacts(model, loss=kinds[0], optimizer=kinds[1], artifact_directory=folder)
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    return Optimizer(folder / "optimizer_model.onnx", module)


def test_rates_are_those_of_pytorch(tmp_path: Path) -> None:
    found = json.loads(environments.in_environment(environments.torch(), SCRIPT))
    kinds = set()
    for text, wanted in found["schedules"].items():
        schedule = eval(text, vars(schedules))
        kinds.add(type(schedule).__name__)
        rates = []
        if isinstance(schedule, schedules.ReduceOnPlateau):
            scheduler = LRScheduler(optimizer_of(tmp_path), schedule, lr=1.0)
            for metric in found["metrics"]:
                rates.append(scheduler.get_last_lr())
                scheduler.step(metric)
        else:
            rates = [schedule(t) for t in range(len(wanted))]
        np.testing.assert_allclose(rates, wanted, **CLOSE, err_msg=text)
    elsewhere = {"Constant", "InverseSquareRoot"}  # PyTorch has no equivalents
    assert kinds == {kind.__name__ for kind in schedules.Schedule.__subclasses__()} - elsewhere
