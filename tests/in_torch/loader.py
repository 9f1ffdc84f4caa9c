"""Training by ``fit`` from a DataLoader: `loader.py PACKAGES` prints the history of each case as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

packages = sys.argv[1]
sys.path.insert(0, packages)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import ortrain  # noqa: E402

ROWS, BATCH, EPOCHS = 40, 12, 2


def history(x: Any, y: Any = None, **settings: Any) -> dict[str, list[float]]:
    model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"], device="cpu")
    return dict(model.fit(x, y, epochs=EPOCHS, shuffle=False, verbose=0, **settings))


def by_name(rows: list[Any]) -> dict[str, Any]:
    """Return a batch as a dict, as the collators of transformers do."""
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


def main() -> None:
    """Print the histories."""
    rng = np.random.default_rng(0)
    x, y = rng.random((ROWS, 64), np.float32), rng.integers(0, 10, ROWS)
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loaders = {
        "loader": DataLoader(rows, BATCH),
        "workers": DataLoader(rows, BATCH, num_workers=2, multiprocessing_context="spawn"),
        "dicts": DataLoader(rows, BATCH, collate_fn=by_name),
    }
    found = {"arrays": history(x, y, batch_size=BATCH)}
    found |= {name: history(loader) for name, loader in loaders.items()}
    found["tensors"] = history(torch.from_numpy(x), torch.from_numpy(y), batch_size=BATCH)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
