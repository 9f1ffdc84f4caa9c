"""Values without a gradient: a detector's loss, every interface, and impossible names."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import onnxblock
from ortrain.api import CheckpointState, Module
from ortrain.artifacts import LossType, generate_artifacts
from ortrain.errors import InvalidArgumentError
from ortrain.gradient import GradientGraphBuilder, OrtGradientForwardBackward, grad

CASE = Path(__file__).parent / "data" / "cases" / "detector-loss"
# Tolerance relative to the largest element of a gradient: float32, with sums in another order than PyTorch's.
TOLERANCE = 1e-6


def two_ways() -> bytes:
    """Return a model of ``y = a * b`` with ``a = x w`` and ``b = relu(a)``."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    weight = numpy_helper.from_array(np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "layer.weight")
    nodes = [
        helper.make_node("MatMul", ["x", "layer.weight"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "net", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


X = np.array([[1.0, 2.0], [-3.0, 0.5]], np.float32)


def expected() -> np.ndarray:
    """Compute the gradient of the sum of ``y`` with constant ``b``."""
    weight = numpy_helper.to_array(onnx.load_from_string(two_ways()).graph.initializer[0])
    return X.T @ np.maximum(X @ weight, 0)


def test_detector(tmp_path: Path) -> None:
    with np.load(CASE / "case.npz") as stored:
        case = dict(stored)
    stops = case["stops"].tolist()
    generate_artifacts(CASE / "model.onnx", artifact_directory=tmp_path, batch_norm="freeze", stop_gradients=stops)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    loss = module(*(case[name] for name in module.input_names()))
    np.testing.assert_allclose(loss, case["loss"], rtol=TOLERANCE)
    assert sorted(name for name, parameter in state.parameters if parameter.requires_grad) == sorted(case["trained"])
    for name in case["trained"]:
        wanted = case[f"grad:{name}"]
        np.testing.assert_allclose(
            state.parameters[name].grad, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=name
        )
    # Stops change only gradients.
    generate_artifacts(CASE / "model.onnx", artifact_directory=tmp_path, batch_norm="freeze", prefix="plain_")
    stopped, plain = (onnx.load(tmp_path / f"{prefix}eval_model.onnx") for prefix in ("", "plain_"))
    assert stopped == plain


def test_stop_candidates() -> None:
    found = ortrain.inspect(CASE / "model.onnx")
    assert [candidate.value for candidate in found.stop_candidates] == ["/Mul_14_output_0"]
    assert "/Mul_14_output_0: " in str(found)
    # Only formulas depend on this stop, so no other candidates remain.
    assert not ortrain.inspect(CASE / "model.onnx", stop_gradients=["/Mul_14_output_0"]).stop_candidates


def test_gradient_models() -> None:
    model = two_ways()
    made = grad(model, of="y", wrt="layer.weight", stop_gradients=["b"])
    assert [node.op_type for node in onnx.load_from_string(made).graph.node][:3] == ["MatMul", "Relu", "Mul"]
    builder = GradientGraphBuilder(model, {"y"}, {"layer.weight"}, "y", stop_gradients=["b"])
    builder.build()
    for result in (made, builder.get_model()):
        (found,) = ortrain.InferenceSession(result).run(["layer.weight_grad"], {"x": X})
        np.testing.assert_array_equal(found, expected())
    with pytest.raises(InvalidArgumentError, match='goes through "y", where stop_gradients ends the gradient'):
        grad(model, of="y", wrt="layer.weight", stop_gradients="y")
    with pytest.raises(InvalidArgumentError, match=r'"c".*computes no floats of that name'):
        GradientGraphBuilder(model, {"y"}, {"layer.weight"}, "y", stop_gradients=["c"])


def test_forward_and_backward_passes() -> None:
    both = OrtGradientForwardBackward(two_ways(), ["layer.weight"], stop_gradients=["b"])
    for passes in (both, pickle.loads(pickle.dumps(both))):
        function = passes.new_instance()
        function.forward([X, passes.get_initializer("layer.weight")], training=True)
        found = function.backward([np.ones((2, 2), np.float32)])
        np.testing.assert_array_equal(found[1].numpy(), expected())


def test_a_block(tmp_path: Path) -> None:
    class Loss(onnxblock.Block):
        def build(self, name: str) -> str:
            stopped = onnxblock.blocks.StopGradient()("b")
            product = onnxblock.blocks.Mul()("a", stopped)
            return str(onnxblock.blocks.ReduceSum(keepdims=False)(product))

    model = onnx.load_from_string(two_ways())
    with onnxblock.base(model) as accessor:
        loss = Loss()("y")
        # Every runtime runs the function in the model.
        session = ort.InferenceSession(accessor.model.SerializeToString())
        assert [node.op_type for node in accessor.model.graph.node][-3:] == ["StopGradient", "Mul", "ReduceSum"]
    evaluated = session.run(None, {"x": X})
    assert loss.startswith("onnx::reducesum")
    generate_artifacts(model, loss=Loss(), artifact_directory=tmp_path)
    for name in ("training_model.onnx", "eval_model.onnx"):
        assert not onnx.load(tmp_path / name).functions
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    assert module(X) == evaluated[0].sum()
    np.testing.assert_array_equal(state.parameters["layer.weight"].grad, expected())


def test_one_of_two_results() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
    weight = numpy_helper.from_array(np.array([[2.0, 3.0]], np.float32), "w")
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node("Split", ["h"], ["left", "right"], axis=1, num_outputs=2),
        helper.make_node("Mul", ["left", "right"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "net", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    made = grad(model, of="y", wrt="w", stop_gradients=["right"])
    (found,) = ortrain.InferenceSession(made).run(["w_grad"], {"x": np.array([[5.0, 7.0]], np.float32)})
    np.testing.assert_array_equal(found, [[5 * 21, 0]])


def test_inside_of_a_loop() -> None:
    """Truncated backpropagation: the carried value passes no gradient to earlier iterations."""
    floats = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])  # noqa: E731
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["h", "w"], ["h_next"]),
            helper.make_node("Identity", ["going"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            floats("h"),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), floats("h_next")],
    )
    count = numpy_helper.from_array(np.array(3, np.int64), "count")
    weight = numpy_helper.from_array(np.array([2.0], np.float32), "w")
    nodes = [
        helper.make_node("Loop", ["count", "", "x"], ["last"], body=body),
        helper.make_node("Mul", ["last", "w"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "net", [floats("x")], [floats("y")], [count, weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = grad(model, of="y", wrt="w", stop_gradients=["h_next"])
    (found,) = ortrain.InferenceSession(made).run(["w_grad"], {"x": np.array([5.0], np.float32)})
    np.testing.assert_array_equal(found, [40.0])


def artifacts_with(stops: list[str], folder: Path, **others: object) -> None:
    generate_artifacts(
        ortrain.examples.perceptron(),
        loss=LossType.CrossEntropyLoss,
        artifact_directory=folder,
        stop_gradients=stops,
        **others,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hiden", 'names "hiden", but .* computes no floats of that name; did you mean "hidden"'),
        ("", 'names "", but .* computes no floats'),
        ("[", "computes no floats"),
        ("fc1.weight", "is a weight or a constant"),
        ("x", "is an input of the graph"),
        ("no/such/*", "computes no floats"),
        ("logits", 'nothing would be trained: .* ."logits".; take one of them out of stop_gradients'),
        ("*", "nothing would be trained"),
    ],
)
def test_names_that_cannot_be_meant(name: str, message: str, tmp_path: Path) -> None:
    for others in ({}, {"requires_grad": ["fc1.weight", "fc2.weight"]}):
        with pytest.raises(InvalidArgumentError, match=message):
            artifacts_with([name], tmp_path, **others)
    assert not list(tmp_path.iterdir())


def test_integers_have_no_gradients(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="which is int64: only floats have gradients"):
        generate_artifacts(CASE / "model.onnx", artifact_directory=tmp_path, stop_gradients=["/ArgMax_output_0"])
    with pytest.raises(TypeError, match="stop_gradients must be a list of names"):
        artifacts_with([3], tmp_path)  # type: ignore[list-item]


def test_parameters_before_a_stop_are_not_trained(tmp_path: Path) -> None:
    artifacts_with(["hid*"], tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert sorted(name for name, _ in state.parameters) == ["fc2.bias", "fc2.weight"]
    found = ortrain.inspect(ortrain.examples.perceptron(), stop_gradients=["hidden"])
    assert found.names("trained") == ["fc2.weight", "fc2.bias"]
    (stop,) = found.stops
    assert stop.reason == 'stop_gradients ends the gradient at "hidden"'
    assert stop.operator == "Relu"
    assert stop.parameters == ["fc1.weight", "fc1.bias"]
    with pytest.raises(InvalidArgumentError, match=r'"fc1.weight" cannot be trained: .*"hidden", where stop_gradients'):
        artifacts_with(["hidden"], tmp_path, requires_grad=["fc1.weight", "fc2.weight"])
