"""The classic TrainingSession: its acceptance rows A1 to A23, optimizers against formulas, accumulation, bad input."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from classic_formulas import Formulas, squared_errors
from classic_models import (
    ACCUMULATED,
    ADAM,
    LAMB,
    NORM,
    OPTIMIZERS,
    RATE,
    SGD,
    Feeds,
    Net,
    State,
    assert_close,
    bits,
    classifier,
    convolutional,
    fed,
    named,
    parameters,
    prescribed,
    prescribing,
    regression,
    restricted,
    session,
    updated_by_file,
)
from onnx import TensorProto, helper, numpy_helper
from optimizer_formulas import SMALL_SHAPES, gradient_pool, starting_weights
from training_nodes import Node

import ortrain
import ortrain.compat
from ortrain import capi as C  # noqa: N812
from ortrain import classic
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.errors import InvalidArgumentError

# Relative to the largest element of a tensor. Weights and moments are float32: each of 20 steps rounds an element by up
# to half a unit in the last place, 6e-8, and so does each operation of a step.
CLOSE_OF_FORMULAS = 2e-6
# Tolerance of two steps, or of sums in another order.
CLOSE = 1e-6
# Tolerance of a few steps in float64.
EXACT = 1e-12
STEPS = 20
EACH_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)
# Settings of the weights of `starting_weights`: three groups. The gradients of the third are not clipped.
SECOND = {"alpha": 0.8, "beta": 0.99, "lambda": 0.01, "epsilon": 1e-6, "max_norm_clip": 2.0}
THIRD = {"alpha": 0.95, "beta": 0.9, "lambda": 0.1, "epsilon": 1e-3, "max_norm_clip": 1e9}
GROUPS: dict[str, dict[str, float]] = {"one": {}, "seven": {}, "row": SECOND, "matrix": THIRD, "long": THIRD}


# Helpers for sessions.


def listed(net: Net, *names: str) -> Net:
    """Return the net with some initializers listed as inputs, too."""
    model = copy.deepcopy(net.model)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return Net(model, net.weights, net.draw)


def steps(trained: TrainingSession, net: Net, count: int, first: int = 0) -> list[float]:
    """Train by one batch each step and return the losses."""
    return [float(trained.run(["loss"], fed(net.batch(k)))[0]) for k in range(first, first + count)]


def common(net: Net, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same attributes for each weight."""
    return {name: dict(given) for name in net.weights}


def started(net: Net, states: Any) -> TrainingSession:
    """Return an Adam session with the initial optimizer states `states`."""
    given = parameters(net, ADAM)
    given.set_optimizer_initial_state(states)
    return TrainingSession(net.model.SerializeToString(), given)


def cpu_device() -> Any:
    """Return the CPU device as the C-level classes represent it."""
    return C.OrtDevice(C.OrtDevice.cpu(), C.OrtMemType.DEFAULT, 0)


def bound_run(
    trained: TrainingSession, feeds: Mapping[str, Any], outputs: Sequence[str] = ("loss",), options: Any = None
) -> list[npt.NDArray[Any]]:
    """Run with a new binding of inputs and outputs and return the outputs."""
    binding = trained.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    trained.run_with_iobinding(binding, options)
    values: list[npt.NDArray[Any]] = binding.copy_outputs_to_cpu()
    return values


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """The package onnxruntime as scripts import it after ``ortrain.compat.install()``."""
    ortrain.compat.install()
    try:
        yield importlib.import_module("onnxruntime")
    finally:
        ortrain.compat.uninstall()


@pytest.fixture(params=["ortrain", "compat"])
def face(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Source of the classes of a script: ortrain, and onnxruntime after ``ortrain.compat.install()``."""
    if request.param == "ortrain":
        names = {name: getattr(ortrain, name) for name in ("RunOptions", "SessionOptions")}
        names |= {name: getattr(classic, name) for name in ("TrainingParameters", "TrainingSession")}
        yield type("Face", (), names)
        return
    with installed() as onnxruntime:
        yield onnxruntime


# A1: parameters.

DEFAULTS: dict[str, object] = {
    "allreduce_post_accumulation": False,
    "attn_dropout_recompute": False,
    "data_parallel_size": 1,
    "deepspeed_zero_stage": 0,
    "enable_adasum": False,
    "enable_grad_norm_clip": True,
    "gelu_recompute": False,
    "gradient_accumulation_steps": 1,
    "horizontal_parallel_size": 1,
    "immutable_weights": {},
    "loss_output_name": "",
    "loss_scale": 0.0,
    "lr_params_feed_name": RATE,
    "model_after_graph_transforms_path": "",
    "model_with_gradient_graph_path": "",
    "model_with_training_graph_path": "",
    "num_pipeline_micro_batches": 1,
    "number_recompute_layers": 0,
    "optimizer_attributes_map": {},
    "optimizer_int_attributes_map": {},
    "pipeline_cut_info_string": "",
    "pipeline_parallel_size": 1,
    "mixed_precision_dtype": "float16",
    "propagate_cast_ops_allow": [],
    "propagate_cast_ops_level": 1,
    "set_gradients_as_graph_outputs": False,
    "sliced_axes": {},
    "sliced_schema": {},
    "sliced_tensor_names": [],
    "training_optimizer_name": "",
    "transformer_layer_recompute": False,
    "use_fp16_moments": False,
    "use_memory_efficient_gradient": False,
    "use_mixed_precision": False,
    "weights_not_to_train": set(),
    "weights_to_train": set(),
    "world_rank": 0,
    "world_size": 1,
}
# Values of the wrong type for their property.
OTHER_KINDS: dict[str, object] = {
    "enable_grad_norm_clip": "yes",
    "gradient_accumulation_steps": 1.5,
    "immutable_weights": {"Mul": [2.0]},
    "loss_output_name": 3,
    "loss_scale": "large",
    "lr_params_feed_name": None,
    "mixed_precision_dtype": 16,
    "optimizer_attributes_map": {"W": {"alpha": "much"}},
    "optimizer_int_attributes_map": {"W": {"weight_decay_mode": 0.5}},
    "propagate_cast_ops_allow": "Add",
    "sliced_axes": {"W": "first"},
    "sliced_schema": {"W": 3},
    "training_optimizer_name": b"SGDOptimizer",
    "weights_not_to_train": "b",
    "weights_to_train": ["W"],
    "world_size": "2",
}
# Values that do not change any result of a session.
WITHOUT_EFFECT: dict[str, object] = {
    "allreduce_post_accumulation": True,
    "attn_dropout_recompute": True,
    "deepspeed_zero_stage": 1,
    "enable_adasum": True,
    "gelu_recompute": True,
    "loss_scale": 1024.0,
    "number_recompute_layers": 2,
    "propagate_cast_ops_allow": ["Add"],
    "propagate_cast_ops_level": 2,
    "transformer_layer_recompute": True,
    "use_memory_efficient_gradient": True,
}
# Values that need features without support in ortrain.
NOT_HERE: dict[str, object] = {
    "data_parallel_size": 2,
    "deepspeed_zero_stage": 2,
    "horizontal_parallel_size": 2,
    "num_pipeline_micro_batches": 2,
    "pipeline_cut_info_string": "pred",
    "pipeline_parallel_size": 2,
    "sliced_axes": {"X": 0},
    "sliced_schema": {"X": [2, 12]},
    "sliced_tensor_names": ["X"],
    "use_fp16_moments": True,
    "world_rank": 1,
    "world_size": 2,
}


def test_a01_defaults() -> None:
    made = TrainingParameters()
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    assert {name: type(getattr(made, name)) for name in DEFAULTS} == {name: type(v) for name, v in DEFAULTS.items()}
    public = {name for name in dir(made) if not name.startswith("_")}
    assert public == {*DEFAULTS, "set_optimizer_initial_state"}
    with pytest.raises(AttributeError, match="weight_to_train"):
        made.weight_to_train = {"W"}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a01_properties_have_a_kind(name: str) -> None:
    made = TrainingParameters()
    with pytest.raises(TypeError):
        setattr(made, name, OTHER_KINDS[name])
    assert getattr(made, name) == DEFAULTS[name]


def test_a01_containers_are_copies() -> None:
    made, weights, attributes = TrainingParameters(), {"W"}, {"W": {"alpha": 0.5}}
    made.weights_to_train, made.optimizer_attributes_map = weights, attributes
    weights.add("b")
    attributes["W"]["alpha"] = 0.75
    made.weights_to_train.add("c")
    made.optimizer_attributes_map["W"]["alpha"] = 1.0
    made.sliced_tensor_names.append("X")
    assert made.weights_to_train == {"W"}
    assert made.optimizer_attributes_map == {"W": {"alpha": 0.5}}
    assert made.sliced_tensor_names == []


@pytest.mark.filterwarnings("ignore:.* has no effect in one process:UserWarning")
def test_a01_properties_without_an_effect() -> None:
    net = regression()
    plain, other = session(net, ADAM), session(net, ADAM, **WITHOUT_EFFECT)
    assert steps(plain, net, 3) == steps(other, net, 3)
    assert bits(plain.get_state()) == bits(other.get_state())
    assert named(plain.get_outputs) == named(other.get_outputs)


@pytest.mark.parametrize("name", NOT_HERE)
def test_a01_properties_that_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        session(regression(), ADAM, **{name: NOT_HERE[name]})


@pytest.mark.parametrize("window", [0, -1])
def test_a01_windows_hold_a_batch(window: int) -> None:
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        session(regression(), gradient_accumulation_steps=window)


# A2: inputs and outputs.

GRADIENTS = ["W_grad", "b_grad"]


@pytest.mark.parametrize(
    ("optimizer", "properties", "inputs", "outputs"),
    [
        (SGD, {}, [RATE], [NORM]),
        (SGD, {"enable_grad_norm_clip": False}, [RATE], []),
        (ADAM, {"set_gradients_as_graph_outputs": True}, [RATE], [*GRADIENTS, NORM]),
        (ADAM, {"gradient_accumulation_steps": 3}, [RATE], [ACCUMULATED, NORM]),
        (
            LAMB,
            {"gradient_accumulation_steps": 2, "set_gradients_as_graph_outputs": True, "enable_grad_norm_clip": False},
            [RATE],
            [*GRADIENTS, ACCUMULATED],
        ),
        (LAMB, {"lr_params_feed_name": "rate"}, ["rate"], [NORM]),
        ("", {}, [], []),
        ("", {"set_gradients_as_graph_outputs": True}, [], GRADIENTS),
        ("", {"gradient_accumulation_steps": 2}, [], [ACCUMULATED]),
    ],
)
def test_a02_inputs_and_outputs(
    optimizer: str, properties: Mapping[str, Any], inputs: list[str], outputs: list[str]
) -> None:
    made = session(regression(side_outputs=True), optimizer, **properties)
    assert named(made.get_inputs) == ["X", "label", *inputs]
    assert named(made.get_outputs) == ["pred", "loss", "wide", "best", "shifted", *outputs]
    described = {value.name: (value.type, value.shape) for value in [*made.get_inputs(), *made.get_outputs()]}
    expected = {
        "X": ("tensor(float)", ["N", 12]),
        "pred": ("tensor(float)", ["N", 10]),
        "loss": ("tensor(float)", []),
        "best": ("tensor(int64)", ["N"]),
        "W_grad": ("tensor(float)", [12, 10]),
        "b_grad": ("tensor(float)", [10]),
        NORM: ("tensor(float)", []),
        **dict.fromkeys(inputs, ("tensor(float)", [1])),
    }
    assert {name: value for name, value in described.items() if name in expected} == {
        name: value for name, value in expected.items() if name in described
    }
    assert all(kind == "tensor(bool)" for name, (kind, _) in described.items() if name == ACCUMULATED)
    assert str(made.get_inputs()[0]) == "NodeArg(name='X', type='tensor(float)', shape=['N', 12])"
    assert made.loss_scale_input_name is None
    assert isinstance(made, ortrain.InferenceSession)


# A3 to A5: steps.


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.5, "unknown": 3.0}], ids=["plain", "ignored"])
def test_a03_sgd(attributes: Mapping[str, float]) -> None:
    """SGD ignores attributes, and does not clip gradients."""
    net, rate = regression(), 0.25
    made = session(net, SGD, floats=common(net, attributes))
    feeds = net.batch()
    pred, loss, norm = made.run(None, fed(feeds, rate))
    expected, gradients = squared_errors(net.weights, feeds)
    total = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    assert total > 1, "clipping would act"
    np.testing.assert_allclose(pred, feeds["X"] @ net.weights["W"] + net.weights["b"], rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose([loss, norm], [expected, total], rtol=CLOSE)
    assert [loss.shape, norm.shape, loss.dtype, norm.dtype] == [(), (), np.float32, np.float32]
    assert_close(made.get_state(), {name: w - rate * gradients[name] for name, w in net.weights.items()}, CLOSE)


@EACH_OPTIMIZER
def test_a04_states(optimizer: str) -> None:
    net = regression()
    made = session(net, optimizer)
    moments = {f"Moment_{k}_{name}": np.zeros_like(w) for name, w in net.weights.items() for k in (1, 2)}
    one = np.ones(1, np.int64)
    expected = {
        SGD: net.weights,
        ADAM: {**moments, "Update_Count_W": one, "Update_Count_b": one, **net.weights},
        LAMB: {**moments, "Step": one, **net.weights},
    }[optimizer]
    first = made.get_state()
    assert list(first) == sorted(expected)
    assert bits(first) == {name: bits(expected)[name] for name in sorted(expected)}
    steps(made, net, 2)
    second = made.get_state()
    assert {name: (value.dtype, value.shape) for name, value in second.items()} == {
        name: (value.dtype, value.shape) for name, value in first.items()
    }
    for name, value in second.items():
        if value.dtype == np.int64:
            assert value.tolist() == [3], name
        else:
            assert np.all(value != first[name]), name


@pytest.mark.parametrize("clipping", [True, False], ids=["clipped", "whole"])
@pytest.mark.parametrize("corrected", [1, 0], ids=["corrected", "leaning"])
@pytest.mark.parametrize("mode", [0, 1])
def test_a05_adam(mode: int, corrected: int, clipping: bool) -> None:
    net = regression()
    floats = common(net, {"lambda": 0.125, "epsilon": 1e-3})
    ints = common(net, {"weight_decay_mode": mode, "do_bias_correction": corrected})
    made = session(net, ADAM, floats=floats, ints=ints, enable_grad_norm_clip=clipping)
    formulas = Formulas(ADAM, net.weights, {name: floats[name] | ints[name] for name in floats}, clipping)
    for k, rate in enumerate((0.25, 0.125)):
        feeds = net.batch(k)
        _, gradients = squared_errors(formulas.weights, feeds)
        assert formulas.step(gradients, rate) > 1, "clipping acts"
        made.run(["loss"], fed(feeds, rate))
        assert_close(made.get_state(), formulas.state(), CLOSE)


# Formulas.


@pytest.mark.parametrize(
    ("optimizer", "ints", "more"),
    [
        (SGD, {}, {}),
        *((ADAM, {"weight_decay_mode": mode, "do_bias_correction": c}, {}) for mode in (0, 1) for c in (0, 1)),
        *((LAMB, {"do_bias_correction": c}, bounds) for c in (0, 1) for bounds in ({}, {"ratio_max": 1.5})),
    ],
)
def test_steps_follow_the_formulas(optimizer: str, ints: Mapping[str, int], more: Mapping[str, float]) -> None:
    """Weights of one to 100 000 elements in three groups, with clipping; the weight ``seven`` starts at zero."""
    net = prescribing(starting_weights())
    floats = {name: GROUPS[name] | dict(more) for name in net.weights}
    made = session(net, optimizer, floats=floats, ints=common(net, ints))
    formulas = Formulas(optimizer, net.weights, {name: {**floats[name], **ints} for name in floats})
    pool = gradient_pool(net.weights)
    for k in range(STEPS):
        rate = 0.01 * (1 + k % 3)
        norm = made.run([NORM], fed(prescribed(pool[k]), rate))[0]
        np.testing.assert_allclose(norm, formulas.step(pool[k], rate), rtol=CLOSE)
        assert_close(made.get_state(), formulas.state(), CLOSE_OF_FORMULAS, k)


def test_each_weight_has_its_own_mode() -> None:
    net = prescribing(starting_weights(SMALL_SHAPES))
    ints = {
        "one": {"weight_decay_mode": 0, "do_bias_correction": 1},
        "seven": {"weight_decay_mode": 0, "do_bias_correction": 0},
        "row": {"weight_decay_mode": 1, "do_bias_correction": 0},
        "matrix": {"weight_decay_mode": 1},
    }
    floats = {name: GROUPS[name] | {"lambda": 0.25} for name in net.weights}
    made = session(net, ADAM, floats=floats, ints=ints)
    formulas = Formulas(ADAM, net.weights, {name: floats[name] | ints[name] for name in floats})
    for gradients in gradient_pool(net.weights)[:STEPS]:
        made.run(["loss"], fed(prescribed(gradients), 0.02))
        formulas.step(gradients, 0.02)
    assert_close(made.get_state(), formulas.state(), CLOSE_OF_FORMULAS)


@EACH_OPTIMIZER
def test_float64_trains(optimizer: str) -> None:
    net = prescribing(starting_weights(SMALL_SHAPES, np.float64))
    made = session(net, optimizer, floats={name: GROUPS[name] for name in net.weights}, enable_grad_norm_clip=False)
    formulas = Formulas(optimizer, net.weights, {name: GROUPS[name] for name in net.weights}, clipping=False)
    for gradients in gradient_pool(net.weights)[:5]:
        made.run(["loss"], fed(prescribed(gradients), 0.03125))
        formulas.step(gradients, 0.03125)
    state = made.get_state()
    assert {state[name].dtype for name in net.weights} == {np.dtype(np.float64)}
    assert_close(state, formulas.state(), EXACT)


@EACH_OPTIMIZER
def test_a_float64_model_learns(optimizer: str) -> None:
    net = regression(dtype=np.float64)
    made = session(net, optimizer)
    losses = [made.run(["loss"], fed(net.batch(), 0.05))[0] for _ in range(30)]
    assert losses[0].dtype == np.float64
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("bounds", [{}, {"ratio_min": 4.0}, {"ratio_max": 0.25}, {"ratio_min": 0.5, "ratio_max": 0.5}])
def test_lamb_bounds_ratios_of_norms(bounds: Mapping[str, float]) -> None:
    """If a norm is zero, the ratio is 1, regardless of the bounds."""
    rng = np.random.default_rng(3)
    weights = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in ("moved", "still", "zero")}
    weights["zero"][:] = 0
    net = prescribing(weights)
    floats = common(net, bounds)
    made, formulas = session(net, LAMB, floats=floats), Formulas(LAMB, weights, floats)
    for _ in range(3):
        gradients = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in weights}
        gradients["still"][:] = 0
        made.run(["loss"], fed(prescribed(gradients), 0.25))
        formulas.step(gradients, 0.25)
        assert_close(made.get_state(), formulas.state(), CLOSE)
    assert bits(made.get_state())["still"] == bits(weights)["still"]


def test_lamb_skips_elements_with_nonfinite_gradients() -> None:
    net = prescribing({"w": np.arange(1, 9, dtype=np.float32)})
    floats = common(net, {"lambda": 0.5})
    made = session(net, LAMB, floats=floats, enable_grad_norm_clip=False)
    formulas = Formulas(LAMB, net.weights, floats, clipping=False)
    gradients = {"w": np.array([1, -2, 3, -4, 0.5, 1, 2, 3], np.float32)}
    broken = {"w": np.array([1, np.inf, 3, np.nan, 0.5, -np.inf, 1e30, 3], np.float32)}
    for given in (gradients, broken, gradients):
        before = made.get_state()
        made.run(["loss"], fed(prescribed(given), 0.125))
        formulas.step(given, 0.125)
        after = made.get_state()
        assert_close(after, formulas.state(), CLOSE)
        for name, value in after.items():
            if given is broken and name != "Step":
                places = [1, 3, 5, 6]
                assert value[places].tobytes() == before[name][places].tobytes(), name
                assert np.all(np.delete(value != before[name], places)), name
    assert made.get_state()["Step"].tolist() == [4]


@pytest.mark.parametrize("optimizer", [ADAM, LAMB])
def test_huge_gradients_are_clipped(optimizer: str) -> None:
    """The squares of these gradients overflow float32, but their norm does not."""
    net = prescribing(starting_weights(SMALL_SHAPES))
    made, formulas = session(net, optimizer), Formulas(optimizer, net.weights)
    for gradients in gradient_pool(net.weights)[:3]:
        huge = {name: g * np.float32(1e30) for name, g in gradients.items()}
        norm = made.run([NORM], fed(prescribed(huge), 0.125))[0]
        np.testing.assert_allclose(norm, formulas.step(huge, 0.125), rtol=CLOSE)
        assert_close(made.get_state(), formulas.state(), CLOSE)


@pytest.mark.parametrize(
    ("optimizer", "signal"), [(SGD, None), *((o, signal) for o in (ADAM, LAMB) for signal in (None, True, False))]
)
def test_nodes_of_optimizers(optimizer: str, signal: bool | None) -> None:
    """Optimizer nodes in a model: a step from existing moments, with a loss scale, a norm, and an update signal."""
    rng = np.random.default_rng(4)
    w, g, first = (rng.standard_normal((3, 4)).astype(np.float32) for _ in range(3))
    second = (first**2).astype(np.float32)
    rate, count, scale = np.array([0.125], np.float32), np.array([5], np.int64), np.array([8], np.float32)
    norm = np.float32(np.sqrt(((8 * g) ** 2).sum()))
    update = None if signal is None else np.array(signal)
    start = Formulas(optimizer, {"w": w}, {} if optimizer == SGD else {"w": {"do_bias_correction": 1, "lambda": 0.125}})
    if optimizer == SGD:
        node = Node(SGD, "", [rate, w, g], outputs=2)
        start.step({"w": g}, 0.125)
        results = {"y0": start.weights["w"], "y1": start.weights["w"] - w}
    else:
        start.first, start.second, start.count = {"w": np.float64(first)}, {"w": np.float64(second)}, 5
        start.step({"w": 8 * g}, 0.125, scale=8, update_signal=signal is not False)
        new = start.weights["w"]
        results = {"count": np.array([start.count], np.int64), "first": start.first["w"], "second": start.second["w"]}
        if optimizer == ADAM:
            inputs = [rate, count, w, 8 * g, first, second, None, scale, norm, update]
            node = Node(ADAM, "", inputs, outputs=5, attributes={"lambda": 0.125}, types={0: TensorProto.INT64})
            results = dict(zip(["y0", "y1", "y2", "y3"], [*results.values(), new], strict=True))
        else:
            inputs = [update, scale, norm, rate, count, w, 8 * g, first, second]
            given = {"lambda": [0.125], "do_bias_correction": 1}
            node = Node(LAMB, "", inputs, outputs=5, attributes=given, types={0: TensorProto.INT64}, left_out=(2,))
            results = {"y0": results["count"], "y1": new, "y3": results["first"], "y4": results["second"]}
    runs = ortrain.InferenceSession(node.model())
    found = dict(zip(named(runs.get_outputs), runs.run(None, node.feeds()), strict=True))
    if optimizer == ADAM:
        np.testing.assert_array_equal(found.pop("y4"), found["y3"] - w)
    assert_close(found, results, CLOSE)
    if signal is False:
        kept: State = {"y0": count, "y1": first, "y2": second, "y3": w} if optimizer == ADAM else {"y0": count, "y1": w}
        assert bits({name: found[name] for name in kept}) == bits(kept)


# A6 to A9: states.


@EACH_OPTIMIZER
def test_a06_round_trip(optimizer: str) -> None:
    """Loading a state changes no bit, and training continues exactly as without loading."""
    net = classifier(gain=True)
    first, second = session(net, optimizer), session(net, optimizer)
    steps(first, net, 3)
    state = first.get_state()
    first.load_state(first.get_state(), strict=True)
    assert bits(first.get_state()) == bits(state)
    second.load_state(state, strict=True)
    assert bits(second.get_state()) == bits(state)
    for value in state.values():
        value[...] = 0
    assert steps(first, net, 3, 3) == steps(second, net, 3, 3)
    assert bits(first.get_state()) == bits(second.get_state())


def test_a06_parts_of_a_state() -> None:
    net = regression()
    made = session(net, ADAM)
    steps(made, net, 2)
    for strict in (False, True):
        before = made.get_state()
        made.load_state({}, strict)
        assert bits(made.get_state()) == bits(before)
        part: State = {"W": np.full((12, 10), 2.0 + strict, np.float32), "Update_Count_b": np.array([9], np.int64)}
        made.load_state(part, strict)
        assert bits(made.get_state()) == bits(before | part)


@pytest.mark.parametrize("name", ["nowhere", "aside", "X", "Update_Count_aside", "loss"])
def test_a06_keys_that_are_no_state(name: str) -> None:
    net = regression(side_outputs=True)
    made = session(net, ADAM)
    before, zeros = made.get_state(), np.zeros(10, np.float32)
    made.load_state({name: zeros}, strict=False)
    with pytest.raises(RuntimeError, match=name):
        made.load_state({"b": zeros, name: zeros}, strict=True)
    assert bits(made.get_state()) == bits(before)
    np.testing.assert_allclose(np.subtract(*made.run(["shifted", "pred"], fed(net.batch()))), 1, rtol=1e-5)


UNFIT: dict[str, npt.NDArray[Any]] = {
    "W": np.zeros((12, 9), np.float32),
    "W by its other axes": np.zeros((10, 12), np.float32),
    "W in a row": np.zeros(120, np.float32),
    "W of the same bytes": np.zeros((12, 10), np.int32),
    "W in half the bytes": np.zeros((12, 10), np.float16),
    "W in twice the bytes": np.zeros((12, 10), np.float64),
    "b as a column": np.zeros((10, 1), np.float32),
    "Moment_1_W of the same bytes": np.zeros((12, 10), np.uint32),
    "Moment_2_b by one": np.zeros(11, np.float32),
    "Update_Count_W of int32": np.ones(1, np.int32),
    "Update_Count_W of the same bytes": np.ones(2, np.int32),
    "Update_Count_W as a scalar": np.array(1, np.int64),
    "Update_Count_W of zero": np.zeros(1, np.int64),
    "Update_Count_W below": np.array([-3], np.int64),
}


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("case", UNFIT)
def test_a06_values_that_do_not_fit(case: str, strict: bool) -> None:
    made = session(regression(), ADAM)
    before, name = made.get_state(), case.partition(" ")[0]
    with pytest.raises(RuntimeError, match=name):
        made.load_state({"b": np.full(10, 2, np.float32)} | {name: UNFIT[case]}, strict)
    assert bits(made.get_state()) == bits(before), "nothing is loaded"


def test_a06_each_weight_counts_for_itself() -> None:
    """A loaded counter affects the bias correction of its own weight only."""
    net = prescribing(starting_weights(SMALL_SHAPES))
    made = session(net, ADAM)
    made.load_state({"Update_Count_row": np.array([7], np.int64)}, strict=True)
    common_count, own_count = Formulas(ADAM, net.weights), Formulas(ADAM, net.weights, count=7)
    for gradients in gradient_pool(net.weights)[:3]:
        made.run(["loss"], fed(prescribed(gradients)))
        for formulas in (common_count, own_count):
            formulas.step(gradients, 0.125)
        own = {name: value for name, value in own_count.state().items() if name.endswith("row")}
        assert_close(made.get_state(), common_count.state() | own, CLOSE_OF_FORMULAS)


def test_a06_steps_of_lamb_are_counted_from_one() -> None:
    made = session(regression(), LAMB)
    for step in (0, -1):
        with pytest.raises(RuntimeError, match="Step"):
            made.load_state({"Step": np.array([step], np.int64)})
    made.load_state({"Step": np.array([7], np.int64)}, strict=True)
    assert made.get_state()["Step"].tolist() == [7]


def test_a06_a_state_of_another_model() -> None:
    made, other = session(regression(), ADAM), session(classifier(), ADAM)
    before = made.get_state()
    with pytest.raises(RuntimeError, match="fc1"):
        made.load_state(other.get_state(), strict=True)
    made.load_state(other.get_state(), strict=False)
    with pytest.raises(RuntimeError, match="W"):
        made.load_state(session(regression(features=13), ADAM).get_state())
    with pytest.raises(RuntimeError, match="float64"):
        made.load_state(session(regression(dtype=np.float64), ADAM).get_state())
    assert bits(made.get_state()) == bits(before)
    for wrong in (None, [before], "checkpoint"):
        with pytest.raises(TypeError):
            made.load_state(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [ADAM, LAMB])
def test_a07_initial_states_of_optimizers(optimizer: str) -> None:
    net = classifier(gain=True)
    first = session(net, optimizer)
    steps(first, net, 3)
    found = first.get_optimizer_state()
    keys = {"Moment_1", "Moment_2"} | ({"Update_Count"} if optimizer == ADAM else set())
    assert {name: set(own) for name, own in found.items()} == dict.fromkeys(net.weights, keys) | (
        {"shared_optimizer_state": {"Step"}} if optimizer == LAMB else {}
    )
    given = parameters(net, optimizer)
    given.set_optimizer_initial_state(found)
    for own in found.values():
        for value in own.values():
            value[...] = 77
    second = TrainingSession(net.model.SerializeToString(), given)
    second.load_state(first.get_model_state()["full_precision"], strict=True)
    assert bits(second.get_state()) == bits(first.get_state())
    assert steps(first, net, 2, 3) == steps(second, net, 2, 3)
    assert bits(second.get_state()) == bits(first.get_state())


def test_a07_parts_of_initial_states() -> None:
    net = regression()
    part = {"Moment_2": np.full(10, 4, np.float32), "Update_Count": np.array([6])}
    expected = session(net, ADAM).get_state() | {f"{name}_b": value for name, value in part.items()}
    assert bits(started(net, {"b": part}).get_state()) == bits(expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((3, 5), np.float32), r"(?s)(?=.*W)(?=.*3)(?=.*5)(?=.*12)(?=.*10)"),
        (np.zeros((10, 12), np.float32), r"W"),
        (np.zeros((12, 10), np.float64), r"W.*(float64|double)"),
        (np.zeros((12, 10), np.int32), r"W.*int32"),
    ],
)
def test_a07_initial_states_that_do_not_fit(value: npt.NDArray[Any], words: str) -> None:
    net = regression()
    with pytest.raises(RuntimeError, match=words):
        started(net, {"W": {"Moment_1": value}})


@pytest.mark.parametrize("wrong", [None, {"W": [1, 2]}, {3: {}}, {"W": {3: np.zeros(1)}}])
def test_a07_initial_states_are_arrays_by_names(wrong: Any) -> None:
    with pytest.raises(TypeError):
        TrainingParameters().set_optimizer_initial_state(wrong)


@EACH_OPTIMIZER
def test_a08_model_states(optimizer: str) -> None:
    net = regression()
    made = session(net, optimizer)
    steps(made, net, 1)
    state = made.get_state()
    weights = bits({name: state[name] for name in sorted(net.weights)})
    assert made.get_model_state().keys() == {"full_precision"}
    both = made.get_model_state(include_mixed_precision_weights=True)
    assert {name: dict(sorted(bits(values).items())) for name, values in both.items()} == {
        "full_precision": weights,
        "mixed_precision": {},
    }
    assert made.get_partition_info_map() == {}
    if optimizer == SGD:
        assert made.get_optimizer_state() == {}
    if optimizer == ADAM:
        moments = {name: bits(own) for name, own in made.get_optimizer_state().items()}
        parts = ("Moment_1", "Moment_2", "Update_Count")
        assert moments == {name: bits({part: state[f"{part}_{name}"] for part in parts}) for name in net.weights}


def test_a08_without_an_optimizer() -> None:
    net = regression()
    made = session(net, "")
    assert list(made.get_state()) == ["W", "b"]
    assert made.get_optimizer_state() == {}
    made.run(None, net.batch())
    assert bits(made.get_state()) == bits(net.weights)


def test_a09_states_are_copies() -> None:
    net = regression()
    made = session(net, ADAM)
    getters: list[Callable[[], Mapping[str, npt.NDArray[Any]]]] = [
        made.get_state,
        lambda: made.get_model_state()["full_precision"],
        lambda: made.get_optimizer_state()["W"],
    ]
    for get in getters:
        before = get()
        kept = bits(before)
        steps(made, net, 1)
        assert bits(before) == kept, "training does not write to the returned arrays"
        after = bits(get())
        assert after != kept
        for value in before.values():
            assert value.flags.writeable
            value[...] = 5
        for value in get().values():
            value[...] = 6
        assert bits(get()) == after


# A10 to A13: runs.


@EACH_OPTIMIZER
def test_a10_fetched_outputs(optimizer: str) -> None:
    net = regression(side_outputs=True)
    made = session(net, optimizer)
    feeds, before = fed(net.batch()), bits(made.get_state())
    everything = made.run([], feeds, restricted())
    for names in (["pred"], [NORM], ["loss", "best"], ["best", "loss"]):
        found = made.run(names, feeds, restricted())
        expected = {name: everything[named(made.get_outputs).index(name)] for name in names}
        assert [value.tobytes() for value in found] == [value.tobytes() for value in expected.values()]
        assert bits(made.get_state()) == before
    other = session(net, optimizer)
    other.run(None, feeds)
    for names in (["pred"], ["best"], [NORM]):
        fetched = session(net, optimizer)
        assert len(fetched.run(names, feeds)) == 1
        assert bits(fetched.get_state()) == bits(other.get_state()) != before


@EACH_OPTIMIZER
def test_a11_a_rate_of_zero(optimizer: str, face: Any) -> None:
    net = classifier(gain=True)
    made = session(net, optimizer, face=face, floats=common(net, {"lambda": 0.5}))
    moved = session(net, optimizer, face=face, floats=common(net, {"lambda": 0.5}))
    for k in range(3):
        losses = [each.run(["loss"], fed(net.batch(k), rate))[0] for each, rate in ((made, 0.0), (moved, 0.125))]
        assert (losses[0] == losses[1]) == (k == 0)
        state = made.get_state()
        assert bits({name: state[name] for name in net.weights}) == bits(net.weights)
    if optimizer != SGD:
        assert np.all(state["Moment_2_fc2.b"] > 0)
        assert state["Step" if optimizer == LAMB else "Update_Count_gain"].tolist() == [4]


def test_a12_bindings_train(face: Any) -> None:
    """Only the loss is bound as an output, and inputs are bound anew for each batch."""
    net = classifier()
    bound, plain = (session(net, ADAM, face=face) for _ in range(2))
    binding = bound.io_binding()
    binding.bind_output("loss")
    for k in range(4):
        feeds = fed(net.batch(k))
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        bound.run_with_iobinding(binding)
        (loss,) = binding.copy_outputs_to_cpu()
        assert loss.tobytes() == plain.run(["loss"], feeds)[0].tobytes()
    assert bits(bound.get_state()) == bits(plain.get_state())


@pytest.mark.parametrize("only", [False, True])
def test_a12_bound_floats_are_read_where_they_lie(only: bool) -> None:
    """Large float inputs are not copied into the memory of the run; the run reads their bytes at its start."""
    net = regression()
    rows = 5_000
    rng = np.random.default_rng(3)
    feeds = {
        name: rng.standard_normal((rows, *value.shape[1:])).astype(np.float32) for name, value in net.batch().items()
    }
    bound, plain = session(net, SGD), session(net, SGD)
    options = restricted() if only else None
    binding = bound.io_binding()
    binding.bind_output("loss")
    for name, value in fed(feeds).items():
        binding.bind_cpu_input(name, value)
    for factor in (1, 2):
        for value in feeds.values():
            value *= factor
        bound._classic.begin_trace()
        bound.run_with_iobinding(binding, options)
        trace = json.loads(bound._classic.end_trace() or "[]")
        copied = sum(int(event["args"]["bytes"]) // 2 for event in trace if event["name"] == "Inputs")
        assert copied < rows, "large inputs are not copied"
        (loss,) = binding.copy_outputs_to_cpu()
        assert loss.tobytes() == plain.run(["loss"], fed(feeds), options)[0].tobytes()
    assert bits(bound.get_state()) == bits(plain.get_state())


@pytest.mark.parametrize("optimizer", ["", SGD, LAMB])
def test_a13_gradients_as_outputs(optimizer: str) -> None:
    net = regression()
    made = session(net, optimizer, set_gradients_as_graph_outputs=True)
    feeds = net.batch()
    outputs = ["b_grad", "loss", "W_grad"]
    found = dict(zip(outputs, made.run(outputs, fed(feeds) if optimizer else feeds), strict=True))
    loss, gradients = squared_errors(net.weights, feeds)
    expected: dict[str, Any] = {f"{name}_grad": g for name, g in gradients.items()} | {"loss": loss}
    assert_close(found, expected, CLOSE)
    assert {name: found[f"{name}_grad"].shape for name in net.weights} == {
        name: w.shape for name, w in net.weights.items()
    }


# A14: errors.


def refused_models() -> dict[str, Callable[[], Net]]:
    """Return models that cannot be trained, by a word of the expected error."""

    def without_gradient() -> Net:
        net = regression()
        (squares,) = (node for node in net.model.graph.node if node.name == "squares")
        squares.op_type = "Bernoulli"
        del squares.input[1:]
        return net

    def with_gradients() -> Net:
        net = regression()
        builder = C.GradientGraphBuilder(net.model.SerializeToString(), {"loss"}, {"W", "b"}, "loss")
        builder.build()
        return Net(onnx.load_from_string(builder.get_model()), net.weights, net.draw)

    def with_aside() -> Net:
        net = regression(side_outputs=True)
        return Net(net.model, net.weights | {"aside": np.ones(10, np.float32)}, net.draw)

    def with_input() -> Net:
        net = regression()
        return Net(net.model, net.weights | {"X": np.ones((1, 12), np.float32)}, net.draw)

    return {
        "Bernoulli": without_gradient,
        "W_grad": with_gradients,
        "aside": with_aside,
        "X": with_input,
        "loss": lambda: regression(loss_shape=[10], axes=[0]),
    }


@pytest.mark.parametrize("optimizer", ["", ADAM])
@pytest.mark.parametrize("word", refused_models())
def test_a14_models_that_are_refused(word: str, optimizer: str) -> None:
    with pytest.raises(RuntimeError, match=word):
        session(refused_models()[word](), optimizer)


@pytest.mark.parametrize(
    ("properties", "kind", "words"),
    [
        ({"loss_output_name": ""}, RuntimeError, r"pred"),
        ({"loss_output_name": "lost"}, RuntimeError, r"(?s)(?=.*lost)(?=.*pred)"),
        ({"loss_output_name": "pred"}, RuntimeError, r"pred"),
        ({"training_optimizer_name": "Adagrad"}, C.Fail, r"Adagrad"),
        ({"optimizer_attributes_map": {"W": {}}}, C.Fail, r"b\b"),
        ({"optimizer_int_attributes_map": {"b": {}}}, C.Fail, r"W\b"),
        ({"weights_to_train": set(), "optimizer_attributes_map": {"b": {}}}, C.Fail, r"W\b"),
        ({"data_parallel_size": 2}, RuntimeError, r"data_parallel_size"),
        ({"horizontal_parallel_size": 2}, RuntimeError, r"horizontal_parallel_size"),
        ({"pipeline_parallel_size": 2}, RuntimeError, r"pipeline_parallel_size"),
    ],
)
def test_a14_parameters_that_are_refused(properties: Mapping[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        session(regression(), ADAM, **properties)


def test_a14_error_names_the_attribute_map() -> None:
    texts = []
    for name in ("optimizer_attributes_map", "optimizer_int_attributes_map"):
        with pytest.raises(C.Fail, match="W") as caught:
            session(regression(), ADAM, **{name: {"b": {}}})
        texts.append(str(caught.value))
    assert texts[0] != texts[1]


def test_a14_invalid_models_and_parameters(tmp_path: Path) -> None:
    net = regression()
    given = parameters(net)
    with pytest.raises(C.NoSuchFile, match="nowhere"):
        TrainingSession(str(tmp_path / "nowhere.onnx"), given)
    with pytest.raises(C.InvalidProtobuf):
        TrainingSession(b"\xff\xff\xff\xffnot a model", given)
    with pytest.raises(C.InvalidArgument, match="the model is empty"):
        TrainingSession(b"", given)
    others: list[tuple[Any, Any]] = [(wrong, given) for wrong in (None, 3, ["model.onnx"])]
    others += [(net.model.SerializeToString(), wrong) for wrong in (None, "loss", {"loss_output_name": "loss"})]
    for model, wrong in others:
        with pytest.raises(TypeError):
            TrainingSession(model, wrong)
    # A failed constructor leaves no session that prints a warning when it is collected.
    gc.collect()
    path = tmp_path / "model.onnx"
    path.write_bytes(net.model.SerializeToString())
    assert steps(TrainingSession(str(path), given), net, 2) == steps(session(net), net, 2)


PROVIDER = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        (3, None),
        ({PROVIDER}, None),
        ([3], None),
        ([(PROVIDER, 3)], None),
        ([(PROVIDER,)], None),
        ([PROVIDER], {}),
        ([PROVIDER], [{}, {}]),
        ([(PROVIDER, {})], [{}]),
        ([PROVIDER], ["fast"]),
    ],
)
def test_a14_providers_that_are_refused(providers: Any, options: Any) -> None:
    net = regression()
    with pytest.raises(ValueError, match="provider"):
        TrainingSession(net.model.SerializeToString(), parameters(net), None, providers, options)


def test_a14_providers_that_are_not_here() -> None:
    net = regression()
    with pytest.raises(RuntimeError, match="TPU"):
        TrainingSession(net.model.SerializeToString(), parameters(net), providers=["TPUExecutionProvider"])
    with pytest.warns(UserWarning, match=PROVIDER):
        made = TrainingSession(net.model.SerializeToString(), parameters(net), None, [PROVIDER, (PROVIDER, {})])
    known: list[list[Any]] = [[None], [[]], [[PROVIDER], [{}]], [[(PROVIDER, {})]]]
    others = [TrainingSession(net.model.SerializeToString(), parameters(net), None, *given) for given in known]
    for each in (made, *others):
        assert each.get_providers() == [PROVIDER]
        assert steps(each, net, 1) == steps(session(net), net, 1)


def changed(**changes: Any) -> Callable[[Feeds], Any]:
    """Return a function that replaces some feeds; None removes a feed."""

    def change(feeds: Feeds) -> Feeds:
        given = {**feeds, **changes}
        return {name: value for name, value in given.items() if value is not None}

    return change


def rates(*values: float) -> dict[str, Any]:
    return {RATE: np.array(values, np.float32)}


LABEL = np.zeros(12, np.int64)
# Invalid feeds, the class of the error, and a pattern of its message.
RUN_ERRORS: dict[str, tuple[Callable[[Feeds], Any], type[Exception], str]] = {
    "an input is missing": (changed(labels=None), ValueError, r"(?s)(?=.*labels)(?=.*x)"),
    "no rate": (changed(**{RATE: None}), ValueError, RATE),
    "an unknown input": (changed(weights=LABEL), C.InvalidArgument, "weights"),
    "a trained weight": (changed(**{"fc1.b": np.zeros(16, np.float32)}), C.InvalidArgument, r"fc1\.b"),
    "another type": (changed(x=np.zeros((12, 12), np.float64)), C.InvalidArgument, "double|float64"),
    "labels of float32": (changed(labels=np.zeros(12, np.float32)), C.InvalidArgument, r"(?s)(?=.*float)(?=.*int64)"),
    "another rank": (changed(x=np.zeros((12, 12, 1), np.float32)), C.InvalidArgument, r"(?s)(?=.*x)(?=.*3)(?=.*2)"),
    "another size": (changed(x=np.zeros((12, 11), np.float32)), C.InvalidArgument, r"(?s)(?=.*11)(?=.*12)"),
    "more labels than rows": (changed(labels=np.zeros(13, np.int64)), RuntimeError, "13"),
    "a label too large": (changed(labels=LABEL + 10), RuntimeError, "10"),
    "a label below zero": (changed(labels=LABEL - 3), RuntimeError, "-3"),
    "a rate that is a scalar": (changed(**{RATE: np.array(0.125, np.float32)}), C.InvalidArgument, RATE),
    "two rates": (changed(**rates(0.125, 0.125)), C.InvalidArgument, RATE),
    "a rate of float64": (changed(**{RATE: np.array([0.125])}), C.InvalidArgument, RATE),
    "a rate that is NaN": (changed(**rates(np.nan)), C.InvalidArgument, RATE),
    "an infinite rate": (changed(**rates(np.inf)), C.InvalidArgument, RATE),
}


@pytest.fixture(scope="module")
def begun() -> dict[str, tuple[Net, TrainingSession]]:
    """Sessions after one step, by optimizer."""
    net = classifier()
    made = {optimizer: (net, session(net, optimizer)) for optimizer in OPTIMIZERS}
    for _, trained in made.values():
        steps(trained, net, 1)
    return made


@EACH_OPTIMIZER
@pytest.mark.parametrize("case", RUN_ERRORS)
def test_a14_runs_that_fail_change_nothing(
    case: str, optimizer: str, begun: Mapping[str, tuple[Net, TrainingSession]]
) -> None:
    net, trained = begun[optimizer]
    change, kind, words = RUN_ERRORS[case]
    before = bits(trained.get_state())
    with pytest.raises(kind, match=words):
        trained.run(["loss"], change(fed(net.batch(1))))
    assert bits(trained.get_state()) == before


@EACH_OPTIMIZER
def test_a14_training_goes_on_after_failures(optimizer: str) -> None:
    net = classifier()
    failing, plain = session(net, optimizer), session(net, optimizer)
    steps(failing, net, 1)
    for change, kind, _ in RUN_ERRORS.values():
        with pytest.raises(kind):
            failing.run(None, change(fed(net.batch(1))))
    steps(failing, net, 1, 1)
    steps(plain, net, 2)
    assert bits(failing.get_state()) == bits(plain.get_state())


def test_a14_outputs_that_are_not_there(begun: Mapping[str, tuple[Net, TrainingSession]]) -> None:
    net, trained = begun[ADAM]
    before = bits(trained.get_state())
    for options in (None, restricted()):
        with pytest.raises(C.InvalidArgument, match="lost"):
            trained.run(["loss", "lost"], fed(net.batch()), options)
    assert bits(trained.get_state()) == before


def test_a14_lists_and_fortran_arrays_as_feeds() -> None:
    """Lists are accepted, and arrays in Fortran order."""
    net = classifier()
    plain, other = session(net), session(net)
    feeds = fed(net.batch())
    expected = plain.run(None, feeds)
    given = {**feeds, "x": np.asfortranarray(feeds["x"]), "labels": feeds["labels"].tolist()}
    assert [value.tobytes() for value in other.run([], given)] == [value.tobytes() for value in expected]
    assert bits(plain.get_state()) == bits(other.get_state())


def test_a14_sessions_are_not_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(session(regression()))


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_batches_of_any_size(rows: int) -> None:
    net = regression()
    made, formulas = session(net), Formulas(SGD, net.weights)
    for k in range(3):
        feeds = net.batch(k, rows + k)
        loss, gradients = squared_errors(formulas.weights, feeds)
        np.testing.assert_allclose(made.run(["loss"], fed(feeds))[0], loss, rtol=CLOSE)
        formulas.step(gradients, 0.125)
    assert_close(made.get_state(), formulas.state(), CLOSE_OF_FORMULAS)


# A15: files.

DUMPS = ("model_after_graph_transforms_path", "model_with_gradient_graph_path", "model_with_training_graph_path")


@EACH_OPTIMIZER
@pytest.mark.parametrize("as_outputs", [False, True], ids=["plain", "gradients"])
def test_a15_dumps(optimizer: str, as_outputs: bool, tmp_path: Path) -> None:
    net = classifier()
    paths = [tmp_path / f"{name}.onnx" for name in DUMPS]
    for path in paths:
        path.write_text("something else")
    properties = dict(zip(DUMPS, map(str, paths), strict=True))
    made = session(net, optimizer, set_gradients_as_graph_outputs=as_outputs, **properties)
    forward, backward, whole = map(onnx.load, paths)
    results = [{name for node in model.graph.node for name in node.output} for model in (forward, backward, whole)]
    ops = [[node.op_type for node in model.graph.node] for model in (forward, backward, whole)]
    gradients = {f"{name}_grad" for name in net.weights}
    assert not results[0] & gradients
    assert gradients <= results[1]
    assert gradients <= results[2]
    counts = [(kinds.count(optimizer), sum(kind.endswith("Optimizer") for kind in kinds)) for kinds in ops]
    count = 1 if optimizer == LAMB else len(net.weights)
    assert counts == [(0, 0), (0, 0), (count, count)]
    updates = {
        SGD: {"{w}_SGD_out"},
        ADAM: {"{w}_grad_Step_Out", "Moment_1_{w}_Out", "Moment_2_{w}_Out", "{w}_Adam_out"},
        LAMB: {"Step_Out", "Moment_1_{w}_Out", "Moment_2_{w}_Out", "{w}_Lamb_out"},
    }[optimizer]
    assert {name.format(w=w) for name in updates for w in net.weights} <= results[2]
    assert {tensor.name for tensor in whole.graph.initializer} >= set(made.get_state())
    declared = [[value.name for value in model.graph.output] for model in (forward, backward, whole)]
    assert declared[0] == ["fc2", "loss"]
    assert declared[1] == ["fc2", "loss", *(sorted(gradients) if as_outputs else [])]
    assert declared[2] == named(made.get_outputs)
    names = [["loss"]] + 2 * [["loss", *(sorted(gradients) if as_outputs else [])]]
    for path, wanted, feeds in zip(paths, names, (net.batch(), net.batch(), fed(net.batch())), strict=True):
        expected = dict(zip(wanted, made.run(wanted, fed(net.batch()), restricted()), strict=True))
        found = dict(zip(wanted, ortrain.InferenceSession(str(path)).run(wanted, feeds), strict=True))
        assert_close(found, expected, CLOSE)


def test_a15_an_optimized_model_is_the_training_graph(tmp_path: Path) -> None:
    net = regression()
    optimized, training = str(tmp_path / "optimized.onnx"), str(tmp_path / "training.onnx")
    options = ortrain.SessionOptions()
    options.optimized_model_filepath = optimized

    def session_with_training_graph(path: str) -> TrainingSession:
        properties = parameters(net, ADAM)
        properties.model_with_training_graph_path = path
        return TrainingSession(net.model.SerializeToString(), properties, options)

    steps(session_with_training_graph(""), net, 1)
    session(net, ADAM, model_with_training_graph_path=training)
    assert Path(optimized).read_bytes() == Path(training).read_bytes()
    Path(optimized).unlink()
    session_with_training_graph(optimized)
    assert Path(optimized).read_bytes() == Path(training).read_bytes()
    Path(optimized).unlink()
    with pytest.raises(C.NotImplemented, match="optimized_model_filepath and model_with_training_graph_path"):
        session_with_training_graph(training)
    assert not Path(optimized).exists()


@EACH_OPTIMIZER
@pytest.mark.parametrize("window", [1, 3])
def test_a15_training_graph_computes_a_step(optimizer: str, window: int, tmp_path: Path) -> None:
    """The nodes in the file compute the state after a step."""
    net, path = classifier(gain=True), str(tmp_path / "training.onnx")
    floats = common(net, {"lambda": 0.125, "max_norm_clip": 0.5, "alpha": 0.75} if optimizer != SGD else {})
    made = session(
        net, optimizer, floats=floats, gradient_accumulation_steps=window, model_with_training_graph_path=path
    )
    made.run(["loss"], fed(net.batch()))
    state = made.get_state()
    assert_close(updated_by_file(path, optimizer, state, fed(net.batch())), state, CLOSE, least=0.01)


def test_a15_no_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session(regression(), ADAM)
    assert list(tmp_path.iterdir()) == []
    for name in DUMPS:
        with pytest.raises(RuntimeError, match="nowhere"):
            session(regression(), ADAM, **{name: str(tmp_path / "nowhere" / "model.onnx")})


# A16: weights and their attributes.


def test_a16_weights_that_are_not_there() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        session(regression(), weights_to_train={"W", "nowhere"})


def test_a16_weights_of_integers_are_not_trained() -> None:
    net = regression(doubled=True)
    made = session(Net(net.model, net.weights | {"sizes": np.zeros(2, np.int64)}, net.draw))
    assert list(made.get_state()) == ["W", "b"]


def test_a16_weights_that_nothing_reads() -> None:
    net = regression()
    model = copy.deepcopy(net.model)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(10, np.float32), "idle"))
    made = session(Net(model, net.weights | {"idle": np.zeros(10, np.float32)}, net.draw), ADAM)
    plain = session(net, ADAM)
    assert steps(made, net, 2) == steps(plain, net, 2)
    assert bits(made.get_state()) == bits(plain.get_state())


@EACH_OPTIMIZER
def test_a16_attributes_of_weights(optimizer: str) -> None:
    """Attributes of untrained weights are accepted; a name that is not in the model is refused."""
    net = regression(side_outputs=True)
    attributes: dict[str, dict[str, Any]] = {name: {} for name in ("W", "b", "aside")}
    plain = session(net, optimizer, weights_to_train={"W"})
    made = session(
        net,
        optimizer,
        weights_to_train={"W"},
        optimizer_attributes_map=attributes,
        optimizer_int_attributes_map=attributes,
    )
    assert steps(made, net, 2) == steps(plain, net, 2)
    assert bits(made.get_state()) == bits(plain.get_state())
    for name in ("optimizer_attributes_map", "optimizer_int_attributes_map"):
        with pytest.raises(RuntimeError, match="nowhere"):
            session(net, optimizer, **{name: attributes | {"nowhere": {}}})


@pytest.mark.parametrize("optimizer", [ADAM, LAMB])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", math.nan),
        ("alpha", 1.5),
        ("beta", -0.5),
        ("lambda", math.inf),
        ("epsilon", -1.0),
        ("max_norm_clip", 0.0),
        ("gamma", 1.0),
        ("do_bias_correction", 2),
    ],
)
def test_a16_attributes_that_are_refused(name: str, value: float, optimizer: str) -> None:
    """The error names the attribute and the weight."""
    kind = "ints" if isinstance(value, int) else "floats"
    with pytest.raises(RuntimeError, match=rf'(?s)(?=.*{name})(?=.*"b")'):
        session(regression(), optimizer, **{kind: {"b": {name: value}}})


def test_a16_states_of_weights_that_are_not_there() -> None:
    net = regression()
    with pytest.raises(RuntimeError, match="nowhere"):
        started(net, {"nowhere": {"Moment_1": np.zeros(10, np.float32)}})


@pytest.mark.parametrize("name", ["ratio_min", "ratio_max"])
def test_a16_bounds_of_lamb_are_common(name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        session(regression(), LAMB, floats={"W": {name: 0.5}, "b": {name: 0.25}})
    with pytest.raises(RuntimeError, match="do_bias_correction"):
        session(regression(), LAMB, ints={"W": {"do_bias_correction": 1}, "b": {"do_bias_correction": 0}})


def test_a16_lamb_has_1024_weights() -> None:
    names = [f"w{k}" for k in range(1025)]
    nodes = [
        helper.make_node("Add", ["x" if k == 0 else f"sum{k - 1}", name], [f"sum{k}"]) for k, name in enumerate(names)
    ]
    graph = helper.make_graph(
        [*nodes, helper.make_node("ReduceSum", ["sum1024"], ["loss"], keepdims=0)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.ones(2, np.float32), name) for name in names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.zeros(2, np.float32)

    def first(count: int) -> Net:
        return Net(model, dict.fromkeys(names[:count], np.ones(2, np.float32)), lambda *_: {"x": x})

    net = first(1024)
    made = session(net, LAMB)
    made.run(["loss"], fed(net.batch()))
    # All elements of a weight move alike: by the rate times the norm of the weight.
    moved = [value for name, value in made.get_state().items() if name.startswith("w")]
    np.testing.assert_allclose(moved, np.full((1024, 2), 0.875), rtol=CLOSE)
    with pytest.raises(RuntimeError, match="1024"):
        session(first(1025), LAMB)


# A17: types of results.


def test_a17_results_of_float32() -> None:
    made = session(regression(side_outputs=True), ADAM)
    table = {"pred": True, "loss": True, "squares": True, "W_grad": True, NORM: True, "wide": False, "best": False}
    assert {name: made.is_output_fp32_node(name) for name in table} == table
    for name in ("nowhere", "X", "label", "W", RATE):
        with pytest.raises(RuntimeError, match=name):
            made.is_output_fp32_node(name)
    wide = session(regression(dtype=np.float64))
    assert not wide.is_output_fp32_node("loss")


@EACH_OPTIMIZER
@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
def test_a17_results_of_optimizers(optimizer: str, half: bool, tmp_path: Path) -> None:
    """Names and types agree with the nodes in the file of the training graph."""
    net, path = regression(), str(tmp_path / "training.onnx")
    made = session(net, optimizer, use_mixed_precision=half, model_with_training_graph_path=path)
    graph = onnx.load(path).graph
    outputs = [name for node in graph.node if node.op_type == optimizer for name in node.output if name]
    # In mixed precision the SGD node makes W_SGD_moved; W_SGD_out is this value only if all gradients are finite.
    outputs = [name.replace("_SGD_moved", "_SGD_out") for name in outputs]
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    types |= {f"{name}_SGD_out": TensorProto.FLOAT for name in net.weights}
    assert len(outputs) >= len(net.weights)
    assert {name: made.is_output_fp32_node(name) for name in outputs} == {
        name: types[name] == TensorProto.FLOAT for name in outputs
    }
    assert any(name.endswith("W_fp16_Adam_out") for name in outputs) == (half and optimizer == ADAM)
    others = {"W_SGD_out", "W_Adam_out", "W_Lamb_out", "Step_Out", "W_fp16_SGD_out"} - set(outputs)
    for name in others:
        with pytest.raises(RuntimeError, match=name):
            made.is_output_fp32_node(name)


# A18: modes.


def options_of(face: Any, training_mode: bool) -> Any:
    """Return run options with a training mode."""
    options = face.RunOptions()
    if not hasattr(options, "training_mode"):
        # The installed onnxruntime is a build for inference.
        options = ortrain.RunOptions()
    assert options.training_mode is True
    options.training_mode = training_mode
    return options


def test_a18_dropout(face: Any) -> None:
    net = classifier(dropout=0.5, training_mode=True)
    made = session(net, face=face)
    feeds = fed(net.batch(), 0.0)
    expected = session(classifier()).run(["loss"], feeds, restricted())[0]
    assert "training_mode" in named(made.get_overridable_initializers)
    assert "training_mode" not in named(made.get_inputs)
    off, on = options_of(face, False), options_of(face, True)

    def losses(options: Any, **more: Any) -> list[float]:
        return [float(bound_run(made, feeds | more, options=options)[0]) for _ in range(3)]

    def same(found: Sequence[float]) -> bool:
        return len(set(found)) == 1 and math.isclose(found[0], expected, rel_tol=CLOSE)

    assert same(losses(off))
    assert len(set(losses(on))) == 3
    assert len(set(losses(None))) == 3
    assert same(losses(on, training_mode=np.array(False))), "the bound input replaces the initializer"
    assert len(set(losses(off, training_mode=np.array(True)))) == 3
    # A feed has the same effect as a binding.
    given = feeds | {"training_mode": np.array(False)}
    assert same([float(made.run(["loss"], given)[0]) for _ in range(3)])
    assert len({float(made.run(["loss"], feeds)[0]) for _ in range(3)}) == 3


def test_a18_weights_are_trained_in_either_mode() -> None:
    net = classifier(dropout=0.5, training_mode=True)
    made, plain = session(net, ADAM), session(classifier(), ADAM)
    options = options_of(ortrain, False)
    for k in range(2):
        bound_run(made, fed(net.batch(k)), options=options)
    steps(plain, net, 2)
    assert_close(made.get_state(), plain.get_state(), CLOSE)


def test_a18_dropout_without_a_mode() -> None:
    net = classifier(dropout=0.5)
    made, plain = session(net, ADAM), session(classifier(), ADAM)
    assert named(made.get_overridable_initializers) == []
    np.testing.assert_allclose(steps(made, net, 3), steps(plain, net, 3), rtol=CLOSE)
    assert_close(made.get_state(), plain.get_state(), CLOSE)


def test_batch_normalization_uses_the_statistics_of_the_graph() -> None:
    """The statistics are the constants of the model, and are not trained."""
    rng = np.random.default_rng(5)
    names, size = ("scale", "bias", "mean", "var"), 9
    values = dict(zip(names, rng.uniform(0.5, 1.5, (4, size)).astype(np.float32), strict=True))
    graph = helper.make_graph(
        [
            helper.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=0.0),
            helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", size])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = rng.standard_normal((6, size)).astype(np.float32)
    net = Net(model, {name: values[name] for name in ("scale", "bias")}, lambda *_: {"x": x})
    made = session(net, weights_to_train=set())
    normal = (np.float64(x) - values["mean"]) / np.sqrt(np.float64(values["var"]))
    loss = float((normal * values["scale"] + values["bias"]).sum())
    np.testing.assert_allclose(made.run(["loss"], fed({"x": x}, 0.25))[0], loss, rtol=1e-5)
    expected = {"scale": values["scale"] - 0.25 * normal.sum(axis=0), "bias": values["bias"] - 0.25 * 6}
    assert_close(made.get_state(), expected, CLOSE)


# A19, A20: fitting a line.


@EACH_OPTIMIZER
def test_a19_weights_of_one_element(optimizer: str) -> None:
    net = regression(features=1, targets=1)
    assert {w.size for w in net.weights.values()} == {1}
    made, formulas = session(net, optimizer), Formulas(optimizer, net.weights)
    for k in range(5):
        feeds = net.batch(k)
        _, gradients = squared_errors(formulas.weights, feeds)
        formulas.step(gradients, 0.125)
        made.run(["loss"], fed(feeds))
        # The only element of a weight may be close to zero, so the tolerance has a minimum.
        assert_close(made.get_state(), formulas.state(), CLOSE_OF_FORMULAS, least=0.1)


def test_a20_a_line() -> None:
    net = regression(features=3, targets=1)
    made = session(net)
    losses = [float(made.run(["loss"], fed(net.batch(rows=64), 0.25))[0]) for _ in range(40)]
    assert len(losses) > 1
    assert np.all(np.isfinite(losses))
    # The noise of a batch has a mean square of 0.01.
    assert losses[-1] < 0.02 < losses[0]


def test_a20_too_fast() -> None:
    net = regression(features=3, targets=1)
    made = session(net)
    losses = [float(made.run(["loss"], fed(net.batch(), 1e6))[0]) for _ in range(10)]
    assert not np.isfinite(losses[-1])
    state = made.get_state()
    assert list(state) == ["W", "b"]
    assert not np.all(np.isfinite(state["W"]))
    made.load_state(net.weights, strict=True)
    assert float(made.run(["loss"], fed(net.batch(), 0.0))[0]) == losses[0]


@pytest.mark.parametrize("make", [lambda: classifier(gain=True), convolutional], ids=["perceptron", "convolution"])
@EACH_OPTIMIZER
def test_networks_learn(make: Callable[[], Net], optimizer: str) -> None:
    net = make()
    made = session(net, optimizer, loss_output_name="loss")
    losses = [float(made.run(["loss"], fed(net.batch(), 0.05))[0]) for _ in range(25)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "net",
    [
        regression(features=12, targets=1, axes=[0], loss_shape=[1]),
        regression(features=12, targets=1, keepdims=1, loss_shape=[1, 1]),
    ],
    ids=["[1]", "[1, 1]"],
)
def test_shapes_of_a_loss(net: Net) -> None:
    plain, made = session(regression(features=12, targets=1)), session(net)
    losses = [each.run(["loss"], fed(net.batch()))[0] for each in (plain, made)]
    assert losses[0] == losses[1].reshape(())
    assert_close(made.get_state(), plain.get_state(), CLOSE)


def test_a_loss_that_is_no_output() -> None:
    net = regression()
    model = copy.deepcopy(net.model)
    del model.graph.output[1]
    made, plain = session(Net(model, net.weights, net.draw)), session(net)
    assert named(made.get_outputs) == ["pred", NORM]
    for k in range(2):
        made.run(["pred"], fed(net.batch(k)))
    steps(plain, net, 2)
    assert bits(made.get_state()) == bits(plain.get_state())


# A21: profiles.


def test_a21_profiles(face: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = regression()
    options = face.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "trace")
    made = session(net, face=face, sess_options=options)
    steps(made, net, 2)
    assert made.get_profiling_start_time_ns() > 0
    path = made.end_profiling()
    assert made.end_profiling() == ""
    assert Path(path).name.startswith("trace_")
    assert [str(found) for found in tmp_path.iterdir()] == [str(Path(path).resolve())]
    events = json.loads(Path(path).read_text())
    assert len(events) > 5
    keys = {"cat", "pid", "tid", "dur", "ts", "ph", "name", "args"}
    assert all(keys <= event.keys() for event in events)
    plain = session(net, face=face)
    assert (plain.end_profiling(), plain.get_profiling_start_time_ns()) == ("", 0)


# A22: selection.


@pytest.mark.parametrize(
    ("properties", "trained"),
    [
        ({}, {"W", "b", "half", "two"}),
        ({"weights_not_to_train": {"b", "half"}}, {"W", "two"}),
        ({"weights_to_train": {"W", "two"}}, {"W", "two"}),
        ({"weights_to_train": {"W", "b"}, "weights_not_to_train": {"b"}}, {"W"}),
        ({"immutable_weights": {"Mul": [(1, 2.0)]}}, {"W", "b", "half"}),
        ({"immutable_weights": {"Mul": [(0, 2.0), (1, 3.0)], "Add": [(1, 2.0)]}}, {"W", "b", "half", "two"}),
        ({"immutable_weights": {"Mul": [(1, 0.5)]}}, {"W", "b", "half", "two"}),
        ({"immutable_weights": {"Mul": [(1, 2.0)]}, "weights_not_to_train": {"W"}}, {"b", "half"}),
    ],
)
def test_a22_selection(properties: Mapping[str, Any], trained: set[str]) -> None:
    net = regression(doubled=True)
    start = {tensor.name: numpy_helper.to_array(tensor) for tensor in net.model.graph.initializer}
    everything = Net(net.model, start, net.draw)
    made = session(everything, **{"weights_to_train": set(), **properties})
    assert set(made.get_state()) == trained
    made.run(["loss"], fed(net.batch(), 0.01))
    for name, value in made.get_state().items():
        assert np.all(value != start[name]), name


# A23: metadata of a session.


def test_a23_metadata() -> None:
    net = listed(regression(doubled=True), "half")
    options = ortrain.SessionOptions()
    options.intra_op_num_threads = 1
    made = session(net, sess_options=options)
    meta = made.get_modelmeta()
    assert (meta.graph_name, meta.custom_metadata_map) == ("graph", {})
    assert made.get_providers() == [PROVIDER]
    assert made.get_provider_options() == {PROVIDER: {}}
    assert made.get_session_options().intra_op_num_threads == 1
    assert [str(value) for value in made.get_overridable_initializers()] == [
        "NodeArg(name='half', type='tensor(float)', shape=[10])"
    ]
    assert named(made.get_inputs) == ["X", "label", RATE]
    feeds = fed(net.batch(), 0.0)
    zeros = made.run(["pred"], feeds | {"half": np.zeros(10, np.float32)})[0]
    assert not np.any(zeros)
    assert np.all(made.run(["pred"], feeds)[0])
    made.disable_fallback()
    made.enable_fallback()


def test_a23_a_weight_that_is_an_input_too() -> None:
    """The weight is trained, and a feed in its place is refused: load_state sets weights."""
    net = listed(regression(), "W")
    made, plain = session(net), session(regression())
    assert named(made.get_overridable_initializers) == []
    assert steps(made, net, 2) == steps(plain, net, 2)
    assert bits(made.get_state()) == bits(plain.get_state())
    with pytest.raises(C.InvalidArgument, match="W"):
        made.run(["loss"], {**fed(net.batch()), "W": net.weights["W"]})


# Run methods.


def in_vectors(trained: TrainingSession, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    given, found = C.OrtValueVector(), C.OrtValueVector()
    for value in feeds.values():
        given.push_back(C.OrtValue.ortvalue_from_numpy(value, cpu_device()))
    names = named(trained.get_outputs)
    devices = [cpu_device() for _ in names]
    trained.run_with_ortvaluevector(ortrain.RunOptions(), list(feeds), given, names, found, devices)
    return [found[k].numpy() for k in range(len(names))]


def in_values(trained: TrainingSession, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    given = {name: ortrain.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    return [value.numpy() for value in trained.run_with_ort_values(None, given)]


def by_native_session(trained: TrainingSession, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    found: list[npt.NDArray[Any]] = trained._sess.run(named(trained.get_outputs), feeds, None)
    return found


WAYS: dict[str, Callable[[TrainingSession, Mapping[str, Any]], list[npt.NDArray[Any]]]] = {
    "values": in_values,
    "vectors": in_vectors,
    "binding": lambda trained, feeds: bound_run(trained, feeds, named(trained.get_outputs)),
    "native": by_native_session,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_running_agree(way: str) -> None:
    net = classifier(gain=True)
    plain, other = session(net, ADAM), session(net, ADAM)
    for k in range(3):
        feeds = fed(net.batch(k))
        expected = plain.run(None, feeds)
        assert [value.tobytes() for value in WAYS[way](other, feeds)] == [value.tobytes() for value in expected]
    assert bits(other.get_state()) == bits(plain.get_state())


def test_sessions_of_the_c_level(tmp_path: Path) -> None:
    net = regression()
    path = tmp_path / "model.onnx"
    path.write_bytes(net.model.SerializeToString())
    read, loaded = C.TrainingSession(), C.TrainingSession(ortrain.SessionOptions())
    result = read.read_bytes(path.read_bytes(), parameters(net, ADAM), [PROVIDER], [{}])
    assert isinstance(result, C.TrainingConfigurationResult)
    assert result.loss_scale_input_name is None
    loaded.load_model(str(path), parameters(net, ADAM), [PROVIDER], [{}])
    with pytest.raises(C.ModelLoaded):
        read.read_bytes(path.read_bytes(), parameters(net, ADAM), [PROVIDER], [{}])
    plain = session(net, ADAM)
    feeds = fed(net.batch())
    expected = plain.run(["loss"], feeds)[0].tobytes()
    assert read.run(["loss"], feeds, None)[0].tobytes() == expected
    values = {name: C.OrtValue.ortvalue_from_numpy(value, cpu_device()) for name, value in feeds.items()}
    assert loaded.run_with_ort_values(values, ["loss"], None)[0].numpy().tobytes() == expected
    for each in (read, loaded):
        assert bits(each.get_state()) == bits(plain.get_state())
        assert each.get_model_state(True).keys() == {"full_precision", "mixed_precision"}
        assert each.get_optimizer_state().keys() == {"W", "b"}
        assert each.get_partition_info_map() == {}
        assert each.is_output_fp32_node("loss") is True
        each.load_state(net.weights, True)
        each.finalize()
        assert [value.name for value in each.inputs_meta] == ["X", "label", RATE]
        assert [value.name for value in each.outputs_meta] == ["pred", "loss", NORM]
        assert each.get_profiling_start_time_ns == 0
    assert C.TrainingConfigurationResult().loss_scale_input_name is None
    assert C.TrainingParameters is TrainingParameters


def test_names_and_errors_of_onnxruntime(tmp_path: Path) -> None:
    net = regression()
    begins = r"^\[ONNXRuntimeError\] : {} : {} : "
    with installed() as onnxruntime:
        for module in (onnxruntime, importlib.import_module("onnxruntime.capi.training")):
            assert module.TrainingSession is TrainingSession
            assert module.TrainingParameters is TrainingParameters
        behind = importlib.import_module("onnxruntime.capi._pybind_state")
        assert behind.TrainingSession is C.TrainingSession
        assert behind.TrainingConfigurationResult is C.TrainingConfigurationResult
        for name in ("IOBinding", "OrtDevice", "GraphOptimizationLevel", "ExecutionMode", "ExecutionOrder"):
            assert hasattr(onnxruntime, name), name
        model = net.model.SerializeToString()
        with pytest.warns(UserWarning, match="TPU"), pytest.raises(RuntimeError, match="TPU"):
            TrainingSession(model, parameters(net), providers=["TPUExecutionProvider"])
        with pytest.raises(behind.NoSuchFile, match=begins.format(3, "NO_SUCHFILE")):
            TrainingSession(str(tmp_path / "nowhere.onnx"), parameters(net))
        with pytest.raises(behind.InvalidProtobuf, match=begins.format(7, "INVALID_PROTOBUF")):
            TrainingSession(b"\xff\xff\xff\xffnot a model", parameters(net))
        with pytest.raises(behind.Fail, match=begins.format(1, "FAIL")):
            session(net, "Adagrad")
        with pytest.raises(behind.InvalidArgument, match=begins.format(2, "INVALID_ARGUMENT")):
            session(net).run(["lost"], fed(net.batch()))


# Bindings that do not fit.


def bind_value(name: str, array: npt.NDArray[Any]) -> Callable[[Any], None]:
    return lambda binding: binding.bind_ortvalue_output(name, ortrain.OrtValue.ortvalue_from_numpy(array))


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


PRED = np.zeros((12, 10), np.float32)
UNFIT_OUTPUTS: dict[str, Callable[[Any], None]] = {
    "too small": bind_value("pred", np.zeros((11, 10), np.float32)),
    "too large": bind_value("pred", np.zeros((13, 10), np.float32)),
    "another shape": bind_value("pred", np.zeros((10, 12), np.float32)),
    "another type": bind_value("pred", np.zeros((12, 10), np.float64)),
    "another type of the same size": bind_value("pred", np.zeros((12, 10), np.int32)),
    "read-only": bind_value("pred", read_only(np.zeros((12, 10), np.float32))),
    "unknown": lambda binding: binding.bind_output("lost"),
    "too small at an address": lambda binding: binding.bind_output(
        "pred", "cpu", 0, np.float32, [3, 10], PRED.ctypes.data
    ),
    "an address alone": lambda binding: binding.bind_output("pred", buffer_ptr=PRED.ctypes.data),
}


@pytest.mark.parametrize("case", UNFIT_OUTPUTS)
def test_bindings_of_outputs_that_do_not_fit(case: str) -> None:
    net = regression()
    made = session(net, ADAM)
    before, binding = bits(made.get_state()), made.io_binding()
    for name, value in fed(net.batch()).items():
        binding.bind_cpu_input(name, value)

    def run() -> None:
        UNFIT_OUTPUTS[case](binding)
        made.run_with_iobinding(binding)

    with pytest.raises(ValueError if case == "an address alone" else RuntimeError):
        run()
    assert bits(made.get_state()) == before
    assert not np.any(PRED)


def test_an_error_about_an_output_has_its_name_and_shape() -> None:
    net = regression()
    made = session(net)
    binding = made.io_binding()
    for name, value in fed(net.batch()).items():
        binding.bind_cpu_input(name, value)
    bind_value("pred", np.zeros((11, 10), np.float32))(binding)
    with pytest.raises(InvalidArgumentError) as caught:
        made.run_with_iobinding(binding)
    assert (caught.value.output, caught.value.shape) == ("pred", (12, 10))
    assert str(caught.value) == 'output "pred" is float32[12, 10], but its buffer is float32[11, 10]'
    with pytest.raises(InvalidArgumentError) as caught:
        made.run(["lost"], fed(net.batch()))
    assert (caught.value.output, caught.value.shape) == (None, None)


def test_error_names_infinite_bounds() -> None:
    net = classifier()
    with pytest.raises(InvalidArgumentError) as caught:
        session(net, LAMB, floats={"fc1.w": {"ratio_min": 0.5}})
    assert str(caught.value) == (
        'ratio_min of LambOptimizer must be the same for all weights, but it is -inf for one and 0.5 for "fc1.w"'
    )


UNFIT_INPUTS: dict[str, tuple[str, npt.NDArray[Any]]] = {
    "unknown": ("lost", PRED),
    "another type": ("X", np.zeros((12, 12), np.float64)),
    "another type of the same size": ("X", np.zeros((12, 12), np.int32)),
    "another size": ("X", np.zeros((12, 11), np.float32)),
    "another rank": ("X", np.zeros(144, np.float32)),
    "two rates": (RATE, np.zeros(2, np.float32)),
    "an infinite rate": (RATE, np.full(1, np.inf, np.float32)),
}


@pytest.mark.parametrize("case", UNFIT_INPUTS)
def test_bindings_of_inputs_that_do_not_fit(case: str) -> None:
    net = regression()
    made = session(net, ADAM)
    before, binding = bits(made.get_state()), made.io_binding()
    binding.bind_output("loss")
    for name, value in fed(net.batch()).items():
        binding.bind_cpu_input(name, value)
    name, value = UNFIT_INPUTS[case]

    def run() -> None:
        binding.bind_cpu_input(name, value)
        # Binding an unknown name is an error at once.
        if name != "lost":
            made.run_with_iobinding(binding)

    with pytest.raises(RuntimeError, match=name):
        run()
    assert bits(made.get_state()) == before


def test_bindings_without_an_input() -> None:
    net = regression()
    made = session(net, ADAM)
    before, binding = bits(made.get_state()), made.io_binding()
    binding.bind_output("loss")
    binding.bind_cpu_input("X", net.batch()["X"])
    with pytest.raises((RuntimeError, ValueError), match="label"):
        made.run_with_iobinding(binding)
    for name, value in fed(net.batch()).items():
        binding.bind_cpu_input(name, value)
    binding.clear_binding_inputs()
    with pytest.raises((RuntimeError, ValueError), match="X"):
        made.run_with_iobinding(binding)
    assert bits(made.get_state()) == before


def test_bindings_use_the_memory_of_the_caller() -> None:
    net = regression()
    made, plain = session(net, ADAM), session(net, ADAM)
    room, loss = np.zeros((12, 10), np.float32), np.zeros((), np.float32)
    feeds = fed(net.batch())
    binding = made.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("pred", "cpu", 0, np.float32, room.shape, room.ctypes.data)
    binding.bind_ortvalue_output("loss", ortrain.OrtValue.ortvalue_from_numpy(loss))
    for k in range(3):
        # The next run reads new values that are written to a bound input.
        feeds["X"][...] = net.batch(k)["X"]
        expected = plain.run(["pred", "loss"], feeds)
        made.run_with_iobinding(binding)
        assert [room.tobytes(), loss.tobytes()] == [value.tobytes() for value in expected]
    assert [value.data_ptr() for value in binding.get_outputs()] == [room.ctypes.data, loss.ctypes.data]
    assert bits(made.get_state()) == bits(plain.get_state())


def test_bindings_are_replaced() -> None:
    """A later binding of the same name replaces the earlier one. Inputs are bound by their address, too."""
    net = regression()
    made, plain = session(net), session(net)
    feeds, binding = fed(net.batch()), made.io_binding()
    rooms = [np.zeros((12, 10), np.float32) for _ in range(2)]
    for name, value in feeds.items():
        binding.bind_cpu_input(name, np.zeros_like(value))
        binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
    for room in rooms:
        binding.bind_output("pred", "cpu", 0, np.float32, room.shape, room.ctypes.data)
    expected = plain.run(["pred", "loss"], feeds)
    made.run_with_iobinding(binding)
    assert rooms[1].tobytes() == expected[0].tobytes()
    assert not np.any(rooms[0])
    assert [value.tobytes() for value in binding.copy_outputs_to_cpu()] == [rooms[1].tobytes()]
    assert bits(made.get_state()) == bits(plain.get_state())
    binding.clear_binding_outputs()
    binding.bind_output("loss")
    made.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tobytes() == plain.run(["loss"], feeds)[0].tobytes()
    assert binding.get_outputs_as_ortvaluevector()[0].shape() == []
    assert rooms[1].tobytes() == expected[0].tobytes(), "the old binding has no effect"


def test_bindings_keep_arrays_alive() -> None:
    """A binding keeps its arrays alive, also without other references to them."""
    net = regression()
    made, plain = session(net, ADAM), session(net, ADAM)
    binding = made.io_binding()
    for name, value in fed(net.batch()).items():
        binding.bind_cpu_input(name, value.copy())
    binding.bind_ortvalue_output("pred", ortrain.OrtValue.ortvalue_from_numpy(np.zeros((12, 10), np.float32)))
    gc.collect()
    others = [np.full((12, 12), 1e9, np.float32) for _ in range(50)]
    made.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tobytes() == plain.run(["pred"], fed(net.batch()))[0].tobytes()
    assert bits(made.get_state()) == bits(plain.get_state())
    assert all(np.all(other == 1e9) for other in others)


# Accumulation.


def accumulate(trained: TrainingSession, feeds: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Accumulate gradients without an update, and return the loss."""
    loss, gathered = trained.run(["loss", ACCUMULATED], fed(feeds), restricted())
    assert gathered.dtype == np.bool_
    assert np.all(gathered)
    return loss


@pytest.mark.parametrize("count", [1, 3, 4])
@EACH_OPTIMIZER
def test_parts_of_a_batch_are_the_batch(optimizer: str, count: int) -> None:
    """Accumulating parts of a batch equals one step on the batch, also with evaluations between the parts."""
    net = classifier(gain=True)
    # A large epsilon: without one, the steps of Adam and LAMB hardly depend on the size of the gradient.
    attributes = common(net, {"epsilon": 0.01, "lambda": 0.125})
    whole = session(net, optimizer, floats=attributes)
    apart, disturbed = (session(net, optimizer, floats=attributes, gradient_accumulation_steps=count) for _ in range(2))
    for k in range(3):
        feeds = net.batch(k)
        norm = whole.run([NORM], fed(feeds))[0]
        parts = [{name: value[j::count] for name, value in feeds.items()} for j in range(count)]
        for each in (apart, disturbed):
            before = bits(each.get_state())
            for j, part in enumerate(parts[:-1]):
                accumulate(each, part)
                if each is disturbed:
                    for names in (["loss"], ["fc2", "loss"]):
                        each.run(names, fed(net.batch(10 + j)), restricted())
            assert bits(each.get_state()) == before
            found = each.run([NORM], fed(parts[-1]))[0]
            np.testing.assert_allclose(found, norm, rtol=CLOSE)
        # A moment of ``gain`` has one element, which may be close to zero.
        assert_close(apart.get_state(), whole.get_state(), CLOSE, k, least=0.05)
        assert bits(disturbed.get_state()) == bits(apart.get_state())


@pytest.mark.parametrize("window", [2, 3, 5, 7])
def test_the_mean_of_a_window_is_exact(window: int) -> None:
    """The mean is the sum of the gradients divided by their number, rounded once."""
    weights = {"w": np.zeros((20, 50), np.float32), "v": np.zeros(1, np.float32)}
    net = prescribing(weights)
    made = session(net, SGD, gradient_accumulation_steps=window)
    rng = np.random.default_rng(window)
    # Multiples of 1/64 below 1024, so that their sums are exact.
    batches = [
        {n: rng.integers(-65536, 65536, w.shape) / np.float32(64) for n, w in weights.items()} for _ in range(window)
    ]
    batches = [{name: g.astype(np.float32) for name, g in gradients.items()} for gradients in batches]
    for gradients in batches[:-1]:
        accumulate(made, prescribed(gradients))
    made.run(["loss"], fed(prescribed(batches[-1]), 1.0))
    sums = {name: np.sum([gradients[name] for gradients in batches], axis=0, dtype=np.float32) for name in weights}
    for name, value in made.get_state().items():
        np.testing.assert_array_equal(-value, sums[name] / np.float32(window), name)


def test_windows_that_are_not_full() -> None:
    """An unrestricted run updates by the accumulated gradients divided by the window size, and starts a new window."""
    net = regression()
    made = session(net, SGD, gradient_accumulation_steps=4)
    formulas = Formulas(SGD, net.weights)
    for count in (1, 3, 6):
        total = {name: np.zeros(w.shape) for name, w in net.weights.items()}
        for k in range(count):
            feeds = net.batch(k)
            for name, g in squared_errors(formulas.weights, feeds)[1].items():
                total[name] += g / 4
            if k + 1 < count:
                accumulate(made, feeds)
            else:
                made.run(["loss"], fed(feeds))
        formulas.step(total, 0.125)
        assert_close(made.get_state(), formulas.state(), CLOSE_OF_FORMULAS)


def test_gradients_are_fetched_in_a_window() -> None:
    """The fetched gradients belong to the run alone; a run restricted to them does not accumulate."""
    net = regression()
    given = {"gradient_accumulation_steps": 2, "set_gradients_as_graph_outputs": True}
    fetching, plain = (session(net, ADAM, **given) for _ in range(2))
    expected = session(net, "", set_gradients_as_graph_outputs=True).run(["W_grad"], net.batch(1))[0]
    for each in (fetching, plain):
        accumulate(each, net.batch(0))
        if each is fetching:
            found = each.run(["W_grad"], fed(net.batch(1)), restricted())[0]
            np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=CLOSE)
        each.run(["loss"], fed(net.batch(2)))
    assert bits(fetching.get_state()) == bits(plain.get_state())


def test_a_failure_in_a_window_changes_nothing() -> None:
    net = classifier()
    failing, plain = (session(net, ADAM, gradient_accumulation_steps=3) for _ in range(2))
    for k in range(3):
        for each in (failing, plain):
            if each is failing:
                wrong = net.batch(20 + k) | {"labels": LABEL + 10}
                for options in (restricted(), None):
                    with pytest.raises(RuntimeError, match="10"):
                        each.run(["loss", ACCUMULATED], fed(wrong), options)
            if k < 2:
                accumulate(each, net.batch(k))
            else:
                each.run(["loss"], fed(net.batch(k)))
    assert bits(failing.get_state()) == bits(plain.get_state())


def test_loading_a_state_in_a_window() -> None:
    """A state has no accumulated gradients, so loading one keeps the present ones."""
    net = regression()
    made, plain = (session(net, ADAM, gradient_accumulation_steps=2) for _ in range(2))
    for each in (made, plain):
        accumulate(each, net.batch(0))
        if each is made:
            made.load_state(made.get_state(), strict=True)
        each.run(["loss"], fed(net.batch(1)))
    assert bits(made.get_state()) == bits(plain.get_state())


@EACH_OPTIMIZER
def test_gathered_gradients_of_float64(optimizer: str) -> None:
    net = regression(dtype=np.float64)
    whole, apart = session(net, optimizer), session(net, optimizer, gradient_accumulation_steps=3)
    feeds = net.batch()
    whole.run(["loss"], fed(feeds))
    parts = [{name: value[j::3] for name, value in feeds.items()} for j in range(3)]
    for part in parts[:-1]:
        accumulate(apart, part)
    apart.run(["loss"], fed(parts[-1]))
    assert_close(apart.get_state(), whole.get_state(), CLOSE)


# Threads.


@EACH_OPTIMIZER
def test_threads_take_turns(optimizer: str) -> None:
    """Two threads train as one does; concurrent evaluations and states never see half of a step."""
    net = classifier(gain=True)
    made, plain = session(net, optimizer), session(net, optimizer)
    feeds, count = fed(net.batch()), 15
    losses = [float(plain.run(["loss"], feeds)[0]) for _ in range(2 * count)]
    seen: list[float] = []

    def work() -> None:
        for _ in range(count):
            seen.append(float(made.run(["loss"], feeds)[0]))
            made.get_state()
            assert np.isfinite(made.run(["loss"], feeds, restricted())[0])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(2)]:
            done.result()
    assert sorted(seen) == sorted(losses)
    assert bits(made.get_state()) == bits(plain.get_state())
