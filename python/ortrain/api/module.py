"""A model that trains.

>>> from ortrain.api.module import Module
>>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
>>> round(float(module(x, labels)), 2)
2.27
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from ortrain import _ortrain
from ortrain._inputs import Described, as_given, input_value, native_value
from ortrain._near import hint
from ortrain._options import training_options
from ortrain._sources import ModelLike, PathLike, model_source
from ortrain.api.checkpoint_state import CheckpointState
from ortrain.api.outputs import Outputs
from ortrain.api.profile import MemoryUse, Profile
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.inference import SessionOptions
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    from ortrain.api.outputs import ArrayResult, OrtValueResult

__all__ = ["Module"]


class Module:
    """A training model and, optionally, an eval model on one state.

    Two modules may share a state; each has gradients of its own, and :attr:`Parameter.grad
    <ortrain.api.checkpoint_state.Parameter.grad>` shows those of the newest.

    Args:
        train_model_uri: the training model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        state: the parameters.
        eval_model_uri: the eval model, likewise; :meth:`eval` and :meth:`export_model_for_inferencing` need it.
        device: where it runs: ``"cpu"``, a GPU (``"vulkan"``, ``"metal"``, ``"dx12"``, ``"webgpu"`` for the best one),
            ``"auto"``, or ``"reference"``, the slow evaluator that says what is right: :func:`ortrain.devices`. The
            state moves there.
        session_options: threads, bytes, precision.
        precision: how exactly inner products are computed, instead of what the session options say:
            :attr:`SessionOptions.precision <ortrain.SessionOptions.precision>`.
        bf16_fallback: what may multiply bfloat16 where there is no AMX, likewise.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if a model cannot be read or run, or does not fit the
            state; if the machine has nothing that computes the precision and may be used.
        InvalidArgumentError: if there is no such device or precision.
        DeviceUnavailableError: if the device is not here.
        MemoryLimitError: if not even parameters and gradients are within ``memory_limit``.

    >>> state = CheckpointState.load_checkpoint("checkpoint")
    >>> module = Module("training_model.onnx", state, "eval_model.onnx")
    >>> module
    Module(inputs=['x', 'labels'], mode='train', device='cpu', precision='f32')
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> before = module(x, labels)
    >>> optimizer.step()
    >>> module.lazy_reset_grad()
    >>> bool(module(x, labels) < before)
    True

    """

    training: bool
    """Whether calls run the training model; starts ``True``."""

    def __init__(
        self,
        train_model_uri: ModelLike,
        state: CheckpointState,
        eval_model_uri: ModelLike | None = None,
        device: str = "cpu",
        session_options: SessionOptions | None = None,
        *,
        precision: str | None = None,
        bf16_fallback: str | None = None,
    ) -> None:
        source = model_source(train_model_uri)
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a CheckpointState, not {type(state).__name__}")
        self.training = True
        self._state = state
        self._device = _ortrain.device_name(device)
        self._inputs: dict[bool, list[Described]] = {}
        self._outputs: dict[bool, list[str]] = {}
        state._take_seed()
        self._native = _ortrain.Module(
            source,
            state._native,
            None if eval_model_uri is None else model_source(eval_model_uri),
            device=self._device,
            **training_options(session_options, precision, bf16_fallback),
        )

    def __repr__(self) -> str:
        mode = "train" if self.training else "eval"
        try:
            inputs, precision = self.input_names(), self.precision
        except OrtrainError as error:
            return f"Module(mode={mode!r}, device={self._device!r}, cannot be read now: {error})"
        return f"Module(inputs={inputs}, mode={mode!r}, device={self._device!r}, precision={precision!r})"

    @overload
    def __call__(self, *user_inputs: OrtValue, **named_inputs: OrtValue) -> OrtValueResult: ...
    @overload
    def __call__(self, *user_inputs: Any, **named_inputs: Any) -> ArrayResult: ...
    def __call__(self, *user_inputs: Any, **named_inputs: Any) -> Any:
        """Run one step: the training model if :attr:`training`, else the eval model.

        Inputs are matched by position to :meth:`input_names`, or given by those names. Each is an array, an
        :class:`~ortrain.OrtValue`, or whatever has ``__array__`` or ``__dlpack__``. Lists and numbers take the type of
        the input. An array of another type of integers, for an input of integers, or of another type of floats, for one
        of floats, is converted if no element changes (int32 labels, float64 values that float32 has, too); otherwise
        the message names the cast. If all are :class:`~ortrain.OrtValue`, so are the outputs; otherwise they are
        ndarrays, and a loss is a number, too (:class:`~ortrain.api.Scalar`). One output comes bare, several come as a
        tuple in the order of :meth:`output_names` (:class:`~ortrain.api.Outputs`), which also finds them by name. A
        training step adds to the gradients and changes no trainable parameter. A step that is interrupted (Ctrl-C,
        *interrupt* in a notebook) raises ``KeyboardInterrupt`` and has changed nothing.

        Raises:
            AnomalyError: if the step makes NaN or infinities and ``session_options.detect_anomaly`` is set.
            InvalidArgumentError: for inputs of wrong number, name, type or shape, and labels that are no classes.
            MemoryLimitError: if the step would take more than ``memory_limit``, even if values are computed again
                instead of kept.

        >>> loss = module(x, labels)
        >>> loss.shape, loss.dtype
        ((), dtype('float32'))
        >>> bool(loss == module(labels=labels, x=x))
        True

        """
        given = self._in_order(user_inputs, named_inputs)
        outputs = self._native.step(self._values(given), self.training)
        results = as_given(outputs, given)
        if len(results) == 1:
            return results[0]
        # Asked for once: another thread may be at work on the state by now.
        if self.training not in self._outputs:
            self._outputs[self.training] = self.output_names()
        return Outputs(results, self._outputs[self.training])

    def _in_order(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        """The inputs of a step in the model's order. ``None`` by position is as if it were not there."""
        given = [value for value in positional if value is not None]
        if not named:
            return given
        names = self.input_names()
        rest = names[len(given) :]
        for name in named:
            if name not in rest:
                none = f"is none of {', '.join(names)}{hint(name, names)}"
                reason = "is given by position, too" if name in names else none
                raise InvalidArgumentError(f"input {name!r} {reason}")
        missing = [name for name in rest if name not in named]
        if missing:
            raise InvalidArgumentError(f"no value was given for input {', '.join(map(repr, missing))}")
        return given + [named[name] for name in rest]

    def _values(self, given: list[Any]) -> list[_ortrain.OrtValue]:
        if self.training not in self._inputs:
            self._inputs[self.training] = self._native.inputs(self.training)
        described = self._inputs[self.training]
        # The core says how many there should be.
        if len(given) != len(described):
            return [native_value(value) for value in given]
        return list(map(input_value, given, described))

    def profile(self, *user_inputs: Any, steps: int = 10, warmup: int = 1, **named_inputs: Any) -> Profile:
        """Run steps on these inputs, as a call does, and say where their time goes.

        ``warmup`` steps come before the timed ones. They all are real steps of the current mode, but they change
        nothing: what a step writes (gradients, running statistics) goes to copies, which take memory for the time of
        the profile. Parameters, gradients, the count of train steps and a pending :meth:`lazy_reset_grad` stay as they
        are, and later steps give the same bits as without a profile.

        Raises:
            InvalidArgumentError: as of a call; for less than one step.
            MemoryLimitError: if the step would take more than ``memory_limit``.

        >>> profile = module.profile(x, labels, steps=3)
        >>> len(profile.steps)
        3
        >>> profile.chrome_trace("step.json")

        """
        if steps < 1 or warmup < 0:
            raise InvalidArgumentError(f"steps is at least 1 and warmup at least 0, not {steps} and {warmup}")
        inputs = self._values(self._in_order(user_inputs, named_inputs))
        return Profile(self._native.profile(inputs, self.training, steps, warmup))

    @property
    def precision(self) -> str:
        """How exactly inner products are computed: ``"f32"``, ``"bf16"``, ``"bf16x3"`` or ``"bf16x6"``.

        >>> Module("training_model.onnx", state, precision="bf16", bf16_fallback="emulated").precision
        'bf16'
        >>> module.precision
        'f32'
        """
        return self._native.precision()[0]

    @property
    def bf16_unit(self) -> str | None:
        """What multiplies bfloat16: ``"amx"``, ``"avx512_bf16"`` or ``"emulated"``.

        ``None`` at the precision ``"f32"``, and on the reference.

        >>> rounded = Module("training_model.onnx", state, precision="bf16x3", bf16_fallback="emulated")
        >>> rounded.bf16_unit in ("amx", "avx512_bf16", "emulated")
        True
        >>> bool(abs(rounded(x, labels) - module(x, labels)) < 1e-4)
        True
        """
        return self._native.precision()[1]

    def memory(self, *user_inputs: Any, **named_inputs: Any) -> MemoryUse:
        """The bytes that the module holds now: after a step, all that the step took.

        With inputs, those that a step of the current mode on them would take, which is not made. Under a
        ``memory_limit`` that is what is left once values are computed again instead of kept; results are the same bits.

        Raises:
            InvalidArgumentError: for inputs, as of a call.

        >>> before = module.memory(x, labels)
        >>> _ = module(x, labels)
        >>> module.memory() == before
        True
        >>> before.parameters == before.gradients
        True

        """
        if not user_inputs and not named_inputs:
            return MemoryUse(*self._native.memory())
        inputs = self._values(self._in_order(user_inputs, named_inputs))
        return MemoryUse(*self._native.memory_of(inputs, self.training))

    def train(self, mode: bool = True) -> Module:
        """Let calls run the training model (or, with ``False``, the eval model).

        >>> module.train(False).training
        False
        >>> module.train().training
        True
        """
        self.training = mode
        return self

    def eval(self) -> Module:
        """Let calls run the eval model.

        >>> _ = module.eval()
        >>> round(float(module(x, labels)), 2)
        2.27
        """
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step overwrite the gradients instead of adding to them. Until then they stay.

        >>> bias = state.parameters["fc2.bias"]
        >>> _ = module(x, labels)
        >>> once = bias.grad.copy()
        >>> _ = module(x, labels)
        >>> np.array_equal(bias.grad, 2 * once)
        True
        >>> module.lazy_reset_grad()
        >>> _ = module(x, labels)
        >>> np.array_equal(bias.grad, once)
        True
        """
        self._native.lazy_reset_grad()

    def gradient_norms(self) -> dict[str, float]:
        """The L2 norm of each accumulated gradient, by the names of the parameters, in their order.

        A layer that learns nothing has zero; one that explodes has a large one. Sums are float64.
        :func:`ortrain.inspect` of the module shows the norms of the parameters beside them.

        Raises:
            OrtrainError: if the state is nominal.

        >>> _ = module(x, labels)
        >>> norms = module.gradient_norms()
        >>> list(norms)
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        >>> all(norm > 0 for norm in norms.values())
        True

        """
        return {name: gradient for name, _, gradient in self._native.norms()}

    def input_names(self) -> list[str]:
        """The inputs that a call takes in the current mode; none in eval mode without an eval model.

        >>> module.input_names()
        ['x', 'labels']
        """
        return self._native.input_names(self.training)

    def output_names(self) -> list[str]:
        """The outputs that a call returns in the current mode; none in eval mode without an eval model.

        >>> (loss,) = module.output_names()
        """
        return self._native.output_names(self.training)

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """The number of elements of all (trainable) parameters.

        >>> module.get_parameters_size()
        7210
        """
        return self._native.parameters_size(trainable_only)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """All (trainable) parameters, packed in the order of the training model's inputs: a float32 vector, a copy.

        Raises:
            InvalidArgumentError: for a parameter that is not float32.
            OrtrainError: if the state is nominal.

        >>> module.get_contiguous_parameters()
        OrtValue(tensor(float), shape=[7210])

        """
        return OrtValue(self._native.copy_parameters_to_buffer(trainable_only))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the (trainable) parameters from a vector packed as by :meth:`get_contiguous_parameters`.

        Args:
            buffer: an :class:`~ortrain.OrtValue`, an array, or whatever has ``__array__`` or ``__dlpack__``: float32 of
                as many elements as :meth:`get_parameters_size` says.
            trainable_only: whether it holds the trainable ones alone.

        Raises:
            InvalidArgumentError: for another type or number of elements.

        >>> parameters = module.get_contiguous_parameters(trainable_only=True).numpy()
        >>> module.copy_buffer_to_parameters(parameters / 2)

        """
        self._native.copy_buffer_to_parameters(native_value(buffer), trainable_only)

    def get_contiguous_gradients(self) -> OrtValue:
        """All gradients, packed as :meth:`get_contiguous_parameters` packs the trainable parameters: a copy.

        Raises:
            InvalidArgumentError: for a parameter that is not float32.
            OrtrainError: if the state is nominal.

        >>> _ = module(x, labels)
        >>> module.get_contiguous_gradients()
        OrtValue(tensor(float), shape=[7210])

        """
        return OrtValue(self._native.copy_gradients_to_buffer())

    def copy_buffer_to_gradients(self, buffer: Any) -> None:
        """Set the gradients from a vector packed as by :meth:`get_contiguous_gradients`, a mean over workers, say.

        ``buffer`` is what :meth:`copy_buffer_to_parameters` takes. A pending :meth:`lazy_reset_grad` stays pending.

        Raises:
            InvalidArgumentError: for another type or number of elements.

        >>> gradients = module.get_contiguous_gradients().numpy()
        >>> module.copy_buffer_to_gradients(gradients / 2)

        """
        self._native.copy_buffer_to_gradients(native_value(buffer))

    @property
    def device(self) -> str:
        """Where it runs, by the name that :func:`ortrain.devices` has.

        >>> module.device
        'cpu'
        """
        return self._device

    def gradient_planes(self) -> list[Any]:
        """Live views of the memory that all gradients lie in: a vector for each element type.

        On a device each is a :class:`~ortrain.DeviceArray`.

        They have the layout of the planes of the trainable parameters, element for element:
        :meth:`CheckpointState.layout <ortrain.api.CheckpointState.layout>`. NumPy arrays speak DLPack, so that an
        all-reduce over workers needs neither copies nor names. What lies between tensors is zero and has to stay so.

        >>> _ = module(x, labels)
        >>> for plane in module.gradient_planes():
        ...     plane /= 2                        # here an all-reduce, in place
        >>> np.shares_memory(np.from_dlpack(plane), state.parameters["fc1.weight"].grad)
        True
        """
        return self._native.gradient_planes()

    def export_model_for_inferencing(
        self,
        inference_model_uri: PathLike,
        graph_output_names: list[str],
        external_data: bool = False,
        *,
        average: bool = False,
    ) -> None:
        """Write the eval model with the current parameters in it, cut down to what the named values need.

        A model of more than 2 GiB has all its weights in a second file, ``<inference_model_uri>.data``; move and copy
        both. At every moment the model that is there has the weights that belong to it.

        Args:
            inference_model_uri: the file; one that is there is replaced.
            graph_output_names: the outputs: any values of the eval model, also intermediate ones.
            external_data: whether the weights lie in a second file also where one file could hold them.
            average: whether the averages that the optimizer keeps (:attr:`Parameter.average`) stand in the place of
                the weights.

        Raises:
            InvalidArgumentError: for a name that no value has, or without any.
            OrtrainError: without an eval model, if the file cannot be written, or if there are no averages.

        >>> import ortrain
        >>> module.export_model_for_inferencing("trained.onnx", ["logits", "hidden"])
        >>> [output.name for output in ortrain.InferenceSession("trained.onnx").get_outputs()]
        ['logits', 'hidden']

        """
        if isinstance(graph_output_names, str):
            raise TypeError("graph_output_names is a list of names, not one name")
        above = 0 if external_data else None
        self._native.export_model_for_inferencing(
            os.fspath(inference_model_uri), list(graph_output_names), above, average
        )
