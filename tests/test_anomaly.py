"""Anomaly detection, and norms of parameters and gradients.

A step that makes NaN or infinity fails, names the node that computes the first one, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FLOAT = TensorProto.FLOAT


def careful() -> ortrain.SessionOptions:
    options = ortrain.SessionOptions()
    options.detect_anomaly = True
    return options


def module_of(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    initializers: dict[str, Sequence[float]],
    columns: int = 3,
    **options: object,
) -> tuple[CheckpointState, Module]:
    """Return a module of nodes from x to y, trained by the mean of squared differences."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare("x", FLOAT, ["n", columns])],
        [declare("y", FLOAT, None)],
        [numpy_helper.from_array(np.array(values, np.float32), name) for name, values in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(model, loss=artifacts.LossType.MSELoss, artifact_directory=folder, **options)  # type: ignore[arg-type]
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=careful())
    return state, module


def node(op: str, reads: Sequence[str], result: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, reads, [result], f"/{result}", **attributes)


def test_infinity_in_the_forward_pass(tmp_path: Path) -> None:
    """exp(100) is infinite; the error names Exp and not the node after it."""
    nodes = [node("Mul", ["x", "w"], "a"), node("Exp", ["a"], "e"), node("Neg", ["e"], "y")]
    state, module = module_of(tmp_path, nodes, {"w": [1, 1, 1]})
    x, target = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    module(x, target)
    gradient, steps = state.parameters["w"].grad.copy(), state._native.steps()
    x[1, 2] = 100
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    assert str(error.value) == (
        'the step computed inf in the loss: node "/e" (Exp) of the forward pass computes the first inf, at [1, '
        '2] of "e"; '
        "the state is as it was before the step"
    )
    np.testing.assert_array_equal(state.parameters["w"].grad, gradient)
    assert state._native.steps() == steps
    # Training continues as if the failed step had not happened.
    x[1, 2] = 0
    module(x, target)
    np.testing.assert_array_equal(state.parameters["w"].grad, 2 * gradient)
    # The eval model reports the anomaly, too.
    x[1, 2] = 100
    module.eval()
    with pytest.raises(ortrain.AnomalyError, match=r'node "/e" \(Exp\) of the forward pass computes the first inf'):
        module(x, target)


def test_nan_in_the_backward_pass(tmp_path: Path) -> None:
    """The slope of a root at zero is infinite, and zero times infinity is NaN."""
    nodes = [node("Mul", ["x", "w"], "a"), node("Sqrt", ["a"], "s"), node("Mul", ["s", "zero"], "y")]
    _, module = module_of(tmp_path, nodes, {"w": [1, 1, 1], "zero": [0, 0, 0]}, requires_grad=["w"])
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    module(x, target)
    x[0, 1] = 0
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    text = str(error.value)
    assert text.startswith('the step computed NaN in the gradient of "w" at [1]: node "')
    assert "of the backward pass computes the first" in text
    assert text.endswith("; the state is as it was before the step")


def test_masks_of_infinity_are_no_anomaly(tmp_path: Path) -> None:
    """A softmax turns infinities into zeros. If it turns a whole row into NaN, the error names both nodes."""
    nodes = [
        node("MatMul", ["x", "w"], "a"),
        node("Greater", ["x", "limit"], "far"),
        node("Where", ["far", "infinite", "a"], "m"),
        node("Softmax", ["m"], "y", axis=-1),
    ]
    initializers = {"w": np.eye(3).tolist(), "limit": [5.0], "infinite": [-np.inf]}
    _, module = module_of(tmp_path, nodes, initializers, requires_grad=["w"])
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    x[1, 1] = 6
    module(x, target)
    x[1] = 6
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    assert (
        ': node "/m" (Where) of the forward pass computes the first -inf, at [1, 0] of "m"; '
        'from it, node "/y" (Softmax) of the forward pass computes NaN, at [1, 0] of "y"; ' in str(error.value)
    )


def subgraph(nodes: Sequence[onnx.NodeProto], inputs: dict[str, int], outputs: dict[str, int]) -> onnx.GraphProto:
    declare = helper.make_tensor_value_info
    shapes: dict[str, list[int] | None] = {"i": [], "go": [], "on": []}
    return helper.make_graph(
        nodes,
        "inside",
        [declare(name, dtype, shapes.get(name)) for name, dtype in inputs.items()],
        [declare(name, dtype, shapes.get(name)) for name, dtype in outputs.items()],
    )


def test_inside_of_a_branch(tmp_path: Path) -> None:
    """The error names the node of the branch that was taken, not the If."""
    branches = {
        "then_branch": subgraph([node("Exp", ["a"], "e")], {}, {"e": FLOAT}),
        "else_branch": subgraph([node("Neg", ["a"], "f")], {}, {"f": FLOAT}),
    }
    nodes = [
        node("Mul", ["x", "w"], "a"),
        node("ReduceSum", ["a"], "s", keepdims=0),
        node("Greater", ["s", "zero"], "q"),
        node("If", ["q"], "b", **branches),
        node("Neg", ["b"], "y"),
    ]
    given = {"w": [1.0, 1.0, 1.0], "zero": np.float32(0)}
    _, module = module_of(tmp_path, nodes, given, requires_grad=["w"])  # type: ignore[arg-type]
    x, target = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    x[1, 2] = 100
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    assert str(error.value) == (
        'the step computed inf in the loss: node "/e" (Exp) of the forward pass computes the first inf, at [1, '
        '2] of "b"; '
        "the state is as it was before the step"
    )


@pytest.mark.parametrize("kind", ["Loop", "Loop with a condition", "Scan"])
def test_inside_of_a_loop(kind: str, tmp_path: Path) -> None:
    """The error names the node of the body and the iteration: 2, 4, 16, 256, ...; the seventh square is infinite."""
    square = [node("Mul", ["v", "v"], "square"), node("Mul", ["square", "w"], "next")]
    inputs = {"i": TensorProto.INT64, "go": TensorProto.BOOL, "v": FLOAT}
    outputs = {"on": TensorProto.BOOL, "next": FLOAT}
    if kind == "Loop":
        body = subgraph([*square, node("Identity", ["go"], "on")], inputs, outputs)
        loop = node("Loop", ["most", "", "x"], "z", body=body)
    elif kind == "Scan":
        inside = [*square, node("Add", ["next", "part"], "state")]
        body = subgraph(inside, {"v": FLOAT, "part": FLOAT}, {"state": FLOAT})
        loop = node("Scan", ["x", "parts"], "z", body=body, num_scan_inputs=1)
    else:
        condition = [node("ReduceMax", ["next"], "largest", keepdims=0), node("Greater", ["largest", "zero"], "on")]
        body = subgraph([*square, *condition], inputs, outputs)
        loop = node("Loop", ["most", "", "x"], "z", body=body)
    given = {"w": [1.0, 1.0, 1.0], "zero": np.float32(0), "parts": np.zeros((8, 1, 3), np.float32)}
    # The number of iterations must be an integer; the initializers of `module_of` are float32.
    nodes = [node("Constant", [], "most", value=numpy_helper.from_array(np.array(8))), loop, node("Neg", ["z"], "y")]
    _, module = module_of(tmp_path, nodes, given, requires_grad=["w"])  # type: ignore[arg-type]
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    module(x, target)
    x[1, 2] = 2
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    assert ': node "/square" (Mul) of the forward pass computes the first inf, at [1, 2] of "square.6"' in str(
        error.value
    )


def test_inside_of_the_gradient_of_a_loop(tmp_path: Path) -> None:
    """The gradient of a loop is a Scan; the error names the node inside of it."""
    body = subgraph(
        [node("Sqrt", ["v"], "root"), node("Mul", ["root", "w"], "next"), node("Identity", ["go"], "on")],
        {"i": TensorProto.INT64, "go": TensorProto.BOOL, "v": FLOAT},
        {"on": TensorProto.BOOL, "next": FLOAT},
    )
    nodes = [
        node("Constant", [], "most", value=numpy_helper.from_array(np.array(3))),
        node("Mul", ["x", "scale"], "a"),
        node("Loop", ["most", "", "a"], "y", body=body),
    ]
    given: dict[str, Sequence[float]] = {"w": [1, 1, 1], "scale": [1, 1, 1]}
    _, module = module_of(tmp_path, nodes, given, requires_grad=["w", "scale"])
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    x[0, 1] = 0
    with pytest.raises(ortrain.AnomalyError) as error:
        module(x, target)
    text = str(error.value)
    assert "of the backward pass computes the first" in text
    assert "(Scan)" not in text


def test_nonfinite_inputs_and_parameters(tmp_path: Path) -> None:
    state, module = module_of(tmp_path, [node("MatMul", ["x", "w"], "y")], {"w": np.eye(3).tolist()})
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    x[1, 0] = np.nan
    with pytest.raises(ortrain.AnomalyError, match=r': "x", an input of the step, has NaN at \[1, 0\]; '):
        module(x, target)
    x[1, 0] = 1
    state.parameters["w"].data[2, 1] = np.inf
    with pytest.raises(ortrain.AnomalyError, match=r': "w", an input of the step, has inf at \[2, 1\]; '):
        module(x, target)


def test_detection_is_off_by_default(tmp_path: Path) -> None:
    module_of(tmp_path, [node("MatMul", ["x", "w"], "y")], {"w": np.eye(3).tolist()})
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    assert np.isnan(module(np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), np.float32)))


def test_the_option() -> None:
    options = ortrain.SessionOptions()
    assert options.detect_anomaly is False
    with pytest.raises(TypeError) as error:
        options.detect_anomaly = "yes"  # type: ignore[assignment]
    assert str(error.value) == "detect_anomaly must be True or False, got 'yes'"
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession("examples/perceptron.onnx", careful())
    assert (
        str(refused.value) == "detect_anomaly is not supported for inference; set it on a Module or a TrainingSession"
    )


def test_norms(tmp_path: Path) -> None:
    """Norms of parameters and gradients, and the norm of all gradients together if they are clipped."""
    nodes = [
        node("MatMul", ["x", "w"], "a"),
        node("Relu", ["a"], "b"),
        node("MatMul", ["b", "dead"], "c"),
        node("Add", ["c", "bias"], "y"),
    ]
    # The first layer's outputs are all negative, so the Relu passes no row.
    initializers = {"w": (-np.eye(3)).tolist(), "dead": np.eye(3).tolist(), "bias": [3.0, 0.0, 4.0]}
    state, module = module_of(tmp_path, nodes, initializers, optimizer=artifacts.SGD(max_norm=0.5))
    assert module.gradient_norms() == {"bias": 0, "dead": 0, "w": 0}
    module(np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32))
    gradient = state.parameters["bias"].grad.astype(np.float64)
    expected = float(np.sqrt((gradient**2).sum()))
    assert module.gradient_norms() == {"bias": pytest.approx(expected, rel=1e-12), "dead": 0, "w": 0}
    rows = ortrain.inspect(module)
    assert [(row.name, row.parameter) for row in rows] == [
        ("bias", 5),
        ("dead", pytest.approx(3**0.5)),
        ("w", pytest.approx(3**0.5)),
    ]
    assert [row.ratio for row in rows] == [pytest.approx(expected / 5), 0, 0]
    lines = str(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["parameter", "bias", "dead", "w"]
    assert ">bias</td>" in rows._repr_html_()
    with pytest.raises(ortrain.InvalidArgumentError, match="a module must be the only argument"):
        ortrain.inspect(module, ["y"])  # type: ignore[call-overload]
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    assert optimizer.step() == pytest.approx(expected, rel=1e-12)
    # These are the norms of the clipped gradients.
    assert module.gradient_norms()["bias"] == pytest.approx(0.5, rel=1e-5)
    # Without clipping a step returns no norm.
    artifacts.generate_artifacts(
        "examples/perceptron.onnx",
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    module(np.ones((2, 64), np.float32), np.zeros(2, np.int64))
    assert Optimizer(tmp_path / "optimizer_model.onnx", module).step() is None
