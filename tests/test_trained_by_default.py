"""Which constants are trained if nobody says so: weights are, what was computed from data or by a formula is not."""

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
    """Of lines as ``y = Op(a, b) axis=1``; every node is named after its result."""
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
    """What is trained, and the reasons of all other floats."""
    found = ortrain.inspect(given)
    assert found.obstacle is None
    floats = [info for info in found.parameters if info.dtype == "float32"]
    return {info.name: "" if info.role == "trained" else info.reason for info in floats}


def test_preparation_of_inputs() -> None:
    """A StandardScaler as skl2onnx writes it, and the mean and the deviation of the channels of an image."""
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
        "mean": 'it meets nothing but integers, positions or masks, in node "/b" (Sub)',
        "w": "",
        "gain": "",
    }
    # Nothing but arithmetic: these are the weights.
    dot = model(
        "a = Mul(x, w)\nb = ReduceSum(a, axes)\ny = Add(b, bias)",
        {"w": drawn(4), "bias": drawn(1), "axes": np.array([1])},
        {"x": ["n", 4]},
    )
    assert trained(dot) == {"w": "", "bias": ""}
    # Positions that are learned.
    positions = model("a = Add(x, p)\ny = MatMul(a, w)", {"p": drawn(1, 5, 8), "w": drawn(8, 2)}, {"x": ["n", 5, 8]})
    assert trained(positions) == {"p": "", "w": ""}


def test_first_states() -> None:
    """Zeros that an exporter wrote, as a value or expanded to the batch; a state that somebody named is learned."""
    weights = {"w": drawn(1, 12, 4), "r": drawn(1, 12, 3)}
    lines = "a = LSTM(x, w, r, , , {h}, {c}) hidden_size=3\ny = Relu(a)"
    zeros = np.zeros((1, 2, 3), np.float32)
    state = 'it is a first state of zeros, in node "/a" (LSTM)'
    given = model(
        lines.format(h="h_Constant_0", c="c0"),
        weights | {"c0": zeros},
        {"x": [5, 2, 4]},
        constants={"h_Constant_0": zeros},
    )
    assert trained(given) == {"w": "", "r": "", "c0": "", "h_Constant_0": state}
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
    """Of an attention: what hides, and zeros that an exporter computed; a bias of positions is learned."""
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
    # A bias of zeros in front of a softmax is one of a layer.
    last = model(
        "s = MatMul(x, w)\na = Add(s, val_1)\ny = Softmax(a) axis=-1",
        {"w": drawn(4, 3), "val_1": np.zeros(3)},
        {"x": ["n", 4]},
    )
    assert trained(last) == {"w": "", "val_1": ""}


def test_positions() -> None:
    """Tables of sines, as values, caches of a rotary embedding, and frequencies of either kind."""
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
    frequencies = 'it is what positions are multiplied by for sines and cosines, in node "/f" (Unsqueeze)'
    assert trained(rotary) == {"inv_freq": frequencies, "words": "", "w": "", "w2": ""}
    # The embedding of a diffusion step: what comes behind the sines is trained.
    step = model(
        "t = Cast(step) to=1\na = Mul(t, frequencies)\nb = Sin(a)\nc = Cos(a)\n"
        "d = Concat(b, c) axis=1\ne = Gemm(d, w, b1)\nf = Relu(e)\ny = Gemm(f, v)",
        {"frequencies": drawn(4), "w": drawn(8, 5), "b1": drawn(5), "v": drawn(5, 2)},
        {"step": ["n", 1]},
        integers=["step"],
    )
    found = trained(step)
    assert found.pop("frequencies").startswith("it is what positions are multiplied by")
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
    """A frozen BatchNormalization: as its formula, and as scale and bias that are computed first."""
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
        "var": 'only its root is used, as that of a variance, in node "/c" (Add)',
        "eps": 'it is a single number in node "/c" (Add)',
        "gamma": "",
        "beta": "",
    }
    # As detectron2 writes it.
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
    """Sixty times a constant is put behind itself and cut again: there are 2^60 ways through that."""
    lines = []
    for k in range(60):
        lines += [f"twice{k} = Concat(c{k}, c{k}) axis=0", f"c{k + 1} = Slice(twice{k}, zero, four)"]
    given = model(
        "\n".join([*lines, "a = MatMul(x, w)", "b = Add(c60, eps)", "c = Sqrt(b)", "y = Div(a, c)"]),
        {"c0": drawn(4) ** 2, "zero": np.array([0]), "four": np.array([4]), "w": drawn(4, 4), "eps": np.array([1e-5])},
        {"x": ["n", 4]},
    )
    found = trained(given)
    assert found["c0"] == 'only its root is used, as that of a variance, in node "/twice0" (Concat)'


def test_neutral_scales_of_normalizations() -> None:
    """GroupNorm as PyTorch exports it: ones and zeros for the groups, then the scale and the bias of the channels."""
    group = model(
        """
        a = Conv(x, w)
        b = Reshape(a, groups)
        c = InstanceNormalization(b, ones, zeros)
        d = Shape(a)
        e = Reshape(c, d)
        f = Mul(e, gamma)
        y = Add(f, beta)
        """,
        {
            "w": drawn(4, 3, 1, 1),
            "groups": np.array([0, 2, -1]),
            "gamma": np.ones((4, 1, 1)),
            "beta": np.zeros((4, 1, 1)),
        },
        {"x": ["n", 3, 4, 4]},
        constants={"ones": np.ones(2, np.float32), "zeros": np.zeros(2, np.float32)},
    )
    neutral = 'it changes nothing in node "/c" (InstanceNormalization): that has no scale and bias of its own'
    assert trained(group) == {"w": "", "gamma": "", "beta": "", "ones": neutral, "zeros": neutral}
    # A normalization that was never trained has such values, too, under names.
    fresh = model(
        "a = Conv(x, w)\ny = InstanceNormalization(a, norm.weight, norm.bias)",
        {"w": drawn(2, 3, 1, 1), "norm.weight": np.ones(2), "norm.bias": np.zeros(2)},
        {"x": ["n", 3, 4, 4]},
    )
    assert trained(fresh) == {"w": "", "norm.weight": "", "norm.bias": ""}


def test_single_numbers() -> None:
    """Those that were learned: by their names, their axes, and what becomes of them."""
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


def test_nodes_and_layers(tmp_path: Path) -> None:
    """A parameter says which nodes use it, a pattern may name these, and layers are counted from the end."""
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
    assert str(error.value) == "last is a number of layers from 1 to 4, for so many of the model can be trained, not 5"
    with pytest.raises(ortrain.InvalidArgumentError, match="both say what is trained"):
        chosen(last=1, requires_grad=["w1"])


def test_whoever_knows_better_names_it(tmp_path: Path) -> None:
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
