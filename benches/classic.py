"""Comparison of the classic TrainingSession with the step of a Module and its optimizer: ratios of times.

    python benches/classic.py [NAME ...] [--rounds N]

Both variants compute the same gradients. The Module's optimizer is AdamW. The session's optimizers are Adam and LAMB,
each with and without clipping, like AdamW in the same comparison. The variants take turns of several steps, and the
median step of a turn counts. The first step of a turn finds the caches full of the other variant's data. A ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import workloads
from onnx import helper

from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.classic import TrainingParameters, TrainingSession

# Maximum ratio of a run to the step with AdamW, by optimizer.
AIMS = {"AdamOptimizer": 1.05, "LambOptimizer": 1.15}
NAMES = ("mlp", "resnet18_224")
WARM = 5
# Number of steps in a turn.
STEPS = 5


def milliseconds(step: Callable[[], object]) -> float:
    """Returns the median time of the steps of a turn, in milliseconds."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def of_module(name: str, folder: Path, clipped: bool) -> tuple[Module, Optimizer, Path]:
    """Returns a Module with AdamW, and the path of the model with its loss."""
    optimizer = onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(1.0) if clipped else None)
    artifacts.generate_artifacts(
        workloads.load(name),
        requires_grad=workloads.about(name)["trainable_names"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=optimizer,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.train()
    path = folder / "with_loss.onnx"
    module.export_model_for_inferencing(path, [module.output_names()[0]])
    use_statistics_of_batches(path)
    return module, Optimizer(folder / "optimizer_model.onnx", module), path


def use_statistics_of_batches(path: Path) -> None:
    """Switches each BatchNormalization of a model to training mode, as in a Module.

    With the running statistics of an untrained model, activations overflow. A step on infinities and NaNs takes a
    hundred times as long.
    """
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("training_mode", 1)])
            node.output.extend(f"{node.output[0]}/{name}" for name in ("mean", "variance"))
    onnx.save(model, path)


def of_session(name: str, path: Path, optimizer: str, clipped: bool, loss: str) -> TrainingSession:
    """Returns a classic session of the same model."""
    trained = workloads.about(name)["trainable_names"]
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = loss, optimizer
    parameters.weights_to_train = set(trained)
    parameters.optimizer_attributes_map = {weight: {"lambda": 0.01} for weight in trained}
    parameters.optimizer_int_attributes_map = {weight: {} for weight in trained}
    parameters.enable_grad_norm_clip = clipped
    return TrainingSession(path, parameters)


def compare(name: str, optimizer: str, clipped: bool, rounds: int, folder: Path) -> tuple[float, float]:
    """Returns the ratio, and the milliseconds of the step with AdamW."""
    module, adamw, path = of_module(name, folder, clipped)
    session = of_session(name, path, optimizer, clipped, module.output_names()[0])
    x, labels = workloads.batch(name, 0)
    inputs = [entry.name for entry in session.get_inputs()]
    feeds = dict(zip(inputs, (x, labels, np.array([1e-4], np.float32)), strict=True))
    loss = [session.get_outputs()[0].name]

    def step() -> None:
        module(x, labels)
        adamw.step()
        module.lazy_reset_grad()

    def run() -> None:
        session.run(loss, feeds)

    for _ in range(WARM):
        step()
        run()
    pairs = [(milliseconds(step), milliseconds(run)) for _ in range(rounds)]
    return statistics.median(second / first for first, second in pairs), statistics.median(first for first, _ in pairs)


def main() -> int:
    """Prints a line for each workload and optimizer. The exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.names or NAMES:
        for optimizer, aim in AIMS.items():
            for clipped in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    ratio, step = compare(name, optimizer, clipped, arguments.rounds, Path(folder))
                missed += ratio > aim
                how = "clipped" if clipped else "not clipped"
                print(f"{name}, {optimizer}, {how}: {ratio:.3f} (at most {aim}), step with AdamW {step:.2f} ms")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
