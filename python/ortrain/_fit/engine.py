"""State, module and optimizer of a training, from a model and its loss."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortrain import artifacts
from ortrain._fit.description import Description
from ortrain._fit.losses import SAMPLE_WEIGHT, TARGET, Choice, Target
from ortrain._fit.optimizers import with_options
from ortrain._fit.trainable import Selection, arguments_of, renamed
from ortrain._model_source import ModelInFolder, ModelLike, PathLike
from ortrain._options import _public, own_options
from ortrain._stacklevel import level_of_user
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.errors import InvalidArgumentError, TrainingWarning
from ortrain.inference import SessionOptions

__all__ = ["FILES", "Engine", "Plan", "copied_options", "options_of", "precision_name"]

FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
"""Names of the files of a training."""

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "bfloat16x3": "bf16x3", "bfloat16x6": "bf16x6"}


@dataclass(frozen=True)
class Plan:
    """All choices that determine the files of a training."""

    model: ModelLike | ModelInFolder
    choice: Choice
    optimizer: Any
    trainable: Selection
    frozen: Selection
    outputs: tuple[str, ...] = ()
    """Outputs of the model that each step returns, for metrics."""
    clip_norm: float | None = None
    accumulate: int = 1
    weighted: bool = False
    """True if each row has a weight."""
    fixed: bool = False
    """True if the model has a fixed batch axis."""

    def generate(self, folder: Path | str, *, data_folder: str | None = None) -> None:
        """Write the files of the training to a folder. Their reader looks for a base in ``data_folder``.

        Raises:
            InvalidArgumentError, InvalidModelError, UnsupportedError: if the model cannot be trained like this.

        """
        choice = self.choice.weighted(self.fixed) if self.weighted else self.choice
        arguments = arguments_of(self.trainable, self.frozen)
        losses: Any = list(choice.losses) if isinstance(choice.losses, tuple) else choice.losses
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", TrainingWarning)
                model: Any = self.model
                artifacts.generate_artifacts(
                    model,
                    loss=losses,
                    optimizer=with_options(self.optimizer, self.clip_norm, self.accumulate),
                    artifact_directory=folder,
                    additional_output_names=list(self.outputs),
                    data_folder=data_folder,
                    **arguments,
                )
        except InvalidArgumentError as error:
            raise renamed(error) from error
        for warning in caught:
            warnings.warn(str(warning.message), warning.category, stacklevel=level_of_user())


def precision_name(precision: str) -> str:
    """Return the name of a precision in the core."""
    return _PRECISIONS.get(precision, precision)


def options_of(session_options: SessionOptions | None, memory_limit: int | None) -> SessionOptions | None:
    """Return the session options with a memory limit. The caller's object does not change."""
    if memory_limit is None:
        return session_options
    options = copied_options(session_options)
    options.memory_limit = memory_limit
    return options


def copied_options(session_options: SessionOptions | None) -> SessionOptions:
    """Return a copy of the session options."""
    options = SessionOptions()
    if session_options is not None:
        session_options = own_options(session_options)
        for name in _public(SessionOptions):
            setattr(options, name, getattr(session_options, name))
    return options


class Engine:
    """State, module and optimizer of a training.

    Args:
        plan: the choices.
        device: the device of the module.
        precision: the precision of inner products.
        options: options of the session.
        state: a state to continue with; ``None`` for the weights of the model.

    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str,
        precision: str,
        options: SessionOptions | None,
        state: CheckpointState | None = None,
    ) -> None:
        self.plan = plan
        self._device = device
        self._precision = precision_name(precision)
        self._options = options
        # The base of a model with adapters stays in its own folder.
        base = plan.model.folder if isinstance(plan.model, ModelInFolder) else None
        with tempfile.TemporaryDirectory(prefix="ortrain-") as temporary:
            plan.generate(temporary, data_folder=base)
            self._load(Path(temporary), state, base)
        self._base = base

    def _load(self, folder: Path, state: CheckpointState | None, base: str | None) -> None:
        training, evaluation, optimizer, checkpoint = (os.fspath(folder / name) for name in FILES)
        models: list[Any] = [training, evaluation]
        if base is not None:
            models = [ModelInFolder(Path(path).read_bytes(), base) for path in (training, evaluation)]
        self.state = CheckpointState.load_checkpoint(checkpoint) if state is None else state
        self.module = Module(models[0], self.state, models[1], self._device, self._options, precision=self._precision)
        self.optimizer = Optimizer(optimizer, self.module, replace=True)
        self.input_names = self.module.input_names()
        self._several = len(self.module.output_names()) > 1

    def with_state(self, state: CheckpointState) -> Engine:
        """Return an engine of the same plan on another state."""
        return Engine(self.plan, device=self._device, precision=self._precision, options=self._options, state=state)

    def with_plan(self, plan: Plan) -> Engine:
        """Return an engine of another plan on the same state; an optimizer of the same kind keeps its moments."""
        if plan == self.plan:
            return self
        rate = self.optimizer.get_learning_rate()
        engine = Engine(plan, device=self._device, precision=self._precision, options=self._options, state=self.state)
        engine.optimizer.set_learning_rate(rate)
        return engine

    def target_names(self, description: Description) -> list[str]:
        """Return the inputs of the training model that the forward model does not have, without the weights of rows."""
        forward = set(description.input_names)
        return [name for name in self.input_names if name not in forward and name != SAMPLE_WEIGHT]

    def targets(self, description: Description) -> tuple[Target, ...]:
        """Return the targets of the loss. A block of the caller has the new inputs of the training model."""
        names = self.target_names(description)
        known = {target.input: target for target in self.plan.choice.targets}
        if set(known) == set(names):
            return self.plan.choice.targets
        single = len(names) == 1
        return tuple(
            known[name] if name in known else Target(TARGET if single else name, name, "raw", None, "")
            for name in names
        )

    def weights(self) -> dict[str, Any]:
        """Return copies of all parameters by name."""
        return {name: parameter.data.copy() for name, parameter in self.state.parameters}

    def export_to_run(self, path: Path, outputs: Sequence[str]) -> ModelLike | ModelInFolder:
        """Write the model with the current weights to a temporary path, and return the model for a session."""
        self.module._native.export_model_for_inferencing(os.fspath(path), list(outputs), data_folder=self._base)
        return path if self._base is None else ModelInFolder(path.read_bytes(), self._base)

    def export(
        self, path: PathLike, outputs: Sequence[str], *, external_data: bool, average: bool, embed: bool
    ) -> None:
        """Write the model with the current weights."""
        self.module.export_model_for_inferencing(path, list(outputs), external_data, average=average, embed=embed)
