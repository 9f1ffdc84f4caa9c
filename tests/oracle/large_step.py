"""Continue from a large checkpoint in onnxruntime-training: large_step.py FOLDER CHECKPOINT FEEDS.

One training step and one of the optimizer. Prints the loss and the rows that the step changed.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import load_api

api = load_api("onnxruntime.training.api")
folder, checkpoint = Path(sys.argv[1]), sys.argv[2]
state = api.CheckpointState.load_checkpoint(checkpoint)
module = api.Module(str(folder / "training_model.onnx"), state)
optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
with np.load(sys.argv[3]) as feeds:
    given = {name: feeds[name] for name in feeds.files}
loss = float(module(*[given[name] for name in module.input_names()]))
optimizer.step()
rows = state.parameters["table"].data[given["ids"]]
print(json.dumps({"loss": loss, "rows": rows.tolist()}))
