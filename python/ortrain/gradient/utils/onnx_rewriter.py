"""Replacement of nodes in a model (``onnxcustom.utils.onnx_rewriter``).

>>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
>>> from ortrain.gradient.utils.onnx_rewriter import unreduced_onnx_loss
>>> scores = unreduced_onnx_loss(function_onnx_graph("square_error"))
>>> [value.name for value in scores.graph.output]
['score']
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper, shape_inference

from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.gradient.utils._graphs import (
    checked_model,
    model_like,
    names_of,
    needed_nodes,
    operators_of,
    rename_in,
    subgraphs,
    unique_name,
)

__all__ = ["onnx_rewrite_operator", "unreduced_onnx_loss"]

# Alias with the name that scripts use.
_unique_name = unique_name


def unreduced_onnx_loss(onx: onnx.ModelProto, output_name: str = "score") -> onnx.ModelProto:
    """Returns the model of a loss without its sum: the summed terms become the only output, one row per observation.

    Nodes after the sum, such as a factor, are removed, and so are unused inputs.

    Args:
        onx: a model with exactly one reduction, a ``ReduceSum`` or a ``ReduceSumSquare``; its gradient may be another
            output. The model is not changed.
        output_name: the name of the output; a number is appended if the model already has a value of this name.

    Returns:
        A model with an output of shape ``[None, 1]``, or with the number of columns if it is known.

    Raises:
        OrtrainError: for a model without a reduction, or with more than one.
        UnsupportedError: for a reduction other than a sum.
        TypeError: for an argument that is not a model.

    Source: ``onnxcustom.utils.onnx_rewriter.unreduced_onnx_loss``.

    >>> import ortrain
    >>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
    >>> from ortrain.gradient.utils.onnx_rewriter import unreduced_onnx_loss
    >>> session = ortrain.InferenceSession(unreduced_onnx_loss(function_onnx_graph("grad_loss_square_error")))
    >>> session.run(["score"], {"X1": np.float32([[1], [2]]), "X2": np.float32([[4], [2.5]])})
    [array([[9.  ],
           [0.25]], dtype=float32)]

    """
    graph = checked_model(onx).graph
    found = [node for node in graph.node if node.op_type.startswith("Reduce")]
    if len(found) != 1:
        named = ", ".join(f"{node.op_type} {node.name or node.output[0]!r}" for node in found) or "none"
        raise OrtrainError(f"the loss must have exactly one reduction, a ReduceSum or a ReduceSumSquare, got: {named}")
    (reduction,) = found
    if reduction.op_type not in ("ReduceSum", "ReduceSumSquare"):
        raise UnsupportedError(
            f"node {reduction.name or reduction.output[0]!r} is a {reduction.op_type}, which cannot be removed; only "
            "ReduceSum and ReduceSumSquare are supported"
        )
    terms = reduction.input[0]
    nodes, needed = needed_nodes(graph.node, [terms])
    name = unique_name(names_of(graph) - {output_name} | needed, output_name)
    if reduction.op_type == "ReduceSum":
        nodes.append(helper.make_node("Identity", [terms], [name]))
    else:
        nodes.append(helper.make_node("Mul", [terms, terms], [name]))
    element_type, columns = _terms(onx, terms)
    unreduced_graph = helper.make_graph(
        nodes,
        graph.name,
        [entry for entry in graph.input if entry.name in needed],
        [helper.make_tensor_value_info(name, element_type, [None, columns])],
        [entry for entry in graph.initializer if entry.name in needed],
        doc_string=graph.doc_string,
        sparse_initializer=[entry for entry in graph.sparse_initializer if entry.values.name in needed],
    )
    return model_like(onx, unreduced_graph)


def _terms(model: onnx.ModelProto, name: str) -> tuple[int, int]:
    """Returns the element type of the summed terms, and the number of columns: 1 if it is unknown."""
    graph = shape_inference.infer_shapes(model).graph
    for entry in [*graph.value_info, *graph.input]:
        kind = entry.type.tensor_type
        if entry.name == name:
            dims = kind.shape.dim
            return kind.elem_type, dims[1].dim_value if len(dims) == 2 and dims[1].HasField("dim_value") else 1
    return graph.output[0].type.tensor_type.elem_type, 1


def onnx_rewrite_operator(
    onx: onnx.ModelProto,
    op_type: str,
    sub_onx: onnx.ModelProto,
    recursive: bool = True,
    debug_info: object = None,
) -> onnx.ModelProto:
    """Returns a model in which the nodes of another model replace each node of an operator.

    Args:
        onx: the model; it is not changed.
        op_type: the operator.
        sub_onx: the replacement: a model with the same number of inputs and outputs as each node, in the same order.
        recursive: True to also replace nodes in subgraphs (of ``If``, ``Loop``, ``Scan``).
        debug_info: accepted for compatibility with the reference; it has no effect.

    Raises:
        InvalidArgumentError: for a node with a different number of inputs or outputs. Also if an operator of
            ``sub_onx`` has another definition in the opset of ``onx``.
        TypeError: for an argument that is not a model.

    Source: ``onnxcustom.utils.onnx_rewriter.onnx_rewrite_operator``.

    >>> from onnx import parser
    >>> from ortrain.gradient.utils.onnx_rewriter import onnx_rewrite_operator
    >>> head = '<ir_version: 8, opset_import: ["": 15]> g (float[n] x) => (float[n] y)'
    >>> inverse = parser.parse_model(head + "{ y = Reciprocal(x) }")
    >>> quotient = parser.parse_model(head + " <float one = {1}> { y = Div(one, x) }")
    >>> made = onnx_rewrite_operator(inverse, "Reciprocal", quotient)
    >>> [(node.op_type, list(node.input)) for node in made.graph.node]
    [('Div', ['one', 'x'])]

    """
    copy = onnx.ModelProto()
    copy.CopyFrom(checked_model(onx))
    imports = _imports(copy, checked_model(sub_onx, "sub_onx"))
    _replace(copy.graph, op_type, sub_onx.graph, names_of(copy.graph), recursive)
    copy.opset_import.extend(imports)
    return copy


def _imports(model: onnx.ModelProto, sub: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    """Returns the opset imports that a model needs in addition, so that the operators of ``sub`` keep their meaning."""
    there = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    here = {entry.domain or "ai.onnx": entry.version for entry in sub.opset_import}
    for node in operators_of(sub.graph.node):
        domain = node.domain or "ai.onnx"
        if domain not in here or domain not in there or here[domain] == there[domain]:
            continue
        versions = [_since(node, version[domain]) for version in (here, there)]
        if None in versions or versions[0] != versions[1]:
            raise InvalidArgumentError(
                f"operator {node.op_type} of sub_onx has version {here[domain]} of {domain}, which differs from "
                f"version {there[domain]} of the model; write sub_onx for that version"
            )
    return [entry for entry in sub.opset_import if (entry.domain or "ai.onnx") not in there]


def _since(node: onnx.NodeProto, version: int) -> int | None:
    """Returns the opset version that introduced the definition of an operator at ``version``."""
    try:
        return int(
            onnx.defs.get_schema(node.op_type, version, "" if node.domain == "ai.onnx" else node.domain).since_version
        )
    except onnx.defs.SchemaError:
        return None


def _replace(
    graph: onnx.GraphProto, op_type: str, sub: onnx.GraphProto, existing_names: set[str], recursive: bool
) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if recursive:
            for inner in subgraphs(node):
                _replace(inner, op_type, sub, existing_names, recursive)
        if node.op_type != op_type:
            nodes.append(node)
            continue
        initializers, replacement = _instance(node, sub, existing_names)
        graph.initializer.extend(initializers)
        nodes.extend(replacement)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _instance(
    node: onnx.NodeProto, sub: onnx.GraphProto, existing_names: set[str]
) -> tuple[list[onnx.TensorProto], list[onnx.NodeProto]]:
    """Returns the initializers and nodes of a graph that replace one node."""
    initializers = {entry.name for entry in sub.initializer}
    inputs = [entry.name for entry in sub.input if entry.name not in initializers]
    outputs = [entry.name for entry in sub.output]
    label = node.name or (node.output[0] if node.output else "")
    _same_number(node.input, inputs, f"{node.op_type} {label!r}", "inputs")
    _same_number(node.output, outputs, f"{node.op_type} {label!r}", "outputs")
    # Omitted inputs and outputs of a node have an empty name.
    new = dict(zip(inputs, node.input, strict=True))
    node_outputs = {name for inner in sub.node for name in inner.output}
    results = {ours: theirs for ours, theirs in zip(outputs, node.output, strict=True) if theirs}
    new |= {ours: theirs for ours, theirs in results.items() if ours in node_outputs}
    for name in [*(entry.name for entry in sub.initializer), *sorted(names_of(sub))]:
        if name not in new:
            new[name] = unique_name(existing_names, name)
    constants = [onnx.TensorProto.FromString(entry.SerializeToString()) for entry in sub.initializer]
    for constant in constants:
        constant.name = new[constant.name]
    nodes = [onnx.NodeProto.FromString(inner.SerializeToString()) for inner in sub.node]
    for inner in nodes:
        rename_in(inner, new)
        if inner.name:
            inner.name = f"{label}/{inner.name}" if label else inner.name
    # Outputs that are also inputs or initializers of the replacement.
    nodes += [
        helper.make_node("Identity", [new[ours]], [theirs])
        for ours, theirs in results.items()
        if ours not in node_outputs
    ]
    return constants, nodes


def _same_number(actual: Iterable[str], expected: list[str], label: str, what: str) -> None:
    number = len(list(actual))
    if number != len(expected):
        raise InvalidArgumentError(
            f"node {label} has {number} {what}, but sub_onx has {len(expected)} ({', '.join(expected)})"
        )
