"""Train a PyTorch module with ORTTrainer: `python orttrainer_with_torch.py FOLDER`.

The module recognizes the digit of a seven-segment display from the brightness of its bars, with noise. The trainer
exports the module at the first step, and trains the exported model with a learning-rate schedule. In the middle, the
training is saved and continues in another trainer, as after an interruption. At the end, the module receives the
trained weights. FOLDER receives the checkpoint and the ONNX model.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

import ortrain

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    sys.exit("this example needs PyTorch, which is not installed here; install the package torch: pip install torch")

from ortrain.trainer import ORTTrainer, ORTTrainerOptions, optim

STEPS, ROWS, RATE = 120, 64, 0.02
# Bars of each digit: top, top left, top right, middle, bottom left, bottom right, bottom.
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
BARS = torch.tensor([[float(bar) for bar in digit] for digit in DIGITS])
DESCRIPTION = {
    "inputs": [("bars", ["batch", 7]), ("digits", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 10])],
}


class Reader(nn.Module):  # type: ignore[misc]
    """Network that computes scores of the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, bars: torch.Tensor) -> torch.Tensor:
        """Returns scores for the brightness of seven bars."""
        return self.layers(bars)


def loss_of(scores: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Returns the loss of the module's output and the last input."""
    return nn.functional.cross_entropy(scores, digits)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns digits, and the brightness of their bars with noise."""
    digits = torch.randint(0, 10, (ROWS,))
    return BARS[digits] + 0.1 * torch.randn(ROWS, 7), digits


def trainer_of(module: nn.Module) -> ORTTrainer:
    """Builds a trainer of the module."""
    options = ORTTrainerOptions(
        {
            "device": {"id": "cpu"},
            "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=STEPS, warmup=0.1),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(module, DESCRIPTION, optim.AdamConfig(lr=RATE), loss_of, options)


def main() -> None:
    """Trains, prints the decreasing loss, and counts the correctly recognized digits of a new batch."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module = Reader()
    trainer = trainer_of(module)
    checkpoint = folder / "checkpoint.ortcp"
    checkpoint.unlink(missing_ok=True)
    for step in range(STEPS):
        if step == STEPS // 2:
            trainer.save_checkpoint(str(checkpoint), {"step": step})
            trainer = trainer_of(Reader())
            assert trainer.load_checkpoint(str(checkpoint)) == {"step": step}
        loss, _scores = trainer.train_step(*batch())
        if step % 40 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss.item():.4f}")

    path = folder / "trained.onnx"
    trainer.save_as_onnx(str(path))
    module.load_state_dict(trainer.state_dict(pytorch_format=True))
    module.eval()
    bars, digits = batch()
    with torch.no_grad():
        scores = module(bars)
    (saved,) = ortrain.InferenceSession(path).run(["scores"], {"bars": bars.numpy(), "digits": digits.numpy()})
    assert torch.allclose(torch.from_numpy(np.asarray(saved)), scores, atol=1e-4)
    print(f"right: {int((scores.argmax(1) == digits).sum())} of {ROWS}")


if __name__ == "__main__":
    main()
