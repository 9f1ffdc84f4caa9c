"""Adapters on quantized bases: bytes of onnxruntime's quantizers, gradients of the float model, merges, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.capi._pybind_state import quantize_matmul_4bits
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.quant_utils import quantize_data
from recorded_adapters import outputs

import ortrain
from ortrain import InvalidArgumentError, artifacts, lora
from ortrain.api import CheckpointState, Module

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
BASES = ("int8", "int4", "nf4")
# Errors of float32 sums of some hundred products of normal numbers.
TOLERANCE = 1e-5
# The gradients of both models sum the same products, in another order.
GRADIENT_TOLERANCE = 1e-6


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs, [output], f"node {output}", **attributes)


def model_of(
    nodes: list[Any],
    weights: dict[str, np.ndarray],
    *,
    x: tuple[Any, ...] = ("N", 96),
    y: tuple[Any, ...] = ("N", None),
    opset: int = 21,
    dtype: int = FLOAT,
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, x)],
        [helper.make_tensor_value_info("y", dtype, y)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def product(inputs: int, columns: int, dtype: Any = np.float32) -> ModelProto:
    """Return a product with a weight, which has a block of zeros."""
    w = random(inputs, columns, dtype=dtype)
    w[:32, 0] = 0
    code = FLOAT if dtype == np.float32 else FLOAT16
    return model_of([node("MatMul", ["x", "w"], "y")], {"w": w}, x=("N", inputs), y=("N", columns), dtype=code)


def constants(model: ModelProto) -> dict[str, np.ndarray]:
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


def ops(model: ModelProto) -> list[str]:
    return [entry.op_type for entry in lora.remove(model).graph.node]


def attributes(entry: Any) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in entry.attribute}


def without_adapter(model: ModelProto, **options: Any) -> ModelProto:
    """Return a model with a quantized base, without its adapter."""
    return lora.remove(lora.add(model, rank=1, targets="*", **options)[0])


def with_random_factors(model: ModelProto, size: float = 0.1) -> ModelProto:
    found = ModelProto.FromString(model.SerializeToString())
    for at, entry in enumerate(found.graph.initializer):
        if ".lora_A." in entry.name or ".lora_B." in entry.name:
            drawn = size * random(*entry.dims, seed=at)
            entry.CopyFrom(numpy_helper.from_array(drawn, entry.name))
    return found


def same_as_onnxruntime(ours: ModelProto, theirs: ModelProto) -> None:
    """Check that both models have the same constants and the same node."""
    expected = constants(theirs)
    assert set(constants(ours)) == set(expected)
    for name, value in constants(ours).items():
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
        assert value.tobytes() == expected[name].tobytes(), name
    [entry], [reference] = ours.graph.node, theirs.graph.node
    assert (entry.op_type, entry.domain, list(entry.input)) == (
        reference.op_type,
        reference.domain,
        list(reference.input),
    )
    assert attributes(entry) == attributes(reference)


SHAPES = [(96, 8), (64, 5), (80, 7), (33, 3), (20, 4), (31, 9), (1, 2), (129, 1)]
TYPES = [np.float32, np.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_has_the_bytes_of_onnxruntime(shape: tuple[int, int], dtype: Any) -> None:
    """onnxruntime's quantizer writes the same integers, scales and node; last blocks may be short."""
    model = product(*shape, dtype)
    (rows, columns), blocks = shape, -(-shape[0] // 32)
    # DefaultWeightOnlyQuantizer.qbits_block_quant calls this; its module needs another package.
    padded = np.pad(constants(model)["w"], ((0, blocks * 32 - rows), (0, 0)))
    packed, zero_points = np.zeros((columns, blocks, 16), np.uint8), np.zeros((columns, (blocks + 1) // 2), np.uint8)
    scales = np.zeros((columns, blocks), dtype)
    quantize_matmul_4bits(packed, padded, scales, zero_points, 32, columns, rows, True)
    inputs = {"w_Q4": packed, "w_scales": scales}
    sizes = {"K": rows, "N": columns, "bits": 4, "block_size": 32}
    expected = node("MatMulNBits", ["x", *inputs], "y", domain="com.microsoft", **sizes)
    same_as_onnxruntime(without_adapter(model, base="int4"), model_of([expected], inputs))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_has_the_bytes_of_onnxruntime(shape: tuple[int, int], dtype: Any) -> None:
    """MatMulBnb4Quantizer writes the same codes, scales and node; blocks may span columns."""
    model = product(*shape, dtype)
    quantizer = MatMulBnb4Quantizer(ModelProto.FromString(model.SerializeToString()), MatMulBnb4Quantizer.NF4, 64)
    quantizer.process()
    same_as_onnxruntime(without_adapter(model, base="nf4"), quantizer.model.model)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_has_the_numbers_of_onnxruntime(shape: tuple[int, int], dtype: Any) -> None:
    """Each column has the integers and the scale of quantize_data."""
    model = product(*shape, dtype)
    found = constants(without_adapter(model, base="int8"))
    assert set(found) == {"w_quantized", "w_scale", "w_zero_point"}
    for at, column in enumerate(constants(model)["w"].T):
        zero_point, scale, integers = quantize_data(column, TensorProto.INT8, symmetric=True)
        assert found["w_quantized"][:, at].tobytes() == integers.tobytes()
        assert found["w_scale"][at].tobytes() == scale.tobytes()
        assert found["w_zero_point"][at] == zero_point == 0
        assert found["w_scale"].dtype == dtype


def layers() -> ModelProto:
    """Return a model with one layer of each form. The table ``e`` is also read by the last layer."""
    nodes = [
        node("Gather", ["e", "ids"], "h0"),
        node("MatMul", ["h0", "w1"], "h1"),
        node("Tanh", ["h1"], "t1"),
        node("Transpose", ["w2"], "w2t", perm=[1, 0]),
        node("MatMul", ["t1", "w2t"], "h2"),
        node("Tanh", ["h2"], "t2"),
        node("Gemm", ["t2", "w3", "b3"], "h3", transB=1),
        node("Gemm", ["h3", "w4", "b4"], "h4", beta=0.5),
        node("FusedGemm", ["h4", "w5", "b5"], "h5", activation="LeakyRelu", activation_alpha=0.3, transB=1),
        node("FusedMatMul", ["h5", "w6"], "h6", transB=1),
        node("Transpose", ["e"], "et"),
        node("MatMul", ["h6", "et"], "y"),
    ]
    for entry in nodes:
        if entry.op_type.startswith("Fused"):
            entry.domain = "com.microsoft"
    nodes.insert(0, node("Cast", ["x"], "ids", to=TensorProto.INT64))
    weights = {
        "e": random(11, 96),
        "w1": random(96, 64, seed=1) / 8,
        "w2": random(64, 64, seed=2) / 8,
        "w3": random(48, 64, seed=3) / 8,
        "b3": random(48),
        "w4": random(48, 40, seed=4) / 8,
        "b4": random(1, 40),
        "w5": random(64, 40, seed=5) / 8,
        "b5": random(64, seed=6),
        "w6": random(96, 64, seed=7) / 8,
    }
    return model_of(nodes, weights, x=("N",), y=("N", 11))


@pytest.mark.parametrize("base", BASES)
def test_weights_of_constant_nodes(base: str) -> None:
    """A float16 weight of a Constant node behind Cast and Transpose is quantized as the layer reads it."""
    w = random(8, 96, dtype=np.float16)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w)),
        node("Cast", ["w"], "c", to=FLOAT),
        node("Transpose", ["c"], "t"),
        node("MatMul", ["x", "t"], "y"),
    ]
    adapted, description = lora.add(model_of(nodes, {}, y=("N", 8)), rank=2, targets="*", base=base)
    assert len(description.layers) == 1
    plain = model_of([node("MatMul", ["x", "w"], "y")], {"w": w.T.astype(np.float32)}, y=("N", 8))
    expected = on_onnxruntime(without_adapter(plain, base=base), np.eye(96, dtype=np.float32))
    # Scales of float16 are rounded, so that an integer may move by one step of 127.
    tolerance = 1.05 / 127 if base == "int8" else 0
    found = on_onnxruntime(adapted, np.eye(96, dtype=np.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    assert "w" not in constants(adapted)
    if base != "int8":
        assert len(ops(adapted)) == 1


def test_bfloat16_has_the_bytes_of_onnxruntime() -> None:
    """The quantizer computes in float32, and rounds the scales at the end."""
    plain = constants(product(80, 7))["w"]
    entry = numpy_helper.from_array(plain, "w")
    entry.data_type, entry.raw_data = TensorProto.BFLOAT16, plain.view(np.uint16).reshape(80, 7, 2)[..., 1].tobytes()
    model = model_of([node("MatMul", ["x", "w"], "y")], {}, x=("N", 80), y=("N", 7), dtype=TensorProto.BFLOAT16)
    model.graph.initializer.append(entry)
    floats = numpy_helper.to_array(entry).astype(np.float32)
    packed, scales = np.zeros((7, 3, 16), np.uint8), np.zeros((7, 3), np.float32)
    quantize_matmul_4bits(
        packed, np.pad(floats, ((0, 16), (0, 0))), scales, np.zeros((7, 2), np.uint8), 32, 7, 80, True
    )
    found = constants(without_adapter(model, base="int4"))
    assert found["w_Q4"].tobytes() == packed.tobytes()
    assert found["w_scales"].tobytes() == scales.astype(found["w_scales"].dtype).tobytes()


def indices(count: int = 6) -> np.ndarray:
    return np.arange(count, dtype=np.float32) * 2 % 11


def on_onnxruntime(model: ModelProto, x: np.ndarray) -> np.ndarray:
    """Return the result of onnxruntime. Its optimizer would quantize activations before weights of 8 bits."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


@pytest.mark.parametrize("base", BASES)
def test_layers_of_every_form(base: str) -> None:
    """All linear layers are quantized but the tied one; both runtimes give the results of the dequantized weights."""
    model = layers()
    adapted, description = lora.add(model, rank=2, base=base)
    suffix = {"int8": "_quantized", "int4": "_Q4", "nf4": "_Bnb4"}[base]
    assert [layer.weight for layer in description.layers] == [f"w{at}{suffix}" for at in range(1, 7)]
    kept = constants(adapted)
    assert kept["e"].tobytes() == constants(model)["e"].tobytes()
    assert not set(kept) & {f"w{at}" for at in range(1, 7)}
    expected_op = {"int8": "DequantizeLinear", "int4": "MatMulNBits", "nf4": "MatMulBnb4"}[base]
    assert ops(adapted).count(expected_op) == 6
    floats = on_onnxruntime(dequantized(adapted), indices())
    scale = np.abs(floats).max()
    for result in (on_onnxruntime(adapted, indices()), outputs(adapted.SerializeToString(), indices())):
        np.testing.assert_allclose(result, floats, rtol=0, atol=TOLERANCE * scale)
    assert np.abs(floats - on_onnxruntime(model, indices())).max() < 0.3 * scale


def numbers_of(model: ModelProto, entry: Any) -> np.ndarray:
    """Return the weight ``[K, N]`` of a quantized node, computed by onnxruntime from the identity matrix."""
    rows = attributes(entry)["K"]
    weights = {name: constants(model)[name] for name in entry.input[1:]}
    copy = onnx.NodeProto.FromString(entry.SerializeToString())
    copy.input[0], copy.output[0] = "x", "y"
    single = model_of([copy], weights, x=(rows, rows), y=(rows, attributes(entry)["N"]))
    return on_onnxruntime(single, np.eye(rows, dtype=np.float32))


def dequantized(model: ModelProto) -> ModelProto:
    """Return a model with the weights of quantized nodes as float32. The names of adapters remain."""
    found = ModelProto.FromString(model.SerializeToString())
    values = constants(model)
    for at, entry in enumerate(list(found.graph.node)):
        if entry.op_type in {"MatMulNBits", "MatMulBnb4"}:
            weight = f"{entry.input[1]} as floats"
            found.graph.initializer.append(numpy_helper.from_array(numbers_of(model, entry), weight))
            found.graph.node[at].CopyFrom(helper.make_node("MatMul", [entry.input[0], weight], entry.output))
        elif entry.op_type == "DequantizeLinear":
            integers, scales = (values[name] for name in entry.input[:2])
            shape = [-1 if axis == attributes(entry)["axis"] else 1 for axis in range(2)]
            floats = integers.astype(np.float32) * scales.reshape(shape)
            found.graph.node[at].CopyFrom(
                helper.make_node("Constant", [], entry.output, value=numpy_helper.from_array(floats))
            )
    return found


def gradients(model: ModelProto, folder: Path) -> dict[str, np.ndarray]:
    """Return the gradients of the adapters for one batch."""
    folder.mkdir()
    names = [entry.name for entry in model.graph.initializer if ".lora_A." in entry.name or ".lora_B." in entry.name]
    artifacts.generate_artifacts(model, requires_grad=names, loss=artifacts.LossType.MSELoss, artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    module.train()
    module(indices(), random(6, 11))
    return {name: parameter.grad.copy() for name, parameter in state.parameters}


@pytest.mark.parametrize("base", BASES)
def test_gradients_of_the_float_model(base: str, tmp_path: Path) -> None:
    """All factors have the gradients of the same model with the dequantized weights."""
    adapted = with_random_factors(lora.add(layers(), rank=3, base=base)[0])
    ours, reference = gradients(adapted, tmp_path / "ours"), gradients(dequantized(adapted), tmp_path / "floats")
    assert len(ours) == 12
    assert set(ours) == set(reference)
    largest = max(np.abs(gradient).max() for gradient in reference.values())
    for name, gradient in reference.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=GRADIENT_TOLERANCE * largest, err_msg=name)


def change_of(model: ModelProto, weight: str, name: str = "default") -> np.ndarray:
    """Return the product of two factors ``[outputs, inputs]`` in float64."""
    found = constants(model)
    a, b, scale = (found[f"{weight}.lora_{part}.{name}"].astype(np.float64) for part in ("A", "B", "scale"))
    return scale * (b @ a)


@pytest.mark.parametrize("base", BASES)
def test_merge_quantizes_the_sum(base: str) -> None:
    """A merge has the bytes of the quantizer for the sum, the reported error, and the same bits each time."""
    model = product(96, 8)
    adapted = with_random_factors(lora.add(model, rank=2, targets="*", base=base)[0])
    [weight] = {layer.weight for layer in lora.adapters(adapted).layers}
    before = on_onnxruntime(lora.remove(adapted), np.eye(96, dtype=np.float32)).astype(np.float64)
    exact = before + change_of(adapted, weight).T
    reports: list[lora.MergedWeight] = []
    merged = lora.merge(adapted, report=reports.append)
    assert merged == lora.merge(adapted)
    sums = model_of([node("MatMul", ["x", "w"], "y")], {"w": exact.astype(np.float32)}, y=("N", 8))
    expected = constants(without_adapter(sums, base=base))
    found = constants(merged)
    assert set(found) == set(expected)
    differing = sum((found[name] != expected[name]).sum() for name in found)
    # The dequantized weights of onnxruntime are float32, and ours are float64: a number between two integers may move.
    assert differing <= 0.01 * sum(value.size for value in found.values())
    after = on_onnxruntime(merged, np.eye(96, dtype=np.float32))
    [report] = reports
    assert report.weight == weight
    np.testing.assert_allclose(report.largest_error, np.abs(after - exact).max(), rtol=1e-4)
    np.testing.assert_allclose(report.rms_error, np.sqrt(((after - exact) ** 2).mean()), rtol=1e-4)
    assert 0 < report.rms_error < report.largest_error < np.abs(exact).max() / 8


@pytest.mark.parametrize("base", BASES)
def test_blocks_without_a_change_keep_their_bits(base: str) -> None:
    """The merge of a new adapter is the base, bit by bit."""
    adapted, _ = lora.add(layers(), rank=2, base=base)
    reports: list[lora.MergedWeight] = []
    assert lora.merge(adapted, report=reports.append) == lora.remove(adapted)
    assert [report.largest_error for report in reports] == [0.0] * 6


def n_bits(bits: int, zero_points: str, *, has_groups: bool = False) -> ModelProto:
    """Return a product with packed weights ``[6, 80]`` in blocks of 32."""
    rng = np.random.default_rng(bits)
    n, k, blocks = 6, 80, 3
    weights = {
        "q": rng.integers(0, 256, (n, blocks, 32 * bits // 8), np.uint8),
        "s": (0.1 + rng.random((n, blocks))).astype(np.float32),
    }
    inputs = ["x", "q", "s"]
    if zero_points == "packed":
        weights["z"] = rng.integers(0, 256, (n, (blocks * bits + 7) // 8), np.uint8)
    elif zero_points == "floats":
        weights["z"] = rng.integers(0, 1 << bits, (n, blocks)).astype(np.float32)
    inputs.append("z" if zero_points else "")
    if has_groups:
        weights["g"] = rng.permutation(k).astype(np.int32) % blocks
        inputs.append("g")
    packed = node("MatMulNBits", inputs, "y", domain="com.microsoft", K=k, N=n, bits=bits, block_size=32)
    return model_of([packed], weights, x=("N", k), y=("N", n))


def linear(dtype: Any, layout: str, *, zero_points: bool) -> ModelProto:
    """Return a product with dequantized weights ``[96, 8]``."""
    rng = np.random.default_rng(3)
    bounds = np.iinfo(dtype)
    shape, options = {
        "tensor": ((), {}),
        "axis": ((8,), {"axis": 1}),
        "blocks": ((6, 8), {"axis": 0, "block_size": 16}),
    }[layout]
    weights = {
        "q": rng.integers(bounds.min, bounds.max, (96, 8), dtype, endpoint=True),
        "s": np.asarray(0.1 + rng.random(shape), np.float32) / bounds.max,
    }
    if zero_points:
        weights["z"] = np.asarray(rng.integers(bounds.max // 4, bounds.max // 2, shape), dtype)
    nodes = [node("DequantizeLinear", list(weights), "w", **options), node("MatMul", ["x", "w"], "y")]
    return model_of(nodes, weights, y=("N", 8))


def bnb4(kind: int) -> ModelProto:
    """Return a product with 4-bit floats ``[5, 80]`` in blocks of 32, of which some span columns."""
    rng = np.random.default_rng(kind)
    weights = {"q": rng.integers(0, 256, 200, np.uint8), "s": (0.1 + rng.random(13)).astype(np.float32)}
    packed = node("MatMulBnb4", ["x", "q", "s"], "y", domain="com.microsoft", K=80, N=5, block_size=32, quant_type=kind)
    return model_of([packed], weights, x=("N", 80), y=("N", 5))


def step(bits: int) -> float:
    """Return the step of a grid from -1 to 1, with room for the rounding of its ends."""
    return 2.02 / ((1 << bits) - 1)


# Models with their largest error, for elements of a block from -1 to 1.
FORMATS: dict[str, tuple[ModelProto, float]] = {
    **{
        f"{bits} bits, zero points: {points or 'none'}": (n_bits(bits, points), step(bits))
        for bits in (2, 4, 8)
        for points in ("", "packed", "floats")
    },
    "4 bits, groups": (n_bits(4, "packed", has_groups=True), step(4)),
    "fp4": (bnb4(0), 0.2),
    "nf4": (bnb4(1), 0.2),
    **{
        f"{np.dtype(dtype)} by {layout}, zero points: {points}": (
            linear(dtype, layout, zero_points=points),
            step(8 * np.dtype(dtype).itemsize),
        )
        for dtype in (np.int8, np.uint8, np.int16)
        for layout in ("tensor", "axis", "blocks")
        for points in (False, True)
        if points or dtype != np.uint8
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_merge_into_every_format(name: str) -> None:
    """The merge computes as the adapter does, within a step of the grid; unmerge gives the base's bits."""
    base, bound = FORMATS[name]
    rows = base.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    adapted = with_random_factors(lora.add(base, rank=2, targets="*")[0])
    reports: list[lora.MergedWeight] = []
    merged = lora.merge(adapted, report=reports.append)
    assert [entry.op_type for entry in merged.graph.node] == [entry.op_type for entry in base.graph.node]
    eye = np.eye(rows, dtype=np.float32)
    exact, after = outputs(adapted.SerializeToString(), eye), outputs(merged.SerializeToString(), eye)
    largest = np.abs(exact - after).max()
    np.testing.assert_allclose(reports[0].largest_error, largest, rtol=1e-2, atol=1e-5)
    assert largest <= bound * np.abs(exact).max()
    assert merged == lora.merge(adapted)
    for entry in base.graph.initializer:
        value, new = numpy_helper.to_array(entry), constants(merged)[entry.name]
        assert (value.dtype, value.shape) == (new.dtype, new.shape)
    assert lora.unmerge(merged, adapted) == lora.remove(adapted)
    assert constants(lora.unmerge(merged, adapted))["q"].tobytes() == constants(base)["q"].tobytes()


QUANTIZED_LAYERS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "convolution": (node("Conv", ["x", "w"], "y"), (8, 4, 3, 3), {"x": ("N", 4, 5, 6), "y": ("N", 8, 3, 4)}),
    "embedding": (node("Gather", ["w", "ids"], "y"), (11, 8), {"x": ("N",), "y": ("N", 8)}),
    "transposed": (node("Gemm", ["x", "w", "b"], "y", transB=1), (8, 12), {"x": ("N", 12), "y": ("N", 8)}),
}


@pytest.mark.parametrize("name", QUANTIZED_LAYERS)
def test_merge_into_integers_of_other_layers(name: str) -> None:
    """Convolutions, embeddings and transposed products have their integers in other orders."""
    layer, shape, sizes = QUANTIZED_LAYERS[name]
    rng = np.random.default_rng(5)
    weights = {
        "q": rng.integers(-127, 127, shape, np.int8),
        "s": (0.5 + rng.random(shape[0])).astype(np.float32) / 127,
        "b": random(8),
    }
    nodes = [node("DequantizeLinear", ["q", "s"], "w", axis=0), node("Cast", ["x"], "ids", to=TensorProto.INT64), layer]
    base = model_of(nodes, weights, **sizes)
    adapted = with_random_factors(lora.add(base, rank=2, targets="q")[0], 0.3)
    merged = lora.merge(adapted)
    x = indices() if name == "embedding" else random(*(size if isinstance(size, int) else 3 for size in sizes["x"]))
    expected, plain = (on_onnxruntime(model, x) for model in (adapted, base))
    # A result is a sum of some dozen products, and a step of a weight is 1 / 127 of the largest weight.
    tolerance = 0.04 * np.abs(expected).max()
    assert np.abs(expected - plain).max() > 2 * tolerance
    np.testing.assert_allclose(on_onnxruntime(merged, x), expected, rtol=0, atol=tolerance)
    assert lora.unmerge(merged, adapted) == lora.remove(adapted)


def test_shared_scales_stay(tmp_path: Path) -> None:
    """A zero point or scale that another layer reads, too, keeps its value there."""
    weights = {
        "q1": np.arange(-48, 48, dtype=np.int8).reshape(12, 8),
        "q2": np.arange(-32, 32, dtype=np.int8).reshape(8, 8),
        "s": np.array(0.1, np.float32),
    }
    nodes = [
        node("DequantizeLinear", ["q1", "s"], "w1"),
        node("MatMul", ["x", "w1"], "h"),
        node("DequantizeLinear", ["q2", "s"], "w2"),
        node("MatMul", ["h", "w2"], "y"),
    ]
    base = model_of(nodes, weights, x=("N", 12), y=("N", 8))
    adapted = with_random_factors(lora.add(base, rank=2, targets="q1")[0], 1.0)
    merged = lora.merge(adapted)
    found = constants(merged)
    assert found["s"] == np.float32(0.1)
    assert merged.graph.node[0].input[1] == "s.q1"
    assert found["s.q1"] != found["s"]
    x = random(4, 12)
    expected = outputs(adapted.SerializeToString(), x)
    tolerance = 0.02 * np.abs(expected).max()
    np.testing.assert_allclose(outputs(merged.SerializeToString(), x), expected, rtol=0, atol=tolerance)
    lora.merge(adapted, output=tmp_path / "merged.onnx")
    assert lora.unmerge(tmp_path / "merged.onnx", adapted, "default") == lora.remove(adapted)


def test_unknown_layouts_are_not_merged() -> None:
    """Integers with two scales, and a scale that is computed, have no place for the sum."""
    weights = {"q": np.ones((12, 12), np.int8), "s": np.array(0.1, np.float32), "t": np.array(0.2, np.float32)}
    nodes = [
        node("DequantizeLinear", ["q", "s"], "w1"),
        node("MatMul", ["x", "w1"], "h"),
        node("DequantizeLinear", ["q", "t"], "w2"),
        node("MatMul", ["h", "w2"], "y"),
    ]
    adapted, _ = lora.add(model_of(nodes, weights, x=("N", 12), y=("N", 12)), rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match='"q" cannot be merged: nodes read its integers with different'):
        lora.merge(adapted)
    nodes = [
        node("Transpose", ["q"], "p"),
        node("DequantizeLinear", ["p", "s"], "w1"),
        node("MatMul", ["x", "w1"], "y"),
    ]
    adapted, _ = lora.add(model_of(nodes, weights, x=("N", 12), y=("N", 12)), rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match='"q" cannot be merged: nodes are between the integers and their'):
        lora.merge(adapted)
    conv = node("Conv", ["x", "w"], "y", group=2)
    weights = {"q": np.ones((8, 2, 3, 3), np.int8), "s": np.array(0.1, np.float32)}
    nodes = [node("DequantizeLinear", ["q", "s"], "w"), conv]
    adapted, _ = lora.add(model_of(nodes, weights, x=("N", 4, 5, 6), y=("N", 8, 3, 4)), rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match="the convolution has groups, and its weight consists of integers"):
        lora.merge(adapted)
    too_large = with_random_factors(lora.add(product(96, 8), rank=2, targets="*", base="nf4")[0], 1e30)
    with pytest.raises(InvalidArgumentError, match="the sum has elements that are infinite or NaN"):
        lora.merge(too_large)


def test_unmerge_finds_differences(tmp_path: Path) -> None:
    """The message names the first weight that differs, and the file stays away."""
    adapted = with_random_factors(lora.add(layers(), rank=2)[0])
    merged = lora.merge(adapted, {"default": 0.5})
    path = tmp_path / "base.onnx"
    lora.unmerge(merged, adapted, {"default": 0.5}, output=path)
    assert onnx.load(path) == lora.remove(adapted)
    path.unlink()
    with pytest.raises(InvalidArgumentError, match=r'is not the merge of .*: the weight "w1" has other bits'):
        lora.unmerge(merged, adapted, output=path)
    for entry in merged.graph.initializer:
        if entry.name == "b3":
            entry.CopyFrom(numpy_helper.from_array(random(1, 48), "b3"))
    with pytest.raises(InvalidArgumentError, match='the weight "b3" has another type or shape'):
        lora.unmerge(merged, adapted, {"default": 0.5}, output=path)
    merged = lora.merge(adapted)
    merged.graph.node[-1].op_type = "Tanh"
    del merged.graph.node[-1].input[1:]
    with pytest.raises(InvalidArgumentError, match='the node of "y" differs'):
        lora.unmerge(merged, adapted, output=path)
    assert not path.exists()


@pytest.mark.parametrize("groups", [2, 4])
def test_merge_of_a_convolution_with_groups(groups: int) -> None:
    """The first factor reads all channels, so that the merged convolution has no groups."""
    conv = node("Conv", ["x", "w", "b"], "y", group=groups, pads=[1, 1, 1, 1])
    weights = {"w": random(8, 4 // groups, 3, 3), "b": random(8)}
    base = model_of([conv], weights, x=("N", 4, 5, 6), y=("N", 8, 5, 6))
    adapted = with_random_factors(lora.add(base, rank=4, targets="*")[0])
    merged = lora.merge(adapted)
    assert constants(merged)["w"].shape == (8, 4, 3, 3)
    assert "group" not in attributes(merged.graph.node[0])
    x = random(3, 4, 5, 6)
    expected = on_onnxruntime(adapted, x)
    for result in (on_onnxruntime(merged, x), outputs(merged.SerializeToString(), x)):
        np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    assert lora.unmerge(merged, adapted) == lora.remove(adapted)
    both = lora.add(adapted, rank=4, targets="*", name="second")[0]
    with pytest.raises(InvalidArgumentError, match='"w" has groups and also the adapter "second"; merge all'):
        lora.merge(both, "default")
    assert lora.merge(both) == merged


GEMMS = {
    "beta": node("Gemm", ["x", "w", "b"], "y", beta=0.25),
    "relu": node("FusedGemm", ["x", "w", "b"], "y", domain="com.microsoft", activation="Relu"),
    "clip": node(
        "FusedGemm",
        ["x", "w", "b"],
        "y",
        domain="com.microsoft",
        activation="Clip",
        activation_min=-2.0,
        activation_max=3.0,
        beta=0.5,
    ),
}


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("base", ["keep", *BASES])
def test_gemm_with_beta_and_activation(name: str, base: str) -> None:
    """The adapter is added before the activation; a merge computes the same."""
    weights = {"w": random(96, 8) / 8, "b": random(8)}
    model = model_of([GEMMS[name]], weights, y=("N", 8))
    adapted = with_random_factors(lora.add(model, rank=2, targets="*", base=base)[0])
    x = random(5, 96)
    [weight] = {layer.weight for layer in lora.adapters(adapted).layers}
    plain = {"w": weights["w"]}
    identity = model_of([node("MatMul", ["x", "w"], "y")], plain, y=("N", 8))
    w = on_onnxruntime(without_adapter(identity, base=base), np.eye(96, dtype=np.float32))
    factor = attributes(GEMMS[name]).get("beta", 1.0)
    total = x @ (w + change_of(adapted, weight).T) + factor * weights["b"]
    expected = {"beta": total, "relu": np.maximum(total, 0), "clip": np.clip(total, -2, 3)}[name]
    for result in (on_onnxruntime(adapted, x), outputs(adapted.SerializeToString(), x)):
        np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.abs(total).max())
    if base == "keep":
        np.testing.assert_allclose(on_onnxruntime(lora.merge(adapted), x), expected, rtol=0, atol=1e-4)
        if name != "relu":
            with pytest.raises(
                InvalidArgumentError, match=r"use_dora is not supported .* its bias has a factor \(beta"
            ):
                lora.add(model, rank=2, targets="*", use_dora=True)


def test_model_trains_on_a_quantized_base(tmp_path: Path) -> None:
    """Model(lora={"base": ...}) trains, exports and reads the base from its file."""
    path = ortrain.examples.perceptron()
    x, labels = random(32, 64), np.random.default_rng(0).integers(0, 10, 32)
    for base in BASES:
        model = ortrain.Model(path, loss="cross_entropy", lora={"rank": 4, "base": base}, learning_rate=0.01, seed=1)
        before = model.evaluate(x, labels)
        model.fit(x, labels, epochs=5, verbose=0)
        assert model.evaluate(x, labels) < before
        model.export(tmp_path / f"{base}.onnx")
        exported = onnx.load(tmp_path / f"{base}.onnx")
        start, _ = lora.add(path, rank=4, base=base, output=None)
        frozen = {name: value for name, value in constants(start).items() if ".lora_" not in name}
        for name, value in frozen.items():
            assert constants(exported)[name].tobytes() == value.tobytes()
        merged = lora.merge(exported)
        assert lora.unmerge(merged, exported) == lora.remove(exported)
        lora.save_adapter(exported, tmp_path / base)
        moved = lora.load_adapter(path, tmp_path / base, check_base=False)
        assert {layer.weight for layer in lora.adapters(moved).layers} == {"fc1.weight"}


def test_base_in_files(tmp_path: Path) -> None:
    """A file with a quantized base has no bytes of the float weights, and refers to the other constants."""
    model = layers()
    copy = ModelProto.FromString(model.SerializeToString())
    onnx.save(copy, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=1024)
    _, description = lora.add(tmp_path / "model.onnx", rank=2, base="int4", output=tmp_path / "adapted.onnx")
    assert len(description.layers) == 6
    written = onnx.load(tmp_path / "adapted.onnx", load_external_data=False)
    external = [entry.name for entry in written.graph.initializer if entry.external_data]
    assert external == ["e"]
    adapted, _ = lora.add(model, rank=2, base="int4")
    np.testing.assert_array_equal(
        outputs(tmp_path / "adapted.onnx", indices()), outputs(adapted.SerializeToString(), indices())
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown base": ({"base": "int2"}, "the base must be one of 'keep', 'int8', 'int4', 'nf4', got 'int2'"),
    "DoRA": ({"base": "int4", "use_dora": True}, 'use_dora needs weights of floats; use the base "keep"'),
    "head": ({"base": "int4", "targets": "node y"}, 'the base "int4" needs linear layers whose weights are matrices'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, sentence = BAD[name]
    with pytest.raises(InvalidArgumentError) as caught:
        lora.add(layers(), **{"rank": 2, **options})
    assert sentence in str(caught.value)


def test_bad_weights() -> None:
    """Weights that no format can hold, and a second adapter that would lose the first."""
    doubles = model_of(
        [node("MatMul", ["x", "w"], "y")], {"w": random(96, 8, dtype=np.float64)}, dtype=TensorProto.DOUBLE
    )
    with pytest.raises(InvalidArgumentError, match="cannot be quantized to nf4: it is of float64; exclude it"):
        lora.add(doubles, rank=2, targets="*", base="nf4")
    model = product(96, 8)
    infinite = constants(model)["w"].copy()
    infinite[1, 2] = np.inf
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(infinite, "w"))
    with pytest.raises(InvalidArgumentError, match=r'"w" of .* cannot be quantized to int4: element 10 is inf'):
        lora.add(model, rank=2, targets="*", base="int4")
    old = model_of([node("MatMul", ["x", "w"], "y")], {"w": random(96, 8)}, opset=12)
    with pytest.raises(InvalidArgumentError, match="opset 12, and its weights of float32 need opset 13; convert"):
        lora.add(old, rank=2, targets="*", base="int8")
    first, _ = lora.add(product(96, 8), rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match='"w" has an adapter already, so it cannot be quantized to int4'):
        lora.add(first, rank=2, targets="*", name="second", base="int4")
    quantized, _ = lora.add(product(96, 8), rank=2, targets="*", base="int4")
    two, _ = lora.add(quantized, rank=2, targets="*", name="second")
    assert len(lora.adapters(two).layers) == 2


def test_weights_of_other_readers_stay() -> None:
    """A weight in two forms has no common adapter, and a weight that a graph returns is not quantized."""
    square = random(32, 32)
    nodes = [node("MatMul", ["x", "w"], "h"), node("Transpose", ["w"], "t"), node("MatMul", ["h", "t"], "y")]
    both = model_of(nodes, {"w": square}, x=("N", 32), y=("N", 32))
    with pytest.raises(InvalidArgumentError, match="in different forms"):
        lora.add(both, rank=2, targets="*")
    shared = model_of(
        [node("MatMul", ["x", "w"], "h"), node("MatMul", ["h", "w"], "y")], {"w": square}, x=("N", 32), y=("N", 32)
    )
    adapted, description = lora.add(shared, rank=2, targets="*", base="int4")
    assert [layer.weight for layer in description.layers] == ["w_Q4", "w_Q4"]
    assert ops(adapted) == ["MatMulNBits", "MatMulNBits"]
    with pytest.raises(InvalidArgumentError, match='the base "int4" needs linear layers'):
        lora.add(shared, rank=2, targets="node h", base="int4")
