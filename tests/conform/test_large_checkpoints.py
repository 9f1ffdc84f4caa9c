"""Checkpoints of more than 2 GB, with tensors in a separate file: 10 GB of disk and 6 GB of memory."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import environments
import numpy as np
import pytest
from environments import BUILD, in_environment
from replaying import LOSS_TOLERANCE, PARAMETER_TOLERANCE

TESTS = Path(__file__).parent.parent
# More than the limit of one buffer, in tensors of many sizes. The second file therefore has gaps between some tensors.
SIZES = {"a": (187_500_000,), "b": (12_500, 15_000), "c.bias": (3,), "d": (185_000, 1_000), "e": ()}
FROZEN = ("c.bias", "e")
BYTES = 4 * sum(int(np.prod(shape)) for shape in SIZES.values())
# A table that exceeds this size together with its two moments.
ROWS, WIDTH = 185_000, 1_000
KILLS = 6
CHUNK = 1 << 24

BEGIN = """
import hashlib, json, os, resource, sys, time
from pathlib import Path
import numpy as np
import ortrain
from ortrain.api import CheckpointState, Module, Optimizer

folder = Path(sys.argv[1])


def digests(state):
    return {name: hashlib.blake2b(parameter.data.data).hexdigest() for name, parameter in state.parameters}


def end(**found):
    print(json.dumps(found | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""

# Program that loads values into a state with names only.
MAKE = """
state = CheckpointState.load_checkpoint(folder / "nominal")
state.load_safetensors(folder / "values")
os.remove(folder / "values")
state.properties["number"] = 0
start = time.monotonic()
CheckpointState.save_checkpoint(state, folder / "c")
seconds = time.monotonic() - start
try:
    state.to_bytes()
except ortrain.OrtrainError as error:
    refused = str(error)
end(digests=digests(state), refused=refused, seconds=seconds)
"""

LOAD = """
state = CheckpointState.load_checkpoint(folder / sys.argv[2])
end(digests=digests(state), properties=dict(state.properties))
"""

FAIL = """
try:
    CheckpointState.load_checkpoint(folder / "c")
except ortrain.OrtrainError as error:
    end(refused=str(error))
"""

# The first element of each trained tensor is the number of its save.
SAVE_FOREVER = """
state = CheckpointState.load_checkpoint(folder / "c")
number = state.properties["number"]
while True:
    print("saving", flush=True)
    number += 1
    for _, parameter in state.parameters:
        if parameter.requires_grad:
            parameter.data.reshape(-1)[0] = number
    state.properties["number"] = number
    CheckpointState.save_checkpoint(state, folder / "c")
"""

CHECK = """
state = CheckpointState.load_checkpoint(folder / "c")
number = state.properties["number"]
firsts = [float(parameter.data.reshape(-1)[0]) for _, parameter in state.parameters if parameter.requires_grad]
assert number == 0 or firsts == [number] * len(firsts), (number, firsts)
if len(sys.argv) > 2:
    CheckpointState.save_checkpoint(state, folder / "c")
end(number=number)
"""

# Program with a step, a save with moments, and another step, which a loaded state repeats with the same bits.
TRAIN = """
state = CheckpointState.load_checkpoint(folder / sys.argv[2])
module = Module(folder / "training_model.onnx", state)
optimizer = Optimizer(folder / "optimizer_model.onnx", module)
table, ids = state.parameters["table"], np.load(folder / "feeds.npz")["ids"]
first = sys.argv[2] == "checkpoint"
if first:
    table.data[...] = np.random.default_rng(0).random(table.data.shape, np.float32)


def step():
    with np.load(folder / "feeds.npz") as feeds:
        loss = float(module(*[feeds[name] for name in module.input_names()]))
    optimizer.step()
    module.lazy_reset_grad()
    return loss


if first:
    step()
    CheckpointState.save_checkpoint(state, folder / "trained", include_optimizer_state=True)
loss = step()
end(loss=loss, digest=hashlib.blake2b(table.data.data).hexdigest(), rows=table.data[ids].tolist())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a temporary folder, which is removed after the test in any case."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="large-", dir=BUILD) as name:
        yield Path(name)


def run(script: str, *arguments: object) -> dict[str, object]:
    """Return the output of a separate process, so that its memory is free afterwards."""
    command = [sys.executable, "-c", BEGIN + script, *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout)
    print(f"{time.monotonic() - start:.1f} s, {found['peak'] / 1e9:.2f} GB at most")  # type: ignore[operator]
    return found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def write_values(path: Path) -> None:
    """Write safetensors of random floats, one chunk at a time."""
    header, at = {}, 0
    for name, shape in SIZES.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at // 4, CHUNK):
            file.write(rng.standard_normal(min(CHUNK, at // 4 - start), np.float32).tobytes())


def test_more_than_two_gigabytes(folder: Path) -> None:
    """A large checkpoint is saved, loaded, damaged, killed, and exchanged with onnxruntime-training both ways."""
    from onnx import numpy_helper

    from ortrain import onnxblock

    oracle = environments.oracle()
    names = {name: numpy_helper.from_array(np.zeros(1, np.float32), name) for name in SIZES}
    frozen = [names.pop(name) for name in FROZEN]
    onnxblock.save_checkpoint((list(names.values()), frozen), folder / "nominal", nominal_checkpoint=True)
    write_values(folder / "values")
    made = run(MAKE, folder)
    assert str(made["refused"]).endswith("save it to a path, which puts its tensors into a .data file")
    main, side = folder / "c", folder / "c.data"
    assert main.stat().st_size < 4096
    assert BYTES > 1 << 31
    assert BYTES <= side.stat().st_size < BYTES + 4 * len(SIZES)
    print(f"{main.stat().st_size} and {side.stat().st_size} bytes")
    assert run(LOAD, folder, "c")["digests"] == made["digests"]

    # 1.19.2 reads the checkpoint, and writes its own, which ortrain reads.
    digests = TESTS / "oracle" / "digests.py"
    assert json.loads(in_environment(oracle, digests, str(main), str(folder / "theirs"))) == made["digests"]
    assert (folder / "theirs.data").stat().st_size >= BYTES
    found = run(LOAD, folder, "theirs")
    assert found["digests"] == made["digests"]
    assert found["properties"] == {"number": 0}
    for name in ("theirs", "theirs.data"):
        (folder / name).unlink()

    damaged = f"{main}: {side} is damaged or belongs to another checkpoint: its checksum does not match"
    for at in (0, 1_234_567_890, side.stat().st_size - 1):
        flip(side, at)
        assert run(FAIL, folder)["refused"] == damaged
        flip(side, at)
    flip(main, 200)
    assert "damaged" in str(run(FAIL, folder)["refused"])
    flip(main, 200)

    # After a kill at any moment of the first or second save, the saved state is complete.
    chance, last, moved = random.Random(1), 0, 0
    seconds = made["seconds"]
    assert isinstance(seconds, float)
    for kill in range(KILLS):
        command = [sys.executable, "-c", BEGIN + SAVE_FOREVER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(1 + kill % 2):
                assert child.stdout.readline() == b"saving\n"
            time.sleep(chance.uniform(0, seconds))
            child.send_signal(signal.SIGKILL)
        left = sorted(path.name for path in folder.iterdir())
        number = run(CHECK, folder)["number"]
        assert isinstance(number, int)
        print(f"killed at save {number}; there were {', '.join(left)}")
        assert number >= last + kill % 2
        moved += number > last
        last = number
    assert moved >= KILLS // 2, "enough processes reached a save"
    run(CHECK, folder, "and save")
    assert sorted(path.name for path in folder.iterdir()) == ["c", "c.data", "nominal"]


def test_moments_of_more_than_two_gigabytes(folder: Path) -> None:
    """The parameters fit one file, but not together with their moments."""
    from onnx import TensorProto, helper, numpy_helper

    from ortrain import artifacts

    oracle = environments.oracle()
    graph = helper.make_graph(
        [
            helper.make_node(
                "ConstantOfShape", ["shape"], ["table"], value=numpy_helper.from_array(np.ones(1, np.float32))
            ),
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
        ],
        "table",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(np.asarray([ROWS, WIDTH]), "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model,
        requires_grad=["table"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    assert not (folder / "checkpoint.data").exists()
    rng = np.random.default_rng(1)
    ids = np.unique(np.concatenate([rng.integers(0, ROWS, 30), [0, ROWS - 1]]))
    np.savez(folder / "feeds.npz", ids=ids, target=rng.standard_normal((len(ids), WIDTH)).astype(np.float32))
    unbroken = run(TRAIN, folder, "checkpoint")
    assert (folder / "trained.data").stat().st_size == 3 * 4 * ROWS * WIDTH > 1 << 31
    resumed = run(TRAIN, folder, "trained")
    assert {**resumed, "peak": 0} == {**unbroken, "peak": 0}

    arguments = [str(folder), str(folder / "trained"), str(folder / "feeds.npz")]
    there = json.loads(in_environment(oracle, TESTS / "oracle" / "large_step.py", *arguments))
    np.testing.assert_allclose(there["loss"], unbroken["loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(there["rows"], unbroken["rows"], rtol=0, atol=PARAMETER_TOLERANCE)
    print(f"peak of all: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9:.2f} GB")
