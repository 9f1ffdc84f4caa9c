"""Models for ORTTrainer, their descriptions, and their trainers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from classic_models import Feeds, Graph, Net, softmax_net

from ortrain.trainer import ORTTrainer, ORTTrainerOptions
from ortrain.trainer.optim import AdamConfig, _OptimizerConfig

CPU: dict[str, Any] = {"device": {"id": "cpu"}}
# Sizes of the toy BERT: one layer of two heads.
VOCABULARY, WIDTH, HEADS, TOKENS = 32, 16, 2, 8


def block(tokens: int = 4, width: int = 8, classes: int = 5) -> Net:
    """Return a transformer block: one-head attention, a perceptron, residuals, LayerNormalizations, a mean over tokens.

    Keys have no bias: its gradient would be zero except for rounding, which Adam would amplify.
    """
    graph = Graph()

    def project(name: str, x: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
        product = graph.node("MatMul", [x, graph.weight(f"{name}.w", [inputs, outputs], inputs)], f"{name}.product")
        return graph.node("Add", [product, graph.vector(f"{name}.b", outputs, 0.0, 0.1)], name) if bias else product

    def added(name: str, x: str, y: str) -> str:
        parts = [graph.vector(f"{name}.w", width, 1.0, 0.1), graph.vector(f"{name}.b", width, 0.0, 0.1)]
        return graph.node("LayerNormalization", [graph.node("Add", [x, y], f"{name}.sum"), *parts], name, axis=-1)

    query, value = (project(name, "x", width, width) for name in ("query", "value"))
    keys = graph.node("Transpose", [project("key", "x", width, width, bias=False)], "keys", perm=[0, 2, 1])
    scale = graph.node("Constant", [], "scale", value_float=float(width**-0.5))
    scaled = graph.node("Mul", [graph.node("MatMul", [query, keys], "scores"), scale], "scaled")
    attention = graph.node("Softmax", [scaled], "attention", axis=-1)
    h = added("norm1", "x", project("out", graph.node("MatMul", [attention, value], "context"), width, width))
    wide = graph.node("Relu", [project("up", h, width, 2 * width)], "wide")
    h = added("norm2", h, project("down", wide, 2 * width, width))
    pooled = graph.node("ReduceMean", [h], "pooled", axes=[1], keepdims=0)
    return softmax_net(graph, graph.linear("head", pooled, width, classes), [tokens, width], classes)


def toy_bert(dropout: float | None = None) -> Net:
    """Return a small BERT with fixed random weights: predictions of masked tokens, and of the next sentence.

    Args:
        dropout: the ratio of a Dropout in training mode after the embedding; None adds no Dropout.
    """
    graph = Graph()

    def project(name: str, x: str, inputs: int, outputs: int) -> str:
        parts = [
            graph.weight(f"{name}.weight", [inputs, outputs], inputs),
            graph.vector(f"{name}.bias", outputs, 0, 0.1),
        ]
        return graph.node("Add", [graph.node("MatMul", [x, parts[0]], f"{name}.product"), parts[1]], name)

    def norm(name: str, x: str) -> str:
        parts = [graph.vector(f"{name}.weight", WIDTH, 1.0, 0.1), graph.vector(f"{name}.bias", WIDTH, 0.0, 0.1)]
        return graph.node("LayerNormalization", [x, *parts], name, axis=-1)

    def split(name: str, x: str, perm: Sequence[int]) -> str:
        shape = graph.constant("heads", [0, 0, HEADS, WIDTH // HEADS], np.int64)
        return graph.node("Transpose", [graph.node("Reshape", [x, shape], f"{name}.split")], f"{name}.heads", perm=perm)

    tokens = graph.node("Gather", [graph.weight("word.weight", [VOCABULARY, WIDTH], WIDTH), "input_ids"], "words")
    segments = graph.node("Gather", [graph.weight("segment.weight", [2, WIDTH], WIDTH), "segment_ids"], "segments")
    h = norm("embedding", graph.node("Add", [tokens, segments], "embedded"))
    if dropout is not None:
        mode = graph.constant("dropout.mode", True, np.bool_)
        h = graph.node("Dropout", [h, graph.constant("dropout.ratio", dropout), mode], "dropped")
    kept = graph.node(
        "Unsqueeze",
        [graph.node("Cast", ["input_mask"], "mask", to=1), graph.constant("axes", [1, 2], np.int64)],
        "kept",
    )
    one = graph.node("Constant", [], "one", value_float=1.0)
    most = graph.node("Constant", [], "most", value_float=-10000.0)
    hidden = graph.node(
        "Mul", [graph.node("Sub", [kept, one], "dropped_out"), graph.node("Neg", [most], "least")], "hidden"
    )
    query, key, value = (
        split(name, project(name, h, WIDTH, WIDTH), [0, 2, 3, 1] if name == "key" else [0, 2, 1, 3])
        for name in ("query", "key", "value")
    )
    scale = graph.node("Constant", [], "scale", value_float=float((WIDTH // HEADS) ** -0.5))
    scores = graph.node("Mul", [graph.node("MatMul", [query, key], "product"), scale], "scores")
    attention = graph.node("Softmax", [graph.node("Add", [scores, hidden], "masked")], "attention", axis=-1)
    context = graph.node(
        "Transpose", [graph.node("MatMul", [attention, value], "heads_out")], "together", perm=[0, 2, 1, 3]
    )
    context = graph.node("Reshape", [context, graph.constant("together.shape", [0, 0, WIDTH], np.int64)], "context")
    h = norm("attention.norm", graph.node("Add", [h, project("attention.out", context, WIDTH, WIDTH)], "attended"))
    wide = graph.node("Relu", [project("up", h, WIDTH, 2 * WIDTH)], "wide")
    h = norm("output.norm", graph.node("Add", [h, project("down", wide, 2 * WIDTH, WIDTH)], "result"))
    predictions = graph.node("Transpose", [project("prediction", h, WIDTH, VOCABULARY)], "prediction.t", perm=[0, 2, 1])
    graph.nodes_of("SoftmaxCrossEntropyLoss", [predictions, "masked_lm_labels"], ["lm_loss"], ignore_index=-1)
    first = graph.node("Gather", [h, graph.constant("first", 0, np.int64)], "pooled", axis=1)
    relation = project("relation", first, WIDTH, 2)
    graph.nodes_of("SoftmaxCrossEntropyLoss", [relation, "next_sentence_labels"], ["relation_loss"])
    graph.node("Add", ["lm_loss", "relation_loss"], "loss")
    rows = {
        name: (np.int64, ["batch", "tokens"]) for name in ("input_ids", "segment_ids", "input_mask", "masked_lm_labels")
    }
    return graph.net(
        bert_batch,
        {**rows, "next_sentence_labels": (np.int64, ["batch"])},
        {
            "loss": (np.float32, []),
            "prediction": (np.float32, ["batch", "tokens", VOCABULARY]),
            "relation": (np.float32, ["batch", 2]),
        },
    )


def bert_batch(rng: np.random.Generator, rows: int) -> Feeds:
    """Return sentences of eight tokens, with some padding and some tokens to predict."""
    ids = rng.integers(0, VOCABULARY, (rows, TOKENS))
    labels = np.where(rng.random((rows, TOKENS)) < 0.3, ids, -1)
    labels[:, 0] = ids[:, 0]
    mask = (np.arange(TOKENS) < rng.integers(4, TOKENS + 1, (rows, 1))).astype(np.int64)
    return {
        "input_ids": ids,
        "segment_ids": np.repeat([[0] * 4 + [1] * 4], rows, 0),
        "input_mask": mask,
        "masked_lm_labels": labels,
        "next_sentence_labels": rng.integers(0, 2, rows),
    }


def normalizing(drops: bool = True) -> Net:
    """Return a perceptron with a BatchNormalization on batch statistics, and optionally a Dropout."""
    graph = Graph()
    h = graph.linear("fc1", "x", 12, 16)
    parts = [graph.vector("norm.weight", 16, 1.0, 0.1), graph.vector("norm.bias", 16, 0.0, 0.1)]
    statistics = [graph.constant("norm.mean", np.zeros(16)), graph.constant("norm.var", np.ones(16))]
    results = ["normal", "norm.mean.new", "norm.var.new"]
    graph.nodes_of("BatchNormalization", [h, *parts, *statistics], results, training_mode=1)
    h = graph.node("Relu", ["normal"], "active")
    if drops:
        inputs = [h, graph.constant("ratio", 0.25), graph.constant("on", True, np.bool_)]
        h = graph.node("Dropout", inputs, "dropped")
    return softmax_net(graph, graph.linear("fc2", h, 16, 10), [12], 10)


# Trainers.


def description_of(
    net: Net, outputs: Sequence[str] | None = None, sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the description of a network from its graph, with the loss first.

    Args:
        net: the network.
        outputs: the outputs, with the loss first; None selects all outputs.
        sizes: numbers for named sizes.
    """

    def described(value: Any) -> tuple[str, list[int | str]]:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_param or dim.dim_value for dim in dims]
        return value.name, [(sizes or {}).get(size, size) for size in shape]

    made = {value.name: described(value) for value in net.model.graph.output}
    names = outputs or sorted(made, key=lambda name: name != "loss")
    return {
        "inputs": [described(value) for value in net.model.graph.input],
        "outputs": [(*made[name], True) if name == "loss" else made[name] for name in names],
    }


def options_of(given: Mapping[str, Any] | None = None) -> ORTTrainerOptions:
    """Return options of a trainer on the CPU."""
    return ORTTrainerOptions({**CPU, **(given or {})})


def trainer_of(
    net: Net,
    config: _OptimizerConfig | None = None,
    options: ORTTrainerOptions | Mapping[str, Any] | None = None,
    *,
    outputs: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    **more: Any,
) -> ORTTrainer:
    """Return a trainer of a copy of a network; the default configuration is Adam."""
    given = options if isinstance(options, ORTTrainerOptions) else options_of(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(
            copy.deepcopy(net.model), description_of(net, outputs, sizes), config or AdamConfig(), options=given, **more
        )


def losses_of(trainer: ORTTrainer, net: Net, count: int, first: int = 0, rows: int = 12) -> list[float]:
    """Train steps of one batch each; returns the losses."""
    found = []
    for k in range(first, first + count):
        outputs = trainer.train_step(*net.batch(k, rows).values())
        found.append(float(outputs[0] if isinstance(outputs, list) else outputs))
    return found


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested state as one dict with paths as keys."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        path = f"{prefix}{name}"
        found |= flat(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return found


def bits_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state in a form that compares every bit."""
    return {
        path: (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for path, value in flat(state).items()
    }


def weights_of(trainer: ORTTrainer) -> dict[str, npt.NDArray[Any]]:
    """Return the weights of a trainer."""
    return trainer.state_dict(pytorch_format=True)
