"""Devices: training on a software Vulkan driver, compared with training on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from classic_models import OPTIMIZERS, classifier, fed, parameters
from conftest import GPU, RECORDS, Run
from onnx import TensorProto, helper, numpy_helper
from replaying import batches_of
from trainer_nets import losses_of, trainer_of

import ortrain
from ortrain import artifacts, backend, classic, examples
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.gradient import OrtGradientForwardBackward
from ortrain.session import TrainingSession

STEPS = 20
# Losses on a device and on the CPU after STEPS steps differ by rounding in another order of sums.
LOSS = 1e-4
# The same tolerance for weights, relative to the largest element of a parameter.
WEIGHTS = 1e-4

Batch = tuple[np.ndarray, ...]


def digits(count: int) -> list[Batch]:
    rng = np.random.default_rng(5)
    return [(rng.random((8, 64), np.float32), rng.integers(0, 10, 8)) for _ in range(count)]


def images(count: int) -> list[Batch]:
    rng = np.random.default_rng(6)
    return [(rng.random((4, 1, 8, 8), np.float32), rng.integers(0, 10, 4)) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts of the perceptron, with frozen weights in its last layer."""
    artifacts.generate_artifacts(
        examples.perceptron(),
        requires_grad=["fc1.weight", "fc1.bias", "fc2.bias"],
        frozen_params=["fc2.weight"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    return tmp_path


def load(folder: Path) -> CheckpointState:
    return CheckpointState.load_checkpoint(folder / "checkpoint")


def run_on(folder: Path, device: str, checkpoint: str | Path = "checkpoint") -> Run:
    return Run(folder, str(checkpoint), device=device)


def train(run: Run, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(float(np.asarray(run.module(*batch)).ravel()[0]))
        run.optimizer.step()
        run.module.lazy_reset_grad()
    return losses


def test_devices_are_listed() -> None:
    found = ortrain.devices()
    assert [device.name for device in found[:2]] == ["cpu", "reference"]
    (device,) = [device for device in found if device.name == GPU]
    assert device.kind in ("software", "discrete", "integrated", "other")
    assert device.description
    assert device.driver
    assert device.tensor_bytes is not None
    # CUDA reports its memory, the other interfaces report the size of their buffers.
    assert (device.memory if GPU.startswith("cuda") else device.plane_bytes) is not None
    assert found[0].memory is not None
    assert found[0].memory > 1 << 20


@pytest.mark.parametrize("name", ["", "CPU", "tpu", "vulkan:", "vulkan:-1", "vulkan:x", "cpu:1", "webgpu:1", "vulcan"])
def test_unknown_names(name: str, folder: Path) -> None:
    with pytest.raises(
        ortrain.InvalidArgumentError, match=f'^there is no device "{name}" here; there are "cpu", "reference"'
    ):
        run_on(folder, name)
    state = load(folder)
    with pytest.raises(ortrain.InvalidArgumentError, match="there is no device"):
        state.to(name)
    assert state.device == "cpu"


def test_a_name_that_was_meant(folder: Path) -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match='did you mean "vulkan"'):
        run_on(folder, "vulcan")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vulkan:7", r'there is no device "vulkan:7" here: (the only device is|there are \d+)'),
        (
            "metal",
            'there is no device "metal" here: Metal exists only on Apple\'s systems; "webgpu" selects the best GPU',
        ),
        ("dx12:1", 'there is no device "dx12:1" here: Direct3D 12 exists only on Windows'),
        ("cuda:99", 'there is no device "cuda:99" here: (the CUDA driver was not found; install|the only|there are)'),
        ("rocm", 'there is no device "rocm" here: ortrain has no ROCm backend; use "vulkan"'),
    ],
)
def test_devices_that_are_not_here(name: str, sentence: str, folder: Path) -> None:
    with pytest.raises(ortrain.DeviceUnavailableError, match=sentence):
        run_on(folder, name)
    with pytest.raises(ortrain.DeviceUnavailableError, match=sentence):
        ortrain.InferenceSession(examples.perceptron(), providers=[name])


def test_software_drivers_are_asked_for(folder: Path) -> None:
    """Without the environment variable a software driver is no device, and the error names the variable."""
    script = (
        "import ortrain\n"
        "print([device.name for device in ortrain.devices() if device.kind == 'software'])\n"
        "try: ortrain.CheckpointState.load_checkpoint('checkpoint').to('vulkan')\n"
        "except ortrain.DeviceUnavailableError as error: print(error)\n"
        "print(ortrain.CheckpointState.load_checkpoint('checkpoint').to('auto').device)\n"
    )
    variables = ("ORTRAIN_SOFTWARE_GPU", "ORTRAIN_CUDA_LIBRARIES")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, text=True, capture_output=True, check=True
    )
    listed, *rest = run.stdout.splitlines()
    assert listed == "[]"
    if len(rest) == 2:
        # The machine has no other GPU.
        assert "the only driver is" in rest[0]
        assert "set the environment variable ORTRAIN_SOFTWARE_GPU to 1" in rest[0]
        assert rest[1] == "cpu"
    assert run.stderr == ""


def test_the_first_module_moves_the_state(folder: Path) -> None:
    state = load(folder)
    before = state.parameters["fc1.weight"].data
    values = before.copy()
    assert state.device == "cpu"
    module = Module(folder / "training_model.onnx", state, device=GPU)
    assert (module.device, state.device) == (GPU, GPU)
    assert repr(module).endswith(f"device={GPU!r}, precision='f32')")

    # An earlier view keeps its values, and is no longer part of the state.
    before[:] = 7
    data = state.parameters["fc1.weight"].data
    np.testing.assert_array_equal(data, values)

    # Data from the device is a copy, and is read-only.
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data[0, 0] = 1
    assert not np.shares_memory(data, state.parameters["fc1.weight"].data)

    # Assignment copies values to the device, also into frozen parameters.
    for name in ("fc1.weight", "fc2.weight"):
        parameter = state.parameters[name]
        assert parameter.dtype == np.float32
        parameter.data = np.full(parameter.shape, 0.25, np.float32)
        assert (parameter.data == 0.25).all()
    with pytest.raises(ortrain.InvalidArgumentError, match="a value of"):
        state.parameters["fc1.weight"].data = np.zeros(3, np.float32)
    assert (np.asarray(state.parameters["fc1.weight"]) == 0.25).all()


def test_gradients_are_copies(folder: Path) -> None:
    runs = [run_on(folder, device) for device in ("cpu", GPU)]
    (batch,) = digits(1)
    for run in runs:
        run.module(*batch)
    host, device = (run.state.parameters["fc1.weight"].grad for run in runs)
    assert host is not None
    assert device is not None
    np.testing.assert_allclose(device, host, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        device[:] = 0
    assert runs[1].state.parameters["fc2.weight"].grad is None
    norms = [run.module.gradient_norms() for run in runs]
    assert list(norms[0]) == list(norms[1])
    np.testing.assert_allclose(list(norms[1].values()), list(norms[0].values()), rtol=1e-5)


def test_planes_are_device_arrays(folder: Path) -> None:
    host, run = run_on(folder, "cpu"), run_on(folder, GPU)
    (batch,) = digits(1)
    host.module(*batch)
    run.module(*batch)
    (values,), (frozen,), (gradients,) = (
        run.state.trainable_planes(),
        run.state.frozen_planes(),
        run.module.gradient_planes(),
    )
    for plane in (values, frozen, gradients):
        assert isinstance(plane, ortrain.DeviceArray)
        assert (plane.dtype, plane.device, plane.shape) == (np.float32, GPU, (len(plane),))
    (layout,) = run.state.layout().trainable
    assert layout.size == len(values) == len(gradients)
    np.testing.assert_array_equal(values.numpy(), host.state.trainable_planes()[0])
    np.testing.assert_allclose(gradients.numpy(), host.module.gradient_planes()[0], rtol=0, atol=1e-6)
    assert not values.numpy().flags.writeable
    assert not np.asarray(values).flags.writeable
    assert np.array(values, copy=True).flags.writeable
    assert np.asarray(values, np.float64).dtype == np.float64
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match=f'the plane is on device "{GPU}"'):
            np.asarray(values, copy=False)

    gradients.copy_from(2 * gradients.numpy())
    np.testing.assert_allclose(gradients.numpy(), 2 * host.module.gradient_planes()[0], rtol=0, atol=2e-6)
    gradients.copy_from(ortrain.OrtValue.ortvalue_from_numpy(np.zeros(len(gradients), np.float32)))
    assert not gradients.numpy().any()
    with pytest.raises(ortrain.InvalidArgumentError, match=r"the plane is float32.*, got float64"):
        values.copy_from(np.zeros(len(values)))
    with pytest.raises(ortrain.InvalidArgumentError, match=r"got float32\[3\]"):
        values.copy_from(np.zeros(3, np.float32))
    with pytest.raises(ortrain.InvalidArgumentError, match="frozen parameters, and is read-only"):
        frozen.copy_from(frozen.numpy())

    # A plane from before a move keeps its values, and is no longer part of the state.
    kept = values.numpy()
    run.state.to("cpu")
    values.copy_from(np.zeros(len(values), np.float32))
    np.testing.assert_array_equal(run.state.trainable_planes()[0], kept)


def test_packed_copies_move(folder: Path) -> None:
    host, run = run_on(folder, "cpu"), run_on(folder, GPU)
    for trainable_only in (True, False):
        got = run.module.get_contiguous_parameters(trainable_only).numpy()
        np.testing.assert_array_equal(got, host.module.get_contiguous_parameters(trainable_only).numpy())
        run.module.copy_buffer_to_parameters(2 * got, trainable_only)
        np.testing.assert_array_equal(run.module.get_contiguous_parameters(trainable_only).numpy(), 2 * got)
        run.module.copy_buffer_to_parameters(got, trainable_only)
    size = run.module.get_contiguous_gradients().numpy().size
    run.module.copy_buffer_to_gradients(np.arange(size, dtype=np.float32))
    np.testing.assert_array_equal(run.module.get_contiguous_gradients().numpy(), np.arange(size))


def test_a_state_comes_back(folder: Path) -> None:
    run, host = run_on(folder, GPU), run_on(folder, "cpu")
    batches = digits(8)
    losses, wanted = train(run, batches[:4]), train(host, batches[:4])
    assert run.state.to("cpu") is run.state
    assert run.state.device == "cpu"
    # The module stays on the device for which it was made.
    with pytest.raises(ortrain.OrtrainError, match=f'"cpu", but the module was made for "{GPU}"'):
        run.module(*batches[4])
    run.module = Module(folder / "training_model.onnx", run.state)
    run.optimizer = Optimizer(folder / "optimizer_model.onnx", run.module)
    losses += train(run, batches[4:])
    wanted += train(host, batches[4:])
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=LOSS)


def test_two_modules_on_two_devices(folder: Path) -> None:
    state = load(folder)
    first = Module(folder / "training_model.onnx", state)
    with pytest.raises(ortrain.OrtrainError, match=r"with a module, but the new module is for"):
        Module(folder / "training_model.onnx", state, device=GPU)
    assert state.device == "cpu"
    first(*digits(1)[0])
    del first
    assert Module(folder / "training_model.onnx", state, device=GPU).device == GPU


def test_moves_wait_for_steps(folder: Path) -> None:
    """A state moves while another thread trains: each step is complete, or fails because the state has moved."""
    run, host = run_on(folder, GPU), run_on(folder, "cpu")
    batches = digits(STEPS)
    losses: list[float] = []
    failures: list[str] = []

    def steps() -> None:
        for batch in batches:
            try:
                losses.append(float(run.module(*batch)))
                run.optimizer.step()
                run.module.lazy_reset_grad()
            except ortrain.OrtrainError as error:
                failures.append(str(error))
                return

    thread = threading.Thread(target=steps)
    thread.start()
    run.state.to("cpu")
    thread.join()
    assert len(failures) <= 1
    assert all("the module was made for" in failure for failure in failures)
    np.testing.assert_allclose(losses, train(host, batches)[: len(losses)], rtol=0, atol=LOSS)


def test_results_remain_on_the_device_until_read(folder: Path) -> None:
    run, host = run_on(folder, GPU), run_on(folder, "cpu")
    first, second = digits(2)
    inputs = [ortrain.OrtValue.ortvalue_from_numpy(array) for array in first]
    loss = run.module(*inputs)
    assert loss.device_name() == GPU
    # A later step does not change the result of an earlier one.
    other = run.module(*(ortrain.OrtValue.ortvalue_from_numpy(array) for array in second))
    wanted = [float(host.module(*batch)) for batch in (first, second)]
    np.testing.assert_allclose([loss.numpy(), other.numpy()], wanted, rtol=0, atol=LOSS)
    assert loss.device_name() == "cpu"


def test_labels_out_of_range(folder: Path) -> None:
    """The wrong label is in the last row: the error equals the CPU's, and nothing changes."""
    images, labels = digits(1)[0]
    labels[-1] = 10
    sentences = []
    for device in ("cpu", GPU):
        run = run_on(folder, device)
        before = run.module.get_contiguous_parameters().numpy().copy()
        with pytest.raises(ortrain.InvalidArgumentError) as caught:
            run.module(images, labels)
        sentences.append(str(caught.value))
        assert not run.module.get_contiguous_gradients().numpy().any()
        np.testing.assert_array_equal(run.module.get_contiguous_parameters().numpy(), before)
        labels_again = labels.copy()
        labels_again[-1] = 9
        assert np.isfinite(float(run.module(images, labels_again)))
    assert sentences[0] == sentences[1]


NETS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Batch]]]] = {
    "perceptron": (examples.perceptron, digits),
    "convnet": (examples.convnet, images),
}


def artifacts_of(net: str, folder: Path) -> tuple[Path, list[Batch]]:
    """Return artifacts and batches of a package net or of a recorded run (a transformer with dropout, an LSTM)."""
    if net not in NETS:
        return RECORDS / net, [tuple(batch.values()) for batch in batches_of(RECORDS / net)]
    model, batches = NETS[net]
    artifacts.generate_artifacts(
        model(),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    return folder, batches(STEPS)


@pytest.mark.parametrize("net", ["perceptron", "convnet", "tiny_transformer_adamw_ce", "lstm_gru_adamw_mse"])
def test_trainings(net: str, tmp_path: Path) -> None:
    """Twenty steps from one checkpoint; after five the other device continues. Repeated runs give the same bits."""
    folder, batches = artifacts_of(net, tmp_path)
    batches = [batches[step % len(batches)] for step in range(STEPS)]
    wanted = train(run_on(folder, "cpu"), batches)
    losses = train(run_on(folder, GPU), batches)
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=LOSS)
    assert train(run_on(folder, GPU), batches) == losses
    for first, then in (("cpu", GPU), (GPU, "cpu"), (GPU, GPU)):
        run = run_on(folder, first)
        parts = train(run, batches[:5])
        path = tmp_path / f"{first}_{then}".replace(":", "_")
        CheckpointState.save_checkpoint(run.state, path, include_optimizer_state=True)
        parts += train(run_on(folder, then, path), batches[5:])
        np.testing.assert_allclose(parts, wanted, rtol=0, atol=LOSS)
        if first == then:
            assert parts == losses


def test_exports_and_sessions(folder: Path, tmp_path: Path) -> None:
    run = run_on(folder, GPU)
    train(run, digits(3))
    run.module.export_model_for_inferencing(tmp_path / "trained.onnx", ["logits"])
    (x, _) = digits(1)[0]
    host = ortrain.InferenceSession(tmp_path / "trained.onnx")
    (wanted,) = host.run(None, {"x": x})
    session = ortrain.InferenceSession(tmp_path / "trained.onnx", providers=[GPU])
    assert session.get_providers() == [GPU]
    (logits,) = session.run(None, {"x": x})
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    (value,) = session.run_with_ort_values(None, {"x": ortrain.OrtValue.ortvalue_from_numpy(x)})
    np.testing.assert_array_equal(value.numpy(), logits)
    bound = session.io_binding()
    bound.bind_cpu_input("x", x)
    bound.bind_output("logits")
    session.run_with_iobinding(bound)
    np.testing.assert_array_equal(bound.copy_outputs_to_cpu()[0], logits)
    host.set_providers([GPU])
    assert host.get_providers() == [GPU]
    np.testing.assert_array_equal(host.run(None, {"x": x})[0], logits)


def test_results_of_a_session_go_into_the_next_run_where_they_lie() -> None:
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])
    sums = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 64])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", [rows], [sums])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    there, here = (ortrain.InferenceSession(model, providers=[name]) for name in (GPU, "cpu"))
    for count in (3, 40):  # a few rows take the path through the host
        x = np.random.default_rng(7).random((count, 64), np.float32)
        (twice,) = there.run_with_ort_values(None, {"x": ortrain.OrtValue.ortvalue_from_numpy(x)})
        (fourfold,) = there.run_with_ort_values(None, {"x": twice})
        assert [value.device_name() for value in (twice, fourfold)] == [GPU, GPU]
        (on_host,) = here.run_with_ort_values(None, {"x": fourfold})
        assert on_host.device_name() == "cpu"
        assert fourfold.device_name() == GPU
        np.testing.assert_array_equal(on_host.numpy(), 8 * x)
        binding = there.io_binding()
        binding.bind_ortvalue_input("x", fourfold)
        binding.bind_output("y")
        there.run_with_iobinding(binding)
        assert binding.get_outputs()[0].device_name() == GPU
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], 8 * x)
        # An array of the host receives the result, and the inputs of a run stay unchanged.
        room = ortrain.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
        binding.bind_ortvalue_output("y", room)
        there.run_with_iobinding(binding)
        np.testing.assert_array_equal(room.numpy(), 8 * x)
        np.testing.assert_array_equal(twice.numpy(), 2 * x)


def test_best_gpu_by_its_provider() -> None:
    session = ortrain.InferenceSession(examples.perceptron(), providers=["WebGpuExecutionProvider"])
    assert session.get_providers() == ["WebGpuExecutionProvider"]
    assert session.run(None, {"x": np.zeros((1, 64), np.float32)})[0].shape == (1, 10)


def test_interface_of_onnx() -> None:
    model = onnx.load(examples.perceptron())
    x = np.ones((1, 64), np.float32)
    assert backend.supports_device(GPU.upper())
    assert backend.supports_device("WEBGPU")
    assert not backend.supports_device("VULKAN:7")
    assert not backend.supports_device("METAL:0")
    (wanted,) = backend.run_model(model, [x])
    (logits,) = backend.run_model(model, [x], GPU.upper())
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ortrain.DeviceUnavailableError):
        backend.prepare(model, "VULKAN:7")


def test_session_of_csharp(folder: Path) -> None:
    losses = {}
    for device in ("cpu", GPU):
        models = [folder / f"{name}_model.onnx" for name in ("training", "eval", "optimizer")]
        session = TrainingSession(load(folder), *models, device=device)
        assert (session.device, session.state.device) == (device, device)
        losses[device] = []
        for batch in digits(6):
            losses[device].append(float(np.asarray(session.train_step(batch)[0])))
            session.optimizer_step()
            session.lazy_reset_grad()
        session.close()
    np.testing.assert_allclose(losses[GPU], losses["cpu"], rtol=0, atol=LOSS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_classic_session(optimizer: str) -> None:
    net = classifier(dropout=0.25)
    sessions = [
        classic.TrainingSession(net.model.SerializeToString(), parameters(net, optimizer), providers=[device])
        for device in ("cpu", GPU)
    ]
    assert sessions[1].get_providers() == [GPU]
    wanted, losses = (
        [float(session.run(["loss"], fed(net.batch(k), 0.01))[0]) for k in range(STEPS)] for session in sessions
    )
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=LOSS)
    host, device = (session.get_state() for session in sessions)
    for name, value in host.items():
        np.testing.assert_allclose(device[name], value, rtol=0, atol=WEIGHTS * max(1.0, np.abs(value).max()))
    # The state continues on the other device.
    sessions[0].load_state(device, strict=True)
    batch = fed(net.batch(STEPS), 0.01)
    (there,), (here,) = (session.run(["loss"], batch) for session in sessions[::-1])
    np.testing.assert_allclose(here, there, rtol=0, atol=LOSS)


def test_trainer() -> None:
    net = classifier()
    losses = {}
    for device in ("cpu", GPU):
        trainer = trainer_of(net, options={"device": {"id": device}})
        losses[device] = losses_of(trainer, net, 6)
        expected = "CPUExecutionProvider" if device == "cpu" else GPU
        assert trainer._training_session.get_providers() == [expected]
    np.testing.assert_allclose(losses[GPU], losses["cpu"], rtol=0, atol=LOSS)
    with pytest.raises(ortrain.DeviceUnavailableError, match=r"^device\.id is 'vulkan:7': there is no device"):
        trainer_of(net, options={"device": {"id": "vulkan:7"}})


def _in_a_fork(run: Run, batch: Batch, results: Any) -> None:
    """Send the messages of a process that was forked after the device was opened."""
    said = []
    for call in (
        lambda: run.module(*batch),
        lambda: run.optimizer.step(),
        lambda: run.state.parameters["fc1.bias"].data,
        lambda: run.state.to("cpu"),
    ):
        try:
            call()
            said.append("no error")
        except ortrain.DeviceLostError as error:
            said.append(str(error))
    results.send(said)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_fork(folder: Path) -> None:
    run = run_on(folder, GPU)
    (batch,) = digits(1)
    before = float(run.module(*batch))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(run, batch, theirs))
    child.start()
    assert ours.poll(60), "the child hangs"
    said = ours.recv()
    child.join()
    assert child.exitcode == 0
    assert len(said) == 4
    assert all("it was opened before the process forked" in sentence for sentence in said), said
    assert float(run.module(*batch)) == before


def test_forward_and_backward() -> None:
    """Two calls on a device: outputs, and gradients of weights and of inputs."""
    model, (x, _) = examples.perceptron(), digits(1)[0]
    made = [OrtGradientForwardBackward(model, providers=device, ordered=False) for device in ("cpu", GPU)]
    weights = [made[0].get_initializer(name) for name in made[0].weights_to_train]
    results = []
    for both in made:
        function = both.new_instance()
        (logits,) = function.forward([x, *weights], training=True)
        gradients = function.backward([np.ones((len(x), 10), np.float32)])
        assert {value.device_name().lower() for value in (logits, *gradients)} == {"cpu" if both is made[0] else GPU}
        results.append([np.asarray(value.numpy()) for value in (logits, *gradients)])
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _convolution(filters: np.ndarray) -> onnx.ModelProto:
    """Return a model of a convolution with a padding of one and a stride of two."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1], strides=[2, 2])
    shape = ["n", filters.shape[1], 9, 9]
    graph = helper.make_graph(
        [node],
        "convolution",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(filters, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["images", "filters", "gradient"])
def test_convolutions_of_special_numbers(where: str, value: float) -> None:
    """Padding elements do not take part: infinity beside them makes no NaN in any of the three passes."""
    rng = np.random.default_rng(3)
    x, filters = rng.standard_normal((2, 6, 9, 9), np.float32), rng.standard_normal((12, 6, 3, 3), np.float32)
    given = rng.standard_normal((2, 12, 5, 5), np.float32)
    {"images": x, "filters": filters, "gradient": given}[where][1, 2, 0, 0] = value
    results = []
    for device in ("cpu", GPU):
        both = OrtGradientForwardBackward(_convolution(filters).SerializeToString(), ["w"], providers=device)
        function = both.new_instance()
        outputs = function.forward([x, both.get_initializer("w")], training=True)
        results.append([value.numpy() for value in (*outputs, *function.backward([given]))])
    assert any(not np.isfinite(result).all() for result in results[0])
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_memory_limits_hold_before_anything_is_allocated(folder: Path) -> None:
    options = ortrain.SessionOptions()
    options.memory_limit = 100_000
    state = load(folder)
    module = Module(folder / "training_model.onnx", state, device=GPU, session_options=options)
    before = module.memory()
    rng = np.random.default_rng(0)
    with pytest.raises(ortrain.MemoryLimitError, match="but memory_limit is 100000"):
        module(rng.random((4096, 64), np.float32), rng.integers(0, 10, 4096))
    assert module.memory() == before
    assert np.isfinite(float(module(*digits(1)[0])))
