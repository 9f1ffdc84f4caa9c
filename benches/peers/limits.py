"""Measures the current limits of the machine with ortrain's profiler: limits.py FOLDER OWN THREADS.

FOLDER and OWN are the folders of a workload after `on_device.py ortrain make`. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ortrain import SessionOptions
from ortrain.api import CheckpointState, Module


def main() -> None:
    """Profiles a step of a small network, because the profile includes the limits of the machine."""
    folder, own, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    options = SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(own / "checkpoint")
    module = Module(own / "training_model.onnx", state, session_options=options)
    with np.load(folder / "batches.npz") as stored:
        profile = module.profile(stored["x0"], stored["labels0"], steps=1)
    print(json.dumps({"flops": profile.flops_limit, "bandwidth": profile.bandwidth_limit}))


if __name__ == "__main__":
    main()
