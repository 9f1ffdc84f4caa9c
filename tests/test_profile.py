"""Module.profile, Module.memory and memory_limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest
from conftest import DEVICES, Run

import ortrain
from ortrain.api import CheckpointState, Instruction, Module


def batch(rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return features and labels for the recorded classifier."""
    rng = np.random.default_rng(rows)
    return rng.standard_normal((rows, 10), np.float32), rng.integers(0, 5, rows)


def gradients(run: Run) -> dict[str, np.ndarray[Any, Any]]:
    found = {name: parameter.grad for name, parameter in run.state.parameters}
    return {name: gradient.copy() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("device", DEVICES)
def test_instructions(ours: Any, device: str) -> None:
    run = Run(ours("mlp_adamw_ce"), device=device)
    profile = run.module.profile(*batch(8), steps=3)
    assert len(profile.steps) == 3
    assert all(isinstance(instruction, Instruction) for instruction in profile.instructions)
    (first,) = [one for one in profile.instructions if one.kind == "MatMul" and one.shapes == "[] 8x24x10"]
    assert first.calls == 3
    assert 0 <= first.min <= first.median <= first.total <= sum(profile.steps)
    assert first.flops == 2 * 8 * 24 * 10 + 8 * 24
    assert first.bytes == 4 * (8 * 10 + 24 * 10 + 24 + 8 * 24)
    assert first.bound == pytest.approx(
        max(first.flops / profile.flops_limit, first.bytes / profile.bandwidth_limit), abs=1e-9
    )
    assert first.share == pytest.approx(first.bound / max(first.median, 1e-9))
    table = profile.table()
    assert str(profile) == table
    assert first.node in table
    assert table.splitlines()[-2].endswith("all")
    assert "ms to plan for new shapes: shapes and lowering " in table.splitlines()[-1]
    assert list(profile.planning)[:: len(profile.planning) - 1] == ["shapes and lowering", "kernels"]
    assert "memory_plan" in profile.planning
    assert all(seconds >= 0 for seconds in profile.planning.values())
    assert repr(profile) == f"Profile({len(profile.instructions)} instructions, 3 steps)"
    assert run.module.memory().work <= profile.memory


def test_nothing_changes(ours: Any) -> None:
    """Steps after a profile have the bits of steps without a profile."""
    plain, profiled = (Run(ours("mlp_adamw_ce")) for _ in range(2))
    for step in range(4):
        for run in (plain, profiled):
            if run is profiled:
                before = gradients(run)
                run.module.profile(*batch(16), steps=2)
                assert run.module.training
                after = gradients(run)
                assert all(np.array_equal(before[name], after[name]) for name in before)
        losses = [run.module(*batch(16 + step)) for run in (plain, profiled)]
        assert losses[0] == losses[1]
        for run in (plain, profiled):
            run.optimizer.step()
            run.module.lazy_reset_grad()
    for (name, left), (_, right) in zip(plain.state.parameters, profiled.state.parameters, strict=True):
        assert np.array_equal(left.data, right.data), name


def test_evaluation_is_profiled_in_eval_mode(run: Run) -> None:
    train = run.module.profile(*batch(8), steps=1)
    run.module.eval()
    evaluated = run.module.profile(*batch(8), steps=1)
    assert len(evaluated.instructions) < len(train.instructions)


def test_trace(run: Run, tmp_path: Path) -> None:
    profile = run.module.profile(*batch(8), steps=2, warmup=0)
    path = tmp_path / "trace.json"
    profile.chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 + sum(instruction.calls for instruction in profile.instructions)
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    products = [event for event in complete if event["name"].startswith("MatMul")]
    assert {"node", "shapes", "flops", "bytes", "share_of_bound"} <= products[0]["args"].keys()
    with pytest.raises(ortrain.NoSuchFileError):
        profile.chrome_trace(tmp_path / "nowhere" / "trace.json")


def test_arguments(run: Run) -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match="steps must be at least 1"):
        run.module.profile(*batch(8), steps=0)
    with pytest.raises(ortrain.InvalidArgumentError, match=r"expected 2 inputs \(x, labels\), got 1"):
        run.module.profile(batch(8)[0])


def limited(folder: Path, limit: int | None) -> Module:
    options = ortrain.SessionOptions()
    options.memory_limit = limit
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, session_options=options)


def test_memory_limit(run: Run) -> None:
    need = run.module.profile(*batch(64), steps=1).memory
    loss = run.module(*batch(64))
    memory = run.module.memory()
    # The limit does not count the moments.
    limited_bytes = memory.total - memory.moments
    assert limited_bytes == memory.parameters + memory.gradients + memory.work + memory.scratch <= need
    assert limited(run.folder, need)(*batch(64)) == loss
    # Recomputation of values needs less memory, down to a minimum. Constants of the program count as well.
    constants, least = need - limited_bytes, need
    while (less := limited(run.folder, least - 1).memory(*batch(64)).total + constants) < least:
        least = less
    assert limited(run.folder, least)(*batch(64)) == loss
    short = limited(run.folder, least - 1)
    said = rf"{least} bytes .*memory_limit is {least - 1}.*; memory_limit = {least} is enough; .* a batch of \d+ fits"
    with pytest.raises(ortrain.MemoryLimitError, match=said):
        short(*batch(64))
    assert short.memory().work == 0
    short(*batch(8))
    with pytest.raises(MemoryError, match=r"fc1.weight.*\(240 float32, 960 bytes\)"):
        limited(run.folder, 100)
    with pytest.raises(ortrain.InvalidArgumentError, match="memory_limit must be at least 0 bytes, got -1"):
        limited(run.folder, -1)


def test_memory_limit_of_a_program_compiled_during_a_run() -> None:
    """The number of rows is only known during the run."""
    helper = onnx.helper
    nodes = [
        helper.make_node("NonZero", ["mask"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["turned"]),
        helper.make_node("Squeeze", ["turned", "last"], ["indices"]),
        helper.make_node("Gather", ["table", "indices"], ["picked"], name="pick", axis=0),
        helper.make_node("MatMul", ["picked", "wide"], ["product"], name="widen"),
        helper.make_node("ReduceSum", ["product"], ["sum"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "late",
        [helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, ["n"])],
        [helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, [])],
        [
            onnx.numpy_helper.from_array(np.ones((512, 4), np.float32), "table"),
            onnx.numpy_helper.from_array(np.ones((4, 256), np.float32), "wide"),
            onnx.numpy_helper.from_array(np.array([1], np.int64), "last"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ortrain.SessionOptions()
    options.memory_limit = 200_000
    session = ortrain.InferenceSession(model.SerializeToString(), options)
    few = np.arange(512) < 3
    assert session.run(None, {"mask": few})[0] == 3 * 4 * 256
    said = r"\"product\" \(131072 float32, 524288 bytes\).*; memory_limit must be at least \d+$"
    with pytest.raises(ortrain.MemoryLimitError, match=said):
        session.run(None, {"mask": np.ones(512, bool)})
    assert session.run(None, {"mask": few})[0] == 3 * 4 * 256
