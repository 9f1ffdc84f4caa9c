"""Recorded cases, and the artifacts that ortrain generates for them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer

RECORDS = Path(__file__).parent / "data" / "ort-1.19.2"
# Cases of one run. checkpoint_resume has several runs, and a test of its own.
CASES = (
    "mlp_adamw_ce",
    "mlp_sgd_mse",
    "mlp_bce_logits",
    "mlp_l1",
    "frozen_params",
    "grad_accumulation",
    "linear_lr",
    "cnn_bn_adamw_ce",
    "tiny_transformer_adamw_ce",
    "mlp_adamw_clip_outputs",
    "lstm_gru_adamw_mse",
    "l2_norm_adamw_ce",
    "silu_div_sgd_mse",
    "rms_norm_adamw_ce",
    "fake_quant_sgd_mse",
)
BACKENDS = ("cpu", "reference")
# Tests of GPUs run on a software driver on the processor, unless the environment names another device.
os.environ["ORTRAIN_SOFTWARE_GPU"] = "1"
GPU = os.environ.get("ORTRAIN_TEST_DEVICE", "vulkan")
DEVICES = (*BACKENDS, GPU)
# Mesa's drivers print a warning if this directory is not set.
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())


def meta_of(case: str) -> dict[str, Any]:
    """Return the recorded settings of a case."""
    meta: dict[str, Any] = json.loads((RECORDS / case / "meta.json").read_text())
    return meta


def generate(case: str, folder: Path, **changes: Any) -> Path:
    """Generate the artifacts of a case from its forward model and the recorded arguments."""
    meta = meta_of(case)
    optimizer: Any
    if case == "mlp_adamw_clip_outputs":
        clip = onnxblock.optim.ClipGradNorm(0.25)
        optimizer = onnxblock.optim.AdamW(betas=(0.85, 0.99), eps=1e-8, weight_decay=0.05, clip_grad=clip)
    else:
        optimizer = artifacts.OptimType[meta["optimizer"]]
    arguments: dict[str, Any] = {
        "requires_grad": meta["requires_grad"],
        "frozen_params": meta.get("frozen_params"),
        "loss": artifacts.LossType[meta["loss"]],
        "optimizer": optimizer,
        "additional_output_names": meta.get("additional_output_names"),
        "artifact_directory": folder,
        "nominal_checkpoint": case == "checkpoint_resume",
    }
    artifacts.generate_artifacts(str(RECORDS / case / "forward.onnx"), **(arguments | changes))
    return folder


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that generates the artifacts of a case once and returns their folder."""
    made: dict[str, Path] = {}

    def artifacts_of(case: str) -> Path:
        if case not in made:
            made[case] = generate(case, tmp_path_factory.mktemp(case))
        return made[case]

    return artifacts_of


class Run:
    """A state with a module and an optimizer."""

    def __init__(self, folder: Path, checkpoint: str = "checkpoint", **arguments: Any) -> None:
        self.folder = folder
        self.state = CheckpointState.load_checkpoint(folder / checkpoint)
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx", **arguments)
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)


@pytest.fixture
def run(ours: Callable[[str], Path]) -> Run:
    """Return a new run of the classifier: 10 inputs, 24 hidden units, 5 classes."""
    return Run(ours("mlp_adamw_ce"))
