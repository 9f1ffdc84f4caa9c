"""Construction of a graph node by node. Each new node is run on the values of two batch sizes.

Every graph is therefore valid, and the values of earlier nodes are known when a later node is chosen. An axis depends
on the batch size if its two sizes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from random_graphs.oracle import InvalidGraphError, Oracle

IR_VERSION = 10
# Relative rounding error of each half type.
HALVES = {TensorProto.FLOAT16: 2.0**-11, TensorProto.BFLOAT16: 2.0**-8}
# Upper limit of magnitudes in a graph. Larger values would make float32 and float64 differ, and differences inexact.
LARGEST = 40.0
# Minimum distance between an argument and a point where the operator is not smooth. The distance exceeds float32
# rounding errors and the steps of central differences.
MARGIN = 2e-3

Samples = tuple[np.ndarray, ...]


class Rejected(Exception):  # noqa: N818  (not an error: another node is drawn)
    """The node does not fit the graph."""


@dataclass(frozen=True)
class Value:
    """A value of the graph."""

    name: str
    samples: Samples
    """The array at each batch size."""
    moves: bool = False
    """True if the value depends on trained parameters."""

    @property
    def array(self) -> np.ndarray:
        return self.samples[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.samples[0].shape

    @property
    def rank(self) -> int:
        return self.samples[0].ndim

    @property
    def is_float(self) -> bool:
        return self.samples[0].dtype == np.float32

    @property
    def is_index(self) -> bool:
        return self.samples[0].dtype == np.int64

    @property
    def is_bool(self) -> bool:
        return self.samples[0].dtype == np.bool_

    def is_open(self, axis: int) -> bool:
        """Return true if the size of the axis depends on the batch size."""
        return len({sample.shape[axis] for sample in self.samples}) > 1

    @property
    def open_axes(self) -> list[int]:
        return [axis for axis in range(self.rank) if self.is_open(axis)]

    @property
    def minimum(self) -> float:
        return float(min(np.min(sample) for sample in self.samples))

    @property
    def maximum(self) -> float:
        return float(max(np.max(sample) for sample in self.samples))

    @property
    def is_finite(self) -> bool:
        return all(bool(np.isfinite(sample).all()) for sample in self.samples if sample.dtype.kind == "f")


def in_float32(model: ModelProto) -> ModelProto:
    """Return the model with float32 instead of float16 and bfloat16, for which onnxruntime has few kernels."""
    if not any(is_half_cast(node) for node in model.graph.node):
        return model
    single = ModelProto()
    single.CopyFrom(model)
    for node in single.graph.node:
        if is_half_cast(node):
            node.attribute[0].i = TensorProto.FLOAT
    return single


def is_half_cast(node: NodeProto) -> bool:
    """Return true for a cast to a half type. All values of half types come from such casts."""
    return node.op_type == "Cast" and node.attribute[0].i in HALVES


def graphs_in(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g


def names_read(graph: GraphProto) -> set[str]:
    """Return the names that a body reads from the enclosing graphs."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    read = set()
    for node in graph.node:
        read |= {name for name in reads_of(node) if name not in own}
        own |= set(node.output)
    return read | {value.name for value in graph.output if value.name not in own}


def reads_of(node: NodeProto) -> list[str]:
    """Return the names that a node and its bodies read."""
    inner = sorted(name for body in graphs_in(node) for name in names_read(body))
    return [name for name in [*node.input, *inner] if name]


def declared(value: Value, batches: Sequence[int] = ()) -> ValueInfoProto:
    """Return the declaration of a value, with a symbolic name for each axis that depends on the batch size."""
    dims: list[int | str] = []
    for axis, size in enumerate(value.shape):
        sizes = tuple(sample.shape[axis] for sample in value.samples)
        if not value.is_open(axis):
            dims.append(size)
        else:
            dims.append("batch" if sizes == tuple(batches) else f"{value.name}_{axis}")
    return helper.make_tensor_value_info(value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), dims)


class Builder:
    """A graph under construction, or the body of one of its nodes."""

    def __init__(
        self,
        rng: np.random.Generator,
        opset: int,
        batches: tuple[int, ...],
        sizes: Sequence[int],
        parent: Builder | None = None,
        *,
        special: bool = False,
        half: int | None = None,
        max_elements: int = 3000,
    ) -> None:
        self.max_elements = max_elements
        self.rng, self.opset, self.batches, self.sizes, self.parent = rng, opset, batches, sizes, parent
        self.special, self.half = special, half
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.nodes: list[NodeProto] = []
        self.values: list[Value] = []
        self.known: dict[str, Value] = {}
        self.root: Builder = self if parent is None else parent.root
        if parent is None:
            self.initializers: dict[str, np.ndarray] = {}
            self.trained: list[str] = []
            self.inputs: list[Value] = []
            self._count = 0

    # Random choices.

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choose(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def size(self) -> int:
        return int(self.choose(self.sizes))

    def numbers(self, shape: Sequence[int]) -> np.ndarray:
        """Draw floats of both signs that are not near zero."""
        signs = self.rng.choice([-1.0, 1.0], tuple(shape))
        return np.asarray(signs * self.rng.uniform(0.1, 1.4, tuple(shape)), np.float32)

    # Names and scopes.

    def name(self, stem: str) -> str:
        self.root._count += 1
        return f"{stem}{self.root._count}"

    def find(self, name: str) -> Value:
        if name in self.known:
            return self.known[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent.find(name)

    def pool(self) -> list[Value]:
        """Return the values that a node may read."""
        return [*(self.parent.pool() if self.parent is not None else []), *self.values]

    def mark(self) -> tuple[Any, ...]:
        root = self.root
        sizes = (len(self.nodes), len(self.values), dict(self.known))
        return (
            *sizes,
            len(root.values),
            dict(root.known),
            dict(root.initializers),
            list(root.trained),
            list(root.inputs),
        )

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Remove everything that was added since the mark."""
        nodes, values, known, root_values, root_known, initializers, trained, inputs = mark
        root = self.root
        del root.values[root_values:]
        root.known, root.initializers, root.trained, root.inputs = root_known, initializers, trained, inputs
        del self.nodes[nodes:]
        del self.values[values:]
        self.known = known if self is not root else root.known

    # Inputs and initializers.

    def constant(self, array: Any, dtype: Any = None, *, stem: str = "c") -> Value:
        """Add a constant: an initializer of the main graph, or a Constant node in this graph."""
        array = np.asarray(array, dtype)
        value = Value(self.name(stem), (array,) * len(self.batches))
        if self.chance(0.2) and array.dtype != np.float32:
            tensor = numpy_helper.from_array(array, value.name)
            self.nodes.append(helper.make_node("Constant", [], [value.name], value=tensor))
            self.known[value.name] = value
        else:
            self.root.initializers[value.name] = array
            self.root.known[value.name] = value
        return value

    def parameter(self, shape: Sequence[int] | None = None, array: np.ndarray | None = None) -> Value:
        """Add a trained initializer."""
        if array is None:
            assert shape is not None
            array = self.numbers(shape)
        value = Value(self.name("p"), (np.asarray(array, np.float32),) * len(self.batches), moves=True)
        root = self.root
        root.initializers[value.name] = value.array
        root.trained.append(value.name)
        root.known[value.name] = value
        root.values.append(value)
        return value

    def weight(self, shape: Sequence[int]) -> Value:
        """Add weights of a node: mostly trained, sometimes constant or computed."""
        draw = self.rng.random()
        if draw < 0.1:
            return self.constant(self.numbers(shape))
        value = self.parameter(shape)
        if draw < 0.2:
            return self.add("Mul", [value, self.constant(np.float32(0.75))])
        return value

    def input(self, samples: Sequence[np.ndarray], stem: str = "x") -> Value:
        """Add an input of the model."""
        value = Value(self.name(stem), tuple(samples))
        root = self.root
        root.inputs.append(value)
        root.known[value.name] = value
        if value.is_float:
            root.values.append(value)
        return value

    def source(self, shape: Sequence[int], batch_axis: int | None = 0) -> Value:
        """Add a float value: a parameter, or an input with the batch size at axis `batch_axis`."""
        if batch_axis is None or self.chance(0.4):
            return self.parameter(shape)
        shapes = [[*shape[:batch_axis], batch, *shape[batch_axis + 1 :]] for batch in self.batches]
        arrays = [self.numbers(one) for one in shapes]
        if self.special and self.chance(0.5):
            for array in arrays:
                flat = array.reshape(-1)
                spots = self.rng.integers(flat.size, size=1 + flat.size // 20)
                flat[spots] = self.rng.choice([np.nan, np.inf, -np.inf], spots.size)
        return self.input(arrays)

    # Values for nodes.

    def pick(self, fits: Callable[[Value], bool]) -> Value | None:
        """Return a random value that fits. Half of the draws are among the last four values."""
        found = [value for value in self.pool() if fits(value)]
        if not found:
            return None
        return self.choose(found[-4:]) if self.chance(0.5) else self.choose(found)

    def float(self, min_rank: int = 0, max_rank: int = 5) -> Value:
        """Return a float value with a rank within the limits."""
        value = self.pick(lambda value: value.is_float and min_rank <= value.rank <= max_rank)
        if value is None or self.chance(0.08):
            rank = int(self.rng.integers(max(min_rank, 1), max(min_rank, 1, min(max_rank, 3)) + 1))
            value = self.source([self.size() for _ in range(rank)])
        return value

    def index(self, shape: Sequence[int], count: int, *, negative: bool = True, unique: bool = False) -> Value:
        """Add indices into an axis with `count` elements: a constant or an input."""
        if unique:
            array = self.rng.permutation(count)[: int(np.prod(shape))].reshape(shape).astype(np.int64)
        else:
            array = self.rng.integers(-count if negative and self.chance(0.3) else 0, count, tuple(shape), np.int64)
        if self.chance(0.25) and self.depth == 0:
            return self.input([array] * len(self.batches), "i")
        return self.constant(array)

    def ints(self, *numbers: int) -> Value:
        return self.constant(list(numbers), np.int64)

    def scalar(self, number: Any) -> Value:
        return self.constant(np.float32(number))

    def partner(self, value: Value) -> Value:
        """Return a value that broadcasts with the argument."""

        def fits(other: Value) -> bool:
            if not other.is_float:
                return False
            try:
                shapes = [
                    np.broadcast_shapes(a.shape, b.shape) for a, b in zip(value.samples, other.samples, strict=True)
                ]
            except ValueError:
                return False
            return int(np.prod(shapes[0])) <= self.max_elements

        draw = self.rng.random()
        if draw < 0.1:
            return value
        found = self.pick(fits) if draw < 0.65 else None
        if found is not None:
            return found
        if draw > 0.95:
            return self.scalar(self.rng.uniform(0.3, 1.3))
        return self.weight(self.within(value))

    def within(self, value: Value) -> list[int]:
        """Return a shape that broadcasts to the shape of the value at each batch size."""
        shape = [1 if value.is_open(axis) or self.chance(0.25) else size for axis, size in enumerate(value.shape)]
        return shape[int(self.rng.integers(value.rank + 1)) :] if self.chance(0.3) else shape

    # Arguments at which an operator is smooth.

    def clear(self, value: Value, *points: float) -> None:
        """Reject a value with an element near one of the points.

        Constant values are also rejected: implementations round to 0 or -0, and 1 / x differs between them.
        """
        for sample in value.samples:
            for point in points:
                with np.errstate(invalid="ignore"):
                    smallest = np.nanmin(np.abs(sample - point), initial=np.inf)
                if smallest < MARGIN:
                    raise Rejected

    def distinct_pair(self, first: Value, second: Value) -> None:
        """Reject two values if two corresponding elements are nearly equal, also for constant values."""
        for a, b in zip(first.samples, second.samples, strict=True):
            with np.errstate(invalid="ignore"):
                smallest = np.nanmin(np.abs(a - b), initial=np.inf)
            if smallest < MARGIN:
                raise Rejected

    def distinct(self, value: Value, axes: Sequence[int] | None = None, margin: float = MARGIN) -> None:
        """Reject a value if two elements along the axes are nearly equal.

        Constant values are also rejected: the elements may be equal in float32 and different in float64.
        """
        chosen = range(value.rank) if axes is None else [axis % value.rank for axis in axes]
        for sample in value.samples:
            rest = [axis for axis in range(value.rank) if axis not in chosen]
            rows = sample.transpose([*rest, *chosen]).reshape(int(np.prod([sample.shape[a] for a in rest])), -1)
            with np.errstate(invalid="ignore"):
                smallest = np.nanmin(np.diff(np.sort(rows, axis=1), axis=1), initial=np.inf)
            if smallest < margin:
                raise Rejected

    # Nodes.

    def add(self, op: str, inputs: Sequence[Value | None], *, domain: str = "", **attributes: Any) -> Value:
        """Add a node with one output."""
        return self.add_several(op, inputs, 1, domain=domain, **attributes)[0]

    def add_several(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: int | Sequence[bool],
        *,
        domain: str = "",
        wild: bool = False,
        **attributes: Any,
    ) -> list[Value]:
        """Add a node and run it.

        `outputs` is the number of outputs, or a flag for each output; outputs without the flag get no name. Results of
        a wild node may be infinite, and later nodes do not choose them.
        """
        wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
        stem = op.lower()[:6]
        results = [self.name(stem) if there else "" for there in wanted]
        given = [value.name if value is not None else "" for value in inputs]
        while given and not given[-1]:
            given.pop()
        node = helper.make_node(op, given, results, domain=domain, **attributes)
        read = [self.find(name) for name in dict.fromkeys(reads_of(node))]
        arrays = self.run(node, read, [name for name in results if name])
        made = []
        moves = any(value.moves for value in read)
        for position, name in enumerate(name for name in results if name):
            samples = tuple(one[position] for one in arrays)
            value = Value(name, samples, moves)
            if any(sample.size == 0 or sample.size > self.max_elements for sample in samples):
                raise Rejected
            if len({sample.ndim for sample in samples}) > 1:
                raise Rejected
            if not wild and value.array.dtype.kind == "f":
                self._check_range(value)
            made.append(value)
        self.nodes.append(node)
        for value in made:
            self.known[value.name] = value
            if not wild:
                self.values.append(value)
        return made

    def _check_range(self, value: Value) -> None:
        for sample in value.samples:
            finite = np.isfinite(sample)
            if not self.special and not finite.all():
                raise Rejected
            if np.abs(sample[finite]).max(initial=0) > LARGEST:
                raise Rejected

    def run(self, node: NodeProto, read: Sequence[Value], results: Sequence[str]) -> list[list[np.ndarray]]:
        return self.run_nodes([node], read, results)

    def run_nodes(
        self, nodes: Sequence[NodeProto], read: Sequence[Value], results: Sequence[str]
    ) -> list[list[np.ndarray]]:
        """Return the results of nodes at each batch size."""
        infos = [
            helper.make_tensor_value_info(
                value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), [None] * value.rank
            )
            for value in read
        ]
        graph = helper.make_graph(nodes, "node", infos, [ValueInfoProto(name=name) for name in results])
        model = helper.make_model(graph, opset_imports=self.opsets(), ir_version=IR_VERSION)
        try:
            oracle = Oracle(in_float32(model))
            return [oracle.run({value.name: value.samples[at] for value in read}) for at in range(len(self.batches))]
        except InvalidGraphError as error:
            raise Rejected(str(error)) from error

    def add_cast_pair(self, value: Value, to: int) -> Value:
        """Add a cast to an element type for which the oracle has no arrays, and a cast back."""
        names = [self.name("narrow"), self.name("cast")]
        nodes = [
            helper.make_node("Cast", [value.name], names[:1], to=to),
            helper.make_node("Cast", names[:1], names[1:], to=TensorProto.FLOAT),
        ]
        arrays = self.run_nodes(nodes, [value], names[1:])
        made = Value(names[1], tuple(one[0] for one in arrays), value.moves)
        self._check_range(made)
        self.nodes += nodes
        self.known[made.name] = made
        self.values.append(made)
        return made

    def opsets(self) -> list[Any]:
        return [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]

    # Bodies.

    def body(self) -> Builder:
        """Return a builder for the body of a node."""
        return Builder(
            self.rng,
            self.opset,
            self.batches,
            self.sizes,
            self,
            special=self.special,
            half=self.half,
            max_elements=self.max_elements,
        )

    def formal(self, samples: Sequence[np.ndarray], *, moves: bool, stem: str = "b") -> Value:
        """Add an input of the body."""
        value = Value(self.name(stem), tuple(samples), moves)
        self.known[value.name] = value
        if value.is_float:
            self.values.append(value)
        return value

    def closed(self, inputs: Sequence[Value], outputs: Sequence[Value], *, shapes: bool = True) -> GraphProto:
        """Return the body as a graph. Its own nodes must compute the outputs."""
        infos = [declared(value) for value in inputs], [declared(value) for value in outputs]
        if not shapes:
            for info in infos[1]:
                info.type.tensor_type.ClearField("shape")
        return helper.make_graph(self.nodes, self.name("body"), *infos)


FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
