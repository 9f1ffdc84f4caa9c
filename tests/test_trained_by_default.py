"""Default choice of trained constants: weights are trained, values computed from data or formulas are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts

Arrays = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]

RNG = np.random.default_rng(24)
POSITIONS = np.arange(16)[:, None] / 10000 ** (np.arange(4) / 4)
INTERLEAVED = np.stack([np.sin(POSITIONS), np.cos(POSITIONS)], -1).reshape(16, 8)
HALVES = np.concatenate([np.cos(POSITIONS), np.cos(POSITIONS)], -1)


def drawn(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def model(
    lines: str,
    initializers: Arrays,
    inputs: dict[str, Sequence[object]],
    integers: Sequence[str] = (),
    constants: Arrays | None = None,
) -> onnx.ModelProto:
    """Return a model from lines as ``y = Op(a, b) axis=1``; each node has the name of its result."""
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array)))
        for name, array in (constants or {}).items()
    ]
    for line in filter(None, map(str.strip, lines.splitlines())):
        result, call = line.split(" = ")
        head, _, attributes = call.partition(") ")
        op, _, arguments = head.rstrip(")").partition("(")
        given = {key: int(value) for key, value in (pair.split("=") for pair in attributes.split())}
        reads = [name.strip() for name in arguments.split(",")]
        nodes.append(helper.make_node(op, reads, [result], f"/{result}", **given))
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            declare(name, TensorProto.INT64 if name in integers else TensorProto.FLOAT, list(shape))
            for name, shape in inputs.items()
        ],
        [declare("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(array if array.dtype.kind == "i" else array.astype(np.float32), name)
            for name, array in ((name, np.asarray(array)) for name, array in initializers.items())
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def trained(given: onnx.ModelProto) -> dict[str, str]:
    """Return all float constants: an empty string for trained ones, and the reason for all others."""
    found = ortrain.inspect(given)
    assert found.obstacle is None
    floats = [info for info in found.parameters if info.dtype == "float32"]
    return {info.name: "" if info.role == "trained" else info.reason for info in floats}


def test_preparation_of_inputs() -> None:
    """Input normalization is constant: a StandardScaler of skl2onnx, and mean and deviation of image channels."""
    table = model(
        "a = Sub(x, mean)\nb = Div(a, scale)\nc = MatMul(b, w)\ny = Add(c, bias)",
        {"mean": drawn(4), "scale": drawn(4), "w": drawn(4, 1), "bias": drawn(1)},
        {"x": ["n", 4]},
    )
    assert trained(table) == {
        "mean": 'it is a statistic of a normalization that is written as arithmetic, in node "/a" (Sub)',
        "scale": 'it is a statistic of a normalization that is written as arithmetic, in node "/b" (Div)',
        "w": "",
        "bias": "",
    }
    image = model(
        "a = Cast(x) to=1\nb = Mul(a, factor)\nc = Add(b, offset)\nd = Conv(c, w, bias)\ny = Relu(d)",
        {"factor": drawn(1, 3, 1, 1), "offset": drawn(1, 3, 1, 1), "w": drawn(2, 3, 3, 3), "bias": drawn(2)},
        {"x": ["n", 3, 8, 8]},
    )
    assert trained(image) == {
        "factor": 'it prepares an input of the model, in node "/b" (Mul)',
        "offset": 'it prepares an input of the model, in node "/c" (Add)',
        "w": "",
        "bias": "",
    }
    integers = model(
        "a = Cast(x) to=1\nb = Sub(a, mean)\nc = Gemm(b, w)\nd = Mul(c, gain)\ny = Relu(d)",
        {"mean": drawn(4), "w": drawn(4, 3), "gain": drawn(3)},
        {"x": ["n", 4]},
        integers=["x"],
    )
    assert trained(integers) == {
        "mean": 'it is combined only with integers, positions or masks, in node "/b" (Sub)',
        "w": "",
        "gain": "",
    }
    # Arithmetic alone: these constants are the weights.
    dot = model(
        "a = Mul(x, w)\nb = ReduceSum(a, axes)\ny = Add(b, bias)",
        {"w": drawn(4), "bias": drawn(1), "axes": np.array([1])},
        {"x": ["n", 4]},
    )
    assert trained(dot) == {"w": "", "bias": ""}
    # Learned positions.
    positions = model("a = Add(x, p)\ny = MatMul(a, w)", {"p": drawn(1, 5, 8), "w": drawn(8, 2)}, {"x": ["n", 5, 8]})
    assert trained(positions) == {"p": "", "w": ""}


@pytest.mark.parametrize(
    ("sum_node", "outputs", "bias", "is_trained"),
    [
        ("Add(a, val_5)", 1, drawn(1), True),
        ("Add(val_5, a)", 1, drawn(1), True),
        ("Add(a, val_5)", 1, drawn(1, 1), True),
        # Without axes, with several outputs, or subtracted, the number is arithmetic.
        ("Add(a, val_5)", 1, drawn(), False),
        ("Add(a, val_5)", 3, drawn(1), False),
        ("Sub(a, val_5)", 1, drawn(1), False),
        ("Add(x, val_5)", 1, drawn(1), False),
    ],
)
def test_biases_of_one_output(sum_node: str, outputs: int, bias: np.ndarray, is_trained: bool) -> None:
    """A number with an exporter's name is trained if it is the bias of a product with one output."""
    given = model(
        f"h = Relu(x)\na = MatMul(h, w)\nb = {sum_node}\ny = Mul(a, b)",
        {"w": drawn(4, outputs), "val_5": bias},
        {"x": ["n", 4]},
    )
    assert (trained(given)["val_5"] == "") == is_trained


def test_first_states() -> None:
    """Initial states with equal values are constant, as a value or expanded to the batch; others are trained."""
    weights = {"w": drawn(1, 12, 4), "r": drawn(1, 12, 3)}
    lines = "a = LSTM(x, w, r, , , {h}, {c}) hidden_size=3\ny = Relu(a)"
    zeros = np.zeros((1, 2, 3), np.float32)
    state = 'it is an initial state with equal values, in node "/a" (LSTM)'
    given = model(
        lines.format(h="h_Constant_0", c="c0"),
        weights | {"c0": zeros + 0.5},
        {"x": [5, 2, 4]},
        constants={"h_Constant_0": zeros},
    )
    assert trained(given) == {"w": "", "r": "", "c0": state, "h_Constant_0": state}
    given = model(lines.format(h="h0", c="h0"), weights | {"h0": drawn(1, 2, 3)}, {"x": [5, 2, 4]})
    assert trained(given) == {"w": "", "r": "", "h0": ""}
    expanded = (
        "size = Shape(x)\nrows = Slice(size, one, two)\n"
        "shape = Concat(one, rows, three) axis=0\nh = Expand(zero, shape)\n"
    )
    sizes = {name: np.array([value]) for name, value in {"one": 1, "two": 2, "three": 3}.items()}
    given = model(
        expanded + lines.format(h="h", c="h"), weights | sizes, {"x": [5, "n", 4]}, constants={"zero": zeros[:, :1]}
    )
    assert trained(given) == {"w": "", "r": "", "zero": state}


def test_masks() -> None:
    """Masks of an attention are constant, also zeros from an exporter; a learned positional bias is trained."""
    lines = (
        "q = MatMul(x, w)\nk = Transpose(x)\ns = MatMul(q, k)\nt = Mul(s, small)\n"
        "a = Add(t, {mask})\np = Softmax(a) axis=-1\ny = MatMul(p, x)"
    )
    reason = 'it is a mask of the scores of an attention, in node "/a" (Add)'
    small = {"small": np.array(0.5)}
    number = 'it is a single number in node "/t" (Mul)'
    hides = np.triu(np.full((5, 5), -np.inf), 1)
    for name, values, found in [
        ("m", hides, reason),
        ("m", np.where(hides < 0, -1e9, 0), reason),
        ("where_1", np.zeros((5, 5)), reason),
        ("val_12", np.zeros((1, 5)), reason),
        ("relative_bias", np.zeros((5, 5)), ""),
        ("where_1", drawn(5, 5), ""),
    ]:
        given = model(lines.format(mask=name), {"w": drawn(5, 5), name: values} | small, {"x": [5, 5]})
        assert trained(given) == {"w": "", name: found, "small": number}
    # A fresh positional bias, from a lookup by the exporter, has an axis for the heads.
    for name, values, found in [
        ("val_79", np.zeros((3, 5, 5)), ""),
        ("val_79", np.zeros((1, 3, 5, 5)), ""),
        ("val_79", np.zeros((1, 5, 5)), reason),
        ("val_79", np.zeros((2, 1, 5, 5)), reason),
        ("val_79", np.broadcast_to(hides, (3, 5, 5)), reason),
    ]:
        given = model(
            "q = MatMul(x, w)\ns = MatMul(q, k)\na = Add(s, val_79)\np = Softmax(a) axis=-1\ny = MatMul(p, x)",
            {"w": drawn(5, 5), name: values},
            {"x": [2, 3, 5, 5], "k": [2, 3, 5, 5]},
        )
        assert trained(given) == {"w": "", name: found}
    # Zeros before a softmax are the bias of a layer.
    last = model(
        "s = MatMul(x, w)\na = Add(s, val_1)\ny = Softmax(a) axis=-1",
        {"w": drawn(4, 3), "val_1": np.zeros(3)},
        {"x": ["n", 4]},
    )
    assert trained(last) == {"w": "", "val_1": ""}


def test_positions() -> None:
    """Sine tables, caches of rotary embeddings and position frequencies are constant."""
    table = model(
        "a = MatMul(x, w)\nb = Add(a, table)\nc = Mul(b, cache)\ny = MatMul(c, v)",
        {"w": drawn(4, 8), "table": INTERLEAVED[None], "cache": HALVES.astype(np.float16), "v": drawn(8, 2)},
        {"x": ["n", 16, 4]},
    )
    sines = "its columns are sines and cosines of positions"
    assert trained(table) == {"w": "", "table": sines, "cache": sines, "v": ""}
    looked_up = model(
        "a = Gather(table, p)\nb = Gather(words, p)\nc = Add(a, b)\ny = MatMul(c, v)",
        {"table": INTERLEAVED, "words": drawn(16, 8), "v": drawn(8, 2)},
        {"p": ["n", 3]},
        integers=["p"],
    )
    assert trained(looked_up) == {"table": sines, "words": "", "v": ""}
    # As transformers' Llama: inv_freq[None, :, None].expand(batch, -1, 1) @ positions[:, None, :].
    rotary = model(
        """
        f = Unsqueeze(inv_freq, ends)
        p = Cast(positions) to=1
        q = Unsqueeze(p, one)
        r = MatMul(f, q)
        t = Transpose(r)
        u = Concat(t, t) axis=0
        sin = Sin(u)
        cos = Cos(u)
        a = Gather(words, positions)
        b = MatMul(a, w)
        c = Mul(b, w2)
        d = ReduceSum(sin)
        e = ReduceSum(cos)
        g = Mul(c, d)
        h = Mul(c, e)
        y = Add(g, h)
        """,
        {
            "inv_freq": drawn(4),
            "ends": np.array([0, 2]),
            "one": np.array([1]),
            "words": drawn(16, 8),
            "w": drawn(8, 8),
            "w2": drawn(8),
        },
        {"positions": [1, 3]},
        integers=["positions"],
    )
    frequencies = 'it multiplies positions for sines and cosines, in node "/f" (Unsqueeze)'
    assert trained(rotary) == {"inv_freq": frequencies, "words": "", "w": "", "w2": ""}
    # The embedding of a diffusion step: the layers after the sines are trained.
    step = model(
        "t = Cast(step) to=1\na = Mul(t, frequencies)\nb = Sin(a)\nc = Cos(a)\n"
        "d = Concat(b, c) axis=1\ne = Gemm(d, w, b1)\nf = Relu(e)\ny = Gemm(f, v)",
        {"frequencies": drawn(4), "w": drawn(8, 5), "b1": drawn(5), "v": drawn(5, 2)},
        {"step": ["n", 1]},
        integers=["step"],
    )
    found = trained(step)
    assert found.pop("frequencies").startswith("it multiplies positions")
    assert found == {"w": "", "b1": "", "v": ""}


@pytest.mark.parametrize(
    "table",
    [np.zeros((16, 8)), np.ones((16, 8)), np.eye(16)[:, :8], drawn(16, 8), INTERLEAVED + 0.1 * drawn(16, 8)],
    ids=["zeros", "ones", "unit", "drawn", "noisy"],
)
def test_tables_that_are_learned(table: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    given = model("a = MatMul(x, w)\ny = Add(a, table)", {"w": drawn(4, 8), "table": table}, {"x": ["n", 16, 4]})
    assert trained(given) == {"w": "", "table": ""}


def test_normalizations_written_as_arithmetic() -> None:
    """A frozen BatchNormalization is recognized as its formula, and as precomputed scale and bias."""
    formula = model(
        """
        a = Conv(x, w)
        b = Sub(a, mean)
        c = Add(var, eps)
        d = Sqrt(c)
        e = Div(b, d)
        f = Mul(e, gamma)
        g = Add(f, beta)
        y = Relu(g)
        """,
        {
            "w": drawn(2, 3, 1, 1),
            "mean": drawn(2, 1, 1),
            "var": drawn(2, 1, 1) ** 2,
            "eps": np.array([1e-5]),
            "gamma": drawn(2, 1, 1),
            "beta": drawn(2, 1, 1),
        },
        {"x": ["n", 3, 4, 4]},
    )
    assert trained(formula) == {
        "w": "",
        "mean": 'it is a statistic of a normalization that is written as arithmetic, in node "/b" (Sub)',
        "var": 'only its square root is used, like that of a variance, in node "/c" (Add)',
        "eps": 'it is a single number in node "/c" (Add)',
        "gamma": "",
        "beta": "",
    }
    # The form of detectron2.
    folded = model(
        """
        a = Conv(x, w)
        c = Add(var, eps)
        d = Sqrt(c)
        r = Reciprocal(d)
        s = Mul(gamma, r)
        m = Mul(mean, s)
        o = Sub(beta, m)
        s4 = Reshape(s, shape)
        o4 = Reshape(o, shape)
        f = Mul(a, s4)
        y = Add(f, o4)
        """,
        {
            "w": drawn(2, 3, 1, 1),
            "mean": drawn(2),
            "var": drawn(2) ** 2,
            "eps": np.array(1e-5),
            "gamma": drawn(2),
            "beta": drawn(2),
            "shape": np.array([1, 2, 1, 1]),
        },
        {"x": ["n", 3, 4, 4]},
    )
    found = trained(folded)
    assert [name for name, reason in found.items() if not reason] == ["w", "gamma", "beta"]
    assert found["mean"] == 'it is a statistic of a normalization that is written as arithmetic, in node "/y" (Add)'


def test_constants_that_fork_are_followed_once() -> None:
    """A constant is concatenated with itself and sliced sixty times: of 2^60 paths, each value is visited once."""
    lines = []
    for k in range(60):
        lines += [f"twice{k} = Concat(c{k}, c{k}) axis=0", f"c{k + 1} = Slice(twice{k}, zero, four)"]
    given = model(
        "\n".join([*lines, "a = MatMul(x, w)", "b = Add(c60, eps)", "c = Sqrt(b)", "y = Div(a, c)"]),
        {"c0": drawn(4) ** 2, "zero": np.array([0]), "four": np.array([4]), "w": drawn(4, 4), "eps": np.array([1e-5])},
        {"x": ["n", 4]},
    )
    found = trained(given)
    assert found["c0"] == 'only its square root is used, like that of a variance, in node "/twice0" (Concat)'


@pytest.mark.parametrize("groups", [1, 2])
def test_neutral_scales_of_normalizations(groups: int) -> None:
    """PyTorch exports GroupNorm with ones and zeros for the groups, then the scale and bias of the channels."""
    group = model(
        """
        a = Conv(x, w)
        b = Reshape(a, groups)
        c = InstanceNormalization(b, ones, zeros)
        d = Shape(a)
        e = Reshape(c, d)
        f = Mul(e, norm.weight)
        y = Add(f, norm.bias)
        """,
        {
            "w": drawn(4, 3, 1, 1),
            "groups": np.array([0, groups, -1]),
            "norm.weight": np.ones((4, 1, 1)),
            "norm.bias": np.zeros((4, 1, 1)),
        },
        {"x": ["n", 3, 4, 4]},
        constants={"ones": np.ones(groups, np.float32), "zeros": np.zeros(groups, np.float32)},
    )
    neutral = 'it has no effect in node "/c" (InstanceNormalization), which has no learned scale and bias'
    assert trained(group) == {"w": "", "norm.weight": "", "norm.bias": "", "ones": neutral, "zeros": neutral}


def test_fresh_scales_of_normalizations() -> None:
    """An untrained normalization also has ones and zeros, but with parameter names."""
    fresh = model(
        "a = Conv(x, w)\ny = InstanceNormalization(a, norm.weight, norm.bias)",
        {"w": drawn(2, 3, 1, 1), "norm.weight": np.ones(2), "norm.bias": np.zeros(2)},
        {"x": ["n", 3, 4, 4]},
    )
    assert trained(fresh) == {"w": "", "norm.weight": "", "norm.bias": ""}


def reasons(given: onnx.ModelProto) -> dict[str, tuple[str, str, str]]:
    """Return role, confidence and reason of each float constant."""
    found = ortrain.inspect(given)
    return {
        info.name: (info.role, info.confidence, info.reason) for info in found.parameters if info.dtype == "float32"
    }


@pytest.mark.parametrize(
    ("node", "name", "value"),
    [
        ("b = ScatterND({c}, at, a)", "val_20", 0.0),
        ("b = ScatterElements({c}, index, a) axis=0", "full", -2.0),
        ("b = ScatterElements({c}, index, a) axis=0", "canvas", 0.5),
        ("b = ScatterND(a, at, {c})", "val_43", 1.0),
        ("b = Concat(a, {c}) axis=1", "zeros_3", 0.0),
        ("b = Where(mask, {c}, a)", "val_1", 7.0),
        ("b = Max(a, {c})", "full_2", -1e9),
    ],
)
def test_filled_tensors(node: str, name: str, value: float) -> None:
    """A tensor with one fill value is no parameter; a fresh class token is a parameter."""
    initializers = {
        "w": drawn(4, 4),
        name: np.full((3, 4), value),
        "at": np.array([[2], [0], [1]]),
        "index": np.array([[1] * 4, [0] * 4, [2] * 4]),
        "v": drawn(4, 2) if "Concat" not in node else drawn(8, 2),
    }
    lines = "mask = Cast(x) to=9\na = MatMul(x, w)\n" + node.format(c=name) + "\ny = MatMul(b, v)"
    given = model(lines, initializers, {"x": [3, 4]})
    found = trained(given)
    assert found.pop(name)
    assert found == {"w": "", "v": ""}
    if "Concat" in node or "Where" in node:
        token = model(lines.replace(name, "cls_token"), initializers | {"cls_token": np.zeros((3, 4))}, {"x": [3, 4]})
        assert trained(token)["cls_token"] == ""


CELLS = np.stack(np.meshgrid(np.arange(4), np.arange(5)), -1).reshape(20, 2) + 0.5
TABLES = {
    "points": CELLS,
    "head.anchors": 8 * CELLS,
    "normalized": CELLS.T / 5,
    "strides": np.repeat([8.0, 16.0], [16, 4])[:, None],
    "stride": np.full((20, 1), 8.0),
    "counts": np.arange(20.0)[:, None],
    "slopes": np.arange(1, 21)[:, None] * np.arange(0, 1.2, 0.3),
    "sizes": np.array([[10.0, 13.0], [16.0, 30.0], [33.0, 23.0], [30.0, 61.0]] * 5),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_cells(name: str) -> None:
    """Points, strides and sizes for the boxes of a detector are constant under any name."""
    table = TABLES[name]
    rows = table.shape if table.shape[0] == 20 else table.shape[::-1]
    lines = f"a = MatMul(x, w)\nb = Reshape(a, shape)\nc = Mul(b, {name})\ny = MatMul(c, v)"
    shape = [1, *table.shape]
    initializers = {
        "w": drawn(4, int(np.prod(rows))),
        "shape": np.array(shape),
        name: table,
        "v": drawn(table.shape[1], 2),
    }
    found = reasons(model(lines, initializers, {"x": [1, 4]}))
    assert found[name][:2] == ("constant", "likely"), found[name]
    assert found["w"][0] == found["v"][0] == "trained"


def test_bins_of_a_distribution() -> None:
    """Consecutive integers are bin values, in a product or a one-channel convolution; other values are weights."""
    lines = "a = MatMul(x, w)\nb = Softmax(a) axis=-1\ny = MatMul(b, bins)"
    for bins, role in [(np.arange(6.0), "constant"), (drawn(6), "trained"), (np.zeros(6), "trained")]:
        given = model(lines, {"w": drawn(4, 6), "bins": bins[:, None]}, {"x": ["n", 4]})
        assert reasons(given)["bins"][0] == role
    lines = "a = Conv(x, w)\nb = Softmax(a) axis=1\ny = Conv(b, dfl.weight)"
    given = model(
        lines, {"w": drawn(6, 3, 1, 1), "dfl.weight": np.arange(6.0).reshape(1, 6, 1, 1)}, {"x": ["n", 3, 4, 4]}
    )
    assert reasons(given)["dfl.weight"][0] == "constant"


def test_coordinates_of_a_bias() -> None:
    """Swin multiplies a coordinate table with the weights of a small network; learned queries are trained."""
    at = np.stack(np.meshgrid(np.arange(-3, 4), np.arange(-3, 4)), -1).reshape(49, 2)
    table = np.sign(at) * np.log2(1 + np.abs(at)) / 3
    lines = "a = MatMul(x, w)\nb = MatMul({t}, mlp.weight)\nc = Relu(b)\nd = ReduceMean(c)\ny = Add(a, d)"
    weights = {"w": drawn(4, 8), "mlp.weight": drawn(2, 8)}
    found = reasons(model(lines.format(t="coords"), weights | {"coords": table}, {"x": ["n", 4]}))
    assert found["coords"] == (
        "constant",
        "likely",
        'it is a table of coordinates that a weight is multiplied with, in node "/b" (MatMul)',
    )
    assert found["mlp.weight"][0] == "trained"
    found = reasons(model(lines.format(t="queries"), weights | {"queries": drawn(5, 2)}, {"x": ["n", 4]}))
    assert found["queries"][0] == found["mlp.weight"][0] == "trained"


def test_vectors_of_a_power_iteration() -> None:
    """Spectral normalization: sigma is u W v, with constant unit vectors u and v."""
    u, v = drawn(4), drawn(3)
    given = model(
        """
        a = MatMul(fc.weight_orig, fc.weight_v)
        sigma = MatMul(fc.weight_u, a)
        b = Div(fc.weight_orig, sigma)
        c = Transpose(b)
        y = Gemm(x, c, fc.bias)
        """,
        {
            "fc.weight_orig": drawn(4, 3),
            "fc.weight_u": u / np.linalg.norm(u),
            "fc.weight_v": v / np.linalg.norm(v),
            "fc.bias": drawn(4),
        },
        {"x": ["n", 3]},
    )
    reason = "it is a vector of the power iteration of a spectral norm, in node"
    assert trained(given) == {
        "fc.weight_orig": "",
        "fc.bias": "",
        "fc.weight_u": f'{reason} "/sigma" (MatMul)',
        "fc.weight_v": f'{reason} "/a" (MatMul)',
    }


def test_fixed_filters_and_masks() -> None:
    """A blur uses one filter for all channels; attention windows mask with -100."""
    blur = np.outer([0.25, 0.5, 0.25], [0.25, 0.5, 0.25])
    image = model(
        "a = Conv(x, w)\nb = Conv(a, filt) group=4\ny = Conv(b, depth.weight) group=4",
        {"w": drawn(4, 3, 1, 1), "filt": np.tile(blur, (4, 1, 1, 1)), "depth.weight": drawn(4, 1, 3, 3)},
        {"x": ["n", 3, 8, 8]},
    )
    found = trained(image)
    assert found == {"w": "", "filt": 'it is one filter for all channels, in node "/b" (Conv)', "depth.weight": ""}
    windows = model(
        "q = MatMul(x, w)\nk = Transpose(x)\ns = MatMul(q, k)\na = Add(s, m)\nb = Reshape(a, flat)\n"
        "p = Softmax(b) axis=-1\ny = MatMul(p, x)",
        {"w": drawn(5, 5), "flat": np.array([5, 5]), "m": np.where(np.eye(5), 0.0, -100.0)},
        {"x": [5, 5]},
    )
    assert trained(windows) == {"w": "", "m": 'it is a mask of the scores of an attention, in node "/a" (Add)'}


def test_numbers_that_a_program_has() -> None:
    """Constants with names of PyTorch's older exporter are never parameters."""
    given = model(
        "a = MatMul(x, w)\nb = Mul(a, /layer/Constant_3_output_0)\ny = Add(b, bias)",
        {"w": drawn(4, 4), "bias": drawn(4)},
        {"x": ["n", 4]},
        constants={"/layer/Constant_3_output_0": drawn(4)},
    )
    assert trained(given) == {
        "w": "",
        "bias": "",
        "/layer/Constant_3_output_0": 'it is a literal in the code of the network, in node "/b" (Mul)',
    }


def test_parameters_that_share_an_initializer(tmp_path: Path) -> None:
    """An exporter stores equal tensors once, with Identity nodes for other layers; each is trained separately."""
    given = model(
        """
        var2 = Identity(ones)
        n2.weight = Identity(n1.weight)
        a = Conv(x, w)
        b = BatchNormalization(a, ones, zeros, zeros, ones)
        c = BatchNormalization(b, n1.weight, n1.bias, mean, var)
        y = BatchNormalization(c, n2.weight, n2.bias, mean2, var2)
        """,
        {
            "w": drawn(4, 3, 1, 1),
            "ones": np.ones(4),
            "zeros": np.zeros(4),
            "n1.weight": np.ones(4),
            "n1.bias": drawn(4),
            "n2.bias": drawn(4),
            "mean": drawn(4),
            "var": drawn(4) ** 2,
            "mean2": drawn(4),
        },
        {"x": ["n", 3, 4, 4]},
    )
    roles = {name: role for name, (role, _, _) in reasons(given).items()}
    assert roles == {
        **dict.fromkeys(("w", "ones", "zeros", "n1.weight", "n1.bias", "n2.weight", "n2.bias"), "trained"),
        **dict.fromkeys(("zeros/statistic", "ones/statistic", "mean", "var", "mean2", "var2"), "statistic"),
    }
    artifacts.generate_artifacts(given, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    state = ortrain.api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = ortrain.api.Module(tmp_path / "training_model.onnx", state)
    module(drawn(2, 3, 4, 4), drawn(2, 4, 4, 4))
    found = {name: parameter.data for name, parameter in state.parameters}
    assert not np.array_equal(found["ones/statistic"], found["var2"])
    assert np.all(found["ones"] == 1)


def test_guesses(tmp_path: Path) -> None:
    """Reports list guesses first, and artifacts warn once."""
    given = model(
        "a = MatMul(x, w)\nb = Mul(a, val_3)\nc = Add(b, bias)\nd = Relu(c)\ny = MatMul(d, w)",
        {"w": drawn(4, 4), "bias": drawn(4), "val_3": drawn(4)},
        {"x": ["n", 4]},
    )
    found = reasons(given)
    assert {name: confidence for name, (_, confidence, _) in found.items()} == {
        "w": "certain",
        "bias": "likely",
        "val_3": "guess",
    }
    assert found["w"][2] == 'it is a weight of node "/a" (MatMul); 2 nodes share it'
    text = str(ortrain.inspect(given)).splitlines()
    assert text[2] == '  val_3: float32[4]: a guess: it is a float input of node "/b" (Mul)'
    sentence = (
        '"val_3" may not be a parameter, but is trained by default (it is a float input of node "/b" (Mul)); name the '
        "parameters in requires_grad, or the constants in frozen_params"
    )
    assert f"  {sentence}" in text
    with pytest.warns(ortrain.TrainingWarning) as warned:
        artifacts.generate_artifacts(given, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    assert [str(one.message) for one in warned] == [sentence]
    for options in ({"requires_grad": ["w", "val_3"]}, {"frozen_params": ["val_3"]}):
        artifacts.generate_artifacts(
            given,
            loss=artifacts.LossType.MSELoss,
            artifact_directory=tmp_path,
            **options,  # type: ignore[arg-type]
        )


def test_single_numbers() -> None:
    """Learned single numbers are found by their names, their axes and their use."""
    given = model(
        """
        a = MatMul(x, w)
        b = Add(a, fc.bias)
        c = PRelu(b, act.slope)
        d = Mul(c, gate)
        e = Mul(d, logit_scale)
        f = Mul(e, half)
        g = Add(f, /net/Constant_output_0)
        h = Abs(g)
        i = Add(h, eps)
        j = Sqrt(i)
        y = Pow(j, two)
        """,
        {
            "w": drawn(4, 1),
            "fc.bias": drawn(1),
            "act.slope": drawn(1),
            "gate": drawn(1, 1),
            "logit_scale": drawn(),
            "half": np.array(0.5),
            "/net/Constant_output_0": np.array([1.0]),
            "eps": np.array([1e-5]),
            "two": np.array([2.0]),
        },
        {"x": ["n", 4]},
    )
    found = ortrain.inspect(given)
    assert found.names("trained") == ["w", "fc.bias", "act.slope", "gate", "logit_scale"]


def test_single_numbers_that_the_file_calls_parameters() -> None:
    """The names have an index or an attribute path, as exporters write them."""
    given = model(
        """
        slope = Reshape(act.weight, axes)
        a = MatMul(x, w)
        b = PRelu(a, slope)
        c = Mul(b, blocks.0.gates.1)
        d = Add(c, layers.3.beta)
        n = ReduceL2(fc.weight_v)
        s = Div(fc.weight_g, n)
        e = Mul(fc.weight_v, s)
        f = MatMul(d, e)
        g = Mul(f, embed.embed_scale)
        h = Add(g, norm.eps)
        i = MatMul(x, v)
        j = Add(i, onnx::Add_7)
        k = Mul(h, j)
        y = Mul(k, factor)
        """,
        {
            "act.weight": drawn(1),
            "axes": np.array([1]),
            "w": drawn(4, 4),
            "blocks.0.gates.1": drawn(),
            "layers.3.beta": drawn(),
            "fc.weight_v": drawn(4, 3),
            "fc.weight_g": drawn(),
            "embed.embed_scale": drawn(),
            "norm.eps": np.array(1e-5),
            "v": drawn(4, 1),
            "onnx::Add_7": drawn(1),
            "factor": np.array(0.5),
        },
        {"x": ["n", 4]},
    )
    found = {name: (role, confidence) for name, (role, confidence, _) in reasons(given).items()}
    assert {name for name, (role, _) in found.items() if role == "trained"} == {
        *("act.weight", "w", "blocks.0.gates.1", "layers.3.beta", "fc.weight_v", "fc.weight_g", "v", "onnx::Add_7"),
    }
    assert found["norm.eps"][1] == found["embed.embed_scale"][1] == "certain"
    assert found["factor"][1] == "guess"


def test_nodes_and_layers(tmp_path: Path) -> None:
    """A parameter lists the nodes that use it, patterns match these nodes, and layers count from the end."""
    given = model(
        """
        a = Gather(words, x)
        b = Add(a, positions)
        c = LayerNormalization(b, gamma, beta)
        d = MatMul(c, w1)
        e = Add(d, b1)
        f = Relu(e)
        g = Transpose(words)
        y = MatMul(f, g)
        """,
        {
            "words": drawn(16, 8),
            "positions": drawn(3, 8),
            "gamma": drawn(8),
            "beta": drawn(8),
            "w1": drawn(8, 8),
            "b1": drawn(8),
        },
        {"x": ["n", 3]},
        integers=["x"],
    )
    found = {info.name: info for info in ortrain.inspect(given).parameters}
    assert {name: (info.nodes, info.layer) for name, info in found.items()} == {
        "words": (["/a", "/g"], 1),
        "positions": (["/b"], 4),
        "gamma": (["/c"], 3),
        "beta": (["/c"], 3),
        "w1": (["/d"], 2),
        "b1": (["/e"], 2),
    }

    def chosen(**options: object) -> list[str]:
        artifacts.generate_artifacts(given, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path, **options)  # type: ignore[arg-type]
        state = ortrain.api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        return sorted(name for name, parameter in state.parameters if parameter.requires_grad)

    assert chosen(last=1) == ["words"]
    assert chosen(last=2) == ["b1", "w1", "words"]
    assert chosen(last=4) == sorted(found)
    assert chosen(requires_grad=["/[cd]"]) == ["beta", "gamma", "w1"]
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        chosen(last=5)
    assert str(error.value) == "last must be from 1 to 4, the number of layers that can be trained, got 5"
    with pytest.raises(ortrain.InvalidArgumentError, match="both select the trained parameters"):
        chosen(last=1, requires_grad=["w1"])


def test_requires_grad_overrides_the_default_choice(tmp_path: Path) -> None:
    given = model(
        "a = Sub(x, mean)\nb = Div(a, scale)\ny = MatMul(b, w)",
        {"mean": drawn(4), "scale": drawn(4), "w": drawn(4, 1)},
        {"x": ["n", 4]},
    )
    artifacts.generate_artifacts(
        given, requires_grad=["mean"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    state = ortrain.api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert [name for name, _ in state.parameters] == ["mean"]
