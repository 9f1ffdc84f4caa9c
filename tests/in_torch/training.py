"""What is the same for all networks that torch trains here: weights that can be told apart, steps in float64, exports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# torch adds it after the correction of the moments, onnxruntime before: too small to be seen.
EPSILON = 1e-12

Stepper = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(rate: float) -> Stepper:
    """AdamW as ortrain runs it beside: no decay."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, eps=EPSILON, weight_decay=0.0)


def disturb(net: nn.Module, scale: float) -> None:
    """Change all parameters a little until no two elements are equal, and the statistics of BatchNorms."""
    with torch.no_grad():
        for value in net.parameters():
            value += scale * torch.randn_like(value)
        for key, value in net.named_buffers():
            if key.endswith("running_mean"):
                value += 0.1 * torch.randn_like(value)
            elif key.endswith("running_var"):
                value *= torch.rand_like(value) + 0.5
        while again := twice(net):
            for value, elements in again:
                value += scale * elements * torch.randn_like(value)


def twice(net: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Parameters with elements that others equal, and where they are."""
    parameters = list(net.parameters())
    _, which, counts = torch.unique(
        torch.cat([value.flatten() for value in parameters]), return_inverse=True, return_counts=True
    )
    places = (counts[which] > 1).split([value.numel() for value in parameters])
    found = [(value, place.view_as(value)) for value, place in zip(parameters, places, strict=True)]
    return [(value, place) for value, place in found if place.any()]


def drawn_target(net: nn.Module, x: Tensor) -> Tensor:
    """Of the shape of what a network gives, in float32."""
    with torch.no_grad():
        return torch.randn_like(net(x)).float()


def doubled(net: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of a network, and its batch, in float64."""
    return copy.deepcopy(net).double(), x.double() if x.is_floating_point() else x


def steps(
    net: nn.Module, x: Tensor, target: Tensor, stepper: Stepper, count: int, trained: dict[str, Tensor] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses of steps, and all gradients of the first one; the network is changed.

    `trained` says of each parameter which of its elements are stepped: all by default. What does not reach the loss (a
    pooler) has no gradient.
    """
    optimizer = stepper(net.parameters())
    losses, gradients = [], {}
    for step in range(count):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), target.double())
        loss.backward()  # type: ignore[no-untyped-call]
        for key, value in net.named_parameters():
            if value.grad is None:
                continue
            if step == 0:
                gradients[key] = value.grad.numpy().copy()
            if trained is not None:
                value.grad *= trained[key]
        optimizer.step()
        losses.append(float(loss.detach()))
    return np.asarray(losses), gradients


def export(net: nn.Module, x: Tensor, path: Path, *, dynamo: bool, dynamic: bool = True, **more: Any) -> Any:
    """Write a network by one of the two exporters, with a batch of any size or as it is; the new one's program."""
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]} | more
    if not dynamo:
        axes = {"x": {0: "batch"}, "y": {0: "batch"}}
        torch.onnx.export(net, (x,), str(path), dynamo=False, dynamic_axes=axes, **names)
        return None
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    program = torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    assert program is not None
    return program
