"""Optimizers of the table: float64 formulas, onnxruntime, checkpoints, and errors."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import optimizers_page
import pytest
from conftest import Run
from optimizer_formulas import (
    FORMULAS,
    POOL,
    SHAPES,
    SMALL_SHAPES,
    UNUSUAL,
    Group,
    Training,
    gradient_pool,
    prescribing_model,
    starting_weights,
)

import ortrain
from ortrain import InvalidArgumentError, OrtrainError, optim
from ortrain.api import CheckpointState
from ortrain.schedules import Cosine, LRScheduler, Schedule, Warmup, resume

Gradients = Mapping[str, npt.NDArray[Any]]
# A row of the table.
Row = Any
ROWS: dict[str, Row] = {row.name: row for row in optim.table()}
EACH = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
# Every row with its default flags, and with each flag inverted.
FLAGS = [
    pytest.param(row, row.flags | flipped, id=f"{row.name}-{'-'.join(flipped)}".rstrip("-"))
    for row in ROWS.values()
    for flipped in [{}, *({flag: not default} for flag, default in row.flags.items())]
]
STEPS, SHORT_RUN_STEPS = 50, 10
# Tolerance relative to the largest weight. Weights and slots are float32: each step rounds a weight by up to half a
# unit, which is 6e-8 of the weight. 50 roundings add up like a random walk.
CLOSE = 1e-6
# Tolerance of Lion and full-speed LARS. Their steps have one size, so that all roundings of a weight may have the same
# sign.
CLOSE_OF = dict.fromkeys(("Lion", "LARS"), STEPS * 2.0**-24)
# Tolerance of moments. The decay rates of AdamWOptimizer are float32, which changes 1 - beta2 by 1.3e-5 of its value.
CLOSE_MOMENTS = 2e-5
# Tolerance of float64 weights. Their rates are float64, except for the optimizer's own rate, which the formulas round
# alike.
EXACT = 1e-12
# One and a half units of float16. Ortrain and the formulas may round a value between two float16 numbers differently.
HALF_CLOSE = 1.5 * 2.0**-10
SCHEDULE = Warmup(5, Cosine(total=60))
GATHERED = 3


# Optimizers in ortrain and in the formulas.


@dataclass
class Part:
    """A group of parameters: its pattern, the matching names, and the settings of the group."""

    params: Any
    names: Sequence[str]
    group: Group


@dataclass
class Plan:
    """An optimizer with settings; omitted settings have their defaults."""

    row: Row
    settings: dict[str, float] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    lr: float | None = None
    parts: Sequence[Part] = ()
    max_norm: float | None = None
    accumulation: str = "sum"
    # Options max_value, max_norm_per_tensor and ema_decay.
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = self.row.settings | self.settings
        self.flags = self.row.flags | self.flags
        self.lr = self.row.learning_rate if self.lr is None else self.lr

    def build(self) -> Any:
        """Build the optimizer of ortrain."""
        flags: dict[str, Any] = dict(self.flags)
        if "onnxruntime" in flags:
            flags["formula"] = "onnxruntime" if flags.pop("onnxruntime") else "pytorch"
        groups = []
        for part in self.parts:
            group: dict[str, Any] = {"params": part.params, **joined(part.group.settings)}
            if part.group.lr is None:
                group["lr_factor"] = part.group.lr_factor
            else:
                group["lr"] = part.group.lr
            groups.append(group | {"frozen_steps": part.group.frozen_steps})
        return getattr(optim, self.row.name)(
            self.lr,
            **joined(self.settings),
            **flags,
            **self.options,
            max_norm=self.max_norm,
            accumulation=self.accumulation,
            groups=groups,
        )

    def training(self, weights: Mapping[str, npt.NDArray[Any]]) -> Training:
        """Build the same training with the formulas."""
        common = self.settings | self.options
        rest = Group(dict(common))
        groups = dict.fromkeys(weights, rest)
        for part in self.parts:
            own = Group(common | part.group.settings, part.group.lr, part.group.lr_factor, part.group.frozen_steps)
            groups |= dict.fromkeys((name for name in part.names if name in weights), own)
        assert self.lr is not None
        mean = self.accumulation == "mean"
        return Training(self.row.name, dict(weights), self.lr, groups, self.flags, self.max_norm, mean)


def joined(settings: Mapping[str, float]) -> dict[str, Any]:
    """Return settings as the classes expect them, with the two betas as a pair."""
    given: dict[str, Any] = dict(settings)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    return given


def unusual(row: Row) -> dict[str, float]:
    """Return settings that differ from the defaults."""
    return {name: UNUSUAL[name] for name in row.settings}


def between(row: Row) -> dict[str, float]:
    """Return settings that differ from the defaults and from the unusual settings."""
    return {name: (default + UNUSUAL[name]) / 2 for name, default in row.settings.items()}


def two_parts(row: Row, frozen_steps: int = 3) -> list[Part]:
    """Return two groups; all other parameters form a third group."""
    return [
        Part(["o*", "row"], ["one", "row"], Group({"weight_decay": 0.1}, lr_factor=0.5)),
        Part("se*", ["seven"], Group(between(row), lr=2 * row.learning_rate, frozen_steps=frozen_steps)),
    ]


def grouped(row: Row, **changes: Any) -> Plan:
    """Return an optimizer with groups and unusual settings."""
    return Plan(row, **({"settings": unusual(row), "parts": two_parts(row)} | changes))


@functools.cache
def started(small: bool = False, dtype: str = "float32") -> dict[str, npt.NDArray[Any]]:
    """Return the initial weights."""
    return starting_weights(SMALL_SHAPES if small else SHAPES, np.dtype(dtype))


@functools.cache
def pool_of(small: bool = False, dtype: str = "float32") -> list[Gradients]:
    """Return gradients of the initial weights."""
    return list(gradient_pool(started(small, dtype)))


class Ours:
    """A training by ortrain."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.weights = started() if weights is None else weights
        self.plan, self.schedule, self.folder = plan, schedule, folder
        model = prescribing_model(self.weights)
        names = list(self.weights)
        ortrain.generate_artifacts(model, requires_grad=names, optimizer=plan.build(), artifact_directory=folder)
        self.run = Run(folder)
        self.scheduler = None if schedule is None else LRScheduler(self.run.optimizer, schedule)

    def loaded(self, checkpoint: str) -> Ours:
        """Continue the training from a checkpoint."""
        other = object.__new__(Ours)
        vars(other).update(vars(self))
        other.run = Run(self.folder, checkpoint)
        other.scheduler = resume(other.run.optimizer) if self.schedule else None
        return other

    def step(self, gathered: Sequence[Gradients]) -> float | None:
        """Take a step with accumulated gradients; returns the gradient norm."""
        module = self.run.module
        for gradients in gathered:
            module(*(gradients[name.removeprefix("x_")] for name in module.input_names()))
        norm = self.run.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        module.lazy_reset_grad()
        return norm

    def state(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return copies of a parameter's weights and slots."""
        parameter = self.run.state.parameters[name]
        return {"weights": parameter.data.copy()} | {slot: np.array(v) for slot, v in parameter.slots.items()}

    def bits(self) -> dict[str, dict[str, bytes]]:
        """Return the bytes of everything that an optimizer changes."""
        return {name: {key: v.tobytes() for key, v in self.state(name).items()} for name in self.weights}


class Both(Ours):
    """A training by ortrain and by the formulas."""

    def __init__(self, folder: Path, plan: Plan, *more: Any) -> None:
        super().__init__(folder, plan, *more)
        self.training = plan.training(self.weights)
        self.norms: list[float] = []

    def step(self, gathered: Sequence[Gradients]) -> float | None:
        factor = 1.0 if self.schedule is None else self.schedule(self.training.steps)
        norm = super().step(gathered)
        self.norms.append(self.training.step(gathered, factor))
        if self.plan.max_norm is None:
            assert norm is None
        else:
            assert norm == pytest.approx(self.norms[-1], rel=CLOSE)
        return norm

    def steps(self, count: int, pool: Sequence[Gradients], gathered: int = 1) -> None:
        """Take more steps with gradients of a pool."""
        for t in range(self.training.steps, self.training.steps + count):
            self.step([pool[k % POOL] for k in range(t * gathered, (t + 1) * gathered)])

    def check(self, tolerance: float | None = None, of_slots: float | None = None) -> None:
        """Compare weights and slots, each relative to the largest element of all parameters."""
        tolerance = CLOSE_OF.get(self.plan.row.name, CLOSE) if tolerance is None else tolerance
        found = {name: self.state(name) for name in self.weights}
        wanted = {name: {"weights": w} | self.training.slots[name] for name, w in self.training.weights.items()}
        for key in wanted["one"]:
            tolerance = tolerance if key == "weights" or of_slots is None else of_slots
            ours, theirs = ({f"{key} of {name}": values[key] for name, values in of.items()} for of in (found, wanted))
            assert_close(ours, theirs, tolerance)


def largest_of(arrays: Iterable[npt.NDArray[Any]]) -> float:
    return max(float(np.abs(values).max(initial=0.0)) for values in arrays)


def assert_close(found: Gradients, wanted: Gradients, tolerance: float) -> None:
    """Compare arrays relative to the largest element of all arrays."""
    largest = largest_of(wanted.values())
    for name, values in found.items():
        assert values.shape == np.shape(wanted[name]), name
        apart = largest_of([np.float64(values) - wanted[name]])
        assert apart <= tolerance * largest, f"{name}: {apart:.2e} beside {largest:.2e}"


# The table.


def test_classes_and_page_are_those_of_the_table() -> None:
    assert optimizers_page.CLASSES.read_text() == optimizers_page.classes(), "run make optimizers"
    assert optimizers_page.PACKAGE.read_text() == optimizers_page.package(), "run make optimizers"
    assert optimizers_page.PAGE.read_text() == optimizers_page.page(), "run make optimizers"


def test_every_row_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(ROWS)


@EACH
def test_classes_are_their_rows(row: Row) -> None:
    wanted: dict[str, Any] = {"lr": row.learning_rate, **joined(row.settings), **row.flags}
    if wanted.pop("onnxruntime", None) is not None:
        wanted["formula"] = "pytorch"
    wanted |= dict.fromkeys(("max_norm", "max_norm_per_tensor", "max_value", "ema_decay", "layer_decay"))
    wanted |= {"accumulation": "sum", "groups": ()}
    kind = getattr(optim, row.name)
    assert {name: p.default for name, p in inspect.signature(kind).parameters.items()} == wanted
    assert row.name in optim.__all__
    assert row.source


# The formulas.


@EACH
def test_defaults(row: Row, tmp_path: Path) -> None:
    both = Both(tmp_path, Plan(row))
    assert both.run.optimizer.get_learning_rate() == np.float32(row.learning_rate)
    both.steps(STEPS, pool_of())
    both.check(of_slots=CLOSE_MOMENTS if row.name == "AdamW" else None)
    for name, start in started().items():
        assert np.any(both.state(name)["weights"] != start), name


@EACH
def test_groups_with_a_schedule_and_a_clipped_mean_of_gathered_gradients(row: Row, tmp_path: Path) -> None:
    max_norm = 150.0
    both = Both(tmp_path, grouped(row, max_norm=max_norm, accumulation="mean"), None, SCHEDULE)
    both.steps(STEPS, pool_of(), GATHERED)
    assert min(both.norms) < max_norm < max(both.norms)
    both.check()


@pytest.mark.parametrize(("row", "flags"), FLAGS)
def test_flags(row: Row, flags: dict[str, bool], tmp_path: Path) -> None:
    settings = unusual(row)
    if flags.get("nesterov") and "dampening" in settings:
        settings["dampening"] = 0.0
    both = Both(tmp_path, Plan(row, settings, flags))
    both.steps(STEPS, pool_of())
    both.check()


@pytest.mark.parametrize("option", [{"max_value": 0.5}, {"max_norm_per_tensor": 20.0}, {"ema_decay": 0.7}], ids=str)
@EACH
def test_options(row: Row, option: dict[str, float], tmp_path: Path) -> None:
    both = Both(tmp_path, Plan(row, options=option))
    both.steps(SHORT_RUN_STEPS, pool_of())
    both.check()
    if "ema_decay" in option:
        assert "ema" in both.state("row")


@EACH
def test_all_options_on_a_sum_of_gathered_gradients(row: Row, tmp_path: Path) -> None:
    options = {"max_value": 0.5, "max_norm_per_tensor": 20.0, "ema_decay": 0.7}
    both = Both(tmp_path, grouped(row, options=options, max_norm=20.0))
    both.steps(SHORT_RUN_STEPS, pool_of(), GATHERED)
    assert max(both.norms) > 20
    both.check()


@EACH
def test_averages(row: Row, tmp_path: Path) -> None:
    averaging = {} if row.name == "ScheduleFreeAdamW" else {"ema_decay": 0.7}
    both = Both(tmp_path, grouped(row, options=averaging), started(small=True))
    both.steps(SHORT_RUN_STEPS, pool_of(small=True))
    found = {name: both.run.state.parameters[name].average for name in both.weights}
    assert_close(found, {name: both.training.average(name) for name in both.weights}, CLOSE)


def test_no_average(tmp_path: Path) -> None:
    ours = Ours(tmp_path, Plan(ROWS["Adam"]), started(small=True))
    with pytest.raises(OrtrainError, match="average"):
        _ = ours.run.state.parameters["row"].average


# This test trains float16 weights deliberately, so the warning is ignored.
@pytest.mark.filterwarnings("ignore:.*float16:ortrain.TrainingWarning")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", HALF_CLOSE), ("float64", EXACT)])
@EACH
def test_weights_of_other_types(row: Row, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Float16 weights have float32 slots; ortrain and the formulas round weights to float16 at every step."""
    both = Both(tmp_path, grouped(row, lr=0.05), started(True, dtype))
    both.steps(SHORT_RUN_STEPS, pool_of(True, dtype))
    for name in both.weights:
        kinds = {key: values.dtype for key, values in both.state(name).items()}
        assert kinds.pop("weights") == dtype
        assert set(kinds.values()) <= {np.dtype("float64" if dtype == "float64" else "float32")}
    both.check(tolerance)


# This test trains float16 weights deliberately, so the warning is ignored.
@pytest.mark.filterwarnings("ignore:.*float16:ortrain.TrainingWarning")
@EACH
def test_weights_of_several_types(row: Row, tmp_path: Path) -> None:
    def mixed(arrays: Gradients) -> Gradients:
        return {name: values.astype(np.float16 if name == "row" else np.float32) for name, values in arrays.items()}

    both = Both(tmp_path, grouped(row, lr=0.05, max_norm=20.0), mixed(started(True, "float16")))
    both.steps(SHORT_RUN_STEPS, [mixed(gradients) for gradients in pool_of(True, "float16")])
    both.check(HALF_CLOSE)


# Groups.


def test_patterns_of_groups(tmp_path: Path) -> None:
    def no_matrix(parameter: ortrain.ParameterInfo) -> bool:
        return len(parameter.shape) == 1 and parameter.name == "seven"

    parts = [
        Part(["on*", "matrix"], ["one", "matrix"], Group({"weight_decay": 0.1}, lr_factor=0.5)),
        Part(no_matrix, ["seven"], Group({}, lr=0.25, frozen_steps=2)),
    ]
    ours = Ours(tmp_path, Plan(ROWS["Adam"], parts=parts))
    groups = ours.run.optimizer.groups
    assert [sorted(group.parameters) for group in groups] == [["matrix", "one"], ["seven"], ["long", "row"]]
    assert [(group.lr, group.lr_factor, group.frozen_steps) for group in groups] == [
        (None, 0.5, 0),
        (0.25, 1.0, 2),
        (groups[-1].lr, 1.0, 0),
    ]
    assert groups[-1].lr == ours.run.optimizer.get_learning_rate()
    assert [group.weight_decay for group in groups] == [0.1, 0.0, 0.0]


@EACH
def test_frozen_steps(row: Row, tmp_path: Path) -> None:
    """A frozen group keeps weights and slots; its later training equals a fresh training."""
    part = Part("row", ["row"], Group({"weight_decay": 0.1}))
    pool, settings = pool_of(small=True), unusual(row)
    (tmp_path / "fresh").mkdir()
    fresh = Ours(tmp_path / "fresh", Plan(row, settings, parts=[part]), started(small=True))
    late = Part("row", ["row"], Group(part.group.settings, frozen_steps=3))
    ours = Ours(tmp_path, Plan(row, settings, parts=[late]), started(small=True))
    start = ours.bits()
    for t in range(3):
        ours.step([pool[t]])
    assert ours.bits()["row"] == start["row"]
    assert all(ours.bits()[name]["weights"] != start[name]["weights"] for name in ("one", "seven", "matrix"))
    for t in range(3, 7):
        ours.step([pool[t]])
        fresh.step([pool[t]])
    assert ours.bits()["row"] == fresh.bits()["row"] != start["row"]
    # A group that is frozen again later continues from its weights and slots.
    ours.run.optimizer.groups[0].frozen_steps = 9
    for t in range(2):
        ours.step([pool[t]])
    assert ours.bits()["row"] == fresh.bits()["row"]
    ours.step([pool[2]])
    fresh.step([pool[2]])
    assert ours.bits()["row"] == fresh.bits()["row"]


def set_later(ours: Both) -> None:
    """Change the groups of a training in ortrain and in the formulas."""
    groups = ours.run.optimizer.groups
    others = ours.training.groups["one"], ours.training.groups["seven"], ours.training.groups["matrix"]
    for name, value in between(ours.plan.row).items():
        setattr(groups[2], name, value)
        others[2].settings[name] = value
    groups[0].weight_decay = others[0].settings["weight_decay"] = 0.25
    groups[0].lr_factor = others[0].lr_factor = 2.0
    groups[1].lr = others[1].lr = 3 * ours.plan.row.learning_rate


@EACH
def test_settings_that_change_later_count_from_the_next_step(row: Row, tmp_path: Path) -> None:
    both = Both(tmp_path, grouped(row))
    both.steps(4, pool_of())
    set_later(both)
    both.check()
    both.steps(4, pool_of())
    both.check()


def test_settings_that_make_no_sense_are_refused_later_too(tmp_path: Path) -> None:
    ours = Ours(tmp_path, grouped(ROWS["Adam"]))
    group = ours.run.optimizer.groups[0]
    before = group.weight_decay, group.lr_factor, group.frozen_steps
    for name, value in (("weight_decay", -1.0), ("weight_decay", math.nan), ("lr_factor", -1.0), ("frozen_steps", -1)):
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(group, name, value)
    with pytest.raises(AttributeError, match="rho"):
        group.rho = 0.5
    assert (group.weight_decay, group.lr_factor, group.frozen_steps) == before


# Checkpoints.


@EACH
def test_resuming_is_exact(row: Row, tmp_path: Path) -> None:
    """A run resumes exactly. Each row saves at another step: frozen steps end before, during, or after it."""
    moment = 1 + list(ROWS).index(row.name) % 7
    plan = grouped(row, options={"ema_decay": 0.7}, max_norm=150.0, accumulation="mean", parts=two_parts(row, 4))
    whole = Both(tmp_path, plan, None, SCHEDULE)
    whole.steps(1, pool_of(), 2)
    set_later(whole)
    whole.steps(moment - 1, pool_of(), 2)
    CheckpointState.save_checkpoint(whole.run.state, tmp_path / "later", include_optimizer_state=True)
    again = whole.loaded("later")
    assert again.bits() == whole.bits()
    for t in range(5):
        gathered = [pool_of()[t], pool_of()[t + 1]]
        assert Ours.step(whole, gathered) == again.step(gathered)
    assert again.bits() == whole.bits()


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    ours = Ours(tmp_path, Plan(ROWS["Adadelta"]), started(small=True))
    ours.step([pool_of(small=True)[0]])
    CheckpointState.save_checkpoint(ours.run.state, tmp_path / "later", include_optimizer_state=True)
    Ours(tmp_path, Plan(ROWS["Adamax"]), started(small=True))
    with pytest.raises(OrtrainError) as error:
        Run(tmp_path, "later")
    for slot in ("square_average", "step_average", "momentum0", "largest_gradient"):
        assert slot in str(error.value)


# Models of optimizers.


def operators(path: Path) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("max_norm", [None, 1.0])
@EACH
def test_optimizers_that_onnxruntime_has_are_its_operators(row: Row, max_norm: float | None, tmp_path: Path) -> None:
    theirs = {"AdamW": "AdamWOptimizer", "SGD": "SGDOptimizerV2"}
    Ours(tmp_path, Plan(row, max_norm=max_norm), started(small=True))
    found = operators(tmp_path / "optimizer_model.onnx")
    if row.name in theirs:
        assert ("com.microsoft", theirs[row.name]) in found
    else:
        assert {domain for domain, _ in found} == {""}


class InRuntime:
    """An optimizer model in onnxruntime, with a sequence for each setting."""

    def __init__(self, ours: Both, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.training, self.names = ours.training, list(ours.weights)
        self.sequences = {"params": [ours.state(name)["weights"] for name in self.names]}
        for slot in ours.run.state.parameters[self.names[0]].slots:
            self.sequences[slot] = [ours.state(name)[slot] for name in self.names]
        self.norm: float | None = None

    def columns(self) -> dict[str, list[npt.NDArray[Any]]]:
        """Return the settings of the next step, a scalar for each parameter."""
        rows = []
        for name in self.names:
            group, step = self.training.groups[name], self.training.steps + 1
            rates = {"lr": group.lr or 0.0, "lr_factor": group.lr_factor if group.lr is None else 0.0}
            rows.append(rates | group.settings | {"skipped_steps": float(min(step, group.frozen_steps))})
        return {key: [np.array(row[key], np.float64) for row in rows] for key in rows[0]}

    def step(self, gathered: Sequence[Gradients]) -> None:
        sums = [np.asarray(sum(g[name] for g in gathered)) for name in self.names]
        feeds: dict[str, Any] = self.sequences | self.columns() | {"gradients": sums}
        feeds["learning_rate"] = np.array([self.training.lr], np.float32)
        feeds["step"] = np.array([self.training.steps + 1])
        feeds["gathered_steps"] = np.array([len(gathered)])
        feeds["max_norm"] = np.array([self.training.max_norm or 0.0])
        wanted = {value.name for value in self.session.get_inputs()}
        outputs = [value.name for value in self.session.get_outputs()]
        results = self.session.run(outputs, {name: value for name, value in feeds.items() if name in wanted})
        for name, value in zip(outputs, results, strict=True):
            if name == "gradient_norm":
                self.norm = float(value[0])
            else:
                self.sequences[name.removeprefix("updated_")] = value


def arrays(key: str, values: Sequence[Any]) -> Gradients:
    return {f"{key} {k}": np.asarray(value) for k, value in enumerate(values)}


@pytest.mark.parametrize("full", [False, True], ids=["alone", "with options"])
@pytest.mark.parametrize(("row", "flags"), FLAGS)
def test_optimizer_models_run_in_onnxruntime(row: Row, flags: dict[str, bool], full: bool, tmp_path: Path) -> None:
    options = {"max_value": 0.5, "max_norm_per_tensor": 2.0, "ema_decay": 0.7}
    settings = unusual(row)
    if flags.get("nesterov") and "dampening" in settings:
        settings["dampening"] = 0.0
    part = Part("row", ["row"], Group({"weight_decay": 0.1}, lr=0.02, frozen_steps=1))
    plan = Plan(row, settings, flags, parts=[part])
    if full:
        plan = Plan(row, settings, flags, None, [part], 2.5, "mean", options)
    both = Both(tmp_path, plan, started(small=True))
    path = tmp_path / "optimizer_model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    assert {domain for domain, _ in operators(path)} == {""}
    runtime = InRuntime(both, path)
    for t in range(4):
        gathered = pool_of(small=True)[t : t + 2]
        runtime.step(gathered)
        norm = both.training.step(gathered)
        assert runtime.norm == (pytest.approx(norm, rel=CLOSE) if full else None)
    for key, values in runtime.sequences.items():
        wanted = [
            both.training.weights[name] if key == "params" else both.training.slots[name][key] for name in both.weights
        ]
        assert_close(arrays(key, values), arrays(key, wanted), CLOSE)


# Numbers.


def test_no_bound_of_a_ratio(tmp_path: Path) -> None:
    """The default bound exceeds any ratio, so an infinite bound has the same result."""
    found = []
    for settings in ({}, {"ratio_max": math.inf}):
        ours = Ours(tmp_path, Plan(ROWS["LAMB"], settings), started(small=True))
        ours.step([pool_of(small=True)[0]])
        found.append(ours.bits())
    assert found[0] == found[1]


# Settings that may be negative.
SIGNED = {"beta2_decay", "dampening", "r", "weight_lr_power"}


def generate(optimizer: Callable[[], Any], folder: Path) -> None:
    model = prescribing_model(started(small=True))
    names = list(started(small=True))
    ortrain.generate_artifacts(model, requires_grad=names, optimizer=optimizer(), artifact_directory=folder)


@EACH
def test_settings_that_make_no_sense(row: Row, tmp_path: Path) -> None:
    for name, value in itertools.product(row.settings, (math.nan, -math.inf, -0.5)):
        if value == -0.5 and name in SIGNED:
            continue
        with pytest.raises(InvalidArgumentError, match=f"{name} (is|must be) "):
            generate(Plan(row, {name: value}).build, tmp_path)
        part = Part("row", ["row"], Group({name: value}))
        if "beta" not in name:
            with pytest.raises(InvalidArgumentError, match=f"{name} of group 0 (is|must be) "):
                generate(Plan(row, parts=[part]).build, tmp_path)
    for lr in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match=r"rate|lr (is|must be)"):
            generate(Plan(row, lr=lr).build, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: optim.Adam(betas=(0.9, 1.0)), "beta2 must be a number from 0 to below 1, got 1"),
    (lambda: optim.Lion(betas=(1.0, 0.9)), "beta1 must be a number from 0 to below 1, got 1"),
    (lambda: optim.ScheduleFreeAdamW(betas=(0.0, 0.9)), "beta1 must be a number between 0 and 1, got 0"),
    (lambda: optim.LARS(trust_coefficient=0.0), "trust_coefficient must be a finite number above 0, got 0"),
    (lambda: optim.Adam(max_norm=0.0), "max_norm must be a finite number above 0, got 0"),
    (lambda: optim.Adam(max_norm=math.nan), "max_norm must be finite, got nan"),
    (lambda: optim.LAMB(ratio_max=math.nan), "ratio_max must be finite or positive infinity, got nan"),
    (lambda: optim.Adam(max_norm_per_tensor=-1.0), "max_norm_per_tensor must be a finite number above 0, got -1"),
    (lambda: optim.Adam(max_value=0.0), "max_value must be a finite number above 0, got 0"),
    (lambda: optim.Adam(ema_decay=1.0), "ema_decay must be a number from 0 to below 1, got 1"),
    (lambda: optim.Adam(accumulation="average"), "accumulation"),
    (lambda: optim.AdamW(formula="tensorflow"), "tensorflow"),
    (lambda: optim.Adam(groups=[{"params": "rwo"}]), 'did you mean "row"'),
    (lambda: optim.Adam(groups=[{"params": ["row", "matrx"]}]), '"matrix"'),
    (lambda: optim.Adam(groups=[{"params": lambda parameter: False}]), "group 0"),
    (lambda: optim.Adam(groups=[{"weight_decay": 0.1}]), "params"),
    (lambda: optim.Adam(groups=[{"params": "row"}, {"params": ["r*", "one"]}]), "'row' is in groups 0 and 1"),
    (lambda: optim.Adam(groups=[{"params": "row", "rho": 0.5}]), "rho"),
    (lambda: optim.Adam(groups=[{"params": "row", "weight_decy": 0.5}]), "weight_decay"),
    (lambda: optim.Adam(groups=[{"params": "row", "lr": 0.1, "lr_factor": 0.1}]), "lr_factor"),
    (
        lambda: optim.Adam(groups=[{"params": "row", "lr": -0.1}]),
        "lr of group 0 must be finite and at least 0, got -0.1",
    ),
    (
        lambda: optim.Adam(groups=[{"params": "row", "lr_factor": math.nan}]),
        "lr_factor of group 0 must be finite, got nan",
    ),
    (lambda: optim.Adam(groups=[{"params": "row", "frozen_steps": -1}]), "frozen_steps"),
    (lambda: optim.Adam(groups=[{"params": "row", "max_value": 0.1}]), "max_value"),
]


@pytest.mark.parametrize(("optimizer", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_invalid_settings(optimizer: Callable[[], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        generate(optimizer, tmp_path)
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_slot_that_cannot_start_as_the_parameter_does(tmp_path: Path) -> None:
    """A description may not start a one-element slot as the parameter, which has more elements."""
    generate(optim.ScheduleFreeAdamW, tmp_path)
    model = onnx.load(tmp_path / "optimizer_model.onnx")
    entry = model.metadata_props[0]
    spec = json.loads(entry.value)
    for slot in spec["slots"]:
        slot["start"] = "parameter"
    entry.value = json.dumps(spec)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = ortrain.Module(tmp_path / "training_model.onnx", state)
    with pytest.raises(OrtrainError, match='"largest_rate" of the optimizer starts as a copy of the parameter'):
        ortrain.Optimizer(model, module)


def test_settings_that_an_optimizer_does_not_have() -> None:
    with pytest.raises(TypeError, match="rho"):
        optim.Adam(rho=0.5)
