"""Comparison with PyTorch on the same GPU: training steps, a matrix product, and an element-wise copy.

    python benches/gpu_steps.py [--device NAME] [--peer PYTORCH_DEVICE] [--json FILE] [--profile FOLDER] [WORKLOAD ...]

Everything is float32; TF32 is disabled in PyTorch. A step is forward, backward and optimizer, and ends when its loss is
on the host. The product and the copy are timed by the clock of the device. Without a GPU that PyTorch supports, only
ours is timed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import workloads
from onnx import TensorProto, helper

import ortrain

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

# Maximum ratio of our step to PyTorch's, by workload.
AIMS = {"mlp": 2.0, "lenet": 2.0, "bert_mini": 2.0, "resnet18_224": 2.0, "bert_base": 3.0}
# Size of the square matrices in the product, and its maximum ratio to PyTorch's time.
SIDE, PRODUCT_AIM = 4096, 2.0
# Number of copied elements, far more than fit into caches. Minimum ratio of the loop nest's rate to the rate of a copy.
ELEMENTS, COPY_AIM = 1 << 26, 0.8
# Number of batches, which are used in turn.
BATCHES = 4
# Number of losses that are compared with PyTorch's, and their maximum difference, relative for losses above 1.
LOSSES, LOSS = 5, 1e-2
MIB = 1 << 20


def timed_steps(step: Callable[[int], float], seconds: float) -> tuple[float, list[float]]:
    """Returns the median seconds of a step without the warm-up, and the first losses."""
    losses = [step(number) for number in range(LOSSES)]
    times: list[float] = []
    number, end = LOSSES, time.perf_counter() + seconds
    while len(times) < LOSSES or time.perf_counter() < end:
        start = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - start)
        number += 1
    return statistics.median(times[len(times) // 4 :]), losses


class Ours:
    """A workload trained by ortrain."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str) -> None:
        state = ortrain.CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = ortrain.Module(folder / "training_model.onnx", state, device=device)
        self.optimizer = ortrain.Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(settings["learning_rate"])
        with np.load(folder / "batches.npz") as stored:
            self.batches = [(stored[f"x{index}"], stored[f"labels{index}"]) for index in range(settings["batches"])]

    def step(self, number: int) -> float:
        """Runs a step and returns its loss."""
        self.module.lazy_reset_grad()
        loss: Any = self.module(*self.batches[number % len(self.batches)])
        self.optimizer.step()
        return float(loss)

    def kinds(self, steps: int = 5) -> tuple[dict[str, float], list[tuple[float, str]]]:
        """Returns milliseconds per step by instruction kind, and of each instruction, by the clock of the device."""
        profile = self.module.profile(*self.batches[0], steps=steps, warmup=1)
        kinds: dict[str, float] = collections.defaultdict(float)
        for one in profile.instructions:
            kinds[one.kind] += 1e3 * one.total / steps
        rows = [
            (
                1e3 * one.total / steps,
                f"{one.kind:10} {one.shapes:60} {one.flops * one.calls / max(one.total, 1e-12) / 1e9:9.0f} GFLOP/s "
                f"{one.bytes * one.calls / max(one.total, 1e-12) / 1e9:7.0f} GB/s  {one.node}",
            )
            for one in profile.instructions
        ]
        return dict(kinds), sorted(rows, reverse=True)


def make(name: str, folder: Path) -> dict[str, Any]:
    """Writes a workload and the artifacts of ortrain to a folder. Returns its settings."""
    from on_device import make_ours

    workloads.write(name, folder, BATCHES)
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    make_ours(folder, folder, settings)
    return settings


def of_torch(folder: Path, settings: dict[str, Any], device: str) -> Callable[[int], float]:
    """Returns a step of PyTorch: eager, with the fused AdamW."""
    import torch
    from onnx_in_torch import Network, adamw
    from torch.nn import functional as F  # noqa: N812

    with np.load(folder / "batches.npz") as stored:
        batches = [
            tuple(torch.from_numpy(stored[f"{what}{number}"]) for what in ("x", "labels"))
            for number in range(settings["batches"])
        ]
    with np.load(folder / "weights.npz") as stored:
        weights = {name: torch.from_numpy(stored[name]) for name in stored.files}
    # Network computes constants on the host, so it is built before the move to the device.
    network: Any = Network(onnx.load(folder / "graph.onnx"), weights, settings["trainable"], batches[0][0])
    network.to(device)
    trained = [network.weights[name].requires_grad_() for name in settings["trainable"]]
    optimizer = adamw(trained, settings)

    def step(number: int) -> float:
        x, labels = (value.to(device) for value in batches[number % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def device_seconds(model: onnx.ModelProto, feeds: dict[str, np.ndarray], device: str, repeats: int) -> float:
    """Returns the median seconds of the longest instruction of a model over some runs, by the clock of the device."""
    options = ortrain.SessionOptions()
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ortrain.InferenceSession(model, options, providers=[device])
        given = {name: ortrain.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        for _ in range(repeats + 1):
            session.run_with_ort_values(None, given)
        events = json.loads(Path(session.end_profiling()).read_text())
    listed = events["traceEvents"] if isinstance(events, dict) else events
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in listed:
        if event.get("ph") == "X" and not event["name"].startswith(("Inputs", "Outputs", "Host", "model_", "session")):
            times[event["name"]].append(event["dur"] * 1e-6)
    return max(statistics.median(found[1:] or found) for found in times.values() if len(found) >= repeats)


def model_of(nodes: list[onnx.NodeProto], inputs: dict[str, list[int]], output: list[int]) -> onnx.ModelProto:
    """Returns a model of some nodes with the output `y`."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, output)
    graph = helper.make_graph(nodes, "bench", given, [made])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def torch_seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median seconds of a call over some runs, by the clock of the GPU."""
    import torch

    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(times))


def product(device: str, peer: str | None, side: int) -> dict[str, Any]:
    """Measures a product of square matrices."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((side, side), np.float32) for _ in range(2))
    shape = [side, side]
    model = model_of([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": shape, "b": shape}, shape)
    flops = 2 * side**3
    row: dict[str, Any] = {"name": f"product {side}", "unit": "TFLOP/s", "aim": f"time at most {PRODUCT_AIM}"}
    row["ours"] = flops / device_seconds(model, {"a": a, "b": b}, device, 10) / 1e12
    if peer is not None:
        import torch

        x, w = (torch.from_numpy(value).to(peer) for value in (a, b))
        row["torch"] = flops / torch_seconds(lambda: x @ w) / 1e12
        row["ratio"] = row["torch"] / row["ours"]
    return row


def copy(device: str, peer: str | None, elements: int) -> dict[str, Any]:
    """Measures a loop nest that reads and writes each element once, and a copy in PyTorch."""
    side = 1 << (elements.bit_length() // 2)
    x = np.random.default_rng(1).standard_normal((elements // side, side), np.float32)
    model = model_of([helper.make_node("Neg", ["x"], ["y"])], {"x": list(x.shape)}, list(x.shape))
    row: dict[str, Any] = {"name": f"copy {8 * elements // MIB} MiB", "unit": "GB/s"}
    row["aim"] = f"rate at least {COPY_AIM}"
    row["ours"] = 8 * elements / device_seconds(model, {"x": x}, device, 10) / 1e9
    if peer is not None:
        import torch

        source = torch.from_numpy(x).to(peer)
        to = torch.empty_like(source)
        row["torch"] = 8 * elements / torch_seconds(lambda: to.copy_(source)) / 1e9
        row["ratio"] = row["torch"] / row["ours"]
    return row


def workload(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the steps of a workload."""
    settings = make(name, folder)
    row: dict[str, Any] = {"name": name, "unit": "ms", "aim": f"time at most {AIMS.get(name, 2.0)}"}
    start = time.perf_counter()
    ours = Ours(folder, settings, options.device)
    seconds, losses = timed_steps(ours.step, options.seconds)
    row["ours"], row["losses"] = 1e3 * seconds, losses
    again = Ours(folder, settings, options.device)
    row["same"] = [again.step(number) for number in range(LOSSES)] == losses
    row["setup"] = time.perf_counter() - start - options.seconds
    row["kinds"], rows = ours.kinds()
    if options.profile is not None:
        lines = [f"{milliseconds:9.4f} ms  {text}" for milliseconds, text in rows]
        (options.profile / f"{name}.txt").write_text("\n".join(lines) + "\n")
    del ours, again
    if options.peer is not None:
        seconds, theirs = timed_steps(of_torch(folder, settings, options.peer), options.seconds)
        row["torch"], row["ratio"] = 1e3 * seconds, row["ours"] / (1e3 * seconds)
        row["loss_distance"] = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(losses, theirs, strict=True))
    return row


def line(row: dict[str, Any]) -> str:
    """Formats a row of the table."""
    numbers = [f"{row[key]:10.3f}" if key in row else f"{'-':>10}" for key in ("ours", "torch", "ratio")]
    more = ""
    if "kinds" in row:
        kinds = sorted(row["kinds"].items(), key=lambda kind: -kind[1])
        more = f"  same bits: {row['same']}, loss distance: {row.get('loss_distance', 0):.1e}; on the device (ms): "
        more += ", ".join(f"{kind} {milliseconds:.2f}" for kind, milliseconds in kinds[:7])
    return f"{row['name']:16} {row['unit']:8} {' '.join(numbers)}  {row['aim']:24}{more}"


def main() -> None:
    """Prints a line for each measurement as soon as it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=list(AIMS))
    parser.add_argument("--device", default="vulkan", help="device of ortrain (vulkan)")
    parser.add_argument("--peer", default="cuda", help="device of PyTorch (cuda)")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the measurement of steps (2)")
    parser.add_argument("--side", type=int, default=SIDE, help=f"number of rows and of columns of the product ({SIDE})")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"number of copied elements ({ELEMENTS})")
    parser.add_argument("--json", type=Path, help="output file of the numbers")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for a profile of each workload")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        options.peer = None
    else:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if options.peer == "cuda" and not torch.cuda.is_available():
            options.peer = None
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    (device,) = [device for device in ortrain.devices() if device.name == options.device]
    print(f"{device.description}, {device.driver}")
    print(f"{'':16} {'':8} {'ours':>10} {'torch':>10} {'ratio':>10}  aim")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if options.json is not None:
            run = {"device": device.description, "driver": device.driver, "rows": rows}
            options.json.write_text(json.dumps(run) + "\n")

    add(product(options.device, options.peer, options.side))
    add(copy(options.device, options.peer, options.elements))
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            add(workload(name, options, Path(folder)))
    wrong = [row["name"] for row in rows if not row.get("same", True) or row.get("loss_distance", 0) > LOSS]
    if wrong:
        sys.exit(f"bits differ between runs, or losses differ from PyTorch: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
