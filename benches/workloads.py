"""Workloads of the comparison: models, weights and batches.

`workloads/NAME.onnx` is a forward model (opset 17, output `logits`) without its large weights. `NAME.json` has the
batch size, the trained names, FLOPs, and the minimum number of bytes that a step must move. Random weights depend on
their name, and random batches on their index, so that every library starts from the same values and reads the same
data.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(__file__).resolve().parent / "workloads"
NAMES = (
    "mlp_tiny",
    "mlp",
    "lenet",
    "mobilenetv2_96",
    "mobilenetv2_224",
    "mobilenetv2_224_head",
    "resnet18_224",
    "bert_mini",
    "bert_mini_lora8",
    "bert_base",
    "gpt2_small6",
    "lstm",
    "adamw_25m",
)
SEED = 20260
# Settings of the optimizer in every library: AdamW in PyTorch's formula, adam_mode 0 of the operator AdamWOptimizer.
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, ADAM_MODE = 1e-3, (0.9, 0.999), 1e-8, 0.01, 0
# Scale of embedding tables, which have smaller random values.
SMALL, EMBEDDINGS = 0.02, ("tok", "pos")


def about(name: str) -> dict[str, Any]:
    """Returns the contents of `NAME.json`."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _drawn(name: str, shape: tuple[int, ...], how: list[str]) -> np.ndarray:
    """Draws the values of a weight, which depend on its name and shape."""
    if how[0] == "constant":
        return np.full(shape, float(how[1]), np.float32)
    if len(shape) < 2 or any(word in name for word in EMBEDDINGS):
        scale = SMALL
    elif len(shape) == 2:
        scale = max(shape) ** -0.5
    else:
        scale = float((2 / np.prod(shape[1:])) ** 0.5)
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    return np.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))


def load(name: str) -> onnx.ModelProto:
    """Returns the forward model with all its weights."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    for tensor in model.graph.initializer:
        if tensor.doc_string.startswith("fill "):
            value = _drawn(tensor.name, tuple(tensor.dims), tensor.doc_string.split()[1:])
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def batch(name: str, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels of a batch."""
    model, facts = onnx.load(FOLDER / f"{name}.onnx"), about(name)
    (x,) = model.graph.input
    shape = [dim.dim_value for dim in x.type.tensor_type.shape.dim]
    rng = np.random.default_rng([SEED, index])
    data: np.ndarray
    if x.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        data = rng.integers(0, facts["input_high"], shape)
    else:
        data = rng.standard_normal(shape, np.float32)
    rows = model.graph.output[0].type.tensor_type.shape.dim[0].dim_value
    return data, rng.integers(0, facts["classes"], rows).astype(np.int64)


def write(name: str, folder: Path, batches: int) -> None:
    """Writes the files that a peer needs.

    The files are `forward.onnx`; the same model in two parts, `graph.onnx` without initializers and `weights.npz`;
    `batches.npz` (x0, labels0, x1, ...); and `settings.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = load(name)
    onnx.save(model, folder / "forward.onnx")
    weights: dict[str, np.ndarray] = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    np.savez(folder / "weights.npz", **weights)  # type: ignore[arg-type]
    del model.graph.initializer[:]
    onnx.save(model, folder / "graph.onnx")
    arrays: dict[str, np.ndarray] = {}
    for index in range(batches):
        arrays[f"x{index}"], arrays[f"labels{index}"] = batch(name, index)
    np.savez(folder / "batches.npz", **arrays)  # type: ignore[arg-type]
    facts = about(name)
    settings = {
        "trainable": facts["trainable_names"],
        "only_optimizer": facts["only"] == "optimizer",
        "batches": batches,
        "learning_rate": LEARNING_RATE,
        "betas": BETAS,
        "epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY,
        "adam_mode": ADAM_MODE,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
