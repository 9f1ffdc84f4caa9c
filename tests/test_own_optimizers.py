"""The user's own optimizers: Python functions, ONNX functions, optimizer models, and their errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper
from optimizer_formulas import SMALL_SHAPES, gradient_pool, prescribing_model, starting_weights

import ortrain
from ortrain import InvalidArgumentError, InvalidModelError, OrtrainError, optim
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.schedules import Cosine, LRScheduler, Warmup

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]
# A formula of one parameter, for symbolic values or arrays.
Formula: TypeAlias = Callable[..., Any]

STEPS = 10
# Tolerance relative to the largest element. Weights and slots are float32: each step rounds an element by up to half a
# unit, which is 6e-8 of the element. 10 roundings add up to less than this tolerance.
CLOSE = 1e-6
# Tolerance of float64 weights, which have a unit of 2e-16.
EXACT = 1e-12
# One and a half units of float16. Ortrain and the formulas may round a value between two float16 numbers differently.
HALF_CLOSE = 1.5 * 2.0**-10
OPSET = 17
WEIGHTS = starting_weights(SMALL_SHAPES)
POOL = gradient_pool(WEIGHTS)


# Trainings.


class Ours:
    """A training by ortrain, of a model that reads its gradients as inputs."""

    def __init__(
        self,
        folder: Path,
        optimizer: optim.OptimizerConfig | ModelProto,
        weights: Arrays = WEIGHTS,
        checkpoint: str = "checkpoint",
    ) -> None:
        self.folder, self.weights, self.source = folder, weights, optimizer
        if checkpoint == "checkpoint":
            config = None if isinstance(optimizer, ModelProto) else optimizer
            folder.mkdir(exist_ok=True)
            ortrain.generate_artifacts(
                prescribing_model(weights), requires_grad=list(weights), optimizer=config, artifact_directory=folder
            )
        self.state = CheckpointState.load_checkpoint(folder / checkpoint)
        self.module = Module(folder / "training_model.onnx", self.state)
        model = optimizer if isinstance(optimizer, ModelProto) else folder / "optimizer_model.onnx"
        self.optimizer = Optimizer(model, self.module)

    def step(self, *gathered: Arrays) -> float | None:
        """Take a step with accumulated gradients; returns the gradient norm."""
        for gradients in gathered:
            self.module(*(gradients[name.removeprefix("x_")] for name in self.module.input_names()))
        norm = self.optimizer.step()
        self.module.lazy_reset_grad()
        return norm

    def values(self, name: str) -> dict[str, Array]:
        """Return copies of a parameter's weights and slots."""
        parameter = self.state.parameters[name]
        return {"weights": parameter.data.copy()} | {slot: np.array(v) for slot, v in parameter.slots.items()}

    def all_values(self) -> dict[str, dict[str, Array]]:
        return {name: self.values(name) for name in self.weights}

    def bits(self) -> dict[str, dict[str, bytes]]:
        """Return the bytes of everything that an optimizer changes."""
        return {name: {key: v.tobytes() for key, v in of.items()} for name, of in self.all_values().items()}

    def later(self) -> Ours:
        """Return the same training, continued from a checkpoint."""
        CheckpointState.save_checkpoint(self.state, self.folder / "later", include_optimizer_state=True)
        return Ours(self.folder, self.source, self.weights, "later")


@dataclass
class Theirs:
    """A training of one parameter by a formula over float64 arrays."""

    formula: Formula
    parameter: Array
    rate: float
    settings: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Half a unit of float16 exceeds a step, so float16 weights are rounded here as in ortrain.
        self.storage = self.parameter.dtype if self.parameter.dtype == np.float16 else np.float64
        self.parameter = np.float64(self.parameter)
        arguments = inspect.signature(self.formula).parameters.values()
        given = {argument.name: argument.default for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
        # The learning rate is an input of the optimizer model, in float32.
        numbers = {"rate": float(np.float32(self.rate))}
        self.numbers = {name: (given | numbers | dict(self.settings))[name] for name in given}
        slots = [argument.name for argument in arguments if argument.kind is not argument.KEYWORD_ONLY][2:]
        self.slots = {name: self.started(self.starts.get(name)) for name in slots}
        self.steps = 0

    def started(self, start: str | None) -> Array:
        if start == "parameter":
            return np.array(self.parameter)
        value = {None: 0.0, "zero": 0.0, "one": 1.0}.get(start)
        return np.full(self.parameter.shape, self.numbers[str(start)] if value is None else value)

    def step(self, gradient: Array) -> None:
        self.steps += 1
        if "step" in self.numbers:
            self.numbers["step"] = float(self.steps)
        found = self.formula(self.parameter, np.float64(gradient), *self.slots.values(), **self.numbers)
        new, *kept = found if isinstance(found, tuple) else (found,)
        self.parameter = new.astype(self.storage).astype(np.float64)
        self.slots = {name: np.asarray(value, np.float64) for name, value in zip(self.slots, kept, strict=True)}

    def values(self) -> dict[str, Array]:
        return {"weights": self.parameter, **self.slots}


def assert_close(found: Mapping[str, Arrays], wanted: Mapping[str, Arrays], tolerance: float = CLOSE) -> None:
    """Compare weights and slots of parameters, each relative to the largest element of all parameters."""
    assert set(found) == set(wanted)
    for key in next(iter(wanted.values())):
        largest = max(float(np.abs(values[key]).max()) for values in wanted.values())
        for name, values in found.items():
            assert set(values) == set(wanted[name])
            assert values[key].shape == wanted[name][key].shape
            apart = float(np.abs(np.float64(values[key]) - wanted[name][key]).max())
            assert apart <= tolerance * largest, f"{key} of {name}: {apart:.2e} beside {largest:.2e}"


def both(
    ours: Ours,
    formula: Formula,
    rate: float,
    *,
    settings: Mapping[str, float] | None = None,
    of_groups: Mapping[str, Mapping[str, float]] | None = None,
    starts: Mapping[str, str] | None = None,
    tolerance: float = CLOSE,
) -> dict[str, Theirs]:
    """Train by ortrain and by a formula over arrays, and compare the two."""
    theirs = {
        name: Theirs(formula, w, rate, dict(settings or {}) | dict((of_groups or {}).get(name, {})), starts or {})
        for name, w in ours.weights.items()
    }
    for gradients in POOL[:STEPS]:
        typed = {name: gradients[name].astype(ours.weights[name].dtype) for name in ours.weights}
        ours.step(typed)
        for name, one in theirs.items():
            one.step(typed[name])
    assert_close(ours.all_values(), {name: one.values() for name, one in theirs.items()}, tolerance)
    assert all(np.any(one.parameter != ours.weights[name]) for name, one in theirs.items())
    return theirs


# Python functions.


def lion(
    parameter: Any,
    gradient: Any,
    momentum0: Any,
    *,
    rate: Any,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
) -> Any:
    """Move by signs of mixtures of momentum and gradient."""
    direction = np.sign(beta1 * momentum0 + (1 - beta1) * gradient)
    momentum0 = beta2 * momentum0 + (1 - beta2) * gradient
    return parameter - rate * (direction + weight_decay * parameter), momentum0


OwnLion = optim.register(lion, lr=1e-4)


def test_a_function_trains_like_the_row_of_the_table(tmp_path: Path) -> None:
    max_norm = 4.7
    options: dict[str, Any] = {
        "max_norm": max_norm,
        "max_norm_per_tensor": 15.0,
        "max_value": 0.5,
        "ema_decay": 0.7,
        "accumulation": "mean",
        "groups": [
            {"params": ["o*", "row"], "weight_decay": 0.1, "lr_factor": 0.5},
            {"params": "seven", "beta1": 0.8, "lr": 0.01, "frozen_steps": 3},
        ],
    }
    own = OwnLion(lr=0.01, weight_decay=0.3, **options)
    table = optim.Lion(lr=0.01, weight_decay=0.3, **options)
    trained = [Ours(tmp_path / "own", own), Ours(tmp_path / "table", table)]
    schedulers = [LRScheduler(ours.optimizer, Warmup(5, Cosine(total=60))) for ours in trained]
    norms: list[float] = []
    for t in range(STEPS):
        found = [ours.step(*POOL[2 * t : 2 * t + 2]) for ours in trained]
        for scheduler in schedulers:
            scheduler.step()
        assert found[0] == pytest.approx(found[1], rel=CLOSE)
        norms.append(found[0] or 0.0)
    assert min(norms) < max_norm < max(norms)
    assert_close(trained[0].all_values(), trained[1].all_values())
    assert set(trained[0].values("row")) == {"weights", "momentum0", "ema"}
    averages = [{name: {"ema": ours.state.parameters[name].average} for name in WEIGHTS} for ours in trained]
    assert_close(averages[0], averages[1])


def test_the_class_of_a_function() -> None:
    assert issubclass(OwnLion, optim.OwnOptimizer)
    assert OwnLion.__name__ == "lion"
    assert OwnLion.__doc__ == lion.__doc__
    assert OwnLion.__module__ == __name__
    names = list(inspect.signature(OwnLion).parameters)
    assert names[:4] == ["lr", "beta1", "beta2", "weight_decay"]
    assert "groups" in names
    config = OwnLion(weight_decay=0.1, groups=[{"params": "*.bias", "weight_decay": 0}])
    assert repr(config) == "lion(lr=0.0001, weight_decay=0.1, 1 group)"
    assert config.settings == {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    assert config.slots == ["momentum0"]
    assert OwnLion(0.5).lr == 0.5


def test_settings_of_groups_can_change(tmp_path: Path) -> None:
    config = OwnLion(lr=0.01, weight_decay=0.3, groups=[{"params": "row", "weight_decay": 0.1}])
    same = optim.Lion(lr=0.01, weight_decay=0.3, groups=[{"params": "row", "weight_decay": 0.1}])
    ours, table = Ours(tmp_path / "own", config), Ours(tmp_path / "table", same)
    for each in (ours, table):
        each.step(POOL[0])
        group, rest = each.optimizer.groups
        assert (group.weight_decay, rest.weight_decay) == (0.1, 0.3)
        group.weight_decay, rest.beta1 = 2.0, 0.5
        each.step(POOL[1])
    assert_close(ours.all_values(), table.all_values())


def adam(
    parameter: Any,
    gradient: Any,
    first: Any,
    second: Any,
    *,
    rate: Any,
    step: Any,
    beta1: float = 0.9,
    beta2: float = 0.97,
    eps: float = 0.1,
) -> Any:
    """Use powers of the step, a square and a root."""
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * np.square(gradient)
    root = np.sqrt(second / (1 - beta2**step)) + eps
    return parameter - rate * (first / (1 - beta1**step)) / root, first, second


def curves(parameter: Any, gradient: Any, *, rate: Any, scale: float = 0.5) -> Any:
    """Use the sign, both spellings of the absolute value, the exponential and the logarithm."""
    grown = np.sign(gradient) * np.log(1 + np.abs(gradient)) * np.exp(-scale * abs(parameter))
    return parameter - rate * grown


def bounds(parameter: Any, gradient: Any, largest: Any, *, rate: Any, most: float = 0.75) -> Any:
    """Use minimum and maximum of elements, numbers and constants, in both orders."""
    bounded = np.maximum(-most, np.minimum(gradient, most))
    largest = np.maximum(0.9 * largest, np.abs(gradient))
    return np.minimum(parameter - rate * bounded / np.maximum(largest, 1e-3), 3.0), largest


def choices(parameter: Any, gradient: Any, low: Any, *, rate: Any, limit: float = 0.5) -> Any:
    """Use choices by each comparison, and comparisons as numbers."""
    clipped = np.where(gradient > limit, limit, np.where(gradient < -limit, -limit, gradient))
    steady = np.where(gradient >= 0.25, 2.0, 1.0) * np.where(gradient <= -0.25, 0.5, 1.0)
    low = low + np.where(gradient == 0, 1.0, 0.0) + (gradient != 0) * 0.25
    return parameter - rate * clipped * steady * (limit < np.abs(gradient)), low


def lengths(parameter: Any, gradient: Any, *, rate: Any, eps: float = 1e-3) -> Any:
    """Use norms and sums over a parameter."""
    trust = np.linalg.norm(parameter) / (np.linalg.norm(gradient) + eps)
    centred = gradient - 0.01 * np.sum(gradient) + 0.001 * np.sum(gradient > 0)
    return parameter - rate * np.where(np.linalg.norm(parameter) > 0, trust, 1.0) * centred


def reflected(parameter: Any, gradient: Any, *, rate: Any, base: float = 1.5) -> Any:
    """Use operators with a Python or NumPy number on the left."""
    damped = 1 / (2 + np.square(gradient)) + (3 - gradient) * np.float64(0.25) - np.float32(0.5) * gradient
    return -(-parameter + rate * (damped + 2**gradient + base ** (-abs(gradient))) * np.float64(0.125))


def numbers(parameter: Any, gradient: Any, *, rate: Any, step: Any, total: float = 8.0) -> Any:
    """Use functions of a step's numbers only."""
    share = np.minimum(1.0, step / total) * np.sqrt(1 - 0.9**step) * np.exp(-0.1 * step)
    slow = np.where(step <= 3, 0.5, 1.0) + 0.25 * (step == 5) + np.log(step) / (1 + abs(total - step))
    return parameter - rate * share * slow * gradient


def from_starts(parameter: Any, gradient: Any, z: Any, ones: Any, sums: Any, *, rate: Any, initial: float = 0.1) -> Any:
    """Use slots that start as the parameter, as one and as a setting."""
    sums = sums + gradient**2
    z = z - rate * gradient / np.sqrt(sums)
    ones = 0.9 * ones
    return 0.5 * parameter + 0.5 * z * (1 - 0.01 * ones), z, ones, sums


def nested(parameter: Any, gradient: Any, before: Any, *, rate: Any) -> Any:
    """Use nested sums, and a slot that is the parameter before the step."""
    centred = gradient - 0.01 * np.sum(gradient)
    direction = centred / np.linalg.norm(centred)
    new = parameter - rate * direction * np.linalg.norm(parameter + np.sum(direction)) + 1e-3 * before
    return new, parameter


def no_rate(parameter: Any, gradient: Any) -> Any:
    """Use no settings, and one value several times."""
    step = gradient * 0.125
    return parameter - step * step * step


STARTS = {"z": "parameter", "ones": "one", "sums": "initial"}
FORMULAS: dict[str, tuple[Formula, dict[str, str]]] = {
    formula.__name__: (formula, STARTS if formula is from_starts else {})
    for formula in (adam, curves, bounds, choices, lengths, reflected, numbers, from_starts, nested, no_rate)
}
EACH = pytest.mark.parametrize(("formula", "starts"), FORMULAS.values(), ids=list(FORMULAS))


@EACH
def test_formulas(formula: Formula, starts: dict[str, str], tmp_path: Path) -> None:
    kind = optim.register(formula, starts=starts)
    both(Ours(tmp_path, kind(lr=0.05)), formula, 0.05, starts=starts)


@EACH
def test_formulas_in_float64(formula: Formula, starts: dict[str, str], tmp_path: Path) -> None:
    kind = optim.register(formula, starts=starts)
    weights = {name: w.astype(np.float64) for name, w in WEIGHTS.items()}
    ours = Ours(tmp_path, kind(lr=0.05), weights)
    both(ours, formula, 0.05, starts=starts, tolerance=EXACT)
    assert {values.dtype for of in ours.all_values().values() for values in of.values()} == {np.dtype(np.float64)}


# This test trains float16 weights deliberately, so the warning is ignored.
@pytest.mark.filterwarnings("ignore:.*float16:ortrain.TrainingWarning")
@EACH
def test_formulas_in_float16(formula: Formula, starts: dict[str, str], tmp_path: Path) -> None:
    """Slots are float32; ortrain and the formula round the new weights to float16 once."""
    kind = optim.register(formula, starts=starts)
    weights = {name: w.astype(np.float16) for name, w in WEIGHTS.items()}
    ours = Ours(tmp_path, kind(lr=0.05), weights)
    both(ours, formula, 0.05, starts=starts, tolerance=HALF_CLOSE)
    for of in ours.all_values().values():
        assert of.pop("weights").dtype == np.float16
        assert {values.dtype for values in of.values()} <= {np.dtype(np.float32)}


# This test trains float16 weights deliberately, so the warning is ignored.
@pytest.mark.filterwarnings("ignore:.*float16:ortrain.TrainingWarning")
def test_weights_of_several_types(tmp_path: Path) -> None:
    kinds = {"one": np.float64, "row": np.float16}
    weights = {name: w.astype(kinds.get(name, np.float32)) for name, w in WEIGHTS.items()}
    both(Ours(tmp_path, optim.register(adam)(lr=0.05), weights), adam, 0.05, tolerance=HALF_CLOSE)


def test_starts_at_the_setting_of_a_group(tmp_path: Path) -> None:
    kind = optim.register(from_starts, starts=STARTS)
    ours = Ours(tmp_path, kind(lr=0.05, initial=0.3, groups=[{"params": "row", "initial": 2.0}]))
    both(ours, from_starts, 0.05, settings={"initial": 0.3}, of_groups={"row": {"initial": 2.0}}, starts=STARTS)


def descent(parameter: Any, gradient: Any, *, rate: Any) -> Any:
    return parameter - rate * gradient


def fast(parameter: Any, gradient: Any, velocity: Any, *, rate: Any) -> Any:
    velocity = 0.5 * velocity + gradient
    return parameter - rate * velocity, velocity


def test_decorators(tmp_path: Path) -> None:
    """The decorator works with and without arguments."""
    plain, faster = optim.register(descent), optim.register(lr=0.25, starts={"velocity": "one"})(fast)
    assert (plain().lr, faster().lr) == (1e-3, 0.25)
    both(Ours(tmp_path / "plain", plain()), descent, 1e-3)
    both(Ours(tmp_path / "fast", faster()), fast, 0.25, starts={"velocity": "one"})


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    kind = optim.register(from_starts, starts=STARTS)
    whole = Ours(tmp_path, kind(lr=0.05, max_norm=20.0, ema_decay=0.7, groups=[{"params": "row", "initial": 2.0}]))
    for gradients in POOL[:4]:
        whole.step(gradients)
    group: Any = whole.optimizer.groups[0]
    group.lr = 0.01
    again = whole.later()
    assert again.bits() == whole.bits()
    assert again.optimizer.step_count == 4
    for gradients in POOL[4:8]:
        assert again.step(gradients) == whole.step(gradients)
    assert again.bits() == whole.bits()


# Functions of ONNX.

ONE = helper.make_tensor("one", TensorProto.DOUBLE, [], [1.0])


def function(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    nodes: Sequence[NodeProto],
    *,
    attributes: Sequence[str] = (),
    opset: int = OPSET,
    domain: str = "own",
) -> FunctionProto:
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function(domain, name, inputs, outputs, nodes, imports, attributes=list(attributes))


def averaged(parameter: Any, gradient: Any, momentum: Any, *, rate: Any, decay: float = 0.9) -> Any:
    """Compute the formula of the two functions below."""
    momentum = decay * momentum + (1 - decay) * gradient
    return parameter - rate * momentum, momentum


def averaged_in_elements() -> FunctionProto:
    """Return the formula as a function; settings have the element type."""
    nodes = [
        helper.make_node("Mul", ["decay", "momentum"], ["old"]),
        helper.make_node("Constant", [], ["one.double"], value=ONE),
        helper.make_node("CastLike", ["one.double", "decay"], ["one"]),
        helper.make_node("Sub", ["one", "decay"], ["share"]),
        helper.make_node("Mul", ["share", "gradient"], ["more"]),
        helper.make_node("Add", ["old", "more"], ["new_momentum"]),
        helper.make_node("Mul", ["rate", "new_momentum"], ["step_of_it"]),
        helper.make_node("Sub", ["parameter", "step_of_it"], ["new_parameter"]),
    ]
    inputs = ["parameter", "gradient", "momentum", "decay", "rate"]
    return function("Averaged", inputs, ["new_parameter", "new_momentum"], nodes)


def averaged_in_float64() -> FunctionProto:
    """Return the formula as a function with float64 settings; the share is computed with a float64 constant."""
    to = AttributeProto(name="to", type=AttributeProto.INT, ref_attr_name="element_type")

    def cast(source: str, output: str) -> NodeProto:
        node = helper.make_node("Cast", [source], [output])
        node.attribute.append(to)
        return node

    nodes = [
        helper.make_node("Constant", [], ["one"], value=ONE),
        helper.make_node("Sub", ["one", "decay"], ["share.double"]),
        cast("share.double", "share"),
        cast("decay", "kept"),
        cast("rate", "rate.element"),
        helper.make_node("Mul", ["kept", "momentum"], ["old"]),
        helper.make_node("Mul", ["share", "gradient"], ["more"]),
        helper.make_node("Add", ["old", "more"], ["new_momentum"]),
        helper.make_node("Mul", ["rate.element", "new_momentum"], ["step_of_it"]),
        helper.make_node("Sub", ["parameter", "step_of_it"], ["new_parameter"]),
    ]
    inputs = ["rate", "decay", "momentum", "gradient", "parameter"]
    outputs = ["new_parameter", "new_momentum"]
    return function("Averaged", inputs, outputs, nodes, attributes=["element_type"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("formula", [averaged_in_elements, averaged_in_float64])
def test_functions_of_onnx(formula: Callable[[], FunctionProto], dtype: str, tmp_path: Path) -> None:
    kind = optim.register(formula(), lr=0.05, settings={"decay": 0.9})
    assert kind.__name__ == "Averaged"
    assert (kind().lr, kind().settings, kind().slots) == (0.05, {"decay": 0.9}, ["momentum"])
    weights = {name: w.astype(dtype) for name, w in WEIGHTS.items()}
    ours = Ours(tmp_path, kind(decay=0.8, groups=[{"params": "row", "decay": 0.25}]), weights)
    tolerance = EXACT if dtype == "float64" else CLOSE
    both(ours, averaged, 0.05, settings={"decay": 0.8}, of_groups={"row": {"decay": 0.25}}, tolerance=tolerance)


def test_a_function_with_options(tmp_path: Path) -> None:
    """ONNX functions with options train like the Python function of the same formula."""
    options: dict[str, Any] = {"max_norm": 15.0, "max_value": 0.5, "ema_decay": 0.7, "accumulation": "mean"}
    kinds = [
        optim.register(averaged_in_elements(), settings={"decay": 0.9}),
        optim.register(averaged_in_float64(), settings={"decay": 0.9}),
        optim.register(averaged),
    ]
    trained = [Ours(tmp_path / str(k), kind(lr=0.05, **options)) for k, kind in enumerate(kinds)]
    for t in range(STEPS):
        norms = [ours.step(*POOL[t : t + 2]) for ours in trained]
        assert norms == [pytest.approx(norms[0], rel=CLOSE)] * 3
    assert "ema" in trained[0].values("row")
    for ours in trained[1:]:
        assert_close(ours.all_values(), trained[0].all_values())


def centred(parameter: Any, gradient: Any, velocity: Any, *, rate: Any, decay: float = 0.9) -> Any:
    """Subtract the mean over the last axis from the gradient."""
    velocity = decay * velocity + gradient - gradient.mean(axis=-1, keepdims=True)
    return parameter - rate * velocity, velocity


def centred_function(opset: int) -> FunctionProto:
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [-1])
    if opset < 18:
        mean = [helper.make_node("ReduceMean", ["gradient"], ["mean"], axes=[-1], keepdims=1)]
    else:
        mean = [
            helper.make_node("Constant", [], ["axis"], value=axis),
            helper.make_node("ReduceMean", ["gradient", "axis"], ["mean"], keepdims=1),
        ]
    nodes = [
        *mean,
        helper.make_node("Sub", ["gradient", "mean"], ["rest"]),
        helper.make_node("Mul", ["decay", "velocity"], ["old"]),
        helper.make_node("Add", ["old", "rest"], ["new_velocity"]),
        helper.make_node("Mul", ["rate", "new_velocity"], ["step_of_it"]),
        helper.make_node("Sub", ["parameter", "step_of_it"], ["new_parameter"]),
    ]
    inputs = ["parameter", "gradient", "velocity", "rate", "decay"]
    return function("Centred", inputs, ["new_parameter", "new_velocity"], nodes, opset=opset)


def rank_dependent(parameter: Any, gradient: Any, velocity: Any, *, rate: Any) -> Any:
    """Multiply a matrix with itself; a vector stays as it is."""
    direction = gradient @ gradient.T @ gradient / 64 if gradient.ndim == 2 else gradient
    velocity = velocity / 2 + direction
    return parameter - rate * velocity, velocity


def rank_dependent_function() -> FunctionProto:
    """Return the formula as a function with an If on the rank."""
    value = helper.make_tensor_value_info
    matrix = [
        helper.make_node("Transpose", ["gradient"], ["across"], perm=[1, 0]),
        helper.make_node("MatMul", ["gradient", "across"], ["gram"]),
        helper.make_node("MatMul", ["gram", "gradient"], ["cube"]),
        helper.make_node("Constant", [], ["scale.float"], value_float=1 / 64),
        helper.make_node("CastLike", ["scale.float", "cube"], ["scale"]),
        helper.make_node("Mul", ["cube", "scale"], ["of_matrix"]),
    ]
    vector = [helper.make_node("Identity", ["gradient"], ["of_vector"])]
    then = helper.make_graph(matrix, "matrix", [], [value("of_matrix", TensorProto.FLOAT, None)])
    other = helper.make_graph(vector, "vector", [], [value("of_vector", TensorProto.FLOAT, None)])
    nodes = [
        helper.make_node("Shape", ["parameter"], ["shape"]),
        helper.make_node("Size", ["shape"], ["rank"]),
        helper.make_node("Constant", [], ["two"], value_int=2),
        helper.make_node("Equal", ["rank", "two"], ["is_matrix"]),
        helper.make_node("If", ["is_matrix"], ["direction"], then_branch=then, else_branch=other),
        helper.make_node("Constant", [], ["half.float"], value_float=0.5),
        helper.make_node("CastLike", ["half.float", "velocity"], ["half"]),
        helper.make_node("Mul", ["half", "velocity"], ["old"]),
        helper.make_node("Add", ["old", "direction"], ["new_velocity"]),
        helper.make_node("Mul", ["rate", "new_velocity"], ["step_of_it"]),
        helper.make_node("Sub", ["parameter", "step_of_it"], ["new_parameter"]),
    ]
    inputs = ["parameter", "gradient", "velocity", "rate"]
    return function("RankDependent", inputs, ["new_parameter", "new_velocity"], nodes)


@pytest.mark.parametrize("opset", [17, 18])
def test_a_function_with_a_mean_over_an_axis(opset: int, tmp_path: Path) -> None:
    """The function is not element-wise, so its nodes are repeated for each parameter."""
    kind = optim.register(centred_function(opset), settings={"decay": 0.9})
    weights = {name: w for name, w in WEIGHTS.items() if name != "one"}
    ours = Ours(tmp_path, kind(lr=0.05, groups=[{"params": "row", "decay": 0.5}]), weights)
    both(ours, centred, 0.05, of_groups={"row": {"decay": 0.5}})
    assert onnx.load(tmp_path / "optimizer_model.onnx").opset_import[0].version == opset


def test_a_function_with_a_branch_for_matrices(tmp_path: Path) -> None:
    both(Ours(tmp_path, optim.register(rank_dependent_function())(lr=0.05)), rank_dependent, 0.05)


def test_written_out_steps_with_options_and_checkpoints(tmp_path: Path) -> None:
    """A frozen group keeps its values; a loaded run continues bit for bit."""
    kind = optim.register(rank_dependent_function())
    groups = [{"params": "matrix", "frozen_steps": 3}, {"params": "row", "lr": 0.01}]
    config = kind(lr=0.05, max_norm=20.0, ema_decay=0.7, accumulation="mean", groups=groups)
    ours = Ours(tmp_path, config)
    start = ours.bits()["matrix"]
    for t in range(3):
        assert ours.step(*POOL[t : t + 2]) is not None
    assert ours.bits()["matrix"] == start
    again = ours.later()
    for t in range(3, 6):
        assert ours.step(*POOL[t : t + 2]) == again.step(*POOL[t : t + 2])
    assert ours.bits() == again.bits()
    assert ours.bits()["matrix"] != start


# Models of these optimizers in onnxruntime.

DECAY = {"settings": {"decay": 0.9}}
# Registered formula, arguments of `register`, and settings.
IN_RUNTIME: dict[str, tuple[Any, Mapping[str, Any], Mapping[str, float]]] = {
    "lion": (lion, {}, {"weight_decay": 0.3}),
    **{name: (formula, {"starts": starts}, {}) for name, (formula, starts) in FORMULAS.items()},
    "in elements": (averaged_in_elements(), DECAY, {"decay": 0.8}),
    "in float64": (averaged_in_float64(), DECAY, {"decay": 0.8}),
    "rank dependent": (rank_dependent_function(), {}, {}),
    "centred": (centred_function(18), DECAY, {}),
}


@pytest.mark.parametrize("full", [False, True], ids=["alone", "with options"])
@pytest.mark.parametrize(("own", "how", "settings"), IN_RUNTIME.values(), ids=list(IN_RUNTIME))
def test_models_in_onnxruntime(
    own: Any, how: Mapping[str, Any], settings: Mapping[str, float], full: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"ema_decay": 0.7, "max_norm": 20.0, "accumulation": "mean"} if full else {}
    config = optim.register(own, **how)(lr=0.05, **options | dict(settings))
    ours = Ours(tmp_path, config)
    path = tmp_path / "optimizer_model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    names = sorted(WEIGHTS)
    sequences: dict[str, list[Array]] = {"params": [WEIGHTS[name] for name in names]}
    sequences |= {slot: [ours.values(name)[slot] for name in names] for slot in config.slots}
    columns = {"lr": 0.0, "lr_factor": 1.0, "skipped_steps": 0.0, **config.settings}
    for t in range(4):
        norm = ours.step(*POOL[t : t + 2])
        feeds: dict[str, Any] = {
            "learning_rate": np.array([0.05], np.float32),
            "step": np.array([t + 1]),
            "gathered_steps": np.array([2]),
            "max_norm": np.array([20.0]),
            "gradients": [POOL[t][name] + POOL[t + 1][name] for name in names],
            **sequences,
            **{name: [np.array(value)] * len(names) for name, value in columns.items()},
        }
        wanted = {value.name for value in session.get_inputs()}
        assert wanted <= set(feeds)
        found = dict(zip(outputs, session.run(outputs, {name: feeds[name] for name in wanted}), strict=True))
        if full:
            assert found.pop("gradient_norm")[0] == pytest.approx(norm, rel=CLOSE)
        sequences = {name.removeprefix("updated_"): values for name, values in found.items()}
    sequences["weights"] = sequences.pop("params")
    runtime = {name: {key: values[at] for key, values in sequences.items()} for at, name in enumerate(names)}
    assert_close(ours.all_values(), runtime)


# Optimizer models as arguments.


def sequence_info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, kind, None)


def optimizer_model(
    nodes: Sequence[NodeProto],
    slots: Sequence[str],
    *,
    name: str = "Momentum",
    more_inputs: Iterable[onnx.ValueInfoProto] = (),
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return a model with the usual inputs, and an output for each updated sequence."""
    inputs = [
        helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
        *map(sequence_info, ("params", "gradients", *slots)),
        *more_inputs,
    ]
    given = ["updated_params", *(f"updated_{slot}" for slot in slots)] if outputs is None else outputs
    graph = helper.make_graph(nodes, name, inputs, [sequence_info(output) for output in given])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def corrected(parameter: Any, gradient: Any, velocity: Any, *, rate: Any, step: Any) -> Any:
    """Compute the formula of the models below."""
    velocity = velocity * 0.5 + gradient
    return parameter - rate / step * velocity, velocity


def corrected_nodes(prefix: str = "", *ports: str) -> list[NodeProto]:
    """Return prefixed nodes of the step of one parameter: p, g, v, rate and step to new_p and new_v."""
    p, g, v = ports or (f"{prefix}p", f"{prefix}g", f"{prefix}v")
    rate, step = (f"{prefix}rate", f"{prefix}step") if not ports else ("learning_rate", "step")

    def node(op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
        return helper.make_node(op, inputs, [f"{prefix}{output}"], **attributes)

    return [
        node("Constant", [], "half", value_float=0.5),
        node("Mul", [v, f"{prefix}half"], "old"),
        node("Add", [f"{prefix}old", g], "new_v"),
        node("Cast", [step], "steps", to=TensorProto.FLOAT),
        node("Div", [rate, f"{prefix}steps"], "share"),
        node("Mul", [f"{prefix}share", f"{prefix}new_v"], "update"),
        node("Sub", [p, f"{prefix}update"], "new_p"),
    ]


def mapped(slot: str = "velocity", **more: Any) -> ModelProto:
    """Return a model that applies the step of one parameter to all parameters with SequenceMap."""
    value = helper.make_tensor_value_info
    kinds = {"p": TensorProto.FLOAT, "g": TensorProto.FLOAT, "v": TensorProto.FLOAT}
    kinds |= {"rate": TensorProto.FLOAT, "step": TensorProto.INT64}
    body = helper.make_graph(
        corrected_nodes(),
        "one",
        [value(name, kind, None) for name, kind in kinds.items()],
        [value(name, TensorProto.FLOAT, None) for name in ("new_p", "new_v")],
    )
    node = helper.make_node(
        "SequenceMap",
        ["params", "gradients", slot, "learning_rate", "step"],
        ["updated_params", f"updated_{slot}"],
        body=body,
    )
    return optimizer_model([node], [slot], **more)


def written_out(count: int) -> ModelProto:
    """Return a model with separate nodes for every parameter."""
    nodes: list[NodeProto] = []
    for at in range(count):
        index = f"at{at}"
        nodes.append(helper.make_node("Constant", [], [index], value_int=at))
        ports = [f"{sequence}{at}" for sequence in ("params", "gradients", "velocity")]
        for sequence, port in zip(("params", "gradients", "velocity"), ports, strict=True):
            nodes.append(helper.make_node("SequenceAt", [sequence, index], [port]))
        nodes += corrected_nodes(f"of{at}.", *ports)
    for name, output in (("new_p", "updated_params"), ("new_v", "updated_velocity")):
        nodes.append(helper.make_node("SequenceConstruct", [f"of{at}.{name}" for at in range(count)], [output]))
    return optimizer_model(nodes, ["velocity"])


def map_of(inputs: Mapping[str, str], outputs: Mapping[str, str], nodes: Sequence[NodeProto]) -> NodeProto:
    """Return a SequenceMap over float32; the mappings give the names of sequences inside the body."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        "one",
        [value(name, TensorProto.FLOAT, None) for name in inputs.values()],
        [value(name, TensorProto.FLOAT, None) for name in outputs.values()],
    )
    return helper.make_node("SequenceMap", list(inputs), list(outputs), body=body)


def normalized() -> ModelProto:
    """Return a model with gradients divided by their total norm; the body captures the rate."""
    node = helper.make_node
    nodes = [
        map_of({"gradients": "g"}, {"squares": "s"}, [node("ReduceSumSquare", ["g"], ["s"], keepdims=0)]),
        node("ConcatFromSequence", ["squares"], ["all"], axis=0, new_axis=1),
        node("ReduceSum", ["all"], ["square"], keepdims=1),
        node("Sqrt", ["square"], ["norm"]),
        node("Div", ["learning_rate", "norm"], ["share"]),
        map_of(
            {"params": "p", "gradients": "h"},
            {"updated_params": "q"},
            [node("Mul", ["share", "h"], ["update"]), node("Sub", ["p", "update"], ["q"])],
        ),
    ]
    return optimizer_model(nodes, [])


def exchanging() -> ModelProto:
    """Return a model with two slots that exchange their values."""
    node = helper.make_node
    nodes = [
        node("Add", ["y", "g"], ["new_x"]),
        node("Identity", ["x"], ["new_y"]),
        node("Sub", ["p", "x"], ["new_p"]),
    ]
    inputs = {"params": "p", "gradients": "g", "first": "x", "second": "y"}
    outputs = {"updated_params": "new_p", "updated_first": "new_x", "updated_second": "new_y"}
    return optimizer_model([map_of(inputs, outputs, nodes)], ["first", "second"])


TWO = {name: WEIGHTS[name] for name in ("matrix", "row")}


@pytest.mark.parametrize(("model", "weights"), [(mapped(), WEIGHTS), (written_out(2), TWO)], ids=["map", "at"])
def test_models_train(model: ModelProto, weights: Arrays, tmp_path: Path) -> None:
    onnx.checker.check_model(model, full_check=True)
    ours = Ours(tmp_path, model, weights)
    ours.optimizer.set_learning_rate(0.05)
    assert set(ours.values("row")) == {"weights", "velocity"}
    assert not np.any(ours.values("row")["velocity"])
    both(ours, corrected, 0.05)
    again = ours.later()
    assert again.bits() == ours.bits()
    for gradients in POOL[STEPS : STEPS + 3]:
        ours.step(gradients)
        again.step(gradients)
    assert again.bits() == ours.bits()
    assert again.optimizer.step_count == STEPS + 3


def test_a_model_with_a_norm_of_all_gradients(tmp_path: Path) -> None:
    ours = Ours(tmp_path, normalized())
    ours.optimizer.set_learning_rate(0.5)
    wanted = {name: np.float64(w) for name, w in WEIGHTS.items()}
    for gradients in POOL[:STEPS]:
        ours.step(gradients)
        norm = math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in gradients.values()))
        wanted = {name: w - 0.5 / norm * gradients[name] for name, w in wanted.items()}
    assert_close(ours.all_values(), {name: {"weights": w} for name, w in wanted.items()})


def test_slots_that_take_the_values_of_each_other(tmp_path: Path) -> None:
    def formula(parameter: Any, gradient: Any, first: Any, second: Any) -> Any:
        return parameter - first, second + gradient, first

    both(Ours(tmp_path, exchanging()), formula, 1e-3)


def test_a_model_for_another_number_of_parameters(tmp_path: Path) -> None:
    with pytest.raises(OrtrainError, match="optimizer model"):
        Ours(tmp_path, written_out(3), TWO)


def test_an_optimizer_in_place_of_another(tmp_path: Path) -> None:
    ours = Ours(tmp_path, mapped())
    ours.step(POOL[0])
    kept = {name: ours.values(name)["velocity"] for name in WEIGHTS}
    with pytest.raises(OrtrainError) as error:
        Optimizer(mapped("speed", name="Speed"), ours.module)
    for word in ("Momentum", "velocity", "Speed", "speed", "replace=True"):
        assert word in str(error.value)
    # A slot with the same name keeps its values.
    Optimizer(mapped(name="Other"), ours.module, replace=True)
    for name, velocity in kept.items():
        assert np.array_equal(ours.values(name)["velocity"], velocity)
    # Another slot starts anew.
    Optimizer(mapped("speed", name="Speed"), ours.module, replace=True)
    for name in WEIGHTS:
        assert set(ours.values(name)) == {"weights", "speed"}
        assert not np.any(ours.values(name)["speed"])


def test_a_model_that_does_not_fit_leaves_everything(tmp_path: Path) -> None:
    ours = Ours(tmp_path, mapped())
    ours.step(POOL[0])
    before = {name: ours.values(name) for name in WEIGHTS}
    with pytest.raises(OrtrainError):
        Optimizer(written_out(len(WEIGHTS) + 1), ours.module, replace=True)
    for name, values in before.items():
        for key, value in values.items():
            assert np.array_equal(ours.values(name)[key], value), (name, key)
    assert ours.optimizer.step_count == 1
    ours.step(POOL[1])


def test_results_of_several_elements_are_no_norm(tmp_path: Path) -> None:
    model = mapped()
    two = helper.make_tensor("two", onnx.TensorProto.DOUBLE, [2], [1.0, 2.0])
    model.graph.node.append(helper.make_node("Constant", [], ["two"], value=two))
    model.graph.output.append(helper.make_tensor_value_info("two", onnx.TensorProto.DOUBLE, [2]))
    assert Ours(tmp_path, model).step(POOL[0]) is None


def test_a_registered_optimizer_in_place_of_one_of_the_table(tmp_path: Path) -> None:
    ours = Ours(tmp_path / "table", optim.Lion(lr=0.01))
    ours.step(POOL[0])
    momentum = {name: ours.values(name)["momentum0"] for name in WEIGHTS}
    Ours(tmp_path / "own", OwnLion(lr=0.01))
    model = tmp_path / "own" / "optimizer_model.onnx"
    with pytest.raises(
        OrtrainError, match=r"the optimizer Lion with the slots momentum0.*for lion with the slots momentum0"
    ):
        Optimizer(model, ours.module)
    ours.optimizer = Optimizer(model, ours.module, replace=True)
    for name in WEIGHTS:
        assert np.array_equal(ours.values(name)["momentum0"], momentum[name])
    ours.step(POOL[1])
    table = Ours(tmp_path / "again", optim.Lion(lr=0.01))
    for gradients in POOL[:2]:
        table.step(gradients)
    assert_close(ours.all_values(), table.all_values())


# Errors.


REFUSED_FORMULAS: list[tuple[Formula, type[Exception], str]] = [
    (
        lambda parameter, gradient, *, rate, decay: parameter - rate * decay * gradient,
        InvalidArgumentError,
        "the keyword argument 'decay' has no default",
    ),
    (lambda parameter, *, rate: parameter, InvalidArgumentError, "first arguments must be parameter and gradient"),
    (lambda w, g, *, rate: w - rate * g, InvalidArgumentError, "parameter and gradient, got w, g"),
    (
        lambda parameter, gradient, *slots: parameter,
        InvalidArgumentError,
        "*slots is not a valid argument; parameter, gradient",
    ),
    (lambda parameter, gradient, rate=1.0: parameter, InvalidArgumentError, "settings are keyword-only (after a *)"),
    (
        lambda parameter, gradient, first, second: parameter,
        InvalidArgumentError,
        "returns 1 values; expected the new parameter, the new first, the new second",
    ),
    (lambda parameter, gradient: (parameter, gradient), InvalidArgumentError, "returns 2 values"),
    (
        lambda parameter, gradient: None,
        InvalidArgumentError,
        "the new parameter must have a value for each element, got None",
    ),
    (lambda parameter, gradient, *, rate: rate, InvalidArgumentError, "the new parameter must have a value for each"),
    (lambda parameter, gradient, slot: (parameter, 1.0), InvalidArgumentError, "the new slot must have a value"),
    (lambda parameter, gradient: parameter if gradient > 0 else gradient, TypeError, "use np.where for a condition"),
    (lambda parameter, gradient: parameter if gradient == 0 else gradient, TypeError, "neither true nor false"),
    (lambda parameter, gradient: gradient or parameter, TypeError, "neither true nor false"),
    (lambda parameter, gradient: max(gradient, 1.0), TypeError, "neither true nor false"),
    (lambda parameter, gradient: math.sqrt(gradient), TypeError, "has no numeric value before the optimizer runs"),
    (lambda parameter, gradient: np.tanh(gradient), TypeError, "cannot use numpy.tanh"),
    (lambda parameter, gradient: np.maximum.reduce(gradient), TypeError, "cannot use numpy.maximum"),
    (lambda parameter, gradient: np.clip(gradient, -1, 1), TypeError, "cannot use numpy.clip"),
    (lambda parameter, gradient: np.sum(gradient, axis=0), TypeError, "cannot use numpy.sum with these arguments"),
    (lambda parameter, gradient: np.linalg.norm(gradient, 1), TypeError, "cannot use numpy.norm with these arguments"),
    (lambda parameter, gradient: np.where(gradient, 1.0, parameter), TypeError, "comparison of values, got Value"),
    (lambda parameter, gradient: np.where(True, gradient, parameter), TypeError, "comparison of values, got True"),
    (lambda parameter, gradient: np.ones(3) * gradient, TypeError, "its values and numbers, got array("),
    (lambda parameter, gradient: parameter * [1.0], TypeError, "its values and numbers, got [1.0]"),
    (lambda parameter, gradient: parameter + True, TypeError, "its values and numbers, got True"),
    (lambda parameter, gradient: parameter % 2, TypeError, "unsupported operand"),
    (lambda parameter, gradient, *, a=math.nan: a * parameter, InvalidArgumentError, "a must be finite, got nan"),
    (lambda parameter, gradient, *, a=math.inf: a * parameter, InvalidArgumentError, "a must be finite, got inf"),
    (lambda parameter, gradient, *, a="x": parameter, InvalidArgumentError, "a must be a number, got 'x'"),
    (lambda parameter, gradient, *, a=None: parameter, InvalidArgumentError, "a must be a number, got None"),
    (lambda parameter, gradient, *, lr=1.0: parameter, InvalidArgumentError, "'lr' is an option of every optimizer"),
    (lambda parameter, gradient, *, groups=1.0: parameter, InvalidArgumentError, "'groups' is an option"),
    (lambda parameter, gradient, *, lr_factor=1.0: parameter, InvalidArgumentError, 'cannot have the name "lr_factor"'),
    (lambda parameter, gradient, step: (parameter, step), InvalidArgumentError, '"step" cannot be a slot'),
]


@pytest.mark.parametrize(("formula", "kind", "words"), REFUSED_FORMULAS, ids=[words for *_, words in REFUSED_FORMULAS])
def test_formulas_that_are_refused(formula: Formula, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        optim.register(formula)
    assert words in str(error.value)


def small(
    inputs: Sequence[str] = ("parameter", "gradient"), outputs: Sequence[str] = ("new_parameter",), **more: Any
) -> FunctionProto:
    """Return a function that adds the gradient, and copies the gradient to all other outputs."""
    nodes = [helper.make_node("Add", ["parameter", "gradient"], ["new_parameter"])]
    nodes += [helper.make_node("Identity", ["gradient"], [output]) for output in outputs if output != "new_parameter"]
    return function(more.pop("name", "Own"), inputs, outputs, nodes, **more)


MISSING_INPUT_MESSAGE = 'its input "decay" is unknown: it is not one of parameter, gradient, rate, step'
WITH_DECAY = ("parameter", "gradient", "decay")
REFUSED_FUNCTIONS: list[tuple[FunctionProto, dict[str, Any], str]] = [
    (small(WITH_DECAY), {}, MISSING_INPUT_MESSAGE),
    (small(outputs=()), {}, 'its first output must be "new_parameter"'),
    (small(WITH_DECAY, ("new_decay", "new_parameter")), {}, 'its first output must be "new_parameter"'),
    (small(outputs=("new_parameter", "slot")), {}, 'its output "slot" must be "new_"'),
    (small(outputs=("new_parameter", "new_slot")), {}, 'its output "new_slot" must be "new_"'),
    (small(WITH_DECAY, ("new_parameter", "new_decay")), {"settings": {"decay": 1.0}}, '"decay" cannot be a slot'),
    (small(outputs=("new_parameter", "new_gradient")), {}, '"gradient" cannot be a slot'),
    (small(name="Adam"), {}, "a built-in optimizer has this name"),
    (small(domain=""), {}, "it is in the domain of ONNX; choose another"),
    (small(domain="ai.onnx"), {}, "it is in the domain of ONNX; choose another"),
    (small(opset=16), {}, "it uses opset 16, but optimizer models need opset 17 or newer"),
    (small(WITH_DECAY), {"settings": {"decay": math.nan}}, "decay must be finite, got nan"),
    (small(WITH_DECAY), {"settings": {"decay": "x"}}, "decay must be a number, got 'x'"),
    (small(), {"settings": {"rate": 1.0}}, 'a setting cannot have the name "rate"'),
    (small(), {"settings": {"max_norm": 1.0}}, "'max_norm' is an option of every optimizer"),
    (
        small(WITH_DECAY, ("new_parameter", "new_decay")),
        {"starts": {"decay": "two"}},
        'slot "decay" must start at "zero", "one", "parameter" or the name of a setting, got "two"',
    ),
]


@pytest.mark.parametrize(
    ("proto", "options", "words"), REFUSED_FUNCTIONS, ids=[words for *_, words in REFUSED_FUNCTIONS]
)
def test_functions_that_are_refused(proto: FunctionProto, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        optim.register(proto, **options)
    assert words in str(error.value)


def test_invalid_arguments_of_register() -> None:
    not_one: Any = 3
    with pytest.raises(TypeError, match=r"a Python function or an onnx\.FunctionProto, got int"):
        optim.register(not_one)
    with pytest.raises(InvalidArgumentError, match="settings of a Python function are its keyword arguments"):
        optim.register(descent, settings={"decay": 1.0})
    with pytest.raises(InvalidArgumentError, match=r'slot "velocity" must start at .*got "two"'):
        optim.register(fast, starts={"velocity": "two"})


def test_a_function_with_the_name_of_a_row_of_the_table() -> None:
    def own(parameter: Any, gradient: Any) -> Any:
        return parameter - gradient

    own.__name__ = "Adam"
    with pytest.raises(InvalidArgumentError, match="a built-in optimizer has this name"):
        optim.register(own)


REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"beta3": 0.5}, 'lion has no setting "beta3"; its settings are beta1, beta2, weight_decay'),
    ({"beta1": math.nan}, "beta1 must be finite, got nan"),
    ({"beta1": "x"}, "beta1 must be a number, got 'x'"),
    ({"lr": -1.0}, "the learning rate must be finite and at least 0, got -1"),
    ({"max_norm": 0.0}, "max_norm must be a finite number above 0, got 0"),
    ({"ema_decay": 1.0}, "ema_decay must be a number from 0 to below 1, got 1"),
    ({"groups": [{"params": "row", "beta3": 0.5}]}, "group 0 has no key 'beta3'"),
    ({"groups": [{"params": "row", "max_value": 0.5}]}, "group 0 has no key 'max_value'"),
    ({"groups": [{"params": "row", "beta1": math.inf}]}, "beta1 of group 0 must be finite, got inf"),
    ({"groups": [{"beta1": 0.5}]}, "group 0 has no params"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED_OPTIONS, ids=[words for _, words in REFUSED_OPTIONS])
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        OwnLion(**options)
    assert words in str(error.value)


def renamed(model: ModelProto, old: str, new: str) -> ModelProto:
    """Return a copy of the model with another name of a value."""
    made = ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for value in (*made.graph.input, *made.graph.output):
        value.name = new if value.name == old else value.name
    return made


def with_input(name: str, kind: int, dims: list[int] | None = None) -> ModelProto:
    """Return a model with one more input, which is a sequence without `dims`."""
    info = sequence_info(name, kind) if dims is None else helper.make_tensor_value_info(name, kind, dims)
    return mapped(more_inputs=[info])


def rates_in_float64() -> ModelProto:
    model = mapped()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    return model


REFUSED_MODELS: list[tuple[ModelProto, str]] = [
    (renamed(mapped(), "updated_velocity", "speed"), 'its output "speed" is a sequence that updates no input'),
    (renamed(mapped(), "updated_velocity", "updated_speed"), '"updated_speed" is a sequence that updates no input'),
    (renamed(mapped(), "learning_rate", "rate"), 'input "rate" (float32[1]) is unknown'),
    (with_input("extra", TensorProto.FLOAT, [1]), 'input "extra" (float32[1]) is unknown'),
    (with_input("settings", TensorProto.DOUBLE, [1, 2]), '"settings"'),
    (with_input("extra", TensorProto.FLOAT), 'input "extra" is unknown: it is neither a slot'),
    (with_input("extra", TensorProto.DOUBLE), 'there is no output "updated_extra"'),
    (with_input("max_norm", TensorProto.DOUBLE, [1]), 'an input "max_norm", but its description has no value for it'),
    (with_input("gathered_steps", TensorProto.FLOAT, [1]), '"gathered_steps" should be int64[1] but is float32[1]'),
    (rates_in_float64(), '"learning_rate" should be float32[1] but is float64[1]'),
]


@pytest.mark.parametrize(("model", "words"), REFUSED_MODELS, ids=[words for _, words in REFUSED_MODELS])
def test_models_that_are_refused(model: ModelProto, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError) as error:
        Ours(tmp_path, model)
    assert words in str(error.value)
    # The state did not change.
    ours = Ours(tmp_path / "sound", mapped())
    assert set(ours.values("row")) == {"weights", "velocity"}


OF_ANOTHER_SHAPE = [
    (helper.make_node("Transpose", ["p"], ["q"]), "[5, 6]"),
    (helper.make_node("Flatten", ["p"], ["q"], axis=0), "[1, 30]"),
]


@pytest.mark.parametrize(("node", "shape"), OF_ANOTHER_SHAPE, ids=[node.op_type for node, _ in OF_ANOTHER_SHAPE])
def test_new_parameters_of_another_shape(node: NodeProto, shape: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["at"], value_int=0),
        helper.make_node("SequenceAt", ["params", "at"], ["p"]),
        node,
        helper.make_node("SequenceConstruct", ["q"], ["updated_params"]),
    ]
    with pytest.raises(InvalidModelError) as error:
        Ours(tmp_path, optimizer_model(nodes, []), {"matrix": WEIGHTS["matrix"]})
    assert f"shape [6, 5], the value has shape {shape}" in str(error.value)


# Optimizer models with unusual outputs.


def at_zero() -> list[NodeProto]:
    """Return nodes for a model with one parameter, which becomes the parameter minus its gradient."""
    return [
        helper.make_node("Constant", [], ["at"], value_int=0),
        helper.make_node("SequenceAt", ["params", "at"], ["p"]),
        helper.make_node("SequenceAt", ["gradients", "at"], ["g"]),
        helper.make_node("Sub", ["p", "g"], ["q"]),
        helper.make_node("SequenceConstruct", ["q"], ["updated_params"]),
    ]


def less_gradient(parameter: Any, gradient: Any, before: Any) -> Any:
    return parameter - gradient, parameter


def less_centred(parameter: Any, gradient: Any, before: Any) -> Any:
    return parameter - (gradient - gradient.mean(axis=-1, keepdims=True)), parameter


def keeping(kind: str) -> ModelProto:
    """Return a model with a slot that is the parameter before the step."""
    node = helper.make_node
    inputs = {"params": "p", "gradients": "g", "before": "b"}
    outputs = {"updated_params": "q", "updated_before": "kept"}
    if kind == "constructed":
        nodes = [*at_zero(), node("SequenceConstruct", ["p"], ["updated_before"])]
    elif kind == "sequence":
        nodes = [*at_zero(), node("Identity", ["params"], ["updated_before"])]
    elif kind == "unread":
        nodes = [map_of({"params": "p", "gradients": "g"}, outputs, [node("Sub", ["p", "g"], ["q"]), IDENTITY_NODE])]
    else:
        mean = node("ReduceMean", ["g"], ["mean"], axes=[-1], keepdims=1)
        rest = [node("Sub", ["g", "mean"], ["rest"]), node("Sub", ["p", "rest"], ["q"])]
        nodes = [map_of(inputs, outputs, [mean, *rest, IDENTITY_NODE])]
    return optimizer_model(nodes, ["before"])


IDENTITY_NODE = helper.make_node("Identity", ["p"], ["kept"])


@pytest.mark.parametrize("kind", ["constructed", "sequence", "unread", "mean"])
def test_a_slot_that_is_the_parameter_before_the_step(kind: str, tmp_path: Path) -> None:
    weights = {"row": WEIGHTS["row"]}
    both(Ours(tmp_path, keeping(kind), weights), less_centred if kind == "mean" else less_gradient, 1e-3)


def test_parameters_that_take_the_values_of_each_other(tmp_path: Path) -> None:
    nodes = []
    for at in range(2):
        nodes.append(helper.make_node("Constant", [], [f"at{at}"], value_int=at))
        nodes.append(helper.make_node("SequenceAt", ["params", f"at{at}"], [f"p{at}"]))
    nodes.append(helper.make_node("SequenceConstruct", ["p1", "p0"], ["updated_params"]))
    weights = {"a": WEIGHTS["row"], "b": WEIGHTS["row"] + 1}
    ours = Ours(tmp_path, optimizer_model(nodes, []), weights)
    ours.step(dict.fromkeys("ab", POOL[0]["row"]))
    assert np.array_equal(ours.values("a")["weights"], weights["b"])
    assert np.array_equal(ours.values("b")["weights"], weights["a"])


# Inputs and values of the models that ortrain makes from functions.
RESERVED_NAMES = (
    "params",
    "gradients",
    "learning_rate",
    "gathered_steps",
    "max_norm",
    "settings",
    "clip_factor",
    "lr",
    "lr_factor",
    "skipped_steps",
    "ema",
    "ema_decay",
    "max_value",
    "max_norm_per_tensor",
    "new_parameter",
    "updated_params",
)


@pytest.mark.parametrize("name", RESERVED_NAMES)
def test_names_that_slots_and_settings_cannot_have(name: str) -> None:
    slot = small(("parameter", "gradient", name), ("new_parameter", f"new_{name}"))
    with pytest.raises(InvalidArgumentError, match=name):
        optim.register(slot)
    with pytest.raises(InvalidArgumentError, match=name):
        optim.register(small(("parameter", "gradient", name)), settings={name: 1.0})


def test_more_settings_than_an_optimizer_has() -> None:
    names = tuple(f"setting{k}" for k in range(101))
    with pytest.raises(InvalidArgumentError, match="101 settings, at most 100 are supported"):
        optim.register(small(("parameter", "gradient", *names)), settings=dict.fromkeys(names, 1.0))


def test_a_start_of_no_slot() -> None:
    with pytest.raises(InvalidArgumentError, match="speed"):
        optim.register(fast, starts={"speed": "one"})


@pytest.mark.parametrize("twice", ["inputs", "outputs"])
def test_a_name_that_a_function_has_twice(twice: str) -> None:
    inputs, outputs = ["parameter", "gradient", "slot"], ["new_parameter", "new_slot"]
    proto = function("Own", inputs, outputs, list(small(inputs, outputs).node))
    (proto.input if twice == "inputs" else proto.output).append("slot" if twice == "inputs" else "new_slot")
    with pytest.raises(InvalidArgumentError, match="slot"):
        optim.register(proto)


@pytest.mark.parametrize("outputs", [[], ["updated_velocity"]])
def test_a_model_that_updates_no_parameter(outputs: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="updated_params"):
        Ours(tmp_path, mapped(outputs=outputs))


def test_a_model_that_gives_too_many_parameters(tmp_path: Path) -> None:
    nodes = [*at_zero()[:-1], helper.make_node("SequenceConstruct", ["q", "q"], ["updated_params"])]
    with pytest.raises(InvalidModelError, match="updated_params"):
        Ours(tmp_path, optimizer_model(nodes, []), {"row": WEIGHTS["row"]})


# This test trains float16 weights deliberately, so the warning is ignored.
@pytest.mark.filterwarnings("ignore:.*float16:ortrain.TrainingWarning")
def test_a_model_for_weights_of_another_type(tmp_path: Path) -> None:
    """The model is rejected before the first step."""
    with pytest.raises(InvalidModelError, match="float16"):
        Ours(tmp_path, mapped(), {"row": WEIGHTS["row"].astype(np.float16)})


def test_a_program_of_an_optimizer_model(tmp_path: Path) -> None:
    Ours(tmp_path, OwnLion())
    printed = ortrain.dump(tmp_path / "optimizer_model.onnx", "program", {"params": [1000]})
    assert "plane" in printed
