"""CheckpointState, Parameter, Properties."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import RECORDS, Run
from onnx import TensorProto, helper, numpy_helper
from replaying import batches_of

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.api.checkpoint_state import Parameter, Parameters, Properties

CASE = RECORDS / "mlp_adamw_ce"
NAMES = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]


def step(run: Run) -> float:
    """Take a training step on the first batch; returns the loss."""
    batch = batches_of(CASE)[0]
    return float(run.module(*[batch[name] for name in run.module.input_names()]))


def test_constructor_is_an_error() -> None:
    with pytest.raises(TypeError, match="load_checkpoint"):
        CheckpointState("checkpoint")


def test_parameters(run: Run) -> None:
    parameters = run.state.parameters
    assert isinstance(parameters, Parameters)
    assert len(parameters) == len(NAMES)
    assert [name for name, _ in parameters] == NAMES
    assert "fc1.weight" in parameters
    assert "fc3.weight" not in parameters
    assert 3 not in parameters
    with pytest.raises(KeyError, match=r"Parameter fc3\.weight not found\."):
        parameters["fc3.weight"]
    with pytest.raises(KeyError, match=r"Parameter fc3\.weight not found\."):
        parameters["fc3.weight"] = np.zeros(3, np.float32)
    weight = parameters["fc1.weight"]
    assert isinstance(weight, Parameter)
    assert (weight.name, weight.requires_grad, weight.data.shape) == ("fc1.weight", True, (10, 24))
    assert repr(weight) == "Parameter(name=fc1.weight, requires_grad=True, shape=(10, 24), dtype=float32)"
    assert repr(parameters) == "Parameters(fc1.bias, fc1.weight, fc2.bias, fc2.weight)"
    with pytest.raises(AttributeError):
        weight.grad = np.zeros(3)


def test_views_accept_a_state(run: Run) -> None:
    """Views accept the argument names of onnxruntime-training, with our state or its native object."""
    state = run.state
    state.properties["epoch"] = 3
    for own in (state, state._native):
        parameters, properties = Parameters(state=own), Properties(state=own)
        assert [name for name, _ in parameters] == NAMES
        assert properties["epoch"] == 3
        bias = Parameter(parameter="fc1.bias", state=own)
        again = Parameter(bias, own)
        assert bias.name == again.name == "fc1.bias"
        assert np.shares_memory(again.data, state.parameters["fc1.bias"].data)
    properties["epoch"] = 4
    assert state.properties["epoch"] == 4
    with pytest.raises(KeyError, match=r"Parameter fc1\.bais not found\. Did you mean 'fc1\.bias'\?"):
        Parameter("fc1.bais", state)
    with pytest.raises(TypeError, match="parameter must be a name, got int"):
        Parameter(3, state)
    for view in (Parameters, Properties, lambda other: Parameter("fc1.bias", other)):
        with pytest.raises(TypeError, match="state must be a CheckpointState, got str"):
            view("checkpoint")


def test_data_is_a_live_view(run: Run) -> None:
    data = run.state.parameters["fc1.bias"].data
    before = data.copy()
    assert not np.shares_memory(data, before)
    assert np.shares_memory(data, run.state.parameters["fc1.bias"].data)
    step(run)
    np.testing.assert_array_equal(data, before)
    run.optimizer.step()
    assert (data != before).all()

    first = step(run)
    data += 1
    assert step(run) != first
    data -= 1
    np.testing.assert_allclose(step(run), first, rtol=1e-6)


def test_data_begins_at_a_multiple_of_256_bytes(run: Run) -> None:
    for _, parameter in run.state.parameters:
        assert parameter.data.ctypes.data % 256 == 0
        assert parameter.grad is not None
        assert parameter.grad.ctypes.data % 256 == 0


def test_views_outlive_everything(ours: Callable[[str], Path]) -> None:
    run = Run(ours("mlp_adamw_ce"))
    step(run)
    parameter = run.state.parameters["fc1.bias"]
    data, grad = parameter.data, parameter.grad
    assert grad is not None
    values, gradients = data.copy(), grad.copy()
    del run, parameter
    for _ in range(3):
        step(Run(ours("mlp_adamw_ce")))
    np.testing.assert_array_equal(data, values)
    np.testing.assert_array_equal(grad, gradients)
    data[:] = 1


def test_the_first_step_adds_to_gradients_that_are_there(ours: Callable[[str], Path]) -> None:
    """The gradients of a new module are zero, unless the user wrote other values."""
    found = []
    for start in (0.0, 2.0):
        run = Run(ours("mlp_adamw_ce"))
        grad = run.state.parameters["fc1.bias"].grad
        assert grad is not None
        grad[:] = start
        step(run)
        found.append(grad.copy())
    np.testing.assert_allclose(found[1], found[0] + 2.0, rtol=1e-6)


@pytest.mark.parametrize("how", ["item", "attribute"])
def test_setting(how: str, run: Run) -> None:
    values = np.arange(240, dtype=np.float32).reshape(10, 24)

    def write(array: object) -> None:
        if how == "item":
            run.state.parameters["fc1.weight"] = array
        else:
            run.state.parameters["fc1.weight"].data = array

    view = run.state.parameters["fc1.weight"].data
    for array in (
        values,
        np.asfortranarray(values),
        np.repeat(values, 2, axis=1)[:, ::2],
        values.astype(">f4"),
        ortrain.OrtValue.ortvalue_from_numpy(values),
    ):
        view[:] = 0
        write(array)
        np.testing.assert_array_equal(view, values)
    for wrong in (values.T, values.ravel(), values[None], values.astype(np.float64), values.astype(np.int32)):
        with pytest.raises(ortrain.InvalidArgumentError, match=r"parameter \"fc1.weight\" is float32\[10, 24\]"):
            write(wrong)
    for given in (values.tolist(), tuple(values), 1.0):
        with pytest.raises(
            ortrain.InvalidArgumentError, match=r"the value of parameter 'fc1\.weight' must be an array or an"
        ):
            write(given)
    np.testing.assert_array_equal(view, values)


def test_state_without_a_module(ours: Callable[[str], Path], tmp_path: Path) -> None:
    """A state without a module supports reading, writing and saving, but has no gradients."""
    state = CheckpointState.load_checkpoint(ours("mlp_adamw_ce") / "checkpoint")
    bias = state.parameters["fc1.bias"]
    assert bias.grad is None
    bias.data = np.full(24, 3, np.float32)
    bias.data[0] = 4
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    again = CheckpointState.load_checkpoint(tmp_path / "saved")
    assert again.parameters["fc1.bias"].data.tolist() == [4.0] + [3.0] * 23


def test_gradients(run: Run) -> None:
    grad = run.state.parameters["fc2.bias"].grad
    assert grad is not None
    assert not grad.any()
    step(run)
    once = grad.copy()
    assert once.any()
    step(run)
    np.testing.assert_allclose(grad, 2 * once, rtol=1e-6)
    run.module.lazy_reset_grad()
    np.testing.assert_allclose(grad, 2 * once, rtol=1e-6)
    step(run)
    np.testing.assert_array_equal(grad, once)


def test_frozen_parameters(ours: Callable[[str], Path]) -> None:
    run = Run(ours("frozen_params"))
    frozen = run.state.parameters["fc1.weight"]
    assert not frozen.requires_grad
    assert frozen.grad is None
    with pytest.raises(ValueError, match="read-only"):
        frozen.data[0] = 1
    batch = batches_of(RECORDS / "frozen_params")[0]
    inputs = [batch[name] for name in run.module.input_names()]
    before = float(run.module(*inputs))
    frozen.data = frozen.data * 2
    assert float(run.module(*inputs)) != before


def test_newest_module_shows_its_gradients(ours: Callable[[str], Path]) -> None:
    """Two modules on one state share the parameters; each module has its own gradients."""
    run = Run(ours("mlp_adamw_ce"))
    bias = run.state.parameters["fc2.bias"]
    step(run)
    first = bias.grad
    assert first is not None
    assert first.any()
    second = Module(run.folder / "training_model.onnx", run.state)
    fresh = bias.grad
    assert fresh is not None
    assert not fresh.any()
    assert first.any()
    batch = batches_of(CASE)[1]
    second(*[batch[name] for name in second.input_names()])
    assert fresh.any()
    assert (fresh != first).any()
    other = Optimizer(run.folder / "optimizer_model.onnx", second)
    other.set_learning_rate(0.25)
    assert run.optimizer.get_learning_rate() == 0.25
    before = bias.data.copy()
    other.step()
    assert (bias.data != before).any()
    del second, other
    assert bias.grad is not None
    np.testing.assert_array_equal(bias.grad, fresh)


def test_properties(run: Run, tmp_path: Path) -> None:
    properties = run.state.properties
    assert isinstance(properties, Properties)
    assert len(properties) == 0
    stored = {
        "epoch": (3, 3),
        "big": (-(2**63), -(2**63)),
        "flag": (True, 1),
        "numpy": (np.int64(5), 5),
        "rate": (0.1, float(np.float32(0.1))),
        "half": (np.float32(1.5), 1.5),
        "text": ("ünïcode", "ünïcode"),
        "bytes": (b"abc", "abc"),
        "": ("no name", "no name"),
    }
    for name, (value, _) in stored.items():
        properties[name] = value
    CheckpointState.save_checkpoint(run.state, tmp_path / "saved")
    for state in (run.state, CheckpointState.load_checkpoint(tmp_path / "saved")):
        assert list(state.properties) == sorted((name, value) for name, (_, value) in stored.items())
        assert {type(value) for _, value in state.properties} == {int, float, str}
        assert "epoch" in state.properties
    properties["epoch"] = "three"
    assert properties["epoch"] == "three"
    with pytest.raises(KeyError, match="Property missing not found"):
        properties["missing"]
    with pytest.raises(TypeError, match="a property must be an int, a float or a str, got list"):
        properties["list"] = [1]
    with pytest.raises(OverflowError):
        properties["too big"] = 2**63
    assert "too big" not in properties


def test_saving(run: Run, tmp_path: Path) -> None:
    step(run)
    run.optimizer.step()
    path = tmp_path / "saved"
    CheckpointState.save_checkpoint(run.state, path)
    plain = path.read_bytes()
    CheckpointState.save_checkpoint(run.state, os.fspath(path), include_optimizer_state=True)
    assert len(path.read_bytes()) > len(plain)
    again = CheckpointState.load_checkpoint(path)
    CheckpointState.save_checkpoint(again, tmp_path / "again", include_optimizer_state=True)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    with pytest.raises(ortrain.OrtrainError, match="no_such_folder"):
        CheckpointState.save_checkpoint(run.state, tmp_path / "no_such_folder" / "saved")


def test_bytes(run: Run, tmp_path: Path) -> None:
    """The bytes equal the file's; a state from any bytes-like object continues with the same bits."""
    step(run)
    run.optimizer.step()
    run.optimizer.set_learning_rate(0.25)
    run.state.properties["epoch"] = 3
    for include in (False, True):
        CheckpointState.save_checkpoint(run.state, tmp_path / "saved", include)
        content = (tmp_path / "saved").read_bytes()
        assert run.state.to_bytes(include) == content
        assert CheckpointState.to_bytes(run.state, include_optimizer_state=include) == content
        for given in (content, bytearray(content), memoryview(content), memoryview(bytearray(content))):
            state = CheckpointState.load_checkpoint(given)
            assert state.properties["epoch"] == 3
            assert state.to_bytes(include) == content
        changed = bytearray(content)
        state = CheckpointState.load_checkpoint(changed)
        changed[:] = bytes(len(changed))
        assert state.to_bytes(include) == content
    assert run.state.to_bytes() == run.state.to_bytes(include_optimizer_state=False)
    again = CheckpointState.load_checkpoint(run.state.to_bytes(include_optimizer_state=True))
    module = Module(run.folder / "training_model.onnx", again)
    assert Optimizer(run.folder / "optimizer_model.onnx", module).get_learning_rate() == 0.25
    with pytest.raises(ortrain.OrtrainError, match="the checkpoint is empty"):
        CheckpointState.load_checkpoint(b"")
    with pytest.raises(ortrain.OrtrainError, match="the checkpoint is damaged"):
        CheckpointState.load_checkpoint(bytes([*content[:900], content[900] ^ 1, *content[901:]]))


def test_clients_and_a_server_without_files(ours: Callable[[str], Path]) -> None:
    """Clients train a received state and return the result; the server averages two results."""
    folder, sent = ours("mlp_adamw_ce"), (ours("mlp_adamw_ce") / "checkpoint").read_bytes()
    answers = []
    for batch in batches_of(CASE)[:2]:
        client = CheckpointState.load_checkpoint(sent)
        module = Module(folder / "training_model.onnx", client)
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        module(*[batch[name] for name in module.input_names()])
        optimizer.step()
        answers.append(client.to_bytes())
    server = CheckpointState.load_checkpoint(sent)
    states = [CheckpointState.load_checkpoint(answer) for answer in answers]
    for name, parameter in server.parameters:
        before = np.array(parameter.data)
        parameter.data = np.mean([state.parameters[name].data for state in states], axis=0, dtype=np.float32)
        assert (parameter.data != before).any()


def test_bytes_of_a_nominal_state(ours: Callable[[str], Path]) -> None:
    state = CheckpointState.load_checkpoint(RECORDS / "checkpoint_resume" / "nominal_checkpoint")
    again = CheckpointState.load_checkpoint(state.to_bytes())
    assert len(again.parameters) == len(state.parameters)
    with pytest.raises(ortrain.OrtrainError, match="the state is nominal"):
        list(again.parameters)


def test_threads_take_turns(run: Run) -> None:
    """Steps of several threads on one state equal steps of one thread in some order: no step is lost."""
    batch = batches_of(CASE)[0]
    inputs = [batch[name] for name in run.module.input_names()]
    once = run.state.parameters["fc2.bias"].grad
    assert once is not None
    run.module(*inputs)
    expected = once.copy() * 41

    def work() -> None:
        for _ in range(10):
            run.module(*inputs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(once, expected, rtol=1e-4)


def test_writing_while_another_thread_steps(run: Run) -> None:
    """Concurrent writes leave an undefined mixture of values, without other damage."""
    data = run.state.parameters["fc1.weight"].data
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            data[:] = np.random.default_rng(0).standard_normal(data.shape)

    thread = threading.Thread(target=scribble)
    thread.start()
    for _ in range(200):
        step(run)
        run.optimizer.step()
    done.set()
    thread.join()
    assert np.isfinite(data).all()


@pytest.mark.parametrize("ml_dtypes_there", [True, False])
def test_bfloat16_parameters(ml_dtypes_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are ml_dtypes.bfloat16, or uint16 bits without ml_dtypes."""
    import ml_dtypes

    values = np.asarray([1.0, -2.5, 3.0], ml_dtypes.bfloat16)
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "b"], ["xb"]),
            helper.make_node("Cast", ["xb"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["wide", "w"], ["product"]),
            helper.make_node("ReduceSum", ["product"], ["loss"], keepdims=0),
        ],
        "bfloat16",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [3])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(values, "b"), numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    artifacts.generate_artifacts(model, requires_grad=["w"], frozen_params=["b"], artifact_directory=tmp_path)
    script = f"""
import sys
if not {ml_dtypes_there}:
    sys.modules["ml_dtypes"] = None
import numpy as np, ortrain
from ortrain.api import CheckpointState, Module
state = CheckpointState.load_checkpoint({str(tmp_path / "checkpoint")!r})
module = Module({str(tmp_path / "training_model.onnx")!r}, state)
data = state.parameters["b"].data
print(data.dtype, data.view(np.uint16).tolist())
bits = np.asarray([0x3F80, 0x4000, 0x4040], np.uint16)
x = ortrain.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 16)
print(x.data_type(), x.numpy().dtype, float(module(x).numpy()))
"""
    import subprocess
    import sys

    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    kind = "bfloat16" if ml_dtypes_there else "uint16"
    bits = values.view(np.uint16).tolist()
    # 1 * 1 - 2 * 2.5 + 3 * 3
    assert printed.splitlines() == [f"{kind} {bits}", f"tensor(bfloat16) {kind} 5.0"]
