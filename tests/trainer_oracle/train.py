"""One script for two libraries: train.py PACKAGE FOLDER PREFIX.

PACKAGE is ``onnxruntime.training`` or ``ortrain.trainer``. FOLDER has models and batches, which
tests/conform/test_trainer_oracle.py writes. Each optimizer trains each model for ten steps. After the fifth step the
state is recorded, and a checkpoint is saved as FOLDER/PREFIX-MODEL-OPTIMIZER.ortcp. If the checkpoint exists already, a
trainer loads it instead of the first five steps. Losses and states are written to FOLDER/PREFIX-by-PACKAGE.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

STEPS, SAVED = 10, 5
CONFIGS = {"adam": ("AdamConfig", 0.01), "sgd": ("SGDConfig", 0.1)}


class Perceptron(torch.nn.Module):
    """The PyTorch module, which has a buffer. Its weights are loaded from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(12, 16), torch.nn.Linear(16, 10)
        self.norm = torch.nn.LayerNorm(16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of ten classes."""
        return self.fc2(torch.tanh(self.norm(self.fc1(x))) * self.scale)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the module."""
    return torch.nn.functional.cross_entropy(logits, labels)


def options_of(package: str, trainer: Any) -> Any:
    """Return options for equal results: without clipping, and with weights that are read at each step."""
    library = importlib.import_module(package.partition(".")[0])
    session = library.SessionOptions()
    session.add_session_config_entry("session.disable_prepacking", "1")
    if package == "onnxruntime.training":
        library.set_default_logger_severity(4)
        # The release is built for GPUs, and selects all of its providers on every device.
        library.get_available_providers = lambda: ["CPUExecutionProvider"]
        session.log_severity_level = 4
        session.graph_optimization_level = library.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        session.execution_order = library.ExecutionOrder.PRIORITY_BASED
    return trainer.ORTTrainerOptions(
        {"device": {"id": "cpu"}, "utils": {"grad_norm_clip": False}, "session_options": session}
    )


def model_of(folder: Path, name: str) -> tuple[Any, Any]:
    """Return a model, and its loss if the model does not contain one."""
    if (folder / f"{name}.onnx").exists():
        return onnx.load(str(folder / f"{name}.onnx")), None
    module = Perceptron()
    with np.load(folder / f"{name}-weights.npz") as stored:
        module.load_state_dict({key: torch.from_numpy(stored[key]) for key in stored.files})
    return module, cross_entropy


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested state as one dict with paths as keys."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        path = f"{prefix}{name}"
        found.update(flat(value, f"{path}/") if isinstance(value, Mapping) else {path: value})
    return found


def about(value: Any) -> list[Any]:
    """Return type, shape and elements of a value of a state."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        array = np.asarray(value)
        return [str(array.dtype), list(array.shape), array.astype(float).ravel().tolist()]
    return [type(value).__name__, [], value]


def main() -> None:
    """Train all models."""
    package, folder, prefix = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore", FutureWarning)
    trainer = importlib.import_module(package)
    optim = importlib.import_module(f"{package}.optim")
    found: dict[str, Any] = {}
    for description in sorted(folder.glob("*.json")):
        if not description.name.startswith("model-"):
            continue
        name = description.stem[len("model-") :]
        described = json.loads(description.read_text())
        described = {kind: [tuple(value) for value in values] for kind, values in described.items()}
        with np.load(folder / f"{name}-batches.npz") as stored:
            batches = [
                [torch.from_numpy(stored[f"{k}/{value[0]}"]) for value in described["inputs"]] for k in range(STEPS)
            ]
        for optimizer, (kind, rate) in CONFIGS.items():
            model, loss_fn = model_of(folder, name)
            config = getattr(optim, kind)(lr=rate)
            trained = trainer.ORTTrainer(model, described, config, loss_fn, options_of(package, trainer))
            checkpoint = folder / f"{prefix}-{name}-{optimizer}.ortcp"
            losses = []
            first = 0
            if checkpoint.exists():
                assert trained.load_checkpoint(str(checkpoint)) == {"by": prefix}
                first = SAVED
            for k in range(first, STEPS):
                if k == SAVED and not first:
                    trained.save_checkpoint(str(checkpoint), {"by": prefix})
                losses.append(float(trained.train_step(*batches[k])[0]))
                if k == SAVED - 1:
                    state = {path: about(value) for path, value in flat(trained.state_dict()).items()}
                    found[f"{name}/{optimizer}/state"] = state
            found[f"{name}/{optimizer}/losses"] = losses
            evaluated = trained.eval_step(*batches[0])
            found[f"{name}/{optimizer}/evaluated"] = [float(evaluated[0]), str(evaluated[1].dtype)]
            last = trained._train_step_info
            found[f"{name}/{optimizer}/steps"] = [int(last.step), int(last.optimization_step)]
    (folder / f"{prefix}-by-{package}.json").write_text(json.dumps(found))
    print(len(found))


if __name__ == "__main__":
    main()
