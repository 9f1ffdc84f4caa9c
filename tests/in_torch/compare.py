"""Command ``ortrain compare`` with PyTorch: `compare.py PACKAGES FOLDER` prints the output of each case as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

packages, folder = sys.argv[1:]
sys.path.insert(0, packages)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import ortrain  # noqa: E402
from ortrain.__main__ import main  # noqa: E402

ROWS = 24
# Adam moves weights with tiny gradients by a whole learning rate, in the direction of a rounding error.
FLAGS = ("--optimizer", "sgd")


class Network(torch.nn.Module):
    """Network with a tied parameter, a normalization and two layouts of products."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.last = torch.nn.Linear(6, 3, bias=False)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        hidden = self.first(torch.relu(self.first(x))) @ self.first.weight
        return self.last(self.dropout(self.norm(hidden * self.scale)))


def data(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if name == "convnet":
        return {"image": rng.random((ROWS, 1, 8, 8), np.float32), "y": rng.integers(0, 10, ROWS)}
    if name in ("network", "dropout"):
        return {"x": rng.random((ROWS, 6), np.float32), "y": rng.integers(0, 3, ROWS)}
    if name == "lstm":
        return {"x": rng.random((ROWS, 4, 6), np.float32), "y": rng.random((ROWS, 4, 3), np.float32)}
    targets = {
        "labels": rng.integers(0, 10, ROWS),
        "floats": rng.random((ROWS, 10), np.float32),
        "zeros and ones": rng.integers(0, 2, (ROWS, 10)),
        "probabilities": rng.dirichlet(np.ones(10), ROWS).astype(np.float32),
    }
    return {"x": rng.random((ROWS, 64), np.float32), "y": targets[name]}


class Recurrent(torch.nn.Module):
    """Network with an operator that onnx2torch does not convert."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 3, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0]


def export(name: str) -> str:
    """Write the model of a case and return its path."""
    if name == "convnet":
        return str(ortrain.examples.convnet())
    torch.manual_seed(0)
    networks = {"network": Network, "dropout": lambda: Network(0.5), "lstm": Recurrent}
    if name not in networks:
        return str(ortrain.examples.perceptron())
    path = str(Path(folder, f"{name}.onnx"))
    network = networks[name]().train(name == "dropout")
    shape = (2, 4, 6) if name == "lstm" else (2, 6)
    mode = torch.onnx.TrainingMode.TRAINING if name == "dropout" else torch.onnx.TrainingMode.EVAL
    torch.onnx.export(
        network,
        (torch.zeros(shape),),
        path,
        input_names=["x"],
        dynamic_axes={"x": {0: "batch"}},
        opset_version=17,
        training=mode,
        do_constant_folding=False,
        dynamo=False,
    )
    return path


def compare(name: str, *flags: str) -> tuple[int, str, str]:
    path = str(Path(folder, "data.npz"))
    np.savez(path, **data(name))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["compare", export(name), "--data", path, "--runtimes", "torch", "--steps", "2", *FLAGS, *flags])
    return status, out.getvalue(), err.getvalue()


warnings.simplefilter("ignore")
CASES = ("labels", "floats", "zeros and ones", "probabilities", "convnet", "network", "dropout", "lstm")
found = {name: compare(name) for name in CASES}
found["absolute"] = compare("floats", "--loss", "mae")
found["head"] = compare("convnet", "--trainable", "head", "--classes", "10")
print(json.dumps(found))
