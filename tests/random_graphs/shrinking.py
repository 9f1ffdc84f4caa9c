"""Reduction of a failure to a minimal graph that fails in the same way.

Each step proposes smaller graphs, and a graph with the same failure replaces the current graph. Steps remove outputs,
replace a value by another value, a parameter, a constant or an input, and remove trained parameters, optional inputs
and attributes. They also remove nodes of bodies, and shorten axes. An oracle must run each graph, so all are valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from random_graphs.building import Value, declared, reads_of
from random_graphs.cases import Case, all_graphs, pruned
from random_graphs.oracle import InvalidGraphError, Oracle

Step = Callable[[Case], Iterator[Case]]
"""Generator of candidates for a smaller case."""
Fails = Callable[[Case], Case | None]
"""Returns the checked case if it fails like the first case, otherwise None."""


def shrink(case: Case, fails: Fails, seconds: float = 120.0) -> Case:
    """Return the smallest graph found that fails like the case."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for step in STEPS:
            at = 0
            while time.monotonic() < end and (found := first_failing(step, at, case, fails, end)):
                # The smaller graph has other candidates. Continue at the same index.
                (at, case), progress = found, True
    return case


def first_failing(step: Step, start: int, case: Case, fails: Fails, end: float) -> tuple[int, Case] | None:
    """Return the index and the case of the first smaller candidate from index `start` that fails."""
    for at, candidate in enumerate(step(case)):
        if time.monotonic() >= end:
            return None
        if at < start:
            continue
        smaller = pruned(candidate)
        if smaller.model.graph.output and weight(smaller) < weight(case):
            checked = fails(smaller)
            if checked is not None:
                return at, checked
    return None


def weight(case: Case) -> tuple[int, int, int, int, int]:
    """Return a measure of complexity, compared in order: number of nodes first."""
    nodes, elements = case.size()
    graphs = all_graphs(case.model.graph)
    # A body counts more than the Identity nodes that may replace it.
    nodes += 4 * (len(graphs) - 1)
    details = sum(len(node.attribute) + len([n for n in node.input if n]) for graph in graphs for node in graph.node)
    return nodes, len(case.model.graph.output), len(case.trained), details, elements


def edited(case: Case) -> tuple[Case, GraphProto]:
    model = ModelProto()
    model.CopyFrom(case.model)
    changed = replace(case, model=model, feeds=[dict(feed) for feed in case.feeds], trained=list(case.trained))
    return changed, model.graph


def fewer_outputs(case: Case) -> Iterator[Case]:
    count = len(case.model.graph.output)
    keeps = [[at] for at in range(count)] + [[k for k in range(count) if k != at] for at in range(count)]
    for keep in keeps if count > 1 else []:
        changed, graph = edited(case)
        outputs = [type(graph.output[k]).FromString(graph.output[k].SerializeToString()) for k in keep]
        del graph.output[:]
        graph.output.extend(outputs)
        yield changed


def values_of(case: Case) -> dict[str, tuple[np.ndarray, ...]]:
    """Return all values of the main graph, at each batch size."""
    graph = case.model.graph
    names = [name for node in graph.node for name in node.output if name]
    model = ModelProto()
    model.CopyFrom(case.model)
    typed = {value.name for value in model.graph.output}
    model.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in typed)
    oracle = Oracle(model)
    order = [value.name for value in model.graph.output]
    runs = [oracle.run(feed) for feed in case.feeds]
    found = {name: tuple(run[at] for run in runs) for at, name in enumerate(order)}
    for value in graph.input:
        found[value.name] = tuple(feed[value.name] for feed in case.feeds)
    for tensor in graph.initializer:
        found[tensor.name] = (numpy_helper.to_array(tensor),) * len(case.feeds)
    return found


def rename(graph: GraphProto, old: str, new: str, *, outputs: bool = True) -> None:
    """Replace all uses of a value by another value."""
    for one in all_graphs(graph):
        for node in one.node:
            for at, name in enumerate(node.input):
                if name == old:
                    node.input[at] = new


def stored_values(case: Case) -> Iterator[Case]:
    """Replace a computed value by a parameter, a constant or an input with the same numbers."""
    try:
        values = values_of(case)
    except InvalidGraphError:
        return
    outputs = {value.name for value in case.model.graph.output}
    for node in reversed(case.model.graph.node):
        for name in node.output:
            if not name or name in outputs or name not in values:
                continue
            samples = values[name]
            fixed = all(np.array_equal(one, samples[0], equal_nan=one.dtype.kind == "f") for one in samples)
            shapes = len({one.shape for one in samples}) == 1
            for way in ("parameter", "constant", "input"):
                if way == "parameter" and not (shapes and samples[0].dtype == np.float32):
                    continue
                if way == "constant" and not fixed:
                    continue
                changed, graph = edited(case)
                for one in all_graphs(graph):
                    for other in one.node:
                        for at, made in enumerate(other.output):
                            if made == name and one is graph:
                                other.output[at] = f"{name}_before"
                if way == "input":
                    for feed, array in zip(changed.feeds, samples, strict=True):
                        feed[name] = array
                    graph.input.append(declared(Value(name, samples)))
                else:
                    graph.initializer.append(numpy_helper.from_array(samples[0], name))
                    if way == "parameter":
                        changed.trained.append(name)
                yield changed


def bypassed(case: Case) -> Iterator[Case]:
    """Replace the result of a node by one of its inputs. For an output, an earlier value becomes the output."""
    try:
        values = values_of(case)
    except InvalidGraphError:
        return

    def alike(a: str, b: str) -> bool:
        if a not in values or b not in values:
            return False
        return all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(values[a], values[b], strict=True))

    outputs = [value.name for value in case.model.graph.output]
    made = {name for node in case.model.graph.node for name in node.output}
    for node in reversed(case.model.graph.node):
        for name in node.output:
            for read in dict.fromkeys(reads_of(node)):
                if not name:
                    continue
                if name in outputs:
                    # Any value may be an output.
                    if read in made and read not in outputs and read in values:
                        changed, graph = edited(case)
                        others = [v for v in graph.output if v.name != name]
                        others = [type(v).FromString(v.SerializeToString()) for v in others]
                        del graph.output[:]
                        graph.output.extend(others)
                        graph.output.append(declared(Value(read, values[read])))
                        yield changed
                elif alike(name, read):
                    changed, graph = edited(case)
                    rename(graph, name, read)
                    yield changed


def simpler_bodies(case: Case) -> Iterator[Case]:
    """Remove a node of a body; one of its inputs replaces its output."""
    count = len(all_graphs(case.model.graph))
    for which in range(1, count):
        body = all_graphs(case.model.graph)[which]
        for at in range(len(body.node)):
            node = body.node[at]
            for read in dict.fromkeys(reads_of(node)):
                changed, graph = edited(case)
                one = all_graphs(graph)[which]
                replaced: NodeProto = one.node[at]
                name = replaced.output[0]
                if name in {value.name for value in one.output}:
                    if replaced.op_type == "Identity":
                        continue
                    replaced.CopyFrom(helper.make_node("Identity", [read], [name]))
                else:
                    rename(one, name, read)
                yield changed


def inlined_branches(case: Case) -> Iterator[Case]:
    """Replace an If by the nodes of a branch, or a branch by a value."""
    try:
        values = values_of(case)
    except InvalidGraphError:
        return
    for at, node in enumerate(case.model.graph.node):
        if node.op_type != "If":
            continue
        for branch in ("then_branch", "else_branch"):
            changed, graph = edited(case)
            [body] = [attribute.g for attribute in graph.node[at].attribute if attribute.name == branch]
            nodes = [NodeProto.FromString(one.SerializeToString()) for one in graph.node]
            ends = [
                helper.make_node("Identity", [inner.name], [name])
                for inner, name in zip(body.output, node.output, strict=True)
            ]
            nodes[at : at + 1] = [*(NodeProto.FromString(one.SerializeToString()) for one in body.node), *ends]
            del graph.node[:]
            graph.node.extend(nodes)
            yield changed
            shape = [sample.shape for sample in values.get(node.output[0], ())]
            before = {name for one in case.model.graph.node[at:] for name in one.output}
            for name, samples in values.items():
                alike = samples[0].dtype == np.float32 and [sample.shape for sample in samples] == shape
                if alike and name not in before:
                    changed, graph = edited(case)
                    [body] = [attribute.g for attribute in graph.node[at].attribute if attribute.name == branch]
                    del body.node[:]
                    body.node.append(helper.make_node("Identity", [name], [body.output[0].name]))
                    yield changed


def unrolled(case: Case) -> Iterator[Case]:
    """Replace a Loop by one iteration."""
    for at, node in enumerate(case.model.graph.node):
        if node.op_type != "Loop":
            continue
        changed, graph = edited(case)
        [body] = [attribute.g for attribute in node.attribute if attribute.name == "body"]
        place, on, *carried = [value.name for value in body.input]
        _, *made = [value.name for value in body.output]
        graph.initializer.append(numpy_helper.from_array(np.asarray(0, np.int64), place))
        graph.initializer.append(numpy_helper.from_array(np.asarray(True), on))
        graph.initializer.append(numpy_helper.from_array(np.asarray([0], np.int64), f"{place}_axis"))
        nodes = [helper.make_node("Identity", [a], [b]) for a, b in zip(node.input[2:], carried, strict=True)]
        nodes += [NodeProto.FromString(one.SerializeToString()) for one in body.node]
        for k, (inner, outer) in enumerate(zip(made, node.output, strict=True)):
            if outer and k < len(carried):
                nodes.append(helper.make_node("Identity", [inner], [outer]))
            elif outer:
                nodes.append(helper.make_node("Unsqueeze", [inner, f"{place}_axis"], [outer]))
        before = [NodeProto.FromString(one.SerializeToString()) for one in graph.node]
        del graph.node[:]
        graph.node.extend([*before[:at], *nodes, *before[at + 1 :]])
        yield changed


def without_optional(case: Case) -> Iterator[Case]:
    """Remove an optional input or an attribute."""
    for which, graph in enumerate(all_graphs(case.model.graph)):
        for at, node in enumerate(graph.node):
            for position, name in enumerate(node.input):
                # A Loop without an iteration count may never end.
                if name and not (node.op_type == "Loop" and position == 0):
                    changed, copied = edited(case)
                    one = all_graphs(copied)[which].node[at]
                    one.input[position] = ""
                    while one.input and not one.input[-1]:
                        one.input.pop()
                    yield changed
            for position in range(len(node.attribute)):
                changed, copied = edited(case)
                del all_graphs(copied)[which].node[at].attribute[position]
                yield changed


def fewer_trained(case: Case) -> Iterator[Case]:
    for name in case.trained if len(case.trained) > 1 else []:
        changed, _ = edited(case)
        changed.trained = [one for one in case.trained if one != name]
        yield changed
    for name in case.trained if len(case.trained) > 2 else []:
        changed, _ = edited(case)
        changed.trained = [name]
        yield changed


def cut_array(array: np.ndarray, axis: int | None, old: int, new: int) -> np.ndarray:
    """Return the array with axes of size `old` shortened to `new`."""
    for at, size in enumerate(array.shape):
        if size == old and (axis is None or axis == at):
            array = np.take(array, range(new), at)
    return array


def smaller_axes(case: Case) -> Iterator[Case]:
    """Shorten all axes of one size, or one axis of one value."""
    graph = case.model.graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, array in case.feeds[0].items():
        arrays[name] = array
    sizes = sorted({size for array in arrays.values() for size in array.shape if size > 1}, reverse=True)
    for size in sizes:
        for new in dict.fromkeys((1, 2, size // 2, size - 1)):
            if 0 < new < size:
                for integers in (True, False):
                    yield _cut(case, None, None, size, new, integers)
    for name, array in arrays.items():
        for axis, size in enumerate(array.shape):
            if size > 1:
                yield _cut(case, name, axis, size, 1, False)
                yield _cut(case, name, axis, size, size - 1, False)


def _cut(case: Case, name: str | None, axis: int | None, old: int, new: int, integers: bool) -> Case:
    changed, graph = edited(case)

    def cut(one: str, array: np.ndarray) -> np.ndarray:
        if name is not None and one != name:
            return array
        if array.dtype.kind == "i" and name is None:
            if array.ndim == 1 and integers:
                # Probably a shape.
                return np.where(array == old, new, array).astype(array.dtype)
            array = (
                np.where(array >= new, array % new if new else array, array).astype(array.dtype) if integers else array
            )
        return cut_array(array, axis, old, new)

    for tensor in graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(cut(tensor.name, numpy_helper.to_array(tensor)), tensor.name))
    for feed in changed.feeds:
        for one in list(feed):
            feed[one] = cut(one, feed[one])
    redeclare(changed)
    for one in all_graphs(graph):
        for node in one.node:
            for attribute in node.attribute:
                if attribute.name in ("hidden_size", "num_groups", "num_outputs") and attribute.i == old:
                    attribute.i = new
                if attribute.name == "kernel_shape":
                    attribute.ints[:] = [new if k == old else k for k in attribute.ints]
    for body in all_graphs(graph)[1:]:
        for value in [*body.input, *body.output]:
            value.type.tensor_type.ClearField("shape")
    return changed


def redeclare(case: Case) -> None:
    for value in case.model.graph.input:
        value.CopyFrom(declared(Value(value.name, tuple(feed[value.name] for feed in case.feeds))))


def simpler_numbers(case: Case) -> Iterator[Case]:
    """Round floats to one digit."""
    changed, graph = edited(case)
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = np.round(numpy_helper.to_array(tensor), 1)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
    for feed in changed.feeds:
        for name, array in feed.items():
            if array.dtype == np.float32:
                feed[name] = np.round(array, 1)
    yield changed


STEPS = (
    fewer_outputs,
    stored_values,
    bypassed,
    inlined_branches,
    unrolled,
    simpler_bodies,
    fewer_trained,
    smaller_axes,
    without_optional,
)
