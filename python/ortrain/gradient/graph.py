"""Gradients of a model as a model.

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
from ortrain._operators import OperatorLibrary, with_operators, with_stops
from ortrain._sources import ModelLike, model_source
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
    """A model that computes what ``model`` does, and the gradients of ``of`` with respect to ``wrt``.

    The gradients are those of the sum of all elements of all values of ``of``; of a loss of one element, those of the
    loss. Each is an output ``<x>_grad`` with the element type and the shape of its value ``x``; they come behind the
    outputs of the model, sorted by name. Nodes, names, initializers, inputs and metadata of the model stay. The
    gradients are written at its opset, 7 or newer; functions of the model are written out where they are called, and
    external data is taken in.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        of: the values that gradients flow from: names of outputs, or of what any node makes. They are floats, and each
            depends on one of ``wrt``.
        wrt: the values whose gradients are wanted: names of initializers, inputs, or of what any node makes. They are
            floats.
        plain: whether the result has no operators but those of ``ai.onnx``, so that any runtime runs it. Otherwise the
            gradients are ONNX Runtime's own operators where it has some (``com.microsoft``), as in a training model.
        operators: operators and gradients of one's own; the result holds plain nodes and needs none.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), as in
            :func:`ortrain.artifacts.generate_artifacts`.

    Returns:
        The bytes of the model.

    Raises:
        InvalidArgumentError: for an unknown name, a value that is no float, one of ``wrt`` that no gradient arrives at.
        InvalidModelError: for what is no sound model.
        UnsupportedError: for operators without a gradient, or without one that can be written at the model's opset: all
            of them, each with its node.
        NoSuchFileError: for a path that leads nowhere.

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
    """A model that computes what ``model`` does, and products of vectors that it is given with the Jacobian.

    Each value ``y`` of ``of`` adds an input ``<y>_grad`` of its element type and its shape, behind the inputs of the
    model, in the order of ``of``: the gradient that it starts from. Everything else is as in :func:`grad`, whose inputs
    would all be ones.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        of: the values that gradients flow from.
        wrt: the values whose gradients are wanted. None of them is in ``of``.
        plain: as in :func:`grad`.
        operators: as in :func:`grad`.
        stop_gradients: as in :func:`grad`.

    Returns:
        The bytes of the model.

    Raises:
        InvalidArgumentError: as in :func:`grad`, and for a name that is in ``of`` and in ``wrt``.
        InvalidModelError: as in :func:`grad`.
        UnsupportedError: as in :func:`grad`.
        NoSuchFileError: for a path that leads nowhere.

    Source: ``onnxruntime.capi._pybind_state.GradientGraphBuilder``, whose seeds are ones.

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
