"""Operators of onnxruntime-training's training graphs, one at a time: ortrain computes the results of 1.19.2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import DEVICES
from onnx import TensorProto, helper
from training_nodes import MICROSOFT, Node, nodes

import ortrain

RECORD = Path(__file__).parent / "data" / "training-nodes.npz"
# Rounding of float32 in some sums and exponentials, relative to the largest element.
ROUNDING = 2e-6
NODES = {node.key: node for node in nodes()}
# Gradients of a Dropout outside of training mode, which 1.19.2 computes incorrectly.
UNTRAINED = {key for key in NODES if key.startswith("DropoutGrad, not in training")}
# Every operator of the CPU build that training graphs use, except operators that work in place.
OPERATORS = frozenset(
    """AveragePoolGrad BatchNormInternal BatchNormalizationGrad BiasFastGeluGrad_dX BiasGelu BiasGeluGrad_dX
    BroadcastGradientArgs ConcatTraining ConvGrad DivGrad DropoutGrad FakeQuant FakeQuantGrad FastGelu FastGeluGrad
    FusedMatMul GRUGrad GRUTraining GatherElementsGrad GatherGrad GatherNDGrad Gelu GeluGrad
    InvertibleLayerNormalizationGrad LSTMGrad LSTMTraining LayerNormalizationGrad LeakyReluGrad LogSoftmaxGrad
    LogSoftmaxGrad_13 MaxPoolGrad NegativeLogLikelihoodLossInternal NegativeLogLikelihoodLossInternal2 QuickGelu
    QuickGeluGrad ReduceAllL2 ReduceSumTraining ReluGrad Scale ShrunkenGather SigmoidGrad
    SimplifiedLayerNormalizationGrad SliceGrad SoftmaxCrossEntropy SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad
    SoftmaxCrossEntropyLossInternal SoftmaxCrossEntropyLossInternalGrad SoftmaxGrad SoftmaxGrad_13
    SparseSoftmaxCrossEntropy SparseSoftmaxCrossEntropyGrad SplitTraining TanhGrad Trilu""".split()
)
# Operators with an effect outside of the model, and the text of their errors.
LEFT_OUT = {
    **dict.fromkeys(("SummaryScalar", "SummaryHistogram", "SummaryText", "SummaryMerge"), "a text for TensorBoard"),
    **{
        f"Gist{packer}{half}": "in fewer bits, which changes the gradient"
        for packer in ("Binarize", "Pack1", "Pack8", "Pack16", "PackMsfp15")
        for half in ("Encoder", "Decoder")
    },
    **dict.fromkeys(("PythonOp", "PythonOpGrad"), "a torch.autograd.Function of the process that exported it"),
    **dict.fromkeys(("RecordEvent", "WaitEvent"), "it synchronizes the stages of a pipeline"),
}


def recorded() -> dict[str, dict[str, np.ndarray]]:
    """Return the recorded inputs and outputs of each case by name."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(RECORD) as stored:
        for name in stored.files:
            key, kind, value = name.rsplit("/", 2)
            found.setdefault(key, {})[f"{kind}/{value}"] = stored[name]
    return found


RECORDED = recorded()


def test_every_operator_is_recorded() -> None:
    assert {node.op for node in NODES.values()} == OPERATORS
    assert set(RECORDED) == set(NODES)


def assert_like(node: Node, results: dict[str, np.ndarray]) -> None:
    """Check that the results equal the record."""
    wanted = {name[7:]: value for name, value in RECORDED[node.key].items() if name.startswith("output/")}
    assert results.keys() == wanted.keys()
    for name, want in wanted.items():
        got = results[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        size = float(np.abs(want).max(initial=0)) if want.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * size, err_msg=name)


def run(key: str, backend: str) -> dict[str, np.ndarray]:
    """Run a case here; returns its outputs by name."""
    session = ortrain.InferenceSession(NODES[key].model(), providers=[backend])
    feeds = {name[6:]: value for name, value in RECORDED[key].items() if name.startswith("input/")}
    results = session.run(None, feeds)
    return {value.name: result for value, result in zip(session.get_outputs(), results, strict=True)}


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("key", sorted(set(NODES) - UNTRAINED))
def test_node(key: str, backend: str) -> None:
    assert_like(NODES[key], run(key, backend))


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("key", sorted(UNTRAINED))
def test_dropout_without_drops_passes_every_gradient(key: str, backend: str) -> None:
    """The forward result is the input in this mode. 1.19.2 nevertheless applies mask and ratio."""
    given = RECORDED[key]
    np.testing.assert_array_equal(run(key, backend)["y0"], given["input/x0"])
    assert not np.allclose(given["output/y0"], given["input/x0"])


@pytest.mark.parametrize("op", sorted(LEFT_OUT))
def test_unsupported_operators_are_named_with_a_reason(op: str) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"], name="before"),
        helper.make_node(op, ["y"], ["z"], name="there", domain=MICROSOFT),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "z")]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    sets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=sets, ir_version=8)
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(model)
    assert str(refused.value).startswith(f'the model: node "there" (com.microsoft:{op}) with inputs (y: ')
    assert LEFT_OUT[op] in str(refused.value)
