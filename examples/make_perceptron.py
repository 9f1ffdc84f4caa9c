"""Write perceptron.onnx: 64 inputs, 96 hidden units with Relu, 10 classes, He initialization, untrained."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INPUTS, HIDDEN, CLASSES = 64, 96, 10


def perceptron() -> onnx.ModelProto:
    """Returns the model: logits = fc2(relu(fc1(x))), for any batch size."""
    rng = np.random.default_rng(0)

    def weights(outputs: int, inputs: int) -> np.ndarray:
        return np.asarray(rng.standard_normal((outputs, inputs)) * np.sqrt(2 / inputs), np.float32)

    parameters = {
        "fc1.weight": weights(HIDDEN, INPUTS),
        "fc1.bias": np.zeros(HIDDEN, np.float32),
        "fc2.weight": weights(CLASSES, HIDDEN),
        "fc2.bias": np.zeros(CLASSES, np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["fc1"], "fc1", transB=1),
            helper.make_node("Relu", ["fc1"], ["hidden"], "relu"),
            helper.make_node("Gemm", ["hidden", "fc2.weight", "fc2.bias"], ["logits"], "fc2", transB=1),
        ],
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    onnx.save(perceptron(), Path(__file__).with_name("perceptron.onnx"))
