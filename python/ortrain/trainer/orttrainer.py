"""Trainer of an ONNX model: model, optimizer and options behind one ``train_step``.

>>> import warnings
>>> from ortrain.trainer.optim import AdamConfig
>>> from ortrain.trainer.orttrainer import ORTTrainer
>>> from ortrain.trainer.orttrainer_options import ORTTrainerOptions
>>> description = {
...     "inputs": [("x", ["batch", 64]), ("labels", ["batch"])],
...     "outputs": [("loss", [], True), ("logits", ["batch", 10])],
... }
>>> options = ORTTrainerOptions({"device": {"id": "cpu"}})
>>> with warnings.catch_warnings():
...     warnings.simplefilter("ignore", FutureWarning)
...     trainer = ORTTrainer(model_with_loss, description, AdamConfig(lr=0.01), options=options)
>>> losses = [float(trainer.train_step(x, labels)[0]) for _ in range(5)]
>>> losses[-1] < losses[0]
True
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain import _files, _seeds
from ortrain._model_source import PathLike
from ortrain._suggest import hint
from ortrain._world import reporting
from ortrain.classic import TrainingSession
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.iobinding import IOBinding
from ortrain.trainer import _checkpoint_storage, _state
from ortrain.trainer._arguments import check_arguments, is_onnx_model, precision_of
from ortrain.trainer._description import add_types, check_description, narrow_type
from ortrain.trainer._interchange import checkpoint_of, state_dict_of
from ortrain.trainer._runner import ALL_FINITE, GATHERED, Runner
from ortrain.trainer._session import States, check_world, make_session, providers_of
from ortrain.trainer._values import is_torch_module, tensor_of
from ortrain.trainer.amp.loss_scaler import LossScaler
from ortrain.trainer.model_desc_validation import OutputDescriptionTyped, _ORTTrainerModelDesc
from ortrain.trainer.optim.config import _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import checked_rate
from ortrain.trainer.orttrainer_options import ORTTrainerOptions
from ortrain.trainer.postprocess import run_postprocess
from ortrain.trainer.train_step_info import TrainStepInfo

if TYPE_CHECKING:
    from onnx import ModelProto

    from ortrain.api import CheckpointState
    from ortrain.classic import CommunicationTime

__all__ = ["ORTTrainer"]


class ORTTrainer:
    """A trainer with one call for each batch, as ``onnxruntime.training.ORTTrainer``.

    ``ortrain.classic.TrainingSession`` runs the model. The trainer adds the learning rate of a schedule, the loss
    scale, gradient accumulation and step counts. Use :mod:`ortrain.api` for new programs.

    Args:
        model: an ``onnx.ModelProto`` with the loss as an output, which post-processing changes in place. Or a
            ``torch.nn.Module``, which is moved to the CPU. The first step exports the module with the inputs of that
            step; the names of the inputs are the arguments of ``forward``. Training does not change the module.
            ``state_dict(pytorch_format=True)`` returns trained weights for the module's ``load_state_dict``.
        model_desc: a dict with ``"inputs"``, pairs of a name and a shape, and ``"outputs"``, the same pairs, with
            ``True`` as a third element for the loss. A size is a number, or a name for sizes that may differ between
            calls. Inputs and outputs of a step have this order.
        optim_config: the optimizer.
        loss_fn: the loss of a module, a function of the module's result and the last input. Its result is the first
            output. ``None`` for a module that returns its loss, and for an ONNX model.
        options: the options; ``None`` for ``ORTTrainerOptions()``.
        mixed_precision_dtype: the compute type of the model if ``options.mixed_precision.enabled`` is set:
            ``"float16"``, or ``"bfloat16"``, which needs no loss scaler.

    Raises:
        AssertionError: for an argument of the wrong type, a description with names that the model does not have, or a
            description without exactly one loss.
        ValueError: if ``model`` is not a model, or for a description or options that are invalid.
        UnsupportedError: for an unavailable device, and for distributed sizes above 1 in one process. Also for
            processes of ``mpiexec`` or ``srun`` that cannot form one training, and for several ranks on a GPU.
        RankError: on several ranks, if model, options, optimizer or weights differ, or another rank fails here.
        InvalidArgumentError, OrtrainError: as ``ortrain.classic.TrainingSession``.

    Warns:
        FutureWarning: always. The class exists for scripts that already use it.
        UserWarning: for ZeRO and Adasum, which have no effect in one process, and for options that differ from MPI.

    >>> import warnings
    >>> from ortrain.trainer import ORTTrainer, ORTTrainerOptions
    >>> from ortrain.trainer.optim import SGDConfig
    >>> warnings.simplefilter("ignore", FutureWarning)
    >>> inputs = [("x", ["batch", 64]), ("labels", ["batch"])]
    >>> description = {"inputs": inputs, "outputs": [("loss", [], True)]}
    >>> options = ORTTrainerOptions({"device": {"id": "cpu"}})
    >>> trainer = ORTTrainer(model_with_loss, description, SGDConfig(lr=0.1), options=options)
    >>> trainer.train_step(x, labels).shape
    ()

    """

    def __init__(
        self,
        model: Any,
        model_desc: dict[str, Any],
        optim_config: _OptimizerConfig,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        options: ORTTrainerOptions | None = None,
        *,
        mixed_precision_dtype: str = "float16",
    ) -> None:
        warnings.warn(
            "ORTTrainer is for existing scripts of onnxruntime-training up to 1.15; use ortrain.api for new scripts",
            FutureWarning,
            stacklevel=2,
        )
        check_arguments(model, model_desc, optim_config, loss_fn, options)
        self._torch_model: Any = model if is_torch_module(model) else None
        self._onnx_model: ModelProto | None = None
        if self._torch_model is None and not is_onnx_model(model):
            raise ValueError(
                f"'model' must be either 'torch.nn.Module' or 'onnx.ModelProto', got {type(model).__name__}"
            )
        if self._torch_model is None and loss_fn is not None:
            raise AssertionError("'loss_fn' must not be specified when 'model' is an ONNX model: its loss is an output")
        self.loss_fn = loss_fn
        self.model_desc = _ORTTrainerModelDesc(model_desc)
        self.optim_config = optim_config
        self.options: Any = ORTTrainerOptions() if options is None else options
        self._world = check_world(self.options)
        self._providers = providers_of(self.options)
        scaler = self.options.mixed_precision.loss_scaler
        self._precision = precision_of(self.options, mixed_precision_dtype)
        self._train_step_info = TrainStepInfo(self.optim_config)
        self._training_session: TrainingSession | None = None
        self._load_state_dict: Callable[[], None] | None = None
        self._state_dict: dict[str, Any] = {}
        self._train_io_binding: IOBinding | None = None
        self._eval_io_binding: IOBinding | None = None
        # Number of calls of an accumulation window; successful calls since the last update; seed of random numbers.
        self._accumulated, self._in_window, self._seed = 1, 0, 0
        if self._torch_model is None:
            try:
                with reporting(self._world), _state.restored_nodes(model):
                    self._init_onnx_model(model)
            except BaseException:
                self.options.mixed_precision.loss_scaler = scaler
                raise

    # Session.

    def _export(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Exports a PyTorch module and builds the session. The first step calls this method."""
        if self._training_session is None and self._torch_model is not None:
            from ortrain.trainer import _torch_export

            _torch_export.begin(self, args, kwargs)

    def _init_onnx_model(self, model: ModelProto) -> None:
        """Post-processes the ONNX model and builds the session."""
        internal = self.options._internal_use
        if internal.enable_internal_postprocess:
            model = run_postprocess(model)
        if internal.extra_postprocess is not None:
            model = internal.extra_postprocess(model)
            if not is_onnx_model(model):
                raise AssertionError(
                    f"the model that 'extra_postprocess' returns must be an onnx.ModelProto, got {type(model).__name__}"
                )
        check_description(self.model_desc, model)
        add_types(self.model_desc, model)
        session = self._session_of(model, {})
        self._onnx_model = model
        # The session uses the seed of the process if one is set.
        self._seed, self._in_window = _seeds.of_process() or 0, 0
        self._use(session)
        if self._load_state_dict is not None:
            self._load_state_dict()

    def _session_of(self, model: ModelProto, states: States) -> TrainingSession:
        """Builds a session for the model that starts from a state of the optimizer."""
        session = make_session(
            model, self.model_desc, self.optim_config, self.options, self._providers, self._precision, states
        )
        described = {name for name, *_ in self.model_desc.inputs}
        own = {self.model_desc.learning_rate.name, session.loss_scale_input_name}
        missing = [given.name for given in session._described_inputs() if given.name not in described | own]
        if missing:
            raise InvalidArgumentError(
                f"input {missing[0]!r} of the model is missing in model_desc{hint(missing[0], described)}"
            )
        return session

    def _use(self, session: TrainingSession) -> None:
        """Makes this session the session of all further steps."""
        self._training_session = session
        session._has_trainer = True
        self._accumulated = int(self.options.batch.gradient_accumulation_steps)
        self._runner = Runner(session, self.model_desc)
        self._train_io_binding, self._eval_io_binding = session.io_binding(), session.io_binding()
        if self._accumulated > 1:
            self.model_desc.gradient_accumulation = GATHERED
        if self._precision is not None:
            self._add_mixed_precision(session)

    def _add_mixed_precision(self, session: TrainingSession) -> None:
        """Adds the inputs, outputs and types of mixed precision to the description."""
        scale = session.loss_scale_input_name
        assert scale is not None
        self.model_desc.all_finite, self.model_desc.loss_scale_input = ALL_FINITE, scale
        if self._scaler is not None:
            self._scaler.input_name = scale
        for index, output in enumerate(self.model_desc.outputs):
            is_wide = isinstance(output, OutputDescriptionTyped) and output.dtype == np.float32
            if is_wide and not session.is_output_fp32_node(output.name):
                self.model_desc.add_type_to_output_description(index, np.float32, narrow_type(self._precision))

    @property
    def _scaler(self) -> LossScaler | None:
        scaler: LossScaler | None = self.options.mixed_precision.loss_scaler
        return scaler

    def _ready(self, binding: IOBinding | None) -> tuple[Runner, IOBinding]:
        """Returns the runner and a binding, or raises an error if there is no session."""
        if self._training_session is None or binding is None:
            raise OrtrainError("the trainer has no session yet")
        return self._runner, binding

    # Steps.

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs of a batch and trains on the batch.

        Pass inputs in the order of the description or by name; a single list counts as all positional inputs. Inputs
        are NumPy arrays, or PyTorch tensors on the CPU; outputs have the same kind. Each
        ``gradient_accumulation_steps``-th successful call updates the weights with the mean of the gradients since the
        last update.

        Returns:
            The described outputs before the update: a single output alone, several as a list. With ``fetches`` in
            ``_train_step_info``, only these outputs, in their order.

        Raises:
            AssertionError: for a wrong number of inputs, or for two different sizes with the same name.
            KeyError: for an output with a named size that no input has.
            InvalidArgumentError: for inputs of another type or shape, ``fetches`` that are not outputs, or a scheduler
                that does not return one finite number. In this case no weight is changed.
            RankError: if another rank fails in its call, or the ranks do not make the same step. No weight is changed.

        >>> loss, logits = trainer.train_step(x, labels=labels)
        >>> loss.shape, logits.shape
        ((), (8, 10))

        """
        with reporting(self._world):
            return self._train(args, kwargs)

    def _train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Trains on a batch."""
        self._export(args, kwargs)
        runner, binding = self._ready(self._train_io_binding)
        info = self._train_step_info
        info.step += 1
        updates = self._in_window + 1 == self._accumulated
        fetches = info.fetches
        names = runner.fetched(fetches) if fetches else runner.outputs
        judged = self._precision is not None and updates and not fetches
        outputs = [*names, ALL_FINITE] if judged else names if updates else [*names, GATHERED]
        numbers = self._numbers(self._learning_rate())
        inputs = runner.inputs_by_name(args, kwargs, bool(fetches))
        results = runner.run(binding, inputs, numbers, outputs, runner.updating if updates else runner.gathering)
        self._in_window = 0 if updates else self._in_window + 1
        if judged:
            self._judge(runner.answer([ALL_FINITE], results, inputs).reshape(1))
        elif updates:
            info.optimization_step += 1
        return runner.answer(fetches or names, results, inputs)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs of a batch in inference mode, without training or counting.

        Dropout drops nothing, and BatchNormalization uses the running statistics. Inputs, results and errors are as for
        :meth:`train_step`, but ``fetches`` are returned in the order of the description.

        >>> loss, logits = trainer.eval_step(x, labels)
        >>> bool(trainer.eval_step(x, labels)[0] == loss)
        True

        """
        self._export(args, kwargs)
        runner, binding = self._ready(self._eval_io_binding)
        fetches = self._train_step_info.fetches
        names = runner.fetched(fetches) if fetches else runner.outputs
        inputs = runner.inputs_by_name(args, kwargs, bool(fetches))
        results = runner.run(binding, inputs, self._numbers(0.0), names, runner.evaluating)
        return runner.answer(names, results, inputs)

    def _judge(self, finite: Any) -> None:
        """Reports to the loss scaler if the gradients of an update were finite, and counts the update if they were."""
        info = self._train_step_info
        info.all_finite = finite
        try:
            if self._scaler is not None:
                self._scaler.update(info)
        finally:
            # The weights have already changed, even if the scaler raises an error.
            info.optimization_step += int(bool(finite))

    def _numbers(self, rate: float) -> dict[str, float]:
        """Returns the additional inputs of a run by name: the learning rate and the loss scale."""
        numbers = {self.model_desc.learning_rate.name: rate}
        scale = self.model_desc.loss_scale_input
        if scale is not None:
            scaler = self._scaler
            numbers[scale.name] = 1.0 if scaler is None else float(scaler.loss_scale)
        return numbers

    def _learning_rate(self) -> float:
        """Returns the learning rate of this step."""
        scheduler = self.options.lr_scheduler
        if scheduler is None:
            return float(self.optim_config.lr)
        return checked_rate(scheduler._step(self._train_step_info))

    def communication_time(self) -> CommunicationTime:
        """Returns the time that several processes have needed to exchange gradients, and the share that was hidden.

        Raises:
            OrtrainError: if there is no session yet.

        >>> trainer.communication_time().hidden_share
        0.0

        """
        runner, _ = self._ready(self._train_io_binding)
        return runner.session.communication_time()

    # Files and state.

    def save_as_onnx(self, path: str) -> None:
        """Writes the forward model with the current weights.

        Also updates the trainer's model: trained weights move to the end of its initializers.

        Raises:
            AssertionError: if ``path`` is not a ``str``.

        Warns:
            UserWarning: if there is no model yet, the folder does not exist, or the path is a folder. Nothing is
                written.

        >>> loss, logits = trainer.train_step(x, labels)
        >>> trainer.save_as_onnx("trained.onnx")
        >>> onnx.load("trained.onnx") == trainer._onnx_model
        True

        """
        if self._training_session is None or self._onnx_model is None:
            warnings.warn(
                "Training session is not initialized yet. 'train_step' or 'eval_step' methods must be executed at "
                "least once before calling 'save_as_onnx()'.",
                stacklevel=2,
            )
            return
        if not isinstance(path, str):
            raise AssertionError(f"'path' must be a str, got {type(path).__name__}")
        destination = Path(path)
        if not destination.name or path.endswith("/") or not destination.parent.is_dir() or destination.is_dir():
            warnings.warn("'path' is not valid or does not exist", stacklevel=2)
            return
        session = self._training_session
        trained = session.get_model_state()["full_precision"] | _state.statistics_of(session)
        _state.put_weights(self._onnx_model, trained)
        _files.write(path, self._onnx_model.SerializeToString())

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns copies of everything that training changes, as nested dicts of arrays and numbers.

        The sections are ``model``, ``optimizer``, ``trainer_options`` and ``train_step_info``. Some sections are
        optional: ``loss_scaler`` with a loss scaler, ``running_statistics`` with a BatchNormalization in training mode,
        ``random_numbers`` with an active Dropout, and ``accumulated_gradients`` within an accumulation window.

        Args:
            pytorch_format: if true, returns only weights by name: tensors if PyTorch is imported, else arrays. For a
                ``torch.nn.Module``, the dict has all names that the module's ``load_state_dict`` needs.

        Warns:
            UserWarning: if there is no session yet. The result is the state stored for the session.

        >>> state = trainer.state_dict()
        >>> list(state)
        ['model', 'optimizer', 'trainer_options', 'train_step_info']
        >>> sorted(state["optimizer"]["fc2.bias"])
        ['Moment_1', 'Moment_2', 'Update_Count']

        """
        if self._training_session is None or self._onnx_model is None:
            warnings.warn(
                "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least "
                "once before calling ORTTrainer.state_dict().",
                stacklevel=2,
            )
            return self._state_dict
        if pytorch_format:
            weights = _state.model_state(self._training_session, self._onnx_model, self.options)
            torch = sys.modules.get("torch")
            if torch is None:
                return weights
            tensors = {name: tensor_of(torch, value) for name, value in weights.items()}
            if self._torch_model is None:
                return tensors
            from ortrain.trainer import _torch_export

            statistics = _state.statistics_of(self._training_session)
            tensors |= {name: tensor_of(torch, value) for name, value in statistics.items()}
            return _torch_export.state_of_module(self._torch_model, tensors)
        return _state.state_of(self._training_session, self._onnx_model, self)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restores a state of :meth:`state_dict`. Without a session, the trainer stores the state for the session.

        Args:
            state_dict: the state, or a part of it.
            strict: if true, the state must have exactly the weights and optimizer values of the trainer.

        Raises:
            RuntimeError: with ``strict``, for missing or unexpected names. In this case nothing is changed.
            InvalidArgumentError: for a value of another shape or type. In this case nothing is changed.
            AssertionError: for the state of another optimizer.
            KeyError: for an optimizer state without ``trainer_options``.

        Warns:
            UserWarning: for each missing section of ``train_step_info``, ``model`` and ``optimizer``.

        >>> state = trainer.state_dict()
        >>> first, _ = trainer.train_step(x, labels)
        >>> trainer.load_state_dict(state)
        >>> bool(trainer.train_step(x, labels)[0] == first)
        True

        """
        if self._training_session is None or self._onnx_model is None:
            self._state_dict = state_dict
            self._load_state_dict = lambda: self.load_state_dict(state_dict, strict)
            return
        loaded = _state.checked(state_dict, self._training_session, self._onnx_model, self, strict)
        model = _state.copy_of(self._onnx_model)
        _state.put_weights(model, loaded.weights)
        session = self._session_of(model, loaded.optimizer)
        _state.put_rest(session, self, loaded)
        _state.put_weights(self._onnx_model, loaded.weights)
        self._use(session)

    def save_checkpoint(
        self,
        path: PathLike,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """Writes the state and the user's own values to a new HDF5 file.

        Args:
            path: the file, which must not exist.
            user_dict: additional values that :meth:`load_checkpoint` returns.
            include_optimizer_states: if true, the optimizer state is written.
            allow_pickle: if true, ``user_dict`` may have objects of any class. :meth:`load_checkpoint` then needs
                ``allow_pickle=True``.

        Raises:
            OrtrainError: before the first step of a ``torch.nn.Module``. Nothing is written.
            InvalidArgumentError: for a ``user_dict`` that :meth:`load_checkpoint` would refuse. Nothing is written.
            OSError: if the file exists already or cannot be written. Each rank needs a file of its own.

        >>> trainer.save_checkpoint("checkpoint0.ortcp", {"epoch": 3})
        >>> trainer.load_checkpoint("checkpoint0.ortcp")
        {'epoch': 3}

        """
        if self._training_session is None or self._onnx_model is None:
            raise OrtrainError("the trainer has no state to save yet: run train_step or eval_step first")
        frozen = self.options.utils.frozen_weights
        state = _state.named_for_files(_state.parts_of_rank(self.state_dict(), self._training_session, frozen))
        if user_dict:
            state["user_dict"] = _checkpoint_storage.to_serialized_hex(user_dict)
            if not allow_pickle:
                _checkpoint_storage.check_readable(state["user_dict"])
        if not include_optimizer_states:
            state.pop("optimizer", None)
        try:
            _checkpoint_storage.save(state, path)
        except FileExistsError as error:
            if self._world is None:
                raise
            name = Path(os.fspath(path))
            proposed = name.with_name(f"{name.stem}{self._world.rank}{name.suffix}")
            raise FileExistsError(
                f"{error}; each of the {self._world.size} ranks needs a file of its own, for example {proposed}"
            ) from error

    def load_checkpoint(self, *paths: PathLike, strict: bool = True, allow_pickle: bool = False) -> Any:
        """Restores the state in files of :meth:`save_checkpoint`.

        Args:
            *paths: one file, or the files of all ranks. The order is free. Of complete files, a rank reads its own one,
                or else the file of rank 0.
            strict: as in :meth:`load_state_dict`.
            allow_pickle: if true, the user's own values may be objects of any class. Reading them runs code of the
                file's author. If false, only numbers, texts, containers, arrays and dates are read.

        Returns:
            the ``user_dict`` of :meth:`save_checkpoint`, or ``{}`` if the file has none.

        Raises:
            AssertionError: for several files from a training in one process, and for files of different runs.
            UnsupportedError: for moments of Adasum, or accumulated gradients, of another rank.
            IndexError: if no path is passed.
            ValueError: for a file that is not HDF5.
            RuntimeError, AssertionError, KeyError: as in :meth:`load_state_dict`.

        >>> trainer.save_checkpoint("checkpoint0.ortcp")
        >>> trainer.load_checkpoint("checkpoint0.ortcp")
        {}

        """
        from ortrain.trainer import checkpoint

        if not paths:
            raise IndexError("load_checkpoint needs a path")
        saved = _checkpoint_storage.load(paths[0], key="trainer_options")
        if _state.is_divided(saved):
            aggregated = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
            assert aggregated is not None, "the files are parts of a state"
            state = aggregated
        else:
            path = checkpoint.complete_file(paths, self._world)
            state = _checkpoint_storage.load(path)
            _state.check_ranks(state, self._world, path)
        hexadecimal = state.pop("user_dict", None)
        user_dict: Any = {}
        if hexadecimal is not None:
            user_dict = _checkpoint_storage.from_serialized_hex(hexadecimal, allow_pickle=allow_pickle)
        self.load_state_dict(state, strict=strict)
        return user_dict

    def checkpoint_state(self) -> CheckpointState:
        """Returns a copy of weights, moments, steps and seed as a state of :mod:`ortrain.api`.

        A training on a device can continue from this state. Frozen weights (``utils.frozen_weights``) and running
        statistics become parameters that are not trained. The step is the optimizer's largest update count of all
        weights, and with SGD ``optimization_step``. An optimizer model of AdamW continues from the moments; a LAMB
        optimizer needs ``Optimizer(..., replace=True)`` for this. A state of SGD is a state of ``ortrain.optim.SGD``.

        Raises:
            OrtrainError: if there is no session yet.

        >>> loss, logits = trainer.train_step(x, labels)
        >>> trainer.checkpoint_state()
        CheckpointState(4 parameters, 4 of them trained, 28840 bytes, step 1, learning rate 0.001)

        """
        runner, _ = self._ready(self._train_io_binding)
        return checkpoint_of(self, runner.session)

    @classmethod
    def from_checkpoint_state(
        cls,
        state: CheckpointState,
        model: ModelProto,
        model_desc: dict[str, Any],
        optim_config: _OptimizerConfig,
        options: ORTTrainerOptions | None = None,
        *,
        mixed_precision_dtype: str = "float16",
    ) -> ORTTrainer:
        """Builds a trainer that continues from a state of :mod:`ortrain.api`: its weights, moments, steps and seed.

        Args:
            state: the state. Its parameters must be initializers of the model.
            model: the forward model with its loss.
            model_desc: as for the class.
            optim_config: the optimizer. With SGD, or for a state without moments, only weights and steps are used. A
                momentum of zeros is ignored: a state of SGD has one even if the momentum setting is off.
            options: as for the class.
            mixed_precision_dtype: as for the class.

        Raises:
            TypeError: if ``state`` is not a ``CheckpointState``.
            InvalidArgumentError: for a parameter that the model does not have, a trained weight that is missing from
                the state, or values of another shape or type; also for optimizer slots other than two moments, for
                example a momentum that is not zero.
            AssertionError, ValueError, OrtrainError: as for the class.

        >>> import warnings
        >>> from ortrain.trainer import ORTTrainer, ORTTrainerOptions
        >>> from ortrain.trainer.optim import AdamConfig
        >>> warnings.simplefilter("ignore", FutureWarning)
        >>> for step in range(3):
        ...     _ = module(x, labels)
        ...     optimizer.step()
        ...     module.lazy_reset_grad()
        >>> inputs = [("x", ["batch", 64]), ("labels", ["batch"])]
        >>> description = {"inputs": inputs, "outputs": [("loss", [], True)]}
        >>> options = ORTTrainerOptions({"device": {"id": "cpu"}})
        >>> trainer = ORTTrainer.from_checkpoint_state(state, model_with_loss, description, AdamConfig(), options)
        >>> trainer.state_dict()["optimizer"]["fc1.bias"]["Update_Count"]
        array([4])

        """
        from ortrain.api import CheckpointState

        if not isinstance(state, CheckpointState):
            raise TypeError(f"state must be a CheckpointState of ortrain.api, got {type(state).__name__}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            trainer = cls(model, model_desc, optim_config, options=options, mixed_precision_dtype=mixed_precision_dtype)
        runner, _ = trainer._ready(trainer._train_io_binding)
        trainer.load_state_dict(state_dict_of(state, trainer, runner.session), strict=False)
        return trainer
