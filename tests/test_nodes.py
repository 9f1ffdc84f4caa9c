"""The node tests of ONNX for every operator of ortrain, on all backends."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import DEVICES, GPU
from onnx import TensorProto, helper
from onnx.backend.test.loader import load_model_tests

import ortrain

# Operators that the standard's domain has here only for files of onnxruntime or of older exporters.
WITHOUT_CASES = frozenset(
    """AveragePoolGrad GlobalLpPool MaxPoolGrad SimplifiedLayerNormalization SparseSoftmaxCrossEntropy
    SparseSoftmaxCrossEntropyGrad""".split()
)
OPERATORS = frozenset(row.name for row in ortrain.operators() if row.domain == "ai.onnx") - WITHOUT_CASES
# Element types without support in ortrain: a model with one of these types is an error that names the type.
UNSUPPORTED_TYPES = frozenset("STRING sequence optional".split())
# Number of cases with an unsupported type, by type. A case cannot leave the required cases unnoticed.
UNSUPPORTED_CASES = {
    "STRING": 2,
    "sequence": 3,
    "optional": 2,
    "optional sequence": 1,
}
# Minimum number of cases that must pass.
MIN_CASES = 1759
# Oldest operator set of a model that ortrain reads. The cases of Not state an older one, but Not never changed.
OLDEST_OPSET = 7
# Cases with random outputs: any mask is correct.
RANDOM = frozenset(
    {
        "test_training_dropout",
        "test_training_dropout_default",
        "test_training_dropout_default_mask",
        "test_training_dropout_mask",
    }
)
# Relative tolerance for functions in narrow float types: two units in the last place. The expected values are rounded
# between the nodes of the function; nodes that run as one skip this rounding.
BETWEEN_NODES = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# Tolerance of sums with cancelling terms, by operator, relative to the largest output. The small results are rounding
# errors, in ortrain and in the expected values.
CANCELLING = {"DFT": 1e-6}
# Cases that GPUs reject by name: matrix products and exponentials in float64, for example in softmax.
IN_FLOAT64 = frozenset(
    {
        "test_attention_local_window_gqa_rank4_mask",
        "test_attention_local_window_gqa_rank4_mask_expanded",
        "test_einsum_batch_matmul",
        "test_flexattention_double_expanded_ver26",
        "test_reduce_log_sum_exp_default_axes_keepdims_example",
        "test_reduce_log_sum_exp_default_axes_keepdims_example_expanded",
        "test_reduce_log_sum_exp_default_axes_keepdims_random",
        "test_reduce_log_sum_exp_default_axes_keepdims_random_expanded",
        "test_reduce_log_sum_exp_do_not_keepdims_example",
        "test_reduce_log_sum_exp_do_not_keepdims_example_expanded",
        "test_reduce_log_sum_exp_do_not_keepdims_random",
        "test_reduce_log_sum_exp_do_not_keepdims_random_expanded",
        "test_reduce_log_sum_exp_keepdims_example",
        "test_reduce_log_sum_exp_keepdims_example_expanded",
        "test_reduce_log_sum_exp_keepdims_random",
        "test_reduce_log_sum_exp_keepdims_random_expanded",
        "test_reduce_log_sum_exp_negative_axes_keepdims_example",
        "test_reduce_log_sum_exp_negative_axes_keepdims_example_expanded",
        "test_reduce_log_sum_exp_negative_axes_keepdims_random",
        "test_reduce_log_sum_exp_negative_axes_keepdims_random_expanded",
    }
)
# Tolerance in standard deviations. Dropout keeps each element with probability 1 - ratio, so the share of remaining
# elements is random.
DEVIATIONS = 5


def types_of(graph: onnx.GraphProto) -> set[str]:
    """Return the element types of the values of a graph, with its subgraphs."""
    found: set[str] = set()
    for value in [*graph.input, *graph.output, *graph.value_info]:
        kind = value.type.WhichOneof("value")
        if kind == "tensor_type":
            found.add(TensorProto.DataType.Name(value.type.tensor_type.elem_type))
        elif kind is not None:
            found.add(kind.removesuffix("_type"))
    for tensor in graph.initializer:
        found.add(TensorProto.DataType.Name(tensor.data_type))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found |= types_of(attribute.g)
            elif attribute.type == onnx.AttributeProto.TENSOR:
                found.add(TensorProto.DataType.Name(attribute.t.data_type))
    return found


@cache
def suite() -> list[Any]:
    """Return every case of the operators of ONNX itself, with operator sets of at least `OLDEST_OPSET`."""
    with warnings.catch_warnings():
        # `load_model_tests` computes the expected values, overflows included.
        warnings.simplefilter("ignore")
        listed = load_model_tests(kind="node")
    own = [case for case in listed if all(not node.domain for node in case.model.graph.node)]
    for case in own:
        for opset in case.model.opset_import:
            opset.version = max(opset.version, OLDEST_OPSET if not opset.domain else 1)
    return own


def operators_of(case: Any) -> set[str]:
    """Return the operators of a case."""
    return {node.op_type for node in case.model.graph.node}


@cache
def cases() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cases of our operators by name: the required cases, and the cases with unsupported types."""
    supported: dict[str, Any] = {}
    unsupported: dict[str, Any] = {}
    for case in suite():
        if operators_of(case) <= OPERATORS:
            (unsupported if types_of(case.model.graph) & UNSUPPORTED_TYPES else supported)[case.name] = case
    return supported, unsupported


@cache
def missing() -> dict[str, Any]:
    """Return the cases with unsupported operators, by name."""
    return {case.name: case for case in suite() if not operators_of(case) <= OPERATORS}


def arrays(values: list[Any]) -> list[np.ndarray]:
    """Return values as arrays; some values are tensor messages."""
    return [onnx.numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in values]


def test_every_operator_has_cases() -> None:
    found = {node.op_type for case in cases()[0].values() for node in case.model.graph.node}
    assert found == OPERATORS
    assert set(cases()[0]) >= RANDOM


def test_every_case_runs_or_has_a_reason() -> None:
    """Every case of ONNX's own operators is supported, has an unsupported type, or has an unsupported operator."""
    supported, unsupported = cases()
    by_type = Counter(" ".join(sorted(types_of(case.model.graph) & UNSUPPORTED_TYPES)) for case in unsupported.values())
    assert by_type == UNSUPPORTED_CASES
    assert len({case.name for case in suite()}) == len(suite())
    assert len(supported) + by_type.total() + len(missing()) == len(suite())
    assert len(supported) >= MIN_CASES


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("name", sorted(set(cases()[0]) - RANDOM))
def test_node(name: str, backend: str) -> None:
    case = cases()[0][name]
    attends = any(node.op_type == "Attention" for node in case.model.graph.node)
    session = ortrain.InferenceSession(case.model, providers=[backend])
    for inputs, outputs in [(arrays(inputs), arrays(outputs)) for inputs, outputs in case.data_sets]:
        if backend == GPU and name in IN_FLOAT64:
            feeds = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
            with pytest.raises(ortrain.UnsupportedError, match="float64, which this device does not support"):
                session.run(None, feeds)
            continue
        feeds = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
        results = session.run(None, feeds)
        assert len(results) == len(outputs)
        for got, want in zip(results, outputs, strict=True):
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            wide = np.float64 if got.dtype.kind not in "biu" else got.dtype
            # Attention runs several nodes as one.
            several = attends or len(case.model.graph.node) > 1
            rtol = max(case.rtol, BETWEEN_NODES.get(got.dtype.name, 0.0) if several else 0.0)
            share = max(CANCELLING.get(operator, 0.0) for operator in operators_of(case))
            atol = max(case.atol, share * float(np.abs(want).max())) if share else case.atol
            np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=rtol, atol=atol, strict=True)


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_node(name: str, backend: str) -> None:
    case = cases()[0][name]
    session = ortrain.InferenceSession(case.model, providers=[backend])
    for inputs, outputs in [(arrays(inputs), arrays(outputs)) for inputs, outputs in case.data_sets]:
        x = inputs[0]
        ratio = inputs[1] if len(inputs) > 1 and inputs[1].dtype != np.bool_ else np.float32(0.5)
        feeds = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
        results = session.run(None, feeds)
        assert [got.shape for got in results] == [want.shape for want in outputs]
        kept = results[1] if len(results) > 1 else results[0] != 0
        np.testing.assert_allclose(results[0], np.where(kept, x / (1 - ratio), 0), rtol=case.rtol)


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.75])
def test_dropout_statistics(ratio: float, backend: str) -> None:
    """Remaining elements are scaled by 1 / (1 - ratio). Their share is about 1 - ratio in total and on each axis."""
    shape = [64, 256]
    node = helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"])
    graph = helper.make_graph(
        [node],
        "dropout",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("mask", TensorProto.BOOL, shape),
        ],
        [
            helper.make_tensor("ratio", TensorProto.FLOAT, [], [ratio]),
            helper.make_tensor("training", TensorProto.BOOL, [], [True]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y, mask = ortrain.InferenceSession(model, providers=[backend]).run(None, {"x": x})
    assert mask.dtype == np.bool_
    np.testing.assert_allclose(y, np.where(mask, x / np.float32(1 - ratio), 0), rtol=1e-6)
    for axis in (None, 0, 1):
        share = mask.mean(axis=axis)
        count = mask.size / np.size(share)
        assert np.abs(share - (1 - ratio)).max() < DEVIATIONS * np.sqrt(ratio * (1 - ratio) / count)


@pytest.mark.parametrize("name", sorted(cases()[1]))
def test_unsupported_type_is_refused(name: str) -> None:
    with pytest.raises((ortrain.UnsupportedError, ortrain.InvalidModelError), match=r"type|[Ss]equence|Optional"):
        ortrain.InferenceSession(cases()[1][name].model)


@pytest.mark.parametrize("name", sorted(missing()))
def test_missing_operator_is_refused(name: str) -> None:
    """The error names the operator, or the type if the model also has an unsupported type."""
    case = missing()[name]
    with pytest.raises((ortrain.UnsupportedError, ortrain.InvalidModelError)) as refused:
        ortrain.InferenceSession(case.model)
    words = operators_of(case) - OPERATORS
    if types_of(case.model.graph) & UNSUPPORTED_TYPES:
        words |= {"type", "sequence", "Sequence", "Optional"}
    assert any(word in str(refused.value) for word in words)
