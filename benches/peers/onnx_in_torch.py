"""Conversion of ONNX networks to PyTorch, with the functions that are fast in PyTorch.

The graph is converted to a list of calls once. Values that depend on no input and no weight are computed at conversion.
Patterns of exporters are fused again: linear layers, GELU, scaled dot product attention and LSTM. An unknown operator
or pattern is an error, because the comparison needs the same function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper
from torch.nn import functional as F  # noqa: N812

# Operators with a backward pass that does not read their output, so that an activation may overwrite this output.
OVERWRITABLE = {"BatchNormalization", "Conv", "Gemm", "Add"}
# Largest bias of a masked attention score.
MASKED = -1e4


def adamw(trained: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Returns PyTorch's fused AdamW with the settings of a workload."""
    return torch.optim.AdamW(
        trained,
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        eps=settings["epsilon"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )


# Operators with sizes, axes or positions as inputs after the first one.
TAKES_SIZES = ("Expand", "Reshape", "Slice", "Squeeze", "Unsqueeze")


class Network:
    """Forward pass of a model for batches of one shape. `weights` are tensors by name."""

    def __init__(self, model: ModelProto, weights: Mapping[str, Any], trained: Sequence[str], x: Any) -> None:
        self.weights = dict(weights)
        self._trained = set(trained)
        graph = model.graph
        self._producer: dict[str, NodeProto] = {node.output[0]: node for node in graph.node}
        self._uses = Counter(name for node in graph.node for name in node.input)
        self._known: dict[str, Any] = {}
        self._find_constants(graph.input[0].name, x)
        self._places: dict[str, int] = {graph.input[0].name: 0}
        self._start: list[Any] = [None]
        self._calls: list[tuple[Callable[..., Any], tuple[int, ...], int]] = []
        self._result = self._place(graph.output[0].name)
        last: dict[int, int] = {}
        for number, (_, inputs, _) in enumerate(self._calls):
            last |= dict.fromkeys(inputs, number)
        # A value is freed after its last use, as in the forward method of a PyTorch module.
        held = {place for place, value in enumerate(self._start) if value is not None}
        self._steps = [
            (call, inputs, output, tuple(place for place in set(inputs) if last[place] == number and place not in held))
            for number, (call, inputs, output) in enumerate(self._calls)
        ]

    def to(self, device: str) -> None:
        """Moves weights and constants to a device, and replaces `weights` by the moved tensors."""
        moved = {id(value): value.to(device) for value in self.weights.values()}
        self.weights = {name: moved[id(value)] for name, value in self.weights.items()}
        self._start = [
            value if value is None else moved[id(value)] if id(value) in moved else value.to(device)
            for value in self._start
        ]

    def __call__(self, x: Any) -> Any:
        """Returns the output of the model."""
        values = self._start.copy()
        values[0] = x
        for call, inputs, output, dead in self._steps:
            values[output] = call(*[values[place] for place in inputs])
            for place in dead:
                values[place] = None
        return values[self._result]

    def _find_constants(self, data: str, x: Any) -> None:
        """Computes all values that depend on neither the input nor weights, except on their shapes."""
        shapes = {name: value.to("meta") for name, value in self.weights.items()} | {data: x.to("meta")}
        for node in self._producer.values():
            names = [name for name in node.input if name]
            if node.op_type == "Shape":
                self._known[node.output[0]] = torch.tensor(shapes[names[0]].shape)
                continue
            call, _ = self._spelled_out(node, {})
            if all(name in self._known for name in names):
                self._known[node.output[0]] = call(*[self._known[name] for name in names])
            elif node.op_type == "LSTM":
                steps, batch, _ = shapes[names[0]].shape
                shapes[node.output[0]] = torch.empty(steps, 1, batch, shapes[names[2]].shape[2], device="meta")
            else:
                arguments = [self._known[name] if name in self._known else shapes[name] for name in names]
                on_meta = [v.to("meta") if v.is_floating_point() and v.numel() > 1 else v for v in arguments]
                shapes[node.output[0]] = call(*on_meta)

    def _place(self, name: str) -> int:
        """Returns the index of a value. Appends the calls that compute the value if it has no index yet."""
        if name not in self._places:
            if name in self.weights or name in self._known:
                self._places[name] = len(self._start)
                self._start.append(self.weights[name] if name in self.weights else self._known[name])
            else:
                call, names = self._call(self._producer[name])
                inputs = tuple(self._place(name) for name in names)
                self._places[name] = len(self._start)
                self._start.append(None)
                self._calls.append((call, inputs, self._places[name]))
        return self._places[name]

    def _call(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]]:
        """Returns the function of a node and the values that it reads.

        For a fused pattern, these are inputs of earlier nodes.
        """
        for pattern in (self._linear, self._gelu, self._attention, self._lstm, self._in_place):
            found = pattern(node)
            if found is not None:
                return found
        call, names = self._spelled_out(node, self._known)
        index = self._known.get(names[1]) if node.op_type == "Gather" else None
        if index is not None and index.ndim == 0:
            position = int(index)
            return (lambda value: call(value, position)), names[:1]
        if node.op_type in TAKES_SIZES and all(name in self._known for name in names[1:]):
            # Reading a tensor of sizes in each call would wait for a GPU, and break a compiled graph.
            sizes = [_ints(self._known[name]) for name in names[1:]]
            return (lambda value: call(value, *sizes)), names[:1]
        return call, names

    # Fusion of exporter patterns.

    def _producer_of(self, name: str, operator: str) -> NodeProto | None:
        """Returns the node that produces a value, if the operator matches and the value has no other use."""
        node = self._producer.get(name)
        return node if node is not None and node.op_type == operator and self._uses[name] == 1 else None

    def _split(self, node: NodeProto, operator: str) -> tuple[NodeProto, str] | None:
        """Returns the input produced by this operator for this binary node only, and the name of the other input."""
        first, second = node.input
        for name, other in ((first, second), (second, first)):
            made = self._producer_of(name, operator)
            if made is not None:
                return made, other
        return None

    def _number(self, name: str) -> float | None:
        value = self._known.get(name)
        return float(value) if value is not None and value.numel() == 1 else None

    def _weight_of(self, product: NodeProto) -> str | None:
        """Returns W of a product x · Wᵀ."""
        turned = self._producer.get(product.input[1])
        if turned is None or turned.op_type != "Transpose" or turned.input[0] not in self.weights:
            return None
        return turned.input[0] if self.weights[turned.input[0]].ndim == 2 else None

    def _linear(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]] | None:
        """Matches a product x · Wᵀ, with or without a bias."""
        if node.op_type == "MatMul":
            weight = self._weight_of(node)
            return None if weight is None else (F.linear, [node.input[0], weight])
        found = self._split(node, "MatMul") if node.op_type == "Add" else None
        if found is None or found[1] not in self.weights or self.weights[found[1]].ndim != 1:
            return None
        weight = self._weight_of(found[0])
        return None if weight is None else (F.linear, [found[0].input[0], weight, found[1]])

    def _gelu(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]] | None:
        """Matches the product x · (erf(x / √2) + 1) · 0.5."""
        if node.op_type != "Mul" or self._number(node.input[1]) != 0.5:
            return None
        product = self._producer_of(node.input[0], "Mul")
        found = self._split(product, "Add") if product is not None else None
        if found is None or self._number(found[0].input[1]) != 1.0:
            return None
        erf = self._producer_of(found[0].input[0], "Erf")
        ratio = self._producer_of(erf.input[0], "Div") if erf is not None else None
        if ratio is None or ratio.input[0] != found[1]:
            return None
        root = self._number(ratio.input[1])
        return (F.gelu, [found[1]]) if root is not None and math.isclose(root, math.sqrt(2), rel_tol=1e-6) else None

    def _attention(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]] | None:
        """Matches softmax(q · kᵀ · scale + mask) · v, with a causal mask or none."""
        softmax = self._producer_of(node.input[0], "Softmax") if node.op_type == "MatMul" else None
        if softmax is None:
            return None
        scores, mask = softmax.input[0], None
        masked = self._producer_of(scores, "Add")
        if masked is not None:
            scores, mask = masked.input[0], self._known[masked.input[1]]
        scaled = self._producer_of(scores, "Mul")
        scale = self._number(scaled.input[1]) if scaled is not None else None
        product = self._producer_of(scaled.input[0], "MatMul") if scaled is not None else None
        if product is None or scale is None:
            return None
        if mask is not None:
            hidden = torch.triu(torch.ones_like(mask, dtype=torch.bool), 1)
            assert torch.equal(mask != 0, hidden)
            assert (mask[hidden] <= MASKED).all(), "the mask is not causal"
        causal = mask is not None

        def call(q: Any, turned_k: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(q, turned_k.transpose(-1, -2), v, is_causal=causal, scale=scale)

        return call, [*product.input, node.input[1]]

    def _lstm(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]] | None:
        """Matches an LSTM in one direction without peepholes. Its weights are PyTorch's with reordered gates."""
        if node.op_type != "LSTM":
            return None
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes.keys() == {"hidden_size"}, attributes
        x, w, r, b, lengths, h, c = node.input
        assert not lengths
        names = [*self._ancestors(w), *self._ancestors(r), *self._ancestors(b)]
        weights = [self.weights[name].detach() for name in names]
        i, f, g, o = zip(*(weight.chunk(4) for weight in weights), strict=True)
        wanted = [torch.cat(gates) for gates in zip(i, o, f, g, strict=True)]
        found = [self._evaluated(name)[0] for name in (w, r)]
        assert all(torch.equal(a, b) for a, b in zip(wanted, [*found, *self._evaluated(b)[0].chunk(2)], strict=True))

        def call(x: Any, h: Any, c: Any, *weights: Any) -> Any:
            # The call of torch.nn.LSTM: with biases, one layer, no dropout, in training, one direction, time first.
            return torch.lstm(x, (h, c), weights, True, 1, 0.0, True, False, False)[0].unsqueeze(1)

        return call, [x, h, c, *names]

    def _ancestors(self, name: str) -> list[str]:
        """Returns the weights from which a value is computed, each once."""
        if name in self.weights:
            return [name]
        node = self._producer.get(name)
        before = node.input if node is not None else []
        return list(dict.fromkeys(weight for value in before for weight in self._ancestors(value)))

    def _evaluated(self, name: str) -> Any:
        """Computes a value that depends only on weights."""
        if name in self.weights:
            return self.weights[name].detach()
        if name in self._known:
            return self._known[name]
        node = self._producer[name]
        call, names = self._spelled_out(node, self._known)
        return call(*[self._evaluated(name) for name in names])

    def _in_place(self, node: NodeProto) -> tuple[Callable[..., Any], list[str]] | None:
        """Matches an activation that may overwrite its argument."""
        if node.op_type not in ("Relu", "Clip") or self._uses[node.input[0]] != 1:
            return None
        before = self._producer.get(node.input[0])
        if before is None or before.op_type not in OVERWRITABLE:
            return None
        if node.op_type == "Relu":
            return torch.relu_, [node.input[0]]
        low, high = float(self._known[node.input[1]]), float(self._known[node.input[2]])
        return lambda x: F.hardtanh(x, low, high, inplace=True), [node.input[0]]

    # Conversion of single operators.

    def _spelled_out(self, node: NodeProto, known: Mapping[str, Any]) -> tuple[Callable[..., Any], list[str]]:
        """Returns the function of a node and its input names.

        A number in ``known`` may become a part of the function. Inputs that must be constants are always known.
        """
        a = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        names = [name for name in node.input if name]
        if node.op_type in ARITHMETIC:
            return _with_numbers(ARITHMETIC[node.op_type], names, known)
        if node.op_type == "BatchNormalization":
            call = _batch_norm(a, training=not self._trained.isdisjoint(node.input[1:3]))
        else:
            call = OPERATORS[node.op_type](a)
        assert not a, f"{node.op_type}: {a} is not supported"
        return call, names


def _with_numbers(
    call: Callable[..., Any], names: list[str], known: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[str]]:
    """Converts a binary operation. If the second value is a number, it becomes a constant of the function."""
    number = known.get(names[1])
    if number is None or number.numel() != 1:
        return call, names
    value = float(number)
    return lambda x: call(x, value), names[:1]


def _ints(value: Any) -> list[int]:
    return [int(size) for size in value]


def _padding(a: dict[str, Any], rank: int) -> list[int]:
    pads = a.pop("pads", [0] * 2 * rank)
    assert pads[:rank] == pads[rank:], "asymmetric padding is not supported"
    return list(pads[:rank])


def _batch_norm(a: dict[str, Any], training: bool) -> Callable[..., Any]:
    """Returns BatchNormalization: in training with batch statistics and updates, otherwise with running statistics."""
    a.pop("training_mode", None)
    momentum, epsilon = 1 - a.pop("momentum", 0.9), a.pop("epsilon", 1e-5)

    def call(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        if x.device.type == "meta":
            return x
        return F.batch_norm(x, mean, var, scale, bias, training, momentum, epsilon)

    return call


def _conv(a: dict[str, Any]) -> Callable[..., Any]:
    rank = len(a.pop("kernel_shape"))
    assert rank == 2
    strides, padding = a.pop("strides", [1] * rank), _padding(a, rank)
    dilations, group = a.pop("dilations", [1] * rank), a.pop("group", 1)
    return lambda x, w, bias=None: F.conv2d(x, w, bias, strides, padding, dilations, group)


def _max_pool(a: dict[str, Any]) -> Callable[..., Any]:
    window = a.pop("kernel_shape")
    strides, padding = a.pop("strides", [1] * len(window)), _padding(a, len(window))
    dilations, ceil = a.pop("dilations", [1] * len(window)), bool(a.pop("ceil_mode", 0))
    return lambda x: F.max_pool2d(x, window, strides, padding, dilations, ceil)


def _gemm(a: dict[str, Any]) -> Callable[..., Any]:
    assert (a.pop("alpha", 1.0), a.pop("beta", 1.0), a.pop("transB", 0)) == (1.0, 1.0, 1)
    return lambda x, w, bias: F.linear(x, w, bias)


def _reduce_mean(a: dict[str, Any]) -> Callable[..., Any]:
    axes, keep = list(a.pop("axes")), bool(a.pop("keepdims", 1))
    return lambda x: x.mean(axes, keep)


def _layer_norm(a: dict[str, Any]) -> Callable[..., Any]:
    epsilon = a.pop("epsilon", 1e-5)
    assert a.pop("axis", -1) == -1
    return lambda x, scale, bias: F.layer_norm(x, scale.shape, scale, bias, epsilon)


def _gather(a: dict[str, Any]) -> Callable[..., Any]:
    axis = a.pop("axis", 0)

    def call(x: Any, indices: Any) -> Any:
        if isinstance(indices, int) or indices.ndim == 0:
            return x.select(axis, int(indices))
        assert axis == 0
        assert x.ndim == 2
        return F.embedding(indices, x)

    return call


def _slice(x: Any, starts: Any, ends: Any, axes: Any) -> Any:
    for start, end, axis in zip(_ints(starts), _ints(ends), _ints(axes), strict=True):
        x = x.narrow(axis, start, min(end, x.shape[axis]) - start)
    return x


def _reshape(a: dict[str, Any]) -> Callable[..., Any]:
    assert a.pop("allowzero", 0) == 0
    return lambda x, shape: x.reshape([x.shape[k] if size == 0 else size for k, size in enumerate(_ints(shape))])


def _unsqueeze(x: Any, axes: Any) -> Any:
    for axis in sorted(_ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _constant(a: dict[str, Any]) -> Callable[..., Any]:
    value = torch.from_numpy(np.array(numpy_helper.to_array(a.pop("value"))))
    return lambda: value


def _flatten(a: dict[str, Any]) -> Callable[..., Any]:
    assert a.pop("axis", 1) == 1
    return lambda x: x.flatten(1)


def _hidden_size(a: dict[str, Any]) -> Callable[..., Any]:
    a.pop("hidden_size")

    def call(*_: Any) -> Any:
        raise AssertionError("a call of an LSTM is not supported")

    return call


def _plain(call: Callable[..., Any]) -> Callable[[dict[str, Any]], Callable[..., Any]]:
    return lambda a: call


ARITHMETIC: dict[str, Callable[..., Any]] = {"Add": torch.add, "Div": torch.div, "Mul": torch.mul}
OPERATORS: dict[str, Callable[[dict[str, Any]], Callable[..., Any]]] = {
    "Clip": _plain(lambda x, low, high: F.hardtanh(x, float(low), float(high))),
    "Concat": lambda a: (lambda axis: lambda *xs: torch.cat(xs, axis))(a.pop("axis")),
    "Constant": _constant,
    "Conv": _conv,
    "Erf": _plain(torch.erf),
    "Expand": _plain(lambda x, shape: x.expand(_ints(shape)).contiguous()),
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "LSTM": _hidden_size,
    "LayerNormalization": _layer_norm,
    "MatMul": _plain(torch.matmul),
    "MaxPool": _max_pool,
    "ReduceMean": _reduce_mean,
    "Relu": _plain(torch.relu),
    "Reshape": _reshape,
    "Slice": _plain(_slice),
    "Softmax": lambda a: (lambda axis: lambda x: torch.softmax(x, axis))(a.pop("axis", -1)),
    "Squeeze": _plain(lambda x, axes: x.squeeze(_ints(axes))),
    "Tanh": _plain(torch.tanh),
    "Transpose": lambda a: (lambda perm: lambda x: x.permute(perm))(list(a.pop("perm"))),
    "Unsqueeze": _plain(_unsqueeze),
}
