"""Low-rank adapters: equality with PEFT's recorded trainings and with formulas, merges, files, and errors."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from recorded_adapters import CASES, check_training, outputs

import ortrain
from ortrain import InvalidArgumentError, artifacts, lora
from ortrain.api import CheckpointState, Module, Optimizer

DATA = Path(__file__).parent / "data" / "peft"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
PERCEPTRON = ortrain.examples.perceptron()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, which are float32."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "F32"
        found[name] = np.frombuffer(content[first:last], np.float32).reshape(entry["shape"])
    return found


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        kind = {"f": "F", "i": "I"}[array.dtype.kind] + str(8 * array.itemsize)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_peft(case: str, tmp_path: Path) -> None:
    """Losses and outputs equal PEFT's; the saved file has PEFT's names and PEFT's numbers."""
    check_training(DATA / case, tmp_path)
    ours = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = read_safetensors(DATA / case / "trained" / "adapter_model.safetensors")
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_exchange_with_peft(case: str, tmp_path: Path) -> None:
    """A file of PEFT is loaded and saved again with the same bits, ranks and scales."""
    model = lora.load_adapter(DATA / case / "model.onnx", DATA / case / "initial")
    lora.save_adapter(model, tmp_path)
    ours, theirs = (
        read_safetensors(path / "adapter_model.safetensors") for path in (tmp_path, DATA / case / "initial")
    )
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: array.tobytes() for name, array in theirs.items()
    }
    again = lora.load_adapter(DATA / case / "model.onnx", tmp_path)
    assert again == model


# Models with one layer of each form.


def model_of(
    nodes: list[Any], weights: dict[str, np.ndarray], x: tuple[int, list[Any]], y: list[Any], *, opset: int = 17
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", *x)],
        [helper.make_tensor_value_info("y", FLOAT, y)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def node(op: str, inputs: list[str], output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs, [output], f"the {op}", **attributes)


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def constant(value: np.ndarray, output: str) -> Any:
    return helper.make_node("Constant", [], [output], value=numpy_helper.from_array(value))


ROWS = (FLOAT, ["N", 6])
IMAGES = (FLOAT, ["N", 4, 5, 6])
LAYERS: dict[str, tuple[ModelProto, str]] = {
    "MatMul": (model_of([node("MatMul", ["x", "w"])], {"w": random(6, 5)}, ROWS, ["N", 5]), "linear"),
    "sequence": (
        model_of([node("MatMul", ["x", "w"])], {"w": random(6, 5)}, (FLOAT, ["N", 3, 6]), ["N", 3, 5]),
        "linear",
    ),
    "Gemm": (
        model_of([node("Gemm", ["x", "w", "b"])], {"w": random(6, 5), "b": random(5)}, ROWS, ["N", 5]),
        "linear",
    ),
    "Gemm, transposed": (
        model_of([node("Gemm", ["x", "w"], transB=1)], {"w": random(5, 6)}, ROWS, ["N", 5]),
        "linear",
    ),
    "FusedMatMul": (
        model_of(
            [node("FusedMatMul", ["x", "w"], domain="com.microsoft", transB=1)], {"w": random(5, 6)}, ROWS, ["N", 5]
        ),
        "linear",
    ),
    "behind Transpose": (
        model_of(
            [node("Transpose", ["w"], "t"), node("MatMul", ["x", "t"])], {"w": random(5, 6)}, ROWS, ["N", 5], opset=9
        ),
        "linear",
    ),
    "behind Reshape and Transpose": (
        model_of(
            [
                node("Reshape", ["w", "s"], "r"),
                node("Transpose", ["r"], "t", perm=[1, 0]),
                node("MatMul", ["x", "t"]),
            ],
            {"w": random(5, 2, 3), "s": np.array([5, 6])},
            ROWS,
            ["N", 5],
        ),
        "linear",
    ),
    "behind Cast": (
        model_of(
            [node("Cast", ["w"], "c", to=FLOAT), node("MatMul", ["x", "c"])],
            {"w": random(6, 5, dtype=np.float16)},
            ROWS,
            ["N", 5],
        ),
        "linear",
    ),
    "Constant": (
        model_of([constant(random(6, 5), "w"), node("MatMul", ["x", "w"])], {}, ROWS, ["N", 5]),
        "linear",
    ),
    "Conv": (
        model_of(
            [node("Conv", ["x", "w", "b"], pads=[1, 0, 1, 0], strides=[1, 2], dilations=[2, 1])],
            {"w": random(3, 4, 3, 2), "b": random(3)},
            IMAGES,
            ["N", 3, "H", "W"],
        ),
        "convolution",
    ),
    "Gather": (
        model_of([node("Gather", ["w", "x"])], {"w": random(7, 5)}, (INT64, ["N", 3]), ["N", 3, 5]),
        "embedding",
    ),
}


def batch_for(model: ModelProto) -> np.ndarray:
    value = model.graph.input[0].type.tensor_type
    dims = [dim.dim_value or 4 for dim in value.shape.dim]
    return random(*dims) if value.elem_type == FLOAT else np.random.default_rng(0).integers(0, 7, dims)


def with_random_factors(model: ModelProto) -> ModelProto:
    """Return a model with adapters that have an effect."""
    found = ModelProto.FromString(model.SerializeToString())
    for entry in found.graph.initializer:
        if any(part in entry.name for part in (".lora_A.", ".lora_B.", ".lora_magnitude.")):
            rng = np.random.default_rng(zlib.crc32(entry.name.encode()))
            drawn = rng.standard_normal(tuple(entry.dims)).astype(np.float32)
            entry.CopyFrom(numpy_helper.from_array(drawn, entry.name))
    return found


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    return outputs(model.SerializeToString(), x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """A new adapter changes nothing; a merged one computes the same as before; a removed one gives the base."""
    base, kind = LAYERS[name]
    x = batch_for(base)
    adapted, description = lora.add(base, rank=2, alpha=3, targets="*")
    (layer,) = description.layers
    assert (layer.kind, layer.weight, layer.rank, layer.adapter) == (kind, "w", 2, "default")
    assert description == lora.adapters(adapted)
    onnx.checker.check_model(adapted)
    before = run(base, x)
    assert (run(adapted, x) == before).all()
    changed = with_random_factors(adapted)
    expected = run(changed, x)
    assert np.abs(expected - before).max() > 0.1
    merged = lora.merge(changed)
    assert sorted(each.op_type for each in merged.graph.node if each.op_type != "Constant") == sorted(
        each.op_type for each in base.graph.node if each.op_type != "Constant"
    )
    tolerance = 2e-3 if name == "behind Cast" else 1e-6
    np.testing.assert_allclose(run(merged, x), expected, rtol=0, atol=tolerance * np.abs(expected).max())
    restored = lora.remove(changed)
    assert (run(restored, x) == before).all()
    assert len(restored.graph.initializer) == len(base.graph.initializer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_magnitudes(name: str) -> None:
    """DoRA: a new adapter changes nothing but rounding; a merged one computes the same, and a removed one the base."""
    base, _ = LAYERS[name]
    x = batch_for(base)
    before = run(base, x)
    adapted, description = lora.add(base, rank=2, alpha=3, targets="*", use_dora=True)
    assert lora.adapters(adapted) == description
    plain, _ = lora.add(base, rank=2, targets="*")
    assert description.parameters == lora.adapters(plain).parameters + description.layers[0].outputs
    onnx.checker.check_model(adapted)
    tolerance = 2e-3 if name == "behind Cast" else 2e-6
    np.testing.assert_allclose(run(adapted, x), before, rtol=0, atol=tolerance * np.abs(before).max())
    changed = with_random_factors(adapted)
    expected = run(changed, x)
    assert np.abs(expected - before).max() > 0.1
    merged = run(lora.merge(changed), x)
    np.testing.assert_allclose(merged, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    restored = lora.remove(changed)
    assert (run(restored, x) == before).all()
    assert len(restored.graph.initializer) == len(base.graph.initializer)
    with pytest.raises(InvalidArgumentError, match=r"has magnitudes .* no weight other than 1, got 0\.5"):
        lora.merge(changed, {"default": 0.5})
    with pytest.raises(InvalidArgumentError, match="must be the only one of its layer; merge or remove the other"):
        lora.add(adapted, rank=2, targets="*", name="second")
    with pytest.raises(InvalidArgumentError, match="must be the only one of its layer; merge or remove the other"):
        lora.add(plain, rank=2, targets="*", name="second", use_dora=True)


def packed(bits: int = 4, block: int = 16) -> tuple[ModelProto, np.ndarray]:
    """Return a product with packed weights, and its weights ``[K, N]`` as floats."""
    rng = np.random.default_rng(bits)
    k, n = 32, 6
    integers = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.random((n, k // block)).astype(np.float32)
    pairs = integers.reshape(n, k // block, block // 2, 2)
    model = model_of(
        [node("MatMulNBits", ["x", "w_Q4", "s"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block)],
        {"w_Q4": pairs[..., 0] | (pairs[..., 1] << 4), "s": scales},
        (FLOAT, ["N", k]),
        ["N", n],
    )
    return model, ((integers.astype(np.float32) - 8) * np.repeat(scales, block, axis=1)).T


def test_packed_weights(tmp_path: Path) -> None:
    """QLoRA: losses and factors equal a model with the same weights as floats; the integers stay."""
    model, weights = packed()
    floats = model_of([node("MatMul", ["x", "w"])], {"w": np.ascontiguousarray(weights)}, (FLOAT, ["N", 32]), ["N", 6])
    x, target = random(8, 32), random(8, 6)
    results = []
    for name, base in (("packed", model), ("floats", floats)):
        adapted, description = lora.add(base, rank=2, targets="*")
        assert (description.layers[0].inputs, description.layers[0].outputs) == (32, 6)
        (tmp_path / name).mkdir()
        state, module, optimizer = trained(adapted, tmp_path / name, artifacts.OptimType.AdamW)
        losses = []
        for _ in range(5):
            losses.append(module(x, target))
            optimizer.step()
            module.lazy_reset_grad()
        assert len(list(state.parameters)) == 2
        module.export_model_for_inferencing(tmp_path / f"{name}.onnx", ["y"])
        results.append([losses, *(parameter.data for _, parameter in state.parameters)])
    for ours, reference in zip(*results, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)
    kept = {entry.name: entry for entry in onnx.load(tmp_path / "packed.onnx").graph.initializer}["w_Q4"]
    assert kept.raw_data == next(entry for entry in model.graph.initializer if entry.name == "w_Q4").raw_data
    # A float base reads the adapter of the packed one: the suffix of the quantizer is no part of the module.
    lora.save_adapter(tmp_path / "packed.onnx", tmp_path / "adapter")
    moved = lora.load_adapter(floats, tmp_path / "adapter", check_base=False)
    expected = outputs(tmp_path / "packed.onnx", x)
    np.testing.assert_allclose(run(moved, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(InvalidArgumentError, match=r"use_dora is not supported for .* its weight consists of integers"):
        lora.add(model, rank=2, targets="*", use_dora=True)


def test_dequantized_weights_stay_integers(tmp_path: Path) -> None:
    """An adapter beside a weight of int8 is trained alone; the weight becomes no float."""
    base = model_of(
        [node("DequantizeLinear", ["w", "s"], "f"), node("MatMul", ["x", "f"])],
        {"w": np.arange(30, dtype=np.int8).reshape(6, 5), "s": np.array(0.1, np.float32)},
        ROWS,
        ["N", 5],
    )
    adapted = with_random_factors(lora.add(base, rank=2, targets="*")[0])
    state, module, optimizer = trained(adapted, tmp_path, artifacts.OptimType.SGD)
    assert [name for name, _ in state.parameters] == ["w.lora_A.default", "w.lora_B.default"]
    module(random(4, 6), random(4, 5))
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["y"])
    exported = {entry.name: entry for entry in onnx.load(tmp_path / "exported.onnx").graph.initializer}
    assert (numpy_helper.to_array(exported["w"]) == np.arange(30).reshape(6, 5)).all()


def test_groups_of_a_convolution() -> None:
    """The second factor has the groups, as in PEFT, so that the rank is a multiple of them."""
    base = model_of([node("Conv", ["x", "w"], group=2)], {"w": random(6, 2, 3, 3)}, IMAGES, ["N", 6, "H", "W"])
    adapted, _ = lora.add(base, rank=4, targets="*")
    shapes = {entry.name: list(entry.dims) for entry in adapted.graph.initializer}
    assert shapes["w.lora_A.default"] == [4, 4, 3, 3]
    assert shapes["w.lora_B.default"] == [6, 2, 1, 1]
    with pytest.raises(InvalidArgumentError, match="multiple of the 2 groups"):
        lora.add(base, rank=3, targets="*")


def trained(
    model: ModelProto, folder: Path, optimizer: artifacts.OptimType
) -> tuple[CheckpointState, Module, Optimizer]:
    artifacts.generate_artifacts(model, loss=artifacts.LossType.MSELoss, optimizer=optimizer, artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_step_by_the_formula(tmp_path: Path) -> None:
    """Loss and update of both factors equal the formula in float64; the base stays as it is."""
    base, _ = LAYERS["MatMul"]
    adapted = with_random_factors(lora.add(base, rank=2, alpha=3, targets="w")[0])
    state, module, optimizer = trained(adapted, tmp_path, artifacts.OptimType.SGD)
    optimizer.set_learning_rate(0.5)
    assert [name for name, _ in state.parameters] == ["w.lora_A.default", "w.lora_B.default"]
    x, target = batch_for(base), random(4, 5)
    a, b = (state.parameters[f"w.lora_{factor}.default"].data.astype(np.float64) for factor in "AB")
    y = x @ (numpy_helper.to_array(base.graph.initializer[0]) + 1.5 * (b @ a).T)
    loss = module(x, target)
    np.testing.assert_allclose(loss, ((y - target) ** 2).mean(), rtol=1e-6)
    optimizer.step()
    of_product = 1.5 * (2 * (y - target) / y.size).T @ x
    np.testing.assert_allclose(state.parameters["w.lora_A.default"].data, a - 0.5 * b.T @ of_product, atol=1e-6)
    np.testing.assert_allclose(state.parameters["w.lora_B.default"].data, b - 0.5 * of_product @ a.T, atol=1e-6)
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["y"])
    exported = {entry.name: entry for entry in onnx.load(tmp_path / "exported.onnx").graph.initializer}
    assert numpy_helper.to_array(exported["w"]).tobytes() == random(6, 5).tobytes()


def test_base_is_frozen(tmp_path: Path) -> None:
    """A checkpoint has the adapters alone, with the parameters of `train_also`."""
    adapted, description = lora.add(PERCEPTRON, rank=2, targets="fc1", train_also="fc2.b*")
    report = ortrain.inspect(adapted)
    names = ["fc1.weight.lora_A.default", "fc1.weight.lora_B.default", "fc2.bias"]
    assert sorted(info.name for info in report.parameters if info.role == "trained") == names
    reasons = {info.name: info.reason for info in report.parameters}
    assert reasons["fc1.weight"] == "it belongs to the base of the adapters of the model, which is frozen"
    state, module, optimizer = trained(adapted, tmp_path, artifacts.OptimType.AdamW)
    assert [name for name, _ in state.parameters] == names
    x = random(4, 64)
    module(x, random(4, 10))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    assert description.bytes == 4 * description.parameters == 4 * (2 * 64 + 96 * 2)
    assert (tmp_path / "saved").stat().st_size < 4 * description.bytes + 4096
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["logits"])
    base = lora.remove(tmp_path / "exported.onnx")
    assert [info.name for info in ortrain.inspect(base).parameters if info.role == "trained"] == [
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    ]


def test_initial_values() -> None:
    """Distributions of PEFT, and other numbers for each layer and each seed."""
    base = model_of(
        [node("MatMul", ["x", "v"], "h"), node("MatMul", ["h", "w"])],
        {"v": random(64, 64), "w": random(64, 64)},
        (FLOAT, ["N", 64]),
        ["N", 64],
    )

    def factors(**options: Any) -> dict[str, np.ndarray]:
        model, _ = lora.add(base, rank=32, targets="*", **options)
        return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer if "lora" in entry.name}

    kaiming, gaussian = factors(), factors(init="gaussian", alpha=8, use_rslora=True)
    a = kaiming["v.lora_A.default"]
    assert 0.99 / 8 < np.abs(a).max() <= 1 / 8
    np.testing.assert_allclose([a.mean(), a.std()], [0, 1 / 8 / np.sqrt(3)], atol=0.004)
    a = gaussian["v.lora_A.default"]
    np.testing.assert_allclose([a.mean(), a.std()], [0, 1 / 32], atol=0.002)
    assert gaussian["v.lora_scale.default"] == np.float32(8 / np.sqrt(32))
    assert kaiming["v.lora_scale.default"] == 1
    assert not kaiming["v.lora_B.default"].any()
    assert (kaiming["w.lora_A.default"] != kaiming["v.lora_A.default"]).mean() > 0.9
    assert (factors(seed=1)["v.lora_A.default"] != kaiming["v.lora_A.default"]).mean() > 0.9
    assert (factors()["v.lora_A.default"] == kaiming["v.lora_A.default"]).all()


def test_dropout(tmp_path: Path) -> None:
    """A training step drops inputs of the adapter alone; evaluation and export drop none, and rates are unbiased."""
    base = model_of([node("MatMul", ["x", "w"])], {"w": random(256, 1)}, (FLOAT, ["N", 256]), ["N", 1])
    plain = with_random_factors(lora.add(base, rank=1, targets="w")[0])
    model = with_random_factors(lora.add(base, rank=1, targets="w", dropout=0.25)[0])
    x = np.ones((64, 256), np.float32)
    assert (run(model, x) == run(plain, x)).all()
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        additional_output_names=["y", "y/lora.default/base", "y/lora.default/input"],
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    target = np.zeros((64, 1), np.float32)
    _, _, of_base, dropped = module(x, target)
    np.testing.assert_allclose(of_base, run(base, x), rtol=1e-6)
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((dropped == 0).mean() - 0.25) < 0.02
    module.eval()
    _, y, _, kept = module(x, target)
    assert (kept == 1).all()
    np.testing.assert_allclose(y, run(plain, x), rtol=1e-5)
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["y"])
    np.testing.assert_allclose(outputs(tmp_path / "exported.onnx", x), run(plain, x), rtol=1e-5)
    assert lora.adapters(tmp_path / "exported.onnx").layers[0].rank == 1


def test_several_adapters() -> None:
    """Adapters are added to each other, removed alone, and merged with factors."""
    x = random(4, 64)
    both, _ = lora.add(PERCEPTRON, rank=2, name="style")
    both, _ = lora.add(both, rank=3, targets=["fc1", "fc2"], name="facts")
    both = with_random_factors(both)
    description = lora.adapters(both)
    assert {(layer.adapter, layer.weight, layer.rank) for layer in description.layers} == {
        ("style", "fc1.weight", 2),
        ("facts", "fc1.weight", 3),
        ("facts", "fc2.weight", 3),
    }
    assert str(description).startswith("adapter  weight      kind")
    base = outputs(PERCEPTRON, x)
    for order in (["style", "facts"], ["facts", "style"]):
        model = both
        for name in order:
            model = lora.remove(model, name)
        assert (run(model, x) == base).all()
        assert [entry.name for entry in model.graph.initializer] == [
            entry.name for entry in onnx.load(PERCEPTRON).graph.initializer
        ]
    expected = run(both, x)
    steps = lora.merge(lora.merge(both, "style"), ["facts"])
    for merged in (lora.merge(both), steps):
        np.testing.assert_allclose(run(merged, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    weights = {entry.name: numpy_helper.to_array(entry).astype(np.float64) for entry in both.graph.initializer}
    blended = lora.merge(both, {"style": 0.7, "facts": 0.3})
    change = sum(
        factor * (weights[f"fc1.weight.lora_B.{name}"] @ weights[f"fc1.weight.lora_A.{name}"])
        for name, factor in (("style", 0.7), ("facts", 0.3))
    )
    (found,) = (numpy_helper.to_array(entry) for entry in blended.graph.initializer if entry.name == "fc1.weight")
    np.testing.assert_allclose(found, weights["fc1.weight"] + change, rtol=1e-6, atol=1e-6)


def test_shared_weights() -> None:
    """Layers that share a weight share its adapter; a reader without the adapter prevents a merge."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "second"),
    ]
    base = model_of(nodes, {"w": random(6, 6)}, ROWS, ["N", 6])
    x = random(4, 6)
    adapted, description = lora.add(base, rank=2, targets="w")
    assert [layer.node for layer in description.layers] == ["first", "second"]
    assert description.parameters == 24
    changed = with_random_factors(adapted)
    expected = run(changed, x)
    np.testing.assert_allclose(run(lora.merge(changed), x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(InvalidArgumentError) as caught:
        lora.merge(lora.add(base, rank=2, targets="first")[0])
    assert str(caught.value) == (
        'the weight "w" is also read for "y", which has no adapter, so the adapter cannot be merged into it'
    )
    tied = model_of(
        [node("Gather", ["w", "x"], "h"), node("Transpose", ["w"], "t"), node("MatMul", ["h", "t"])],
        {"w": random(7, 5)},
        (INT64, ["N", 3]),
        ["N", 3, 7],
    )
    with pytest.raises(InvalidArgumentError, match='read the weight "w" in different forms'):
        lora.add(tied, rank=2, targets="w")
    alone, _ = lora.add(tied, rank=2, targets="*", exclude="the MatMul")
    assert [layer.kind for layer in lora.adapters(alone).layers] == ["embedding"]


def test_the_last_layer_is_excluded() -> None:
    nodes = [
        node("Transpose", ["v"], "s"),
        node("MatMul", ["x", "s"], "h"),
        node("Transpose", ["w"], "t"),
        helper.make_node("MatMul", ["h", "t"], ["y"], "head"),
    ]
    base = model_of(nodes, {"v": random(5, 6), "w": random(7, 5)}, ROWS, ["N", 7])
    assert [layer.weight for layer in lora.inspect(base, rank=1).layers] == ["v"]
    with_adapters, _ = lora.add(base, rank=1, targets="*")
    _, description = lora.add(with_adapters, rank=1, name="second")
    assert [layer.weight for layer in description.layers] == ["v"]


def test_model_with_adapter(tmp_path: Path) -> None:
    """`Model` trains adapters, and a new head beside them; its export can be merged."""
    x, labels = random(32, 64), np.arange(32) % 4
    model = ortrain.Model(PERCEPTRON, classes=4, lora=2, learning_rate=0.01)
    history = model.fit(x, labels, epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    assert [name for name, _ in model.state.parameters] == [
        "fc1.weight.lora_A.default",
        "fc1.weight.lora_B.default",
        "fc2.bias",
        "fc2.weight",
    ]
    model.export(tmp_path / "adapted.onnx")
    expected = model.predict(x)
    merged = lora.merge(tmp_path / "adapted.onnx")
    np.testing.assert_allclose(run(merged, x), expected, rtol=0, atol=1e-5)
    model.save(tmp_path / "saved")
    assert (ortrain.Model(tmp_path / "saved").predict(x) == expected).all()
    other = ortrain.Model(PERCEPTRON, lora={"rank": 3, "targets": ["fc2"], "name": "style"}, loss="mse")
    assert [name for name, _ in other.state.parameters] == ["fc2.weight.lora_A.style", "fc2.weight.lora_B.style"]
    with pytest.raises(InvalidArgumentError, match="lora has no setting 'ranks'; did you mean 'rank'"):
        ortrain.Model(PERCEPTRON, lora={"ranks": 3})


def test_output_is_a_file(tmp_path: Path) -> None:
    none, description = lora.add(PERCEPTRON, output=tmp_path / "adapted.onnx")
    assert none is None
    assert lora.adapters(tmp_path / "adapted.onnx") == description
    lora.save_adapter(tmp_path / "adapted.onnx", tmp_path / "adapter")
    lora.load_adapter(PERCEPTRON, tmp_path / "adapter", output=tmp_path / "loaded.onnx")
    lora.merge(tmp_path / "loaded.onnx", output=tmp_path / "merged.onnx")
    lora.remove(tmp_path / "loaded.onnx", output=tmp_path / "base.onnx")
    x = random(4, 64)
    assert (outputs(tmp_path / "base.onnx", x) == outputs(PERCEPTRON, x)).all()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"rank": 0}, "the rank of an adapter must be at least 1, got 0"),
    "negative rank": ({"rank": -1}, "the rank of an adapter must be at least 1, got -1"),
    "negative seed": ({"seed": -1}, "the seed of an adapter must be from 0 to 2**64 - 1, got -1"),
    "large alpha": ({"alpha": 1e300}, f"alpha must be a finite float32, got 1{'0' * 300}"),
    "large rank": (
        {"rank": 11, "targets": "fc2"},
        'the rank must be from 1 to 10 for the weight "fc2.weight" of node "fc2" (Gemm), got 11; choose a smaller '
        "rank, or exclude the weight",
    ),
    "unknown target": (
        {"targets": ["fc1", "fc3.weight"]},
        'targets names "fc3.weight", but the model has no layer with such a weight or node; did you mean "fc1.weight"?',
    ),
    "unknown exclusion": (
        {"exclude": "fcl"},
        'exclude names "fcl", but the model has no layer with such a weight or node; did you mean "fc1"?',
    ),
    "nothing left": (
        {"exclude": "*"},
        'no layer of the model gets an adapter; name some of its weights as targets, such as "fc1.weight", '
        '"fc2.weight"',
    ),
    "unknown parameter": (
        {"train_also": "fc1.bia"},
        'train_also names "fc1.bia", but the model has no such constant of floats; did you mean "fc1.bias"?',
    ),
    "dropout": ({"dropout": 1.0}, "dropout must be from 0 to less than 1, got 1"),
    "alpha": ({"alpha": float("nan")}, "alpha must be a finite float32, got NaN"),
    "init": ({"init": "zeros"}, 'there is no init "zeros"'),
    "DoRA with dropout": (
        {"use_dora": True, "dropout": 0.1},
        "use_dora with dropout is not supported; choose one of both",
    ),
    "name": (
        {"name": "a.b"},
        'the name of an adapter consists of letters, digits, "_" and "-", got "a.b"',
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name: str) -> None:
    options, message = OPTIONS[name]
    with pytest.raises(InvalidArgumentError) as caught:
        lora.add(onnx.load(PERCEPTRON), **options)
    assert str(caught.value) == message


def test_other_bad_inputs() -> None:
    adapted, _ = lora.add(PERCEPTRON)
    with pytest.raises(InvalidArgumentError, match='has an adapter "default" already; give the new adapter another'):
        lora.add(adapted)
    for call in (lora.remove, lora.merge):
        with pytest.raises(InvalidArgumentError, match='has no adapter "style"; its adapters: "default"'):
            call(adapted, "style")
    with pytest.raises(TypeError, match="targets must be a name, a pattern or a list of them"):
        lora.add(PERCEPTRON, targets=[1])  # type: ignore[list-item]
    integers = model_of(
        [node("MatMulInteger", ["x", "w"], "i"), node("Cast", ["i"], to=FLOAT)],
        {"w": np.ones((6, 5), np.int8)},
        (TensorProto.INT8, ["N", 6]),
        ["N", 5],
    )
    with pytest.raises(InvalidArgumentError, match="no layer of the model gets an adapter; it has no layers with"):
        lora.add(integers)
    old = model_of([node("MatMul", ["x", "w"])], {"w": random(6, 5)}, ROWS, ["N", 5], opset=9)
    with pytest.raises(InvalidArgumentError, match="dropout needs opset 12, and the model has opset 9"):
        lora.add(old, rank=2, targets="w", dropout=0.5)


def damaged(folder: Path, name: str) -> str:
    """Damage an adapter in a folder, and return a part of the message."""
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, fields = read_safetensors(weights), json.loads(config.read_text())
    a, b = sorted(tensors)[:2]
    message = ""
    match name:
        case "pickle":
            weights.rename(folder / "adapter_model.bin")
            message = "has its weights in adapter_model.bin, a pickle that could run any code"
        case "not a number":
            tensors[a] = tensors[a] * np.float32("nan")
            message = 'the adapter of "fc1" has numbers that are not finite'
        case "integers":
            tensors[a] = tensors[a].astype(np.int32)
            message = 'the adapter of "fc1" has numbers that are not finite'
        case "other base":
            tensors[a] = random(2, 7)
            message = (
                'the adapter of "fc1" has factors of the shapes [2, 7] and [8, 2], but the weight "fc1.weight" needs '
                "[2, 6] and [8, 2]: it belongs to another base"
            )
        case "other module":
            tensors = {key.replace("fc1", "fc9"): array for key, array in tensors.items()}
            message = 'the adapter has the module "fc9", but'
        case "one factor":
            del tensors[b]
            message = 'the adapter of "fc1" has only one of its two factors'
        case "other tensor":
            tensors["base_model.model.fc1.lora_magnitude_vector"] = random(8)
            message = '"base_model.model.fc1.lora_magnitude_vector" is no factor of an adapter'
        case "no magnitudes":
            fields["use_dora"] = True
            message = 'the adapter of "fc1" has no magnitudes, though use_dora is true'
        case "other magnitudes":
            fields["use_dora"] = True
            tensors |= {f"base_model.model.fc{k}.lora_magnitude_vector": random(9) for k in (1, 2)}
            message = 'has magnitudes of the shape [9], but the weight "fc1.weight" needs [8]'
        case "lone magnitudes":
            fields["use_dora"] = True
            tensors |= {f"base_model.model.fc{k}.lora_magnitude_vector": random(8) for k in (1, 2, 3)}
            message = 'the adapter of "fc3" has magnitudes, but no factors'
        case "empty":
            tensors = {}
            message = "has no factors of adapters"
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-4])
            message = "adapter_model.safetensors"
        case "unknown field":
            fields["use_magic"] = True
            message = "use_magic = true is not supported; supported are LoRA, rsLoRA and DoRA"
        case "other type":
            fields["peft_type"] = "LOHA"
            message = 'the adapter has the type "LOHA", and only "LORA" can be loaded'
        case "changed base":
            fields["init_lora_weights"] = "pissa_niter_4"
            message = "the weights of the base were changed for init_lora_weights"
        case "bias":
            fields["bias"] = "some"
            message = 'bias = "some" is not supported'
        case "expression":
            fields["alpha_pattern"] = {"^fc1$": 4}
            message = "alpha_pattern must have numbers by the names of modules"
        case "no alpha":
            del fields["lora_alpha"]
            message = "lora_alpha must be a number"
        case "no JSON":
            message = "it is no JSON"
    if weights.exists() and name != "cut short":
        write_safetensors(weights, tensors)
    config.write_text("{" if name == "no JSON" else json.dumps(fields))
    return message


@pytest.mark.parametrize(
    "name",
    [
        "pickle",
        "not a number",
        "integers",
        "other base",
        "other module",
        "one factor",
        "other tensor",
        "no magnitudes",
        "other magnitudes",
        "lone magnitudes",
        "empty",
        "cut short",
        "unknown field",
        "other type",
        "changed base",
        "bias",
        "expression",
        "no alpha",
        "no JSON",
    ],
)
def test_damaged_adapters(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(DATA / "perceptron" / "initial", folder)
    message = damaged(folder, name)
    with pytest.raises(ortrain.OrtrainError) as caught:
        lora.load_adapter(DATA / "perceptron" / "model.onnx", folder)
    assert message in str(caught.value)


def test_table_of_modules(tmp_path: Path) -> None:
    """Weights with other names than PyTorch's modules are found by a table."""
    base, _ = LAYERS["MatMul"]
    adapted = with_random_factors(lora.add(base, rank=2, targets="w")[0])
    lora.save_adapter(adapted, tmp_path, modules={"w": "encoder.q"})
    (name, _) = sorted(read_safetensors(tmp_path / "adapter_model.safetensors"))
    assert name == "base_model.model.encoder.q.lora_A.weight"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["encoder.q"]
    with pytest.raises(InvalidArgumentError, match=r'has the module "encoder\.q"'):
        lora.load_adapter(base, tmp_path)
    assert lora.load_adapter(base, tmp_path, modules={"w": "encoder.q"}) == adapted
    with pytest.raises(InvalidArgumentError, match='no layer with the weight "v"'):
        lora.load_adapter(base, tmp_path, modules={"v": "encoder.q"})


def test_adapters_of_bert_base_are_small() -> None:
    """Adapters of queries and values have less than 1.3 MB, which is the message of a federated client."""
    layers, size = 12, 768
    names = [f"layer.{at}.{kind}" for at in range(layers) for kind in ("query", "key", "value")]
    weights = {f"{name}.weight": np.zeros((size, size), np.float32) for name in names}
    nodes = [helper.make_node("MatMul", ["x", f"{name}.weight"], [name]) for name in names]
    nodes.append(helper.make_node("Sum", names, ["y"]))
    model = model_of(nodes, weights, (FLOAT, ["batch", size]), ["batch", size])
    found = lora.inspect(model, rank=8, targets=["query", "value"])
    assert len(found.layers) == 2 * layers
    assert found.bytes == 1_179_648
