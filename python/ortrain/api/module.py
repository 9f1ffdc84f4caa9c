"""Modules: models that train.

>>> from ortrain.api.module import Module
>>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
>>> round(float(module(x, labels)), 2)
2.27
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from ortrain import _ortrain
from ortrain._inputs import Described, input_value, native_value, outputs_like_inputs
from ortrain._model_source import ModelLike, PathLike, source_of
from ortrain._options import native_options, own_options
from ortrain._records import record_of
from ortrain._suggest import hint
from ortrain.api.checkpoint_state import CheckpointState
from ortrain.api.outputs import Outputs
from ortrain.api.profile import MemoryUse, Profile
from ortrain.api.quantization import QuantizedTensor, _tensor_of
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.inference import SessionOptions
from ortrain.ortvalue import OrtValue

if TYPE_CHECKING:
    from ortrain.api.outputs import ArrayResult, OrtValueResult

__all__ = ["Module"]


class Module:
    """Training model and, optionally, an eval model on one state.

    Two modules may share a state. Each module has its own gradients, and :attr:`Parameter.grad
    <ortrain.api.checkpoint_state.Parameter.grad>` shows the gradients of the newest one.

    A copy (``copy.deepcopy``) or an unpickled module has a state of its own with the same bits, and the mode. It reads
    models of paths again, so the files must be there unchanged. Gradients, a pending :meth:`lazy_reset_grad` and
    compiled programs are not kept. A module that was made from bytes holds on to them for its copies.

    Args:
        train_model_uri: the training model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        state: the parameters.
        eval_model_uri: the eval model, likewise; :meth:`eval` and :meth:`export_model_for_inferencing` need it.
        device: the device to run on: ``"cpu"``, a GPU (``"vulkan"``, ``"metal"``, ``"dx12"``, ``"webgpu"`` for the best
            one), ``"auto"``, or ``"reference"``, the slow evaluator that defines correct results. The names are in
            :func:`ortrain.devices`. The state moves to the device.
        session_options: options for threads, memory and precision.
        precision: the precision of inner products; it overrides :attr:`SessionOptions.precision
            <ortrain.SessionOptions.precision>`.
        bf16_fallback: the unit that may multiply bfloat16 without AMX; it overrides the session options, too.

    Raises:
        NoSuchFileError, InvalidModelError, UnsupportedError: if a model cannot be read or run, or does not fit the
            state; if the machine has no permitted unit for the precision.
        InvalidArgumentError: if the device or the precision is unknown.
        DeviceUnavailableError: if this machine does not have the device.
        MemoryLimitError: if parameters and gradients alone exceed ``memory_limit``.

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
    """True if calls run the training model; initially ``True``."""

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
        source = source_of(train_model_uri)
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state must be a CheckpointState, got {type(state).__name__}")
        self.training = True
        self._state = state
        self._device = _ortrain.device_name(device)
        self._inputs: dict[bool, list[Described]] = {}
        self._outputs: dict[bool, list[str]] = {}
        evaluation = None if eval_model_uri is None else source_of(eval_model_uri)
        # Arguments of the constructor for copies; later changes of the caller's options have no effect on them.
        options = None if session_options is None else copy.copy(own_options(session_options))
        self._made_from = source, evaluation, options, precision, bf16_fallback
        state._take_seed()
        self._native = _ortrain.Module(
            source,
            state._native,
            evaluation,
            options=native_options(session_options, self._device, precision=precision, bf16_fallback=bf16_fallback),
        )

    def __reduce__(self) -> Any:
        return _from_pickle, (*self._made_from, self._state, self._device, self.training)

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
        """Run one step: the training model if :attr:`training` is set, else the eval model.

        Inputs are matched by position to :meth:`input_names`, or passed by these names. Each input is an array, an
        :class:`~ortrain.OrtValue`, or an object with ``__array__`` or ``__dlpack__``. Lists and numbers take the type
        of the input. Another type of integers for an input of integers, or of floats for an input of floats, is
        converted if no element changes: int32 labels, float64 values that float32 can hold. For any other array the
        error message names the cast.

        If all inputs are :class:`~ortrain.OrtValue`, so are the outputs. Otherwise they are ndarrays, and a loss also
        behaves as a number (:class:`~ortrain.api.Scalar`). A single output is returned bare. Several outputs are a
        tuple in the order of :meth:`output_names` (:class:`~ortrain.api.Outputs`), with access by name as well.

        A training step adds to the gradients and changes no trainable parameter. An interrupted step (Ctrl-C,
        *interrupt* in a notebook) raises ``KeyboardInterrupt`` and changes nothing.

        Raises:
            AnomalyError: if the step makes NaN or infinities and ``session_options.detect_anomaly`` is set.
            InvalidArgumentError: for a wrong number, name, type or shape of inputs, and for labels that are no classes.
            MemoryLimitError: if the step would take more than ``memory_limit``, even if values are recomputed instead
                of stored (rematerialization).

        >>> loss = module(x, labels)
        >>> loss.shape, loss.dtype
        ((), dtype('float32'))
        >>> bool(loss == module(labels=labels, x=x))
        True

        """
        inputs = self._in_order(user_inputs, named_inputs)
        outputs = self._native.step(self._values(inputs), self.training)
        results = outputs_like_inputs(outputs, inputs)
        if len(results) == 1:
            return results[0]
        # Cached: reading the names again would wait for another thread that uses the state.
        if self.training not in self._outputs:
            self._outputs[self.training] = self.output_names()
        return Outputs(results, self._outputs[self.training])

    def _in_order(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of a step in the model's order. A ``None`` by position is ignored."""
        inputs = [value for value in positional if value is not None]
        if not named:
            return inputs
        names = self.input_names()
        rest = names[len(inputs) :]
        for name in named:
            if name not in rest:
                none = f"is not one of {', '.join(names)}{hint(name, names)}"
                reason = "is given by position and by name" if name in names else none
                raise InvalidArgumentError(f"input {name!r} {reason}")
        missing = [name for name in rest if name not in named]
        if missing:
            raise InvalidArgumentError(f"no value was given for input {', '.join(map(repr, missing))}")
        return inputs + [named[name] for name in rest]

    def _values(self, inputs: list[Any]) -> list[_ortrain.OrtValue]:
        if self.training not in self._inputs:
            self._inputs[self.training] = self._native.inputs(self.training)
        described = self._inputs[self.training]
        # The core reports the expected number of inputs.
        if len(inputs) != len(described):
            return [native_value(value) for value in inputs]
        return list(map(input_value, inputs, described))

    def profile(self, *user_inputs: Any, steps: int = 10, warmup: int = 1, **named_inputs: Any) -> Profile:
        """Run steps on these inputs, as a call does, and measure the time of each instruction.

        ``warmup`` steps run before the timed ones. All of them are real steps of the current mode, but they change
        nothing: writes of a step (gradients, running statistics) go to copies, which take memory during the profile.
        Parameters, gradients, the count of training steps and a pending :meth:`lazy_reset_grad` stay as they are. Later
        steps give the same bits as without a profile.

        Raises:
            InvalidArgumentError: as for a call; for less than one step.
            MemoryLimitError: if the step would take more than ``memory_limit``.

        >>> profile = module.profile(x, labels, steps=3)
        >>> len(profile.steps)
        3
        >>> profile.chrome_trace("step.json")

        """
        if steps < 1 or warmup < 0:
            raise InvalidArgumentError(f"steps must be at least 1 and warmup at least 0, got {steps} and {warmup}")
        inputs = self._values(self._in_order(user_inputs, named_inputs))
        return Profile(self._native.profile(inputs, self.training, steps, warmup))

    @property
    def precision(self) -> str:
        """Precision of inner products: ``"f32"``, ``"bf16"``, ``"bf16x3"`` or ``"bf16x6"``.

        >>> Module("training_model.onnx", state, precision="bf16", bf16_fallback="emulated").precision
        'bf16'
        >>> module.precision
        'f32'
        """
        return self._native.precision().name

    @property
    def bf16_unit(self) -> str | None:
        """Unit that multiplies bfloat16: ``"amx"``, ``"avx512_bf16"`` or ``"emulated"``.

        ``None`` at the precision ``"f32"``, and on the reference evaluator.

        >>> rounded = Module("training_model.onnx", state, precision="bf16x3", bf16_fallback="emulated")
        >>> rounded.bf16_unit in ("amx", "avx512_bf16", "emulated")
        True
        >>> bool(abs(rounded(x, labels) - module(x, labels)) < 1e-4)
        True
        """
        return self._native.precision().bf16_unit

    def memory(self, *user_inputs: Any, **named_inputs: Any) -> MemoryUse:
        """Return the bytes that the module holds now; after a step, these are all bytes of the step.

        With inputs, return the bytes that a step of the current mode on them would take; the step does not run. Under a
        ``memory_limit`` this is the memory after rematerialization, which recomputes values instead of storing them.
        The results are the same bits.

        Raises:
            InvalidArgumentError: for inputs, as for a call.

        >>> before = module.memory(x, labels)
        >>> _ = module(x, labels)
        >>> module.memory() == before
        True
        >>> before.parameters == before.gradients
        True

        """
        if not user_inputs and not named_inputs:
            return record_of(MemoryUse, self._native.memory())
        inputs = self._values(self._in_order(user_inputs, named_inputs))
        return record_of(MemoryUse, self._native.memory_of(inputs, self.training))

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
        """Let the next training step overwrite the gradients instead of adding to them. They stay until then.

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
        """Return the L2 norm of each accumulated gradient by parameter name, in the order of the parameters.

        A layer that learns nothing has norm zero; an exploding layer has a large norm. Sums are float64.
        :func:`ortrain.inspect` of the module also shows the norms of the parameters.

        Raises:
            OrtrainError: if the state is nominal.

        >>> _ = module(x, labels)
        >>> norms = module.gradient_norms()
        >>> list(norms)
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        >>> all(norm > 0 for norm in norms.values())
        True

        """
        return {norms.name: norms.gradient for norms in self._native.norms()}

    def quantization(self) -> list[QuantizedTensor]:
        """Return scales, ranges and the share of clipped elements for each quantized tensor, in the order of the nodes.

        ``QuantizeLinear`` quantizes weights and activations; integer weights without training are in the list, too. The
        list is empty for a model without quantized tensors. Scales are the current ones.

        Raises:
            OrtrainError: if the state is nominal.

        >>> module.quantization()
        []

        """
        return [_tensor_of(tensor) for tensor in self._native.quantization()]

    def input_names(self) -> list[str]:
        """Return the inputs of a call in the current mode; an empty list in eval mode without an eval model.

        >>> module.input_names()
        ['x', 'labels']
        """
        return self._native.input_names(self.training)

    def output_names(self) -> list[str]:
        """Return the outputs of a call in the current mode; an empty list in eval mode without an eval model.

        >>> (loss,) = module.output_names()
        """
        return self._native.output_names(self.training)

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of all (trainable) parameters.

        >>> module.get_parameters_size()
        7210
        """
        return self._native.parameters_size(trainable_only)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """Return a copy of all (trainable) parameters as a float32 vector, in the order of the training model's inputs.

        Raises:
            InvalidArgumentError: for a parameter that is not float32.
            OrtrainError: if the state is nominal.

        >>> module.get_contiguous_parameters()
        OrtValue(tensor(float), shape=[7210])

        """
        return OrtValue(self._native.copy_parameters_to_buffer(trainable_only))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the (trainable) parameters from a vector in the layout of :meth:`get_contiguous_parameters`.

        Args:
            buffer: an :class:`~ortrain.OrtValue`, an array, or an object with ``__array__`` or ``__dlpack__``. It is a
                float32 vector with :meth:`get_parameters_size` elements.
            trainable_only: True if the vector has only the trainable parameters.

        Raises:
            InvalidArgumentError: for another type or number of elements.

        >>> parameters = module.get_contiguous_parameters(trainable_only=True).numpy()
        >>> module.copy_buffer_to_parameters(parameters / 2)

        """
        self._native.copy_buffer_to_parameters(native_value(buffer), trainable_only)

    def get_contiguous_gradients(self) -> OrtValue:
        """Return a copy of all gradients, packed like the trainable parameters of :meth:`get_contiguous_parameters`.

        Raises:
            InvalidArgumentError: for a parameter that is not float32.
            OrtrainError: if the state is nominal.

        >>> _ = module(x, labels)
        >>> module.get_contiguous_gradients()
        OrtValue(tensor(float), shape=[7210])

        """
        return OrtValue(self._native.copy_gradients_to_buffer())

    def copy_buffer_to_gradients(self, buffer: Any) -> None:
        """Set the gradients from a vector in the layout of :meth:`get_contiguous_gradients`: a mean over workers, say.

        ``buffer`` is as for :meth:`copy_buffer_to_parameters`. A pending :meth:`lazy_reset_grad` stays pending.

        Raises:
            InvalidArgumentError: for another type or number of elements.

        >>> gradients = module.get_contiguous_gradients().numpy()
        >>> module.copy_buffer_to_gradients(gradients / 2)

        """
        self._native.copy_buffer_to_gradients(native_value(buffer))

    @property
    def device(self) -> str:
        """Device of the module, with its name in :func:`ortrain.devices`.

        >>> module.device
        'cpu'
        """
        return self._device

    def gradient_planes(self) -> list[Any]:
        """Return live views of the memory of all gradients: a vector for each element type.

        On a device each view is a :class:`~ortrain.DeviceArray`.

        The views have the layout of the planes of the trainable parameters, element for element:
        :meth:`CheckpointState.layout <ortrain.api.CheckpointState.layout>`. NumPy arrays support DLPack, so an
        all-reduce over workers needs neither copies nor names. The elements between tensors are zero and must stay
        zero.

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
        embed: bool = False,
    ) -> None:
        """Write the eval model with the current parameters, reduced to the nodes that the named values need.

        A model of more than 2 GiB has all its weights in a second file, ``<inference_model_uri>.data``; move and copy
        both. At every moment the model on disk has the weights that belong to it.

        A model with adapters refers to the files of its base if they are in the folder of the file or below. Their
        SHA-1 is compared when the model is loaded. A file elsewhere has the base, too.

        Args:
            inference_model_uri: the file. An existing file is replaced.
            graph_output_names: the outputs: any values of the eval model, including intermediate ones.
            external_data: True to store the weights in a second file even if one file could hold them.
            average: True to replace the weights by averages of the optimizer (:attr:`Parameter.average`).
            embed: True to write the base of a model with adapters (:mod:`ortrain.lora`) into the file, instead of a
                reference to its files.

        Raises:
            InvalidArgumentError: for an unknown name, and for an empty list.
            OrtrainError: without an eval model, if the file cannot be written, or if there are no averages.

        >>> import ortrain
        >>> module.export_model_for_inferencing("trained.onnx", ["logits", "hidden"])
        >>> [output.name for output in ortrain.InferenceSession("trained.onnx").get_outputs()]
        ['logits', 'hidden']

        """
        if isinstance(graph_output_names, str):
            raise TypeError("graph_output_names must be a list of names, got one name")
        above = 0 if external_data else None
        self._native.export_model_for_inferencing(
            os.fspath(inference_model_uri), list(graph_output_names), above, average, embed
        )


def _from_pickle(
    source: str | bytes,
    evaluation: str | bytes | None,
    session_options: SessionOptions | None,
    precision: str | None,
    bf16_fallback: str | None,
    state: CheckpointState,
    device: str,
    training: bool,
) -> Module:
    """Return the module that was pickled or copied."""
    module = Module(
        source, state, evaluation, device, session_options, precision=precision, bf16_fallback=bf16_fallback
    )
    return module.train(training)
