"""Train a PyTorch network that contains an ONNX model: `python onnx_backbone_in_torch.py FOLDER`.

The backbone is an ONNX file, the head is a PyTorch module, and one PyTorch optimizer trains both. The images are noise
with a bright half, and the network learns to find this half. The trained backbone is saved as an ONNX model in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import ortrain

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("this example needs PyTorch, which is not installed here; install the package torch: pip install torch")

from ortrain.torch import as_module

STEPS, ROWS, RATE = 60, 64, 3e-3


class Halves(nn.Module):  # type: ignore[misc]
    """Network that finds the bright half of an image: left, right, top or bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = as_module(ortrain.examples.convnet())
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(10, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns a score for each half."""
        return self.head(self.backbone(images))


def batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images and the indices of their bright halves."""
    images, halves = rng.random((ROWS, 1, 8, 8), np.float32), rng.integers(0, 4, ROWS)
    places = (np.s_[:, :4], np.s_[:, 4:], np.s_[:4], np.s_[4:])
    for image, half in zip(images, halves, strict=True):
        image[0][places[half]] += 0.5
    return torch.from_numpy(images), torch.from_numpy(halves)


def main() -> None:
    """Trains, prints the decreasing loss, and counts the correct results in a new batch."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    net = Halves()
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    for step in range(STEPS):
        images, halves = batch(rng)
        loss = nn.functional.cross_entropy(net(images), halves)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss.item():.4f}")

    net.eval()
    images, halves = batch(rng)
    with torch.no_grad():
        scores = net(images)
    path = folder / "backbone.onnx"
    net.backbone.to_onnx(path)
    features = ortrain.InferenceSession(path).run(None, {"x": images.numpy()})[0]
    assert torch.allclose(net.head(torch.from_numpy(np.asarray(features))), scores, atol=1e-4)
    print(f"right: {int((scores.argmax(1) == halves).sum())} of {ROWS}")


if __name__ == "__main__":
    main()
