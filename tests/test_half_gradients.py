"""Gradients of every operator in float16 and bfloat16, compared with gradients in float64.

Parameters are float64 numbers that the half type represents exactly. A ``Cast`` to the half type precedes the node and
a ``Cast`` to float64 follows each result. Both models get the same numbers and differ in the type of the node.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_recurrent
from onnx import ModelProto, TensorProto, helper, numpy_helper
from test_gradient_operators import FUSED, NOT_ASKED, OPERATORS, OTHERS, QUANTIZED, own_model
from test_gradients import FIXED_TYPE, is_exception, original, positions_of, questions, retype
from test_nodes import arrays, cases
from training_nodes import Node, floats, nodes
from weighted_outputs import add_loss

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module

HALVES = {"float16": (TensorProto.FLOAT16, 2.0**-11), "bfloat16": (TensorProto.BFLOAT16, 2.0**-8)}
# Bound of errors, in units of the half type's rounding (2^-11 and 2^-8) of the largest element of a gradient. A node
# rounds its result, its output gradient and its input gradient, and some nodes round in between.
ROUNDINGS = 8
# Operators with cancellation in their gradients, and the cancelling terms.
CANCELLING = {
    "Attention": "the gradient of a softmax, as below",
    "BatchNormalizationGrad": "subtracts means",
    "BiasFastGeluGrad_dX": "sums terms of either sign",
    "BiasGeluGrad_dX": "sums terms of either sign",
    "DivGrad": "sums quotients of either sign",
    "EmbedLayerNormalization": "subtracts means",
    "FusedGemm": "1 - y * y of a stored y",
    "GRU": "1 - y * y of a stored y",
    "LSTM": "1 - y * y of a stored y",
    "LpNormalization": "subtracts the part along the norm",
    "MultiHeadAttention": "the gradient of a softmax, as below",
    "RNN": "1 - y * y of a stored y",
    "ReduceLogSumExp": "exp(x - y) of a stored y",
    "SoftmaxCrossEntropyGrad": "y * (g - sum(g * y)) of a stored y",
    "SoftmaxCrossEntropyLossGrad": "y * (g - sum(g * y)) of a stored y",
    "SoftmaxCrossEntropyLossInternalGrad": "y * (g - sum(g * y)) of a stored y",
    "SparseSoftmaxCrossEntropyGrad": "y * (g - sum(g * y)) of a stored y",
}
CANCELLED = 40
# Smallest size that an error is compared with: gradients of saturated recurrent layers, and of masks with gradients
# that sum to zero, are smaller. Weights of results are about 1.
VANISHING = 0.05
# The largest number of float16.
BEYOND = 65504.0
# Size below which a gradient counts as zero, and the bound of its error in roundings.
ZERO, ROUNDED_ZERO = 1e-9, 64
# Maximum number of questions for an operator; ORTRAIN_CONFORM=1 asks all of them.
MAX_QUESTIONS = 6
# Cases in the syntax of opsets that do not know bfloat16.
OLDER_THAN_BFLOAT16 = {"test_dropout_random_old", "test_loop11", "test_upsample_nearest"}
# Operators with a gradient in half types.
DIFFERENTIABLE = {
    operator.name
    for operator in OPERATORS.values()
    if any(half in types for types in operator.types for half in HALVES)
}
# Operators without a question, and the reason.
LEFT_OUT = {
    **{name: reason for name, reason in NOT_ASKED.items() if reason in (FUSED, QUANTIZED) and name in DIFFERENTIABLE},
    **dict.fromkeys(
        DIFFERENTIABLE & {"DynamicQuantizeLSTM", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"}, QUANTIZED
    ),
    "Cast": "is part of every question",
    "ConvTransposeGrad": "made of ConvTranspose and Conv",
    "Group": "gives a truth value",
    "InPlaceAccumulator": "made of Add and Where",
    "IsAllFinite": "gives a truth value",
    "IsFinite": "gives truth values",
    "LinearClassifier": "made of Gemm and Softmax",
    "MaxPoolGrad": "reads the shape of another node's input",
    "MixedPrecisionScale": "made of Mul and Cast",
    "PassThrough": "made of Identity",
    "RNNGrad": "made of what the gradient of RNN is made of",
    "ResizeGrad": "the gradient of Resize",
    "Scatter": "the name of ScatterElements before opset 11",
    "Unique": "made of Gather",
    "View": "made of Slice and Reshape",
    "ZeroGradient": "gives zeros",
}


@dataclass
class Question:
    """A model without a loss, its inputs, and the names of its trained inputs."""

    name: str
    model: ModelProto
    values: dict[str, np.ndarray]
    trained: list[str]
    float32_inputs: frozenset[str] = frozenset()
    """Inputs that are float32 for every type of data."""


def of_node_tests() -> Iterator[tuple[str, Question]]:
    """Yield the cases of ONNX with a gradient and one operator."""
    for name, (trained, _) in questions().items():
        case = cases()[0][name]
        operators = {node.op_type for node in case.model.graph.node}
        if len(operators) > 1 or original(name).name != name or is_exception(name):
            continue
        inputs = list(case.model.graph.input)
        positions = positions_of(case)
        values = {value.name: array for value, array in zip(inputs, arrays(case.data_sets[0][0]), strict=True)}
        kept = frozenset(value.name for k, value in enumerate(inputs) if positions[k] & FIXED_TYPE)
        yield operators.pop(), Question(name, case.model, values, [inputs[k].name for k in trained], kept)


def of_nodes() -> Iterator[tuple[str, Question]]:
    """Yield the nodes of training graphs."""
    for node in nodes():
        feeds = node.feeds()
        trained = [name for name, array in feeds.items() if array.dtype == np.float32 and array.size]
        yield node.op, Question(node.key, node.model(), feeds, trained)


def of_recurrent_layers() -> Iterator[tuple[str, Question]]:
    """Yield recurrent layers with each function and ``clip``."""
    for op, functions, direction in itertools.product(
        test_recurrent.GATES, test_recurrent.FUNCTIONS, ("forward", "bidirectional")
    ):
        count = 2 if direction == "bidirectional" else 1
        attributes: dict[str, Any] = {"direction": direction, **test_recurrent.OPTIONS[op][-1]}
        chosen = test_recurrent.FUNCTIONS[functions]
        if functions == "others":
            names = ("activations", "activation_alpha", "activation_beta")
            attributes |= {name: values * count for name, values in zip(names, chosen[op], strict=True)}
        else:
            attributes |= dict(chosen)
        content, feeds = test_recurrent.model(op, [True, False, True, True, op == "LSTM"], attributes)
        trained = [name for name, array in feeds.items() if array.dtype == np.float32]
        model = ModelProto.FromString(content)
        yield op, Question(f"{op} {functions} {direction}", model, feeds, trained)


def of_other_domains() -> Iterator[tuple[str, Question]]:
    """Yield nodes without cases in ONNX and in the record of training graphs."""
    for own in OTHERS:
        asked = own_model(own)
        yield own[1], Question(f"{own[1]} of {own[0]}", asked.model, asked.feeds, asked.wrt)
    x = floats(2, 3, 4, 4)
    pool = Node("GlobalLpPool", "p 2", [x], attributes={"p": 2}, domain="", shapes=[[2, 3, 1, 1]])
    yield pool.op, Question(pool.key, pool.model(), pool.feeds(), ["x0"])


@cache
def by_operator() -> dict[str, list[Question]]:
    """Return the questions of each operator with a gradient."""
    found: dict[str, list[Question]] = {}
    for op, question in itertools.chain(of_recurrent_layers(), of_other_domains(), of_nodes(), of_node_tests()):
        if op in DIFFERENTIABLE - LEFT_OUT.keys():
            found.setdefault(op, []).append(question)
    return found if os.environ.get("ORTRAIN_CONFORM") else {op: spaced(asked) for op, asked in found.items()}


def spaced(asked: list[Question]) -> list[Question]:
    """Return a few evenly spaced questions, with the first and the last."""
    places = np.linspace(0, len(asked) - 1, min(MAX_QUESTIONS, len(asked)))
    return [asked[round(place)] for place in places]


def opset_of(model: ModelProto) -> Any:
    (found,) = [opset for opset in model.opset_import if not opset.domain]
    return found


def write_artifacts(model: ModelProto, trained: list[str], folder: Path) -> None:
    """Write the artifacts of a model, raising its opset if necessary, for the inputs that the loss depends on."""
    parameters = [f"{name} in float64" for name in trained]
    while parameters:
        try:
            artifacts.generate_artifacts(
                model,
                requires_grad=parameters,
                artifact_directory=folder,
                batch_norm="freeze",
                quantized="freeze",
            )
            return
        except ortrain.UnsupportedError as error:
            needed = re.search(r"needs? opset (\d+) or newer", str(error))
            if needed is None or opset_of(model).version >= int(needed[1]):
                raise
            opset_of(model).version = int(needed[1])
        except ortrain.InvalidArgumentError as error:
            refused = re.search(r'"([^"]+)" cannot be trained: ', str(error))
            if refused is None:
                raise
            parameters.remove(refused[1])


def gradients(
    question: Question,
    half: str,
    dtype: int,
    results: list[np.ndarray],
    folder: Path,
) -> dict[str, np.ndarray]:
    """Return the gradients of a question with its node in a float type; the loss weights each float result."""
    model = ModelProto()
    model.CopyFrom(question.model)
    graph = model.graph
    for each in dict.fromkeys([HALVES[half][0], dtype]):
        retype(graph, set(question.float32_inputs), each)
    del graph.input[:]
    casts = []
    for name, value in rounded(question, half).items():
        if name in question.trained:
            graph.initializer.append(numpy_helper.from_array(value, f"{name} in float64"))
            casts.append(helper.make_node("Cast", [f"{name} in float64"], [name], to=dtype))
            continue
        if value.dtype.kind not in "biu" and name not in question.float32_inputs:
            value = value.astype(helper.tensor_dtype_to_np_dtype(dtype))
        graph.initializer.append(numpy_helper.from_array(value, name))
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*casts, *own])
    rng = np.random.default_rng(1)
    weighted = []
    for output, result in zip(graph.output, results, strict=True):
        if output.type.tensor_type.elem_type != dtype or not result.size or not np.isfinite(result).all():
            continue
        wide, weights = f"{output.name} in float64", f"weights of {output.name}"
        factors = np.asarray(rng.integers(8, 24, result.shape) / 16)
        graph.initializer.append(numpy_helper.from_array(factors, weights))
        graph.node.append(helper.make_node("Cast", [output.name], [wide], to=TensorProto.DOUBLE))
        weighted.append((wide, weights))
    add_loss(graph, weighted, TensorProto.DOUBLE)
    folder.mkdir()
    write_artifacts(model, question.trained, folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    module()
    return {name.removesuffix(" in float64"): np.array(value.grad) for name, value in state.parameters.items()}


def rounded(question: Question, half: str) -> dict[str, np.ndarray]:
    """Return the inputs, with floats as float64 numbers that the half type represents."""
    dtype = helper.tensor_dtype_to_np_dtype(HALVES[half][0])
    return {
        name: value
        if value.dtype.kind in "biu" or name in question.float32_inputs
        else value.astype(dtype).astype(np.float64)
        for name, value in question.values.items()
    }


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", sorted(by_operator()))
def test_gradient(op: str, half: str, tmp_path: Path) -> None:
    dtype, rounding = HALVES[half]
    asked = by_operator()[op]
    if half == "bfloat16":
        asked = [question for question in asked if question.name not in OLDER_THAN_BFLOAT16]
    compared = 0
    for k, question in enumerate(asked):
        results = ortrain.InferenceSession(question.model).run(None, question.values)
        with np.errstate(all="ignore"):
            wanted = gradients(question, half, TensorProto.DOUBLE, results, tmp_path / f"{k} in float64")
            found = gradients(question, half, dtype, results, tmp_path / f"{k} in {half}")
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            # Larger gradients are infinite in float16.
            finite = np.abs(want) < BEYOND
            largest = np.abs(want[finite]).max(initial=0)
            if largest < ZERO:
                bound = ROUNDED_ZERO * rounding
            elif op in CANCELLING:
                bound = CANCELLED * rounding * max(largest, VANISHING)
            else:
                bound = ROUNDINGS * rounding * largest
            error = np.abs(found[name][finite] - want[finite]).max(initial=0)
            assert error <= bound, f"{question.name}, {name}: {error} of {largest}\n{found[name]}\n{want}"
            compared += largest >= ZERO
    assert compared or not asked


def test_every_operator_is_asked() -> None:
    """Every operator with a gradient that takes a half type has a question."""
    assert DIFFERENTIABLE - by_operator().keys() == LEFT_OUT.keys()
