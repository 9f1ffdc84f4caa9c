"""Infinity and NaN reach exactly the results that multiply them by definition, on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

DEVICES = ("cpu", "reference")
# Rounding of sums of some hundred products in float32.
TOLERANCE = 1e-4
NONFINITE = {"NaN": np.nan, "infinity": np.inf}


def of_one_node(op: str, feeds: dict[str, np.ndarray], names: list[str], **attributes: Any) -> Any:
    """Return a model of one node; all its inputs are graph inputs."""
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], "it", **attributes)],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CONVOLUTIONS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one channel": ("Conv", (1, 1, 5, 5), (1, 1, 3, 3), {"pads": [1] * 4}),
    "some channels": ("Conv", (2, 16, 6, 6), (16, 16, 3, 3), {"pads": [1] * 4}),
    "tiles of many channels": ("Conv", (1, 64, 16, 16), (64, 64, 3, 3), {"pads": [1] * 4}),
    "depthwise": ("Conv", (2, 16, 9, 9), (16, 1, 3, 3), {"pads": [1] * 4, "group": 16}),
    "groups": ("Conv", (1, 8, 7, 7), (12, 4, 3, 3), {"pads": [1] * 4, "group": 2}),
    "one axis": ("Conv", (1, 3, 8), (4, 3, 3), {"pads": [1, 1]}),
    "strides": ("Conv", (1, 3, 9, 9), (8, 3, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
    "dilations": ("Conv", (1, 3, 9, 9), (8, 3, 3, 3), {"pads": [2] * 4, "dilations": [2, 2]}),
    "transposed": ("ConvTranspose", (1, 2, 5, 5), (2, 3, 3, 3), {"pads": [1] * 4}),
    "transposed with strides": ("ConvTranspose", (1, 2, 5, 5), (2, 3, 2, 2), {"strides": [3, 3]}),
}


@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, kind: str) -> None:
    op, x_shape, w_shape, attributes = CONVOLUTIONS[name]
    rng = np.random.default_rng(3)
    for given in ("x", "w"):
        feeds = {"x": rng.standard_normal(x_shape, np.float32), "w": rng.standard_normal(w_shape, np.float32)}
        feeds[given].flat[0] = NONFINITE[kind]
        model = of_one_node(op, feeds, ["x", "w"], **attributes).SerializeToString()
        results = [ortrain.InferenceSession(model, providers=[device]).run(None, feeds)[0] for device in DEVICES]
        np.testing.assert_allclose(results[0], results[1], rtol=TOLERANCE, atol=TOLERANCE)
        assert not np.isfinite(results[0]).all()


@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if CONVOLUTIONS[name][0] == "Conv"])
def test_gradients_of_convolutions(name: str, kind: str, tmp_path: Path) -> None:
    """Infinity and NaN reach the gradients of the input and of the filter. A factor before the node has the input
    gradient."""
    _, x_shape, w_shape, attributes = CONVOLUTIONS[name]
    rng = np.random.default_rng(4)
    declare = helper.make_tensor_value_info
    factor = rng.standard_normal(x_shape[1:], np.float32)
    weights = {"factor": factor, "w": rng.standard_normal(w_shape, np.float32)}
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "factor"], ["a"]),
            helper.make_node("Conv", ["a", "w"], ["y"], "it", **attributes),
            helper.make_node("Mul", ["y", "scale"], ["b"]),
            helper.make_node("ReduceSum", ["b"], ["loss"], keepdims=0),
        ],
        "graph",
        [declare("x", TensorProto.FLOAT, x_shape), declare("scale", TensorProto.FLOAT, None)],
        [declare("loss", TensorProto.FLOAT, [])],
        [helper.make_tensor(key, TensorProto.FLOAT, value.shape, value.ravel()) for key, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = rng.standard_normal(x_shape, np.float32)
    (shape,) = (
        ortrain.InferenceSession(of_one_node("Conv", {"x": x, "w": weights["w"]}, ["x", "w"], **attributes))
        .run(None, {"x": x, "w": weights["w"]})[0]
        .shape,
    )
    graph.input[1].CopyFrom(declare("scale", TensorProto.FLOAT, shape))
    model.graph.input[1].CopyFrom(graph.input[1])
    artifacts.generate_artifacts(model, ["factor", "w"], artifact_directory=tmp_path)
    for given in ("scale", "w"):
        scale = rng.standard_normal(shape, np.float32)
        gradients = []
        for device in DEVICES:
            state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
            if given == "w":
                value = weights["w"].copy()
                value.flat[0] = NONFINITE[kind]
                state.parameters["w"].data = value
            else:
                scale.flat[0] = NONFINITE[kind]
            module = Module(tmp_path / "training_model.onnx", state, device=device)
            module(x, scale)
            gradients.append({key: np.array(parameter.grad) for key, parameter in state.parameters})
        for key in weights:
            first, second = (of[key] for of in gradients)
            np.testing.assert_allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


NETS: dict[str, tuple[int, dict[str, Any]]] = {
    "RNN": (1, {}),
    "GRU": (3, {}),
    "GRU, reset behind": (3, {"linear_before_reset": 1}),
    "LSTM": (4, {}),
}


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("name", NETS)
def test_weights_of_a_state_of_zeros(name: str, kind: str, direction: str) -> None:
    """A nonfinite weight times a zero state is NaN from the first step, with an explicit or omitted initial state."""
    gates, attributes = NETS[name]
    steps, batch, size, hidden = 3, 2, 4, 5
    rng = np.random.default_rng(5)
    shapes = {"x": (steps, batch, size), "w": (1, gates * hidden, size), "r": (1, gates * hidden, hidden)}
    feeds = {key: rng.standard_normal(dims, np.float32) for key, dims in shapes.items()}
    feeds["r"][0, -hidden, 2] = NONFINITE[kind]
    given = feeds | {"h": np.zeros((1, batch, hidden), np.float32)}
    more: dict[str, Any] = {"hidden_size": hidden, "direction": direction} | attributes
    op = name.split(",")[0]
    without = of_one_node(op, feeds, ["x", "w", "r"], **more)
    with_zeros = of_one_node(op, given, ["x", "w", "r", "", "", "h"], **more).SerializeToString()
    for device in DEVICES:
        first, second = (
            ortrain.InferenceSession(model, providers=[device]).run(None, inputs)[0]
            for model, inputs in ((without.SerializeToString(), feeds), (with_zeros, given))
        )
        start = first[0 if direction == "forward" else -1]
        assert np.isnan(start[0, :, 0]).all(), device
        np.testing.assert_array_equal(np.isnan(first), np.isnan(second), err_msg=device)
        if direction == "forward":
            with np.errstate(invalid="ignore"):
                expected: Any = ReferenceEvaluator(without).run(None, feeds)
            np.testing.assert_array_equal(np.isnan(first), np.isnan(expected[0]), err_msg=device)


@pytest.mark.parametrize("kind", NONFINITE)
def test_windows_of_channels_without_it(kind: str) -> None:
    """LRN sums each window separately: a nonfinite element does not change windows of other channels."""
    x = np.random.default_rng(6).standard_normal((1, 8, 2, 3), np.float32)
    x[0, 2] = NONFINITE[kind]
    model = of_one_node("LRN", {"x": x}, ["x"], size=3)
    for device in DEVICES:
        (got,) = ortrain.InferenceSession(model, providers=[device]).run(None, {"x": x})
        assert np.isfinite(got[:, [0, 4, 5, 6, 7]]).all()
        # A neighbour of infinity is divided by infinity and becomes zero; infinity over infinity is NaN.
        assert np.isnan(got[:, 2]).all()
        near = got[:, [1, 3]]
        assert (np.isnan(near) if kind == "NaN" else near == 0).all()


def test_unique_separates_infinity_and_nan() -> None:
    """Unique returns infinity and NaN as separate elements, NaN last, as NumPy does."""
    x = np.array([3, np.inf, np.nan, 3, -1, np.inf], np.float32)
    for device in DEVICES:
        (got,) = ortrain.InferenceSession(of_one_node("Unique", {"x": x}, ["x"]), providers=[device]).run(
            None, {"x": x}
        )
        np.testing.assert_array_equal(got, np.array([-1, 3, np.inf, np.nan], np.float32))
