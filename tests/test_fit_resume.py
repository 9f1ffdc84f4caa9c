"""Runs that stop and go on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fit_resume_job as job
import numpy as np
import pytest
from fit_models import net, rows

import ortrain
from ortrain import _files, schedules
from ortrain.callbacks import Callback

ROWS, STEPS = rows(), 7 * 4
# `make conform` kills more runs.
KILLED_RUNS = 100 if os.environ.get("ORTRAIN_CONFORM") else 3


@pytest.fixture(scope="module")
def expected() -> Any:
    return job.bits(job.fit(None))


def killed(folder: Path, at: int, threads: int = 1, every: object = 3) -> None:
    script = [sys.executable, job.__file__, str(folder), str(at), str(threads), str(every)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("seed", range(KILLED_RUNS))
def test_a_killed_run_goes_on_to_the_same_bits(expected: Any, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    left = STEPS
    for _ in range(rng.integers(1, 3)):
        at = int(rng.integers(1, left // 2))
        killed(tmp_path / "run", at, int(rng.integers(1, 3)), rng.choice(["1", "3", "0.0001", "None"]))
        left -= at
    assert job.bits(job.fit(str(tmp_path / "run"))) == expected
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith("last")) == [
        "best",
        "config.json",
        "history.csv",
        "report.html",
        "steps.bin",
        "trained.onnx",
    ]


def test_threads_and_folders_change_nothing(expected: Any, tmp_path: Path) -> None:
    assert job.bits(job.fit(str(tmp_path / "run"), threads=2, every=1)) == expected
    # A run that is over stays as it is.
    before = (tmp_path / "run" / "last").read_bytes()
    assert job.bits(job.fit(str(tmp_path / "run")))[:2] == expected[:2]
    assert (tmp_path / "run" / "last").read_bytes() == before
    history = ortrain.History.read_csv(tmp_path / "run" / "history.csv")
    assert {name: list(map(float.hex, values)) for name, values in history.history.items()} == expected[0]


def fit(folder: Path | None, callbacks: Any = (), **arguments: Any) -> ortrain.Model:
    model = ortrain.Model(net(3), learning_rate=0.05, metrics=["accuracy"], device="cpu")
    model.fit(*ROWS, **({"epochs": 3, "batch_size": 8, "resume": folder, "callbacks": callbacks} | arguments))
    return model


class At(Callback):
    """Callback that calls a function at a step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step -= 1
        if self.step == 0:
            self.function()


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Install Python's handler, because shells start background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [1, 7, 10, 15])
def test_interrupt(step: int, tmp_path: Path) -> None:
    expected = fit(None)
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted after .*; saved in .*run: fit\(\.\.\., resume="
    ) as caught:
        fit(tmp_path / "run", At(step, interrupt))
    assert f"after step {step % 5} of epoch {step // 5 + 1}" in str(caught.value) or f"after epoch {step // 5}" in str(
        caught.value
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert job.bits(fit(tmp_path / "run")) == job.bits(expected)


def test_interrupt_without_a_folder(tmp_path: Path) -> None:
    model = ortrain.Model(net(3))
    with pytest.raises(
        KeyboardInterrupt, match="interrupted after step 2 of epoch 1; the model has the weights of this step"
    ):
        model.fit(*ROWS, batch_size=8, callbacks=At(2, interrupt))
    assert model.optimizer.step_count == 2
    # The trained state is there: it can be saved, and both objects train on to the same bits.
    model.save(tmp_path)
    saved = ortrain.Model(tmp_path)
    assert saved.optimizer.step_count == 2
    assert saved.fit(*ROWS, batch_size=8) == model.fit(*ROWS, batch_size=8)
    # A second Ctrl-C does not wait for the step.
    with pytest.raises(KeyboardInterrupt):
        model.fit(*ROWS, batch_size=8, callbacks=At(2, lambda: (interrupt(), interrupt())))
    # Another thread trains without a handler.
    failures: list[BaseException] = []

    def run() -> None:
        try:
            fit(None)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures


def test_more_epochs(tmp_path: Path) -> None:
    fit(tmp_path, epochs=2)
    model = fit(tmp_path, epochs=4)
    assert job.bits(model)[0] == job.bits(fit(None, epochs=4))[0]
    assert model.history is not None
    assert model.history.epoch == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", ["cosine", schedules.Cosine(total=15), lambda t: 1 / (t + 1)])
def test_schedules_go_on(schedule: Any, tmp_path: Path) -> None:
    expected = fit(None, schedule=schedule)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, At(7, interrupt), schedule=schedule)
    assert job.bits(fit(tmp_path, schedule=schedule)) == job.bits(expected)
    assert expected.history is not None
    assert expected.history.steps["learning_rate"][0] > expected.history.steps["learning_rate"][-1] > 0


def test_the_folder(tmp_path: Path) -> None:
    model = fit(tmp_path / "a" / "run", validation_split=0.2)
    config = json.loads((tmp_path / "a/run/config.json").read_text())
    assert config["version"] == ortrain.__version__
    assert config["data"]["rows"] == 32
    assert config["settings"] | {"batch_size": 8, "seed": 0} == config["settings"]
    assert len(config["model"]["hash"]) == 64
    (found,) = ortrain.InferenceSession(str(tmp_path / "a/run/trained.onnx")).run(None, {"x": ROWS[0]})
    assert np.array_equal(found, model.predict(ROWS[0], batch_size=40))
    best = ortrain.CheckpointState.load_checkpoint(tmp_path / "a/run/best")
    assert len(best.parameters) == 4


def test_report_of_a_resumed_run_has_the_range_test(tmp_path: Path) -> None:
    suggestions = []
    for epochs in (1, 2):
        model = ortrain.Model(net(3), learning_rate="find", device="cpu")
        model.fit(*ROWS, epochs=epochs, resume=tmp_path / "run")
        assert model.range_test is not None
        suggestions.append(model.range_test.suggestion)
        assert "Choice of the learning rate" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert suggestions[0] == suggestions[1]


def test_folders_of_other_runs(tmp_path: Path) -> None:
    fit(tmp_path / "run", epochs=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ortrain.InvalidArgumentError, match=r"holds a run of another model .*; use another folder"):
        ortrain.Model(net(3, hidden=9)).fit(*ROWS, resume=tmp_path / "run")
    with pytest.raises(ortrain.InvalidArgumentError, match="holds a run of other data"):
        ortrain.Model(net(3), learning_rate=0.05, metrics=["accuracy"], device="cpu").fit(
            ROWS[0] + 1, ROWS[1], resume=tmp_path / "run", batch_size=8
        )
    with pytest.raises(
        ortrain.InvalidArgumentError,
        match="holds a run with batch_size=8, not 4; use the same value, or another folder",
    ):
        fit(tmp_path / "run", batch_size=4)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ortrain.InvalidArgumentError, match="is a file, but a run is kept in a folder"):
        fit(tmp_path / "file")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ortrain.OrtrainError, match=r"config.json cannot be read; use another folder"):
        fit(tmp_path / "run")


def test_a_run_that_fails_at_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    for arguments in ({"schedule": "cosin"}, {"callbacks": [At(1, lambda: 1 / 0)]}):
        with pytest.raises((ortrain.InvalidArgumentError, ZeroDivisionError)):
            fit(tmp_path / "run", **arguments)
        assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ortrain.InvalidArgumentError, match=r"config\.json is a file of another program"):
        fit(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit(None)
    write, count = _files.write, 0

    def fails(path: Any, data: bytes) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(_files, "write", fails)
    with pytest.raises(
        ortrain.OrtrainError, match=r"the run cannot be saved in .*No space left.*the checkpoint before is still"
    ):
        fit(tmp_path, checkpoint_every=2)
    monkeypatch.undo()
    assert job.bits(fit(tmp_path, checkpoint_every=2)) == job.bits(expected)
    # A checkpoint that cannot be written.
    full = tmp_path / "full"
    with pytest.raises(ortrain.OrtrainError, match=r"the run cannot be saved in .*full .*is a folder"):
        fit(full, At(7, lambda: (full / "last").unlink() or (full / "last").mkdir()), checkpoint_every=2)


def test_a_generator_goes_on(tmp_path: Path) -> None:
    def batches() -> Any:
        rng = np.random.default_rng(0)
        while True:
            at = rng.integers(0, 40, 8)
            yield ROWS[0][at], ROWS[1][at]

    def run(folder: Path | None, callbacks: Any = ()) -> ortrain.Model:
        model = ortrain.Model(net(3), device="cpu")
        model.fit(batches(), epochs=3, steps_per_epoch=4, resume=folder, callbacks=callbacks)
        return model

    expected = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, At(6, interrupt))
    assert job.bits(run(tmp_path)) == job.bits(expected)


def test_save_and_load(tmp_path: Path) -> None:
    def model(source: Any) -> ortrain.Model:
        return ortrain.Model(source, learning_rate=0.05, metrics=["accuracy"], device="cpu")

    whole = model(net(3, "Softmax"))
    whole.fit(*ROWS, batch_size=8, epochs=1)
    whole.save(tmp_path / "saved")
    loaded = model(tmp_path / "saved")
    assert np.array_equal(loaded.predict(ROWS[0]), whole.predict(ROWS[0]))
    assert loaded.evaluate(*ROWS) == whole.evaluate(*ROWS)
    assert loaded.optimizer.step_count == 5
    first, second = (each.fit(*ROWS, batch_size=8, epochs=2) for each in (whole, loaded))
    assert first == second
    # Other metrics, another clipping: the moments stay.
    other = ortrain.Model(tmp_path / "saved", device="cpu")
    other.fit(*ROWS, batch_size=8, clip_norm=1.0, sample_weight=np.ones(40))
    assert other.optimizer.step_count == 10
    assert repr(other._optimizer) == "AdamW(lr=0.001)"
    with pytest.raises(ortrain.NoSuchFileError, match=r"the folder .* has no model.json, so no saved model"):
        ortrain.Model(tmp_path)
    (tmp_path / "saved" / "model.json").write_text("{")
    with pytest.raises(ortrain.InvalidModelError, match="is damaged"):
        ortrain.Model(tmp_path / "saved")
    import onnx

    proto = onnx.ModelProto.FromString(net(3))
    onnx.save_model(proto, tmp_path / "net.onnx", save_as_external_data=True, location="net.data", size_threshold=0)
    ortrain.Model(tmp_path / "net.onnx").save(tmp_path / "untrained")
    assert np.array_equal(
        ortrain.Model(tmp_path / "untrained").predict(ROWS[0]), ortrain.Model(net(3)).predict(ROWS[0])
    )
