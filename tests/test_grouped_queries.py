"""``GroupQueryAttention`` of com.microsoft: the results of onnxruntime, and the definition in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ortrain

CASES = Path(__file__).parent / "data" / "cases"
HEADS, KEY_HEADS, SIZE, POSITIONS = 4, 2, 16, 40
# Rounding of float32 in sums of a few products and exponentials.
TOLERANCE = 2e-6
# Rounding of float32 in a model of two layers.
MODEL_TOLERANCE = 1e-5
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64}


@dataclass(frozen=True)
class Case:
    """Sizes, attributes and optional inputs of a node."""

    name: str
    batch: int = 2
    queries: int = 5
    past: int | None = None
    last_keys: tuple[int, ...] = (4, 4)
    total: int = 5
    packed: bool = False
    rotary: bool = True
    positions: list[list[int]] | None = None
    bias: tuple[int, ...] | None = None
    sink: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> dict[str, np.ndarray | None]:
        """Return the inputs by name, in the order of the operator."""
        rng = np.random.default_rng(len(self.name))

        def floats(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        query = floats(self.batch, self.queries, HEADS * SIZE)
        key, value = (floats(self.batch, self.queries, KEY_HEADS * SIZE) for _ in range(2))
        angles = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(SIZE // 2) / (SIZE // 2))
        cache = (self.batch, KEY_HEADS, self.past or 0, SIZE)
        has_past = self.past is not None
        return {
            "query": np.concatenate([query, key, value], axis=2) if self.packed else query,
            "key": None if self.packed else key,
            "value": None if self.packed else value,
            "past_key": floats(*cache) if has_past else None,
            "past_value": floats(*cache) if has_past else None,
            "seqlens_k": np.array(self.last_keys, np.int32),
            "total_sequence_length": np.array([self.total], np.int32),
            "cos_cache": np.cos(angles).astype(np.float32) if self.rotary else None,
            "sin_cache": np.sin(angles).astype(np.float32) if self.rotary else None,
            "position_ids": None if self.positions is None else np.array(self.positions, np.int64),
            "attention_bias": None if self.bias is None else floats(*self.bias),
            "head_sink": floats(HEADS) if self.sink else None,
        }

    def model(self, inputs: dict[str, np.ndarray | None]) -> bytes:
        """Return a model of one node."""
        names = [name if value is not None else "" for name, value in inputs.items()]
        while not names[-1]:
            names.pop()
        node = helper.make_node(
            "GroupQueryAttention",
            names,
            ["y", "present_key", "present_value"],
            name="attention",
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KEY_HEADS,
            do_rotary=int(self.rotary),
            **self.attributes,
        )
        values = [
            helper.make_tensor_value_info(name, TYPES[str(value.dtype)], value.shape)
            for name, value in inputs.items()
            if value is not None
        ]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
        graph = helper.make_graph([node], "graph", values, outputs)
        sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=sets, ir_version=8)
        return bytes(model.SerializeToString())


ALL = [
    Case("prompt"),
    Case("prompt of items of different lengths", last_keys=(4, 2)),
    Case("packed prompt", packed=True),
    Case("prompt with an empty past", past=0),
    Case("prompt in a long cache", past=10, last_keys=(4, 2)),
    Case("token", queries=1, past=6, last_keys=(6, 6), total=7),
    Case("token of items of different lengths", queries=1, past=6, last_keys=(6, 3), total=7),
    Case("token in a long cache", queries=1, past=10, last_keys=(6, 3), total=7),
    Case("chunk", batch=1, queries=3, past=6, last_keys=(8,), total=9),
    Case("chunk in a long cache", batch=1, queries=3, past=12, last_keys=(8,), total=9),
    Case("softcap", attributes={"softcap": 1.5}),
    Case("scale", attributes={"scale": 0.7}),
    Case("window", attributes={"local_window_size": 2}),
    Case("window of items of different lengths", last_keys=(4, 1), attributes={"local_window_size": 1}),
    Case("window of a token", queries=1, past=6, last_keys=(6, 6), total=7, attributes={"local_window_size": 3}),
    Case("neighbours are pairs", attributes={"rotary_interleaved": 1}),
    Case("no rotation", rotary=False),
    Case("smooth softmax", attributes={"smooth_softmax": 1}),
    Case("sinks", sink=True),
    Case("sinks and softcap", sink=True, attributes={"softcap": 1.0}),
    Case("bias of each head", bias=(2, HEADS, 5, 5)),
    Case("bias of all heads and softcap", bias=(1, 1, 5, 5), attributes={"softcap": 1.0}),
    Case("bias of a token", queries=1, past=6, last_keys=(6, 6), total=7, bias=(2, HEADS, 1, 7)),
    Case("first position of a prompt", positions=[[3, 1, 2, 7, 9], [0, 5, 5, 5, 1]]),
    Case("positions of tokens", queries=1, past=6, last_keys=(6, 6), total=7, positions=[[9], [2]]),
    Case("later keys are visible", attributes={"causal": 0}),
    Case("later keys of items of different lengths", last_keys=(4, 2), attributes={"causal": 0}),
]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_onnxruntime_agrees(case: Case) -> None:
    inputs = case.inputs()
    model = case.model(inputs)
    feeds = {name: value for name, value in inputs.items() if value is not None}
    expected = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    found = ortrain.InferenceSession(model).run(None, feeds)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=TOLERANCE)
    for present, wanted in zip(found[1:], expected[1:], strict=True):
        assert present.shape == wanted.shape
        for item, last in enumerate(case.last_keys):
            # The values of later rows are unspecified.
            rows = max(last + 1, case.queries if case.queries == case.total else 0)
            np.testing.assert_allclose(
                present[item, :, :rows], wanted[item, :, :rows], rtol=0, atol=TOLERANCE, err_msg=case.name
            )


def test_presents_may_be_unused() -> None:
    """The length of the keys follows from the total length, although no output has this length."""
    case = next(case for case in ALL if case.name == "token")
    inputs = case.inputs()
    model = onnx.load_from_string(case.model(inputs))
    feeds = {name: value for name, value in inputs.items() if value is not None}
    expected = ortrain.InferenceSession(model.SerializeToString()).run(["y"], feeds)[0]
    del model.graph.output[1:]
    model.graph.node[0].output[1] = model.graph.node[0].output[2] = ""
    np.testing.assert_array_equal(ortrain.InferenceSession(model.SerializeToString()).run(None, feeds)[0], expected)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (Case("more keys than the cache has", last_keys=(9, 4)), "index 9 in row 0 is out of range for 5 entries"),
        (Case("no keys", last_keys=(-1, 4)), "out of range"),
        (
            Case("no cache of positions", rotary=False, attributes={"sliding_window_cache": 1}),
            "sliding_window_cache (a cache that drops old keys) is for text generation",
        ),
        (
            Case("window without order", attributes={"causal": 0, "local_window_size": 2}),
            "local_window_size is 2, but causal is 0",
        ),
        (Case("empty window", attributes={"local_window_size": 0}), "local_window_size must be positive"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_invalid_values_are_named(case: Case, sentence: str) -> None:
    inputs = case.inputs()
    feeds = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(ortrain.OrtrainError) as refused:
        ortrain.InferenceSession(case.model(inputs)).run(None, feeds)
    assert sentence in str(refused.value)
    assert 'node "attention" (com.microsoft:GroupQueryAttention)' in str(refused.value)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("query", (2, 5, 66), "the last axis of input 0, of shape [2, 5, 66], cannot be divided into 4 heads"),
        ("key", (2, 4, 32), "input 1 has shape [2, 4, 32], but [2, 5, width] is needed"),
        ("value", (2, 5, 64), "the queries have head size 16, but input 2 has head size 32"),
        ("past_value", (2, 2, 7, 16), "have different lengths"),
        ("past_key", (2, 4, 6, 16), "input 3 has shape [2, 4, 6, 16], but [2, 2, length, 16] is needed"),
        ("seqlens_k", (3,), "input 5 has shape [3], but [2] is needed"),
        ("cos_cache", (40, 9), "input 7 has shape [40, 9], but heads of size 16 have only 8 pairs"),
        ("head_sink", (3,), "input 11 has shape [3], but [4] is needed"),
    ],
)
def test_invalid_shapes_are_named(name: str, shape: tuple[int, ...], sentence: str) -> None:
    inputs = replace(ALL[0], past=6, sink=True).inputs()
    value = inputs[name]
    assert value is not None
    inputs[name] = np.zeros(shape, value.dtype)
    with pytest.raises(ortrain.OrtrainError) as refused:
        ortrain.InferenceSession(ALL[0].model(inputs))
    assert sentence in str(refused.value)


def test_decoder_of_two_layers() -> None:
    """The model and the result were recorded with onnxruntime 1.32."""
    with np.load(CASES / "decoder" / "case.npz") as stored:
        case = dict(stored)
    session = ortrain.InferenceSession(CASES / "decoder" / "model.onnx")
    (logits,) = session.run(["logits"], {given.name: case[given.name] for given in session.get_inputs()})
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=MODEL_TOLERANCE)
