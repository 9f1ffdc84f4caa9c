"""Custom operators and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts, backend, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer

# Differences of float64 values over a step of 1e-5.
DIFFERENCES = 1e-7
# Rounding of float32 sums in another order.
TOLERANCE = 1e-6


def function(text: str, version: int = 17) -> onnx.FunctionProto:
    return onnx.parser.parse_function(f'<domain: "own", opset_import: ["" : {version}, "own" : 1]>\n{text}')


def parsed(text: str, version: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {version}, "own" : 1]>\n{text}')


def library(*functions: str, **gradients: str) -> ortrain.OperatorLibrary:
    """Return a library of functions, and of gradients by operator; ``own_`` marks operators of the domain own."""
    made = ortrain.OperatorLibrary()
    for text in functions:
        made.add_function(function(text))
    for operator, text in gradients.items():
        of_own = operator.startswith("own_")
        made.add_gradient(operator.removeprefix("own_"), function(text), domain="own" if of_own else "")
    return made


def gradients(model: onnx.ModelProto, operators: ortrain.OperatorLibrary | None, folder: Path, **feeds: Any) -> Any:
    """Return the gradients of the first output, a scalar, with respect to all float initializers, by name."""
    names = [tensor.name for tensor in model.graph.initializer if tensor.data_type in (1, 11)]
    artifacts.generate_artifacts(model, names, artifact_directory=folder, operators=operators)
    # The artifacts have only standard nodes.
    for file in ("training_model.onnx", "eval_model.onnx"):
        written = onnx.load(folder / file)
        assert not written.functions
        assert {node.domain for node in written.graph.node} <= {"", "com.microsoft"}
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    loss = module(**feeds)
    np.testing.assert_array_equal(module.eval()(**feeds), loss)
    return {name: np.array(state.parameters[name].grad) for name in names}


def differences(model: onnx.ModelProto, operators: ortrain.OperatorLibrary | None, **feeds: Any) -> Any:
    """Return the same gradients by central differences of a session's results."""
    found = {}
    for position, tensor in enumerate(model.graph.initializer):
        value = numpy_helper.to_array(tensor)
        result = np.zeros_like(value)
        for index in np.ndindex(*value.shape):
            ends = []
            for step in (1e-5, -1e-5):
                changed = value.copy()
                changed[index] += step
                other = onnx.ModelProto()
                other.CopyFrom(model)
                other.graph.initializer[position].CopyFrom(numpy_helper.from_array(changed, tensor.name))
                ends.append(ortrain.InferenceSession(other, operators=operators).run(None, feeds)[0])
            result[index] = (ends[0] - ends[1]) / 2e-5
        found[tensor.name] = result
    return found


def assert_same(found: Any, wanted: Any, tolerance: float = DIFFERENCES) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, err_msg=name)


BILINEAR = (
    "Bilinear <scale: float = 2.0> (a, b) => (product, total) {\n"
    + """
    plain = Mul (a, b)
    factor = Constant <value_float: float = @scale> ()
    same = CastLike (factor, a)
    product = Mul (plain, same)
    total = ReduceSum <keepdims: int = 0> (a)
}"""
)
BILINEAR_GRADIENT = """
Gradient <scale> (a, b, product, total, d_product, d_total) => (d_a, d_b) {
    factor = Constant <value_float: float = @scale> ()
    same = CastLike (factor, a)
    scaled = Mul (d_product, same)
    through = Mul (scaled, b)
    d_a = Add (through, d_total)
    d_b = Mul (scaled, a)
}"""
NET = """
net (double[n] x) => (double loss)
<double[3] w = {0.5, -1.0, 2.0}, double[3] v = {1.5, 0.25, -0.5}> {
    shifted = Add (x, w)
    product, total = own.Bilinear (shifted, v)
    bent = Tanh (product)
    sum = ReduceSum <keepdims: int = 0> (bent)
    loss = Mul (sum, total)
}"""
X = np.array([0.2, -0.4, 0.1])


@pytest.mark.parametrize("own_gradient", [False, True], ids=["through the body", "by its own gradient"])
def test_an_operator_of_ones_own(own_gradient: bool, tmp_path: Path) -> None:
    operators = library(BILINEAR, **({"own_Bilinear": BILINEAR_GRADIENT} if own_gradient else {}))
    model = parsed(NET)
    assert_same(gradients(model, operators, tmp_path, x=X), differences(model, operators, x=X))


def test_a_function_that_the_model_brings_along_may_have_a_gradient(tmp_path: Path) -> None:
    model = parsed(NET)
    model.functions.append(function(BILINEAR))
    doubled = BILINEAR_GRADIENT.replace("Mul (scaled, a)", "Add (twice, twice)\n twice = Mul (scaled, a)")
    plain = gradients(model, None, tmp_path, x=X)
    found = gradients(model, library(own_Bilinear=doubled), tmp_path, x=X)
    assert_same(found, {"w": plain["w"], "v": 2 * plain["v"]}, 1e-12)


def test_attributes_reach_the_gradient(tmp_path: Path) -> None:
    """The gradient receives the attributes of the node, or the function's defaults for missing ones."""
    operators = library(BILINEAR, own_Bilinear=BILINEAR_GRADIENT)
    model = parsed(NET.replace("own.Bilinear", "own.Bilinear <scale: float = 0.5>"))
    assert_same(gradients(model, operators, tmp_path, x=X), differences(model, operators, x=X))


def test_where_no_gradient_arrives_there_are_zeros(tmp_path: Path) -> None:
    operators = library(BILINEAR, own_Bilinear=BILINEAR_GRADIENT)
    model = parsed(NET.replace("loss = Mul (sum, total)", "loss = Identity (sum)"))
    assert_same(gradients(model, operators, tmp_path, x=X), differences(model, operators, x=X))
    model = parsed(NET.replace("loss = Mul (sum, total)", "loss = Mul (total, total)"))
    found = gradients(model, operators, tmp_path, x=X)
    assert_same(found, differences(model, operators, x=X))
    assert not found["v"].any()


def test_a_gradient_of_a_standard_operator_and_of_one_node(tmp_path: Path) -> None:
    model = parsed("""
net (float[n] x) => (float loss) <float[2] w = {0.3, -1.7}> {
    y = Mul (x, w)
    first = Sign (y)
    second = Sign (w)
    both = Mul (first, second)
    loss = ReduceSum <keepdims: int = 0> (both)
}""")
    x = np.array([2.0, 3.0], np.float32)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"passes no gradient back; .* \(docs/extending.md\)"):
        gradients(model, None, tmp_path, x=x)
    straight = library(Sign="Straight (x, y, dy) => (dx) { dx = Identity (dy) }")
    # d loss = sign(w) x dw + sign(x w) dw
    assert_same(gradients(model, straight, tmp_path, x=x), {"w": np.array([3.0, -4.0])})
    model.graph.node[1].name = "first"
    straight.add_gradient("Sign", function("Twice (x, y, dy) => (dx) { dx = Add (dy, dy) }"), node="first")
    assert_same(gradients(model, straight, tmp_path, x=x), {"w": np.array([5.0, -7.0])})
    model.graph.node[1].name = "other"
    with pytest.raises(ortrain.InvalidModelError) as error:
        gradients(model, straight, tmp_path, x=x)
    assert str(error.value) == (
        'the model: function "Twice" of domain "own", the gradient of Sign, is for the node "first" (Sign), which '
        "the model does not have"
    )
    # A session does not differentiate, and does not look for the node.
    assert ortrain.InferenceSession(model, operators=straight).run(None, {"x": x})[0] == 2.0


def test_inputs_that_are_left_out_and_without_gradient(tmp_path: Path) -> None:
    model = parsed("""
net (double[n] x) => (double loss) <double[3] w = {0.5, -4.0, 2.0}, double zero = {0.0}, double one = {1.0}> {
    low = Clip (w, zero)
    both = Clip (low, zero, one)
    y = Mul (both, x)
    loss = ReduceSum <keepdims: int = 0> (y)
}""")
    straight = library(
        Clip="Straight (x, low, high, y, dy) => (dx, dlow, dhigh) { dx = Identity (dy) \n dlow = ReduceSum"
        " <keepdims: int = 0> (dy) \n dhigh = Neg (dlow) }"
    )
    x = np.array([1.0, 2.0, 3.0])
    found = gradients(model, straight, tmp_path, x=x)
    assert_same(found, {"w": x, "zero": np.array(12.0), "one": np.array(-6.0)})
    without = function("Straight (x, low, high, y, dy) => (dx, dlow, dhigh) { dx = Identity (dy) }")
    without.output[1] = without.output[2] = ""
    straight = ortrain.OperatorLibrary()
    straight.add_gradient("Clip", without)
    for _ in range(2):
        model.graph.initializer.pop()
    model.graph.node[0].input[1] = ""
    model.graph.node[1].input[1] = model.graph.node[1].input[2] = ""
    assert_same(gradients(model, straight, tmp_path, x=x), {"w": x})
    needs_low = library(
        Clip="Needs (x, low, high, y, dy) => (dx, dlow, dhigh) { dx = Mul (dy, low) \n"
        " dlow = Identity (low) \n dhigh = Identity (high) }"
    )
    with pytest.raises(
        ortrain.InvalidModelError, match=r'in function "Needs" .* the gradient of Clip, Mul -> "both_Grad/dx".*'
    ):
        gradients(model, needs_low, tmp_path, x=x)


CONTROL = {
    "If": """
net (double[n] x, bool c) => (double loss) <double[3] w = {0.5, -1.0, 2.0}> {
    y = If (c) <
        then_branch = yes () => (double[n] a) { p, t = own.Bilinear (x, w) \n a = Mul (p, t) },
        else_branch = no () => (double[n] a) { p, t = own.Bilinear <scale: float = 3.0> (w, w) \n a = Mul (p, t) }
    >
    loss = ReduceSum <keepdims: int = 0> (y)
}""",
    "Loop": """
net (double[n] x, bool c) => (double loss) <double[3] w = {0.5, -1.0, 2.0}, int64 count = {3}> {
    y = Loop (count, c, x) <body = step (int64 i, bool go, double[n] s) => (bool on, double[n] r) {
        on = Identity (go)
        p, t = own.Bilinear (s, w)
        q = Tanh (p)
        r = Mul (q, t)
    }>
    loss = ReduceSum <keepdims: int = 0> (y)
}""",
}


@pytest.mark.parametrize("text", CONTROL.values(), ids=CONTROL)
@pytest.mark.parametrize("flag", [True, False])
def test_in_subgraphs(text: str, flag: bool, tmp_path: Path) -> None:
    operators = library(BILINEAR, own_Bilinear=BILINEAR_GRADIENT)
    model = parsed(text)
    count = [tensor for tensor in model.graph.initializer if tensor.name == "count"]
    feeds = {"x": X, "c": np.array(flag)}
    found = gradients(model, operators, tmp_path, **feeds)
    for tensor in count:
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["count"], value=tensor))
    assert_same(found, differences(model, operators, **feeds))


def test_a_stable_gradient(tmp_path: Path) -> None:
    """The gradient rule gives numbers where differentiating the function gives NaN."""
    one = "one = Constant <value_float: float = 1.0> ()"
    own = f"LogOneExp (x) => (y) {{ e = Exp (x) \n {one} \n s = Add (e, one) \n y = Log (s) }}"
    model = parsed("""
net (float[n] x) => (float loss) <float[2] w = {200.0, 0.0}> {
    z = Mul (x, w)
    y = own.LogOneExp (z)
    loss = ReduceSum <keepdims: int = 0> (y)
}""")
    x = np.array([1.0, 2.0], np.float32)
    assert np.isnan(gradients(model, library(own), tmp_path, x=x)["w"][0])
    stable = library(own, own_LogOneExp="G (x, y, dy) => (dx) { s = Sigmoid (x) \n dx = Mul (s, dy) }")
    assert_same(gradients(model, stable, tmp_path, x=x), {"w": np.array([1.0, 1.0])})


BINARY = """
net (float[n, 4] x) => (float[n, 2] scores) {
    first_sign = Sign (first)
    hidden = MatMul (x, first_sign)
    bent = own.Hard (hidden)
    second_sign = Sign (second)
    raw = MatMul (bent, second_sign)
    scores = Mul (raw, scale)
}"""


def binary_net() -> tuple[onnx.ModelProto, ortrain.OperatorLibrary]:
    model = parsed(BINARY)
    rng = np.random.default_rng(5)
    for name, shape in (("first", (4, 16)), ("second", (16, 2)), ("scale", (2,))):
        values = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model, library(
        "Hard (x) => (y) { l = Constant <value_float: float = -1.0> () \n h = Neg (l) \n y = Clip (x, l, h) }",
        Sign="Straight (x, y, dy) => (dx) { dx = Identity (dy) }",
    )


def test_a_net_of_binary_weights_trains(tmp_path: Path) -> None:
    model, operators = binary_net()
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
        operators=operators,
    )
    rng = np.random.default_rng(6)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    before = np.sign(state.parameters["first"].data)
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.02)
    losses = []
    for _ in range(80):
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert (np.sign(state.parameters["first"].data) != before).any(), "the signs are trained"

    # The exported model has standard nodes only: it runs without the library, and in onnxruntime.
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["scores"])
    onnx.checker.check_model(tmp_path / "trained.onnx", full_check=True)
    (got,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(got, session.run(None, {"x": x})[0], atol=TOLERANCE)
    for tensor in model.graph.initializer:
        trained = np.array(state.parameters[tensor.name].data)
        tensor.CopyFrom(numpy_helper.from_array(trained, tensor.name))
    (wanted,) = ortrain.InferenceSession(model, operators=operators).run(None, {"x": x})
    np.testing.assert_array_equal(got, wanted)


def test_every_reader_takes_a_library() -> None:
    model, operators = binary_net()
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(model)
    assert str(refused.value) == (
        'the model: the model uses operators that are not supported: own:Hard -> "bent"; an operator '
        "can be added as a function of ONNX (docs/extending.md)"
    )
    found = ortrain.inspect(model, operators=operators)
    assert found.obstacle is None
    assert found.names("trained") == ["first", "second", "scale"]
    assert "first_grad: float32[4, 16] = Identity(first_sign_grad)" in ortrain.dump(
        model, "gradient", operators=operators
    )
    assert "Clip" in ortrain.dump(model, operators=operators)
    assert "input" in ortrain.dump(model, "program", {"x": [5, 4]}, operators=operators)
    x = np.ones((2, 4), np.float32)
    (wanted,) = ortrain.InferenceSession(model, operators=operators).run(None, {"x": x})
    (got,) = backend.run_model(model, [x], operators=operators)
    np.testing.assert_array_equal(got, wanted)
    node = onnx.helper.make_node("Hard", ["x"], ["y"], domain="own")
    (clipped,) = backend.run_node(node, [np.array([-3.0, 0.5], np.float32)], opset_version=17, operators=operators)
    np.testing.assert_array_equal(clipped, np.array([-1.0, 0.5], np.float32))


def test_blocks(tmp_path: Path) -> None:
    """In a context with a library, blocks may add its operators; its gradients differentiate them."""
    model, operators = binary_net()

    class Training(onnxblock.TrainingBlock):
        def build(self, scores: str) -> tuple[str, str]:
            self.base.graph.node.append(onnx.helper.make_node("Hard", [scores], ["limited"], domain="own"))
            return onnxblock.loss.CrossEntropyLoss()(scores), "limited"

    block = Training()
    for name in ("first", "second"):
        block.requires_grad(name)
    with onnxblock.base(model, operators=operators):
        block("scores")
    training, evaluation = block.to_model_proto()
    assert [entry.name for entry in evaluation.graph.output][1:] == ["limited"]
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    module = Module(training, CheckpointState.load_checkpoint(tmp_path / "checkpoint"), evaluation)
    loss, limited = module(np.ones((3, 4), np.float32), np.array([0, 1, 0]))
    assert np.isfinite(loss)
    assert limited.shape == (3, 2)

    class Loss(onnxblock.Block):
        def build(self, scores: str) -> str:
            self.base.graph.node.append(onnx.helper.make_node("Hard", [scores], ["limited"], domain="own"))
            return onnxblock.loss.CrossEntropyLoss()("limited")

    artifacts.generate_artifacts(model, loss=Loss(), artifact_directory=tmp_path, operators=operators)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    assert np.isfinite(module(np.ones((3, 4), np.float32), np.array([0, 1, 0])))


def test_functions_as_bytes_and_from_onnxscript() -> None:
    own = function("Twice (x) => (y) { y = Add (x, x) }")

    class Script:
        def to_function_proto(self) -> onnx.FunctionProto:
            return own

    model = parsed("net (float[n] x) => (float[n] y) { y = own.Twice (x) }")
    for given in (own, own.SerializeToString(), Script()):
        operators = ortrain.OperatorLibrary()
        operators.add_function(given)
        (y,) = ortrain.InferenceSession(model, operators=operators).run(None, {"x": np.ones(2, np.float32)})
        np.testing.assert_array_equal(y, np.full(2, 2, np.float32))
    with pytest.raises(TypeError, match=r"a function must be bytes or an onnx\.FunctionProto, got str"):
        operators.add_function("Twice")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"operators must be an ortrain\.OperatorLibrary, got dict"):
        ortrain.InferenceSession(model, operators={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Bad (x) => (z) { y = Relu (x) }",
            'function "Bad" of domain "own" has the output "z", which no node of the function computes',
        ),
        (
            "Bad (x) => (y) { y = Add (x, z) }",
            'function "Bad" of domain "own" has a node (Add) with the unknown input "z"',
        ),
        (
            "Bad (x) => (y) { y = Relu (x) \n y = Neg (x) }",
            'function "Bad" of domain "own" computes "y" twice',
        ),
        (
            "Bad (x, x) => (y) { y = Relu (x) }",
            'function "Bad" of domain "own" has two inputs with the name "x", or an input without a name',
        ),
    ],
)
def test_functions_that_are_none(text: str, sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        library(text)
    assert str(error.value) == sentence


def test_invalid_functions() -> None:
    for bad in (b"\xff\xff", b"no function", b"\x0a\x10short"):
        with pytest.raises(ortrain.InvalidArgumentError, match="the function is"):
            ortrain.OperatorLibrary().add_function(bad)
    elsewhere = function("Far (x) => (y) { c = Constant <value: tensor = float[1] {1.0}> () \n y = Add (x, c) }")
    tensor = elsewhere.node[0].attribute[0].t
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    with pytest.raises(ortrain.InvalidArgumentError, match="in another file; store the data in the function"):
        ortrain.OperatorLibrary().add_function(elsewhere)
    operators = library("Twice (x) => (y) { y = Add (x, x) }")
    with pytest.raises(ortrain.InvalidArgumentError, match="is in the operator library already"):
        operators.add_function(function("Twice (x) => (y) { y = Add (x, x) }"))
    known = function("Gelu (x) => (y) { y = Relu (x) }")
    known.domain = "com.microsoft"
    with pytest.raises(ortrain.InvalidArgumentError, match="has the name of a built-in operator"):
        operators.add_function(known)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        operators.add_gradient("Sign", function("G (x, dy) => (dx) { dx = Identity (dy) }"))
    assert str(error.value).startswith(
        'function "G" of domain "own", the gradient of Sign, has 2 inputs and 1 outputs, which does not fit. '
        "Inputs are the"
    )
    straight = function("G (x, y, dy) => (dx) { dx = Identity (dy) }")
    operators.add_gradient("Sign", straight)
    with pytest.raises(ortrain.InvalidArgumentError, match="library has a gradient of Sign already"):
        operators.add_gradient("Sign", straight)


TWO = "Two (x, w) => (y) { y = Mul (x, w) }"
CALL = """
net (double[n] x) => (double loss) <double[3] w = {1.0, 2.0, 3.0}> {
    y = own.Two (x, w)
    loss = ReduceSum <keepdims: int = 0> (y)
}"""


@pytest.mark.parametrize(
    ("gradient", "kind", "sentence"),
    [
        (
            "G (x, w, y, dy) => (dx, dw) { dx = Mul (dy, w) \n dw = own.Nobody (dy) }",
            ortrain.InvalidModelError,
            'function "G" of domain "own", the gradient of own:Two, uses own:Nobody, which is not a supported '
            "operator; it can be added as an ONNX function, too",
        ),
        (
            "G (x, w, y, dy) => (dx, dw) { dx = Mul (dy, w) \n dw = ReduceSum <keepdims: int = 0> (dy) }",
            ortrain.InvalidModelError,
            'ai.ortrain:CustomGradient -> "y" with inputs (x: float64[n], w: float64[3]): '
            'function "G" of domain "own", the gradient of own:Two, returns float64[] for input 1, "w", of '
            "type float64[3]; a gradient must have the type and shape of its input",
        ),
        (
            "G (x, w, y, dy) => (dx, dw) { dx = Mul (dy, w) \n dw = Cast <to: int = 1> (dy) }",
            ortrain.InvalidModelError,
            'returns float32[3] for input 1, "w", of type float64[3]; a gradient must have the type and shape of its',
        ),
        (
            "G (x, w, y, dy) => (dx, dw) { dx = Mul (dy, w) \n dw = MatMul (dy, c) \n c = Cast <to: int = 1> (x) }",
            ortrain.InvalidModelError,
            'in function "G" of domain "own", the gradient of own:Two, MatMul -> "y_Grad/dw"',
        ),
        (
            "G (x, y, dy) => (dx) { dx = Identity (dy) }",
            ortrain.InvalidModelError,
            'function "G" of domain "own", the gradient of own:Two, is for 1 inputs and 1 outputs, but function '
            '"Two" of domain "own" has 2 and 1',
        ),
    ],
)
def test_gradients_that_do_not_fit(gradient: str, kind: type[Exception], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(kind) as error:
        gradients(parsed(CALL), library(TWO, own_Two=gradient), tmp_path, x=X)
    assert sentence in str(error.value)
    assert not list(tmp_path.iterdir())


def test_shapes_that_are_known_when_it_runs(tmp_path: Path) -> None:
    """Shapes that are symbolic in the model are checked at each step, unless the symbols already differ."""
    net = """
net (double[n, m] x, double[m, n] t) => (double loss) <double w = {2.0}> {
    h = Mul (x, w)
    y = own.One (h)
    loss = ReduceSum <keepdims: int = 0> (y)
}"""
    one = "One (x) => (y) { y = Identity (x) }"
    turned = library(one, own_One="G (x, y, dy) => (dx) { dx = Transpose (dy) }")
    feeds = {"x": np.ones((2, 3)), "t": np.ones((3, 2))}
    with pytest.raises(
        ortrain.InvalidModelError, match=r"returns float64\[m, n\] for input 0, .* of type float64\[n, m\]"
    ):
        gradients(parsed(net), turned, tmp_path, **feeds)
    kept = """G (x, y, dy) => (dx) {
        positive = Greater (dy, zero)
        zero = Constant <value: tensor = double {0.0}> ()
        dx = Compress <axis: int = 0> (dy, rows)
        rows = Constant <value: tensor = bool[2] {1, 0}> ()
    }"""
    with pytest.raises(ortrain.InvalidArgumentError, match="Reshape"):
        gradients(parsed(net), library(one, own_One=kept), tmp_path, **feeds)
    both = library(one, own_One=kept.replace("{1, 0}", "{1, 1}"))
    assert_same(gradients(parsed(net), both, tmp_path, **feeds), {"w": np.array(6.0)})


def test_library_and_model_may_not_differ() -> None:
    model = parsed(CALL)
    model.functions.append(function(TWO))
    session = ortrain.InferenceSession(model, operators=library(TWO))
    assert session.run(None, {"x": np.ones(3)})[0] == 6.0
    with pytest.raises(
        ortrain.InvalidModelError, match="has different definitions in the model and in the operator library"
    ):
        ortrain.InferenceSession(model, operators=library(TWO.replace("Mul", "Add")))


def test_functions_of_a_library_cannot_be_recursive() -> None:
    operators = library("Two (x, w) => (y) { y = own.Again (x, w) }", "Again (x, w) => (y) { y = own.Two (x, w) }")
    with pytest.raises(ortrain.InvalidModelError, match=r"calls itself; functions cannot be recursive"):
        ortrain.InferenceSession(parsed(CALL), operators=operators)


def test_functions_of_model_and_library_call_each_other() -> None:
    """A function of the model calls one of the library, which calls one that only the model has."""
    model = parsed(CALL)
    model.functions.append(function("Two (x, w) => (y) { y = own.Middle (x, w) }"))
    model.functions.append(function("Last (x, w) => (y) { y = Mul (x, w) }"))
    operators = library("Middle (x, w) => (y) { y = own.Last (x, w) }")
    assert ortrain.InferenceSession(model, operators=operators).run(None, {"x": np.ones(3)})[0] == 6.0
    operators = library("Middle (x, w) => (y) { y = own.Two (x, w) }")
    with pytest.raises(ortrain.InvalidModelError, match=r'"(Two|Middle)" of domain "own" calls itself'):
        ortrain.InferenceSession(model, operators=operators)


def test_expansion_of_functions_is_limited(tmp_path: Path) -> None:
    """There is a limit on the expansion of functions of both, and of gradients."""

    def tenfold(name: str, called: str) -> str:
        calls = "\n".join(f"t{k} = {called} (x)" for k in range(10))
        return f"{name} (x) => (y) {{ {calls} \n y = Relu (x) }}"

    model = parsed("net (float[n] x) => (float[n] y) { y = own.F0 (x) }")
    for k in range(0, 8, 2):
        model.functions.append(function(tenfold(f"F{k}", f"own.F{k + 1}")))
    operators = library(*[tenfold(f"F{k}", f"own.F{k + 1}" if k < 7 else "Relu") for k in range(1, 8, 2)])
    with pytest.raises(ortrain.InvalidModelError, match="have more than 262144 nodes or take more than"):
        ortrain.InferenceSession(model, operators=operators)

    chain = "\n".join(f"h{k + 1} = Tanh (h{k})" for k in range(600))
    model = parsed(f"""
net (float[n] x) => (float loss) <float[2] w = {{1.0, 2.0}}> {{
    h0 = Mul (x, w)
    {chain}
    loss = ReduceSum <keepdims: int = 0> (h600)
}}""")
    steps = "\n".join(f"d{k + 1} = Identity (d{k})" for k in range(600))
    long = library(Tanh=f"G (x, y, dy) => (dx) {{ d0 = Identity (dy) \n {steps} \n dx = Identity (d600) }}")
    assert ortrain.InferenceSession(model, operators=long).run(None, {"x": np.zeros(2, np.float32)})[0] == 0
    with pytest.raises(ortrain.InvalidModelError, match="have more than 262144 nodes or take more than"):
        gradients(model, long, tmp_path, x=np.zeros(2, np.float32))


def test_a_gradient_may_call_its_operator(tmp_path: Path) -> None:
    """This is no recursion: the call inside of the gradient is not differentiated."""
    own = "G (x, w, y, dy) => (dx, dw) { dx = own.Two (dy, w) \n dw = own.Two (dy, x) }"
    model = parsed(CALL)
    operators = library(TWO, own_Two=own)
    assert_same(gradients(model, operators, tmp_path, x=X), differences(model, operators, x=X))


def test_versions(tmp_path: Path) -> None:
    """A function may be older than the model if its operators mean the same."""
    older = ortrain.OperatorLibrary()
    older.add_function(function(TWO, 11))
    straight = """G (x, w, y, dy) => (dx, dw) {
        dx = Mul (dy, w)
        single = Cast <to: int = 1> (dy)
        double = CastLike (single, x)
        dw = Mul (double, x)
    }"""
    older.add_gradient("Two", function(straight, 15), domain="own")
    model = parsed(CALL, 21)
    assert_same(gradients(model, older, tmp_path, x=X), {"w": X}, 1e-6)
    newer = library(TWO, own_Two="G (x, w, y, dy) => (dx, dw) { dx = Mul (dy, w) \n dw = ReduceSum (dy) }")
    with pytest.raises(ortrain.InvalidModelError, match=r"uses Mul of version 17 .* the model uses version 12"):
        gradients(parsed(CALL, 12), newer, tmp_path, x=X)


def test_batch_normalization_and_dropout_in_training(tmp_path: Path) -> None:
    """Dropout drops elements; BatchNormalization cannot update its statistics, which is an error."""
    model = parsed("""
net (float[n, 3] x) => (float[n, 3] y)
<float[3] s = {1.0, 2.0, 3.0}, float[3] b = {0.1, 0.2, 0.3}, float[3] mean = {0, 0, 0}, float[3] var = {1, 1, 1}> {
    normal = BatchNormalization (x, s, b, mean, var)
    y = Dropout (normal)
}""")
    gradient = function("""OfBatch (x, s, b, mean, var, y, dy) => (dx, ds, db, dmean, dvar) {
        dx = Identity (dy)
        axes = Constant <value_ints: ints = [0]> ()
        db = ReduceSum <keepdims: int = 0> (dy, axes)
        ds = Neg (db)
    }""")
    gradient.output[3] = gradient.output[4] = ""
    operators = library(
        Dropout="OfDropout (x, r, t, y, mask, dy, dmask) => (dx, dr, dt) { dx = Identity (dy) \n"
        " dr = Identity (r) \n dt = Identity (t) }"
    )
    operators.add_gradient("BatchNormalization", gradient)

    def make(mode: Any) -> None:
        loss = artifacts.LossType.MSELoss
        artifacts.generate_artifacts(
            model, loss=loss, batch_norm=mode, artifact_directory=tmp_path, operators=operators
        )

    with pytest.raises(ortrain.InvalidModelError, match='train with batch_norm="freeze"'):
        make("auto")
    make("freeze")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x, target = np.ones((50, 3), np.float32), np.zeros((50, 3), np.float32)
    assert module(x, target) > 1.5 * module.eval()(x, target), "half of the elements are doubled"
    assert_same({"s": state.parameters["s"].grad}, {"s": -np.array(state.parameters["b"].grad)})


def test_nodes_after_the_loss_have_no_custom_gradient(tmp_path: Path) -> None:
    model = parsed("""
net (double[n] x) => (double loss, double[n] named) <double[3] w = {1.0, 2.0, 3.0}> {
    y = Mul (x, w)
    loss = ReduceSum <keepdims: int = 0> (y)
    strange = own.Nobody (y)
    named = Sign (strange)
}""")
    straight = library(Sign="Straight (x, y, dy) => (dx) { dx = Identity (dy) }")
    artifacts.generate_artifacts(model, ["w"], artifact_directory=tmp_path, operators=straight)
    for file in ("training_model.onnx", "eval_model.onnx"):
        assert "CustomGradient" not in {node.op_type for node in onnx.load(tmp_path / file).graph.node}


def test_outputs_inside_of_an_operator(tmp_path: Path) -> None:
    operators = library(BILINEAR, own_Bilinear=BILINEAR_GRADIENT)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(
            parsed(NET),
            ["w"],
            additional_output_names=["product/plain"],
            artifact_directory=tmp_path,
            operators=operators,
        )
    assert str(error.value) == (
        '"product/plain" cannot be an output: an operator with a custom gradient computes it internally; make it '
        "an output of the operator's function"
    )
