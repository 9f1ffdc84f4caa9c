"""Initial values of adapters from the weight (PiSSA, OLoRA), against NumPy in float64, and biases beside adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from test_lora import (
    FLOAT,
    LAYERS,
    PERCEPTRON,
    ROWS,
    batch_for,
    model_of,
    node,
    packed,
    random,
    read_safetensors,
    run,
    trained,
    with_random_factors,
    write_safetensors,
)

import ortrain
from ortrain import InvalidArgumentError, artifacts, lora

FACTOR_TOLERANCE = 1e-6
"""Error of factors and of the rest of a weight, relative to the largest number of the weight: float32."""
OUTPUT_TOLERANCE = 3e-6
"""Error of outputs, relative to the largest: the products of the rest and of the factors are rounded apart."""


def constants(model: ModelProto) -> dict[str, np.ndarray]:
    """Return the initializers of floats in float64."""
    return {entry.name: numpy_helper.to_array(entry).astype(np.float64) for entry in model.graph.initializer}


def principal(weight: np.ndarray, rank: int, scale: float, init: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of PEFT in float64. The signs of PiSSA's factors are free, and their product is unique."""
    if init == "olora":
        q, r = np.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, v = np.linalg.svd(weight, full_matrices=False)
    roots = np.sqrt(s[:rank] / scale)
    return roots[:, None] * v[:rank], u[:, :rank] * roots


def close(found: np.ndarray, expected: np.ndarray, size: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=FACTOR_TOLERANCE * size)


LINEAR = [name for name in LAYERS if LAYERS[name][1] == "linear"]


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("name", LINEAR)
def test_principal_factors(name: str, init: Any) -> None:
    """Factors and rest equal NumPy's in each layout of the weight, and the model computes the same."""
    base, _ = LAYERS[name]
    x = batch_for(base)
    adapted, description = lora.add(base, rank=2, alpha=3, targets="*", init=init)
    assert description == lora.adapters(adapted)
    onnx.checker.check_model(adapted)
    before = run(base, x)
    tolerance = 2e-3 if name == "behind Cast" else OUTPUT_TOLERANCE
    np.testing.assert_allclose(run(adapted, x), before, rtol=0, atol=tolerance * np.abs(before).max())
    found = constants(adapted)
    if name in {"MatMul", "Gemm, transposed"}:
        weight = constants(base)["w"]
        matrix = weight.T if name == "MatMul" else weight
        a, b = principal(matrix, 2, 1.5, init)
        ours = found["w.lora_B.default"] @ found["w.lora_A.default"]
        close(ours, b @ a, np.abs(matrix).max())
        if init == "olora":
            close(found["w.lora_A.default"], a, np.abs(matrix).max())
            close(found["w.lora_B.default"], b, 1)
        rest = matrix - 1.5 * ours
        close(found["w"].T if name == "MatMul" else found["w"], rest, np.abs(matrix).max())
    changed = with_random_factors(adapted)
    expected = run(changed, x)
    np.testing.assert_allclose(run(lora.merge(changed), x), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(200, 120), (90, 300), (3, 2), (1, 4)])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_larger_weights(shape: tuple[int, int], init: Any) -> None:
    """Weights above the size of the direct method have the factors of NumPy, too."""
    rank = min(12, *shape)
    weight = random(*shape)
    base = model_of([node("Gemm", ["x", "w"], transB=1)], {"w": weight}, (FLOAT, ["N", shape[1]]), ["N", shape[0]])
    adapted, _ = lora.add(base, rank=rank, alpha=2 * rank, targets="*", init=init)
    found = constants(adapted)
    a, b = principal(weight.astype(np.float64), rank, 2, init)
    ours = found["w.lora_B.default"] @ found["w.lora_A.default"]
    close(ours, b @ a, np.abs(weight).max())
    close(found["w"], weight - 2 * ours, np.abs(weight).max())
    if init == "pissa":
        # Each factor has a root of the singular values.
        gram = found["w.lora_A.default"] @ found["w.lora_A.default"].T
        close(gram, a @ a.T, a.max() ** 2 * shape[1])
    assert adapted == lora.add(base, rank=rank, alpha=2 * rank, targets="*", init=init)[0]


def test_pissa_with_magnitudes() -> None:
    """The magnitudes of DoRA are the lengths of the rows of the original weight."""
    base, _ = LAYERS["Gemm, transposed"]
    adapted, _ = lora.add(base, rank=2, targets="*", init="pissa", use_dora=True)
    lengths = np.linalg.norm(constants(base)["w"], axis=1)
    close(constants(adapted)["w.lora_magnitude.default"], lengths, lengths.max())


def shared() -> ModelProto:
    nodes = [node("MatMul", ["x", "w"], "h"), node("Mul", ["w", "w"], "s"), node("MatMul", ["h", "s"])]
    return model_of(nodes, {"w": random(6, 6)}, ROWS, ["N", 6])


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (LAYERS["Conv"][0], r'init="pissa" is not supported for .*the Conv.*"convolution", and only linear ones'),
        (packed()[0], r'its weight "w_Q4" consists of integers; exclude it, or choose another init'),
        (shared(), r'its weight "w" is also read for "s", which gets no adapter'),
        (
            model_of([node("MatMul", ["x", "w"])], {"w": np.full((6, 5), np.nan, np.float32)}, ROWS, ["N", 5]),
            'its weight "w" has numbers that are not finite',
        ),
    ],
)
def test_refused_layers(base: ModelProto, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        lora.add(base, rank=2, targets="*", init="pissa")


def test_refused_options() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a positive alpha"):
        lora.add(PERCEPTRON, init="pissa", alpha=-1)
    unknown: Any = "svd"
    with pytest.raises(InvalidArgumentError, match=r'init .*"svd"'):
        lora.add(PERCEPTRON, init=unknown)
    with pytest.raises(InvalidArgumentError, match=r'bias .*"some"'):
        lora.add(PERCEPTRON, bias=unknown.replace("svd", "some"))


def test_layers_that_share_a_weight() -> None:
    """Two layers with one weight share the factors, and the weight is split once."""
    nodes = [node("MatMul", ["x", "w"], "h"), node("MatMul", ["h", "w"])]
    base = model_of(nodes, {"w": random(6, 6)}, ROWS, ["N", 6])
    x = random(4, 6)
    before = run(base, x)
    adapted, _ = lora.add(base, rank=2, targets="*", init="olora")
    np.testing.assert_allclose(run(adapted, x), before, rtol=0, atol=OUTPUT_TOLERANCE * np.abs(before).max())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_files_of_principal_factors(init: Any, tmp_path: Path) -> None:
    """The file names the method. The original base becomes the rest when it reads the file; a rest stays."""
    adapted, _ = lora.add(PERCEPTRON, rank=4, alpha=8, targets="*", init=init)
    moved = with_random_factors(adapted)
    lora.save_adapter(moved, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] == init
    assert lora.load_adapter(PERCEPTRON, tmp_path) == moved
    # After the removal of the adapter, the weights of the base are the rest.
    rest = lora.remove(moved)
    assert lora.load_adapter(rest, tmp_path) == moved
    # A merged model has no rest, and a second adapter has a plain configuration.
    both, _ = lora.add(moved, rank=2, name="second")
    lora.save_adapter(both, tmp_path / "second", name="second")
    assert json.loads((tmp_path / "second" / "adapter_config.json").read_text())["init_lora_weights"] is True
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["init_lora_weights"] = "pissa_niter_4"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match="path_initial_model_for_weight_conversion"):
        lora.load_adapter(PERCEPTRON, tmp_path)


# Biases.


def with_biases() -> ModelProto:
    """Return a product with a bias, a normalization, and a Gemm."""
    nodes = [
        node("MatMul", ["x", "fc1.weight"], "h"),
        node("Add", ["fc1.bias", "h"], "i"),
        node("LayerNormalization", ["i", "norm.weight", "norm.bias"], "n"),
        node("Gemm", ["n", "fc2.weight", "onnx::bias"], transB=1),
    ]
    weights = {
        "fc1.weight": random(6, 7),
        "fc1.bias": random(7),
        "norm.weight": random(7),
        "norm.bias": random(7) + 1,
        "fc2.weight": random(5, 7),
        "onnx::bias": random(5),
    }
    return model_of(nodes, weights, ROWS, ["N", 5])


BIASES: dict[Any, dict[str, str]] = {
    "none": {},
    "lora_only": {"fc1.bias": "fc1.base_layer.bias"},
    "all": {"fc1.bias": "fc1.base_layer.bias", "norm.bias": "norm.bias", "onnx::bias": "fc2.bias"},
}


@pytest.mark.parametrize("bias", BIASES)
def test_biases(bias: Any, tmp_path: Path) -> None:
    """The biases of PEFT are trained, saved by PEFT's names, and read back."""
    base = with_biases()
    adapted, _ = lora.add(base, rank=2, targets="fc1", bias=bias)
    factors = ["fc1.weight.lora_A.default", "fc1.weight.lora_B.default"]
    (tmp_path / "artifacts").mkdir()
    state, module, optimizer = trained(adapted, tmp_path / "artifacts", artifacts.OptimType.AdamW)
    assert sorted(name for name, _ in state.parameters) == sorted([*factors, *BIASES[bias]])
    module(random(4, 6), random(4, 5))
    optimizer.step()
    exported = tmp_path / "exported.onnx"
    module.export_model_for_inferencing(exported, ["y"])
    lora.save_adapter(exported, tmp_path / "adapter")
    tensors = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    biases = {name: tensor for name, tensor in tensors.items() if "lora" not in name}
    after = constants(onnx.load(exported))
    expected = {f"base_model.model.{theirs}": after[ours] for ours, theirs in BIASES[bias].items()}
    assert sorted(biases) == sorted(expected)
    assert all((biases[name] == value).all() for name, value in expected.items())
    assert all((after[name] != constants(base)[name]).any() for name in BIASES[bias])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["bias"] == bias
    loaded = lora.load_adapter(base, tmp_path / "adapter")
    x = random(3, 6)
    assert (run(loaded, x) == run(onnx.load(exported), x)).all()
    trained_names = [info.name for info in ortrain.inspect(loaded).parameters if info.role == "trained"]
    assert sorted(trained_names) == sorted([*factors, *BIASES[bias]])
    plain = lora.remove(loaded)
    assert not any(entry.key.startswith("ortrain.lora") for entry in plain.metadata_props)


def test_refused_biases(tmp_path: Path) -> None:
    base = with_biases()
    adapted, _ = lora.add(base, rank=2, targets="fc1", bias="all")
    with pytest.raises(InvalidArgumentError, match=r'biases of .* beside the adapter "default" already; only one'):
        lora.add(adapted, rank=2, targets="fc1", bias="lora_only", name="second")
    lora.save_adapter(adapted, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = read_safetensors(path)
    for name, value, message in (
        ("base_model.model.fc1.base_layer.bias", random(3), r'"fc1" has 3 numbers, but "fc1.bias" has 7'),
        ("base_model.model.norm.bias", np.full(7, np.inf, np.float32), '"norm" has numbers that are not finite'),
        ("base_model.model.fc9.bias", random(3), 'a bias of the module "fc9", but .* has no such bias'),
    ):
        write_safetensors(path, {**tensors, name: value})
        with pytest.raises(InvalidArgumentError, match=message):
            lora.load_adapter(base, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    write_safetensors(path, tensors)
    with pytest.raises(InvalidArgumentError, match="is no factor of an adapter"):
        lora.load_adapter(base, tmp_path)


def test_bias_of_a_convolution() -> None:
    adapted, _ = lora.add(LAYERS["Conv"][0], rank=2, targets="*", bias="lora_only")
    names = [info.name for info in ortrain.inspect(adapted).parameters if info.role == "trained"]
    assert sorted(names) == ["b", "w.lora_A.default", "w.lora_B.default"]
