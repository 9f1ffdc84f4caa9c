"""Random nodes with packed weights, experts, grouped queries, and operators of diffusion models."""

from __future__ import annotations

from typing import Any

import numpy as np

from random_graphs.building import Builder, Rejected, Value
from random_graphs.expanding import MICROSOFT
from random_graphs.operators import maker, uniform

BLOCK = 16


def packed(g: Builder, *shape: int) -> Value:
    """Add bytes of packed integers."""
    return g.constant(g.rng.integers(0, 256, shape), np.uint8, stem="packed")


def scales(g: Builder, *shape: int) -> Value:
    """Add scales of packed weights."""
    return g.constant(g.rng.uniform(0.01, 0.06, shape), np.float32, stem="scales")


def rows(g: Builder) -> Value:
    """Return a value with a closed last axis, the rows of a product."""
    value = g.float(2, 4)
    if value.is_open(value.rank - 1):
        raise Rejected
    return value


@maker("MatMulNBits")
def packed_product(g: Builder) -> Value:
    value = rows(g)
    inner, columns, bits = value.shape[-1], g.size(), g.choose([4, 4, 8])
    blocks = -(-inner // BLOCK)
    inputs: list[Value | None] = [value, packed(g, columns, blocks, BLOCK * bits // 8), scales(g, columns, blocks)]
    bias = g.chance(0.3)
    if g.chance(0.4) or bias:
        inputs.append(packed(g, columns, -(-blocks * bits // 8)) if g.chance(0.6) else None)
    if bias:
        inputs += [None, g.weight([columns])]
    attributes = {"N": columns, "K": inner, "bits": bits, "block_size": BLOCK}
    return g.add("MatMulNBits", inputs, domain=MICROSOFT, **attributes)


@maker("MatMulBnb4")
def four_bit_floats(g: Builder) -> Value:
    value = rows(g)
    inner, columns = value.shape[-1], 2 * g.size()
    count = inner * columns
    inputs = [value, packed(g, count // 2), scales(g, -(-count // BLOCK))]
    attributes = {"N": columns, "K": inner, "block_size": BLOCK, "quant_type": g.choose([0, 1])}
    return g.add("MatMulBnb4", inputs, domain=MICROSOFT, **attributes)


@maker("GatherBlockQuantized")
def packed_rows(g: Builder) -> Value:
    count, bits = g.size(), g.choose([4, 8])
    width = BLOCK * g.choose([1, 2])
    index = g.index(g.choose([[g.size()], [g.size(), 2]]), count)
    inputs = [packed(g, count, width * bits // 8), index, scales(g, count, width // BLOCK)]
    if g.chance(0.4):
        inputs.append(packed(g, count, -(-width // BLOCK * bits // 8)))
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    return g.add("GatherBlockQuantized", inputs, domain=MICROSOFT, **attributes)


@maker("GroupQueryAttention")
def grouped_queries(g: Builder) -> Value:
    """Add the attention of a prompt without a past."""
    key_heads, length, batch = g.choose([1, 2]), min(g.size(), 5), min(g.size(), 3)
    heads, rotary = key_heads * g.choose([1, 2]), g.chance(0.5)
    size = 16 if rotary else 8
    query = g.source([batch, length, heads * size], None)
    key, value = (g.source([batch, length, key_heads * size], None) for _ in range(2))
    last = g.constant(np.full(batch, length - 1), np.int32)
    inputs: list[Value | None] = [query, key, value, None, None, last, g.constant([length], np.int32)]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": key_heads}
    if rotary:
        angles = np.arange(length)[:, None] / 10000 ** (np.arange(size // 2) / (size // 2))
        inputs += [g.constant(part(angles), np.float32) for part in (np.cos, np.sin)]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(g.chance(0.3))}
    if g.chance(0.3):
        attributes["softcap"] = uniform(g, 0.5, 2)
    if g.chance(0.3):
        attributes["scale"] = uniform(g, 0.1, 0.6)
    if g.chance(0.3):
        attributes["local_window_size"] = int(g.rng.integers(1, length + 1))
    return g.add_several("GroupQueryAttention", inputs, 3, domain=MICROSOFT, **attributes)[0]


@maker("MoE")
def experts(g: Builder) -> Value:
    value = g.float(2, 2)
    width = value.shape[1]
    if value.is_open(1):
        raise Rejected
    count, hidden = int(g.rng.integers(2, 4)), g.size()
    router = g.add("MatMul", [value, g.weight([width, count])])
    g.distinct(router, [1])
    layers: list[Value | None] = []
    for shape in ([count, hidden, width], [count, width, hidden]):
        layers += [g.weight(shape), g.weight(shape[:2]) if g.chance(0.7) else None]
    selected = int(g.rng.integers(1, count + 1))
    attributes = {
        "k": selected,
        "activation_type": g.choose(["silu", "gelu", "identity"]),
        "normalize_routing_weights": int(selected > 1 and g.chance(0.5)),
    }
    return g.add("MoE", [value, router, *layers], domain=MICROSOFT, **attributes)


def images(g: Builder) -> Value:
    """Return a value of rank 4 with a batch axis and three closed axes."""
    value = g.pick(
        lambda value: value.is_float and value.rank == 4 and not any(value.is_open(axis) for axis in (1, 2, 3))
    )
    return value or g.source([g.size(), g.size(), g.size(), g.size()])


@maker("GroupNorm", "SkipGroupNorm")
def group_norm(g: Builder, op: str) -> Value:
    value = images(g)
    last = op == "SkipGroupNorm" or g.chance(0.6)
    channels = value.shape[3 if last else 1]
    groups = g.choose([k for k in range(1, channels + 1) if channels % k == 0])
    inputs: list[Value | None] = [value, g.weight([channels]), g.weight([channels])]
    total: tuple[np.ndarray, ...] = value.samples
    if op == "SkipGroupNorm":
        shapes = [sample.shape for sample in value.samples]
        found = g.pick(lambda one: one.is_float and [sample.shape for sample in one.samples] == shapes)
        skip = found if found is not None else g.add("Sin", [value])
        inputs.append(skip)
        total = tuple(one + other for one, other in zip(value.samples, skip.samples, strict=True))
        if g.chance(0.5):
            inputs.append(g.constant(0.3 * g.numbers([channels])))
    for sample in total:
        planes = np.moveaxis(sample, -1, 1) if last else sample
        if not (planes.reshape(len(sample), groups, -1).std(axis=2) > 0.05).all():
            raise Rejected
    attributes = {"groups": groups, "epsilon": uniform(g, 1e-5, 1e-2), "activation": int(g.chance(0.5))}
    if not last:
        attributes["channels_last"] = 0
    return g.add(op, inputs, domain=MICROSOFT, **attributes)


@maker("BiasAdd")
def bias_add(g: Builder) -> Value:
    value = g.float(3, 3)
    if value.is_open(2):
        raise Rejected
    shapes = [sample.shape for sample in value.samples]
    skip = g.pick(lambda one: one.is_float and [sample.shape for sample in one.samples] == shapes)
    return g.add("BiasAdd", [value, g.weight(value.shape[2:]), skip], domain=MICROSOFT)


@maker("BiasSplitGelu")
def bias_split_gelu(g: Builder) -> Value:
    value = g.float(3, 3)
    if value.is_open(2) or value.shape[2] % 2:
        raise Rejected
    return g.add("BiasSplitGelu", [value, g.weight(value.shape[2:])], domain=MICROSOFT)


@maker("NhwcConv")
def nhwc_conv(g: Builder) -> Value:
    value = images(g)
    height, width, channels = value.shape[1:]
    kernel = [int(g.rng.integers(1, min(size, 3) + 1)) for size in (height, width)]
    group = g.choose([1, 1, channels])
    outputs = group * g.choose([1, 2, 3])
    inputs = [value, g.weight([outputs, *kernel, channels // group])]
    if g.chance(0.5):
        inputs.append(g.weight([outputs]))
    attributes = {
        "kernel_shape": kernel,
        "group": group,
        "strides": [int(g.rng.integers(1, 3)) for _ in range(2)],
        "pads": [int(g.rng.integers(0, size)) for size in kernel] * 2,
    }
    return g.add("NhwcConv", inputs, domain=MICROSOFT, **attributes)


FUSED = frozenset(
    """
    MatMulNBits MatMulBnb4 GatherBlockQuantized GroupQueryAttention MoE GroupNorm SkipGroupNorm BiasAdd BiasSplitGelu
    NhwcConv
    """.split()
)
