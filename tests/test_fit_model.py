"""``ortrain.Model``: the behaviour of Keras under the same names, and the choices of a training."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fit_models import bound_to_batch, net, rows

import ortrain
from ortrain import artifacts, optim, schedules
from ortrain.callbacks import Callback

ROWS = rows()


def model(source: Any = None, **arguments: Any) -> ortrain.Model:
    return ortrain.Model(source or net(3), **({"learning_rate": 0.05, "device": "cpu"} | arguments))


def weights(trained: ortrain.Model) -> dict[str, Any]:
    return {name: parameter.data.copy() for name, parameter in trained.state.parameters}


class Recorder(Callback):
    """Callback that records its hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in dir(Callback):
            if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
                setattr(self, name, self._hook(name.removeprefix("on_")))

    def _hook(self, name: str) -> Any:
        def record(first: Any = None, logs: Any = None) -> None:
            at = "" if first is None or not isinstance(first, int) else f" {first}"
            self.calls.append(name + at)
            last = logs if logs is not None else first
            if hasattr(last, "keys"):
                assert all(isinstance(last[key], float) for key in last), name

        return record


def test_order_of_callbacks() -> None:
    recorder = Recorder()
    model().fit(*ROWS, batch_size=16, epochs=2, validation_split=0.25, callbacks=[recorder])
    epoch = [f"train_batch_{when} {at}" for at in range(2) for when in ("begin", "end")]
    test = ["test_begin", "test_batch_begin 0", "test_batch_end 0", "test_end"]
    expected = ["train_begin"]
    for at in range(2):
        expected += [f"epoch_begin {at}", *epoch, *test, f"epoch_end {at}"]
    assert recorder.calls == [*expected, "train_end"]
    recorder = Recorder()
    trained = model()
    trained.evaluate(*ROWS, callbacks=[recorder], batch_size=40)
    trained.predict(ROWS[0], callbacks=[recorder], batch_size=40)
    assert recorder.calls == [*test, "predict_begin", "predict_batch_begin 0", "predict_batch_end 0", "predict_end"]


def test_history() -> None:
    trained = model(metrics=["accuracy"])
    history = trained.fit(*ROWS, epochs=3, validation_data=ROWS)
    assert history is trained.history
    assert isinstance(history, ortrain.History)
    assert list(history.history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert history.epoch == [0, 1, 2]
    assert trained.evaluate(*ROWS) == [history["val_loss"][-1], history["val_accuracy"][-1]]
    assert trained.evaluate(*ROWS, return_dict=True) == {
        "loss": history["val_loss"][-1],
        "accuracy": history["val_accuracy"][-1],
    }
    assert history.params["epochs"] == 3
    assert history.params["steps"] == 2
    assert len(history.steps["loss"]) == 6


def test_validation_split_takes_the_last_rows() -> None:
    x, y = ROWS
    first, second = model(), model()
    a = first.fit(x, y, validation_split=0.25, epochs=2, batch_size=8)
    b = second.fit(x[:30], y[:30], validation_data=(x[30:], y[30:]), epochs=2, batch_size=8)
    assert a == b
    weighted = model().fit(
        x, y, validation_split=0.25, sample_weight=np.r_[np.ones(30), np.full(10, 2)], epochs=2, batch_size=8
    )
    assert weighted["val_loss"] == pytest.approx([2 * value for value in a["val_loss"]], rel=1e-5)
    for share, sentence in ((1.0, "from 0 to 1"), (0.999, "of 40 rows leaves no row"), (-0.5, "from 0 to 1")):
        with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
            model().fit(x, y, validation_split=share)
    order = np.argsort(y)
    with pytest.warns(
        ortrain.TrainingWarning, match="validation_split takes the last rows, and class 2 is only among them"
    ):
        model().fit(x[order], y[order], validation_split=(y == 2).mean())
    every_second = model().fit(x, y, validation_split=0.25, epochs=4, validation_freq=2)
    assert len(every_second["loss"]) == 4
    assert len(every_second["val_loss"]) == 2


def test_initial_epoch_and_steps() -> None:
    history = model().fit(*ROWS, initial_epoch=3, epochs=5)
    assert history.epoch == [3, 4]
    assert model().fit(*ROWS, initial_epoch=3, epochs=3).history == {}
    recorder = Recorder()
    model().fit(
        *ROWS,
        batch_size=8,
        epochs=2,
        steps_per_epoch=3,
        validation_data=ROWS,
        validation_steps=2,
        validation_batch_size=4,
        callbacks=recorder,
    )
    assert recorder.calls.count("train_batch_end 2") == 2
    assert "train_batch_end 3" not in recorder.calls
    assert recorder.calls.count("test_batch_end 1") == 2
    # Five steps are a pass: an epoch of two steps goes on in the middle of it.
    assert weights_of_steps(steps_per_epoch=2, epochs=5) == weights_of_steps(epochs=2)


def weights_of_steps(**arguments: Any) -> list[bytes]:
    trained = model()
    trained.fit(*ROWS, batch_size=8, **arguments)
    return [value.tobytes() for value in weights(trained).values()]


def test_a_second_fit_goes_on() -> None:
    once, twice = model(), model()
    once.fit(*ROWS, batch_size=8, epochs=4)
    twice.fit(*ROWS, batch_size=8, epochs=2)
    twice.fit(*ROWS, batch_size=8, epochs=2)
    assert all(np.array_equal(a, b) for a, b in zip(weights(once).values(), weights(twice).values(), strict=True))


def test_moments_stay_if_arguments_change() -> None:
    def run(**arguments: Any) -> dict[str, Any]:
        trained = model(metrics=["accuracy"])
        trained.fit(*ROWS, batch_size=8)
        trained.optimizer.set_learning_rate(0.01)
        trained.fit(*ROWS, batch_size=8, **arguments)
        assert trained.optimizer.step_count == 10
        return weights(trained)

    expected = run()
    for arguments in ({"clip_norm": 1e9}, {"sample_weight": np.ones(40)}):
        for name, value in run(**arguments).items():
            assert value == pytest.approx(expected[name], abs=1e-6)


def test_the_seed_decides_the_order() -> None:
    def losses(**arguments: Any) -> list[float]:
        found: list[float] = model(seed=arguments.pop("seed", 0)).fit(*ROWS, batch_size=8, **arguments).steps["loss"]
        return found

    assert losses() == losses()
    assert losses() != losses(seed=1)
    assert losses(shuffle=False) == losses(seed=1, shuffle=False)


def test_stop_training() -> None:
    class Stop(Callback):
        def __init__(self, hook: str) -> None:
            setattr(self, hook, lambda at, logs=None: setattr(self.model, "stop_training", at == 1))

    assert model().fit(*ROWS, batch_size=8, epochs=9, callbacks=[Stop("on_epoch_end")]).epoch == [0, 1]
    history = model().fit(*ROWS, batch_size=8, epochs=9, callbacks=[Stop("on_train_batch_end")])
    assert history.epoch == [0]
    assert len(history.steps["loss"]) == 2


def test_weights_of_rows_and_classes() -> None:
    x, y = ROWS
    weight = np.array([1.0, 0.5, 3.0])[y]
    first, second = model(), model()
    a = first.fit(x, y, class_weight={1: 0.5, 2: 3.0}, batch_size=8)
    b = second.fit(x, y, sample_weight=weight, batch_size=8)
    assert a == b
    assert first.evaluate(x, y) == pytest.approx(model().fit(x, y, batch_size=8) and second.evaluate(x, y))
    texts = np.array(["ant", "bee", "cat"])
    assert model().fit(x, texts[y], class_weight={"bee": 0.5, "cat": 3.0}, batch_size=8) == a
    # Weight two is like two copies of the row, up to the factor of the mean.
    doubled = model(optimizer="sgd").evaluate(np.r_[x, x[:10]], np.r_[y, y[:10]], batch_size=50)
    weighted = model(optimizer="sgd").evaluate(x, y, sample_weight=np.r_[np.full(10, 2), np.ones(30)], batch_size=40)
    assert doubled * 50 == pytest.approx(weighted * 40, rel=1e-5)
    for wrong, sentence in (
        (np.ones(39), "one number for each of the 40 rows"),
        (np.r_[np.nan, np.ones(39)], "sample_weight of row 0 is not finite"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
            model().fit(x, y, sample_weight=wrong)
    with pytest.raises(
        ortrain.InvalidArgumentError, match="class_weight has the class 'dog'; the classes are 'ant', 'bee'"
    ):
        model().fit(x, texts[y], class_weight={"dog": 0.5})
    with pytest.raises(ortrain.InvalidArgumentError, match="class_weight must be a dict"):
        model().fit(x, y, class_weight=[1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adamw", optim.AdamW(weight_decay=0.1), artifacts.OptimType.AdamW, artifacts.SGD()]
)
def test_accumulated_gradients_are_a_large_batch(optimizer: Any) -> None:
    large, small = model(optimizer=optimizer), model(optimizer=optimizer)
    large.fit(*ROWS, batch_size=20, epochs=2, shuffle=False)
    small.fit(*ROWS, batch_size=5, epochs=2, accumulate=4, shuffle=False)
    assert small.optimizer.step_count == 4
    for name, value in weights(large).items():
        assert weights(small)[name] == pytest.approx(value, abs=1e-5)
    # The last group of an epoch may be smaller.
    small.fit(*ROWS, batch_size=5, accumulate=3)
    assert small.optimizer.step_count == 4 + 3


def test_clipping() -> None:
    before = weights(model(loss="cross_entropy"))
    clipped = model(optimizer="sgd", learning_rate=1.0)
    clipped.fit(*ROWS, batch_size=40, clip_norm=1e-3)
    moved = sum(float(((value - before[name]) ** 2).sum()) for name, value in weights(clipped).items()) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ortrain.InvalidArgumentError, match="clip_norm must be a number above 0"):
        clipped.fit(*ROWS, clip_norm=0)


@pytest.mark.parametrize(
    ("trainable", "trained"),
    [
        ("all", ["b1", "b2", "w1", "w2"]),
        ("head", ["b2", "w2"]),
        ("last:2", ["b1", "b2", "w1", "w2"]),
        ("w*", ["w1", "w2"]),
        (["layer1"], None),
        (["b1", "w2"], ["b1", "w2"]),
        (lambda info: info.name.endswith("1"), ["b1", "w1"]),
    ],
)
def test_trained_parameters(trainable: Any, trained: list[str] | None) -> None:
    if trained is None:
        with pytest.raises(ortrain.OrtrainError, match="layer1"):
            model(trainable=trainable, loss="cross_entropy").fit(*ROWS)
        return
    found = model(trainable=trainable)
    text = found.summary()
    found.fit(*ROWS)
    assert [name for name, parameter in found.state.parameters if parameter.requires_grad] == trained
    assert text.splitlines()[:8] == found.summary().splitlines()[:8]
    assert found.summary().count("yes") == len(trained)


def test_frozen_parameters_and_wrong_selections() -> None:
    found = model(frozen="*1")
    assert found.summary().count("yes") == 2
    before = weights(model(loss="mse"))
    found.fit(*ROWS)
    assert np.array_equal(weights(found)["w1"], before["w1"])
    assert not np.array_equal(weights(found)["w2"], before["w2"])
    for arguments, sentence in (
        ({"trainable": "last:7"}, r"the number of layers in trainable='last:n' must be from 1 to 2"),
        ({"trainable": "q*"}, "trainable: the pattern 'q\\*' matches no parameter"),
        ({"trainable": []}, "trainable must be 'all', 'head', 'last:3', names"),
        ({"frozen": 3}, "frozen must be names"),
        ({"trainable": ["w1"], "frozen": ["w1"]}, "w1"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
            model(**arguments).fit(*ROWS)


def test_a_new_head() -> None:
    x, y = rows(classes=5)
    found = model(net(3, "Softmax"), classes=5, trainable="head", seed=4)
    history = found.fit(x, y, epochs=5)
    assert found.predict(x).shape == (40, 5)
    assert history["loss"][-1] < history["loss"][0]
    assert list(weights(found)) == ["b2", "w2"]
    with pytest.raises(ortrain.InvalidArgumentError, match="at least 1"):
        model(classes=0)


def test_learning_rate() -> None:
    assert model(learning_rate=0.25, loss="mse").optimizer.get_learning_rate() == 0.25
    assert model(learning_rate=None, optimizer=optim.Lion(lr=0.125), loss="mse").optimizer.get_learning_rate() == 0.125
    found = model(learning_rate="find")
    before = found.fit(*ROWS, epochs=0) and weights(found)
    test = found.range_test
    assert test is not None
    assert 1e-5 < test.suggestion < 1
    assert found.optimizer.get_learning_rate() == pytest.approx(test.suggestion)
    assert "range test: learning rate" in str(test)
    assert all(np.array_equal(value, weights(model(loss="cross_entropy"))[name]) for name, value in before.items())
    for wrong in ("fast", -1, float("nan"), True):
        with pytest.raises(
            ortrain.InvalidArgumentError, match="learning_rate must be a number of at least 0, 'find' or None"
        ):
            model(learning_rate=wrong)


def test_schedules() -> None:
    found = model()
    rates = found.fit(*ROWS, batch_size=8, epochs=2, schedule="linear").steps["learning_rate"]
    assert rates == pytest.approx(np.linspace(0.05, 0.005, 10))
    again = found.fit(*ROWS, batch_size=8, epochs=1, schedule=schedules.Constant())
    assert len(again.steps["learning_rate"]) == 5
    plateau = model().fit(*ROWS, epochs=4, schedule=schedules.ReduceOnPlateau(patience=0, threshold=1e9))
    assert plateau.steps["learning_rate"][-1] < 0.05
    warm = {"name": "linear", "warmup": 2, "end": 0.5}
    rates = model().fit(*ROWS, batch_size=8, schedule=warm).steps["learning_rate"]
    assert rates == pytest.approx(0.05 * np.array([0, 1 / 2, 1, 5 / 6, 2 / 3]))
    for wrong, sentence in (
        ("cosin", r"there is no schedule 'cosin'.*did you mean 'cosine'"),
        ({"name": "cosine", "ends": 1}, r"the schedule 'cosine' has no setting 'ends'.*did you mean 'end'"),
        ({"name": "step"}, "the schedule 'step' needs the setting 'every'"),
        ({"end": 1}, "schedule is a dict without the text 'name'"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
            model().fit(*ROWS, schedule=wrong)
    decayed = model(optimizer={"name": "adamw", "weight_decay": 0.5, "betas": [0.8, 0.9]})
    assert decayed.fit(*ROWS) == model(optimizer=optim.AdamW(weight_decay=0.5, betas=(0.8, 0.9))).fit(*ROWS)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"'weight_decy'; it has .*did you mean 'weight_decay'"):
        model(optimizer={"name": "adamw", "weight_decy": 0.5})


def test_batch_size_by_memory() -> None:
    small = model()
    small.fit(*ROWS, batch_size=8)
    limit = small.module.memory().total
    found = model(memory_limit=limit)
    assert found.fit(*ROWS, batch_size="auto").params["batch_size"] in (8, 16)
    assert found.module.memory().total <= limit
    assert model().fit(*ROWS, batch_size="auto").params["batch_size"] == 32
    with pytest.raises(ortrain.MemoryLimitError, match=r"a step with one row|memory_limit is 100"):
        model(memory_limit=100).fit(*ROWS, batch_size="auto")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, or 'auto', got 0"),
        ({"batch_size": "many"}, "batch_size must be an integer"),
        ({"epochs": 1.5}, "epochs must be an integer of at least 0, got 1.5"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"verbose": 3}, "verbose must be 'auto', 0, 1 or 2"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
        ({"callbacks": [3]}, "a callback must be"),
    ],
)
def test_wrong_arguments(arguments: Any, sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
        model().fit(*ROWS, **arguments)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model().fit(*ROWS, validation_split=0.1)
    assert capfd.readouterr() == ("", "")
    pytest.importorskip("tqdm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    trained = model(net(3, "Softmax"))
    trained.fit(*ROWS, verbose=2)
    trained.fit(*ROWS, verbose=2)
    assert stream.getvalue().count("loss: cross-entropy of 'y', because the targets are integers") == 1
    assert "behind a softmax" in stream.getvalue()


def test_export(tmp_path: Path) -> None:
    trained = model(net(3, "Softmax"))
    trained.export(tmp_path / "untrained.onnx")
    trained.fit(*ROWS, epochs=3)
    trained.export(tmp_path / "trained.onnx")
    trained.export(tmp_path / "scores.onnx", outputs=["scores"])
    runtime = pytest.importorskip("onnxruntime")

    def run(name: str) -> Any:
        return runtime.InferenceSession(str(tmp_path / name)).run(None, {"x": ROWS[0]})[0]

    assert run("trained.onnx") == pytest.approx(trained.predict(ROWS[0]), abs=1e-6)
    p = run("trained.onnx")
    assert trained.evaluate(*ROWS) == pytest.approx(-np.log(p[np.arange(40), ROWS[1]]).mean(), rel=1e-5)
    assert run("untrained.onnx") == pytest.approx(model(net(3, "Softmax")).predict(ROWS[0]), abs=1e-6)
    e = np.exp(run("scores.onnx"))
    assert e / e.sum(1, keepdims=True) == pytest.approx(p, abs=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.onnx", "trained.onnx", "untrained.onnx"]


def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trained = model()
    trained.fit(*ROWS)
    trained.predict(ROWS[0])
    trained.summary()
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_ones_own_goes_on() -> None:
    trained = model()
    trained.fit(*ROWS, batch_size=40)
    before = trained.evaluate(*ROWS)
    for _ in range(20):
        trained.module(*ROWS)
        trained.optimizer.step()
        trained.module.lazy_reset_grad()
    assert trained.evaluate(*ROWS) < before


def test_functions_of_metrics() -> None:
    def share(targets: Any, outputs: Any) -> float:
        return float((targets == outputs.argmax(1)).mean())

    found = model(metrics=["accuracy", share])
    _, accuracy, own = found.evaluate(*ROWS, batch_size=7)
    assert own == pytest.approx(accuracy)
    history = found.fit(*ROWS, validation_split=0.5, batch_size=7)
    assert history["share"] == pytest.approx(history["accuracy"])
    assert found.evaluate(*ROWS, batch_size=40)[1:] == pytest.approx(found.evaluate(*ROWS, batch_size=3)[1:])


def test_weighted_metrics() -> None:
    x, y = ROWS
    sample = np.random.default_rng(1).random(40).astype(np.float32)
    chosen: dict[str, Any] = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy", "recall_macro"]}
    found = model(learning_rate=0.0, **chosen)
    right = found.predict(x).argmax(1) == y
    plain = found.evaluate(x, y, batch_size=7, return_dict=True)
    assert plain["weighted_accuracy"] == plain["accuracy"] == pytest.approx(right.mean())
    values = found.evaluate(x, y, batch_size=7, sample_weight=sample, return_dict=True)
    assert list(values) == ["loss", "accuracy", "weighted_accuracy", "recall_macro"]
    assert values["accuracy"] == plain["accuracy"]
    assert values["weighted_accuracy"] == pytest.approx(np.average(right, weights=sample))
    # The weights of classes count in the training, and not in the validation.
    factors = np.array([1.0, 0.5, 3.0])[y]
    history = found.fit(
        x, y, batch_size=7, sample_weight=sample, class_weight={1: 0.5, 2: 3.0}, validation_data=(x, y, sample)
    )
    assert history["weighted_accuracy"] == [pytest.approx(np.average(right, weights=sample * factors))]
    assert history["val_weighted_accuracy"] == [pytest.approx(values["weighted_accuracy"])]
    # The rows that fill up a fixed batch have no weight.
    fixed = ortrain.Model(bound_to_batch(4), loss="cross_entropy", device="cpu", **chosen)
    right = (fixed.predict(x[:6]).argmax(1) == y[:6]).astype(float)
    _, _, weighted, _ = fixed.evaluate(x[:6], y[:6], sample_weight=sample[:6])
    assert weighted == pytest.approx(np.average(right, weights=sample[:6]))
    with pytest.raises(ortrain.InvalidArgumentError, match="a function without an argument sample_weight"):
        model(weighted_metrics=[lambda targets, outputs: 0.0]).fit(x, y, sample_weight=sample)
