"""Recurrent nodes match onnxruntime for all attributes; tests/test_replay.py trains networks with these nodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
# Tolerance of sums of a few products, and of functions of these sums, in float32.
TOLERANCE = 2e-6
# Step of a central difference in float32, and its error from the rounding of both losses.
STEP, SLOPE = 3e-3, 2e-3
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
    """Return a model of one node, and its inputs; `present` selects the optional inputs."""
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


@pytest.mark.parametrize("part", [(0, STEPS), (2, 4)], ids=["all", "part"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_training_with_lengths_is_that_of_onnxruntime(
    op: str, direction: str, part: tuple[int, int], tmp_path: Path
) -> None:
    """The loss equals onnxruntime's and the gradient its slope, for all or some steps, with X trained or constant."""
    content, feeds = model(op, [False, True] + [False] * (3 if op == "LSTM" else 1), {"direction": direction})
    forward = onnx.load_from_string(content)
    graph = forward.graph
    held = {name: feeds[name] for name in ("X", "W", "R")}
    rng = np.random.default_rng(3)
    directions = 2 if direction == "bidirectional" else 1
    weights = rng.normal(size=(part[1] - part[0], directions, BATCH, HIDDEN)).astype(np.float32)
    held |= {"weights": weights, "first": np.array(part[:1]), "end": np.array(part[1:])}
    given = [info for info in graph.input if info.name == "sequence_lens"]
    del graph.input[:], graph.output[:]
    graph.input.extend(given)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in held.items())
    graph.node.append(helper.make_node("Slice", ["Y", "first", "end"], ["seen"]))
    graph.node.append(helper.make_node("Mul", ["seen", "weights"], ["weighed"]))
    graph.node.append(helper.make_node("ReduceSum", ["weighed"], ["loss"], keepdims=0))
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))

    def loss_of(values: dict[str, np.ndarray], lengths: np.ndarray) -> float:
        changed = onnx.ModelProto()
        changed.CopyFrom(forward)
        del changed.graph.initializer[:]
        changed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
        session = onnxruntime.InferenceSession(changed.SerializeToString(), providers=["CPUExecutionProvider"])
        return float(session.run(None, {"sequence_lens": lengths})[0])

    for trained in (["X", "W", "R"], ["W", "R"]):
        folder = tmp_path / "".join(trained)
        folder.mkdir()
        artifacts.generate_artifacts(forward, requires_grad=trained, loss=None, artifact_directory=folder)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state)
        for lengths in (np.array([5, 2, 4], np.int32), np.array([0, 5, 1], np.int32)):
            module.train()
            loss = float(module(lengths))
            np.testing.assert_allclose(loss, loss_of(held, lengths), rtol=1e-5, atol=1e-5)
            for name in trained:
                gradient = state.parameters[name].grad
                along = rng.normal(size=gradient.shape).astype(np.float32)
                up, down = (loss_of(held | {name: held[name] + sign * STEP * along}, lengths) for sign in (1, -1))
                slope = (up - down) / (2 * STEP)
                got = float((gradient * along).sum())
                assert abs(got - slope) <= SLOPE * max(1, abs(slope)), f"{name} {lengths}"
            module.lazy_reset_grad()
