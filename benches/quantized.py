"""Times of quantized operators beside onnxruntime's processor kernels.

    python benches/quantized.py                 all cases
    python benches/quantized.py MatMulNBits     cases with this text in their name
    taskset --cpu-list 0 python benches/quantized.py     on one core

Each case is a model of one operator with random weights. Both libraries run it in turns on the same input. A line shows
the least time of each library, and the ratio of ortrain's time to onnxruntime's time. Install onnxruntime first.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    import onnx

OPSET = 21
# Rows of activations: one token, a short text, a batch of texts.
ROWS = (1, 32, 512)
# Rows and columns of the weights of a decoder.
SIDES = ((1024, 1024), (4096, 4096))
BLOCK = 32
# Input channels, output channels, size of the kernel, height and width of the image.
CONVOLUTIONS = ((64, 64, 3, 56), (128, 128, 3, 28), (256, 512, 1, 14))
# Seconds for one case in both libraries together.
SECONDS = 2.0


@dataclass(frozen=True)
class Case:
    """Model of one operator, and its input."""

    name: str
    model: onnx.ModelProto
    x: np.ndarray[Any, Any]


def model_of(
    nodes: list[onnx.NodeProto], x: np.ndarray[Any, Any], result: int, weights: dict[str, Any]
) -> onnx.ModelProto:
    """Makes a model from ``x`` to ``y``."""
    of_x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    of_y = helper.make_tensor_value_info("y", result, None)
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "case", [of_x], [of_y], tensors)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def cases() -> Iterator[Case]:
    """Makes all cases."""
    random = np.random.default_rng(0)
    for inner, outer in SIDES:
        bytes_of_weights = random.integers(0, 256, (outer, inner // BLOCK, BLOCK // 2), np.uint8)
        scales = random.uniform(0.01, 0.03, outer * inner // BLOCK).astype(np.float32)
        integers = random.integers(-127, 128, (inner, outer), np.int8)
        for rows in ROWS:
            floats = random.standard_normal((rows, inner), np.float32)
            node = helper.make_node(
                "MatMulNBits",
                ["x", "b", "s"],
                ["y"],
                domain="com.microsoft",
                K=inner,
                N=outer,
                bits=4,
                block_size=BLOCK,
            )
            model = model_of([node], floats, TensorProto.FLOAT, {"b": bytes_of_weights, "s": scales})
            yield Case(f"MatMulNBits {rows} x {inner} x {outer}", model, floats)
            numbers = random.integers(0, 256, (rows, inner), np.uint8)
            node = helper.make_node("MatMulInteger", ["x", "b", "z"], ["y"])
            model = model_of([node], numbers, TensorProto.INT32, {"b": integers, "z": np.uint8(128)})
            yield Case(f"MatMulInteger {rows} x {inner} x {outer}", model, numbers)
    for channels, filters, size, side in CONVOLUTIONS:
        image = random.integers(0, 256, (1, channels, side, side), np.uint8)
        weight = random.integers(-127, 128, (filters, channels, size, size), np.int8)
        names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
        node = helper.make_node("QLinearConv", names, ["y"], pads=[size // 2] * 4)
        values = [np.float32(0.02), np.uint8(128), weight, np.float32(0.01), np.int8(0), np.float32(0.5), np.uint8(128)]
        model = model_of([node], image, TensorProto.UINT8, dict(zip(names[1:], values, strict=True)))
        yield Case(f"QLinearConv {channels} to {filters} channels, {size} x {size}, {side} x {side}", model, image)


def measure(case: Case) -> tuple[float, float]:
    """Returns the least seconds of ortrain and of onnxruntime."""
    import onnxruntime

    import ortrain

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    content = case.model.SerializeToString()
    peer = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    own = ortrain.InferenceSession(content)
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[0]) < 2:
        for session, list_of_times in zip((own, peer), times, strict=True):
            start = time.perf_counter()
            session.run(None, {"x": case.x})
            list_of_times.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="", help="part of the names of cases")
    arguments = parser.parse_args()
    print(f"{'case':48} {'ortrain':>10} {'onnxruntime':>12} {'ratio':>6}")
    for case in cases():
        if arguments.text in case.name:
            own, peer = measure(case)
            print(f"{case.name:48} {own * 1e3:7.2f} ms {peer * 1e3:9.2f} ms {own / peer:6.2f}")


if __name__ == "__main__":
    main()
