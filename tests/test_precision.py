"""Inner products in bfloat16: options, visibility, distance to float32, and reproducible bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BACKENDS, DEVICES, Run
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState
from ortrain.session import TrainingSession

PRECISIONS = ("bf16", "bf16x3", "bf16x6")
UNITS = ("amx", "avx512_bf16", "emulated")
STEPS, CLASSES = 5, 20
# Maximum relative distance of losses to float32. Rounding changes a factor by up to 2^-9, 2^-17 or 2^-25 of its value,
# and errors add up over a few layers. Later steps amplify earlier errors, because AdamW uses the signs of gradients.
LOSSES = {"bf16": 3e-2, "bf16x3": 3e-4, "bf16x6": 2e-5}

Folder = Callable[[str], Path]


class Net:
    """Builder of a small network; its inner products are long enough to be rounded."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name, self.shape = name, list(shape)
        self.rng = np.random.default_rng(len(name))
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        output = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        scale = float(np.prod(shape[1:]) if len(shape) > 2 else shape[0]) ** -0.5
        self.weights[name] = np.asarray(self.rng.standard_normal(shape) * scale, np.float32)
        return name

    def linear(self, x: str, inputs: int, outputs: int, op: str = "Gemm") -> str:
        return self.node(op, [x, self.weight(inputs, outputs)])

    def model(self, logits: str) -> ModelProto:
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [self.shape[0], CLASSES])],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mlp() -> tuple[Net, str]:
    net = Net("mlp", [32, 24])
    h = net.node("Relu", [net.linear("x", 24, 40)])
    h = net.node("Relu", [net.linear(h, 40, 32)])
    return net, net.linear(h, 32, CLASSES)


def convnet() -> tuple[Net, str]:
    net = Net("convnet", [6, 3, 8, 8])
    h = net.node("Relu", [net.node("Conv", ["x", net.weight(18, 3, 3, 3)], pads=[1, 1, 1, 1])])
    h = net.node("Relu", [net.node("Conv", [h, net.weight(20, 18, 3, 3)], strides=[2, 2])])
    h = net.node("Flatten", [net.node("GlobalAveragePool", [h])])
    return net, net.linear(h, 20, CLASSES)


def transformer() -> tuple[Net, str]:
    size = 36
    net = Net("transformer", [2, 20, size])
    net.weights["scale"] = np.float32(size**-0.5).reshape(())
    q, k, v = (net.linear("x", size, size, "MatMul") for _ in range(3))
    scores = net.node("Mul", [net.node("MatMul", [q, net.node("Transpose", [k], perm=[0, 2, 1])]), "scale"])
    h = net.node("MatMul", [net.node("Softmax", [scores], axis=-1), v])
    h = net.node("Add", ["x", net.linear(h, size, size, "MatMul")])
    h = net.node("Tanh", [net.linear(h, size, 48, "MatMul")])
    h = net.node("ReduceMean", [net.linear(h, 48, CLASSES, "MatMul")], axes=[1], keepdims=0)
    return net, h


def lstm() -> tuple[Net, str]:
    inputs, hidden = 24, 20
    net = Net("lstm", [18, 5, inputs])
    x = net.node("Transpose", ["x"], perm=[1, 0, 2])
    weights = [net.weight(1, 4 * hidden, inputs), net.weight(1, 4 * hidden, hidden)]
    net.nodes.append(helper.make_node("LSTM", [x, *weights], ["", "last"], hidden_size=hidden))
    net.weights["first"] = np.array([0])
    return net, net.linear(net.node("Squeeze", ["last", "first"]), hidden, CLASSES)


CASES = {"mlp": mlp, "convnet": convnet, "transformer": transformer, "lstm": lstm}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that makes the artifacts of a network once, and returns their folder."""
    folders: dict[str, Path] = {}

    def artifacts_of(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
            net, logits = CASES[case]()
            (folders[case] / "forward.onnx").write_bytes(net.model(logits).SerializeToString())
            artifacts.generate_artifacts(
                folders[case] / "forward.onnx",
                requires_grad=[name for name in net.weights if name.startswith("w")],
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=folders[case],
            )
        return folders[case]

    return artifacts_of


def batch(case: str, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels."""
    shape = CASES[case]()[0].shape
    rng = np.random.default_rng(step)
    return rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])


def train(folder: Path, steps: int = STEPS, **arguments: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Train a few steps and evaluate; returns the losses and the final parameters."""
    case = next(case for case in CASES if folder.name.startswith(case))
    run = Run(folder, **arguments)
    losses = []
    for step in range(steps):
        losses.append(run.module(*batch(case, step)))
        run.optimizer.step()
        run.module.lazy_reset_grad()
    run.module.eval()
    losses.append(run.module(*batch(case)))
    return losses, run.module.get_contiguous_parameters().numpy()


def largest_relative_distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return max(float(abs(a - b) / max(abs(b), 1e-6)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_near_float32(folder_of: Folder, case: str, precision: str) -> None:
    exact, parameters = train(folder_of(case))
    rounded, other = train(folder_of(case), precision=precision, bf16_fallback="emulated")
    assert largest_relative_distance(rounded, exact) < LOSSES[precision]
    assert not np.array_equal(parameters, other), "something was rounded"
    assert {loss.dtype for loss in rounded} == {np.dtype("float32")}
    assert other.dtype == np.float32


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_reference_computes_the_same(folder_of: Folder, case: str, precision: str) -> None:
    there, _ = train(folder_of(case), 2, precision=precision, bf16_fallback="emulated")
    reference, _ = train(folder_of(case), 2, device="reference", precision=precision)
    # If sums differ in the last bit, a few of the many factors may be rounded in the other direction.
    assert largest_relative_distance(there, reference) < LOSSES[precision] / 10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_are_the_same(folder_of: Folder, precision: str) -> None:
    for case in CASES:
        results = []
        for threads in (1, 2, 2):
            options = ortrain.SessionOptions()
            options.intra_op_num_threads = threads
            options.precision, options.bf16_fallback = precision, "emulated"
            losses, parameters = train(folder_of(case), 2, session_options=options)
            results.append((np.array(losses).tobytes(), parameters.tobytes()))
        assert results[0] == results[1] == results[2], case


def test_explicit_f32_equals_the_default(folder_of: Folder) -> None:
    """An explicit "f32" equals the default."""
    case = "convnet"
    plain = train(folder_of(case))
    said = train(folder_of(case), precision="f32", bf16_fallback="emulated")
    assert np.array_equal(plain[0], said[0])
    assert np.array_equal(plain[1], said[1])


def test_the_keyword_counts(folder_of: Folder) -> None:
    options = ortrain.SessionOptions()
    assert (options.precision, options.bf16_fallback) == ("f32", "none")
    options.precision, options.bf16_fallback = "bf16", "emulated"
    folder = folder_of("mlp")
    module = Run(folder, session_options=options).module
    assert module.precision == "bf16"
    assert module.bf16_unit in UNITS
    module = Run(folder, session_options=options, precision="bf16x6").module
    assert module.precision == "bf16x6"
    module = Run(folder, session_options=options, precision="f32").module
    assert (module.precision, module.bf16_unit) == ("f32", None)
    for precision in PRECISIONS:
        module = Run(folder, device="reference", precision=precision).module
        assert (module.precision, module.bf16_unit) == (precision, None)


def test_sessions_have_it(folder_of: Folder) -> None:
    folder = folder_of("mlp")
    options = ortrain.SessionOptions()
    options.precision, options.bf16_fallback = "bf16", "emulated"
    module = Run(folder, session_options=options).module
    loss = module(*batch("mlp"))
    assert loss != Run(folder).module(*batch("mlp"))
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with TrainingSession(state, folder / "training_model.onnx", session_options=options) as session:
        (other,) = session.train_step(list(batch("mlp")))
    assert loss == other


def product(a: np.ndarray, b: np.ndarray, device: str, precision: str) -> np.ndarray:
    """Compute a matrix product in an inference session."""
    options = ortrain.SessionOptions()
    options.precision, options.bf16_fallback = precision, "emulated"
    kind = helper.np_dtype_to_tensor_dtype(a.dtype)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["y"])],
        "product",
        [helper.make_tensor_value_info("a", kind, a.shape), helper.make_tensor_value_info("b", kind, b.shape)],
        [helper.make_tensor_value_info("y", kind, [len(a), b.shape[1]])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    provider = {"cpu": "CPUExecutionProvider"}.get(device, device)
    session = ortrain.InferenceSession(model, options, [provider])
    assert session.precision == precision
    (result,) = session.run(None, {"a": a, "b": b})
    assert result.dtype == a.dtype
    return np.asarray(result)


@pytest.mark.parametrize("device", DEVICES)
def test_how_exact_each_one_is(device: str) -> None:
    """Errors are below the figures of docs/performance.md."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((40, 1024), np.float32), rng.standard_normal((1024, 24), np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def error(precision: str) -> float:
        found = product(a, b, device, precision)
        return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))

    errors = {precision: error(precision) for precision in ("f32", *PRECISIONS)}
    assert errors["f32"] < 7e-7
    assert errors["bf16x6"] < 1.3e-6
    assert 3e-6 < errors["bf16x3"] < 6e-6
    assert 1.8e-3 < errors["bf16"] < 2.8e-3


@pytest.mark.parametrize("device", DEVICES)
def test_factors_become_the_nearest_bfloat16(device: str) -> None:
    """A product with ones returns the rounded factor. Ties are rounded to even."""
    factors = np.array(1 + np.arange(1, 41, 2) * 2.0**-9, np.float32)
    a, b = np.zeros((len(factors), 18), np.float32), np.zeros((18, 17), np.float32)
    a[:, 3], b[3] = factors, 1
    bits = factors.view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    assert not np.array_equal(nearest, factors)
    for precision, expected in {"bf16": nearest, "bf16x3": factors, "bf16x6": factors}.items():
        np.testing.assert_array_equal(product(a, b, device, precision), np.repeat(expected[:, None], 17, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_short_sides_stay_in_float32(device: str) -> None:
    rng = np.random.default_rng(4)
    for m, k, n in [(16, 40, 40), (40, 16, 40), (40, 40, 16), (1, 40, 40)]:
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        np.testing.assert_array_equal(product(a, b, device, "bf16"), product(a, b, device, "f32"))


@pytest.mark.parametrize("device", BACKENDS)
def test_precision_does_not_change_float64(device: str) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((25, 27)), rng.standard_normal((27, 23))
    np.testing.assert_allclose(product(a, b, device, "bf16"), a @ b, rtol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_else_is_rounded(device: str) -> None:
    """Sums, element-wise products and pooling have the bits of float32."""
    node = helper.make_node
    graph = helper.make_graph(
        [
            node("Mul", ["x", "x"], ["square"]),
            node("AveragePool", ["square"], ["pooled"], kernel_shape=[2, 2]),
            node("Softmax", ["pooled"], ["softmax"]),
            node("ReduceSum", ["softmax", "axes"], ["y"], keepdims=0),
        ],
        "others",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 5, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 5])],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.random.default_rng(3).standard_normal((2, 3, 5, 6), np.float32)
    results = []
    for precision in ("f32", "bf16"):
        options = ortrain.SessionOptions()
        options.precision, options.bf16_fallback = precision, "emulated"
        provider = {"cpu": "CPUExecutionProvider"}.get(device, device)
        results.append(ortrain.InferenceSession(model, options, [provider]).run(None, {"x": x})[0])
    np.testing.assert_array_equal(*results)


def test_profile_shows_the_precision(folder_of: Folder) -> None:
    run = Run(folder_of("convnet"), precision="bf16x3", bf16_fallback="emulated")
    profile = run.module.profile(*batch("convnet"), steps=1)
    rounded = [one for one in profile.instructions if one.shapes.endswith(" bf16x3")]
    # Two convolutions, the gradients of their filters, and the gradient of the hidden image. The classifier's batch is
    # short.
    assert [one.kind for one in rounded] == ["Conv"] * 5
    assert all(one.bound > 0 for one in rounded)
    assert f"inner products in bf16x3 by {run.module.bf16_unit}" in profile.table().splitlines()[0]
    assert "inner products" not in Run(folder_of("convnet")).module.profile(*batch("convnet"), steps=1).table()


NAMES = '"f32", "bf16", "bf16x3" and "bf16x6"'


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"precision": "fp16"}, f'unknown precision "fp16"; expected one of {NAMES}'),
        ({"precision": "BF16"}, f'unknown precision "BF16"; expected one of {NAMES}'),
        ({"precision": ""}, f'unknown precision ""; expected one of {NAMES}'),
        (
            {"precision": "bf16", "bf16_fallback": "avx2"},
            'unknown bf16_fallback "avx2"; expected one of "none", "avx512_bf16" and "emulated"',
        ),
    ],
)
def test_names(folder_of: Folder, arguments: dict[str, str], sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as caught:
        Run(folder_of("mlp"), **arguments)
    assert str(caught.value) == sentence
    options = ortrain.SessionOptions()
    for name, value in arguments.items():
        setattr(options, name, value)
    with pytest.raises(ortrain.InvalidArgumentError) as caught:
        ortrain.InferenceSession(folder_of("mlp") / "forward.onnx", options)
    assert str(caught.value) == sentence


EMULATED = 'bf16_fallback="emulated" computes the same in float32 arithmetic, slower than "f32"'
# Error messages on a machine without AMX, by the unit of the machine and the allowed fallback.
SENTENCES = {
    ("emulated", "none"): f"needs AMX, which this machine does not have, nor AVX512-BF16; {EMULATED}",
    ("emulated", "avx512_bf16"): f"needs AMX or AVX512-BF16, and this machine has neither; {EMULATED}",
    ("avx512_bf16", "none"): (
        'needs AMX, which this machine does not have; bf16_fallback="avx512_bf16" uses AVX512-BF16, which it has'
    ),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fallback", ["none", "avx512_bf16"])
def test_nothing_is_used_without_being_allowed(folder_of: Folder, precision: str, fallback: str) -> None:
    folder = folder_of("mlp")
    has = Run(folder, precision=precision, bf16_fallback="emulated").module.bf16_unit
    allowed = {"amx"} if fallback == "none" else {"amx", "avx512_bf16"}
    options = ortrain.SessionOptions()
    options.precision, options.bf16_fallback = precision, fallback
    if has in allowed:
        assert Run(folder, session_options=options).module.bf16_unit == has
        return
    sentence = f'precision "{precision}" {SENTENCES[has, fallback]}'
    with pytest.raises(ortrain.UnsupportedError) as caught:
        Run(folder, session_options=options)
    assert str(caught.value) == sentence
    with pytest.raises(NotImplementedError) as caught:
        ortrain.InferenceSession(folder_of("mlp") / "forward.onnx", options)
    assert str(caught.value) == sentence
    # The reference device computes in this precision on every machine.
    assert Run(folder, session_options=options, device="reference").module.precision == precision


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux reports the processor's units")
def test_the_best_unit_is_used(folder_of: Folder) -> None:
    """The fastest unit of the machine is used."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    unit = Run(folder_of("mlp"), precision="bf16", bf16_fallback="emulated").module.bf16_unit
    if unit == "amx":
        assert {"amx_tile", "amx_bf16"} <= flags
    if unit == "avx512_bf16":
        assert "avx512_bf16" in flags
    if unit == "emulated":
        assert "avx512_bf16" not in flags
