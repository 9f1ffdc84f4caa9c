"""Gradient graph builder with the interface of onnxruntime-training.

>>> from ortrain.gradient import GradientGraphBuilder
>>> builder = GradientGraphBuilder(model.SerializeToString(), {"logits"}, {"fc2.weight"}, "logits")
>>> builder.build()
>>> builder.save("gradient.onnx")
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ortrain import _ortrain
from ortrain._model_source import PathLike
from ortrain._operators import stopped_names
from ortrain.gradient._names import listed
from ortrain.inference import SessionOptions

__all__ = ["GradientGraphBuilder"]


class GradientGraphBuilder:
    """Builder that adds the gradients of a loss to a model, like ``GradientGraphBuilder`` of onnxruntime-training.

    The gradient of the loss, ``<loss>_grad``, is ones of its shape. If a value has several uses, the gradients of the
    uses are ``<value>_grad_0``, ``<value>_grad_1`` and so on. The outputs of the model are followed by ``<x>_grad`` for
    each of ``x_node_arg_names``, sorted by name, with its element type and shape. Nodes, names, inputs and initializers
    of the model do not change.

    The result is plain ONNX that every runtime executes. With ``plain=False``, the gradients are operators of
    ``com.microsoft`` where ONNX Runtime has them, like in the reference. They need a runtime with these operators.

    Args:
        serialized_model: the bytes of a model.
        y_node_arg_names: names of the results that gradients flow from: the loss, and values on the path to the loss.
        x_node_arg_names: names of initializers, inputs or results to compute gradients for. If empty, ``build`` changes
            nothing.
        loss_node_arg_name: the result that gradients start from. If it has more than one element, the gradients belong
            to the sum of its elements.
        options: accepted for compatibility with the reference; no option changes a gradient.
        plain: True for a result in plain ONNX.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), like in
            :func:`ortrain.artifacts.generate_artifacts`.

    Raises:
        TypeError: for a model that is not ``bytes``, and for names that are a ``str``.
        InvalidArgumentError: for a name of no value of the model.
        InvalidModelError: for bytes that are not a model.

    Source: ``onnxruntime.capi._pybind_state.GradientGraphBuilder``.

    >>> from ortrain.gradient import GradientGraphBuilder
    >>> forward = model.SerializeToString()
    >>> builder = GradientGraphBuilder(forward, {"logits"}, {"fc1.bias", "fc2.bias"}, "logits")
    >>> builder.get_model() == forward
    True
    >>> builder.build()
    >>> import ortrain
    >>> [output.name for output in ortrain.InferenceSession(builder.get_model()).get_outputs()]
    ['logits', 'fc1.bias_grad', 'fc2.bias_grad']

    """

    __slots__ = ("_graph",)

    def __init__(
        self,
        serialized_model: bytes,
        y_node_arg_names: Iterable[str],
        x_node_arg_names: Iterable[str],
        loss_node_arg_name: str,
        options: SessionOptions | None = None,
        *,
        plain: bool = True,
        stop_gradients: Iterable[str] | None = None,
    ) -> None:
        if not isinstance(serialized_model, bytes):
            raise TypeError(
                f"serialized_model must be the bytes of a model, got {type(serialized_model).__name__}; "
                "ortrain.gradient.grad also accepts a path or an onnx.ModelProto"
            )
        y_names = listed(y_node_arg_names, "y_node_arg_names")
        x_names = listed(x_node_arg_names, "x_node_arg_names")
        if not isinstance(loss_node_arg_name, str):
            raise TypeError(f"loss_node_arg_name must be a name, got {type(loss_node_arg_name).__name__}")
        if options is not None and not isinstance(options, SessionOptions):
            raise TypeError(f"options must be ortrain.SessionOptions, got {type(options).__name__}")
        stops = stopped_names(stop_gradients)
        self._graph = _ortrain.GradientGraph(serialized_model, y_names, x_names, loss_node_arg_name, bool(plain), stops)

    def build(self) -> None:
        """Adds the gradients.

        Raises:
            InvalidArgumentError: for a name of ``x_node_arg_names`` that no gradient reaches, and for a name of
                ``y_node_arg_names`` without a gradient.
            UnsupportedError: for operators without a gradient. The error lists all of them, each with its node.
            OrtrainError: for a second call.

        >>> from ortrain.gradient import GradientGraphBuilder
        >>> builder = GradientGraphBuilder(model.SerializeToString(), {"logits"}, {"x"}, "logits")
        >>> builder.build()

        """
        self._graph.build()

    def get_model(self) -> bytes:
        """Returns the bytes of the model: the input model before :meth:`build`, with gradients after it.

        >>> from ortrain.gradient import GradientGraphBuilder
        >>> builder = GradientGraphBuilder(model.SerializeToString(), {"logits"}, {"x"}, "logits")
        >>> before = builder.get_model()
        >>> builder.build()
        >>> before != builder.get_model() == builder.get_model()
        True

        """
        return self._graph.get_model()

    def save(self, path: PathLike) -> None:
        """Writes the result of :meth:`get_model` to a file.

        Raises:
            OrtrainError: if the file cannot be written.
            NoSuchFileError: if the folder does not exist.

        >>> from ortrain.gradient import GradientGraphBuilder
        >>> builder = GradientGraphBuilder(model.SerializeToString(), {"logits"}, {"x"}, "logits")
        >>> builder.build()
        >>> builder.save("gradient.onnx")

        """
        self._graph.save(os.fspath(path))
