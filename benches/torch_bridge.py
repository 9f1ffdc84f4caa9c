"""A step of a module of PyTorch beside the two calls that it is made of, in turns in one run: the ratio of times.

    python benches/torch_bridge.py [NAME ...] [--rounds N] [--packages FOLDER]

Runs where PyTorch is; FOLDER is a folder that has the package ortrain. A step of the module is forward, a loss of
PyTorch's, backward, and AdamW of PyTorch's. Beside it stand the two calls of `ForwardBackward` with the same loss
between them, and the same calls of the same optimizer; gradients are written where they were written before. The second
ratio is that to the two calls alone, which are given a gradient that nobody computes. A ratio is the median of
those of turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# What a step of the module may take at most, as a share of two calls and the optimizer.
AIM = 1.10
NAMES = ("mlp", "bert_mini")
WARM, TURN = 10, 4


def milliseconds(step: Callable[[], None]) -> float:
    """The time of a step, of a few that follow each other."""
    start = time.perf_counter()
    for _ in range(TURN):
        step()
    return (time.perf_counter() - start) * 1e3 / TURN


def steps_of(name: str) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """A step of the module, of the two calls, and of the two calls with a loss between them."""
    import torch
    import workloads
    from torch.nn.functional import cross_entropy

    from ortrain import _ortrain
    from ortrain._options import native_options
    from ortrain.torch import as_module

    model, trained = workloads.load(name).SerializeToString(), workloads.about(name)["trainable_names"]
    x, labels = map(torch.from_numpy, workloads.batch(name, 0))
    net: Any = as_module(model, wrt=trained)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)

    def module() -> None:
        loss = cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    settings: dict[str, Any] = {"training": "auto", "seed": 0, "device": "cpu", **native_options(None)}
    native = _ortrain.ForwardBackward(model, trained, [], **settings)
    parameters = [torch.nn.Parameter(torch.from_dlpack(value)) for value in native.initial_weights()]
    weights = [_ortrain.OrtValue.from_dlpack(parameter.detach()) for parameter in parameters]
    inputs = [_ortrain.OrtValue.from_dlpack(x)]
    live, (logits,) = native.forward(inputs, weights)
    seed = _ortrain.OrtValue.from_dlpack(torch.full_like(torch.from_dlpack(logits), 1e-3))
    rooms = native.backward(live, [seed], None)
    gradients = [torch.from_dlpack(room) for room in rooms]
    other = torch.optim.AdamW(parameters, lr=1e-5)

    def update() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        other.step()
        other.zero_grad()

    def calls() -> None:
        live, _ = native.forward(inputs, weights)
        native.backward(live, [seed], rooms)
        update()

    def with_loss() -> None:
        live, (value,) = native.forward(inputs, weights)
        logits = torch.from_dlpack(value).requires_grad_()
        cross_entropy(logits, labels).backward()
        native.backward(live, [_ortrain.OrtValue.from_dlpack(logits.grad)], rooms)
        update()

    return module, calls, with_loss


def compare(name: str, rounds: int) -> tuple[float, float, float]:
    """The ratios to two calls with a loss between them and to two calls alone, and the milliseconds of the module."""
    module, calls, with_loss = steps_of(name)
    for _ in range(WARM):
        module()
        calls()
        with_loss()
    times = [(milliseconds(module), milliseconds(calls), milliseconds(with_loss)) for _ in range(rounds)]
    first, second = (statistics.median(times[k][0] / times[k][j] for k in range(rounds)) for j in (2, 1))
    return first, second, statistics.median(of_module for of_module, _, _ in times)


def main() -> int:
    """Prints a line for each workload; the status says whether all are within the aim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--packages")
    arguments = parser.parse_args()
    if arguments.packages is not None:
        sys.path.insert(0, arguments.packages)
    missed = 0
    for name in arguments.names:
        ratio, alone, step = compare(name, arguments.rounds)
        missed += ratio > AIM
        print(f"{name}: time {ratio:.3f} (at most {AIM}), {alone:.3f} without a loss, step {step:.2f} ms")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
