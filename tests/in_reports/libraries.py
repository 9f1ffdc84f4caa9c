"""Training by ``fit`` from the rows of other libraries: `libraries.py FOLDER` prints the history of each as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pandas
import polars
import pyarrow
import zarr

import ortrain

ROWS, BATCH, EPOCHS = 40, 12, 2


def history(x: Any, y: Any = None) -> dict[str, list[float]]:
    model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"], device="cpu")
    return dict(model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, validation_split=0.25, verbose=0))


def main() -> None:
    """Print the histories."""
    folder = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    x, y = rng.random((ROWS, 64), np.float32), rng.integers(0, 10, ROWS)
    columns: dict[str, Any] = {f"pixel{number}": x[:, number] for number in range(64)} | {"label": y}
    named = datasets.Dataset.from_dict({"x": x, "label": y})
    classes = datasets.ClassLabel(names=list("abcdefghij"))
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"], file["y"] = x, y
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("x", data=x, chunks=(7, 64))
    group.create_array("y", data=y, chunks=(7,))
    found = {
        "arrays": history(x, y),
        "datasets": history(named),
        "datasets with numpy": history(named.with_format("numpy")),
        "datasets with classes": history(named.cast_column("label", classes)),
        "pandas": history(pandas.DataFrame(columns), "label"),
        "polars": history(polars.DataFrame(columns), "label"),
        "pyarrow": history(pyarrow.table(columns), "label"),
        "zarr": history(group["x"], group["y"]),
    }
    with h5py.File(folder / "data.h5") as file:
        found["h5py"] = history(file["x"], file["y"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
