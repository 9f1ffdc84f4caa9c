"""Networks of nets.py that torch exports, with their exporters and opsets. Needs only the standard library."""

from __future__ import annotations

from typing import NamedTuple

# Opsets of the TorchScript exporter (`dynamo=False`), in addition to the oldest sufficient opset of a network.
SCRIPT_OPSETS = (17, 20)
# Opsets of the exporter based on torch.export (`dynamo=True`).
EXPORT_OPSETS = (18, 20, 23)


class Case(NamedTuple):
    """A model to export."""

    net: str
    dynamo: bool
    opset: int
    # True if the model is exported in training mode, unoptimized.
    training: bool
    optimizer: str

    @property
    def changed(self) -> bool:
        """True if the weights differ from the network's."""
        return self.net in CHANGED and not self.training

    def __str__(self) -> str:
        exporter, mode = "export" if self.dynamo else "script", "training" if self.training else "eval"
        return f"{self.net}-{exporter}-{self.opset}-{mode}"


# Oldest opset at which the TorchScript exporter writes each network; 0 means never.
OLDEST = {
    "activations": 12,
    "attention": 14,
    "branches": 0,
    "cnn": 9,
    "convolutions": 13,
    "decoder": 14,
    "depthwise": 9,
    "einsum": 12,
    "embedding": 9,
    "encoder": 14,
    "gru": 10,
    "image": 11,
    "indexing": 16,
    "language_model": 14,
    "lstm": 10,
    "matrices": 14,
    "mlp": 9,
    "norms": 10,
    "pads": 11,
    "recurrent": 10,
    "reductions": 11,
    "rms_norm": 0,
    "scripted_branches": 11,
    "scripted_loop": 11,
    "selection": 11,
    "shapes": 11,
}
# torch.export does not support scripts.
SCRIPTED = ("scripted_branches", "scripted_loop")
# Networks with other weights after an export in eval mode: a BatchNormalization becomes part of the previous
# convolution, and a table with two uses becomes two tables.
CHANGED = ("cnn", "depthwise", "language_model")
# In unoptimized models of torch.export, parts of a tensor are sequences.
SEQUENCES = ("decoder", "shapes")
# Networks without gradients that are only rounding, which AdamW would turn into steps.
ADAMW = ("mlp", "matrices", "lstm", "gru", "einsum", "embedding", "scripted_loop")


def cases() -> list[Case]:
    """Return all cases."""
    found = []
    for net, oldest in OLDEST.items():
        optimizer = "AdamW" if net in ADAMW else "SGD"
        if oldest:
            modes = [(oldest, True), *((opset, net in CHANGED) for opset in SCRIPT_OPSETS)]
            found += [Case(net, False, opset, training, optimizer) for opset, training in modes]
        if net not in SCRIPTED:
            modes = [(opset, net in CHANGED) for opset in EXPORT_OPSETS]
            if net not in SEQUENCES:
                modes.append((EXPORT_OPSETS[0], net not in CHANGED))
            found += [Case(net, True, opset, training, optimizer) for opset, training in modes]
    return found
