"""Contiguous buffers: packed copies and views of planes, and data-parallel training with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import RECORDS, Run
from onnx import TensorProto, helper, numpy_helper
from replaying import batches_of

import ortrain
from ortrain import OrtValue, artifacts
from ortrain.api import CheckpointState, Module, PlaneLayout

# Rounding of a float32 sum in another order.
ROUNDING = 1e-6
ALIGNMENT = 256


def inputs_of(run: Run, batch: int) -> list[np.ndarray]:
    batches = batches_of(RECORDS / run.folder.name)
    return [batches[batch % len(batches)][name] for name in run.module.input_names()]


@pytest.fixture(params=["mlp_adamw_ce", "frozen_params", "cnn_bn_adamw_ce"])
def recorded(request: pytest.FixtureRequest) -> Run:
    return Run(RECORDS / request.param)


def pieces(planes: list[np.ndarray], layouts: tuple[PlaneLayout, ...]) -> dict[str, np.ndarray]:
    """Return the tensors of planes, cut out by the layout."""
    found = {}
    for plane, layout in zip(planes, layouts, strict=True):
        assert (plane.ndim, plane.size, plane.dtype) == (1, layout.size, layout.dtype)
        for tensor in layout.tensors:
            count = int(np.prod(tensor.shape))
            found[tensor.name] = plane[tensor.offset : tensor.offset + count].reshape(tensor.shape)
    return found


def test_planes_contain_parameters_and_gradients(recorded: Run) -> None:
    recorded.module(*inputs_of(recorded, 0))
    state, module, layout = recorded.state, recorded.module, recorded.state.layout()
    trainable = pieces(state.trainable_planes(), layout.trainable)
    frozen = pieces(state.frozen_planes(), layout.frozen)
    gradients = pieces(module.gradient_planes(), layout.trainable)
    assert sorted(trainable | frozen) == [name for name, _ in state.parameters]
    for name, parameter in state.parameters:
        part = (trainable if parameter.requires_grad else frozen)[name]
        assert np.shares_memory(part, parameter.data)
        np.testing.assert_array_equal(part, parameter.data, strict=True)
        assert part.flags.writeable == parameter.requires_grad
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert np.shares_memory(gradients[name], parameter.grad)
            np.testing.assert_array_equal(gradients[name], parameter.grad, strict=True)
    for planes, layouts in (
        (state.trainable_planes(), layout.trainable),
        (state.frozen_planes(), layout.frozen),
        (module.gradient_planes(), layout.trainable),
    ):
        for plane, of in zip(planes, layouts, strict=True):
            names = [tensor.name for tensor in of.tensors]
            assert names == sorted(names)
            assert plane.ctypes.data % ALIGNMENT == 0
            assert all(tensor.offset * plane.itemsize % ALIGNMENT == 0 for tensor in of.tensors)
            inside = sum(int(np.count_nonzero(part)) for part in pieces([plane], (of,)).values())
            assert np.count_nonzero(plane) == inside, "the gaps between tensors are zero"


def test_planes_through_dlpack() -> None:
    run = Run(RECORDS / "mlp_adamw_ce")
    run.module(*inputs_of(run, 0))
    for (plane,) in (run.state.trainable_planes(), run.module.gradient_planes()):
        other = np.from_dlpack(plane)
        assert np.shares_memory(other, plane)
        np.testing.assert_array_equal(other, plane)
    assert plane.any()


def test_views_outlive_everything() -> None:
    run = Run(RECORDS / "mlp_adamw_ce")
    run.module(*inputs_of(run, 0))
    (values,), (gradients,) = run.state.trainable_planes(), run.module.gradient_planes()
    expected = values.copy(), gradients.copy()
    del run
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(gradients, expected[1])
    assert gradients.any()


def test_gradients_are_packed_as_parameters_are(recorded: Run) -> None:
    """Packed gradients written as packed parameters give each parameter the values of its own gradient."""
    recorded.module(*inputs_of(recorded, 0))
    packed = recorded.module.get_contiguous_gradients()
    assert packed.shape() == [recorded.module.get_parameters_size(trainable_only=True)]
    gradients = {n: p.grad.copy() for n, p in recorded.state.parameters if p.grad is not None}
    recorded.module.copy_buffer_to_parameters(packed)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(recorded.state.parameters[name].data, gradient)
    packed.numpy()[:] = 0
    assert recorded.module.get_contiguous_gradients().numpy().any()


def test_buffers_that_do_not_fit(run: Run) -> None:
    for bad, sentence in (
        (np.zeros(5, np.float32), "the buffer should have 389 elements, but it has 5"),
        (np.zeros(389), "the buffer must be float32, got float64"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            run.module.copy_buffer_to_gradients(bad)
        assert str(error.value) == sentence
    run.module.copy_buffer_to_gradients(OrtValue.ortvalue_from_numpy(np.ones(389, np.float32)))
    assert run.module.get_contiguous_gradients().numpy().sum() == 389


@pytest.mark.parametrize("how", ["planes", "copies"])
def test_two_workers_train_as_one_with_both_batches(how: str) -> None:
    """All-reduce in a few lines: the mean of the gradients, in place or through packed copies."""
    workers = [Run(RECORDS / "mlp_sgd_mse") for _ in range(2)]
    single = Run(RECORDS / "mlp_sgd_mse")
    for step in range(3):
        for number, worker in enumerate(workers):
            batch = inputs_of(worker, 2 * step + number)
            worker.module(*batch)
            single.module(*batch)
        if how == "planes":
            for planes in zip(*(worker.module.gradient_planes() for worker in workers), strict=True):
                mean = sum(planes) / 2
                for plane in planes:
                    plane[:] = mean
        else:
            buffers = [worker.module.get_contiguous_gradients().numpy() for worker in workers]
            for worker in workers:
                worker.module.copy_buffer_to_gradients((buffers[0] + buffers[1]) / 2)
        for (plane,) in [single.module.gradient_planes()]:
            plane /= 2
        for run in (*workers, single):
            run.optimizer.step()
            run.module.lazy_reset_grad()
    of = [run.module.get_contiguous_parameters().numpy() for run in (*workers, single)]
    np.testing.assert_array_equal(of[0], of[1])
    np.testing.assert_allclose(of[0], of[2], rtol=ROUNDING, atol=ROUNDING)


def test_a_plane_for_each_element_type(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["h"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["x", "wide"], ["xh"]),
            helper.make_node("Mul", ["xh", "w"], ["product"]),
            helper.make_node("ReduceSum", ["product"], ["loss"], keepdims=0),
        ],
        "types",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [
            numpy_helper.from_array(np.ones(3, np.float16), "h"),
            numpy_helper.from_array(np.full(3, 2, np.float32), "w"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    with pytest.warns(ortrain.TrainingWarning, match='1 of the 2 trained tensors are float16 \\("h"\\)'):
        artifacts.generate_artifacts(model, requires_grad=["h", "w"], artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    module(np.asarray([1, 2, 3], np.float32))
    assert [plane.dtype for plane in state.layout().trainable] == ["float16", "float32"]
    half, single = module.gradient_planes()
    np.testing.assert_array_equal(half[:3], np.asarray([2, 4, 6], np.float16), strict=True)
    np.testing.assert_array_equal(single[:3], np.asarray([1, 2, 3], np.float32), strict=True)
    with pytest.raises(
        ortrain.InvalidArgumentError, match='parameter "h" is float16, but a packed buffer holds float32'
    ):
        module.get_contiguous_gradients()


def test_a_nominal_state() -> None:
    case = RECORDS / "checkpoint_resume"
    state = CheckpointState.load_checkpoint(case / "nominal_checkpoint")
    for call in (state.layout, state.trainable_planes, state.frozen_planes):
        with pytest.raises(ortrain.OrtrainError, match="the state is nominal"):
            call()
    module = Module(case / "training_model.onnx", state)
    assert state.layout() == CheckpointState.load_checkpoint(case / "checkpoint").layout()
    for call in (state.trainable_planes, module.get_contiguous_gradients):
        with pytest.raises(ortrain.OrtrainError, match="the state is nominal"):
            call()
    assert not module.gradient_planes()[0].any()
