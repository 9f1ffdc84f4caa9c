"""Blocks that produce models to save."""

from __future__ import annotations

from typing import Any, Literal

import onnx

from ortrain import _ortrain
from ortrain._operators import OperatorLibrary, with_operators
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import current
from ortrain.onnxblock.blocks import UnknownNameError


def register_outputs(model: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Make these values the only outputs of the model."""
    graph = model.graph
    declared = {entry.name: entry for entry in [*graph.value_info, *graph.input, *graph.output]}
    unknown = [name for name in names if name not in declared or not declared[name].type.WhichOneof("value")]
    if unknown:
        declared |= {entry.name: entry for entry in _inferred(model, unknown)}
    outputs = []
    for name in names:
        if name not in declared:
            raise UnknownNameError(f"{name!r} cannot be an output: the model has no such value, or its type is unknown")
        entry = onnx.ValueInfoProto()
        entry.CopyFrom(declared[name])
        outputs.append(entry)
    del graph.output[:]
    graph.output.extend(outputs)
    remaining = [entry for entry in graph.value_info if entry.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(remaining)


def _inferred(model: onnx.ModelProto, names: list[str]) -> list[onnx.ValueInfoProto]:
    """Infer the declarations of values; omit values of unknown type."""
    try:
        source = with_operators(current().source(model), current().operators)
        found = list(onnx.ModelProto.FromString(_ortrain.declarations(source, names)).graph.value_info)
    except UnsupportedError:
        found = []
    if set(names) <= {entry.name for entry in found}:
        return found
    # A model may have nodes that only onnxruntime runs. `onnx` infers the types of the standard operators.
    return list(onnx.shape_inference.infer_shapes(model).graph.value_info)


class ForwardBlock(Block):
    """Block that produces a model: :meth:`build` returns the names of its outputs.

    >>> class Magnitude(onnxblock.ForwardBlock):
    ...     def build(self, name):
    ...         return onnxblock.blocks.Abs()(name)
    >>> block = Magnitude()
    >>> with onnxblock.base(model):
    ...     _ = block("logits")
    >>> import ortrain
    >>> session = ortrain.InferenceSession(block.to_model_proto())
    >>> (magnitudes,) = session.run(None, {"x": x})
    >>> magnitudes.shape, bool((magnitudes >= 0).all())
    ((8, 10), True)
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None
        self._operators: OperatorLibrary | None = None

    def _finish(self, result: Any) -> None:
        """Make the results of :meth:`build` the only outputs of the model.

        Raises:
            UnknownNameError: for an unknown output, or an output of unknown type.

        """
        register_outputs(self.base, (result,) if isinstance(result, str) else tuple(result))
        self._model = onnx.ModelProto()
        self._model.CopyFrom(self.base)
        self._operators = current().operators

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model.

        Raises:
            InvalidArgumentError: before the block was called.

        >>> class Hidden(onnxblock.ForwardBlock):
        ...     def build(self):
        ...         return "hidden"
        >>> block = Hidden()
        >>> with onnxblock.base(model):
        ...     _ = block()
        >>> [entry.name for entry in block.to_model_proto().graph.output]
        ['hidden']

        """
        return self._proto()

    def _proto(self) -> onnx.ModelProto:
        if self._model is None:
            raise InvalidArgumentError("there is no model yet: call the block inside `with onnxblock.base(model)`")
        return self._model


class TrainingBlock(ForwardBlock):
    """Block that produces a training model: the first value that :meth:`build` returns is the loss.

    Args:
        batch_norm: the statistics that ``BatchNormalization`` uses in training, like the argument of
            :func:`ortrain.artifacts.generate_artifacts`.

    >>> class Regression(onnxblock.TrainingBlock):
    ...     def build(self, scores):
    ...         return onnxblock.loss.MSELoss()(scores)
    >>> block = Regression()
    >>> block.requires_grad("fc2.weight")
    >>> with onnxblock.base(model):
    ...     loss = block("logits")
    >>> training_model, eval_model = block.to_model_proto()
    >>> onnxblock.save_checkpoint(block.parameters(), "regression")
    >>> module = Module(training_model, CheckpointState.load_checkpoint("regression"), eval_model)
    >>> module.input_names()
    ['x', 'target']

    """

    def __init__(self, batch_norm: Literal["auto", "train", "freeze"] = "auto") -> None:
        super().__init__()
        self._batch_norm = batch_norm
        self._requires_grad: dict[str, bool] = {}

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Mark an initializer as a trained parameter, or with ``False`` as a parameter that is not trained.

        For an input, the training model accumulates the gradient in the buffer ``<name>_grad.accumulation.buffer``,
        like the gradients of parameters. The caller of the model must supply this buffer. (A ``Module`` has buffers for
        parameters only.)

        >>> class Training(onnxblock.TrainingBlock):
        ...     def build(self, scores):
        ...         return onnxblock.loss.CrossEntropyLoss()(scores)
        >>> block = Training()
        >>> block.requires_grad("fc2.weight")
        >>> block.requires_grad("fc1.weight", False)
        """
        self._requires_grad[argument_name] = value

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Return the trained initializers and the parameters that are not trained, in the order of the model.

        Raises:
            InvalidArgumentError: before the block was called.

        >>> class Training(onnxblock.TrainingBlock):
        ...     def build(self, scores):
        ...         return onnxblock.loss.CrossEntropyLoss()(scores)
        >>> block = Training()
        >>> block.requires_grad("fc2.weight")
        >>> block.requires_grad("fc1.weight", False)
        >>> with onnxblock.base(model):
        ...     loss = block("logits")
        >>> trained, frozen = block.parameters()
        >>> [tensor.name for tensor in trained], [tensor.name for tensor in frozen]
        (['fc2.weight'], ['fc1.weight'])

        """
        initializers = self._proto().graph.initializer
        requires_grad = self._requires_grad
        return (
            [tensor for tensor in initializers if requires_grad.get(tensor.name) is True],
            [tensor for tensor in initializers if requires_grad.get(tensor.name) is False],
        )

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:  # type: ignore[override]
        """Return the training model and the eval model.

        Raises:
            InvalidArgumentError: before the block was called; if nothing is trained or a name is unknown.
            InvalidModelError, UnsupportedError: if the model cannot be differentiated.

        >>> class Training(onnxblock.TrainingBlock):
        ...     def build(self, scores):
        ...         return onnxblock.loss.CrossEntropyLoss()(scores)
        >>> block = Training()
        >>> block.requires_grad("fc2.bias")
        >>> with onnxblock.base(model):
        ...     loss = block("logits")
        >>> training_model, eval_model = block.to_model_proto()
        >>> [entry.name for entry in eval_model.graph.input]
        ['x', 'labels', 'fc2.bias']

        """
        model = self._proto()
        initializers = {tensor.name for tensor in model.graph.initializer}
        inputs = {entry.name for entry in model.graph.input} - initializers
        requires_grad = self._requires_grad
        training, evaluation = _ortrain.training_models(
            with_operators(model.SerializeToString(), self._operators),
            requires_grad=[name for name, trained in requires_grad.items() if trained and name not in inputs],
            input_gradients=[name for name, trained in requires_grad.items() if trained and name in inputs],
            frozen_params=[name for name, trained in requires_grad.items() if not trained and name not in inputs],
            additional_output_names=[entry.name for entry in model.graph.output[1:]],
            batch_norm=self._batch_norm,
        )
        return onnx.ModelProto.FromString(training), onnx.ModelProto.FromString(evaluation)
