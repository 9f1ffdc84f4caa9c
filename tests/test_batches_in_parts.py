"""Large batches in parts: frozen layers and evaluations compute a few images at a time.

The results equal the results of single images.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ortrain

IMAGES, WIDE, SIZE = 4, 64, 96
# Rounding of sums of a few products in float32.
TOLERANCE = 1e-6


def model() -> onnx.ModelProto:
    """Return an inverted residual block.

    A pointwise convolution expands the channels, a depthwise one follows, and another pointwise one projects back. Its
    result is added to the input.
    """
    rng = np.random.default_rng(1)
    shapes = {"expand": (WIDE, 3, 1, 1), "depthwise": (WIDE, 1, 3, 3), "project": (3, WIDE, 1, 1), "bias": (WIDE,)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32) * np.float32(0.3), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "expand", "bias"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "depthwise", "bias"], ["c"], pads=[1, 1, 1, 1], group=WIDE),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "project"], ["e"]),
        helper.make_node("Add", ["e", "x"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, SIZE, SIZE]) for name in "xy"]
    graph = helper.make_graph(nodes, "block", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_parts_of_a_batch() -> None:
    data = model().SerializeToString()
    wide = 4 * IMAGES * WIDE * SIZE * SIZE
    plan = ortrain.dump(data, "program", {"x": [IMAGES, 3, SIZE, SIZE]})
    work = int(plan.split(" buffers, work ")[1].split()[0])
    assert work < 1.5 * wide  # without parts, two such buffers would be live at once
    session = ortrain.InferenceSession(data)
    x = np.random.default_rng(0).standard_normal((IMAGES, 3, SIZE, SIZE), np.float32)
    (together,) = session.run(None, {"x": x})
    alone = [session.run(None, {"x": image[None]})[0] for image in x]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=TOLERANCE, atol=TOLERANCE)
