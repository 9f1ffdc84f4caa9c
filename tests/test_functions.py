"""Functions of a model are inlined where they are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# Rounding of float32 sums in another order.
TOLERANCE = 1e-6
TEXT = """
<ir_version: 9, opset_import: ["" : 18, "net" : 1]>
classifier (float[n, 4] x) => (float[n, 3] logits)
{
    hidden = net.Layer <slope: float = 0.2> (x, first_weight, first_bias)
    logits = net.Layer (hidden, second_weight)
}

<domain: "net", opset_import: ["" : 18, "net" : 1]>
Leaky <slope> (v) => (result)
{
    result = LeakyRelu <alpha: float = @slope> (v)
}

<domain: "net", opset_import: ["" : 18, "net" : 1]>
Layer <slope: float = 0.5> (v, w, b) => (result)
{
    product = MatMul (v, w)
    shifted = net.Shift (product, b)
    result = net.Leaky <slope: float = @slope> (shifted)
}

<domain: "net", opset_import: ["" : 18]>
Shift (v, b) => (result)
{
    one = Constant <value_float: float = 0.25> ()
    result = Add (v, one)
}
"""


def model() -> onnx.ModelProto:
    """Return two layers, each a call of a function that calls others; the second call omits its bias."""
    made = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(3)
    for name, shape in (("first_weight", (4, 5)), ("first_bias", (5,)), ("second_weight", (5, 3))):
        values = rng.normal(0, 0.5, shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(values, name))
    return made


X = np.random.default_rng(4).normal(size=(6, 4)).astype(np.float32)


def test_results_are_those_of_onnxruntime() -> None:
    made = model()
    theirs = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = theirs.run(None, {"x": X})
    (got,) = ortrain.InferenceSession(made).run(None, {"x": X})
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_training(tmp_path: Path) -> None:
    """Artifacts have no functions; the trained model is exported, and onnxruntime runs it."""
    artifacts.generate_artifacts(
        model(),
        ["first_weight", "second_weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    for file in ("training_model.onnx", "eval_model.onnx"):
        assert not onnx.load(tmp_path / file).functions
    onnx.checker.check_model(tmp_path / "eval_model.onnx")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    labels = np.array([0, 1, 2, 0, 1, 2])
    losses = []
    for _ in range(20):
        losses.append(float(module(X, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[-1] < losses[0]
    module.export_model_for_inferencing(tmp_path / "inference.onnx", ["logits"])
    session = onnxruntime.InferenceSession(tmp_path / "inference.onnx", providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": X})
    (got,) = ortrain.InferenceSession(tmp_path / "inference.onnx").run(None, {"x": X})
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("net.Leaky <slope: float = @slope> (shifted)", "net.Layer (shifted)"),
            'function "Layer" of domain "net" calls itself; functions cannot be recursive',
        ),
        (
            (
                "hidden = net.Layer <slope: float = 0.2> (x, first_weight, first_bias)",
                "hidden = net.Layer (x, x, x, x)",
            ),
            'Layer -> "hidden": it has 4 inputs, but function "Layer" of domain "net" declares 3',
        ),
        (
            ("<slope: float = 0.2>", "<steep: float = 0.2>"),
            'Layer -> "hidden": it has the attribute "steep", which function "Layer" of domain "net" does not declare',
        ),
        (
            ('<domain: "net", opset_import: ["" : 18]>', '<domain: "net", opset_import: ["" : 6]>'),
            'function "Shift" of domain "net" uses Add of version 6 of its operator set, but the model uses '
            "version 18, where it means something else; convert the model to one version",
        ),
    ],
)
def test_functions_without_an_expansion(change: tuple[str, str], sentence: str) -> None:
    text = TEXT.replace(*change)
    assert text != TEXT
    made = onnx.parser.parse_model(text)
    for tensor in model().graph.initializer:
        made.graph.initializer.append(tensor)
    with pytest.raises(ortrain.InvalidModelError) as error:
        ortrain.InferenceSession(made)
    assert str(error.value) == f"the model: {sentence}"


def test_calls_within_calls_have_an_end() -> None:
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "net" : 1]> net (float[n] x) => (float[n] y) { y = net.F0 (x) }'
    )
    for k in range(20_000):
        node = onnx.helper.make_node(f"F{k + 1}", ["x"], ["y"], domain="net")
        made.functions.append(onnx.helper.make_function("net", f"F{k}", ["x"], ["y"], [node], made.opset_import))
    with pytest.raises(ortrain.InvalidModelError, match="functions and subgraphs are nested more than 100 deep"):
        ortrain.InferenceSession(made)


def test_types_are_found_through_calls() -> None:
    session = ortrain.InferenceSession(model())
    assert [value.shape for value in session.get_outputs()] == [["n", 3]]
