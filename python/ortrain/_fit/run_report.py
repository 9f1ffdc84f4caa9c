"""Report of a run: mistakes of the trained model, its parameters, and the cost of a step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain._fit.arrays import ArraySource
from ortrain._fit.data import Data
from ortrain._fit.description import Output
from ortrain._fit.feeds import Layout
from ortrain._fit.findings import Findings
from ortrain._fit.losses import IGNORED_LABEL, Target
from ortrain._fit.report import Report, TrainedParameter
from ortrain._inspect import inspect
from ortrain._ortrain import __version__
from ortrain.data import Batch
from ortrain.errors import OrtrainError
from ortrain.metrics import OutputForm

if TYPE_CHECKING:
    from ortrain._fit.history import History
    from ortrain._fit.model import Model

__all__ = ["report_of"]

# Rows that the search for mistakes reads at most, evenly spaced.
MAX_ROWS = 10_000
# Kinds of instructions that have a part of their own in the time of a step.
_SHOWN_KINDS = 4
# Words for kinds of instructions.
_KINDS = {
    "MatMul": "matrix products",
    "Conv": "convolutions",
    "Map": "element-wise",
    "Reduce": "reductions",
    "Attention": "attention",
    "Window": "pooling",
    "Inputs": "copies of inputs",
    "Outputs": "copies of results",
}


def report_of(
    model: Model,
    history: History,
    data: Data,
    validation: Data | None,
    config: Mapping[str, Any],
    seconds: float | None = None,
) -> Report:
    """Return the report of a run with the current weights of the model.

    Args:
        model: the model.
        history: loss and metrics.
        data: the training data, which is examined for mistakes if there is no validation data.
        validation: the validation data.
        config: the choices of the run.
        seconds: the duration of the training.

    """
    examined = data if validation is None else validation
    parameters = model.state.parameters
    trained = [TrainedParameter(name, parameter.shape) for name, parameter in parameters if parameter.requires_grad]
    names = {parameter.name for parameter in trained}
    source: Any = model._source
    weights = [info for info in inspect(source).parameters if info.role == "trained"]
    memory = model.module.memory()
    parts = {name: int(getattr(memory, name)) for name in ("parameters", "gradients", "moments", "work", "scratch")}
    name = Path(model._source).name if isinstance(model._source, str) else ""
    return Report(
        history=history,
        title=f"Training of {name}" if name else "Training",
        subtitle=str(history.params.get("loss", "")),
        range_test=model.range_test,
        findings=_findings(model, examined),
        findings_of="training" if validation is None else "validation",
        parameters=trained,
        frozen=sum(TrainedParameter(info.name, tuple(info.shape)).count for info in weights if info.name not in names),
        seconds=seconds,
        step_seconds=_step_seconds(model, data, int(history.params.get("batch_size") or 32)),
        step_bytes={name: size for name, size in parts.items() if size},
        settings=_shown_settings(config),
        version=__version__,
    )


def _shown_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices that were made, without the trained parameters and the loss, which the report has anyway."""
    settings = {name: value for name, value in config.get("settings", {}).items() if name != "trained"}
    rest = {name: value for name, value in config.items() if name not in ("settings", "choice", "range_test")}
    return {name: value for name, value in {**settings, **rest}.items() if value is not None}


def _findings(model: Model, data: Data) -> Findings | None:
    """Return the mistakes on data that can be read again, or ``None``."""
    layout = model._layout(model._built())
    if not layout.targets:
        return None
    target = layout.targets[0]
    output = target.output
    if output is None or output.activation == "choice" or hasattr(data.batches, "__next__"):
        return None
    names = layout.class_names.get(target.name)
    findings = Findings(
        _form(target, output),
        None if names is None else [str(name) for name in names],
        is_regression=target.kind in ("squares", "distances"),
    )
    inputs = Layout(layout.description.input_names, layout.description, (), {}, None, layout.fixed, False)
    with tempfile.TemporaryDirectory(prefix="ortrain-") as folder:
        session = model._session(Path(folder))
        for batch, rows in _batches(data, layout):
            count = len(batch)
            targets = layout._targets_of(batch, converted=isinstance(data.source, ArraySource))[target.name]
            arguments = inputs.padded([batch.inputs[name] for name in inputs.names], count)
            (result,) = session.run([output.name], dict(zip(inputs.names, arguments, strict=True)))
            readers: dict[str, Any] = {}
            for key, method in (("name", "row_name"), ("preview", "preview")):
                read = getattr(data.source, method, None)
                if read is not None and rows is not None:
                    readers[key] = partial(_read_row, read, rows)
            if "name" not in readers and rows is not None:
                readers["name"] = partial(_read_row, "row {:,}".format, rows)
            findings.update(batch.inputs, targets, np.asarray(result)[:count], **readers)
    return findings


def _read_row(read: Any, rows: Any, index: int) -> Any:
    return read(int(rows[index]))


def _form(target: Target, output: Output) -> OutputForm:
    """Return the form of an output for a loss of this target."""
    several = len(output.scores.shape) > 1 and output.scores.shape[-1] != 1
    return OutputForm(
        logits=output.activation in ("identity", "log_softmax"),
        class_axis=output.class_axis if target.kind in ("labels", "soft") else None,
        task=("multilabel" if several else "binary") if target.kind == "binary" else "multiclass",
        ignore_index=IGNORED_LABEL if target.kind == "labels" and len(output.scores.shape) > 2 else None,
    )


def _batches(data: Data, layout: Layout, size: int = 32) -> Iterator[tuple[Batch, Any]]:
    """Yield batches without augmentation, each with the indices of its rows, or with ``None`` if they have none."""
    if layout.fixed is not None:
        size = layout.fixed
    if data.source is None:
        seen = 0
        for item in data.batches:
            batch = layout.converted_batch(item)
            yield batch, None
            seen += len(batch)
            if seen >= MAX_ROWS:
                return
        return
    source = data.with_targets(layout.targets, layout.class_names).source
    assert source is not None
    rows = np.unique(np.linspace(0, len(source) - 1, min(len(source), MAX_ROWS)).astype(np.int64))
    for first in range(0, len(rows), size):
        taken = rows[first : first + size]
        yield source.take(taken, 0, False), taken


def _step_seconds(model: Model, data: Data, size: int) -> dict[str, float]:
    """Return the mean seconds of a training step by kind of instruction; empty if they cannot be measured."""
    engine = model._built()
    layout = model._layout(engine)
    if hasattr(data.batches, "__next__"):
        return {}
    for batch, _ in _batches(data, layout, size):
        arguments = layout.arguments_of(batch, converted=isinstance(data.source, ArraySource))
        try:
            profile = engine.module.train().profile(*arguments, steps=3)
        except OrtrainError:
            # A device that does not measure, or memory for the copies of a profile that is not there.
            return {}
        kinds: dict[str, float] = {}
        for instruction in profile.instructions:
            name = _KINDS.get(instruction.kind, instruction.kind)
            kinds[name] = kinds.get(name, 0.0) + instruction.total / len(profile.steps)
        order = sorted(kinds, key=lambda kind: -kinds[kind])
        shown = {kind: kinds[kind] for kind in order[:_SHOWN_KINDS]}
        rest = sum(kinds[kind] for kind in order[_SHOWN_KINDS:])
        return shown | ({"other": rest} if rest else {})
    return {}
