"""Model that trains itself: ``fit``, ``evaluate``, ``predict``, ``save`` and ``export``, by Keras' names."""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _ortrain, artifacts
from ortrain._fit import saved
from ortrain._fit.data import Data, read_data
from ortrain._fit.description import Array, Description, describe
from ortrain._fit.engine import FILES, Engine, Plan, copied_options, options_of, precision_name
from ortrain._fit.feeds import BatchFeed, Feed, Layout, RowFeed
from ortrain._fit.history import History
from ortrain._fit.loop import Evaluation, evaluate
from ortrain._fit.losses import TARGET, Choice, choose
from ortrain._fit.meters import Meter, Metrics, metric_outputs
from ortrain._fit.optimizers import config_of
from ortrain._fit.run import FitArguments, run_fit, verbosity
from ortrain._fit.tables import Schema
from ortrain._fit.trainable import Selection, arguments_of
from ortrain._model_source import ModelInFolder, ModelLike, PathLike, in_folder, model_source
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.errors import InvalidArgumentError, InvalidModelError, OrtrainError, UnsupportedError
from ortrain.inference import InferenceSession, SessionOptions

if TYPE_CHECKING:
    from ortrain._fit.range_test import RangeTest
    from ortrain.callbacks import Callback

__all__ = ["Model"]


class Model:
    """ONNX model that is trained by :meth:`fit`.

    Args:
        source: a path, the bytes of a model, an ``onnx.ModelProto``, or a folder that :meth:`save` wrote.
        loss: a name (``"cross_entropy"``, ``"mse"``, ``"mae"``, ``"binary_crossentropy"`` and Keras' names), a
            :class:`~ortrain.LossType`, a :class:`~ortrain.Loss`, a list of losses, a dict by output, or a block of
            :mod:`ortrain.onnxblock`. ``None`` chooses by the model and the targets: cross-entropy for class indices
            and one-hot rows, binary cross-entropy for multi-hot rows, the mean squared error for floats. Losses of
            logits are computed before a softmax or sigmoid at the end of the model.
        optimizer: a name of :func:`ortrain.optim.table` in small letters, a dict with ``name`` and settings, an
            optimizer of :mod:`ortrain.optim`, or an :class:`~ortrain.OptimType`.
        learning_rate: the learning rate; ``"find"`` chooses it by a range test; ``None`` for the optimizer's default.
        trainable: ``"all"``, ``"head"`` for the last layer, ``"last:3"`` for the last three layers, names, patterns, or
            a callable that takes a :class:`~ortrain.ParameterInfo`.
        frozen: parameters that are not trained: names, patterns or a callable.
        classes: the number of classes of a new, untrained last layer; ``None`` to keep the layer.
        lora: the rank of a low-rank adapter that is trained instead of the weights, or a dict of the arguments of
            :func:`ortrain.lora.add`, such as ``{"rank": 8, "base": "int4", "targets": ["q_proj", "v_proj"]}``. The new
            last layer of ``classes`` is trained, too.
        metrics: names, metrics of :mod:`ortrain.metrics`, or functions ``(targets, outputs) -> float``.
        weighted_metrics: metrics in which a row counts by its weight: ``sample_weight``, in a training times
            ``class_weight``. The name of a metric that ``metrics`` has as well begins with ``weighted_``.
        device: the device, as for :class:`~ortrain.Module`.
        precision: the precision of inner products: ``"float32"``, ``"bfloat16"``, ``"bf16x3"``, ``"bf16x6"``.
        seed: the seed of the order of rows, of augmentation, of Dropout, and of a new last layer.
        memory_limit: the most bytes of a step.
        session_options: options for threads and memory.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if the model cannot be read.
        InvalidArgumentError: for an unknown optimizer, or classes that the model cannot have.

    >>> import ortrain
    >>> model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"])
    >>> history = model.fit(x, labels, batch_size=4, epochs=20)
    >>> history["loss"][-1] < history["loss"][0]
    True
    >>> model.predict(x).shape
    (8, 10)
    >>> model.export("trained.onnx")

    """

    stop_training: bool
    """True to end the training after the epoch; callbacks set it."""

    def __init__(
        self,
        source: ModelLike,
        *,
        loss: Any = None,
        optimizer: Any = "adamw",
        learning_rate: float | str | None = None,
        trainable: Selection = None,
        frozen: Selection = None,
        classes: int | None = None,
        lora: int | Mapping[str, Any] | None = None,
        metrics: Sequence[Any] | Any = (),
        weighted_metrics: Sequence[Any] | Any = (),
        device: str = "auto",
        precision: str = "float32",
        seed: int = 0,
        memory_limit: int | None = None,
        session_options: SessionOptions | None = None,
    ) -> None:
        self.stop_training = False
        self._device, self._precision, self._seed = device, precision, operator.index(seed)
        self._options = options_of(session_options, memory_limit)
        self._memory_limit = None if self._options is None else self._options.memory_limit
        folder: Path | None = None
        settings: dict[str, Any] = {}
        if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
            folder = Path(source)
            settings = saved.read_settings(folder)
            source = saved.model_of(folder)
        self._source, self._description = _prepared(source, classes, lora, self._seed)
        self._choice: Choice | None = None
        self._trainable, self._frozen = trainable, frozen
        training = settings.get("training")
        if training is not None and classes is None:
            if loss is None and training["loss"] is not None:
                self._choice = saved.choice_of(training["loss"], self._description)
            if trainable is None and frozen is None:
                self._trainable = training["trained"]
            if isinstance(optimizer, str) and optimizer == "adamw":
                optimizer = saved.optimizer_of(training["optimizer"]) or optimizer
        else:
            training = None
        self._learning_rate = _checked_rate(learning_rate)
        arguments_of(self._trainable, self._frozen)
        self._optimizer = config_of(optimizer)
        self._loss = loss
        self._metrics = Metrics(_listed(metrics), _listed(weighted_metrics))
        self._engine: Engine | None = None
        self._class_names: dict[str, Sequence[Any]] = dict(settings.get("class_names", {}))
        self._schema = saved.schema_of(settings)
        self._epochs_done = int(settings.get("epochs_done", 0))
        self._said = bool(training)
        self._run_folder: Path | None = None
        self.history: History | None = None
        self.range_test: RangeTest | None = None
        if training is not None and folder is not None and self._choice is not None:
            plan = self._plan(training["clip_norm"], training["accumulate"], weighted=training["weighted"])
            self._engine = self._new_engine(plan, CheckpointState.load_checkpoint(folder / FILES[-1]))

    def __repr__(self) -> str:
        inputs = ", ".join(f"{value.name}: {value}" for value in self._description.inputs)
        outputs = ", ".join(f"{output.name}: {output.value}" for output in self._description.outputs)
        return f"Model({inputs} -> {outputs})"

    @property
    def state(self) -> CheckpointState:
        """Parameters and optimizer values.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy")
        >>> model.state.parameters["fc2.bias"].data.shape
        (10,)
        """
        return self._built().state

    @property
    def module(self) -> Module:
        """Module of the training, for a loop of your own.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy")
        >>> loss = model.module(x, labels)
        """
        return self._built().module

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the training.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy", learning_rate=0.5)
        >>> model.optimizer.get_learning_rate()
        0.5
        """
        return self._built().optimizer

    @property
    def metrics(self) -> list[Any]:
        """Metrics of the model, as they were passed, followed by the weighted metrics.

        >>> import ortrain
        >>> ortrain.Model(ortrain.examples.perceptron(), metrics="accuracy").metrics
        ['accuracy']
        """
        return [*self._metrics.plain, *self._metrics.weighted]

    @property
    def class_names(self) -> list[Any] | None:
        """Texts of the classes in the order of the scores, if the targets were texts; otherwise ``None``.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), classes=2)
        >>> history = model.fit(x, np.array(["cat", "dog"] * 4))
        >>> model.class_names
        ['cat', 'dog']
        """
        names = next(iter(self._class_names.values()), None)
        return None if names is None else list(names)

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | str = 32,
        epochs: int = 1,
        validation_data: Any = None,
        validation_split: float = 0.0,
        shuffle: bool = True,
        class_weight: Mapping[Any, float] | None = None,
        sample_weight: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        schedule: Any = None,
        callbacks: Iterable[Callback] | Callback = (),
        resume: PathLike | None = None,
        verbose: str | int | bool = "auto",
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        checkpoint_every: int | float | None = 60.0,
    ) -> History:
        """Train the model.

        Args:
            x: an array, or a list or a dict of arrays for several inputs; a table of pandas, Polars or PyArrow; a
                ``datasets.Dataset``; a source of :mod:`ortrain.data`; or an iterable of batches ``(x, y)``, such as a
                ``DataLoader`` or a generator. ``numpy.memmap``, Zarr and HDF5 are read batch by batch.
            y: the targets: an array, a dict by output, or the name of the column of a table.
            batch_size: the number of rows of a step; ``"auto"`` for the largest power of two that fits into
                ``memory_limit`` or the free memory.
            epochs: the number of passes over the data, including the epochs before ``initial_epoch``.
            validation_data: ``(x, y)``, ``(x, y, sample_weight)``, or data like ``x``; evaluated after each epoch.
            validation_split: the share of the rows, from the end, that is held out instead.
            shuffle: True for a new order of the rows in each epoch.
            class_weight: the weight of the rows of each class, by index or text.
            sample_weight: the weight of each row. The loss of a batch is the mean over its rows of weight times loss.
            accumulate: the number of batches per update; their gradients are averaged.
            clip_norm: the maximum norm of all gradients together.
            schedule: a schedule of :mod:`ortrain.schedules`, a function from steps to a factor, or a name such as
                ``"cosine"``, ``"linear"`` or ``"one_cycle"`` for a schedule over all steps. A dict with ``name`` and
                settings may also have ``warmup``, the number of steps of a linear rise.
            callbacks: callbacks of :mod:`ortrain.callbacks`.
            resume: the folder of the run. A run that it holds goes on, in the middle of an epoch to the same bits.
                Otherwise the run begins, and is kept there.
            verbose: 1 for a progress bar, 2 for a line per epoch, 0 for neither; ``"auto"`` for a bar if a terminal or
                a notebook shows it. Without the package ``tqdm``, 1 means 2.
            initial_epoch: the number of the first epoch.
            steps_per_epoch: the number of batches of an epoch; ``None`` for one pass over the data.
            validation_steps: the number of batches of each validation.
            validation_batch_size: the number of rows of a batch of the validation.
            validation_freq: the number of epochs from one validation to the next.
            checkpoint_every: the number of steps (an integer) or of seconds (a float) between two checkpoints within an
                epoch, with ``resume``. The end of an epoch is always saved.

        Returns:
            Loss and metrics of each epoch.

        Raises:
            InvalidArgumentError: if the data does not fit the model; with its row.
            AnomalyError: if the loss is not finite, though the data is. The weights are as before the step.
            KeyboardInterrupt: after Ctrl-C, when the step has ended and the run is saved.
            MemoryLimitError: if a step would take more than ``memory_limit``.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"])
        >>> history = model.fit(x, labels, batch_size=4, epochs=3, validation_split=0.25)
        >>> list(history)
        ['loss', 'accuracy', 'val_loss', 'val_accuracy']

        """
        arguments = FitArguments(
            batch_size=batch_size,
            epochs=epochs,
            shuffle=bool(shuffle),
            class_weight=class_weight,
            accumulate=accumulate,
            clip_norm=clip_norm,
            schedule=schedule,
            callbacks=callbacks,
            resume=resume,
            verbose=verbose,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            validation_split=validation_split,
            checkpoint_every=checkpoint_every,
        )
        data = read_data(x, y, sample_weight, self._description, Schema())
        if data.schema is not None:
            self._schema = data.schema
        return run_fit(self, data, validation_data, arguments)

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int | bool = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Iterable[Callback] | Callback = (),
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics of the current weights.

        Args:
            x: data, as for :meth:`fit`.
            y: targets, as for :meth:`fit`.
            batch_size: the number of rows of a batch, 32 by default.
            verbose: as for :meth:`fit`.
            sample_weight: the weight of each row.
            steps: the number of batches; ``None`` for all.
            callbacks: callbacks of :mod:`ortrain.callbacks`.
            return_dict: True for a dict by name.

        Returns:
            The loss; a list of the loss and the metrics if there are metrics.

        Raises:
            InvalidArgumentError: if the data does not fit the model.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron(), metrics=["accuracy"])
        >>> sorted(model.evaluate(x, labels, return_dict=True))
        ['accuracy', 'loss']

        """
        data = read_data(x, y, sample_weight, self._description, self._schema)
        engine = self._engine_for(data, weighted=data.is_weighted)
        evaluation = self._evaluation(engine, data, batch_size or 32, steps)
        params = {"steps": steps or evaluation.feed.steps_per_pass, "batch_size": batch_size or 32}
        hooks = self._callback_list(callbacks, verbose, params)
        values = evaluate(engine, evaluation, hooks)
        if return_dict:
            return values
        return list(values.values()) if len(values) > 1 else values["loss"]

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int | bool = "auto",
        steps: int | None = None,
        callbacks: Iterable[Callback] | Callback = (),
    ) -> Any:
        """Return the outputs of the model with the current weights.

        Args:
            x: data, as for :meth:`fit`; targets are ignored.
            batch_size: the number of rows of a batch, 32 by default.
            verbose: as for :meth:`fit`.
            steps: the number of batches; ``None`` for all.
            callbacks: callbacks of :mod:`ortrain.callbacks`.

        Returns:
            An array; a dict of arrays by name if the model has several outputs.

        Raises:
            InvalidArgumentError: if the data does not fit the model.

        >>> import ortrain
        >>> ortrain.Model(ortrain.examples.perceptron()).predict(x).shape
        (8, 10)

        """
        data = read_data(x, None, None, self._description, self._schema, needs_targets=False)
        layout = Layout(
            self._description.input_names, self._description, (), {}, None, self._description.fixed_batch, False
        )
        feed = self._feed(data, layout, batch_size or 32, shuffle=False, training=False)
        hooks = self._callback_list(
            callbacks, verbose, {"steps": steps or feed.steps_per_pass, "batch_size": batch_size or 32}
        )
        parts: list[list[Array]] = []
        with tempfile.TemporaryDirectory(prefix="ortrain-") as folder:
            session = self._session(Path(folder))
            names = [output.name for output in session.get_outputs()]
            for hook in hooks.on_predict_begin:
                hook(None)
            for at, step in enumerate(feed.epoch(0, 0, steps)):
                for hook in hooks.on_predict_batch_begin:
                    hook(at, None)
                results = session.run(None, dict(zip(layout.names, step.arguments, strict=True)))
                parts.append([_rows(result, step.rows) for result in results])
                for hook in hooks.on_predict_batch_end:
                    hook(at, None)
            for hook in hooks.on_predict_end:
                hook(None)
        if not parts:
            raise InvalidArgumentError("the data has no batches")
        outputs = [_joined(columns) for columns in zip(*parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else dict(zip(names, outputs, strict=True))

    def summary(self) -> str:
        """Return a report: inputs, outputs, trained parameters, loss and optimizer.

        >>> import ortrain
        >>> print(ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy").summary().splitlines()[0])
        inputs: x float32[batch, 64]
        """
        from ortrain._fit.summary import summary_of

        return summary_of(self)

    def save(self, folder: PathLike) -> None:
        """Write the model with its training to a folder: ``Model(folder)`` goes on from there.

        Args:
            folder: the folder; it is created.

        Raises:
            InvalidArgumentError: if the path is a file.
            OrtrainError, OSError: if a file cannot be written.

        >>> import ortrain
        >>> model = ortrain.Model(ortrain.examples.perceptron())
        >>> history = model.fit(x, labels)
        >>> model.save("saved")
        >>> bool((ortrain.Model("saved").predict(x) == model.predict(x)).all())
        True

        """
        saved.write(
            Path(folder),
            self._source,
            self._engine,
            outputs=self._output_names(),
            class_names=self._class_names,
            schema=self._schema,
            epochs_done=self._epochs_done,
        )

    def export(
        self,
        path: PathLike,
        *,
        outputs: Sequence[str] | None = None,
        external_data: bool = False,
        average: bool = False,
        opset: int | None = None,
        float16: bool = False,
        embed: bool = False,
    ) -> None:
        """Write an ONNX model with the current weights.

        Args:
            path: the file. An existing file is replaced.
            outputs: names of the outputs; ``None`` for all outputs of the model.
            external_data: True to store the weights in a second file.
            average: True for the averages of the optimizer instead of the weights.
            opset: the version of the operators; ``None`` for the version of the model.
            float16: True to store the weights as float16 and to compute in it; inputs and outputs stay float32.
            embed: True to write the base of a model with adapters into the file, instead of a reference to its files
                (:meth:`Module.export_model_for_inferencing <ortrain.api.Module.export_model_for_inferencing>`). With
                ``opset`` or ``float16``, the base is always written.

        Raises:
            InvalidArgumentError: for an unknown output, and an unknown version.
            UnsupportedError: for a node that the version cannot express.
            OrtrainError: if the file cannot be written.

        >>> import ortrain
        >>> ortrain.Model(ortrain.examples.perceptron(), loss="mse").export("trained.onnx")

        """
        if isinstance(outputs, str):
            raise TypeError("outputs must be a list of names, got one name")
        names = self._output_names() if outputs is None else list(outputs)
        # Any loss makes the files that an export needs.
        has_loss = self._engine is not None or self._choice is not None or self._loss is not None
        engine = self._built() if has_loss else self._untrained()
        if opset is None and not float16:
            engine.export(path, names, external_data=external_data, average=average, embed=embed)
            return
        with tempfile.TemporaryDirectory(prefix="ortrain-") as folder:
            trained = os.fspath(Path(folder, "trained.onnx"))
            engine.export(trained, names, external_data=False, average=average, embed=False)
            _ortrain.convert_model(trained, os.fspath(path), opset, float16, external_data)

    # Parts of fit, evaluate and predict.

    def _plan(self, clip_norm: float | None, accumulate: int, *, weighted: bool) -> Plan:
        assert self._choice is not None
        fixed = self._description.fixed_batch is not None
        choice = self._choice
        return Plan(
            model=self._source,
            choice=choice,
            optimizer=self._optimizer,
            trainable=self._trainable,
            frozen=self._frozen,
            outputs=metric_outputs(self._metrics, choice.targets, self._description),
            clip_norm=clip_norm,
            accumulate=accumulate,
            weighted=(weighted or fixed) and choice.can_weigh,
            fixed=fixed,
        )

    def _new_engine(self, plan: Plan, state: CheckpointState | None = None) -> Engine:
        engine = Engine(plan, device=self._device, precision=self._precision, options=self._options, state=state)
        if state is None:
            engine.state.seed = self._seed
        if isinstance(self._learning_rate, float):
            engine.optimizer.set_learning_rate(self._learning_rate)
        return engine

    def _built(self) -> Engine:
        """Return the engine; without data, the loss must be known."""
        if self._engine is None:
            if self._choice is None:
                if self._loss is None:
                    raise OrtrainError(
                        "the loss is not chosen yet: fit chooses it by the targets; call fit first, or pass loss="
                    )
                self._choice = choose(self._loss, self._description, {}, {})
            self._engine = self._new_engine(self._plan(None, 1, weighted=False))
        return self._engine

    def _untrained(self) -> Engine:
        """Return an engine with a loss that does not matter."""
        output = next((each for each in self._description.outputs if each.is_scored), None)
        if output is None:
            raise InvalidArgumentError("the model has no output of floats, so it has nothing to train")
        choice = choose("mse", self._description, {TARGET: None}, {})
        plan = Plan(self._source, choice, self._optimizer, self._trainable, self._frozen)
        return Engine(plan, device="cpu", precision="float32", options=None)

    def _choose(self, data: Data) -> None:
        """Choose the loss by the targets of the data, once."""
        data.find_class_names()
        for name, names in data.class_names.items():
            known = self._class_names.setdefault(name, names)
            if list(known) != list(names) and not set(names) <= set(known):
                raise InvalidArgumentError(
                    f"the classes {list(names)[:8]} are not those of the training, {list(known)[:8]}; use the same"
                )
        if self._choice is None:
            targets = data.sample(self._description)
            several = data.several_labels
            self._choice = choose(self._loss, self._description, targets, self._class_names, several_labels=several)

    def _engine_for(
        self, data: Data, *, weighted: bool, clip_norm: float | None = None, accumulate: int = 1, training: bool = False
    ) -> Engine:
        self._choose(data)
        assert self._choice is not None
        if weighted and not self._choice.can_weigh:
            raise InvalidArgumentError(
                "sample_weight and class_weight need a loss by name or by ortrain.Loss; this loss takes no weights"
            )
        engine = self._engine
        if engine is None:
            engine = self._new_engine(self._plan(clip_norm, accumulate, weighted=weighted))
        elif training:
            engine = engine.with_plan(self._plan(clip_norm, accumulate, weighted=weighted))
        elif weighted and not engine.plan.weighted:
            engine = engine.with_plan(self._plan(engine.plan.clip_norm, engine.plan.accumulate, weighted=True))
        self._engine = engine
        return engine

    def _layout(self, engine: Engine, class_weight: Mapping[Any, float] | None = None) -> Layout:
        return Layout(
            names=engine.input_names,
            description=self._description,
            targets=engine.targets(self._description),
            class_names=self._class_names,
            class_weight=class_weight,
            fixed=self._description.fixed_batch,
            is_weighted=engine.plan.weighted,
        )

    def _feed(
        self, data: Data, layout: Layout, batch_size: int, *, shuffle: bool, training: bool, first_pass: int = 0
    ) -> Feed:
        if layout.fixed is not None:
            batch_size = layout.fixed
        if data.source is None:
            return BatchFeed(data.batches, layout, data.peeked)
        data = data.with_targets(layout.targets, layout.class_names)
        assert data.source is not None
        return RowFeed(
            data.source,
            layout,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self._seed,
            first_pass=first_pass,
            training=training,
        )

    def _evaluation(self, engine: Engine, data: Data, batch_size: int, steps: int | None) -> Evaluation:
        layout = self._layout(engine)
        feed = self._feed(data, layout, batch_size, shuffle=False, training=False)
        return Evaluation(feed, layout, Meter(self._metrics, layout, engine.module.output_names()), steps)

    def _callback_list(
        self, callbacks: Iterable[Callback] | Callback, verbose: str | int | bool, params: Mapping[str, Any]
    ) -> Any:
        from ortrain.callbacks import ProgressBar
        from ortrain.callbacks._list import CallbackList
        from ortrain.callbacks._progress import progress

        found: list[Any] = [callbacks] if hasattr(callbacks, "on_epoch_end") else list(callbacks)
        level = verbosity(verbose)
        if level and not any(isinstance(callback, ProgressBar) for callback in found):
            found.append(progress(level))
        return CallbackList(found, self, {**params, "verbose": level})

    def _session(self, folder: Path) -> InferenceSession:
        options = copied_options(self._options)
        options.detect_anomaly = False
        options.precision = precision_name(self._precision)
        model: Any = self._source
        if self._engine is not None:
            model = self._engine.export_to_run(folder / "model.onnx", self._output_names())
        return InferenceSession(model, options, providers=[self._device])

    def _output_names(self) -> list[str]:
        return [output.name for output in self._description.outputs]

    def _find_batch_size(self, data: Data, engine: Engine) -> int:
        from ortrain._fit.batch_size import largest_batch

        layout = self._layout(engine)
        if data.source is None:
            raise InvalidArgumentError("batch_size='auto' needs rows, but the data is an iterable of batches")
        return largest_batch(engine, data.with_targets(layout.targets, layout.class_names), layout, self._memory_limit)


def _listed(metrics: Any) -> list[Any]:
    is_one = isinstance(metrics, str) or callable(metrics) or hasattr(metrics, "reset")
    return [metrics] if is_one else list(metrics)


def _rows(result: Any, rows: int) -> Any:
    return result[:rows] if isinstance(result, (np.ndarray, list)) and np.ndim(result) else result


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts) if parts[0].ndim else np.stack(parts)
    return [each for part in parts for each in part]


def _prepared(
    source: ModelLike, classes: int | None, lora: int | Mapping[str, Any] | None, seed: int
) -> tuple[bytes | str | ModelInFolder, Description]:
    """Return the model with a new head, an open batch axis and adapters, as far as requested, and its description."""
    plain: bytes | str = model_source(source)
    if classes is not None:
        plain = artifacts.replace_head(plain, classes, seed=seed)

    def adapted(plain: bytes | str) -> tuple[bytes | str | ModelInFolder, Description]:
        model: bytes | str | ModelInFolder = plain
        if lora is not None:
            from ortrain._fit.adapted import with_adapter

            model = with_adapter(plain, lora, seed=seed, has_new_head=classes is not None)
        elif isinstance(plain, str):
            model = in_folder(_ortrain.base_by_reference(plain)) or plain
        return model, describe(model)

    model, description = adapted(plain)
    if description.fixed_batch is not None:
        # Otherwise, the batches are filled up to the size that the model fixes.
        with contextlib.suppress(InvalidModelError, UnsupportedError):
            return adapted(artifacts.open_batch(plain))
    return model, description


def _checked_rate(rate: float | str | None) -> float | str | None:
    if rate is None or rate == "find":
        return rate
    if isinstance(rate, (str, bool)) or not np.isfinite(rate) or rate < 0:
        raise InvalidArgumentError(f"learning_rate must be a number of at least 0, 'find' or None, got {rate!r}")
    return float(rate)
