"""Runs of onnxruntime-training 1.15.0 on the graphs of tests/classic_runs.py: train_graphs.py FILE.npz.

`build/classic-oracle/venv/bin/python tests/classic_oracle/train_graphs.py tests/data/classic/train-1.15.0.npz` renews
the record that CI compares with.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent.parent))
import classic_runs

# Fatal messages only: the log has a line for each accepted attribute.
onnxruntime.set_default_logger_severity(4)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
# By default the release computes with other weights than its state. Kernels use weights that were packed when the
# session was created. Convolutions use the weights of that time in their own layout (with all optimizations). In the
# default order an optimizer changes a weight before the gradients of earlier layers are computed.
options.add_session_config_entry("session.disable_prepacking", "1")
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
found = classic_runs.train_all(onnxruntime, options)
np.savez_compressed(sys.argv[1], **found)
print(len(found))
