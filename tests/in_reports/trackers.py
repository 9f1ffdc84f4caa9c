"""Callbacks and histories with the libraries themselves: `trackers.py FOLDER` prints values that these read back.

Needs ortrain on the path.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import ortrain
from ortrain import callbacks


def points_of(folder: Path) -> list[tuple[str, float, int]]:
    """Return the points of the event files of TensorBoard in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack("<Q", content[at : at + 8])
            event = Event.FromString(content[at + 12 : at + 12 + length])
            found += [(value.tag, round(value.simple_value, 6), event.step) for value in event.summary.value]
            at += 16 + length
    return found


def main() -> None:
    # The callbacks import the libraries later. Their warnings are about themselves.
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MPLBACKEND": "agg"}
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    x, labels = rng.random((64, 64), np.float32), rng.integers(0, 10, 64)
    model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"])
    tracking = callbacks.MLflow(
        folder / "mlruns", experiment_name="digits", run_name="first", params={"kind": "perceptron"}
    )
    history = model.fit(
        x,
        labels,
        epochs=3,
        validation_split=0.25,
        verbose=2,
        callbacks=[
            tracking,
            callbacks.TensorBoard(folder / "logs", histogram_freq=1, update_freq="batch", write_steps_per_second=True),
        ],
    )
    run = tracking._client.get_run(tracking.run_id)
    frame = history.to_pandas()
    axes: Any = history.plot()
    axes[0].figure.savefig(folder / "curves.png")
    print(
        json.dumps(
            {
                "history": history.history,
                "train": points_of(folder / "logs" / "train"),
                "validation": points_of(folder / "logs" / "validation"),
                "mlflow": {
                    name: [
                        (point.step, point.value)
                        for point in tracking._client.get_metric_history(tracking.run_id, name)
                    ]
                    for name in run.data.metrics
                },
                "params": run.data.params,
                "status": run.info.status,
                "frame": frame.reset_index().to_dict("list"),
                "titles": [ax.get_title() for ax in axes],
                "lines": [[line.get_ydata().tolist() for line in ax.get_lines()] for ax in axes],
            }
        )
    )


if __name__ == "__main__":
    main()
