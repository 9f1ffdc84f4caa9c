"""Evaluation of models with BatchNormalizations in training mode: ORTTrainer and the classic session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from classic_models import (
    ADAM,
    RATE,
    SCALE,
    SGD,
    Feeds,
    Graph,
    Net,
    assert_close,
    bits,
    fed,
    named,
    restricted,
    session,
    softmax_net,
)
from onnx import TensorProto, helper, numpy_helper
from trainer_nets import bits_of, normalizing, trainer_of

from ortrain import InferenceSession, RunOptions
from ortrain.classic import TrainingSession
from ortrain.errors import InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer is for existing scripts:FutureWarning")

# Rounding of float32 in a network of two layers, and of float16.
CLOSE, CLOSE_OF_HALVES = 1e-5, 1e-2
MOMENTUM, EPSILON = 0.9, 1e-5
STATISTICS = ("norm.mean", "norm.var")


def evaluating(training_mode: bool | None = False) -> RunOptions:
    """Return options of a run that computes outputs only."""
    options = restricted()
    if training_mode is not None:
        options.training_mode = training_mode
    return options


def statistics(made: TrainingSession) -> dict[str, npt.NDArray[Any]]:
    """Return the running statistics of a session."""
    return {name: value.numpy() for name, value in made._classic.running_statistics().items()}


def forward(
    state: Mapping[str, Any], feeds: Feeds, running: Mapping[str, Any] | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the logits of ``normalizing`` in float64, and the statistics of the batch.

    Without ``running``, the statistics of the batch normalize.
    """
    w = {name: np.asarray(value, np.float64) for name, value in state.items()}
    h = feeds["x"].astype(np.float64) @ w["fc1.w"] + w["fc1.b"]
    batch = np.stack([h.mean(0), h.var(0)])
    mean, var = batch if running is None else (np.asarray(running[name], np.float64) for name in STATISTICS)
    h = (h - mean) / np.sqrt(var + EPSILON) * w["norm.weight"] + w["norm.bias"]
    return np.maximum(h, 0) @ w["fc2.w"] + w["fc2.b"], batch


def assert_logits(found: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float = CLOSE) -> None:
    assert_close({"logits": found.astype(np.float64)}, {"logits": expected}, tolerance)


@pytest.mark.parametrize("drops", [False, True], ids=["", "drops"])
@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_a_session_evaluates_by_running_statistics(optimizer: str, drops: bool) -> None:
    net = normalizing(drops)
    made, running = session(net, optimizer), {"norm.mean": np.zeros(16), "norm.var": np.ones(16)}
    for k in range(4):
        _, batch = forward(made.get_state(), net.batch(k), None)
        running = {
            name: MOMENTUM * running[name] + (1 - MOMENTUM) * value
            for name, value in zip(STATISTICS, batch, strict=True)
        }
        made.run(["loss"], fed(net.batch(k)))
    state, kept, feeds = bits(made.get_state()), statistics(made), net.batch(9, rows=5)
    assert_close(kept, running, CLOSE)
    expected, _ = forward(made.get_state(), feeds, running)
    of_batch, _ = forward(made.get_state(), feeds, None)
    assert np.abs(expected - of_batch).max() > 0.1, "the difference is seen"
    assert_logits(made.run(["fc2"], fed(feeds), evaluating())[0], expected)
    given = fed(feeds) | {"training_mode": np.array(False)}
    assert_logits(made.run(["fc2"], given, evaluating(True))[0], expected)
    if not drops:
        for mode in (None, True):
            assert_logits(made.run(["fc2"], fed(feeds), evaluating(mode))[0], of_batch)
        given = fed(feeds) | {"training_mode": np.array(True)}
        assert_logits(made.run(["fc2"], given, evaluating())[0], of_batch)
    assert bits(made.get_state()) == state
    assert bits(statistics(made)) == bits(kept), "an evaluation changes no statistics"
    assert named(made.get_overridable_initializers) == ["training_mode"]
    assert named(made.get_inputs) == ["x", "labels", RATE]


def test_a_run_that_trains_uses_the_batch_without_the_mode_too() -> None:
    """``training_mode = False`` disables Dropout in a training run, and changes no statistics."""
    net, options = normalizing(drops=False), RunOptions()
    options.training_mode = False
    one, other = session(net), session(net)
    for k in range(2):
        feeds = fed(net.batch(k))
        assert one.run(["loss"], feeds, options)[0].tobytes() == other.run(["loss"], feeds)[0].tobytes()
    assert bits(one.get_state()) == bits(other.get_state())
    assert bits(statistics(one)) == bits(statistics(other))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision(dtype: str) -> None:
    net = normalizing()
    made = session(net, ADAM, use_mixed_precision=True, mixed_precision_dtype=dtype)
    for k in range(3):
        made.run(["loss"], fed(net.batch(k), 0.01, 1024.0))
    kept, feeds = statistics(made), net.batch(9, rows=5)
    weights = {name: made.get_state()[name] for name in net.weights}
    expected, _ = forward(weights, feeds, kept)
    loss, *_ = made.run(["loss"], fed(feeds, 0.01, 1024.0), evaluating())
    shifted = expected - expected.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(5), feeds["labels"]]
    np.testing.assert_allclose(
        loss, losses.mean(), rtol=8 * CLOSE_OF_HALVES if dtype == "bfloat16" else CLOSE_OF_HALVES
    )
    assert bits(statistics(made)) == bits(kept)
    assert SCALE in named(made.get_inputs)


@pytest.mark.parametrize("precision", [None, "float16"])
def test_a_trainer_evaluates(precision: str | None) -> None:
    net = normalizing()
    options = {"mixed_precision": {"enabled": True}} if precision else {}
    trainer = trainer_of(net, options=options)
    for k in range(3):
        trainer.train_step(*net.batch(k).values())
    before, feeds = trainer.state_dict(), net.batch(9, rows=5)
    expected, _ = forward(before["model"]["full_precision"], feeds, before["running_statistics"])
    tolerance = CLOSE_OF_HALVES if precision else CLOSE
    _, logits = trainer.eval_step(*feeds.values())
    assert_logits(logits, expected, tolerance)
    # One row has no variance of its own.
    one = {name: value[:1] for name, value in feeds.items()}
    assert_logits(trainer.eval_step(*one.values())[1], expected[:1], 2 * tolerance)
    assert bits_of(trainer.state_dict()) == bits_of(before)


def test_training_mode_of_opset_13_follows_from_outputs() -> None:
    """PyTorch wrote this form for onnx_opset_version 12 and 13."""
    model = normalizing(drops=False).model
    (norm,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    norm.output.extend(["saved.mean", "saved.var"])
    del norm.attribute[:]
    model.opset_import[0].version = 13
    net = Net(model, normalizing().weights, normalizing().draw)
    made, newer = session(net), session(normalizing(drops=False))
    for k in range(3):
        for each in (made, newer):
            each.run(["loss"], fed(net.batch(k)))
    assert bits(statistics(made)) == bits(statistics(newer))
    feeds = net.batch(9, rows=5)
    expected, _ = forward(made.get_state(), feeds, statistics(made))
    assert_logits(made.run(["fc2"], fed(feeds), evaluating())[0], expected)


def in_a_branch() -> Net:
    """Return ``normalizing`` with its normalization in a branch that a bool ``normalize`` selects."""
    whole = normalizing(drops=False)
    model = onnx.ModelProto()
    model.CopyFrom(whole.model)
    graph = model.graph
    at = next(k for k, node in enumerate(graph.node) if node.op_type == "BatchNormalization")
    norm = graph.node[at]
    result = norm.output[0]
    norm.output[0] = "inner"
    taken = helper.make_graph([norm], "taken", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)])
    same = helper.make_node("Identity", ["fc1"], ["same"])
    left = helper.make_graph([same], "left", [], [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)])
    branch = helper.make_node("If", ["normalize"], [result], then_branch=taken, else_branch=left)
    graph.node.remove(norm)
    graph.node.insert(at, branch)
    graph.input.append(helper.make_tensor_value_info("normalize", TensorProto.BOOL, []))

    def draw(rng: np.random.Generator, rows: int) -> Feeds:
        return {**whole.draw(rng, rows), "normalize": np.array(True)}

    return Net(model, whole.weights, draw)


def test_a_normalization_in_a_branch() -> None:
    net = in_a_branch()
    made, plain = session(net), session(normalizing(drops=False))
    for k in range(3):
        made.run(["loss"], fed(net.batch(k)))
        plain.run(["loss"], fed({name: net.batch(k)[name] for name in ("x", "labels")}))
    assert_close(statistics(made), statistics(plain), CLOSE)
    feeds, kept = net.batch(9, rows=5), statistics(made)
    expected, _ = forward(made.get_state(), feeds, kept)
    assert_logits(made.run(["fc2"], fed(feeds), evaluating())[0], expected)
    assert bits(statistics(made)) == bits(kept)


# The name of the input.


def named_mode(value: npt.NDArray[Any]) -> Net:
    """Return a Dropout after a normalization, with an initializer called ``training_mode`` as its flag."""
    net = normalizing()
    (flag,) = [tensor for tensor in net.model.graph.initializer if tensor.name == "on"]
    flag.CopyFrom(numpy_helper.from_array(value, "training_mode"))
    (dropout,) = [node for node in net.model.graph.node if node.op_type == "Dropout"]
    dropout.input[2] = "training_mode"
    return net


def test_disabled_dropout_remains_disabled() -> None:
    """The flag of the Dropout has the name of the input, and keeps its value."""
    made, plain = session(named_mode(np.array(False))), session(normalizing(drops=False))
    feeds = fed(normalizing().batch())
    np.testing.assert_array_equal(made.run(["fc2"], feeds)[0], plain.run(["fc2"], feeds)[0])
    assert named(made.get_overridable_initializers) == ["training_mode"]


def test_a_dropout_that_is_on_follows_the_input() -> None:
    net = named_mode(np.array(True))
    made, other = session(net), session(normalizing())
    feeds = fed(net.batch())
    np.testing.assert_array_equal(made.run(["fc2"], feeds)[0], other.run(["fc2"], feeds)[0])


def own_input(kind: int) -> Net:
    """Return a normalization in a model that has an input called ``training_mode``."""
    net = normalizing(drops=False)
    net.model.graph.input.append(helper.make_tensor_value_info("training_mode", kind, []))
    return net


def test_an_input_of_the_model_chooses() -> None:
    net = own_input(TensorProto.BOOL)
    made = session(net)
    made.run(["loss"], fed(net.batch()) | {"training_mode": np.array(True)})
    feeds = net.batch(9, rows=5)
    for mode in (False, True):
        expected, _ = forward(made.get_state(), feeds, None if mode else statistics(made))
        given = fed(feeds) | {"training_mode": np.array(mode)}
        assert_logits(made.run(["fc2"], given, evaluating())[0], expected)
    assert not made.get_overridable_initializers()
    with pytest.raises(InvalidArgumentError, match='no value was given for input "training_mode"'):
        made.run(["fc2"], fed(feeds), evaluating())


def test_an_input_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        session(own_input(TensorProto.FLOAT))
    assert str(caught.value) == (
        'value "training_mode" of the model is not a bool input, but its Dropout or BatchNormalization needs an input'
        " of this name; rename the value"
    )


def test_dumps_contain_the_mode_input(tmp_path: Path) -> None:
    for drops in (False, True):
        paths = {
            kind: str(tmp_path / f"{kind}{drops}.onnx")
            for kind in (
                "model_after_graph_transforms_path",
                "model_with_gradient_graph_path",
                "model_with_training_graph_path",
            )
        }
        session(normalizing(drops), ADAM, **paths)
        for path in paths.values():
            graph = onnx.load(path).graph
            names = {value.name for value in (*graph.initializer, *graph.input)}
            assert ("training_mode" in names) == drops, path


def convolutional() -> Net:
    """Return a convolution, a normalization of its channels, and a pooling."""
    graph = Graph()
    parts = [graph.weight("conv.w", [12, 2, 3, 3], 18), graph.vector("conv.b", 12, 0.0, 0.1)]
    graph.node("Conv", ["x", *parts], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    of_norm = [graph.vector("norm.weight", 12, 1.0, 0.1), graph.vector("norm.bias", 12, 0.0, 0.1)]
    running = [graph.constant("norm.mean", np.zeros(12)), graph.constant("norm.var", np.ones(12))]
    results = ["normal", "norm.mean.new", "norm.var.new"]
    graph.nodes_of("BatchNormalization", ["conv", *of_norm, *running], results, training_mode=1)
    graph.node("Relu", ["normal"], "active")
    graph.node("GlobalAveragePool", ["active"], "pooled")
    graph.node("Flatten", ["pooled"], "flat", axis=1)
    return softmax_net(graph, graph.linear("fc", "flat", 12, 10), [2, 6, 6], 10)


def test_an_evaluation_is_that_of_the_model_at_inference() -> None:
    """The saved model with ``training_mode`` 0 computes the same, with image channels."""
    net = convolutional()
    trainer = trainer_of(net)
    for k in range(3):
        trainer.train_step(*net.batch(k).values())
    state, feeds = trainer.state_dict(), net.batch(9, rows=5)
    model = onnx.ModelProto()
    model.CopyFrom(net.model)
    kept = {**state["model"]["full_precision"], **state["running_statistics"]}
    for tensor in model.graph.initializer:
        if tensor.name in kept:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(kept[tensor.name]), tensor.name))
    (norm,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    del norm.output[1:]
    norm.attribute[0].i = 0
    expected = InferenceSession(model).run(["fc"], feeds)[0]
    assert_logits(trainer.eval_step(*feeds.values())[1], expected)
