"""Adapters of recurrent layers: the weights of LSTM, GRU and RNN, of one or two directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, numpy_helper
from test_lora import FLOAT, model_of, random, run, with_random_factors

import ortrain
from ortrain import InvalidArgumentError, artifacts, lora

TOLERANCE = 2e-6
"""Error of outputs, relative to the largest: sums in another order in float32."""
STEP, SLOPE_TOLERANCE = 1e-4, 1e-5
"""Step of a central difference in float64, whose error is about the square, and error of gradients in float32."""
HIDDEN = 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def layer(op: str, *, both: bool = False, all_outputs: bool = True) -> ModelProto:
    """Return a model of a recurrent layer, with the states of all steps or of the last one."""
    directions, rows = 1 + both, GATES[op] * HIDDEN
    names = ["states", "last"] if all_outputs else ["", "last"]
    attributes: dict[str, Any] = {"hidden_size": HIDDEN, "direction": "bidirectional" if both else "forward"}
    recurrent = onnx.helper.make_node(op, ["x", "W", "R", "B"], names, "the layer", **attributes)
    weights = {
        "W": random(directions, rows, 5),
        "R": random(directions, rows, HIDDEN) / 2,
        "B": random(directions, 2 * rows),
    }
    model = model_of([recurrent], weights, (FLOAT, ["T", "N", 5]), [])
    result = ("states", ["T", directions, "N", HIDDEN]) if all_outputs else ("last", [directions, "N", HIDDEN])
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(result[0], FLOAT, result[1]))
    return model


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def constants(model: ModelProto) -> dict[str, np.ndarray]:
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


@pytest.mark.parametrize("all_outputs", [True, False])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("op", GATES)
def test_layers(op: str, both: bool, all_outputs: bool, tmp_path: Path) -> None:
    """The weight of each direction is `W + scale * B A`; merged, saved and removed adapters; onnxruntime agrees."""
    base = layer(op, both=both, all_outputs=all_outputs)
    x = random(4, 2, 5)
    adapted, description = lora.add(base, rank=2, alpha=3, targets="*")
    directions, rows = 1 + both, GATES[op] * HIDDEN
    assert [(each.weight, each.kind, each.inputs, each.outputs, each.rank) for each in description.layers] == [
        ("W", "recurrent", 5, rows, 2),
        ("R", "recurrent", HIDDEN, rows, 2),
    ]
    assert lora.adapters(adapted) == description
    assert description.parameters == directions * 2 * (2 * rows + 5 + HIDDEN)
    onnx.checker.check_model(adapted)
    before = run(base, x)
    assert (run(adapted, x) == before).all()
    changed = with_random_factors(adapted)
    values = constants(changed)
    expected = onnx.ModelProto.FromString(base.SerializeToString())
    for entry in expected.graph.initializer:
        if entry.name in ("W", "R"):
            a, b = (values[f"{entry.name}.lora_{factor}.default"].astype(np.float64) for factor in "AB")
            total = values[entry.name] + 1.5 * np.stack([b[d] @ a[d] for d in range(directions)])
            entry.CopyFrom(numpy_helper.from_array(total.astype(np.float32), entry.name))
    after = run(expected, x)
    assert np.abs(after - before).max() > 0.1
    close(run(changed, x), after)
    session = onnxruntime.InferenceSession(changed.SerializeToString(), providers=["CPUExecutionProvider"])
    close(session.run(None, {"x": x})[0], after)
    # A merge of no adapters encodes a model again.
    assert lora.merge(changed) == lora.merge(expected, [])
    assert lora.remove(changed) == lora.merge(base, [])
    lora.save_adapter(changed, tmp_path)
    loaded = lora.load_adapter(base, tmp_path)
    assert {name: value.tobytes() for name, value in constants(loaded).items()} == {
        name: value.tobytes() for name, value in values.items()
    }
    assert (run(loaded, x) == run(changed, x)).all()


def test_several_adapters() -> None:
    base = layer("LSTM", both=True)
    x = random(4, 2, 5)
    first, _ = lora.add(base, rank=2, targets="*", name="first")
    two, _ = lora.add(first, rank=1, targets="R", name="second")
    both = with_random_factors(two)
    assert [each.weight for each in lora.adapters(both).layers if each.adapter == "second"] == ["R"]
    assert lora.remove(both, "second") == with_random_factors(first)
    close(run(lora.merge(both), x), run(both, x))
    close(run(lora.merge(both, "first"), x), run(both, x))
    close(run(lora.activate(both, "second"), x), run(lora.remove(both, "first"), x))
    assert lora.remove(lora.remove(both, "first"), "second") == lora.merge(base, [])


def in_float64(model: ModelProto) -> ModelProto:
    found = ModelProto.FromString(model.SerializeToString())
    for value in (*found.graph.input, *found.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for entry in found.graph.initializer:
        entry.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(entry).astype(np.float64), entry.name))
    return found


@pytest.mark.parametrize("op", GATES)
def test_step_by_finite_differences(op: str, tmp_path: Path) -> None:
    """The gradient of each factor is the slope of the loss in float64."""
    adapted = with_random_factors(lora.add(layer(op), rank=2, targets="*")[0])
    artifacts.generate_artifacts(
        adapted, loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD, artifact_directory=tmp_path
    )
    state = ortrain.api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = ortrain.api.Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x = random(4, 2, 5)
    target = random(4, 1, 2, HIDDEN)
    names = [name for name, _ in state.parameters]
    assert sorted(names) == sorted(f"{weight}.lora_{factor}.default" for weight in "WR" for factor in "AB")
    module(x, target)

    def loss(name: str, step: float, direction: np.ndarray) -> float:
        moved = in_float64(adapted)
        for entry in moved.graph.initializer:
            if entry.name == name:
                value = numpy_helper.to_array(entry) + step * direction.astype(np.float64)
                entry.CopyFrom(numpy_helper.from_array(value, name))
        y = run(moved, x.astype(np.float64))
        return float(((y - target) ** 2).mean())

    for name, parameter in state.parameters:
        direction = random(*parameter.data.shape)
        slope = (loss(name, STEP, direction) - loss(name, -STEP, direction)) / (2 * STEP)
        np.testing.assert_allclose(
            (parameter.grad * direction).sum(), slope, rtol=SLOPE_TOLERANCE, atol=SLOPE_TOLERANCE
        )


def test_refused() -> None:
    base = layer("GRU")
    with pytest.raises(InvalidArgumentError, match=r"use_dora is not supported for .*: it is recurrent"):
        lora.add(base, rank=2, targets="*", use_dora=True)
    with pytest.raises(InvalidArgumentError, match=r'init="pissa" is not supported for .*"recurrent"'):
        lora.add(base, rank=2, targets="*", init="pissa")
    with pytest.raises(
        InvalidArgumentError, match=r'it is recurrent, and all rows share its weight; leave .*"default"'
    ):
        lora.with_row_adapters(lora.add(base, rank=2, targets="*")[0])
    with pytest.raises(InvalidArgumentError, match="the rank must be from 1 to 3"):
        lora.add(base, rank=4, targets="*")
