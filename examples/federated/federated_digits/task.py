"""Model and data of a client."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import ortrain

# The last rows are for the server.
TEST_ROWS = 297


def build(context: Any) -> ortrain.Model:
    """Return the network: convolutions with batch normalization, without training."""
    return ortrain.Model(
        ortrain.examples.convnet(),
        loss="cross_entropy",
        optimizer="adam",
        learning_rate=float(context.run_config["learning-rate"]),
        metrics=["accuracy"],
        device="cpu",
    )


def digits() -> tuple[Any, Any]:
    """Return images, float32 of shape [1797, 1, 8, 8], and labels."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def data(context: Any) -> tuple[Any, Any]:
    """Return the part of the client that the node's configuration numbers."""
    x, y = digits()
    part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    rows = np.arange(part, len(x) - TEST_ROWS, parts)
    return x[rows], y[rows]
