"""Decisions of Keras' callbacks over random values: record_callbacks.py FILE.

FILE is JSON: for each case the settings, the values of the epochs, and after each epoch the learning rate and the
counters, and the number of the epoch with the final weights. Runs in the environment of
tests/exporters/requirements.txt.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}
import keras

CASES = 150


class Model:
    """Model with the number of trained epochs as its weights."""

    def __init__(self) -> None:
        self.stop_training = False
        self.weights = 0
        self.optimizer = SimpleNamespace(learning_rate=1.0)

    def get_weights(self) -> int:
        return self.weights

    def set_weights(self, weights: int) -> None:
        self.weights = weights


def settings(source: random.Random) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Return random settings of both callbacks, and the values of the epochs."""
    stopping = {
        "min_delta": source.choice([0, 0, 0.05, 0.1]),
        "patience": source.randint(0, 3),
        "mode": source.choice(["auto", "min", "max"]),
        "baseline": source.choice([None, None, 0.2, 0.4]),
        "restore_best_weights": source.random() < 0.5,
        "start_from_epoch": source.choice([0, 0, 1, 3]),
    }
    plateau = {
        "factor": source.choice([0.5, 0.1]),
        "patience": source.randint(1, 3),
        "mode": source.choice(["auto", "min", "max"]),
        "min_delta": source.choice([0, 1e-4, 0.1]),
        "cooldown": source.randint(0, 2),
        "min_lr": source.choice([0, 0.2]),
    }
    values = [source.choice([0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.45, 0.5]) for _ in range(source.randint(2, 12))]
    return stopping, plateau, values


def decisions(stopping: dict[str, Any], plateau: dict[str, Any], values: list[float]) -> dict[str, Any]:
    """Return the decisions of both callbacks."""
    model = Model()
    early, reduce = keras.callbacks.EarlyStopping(**stopping), keras.callbacks.ReduceLROnPlateau(**plateau)
    for callback in (early, reduce):
        callback.set_model(model)
        callback.on_train_begin()
    epochs = []
    for epoch, value in enumerate(values):
        model.weights = epoch + 1
        logs = {"val_loss": value}
        for callback in (early, reduce):
            callback.on_epoch_end(epoch, logs)
        best = None if early.best is None else float(early.best)
        epochs.append([float(model.optimizer.learning_rate), early.wait, best, reduce.wait, reduce.cooldown_counter])
        if model.stop_training:
            break
    for callback in (early, reduce):
        callback.on_train_end()
    ends = {"weights": model.weights, "stopped_epoch": early.stopped_epoch, "best_epoch": early.best_epoch}
    return {"stopping": stopping, "plateau": plateau, "values": values, "epochs": epochs, **ends}


def main() -> None:
    source = random.Random(0)
    cases = [decisions(*settings(source)) for _ in range(CASES)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(len(cases))


if __name__ == "__main__":
    main()
