"""Losses of `fit` for the training that tests/in_torch/language_model.py records from torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import ortrain

FILES = {"text": "story.txt", "lines": "lines.jsonl"}
TOLERANCE = 3e-5
"""Relative tolerance of the loss of a step: 32 steps in float32, with sums in another order."""


def check_losses(folder: Path, kind: str) -> list[float]:
    """Train by `fit` on the files of a folder, compare the loss of each step, and return the perplexities."""
    record = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    path = folder / "model.onnx"
    inputs = ortrain.InferenceSession(path).get_inputs()
    rows = ortrain.data.open(
        folder / FILES[kind], model_inputs=inputs, tokenizer=folder / "tokenizer.json", length=record["length"]
    )
    model = ortrain.Model(path, learning_rate=record["rate"], metrics=["perplexity"], device="cpu")
    history = model.fit(rows, batch_size=record["batch"], epochs=record["epochs"], shuffle=False)
    np.testing.assert_allclose(history.steps["loss"], record[kind], rtol=TOLERANCE)
    return history["perplexity"]
