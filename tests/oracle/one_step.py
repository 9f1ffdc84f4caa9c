"""One training step in onnxruntime-training: one_step.py FOLDER..., each with artifacts and feeds.npz.

Prints the loss, and for each parameter its gradient or, for an untrained parameter, its new value.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import load_api

api = load_api("onnxruntime.training.api")
found = {}
for folder in map(Path, sys.argv[1:]):
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    with np.load(folder / "feeds.npz") as feeds:
        results = module(*[feeds[name] for name in module.input_names()])
    loss = float(results[0] if isinstance(results, list | tuple) else results)
    outcomes = {name: p.grad if p.requires_grad else p.data for name, p in state.parameters}
    found[folder.name] = {"loss": loss, "outcomes": {name: array.tolist() for name, array in outcomes.items()}}
print(json.dumps(found))
