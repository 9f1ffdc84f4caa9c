"""Operators that ONNX Runtime's tools fuse: experts, normalizations of diffusion models, further attentions.

Operators with a kernel for the CPU are compared with onnxruntime, the others with their definition in NumPy. Gradients
are compared with central differences in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from test_quantized_gradients import model as make_model
from test_quantized_operators import MICROSOFT, assert_same, f32, floats, i8, integers, u8, without_optimizer

import ortrain
from ortrain.gradient import vjp

# Rounding of float32 in sums of a few hundred products, relative to the largest result.
TOLERANCE = 4e-6
# Step of a central difference, and its error in float64 relative to the largest element.
STEP, DIFFERENCE_TOLERANCE = 1e-6, 1e-7

Function = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Case:
    """A node: operator, inputs by name (None where one is missing), attributes, and its definition in NumPy."""

    name: str
    operator: str
    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    definition: Function | None = None
    constants: tuple[str, ...] = ()
    differentiable: bool = True

    def model(self, dtype: str = "float32") -> bytes:
        """Return a model of one node with floats of an element type."""
        names = [name if value is not None else "" for name, value in self.inputs.items()]
        while not names[-1]:
            names.pop()
        results = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.operator, names, results, name="node", domain=MICROSOFT, **self.attributes)
        given = self.feeds(dtype)
        constants = {name: given.pop(name) for name in self.constants}
        return make_model([node], given, constants, results)

    def feeds(self, dtype: str = "float32") -> dict[str, np.ndarray]:
        """Return all inputs, with floats of an element type."""
        return {
            name: value.astype(dtype) if value.dtype == np.float32 else value
            for name, value in self.inputs.items()
            if value is not None
        }

    def variable_feeds(self, dtype: str = "float32") -> dict[str, np.ndarray]:
        """Return the inputs that are no constants."""
        return {name: value for name, value in self.feeds(dtype).items() if name not in self.constants}


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def group_norm(groups: int, silu: bool, last: bool, epsilon: float) -> Function:
    """Return the definition of ``GroupNorm`` and ``SkipGroupNorm``."""

    def compute(
        x: np.ndarray,
        gamma: np.ndarray,
        beta: np.ndarray,
        skip: np.ndarray | None = None,
        bias: np.ndarray | None = None,
    ) -> np.ndarray:
        planes = np.moveaxis(x, -1, 1) if last else x
        if skip is not None:
            skip = skip[:, :, None, None] if skip.ndim == 2 else np.moveaxis(skip, -1, 1) if last else skip
            planes = planes + skip + (0 if bias is None else bias[:, None, None])
        grouped = planes.reshape(len(x), groups, -1)
        mean, variance = (fn(grouped, axis=2, keepdims=True) for fn in (np.mean, np.var))
        y = ((grouped - mean) / np.sqrt(variance + epsilon)).reshape(planes.shape)
        y = y * gamma[:, None, None] + beta[:, None, None]
        y = y * sigmoid(y) if silu else y
        return np.moveaxis(y, 1, -1) if last else y

    return compute


def split_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the definition of ``BiasSplitGelu``."""
    left, right = np.split(x + bias, 2, axis=-1)
    return left * right * (1 + np.vectorize(math.erf)(right / math.sqrt(2))) / 2


def nhwc_conv(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a convolution without padding; the channels are behind, the filter is [outputs, height, width, inputs]."""
    height, width = x.shape[1] - w.shape[1] + 1, x.shape[2] - w.shape[2] + 1
    y = np.zeros((len(x), height, width, len(w)))
    for i in range(w.shape[1]):
        for j in range(w.shape[2]):
            y += x[:, i : i + height, j : j + width] @ w[:, i, j].T
    return y + b


def position_bias(bidirectional: bool, max_distance: int) -> Function:
    """Return the relative position bias of T5; the table has the elements of [heads, buckets]."""

    def compute(table: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        buckets, heads = table.shape
        table = table.reshape(heads, buckets)
        result = np.zeros((1, heads, queries.item(), keys.item()))
        for i in range(queries.item()):
            for j in range(keys.item()):
                distance, sides, bucket = j - i, buckets, 0
                if bidirectional:
                    sides //= 2
                    bucket = sides * (distance > 0)
                    distance = abs(distance)
                else:
                    distance = max(-distance, 0)
                exact = sides // 2
                if distance >= exact:
                    share = math.log(distance / exact) / math.log(max_distance / exact)
                    distance = min(exact + int(share * (sides - exact)), sides - 1)
                result[0, :, i, j] = table[:, bucket + distance]
        return result

    return compute


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int) -> np.ndarray:
    """Return the attention of [length, width] with some heads."""
    parts = [np.stack(np.split(x, heads, axis=1)) for x in (q, k, v)]
    scores = parts[0] @ parts[1].transpose(0, 2, 1) / math.sqrt(parts[0].shape[2])
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    return np.concatenate(list(weights @ parts[2]), axis=1)


def packed_attention(heads: int) -> Function:
    """Return the attention of tokens of several items behind each other."""

    def compute(query: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        if query.ndim == 4:
            tokens = [query[:, :, k].reshape(len(query), -1) for k in range(3)]
            _, ends = rest
        else:
            key, value, bias, _, ends = rest
            tokens = [x + b for x, b in zip((query, key, value), np.split(bias, 3), strict=True)]
        items = [attention(*(x[start:end] for x in tokens), heads) for start, end in pairwise(ends)]
        return np.concatenate(items)

    return compute


IMAGE = (2, 3, 5, 4)
OFFSETS = np.array([[0, 4, 5, 8], [9, 10, 11, 1], [2, 3, 6, 7]], np.int32)
ENDS = np.array([0, 1, 3, 7], np.int32)


def experts(rows: int, hidden: int = 6, width: int = 4, count: int = 3) -> dict[str, np.ndarray | None]:
    """Return tokens, logits of the router, and two layers with biases."""
    return {
        "x": floats(1, (2, 5, width)),
        "router": floats(2, (10, count)),
        "w1": floats(3, (count, rows, width)),
        "b1": floats(4, (count, rows)),
        "w2": floats(5, (count, width, hidden)),
        "b2": floats(6, (count, width)),
    }


def mixture(selected: int, act: str, normalize: bool, fusion: int = 0, alpha: float = 1, beta: float = 0) -> Function:
    """Return the definition of ``MoE``, for layouts that onnxruntime does not compute."""

    def compute(x: np.ndarray, router: np.ndarray, *layers: np.ndarray) -> np.ndarray:
        w1, b1, w2, b2, *third = layers
        tokens = x.reshape(-1, x.shape[-1])
        shares = np.exp(router - router.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        result = np.zeros_like(tokens)
        for token, row in enumerate(tokens):
            chosen = np.argsort(-router[token])[:selected]
            total = shares[token, chosen].sum() if normalize else 1
            for expert in chosen:
                h = w1[expert] @ row + b1[expert]
                linear = third[0][expert] @ row + third[1][expert] if third else None
                if fusion:
                    h, linear = (h[0::2], h[1::2]) if fusion == 1 else np.split(h, 2)
                h = h * sigmoid(alpha * h) if act in ("silu", "swiglu") else np.maximum(h, 0)
                h = h if linear is None else h * (linear + beta)
                result[token] += shares[token, expert] / total * (w2[expert] @ h + b2[expert])
        return result.reshape(x.shape)

    return compute


def quantized_experts(bits: int, block: int | None, zero_points: bool) -> dict[str, np.ndarray | None]:
    """Return tokens, logits, and two layers of packed weights with scales and biases."""
    rng = np.random.default_rng(bits)
    count, width, hidden = 3, 32, 64
    blocks = [1 if block is None else size // block for size in (width, hidden)]
    layers: dict[str, np.ndarray | None] = {"x": floats(1, (5, width)), "router": floats(2, (5, count))}
    rows = {"1": (2 * hidden, width, blocks[0]), "2": (width, hidden, blocks[1])}
    for name, (outputs, inputs, per_row) in rows.items():
        layers[f"w{name}"] = rng.integers(0, 256, (count, outputs, inputs * bits // 8), np.uint8)
        shape = (count, outputs) if block is None else (count, outputs, per_row)
        layers[f"s{name}"] = (0.01 * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        layers[f"b{name}"] = floats(7, (count, outputs))
    layers |= {"w3": None, "s3": None, "b3": None}
    if zero_points:
        for name, (outputs, _, per_row) in rows.items():
            size = -(-per_row * bits // 8)
            shape = (count, outputs * bits // 8) if block is None else (count, outputs, size)
            layers[f"z{name}"] = rng.integers(0, 256, shape, np.uint8)
    return layers


GROUPS = {"groups": 2, "epsilon": 1e-3}
CHANNELS = {"gamma": floats(2, (4,)), "beta": floats(3, (4,))}
COMPUTED = [
    Case(
        "group norm",
        "GroupNorm",
        {"x": floats(1, IMAGE), **CHANNELS},
        {**GROUPS, "activation": 0},
        definition=group_norm(2, False, True, 1e-3),
    ),
    Case(
        "group norm, channels second",
        "GroupNorm",
        {"x": floats(1, (2, 4, 3, 5)), **CHANNELS},
        {**GROUPS, "activation": 1, "channels_last": 0},
        definition=group_norm(2, True, False, 1e-3),
    ),
    Case(
        "skip group norm",
        "SkipGroupNorm",
        {"x": floats(1, IMAGE), **CHANNELS, "skip": floats(4, IMAGE), "bias": floats(5, (4,))},
        {**GROUPS, "activation": 1},
        definition=group_norm(2, True, True, 1e-3),
    ),
    Case(
        "skip group norm of channels",
        "SkipGroupNorm",
        {"x": floats(1, IMAGE), **CHANNELS, "skip": floats(4, (2, 4))},
        {**GROUPS, "activation": 0},
        definition=group_norm(2, False, True, 1e-3),
    ),
    Case(
        "bias add",
        "BiasAdd",
        {"x": floats(1, (2, 3, 4)), "bias": floats(2, (4,)), "skip": floats(3, (2, 3, 4))},
        definition=lambda x, b, s: x + b + s,
    ),
    Case("split gelu", "BiasSplitGelu", {"x": floats(1, (2, 3, 8)), "bias": floats(2, (8,))}, definition=split_gelu),
    Case(
        "convolution with channels behind",
        "NhwcConv",
        {"x": floats(1, IMAGE), "w": floats(2, (6, 2, 3, 4)), "b": floats(3, (6,))},
        definition=nhwc_conv,
    ),
    *(
        Case(
            f"positions, bidirectional {both}",
            "RelativePositionBias",
            {"table": floats(1, (8, 3)), "queries": np.array([21]), "keys": np.array([21])},
            {"is_bidirectional": both, "max_distance": 16},
            definition=position_bias(bool(both), 16),
            constants=("queries", "keys"),
        )
        for both in (0, 1)
    ),
    Case(
        "packed tokens",
        "PackedMultiHeadAttention",
        {
            **{name: floats(k, (7, 6)) for k, name in enumerate(("query", "key", "value"))},
            "bias": floats(4, (18,)),
            "offsets": OFFSETS,
            "ends": ENDS,
        },
        {"num_heads": 2},
        definition=packed_attention(2),
        constants=("offsets", "ends"),
    ),
    Case(
        "packed heads",
        "PackedMultiHeadAttention",
        {"query": floats(1, (7, 2, 3, 5)), "key": None, "value": None, "bias": None, "offsets": OFFSETS, "ends": ENDS},
        {"num_heads": 2},
        definition=packed_attention(2),
        constants=("offsets", "ends"),
    ),
    Case(
        "gated experts",
        "MoE",
        {**experts(6), "w3": floats(7, (3, 6, 4)), "b3": floats(8, (3, 6))},
        {"k": 2, "activation_type": "silu"},
        definition=mixture(2, "silu", False),
    ),
    Case(
        "experts with halves behind each other",
        "MoE",
        experts(12),
        {
            "k": 2,
            "activation_type": "swiglu",
            "swiglu_fusion": 2,
            "normalize_routing_weights": 1,
            "activation_alpha": 1.7,
            "activation_beta": 1.0,
        },
        definition=mixture(2, "swiglu", True, 2, 1.7, 1),
    ),
]


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_definition(case: Case) -> None:
    assert case.definition is not None
    wide = case.feeds("float64")
    expected = case.definition(*wide.values())
    (found,) = ortrain.InferenceSession(case.model()).run(["y0"], case.variable_feeds())
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def decoder(past: int, mask: bool) -> dict[str, np.ndarray | None]:
    """Return the inputs of ``DecoderMaskedMultiHeadAttention`` for one token of two items."""
    cache = (2, 2, past, 4)
    seen = np.ones((2, past + 1), np.int32)
    seen[1, :2] = 0
    return {
        **{name: floats(k, (2, 1, 8)) for k, name in enumerate(("query", "key", "value"))},
        "mask": seen if mask else None,
        "attention_bias": None,
        "past_key": floats(4, cache) if past else None,
        "past_value": floats(5, cache) if past else None,
        **dict.fromkeys(("past_length", "beam_width", "cache_indirection")),
        "bias": floats(6, (24,)),
    }


def masked_decoder(**inputs: np.ndarray) -> np.ndarray:
    """Return the attention of one query of each item to its past and to itself."""
    biases = np.split(inputs["bias"], 3)
    q, k, v = (inputs[name] + bias for name, bias in zip(("query", "key", "value"), biases, strict=True))
    q, k, v = (x.reshape(2, 2, 1, 4) for x in (q, k, v))
    if "past_key" in inputs:
        k, v = (np.concatenate([inputs[name], x], axis=2) for name, x in (("past_key", k), ("past_value", v)))
    scores = q @ k.transpose(0, 1, 3, 2) / 2
    if "mask" in inputs:
        scores = scores + np.where(inputs["mask"], 0, -10000.0)[:, None, None]
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return (weights / weights.sum(3, keepdims=True) @ v).reshape(2, 1, 8)


DECODERS = [
    Case(
        f"decoder, past {past}, mask {mask}",
        "DecoderMaskedMultiHeadAttention",
        decoder(past, mask),
        {"num_heads": 2},
        outputs=3,
    )
    for past, mask in ((0, False), (4, False), (4, True))
]


@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
def test_masked_decoder(case: Case) -> None:
    """The kernels of onnxruntime need a cache that past and present share."""
    expected = masked_decoder(**case.feeds("float64"))
    (found,) = ortrain.InferenceSession(case.model()).run(["y0"], case.variable_feeds())
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def quantized_attention(past: int) -> dict[str, np.ndarray | None]:
    """Return the inputs of ``QAttention``."""
    return {
        "x": integers(1, (2, 5, 12)),
        "w": integers(2, (12, 24), "int8"),
        "bias": floats(3, (24,)),
        "x_scale": f32(0.02),
        "w_scale": np.linspace(0.005, 0.01, 24).astype(np.float32) if past else f32(0.01),
        "mask": None,
        "x_zero_point": u8(120),
        "w_zero_point": np.zeros(24, np.int8) if past else i8(3),
        "past": floats(4, (2, 2, 2, past, 4)) if past else None,
    }


COMPARED = [
    *(
        Case(
            f"experts: {act}, {k} of them",
            "MoE",
            experts(6),
            {"k": k, "activation_type": act, "normalize_routing_weights": k - 1},
        )
        for k, act in ((1, "relu"), (2, "silu"), (2, "gelu"), (1, "identity"))
    ),
    Case(
        "experts with alternating halves",
        "MoE",
        experts(12),
        {
            "k": 2,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
            "activation_alpha": 1.702,
            "activation_beta": 1.0,
            "swiglu_limit": 1.5,
        },
    ),
    *(
        Case(
            f"experts of {bits} bits, block {block}, zero points {zero}",
            "QMoE",
            quantized_experts(bits, block, zero),
            {
                "k": 2,
                "activation_type": "swiglu",
                "swiglu_fusion": 1,
                "normalize_routing_weights": 1,
                "expert_weight_bits": bits,
                **({} if block is None else {"block_size": block}),
            },
            constants=("w1", "s1", "w2", "s2", *(("z1", "z2") if zero else ())),
            differentiable=False,
        )
        for bits, block, zero in ((4, None, False), (4, 32, False), (4, 32, True), (8, None, False))
    ),
    *(
        Case(
            f"quantized attention, past {past}",
            "QAttention",
            quantized_attention(past),
            {"num_heads": 2, "unidirectional": int(past > 0)},
            outputs=2 if past else 1,
            differentiable=False,
            constants=("w", "x_scale", "w_scale", "x_zero_point", "w_zero_point"),
        )
        for past in (0, 3)
    ),
]


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: case.name)
def test_onnxruntime_agrees(case: Case) -> None:
    session = ort.InferenceSession(case.model(), without_optimizer(), providers=["CPUExecutionProvider"])
    expected = session.run(None, case.variable_feeds())
    found = ortrain.InferenceSession(case.model()).run(None, case.variable_feeds())
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(np.asarray(ours), np.asarray(theirs), TOLERANCE)


@pytest.mark.parametrize(
    "case", [case for case in [*COMPUTED, *COMPARED, *DECODERS] if case.differentiable], ids=lambda case: case.name
)
def test_gradients(case: Case) -> None:
    """Compare in float64, along a random direction of every float input."""
    rng = np.random.default_rng(9)
    made, given = case.model("float64"), case.variable_feeds("float64")
    wrt = [name for name, value in given.items() if value.dtype == np.float64]
    forward = ortrain.InferenceSession(made)
    (y,) = forward.run(["y0"], given)
    g = rng.standard_normal(y.shape)
    session = ortrain.InferenceSession(vjp(made, of="y0", wrt=wrt))
    found = session.run([f"{name}_grad" for name in wrt], given | {"y0_grad": g})
    for name, gradient in zip(wrt, found, strict=True):
        direction = rng.standard_normal(given[name].shape)
        moved = [
            float((forward.run(["y0"], given | {name: given[name] + sign * STEP * direction})[0] * g).sum())
            for sign in (1, -1)
        ]
        expected = (moved[0] - moved[1]) / (2 * STEP)
        scale = max(1.0, float(np.abs(gradient * direction).sum()))
        assert abs(float((gradient * direction).sum()) - expected) < DIFFERENCE_TOLERANCE * scale, name


HEADS, KEY_HEADS, SIZE, BLOCK, CACHE = 4, 2, 8, 16, 64
# Two layouts of four blocks: rows of visible blocks as in the documentation of the operator.
BLOCK_ROWS = np.array([[0, 1, 3, 5, 8], [0, 1, 3, 6, 9]], np.int32)
BLOCK_COLUMNS = np.array([[0, 0, 1, 1, 2, 1, 2, 3, -1], [0, 0, 1, 0, 1, 2, 0, 2, 3]], np.int32)


def sparse_inputs(queries: int, total: int) -> dict[str, np.ndarray]:
    """Return the inputs of ``SparseAttention`` for two items of the same length."""
    cache = floats(4, (2, KEY_HEADS, CACHE, SIZE))
    return {
        "query": floats(1, (2, queries, HEADS * SIZE)),
        "key": floats(2, (2, queries, KEY_HEADS * SIZE)),
        "value": floats(3, (2, queries, KEY_HEADS * SIZE)),
        "past_key": cache,
        "past_value": cache[::-1].copy(),
        "block_rows": BLOCK_ROWS,
        "block_columns": BLOCK_COLUMNS,
        "total": np.array([total], np.int32),
        "lengths": np.array([total, total], np.int32),
    }


def sparse_model(inputs: dict[str, np.ndarray], rows: np.ndarray = BLOCK_ROWS) -> bytes:
    """Return a model of one ``SparseAttention``."""
    constants = {"block_rows": rows, "block_columns": BLOCK_COLUMNS}
    node = helper.make_node(
        "SparseAttention",
        list(inputs),
        ["y", "present_key", "present_value"],
        name="node",
        domain=MICROSOFT,
        num_heads=HEADS,
        kv_num_heads=KEY_HEADS,
        sparse_block_size=BLOCK,
    )
    given = {name: value for name, value in inputs.items() if name not in constants}
    return make_model([node], given, constants, list(node.output))


@pytest.mark.parametrize(("queries", "total"), [(40, 40), (1, 50), (3, 64)])
def test_sparse_attention(queries: int, total: int) -> None:
    """Each query sees the keys up to its own in the visible blocks of the layout of its head."""
    inputs = sparse_inputs(queries, total)
    given = {name: value for name, value in inputs.items() if not name.startswith("block")}
    found = ortrain.InferenceSession(sparse_model(inputs)).run(None, given)
    start = total - queries
    visible = np.zeros((2, CACHE, CACHE), bool)
    for layout in range(2):
        for row in range(CACHE // BLOCK):
            for column in BLOCK_COLUMNS[layout, BLOCK_ROWS[layout, row] : BLOCK_ROWS[layout, row + 1]]:
                block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                visible[layout][block] = True
    visible &= np.tri(CACHE, dtype=bool)
    heads = {
        name: inputs[name].astype(np.float64).reshape(2, queries, -1, SIZE).transpose(0, 2, 1, 3)
        for name in ("query", "key", "value")
    }
    keys, values = (inputs[name].astype(np.float64) for name in ("past_key", "past_value"))
    keys[:, :, start:total], values[:, :, start:total] = heads["key"], heads["value"]
    expected = np.zeros((2, queries, HEADS, SIZE))
    for head in range(HEADS):
        scores = heads["query"][:, head] @ keys[:, head // 2].transpose(0, 2, 1) / math.sqrt(SIZE)
        scores = np.where(visible[head % 2, start:total], scores, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        expected[:, :, head] = weights / weights.sum(2, keepdims=True) @ values[:, head // 2]
    np.testing.assert_allclose(found[0], expected.reshape(2, queries, -1), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found[1][:, :, :total], keys.astype(np.float32)[:, :, :total])


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (np.array([[0, 1, 3, 5, 10]] * 2, np.int32), "do not ascend up to the number of entries"),
        (np.array([[0, 1, 3, 5, 9]] * 2, np.int32), "an entry is no index of a block"),
        (np.array([[0, 1, 3, 3]] * 2, np.int32), "the cache has 64 positions, but 3 blocks of 16 have fewer"),
    ],
)
def test_layouts_that_are_damaged(rows: np.ndarray, sentence: str) -> None:
    with pytest.raises(ortrain.OrtrainError) as refused:
        ortrain.InferenceSession(sparse_model(sparse_inputs(1, 50), rows))
    assert sentence in str(refused.value)
    assert 'node "node" (com.microsoft:SparseAttention)' in str(refused.value)


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        (COMPARED[0], {"k": 4}, "k is 4, but there are 3 experts"),
        (COMPARED[0], {"k": 0}, "k, the number of selected experts, must be positive, got 0"),
        (COMPARED[0], {"activation_type": "sin"}, "activation_type must be relu, gelu, silu, swiglu or identity"),
        (COMPARED[0], {"activation_type": "swiglu"}, "swiglu needs the weights of layer 3 if swiglu_fusion is 0"),
        (COMPARED[0], {"use_sparse_mixer": 1}, "use_sparse_mixer (thresholds of the router) is not supported"),
        (COMPARED[5], {"block_size": 64}, "cannot be divided into blocks of 64"),
        (COMPARED[5], {"block_size": 48}, "block_size must be a power of two from 16"),
        (COMPARED[5], {"expert_weight_bits": 3}, "expert_weight_bits must be 2, 4 or 8, got 3"),
        (COMPARED[5], {"quant_type": "fp4"}, 'quant_type is "fp4", but only integers ("int") are supported'),
        (COMPUTED[0], {"groups": 3}, "has 4 channels, which cannot be divided into 3 groups"),
        (COMPUTED[0], {"activation": 2}, "activation must be 0 or 1 (SiLU), got 2"),
        (COMPUTED[9], {"num_heads": 4}, "cannot be divided into 4 heads"),
    ],
)
def test_invalid_attributes_are_named(case: Case, changes: dict[str, Any], sentence: str) -> None:
    changed = Case(
        case.name, case.operator, case.inputs, case.attributes | changes, case.outputs, constants=case.constants
    )
    with pytest.raises(ortrain.OrtrainError) as refused:
        ortrain.InferenceSession(changed.model()).run(None, changed.variable_feeds())
    assert sentence in str(refused.value)
    assert f'node "node" (com.microsoft:{case.operator})' in str(refused.value)
