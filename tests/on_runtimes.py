"""Small models, and their outputs on ortrain, on onnxruntime and on the evaluator of the onnx package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import ortrain
from ortrain.gradient.utils.onnx_helper import remove_initializer

# Sums of a few dozen terms differ by their order; float32 has 7 digits, float64 has 16.
TOLERANCE: dict[Any, dict[str, float]] = {
    np.float32: {"rtol": 1e-5, "atol": 1e-6},
    np.float64: {"rtol": 1e-12, "atol": 1e-13},
}
# Newest opset that every onnxruntime in the tests reads.
READ_BY_ONNXRUNTIME = 21
# onnxruntime logs errors only: it warns of inputs that have initializers.
_ERRORS = 3


def modelled(text: str, opset: int = 15, **values: Any) -> onnx.ModelProto:
    """Return a model from onnx's text format, with initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> net {text}')
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


def drawn(*shape: int, dtype: npt.DTypeLike = np.float64, seed: int = 0) -> npt.NDArray[Any]:
    """Return normally distributed numbers that depend on the seed and the shape only."""
    return np.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype)


def names(entries: Iterable[Any]) -> list[str]:
    """Return the names of inputs, outputs or initializers."""
    return [entry.name for entry in entries]


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ours(model: onnx.ModelProto, feeds: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs on ortrain.

    Initializers are constants there, so that initializers with a feed are removed.
    """
    for name in names(model.graph.initializer):
        if name in feeds:
            model = remove_initializer(model, name)
    outputs = names(model.graph.output)
    return dict(zip(outputs, ortrain.InferenceSession(model).run(None, feeds), strict=True))


def everywhere(model: onnx.ModelProto, feeds: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a valid model, after asserting that all three runtimes agree."""
    checked(model)
    found = ours(model, feeds)
    outputs = list(found)
    others = [ReferenceEvaluator(model).run(outputs, feeds)]
    if next(entry.version for entry in model.opset_import if not entry.domain) <= READ_BY_ONNXRUNTIME:
        others.append(session(model).run(outputs, feeds))
    for values in others:
        for name, value in zip(outputs, values, strict=True):
            assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape), name
            tolerance = TOLERANCE.get(value.dtype.type, {"rtol": 0})
            np.testing.assert_allclose(value, found[name], **tolerance, err_msg=name)
    return found


def checked(model: onnx.ModelProto) -> None:
    """Run the checker and shape inference on a model.

    The checker requires a number of axes: inputs and outputs without a shape are checked with two.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in [*copy.graph.input, *copy.graph.output]:
        if not entry.type.tensor_type.HasField("shape"):
            entry.type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * 2)
    onnx.checker.check_model(copy, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
