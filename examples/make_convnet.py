"""Write convnet.onnx: three convolutions on 8 x 8 images, each with BatchNormalization and Relu, He initialization.

The file resembles an exported inference network: BatchNormalization has no training attributes.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

SIZE, CHANNELS, CLASSES = 8, (1, 16, 32, 64), 10


def convnet() -> onnx.ModelProto:
    """Returns the model: logits = fc(pool(block3(pool(block2(block1(x)))))), for any batch size."""
    rng = np.random.default_rng(0)
    parameters: dict[str, np.ndarray] = {}
    nodes: list[NodeProto] = []

    def weights(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:])), np.float32)

    def block(name: str, x: str, inputs: int, outputs: int) -> str:
        """Adds Conv (without a bias, which has no effect here), BatchNormalization and Relu."""
        parameters[f"{name}.weight"] = weights(outputs, inputs, 3, 3)
        norm = {"scale": 1, "bias": 0, "mean": 0, "var": 1}
        parameters.update({f"{name}.{key}": np.full(outputs, value, np.float32) for key, value in norm.items()})
        nodes.extend(
            [
                helper.make_node("Conv", [x, f"{name}.weight"], [f"{name}.conv"], f"{name}.conv", pads=[1, 1, 1, 1]),
                helper.make_node(
                    "BatchNormalization",
                    [f"{name}.conv", *[f"{name}.{key}" for key in norm]],
                    [f"{name}.norm"],
                    f"{name}.norm",
                ),
                helper.make_node("Relu", [f"{name}.norm"], [f"{name}.relu"], f"{name}.relu"),
            ]
        )
        return f"{name}.relu"

    def pool(name: str, x: str) -> str:
        nodes.append(helper.make_node("MaxPool", [x], [name], name, kernel_shape=[2, 2], strides=[2, 2]))
        return name

    first, second, third, last = CHANNELS
    h = block("block1", "x", first, second)
    h = pool("pool1", block("block2", h, second, third))
    h = pool("pool2", block("block3", h, third, last))
    features = last * (SIZE // 4) ** 2
    parameters |= {"fc.weight": weights(CLASSES, features), "fc.bias": np.zeros(CLASSES, np.float32)}
    nodes.append(helper.make_node("Flatten", [h], ["features"], "flatten"))
    nodes.append(helper.make_node("Gemm", ["features", "fc.weight", "fc.bias"], ["logits"], "fc", transB=1))
    graph = helper.make_graph(
        nodes,
        "convnet",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", first, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in parameters.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    onnx.save(convnet(), Path(__file__).with_name("convnet.onnx"))
