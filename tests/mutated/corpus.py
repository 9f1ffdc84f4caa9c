"""Small valid models, artifacts, checkpoints and safetensors, as material for changed files."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
from onnx.backend.test.loader import load_model_tests

import ortrain
from ortrain import artifacts, optim
from ortrain.api import CheckpointState, Module, Optimizer

TESTS = Path(__file__).resolve().parent.parent
RECORDS = TESTS / "data" / "ort-1.19.2"
# Maximum size of included node-test models, and the step between included ones.
SMALL, EVERY = 20_000, 2
# Exported networks for artifacts, with their losses.
NETS = {
    "tf2onnx-convolutions-15": artifacts.LossType.MSELoss,
    "tf2onnx-attention-18": artifacts.LossType.MSELoss,
    "tf2onnx-loops-18": artifacts.LossType.MSELoss,
    "tf2onnx-both_directions-18": artifacts.LossType.MSELoss,
    "tf2onnx-unet-15": artifacts.LossType.L1Loss,
    "tf2onnx-norms-18": artifacts.LossType.MSELoss,
}


def write(folder: Path) -> None:
    """Write all material to a new folder."""
    models, made = folder / "models", folder / "artifacts"
    for name in ("models", "artifacts", "checkpoints", "safetensors"):
        (folder / name).mkdir(parents=True)
    for path in sorted((TESTS / "data" / "exporters").glob("*.onnx")):
        (models / path.name).write_bytes(path.read_bytes())
    for case in sorted(RECORDS.iterdir()):
        if (case / "forward.onnx").exists():
            (models / f"{case.name}.onnx").write_bytes((case / "forward.onnx").read_bytes())
            (models / f"{case.name}-training.onnx").write_bytes((case / "training_model.onnx").read_bytes())
            for path in sorted(case.glob("*checkpoint*")):
                (folder / "checkpoints" / f"{case.name}.{path.name}").write_bytes(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in load_model_tests(kind="node")[::EVERY]:
            data = case.model.SerializeToString() if isinstance(case.model, onnx.ModelProto) else b""
            if 0 < len(data) <= SMALL and _is_read(data):
                (models / f"{case.name}.onnx").write_bytes(data)
    for name, loss in NETS.items():
        _artifacts(models / f"{name}.onnx", loss, folder, made / name)
    for case in ("cnn_bn_adamw_ce", "tiny_transformer_adamw_ce", "lstm_gru_adamw_mse"):
        _artifacts(RECORDS / case / "forward.onnx", artifacts.LossType.MSELoss, folder, made / case)


def _is_read(model: bytes) -> bool:
    """Return true if the model loads: a changed file of another model would only repeat its error."""
    try:
        ortrain.InferenceSession(model)
    except ortrain.OrtrainError:
        return False
    return True


def _optimizer(number: int) -> artifacts.OptimType | optim.OptimizerConfig:
    """Return one of several optimizers in turn: an operator of onnxruntime's, and plain ONNX of every kind."""
    groups = [{"params": "*", "lr_factor": 0.5, "frozen_steps": 1}]
    every: list[artifacts.OptimType | optim.OptimizerConfig] = [
        artifacts.OptimType.AdamW,
        optim.NAdam(max_norm=1.0, ema_decay=0.9, accumulation="mean", groups=groups),
        optim.Muon(),
        optim.LAMB(max_value=0.5, max_norm_per_tensor=1.0),
        optim.Adafactor(groups=groups),
        optim.ScheduleFreeAdamW(),
    ]
    return every[number % len(every)]


def _artifacts(model: Path, loss: artifacts.LossType, folder: Path, made: Path) -> None:
    number = len(list(made.parent.iterdir()))
    made.mkdir()
    artifacts.generate_artifacts(
        model,
        loss=loss,
        optimizer=_optimizer(number),
        artifact_directory=made,
        nominal_checkpoint=True,
    )
    state = CheckpointState.load_checkpoint(made / "checkpoint")
    # The checkpoint has moments, properties and all other contents.
    with warnings.catch_warnings():
        # Nothing was trained, so gradients are zero.
        warnings.simplefilter("ignore", ortrain.errors.TrainingWarning)
        Optimizer(made / "optimizer_model.onnx", Module(made / "training_model.onnx", state)).step()
    state.properties["epoch"] = 3
    state.properties["note"] = "some words"
    state.properties["rate"] = 0.5
    for name, whole in (("plain", False), ("resumed", True)):
        CheckpointState.save_checkpoint(state, folder / "checkpoints" / f"{made.name}.{name}", whole)
    state.save_safetensors(folder / "safetensors" / f"{made.name}.safetensors")
