"""Peers with the on-device API: ortrain and onnxruntime-training, each in its own environment.

    python on_device.py ortrain|onnxruntime FOLDER THREADS FIRST_LOSSES

Both make their own artifacts from the forward model, in the folder, which must be theirs. Needs NumPy, `onnx` and the
library.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from turns import Turns


def ortrain(folder: Path, settings: dict[str, Any], threads: int) -> tuple[Any, Any, dict[str, Any]]:
    """The API, session options, facts; the artifacts lie in the folder."""
    library = importlib.import_module("ortrain")
    library.artifacts.generate_artifacts(
        folder / "forward.onnx",
        requires_grad=settings["trainable"],
        loss=library.artifacts.LossType.CrossEntropyLoss,
        optimizer=library.artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    # The settings of the optimizer are attributes of its one node.
    path = folder / "optimizer_model.onnx"
    model = onnx.load(path)
    (node,) = [node for node in model.graph.node if node.op_type == "AdamWOptimizer"]
    values = {
        "alpha": settings["betas"][0],
        "beta": settings["betas"][1],
        "epsilon": settings["epsilon"],
        "weight_decay": settings["weight_decay"],
    }
    for attribute in node.attribute:
        if attribute.name in values:
            attribute.f = values.pop(attribute.name)
    assert not values, values
    onnx.save(model, path)
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    return importlib.import_module("ortrain.api"), options, {"library": "ortrain", "version": library.__version__}


def onnxruntime(folder: Path, settings: dict[str, Any], threads: int) -> tuple[Any, Any, dict[str, Any]]:
    """The same for onnxruntime-training, with the artifacts that it makes itself."""
    # Two of its sub-packages import PyTorch; on-device training uses neither.
    for name in ("optim", "amp"):
        sys.modules.setdefault(f"onnxruntime.training.{name}", types.ModuleType(name))
    library = importlib.import_module("onnxruntime")
    artifacts = importlib.import_module("onnxruntime.training.artifacts")
    blocks = importlib.import_module("onnxruntime.training.onnxblock")
    # It differentiates a LayerNormalization only if mean and inverse deviation are among its outputs.
    model = onnx.load(folder / "forward.onnx")
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}_statistic{k}" for k in range(len(node.output), 3))
    onnx.save(model, folder / "forward.onnx")
    artifacts.generate_artifacts(
        str(folder / "forward.onnx"),
        requires_grad=settings["trainable"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=blocks.optim.AdamW(
            betas=tuple(settings["betas"]), eps=settings["epsilon"], weight_decay=settings["weight_decay"]
        ),
        artifact_directory=folder,
    )
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    facts = {"library": "onnxruntime-training-cpu", "version": library.__version__}
    return importlib.import_module("onnxruntime.training.api"), options, facts


LIBRARIES: dict[str, Callable[[Path, dict[str, Any], int], tuple[Any, Any, dict[str, Any]]]] = {
    "ortrain": ortrain,
    "onnxruntime": onnxruntime,
}


def main() -> None:
    """Prepare, then take turns."""
    turns = Turns()
    folder, threads, first = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    settings = json.loads((folder / "settings.json").read_text())
    api, options, facts = LIBRARIES[sys.argv[1]](folder, settings, threads)
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    # No eval model: onnxruntime-training makes one that does not load where a BatchNormalization is in training mode.
    module = api.Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(settings["learning_rate"])
    with np.load(folder / "batches.npz") as stored:
        batches = [(stored[f"x{index}"], stored[f"labels{index}"]) for index in range(settings["batches"])]

    def step(number: int) -> float:
        loss = module(*batches[number % len(batches)])
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    def gradients() -> dict[str, float]:
        """Those of the last step: the optimizer leaves them, and the reset waits for the next step."""
        return {name: float(np.linalg.norm(state.parameters[name].grad)) for name in settings["trainable"]}

    turns.serve(step, gradients, first, facts)


if __name__ == "__main__":
    main()
