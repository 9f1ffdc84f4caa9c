"""Gradients of models as models.

>>> from ortrain.gradient import grad, vjp
>>> import ortrain
>>> for made in (grad(model, of="logits", wrt="x"), vjp(model, of="logits", wrt="x")):
...     print([given.name for given in ortrain.InferenceSession(made).get_inputs()])
['x']
['x', 'logits_grad']
"""

from __future__ import annotations

from collections.abc import Iterable

from ortrain import _ortrain
from ortrain._model_source import ModelLike, model_source
from ortrain._operators import OperatorLibrary, with_operators, with_stops
from ortrain.gradient._names import listed

__all__ = ["grad", "vjp"]


def grad(
    model: ModelLike,
    of: str | Iterable[str],
    wrt: str | Iterable[str],
    plain: bool = True,
    *,
    operators: OperatorLibrary | None = None,
    stop_gradients: Iterable[str] | None = None,
) -> bytes:
    """Returns a model that computes the outputs of ``model`` and the gradients of ``of`` with respect to ``wrt``.

    The gradients belong to the sum of all elements of all values of ``of``; for a loss of one element, to the loss.
    Each gradient is an output ``<x>_grad`` with the element type and the shape of its value ``x``. The gradients follow
    the outputs of the model, sorted by name. Nodes, names, initializers, inputs and metadata of the model do not
    change. The gradients use the opset of the model, 7 or newer. Calls of model functions are inlined, and external
    data is included.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        of: the values that gradients flow from: names of outputs, or of results of any node. They are floats, and each
            value depends on a value of ``wrt``.
        wrt: the values to compute gradients for: names of initializers, inputs, or results of any node. They are
            floats.
        plain: True if the result may have operators of ``ai.onnx`` only, so that any runtime executes it. Otherwise,
            the gradients are operators of ONNX Runtime (``com.microsoft``) where available, like in a training model.
        operators: custom operators and gradients; the result has plain nodes and does not need them.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), like in
            :func:`ortrain.artifacts.generate_artifacts`.

    Returns:
        The bytes of the model.

    Raises:
        InvalidArgumentError: for an unknown name, a value that is not a float, or a value of ``wrt`` that no gradient
            reaches.
        InvalidModelError: for an invalid model.
        UnsupportedError: for operators without a gradient, or without a gradient at the model's opset. The error lists
            all of them, each with its node.
        NoSuchFileError: for a path that does not exist.

    Source: ``onnxruntime.capi._pybind_state.GradientGraphBuilder``, for any values.

    >>> import ortrain
    >>> made = ortrain.gradient.grad(model, of="logits", wrt=["fc2.bias", "fc1.bias"])
    >>> logits, fc1, fc2 = ortrain.InferenceSession(made).run(None, {"x": x})
    >>> fc2  # each of the eight rows adds it once
    array([8., 8., 8., 8., 8., 8., 8., 8., 8., 8.], dtype=float32)

    """
    source = with_stops(with_operators(model_source(model), operators), stop_gradients)
    return _ortrain.grad(source, _some(of, "of"), _some(wrt, "wrt"), bool(plain))


def vjp(
    model: ModelLike,
    of: str | Iterable[str],
    wrt: str | Iterable[str],
    plain: bool = True,
    *,
    operators: OperatorLibrary | None = None,
    stop_gradients: Iterable[str] | None = None,
) -> bytes:
    """Returns a model that computes the outputs of ``model`` and vector-Jacobian products.

    Each value ``y`` of ``of`` adds an input ``<y>_grad`` of its element type and its shape: the vector of the product.
    These inputs follow the inputs of the model, in the order of ``of``. Everything else is like in :func:`grad`, which
    corresponds to vectors of ones.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        of: the values that gradients flow from.
        wrt: the values to compute gradients for. A value must not be in both ``of`` and ``wrt``.
        plain: like in :func:`grad`.
        operators: like in :func:`grad`.
        stop_gradients: like in :func:`grad`.

    Returns:
        The bytes of the model.

    Raises:
        InvalidArgumentError: like in :func:`grad`, and for a name in both ``of`` and ``wrt``.
        InvalidModelError: like in :func:`grad`.
        UnsupportedError: like in :func:`grad`.
        NoSuchFileError: for a path that does not exist.

    Source: ``onnxruntime.capi._pybind_state.GradientGraphBuilder``, which starts from ones.

    >>> import ortrain
    >>> session = ortrain.InferenceSession(ortrain.gradient.vjp(model, of="logits", wrt="fc2.bias"))
    >>> [given.name for given in session.get_inputs()]
    ['x', 'logits_grad']
    >>> third = np.zeros((8, 10), np.float32)
    >>> third[:, 2] = 0.5
    >>> session.run(["fc2.bias_grad"], {"x": x, "logits_grad": third})[0][:4]
    array([0., 0., 4., 0.], dtype=float32)

    """
    source = with_stops(with_operators(model_source(model), operators), stop_gradients)
    return _ortrain.vjp(source, _some(of, "of"), _some(wrt, "wrt"), bool(plain))


def _some(names: str | Iterable[str], argument: str) -> list[str]:
    return [names] if isinstance(names, str) else listed(names, argument)
