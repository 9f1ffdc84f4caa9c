"""Helpers of ``ortrain.gradient.utils``: losses added to models, names and values of initializers, nodes, devices."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from on_runtimes import TOLERANCE, drawn, everywhere, modelled, names
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, Int32TensorType, Int64TensorType

import ortrain
from ortrain import InvalidArgumentError, OrtrainError, UnsupportedError, capi
from ortrain.gradient import grad
from ortrain.gradient.utils import onnx_rewriter, orttraining_helper
from ortrain.gradient.utils.onnx_helper import (
    add_initializer,
    dtype_to_var_type,
    get_onnx_opset,
    onnx_rename_weights,
    proto_type_to_dtype,
    remove_initializer,
    replace_initializers_into_onnx,
)
from ortrain.gradient.utils.onnx_rewriter import onnx_rewrite_operator, unreduced_onnx_loss
from ortrain.gradient.utils.onnxruntime_helper import (
    device_to_providers,
    get_ort_device,
    get_ort_device_from_session,
    get_ort_device_type,
    numpy_to_ort_value,
    ort_device_to_string,
    provider_to_device,
)
from ortrain.gradient.utils.orttraining_helper import add_loss_output, get_train_initializer, penalty_loss_onnx

# A central difference with this step has an error of about 1e-9 in float64, relative to the summed terms.
STEP, DIFFERENCE = 1e-6, 1e-6
DTYPES = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}
KINDS = pytest.mark.parametrize("kind", DTYPES)


def regression(kind: int = TensorProto.FLOAT, columns: int = 1, opset: int = 15) -> onnx.ModelProto:
    """Return a model of ``predicted = X coef + intercept``."""
    rng, dtype = np.random.default_rng(3), DTYPES[kind]
    name = {TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double"}[kind]
    return modelled(
        f"({name}[n, 4] X) => ({name}[n, {columns}] predicted)"
        "{ product = MatMul(X, coef) predicted = Add(product, intercept) }",
        opset,
        coef=rng.standard_normal((4, columns)).astype(dtype),
        intercept=rng.standard_normal(columns).astype(dtype),
    )


SCORES: dict[str, tuple[dict[str, float], Callable[[np.ndarray], np.ndarray]]] = {
    "squared_error": ({}, lambda d: d**2),
    "l2": ({}, lambda d: d**2),
    "absolute_error": ({}, abs),
    "l1": ({}, abs),
    "elastic": ({}, lambda d: 0.5 * abs(d) + 0.5 * d**2),
    "elastic with weights": ({"l1_weight": 0.1, "l2_weight": 0.9}, lambda d: 0.1 * abs(d) + 0.9 * d**2),
}
PENALTIES: dict[str, tuple[Any, Callable[[np.ndarray, np.ndarray], float]]] = {
    "none": (None, lambda coef, intercept: 0),
    "empty": ({}, lambda coef, intercept: 0),
    "l1": ({"coef": {"l1": 0.3}}, lambda coef, intercept: 0.3 * abs(coef).sum()),
    "l2": ({"coef": {"l2": 0.3}}, lambda coef, intercept: 0.3 * (coef**2).sum()),
    "a float": ({"intercept": 0.5}, lambda coef, intercept: 0.5 * (intercept**2).sum()),
    "both of both": (
        {"coef": {"l1": 0.5, "l2": 0.45}, "intercept": {"l1": 0.1, "l2": 0.2}},
        lambda coef, intercept: (
            0.5 * abs(coef).sum() + 0.45 * (coef**2).sum() + 0.1 * abs(intercept).sum() + 0.2 * (intercept**2).sum()
        ),
    ),
}


@KINDS
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_b25_losses_are_their_formulas(score: str, weighted: bool, columns: int, kind: int) -> None:
    """Losses are sums over all elements; a row weight multiplies only the terms of its row."""
    options, formula = SCORES[score]
    model = regression(kind, columns)
    loss = add_loss_output(model, score.split()[0], weight_name="weight" if weighted else None, **options)
    assert names(loss.graph.input) == ["X", "label", *(["weight"] if weighted else [])]
    assert names(loss.graph.output) == ["loss", "predicted"]
    for entry in (loss.graph.input[1], loss.graph.output[0]):
        assert entry.type.tensor_type.elem_type == kind
    assert [dim.dim_value for dim in loss.graph.output[0].type.tensor_type.shape.dim] == [1, 1]
    assert [dim.dim_value for dim in loss.graph.input[1].type.tensor_type.shape.dim] == [0, columns]
    x, label, weight = (
        drawn(6, 4, dtype=DTYPES[kind]),
        drawn(6, columns, dtype=DTYPES[kind], seed=1),
        abs(drawn(6, dtype=DTYPES[kind], seed=2)),
    )
    coef, intercept = (value.astype(np.float64) for value, _ in get_train_initializer(model).values())
    predicted = x.astype(np.float64) @ coef + intercept
    terms = formula(predicted - label) * (weight[:, None] if weighted else 1)
    found = everywhere(loss, {"X": x, "label": label} | ({"weight": weight} if weighted else {}))
    assert found["loss"].shape == (1, 1)
    np.testing.assert_allclose(found["loss"], [[terms.sum()]], **TOLERANCE[DTYPES[kind]])
    np.testing.assert_allclose(found["predicted"], predicted, **TOLERANCE[DTYPES[kind]])


@KINDS
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("score", ["l1", "l2", "elastic"])
def test_b25_penalties_are_added_to_losses(score: str, penalty: str, kind: int) -> None:
    model = regression(kind)
    given, formula = PENALTIES[penalty]
    x, label = drawn(6, 4, dtype=DTYPES[kind]), drawn(6, 1, dtype=DTYPES[kind], seed=1)
    coef, intercept = (value.astype(np.float64) for value, _ in get_train_initializer(model).values())
    terms = SCORES[score][1](x.astype(np.float64) @ coef + intercept - label)
    loss = add_loss_output(model, score, penalty=given)
    found = everywhere(loss, {"X": x, "label": label})
    assert found["loss"].shape == (1, 1)
    np.testing.assert_allclose(found["loss"], [[terms.sum() + formula(coef, intercept)]], **TOLERANCE[DTYPES[kind]])
    if given:
        last = loss.graph.node[-1]
        assert (last.op_type, list(last.output)) == ("Add", ["loss"])


def test_b25_penalties_of_inputs() -> None:
    loss = add_loss_output(regression(), penalty={"X": {"l1": 2.0}})
    x = drawn(3, 4, dtype=np.float32)
    predicted = ReferenceEvaluator(regression()).run(None, {"X": x})[0]
    found = everywhere(loss, {"X": x, "label": predicted})
    np.testing.assert_allclose(found["loss"], [[2 * abs(x).sum()]], rtol=1e-6)


def probabilities(kind: int = TensorProto.FLOAT, opset: int = 15) -> onnx.ModelProto:
    """Return a classifier as skl2onnx exports it, with an output ``label`` for the classes and the probabilities."""
    name = {TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double"}[kind]
    return modelled(
        f"({name}[n, 2] X) => (int64[n] label, {name}[n, 2] probabilities)"
        "{ label = ArgMax <axis = 1, keepdims = 0> (X) probabilities = Mul(X, one) }",
        opset,
        one=np.ones(1, DTYPES[kind]),
    )


def log_loss(p: np.ndarray, y: np.ndarray, eps: float, weight: Any = 1.0) -> float:
    p = np.clip(p.astype(np.float64), eps, 1 - eps)
    p /= p.sum(axis=1, keepdims=True)
    return float(-(weight * ((1 - y) * np.log(p[:, 0]) + y * np.log(p[:, 1]))).mean())


@KINDS
@pytest.mark.parametrize("opset", [10, 11, 12, 13, 15, 18])
def test_b25_the_log_loss_takes_integers(opset: int, kind: int) -> None:
    model = probabilities(kind, opset)
    loss = add_loss_output(model, "log", output_index="probabilities", weight_name="weight")
    assert names(loss.graph.input) == ["X", "label", "weight"]
    assert names(loss.graph.output) == ["loss", "probabilities"]
    label = loss.graph.input[1].type.tensor_type
    assert label.elem_type == TensorProto.INT64
    assert [dim.dim_value for dim in label.shape.dim] == [0, 1]
    second = np.array([0, 0, 0.2, 0.5, 0.8, 1, 1])
    x = np.stack([1 - second, second], axis=1).astype(DTYPES[kind])
    y, weight = np.array([0, 1, 0, 1, 1, 1, 0]), abs(drawn(7, dtype=DTYPES[kind]))
    found = everywhere(loss, {"X": x, "label": y[:, None], "weight": weight})
    # In float32, 1 - eps has few significant digits of eps.
    wanted = log_loss(x, y, 1e-6 if kind == TensorProto.DOUBLE else float(1 - np.float32(1 - 1e-6)), weight)
    np.testing.assert_allclose(found["loss"], [[wanted]], rtol=1e-3 if kind == TensorProto.FLOAT else 1e-12)


def test_b25_the_log_loss_clips_and_divides() -> None:
    """The log loss clips probabilities at ``eps`` and divides by the row count. A negative ``eps`` clips nothing."""
    x, y = np.array([[0.2, 0.3], [0.001, 0.5]], np.float32), np.array([0, 1])
    for eps in (0.1, -5):
        loss = add_loss_output(probabilities(), "log", output_index=1, eps=eps)
        assert any(node.op_type == "Clip" and node.input[0] == "probabilities" for node in loss.graph.node)
        found = everywhere(loss, {"X": x, "label": y[:, None]})
        np.testing.assert_allclose(found["loss"], [[log_loss(x, y, eps)]], rtol=1e-5)


def test_results_that_are_called_as_the_label_make_way() -> None:
    """The new model renames results with the name of the label; the original model does not change."""
    model = modelled(
        "(float[n, 2] X) => (float[n, 2] Y) { label = Exp(X) also = Neg(label) Y = Add(label, also) }",
    )
    before = model.SerializeToString()
    loss = add_loss_output(model)
    assert model.SerializeToString() == before
    assert [list(node.output) for node in loss.graph.node][:3] == [["_label_"], ["also"], ["Y"]]
    assert list(loss.graph.node[2].input) == ["_label_", "also"]
    found = everywhere(loss, {"X": np.ones((3, 2), np.float32), "label": np.full((3, 2), 2, np.float32)})
    np.testing.assert_allclose(found["loss"], [[24]])
    assert "label" in names_of_results(add_loss_output(model, label_name="target"))


def names_of_results(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node for name in node.output}


@pytest.mark.parametrize(("index", "selected"), [(0, "Y"), (1, "Z"), (-1, "Z"), (np.int64(1), "Z"), ("Y", "Y")])
def test_the_output_is_chosen_by_its_place_or_its_name(index: Any, selected: str) -> None:
    model = modelled(
        "(float[n, 2] X) => (float[n, 2] Y, float[n, 2] Z) { Y = Exp(X) Z = Neg(w) }", w=np.float32([[1, 2]])
    )
    loss = add_loss_output(model, output_index=index)
    assert names(loss.graph.output) == ["loss", selected]
    assert names_of_results(loss) >= {selected}
    assert not names_of_results(loss) & ({"Y", "Z"} - {selected})
    # An initializer that only the other output used is removed.
    assert ("w" in names(loss.graph.initializer)) == (selected == "Z")
    assert len(model.graph.node) == 2


def test_metadata_is_unchanged() -> None:
    model = regression()
    model.producer_name, model.domain, model.doc_string, model.model_version = "somebody", "d.o", "text", 7
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    helper.set_model_props(model, {"key": "value"})
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in ("product", "unneeded")]
    model.graph.value_info.extend(kinds)
    model.graph.node.append(helper.make_node("Exp", ["product"], ["unneeded"]))
    loss = add_loss_output(model, weight_name="w")
    assert list(loss.graph.value_info) == kinds[:1]
    for field in ("ir_version", "producer_name", "domain", "doc_string", "model_version", "opset_import"):
        assert getattr(loss, field) == getattr(model, field)
    assert [(entry.key, entry.value) for entry in loss.metadata_props] == [("key", "value")]


def test_shapes_that_are_not_declared_are_found() -> None:
    """Outputs of skl2onnx may have no shape; row weights still multiply rows."""
    known = modelled("(float[n, 3] X) => (float[n, 3] Y) { Y = Exp(X) }")
    known.graph.output[0].type.tensor_type.ClearField("shape")
    loss = add_loss_output(known, weight_name="weight")
    dims = loss.graph.input[1].type.tensor_type.shape.dim
    assert [(dim.dim_value, dim.dim_param) for dim in dims] == [(0, "n"), (3, "")]
    reshaped = modelled("(float[n, 3] X) => (float[m, k] Y) { Y = Reshape(X, s) }", s=np.array([-1, 1]))
    reshaped.graph.output[0].type.tensor_type.ClearField("shape")
    dims = add_loss_output(reshaped).graph.input[1].type.tensor_type.shape.dim
    assert [(dim.dim_value, dim.dim_param) for dim in dims] == [(0, ""), (1, "")]
    unknown = copy.deepcopy(known)
    unknown.graph.input[0].type.tensor_type.ClearField("shape")
    for model, shape in [
        (loss, (2, 3)),
        (add_loss_output(unknown, weight_name="weight"), (2, 3, 2)),
        (add_loss_output(unknown, weight_name="weight"), (2,)),
    ]:
        x, weight = drawn(*shape, dtype=np.float32), np.float32([2, 3])
        feeds = {"X": x, "label": np.zeros_like(x), "weight": weight}
        wanted = (np.exp(x) ** 2 * weight.reshape(-1, *[1] * (x.ndim - 1))).sum()
        found = ortrain.InferenceSession(model).run(["loss"], feeds)[0]
        assert found.shape == (1, 1)
        np.testing.assert_allclose(found, [[wanted]], rtol=1e-5)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_weights_multiply_rows_of_any_number_of_axes(axes: int) -> None:
    shape = (3, 2, 2)[:axes]
    sizes = ", ".join(["n", "2", "2"][:axes])
    loss = add_loss_output(
        modelled(f"(float[{sizes}] X) => (float[{sizes}] Y) {{ Y = Exp(X) }}"), "l1", weight_name="w"
    )
    x, weight = drawn(*shape, dtype=np.float32), np.float32([1, 2, 0])
    found = everywhere(loss, {"X": x, "label": np.zeros_like(x), "w": weight})
    np.testing.assert_allclose(found["loss"], [[(np.exp(x) * weight.reshape(-1, *[1] * (axes - 1))).sum()]], rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("score", ["l1", "l2", "elastic", "log"])
def test_losses_have_gradients(score: str, weighted: bool) -> None:
    """ortrain's gradients of the whole graph, penalties included, equal finite differences."""
    kind = TensorProto.DOUBLE
    model = regression(kind, 2)
    if score == "log":
        model.graph.node[1].output[0] = "scores"
        model.graph.node.append(helper.make_node("Softmax", ["scores"], ["predicted"]))
    loss = add_loss_output(
        model, score, weight_name="weight" if weighted else None, penalty={"coef": {"l1": 0.1, "l2": 0.2}}
    )
    x = drawn(5, 4)
    label = (drawn(5, 1, seed=1) > 0).astype(np.int64) if score == "log" else drawn(5, 2, seed=1)
    feeds = {"X": x, "label": label} | ({"weight": abs(drawn(5, seed=2))} if weighted else {})
    made = ortrain.InferenceSession(grad(loss, of="loss", wrt="coef")).run(["coef_grad"], feeds)[0]
    coef = get_train_initializer(model)["coef"][0]
    found = np.empty_like(coef)
    for place in np.ndindex(coef.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = coef.copy()
            moved[place] += step
            session = ReferenceEvaluator(replace_initializers_into_onnx(loss, {"coef": moved}))
            ends.append(session.run(["loss"], feeds)[0].item())
        found[place] = (ends[0] - ends[1]) / (2 * STEP)
    np.testing.assert_allclose(made, found, rtol=0, atol=DIFFERENCE)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (
            {"output_index": None},
            InvalidArgumentError,
            "output_index must select the output of the loss; the model has Y, Z, K",
        ),
        ({"output_index": "y"}, InvalidArgumentError, "the model has no output 'y'; it has Y, Z, K; did you mean 'Y'?"),
        ({"output_index": 3}, InvalidArgumentError, "output_index 3 is out of range: the model has 3 outputs"),
        ({"output_index": 1.0}, TypeError, "output_index must be the index or the name of an output, got float"),
        ({"output_index": True}, TypeError, "output_index must be the index or the name of an output, got bool"),
        (
            {"output_index": "K"},
            InvalidArgumentError,
            "output 'K' must be a tensor of floats for a loss, got int64",
        ),
        (
            {"score_name": "huber"},
            UnsupportedError,
            "unknown score 'huber'; expected one of squared_error, l2, absolute_error, l1, elastic, log",
        ),
        ({"l1_weight": 2}, TypeError, "score 'squared_error' has no keyword argument 'l1_weight'; it takes none"),
        (
            {"score_name": "log", "eps": 0.5},
            InvalidArgumentError,
            "eps must be less than 0.5, got 0.5: it is the smallest probability",
        ),
        (
            {"score_name": "log", "output_index": "Z"},
            InvalidArgumentError,
            "output 'Z' has shape ['n', 3]; the log loss requires probabilities of two columns",
        ),
        (
            {"score_name": "elastic", "l1_weight": np.inf},
            InvalidArgumentError,
            "l1_weight must be a finite number, got inf",
        ),
        ({"label_name": "X"}, InvalidArgumentError, "the model already has a value 'X'; choose another label_name"),
        ({"label_name": "Y"}, InvalidArgumentError, "the model already has a value 'Y'; choose another label_name"),
        ({"loss_name": "Z"}, InvalidArgumentError, "the model already has a value 'Z'; choose another loss_name"),
        ({"weight_name": "w"}, InvalidArgumentError, "the model already has a value 'w'; choose another weight_name"),
        ({"weight_name": "label"}, InvalidArgumentError, "label_name and weight_name are the same: 'label'"),
        ({"loss_name": ""}, InvalidArgumentError, "loss_name must be a name, got ''"),
        (
            {"penalty": {"W": 0.5}},
            InvalidArgumentError,
            "penalty: 'W' is not an initializer or an input; did you mean 'w'?",
        ),
        (
            {"penalty": {"w": 1}},
            TypeError,
            "the penalty of 'w' must be a float, or a dictionary with 'l1' and 'l2', got int",
        ),
        ({"penalty": {"w": {"l3": 1}}}, TypeError, "the penalty of 'w' has no keyword argument 'l3'; it takes l1, l2"),
        (
            {"penalty": {"w": {"l1": 0, "l2": None}}},
            InvalidArgumentError,
            "the penalty of 'w' requires l1 or l2, other than 0",
        ),
        (
            {"penalty": {"other": 0.5}},
            InvalidArgumentError,
            "'other' is double, but the loss of its penalty is float",
        ),
        ({"penalty": 0.5}, TypeError, "penalty must be a dictionary of names and coefficients, got float"),
    ],
)
def test_invalid_arguments_of_add_loss_output(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    model = modelled(
        "(float[n, 3] X) => (float[n, 2] Y, float[n, 3] Z, int64[n] K)"
        "{ Y = MatMul(X, v) Z = Mul(X, w) K = ArgMax <axis = 1, keepdims = 0> (X) }",
        v=np.ones((3, 2), np.float32),
        w=np.ones(3, np.float32),
        other=np.ones(3),
    )
    with pytest.raises(error) as raised:
        add_loss_output(model, **{"output_index": "Y"} | arguments)
    assert str(raised.value) == sentence


def test_losses_are_added_to_models_in_memory_whose_operators_broadcast() -> None:
    with pytest.raises(TypeError, match=r"^onx must be an onnx.ModelProto, got bytes; "):
        add_loss_output(b"")
    with pytest.raises(InvalidArgumentError, match=r"^the model has opset 6; losses require opset 7 or newer$"):
        add_loss_output(modelled("(float[n, 3] X) => (float[n, 3] Y) { Y = Exp(X) }", 6))


@KINDS
def test_reciprocals_become_quotients_of_their_type(kind: int) -> None:
    name = {TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double"}[kind]
    model = modelled(
        f"({name}[n, 2] X) => ({name}[n, 2] Y) {{ h = Reciprocal(X) one = Reciprocal(h) Y = Reciprocal(one) }}"
    )
    rewritten = orttraining_helper._rewrite_op_no_grad(model)
    assert [node.op_type for node in rewritten.graph.node] == ["Div"] * 3
    assert [node.op_type for node in model.graph.node] == ["Reciprocal"] * 3
    x = drawn(3, 2, dtype=DTYPES[kind])
    np.testing.assert_allclose(everywhere(rewritten, {"X": x})["Y"], 1 / x, **TOLERANCE[DTYPES[kind]])
    loss = everywhere(add_loss_output(model), {"X": x, "label": np.zeros_like(x)})["loss"]
    np.testing.assert_allclose(loss, [[(1 / x.astype(np.float64) ** 2).sum()]], **TOLERANCE[DTYPES[kind]])


def test_reciprocals_of_unknown_types_stay() -> None:
    model = modelled("(float[n, 2] X) => (float[n, 2] Y) { h = other.Op(X) Y = Reciprocal(h) }")
    model.opset_import.append(helper.make_opsetid("other", 1))
    model.graph.output[0].type.tensor_type.ClearField("elem_type")
    assert orttraining_helper._rewrite_op_no_grad(model) == model


def test_values_of_subgraphs_are_not_removed() -> None:
    """A model keeps nodes and names that a subgraph uses, and unused inputs and initializers."""
    model = modelled(
        "(float[n, 2] X, bool c, float[1] unused) => (float[n, 2] Y) { t = Exp(X)"
        "  Y = If(c) <then_branch = th () => (float[n, 2] p) { loss_diff = Mul(t, w) p = Neg(loss_diff) },"
        "             else_branch = el () => (float[n, 2] q) { q = Neg(X) }> }",
        w=np.float32([5]),
        unused=np.float32([1]),
    )
    loss = add_loss_output(model)
    assert [node.op_type for node in loss.graph.node][:2] == ["Exp", "If"]
    assert list(loss.graph.node[2].output) == ["loss_diff_2"]
    assert names(loss.graph.initializer)[:2] == ["w", "unused"]
    x = drawn(3, 2, dtype=np.float32)
    for condition, predicted in ((True, -5 * np.exp(x)), (False, -x)):
        found = everywhere(loss, {"X": x, "c": np.array(condition), "label": np.ones_like(x)})
        np.testing.assert_allclose(found["loss"], [[((predicted - 1) ** 2).sum()]], rtol=1e-5)


def test_trained_initializers_are_those_of_floats() -> None:
    values = {
        "b": np.float32([1, 2]),
        "a": np.arange(3),
        "c": np.ones((2, 1)),
        "d": np.zeros(2, np.float16),
        "e": np.array([True]),
    }
    model = modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }", **values)
    found = get_train_initializer(model)
    assert list(found) == ["b", "c", "d"]
    for name, (value, tensor) in found.items():
        assert value.dtype == values[name].dtype
        assert (value == values[name]).all()
        assert tensor.name == name
        value[...] = 5
    assert get_train_initializer(model)["b"][0].tolist() == [1, 2]


def penalty_of(weight: np.ndarray, **coefficients: Any) -> tuple[float, list[str], set[str]]:
    """Compute a separate penalty: returns its value, its operators and the used names."""
    taken = {"w", "penalty", "shape_w"}
    initializers, nodes = penalty_loss_onnx("w", weight.dtype, existing_names=taken, **coefficients)
    graph = helper.make_graph(
        nodes,
        "penalty",
        [helper.make_tensor_value_info("w", helper.np_dtype_to_tensor_dtype(weight.dtype), weight.shape)],
        [helper.make_tensor_value_info("penalty_w", helper.np_dtype_to_tensor_dtype(weight.dtype), [1])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    return everywhere(model, {"w": weight})["penalty_w"].item(), [node.op_type for node in nodes], taken


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b28_penalty_has_nodes_of_nonzero_coefficients_only(dtype: Any) -> None:
    weight = np.array([[1, -2], [0.5, 0]], dtype)
    value, operators, taken = penalty_of(weight, l1=0.1, l2=0.3)
    np.testing.assert_allclose(value, 0.1 * 3.5 + 0.3 * 5.25, rtol=1e-6)
    assert operators[-1] == "Add"
    assert {"shape_w_2", "reshaped_w", "l1_weight_w", "l2_weight_w", "absolute_w", "penalty_w"} <= taken
    for l2 in (None, 0, 0.0):
        value, operators, taken = penalty_of(weight, l1=0.1, l2=l2)
        np.testing.assert_allclose(value, 0.1 * 3.5, rtol=1e-6)
        assert operators == ["Reshape", "Abs", "ReduceSum", "Mul"]
        assert "l2_weight_w" not in taken
    value, operators, taken = penalty_of(weight, l2=0.3)
    np.testing.assert_allclose(value, 0.3 * 5.25, rtol=1e-6)
    assert operators == ["Reshape", "Mul", "ReduceSum", "Mul"]
    initializers, nodes = penalty_loss_onnx("w", dtype, l1=0.1, l2=0.3)
    constants = {entry.name: numpy_helper.to_array(entry) for entry in initializers}
    assert (constants["l1_weight_w"], constants["l2_weight_w"]) == (dtype(0.1), dtype(0.3))
    assert nodes[-1].output[0] == "penalty_w"
    for coefficients in ({}, {"l1": 0, "l2": None}):
        with pytest.raises(InvalidArgumentError, match=r"^the penalty of 'w' requires l1 or l2, other than 0$"):
            penalty_loss_onnx("w", dtype, **coefficients)


def test_weights_are_renamed_in_alphabetical_order() -> None:
    """Weights are renamed in place in nodes, subgraphs, inputs and outputs; graph outputs keep their names."""
    model = modelled(
        "(float[n, 3] X, bool c, float[3] z) => (float[n, 3] Y, float[3] a)"
        "{ t = Mul(X, z) u = Add(t, a)"
        "  Y = If(c) <then_branch = th () => (float[n, 3] p) { p = Add(u, a) },"
        "             else_branch = el () => (float[n, 3] q) { q = Identity(u) }> }",
        z=np.float32([1, 2, 3]),
        a=np.float32([4, 5, 6]),
    )
    feeds = {"X": drawn(2, 3, dtype=np.float32), "c": np.array(True)}
    before = ReferenceEvaluator(model).run(None, feeds)
    assert onnx_rename_weights(model) is model
    assert names(model.graph.initializer) == ["I0_z", "I1_a"]
    assert names(model.graph.input) == ["X", "c", "I0_z"]
    assert names(model.graph.output) == ["Y", "a"]
    onnx.checker.check_model(model, full_check=True)
    for value, other in zip(before, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize(("count", "last"), [(1, "I0_w0"), (9, "I8_w8"), (10, "I09_w9"), (101, "I100_w100")])
def test_new_names_of_weights_sort_as_they_stand(count: int, last: str) -> None:
    model = modelled(
        "(float[n] X) => (float[n] Y) { Y = Exp(X) }", **{f"w{at}": np.float32([at]) for at in range(count)}
    )
    found = names(onnx_rename_weights(model).graph.initializer)
    assert found == sorted(found)
    assert (len(found), found[-1]) == (count, last)


def test_renamed_weights_avoid_existing_names() -> None:
    model = modelled("(float[n] X) => (float[n] Y) { I0_w = Exp(X) Y = Mul(I0_w, w) }", w=np.float32([2]))
    assert names(onnx_rename_weights(model).graph.initializer) == ["I0_w_2"]
    onnx.checker.check_model(model, full_check=True)
    bare = modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }")
    before = bare.SerializeToString()
    assert onnx_rename_weights(bare).SerializeToString() == before


def test_values_of_initializers_are_replaced_in_a_new_model() -> None:
    model = regression()
    before = model.SerializeToString()
    coef, intercept = drawn(4, 1, dtype=np.float32, seed=7), np.float32([3])
    value = numpy_to_ort_value(intercept)
    for given in (intercept, value, ortrain.OrtValue(value), numpy_helper.from_array(intercept, "other")):
        trained = replace_initializers_into_onnx(model, {"intercept": given, "coef": coef})
        assert model.SerializeToString() == before
        assert names(trained.graph.initializer) == ["coef", "intercept"]
        x = drawn(2, 4, dtype=np.float32)
        np.testing.assert_allclose(everywhere(trained, {"X": x})["predicted"], x @ coef + 3, rtol=1e-5)
    assert replace_initializers_into_onnx(model, {}) == model


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        (
            {"coeff": np.float32([1])},
            InvalidArgumentError,
            "the model has no initializer 'coeff'; it has coef, intercept; did you mean 'coef'?",
        ),
        (
            {"intercept": np.zeros(1)},
            InvalidArgumentError,
            "initializer 'intercept' is float[1], but its new value is double[1]",
        ),
        (
            {"intercept": np.zeros((1, 1), np.float32)},
            InvalidArgumentError,
            "initializer 'intercept' is float[1], but its new value is float[1, 1]",
        ),
        (
            {"intercept": [1.0]},
            TypeError,
            "the value of initializer 'intercept' must be an array, an OrtValue or an onnx.TensorProto, got list",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        replace_initializers_into_onnx(regression(), values)
    assert str(raised.value) == sentence
    assert not isinstance(raised.value, InvalidArgumentError) or isinstance(raised.value, RuntimeError)


def test_initializers_are_added_and_removed() -> None:
    model = modelled("(float[n] X, float[1] w) => (float[n] Y) { Y = Mul(X, w) }")
    added = add_initializer(model, "w", np.float32([2]))
    assert (names(model.graph.initializer), names(added.graph.initializer)) == ([], ["w"])
    x = np.float32([1, 2])
    assert ReferenceEvaluator(added).run(None, {"X": x})[0].tolist() == [2, 4]
    assert remove_initializer(added, "w") == model
    for name in ("w", "Y"):
        with pytest.raises(
            InvalidArgumentError, match=f"^the model already has a value '{name}'; choose another name for the init"
        ):
            add_initializer(added, name, np.float32([2]))
    with pytest.raises(InvalidArgumentError, match=r"^the model has no initializer 'w'; it has none$"):
        remove_initializer(model, "w")
    with pytest.raises(InvalidArgumentError, match=r"^initializer 'coef' is not an input of the model, so no run"):
        remove_initializer(regression(), "coef")


def test_versions_of_operators() -> None:
    model = regression()
    assert get_onnx_opset(model) == get_onnx_opset(model, "ai.onnx") == 15
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    assert get_onnx_opset(model, "ai.onnx.ml") == 3
    sentence = "the model imports no operators of domain 'H'; it imports 'ai.onnx', 'ai.onnx.ml'"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        get_onnx_opset(model, "H")


def test_types_by_their_names_and_numbers() -> None:
    assert proto_type_to_dtype(1) is proto_type_to_dtype("tensor(float)") is np.float32
    assert proto_type_to_dtype(11) is proto_type_to_dtype("tensor(double)") is np.float64
    for other in (9, 0, "tensor(int64)", "float", None):
        with pytest.raises(ValueError, match=f"got {re.escape(repr(other))}$"):
            proto_type_to_dtype(other)
    kinds = {
        np.float32: FloatTensorType,
        np.float64: DoubleTensorType,
        np.int64: Int64TensorType,
        np.int32: Int32TensorType,
    }
    for dtype, kind in kinds.items():
        assert dtype_to_var_type(dtype) is kind
    with pytest.raises(ValueError, match=r"^dtype must be one of float32, float64, int64, int32, got int8$"):
        dtype_to_var_type(np.int8)


def quotient(opset: int = 15) -> onnx.ModelProto:
    return modelled("(float[n] A) => (float[n] B) { B = Div(one, A) }", opset, one=np.float32([1]))


def test_operators_are_replaced_by_graphs() -> None:
    """Each operator becomes a copy of the graph: constants and results get new names, outer values keep theirs."""
    model = modelled("(float[n] X) => (float[n] Y) { one = Reciprocal(X) two = Exp(one) Y = Reciprocal(two) }")
    model.graph.name = "jjj"
    model.graph.node[2].name = "last"
    made = onnx_rewrite_operator(model, "Reciprocal", quotient())
    assert made.graph.name == "jjj"
    assert [node.op_type for node in made.graph.node] == ["Div", "Exp", "Div"]
    assert [node.op_type for node in model.graph.node] == ["Reciprocal", "Exp", "Reciprocal"]
    assert names(made.graph.initializer) == ["one_2", "one_3"]
    x = np.float32([5, 6])
    np.testing.assert_allclose(everywhere(made, {"X": x})["Y"], 1 / np.exp(1 / x), rtol=1e-6)


def test_recursive_replacement_includes_subgraphs() -> None:
    model = modelled(
        "(float[n] X, bool c) => (float[n] Y) { t = Reciprocal(X)"
        "  Y = If(c) <then_branch = th () => (float[n] p) { p = Reciprocal(t) },"
        "             else_branch = el () => (float[n] q) { q = Neg(t) }> }"
    )
    everything = onnx_rewrite_operator(model, "Reciprocal", quotient())
    assert "Reciprocal" not in str(everything)
    x = np.float32([4, 5])
    assert everywhere(everything, {"X": x, "c": np.array(True)})["Y"].tolist() == [4, 5]
    outside = onnx_rewrite_operator(model, "Reciprocal", quotient(), recursive=False)
    assert [node.op_type for node in outside.graph.node] == ["Div", "If"]
    assert "Reciprocal" in str(outside)


def test_replacements_may_have_subgraphs_and_pass_values_on() -> None:
    model = modelled("(float[n] X) => (float[n] Y) { t = Exp(X) Y = Softsign(t) }")
    sub = modelled(
        "(float[n] A) => (float[n] B) { t = Neg(A) s = ReduceSum <keepdims = 0> (t) c = Less(s, zero)"
        "  B = If(c) <then_branch = th () => (float[n] p) { p = Mul(t, two) },"
        "             else_branch = el () => (float[n] q) { q = Mul(A, two) }> }",
        two=np.float32([2]),
        zero=np.float32(0),
    )
    made = onnx_rewrite_operator(model, "Softsign", sub)
    x = np.float32([0, 1])
    np.testing.assert_allclose(everywhere(made, {"X": x})["Y"], -2 * np.exp(x), rtol=1e-6)
    same = helper.make_model(
        helper.make_graph([], "same", sub.graph.input, sub.graph.input), opset_imports=sub.opset_import, ir_version=8
    )
    passed = onnx_rewrite_operator(model, "Softsign", same)
    assert [node.op_type for node in passed.graph.node] == ["Exp", "Identity"]
    np.testing.assert_allclose(everywhere(passed, {"X": x})["Y"], np.exp(x), rtol=1e-6)


def test_replacements_bring_their_domains_and_their_names() -> None:
    model = modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }")
    model.graph.node[0].name = "outer"
    sub = modelled("(float[n] A) => (float[n] B) { B = other.Op(A) }")
    sub.graph.node[0].name = "inner"
    sub.opset_import.append(helper.make_opsetid("other", 3))
    made = onnx_rewrite_operator(model, "Exp", sub)
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 15), ("other", 3)]
    assert [(node.domain, node.op_type, node.name) for node in made.graph.node] == [("other", "Op", "outer/inner")]
    again = onnx_rewrite_operator(made, "Op", sub)
    assert (again.opset_import, again.graph.node[0].name) == (made.opset_import, "outer/inner/inner")
    sub.opset_import[1].version = 4
    with pytest.raises(
        InvalidArgumentError, match=r"^operator Op of sub_onx has version 4 of other, which differs from"
    ):
        onnx_rewrite_operator(made, "Op", sub)


def test_replacements_that_do_not_fit_are_refused() -> None:
    model = modelled("(float[n] X) => (float[n] Y) { Y = Add(X, X) }")
    with pytest.raises(InvalidArgumentError) as error:
        onnx_rewrite_operator(model, "Add", quotient())
    assert str(error.value) == "node Add 'Y' has 2 inputs, but sub_onx has 1 (A)"
    summed = modelled("(float[n] A) => (float B) { B = ReduceSum <keepdims = 0> (A) }", 15)
    older = modelled("(float[n] X) => (float Y) { Y = ReduceMax <keepdims = 0> (X) }", 12)
    with pytest.raises(InvalidArgumentError) as error:
        onnx_rewrite_operator(older, "ReduceMax", summed)
    assert str(error.value) == (
        "operator ReduceSum of sub_onx has version 15 of ai.onnx, which differs from version 12 of the model; "
        "write sub_onx for that version"
    )
    # An operator with the same meaning in both opset versions is accepted.
    made = onnx_rewrite_operator(modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }", 14), "Exp", quotient(15))
    assert [node.op_type for node in made.graph.node] == ["Div"]


def test_new_names_count_on() -> None:
    taken: set[str] = set()
    found = [onnx_rewriter._unique_name(taken, name) for name in ["u", "u", "u", "u", "v", "v"]]
    assert found == ["u", "u_2", "u_3", "u_4", "v", "v_2"]
    assert taken == set(found)


def test_scores_of_losses_with_squares_and_a_fixed_width() -> None:
    model = modelled(
        "(float[n, 3] X, float[n, 3] U) => (float loss, float[n, 3] other)"
        "{ d = Sub(X, w) loss = ReduceSumSquare <keepdims = 0> (d) other = Exp(U) score = Neg(d) }",
        w=np.float32([1, 2, 3]),
        unused=np.float32([1]),
    )
    scores = unreduced_onnx_loss(model)
    assert [node.op_type for node in scores.graph.node] == ["Sub", "Mul"]
    assert (names(scores.graph.input), names(scores.graph.initializer)) == (["X"], ["w"])
    assert names(scores.graph.output) == ["score"]
    assert [dim.dim_value for dim in scores.graph.output[0].type.tensor_type.shape.dim] == [0, 3]
    x = drawn(2, 3, dtype=np.float32)
    np.testing.assert_allclose(everywhere(scores, {"X": x})["score"], (x - [1, 2, 3]) ** 2, rtol=1e-5)
    assert names(unreduced_onnx_loss(model, "d").graph.output) == ["d_2"]
    assert names(unreduced_onnx_loss(add_loss_output(regression())).graph.input) == ["X", "label"]


def test_losses_without_one_sum_have_no_scores() -> None:
    none = modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }")
    two = modelled("(float[n] X) => (float Y) { t = ReduceSum(X) Y = ReduceMax <keepdims = 0> (t) }")
    mean = modelled("(float[n] X) => (float Y) { Y = ReduceMean <keepdims = 0> (X) }")
    start = "the loss must have exactly one reduction, a ReduceSum or a ReduceSumSquare, got: "
    for model, sentence in [
        (none, start + "none"),
        (two, start + "ReduceSum 't', ReduceMax 'Y'"),
        (
            mean,
            "node 'Y' is a ReduceMean, which cannot be removed; only ReduceSum and ReduceSumSquare are supported",
        ),
    ]:
        with pytest.raises(OrtrainError) as error:
            unreduced_onnx_loss(model)
        assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("name", "back"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("gpu", "cuda"),
        ("gpu:0", "cuda"),
        ("cuda:0", "cuda"),
        ("gpu:1", "cuda:1"),
        ("cuda:1", "cuda:1"),
        ("cuda:12", "cuda:12"),
    ],
)
def test_devices_have_names(name: str, back: str) -> None:
    device = get_ort_device(name)
    assert isinstance(device, capi.OrtDevice)
    assert get_ort_device(device) is device
    assert ort_device_to_string(device) == back
    assert get_ort_device_type(device) == (0 if back == "cpu" else 1)
    provider = "CPUExecutionProvider" if back == "cpu" else "CUDAExecutionProvider"
    assert device_to_providers(name) == device_to_providers(device) == [provider]
    assert provider_to_device(provider) == back.partition(":")[0]


@pytest.mark.parametrize(
    "name", ["", "CPU", "NONE", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "gpux", "cuda:1:2"]
)
def test_other_names_are_no_devices(name: str) -> None:
    sentence = (
        f"^unknown device {re.escape(repr(name))}; expected 'cpu', 'cuda', or 'cuda' with an index, such as 'cuda:1'$"
    )
    for function in (get_ort_device, device_to_providers):
        with pytest.raises(ValueError, match=sentence):
            function(name)
    with pytest.raises(ValueError, match=r"^unknown kind of device"):
        get_ort_device_type(name)
    with pytest.raises(ValueError, match=r"^unknown provider"):
        provider_to_device(name)


def test_invalid_devices() -> None:
    for function in (get_ort_device, get_ort_device_type, device_to_providers, ort_device_to_string):
        for thing in (0, ["cpu"], None):
            with pytest.raises(TypeError, match=r"^a device must be "):
                function(thing)
    with pytest.raises(TypeError):
        ort_device_to_string("cpu")
    with pytest.raises(UnsupportedError, match=r"^a device of type 7 has no name; the types with a name are 0 and 1$"):
        ort_device_to_string(capi.OrtDevice(7, 0, 0))


def test_arrays_become_values_that_share_their_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = numpy_to_ort_value(array)
    assert isinstance(value, capi.OrtValue)
    array[1, 2] = 70
    assert value.numpy()[1, 2] == 70
    assert numpy_to_ort_value(array, get_ort_device("cpu")).shape() == [2, 3]
    with pytest.raises(TypeError, match=r"^a value must be an array, got list$"):
        numpy_to_ort_value([1.0])
    with pytest.raises(UnsupportedError, match="ortrain keeps values in memory of the CPU"):
        numpy_to_ort_value(array, get_ort_device("cuda"))


class Session:
    """Stub of onnxruntime's session: the methods that describe its device."""

    def __init__(self, providers: list[str], options: dict[str, dict[str, str]]) -> None:
        self.get_providers = lambda: providers
        self.get_provider_options = lambda: options


def test_sessions_know_their_devices() -> None:
    model = regression()
    ours = ortrain.InferenceSession(model)
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for session in (ours, ours._native, theirs, theirs._sess):
        assert ort_device_to_string(get_ort_device_from_session(session)) == "cpu"
    cuda = "CUDAExecutionProvider"
    for options, name in [({}, "cuda"), ({cuda: {"device_id": "2"}}, "cuda:2")]:
        assert (
            ort_device_to_string(get_ort_device_from_session(Session([cuda, "CPUExecutionProvider"], options))) == name
        )
    for session in (Session([cuda], {cuda: {}}), Session([cuda], {"other": {}}), Session(["X"], {}), Session([], {})):
        with pytest.raises(
            NotImplementedError,
            match=r"^(the provider options .* have no device_id|the device of the session is unknown)",
        ):
            get_ort_device_from_session(session)
    with pytest.raises(TypeError, match=r"^a session must have get_providers, got int$"):
        get_ort_device_from_session(1)


def test_helpers_import_neither_onnxruntime_nor_skl2onnx() -> None:
    script = (
        "import sys\n"
        "import ortrain.gradient\n"
        "assert 'onnx' not in sys.modules\n"
        "import ortrain.gradient.utils.onnxruntime_helper\n"
        "assert 'onnx' not in sys.modules\n"
        "import ortrain.gradient.grad_helper, ortrain.gradient.utils.onnx_function\n"
        "import ortrain.gradient.utils.onnx_rewriter, ortrain.gradient.utils.orttraining_helper\n"
        "assert not {'onnxruntime', 'skl2onnx', 'sklearn', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
