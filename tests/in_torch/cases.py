"""Which networks torch exports (nets.py), by which exporter, at which opsets. Needs the standard library alone."""

from __future__ import annotations

from typing import NamedTuple

# Of the exporter that traces TorchScript (`dynamo=False`), beside the oldest that has all operators of a network.
SCRIPT_OPSETS = (17, 20)
# Of the one that is built on torch.export (`dynamo=True`).
EXPORT_OPSETS = (18, 20, 23)


class Case(NamedTuple):
    """A model to be exported."""

    net: str
    dynamo: bool
    opset: int
    # Whether it is exported in training mode, unoptimized.
    training: bool
    optimizer: str

    @property
    def changed(self) -> bool:
        """Whether its weights are others than the network's."""
        return self.net in CHANGED and not self.training

    def __str__(self) -> str:
        exporter, mode = "export" if self.dynamo else "script", "training" if self.training else "eval"
        return f"{self.net}-{exporter}-{self.opset}-{mode}"


# The oldest opset at which the TorchScript exporter writes each network; 0 where it cannot.
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
# torch.export does not take scripts.
SCRIPTED = ("scripted_branches", "scripted_loop")
# What exporters compute of weights when a model is exported to be run makes others of them: a BatchNormalization
# becomes part of the convolution before it, a table that is used twice becomes two.
CHANGED = ("cnn", "depthwise", "language_model")
# As torch.export writes them unoptimized, parts of a tensor are sequences.
SEQUENCES = ("decoder", "shapes")
# Networks that have no gradient that is rounding alone, of which AdamW would make steps.
ADAMW = ("mlp", "matrices", "lstm", "gru", "einsum", "embedding", "scripted_loop")


def cases() -> list[Case]:
    """All of them."""
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
