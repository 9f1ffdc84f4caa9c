"""Optimizers in NumPy and float64, after their papers and the documentation of torch.optim, and a model to test them.

Needs onnx and NumPy alone. The gradients of the model are its inputs, so that a test prescribes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array: TypeAlias = npt.NDArray[np.float64]
# Added to the norms of clipping, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


@dataclass
class Step:
    """One step of one parameter. A formula returns the new weights and stores the new slots here."""

    w: Array
    g: Array
    lr: float
    t: int
    settings: Mapping[str, float]
    flags: Mapping[str, bool]
    slots: dict[str, Array]

    def __getitem__(self, setting: str) -> float:
        return self.settings[setting]

    def old(self, slot: str, start: Array | float = 0.0) -> Array:
        """Return a slot before the step."""
        return self.slots.get(slot, np.array(start, np.float64))

    def average(self, slot: str, decay: float, new: Array) -> Array:
        """Update and return a moving average that starts at zero."""
        self.slots[slot] = decay * self.old(slot) + (1 - decay) * new
        return self.slots[slot]

    def moments(self, g: Array) -> tuple[Array, Array]:
        """Return the averages of gradients and of their squares."""
        return self.average("momentum0", self["beta1"], g), self.average("momentum1", self["beta2"], g**2)

    def with_penalty(self) -> Array:
        """Return the gradient with the gradient of an L2 penalty."""
        return self.g + self["weight_decay"] * self.w

    def unbiased(self, average: Array, beta: str) -> Array:
        """Return an average with the bias correction for its start at zero."""
        return np.asarray(average / (1 - self[beta] ** self.t))


# The formulas.


def adadelta(s: Step) -> Array:
    """Zeiler, 2012, algorithm 1, with a learning rate and an L2 penalty."""
    g, rho, eps = s.with_penalty(), s["rho"], s["eps"]
    mean_square = s.average("square_average", rho, g**2)
    delta = -np.sqrt(s.old("step_average") + eps) / np.sqrt(mean_square + eps) * g
    s.average("step_average", rho, delta**2)
    return s.w + s.lr * delta


def rms(values: Array) -> float:
    return float(np.sqrt((values**2).mean()))


def adafactor(s: Step) -> Array:
    """torch.optim.Adafactor: the second moment of a matrix is the product of the moments of its rows and columns."""
    share, square = s.t ** s["beta2_decay"], s.g**2

    def mean(slot: str, new: Array) -> Array:
        old = s.slots.get(slot, np.zeros_like(new))
        s.slots[slot] = (1 - share) * old + share * new
        return s.slots[slot]

    none = np.zeros(0)
    if s.w.ndim > 1:
        rows = mean("row_average", square.mean(axis=-1, keepdims=True))
        columns = mean("column_average", square.mean(axis=-2, keepdims=True))
        second = rows * columns / np.maximum(rows.mean(axis=-2, keepdims=True), s["eps1"])
        s.slots["square_average"] = none
    else:
        second = mean("square_average", square)
        s.slots.update(row_average=none, column_average=none)
    update = s.g / np.sqrt(np.maximum(second, s["eps1"] ** 2))
    update = update / max(1.0, rms(update) / s["d"])
    relative = max(s["eps2"], rms(s.w)) * min(s.lr, 1 / math.sqrt(s.t))
    return s.w * (1 - s.lr * s["weight_decay"]) - relative * update


def orthogonal(matrix: Array, eps: float) -> Array:
    """Five iterations of Newton and Schulz on the wide side of a matrix, with the polynomial of Jordan et al., 2024."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, eps).T
    x = matrix / max(norm(matrix), eps)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(s: Step) -> Array:
    """torch.optim.Muon for matrices, torch.optim.AdamW for others."""
    w = s.w * (1 - s.lr * s["weight_decay"])
    if s.w.ndim != 2 or s["adamw"]:
        first, second = s.moments(s.g)
        root = np.sqrt(s.unbiased(second, "beta2")) + s["adamw_eps"]
        return np.asarray(w - s.lr * s.unbiased(first, "beta1") / root)
    momentum = s.average("momentum0", s["momentum"], s.g)
    direction = s["momentum"] * momentum + (1 - s["momentum"]) * s.g if s.flags["nesterov"] else momentum
    s.slots["momentum1"] = np.zeros(0)
    rows, columns = s.w.shape
    scale = 0.2 * math.sqrt(max(rows, columns)) if s.flags["match_rms_adamw"] else math.sqrt(max(1.0, rows / columns))
    return w - s.lr * scale * orthogonal(direction, s["eps"])


def adagrad(s: Step) -> Array:
    """torch.optim.Adagrad."""
    g = s.with_penalty()
    s.slots["square_sum"] = s.old("square_sum", s["initial_accumulator_value"]) + g**2
    return s.w - s.lr / (1 + (s.t - 1) * s["lr_decay"]) * g / (np.sqrt(s.slots["square_sum"]) + s["eps"])


def adam_direction(s: Step, g: Array, *, corrected: bool = True) -> Array:
    """Kingma and Ba, 2015, algorithm 1; with amsgrad the second moment is the largest so far, before its correction."""
    first, second = s.moments(g)
    if s.flags.get("amsgrad"):
        second = s.slots["max_momentum1"] = np.maximum(s.old("max_momentum1"), second)
    if corrected:
        first, second = s.unbiased(first, "beta1"), s.unbiased(second, "beta2")
    return first / (np.sqrt(second) + s["eps"])


def adam(s: Step) -> Array:
    """torch.optim.Adam."""
    return s.w - s.lr * adam_direction(s, s.with_penalty())


def adamax(s: Step) -> Array:
    """torch.optim.Adamax."""
    g = s.with_penalty()
    first = s.unbiased(s.average("momentum0", s["beta1"], g), "beta1")
    s.slots["largest_gradient"] = np.maximum(s["beta2"] * s.old("largest_gradient"), np.abs(g) + s["eps"])
    return s.w - s.lr * first / s.slots["largest_gradient"]


def adamw(s: Step) -> Array:
    """torch.optim.AdamW, or the AdamWOptimizer of onnxruntime.

    The latter (adam_mode 1) adds epsilon before the bias correction and decays the weights last.
    """
    corrected, decay = s.flags["bias_correction"], 1 - s.lr * s["weight_decay"]
    if not s.flags["onnxruntime"]:
        return decay * s.w - s.lr * adam_direction(s, s.g, corrected=corrected)
    lr = s.lr * math.sqrt(1 - s["beta2"] ** s.t) / (1 - s["beta1"] ** s.t) if corrected else s.lr
    return decay * (s.w - lr * adam_direction(s, s.g, corrected=False))


def norm(values: Array) -> float:
    return float(np.sqrt((values**2).sum()))


def lamb(s: Step) -> Array:
    """You et al., 2020, algorithm 2; the function of norms limits their ratio to an interval."""
    update = adam_direction(s, s.g, corrected=s.flags["bias_correction"]) + s["weight_decay"] * s.w
    ratio = 1.0
    if norm(s.w) > 0 and norm(update) > 0:
        ratio = float(np.clip(norm(s.w) / norm(update), s["ratio_min"], s["ratio_max"]))
    return s.w - s.lr * ratio * update


def with_momentum(s: Step, g: Array, damped: float) -> Array:
    """Return the direction of torch.optim.SGD for a gradient: the velocity, or Nesterov's step."""
    velocity = s.slots["momentum0"] = s["momentum"] * s.old("momentum0") + damped * g
    return g + s["momentum"] * velocity if s.flags["nesterov"] else velocity


def lars(s: Step) -> Array:
    """You, Gitman and Ginsburg, 2017, algorithm 1.

    The velocity accumulates gradients without the learning rate, so that a schedule acts at once.
    """
    trust = 1.0
    if norm(s.w) > 0 and norm(s.g) > 0:
        trust = s["trust_coefficient"] * norm(s.w) / (norm(s.g) + s["weight_decay"] * norm(s.w) + s["eps"])
    return s.w - s.lr * with_momentum(s, trust * s.with_penalty(), 1.0)


def lion(s: Step) -> Array:
    """Chen et al., 2023, program 1."""
    mixed = s["beta1"] * s.old("momentum0") + (1 - s["beta1"]) * s.g
    s.average("momentum0", s["beta2"], s.g)
    # The sign is ill conditioned at zero: data on which rounding in float32 may change the sign prove nothing.
    assert np.all((np.abs(mixed) > 1e-6 * np.abs(s.g)) | ((mixed == 0) & (s.g == 0))), "choose other gradients"
    return s.w - s.lr * (np.sign(mixed) + s["weight_decay"] * s.w)


def decayed_either_way(s: Step) -> tuple[Array, Array]:
    """Return the weights and the gradient after weight decay: decoupled, or as an L2 penalty."""
    if s.flags["decoupled_weight_decay"]:
        return s.w * (1 - s.lr * s["weight_decay"]), s.g
    return s.w, s.with_penalty()


def nadam(s: Step) -> Array:
    """torch.optim.NAdam."""
    w, g = decayed_either_way(s)
    mu, next_mu = (s["beta1"] * (1 - 0.5 * 0.96 ** (t * s["momentum_decay"])) for t in (s.t, s.t + 1))
    product = s.slots["mu_product"] = s.old("mu_product", 1.0) * mu
    first, second = s.moments(g)
    unbiased = next_mu * first / (1 - product * next_mu) + (1 - mu) * g / (1 - product)
    return np.asarray(w - s.lr * unbiased / (np.sqrt(s.unbiased(second, "beta2")) + s["eps"]))


def radam(s: Step) -> Array:
    """torch.optim.RAdam: the adaptive rate applies if the length of the approximated average is above 5."""
    w, g = decayed_either_way(s)
    first, second = s.moments(g)
    first, power = s.unbiased(first, "beta1"), s["beta2"] ** s.t
    longest = 2 / (1 - s["beta2"]) - 1
    length = longest - 2 * s.t * power / (1 - power)
    if length <= 5:
        return w - s.lr * first
    variances = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
    adaptive = math.sqrt(1 - power) / (np.sqrt(second) + s["eps"])
    return w - s.lr * first * math.sqrt(variances[0] / variances[1]) * adaptive


def rmsprop(s: Step) -> Array:
    """torch.optim.RMSprop."""
    g = s.with_penalty()
    variance = s.average("square_average", s["alpha"], g**2)
    if s.flags["centered"]:
        variance = variance - s.average("gradient_average", s["alpha"], g) ** 2
    direction = g / (np.sqrt(variance) + s["eps"])
    if s["momentum"]:
        direction = s.slots["momentum0"] = s["momentum"] * s.old("momentum0") + direction
    return s.w - s.lr * direction


def schedule_free_average(w: Array, z: Array, beta1: float) -> Array:
    """Return the average x from the weights y = (1 - beta1) z + beta1 x."""
    return np.asarray((w - (1 - beta1) * z) / beta1)


def schedule_free_adamw(s: Step) -> Array:
    """Defazio et al., 2024, algorithm 1; weights of the average as in the package schedulefree."""
    z, beta1 = s.old("z", s.w), s["beta1"]
    x = schedule_free_average(s.w, z, beta1)
    warmed = min(1.0, s.t / s["warmup_steps"]) if s["warmup_steps"] else 1.0
    lr = s.lr * warmed * math.sqrt(1 - s["beta2"] ** s.t)
    second = s.average("momentum1", s["beta2"], s.g**2)
    z = z - lr * (s.g / (np.sqrt(second) + s["eps"]) + s["weight_decay"] * s.w)
    largest = np.maximum(s.old("largest_rate"), lr)
    weight = s.t ** s["r"] * largest ** s["weight_lr_power"]
    total = s.old("weight_sum") + weight
    share = weight / total if total else 0.0
    x = (1 - share) * x + share * z
    s.slots.update(z=z, largest_rate=largest, weight_sum=total)
    return np.asarray((1 - beta1) * z + beta1 * x)


def sgd(s: Step) -> Array:
    """torch.optim.SGD: the first gradient is not damped."""
    g = s.with_penalty()
    return s.w - s.lr * (with_momentum(s, g, 1.0 if s.t == 1 else 1 - s["dampening"]) if s["momentum"] else g)


FORMULAS: dict[str, Callable[[Step], Array]] = {
    "Adadelta": adadelta,
    "Adafactor": adafactor,
    "Adagrad": adagrad,
    "Adam": adam,
    "AdamW": adamw,
    "Adamax": adamax,
    "LAMB": lamb,
    "LARS": lars,
    "Lion": lion,
    "Muon": muon,
    "NAdam": nadam,
    "RAdam": radam,
    "RMSprop": rmsprop,
    "SGD": sgd,
    "ScheduleFreeAdamW": schedule_free_adamw,
}


# The training.


def clipped(gradient: Array, settings: Mapping[str, float]) -> Array:
    """Clip the gradient of one parameter, before the norm of all gradients is computed."""
    if "max_value" in settings:
        gradient = np.clip(gradient, -settings["max_value"], settings["max_value"])
    if "max_norm_per_tensor" in settings:
        gradient = gradient * min(1.0, settings["max_norm_per_tensor"] / (norm(gradient) + CLIP_EPSILON))
    return gradient


@dataclass
class Group:
    """Settings of some parameters: of the formula, and ``max_value``, ``max_norm_per_tensor``, ``ema_decay``.

    The parameters do not change up to the step ``frozen_steps``. The formula counts the steps after it.
    """

    settings: dict[str, float]
    lr: float | None = None
    lr_factor: float = 1.0
    frozen_steps: int = 0


@dataclass
class Training:
    """Weights under an optimizer, each with its own group. The gradients are arguments of every step."""

    optimizer: str
    weights: dict[str, npt.NDArray[Any]]
    lr: float
    groups: dict[str, Group]
    flags: Mapping[str, bool]
    max_norm: float | None = None
    mean: bool = False
    storage: dict[str, npt.DTypeLike] = field(default_factory=dict)
    steps: int = 0
    own_steps: dict[str, int] = field(default_factory=dict)
    slots: dict[str, dict[str, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rounding in float16 is larger than a step, so 16-bit weights are rounded here as in ortrain.
        self.storage = {name: w.dtype if w.dtype.itemsize == 2 else np.float64 for name, w in self.weights.items()}
        self.weights = {name: np.asarray(w, np.float64) for name, w in self.weights.items()}
        self.own_steps = dict.fromkeys(self.weights, 0)
        self.slots = {name: {} for name in self.weights}

    def step(self, gathered: Sequence[Mapping[str, npt.NDArray[Any]]], factor: float = 1.0) -> float:
        """Update by the sum or mean of accumulated gradients, and return the norm before clipping.

        ``factor`` is the factor of a schedule.
        """
        self.steps += 1
        share = len(gathered) if self.mean else 1
        gradients = {
            name: clipped(sum(np.float64(g[name]) for g in gathered) / share, self.groups[name].settings)
            for name in self.weights
        }
        total = math.sqrt(sum(norm(g) ** 2 for g in gradients.values()))
        clip = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (total + CLIP_EPSILON))
        for name, w in self.weights.items():
            group, slots = self.groups[name], self.slots[name]
            if self.steps <= group.frozen_steps:
                continue
            self.own_steps[name] += 1
            # The rate of the optimizer is an input of its model, in float32.
            lr = float(np.float32(self.lr * factor)) * group.lr_factor if group.lr is None else group.lr * factor
            update = Step(w, clip * gradients[name], lr, self.own_steps[name], group.settings, self.flags, slots)
            new = np.asarray(FORMULAS[self.optimizer](update))
            if "ema_decay" in group.settings:
                decay = group.settings["ema_decay"]
                slots["ema"] = decay * slots.get("ema", w) + (1 - decay) * new
            self.weights[name] = new.astype(self.storage[name]).astype(np.float64)
        return total

    def average(self, name: str) -> Array:
        """Return the averaged weights of a parameter."""
        if self.optimizer == "ScheduleFreeAdamW":
            z = self.slots[name]["z"]
            return schedule_free_average(self.weights[name], z, self.groups[name].settings["beta1"])
        return self.slots[name]["ema"]


# Shapes and gradients.

SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "seven": (7,),
    "row": (300,),
    "matrix": (20, 30),
    "long": (100_000,),
}
# Smaller parameters of the same kinds, for tests with many combinations.
SMALL_SHAPES: dict[str, tuple[int, ...]] = {"one": (1,), "seven": (7,), "row": (70,), "matrix": (6, 5)}
# Number of steps with different gradients, more than any test has. The roundings of repeated gradients would add up.
POOL = 53
# Period of a long gradient: its elements repeat, but for powers of two.
PERIOD = 997
# Gradients are multiples of this value and at most 32, so that sums of a few are exact in float32.
GRID = 2.0**-14
# Values other than the defaults, at which each setting has an effect.
UNUSUAL: dict[str, float] = {
    # The shapes of slots depend on this setting, so it cannot change later.
    "adamw": 0.0,
    "adamw_eps": 0.1,
    "alpha": 0.9,
    "beta1": 0.85,
    "beta2": 0.97,
    "beta2_decay": -0.6,
    "d": 0.5,
    "dampening": 0.2,
    "eps": 0.1,
    "eps1": 0.05,
    "eps2": 0.02,
    "initial_accumulator_value": 0.1,
    "lr_decay": 0.01,
    "momentum": 0.8,
    "momentum_decay": 0.01,
    "r": 0.5,
    "ratio_max": 1.1,
    "ratio_min": 0.3,
    "rho": 0.8,
    "trust_coefficient": 0.01,
    "warmup_steps": 4.0,
    "weight_decay": 0.3,
    "weight_lr_power": 1.5,
}


def starting_weights(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: Any = np.float32) -> dict[str, Any]:
    """Return initial weights. The weights of ``seven`` are zero, a special case of norm ratios."""
    rng = np.random.default_rng(1)
    return {name: (rng.standard_normal(dims) * (name != "seven")).astype(dtype) for name, dims in shapes.items()}


def gradient_pool(weights: Mapping[str, npt.NDArray[Any]], grid: float = GRID) -> list[dict[str, Any]]:
    """Return gradients by parameter. One element of ``row`` has gradient zero.

    Long gradients repeat a period at different powers of two, on which rounding acts alike. The elements of one period
    avoid points at which a formula is ill conditioned.
    """
    rng = np.random.default_rng(2)
    pool = []
    for k in range(POOL):
        gradients = {}
        for name, w in weights.items():
            place = np.arange(w.size)
            g = rng.standard_normal(min(PERIOD, place.size))[place % PERIOD]
            g = np.round(g / grid / 16) * grid * 2.0 ** (4 - place // PERIOD % 5)
            g *= 2.0 ** (k % 3)
            g[0] *= name != "row"
            gradients[name] = g.reshape(w.shape).astype(w.dtype)
        pool.append(gradients)
    return pool


def prescribing_model(weights: Mapping[str, npt.NDArray[Any]]) -> ModelProto:
    """Return the sum of all weights, each times an input ``x_NAME``, which is therefore the gradient of that weight."""
    nodes, inputs = [], []
    for name, values in weights.items():
        nodes.append(helper.make_node("Mul", [name, f"x_{name}"], [f"{name}.products"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}.products"], [f"{name}.sum"], keepdims=0))
        nodes.append(helper.make_node("Cast", [f"{name}.sum"], [f"{name}.float"], to=TensorProto.FLOAT))
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        inputs.append(helper.make_tensor_value_info(f"x_{name}", kind, values.shape))
    nodes.append(helper.make_node("Sum", [f"{name}.float" for name in weights], ["loss"]))
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "graph", inputs, [loss], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
