"""Models for the classic TrainingSession, parameters for them, and helpers for sessions that both test files use.

Weights have more than eight elements unless a test asks for fewer: onnxruntime-training 1.15.0 trains no smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from nets import Builder
from onnx import ModelProto, checker, helper, numpy_helper
from optimizer_formulas import prescribing_model

from ortrain import InferenceSession, RunOptions, classic

Feeds: TypeAlias = dict[str, npt.NDArray[Any]]
State: TypeAlias = dict[str, npt.NDArray[Any]]
Draw: TypeAlias = Callable[[np.random.Generator, int], Feeds]

SEED, OPSET, IR_VERSION = 28, 17, 8
RATE, NORM, ACCUMULATED = "Learning_Rate", "global_gradient_norm", "Group_Accumulated_Gradients"
SCALE, FINITE = "loss_scale", "all_gradients_finite"
SGD, ADAM, LAMB = "SGDOptimizer", "AdamOptimizer", "LambOptimizer"
OPTIMIZERS = (SGD, ADAM, LAMB)


@dataclass(frozen=True)
class Net:
    """A model with a loss, its initial weights, and a source of batches."""

    model: ModelProto
    weights: dict[str, npt.NDArray[Any]]
    draw: Draw

    def batch(self, seed: int = 0, rows: int = 12) -> Feeds:
        """Return the inputs of a run; each seed gives other inputs."""
        return self.draw(np.random.default_rng([SEED, seed]), rows)


@dataclass
class Graph(Builder):
    """A network under construction with an explicit name for each input and output."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def nodes_of(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add a node with several results, under the name of the first result."""
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), outputs[0], **attributes))

    def linear(self, name: str, x: str, inputs: int, outputs: int) -> str:
        """Add a Gemm with the weight ``name.w`` and the bias ``name.b``."""
        parts = [self.weight(f"{name}.w", [inputs, outputs], inputs), self.vector(f"{name}.b", outputs, 0.0, 0.1)]
        return self.node("Gemm", [x, *parts], name)

    def net(
        self,
        draw: Draw,
        inputs: Mapping[str, tuple[npt.DTypeLike, Sequence[int | str]]],
        outputs: Mapping[str, tuple[npt.DTypeLike, Sequence[int | str]]],
        dtype: npt.DTypeLike = np.float32,
    ) -> Net:
        """Return the network, with weights of a data type."""
        weights = {name: values.astype(dtype) for name, values in self.trained.items()}
        given, made = (
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), list(shape))
                for name, (kind, shape) in described.items()
            ]
            for described in (inputs, outputs)
        )
        tensors = [numpy_helper.from_array(values, name) for name, values in (weights | self.constants).items()]
        graph = helper.make_graph(self.nodes, "graph", given, made, tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        checker.check_model(model, full_check=True)
        return Net(model, weights, draw)


# The models.


def regression(
    features: int = 12,
    targets: int = 10,
    dtype: npt.DTypeLike = np.float32,
    *,
    loss_shape: Sequence[int] = (),
    doubled: bool = False,
    side_outputs: bool = False,
    **mean: Any,
) -> Net:
    """Return a linear regression: ``pred = X W + b``, and ``loss`` is the mean of squares of its errors.

    Args:
        features: rows of ``W``.
        targets: columns of ``W``, and elements of ``b``.
        dtype: the type of weights, inputs and results.
        loss_shape: the shape of the loss, as the attributes in ``mean`` give it.
        doubled: multiply the prediction by the scalar ``two`` and by ``half``, which has the shape of ``b``, and
            reshape it to ``sizes``, which is int64.
        side_outputs: add the outputs ``wide`` (float64), ``best`` (int64) and ``shifted``, which is the prediction plus
            the initializer ``aside``. The loss does not depend on them.
        **mean: attributes of the ReduceMean that makes the loss.
    """
    graph = Graph()
    graph.weight("W", [features, targets], features)
    graph.vector("b", targets, 0.0, 0.1)
    graph.node("MatMul", ["X", "W"], "product")
    graph.node("Add", ["product", "b"], "sum" if doubled else "pred")
    if doubled:
        graph.constant("two", 2.0)
        graph.constant("half", np.full(targets, 0.5))
        graph.node("Mul", ["sum", "two"], "twice")
        graph.node("Mul", ["twice", "half"], "halved")
        graph.node("Reshape", ["halved", graph.constant("sizes", [-1, targets], np.int64)], "pred")
    graph.node("Sub", ["pred", "label"], "error")
    graph.node("Mul", ["error", "error"], "squares")
    graph.node("ReduceMean", ["squares"], "loss", **{"keepdims": 0, **mean})
    outputs: dict[str, tuple[npt.DTypeLike, Sequence[int | str]]] = {
        "pred": (dtype, ["N", targets]),
        "loss": (dtype, loss_shape),
    }
    if side_outputs:
        graph.node("Cast", ["pred"], "wide", to=helper.np_dtype_to_tensor_dtype(np.dtype(np.float64)))
        graph.node("ArgMax", ["pred"], "best", axis=1, keepdims=0)
        graph.node("Add", ["pred", graph.constant("aside", np.ones(targets), dtype)], "shifted")
        outputs |= {"wide": (np.float64, ["N", targets]), "best": (np.int64, ["N"]), "shifted": (dtype, ["N", targets])}
    truth = np.random.default_rng(SEED + 1).standard_normal((features, targets))

    def draw(rng: np.random.Generator, rows: int) -> Feeds:
        x = rng.standard_normal((rows, features))
        noise = 0.1 * rng.standard_normal((rows, targets))
        return {"X": x.astype(dtype), "label": (x @ truth + noise).astype(dtype)}

    return graph.net(draw, {"X": (dtype, ["N", features]), "label": (dtype, ["N", targets])}, outputs, dtype)


def classified(shape: Sequence[int], classes: int) -> Draw:
    """Return a source of batches: the inputs of each class are scattered around a center."""
    places = np.random.default_rng(SEED + 2).standard_normal((classes, *shape))

    def draw(rng: np.random.Generator, rows: int) -> Feeds:
        labels = rng.integers(0, classes, rows)
        x = 0.5 * places[labels] + 0.5 * rng.standard_normal((rows, *shape))
        return {"x": x.astype(np.float32), "labels": labels}

    return draw


def softmax_net(graph: Graph, logits: str, shape: Sequence[int], classes: int) -> Net:
    """Return the network with a softmax cross-entropy of its logits."""
    graph.nodes_of("SoftmaxCrossEntropyLoss", [logits, "labels"], ["loss", "log_prob"])
    return graph.net(
        classified(shape, classes),
        {"x": (np.float32, ["N", *shape]), "labels": (np.int64, ["N"])},
        {logits: (np.float32, ["N", classes]), "loss": (np.float32, [])},
    )


def classifier(
    features: int = 12,
    hidden: int = 16,
    classes: int = 10,
    *,
    gain: bool = False,
    dropout: float | None = None,
    training_mode: bool | None = None,
) -> Net:
    """Return a perceptron of two layers, ``fc1`` and ``fc2``, with softmax cross-entropy.

    Args:
        features: inputs.
        hidden: units of the first layer.
        classes: units of the second.
        gain: multiply the activation between the layers by the weight ``gain``, which has one element.
        dropout: the ratio of a Dropout between the layers; None for no Dropout.
        training_mode: the constant training mode of the Dropout; None leaves this input out.
    """
    graph = Graph()
    h = graph.node("Relu", [graph.linear("fc1", "x", features, hidden)], "active")
    if gain:
        h = graph.node("Mul", [h, graph.vector("gain", 1, 1.0, 0.0)], "gained")
    if dropout is not None:
        inputs = [h, graph.constant("ratio", dropout)]
        if training_mode is not None:
            inputs.append(graph.constant("mode", training_mode, np.bool_))
        h = graph.node("Dropout", inputs, "dropped", seed=7)
    return softmax_net(graph, graph.linear("fc2", h, hidden, classes), [features], classes)


def convolutional(size: int = 10, channels: int = 2, classes: int = 10) -> Net:
    """Return a convolution with a bias, a MaxPool, a Gemm, and softmax cross-entropy."""
    graph = Graph()
    filters = 12
    parts = [graph.weight("conv.w", [filters, channels, 3, 3], channels * 9), graph.vector("conv.b", filters, 0.0, 0.1)]
    graph.node("Conv", ["x", *parts], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    graph.node("Relu", ["conv"], "active")
    graph.node("MaxPool", ["active"], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    graph.node("Flatten", ["pooled"], "flat", axis=1)
    logits = graph.linear("fc", "flat", filters * (size // 2) ** 2, classes)
    return softmax_net(graph, logits, [channels, size, size], classes)


def transformer(tokens: int = 6, width: int = 16, classes: int = 10) -> Net:
    """Return a transformer block and a mean over tokens.

    The block is attention of one head and a perceptron, each with a residual and a LayerNormalization.
    """
    graph = Graph()

    def project(name: str, x: str, inputs: int, outputs: int) -> str:
        parts = [graph.weight(f"{name}.w", [inputs, outputs], inputs), graph.vector(f"{name}.b", outputs, 0.0, 0.1)]
        return graph.node("Add", [graph.node("MatMul", [x, parts[0]], f"{name}.product"), parts[1]], name)

    def added(name: str, x: str, y: str) -> str:
        parts = [graph.vector(f"{name}.w", width, 1.0, 0.1), graph.vector(f"{name}.b", width, 0.0, 0.1)]
        return graph.node("LayerNormalization", [graph.node("Add", [x, y], f"{name}.sum"), *parts], name, axis=-1)

    query, key, value = (project(name, "x", width, width) for name in ("query", "key", "value"))
    keys = graph.node("Transpose", [key], "keys", perm=[0, 2, 1])
    scores = graph.node("MatMul", [query, keys], "scores")
    scaled = graph.node("Mul", [scores, graph.constant("scale", width**-0.5)], "scaled")
    attention = graph.node("Softmax", [scaled], "attention", axis=-1)
    context = graph.node("MatMul", [attention, value], "context")
    h = added("norm1", "x", project("out", context, width, width))
    wide = graph.node("Relu", [project("up", h, width, 2 * width)], "wide")
    h = added("norm2", h, project("down", wide, 2 * width, width))
    pooled = graph.node("ReduceMean", [h], "pooled", axes=[1], keepdims=0)
    return softmax_net(graph, graph.linear("head", pooled, width, classes), [tokens, width], classes)


def prescribing(weights: Mapping[str, npt.NDArray[Any]]) -> Net:
    """Return a net with prescribed gradients: the sum of all weights, each times an input ``x_NAME``.

    The input ``x_NAME`` is the gradient of the weight ``NAME``.
    """

    def draw(rng: np.random.Generator, rows: int) -> Feeds:
        return prescribed({name: rng.standard_normal(w.shape).astype(w.dtype) for name, w in weights.items()})

    return Net(prescribing_model(weights), dict(weights), draw)


def prescribed(gradients: Mapping[str, npt.NDArray[Any]]) -> Feeds:
    """Return the inputs that give the weights of a prescribing net these gradients."""
    return {f"x_{name}": gradient for name, gradient in gradients.items()}


# Sessions.


def parameters(
    net: Net,
    optimizer: str = SGD,
    floats: Mapping[str, Mapping[str, float]] | None = None,
    ints: Mapping[str, Mapping[str, int]] | None = None,
    *,
    face: Any = classic,
    **properties: Any,
) -> classic.TrainingParameters:
    """Return parameters that train every weight of a net.

    Args:
        net: the net.
        optimizer: the optimizer; empty for none.
        floats: its attributes that are floats, by weight.
        ints: its attributes that are integers, by weight.
        face: the module that has the class ``TrainingParameters``.
        **properties: further properties.
    """
    made: classic.TrainingParameters = face.TrainingParameters()
    made.loss_output_name = "loss"
    made.weights_to_train = set(net.weights)
    made.training_optimizer_name = optimizer
    made.optimizer_attributes_map = {name: dict((floats or {}).get(name, {})) for name in net.weights}
    made.optimizer_int_attributes_map = {name: dict((ints or {}).get(name, {})) for name in net.weights}
    for name, value in properties.items():
        setattr(made, name, value)
    return made


def session(
    net: Net, optimizer: str = SGD, *, sess_options: Any = None, face: Any = classic, **how: Any
) -> classic.TrainingSession:
    """Return a session that trains a net; further arguments are for :func:`parameters`."""
    made: classic.TrainingSession = face.TrainingSession(
        net.model.SerializeToString(), parameters(net, optimizer, face=face, **how), sess_options
    )
    return made


def fed(feeds: Mapping[str, Any], rate: float = 0.125, scale: float | None = None) -> dict[str, Any]:
    """Return the feeds of a run with a learning rate, and with a loss scale in mixed precision."""
    given = {**feeds, RATE: np.array([rate], np.float32)}
    return given if scale is None else given | {SCALE: np.array([scale], np.float32)}


def restricted() -> RunOptions:
    """Return run options that compute the requested outputs only."""
    options = RunOptions()
    options.only_execute_path_to_fetches = True
    return options


def updated_by_file(path: str, optimizer: str, names: Iterable[str], feeds: Mapping[str, Any]) -> State:
    """Return the state after a step, as the nodes of the training graph in a file compute it.

    The result has the names of ``get_state``.
    """
    weights = {SGD: "{}_SGD_out", ADAM: "{}_Adam_out", LAMB: "{}_Lamb_out"}[optimizer]
    results = {}
    for name in names:
        kind, _, weight = name.rpartition("_")
        if name == "Step" or kind in ("Moment_1", "Moment_2"):
            results[name] = f"{name}_Out"
        else:
            results[name] = f"{weight}_grad_Step_Out" if kind == "Update_Count" else weights.format(name)
    model = onnx.load(path)
    model.graph.output.extend(onnx.ValueInfoProto(name=result) for result in results.values())
    return dict(zip(results, InferenceSession(model).run(list(results.values()), feeds), strict=True))


def bits(state: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return a state in a form that compares bit by bit."""
    return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in state.items()}


def named(getter: Callable[[], Sequence[Any]]) -> list[str]:
    """Return the names of inputs or outputs."""
    return [value.name for value in getter()]


def assert_close(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, place: object = "", least: float = 0.0
) -> None:
    """Assert that floats are equal up to a tolerance, and that integers are equal.

    The tolerance is relative to the largest element of the tensor, or to ``least`` if that is larger.
    """
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        array = np.asarray(value)
        assert found[name].shape == array.shape, name
        if array.dtype.kind in "iu":
            np.testing.assert_array_equal(found[name], array, f"{name} {place}")
            continue
        furthest = np.abs(found[name] - array).max()
        assert furthest <= tolerance * max(least, np.abs(array).max()), f"{name} {place}: difference {furthest}"
