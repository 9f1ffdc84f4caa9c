"""A model as a module of PyTorch, trained by PyTorch's own loop and optimizers.

The module's parameters are the model's weights: the same memory, no copies. A call runs the model forward here, and
``backward`` of PyTorch runs the model backward here. ``import ortrain`` does not import this module, and this module
imports PyTorch when :func:`as_module` is called.

>>> from contextlib import suppress
>>> from ortrain.torch import as_module
>>> with suppress(ImportError):  # raised where there is no PyTorch
...     net = as_module(model)
...     assert [name for name, _ in net.named_parameters()] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ortrain._sources import ModelLike
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
    """A ``torch.nn.Module`` that computes what a model computes, and whose parameters are the model's weights.

    The module is called with a tensor for each input of the model: in the order of the model, or by name. The result is
    a tensor, or a tuple of tensors if the model has several outputs. Their shapes and types are those of the model;
    axes without a fixed size may have any size. Gradients go back to parameters, and to inputs of floats.

    In training mode (``module.train()``, as modules begin) every Dropout drops, and BatchNormalization uses the
    statistics of the batch and updates the running ones. In evaluation mode (``module.eval()``) the model computes what
    the file says.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``. The model needs no loss.
        wrt: the weights: names of initializers of floats, or patterns (``"fc.*"``). ``None``: the weights that
            :func:`ortrain.artifacts.generate_artifacts` would train. Other initializers stay constants.
        batch_norm: which statistics BatchNormalization uses in training mode: ``"auto"``, ``"train"`` or ``"freeze"``,
            as in :func:`ortrain.artifacts.generate_artifacts`. With ``"auto"`` a BatchNormalization without a
            parameter that requires a gradient uses the running ones.
        seed: the seed of the masks of Dropout.
        session_options: threads, bytes, precision.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), as in
            :func:`ortrain.artifacts.generate_artifacts`.

    Returns:
        The module, in training mode. ``state_dict`` has the names of the model, running statistics are buffers.

    Raises:
        ImportError: without PyTorch.
        InvalidArgumentError: for a name or pattern that no initializer has, a weight that is no float or that no
            gradient reaches, a name that PyTorch cannot have.
        InvalidModelError: for what is no sound model.
        UnsupportedError: for operators without a gradient: all of them, each with its node.
        NoSuchFileError: for a path that leads nowhere.

    Source: ``torch.nn.Module`` and ``torch.autograd.Function``, as PyTorch documents them.

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
