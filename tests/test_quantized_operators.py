"""Operators on quantized tensors and packed weights: the results of onnxruntime without its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain

CASES = Path(__file__).parent / "data" / "cases"
# Rounding of float32 in sums of a few hundred products, relative to the largest result.
TOLERANCE = 2e-6
# Rounding of float32 in a model of two layers, relative to the largest result.
MODEL_TOLERANCE = 1e-5
# Part of the integers that may differ by one: a quotient near the middle of two integers rounds to either.
ROUNDED_OTHERWISE = 1e-3
# Standard deviation of random integers around the middle of their range.
SPREAD = 40
# Rounding of float32 over the steps of a recurrent layer.
RECURRENT_TOLERANCE = 1e-5
MICROSOFT = "com.microsoft"


def integers(seed: int, shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
    """Draw integers around the middle of the range of a type."""
    limits = np.iinfo(dtype)
    drawn = np.random.default_rng(seed).normal((limits.max + limits.min) / 2, SPREAD, shape)
    return np.clip(np.rint(drawn), limits.min, limits.max).astype(dtype)


def floats(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw floats from the normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def f32(*values: float) -> np.ndarray:
    """Return a number, or a vector of numbers."""
    return np.array(values[0] if len(values) == 1 else values, np.float32)


def u8(*values: int) -> np.ndarray:
    """Return an unsigned byte, or a vector of them."""
    return np.array(values[0] if len(values) == 1 else values, np.uint8)


def i8(*values: int) -> np.ndarray:
    """Return a signed byte, or a vector of them."""
    return np.array(values[0] if len(values) == 1 else values, np.int8)


@dataclass(frozen=True)
class Case:
    """A node: name of the case, operator, inputs (None where one is missing), attributes."""

    name: str
    operator: str
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    opset: int = 21
    constants: tuple[int, ...] = ()

    def model(self) -> bytes:
        """Return a model of one node; the inputs in ``constants`` are initializers."""
        names = [f"x{k}" if value is not None else "" for k, value in enumerate(self.inputs)]
        results = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.operator, names, results, name="node", domain=self.domain, **self.attributes)
        values = [(k, value) for k, value in enumerate(self.inputs) if value is not None]
        graph = helper.make_graph(
            [node],
            "graph",
            [
                helper.make_tensor_value_info(names[k], helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for k, value in values
                if k not in self.constants
            ],
            [onnx.ValueInfoProto(name=name) for name in results],
            [numpy_helper.from_array(value, names[k]) for k, value in values if k in self.constants],
        )
        sets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=sets, ir_version=10)
        return bytes(model.SerializeToString())

    def feeds(self) -> dict[str, np.ndarray]:
        """Return the inputs that are no initializers."""
        return {f"x{k}": value for k, value in enumerate(self.inputs) if value is not None and k not in self.constants}


def product(a: str, b: str) -> list[np.ndarray | None]:
    """Return the inputs of a product of integers: factors of 3 by 40 and 40 by 5, and zero points."""
    return [
        integers(1, (3, 40), a),
        integers(2, (40, 5), b),
        np.array(7, a),
        np.array([3, 0, 1, -2 if b == "int8" else 2, 5], b),
    ]


def linear_product(a: str, b: str) -> list[np.ndarray | None]:
    """Return the inputs of ``QLinearMatMul``."""
    x, w, x_zero, w_zero = product(a, b)
    return [x, f32(0.02), x_zero, w, f32(0.01, 0.03, 0.02, 0.05, 0.01), w_zero, f32(0.3), np.array(11, a)]


def packed(seed: int, columns: int, rows: int, bits: int, block: int, zero_points: bool) -> list[np.ndarray | None]:
    """Return an input, packed weights, scales, and zero points of ``MatMulNBits``."""
    rng = np.random.default_rng(seed)
    blocks = -(-rows // block)
    return [
        floats(seed, (2, 3, rows)),
        rng.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8),
        (0.05 * rng.standard_normal((columns, blocks))).astype(np.float32),
        rng.integers(0, 256, (columns, -(-blocks * bits // 8)), np.uint8) if zero_points else None,
    ]


IMAGE = (2, 4, 9, 8)
CONV = [integers(1, IMAGE), u8(120), integers(2, (6, 4, 3, 3), "int8"), i8(0, 1, -3, 4, 0, 2)]
LINEAR_CONV = [
    integers(1, IMAGE),
    f32(0.02),
    u8(120),
    integers(2, (6, 2, 3, 3), "int8"),
    f32(0.01, 0.02, 0.03, 0.01, 0.02, 0.01),
    i8(0, 0, 0, 0, 0, 0),
    f32(0.4),
    u8(100),
    np.array([500, -300, 0, 100, 20, 1], np.int32),
]
BYTES = [integers(5, (2, 3, 8)), f32(0.02), u8(130)]

ALL = [
    Case("quantize", "QuantizeLinear", [3 * floats(1, (4, 5)), f32(0.02), u8(128)]),
    Case("quantize without a zero point", "QuantizeLinear", [3 * floats(1, (4, 5)), f32(0.02)]),
    Case(
        "quantize along an axis",
        "QuantizeLinear",
        [floats(1, (2, 3, 4)), f32(0.1, 0.02, 0.3), i8(1, -2, 3)],
        {"axis": 1},
    ),
    Case(
        "quantize in blocks",
        "QuantizeLinear",
        [floats(1, (2, 7)), np.abs(floats(2, (2, 3))) + 0.01, integers(3, (2, 3))],
        {"axis": 1, "block_size": 3},
    ),
    Case("quantize to 16 bits", "QuantizeLinear", [floats(1, (4, 5)), f32(0.0002), np.array(1000, np.uint16)]),
    Case("quantize to a type", "QuantizeLinear", [floats(1, (4, 5)), f32(0.002)], {"output_dtype": TensorProto.INT16}),
    Case("quantize halves to even", "QuantizeLinear", [f32(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5), f32(1), i8(0)]),
    Case("quantize beyond the range", "QuantizeLinear", [f32(-1e9, 1e9, 300, -300, np.inf, -np.inf), f32(1), i8(3)]),
    Case("dequantize", "DequantizeLinear", [integers(1, (4, 5)), f32(0.02), u8(128)]),
    Case(
        "dequantize along an axis",
        "DequantizeLinear",
        [integers(1, (2, 3, 4), "int8"), f32(0.1, 0.02, 0.3), i8(1, -2, 3)],
        {"axis": 1},
    ),
    Case(
        "dequantize in blocks",
        "DequantizeLinear",
        [integers(1, (2, 7)), np.abs(floats(2, (2, 3))), integers(3, (2, 3))],
        {"axis": 1, "block_size": 3},
    ),
    Case("dequantize 32 bits", "DequantizeLinear", [np.array([1 << 25, -7, 5], np.int32), f32(0.02)]),
    Case(
        "dequantize 16 bits of com.microsoft",
        "DequantizeLinear",
        [np.array([60000, 7, 5], np.uint16), f32(0.02), np.array(9, np.uint16)],
        domain=MICROSOFT,
    ),
    Case(
        "quantize of com.microsoft",
        "QuantizeLinear",
        [floats(1, (4, 3)), f32(0.1, 0.02, 0.3), i8(1, -2, 3)],
        {"axis": 1},
        domain=MICROSOFT,
    ),
    Case("quantize dynamically", "DynamicQuantizeLinear", [floats(1, (4, 5))], outputs=3),
    Case("quantize positive numbers dynamically", "DynamicQuantizeLinear", [np.abs(floats(1, (4, 5))) + 1], outputs=3),
    Case("quantize zeros dynamically", "DynamicQuantizeLinear", [np.zeros((3,), np.float32)], outputs=3),
    *(Case(f"integers {a} {b}", "MatMulInteger", product(a, b)) for a in ("uint8",) for b in ("uint8", "int8")),
    Case("integers without zero points", "MatMulInteger", product("uint8", "int8")[:2]),
    Case("integers in batches", "MatMulInteger", [integers(1, (2, 3, 4)), integers(2, (4, 5), "int8")]),
    Case("long sums of integers", "MatMulInteger", [integers(1, (2, 3000)), integers(2, (3000, 3))]),
    *(
        Case(f"linear product {a} {b}", "QLinearMatMul", linear_product(a, b))
        for a, b in (("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8"))
    ),
    Case(
        "convolution of integers",
        "ConvInteger",
        [integers(1, IMAGE), integers(2, (6, 4, 3, 3)), u8(120), u8(128)],
        {"pads": [1, 0, 2, 1], "strides": [2, 1]},
    ),
    Case(
        "convolution of signed filters",
        "ConvInteger",
        [CONV[0], CONV[2], CONV[1]],
        {"auto_pad": "SAME_UPPER", "strides": [2, 1]},
    ),
    Case(
        "linear convolution", "QLinearConv", [*LINEAR_CONV], {"pads": [1, 1, 1, 1], "group": 2, "kernel_shape": [3, 3]}
    ),
    Case(
        "linear convolution of bytes",
        "QLinearConv",
        [integers(1, IMAGE), f32(0.02), u8(120), integers(2, (6, 4, 3, 3)), f32(0.01), u8(127), f32(0.3), u8(90)],
        {"strides": [2, 2]},
    ),
    Case("sum", "QLinearAdd", [*BYTES, integers(6, (3, 1)), f32(0.01), u8(100), f32(0.03), u8(128)], domain=MICROSOFT),
    Case(
        "sum of signed bytes",
        "QLinearAdd",
        [integers(1, (4,), "int8"), f32(0.1), i8(0), integers(2, (4,), "int8"), f32(0.2), i8(5), f32(0.3), i8(-4)],
        domain=MICROSOFT,
    ),
    Case(
        "product of tensors",
        "QLinearMul",
        [*BYTES, integers(6, (3, 1)), f32(0.01), u8(100), f32(0.01), u8(128)],
        domain=MICROSOFT,
    ),
    Case("sigmoid", "QLinearSigmoid", [*BYTES, f32(1 / 255), u8(0)], domain=MICROSOFT),
    Case("leaky relu", "QLinearLeakyRelu", [*BYTES, f32(0.015), u8(40)], {"alpha": 0.2}, domain=MICROSOFT),
    Case("softmax", "QLinearSoftmax", [*BYTES, f32(1 / 256), u8(0)], {"axis": -1, "opset": 13}, domain=MICROSOFT),
    Case(
        "softmax of several axes",
        "QLinearSoftmax",
        [*BYTES, f32(1 / 256), u8(0)],
        {"axis": 1, "opset": 12},
        domain=MICROSOFT,
    ),
    Case(
        "concatenation",
        "QLinearConcat",
        [f32(0.03), u8(120), *BYTES, integers(6, (2, 3, 2)), f32(0.05), u8(100)],
        {"axis": 2},
        domain=MICROSOFT,
        constants=(0, 1, 3, 4, 6, 7),
    ),
    Case(
        "average",
        "QLinearAveragePool",
        [integers(1, IMAGE), f32(0.02), u8(120), f32(0.015), u8(110)],
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2], "count_include_pad": 0},
        domain=MICROSOFT,
    ),
    Case(
        "average of channels behind",
        "QLinearAveragePool",
        [integers(1, (2, 9, 8, 4)), f32(0.02), u8(120), f32(0.015), u8(110)],
        {"kernel_shape": [3, 2], "channels_last": 1},
        domain=MICROSOFT,
    ),
    Case(
        "average of planes",
        "QLinearGlobalAveragePool",
        [integers(1, IMAGE), f32(0.02), u8(120), f32(0.005), u8(110)],
        domain=MICROSOFT,
    ),
    Case(
        "average of planes, channels behind",
        "QLinearGlobalAveragePool",
        [integers(1, (2, 9, 8, 4)), f32(0.02), u8(120), f32(0.005), u8(110)],
        {"channels_last": 1},
        domain=MICROSOFT,
    ),
    Case(
        "gemm to bytes",
        "QGemm",
        [
            integers(1, (3, 40)),
            f32(0.02),
            u8(120),
            integers(2, (5, 40), "int8"),
            f32(0.01, 0.03, 0.02, 0.05, 0.01),
            i8(0, 0, 0, 0, 0),
            np.array([10, -400, 0, 9, 1], np.int32),
            f32(0.3),
            u8(100),
        ],
        {"transB": 1, "alpha": 1.0},
        domain=MICROSOFT,
        constants=(3, 4, 5),
    ),
    Case(
        "gemm to floats",
        "QGemm",
        [integers(1, (40, 3)), f32(0.02), u8(120), integers(2, (40, 5), "int8"), f32(0.01), i8(3)],
        {"transA": 1, "alpha": 0.5},
        domain=MICROSOFT,
    ),
    Case(
        "integers to floats",
        "MatMulIntegerToFloat",
        [
            integers(1, (2, 3, 40)),
            integers(2, (40, 5), "int8"),
            f32(0.02),
            f32(0.01, 0.03, 0.02, 0.05, 0.01),
            u8(120),
            i8(0, 1, 2, 3, 4),
            floats(3, (5,)),
        ],
        domain=MICROSOFT,
    ),
    Case(
        "dynamic product",
        "DynamicQuantizeMatMul",
        [floats(1, (2, 3, 40)), integers(2, (40, 5), "int8"), f32(0.01), i8(3), floats(3, (5,))],
        domain=MICROSOFT,
    ),
    *(
        Case(
            f"weights of {bits} bits, zero points {zero}",
            "MatMulNBits",
            packed(bits, 6, 40, bits, 16, zero),
            {"N": 6, "K": 40, "bits": bits, "block_size": 16},
            domain=MICROSOFT,
            constants=(1, 2, 3),
        )
        for bits in (4, 8)
        for zero in (False, True)
    ),
    Case(
        "weights with a bias",
        "MatMulNBits",
        [*packed(3, 6, 64, 4, 32, True), None, floats(9, (6,))],
        {"N": 6, "K": 64, "bits": 4, "block_size": 32},
        domain=MICROSOFT,
        constants=(1, 2, 3, 5),
    ),
    Case(
        "weights with float zero points",
        "MatMulNBits",
        [*packed(3, 6, 64, 4, 32, False)[:3], 8 + floats(2, (6, 2))],
        {"N": 6, "K": 64, "bits": 4, "block_size": 32},
        domain=MICROSOFT,
        constants=(1, 2, 3),
    ),
    Case(
        "weights with groups",
        "MatMulNBits",
        [*packed(3, 6, 64, 4, 32, False), np.array([1, 0] * 32, np.int32)],
        {"N": 6, "K": 64, "bits": 4, "block_size": 32},
        domain=MICROSOFT,
        constants=(1, 2, 3, 4),
    ),
    *(
        Case(
            f"4-bit floats {kind}",
            "MatMulBnb4",
            [
                floats(1, (2, 3, 48)),
                np.random.default_rng(2).integers(0, 256, 5 * 24, np.uint8),
                np.abs(floats(3, (5 * 48 // 16,))),
            ],
            {"N": 5, "K": 48, "block_size": 16, "quant_type": kind},
            domain=MICROSOFT,
            constants=(1, 2),
        )
        for kind in (0, 1)
    ),
    *(
        Case(
            f"rows of {bits} bits, zero points {zero}",
            "GatherBlockQuantized",
            [
                np.random.default_rng(1).integers(0, 256, (7, 48 * bits // 8), np.uint8),
                np.array([[1, 6, -1], [0, 3, 3]], np.int64),
                floats(2, (7, 3)),
                np.random.default_rng(3).integers(0, 256, (7, -(-3 * bits // 8)), np.uint8) if zero else None,
            ],
            {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1},
            domain=MICROSOFT,
            constants=(0, 2, 3),
        )
        for bits in (4, 8)
        for zero in (False, True)
    ),
]


def without_optimizer() -> ort.SessionOptions:
    """Return options of onnxruntime that run every node as written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Compare floats by a tolerance relative to the largest; integers may differ by one in few elements."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))
        return
    difference = np.abs(found.astype(np.int64) - expected.astype(np.int64))
    assert difference.max(initial=0) <= 1
    assert (difference > 0).sum() <= max(1, ROUNDED_OTHERWISE * difference.size)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_onnxruntime_agrees(case: Case) -> None:
    session = ort.InferenceSession(case.model(), without_optimizer(), providers=["CPUExecutionProvider"])
    expected = session.run(None, case.feeds())
    found = ortrain.InferenceSession(case.model()).run(None, case.feeds())
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(np.asarray(ours), np.asarray(theirs), TOLERANCE)


def lstm(
    name: str,
    direction: str = "forward",
    dtype: str = "int8",
    columns: bool = False,
    lengths: list[int] | None = None,
    floats_of_layer: bool = True,
    **attributes: Any,
) -> Case:
    """Return a case of ``DynamicQuantizeLSTM``; ``columns`` gives each column of the weights its own scale."""
    steps, batch, features, hidden = 6, 4, 5, 8
    directions = 2 if direction == "bidirectional" else 1
    grid = (directions, 4 * hidden) if columns else (directions,)
    scales = [(0.001 + 0.01 * np.random.default_rng(seed).random(grid)).astype(np.float32) for seed in (1, 2)]
    # onnxruntime takes one zero point for all columns of a direction.
    zero_point = np.full(grid, 0 if dtype == "int8" else 119, dtype)
    layer = [
        0.3 * floats(5, (directions, 8 * hidden)),
        None if lengths is None else np.array(lengths, np.int32),
        floats(6, (directions, batch, hidden)),
        floats(7, (directions, batch, hidden)),
        0.5 * floats(8, (directions, 3 * hidden)),
    ]
    if not floats_of_layer:
        layer = [None, layer[1], None, None, None]
    weights = [
        integers(3, (directions, features, 4 * hidden), dtype),
        integers(4, (directions, hidden, 4 * hidden), dtype),
    ]
    inputs = [floats(9, (steps, batch, features)), *weights, *layer, scales[0], zero_point, scales[1], zero_point]
    return Case(
        name,
        "DynamicQuantizeLSTM",
        inputs,
        {"hidden_size": hidden, "direction": direction, **attributes},
        domain=MICROSOFT,
        outputs=3,
        constants=(1, 2, 8, 9, 10, 11),
    )


LSTMS = [
    lstm("forward", floats_of_layer=False),
    lstm("forward, all inputs"),
    lstm("reverse", "reverse", "uint8"),
    lstm("both directions", "bidirectional"),
    lstm("columns", columns=True),
    lstm("columns of both directions", "bidirectional", "uint8", columns=True),
    lstm("lengths", lengths=[3, 5, 1, 2]),
    lstm("lengths, reverse", "reverse", lengths=[6, 1, 4, 2]),
    lstm("lengths, both directions", "bidirectional", columns=True, lengths=[2, 1, 5, 3]),
    lstm("empty sequence", "bidirectional", lengths=[2, 0, 5, 3]),
    lstm("coupled gates and clip", input_forget=1, clip=0.7),
    lstm(
        "other activations",
        "bidirectional",
        activations=["HardSigmoid", "Softsign", "Tanh", "Sigmoid", "Tanh", "Relu"],
        activation_alpha=[0.3],
        activation_beta=[0.4],
    ),
]


@pytest.mark.parametrize(
    ("case", "all_steps"),
    [
        pytest.param(case, all_steps, id=f"{case.name}, {'all results' if all_steps else 'final states'}")
        for case in LSTMS
        for all_steps in (True, False)
        # For final states alone, onnxruntime reads memory of empty sequences that it has not written.
        if all_steps or case.inputs[4] is None or case.inputs[4].all()
    ],
)
def test_recurrent_layers_agree(case: Case, all_steps: bool) -> None:
    """With one thread, onnxruntime quantizes the states of all sequences together, as ortrain does."""
    model = onnx.load_model_from_string(case.model())
    if not all_steps:
        model.graph.node[0].output[0] = ""
        del model.graph.output[0]
    options = without_optimizer()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, case.feeds())
    found = ortrain.InferenceSession(model).run(None, case.feeds())
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(np.asarray(ours), np.asarray(theirs), RECURRENT_TOLERANCE)


@pytest.mark.parametrize("name", ["quantized-qdq", "quantized-operators", "decoder-int4-past"])
def test_models_of_other_tools(name: str) -> None:
    """Models and results were recorded with onnxruntime 1.32 without its optimizer.

    Both forms of the quantized network have the same weights and, if no kernel saturates sums of two products at 16
    bits, the same result.
    """
    with np.load(CASES / name.replace("operators", "qdq") / "case.npz") as stored:
        case = dict(stored)
    session = ortrain.InferenceSession(CASES / name / "model.onnx")
    (logits,) = session.run(["logits"], {given.name: case[given.name] for given in session.get_inputs()})
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=MODEL_TOLERANCE * np.abs(case["logits"]).max())


@pytest.mark.parametrize("domain", ["com.microsoft.nchwc", "com.ms.internal.nhwc"])
def test_layouts_of_one_processor_are_refused(domain: str) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "layer", domain=domain)
    values = {"x": (1, 16, 4, 4), "w": (16, 16, 1, 1), "y": (1, 16, 4, 4)}
    x, w, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items())
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model = helper.make_model(helper.make_graph([node], "g", [x, w], [y]), opset_imports=imports, ir_version=8)
    with pytest.raises(ortrain.UnsupportedError, match=r"layer.*save the model at optimization level extended"):
        ortrain.InferenceSession(model)
