"""Mean loss and metrics of a training or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ortrain._fit.description import Array, Description
from ortrain._fit.feeds import Layout, Step
from ortrain._fit.losses import IGNORED_LABEL, Target

__all__ = ["Meter", "RunningLogs", "metric_outputs"]

# Metrics read several small batches at once, up to these numbers.
_MAX_PENDING, _MAX_PENDING_BYTES = 32, 1 << 18
# Access by position, without the access by name of `Outputs`.
_item = tuple.__getitem__


def metric_outputs(metrics: Sequence[Any], targets: Sequence[Target], description: Description) -> tuple[str, ...]:
    """Return the outputs that metrics need."""
    if not metrics:
        return ()
    return tuple(dict.fromkeys(_output_name(target, description) for target in targets))


def _output_name(target: Target, description: Description) -> str:
    output = target.output
    if output is None or not output.is_scored:
        output = next((each for each in description.outputs if each.is_scored), description.outputs[0])
    return output.name


class Meter:
    """Mean loss, exact over batches of different sizes, and metrics.

    Args:
        metrics: names, metrics and functions.
        layout: the inputs of the module.
        outputs: the outputs of a step, in order; the first one is the loss.

    """

    def __init__(self, metrics: Sequence[Any], layout: Layout, outputs: Sequence[str]) -> None:
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
        self._metrics: list[tuple[Any, int, int]] = []
        if metrics:
            self._metrics = list(self._bind(metrics, positions, list(outputs)))
        # Pairs of a target and an output that metrics read, and their batches that no metric has read yet.
        self._pairs = list(dict.fromkeys((target, output) for _, target, output in self._metrics))
        self._pending: list[list[tuple[Array, Array]]] = [[] for _ in self._pairs]
        self._pending_bytes = 0

    def _bind(
        self, metrics: Sequence[Any], positions: Sequence[int], outputs: list[str]
    ) -> Iterator[tuple[Any, int, int]]:
        from copy import deepcopy

        from ortrain.metrics import OutputForm, get_all

        layout = self._layout
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
            for metric in get_all(
                [deepcopy(metric) if hasattr(metric, "reset") else metric for metric in metrics], form
            ):
                if len(layout.targets) > 1:
                    metric.name = f"{name}_{metric.name}"
                yield metric, position, outputs.index(name)

    @property
    def metrics(self) -> list[Any]:
        """The metrics, bound to their outputs."""
        return [metric for metric, _, _ in self._metrics]

    def reset(self) -> None:
        """Forget all batches."""
        self.total, self.weight = 0.0, 0.0
        self.losses.clear()
        self._forget_pending()
        for metric, _, _ in self._metrics:
            metric.reset()

    def _forget_pending(self) -> None:
        self._pending = [[] for _ in self._pairs]
        self._pending_bytes = 0

    def add(self, step: Step, result: Any) -> float:
        """Add the outputs of a step; returns the loss of the batch."""
        loss = float(_item(result, 0)) if self._several else float(result)
        arguments, rows, _ = step
        weight = rows if self._counted is None else _count(arguments[self._counted], rows)
        self.total += loss * weight
        self.weight += weight
        self.losses.append(loss)
        if self._pairs:
            self._add_outputs(arguments, rows, result)
        return loss

    def _add_outputs(self, arguments: Sequence[Array], rows: int, result: Any) -> None:
        for (target, output), pending in zip(self._pairs, self._pending):  # noqa: B905  (a check for each step)
            targets, outputs = arguments[target], _item(result, output)
            if self._fixed is not None and rows != self._fixed:
                targets, outputs = targets[:rows], outputs[:rows]
            pending.append((targets, outputs))
            self._pending_bytes += outputs.nbytes
        # The size of a group depends on the batches alone, so sums do not depend on where a run was stopped.
        if len(pending) >= _MAX_PENDING or self._pending_bytes > _MAX_PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        for pair, pending in zip(self._pairs, self._pending, strict=True):
            for targets, outputs in _joined(pending):
                for metric, target, output in self._metrics:
                    if (target, output) == pair:
                        metric.update(targets, outputs)
        self._forget_pending()

    def result(self, metric: Any) -> float:
        """Return the value of a metric over all batches, without a change of its sums."""
        if not self._pending_bytes:
            return float(metric.result())
        target, output = next((target, output) for each, target, output in self._metrics if each is metric)
        saved = metric.state()
        for targets, outputs in _joined(self._pending[self._pairs.index((target, output))]):
            metric.update(targets, outputs)
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
        return {"loss": self.loss, **{metric.name: float(metric.result()) for metric, _, _ in self._metrics}}

    def state(self) -> dict[str, Any]:
        """Return the values of a running epoch."""
        return {
            "total": self.total,
            "weight": self.weight,
            "losses": np.array(self.losses),
            "metrics": [metric.state() for metric, _, _ in self._metrics],
            "pending": [[[targets, outputs] for targets, outputs in pending] for pending in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a running epoch."""
        self.total, self.weight = float(state["total"]), float(state["weight"])
        self.losses[:] = np.asarray(state["losses"]).tolist()
        for (metric, _, _), saved in zip(self._metrics, state["metrics"], strict=True):
            metric.restore(saved)
        self._pending = [[(np.asarray(t), np.asarray(o)) for t, o in pending] for pending in state["pending"]]
        self._pending_bytes = sum(outputs.nbytes for pending in self._pending for _, outputs in pending)


def _joined(pending: Sequence[tuple[Array, Array]]) -> Sequence[tuple[Array, Array]]:
    """Return batches as one batch, if their rows have one shape."""
    if len(pending) < 2 or len({(targets.shape[1:], outputs.shape[1:]) for targets, outputs in pending}) > 1:
        return pending
    return [(np.concatenate([each[0] for each in pending]), np.concatenate([each[1] for each in pending]))]


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
