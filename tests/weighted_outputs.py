"""A loss for any model: the weighted sum of its outputs, with a fixed weight for each element."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, helper

__all__ = ["LOSS", "add_loss"]

LOSS = "the loss"


def add_loss(graph: GraphProto, weighted: Iterable[tuple[str, str]], dtype: int) -> None:
    """Make the sum of weighted results the only output of a graph.

    Args:
        graph: the graph, which is changed.
        weighted: pairs of a result and its weights, an input or initializer of the same shape.
        dtype: the type of the results and of the loss, of ``TensorProto``.
    """
    sums = []
    for result, weights in weighted:
        product, total = f"{result} times {weights}", f"sum of {result} times {weights}"
        graph.node.append(helper.make_node("Mul", [result, weights], [product]))
        graph.node.append(helper.make_node("ReduceSum", [product], [total], keepdims=0))
        sums.append(total)
    graph.node.append(helper.make_node("Sum", sums, [LOSS]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, dtype, []))
