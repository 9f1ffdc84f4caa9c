"""The gradient of every operator as plain ONNX: in each opset, with the checker, and against two other runtimes.

The nodes come from `test_versions.py`, in the syntax of an opset, and from the node cases of ONNX. Operators of other
domains are defined here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, checker, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from opsets import has
from test_gradients import (
    FIXED_TYPE,
    MOVES,
    NOISE,
    SMOOTH,
    WITHOUT,
    is_exception,
    moved,
    positions_of,
    questions,
    retype,
)
from test_gradients import TOLERANCE as DIFFERENCES
from test_nodes import arrays as arrays_of
from test_nodes import cases
from test_versions import CASES, NEWEST_OF_ONNXRUNTIME, GlobalLpPool, values

import ortrain
from ortrain.gradient import grad, vjp

# Opsets in which the operators of gradients changed, and the oldest and the newest one that onnxruntime reads.
OPSETS = (7, 9, 10, 11, 13, 16, 18, 20, NEWEST_OF_ONNXRUNTIME)
# Maximum number of cases of an operator in each opset, and of ONNX's node cases.
MAX_CASES = 3
# Tolerance between two runtimes in float32: relative to the largest element of a gradient, and absolute if large terms
# of magnitude 1 cancel.
TOLERANCE, CANCELLED = 1e-4, 1e-5
# onnxruntime logs errors only.
ERRORS = 3

OPERATORS = {
    (operator.domain, operator.name): operator
    for operator in ortrain.operators()
    if operator.gradient in ("full", "partial")
}
# Operators with a gradient that reaches no float output.
OF_INTEGERS = frozenset({"DynamicQuantizeLinear"})
STANDARD = sorted(name for (_, name), operator in OPERATORS.items() if operator.standard and name not in OF_INTEGERS)
# Oldest opset that can express a gradient, if it is newer than the operator. Older opsets cannot express positions of
# maxima, or counts.
MIN_OPSET = {"MaxPool": 9, "GlobalMaxPool": 9, "ReduceProd": 9}
# Operators without a kernel of onnxruntime for the newest of its opsets, or for any.
NOT_IN_ONNXRUNTIME = {
    "GlobalLpPool": "it has none of opset 22",
    "Swish": "it has none",
}
ALWAYS = 99
# Operators that the reference evaluator of ONNX does not compute, with the last affected opset and the reason.
SCATTER = "Scatter, which was renamed in opset 11, is not there"
NEGATIVE = "Pad with negative numbers is not implemented"
SCAN = "Scan in a direction other than the first is not implemented"
POSITIONS = "positions of maxima are counted within a plane"
NOT_IN_REFERENCE = {
    "BatchNormalization": (13, "older versions compute with statistics of another axis, or give none"),
    "CausalConvWithState": (ALWAYS, NEGATIVE),
    "CenterCropPad": (ALWAYS, NEGATIVE),
    "Conv": (ALWAYS, "groups are summed over channels of other groups"),
    "CumProd": (ALWAYS, NEGATIVE),
    "GRU": (ALWAYS, SCAN),
    "GatherND": (15, "OneHot along the first axis is not implemented"),
    "GlobalMaxPool": (ALWAYS, POSITIONS),
    "LSTM": (ALWAYS, SCAN),
    "LinearAttention": (ALWAYS, SCAN),
    "LogSoftmax": (11, "before opset 13 it is one of a matrix"),
    "Loop": (ALWAYS, SCAN),
    "MaxPool": (ALWAYS, POSITIONS),
    "Pad": (ALWAYS, NEGATIVE),
    "RNN": (ALWAYS, SCAN),
    "Resize": (10, "before opset 11 it is not implemented"),
    "Scan": (ALWAYS, SCAN),
    "Slice": (10, SCATTER),
    "Softmax": (11, "before opset 13 it is one of a matrix"),
    "TopK": (10, SCATTER),
    "Upsample": (10, "it is not implemented"),
}


def evaluated(op: str, opset: int, model: bytes, feeds: dict[str, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """Yield the results of onnxruntime and of the reference evaluator of ONNX."""
    if opset <= NEWEST_OF_ONNXRUNTIME and op not in NOT_IN_ONNXRUNTIME:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        yield "onnxruntime", onnxruntime.InferenceSession(model, options).run(None, feeds)
    if opset > NOT_IN_REFERENCE.get(op, (0, ""))[0]:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(onnx.load_from_string(model), new_ops=[GlobalLpPool]).run(None, feeds)
        yield "the reference", [np.asarray(result) for result in found]


@dataclass
class Question:
    """A node as a model, its inputs, and the names of differentiated outputs and inputs."""

    model: ModelProto
    feeds: dict[str, np.ndarray]
    of: list[str]
    wrt: list[str]

    @property
    def opset(self) -> int:
        return next(int(item.version) for item in self.model.opset_import if item.domain == "")


def question(given: ModelProto, feeds: dict[str, Any]) -> Question | None:
    """Return a node with constants for its other inputs, as in most models; None without a float32 gradient."""
    model = copy.deepcopy(given)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(nodes) != 1:
        return None
    (node,) = nodes
    if any(attribute.name == "layout" and attribute.i for attribute in node.attribute):
        # Recurrent layers with the batch axis first are not supported by any other runtime.
        return None
    operator = OPERATORS["ai.onnx", node.op_type]
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    wrt = []
    for name, value in arrays.items():
        positions = {k for k, port in enumerate(node.input) if port == name}
        partial = operator.gradient == "partial" and not positions <= set(operator.gradient_inputs)
        without = {(node.op_type, k) for k in positions} & (WITHOUT.keys() | FIXED_TYPE)
        nearest = node.op_type == "GridSample" and any(attribute.s == b"nearest" for attribute in node.attribute)
        if value.dtype == np.float32 and positions and not partial and not without and not (nearest and 1 in positions):
            wrt.append(name)
    of = [output.name for output in model.graph.output if output.type.tensor_type.elem_type == TensorProto.FLOAT]
    if not of or not wrt or any(value.dtype in (np.float16, np.float64) for value in arrays.values()):
        return None
    inputs = list(model.graph.input)
    del model.graph.input[:]
    for info in inputs:
        if info.name in wrt:
            model.graph.input.append(info)
        else:
            model.graph.initializer.append(numpy_helper.from_array(arrays.pop(info.name), info.name))
    for info in model.graph.output:
        # The checker requires a shape, which may have unknown sizes.
        if not info.type.tensor_type.HasField("shape"):
            (result,) = ortrain.InferenceSession(model).run([info.name], arrays)
            info.type.CopyFrom(helper.make_tensor_type_proto(info.type.tensor_type.elem_type, result.shape))
    return Question(model, arrays, of, wrt)


def in_words(op: str, opset: int) -> Iterator[Question]:
    """Yield nodes of an operator in the syntax of an opset."""
    for case in CASES[op](opset):
        inputs = {name: (array.dtype, array.shape) for name, array in case.inputs.items()}
        asked = question(case.words.model(case.words.graph(inputs, case.outputs)), case.inputs)
        if asked is not None:
            yield asked


@cache
def node_cases() -> dict[str, list[str]]:
    """Return ONNX's node cases with a gradient, by operator."""
    found: dict[str, list[str]] = {}
    for name in sorted(questions()):
        case = cases()[0][name]
        if len(case.model.graph.node) == 1 and not case.model.functions and not is_exception(name):
            found.setdefault(case.model.graph.node[0].op_type, []).append(name)
    return found


# Cases with different forward results in onnxruntime.
OTHERWISE = {
    "test_resize_downsample_scales_cubic_align_corners": "it takes the rounded sizes in the place of the scales",
}


def of_standard(op: str) -> Iterator[Question]:
    for name in node_cases().get(op, []):
        if name in OTHERWISE:
            continue
        case = cases()[0][name]
        given = arrays_of(case.data_sets[0][0])
        asked = question(case.model, dict(zip([value.name for value in case.model.graph.input], given, strict=True)))
        if asked is not None:
            yield asked


def check(op: str, asked: Question, plain_domains: frozenset[str] = frozenset({""})) -> None:
    """Assert that the gradient is valid plain ONNX of the model's opset, and the same in three runtimes."""
    made = grad(asked.model, of=asked.of, wrt=asked.wrt)
    message = onnx.load_from_string(made)
    assert {node.domain for node in message.graph.node} <= plain_domains
    assert [(item.domain, item.version) for item in message.opset_import] == [("", asked.opset)]
    if not has(op, asked.opset) or not defs.get_schema(op, asked.opset, "").deprecated:
        checker.check_model(message)
    wanted = ortrain.InferenceSession(made).run(None, asked.feeds)
    for runtime, results in evaluated(op, asked.opset, made, asked.feeds):
        for info, got, want in zip(message.graph.output, results, wanted, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{info.name} by {runtime}"
            largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
            close = max(CANCELLED, TOLERANCE * largest)
            np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=close, err_msg=f"{info.name} by {runtime}")


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", [op for op in STANDARD if op in CASES])
def test_in_every_opset(op: str, opset: int) -> None:
    if not has(op, opset):
        return
    for asked in itertools.islice(in_words(op, opset), MAX_CASES):
        if opset < MIN_OPSET.get(op, 0):
            sentence = f"needs? opset {MIN_OPSET[op]} or newer; raise the opset of the model"
            with pytest.raises(ortrain.UnsupportedError, match=sentence):
                grad(asked.model, of=asked.of, wrt=asked.wrt)
        else:
            check(op, asked)


@pytest.mark.parametrize("op", STANDARD)
def test_cases_of_the_standard(op: str) -> None:
    for asked in itertools.islice(of_standard(op), MAX_CASES):
        check(op, asked)


# Operators with a gradient but without float32 cases, and the reason or the place of their test.
QUANTIZED = "the gradient of quantized tensors: test_quantized_gradients.py"
WITHOUT_CASES = {
    **dict.fromkeys("ConvInteger MatMulInteger QLinearConv QLinearMatMul QuantizeLinear".split(), QUANTIZED),
    "CastLike": "its cases are of other types: OTHERS",
    "Einsum": "its cases are of float64: OTHERS",
    "If": "its branches use values that are no inputs of its own: test_gradient_graph.py",
    "Scatter": "older than ScatterElements, which is the same",
}


def test_every_operator_is_asked() -> None:
    """Every operator has a case of its own in some opset."""
    without = {
        op
        for op in STANDARD
        if next(of_standard(op), None) is None
        and not any(next(in_words(op, opset), None) for opset in OPSETS if op in CASES and has(op, opset))
    }
    assert without == WITHOUT_CASES.keys()
    assert NOT_IN_ONNXRUNTIME.keys() | NOT_IN_REFERENCE.keys() | MIN_OPSET.keys() <= set(STANDARD)


# Nodes of other domains, and nodes without a case above: shapes of float inputs, other inputs by position, attributes.
Own = tuple[str, str, list[tuple[int, ...]], dict[int, Any], dict[str, Any]]
OTHERS: list[Own] = [
    ("", "Einsum", [(2, 3), (3, 4)], {}, {"equation": "ij,jk->ki"}),
    ("", "CastLike", [(2, 3)], {1: np.ones(1, np.float32)}, {}),
    ("", "SimplifiedLayerNormalization", [(3, 4), (4,)], {}, {}),
    ("com.microsoft", "Attention", [(2, 3, 4), (4, 12), (12,)], {}, {"num_heads": 2}),
    ("com.microsoft", "BiasGelu", [(3, 4), (4,)], {}, {}),
    ("com.microsoft", "ConcatTraining", [(2, 3), (2, 1)], {}, {"axis": 1}),
    (
        "com.microsoft",
        "EmbedLayerNormalization",
        [(5, 4), (3, 4), (2, 4), (4,), (4,)],
        {0: np.array([[1, 4, 1]], np.int32), 1: np.array([[0, 1, 1]], np.int32)},
        {},
    ),
    ("com.microsoft", "FastGelu", [(3, 4), (4,)], {}, {}),
    ("com.microsoft", "FusedConv", [(1, 2, 5), (3, 2, 3)], {}, {"activation": "Relu"}),
    ("com.microsoft", "FusedGemm", [(2, 3), (3, 4), (4,)], {}, {"activation": "Tanh"}),
    ("com.microsoft", "FusedMatMul", [(2, 4, 3), (2, 3, 5)], {}, {"alpha": 0.5}),
    ("com.microsoft", "Gelu", [(3, 4)], {}, {}),
    (
        "com.microsoft",
        "GroupQueryAttention",
        [(2, 3, 8)],
        {1: None, 2: None, 3: None, 4: None, 5: np.array([2, 1], np.int32), 6: np.array([3], np.int32)},
        {"num_heads": 2, "kv_num_heads": 1},
    ),
    ("com.microsoft", "MultiHeadAttention", [(2, 3, 4), (2, 3, 4), (2, 3, 4)], {}, {"num_heads": 2}),
    ("com.microsoft", "QuickGelu", [(3, 4)], {}, {"alpha": 0.7}),
    ("com.microsoft", "ReduceSumTraining", [(3, 4)], {1: np.array([1])}, {"keepdims": 1}),
    (
        "com.microsoft",
        "RotaryEmbedding",
        [(1, 2, 4)],
        {1: np.array([[0, 1]]), 2: np.ones((4, 2), np.float32) / 2, 3: np.ones((4, 2), np.float32) / 3},
        {"num_heads": 1},
    ),
    ("com.microsoft", "Scale", [(3, 4), ()], {}, {"scale_down": 1}),
    ("com.microsoft", "SkipLayerNormalization", [(2, 3, 4), (2, 3, 4), (4,), (4,)], {}, {}),
    ("com.microsoft", "SkipSimplifiedLayerNormalization", [(2, 3, 4), (2, 3, 4), (4,)], {}, {}),
    ("com.microsoft", "TransposeMatMul", [(2, 3, 4), (3, 5)], {}, {"transA": 1}),
    ("com.microsoft", "Trilu", [(3, 4)], {}, {"upper": 0}),
    ("com.microsoft", "BiasFastGeluGrad_dX", [(3, 4), (3, 4), (4,)], {}, {}),
    ("com.microsoft", "BiasGeluGrad_dX", [(3, 4), (3, 4), (4,)], {}, {}),
    ("com.microsoft", "ConvGrad", [(1, 3, 3), (1, 2, 5), (3, 2, 3)], {}, {"kernel_shape": [3]}),
    ("com.microsoft", "DivGrad", [(3, 4), (3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "DropoutGrad", [(2, 2)], {1: np.array([[True, False], [True, True]])}, {}),
    ("com.microsoft", "FakeQuantGrad", [(2, 2)], {1: np.array([[True, False], [True, True]])}, {}),
    ("com.microsoft", "FastGeluGrad", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "GatherElementsGrad", [(2, 2)], {1: np.array([3, 2]), 2: np.array([[0, 1], [2, 0]])}, {}),
    ("com.microsoft", "GatherGrad", [(2, 3)], {0: np.array([4, 3]), 1: np.array([1, 1])}, {}),
    ("com.microsoft", "GatherNDGrad", [(2, 3)], {0: np.array([4, 3]), 1: np.array([[1], [1]])}, {}),
    ("com.microsoft", "GeluGrad", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "LeakyReluGrad", [(3, 4)], {1: np.ones((3, 4), np.float32)}, {"alpha": 0.1}),
    ("com.microsoft", "LogSoftmaxGrad", [(3, 4), (3, 4)], {}, {"axis": 1}),
    ("com.microsoft", "LogSoftmaxGrad_13", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "QuickGeluGrad", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "ReluGrad", [(3, 4)], {1: np.ones((3, 4), np.float32)}, {}),
    ("com.microsoft", "ReduceAllL2", [(3, 4), (5,)], {}, {}),
    ("com.microsoft", "ShrunkenGather", [(4, 3)], {1: np.array([1, 3])}, {}),
    ("com.microsoft", "SigmoidGrad", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "SliceGrad", [(2, 3)], {1: np.array([4, 3]), 2: np.array([1]), 3: np.array([3])}, {}),
    ("com.microsoft", "SoftmaxGrad", [(3, 4), (3, 4)], {}, {"axis": 1}),
    ("com.microsoft", "SoftmaxGrad_13", [(3, 4), (3, 4)], {}, {}),
    ("com.microsoft", "SplitTraining", [(4, 3)], {1: np.array([1, 3])}, {"axis": 0}),
    ("com.microsoft", "TanhGrad", [(3, 4), (3, 4)], {}, {}),
    ("ai.onnx.ml", "ArrayFeatureExtractor", [(3, 4)], {1: np.array([0, 2])}, {}),
    ("ai.onnx.ml", "Imputer", [(3, 4)], {}, {"imputed_value_floats": [0.5], "replaced_value_float": 9.0}),
    ("ai.onnx.ml", "LinearRegressor", [(3, 2)], {}, {"coefficients": [0.5, -1.0], "intercepts": [0.1]}),
    ("ai.onnx.ml", "Normalizer", [(3, 4)], {}, {"norm": "L2"}),
    ("ai.onnx.ml", "Scaler", [(3, 2)], {}, {"offset": [0.5, 1.0], "scale": [2.0, 3.0]}),
]
# Operators with a gradient but without a case here, and the reason.
FUSED = "compared with central differences in tests/test_fused_operators.py"
NOT_ASKED = {
    **dict.fromkeys(
        """BiasAdd BiasSplitGelu DecoderMaskedMultiHeadAttention GroupNorm MoE NhwcConv PackedMultiHeadAttention
        QAttention QMoE RelativePositionBias SkipGroupNorm SparseAttention""".split(),
        FUSED,
    ),
    **dict.fromkeys(
        """DequantizeLinear DynamicQuantizeMatMul GatherBlockQuantized MatMulBnb4 MatMulIntegerToFloat MatMulNBits QGemm
        QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid
        QLinearSoftmax QuantizeLinear""".split(),
        QUANTIZED,
    ),
    "AveragePoolGrad": "the gradient of AveragePool, whose own gradients run in tests/test_gradients.py",
    "BatchNormInternal": "what training writes for BatchNormalization; its statistics are state",
    "BatchNormalizationGrad": "needs statistics that only BatchNormInternal makes",
    "ConvTransposeGrad": "made of the same ConvTranspose and Conv as ConvGrad",
    "DynamicQuantizeLSTM": "compared with central differences in the crate ortrain-ops",
    "FakeQuant": "rounds: two runtimes may round a half to different sides",
    "GRUGrad": "needs what only GRUTraining saves",
    "GRUTraining": "a GRU that saves what its gradient needs",
    "Group": "gives a truth value",
    "InPlaceAccumulator": "made of Add and Where",
    "InvertibleLayerNormalizationGrad": "needs the deviation that LayerNormalization makes",
    "IsAllFinite": "gives a truth value",
    "IsFinite": "gives truth values",
    "LSTMGrad": "needs what only LSTMTraining saves",
    "LSTMTraining": "an LSTM that saves what its gradient needs",
    "LayerNormalizationGrad": "needs the mean and deviation that LayerNormalization makes",
    "LinearClassifier": "its first output is a label",
    "MaxPoolGrad": "needs the positions that MaxPool makes",
    "MixedPrecisionScale": "made of Mul and Cast",
    "NegativeLogLikelihoodLossInternal": "NegativeLogLikelihoodLoss with the class to ignore as an input",
    "NegativeLogLikelihoodLossInternal2": "NegativeLogLikelihoodLoss with the class to ignore as an input",
    "PassThrough": "made of Identity",
    "RNNGrad": "needs what only RNNTraining saves",
    "ResizeGrad": "needs the sizes that Resize is given",
    "SimplifiedLayerNormalizationGrad": "needs the deviation that SimplifiedLayerNormalization makes",
    "SoftmaxCrossEntropy": "SoftmaxCrossEntropyLoss of the classic session, compared in the testkit",
    "SoftmaxCrossEntropyGrad": "needs the logarithms that SoftmaxCrossEntropy makes",
    "SoftmaxCrossEntropyLossGrad": "needs the logarithms that SoftmaxCrossEntropyLoss makes",
    "SoftmaxCrossEntropyLossInternal": "SoftmaxCrossEntropyLoss with the class to ignore as an input",
    "SoftmaxCrossEntropyLossInternalGrad": "needs the logarithms that SoftmaxCrossEntropyLossInternal makes",
    "SparseSoftmaxCrossEntropy": "SoftmaxCrossEntropyLoss of the classic session, compared in the testkit",
    "SparseSoftmaxCrossEntropyGrad": "needs the logarithms that SparseSoftmaxCrossEntropy makes",
    "View": "made of Slice and Reshape",
    "ZeroGradient": "gives zeros",
}


def own_model(own: Own) -> Question:
    """Return a node of a domain as a model; the float inputs of the node are inputs of the model."""
    domain, op, shapes, others, attributes = own
    floats = iter(values(np.float32, *shape, seed=k, low=0.5, high=1.5) for k, shape in enumerate(shapes))
    names, feeds, constants = [], {}, []
    for position in range(len(shapes) + len(others)):
        name = f"x{position}"
        value = others.get(position)
        names.append("" if position in others and value is None else name)
        if value is not None:
            constants.append(numpy_helper.from_array(value, name))
        elif position not in others:
            feeds[name] = next(floats)
    outputs = ["y", "z"] if op in ("SplitTraining", "ConvGrad", "DivGrad") else ["y"]
    node = helper.make_node(op, names, outputs, "the_node", domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "own",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        constants,
    )
    imports = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    for info, result in zip(model.graph.output, ortrain.InferenceSession(model).run(None, feeds), strict=True):
        info.CopyFrom(helper.make_tensor_value_info(info.name, TensorProto.FLOAT, result.shape))
    operator = OPERATORS[domain or "ai.onnx", op]
    wrt = [
        name
        for k, name in enumerate(names)
        if name in feeds and (operator.gradient == "full" or k in operator.gradient_inputs)
    ]
    return Question(model, feeds, outputs, wrt)


@pytest.mark.parametrize("own", OTHERS, ids=lambda own: own[1])
def test_operators_of_other_domains(own: Own) -> None:
    """In plain ONNX the node is decomposed, and the model imports ai.onnx only."""
    asked = own_model(own)
    check(own[1], asked)
    kept = grad(asked.model, of=asked.of, wrt=asked.wrt, plain=False)
    wanted = ortrain.InferenceSession(kept).run(None, asked.feeds)
    made = ortrain.InferenceSession(grad(asked.model, of=asked.of, wrt=asked.wrt)).run(None, asked.feeds)
    for got, want in zip(made, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=CANCELLED)


def test_all_operators_are_asked_or_have_a_reason() -> None:
    asked = {op for _, op, *_ in OTHERS}
    others = {name for (_, name), operator in OPERATORS.items() if not operator.standard}
    assert others - asked == NOT_ASKED.keys()


# A central difference with this step has an error of about 1e-10 in float64.
STEP = 1e-6
# Operators without a comparison to central differences, and the reason.
NO_DIFFERENCES = {
    "Dropout": "what it drops in training is a matter of chance",
}


@pytest.mark.parametrize("op", sorted(set(node_cases()) & set(STANDARD)))
def test_vjp_equals_differences(op: str) -> None:
    """Compare in float64, along a random direction for each input, with random output gradients."""
    if op in NO_DIFFERENCES:
        return
    for name in node_cases()[op]:
        case = cases()[0][name]
        model = ModelProto()
        model.CopyFrom(case.model)
        positions = positions_of(case)
        kept = {value.name for k, value in enumerate(model.graph.input) if positions[k] & FIXED_TYPE}
        retype(model.graph, kept)
        given, results = (arrays_of(part) for part in case.data_sets[0])
        trained, compared = questions()[name]
        feeds = {}
        for info, array in zip(list(model.graph.input), given, strict=True):
            floats = array.dtype.kind not in "biu" and info.name not in kept
            feeds[info.name] = array.astype(np.float64) if floats else array
        wrt = [model.graph.input[k].name for k in trained]
        of = [model.graph.output[k].name for k in compared]
        for info in [info for info in model.graph.input if info.name not in wrt]:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(feeds.pop(info.name)), info.name))
            model.graph.input.remove(info)
        rng = np.random.default_rng(4)
        seeds = {f"{y}_grad": rng.uniform(0.5, 1.5, results[k].shape) for y, k in zip(of, compared, strict=True)}
        forward, backward = ortrain.InferenceSession(model), ortrain.InferenceSession(vjp(model, of=of, wrt=wrt))
        if compare(forward, backward, of, feeds, seeds, rng):
            return
    raise AssertionError("no case is smooth")


def compare(
    forward: ortrain.InferenceSession,
    backward: ortrain.InferenceSession,
    of: list[str],
    start: dict[str, np.ndarray],
    seeds: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> bool:
    """Return True if a smooth point near the start was found, after asserting correct gradients there."""
    left = set(start)
    for move in range(MOVES):
        feeds = {name: moved(value, move, rng) for name, value in start.items()}

        def total(at: dict[str, np.ndarray]) -> float:
            results = forward.run(of, at)
            return float(sum((seed * result).sum() for seed, result in zip(seeds.values(), results, strict=True)))

        here = total(feeds)
        if not np.isfinite(here):
            continue
        names = [f"{name}_grad" for name in feeds]
        gradients = dict(zip(feeds, backward.run(names, feeds | seeds), strict=True))
        for name in sorted(left):
            direction = rng.uniform(-1, 1, feeds[name].shape)
            slopes = [
                (total(feeds | {name: feeds[name] + step * direction}) - here) / step for step in (STEP, -2 * STEP)
            ]
            found, wanted = float((gradients[name] * direction).sum()), (2 * slopes[0] + slopes[1]) / 3
            scale = np.abs(gradients[name] * direction).sum() + abs(wanted)
            noise = NOISE * max(abs(here), 1)
            if not abs(slopes[0] - slopes[1]) <= SMOOTH * scale + noise < np.inf:
                continue
            assert abs(found - wanted) <= DIFFERENCES * scale + noise, f"{name}: {found} instead of {wanted}"
            left.discard(name)
        if not left:
            return True
    return False
