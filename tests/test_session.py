"""TrainingSession: the bits of ortrain.api, recorded schedules, and errors."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import BACKENDS, RECORDS, Run, meta_of
from onnx import helper
from replaying import Record, above_tolerance, batches_of

import ortrain
from ortrain import OrtValue, artifacts
from ortrain.api import CheckpointState, LinearLRScheduler
from ortrain.schedules import Constant, Cosine, ReduceOnPlateau, Warmup
from ortrain.session import TrainingSession

# Rounding of a float32 sum in another order.
ROUNDING = 1e-6
CLOSED = "the training session is closed; make another one on its state"
NO_OPTIMIZER = "{} needs an optimizer model, but the session was made without one"
NO_EVAL = "{} needs an evaluation model, but the session was made without one"
NOMINAL = (
    "the state is nominal: it has the names of its parameters but not their values; load all of them first "
    "(load_parameters, load_safetensors), or copy a buffer of all parameters to it"
)


def session_of(folder: Path, checkpoint: str = "checkpoint", **arguments: Any) -> TrainingSession:
    """Return a session of all models on a fresh state."""
    return TrainingSession(
        CheckpointState.load_checkpoint(folder / checkpoint),
        folder / "training_model.onnx",
        folder / "eval_model.onnx",
        folder / "optimizer_model.onnx",
        **arguments,
    )


def batch_of(case: str, session: TrainingSession, at: int = 0) -> list[np.ndarray]:
    """Return a recorded batch in the order of the session's inputs."""
    batches = batches_of(RECORDS / case)
    return [batches[at % len(batches)][name] for name in session.input_names(training=True)]


@pytest.fixture
def session(ours: Callable[[str], Path]) -> Iterator[TrainingSession]:
    """Yield a session of the classifier."""
    with session_of(ours("mlp_adamw_ce")) as session:
        yield session


X, LABELS = np.ones((4, 10), np.float32), np.arange(4)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("case", ["mlp_adamw_ce", "mlp_adamw_clip_outputs", "cnn_bn_adamw_ce", "frozen_params"])
def test_a_run_has_the_bits_of_the_api(case: str, device: str, tmp_path: Path) -> None:
    """Losses, outputs, gradients, rates, evaluation and the final checkpoint are equal."""
    run = Run(RECORDS / case, device=device)
    scheduler = LinearLRScheduler(run.optimizer, 2, 8, 0.02)
    session = session_of(RECORDS / case, device=device)
    session.register_linear_lr_scheduler(2, 8, 0.02)
    session.scheduler_step()
    for step in range(6):
        for micro in range(2):
            inputs = batch_of(case, session, 2 * step + micro)
            outputs = run.module(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for ours, theirs in zip(session.train_step(inputs), outputs, strict=True):
                np.testing.assert_array_equal(ours, theirs, strict=True)
        assert session.get_learning_rate() == run.optimizer.get_learning_rate()
        run.optimizer.step()
        session.optimizer_step()
        scheduler.step()
        session.scheduler_step()
        for name, parameter in run.state.parameters:
            same = session.state.parameters[name]
            np.testing.assert_array_equal(same.data, parameter.data, strict=True)
            np.testing.assert_array_equal(same.grad, parameter.grad)
        run.module.lazy_reset_grad()
        session.lazy_reset_grad()
    inputs = batch_of(case, session)
    outputs = run.module.eval()(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for ours, theirs in zip(session.eval_step(inputs), outputs, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    for only_trainable in (True, False):
        packed = run.module.get_contiguous_parameters(only_trainable).numpy()
        np.testing.assert_array_equal(session.to_buffer(only_trainable).numpy(), packed)
    files = []
    for name, state in (("ours", session.state), ("theirs", run.state)):
        CheckpointState.save_checkpoint(state, tmp_path / name, include_optimizer_state=True)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_the_recorded_run_with_a_scheduler(ours: Callable[[str], Path]) -> None:
    """Losses, rates and parameters equal a run of onnxruntime-training, which swapped the two counts."""
    case = RECORDS / "linear_lr"
    record, meta = Record(case), meta_of("linear_lr")
    for folder in (case, ours("linear_lr")):
        with session_of(folder) as session:
            assert session.input_names(training=True) == meta["train_input_names"]
            effective, initial = meta["effective"], meta["scheduler_args"]["initial_lr"]
            session.register_linear_lr_scheduler(effective["warmup"], effective["total"], initial)
            # The reference's constructor makes this step; from here on both runs are equal.
            session.scheduler_step()
            rates = []
            for step, loss in enumerate(record.values["loss"]):
                record.values["loss of this step"] = loss
                record.compare("loss", session.train_step(batch_of("linear_lr", session, step))[0], "loss of this step")
                rates.append(session.get_learning_rate())
                session.optimizer_step()
                for name, parameter in session.state.parameters:
                    record.compare("parameter", parameter.data, f"param/step{step + 1}/{name}")
                session.scheduler_step()
                session.lazy_reset_grad()
            np.testing.assert_allclose(rates, record.values["lr"], rtol=ROUNDING)
            record.compare("parameter", session.to_buffer(only_trainable=False).numpy(), "contiguous_all")
    assert {"loss", "parameter"} <= record.distances.keys()
    assert not above_tolerance(record.distances), record.distances


RATES = [key for key in Record(RECORDS / "linear_lr").values if key.startswith("lr_sequence/")]


@pytest.mark.filterwarnings("ignore:the module ran no training step yet", "ignore:the previous step used the same")
@pytest.mark.parametrize("key", RATES)
def test_recorded_learning_rates(key: str, session: TrainingSession) -> None:
    """After registration the rate is the initial rate; a scheduler step gives the first recorded rate."""
    words = key.removeprefix("lr_sequence/").split("_")
    their_warmup, their_total = int(words[1].removeprefix("warmup")), int(words[3].removeprefix("total"))
    if their_total > their_warmup:
        with pytest.raises(ortrain.InvalidArgumentError, match="is longer than the training of"):
            session.register_linear_lr_scheduler(their_total, their_warmup, 0.1)
        return
    session.register_linear_lr_scheduler(warmup_step_count=their_total, total_step_count=their_warmup, initial_lr=0.1)
    assert session.get_learning_rate() == float(np.float32(0.1))
    rates = []
    for _ in range(13):
        session.scheduler_step()
        session.scheduler_step()
        rates.append(session.get_learning_rate())
        session.optimizer_step()
    np.testing.assert_allclose(rates, Record(RECORDS / "linear_lr").values[key], rtol=ROUNDING)


@pytest.mark.filterwarnings("ignore:the module ran no training step yet", "ignore:the previous step used the same")
def test_learning_rates_of_the_loop_in_the_other_order(session: TrainingSession) -> None:
    """With the optimizer step before the scheduler step, the first update uses the initial rate."""
    session.register_linear_lr_scheduler(2, 4, 0.1)
    rates = []
    for _ in range(5):
        rates.append(session.get_learning_rate())
        session.optimizer_step()
        session.scheduler_step()
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.1, 0.05, 0.0], rtol=ROUNDING)


def test_a_resumed_run_has_the_same_bits(session: TrainingSession, ours: Callable[[str], Path], tmp_path: Path) -> None:
    def steps(session: TrainingSession, count: int) -> list[float]:
        losses = []
        for step in range(count):
            session.scheduler_step()
            losses.append(float(session.train_step(batch_of("mlp_adamw_ce", session, step))[0]))
            session.optimizer_step()
            session.lazy_reset_grad()
        return losses

    session.register_linear_lr_scheduler(2, 20, 0.01)
    steps(session, 4)
    CheckpointState.save_checkpoint(session.state, tmp_path / "saved", include_optimizer_state=True)
    folder = ours("mlp_adamw_ce")
    with TrainingSession(
        CheckpointState.load_checkpoint(tmp_path / "saved"),
        folder / "training_model.onnx",
        optimizer_model=folder / "optimizer_model.onnx",
    ) as again:
        again.register_linear_lr_scheduler(2, 20, 0.01)
        assert steps(again, 4) == steps(session, 4)
        np.testing.assert_array_equal(again.to_buffer(only_trainable=False), session.to_buffer(only_trainable=False))


def test_constructors(ours: Callable[[str], Path]) -> None:
    """The evaluation and optimizer models are optional; paths, bytes and messages are equivalent."""
    folder = ours("mlp_adamw_ce")
    train, evaluation, optimizer = (folder / f"{name}_model.onnx" for name in ("training", "eval", "optimizer"))
    found = set()
    for make in (lambda path: path, str, Path.read_bytes, onnx.load):
        for with_eval, with_optimizer in ((False, False), (True, False), (False, True), (True, True)):
            session = TrainingSession(
                CheckpointState.load_checkpoint(folder / "checkpoint"),
                make(train),
                eval_model=make(evaluation) if with_eval else None,
                optimizer_model=make(optimizer) if with_optimizer else None,
                session_options=ortrain.SessionOptions(),
            )
            (loss,) = session.train_step([X, LABELS])
            found.add(float(loss))
            names = (["x", "labels"], session.output_names(training=True)) if with_eval else ([], [])
            assert (session.input_names(training=False), session.output_names(training=False)) == names
            assert session.input_count(training=False) == 2 * with_eval
            assert session.output_count(training=False) == int(with_eval)
            if with_optimizer:
                session.optimizer_step()
                assert session.get_learning_rate() == float(np.float32(0.001))
    assert len(found) == 1
    positional = TrainingSession(session.state, train, evaluation, optimizer, ortrain.SessionOptions(), "reference")
    assert positional.state is session.state
    assert (positional.input_count(training=True), positional.output_count(training=True)) == (2, 1)
    options = ortrain.SessionOptions()
    options.memory_limit = 100
    with pytest.raises(ortrain.MemoryLimitError):
        TrainingSession(session.state, train, session_options=options)
    TrainingSession(session.state, train, session_options=onnxruntime.SessionOptions()).train_step([X, LABELS])
    with pytest.raises(TypeError, match="session options"):
        TrainingSession(session.state, train, session_options="fast")  # type: ignore[arg-type]


def test_values_in_and_out(session: TrainingSession) -> None:
    (loss,) = session.train_step([X, LABELS])
    assert isinstance(loss, np.ndarray)
    assert (loss.dtype, loss.shape) == (np.float32, ())
    values = [OrtValue.ortvalue_from_numpy(value) for value in (X, LABELS)]
    (same,) = session.train_step(values)
    assert isinstance(same, OrtValue)
    assert same.numpy() == loss
    assert session.train_step((X, values[1])) == [loss]
    assert session.train_step([X, LABELS.tolist()]) == [loss]
    assert session.train_step([memoryview(X), LABELS]) == [loss]
    (value,) = session.eval_step(values)
    assert isinstance(value, OrtValue)
    assert value.numpy() == pytest.approx(loss)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_that_are_there_already(training: bool) -> None:
    """Output arrays may have any strides and byte order; inputs may be arrays or OrtValues."""
    session, other = (session_of(RECORDS / "mlp_adamw_clip_outputs") for _ in range(2))
    inputs = batch_of("mlp_adamw_clip_outputs", session)
    step, expect = (session.train_step, other.train_step) if training else (session.eval_step, other.eval_step)
    expected = expect(inputs)
    assert [value.shape for value in expected] == [(), (8, 5), (8, 24)]
    rooms = [np.empty((), np.float32), np.empty((8, 5), ">f4"), np.empty((24, 16), np.float32).T[::2]]
    assert step(inputs, outputs=rooms) is None
    for room, value in zip(rooms, expected, strict=True):
        np.testing.assert_array_equal(room, value)
    rooms = [np.empty_like(value) for value in expected]
    step([OrtValue.ortvalue_from_numpy(value) for value in inputs], tuple(rooms))
    for room, value in zip(rooms, expected, strict=True):
        np.testing.assert_array_equal(room, value, strict=True)


def readonly(shape: tuple[int, ...]) -> np.ndarray:
    array: np.ndarray = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


def rooms(**changes: np.ndarray) -> list[Any]:
    return list(({"loss": np.zeros((), np.float32), "logits": np.zeros((4, 5), np.float32)} | changes).values())


OUTPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "too few": (
        rooms()[:1],
        ortrain.InvalidArgumentError,
        "expected 2 output buffers ({loss}, logits), got 1",
    ),
    "none": ([], ortrain.InvalidArgumentError, "expected 2 output buffers ({loss}, logits), got 0"),
    "too many": (
        [*rooms(), X],
        ortrain.InvalidArgumentError,
        "expected 2 output buffers ({loss}, logits), got 3",
    ),
    "another shape": (
        rooms(logits=np.zeros((5, 4), np.float32)),
        ortrain.InvalidArgumentError,
        'output "logits" is float32[4, 5], but its buffer is float32[5, 4]',
    ),
    "a vector of one": (
        rooms(loss=np.zeros(1, np.float32)),
        ortrain.InvalidArgumentError,
        'output "{loss}" is float32[], but its buffer is float32[1]',
    ),
    "another type": (
        rooms(loss=np.zeros(())),
        ortrain.InvalidArgumentError,
        'output "{loss}" is float32[], but its buffer is float64[]',
    ),
    "no element type": (
        rooms(loss=np.zeros((), np.complex64)),
        ortrain.UnsupportedError,
        "outputs[0] is an array of complex64, but no output has this type",
    ),
    "read-only": (rooms(logits=readonly((4, 5))), ortrain.InvalidArgumentError, "outputs[1] is a read-only array"),
    "a value": (
        [OrtValue.ortvalue_from_numpy(np.zeros((), np.float32)), X],
        TypeError,
        "outputs[0] must be a NumPy array, got OrtValue",
    ),
    "one array": (np.zeros((), np.float32), TypeError, "outputs must be a list of values, got ndarray"),
}


MEMORY = np.zeros(40, np.float32)
SHARED = (
    "outputs[0] and outputs[1] share memory, so one result would overwrite the other; give each output its own array"
)
ITSELF = "elements of outputs[1] share memory, so results would overwrite each other; give the output its own array"
# Outputs in one memory block that overlap: completely, partly, between strides, or within an output.
OUTPUTS |= {
    "the loss inside of the logits": (
        rooms(loss=MEMORY[7:8].reshape(()), logits=MEMORY[:20].reshape(4, 5)),
        ortrain.InvalidArgumentError,
        SHARED,
    ),
    "the loss inside of strided logits": (
        rooms(loss=MEMORY[8:9].reshape(()), logits=MEMORY[::2].reshape(4, 5)),
        ortrain.InvalidArgumentError,
        SHARED,
    ),
    "the loss inside of reversed logits": (
        rooms(loss=MEMORY[:1].reshape(()), logits=MEMORY[:20][::-1].reshape(4, 5)),
        ortrain.InvalidArgumentError,
        SHARED,
    ),
    "bytes of the loss inside of the logits": (
        rooms(loss=MEMORY.view(np.uint8)[6:10].view(np.float32).reshape(()), logits=MEMORY[:20].reshape(4, 5)),
        ortrain.InvalidArgumentError,
        SHARED,
    ),
    "rows that are one": (
        rooms(logits=np.lib.stride_tricks.as_strided(MEMORY, (4, 5), (0, 4), writeable=True)),
        ortrain.InvalidArgumentError,
        ITSELF,
    ),
    "windows": (
        rooms(logits=np.lib.stride_tricks.sliding_window_view(MEMORY[:8], 5, writeable=True)),
        ortrain.InvalidArgumentError,
        ITSELF,
    ),
}


def test_outputs_side_by_side(with_logits: Path) -> None:
    """Outputs may share a memory block, even interleaved, without a common byte, or reuse an input's memory."""
    session, other = session_of(with_logits), session_of(with_logits)
    loss, logits = other.train_step([X, LABELS])
    memory = np.zeros(60, np.float32)
    # With strides of 5 and 4 elements the axes interleave, but all elements are distinct.
    odd = np.lib.stride_tricks.as_strided(memory, (4, 5), (5 * 4, 4 * 4), writeable=True)
    for room in (memory[2:42:2].reshape(4, 5), memory[::3][::-1].reshape(4, 5), memory[1:41].reshape(5, 8).T[:4], odd):
        memory[:] = 0
        first = memory[59:].reshape(()) if not np.shares_memory(memory[59:], room) else memory[58:59].reshape(())
        session.train_step([X, LABELS], [first, room])
        assert first == loss
        np.testing.assert_array_equal(room, logits)
    x = X.copy()
    session.train_step([x, LABELS], [x[0, :1].reshape(()), x[:, 5:]])
    assert x[0, 0] == loss
    np.testing.assert_array_equal(x[:, 5:], logits)
    huge = np.lib.stride_tricks.as_strided(memory, (2**40,), (0,), writeable=True)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"elements of outputs\[1\] share memory"):
        session.train_step([X, LABELS], [np.zeros((), np.float32), huge])


@pytest.fixture(scope="module")
def with_logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make artifacts of the classifier that also return the logits."""
    folder = tmp_path_factory.mktemp("with_logits")
    meta = meta_of("mlp_adamw_ce")
    artifacts.generate_artifacts(
        RECORDS / "mlp_adamw_ce" / "forward.onnx",
        requires_grad=meta["requires_grad"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=folder,
    )
    return folder


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_that_do_not_fit(name: str, training: bool, with_logits: Path) -> None:
    """These outputs are rejected before the step: neither gradients nor outputs change."""
    outputs, kind, sentence = OUTPUTS[name]
    before = [np.array(room) for room in (outputs if isinstance(outputs, list) else [outputs])]
    session = session_of(with_logits)
    step = session.train_step if training else session.eval_step
    with pytest.raises(kind) as error:
        step([X, LABELS], outputs)
    loss = session.output_names(training)[0]
    assert str(error.value) == sentence.format(loss=loss)
    for _, parameter in session.state.parameters:
        assert parameter.grad is not None
        assert not parameter.grad.any()
    for room, value in zip(outputs if isinstance(outputs, list) else [outputs], before, strict=True):
        np.testing.assert_array_equal(room, value)


def test_outputs_whose_shapes_depend_on_values(tmp_path: Path) -> None:
    """Shapes that depend on values are known after the step; an output of another shape undoes the step."""
    model = onnx.load(RECORDS / "mlp_adamw_ce" / "forward.onnx")
    model.graph.node.append(helper.make_node("NonZero", ["x"], ["places"]))
    artifacts.generate_artifacts(
        model,
        requires_grad=["fc1.weight", "fc2.weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        additional_output_names=["places"],
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    session = TrainingSession(state, tmp_path / "training_model.onnx", tmp_path / "eval_model.onnx")
    inputs = [np.eye(4, 10, dtype=np.float32), LABELS]
    loss, places = session.train_step(inputs)
    np.testing.assert_array_equal(places, [range(4), range(4)])
    grad = state.parameters["fc2.weight"].grad
    assert grad is not None
    before = grad.copy()
    assert before.any()
    room = [np.empty((), np.float32), np.zeros((2, 5), np.int64)]
    for step in (session.train_step, session.eval_step):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            step(inputs, room)
        assert str(error.value) == 'output "places" is int64[2, 4], but its buffer is int64[2, 5]'
    np.testing.assert_array_equal(grad, before)
    room[1] = np.zeros((2, 4), np.int64)
    session.train_step(inputs, room)
    np.testing.assert_array_equal(room[1], places)
    assert room[0] == loss
    np.testing.assert_array_equal(grad, 2 * before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("inputs", "kind", "sentence"),
    [
        ([X], ortrain.InvalidArgumentError, "expected 2 inputs (x, labels), got 1"),
        ([], ortrain.InvalidArgumentError, "expected 2 inputs (x, labels), got 0"),
        ([X, LABELS, X], ortrain.InvalidArgumentError, "expected 2 inputs (x, labels), got 3"),
        (
            [X, LABELS.astype(np.float32)],
            ortrain.InvalidArgumentError,
            'input "labels" must be int64[batch], got float32[4]: the element types differ; to '
            "convert it, pass .astype(np.int64)",
        ),
        (
            [X[:, :9], LABELS],
            ortrain.InvalidArgumentError,
            'input "x" must be float32[batch, 10], got float32[4, 9]: axis 1 should be 10 but is 9',
        ),
        (
            [X, LABELS[:3]],
            ortrain.InvalidArgumentError,
            'input "labels" must be int64[batch], got int64[3]: axis 0 is 3, but "batch" is 4 in input "x"',
        ),
        (X, TypeError, "inputs must be a list of values, got ndarray"),
        ({"x": X, "labels": LABELS}, TypeError, "inputs must be a list of values, got dict"),
        ("x", TypeError, "inputs must be a list of values, got str"),
    ],
)
def test_inputs_that_do_not_fit(
    inputs: Any, kind: type[Exception], sentence: str, training: bool, session: TrainingSession
) -> None:
    room = np.full((), 7, np.float32)
    step = session.train_step if training else session.eval_step
    for arguments in ([inputs], [inputs, [room]]):
        with pytest.raises(kind) as error:
            step(*arguments)
        assert str(error.value) == sentence
    assert room == 7
    for _, parameter in session.state.parameters:
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_labels_out_of_range(session: TrainingSession) -> None:
    room = np.full((), 7, np.float32)
    with pytest.raises(ortrain.InvalidArgumentError, match="label 5 in row 1 is not one of the 5 classes"):
        session.train_step([X, np.asarray([0, 5, 1, 2])], [room])
    assert room == 7


def test_calls_without_an_optimizer(ours: Callable[[str], Path]) -> None:
    folder = ours("mlp_adamw_ce")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    session = TrainingSession(state, folder / "training_model.onnx", folder / "eval_model.onnx")
    for call, what in (
        (session.optimizer_step, "an optimizer step"),
        (session.get_learning_rate, "a learning rate"),
        (lambda: session.set_learning_rate(0.1), "a learning rate"),
        (lambda: session.register_linear_lr_scheduler(1, 2, 0.1), "a learning rate scheduler"),
    ):
        with pytest.raises(ortrain.OrtrainError) as error:
            call()
        assert str(error.value) == NO_OPTIMIZER.format(what)
    session.lazy_reset_grad()
    session.train_step([X, LABELS])
    # An optimizer outside of the session, on the same state, does not change this.
    ortrain.api.Optimizer(folder / "optimizer_model.onnx", ortrain.api.Module(folder / "training_model.onnx", state))
    with pytest.raises(ortrain.OrtrainError, match="needs an optimizer model, but the session was made without one"):
        session.get_learning_rate()


def test_calls_without_an_eval_model(ours: Callable[[str], Path], tmp_path: Path) -> None:
    folder = ours("mlp_adamw_ce")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    session = TrainingSession(state, folder / "training_model.onnx", None, folder / "optimizer_model.onnx")
    for call, what in (
        (lambda: session.eval_step([X, LABELS]), "an evaluation step"),
        (lambda: session.eval_step([X, LABELS], [np.zeros((), np.float32)]), "an evaluation step"),
        (lambda: session.export_model_for_inferencing(tmp_path / "model.onnx", ["logits"]), "an export"),
    ):
        with pytest.raises(ortrain.OrtrainError) as error:
            call()
        assert str(error.value) == NO_EVAL.format(what)
    assert list(tmp_path.iterdir()) == []


def shown(number: float) -> str:
    """Return the number as messages print it."""
    return "NaN" if np.isnan(number) else str(number)


def test_learning_rate_and_scheduler(session: TrainingSession) -> None:
    """Either the learning rate or the scheduler sets the rate."""
    with pytest.raises(ortrain.OrtrainError) as error:
        session.scheduler_step()
    assert str(error.value) == "no learning rate scheduler is registered; register one before a scheduler step"
    session.set_learning_rate(1)
    assert session.get_learning_rate() == 1
    for rate in (-0.5, float("nan"), float("inf")):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            session.set_learning_rate(rate)
        assert str(error.value) == f"the learning rate must be finite and at least 0, got {shown(rate)}"
        assert session.get_learning_rate() == 1
    with pytest.raises(TypeError):
        session.set_learning_rate("fast")
    with pytest.raises(TypeError):
        session.register_linear_lr_scheduler(2.5, 10, 0.1)
    session.register_linear_lr_scheduler(2, 10, 0.5)
    for call, sentence in (
        (
            lambda: session.set_learning_rate(0.1),
            "the learning rate cannot be set: a learning rate scheduler is registered, which sets it at every "
            "scheduler step",
        ),
        (
            lambda: session.register_linear_lr_scheduler(3, 9, 0.1),
            "a learning rate scheduler is registered already; a session has one, so make another session on the same "
            "state for another scheduler",
        ),
    ):
        with pytest.raises(ortrain.OrtrainError) as error:
            call()
        assert str(error.value) == sentence
        assert session.get_learning_rate() == 0.5


def test_a_nominal_state() -> None:
    """Every call that needs values is an error; a buffer of all parameters provides the values."""
    case = RECORDS / "checkpoint_resume"
    record, batches = Record(case), batches_of(case)
    session = session_of(case, "nominal_checkpoint")
    inputs = [batches[0][name] for name in session.input_names(training=True)]
    buffer = record.values["nominal_buffer_all"]
    assert session.get_parameters_size(only_trainable=False) == buffer.size
    assert session.get_learning_rate() == float(np.float32(0.001))
    for call in (
        lambda: session.train_step(inputs),
        lambda: session.train_step(inputs, [np.zeros((), np.float32)]),
        lambda: session.eval_step(inputs),
        session.optimizer_step,
        lambda: session.to_buffer(only_trainable=False),
        lambda: session.from_buffer(buffer, only_trainable=True),
        lambda: session.export_model_for_inferencing("model.onnx", ["logits"]),
    ):
        with pytest.raises(ortrain.OrtrainError) as error:
            call()
        assert str(error.value) == NOMINAL
    session.from_buffer(OrtValue.ortvalue_from_numpy(buffer))
    (loss,) = session.train_step(inputs)
    np.testing.assert_allclose(loss, record.values["loss_from_nominal"][0], rtol=2e-5)
    session.optimizer_step()
    for name, parameter in session.state.parameters:
        record.compare("parameter", parameter.data, f"param/nominal_step1/{name}")
    assert not above_tolerance(record.distances), record.distances


def test_buffers() -> None:
    session = session_of(RECORDS / "frozen_params")
    assert session.get_parameters_size(only_trainable=True) == 125
    assert session.get_parameters_size(only_trainable=False) == 365
    frozen = [name for name, parameter in session.state.parameters if not parameter.requires_grad]
    everything, trainable = session.to_buffer(only_trainable=False), session.to_buffer(only_trainable=True)
    assert (everything.shape(), trainable.shape(), trainable.data_type()) == ([365], [125], "tensor(float)")
    values = {name: session.state.parameters[name].data.copy() for name in frozen}
    for buffer, flags in ((trainable, (None, True)), (everything, (None, False))):
        only = buffer is trainable
        for flag in flags:
            session.from_buffer(buffer.numpy() * 2, flag)
            np.testing.assert_array_equal(session.to_buffer(only).numpy(), buffer.numpy() * 2)
            for name in frozen:
                np.testing.assert_array_equal(session.state.parameters[name].data, values[name] * (1 if only else 2))
            session.from_buffer(everything)
    np.testing.assert_array_equal(session.to_buffer(only_trainable=False).numpy(), everything.numpy())
    for bad, flag, sentence in (
        (
            np.zeros(5, np.float32),
            None,
            "the buffer should have 365 elements (all parameters) or 125 (trained parameters), but it has 5",
        ),
        (everything, True, "the buffer should have 125 elements, but it has 365"),
        (trainable, False, "the buffer should have 365 elements, but it has 125"),
        (np.zeros(125), None, "the buffer must be float32, got float64"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            session.from_buffer(bad, flag)
        assert str(error.value) == sentence
    np.testing.assert_array_equal(session.to_buffer(only_trainable=False).numpy(), everything.numpy())


def test_export(session: TrainingSession, ours: Callable[[str], Path], tmp_path: Path) -> None:
    """Export also works for models from bytes, which onnxruntime-training cannot export."""
    folder = ours("mlp_adamw_ce")
    train, evaluation = ((folder / f"{name}_model.onnx").read_bytes() for name in ("training", "eval"))
    from_bytes = TrainingSession(session.state, train, evaluation)
    results = []
    for number, one in enumerate((session, from_bytes)):
        path = tmp_path / f"model{number}.onnx"
        one.export_model_for_inferencing(path, ["logits"])
        theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        results += [theirs.run(None, {"x": X})[0], ortrain.InferenceSession(path).run(None, {"x": X})[0]]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="graph_output_names must be a list of names, got one name"):
        session.export_model_for_inferencing(tmp_path / "other.onnx", "logits")
    with pytest.raises(ortrain.InvalidArgumentError):
        session.export_model_for_inferencing(tmp_path / "other.onnx", [])
    with pytest.raises(ortrain.InvalidArgumentError, match="nothing"):
        session.export_model_for_inferencing(tmp_path / "other.onnx", ["nothing"])


CALLS: dict[str, Callable[[TrainingSession], Any]] = {
    "__enter__": lambda session: session.__enter__(),
    "train_step": lambda session: session.train_step([X, LABELS]),
    "train_step, outputs": lambda session: session.train_step([X, LABELS], [np.zeros((), np.float32)]),
    "eval_step": lambda session: session.eval_step([X, LABELS]),
    "eval_step, outputs": lambda session: session.eval_step([X, LABELS], [readonly(())]),
    "lazy_reset_grad": lambda session: session.lazy_reset_grad(),
    "optimizer_step": lambda session: session.optimizer_step(),
    "set_learning_rate": lambda session: session.set_learning_rate(0.1),
    "get_learning_rate": lambda session: session.get_learning_rate(),
    "register_linear_lr_scheduler": lambda session: session.register_linear_lr_scheduler(1, 2, 0.1),
    "register_lr_scheduler": lambda session: session.register_lr_scheduler(Constant(), 0.1),
    "resume_lr_scheduler": lambda session: session.resume_lr_scheduler(),
    "scheduler_step": lambda session: session.scheduler_step(),
    "get_parameters_size": lambda session: session.get_parameters_size(True),
    "to_buffer": lambda session: session.to_buffer(True),
    "from_buffer": lambda session: session.from_buffer(np.zeros(389, np.float32)),
    "input_names": lambda session: session.input_names(True),
    "output_names": lambda session: session.output_names(True),
    "input_count": lambda session: session.input_count(True),
    "output_count": lambda session: session.output_count(True),
    "export_model_for_inferencing": lambda session: session.export_model_for_inferencing("model.onnx", ["logits"]),
    "set_seed": lambda session: session.set_seed(1),
}


def test_sessions_take_any_schedule(ours: Callable[[str], Path], tmp_path: Path) -> None:
    """A session has the rates of a separate scheduler; a checkpoint continues them."""
    with session_of(ours("mlp_adamw_ce")) as session:
        schedule = Warmup(2, Cosine(total=8))
        session.register_lr_scheduler(schedule, lr=0.5)
        with pytest.raises(ortrain.OrtrainError, match="registered already"):
            session.resume_lr_scheduler()
        rates = []
        for _ in range(3):
            session.train_step([X, LABELS])
            session.optimizer_step()
            session.scheduler_step()
            rates.append(session.get_learning_rate())
        assert rates == [float(np.float32(0.5 * schedule(t))) for t in (1, 2, 3)]
        with pytest.raises(ortrain.InvalidArgumentError, match="takes no metric"):
            session.scheduler_step(0.5)
        CheckpointState.save_checkpoint(session.state, tmp_path / "later", include_optimizer_state=True)
    folder = ours("mlp_adamw_ce")
    later = CheckpointState.load_checkpoint(tmp_path / "later")
    models = [folder / f"{name}_model.onnx" for name in ("training", "eval", "optimizer")]
    session = TrainingSession(later, *models)
    session.resume_lr_scheduler()
    session.train_step([X, LABELS])
    session.optimizer_step()
    session.scheduler_step()
    assert session.get_learning_rate() == float(np.float32(0.5 * schedule(4)))
    assert [len(group.parameters) for group in session.groups] == [len(later.parameters)]


def test_sessions_take_functions_and_metrics(ours: Callable[[str], Path]) -> None:
    session = session_of(ours("mlp_adamw_ce"))
    session.register_lr_scheduler(lambda t: 1 / (1 + t), lr=0.5)
    assert session.get_learning_rate() == 0.5
    session.train_step([X, LABELS])
    session.optimizer_step()
    session.scheduler_step()
    assert session.get_learning_rate() == 0.25
    session = session_of(ours("mlp_adamw_ce"))
    session.register_lr_scheduler(ReduceOnPlateau(factor=0.5, patience=0), lr=1.0)
    with pytest.raises(ortrain.InvalidArgumentError, match="a metric"):
        session.scheduler_step()
    session.scheduler_step(0.7)
    session.scheduler_step(0.7)
    assert session.get_learning_rate() == 0.5


def test_every_method_is_in_the_table() -> None:
    methods = {name for name, _ in inspect.getmembers(TrainingSession, inspect.isfunction) if not name.startswith("_")}
    assert {name.partition(",")[0] for name in CALLS} == methods - {"close"} | {"__enter__"}


@pytest.mark.parametrize("name", CALLS)
def test_after_close(name: str, session: TrainingSession) -> None:
    session.close()
    with pytest.raises(ortrain.OrtrainError) as error:
        CALLS[name](session)
    assert str(error.value) == CLOSED


def test_close(ours: Callable[[str], Path], tmp_path: Path) -> None:
    with session_of(ours("mlp_adamw_ce")) as session:
        session.train_step([X, LABELS])
        session.optimizer_step()
        parameters = session.to_buffer(only_trainable=False)
        gradient = session.state.parameters["fc2.bias"].grad
        assert gradient is not None
        assert gradient.any()
    session.close()
    session.close()
    # The state remains usable: it can be saved, and another session can use it.
    CheckpointState.save_checkpoint(session.state, tmp_path / "saved", include_optimizer_state=True)
    folder = ours("mlp_adamw_ce")
    again = TrainingSession(session.state, folder / "training_model.onnx", None, folder / "optimizer_model.onnx")
    np.testing.assert_array_equal(again.to_buffer(only_trainable=False), parameters)
    assert gradient.any()
    other = session_of(folder)
    with pytest.raises(ZeroDivisionError), other:
        raise ZeroDivisionError
    with pytest.raises(ortrain.OrtrainError, match="closed"):
        other.lazy_reset_grad()


def test_two_sessions_on_one_state(ours: Callable[[str], Path]) -> None:
    """Sessions share parameters, rate and moments; each session has its own gradients and scheduler."""
    folder = ours("mlp_adamw_ce")
    first = session_of(folder)
    state = first.state
    second = TrainingSession(state, folder / "training_model.onnx", None, folder / "optimizer_model.onnx")
    first.train_step([X, LABELS])
    grad = state.parameters["fc2.bias"].grad
    assert grad is not None
    assert not grad.any(), "the state shows the gradients of the newest session"
    second.train_step([X, LABELS])
    assert grad.any()
    first.register_linear_lr_scheduler(0, 10, 0.25)
    assert second.get_learning_rate() == 0.25
    second.set_learning_rate(0.125)
    assert first.get_learning_rate() == 0.125
    first.optimizer_step()
    np.testing.assert_array_equal(first.to_buffer(only_trainable=True), second.to_buffer(only_trainable=True))
    first.close()
    second.optimizer_step()
    second.train_step([X, LABELS])


def test_session_with_invalid_models(session: TrainingSession, ours: Callable[[str], Path]) -> None:
    folder, state = ours("mlp_adamw_ce"), session.state
    session.train_step([X, LABELS])
    grad = state.parameters["fc2.bias"].grad
    assert grad is not None
    before = grad.copy()
    train, evaluation, optimizer = (folder / f"{name}_model.onnx" for name in ("training", "eval", "optimizer"))
    for arguments, kind, match in (
        ((train, None, folder / "nowhere.onnx"), ortrain.NoSuchFileError, "nowhere"),
        ((folder / "nowhere.onnx",), ortrain.NoSuchFileError, "nowhere"),
        ((train, None, evaluation), ortrain.InvalidModelError, "the optimizer model .*eval_model"),
        # The third argument of C#.
        ((train, optimizer), ortrain.InvalidModelError, "the evaluation model .*optimizer_model"),
        ((RECORDS / "mlp_l1" / "eval_model.onnx",), ortrain.InvalidModelError, "it is an evaluation model"),
        ((train, None, b""), ortrain.InvalidModelError, "the model is empty"),
        ((3,), TypeError, r"a model must be a path, bytes or an onnx\.ModelProto, got int"),
    ):
        with pytest.raises(kind, match=match):
            TrainingSession(state, *arguments)  # type: ignore[arg-type]
        now = state.parameters["fc2.bias"].grad
        np.testing.assert_array_equal(now, before)
    with pytest.raises(ortrain.OrtrainError, match='there is no device "cuda" here'):
        TrainingSession(state, train, device="cuda")
    with pytest.raises(TypeError, match="state must be a CheckpointState, got str"):
        TrainingSession("checkpoint", train)  # type: ignore[arg-type]


def in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_take_turns(session: TrainingSession) -> None:
    """Steps of several threads equal steps of one thread in some order: no step is lost."""
    session.train_step([X, LABELS])
    grad = session.state.parameters["fc2.bias"].grad
    assert grad is not None
    expected = grad.copy() * 81
    losses: list[float] = []

    def work() -> None:
        room = np.zeros((), np.float32)
        for _ in range(10):
            losses.append(float(session.train_step([X, LABELS])[0]))
            session.train_step([X, LABELS], [room])
            losses.append(float(room))

    in_threads(4, work)
    assert len(losses) == 80
    assert len(set(losses)) == 1
    np.testing.assert_allclose(grad, expected, rtol=1e-4)


def test_one_of_many_threads_registers_and_one_closes(session: TrainingSession) -> None:
    """Each call either succeeds or states the reason of its failure."""
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        try:
            session.register_linear_lr_scheduler(1, 2, 0.5)
            outcomes.append("registered")
        except ortrain.OrtrainError as error:
            outcomes.append(str(error))

    in_threads(8, work)
    assert outcomes.count("registered") == 1
    assert sum("registered already" in outcome for outcome in outcomes) == 7

    steps: list[str] = []

    def step_until_closed() -> None:
        try:
            while True:
                session.train_step([X, LABELS])
                steps.append("step")
        except ortrain.OrtrainError as error:
            steps.append(str(error))

    threads = [threading.Thread(target=step_until_closed) for _ in range(2)]
    for thread in threads:
        thread.start()
    while steps.count("step") < 20:
        pass
    session.close()
    for thread in threads:
        thread.join()
    assert steps.count(CLOSED) == 2
    assert set(steps) == {"step", CLOSED}


def test_seed(tmp_path: Path) -> None:
    """The same seed at the same step draws the same numbers; checkpoints contain the seed."""
    model = onnx.load(RECORDS / "mlp_adamw_ce" / "forward.onnx")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "x":
                node.input[at] = "dropped"
    model.graph.node.insert(0, helper.make_node("Dropout", ["x"], ["dropped"]))
    artifacts.generate_artifacts(
        model,
        requires_grad=["fc1.weight", "fc2.weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
    )

    def losses(seed: int | None, checkpoint: str = "checkpoint") -> list[float]:
        state = CheckpointState.load_checkpoint(tmp_path / checkpoint)
        session = TrainingSession(state, tmp_path / "training_model.onnx")
        if seed is not None:
            session.set_seed(seed)
        if checkpoint == "checkpoint":
            CheckpointState.save_checkpoint(state, tmp_path / "saved")
        return [float(session.train_step([X, LABELS])[0]) for _ in range(3)]

    assert len(set(losses(1))) == 3
    assert losses(1) == losses(1) != losses(2)
    assert losses(0) == losses(None)
    seeded = losses(-7)
    assert losses(None, "saved") == seeded
    with pytest.raises(OverflowError):
        losses(2**63)


@pytest.mark.parametrize("kind", [ortrain.RunOptions, onnxruntime.RunOptions], ids=["ours", "theirs"])
def test_run_options(kind: Any) -> None:
    """A terminated step changes nothing."""
    session, other = (session_of(RECORDS / "mlp_adamw_ce") for _ in range(2))
    options = kind()
    room = np.zeros((), np.float32)
    for step in (session.train_step, session.eval_step):
        assert step([X, LABELS], run_options=options) == step([X, LABELS])
        step([X, LABELS], [room], options)
        assert room != 0
    session.lazy_reset_grad()
    other.lazy_reset_grad()
    (loss,) = session.train_step([X, LABELS], run_options=options)
    assert other.train_step([X, LABELS]) == [loss]
    options.terminate = True
    room[...] = 0
    for call in (
        lambda: session.train_step([X, LABELS], run_options=options),
        lambda: session.train_step([X, LABELS], [room], options),
        lambda: session.eval_step([X, LABELS], None, options),
        lambda: session.optimizer_step(options),
    ):
        with pytest.raises(ortrain.OrtrainError, match="terminate is set in its run options"):
            call()
    assert room == 0
    options.terminate = False
    session.optimizer_step(options)
    other.optimizer_step()
    np.testing.assert_array_equal(session.to_buffer(False).numpy(), other.to_buffer(False).numpy())
    with pytest.raises(TypeError, match="run options"):
        session.optimizer_step({})  # type: ignore[arg-type]
