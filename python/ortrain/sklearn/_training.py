"""State of a training: the weights of a network, the optimizer moments, and the sessions that update them."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.gradient.excs import ConvergenceError
from ortrain.inference import InferenceSession, SessionOptions
from ortrain.sklearn import _graphs, _losses
from ortrain.sklearn._graphs import Array
from ortrain.sklearn._networks import Network

# A pass diverged if its loss exceeds the larger of the first batch's loss and a constant prediction's loss by this
# factor.
_ASTRAY = 1000.0
# Maximum number of elements, and of rows, in a prediction batch.
_BLOCK_SIZE, _BLOCK_ROWS = 1 << 20, 4096


@dataclass(frozen=True)
class Batches:
    """Rows, targets, row weights with mean 1, and the approximate loss of a constant prediction (`usual`)."""

    rows: Array
    targets: Array
    weights: Array
    usual: float

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self, size: int | None, rng: np.random.RandomState | None) -> Iterator[tuple[Array, Array, Array]]:
        """Yield all rows once, in batches of `size` rows; `rng` shuffles the rows if it is not None."""
        count = len(self)
        size = count if size is None else min(size, count)
        # The order does not matter for a single batch.
        order = None if rng is None or size == count else rng.permutation(count)
        for start in range(0, count, size):
            chosen: Any = slice(start, start + size) if order is None else order[start : start + size]
            yield self.rows[chosen], self.targets[chosen], self.weights[chosen]


class Training:
    """Weights of a network and their training. A pickle contains bytes; sessions are created at their first use."""

    def __init__(
        self,
        network: Network,
        *,
        loss: str,
        optimizer: artifacts.OptimType | artifacts.AdamW | artifacts.SGD,
        num_threads: int | None,
        seed: int,
    ) -> None:
        self.network = network
        self._num_threads = num_threads
        with tempfile.TemporaryDirectory() as folder:
            model = _losses.loss_model(network, loss)
            artifacts.generate_artifacts(
                model,
                requires_grad=network.trained,
                loss=None,
                optimizer=optimizer,
                artifact_directory=folder,
                additional_output_names=[info.name for info in model.graph.output[1:]],
            )
            self._train, self._eval, self._optimizer = (
                _content(folder, f"{name}_model.onnx") for name in ("training", "eval", "optimizer")
            )
            self._state = CheckpointState.load_checkpoint(_content(folder, "checkpoint"))
        self._state.seed = seed
        self._first: float | None = None
        self._programs: tuple[Module, Optimizer] | None = None
        self._session: InferenceSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": None, "_session": None}

    def _options(self) -> SessionOptions:
        options = SessionOptions()
        options.intra_op_num_threads = self._num_threads or 0
        return options

    def _module_and_optimizer(self) -> tuple[Module, Optimizer]:
        if self._programs is None:
            module = Module(self._train, self._state, self._eval, session_options=self._options())
            self._programs = module, Optimizer(self._optimizer, module)
        return self._programs

    def values(self) -> dict[str, Array]:
        """Return copies of the weights and the running statistics."""
        return {name: parameter.data.copy() for name, parameter in self._state.parameters}

    def restore(self, values: dict[str, Array]) -> None:
        """Replace the weights. The optimizer moments start again at zero."""
        self._state = CheckpointState.load_checkpoint(self._state.to_bytes())
        for name, value in values.items():
            self._state.parameters[name].data = value
        self._programs = self._session = None

    def run(self, batches: Batches, size: int | None, rng: np.random.RandomState | None, learning_rate: float) -> float:
        """Train for one pass over all rows, and return the mean loss.

        A pass fails if the loss or a weight is not finite. It also fails if the loss is far above the loss of the first
        batch and the loss of a constant prediction. The weights from before the pass are then restored, and a
        :class:`ConvergenceError` is raised.
        """
        module, optimizer = self._module_and_optimizer()
        optimizer.set_learning_rate(learning_rate)
        before = self.values()
        module.train()
        self._session = None
        total = 0.0
        for rows, targets, weights in batches.parts(size, rng):
            loss = float(module(rows, targets, weights)[0])
            if not math.isfinite(loss):
                self._astray(before, f"the loss of a batch is {loss}", learning_rate)
            if self._first is None:
                self._first = loss
            optimizer.step()
            module.lazy_reset_grad()
            total += loss * len(rows)
        mean = total / len(batches)
        if not all(np.isfinite(plane).all() for plane in self._state.trainable_planes()):
            self._astray(before, "a weight is not finite", learning_rate)
        at_first = max(batches.usual, self._first or 0.0)
        if mean > _ASTRAY * at_first:
            self._astray(
                before, f"the loss is {mean:.3g}, but was at most {at_first:.3g} at the beginning", learning_rate
            )
        return mean

    def _astray(self, before: dict[str, Array], what: str, learning_rate: float) -> None:
        self.restore(before)
        raise ConvergenceError(
            f"{what}, at a learning rate of {learning_rate:g}: use a smaller one, scale X (a StandardScaler in a "
            "pipeline does), or clip gradients (optimizer=artifacts.AdamW(max_norm=1.0)). The weights are those "
            "from before this pass"
        )

    def block(self, batch_size: int | None, row: tuple[int, ...]) -> int:
        """Return the number of rows to predict at once."""
        return max(batch_size or 1, min(_BLOCK_ROWS, _BLOCK_SIZE // max(math.prod(row), 1)))

    def scores(self, batches: Batches, size: int) -> Array:
        """Return the scores of the rows with the current weights, through the eval model."""
        module, _ = self._module_and_optimizer()
        module.eval()
        return np.concatenate([module(*part)[1] for part in batches.parts(size, None)])

    def predict(self, rows: Array, size: int) -> tuple[Array, ...]:
        """Return the outputs of :func:`_losses.prediction_model` for each row."""
        if self._session is None:
            model = _graphs.with_values(_losses.prediction_model(self.network), self.values())
            self._session = InferenceSession(model, self._options())
        session = self._session
        (model_input,) = session.get_inputs()
        blocks = [session.run(None, {model_input.name: rows[at : at + size]}) for at in range(0, len(rows), size)]
        return tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))

    def to_onnx(self) -> bytes:
        """Return the model with the current weights."""
        return _losses.inference_model(self.network, self.values())


def _content(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:  # noqa: PTH118, PTH123
        return file.read()
