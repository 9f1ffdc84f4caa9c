"""Every operator in the form of each opset from 7 on: results and training."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TensorShapeProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from opsets import BATCH, CHANGED, OLDEST_OPSET, OPSETS, TRAINED, Words, has, write_artifacts

import ortrain
from ortrain.api import CheckpointState, Module, Optimizer

# The newest opset of this onnxruntime; newer opsets are compared with the reference implementation of ONNX.
NEWEST_OF_ONNXRUNTIME = 26
# Rounding of a few operations on numbers of magnitude 1, by element type.
TOLERANCE = {np.dtype(np.float16): 2e-3, np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-7}
# Tolerance of one model trained in two opsets: the operations and their order are equal, only their notation differs.
SAME = 1e-6
# Log severity of onnxruntime: errors only, because it warns about old opsets.
ERRORS = 3

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64)
NUMBERS = (*FLOATS, *INTEGERS)
ANY = (*NUMBERS, np.bool_)


@dataclass
class Case:
    """A graph of one or two nodes, with its inputs."""

    words: Words
    inputs: dict[str, np.ndarray]
    outputs: dict[str, Any]
    # Tolerance of the results; None selects the tolerance of their type.
    tolerance: float | None = None


def values(dtype: Any, *shape: int, seed: int = 0, low: float = -3.0, high: float = 3.0) -> np.ndarray:
    """Return numbers between bounds in a type; integers are never zero."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if kind.kind == "b":
        numbers = rng.integers(0, 2, shape)
    elif kind.kind == "f":
        numbers = rng.uniform(low, high, shape)
    else:
        numbers = rng.integers(1, 4, shape)
        if kind.kind == "i" and low < 0:
            numbers = numbers * rng.choice([-1, 1], shape)
    return np.asarray(numbers).astype(kind)


def takes(op: str, opset: int, dtype: Any, position: int = 0) -> bool:
    """Return true if an operator accepts elements of a type at this opset."""
    schema = defs.get_schema(op, opset)
    name = TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))).lower()
    return f"tensor({name})" in schema.inputs[min(position, len(schema.inputs) - 1)].types


def simple(opset: int, op: str, inputs: list[np.ndarray], result: Any, **attributes: Any) -> Case:
    """Return a case of one node without omitted inputs."""
    w = Words(opset)
    names = [f"x{k}" for k in range(len(inputs))]
    w.node(op, names, "y", **attributes)
    return Case(w, dict(zip(names, inputs, strict=True)), {"y": result})


def one(w: Words, inputs: dict[str, np.ndarray], name: str, dtype: Any) -> Case:
    return Case(w, inputs, {name: dtype})


UNARY = {
    "Neg": (NUMBERS, -3),
    "Abs": (NUMBERS, -3),
    "Sign": (NUMBERS, -3),
    "Exp": (FLOATS, -3),
    "Log": (FLOATS, 0.1),
    "Sqrt": (FLOATS, 0.1),
    "Erf": (FLOATS, -3),
    "Sin": (FLOATS, -3),
    "Cos": (FLOATS, -3),
    "Relu": (NUMBERS, -3),
    "Sigmoid": (FLOATS, -3),
    "Tanh": (FLOATS, -3),
    "Identity": (ANY, -3),
    "Not": ((np.bool_,), 0),
    "Softplus": (FLOATS, -3),
    "Softsign": (FLOATS, -3),
    "HardSwish": (FLOATS, -5),
    "Mish": (FLOATS, -3),
    "Reciprocal": (FLOATS, 0.1),
    "Floor": (FLOATS, -3),
    "Ceil": (FLOATS, -3),
    "Round": (FLOATS, -3),
    "BitwiseNot": (INTEGERS, -3),
}
BINARY = {
    "Add": NUMBERS,
    "Sub": NUMBERS,
    "Mul": NUMBERS,
    "Div": NUMBERS,
    "Equal": ANY,
    "Less": NUMBERS,
    "Greater": NUMBERS,
    "LessOrEqual": NUMBERS,
    "GreaterOrEqual": NUMBERS,
    "And": (np.bool_,),
    "Or": (np.bool_,),
    "Xor": (np.bool_,),
    "BitwiseAnd": INTEGERS,
    "BitwiseOr": INTEGERS,
    "BitwiseXor": INTEGERS,
}
GIVES_BOOL = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor")
SHAPES = (((2, 3), (2, 3)), ((2, 1, 3), (4, 1)), ((2, 3), ()), ((0, 3), (1, 3)))


def element_wise(op: str, opset: int) -> Iterator[Case]:
    if op in UNARY:
        kinds, low = UNARY[op]
        for dtype in kinds:
            if takes(op, opset, dtype):
                yield simple(opset, op, [values(dtype, 2, 3, low=low)], dtype)
    else:
        for dtype, (a, b) in itertools.product(BINARY[op], SHAPES):
            if takes(op, opset, dtype):
                inputs = [values(dtype, *a, low=0 if op == "Sub" else -3), values(dtype, *b, seed=1)]
                if dtype == np.uint8 or dtype == np.uint32:
                    inputs[0] = inputs[0] + dtype(3)
                yield simple(opset, op, inputs, np.bool_ if op in GIVES_BOOL else dtype)


# Functions on a part of the real line, with the ends of this part.
PARTIAL: dict[str, tuple[float, float]] = {
    "Tan": (-1.2, 1.2),
    "Asin": (-0.95, 0.95),
    "Acos": (-0.95, 0.95),
    "Atan": (-5, 5),
    "Sinh": (-3, 3),
    "Cosh": (-3, 3),
    "Asinh": (-5, 5),
    "Acosh": (1.05, 5),
    "Atanh": (-0.95, 0.95),
}


def partial(op: str, opset: int) -> Iterator[Case]:
    low, high = PARTIAL[op]
    for dtype in FLOATS:
        if takes(op, opset, dtype):
            case = simple(opset, op, [values(dtype, 3, 4, low=low, high=high)], dtype)
            # Steep slopes amplify the rounding of their argument.
            case.tolerance = 5 * TOLERANCE[np.dtype(dtype)]
            yield case


def choices(op: str, opset: int) -> Iterator[Case]:
    """Yield cases with several operands, which have equal shapes before opset 8."""
    kinds = FLOATS if op == "Mean" or opset < 12 else NUMBERS
    for dtype in kinds:
        if takes(op, opset, dtype):
            shapes = [(2, 3), (2, 3), (2, 3)] if opset < 8 else [(4, 2, 3), (3,), (2, 1)]
            for count in (1, 2, 3):
                inputs = [values(dtype, *shape, seed=k) for k, shape in enumerate(shapes[:count])]
                yield simple(opset, op, inputs, dtype)


def modulo(opset: int) -> Iterator[Case]:
    for dtype in NUMBERS:
        for fmod in (0, 1):
            if takes("Mod", opset, dtype) and (fmod == 1 or np.dtype(dtype).kind != "f" or opset >= 28):
                yield simple(opset, "Mod", [values(dtype, 4, 3), values(dtype, 3, seed=1)], dtype, fmod=fmod)


def shifts(opset: int) -> Iterator[Case]:
    for dtype, direction in itertools.product(INTEGERS, ("LEFT", "RIGHT")):
        if takes("BitShift", opset, dtype):
            inputs = [values(dtype, 4, 3), np.asarray([0, 1, 3], dtype)]
            yield simple(opset, "BitShift", inputs, dtype, direction=direction)


def float_checks(op: str, opset: int) -> Iterator[Case]:
    for dtype in FLOATS:
        if takes(op, opset, dtype):
            x = np.asarray([1, np.nan, np.inf, -np.inf, -0.0], dtype)
            yield simple(opset, op, [x], np.bool_)
            if op == "IsInf":
                yield simple(opset, op, [x], np.bool_, detect_negative=0)
                yield simple(opset, op, [x], np.bool_, detect_positive=0)


def several(opset: int, op: str, inputs: Sequence[np.ndarray], results: Sequence[Any], **attributes: Any) -> Case:
    """Return a case of one node with several results."""
    w = Words(opset)
    names, outputs = [f"x{k}" for k in range(len(inputs))], [f"y{k}" for k in range(len(results))]
    w.node(op, names, *outputs, **attributes)
    return Case(w, dict(zip(names, inputs, strict=True)), dict(zip(outputs, results, strict=True)))


def int64s(*numbers: Any) -> np.ndarray:
    return np.asarray(numbers, np.int64)


def extremes_at(op: str, opset: int) -> Iterator[Case]:
    x = np.asarray([[1, 7, 7, -2], [3, 3, -9, -9]], np.float32)
    for axis, keepdims in itertools.product((0, 1), (0, 1)):
        yield simple(opset, op, [x], np.int64, axis=axis, keepdims=keepdims)
    if opset >= 12:
        yield simple(opset, op, [x], np.int64, axis=-1, select_last_index=1)
    yield simple(opset, op, [values(np.int32, 3, 4)], np.int64)


def hardmax(opset: int) -> Iterator[Case]:
    x = np.random.default_rng(0).permutation(24).reshape(2, 3, 4).astype(np.float32)
    for axis in (None, 0, 1, 2):
        yield simple(opset, "Hardmax", [x], np.float32, **({} if axis is None else {"axis": axis}))


def running(op: str, opset: int) -> Iterator[Case]:
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        for axis, exclusive, reverse in itertools.product((0, 1, -1), (0, 1), (0, 1)):
            inputs = [values(dtype, 3, 4), np.asarray(axis, np.int32)]
            yield simple(opset, op, inputs, dtype, exclusive=exclusive, reverse=reverse)


def splits(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 6)
    kinds = [np.float32, np.float32]
    if opset < 18:
        yield several(opset, "Split", [x], kinds, axis=1)
    else:
        yield several(opset, "Split", [x], kinds, axis=1, num_outputs=2)
        yield several(opset, "Split", [values(np.float32, 2, 5)], kinds, axis=1, num_outputs=2)
    if opset < 13:
        yield several(opset, "Split", [x], kinds, axis=1, split=[2, 4])
    else:
        yield several(opset, "Split", [x, int64s(2, 4)], kinds, axis=1)


def tops(opset: int) -> Iterator[Case]:
    x = np.random.default_rng(0).permutation(24).reshape(2, 12).astype(np.float32)
    kinds = [np.float32, np.int64]
    for axis, k in ((1, 5), (0, 1)):
        if opset < 10:
            yield several(opset, "TopK", [x], kinds, axis=axis, k=k)
        else:
            yield several(opset, "TopK", [x, int64s(k)], kinds, axis=axis)
    if opset >= 11:
        yield several(opset, "TopK", [x, int64s(4)], kinds, largest=0)


def scatters(op: str, opset: int) -> Iterator[Case]:
    x = values(np.float32, 3, 4)
    reductions = ["none"] + ["add", "mul"] * (opset >= 16) + ["max", "min"] * (opset >= 18)
    for reduction in reductions:
        attributes: dict[str, Any] = {} if reduction == "none" else {"reduction": reduction}
        updates = values(np.float32, 2, 4, seed=1)
        if op == "ScatterND":
            yield simple(opset, op, [x, int64s([2], [0]), updates], np.float32, **attributes)
        else:
            indices = int64s([2, 0, 1, 1], [0, 1, 2, 0])
            yield simple(opset, op, [x, indices, updates], np.float32, axis=0, **attributes)


def hot(opset: int) -> Iterator[Case]:
    for axis in (0, 1, -1):
        inputs = [int64s(0, 2, 1), np.asarray(3), values(np.float32, 2)]
        yield simple(opset, "OneHot", inputs, np.float32, axis=axis)


def groups(opset: int) -> Iterator[Case]:
    per = 2 if opset < 21 else 4
    inputs = [values(np.float32, 2, 4, 3, 2), values(np.float32, per, seed=1), values(np.float32, per, seed=2)]
    case = simple(opset, "GroupNormalization", inputs, np.float32, num_groups=2, epsilon=0.01)
    case.tolerance = 1e-5
    yield case


def likelihood(opset: int) -> Iterator[Case]:
    x, labels = values(np.float32, 4, 3, 2), int64s([0, 1], [2, 1], [1, 0], [2, 2])
    weights = np.asarray([0.5, 1.5, 1], np.float32)
    for reduction, ignore in itertools.product(("mean", "sum", "none"), ({}, {"ignore_index": 1})):
        yield simple(opset, "NegativeLogLikelihoodLoss", [x, labels], np.float32, reduction=reduction, **ignore)
        inputs = [x, labels, weights]
        yield simple(opset, "NegativeLogLikelihoodLoss", inputs, np.float32, reduction=reduction, **ignore)


def different(opset: int) -> Iterator[Case]:
    x = np.asarray([[2, 1, 2], [3, 1, 3]], np.float32)
    kinds = [np.float32, np.int64, np.int64, np.int64]
    yield several(opset, "Unique", [x], kinds, axis=1)
    for order in (0, 1):
        yield several(opset, "Unique", [x.ravel()], kinds, sorted=order)


def blocks(op: str, opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 8, 2, 4)
    yield simple(opset, op, [x], np.float32, blocksize=2)
    if (op == "DepthToSpace" and opset >= 11) or opset >= 28:
        yield simple(opset, op, [x], np.float32, blocksize=2, mode="CRD")


def sampled(opset: int) -> Iterator[Case]:
    x, grid = values(np.float32, 2, 3, 4, 5), values(np.float32, 2, 3, 2, 2, low=-1.6, high=1.6)
    names = {"linear": "bilinear", "cubic": "bicubic"}
    for mode in ("nearest", "linear", "cubic"):
        for padding in ("zeros", "border", "reflection"):
            # In this mode onnxruntime clips the indices of neighbours instead of the coordinate.
            if (mode, padding) == ("cubic", "border"):
                continue
            for aligned in (0, 1):
                name = mode if opset >= 20 else names.get(mode, mode)
                case = simple(
                    opset, "GridSample", [x, grid], np.float32, mode=name, padding_mode=padding, align_corners=aligned
                )
                # Coordinates are float32, and the slope of a weight grows with the size of the axis.
                case.tolerance = 2e-5
                yield case


def causal_convolutions(opset: int) -> Iterator[Case]:
    op, kinds = "CausalConvWithState", [np.float32, np.float32]
    inputs = [values(np.float32, *shape, seed=k) for k, shape in enumerate(((2, 3, 4), (3, 1, 3), (3,), (2, 3, 2)))]
    for count in (2, 3, 4):
        for activation in ("none", "silu"):
            yield several(opset, op, inputs[:count], kinds, activation=activation)


def linear_attention(opset: int) -> Iterator[Case]:
    rows = [values(np.float32, 2, 3, width, seed=width) for width in (8, 4, 6)]
    past, rates = values(np.float32, 2, 2, 2, 3), values(np.float32, 2, 3, 2, low=-2, high=0)
    given = {
        "linear": [*rows, past],
        "gated": [*rows, past, rates],
        "delta": [*rows, past, "", np.exp(rates)],
        "gated_delta": [*rows, past, rates, np.exp(rates)],
    }
    for rule, inputs in given.items():
        w = Words(opset)
        present = {f"x{k}": array for k, array in enumerate(inputs) if not isinstance(array, str)}
        names = [f"x{k}" if f"x{k}" in present else "" for k in range(len(inputs))]
        w.node("LinearAttention", names, "y", "state", q_num_heads=4, kv_num_heads=2, update_rule=rule, scale=0.5)
        # The sums over positions have sums as their terms.
        yield Case(w, present, {"y": np.float32, "state": np.float32}, tolerance=1e-4)


def transforms(opset: int) -> Iterator[Case]:
    real, complex_ = values(np.float32, 2, 5, 1), values(np.float32, 2, 5, 2)
    length = np.asarray(4, np.int64)
    for inputs, attributes in (
        ([real], {}),
        ([real, length], {"onesided": 1}),
        ([complex_], {"inverse": 1}),
        ([complex_, length], {}),
    ):
        if opset < 20:
            case = simple(opset, "DFT", inputs, np.float32, axis=1, **attributes)
        else:
            given = [*inputs, *([] if len(inputs) > 1 else [np.asarray(5, np.int64)]), np.asarray(1, np.int64)]
            case = simple(opset, "DFT", given, np.float32, **attributes)
        case.tolerance = 1e-5
        yield case


# Operators with schema changes in types only: inputs, the type of the result, attributes.
PLAIN: dict[str, list[tuple[list[np.ndarray], Any, dict[str, Any]]]] = {
    "Shrink": [
        ([values(np.float32, 2, 5)], np.float32, {}),
        ([values(np.float32, 9)], np.float32, {"bias": 0.3, "lambd": 1.1}),
    ],
    "Swish": [([values(np.float32, 2, 5)], np.float32, {}), ([values(np.float32, 9)], np.float32, {"alpha": -0.4})],
    "SwiGLU": [([values(np.float32, 2, 5), values(np.float32, 2, 5, seed=1)], np.float32, {"alpha": 0.7})],
    "CastLike": [([values(np.float32, 2, 3), values(np.int32, 1)], np.int32, {})],
    "Tile": [([values(np.float32, 2, 3), int64s(2, 1)], np.float32, {})],
    "Trilu": [
        ([values(np.float32, 3, 4)], np.float32, {}),
        ([values(np.float32, 3, 4), np.asarray(-1)], np.float32, {"upper": 0}),
    ],
    "EyeLike": [
        ([values(np.float32, 3, 4)], np.float32, {"k": 1}),
        ([values(np.int32, 2, 2)], np.float32, {"dtype": 1}),
    ],
    "Range": [([np.asarray(n, np.int64) for n in (10, 3, -2)], np.int64, {})],
    "GatherElements": [([values(np.float32, 3, 2), int64s([0, 2], [1, -1])], np.float32, {"axis": 0})],
    "GatherND": [([values(np.float32, 3, 2, 2), int64s([0, 1], [2, -1])], np.float32, {})],
    "Compress": [
        ([values(np.float32, 3, 2), np.asarray([True, False, True])], np.float32, {"axis": 0}),
        ([values(np.float32, 3, 2), np.asarray([True, False, True])], np.float32, {}),
    ],
    "InstanceNormalization": [
        ([values(np.float32, 2, 3, 40), values(np.float32, 3), values(np.float32, 3)], np.float32, {"epsilon": 0.01})
    ],
    "MeanVarianceNormalization": [([values(np.float32, 2, 3, 4, 5)], np.float32, {})],
    "LpNormalization": [
        ([values(np.float32, 2, 3, 4, low=0)], np.float32, {"axis": 1, "p": 1}),
        ([values(np.float32, 2, 3, 4)], np.float32, {"axis": 2}),
    ],
    "LpPool": [
        (
            [values(np.float32, 1, 2, 5, 4)],
            np.float32,
            {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
        ),
        ([values(np.float32, 1, 2, 5)], np.float32, {"kernel_shape": [2], "p": 3}),
    ],
    "Det": [([values(np.float32, 2, 4, 4)], np.float32, {}), ([values(np.float32, 1, 1)], np.float32, {})],
    "AffineGrid": [
        ([values(np.float32, 2, 2, 3), int64s(2, 1, 3, 4)], np.float32, {}),
        ([values(np.float32, 1, 3, 4), int64s(1, 1, 2, 3, 4)], np.float32, {"align_corners": 1}),
    ],
    "Col2Im": [
        (
            [values(np.float32, 2, 12, 4), int64s(3, 4), int64s(2, 2)],
            np.float32,
            {"strides": [2, 2], "pads": [0, 1, 1, 0], "dilations": [1, 1]},
        ),
    ],
    "GlobalLpPool": [
        ([values(np.float32, 1, 2, 5, 4)], np.float32, {}),
        ([values(np.float32, 1, 2, 5)], np.float32, {"p": 1}),
    ],
}


def plain(op: str, opset: int) -> Iterator[Case]:
    for inputs, result, attributes in PLAIN[op]:
        case = simple(opset, op, inputs, result, **attributes)
        case.tolerance = 1e-5 if "Norm" in op or "Lp" in op else None
        yield case


# Activations with attributes: the tested values.
WITH_ATTRIBUTES: dict[str, list[dict[str, float]]] = {
    "LeakyRelu": [{}, {"alpha": 0.3}, {"alpha": -0.5}],
    "Elu": [{}, {"alpha": 0.3}, {"alpha": -0.5}],
    "Celu": [{}, {"alpha": 0.3}],
    "Selu": [{}, {"alpha": 0.4, "gamma": 2.0}],
    "HardSigmoid": [{}, {"alpha": 0.5, "beta": 0.1}],
    "ThresholdedRelu": [{}, {"alpha": -0.5}],
}


def activation(op: str, opset: int) -> Iterator[Case]:
    for attributes, dtype in itertools.product(WITH_ATTRIBUTES[op], FLOATS):
        if takes(op, opset, dtype):
            yield simple(opset, op, [values(dtype, 2, 5)], dtype, **attributes)


def prelu(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 3, 4)
    for slope in ((3, 1), (1,), (2, 3, 4), (4,)):
        yield simple(opset, "PRelu", [x, values(np.float32, *slope, seed=1)], np.float32)
    for dtype in (np.float64, np.int64, np.uint32):
        if takes("PRelu", opset, dtype):
            yield simple(opset, "PRelu", [values(dtype, 2, 3, low=0), values(dtype, 3, low=0)], dtype)


def clip(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 5)
    bounds: list[tuple[float | None, float | None]] = [(None, None), (-1, None), (None, 1), (-1, 1)]
    # Onnxruntime rejects attributes with a minimum above the maximum.
    if opset >= 11:
        bounds.append((1, -1))
    for low, high in bounds:
        w = Words(opset)
        yield one(w, {"x": x}, w.clip("x", low, high), np.float32)
    for dtype in NUMBERS:
        if opset < 11 and takes("Clip", opset, dtype):
            yield simple(opset, "Clip", [values(dtype, 2, 5)], dtype, min=-1.0, max=2.0)
        elif takes("Clip", opset, dtype):
            given = [np.asarray(bound, dtype) for bound in (1, 2)]
            yield simple(opset, "Clip", [values(dtype, 2, 5, low=0), *given], dtype)


def pad(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 3, 4)
    modes = ["constant", "edge", "reflect", *(["wrap"] if opset >= 19 else [])]
    kinds = [[0, 1, 2, 1, 0, 1], [1, 0, 0, 0, 2, 0]]
    # The reference implementation does not support negative padding.
    if opset <= NEWEST_OF_ONNXRUNTIME:
        kinds += [[0, 1, 0, 1, 1, -2], [0, -1, 0, 0, 0, 0]]
    for mode, pads in itertools.product(modes, kinds):
        w = Words(opset)
        yield one(w, {"x": x}, w.pad("x", pads, mode, 1.5), np.float32)
    if opset < 11:
        return
    for dtype in (np.float64, np.int32, np.int64, np.uint8, np.bool_):
        if takes("Pad", opset, dtype):
            given = [np.asarray([1, 0, 0, 2]), np.asarray(1, dtype)]
            yield simple(opset, "Pad", [values(dtype, 2, 3), *given], dtype)
            yield simple(opset, "Pad", [values(dtype, 2, 3), given[0]], dtype, mode="edge")
    if opset >= 18:
        for mode in modes:
            w = Words(opset)
            given = [w.ints([1, 2, 1, 1]), w.weight(0.5, dtype=np.float32), w.ints([-1, 1])]
            yield one(w, {"x": x}, w.node("Pad", ["x", *given], "y", mode=mode), np.float32)


def upsample(opset: int) -> Iterator[Case]:
    x = values(np.float32, 1, 2, 3, 4)
    for mode, scales in itertools.product(("nearest", "linear"), ([1, 1, 2, 2], [1, 1, 1.5, 3], [1, 1, 1, 1])):
        w = Words(opset)
        yield one(w, {"x": x}, w.upsample("x", scales, mode), np.float32)


def resize(opset: int) -> Iterator[Case]:
    x = values(np.float32, 1, 2, 4, 6)
    yield from upsample(opset)
    if opset < 11:
        factors = ([1, 1, 0.5, 0.5], [1, 1, 2, 0.6], [1, 1, 0.8, 1])
        for mode, scales in itertools.product(("nearest", "linear"), factors):
            w = Words(opset)
            yield one(w, {"x": x}, w.upsample("x", scales, mode), np.float32)
        return
    coordinates = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
    # The reference implementation does not support this mode; the standard supports it up to opset 12.
    if opset < 13:
        coordinates.append("tf_half_pixel_for_nn")
    if opset >= 19:
        coordinates.append("half_pixel_symmetric")
    modes: list[dict[str, Any]] = [{"mode": "linear"}, {"mode": "cubic"}, {"mode": "cubic", "cubic_coeff_a": -0.5}]
    modes += [{"mode": "cubic", "exclude_outside": 1}]
    nearest = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    modes += [{"mode": "nearest", "nearest_mode": rule} for rule in nearest]
    if opset >= 18:
        modes += [{"mode": mode, "antialias": 1} for mode in ("linear", "cubic")]
    for mode, coordinate in itertools.product(modes, coordinates):
        attributes = {**mode, "coordinate_transformation_mode": coordinate}
        # Other implementations compute cubic weights in float32.
        tolerance = 1e-5 if mode["mode"] == "cubic" else None
        # Weights that nearly cancel amplify the rounding.
        if coordinate == "tf_half_pixel_for_nn" and "exclude_outside" in mode:
            continue
        for scales in ([1, 1, 2, 2], [1, 1, 0.5, 0.5], [1, 1, 0.75, 1.5]):
            w = Words(opset)
            given = ["x", w.nothing(), w.weight(scales, dtype=np.float32)]
            yield Case(w, {"x": x}, {w.node("Resize", given, "y", **attributes): np.float32}, tolerance)
        # For one element, the reference implementation differs from the standard.
        strange = coordinate == "pytorch_half_pixel" and opset > NEWEST_OF_ONNXRUNTIME
        for sizes in ([1, 2, 5, 7], [1, 2, 3, 2 if strange else 1]):
            w = Words(opset)
            given = ["x", w.nothing(), w.nothing(), w.ints(sizes)]
            yield Case(w, {"x": x}, {w.node("Resize", given, "y", **attributes): np.float32}, tolerance)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    for mode in ("linear", "nearest"):
        w = Words(opset)
        roi = w.weight([0, 0, 0.25, -0.1, 1, 1, 0.9, 1.3], dtype=np.float32)
        given = ["x", roi, w.nothing(), w.ints([1, 2, 3, 5])]
        yield one(w, {"x": x}, w.node("Resize", given, "y", mode=mode, **crop), np.float32)
    for dtype in (np.float64, np.int32, np.uint8):
        given = [values(dtype, 1, 1, 2, 3, low=0), np.zeros(0, np.float32), np.asarray([1, 1, 2, 3], np.float32)]
        if dtype != np.float64:
            yield simple(opset, "Resize", given, dtype, mode="nearest")
    if opset >= 18:
        for policy, sizes in itertools.product(("stretch", "not_larger", "not_smaller"), ([8, 3], [2, 9])):
            w = Words(opset)
            attributes = {"axes": [2, 3], "keep_aspect_ratio_policy": policy, "mode": "linear"}
            yield one(w, {"x": x}, w.node("Resize", ["x", "", "", w.ints(sizes)], "y", **attributes), np.float32)


def gelu(opset: int) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield simple(opset, "Gelu", [values(np.float32, 2, 3)], np.float32, approximate=approximate)
    yield simple(opset, "Gelu", [values(np.float64, 4)], np.float64)


def power(opset: int) -> Iterator[Case]:
    base = values(np.float32, 2, 3, low=0.1)
    for exponent in (2.0, 0.5, -1.0, 3.0):
        w = Words(opset)
        yield one(w, {"x": base}, w.node("Pow", ["x", w.weight([exponent], dtype=np.float32)], "y"), np.float32)
    yield simple(opset, "Pow", [base, values(np.float32, 3, seed=1)], np.float32)
    yield simple(opset, "Pow", [base.astype(np.float64), values(np.float64, 1)], np.float64)
    if opset >= 12:
        yield simple(opset, "Pow", [base, values(np.int64, 3, low=0)], np.float32)
        yield simple(opset, "Pow", [values(np.int64, 3), values(np.int64, 1, low=0)], np.int64)
        yield simple(opset, "Pow", [values(np.int32, 3, low=0), values(np.float32, 1, low=0)], np.int32)


def total(opset: int) -> Iterator[Case]:
    x, y = values(np.float32, 2, 3), values(np.float32, 2, 3, seed=1)
    yield simple(opset, "Sum", [x], np.float32)
    yield simple(opset, "Sum", [x, y, x], np.float32)
    yield simple(opset, "Sum", [x.astype(np.float64), y.astype(np.float64)], np.float64)
    if opset >= 8:
        yield simple(opset, "Sum", [x, y[:1], values(np.float32)], np.float32)


def softmax(op: str, opset: int) -> Iterator[Case]:
    for shape in ((2, 3), (2, 3, 4), (2, 1, 3, 2), (0, 3)):
        # The default axis is 1 before opset 13, and the last axis since. Negative axes are valid from opset 11 on.
        axes: list[int | None] = [None, *range(len(shape))]
        if opset >= 11:
            axes += [-1, -2]
        for axis in axes:
            attributes = {} if axis is None else {"axis": axis}
            yield simple(opset, op, [values(np.float32, *shape)], np.float32, **attributes)
    yield simple(opset, op, [values(np.float64, 2, 3)], np.float64)
    # A Reshape to a computed shape leaves the rank undeclared.
    w = Words(opset)
    reshaped = w.node("Reshape", ["x", "shape"])
    inputs = {"x": values(np.float32, 2, 12), "shape": np.asarray([2, 3, 4])}
    yield one(w, inputs, w.node(op, [reshaped], "y", axis=1), np.float32)


def matmul(opset: int) -> Iterator[Case]:
    shapes = (((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((2, 1, 2, 3), (4, 3, 1)))
    for a, b in shapes:
        yield simple(opset, "MatMul", [values(np.float32, *a), values(np.float32, *b, seed=1)], np.float32)
    for dtype in (np.float64, np.int32, np.int64, np.uint32):
        if takes("MatMul", opset, dtype):
            low = 0 if dtype == np.uint32 else -3
            yield simple(opset, "MatMul", [values(dtype, 2, 3, low=low), values(dtype, 3, 2, seed=1, low=low)], dtype)


def gemm(opset: int) -> Iterator[Case]:
    for ta, tb in itertools.product((0, 1), (0, 1)):
        a, b = values(np.float32, *((3, 2) if ta else (2, 3))), values(np.float32, *((4, 3) if tb else (3, 4)), seed=1)
        attributes = {"transA": ta, "transB": tb, "alpha": 0.5, "beta": 2.0}
        for c in ((), (4,), (2, 1), (2, 4)):
            yield simple(opset, "Gemm", [a, b, values(np.float32, *c, seed=2)], np.float32, **attributes)
        # C is optional only from opset 11 on.
        if opset >= 11:
            yield simple(opset, "Gemm", [a, b], np.float32, **attributes)


def reduction(op: str, opset: int) -> Iterator[Case]:
    as_input_since = 13 if op == "ReduceSum" else 18
    x = values(np.float32, 2, 3, 4)
    axes: list[list[int] | None] = [None, [0], [1], [0, 2], [0, 1, 2]]
    if opset >= 11:
        axes += [[-1], [-2, 0]]
    for named, keepdims in itertools.product(axes, (None, 0, 1)):
        w = Words(opset)
        attributes = {} if keepdims is None else {"keepdims": keepdims}
        if named is None:
            w.node(op, ["x"], "y", **attributes)
        elif opset < as_input_since:
            w.node(op, ["x"], "y", axes=named, **attributes)
        else:
            w.node(op, ["x", w.ints(named)], "y", **attributes)
        yield one(w, {"x": x}, "y", np.float32)
    if opset >= as_input_since:
        for noop in (0, 1):
            w = Words(opset)
            w.node(op, ["x", w.ints([])], "y", noop_with_empty_axes=noop)
            yield one(w, {"x": x}, "y", np.float32)
    # The standard does not define integer results of roots and logarithms that are not integers.
    real = op in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
    # For ReduceSumSquare, the reference implementation changes other integers to int64.
    integers = () if real else (np.int64,) if op == "ReduceSumSquare" else (np.int32, np.int64)
    for dtype in (np.float64, *integers):
        yield simple(opset, op, [np.abs(values(dtype, 2, 3)) * dtype(6)], dtype, keepdims=0)
    if op in ("ReduceMax", "ReduceMin"):
        for dtype in (np.int8, np.uint8, np.bool_):
            if takes(op, opset, dtype):
                yield simple(opset, op, [values(dtype, 2, 3)], dtype, keepdims=0)


def reshape(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 3, 4)
    for shape in ([6, 4], [-1], [0, -1], [2, 0, 2, 2], [4, 3, 2]):
        w = Words(opset)
        yield one(w, {"x": x}, w.node("Reshape", ["x", w.ints(shape)], "y"), np.float32)
    # A shape computed from another shape, and a shape from the feeds.
    w = Words(opset)
    sizes = w.node("Shape", ["x"])
    front = w.slice(sizes, [0], [1], [0])
    yield one(w, {"x": x}, w.node("Reshape", ["x", w.node("Concat", [front, w.ints([-1])], axis=0)], "y"), np.float32)
    yield simple(opset, "Reshape", [x, np.asarray([3, 8])], np.float32)
    if opset >= 14:
        w = Words(opset)
        w.node("Reshape", ["x", w.ints([3, 0])], "y", allowzero=1)
        yield one(w, {"x": values(np.float32, 0, 5)}, "y", np.float32)


def flatten(opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 3, 4)
    axes: list[int | None] = [None, 0, 1, 2, 3]
    if opset >= 11:
        axes += [-1, -3]
    for axis in axes:
        yield simple(opset, "Flatten", [x], np.float32, **({} if axis is None else {"axis": axis}))
    if opset >= 9:
        yield simple(opset, "Flatten", [values(np.int64, 2, 3)], np.int64)


def transpose(opset: int) -> Iterator[Case]:
    for perm in (None, [0, 2, 1], [2, 0, 1]):
        attributes = {} if perm is None else {"perm": perm}
        for dtype in (np.float32, np.int64, np.bool_):
            yield simple(opset, "Transpose", [values(dtype, 2, 3, 4)], dtype, **attributes)


def squeeze(opset: int) -> Iterator[Case]:
    axes: list[list[int] | None] = [None, [0], [0, 2]]
    if opset >= 11:
        axes += [[-2]]
    for named in axes:
        w = Words(opset)
        yield one(w, {"x": values(np.float32, 1, 3, 1, 2)}, w.squeeze("x", named), np.float32)


def unsqueeze(opset: int) -> Iterator[Case]:
    axes = [[0], [1], [0, 3]]
    if opset >= 11:
        axes += [[-1], [-1, 0]]
    for named in axes:
        w = Words(opset)
        yield one(w, {"x": values(np.float32, 2, 3)}, w.unsqueeze("x", named), np.float32)


def concat(opset: int) -> Iterator[Case]:
    for axis in (0, 1) if opset < 11 else (0, 1, -1):
        for dtype in (np.float32, np.int64, np.bool_):
            parts = [values(dtype, 2, 3), values(dtype, 2, 3, seed=1), values(dtype, 2, 3, seed=2)]
            yield simple(opset, "Concat", parts, dtype, axis=axis)
    yield simple(opset, "Concat", [values(np.float32, 2, 0), values(np.float32, 2, 1)], np.float32, axis=1)


def slices(opset: int) -> Iterator[Case]:
    x = values(np.float32, 4, 5, 3)
    for starts, ends, axes in (([1], [3], [1]), ([-2], [2**31 - 1], [0]), ([0, 1], [-1, 99], [0, 2]), ([3], [1], [0])):
        w = Words(opset)
        yield one(w, {"x": x}, w.slice("x", starts, ends, axes), np.float32)
    # Without axes the first axes are sliced.
    w = Words(opset)
    if opset < 10:
        w.node("Slice", ["x"], "y", starts=[1, 2], ends=[4, 5])
    else:
        w.node("Slice", ["x", w.ints([1, 2]), w.ints([4, 5])], "y")
    yield one(w, {"x": x}, "y", np.float32)
    if opset >= 10:
        bounds = (([3, 0], [0, 5], [0, 1], [-1, 2]), ([-1], [-100], [0], [-2]))
        for starts, ends, axes, steps in bounds:
            w = Words(opset)
            given = [w.weight(part, dtype=np.int32) for part in (starts, ends, axes, steps)]
            yield one(w, {"x": x}, w.node("Slice", ["x", *given], "y"), np.float32)


def gather(opset: int) -> Iterator[Case]:
    x = values(np.float32, 3, 4)
    for axis, dtype in itertools.product((None, 0, 1), (np.int32, np.int64)):
        attributes = {} if axis is None else {"axis": axis}
        for index in (np.asarray([[2, 0], [1, 1]]), np.asarray(1)):
            yield simple(opset, "Gather", [x, index.astype(dtype)], np.float32, **attributes)
    if opset >= 11:
        yield simple(opset, "Gather", [x, np.asarray([-1, 0])], np.float32, axis=-2)


def shape_of(opset: int) -> Iterator[Case]:
    yield simple(opset, "Shape", [values(np.float32, 2, 3, 4)], np.int64)
    yield simple(opset, "Shape", [values(np.float32)], np.int64)
    if opset >= 15:
        for bounds in ({"start": 1}, {"start": -2, "end": -1}, {"end": 2}, {"start": 9}):
            yield simple(opset, "Shape", [values(np.bool_, 2, 3, 4)], np.int64, **bounds)


def size_of(opset: int) -> Iterator[Case]:
    for shape in ((2, 3), (), (0, 3)):
        yield simple(opset, "Size", [values(np.float32, *shape)], np.int64)


def cast(opset: int) -> Iterator[Case]:
    for source, target in itertools.product(ANY, ANY):
        x = values(source, 2, 3, low=0)
        to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
        yield simple(opset, "Cast", [x], target, to=to)


def where(opset: int) -> Iterator[Case]:
    condition = values(np.bool_, 2, 1)
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8):
        yield simple(opset, "Where", [condition, values(dtype, 3), values(dtype, 2, 3, seed=1)], dtype)


def expand(opset: int) -> Iterator[Case]:
    for shape in ([2, 4, 3], [3], [1, 1], [2, 1, 1]):
        for dtype in (np.float32, np.int64, np.bool_):
            w = Words(opset)
            yield one(w, {"x": values(dtype, 4, 1)}, w.node("Expand", ["x", w.ints(shape)], "y"), dtype)


def constants(opset: int) -> Iterator[Case]:
    for dtype in (np.float32, np.int64, np.bool_):
        w = Words(opset)
        held = w.constant(values(dtype, 2, 3))
        yield one(w, {"x": values(np.float32, 1)}, w.node("Identity", [held], "y"), dtype)
    if opset >= 12:
        numbers: dict[str, tuple[Any, Any]] = {
            "value_float": (1.5, np.float32),
            "value_floats": ([1.5, 2.5], np.float32),
            "value_int": (3, np.int64),
            "value_ints": ([3, 4], np.int64),
        }
        for name, (value, dtype) in numbers.items():
            w = Words(opset)
            held = w.node("Constant", [], **{name: value})
            yield one(w, {"x": values(np.float32, 1)}, w.node("Identity", [held], "y"), dtype)


def constants_of_shape(opset: int) -> Iterator[Case]:
    yield simple(opset, "ConstantOfShape", [np.asarray([2, 3])], np.float32)
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.bool_):
        w = Words(opset)
        value = numpy_helper.from_array(np.asarray([1], dtype))
        w.node("ConstantOfShape", [w.node("Shape", ["x"])], "y", value=value)
        yield one(w, {"x": values(np.float32, 2, 3)}, "y", dtype)


def dropout(opset: int) -> Iterator[Case]:
    x = values(np.float32, 3, 4)
    w = Words(opset)
    yield one(w, {"x": x}, w.dropout("x", 0.25), np.float32)
    yield simple(opset, "Dropout", [x], np.float32)
    if opset >= 12:
        w = Words(opset)
        w.node("Dropout", ["x"], "y", "mask")
        yield Case(w, {"x": x}, {"y": np.float32, "mask": np.bool_})
        w = Words(opset)
        settings = [w.weight(0.5, dtype=np.float32), w.weight(False, dtype=np.bool_)]
        w.node("Dropout", ["x", *settings], "y", "mask")
        yield Case(w, {"x": x}, {"y": np.float32, "mask": np.bool_})


def cross_entropy(opset: int) -> Iterator[Case]:
    for scores, labels in (((4, 3), (4,)), ((2, 3, 5), (2, 5))):
        feeds = {"s": values(np.float32, *scores), "l": np.random.default_rng(0).integers(0, 3, labels)}
        for reduction, ignored, weighted in itertools.product(("mean", "sum", "none"), (None, 1), (False, True)):
            w = Words(opset)
            weights = [w.weight([0.2, 0.3, 0.6], dtype=np.float32)] if weighted else []
            attributes: dict[str, Any] = {} if ignored is None else {"ignore_index": ignored}
            w.node("SoftmaxCrossEntropyLoss", ["s", "l", *weights], "y", "p", reduction=reduction, **attributes)
            yield Case(w, feeds, {"y": np.float32, "p": np.float32})


def conditional(opset: int) -> Iterator[Case]:
    info = helper.make_tensor_value_info
    halves = {
        name: helper.make_graph([helper.make_node(op, ["x"], [op])], name, [], [info(op, TensorProto.FLOAT, [2, 3])])
        for name, op in (("then_branch", "Exp"), ("else_branch", "Neg"))
    }
    for holds in (True, False):
        w = Words(opset)
        x = values(np.float32, 2, 3)
        yield Case(w, {"c": np.asarray(holds), "x": x}, {w.node("If", ["c"], "y", **halves): np.float32})
        w = Words(opset)
        condition = w.weight([holds], dtype=np.bool_)
        yield Case(w, {"x": x}, {w.node("If", [condition], "y", **halves): np.float32})


def nonzero(opset: int) -> Iterator[Case]:
    for dtype in (np.float32, np.int32, np.int64, np.bool_):
        yield simple(opset, "NonZero", [values(np.int32, 3, 4).clip(0).astype(dtype)], np.int64)


def convolution(opset: int) -> Iterator[Case]:
    x, bias = values(np.float32, 2, 4, 5, 6), values(np.float32, 6, seed=2)
    full, grouped = values(np.float32, 6, 4, 3, 2, seed=1), values(np.float32, 6, 2, 3, 2, seed=1)
    yield simple(opset, "Conv", [x, full], np.float32)
    yield simple(opset, "Conv", [x, grouped, bias], np.float32, group=2, kernel_shape=[3, 2])
    for auto_pad, strides in itertools.product(("VALID", "SAME_UPPER", "SAME_LOWER"), ([1, 1], [2, 3])):
        yield simple(opset, "Conv", [x, full, bias], np.float32, auto_pad=auto_pad, strides=strides)
    yield simple(opset, "Conv", [x, full], np.float32, pads=[1, 0, 2, 3], dilations=[2, 1], strides=[1, 2])
    deep = values(np.float32, 8, 1, 3, 3)
    yield simple(opset, "Conv", [x, deep], np.float32, group=4, pads=[1, 1, 1, 1])
    yield simple(opset, "Conv", [values(np.float32, 2, 3, 8), values(np.float32, 2, 3, 3, seed=1)], np.float32)
    cube = values(np.float32, 1, 2, 3, 4, 3), values(np.float32, 2, 2, 2, 2, 2, seed=1)
    yield simple(opset, "Conv", [*cube], np.float32, strides=[1, 2, 1])
    for dtype in (np.float64, np.float16):
        small = values(dtype, 1, 2, 4, low=0), values(dtype, 3, 2, 2, seed=1, low=0)
        yield simple(opset, "Conv", [*small], dtype)


def transposed_convolution(opset: int) -> Iterator[Case]:
    x, bias = values(np.float32, 2, 4, 3, 2), values(np.float32, 3, seed=2)
    full, deep = values(np.float32, 4, 3, 3, 2, seed=1), values(np.float32, 4, 1, 3, 2, seed=1)
    yield simple(opset, "ConvTranspose", [x, full], np.float32)
    yield simple(opset, "ConvTranspose", [x, full, bias], np.float32, kernel_shape=[3, 2], pads=[1, 0, 0, 1])
    yield simple(opset, "ConvTranspose", [x, deep], np.float32, group=4, strides=[2, 2], output_padding=[1, 0])
    yield simple(opset, "ConvTranspose", [x, full], np.float32, strides=[2, 3], dilations=[2, 1], pads=[1, 1, 1, 0])
    for auto_pad in ("VALID", "SAME_UPPER", "SAME_LOWER"):
        yield simple(opset, "ConvTranspose", [x, full, bias], np.float32, auto_pad=auto_pad, strides=[2, 2])
    # For these cases, the reference implementation differs from the standard.
    if opset <= NEWEST_OF_ONNXRUNTIME:
        grouped = values(np.float32, 4, 3, 3, 2, seed=1)
        yield simple(opset, "ConvTranspose", [x, grouped], np.float32, group=2)
        for shape in ([6, 4], [5, 3], [8, 5]):
            yield simple(opset, "ConvTranspose", [x, full], np.float32, strides=[2, 2], output_shape=shape)
    yield simple(opset, "ConvTranspose", [values(np.float32, 2, 3, 4), values(np.float32, 3, 2, 3)], np.float32)
    cube = values(np.float32, 1, 2, 2, 3, 2), values(np.float32, 2, 2, 2, 2, 2, seed=1)
    yield simple(opset, "ConvTranspose", [*cube], np.float32, strides=[1, 2, 1])
    for dtype in (np.float64, np.float16):
        small = values(dtype, 1, 2, 3, low=0), values(dtype, 2, 3, 2, seed=1, low=0)
        yield simple(opset, "ConvTranspose", [*small], dtype)


def normalization(opset: int) -> Iterator[Case]:
    def batch_norm_inputs(dtype: Any, *shape: int, per: tuple[int, ...] | None = None) -> list[np.ndarray]:
        per = shape[1:2] or (1,) if per is None else per
        rows = [values(dtype, *per, seed=seed) for seed in (1, 2, 3)]
        return [values(dtype, *shape), *rows, values(dtype, *per, seed=4, low=0.3)]

    for shape in ((4,), (3, 2), (2, 3, 4), (2, 3, 2, 2), (1, 3, 1, 1), (1, 2, 2, 1, 3), (0, 3, 2), (2, 1)):
        yield simple(opset, "BatchNormalization", batch_norm_inputs(np.float32, *shape), np.float32)
    yield simple(
        opset, "BatchNormalization", batch_norm_inputs(np.float32, 2, 3, 4), np.float32, epsilon=0.5, momentum=0.1
    )
    yield simple(opset, "BatchNormalization", batch_norm_inputs(np.float64, 2, 3), np.float64)
    if opset < 9:
        rows = batch_norm_inputs(np.float32, 3, 2, 4, per=(2, 4))
        yield simple(opset, "BatchNormalization", rows, np.float32, spatial=0)
        yield simple(opset, "BatchNormalization", batch_norm_inputs(np.float32, 3, 2, 4), np.float32, spatial=1)
    # Before opset 14, five outputs select batch statistics. For the last output, the standard and onnxruntime disagree.
    names, mode = ["y", "mean", "var"], {"training_mode": 1}
    if opset < 14:
        names, mode = [*names, "saved_mean", "saved_var"], {}
    for shape in ((4, 2), (2, 3, 4), (2, 1, 2, 3)):
        w = Words(opset)
        inputs = {f"x{k}": value for k, value in enumerate(batch_norm_inputs(np.float32, *shape))}
        w.node("BatchNormalization", list(inputs), *names, momentum=0.75, **mode)
        yield Case(w, inputs, dict.fromkeys(names[:4], np.float32))


def layers(op: str, opset: int) -> Iterator[Case]:
    outputs = ("y", "mean", "inverse") if op == "LayerNormalization" else ("y",)
    parameters = 2 if op == "LayerNormalization" else 1
    for shape in ((4,), (3, 2), (2, 3, 4), (2, 3, 2, 2), (3, 1), (0, 3)):
        for axis in (None, *range(len(shape)), -len(shape)):
            attributes = {} if axis is None else {"axis": axis}
            inner = shape[-1:] if axis is None else shape[axis:]
            # Onnxruntime rejects rows without elements.
            if 0 in inner:
                continue
            w = Words(opset)
            given = [values(np.float32, *inner, seed=seed + 1) for seed in range(parameters)]
            inputs = {f"x{k}": value for k, value in enumerate([values(np.float32, *shape), *given])}
            w.node(op, list(inputs), *outputs, epsilon=0.01, **attributes)
            yield Case(w, inputs, dict.fromkeys(outputs, np.float32))
    # One result, no bias, another type.
    for dtype in (np.float32, np.float64):
        yield simple(opset, op, [values(dtype, 3, 4), values(dtype, 4, seed=1)], dtype)


def response(opset: int) -> Iterator[Case]:
    # Onnxruntime supports only odd window sizes and two spatial axes. The reference implementation loops over the batch
    # size instead of the channels.
    for shape, size in itertools.product(((4, 4, 2, 2), (5, 5, 1, 3), (1, 1, 2, 1)), (1, 3, 7)):
        yield simple(opset, "LRN", [values(np.float32, *shape)], np.float32, size=size)
        attributes = {"alpha": 0.5, "beta": 0.5, "bias": 2.0, "size": size}
        yield simple(opset, "LRN", [values(np.float32, *shape)], np.float32, **attributes)


def pooling(op: str, opset: int) -> Iterator[Case]:
    x = values(np.float32, 2, 3, 7, 6)
    largest = op == "MaxPool"
    forms: list[dict[str, Any]] = [{"kernel_shape": [2, 3]}, {"kernel_shape": [3, 2], "strides": [2, 1]}]
    forms.append({"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 2, 1]})
    # Onnxruntime rejects SAME with strides that skip elements.
    for mode, strides in itertools.product(("VALID", "SAME_UPPER", "SAME_LOWER"), ([1, 1], [2, 2])):
        # For these cases, the reference implementation differs from the standard.
        if not largest or mode == "VALID" or strides == [1, 1] or opset <= NEWEST_OF_ONNXRUNTIME:
            forms.append({"kernel_shape": [3, 2], "auto_pad": mode, "strides": strides})
    if opset >= 10:
        forms.append({"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1})
    if opset >= (10 if largest else 19):
        forms.append({"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 2, 0, 1]})
    if not largest:
        forms += [{**form, "count_include_pad": 1} for form in forms if "auto_pad" not in form]
    for form in forms:
        yield simple(opset, op, [x], np.float32, **form)
    for shape, kernel in (((2, 2, 7), [3]), ((1, 2, 3, 4, 5), [2, 1, 3]), ((0, 1, 4), [2])):
        yield simple(opset, op, [values(np.float32, *shape)], np.float32, kernel_shape=kernel)
    for dtype in NUMBERS:
        if takes(op, opset, dtype):
            yield simple(opset, op, [values(dtype, 1, 2, 5, low=0)], dtype, kernel_shape=[2])
    if largest and opset >= 8:
        for attributes in ({}, {"storage_order": 0}, {"storage_order": 1}):
            w = Words(opset)
            w.node(op, ["x"], "y", "at", kernel_shape=[2, 2], strides=[2, 1], pads=[1, 0, 0, 1], **attributes)
            yield Case(w, {"x": x}, {"y": np.float32, "at": np.int64})


def global_pooling(op: str, opset: int) -> Iterator[Case]:
    for shape in ((2, 3, 5), (2, 3, 4, 5), (1, 2, 3, 1, 2), (2, 3, 1, 1)):
        # The reference implementation always pools over two axes.
        if op == "GlobalAveragePool" or len(shape) == 4 or opset <= NEWEST_OF_ONNXRUNTIME:
            yield simple(opset, op, [values(np.float32, *shape)], np.float32)
    for dtype in (np.float16, np.float64):
        yield simple(opset, op, [values(dtype, 2, 2, 3, 2)], dtype)


REDUCTIONS = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)
CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    **{op: lambda opset, op=op: element_wise(op, opset) for op in (*UNARY, *BINARY)},
    **{op: lambda opset, op=op: softmax(op, opset) for op in ("Softmax", "LogSoftmax")},
    **{op: lambda opset, op=op: reduction(op, opset) for op in REDUCTIONS},
    **{op: lambda opset, op=op: partial(op, opset) for op in PARTIAL},
    **{op: lambda opset, op=op: plain(op, opset) for op in PLAIN},
    **{op: lambda opset, op=op: choices(op, opset) for op in ("Max", "Min", "Mean")},
    **{op: lambda opset, op=op: float_checks(op, opset) for op in ("IsNaN", "IsInf")},
    **{op: lambda opset, op=op: extremes_at(op, opset) for op in ("ArgMax", "ArgMin")},
    **{op: lambda opset, op=op: running(op, opset) for op in ("CumSum", "CumProd")},
    **{op: lambda opset, op=op: scatters(op, opset) for op in ("ScatterElements", "ScatterND")},
    **{op: lambda opset, op=op: blocks(op, opset) for op in ("SpaceToDepth", "DepthToSpace")},
    "Mod": modulo,
    "BitShift": shifts,
    "Hardmax": hardmax,
    "Split": splits,
    "TopK": tops,
    "OneHot": hot,
    "GroupNormalization": groups,
    "NegativeLogLikelihoodLoss": likelihood,
    "Unique": different,
    "GridSample": sampled,
    "DFT": transforms,
    "CausalConvWithState": causal_convolutions,
    "LinearAttention": linear_attention,
    **{op: lambda opset, op=op: activation(op, opset) for op in WITH_ATTRIBUTES},
    **{op: lambda opset, op=op: pooling(op, opset) for op in ("MaxPool", "AveragePool")},
    **{op: lambda opset, op=op: global_pooling(op, opset) for op in ("GlobalMaxPool", "GlobalAveragePool")},
    "Gelu": gelu,
    "Pow": power,
    "Sum": total,
    "MatMul": matmul,
    "Gemm": gemm,
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Concat": concat,
    "Slice": slices,
    "Gather": gather,
    "Shape": shape_of,
    "Size": size_of,
    "Cast": cast,
    "Where": where,
    "Expand": expand,
    "Constant": constants,
    "ConstantOfShape": constants_of_shape,
    "Dropout": dropout,
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "If": conditional,
    "NonZero": nonzero,
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "BatchNormalization": normalization,
    **{op: lambda opset, op=op: layers(op, opset) for op in ("LayerNormalization", "RMSNormalization")},
    "LRN": response,
    "PRelu": prelu,
    "Clip": clip,
    "Pad": pad,
    "Resize": resize,
}


# Operators that onnxruntime also reads in older opsets.
READ_IN_EVERY_OPSET = ("LayerNormalization",)


def oldest(op: str) -> int:
    """Return the first version of an operator."""
    return next(opset for opset in itertools.count(1) if has(op, opset))


class GlobalLpPool(OpRun):
    """An operator that the reference implementation of ONNX lacks."""

    op_domain = ""

    def _run(self, x: np.ndarray, p: int | None = None) -> tuple[np.ndarray]:
        order = 2 if p is None else p
        powers = np.abs(x.astype(np.float64)) ** order
        norms = powers.sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / order)
        return (norms.astype(x.dtype),)


def expected(model: ModelProto, opset: int, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the results of onnxruntime, or of the reference implementation if onnxruntime has no kernel."""
    if opset <= NEWEST_OF_ONNXRUNTIME:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ERRORS
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
            pass
        else:
            results: list[np.ndarray] = session.run(None, feeds)
            return results
    with np.errstate(all="ignore"):
        return [np.asarray(result) for result in ReferenceEvaluator(model, new_ops=[GlobalLpPool]).run(None, feeds)]


def check_case(case: Case, opset: int, checked: bool = True) -> None:
    """Check that a case has the expected results, and that its model is valid unless `checked` is false."""
    inputs = {name: (array.dtype, array.shape) for name, array in case.inputs.items()}
    model = case.words.model(case.words.graph(inputs, case.outputs))
    wanted = expected(model, opset, case.inputs)
    for info, want in zip(model.graph.output, wanted, strict=True):
        info.type.tensor_type.shape.dim.extend(TensorShapeProto.Dimension(dim_value=size) for size in want.shape)
        info.type.tensor_type.shape.SetInParent()
    if checked:
        onnx.checker.check_model(model)
    results = ortrain.InferenceSession(model).run(None, case.inputs)
    assert len(results) == len(wanted)
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype, model
        assert got.shape == want.shape, model
        tolerance = TOLERANCE.get(want.dtype, 0.0) if case.tolerance is None else case.tolerance
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=str(model.graph))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", sorted(CASES))
def test_operator(op: str, opset: int) -> None:
    """In the form of each opset, the operator has the results of onnxruntime."""
    if not has(op, opset) and op in READ_IN_EVERY_OPSET:
        for case in CASES[op](opset):
            check_case(case, opset, checked=False)
        return
    if not has(op, opset):
        model = simple(opset, op, [values(np.float32, 2)], np.float32)
        with pytest.raises(ortrain.InvalidModelError, match=f"the operator needs opset {oldest(op)} or newer"):
            ortrain.InferenceSession(model.words.model(model.words.graph({"x0": (np.float32, [2])}, {"y": np.float32})))
        return
    cases = list(CASES[op](opset))
    assert cases
    for case in cases:
        check_case(case, opset, checked=not defs.get_schema(op, opset).deprecated)


# Operators of onnxruntime, with the shapes of their inputs and their attributes.
ADDED: list[tuple[str, str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("com.microsoft", "Gelu", [(3, 4)], {}),
    ("com.microsoft", "FastGelu", [(3, 4)], {}),
    ("com.microsoft", "FastGelu", [(3, 4), (4,)], {}),
    ("com.microsoft", "BiasGelu", [(3, 4), (4,)], {}),
    ("com.microsoft", "QuickGelu", [(3, 4)], {}),
    ("com.microsoft", "QuickGelu", [(3, 4)], {"alpha": 0.7}),
    ("com.microsoft", "FusedMatMul", [(2, 4, 3), (2, 3, 5)], {"alpha": 0.5}),
    ("com.microsoft", "FusedMatMul", [(2, 3, 4), (2, 5, 3)], {"transA": 1, "transB": 1}),
    ("com.microsoft", "FusedMatMul", [(4, 2, 3), (2, 3, 5)], {"transBatchA": 1}),
    ("com.microsoft", "FusedMatMul", [(4, 2, 3, 6), (6, 2, 3, 5)], {"transBatchA": 1, "transBatchB": 1}),
    ("com.microsoft", "FusedMatMul", [(3, 2, 4), (2, 3, 5)], {"transA": 1, "transBatchA": 1}),
    ("com.microsoft", "FusedMatMul", [(2, 4, 3), (5, 2, 3)], {"transB": 1, "transBatchB": 1}),
    ("com.microsoft", "TransposeMatMul", [(2, 3, 4), (3, 5)], {"transA": 1}),
    ("", "SimplifiedLayerNormalization", [(3, 4), (4,)], {}),
    ("", "SimplifiedLayerNormalization", [(2, 3, 4), (3, 4)], {"axis": 1, "epsilon": 0.01}),
]


@pytest.mark.parametrize("opset", [OLDEST_OPSET, 13, NEWEST_OF_ONNXRUNTIME])
@pytest.mark.parametrize(("domain", "op", "shapes", "attributes"), ADDED)
def test_operators_that_onnxruntime_added(
    domain: str, op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], opset: int
) -> None:
    w = Words(opset)
    inputs = {f"x{k}": values(np.float32, *shape, seed=k) for k, shape in enumerate(shapes)}
    w.node(op, list(inputs), "y", domain=domain, **attributes)
    check_case(one(w, inputs, "y", np.float32), opset, checked=False)


# Resize replaced Upsample.
@pytest.mark.parametrize("opset", range(OLDEST_OPSET, 10))
def test_upsample(opset: int) -> None:
    for case in upsample(opset):
        check_case(case, opset)


@pytest.mark.parametrize("opset", range(OLDEST_OPSET, 12))
def test_mask_of_an_old_dropout(opset: int) -> None:
    """The mask is all true, as from opset 12 on. (onnxruntime returns all false; the old standard is silent.)"""
    w = Words(opset)
    w.node("Dropout", ["x"], "y", "mask", ratio=0.5)
    kind = np.dtype(np.float32 if opset < 10 else np.bool_)
    model = w.model(w.graph({"x": (np.float32, [2, 3])}, {"y": np.float32, "mask": kind}))
    x = values(np.float32, 2, 3)
    y, mask = ortrain.InferenceSession(model).run(None, {"x": x})
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(mask, np.ones_like(x, kind), strict=True)


@dataclass
class Run:
    """Two training steps and one evaluation: the losses, and the results of the first step.

    The results are gradients, or the new values of running statistics.
    """

    losses: list[float]
    outcomes: dict[str, np.ndarray]
    forward: ModelProto
    training: ModelProto
    evaluation: ModelProto


@cache
def run_of(network: str, loss: str, opset: int, batch: int | str) -> Run:
    """Make artifacts in an opset, and train with them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = write_artifacts(folder, network, loss, opset, batch)
        onnx.checker.check_model(in_public_domains(made.model))
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        training, evaluation = onnx.load(folder / "training_model.onnx"), onnx.load(folder / "eval_model.onnx")
    given = [made.feeds[name] for name in module.input_names()]
    losses = [float(module(*given))]
    outcomes = {name: np.array(p.grad if p.requires_grad else p.data) for name, p in state.parameters}
    optimizer.step()
    module.lazy_reset_grad()
    losses.append(float(module(*given)))
    module.eval()
    losses.append(float(module(*given)))
    return Run(losses, outcomes, made.model, training, evaluation)


def opset_of(model: ModelProto) -> int:
    return int(next(imported.version for imported in model.opset_import if not imported.domain))


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and all its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs(attribute.g)


# Operators with a definition of negative axes before opset 11.
COUNTS_FROM_THE_END = ("Gather",)


def in_public_domains(model: ModelProto) -> ModelProto:
    """Return a copy with onnxruntime's additions to the ONNX domain in their own domain, which no checker reads."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type in ("MaxPoolGrad", "SimplifiedLayerNormalization"):
            node.domain = "com.microsoft"
    return copy


def check_nodes(model: ModelProto) -> None:
    """Check that every ai.onnx node is valid in the model's opset: inputs, outputs, types and attributes."""
    opset = opset_of(model)
    types = {}
    for graph in graphs(model.graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            types[info.name] = info.type.tensor_type.elem_type
        for tensor in graph.initializer:
            types[tensor.name] = tensor.data_type
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain:
                assert node.domain in {imported.domain for imported in model.opset_import}
                continue
            schema = defs.get_schema(node.op_type, opset)
            assert not schema.deprecated, node
            assert schema.min_input <= len(node.input) <= schema.max_input, node
            assert schema.min_output <= len(node.output) <= schema.max_output, node
            given = {attribute.name for attribute in node.attribute}
            assert given <= set(schema.attributes), node
            assert given >= {name for name, known in schema.attributes.items() if known.required}, node
            for k, name in enumerate(node.input):
                formal = schema.inputs[min(k, len(schema.inputs) - 1)]
                if name in types:
                    kind = f"tensor({TensorProto.DataType.Name(types[name]).lower()})"
                    assert kind in formal.types, (node, name, kind)
            if opset < 11 and node.op_type not in COUNTS_FROM_THE_END:
                for attribute in node.attribute:
                    if attribute.name in ("axis", "axes"):
                        assert min([attribute.i, *attribute.ints]) >= 0, node


@pytest.mark.parametrize(("network", "loss", "opset"), TRAINED)
def test_training(network: str, loss: str, opset: int) -> None:
    """The training model has the opset of the forward model, and the results of the newest opset."""
    # Older softmaxes treat a middle axis differently.
    newest = max(OPSETS) if network not in CHANGED or opset >= CHANGED[network] else CHANGED[network] - 1
    for batch in ("batch", BATCH):
        run, reference = (run_of(network, loss, version, batch) for version in (opset, newest))
        onnx.checker.check_model(in_public_domains(run.evaluation))
        onnx.checker.check_model(in_public_domains(run.training))
        assert opset_of(run.training) == opset_of(run.evaluation) == opset
        assert run.training.ir_version == run.forward.ir_version
        check_nodes(in_public_domains(run.training))
        assert np.isfinite(run.losses).all()
        np.testing.assert_allclose(run.losses, reference.losses, rtol=SAME)
        assert run.outcomes.keys() == reference.outcomes.keys()
        for name, want in reference.outcomes.items():
            assert np.abs(want).max() > 0
            np.testing.assert_allclose(run.outcomes[name], want, rtol=0, atol=SAME * np.abs(want).max(), err_msg=name)


@pytest.mark.parametrize("opset", [opset for opset in OPSETS if opset >= 10])
def test_pooling_of_unknown_sizes_is_trained(opset: int) -> None:
    """Training gives the results of known sizes."""
    run, reference = (run_of(network, "MSELoss", opset, "batch") for network in ("pooled_unsized", "pooled_sized"))
    np.testing.assert_allclose(run.losses, reference.losses, rtol=SAME)
    for name, want in reference.outcomes.items():
        np.testing.assert_allclose(run.outcomes[name], want, rtol=0, atol=SAME * np.abs(want).max(), err_msg=name)


def test_pooling_of_unknown_sizes_needs_opset_10(tmp_path: Path) -> None:
    """Before opset 10, Slice accepts only constant positions."""
    with pytest.raises(ortrain.UnsupportedError, match=r"AveragePool_\d+_Grad.*needs opset 10 or newer"):
        write_artifacts(tmp_path, "pooled_unsized", "MSELoss", 9, "batch")
    assert not list(tmp_path.iterdir())


def test_a_normalization_of_onnxruntime_in_an_older_opset(tmp_path: Path) -> None:
    """Onnxruntime has LayerNormalization in every opset; the training model uses operators of its own opset."""
    outcomes = []
    for opset in (17, 13):
        folder = tmp_path / str(opset)
        folder.mkdir()
        made = write_artifacts(folder, "layered", "MSELoss", opset, "batch")
        training = onnx.load(folder / "training_model.onnx")
        assert opset_of(training) == opset
        assert (opset == 17) == any(node.op_type == "LayerNormalization" for node in training.graph.node)
        onnx.checker.check_model(in_public_domains(training))
        check_nodes(in_public_domains(training))
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        given = [made.feeds[name] for name in module.input_names()]
        loss = float(module(*given))
        gradients = {name: np.array(parameter.grad) for name, parameter in state.parameters}
        module.eval()
        outcomes.append((loss, float(module(*given)), gradients))
    (loss, evaluated, gradients), (older_loss, older_evaluated, older_gradients) = outcomes
    np.testing.assert_allclose([older_loss, older_evaluated], [loss, evaluated], rtol=SAME)
    for name, want in gradients.items():
        np.testing.assert_allclose(older_gradients[name], want, rtol=0, atol=SAME * np.abs(want).max(), err_msg=name)


def test_every_operator_is_trained() -> None:
    """The trained networks contain every operator of this file."""
    used = {
        node.op_type
        for network, loss, opset in TRAINED
        if opset == max(OPSETS)
        for graph in graphs(run_of(network, loss, opset, BATCH).evaluation.graph)
        for node in graph.node
    }
    assert used >= set(CASES)


@pytest.mark.parametrize(
    ("network", "opset", "sentence"),
    [
        (
            "pooled",
            8,
            'the model: node "GlobalMaxPool_5_Grad/MaxPoolGrad_19" (MaxPoolGrad) cannot be written at opset 8: it '
            "needs opset 9 or newer",
        ),
        (
            "mirrored",
            8,
            'the model: node "Pad_1_Grad/ConstantOfShape_15" (ConstantOfShape) cannot be written at opset 8: it '
            "needs opset 9 or newer",
        ),
    ],
)
def test_no_older_spelling(network: str, opset: int, sentence: str, tmp_path: Path) -> None:
    """An error names the operator and its oldest sufficient opset."""
    with pytest.raises(ortrain.UnsupportedError) as error:
        write_artifacts(tmp_path, network, "MSELoss", opset, "batch")
    assert str(error.value) == sentence
    assert not list(tmp_path.iterdir())
