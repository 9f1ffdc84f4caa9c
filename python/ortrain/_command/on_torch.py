"""Steps of a training on PyTorch: onnx2torch converts the model, and autograd computes the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortrain._fit.losses import SAMPLE_WEIGHT, Target
from ortrain.errors import UnsupportedError

if TYPE_CHECKING:
    import onnx

__all__ = ["NEWEST_OPSET", "TorchModel", "missing_packages"]

Array = npt.NDArray[Any]

_PACKAGES = ("torch", "onnx2torch")
NEWEST_OPSET = 17
"""Newest version of the operators that onnx2torch converts."""


def missing_packages() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in _PACKAGES if find_spec(name) is None]


class TorchModel:
    """Model on PyTorch, with a loss of PyTorch.

    Args:
        model: the model; its outputs are the scores of the targets, or the loss.
        targets: the targets; none if the output is the loss.
        parameters: names of the trained parameters.

    Raises:
        UnsupportedError: if onnx2torch or PyTorch cannot express the training.

    """

    def __init__(self, model: onnx.ModelProto, targets: Sequence[Target], parameters: Sequence[str]) -> None:
        self._torch = import_module("torch")
        self._targets, self._inputs = targets, [value.name for value in model.graph.input]
        _refuse_random_numbers(model)
        marks = _mark(model, parameters)
        try:
            self._module = import_module("onnx2torch").convert(model)
        except Exception as error:
            raise UnsupportedError(f"onnx2torch cannot convert the model: {_first_line(error)}") from error
        # One parameter may be in several modules.
        self._tensors: dict[str, list[tuple[Any, bool]]] = {name: [] for name in parameters}
        self._find_tensors(marks)
        self._module.train()
        self._freeze_statistics()

    def _find_tensors(self, marks: Mapping[bytes, tuple[str, bool]]) -> None:
        """Find the parameters of the model among the tensors of the module, which are transposed in some layers."""
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            name, is_transposed = marks.get(tensor.detach().numpy().tobytes(), ("", False))
            if name:
                tensor.requires_grad_(True)
                self._tensors[name].append((tensor, is_transposed))
        lost = [name for name, found in self._tensors.items() if not found]
        if lost:
            raise UnsupportedError(f"onnx2torch computes other values from the parameter {lost[0]!r}")

    def _freeze_statistics(self) -> None:
        """Use the running statistics of normalizations without trained parameters, as a training does by default."""
        trained = {id(tensor) for found in self._tensors.values() for tensor, _ in found}
        for module in self._module.modules():
            if hasattr(module, "running_mean") and not any(id(tensor) in trained for tensor in module.parameters()):
                module.eval()

    def step(self, parameters: Mapping[str, Array], feeds: Mapping[str, Array]) -> tuple[float, dict[str, Array]]:
        """Return the loss and the gradients of a batch.

        Args:
            parameters: values of the trained parameters.
            feeds: inputs of the training model.

        Raises:
            UnsupportedError: if PyTorch cannot run the module or the loss.

        """
        torch = self._torch
        with torch.no_grad():
            for name, found in self._tensors.items():
                for tensor, is_transposed in found:
                    value = parameters[name].T if is_transposed else parameters[name]
                    tensor.copy_(torch.tensor(np.array(value, order="C")))
                    tensor.grad = None
        values = {name: torch.tensor(np.array(value, order="C")) for name, value in feeds.items()}
        try:
            found = self._module(*(values[name] for name in self._inputs))
            loss = self._loss(found if isinstance(found, (list, tuple)) else [found], values)
            loss.backward()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            raise UnsupportedError(f"PyTorch cannot run the converted model: {_first_line(error)}") from error
        return float(loss.detach()), {name: self._gradient(name, parameters[name]) for name in self._tensors}

    def _gradient(self, name: str, like: Array) -> Array:
        total = np.zeros_like(like)
        for tensor, is_transposed in self._tensors[name]:
            if tensor.grad is not None:
                found = tensor.grad.numpy()
                total += found.T if is_transposed else found
        return total

    def _loss(self, outputs: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """Return the sum of the losses."""
        if not self._targets:
            return outputs[0]
        if len(outputs) != len(self._targets):
            raise UnsupportedError("onnx2torch returns other outputs than the model")
        weights = values.get(SAMPLE_WEIGHT)
        pairs = zip(self._targets, outputs, strict=True)
        return sum(self._loss_of(target, scores, values[target.input], weights) for target, scores in pairs)

    def _loss_of(self, target: Target, scores: Any, wanted: Any, weights: Any) -> Any:
        functions = self._torch.nn.functional
        assert target.output is not None
        if target.kind in ("labels", "soft"):
            if target.kind == "soft":
                wanted = wanted.movedim(target.output.class_axis, 1)
            scores, function = scores.movedim(target.output.class_axis, 1), functions.cross_entropy
        else:
            names = {"squares": "mse_loss", "distances": "l1_loss", "binary": "binary_cross_entropy_with_logits"}
            function = getattr(functions, names[target.kind])
        if weights is None:
            return function(scores, wanted)
        losses = function(scores, wanted, reduction="none")
        if target.kind == "labels" and losses.ndim > 1:
            raise UnsupportedError("a cross-entropy of tokens with weights is not compared")
        return (losses.reshape(len(weights), -1).mean(1) * weights).mean()


def _refuse_random_numbers(model: onnx.ModelProto) -> None:
    """Check that no node draws random numbers, which differ between runtimes.

    Raises:
        UnsupportedError: if there is such a node.

    """
    for node in model.graph.node:
        if node.op_type == "Dropout" or node.op_type.startswith(("Random", "Bernoulli", "Multinomial")):
            raise UnsupportedError(f"node {node.name!r} ({node.op_type}) draws random numbers, which PyTorch's are not")


def _mark(model: onnx.ModelProto, parameters: Sequence[str]) -> dict[bytes, tuple[str, bool]]:
    """Fill the parameters with random numbers, and return the names and the orientation by the bytes."""
    import onnx

    wanted = set(parameters)
    rng = np.random.default_rng(0)
    marks: dict[bytes, tuple[str, bool]] = {}
    for tensor in model.graph.initializer:
        if tensor.name not in wanted:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        value = rng.random(tuple(tensor.dims)).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        marks[value.T.tobytes()] = tensor.name, True
        marks[value.tobytes()] = tensor.name, False
    return marks


def _first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
