"""Training loop: steps, validation, callbacks, and the position from which a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ortrain._fit.diagnosis import explained, not_finite
from ortrain._fit.engine import Engine
from ortrain._fit.feeds import Feed, Layout
from ortrain._fit.history import History
from ortrain._fit.interrupt import Interrupt
from ortrain._fit.meters import Meter, RunningLogs
from ortrain.errors import InvalidArgumentError

__all__ = ["Evaluation", "Training", "evaluate"]


@dataclass
class Evaluation:
    """Data of an evaluation."""

    feed: Feed
    layout: Layout
    meter: Meter
    steps: int | None = None


def evaluate(engine: Engine, evaluation: Evaluation, callbacks: Any) -> dict[str, float]:
    """Evaluate the current weights; returns the mean loss and the metrics."""
    module, meter, feed = engine.module, evaluation.meter, evaluation.feed
    meter.reset()
    for hook in callbacks.on_test_begin:
        hook(None)
    logs = RunningLogs(meter)
    module.eval()
    try:
        for at, step in enumerate(feed.epoch(0, 0, evaluation.steps)):
            for hook in callbacks.on_test_batch_begin:
                hook(at, None)
            try:
                result = module(*step.arguments)
            except InvalidArgumentError as error:
                raise explained(error, step, evaluation.layout, feed) from error
            loss = meter.add(step, result)
            if not math.isfinite(loss):
                problem = not_finite(loss, f"in batch {at} of the evaluation", step, evaluation.layout, feed)
                # A loss that overflows on good data is a result, and no reason to end a training.
                if isinstance(problem, InvalidArgumentError):
                    raise problem
            for hook in callbacks.on_test_batch_end:
                hook(at, logs)
    finally:
        module.train()
    if not meter.weight:
        raise InvalidArgumentError("the evaluation data has no batches")
    values = meter.values()
    for hook in callbacks.on_test_end:
        hook(dict(values))
    return values


@dataclass
class Training:
    """A run of ``fit``."""

    model: Any
    engine: Engine
    feed: Feed
    layout: Layout
    meter: Meter
    callbacks: Any
    history: History
    epochs: int
    steps_per_epoch: int | None
    accumulate: int
    scheduler: Any
    """Schedule of the learning rate; ``None`` for a constant one."""
    is_scheduled_by_metric: bool
    validation: Evaluation | None
    validation_freq: int
    save: Callable[[Training, bool], None] | None
    """Saves the position; the flag is true at the end of an epoch. ``None`` without a folder."""
    is_due: Callable[[int], bool] | None
    """Returns true if the position is to be saved after a step."""
    epoch: int = 0
    step: int = 0
    """Number of steps of the epoch that are done."""
    is_finished: bool = False
    is_unchanged: bool = False
    """True if the run was over when it was resumed."""

    def run(self, callback_states: Any) -> None:
        """Train to the last epoch.

        Raises:
            KeyboardInterrupt: after Ctrl-C. The position is saved.

        """
        model, callbacks = self.model, self.callbacks
        model.stop_training = False
        logs: dict[str, Any] = {}
        with Interrupt() as interrupt:
            for hook in callbacks.on_train_begin:
                hook(None)
            if callback_states is not None:
                callbacks.restore(callback_states)
            while self.epoch < self.epochs and not model.stop_training:
                for hook in callbacks.on_epoch_begin:
                    hook(self.epoch, None)
                if not self._train_epoch(interrupt):
                    break
                logs = self._end_epoch()
                if interrupt.requested:
                    break
            if interrupt.requested and self.save is not None:
                self.save(self, False)
            for hook in callbacks.on_train_end:
                hook(logs or None)
            self.is_finished = not interrupt.requested
            if self.is_finished and self.save is not None:
                self.save(self, True)
        if interrupt.requested:
            raise KeyboardInterrupt(self._interruption())

    def _interruption(self) -> str:
        where = f"after step {self.step} of epoch {self.epoch + 1}" if self.step else f"after epoch {self.epoch}"
        folder = self.model._run_folder
        if folder is None:
            return (
                f"interrupted {where}; the model has the weights of this step: save(folder) writes them, and fit "
                "trains on (with resume='run/', fit saves them itself)"
            )
        return f"interrupted {where}; saved in {folder}: fit(..., resume={str(folder)!r}) goes on"

    def _train_epoch(self, interrupt: Interrupt) -> bool:
        """Train an epoch, or its rest; returns false if it was interrupted."""
        engine, layout, feed, meter = self.engine, self.layout, self.feed, self.meter
        module, optimizer, scheduler = engine.module, engine.optimizer, self.scheduler
        accumulate, add, losses = self.accumulate, meter.add, meter.losses
        update, reset = optimizer.step, module.lazy_reset_grad
        by_step = scheduler is not None and not self.is_scheduled_by_metric
        begins, ends = self.callbacks.on_train_batch_begin, self.callbacks.on_train_batch_end
        logs = RunningLogs(meter)
        is_due, model, isfinite = self.is_due, self.model, math.isfinite
        if not self.step:
            meter.reset()
            self._rates: list[float] = []
        rate = optimizer.get_learning_rate()
        rates = self._rates
        rates.extend([rate] * (len(losses) - len(rates)))
        module.train()
        pending = 0
        for step in feed.epoch(self.epoch, self.step, self.steps_per_epoch):
            at = self.step
            for hook in begins:
                hook(at, logs)
            try:
                result = module(*step.arguments)
            except InvalidArgumentError as error:
                raise explained(error, step, layout, feed) from error
            if not isfinite(add(step, result)):
                raise self._failure(step)
            self.step = at + 1
            pending += 1
            rates.append(rate)
            if pending == accumulate:
                update()
                reset()
                pending = 0
                if by_step:
                    scheduler.step()
                    rate = optimizer.get_learning_rate()
            for hook in ends:
                hook(at, logs)
            if not pending:
                if interrupt.requested and self._is_inside(at + 1):
                    return False
                if is_due is not None and is_due(at) and self._is_inside(at + 1):
                    self.save(self, False)  # type: ignore[misc]
            if model.stop_training and ends:
                break
        if pending:
            update()
            reset()
            if by_step:
                scheduler.step()
        if not self.step:
            raise InvalidArgumentError("the data has no batches")
        return True

    def _is_inside(self, done: int) -> bool:
        """Return True if the epoch has more steps. The last step of an epoch is saved after the validation."""
        steps = self.steps_per_epoch or self.feed.steps_per_pass
        return steps is None or done < steps

    def _failure(self, step: Any) -> Exception:
        self.engine.module.lazy_reset_grad()
        where = f"in step {self.step + 1} of epoch {self.epoch + 1}"
        return not_finite(self.meter.losses[-1], where, step, self.layout, self.feed)

    def _end_epoch(self) -> dict[str, Any]:
        """Validate, tell the callbacks, and save."""
        logs: dict[str, Any] = self.meter.values()
        self.history.add_steps(loss=self.meter.losses, learning_rate=self._rates)
        if self.validation is not None and (self.epoch + 1) % self.validation_freq == 0:
            found = evaluate(self.engine, self.validation, self.callbacks)
            logs |= {f"val_{name}": value for name, value in found.items()}
        value = logs.get("val_loss", logs["loss"])
        if self.is_scheduled_by_metric and math.isfinite(value):
            self.scheduler.step(value)
        for hook in self.callbacks.on_epoch_end:
            hook(self.epoch, logs)
        self.history.add_epoch(self.epoch, logs)
        self.epoch, self.step = self.epoch + 1, 0
        self.meter.losses.clear()
        if self.save is not None:
            self.save(self, True)
        return logs

    def state(self) -> dict[str, Any]:
        """Return the position, and all that the rest of the run depends on besides weights and optimizer."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "epochs": self.epochs,
            "is_finished": self.is_finished or bool(self.model.stop_training and not self.step),
            "meter": self.meter.state() if self.step else None,
            "rates": list(self._rates) if self.step else [],
            "history": self.history.state(),
            "callbacks": self.callbacks.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self.history.restore(state["history"])
        self._rates = list(state["rates"])
        if state["meter"] is not None:
            self.meter.restore(state["meter"])
