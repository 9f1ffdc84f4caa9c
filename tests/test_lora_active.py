"""Weights of the adapters of a model, and other weights for each row of a batch: equal to models with one adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
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
    random,
    run,
    trained,
    with_random_factors,
)

import ortrain
from ortrain import InvalidArgumentError, artifacts, lora

TOLERANCE = 2e-6
"""Error of outputs, relative to the largest: sums in another order in float32."""


def with_two_adapters(base: ModelProto | str | Path, **options: Any) -> ModelProto:
    model, _ = lora.add(base, rank=2, alpha=3, targets="*", name="style", **options)
    model, _ = lora.add(model, rank=3, alpha=3, targets="*", name="facts")
    return with_random_factors(model)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def run_rows(model: ModelProto, x: np.ndarray, weights: Any) -> np.ndarray:
    """Return the output for weights by row, which is the same in onnxruntime."""
    feeds = {"x": x, "adapter_weights": np.asarray(weights, np.float32)}
    encoded = model.SerializeToString()
    (found,) = ortrain.InferenceSession(encoded).run(None, feeds)
    session = onnxruntime.InferenceSession(encoded, providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, feeds)
    close(found, reference)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_weights(name: str) -> None:
    """A blend equals a merge, the weight 0 equals a removed adapter, and the weight 1 restores each bit."""
    base, _ = LAYERS[name]
    x = batch_for(base)
    both = with_two_adapters(base)
    assert lora.active(both) == {"style": 1, "facts": 1}
    blended = lora.activate(both, {"style": 0.7, "facts": 0.3})
    assert lora.active(blended) == {"style": 0.7, "facts": 0.3}
    onnx.checker.check_model(blended)
    if name != "behind Cast":
        # A merge of weighted adapters has their weights.
        merged = run(lora.merge(both, {"style": 0.7, "facts": 0.3}), x)
        close(run(blended, x), merged)
        close(run(lora.merge(blended), x), merged)
    only = lora.activate(both, "style")
    assert lora.active(only) == {"style": 1, "facts": 0}
    close(run(only, x), run(lora.remove(both, "facts"), x))
    close(run(lora.activate(both, []), x), run(base, x))
    for other in (blended, only, lora.activate(blended, "facts")):
        assert lora.activate(other, {"style": 1, "facts": 1}) == both
        assert lora.activate(other) == both


def test_files_have_the_original_scale(tmp_path: Path) -> None:
    both = with_two_adapters(PERCEPTRON)
    off = lora.activate(both, {"style": 0.1})
    for model, folder in ((both, "before"), (off, "after")):
        lora.save_adapter(model, tmp_path / folder, name="facts")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()
    # The removal of an adapter removes its weight.
    restored = lora.remove(off, "facts")
    assert lora.active(restored) == {"style": 0.1}
    assert lora.active(lora.load_adapter(restored, tmp_path / "after", name="facts")) == {"style": 0.1, "facts": 1}


def test_inactive_adapters_are_frozen(tmp_path: Path) -> None:
    """An adapter with the weight 0 is no parameter: weight decay would change it."""
    both = lora.activate(with_two_adapters(LAYERS["MatMul"][0]), {"style": 0.5})
    state, module, optimizer = trained(both, tmp_path, artifacts.OptimType.AdamW)
    assert [name for name, _ in state.parameters] == ["w.lora_A.style", "w.lora_B.style"]
    module(random(4, 6), random(4, 5))
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["y"])
    assert lora.active(tmp_path / "exported.onnx") == {"style": 0.5, "facts": 0}
    before, after = (
        {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}
        for model in (both, onnx.load(tmp_path / "exported.onnx"))
    )
    assert (before["w.lora_A.facts"] == after["w.lora_A.facts"]).all()
    assert (before["w.lora_A.style"] != after["w.lora_A.style"]).any()


def test_refused_weights() -> None:
    both = with_two_adapters(LAYERS["MatMul"][0])
    with pytest.raises(InvalidArgumentError, match=r'has no adapter "other"; its adapters: "facts", "style"'):
        lora.activate(both, "other")
    with pytest.raises(
        InvalidArgumentError, match='the weight of the adapter "style" must be a finite float32, got NaN'
    ):
        lora.activate(both, {"style": np.nan})
    dora, _ = lora.add(LAYERS["MatMul"][0], rank=2, targets="*", use_dora=True)
    with pytest.raises(InvalidArgumentError, match=r"magnitudes \(DoRA\), which have no weight other than 1, got 0\.5"):
        lora.activate(dora, {"default": 0.5})
    assert lora.activate(dora) == dora


# Weights by row.


def named(model: ModelProto) -> ModelProto:
    """Give each node another name, which onnxruntime needs."""
    for at, each in enumerate(model.graph.node):
        each.name = f"node {at}"
    return model


def merged_axes() -> ModelProto:
    """Return a layer that reads rows and positions as one axis, as in exports of GPT-2."""
    nodes = [
        node("Shape", ["x"], "sizes"),
        node("Reshape", ["x", "flat"], "f"),
        node("Gemm", ["f", "w", "b"], "g"),
        node("Gather", ["sizes", "first"], "batch", axis=0),
        node("Gather", ["sizes", "second"], "length", axis=0),
        node("Concat", ["batch", "length", "five"], "s", axis=0),
        node("Reshape", ["g", "s"]),
    ]
    weights = {
        "w": random(6, 5),
        "b": random(5),
        "flat": np.array([-1, 6]),
        "first": np.array([0]),
        "second": np.array([1]),
        "five": np.array([5]),
    }
    return named(model_of(nodes, weights, (FLOAT, ["N", "L", 6]), ["N", "L", 5]))


def rows_second() -> ModelProto:
    """Return a layer with the rows as the second axis of its result."""
    nodes = [
        node("Transpose", ["x"], "t", perm=[1, 0, 2]),
        node("MatMul", ["t", "w"], "p"),
        node("Transpose", ["p"], perm=[1, 0, 2]),
    ]
    return named(model_of(nodes, {"w": random(6, 5)}, (FLOAT, ["N", "L", 6]), ["N", "L", 5]))


def fixed_batch() -> ModelProto:
    nodes = [node("Reshape", ["x", "s"], "f"), node("MatMul", ["f", "w"], "p"), node("Reshape", ["p", "t"])]
    weights = {"w": random(6, 5), "s": np.array([12, 6]), "t": np.array([4, 3, 5])}
    return named(model_of(nodes, weights, (FLOAT, [4, 3, 6]), [4, 3, 5]))


ROW_LAYERS = {
    **{name: base for name, (base, _) in LAYERS.items()},
    "merged axes": merged_axes(),
    "rows as second axis": rows_second(),
    "fixed batch": fixed_batch(),
}


@pytest.mark.parametrize("name", ROW_LAYERS)
def test_rows(name: str) -> None:
    """Each row equals a run with its weights alone. A single row of weights applies to all rows."""
    base = ROW_LAYERS[name]
    x = batch_for(base) if name in LAYERS else random(4, 3, 6)
    both = with_two_adapters(base)
    mixed = lora.with_row_adapters(both, ["facts", "style"])
    onnx.checker.check_model(mixed)
    assert lora.adapters(mixed) == lora.adapters(both)
    weights = [[1, 0], [0, 1], [0, 0], [0.3, 0.7]]
    found = run_rows(mixed, x, weights)
    for row, (facts, style) in enumerate(weights):
        alone = run(lora.activate(both, {"facts": facts, "style": style}), x)
        close(found[row], alone[row])
    for facts, style in weights:
        close(run_rows(mixed, x, [[facts, style]]), run(lora.activate(both, {"facts": facts, "style": style}), x))


def test_rows_of_some_adapters() -> None:
    """An adapter without a column has its own weight for all rows."""
    both = lora.activate(with_two_adapters(LAYERS["MatMul"][0]), {"style": 0.5, "facts": 1})
    mixed = lora.with_row_adapters(both, ["facts"])
    x = random(4, 6)
    expected = run(lora.activate(both, {"style": 0.5, "facts": 0.25}), x)
    close(run_rows(mixed, x, [[0.25]]), expected)
    # The two other functions keep their meaning for the adapter without a column.
    assert lora.active(lora.remove(mixed, "style")) == {"facts": 1}


def test_rows_train(tmp_path: Path) -> None:
    """Gradients of an adapter come from its rows alone, and a running Module takes other weights in each step."""
    model = lora.with_row_adapters(with_two_adapters(LAYERS["MatMul"][0]), ["style", "facts"])
    state, module, optimizer = trained(model, tmp_path, artifacts.OptimType.SGD)
    optimizer.set_learning_rate(0.5)
    assert len(list(state.parameters)) == 4
    x, target = random(4, 6), random(4, 5)
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    module(x, np.array([[1, 0]], np.float32), target)
    optimizer.step()
    module.lazy_reset_grad()
    after = {name: parameter.data.copy() for name, parameter in state.parameters}
    for name, old in before.items():
        assert (after[name] != old).any() == name.endswith("style"), name
    # Rows of one adapter give the gradient of a batch of these rows, up to the mean.
    module(x, np.array([[0, 1], [0, 1], [0, 0], [0, 0]], np.float32), target)
    by_row = {name: parameter.grad.copy() for name, parameter in state.parameters if name.endswith("facts")}
    module.lazy_reset_grad()
    module(x[:2], np.array([[0, 1]], np.float32), target[:2])
    for name, parameter in state.parameters:
        if name.endswith("facts"):
            close(by_row[name], parameter.grad / 2)


def test_refused_rows() -> None:
    both = with_two_adapters(LAYERS["MatMul"][0])
    mixed = lora.with_row_adapters(both)
    with pytest.raises(InvalidArgumentError, match='has a value "adapter_weights" already'):
        lora.with_row_adapters(mixed)
    with pytest.raises(InvalidArgumentError, match=r'"style" of .* take the model before with_row_adapters'):
        lora.merge(mixed, "style")
    with pytest.raises(InvalidArgumentError, match=r'has no adapter "other"; its adapters: "facts", "style"'):
        lora.with_row_adapters(both, ["other"])
    with pytest.raises(InvalidArgumentError, match='the adapter "style" has two columns; name it once'):
        lora.with_row_adapters(both, ["style", "style"])
    with pytest.raises(InvalidArgumentError, match="has no adapters; add one first"):
        lora.with_row_adapters(LAYERS["MatMul"][0])
    dora, _ = lora.add(LAYERS["MatMul"][0], rank=2, targets="*", use_dora=True)
    with pytest.raises(InvalidArgumentError, match=r"magnitudes \(DoRA\), which have no weight for a row"):
        lora.with_row_adapters(dora)
    table = model_of(
        [node("Gather", ["v", "p"], "e"), node("MatMul", ["x", "w"], "h"), node("Add", ["h", "e"])],
        {"v": random(7, 5), "p": np.array([3]), "w": random(6, 5)},
        ROWS,
        ["N", 5],
    )
    adapted, _ = lora.add(table, rank=2, targets="*")
    with pytest.raises(
        InvalidArgumentError, match=r"shape \[1, 5\], in which no axis has the N rows of the first input"
    ):
        lora.with_row_adapters(adapted)
    columns = model_of(
        [node("Transpose", ["x"], "t", perm=[1, 2, 0]), node("MatMul", ["t", "w"])],
        {"w": random(6, 5)},
        (FLOAT, [6, "L", "M"]),
        ["L", "M", 5],
    )
    adapted, _ = lora.add(columns, rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match="in which no axis has the 6 rows of the first input"):
        lora.with_row_adapters(adapted)
    old = model_of([node("MatMul", ["x", "w"])], {"w": random(6, 5)}, ROWS, ["N", 5], opset=7)
    adapted, _ = lora.add(old, rank=2, targets="*")
    with pytest.raises(InvalidArgumentError, match="adapters for each row need opset 8"):
        lora.with_row_adapters(adapted)
