"""Results of onnxruntime-training for the nodes of training_nodes.py: record_nodes.py FILE.

Prints a line of JSON: the cases that onnxruntime-training does not run, with its messages.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent.parent))
from training_nodes import nodes

options = onnxruntime.SessionOptions()
options.log_severity_level = 4
record, refused = {}, {}
for node in nodes():
    feeds = node.feeds()
    try:
        session = onnxruntime.InferenceSession(
            node.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results = session.run(None, feeds)
    except Exception as error:
        refused[node.key] = str(error)
        continue
    record |= {f"{node.key}/input/{name}": value for name, value in feeds.items()}
    record |= {
        f"{node.key}/output/{value.name}": result for value, result in zip(session.get_outputs(), results, strict=True)
    }
np.savez_compressed(sys.argv[1], **record)
print(json.dumps(refused))
