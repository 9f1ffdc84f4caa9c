"""Mixed precision of the classic TrainingSession: further inputs and outputs, accuracy, steps that are not finite."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classic_formulas import Formulas
from classic_models import (
    ACCUMULATED,
    ADAM,
    FINITE,
    LAMB,
    NORM,
    OPTIMIZERS,
    RATE,
    SCALE,
    Graph,
    Net,
    assert_close,
    bits,
    classifier,
    convolutional,
    fed,
    named,
    prescribed,
    prescribing,
    regression,
    restricted,
    session,
    softmax_net,
    transformer,
    updated_by_file,
)
from optimizer_formulas import SMALL_SHAPES, gradient_pool, starting_weights

from ortrain import capi as C  # noqa: N812
from ortrain.classic import TrainingSession

# Tolerance of a loss against training in float32, relative to the loss.
FOLLOWS = 0.02
# Weights and moments are float32, as in the run of the formulas; each of a few steps rounds them by up to 6e-8.
CLOSE_OF_FORMULAS = 2e-6
# Tolerance of results from factors with 11 bits.
CLOSE_OF_HALVES = 2e-3
STEPS, SCALED, TOO_LARGE = 50, 2.0**10, 2.0**40
# Multiples of this value up to 32 are exact in float16, and stay exact after scaling.
GRID = 2.0**-6
NETS: dict[str, Callable[[], Net]] = {
    "perceptron": lambda: classifier(32, 64, gain=True),
    "transformer": transformer,
    "convolution": convolutional,
}


def normalized() -> Net:
    """Return a convolution with batch normalization by the statistics of the batch."""
    graph = Graph()
    graph.node("Conv", ["x", graph.weight("conv.w", [12, 2, 3, 3], 18)], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    parts = [graph.vector("norm.w", 12, 1.0, 0.1), graph.vector("norm.b", 12, 0.0, 0.1)]
    statistics = [graph.constant("norm.mean", np.zeros(12)), graph.constant("norm.var", np.ones(12))]
    results = ["normal", "norm.mean.new", "norm.var.new"]
    graph.nodes_of("BatchNormalization", ["conv", *parts, *statistics], results, training_mode=1)
    graph.node("Relu", ["normal"], "active")
    graph.node("MaxPool", ["active"], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    graph.node("Flatten", ["pooled"], "flat", axis=1)
    return softmax_net(graph, graph.linear("fc", "flat", 12 * 25, 10), [2, 10, 10], 10)


NETS["normalized"] = normalized
EACH_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def mixed(net: Net, optimizer: str = ADAM, **how: Any) -> TrainingSession:
    """Return a session in mixed precision."""
    return session(net, optimizer, use_mixed_precision=True, **how)


def step(trained: TrainingSession, feeds: Mapping[str, Any], scale: float = SCALED, rate: float = 0.01) -> bool:
    """Take a step and return True if its gradients were finite."""
    (finite,) = trained.run([FINITE], fed(feeds, rate, scale))
    assert finite.dtype == np.bool_
    assert finite.shape == ()
    return bool(finite)


def test_inputs_and_outputs() -> None:
    made = mixed(regression(side_outputs=True), set_gradients_as_graph_outputs=True)
    assert made.loss_scale_input_name == SCALE
    assert named(made.get_inputs) == ["X", "label", SCALE, RATE]
    outputs = ["pred", "loss", "wide", "best", "shifted", "W_grad", "b_grad", NORM, FINITE]
    assert named(made.get_outputs) == outputs
    described = {value.name: (value.type, value.shape) for value in [*made.get_inputs(), *made.get_outputs()]}
    assert described["X"] == ("tensor(float)", ["N", 12])
    assert described[SCALE] == described[RATE] == ("tensor(float)", [1])
    assert described["pred"] == ("tensor(float16)", ["N", 10])
    assert described["loss"] == described[NORM] == ("tensor(float)", [])
    assert described[FINITE] == ("tensor(bool)", [])
    found = dict(zip(outputs, made.run(None, fed(regression().batch(), scale=SCALED)), strict=True))
    assert [found[name].dtype for name in ("pred", "shifted", "loss", NORM)] == [
        np.float16,
        np.float16,
        np.float32,
        np.float32,
    ]
    assert [found[name].dtype for name in ("wide", "best")] == [np.float64, np.int64]
    assert {name: made.is_output_fp32_node(name) for name in ("pred", "shifted", "loss")} == {
        "pred": False,
        "shifted": False,
        "loss": True,
    }


def test_gradients_are_checked_without_clipping() -> None:
    net = classifier()
    made = mixed(net, enable_grad_norm_clip=False)
    assert FINITE in named(made.get_outputs)
    before = bits(made.get_state())
    assert not step(made, net.batch(), TOO_LARGE)
    assert bits(made.get_state()) == before
    assert step(made, net.batch())


@EACH_OPTIMIZER
def test_states(optimizer: str) -> None:
    """The float16 copies equal the rounded weights; the rest of the state is the same as in float32."""
    net = classifier(gain=True)
    made, wide = mixed(net, optimizer), session(net, optimizer)
    copies = {f"{name}_fp16" for name in net.weights}
    assert list(made.get_state()) == sorted({*wide.get_state(), *copies})
    assert step(made, net.batch())
    state = made.get_state()
    halves = {f"{name}_fp16": state[name].astype(np.float16) for name in net.weights}
    assert bits({name: state[name] for name in copies}) == bits(halves)
    assert {state[name].dtype for name in state if name not in copies} <= {np.dtype(np.float32), np.dtype(np.int64)}
    assert made.get_model_state().keys() == {"full_precision"}
    both = made.get_model_state(include_mixed_precision_weights=True)
    assert bits(both["full_precision"]) == bits({name: state[name] for name in both["full_precision"]})
    assert bits(both["mixed_precision"]) == bits({name: halves[f"{name}_fp16"] for name in both["mixed_precision"]})
    assert both["full_precision"].keys() == both["mixed_precision"].keys() == net.weights.keys()
    outer = {LAMB: {*net.weights, "shared_optimizer_state"}, ADAM: {*net.weights}}
    assert made.get_optimizer_state().keys() == outer.get(optimizer, set())


@EACH_OPTIMIZER
def test_states_are_resumed(optimizer: str) -> None:
    net = transformer()
    first, second = mixed(net, optimizer), mixed(net, optimizer)
    for k in range(3):
        assert step(first, net.batch(k))
    state = first.get_state()
    first.load_state(first.get_state(), strict=True)
    assert bits(first.get_state()) == bits(state)
    second.load_state(state, strict=True)
    for k in range(3, 6):
        feeds = fed(net.batch(k), scale=SCALED)
        assert [value.tobytes() for value in first.run(None, feeds)] == [
            value.tobytes() for value in second.run(None, feeds)
        ]
    assert bits(first.get_state()) == bits(second.get_state())


@EACH_OPTIMIZER
@pytest.mark.parametrize("scale", [SCALED, TOO_LARGE], ids=["scaled", "too large"])
def test_training_graph_computes_a_step(optimizer: str, scale: float, tmp_path: Path) -> None:
    """The nodes in the file compute the state after a step, also after a step with gradients that are not finite."""
    net, path = classifier(gain=True), str(tmp_path / "training.onnx")
    made = mixed(net, optimizer, model_with_training_graph_path=path)
    assert step(made, net.batch(), scale) == (scale == SCALED)
    state = {name: value for name, value in made.get_state().items() if not name.endswith("_fp16")}
    found = updated_by_file(path, optimizer, state, fed(net.batch(), 0.01, scale))
    assert_close(found, state, CLOSE_OF_FORMULAS, least=0.01)


def test_a_state_in_float32_is_loaded() -> None:
    net = classifier()
    wide, made = session(net, ADAM), mixed(net)
    wide.run(["loss"], fed(net.batch(), 0.01))
    made.load_state(wide.get_state(), strict=True)
    state = made.get_state()
    assert bits({name: state[name] for name in wide.get_state()}) == bits(wide.get_state())
    assert state["fc1.w_fp16"].tobytes() == state["fc1.w"].astype(np.float16).tobytes()


def test_running_statistics_stay_float32() -> None:
    net = NETS["normalized"]()
    made, wide = mixed(net), session(net, ADAM)
    feeds = net.batch(0, rows=16)
    assert step(made, feeds)
    wide.run(["loss"], fed(feeds))
    found, expected = ({k: v.numpy() for k, v in s._classic.running_statistics().items()} for s in (made, wide))
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(expected, np.float32)
    assert_close(found, expected, CLOSE_OF_HALVES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NETS)
def test_training_follows_float32(name: str, dtype: str) -> None:
    net = NETS[name]()
    made, wide = mixed(net, mixed_precision_dtype=dtype), session(net, ADAM)
    for k in range(STEPS):
        feeds = net.batch(k % 5, rows=16)
        loss, finite = made.run(["loss", FINITE], fed(feeds, 0.002, SCALED))
        expected = wide.run(["loss"], fed(feeds, 0.002))[0]
        assert finite
        assert loss.dtype == np.float32
        assert abs(loss - expected) <= FOLLOWS * expected, k
    assert loss < 0.8 * wide_loss_at_first(net)


def work_of_a_step(net: Net, **how: Any) -> int:
    """Return the bytes of work memory of a step on 64 rows, as the memory plan gives them."""
    made = session(net, ADAM, **how)
    scale = SCALED if made.loss_scale_input_name else None
    made.run(["loss"], fed(net.batch(rows=64), scale=scale))
    programs = re.findall(r"work (\d+) bytes", made._classic.dump())
    return max(map(int, programs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*NETS, "wide"])
def test_a_step_takes_no_more_memory_than_in_float32(name: str, dtype: str) -> None:
    """This holds with many weights, too: no float16 copy of a weight is in memory, and no narrow gradient."""
    net = classifier(512, 512) if name == "wide" else NETS[name]()
    narrow = work_of_a_step(net, use_mixed_precision=True, mixed_precision_dtype=dtype)
    assert 0 < narrow <= work_of_a_step(net)


def wide_loss_at_first(net: Net) -> float:
    """Return the loss of the initial weights on the last batch of the test above."""
    feeds = net.batch((STEPS - 1) % 5, rows=16)
    return float(session(net, ADAM).run(["loss"], fed(feeds), restricted())[0])


@EACH_OPTIMIZER
def test_steps_follow_the_formulas(optimizer: str) -> None:
    """Gradients are divided by the loss scale, and then clipped by their norm."""
    net = prescribing(starting_weights(SMALL_SHAPES))
    groups: dict[str, dict[str, float]] = {
        "one": {"lambda": 0.125},
        "seven": {"max_norm_clip": 1e6},
        "row": {"max_norm_clip": 4.0, "alpha": 0.5},
        "matrix": {"max_norm_clip": 1e6, "beta": 0.9},
    }
    made, formulas = mixed(net, optimizer, floats=groups), Formulas(optimizer, net.weights, groups)
    for k, gradients in enumerate(gradient_pool(net.weights, GRID)[:12]):
        scale = 2.0 ** (k % 4 * 3)
        norm, finite = made.run([NORM, FINITE], fed(prescribed(gradients), 0.02, scale))
        assert finite
        scaled = {name: g * scale for name, g in gradients.items()}
        np.testing.assert_allclose(norm, formulas.step(scaled, 0.02, scale=scale), rtol=CLOSE_OF_FORMULAS)
        state = {name: value for name, value in made.get_state().items() if not name.endswith("_fp16")}
        assert_close(state, formulas.state(), CLOSE_OF_FORMULAS, k)


def test_the_norm_is_scaled_and_the_loss_is_not() -> None:
    net = classifier()
    found = [mixed(net).run(["loss", NORM], fed(net.batch(), scale=scale)) for scale in (1.0, SCALED)]
    losses, norms = zip(*found, strict=True)
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], session(net).run(["loss"], fed(net.batch()))[0], rtol=CLOSE_OF_HALVES)
    np.testing.assert_allclose(norms[1], SCALED * norms[0], rtol=CLOSE_OF_HALVES)


@EACH_OPTIMIZER
@pytest.mark.parametrize("name", NETS)
def test_a_step_that_is_not_finite_changes_no_bit(name: str, optimizer: str) -> None:
    net = NETS[name]()
    made, plain = mixed(net, optimizer), mixed(net, optimizer)
    for each in (made, plain):
        assert step(each, net.batch(0))
    before = bits(made.get_state())
    for _ in range(2):
        loss, norm, finite = made.run(["loss", NORM, FINITE], fed(net.batch(1), 0.01, TOO_LARGE))
        assert not finite
        assert not np.isfinite(norm)
        assert loss == plain.run(["loss"], fed(net.batch(1), 0.01, SCALED), restricted())[0]
        assert bits(made.get_state()) == before
    for each in (made, plain):
        assert step(each, net.batch(1))
    assert bits(made.get_state()) == bits(plain.get_state()) != before


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_inputs_that_are_not_finite_change_no_bit(value: float) -> None:
    net = classifier()
    made = mixed(net)
    before, feeds = bits(made.get_state()), net.batch()
    feeds["x"][3, 4] = value
    assert not step(made, feeds)
    assert bits(made.get_state()) == before


@pytest.mark.parametrize(
    "scale",
    [
        np.array([0], np.float32),
        np.array([-1024], np.float32),
        np.array([np.inf], np.float32),
        np.array([-np.inf], np.float32),
        np.array([np.nan], np.float32),
        np.array(1024, np.float32),
        np.array([1024, 1024], np.float32),
        np.array([1024], np.float64),
    ],
    ids=["zero", "negative", "infinite", "negative infinite", "nan", "scalar", "two", "float64"],
)
def test_scales_that_are_refused(scale: np.ndarray) -> None:
    net = classifier()
    made = mixed(net)
    assert step(made, net.batch())
    before = bits(made.get_state())
    with pytest.raises(C.InvalidArgument, match=SCALE):
        made.run(["loss"], fed(net.batch()) | {SCALE: scale})
    assert bits(made.get_state()) == before


def test_a_scale_is_needed() -> None:
    net = classifier()
    made = mixed(net)
    with pytest.raises(ValueError, match=SCALE):
        made.run(["loss"], fed(net.batch()))
    with pytest.raises(C.InvalidArgument, match=SCALE):
        session(net, ADAM).run(["loss"], fed(net.batch(), scale=SCALED))


# Accumulation.


def gather(trained: TrainingSession, feeds: Mapping[str, Any], scale: float = SCALED) -> None:
    """Accumulate gradients without an update."""
    trained.run(["loss", ACCUMULATED], fed(feeds, 0.01, scale), restricted())


@EACH_OPTIMIZER
@pytest.mark.parametrize("count", [1, 3, 4])
def test_parts_of_a_batch_are_the_batch(optimizer: str, count: int) -> None:
    """Gradients accumulate in float32: prescribed values stay exact."""
    net = prescribing(starting_weights(SMALL_SHAPES))
    made, formulas = mixed(net, optimizer, gradient_accumulation_steps=count), Formulas(optimizer, net.weights)
    pool = gradient_pool(net.weights, GRID)
    for k in range(3):
        batches = pool[k * count : (k + 1) * count]
        for gradients in batches[:-1]:
            gather(made, prescribed(gradients))
            made.run(["loss"], fed(prescribed(pool[20]), scale=SCALED), restricted())
        assert step(made, prescribed(batches[-1]))
        mean = {name: np.sum([SCALED * np.float64(g[name]) for g in batches], axis=0) / count for name in net.weights}
        formulas.step(mean, 0.01, scale=SCALED)
        state = {name: value for name, value in made.get_state().items() if not name.endswith("_fp16")}
        assert_close(state, formulas.state(), CLOSE_OF_FORMULAS, k)


@pytest.mark.parametrize("scales", [(SCALED, TOO_LARGE), (TOO_LARGE, SCALED), (TOO_LARGE, TOO_LARGE)])
def test_a_window_with_gradients_that_are_not_finite_is_dropped(scales: tuple[float, float]) -> None:
    """The update changes no bit, and the next window starts without the dropped gradients."""
    net = classifier()
    made, plain = (mixed(net, gradient_accumulation_steps=2) for _ in range(2))
    for each in (made, plain):
        if each is made:
            before = bits(each.get_state())
            gather(each, net.batch(0), scales[0])
            assert not step(each, net.batch(1), scales[1])
            assert bits(each.get_state()) == before
        gather(each, net.batch(2))
        assert step(each, net.batch(3))
    assert bits(made.get_state()) == bits(plain.get_state())
