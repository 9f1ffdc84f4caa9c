"""Patterns of several nodes: updates in place, masked attention, recurrent layers, If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import numpy as np

from random_graphs.building import FLOAT, Builder, Rejected, Value
from random_graphs.fused import FUSED
from random_graphs.operators import (
    MAKERS,
    WEIGHTS,
    index_axis,
    lengths_of,
    maker,
    part_of,
    put_between,
    scatter_into,
    uniform,
)
from random_graphs.quantized import QUANTIZED

# Maximum nesting of bodies, and number of attempts to draw a node.
DEEPEST = 2
ATTEMPTS = 12


# Operators of onnxruntime with wrong or different results for NaN and infinities:
# - Comparisons ignore NaN: maximum, minimum, their indices, pools, ThresholdedRelu. Unique loses NaN, and
#   ReduceLogSumExp loses NaN next to an infinity.
# - Recurrent layers treat infinities as large numbers.
# - LRN moves the window of a sum and subtracts an infinity from itself.
# - Activations multiply infinity by a factor that becomes zero; ortrain returns the limit.
# - Interpolation multiplies infinity by weights of zero; ortrain omits them.
# - The fused operators are defined by standard operators with such results, or by sums in another order.
NOT_SPECIAL = (
    FUSED
    | QUANTIZED
    | {"Gelu of com.microsoft", "part beside other readers"}
    | {
        *"""
        ArgMax ArgMin TopK ReduceMax ReduceMin ReduceLogSumExp MaxPool GlobalMaxPool Hardmax ThresholdedRelu RNN GRU
        LSTM Softsign BiasGelu Gelu FastGelu QuickGelu HardSwish Mish Resize DFT GridSample LRN Unique
        """.split()
    }
)
# Smooth operators, for graphs with layers in half precision: rounding may move a state across a kink.
SMOOTH = frozenset(
    """
    Add Sub Mul MatMul Gemm Transpose Reshape Slice Concat Split Squeeze Unsqueeze Flatten Gather Sigmoid Tanh Softplus
    Sin Cos Erf ReduceMean ReduceSum Softmax LogSoftmax LayerNormalization Identity Neg Sum Mean Pad
    """.split()
)
COSTLY = ("If", "Loop", "growing Loop", "Scan", "RNN", "GRU", "LSTM")


def draw(g: Builder, *, deep: bool = True) -> None:
    """Add a random node or pattern; tries another one after a rejection."""
    names = [
        name
        for name in MAKERS
        if (deep or name not in COSTLY)
        and not (g.special and name in NOT_SPECIAL)
        and (name not in HALF_LAYERS if g.half is None else name in HALF_LAYERS | SMOOTH)
    ]
    weights = np.array([WEIGHTS[name] for name in names])
    for _ in range(ATTEMPTS):
        name = names[int(g.rng.choice(len(names), p=weights / weights.sum()))]
        mark = g.mark()
        try:
            MAKERS[name](g)
            return
        except Rejected:
            g.rewind(mark)


# Updates in place.


@maker("update in place", weight=6)
def update_in_place(g: Builder) -> Value:
    """Add a scatter that may overwrite its input, with other readers of the input before and after the scatter."""
    value = g.float(1, 4)
    made = g.add(g.choose(["Sigmoid", "Tanh", "Sin", "Neg", "Erf", "Identity"]), [value]) if g.chance(0.8) else value
    if g.chance(0.3):
        g.add(g.choose(["Cos", "Tanh"]), [made])
    changed = scatter_into(g, made, g.choose(["ScatterND", "ScatterElements"]))
    result = g.add(g.choose(["Mul", "Add", "Sub"]), g.choose([[changed, made], [made, changed]]))
    for _ in range(int(g.rng.integers(0, 3))):
        g.add(g.choose(["Cos", "Sigmoid", "Neg"]), [g.choose([changed, made, result])])
    return result


@maker("part beside other readers", weight=6)
def part_beside_readers(g: Builder) -> None:
    """Add readers of parts of a value, and other readers. The gradient of a part is added to their gradients."""
    value = g.float(1, 4)
    if g.chance(0.5):
        value = g.add(g.choose(["Tanh", "Sigmoid", "Sin", "Neg"]), [value])
    readers = [
        g.choose(["TopK", "Gather", "GatherND", "GatherElements", "Slice", "Compress"])
        for _ in range(g.choose([1, 1, 2]))
    ]
    for reader in readers:
        axis = index_axis(g, value)
        size = value.shape[axis]
        if reader == "TopK":
            g.distinct(value, [axis])
            g.add_several("TopK", [value, g.ints(int(g.rng.integers(1, size + 1)))], 2, axis=axis)
        elif reader == "Gather":
            g.add("Gather", [value, g.index([g.size()], size)], axis=axis)
        elif reader == "Compress":
            g.add(
                "Compress", [value, g.constant([True, *(g.chance(0.5) for _ in range(size - 1))], np.bool_)], axis=axis
            )
        elif reader == "Slice":
            part_of(g, value, axis)
        else:
            MAKERS[reader](g)
    for _ in range(int(g.rng.integers(1, 3))):
        other = g.choose(["Sinh", "Softplus", "Tanh", "Cos", "Mul", "PRelu", "Relu", "Erf"])
        if other == "Mul":
            g.add("Mul", [value, g.partner(value)])
        elif other == "PRelu":
            g.clear(value, 0)
            g.add("PRelu", [value, value if g.chance(0.6) else g.weight([1] * value.rank)])
        else:
            if other == "Relu":
                g.clear(value, 0)
            g.add(other, [put_between(g, value, -3, 3) if other == "Sinh" else value])


# Attention.


@maker("masked attention", weight=3)
def masked_attention(g: Builder) -> Value:
    """Add attention in the form of exporters; completely masked rows become zero."""
    heads, length, keys, width = (min(g.size(), 2 * LONGEST_AXIS) for _ in range(4))
    batch = 0 if g.chance(0.6) else None
    query = g.source([g.size(), heads, length, width], batch)
    key = g.source([query.shape[0], heads, keys, width], 0 if query.is_open(0) else None)
    if [sample.shape[0] for sample in key.samples] != [sample.shape[0] for sample in query.samples]:
        key = g.source([1, heads, keys, width], None)
    scores = g.add("MatMul", [query, g.add("Transpose", [key], perm=[0, 1, 3, 2])])
    if g.chance(0.7):
        scores = g.add(g.choose(["Mul", "Div"]), [scores, g.scalar(uniform(g, 0.5, 1.5))])
    mask = g.rng.random([length, keys]) < 0.7
    masks_rows = g.chance(0.6)
    if masks_rows:
        mask[int(g.rng.integers(length))] = False
    else:
        mask[:, 0] = True
    if g.chance(0.5):
        bias = g.constant(np.where(mask, 0, -np.inf).astype(np.float32))
        [masked] = g.add_several("Add", [scores, bias], 1, wild=True)
    else:
        [masked] = g.add_several("Where", [g.constant(mask), scores, g.scalar(-np.inf)], 1, wild=True)
    [weights] = g.add_several("Softmax", [masked], 1, wild=True, axis=-1)
    if masks_rows or g.chance(0.3):
        [empty] = g.add_several("IsNaN", [weights], 1, wild=True)
        weights = g.add("Where", [empty, g.scalar(0), weights])
    values = g.weight([1, heads, keys, g.size()])
    return g.add("MatMul", [weights, values])


# Recurrent layers.

LONGEST_AXIS = 9
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {"RNN": ["Sigmoid"], "GRU": ["Sigmoid", "Softsign"], "LSTM": ["Sigmoid", "Softsign", "Tanh"]}


HALF_LAYERS = frozenset(f"{op} in half precision" for op in GATES)


@maker(*sorted(HALF_LAYERS), weight=8)
def recurrent_in_half(g: Builder, name: str) -> list[Value]:
    """Add a recurrent layer between casts to a half type and back."""
    op = name.split()[0]
    if g.depth or g.half is None:
        raise Rejected
    steps, batch, width, hidden = (min(g.size(), LONGEST_AXIS) for _ in range(4))
    value = g.source([max(steps, 2), batch, width], 1 if g.chance(0.5) else None)
    directions, rows = g.choose([1, 2]), GATES[op] * hidden

    def cast(argument: Value) -> Value:
        return g.add_several("Cast", [argument], 1, wild=True, to=g.half)[0]

    def weight(*shape: int) -> Value:
        # Larger weights saturate the layer: 1 - y * y of a rounded y near one has no correct digit.
        return cast(g.parameter(array=0.4 * g.numbers(shape)))

    inputs: list[Value | None] = [
        cast(value),
        weight(directions, rows, width),
        weight(directions, rows, hidden),
        weight(directions, 2 * rows) if g.chance(0.6) else None,
        lengths_of(g, value, 1, value.shape[0], np.int32) if g.chance(0.4) else None,
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional" if directions == 2 else "forward"}
    if op == "GRU" and g.chance(0.5):
        attributes["linear_before_reset"] = 1
    made = g.add_several(op, inputs, 3 if op == "LSTM" else 2, wild=True, **attributes)
    return [g.add("Cast", [one], to=FLOAT) for one in made[: int(g.rng.integers(1, len(made) + 1))]]


@maker(*GATES, weight=3)
def recurrent(g: Builder, op: str) -> list[Value]:
    # Short axes: the reference computes a separate product for each step, which is slow.
    steps, batch, width, hidden = (min(g.size(), LONGEST_AXIS) for _ in range(4))
    value = g.pick(
        lambda one: (
            one.is_float and one.rank == 3 and not one.is_open(0) and not one.is_open(2) and one.array.size <= 400
        )
    )
    if value is None or g.chance(0.6):
        value = g.source([max(steps, 2), batch, width], 1 if g.chance(0.5) else None)
    steps, batch, width = value.shape
    direction = g.choose(["forward", "reverse", "bidirectional"])
    directions = 2 if direction == "bidirectional" else 1
    rows = GATES[op] * hidden
    inputs: list[Value | None] = [
        value,
        g.weight([directions, rows, width]),
        g.weight([directions, rows, hidden]),
        g.weight([directions, 2 * rows]) if g.chance(0.6) else None,
        lengths_of(g, value, 1, steps, np.int32) if g.chance(0.6) else None,
    ]
    for _ in range(2 if op == "LSTM" else 1):
        there = g.chance(0.4) and not value.is_open(1)
        inputs.append(g.weight([directions, batch, hidden]) if there else None)
    if op == "LSTM":
        inputs.append(g.weight([directions, 3 * hidden]) if g.chance(0.3) else None)
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if g.chance(0.2):
        attributes["activations"] = FUNCTIONS[op] * directions
    if op == "GRU" and g.chance(0.5):
        attributes["linear_before_reset"] = 1
    outputs = [g.chance(0.7) for _ in range(3 if op == "LSTM" else 2)]
    outputs[int(g.rng.integers(len(outputs)))] = True
    while not outputs[-1]:
        outputs.pop()
    made = g.add_several(op, inputs, outputs, **attributes)
    if outputs[0] and g.chance(0.5):
        part_of(g, made[0], 0)
    return made


# Bodies.


def own(body: Builder, value: Value) -> Value:
    """Return the value, or a copy by an Identity if no node of the body computes it."""
    names = {name for node in body.nodes for name in node.output}
    return value if value.name in names else body.add("Identity", [value])


def same_shape(body: Builder, value: Value, length: int) -> Value:
    """Add a chain of nodes to the body, from the value to a result of the same shape."""
    for _ in range(length):
        step = int(body.rng.integers(4))
        if step == 0:
            value = body.add(body.choose(["Tanh", "Sin", "Sigmoid", "Neg", "Erf"]), [value])
        elif step == 1:
            other = body.pick(
                lambda one, value=value: (
                    one.is_float
                    and one.rank <= value.rank
                    and all(fits_into(a.shape, b.shape) for a, b in zip(one.samples, value.samples, strict=True))
                )
            )
            other = other if other is not None else body.weight(body.within(value))
            value = body.add(body.choose(["Add", "Sub", "Mul"]), [value, other])
        elif step == 2:
            if body.depth < DEEPEST:
                mark = body.mark()
                try:
                    value = branches(body, value)
                except Rejected:
                    body.rewind(mark)
        else:
            value = mixed(body, value)
    return value


def mixed(body: Builder, value: Value) -> Value:
    """Add a number to the value: a mean of the result of any operator."""
    before = len(body.values)
    draw(body, deep=body.depth < DEEPEST)
    found = [one for one in body.values[before:] if one.is_float and one.is_finite]
    if not found:
        return value
    number = body.add("ReduceMean", [found[-1]], keepdims=0)
    return body.add("Add", [value, body.add("Tanh", [number])])


def fits_into(shape: tuple[int, ...], larger: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, larger) == larger
    except ValueError:
        return False


def number_condition(g: Builder) -> Value:
    """Return a scalar bool: a constant, an input or a comparison."""
    step = int(g.rng.integers(4))
    if step == 0:
        return g.constant(g.chance(0.5), np.bool_)
    if step == 1 and g.depth == 0:
        return g.input([np.asarray(g.chance(0.5))] * len(g.batches), "on")
    value = g.float()
    total = g.add("ReduceSum", [value], keepdims=0)
    bound = g.scalar(uniform(g, -1, 1))
    g.distinct_pair(total, bound)
    return g.add("Less", [total, bound])


def branches(g: Builder, value: Value) -> Value:
    """Add an If with a chain of nodes in each branch, which preserves the shape."""
    chosen = number_condition(g)
    made = []
    for _ in range(2):
        body = g.body()
        result = own(body, same_shape(body, value, int(g.rng.integers(1, 4))))
        made.append(body.closed([], [result], shapes=g.chance(0.7)))
    return g.add("If", [chosen], then_branch=made[0], else_branch=made[1])


@maker("If", weight=3)
def if_(g: Builder) -> Value:
    return branches(g, g.float())


@maker("Loop", weight=3)
def loop(g: Builder) -> list[Value]:
    value = g.float(0, 3)
    if g.special:
        raise Rejected
    body = g.body()
    zero = [np.asarray(0, np.int64)] * len(g.batches)
    yes = [np.asarray(True)] * len(g.batches)
    place = body.formal(zero, moves=False, stem="at")
    on = body.formal(yes, moves=False, stem="on")
    carried = [body.formal(value.samples, moves=True)]
    if g.chance(0.3):
        carried.append(body.formal([np.asarray(0.5, np.float32)] * len(g.batches), moves=True))
    if g.chance(0.3):
        body.values.append(place)
    nexts = []
    for one in carried:
        chained = same_shape(body, one, int(g.rng.integers(1, 4)))
        nexts.append(own(body, body.add(g.choose(["Tanh", "Sin"]), [chained])))
    still = body.add("Identity", [on])
    if g.chance(0.2):
        still = body.add("Less", [place, body.constant(int(g.rng.integers(0, 3)), np.int64)])
    collected = [own(body, g.choose([*nexts, *carried])) for _ in range(int(g.rng.integers(0, 3)))]
    if len({one.name for one in collected}) < len(collected) or {one.name for one in collected} & {
        one.name for one in nexts
    }:
        collected = [body.add("Neg", [one]) for one in collected]
    counted = int(g.rng.integers(1, 5))
    iterations = (
        g.input([np.asarray(counted, np.int64)] * 2, "most")
        if g.chance(0.3) and not g.depth
        else g.constant(counted, np.int64)
    )
    starts = [value] + ([g.scalar(0.5)] if len(carried) > 1 else [])
    graph = body.closed([place, on, *carried], [still, *nexts, *collected])
    first = None if g.chance(0.5) else g.constant(True, np.bool_)
    return g.add_several("Loop", [iterations, first, *starts], len(nexts) + len(collected), body=graph)


@maker("growing Loop", weight=2)
def growing_loop(g: Builder) -> list[Value]:
    """Add a Loop that appends to a carried value, like a decoder; each iteration reads the complete value."""
    value = g.float(1, 3)
    closed = [axis for axis in range(value.rank) if not value.is_open(axis)]
    if g.special or not closed:
        raise Rejected
    axis = int(g.choose(closed))
    body = g.body()
    place = body.formal([np.asarray(0, np.int64)] * len(g.batches), moves=False, stem="at")
    on = body.formal([np.asarray(True)] * len(g.batches), moves=False, stem="on")
    rows = body.formal(value.samples, moves=True)
    shares = body.add("Softmax", [rows], axis=axis)
    parts = body.add("Mul", [shares, rows])
    newest = body.add("Slice", [rows, body.ints(-1), body.ints(np.iinfo(np.int64).max), body.ints(axis)])
    mixed = body.add("ReduceSum", [parts, body.ints(axis)], keepdims=1)
    # Other nodes do not read values of changing size.
    grown = {rows.name, shares.name, parts.name}
    body.values = [one for one in body.values if one.name not in grown]
    chained = same_shape(body, body.add("Add", [mixed, newest]), int(g.rng.integers(0, 3)))
    made = own(body, body.add(g.choose(["Tanh", "Sin"]), [chained]))
    if made.shape != newest.shape:
        raise Rejected
    collected = [body.add("Neg", [made])] if g.chance(0.4) else []
    longer = body.add("Concat", [rows, made], axis=axis)
    still = body.add("Identity", [on])
    if g.chance(0.3):
        still = body.add("Less", [place, body.constant(int(g.rng.integers(0, 3)), np.int64)])
    graph = body.closed([place, on, rows], [still, longer, *collected])
    for info in (graph.input[2], graph.output[1]):
        info.type.tensor_type.shape.dim[axis].Clear()
    counted = int(g.rng.integers(1, 5))
    iterations = (
        g.input([np.asarray(counted, np.int64)] * 2, "most")
        if g.chance(0.3) and not g.depth
        else g.constant(counted, np.int64)
    )
    return g.add_several("Loop", [iterations, None, value], 1 + len(collected), body=graph)


@maker("Scan", weight=3)
def scan(g: Builder) -> list[Value]:
    value = g.float(1, 4)
    if g.special:
        raise Rejected
    axis = int(g.rng.integers(value.rank))
    body = g.body()
    row = body.formal([np.take(sample, 0, axis) for sample in value.samples], moves=True)
    states: list[Value] = []
    starts: list[Value] = []
    if g.chance(0.8):
        start = g.parameter([1 if row.is_open(k) else size for k, size in enumerate(row.shape)])
        if row.open_axes:
            start = g.add("Mul", [start, g.add("Gather", [value, g.constant(0, np.int64)], axis=axis)])
        starts.append(start)
        states.append(body.formal(start.samples, moves=True))
    if states:
        together = body.add(g.choose(["Add", "Mul", "Sub"]), [states[0], row])
        nexts = [
            own(body, body.add(g.choose(["Tanh", "Sin"]), [same_shape(body, together, int(g.rng.integers(0, 3)))]))
        ]
    else:
        nexts = []
    results = (
        [body.add(g.choose(["Neg", "Cos"]), [same_shape(body, row, int(g.rng.integers(0, 3)))])]
        if not nexts
        else [body.add("Neg", [g.choose([nexts[0], row])])]
    )
    graph = body.closed([*states, row], [*nexts, *results])
    attributes: dict[str, Any] = {"num_scan_inputs": 1, "scan_input_axes": [axis], "body": graph}
    if g.chance(0.5):
        attributes["scan_input_directions"] = [int(g.chance(0.5))]
    if g.chance(0.5):
        attributes["scan_output_directions"] = [int(g.chance(0.5))] * len(results)
    if g.chance(0.4):
        attributes["scan_output_axes"] = [int(g.rng.integers(-results[0].rank - 1, results[0].rank + 1))]
    return g.add_several("Scan", [*starts, value], len(nexts) + len(results), **attributes)
