"""PyTorch as a peer, in its fast variant: fused AdamW, scaled dot product attention, activations in place.

    python with_torch.py VARIANT FOLDER OWN THREADS

VARIANT: words of `eager`, `channels-last`, `bf16` (autocast) and `compile`, joined by `+`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from turns import Session, Turns


def main() -> None:
    """Prepares the workload, then takes turns."""
    turns = Turns()
    variant, folder, threads = set(sys.argv[1].split("+")), Path(sys.argv[2]), int(sys.argv[4])
    with turns.timed("import"):
        import torch
    # Not part of the measured import: a user of PyTorch has a module and reads no ONNX graph.
    import onnx
    from onnx_in_torch import Network, adamw
    from torch.nn import functional as F  # noqa: N812

    assert variant <= {"eager", "channels-last", "bf16", "compile"}, variant
    torch.set_num_threads(threads)
    settings = json.loads((folder / "settings.json").read_text())
    model = onnx.load(folder / "graph.onnx")

    def laid_out(value: Any) -> Any:
        images = "channels-last" in variant and value.ndim == 4
        return value.to(memory_format=torch.channels_last) if images else value

    with np.load(folder / "batches.npz") as stored:
        batches = [
            (laid_out(torch.from_numpy(stored[f"x{index}"])), torch.from_numpy(stored[f"labels{index}"]))
            for index in range(settings["batches"])
        ]

    def create(_: bool) -> Session:
        with np.load(folder / "weights.npz") as stored:
            weights = {name: laid_out(torch.from_numpy(stored[name])) for name in stored.files}
        trained = [weights[name].requires_grad_() for name in settings["trainable"]]
        forward: Any = Network(model, weights, settings["trainable"], batches[0][0])
        if "compile" in variant:
            forward = torch.compile(forward)
        optimizer = adamw(trained, settings)

        def step(number: int) -> float:
            x, labels = batches[number % len(batches)]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in variant):
                loss = F.cross_entropy(forward(x), labels)
            loss.backward()
            optimizer.step()
            return float(loss.item())

        def gradients() -> dict[str, float]:
            return {name: float(weights[name].grad.norm()) for name in settings["trainable"]}

        return Session(step, gradients, optimizer.step if settings["only_optimizer"] else None)

    turns.serve(create, {"library": "torch", "version": torch.__version__})


if __name__ == "__main__":
    main()
