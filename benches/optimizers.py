"""Comparison of optimizer steps in ortrain.optim and torch.optim, on the weights of a ResNet-50.

    python benches/optimizers.py                     all optimizers, in some minutes
    python benches/optimizers.py Adam Lion --rounds 15

The weights are 25.6 million float32 numbers in 161 tensors, with constant gradients. Each optimizer uses its default
settings; SGD also runs with momentum. With groups, vectors have no weight decay, and the last stage has a tenth of the
learning rate. PyTorch uses its fused implementation, or else the foreach implementation, in its own process and
environment. All variants take turns. A time is the median over rounds of the median step in a turn. A ratio is the
median over rounds of the ratio in a round.

The bytes of a step are its minimum traffic: weights read and written, gradients read, slots read and written. The
bandwidth column divides the time of a step by the time that its bytes need at a reference bandwidth. The reference is
AdamW's step in the same round, a single operator of onnxruntime. 1 is as fast as the reference, 2 half as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20260
# Small, so that weights hardly change. With constant gradients, no slot decays to denormal numbers.
RATE = 1e-6
# Shapes of a ResNet-50: number of blocks and width of each stage.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
WIDER = 4
# Additional rows: SGD with momentum, which is the usual form of SGD.
SETTINGS: dict[str, tuple[str, dict[str, float]]] = {"SGD momentum": ("SGD", {"momentum": 0.9})}
REFERENCE = "reference"
HEADER = ("optimizer", "groups", "MB", "ms", "GB/s", "bandwidth", "torch", "torch ms", "ours/torch")


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a ResNet-50."""
    found: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, outputs: int, inputs: int, size: int) -> None:
        found[f"{name}.weight"] = (outputs, inputs, size, size)
        found[f"{name}.norm.scale"] = found[f"{name}.norm.shift"] = (outputs,)

    convolution("stem", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate(STAGES, start=1):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.reduce", width, inputs, 1)
            convolution(f"{name}.conv", width, width, 3)
            convolution(f"{name}.expand", WIDER * width, width, 1)
            if block == 0:
                convolution(f"{name}.shortcut", WIDER * width, inputs, 1)
            inputs = WIDER * width
    return found | {"head.weight": (1000, inputs), "head.shift": (1000,)}


def group_of(name: str, shape: tuple[int, ...]) -> int:
    """Returns the group of a parameter: 0 for vectors, 1 for the last stage, 2 for all others."""
    if len(shape) == 1:
        return 0
    return 1 if name.startswith(f"stage{len(STAGES)}.") else 2


def weights() -> Iterator[tuple[str, Any]]:
    """Yields the weights, which are the same in every run. The gradients are twice the weights."""
    rng = np.random.default_rng(SEED)
    for name, shape in shapes().items():
        yield name, rng.standard_normal(shape, np.float32) * np.float32(0.05)


Step = Callable[[], object]
# Function that creates a step and a dictionary of facts about the step.
Maker = Callable[[str, dict[str, float], bool], tuple[Step, dict[str, Any]]]


def ours(threads: int) -> Maker:
    """Returns a function that creates steps of ortrain."""
    from onnx import TensorProto, helper, numpy_helper

    import ortrain
    from ortrain import optim

    # The gradients are constant on purpose, so the warning does not apply.
    warnings.simplefilter("ignore", ortrain.TrainingWarning)
    options = ortrain.SessionOptions()
    options.intra_op_num_threads = threads
    # The loss is the sum of squares, multiplied by an input.
    nodes, tensors = [], []
    for name, values in weights():
        nodes.append(helper.make_node("Mul", [name, name], [f"{name}.square"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}.square"], [f"{name}.sum"], keepdims=0))
        tensors.append(numpy_helper.from_array(values, name))
    nodes.append(helper.make_node("Sum", [f"{tensor.name}.sum" for tensor in tensors], ["sum"]))
    nodes.append(helper.make_node("Mul", ["sum", "x"], ["loss"]))
    x, loss = (helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("x", "loss"))
    graph = helper.make_graph(nodes, "graph", [x], [loss], tensors)
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    names = [tensor.name for tensor in tensors]
    own: list[dict[str, Any]] = [{"weight_decay": 0.0}, {"lr_factor": 0.1}]
    for index, group in enumerate(own):
        group["params"] = [name for name, shape in shapes().items() if group_of(name, shape) == index]

    def make(name: str, settings: dict[str, float], grouped: bool) -> tuple[Step, dict[str, Any]]:
        config = getattr(optim, name)(**settings, groups=own if grouped else [])
        with tempfile.TemporaryDirectory() as folder:
            ortrain.generate_artifacts(model, requires_grad=names, optimizer=config, artifact_directory=folder)
            state = ortrain.CheckpointState.load_checkpoint(Path(folder) / "checkpoint")
            module = ortrain.Module(Path(folder) / "training_model.onnx", state, session_options=options)
            optimizer = ortrain.Optimizer(Path(folder) / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(RATE)
        module(np.float32(1))
        count = 0
        for _, parameter in state.parameters:
            slots = [values for slot, values in parameter.slots.items() if slot in config.slots]
            count += 3 * parameter.data.nbytes + 2 * sum(values.nbytes for values in slots)
        return optimizer.step, {"bytes": count}

    return make


def torchs(threads: int) -> Maker:
    """Returns a function that creates steps of PyTorch."""
    import torch

    torch.set_num_threads(threads)
    parameters = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in weights()}
    for parameter in parameters.values():
        parameter.grad = 2 * parameter.detach()

    def make(name: str, settings: dict[str, float], grouped: bool) -> tuple[Step, dict[str, Any]]:
        kind: Any = getattr(torch.optim, name, None)
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(3 if grouped else 1)]
        for key, parameter in parameters.items():
            groups[group_of(key, tuple(parameter.shape)) if grouped else 0]["params"].append(parameter)
        if grouped:
            groups[0]["weight_decay"] = 0.0
            groups[1]["lr"] = 0.1 * RATE
        forms: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {}}
        for form, how in forms.items() if kind is not None else ():
            try:
                optimizer = kind([dict(group) for group in groups], lr=RATE, **settings, **how)
                optimizer.step()
            except (TypeError, ValueError, RuntimeError):
                # PyTorch has no such implementation, or the optimizer does not support these shapes.
                continue
            return optimizer.step, {"form": form}
        return lambda: None, {"form": None}

    return make


def serve(make: Maker) -> None:
    """Answers lines of JSON: ``make`` creates a step with a label, ``forget`` deletes it, ``turn`` runs it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps: dict[str, Step] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        label = asked["label"]
        answer: dict[str, Any] = {}
        if asked["what"] == "make":
            steps[label], answer = make(*asked["arguments"])
        elif asked["what"] == "forget":
            del steps[label]
        else:
            # Warm-up step: the threads are asleep, and the caches have other data.
            steps[label]()
            times: list[float] = []
            now = time.perf_counter()
            end = now + asked["seconds"]
            while not times or now < end:
                steps[label]()
                before, now = now, time.perf_counter()
                times.append(now - before)
            answer = {"median": statistics.median(times)}
        out.write(json.dumps(answer) + "\n")
        out.flush()


class Child:
    """A child process that runs ``serve``."""

    def __init__(self, who: str, python: Path, threads: int) -> None:
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_"))}
        command = [str(python), __file__, "--serve", who, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, label: str, **more: Any) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, "label": label, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process ended unexpectedly")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def compare(
    label: str, here: Child, there: Child, reference_bytes: int, options: argparse.Namespace
) -> list[tuple[str, ...]]:
    """Returns the table rows of an optimizer. `reference_bytes` is the number of bytes of the reference's step."""
    import report

    name, settings = SETTINGS.get(label, (label, {}))
    kinds = {f"{label}, {groups}": groups > 1 for groups in (1, 3)}
    made = {kind: here.ask("make", kind, arguments=[name, settings, grouped]) for kind, grouped in kinds.items()}
    other = {kind: there.ask("make", kind, arguments=[name, settings, grouped]) for kind, grouped in kinds.items()}
    turns = [(here, REFERENCE), *((child, kind) for kind in kinds for child in (here, there))]
    turns = [(child, kind) for child, kind in turns if child is here or other[kind]["form"]]
    medians: dict[tuple[Child, str], list[float]] = {turn: [] for turn in turns}
    for number in range(options.rounds):
        # The order alternates, so that no variant always runs after the same other one.
        for child, kind in turns if number % 2 == 0 else reversed(turns):
            found = child.ask("turn", kind, seconds=options.seconds)
            medians[child, kind].append(found["median"])
    for kind in kinds:
        here.ask("forget", kind)
        there.ask("forget", kind)
    lines: list[tuple[str, ...]] = []
    for kind, grouped in kinds.items():
        count, form = made[kind]["bytes"], other[kind]["form"]
        own, best, theirs = medians[here, kind], medians[here, REFERENCE], medians.get((there, kind))
        step = statistics.median(own)
        bandwidth = statistics.median(a / (b * count / reference_bytes) for a, b in zip(own, best, strict=True))
        line = (label, "3" if grouped else "", f"{count / 1e6:.0f}", f"{step * 1e3:.2f}", f"{count / step / 1e9:.1f}")
        if theirs is None:
            lines.append((*line, f"{bandwidth:.2f}", "", "", ""))
            continue
        ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        milliseconds = report.number(statistics.median(theirs) * 1e3, ".2f")
        lines.append((*line, f"{bandwidth:.2f}", form, milliseconds, f"{ratio:.2f}"))
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Compare steps of ortrain's optimizers with PyTorch.")
    parser.add_argument(
        "names", nargs="*", metavar="OPTIMIZER", help="optimizers of ortrain.optim, or 'SGD momentum' (all)"
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads of both libraries (2)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="number of rounds; each optimizer runs once in a round (7)"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="duration of a run in a round (0.2)")
    parser.add_argument("--serve", choices=["ours", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve((ours if options.serve == "ours" else torchs)(options.threads))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import environments
    import report

    from ortrain import optim

    known = sorted([row.name for row in optim.table()] + list(SETTINGS))
    for name in options.names:
        if name not in known:
            parser.error(f"unknown optimizer {name!r}; known optimizers: {', '.join(known)}")
    begin = time.monotonic()
    here, there = (
        Child("ours", Path(sys.executable), options.threads),
        Child("torch", environments.torch(), options.threads),
    )
    try:
        reference_bytes = here.ask("make", REFERENCE, arguments=["AdamW", {}, False])["bytes"]
        lines: list[tuple[str, ...]] = []
        for label in options.names or known:
            lines += compare(label, here, there, reference_bytes, options)
            print(f"{label} ({time.monotonic() - begin:.0f} s)", flush=True)
    finally:
        here.end()
        there.end()
    count = sum(int(np.prod(shape)) for shape in shapes().values())
    print(f"\n{count} weights in {len(shapes())} tensors, {options.threads} threads, load {os.getloadavg()[0]:.1f}\n")
    print(report.table(HEADER, lines))


if __name__ == "__main__":
    main()
