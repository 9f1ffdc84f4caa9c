"""Resize chooses the neighbours of ONNX's reference evaluator, also for integer coordinates."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ortrain

COORDINATES = ["half_pixel_symmetric", "half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"]
LENGTHS = [1, 2, 3, 5, 7, 8]
# No product of a float32 scale and a length is slightly less than an integer, so that rounding cannot reach one.
SCALES = [0.5, 0.6, 0.75, 1.25, 1.5, 2.0, 2.5, 3.3]
SIZES = [1, 2, 3, 5, 9, 14]


@pytest.mark.parametrize("mode", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_neighbours(coordinates: str, mode: str) -> None:
    compared = 0
    for length in LENGTHS:
        x = np.arange(length, dtype=np.float32)
        chosen = [("scales", np.array([scale], np.float32)) for scale in SCALES if length * scale >= 1]
        chosen += [("sizes", np.array([size])) for size in SIZES]
        for name, values in chosen:
            inputs = ["x", "", name] if name == "scales" else ["x", "", "", name]
            node = helper.make_node(
                "Resize",
                inputs,
                ["y"],
                mode="nearest",
                nearest_mode=mode,
                coordinate_transformation_mode=coordinates,
            )
            declare = helper.make_tensor_value_info
            graph = helper.make_graph(
                [node],
                "graph",
                [declare("x", TensorProto.FLOAT, [length])],
                [declare("y", TensorProto.FLOAT, None)],
                [numpy_helper.from_array(values, name)],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
            (want,) = ReferenceEvaluator(model).run(None, {"x": x})
            (got,) = ortrain.InferenceSession(model.SerializeToString()).run(None, {"x": x})
            np.testing.assert_array_equal(got, want, err_msg=f"{length} {name} {values}", strict=True)
            compared += 1
    assert compared > 70
