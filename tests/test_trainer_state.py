"""States of ORTTrainer: contents, loading, errors, files, exact resume, and conversion to ortrain.api."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from classic_models import Net, classifier, regression
from onnx import numpy_helper
from trainer_nets import (
    bits_of,
    description_of,
    flat,
    losses_of,
    normalizing,
    options_of,
    toy_bert,
    trainer_of,
    weights_of,
)

import ortrain
from ortrain import _seeds
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.trainer import ORTTrainer, _checkpoint_storage, _flat_checkpoint, checkpoint
from ortrain.trainer._state import draws_random_numbers
from ortrain.trainer.amp import DynamicLossScaler
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import CosineWarmupLRScheduler

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer is for existing scripts:FutureWarning")

# Tolerance of steps of another session with differently written formulas: float32 rounds each step by 6e-8.
CLOSE = 1e-5
CONFIGS: dict[str, Callable[[], _OptimizerConfig]] = {
    "adam": lambda: AdamConfig(lr=0.01, lambda_coef=0.01),
    "lamb": lambda: LambConfig(lr=0.01, lambda_coef=0.01),
    "sgd": lambda: SGDConfig(lr=0.1),
}
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS)
NOT_READY = (
    "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least once before "
    "calling ORTTrainer.state_dict()."
)
TRAINER_OPTIONS = {
    "mixed_precision": False,
    "zero_stage": 0,
    "world_rank": 0,
    "world_size": 1,
    "optimizer_name": "AdamOptimizer",
    "data_parallel_size": 1,
    "horizontal_parallel_size": 1,
}


def without_session(net: Net) -> ORTTrainer:
    """Return a trainer without a session, like a trainer before the export at its first step."""
    trainer = trainer_of(net)
    trainer._training_session = trainer._train_io_binding = trainer._eval_io_binding = None
    return trainer


def begin(trainer: ORTTrainer) -> None:
    """Create the session of a trainer without one."""
    assert trainer._onnx_model is not None
    trainer._init_onnx_model(trainer._onnx_model)


class Backend:
    """Stub of a session with these states."""

    def __init__(self, model: Any = None, optimizer: Any = None, partition: Any = None) -> None:
        self.states = {"full_precision": model or {}}
        self.optimizer, self.partition = optimizer or {}, partition or {}
        self._classic = types.SimpleNamespace(gathered=dict, running_statistics=dict)

    def get_model_state(self) -> Any:
        return copy.deepcopy(self.states)

    def get_optimizer_state(self) -> Any:
        return copy.deepcopy(self.optimizer)

    def get_partition_info_map(self) -> Any:
        return copy.deepcopy(self.partition)


# C: functions of checkpoints.


def test_c1_empty_state_dict_when_training_session_uninitialized() -> None:
    trainer = without_session(classifier())
    for pytorch_format in (False, True):
        with pytest.warns(UserWarning, match="not initialized yet") as caught:
            assert trainer.state_dict(pytorch_format) == {}
        assert [str(warning.message) for warning in caught] == [NOT_READY]


WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
OF_WEIGHT = {"Moment_1": WEIGHT, "Moment_2": WEIGHT + 1, "Update_Count": np.array([5])}
PARTITION = {"a": {"original_dim": [2, 3], "megatron_row_partition": [-1]}}
BACKENDS: dict[str, tuple[Any, Any]] = {
    "empty_model": ({}, {}),
    "model": ({"a": WEIGHT, "b": WEIGHT[0]}, {}),
    "optimizer": ({}, {"a": OF_WEIGHT, "shared_optimizer_state": {"Step": np.array([5])}}),
    "empty_optimizer": ({"a": WEIGHT}, {}),
    "partition_info": ({"a": WEIGHT}, {"a": OF_WEIGHT}),
    "all": ({"a": WEIGHT, "b": WEIGHT[0]}, {"a": OF_WEIGHT, "b": OF_WEIGHT}),
}


@pytest.mark.parametrize("case", BACKENDS)
def test_c2_training_session_provides_states(case: str) -> None:
    """test_training_session_provides_…_states."""
    model, optimizer = BACKENDS[case]
    trainer = trainer_of(classifier())
    trainer._training_session = Backend(model, optimizer, PARTITION)  # type: ignore[assignment]
    expected: dict[str, Any] = {
        "model": {"full_precision": model},
        "optimizer": optimizer,
        "trainer_options": dict(TRAINER_OPTIONS),
        "train_step_info": {"optimization_step": 0, "step": 0},
    }
    if case in ("partition_info", "all"):
        trainer.options.distributed.deepspeed_zero_optimization.stage = 1
        expected["trainer_options"]["zero_stage"] = 1
        expected["partition_info"] = PARTITION
    assert bits_of(trainer.state_dict()) == bits_of(expected)
    assert list(trainer.state_dict()) == list(expected)


@pytest.mark.parametrize("case", ["model", "optimizer"])
def test_c3_pytorch_format(case: str) -> None:
    model, optimizer = BACKENDS[case]
    trainer = trainer_of(classifier())
    trainer._training_session = Backend(model, optimizer)  # type: ignore[assignment]
    assert bits_of(trainer.state_dict(pytorch_format=True)) == bits_of(model)


def test_c3_pytorch_format_gives_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has imported PyTorch."""
    import sys

    torch = types.ModuleType("torch")
    vars(torch)["from_numpy"] = lambda array: ("tensor", array)
    trainer = trainer_of(classifier())
    monkeypatch.setitem(sys.modules, "torch", torch)
    state = trainer.state_dict(pytorch_format=True)
    assert {kind for kind, _ in state.values()} == {"tensor"}


def test_c4_onnx_graph_provides_frozen_model_states() -> None:
    net = classifier()
    model = copy.deepcopy(net.model)
    half = np.arange(3, dtype=np.float16)
    model.graph.initializer.append(numpy_helper.from_array(half, "half"))
    model.graph.initializer.append(numpy_helper.from_array(half, "other"))
    trainer = trainer_of(Net(model, net.weights, net.draw), options={"utils": {"frozen_weights": ["half", "fc1.w"]}})
    weights = weights_of(trainer)
    assert set(weights) == {*net.weights, "half"}
    assert bits_of({"half": weights["half"]}) == bits_of({"half": half})


def test_c5_load_state_dict_holds_when_training_session_not_initialized() -> None:
    """The state is loaded when the session is created, with the counts of steps."""
    net = classifier()
    first = trainer_of(net)
    losses_of(first, net, 3)
    state = first.state_dict()
    second = without_session(net)
    second.load_state_dict(state)
    assert second._load_state_dict is not None
    with pytest.warns(UserWarning, match="not initialized yet"):
        assert second.state_dict() is state
    begin(second)
    assert bits_of(second.state_dict()) == bits_of(state)
    assert (second._train_step_info.step, second._train_step_info.optimization_step) == (3, 3)
    assert losses_of(second, net, 2, 3) == losses_of(first, net, 2, 3)


def test_c6_load_state_dict_warns_when_model_optimizer_key_missing() -> None:
    net = classifier()
    trainer = trainer_of(net)
    losses_of(trainer, net, 2)
    before = bits_of(trainer.state_dict())
    with pytest.warns(UserWarning, match="Missing key") as caught:
        trainer.load_state_dict({})
    assert [str(warning.message) for warning in caught] == [
        f"Missing key: {name} in state_dict" for name in ("train_step_info", "model", "optimizer")
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert bits_of(trainer.state_dict()) == before


def without(state: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """Return a state without the entry at a path."""
    changed = copy.deepcopy(dict(state))
    place = changed
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return changed


def having(state: Mapping[str, Any], value: Any, *path: str) -> dict[str, Any]:
    """Return a state with another entry at a path."""
    changed = copy.deepcopy(dict(state))
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed


FULL = ("model", "full_precision")
MISMATCHES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing precision": (lambda s: without(s, *FULL), r"Missing keys: \['full_precision'\] in state_dict\[model\]"),
    "missing weight": (
        lambda s: without(s, *FULL, "fc1.w"),
        r"Missing keys: \['fc1.w'\] in state_dict\[model\]\[full_precision\]",
    ),
    "missing weight of the optimizer": (
        lambda s: without(s, "optimizer", "fc1.w"),
        r"Missing keys: \['fc1.w'\] in state_dict\[optimizer\]",
    ),
    "missing moment": (
        lambda s: without(s, "optimizer", "fc1.w", "Moment_2"),
        r"Missing keys: \['Moment_2'\] in state_dict\[optimizer\]\[fc1.w\]",
    ),
    "unexpected precision": (
        lambda s: having(s, {}, "model", "half_precision"),
        r"Unexpected keys: \['half_precision'\] in state_dict\[model\]",
    ),
    "unexpected weight": (
        lambda s: having(s, WEIGHT, *FULL, "fc3.w"),
        r"Unexpected keys: \['fc3.w'\] in state_dict\[model\]\[full_precision\]",
    ),
    "unexpected weight of the optimizer": (
        lambda s: having(s, OF_WEIGHT, "optimizer", "fc3.w"),
        r"Unexpected keys: \['fc3.w'\] in state_dict\[optimizer\]",
    ),
    "unexpected moment": (
        lambda s: having(s, WEIGHT, "optimizer", "fc1.w", "Moment_3"),
        r"Unexpected keys: \['Moment_3'\] in state_dict\[optimizer\]\[fc1.w\]",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_c7_load_state_dict_errors_when_state_dict_mismatch(case: str) -> None:
    net = classifier()
    trainer, other = trainer_of(net), trainer_of(net)
    losses_of(other, net, 2)
    change, words = MISMATCHES[case]
    before = bits_of(trainer.state_dict())
    changed = change(other.state_dict())
    with pytest.raises(RuntimeError, match=words):
        trainer.load_state_dict(changed)
    assert bits_of(trainer.state_dict()) == before, "nothing has changed"
    trainer.load_state_dict(changed, strict=False)
    assert trainer._train_step_info.step == 2
    if case.startswith("unexpected"):
        assert bits_of(trainer.state_dict()) == bits_of(other.state_dict())


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
def test_unexpected_keys_of_a_divided_state() -> None:
    """Unexpected keys are allowed if the trainer would divide its own state, except for unknown weights."""
    net = classifier()
    trainer = trainer_of(net, options={"distributed": {"deepspeed_zero_optimization": {"stage": 1}}})
    state = trainer.state_dict()
    trainer.load_state_dict(having(state, OF_WEIGHT, "optimizer", "fc3.w"))
    with pytest.raises(RuntimeError, match=r"fc3\.w"):
        trainer.load_state_dict(having(state, WEIGHT, *FULL, "fc3.w"))


def test_missing_keys_are_named_before_unexpected_ones() -> None:
    net = classifier()
    trainer = trainer_of(net)
    state = having(without(trainer.state_dict(), *FULL, "fc1.w"), WEIGHT, *FULL, "fc1.v")
    with pytest.raises(RuntimeError, match="Missing"):
        trainer.load_state_dict(state)


def test_parts_of_a_state_that_is_not_strict() -> None:
    net = classifier()
    trainer, other = trainer_of(net), trainer_of(net)
    losses_of(other, net, 2)
    state = other.state_dict()
    part = {
        "model": {"full_precision": {"fc1.w": state["model"]["full_precision"]["fc1.w"], "nowhere": WEIGHT}},
        "optimizer": {"fc2.b": {"Moment_1": state["optimizer"]["fc2.b"]["Moment_1"]}, "nowhere": OF_WEIGHT},
        "trainer_options": {"optimizer_name": b"AdamOptimizer"},
        "train_step_info": {"step": np.int64(7), "optimization_step": np.int64(5)},
    }
    expected = bits_of(trainer.state_dict())
    for path in ("model/full_precision/fc1.w", "optimizer/fc2.b/Moment_1"):
        expected[path] = bits_of(state)[path]
    expected |= {"train_step_info/step": 7, "train_step_info/optimization_step": 5}
    trainer.load_state_dict(part, strict=False)
    assert bits_of(trainer.state_dict()) == expected


@EACH_CONFIG
def test_c8_load_state_dict_loads_the_states_and_inits_training_session(config: str) -> None:
    net = classifier(gain=True)
    first, second = trainer_of(net, CONFIGS[config]()), trainer_of(net, CONFIGS[config]())
    losses_of(first, net, 3)
    before = second._training_session
    second.load_state_dict(first.state_dict())
    assert second._training_session is not before
    assert second._training_session is not None
    assert first._training_session is not None
    assert bits_of(second._training_session.get_state()) == bits_of(first._training_session.get_state())
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())


def test_scalar_weights_are_loaded() -> None:
    net = regression(doubled=True)
    first, second = trainer_of(net), trainer_of(net)
    losses_of(first, net, 2)
    assert weights_of(first)["two"].shape == ()
    second.load_state_dict(first.state_dict())
    assert losses_of(second, net, 2) == losses_of(first, net, 2)


# Rejected states.

UNFIT: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "another optimizer": (
        lambda s: having(s, "LambOptimizer", "trainer_options", "optimizer_name"),
        AssertionError,
        "Optimizer mismatch: expected AdamOptimizer, got LambOptimizer",
    ),
    "another optimizer as bytes": (
        lambda s: having(s, b"SGDOptimizer", "trainer_options", "optimizer_name"),
        AssertionError,
        "expected AdamOptimizer, got SGDOptimizer",
    ),
    "no trainer_options": (lambda s: without(s, "trainer_options"), KeyError, "trainer_options"),
    "another shape": (lambda s: having(s, WEIGHT, *FULL, "fc1.w"), RuntimeError, r"fc1\.w.*\[12, 16\].*\[2, 3\]"),
    "another type": (
        lambda s: having(s, np.zeros((12, 16)), *FULL, "fc1.w"),
        RuntimeError,
        r"fc1\.w.*float32.*float64",
    ),
    "another shape of a moment": (
        lambda s: having(s, WEIGHT, "optimizer", "fc1.w", "Moment_1"),
        RuntimeError,
        r"Moment_1.*fc1\.w",
    ),
    "a count of zero": (
        lambda s: having(s, np.array([0]), "optimizer", "fc1.w", "Update_Count"),
        RuntimeError,
        "Update_Count",
    ),
    "a negative step": (lambda s: having(s, -1, "train_step_info", "step"), ValueError, "step.*-1"),
    "a step that is no number": (lambda s: having(s, "3", "train_step_info", "step"), ValueError, "step.*'3'"),
    "no steps": (lambda s: having(s, {}, "train_step_info"), ValueError, "train_step_info"),
    "several steps": (lambda s: having(s, np.zeros(2, int), "train_step_info", "step"), ValueError, "step.*array"),
    "an optimizer without a name": (lambda s: having(s, {}, "trainer_options"), ValueError, "optimizer_name.*None"),
    "options that are none": (lambda s: having(s, 3, "trainer_options"), ValueError, "optimizer_name"),
    "a weight with a number": (
        lambda s: having(s, WEIGHT, *FULL, 1),
        ValueError,
        "a name in a state must be a str, got 1",
    ),
    "a section that is none": (lambda s: having(s, [WEIGHT], "model"), ValueError, "model"),
    "flat weights": (lambda s: having(s, {"fc1.w": WEIGHT}, "model"), ValueError, "model"),
    "a list": (lambda s: [s], TypeError, "list"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", UNFIT)
def test_states_that_are_refused(case: str, strict: bool) -> None:
    net = classifier()
    trainer, other = trainer_of(net), trainer_of(net)
    losses_of(other, net, 1)
    change, kind, words = UNFIT[case]
    before = bits_of(trainer.state_dict())
    with pytest.raises(kind, match=words):
        trainer.load_state_dict(change(other.state_dict()), strict)
    assert bits_of(trainer.state_dict()) == before
    assert losses_of(trainer, net, 1) == losses_of(trainer_of(net), net, 1)


@pytest.mark.parametrize(
    ("config", "other", "words"),
    [
        ("lamb", "adam", r"Missing keys: \['shared_optimizer_state'\] in state_dict\[optimizer\]"),
        ("adam", "sgd", r"Missing keys: .* in state_dict\[optimizer\]"),
        ("sgd", "adam", r"Unexpected keys: .* in state_dict\[optimizer\]"),
        ("adam", "lamb", r"Unexpected keys: \['shared_optimizer_state'\] in state_dict\[optimizer\]"),
    ],
)
def test_a_checkpoint_of_another_optimizer(config: str, other: str, words: str, tmp_path: Path) -> None:
    """Names of values are compared first, and the message states the reason of the difference."""
    net = classifier()
    trainer, saved = trainer_of(net, CONFIGS[config]()), trainer_of(net, CONFIGS[other]())
    saved.save_checkpoint(tmp_path / "checkpoint")
    before = bits_of(trainer.state_dict())
    own, found = trainer.optim_config.name, saved.optim_config.name
    with pytest.raises(RuntimeError, match=f"{words}: the state belongs to {found}, but the trainer has {own}$"):
        trainer.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(AssertionError, match=f"Optimizer mismatch: expected {own}, got {found}"):
        trainer.load_checkpoint(tmp_path / "checkpoint", strict=False)
    assert bits_of(trainer.state_dict()) == before


@pytest.mark.parametrize("scaler", [3, {}, *({"loss_scale": scale} for scale in (-1.0, np.inf, "a", [1.0, 2.0]))])
def test_scales_of_states_that_are_refused(scaler: Any) -> None:
    net, options = classifier(), {"mixed_precision": {"enabled": True}}
    trainer, other = trainer_of(net, options=options), trainer_of(net, options=options)
    losses_of(other, net, 2)
    before = bits_of(trainer.state_dict())
    with pytest.raises(ValueError, match=r"state_dict\[loss_scaler\]\[loss_scale\] must be a finite number above 0"):
        trainer.load_state_dict(having(other.state_dict(), scaler, "loss_scaler"))
    assert bits_of(trainer.state_dict()) == before


@pytest.mark.parametrize("stage", [None, "1", np.zeros(2, np.int64), -1])
def test_files_whose_options_do_not_fit(stage: Any, tmp_path: Path) -> None:
    trainer = trainer_of(classifier())
    state = trainer.state_dict()
    state = (
        having(state, stage, "trainer_options", "zero_stage")
        if stage is not None
        else having(state, {}, "trainer_options")
    )
    path = tmp_path / "checkpoint"
    _checkpoint_storage.save(state, path)
    with pytest.raises(ValueError, match=r"state_dict\[trainer_options\]\[zero_stage\]"):
        trainer.load_checkpoint(path)


def test_states_of_other_models() -> None:
    trainer = trainer_of(classifier())
    with pytest.raises(RuntimeError, match=r"Missing keys.*fc1"):
        trainer.load_state_dict(trainer_of(regression()).state_dict())
    with pytest.raises(RuntimeError, match=r"fc1\.w"):
        trainer.load_state_dict(trainer_of(classifier(features=13)).state_dict())


# Files.


def test_c9_save_checkpoint_calls_checkpoint_storage_save(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_checkpoint_storage, "save", lambda *args: calls.append(args))
    trainer = trainer_of(classifier())
    trainer.save_checkpoint("abc")
    ((state, path),) = calls
    assert path == "abc"
    assert bits_of(state) == bits_of(trainer.state_dict())


def test_c9_exclude_optimizer_states(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_checkpoint_storage, "save", lambda *args: calls.append(args))
    trainer = trainer_of(classifier())
    trainer.save_checkpoint("abc", include_optimizer_states=False)
    assert list(calls[0][0]) == ["model", "trainer_options", "train_step_info"]


def test_c9_user_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_checkpoint_storage, "save", lambda *args: calls.append(args))
    trainer = trainer_of(classifier())
    given = {"array": [1, 2], "best": 0.5}
    trainer.save_checkpoint("abc", user_dict=given)
    assert calls[0][0]["user_dict"] == _checkpoint_storage.to_serialized_hex(given)
    trainer.save_checkpoint("abc", {})
    assert "user_dict" not in calls[1][0]


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"horizontal_parallel_size": 2}])
def test_c10_load_checkpoint(options: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """test_load_checkpoint, …_aggregation_required_zero_enabled, …_user_dict."""
    net = classifier()
    other = trainer_of(net)
    losses_of(other, net, 2)
    saved = other.state_dict()
    saved["trainer_options"] |= options
    saved["user_dict"] = _checkpoint_storage.to_serialized_hex({"epoch": 3})
    calls: list[tuple[Any, ...]] = []

    def load(path: str, key: str | None = None) -> Any:
        return copy.deepcopy(saved if key is None else saved[key])

    def aggregate(paths: Any, pytorch_format: bool = True) -> Any:
        calls.append((list(paths), pytorch_format))
        return copy.deepcopy(saved)

    monkeypatch.setattr(_checkpoint_storage, "load", load)
    monkeypatch.setattr(checkpoint, "aggregate_checkpoints", aggregate)
    trainer = trainer_of(net)
    paths = ["one", "two"] if options else ["one"]
    assert trainer.load_checkpoint(*paths) == {"epoch": 3}
    assert calls == ([(paths, False)] if options else [])
    assert bits_of(trainer.state_dict()) == bits_of(other.state_dict())
    if not options:
        with pytest.raises(AssertionError, match="Expected number of files to load: 1, got 2"):
            trainer.load_checkpoint("one", "two")
        del saved["user_dict"]
        assert trainer.load_checkpoint("one") == {}


def test_files_that_are_refused(tmp_path: Path) -> None:
    net = classifier()
    trainer = trainer_of(net)
    losses_of(trainer, net, 1)
    before = bits_of(trainer.state_dict())
    text = tmp_path / "text"
    text.write_text("no HDF5")
    for path in (text, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=path.name):
            trainer.load_checkpoint(str(path))
    with pytest.raises(IndexError):
        trainer.load_checkpoint()
    with pytest.raises(OSError, match="text"):
        trainer.save_checkpoint(str(text))
    assert text.read_text() == "no HDF5"
    with pytest.raises(OSError, match="folder"):
        trainer.save_checkpoint(str(tmp_path / "folder" / "checkpoint"))
    path = str(tmp_path / "other")
    trainer_of(net, LambConfig()).save_checkpoint(path)
    with pytest.raises(RuntimeError, match=r"Unexpected keys.*shared_optimizer_state"):
        trainer.load_checkpoint(path)
    with pytest.raises(AssertionError, match="Optimizer mismatch"):
        trainer.load_checkpoint(path, strict=False)
    assert bits_of(trainer.state_dict()) == before


def test_no_file_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ortrain.OrtrainError, match="run train_step or eval_step first"):
        without_session(classifier()).save_checkpoint(str(tmp_path / "checkpoint"))
    assert list(tmp_path.iterdir()) == []


class Progress:
    """Values of a user."""

    epoch = 3


def test_values_of_a_user_that_need_pickle(tmp_path: Path) -> None:
    """Values that need pickle are rejected when they are written, unless the user allows them."""
    trainer, path = trainer_of(classifier()), str(tmp_path / "checkpoint")
    refused = {
        f"{__name__}.Progress, but load_checkpoint reads only .*allow_pickle=True": {"progress": Progress()},
        "an array of objects, but load_checkpoint reads only .*allow_pickle=True": {
            "mixed": np.array([1, None], object)
        },
    }
    for words, user_dict in refused.items():
        with pytest.raises(ortrain.InvalidArgumentError, match=words):
            trainer.save_checkpoint(path, user_dict)
    assert list(tmp_path.iterdir()) == []
    trainer.save_checkpoint(path, {"progress": Progress()}, allow_pickle=True)
    with pytest.raises(ortrain.InvalidArgumentError, match="Progress"):
        trainer.load_checkpoint(path)
    assert trainer.load_checkpoint(path, allow_pickle=True)["progress"].epoch == 3


def test_warnings_point_at_the_program_of_the_user(artifacts: Any, tmp_path: Path) -> None:
    net, path = classifier(), str(tmp_path / "checkpoint")
    trainer = trainer_of(net)
    trainer.save_checkpoint(path, include_optimizer_states=False)
    with pytest.warns(UserWarning, match="Missing key: optimizer") as caught:
        trainer.load_checkpoint(path)
    assert [warning.filename for warning in caught] == [__file__]
    waiting = without_session(net)
    waiting.load_state_dict({}, strict=False)
    with pytest.warns(UserWarning, match="Missing key") as caught:
        begin(waiting)
    assert [warning.filename for warning in caught] == [__file__] * 3
    state, model = trainer.checkpoint_state(), copy.deepcopy(net.model)
    with pytest.warns(UserWarning, match="runs on the CPU") as caught:
        ORTTrainer.from_checkpoint_state(state, model, description_of(net), AdamConfig())
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("options", [{}, {"utils": {"frozen_weights": ["norm.mean", "norm.var"]}}])
def test_running_statistics_of_a_flat_state(options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat state has the current statistics, not the statistics of the model file."""
    torch = types.SimpleNamespace(from_numpy=lambda value: value)
    monkeypatch.setattr(_flat_checkpoint, "_torch", lambda: torch)
    trainer = trainer_of(normalizing(), options=options)
    losses_of(trainer, normalizing(), 3)
    statistics = trainer.state_dict()["running_statistics"]
    assert statistics["norm.mean"].any()
    for whole in (False, True):
        flat_state = _flat_checkpoint._flat_state(trainer, whole)
        assert bits_of({name: flat_state[name] for name in statistics}) == bits_of(statistics)
    other = trainer_of(normalizing(), options=options)
    _flat_checkpoint._load_flat(other, flat_state, True)
    assert bits_of(other.state_dict()["running_statistics"]) == bits_of(statistics)


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
def test_a_file_of_a_state_that_would_be_divided(tmp_path: Path) -> None:
    """ZeRO of one process divides nothing, but its file is loaded like a file of several processes."""
    net, path = classifier(), str(tmp_path / "checkpoint")
    first, second = (
        trainer_of(net, options={"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}) for _ in range(2)
    )
    losses_of(first, net, 2)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert losses_of(second, net, 2, 2) == losses_of(first, net, 2, 2)


def test_a_file_without_the_state_of_the_optimizer(tmp_path: Path) -> None:
    net, path = classifier(), str(tmp_path / "checkpoint")
    first, second = trainer_of(net), trainer_of(net)
    losses_of(first, net, 2)
    first.save_checkpoint(path, include_optimizer_states=False)
    with pytest.warns(UserWarning, match="Missing key: optimizer"):
        second.load_checkpoint(path)
    assert bits_of(weights_of(second)) == bits_of(weights_of(first))
    assert second.state_dict()["optimizer"]["fc1.w"]["Update_Count"].tolist() == [1]


# Exact resume.


def scaled(**more: Any) -> Callable[[], dict[str, Any]]:
    """Return a function for mixed-precision options with a scale that changes every second step."""
    return lambda: {
        "mixed_precision": {"enabled": True, "loss_scaler": DynamicLossScaler(loss_scale=64.0, up_scale_window=2)},
        **more,
    }


WINDOW = {"batch": {"gradient_accumulation_steps": 2}}
NETS: dict[str, Callable[[], Net]] = {"dropout": lambda: toy_bert(dropout=0.25), "statistics": normalizing}
SETTINGS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "plain": (dict, {}),
    "scheduler": (lambda: {"lr_scheduler": CosineWarmupLRScheduler(6, 0.5, 0.3)}, {}),
    "dropout": (dict, {}),
    "statistics": (dict, {}),
    "frozen": (lambda: {"utils": {"frozen_weights": ["key.weight"]}}, {}),
    "window": (lambda: dict(WINDOW), {}),
    "float16": (scaled(), {}),
    "float16 in a window": (scaled(**WINDOW), {}),
    "bfloat16": (lambda: {"mixed_precision": {"enabled": True}}, {"mixed_precision_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@EACH_CONFIG
def test_a_training_is_resumed_exactly(config: str, setting: str, tmp_path: Path) -> None:
    """Three steps, a file, and three more steps equal six steps bit for bit."""
    options, more = SETTINGS[setting]
    net, path = NETS.get(setting, toy_bert)(), str(tmp_path / "checkpoint0.ortcp")
    whole, first, second = (trainer_of(net, CONFIGS[config](), options(), **more) for _ in range(3))
    expected = losses_of(whole, net, 6)
    found = losses_of(first, net, 3)
    first.save_checkpoint(path, {"found": found})
    user = second.load_checkpoint(path)
    assert user["found"] + losses_of(second, net, 3, 3) == expected
    assert bits_of(second.state_dict()) == bits_of(whole.state_dict())
    if second._scaler is not None:
        assert second._scaler.loss_scale == whole._scaler.loss_scale != 64.0


@EACH_CONFIG
def test_f21_state_dict(config: str) -> None:
    """testORTTrainerStateDictWrapModelLossFn: keys, a deferred load, and the same second step in both trainers."""
    net = classifier()
    first = trainer_of(net, CONFIGS[config]())
    losses_of(first, net, 1)
    state = first.state_dict()
    assert set(state["model"]["full_precision"]) == set(net.weights)
    second = without_session(net)
    second.optim_config = CONFIGS[config]()
    second.load_state_dict(state)
    begin(second)
    assert losses_of(first, net, 1, 1) == losses_of(second, net, 1, 1)
    assert bits_of(first.state_dict()) == bits_of(second.state_dict())


def test_f21_mixed_precision() -> None:
    net = classifier()
    first, second = (trainer_of(net, LambConfig(lr=0.01), scaled()()) for _ in range(2))
    losses_of(first, net, 1)
    second.load_state_dict(first.state_dict())
    assert losses_of(first, net, 1, 1) == losses_of(second, net, 1, 1)
    assert bits_of(first.state_dict()) == bits_of(second.state_dict())


def renamed(net: Net, change: Callable[[str], str]) -> Net:
    """Return the network with other names of initializers."""
    model, names = copy.deepcopy(net.model), {tensor.name for tensor in net.model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.name = change(tensor.name)
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = change(name) if name in names else name
    return Net(model, {change(name): value for name, value in net.weights.items()}, net.draw)


@pytest.mark.parametrize("change", [lambda name: f"/{name}/weight", lambda name: name.replace(".", "/")])
def test_names_with_slashes(change: Callable[[str], str], tmp_path: Path) -> None:
    """A file has groups in place of slashes, and loading restores the names."""
    net, path = renamed(normalizing(), change), str(tmp_path / "checkpoint")
    whole, first, second = (trainer_of(net, options=WINDOW) for _ in range(3))
    losses_of(whole, net, 5)
    losses_of(first, net, 3)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    losses_of(second, net, 2, 3)
    assert bits_of(second.state_dict()) == bits_of(whole.state_dict())


def test_names_that_are_one_in_a_file(tmp_path: Path) -> None:
    net = renamed(classifier(), lambda name: {"fc1.w": "/fc/w", "fc2.w": "fc/w"}.get(name, name))
    with pytest.raises(ValueError, match="'fc/w'"):
        trainer_of(net).save_checkpoint(str(tmp_path / "checkpoint"))
    assert list(tmp_path.iterdir()) == []


def test_running_statistics(tmp_path: Path) -> None:
    """Running statistics are part of a state and of the written model; other entries in their section are errors."""
    net = normalizing()
    trainer = trainer_of(net)
    losses_of(trainer, net, 3)
    state = trainer.state_dict()
    assert set(state["running_statistics"]) == {"norm.mean", "norm.var"}
    assert not set(state["running_statistics"]) & set(state["model"]["full_precision"])
    trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    written = {tensor.name: tensor for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for name, value in state["running_statistics"].items():
        assert value.any()
        assert numpy_helper.to_array(written[name]).tobytes() == value.tobytes()
    fresh = trainer_of(net)
    for wrong in ({"norm.mea": np.zeros(16, np.float32)}, {"norm.mean": np.zeros(15, np.float32)}, ["norm.mean"]):
        with pytest.raises(RuntimeError, match=r"norm\.mean"):
            fresh.load_state_dict({**state, "running_statistics": wrong})
    assert fresh._train_step_info.step == 0
    before = trainer.state_dict()
    trainer.load_state_dict(
        {name: state[name] for name in ("model", "optimizer", "trainer_options", "train_step_info")}
    )
    assert bits_of(trainer.state_dict()) == bits_of(before), "missing entries do not change"


FROZEN_STATISTICS = {"utils": {"frozen_weights": ["norm.mean", "norm.var"]}}


def test_running_statistics_that_are_frozen_weights() -> None:
    """A state has current values of these weights. A state without the section of statistics is accepted."""
    net = normalizing()
    trainer = trainer_of(net, options=FROZEN_STATISTICS)
    losses_of(trainer, net, 3)
    state = trainer.state_dict()
    full, statistics = state["model"]["full_precision"], state["running_statistics"]
    assert bits_of({name: full[name] for name in statistics}) == bits_of(statistics)
    assert statistics["norm.mean"].any()
    del state["running_statistics"]
    other = trainer_of(net, options=FROZEN_STATISTICS)
    other.load_state_dict(state)
    assert bits_of(other.state_dict()) == bits_of(trainer.state_dict())
    assert losses_of(other, net, 2, 3) == losses_of(trainer, net, 2, 3)


# Random numbers.


@pytest.fixture
def set_seed() -> Iterator[Callable[[int | None], None]]:
    """Yield a function that sets the seed of the process, to imitate another process."""
    yield _seeds.set_seed
    _seeds.set_seed(None)


@pytest.mark.parametrize("seeds", [(7, None), (None, 7), (-(2**63), 2**63 - 1)])
def test_a_training_with_dropout_is_resumed_under_another_seed(
    seeds: tuple[int | None, int | None], set_seed: Callable[[int | None], None], tmp_path: Path
) -> None:
    net, path = toy_bert(dropout=0.25), tmp_path / "checkpoint0.ortcp"
    set_seed(seeds[0])
    whole, first = trainer_of(net), trainer_of(net)
    set_seed(seeds[1])
    second = trainer_of(net)
    expected = losses_of(whole, net, 6)
    found = losses_of(first, net, 3)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    assert found + losses_of(second, net, 3, 3) == expected
    assert bits_of(second.state_dict()) == bits_of(whole.state_dict())
    assert second.state_dict()["random_numbers"] == {"seed": seeds[0] or 0, "train_steps": 6}
    assert whole.checkpoint_state().seed == (seeds[0] or 0)


def test_a_state_without_a_seed_leaves_that_of_the_trainer(set_seed: Callable[[int | None], None]) -> None:
    net = toy_bert(dropout=0.25)
    set_seed(7)
    first, second = trainer_of(net), trainer_of(net)
    set_seed(8)
    losses_of(first, net, 2)
    second.load_state_dict(without(first.state_dict(), "random_numbers"))
    assert losses_of(second, net, 2, 2) == losses_of(first, net, 2, 2)


@pytest.mark.parametrize(
    "value", [{}, {"seed": 0}, {"seed": 2**63, "train_steps": 0}, {"seed": "7"}, {"seed": 7, "train_steps": -1}, [7]]
)
def test_random_numbers_that_are_refused(value: Any) -> None:
    net = toy_bert(dropout=0.25)
    trainer = trainer_of(net)
    with pytest.raises(ValueError, match="random_numbers"):
        trainer.load_state_dict({**trainer.state_dict(), "random_numbers": value})
    assert losses_of(trainer, net, 2) == losses_of(trainer_of(net), net, 2)


HEADER = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>'
FUNCTION = '<domain: "own", opset_import: ["" : 17]> drop (x, ratio, on) => (y) { y = Dropout (x, ratio, on) }'
DROPPING = {
    "without a mode": ("y = Dropout (x, ratio)", False),
    "with an empty mode": ('y = Dropout (x, ratio, "")', False),
    "with a mode": ("y = Dropout (x, ratio, on)", True),
    "in a branch": (
        "y = If (on) <then_branch = a () => (float[n] p) { p = Dropout (x, ratio, on) },"
        " else_branch = b () => (float[n] q) { q = Identity (x) }>",
        True,
    ),
    "in a branch without a mode": (
        "y = If (on) <then_branch = a () => (float[n] p) { p = Dropout (x) },"
        " else_branch = b () => (float[n] q) { q = Identity (x) }>",
        False,
    ),
    "in a function": ("y = own.drop (x, ratio, on)", True),
}


@pytest.mark.parametrize("case", DROPPING)
def test_models_that_draw_random_numbers(case: str) -> None:
    nodes, expected = DROPPING[case]
    text = f"{HEADER} net (float[n] x, float ratio, bool on) => (float[n] y) {{ {nodes} }}"
    model = onnx.parser.parse_model(text)
    if "own" in nodes:
        model.functions.append(onnx.parser.parse_function(FUNCTION))
    assert draws_random_numbers(model) is expected


def test_counts_of_updates() -> None:
    """Counts of updates start at 1, and increase by 1 with every update."""
    net = classifier()
    adam, lamb = trainer_of(net, AdamConfig()), trainer_of(net, LambConfig())
    for updates in range(3):
        assert adam.state_dict()["optimizer"]["fc1.w"]["Update_Count"].tolist() == [updates + 1]
        assert lamb.state_dict()["optimizer"]["shared_optimizer_state"]["Step"].tolist() == [updates + 1]
        losses_of(adam, net, 1)
        losses_of(lamb, net, 1)
    assert trainer_of(net, SGDConfig()).state_dict()["optimizer"] == {}


def test_states_are_copies() -> None:
    net = classifier()
    trainer = trainer_of(net)
    losses_of(trainer, net, 1)
    state, expected = trainer.state_dict(), bits_of(trainer.state_dict())
    losses_of(trainer, net, 1)
    assert bits_of(state) == expected
    trainer.load_state_dict(state)
    for value in flat(state).values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    assert bits_of(trainer.state_dict()) == expected


def test_precisions_load_each_other() -> None:
    net = classifier()
    wide, narrow = trainer_of(net), trainer_of(net, options=scaled()())
    losses_of(narrow, net, 2)
    wide.load_state_dict(narrow.state_dict())
    assert bits_of(weights_of(wide)) == bits_of(weights_of(narrow))
    losses_of(wide, net, 1)
    narrow.load_state_dict(wide.state_dict())
    assert bits_of(weights_of(wide)) == bits_of(weights_of(narrow))


def test_a_window_is_of_a_trainer_that_has_one() -> None:
    net = classifier()
    first, second = trainer_of(net, options=WINDOW), trainer_of(net)
    losses_of(first, net, 1)
    state = first.state_dict()
    assert set(state["accumulated_gradients"]) == set(net.weights)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        second.load_state_dict(state)
    losses_of(first, net, 1)
    assert "accumulated_gradients" not in first.state_dict()
    second.load_state_dict(first.state_dict())


def fail(trainer: ORTTrainer, times: int = 1) -> None:
    """Make calls without inputs."""
    for _ in range(times):
        with pytest.raises(AssertionError, match=r"got 0$"):
            trainer.train_step()


@pytest.mark.parametrize("window", [1, 3])
def test_a_training_with_failed_calls_is_resumed_exactly(window: int, tmp_path: Path) -> None:
    net, options = toy_bert(dropout=0.25), {"batch": {"gradient_accumulation_steps": window}}
    whole, first, second = (trainer_of(net, options=options) for _ in range(3))
    expected = losses_of(whole, net, 7)
    fail(first, 2)
    found = losses_of(first, net, 4)
    first.save_checkpoint(tmp_path / "checkpoint0.ortcp")
    second.load_checkpoint(tmp_path / "checkpoint0.ortcp")
    fail(second)
    assert found + losses_of(second, net, 3, 4) == expected
    assert bits_of(weights_of(second)) == bits_of(weights_of(whole))
    assert second._train_step_info.step == 10


def test_a_window_that_is_longer_than_that_of_the_options() -> None:
    net = classifier()
    first, second = (trainer_of(net, options={"batch": {"gradient_accumulation_steps": k}}) for k in (4, 2))
    losses_of(first, net, 3)
    state = first.state_dict()
    assert state["train_step_info"] == {"optimization_step": 0, "step": 3, "accumulated_steps": 3}
    with pytest.raises(ValueError, match=r"after 3 .*gradient_accumulation_steps is 2"):
        second.load_state_dict(state)
    first.options.batch.gradient_accumulation_steps = 3
    with pytest.raises(ValueError, match=r"after 3 .*gradient_accumulation_steps is 3"):
        first.load_state_dict(state)
    losses_of(first, net, 1, 3)
    assert first._train_step_info.optimization_step == 1, "nothing has changed"


def test_missing_accumulated_steps_are_counted() -> None:
    net = classifier()
    whole, first, second = (trainer_of(net, options=WINDOW) for _ in range(3))
    losses_of(whole, net, 4)
    losses_of(first, net, 3)
    second.load_state_dict(without(first.state_dict(), "train_step_info", "accumulated_steps"))
    losses_of(second, net, 1, 3)
    assert bits_of(second.state_dict()) == bits_of(whole.state_dict())


# B: the toy BERT.


@EACH_CONFIG
def test_b6_toy_bert_checkpoint_basic(config: str, tmp_path: Path) -> None:
    """testToyBertCheckpointBasic: a state has all weights, and a changed state survives saving and loading."""
    net, path = toy_bert(), str(tmp_path / "checkpoint")
    first, second = trainer_of(net, CONFIGS[config]()), trainer_of(net, CONFIGS[config]())
    state = first.state_dict()
    assert set(state["model"]["full_precision"]) == set(net.weights)
    state["model"]["full_precision"]["word.weight"] += 1
    first.load_state_dict(state)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    assert bits_of(second.state_dict()) == bits_of(state)


@EACH_CONFIG
def test_b8_toy_bert_checkpoint_frozen_weights(config: str, tmp_path: Path) -> None:
    """testToyBertCheckpointFrozenWeights."""
    net, path = toy_bert(), str(tmp_path / "checkpoint")
    frozen = {"utils": {"frozen_weights": ["word.weight", "up.bias"]}}
    first, second = (trainer_of(net, CONFIGS[config](), frozen) for _ in range(2))
    losses_of(first, net, 2)
    state = first.state_dict()
    state["model"]["full_precision"]["up.bias"] += 1
    first.load_state_dict(state)
    first.save_checkpoint(path)
    second.load_checkpoint(path)
    assert list(flat(second.state_dict())) == list(flat(first.state_dict()))
    feeds = list(net.batch(7).values())
    assert second.eval_step(*feeds)[0] == first.eval_step(*feeds)[0]
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())


# ortrain.api.


@pytest.fixture
def artifacts(tmp_path: Path) -> Callable[[Any], tuple[CheckpointState, Module, Optimizer]]:
    """Return a function that makes a training by ortrain.api of the classifier, or of another network."""

    def make(
        optimizer: Any, frozen: tuple[str, ...] = (), net: Net | None = None
    ) -> tuple[CheckpointState, Module, Optimizer]:
        net = net or classifier()
        model = copy.deepcopy(net.model)
        outputs = {value.name: value for value in copy.deepcopy(model).graph.output}
        del model.graph.output[:]
        model.graph.output.append(outputs["loss"])
        ortrain.generate_artifacts(
            model,
            requires_grad=[name for name in net.weights if name not in frozen],
            frozen_params=list(frozen),
            optimizer=optimizer,
            artifact_directory=tmp_path,
        )
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state)
        return state, module, Optimizer(tmp_path / "optimizer_model.onnx", module)

    return make


def steps_of(module: Module, optimizer: Optimizer, net: Net, count: int, first: int = 0) -> list[float]:
    """Train steps by ortrain.api; returns the losses."""
    found = []
    for k in range(first, first + count):
        loss: Any = module(*net.batch(k).values())
        found.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    return found


ADAMW = ortrain.optim.AdamW(lr=0.01, eps=1e-8, weight_decay=0.01)
LAMB = ortrain.optim.LAMB(lr=0.01, eps=1e-6, weight_decay=0.01, bias_correction=False)
# An optimizer of artifacts clips only on request.
UNCLIPPED = {"utils": {"grad_norm_clip": False}}


@pytest.mark.parametrize(("config", "row"), [("adam", ADAMW), ("lamb", LAMB)])
def test_a_training_goes_on_from_a_checkpoint_state(config: str, row: Any, artifacts: Any) -> None:
    net = classifier()
    state, module, optimizer = artifacts(row)
    optimizer.set_learning_rate(0.01)
    steps_of(module, optimizer, net, 3)
    trainer = ORTTrainer.from_checkpoint_state(
        state, copy.deepcopy(net.model), description_of(net), CONFIGS[config](), options_of(UNCLIPPED)
    )
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (3, 3)
    assert bits_of(weights_of(trainer)) == bits_of({name: value.data for name, value in state.parameters})
    counts = trainer.state_dict()["optimizer"]
    assert counts["fc1.w" if config == "adam" else "shared_optimizer_state"].popitem()[1].tolist() == [4]
    found, expected = losses_of(trainer, net, 3, 3), steps_of(module, optimizer, net, 3, 3)
    np.testing.assert_allclose(found, expected, rtol=CLOSE)


@pytest.mark.parametrize(("config", "row"), [("adam", ADAMW), ("lamb", LAMB), ("sgd", ortrain.optim.SGD(lr=0.1))])
def test_a_checkpoint_state_goes_on_from_a_training(config: str, row: Any, artifacts: Any, tmp_path: Path) -> None:
    net = classifier()
    frozen = ("fc1.b",)
    trainer = trainer_of(net, CONFIGS[config](), {"utils": {"grad_norm_clip": False, "frozen_weights": list(frozen)}})
    losses_of(trainer, net, 3)
    state = trainer.checkpoint_state()
    assert isinstance(state, CheckpointState)
    assert bits_of({name: value.data for name, value in state.parameters}) == bits_of(weights_of(trainer))
    assert [name for name, value in state.parameters if not value.requires_grad] == list(frozen)
    artifacts(row, frozen)
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module, replace=config == "lamb")
    optimizer.set_learning_rate(trainer.optim_config.lr)
    np.testing.assert_allclose(steps_of(module, optimizer, net, 3, 3), losses_of(trainer, net, 3, 3), rtol=CLOSE)


@EACH_CONFIG
def test_a_round_trip_by_a_checkpoint_state(config: str, tmp_path: Path) -> None:
    """The state passes through a file."""
    net = classifier()
    first = trainer_of(net, CONFIGS[config]())
    losses_of(first, net, 3)
    CheckpointState.save_checkpoint(first.checkpoint_state(), tmp_path / "checkpoint", include_optimizer_state=True)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    second = resumed(net, state, CONFIGS[config]())
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert losses_of(second, net, 3, 3) == losses_of(first, net, 3, 3)


@pytest.mark.parametrize("config", ["adam", "lamb"])
def test_moments_begin_anew_after_sgd(config: str) -> None:
    net = classifier()
    first = trainer_of(net, CONFIGS["sgd"]())
    losses_of(first, net, 3)
    second = resumed(net, first.checkpoint_state(), CONFIGS[config]())
    assert bits_of(weights_of(second)) == bits_of(weights_of(first))
    fresh = trainer_of(net, CONFIGS[config]())
    assert bits_of(second.state_dict()["optimizer"]) == bits_of(fresh.state_dict()["optimizer"])


def resumed(net: Net, state: Any, config: _OptimizerConfig | None = None) -> ORTTrainer:
    """Return a trainer that continues from a state of ortrain.api."""
    model, chosen = copy.deepcopy(net.model), config or AdamConfig()
    return ORTTrainer.from_checkpoint_state(state, model, description_of(net), chosen, options_of())


def test_checkpoint_states_that_are_refused(artifacts: Any) -> None:
    state, _, _ = artifacts(ADAMW)
    with pytest.raises(TypeError, match="dict"):
        resumed(classifier(), {})
    with pytest.raises(ValueError, match=r"'fc1\.b' of the state is not an initializer"):
        resumed(regression(), state)
    with pytest.raises(ValueError, match=r"parameter 'gain', which the trainer trains, is missing"):
        resumed(classifier(gain=True), state)
    with pytest.raises(RuntimeError, match=r"fc1\.w"):
        resumed(classifier(features=13), state)
    momentum, module, optimizer = artifacts(ortrain.optim.SGD(lr=0.1, momentum=0.9))
    steps_of(module, optimizer, classifier(), 1)
    with pytest.raises(ValueError, match=r"momentum0.*AdamOptimizer uses"):
        resumed(classifier(), momentum)


@pytest.mark.parametrize("options", [{}, FROZEN_STATISTICS], ids=["plain", "frozen"])
@pytest.mark.parametrize("drops", [False, True])
def test_running_statistics_go_to_a_checkpoint_state(
    drops: bool, options: dict[str, Any], artifacts: Any, tmp_path: Path
) -> None:
    """The random numbers of Dropout also continue."""
    net = normalizing(drops)
    trainer = trainer_of(net, SGDConfig(lr=0.1), options)
    losses_of(trainer, net, 3)
    state = trainer.checkpoint_state()
    statistics = trainer.state_dict()["running_statistics"]
    assert statistics["norm.mean"].any()
    found = {name: value for name, value in state.parameters if not value.requires_grad}
    assert bits_of({name: value.data for name, value in found.items()}) == bits_of(statistics)
    artifacts(ortrain.optim.SGD(lr=0.1), net=net)
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    np.testing.assert_allclose(steps_of(module, optimizer, net, 3, 3), losses_of(trainer, net, 3, 3), rtol=CLOSE)
    statistics = trainer.state_dict()["running_statistics"]
    for name, value in statistics.items():
        np.testing.assert_allclose(state.parameters[name].data, value, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("drops", [False, True])
def test_running_statistics_come_from_a_checkpoint_state(drops: bool, artifacts: Any) -> None:
    net = normalizing(drops)
    state, module, optimizer = artifacts(ortrain.optim.SGD(lr=0.1), net=net)
    state.seed = 7
    steps_of(module, optimizer, net, 3)
    trainer = resumed(net, state, SGDConfig(lr=0.1))
    statistics = {name: state.parameters[name].data for name in ("norm.mean", "norm.var")}
    assert statistics["norm.mean"].any()
    assert bits_of(trainer.state_dict()["running_statistics"]) == bits_of(statistics)
    assert trainer.checkpoint_state().seed == 7
    np.testing.assert_allclose(losses_of(trainer, net, 3, 3), steps_of(module, optimizer, net, 3, 3), rtol=CLOSE)


@pytest.mark.parametrize("drops", [False, True])
def test_a_round_trip_of_running_statistics_and_a_seed(drops: bool, set_seed: Callable[[int | None], None]) -> None:
    """A failed call does not change the random numbers."""
    net = normalizing(drops)
    set_seed(7)
    first = trainer_of(net)
    losses_of(first, net, 3)
    fail(first)
    set_seed(8)
    state = first.checkpoint_state()
    assert state.seed == 7
    second = resumed(net, state)
    first._train_step_info.step = 3
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert losses_of(second, net, 3, 3) == losses_of(first, net, 3, 3)


@pytest.mark.parametrize("row", [ortrain.OptimType.SGD, ortrain.optim.SGD(lr=0.1)], ids=["type", "row"])
def test_sgd_goes_on_from_a_checkpoint_state(row: Any, artifacts: Any) -> None:
    """The checkpoint has a slot for a momentum."""
    net = classifier()
    state, module, optimizer = artifacts(row)
    optimizer.set_learning_rate(0.1)
    steps_of(module, optimizer, net, 3)
    assert list(state.parameters["fc1.w"].slots) == ["momentum0"]
    trainer = resumed(net, state, SGDConfig(lr=0.1))
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (3, 3)
    np.testing.assert_allclose(losses_of(trainer, net, 3, 3), steps_of(module, optimizer, net, 3, 3), rtol=CLOSE)


def test_sgd_does_not_go_on_from_a_momentum(artifacts: Any) -> None:
    net = classifier()
    state, module, optimizer = artifacts(ortrain.optim.SGD(lr=0.1, momentum=0.9))
    assert weights_of(resumed(net, state, SGDConfig(lr=0.1))).keys() == net.weights.keys(), "the momentum is still zero"
    steps_of(module, optimizer, net, 1)
    with pytest.raises(ValueError, match=r"momentum of 'fc1\.b' that is not 0, but SGDOptimizer"):
        resumed(net, state, SGDConfig(lr=0.1))
    state, _, _ = artifacts(ortrain.optim.Adagrad(lr=0.1))
    with pytest.raises(ValueError, match="SGDOptimizer uses no moments"):
        resumed(net, state, SGDConfig(lr=0.1))


@pytest.mark.parametrize(("config", "expected"), [("adam", 2), ("lamb", 2), ("sgd", 5)])
def test_the_step_of_a_checkpoint_state_is_that_of_the_optimizer(config: str, expected: int) -> None:
    """SGD has no count."""
    net = classifier()
    trainer = trainer_of(net, CONFIGS[config]())
    losses_of(trainer, net, 2)
    trainer._train_step_info.optimization_step = 5
    assert trainer.checkpoint_state()._native.steps() == (2, expected)
