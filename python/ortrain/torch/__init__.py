"""ONNX model as a PyTorch module, which PyTorch's own loop and optimizers train.

The parameters of the module share the memory of the model's weights: there are no copies. A call of the module runs the
forward pass in ortrain, and ``backward`` of PyTorch runs the backward pass in ortrain. ``import ortrain`` does not
import this module. This module imports PyTorch when :func:`as_module` is called.

>>> from contextlib import suppress
>>> from ortrain.torch import as_module
>>> with suppress(ImportError):  # raised where there is no PyTorch
...     net = as_module(model)
...     assert [name for name, _ in net.named_parameters()] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ortrain._model_source import ModelLike
from ortrain.inference import SessionOptions

if TYPE_CHECKING:
    from ortrain.torch._module import OnnxModule

__all__ = ["as_module"]


def as_module(
    model: ModelLike,
    wrt: str | Iterable[str] | None = None,
    *,
    batch_norm: str = "auto",
    seed: int = 0,
    session_options: SessionOptions | None = None,
    stop_gradients: Iterable[str] | None = None,
) -> OnnxModule:
    """Builds a ``torch.nn.Module`` that computes the model and has the model's weights as parameters.

    Call the module with one tensor for each input of the model, in the order of the model or by name. The result is a
    tensor, or a tuple of tensors if the model has several outputs. Tensors have the shapes and types of the model; axes
    without a fixed size may have any size. Gradients flow to parameters and to floating-point inputs.

    In training mode (``module.train()``, the initial mode) every Dropout drops elements. BatchNormalization uses the
    statistics of the batch and updates the running statistics. In evaluation mode (``module.eval()``) the module
    computes the model exactly as it is stored.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``. The model needs no loss.
        wrt: the weights: names of floating-point initializers, or patterns (``"fc.*"``). ``None`` selects the weights
            that :func:`ortrain.artifacts.generate_artifacts` would train. Other initializers stay constants.
        batch_norm: the statistics that BatchNormalization uses in training mode: ``"auto"``, ``"train"`` or
            ``"freeze"``, as in :func:`ortrain.artifacts.generate_artifacts`. With ``"auto"`` a BatchNormalization uses
            the running statistics if none of its parameters requires a gradient.
        seed: the seed of the Dropout masks.
        session_options: number of threads, memory limit, precision.
        stop_gradients: values that pass no gradient on: names of node outputs, or patterns (``"*/assigner/*"``), as in
            :func:`ortrain.artifacts.generate_artifacts`.

    Returns:
        The module, in training mode. The keys of ``state_dict`` are the names in the model; running statistics are
        buffers.

    Raises:
        ImportError: if PyTorch is not installed.
        InvalidArgumentError: for a name or pattern that matches no initializer, a weight that is not floating-point, a
            weight without a gradient, or a name that PyTorch does not allow.
        InvalidModelError: for an invalid model.
        UnsupportedError: for operators without a gradient. The message lists all of them with their nodes.
        NoSuchFileError: for a path that does not exist.

    Source: the PyTorch documentation of ``torch.nn.Module`` and ``torch.autograd.Function``.

    >>> from contextlib import suppress
    >>> from ortrain.torch import as_module
    >>> with suppress(ImportError):  # raised where there is no PyTorch
    ...     import torch
    ...     net = as_module(model, wrt="fc2.*")
    ...     optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ...     images, classes = torch.from_numpy(x), torch.from_numpy(labels)
    ...     losses = []
    ...     for step in range(10):
    ...         loss = torch.nn.functional.cross_entropy(net(images), classes)
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         losses.append(loss.item())
    ...     assert losses[-1] < losses[0]
    ...     trained = net.to_onnx()

    """
    _require_torch()
    from ortrain.torch._module import OnnxModule

    return OnnxModule._of(model, wrt, batch_norm, seed, session_options, stop_gradients)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "ortrain.torch needs PyTorch, which is not installed here; install the package torch: pip install torch",
            name="torch",
        ) from error


def __getattr__(name: str) -> Any:
    if name == "OnnxModule":
        _require_torch()
        from ortrain.torch._module import OnnxModule

        return OnnxModule
    raise AttributeError(f"module 'ortrain.torch' has no attribute {name!r}")
