"""Loss scalers of the trainer: windows, minimum and maximum, the legacy class compared with the new one, bad input."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ortrain.trainer import TrainStepInfo, amp
from ortrain.trainer.amp import DynamicLossScaler, LossScaler
from ortrain.trainer.legacy_loss_scaler import LossScaler as LegacyLossScaler
from ortrain.trainer.optim import LambConfig

STEPS = 10_000
SETTINGS = 1_000 if "ORTRAIN_CONFORM" in os.environ else 50
SEED = 20_231


def after(finite: bool) -> TrainStepInfo:
    return TrainStepInfo(LambConfig(), all_finite=finite)


FINITE, OVERFLOW = after(True), after(False)


def test_dynamic_loss_scaler() -> None:
    """F5: testDynamicLossScaler."""
    scaler = DynamicLossScaler()
    assert (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window) == (True, 65536.0, 2000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale, scaler.input_name) == (1.0, 2.0**24, None)
    assert scaler._stable_steps_count == 0

    # The scale doubles after each window, up to the maximum, which the eighth window reaches.
    for power in range(16, 26):
        for count in range(1, 2000):
            assert scaler.update(FINITE) == scaler.loss_scale == 2.0 ** min(power, 24)
            assert scaler._stable_steps_count == count
        assert scaler.update(FINITE) == scaler.loss_scale == 2.0 ** min(power + 1, 24)
        assert scaler._stable_steps_count == 0

    # An overflow ends a window.
    scaler.update(FINITE)
    assert scaler._stable_steps_count == 1
    for power in range(23, -3, -1):
        assert scaler.update(OVERFLOW) == scaler.loss_scale == 2.0 ** max(power, 0)
        assert scaler._stable_steps_count == 0

    scaler.update(FINITE)
    scaler.reset()
    assert (scaler.loss_scale, scaler._stable_steps_count) == (65536.0, 0)


def test_dynamic_loss_scaler_custom_values() -> None:
    """F6: testDynamicLossScalerCustomValues."""
    scaler = DynamicLossScaler(
        automatic_update=False, loss_scale=3, up_scale_window=7, min_loss_scale=5, max_loss_scale=10
    )
    assert (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window) == (False, 3.0, 7)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (5, 10)
    assert isinstance(scaler.loss_scale, float)


def test_order_of_arguments() -> None:
    scaler = DynamicLossScaler(False, 3.0, 7, 5.0, 10.0)
    assert (scaler.automatic_update, scaler.loss_scale, scaler.up_scale_window) == (False, 3.0, 7)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (5.0, 10.0)
    legacy = LegacyLossScaler("scale", True, 3.0, 7, 5.0, 10.0)
    assert (legacy.loss_scale_input_name, legacy.is_dynamic_scale, legacy.loss_scale_) == ("scale", True, 3.0)
    assert (legacy.up_scale_window_, legacy.min_loss_scale_, legacy.max_loss_scale_) == (7, 5.0, 10.0)
    assert (legacy.initial_loss_scale_, legacy.stable_steps_) == (3.0, 0)


def test_constant_scale() -> None:
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=64.0, up_scale_window=1)
    assert [scaler.update(info) for info in (FINITE, OVERFLOW, FINITE)] == [64.0] * 3
    assert scaler._stable_steps_count == 0


def test_a_flag_of_the_graph() -> None:
    """Flags are arrays of one bool."""
    scaler = DynamicLossScaler(loss_scale=64.0, up_scale_window=1)
    info = after(True)
    info.all_finite = np.array([False])
    assert scaler.update(info) == 32.0
    info.all_finite = np.array([True])
    assert scaler.update(info) == 64.0


def followed(
    finite: npt.NDArray[np.bool_], scale: float, window: int, least: float, most: float
) -> npt.NDArray[np.float64]:
    """Compute the scales after each step, a run of finite steps at once."""
    scales = np.empty(len(finite))
    starts = np.concatenate(([0], np.flatnonzero(~finite) + 1, [len(finite) + 1]))
    for start, end in pairwise(starts):
        doublings = np.arange(1, end - start) // window
        run = np.where(doublings == 0, scale, np.minimum(most, scale * 2.0 ** np.minimum(doublings, 100)))
        scales[start : end - 1] = run
        scale = float(run[-1]) if len(run) else scale
        if end <= len(finite):
            scale = scales[end - 1] = max(least, scale / 2)
    return scales


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3])
def test_formula(share: float) -> None:
    """Scales equal the closed form of windows, for random settings and overflows."""
    rng = np.random.default_rng(SEED)
    for _ in range(-(-SETTINGS // 3)):
        scale, least = float(rng.uniform(0.5, 2.0**20)), float(rng.uniform(0.1, 4.0))
        window, most = int(rng.integers(1, 400)), float(2.0 ** rng.uniform(10, 30))
        finite = rng.random(STEPS) >= share
        scaler = DynamicLossScaler(True, scale, window, least, most)
        found = [scaler.update(FINITE if fine else OVERFLOW) for fine in finite.tolist()]
        np.testing.assert_array_equal(found, followed(finite, scale, window, least, most))


def pair(scale: float = 1024.0, window: int = 4) -> tuple[DynamicLossScaler, LegacyLossScaler]:
    return (
        DynamicLossScaler(True, scale, window, 2.0, 4096.0),
        LegacyLossScaler("loss_scale", True, scale, window, 2.0, 4096.0),
    )


def step(scaler: DynamicLossScaler, legacy: LegacyLossScaler, finite: bool) -> None:
    scaler.update(after(finite))
    legacy.update_loss_scale(finite)
    assert (scaler.loss_scale, scaler._stable_steps_count) == (legacy.loss_scale_, legacy.stable_steps_)


def test_loss_scaler_legacy_and_experimental_full_cycle() -> None:
    """F27: testLossScalerLegacyAndExperimentalFullCycle."""
    scaler, legacy = pair()
    for finite in [True] * 13 + [False] * 14 + [True] * 9:
        step(scaler, legacy, finite)
    assert legacy.loss_scale_ == 8.0
    scaler.reset()
    legacy.reset()
    assert (scaler.loss_scale, scaler._stable_steps_count) == (legacy.loss_scale_, legacy.stable_steps_) == (1024.0, 0)


def test_loss_scaler_legacy_and_experimental_random_all_finite() -> None:
    """F27: testLossScalerLegacyAndExperimentalRandomAllFinite."""
    scaler, legacy = pair()
    scales = set()
    for finite in np.random.default_rng(SEED).random(1000) < 0.8:
        step(scaler, legacy, bool(finite))
        scales.add(legacy.loss_scale_)
    # The scales include the minimum and the maximum.
    assert {2.0, 4096.0} <= scales


def test_constant_legacy_scale() -> None:
    legacy = LegacyLossScaler("loss_scale", False, 64.0, up_scale_window=1)
    for finite in (True, False, True):
        legacy.update_loss_scale(finite)
    assert (legacy.loss_scale_, legacy.stable_steps_) == (64.0, 0)
    default = LegacyLossScaler("loss_scale", True)
    assert (default.loss_scale_, default.up_scale_window_) == (65536.0, 2000)
    assert (default.min_loss_scale_, default.max_loss_scale_) == (1.0, 2.0**24)


class Fading(LossScaler):
    """A user's scaler: a quarter after each overflow."""

    def update(self, train_step_info: TrainStepInfo) -> float:
        if not train_step_info.all_finite:
            self.loss_scale /= 4
        return self.loss_scale


def test_a_scaler_of_ones_own() -> None:
    scaler = Fading(64)
    assert isinstance(scaler, amp.loss_scaler.LossScaler)
    assert [scaler.update(info) for info in (FINITE, OVERFLOW, OVERFLOW)] == [64.0, 16.0, 4.0]
    scaler.input_name = "loss_scale"
    assert scaler.input_name == "loss_scale"
    scaler.reset()
    assert scaler.loss_scale == 64.0


def test_the_base_has_no_update() -> None:
    with pytest.raises(NotImplementedError) as caught:
        LossScaler(1.0).update(FINITE)
    assert str(caught.value) == (
        "LossScaler has no update(train_step_info), which every loss scaler needs; DynamicLossScaler has one"
    )


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "1", None, True, np.float32(2)])
def test_bad_scale(scale: Any) -> None:
    text = f"'loss_scale' must be a finite int or float above 0, got {scale!r}"
    for make in (LossScaler, lambda scale: DynamicLossScaler(loss_scale=scale)):
        with pytest.raises(AssertionError) as caught:
            make(scale)
        assert str(caught.value) == text
    scaler = DynamicLossScaler()
    with pytest.raises(AssertionError) as caught:
        scaler.loss_scale = scale
    assert str(caught.value) == text
    assert scaler.loss_scale == 65536.0


@pytest.mark.parametrize("name", ["", None, 1])
def test_bad_input_name(name: Any) -> None:
    scaler = DynamicLossScaler()
    scaler.input_name = "loss_scale"
    with pytest.raises(AssertionError) as caught:
        scaler.input_name = name
    assert str(caught.value) == f"'input_name' must be the name of an input, got {name!r}"
    assert scaler.input_name == "loss_scale"
