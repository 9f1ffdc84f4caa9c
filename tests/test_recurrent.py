"""Recurrent nets beside onnxruntime, over their attributes; networks of them are trained in tests/test_replay.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortrain

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
# Sums of a few products, and functions of them, in float32.
TOLERANCE = 2e-6
FUNCTIONS = {
    "default": {},
    "clipped": {"clip": 0.6},
    "others": {
        "RNN": (["HardSigmoid"], [0.3], [0.4]),
        "GRU": (["HardSigmoid", "Softsign"], [0.3], [0.4]),
        "LSTM": (["HardSigmoid", "Softsign", "Affine"], [0.3, 0.8], [0.4, 0.1]),
    },
}
OPTIONS: dict[str, list[dict[str, int]]] = {
    "RNN": [{}],
    "GRU": [{}, {"linear_before_reset": 1}],
    "LSTM": [{}, {"input_forget": 1}],
}


def model(op: str, present: list[bool], attributes: dict[str, Any]) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model of one node, and its inputs; `present` says which of the optional inputs there are."""
    rng = np.random.default_rng(7)
    directions = 2 if attributes["direction"] == "bidirectional" else 1
    rows = GATES[op] * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "X": (STEPS, BATCH, INPUT),
        "W": (directions, rows, INPUT),
        "R": (directions, rows, HIDDEN),
        "B": (directions, 2 * rows),
        "sequence_lens": (BATCH,),
        "initial_h": (directions, BATCH, HIDDEN),
    }
    if op == "LSTM":
        shapes |= {"initial_c": (directions, BATCH, HIDDEN), "P": (directions, 3 * HIDDEN)}
    feeds = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["sequence_lens"] = np.array([5, 2, 4], np.int32)
    names = [name if k < 3 or present[k - 3] else "" for k, name in enumerate(shapes)]
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, hidden_size=HIDDEN, **attributes)],
        "graph",
        [
            declare(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape)
            for name in names
            if name
        ],
        [declare(name, TensorProto.FLOAT, None) for name in outputs],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return made.SerializeToString(), {name: feeds[name] for name in names if name}


@pytest.mark.parametrize("functions", FUNCTIONS)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_results_are_those_of_onnxruntime(op: str, direction: str, functions: str) -> None:
    count = 5 if op == "LSTM" else 3
    several = [[False] * count, [True] * count]
    several += [[k == one for k in range(count)] for one in range(count)]
    for option, present in itertools.product(OPTIONS[op], several):
        attributes: dict[str, Any] = {"direction": direction, **option}
        if functions == "others":
            names, alphas, betas = FUNCTIONS["others"][op]
            repeat = 2 if direction == "bidirectional" else 1
            attributes |= {"activations": names * repeat}
            attributes |= {"activation_alpha": alphas * repeat, "activation_beta": betas * repeat}
        elif functions == "clipped":
            attributes |= FUNCTIONS["clipped"]
        content, feeds = model(op, present, attributes)
        theirs = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, feeds)
        ours = ortrain.InferenceSession(content).run(None, feeds)
        for got, want in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=f"{attributes} {present}")
