"""Command ``ortrain compare``: the same steps here, on the reference evaluator, on onnxruntime and on PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain import InferenceSession, _ortrain, gradient, inspect
from ortrain._command.on_torch import NEWEST_OPSET, TorchModel, missing_packages
from ortrain._command.option import UsageError
from ortrain._command.output import say
from ortrain._command.sources import describe_data, model_file, model_to_load, open_data, require
from ortrain._fit.data import Data
from ortrain._fit.description import describe
from ortrain._fit.losses import SAMPLE_WEIGHT
from ortrain._fit.model import Model
from ortrain._suggest import hint
from ortrain.callbacks import Callback
from ortrain.data import FileSource
from ortrain.errors import InvalidArgumentError, UnsupportedError

__all__ = ["compare"]

_MODEL_ARGUMENTS = ("loss", "optimizer", "learning_rate", "frozen", "precision", "seed")
_DEFAULT_STEPS, _DEFAULT_BATCH, _DEFAULT_TOLERANCE = 3, 8, 1e-4
# Gradients below this share of the largest one may be rounding errors: a bias before a normalization has the gradient
# zero. Adam moves such weights by a whole learning rate.
_NOISE = 1e-3
# Runtimes besides the reference evaluator.
_OPTIONAL = ("onnxruntime", "torch")
# onnxruntime logs errors only.
_ERRORS = 3

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor between two runtimes, relative to its largest element."""

    place: str
    share: float


def compare(settings: Mapping[str, Any]) -> int:
    """Print how much losses, gradients, parameters and activations differ between runtimes."""
    require(settings, "data")
    runtimes = _runtimes(settings)
    path = model_file(settings["model"])
    source = open_data(settings["data"], settings, describe(path))
    say("data", describe_data(source))
    tolerance = float(settings.get("tolerance", _DEFAULT_TOLERANCE))
    start = model_to_load(settings["model"])
    model, here = _trained(start, source, settings, settings.get("device", "auto"))
    _, there = _trained(start, source, settings, "reference")
    comparisons = {"reference evaluator, steps": list(_step_differences(here, there, _backward_order(path)))}
    comparisons |= _runtime_differences(model, source, settings, "onnxruntime" in runtimes)
    left_out = {name: "not installed" for name in _OPTIONAL if name not in runtimes and "runtimes" not in settings}
    if "torch" in runtimes:
        try:
            comparisons["torch, steps"] = list(_torch_differences(model, here, source, settings, _backward_order(path)))
        except UnsupportedError as error:
            if "runtimes" in settings:
                raise
            left_out["torch"] = f"left out: {error}"
    first: tuple[str, Difference] | None = None
    for runtime, differences in comparisons.items():
        largest = max(differences, key=lambda found: found.share)
        say(runtime, f"{len(differences)} tensors; largest difference {largest.share:.1e} ({largest.place})", width=30)
        if first is None:
            first = next(((runtime, found) for found in differences if not found.share <= tolerance), None)
    for runtime, reason in left_out.items():
        say(runtime, reason, width=30)
    if first is None:
        say("result", f"no tensor differs by more than {tolerance:g} of its largest element", width=30)
        return 0
    runtime, found = first
    say("result", f"the first tensor that differs: {found.place}, by {found.share:.1e} ({runtime})", width=30)
    return 1


def _runtimes(settings: Mapping[str, Any]) -> list[str]:
    """Return the optional runtimes: the chosen ones, or the installed ones.

    Raises:
        UsageError: for an unknown name.
        ImportError: if a chosen runtime is not installed.

    """
    missing = {"onnxruntime": [] if find_spec("onnxruntime") else ["onnxruntime"], "torch": missing_packages()}
    if "runtimes" not in settings:
        return [name for name in _OPTIONAL if not missing[name]]
    chosen: list[str] = settings["runtimes"]
    for name in chosen:
        if name not in missing:
            raise UsageError(f"--runtimes: expected {' and '.join(_OPTIONAL)}, got {name!r}{hint(name, missing)}")
        if missing[name]:
            packages = " ".join(missing[name])
            raise ImportError(f"the comparison with {name} needs {packages}: pip install {packages}", name=packages)
    return chosen


class _Recorder(Callback):
    """Callback that copies loss, gradients and parameters after each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, Array], dict[str, Array]]] = []
        self.start: dict[str, Array] = {}
        self._total = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Copy the parameters before the first step."""
        self.start = {name: np.array(found.data) for name, found in self.model.state.parameters if found.requires_grad}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Copy the values of a step."""
        # The loss in the logs is the mean since the epoch began; batches have equal sizes.
        total = float(logs["loss"]) * (batch + 1)
        trained = [(name, found) for name, found in self.model.state.parameters if found.requires_grad]
        gradients = {name: np.array(found.grad) for name, found in trained}
        self.steps.append((total - self._total, gradients, {name: np.array(found.data) for name, found in trained}))
        self._total = total


def _trained(path: str, source: FileSource, settings: Mapping[str, Any], device: str) -> tuple[Model, _Recorder]:
    """Train some steps on a device; return the model and the values of the steps."""
    arguments = {name: settings[name] for name in _MODEL_ARGUMENTS if name in settings}
    if "trainable" in settings:
        which = settings["trainable"]
        arguments["trainable"] = which[0] if len(which) == 1 else which
    classes = settings.get("classes")
    if classes == "auto":
        raise InvalidArgumentError("compare keeps the last layer; pass a number to --classes for a new one")
    model, recorder = Model(path, classes=classes, device=device, **arguments), _Recorder()
    model.fit(
        source,
        batch_size=_batch_size(source, settings),
        steps_per_epoch=settings.get("steps", _DEFAULT_STEPS),
        shuffle=False,
        callbacks=[recorder],
        verbose=0,
    )
    return model, recorder


def _batch_size(source: FileSource, settings: Mapping[str, Any]) -> int:
    size: int = settings.get("batch_size", _DEFAULT_BATCH)
    return min(size, len(source))


def _backward_order(path: str) -> dict[str, int]:
    """Return the layer of each parameter, counted from the outputs, where the gradients start."""
    found = inspect(path).parameters
    return {parameter.name: parameter.layer if parameter.layer is not None else len(found) for parameter in found}


def _step_differences(here: _Recorder, there: _Recorder, order: Mapping[str, int]) -> Iterator[Difference]:
    """Yield the differences of each step: the loss, the gradients from the outputs to the inputs, the parameters."""
    largest: dict[str, Array] = {}
    for number, (ours, theirs) in enumerate(zip(here.steps, there.steps, strict=True), 1):
        yield from _gradient_differences(number, ours, theirs, order)
        names = sorted(theirs[1], key=lambda name: order.get(name, len(order)))
        noise = _noise(theirs[1].values())
        for name in names:
            seen = np.abs(theirs[1][name])
            largest[name] = np.maximum(largest[name], seen) if name in largest else seen
        for name in names:
            moved = largest[name] > noise
            place = f"parameter {name!r} after step {number}"
            yield Difference(place, _share(ours[2][name][moved], theirs[2][name][moved]))


def _gradient_differences(
    number: int, ours: Sequence[Any], theirs: Sequence[Any], order: Mapping[str, int]
) -> Iterator[Difference]:
    """Yield the differences of the loss, and of the gradients from the outputs to the inputs."""
    yield Difference(f"loss of step {number}", _share(np.array(ours[0]), np.array(theirs[0])))
    noise = _noise(theirs[1].values())
    for name in sorted(theirs[1], key=lambda name: order.get(name, len(order))):
        yield Difference(f"gradient of {name!r} in step {number}", _share(ours[1][name], theirs[1][name], noise))


def _noise(gradients: Iterable[Array]) -> float:
    """Return the size below which an element of a gradient may be a rounding error."""
    return _NOISE * max((float(np.abs(value).max(initial=0)) for value in gradients), default=0.0)


def _torch_differences(
    model: Model, here: _Recorder, source: FileSource, settings: Mapping[str, Any], order: Mapping[str, int]
) -> Iterator[Difference]:
    """Yield the differences of losses and gradients from PyTorch. Each step begins with the parameters of this step."""
    import onnx

    engine, description = model._engine, model._description
    assert engine is not None
    targets = engine.targets(description)
    outputs = [description.outputs[0].name]
    if engine.plan.choice.losses is not None:
        if any(target.output is None or not target.output.is_scored for target in targets):
            raise UnsupportedError("the loss reads a tensor that is no output of the model")
        outputs = [target.output.scores.name for target in targets if target.output is not None]
    with tempfile.TemporaryDirectory(prefix="ortrain-") as temporary:
        path = str(Path(temporary, "trained.onnx"))
        model.export(path, outputs=outputs)
        exported = onnx.load(path)
        version = next((entry.version for entry in exported.opset_import if not entry.domain), 0)
        if version > NEWEST_OPSET:
            model.export(path, outputs=outputs, opset=NEWEST_OPSET)
            exported = onnx.load(path)
    there = TorchModel(exported, targets, list(here.start))
    layout = model._layout(engine)
    feed = model._feed(Data(source, None, {}, {}), layout, _batch_size(source, settings), shuffle=False, training=True)
    parameters = here.start
    for number, (ours, step) in enumerate(zip(here.steps, feed.epoch(0, 0, len(here.steps)), strict=True), 1):
        theirs = there.step(parameters, dict(zip(layout.names, step.arguments, strict=True)))
        yield from _gradient_differences(number, ours, theirs, order)
        parameters = ours[2]


def _share(ours: Array, theirs: Array, least: float = 0.0) -> float:
    """Return the largest difference relative to the largest element, or to ``least`` if that is larger."""
    if not theirs.size:
        return 0.0
    both = ours.astype(np.float64), theirs.astype(np.float64)
    if not np.array_equal(np.isfinite(both[0]), np.isfinite(both[1])):
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = float(np.nanmax(np.abs(both[0] - both[1]), initial=0))
    scale = max(float(np.abs(both[1]).max()), least)
    return difference / scale if scale else difference


def _runtime_differences(
    model: Model, source: FileSource, settings: Mapping[str, Any], on_onnxruntime: bool
) -> dict[str, list[Difference]]:
    """Return the differences of all activations, and of the gradients as plain ONNX, from other runtimes."""
    rows = np.arange(_batch_size(source, settings))
    batch = source.take(rows, 0, False)
    found: dict[str, list[Difference]] = {}
    with tempfile.TemporaryDirectory(prefix="ortrain-") as temporary:
        path = str(Path(temporary, "trained.onnx"))
        model.export(path)
        names = _ortrain.result_names(path)
        model.export(path, outputs=names)
        feeds = dict(batch.inputs)
        ours = InferenceSession(path).run(names, feeds)
        reference = InferenceSession(path, providers=["reference"]).run(names, feeds)
        found["reference evaluator, forward"] = _named(names, ours, reference)
        if not on_onnxruntime:
            return found
        found["onnxruntime, forward"] = _named(names, ours, _on_onnxruntime(path, names, feeds))
        gradients = _gradient_model(model, path)
        if gradients is not None:
            names = [output.name for output in InferenceSession(gradients).get_outputs()][1:]
            feeds |= _loss_feeds(gradients, batch.inputs, batch.targets)
            ours = InferenceSession(gradients).run(names, feeds)
            theirs = _on_onnxruntime(gradients, names, feeds)
            found["onnxruntime, gradients"] = _named(names, ours, theirs, _noise(theirs))
    return found


def _named(
    names: Sequence[str], ours: Sequence[Array], theirs: Sequence[Array], least: float = 0.0
) -> list[Difference]:
    triples = zip(names, ours, theirs, strict=True)
    return [Difference(repr(name), _share(np.asarray(a), np.asarray(b), least)) for name, a, b in triples]


def _gradient_model(model: Model, path: str) -> bytes | None:
    """Return the loss and the gradients of the trained parameters as plain ONNX; ``None`` if they cannot be written."""
    module = model.module
    loss = module.output_names()[0]
    trained = [name for name, parameter in model.state.parameters if parameter.requires_grad]
    model.export(path, outputs=[loss])
    try:
        return gradient.grad(path, of=loss, wrt=trained)
    except UnsupportedError:
        return None


def _loss_feeds(model: bytes, inputs: Mapping[str, Array], targets: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of the loss: targets in their type, and weights of one."""
    rest = [described for described in describe(model).inputs if described.name not in inputs]
    values = list(targets.values())
    feeds = {}
    for described in rest:
        assert described.dtype is not None
        if described.name == SAMPLE_WEIGHT:
            feeds[described.name] = np.ones(len(values[0]), described.dtype)
        else:
            feeds[described.name] = values.pop(0).astype(described.dtype)
    return feeds


def _on_onnxruntime(model: str | bytes, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
    """Run a model on onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS
    # Without rewrites, so that each tensor is computed as the model says.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    accepted = {described.name for described in session.get_inputs()}
    found: list[Array] = session.run(list(names), {name: feeds[name] for name in feeds if name in accepted})
    return found
