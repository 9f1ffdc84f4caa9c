"""Checks of ortrain.torch and ORTTrainer in PyTorch's environment: ``bridge.py FOLDER GROUP``; FOLDER has ortrain.

A group is a file in this folder, ``bridge_GROUP.py``. Each of its functions ``check_NAME`` is a check. Prints the
results as JSON: ``null``, or the trace of the error.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

SEED = 7
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float64): TensorProto.DOUBLE}


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    weights: dict[str, np.ndarray],
    opset: int = 17,
) -> bytes:
    """Return the bytes of a model; inputs and outputs have element types and shapes."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *about) for name, about in inputs.items()],
        [helper.make_tensor_value_info(name, *about) for name, about in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    made: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    ).SerializeToString()
    return made


def perceptron(
    dtype: Any = np.float64,
    names: tuple[str, str, str, str] = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"),
    activation: str = "Tanh",
) -> bytes:
    """Return ``logits = fc2(activation(fc1(x)))``, 5 features to 3."""
    rng = np.random.default_rng(SEED)
    shapes = (4, 5), (4,), (3, 4), (3,)
    kind = TYPES[np.dtype(dtype)]
    return model_of(
        [
            helper.make_node("Gemm", ["x", *names[:2]], ["hidden"], transB=1),
            helper.make_node(activation, ["hidden"], ["active"]),
            helper.make_node("Gemm", ["active", *names[2:]], ["logits"], transB=1),
        ],
        {"x": (kind, ["batch", 5])},
        {"logits": (kind, ["batch", 3])},
        {name: rng.standard_normal(shape).astype(dtype) for name, shape in zip(names, shapes, strict=True)},
    )


def embedding() -> bytes:
    """Return ``Y = tanh(table[ids] scale)``, ``Z = scale^2`` and each row's argmax, from integers and floats."""
    rng = np.random.default_rng(SEED)
    return model_of(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("Mul", ["rows", "scale"], ["product"]),
            helper.make_node("Tanh", ["product"], ["Y"]),
            helper.make_node("ArgMax", ["Y"], ["best"], axis=1, keepdims=0),
            helper.make_node("Mul", ["scale", "scale"], ["Z"]),
        ],
        {"ids": (TensorProto.INT64, ["n"]), "scale": (TensorProto.DOUBLE, [4])},
        {"best": (TensorProto.INT64, ["n"]), "Y": (TensorProto.DOUBLE, ["n", 4]), "Z": (TensorProto.DOUBLE, [4])},
        {"table": rng.standard_normal((7, 4))},
    )


def dropout(ratio: float = 0.25) -> bytes:
    """Return ``y = Dropout(x) w``."""
    return model_of(
        [helper.make_node("Dropout", ["x", "ratio"], ["kept"]), helper.make_node("Mul", ["kept", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 64])},
        {"y": (TensorProto.FLOAT, ["n", 64])},
        {"ratio": np.asarray(ratio, np.float32), "w": np.full(64, 3, np.float32)},
    )


def normalization(dtype: Any = np.float32) -> bytes:
    """Return ``y = BatchNormalization(x W)``, four channels."""
    rng = np.random.default_rng(SEED)
    kind = TYPES[np.dtype(dtype)]
    weights = {
        "W": rng.standard_normal((3, 4)),
        "bn.weight": rng.random(4) + 0.5,
        "bn.bias": rng.standard_normal(4),
        "bn.running_mean": rng.standard_normal(4),
        "bn.running_var": rng.random(4) + 0.5,
    }
    return model_of(
        [
            helper.make_node("MatMul", ["x", "W"], ["h"]),
            helper.make_node("BatchNormalization", ["h", *list(weights)[1:]], ["y"], epsilon=1e-5, momentum=0.9),
        ],
        {"x": (kind, ["n", 3])},
        {"y": (kind, ["n", 4])},
        {name: value.astype(dtype) for name, value in weights.items()},
    )


def refused(call: Callable[[], Any], kind: type[BaseException], text: str) -> None:
    """Check that a call raises an error with this text."""
    sentence = None
    try:
        call()
    except kind as error:
        sentence = str(error)
    assert sentence is not None, f"no error; expected {text!r}"
    assert text in sentence, f"{text!r} is not in {sentence!r}"


def relative_distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((mine - other).abs().max() / other.abs().max())


def main() -> None:
    """Run the checks of a group."""
    sys.path[:0] = [sys.argv[1], str(Path(__file__).parent)]
    torch.set_num_threads(1)
    group = importlib.import_module(f"bridge_{sys.argv[2]}")
    found: dict[str, str | None] = {}
    for name in [name for name in dir(group) if name.startswith("check_")]:
        torch.manual_seed(SEED)
        try:
            with warnings.catch_warnings():
                # Exporters and the compiler warn about themselves.
                warnings.filterwarnings("ignore", category=DeprecationWarning)
                warnings.filterwarnings("ignore", category=FutureWarning)
                getattr(group, name)()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    # C++ output of the exporter precedes the results.
    ctypes.CDLL(None).fflush(None)
    print(json.dumps(found))


if __name__ == "__main__":
    # Groups import this file by its name.
    sys.modules["bridge"] = sys.modules["__main__"]
    main()
