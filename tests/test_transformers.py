"""Operators of transformers match onnxruntime for all attributes; test_oracle.py trains networks with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortrain

BATCH, QUERIES, KEYS, HEADS, SIZE = 2, 3, 5, 2, 4
WIDTH = HEADS * SIZE
# Rounding of sums of a few products, exponentials and normalizations in float32.
TOLERANCE = 3e-6


def both(
    op: str,
    inputs: dict[str, np.ndarray | None],
    outputs: int,
    attributes: dict[str, Any],
    domain: str = "com.microsoft",
    opset: int = 17,
) -> None:
    """Run a node here and in onnxruntime and compare the outputs, with declared and with open sizes."""
    given = {name: array for name, array in inputs.items() if array is not None}
    names = [name if array is not None else "" for name, array in inputs.items()]
    while not names[-1]:
        names.pop()
    results = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, names, results, name="n", domain=domain, **attributes)
    session = None
    for symbolic in (False, True):
        declared = []
        # Only a declared batch size distinguishes ends and starts of keys from ends alone.
        first = 1 if "mask" in given and given["mask"].shape == (2 * BATCH,) else 0
        for name, array in given.items():
            # Sizes of the data are symbols where the operator can infer them.
            shape = [
                f"d{size}" if symbolic and name in ("input", "query", "mask") and first <= axis < 2 else size
                for axis, size in enumerate(array.shape)
            ]
            declared.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
        graph = helper.make_graph(
            [node], "graph", declared, [helper.make_tensor_value_info(name, 0, None) for name in results]
        )
        for value in graph.output:
            value.ClearField("type")
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        content = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
        if session is None:
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        theirs = session.run(None, given)
        ours = ortrain.InferenceSession(content).run(None, given)
        for got, want in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{attributes} {names}")


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def masks(batch: int, queries: int, keys: int) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(3)
    of_keys, of_pairs = rng.integers(0, 2, (batch, keys)), rng.integers(0, 2, (batch, queries, keys))
    # Where -10000 masks all keys, float32 scores lose almost all of their differences.
    of_keys[:, 0] = of_pairs[:, :, 0] = 1
    return {
        "none": None,
        "ends": np.array([keys - 1, 2], np.int32),
        "ends and starts": np.array([keys, keys - 1, 1, 0], np.int32),
        "keys": of_keys.astype(np.int32),
        "pairs": of_pairs.astype(np.int32),
    }


@pytest.mark.parametrize("skip_shape", [(BATCH, QUERIES, WIDTH), (1, QUERIES, WIDTH), (QUERIES, WIDTH)])
@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_skip_layer_normalization(op: str, skip_shape: tuple[int, ...]) -> None:
    for shift, bias, epsilon in itertools.product([False, True], [False, True], [1e-5, 0.1]):
        inputs: dict[str, np.ndarray | None] = {
            "input": floats(1, BATCH, QUERIES, WIDTH),
            "skip": floats(2, *skip_shape),
            "gamma": floats(3, WIDTH),
        }
        if op == "SkipLayerNormalization":
            inputs["beta"] = floats(4, WIDTH) if shift else None
        inputs["bias"] = floats(5, WIDTH) if bias else None
        both(op, inputs, 1, {"epsilon": epsilon})


def test_skip_layer_normalization_gives_the_sum() -> None:
    x, skip, bias = floats(1, BATCH, QUERIES, WIDTH), floats(2, BATCH, QUERIES, WIDTH), floats(3, WIDTH)
    for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        names = ["x", "skip", "gamma", *(["beta"] if op == "SkipLayerNormalization" else []), "bias"]
        feeds = {"x": x, "skip": skip, "gamma": floats(4, WIDTH), "beta": floats(5, WIDTH), "bias": bias}
        node = helper.make_node(op, names, ["y", "", "", "sum"], domain="com.microsoft")
        graph = helper.make_graph(
            [node],
            "graph",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, feeds[name].shape) for name in names],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in ("y", "sum")],
        )
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        content = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
        given = {name: feeds[name] for name in names}
        theirs = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, given)
        ours = ortrain.InferenceSession(content).run(None, given)
        for got, want in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_embed_layer_normalization() -> None:
    rng = np.random.default_rng(1)
    for segments, mask, positions in itertools.product([False, True], [False, True], [None, 1, BATCH]):
        inputs: dict[str, np.ndarray | None] = {
            "input": rng.integers(0, 9, (BATCH, QUERIES)).astype(np.int32),
            "segment_ids": rng.integers(0, 2, (BATCH, QUERIES)).astype(np.int32) if segments else None,
            "word": floats(1, 9, WIDTH),
            "position": floats(2, 6, WIDTH),
            "segment": floats(3, 2, WIDTH) if segments else None,
            "gamma": floats(4, WIDTH),
            "beta": floats(5, WIDTH),
            "mask": rng.integers(0, 2, (BATCH, QUERIES)).astype(np.int32) if mask else None,
            "position_ids": None if positions is None else rng.integers(0, 6, (positions, QUERIES)).astype(np.int32),
        }
        both("EmbedLayerNormalization", inputs, 3, {"epsilon": 1e-5})


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", masks(BATCH, QUERIES, QUERIES))
def test_attention(mask: str, causal: int, past: int) -> None:
    widths = [WIDTH, WIDTH, WIDTH if past else 2 * WIDTH]
    keys = QUERIES + past
    for added, scale, value in itertools.product([None, (BATCH, HEADS), (1, 1)], [None, 0.7], [None, -2.0]):
        if past and added is not None:
            continue  # onnxruntime takes one of them
        inputs = {
            "input": floats(1, BATCH, QUERIES, 6),
            "weights": floats(2, 6, sum(widths)),
            # Without a bias the CPU kernel of onnxruntime 1.31 ends the process.
            "bias": floats(3, sum(widths)),
            "mask": masks(BATCH, QUERIES, keys)[mask],
            "past": floats(4, 2, BATCH, HEADS, past, SIZE) if past else None,
            "attention_bias": None if added is None else floats(5, *added, QUERIES, keys),
        }
        attributes: dict[str, Any] = {"num_heads": HEADS, "unidirectional": causal}
        if not past:
            attributes["qkv_hidden_sizes"] = widths
        if scale is not None:
            attributes["scale"] = scale
        if value is not None:
            attributes["mask_filter_value"] = value
        both("Attention", inputs, 2 if past else 1, attributes)


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "ends", "keys", "pairs"])
def test_multi_head_attention(mask: str, causal: int, past: int) -> None:
    # With more keys than queries, the last query attends to all keys in onnxruntime.
    new = QUERIES if causal else KEYS
    keys = new + past
    of_values = WIDTH if past else 2 * WIDTH
    for bias, added, scale in itertools.product([False, True], [None, (BATCH, HEADS), (1, 1)], [None, 0.7]):
        inputs = {
            "query": floats(1, BATCH, QUERIES, WIDTH),
            "key": floats(2, BATCH, new, WIDTH),
            "value": floats(3, BATCH, new, of_values),
            "bias": floats(4, 2 * WIDTH + of_values) if bias else None,
            "mask": masks(BATCH, QUERIES, keys)[mask],
            "attention_bias": None if added is None else floats(5, *added, QUERIES, keys),
            "past_key": floats(6, BATCH, HEADS, past, SIZE) if past else None,
            "past_value": floats(7, BATCH, HEADS, past, SIZE) if past else None,
        }
        attributes: dict[str, Any] = {"num_heads": HEADS, "unidirectional": causal, "mask_filter_value": -2.0}
        if scale is not None:
            attributes["scale"] = scale
        both("MultiHeadAttention", inputs, 3 if past else 1, attributes)


def test_multi_head_attention_of_heads() -> None:
    """Keys and values may have separate heads already, as in cross-attention."""
    for mask, bias in itertools.product([None, "keys"], [False, True]):
        inputs = {
            "query": floats(1, BATCH, QUERIES, WIDTH),
            "key": floats(2, BATCH, HEADS, KEYS, SIZE),
            "value": floats(3, BATCH, HEADS, KEYS, SIZE),
            "bias": floats(4, 3 * WIDTH) if bias else None,
            "mask": masks(BATCH, QUERIES, KEYS)[mask] if mask else None,
        }
        both("MultiHeadAttention", inputs, 1, {"num_heads": HEADS})


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_rotary_embedding(domain: str) -> None:
    rng = np.random.default_rng(2)
    for flat, interleaved, partial, looked_up in itertools.product([False, True], [0, 1], [0, 2], [0, 1, 2]):
        if not domain and looked_up == 1:
            continue
        if domain and not looked_up:
            continue
        shape = (BATCH, QUERIES, WIDTH) if flat else (BATCH, HEADS, QUERIES, SIZE)
        half = (partial or SIZE) // 2
        caches = (6, half) if looked_up else (BATCH, QUERIES, half)
        ids = {0: None, 1: np.array([2], np.int64), 2: rng.integers(0, 6, (BATCH, QUERIES))}[looked_up]
        caches_and_ids = {"cos": floats(2, *caches), "sin": floats(3, *caches)}
        inputs: dict[str, np.ndarray | None] = {"input" if flat else "x": floats(1, *shape)}
        inputs |= {"ids": ids, **caches_and_ids} if domain else {**caches_and_ids, "ids": ids}
        attributes = {"interleaved": interleaved, "rotary_embedding_dim": partial}
        if flat or partial:
            attributes["num_heads"] = HEADS
        both("RotaryEmbedding", inputs, 1, attributes, domain=domain, opset=23)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("FastGelu", {"x": floats(1, BATCH, WIDTH), "bias": floats(2, WIDTH)}),
        ("FastGelu", {"x": floats(1, BATCH, WIDTH)}),
        ("BiasGelu", {"x": floats(1, BATCH, WIDTH), "bias": floats(2, WIDTH)}),
    ],
)
def test_activations_with_a_bias(op: str, inputs: dict[str, np.ndarray | None]) -> None:
    both(op, inputs, 1, {})


EQUATIONS: dict[str, list[tuple[int, ...]]] = {
    "ij->ji": [(2, 3)],
    "...ii->...i": [(2, 3, 3)],
    "ii": [(3, 3)],
    "i,j->ij": [(2,), (3,)],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "bhqk,bkhd->bqhd": [(2, 3, 4, 6), (2, 6, 3, 5)],
    "bqhd,hde->bqe": [(2, 4, 3, 5), (3, 5, 6)],
    "...ij,...jk->...ik": [(4, 2, 2, 3), (4, 2, 3, 2)],
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)],
    "ij,ij->": [(2, 3), (2, 3)],
    "b n d , e d -> b e n": [(2, 3, 4), (5, 4)],
    "ba": [(2, 3)],
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str) -> None:
    inputs = {f"x{k}": floats(k, *shape) for k, shape in enumerate(EQUATIONS[equation])}
    both("Einsum", dict(inputs), 1, {"equation": equation}, domain="")
