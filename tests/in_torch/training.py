"""Training of networks in torch for these tests: distinct weights, steps in float64, exports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folded import Weights, folded
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

# torch adds the epsilon after the correction of the moments, onnxruntime before: too small to be visible.
EPSILON = 1e-12

Stepper = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(rate: float) -> Stepper:
    """Return a function that makes AdamW with the settings of ortrain: no decay."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, eps=EPSILON, weight_decay=0.0)


def disturb(net: nn.Module, scale: float) -> None:
    """Change all parameters slightly until all elements are distinct, and change the statistics of BatchNorms."""
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
    """Return parameters with elements that occur more than once, and masks of these elements."""
    parameters = list(net.parameters())
    _, which, counts = torch.unique(
        torch.cat([value.flatten() for value in parameters]), return_inverse=True, return_counts=True
    )
    places = (counts[which] > 1).split([value.numel() for value in parameters])
    found = [(value, place.view_as(value)) for value, place in zip(parameters, places, strict=True)]
    return [(value, place) for value, place in found if place.any()]


class Kinks(TorchDispatchMode):
    """Smallest distance of a Relu argument from zero, relative to the mean size: rounding there changes gradients."""

    RELUS = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)

    def __init__(self) -> None:
        super().__init__()
        self.nearest = 1.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.RELUS:
            sizes = args[0].abs()
            # Exact zeros do not depend on rounding: they are outputs of another Relu.
            near = sizes[sizes > 0]
            if near.numel() > 0:
                self.nearest = min(self.nearest, float(near.min() / sizes.mean()))
        return function(*args, **(kwargs or {}))


def nearest_kink(net: nn.Module, x: Tensor) -> float:
    """Return the smallest distance for all Relus of a network with a batch."""
    with torch.no_grad(), Kinks() as kinks:
        net(x)
    return kinks.nearest


def drawn_target(net: nn.Module, x: Tensor) -> Tensor:
    """Return a random float32 target with the shape of the network's output."""
    with torch.no_grad():
        return torch.randn_like(net(x)).float()


def doubled(net: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy of a network, and its batch, in float64."""
    return copy.deepcopy(net).double(), x.double() if x.is_floating_point() else x


def record(
    net: nn.Module, x: Tensor, target: Tensor, stepper: Stepper, count: int, weights: Weights | None = None
) -> dict[str, np.ndarray]:
    """Train a copy of a network in its current mode; returns torch's results.

    The results are the batch `x` and `target`, the `losses` of each step, and `value/KEY` and `gradient/KEY` of trained
    parameters at the first step. `reached` is the number of elements with a gradient. `weights` are the weights of an
    export: other parameters are not trained. A parameter that does not reach the loss (a pooler) has no gradient.
    """
    # Constant tables are parameters as well.
    fixed = {key for key, value in net.named_parameters() if not value.requires_grad}
    net, batch = doubled(net, x)
    if weights is not None:
        net = folded(net, batch, weights)
    values = {key: value.detach().float().numpy().copy() for key, value in net.named_parameters() if key not in fixed}
    trained = {key: np.ones(value.shape, bool) for key, value in values.items()}
    if weights is not None:
        trained = weights.trained(values)
    optimizer = stepper(net.parameters())
    losses, found, reached = [], {"x": x.numpy(), "target": target.numpy()}, 0
    for step in range(count):
        optimizer.zero_grad()
        loss = F.mse_loss(net(batch), target.double())
        loss.backward()  # type: ignore[no-untyped-call]
        for key, value in net.named_parameters():
            if value.grad is None:
                continue
            places = trained.get(key, np.zeros(value.shape, bool))
            if step == 0 and key in trained:
                gradient = value.grad.numpy().copy()
                found |= {f"value/{key}": values[key][places], f"gradient/{key}": gradient[places]}
                reached += np.count_nonzero(gradient)
            value.grad *= torch.tensor(places)
        optimizer.step()
        losses.append(float(loss.detach()))
    return found | {"losses": np.asarray(losses), "reached": np.asarray(reached)}


def export(net: nn.Module, x: Tensor, path: Path, *, dynamo: bool, dynamic: bool = True, **more: Any) -> Any:
    """Write a network by one of the two exporters, with a dynamic or fixed batch; returns the new one's program."""
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]} | more
    if not dynamo:
        axes = {"x": {0: "batch"}, "y": {0: "batch"}}
        torch.onnx.export(net, (x,), str(path), dynamo=False, dynamic_axes=axes, **names)
        return None
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    program = torch.onnx.export(net, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    assert program is not None
    return program
