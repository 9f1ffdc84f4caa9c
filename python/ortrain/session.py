"""Training through one object: the ``TrainingSession`` of onnxruntime-training's C# interface.

It combines a ``Module``, an ``Optimizer`` and a ``LinearLRScheduler`` of :mod:`ortrain.api`, and gives the same bits.
``docs/csharp-training-session.md`` has a table from each member in C# to the member here.

>>> from ortrain.api import CheckpointState
>>> from ortrain.session import TrainingSession
>>> state = CheckpointState.load_checkpoint("checkpoint")
>>> with TrainingSession(state, "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx") as session:
...     for epoch in range(3):
...         (loss,) = session.train_step([x, labels])
...         session.optimizer_step()
...         session.lazy_reset_grad()
...     session.export_model_for_inferencing("trained.onnx", ["logits"])
>>> CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ortrain import _ortrain
from ortrain._inputs import input_value, native_value, outputs_like_inputs
from ortrain._model_source import ModelLike, PathLike, model_source
from ortrain._options import check_begin, native_options
from ortrain.api.checkpoint_state import CheckpointState
from ortrain.errors import OrtrainError, _warn_of_gradients
from ortrain.inference import RunOptions, SessionOptions
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    import numpy.typing as npt

    from ortrain.optim import ParameterGroup
    from ortrain.schedules import Factor, Schedule

__all__ = ["TrainingSession"]


class TrainingSession:
    """State and models of a training, from the first step to the export.

    The training model is required. :meth:`eval_step` and :meth:`export_model_for_inferencing` need the eval model.
    :meth:`optimizer_step` and the learning rate need the optimizer model. Each model is a path, the bytes of a model,
    or an ``onnx.ModelProto``. (In C# a third argument is the optimizer model; pass it by name here.) ``device`` is the
    device to run on, as for a :class:`~ortrain.api.Module`.

    Gradients start at zero and belong to the session. :attr:`Parameter.grad
    <ortrain.api.checkpoint_state.Parameter.grad>` shows the gradients of the newest session or module on the state.
    Parameters, moments, the learning rate and the step count belong to the state, which several sessions may share. A
    second thread waits for the first one and releases the interpreter lock meanwhile.

    :meth:`close`, or the end of a ``with`` block, releases everything but the state.

    >>> state = CheckpointState.load_checkpoint("checkpoint")
    >>> session = TrainingSession(state, "training_model.onnx", optimizer_model="optimizer_model.onnx")
    >>> session.input_names(training=True)
    ['x', 'labels']
    >>> session.close()
    """

    def __init__(
        self,
        state: CheckpointState,
        train_model: ModelLike,
        eval_model: ModelLike | None = None,
        optimizer_model: ModelLike | None = None,
        session_options: SessionOptions | None = None,
        device: str = "cpu",
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state must be a CheckpointState, got {type(state).__name__}")
        self._state = state
        self._device = _ortrain.device_name(device)
        self._schedule: Schedule | None = None
        state._take_seed()
        self._native = _ortrain.TrainingSession(
            state._native,
            model_source(train_model),
            None if eval_model is None else model_source(eval_model),
            None if optimizer_model is None else model_source(optimizer_model),
            options=native_options(session_options, self._device),
        )

    def __repr__(self) -> str:
        try:
            inputs = self.input_names(training=True)
        except OrtrainError as error:
            return f"TrainingSession(device={self._device!r}, cannot be used: {error})"
        return f"TrainingSession(inputs={inputs}, device={self._device!r}, precision={self.precision!r})"

    @property
    def device(self) -> str:
        """Device of the session, with its name in :func:`ortrain.devices`.

        >>> session.device
        'cpu'
        """
        return self._device

    @property
    def state(self) -> CheckpointState:
        """State of the session; still available after the session is closed.

        >>> session.state.parameters["fc2.bias"].data.shape
        (10,)
        """
        return self._state

    @property
    def precision(self) -> str:
        """Precision of inner products, as for a :attr:`Module <ortrain.api.Module.precision>`.

        >>> session.precision
        'f32'
        """
        return self._native.precision().name

    @property
    def bf16_unit(self) -> str | None:
        """Unit that multiplies bfloat16, as for a :attr:`Module <ortrain.api.Module.bf16_unit>`.

        >>> options = SessionOptions()
        >>> options.precision, options.bf16_fallback = "bf16", "emulated"
        >>> rounded = TrainingSession(state, "training_model.onnx", session_options=options)
        >>> rounded.bf16_unit in ("amx", "avx512_bf16", "emulated")
        True
        >>> rounded.close()
        """
        return self._native.precision().bf16_unit

    @overload
    def train_step(
        self, inputs: Sequence[OrtValue], outputs: None = None, run_options: RunOptions | None = None
    ) -> list[OrtValue]: ...
    @overload
    def train_step(
        self, inputs: Sequence[Any], outputs: None = None, run_options: RunOptions | None = None
    ) -> list[npt.NDArray[Any]]: ...
    @overload
    def train_step(
        self, inputs: Sequence[Any], outputs: Sequence[npt.NDArray[Any]], run_options: RunOptions | None = None
    ) -> None: ...
    def train_step(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[npt.NDArray[Any]] | None = None,
        run_options: RunOptions | None = None,
    ) -> list[Any] | None:
        """Compute the outputs of the training model and the gradients.

        ``inputs`` has one value for each of :meth:`input_names`, in order: an array, an :class:`~ortrain.OrtValue`, or
        an object with ``__array__`` or ``__dlpack__``. Lists and numbers are converted. The outputs are a list in the
        order of :meth:`output_names`, the loss first. If all inputs are :class:`~ortrain.OrtValue`, so are the outputs.
        Otherwise they are ndarrays, and a loss also behaves as a number (:class:`~ortrain.api.Scalar`).

        With ``outputs``, an array for each output, the results are written there and nothing is returned. Each array
        has the type and the shape of its output, with any strides and byte order; any other array is an error before
        the step. Two of these arrays must not share memory. An output may share memory with an input, because inputs
        are read before outputs are written.

        The gradients are added to the existing ones, or replace them in the first step after :meth:`lazy_reset_grad`.
        No trainable parameter changes. A failing step changes nothing. The step is an error if ``terminate`` is set in
        ``run_options``.

        >>> (loss,) = session.train_step([x, labels])
        >>> loss.shape
        ()
        >>> room = np.empty((), np.float32)
        >>> session.train_step([x, labels], outputs=[room])
        >>> bool(room == loss)
        True
        """
        check_begin(run_options)
        return self._step(inputs, outputs, training=True)

    @overload
    def eval_step(
        self, inputs: Sequence[OrtValue], outputs: None = None, run_options: RunOptions | None = None
    ) -> list[OrtValue]: ...
    @overload
    def eval_step(
        self, inputs: Sequence[Any], outputs: None = None, run_options: RunOptions | None = None
    ) -> list[npt.NDArray[Any]]: ...
    @overload
    def eval_step(
        self, inputs: Sequence[Any], outputs: Sequence[npt.NDArray[Any]], run_options: RunOptions | None = None
    ) -> None: ...
    def eval_step(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[npt.NDArray[Any]] | None = None,
        run_options: RunOptions | None = None,
    ) -> list[Any] | None:
        """Compute the outputs of the eval model; inputs and outputs are as for :meth:`train_step`.

        >>> (loss,) = session.eval_step([x, labels])
        >>> room = np.empty_like(loss)
        >>> session.eval_step([x, labels], outputs=[room])
        >>> bool(room == loss)
        True
        """
        check_begin(run_options)
        return self._step(inputs, outputs, training=False)

    def _step(
        self, inputs: Sequence[Any], outputs: Sequence[npt.NDArray[Any]] | None, *, training: bool
    ) -> list[Any] | None:
        arguments = _collection("inputs", inputs)
        described = self._native.inputs(training)
        if len(described) == len(arguments):
            values = list(map(input_value, arguments, described))
        else:
            # The core reports the expected number of inputs.
            values = [native_value(value) for value in arguments]
        if outputs is None:
            return outputs_like_inputs(self._native.step(values, training), arguments)
        buffers = list(_collection("outputs", outputs))
        for at, buffer in enumerate(buffers):
            if not isinstance(buffer, np.ndarray):
                raise TypeError(f"outputs[{at}] must be a NumPy array, got {type(buffer).__name__}")
        self._native.step_into(values, buffers, training)
        return None

    def lazy_reset_grad(self) -> None:
        """Let the next training step overwrite the gradients instead of adding to them. They stay until then.

        >>> session.lazy_reset_grad()
        """
        self._native.lazy_reset_grad()

    def optimizer_step(self, run_options: RunOptions | None = None) -> float | None:
        """Update the trainable parameters from the gradients; return the gradient norm if gradients are clipped.

        The gradients do not change, unless the optimizer model clips them: then they are the clipped gradients.

        The step is an error if ``terminate`` is set in ``run_options``, or if no training step ran since
        :meth:`lazy_reset_grad`. It warns (:class:`~ortrain.errors.TrainingWarning`) if there was no training step at
        all, or if the step before used the same gradients.

        >>> _ = session.train_step([x, labels])
        >>> session.optimizer_step()
        >>> session.lazy_reset_grad()
        """
        check_begin(run_options)
        update = self._native.optimizer_step()
        _warn_of_gradients(update.warning)
        return update.norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next steps, a float32.

        Raises:
            OrtrainError: if a scheduler is registered, because it decides the rate; without an optimizer model.

        >>> session.set_learning_rate(0.5)
        >>> session.get_learning_rate()
        0.5

        """
        self._native.set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the current rate, a float32. It is 0.001 unless it was set, scheduled or loaded.

        >>> round(session.get_learning_rate(), 6)
        0.001
        """
        return self._native.learning_rate()

    def register_linear_lr_scheduler(self, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        """Let :meth:`scheduler_step` set a linear rate: up from zero to ``initial_lr``, then down to zero.

        Let t be the number of completed optimizer steps, W of warm-up steps, and T of all steps. The rate is
        ``initial_lr`` times ``t / W`` while t < W, and times ``max(0, (T - t) / (T - W))`` from then on. Before the
        first :meth:`scheduler_step` it is ``initial_lr``.

        Raises:
            OrtrainError: if a scheduler is already registered; without an optimizer model.

        >>> session.register_linear_lr_scheduler(warmup_step_count=2, total_step_count=4, initial_lr=1.0)
        >>> rates = [session.get_learning_rate()]
        >>> for step in range(5):
        ...     session.scheduler_step()
        ...     rates.append(session.get_learning_rate())
        ...     _ = session.train_step([x, labels])
        ...     session.optimizer_step()
        ...     session.lazy_reset_grad()
        >>> rates
        [1.0, 0.0, 0.5, 1.0, 0.5, 0.0]

        """
        self._native.register_linear_lr_scheduler(warmup_step_count, total_step_count, initial_lr)
        self._schedule = None

    def register_lr_scheduler(self, schedule: Schedule | Factor, lr: float | None = None) -> None:
        """Let :meth:`scheduler_step` set the rate by any schedule, and set the rate for the steps done so far.

        Args:
            schedule: a schedule of :mod:`ortrain.schedules`, or a function from steps to a factor.
            lr: the learning rate that the factors multiply; ``None`` for the current rate of the optimizer.

        Raises:
            OrtrainError: if a scheduler is already registered; without an optimizer model.
            InvalidArgumentError: if ``lr``, or the resulting rate, is negative, infinite or NaN.

        >>> from ortrain import schedules
        >>> session.register_lr_scheduler(schedules.Exponential(gamma=0.5), lr=1.0)
        >>> _ = session.train_step([x, labels])
        >>> session.optimizer_step()
        >>> session.scheduler_step()
        >>> session.get_learning_rate()
        0.5

        """
        # Sessions without schedules do not import this module.
        from ortrain import schedules

        lr_schedule = schedules._schedule(schedule, "schedule")
        rate = self.get_learning_rate() if lr is None else lr
        decided = schedules._value_for(lr_schedule, None, self._native.step_count())
        self._native.register_lr_scheduler(lr_schedule._native, rate)
        if decided is not None:
            self._native.scheduler_step(decided)
        self._schedule = lr_schedule

    def resume_lr_scheduler(self, function: Factor | None = None) -> None:
        """Register the schedule that the checkpoint was saved with, including its complete state.

        The rate stays as it was saved, so that the training continues bit for bit.

        Args:
            function: the function of the schedule, if it has one: a checkpoint cannot store it.

        Raises:
            OrtrainError: if a scheduler is already registered, or the checkpoint has no schedule.
            InvalidArgumentError: if only one of the schedule and this call has a function.

        >>> from ortrain import schedules
        >>> session.register_lr_scheduler(schedules.Cosine(total=100), lr=0.5)
        >>> CheckpointState.save_checkpoint(session.state, "later", include_optimizer_state=True)
        >>> later = CheckpointState.load_checkpoint("later")
        >>> session = TrainingSession(later, "training_model.onnx", optimizer_model="optimizer_model.onnx")
        >>> session.resume_lr_scheduler()
        >>> session.get_learning_rate()
        0.5

        """
        from ortrain import schedules

        native = self._native.resume_lr_scheduler()
        if native is not None:
            self._schedule = schedules._resumed(native, function)

    @property
    def groups(self) -> list[ParameterGroup]:
        """Parameter groups of the optimizer, as in :attr:`Optimizer.groups <ortrain.api.Optimizer.groups>`.

        >>> session.groups[0].parameters
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        from ortrain.optim._live import groups_of

        return groups_of(self._native, self._state._native)

    def scheduler_step(self, metric: float | None = None) -> None:
        """Set the rate for the number of optimizer steps done so far; the scheduler has no counter of its own.

        Args:
            metric: the metric for :class:`~ortrain.schedules.ReduceOnPlateau`; an error for any other schedule.

        Raises:
            OrtrainError: if no scheduler is registered.
            InvalidArgumentError: if the metric is missing or unexpected, or the rate would not be finite.

        >>> session.register_linear_lr_scheduler(warmup_step_count=4, total_step_count=8, initial_lr=1.0)
        >>> _ = session.train_step([x, labels])
        >>> session.optimizer_step()
        >>> session.scheduler_step()
        >>> session.get_learning_rate()
        0.25

        """
        if self._schedule is None:
            self._native.scheduler_step(metric)
            return
        from ortrain import schedules

        self._native.scheduler_step(schedules._value_for(self._schedule, metric, self._native.step_count()))

    def get_parameters_size(self, only_trainable: bool) -> int:
        """Return the number of elements of all (trainable) parameters.

        >>> session.get_parameters_size(only_trainable=True)
        7210
        """
        return self._native.parameters_size(only_trainable)

    def to_buffer(self, only_trainable: bool) -> OrtValue:
        """Return a copy of all (trainable) parameters as a float32 vector, in the order of the training model's inputs.

        Raises:
            InvalidArgumentError: for a parameter that is not float32.
            OrtrainError: if the state is nominal.

        >>> session.to_buffer(only_trainable=False)
        OrtValue(tensor(float), shape=[7210])

        """
        return OrtValue(self._native.to_buffer(only_trainable))

    def from_buffer(self, buffer: Any, only_trainable: bool | None = None) -> None:
        """Set the parameters from a vector in the layout of :meth:`to_buffer`, an OrtValue or an array.

        Without ``only_trainable``, the number of elements decides: all parameters, or the trainable ones. A vector of
        all parameters also gives a nominal state its values.

        Raises:
            InvalidArgumentError: for another type or number of elements.

        >>> parameters = session.to_buffer(only_trainable=True)
        >>> session.from_buffer(parameters)
        >>> session.from_buffer(parameters.numpy() * 0.5, only_trainable=True)

        """
        self._native.from_buffer(native_value(buffer), only_trainable)

    def input_names(self, training: bool) -> list[str]:
        """Return the inputs of a training step, or of an eval step; without an eval model the latter list is empty.

        >>> session.input_names(training=False)
        ['x', 'labels']
        """
        return self._native.input_names(training)

    def output_names(self, training: bool) -> list[str]:
        """Return the outputs of a training step, or of an eval step; without an eval model the latter list is empty.

        >>> (loss,) = session.output_names(training=True)
        """
        return self._native.output_names(training)

    def input_count(self, training: bool) -> int:
        """Return the number of :meth:`input_names`.

        >>> session.input_count(training=True)
        2
        """
        return len(self._native.input_names(training))

    def output_count(self, training: bool) -> int:
        """Return the number of :meth:`output_names`.

        >>> session.output_count(training=True)
        1
        """
        return len(self._native.output_names(training))

    def export_model_for_inferencing(
        self,
        inference_model_path: PathLike,
        graph_output_names: Sequence[str],
        external_data: bool = False,
        *,
        average: bool = False,
        embed: bool = False,
    ) -> None:
        """Write the eval model with the current parameters, reduced to the nodes that the named values need.

        A model of more than 2 GiB stores its weights in ``<inference_model_path>.data``; with ``external_data`` every
        model does. With ``average``, averages of the optimizer (:attr:`Parameter.average
        <ortrain.api.checkpoint_state.Parameter.average>`) replace the weights. A model with adapters refers to the
        files of its base as for :meth:`ortrain.api.Module.export_model_for_inferencing`; ``embed`` writes the base into
        the file.

        Raises:
            InvalidArgumentError: for an unknown name, and for an empty list.
            OrtrainError: without an eval model, if the state is nominal, if there are no averages, or if the file
                cannot be written.

        >>> session.export_model_for_inferencing("trained.onnx", ["logits"])

        """
        if isinstance(graph_output_names, str):
            raise TypeError("graph_output_names must be a list of names, got one name")
        above = 0 if external_data else None
        path, names = os.fspath(inference_model_path), list(graph_output_names)
        self._native.export_model_for_inferencing(path, names, above, average, embed)

    def set_seed(self, seed: int) -> None:
        """Set the seed of random numbers (of Dropout, say). The seed belongs to the state and is saved in checkpoints.

        The seed and the count of training steps on the state determine all random numbers: the same seed at the same
        step gives the same numbers.

        >>> session.set_seed(7)
        """
        self._native.set_seed(seed)

    def close(self) -> None:
        """Release the models and the optimizer, after a running call has returned; the state stays.

        Every other call is then an error, but a second close is not.

        >>> session.close()
        >>> session.close()
        >>> session.optimizer_step()
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: the training session is closed; make another one on its state
        """
        self._native.close()

    def __enter__(self) -> TrainingSession:
        self._native.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _collection(what: str, values: Sequence[Any]) -> Sequence[Any]:
    """Return a list or tuple of values; raise an error for a single value."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{what} must be a list of values, got {type(values).__name__}")
    return values
