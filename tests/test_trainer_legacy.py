"""The legacy ORTTrainer compared with the new one, and its own interface: inputs, flags, counts, states, files."""

from __future__ import annotations

import copy
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from classic_models import Graph, Net, classifier, prescribed, prescribing, regression, softmax_net
from trainer_nets import bits_of, block, description_of, losses_of, toy_bert, trainer_of, weights_of

import ortrain
from ortrain.trainer import ORTTrainer as NewORTTrainer
from ortrain.trainer import legacy
from ortrain.trainer.amp import DynamicLossScaler
from ortrain.trainer.legacy import IODescription, LossScaler, ModelDescription, ORTTrainer
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer.* is for existing scripts:FutureWarning")

RATE = IODescription("Learning_Rate", [1], np.float32)
LEARNING_RATE = 0.01
# Optimizer settings for biases and for all other weights; omitted settings have their defaults.
BIAS, OTHERS = {"lambda": 0.0}, {"lambda": 0.02, "alpha": 0.85, "max_norm_clip": 0.5}
OPTIMIZERS: dict[str, Callable[..., _OptimizerConfig]] = {
    "AdamOptimizer": AdamConfig,
    "LambOptimizer": LambConfig,
    "SGDOptimizer": SGDConfig,
}
TOTAL, WARMUP = 10, 0.2
SCHEDULERS: dict[str, Callable[[], _LRScheduler]] = {
    "constant": lambda: ConstantWarmupLRScheduler(TOTAL, WARMUP),
    "cosine": lambda: CosineWarmupLRScheduler(TOTAL, 0.5, WARMUP),
    "linear": lambda: LinearWarmupLRScheduler(TOTAL, WARMUP),
    "poly": lambda: PolyWarmupLRScheduler(TOTAL, 1e-7, 1.0, WARMUP),
}


def settings_of(name: str) -> dict[str, float]:
    """Return the settings of a weight, which scripts choose by its name."""
    return BIAS if name.endswith((".b", ".bias")) else OTHERS


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Return the same settings as groups of weights."""
    names = [tensor.name for tensor in net.model.graph.initializer]
    return [
        {"params": [name for name in names if settings_of(name) is settings], **settings} for settings in (BIAS, OTHERS)
    ]


def described(net: Net, outputs: Sequence[str] | None = None) -> ModelDescription:
    """Return the description of a network, with the loss as its first output."""
    described = description_of(net, outputs)
    return ModelDescription(
        [IODescription(name, shape) for name, shape in described["inputs"]],
        [IODescription(name, shape) for name, shape, *_ in described["outputs"]],
    )


def ordered(net: Net) -> Any:
    """Return a copy of the model with the loss as its first output."""
    model = copy.deepcopy(net.model)
    outputs = sorted(model.graph.output, key=lambda value: value.name != "loss")
    copies = [type(value).FromString(value.SerializeToString()) for value in outputs]
    del model.graph.output[:]
    model.graph.output.extend(copies)
    return model


def legacy_of(
    net: Net,
    optimizer: str = "AdamOptimizer",
    attributes: Callable[[str], Mapping[str, float]] | None = None,
    *,
    outputs: Sequence[str] | None = None,
    **more: Any,
) -> ORTTrainer:
    """Return a legacy trainer of a copy of a network."""
    return ORTTrainer(ordered(net), None, described(net, outputs), optimizer, attributes, RATE, "cpu", **more)


def inputs_of(net: Net, seed: int = 0, rows: int = 12) -> list[npt.NDArray[Any]]:
    return list(net.batch(seed, rows).values())


def legacy_losses(trainer: ORTTrainer, net: Net, count: int, *beside: Any, first: int = 0) -> list[float]:
    """Train steps of one batch each; returns the losses. ``beside`` has the learning rate and the loss scale."""
    found = []
    for k in range(first, first + count):
        outputs = trainer.train_step(*inputs_of(net, k), *beside)
        found.append(float(outputs[0] if isinstance(outputs, list) else outputs))
    return found


def same_weights(trainer: ORTTrainer, new: NewORTTrainer) -> None:
    state = trainer.state_dict(include_optimizer_state=False)
    weights = weights_of(new)
    assert bits_of({name: state[name] for name in weights}) == bits_of(weights)


# Rows of the checklist: the legacy trainer and the new one.


def test_b11_basic_training() -> None:
    """testToyBERTModelLegacyExperimentalBasicTraining."""
    net = toy_bert()
    trainer = legacy_of(net, "LambOptimizer", settings_of)
    new = trainer_of(net, LambConfig(groups_of(net), LEARNING_RATE))
    assert legacy_losses(trainer, net, 10, LEARNING_RATE) == losses_of(new, net, 10)
    same_weights(trainer, new)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_b11_lr_scheduler(scheduler: str) -> None:
    """testToyBERTModelLegacyExperimentalLRScheduler."""
    compare_schedules(toy_bert(), "LambOptimizer", scheduler)


def compare_schedules(net: Net, optimizer: str, scheduler: str) -> None:
    schedule, config = SCHEDULERS[scheduler](), OPTIMIZERS[optimizer](lr=LEARNING_RATE)

    def rate_of(step: int) -> float:
        info = types.SimpleNamespace(optimization_step=step, optimizer_config=config)
        return schedule.get_lr(info)[0]  # type: ignore[arg-type]

    trainer = legacy_of(net, optimizer, get_lr_this_step=rate_of)
    new = trainer_of(net, config, {"lr_scheduler": SCHEDULERS[scheduler]()})
    assert legacy_losses(trainer, net, 8) == losses_of(new, net, 8)
    same_weights(trainer, new)


@pytest.mark.parametrize("dynamic", [False, True])
def test_b11_mixed_precision_loss_scaler(dynamic: bool) -> None:
    """testToyBERTModelLegacyExperimentalMixedPrecisionLossScaler."""
    net = toy_bert()
    scaler = LossScaler("loss_scale", dynamic, 128.0, 3)
    trainer = legacy_of(net, "LambOptimizer", use_mixed_precision=True, loss_scaler=scaler)
    other = DynamicLossScaler(dynamic, 128.0, 3)
    options = {"mixed_precision": {"enabled": True, "loss_scaler": other}}
    new = trainer_of(net, LambConfig(lr=LEARNING_RATE), options)
    assert legacy_losses(trainer, net, 10, LEARNING_RATE) == losses_of(new, net, 10)
    same_weights(trainer, new)
    assert scaler.loss_scale_ == other.loss_scale == (1024.0 if dynamic else 128.0)


@pytest.mark.parametrize("window", [1, 4, 7])
def test_b11_gradient_accumulation(window: int) -> None:
    """testToyBERTModelLegacyExperimentalGradientAccumulation."""
    compare_windows(toy_bert(), window)


def compare_windows(net: Net, window: int) -> None:
    steps = 2 * window + 1
    trainer = legacy_of(net, "LambOptimizer", settings_of, gradient_accumulation_steps=window)
    batch = {"batch": {"gradient_accumulation_steps": window}}
    new = trainer_of(net, LambConfig(groups_of(net), LEARNING_RATE), batch)
    assert legacy_losses(trainer, net, steps, LEARNING_RATE) == losses_of(new, net, steps)
    same_weights(trainer, new)
    assert (trainer.current_step, trainer.global_step_) == (steps, steps // window)


def test_f23_weights_check() -> None:
    """testORTTrainerLegacyAndExperimentalWeightsCheck."""
    net = block()
    trainer = legacy_of(net, "LambOptimizer")
    new = trainer_of(net, LambConfig(lr=LEARNING_RATE))
    legacy_losses(trainer, net, 5, LEARNING_RATE)
    losses_of(new, net, 5)
    same_weights(trainer, new)


def test_f24_precision_loss_scaler() -> None:
    """testORTTrainerLegacyAndExperimentalPrecisionLossScaler."""
    net = classifier()
    scaler, other = LossScaler("loss_scale", True, up_scale_window=8), DynamicLossScaler(up_scale_window=8)
    trainer = legacy_of(net, use_mixed_precision=True, loss_scaler=scaler)
    options = {"mixed_precision": {"enabled": True, "loss_scaler": other}}
    new = trainer_of(net, AdamConfig(lr=LEARNING_RATE), options)
    for k in range(128):
        found = trainer.train_step(*inputs_of(net, k), LEARNING_RATE)
        expected = new.train_step(*inputs_of(net, k))
        assert [(value.dtype, value.tobytes()) for value in found] == [
            (value.dtype, value.tobytes()) for value in expected
        ]
    assert [value.dtype for value in found] == [np.float32, np.float16]
    assert (scaler.loss_scale_, trainer.global_step_) == (other.loss_scale, new._train_step_info.optimization_step)
    same_weights(trainer, new)


@pytest.mark.parametrize("window", [1, 3, 7, 12])
def test_f25_gradient_accumulation(window: int) -> None:
    """testORTTrainerLegacyAndExperimentalGradientAccumulation."""
    compare_windows(block(), window)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_f26_lr_scheduler(optimizer: str, scheduler: str) -> None:
    """testORTTrainerLegacyAndExperimentalLRScheduler."""
    compare_schedules(block(), optimizer, scheduler)


# Arguments of a step.


def test_ways_to_give_a_learning_rate() -> None:
    net = classifier()
    x, labels = inputs_of(net)
    rate = LEARNING_RATE
    ways: list[tuple[list[Any], dict[str, Any]]] = [
        ([x, labels, rate], {}),
        ([[x, labels, np.array([rate], np.float32)]], {}),
        ([x, labels], {"Learning_Rate": np.float32(rate)}),
        ([x], {"Learning_Rate": [rate], "labels": labels, "unknown": 1}),
        ([], {"Learning_Rate": rate, "labels": labels, "x": x}),
    ]
    found = []
    for args, kwargs in ways:
        trainer = legacy_of(net)
        trainer.train_step(*args, **kwargs)
        found.append(bits_of(trainer.state_dict()))
    assert all(each == found[0] for each in found)
    still = legacy_of(net)
    still.train_step(x, labels, 0)
    assert bits_of(still.state_dict()) != found[0]
    assert bits_of(still.state_dict(False)) == bits_of(legacy_of(net).state_dict(False))


def test_ways_to_give_a_loss_scale() -> None:
    """The outputs then include the flag of finite gradients; another scale gives the same results."""
    net = classifier()
    x, labels = inputs_of(net)
    trainer = legacy_of(net, use_mixed_precision=True)
    name = trainer.loss_scale_input_name
    assert name == trainer.session.loss_scale_input_name == "loss_scale"
    ways: list[tuple[list[Any], dict[str, Any]]] = [
        ([x, labels, LEARNING_RATE, 64], {}),
        ([x, labels, LEARNING_RATE], {name: np.array([64.0], np.float32)}),
        ([x, labels], {"Learning_Rate": LEARNING_RATE, "default_loss_scale_input_name": 64.0}),
    ]
    found = []
    for args, kwargs in ways:
        trainer = legacy_of(net, use_mixed_precision=True)
        loss, logits, is_all_finite = trainer.train_step(*args, **kwargs)
        assert (loss.dtype, logits.dtype) == (np.float32, np.float16)
        assert (is_all_finite.dtype, is_all_finite.tolist()) == (np.bool_, [True])
        found.append(bits_of(trainer.state_dict()))
    assert found[0] == found[1] == found[2]


def test_a_scale_that_is_too_large() -> None:
    """Infinite gradients change no bit and count as no update."""
    net = prescribing({"w": np.ones((3, 4), np.float32)})
    trainer = legacy_of(net, outputs=["loss"], use_mixed_precision=True)
    feeds = prescribed({"w": np.full((3, 4), 0.5, np.float32)}).values()
    before = bits_of(trainer.state_dict())
    _, is_all_finite = trainer.train_step(*feeds, LEARNING_RATE, 1e30)
    assert is_all_finite.tolist() == [False]
    assert (trainer.current_step, trainer.global_step_) == (1, 0)
    assert bits_of(trainer.state_dict()) == before
    _, is_all_finite = trainer.train_step(*feeds, LEARNING_RATE, 8.0)
    assert is_all_finite.tolist() == [True]
    assert (trainer.current_step, trainer.global_step_) == (2, 1)


def test_a_loss_scaler_hears_of_updates() -> None:
    net = prescribing({"w": np.ones((3, 4), np.float32)})
    scaler = LossScaler("loss_scale", True, 8.0, 2)
    more: dict[str, Any] = {"use_mixed_precision": True, "loss_scaler": scaler, "gradient_accumulation_steps": 2}
    trainer = legacy_of(net, outputs=["loss"], get_lr_this_step=lambda step: LEARNING_RATE, **more)
    scales = []
    for gradient in (0.5, 0.5, 1e30, 0.5, 0.5, 0.5, 0.5, 0.5):
        loss = trainer.train_step(*prescribed({"w": np.full((3, 4), gradient, np.float32)}).values())
        assert isinstance(loss, np.ndarray)
        scales.append(scaler.loss_scale_)
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 8.0]
    assert (trainer.current_step, trainer.global_step_) == (8, 3)


def test_only_updates_return_the_flag() -> None:
    net = classifier()
    trainer = legacy_of(net, outputs=["loss"], use_mixed_precision=True, gradient_accumulation_steps=2)
    given = [*inputs_of(net), LEARNING_RATE, 8.0]
    assert trainer.train_step(*given).shape == ()
    assert len(trainer.train_step(*given)) == 2
    # An update with fetched outputs counts for any gradients.
    trainer.train_step(*given)
    assert trainer.train_step(*given, fetches=["loss"]).shape == ()
    assert trainer.global_step_ == 2


def test_a_scaler_without_mixed_precision_is_not_asked() -> None:
    net = classifier()
    scaler = LossScaler("loss_scale", True, 8.0, 1)
    trainer = legacy_of(net, loss_scaler=scaler)
    assert legacy_losses(trainer, net, 3, LEARNING_RATE) == legacy_losses(legacy_of(net), net, 3, LEARNING_RATE)
    assert (scaler.loss_scale_, trainer.loss_scale_input_name) == (8.0, "default_loss_scale_input_name")


def test_a_schedule_is_asked_by_updates() -> None:
    net, asked = classifier(), []

    def rate_of(step: int) -> float:
        asked.append(step)
        return LEARNING_RATE

    trainer = legacy_of(net, get_lr_this_step=rate_of, global_step=5, gradient_accumulation_steps=2)
    legacy_losses(trainer, net, 4)
    trainer.global_step_ = 9
    legacy_losses(trainer, net, 1)
    assert asked == [5, 5, 6, 6, 9]


STEPS: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any], type[Exception], str]] = {
    "no learning rate": ({}, [], {}, AssertionError, "expected 3 inputs .*\\(x, labels, Learning_Rate\\), got 2"),
    "one too many": ({}, [0.1, 1.0], {}, AssertionError, "expected 3 inputs .* got 4"),
    "a learning rate twice": ({}, [0.1], {"Learning_Rate": 0.1}, AssertionError, "expected 3 inputs .* got 4"),
    "no scale": ({"use_mixed_precision": True}, [0.1], {}, AssertionError, "loss_scale"),
    "not finite": ({}, [np.nan], {}, ValueError, "the learning rate must be one finite number of 0 or more, got nan"),
    "two rates": ({}, [[0.1, 0.2]], {}, ValueError, "the learning rate must be one finite number"),
    "no number": ({}, ["much"], {}, ValueError, "got 'much'"),
    "negative": ({}, [-0.1], {}, ValueError, "the learning rate .* of 0 or more, got -0.1"),
    "beyond float32": ({}, [1e39], {}, ValueError, "the learning rate .*, got 1e\\+39"),
    "a flag": ({}, [True], {}, ValueError, "got True"),
    "a scale of 0": ({"use_mixed_precision": True}, [0.1, 0], {}, ValueError, "one finite number above 0, got 0"),
    "a rate beside a schedule": (
        {"get_lr_this_step": lambda step: 0.1},
        [],
        {"Learning_Rate": 0.1},
        AssertionError,
        "get_lr_this_step, which returns the learning rate",
    ),
    "a schedule of none": ({"get_lr_this_step": lambda step: None}, [], {}, ValueError, "got None"),
    "unknown fetches": ({}, [0.1], {"fetches": ["los"]}, ValueError, "did you mean 'loss'"),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_that_are_refused(case: str) -> None:
    made, beside, named, kind, words = STEPS[case]
    net = classifier()
    trainer = legacy_of(net, **made)
    before = bits_of(trainer.state_dict())
    with pytest.raises(kind, match=words):
        trainer.train_step(*inputs_of(net), *beside, **named)
    assert bits_of(trainer.state_dict()) == before
    assert trainer.global_step_ == 0


# Fetches, evaluation, modes, counts.


def test_fetches_have_their_order() -> None:
    net = classifier()
    trainer, plain = legacy_of(net), legacy_of(net)
    given = inputs_of(net)
    loss, logits = plain.eval_step(*given)
    found = trainer.eval_step(*given, fetches=["fc2", "loss"])
    assert [value.tobytes() for value in found] == [logits.tobytes(), loss.tobytes()]
    found = trainer.train_step(*given, LEARNING_RATE, fetches=["fc2", "loss"])
    loss, logits = plain.train_step(*given, LEARNING_RATE)
    assert [value.tobytes() for value in found] == [logits.tobytes(), loss.tobytes()]
    # Fetches apply to one call, do not change the training, and return a single value without a list.
    assert len(trainer.train_step(*given, LEARNING_RATE, fetches=[])) == 2
    plain.train_step(*given, LEARNING_RATE)
    assert trainer.eval_step(*given, fetches=["fc2"]).shape == (12, 10)
    assert bits_of(trainer.state_dict()) == bits_of(plain.state_dict())
    assert trainer.global_step_ == plain.global_step_ == 2


def test_a_call_is_a_step_of_the_mode() -> None:
    net = toy_bert(dropout=0.5)
    trainer = legacy_of(net, outputs=["loss"])
    given = inputs_of(net)
    first = trainer(*given, LEARNING_RATE)
    assert (trainer.is_train, trainer.current_step) == (True, 1)
    trainer.eval()
    before = bits_of(trainer.state_dict())
    evaluated = trainer(*given)
    assert evaluated == trainer(*given) == trainer.eval_step(*given) != first
    assert (bits_of(trainer.state_dict()), trainer.current_step, trainer.global_step_) == (before, 1, 1)
    trainer.train()
    trainer(*given, LEARNING_RATE)
    assert trainer.current_step == 2


@pytest.mark.parametrize(("count", "kind"), [("3", TypeError), (True, TypeError), (1.0, TypeError), (-1, ValueError)])
@pytest.mark.parametrize("name", ["global_step_", "current_step"])
def test_counts_that_are_refused(name: str, count: Any, kind: type[Exception]) -> None:
    trainer = legacy_of(classifier())
    with pytest.raises(kind, match=name.removesuffix("_")):
        setattr(trainer, name, count)
    setattr(trainer, name, np.int64(4))
    assert getattr(trainer, name) == 4


# Construction.


def test_settings_of_weights() -> None:
    """Settings apply by weight. Frozen weights have no settings, and an empty dict means the optimizer's defaults."""
    net, asked = classifier(), []

    def attributes(name: str) -> dict[str, float]:
        asked.append(name)
        return {"lambda": 0.5, "do_bias_correction": 0, "max_norm_clip": 1} if name == "fc2.w" else {}

    trainer = legacy_of(net, "AdamOptimizer", attributes, frozen_weights=["fc1.b"])
    assert sorted(asked) == ["fc1.w", "fc2.b", "fc2.w"]
    groups = [{"params": ["fc2.w"], "lambda": 0.5, "do_bias_correction": False}]
    new = trainer_of(net, AdamConfig(groups, LEARNING_RATE), {"utils": {"frozen_weights": ["fc1.b"]}})
    assert legacy_losses(trainer, net, 5, LEARNING_RATE) == losses_of(new, net, 5)
    same_weights(trainer, new)
    state = trainer.state_dict()
    assert "Moment_1_fc1.w" in state
    assert "Moment_1_fc1.b" not in state
    np.testing.assert_array_equal(state["fc1.b"], net.weights["fc1.b"])


def test_enable_grad_norm_clip_disables_clipping() -> None:
    net = regression()
    trainer = legacy_of(net, enable_grad_norm_clip=False)
    new = trainer_of(net, AdamConfig(lr=LEARNING_RATE), {"utils": {"grad_norm_clip": False}})
    assert legacy_losses(trainer, net, 3, LEARNING_RATE) == losses_of(new, net, 3)
    clipped = legacy_of(net)
    legacy_losses(clipped, net, 3, LEARNING_RATE)
    assert bits_of(clipped.state_dict(False)) != bits_of(trainer.state_dict(False))


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
def test_arguments_that_change_nothing(tmp_path: Path) -> None:
    net, path = classifier(), tmp_path / "optimized.onnx"
    more: dict[str, Any] = {
        "allreduce_post_accumulation": True,
        "deepspeed_zero_stage": 1,
        "enable_adasum": True,
        "use_memory_efficient_gradient": True,
        "run_symbolic_shape_infer": True,
        "_use_deterministic_compute": True,
        "_opset_version": 12,
        "optimized_model_filepath": str(path),
    }
    assert legacy_losses(legacy_of(net, **more), net, 3, LEARNING_RATE) == legacy_losses(
        legacy_of(net), net, 3, LEARNING_RATE
    )
    assert path.stat().st_size > 0


def test_postprocessing() -> None:
    """Post-processing may change the model in place or return another model, and its weights have settings."""
    net = classifier()

    def renamed(model: onnx.ModelProto) -> None:
        model.graph.node[0].name = "first"

    trainer = legacy_of(net, _extra_postprocess=renamed)
    assert [node.name for node in trainer.onnx_model_.graph.node][:2] == ["first", "Relu_1"]
    before = [node.name for node in net.model.graph.node]
    trainer = legacy_of(net, _enable_internal_postprocess=False)
    assert [node.name for node in trainer.onnx_model_.graph.node] == before
    other, asked = classifier(hidden=5), []

    def attributes(name: str) -> dict[str, float]:
        asked.append(name)
        return {"alpha": 0.8}

    trainer = legacy_of(net, attributes=attributes, _extra_postprocess=lambda model: ordered(other))
    assert trainer.state_dict(False)["fc1.w"].shape == (12, 5)
    assert sorted(asked) == sorted(other.weights)
    with pytest.raises(AssertionError, match="extra_postprocess"):
        legacy_of(net, _extra_postprocess=lambda model: "model")


def test_warnings() -> None:
    net = classifier()
    with pytest.warns(FutureWarning, match="ORTTrainer of ortrain.trainer.legacy is for existing scripts") as caught:
        legacy_of(net)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="loss_fn is ignored"):
        ORTTrainer(ordered(net), lambda x, y: x, described(net), "SGDOptimizer", None, RATE, "cpu")


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a dict": ({"model_desc": {}}, TypeError, "model_desc must be a ModelDescription, got dict"),
    "a pair": ({"model_desc": ModelDescription([("x", [1])], [])}, TypeError, "must be an IODescription"),  # type: ignore[list-item]
    "no rate": ({"learning_rate_description": None}, TypeError, "must be an IODescription, got None"),
    "a rate named x": ({"learning_rate_description": IODescription("x", [1])}, ValueError, "have the same name, 'x'"),
    "an optimizer": ({"training_optimizer_name": "AdamOptimiser"}, ValueError, "did you mean 'AdamOptimizer'"),
    "a new scaler": ({"loss_scaler": DynamicLossScaler()}, TypeError, "LossScaler of ortrain.trainer.legacy"),
    "a device": ({"device": "cuda"}, ortrain.DeviceUnavailableError, "device.id is 'cuda'"),
    "two processes": ({"world_size": 2}, ortrain.UnsupportedError, "world_size is 2, but the script runs in 1 process"),
    "a window of 0": ({"gradient_accumulation_steps": 0}, ValueError, "min value is 1"),
    "an opset": ({"_opset_version": 9}, ValueError, "min value is 12"),
    "a negative step": ({"global_step": -1}, ValueError, "global_step"),
    "bytes": ({"model": b"model"}, ValueError, "onnx.ModelProto"),
    "frozen": ({"frozen_weights": ["fc3.w"]}, RuntimeError, "fc3.w"),
    "a text": (
        {"map_optimizer_attributes": lambda name: {"alpha": "much"}},
        ValueError,
        "'fc1.w'.*'alpha' must be .* got 'much'",
    ),
    "a list": ({"map_optimizer_attributes": lambda name: []}, ValueError, "must return a dict of settings"),
    "a setting": ({"map_optimizer_attributes": lambda name: {"lamda": 1.0}}, ValueError, "did you mean 'lambda'"),
    "a rate of weights": ({"map_optimizer_attributes": lambda name: {"lr": 1.0}}, ValueError, "'lr' is not supported"),
    "settings of SGD": (
        {"training_optimizer_name": "SGDOptimizer", "map_optimizer_attributes": lambda name: {"alpha": 0.9}},
        ValueError,
        "SGDOptimizer has no settings",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_are_refused(case: str) -> None:
    given, kind, words = ARGUMENTS[case]
    net = classifier()
    arguments: dict[str, Any] = {
        "model": ordered(net),
        "loss_fn": None,
        "model_desc": described(net),
        "training_optimizer_name": "AdamOptimizer",
        "map_optimizer_attributes": None,
        "learning_rate_description": RATE,
        "device": "cpu",
    }
    with pytest.raises(kind, match=words):
        ORTTrainer(**{**arguments, **given})


def test_the_loss_is_the_first_output() -> None:
    net = classifier()
    with pytest.raises(ValueError, match="model_desc does not describe 'loss', the loss and first output of the model"):
        legacy_of(net, outputs=["fc2"])
    # Results have the order of the description, wherever the loss is.
    trainer = legacy_of(net, outputs=["fc2", "loss"])
    logits, loss = trainer.train_step(*inputs_of(net), LEARNING_RATE)
    assert (logits.shape, loss.shape) == ((12, 10), ())


class TorchModule:
    """A module of PyTorch."""


def test_a_module_has_no_state_before_its_first_step(torch: Any, tmp_path: Path) -> None:
    """The loss may have optional parameters; a state is loaded after the first step."""
    torch.nn.Module = TorchModule
    x, labels = IODescription("x", ["N", 3]), IODescription("labels", ["N"])
    description = ModelDescription([x, labels], [IODescription("loss", []), IODescription("logits", ["N", 2])])

    def loss(logits: Any, labels: Any, weight: float = 2.0) -> Any:
        return logits * labels * weight

    module = TorchModule()
    trainer = ORTTrainer(module, loss, description, "AdamOptimizer", None, RATE, "cpu", use_mixed_precision=True)
    assert (trainer.torch_model_, trainer.loss_fn_, trainer.session, trainer.onnx_model_) == (module, loss, None, None)
    assert trainer._trainer.loss_fn is not None
    assert trainer._trainer.loss_fn(1.5, 2.0) == 6.0
    assert [output.is_loss for output in trainer._trainer.model_desc.outputs] == [True, False]
    assert trainer.loss_scale_input_name == "default_loss_scale_input_name"
    with pytest.warns(UserWarning, match="not initialized yet"):
        assert trainer.state_dict() == {}
    with pytest.warns(UserWarning, match="not initialized yet"):
        trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    trainer.load_state_dict({"w": np.ones(3, np.float32)})
    assert list(trainer._trainer._state_dict) == ["w"]
    with pytest.raises(AssertionError, match="'loss_fn' must be"):
        ORTTrainer(module, "loss", description, "AdamOptimizer", None, RATE, "cpu")  # type: ignore[arg-type]


def test_a_loss_of_one_element() -> None:
    net, plain = regression(loss_shape=[1, 1], keepdims=1), regression()
    model = ordered(net)
    assert len(model.graph.output[0].type.tensor_type.shape.dim) == 2
    description = ModelDescription(described(net).inputs_, [IODescription("loss", [])])
    trainer = ORTTrainer(model, None, description, "SGDOptimizer", None, RATE, "cpu")
    assert trainer.train_step(*inputs_of(net), 0.1).shape == ()
    assert (
        legacy_losses(trainer, net, 2, 0.1, first=1)
        == legacy_losses(legacy_of(plain, "SGDOptimizer"), plain, 3, 0.1)[1:]
    )


# States and files.


def test_a_flat_state() -> None:
    """A flat state has all weights, frozen ones, other initializers, and the optimizer's values by name."""
    net = toy_bert()
    trainer = legacy_of(net, "LambOptimizer", outputs=["loss"])
    names = {tensor.name for tensor in net.model.graph.initializer}
    assert set(trainer.state_dict(include_optimizer_state=False)) == names
    weights = {name for name in names if f"Moment_1_{name}" in trainer.state_dict()}
    assert set(trainer.state_dict()) == names | {"Step"} | {
        f"{moment}_{name}" for moment in ("Moment_1", "Moment_2") for name in weights
    }
    assert names - weights, "the net has initializers that are not trained"


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_goes_on_from_a_flat_state(optimizer: str, precise: bool) -> None:
    net = classifier()
    more: dict[str, Any] = {} if precise else {"use_mixed_precision": True}
    beside = [LEARNING_RATE] if precise else [LEARNING_RATE, 64.0]
    trainer = legacy_of(net, optimizer, **more)
    legacy_losses(trainer, net, 3, *beside)
    state = trainer.state_dict()
    expected = legacy_losses(trainer, net, 3, *beside, first=3)
    fresh = legacy_of(net, optimizer, global_step=3, **more)
    fresh.load_state_dict(state, strict=True)
    assert legacy_losses(fresh, net, 3, *beside, first=3) == expected
    assert bits_of(fresh.state_dict()) == bits_of(trainer.state_dict())
    assert fresh.global_step_ == 6


def test_a_part_of_a_state() -> None:
    net = classifier()
    trainer = legacy_of(net)
    legacy_losses(trainer, net, 2, LEARNING_RATE)
    before = trainer.state_dict()
    bias = np.full_like(before["fc1.b"], 2)
    trainer.load_state_dict({"fc1.b": bias, "unknown": bias})
    assert bits_of(trainer.state_dict()) == bits_of({**before, "fc1.b": bias})
    for wrong, words in (({"fc1.b": bias[:3]}, "fc1.b"), ({"fc1.c": bias}, "fc1.c is not present in the model")):
        with pytest.raises(RuntimeError, match=words):
            trainer.load_state_dict(wrong, strict=True)
    assert bits_of(trainer.state_dict()) == bits_of({**before, "fc1.b": bias})


def test_running_statistics_are_in_the_state() -> None:
    graph = Graph()
    h = graph.linear("fc1", "x", 12, 16)
    parts = [graph.vector("norm.w", 16, 1.0, 0.1), graph.vector("norm.b", 16, 0.0, 0.1)]
    statistics = [graph.constant("norm.mean", np.zeros(16)), graph.constant("norm.var", np.ones(16))]
    graph.nodes_of("BatchNormalization", [h, *parts, *statistics], ["norm", "mean", "var"], training_mode=1)
    net = softmax_net(graph, graph.linear("fc2", "norm", 16, 10), [12], 10)
    trainer = legacy_of(net, outputs=["loss"])
    legacy_losses(trainer, net, 3, LEARNING_RATE)
    state = trainer.state_dict()
    assert state["norm.mean"].any()
    evaluated = trainer.eval_step(*inputs_of(net))
    fresh = legacy_of(net, outputs=["loss"])
    fresh.load_state_dict(state)
    assert bits_of(fresh.state_dict()) == bits_of(state)
    assert fresh.eval_step(*inputs_of(net)) == evaluated


def test_save_as_onnx(tmp_path: Path) -> None:
    net, path = classifier(), tmp_path / "trained.onnx"
    trainer = legacy_of(net)
    legacy_losses(trainer, net, 2, LEARNING_RATE)
    trainer.save_as_onnx(str(path))
    model = onnx.load(path)
    assert model == trainer.onnx_model_
    saved = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert bits_of(saved) == bits_of(trainer.state_dict(include_optimizer_state=False))


def test_files_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    net = classifier()
    trainer = legacy_of(net)
    before = bits_of(trainer.state_dict())
    with pytest.raises(ImportError, match="need PyTorch, which is not installed"):
        legacy.save_checkpoint(trainer, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "ORT_checkpoint.ort.pt").write_bytes(b"")
    with pytest.raises(ImportError, match="need PyTorch, which is not installed"):
        legacy.load_checkpoint(trainer, tmp_path)
    assert bits_of(trainer.state_dict()) == before


class DType:
    """A type of PyTorch."""

    def __init__(self, kind: str) -> None:
        self.kind = np.dtype(kind)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub of torch that the user has imported; its tensors are arrays."""
    module = types.ModuleType("torch")
    rng = np.random.default_rng(0)
    kinds = {name: DType(name) for name in ("float32", "float16", "int64")}
    values = {
        "Tensor": type("Tensor", (), {}),
        "nn": types.SimpleNamespace(Module=type("Module", (), {})),
        "dtype": DType,
        "from_numpy": lambda array: array,
        "save": pickle.dump,
        "load": lambda file, map_location, weights_only: pickle.loads(Path(file).read_bytes()),
        "randint": lambda low, high, shape, dtype, device: (rng.integers(low, high, shape, dtype.kind), device),
        "randn": lambda shape, dtype, device: (np.asarray(rng.standard_normal(shape), dtype.kind), device),
    }
    vars(module).update(values | kinds)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.usefixtures("torch")
def test_a_training_goes_on_from_a_file(tmp_path: Path) -> None:
    net = classifier()
    trainer = legacy_of(net, "LambOptimizer")
    legacy_losses(trainer, net, 3, LEARNING_RATE)
    legacy.save_checkpoint(trainer, tmp_path, "bert", {"global_step": trainer.global_step_})
    expected = legacy_losses(trainer, net, 3, LEARNING_RATE, first=3)
    fresh = legacy_of(net, "LambOptimizer")
    assert legacy.load_checkpoint(fresh, tmp_path, "bert", strict=True) == {"global_step": 3}
    assert legacy_losses(fresh, net, 3, LEARNING_RATE, first=3) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["bert.ort.pt"]
    with pytest.warns(UserWarning, match="already exists, overwriting"):
        legacy.save_checkpoint(fresh, str(tmp_path), "bert", include_optimizer_state=False)
    stored = pickle.loads((tmp_path / "bert.ort.pt").read_bytes())
    assert set(stored["model"]) == set(net.weights)
    again = legacy_of(net, "LambOptimizer")
    assert legacy.load_checkpoint(again, tmp_path, "bert") == {}
    assert bits_of(again.state_dict(False)) == bits_of(fresh.state_dict(False))
    assert again.state_dict()["Step"].tolist() == [1]


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
@pytest.mark.usefixtures("torch")
def test_files_of_zero_processes_have_their_names(tmp_path: Path) -> None:
    net = classifier()
    trainer = legacy_of(net, deepspeed_zero_stage=1)
    legacy.save_checkpoint(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ORT_checkpoint.ZeRO.0.0.ort.pt"]
    legacy.load_checkpoint(legacy_of(net, deepspeed_zero_stage=1), tmp_path)
    assert legacy.load_checkpoint(legacy_of(net), tmp_path) == {}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="directory doesn't exist"):
        legacy.save_checkpoint(legacy_of(classifier()), tmp_path / "nowhere")
    with pytest.raises(AssertionError, match="No checkpoint found with prefix 'bert'"):
        legacy.load_checkpoint(legacy_of(classifier()), tmp_path, "bert")


# Descriptions and samples.


def test_descriptions_store_their_arguments() -> None:
    """Descriptions store their arguments without a check."""
    x = IODescription("x", ["batch", 3], np.float32)
    assert (x.name_, x.shape_, x.dtype_, x.num_classes_) == ("x", ["batch", 3], np.float32, None)
    description = ModelDescription([x], [])
    assert (description.inputs_, description.outputs_) == ([x], [])
    assert repr(x) == f"IODescription('x', ['batch', 3], {np.float32!r}, None)"


def test_samples_are_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    labels = IODescription("labels", ["batch", 500], np.int32, num_classes=7)
    x = IODescription("x", ["batch", 500], np.float16)
    np.random.seed(0)  # noqa: NPY002  (what samples are drawn by)
    first = legacy.generate_sample(labels), legacy.generate_sample(x, "cpu")
    assert [(value.shape, value.dtype) for value in first] == [((1, 500), np.int32), ((1, 500), np.float16)]
    assert set(first[0].reshape(-1)) == set(range(7))
    assert abs(float(first[1].std()) - 1) < 0.2
    np.random.seed(0)  # noqa: NPY002
    again = legacy.generate_sample(labels), legacy.generate_sample(x)
    assert [value.tobytes() for value in again] == [value.tobytes() for value in first]
    assert legacy.generate_sample(IODescription("x", [2])).dtype == np.float32
    assert legacy.generate_sample(IODescription("x", [2], num_classes=3)).dtype == np.int64
    with pytest.raises(ortrain.UnsupportedError, match="device 'cuda' is not supported"):
        legacy.generate_sample(x, "cuda")


def test_samples_are_tensors_where_torch_is_imported(torch: Any) -> None:
    """``dtype_`` is a type of PyTorch or NumPy."""
    torch.from_numpy = lambda array: types.SimpleNamespace(dtype=getattr(torch, str(array.dtype)))
    for kind in (torch.int64, np.int64, None):
        drawn, device = legacy.generate_sample(IODescription("y", ["batch", 500], kind, num_classes=7), "there")
        assert (drawn.shape, drawn.dtype, set(drawn.reshape(-1)), device) == (
            (1, 500),
            np.int64,
            set(range(7)),
            "there",
        )
    for kind in (torch.float16, np.float16):
        drawn, device = legacy.generate_sample(IODescription("x", [2, 3], kind))
        assert (drawn.shape, drawn.dtype, device) == ((2, 3), np.float16, None)


def test_one_trainer_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        legacy_of(classifier())
    assert [warning.category for warning in caught] == [FutureWarning]
    assert caught[0].filename == __file__
