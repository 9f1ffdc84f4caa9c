"""Peers with the on-device API: ortrain and onnxruntime-training, each in its own environment.

    python on_device.py ortrain|ortrain@SHARE|onnxruntime make FOLDER OWN
    python on_device.py ortrain|ortrain@SHARE|onnxruntime serve FOLDER OWN THREADS [PRECISION FALLBACK]

`make` writes the artifacts for the workload in FOLDER (see workloads.write) to OWN; it needs `onnx`. `serve` takes
turns (see turns.py) and imports only NumPy and the library. With a SHARE, ortrain runs under a memory limit that leaves
this fraction of its usual arena; `make` writes the limit to OWN/limit.json. PRECISION and FALLBACK are ortrain's
`SessionOptions.precision` and `bf16_fallback`.
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
from turns import Session, Turns


def make_ours(folder: Path, own: Path, settings: dict[str, Any]) -> None:
    """Writes the artifacts of ortrain."""
    artifacts = importlib.import_module("ortrain.artifacts")
    artifacts.generate_artifacts(
        folder / "forward.onnx",
        requires_grad=settings["trainable"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=own,
    )
    set_optimizer(own / "optimizer_model.onnx", settings)


def write_limit(folder: Path, own: Path, share: float) -> None:
    """Writes the memory limit that leaves a fraction of the arena, and the numbers it is computed from, in bytes."""
    api = importlib.import_module("ortrain.api")
    with np.load(folder / "batches.npz") as stored:
        batch = stored["x0"], stored["labels0"]
    state = api.CheckpointState.load_checkpoint(str(own / "checkpoint"))
    module = api.Module(str(own / "training_model.onnx"), state)
    need = module.memory(*batch)
    # `profile` includes the constants of the program, which `memory` does not report.
    saved = int((1 - share) * need.work)
    limit = module.profile(*batch, steps=1, warmup=0).memory - saved
    (own / "limit.json").write_text(json.dumps({"limit": limit, "arena": need.work, "saved": saved}))


def make_theirs(folder: Path, own: Path, settings: dict[str, Any]) -> None:
    """Writes the artifacts of onnxruntime-training with its own functions."""
    import onnx

    without_torch()
    artifacts = importlib.import_module("onnxruntime.training.artifacts")
    # onnxruntime-training differentiates LayerNormalization only if mean and inverse deviation are among the outputs.
    model = onnx.load(folder / "forward.onnx")
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.output.extend(f"{node.output[0]}_statistic{k}" for k in range(len(node.output), 3))
    onnx.save(model, own / "forward.onnx")
    artifacts.generate_artifacts(
        str(own / "forward.onnx"),
        requires_grad=settings["trainable"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=own,
    )
    set_optimizer(own / "optimizer_model.onnx", settings)


def set_optimizer(path: Path, settings: dict[str, Any]) -> None:
    """Sets the constants and the formula of the optimizer, which are attributes of its only node."""
    import onnx

    model = onnx.load(path)
    (node,) = [node for node in model.graph.node if node.op_type == "AdamWOptimizer"]
    floats = {
        "alpha": settings["betas"][0],
        "beta": settings["betas"][1],
        "epsilon": settings["epsilon"],
        "weight_decay": settings["weight_decay"],
    }
    integers = {"adam_mode": settings["adam_mode"], "correct_bias": 1}
    for attribute in node.attribute:
        if attribute.name in floats:
            attribute.f = floats.pop(attribute.name)
        if attribute.name in integers:
            attribute.i = integers.pop(attribute.name)
    assert not floats, floats
    assert not integers, integers
    onnx.save(model, path)


def without_torch() -> None:
    """Replaces two subpackages that import PyTorch. On-device training needs neither of them."""
    for name in ("optim", "amp"):
        sys.modules.setdefault(f"onnxruntime.training.{name}", types.ModuleType(name))


def import_ours() -> tuple[Any, Any, dict[str, Any]]:
    """Returns the library, its API, and its name and version."""
    library = importlib.import_module("ortrain")
    return library, importlib.import_module("ortrain.api"), {"library": "ortrain", "version": library.__version__}


def import_theirs() -> tuple[Any, Any, dict[str, Any]]:
    """Returns the library, its API, and its name and version for onnxruntime-training."""
    without_torch()
    library = importlib.import_module("onnxruntime")
    facts = {"library": "onnxruntime-training-cpu", "version": library.__version__}
    return library, importlib.import_module("onnxruntime.training.api"), facts


MAKE: dict[str, Callable[[Path, Path, dict[str, Any]], None]] = {"ortrain": make_ours, "onnxruntime": make_theirs}
IMPORT: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "ortrain": import_ours,
    "onnxruntime": import_theirs,
}


def serve(who: str, folder: Path, own: Path, threads: int, settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Takes turns. ``more`` has additional session options."""
    turns = Turns()
    with turns.timed("import"):
        library, api, facts = IMPORT[who]()
    with np.load(folder / "batches.npz") as stored:
        batches = [(stored[f"x{index}"], stored[f"labels{index}"]) for index in range(settings["batches"])]

    def create(_: bool) -> Session:
        options = library.SessionOptions()
        options.intra_op_num_threads = threads
        for name, value in more.items():
            setattr(options, name, value)
        state = api.CheckpointState.load_checkpoint(str(own / "checkpoint"))
        # No eval model: for a BatchNormalization in training mode, onnxruntime-training generates an eval model that
        # does not load.
        module = api.Module(str(own / "training_model.onnx"), state, session_options=options)
        optimizer = api.Optimizer(str(own / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(settings["learning_rate"])
        if "precision" in more:
            facts["unit"] = module.bf16_unit

        def step(number: int) -> float:
            module.lazy_reset_grad()
            loss = module(*batches[number % len(batches)])
            optimizer.step()
            return float(loss)

        def gradients() -> dict[str, float]:
            return {name: float(np.linalg.norm(state.parameters[name].grad)) for name in settings["trainable"]}

        return Session(step, gradients, optimizer.step if settings["only_optimizer"] else None)

    turns.serve(create, facts)


def main() -> None:
    """Runs the command of the arguments."""
    who, what, folder, own, *rest = sys.argv[1:]
    settings = json.loads((Path(folder) / "settings.json").read_text())
    who, _, share = who.partition("@")
    if what == "make":
        MAKE[who](Path(folder), Path(own), settings)
        if share:
            write_limit(Path(folder), Path(own), float(share))
    else:
        threads, *exactness = rest
        more: dict[str, Any] = dict(zip(("precision", "bf16_fallback"), exactness, strict=False))
        if share:
            more["memory_limit"] = json.loads((Path(own) / "limit.json").read_text())["limit"]
        serve(who, Path(folder), Path(own), int(threads), settings, more)


if __name__ == "__main__":
    main()
