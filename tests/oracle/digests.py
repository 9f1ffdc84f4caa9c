"""Contents that onnxruntime-training reads from a checkpoint: digests.py CHECKPOINT [COPY].

Prints a digest of the bytes of each parameter. With COPY it also saves the state there.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import load_api

api = load_api("onnxruntime.training.api")
state = api.CheckpointState.load_checkpoint(sys.argv[1])
digests = {name: hashlib.blake2b(parameter.data.data).hexdigest() for name, parameter in state.parameters}
for copy in sys.argv[2:]:
    api.CheckpointState.save_checkpoint(state, copy)
print(json.dumps(digests))
