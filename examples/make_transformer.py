"""Write transformer.onnx: an untrained text classifier on bytes, with two attention layers.

Attention has the nodes that exporters write: products, a scale, an added mask, a softmax.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

TOKENS, LENGTH, WIDTH, HEADS, LAYERS, CLASSES = 256, 32, 32, 2, 2, 2


def transformer() -> onnx.ModelProto:
    """Returns the model: logits = head(mean(layer2(layer1(embedding(tokens))))), for any batch size and length."""
    rng = np.random.default_rng(0)
    initializers: dict[str, np.ndarray] = {}
    nodes: list[NodeProto] = []

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def constant(name: str, value: object, kind: type[np.generic]) -> str:
        initializers[name] = np.asarray(value, kind)
        return name

    def dense(name: str, x: str, inputs: int, outputs: int) -> str:
        bound = np.sqrt(1 / inputs)
        weight = constant(f"{name}.weight", rng.uniform(-bound, bound, (inputs, outputs)), np.float32)
        bias = constant(f"{name}.bias", np.zeros(outputs), np.float32)
        return node("Add", [node("MatMul", [x, weight], f"{name}/product"), bias], name)

    def norm(name: str, x: str) -> str:
        scale = constant(f"{name}.weight", np.ones(WIDTH), np.float32)
        bias = constant(f"{name}.bias", np.zeros(WIDTH), np.float32)
        return node("LayerNormalization", [x, scale, bias], name, axis=-1)

    def heads(name: str, x: str, order: list[int]) -> str:
        split = node("Reshape", [x, "split_heads"], f"{name}/split")
        return node("Transpose", [split], f"{name}/heads", perm=order)

    def layer(name: str, x: str) -> str:
        h = norm(f"{name}.norm1", x)
        query, key, value = (dense(f"{name}.{part}", h, WIDTH, WIDTH) for part in ("query", "key", "value"))
        scores = node(
            "MatMul",
            [heads(query, query, [0, 2, 1, 3]), heads(key, key, [0, 2, 3, 1])],
            f"{name}/scores",
        )
        scaled = node("Mul", [scores, "scale"], f"{name}/scaled")
        masked = node("Add", [scaled, "added_mask"], f"{name}/masked")
        weights = node("Softmax", [masked], f"{name}/weights", axis=-1)
        seen = node("MatMul", [weights, heads(value, value, [0, 2, 1, 3])], f"{name}/seen")
        turned = node("Transpose", [seen], f"{name}/turned", perm=[0, 2, 1, 3])
        joined = node("Reshape", [turned, "join_heads"], f"{name}/joined")
        x = node("Add", [x, dense(f"{name}.output", joined, WIDTH, WIDTH)], f"{name}/attended")
        hidden = node("Relu", [dense(f"{name}.fc1", norm(f"{name}.norm2", x), WIDTH, 2 * WIDTH)], f"{name}/hidden")
        return node("Add", [x, dense(f"{name}.fc2", hidden, 2 * WIDTH, WIDTH)], f"{name}/result")

    constant("split_heads", [0, 0, HEADS, WIDTH // HEADS], np.int64)
    constant("join_heads", [0, 0, WIDTH], np.int64)
    constant("scale", (WIDTH // HEADS) ** -0.5, np.float32)
    constant("one", 1, np.float32)
    constant("hidden_score", -1e4, np.float32)
    constant("start", 0, np.int64)
    constant("step", 1, np.int64)
    constant("mask_axes", [1, 2], np.int64)
    constant("last_axis", [2], np.int64)
    constant("length_axis", [1], np.int64)

    # Bias of a score: 0, or a large negative number for padding, so that a padded position gets no weight.
    hidden = node("Sub", ["one", "mask"], "padding")
    node("Unsqueeze", [node("Mul", [hidden, "hidden_score"], "padding/score"), "mask_axes"], "added_mask")

    words = constant("embedding.tokens", rng.normal(0, 0.1, (TOKENS, WIDTH)), np.float32)
    places = constant("embedding.positions", rng.normal(0, 0.1, (LENGTH, WIDTH)), np.float32)
    shape = node("Shape", ["tokens"], "tokens/shape", start=1, end=2)
    length = node("Squeeze", [shape], "tokens/length")
    positions = node("Range", ["start", length, "step"], "positions")
    h = node("Add", [node("Gather", [words, "tokens"], "words"), node("Gather", [places, positions], "places")], "h")
    for number in range(LAYERS):
        h = layer(f"layer{number + 1}", h)

    # Mean over the positions without padding.
    weight = node("Unsqueeze", ["mask", "last_axis"], "mask/column")
    total = node("ReduceSum", [node("Mul", [norm("norm", h), weight], "kept"), "length_axis"], "total", keepdims=0)
    count = node("ReduceSum", ["mask", "length_axis"], "count", keepdims=1)
    mean = node("Div", [total, count], "mean")
    dense("head", mean, WIDTH, CLASSES)
    nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        nodes,
        "transformer",
        [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", "length"]),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    onnx.save(transformer(), Path(__file__).with_name("transformer.onnx"))
