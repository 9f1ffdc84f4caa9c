"""Models of 2.4 GiB, from artifacts to an export that onnxruntime runs: 5.2 GB of disk and up to 12 GB of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from environments import BUILD
from onnx import TensorProto, helper

# Four layers of 12 700 by 12 700 floats: 2.4 GiB, more than one protobuf message can contain.
WIDTH, LAYERS, CLASSES, ROWS = 12_700, 4, 8, 4
LAYER = 4 * WIDTH * WIDTH
# Limit in bytes of the total memory, as the system measures it.
LIMIT = 12_000_000_000
# Maximum size in bytes of a file without a layer.
SMALL = 1 << 20
# Tolerance of float32 sums of 12 700 terms, in another order.
TOLERANCE = 1e-4
# The loss of a head on 12 700 features has a large curvature, so the rate is small.
STEPS, RATE = 3, 2e-4

ALL = """
import json, os, resource, sys, time
from pathlib import Path
import numpy as np
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

folder, trained = Path(sys.argv[1]), json.loads(sys.argv[2])
times = {}


def timed(what, start):
    times[what] = round(time.monotonic() - start, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{what}: {times[what]} s, {peak / 1e9:.2f} GB so far", file=sys.stderr, flush=True)


start = time.monotonic()
artifacts.generate_artifacts(
    folder / "forward.onnx",
    requires_grad=trained,
    loss=artifacts.LossType.MSELoss,
    optimizer=artifacts.OptimType.SGD,
    artifact_directory=folder,
)
timed("artifacts", start)
sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
if "w0" in trained:
    # Nothing names it any more.
    os.remove(folder / "forward.onnx.data")

start = time.monotonic()
state = CheckpointState.load_checkpoint(folder / "checkpoint")
for name in ("checkpoint", "checkpoint.data"):
    (folder / name).unlink(missing_ok=True)
module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
optimizer = Optimizer(folder / "optimizer_model.onnx", module)
optimizer.set_learning_rate(float(sys.argv[3]))
timed("module", start)
with np.load(folder / "feeds.npz") as feeds:
    feeds = dict(feeds)
losses = []
start = time.monotonic()
for _ in range(int(sys.argv[4])):
    losses.append(float(module(*[feeds[name] for name in module.input_names()])))
    optimizer.step()
    module.lazy_reset_grad()
timed("steps", start)

start = time.monotonic()
CheckpointState.save_checkpoint(state, folder / "trained", include_optimizer_state=True)
timed("save", start)
sizes |= {path.name: path.stat().st_size for path in folder.iterdir()}
for name in ("trained", "trained.data"):
    (folder / name).unlink(missing_ok=True)
start = time.monotonic()
module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
timed("export", start)
sizes |= {path.name: path.stat().st_size for path in folder.iterdir()}
start = time.monotonic()
module.eval()
losses.append(float(module(*[feeds[name] for name in module.input_names()])))
timed("eval", start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"losses": losses, "peak": peak, "sizes": sizes, "times": times}))
"""

RUN = """
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime

folder = Path(sys.argv[1])
with np.load(folder / "feeds.npz") as feeds:
    feeds = dict(feeds)
session = onnxruntime.InferenceSession(folder / "trained.onnx")
(found,) = session.run(None, {"x": feeds["x"]})
print(json.dumps({"loss": float(np.mean((found.astype(np.float64) - feeds["target"]) ** 2))}))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a temporary folder, which is removed after the test in any case."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="large-", dir=BUILD) as name:
        yield Path(name)


def run(script: str, *arguments: object) -> dict[str, object]:
    """Return the output of a separate process, so that its memory is free afterwards."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{done.stderr}{time.monotonic() - start:.1f} s")
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def write_model(folder: Path) -> None:
    """Write layers with random weights to one file in small parts, and a model with a head."""
    # Uniform with mean 0, and a variance that preserves the variance of activations from layer to layer.
    rng, half, scale = np.random.default_rng(0), np.float32(0.5), np.float32((12 / WIDTH) ** 0.5)
    initializers, nodes, at = [], [], 0
    with (folder / "forward.onnx.data").open("wb") as file:
        for layer in range(LAYERS):
            for _ in range(WIDTH // 100):
                file.write(((rng.random((100, WIDTH), np.float32) - half) * scale).tobytes())
            tensor = TensorProto(
                name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH], data_location=TensorProto.EXTERNAL
            )
            for key, value in {"location": "forward.onnx.data", "offset": at, "length": LAYER}.items():
                tensor.external_data.add(key=key, value=str(value))
            initializers.append(tensor)
            nodes.append(helper.make_node("MatMul", ["x" if layer == 0 else f"h{layer}", f"w{layer}"], [f"a{layer}"]))
            nodes.append(helper.make_node("Tanh", [f"a{layer}"], [f"h{layer + 1}"]))
            at += LAYER
    head = (rng.random((WIDTH, CLASSES), np.float32) - half) * scale
    initializers.append(onnx.numpy_helper.from_array(head, "head"))
    nodes.append(helper.make_node("MatMul", [f"h{LAYERS}", "head"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", CLASSES])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "forward.onnx").write_bytes(model.SerializeToString())
    np.savez(
        folder / "feeds.npz",
        x=rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
        target=rng.standard_normal((ROWS, CLASSES)).astype(np.float32),
    )


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_model_of_more_than_two_gigabytes(part: str, folder: Path) -> None:
    """Train a head on a frozen body, which stays in its file; then train all weights."""
    layers = [f"w{layer}" for layer in range(LAYERS)]
    write_model(folder)
    assert LAYERS * LAYER > 2.4 * (1 << 30) > 1 << 31
    trained = ["head", *(layers if part == "body" else [])]
    found = run(ALL, folder, json.dumps(trained), RATE, STEPS)
    losses, sizes, peak = found["losses"], found["sizes"], found["peak"]
    assert isinstance(losses, list)
    assert isinstance(sizes, dict)
    assert isinstance(peak, int)
    print(f"{part}: losses {losses}, {peak / 1e9:.2f} GB at most, {sizes}")
    assert peak <= LIMIT
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    # No model contains a layer, and no weights are duplicated.
    everything = LAYERS * LAYER
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "trained.onnx"):
        assert sizes[name] < SMALL, name
    assert everything <= sizes["trained.onnx.data"] < everything + SMALL
    assert "frozen.data" not in sizes
    if part == "head":
        assert sizes["checkpoint"] < SMALL
        assert "checkpoint.data" not in sizes
        assert sizes["forward.onnx.data"] == everything
    else:
        # A checkpoint after steps has a moment of each parameter, as onnxruntime-training's checkpoints of SGD have.
        for name, times in (("checkpoint.data", 1), ("trained.data", 2)):
            assert times * everything <= sizes[name] < times * everything + SMALL, name
    # The export is independent of the other files.
    for name in ("forward.onnx.data", "training_model.onnx", "eval_model.onnx"):
        (folder / name).unlink(missing_ok=True)
    np.testing.assert_allclose(run(RUN, folder)["loss"], losses[-1], rtol=TOLERANCE)
