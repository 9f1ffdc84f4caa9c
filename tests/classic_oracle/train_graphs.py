"""Runs of onnxruntime-training 1.15.0 on the graphs of tests/classic_runs.py: train_graphs.py FILE.npz.

`build/classic-oracle/venv/bin/python tests/classic_oracle/train_graphs.py tests/data/classic/train-1.15.0.npz` records
anew what CI compares with.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent.parent))
import classic_runs

# Fatal messages only: the log has a line for each attribute that it takes.
onnxruntime.set_default_logger_severity(4)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
# By default the release computes with weights that are not those of its state: kernels go on with what they packed when
# the session was made, convolutions with the weights that they had then, in a layout of their own (all optimizations);
# and in the default order an optimizer changes a weight before the gradient of what lies before it is computed.
options.add_session_config_entry("session.disable_prepacking", "1")
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
found = classic_runs.train_all(onnxruntime, options)
np.savez_compressed(sys.argv[1], **found)
print(len(found))
