"""The gradient of every operator as plain ONNX: in each opset, by the checker, and beside two other runtimes.

Nodes are those of `test_versions.py` in the words of an opset, and the node cases of ONNX; operators of other domains are
written here.
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
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from opsets import has
from test_gradients import FIXED_TYPE, WITHOUT, is_exception, questions
from test_nodes import arrays as arrays_of
from test_nodes import cases
from test_versions import CASES, NEWEST_OF_ONNXRUNTIME, GlobalLpPool

import ortrain
from ortrain.gradient import grad

# Opsets in which what gradients are made of changed, the oldest and the newest that onnxruntime reads.
OPSETS = (7, 9, 10, 11, 13, 16, 18, 20, NEWEST_OF_ONNXRUNTIME)
# How many cases of an operator are taken in each opset, and of the standard's.
MOST = 3
# What two runtimes may differ by in float32: relative to the largest element of a gradient, and what is left where large
# parts of it cancel, of numbers of magnitude 1.
TOLERANCE, CANCELLED = 1e-4, 1e-5
# onnxruntime logs errors only.
ERRORS = 3

OPERATORS = {
    (operator.domain, operator.name): operator
    for operator in ortrain.operators()
    if operator.gradient in ("full", "partial")
}
STANDARD = sorted(name for (_, name), operator in OPERATORS.items() if operator.standard)
# The oldest opset that has words for a gradient, where that is not the operator's own: before, nothing says the positions
# of maxima, or writes to positions.
LEAST = {"MaxPool": 9, "GlobalMaxPool": 9, "TopK": 9, "ReduceProd": 9}
# Operators whose gradients onnxruntime has no kernel for.
NOT_IN_ONNXRUNTIME: dict[str, str] = {}
# Operators whose gradients the standard's reference evaluator does not compute, with the newest opset it holds for.
NOT_IN_REFERENCE: dict[str, tuple[int, str]] = {}
ALWAYS = 99


def evaluated(op: str, opset: int, model: bytes, feeds: dict[str, np.ndarray]) -> Iterator[tuple[str, Any]]:
    """What onnxruntime and the standard's reference evaluator compute."""
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
    """A node as a model, its inputs, and between what gradients go."""

    model: ModelProto
    feeds: dict[str, np.ndarray]
    of: list[str]
    wrt: list[str]

    @property
    def opset(self) -> int:
        return next(int(item.version) for item in self.model.opset_import if item.domain == "")


def question(given: ModelProto, feeds: dict[str, Any]) -> Question | None:
    """A node whose inputs of integers are constants, as in most models; nothing if no gradient of float32 goes through."""
    model = copy.deepcopy(given)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(nodes) != 1:
        return None
    (node,) = nodes
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
        if arrays[info.name].dtype.kind == "f":
            model.graph.input.append(info)
        else:
            model.graph.initializer.append(numpy_helper.from_array(arrays.pop(info.name), info.name))
    for info in model.graph.output:
        # The checker wants a shape, be it of unknown sizes.
        if not info.type.tensor_type.HasField("shape"):
            (result,) = ortrain.InferenceSession(model).run([info.name], arrays)
            info.type.CopyFrom(helper.make_tensor_type_proto(info.type.tensor_type.elem_type, result.shape))
    return Question(model, arrays, of, wrt)


def in_words(op: str, opset: int) -> Iterator[Question]:
    """Nodes of an operator in the words of an opset."""
    for case in CASES[op](opset):
        inputs = {name: (array.dtype, array.shape) for name, array in case.inputs.items()}
        asked = question(case.words.model(case.words.graph(inputs, case.outputs)), case.inputs)
        if asked is not None:
            yield asked


@cache
def node_cases() -> dict[str, list[str]]:
    """Cases of the standard, by operator."""
    found: dict[str, list[str]] = {}
    for name in sorted(questions()):
        case = cases()[0][name]
        if len(case.model.graph.node) == 1 and not case.model.functions and not is_exception(name):
            found.setdefault(case.model.graph.node[0].op_type, []).append(name)
    return found


def of_standard(op: str) -> Iterator[Question]:
    for name in node_cases().get(op, []):
        case = cases()[0][name]
        given = arrays_of(case.data_sets[0][0])
        asked = question(case.model, dict(zip([value.name for value in case.model.graph.input], given, strict=True)))
        if asked is not None:
            yield asked


def check(op: str, asked: Question, plain_domains: frozenset[str] = frozenset({""})) -> None:
    """Our gradient is plain ONNX of the model's opset, right for the checker, and the same in three runtimes."""
    made = grad(asked.model, of=asked.of, wrt=asked.wrt)
    message = onnx.load_from_string(made)
    assert {node.domain for node in message.graph.node} <= plain_domains
    assert [(item.domain, item.version) for item in message.opset_import] == [("", asked.opset)]
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
    for asked in itertools.islice(in_words(op, opset), MOST):
        if opset < LEAST.get(op, 0):
            sentence = f"needs? opset {LEAST[op]} or newer; raise the opset of the model"
            with pytest.raises(ortrain.UnsupportedError, match=sentence):
                grad(asked.model, of=asked.of, wrt=asked.wrt)
        else:
            check(op, asked)


@pytest.mark.parametrize("op", STANDARD)
def test_cases_of_the_standard(op: str) -> None:
    for asked in itertools.islice(of_standard(op), MOST):
        check(op, asked)


# Operators with a gradient that neither has nodes of in float32, and why.
WITHOUT_CASES: dict[str, str] = {}


def test_every_operator_is_asked() -> None:
    """In some opset, by a case of its own."""
    without = {
        op
        for op in STANDARD
        if next(of_standard(op), None) is None
        and not any(next(in_words(op, opset), None) for opset in OPSETS if op in CASES and has(op, opset))
    }
    assert without == WITHOUT_CASES.keys()
    assert NOT_IN_ONNXRUNTIME.keys() | NOT_IN_REFERENCE.keys() | LEAST.keys() <= set(STANDARD)
