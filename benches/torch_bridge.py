"""Comparison of a PyTorch module's step with the calls that it consists of: ratios of times.

    python benches/torch_bridge.py [NAME ...] [--rounds N] [--packages FOLDER]

Needs PyTorch; FOLDER contains the package ortrain. A step of the module is the forward pass, a PyTorch loss, the
backward pass and PyTorch's AdamW. The baseline is the two calls of `ForwardBackward` with the same loss between them
and the same optimizer; its gradients are written to the same memory each time. The second ratio is to the two calls
without a loss, with a constant gradient. The variants run in turns, and a ratio is the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Maximum ratio of the module's step to two calls and the optimizer.
AIM = 1.10
NAMES = ("mlp", "bert_mini")
WARM, TURN = 10, 4


def milliseconds(step: Callable[[], None]) -> float:
    """Returns the mean time of a few consecutive steps, in milliseconds."""
    start = time.perf_counter()
    for _ in range(TURN):
        step()
    return (time.perf_counter() - start) * 1e3 / TURN


def steps_of(name: str) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Returns a step of the module, a step of the two calls, and a step of the two calls with a loss between them."""
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

    native = _ortrain.ForwardBackward(model, trained, [], training="auto", seed=0, options=native_options(None))
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
    """Returns the ratios to two calls with and without a loss, and the milliseconds of the module's step."""
    module, calls, with_loss = steps_of(name)
    for _ in range(WARM):
        module()
        calls()
        with_loss()
    times = [(milliseconds(module), milliseconds(calls), milliseconds(with_loss)) for _ in range(rounds)]
    first, second = (statistics.median(times[k][0] / times[k][j] for k in range(rounds)) for j in (2, 1))
    return first, second, statistics.median(of_module for of_module, _, _ in times)


def main() -> int:
    """Prints a line for each workload. The exit status is 1 if the target is missed."""
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
