"""Try an optimizer model on a checkpoint in onnxruntime-training.

``try_optimizer.py TRAINING OPTIMIZER CHECKPOINT CASE SAVED``; the first two arguments are models. Takes a step on each
batch of the case, then saves to SAVED with the state of the optimizer. Prints losses and parameters, or the failing
call and its error.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import batches_of, load_api

training, optimizer_model, checkpoint, case, saved = sys.argv[1:]
api = load_api("onnxruntime.training.api")
call = "load_checkpoint"
try:
    state = api.CheckpointState.load_checkpoint(checkpoint)
    call = "Module"
    module = api.Module(training, state)
    call = "Optimizer"
    optimizer = api.Optimizer(optimizer_model, module)
    call = "step"
    losses = []
    for batch in batches_of(Path(case)):
        losses.append(float(module(*[batch[name] for name in module.input_names()])))
        optimizer.step()
        module.lazy_reset_grad()
    call = "save_checkpoint"
    api.CheckpointState.save_checkpoint(state, saved, include_optimizer_state=True)
except Exception as error:
    print(json.dumps({"call": call, "error": f"{type(error).__name__}: {error}"}))
else:
    parameters = {name: parameter.data.tolist() for name, parameter in state.parameters}
    print(json.dumps({"losses": losses, "parameters": parameters}))
