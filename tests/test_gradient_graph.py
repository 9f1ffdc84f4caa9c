"""Gradients as a model: `grad`, `vjp`, `GradientGraphBuilder`, by acceptance rows and against onnxruntime."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from environments import in_environment, oracle
from nets import NETS
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, parser
from test_gradients import retype

import ortrain
from ortrain.gradient import GradientGraphBuilder, grad, vjp

RECORDS = Path(__file__).parent / "data" / "gradient-graph"
RECORDED = sorted(folder.name for folder in RECORDS.iterdir())
# Tolerances for which the recordings were made.
RTOL, ATOL = 1e-4, 1e-5
# onnxruntime logs errors only.
ERRORS = 3
# A central difference with this step has an error of about 1e-10 in float64, relative to the summed terms. A float32
# model is compared with the differences of its float64 copy.
STEP = 1e-6
# Tolerance between a gradient in float64 and a central difference: rounding of the step, and the error of the
# difference.
DIFFERENCE = 1e-7


def inference(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def by_name(session: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a session of ortrain or onnxruntime, by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def ours(model: bytes | ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return by_name(ortrain.InferenceSession(model), feeds)


def theirs(model: bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return by_name(inference(model), feeds)


def parsed(text: str, **values: np.ndarray) -> ModelProto:
    """Return a model from onnx's text format, with initializers."""
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).uniform(0.5, 1.5, shape), dtype)


def outputs_of(model: bytes) -> list[str]:
    return [output.name for output in onnx.load_from_string(model).graph.output]


def operators_of(model: bytes) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in onnx.load_from_string(model).graph.node}


MLP = """
<ir_version: 8, opset_import: ["" : 17], producer_name: "pytest">
mlp (float[batch, 4] X, float[batch, 2] label) => (float loss, float[batch, 2] pred)
<float[4, 5] W1, float[5] B1, float[5, 2] W2>
{
    [first] h = Gemm (X, W1, B1)
    [act] a = Relu (h)
    [second] pred = MatMul (a, W2)
    [diff] d = Sub (pred, label)
    [square] s = Mul (d, d)
    [mean] loss = ReduceMean <keepdims = 0> (s)
}
"""


def mlp(opset: int = 17) -> ModelProto:
    model = parsed(MLP, W1=random(4, 5) - 1, B1=random(5, seed=1) - 1, W2=random(5, 2, seed=2) - 1)
    model.opset_import[0].version = opset
    return model


def mlp_feeds(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"X": random(3, 4, seed=3, dtype=dtype), "label": random(3, 2, seed=4, dtype=dtype)}


def built(model: ModelProto, x: Iterable[str], loss: str = "loss", **how: Any) -> bytes:
    builder = GradientGraphBuilder(model.SerializeToString(), {loss}, set(x), loss, **how)
    builder.build()
    return builder.get_model()


def differences(
    model: ModelProto, feeds: dict[str, np.ndarray], of: str, at: str, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return central differences of the weighted sum of a result, element by element, by ortrain in float64."""
    value = feeds[at].astype(np.float64)
    session = ortrain.InferenceSession(model)
    found = np.zeros(value.shape)
    for index in np.ndindex(*value.shape):
        parts = []
        for sign in (1, -1):
            moved = value.copy()
            moved[index] += sign * STEP
            (result,) = session.run([of], {**feeds, at: moved})
            parts.append((result * (1 if weights is None else weights)).sum())
        found[index] = (parts[0] - parts[1]) / (2 * STEP)
    return found


# --- the builder, row by row ------------------------------------------------------------------------------------------


def test_g1_argument_order_sets_and_bytes(tmp_path: Path) -> None:
    """The arguments are model, y, x, loss. Before `build` get_model returns the forward model; save writes it."""
    forward = mlp().SerializeToString()
    builder = GradientGraphBuilder(forward, {"loss"}, {"W1", "B1"}, "loss")
    assert builder.get_model() == forward
    assert builder.build() is None  # type: ignore[func-returns-value]
    model = builder.get_model()
    assert model != forward
    assert model == builder.get_model()
    builder.save(tmp_path / "gradient.onnx")
    assert (tmp_path / "gradient.onnx").read_bytes() == model
    named = GradientGraphBuilder(
        serialized_model=forward,
        y_node_arg_names=["loss"],
        x_node_arg_names=("B1", "W1", "B1"),
        loss_node_arg_name="loss",
        options=ortrain.SessionOptions(),
    )
    named.build()
    assert named.get_model() == model


@pytest.mark.parametrize("names", ["loss", b"loss", 7, {1}])
def test_g1_names_are_a_set(names: Any) -> None:
    for y, x in ((names, {"W1"}), ({"loss"}, names)):
        with pytest.raises(TypeError, match="_node_arg_names"):
            GradientGraphBuilder(mlp().SerializeToString(), y, x, "loss")


def test_g2_checker_inputs_and_outputs() -> None:
    """The gradient model passes the checker, has the inputs of the model, and one further output for each x, sorted."""
    model = mlp()
    made = built(model, {"W2", "B1", "W1", "X", "label"})
    message = onnx.load_from_string(made)
    checker.check_model(message, full_check=True)
    assert message.graph.input == model.graph.input
    names = ["loss", "pred", "B1_grad", "W1_grad", "W2_grad", "X_grad", "label_grad"]
    assert [output.name for output in message.graph.output] == names
    assert message.graph.output[:2] == model.graph.output


def test_g2_forward_model_is_unchanged() -> None:
    """Nodes in order, initializers, producer, IR version and graph name stay; unused domains are not imported."""
    model = mlp()
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    helper.set_model_props(model, {"made": "by hand"})
    for plain in (True, False):
        message = onnx.load_from_string(built(model, {"W1"}, plain=plain))
        for was, now in zip(model.graph.node, message.graph.node, strict=False):
            # Compared as text, which omits attributes with their default value.
            assert onnx.printer.to_text(was) == onnx.printer.to_text(now)
        assert message.graph.initializer[:3] == model.graph.initializer
        assert (message.producer_name, message.ir_version, message.graph.name) == ("pytest", 8, "mlp")
        assert message.metadata_props == model.metadata_props
        domains = {opset.domain: opset.version for opset in message.opset_import}
        assert domains == ({"": 17} if plain else {"": 17, "com.microsoft": 1})
        made = {name for node in message.graph.node for name in node.output}
        declared = {info.name for info in [*message.graph.value_info, *message.graph.output]}
        assert made - declared <= {name for node in model.graph.node for name in node.output}


def test_g3_forward_outputs_and_shapes() -> None:
    """The outputs of the model do not change, and each gradient has the shape and type of its value."""
    model, feeds = mlp(), mlp_feeds()
    made = built(model, {"W1", "B1", "W2", "X"})
    wanted = theirs(model.SerializeToString(), feeds)
    for results in (ours(made, feeds), theirs(made, feeds)):
        for name, value in wanted.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-3, atol=1e-5)
        shapes = {name: results[f"{name}_grad"].shape for name in ("W1", "B1", "W2", "X")}
        assert shapes == {"W1": (4, 5), "B1": (5,), "W2": (5, 2), "X": (3, 4)}
    declared = {output.name: output.type for output in onnx.load_from_string(made).graph.output}
    assert declared["X_grad"] == model.graph.input[0].type
    assert [dim.dim_value for dim in declared["W1_grad"].tensor_type.shape.dim] == [4, 5]


def test_g4_a_frozen_parameter_gets_none() -> None:
    made = built(mlp(), {"W2"})
    assert outputs_of(made) == ["loss", "pred", "W2_grad"]
    assert not any("W1_grad" in node.output for node in onnx.load_from_string(made).graph.node)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("case", RECORDED)
def test_g5_recorded_graphs(case: str, plain: bool) -> None:
    """The outputs of ortrain's graph agree with the record, evaluated by ortrain, and in plain ONNX by onnxruntime."""
    folder = RECORDS / case
    meta = json.loads((folder / "meta.json").read_text())
    builder = GradientGraphBuilder(
        (folder / "forward.onnx").read_bytes(),
        set(meta["y_node_arg_names"]),
        set(meta["x_node_arg_names"]),
        meta["loss_node_arg_name"],
        plain=plain,
    )
    builder.build()
    made = builder.get_model()
    wanted, feeds = recorded(case)
    assert set(outputs_of(made)) == wanted.keys()
    found = [ours(made, feeds)]
    if plain:
        assert {domain for domain, _ in operators_of(made)} == {""}
        checker.check_model(made, full_check=True)
        found.append(theirs(made, feeds))
    for results in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(results[name], value, rtol=RTOL, atol=ATOL, err_msg=name)


def recorded(case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the outputs and the inputs of a recorded graph."""
    with np.load(RECORDS / case / "io.npz") as record:
        outputs = {key.removeprefix("out/"): record[key] for key in record.files if key.startswith("out/")}
        outputs |= {f"{key.removeprefix('grad/')}_grad": record[key] for key in record.files if key.startswith("grad/")}
        return outputs, {key.removeprefix("in/"): record[key] for key in record.files if key.startswith("in/")}


@pytest.mark.parametrize("case", RECORDED)
def test_g5_recorded_gradient_models_run_here(case: str) -> None:
    wanted, feeds = recorded(case)
    results = ours((RECORDS / case / "gradient.onnx").read_bytes(), feeds)
    for name, value in wanted.items():
        np.testing.assert_allclose(results[name], value, rtol=RTOL, atol=ATOL, err_msg=name)


def test_g6_inputs_and_intermediate_results() -> None:
    """Gradients of labels, inputs and intermediate results are outputs like gradients of weights."""
    feeds = mlp_feeds()
    results = ours(built(mlp(), {"a", "h", "label", "pred"}), feeds)
    assert list(results) == ["loss", "pred", "a_grad", "h_grad", "label_grad", "pred_grad"]
    np.testing.assert_allclose(results["pred_grad"], -results["label_grad"], rtol=1e-6)
    np.testing.assert_allclose(results["pred_grad"], (results["pred"] - feeds["label"]) / 3, rtol=1e-5)
    np.testing.assert_allclose(results["a_grad"], results["pred_grad"] @ (random(5, 2, seed=2) - 1).T, rtol=1e-5)


def test_g6_ancestors_of_the_loss_change_nothing() -> None:
    builder = GradientGraphBuilder(mlp().SerializeToString(), {"pred", "loss", "h"}, {"W1"}, "loss")
    builder.build()
    assert builder.get_model() == built(mlp(), {"W1"})


def test_g6_a_loss_of_several_elements_is_seeded_with_ones() -> None:
    """The reference seeds such a loss with one number."""
    feeds = mlp_feeds()
    made = built(mlp(), {"W2", "pred"}, loss="pred")
    for results in (ours(made, feeds), theirs(made, feeds)):
        np.testing.assert_array_equal(results["pred_grad"], np.ones((3, 2), np.float32))
        a = np.maximum(feeds["X"] @ (random(4, 5) - 1) + random(5, seed=1) - 1, 0)
        np.testing.assert_allclose(results["W2_grad"], a.T @ np.ones((3, 2)), rtol=1e-5)


def test_g6_without_x_nothing_changes() -> None:
    forward = mlp().SerializeToString()
    builder = GradientGraphBuilder(forward, {"loss"}, set(), "loss")
    builder.build()
    assert builder.get_model() == forward


NO_GRADIENT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4] X, int64[2] where) => (float loss)
<float[4] W, float[4] V, int64[2] I>
{
    p = Mul (X, W)
    q = Cast <to = 7> (p)
    r = Cast <to = 1> (q)
    loss = ReduceSum <keepdims = 0> (r)
    other = Neg (V)
}
"""


def no_gradient() -> ModelProto:
    return parsed(NO_GRADIENT, W=random(4), V=random(4), I=np.array([0, 1]))


# The arguments of a refused call, the step that fails, the class of the error, and part of its message.
REFUSED: dict[str, tuple[tuple[set[str], set[str], str], str, type[Exception], str]] = {
    "unknown y": (
        ({"los"}, {"W"}, "loss"),
        "constructor",
        ortrain.InvalidArgumentError,
        'y_node_arg_names names unknown values of the model: "los"; did you mean "loss"?',
    ),
    "unknown y like none": (
        ({"accuracy"}, {"W"}, "loss"),
        "constructor",
        ortrain.InvalidArgumentError,
        'y_node_arg_names names unknown values of the model: "accuracy"; its outputs are "loss"',
    ),
    "unknown x": (
        ({"loss"}, {"weight", "Ws"}, "loss"),
        "constructor",
        ortrain.InvalidArgumentError,
        'x_node_arg_names names unknown values of the model: "Ws", "weight"; its outputs are "loss"',
    ),
    "unknown loss": (
        ({"loss"}, {"W"}, "lost"),
        "constructor",
        ortrain.InvalidArgumentError,
        'loss_node_arg_name names unknown values of the model: "lost"; did you mean "loss"?',
    ),
    "no loss": (
        ({"r"}, {"W"}, ""),
        "constructor",
        ortrain.InvalidArgumentError,
        'loss_node_arg_name names unknown values of the model: ""; its outputs are "loss"',
    ),
    "a loss that is not in y": (
        ({"r"}, {"W"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        '"r_grad", the initial gradient of "r" in y_node_arg_names, is undefined: the loss "loss" is not in '
        'y_node_arg_names; name it there, or "r" as the loss',
    ),
    "y that the loss does not need": (
        ({"loss", "other"}, {"W"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        '"other_grad", the initial gradient of "other" in y_node_arg_names, is undefined: the loss "loss" does '
        "not depend on it; leave it out, or use ortrain.gradient.vjp, where initial gradients are inputs",
    ),
    "no y": (
        (set(), {"W"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        'y_node_arg_names is empty, so no gradient reaches "W"; name the loss "loss" in it',
    ),
    "x that no node uses": (
        ({"loss"}, {"I"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        '"I" is int64[2], and only floats have gradients; leave it out of x_node_arg_names',
    ),
    "x that the loss does not need": (
        ({"loss"}, {"V"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        'the model: no gradient of "loss" reaches "V": "loss" does not depend on it; leave it out of x_node_arg_names',
    ),
    "x behind a cast": (
        ({"loss"}, {"W", "X"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        'no gradient of "loss" reaches "W": every path from it to "loss" goes through Cast -> "q"',
    ),
    "x that is an input of integers": (
        ({"loss"}, {"where"}, "loss"),
        "build",
        ortrain.InvalidArgumentError,
        '"where" is int64[2], and only floats have gradients; leave it out of x_node_arg_names',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_g6_refusals(name: str) -> None:
    """Each error is a RuntimeError, as in the reference, that names the value; nothing changes."""
    (y, x, loss), when, kind, sentence = REFUSED[name]
    forward = no_gradient().SerializeToString()
    if when == "constructor":
        with pytest.raises(kind) as caught:
            GradientGraphBuilder(forward, y, x, loss)
    else:
        builder = GradientGraphBuilder(forward, y, x, loss)
        for _ in range(2):
            with pytest.raises(kind) as caught:
                builder.build()
            assert builder.get_model() == forward
    assert isinstance(caught.value, RuntimeError)
    assert sentence in str(caught.value)


def test_g6_a_second_build() -> None:
    builder = GradientGraphBuilder(mlp().SerializeToString(), {"loss"}, {"W1"}, "loss")
    builder.build()
    made = builder.get_model()
    with pytest.raises(ortrain.OrtrainError) as caught:
        builder.build()
    assert str(caught.value) == ("build() was called before; make another GradientGraphBuilder for other gradients")
    assert builder.get_model() == made


def test_g6_invalid_models() -> None:
    with pytest.raises(ortrain.InvalidModelError, match="the model is not an ONNX model"):
        GradientGraphBuilder(b"\xff\xfe no model", {"loss"}, {"W1"}, "loss")
    whole: Any
    for whole in ("model.onnx", mlp(), None, bytearray(b"")):
        with pytest.raises(TypeError) as caught:
            GradientGraphBuilder(whole, {"loss"}, {"W1"}, "loss")
        assert str(caught.value) == (
            f"serialized_model must be the bytes of a model, got {type(whole).__name__}; ortrain.gradient.grad also "
            "accepts a path or an onnx.ModelProto"
        )
    with pytest.raises(TypeError, match=r"options must be ortrain\.SessionOptions, got dict"):
        GradientGraphBuilder(mlp().SerializeToString(), {"loss"}, {"W1"}, "loss", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_node_arg_name must be a name, got NoneType"):
        GradientGraphBuilder(mlp().SerializeToString(), {"loss"}, {"W1"}, None)  # type: ignore[arg-type]


def test_g6_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    builder = GradientGraphBuilder(mlp().SerializeToString(), {"loss"}, {"W1"}, "loss")
    builder.build()
    with pytest.raises(ortrain.NoSuchFileError, match="nowhere"):
        builder.save(tmp_path / "nowhere" / "gradient.onnx")
    with pytest.raises(ortrain.OrtrainError, match="it is a folder; name a file in it"):
        builder.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 17, 18, 20, 21, 26])
def test_g6_every_opset_works(opset: int) -> None:
    """The opset of the default domain stays, and the gradients are the same. The reference needs opset 11."""
    feeds = mlp_feeds()
    made = built(mlp(opset), {"W1", "B1", "W2", "X"})
    message = onnx.load_from_string(made)
    assert [(item.domain, item.version) for item in message.opset_import] == [("", opset)]
    checker.check_model(message, full_check=True)
    wanted = ours(built(mlp(), {"W1", "B1", "W2", "X"}), feeds)
    for results in (ours(made, feeds), theirs(made, feeds)):
        for name, value in wanted.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("ir_version", [3, 4, 8])
def test_g6_initializers_that_are_inputs(ir_version: int) -> None:
    """These initializers stay inputs; in IR version 3 every initializer is an input."""
    model = mlp(9)
    model.ir_version = ir_version
    model.graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in model.graph.initializer
    )
    made = built(model, {"W1", "X"})
    message = onnx.load_from_string(made)
    checker.check_model(message, full_check=True)
    assert (message.ir_version, list(message.graph.input)) == (ir_version, list(model.graph.input))
    feeds = mlp_feeds()
    # In IR version 3 onnxruntime does not accept another value for an initializer.
    for value in (random(4, 5) - 1, random(4, 5, seed=9) - 1)[: 1 if ir_version < 4 else 2]:
        changed = copy.deepcopy(mlp())
        changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "W1"))
        wanted = ours(built(changed, {"W1", "X"}), feeds)
        for name, result in theirs(made, feeds if ir_version < 4 else feeds | {"W1": value}).items():
            np.testing.assert_allclose(result, wanted[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_g7_values_used_several_times_accumulate() -> None:
    """Partial sums are `<value>_grad_0` and so on, joined by one Sum."""
    message = onnx.load_from_string(built(mlp(), {"pred"}))
    sums = [node for node in message.graph.node if node.op_type == "Sum"]
    assert [(list(node.input), list(node.output)) for node in sums] == [(["d_grad_0", "d_grad_1"], ["d_grad"])]
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[3] x) => (float y)
    { a = Mul (x, x)  b = Mul (a, x)  c = Add (b, x)  y = ReduceSum <keepdims = 0> (c) }
    """
    made = built(parsed(text), {"x"}, loss="y")
    x = random(3)
    for results in (ours(made, {"x": x}), theirs(made, {"x": x})):
        np.testing.assert_allclose(results["x_grad"], 3 * x**2 + 1, rtol=1e-6)


def test_g8_unreachable_values_are_all_named() -> None:
    builder = GradientGraphBuilder(no_gradient().SerializeToString(), {"loss"}, {"W", "V", "X"}, "loss")
    with pytest.raises(ortrain.InvalidArgumentError) as caught:
        builder.build()
    for name in ("W", "V", "X"):
        assert f'no gradient of "loss" reaches "{name}"' in str(caught.value)


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_g9_shapes_of_one_element(shape: list[int]) -> None:
    """The seed `<loss>_grad` is an initializer: a one of the shape of the loss."""
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2, 3] x) => (float{shape or ""} loss)
    <int64[{len(shape)}] shape>
    {{ s = ReduceSum <keepdims = 0> (x)  t = Mul (s, s)  loss = Reshape (t, shape) }}
    """
    model = parsed(text, shape=np.array(shape, np.int64))
    made = built(model, {"x"})
    seed = next(tensor for tensor in onnx.load_from_string(made).graph.initializer if tensor.name == "loss_grad")
    np.testing.assert_array_equal(numpy_helper.to_array(seed), np.ones(shape, np.float32))
    x = random(2, 3)
    for results in (ours(made, {"x": x}), theirs(made, {"x": x})):
        np.testing.assert_allclose(results["x_grad"], np.full((2, 3), 2 * x.sum()), rtol=1e-5)


def test_a19_weights_of_one_element_train() -> None:
    """The reference folds such weights before it looks for them."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n] x) => (float loss)
    <float w, float[1] b>
    { p = Mul (x, w)  q = Add (p, b)  r = Mul (q, q)  loss = ReduceMean <keepdims = 0> (r) }
    """
    x, w, b = random(5), np.float32(0.5), np.array([0.25], np.float32)
    made = built(parsed(text, w=np.asarray(w), b=b), {"w", "b"})
    for results in (ours(made, {"x": x}), theirs(made, {"x": x})):
        np.testing.assert_allclose(results["w_grad"], np.mean(2 * (x * w + b) * x), rtol=1e-5)
        np.testing.assert_allclose(results["b_grad"], [np.mean(2 * (x * w + b))], rtol=1e-5)


# Models with gradients that need outputs which their nodes omit; the reference requires these outputs.
UNDECLARED = {
    "LayerNormalization": "s = LayerNormalization <axis = 1> (p, W)",
    "MaxPool": """
        c = Reshape (p, image)
        m = MaxPool <kernel_shape = [2, 2]> (c)
        s = Mul (m, m)
    """,
    "Dropout": "d, mask = Dropout (p, ratio, training)  s = Mul (d, d)",
    "Dropout without a mask": "d = Dropout (p, ratio, training)  s = Mul (d, d)",
    "SoftmaxCrossEntropyLoss": 's = SoftmaxCrossEntropyLoss <reduction = "none"> (p, label)',
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", UNDECLARED)
def test_gradients_need_no_declared_types(name: str, plain: bool) -> None:
    """Forward and backward use the same random numbers, too."""
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[4, 4] x, int64[4] label) => (float loss)
    <float[4] W, int64[4] image, float ratio, bool training>
    {{ p = Mul (x, W) {UNDECLARED[name]} loss = ReduceSum <keepdims = 0> (s) }}
    """
    image, ratio = np.array([1, 1, 4, 4]), np.array(0.5, np.float32)
    model = parsed(text, W=random(4), image=image, ratio=ratio, training=np.array(True))
    made = built(model, {"W", "x"}, plain=plain)
    assert {info.name for info in onnx.load_from_string(made).graph.output} == {"loss", "W_grad", "x_grad"}
    feeds = {"x": random(4, 4, seed=1), "label": np.array([0, 3, 1, 2])}
    runs: list[Callable[[], dict[str, np.ndarray]]] = [lambda: ours(made, feeds)]
    if plain:
        checker.check_model(made, full_check=True)
        runs.append(lambda: theirs(made, feeds))
    for run in runs:
        results = run()
        if name.startswith("Dropout"):
            kept = results["x_grad"] != 0
            product = feeds["x"] * random(4)
            np.testing.assert_allclose(results["loss"], ((2 * product) ** 2 * kept).sum(), rtol=1e-5)
            np.testing.assert_allclose(results["x_grad"], 8 * product * random(4) * kept, rtol=1e-5)
        else:
            wide = {key: value.astype(np.float64) if key == "x" else value for key, value in feeds.items()}
            wanted = differences(widened(model), wide, "loss", "x")
            np.testing.assert_allclose(results["x_grad"], wanted, rtol=1e-4, atol=1e-5)


def widened(model: ModelProto) -> ModelProto:
    """Return the model in float64."""
    wide = copy.deepcopy(model)
    for info in [*wide.graph.input, *wide.graph.output, *wide.graph.value_info]:
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in wide.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in ("scales",):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    return wide


# --- comparison with the builder of onnxruntime-training --------------------------------------------------------------

# Cases of the ONNX suite for which the reference's gradient differs from central differences, with the reason.
WRONG_THERE = {
    r"averagepool_2d_dilations": "dilations are ignored",
    r"averagepool_2d_precomputed_same_upper|conv_with_autopad_same": "auto_pad is ignored",
    r"layer_normalization": "what arrives at the mean and the deviation is ignored",
    r"sce_.*_log_prob": "what arrives at the logarithms is ignored",
    r"scatter_elements_with_(duplicate|reduction)|scatternd_(add|max|min|multiply)": "reductions are ignored",
}
# Cases for which central differences give no answer.
NO_DIFFERENCES = {
    r"dropout": "what is dropped is a matter of chance",
    r"leakyrelu_example|test_pow$": "the point is a kink, or lies next to one",
}
# Minimum number of graphs of node cases from the reference.
MIN_GRAPHS = 246
# Tolerance between gradients, relative to the largest element, and between a directional slope and a difference.
ALIKE = 1e-3


@pytest.fixture(scope="session")
def their_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradient graphs of node cases by onnxruntime-training 1.19.2, made in an environment of its own."""
    folder = tmp_path_factory.mktemp("theirs")
    in_environment(oracle(), Path(__file__).parent / "oracle" / "gradient_graphs.py", str(folder))
    return folder


def differing_gradients(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> list[str]:
    """Return the names of gradients that differ."""
    names = [name for name in want if name.endswith("_grad")]
    return [name for name in names if not np.abs(got[name] - want[name]).max() <= ALIKE * np.abs(want[name]).max()]


def is_right(forward: ModelProto, feeds: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> bool:
    """Return True if gradients agree with central differences along two directions for each input."""
    wide = copy.deepcopy(forward)
    retype(wide.graph, set())
    session = ortrain.InferenceSession(wide)
    at = {name: value.astype(np.float64) for name, value in feeds.items()}
    rng = np.random.default_rng(3)
    for name in feeds:
        for _ in range(2):
            direction = rng.uniform(-1, 1, feeds[name].shape)
            ends = [float(session.run(None, at | {name: at[name] + s * STEP * direction})[0]) for s in (1, -1)]
            wanted, parts = (ends[0] - ends[1]) / (2 * STEP), gradients[f"{name}_grad"] * direction
            if not abs(parts.sum() - wanted) <= ALIKE * (np.abs(parts).sum() + abs(wanted)) + STEP:
                return False
    return True


def test_their_graphs_of_node_cases(their_graphs: Path) -> None:
    """Each graph loads and runs here. Correct graphs agree with ortrain's, and the wrong ones are known."""
    names = sorted(folder.name for folder in their_graphs.iterdir())
    assert len(names) >= MIN_GRAPHS
    wrong, differ = [], []
    for name in names:
        forward = onnx.load(their_graphs / name / "forward.onnx")
        with np.load(their_graphs / name / "io.npz") as record:
            feeds = {key.removeprefix("in/"): record[key] for key in record.files if key.startswith("in/")}
            recorded = {key.removeprefix("out/"): record[key] for key in record.files if key.startswith("out/")}
        here = ours((their_graphs / name / "gradient.onnx").read_bytes(), feeds)
        assert here.keys() == recorded.keys()
        if any(re.search(pattern, name) for pattern in NO_DIFFERENCES):
            continue
        if not is_right(forward, feeds, recorded):
            wrong.append(name)
            continue
        made = ours(built(forward, feeds, "the_loss"), feeds)
        differ += [
            f"{name}: {gradient}"
            for gradient in differing_gradients(here, recorded) + differing_gradients(made, recorded)
        ]
    assert not differ
    assert [name for name in wrong if not any(re.search(pattern, name) for pattern in WRONG_THERE)] == []
    assert all(any(re.search(pattern, name) for name in wrong) for pattern in WRONG_THERE)


# --- grad and vjp -----------------------------------------------------------------------------------------------------


def with_inputs(model: ModelProto, names: Iterable[str]) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Return the model with some of its initializers as inputs, and their values."""
    changed, values = copy.deepcopy(model), {}
    for tensor in [tensor for tensor in changed.graph.initializer if tensor.name in names]:
        values[tensor.name] = numpy_helper.to_array(tensor)
        changed.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        changed.graph.initializer.remove(tensor)
    return changed, values


# Tolerance between a difference and a product with the Jacobian: rounding of float32, and of a step in float64.
PRODUCTS = {"float32": 1e-3, "float64": 1e-7}


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("net", NETS)
def test_products_with_the_jacobian_of_a_net(net: str, dtype: str) -> None:
    """<v, J u> by differences along u equals <J^T v, u>, over all weights and the input at once."""
    made = NETS[net]()
    model, weights = with_inputs(made.model, made.trained)
    (output,) = (info.name for info in model.graph.output)
    wide = copy.deepcopy(model)
    retype(wide.graph, {"scales"})
    rng = np.random.default_rng(6)
    feeds = {"x": made.batches[0][0], **weights}
    at = {name: value.astype(np.float64) for name, value in feeds.items()}
    forward = ortrain.InferenceSession(wide)
    (result,) = forward.run([output], at)
    v = rng.standard_normal(result.shape)
    u = {name: rng.standard_normal(value.shape) for name, value in at.items()}
    ends = [forward.run([output], {name: at[name] + s * STEP * u[name] for name in at})[0] for s in (1, -1)]
    wanted = float((v * (ends[0] - ends[1])).sum() / (2 * STEP))
    back = vjp(model if dtype == "float32" else wide, of=output, wrt=list(feeds))
    given = {name: value.astype(dtype) for name, value in at.items()}
    gradients = ours(back, given | {f"{output}_grad": v.astype(dtype)})
    found = float(sum((gradients[f"{name}_grad"].astype(np.float64) * u[name]).sum() for name in u))
    assert abs(found - wanted) <= PRODUCTS[dtype] * abs(wanted)


def test_grad_accepts_paths_bytes_and_messages(tmp_path: Path) -> None:
    """The model may be a path, bytes or a ModelProto; one name or several are accepted."""
    model = mlp()
    onnx.save(model, tmp_path / "mlp.onnx")
    wanted = grad(model, of="loss", wrt=["W1", "B1"])
    for given in (tmp_path / "mlp.onnx", str(tmp_path / "mlp.onnx"), model.SerializeToString()):
        assert grad(given, of=["loss"], wrt={"B1", "W1"}) == grad(given, of={"loss"}, wrt=("B1", "W1"))
        assert outputs_of(grad(given, of="loss", wrt=["W1", "B1"])) == outputs_of(wanted)
    for names in (7, [1], b"W1"):
        with pytest.raises(TypeError, match="wrt"):
            grad(model, of="loss", wrt=names)  # type: ignore[arg-type]


def test_gradients_of_several_values_add_up() -> None:
    """If a value of `of` depends on another one, the latter also receives the gradient of the former."""
    feeds = mlp_feeds()
    apart = [ours(grad(mlp(), of=of, wrt=["W1", "a"]), feeds) for of in ("loss", "a")]
    both = ours(grad(mlp(), of=["a", "loss"], wrt=["W1", "a"]), feeds)
    for name in ("W1_grad", "a_grad"):
        np.testing.assert_allclose(both[name], apart[0][name] + apart[1][name], rtol=1e-5, atol=1e-6)
    assert list(both) == ["loss", "pred", "W1_grad", "a_grad"]


def test_vjp_with_ones_is_grad() -> None:
    feeds = mlp_feeds()
    made = vjp(mlp(), of=["pred", "h"], wrt=["X", "W2"])
    message = onnx.load_from_string(made)
    checker.check_model(message, full_check=True)
    assert [info.name for info in message.graph.input] == ["X", "label", "pred_grad", "h_grad"]
    assert message.graph.input[2].type == mlp().graph.output[1].type
    ones = {"pred_grad": np.ones((3, 2), np.float32), "h_grad": np.ones((3, 5), np.float32)}
    wanted = ours(grad(mlp(), of=["pred", "h"], wrt=["X", "W2"]), feeds)
    for results in (ours(made, feeds | ones), theirs(made, feeds | ones)):
        for name, value in wanted.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "double", "bfloat16"])
def test_other_floats(dtype: str) -> None:
    """Gradients have the type of their values."""
    model = parser.parse_model(MLP.replace("float[", f"{dtype}[").replace("(float loss", f"({dtype} loss"))
    kind = model.graph.input[0].type.tensor_type.elem_type
    for name, array in (("W1", random(4, 5) - 1), ("B1", random(5) - 1), ("W2", random(5, 2) - 1)):
        model.graph.initializer.append(helper.make_tensor(name, kind, array.shape, array.ravel().tolist()))
    made = grad(model, of="loss", wrt=["W1", "X"])
    message = onnx.load_from_string(made)
    checker.check_model(message, full_check=True)
    assert {output.type.tensor_type.elem_type for output in message.graph.output} == {kind}
    if dtype != "bfloat16":
        feeds = mlp_feeds(np.dtype(dtype))
        wanted = theirs(made, feeds)
        for name, value in ours(made, feeds).items():
            np.testing.assert_allclose(value, wanted[name], rtol=2e-3, atol=2e-3, err_msg=name)


def test_functions_are_written_out() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17, "own" : 1]>
    g (float[3] x) => (float loss)
    { y = own.Cube (x)  loss = ReduceSum <keepdims = 0> (y) }
    <domain: "own", opset_import: ["" : 17]>
    Cube (a) => (c) { b = Mul (a, a)  c = Mul (b, a) }
    """
    made = grad(parser.parse_model(text), of="loss", wrt="x")
    message = onnx.load_from_string(made)
    checker.check_model(message, full_check=True)
    assert not message.functions
    x = random(3)
    np.testing.assert_allclose(theirs(made, {"x": x})["x_grad"], 3 * x**2, rtol=1e-5)


def test_gradients_of_ones_own() -> None:
    """A gradient of a library takes effect, and the result needs no library."""
    library = ortrain.OperatorLibrary()
    straight = '<domain: "own", opset_import: ["" : 17]> Straight (x, y, dy) => (dx) { dx = Identity (dy) }'
    library.add_gradient("Sign", parser.parse_function(straight))
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { y = Sign (x) }'
    model = parser.parse_model(text)
    with pytest.raises(ortrain.InvalidArgumentError, match="passes no gradient back"):
        grad(model, of="y", wrt="x")
    made = grad(model, of="y", wrt="x", operators=library)
    assert onnx.load_from_string(made).graph.node[0].op_type == "Sign"
    np.testing.assert_array_equal(theirs(made, {"x": random(3)})["x_grad"], np.ones(3, np.float32))


def test_external_data_is_loaded(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx", save_as_external_data=True, location="mlp.data", size_threshold=0)
    feeds = mlp_feeds()
    wanted = ours(grad(mlp(), of="loss", wrt="W1"), feeds)
    for name, value in theirs(grad(tmp_path / "mlp.onnx", of="loss", wrt="W1"), feeds).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7)


CONTROL = {
    "If": """
        y = If (c) <then_branch = yes () => (float[n] p) { p = Mul (x, w) }, else_branch = no () => (float[n] q) {
            q = Exp (x)
        }>
    """,
    "Loop": """
        y = Loop (count, c, x) <body = step (int64 i, bool go, float[n] s) => (bool on, float[n] r) {
            on = Identity (go)
            q = Mul (s, w)
            r = Tanh (q)
        }>
    """,
    "Scan": """
        last, all = Scan <num_scan_inputs = 1, body = step (float s, float e) => (float t, float o) {
            p = Mul (s, e)
            q = Mul (e, e)
            t = Add (p, q)
            o = Identity (t)
        }> (start, x)
        y = Mul (all, w)
    """,
}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow(name: str, flag: bool) -> None:
    """The forward node stays, or another one with the values for its gradient replaces it; other runtimes run it."""
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[3] x, bool c) => (float loss)
    <float[3] w = {{0.5, -1.0, 2.0}}, int64 count = {{3}}, float start = {{0.5}}>
    {{ {CONTROL[name].replace("[n]", "[3]")} z = Mul (y, y)  loss = ReduceSum <keepdims = 0> (z) }}
    """
    model = parser.parse_model(text)
    made = grad(model, of="loss", wrt=["x", "w"])
    checker.check_model(made)
    feeds = {"x": random(3), "c": np.array(flag)}
    wide = widened(model)
    retype(wide.graph, set())
    at = {"x": feeds["x"].astype(np.float64), "c": feeds["c"]}
    wanted = differences(wide, at, "loss", "x")
    found = [ours(made, feeds)]
    # The gradient of a loop without iterations is a Scan over no elements, which onnxruntime does not run.
    if name != "Loop" or flag:
        found.append(theirs(made, feeds))
    for results in found:
        np.testing.assert_allclose(results["x_grad"], wanted, rtol=1e-4, atol=1e-5)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_all_obstacles_are_named_by_node() -> None:
    """The error names both operators without a gradient with their nodes, and nothing else."""
    text = """
    <ir_version: 8, opset_import: ["" : 7]>
    g (float[1, 1, 4, 4] x) => (float[1, 1, 1, 1] y)
    { [first] a = MaxPool <kernel_shape = [2, 2]> (x)  [second] y = MaxPool <kernel_shape = [3, 3]> (a) }
    """
    with pytest.raises(ortrain.UnsupportedError) as caught:
        grad(parser.parse_model(text), of="y", wrt="x")
    sentence = str(caught.value)
    assert "obstacles: " in sentence
    assert '"first' in sentence
    assert '"second' in sentence
    help_ = "raise the opset of the model, which is 7, or let gradients be operators of com.microsoft (plain=False)"
    assert help_ in sentence


GRAD_REFUSED: dict[str, tuple[Any, Any, str]] = {
    "unknown": ("los", "W1", 'of names unknown values of the model: "los"; did you mean "loss"?'),
    "a node": (
        "mean",
        "W1",
        'of names unknown values of the model: "mean"; a node has this name, and its output is "loss"',
    ),
    "nothing": ([], "W1", "the list of is empty; name the values to differentiate"),
    "depends on none": (["loss", "X"], "W1", '"X" depends on none of "W1"; leave it out of of'),
    "no path": (
        "h",
        "W2",
        'the model: no gradient of "h" reaches "W2": "h" does not depend on it; leave it out of wrt',
    ),
}


@pytest.mark.parametrize("make", [grad, vjp])
@pytest.mark.parametrize("name", GRAD_REFUSED)
def test_grad_and_vjp_refuse(name: str, make: Any) -> None:
    of, wrt, sentence = GRAD_REFUSED[name]
    with pytest.raises(ortrain.InvalidArgumentError) as caught:
        make(mlp(), of=of, wrt=wrt)
    assert str(caught.value) == sentence


def test_names_of_gradients_must_be_free() -> None:
    model = mlp()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "W1_grad"
    with pytest.raises(ortrain.InvalidArgumentError) as caught:
        grad(model, of="loss", wrt="W1")
    assert str(caught.value) == 'the model has a value "W1_grad", which is the name of a gradient; rename it'
    with pytest.raises(ortrain.NoSuchFileError):
        grad("nowhere.onnx", of="loss", wrt="W1")
    with pytest.raises(ortrain.InvalidModelError):
        grad(b"no model", of="loss", wrt="W1")
