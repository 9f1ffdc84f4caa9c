"""Gradient graphs of onnxruntime-training for the node cases of its onnx: gradient_graphs.py FOLDER.

At most ten cases of each operator: gradients are with respect to the float32 inputs, the loss is the sum of the float32
outputs times fixed numbers. Writes forward.onnx, gradient.onnx and io.npz to a folder for each case with a graph that
runs. Prints the number of tried cases and the names of failed ones.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnxruntime.capi._pybind_state import GradientGraphBuilder

MAX_CASES = 10
# Oldest and newest opset. A case of an older opset uses the oldest one here, which has the same operator version.
OPSETS = (17, 21)

options = onnxruntime.SessionOptions()
options.log_severity_level = 4
onnxruntime.set_default_logger_severity(4)


def with_loss(case):
    """Return the case with a loss, its inputs by name, and the float inputs; None without floats to differentiate."""
    model = type(case.model)()
    model.CopyFrom(case.model)
    graph = model.graph
    inputs, outputs = case.data_sets[0]
    if not all(isinstance(value, np.ndarray) or np.isscalar(value) for value in [*inputs, *outputs]):
        return None
    feeds = {info.name: np.asarray(value) for info, value in zip(graph.input, inputs, strict=True)}
    wanted = [info.name for info in graph.input if feeds[info.name].dtype == np.float32 and feeds[info.name].size]
    rng = np.random.default_rng(1)
    parts = []
    for info, value in zip(list(graph.output), outputs, strict=True):
        value = np.asarray(value)
        if value.dtype != np.float32 or not value.size or not np.isfinite(value).all():
            continue
        weights = rng.uniform(0.5, 1.5, value.shape).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(weights, info.name + "_weights"))
        graph.node.append(helper.make_node("Mul", [info.name, info.name + "_weights"], [info.name + "_weighed"]))
        graph.node.append(helper.make_node("ReduceSum", [info.name + "_weighed"], [info.name + "_part"], keepdims=0))
        parts.append(info.name + "_part")
    if not wanted or not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        graph.node.append(helper.make_node("Add", [total, part], [total + "_and"]))
        total += "_and"
    graph.node.append(helper.make_node("Identity", [total], ["the_loss"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("the_loss", TensorProto.FLOAT, []))
    return model, feeds, wanted


def fixed(forward, feeds, names):
    """Return the model with all other inputs as initializers: some gradients need constants."""
    model = type(forward)()
    model.CopyFrom(forward)
    kept = [info for info in forward.graph.input if info.name in names]
    others = [info.name for info in forward.graph.input if info.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in others)
    return model


tried, failed, seen = 0, [], Counter()
for case in sorted(collect_testcases(""), key=lambda case: case.name):
    opset = {item.domain: item.version for item in case.model.opset_import}
    single = len(case.model.graph.node) == 1 and "_expanded" not in case.name and not case.model.functions
    if not single or set(opset) != {""} or opset[""] > OPSETS[1]:
        continue
    case.model.opset_import[0].version = max(opset[""], OPSETS[0])
    operator = case.model.graph.node[0].op_type
    if seen[operator] == MAX_CASES:
        continue
    try:
        made = with_loss(case)
    except (TypeError, ValueError):
        made = None
    if made is None:
        continue
    forward, feeds, wanted = made
    tried += 1
    gradients = {}
    # An input without a gradient prevents the gradients of others, so inputs are also tried one at a time.
    for names in [wanted, *([name] for name in wanted if len(wanted) > 1)]:
        given = {name: value for name, value in feeds.items() if name in names}
        model = fixed(forward, feeds, names)
        try:
            builder = GradientGraphBuilder(model.SerializeToString(), {"the_loss"}, set(names), "the_loss", options)
            builder.build()
            graph = builder.get_model()
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            outputs = [output.name for output in session.get_outputs()]
            results = dict(zip(outputs, session.run(None, given), strict=True))
        except Exception:
            continue
        folder = Path(sys.argv[1]) / case.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "forward.onnx").write_bytes(model.SerializeToString())
        (folder / "gradient.onnx").write_bytes(graph)
        arrays = {f"in/{name}": value for name, value in given.items()}
        np.savez(folder / "io.npz", **arrays, **{f"out/{name}": value for name, value in results.items()})
        gradients = results
        seen[operator] += 1
        break
    if not gradients:
        failed.append(case.name)
print(json.dumps({"tried": tried, "failed": failed}))
