"""Derivatives of models as models: options, names, values, and errors (rows B23 and B24)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from on_runtimes import TOLERANCE, drawn, everywhere, modelled, names
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import ortrain
from ortrain import InvalidArgumentError, OrtrainError, UnsupportedError, capi
from ortrain.gradient import OrtGradientForwardBackward
from ortrain.gradient.grad_helper import DerivativeOptions, onnx_derivative
from ortrain.gradient.utils.onnx_helper import replace_initializers_into_onnx
from ortrain.gradient.utils.orttraining_helper import add_loss_output

Zero, KeepYieldOp, KeepOutputs = DerivativeOptions.Zero, DerivativeOptions.KeepYieldOp, DerivativeOptions.KeepOutputs
FillGrad, Loss = DerivativeOptions.FillGrad, DerivativeOptions.Loss
# A central difference with this step has an error of about 1e-9 in float64, relative to the summed terms.
STEP, DIFFERENCE = 1e-6, 1e-7


def added(opset: int = 15) -> onnx.ModelProto:
    """Return the model ``Y = X + one``."""
    return modelled("(float[n, 10] X) => (float[n, 10] Y) { Y = Add(X, one) }", opset, one=np.float32([1]))


def network() -> onnx.ModelProto:
    """Return a model with two float outputs, one computed from the other, an integer output, and an unused input."""
    rng = np.random.default_rng(1)
    return modelled(
        "(double[n, 3] X, double[n] unneeded, double[2] scale) => (double[n, 2] Y, int64[n] best, double[n, 2] Z)"
        "{ h = MatMul(X, w) s = Add(h, b) Y = Tanh(s) best = ArgMax <axis = 1, keepdims = 0> (Y)"
        "  y = Identity(Y) t = Mul(y, scale) Z = Softmax(t) }",
        w=rng.standard_normal((3, 2)),
        b=rng.standard_normal(2),
        spare=np.zeros(3),
    )


def described(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    return names(model.graph.input), names(model.graph.output)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_options_have_the_values_of_the_reference() -> None:
    assert {option.name: option.value for option in DerivativeOptions} | {"Zero": Zero.value, "Loss": Loss.value} == {
        "Zero": 0,
        "KeepYieldOp": 1,
        "KeepOutputs": 2,
        "FillGrad": 4,
        "Loss": 5,
    }
    assert Loss == KeepYieldOp | FillGrad


def test_b23_no_option() -> None:
    """Outputs and nodes for them alone are removed; the gradient of the output is an input of its type and shape."""
    model = added()
    before = model.SerializeToString()
    made = onnx_derivative(model)
    assert model.SerializeToString() == before
    assert described(made) == (["X", "one", "Y_grad"], ["X_grad", "one_grad"])
    assert made.graph.input[2].type == model.graph.output[0].type
    assert "Add" not in operators(made)
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 15)]
    assert made.ir_version == model.ir_version
    x, seed = drawn(6, 10, dtype=np.float32), drawn(6, 10, dtype=np.float32, seed=1)
    found = everywhere(made, {"X": x, "one": np.float32([1]), "Y_grad": seed})
    np.testing.assert_array_equal(found["X_grad"], seed)
    np.testing.assert_allclose(found["one_grad"], [seed.sum()], **TOLERANCE[np.float32])


def test_b23_keep_yield_op() -> None:
    """A training graph outputs ``Y`` and takes ``Y_grad`` through a YieldOp."""
    made = onnx_derivative(added(), options=KeepYieldOp)
    assert described(made) == (["X", "one"], ["X_grad", "one_grad"])
    (handing,) = [node for node in made.graph.node if node.op_type == "YieldOp"]
    assert (list(handing.input), list(handing.output), handing.domain) == (["Y"], ["Y_grad"], "com.microsoft")
    cpu = capi.OrtDevice(0, 0, 0)
    session = ortrain.InferenceSession(made)
    agent = capi.TrainingAgent(session, ["X", "one"], [cpu], ["X_grad", "one_grad"], [cpu, cpu], 0)
    state, fetches, gradients = capi.PartialGraphExecutionState(), capi.OrtValueVector(), capi.OrtValueVector()
    x, seed = drawn(6, 10, dtype=np.float32), drawn(6, 10, dtype=np.float32, seed=1)
    agent.run_forward(vector(x, np.float32([2])), fetches, state, None)
    np.testing.assert_allclose(fetches[0].numpy(), x + 2, **TOLERANCE[np.float32])
    agent.run_backward(vector(seed), gradients, state)
    np.testing.assert_array_equal(gradients[0].numpy(), seed)
    np.testing.assert_allclose(gradients[1].numpy(), [seed.sum()], **TOLERANCE[np.float32])


def vector(*arrays: np.ndarray) -> capi.OrtValueVector:
    made = capi.OrtValueVector()
    for array in arrays:
        made.push_back(capi.OrtValue.ortvalue_from_numpy(array, capi.OrtDevice(0, 0, 0)))
    return made


def test_b23_keep_outputs() -> None:
    made = onnx_derivative(added(), options=KeepOutputs)
    assert described(made) == (["X", "one", "Y_grad"], ["X_grad", "one_grad", "Y"])
    x, seed = drawn(6, 10, dtype=np.float32), drawn(6, 10, dtype=np.float32, seed=1)
    found = everywhere(made, {"X": x, "one": np.float32([3]), "Y_grad": seed})
    np.testing.assert_allclose(found["Y"], x + 3, **TOLERANCE[np.float32])
    np.testing.assert_array_equal(found["X_grad"], seed)


@pytest.mark.parametrize("opset", [9, 13, 15, 21])
def test_b23_keep_outputs_and_fill_grad(opset: int) -> None:
    made = onnx_derivative(added(opset), options=KeepOutputs | FillGrad)
    assert described(made) == (["X", "one"], ["X_grad", "one_grad", "Y"])
    assert {"Shape", "ConstantOfShape"} <= set(operators(made))
    x = drawn(6, 10, dtype=np.float32)
    found = everywhere(made, {"X": x, "one": np.float32([3])})
    np.testing.assert_array_equal(found["X_grad"], np.ones((6, 10), np.float32))
    np.testing.assert_allclose(found["one_grad"], [60])
    np.testing.assert_allclose(found["Y"], x + 3, **TOLERANCE[np.float32])


def test_shapes_of_filled_gradients_make_way() -> None:
    model = modelled("(float[n, 10] X) => (float[n, 10] Y) { Y_shape = Exp(X) Y = Neg(Y_shape) }")
    x = drawn(6, 10, dtype=np.float32)
    found = everywhere(onnx_derivative(model, options=KeepOutputs | FillGrad), {"X": x})
    np.testing.assert_allclose(found["X_grad"], -np.exp(x), **TOLERANCE[np.float32])


def test_fill_grad_needs_constants_of_shapes() -> None:
    with pytest.raises(UnsupportedError) as error:
        onnx_derivative(added(8), options=KeepOutputs | FillGrad)
    assert str(error.value) == (
        "the model has opset 8, but DerivativeOptions.FillGrad requires opset 9 or newer; leave the option out and "
        "feed ones"
    )


def test_b23_weights_and_inputs_are_chosen() -> None:
    assert described(onnx_derivative(added(), weights=[])) == (["X", "Y_grad"], ["X_grad"])
    assert described(onnx_derivative(added(), inputs=[])) == (["X", "one", "Y_grad"], ["one_grad"])
    assert described(onnx_derivative(added(), weights=[], options=KeepYieldOp)) == (["X"], ["X_grad"])
    model = network()
    assert described(onnx_derivative(model)) == (
        ["X", "unneeded", "scale", "w", "b", "Y_grad", "Z_grad"],
        ["X_grad", "scale_grad", "w_grad", "b_grad"],
    )
    made = onnx_derivative(model, weights=["b", "w"], inputs="scale", options=KeepOutputs)
    assert described(made) == (
        ["X", "unneeded", "scale", "b", "w", "Y_grad", "Z_grad"],
        ["scale_grad", "b_grad", "w_grad", "Y", "best", "Z"],
    )
    assert described(onnx_derivative(model, weights={"w", "b"}, inputs=[]))[1] == ["b_grad", "w_grad"]
    fixed = onnx_derivative(model, weights=["b"])
    assert names(fixed.graph.initializer)[0] == "w"
    assert "spare" not in names(fixed.graph.initializer)


def seeds(rows: int) -> dict[str, np.ndarray]:
    return {"Y_grad": drawn(rows, 2, seed=5), "Z_grad": drawn(rows, 2, seed=6)}


def values(rows: int) -> dict[str, np.ndarray]:
    model = network()
    weights = {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer if entry.name != "spare"}
    return {"X": drawn(rows, 3), "unneeded": drawn(rows), "scale": drawn(2, seed=2)} | weights


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_of_several_outputs_are_differences(rows: int, filled: bool) -> None:
    """Gradients are central differences of the sum of all outputs, each times its output gradient.

    The reference takes one output only.
    """
    model, given = network(), values(rows)
    weight = {key: np.ones_like(seed) for key, seed in seeds(rows).items()} if filled else seeds(rows)
    made = onnx_derivative(model, options=KeepOutputs | FillGrad if filled else KeepOutputs)
    found = everywhere(made, given if filled else given | weight)

    def total(moved: dict[str, np.ndarray]) -> float:
        fixed = replace_initializers_into_onnx(model, {name: moved[name] for name in ("w", "b")})
        feeds = {name: moved[name] for name in ("X", "unneeded", "scale")}
        y, z = ReferenceEvaluator(fixed).run(["Y", "Z"], feeds)
        return float((weight["Y_grad"] * y).sum() + (weight["Z_grad"] * z).sum())

    for name in ("X", "scale", "w", "b"):
        slopes = np.empty_like(given[name])
        for place in np.ndindex(slopes.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = {key: value.copy() for key, value in given.items()}
                moved[name][place] += step
                ends.append(total(moved))
            slopes[place] = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(found[f"{name}_grad"], slopes, rtol=0, atol=DIFFERENCE, err_msg=name)


def test_gradients_are_those_of_a_forward_and_a_backward_pass() -> None:
    model, given = network(), values(4)
    both = OrtGradientForwardBackward(model, weights_to_train=["w", "b"], ordered=False)
    function = both.new_instance()
    function.forward([given[name] for name in both.cls_type_._grad_input_names], training=True)
    grad_y, grad_z = seeds(4).values()
    passed = function.backward([grad_y, np.zeros(4, np.int64), grad_z])
    found = everywhere(onnx_derivative(model), given | seeds(4))
    assert list(found) == both.cls_type_._bw_fetches_names
    for value, other in zip(found.values(), passed, strict=True):
        np.testing.assert_allclose(value, other.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [Zero, KeepOutputs, KeepOutputs | FillGrad])
@pytest.mark.parametrize(
    ("body", "derivative"),
    [
        ("Y = Add(X, one)", lambda x: np.ones_like(x)),
        ("Y = Mul(X, X)", lambda x: 2 * x),
        ("t = Identity(X) Y = Mul(t, t)", lambda x: 2 * x),
    ],
)
def test_b24_sums_and_squares(body: str, derivative: Any, options: DerivativeOptions) -> None:
    """The derivative runs on every runtime, and equals the formula and a central difference."""
    model = modelled(f"(float[n, 10] X) => (float[n, 10] Y) {{ {body} }}", one=np.float32([1]))
    made = onnx_derivative(model, options=options)
    assert operators(made).count("Identity") <= 1
    assert all(node.output[0] == "X_grad" for node in made.graph.node if node.op_type == "Identity")
    feeds = {"X": drawn(6, 10, dtype=np.float32)}
    if "one" in names(made.graph.input):
        feeds["one"] = np.float32([1])
    seed = np.ones((6, 10), np.float32) if options & FillGrad else drawn(6, 10, dtype=np.float32, seed=4)
    found = everywhere(made, feeds if options & FillGrad else feeds | {"Y_grad": seed})
    np.testing.assert_allclose(found["X_grad"], seed * derivative(feeds["X"]), **TOLERANCE[np.float32])
    # In float32 a central difference has three digits.
    step = np.float32(0.01)
    ends = [ReferenceEvaluator(model).run(None, {"X": feeds["X"] + move})[0] for move in (step, -step)]
    np.testing.assert_allclose(found["X_grad"], seed * (ends[0] - ends[1]) / (2 * step), atol=2e-3)
    if options & KeepOutputs:
        np.testing.assert_allclose(
            found["Y"], ReferenceEvaluator(model).run(None, {"X": feeds["X"]})[0], **TOLERANCE[np.float32]
        )


def test_derivatives_are_plain_onnx() -> None:
    """This holds for operators with gradient operators of ONNX Runtime, too."""
    model = modelled(
        "(float[n, 4] X) => (float[n, 4] Y) { t = Mul(X, w) u = Softmax(t) v = Sigmoid(u) Y = LogSoftmax(v) }",
        w=np.float32([1, 2, 3, 4]),
    )
    made = onnx_derivative(model, options=KeepOutputs)
    assert {node.domain for node in made.graph.node} == {""}
    x, seed = drawn(3, 4, dtype=np.float32), drawn(3, 4, dtype=np.float32, seed=1)
    found = everywhere(made, {"X": x, "w": np.float32([1, 2, 3, 4]), "Y_grad": seed})
    assert found["X_grad"].shape == (3, 4)
    assert {node.domain for node in onnx_derivative(model, options=KeepYieldOp).graph.node} == {"", "com.microsoft"}


def test_weights_that_are_inputs_already_stay_inputs() -> None:
    """Models of older versions list weights as inputs."""
    model = modelled("(float[1] one, float[n, 2] X) => (float[n, 2] Y) { Y = Mul(X, one) }", one=np.float32([1]))
    made = onnx_derivative(model, inputs=["X"])
    assert described(made) == (["X", "one", "Y_grad"], ["X_grad", "one_grad"])
    x, seed = drawn(3, 2, dtype=np.float32), drawn(3, 2, dtype=np.float32, seed=1)
    found = everywhere(made, {"X": x, "one": np.float32([3]), "Y_grad": seed})
    np.testing.assert_allclose(found["X_grad"], 3 * seed, **TOLERANCE[np.float32])
    np.testing.assert_allclose(found["one_grad"], [(x * seed).sum()], **TOLERANCE[np.float32])


def test_gradients_of_values_in_subgraphs() -> None:
    model = modelled(
        "(float[n, 2] X, bool c) => (float[n, 2] Y) { i = Identity(X)"
        "  Y = If(c) <then_branch = th () => (float[n, 2] p) { p = Mul(i, w) },"
        "             else_branch = el () => (float[n, 2] q) { q = Neg(i) }> }",
        w=np.float32([5]),
    )
    made = onnx_derivative(model)
    x, seed = drawn(3, 2, dtype=np.float32), drawn(3, 2, dtype=np.float32, seed=1)
    for condition, factor in ((True, 5), (False, -1)):
        found = everywhere(made, {"X": x, "c": np.array(condition), "w": np.float32([5]), "Y_grad": seed})
        np.testing.assert_allclose(found["X_grad"], factor * seed, **TOLERANCE[np.float32])
        np.testing.assert_allclose(found["w_grad"], [(x * seed).sum() if condition else 0], **TOLERANCE[np.float32])


def test_b23_loss(tmp_path: Path) -> None:
    """The label of the reference is the loss; gradients differentiate the sum of squares."""
    loss = add_loss_output(added())
    path = tmp_path / "gradient.onnx"
    made = onnx_derivative(loss, inputs={"X", "one"}, options=Loss, label="loss", loss="loss", path_name=path)
    assert described(made) == (["X", "label"], ["loss", "Y", "X_grad", "one_grad"])
    assert onnx.load(path) == made
    x, label = drawn(6, 10, dtype=np.float32), drawn(6, 10, dtype=np.float32, seed=1)
    found = everywhere(made, {"X": x, "label": label})
    difference = x + 1 - label
    np.testing.assert_allclose(found["loss"], [[(difference**2).sum()]], rtol=1e-5)
    np.testing.assert_allclose(found["X_grad"], 2 * difference, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["one_grad"], [2 * difference.sum()], rtol=1e-4)


def test_b23_loss_with_all_inputs(tmp_path: Path) -> None:
    """All float inputs of the loss are differentiated, with the label among them; a single name is accepted."""
    loss = add_loss_output(network(), output_index="Y", label_name="wanted", weight_name="importance")
    arguments: dict[str, Any] = {
        "options": Loss,
        "label": ["loss"],
        "loss": "loss",
        "path_name": str(tmp_path / "g.onnx"),
    }
    made = onnx_derivative(loss, **arguments)
    assert names(made.graph.output) == ["loss", "Y", "X_grad", "importance_grad", "wanted_grad"]
    only = onnx_derivative(loss, inputs="X", **arguments)
    assert names(only.graph.output) == ["loss", "Y", "X_grad"]
    without = onnx_derivative(loss, inputs=["X", "loss"], **arguments)
    assert without == only


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"options": 1}, TypeError, "options must be DerivativeOptions, got int"),
    ({"options": None}, TypeError, "options must be DerivativeOptions, got NoneType"),
    (
        {"options": FillGrad},
        InvalidArgumentError,
        "DerivativeOptions.FillGrad requires DerivativeOptions.KeepOutputs",
    ),
    (
        {"options": KeepYieldOp | KeepOutputs},
        InvalidArgumentError,
        f"DerivativeOptions.KeepYieldOp cannot be combined with another option, got {KeepYieldOp | KeepOutputs!r}",
    ),
    (
        {"options": Loss | KeepOutputs},
        InvalidArgumentError,
        f"DerivativeOptions.KeepYieldOp cannot be combined with another option, got {Loss | KeepOutputs!r}",
    ),
    (
        {"loss": "Y"},
        InvalidArgumentError,
        f"loss requires DerivativeOptions.Loss, got {Zero!r}",
    ),
    ({"weights": ["two"]}, InvalidArgumentError, 'the model has no initializer "two"'),
    ({"inputs": ["U"]}, InvalidArgumentError, 'the model has no input "U", so it cannot return its gradient'),
    (
        {"weights": "one", "inputs": 3},
        TypeError,
        "inputs must be a set of names, got int; pass {name} for a single name",
    ),
    (
        {"weights": [], "inputs": []},
        InvalidArgumentError,
        "the model has no gradient: no weight is named, and its outputs depend on no float input",
    ),
]
ALL = {"options": Loss, "loss": "Y", "label": "Y", "path_name": "gradient.onnx"}
REFUSED += [
    (ALL | {"path_name": None}, InvalidArgumentError, "DerivativeOptions.Loss requires path_name"),
    (ALL | {"label": None}, InvalidArgumentError, "DerivativeOptions.Loss requires label"),
    (ALL | {"loss": None}, InvalidArgumentError, "DerivativeOptions.Loss requires loss"),
    (ALL | {"loss": 3}, InvalidArgumentError, "loss must be the name of a value, got int"),
    (
        ALL | {"weights": []},
        InvalidArgumentError,
        "weights cannot be used with DerivativeOptions.Loss; name them in inputs",
    ),
    (
        ALL | {"label": "X"},
        InvalidArgumentError,
        "label must name the results that gradients flow from, got the input 'X'; name the loss, 'Y'",
    ),
    (
        ALL | {"loss": "loss"},
        InvalidArgumentError,
        "loss 'loss' is not a value of the model; add_loss_output adds a loss",
    ),
    (
        ALL | {"label": ["y"]},
        InvalidArgumentError,
        "label 'y' is not a value of the model; add_loss_output adds a loss; did you mean 'Y'?",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), REFUSED)
def test_b23_invalid_arguments(
    arguments: dict[str, Any], error: type[Exception], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        onnx_derivative(added(), **arguments)
    assert str(raised.value) == sentence
    assert not list(tmp_path.iterdir())
    if error is InvalidArgumentError:
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, RuntimeError)


def test_models_without_a_derivative_are_refused() -> None:
    integers = modelled("(int64[n] X) => (int64[n] Y) { Y = Mul(X, X) }")
    with pytest.raises(OrtrainError, match="it has no float output"):
        onnx_derivative(integers)
    taken = modelled("(float[n] X) => (float[n] Y) { Y_grad = Exp(X) Y = Neg(Y_grad) }")
    with pytest.raises(InvalidArgumentError, match=r'the model has a value "Y_grad", which is the name of a gradient'):
        onnx_derivative(taken)
    with pytest.raises(TypeError, match=r"^onx must be an onnx.ModelProto, got bytes; read a file with onnx.load$"):
        onnx_derivative(b"")
    unreached = modelled("(float[n] X) => (float[n] Y) { Y = Exp(X) }", w=np.float32([1]))
    with pytest.raises(OrtrainError, match='"w" cannot be trained'):
        onnx_derivative(unreached, weights=["w"])


def test_supported_combinations_of_options() -> None:
    """No combination is silently treated as another one."""
    made = []
    for parts in itertools.product([Zero, KeepYieldOp], [Zero, KeepOutputs], [Zero, FillGrad]):
        options = parts[0] | parts[1] | parts[2]
        try:
            onnx_derivative(added(), options=options)
            made.append(options)
        except ValueError:
            continue
    assert made == [Zero, KeepOutputs, KeepOutputs | FillGrad, KeepYieldOp]
