"""ORTTrainer on ONNX models: rows of the checklist by name, steps, mixed precision, kinds of values, bad input."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import trainer_formulas
import trainer_nets
from classic_models import Net, classifier, prescribed, prescribing, regression
from onnx import TensorProto, helper, numpy_helper
from trainer_nets import (
    bits_of,
    block,
    description_of,
    losses_of,
    options_of,
    toy_bert,
    trainer_of,
    weights_of,
)

import ortrain
from ortrain import SessionOptions
from ortrain.classic import TrainingSession
from ortrain.errors import InvalidArgumentError
from ortrain.trainer import ORTTrainer, ORTTrainerOptions, postprocess
from ortrain.trainer.amp import DynamicLossScaler, LossScaler
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer is for existing scripts:FutureWarning")

# Tolerance of float32 sums in another order.
CLOSE = 1e-5
# Required tolerance of a loss in mixed precision, relative to the float32 loss.
FOLLOWS = 0.02
CONFIGS: dict[str, Callable[[], _OptimizerConfig]] = {
    "adam": lambda: AdamConfig(lr=0.01),
    "lamb": lambda: LambConfig(lr=0.01),
    "sgd": lambda: SGDConfig(lr=0.1),
}
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS)
TOTAL, WARMUP = 10, 0.2
SCHEDULERS: dict[str, tuple[Callable[[], _LRScheduler], trainer_formulas.Schedule]] = {
    "constant": (lambda: ConstantWarmupLRScheduler(TOTAL, WARMUP), trainer_formulas.constant),
    "cosine": (lambda: CosineWarmupLRScheduler(TOTAL, 0.5, WARMUP), trainer_formulas.cosine),
    "linear": (lambda: LinearWarmupLRScheduler(TOTAL, WARMUP), trainer_formulas.linear),
    "poly": (lambda: PolyWarmupLRScheduler(TOTAL, 1e-7, 1.0, WARMUP), trainer_formulas.poly),
}


class Fixed(LossScaler):
    """A loss scaler with a fixed scale that records the trainer's calls."""

    def __init__(self, loss_scale: float) -> None:
        super().__init__(loss_scale)
        self.seen: list[tuple[bool, int, int]] = []

    def update(self, train_step_info: Any) -> float:
        info = train_step_info
        self.seen.append((bool(info.all_finite), info.step, info.optimization_step))
        return self.loss_scale


class Failing(LossScaler):
    """A scaler with a failing update."""

    def update(self, train_step_info: Any) -> float:
        raise ArithmeticError("no scale")


class Bare(LossScaler):
    """A scaler without an update."""


class RecordingSchedule(_LRScheduler):
    """A schedule that gives rates by update and records the trainer's calls."""

    def __init__(self, rates: Any) -> None:
        super().__init__()
        self.rates = rates
        self.seen: list[tuple[int, int]] = []

    def get_lr(self, train_step_info: Any) -> Any:
        self.seen.append((train_step_info.step, train_step_info.optimization_step))
        return self.rates(train_step_info.optimization_step) if callable(self.rates) else self.rates


def mixed(scaler: LossScaler | None = None, **more: Any) -> ORTTrainerOptions:
    """Return options of mixed precision."""
    return options_of({"mixed_precision": {"enabled": True, "loss_scaler": scaler}, **more})


def inputs_of(net: Net, seed: int = 0, rows: int = 12) -> list[npt.NDArray[Any]]:
    return list(net.batch(seed, rows).values())


# Rows of the checklist: F.


@EACH_CONFIG
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_f13_instantiate_orttrainer(scheduler: str | None, config: str, tmp_path: Path) -> None:
    """testInstantiateORTTrainer."""
    net, made = classifier(), CONFIGS[config]()
    scheduled = None if scheduler is None else SCHEDULERS[scheduler]
    options = {"lr_scheduler": scheduled[0]() if scheduled else None}
    trainer = trainer_of(net, made, options)
    for k in range(4):
        loss, logits = trainer.train_step(*inputs_of(net, k))
        assert (loss.shape, loss.dtype, logits.shape, logits.dtype) == ((), np.float32, (12, 10), np.float32)
        if scheduled:
            expected = made.lr * scheduled[1](k, TOTAL, WARMUP, made.lr)
            np.testing.assert_allclose(trainer.options.lr_scheduler.get_last_lr(), [expected], rtol=1e-7)
    loss, logits = trainer.eval_step(*inputs_of(net))
    assert (loss.shape, logits.shape) == ((), (12, 10))
    assert [(value.name, value.shape, value.dtype) for value in trainer.model_desc.inputs] == [
        ("x", ["N", 12], np.dtype(np.float32)),
        ("labels", ["N"], np.dtype(np.int64)),
    ]
    assert [(value.name, value.is_loss, value.dtype) for value in trainer.model_desc.outputs] == [
        ("loss", True, np.dtype(np.float32)),
        ("fc2", False, np.dtype(np.float32)),
    ]
    path = str(tmp_path / "trained.onnx")
    trainer.save_as_onnx(path)
    loaded = onnx.load(path)
    assert loaded == trainer._onnx_model
    saved = {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    assert bits_of(saved) == bits_of(weights_of(trainer))
    again = trainer_of(Net(loaded, net.weights, net.draw), made, options)
    assert again._onnx_model == trainer._onnx_model
    assert bits_of(weights_of(again)) == bits_of(weights_of(trainer))
    assert float(again.eval_step(*inputs_of(net))[0]) == float(loss)


@EACH_CONFIG
def test_f14_ort_deterministic_compute(config: str) -> None:
    """testORTDeterministicCompute."""
    net = toy_bert(dropout=0.2)
    first, second = (trainer_of(net, CONFIGS[config](), {"debug": {"deterministic_compute": True}}) for _ in range(2))
    assert losses_of(first, net, 4) == losses_of(second, net, 4)
    assert bits_of(weights_of(first)) == bits_of(weights_of(second))


@pytest.mark.parametrize("static", [False, True])
def test_f18_dynamic_shape(static: bool) -> None:
    """testORTTrainerDynamicShape."""
    net = classifier()
    trainer = trainer_of(net, sizes={"N": 6} if static else None)
    for rows in (6, 3, 7):
        if static and rows != 6:
            with pytest.raises(RuntimeError, match=r"x.*\[6, 12\]"):
                trainer.train_step(*inputs_of(net, rows=rows))
        else:
            assert trainer.train_step(*inputs_of(net, rows=rows))[1].shape == (rows, 10)
            assert trainer.eval_step(*inputs_of(net, rows=rows))[1].shape == (rows, 10)


def test_f20_frozen_weights() -> None:
    """testORTTrainerFrozenWeights."""
    net = classifier()
    whole, frozen = trainer_of(net), trainer_of(net, options={"utils": {"frozen_weights": ["fc1.w", "fc2.b"]}})
    for trainer in (whole, frozen):
        losses_of(trainer, net, 2)
    assert set(whole._training_session.get_model_state()["full_precision"]) == set(net.weights)
    assert set(frozen._training_session.get_model_state()["full_precision"]) == {"fc1.b", "fc2.w"}
    weights = weights_of(frozen)
    assert set(weights) == set(net.weights)
    for name, value in net.weights.items():
        assert (weights[name].tobytes() == value.tobytes()) == (name in ("fc1.w", "fc2.b")), name
    with pytest.raises(RuntimeError, match=r"fc3\.w.*did you mean"):
        trainer_of(net, options={"utils": {"frozen_weights": ["fc1.w", "fc3.w"]}})


def test_f30_unused_input() -> None:
    """testORTTrainerUnusedInput."""
    net = classifier()
    model = copy.deepcopy(net.model)
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, ["N", 3]))
    other = Net(model, net.weights, lambda rng, rows: net.draw(rng, rows) | {"unused": np.ones((rows, 3), np.float32)})
    plain, trainer = trainer_of(net), trainer_of(other)
    assert losses_of(trainer, other, 3) == losses_of(plain, net, 3)
    assert trainer.eval_step(*inputs_of(other))[0] == plain.eval_step(*inputs_of(net))[0]


GRAPHS = (
    "model_after_graph_transforms_path",
    "model_with_gradient_graph_path",
    "model_with_training_graph_path",
    "model_with_training_graph_after_optimization_path",
)


@pytest.mark.parametrize("written", [GRAPHS, GRAPHS[3:], ()], ids=["all", "last", "none"])
@EACH_CONFIG
def test_f31_training_graph_export(
    config: str, written: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """testTrainingGraphExport."""
    monkeypatch.chdir(tmp_path)
    net = toy_bert()
    paths = {name: str(tmp_path / f"{name}.onnx") if name in written else "" for name in GRAPHS}
    made = CONFIGS[config]()
    trainer = trainer_of(net, made, {"debug": {"graph_save_paths": paths}})
    assert losses_of(trainer, net, 2) == losses_of(trainer_of(net, made), net, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.onnx" for name in written)
    found = {name: onnx.load(paths[name]).graph for name in written}
    ops = {name: [node.op_type for node in graph.node] for name, graph in found.items()}
    results = {name: {out for node in graph.node for out in node.output} for name, graph in found.items()}
    if GRAPHS[0] in found:
        assert "LayerNormalization" in ops[GRAPHS[0]]
        assert "word.weight_grad" not in results[GRAPHS[0]]
        assert made.name not in ops[GRAPHS[0]] + ops[GRAPHS[1]]
        assert "word.weight_grad" in results[GRAPHS[1]]
        assert ops[GRAPHS[2]].count(made.name) == (1 if config == "lamb" else len(net.weights))
    if GRAPHS[3] in found:
        assert len(ops[GRAPHS[3]]) > len(net.model.graph.node), "the graph has gradients and updates"


# Rows of the checklist: B, on our own small BERT.


@pytest.mark.parametrize("static", [False, True])
def test_b1_toy_bert_basic_training(static: bool) -> None:
    """testToyBERTModelBasicTraining."""
    net = toy_bert()
    trainer = trainer_of(
        net, LambConfig(lr=0.02), outputs=["loss"], sizes={"batch": 12, "tokens": 8} if static else None
    )
    losses = []
    for k in range(10):
        loss = trainer.train_step(*inputs_of(net, k % 2))
        assert (type(loss), loss.shape) == (np.ndarray, ())
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


def test_b2_toy_bert_deterministic_check() -> None:
    """testToyBERTDeterministicCheck: the losses equal a session with the same settings."""
    net = toy_bert()
    trainer = trainer_of(net, LambConfig(lr=0.02))
    parameters = ortrain.classic.TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "LambOptimizer"
    parameters.weights_to_train = set(net.weights)
    parameters.optimizer_attributes_map = {name: {"max_norm_clip": 1.0} for name in net.weights}
    parameters.optimizer_int_attributes_map = {name: {"do_bias_correction": 0} for name in net.weights}
    session = TrainingSession(net.model.SerializeToString(), parameters)
    rate = np.array([0.02], np.float32)
    expected = [float(session.run(["loss"], {**net.batch(k), "Learning_Rate": rate})[0]) for k in range(10)]
    assert losses_of(trainer, net, 10) == expected


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_b3_toy_bert_lr_scheduler(scheduler: str) -> None:
    """testToyBERTModelLRScheduler: the losses equal a training with manual rates."""
    net = toy_bert()
    make, factor = SCHEDULERS[scheduler]
    trainer = trainer_of(net, AdamConfig(lr=0.01), {"lr_scheduler": make()})
    by_hand = trainer_of(net, AdamConfig(lr=0.01))
    for k in range(10):
        by_hand.optim_config.lr = 0.01 * factor(k, TOTAL, WARMUP, 0.01)
        expected = losses_of(by_hand, net, 1, k)
        np.testing.assert_allclose(losses_of(trainer, net, 1, k), expected, rtol=CLOSE)
        np.testing.assert_allclose(trainer.options.lr_scheduler.get_last_lr(), [by_hand.optim_config.lr], rtol=1e-7)


@pytest.mark.parametrize(
    "scaler", [lambda: None, DynamicLossScaler, lambda: Fixed(1024)], ids=["default", "dynamic", "custom"]
)
def test_b4_toy_bert_mixed_precision_loss_scaler(scaler: Callable[[], LossScaler | None]) -> None:
    """testToyBERTModelMixedPrecisionLossScaler: losses follow float32, with the same updates."""
    net = toy_bert()
    trainer, wide = trainer_of(net, AdamConfig(), mixed(scaler())), trainer_of(net, AdamConfig())
    updates = 0
    for k in range(10):
        (found,) = losses_of(trainer, net, 1, k)
        finite = bool(trainer._train_step_info.all_finite)
        expected = (wide.train_step if finite else wide.eval_step)(*inputs_of(net, k))[0]
        assert abs(found - expected) < FOLLOWS * expected, k
        updates += finite
    made = trainer.options.mixed_precision.loss_scaler
    assert made.input_name == trainer._training_session.loss_scale_input_name == "loss_scale"
    assert trainer._train_step_info.optimization_step == updates >= 8


@pytest.mark.parametrize("window", [1, 4, 7])
def test_b5_toy_bert_gradient_accumulation(window: int) -> None:
    """testToyBERTModelGradientAccumulation: each window updates the weights once, with the mean of its gradients."""
    net = toy_bert()
    trainer = trainer_of(net, AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": window}})
    whole = trainer_of(net, AdamConfig(lr=0.01))
    for _ in range(2):
        before = bits_of(weights_of(trainer))
        for _ in range(window):
            assert bits_of(weights_of(trainer)) == before
            found = losses_of(trainer, net, 1)
        # All batches of a window are equal, so one gradient equals the mean.
        np.testing.assert_allclose(found, losses_of(whole, net, 1), rtol=CLOSE)
        assert bits_of(weights_of(trainer)) != before
    assert trainer._train_step_info.step == 2 * window
    assert trainer._train_step_info.optimization_step == 2


def test_b9_frozen_weights_onnx() -> None:
    """testORTTrainerFrozenWeights (ONNX)."""
    net = toy_bert()
    frozen = ["word.weight", "attention.norm.bias"]
    trainer = trainer_of(net, LambConfig(), {"utils": {"frozen_weights": frozen}})
    losses_of(trainer, net, 2)
    state = trainer._training_session.get_state()
    assert not set(frozen) & set(state)
    assert {name for name in net.weights if name in state} == set(net.weights) - set(frozen)


def test_b10_toy_bert_save_as_onnx(tmp_path: Path) -> None:
    """testToyBERTSaveAsONNX."""
    net = toy_bert()
    trainer = trainer_of(net, LambConfig())
    path = str(tmp_path / "bert.onnx")
    trainer.save_as_onnx(path)
    loaded = onnx.load(path)
    again = trainer_of(Net(loaded, net.weights, net.draw), LambConfig())
    second = str(tmp_path / "again.onnx")
    again.save_as_onnx(second)
    assert onnx.load(second) == loaded
    names = [tensor.name for tensor in loaded.graph.initializer]
    assert names == [tensor.name for tensor in trainer._onnx_model.graph.initializer]
    trained = [name for name in (tensor.name for tensor in net.model.graph.initializer) if name in net.weights]
    assert names[-len(trained) :] == trained, "the trained initializers are last and in order"
    assert bits_of(weights_of(again)) == bits_of(weights_of(trainer)) == bits_of(net.weights)
    assert losses_of(again, net, 3) == losses_of(trainer, net, 3)


# Files.


@pytest.mark.parametrize("path", ["", "{folder}/", "{folder}/nowhere/model.onnx"])
def test_paths_that_are_not_there_warn(path: str, tmp_path: Path) -> None:
    trainer = trainer_of(classifier())
    with pytest.warns(UserWarning, match="^'path' is not valid or does not exist$"):
        trainer.save_as_onnx(path.format(folder=tmp_path))
    with pytest.raises(AssertionError, match="path"):
        trainer.save_as_onnx(tmp_path / "model.onnx")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_warns(tmp_path: Path) -> None:
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    with pytest.warns(UserWarning, match="^'path' is not valid or does not exist$"):
        trainer_of(classifier()).save_as_onnx(str(folder))
    assert list(folder.iterdir()) == []


# Construction.


def test_a_future_warning() -> None:
    net = classifier()
    with pytest.warns(FutureWarning, match=r"ortrain\.api"):
        ORTTrainer(net.model, description_of(net), AdamConfig(), options=options_of())


MODEL = classifier().model
DESCRIPTION = description_of(classifier())
ARGUMENTS: dict[str, tuple[list[Any], type[Exception], str]] = {
    "no model": ([None, DESCRIPTION, AdamConfig()], AssertionError, "'model'"),
    "bytes": ([MODEL.SerializeToString(), DESCRIPTION, AdamConfig()], ValueError, "bytes"),
    "a description that is none": ([MODEL, [("x", [1])], AdamConfig()], AssertionError, "'model_desc'.*list"),
    "an optimizer by its name": ([MODEL, DESCRIPTION, "AdamOptimizer"], AssertionError, "'optim_config'.*str"),
    "a loss beside the model": ([MODEL, DESCRIPTION, AdamConfig(), lambda y, t: y], AssertionError, "'loss_fn'"),
    "a loss of three": ([MODEL, DESCRIPTION, AdamConfig(), lambda y, t, w: y], AssertionError, "two parameters"),
    "a loss of unknown parameters": ([MODEL, DESCRIPTION, AdamConfig(), min], AssertionError, "two parameters"),
    "a loss that is none": ([MODEL, DESCRIPTION, AdamConfig(), 3], AssertionError, "'loss_fn'"),
    "options as a dict": ([MODEL, DESCRIPTION, AdamConfig(), None, {}], AssertionError, "'options'.*dict"),
    "arguments before the description": ([None, {"inputs": 3}, AdamConfig()], AssertionError, "'model'"),
    "an empty description": ([MODEL, {}, AdamConfig()], ValueError, "Invalid model_desc"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_are_refused(case: str) -> None:
    given, kind, words = ARGUMENTS[case]
    with pytest.raises(kind, match=words):
        ORTTrainer(*given)


X, LABELS = ("x", ["N", 12]), ("labels", ["N"])
LOSS, LOGITS = ("loss", [], True), ("fc2", ["N", 10])
DESCRIPTIONS: dict[str, tuple[list[Any], list[Any], type[Exception], str]] = {
    "an unknown input": ([X, ("lables", ["N"])], [LOSS], AssertionError, r"unknown input type \(lables\).*'labels'"),
    "an unknown output": ([X, LABELS], [LOSS, ("fc_2", [])], AssertionError, r"unknown output type \(fc_2\).*'fc2'"),
    "an input that is left out": ([X], [LOSS], ValueError, "labels"),
    "no loss": ([X, LABELS], [LOGITS], AssertionError, r"Only one loss output is supported \(0 were specified\)"),
    "an input twice": ([X, X, LABELS], [LOSS], ValueError, "'x' is described twice"),
    "an output twice": ([X, LABELS], [LOSS, LOGITS, LOGITS], ValueError, "'fc2' is described twice"),
    "a negative size": ([("x", ["N", -12]), LABELS], [LOSS], ValueError, "-12"),
    "another size": ([("x", ["N", 13]), LABELS], [LOSS], ValueError, r"x.*13.*12"),
    "another rank": ([("x", [12]), LABELS], [LOSS], ValueError, r"x.*\[12\]"),
    "another rank of an output": ([X, LABELS], [LOSS, ("fc2", [10])], ValueError, r"fc2.*\[10\]"),
    "a loss of many numbers": ([X, LABELS], [("fc2", ["N", 10], True)], RuntimeError, "fc2"),
    "a loss that is said to have many": ([X, LABELS], [("loss", [5], True)], ValueError, r"'loss'.*\[5\].*one number"),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_descriptions_that_are_refused(case: str) -> None:
    """A rejected description changes neither the model nor the options."""
    inputs, outputs, kind, words = DESCRIPTIONS[case]
    model, options = copy.deepcopy(MODEL), mixed()
    with pytest.raises(kind, match=words):
        ORTTrainer(model, {"inputs": inputs, "outputs": outputs}, AdamConfig(), options=options)
    assert model == MODEL
    assert options.mixed_precision.loss_scaler is None


def test_a_device_that_is_refused_makes_no_scaler() -> None:
    options = mixed(device={"id": "cuda"})
    with pytest.raises(ortrain.DeviceUnavailableError, match="'cuda'"):
        trainer_of(classifier(), options=options)
    assert options.mixed_precision.loss_scaler is None


def test_the_order_is_that_of_the_description() -> None:
    net = classifier()
    plain = trainer_of(net)
    other = ORTTrainer(
        copy.deepcopy(net.model),
        {"inputs": [LABELS, X], "outputs": [LOGITS, LOSS]},
        AdamConfig(),
        options=options_of(),
    )
    x, labels = inputs_of(net)
    loss, logits = plain.train_step(x, labels)
    found = other.train_step(labels, x)
    assert isinstance(found, list)
    assert [value.tobytes() for value in found] == [logits.tobytes(), loss.tobytes()]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world_size": 2}, "world_size"),
        ({"world_rank": 1}, "world_rank"),
        ({"data_parallel_size": 4}, "data_parallel_size"),
        ({"horizontal_parallel_size": 2}, "horizontal_parallel_size"),
        ({"pipeline_parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"pipeline_parallel": {"num_pipeline_micro_batches": 2}}, "num_pipeline_micro_batches"),
        ({"pipeline_parallel": {"pipeline_cut_info_string": "fc1"}}, "pipeline_cut_info_string"),
        ({"pipeline_parallel": {"sliced_schema": {"x": [4, 12]}}}, "sliced_schema"),
        ({"pipeline_parallel": {"sliced_axes": {"x": 0}}}, "sliced_axes"),
        ({"pipeline_parallel": {"sliced_tensor_names": ["x"]}}, "sliced_tensor_names"),
    ],
)
def test_distributed_sizes_are_refused(sizes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ortrain.UnsupportedError, match=words):
        trainer_of(classifier(), options={"distributed": sizes})


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
def test_options_of_one_process_that_change_nothing() -> None:
    net = classifier()
    others = {
        "distributed": {
            "allreduce_post_accumulation": True,
            "enable_adasum": True,
            "deepspeed_zero_optimization": {"stage": 1},
            "local_rank": 3,
        },
        "graph_transformer": {
            "attn_dropout_recompute": True,
            "gelu_recompute": True,
            "transformer_layer_recompute": True,
            "number_recompute_layers": 1,
        },
        "utils": {"memory_efficient_gradient": True, "run_symbolic_shape_infer": True},
        "debug": {"deterministic_compute": True},
        "session_options": SessionOptions(),
        "provider_options": {"CPUExecutionProvider": {"arena": 1}},
    }
    plain, other = trainer_of(net), trainer_of(net, options=others)
    assert losses_of(plain, net, 3) == losses_of(other, net, 3)
    assert bits_of(weights_of(plain)) == bits_of(weights_of(other))
    assert other._training_session.get_provider_options() == {"CPUExecutionProvider": {"arena": "1"}}
    assert other.state_dict()["partition_info"] == {}


def test_session_options_are_those_of_the_session() -> None:
    given = SessionOptions()
    given.memory_limit = 1000
    with pytest.raises(ortrain.MemoryLimitError):
        losses_of(trainer_of(classifier(), options={"session_options": given}), classifier(), 1)


# Devices.


def test_session_options_of_an_installed_onnxruntime_are_accepted() -> None:
    net, options = classifier(), onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    trainer = trainer_of(net, options={"session_options": options})
    assert losses_of(trainer, net, 2) == losses_of(trainer_of(net), net, 2)


def test_default_device_is_the_cpu_with_a_warning() -> None:
    net = classifier()
    for options in (None, ORTTrainerOptions(), ORTTrainerOptions({"device": {"mem_limit": 3}})):
        with pytest.warns(UserWarning, match="runs on the CPU") as caught:
            trainer = ORTTrainer(copy.deepcopy(net.model), description_of(net), AdamConfig(), options=options)
        assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]
        assert trainer._training_session.get_providers() == ["CPUExecutionProvider"]
        assert np.isfinite(losses_of(trainer, net, 1)[0])


def test_the_default_device_is_warned_of_once() -> None:
    """A second trainer with the same options does not warn: a warning would be an error here."""
    options = ORTTrainerOptions()
    with pytest.warns(UserWarning, match="runs on the CPU") as caught:
        trainer_of(classifier(), options=options)
    assert [warning.filename for warning in caught] == [trainer_nets.__file__]
    trainer_of(classifier(), options=options)


@pytest.mark.parametrize("options", [{"device": {"id": "cuda"}}, {}])
def test_a_default_device_that_is_chosen_is_not_here(options: Mapping[str, Any]) -> None:
    made = ORTTrainerOptions(options)
    made.device.id = "cuda"
    for chosen in (made, copy.deepcopy(made)):
        with pytest.raises(ortrain.DeviceUnavailableError, match=r"^device\.id is 'cuda': there is no device"):
            trainer_of(classifier(), options=chosen)


@pytest.mark.parametrize("device", ["gpu", "cpus"])
def test_names_that_no_device_has(device: str) -> None:
    with pytest.raises(ortrain.UnsupportedError, match=rf"'{device}'.*'cpu'.*'reference'"):
        trainer_of(classifier(), options={"device": {"id": device}})


def test_a_device_that_is_set_afterwards() -> None:
    options = ORTTrainerOptions()
    options.device.id = "cpu"
    assert trainer_of(classifier(), options=options)._training_session.get_providers() == ["CPUExecutionProvider"]
    options.device.id = "cuda:0"
    with pytest.raises(ortrain.DeviceUnavailableError, match="cuda:0"):
        trainer_of(classifier(), options=options)


def test_a_provider_is_as_good_as_a_device() -> None:
    given: dict[str, Any] = {"provider_options": {"CPUExecutionProvider": {}}}
    trainer = trainer_of(classifier(), options=ORTTrainerOptions(given))
    assert trainer._training_session.get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(ortrain.DeviceUnavailableError, match="'cuda'"):
        trainer_of(classifier(), options=ORTTrainerOptions({"device": {"id": "cuda"}, **given}))


def test_the_reference_is_a_device() -> None:
    net = classifier()
    plain, other = trainer_of(net), trainer_of(net, options={"device": {"id": "reference"}})
    assert other._training_session.get_providers() == ["reference"]
    np.testing.assert_allclose(losses_of(other, net, 3), losses_of(plain, net, 3), rtol=CLOSE)


def test_providers_that_are_not_here() -> None:
    with pytest.raises(RuntimeError, match="TPUExecutionProvider"):
        trainer_of(classifier(), options={"provider_options": {"TPUExecutionProvider": {}}})
    with pytest.raises(ValueError, match=r"provider_options\['CPUExecutionProvider'\] must be a dict.*got 3"):
        trainer_of(classifier(), options={"provider_options": {"CPUExecutionProvider": 3}})


# Post-processing.


def graph_of(
    nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, tuple[int, Sequence[Any]]], outputs: Sequence[str]
) -> onnx.ModelProto:
    """Return a model of nodes, with a matrix ``w`` of 3 x 4."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


SCORES = {"x": (TensorProto.FLOAT, ["N", 3]), "labels": (TensorProto.INT64, ["N"])}


def likelihood(op: str = "NegativeLogLikelihoodLoss", **attributes: Any) -> onnx.ModelProto:
    """Return a model with scores, a LogSoftmax, and a likelihood loss."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("LogSoftmax", ["scores"], ["log_prob"], axis=1),
        helper.make_node(op, ["log_prob", "labels"], ["loss"], **attributes),
        helper.make_node("Neg", ["log_prob"], ["surprise"]),
    ]
    return graph_of(nodes, SCORES, ["loss", "surprise"])


def test_nodes_are_named() -> None:
    model = classifier().model
    assert [node.name for node in postprocess.run_postprocess(model).graph.node] == [
        "Gemm_0",
        "Relu_1",
        "Gemm_2",
        "SoftmaxCrossEntropyLoss_3",
    ]


@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "nll_loss"])
def test_a_likelihood_is_fused(op: str) -> None:
    model = postprocess.run_postprocess(likelihood(op))
    nodes = {node.op_type: node for node in model.graph.node}
    fused = nodes["SparseSoftmaxCrossEntropy"]
    assert set(nodes) == {"MatMul", "SparseSoftmaxCrossEntropy", "Neg"}
    assert fused.name == "nll_loss_node_1"
    assert (list(fused.input), list(fused.output)) == (["scores", "labels"], ["loss", "log_prob"])
    order = [node.op_type for node in model.graph.node]
    assert order.index("SparseSoftmaxCrossEntropy") < order.index("Neg"), "readers follow the new node"


def test_a_fused_likelihood_trains_as_before() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((6, 3)).astype(np.float32), rng.integers(0, 4, 6)
    found = []
    for internal in (True, False):
        model = likelihood()
        options = options_of({"_internal_use": {"enable_internal_postprocess": internal}})
        description = {
            "inputs": [("x", ["N", 3]), ("labels", ["N"])],
            "outputs": [("loss", [], True), ("surprise", ["N", 4])],
        }
        trainer = ORTTrainer(model, description, SGDConfig(lr=0.5), options=options)
        kinds = {node.op_type for node in trainer._onnx_model.graph.node}
        assert ("SparseSoftmaxCrossEntropy" in kinds) is internal
        assert trainer._onnx_model is model, "changed in place"
        found.append([trainer.train_step(x, labels) for _ in range(3)])
    for fused, apart in zip(*found, strict=True):
        for one, other in zip(fused, apart, strict=True):
            np.testing.assert_allclose(one, other, rtol=CLOSE, atol=CLOSE)


def test_likelihoods_that_are_not_fused() -> None:
    other = likelihood()
    other.graph.node[1].op_type = "Softplus"
    del other.graph.node[1].attribute[:]
    ignoring = likelihood(ignore_index=2)
    for model in (other, ignoring):
        before = [node.op_type for node in model.graph.node]
        assert [node.op_type for node in postprocess.run_postprocess(model).graph.node] == before


def test_weights_of_classes_and_inputs_the_other_way_round() -> None:
    nodes = [
        helper.make_node("LogSoftmax", ["x"], ["log_prob"]),
        helper.make_node("nll_loss", ["labels", "log_prob", "w"], ["loss"]),
    ]
    (fused,) = postprocess.run_postprocess(graph_of(nodes, SCORES, ["loss"])).graph.node
    assert list(fused.input) == ["x", "labels", "w"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("like", ["x", "labels"])
def test_expanded_values_have_types(like: str, old: bool) -> None:
    shape = [helper.make_node("Shape", [like], ["shape"])]
    if old:
        minus = numpy_helper.from_array(np.array([-1], np.int64), "minus")
        one = numpy_helper.from_array(np.array([1], np.int64))
        shape = [
            helper.make_node("Shape", [like], ["own"]),
            helper.make_node("Constant", [], ["minus"], value=minus),
            helper.make_node("Reshape", ["own", "minus"], ["flat"]),
            helper.make_node("Shape", ["flat"], ["rank"]),
            helper.make_node("ConstantOfShape", ["rank"], ["ones"], value=one),
            helper.make_node("Mul", ["ones", "minus"], ["none"]),
            helper.make_node("Equal", ["flat", "none"], ["equal"]),
            helper.make_node("Where", ["equal", "ones", "flat"], ["shape"]),
        ]
    begin = helper.make_node("Constant", [], ["bias"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    nodes = [begin, *shape, helper.make_node("Expand", ["bias", "shape"], ["wide"])]
    (made,) = postprocess.run_postprocess(graph_of(nodes, SCORES, ["wide"])).graph.value_info
    dims = [dim.dim_param or dim.dim_value for dim in made.type.tensor_type.shape.dim]
    assert (made.name, dims) == ("wide", SCORES[like][1])
    assert made.type.tensor_type.elem_type == TensorProto.FLOAT, "the type of the expanded value"


def test_extra_postprocess() -> None:
    net = classifier()
    seen: list[list[str]] = []

    def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
        seen.append([node.name for node in model.graph.node])
        changed = copy.deepcopy(model)
        for tensor in changed.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
        return changed

    trainer = trainer_of(net, options={"_internal_use": {"extra_postprocess": doubled}})
    assert seen == [["Gemm_0", "Relu_1", "Gemm_2", "SoftmaxCrossEntropyLoss_3"]], "it runs after the internal passes"
    for name, value in weights_of(trainer).items():
        np.testing.assert_array_equal(value, 2 * net.weights[name])
    with pytest.raises(AssertionError, match=r"extra_postprocess.*NoneType"):
        trainer_of(net, options={"_internal_use": {"extra_postprocess": lambda model: None}})


# Inputs and outputs.


def test_ways_to_give_inputs() -> None:
    net = classifier()
    x, labels = inputs_of(net)
    ways: list[Callable[[ORTTrainer], Any]] = [
        lambda trainer: trainer.train_step(x, labels),
        lambda trainer: trainer.train_step([x, labels]),
        lambda trainer: trainer.train_step(x, labels=labels),
        lambda trainer: trainer.train_step(labels=labels, x=x),
        lambda trainer: trainer.train_step(x=x, labels=labels, weights=labels),
        lambda trainer: trainer.train_step(np.asfortranarray(x), labels),
        lambda trainer: trainer.train_step(ortrain.OrtValue.ortvalue_from_numpy(x), labels.tolist()),
    ]
    found = [[value.tobytes() for value in way(trainer_of(net))] for way in ways]
    assert all(each == found[0] for each in found)


INPUTS: dict[str, tuple[Callable[[Any, Any], tuple[list[Any], dict[str, Any]]], type[Exception], str]] = {
    "one": (lambda x, y: ([x], {}), AssertionError, "got 1$"),
    "three": (lambda x, y: ([x, y, y], {}), AssertionError, "got 3$"),
    "none": (lambda x, y: ([], {}), AssertionError, "got 0$"),
    "one twice": (lambda x, y: ([y], {"x": x}), AssertionError, "'x' is given twice"),
    "a tuple": (lambda x, y: ([(x, y)], {}), AssertionError, "got 1$"),
    "float64": (lambda x, y: ([x.astype(np.float64), y], {}), RuntimeError, "x"),
    "labels of float32": (lambda x, y: ([x, y.astype(np.float32)], {}), RuntimeError, "labels"),
    "another rank": (lambda x, y: ([x[None], y], {}), RuntimeError, "x.*numbers of axes"),
    "another size": (lambda x, y: ([x[:, :11], y], {}), RuntimeError, r"x.*11"),
    "two sizes of a name": (lambda x, y: ([x, y[:5]], {}), AssertionError, "Mismatch in dynamic shape N"),
    "a label too large": (lambda x, y: ([x, y + 10], {}), RuntimeError, "10"),
    "a text": (lambda x, y: (["x", y], {}), RuntimeError, "arrays of"),
    "nothing": (lambda x, y: ([None, y], {}), TypeError, "None"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_are_refused(case: str) -> None:
    """No weight changes, but the call counts as a step."""
    net = classifier()
    trainer = trainer_of(net)
    change, kind, words = INPUTS[case]
    args, kwargs = change(*inputs_of(net))
    before = bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer))
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(kind, match=words):
            step(*args, **kwargs)
    assert bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer)) == before
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (1, 0)


def test_a_size_of_an_output_that_no_input_has() -> None:
    net = classifier()
    description = {"inputs": [X, LABELS], "outputs": [LOSS, ("fc2", ["M", 10])]}
    trainer = ORTTrainer(copy.deepcopy(net.model), description, AdamConfig(), options=options_of())
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(KeyError, match="M"):
            step(*inputs_of(net))
    trainer._train_step_info.fetches = ["loss"]
    assert trainer.train_step(*inputs_of(net)).shape == ()


@pytest.mark.parametrize("dims", [["N", 10], ["M", None]], ids=["known", "unknown"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_size_of_an_output_that_the_run_does_not_give(config: str, dims: list[Any]) -> None:
    """The error precedes any change of weights, and valid inputs continue the training."""
    net = classifier()
    model = copy.deepcopy(net.model)
    (output,) = (value for value in model.graph.output if value.name == "fc2")
    output.CopyFrom(helper.make_tensor_value_info("fc2", TensorProto.FLOAT, dims))
    description = {"inputs": [X, LABELS], "outputs": [LOSS, ("fc2", [6, 10])]}
    trainer = ORTTrainer(model, description, CONFIGS[config](), options=options_of())
    before = bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer))
    words = (
        r"output 'fc2' has the shape \[6, 10\] in model_desc, \[6, 10\] for these inputs, "
        r"but the model computes \[12, 10\]"
    )
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(InvalidArgumentError, match=words):
            step(*inputs_of(net))
    assert bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer)) == before
    plain = trainer_of(net, CONFIGS[config]())
    for k in range(2):
        found, expected = (each.train_step(*inputs_of(net, k, 6)) for each in (trainer, plain))
        assert [value.tobytes() for value in found] == [value.tobytes() for value in expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_size_of_an_output_of_a_narrow_type(dtype: str) -> None:
    net = classifier()
    description = {"inputs": [X, LABELS], "outputs": [LOSS, ("fc2", [6, 10])]}
    trainer = ORTTrainer(net.model, description, AdamConfig(), options=mixed(), mixed_precision_dtype=dtype)
    with pytest.raises(InvalidArgumentError, match=r"output 'fc2'.*the model computes \[12, 10\]"):
        trainer.train_step(*inputs_of(net))
    assert trainer.train_step(*inputs_of(net, rows=6))[1].dtype.name == dtype


def classifier_with_nonzero_indices() -> onnx.ModelProto:
    """Return the classifier with the positions of nonzero labels. Only a run knows the number of positions."""
    model = copy.deepcopy(classifier().model)
    model.graph.node.append(helper.make_node("NonZero", ["labels"], ["places"]))
    model.graph.output.append(helper.make_tensor_value_info("places", TensorProto.INT64, None))
    return model


def test_a_size_of_an_output_that_follows_from_values() -> None:
    """The output has the size from the run, for any size in the description."""
    net = classifier()
    for size in ("N", 3):
        description = {"inputs": [X, LABELS], "outputs": [LOSS, ("places", [1, size])]}
        trainer = ORTTrainer(classifier_with_nonzero_indices(), description, AdamConfig(), options=options_of())
        plain = trainer_of(net)
        for k in range(2):
            x, labels = inputs_of(net, k)
            loss, places = trainer.train_step(x, labels)
            assert places.tolist() == [np.flatnonzero(labels).tolist()]
            assert loss == plain.train_step(x, labels)[0]


@pytest.mark.parametrize("shape", [["N"], [2, "N"], ["N", "N"], [1, 1, "N"], []])
def test_sizes_beside_one_that_follows_from_values(shape: list[Any]) -> None:
    """The fixed sizes and the rank are compared before weights change, at each call."""
    net = classifier()
    description = {"inputs": [X, LABELS], "outputs": [LOSS, ("places", shape)]}
    trainer = ORTTrainer(classifier_with_nonzero_indices(), description, AdamConfig(), options=options_of())
    before = bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer))
    for step in (trainer.train_step, trainer.eval_step, trainer.train_step):
        with pytest.raises(InvalidArgumentError, match=r"output 'places' has the shape .*the model computes \[1, \?\]"):
            step(*inputs_of(net))
    assert bits_of(trainer.state_dict()["optimizer"]) | bits_of(weights_of(trainer)) == before
    assert trainer._train_step_info.optimization_step == 0
    if shape == ["N", "N"]:
        x, labels = inputs_of(net, rows=1)
        assert trainer.train_step(x, labels + (labels == 0))[1].tolist() == [[0]], "a batch of one row fits"
        with pytest.raises(InvalidArgumentError, match="'places'"):
            trainer.train_step(*inputs_of(net))


def test_outputs_are_fresh() -> None:
    net = classifier()
    trainer = trainer_of(net, SGDConfig(lr=0.0))
    first = trainer.train_step(*inputs_of(net))
    kept = [value.copy() for value in first]
    second = trainer.train_step(*inputs_of(net, 1))
    assert [value.tobytes() for value in first] == [value.tobytes() for value in kept]
    assert not any(np.shares_memory(*pair) for pair in zip(first, second, strict=True))
    assert all(value.flags.writeable for value in first)
    assert first[1].tobytes() != second[1].tobytes()


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_shapes_of_a_loss(shape: list[int]) -> None:
    """The loss has the shape of the description for any one-element shape of the model's loss."""
    for net in (regression(), regression(targets=1, axes=[0], loss_shape=[1])):
        description = description_of(net, ["loss"])
        description["outputs"] = [("loss", shape, True)]
        trainer = ORTTrainer(net.model, description, AdamConfig(), options=options_of())
        assert trainer.train_step(*inputs_of(net)).shape == tuple(shape)
        assert trainer.eval_step(*inputs_of(net)).shape == tuple(shape)


@EACH_CONFIG
def test_a_float64_model_trains(config: str) -> None:
    net = regression(dtype=np.float64)
    trainer = trainer_of(net, CONFIGS[config]())
    losses = [trainer.train_step(*inputs_of(net))[0] for _ in range(5)]
    assert losses[0].dtype == np.float64
    assert losses[-1] < losses[0]
    assert {value.dtype for value in weights_of(trainer).values()} == {np.dtype(np.float64)}


def test_integer_settings_equal_floats() -> None:
    net = classifier()
    whole = trainer_of(net, AdamConfig([{"params": ["fc1.w"], "lambda_coef": 1}], lr=1, max_norm_clip=1, epsilon=1))
    floats = trainer_of(
        net, AdamConfig([{"params": ["fc1.w"], "lambda_coef": 1.0}], lr=1.0, max_norm_clip=1.0, epsilon=1.0)
    )
    assert losses_of(whole, net, 3) == losses_of(floats, net, 3)


def test_settings_that_are_no_numbers() -> None:
    config = AdamConfig()
    config.defaults["epsilon"] = "small"
    with pytest.raises(ValueError, match=r"epsilon.*'small'"):
        trainer_of(classifier(), config)


# Fetches.


def test_fetches() -> None:
    """A training returns the order of the fetches, an evaluation the order of the description."""
    net = classifier()
    trainer, plain = trainer_of(net), trainer_of(net)
    expected = plain.train_step(*inputs_of(net))
    trainer._train_step_info.fetches = ["fc2", "loss"]
    logits, loss = trainer.train_step(*inputs_of(net))
    assert [loss.tobytes(), logits.tobytes()] == [value.tobytes() for value in expected]
    assert bits_of(weights_of(trainer)) == bits_of(weights_of(plain)), "weights are trained"
    assert [value.shape for value in trainer.eval_step(*inputs_of(net))] == [(), (12, 10)]
    trainer._train_step_info.fetches = ["loss"]
    assert trainer.train_step(*inputs_of(net)).shape == ()
    assert trainer._train_step_info.optimization_step == 2


@pytest.mark.parametrize("fetches", [["fc3"], ["loss", "loss"], ["loss", "fc1"], "loss", [1], {"loss"}, 3])
def test_fetches_that_are_refused(fetches: Any) -> None:
    net = classifier()
    trainer = trainer_of(net)
    before = bits_of(weights_of(trainer))
    trainer._train_step_info.fetches = fetches
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(RuntimeError, match="fetches"):
            step(*inputs_of(net))
    assert bits_of(weights_of(trainer)) == before


def test_fetches_in_a_window_go_on_accumulating() -> None:
    net = classifier()
    window = {"batch": {"gradient_accumulation_steps": 2}}
    fetching, plain = trainer_of(net, options=window), trainer_of(net, options=window)
    for k in range(4):
        fetching._train_step_info.fetches = ["fc2"] if k % 2 == 0 else []
        fetching.train_step(*inputs_of(net, k))
        plain.train_step(*inputs_of(net, k))
    assert bits_of(fetching.state_dict()) == bits_of(plain.state_dict())


def test_fetches_without_all_inputs() -> None:
    """With fetches the trainer does not check the number of inputs; the session names the missing inputs."""
    net = classifier()
    trainer = trainer_of(net)
    trainer._train_step_info.fetches = ["fc2"]
    with pytest.raises(RuntimeError, match="labels"):
        trainer.eval_step(inputs_of(net)[0])


# Windows.


def test_calls_that_fail_shift_no_window() -> None:
    """Failed calls count as steps. An update follows three successful calls, and uses the mean of their gradients."""
    net, window = classifier(), {"batch": {"gradient_accumulation_steps": 3}}
    failing, plain = trainer_of(net, options=window), trainer_of(net, options=window)
    failures = 0
    for k in range(7):
        for _ in range(k % 3):
            failures += 1
            with pytest.raises(AssertionError, match=r"got 1$"):
                failing.train_step(inputs_of(net, k)[0])
        assert losses_of(failing, net, 1, k) == losses_of(plain, net, 1, k)
        assert bits_of(weights_of(failing)) == bits_of(weights_of(plain))
    infos = failing._train_step_info, plain._train_step_info
    assert [(info.step, info.optimization_step) for info in infos] == [(7 + failures, 2), (7, 2)]


def test_scaler_is_updated_after_successful_calls() -> None:
    net, scaler = classifier(), Fixed(64)
    trainer = trainer_of(net, options=mixed(scaler, batch={"gradient_accumulation_steps": 2}))
    with pytest.raises(AssertionError, match=r"got 1$"):
        trainer.train_step(inputs_of(net)[0])
    losses_of(trainer, net, 4)
    assert scaler.seen == [(True, 3, 0), (True, 5, 1)]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (3, 2)])
def test_a_window_is_that_of_the_session(first: int, second: int) -> None:
    """A changed window size applies to the next session, which a loaded state creates."""
    net = classifier()
    changed, plain = (trainer_of(net, options={"batch": {"gradient_accumulation_steps": first}}) for _ in range(2))
    changed.options.batch.gradient_accumulation_steps = second
    losses_of(changed, net, 2 * first)
    losses_of(plain, net, 2 * first)
    assert bits_of(changed.state_dict()) == bits_of(plain.state_dict())
    other = trainer_of(net, options={"batch": {"gradient_accumulation_steps": second}})
    for trainer in (changed, other):
        trainer.load_state_dict(plain.state_dict())
        losses_of(trainer, net, 2 * second)
        assert trainer._train_step_info.optimization_step == 4
    assert bits_of(changed.state_dict()) == bits_of(other.state_dict())


# Evaluation.


def test_an_evaluation_changes_nothing() -> None:
    net = toy_bert(dropout=0.5)
    window = {"batch": {"gradient_accumulation_steps": 3}}
    disturbed, plain = trainer_of(net, options=window), trainer_of(net, options=window)
    for k in range(6):
        assert losses_of(disturbed, net, 1, k) == losses_of(plain, net, 1, k)
        before = bits_of(weights_of(disturbed))
        first, second = (disturbed.eval_step(*inputs_of(net, 9)) for _ in range(2))
        assert [value.tobytes() for value in first] == [value.tobytes() for value in second], "nothing is dropped"
        assert bits_of(weights_of(disturbed)) == before
        assert disturbed._train_step_info.step == k + 1
    assert bits_of(disturbed.state_dict()) == bits_of(plain.state_dict())


# Schedules.


def test_a_schedule_is_asked_at_every_step() -> None:
    """Each step asks the schedule with the number of updates so far, also within a window."""
    net, schedule = classifier(), RecordingSchedule(lambda t: [0.01 * (t + 1)])
    trainer = trainer_of(net, options={"lr_scheduler": schedule, "batch": {"gradient_accumulation_steps": 2}})
    losses_of(trainer, net, 5)
    assert schedule.seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert schedule.get_last_lr() == [0.03]


def test_a_first_rate_of_zero_counts() -> None:
    net = classifier()
    trainer = trainer_of(net, options={"lr_scheduler": RecordingSchedule(lambda t: [0.01 * t])})
    before = bits_of(weights_of(trainer))
    losses_of(trainer, net, 1)
    assert bits_of(weights_of(trainer)) == before
    moments = trainer.state_dict()["optimizer"]["fc1.w"]
    assert moments["Update_Count"].tolist() == [2]
    assert moments["Moment_1"].any()


@pytest.mark.parametrize(
    "rates", [[], [0.1, 0.2], [np.nan], [np.inf], [-0.1], [1e39], [None], 0.1, None, ["much"], ["0.1"], [[0.1, 0.2]]]
)
def test_schedules_that_are_refused(rates: Any) -> None:
    net = classifier()
    trainer = trainer_of(net, options={"lr_scheduler": RecordingSchedule(rates)})
    before = bits_of(weights_of(trainer))
    with pytest.raises(ValueError, match="learning rate from the scheduler"):
        trainer.train_step(*inputs_of(net))
    assert bits_of(weights_of(trainer)) == before
    assert trainer._train_step_info.optimization_step == 0


# Mixed precision.


@EACH_CONFIG
def test_mixed_precision_follows_float32(config: str) -> None:
    net = classifier()
    trainer, wide = trainer_of(net, CONFIGS[config](), mixed()), trainer_of(net, CONFIGS[config]())
    np.testing.assert_allclose(losses_of(trainer, net, 20), losses_of(wide, net, 20), rtol=FOLLOWS)
    loss, logits = trainer.train_step(*inputs_of(net))
    assert (loss.dtype, logits.dtype) == (np.float32, np.float16)
    assert [output.dtype_amp for output in trainer.model_desc.outputs] == [None, np.dtype(np.float16)]
    info = trainer._train_step_info
    assert (info.all_finite.shape, info.all_finite.dtype, bool(info.all_finite)) == ((1,), np.bool_, True)
    assert trainer.model_desc.loss_scale_input.name == "loss_scale"
    assert trainer.model_desc.all_finite.name == "all_gradients_finite"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [block, toy_bert])
def test_mixed_precision_follows_float32_on_a_transformer(make: Callable[[], Net], dtype: str) -> None:
    """Adam takes 50 steps on the same batch, so that the loss falls."""
    net = make()
    trainer = trainer_of(net, AdamConfig(lr=0.003), mixed(Fixed(1024)), mixed_precision_dtype=dtype)
    wide = trainer_of(net, AdamConfig(lr=0.003))
    found, expected = ([float(each.train_step(*inputs_of(net))[0]) for _ in range(50)] for each in (trainer, wide))
    np.testing.assert_allclose(found, expected, rtol=FOLLOWS)
    assert expected[-1] < 0.9 * expected[0]
    assert trainer._train_step_info.optimization_step == 50


def test_default_loss_scaler_is_created_and_shared() -> None:
    options = mixed()
    first = trainer_of(classifier(), options=options)
    made = options.mixed_precision.loss_scaler
    assert isinstance(made, DynamicLossScaler)
    second = trainer_of(classifier(), options=options)
    assert first._scaler is second._scaler is made


def test_a_scaler_without_mixed_precision() -> None:
    with pytest.raises(ValueError, match=r"loss_scaler.*mixed_precision\.enabled"):
        trainer_of(classifier(), options={"mixed_precision": {"loss_scaler": DynamicLossScaler()}})


def test_a_dynamic_scaler_follows_overflows() -> None:
    """Steps with infinite gradients change no bit, count as no update, and halve the scale down to the minimum."""
    net = prescribing({"w": np.ones((3, 4), np.float32)})
    scaler = DynamicLossScaler(loss_scale=8.0, up_scale_window=2, min_loss_scale=2.0, max_loss_scale=16.0)
    trainer = trainer_of(net, AdamConfig(lr=0.01), mixed(scaler))
    expected, updates = 8.0, 0
    stable = 0
    for overflows in [False, False, False, False, True, True, True, True, False, True, False, False]:
        gradient = np.full((3, 4), 1e30 if overflows else 0.5, np.float32)
        before = bits_of(weights_of(trainer))
        trainer.train_step(*prescribed({"w": gradient}).values())
        stable = 0 if overflows else stable + 1
        if overflows:
            expected = max(2.0, expected / 2)
        elif stable == 2:
            expected, stable = min(16.0, 2 * expected), 0
        updates += not overflows
        assert scaler.loss_scale == expected
        assert (bits_of(weights_of(trainer)) == before) is overflows
        assert bool(trainer._train_step_info.all_finite) is not overflows
        assert trainer._train_step_info.optimization_step == updates
    assert trainer.state_dict()["optimizer"]["w"]["Update_Count"].tolist() == [updates + 1]


def test_custom_scaler_is_updated_after_optimizer_steps() -> None:
    net, scaler = classifier(), Fixed(64)
    trainer = trainer_of(net, options=mixed(scaler, batch={"gradient_accumulation_steps": 2}))
    losses_of(trainer, net, 5)
    assert scaler.seen == [(True, 2, 0), (True, 4, 1)]
    trainer._train_step_info.fetches = ["fc2"]
    trainer.train_step(*inputs_of(net))
    assert len(scaler.seen) == 2, "a step with fetches does not update the scaler"
    assert trainer._train_step_info.optimization_step == 3


def test_an_update_counts_despite_an_error_of_the_scaler() -> None:
    net = classifier()
    trainer = trainer_of(net, options=mixed(Failing(64)))
    with pytest.raises(ArithmeticError, match="no scale"):
        trainer.train_step(*inputs_of(net))
    assert trainer._train_step_info.optimization_step == 1
    assert trainer.state_dict()["optimizer"]["fc1.w"]["Update_Count"].tolist() == [2]


@pytest.mark.parametrize("kind", [Bare, LossScaler])
def test_a_scaler_without_an_update(kind: type[LossScaler]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"loss_scaler: {kind.__name__} does not override update"):
        trainer_of(classifier(), options=mixed(kind(64)))


def test_a_scaler_whose_update_is_set() -> None:
    scaler: Any = Bare(64)
    scaler.update = lambda train_step_info: 64.0
    trainer = trainer_of(classifier(), options=mixed(scaler))
    losses_of(trainer, classifier(), 1)
    assert trainer._train_step_info.optimization_step == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_of_a_float64_model(dtype: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"weight '.+' is float64.*mixed_precision\.enabled"):
        trainer_of(regression(dtype=np.float64), options=mixed(), mixed_precision_dtype=dtype)


@pytest.mark.parametrize("scaler", [None, 64.0])
@EACH_CONFIG
def test_bfloat16_follows_float32(config: str, scaler: float | None) -> None:
    net = classifier()
    made = None if scaler is None else Fixed(scaler)
    trainer = trainer_of(net, CONFIGS[config](), mixed(made), mixed_precision_dtype="bfloat16")
    wide = trainer_of(net, CONFIGS[config]())
    np.testing.assert_allclose(losses_of(trainer, net, 20), losses_of(wide, net, 20), rtol=FOLLOWS)
    assert trainer.options.mixed_precision.loss_scaler is made
    assert trainer._train_step_info.optimization_step == 20
    assert trainer.train_step(*inputs_of(net))[1].dtype.name == "bfloat16"
    assert trainer.model_desc.outputs[1].dtype_amp.name == "bfloat16"


def test_bfloat16_needs_no_scale_for_large_numbers() -> None:
    net = prescribing({"w": np.ones((3, 4), np.float32)})
    trainer = trainer_of(net, SGDConfig(lr=2.0**-90), mixed(), mixed_precision_dtype="bfloat16")
    trainer.train_step(*prescribed({"w": np.full((3, 4), 2.0**90, np.float32)}).values())
    assert bool(trainer._train_step_info.all_finite)
    np.testing.assert_array_equal(weights_of(trainer)["w"], 0)


@pytest.mark.parametrize(
    ("enabled", "dtype", "words"),
    [(True, "bfloat", "'bfloat16'"), (True, "float32", "float32"), (False, "bfloat16", "enabled")],
)
def test_precisions_that_are_refused(enabled: bool, dtype: str, words: str) -> None:
    options = {"mixed_precision": {"enabled": enabled}}
    with pytest.raises(ValueError, match=words):
        trainer_of(classifier(), options=options, mixed_precision_dtype=dtype)


# Two trainers.


def test_two_trainers_of_one_options_object() -> None:
    """Each trainer trains its own weights. The shared scheduler and scaler depend only on their argument."""
    net, other = classifier(), regression()
    options = options_of({"lr_scheduler": LinearWarmupLRScheduler(TOTAL, WARMUP)})
    apart = [
        trainer_of(each, options={"lr_scheduler": LinearWarmupLRScheduler(TOTAL, WARMUP)}) for each in (net, other)
    ]
    expected = [losses_of(trainer, each, 4) for trainer, each in zip(apart, (net, other), strict=True)]
    first, second = trainer_of(net, options=options), trainer_of(other, options=options)
    found: tuple[list[float], list[float]] = ([], [])
    for k in range(4):
        found[0].extend(losses_of(first, net, 1, k))
        found[1].extend(losses_of(second, other, 1, k))
    assert list(found) == expected


# PyTorch, as a module with the functions that a trainer uses.


class Tensor:
    """A tensor in the memory of an array."""

    def __init__(self, array: npt.NDArray[Any], device: str = "cpu", layout: str = "strided") -> None:
        self.array, self.device, self.layout = array, types.SimpleNamespace(type=device), layout
        self.dtype = array.dtype

    def detach(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def __bool__(self) -> bool:
        return bool(self.array)

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class TorchModule:
    """A module of layers."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub of torch that the user has imported."""
    module = types.ModuleType("torch")
    names = {"Tensor": Tensor, "from_numpy": Tensor, "bool": np.dtype(bool), "strided": "strided"}
    vars(module).update(names, nn=types.SimpleNamespace(Module=TorchModule))
    monkeypatch.setitem(__import__("sys").modules, "torch", module)
    return module


def test_outputs_have_the_type_of_the_inputs(torch: Any) -> None:
    net = classifier()
    plain, trainer = trainer_of(net), trainer_of(net)
    x, labels = inputs_of(net)
    for given in ([Tensor(x), Tensor(labels)], [Tensor(np.asfortranarray(x)), labels]):
        found, expected = trainer.train_step(*given), plain.train_step(x, labels)
        assert [type(value) for value in found] == [Tensor, Tensor]
        assert [value.array.tobytes() for value in found] == [value.tobytes() for value in expected]
        assert type(trainer.eval_step(*given)[1]) is Tensor
    assert type(trainer.train_step(x, labels)[0]) is np.ndarray


def test_tensors_are_read_where_they_lie(torch: Any) -> None:
    from ortrain.trainer._values import native_of_torch

    x = np.zeros((2, 3), np.float32)
    value = native_of_torch("x", Tensor(x))
    x[1, 2] = 5
    assert value.array()[1, 2] == 5


def test_mixed_precision_answers_in_tensors(torch: Any) -> None:
    net = classifier()
    trainer = trainer_of(net, options=mixed())
    loss, logits = trainer.train_step(*map(Tensor, inputs_of(net)))
    assert (loss.dtype, logits.dtype) == (np.float32, np.float16)
    assert type(trainer._train_step_info.all_finite) is Tensor
    assert trainer._train_step_info.optimization_step == 1


def test_tensors_elsewhere_are_refused(torch: Any) -> None:
    net = classifier()
    trainer = trainer_of(net)
    x, labels = inputs_of(net)
    with pytest.raises(ortrain.UnsupportedError, match="'x'"):
        trainer.train_step(Tensor(x, "cuda"), labels)


def test_sparse_tensors_are_refused(torch: Any) -> None:
    net = classifier()
    x, labels = inputs_of(net)
    with pytest.raises(ortrain.UnsupportedError, match=r"'x'.*sparse_coo.*to_dense"):
        trainer_of(net).train_step(Tensor(x, layout="sparse_coo"), labels)


def test_torch_is_not_imported() -> None:
    import subprocess
    import sys

    script = (
        "import sys, ortrain.trainer\nassert not {'torch', 'h5py', 'cerberus', 'onnx'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
