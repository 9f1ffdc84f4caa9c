"""Small functions as models: compared with formulas, finite differences, and three runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from on_runtimes import READ_BY_ONNXRUNTIME, TOLERANCE, drawn, everywhere, names, ours, session
from onnx import TensorProto, helper, numpy_helper

from ortrain import InvalidArgumentError
from ortrain.gradient.utils.onnx_function import function_onnx_graph, get_supported_functions
from ortrain.gradient.utils.onnx_rewriter import unreduced_onnx_loss

# A central difference with this step has an error of about 1e-9 in float64, relative to the summed terms.
STEP, DIFFERENCE = 1e-6, 1e-7
OLDEST, NEWEST = 9, onnx.defs.onnx_opset_version()
OPSETS = (OLDEST, 10, 11, 12, 13, 15, 18, READ_BY_ONNXRUNTIME, NEWEST)
EPS = 1e-5

Pair = tuple[np.ndarray, np.ndarray]


def sigmoid_loss(y: np.ndarray, x: np.ndarray, s: np.ndarray) -> Pair:
    p = np.clip(1 / (1 + np.exp(-x)), EPS, 1 - EPS)
    return -(s * ((1 - y) * np.log(1 - p) + y * np.log(p))), s * (p - y)


# Options and formula of each loss. The formula returns the summed terms and the gradient for expected values, predicted
# values and row weights.
LOSSES: dict[str, tuple[dict[str, float], Callable[[Any, Any, Any], Pair]]] = {
    "square": ({"multiply": 2}, lambda y, x, s: (s * (y - x) ** 2, -2 * s * (y - x))),
    "half": ({"multiply": 1}, lambda y, x, s: (0.5 * s * (y - x) ** 2, -s * (y - x))),
    "absolute": ({}, lambda y, x, s: (s * abs(y - x), -s * np.sign(y - x))),
    "elastic": (
        {"l1_weight": 0.1, "l2_weight": 0.9},
        lambda y, x, s: (s * (0.1 * abs(y - x) + 0.9 * (y - x) ** 2), -s * (0.1 * np.sign(y - x) + 1.8 * (y - x))),
    ),
    "elastic by default": (
        {},
        lambda y, x, s: (s * 0.01 * (abs(y - x) + (y - x) ** 2), -0.01 * s * (np.sign(y - x) + 2 * (y - x))),
    ),
    "sigmoid": ({}, sigmoid_loss),
}
FUNCTIONS = {
    "square": "grad_loss_square_error",
    "half": "grad_loss_square_error",
    "absolute": "grad_loss_absolute_error",
    "elastic": "grad_loss_elastic_error",
    "elastic by default": "grad_loss_elastic_error",
    "sigmoid": "grad_sigmoid_neg_log_loss_error",
}
# Several columns, one column, one row, one element, no row.
SHAPES = [(6, 3), (7, 1), (1, 4), (1, 1), (0, 2)]
# Tensor shapes for functions that accept any rank.
ANY_SHAPE = [(), (3,), (2, 3), (2, 1, 4), (0,)]


def observations(kind: str, shape: tuple[int, int], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return expected and predicted values. The first elements are equal, so that the sign of zero occurs."""
    expected, predicted = drawn(*shape, dtype=dtype, seed=1), drawn(*shape, dtype=dtype, seed=2)
    if kind == "sigmoid":
        return (expected > 0).astype(np.int64), predicted
    if expected.size > 1:
        expected.flat[0] = predicted.flat[0]
    return expected, predicted


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_gradients_are_their_formulas(kind: str, shape: tuple[int, int], dtype: Any) -> None:
    """The formulas hold with row weights, with an omitted weight input, and without weights."""
    options, formula = LOSSES[kind]
    expected, predicted = observations(kind, shape, dtype)
    weights = abs(drawn(shape[0], dtype=dtype, seed=3))
    ones = np.ones_like(weights)
    feeds = {"X1": expected, "X2": predicted}
    plain = function_onnx_graph(FUNCTIONS[kind], dtype=dtype, **options)
    weighted = function_onnx_graph(FUNCTIONS[kind], dtype=dtype, weight_name="weight", **options)
    for model, given, column in [
        (plain, feeds, ones),
        (weighted, feeds, ones),
        (weighted, feeds | {"weight": weights}, weights),
    ]:
        terms, gradient = formula(expected, predicted.astype(np.float64), column[:, None].astype(np.float64))
        found = everywhere(model, given)
        assert list(found) == ["Y", "Y_grad"]
        assert found["Y"].shape == (1,)
        assert found["Y"].dtype == found["Y_grad"].dtype == dtype
        assert found["Y_grad"].shape == shape
        np.testing.assert_allclose(found["Y"], [terms.sum()], **TOLERANCE[dtype])
        np.testing.assert_allclose(found["Y_grad"], gradient, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_square_error_and_its_gradient_as_separate_models(weighted: bool, dtype: Any) -> None:
    expected, predicted = drawn(5, 2, dtype=dtype, seed=1), drawn(5, 2, dtype=dtype, seed=2)
    feeds, weight = {"X1": expected, "X2": predicted}, np.ones((5, 1))
    if weighted:
        feeds["weight"] = abs(drawn(5, dtype=dtype, seed=3))
        weight = feeds["weight"][:, None]
    name = "weight" if weighted else None
    difference = expected.astype(np.float64) - predicted
    (total,) = everywhere(function_onnx_graph("square_error", dtype=dtype, weight_name=name), feeds).values()
    np.testing.assert_allclose(total, [(weight * difference**2).sum()], **TOLERANCE[dtype])
    (gradient,) = everywhere(function_onnx_graph("grad_square_error", dtype=dtype, weight_name=name), feeds).values()
    np.testing.assert_allclose(gradient, -2 * weight * difference, **TOLERANCE[dtype])


def slopes(model: onnx.ModelProto, feeds: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return central differences of ``Y`` with respect to each element of an input."""
    runner = session(model)
    found = np.empty_like(feeds[name])
    for place in np.ndindex(found.shape):
        ends = []
        for step in (STEP, -STEP):
            moved = feeds[name].copy()
            moved[place] += step
            ends.append(runner.run(["Y"], feeds | {name: moved})[0][0])
        found[place] = (ends[0] - ends[1]) / (2 * STEP)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_of_losses_are_differences(kind: str, weighted: bool) -> None:
    """Gradients of absolute values have the sign of the derivative, unlike in the reference."""
    options, _ = LOSSES[kind]
    model = function_onnx_graph(
        FUNCTIONS[kind], dtype=np.float64, weight_name="weight" if weighted else None, **options
    )
    expected, predicted = drawn(4, 2, seed=1), drawn(4, 2, seed=2)
    if kind == "sigmoid":
        expected = (expected > 0).astype(np.int64)
    feeds = {"X1": expected, "X2": predicted} | ({"weight": abs(drawn(4, seed=3))} if weighted else {})
    np.testing.assert_allclose(ours(model, feeds)["Y_grad"], slopes(model, feeds, "X2"), rtol=0, atol=DIFFERENCE)


def test_the_gradient_of_a_penalty_is_a_difference() -> None:
    model = function_onnx_graph("grad_penalty_elastic_error", dtype=np.float64, l1_weight=0.3, l2_weight=0.7)
    feeds = {"X": drawn(3, 4)}
    np.testing.assert_allclose(ours(model, feeds)["Y_grad"], slopes(model, feeds, "X"), rtol=0, atol=DIFFERENCE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", ANY_SHAPE)
def test_steps_are_their_formulas_for_any_shape(shape: tuple[int, ...], dtype: Any) -> None:
    x1, x2, g, alpha, beta = (drawn(*(shape if at < 3 else (1,)), dtype=dtype, seed=at) for at in range(5))
    z = beta[0] * g + alpha[0] * x1
    found = everywhere(function_onnx_graph("axpy", dtype=dtype), {"X1": x1, "X2": x2, "alpha": alpha})
    formulas = [({"Y": alpha[0] * x1 + x2}, found)]
    feeds = {"X1": x1, "X2": x2, "G": g, "alpha": alpha, "beta": beta}
    formulas.append(({"Y": z + x2, "Z": z}, everywhere(function_onnx_graph("axpyw", dtype=dtype), feeds)))
    ahead = beta[0] * z + alpha[0] * x1 + x2
    formulas.append(({"Y": ahead, "Z": z}, everywhere(function_onnx_graph("axpyw2", dtype=dtype), feeds)))
    formulas.append(({"Y": x1}, everywhere(function_onnx_graph("copy", dtype=dtype), {"X": x1})))
    formulas.append(({"Y": 0 * x1}, everywhere(function_onnx_graph("zero", dtype=dtype), {"X": x1})))
    shrunk = 0.6 * x1 - 0.1 * np.sign(x1)
    update = function_onnx_graph("update_penalty_elastic_error", dtype=dtype, l1=0.1, l2=0.2)
    formulas.append(({"Y": shrunk}, everywhere(update, {"X": x1})))
    for wanted, got in formulas:
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            assert got[name].shape == shape
            np.testing.assert_allclose(got[name], value, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_linear_regression_is_its_formula(dtype: Any) -> None:
    model = function_onnx_graph("linear_regression", dtype=dtype)
    x, a = drawn(5, 3, dtype=dtype), drawn(3, 2, dtype=dtype)
    for b in (drawn(1, 2, dtype=dtype), drawn(5, 1, dtype=dtype), drawn(1, 1, dtype=dtype)):
        np.testing.assert_allclose(everywhere(model, {"X": x, "A": a, "B": b})["Y"], x @ a + b, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss_shape", [(1, 1), (1,), (), None])
def test_penalties_are_their_formula(loss_shape: tuple[int, ...] | None, dtype: Any) -> None:
    weights = [drawn(*shape, dtype=dtype, seed=at) for at, shape in enumerate([(3, 2), (4,), (2, 1, 2)])]
    loss = drawn(*(loss_shape if loss_shape is not None else (1, 1, 1)), dtype=dtype)
    model = function_onnx_graph(
        "n_penalty_elastic_error", dtype=dtype, n_tensors=3, loss_shape=loss_shape, l1_weight=0.1, l2_weight=0.9
    )
    assert names(model.graph.input) == ["loss", "W0", "W1", "W2"]
    feeds = {"loss": loss} | {f"W{at}": weight for at, weight in enumerate(weights)}
    total = loss.item() + sum(0.1 * abs(weight).sum() + 0.9 * (weight**2).sum() for weight in weights)
    (found,) = everywhere(model, feeds).values()
    assert found.shape == (1,)
    np.testing.assert_allclose(found, [total], **TOLERANCE[dtype])
    x = drawn(3, 4, dtype=dtype)
    one = everywhere(
        function_onnx_graph("grad_penalty_elastic_error", dtype=dtype, l1_weight=0.1, l2_weight=0.9), {"X": x}
    )
    np.testing.assert_allclose(one["Y"], [0.1 * abs(x).sum() + 0.9 * (x**2).sum()], **TOLERANCE[dtype])
    np.testing.assert_allclose(one["Y_grad"], 0.1 * np.sign(x) + 1.8 * x, **TOLERANCE[dtype])


def test_one_penalty_by_default() -> None:
    model = function_onnx_graph("n_penalty_elastic_error", weight_name="weight")
    assert names(model.graph.input) == ["loss", "W0"]
    feeds = {"loss": np.float32([[2]]), "W0": np.float32([1, -3])}
    np.testing.assert_allclose(everywhere(model, feeds)["Y"], [2 + 0.01 * 4 + 0.01 * 10], rtol=1e-6)


def test_b29_the_numbers_of_losses() -> None:
    expected, predicted = np.float32([[1], [2], [4]]), np.float32([[1.5], [1], [1]])
    feeds = {"X1": expected, "X2": predicted}
    square = function_onnx_graph("grad_loss_square_error", multiply=1, weight_name="weight")
    found = everywhere(square, feeds)
    assert found["Y"] == [5.125]
    assert found["Y_grad"].ravel().tolist() == [0.5, -1, -3]
    assert everywhere(unreduced_onnx_loss(square), feeds)["score"].ravel().tolist() == [0.25, 1, 9]
    weights = {"weight": np.float32([1, 2, 0.5])}
    found = everywhere(square, feeds | weights)
    assert found["Y"] == [3.375]
    assert found["Y_grad"].ravel().tolist() == [0.5, -2, -1.5]
    assert everywhere(unreduced_onnx_loss(square), feeds | weights)["score"].ravel().tolist() == [0.25, 2, 4.5]
    absolute = everywhere(function_onnx_graph("grad_loss_absolute_error"), feeds)
    assert absolute["Y"] == [4.5]
    assert absolute["Y_grad"].ravel().tolist() == [1, -1, -1]
    elastic = function_onnx_graph("grad_loss_elastic_error", l1_weight=0.5, l2_weight=0.5)
    assert everywhere(elastic, feeds)["Y"] == [7.375]


def test_b29_the_numbers_of_the_log_loss() -> None:
    feeds = {"X1": np.array([[0], [1], [1]]), "X2": np.float32([[-1], [2], [-30]])}
    found = everywhere(function_onnx_graph("grad_sigmoid_neg_log_loss_error"), feeds)
    np.testing.assert_allclose(found["Y"], [11.9531145], rtol=1e-7)
    np.testing.assert_allclose(found["Y_grad"].ravel(), [0.26894, -0.11920, -0.99999], atol=5e-6)


def test_b29_the_numbers_of_penalties() -> None:
    weight = np.float32([1, -2, 0])
    update = everywhere(function_onnx_graph("update_penalty_elastic_error", l1=0.1, l2=0.2), {"X": weight})
    np.testing.assert_allclose(update["Y"], [0.5, -1.1, 0], rtol=1e-6)
    penalty = function_onnx_graph("n_penalty_elastic_error", n_tensors=2, loss_shape=None, l1_weight=0.1, l2_weight=0.2)
    found = everywhere(penalty, {"loss": np.float32([10]), "W0": weight, "W1": np.float32([[3]])})
    np.testing.assert_allclose(found["Y"], [13.4], rtol=1e-6)


def test_b29_the_numbers_of_steps() -> None:
    """With value 0.1 and batches of 10, ``alpha`` is -0.01."""
    w, g, v = np.float32([1, 2]), np.float32([1, -1]), np.float32([0.5, 0.5])
    feeds = {"X1": g, "X2": w, "G": v, "alpha": np.float32([-0.01]), "beta": np.float32([0.9])}
    for name, expected in (("axpyw", [1.44, 2.46]), ("axpyw2", [1.386, 2.424])):
        found = everywhere(function_onnx_graph(name), feeds)
        np.testing.assert_allclose(found["Z"], [0.44, 0.46], rtol=1e-6)
        np.testing.assert_allclose(found["Y"], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b28_coefficients_are_constants_of_their_values(dtype: Any) -> None:
    """Zero coefficients are constants as well; clients look for them in ``float_data``."""
    penalty = function_onnx_graph("n_penalty_elastic_error", dtype=dtype, n_tensors=2, l1_weight=0, l2_weight=1e-4)
    update = function_onnx_graph("update_penalty_elastic_error", dtype=dtype, l1=0, l2=1e-4)
    both = function_onnx_graph("grad_penalty_elastic_error", dtype=dtype, l1_weight=0.3, l2_weight=0.1)
    for model, wanted in [(penalty, [0, 1e-4]), (update, [0, 1 - 2 * 1e-4]), (both, [0.1, 0.2, 0.3])]:
        floats = [entry for entry in model.graph.initializer if entry.data_type != TensorProto.INT64]
        values = [numpy_helper.to_array(entry) for entry in floats]
        assert all(value.dtype == dtype for value in values)
        assert sorted(value.item() for value in values) == [dtype(number) for number in wanted]
        data = [entry.float_data if dtype is np.float32 else entry.double_data for entry in floats]
        assert all(len(entry) == 1 for entry in data)


@pytest.mark.parametrize("opset", OPSETS)
def test_functions_are_written_at_any_opset(opset: int) -> None:
    """Functions are written for every opset from 9 to the newest of the onnx package, with the same numbers."""
    assert len(get_supported_functions()) == 15
    for name in get_supported_functions():
        loss = "X1" in names(function_onnx_graph(name).graph.input) and not name.startswith("axpy")
        for dtype in (np.float32, np.float64):
            options = {"weight_name": "weight"} if loss else {}
            model = function_onnx_graph(name, target_opset=opset, dtype=dtype, **options)
            assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
            assert model.ir_version >= max(4, helper.find_min_ir_version_for(model.opset_import))
            feeds = {}
            for at, entry in enumerate(model.graph.input):
                sizes = {"alpha": (1,), "beta": (1,), "weight": (3,), "loss": (1, 1)}.get(entry.name, (3, 3))
                feeds[entry.name] = drawn(*sizes, dtype=dtype, seed=at)
                if entry.type.tensor_type.elem_type == TensorProto.INT64:
                    feeds[entry.name] = (feeds[entry.name] > 0).astype(np.int64)
            found = everywhere(model, feeds)
            at_15 = ours(function_onnx_graph(name, dtype=dtype, **options), feeds)
            for key, value in at_15.items():
                np.testing.assert_allclose(found[key], value, **TOLERANCE[dtype])


def test_inputs_and_outputs_have_the_names_and_types_of_the_table() -> None:
    table = {
        "axpy": ("X1 X2 alpha", "Y"),
        "axpyw": ("X1 X2 G alpha beta", "Y Z"),
        "axpyw2": ("X1 X2 G alpha beta", "Y Z"),
        "copy": ("X", "Y"),
        "zero": ("X", "Y"),
        "linear_regression": ("X A B", "Y"),
        "square_error": ("X1 X2", "Y"),
        "grad_square_error": ("X1 X2", "Y_grad"),
        "grad_loss_square_error": ("X1 X2", "Y Y_grad"),
        "grad_loss_absolute_error": ("X1 X2", "Y Y_grad"),
        "grad_loss_elastic_error": ("X1 X2", "Y Y_grad"),
        "grad_penalty_elastic_error": ("X", "Y Y_grad"),
        "n_penalty_elastic_error": ("loss W0", "Y"),
        "update_penalty_elastic_error": ("X", "Y"),
        "grad_sigmoid_neg_log_loss_error": ("X1 X2", "Y Y_grad"),
    }
    assert set(table) == set(get_supported_functions())
    for name, (inputs, outputs) in table.items():
        model = function_onnx_graph(name, dtype=np.float64)
        assert (names(model.graph.input), names(model.graph.output)) == (inputs.split(), outputs.split())
        assert model.opset_import[0].version == 15
        assert model.graph.doc_string == get_supported_functions()[name]
        for entry in [*model.graph.input, *model.graph.output]:
            integers = name.startswith("grad_sigmoid") and entry.name == "X1"
            assert entry.type.tensor_type.elem_type == (TensorProto.INT64 if integers else TensorProto.DOUBLE)
    weighted = function_onnx_graph("grad_loss_square_error", weight_name="importance")
    assert sum(node.input[0] == "importance" for node in weighted.graph.node) == 1
    assert names(weighted.graph.input) == ["X1", "X2", "importance"]
    assert numpy_helper.to_array(weighted.graph.initializer[0]).tolist() == [1]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", LOSSES)
def test_scores_are_the_terms_of_the_loss(kind: str, columns: int, weighted: bool) -> None:
    options, formula = LOSSES[kind]
    expected, predicted = observations(kind, (5, columns), np.float64)
    weight = abs(drawn(5, seed=3))
    name = "weight" if weighted else None
    model = function_onnx_graph(FUNCTIONS[kind], dtype=np.float64, weight_name=name, **options)
    scores = unreduced_onnx_loss(model)
    assert names(scores.graph.input) == ["X1", "X2", *(["weight"] if weighted else [])]
    assert not any(node.op_type.startswith("Reduce") for node in scores.graph.node)
    declared = scores.graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in declared] == [0, 1]
    feeds = {"X1": expected, "X2": predicted} | ({"weight": weight} if weighted else {})
    terms, _ = formula(expected, predicted, weight[:, None] if weighted else np.ones((5, 1)))
    # The terms exclude the factor of the sum.
    wanted = terms * (2 if kind == "half" else 1)
    (found,) = everywhere(scores, feeds).values()
    assert found.shape == (5, columns)
    np.testing.assert_allclose(found, wanted, **TOLERANCE[np.float64])


def test_nan_input_gives_a_nan_loss() -> None:
    """Clipping hides no NaN: the loss of a diverging training is NaN."""
    model = function_onnx_graph("grad_sigmoid_neg_log_loss_error")
    found = everywhere(model, {"X1": np.array([[0], [1]]), "X2": np.float32([[np.nan], [0]])})
    assert np.isnan(found["Y"]).all()
    assert np.isnan(found["Y_grad"]).ravel().tolist() == [True, False]


def test_an_unknown_function_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError) as error:
        function_onnx_graph("square_eror")
    assert isinstance(error.value, ValueError)
    assert str(error.value) == (
        "unknown function 'square_eror'; expected one of "
        + ", ".join(sorted(get_supported_functions()))
        + "; did you mean 'square_error'?"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"target_opset": 8}, f"target_opset must be an integer from 9 to {NEWEST}, got 8"),
        ({"target_opset": NEWEST + 1}, f"target_opset must be an integer from 9 to {NEWEST}, got {NEWEST + 1}"),
        ({"target_opset": "15"}, f"target_opset must be an integer from 9 to {NEWEST}, got '15'"),
        ({"dtype": np.float16}, "dtype must be float32 or float64, got float16"),
        ({"dtype": np.int64}, "dtype must be float32 or float64, got int64"),
        ({"weight_name": ""}, "weight_name must be the name of an input, got ''"),
        ({"weight_name": "X2"}, "weight_name 'X2' is the name of another input or output of the function"),
        ({"weight_name": "Y"}, "weight_name 'Y' is the name of another input or output of the function"),
        ({"multiply": np.nan}, "multiply must be a finite number, got nan"),
        ({"multiply": "2"}, "multiply must be a number, got '2'"),
        (
            {"name": "axpy", "weight_name": "weight"},
            "function 'axpy' has no row weights; omit weight_name",
        ),
        (
            {"name": "n_penalty_elastic_error", "n_tensors": 0},
            "n_tensors must be the number of weights, at least 1, got 0",
        ),
        (
            {"name": "grad_sigmoid_neg_log_loss_error", "eps": 0.5},
            "eps must be at least 0 and less than 0.5, got 0.5: it is the smallest probability",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        function_onnx_graph(**{"name": "grad_loss_square_error"} | arguments)
    assert str(error.value) == sentence


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError) as error:
        function_onnx_graph("grad_loss_elastic_error", l1_wieght=1)
    assert str(error.value) == (
        "function 'grad_loss_elastic_error' has no keyword argument 'l1_wieght'; it takes l1_weight, l2_weight; "
        "did you mean 'l1_weight'?"
    )
    with pytest.raises(TypeError, match=r"has no keyword argument 'multiply'; it takes none$"):
        function_onnx_graph("copy", multiply=1)


def test_labels_of_the_log_loss_are_integers() -> None:
    model = function_onnx_graph("grad_sigmoid_neg_log_loss_error")
    with pytest.raises(InvalidArgumentError, match=r'input "X1"'):
        ours(model, {"X1": np.float32([[1]]), "X2": np.float32([[1]])})


def test_shapes_that_would_broadcast_are_refused() -> None:
    """A column and a row would broadcast to an unwanted matrix of differences."""
    model = function_onnx_graph("grad_loss_square_error")
    with pytest.raises(InvalidArgumentError):
        ours(model, {"X1": np.zeros((3, 1), np.float32), "X2": np.zeros((1, 3), np.float32)})
