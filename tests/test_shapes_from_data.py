"""Shapes that depend on data: the batches before do not change the result of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortrain import artifacts
from ortrain.api import CheckpointState, Module

FACTORS = np.random.default_rng(5).uniform(0.1, 0.3, (3, 6)).astype(np.float32)
VALUES = np.linspace(-0.6, 0.9, 6, dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts of ``sum((unique(x) + a + p) / 3 * factors)``, with the parameter ``p``."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Unique", ["x"], ["u"]),
            helper.make_node("Mean", ["u", "a", "p"], ["m"]),
            helper.make_node("Mul", ["m", "factors"], ["y"]),
            helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0),
        ],
        "graph",
        [declare("x", TensorProto.FLOAT, ["n"]), declare("factors", TensorProto.FLOAT, [3, "m"])],
        [declare("loss", TensorProto.FLOAT, [])],
        [
            numpy_helper.from_array(np.array([[0.4], [-1.4], [1.2]], np.float32), "a"),
            numpy_helper.from_array(np.array([1.2], np.float32), "p"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(model, requires_grad=["p"], artifact_directory=tmp_path)
    return tmp_path


def loaded(folder: Path) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state)


def test_earlier_batches_do_not_change_a_step(folder: Path) -> None:
    state, module = loaded(folder)
    module(VALUES, FACTORS)
    expected = np.array(state.parameters["p"].grad)
    programs = [instruction.kind for instruction in module.profile(VALUES, FACTORS, steps=1, warmup=0).instructions]
    for count in range(1, 6):
        state, module = loaded(folder)
        # With one value the shape of the product does not follow from the shape of the factors.
        module(VALUES[:count], FACTORS[:, :count])
        module.lazy_reset_grad()
        module(VALUES, FACTORS)
        assert np.array(state.parameters["p"].grad).tobytes() == expected.tobytes()
        profile = module.profile(VALUES, FACTORS, steps=1, warmup=0)
        assert [instruction.kind for instruction in profile.instructions] == programs
