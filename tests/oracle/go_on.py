"""Continue from a checkpoint in onnxruntime-training: go_on.py ARTIFACTS CHECKPOINT CASE SAVED RATE.

Saves to SAVED with the state of the optimizer.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import batches_of, load_api

artifacts, checkpoint, case, saved, rate = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]
api = load_api("onnxruntime.training.api")
state = api.CheckpointState.load_checkpoint(checkpoint)
module = api.Module(str(artifacts / "training_model.onnx"), state, str(artifacts / "eval_model.onnx"))
optimizer = api.Optimizer(str(artifacts / "optimizer_model.onnx"), module)
losses = []
for batch in batches_of(case):
    optimizer.set_learning_rate(float(rate))
    losses.append(float(module(*[batch[name] for name in module.input_names()])))
    optimizer.step()
    module.lazy_reset_grad()
api.CheckpointState.save_checkpoint(state, saved, include_optimizer_state=True)
parameters = {name: parameter.data.tolist() for name, parameter in state.parameters}
print(json.dumps({"losses": losses, "parameters": parameters, "properties": dict(state.properties)}))
