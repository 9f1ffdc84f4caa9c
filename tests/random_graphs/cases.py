"""A graph with its inputs at two batch sizes: generation, storage, loss, conversion to float64."""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper, printer
from weighted_outputs import add_loss

from random_graphs import structures
from random_graphs.building import HALVES, IR_VERSION, Builder, Value, declared, in_float32, is_half_cast, reads_of
from random_graphs.oracle import Feeds, InvalidGraphError, Oracle

OPSETS = (13, 15, 17, 18, 19, 20, 21, 22, 23)
# Share of graphs with NaN and infinities.
SPECIAL = 0.12
# Shares of the other graphs: with layers in half precision, and with values that stop the gradient.
HALF, STOPS = 0.08, 0.12
# Share of graphs, sizes of axes, and maximum number of elements of a value. Axes with several tiles and threads are
# rare, because these graphs are slow.
PROFILES: tuple[tuple[float, tuple[int, ...], int], ...] = (
    (0.7, (1, 2, 3, 4, 5), 3000),
    (0.2, (1, 2, 3, 4, 7, 8, 9), 6000),
    (0.1, (1, 3, 8, 17, 33, 64), 40000),
)
MAX_NODES = 22


@dataclass
class Case:
    """A model without a loss, and the settings of its checks."""

    model: ModelProto
    feeds: list[Feeds]
    """The inputs at each batch size."""
    trained: list[str]
    seed: int = 0
    """Seed of the graph and of the random numbers in the checks."""
    asks_for_outputs: bool = True
    """True if the training model returns the outputs in addition to the loss."""
    special: bool = False
    """True if inputs contain NaN and infinities."""
    stops: list[str] = field(default_factory=list)
    """Values that stop the gradient."""
    notes: dict[str, Any] = field(default_factory=dict)

    def stored(self) -> bytes:
        return pickle.dumps((self.model.SerializeToString(), replace(self, model=None)))

    @staticmethod
    def restored(content: bytes) -> Case:
        # The content comes from another process of the same run, so unpickling is safe.
        model, case = pickle.loads(content)
        case.model = ModelProto.FromString(model)
        return case

    @property
    def rounding(self) -> float | None:
        """The largest relative rounding error of the half types in the graph, or None."""
        found = [HALVES[node.attribute[0].i] for node in self.model.graph.node if is_half_cast(node)]
        return max(found, default=None)

    def operators(self) -> set[str]:
        """Return the operators of the graph and of its bodies."""
        return {node.op_type for graph in all_graphs(self.model.graph) for node in graph.node}

    def size(self) -> tuple[int, int]:
        """Return the number of nodes, and the number of elements of inputs and initializers."""
        nodes = sum(len(graph.node) for graph in all_graphs(self.model.graph))
        arrays = [array for feed in self.feeds for array in feed.values()]
        arrays += [numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer]
        return nodes, sum(array.size for array in arrays)

    def line(self) -> str:
        """Return the nodes on one line."""
        return "; ".join(
            f"{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}"
            for graph in all_graphs(self.model.graph)
            for node in graph.node
        )

    def text(self) -> str:
        """Return the graph and its values as text."""
        lines = [printer.to_text(self.model), "", f"trained: {', '.join(self.trained)}"]
        lines += [f"stops: {', '.join(self.stops)}"] if self.stops else []
        for at, feed in enumerate(self.feeds):
            lines += [f"inputs {at}: {name} = {np.array2string(array)}" for name, array in feed.items()]
        return "\n".join(lines)


def all_graphs(graph: GraphProto) -> list[GraphProto]:
    """Return the graph and all bodies in it."""
    inner = [
        one
        for node in graph.node
        for attribute in node.attribute
        if attribute.type == AttributeProto.GRAPH
        for one in all_graphs(attribute.g)
    ]
    return [graph, *inner]


def generate(seed: int) -> Case:
    """Return the graph of a seed."""
    # NaN, infinities and reductions of empty arrays are intended, so NumPy must not warn.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _generate(seed)


def _generate(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    opset = int(rng.choice(OPSETS))
    batches = tuple(int(k) for k in rng.choice([1, 2, 3, 4, 5, 6], 2, replace=False))
    profile = int(rng.choice(len(PROFILES), p=[share for share, _, _ in PROFILES]))
    _, sizes, max_elements = PROFILES[profile]
    special = bool(rng.random() < SPECIAL)
    half = int(rng.choice(list(HALVES))) if not special and rng.random() < HALF else None
    if half is not None:
        # Recurrent layers accept bfloat16 from this opset.
        opset = max(opset, 22)
    g = Builder(rng, opset, batches, sizes, special=special, half=half, max_elements=max_elements)
    for _ in range(int(rng.integers(1, 4))):
        rank = int(rng.choice([1, 2, 3, 4], p=[0.15, 0.45, 0.25, 0.15]))
        g.source([g.size() for _ in range(rank)])
    node_count = int(rng.integers(2, MAX_NODES + 1))
    for _ in range(3 * node_count):
        if len(g.nodes) >= node_count:
            break
        structures.draw(g)
    return finished(g, seed)


def finished(g: Builder, seed: int) -> Case:
    """Return the case of a graph. Its outputs are the values without a reader, and some others."""
    read = {name for node in g.nodes for name in reads_of(node)}
    made = {name for node in g.nodes for name in node.output}
    leaves = [v for v in g.values if v.name in made and (v.name not in read or g.chance(0.06))]
    if not any(value.is_float for value in leaves):
        floats = [value for value in g.values if value.is_float]
        leaves.append(g.add("Neg", [floats[-1]]) if floats else g.add("Neg", [g.parameter([2])]))
    infos = [declared(value, g.batches) for value in g.inputs], [declared(value, g.batches) for value in leaves]
    tensors = [numpy_helper.from_array(array, name) for name, array in g.initializers.items()]
    graph = helper.make_graph(g.nodes, "random", *infos, tensors)
    model = helper.make_model(graph, opset_imports=g.opsets(), ir_version=IR_VERSION)
    feeds = [{value.name: value.samples[at] for value in g.inputs} for at in range(len(g.batches))]
    case = Case(model, feeds, list(g.trained), seed, asks_for_outputs=g.chance(0.5), special=g.special)
    if g.half is None and not g.special and g.chance(STOPS):
        moving = [value.name for value in g.values if value.is_float and value.moves and value.name in made]
        case.stops = [str(name) for name in g.rng.permutation(moving)[: int(g.rng.integers(1, 3))]]
    return pruned(case)


def pruned(case: Case) -> Case:
    """Return the case without nodes, initializers and inputs that no output needs."""
    model = ModelProto()
    model.CopyFrom(case.model)
    for graph in reversed(all_graphs(model.graph)):
        _prune(graph)
    reads = _reads(model.graph)
    graph = model.graph
    kept_tensors = [tensor for tensor in graph.initializer if tensor.name in reads]
    kept_inputs = [value for value in graph.input if value.name in reads]
    for field_, kept in ((graph.initializer, kept_tensors), (graph.input, kept_inputs)):
        copies = [type(one).FromString(one.SerializeToString()) for one in kept]
        del field_[:]
        field_.extend(copies)
    names = {value.name for value in graph.input}
    tensors = {tensor.name for tensor in graph.initializer}
    return replace(
        case,
        model=model,
        feeds=[{name: array for name, array in feed.items() if name in names} for feed in case.feeds],
        trained=[name for name in case.trained if name in tensors],
        stops=[name for name in case.stops if name in {one for node in graph.node for one in node.output}],
    )


def settled(case: Case) -> Case:
    """Return the case with outputs declared as an oracle computes them."""
    oracle = Oracle(in_float32(case.model))
    results = [oracle.run(feed) for feed in case.feeds]
    for at, value in enumerate(case.model.graph.output):
        samples = tuple(one[at] for one in results)
        if any(sample.size == 0 for sample in samples) or len({sample.ndim for sample in samples}) > 1:
            raise InvalidGraphError(f"{value.name} has no elements, or its rank depends on the batch size")
        value.CopyFrom(declared(Value(value.name, samples)))
    return case


def _reads(graph: GraphProto) -> set[str]:
    return {name for node in graph.node for name in reads_of(node)} | {value.name for value in graph.output}


def _prune(graph: GraphProto) -> None:
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(reads_of(node))
            kept.append(node)
    copies = [type(node).FromString(node.SerializeToString()) for node in reversed(kept)]
    del graph.node[:]
    graph.node.extend(copies)


@dataclass
class Trainable:
    """A case with a loss: the weighted sum of its float outputs. The weights are inputs."""

    model: ModelProto
    feeds: list[Feeds]
    trained: list[str]
    outputs: list[str]
    stops: list[str] = field(default_factory=list)


def with_loss(case: Case, expected: Sequence[Sequence[np.ndarray]]) -> Trainable:
    """Return the case with a loss. `expected` has the outputs of an oracle at each batch size."""
    model = ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    outputs = [value.name for value in graph.output]
    feeds = [dict(feed) for feed in case.feeds]
    weighted = []
    for at, name in enumerate(outputs):
        arrays = [results[at] for results in expected]
        if arrays[0].dtype != np.float32:
            continue
        rng = np.random.default_rng([case.seed, zlib.crc32(name.encode())])
        weights = f"weights of {name}"
        for feed, array in zip(feeds, arrays, strict=True):
            # The weights do not depend on other outputs, which shrinking removes.
            feed[weights] = np.asarray(rng.uniform(0.4, 1.4, array.shape) / max(1, np.sqrt(array.size)), np.float32)
        graph.input.append(declared(Value(weights, tuple(feed[weights] for feed in feeds))))
        weighted.append((name, weights))
    add_loss(graph, weighted, TensorProto.FLOAT)
    graph.output.extend(case.model.graph.output)
    return Trainable(model, feeds, case.trained, outputs, case.stops)


# Operator and position of inputs that are float32 for every type of data.
FIXED_TYPE = {("Resize", 2)}
NORMALIZATIONS = ("LayerNormalization", "RMSNormalization", "GroupNormalization")


def widened(model: ModelProto) -> ModelProto:
    """Return the model with float64 instead of each other float type."""
    wide = ModelProto()
    wide.CopyFrom(model)
    fixed = {
        node.input[position]
        for graph in all_graphs(wide.graph)
        for node in graph.node
        for position in range(len(node.input))
        if (node.op_type, position) in FIXED_TYPE
    }
    opset = next(entry.version for entry in wide.opset_import if not entry.domain)
    for graph in all_graphs(wide.graph):
        _widen(graph, fixed, opset)
    return wide


def wide_array(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _widen(graph: GraphProto, fixed: set[str], opset: int) -> None:
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in fixed:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for node in graph.node:
        stashes = node.op_type in NORMALIZATIONS[:2] or (node.op_type == "GroupNormalization" and opset >= 21)
        if stashes and node.domain == "":
            node.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
                array = numpy_helper.to_array(attribute.t).astype(np.float64)
                attribute.t.CopyFrom(numpy_helper.from_array(array))
            elif attribute.name in ("to", "dtype") and attribute.i in (TensorProto.FLOAT, *HALVES):
                attribute.i = TensorProto.DOUBLE
