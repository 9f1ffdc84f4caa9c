"""ORTTrainer follows a plain float64 trainer in NumPy: optimizers, schedules, accumulation windows, clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trainer_formulas
from classic_formulas import Formulas
from classic_models import Net, assert_close, classifier
from trainer_formulas import Loss, PlainTrainer, gradients_of, numeric_gradient
from trainer_nets import block, losses_of, trainer_of

from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

# Required tolerance of losses, and of weights and moments relative to the largest element.
CLOSE = 1e-5
# Central differences in float64 have the error of the squared step, 1e-12, and of rounding over the step, 1e-10.
CLOSE_OF_DIFFERENCES = 1e-7
STEPS, ROWS = 20, 6
# Number of updates of a schedule. A window of three makes fewer updates.
TOTAL, WARMUP = 20, 0.2
MODELS: dict[str, tuple[Callable[[], Net], Loss]] = {
    "perceptron": (lambda: classifier(6, 8, 5), trainer_formulas.perceptron),
    "block": (block, trainer_formulas.block),
}
# The epsilon keeps small values apart from rounding errors: Adam divides by the root of the second moment.
MOMENTS: dict[str, Any] = {"lambda_coef": 0.01, "epsilon": 1e-4}
CONFIGS: dict[str, Callable[[float], _OptimizerConfig]] = {
    "adam 0": lambda clip: AdamConfig(lr=0.02, max_norm_clip=clip, **MOMENTS),
    "adam 1": lambda clip: AdamConfig(
        lr=0.02, max_norm_clip=clip, weight_decay_mode=AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE, **MOMENTS
    ),
    "lamb": lambda clip: LambConfig(lr=0.02, max_norm_clip=clip, do_bias_correction=True, **MOMENTS),
    "sgd": lambda clip: SGDConfig(lr=0.05),
}
SCHEDULES: dict[str, tuple[Callable[[], Any], trainer_formulas.Schedule] | None] = {
    "none": None,
    "constant": (lambda: ConstantWarmupLRScheduler(TOTAL, WARMUP), trainer_formulas.constant),
    "cosine": (lambda: CosineWarmupLRScheduler(TOTAL, 0.5, WARMUP), trainer_formulas.cosine),
    "linear": (lambda: LinearWarmupLRScheduler(TOTAL, WARMUP), trainer_formulas.linear),
    "poly": (
        lambda: PolyWarmupLRScheduler(TOTAL, 1e-4, 2.0, WARMUP),
        partial(trainer_formulas.poly, end=1e-4, power=2.0),
    ),
}
# Smaller than the norm of all these gradients.
CLIP = 0.05


def settings_of(config: _OptimizerConfig) -> dict[str, float]:
    """Return the settings of all weights for the formulas."""
    return {name: float(value) for name, value in config.defaults.items() if name != "lr"}


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the state of a trainer with the names of the formulas."""
    return dict(trainer._training_session.get_state())


@pytest.mark.parametrize("clipped", [True, False], ids=["clipped", "whole"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_a_training_follows_the_plain_one(model: str, name: str, schedule: str, window: int, clipped: bool) -> None:
    make, loss = MODELS[model]
    net, config, scheduled = make(), CONFIGS[name](CLIP), SCHEDULES[schedule]
    trainer = trainer_of(
        net,
        config,
        {
            "lr_scheduler": None if scheduled is None else scheduled[0](),
            "batch": {"gradient_accumulation_steps": window},
            "utils": {"grad_norm_clip": clipped},
        },
    )
    settings = {weight: settings_of(config) for weight in net.weights}
    plain = PlainTrainer(loss, Formulas(config.name, dict(net.weights), settings, clipped), config.lr, window=window)
    if scheduled is not None:
        factor = scheduled[1]
        plain.schedule = lambda t: factor(t, TOTAL, WARMUP, config.lr)
    found = losses_of(trainer, net, STEPS, rows=ROWS)
    expected = [plain.train_step(net.batch(k, ROWS)) for k in range(STEPS)]
    np.testing.assert_allclose(found, expected, rtol=CLOSE)
    assert_close(state_of(trainer), plain.formulas.state(), CLOSE)
    assert min(plain.norms) > CLIP, "clipping acts"
    assert trainer._train_step_info.optimization_step == STEPS // window


def test_groups_have_their_own_settings() -> None:
    net = classifier(6, 8, 5)
    groups: list[dict[str, Any]] = [
        {"params": ["fc1.w", "fc2.w"], "lambda_coef": 0.1, "alpha": 0.8},
        {"params": ["fc2.w"], "epsilon": 1e-3, "max_norm_clip": 1},
        {"params": ["nowhere"], "alpha": 0.1},
    ]
    config = AdamConfig(groups, lr=0.02, max_norm_clip=CLIP, **MOMENTS)
    trainer = trainer_of(net, config)
    own = {name: settings_of(config) for name in net.weights}
    own["fc1.w"] |= {"lambda": 0.1, "alpha": 0.8}
    own["fc2.w"] |= {"epsilon": 1e-3, "max_norm_clip": 1.0}
    plain = PlainTrainer(trainer_formulas.perceptron, Formulas(config.name, dict(net.weights), own), config.lr)
    found = losses_of(trainer, net, STEPS, rows=ROWS)
    np.testing.assert_allclose(found, [plain.train_step(net.batch(k, ROWS)) for k in range(STEPS)], rtol=CLOSE)
    assert_close(state_of(trainer), plain.formulas.state(), CLOSE)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_the_plain_trainer_are_those_of_differences(model: str) -> None:
    make, loss = MODELS[model]
    net = make()
    weights = {name: value.astype(np.float64) for name, value in net.weights.items()}
    feeds = net.batch(0, ROWS)
    _, gradients = gradients_of(loss, weights, feeds)
    for name, gradient in gradients.items():
        for at in {0, gradient.size // 2, gradient.size - 1}:
            expected = numeric_gradient(loss, weights, feeds, name, at)
            assert abs(gradient.reshape(-1)[at] - expected) < CLOSE_OF_DIFFERENCES, name
