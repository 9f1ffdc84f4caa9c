"""Local training of a client: a ``Model`` with its ``fit``, or a module and an optimizer with batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ortrain._fit.data import Data, read_data
from ortrain._fit.model import Model
from ortrain._fit.order import batch_seed
from ortrain._fit.tables import Schema
from ortrain._suggest import hint
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.errors import InvalidArgumentError
from ortrain.flower._privacy import ExampleClipping, clip_per_example

__all__ = ["OPTIONS", "Trainee", "options_of", "state_of", "trainee_of"]

OPTIONS = ("batch_size", "clip_norm", "epochs", "learning_rate", "steps_per_epoch")
"""Options of the local training that the server may set in its configuration."""


@dataclass(frozen=True)
class Privacy:
    """Clipping with the generator of its noise."""

    clipping: ExampleClipping
    rng: np.random.Generator

    def gradients(self, module: Module, inputs: Iterable[Any]) -> float:
        """Set the gradients of a batch; returns the loss."""
        clipping = self.clipping
        return clip_per_example(
            module, *inputs, max_norm=clipping.max_norm, noise_multiplier=clipping.noise_multiplier, rng=self.rng
        )


class Trainee(Protocol):
    """Object that trains on the data of a client."""

    @property
    def state(self) -> CheckpointState:
        """State with the parameters."""
        ...

    def train(
        self, options: Mapping[str, Any], round_number: int, privacy: Privacy | None
    ) -> tuple[int, dict[str, float]]:
        """Train; returns the number of examples, and the loss with the metrics."""
        ...

    def evaluate(self) -> tuple[int, dict[str, float]]:
        """Evaluate; returns the number of examples, and the loss with the metrics."""
        ...


def trainee_of(built: Any, data: Any) -> Trainee:
    """Return the local training for the results of the functions ``build`` and ``data``.

    Raises:
        InvalidArgumentError: if ``built`` is neither a ``Model`` nor a pair of a module and an optimizer.

    """
    if isinstance(built, Model):
        return _FitTrainee(built, data)
    if (
        isinstance(built, tuple)
        and len(built) == 2
        and isinstance(built[0], Module)
        and isinstance(built[1], Optimizer)
    ):
        return _LoopTrainee(built[0], built[1], data)
    raise InvalidArgumentError(
        f"build must return an ortrain.Model, or a pair of a Module and an Optimizer, got {type(built).__name__}"
    )


def state_of(built: Any) -> CheckpointState:
    """Return the state of a ``Model``, of a pair of a module and an optimizer, or a state itself.

    Raises:
        InvalidArgumentError: for another object.
        OrtrainError: if a ``Model`` has no loss yet.

    """
    if isinstance(built, CheckpointState):
        return built
    if isinstance(built, Model):
        return built.state
    if isinstance(built, tuple) and built and isinstance(built[0], Module):
        return built[0]._state
    raise InvalidArgumentError(
        "build must return an ortrain.Model, a pair of a Module and an Optimizer, or a CheckpointState, got "
        f"{type(built).__name__}"
    )


def options_of(own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the client, overridden by the entries of the server.

    Raises:
        InvalidArgumentError: for an unknown option of the client. The server's other entries are ignored.

    """
    for name in own:
        if name not in OPTIONS:
            raise InvalidArgumentError(f"there is no training option {name!r}{hint(name, OPTIONS)}")
    return {**own, **{name: config[name] for name in OPTIONS if name in config}}


@dataclass
class _FitTrainee:
    """A ``Model`` on data that ``fit`` takes."""

    model: Model
    data: Any

    def __post_init__(self) -> None:
        x, y, weights = _parts(self.data)
        self._read: Data = read_data(x, y, weights, self.model._description, Schema())
        # The loss may depend on the targets.
        self.model._choose(self._read)

    @property
    def state(self) -> CheckpointState:
        return self.model.state

    def train(
        self, options: Mapping[str, Any], round_number: int, privacy: Privacy | None
    ) -> tuple[int, dict[str, float]]:
        chosen = dict(options)
        model, epochs = self.model, int(chosen.get("epochs", 1))
        rate = chosen.pop("learning_rate", None)
        if rate is not None:
            model._learning_rate = float(rate)
            model.optimizer.set_learning_rate(float(rate))
        # Each round has its own order of the rows, and its own Dropout masks.
        model._epochs_done = (round_number - 1) * epochs
        self.state.seed = batch_seed(model._seed, round_number)
        if privacy is not None:
            return self._train_privately(chosen, epochs, privacy)
        x, y, weights = _parts(self.data)
        counted: _Counted | None = None
        if self._read.source is None:
            x = counted = _Counted(x)
        history = model.fit(x, y, sample_weight=weights, verbose=0, **chosen)
        rows = len(self._read.source) if self._read.source is not None else 0
        if counted is not None:
            rows = counted.rows // max(1, epochs)
        return rows, {name: float(values[-1]) for name, values in history.items() if values}

    def _train_privately(
        self, chosen: Mapping[str, Any], epochs: int, privacy: Privacy
    ) -> tuple[int, dict[str, float]]:
        model = self.model
        for name in chosen:
            if name not in ("batch_size", "epochs", "steps_per_epoch"):
                raise InvalidArgumentError(f"the option {name!r} has no effect with clipping per example; remove it")
        engine = model._engine_for(self._read, weighted=False, training=True)
        layout = model._layout(engine)
        if layout.fixed is not None or self._read.is_weighted:
            raise InvalidArgumentError("clipping per example needs a model with an open batch axis, and no row weights")
        size = int(chosen.get("batch_size", 32))
        feed = model._feed(self._read, layout, size, shuffle=True, training=True, first_pass=model._epochs_done)
        total, rows = 0.0, 0
        for epoch in range(epochs):
            total, rows = 0.0, 0
            for step in feed.epoch(epoch, 0, chosen.get("steps_per_epoch")):
                total += privacy.gradients(engine.module, step.arguments) * step.rows
                rows += step.rows
                engine.optimizer.step()
                engine.module.lazy_reset_grad()
        return rows, {"loss": total / rows} if rows else {}

    def evaluate(self) -> tuple[int, dict[str, float]]:
        x, y, weights = _parts(self.data)
        counted: _Counted | None = None
        if self._read.source is None:
            x = counted = _Counted(x)
        found = self.model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
        rows = counted.rows if counted is not None else len(self._read.source)  # type: ignore[arg-type]
        return rows, {name: float(value) for name, value in found.items()}


@dataclass
class _LoopTrainee:
    """A module and an optimizer on batches: tuples of the inputs of a step, in the module's order."""

    module: Module
    optimizer: Optimizer
    data: Any

    @property
    def state(self) -> CheckpointState:
        return self.module._state

    def train(
        self, options: Mapping[str, Any], round_number: int, privacy: Privacy | None
    ) -> tuple[int, dict[str, float]]:
        for name in options:
            if name not in ("epochs", "learning_rate"):
                raise InvalidArgumentError(
                    f"a module has no training option {name!r}: data returns its batches; use an ortrain.Model"
                )
        if "learning_rate" in options:
            self.optimizer.set_learning_rate(float(options["learning_rate"]))
        self.state.seed = batch_seed(self.state.seed, round_number)
        self.module.train()
        total, rows = 0.0, 0
        for _ in range(int(options.get("epochs", 1))):
            total, rows = 0.0, 0
            for inputs, count in self._batches():
                loss = _loss(self.module(*inputs)) if privacy is None else privacy.gradients(self.module, inputs)
                self.optimizer.step()
                self.module.lazy_reset_grad()
                total += loss * count
                rows += count
        return rows, {"loss": total / rows} if rows else {}

    def evaluate(self) -> tuple[int, dict[str, float]]:
        total, rows = 0.0, 0
        self.module.eval()
        try:
            for inputs, count in self._batches():
                total += _loss(self.module(*inputs)) * count
                rows += count
        finally:
            self.module.train()
        return rows, {"loss": total / rows} if rows else {}

    def _batches(self) -> Iterator[tuple[tuple[Any, ...], int]]:
        for batch in self.data:
            inputs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
            yield inputs, len(inputs[0])


class _Counted:
    """Iterable of batches that counts the rows that pass."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.rows = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            first = batch[0] if isinstance(batch, (tuple, list)) else batch
            first = next(iter(first.values())) if isinstance(first, Mapping) else first
            self.rows += len(first)
            yield batch


def _loss(result: Any) -> float:
    return float(np.asarray(result[0] if isinstance(result, tuple) else result))


def _parts(data: Any) -> tuple[Any, Any, Any]:
    """Return x, y and the weights of rows."""
    if isinstance(data, tuple) and len(data) in (2, 3):
        x, y, *rest = data
        return x, y, rest[0] if rest else None
    return data, None, None
