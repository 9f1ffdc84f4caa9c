"""Trainable part of a model: its weights, and the value that the loss applies to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ortrain import artifacts
from ortrain._inspect import ParameterInfo
from ortrain._suggest import hint
from ortrain.api import CheckpointState
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.inference import InferenceSession
from ortrain.sklearn._graphs import FLOATS, Array, Builder, input_info, is_float, maker, pruned, unused, with_values

# Trainable parameters: all, the last N layers, names and patterns, or parameters for which a callable returns True.
Selection: TypeAlias = str | int | Sequence[str] | Callable[[ParameterInfo], bool]

# Operators that pass their first input on, with another type or shape.
_HAND_ON = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
# Operators that may compute probabilities from several parts. The core recognizes the patterns of exported classifiers.
_OF_PARTS = {"Concat", "Div"}


@dataclass(frozen=True)
class Network:
    """Model that a loss can be attached to."""

    model: bytes
    """The model; its trained weights are initializers, its outputs are those that it came with."""
    scores: str
    """The value that the loss is put on: logits of a classifier, the output of a regressor."""
    shown: str
    """The output that the caller knows, for messages."""
    columns: int
    """How many numbers the scores have for each row."""
    element: int
    """Their element type, as ONNX counts."""
    classifier: bool
    """Whether the scores are logits."""
    trained: tuple[str, ...]
    """The initializers that are trained; constants that a loss brings along are none of them."""

    @property
    def shape(self) -> str:
        """The shape of the scores, for messages."""
        return f"[batch, {self.columns}]"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of the scores, for arrays."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.element))


def _is_number(graph: GraphProto, info: ValueInfoProto) -> bool:
    """Return True if a node computes this output and the output is a numeric tensor."""
    text = info.type.tensor_type.elem_type == TensorProto.STRING
    node = maker(graph, info.name)
    return info.type.HasField("tensor_type") and not text and node is not None and node.op_type != "ZipMap"


def _before_activation(graph: GraphProto, output: str) -> tuple[str, str]:
    """Return the logits of an output, and the operator that converts the logits to probabilities.

    The operator is ``""`` if the output has no activation, and ``"parts"`` if several nodes compute the probabilities.
    """
    name = output
    node = maker(graph, name)
    while node is not None and node.domain == "" and node.op_type in _HAND_ON:
        name = node.input[0]
        node = maker(graph, name)
    if node is None:
        return output, ""
    if node.domain == "" and node.op_type in ("LogSoftmax", "Sigmoid", "Softmax"):
        return node.input[0], node.op_type
    return output, "parts" if node.domain == "ai.onnx.ml" or node.op_type in _OF_PARTS else ""


def _trained_by(train: Selection) -> dict[str, Any]:
    """Convert the parameter ``train`` to arguments of :func:`ortrain.artifacts.generate_artifacts`."""
    if isinstance(train, str):
        if train != "all":
            raise InvalidArgumentError(
                f"train must be 'all', a number of layers, a list of names or a callable, got {train!r}; a single "
                f"name or pattern must be a list: [{train!r}]"
            )
        return {}
    if isinstance(train, (int, np.integer)) and not isinstance(train, bool):
        return {"last": int(train)}
    if not callable(train) and (not isinstance(train, Sequence) or not train):
        raise InvalidArgumentError(
            f"train must be 'all', a number of layers, a list of names or a callable, got {train!r}"
        )
    return {"requires_grad": train}


@dataclass(frozen=True)
class _Part:
    """Model with trainable parameters as initializers, and the value that the loss applies to."""

    model: ModelProto
    scores: str
    trained: tuple[str, ...]


def _generate(train: Selection, model: ModelProto, **options: Any) -> None:
    """Generate artifacts; errors name the parameter ``train``."""
    try:
        artifacts.generate_artifacts(model, **options, **_trained_by(train))
    except InvalidArgumentError as error:
        sentence = str(error).replace("requires_grad", "train").replace("last must be", "train must be")
        raise InvalidArgumentError(sentence) from error


def _written_out(
    proto: ModelProto, loss: artifacts.LossType, scores: str | None, train: Selection, outputs: Sequence[ValueInfoProto]
) -> _Part:
    """Build the trainable form of a model, with these outputs.

    The core rewrites the model. This function converts its eval model back to a model without a loss.
    """
    with tempfile.TemporaryDirectory() as folder:
        _generate(
            train,
            proto,
            loss=loss,
            loss_input_names=None if scores is None else [scores],
            additional_output_names=[info.name for info in outputs if _is_number(proto.graph, info)],
            artifact_directory=folder,
        )
        eval_model = onnx.load(os.path.join(folder, "eval_model.onnx"))  # noqa: PTH118
        state = CheckpointState.load_checkpoint(os.path.join(folder, "checkpoint"))  # noqa: PTH118
    if scores is None:
        node = maker(eval_model.graph, eval_model.graph.output[0].name)
        assert node is not None
        scores = node.input[0]
    model = ModelProto()
    model.CopyFrom(eval_model)
    model.producer_name, model.producer_version = proto.producer_name, proto.producer_version
    model.doc_string, model.domain, model.model_version = proto.doc_string, proto.domain, proto.model_version
    del model.metadata_props[:]
    model.metadata_props.extend(proto.metadata_props)
    graph = model.graph
    del graph.input[:]
    graph.input.append(input_info(proto))
    for name, parameter in state.parameters:
        graph.initializer.append(numpy_helper.from_array(parameter.data.copy(), name))
    trained = tuple(name for name, parameter in state.parameters if parameter.requires_grad)
    if not trained:
        raise InvalidArgumentError("the model has no trained parameters; name parameters in train")
    return _Part(pruned(model, outputs, [scores]), scores, trained)


def _of_parts(proto: ModelProto, output: str, train: Selection) -> _Part:
    """Build the trainable form with an ArgMax of the output, from which the core finds the logits."""
    chosen = ModelProto()
    chosen.CopyFrom(proto)
    label = unused(proto.graph, "label")
    chosen.graph.node.append(helper.make_node("ArgMax", [output], [label], label, axis=1))
    info = next((info for info in proto.graph.output if info.name == output), None)
    info = helper.make_empty_tensor_value_info(output) if info is None else info
    others = [info for info in proto.graph.output if not is_float(info)]
    del chosen.graph.output[:]
    chosen.graph.output.extend([helper.make_tensor_value_info(label, TensorProto.INT64, None), info, *others])
    return _by_choice(chosen, output, train, proto.graph.output)


def _by_choice(proto: ModelProto, shown: str, train: Selection, outputs: Sequence[ValueInfoProto]) -> _Part:
    try:
        return _written_out(proto, artifacts.LossType.CrossEntropyLoss, None, train, outputs)
    except OrtrainError as error:
        if "loss_input_names" not in str(error):
            raise
        raise InvalidArgumentError(
            f'the loss requires the logits of the output "{shown}", which are unknown; name them in output: {error}'
        ) from error


def network(proto: ModelProto, *, classifier: bool, output: str | None, train: Selection, rows: Array) -> Network:
    """Build the trainable network of a model. The model runs on a few rows, which shows the shape of its output."""
    outputs = proto.graph.output
    first = outputs[0]
    shown = output or first.name
    if output is not None and maker(proto.graph, output) is None:
        values = [value for node in proto.graph.node for value in node.output]
        raise InvalidArgumentError(f'the model has no value "{output}"{hint(output, values)}')
    if output is None and not is_float(first):
        if not classifier:
            others = [f'"{info.name}"' for info in outputs[1:] if is_float(info)]
            helps = f"; name one of {', '.join(others)} in output" if others else ""
            raise InvalidArgumentError(
                f'a regressor requires a float output, but the output "{shown}" is not float{helps}'
            )
        return _measured(_by_choice(proto, shown, train, outputs), shown, classifier, rows)
    if not classifier:
        part = _written_out(proto, artifacts.LossType.MSELoss, shown, train, outputs)
        return _measured(part, shown, classifier, rows)
    scores, how = _before_activation(proto.graph, shown)
    if how == "parts":
        part = _of_parts(proto, shown, train)
    else:
        part = _written_out(proto, artifacts.LossType.MSELoss, scores, train, outputs)
        measured = _measured(part, shown, classifier, rows)
        if how != "Sigmoid" or measured.columns == 1:
            return measured
        # Several sigmoids are independent classes; each probability is a sigmoid divided by their sum. The softmax of
        # the logarithms of the sigmoids computes the same.
        part = replace(part, scores=_logarithm_of_sigmoid(part.model, scores))
    return _measured(part, shown, classifier, rows)


def _logarithm_of_sigmoid(model: ModelProto, logits: str) -> str:
    builder = Builder(model)
    return builder.node("Neg", [builder.node("Softplus", [builder.node("Neg", [logits])])])


def _measured(part: _Part, shown: str, classifier: bool, rows: Array) -> Network:
    """Return the network, with the width and the element type of its scores."""
    model = ModelProto()
    model.CopyFrom(part.model)
    flat = Builder(model).node("Flatten", [part.scores], axis=1)
    session = InferenceSession(pruned(model, [helper.make_empty_tensor_value_info(flat)]))
    found = session.get_outputs()[0]
    if found.type not in FLOATS:
        raise InvalidArgumentError(
            f'the output "{shown}" is {found.type}; a loss requires float32, float64 or float16'
            + ("" if shown == part.scores else f' (computed from "{part.scores}")')
        )
    (values,) = session.run(None, {session.get_inputs()[0].name: rows})
    if len(values) != len(rows):
        raise InvalidArgumentError(
            f'the output "{shown}" has {len(values)} rows for {len(rows)} rows of X: its first axis must be the batch'
        )
    return Network(
        part.model.SerializeToString(),
        part.scores,
        shown,
        values.shape[1],
        FLOATS[found.type],
        classifier,
        part.trained,
    )


def with_weights(network: Network, values: dict[str, Array], train: Selection) -> Network:
    """Return the network with these values as initial weights, and with the selection of trained parameters."""
    model = ModelProto.FromString(with_values(ModelProto.FromString(network.model), values))
    part = _written_out(model, artifacts.LossType.MSELoss, network.scores, train, model.graph.output)
    return replace(network, model=part.model.SerializeToString(), trained=part.trained)
