"""Run of ``fit`` that a test kills and starts again: python fit_resume_job.py FOLDER KILL_AT THREADS EVERY."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from fit_models import rows, with_dropout

import ortrain
from ortrain.callbacks import Callback, EarlyStopping, ReduceLROnPlateau
from ortrain.data import Batch

FLOAT = np.float32


class Augmented:
    """Rows with noise that the seed determines."""

    def __init__(self) -> None:
        self.x, self.y = rows(50)

    def __len__(self) -> int:
        return len(self.x)

    def take(self, at: Any, seed: int, training: bool) -> Batch:
        noise = np.random.default_rng(seed).standard_normal((len(at), 4)).astype(FLOAT)
        return Batch({"x": self.x[at] + (noise if training else 0)}, {"target": self.y[at]})


class Killer(Callback):
    """Callback that kills the process at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: str | None, kill_at: int = 0, threads: int = 1, every: float | None = 3) -> Any:
    options = ortrain.SessionOptions()
    options.intra_op_num_threads = threads
    model = ortrain.Model(
        with_dropout(),
        metrics=["accuracy", "perplexity"],
        weighted_metrics=["accuracy"],
        seed=3,
        learning_rate=0.02,
        session_options=options,
        device="cpu",
    )
    callbacks: list[Any] = [
        EarlyStopping(monitor="loss", patience=9, restore_best_weights=True),
        ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
    ]
    if kill_at:
        callbacks.append(Killer(kill_at))
    x, y = rows(20, seed=1)
    model.fit(
        Augmented(),
        validation_data=(x, y),
        batch_size=8,
        epochs=4,
        accumulate=2,
        clip_norm=1.0,
        class_weight={0: 2.0},
        callbacks=callbacks,
        resume=folder,
        checkpoint_every=every,
    )
    return model


def bits(model: Any) -> list[Any]:
    return [
        {name: list(map(float.hex, values)) for name, values in model.history.history.items()},
        {name: [float(value).hex() for value in values] for name, values in model.history.steps.items()},
        {name: parameter.data.tobytes().hex() for name, parameter in model.state.parameters},
    ]


if __name__ == "__main__":
    every = sys.argv[4]
    fit(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        None if every == "None" else float(every) if "." in every else int(every),
    )
