"""Nineteen small networks of different kinds, the input of quantizers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nets import Builder
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

# Opset and version of the files. A mean has its axes as an input from opset 18, and the tool for four bits only changes
# the number of the opset to 21.
OLD, NEW = (17, 8), (21, 10)
CLASSES, BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 5, 16, 6, 16, 2, 24
IMAGE = (3, 12, 12)
# Bias of a masked score of attention. A larger magnitude would take the whole range of the integers.
MASKED = -30.0


@dataclass(frozen=True)
class Net:
    """A network with the output ``logits``, the names of its parameters, its loss, and a batch."""

    model: ModelProto
    parameters: set[str]
    loss: str
    x: np.ndarray
    target: np.ndarray


class Graph(Builder):
    """A network under construction, with random weights that depend on its name."""

    def __init__(self, name: str) -> None:
        super().__init__(np.random.default_rng(zlib.crc32(name.encode())))
        self.name = name
        self.versions = OLD

    def linear(self, name: str, x: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
        """Add a MatMul and perhaps an Add."""
        product = self.node(
            "MatMul", [x, self.weight(f"{name}.weight", [inputs, outputs], inputs)], f"{name}.product" if bias else name
        )
        return self.node("Add", [product, self.vector(f"{name}.bias", outputs, 0, 0.1)], name) if bias else product

    def gemm(self, name: str, x: str, inputs: int, outputs: int) -> str:
        """Add a Gemm with transposed weights."""
        values = [
            self.weight(f"{name}.weight", [outputs, inputs], inputs),
            self.vector(f"{name}.bias", outputs, 0, 0.1),
        ]
        return self.node("Gemm", [x, *values], name, transB=1)

    def image(self, name: str, x: str, inputs: int, outputs: int, kernel: int, *, stride: int = 1, **how: Any) -> str:
        """Add a convolution of images with a bias, padded to the size of the input."""
        group = how.get("group", 1)
        values = [
            self.weight(f"{name}.weight", [outputs, inputs // group, kernel, kernel], inputs // group * kernel**2),
            self.vector(f"{name}.bias", outputs, 0, 0.1),
        ]
        pads = [kernel // 2] * 4
        return self.node("Conv", [x, *values], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads, **how)

    def pooled(self, x: str, channels: int) -> str:
        """Add the head of a classifier of images."""
        flat = self.node("Flatten", [self.node("GlobalAveragePool", [x], "pooled")], "flat")
        return self.gemm("logits", flat, channels, CLASSES)

    def mean(self, x: str) -> str:
        """Add a mean over the tokens."""
        self.versions = NEW
        return self.node("ReduceMean", [x, self.constant("tokens_axis", [1], np.int64)], "mean", keepdims=0)

    def layer_norm(self, name: str, x: str, width: int) -> str:
        values = [self.vector(f"{name}.weight", width, 1, 0.1), self.vector(f"{name}.bias", width, 0, 0.1)]
        return self.node("LayerNormalization", [x, *values], name, axis=-1)

    def attention(self, name: str, x: str, mask: str | None = None) -> str:
        """Add self-attention of several heads."""
        shape = self.constant("heads", [0, 0, HEADS, WIDTH // HEADS], np.int64)
        heads = {}
        for part in ("query", "key", "value"):
            split = self.node(
                "Reshape", [self.linear(f"{name}.{part}", x, WIDTH, WIDTH), shape], f"{name}.{part}.split"
            )
            perm = [0, 2, 3, 1] if part == "key" else [0, 2, 1, 3]
            heads[part] = self.node("Transpose", [split], f"{name}.{part}.heads", perm=perm)
        scores = self.node("MatMul", [heads["query"], heads["key"]], f"{name}.scores")
        scores = self.node("Mul", [scores, self.constant("scale", (WIDTH // HEADS) ** -0.5)], f"{name}.scaled")
        if mask is not None:
            scores = self.node("Add", [scores, mask], f"{name}.masked")
        weights = self.node("Softmax", [scores], f"{name}.weights", axis=-1)
        mixed = self.node("MatMul", [weights, heads["value"]], f"{name}.mixed")
        moved = self.node("Transpose", [mixed], f"{name}.moved", perm=[0, 2, 1, 3])
        joined = self.node("Reshape", [moved, self.constant("joint", [0, 0, WIDTH], np.int64)], f"{name}.joined")
        return self.linear(f"{name}.out", joined, WIDTH, WIDTH)

    def gelu(self, name: str, x: str) -> str:
        """Add the exact GELU."""
        inner = self.node("Div", [x, self.constant("root", 2**0.5)], f"{name}.inner")
        outer = self.node("Add", [self.node("Erf", [inner], f"{name}.erf"), self.constant("one", 1)], f"{name}.outer")
        return self.node(
            "Mul", [self.node("Mul", [x, outer], f"{name}.product"), self.constant("half", 0.5)], f"{name}"
        )

    def classifier(
        self, x: np.ndarray | Sequence[int], classes_of: Sequence[int] = (), *, logits: Sequence[int] = (CLASSES,)
    ) -> Net:
        """Return the network as a classifier. ``x`` is a batch, or the sizes of the axes after the batch axis."""
        batch = x if isinstance(x, np.ndarray) else self.rng.standard_normal((BATCH, *x)).astype(np.float32)
        labels = self.rng.integers(0, CLASSES, (BATCH, *classes_of))
        return Net(self.finished(batch, logits), set(self.trained), "CrossEntropyLoss", batch, labels)

    def regression(self, x: Sequence[int], targets: Sequence[int], loss: str = "MSELoss") -> Net:
        """Return the network with a loss on floats of the sizes ``targets``."""
        batch = self.rng.standard_normal((BATCH, *x)).astype(np.float32)
        wanted = self.rng.standard_normal((BATCH, *targets)).astype(np.float32)
        if loss == "BCEWithLogitsLoss":
            wanted = (wanted > 0).astype(np.float32)
        return Net(self.finished(batch, targets), set(self.trained), loss, batch, wanted)

    def finished(self, x: np.ndarray, logits: Sequence[int]) -> ModelProto:
        values = self.trained | self.statistics | self.constants
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), ["batch", *x.shape[1:]])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", *logits])],
            [numpy_helper.from_array(value, key) for key, value in values.items()],
        )
        opset, version = self.versions
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version)
        checker.check_model(model, full_check=True)
        return model


NETS: dict[str, Callable[[], Net]] = {}


def net(make: Callable[[Graph], Net]) -> Callable[[Graph], Net]:
    """Register a network under the name of its function."""
    name = make.__name__
    NETS[name] = lambda: make(Graph(name))
    return make


@net
def perceptron(g: Graph) -> Net:
    h = g.node("Relu", [g.linear("fc1", "x", 12, 24)], "relu1")
    h = g.node("Relu", [g.linear("fc2", h, 24, 16)], "relu2")
    g.linear("logits", h, 16, CLASSES)
    return g.classifier([12])


@net
def transposed_gemm(g: Graph) -> Net:
    h = g.node("Tanh", [g.gemm("fc1", "x", 12, 20)], "tanh")
    # The second weights are not transposed.
    values = [g.weight("fc2.weight", [20, 16], 20), g.vector("fc2.bias", 16, 0, 0.1)]
    h = g.node("Relu", [g.node("Gemm", [h, *values], "fc2")], "relu")
    g.gemm("logits", h, 16, CLASSES)
    return g.classifier([12])


@net
def lenet(g: Graph) -> Net:
    h = "x"
    for at, (inputs, outputs) in enumerate([(3, 6), (6, 8)]):
        h = g.node("Relu", [g.image(f"conv{at}", h, inputs, outputs, 5)], f"relu{at}")
        h = g.node("MaxPool", [h], f"pool{at}", kernel_shape=[2, 2], strides=[2, 2])
    h = g.node("Flatten", [h], "flat")
    h = g.node("Relu", [g.gemm("fc", h, 72, 20)], "relu2")
    g.gemm("logits", h, 20, CLASSES)
    return g.classifier(IMAGE)


@net
def resnet(g: Graph) -> Net:
    h = g.node("Relu", [g.norm("n0", g.conv("c0", "x", 3, 8, 3, pads=[1] * 4), 8)], "r0")
    for at in (1, 2):
        branch = g.node("Relu", [g.norm(f"n{at}a", g.conv(f"c{at}a", h, 8, 8, 3, pads=[1] * 4), 8)], f"r{at}a")
        branch = g.norm(f"n{at}b", g.conv(f"c{at}b", branch, 8, 8, 3, pads=[1] * 4), 8)
        h = g.node("Relu", [g.node("Add", [h, branch], f"sum{at}")], f"r{at}b")
    g.pooled(h, 8)
    return g.classifier(IMAGE)


@net
def mobilenet(g: Graph) -> Net:
    low, high = g.constant("low", 0.0), g.constant("high", 6.0)
    h = g.node("Clip", [g.image("stem", "x", 3, 8, 3, stride=2), low, high], "stem.clip")
    for at, stride in enumerate((1, 2)):
        wide = g.node("Clip", [g.image(f"b{at}.expand", h, 8, 16, 1), low, high], f"b{at}.clip0")
        wide = g.image(f"b{at}.depthwise", wide, 16, 16, 3, stride=stride, group=16)
        narrow = g.image(f"b{at}.project", g.node("Clip", [wide, low, high], f"b{at}.clip1"), 16, 8, 1)
        h = g.node("Add", [h, narrow], f"b{at}.sum") if stride == 1 else narrow
    g.pooled(h, 8)
    return g.classifier(IMAGE)


@net
def hard_mobilenet(g: Graph) -> Net:
    """HardSwish and HardSigmoid, as in MobileNetV3."""
    h = g.node("HardSwish", [g.image("stem", "x", 3, 8, 3, stride=2)], "stem.swish")
    wide = g.node("HardSwish", [g.image("depthwise", h, 8, 8, 5, group=8)], "swish")
    squeezed = g.image("squeeze", g.node("GlobalAveragePool", [wide], "mean"), 8, 4, 1)
    gate = g.image("excite", g.node("Relu", [squeezed], "squeeze.relu"), 4, 8, 1)
    gated = g.node("Mul", [wide, g.node("HardSigmoid", [gate], "gate", alpha=1 / 6, beta=0.5)], "gated")
    g.pooled(g.node("Add", [h, g.image("project", gated, 8, 8, 1)], "sum"), 8)
    return g.classifier(IMAGE)


@net
def encoder(g: Graph) -> Net:
    """Two layers of a transformer, with the normalization after each residual."""
    h = "x"
    for at in (0, 1):
        h = g.layer_norm(f"l{at}.norm1", g.node("Add", [h, g.attention(f"l{at}", h)], f"l{at}.sum1"), WIDTH)
        wide = g.gelu(f"l{at}.gelu", g.linear(f"l{at}.up", h, WIDTH, 2 * WIDTH))
        h = g.node("Add", [h, g.linear(f"l{at}.down", wide, 2 * WIDTH, WIDTH)], f"l{at}.sum2")
        h = g.layer_norm(f"l{at}.norm2", h, WIDTH)
    g.linear("logits", g.mean(h), WIDTH, CLASSES)
    return g.classifier([TOKENS, WIDTH])


@net
def decoder(g: Graph) -> Net:
    """Two layers of a transformer with a causal mask and tied position embeddings; it predicts each token's class."""
    words = g.node("Gather", [g.weight("words.weight", [VOCABULARY, WIDTH], 4), "x"], "words")
    h = g.node("Add", [words, g.weight("positions.weight", [TOKENS, WIDTH], 16)], "embedded")
    mask = g.constant("mask", MASKED * np.triu(np.ones((TOKENS, TOKENS)), 1))
    for at in (0, 1):
        mixed = g.attention(f"l{at}", g.layer_norm(f"l{at}.norm1", h, WIDTH), mask)
        h = g.node("Add", [h, mixed], f"l{at}.sum1")
        wide = g.linear(f"l{at}.up", g.layer_norm(f"l{at}.norm2", h, WIDTH), WIDTH, 2 * WIDTH)
        h = g.node("Add", [h, g.linear(f"l{at}.down", g.gelu(f"l{at}.gelu", wide), 2 * WIDTH, WIDTH)], f"l{at}.sum2")
    scores = g.linear("head", g.layer_norm("norm", h, WIDTH), WIDTH, CLASSES, bias=False)
    # The loss has the classes on the second axis.
    g.node("Transpose", [scores], "logits", perm=[0, 2, 1])
    tokens = g.rng.integers(0, VOCABULARY, (BATCH, TOKENS))
    return g.classifier(tokens, [TOKENS], logits=[CLASSES, TOKENS])


def recurrent(g: Graph, op: str, gates: int, **attributes: Any) -> Net:
    """Return a classifier of the last state of a recurrent layer."""
    h = g.node("Transpose", ["x"], "steps", perm=[1, 0, 2])
    values = [
        g.weight("layer.W", [1, gates * WIDTH, 8], 16),
        g.weight("layer.R", [1, gates * WIDTH, WIDTH], 32),
        g.vector("layer.B", 2 * gates * WIDTH, 0, 0.1),
    ]
    g.trained["layer.B"] = g.trained["layer.B"][None]
    g.nodes.append(helper.make_node(op, [h, *values], ["", "last"], "layer", hidden_size=WIDTH, **attributes))
    h = g.node("Squeeze", ["last", g.constant("first_axis", [0], np.int64)], "state")
    g.linear("logits", h, WIDTH, CLASSES)
    return g.classifier([TOKENS, 8])


@net
def lstm(g: Graph) -> Net:
    return recurrent(g, "LSTM", 4)


@net
def gru(g: Graph) -> Net:
    return recurrent(g, "GRU", 3, linear_before_reset=1)


@net
def autoencoder(g: Graph) -> Net:
    h = g.node("Relu", [g.image("down1", "x", 3, 8, 3, stride=2)], "relu1")
    h = g.node("Relu", [g.image("down2", h, 8, 8, 3, stride=2)], "relu2")
    for name, outputs in (("up1", 8), ("logits", 3)):
        values = [g.weight(f"{name}.weight", [8, outputs, 4, 4], 32), g.vector(f"{name}.bias", outputs, 0, 0.1)]
        how = {"kernel_shape": [4, 4], "strides": [2, 2], "pads": [1] * 4}
        h = g.node("ConvTranspose", [h, *values], name, **how)
        h = g.node("Relu", [h], f"{name}.relu") if name == "up1" else h
    return g.regression(IMAGE, IMAGE)


@net
def unet(g: Graph) -> Net:
    high = g.node("Relu", [g.image("c1", "x", 3, 6, 3)], "r1")
    low = g.node("MaxPool", [high], "down", kernel_shape=[2, 2], strides=[2, 2])
    low = g.node("Relu", [g.image("c2", low, 6, 8, 3)], "r2")
    how = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
    up = g.node("Resize", [low, "", g.constant("scales", [1, 1, 2, 2])], "up", **how)
    h = g.node("Relu", [g.image("c3", g.node("Concat", [high, up], "joined", axis=1), 14, 6, 3)], "r3")
    g.image("logits", h, 6, 1, 1)
    return g.regression(IMAGE, [1, *IMAGE[1:]], "BCEWithLogitsLoss")


@net
def squeeze_excite(g: Graph) -> Net:
    h = g.node("Relu", [g.image("stem", "x", 3, 8, 3, stride=2)], "stem.relu")
    wide = g.node("Relu", [g.image("conv", h, 8, 8, 3)], "relu")
    squeezed = g.node("Relu", [g.image("squeeze", g.node("GlobalAveragePool", [wide], "mean"), 8, 4, 1)], "narrow")
    gate = g.node("Sigmoid", [g.image("excite", squeezed, 4, 8, 1)], "gate")
    h = g.node("Add", [h, g.node("Mul", [wide, gate], "gated")], "sum")
    g.pooled(h, 8)
    return g.classifier(IMAGE)


@net
def inception(g: Graph) -> Net:
    branches = [
        g.node("Relu", [g.image("one", "x", 3, 4, 1)], "one.relu"),
        g.node("Relu", [g.image("three", "x", 3, 6, 3)], "three.relu"),
        g.node("AveragePool", ["x"], "average", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
        g.node("MaxPool", ["x"], "largest", kernel_shape=[3, 3], pads=[1] * 4),
    ]
    joined = g.node("Concat", branches, "joined", axis=1)
    g.pooled(g.node("Relu", [g.image("mix", joined, 16, 12, 3, stride=2)], "mix.relu"), 12)
    return g.classifier(IMAGE)


@net
def texts(g: Graph) -> Net:
    words = g.node("Gather", [g.weight("words.weight", [VOCABULARY, WIDTH], 2), "x"], "words")
    h = g.node("Relu", [g.linear("fc", g.mean(words), WIDTH, WIDTH)], "relu")
    g.linear("logits", h, WIDTH, CLASSES)
    return g.classifier(g.rng.integers(0, VOCABULARY, (BATCH, TOKENS)))


@net
def signals(g: Graph) -> Net:
    """Convolutions along one axis, dilated, with padding by a node."""
    h = g.node("Pad", ["x", g.constant("pads", [0, 0, 2, 0, 0, 0], np.int64)], "padded")
    for at, (inputs, outputs, dilation) in enumerate([(4, 8, 1), (8, 8, 2)]):
        values = [g.weight(f"c{at}.weight", [outputs, inputs, 3], 3 * inputs), g.vector(f"c{at}.bias", outputs, 0, 0.1)]
        h = g.node("Conv", [h, *values], f"c{at}", kernel_shape=[3], dilations=[dilation])
        h = g.node("Relu", [h], f"r{at}")
    h = g.node("Flatten", [g.node("GlobalAveragePool", [h], "pooled")], "flat")
    g.gemm("logits", h, 8, CLASSES)
    return g.classifier([4, 20])


@net
def gates(g: Graph) -> Net:
    """LeakyRelu, and a sum of branches that a Softmax and a Sigmoid weigh."""
    h = g.node("LeakyRelu", [g.image("conv", "x", 3, 8, 3, stride=2)], "leaky", alpha=0.1)
    flat = g.node("Flatten", [g.node("GlobalAveragePool", [h], "pooled")], "flat")
    chosen = g.node("Softmax", [g.linear("choice", flat, 8, 8)], "chosen", axis=-1)
    opened = g.node("Sigmoid", [g.linear("gate", flat, 8, 8)], "opened")
    h = g.node("Add", [g.node("Mul", [flat, chosen], "picked"), g.node("Mul", [flat, opened], "passed")], "sum")
    g.linear("logits", g.node("LeakyRelu", [h], "leaky2", alpha=0.2), 8, CLASSES)
    return g.classifier(IMAGE)


@net
def mixer(g: Graph) -> Net:
    """Perceptrons along the tokens and along the features, between which the axes are swapped."""
    h = "x"
    for at, (size, other) in enumerate([(TOKENS, 12), (WIDTH, 24)]):
        rows = g.node("Transpose", [h], f"m{at}.rows", perm=[0, 2, 1]) if at == 0 else h
        wide = g.node("Relu", [g.linear(f"m{at}.up", rows, size, other)], f"m{at}.relu")
        narrow = g.linear(f"m{at}.down", wide, other, size)
        narrow = g.node("Transpose", [narrow], f"m{at}.back", perm=[0, 2, 1]) if at == 0 else narrow
        h = g.node("Add", [h, narrow], f"m{at}.sum")
    g.linear("logits", g.mean(h), WIDTH, CLASSES)
    return g.classifier([TOKENS, WIDTH])


@net
def shuffle(g: Graph) -> Net:
    """Half of the channels pass a grouped convolution; then the halves are interleaved, as in ShuffleNet."""
    h = g.node("Relu", [g.image("stem", "x", 3, 8, 3, stride=2)], "stem.relu")
    g.nodes.append(helper.make_node("Split", [h], ["left", "right"], "split", axis=1))
    right = g.node("Relu", [g.image("conv", "right", 4, 4, 3, group=2)], "conv.relu")
    joined = g.node("Concat", ["left", right], "joined", axis=1)
    split = g.node("Reshape", [joined, g.constant("split_shape", [0, 2, 4, 6, 6], np.int64)], "parts")
    swapped = g.node("Transpose", [split], "swapped", perm=[0, 2, 1, 3, 4])
    h = g.node("Reshape", [swapped, g.constant("joint_shape", [0, 8, 6, 6], np.int64)], "interleaved")
    g.pooled(g.node("Relu", [g.image("mix", h, 8, 12, 1)], "mix.relu"), 12)
    return g.classifier(IMAGE)
