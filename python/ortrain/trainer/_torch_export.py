"""Export of a PyTorch module to an ONNX model, with the inputs of the first step.

This file imports PyTorch. Only a trainer of a PyTorch module imports this file.
"""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.onnx import symbolic_helper

from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.trainer._description import check_shape
from ortrain.trainer._runner import Runner, inputs_by_name
from ortrain.trainer._session import make_session
from ortrain.trainer._values import as_torch, check_dense

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

    from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc
    from ortrain.trainer.orttrainer import ORTTrainer

__all__ = ["begin", "state_of_module"]

# Tolerances between the outputs of the exported model and of the module, as in onnxruntime-training.
RELATIVE, ABSOLUTE = 1e-2, 1e-6
# Name prefixes of the two parts of `_WithLoss`.
_MODEL, _LOSS = "model.", "loss_fn."


def begin(trainer: ORTTrainer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Exports the module of a trainer and builds the session.

    Args:
        trainer: the trainer, which must not have a session yet.
        args: positional inputs of the first step.
        kwargs: inputs of the first step by name.

    Raises:
        AssertionError: if inputs of the description are missing, the description does not match the arguments of
            ``forward``, or the model computes other values than the module (``check_model_export``).
        InvalidArgumentError: for outputs that do not match the description.
        UnsupportedError: for a module that PyTorch cannot export.

    Warns:
        UserWarning: for a module that cannot be copied, and for trained weights with ``requires_grad=False``.

    """
    module, options = trainer._torch_model, trainer.options
    samples = _samples(trainer.model_desc, args, kwargs)
    combined = _WithLoss(module.cpu(), trainer.loss_fn, trainer.model_desc)
    with _unchanged(combined):
        copied = _copied(combined)
        outputs = _evaluated(copied, samples)
        _check_outputs(trainer.model_desc, outputs)
        traced = combined if copied is combined else _copied(combined)
        model = _exported(traced, samples, trainer.model_desc, options._internal_use)
    _put_sizes(model, trainer.model_desc)
    _name_as_modules(model)
    _put_buffers(model, combined)
    frozen = options.utils.frozen_weights
    options.utils.frozen_weights = [*frozen, *_not_trained(model, combined, frozen)]
    try:
        if options.debug.check_model_export:
            _check_export(trainer, model, samples, outputs)
        trainer._init_onnx_model(model)
    except BaseException:
        # Restores the trainer, so that the next step repeats the export.
        options.utils.frozen_weights = frozen
        trainer._onnx_model = trainer._training_session = None
        raise
    _add_types(trainer.model_desc, samples, outputs)


def state_of_module(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns trained weights for ``load_state_dict`` of the module: exactly the names of the module.

    A name that is missing from the exported model is a second name of a weight, or a value without an effect on the
    outputs.
    """
    own = module.state_dict()
    twins = {_storage_key(value): weights[name] for name, value in own.items() if name in weights and value.numel()}
    return {
        name: weights[name] if name in weights else twins.get(_storage_key(value), value).clone()
        for name, value in own.items()
    }


def _storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for two names of the same tensor."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# Module with loss.


class _WithLoss(nn.Module):  # type: ignore[misc]
    """A module with its loss: takes inputs in the order of a description, and returns a tuple of tensors."""

    def __init__(self, model: nn.Module, loss_fn: Any, description: _ORTTrainerModelDesc) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self._names = [value.name for value in description.inputs]
        self._argument_names = _arguments(model, self._names, loss_fn is not None)
        self._count = len(description.outputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named_inputs = dict(zip(self._names, inputs, strict=True))
        results = self.model(**{name: named_inputs[name] for name in self._argument_names})
        losses = () if self.loss_fn is None else (self.loss_fn(results, inputs[-1]),)
        return (*losses, *_tensors(results))[: self._count]


def _arguments(module: nn.Module, names: Sequence[str], has_loss: bool) -> list[str]:
    """Returns the inputs that are arguments of a module's ``forward``. The last input may be for the loss only."""
    parameters = inspect.signature(module.forward).parameters
    by_name = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    of_model = names[:-1] if has_loss else names
    for name in of_model:
        if name not in by_name and not takes_any:
            raise AssertionError(
                f"input {name!r} of model_desc is not an argument of {type(module).__name__}.forward; the arguments "
                f"are {', '.join(by_name)}{hint(name, by_name)}"
            )
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_needed and (name not in by_name or name not in names):
            raise AssertionError(
                f"{type(module).__name__}.forward requires the argument {name!r} by name, but model_desc has no "
                f"input for it; the inputs are {', '.join(names)}{hint(name, names)}"
            )
    return [name for name in names if name in by_name or (takes_any and name in of_model)]


def _tensors(results: Any) -> list[torch.Tensor]:
    """Returns the tensors in the result of a module, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, Mapping):
        results = results.values()
    elif not isinstance(results, (list, tuple)):
        return []
    return [tensor for result in results for tensor in _tensors(result)]


def _samples(
    description: _ORTTrainerModelDesc, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the inputs of the first step in the order of the description, as copies on the CPU."""
    names = [value.name for value in description.inputs]
    inputs = inputs_by_name(names, args, kwargs)
    samples = {}
    sizes: dict[str, int] = {}
    for name, shape, *_ in description.inputs:
        value = inputs[name]
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            check_dense(name, value)
        samples[name] = value.detach().cpu().clone() if is_tensor else torch.from_numpy(np.array(value))
        check_shape(name, shape, samples[name].shape, sizes)
    return samples


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restores module modes, buffers and the random state of PyTorch at the end."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _copied(module: _WithLoss) -> _WithLoss:
    """Returns a copy of a module, since a call may change the module. Returns the module itself if the copy fails."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        warnings.warn(
            "This model cannot be deep copied (or pickled), which is a required step for stateful models to be "
            "properly exported to ONNX. Compute will continue, but unexpected results may occur! The copy failed by "
            f"{type(error).__name__}: {error}",
            UserWarning,
            stacklevel=5,
        )
        return module


def _evaluated(module: _WithLoss, samples: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a module in evaluation mode."""
    module.eval()
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = module(*(sample.clone() for sample in samples.values()))
    return outputs


def _check_outputs(description: _ORTTrainerModelDesc, outputs: Sequence[torch.Tensor]) -> None:
    described = description.outputs
    if len(outputs) < len(described):
        raise InvalidArgumentError(
            f"model_desc has {len(described)} outputs ({', '.join(output.name for output in described)}), but the "
            f"module and loss_fn return {len(outputs)}"
        )
    for about, output in zip(described, outputs, strict=True):
        if about.is_loss and (output.numel() != 1 or not output.is_floating_point()):
            raise InvalidArgumentError(
                f"the loss {about.name!r} must be one floating-point number, but the module returns "
                f"{output.dtype}{list(output.shape)}"
            )
        fits = len(about.shape) == output.ndim and all(
            isinstance(size, str) or size == found for size, found in zip(about.shape, output.shape, strict=True)
        )
        if not fits and not about.is_loss:
            raise InvalidArgumentError(
                f"output {about.name!r} has the shape {about.shape} in model_desc, but the module returns "
                f"{list(output.shape)} for the first inputs"
            )


# Export.


def _exported(
    module: _WithLoss, samples: Mapping[str, torch.Tensor], description: _ORTTrainerModelDesc, internal: Any
) -> ModelProto:
    """Exports a module in training mode to an ONNX model."""
    import onnx

    described = [*description.inputs, *description.outputs]
    axes = {
        value.name: {axis: size for axis, size in enumerate(value.shape) if isinstance(size, str)}
        for value in described
    }
    file = io.BytesIO()
    with warnings.catch_warnings(), _contrib_operators(internal):
        # The exporter warns that PyTorch has a newer exporter. It also warns of the batch counter of
        # BatchNormalization, which the ONNX model does not need.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", r"ONNX Preprocess - Removing mutation .*num_batches_tracked")
        try:
            torch.onnx.export(
                module,
                tuple(sample.clone() for sample in samples.values()),
                file,
                dynamo=False,
                input_names=list(samples),
                output_names=[value.name for value in description.outputs],
                opset_version=internal.onnx_opset_version,
                dynamic_axes={name: own for name, own in axes.items() if own},
                do_constant_folding=False,
                training=torch.onnx.TrainingMode.TRAINING,
            )
        except torch.onnx.OnnxExporterError as error:
            raise UnsupportedError(
                f"PyTorch cannot export the module with opset {internal.onnx_opset_version}: {error}"
            ) from error
    return onnx.load_from_string(file.getvalue())


@symbolic_helper.parse_args("v", "s")  # type: ignore[untyped-decorator]
def _gelu(graph: Any, x: Any, approximate: str = "none") -> Any:
    kind = "Gelu" if approximate == "none" else "FastGelu"
    return graph.op(f"com.microsoft::{kind}", x).setType(x.type())


def _triu(graph: Any, x: Any, diagonal: Any) -> Any:
    return graph.op("com.microsoft::Trilu", x, diagonal, upper_i=1).setType(x.type())


def _tril(graph: Any, x: Any, diagonal: Any) -> Any:
    return graph.op("com.microsoft::Trilu", x, diagonal, upper_i=0).setType(x.type())


_CONTRIB = {"aten::gelu": _gelu, "aten::triu": _triu, "aten::tril": _tril}


@contextmanager
def _contrib_operators(internal: Any) -> Iterator[None]:
    """Exports some PyTorch functions as operators of ``com.microsoft``, if the options enable this."""
    registered = _CONTRIB if internal.enable_onnx_contrib_ops else {}
    for name, symbolic in registered.items():
        torch.onnx.register_custom_op_symbolic(name, symbolic, internal.onnx_opset_version)
    try:
        yield
    finally:
        for name in registered:
            torch.onnx.unregister_custom_op_symbolic(name, internal.onnx_opset_version)


# ONNX model.


def _put_sizes(model: ModelProto, description: _ORTTrainerModelDesc) -> None:
    """Writes the described sizes into the outputs, because the exporter leaves some of them open."""
    described = {output.name: output.shape for output in description.outputs if not output.is_loss}
    for value in model.graph.output:
        for dim, size in zip(value.type.tensor_type.shape.dim, described.get(value.name, ()), strict=False):
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size


def _name_as_modules(model: ModelProto) -> None:
    """Renames initializers to the names in the module's ``state_dict``."""
    graph = model.graph
    others = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    renamed = {tensor.name: tensor.name.removeprefix(_MODEL) for tensor in graph.initializer}
    used_names = others | {name for name, new in renamed.items() if name == new}
    for name, new in renamed.items():
        if name != new and new in used_names:
            raise InvalidArgumentError(
                f"the parameter or buffer {new!r} of the module has the name of another value: of an input or output "
                "of model_desc, or of a weight of loss_fn; rename one of them"
            )
    for tensor in graph.initializer:
        tensor.name = renamed[tensor.name]
    _rename_inputs(graph, renamed)


def _rename_inputs(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inputs(attribute.g, renamed)


def _named(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Returns parameters or buffers of a :class:`_WithLoss` by their names in the model."""
    return {name.removeprefix(_MODEL): value for name, value in values}


def _put_buffers(model: ModelProto, module: _WithLoss) -> None:
    """Restores the original values of buffers: the exporter runs the module once in training mode."""
    buffers = _named(module.named_buffers())
    for tensor in model.graph.initializer:
        if tensor.name in buffers:
            # Copied as bytes, because NumPy lacks some PyTorch types.
            flat = buffers[tensor.name].detach().contiguous().reshape(-1)
            tensor.raw_data = flat.view(torch.uint8).numpy().tobytes()


def _not_trained(model: ModelProto, module: _WithLoss, frozen: Sequence[str]) -> list[str]:
    """Returns the initializers that are buffers.

    Warns of parameters with ``requires_grad=False``, which are trained.
    """
    parameters = _named(module.named_parameters(remove_duplicate=False))
    names = [tensor.name for tensor in model.graph.initializer if tensor.name not in frozen]
    fixed = [name for name in names if name in parameters and not parameters[name].requires_grad]
    if fixed:
        warnings.warn(
            f"parameters with requires_grad=False are trained too: {', '.join(fixed)}; add the names to "
            "utils.frozen_weights of the options to freeze them",
            UserWarning,
            stacklevel=5,
        )
    return [name for name in names if name not in parameters]


def _check_export(
    trainer: ORTTrainer, model: ModelProto, samples: Mapping[str, Any], outputs: Sequence[torch.Tensor]
) -> None:
    """Compares the outputs of the model with the outputs of the module."""
    description = trainer.model_desc
    session = make_session(
        model,
        description,
        trainer.optim_config,
        trainer.options,
        trainer._providers,
        precision=None,
        states={},
    )
    runner = Runner(session, description)
    results = runner.run(
        session.io_binding(), dict(samples), {description.learning_rate.name: 0.0}, runner.outputs, runner.evaluating
    )
    for name, expected in zip(runner.outputs, outputs, strict=True):
        found = as_torch(torch, results[name]).reshape(expected.shape)
        if not torch.allclose(expected, found, RELATIVE, ABSOLUTE, equal_nan=True):
            difference = float((expected.double() - found.double()).abs().max())
            raise AssertionError(
                f"the exported model differs from the module: by {difference:.3g} in output {name!r}; set "
                "debug.check_model_export = False to train anyway"
            )


def _add_types(
    description: _ORTTrainerModelDesc, samples: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Adds the PyTorch types of inputs and outputs to the description."""
    for index, sample in enumerate(samples.values()):
        description.add_type_to_input_description(index, sample.dtype)
    for index, output in enumerate(outputs):
        narrow = getattr(description.outputs[index], "dtype_amp", None)
        narrow = narrow if narrow is None else torch.float16 if narrow == np.float16 else torch.bfloat16
        description.add_type_to_output_description(index, output.dtype, narrow)
