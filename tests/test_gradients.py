"""Gradients of every node test of ONNX, against central differences.

Each case of an operator with a derivative is trained once in float64. Its float inputs are the parameters, and the loss
is the sum of its float outputs times fixed numbers. Along one random direction for each input, the gradient must equal
the change of the loss. Points are moved until the loss is smooth around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper
from test_nodes import RANDOM, arrays, cases
from weighted_outputs import add_loss

from ortrain import artifacts
from ortrain.api import CheckpointState, Module

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
# A central difference with this step has an error of about 1e-10 in float64, relative to the summed terms.
STEP = 1e-6
# Error of a difference with this step in float64, relative to the sum of its terms.
TOLERANCE = 3e-6
# Error of a difference by the rounding of losses, relative to the loss.
NOISE = 1e-7
# Maximum difference between the slopes on both sides of a smooth point.
SMOOTH = 1e-3
# Number of moves before a point counts as a kink.
MOVES = 8
# Operators with a derivative of zero, and operators with an output that does not depend on the values of their inputs.
FLAT = frozenset("Ceil Floor Round Sign Hardmax EyeLike Range ConstantOfShape BitCast".split())
# Inputs without a gradient, and the reason.
WITHOUT = {
    ("BatchNormalization", 3): "running statistics are state",
    ("BatchNormalization", 4): "running statistics are state",
    ("CastLike", 1): "of which the type counts alone",
    ("Dropout", 1): "how many elements are dropped is a matter of chance",
    ("NegativeLogLikelihoodLoss", 2): "weights of classes are constants",
    ("OneHot", 0): "indices",
    ("OneHot", 1): "a size",
    ("Resize", 1): "the region is a constant",
    ("SoftmaxCrossEntropyLoss", 2): "weights of classes are constants",
}
# The same, for the cases with a matching name only.
WITHOUT_IN = {(r"gridsample.*nearest", "GridSample", 1): "the nearest element stays the nearest"}
# Inputs with a fixed type, independent of the other inputs.
FIXED_TYPE = {("Resize", 2), ("Upsample", 1)}
# Cases that are not compared, by a pattern of their names, and the reason.
EXCEPTIONS = {
    r"dequantizelinear_(e4m3fn|e5m2|float4e2m1|u?int[24]$)": "the elements have no arithmetic: test_small_types.py",
    r"test_dynamicquantizelinear": "the scale passes no gradient: test_quantized_gradients.py",
    r"affine_grid_.*_expanded": "the body of the function chooses between ranks when it runs",
    r"attention_.*(fullymasked|nan_robustness|structural_empty|kv_bf16|mode3_softmax|rank4_mask).*_expanded": (
        "the body of the function computes what is no number where every key is masked, and chooses another afterwards"
    ),
    r"dropout_default": "training switches every Dropout on",
    r"rotary_embedding_.*interleaved.*_expanded": "the body of the function computes axes when it runs",
    r"test_scan_sum": "the Scan of opset 8 cannot say the gradient of a loop, which is refused",
    r"test_scatter_with": "before opset 11 nothing says the gradient of Scatter, which is refused",
    r"test_unique": "of equal elements that are moved there are more different ones: the shape changes",
}


def original(name: str) -> Any:
    """Return the case of the operator itself for a case that runs the body of its function."""
    return cases()[0].get(re.sub(r"_expanded.*$", "", name), cases()[0][name])


def graphs_of(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


def positions_of(case: Any) -> dict[int, set[tuple[str, int]]]:
    """Return the operators and input positions at which each input of a case is used."""
    graph = case.model.graph
    names = [value.name for value in graph.input]
    found: dict[int, set[tuple[str, int]]] = {k: set() for k in range(len(names))}
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in names:
                found[names.index(name)].add((node.op_type, position))
    return found


def is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())


def retyped(tensor: TensorProto, dtype: int) -> TensorProto:
    """Return the tensor with its elements in another float type."""
    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
    return numpy_helper.from_array(array, tensor.name)


def retype(graph: GraphProto, kept: set[str], dtype: int = TensorProto.DOUBLE) -> None:
    """Replace every float type of a graph by one type."""
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type in FLOATS and value.name not in kept:
            value.type.tensor_type.elem_type = dtype
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS and tensor.name not in kept:
            tensor.CopyFrom(retyped(tensor, dtype))
    for node in graph.node:
        if node.op_type == "LayerNormalization" and dtype == TensorProto.DOUBLE:
            node.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(
                helper.make_attribute("value", helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0]))
            )
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in FLOATS:
                attribute.t.CopyFrom(retyped(attribute.t, dtype))
            elif attribute.name in ("to", "dtype", "output_dtype", "softmax_precision") and attribute.i in FLOATS:
                attribute.i = dtype
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                given = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = numpy_helper.from_array(np.asarray(given, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", retyped(tensor, dtype)))
            elif attribute.type == AttributeProto.GRAPH:
                retype(attribute.g, kept, dtype)


def is_exception(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in EXCEPTIONS)


@cache
def questions() -> dict[str, tuple[list[int], list[int]]]:
    """Return the cases with trainable inputs: the indices of these inputs, and of the outputs in the loss."""
    found = {}
    for name, case in cases()[0].items():
        own = original(name)
        if name in RANDOM or own.name in RANDOM or {node.op_type for node in own.model.graph.node} <= FLAT:
            continue
        floats = [value.type.tensor_type.elem_type in FLOATS for value in case.model.graph.output]
        without = WITHOUT.keys() | FIXED_TYPE | {key[1:] for key in WITHOUT_IN if re.search(key[0], name)}
        positions = positions_of(own)
        trained = [
            k
            for k, (value, array) in enumerate(zip(case.model.graph.input, arrays(case.data_sets[0][0]), strict=True))
            if value.type.tensor_type.elem_type in FLOATS and array.size and not positions[k] & without
        ]
        results = arrays(case.data_sets[0][1])
        compared = [k for k, array in enumerate(results) if floats[k] and array.size and is_finite(array)]
        if trained and compared:
            found[name] = (trained, compared)
    return found


def question(name: str) -> tuple[ModelProto, list[str]]:
    """Return a case as a model in float64 with a loss, and the inputs that are trained."""
    case = cases()[0][name]
    model = ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    positions = positions_of(original(name))
    kept = {value.name for k, value in enumerate(graph.input) if positions[k] & FIXED_TYPE}
    retype(graph, kept)
    inputs, outputs = (arrays(part) for part in case.data_sets[0])
    values = {value.name: array for value, array in zip(graph.input, inputs, strict=True)}
    positions_trained, compared = questions()[name]
    trained = [graph.input[k].name for k in positions_trained]
    del graph.input[:]
    for key, value in values.items():
        floats = value.dtype.kind not in "biu" and key not in kept
        graph.initializer.append(numpy_helper.from_array(value.astype(np.float64) if floats else value, key))
    rng = np.random.default_rng(1)
    weighted = []
    for k in compared:
        result, weights = graph.output[k].name, f"weights of {graph.output[k].name}"
        graph.initializer.append(numpy_helper.from_array(rng.uniform(0.5, 1.5, outputs[k].shape), weights))
        weighted.append((result, weights))
    add_loss(graph, weighted, TensorProto.DOUBLE)
    return model, trained


def moved(value: np.ndarray, move: int, rng: np.random.Generator) -> np.ndarray:
    """Return a nearby point: farther each time, alternately outwards and inwards; later without infinities and NaN."""
    if move == 0:
        return value
    size = 10.0 ** ((move - 1) // 2 - 3)
    way = -1 if move % 2 else 1
    finite = np.where(np.isfinite(value), value, rng.uniform(0.1, 0.9, value.shape)) if move >= MOVES // 2 else value
    return finite * (1 + way * size * rng.uniform(0.1, 1, value.shape)) + size * rng.uniform(-0.1, 0.1, value.shape)


@pytest.mark.parametrize("name", sorted(name for name in questions() if not is_exception(name)))
def test_gradient(name: str, tmp_path: Path) -> None:
    model, trained = question(name)
    artifacts.generate_artifacts(
        model, requires_grad=trained, artifact_directory=tmp_path, batch_norm="freeze", quantized="freeze"
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    data = {key: state.parameters[key].data for key in trained}
    start = {key: value.copy() for key, value in data.items()}
    left_over = set(trained)
    rng = np.random.default_rng(2)
    for move in range(MOVES):
        for key, value in start.items():
            data[key][...] = moved(value, move, rng)
        module.lazy_reset_grad()
        loss = float(module())
        if not np.isfinite(loss):
            continue
        gradients = {key: np.array(state.parameters[key].grad) for key in trained}
        for key in sorted(left_over):
            here = data[key].copy()
            direction = rng.uniform(-1, 1, here.shape)
            slopes = []
            # Steps of two sizes, because steps of one size would miss a jump that is equal on both sides.
            for step in (STEP, -2 * STEP):
                data[key][...] = here + step * direction
                slopes.append((float(module()) - loss) / step)
            data[key][...] = here
            found, wanted = float((gradients[key] * direction).sum()), (2 * slopes[0] + slopes[1]) / 3
            scale, noise = np.abs(gradients[key] * direction).sum() + abs(wanted), NOISE * max(abs(loss), 1)
            if not abs(slopes[0] - slopes[1]) <= SMOOTH * scale + noise < np.inf:
                continue
            assert abs(found - wanted) <= TOLERANCE * scale + noise, f"{key}: {found} instead of {wanted}"
            left_over.discard(key)
        if not left_over:
            return
    raise AssertionError(f"found no point with a smooth loss for {sorted(left_over)}")


def test_exceptions_are_cases() -> None:
    for pattern in EXCEPTIONS:
        assert any(re.search(pattern, name) for name in questions()), pattern
    for pattern, operator, position in WITHOUT_IN:
        found = [name for name in cases()[0] if re.search(pattern, name)]
        assert found
        assert all((operator, position) in set.union(*positions_of(cases()[0][name]).values()) for name in found)
