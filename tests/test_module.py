"""Module, Optimizer, LinearLRScheduler, OrtValue, InferenceSession."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import RECORDS, Run
from onnx import numpy_helper
from replaying import batches_of

import ortrain
from ortrain.api import LinearLRScheduler, Module, Optimizer

CASE = RECORDS / "mlp_adamw_ce"


def inputs_of(run: Run, batch: int = 0) -> list[np.ndarray]:
    """Return a recorded batch in the order of the module's inputs."""
    values = batches_of(CASE)[batch]
    return [values[name] for name in run.module.input_names()]


def test_modes(run: Run) -> None:
    module = run.module
    assert module.training
    assert module.eval() is module
    assert not module.training
    assert module.train() is module
    assert module.training
    assert not module.train(False).training


def test_calls(run: Run) -> None:
    x, labels = inputs_of(run)
    loss = run.module(x, labels)
    assert isinstance(loss, np.ndarray)
    assert (loss.dtype, loss.shape) == (np.float32, ())
    assert run.module(x, labels.tolist()) == loss
    assert run.module(x, ortrain.OrtValue.ortvalue_from_numpy(labels)) == loss
    assert run.module(x, None, labels) == loss
    values = [ortrain.OrtValue.ortvalue_from_numpy(value) for value in (x, labels)]
    result = run.module(*values)
    assert isinstance(result, ortrain.OrtValue)
    assert result.numpy() == loss
    assert run.module.eval()(x, labels) == pytest.approx(loss)


def test_inputs_by_name(run: Run) -> None:
    x, labels = inputs_of(run)
    loss = run.module(x, labels)
    assert run.module(labels=labels, x=x) == loss
    assert run.module(x, labels=labels) == loss
    values = {"x": ortrain.OrtValue.ortvalue_from_numpy(x), "labels": ortrain.OrtValue.ortvalue_from_numpy(labels)}
    assert run.module(**values).numpy() == loss
    for positional, named, sentence in [
        ([x], {"x": x, "labels": labels}, "input 'x' is given by position and by name"),
        ([], {"x": x, "y": labels}, "input 'y' is not one of x, labels"),
        ([], {"labels": labels}, "no value was given for input 'x'"),
    ]:
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            run.module(*positional, **named)
        assert str(error.value) == sentence
    profile = run.module.profile(x, labels=labels, steps=1)
    assert len(profile.steps) == 1


class Foreign:
    """An array of another library."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class WithDlpack(Foreign):
    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class WithArray(Foreign):
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


def test_arrays_of_other_libraries(run: Run) -> None:
    x, labels = inputs_of(run)
    loss = run.module(x, labels)
    for kind in (WithDlpack, WithArray):
        result = run.module(kind(x), kind(labels))
        assert isinstance(result, np.ndarray)
        assert result == loss
    # Python numbers have no type, and take the type of the input.
    assert run.module.eval()(x.tolist(), labels.tolist()) == run.module(x, labels)
    run.module.train()
    with pytest.raises(TypeError, match="expected an array of numbers"):
        run.module(Foreign(x), labels)


def test_strides_and_byte_order(run: Run) -> None:
    """Strides and byte order do not change a result."""
    x, labels = inputs_of(run)
    loss = run.module(x, labels)
    assert run.module(np.asfortranarray(x), labels) == loss
    assert run.module(np.repeat(x, 2, axis=0)[::2], labels) == loss
    assert run.module(x[::-1][::-1], labels) == loss
    assert run.module(x.astype(">f4"), labels.astype(">i8")) == loss


def test_several_outputs() -> None:
    run = Run(RECORDS / "mlp_adamw_clip_outputs")
    assert run.module.output_names()[1:] == ["logits", "a1"]
    results = run.module(*inputs_of(run))
    assert isinstance(results, tuple)
    assert [value.shape for value in results] == [(), (8, 5), (8, 24)]


def test_models_from_bytes_and_messages(run: Run) -> None:
    train, evaluation, optimizer = (run.folder / f"{name}_model.onnx" for name in ("training", "eval", "optimizer"))
    for train_model, eval_model, optimizer_model in (
        (os.fspath(train), os.fspath(evaluation), os.fspath(optimizer)),
        (train.read_bytes(), evaluation.read_bytes(), optimizer.read_bytes()),
        (onnx.load(train), onnx.load(evaluation), onnx.load(optimizer)),
    ):
        module = Module(train_model, run.state, eval_model)
        loss = module(*inputs_of(run))
        assert module.eval()(*inputs_of(run)) == pytest.approx(loss)
        Optimizer(optimizer_model, module).step()
    with pytest.raises(TypeError, match=r"a model must be a path, bytes or an onnx\.ModelProto, got int"):
        Module(3, run.state)


def test_devices(run: Run) -> None:
    losses = []
    for device in ("cpu", "cpu:0", "reference"):
        module = Module(run.folder / "training_model.onnx", run.state, device=device)
        losses.append(float(module(*inputs_of(run))))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    for device in ("cuda", "tpu"):
        with pytest.raises(ortrain.OrtrainError, match=f'there is no device "{device}" here'):
            Module(run.folder / "training_model.onnx", run.state, device=device)


def test_thread_counts_give_the_same_bits(run: Run) -> None:
    found = []
    for threads in (1, 2, 3, 0):
        options = ortrain.SessionOptions()
        options.intra_op_num_threads = threads
        module = Module(run.folder / "training_model.onnx", run.state, session_options=options)
        loss = module(*inputs_of(run))
        gradients = [parameter.grad for _, parameter in run.state.parameters]
        found.append([loss.tobytes(), *[grad.tobytes() for grad in gradients if grad is not None]])
    assert all(bits == found[0] for bits in found)
    with pytest.raises(AttributeError):
        ortrain.SessionOptions().graph_level = 1  # type: ignore[attr-defined]
    options.log_severity_level, options.log_verbosity_level, options.logid = 4, 1, "quiet"
    Module(run.folder / "training_model.onnx", run.state, session_options=options)
    Module(run.folder / "training_model.onnx", run.state, session_options=onnxruntime.SessionOptions())
    with pytest.raises(TypeError, match=r"session options must be an ortrain\.SessionOptions, got options of builtins"):
        Module(run.folder / "training_model.onnx", run.state, session_options={})  # type: ignore[arg-type]


def test_eval_mode_without_an_eval_model(run: Run, tmp_path: Path) -> None:
    module = Module(run.folder / "training_model.onnx", run.state).eval()
    assert module.input_names() == []
    assert module.output_names() == []
    with pytest.raises(ortrain.OrtrainError, match="needs an evaluation model, but the module was made without one"):
        module(*inputs_of(run))
    with pytest.raises(ortrain.OrtrainError, match="needs an evaluation model, but the module was made without one"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["logits"])


def test_buffers(run: Run, ours: Callable[[str], Path]) -> None:
    packed = run.module.get_contiguous_parameters()
    model = onnx.load(CASE / "forward.onnx")
    in_order = [numpy_helper.to_array(tensor).ravel() for tensor in model.graph.initializer]
    np.testing.assert_array_equal(packed.numpy(), np.concatenate(in_order))
    assert (packed.shape(), packed.data_type()) == ([389], "tensor(float)")
    twice = ortrain.OrtValue.ortvalue_from_numpy((packed.numpy() * 2).reshape(1, 389))
    for buffer in (twice, twice._ortvalue):
        run.module.copy_buffer_to_parameters(packed)
        run.module.copy_buffer_to_parameters(buffer)
        np.testing.assert_array_equal(run.module.get_contiguous_parameters().numpy(), packed.numpy() * 2)
    short = ortrain.OrtValue.ortvalue_from_numpy(np.zeros(5, np.float32))
    with pytest.raises(ortrain.InvalidArgumentError, match="the buffer should have 389 elements, but it has 5"):
        run.module.copy_buffer_to_parameters(short)
    double = ortrain.OrtValue.ortvalue_from_numpy(np.zeros(389))
    with pytest.raises(ortrain.InvalidArgumentError, match="the buffer must be float32, got float64"):
        run.module.copy_buffer_to_parameters(double)
    frozen = Run(ours("frozen_params")).module
    assert frozen.get_contiguous_parameters(trainable_only=True).shape() == [125]
    assert frozen.get_contiguous_parameters(trainable_only=False).shape() == [365]


def test_export(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    run.module.export_model_for_inferencing(os.fspath(path), ["logits"])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    forward = onnx.load(CASE / "forward.onnx")
    assert [value.name for value in model.graph.input] == ["x"]
    assert model.graph.input[0].type == forward.graph.input[0].type
    assert model.ir_version == forward.ir_version
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, parameter in run.state.parameters:
        np.testing.assert_array_equal(weights[name], parameter.data)
    with pytest.raises(ortrain.InvalidArgumentError):
        run.module.export_model_for_inferencing(path, [])
    with pytest.raises(ortrain.InvalidArgumentError, match="nothing"):
        run.module.export_model_for_inferencing(path, ["nothing"])
    with pytest.raises(TypeError, match="a list of names"):
        run.module.export_model_for_inferencing(path, "logits")


def test_optimizer(run: Run) -> None:
    assert run.optimizer.get_learning_rate() == float(np.float32(0.001))
    run.optimizer.set_learning_rate(1)
    assert run.optimizer.get_learning_rate() == 1
    for rate in (-0.5, float("nan"), float("-inf")):
        with pytest.raises(ortrain.InvalidArgumentError, match="must be finite and at least 0, got"):
            run.optimizer.set_learning_rate(rate)
        assert run.optimizer.get_learning_rate() == 1
    with pytest.raises(TypeError):
        run.optimizer.set_learning_rate("fast")
    before = run.module.get_contiguous_parameters().numpy()
    with pytest.warns(ortrain.TrainingWarning, match="ran no training step yet, so all gradients are zero; call the"):
        run.optimizer.step()
    np.testing.assert_array_equal(run.module.get_contiguous_parameters().numpy(), before)


def test_optimizer_needs_an_optimizer_model(run: Run) -> None:
    with pytest.raises(ortrain.InvalidModelError):
        Optimizer(run.folder / "eval_model.onnx", run.module)


def test_steps_without_new_gradients(run: Run) -> None:
    """A second step with the same gradients gives a warning; reset gradients are an error, and nothing changes."""
    x, labels = inputs_of(run)
    run.module(x, labels)
    run.optimizer.step()
    with pytest.warns(ortrain.TrainingWarning, match="the previous step used the same gradients"):
        run.optimizer.step()
    run.module.lazy_reset_grad()
    before = run.module.get_contiguous_parameters().numpy()
    with pytest.raises(ortrain.OrtrainError) as error:
        run.optimizer.step()
    assert str(error.value) == (
        "there are no gradients to step with: the module ran no training step since its gradients were reset; call it "
        "in training mode before each step of the optimizer"
    )
    np.testing.assert_array_equal(run.module.get_contiguous_parameters().numpy(), before)
    # Gradients accumulate over batches.
    run.module(x, labels)
    run.module(x, labels)
    run.optimizer.step()


@pytest.mark.filterwarnings("ignore:the module ran no training step yet", "ignore:the previous step used the same")
def test_scheduler(run: Run) -> None:
    """The rate follows the documentation, with the warm-up first."""
    scheduler = LinearLRScheduler(run.optimizer, warmup_step_count=2, total_step_count=6, initial_lr=1.0)
    rates = [run.optimizer.get_learning_rate()]
    for _ in range(8):
        scheduler.step()
        run.optimizer.step()
        scheduler.step()
        rates.append(run.optimizer.get_learning_rate())
    assert rates == [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    with pytest.raises(TypeError):
        LinearLRScheduler(run.optimizer, 2.5, 10, 0.1)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        LinearLRScheduler(run.optimizer, 1000, 100, 0.1)
    assert str(error.value).startswith("a warm-up of 1000 steps is longer than the training of 100; warmup_step_count")
    with pytest.raises(
        ortrain.InvalidArgumentError, match="the initial learning rate must be finite and at least 0, got -1"
    ):
        LinearLRScheduler(run.optimizer, 10, 100, -1)


@pytest.mark.parametrize(
    ("dtype", "name", "number"),
    [
        (np.float32, "float", 1),
        (np.uint8, "uint8", 2),
        (np.int8, "int8", 3),
        (np.uint16, "uint16", 4),
        (np.int16, "int16", 5),
        (np.int32, "int32", 6),
        (np.int64, "int64", 7),
        (np.bool_, "bool", 9),
        (np.float16, "float16", 10),
        (np.float64, "double", 11),
        (np.uint32, "uint32", 12),
        (np.uint64, "uint64", 13),
    ],
)
def test_values(dtype: type, name: str, number: int) -> None:
    for shape in ((2, 3), (), (0, 4), (1,)):
        array: np.ndarray = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        value = ortrain.OrtValue.ortvalue_from_numpy(array)
        assert (value.data_type(), value.element_type()) == (f"tensor({name})", number)
        assert value.shape() == list(shape)
        back = value.numpy()
        np.testing.assert_array_equal(back, array, strict=True)
        back[...] = 0
        assert not np.asarray(value).any()
        assert not array.any()
    assert (value.is_tensor(), value.has_value(), value.device_name()) == (True, True, "cpu")
    assert repr(value) == f"OrtValue(tensor({name}), shape=[1])"


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1 + 2j]), np.array([None])])
def test_arrays_without_an_element_type(array: np.ndarray) -> None:
    with pytest.raises(ortrain.UnsupportedError, match=f"arrays of {array.dtype} are not supported"):
        ortrain.OrtValue.ortvalue_from_numpy(array)


def test_inference_session() -> None:
    session = ortrain.InferenceSession(RECORDS / "mlp_adamw_ce" / "forward.onnx")
    (x,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape) == ("x", "tensor(float)", ["batch", 10])
    assert (logits.name, logits.type) == ("logits", "tensor(float)")
    assert repr(x) == "NodeArg(name='x', type='tensor(float)', shape=['batch', 10])"
    feed = np.ones((3, 10), np.float32)
    (result,) = session.run(None, {"x": feed})
    assert result.shape == (3, 5)
    (again,) = session.run(["logits"], {"x": ortrain.OrtValue.ortvalue_from_numpy(feed)})
    np.testing.assert_array_equal(again, result)
    for names, feeds, sentence in (
        (["nothing"], {"x": feed}, "the model has no output 'nothing'; it has logits"),
        (None, {}, 'no value was given for input "x"; none was given'),
        (None, {"x": feed, "y": feed}, 'the model has no input "y"; it has x'),
    ):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            session.run(names, feeds)
        assert str(error.value) == sentence
    with pytest.raises(ortrain.UnsupportedError, match="unknown provider 'ROCMExecutionProvider'; expected one of"):
        ortrain.InferenceSession(CASE / "forward.onnx", providers=["ROCMExecutionProvider"])
    with pytest.raises(ValueError, match="providers must be a list of names, got 'cpu'"):
        ortrain.InferenceSession(CASE / "forward.onnx", providers="cpu")


def two_outputs() -> onnx.ModelProto:
    """Return a model with one output for every x, and one that needs an index in range."""
    declare = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["y"]), onnx.helper.make_node("Gather", ["x", "index"], ["z"])],
        "graph",
        [declare("x", onnx.TensorProto.FLOAT, [3]), declare("index", onnx.TensorProto.INT64, [1])],
        [declare("y", onnx.TensorProto.FLOAT, [3]), declare("z", onnx.TensorProto.FLOAT, [1])],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("kind", [ortrain.RunOptions, onnxruntime.RunOptions], ids=["ours", "theirs"])
def test_run_options(kind: Any) -> None:
    session = ortrain.InferenceSession(two_outputs())
    x = np.arange(3, dtype=np.float32)
    far, near = ({"x": x, "index": np.array([at])} for at in (7, 1))
    options = kind()
    options.log_severity_level, options.log_verbosity_level, options.logid = 3, 1, "a run"
    y, z = session.run(None, near, options)
    assert (y.tolist(), z.tolist()) == ([0, -1, -2], [1])
    # Without the option all outputs are computed; with it, only the requested ones, in their order.
    with pytest.raises(ortrain.InvalidArgumentError, match="index"):
        session.run(["y"], far, options)
    options.only_execute_path_to_fetches = True
    assert session.run(["y"], far, options)[0].tolist() == [0, -1, -2]
    assert [value.tolist() for value in session.run(["z", "y", "z"], near, options)] == [[1], [0, -1, -2], [1]]
    assert [value.tolist() for value in session.run(None, near, options)] == [[0, -1, -2], [1]]
    with pytest.raises(ortrain.InvalidArgumentError, match="index"):
        session.run(["z"], far, options)

    options.terminate = True
    with pytest.raises(ortrain.OrtrainError, match="the run did not start: terminate is set in its run options"):
        session.run(None, near, options)
    options.terminate = False
    assert len(session.run(None, near, options)) == 2


def test_run_options_that_are_none() -> None:
    options = ortrain.RunOptions()
    assert (options.log_severity_level, options.log_verbosity_level, options.logid) == (-1, 0, "")
    assert not options.terminate
    assert not options.only_execute_path_to_fetches
    for name in ("training", "terminated"):
        with pytest.raises(AttributeError):
            setattr(options, name, True)
    session = ortrain.InferenceSession(two_outputs())
    for other in ({}, ortrain.SessionOptions(), onnxruntime.SessionOptions(), "fast"):
        with pytest.raises(TypeError, match=r"run options must be an ortrain\.RunOptions, got"):
            session.run(None, {}, other)  # type: ignore[arg-type]
