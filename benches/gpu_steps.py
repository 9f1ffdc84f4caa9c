"""Comparison with PyTorch on the same GPU: training steps, a matrix product, and an element-wise copy.

    python benches/gpu_steps.py [--device NAME ...] [--peer PYTORCH_DEVICE] [--steps N] [--json FILE]
                                [--profile FOLDER] [WORKLOAD ...]

Everything is float32; TF32 is disabled in PyTorch. A step is forward, backward and optimizer, and ends when its loss is
on the host. Each device of ortrain, PyTorch eager and torch.compile(mode="reduce-overhead") take turns. The product and
the copy are timed by the clock of the device. Without a GPU that PyTorch supports, only ortrain is timed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import workloads
from onnx import TensorProto, helper

import ortrain

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

# Maximum ratio of a step to PyTorch's, by workload and peer.
AIMS = {
    "mlp": {"eager": 0.2, "compiled": 1.0},
    "lenet": {"eager": 0.2, "compiled": 1.0},
    "bert_mini": {"eager": 0.25, "compiled": 1.3},
    "resnet18_224": {"eager": 0.9},
    "bert_base": {"eager": 0.35, "compiled": 1.3},
}
# Size of the square matrices in the product, and its maximum ratio to PyTorch's time.
SIDE, PRODUCT_AIM = 4096, 1.05
# Number of copied elements, far more than fit into caches. Minimum ratio of the loop nest's rate to the rate of a copy,
# and of the optimizer's rate to it.
ELEMENTS, COPY_AIM = 1 << 26, 0.8
# Workload that is dominated by its optimizer, and the passes over its parameters: four are read, three are written.
OPTIMIZER, OPTIMIZER_PASSES = "adamw_25m", 7
# Maximum seconds to the first result of bert_base without and with cached kernels, and maximum microseconds of the host
# for a step with values on the device.
FIRST_RESULT_AIM, CACHED_RESULT_AIM, HOST_AIM = 6.0, 1.0, 60.0
# Number of batches, which are used in turn, and number of turns of each competitor.
BATCHES, TURNS = 4, 3
# Number of losses that are compared with PyTorch's, and their maximum difference, relative for losses above 1.
LOSSES, LOSS = 5, 1e-2
MIB = 1 << 20

Step = Callable[[int], float]


def timed_steps(step: Step, seconds: float, steps: int | None, first: int) -> list[float]:
    """Returns the seconds of each step of a turn. `first` is the number of its first step."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < (steps or LOSSES) or (steps is None and time.perf_counter() < end):
        start = time.perf_counter()
        step(first + len(times))
        times.append(time.perf_counter() - start)
    return times


def in_turns(competitors: dict[str, Step], seconds: float, steps: int | None) -> dict[str, float]:
    """Returns the median milliseconds of a step of each competitor. The first quarter of each turn is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(1 if steps else TURNS):
        for name, step in competitors.items():
            found = timed_steps(step, seconds / TURNS, steps, LOSSES + turn)
            times[name] += found[len(found) // 4 :]
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


class Ours:
    """A workload trained by ortrain."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str) -> None:
        self.state = ortrain.CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = ortrain.Module(folder / "training_model.onnx", self.state, device=device)
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

    def host_microseconds(self, steps: int) -> float:
        """Returns the median microseconds of the host for a step with values, without a read."""
        values = [tuple(map(ortrain.OrtValue.ortvalue_from_numpy, batch)) for batch in self.batches]
        times = []
        for number in range(steps):
            start = time.perf_counter()
            self.module.lazy_reset_grad()
            loss: Any = self.module(*values[number % len(values)])
            self.optimizer.step()
            times.append(time.perf_counter() - start)
            # The read ends the work of the device, so the next step does not wait for it.
            loss.numpy()
        return 1e6 * statistics.median(times[len(times) // 4 :])

    def optimizer_seconds(self, steps: int) -> float:
        """Returns the seconds of an optimizer step. Many are enqueued, and the last one ends them."""
        self.step(0)
        start = time.perf_counter()
        with warnings.catch_warnings():
            # All steps use the gradients of one step.
            warnings.simplefilter("ignore", ortrain.TrainingWarning)
            for _ in range(steps):
                self.optimizer.step()
        next(iter(self.state.parameters.values())).data  # noqa: B018
        return (time.perf_counter() - start) / steps

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


def of_torch(folder: Path, settings: dict[str, Any], device: str, compiled: bool) -> Step:
    """Returns a step of PyTorch: eager with the fused AdamW, or compiled with the loss, and the optimizer compiled."""
    import torch
    from onnx_in_torch import Network, adamw
    from torch.nn import functional as F  # noqa: N812

    with np.load(folder / "batches.npz") as stored:
        batches = [
            tuple(torch.from_numpy(stored[f"{part}{number}"]) for part in ("x", "labels"))
            for number in range(settings["batches"])
        ]
    with np.load(folder / "weights.npz") as stored:
        weights = {name: torch.from_numpy(stored[name]) for name in stored.files}
    # Network computes constants on the host, so it is built before the move to the device.
    network: Any = Network(onnx.load(folder / "graph.onnx"), weights, settings["trainable"], batches[0][0])
    network.to(device)
    trained = [network.weights[name].requires_grad_() for name in settings["trainable"]]
    optimizer = adamw(trained, settings)

    def forward(x: Any, labels: Any) -> Any:
        return F.cross_entropy(network(x), labels)

    update = optimizer.step
    if compiled:
        # A compiled optimizer has no fused kernel of its own. Its rate is a tensor, or each rate is compiled.
        rate, capturable = settings["learning_rate"], device != "cpu"
        optimizer = torch.optim.AdamW(
            trained,
            lr=torch.tensor(rate, device=device) if capturable else rate,
            betas=tuple(settings["betas"]),
            eps=settings["epsilon"],
            weight_decay=settings["weight_decay"],
            foreach=True,
            capturable=capturable,
        )
        forward = torch.compile(forward, mode="reduce-overhead")
        update = torch.compile(optimizer.step, mode="reduce-overhead")

    def step(number: int) -> float:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        x, labels = (value.to(device) for value in batches[number % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, labels)
        loss.backward()
        update()
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
    """Returns the median seconds of a call over some runs: by the clock of the GPU, or of the host without a GPU."""
    import torch

    call()
    times = []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(times))


def product(devices: list[str], peer: str | None, side: int) -> dict[str, Any]:
    """Measures a product of square matrices."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((side, side), np.float32) for _ in range(2))
    shape = [side, side]
    model = model_of([helper.make_node("MatMul", ["a", "b"], ["y"])], {"a": shape, "b": shape}, shape)
    flops = 2 * side**3
    row: dict[str, Any] = {"name": f"product {side}", "unit": "TFLOP/s", "aims": {"eager": 1 / PRODUCT_AIM}}
    row["values"] = {device: flops / device_seconds(model, {"a": a, "b": b}, device, 10) / 1e12 for device in devices}
    if peer is not None:
        import torch

        x, w = (torch.from_numpy(value).to(peer) for value in (a, b))
        row["values"]["eager"] = flops / torch_seconds(lambda: x @ w) / 1e12
    return row


def copy(devices: list[str], peer: str | None, elements: int) -> dict[str, Any]:
    """Measures a loop nest that reads and writes each element once, and a copy in PyTorch."""
    side = 1 << (elements.bit_length() // 2)
    x = np.random.default_rng(1).standard_normal((elements // side, side), np.float32)
    model = model_of([helper.make_node("Neg", ["x"], ["y"])], {"x": list(x.shape)}, list(x.shape))
    row: dict[str, Any] = {"name": f"copy {8 * elements // MIB} MiB", "unit": "GB/s", "aims": {"eager": COPY_AIM}}
    row["values"] = {device: 8 * elements / device_seconds(model, {"x": x}, device, 10) / 1e9 for device in devices}
    if peer is not None:
        import torch

        source = torch.from_numpy(x).to(peer)
        to = torch.empty_like(source)
        row["values"]["eager"] = 8 * elements / torch_seconds(lambda: to.copy_(source)) / 1e9
    return row


def optimizer(devices: list[str], copied: dict[str, float], steps: int) -> dict[str, Any]:
    """Measures the optimizer of a workload that is mostly an optimizer, beside the rate of a copy."""
    row: dict[str, Any] = {"name": f"{OPTIMIZER} update", "unit": "GB/s", "aims": {"copy": COPY_AIM}}
    with tempfile.TemporaryDirectory() as folder:
        settings = make(OPTIMIZER, Path(folder))
        moved = 4 * OPTIMIZER_PASSES * workloads.about(OPTIMIZER)["trainable"]
        row["values"] = {
            device: moved / Ours(Path(folder), settings, device).optimizer_seconds(steps) / 1e9 for device in devices
        }
    row["values"]["copy"] = copied[devices[0]]
    return row


# A process of its own: imports ortrain, loads a checkpoint, and runs a step.
FIRST = """
import sys, time
start = time.perf_counter()
import numpy as np
import ortrain
state = ortrain.CheckpointState.load_checkpoint("checkpoint")
module = ortrain.Module("training_model.onnx", state, device=sys.argv[1])
with np.load("batches.npz") as stored:
    float(module(stored["x0"], stored["labels0"]))
print(time.perf_counter() - start)
"""


def first_results(folder: Path, device: str) -> list[float]:
    """Returns the seconds to the first result of a process, with an empty and with a filled cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {"ORTRAIN_CUDA_CACHE": cache}
        command = [sys.executable, "-c", FIRST, device]
        runs = [
            subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
    return [float(run.stdout) for run in runs]


def workload(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the steps of a workload."""
    settings = make(name, folder)
    row: dict[str, Any] = {"name": name, "unit": "ms", "aims": AIMS.get(name, {})}
    row["first"] = {device: first_results(folder, device) for device in options.devices}
    competitors: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    ours = {}
    for device in options.devices:
        ours[device] = Ours(folder, settings, device)
        competitors[device] = ours[device].step
        # Two runs have the same bits.
        again = Ours(folder, settings, device)
        losses[device] = [ours[device].step(number) for number in range(options.steps or LOSSES)]
        repeated = [again.step(number) for number in range(options.steps or LOSSES)]
        row["same"] = row.get("same", True) and repeated == losses[device]
        del again
    for kind in ("eager", "compiled") if options.peer is not None else ():
        try:
            step = of_torch(folder, settings, options.peer, kind == "compiled")
            losses[kind] = [step(number) for number in range(options.steps or LOSSES)]
        except Exception as error:  # PyTorch's compiler refuses some graphs; the other numbers are still wanted.
            print(f"{name}: PyTorch, {kind}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        competitors[kind] = step
    row["values"] = in_turns(competitors, options.seconds, options.steps)
    row["host"] = {device: run.host_microseconds(options.steps or 50) for device, run in ours.items()}
    first = ours[options.devices[0]]
    row["kinds"], rows = first.kinds(min(options.steps or 5, 5))
    if options.profile is not None:
        lines = [f"{milliseconds:9.4f} ms  {text}" for milliseconds, text in rows]
        (options.profile / f"{name}.txt").write_text("\n".join(lines) + "\n")
    row["losses"] = losses
    expected = losses[next(reversed(losses))] if len(losses) > 1 else losses[options.devices[0]]
    row["loss_distance"] = max(
        abs(a - b) / max(abs(b), 1.0) for found in losses.values() for a, b in zip(found, expected, strict=True)
    )
    return row


def line(row: dict[str, Any], columns: list[str]) -> str:
    """Formats a row of the table: the values, then each ratio with an aim."""
    values = row["values"]
    ours = values[columns[0]]
    numbers = " ".join(f"{values[key]:10.3f}" if key in values else f"{'-':>10}" for key in columns)
    ratios = [f"{key} {ours / values[key]:.2f} (aim {aim:.2f})" for key, aim in row["aims"].items() if key in values]
    more = []
    if "kinds" in row:
        kinds = sorted(row["kinds"].items(), key=lambda kind: -kind[1])
        more.append(f"same bits: {row['same']}, loss distance: {row['loss_distance']:.1e}")
        more.append(f"host {row['host'][columns[0]]:.0f} us (aim {HOST_AIM:.0f})")
        first, cached = row["first"][columns[0]]
        aims = f" (aims {FIRST_RESULT_AIM:.0f}, {CACHED_RESULT_AIM:.0f})" if row["name"] == "bert_base" else ""
        more.append(f"first result {first:.2f} s, with cached kernels {cached:.2f} s{aims}")
        more.append("on the device (ms): " + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds[:7]))
    return f"{row['name']:18} {row['unit']:8} {numbers}  {'; '.join(ratios + more)}"


def peer_of(name: str) -> str | None:
    """Returns the device of PyTorch if it is available, with TF32 disabled."""
    if name == "none" or importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if name == "cuda" and not torch.cuda.is_available():
        return None
    return name


def torch_product(device: str) -> list[float]:
    """Returns a product of PyTorch, which must be equal before and after the use of ortrain in this process."""
    import torch

    x = torch.arange(64.0, device=device).reshape(8, 8) / 7
    return [float(value) for value in (x @ x.T).flatten()]


def main() -> None:
    """Prints a line for each measurement as soon as it is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=list(AIMS))
    parser.add_argument("--device", dest="devices", action="append", help="device of ortrain; repeatable (cuda)")
    parser.add_argument("--peer", default="cuda", help="device of PyTorch, or none (cuda)")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the steps of a competitor (2)")
    parser.add_argument("--steps", type=int, help="number of steps of a competitor, instead of a duration")
    parser.add_argument("--side", type=int, default=SIDE, help=f"number of rows and of columns of the product ({SIDE})")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"number of copied elements ({ELEMENTS})")
    parser.add_argument("--no-optimizer", action="store_true", help=f"leaves out the optimizer of {OPTIMIZER}")
    parser.add_argument("--json", type=Path, help="output file of the numbers")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for a profile of each workload")
    options = parser.parse_args()
    options.devices = options.devices or ["cuda"]
    options.peer = peer_of(options.peer)
    before = torch_product(options.peer) if options.peer is not None else None
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    known = {device.name: device for device in ortrain.devices()}
    missing = [name for name in options.devices if name not in known]
    if missing:
        sys.exit(f"there is no device {', '.join(missing)}; the devices are {', '.join(known)}")
    devices = [known[name] for name in options.devices]
    for device in devices:
        print(f"{device.name}: {device.description}, {device.driver}")
    columns = [*options.devices, *(("eager", "compiled") if options.peer is not None else ())]
    print(f"{'':18} {'':8} {' '.join(f'{column:>10}' for column in columns)}  ratios of {columns[0]}")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        print(line(row, columns), flush=True)
        if options.json is not None:
            described = {device.name: [device.description, device.driver] for device in devices}
            options.json.write_text(json.dumps({"devices": described, "columns": columns, "rows": rows}) + "\n")
        return row

    add(product(options.devices, options.peer, options.side))
    copied = add(copy(options.devices, options.peer, options.elements))
    if not options.no_optimizer:
        add(optimizer(options.devices, copied["values"], options.steps or 20))
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            add(workload(name, options, Path(folder)))
    wrong = [row["name"] for row in rows if not row.get("same", True) or row.get("loss_distance", 0) > LOSS]
    if wrong:
        sys.exit(f"bits differ between runs, or losses differ between competitors: {', '.join(wrong)}")
    if before is not None and torch_product(options.peer) != before:
        sys.exit("PyTorch computes another product after the use of ortrain")


if __name__ == "__main__":
    main()
