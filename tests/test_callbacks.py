"""Callbacks: their hooks, the meanings that Keras gives them, and their states for a resumed run."""

from __future__ import annotations

import csv
import io
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ortrain
from ortrain import callbacks as cb
from ortrain.callbacks import _progress
from ortrain.callbacks._list import CallbackList
from ortrain.errors import InvalidArgumentError, TrainingWarning


class Parameter:
    def __init__(self, values: Any, requires_grad: bool = True) -> None:
        self.data = np.array(values, np.float32)
        self.requires_grad = requires_grad
        self.dtype, self.shape = self.data.dtype, self.data.shape


class State(list[tuple[str, Parameter]]):
    """State with a trained and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__([("weight", Parameter([0.0, 0.0])), ("fixed", Parameter(3, False))])

    def __getitem__(self, name: Any) -> Any:
        return dict(self)[name]

    @property
    def parameters(self) -> State:
        return self


class Optimizer:
    rate = 1.0

    def get_learning_rate(self) -> float:
        return float(np.float32(self.rate))

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate


class Model:
    """Model with the number of trained epochs as its weight."""

    def __init__(self) -> None:
        self.state = State()
        self.optimizer = Optimizer()
        self.stop_training = False
        self.metrics: list[Any] = []
        self.saved: list[str] = []

    def save(self, path: str) -> None:
        self.saved.append(path)
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "weights").write_text("weights")


def fit(
    model: Model,
    used: Iterable[cb.Callback],
    epochs: Iterable[Mapping[str, float]],
    steps: int = 2,
    saved: Any = None,
    first: int = 0,
) -> list[dict[str, Any]]:
    """Call the hooks as ``Model.fit`` does, with these logs of the epochs. Returns the logs with added entries."""
    rows = [dict(row) for row in epochs]
    hooks = CallbackList(used, model, {"epochs": len(rows), "steps": steps, "batch_size": 4, "verbose": 0})
    history = []
    model.stop_training = False
    for hook in hooks.on_train_begin:
        hook(None)
    if saved is not None:
        hooks.restore(saved)
    for epoch, logs in enumerate(rows, first):
        for hook in hooks.on_epoch_begin:
            hook(epoch, None)
        for batch in range(steps):
            for hook in hooks.on_train_batch_begin:
                hook(batch, None)
            for hook in hooks.on_train_batch_end:
                hook(batch, {"loss": logs.get("loss", 0.0)})
        model.state["weight"].data[:] = epoch + 1
        for hook in hooks.on_epoch_end:
            hook(epoch, logs)
        history.append(logs)
        if model.stop_training:
            break
    for hook in hooks.on_train_end:
        hook(history[-1])
    return history


def losses(*values: float, name: str = "val_loss") -> list[dict[str, float]]:
    return [{name: value} for value in values]


def through_json(states: Any) -> Any:
    """Store states as a run does: arrays apart from JSON."""
    return json.loads(json.dumps(states, default=lambda array: {"array": array.tolist()}), object_hook=_restored)


def _restored(entry: dict[str, Any]) -> Any:
    return np.array(entry["array"], np.uint8) if set(entry) == {"array"} else entry


def test_order_of_hooks() -> None:
    calls: list[str] = []

    class Recorder(cb.Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("on_", "set_")):
                return lambda *_: calls.append(name)
            return super().__getattribute__(name)

    fit(Model(), [Recorder()], losses(1, 2), steps=1)
    epoch = ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"]
    assert calls == ["set_params", "set_model", "on_train_begin", *epoch, *epoch, "on_train_end"]


def test_hooks_that_are_not_overridden_cost_nothing() -> None:
    class Own(cb.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            """Older name."""

    own = Own()
    hooks = CallbackList([cb.Callback(), cb.EarlyStopping(), cb.ModelCheckpoint("x"), own], None, {})
    assert hooks.on_train_batch_begin == hooks.on_test_batch_end == ()
    assert hooks.on_train_batch_end == (own.on_train_batch_end,)
    assert len(hooks.on_epoch_end) == 2
    assert len(CallbackList(None, None, {})) == 0
    assert len(CallbackList(own, None, {})) == 1
    later = cb.ModelCheckpoint("x", save_freq=3)
    assert len(CallbackList(later, None, {}).on_train_batch_end) == 1


def test_callbacks_of_keras_work() -> None:
    """An object with Keras' hooks needs no base class of ours."""
    calls: list[Any] = []
    base = type("Callback", (), {"__module__": "keras.src.callbacks.callback"})
    for name in ("set_params", "set_model", *(hook for hook in dir(cb.Callback) if hook.startswith("on_"))):

        def nothing(self: Any, *_: Any) -> None:
            """Do nothing."""

        nothing.__qualname__, nothing.__module__ = f"Callback.{name}", base.__module__
        setattr(base, name, nothing)
    own = type("Own", (base,), {"on_epoch_end": lambda _, epoch, logs: calls.append((epoch, logs["val_loss"]))})()
    fit(Model(), [own], losses(3, 4))
    assert calls == [(0, 3), (1, 4)]
    hooks = CallbackList([own], None, {})
    assert hooks.on_train_batch_end == ()
    assert hooks.state() == [{"class": "Own", "state": {}}]


def test_wrong_callbacks() -> None:
    with pytest.raises(InvalidArgumentError, match=r"call it: EarlyStopping\(\)"):
        CallbackList([cb.EarlyStopping], None, {})  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="got function; LambdaCallback"):
        CallbackList([lambda: None], None, {})  # type: ignore[list-item]


def test_states_find_their_callbacks() -> None:
    """States go to callbacks of the same class, in their order; a new callback starts anew."""
    model = Model()
    first, second = cb.EarlyStopping("a", mode="min"), cb.EarlyStopping("b", mode="min")
    first.wait, second.wait = 1, 2
    states = CallbackList([first, cb.Callback(), second], model, {}).state()
    again = [cb.ReduceLROnPlateau(), cb.EarlyStopping("a", mode="min"), cb.EarlyStopping("b", mode="min")]
    CallbackList(again, model, {}).restore(states)
    assert [callback.wait for callback in again] == [0, 1, 2]


@pytest.mark.parametrize("patience", [0, 1, 2, 3])
def test_early_stopping_waits(patience: int) -> None:
    """As in Keras: the epoch after ``patience`` epochs without improvement is the last one."""
    model = Model()
    rows = losses(0.5, 0.4, 0.45, 0.46, 0.47, 0.48)
    history = fit(model, [cb.EarlyStopping(patience=patience)], rows)
    assert len(history) == 2 + max(patience, 1)


def test_early_stopping_with_patience_zero_survives_the_first_epoch() -> None:
    # keras: test_early_stopping_patience, epoch > 0.
    stopping = cb.EarlyStopping(patience=0, baseline=0.1)
    assert len(fit(Model(), [stopping], losses(0.5, 0.6))) == 2
    assert stopping.stopped_epoch == 1


def test_early_stopping_baseline() -> None:
    """``patience`` counts until the baseline is reached, even while the value improves."""
    rows = losses(0.5, 0.4, 0.3, 0.2, 0.3, 0.3)
    missed = cb.EarlyStopping(patience=1, baseline=0.05)
    assert len(fit(Model(), [missed], rows)) == 5
    reached = cb.EarlyStopping(patience=2, baseline=0.45)
    assert len(fit(Model(), [reached], losses(0.5, 0.4, 0.5, 0.5, 0.5))) == 4


def test_early_stopping_min_delta_and_mode() -> None:
    assert len(fit(Model(), [cb.EarlyStopping(min_delta=0.1, patience=1)], losses(0.5, 0.45, 0.1))) == 2
    rising = losses(0.5, 0.6, 0.7, 0.65, name="val_accuracy")
    assert len(fit(Model(), [cb.EarlyStopping("val_accuracy", patience=1)], rising)) == 4
    assert len(fit(Model(), [cb.EarlyStopping("val_accuracy", mode="min", patience=1)], rising)) == 2


def test_early_stopping_starts_late() -> None:
    stopping = cb.EarlyStopping(patience=1, start_from_epoch=3)
    assert len(fit(Model(), [stopping], losses(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))) == 5
    assert (stopping.best, stopping.best_epoch) == (0.4, 3)


def test_early_stopping_restores_the_best_weights() -> None:
    model = Model()
    stopping = cb.EarlyStopping(patience=2, restore_best_weights=True)
    assert len(fit(model, [stopping], losses(0.5, 0.2, 0.3, 0.4))) == 4
    assert model.state["weight"].data.tolist() == [2, 2]
    assert stopping.best_epoch == 1
    # As in Keras 3: without an early end, too.
    model = Model()
    assert len(fit(model, [cb.EarlyStopping(patience=9, restore_best_weights=True)], losses(0.5, 0.2, 0.3))) == 3
    assert model.state["weight"].data.tolist() == [2, 2]
    model = Model()
    fit(model, [cb.EarlyStopping(patience=9)], losses(0.5, 0.2, 0.3))
    assert model.state["weight"].data.tolist() == [3, 3]


def test_early_stopping_is_used_again() -> None:
    stopping = cb.EarlyStopping(patience=1)
    for _ in range(2):
        assert len(fit(Model(), [stopping], losses(0.5, 0.6, 0.7))) == 2


def test_early_stopping_never_prefers_nan() -> None:
    stopping = cb.EarlyStopping(patience=2)
    assert len(fit(Model(), [stopping], losses(float("nan"), 0.5, float("nan"), float("nan"), 0.1))) == 4
    assert stopping.best == 0.5


@pytest.mark.parametrize("stop", range(1, 6))
def test_early_stopping_goes_on(stop: int) -> None:
    """A run that stops after any epoch and is resumed ends where the whole run ends, with the same weights."""
    rows = losses(0.5, 0.3, 0.4, 0.2, 0.3, 0.35, 0.4, 0.5)

    def make() -> list[cb.Callback]:
        return [
            cb.EarlyStopping(patience=3, restore_best_weights=True),
            cb.ReduceLROnPlateau(patience=1, factor=0.5, cooldown=1),
        ]

    whole, part = Model(), Model()
    expected = fit(whole, make(), rows)
    used = make()
    hooks = CallbackList(used, part, {})
    for hook in hooks.on_train_begin:
        hook(None)
    for epoch, row in enumerate(rows[:stop]):
        part.state["weight"].data[:] = epoch + 1
        for hook in hooks.on_epoch_end:
            hook(epoch, dict(row))
    states = through_json(hooks.state())
    rest = fit(part, make(), rows[stop:], saved=states, first=stop)
    assert stop + len(rest) == len(expected)
    assert np.array_equal(part.state["weight"].data, whole.state["weight"].data)
    assert part.optimizer.rate == whole.optimizer.rate
    assert rest[-1] == expected[-1]


def test_missing_value() -> None:
    stopping = cb.EarlyStopping(patience=0)
    with pytest.warns(TrainingWarning, match="monitors 'val_los', but the epoch has val_loss; did you mean"):
        fit(Model(), [cb.EarlyStopping("val_los", mode="min")], losses(1.0))
    with pytest.warns(TrainingWarning, match="pass validation_data or validation_split"):
        fit(Model(), [stopping], losses(1.0, name="mae"))
    assert stopping.best is None


def test_direction() -> None:
    model = Model()
    own = cb.EarlyStopping("val_score", patience=1)
    with pytest.raises(InvalidArgumentError, match="'val_score', which may be better large or small; set mode="):
        fit(model, [own], losses(1.0, 2.0, name="val_score"))
    model.metrics = [SimpleNamespace(name="score", higher_is_better=True)]
    assert len(fit(model, [own], losses(1.0, 2.0, 3.0, 1.0, name="val_score"))) == 4
    # A metric of one output of several.
    assert len(fit(model, [cb.EarlyStopping("val_head_score")], losses(1.0, 2.0, 1.0, name="val_head_score"))) == 3
    for name in ("accuracy", "acc", "top5", "f1_macro", "auroc", "r2", "head_precision"):
        assert cb._monitor.is_higher_better(f"val_{name}", None) is True, name
    for name in ("loss", "head_loss", "mae", "mean_squared_error", "perplexity", "rmse"):
        assert cb._monitor.is_higher_better(name, None) is False, name
    for name in ("lossless", "tip", "stop5", "val"):
        assert cb._monitor.is_higher_better(name, None) is None, name
    with pytest.raises(InvalidArgumentError, match="mode must be"):
        cb.EarlyStopping(mode="maximum")


def rates(rows: list[dict[str, float]], **settings: Any) -> list[float]:
    """Return the learning rate that each epoch was trained with."""
    model = Model()
    return [row["learning_rate"] for row in fit(model, [cb.ReduceLROnPlateau(**settings)], rows)] + [
        model.optimizer.rate
    ]


def test_reduce_on_plateau() -> None:
    """As in Keras: the rate falls after ``patience`` epochs without improvement by more than ``min_delta``."""
    assert rates(losses(1, 1, 1, 1), factor=0.5, patience=2) == [1, 1, 1, 0.5, 0.5]
    assert rates(losses(1, 0.95, 0.9, 0.85), factor=0.5, patience=1, min_delta=0.01) == [1, 1, 1, 1, 1]
    assert rates(losses(1, 0.95, 0.9), factor=0.5, patience=1, min_delta=0.5) == [1, 1, 0.5, 0.25]
    assert rates(losses(1, 1, 1, 1, 1), factor=0.5, patience=1, cooldown=2) == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates(losses(1, 1, 1, 1), factor=0.5, patience=1, min_lr=0.4) == pytest.approx([1, 1, 0.5, 0.4, 0.4])
    with pytest.raises(InvalidArgumentError, match="factor must be below 1"):
        cb.ReduceLROnPlateau(factor=1.0)


def test_decisions_of_keras() -> None:
    """Recorded decisions of Keras for random settings and values; ``in_keras/record_callbacks.py`` records them."""
    cases = json.loads((Path(__file__).parent / "data" / "keras" / "callbacks.json").read_text(encoding="utf-8"))
    assert len(cases) >= 100
    for case in cases:
        model = Model()
        stopping, plateau = cb.EarlyStopping(**case["stopping"]), cb.ReduceLROnPlateau(**case["plateau"])
        decided: list[list[Any]] = []

        def note(epoch: int, logs: Any, stopping: Any = stopping, plateau: Any = plateau, to: Any = decided) -> None:
            rate = plateau.model.optimizer.rate
            to.append([rate, stopping.wait, stopping.best, plateau.wait, plateau.cooldown_counter])

        fit(model, [stopping, plateau, cb.LambdaCallback(on_epoch_end=note)], losses(*case["values"]))
        for found, expected in zip(decided, case["epochs"], strict=True):
            # Without a best value both have None.
            assert found == [value if value is None else pytest.approx(value, rel=1e-6) for value in expected], case
        assert (stopping.stopped_epoch, stopping.best_epoch) == (case["stopped_epoch"], case["best_epoch"]), case
        assert model.state["weight"].data.tolist() == [case["weights"]] * 2, case


def test_reduction_that_a_schedule_overwrites() -> None:
    model = Model()
    schedule = cb.LambdaCallback(on_train_batch_end=lambda batch, logs: model.optimizer.set_learning_rate(1.0))
    with pytest.warns(
        TrainingWarning, match=r"was reduced to 0\.1, but is 1 now: a schedule or another callback"
    ) as caught:
        fit(model, [cb.ReduceLROnPlateau(patience=1), schedule], losses(1, 1, 1))
    assert len(caught) == 1


def test_lambda_callback() -> None:
    seen: list[Any] = []
    used = cb.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_epoch_end=lambda epoch, logs: seen.append((epoch, logs)),
        on_test_begin=lambda logs: seen.append("test"),
    )
    hooks = CallbackList([used], None, {})
    assert hooks.on_epoch_begin == ()
    assert len(hooks.on_test_begin) == 1
    fit(Model(), [used], losses(1))
    assert seen == ["begin", (0, {"val_loss": 1})]
    with pytest.raises(TypeError, match="did you mean 'on_epoch_end'"):
        cb.LambdaCallback(on_epoch_ends=print)


def test_checkpoints_of_each_epoch(tmp_path: Path) -> None:
    model = Model()
    fit(model, [cb.ModelCheckpoint(tmp_path / "new" / "{epoch:02d}-{val_loss:.2f}")], losses(0.5, 0.25))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["01-0.50", "02-0.25"]
    with pytest.raises(
        InvalidArgumentError, match="has the name 'val_acc', but the names at this save are val_loss, epo"
    ):
        fit(model, [cb.ModelCheckpoint(tmp_path / "{val_acc}")], losses(0.5))


def test_checkpoints_of_the_best_epochs(tmp_path: Path) -> None:
    model = Model()
    rows = losses(0.5, 0.6, 0.4, 0.45, 0.3)
    fit(model, [cb.ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True, keep=2)], rows)
    assert [Path(path).name for path in model.saved] == ["1", "3", "5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5"]
    model = Model()
    threshold = cb.ModelCheckpoint(tmp_path / "best", save_best_only=True, initial_value_threshold=0.42, mode="min")
    fit(model, [threshold], rows)
    assert len(model.saved) == 2


def test_checkpoints_of_steps(tmp_path: Path) -> None:
    """``save_freq`` counts steps over the ends of epochs."""
    model = Model()
    fit(model, [cb.ModelCheckpoint(tmp_path / "{epoch}-{batch}", save_freq=3)], losses(1, 1, 1), steps=4)
    assert [Path(path).name for path in model.saved] == ["1-3", "2-2", "3-1", "3-4"]


def test_only_own_checkpoints_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "other").write_text("other")
    used = cb.ModelCheckpoint(tmp_path / "{epoch}", keep=1)
    fit(Model(), [used], losses(1, 1))
    states = through_json(CallbackList([used], None, {}).state())
    fit(Model(), [cb.ModelCheckpoint(tmp_path / "{epoch}", keep=1)], losses(1, 1), saved=states, first=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "other"]
    # One path for all epochs is never deleted.
    fit(Model(), [cb.ModelCheckpoint(tmp_path / "model", keep=1)], losses(1, 1, 1))
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_freq": "batch"}, "save_freq must be"),
        ({"save_freq": 0}, "save_freq must be"),
        ({"keep": 0}, "keep must be"),
    ],
)
def test_bad_settings_of_checkpoints(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        cb.ModelCheckpoint("x", **settings)


def test_csv_logger(tmp_path: Path) -> None:
    """Columns, order and ``NA`` match Keras."""
    path = tmp_path / "logs" / "log.csv"
    rows = [{"loss": 0.1, "accuracy": 0.5}, {"loss": np.float32(0.25), "accuracy": 0.75, "val_loss": 1 / 3}]
    fit(Model(), [cb.CSVLogger(path)], rows)
    read = list(csv.reader(path.read_text().splitlines()))
    assert read == [
        ["epoch", "accuracy", "loss", "val_accuracy", "val_loss"],
        ["0", "0.5", "0.1", "NA", "NA"],
        ["1", "0.75", "0.25", "NA", repr(1 / 3)],
    ]
    fit(Model(), [cb.CSVLogger(path, append=True)], rows[1:])
    assert len(path.read_text().splitlines()) == 4
    fit(Model(), [cb.CSVLogger(path, separator=";")], losses(0.5))
    assert path.read_text() == "epoch;val_loss\n0;0.5\n"


def test_csv_logger_goes_on(tmp_path: Path) -> None:
    """A resumed run keeps the lines before its position, and drops the lines of repeated epochs."""
    rows = losses(0.5, 0.4, 0.3, 0.2)
    fit(Model(), [cb.CSVLogger(tmp_path / "whole.csv")], rows)
    used = cb.CSVLogger(tmp_path / "part.csv")
    fit(Model(), [used], rows[:2])
    states = through_json(CallbackList([used], None, {}).state())
    with (tmp_path / "part.csv").open("a") as file:
        file.write("2,9.9\n")
    fit(Model(), [cb.CSVLogger(tmp_path / "part.csv")], rows[2:], saved=states, first=2)
    assert (tmp_path / "part.csv").read_text() == (tmp_path / "whole.csv").read_text()


class Writer:
    """Writer of tensorboardX, which records the calls."""

    written: dict[str, list[tuple[str, float, int]]]

    def __init__(self, folder: str) -> None:
        self.points = Writer.written.setdefault(Path(folder).name, [])

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def add_histogram(self, name: str, values: Any, step: int) -> None:
        self.points.append((f"histogram of {name}", float(values.sum()), step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.points.append(("closed", 0, 0))


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags and folders match Keras."""
    Writer.written = {}
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    board = cb.TensorBoard("logs", histogram_freq=2, update_freq=2)
    fit(Model(), [board], [{"loss": 0.5, "val_loss": 0.75}] * 2, steps=3)
    assert Writer.written["validation"] == [("epoch_loss", 0.75, 0), ("epoch_loss", 0.75, 1), ("closed", 0, 0)]
    assert Writer.written["train"] == [
        ("batch_loss", 0.5, 1),
        ("epoch_loss", 0.5, 0),
        ("epoch_learning_rate", 1, 0),
        ("histogram of weight", 2, 0),
        ("batch_loss", 0.5, 3),
        ("batch_loss", 0.5, 5),
        ("epoch_loss", 0.5, 1),
        ("epoch_learning_rate", 1, 1),
        ("closed", 0, 0),
    ]
    assert CallbackList([cb.TensorBoard()], None, {}).on_train_batch_end == ()
    for frequency in ("step", 0):
        with pytest.raises(InvalidArgumentError, match="update_freq must be"):
            cb.TensorBoard(update_freq=frequency)


class Client:
    """Client of MLflow, which records the calls."""

    calls: list[tuple[Any, ...]]

    def __init__(self, tracking_uri: str | None) -> None:
        self.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_param(self, run: str, name: str, value: Any) -> None:
        self.calls.append((run, name, value))

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.calls.append((run, name, value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.calls.append((run, status))


def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Client.calls = []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(tracking=None))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    tracking = cb.MLflow(tmp_path, "digits", "first", log_every_n_steps=2, params={"model": "m.onnx"})
    fit(Model(), [tracking], losses(0.5), steps=3)
    assert Client.calls == [
        ("client", tmp_path.as_uri()),
        ("experiment", "digits"),
        ("run", "7", "first"),
        ("r1", "epochs", 1),
        ("r1", "steps", 3),
        ("r1", "batch_size", 4),
        ("r1", "verbose", 0),
        ("r1", "model", "m.onnx"),
        ("r1", "batch_loss", 0.0, 2),
        ("r1", "val_loss", 0.5, 0),
        ("r1", "FINISHED"),
    ]
    # A resumed training adds to its own run.
    states = through_json(CallbackList([tracking], None, {}).state())
    Client.calls.clear()
    fit(Model(), [cb.MLflow("http://localhost:5000")], losses(0.25), saved=states, first=1)
    assert Client.calls == [("client", "http://localhost:5000"), ("r1", "val_loss", 0.25, 1), ("r1", "FINISHED")]
    with pytest.raises(InvalidArgumentError, match="log_every_n_steps must be"):
        cb.MLflow(log_every_n_steps=0)


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("tqdm", cb.ProgressBar, r"a progress bar needs tqdm, which is not installed; pip install 'ortrain\[train\]'"),
        ("tensorboardX", cb.TensorBoard, "TensorBoard needs tensorboardX, which is not installed"),
        ("mlflow", cb.MLflow, "MLflow needs mlflow-skinny, which is not installed"),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, module: str, make: Any, message: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.tracking", raising=False)
    with pytest.raises(ImportError, match=message):
        make()


def test_verbose_callbacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is printed unless ``verbose`` asks for it."""
    for verbose in (0, 1):
        used = [
            cb.EarlyStopping(patience=2, restore_best_weights=True, verbose=verbose),
            cb.ReduceLROnPlateau(patience=1, verbose=verbose),
            cb.ModelCheckpoint(tmp_path / "m", save_best_only=True, verbose=verbose),
        ]
        fit(Model(), used, losses(1, 1, 1))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 5 * verbose, lines
    assert lines[0] == f"epoch 1: saved {tmp_path / 'm'} (val_loss 1)"
    assert lines[1] == "epoch 2: learning rate reduced to 0.1"
    assert lines[3:] == [
        "epoch 3: val_loss has not improved for 2 epochs; stopped",
        "restored the weights of epoch 1",
    ]


class Bar:
    """Bar of tqdm, which records the lines."""

    def __init__(self, total: int | None, desc: str, **_: Any) -> None:
        self.total, self.n, self.desc, self.text = total, 0, desc, ""
        self.lines: list[str] = []

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text
        if refresh:
            self.lines.append(f"{self.desc} {self.n}/{self.total}, {text}")

    def close(self) -> None:
        self.lines.append(f"{self.desc} {self.n}/{self.total}, {self.text}")

    @staticmethod
    def format_interval(seconds: float) -> str:
        return f"{seconds:.2f}"


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """Stand-ins for tqdm's bars, and a clock that is a second later at each look."""
    made: list[Bar] = []

    def make(**settings: Any) -> Bar:
        made.append(Bar(**settings))
        return made[-1]

    make.shape = ""  # type: ignore[attr-defined]
    clock = iter(range(10_000))
    monkeypatch.setattr(_progress, "_bar_type", lambda file: make)
    monkeypatch.setattr(_progress, "INTERVAL_PER_COST", 0)
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: float(next(clock)))
    return made


def test_line_of_an_epoch(bars: list[Bar]) -> None:
    model = Model()
    model.module = SimpleNamespace(memory=lambda: SimpleNamespace(total=12_000_000))  # type: ignore[attr-defined]
    hooks = CallbackList([cb.ProgressBar()], model, {"epochs": 3, "steps": 4, "batch_size": 8, "verbose": 1})
    hooks.on_epoch_begin[0](1, None)
    for batch in range(4):
        hooks.on_train_batch_end[0](batch, {"loss": 0.5, "accuracy": 0.75})
    hooks.on_test_begin[0](None)
    hooks.on_test_batch_end[0](0, None)
    hooks.on_test_end[0](None)
    hooks.on_epoch_end[0](1, {"loss": 0.5, "val_loss": 0.25})
    assert bars[0].lines == [
        "epoch 2/3 1/4, loss 0.5, accuracy 0.75, 8 samples/s, 3.00 left, 12 MB",
        "epoch 2/3 2/4, loss 0.5, accuracy 0.75, 5.33 samples/s, 3.00 left, 12 MB",
        "epoch 2/3 3/4, loss 0.5, accuracy 0.75, 4.8 samples/s, 1.67 left, 12 MB",
        "epoch 2/3 4/4, loss 0.5, accuracy 0.75, 4.57 samples/s, 0.00 left, 12 MB",
        "epoch 2/3 4/4, validation: batch 1",
        "epoch 2/3 4/4, loss 0.5, val_loss 0.25, 3.56 samples/s, 12 MB, 11.0 s",
    ]


def test_line_of_a_resumed_epoch(bars: list[Bar]) -> None:
    """Batches before the position do not count for the speed. Without sizes, batches are counted."""
    hooks = CallbackList([cb.ProgressBar()], Model(), {"epochs": 1, "steps": None, "batch_size": None})
    hooks.on_epoch_begin[0](0, None)
    hooks.on_train_batch_end[0](100, {"loss": 0.5})
    hooks.on_train_batch_end[0](101, {"loss": 0.5})
    hooks.on_train_end[0](None)
    assert bars[0].lines[:2] == [
        "epoch 1/1 101/None, loss 0.5, 1 batches/s",
        "epoch 1/1 102/None, loss 0.5, 0.667 batches/s",
    ]
    assert len(bars[0].lines) == 3


def test_lines_of_evaluate_and_predict(bars: list[Bar]) -> None:
    hooks = CallbackList([cb.ProgressBar()], Model(), {"steps": 2, "batch_size": 8, "verbose": 1})
    hooks.on_test_begin[0](None)
    hooks.on_test_batch_end[0](0, {"loss": 0.5})
    hooks.on_test_batch_end[0](1, {"loss": 0.5})
    hooks.on_test_end[0]({"loss": 0.25})
    hooks.on_predict_begin[0](None)
    hooks.on_predict_batch_end[0](1, None)
    hooks.on_predict_end[0](None)
    assert bars[0].lines[-1] == "evaluate 2/2, loss 0.25, 3.2 samples/s, 5.0 s"
    assert bars[1].lines[-1] == "predict 2/2, 2.67 samples/s, 3.0 s"


def test_one_line_per_epoch(bars: list[Bar]) -> None:
    text = io.StringIO()
    hooks = CallbackList([cb.ProgressBar(text)], Model(), {"epochs": 2, "steps": 2, "batch_size": 8, "verbose": 2})
    for epoch in range(2):
        hooks.on_epoch_begin[0](epoch, None)
        hooks.on_train_batch_end[0](0, {"loss": 0.5})
        hooks.on_train_batch_end[0](1, {"loss": 0.5})
        hooks.on_epoch_end[0](epoch, {"loss": 0.25})
    assert text.getvalue().splitlines() == [
        "epoch 1/2 2/2, loss 0.25, 3.2 samples/s, 5.0 s",
        "epoch 2/2 2/2, loss 0.25, 3.2 samples/s, 5.0 s",
    ]
    assert not bars


def test_bar_of_tqdm() -> None:
    """The line fits the terminal; its last state stays. Few of many short steps draw it."""
    text = io.StringIO()
    bar = cb.ProgressBar(file=text)
    fit(Model(), [bar], [{"loss": 0.5, "val_loss": 0.25}], steps=3)
    last = text.getvalue().split("\r")[-1].rstrip()
    assert last.startswith("epoch 1/1 3/3, loss 0.5, val_loss 0.25, ")
    assert last.endswith(" s")
    hooks = CallbackList([bar], Model(), {"epochs": 1, "steps": 100_000, "batch_size": 8})
    hooks.on_epoch_begin[0](0, None)
    logs = {"loss": 0.5}
    before = text.getvalue().count("\r")
    for batch in range(20_000):
        for hook in hooks.on_train_batch_end:
            hook(batch, logs)
    assert text.getvalue().count("\r") - before < 1000
    hooks.on_train_end[0](None)


def test_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal and a notebook are watched; a pipe and a log are not."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not _progress.is_watched()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert _progress.is_watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not _progress.is_watched()
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert _progress.is_watched()


def test_weights_of_a_real_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best weights and checkpoints of a state of the core, with an optimizer that goes on after them."""
    monkeypatch.chdir(tmp_path)
    ortrain.generate_artifacts(
        ortrain.examples.perceptron(),
        requires_grad=["fc2.weight", "fc2.bias"],
        loss=ortrain.LossType.CrossEntropyLoss,
        optimizer=ortrain.OptimType.AdamW,
    )
    state = ortrain.CheckpointState.load_checkpoint("checkpoint")
    module = ortrain.Module("training_model.onnx", state)
    optimizer = ortrain.Optimizer("optimizer_model.onnx", module)
    model = SimpleNamespace(state=state, module=module, optimizer=optimizer, stop_training=False)
    stopping = cb.EarlyStopping(patience=1, restore_best_weights=True)
    hooks = CallbackList([stopping, cb.ModelCheckpoint("{epoch}", save_weights_only=True, keep=2)], model, {})
    x, labels = np.ones((4, 64), np.float32), np.zeros(4, np.int64)
    best = {}
    for epoch, loss in enumerate([0.5, 0.25, 0.5]):
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        if loss == 0.25:
            best = {name: np.array(parameter.data) for name, parameter in state.parameters}
        for hook in hooks.on_epoch_end:
            hook(epoch, {"val_loss": loss})
    assert model.stop_training
    assert not np.array_equal(state.parameters["fc2.bias"].data, best["fc2.bias"])
    again = cb.EarlyStopping(patience=1, restore_best_weights=True)
    CallbackList([again], model, {}).restore(through_json(hooks.state()))
    again.on_train_end()
    assert all(np.array_equal(parameter.data, best[name]) for name, parameter in state.parameters)
    module(x, labels)
    optimizer.step()
    assert sorted(path.name for path in Path().iterdir() if path.name.isdigit()) == ["2", "3"]
    loaded = ortrain.CheckpointState.load_checkpoint("2")
    assert np.array_equal(loaded.parameters["fc2.bias"].data, best["fc2.bias"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.set_learning_rate(0.5)


# With the model itself.


def trainable(**settings: Any) -> ortrain.Model:
    return ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"], device="cpu", **settings)


def rows(count: int = 40) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(count) % 10)
    return (rng.random((count, 64)) + np.eye(10, 64)[labels]).astype(np.float32), labels


def test_hooks_of_fit_evaluate_and_predict() -> None:
    """The order of Keras: the validation runs inside its epoch, before ``on_epoch_end``."""
    calls: list[str] = []
    hooks = [hook for hook in dir(cb.Callback) if hook.startswith("on_") and "on_batch" not in hook]
    recorder = cb.LambdaCallback(**{hook: lambda *_, name=hook: calls.append(name) for hook in hooks})
    model = trainable()
    x, labels = rows(12)
    model.fit(x, labels, batch_size=4, epochs=2, validation_split=0.34, callbacks=[recorder], verbose=0)
    batch = ["on_train_batch_begin", "on_train_batch_end"]
    test = ["on_test_begin", *["on_test_batch_begin", "on_test_batch_end"] * 2, "on_test_end"]
    epoch = ["on_epoch_begin", *batch * 2, *test, "on_epoch_end"]
    assert calls == ["on_train_begin", *epoch * 2, "on_train_end"]
    calls.clear()
    model.evaluate(x, labels, batch_size=6, callbacks=[recorder], verbose=0)
    assert calls == test
    calls.clear()
    model.predict(x, batch_size=12, callbacks=[recorder], verbose=0)
    assert calls == ["on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end", "on_predict_end"]


def test_logs_of_fit() -> None:
    """Callbacks see the values of the history, and entries that they add get into it."""
    seen: list[dict[str, float]] = []

    class Own(cb.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert set(logs) == {"loss", "accuracy"}
            assert 0 <= logs["accuracy"] <= 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["steps"] = float(self.model.optimizer.step_count)
            seen.append(dict(logs))

    x, labels = rows()
    history = trainable().fit(x, labels, epochs=2, validation_split=0.2, callbacks=[Own()], verbose=0)
    assert list(history) == ["loss", "accuracy", "val_loss", "val_accuracy", "steps"]
    assert [{name: values[epoch] for name, values in history.items()} for epoch in range(2)] == seen
    assert history.params["epochs"] == 2


def test_early_stopping_of_fit(tmp_path: Path) -> None:
    """The model ends with its best weights, and the models of the best epochs are saved."""
    x, labels = rows()
    model = trainable(learning_rate=0.5)
    used = [
        cb.EarlyStopping(patience=2, restore_best_weights=True),
        cb.ModelCheckpoint(tmp_path / "best", save_best_only=True),
        cb.CSVLogger(tmp_path / "log.csv"),
    ]
    history = model.fit(x, labels, batch_size=8, epochs=30, validation_split=0.4, callbacks=used, verbose=0)
    best = int(np.argmin(history["val_loss"]))
    assert len(history.epoch) == best + 3 < 30
    held_out = x[24:], labels[24:]
    loss = model.evaluate(*held_out, batch_size=8, verbose=0)[0]
    assert loss == history["val_loss"][best]
    again = ortrain.Model(tmp_path / "best", metrics=["accuracy"])
    assert again.evaluate(*held_out, batch_size=8, verbose=0)[0] == loss
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + len(history.epoch)


def test_lines_without_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(_progress, "find_spec", lambda name: None)
    x, labels = rows()
    model = trainable()
    for verbose in (1, 2):
        model.fit(x, labels, epochs=2, verbose=verbose)
        model.evaluate(x, labels, verbose=verbose)
        lines = capsys.readouterr().err.splitlines()[-3:]
        assert [line.partition(",")[0] for line in lines] == ["epoch 1/2 2/2", "epoch 2/2 2/2", "evaluate 2/2"]
        assert all(", accuracy " in line for line in lines)


def test_bar_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    x, labels = rows()
    model = trainable()
    model.fit(x, labels, epochs=2)
    model.fit(x, labels, epochs=2, verbose=0)
    assert "%" not in capsys.readouterr().err
    model.fit(x, labels, epochs=2, verbose=1)
    shown = [line.split("\r")[-1] for line in capsys.readouterr().err.rstrip("\n").split("\n")]
    assert len(shown) == 2
    assert shown[1].startswith("epoch 2/2 ")
    assert ", accuracy " in shown[1]
    assert " samples/s, " in shown[1]
    assert " kB, " in shown[1]
    model.fit(x, labels, epochs=1, verbose=2)
    assert capsys.readouterr().err.startswith("epoch 1/1 2/2, loss ")


def test_report_of_fit(tmp_path: Path) -> None:
    """The report of a run has all parts, with the mistakes on the validation set."""
    x, labels = rows()
    model = trainable(trainable="head")
    history = model.fit(x, labels, epochs=2, validation_split=0.25, verbose=0)
    text = history.report(tmp_path / "report.html").read_text(encoding="utf-8")
    for part in (
        "Training of perceptron.onnx",
        "10 rows of the validation set",
        "Confusion matrix",
        "Examples that are most wrong",
        "970 values in 2 parameters are trained, 13.5 % of the 7,210 values",
        "matrix products",
        "optimizer",
    ):
        assert part in text, part
    state = model.state.to_bytes()
    history.report(tmp_path / "again.html")
    # A report changes nothing.
    assert model.state.to_bytes() == state
