"""Comparison of ORTTrainer's steps with runs of an equivalent classic TrainingSession.

    python benches/orttrainer.py [NAME ...] [--rounds N]

Both train with Adam and clipping, from the same weights, on the same batch, in turns. The target on `bert_mini` is the
ratio of times; the target on `mlp` is the microseconds that the trainer adds to a run. Both numbers are medians over
pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import workloads

from ortrain import artifacts
from ortrain.api import CheckpointState, Module
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.trainer import ORTTrainer, ORTTrainerOptions
from ortrain.trainer.optim import AdamConfig

# Maximum ratio of a step to a run, and maximum microseconds that a step takes longer, by workload.
RATIOS = {"bert_mini": 1.05}
MICROSECONDS = {"mlp": 60.0}
NAMES = (*RATIOS, *MICROSECONDS)
WARM = 5


def microseconds(step: Callable[[], object]) -> float:
    """Returns the time of a step in microseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def with_loss(name: str, folder: Path) -> onnx.ModelProto:
    """Returns the model of a workload with its loss as the only output."""
    artifacts.generate_artifacts(
        workloads.load(name),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.export_model_for_inferencing(folder / "with_loss.onnx", [module.output_names()[0]])
    return onnx.load(folder / "with_loss.onnx")


def frozen(name: str, model: onnx.ModelProto) -> list[str]:
    """Returns the initializers that are not trained."""
    trained = set(workloads.about(name)["trainable_names"])
    return [tensor.name for tensor in model.graph.initializer if tensor.name not in trained]


def of_trainer(name: str, model: onnx.ModelProto) -> ORTTrainer:
    """Builds a trainer of the model."""

    def shape(value: onnx.ValueInfoProto) -> list[int | str]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    description = {
        "inputs": [(value.name, shape(value)) for value in model.graph.input],
        "outputs": [(value.name, shape(value), True) for value in model.graph.output],
    }
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "utils": {"frozen_weights": frozen(name, model)}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(model, description, AdamConfig(lr=workloads.LEARNING_RATE), options=options)


def of_session(name: str, model: onnx.ModelProto) -> TrainingSession:
    """Builds a classic session with the same settings, which are the defaults of both."""
    trained = workloads.about(name)["trainable_names"]
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = model.graph.output[0].name, "AdamOptimizer"
    parameters.weights_to_train = set(trained)
    parameters.optimizer_attributes_map = {weight: {} for weight in trained}
    parameters.optimizer_int_attributes_map = {weight: {} for weight in trained}
    return TrainingSession(model.SerializeToString(), parameters)


def compare(name: str, rounds: int, folder: Path) -> tuple[float, float, float]:
    """Returns the ratio, the microseconds that the trainer adds, and the microseconds of a run."""
    model = with_loss(name, folder)
    session, trainer = of_session(name, model), of_trainer(name, model)
    x, labels = workloads.batch(name, 0)
    inputs = [entry.name for entry in session.get_inputs()]
    feeds = dict(zip(inputs, (x, labels, np.array([workloads.LEARNING_RATE], np.float32)), strict=True))
    loss = [session.get_outputs()[0].name]

    def run() -> float:
        return float(session.run(loss, feeds)[0])

    def step() -> float:
        return float(trainer.train_step(x, labels))

    for _ in range(WARM):
        first, second = run(), step()
        assert abs(first - second) <= 1e-5 * abs(first), f"the losses differ: {first} and {second}"
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds):
        # The order alternates, because a step finds the caches in the state that the previous step left.
        if turn % 2:
            after = microseconds(step)
            pairs.append((microseconds(run), after))
        else:
            before = microseconds(run)
            pairs.append((before, microseconds(step)))
    return (
        statistics.median(second / first for first, second in pairs),
        statistics.median(second - first for first, second in pairs),
        statistics.median(first for first, _ in pairs),
    )


def main() -> int:
    """Prints a line for each workload. The exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            ratio, added, run = compare(name, arguments.rounds, Path(folder))
        aims = []
        if name in RATIOS:
            missed += ratio > RATIOS[name]
            aims.append(f"ratio at most {RATIOS[name]}")
        if name in MICROSECONDS:
            missed += added > MICROSECONDS[name]
            aims.append(f"at most {MICROSECONDS[name]:.0f} µs more")
        print(f"{name}: ratio {ratio:.3f}, {added:+.0f} µs of {run:.0f} µs ({', '.join(aims)})")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
