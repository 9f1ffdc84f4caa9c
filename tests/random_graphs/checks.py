"""Properties of every random graph: correct results, gradients and steps, with reproducible bits."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer
from random_graphs.building import Value, declared, in_float32
from random_graphs.cases import Case, Trainable, wide_array, widened, with_loss
from random_graphs.oracle import Feeds, InvalidGraphError, Oracle
from random_graphs.smoothing import is_quantized, smoothed

BACKENDS = ("cpu", "reference")
# Tolerance of float32 results after a dozen nodes, relative to the largest element. Larger errors are measured.
FORWARD = 2e-5
# Tolerance of gradients, which are sums of more terms.
GRADIENT = 1e-4
# Tolerance of gradients in loops with saturating operators. 1 - y * y and y * (1 - y) lose digits for y near 1, in
# ortrain and in other runtimes. A nudge of an input does not measure this error.
SATURATED, SATURATING = 1e-3, {"Sigmoid", "Tanh", "Softmax", "Erf", "Gelu"}
# Rounding error per term of a sequential sum, as in the reference: at most one unit in the last place, and half of it
# for terms of similar size.
SUM = 2.0**-25
# Relative change of inputs and parameters that measures rounding errors: some units in the last place.
NUDGE = 3e-7
# Number of nudges, and the factor for the largest effect: another nudge may have a larger effect.
NUDGES, NUDGE_FACTOR = 3, 20.0
# Factor for the error of the oracle. A nudge does not show this error if terms cancel exactly.
ORACLE_FACTOR = 2.0
# A half type rounds each state of a recurrent layer, and the next state depends on the rounded state. The bounds of
# results and of gradients are multiples of the rounding error of the largest element. A nudge is a fraction of it.
HALF_ROUNDINGS, HALF_NUDGE = (8, 24), 0.125
# Step of central differences in float64. Differences of one and of two steps agree if the loss is smooth.
STEP = 2e-5
# Smaller steps for a loss that is not linear within STEP. A wrong gradient differs from the slope at every step.
STEEP_STEPS = [STEP / 16**k for k in range(1, 6)]
AGREEMENT = 1e-5
SLOPE = 1e-4
# Rounding error of a slope: 2^-52 over the step for the loss, and the same for the terms of the loss.
SLOPE_NOISE = 1e-9
DIRECTIONS = 3
# Documented limit of many gradients. A Squeeze without axes leaves the rank unknown if an axis is symbolic.
UNKNOWN_RANK = re.compile(r"\branks? (of .+ )?must be known\b")
MAX_PROGRAMS = 12


class FailedError(Exception):
    """Error of a failed check."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass
class Report:
    """Outcome of the checks of a graph."""

    kind: str | None = None
    """The first failed check, or ``None``."""
    detail: str = ""
    compared: dict[str, int] = field(default_factory=dict)
    """Number of comparisons of each kind, and of impossible comparisons with their reason."""
    operators: list[str] = field(default_factory=list)
    settled: bytes | None = None
    """The stored case as it was checked, or None for a seed."""

    def count(self, what: str) -> None:
        self.compared[what] = self.compared.get(what, 0) + 1


Slope = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def same(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return gradients


@dataclass
class Checks:
    """Checks of a case.

    ``tamper`` changes gradients before the comparison. Tests of these checks use it to insert an error.
    """

    case: Case
    tamper: Slope = same
    report: Report = field(default_factory=Report)

    def run(self) -> Report:
        """Run the checks up to the first failure."""
        self.report.operators = sorted(self.case.operators())
        oracle = Oracle(in_float32(self.case.model))
        self.expected = [oracle.run(feed) for feed in self.case.feeds]
        arrays = [numpy_helper.to_array(tensor) for tensor in self.case.model.graph.initializer]
        arrays += [array for feed in self.case.feeds for array in feed.values()]
        arrays += [array for results in self.expected for array in results]
        rounding = SUM * max(array.size for array in arrays)
        self.within, self.gradient_within = max(FORWARD, rounding), max(GRADIENT, rounding)
        self.nudge = NUDGE
        if self.case.rounding is not None:
            self.within, self.gradient_within = (count * self.case.rounding for count in HALF_ROUNDINGS)
            self.nudge = HALF_NUDGE * self.case.rounding
        try:
            self.check()
        except FailedError as failed:
            self.report.kind, self.report.detail = failed.kind, failed.detail
        return self.report

    def check(self) -> None:
        set_threads(1)
        self.forward()
        trainable = with_loss(self.case, self.expected)
        if not trainable.trained:
            self.report.count("no trained parameter")
            return
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            self.training(trainable)

    # Forward.

    def forward(self) -> None:
        names = [value.name for value in self.case.model.graph.output]
        for backend in BACKENDS:
            session = attempted(
                f"refused by InferenceSession on {backend}",
                lambda backend=backend: ortrain.InferenceSession(self.case.model, providers=[backend]),
            )
            for at, feed in enumerate(self.case.feeds):
                results = attempted(f"run refused on {backend}", lambda s=session, f=feed: s.run(None, f))
                for k, name in enumerate(names):
                    self.compare_forward(f"forward on {backend}", name, results[k], at, k)
        self.report.count("forward")

    def compare_forward(self, kind: str, name: str, got: np.ndarray, at: int, k: int) -> None:
        want = self.expected[at][k]
        if got.dtype != want.dtype:
            raise FailedError(kind, f"{name} is {got.dtype}, not {want.dtype}, at batch {at}")
        if close(got, want, self.within):
            return
        noise = self.oracle_noise(at)[k]
        if noise is None or close(got, want, self.within, NUDGE_FACTOR * noise):
            self.report.count("forward too sensitive")
            return
        if close(got, want, self.within, ORACLE_FACTOR * self.oracle_error(at, k)):
            self.report.count("oracle inexact")
            return
        raise FailedError(kind, f"{name} at batch {at}: {difference(got, want)}")

    def oracle_error(self, at: int, k: int) -> float:
        """Return the largest rounding error of the oracle in an output: the difference from its result in float64."""
        feeds = {name: wide_array(array) for name, array in self.case.feeds[at].items()}
        try:
            exact = Oracle(widened(self.case.model)).run(feeds)[k]
        except InvalidGraphError:
            return 0.0
        want = self.expected[at][k]
        if exact.shape != want.shape or want.dtype != np.float32:
            return 0.0
        finite = np.isfinite(exact) & np.isfinite(want)
        return float(np.abs(exact[finite] - want[finite]).max(initial=0))

    def oracle_noise(self, at: int) -> list[float | None]:
        """Return the largest change of each output by a nudge; None for a discontinuous output."""
        oracle, parameters = as_inputs(self.case.model, self.case.trained)
        runner = Oracle(in_float32(oracle))
        noise: list[float | None] = [0.0] * len(self.expected[at])
        for draw in range(NUDGES):
            rng = np.random.default_rng([self.case.seed, draw])
            feeds = {
                name: nudged(array, rng, self.nudge) for name, array in {**self.case.feeds[at], **parameters}.items()
            }
            for k, (moved, still) in enumerate(zip(runner.run(feeds), self.expected[at], strict=True)):
                if moved.shape != still.shape or noise[k] is None:
                    noise[k] = None
                elif still.dtype != np.float32:
                    noise[k] = noise[k] if np.array_equal(moved, still) else None
                elif not np.array_equal(np.isfinite(moved), np.isfinite(still)):
                    noise[k] = None
                else:
                    finite = np.isfinite(still)
                    noise[k] = max(noise[k] or 0.0, float(np.abs(moved[finite] - still[finite]).max(initial=0)))
        return noise

    # Training.

    def training(self, trainable: Trainable) -> None:
        oracle = Oracle(in_float32(trainable.model))
        self.losses = [float(oracle.run(feed)[0]) for feed in trainable.feeds]
        extra = trainable.outputs if self.case.asks_for_outputs else []
        made = self.artifacts(trainable, extra)
        if made is None:
            self.report.count("no trained parameter")
            return
        first = {}
        for backend in BACKENDS:
            first[backend] = [
                attempted(f"step refused on {backend}", lambda b=backend, at=at: made.step(at, device=b))
                for at in range(len(trainable.feeds))
            ]
            for at, step in enumerate(first[backend]):
                self.compare_loss(f"loss on {backend}", step.loss, at, trainable)
                for k, name in enumerate(extra):
                    self.compare_forward(f"outputs of a step on {backend}", name, step.outputs[k], at, k)
        cpu = first["cpu"]
        self.bits(made, cpu)
        wide = self.wide_gradients(trainable)
        for at, wanted in enumerate(wide):
            for backend in BACKENDS if wanted is not None else ():
                self.compare_gradients(
                    f"gradient on {backend}", first[backend][at].gradients, wanted, made, at, backend
                )
        self.step(made, cpu[0], trainable)

    def artifacts(self, trainable: Trainable, extra: Sequence[str]) -> Artifacts | None:
        """Return the artifacts, without parameters that the loss does not depend on.

        Central differences verify later that the slopes of these parameters are zero.
        """
        self.untrained: list[str] = []
        while trainable.trained:
            try:
                return Artifacts(trainable, self.folder / f"f32 {len(self.untrained)}", extra)
            except ortrain.OrtrainError as error:
                if UNKNOWN_RANK.search(str(error)):
                    self.report.count("gradient of an unknown rank refused")
                    return None
                if self.case.stops and "nothing would be trained" in str(error):
                    self.untrained += trainable.trained
                    return None
                refused = re.search(r'"(\w+)" cannot be trained: ', str(error))
                if refused is None or refused[1] not in trainable.trained:
                    raise FailedError(f"refused by generate_artifacts: {signature(str(error))}", str(error)) from error
                self.untrained.append(refused[1])
                trainable.trained = [name for name in trainable.trained if name != refused[1]]
        return None

    def compare_loss(self, kind: str, loss: float, at: int, trainable: Trainable) -> None:
        want = self.losses[at]
        parts = self.sizes(at)
        if np.isfinite(want) == np.isfinite(loss) and (
            not np.isfinite(want) or abs(loss - want) <= self.within * (1 + parts)
        ):
            return
        noise = self.oracle_noise(at)
        if any(one is None for one in noise):
            self.report.count("loss too sensitive")
            return
        weights = sum(
            one * float(np.abs(trainable.feeds[at][f"weights of {name}"]).sum())
            for one, name in zip(noise, trainable.outputs, strict=True)
            if one and f"weights of {name}" in trainable.feeds[at]
        )
        if not abs(loss - want) <= self.within * (1 + parts) + NUDGE_FACTOR * weights:
            raise FailedError(kind, f"at batch {at}: {loss} instead of {want}")

    def sizes(self, at: int) -> float:
        """Return the sum of the largest elements of all outputs, the terms of the loss."""
        return sum(largest(array) for array in self.expected[at] if array.dtype.kind == "f")

    def bits(self, files: Artifacts, cpu: Sequence[Step]) -> None:
        """Compare the bits of steps with three threads, repeated, after another batch size, and with a memory limit."""
        options = ortrain.SessionOptions()
        options.intra_op_num_threads = 3
        for at, step in enumerate(cpu):
            other = attempted("step refused at three threads", lambda at=at: files.step(at, options=options))
            same_bits("threads", step, other, f"at 3 threads instead of 1, batch {at}")
        set_threads(1)
        self.report.count("threads")
        state, module = files.module()
        total = None
        for at in (0, 1, 0):
            module.lazy_reset_grad()
            same_bits("second batch size", cpu[at], files.run(state, module, at), f"step {at} after another batch size")
            total = total or module.memory()
        self.report.count("second batch size")
        twice = files.run(state, module, 0)
        for name, gradient in cpu[0].gradients.items():
            # A sum that starts at the first gradient rounds in another order.
            if not close(twice.gradients[name], gradient + gradient, self.within):
                raise FailedError("accumulation", f"{name}: {difference(twice.gradients[name], gradient + gradient)}")
        state = CheckpointState.load_checkpoint(files.folder / "checkpoint")
        module = Module(files.folder / "training_model.onnx", state)
        fresh = files.run(state, module, at := self.case.seed % len(cpu))
        same_bits(
            "first step", cpu[at], fresh, f"as the first step of a module, without a reset of gradients, batch {at}"
        )
        assert total is not None
        self.memory_limit(files, cpu[0], total.parameters + total.gradients + 1)

    def memory_limit(self, files: Artifacts, first: Step, too_little: int) -> None:
        """Compare the bits within the smallest possible memory, which the error of a smaller limit names."""
        limited = ortrain.SessionOptions()
        limited.memory_limit = too_little
        # A schedule has several programs. A later program may need more memory than the earlier ones.
        for _ in range(MAX_PROGRAMS):
            try:
                step = files.step(0, options=limited)
            except ortrain.MemoryLimitError as error:
                required = re.search(r"takes (\d+) bytes", str(error))
                if required is None or int(required[1]) <= limited.memory_limit:
                    raise FailedError("memory limit", str(error)) from error
                limited.memory_limit = int(required[1])
                continue
            same_bits("memory limit", first, step, f"within {limited.memory_limit} bytes")
            self.report.count("memory limit")
            return
        self.report.count("memory limit not found")

    def differs_in_float64(self, wide: Trainable, at: int, loss: float) -> bool:
        """Return true if the loss equals the oracle's loss in float64, and differs from its loss in float32.

        In this case rounding selects a branch, or one of several equal elements.
        """
        allowed = self.within * (1 + self.sizes(at))
        if abs(loss - self.losses[at]) <= allowed:
            return False
        try:
            theirs = float(Oracle(wide.model).run(wide.feeds[at])[0])
        except InvalidGraphError:
            return False
        return abs(loss - theirs) <= allowed

    def wide_gradients(self, trainable: Trainable) -> list[dict[str, np.ndarray] | None]:
        """Return the gradients in float64 after a comparison with the slopes of the loss.

        The result has None for a batch size at which float64 takes other branches than float32.
        """
        wide = Trainable(
            widened(trainable.model),
            [{name: wide_array(array) for name, array in feed.items()} for feed in trainable.feeds],
            trainable.trained,
            trainable.outputs,
            trainable.stops,
        )
        made = attempted("refused by generate_artifacts in float64", lambda: Artifacts(wide, self.folder / "f64", []))
        steps = [
            attempted("step refused in float64", lambda at=at: made.step(at)) for at in range(len(trainable.feeds))
        ]
        model, parameters = as_inputs(wide.model, [*wide.trained, *self.untrained])
        del model.graph.output[1:]
        fixed = self.stopped(model, wide, parameters)
        if is_quantized(model):
            # The slopes of rounded values are zero or infinite; the gradients pass the rounding.
            given = [{**feed, **parameters, **more} for feed, more in zip(wide.feeds, fixed, strict=True)]
            model, constants = attempted("smooth form refused in float64", lambda: smoothed(model, given))
            fixed = [{**more, **constant} for more, constant in zip(fixed, constants, strict=True)]
        session = attempted("refused by InferenceSession in float64", lambda: ortrain.InferenceSession(model))
        gradients: list[dict[str, np.ndarray] | None] = []
        for at, step in enumerate(steps):
            gradients.append(self.tamper(step.gradients))
            if not np.isfinite(step.loss):
                self.report.count("loss is not finite")
                continue
            if self.case.special and not all(np.isfinite(one).all() for one in gradients[-1].values()):
                # The gradient of a weight that is multiplied by infinity may be zero times infinity.
                self.report.count("gradient is not finite")
                continue
            if self.differs_in_float64(wide, at, step.loss):
                self.report.count("other branches in float64")
                gradients[-1] = None
                continue
            self.compare_loss("loss in float64", step.loss, at, trainable)

            def loss(changed: Feeds, at: int = at) -> float:
                given = {**wide.feeds[at], **fixed[at], **changed}
                return float(attempted("run refused in float64", lambda: session.run(None, given))[0])

            zeros = {name: np.zeros_like(parameters[name]) for name in self.untrained}
            self.compare_slopes(loss, parameters, {**gradients[-1], **zeros}, at)
        return gradients

    def stopped(self, model: ModelProto, wide: Trainable, parameters: Feeds) -> list[Feeds]:
        """Replace the stops by inputs of the model; returns their values at each batch size."""
        if not self.case.stops:
            return [{} for _ in wide.feeds]
        every = ModelProto()
        every.CopyFrom(model)
        every.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in self.case.stops)
        session = attempted("refused by InferenceSession in float64", lambda: ortrain.InferenceSession(every))
        found = [
            dict(zip(self.case.stops, session.run(self.case.stops, {**feed, **parameters}), strict=True))
            for feed in wide.feeds
        ]
        for node in model.graph.node:
            for at, name in enumerate(node.output):
                if name in self.case.stops:
                    node.output[at] = f"{name} live"
        for name in self.case.stops:
            model.graph.input.append(declared(Value(name, tuple(values[name] for values in found))))
        return found

    def compare_slopes(
        self, loss: Callable[[Feeds], float], parameters: Feeds, gradients: dict[str, np.ndarray], at: int
    ) -> None:
        """Compare gradients with central differences of all parameters along random directions.

        The differences of one and of two steps must agree first.
        """
        rng = np.random.default_rng([self.case.seed, 77, at])
        names = sorted(parameters)
        compared = 0
        for draw in range(DIRECTIONS if at == 0 else 1):
            direction = {name: rng.uniform(-1, 1, parameters[name].shape) for name in names}
            values = {}
            for k in (-2, -1, 1, 2):
                values[k] = loss({name: parameters[name] + k * STEP * direction[name] for name in names})
            one, two = (values[1] - values[-1]) / (2 * STEP), (values[2] - values[-2]) / (4 * STEP)
            forward, backward = (values[2] - values[1]) / STEP, (values[-1] - values[-2]) / STEP
            terms = {name: gradients[name] * direction[name] for name in names}
            scale = sum(np.abs(term[np.isfinite(term)]).sum() for term in terms.values()) + abs(one)
            noise = SLOPE_NOISE * (1 + max(abs(value) for value in values.values()))
            # At a kink the slopes on both sides differ.
            smooth = abs(one - two) <= AGREEMENT * scale + noise and abs(forward - backward) <= 0.01 * scale + noise
            if not (smooth and np.isfinite(one)):
                self.report.count("slope at a kink")
                continue
            found = sum(float(term.sum()) for term in terms.values())
            if not abs(found - one) <= SLOPE * scale + noise:
                if self.is_steep(loss, parameters, direction, found):
                    self.report.count("slope of a steep loss")
                    continue
                each = self.blame(loss, parameters, gradients, at)
                raise FailedError("slope", f"at batch {at}, direction {draw}: {found} instead of {one}; {each}")
            compared += 1
        self.report.count("slope" if compared else "no smooth direction")

    def is_steep(self, loss: Callable[[Feeds], float], parameters: Feeds, direction: Feeds, found: float) -> bool:
        """Return true if smaller steps find the slope.

        The loss of a loop with a product in each iteration is not linear within a step.
        """
        for step in STEEP_STEPS:
            ends = [loss({name: parameters[name] + k * step * direction[name] for name in direction}) for k in (-1, 1)]
            if abs((ends[1] - ends[0]) / (2 * step) - found) <= SLOPE * abs(found):
                return True
        return False

    def blame(
        self, loss: Callable[[Feeds], float], parameters: Feeds, gradients: dict[str, np.ndarray], at: int
    ) -> str:
        """Return the parameters with a wrong gradient as text."""
        rng = np.random.default_rng([self.case.seed, 78, at])
        lines = []
        for name in sorted(parameters):
            direction = rng.uniform(-1, 1, parameters[name].shape)
            ends = [loss({**parameters, name: parameters[name] + k * STEP * direction}) for k in (-1, 1)]
            wanted, found = (ends[1] - ends[0]) / (2 * STEP), float((gradients[name] * direction).sum())
            if not abs(found - wanted) <= SLOPE * (abs(found) + abs(wanted)) + SLOPE_NOISE:
                lines.append(f"{name}: {found:.7g} instead of {wanted:.7g}")
        return "; ".join(lines) or "no single parameter is wrong"

    def compare_gradients(
        self,
        kind: str,
        gradients: dict[str, np.ndarray],
        wanted: dict[str, np.ndarray],
        made: Artifacts,
        at: int,
        backend: str,
    ) -> None:
        scale = max(map(largest, wanted.values()), default=0.0)
        noise: dict[str, float] | None = None
        for name, got in self.tamper(gradients).items():
            want = wanted[name]
            if close(got, want, self.gradient_within, 1e-2 * self.gradient_within * scale):
                continue
            if noise is None:
                noise = made.gradient_noise(at, backend, self.case.seed, self.nudge)
            if close(got, want, self.gradient_within, 1e-2 * self.gradient_within * scale + NUDGE_FACTOR * noise[name]):
                self.report.count("gradient sensitive")
                continue
            operators = self.case.operators()
            if operators & {"Loop", "Scan"} and operators & SATURATING and close(got, want, SATURATED):
                self.report.count("gradient of saturated values")
                continue
            raise FailedError(kind, f"{name} at batch {at}: {difference(got, want)}")
        self.report.count("gradient")

    def step(self, made: Artifacts, first: Step, trainable: Trainable) -> None:
        """Compare a step of SGD with its formula, and the next losses with the oracle at the new parameters."""
        state, module = made.module()
        optimizer = Optimizer(made.folder / "optimizer_model.onnx", module)
        before = {name: state.parameters[name].data.copy() for name in trainable.trained}
        # A power of two: the product with the gradient is exact, and only the difference is rounded.
        rate = 2.0 ** np.floor(np.log2(0.01 / max(1e-3, *map(largest, first.gradients.values()))))
        optimizer.set_learning_rate(float(rate))
        same_bits("second module", first, made.run(state, module, 0), "by a second module")
        attempted("optimizer step refused", optimizer.step)
        module.lazy_reset_grad()
        for name, value in before.items():
            want = value - np.float32(rate) * first.gradients[name]
            got = state.parameters[name].data
            if not np.array_equal(got, want, equal_nan=True):
                raise FailedError("optimizer step", f"{name}: {difference(got, want)}")
        if not np.isfinite(first.loss) or not all(np.isfinite(one).all() for one in first.gradients.values()):
            self.report.count("step with nonfinite gradients")
            return
        model, _ = as_inputs(trainable.model, trainable.trained)
        oracle = Oracle(in_float32(model))
        stepped = {name: np.array(state.parameters[name].data) for name in before}
        loss = float(oracle.run({**trainable.feeds[0], **stepped})[0])
        got = attempted("step refused after a step", lambda: made.run(state, module, 0)).loss
        wide = self.tolerance_of_loss(oracle, {**trainable.feeds[0], **stepped}, loss)
        if np.isfinite(loss) and not abs(got - loss) <= wide:
            raise FailedError("loss after a step", f"{got} instead of {loss}")
        module.eval()
        got = attempted("eval step refused", lambda: made.run(state, module, 0)).loss
        if np.isfinite(loss) and not abs(got - loss) <= wide:
            raise FailedError("eval loss after a step", f"{got} instead of {loss}")
        self.report.count("step")

    def tolerance_of_loss(self, oracle: Oracle, feeds: Feeds, loss: float) -> float:
        moved = []
        for draw in range(NUDGES):
            rng = np.random.default_rng([self.case.seed, 5, draw])
            nudges = {name: nudged(array, rng, self.nudge) for name, array in feeds.items()}
            moved.append(abs(float(oracle.run(nudges)[0]) - loss))
        parts = self.sizes(0)
        return self.within * (1 + parts) + NUDGE_FACTOR * max(moved)


@dataclass
class Step:
    """Results of a step."""

    loss: float
    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]


class Artifacts:
    """Artifacts in a folder, and steps with them."""

    def __init__(self, trainable: Trainable, folder: Path, extra: Sequence[str]) -> None:
        self.trainable, self.folder = trainable, folder
        folder.mkdir()
        artifacts.generate_artifacts(
            trainable.model,
            requires_grad=trainable.trained,
            optimizer=artifacts.OptimType.SGD,
            artifact_directory=folder,
            additional_output_names=list(extra),
            stop_gradients=trainable.stops or None,
            batch_norm="freeze",
        )

    def module(
        self, device: str = "cpu", options: ortrain.SessionOptions | None = None
    ) -> tuple[CheckpointState, Module]:
        state = CheckpointState.load_checkpoint(self.folder / "checkpoint")
        models = [self.folder / f"{name}_model.onnx" for name in ("training", "eval")]
        module = Module(models[0], state, models[1], device=device, session_options=options)
        # All steps after the first one of a training start with this call.
        module.lazy_reset_grad()
        return state, module

    def run(self, state: CheckpointState, module: Module, at: int, changed: Feeds | None = None) -> Step:
        feed = {**self.trainable.feeds[at], **(changed or {})}
        results = module(*(feed[name] for name in module.input_names()))
        loss, *outputs = results if isinstance(results, tuple) else (results,)
        gradients = {name: np.array(state.parameters[name].grad) for name in self.trainable.trained}
        return Step(float(loss), [np.asarray(one) for one in outputs], gradients)

    def step(self, at: int, device: str = "cpu", options: ortrain.SessionOptions | None = None) -> Step:
        state, module = self.module(device, options)
        return self.run(state, module, at)

    def gradient_noise(self, at: int, device: str, seed: int, nudge: float) -> dict[str, float]:
        """Return the largest change of each gradient by a nudge."""
        state, module = self.module(device)
        still = self.run(state, module, at).gradients
        noise = dict.fromkeys(still, 0.0)
        start = {name: state.parameters[name].data.copy() for name in still}
        for draw in range(NUDGES):
            rng = np.random.default_rng([seed, 9, draw])
            for name, value in start.items():
                state.parameters[name].data[...] = nudged(value, rng, nudge)
            feeds = {name: nudged(array, rng, nudge) for name, array in self.trainable.feeds[at].items()}
            module.lazy_reset_grad()
            moved = self.run(state, module, at, feeds).gradients
            for name, one in moved.items():
                finite = np.isfinite(one) & np.isfinite(still[name])
                noise[name] = max(noise[name], float(np.abs(one[finite] - still[name][finite]).max(initial=0)))
        return noise


def largest(array: np.ndarray) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0))


def set_threads(count: int) -> None:
    """Set the number of threads of the process, which the newest session determines."""
    options = ortrain.SessionOptions()
    options.intra_op_num_threads = count
    ortrain.InferenceSession(_nothing(), options)


def _nothing() -> ModelProto:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "nothing", [value], [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def attempted(kind: str, action: Callable[[], Any]) -> Any:
    """Return the result of an action that must not fail.

    The kind of a failure contains no names and numbers, so that equal failures of different graphs have one kind.
    """
    try:
        return action()
    except ortrain.OrtrainError as error:
        raise FailedError(f"{kind}: {signature(str(error))}", str(error)) from error


def signature(message: str) -> str:
    """Return the end of a message with placeholders for the names and numbers of a graph."""
    message = message.rsplit("): ", 1)[-1]
    return re.sub(r'"[^"]*"|\'[^\']*\'|\[[^]]*\]|\d+', "_", message)[:160]


def as_inputs(model: ModelProto, names: Sequence[str]) -> tuple[ModelProto, Feeds]:
    """Return the model with some initializers as inputs, and their values."""
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in names}
    kept = [
        TensorProto.FromString(tensor.SerializeToString()) for tensor in graph.initializer if tensor.name not in values
    ]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, value in values.items():
        graph.input.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        )
    return changed, values


def nudged(array: np.ndarray, rng: np.random.Generator, nudge: float) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    return np.asarray(array * (1 + nudge * rng.uniform(-1, 1, array.shape)), np.float32)


def close(got: np.ndarray, want: np.ndarray, relative: float, absolute: float = 0.0) -> bool:
    """Return true if two arrays agree, relative to the largest element.

    NaN and infinities must be at the same positions.
    """
    if got.shape != want.shape:
        return False
    if want.dtype.kind != "f":
        return bool(np.array_equal(got, want))
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0, want), np.where(np.isfinite(got), 0, got), equal_nan=True):
        return False
    allowed = relative * max(largest(want), 1e-2) + absolute
    return bool((np.abs(got[finite] - want[finite]) <= allowed).all())


def difference(got: np.ndarray, want: np.ndarray) -> str:
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    wrong = ~np.isclose(got.astype(np.float64), want.astype(np.float64), FORWARD, FORWARD * 1e-2, equal_nan=True)
    if not wrong.any():
        wrong = got != want
    spots = np.argwhere(wrong)[:3]
    pairs = [f"{got[tuple(spot)]} instead of {want[tuple(spot)]} at {spot.tolist()}" for spot in spots]
    return f"{int(wrong.sum())} of {got.size} elements: " + ", ".join(pairs)


def same_bits(kind: str, one: Step, other: Step, where: str) -> None:
    pairs = [("the loss", np.float64(one.loss), np.float64(other.loss))]
    pairs += [(f"output {k}", a, b) for k, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True))]
    pairs += [(name, one.gradients[name], other.gradients[name]) for name in one.gradients]
    for name, a, b in pairs:
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            raise FailedError(kind, f"{name} {where}: {difference(np.asarray(b), np.asarray(a))}")


def check(case: Case, tamper: Slope = same) -> Report:
    """Return the report of all checks of a case."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Checks(case, tamper).run()
