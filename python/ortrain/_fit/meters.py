"""Mean loss and metrics of a training or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ortrain._fit.description import Array, Description
from ortrain._fit.feeds import Layout, Step
from ortrain._fit.losses import IGNORED_LABEL, Target
from ortrain.errors import InvalidArgumentError

__all__ = ["Meter", "Metrics", "RunningLogs", "metric_outputs"]

# Positions of a target and of its weights among the arguments of a step, and of its output among the results.
_Source: TypeAlias = tuple[int, int, int | None]
# Targets, outputs and, for weighted metrics, weights of a batch.
_Part: TypeAlias = tuple[Array, ...]

# Metrics read several small batches at once, up to these numbers.
_MAX_PENDING, _MAX_PENDING_BYTES = 32, 1 << 18
# Access by position, without the access by name of `Outputs`.
_item = tuple.__getitem__


def metric_outputs(metrics: Metrics, targets: Sequence[Target], description: Description) -> tuple[str, ...]:
    """Return the outputs that metrics need."""
    if not metrics:
        return ()
    return tuple(dict.fromkeys(_output_name(target, description) for target in targets))


def _output_name(target: Target, description: Description) -> str:
    output = target.output
    if output is None or not output.is_scored:
        output = next((each for each in description.outputs if each.is_scored), description.outputs[0])
    return output.name


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model, as the caller passed them."""

    plain: Sequence[Any] = ()
    weighted: Sequence[Any] = ()
    """Metrics in which a row counts by its weight."""

    def __bool__(self) -> bool:
        return bool(self.plain or self.weighted)


class Meter:
    """Mean loss, exact over batches of different sizes, and metrics.

    Args:
        metrics: names, metrics and functions.
        layout: the inputs of the module.
        outputs: the outputs of a step, in order; the first one is the loss.

    """

    def __init__(self, metrics: Metrics, layout: Layout, outputs: Sequence[str]) -> None:
        self.total, self.weight = 0.0, 0.0
        self.losses: list[float] = []
        self._layout = layout
        self._fixed = layout.fixed
        self._several = len(outputs) > 1
        positions = layout.target_positions
        # Tokens that are ignored do not count in the mean of a batch.
        only = layout.targets[0] if len(layout.targets) == 1 else None
        counts = (
            only is not None and only.kind == "labels" and only.output is not None and len(only.output.scores.shape) > 2
        )
        self._counted = positions[0] if counts else None
        # Each metric with the positions of its target and its output, and with the flag of the weights.
        self._metrics: list[tuple[Any, _Source]] = []
        if metrics:
            self._metrics = list(self._bind(metrics, positions, list(outputs)))
        # Batches of each source that no metric has read yet.
        self._sources = list(dict.fromkeys(source for _, source in self._metrics))
        self._pending: list[list[_Part]] = [[] for _ in self._sources]
        self._pending_bytes = 0
        # One target and metrics without weights are the usual case, which each step handles without a loop.
        self._only = self._sources[0][:2] if len(self._sources) == 1 and self._sources[0][2] is None else None

    def _bind(self, metrics: Metrics, positions: Sequence[int], outputs: list[str]) -> Iterator[tuple[Any, _Source]]:
        from ortrain.metrics import OutputForm

        layout = self._layout
        weights = layout.weight_position
        for target, position in zip(layout.targets, positions, strict=True):
            output, name = target.output, _output_name(target, layout.description)
            form = OutputForm()
            if output is not None and target.kind in ("labels", "soft", "binary"):
                several = target.kind == "binary" and len(output.scores.shape) > 1 and output.scores.shape[-1] != 1
                form = OutputForm(
                    logits=output.activation in ("identity", "log_softmax"),
                    class_axis=output.class_axis if target.kind != "binary" else None,
                    task="multilabel" if several else "binary" if target.kind == "binary" else "multiclass",
                    ignore_index=IGNORED_LABEL if target.kind == "labels" and len(output.scores.shape) > 2 else None,
                )
            plain, weighted = _copies(metrics.plain, form), _copies(metrics.weighted, form)
            taken = {metric.name for metric in plain}
            for metric in weighted:
                if metric.name in taken:
                    metric.name = f"weighted_{metric.name}"
            for metric in (*plain, *weighted):
                if len(layout.targets) > 1:
                    metric.name = f"{name}_{metric.name}"
            for metric in plain:
                yield metric, (position, outputs.index(name), None)
            for metric in weighted:
                if weights is not None and not metric.takes_weights:
                    raise InvalidArgumentError(
                        f"{metric.name} of weighted_metrics is a function without an argument sample_weight; pass it "
                        "in metrics"
                    )
                yield metric, (position, outputs.index(name), weights)

    @property
    def metrics(self) -> list[Any]:
        """The metrics, bound to their outputs."""
        return [metric for metric, _ in self._metrics]

    def reset(self) -> None:
        """Forget all batches."""
        self.total, self.weight = 0.0, 0.0
        self.losses.clear()
        self._forget_pending()
        for metric, _ in self._metrics:
            metric.reset()

    def _forget_pending(self) -> None:
        self._pending = [[] for _ in self._sources]
        self._pending_bytes = 0

    def add(self, step: Step, result: Any) -> float:
        """Add the outputs of a step; returns the loss of the batch."""
        loss = float(_item(result, 0)) if self._several else float(result)
        arguments, rows, _ = step
        weight = rows if self._counted is None else _count(arguments[self._counted], rows)
        self.total += loss * weight
        self.weight += weight
        self.losses.append(loss)
        if self._only is not None and (self._fixed is None or rows == self._fixed):
            target, output = self._only
            outputs = _item(result, output)
            (pending,) = self._pending
            pending.append((arguments[target], outputs))
            self._pending_bytes += outputs.nbytes
            if len(pending) >= _MAX_PENDING or self._pending_bytes > _MAX_PENDING_BYTES:
                self._flush()
        elif self._sources:
            self._add_outputs(arguments, rows, result)
        return loss

    def _add_outputs(self, arguments: Sequence[Array], rows: int, result: Any) -> None:
        for (target, output, weights), pending in zip(self._sources, self._pending):  # noqa: B905  (each step)
            targets, outputs = arguments[target], _item(result, output)
            if self._fixed is not None and rows != self._fixed:
                targets, outputs = targets[:rows], outputs[:rows]
            part = (
                (targets, outputs) if weights is None else (targets, outputs, self._weights(arguments[weights], rows))
            )
            pending.append(part)
            self._pending_bytes += outputs.nbytes
        # The size of a group depends on the batches alone, so sums do not depend on where a run was stopped.
        if len(pending) >= _MAX_PENDING or self._pending_bytes > _MAX_PENDING_BYTES:
            self._flush()

    def _weights(self, weights: Array, rows: int) -> Array:
        """Return the weights of the rows, without the factor and the rows that fill up a fixed batch."""
        if self._fixed is None or rows == self._fixed:
            return weights
        own: Array = weights[:rows] / np.float32(self._fixed / rows)
        return own

    def _flush(self) -> None:
        for source, pending in zip(self._sources, self._pending, strict=True):
            for part in _joined(pending):
                for metric, own in self._metrics:
                    if own == source:
                        metric.update(*part)
        self._forget_pending()

    def result(self, metric: Any) -> float:
        """Return the value of a metric over all batches, without a change of its sums."""
        if not self._pending_bytes:
            return float(metric.result())
        source = next(source for each, source in self._metrics if each is metric)
        saved = metric.state()
        for part in _joined(self._pending[self._sources.index(source)]):
            metric.update(*part)
        value = float(metric.result())
        metric.reset()
        metric.restore(saved)
        return value

    @property
    def loss(self) -> float:
        """Mean loss of the batches since :meth:`reset`."""
        return self.total / self.weight if self.weight else float("nan")

    def values(self) -> dict[str, float]:
        """Return the mean loss and the metrics by name."""
        if self._pending_bytes:
            self._flush()
        return {"loss": self.loss, **{metric.name: float(metric.result()) for metric in self.metrics}}

    def state(self) -> dict[str, Any]:
        """Return the values of a running epoch."""
        return {
            "total": self.total,
            "weight": self.weight,
            "losses": np.array(self.losses),
            "metrics": [metric.state() for metric in self.metrics],
            "pending": [[list(part) for part in pending] for pending in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a running epoch."""
        self.total, self.weight = float(state["total"]), float(state["weight"])
        self.losses[:] = np.asarray(state["losses"]).tolist()
        for metric, saved in zip(self.metrics, state["metrics"], strict=True):
            metric.restore(saved)
        self._pending = [[tuple(map(np.asarray, part)) for part in pending] for pending in state["pending"]]
        self._pending_bytes = sum(part[1].nbytes for pending in self._pending for part in pending)


def _copies(metrics: Sequence[Any], form: Any) -> list[Any]:
    """Return metrics for an output. The objects of the caller stay unchanged."""
    from copy import deepcopy

    from ortrain.metrics import get_all

    return get_all([deepcopy(metric) if hasattr(metric, "reset") else metric for metric in metrics], form)


def _joined(pending: Sequence[_Part]) -> Sequence[_Part]:
    """Return batches as one batch, if their rows have one shape."""
    if len(pending) < 2 or len({(part[0].shape[1:], part[1].shape[1:]) for part in pending}) > 1:
        return pending
    return [tuple(map(np.concatenate, zip(*pending, strict=True)))]


def _count(labels: Array, rows: int) -> int:
    return int(np.count_nonzero(labels[:rows] != IGNORED_LABEL))


class RunningLogs(MutableMapping[str, Any]):
    """Loss and metrics of the running epoch, computed when a callback reads them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._names = ["loss", *(metric.name for metric in meter.metrics)]
        self._added: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._added:
            return self._added[name]
        if name == "loss":
            return self._meter.loss
        for metric in self._meter.metrics:
            if metric.name == name:
                return self._meter.result(metric)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._added[name] = value

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._names, *self._added)))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self._names, *self._added)))
