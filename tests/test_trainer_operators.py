"""Operators of the trainer's optimizers as single nodes, compared with formulas: rows O1 to O4 of the checklist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

import ortrain

Array = npt.NDArray[Any]

# A few roundings of float32, and the rounding of a float16 copy.
CLOSE, CLOSE_OF_FLOAT16 = 2e-6, 1e-3
ALPHA, BETA, DECAY, EPSILON = 0.8, 0.95, 0.1, 1e-4
RATE, COUNT = 0.5, 3
SETTINGS: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "lambda": DECAY, "epsilon": EPSILON}
SCALE, CLIP = 8.0, 0.25


def run(op: str, inputs: Sequence[Array | None], outputs: Sequence[str], **attributes: Any) -> dict[str, Array]:
    """Run a node; returns its outputs. ``None`` omits an input, and an empty name omits an output."""
    given = {f"in{at}": value for at, value in enumerate(inputs) if value is not None}
    names = ["" if value is None else f"in{at}" for at, value in enumerate(inputs)]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    results = [name for name in outputs if name]
    graph = helper.make_graph([node], op, values, [onnx.ValueInfoProto(name=name) for name in results])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    session = ortrain.InferenceSession(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return dict(zip(results, session.run(None, given), strict=True))


def tensors(shape: Sequence[int], seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Return a weight, a gradient and two moments."""
    rng = np.random.default_rng(seed)
    weight, gradient, first = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    return weight, gradient, first, rng.random(shape).astype(np.float32)


def number(value: float) -> Array:
    return np.array([value], np.float32)


RATES, STEPS = number(RATE), np.array([COUNT], np.int64)


def moments(gradient: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Compute the two moments after a step, in float64."""
    gradient = gradient.astype(np.float64)
    return ALPHA * first + (1 - ALPHA) * gradient, BETA * second + (1 - BETA) * gradient**2


def corrections(corrected: int) -> tuple[float, float]:
    return (1 - ALPHA**COUNT, 1 - BETA**COUNT) if corrected else (1.0, 1.0)


def adam(weight: Array, first: Array, second: Array, mode: int, corrected: int) -> Array:
    """Compute the weight after a step of Adam from the updated moments."""
    c1, c2 = corrections(corrected)
    if mode == 0:
        return weight - RATE * (first / c1 / (np.sqrt(second / c2) + EPSILON) + DECAY * weight)
    moved = weight - RATE * np.sqrt(c2) / c1 * first / (np.sqrt(second) + EPSILON)
    return np.asarray(moved - RATE * DECAY * moved)


def lamb(
    weight: Array, first: Array, second: Array, corrected: int = 0, least: float = -np.inf, most: float = np.inf
) -> Array:
    """Compute the weight after a step of LAMB from the updated moments."""
    c1, c2 = corrections(corrected)
    direction = DECAY * weight + first / c1 / (np.sqrt(second / c2) + EPSILON)
    ratio = np.linalg.norm(weight) / np.linalg.norm(direction)
    return np.asarray(weight - RATE * max(least, min(most, ratio)) * direction)


def assert_close(found: Mapping[str, Array], expected: Mapping[str, Array], close: float = CLOSE) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=close, atol=close, err_msg=name)


# O1 and O2: Adam.


@pytest.mark.parametrize("corrected", [0, 1])
@pytest.mark.parametrize("mode", [0, 1])
def test_o1_adam(mode: int, corrected: int) -> None:
    """AdamOptimizerTest, AdamBiasCorrection, AdamWeightDecayMode0 and 1: the new weight, or its difference."""
    weight, gradient, first, second = tensors([3, 4])
    new_first, new_second = moments(gradient, first, second)
    expected = adam(weight, new_first, new_second, mode, corrected)
    settings = {**SETTINGS, "weight_decay_mode": mode, "do_bias_correction": corrected}
    inputs = [RATES, STEPS, weight, gradient, first, second]
    found = run("AdamOptimizer", inputs, ["count", "first", "second", "weight"], **settings)
    assert found["count"].tolist() == [COUNT + 1]
    assert_close(found, {"first": new_first, "second": new_second, "weight": expected})
    found = run("AdamOptimizer", inputs, ["count", "first", "second", "", "change"], **settings)
    assert_close(found, {"first": new_first, "second": new_second, "change": expected - weight})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("norm", [0.5 * SCALE * CLIP, 4.0 * SCALE * CLIP], ids=["short", "long"])
def test_o2_adam_mixed_precision(norm: float, dtype: Any) -> None:
    """AdamOptimizerMixPrecision: gradients are divided by the scale, and clipped if their norm exceeds the limit."""
    weight, gradient, first, second = tensors([3, 4])
    gradient = gradient.astype(dtype)
    divisor = norm / CLIP if norm > SCALE * CLIP else SCALE
    new_first, new_second = moments(gradient / np.float64(divisor), first, second)
    expected = adam(weight, new_first, new_second, 0, 1)
    found = run(
        "AdamOptimizer",
        [RATES, STEPS, weight, gradient, first, second, weight.astype(np.float16), number(SCALE), number(norm)],
        ["count", "first", "second", "weight", "", "narrow"],
        max_norm_clip=CLIP,
        **SETTINGS,
    )
    assert_close(found, {"first": new_first, "second": new_second, "weight": expected})
    assert found["narrow"].dtype == np.float16
    assert_close(found, {"narrow": expected}, CLOSE_OF_FLOAT16)


def test_o2_adam_skips_an_update() -> None:
    """AdamOptimizerMixPrecision_SkipUpdate: values and count do not change."""
    weight, gradient, first, second = tensors([3, 4])
    narrow = weight.astype(np.float16)
    given = {"count": STEPS, "first": first, "second": second, "weight": weight, "narrow": narrow}
    found = run(
        "AdamOptimizer",
        [RATES, STEPS, weight, gradient, first, second, narrow, number(SCALE), number(np.inf), np.array([False])],
        ["count", "first", "second", "weight", "", "narrow"],
        **SETTINGS,
    )
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in given.items()
    }


# O3: LAMB.


@pytest.mark.parametrize("bounds", [{}, {"ratio_min": 3.0}, {"ratio_max": 0.1}], ids=["free", "least", "most"])
@pytest.mark.parametrize("corrected", [0, 1])
@pytest.mark.parametrize("shape", [[5], [3, 4]], ids=["vector", "matrix"])
def test_o3_lamb(shape: list[int], corrected: int, bounds: dict[str, float]) -> None:
    """LambOptimizerTest of a vector and a matrix, with a step, corrections and bounds of ratios."""
    weight, gradient, first, second = tensors(shape)
    new_first, new_second = moments(gradient, first, second)
    found = run(
        "LambOptimizer",
        [None, None, None, RATES, STEPS, weight, gradient, first, second],
        ["step", "weight", "", "first", "second"],
        do_bias_correction=corrected,
        **{name: [value] for name, value in SETTINGS.items()},
        **bounds,
    )
    assert found["step"].tolist() == [COUNT + 1]
    expected = lamb(
        weight, new_first, new_second, corrected, bounds.get("ratio_min", -np.inf), bounds.get("ratio_max", np.inf)
    )
    assert_close(found, {"first": new_first, "second": new_second, "weight": expected})


SEVERAL = ["step", *(f"{name}{at}" for at in (0, 1) for name in ("weight", "gradient", "first", "second", "narrow"))]


def two_of_lamb(norm: float, is_finite: bool) -> tuple[list[tuple[Array, ...]], dict[str, Array]]:
    """Return two tensors, and their results of LAMB with float16 gradients of this norm."""
    given: list[tuple[Array, ...]] = [tensors([3, 4], 1), tensors([5], 2)]
    flat = [
        value
        for weight, gradient, first, second in given
        for value in (weight, gradient.astype(np.float16), first, second, weight.astype(np.float16))
    ]
    named = [name if "gradient" not in name else "" for name in SEVERAL]
    found = run(
        "LambOptimizer",
        [np.array([is_finite]), number(SCALE), number(norm), RATES, STEPS, *flat],
        named,
        do_bias_correction=1,
        max_norm_clip=[CLIP, CLIP],
        **{name: [value, value] for name, value in SETTINGS.items()},
    )
    return given, found


@pytest.mark.parametrize("norm", [0.5 * SCALE * CLIP, 4.0 * SCALE * CLIP], ids=["short", "long"])
def test_o3_lamb_of_several_tensors_in_mixed_precision(norm: float) -> None:
    """Each tensor has its own ratio; all tensors share the scale and the norm."""
    given, found = two_of_lamb(norm, True)
    divisor = norm / CLIP if norm > SCALE * CLIP else SCALE
    for at, (weight, gradient, first, second) in enumerate(given):
        new_first, new_second = moments(gradient.astype(np.float16) / np.float64(divisor), first, second)
        expected = lamb(weight, new_first, new_second, 1)
        assert_close(found, {f"first{at}": new_first, f"second{at}": new_second, f"weight{at}": expected})
        assert_close(found, {f"narrow{at}": expected}, CLOSE_OF_FLOAT16)
    assert found["step"].tolist() == [COUNT + 1]


def test_o3_lamb_skips_an_update() -> None:
    given, found = two_of_lamb(np.inf, False)
    assert found["step"].tolist() == [COUNT]
    for at, (weight, _, first, second) in enumerate(given):
        for name, value in (("weight", weight), ("first", first), ("second", second)):
            np.testing.assert_array_equal(found[f"{name}{at}"], value)


# O4: SGD, sums, scales and norms.


def test_o4_sgd() -> None:
    weight, gradient, *_ = tensors([3, 4])
    found = run("SGDOptimizer", [RATES, weight, gradient], ["weight", "change"])
    assert_close(found, {"weight": weight - RATE * gradient, "change": -RATE * gradient})


@pytest.mark.parametrize("signal", [None, True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_o4_in_place_accumulator(dtype: Any, signal: bool | None) -> None:
    """A gradient is added to its sum, unless the signal is false."""
    total, gradient, *_ = tensors([3, 4])
    gradient = gradient.astype(dtype)
    given = [] if signal is None else [np.array([signal])]
    found = run("InPlaceAccumulator", [total, gradient, *given], ["sum"])
    assert_close(found, {"sum": total if signal is False else total + gradient})


@pytest.mark.parametrize("signal", [True, False])
def test_o4_zero_gradient(signal: bool) -> None:
    """Any signal gives zeros."""
    found = run("ZeroGradient", [tensors([3, 4])[0], np.array([signal])], ["zeros"])
    np.testing.assert_array_equal(found["zeros"], np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_o4_mixed_precision_scale(dtype: Any) -> None:
    """Each tensor is multiplied and cast; fused outputs follow each other in one buffer."""
    one, other = tensors([3, 4])[0], tensors([5], 1)[0]
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    scaled = [(SCALE * value).astype(dtype) for value in (one, other)]
    found = run("MixedPrecisionScale", [number(SCALE), one, other], ["one", "other"], to=to)
    for value, expected in zip(found.values(), scaled, strict=True):
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, expected)
    (fused,) = run("MixedPrecisionScale", [number(SCALE), one, other], ["all"], to=to, fuse_outputs=1).values()
    np.testing.assert_array_equal(fused.reshape(-1), np.concatenate([value.reshape(-1) for value in scaled]))


def test_o4_reduce_all_l2() -> None:
    values = [tensors([3, 4])[0], tensors([5], 1)[0]]
    found = run("ReduceAllL2", values, ["norm"])
    assert_close(found, {"norm": np.sqrt(sum(np.sum(value.astype(np.float64) ** 2) for value in values))})


@pytest.mark.parametrize("strange", [None, np.nan, np.inf, -np.inf])
def test_o4_is_all_finite(strange: float | None) -> None:
    values = [tensors([3, 4])[0], tensors([5], 1)[0]]
    if strange is not None:
        values[1][3] = strange
    assert bool(run("IsAllFinite", values, ["finite"])["finite"]) is (strange is None)
