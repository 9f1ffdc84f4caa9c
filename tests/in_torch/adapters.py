"""Adapters of PEFT: their files, and the losses of their training in float64.

adapters.py FOLDER writes a folder for each case of `CASES`. The exported base is model.onnx. The files of PEFT before
and after the training are in initial/ and trained/. The batch, the losses and the last outputs are in record.npz.

adapters.py FOLDER CASE ADAPTER FILE reads an adapter with PEFT, and writes the outputs for the batch of the case.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

STEPS, RATE = 20, 1e-2


class Perceptron(nn.Module):
    """Rows of features, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return found


class Normalized(nn.Module):
    """Rows of features, two layers with a normalization between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(torch.relu(self.norm(self.fc1(x))))
        return found


class Attention(nn.Module):
    """Sequences of features, one head of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5, dim=-1)
        found: Tensor = self.o(scores @ self.v(x))
        return found


class Bag(nn.Module):
    """Sequences of tokens, the mean of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.embed(x).mean(dim=1)))
        return found


class Convolutions(nn.Module):
    """Images: a convolution with a stride, one with groups, and a layer of the means."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, (3, 1), padding=(1, 0), groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        found: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return found


class Decoder(nn.Module):
    """GPT-2: the first axis of its weights are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 13, "n_positions": 5, "n_embd": 8, "n_layer": 1, "n_head": 2}
        without_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        config = transformers.GPT2Config(**sizes, **without_dropout, bos_token_id=None, eos_token_id=None)
        config._attn_implementation = "eager"
        config.use_cache = False
        self.net = transformers.GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(input_ids=x, attention_mask=torch.ones_like(x)).logits
        return found


@dataclass
class Case:
    """Network with the settings of its adapter."""

    net: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    targets: list[str]
    rank: int
    alpha: int
    dynamo: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "perceptron": Case(Perceptron, lambda: torch.randn(4, 6), ["fc1", "fc2"], 2, 4),
    "attention": Case(Attention, lambda: torch.randn(4, 5, 8), ["q", "v", "o"], 3, 5, settings={"use_rslora": True}),
    "attention-dynamo": Case(
        Attention,
        lambda: torch.randn(4, 5, 8),
        ["q", "v", "o"],
        2,
        4,
        dynamo=True,
        settings={"rank_pattern": {"o": 3}, "alpha_pattern": {"o": 5}},
    ),
    "embedding": Case(Bag, lambda: torch.randint(0, 11, (4, 5)), ["embed", "head"], 2, 2),
    "convolutions": Case(Convolutions, lambda: torch.randn(4, 3, 6, 6), ["first", "second"], 2, 3),
    "dora-perceptron": Case(Perceptron, lambda: torch.randn(4, 6), ["fc1", "fc2"], 2, 4, settings={"use_dora": True}),
    "dora-attention": Case(Attention, lambda: torch.randn(4, 5, 8), ["q", "v", "o"], 2, 4, settings={"use_dora": True}),
    "dora-embedding": Case(
        Bag, lambda: torch.randint(0, 11, (4, 5)), ["embed", "head"], 2, 2, settings={"use_dora": True}
    ),
    "dora-convolution": Case(
        Convolutions, lambda: torch.randn(4, 3, 6, 6), ["first", "head"], 2, 3, settings={"use_dora": True}
    ),
    "pissa": Case(
        Attention, lambda: torch.randn(4, 5, 8), ["q", "v", "o"], 2, 4, settings={"init_lora_weights": "pissa"}
    ),
    "olora": Case(
        Attention, lambda: torch.randn(4, 5, 8), ["q", "v", "o"], 2, 4, settings={"init_lora_weights": "olora"}
    ),
    "bias-all": Case(Normalized, lambda: torch.randn(4, 6), ["fc1"], 2, 4, settings={"bias": "all"}),
    "bias-lora-only": Case(Normalized, lambda: torch.randn(4, 6), ["fc1"], 2, 4, settings={"bias": "lora_only"}),
    "decoder": Case(Decoder, lambda: torch.randint(0, 13, (4, 5)), ["c_attn", "c_fc"], 2, 4),
}


def export(net: nn.Module, x: Tensor, path: Path, *, dynamo: bool) -> None:
    arguments: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "opset_version": 17, "dynamo": dynamo}
    if dynamo:
        arguments |= {"opset_version": 18, "external_data": False, "verbose": False}
        torch.onnx.export(net, (x,), str(path), dynamic_shapes=({0: torch.export.Dim("batch")},), **arguments)
        model = onnx.load(path)
        for node in model.graph.node:
            # A stack trace names files of this machine.
            kept = [entry for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
        onnx.save(model, path)
    else:
        torch.onnx.export(net, (x,), str(path), dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, **arguments)


def record(case: Case, folder: Path) -> list[float]:
    torch.manual_seed(0)
    net, x = case.net().eval(), case.x()
    with torch.no_grad():
        target = torch.randn_like(net(x))
    export(net, x, folder / "model.onnx", dynamo=case.dynamo)
    # Random factors: with zeros in one of them, the first gradient of the other one is zero.
    settings: dict[str, Any] = {"init_lora_weights": False, **case.settings}
    config = LoraConfig(r=case.rank, lora_alpha=case.alpha, target_modules=case.targets, **settings)
    adapted = get_peft_model(net, config)
    adapted.save_pretrained(str(folder / "initial"))
    adapted.double()
    wide = x.double() if x.is_floating_point() else x
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(adapted(wide), target.double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        y = adapted(wide).numpy()
    adapted.float().save_pretrained(str(folder / "trained"))
    np.savez(folder / "record.npz", x=x.numpy(), target=target.numpy(), losses=np.array(losses), y=y, rate=RATE)
    for part in ("initial", "trained"):
        (folder / part / "README.md").unlink()
    return losses


def write_outputs(case: Case, folder: Path, adapter: str, file: str) -> None:
    """Write the outputs of the network of a case with the adapter of a folder."""
    torch.manual_seed(0)
    net = case.net().eval()
    with np.load(folder / "record.npz") as stored:
        x = torch.from_numpy(stored["x"])
    with torch.no_grad():
        np.save(file, PeftModel.from_pretrained(net, adapter)(x).numpy())
    print("written")


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if len(sys.argv) > 2:
        folder, name, adapter, file = sys.argv[1:]
        write_outputs(CASES[name], Path(folder) / name, adapter, file)
        return
    for name, case in CASES.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        losses = record(case, folder)
        print(name, f"{losses[0]:.4f} {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
