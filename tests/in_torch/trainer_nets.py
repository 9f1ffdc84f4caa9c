"""A language model of PyTorch for trainers, its batches, and PyTorch loops as the reference of a trainer."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain.trainer import ORTTrainer, ORTTrainerOptions, legacy
from ortrain.trainer.optim import AdamConfig

VOCABULARY, WIDTH, HEADS, TOKENS, ROWS = 28, 16, 2, 10, 4
DESCRIPTION: dict[str, Any] = {
    "inputs": [("tokens", ["time", "batch"]), ("following", ["time", "batch"])],
    "outputs": [("loss", [], True), ("predictions", ["time", "batch", VOCABULARY])],
}


class Attention(nn.Module):
    """Causal attention. Keys have no bias: its gradient would be only rounding, which Adam would amplify."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        time, batch = x.shape[:2]
        query, key, value = (
            layer(x).reshape(time, batch, HEADS, -1).permute(1, 2, 0, 3) for layer in (self.query, self.key, self.value)
        )
        later = torch.triu(torch.ones(time, time), 1)
        scores = query @ key.transpose(2, 3) / math.sqrt(WIDTH // HEADS) - 10000 * later
        return self.out((scores.softmax(-1) @ value).permute(2, 0, 1, 3).reshape(time, batch, WIDTH))


class Transformer(nn.Module):
    """Two layers that predict the next token for each token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(64.0)[:, None] * torch.exp(-torch.arange(WIDTH) / WIDTH * 4)
        self.register_buffer("positions", torch.sin(angles)[:, None])
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[0]])
        for k, attention in enumerate(self.attention):
            h = self.norms[2 * k](h + attention(h))
            h = self.norms[2 * k + 1](h + self.dropout(self.down(F.gelu(self.up(h)))))
        return self.decoder(h)


def loss_of(predictions: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(predictions.reshape(-1, VOCABULARY), following.reshape(-1))


def net(seed: int = 321, dropout: float = 0.0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(dropout)


def batch(k: int = 0, time: int = TOKENS, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return sequences that count upward from a random start, in steps of one to three."""
    made = torch.Generator().manual_seed(k)
    first = torch.randint(0, VOCABULARY, (rows,), generator=made)
    width = torch.randint(1, 4, (rows,), generator=made)
    text = (first + width * torch.arange(time + 1)[:, None]) % VOCABULARY
    return text[:-1], text[1:]


def options_of(**given: Any) -> ORTTrainerOptions:
    return ORTTrainerOptions({"device": {"id": "cpu"}, **given})


def trainer_of(module: Any = None, config: Any = None, **given: Any) -> ORTTrainer:
    """Return a trainer of the language model."""
    return trainer_on(net() if module is None else module, DESCRIPTION, loss_of, config, **given)


def trainer_on(module: Any, description: dict[str, Any], loss: Any, config: Any = None, **given: Any) -> ORTTrainer:
    """Return a trainer of any module."""
    more = {name: given.pop(name) for name in ("mixed_precision_dtype",) if name in given}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(
            module, copy.deepcopy(description), config or AdamConfig(lr=0.01), loss, options_of(**given), **more
        )


def legacy_trainer_of(module: nn.Module, name: str, rate: Callable[[int], float], **given: Any) -> legacy.ORTTrainer:
    """Return a legacy trainer of the language model."""
    inputs, outputs = (
        [legacy.IODescription(*value[:2]) for value in DESCRIPTION[kind]] for kind in ("inputs", "outputs")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return legacy.ORTTrainer(
            module,
            loss_of,
            legacy.ModelDescription(inputs, outputs),
            name,
            None,
            legacy.IODescription("Learning_Rate", [1]),
            "cpu",
            get_lr_this_step=rate,
            **given,
        )


def losses_of(trainer: ORTTrainer | legacy.ORTTrainer, count: int, first: int = 0) -> list[float]:
    return [float(trainer.train_step(*batch(k))[0]) for k in range(first, first + count)]


class Lamb:
    """LAMB as formulas, with the interface of a PyTorch optimizer."""

    def __init__(self, weights: list[Tensor], lr: float) -> None:
        self.weights, self.lr = weights, lr
        self.first, self.second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        for weight, first, second in zip(self.weights, self.first, self.second, strict=True):
            first.mul_(0.9).add_(weight.grad, alpha=0.1)
            second.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
            change = first / (second.sqrt() + 1e-6)
            norms = weight.norm(), change.norm()
            ratio = norms[0] / norms[1] if norms[0] and norms[1] else torch.ones(())
            weight.sub_(self.lr * ratio * change)


Maker = Callable[[list[Tensor], float], Any]
OPTIMIZERS: dict[str, Maker] = {
    "adam": lambda weights, lr: torch.optim.AdamW(weights, lr, weight_decay=0.0),
    "lamb": Lamb,
    "sgd": lambda weights, lr: torch.optim.SGD(weights, lr),
}


def trained_by_torch(
    module: nn.Module,
    make: Maker,
    lr: float,
    count: int,
    *,
    clip: float | None = 1.0,
    window: int = 1,
    narrow: torch.dtype | None = None,
) -> Iterator[float]:
    """Yield the losses of PyTorch's own loop, with the mean gradient of a window, clipped by its norm."""
    weights = list(module.parameters())
    optimizer = make(weights, lr)
    scaler = torch.amp.GradScaler("cpu", enabled=narrow == torch.float16)
    for k in range(count):
        tokens, following = batch(k)
        computing: Any = contextlib.nullcontext() if narrow is None else torch.autocast("cpu", narrow)
        with computing:
            loss = loss_of(module(tokens), following)
        scaler.scale(loss / window).backward()
        yield float(loss.detach())
        if (k + 1) % window:
            continue
        if narrow is not None and scaler.is_enabled():
            scaler.unscale_(optimizer)
        norm = torch.linalg.vector_norm(torch.stack([weight.grad.norm() for weight in weights]))
        if clip is not None and norm > clip:
            for weight in weights:
                weight.grad.mul_(clip / norm)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        for weight in weights:
            weight.grad = None
