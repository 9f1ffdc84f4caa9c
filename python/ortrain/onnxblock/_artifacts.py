"""Blocks as the loss or the optimizer of :func:`ortrain.artifacts.generate_artifacts`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortrain._files import check_regular
from ortrain._operators import OperatorLibrary, Plain
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import base, empty_base, opset_of
from ortrain.onnxblock._training_blocks import register_outputs
from ortrain.onnxblock.optim import Optimizer

# Opset of optimizer models in plain ONNX.
_OPTIMIZER_OPSET = 17


def _read(source: str | bytes) -> onnx.ModelProto:
    model: onnx.ModelProto
    if isinstance(source, bytes):
        model = onnx.ModelProto.FromString(source)
    else:
        check_regular(source)
        # Blocks do not read external data, so it is not loaded.
        model = onnx.load(source, load_external_data=False)
    return model


def with_loss(
    source: str | bytes,
    loss: Block,
    names: Sequence[str],
    additional: Sequence[str],
    operators: OperatorLibrary | None,
) -> Plain:
    """Append a loss to the model, as its first output. Its arguments are the values `names`, or all outputs."""
    path = None if isinstance(source, bytes) else source
    with base(_read(source), path, operators=operators) as accessor:
        graph = accessor.model.graph
        result = loss(*(names or [entry.name for entry in graph.output]))
        first = result if isinstance(result, str) else result[0]
        register_outputs(accessor.model, (first, *additional))
        return accessor.source(accessor.model)


def optimizer_model(
    source: str | bytes, optimizer: Block, requires_grad: Sequence[str], frozen_params: Sequence[str]
) -> bytes:
    """Build the optimizer model of a block for the parameters of a model."""
    model = _read(source)
    trained, frozen = (
        [tensor for tensor in model.graph.initializer if tensor.name in names]
        for names in (set(requires_grad), set(frozen_params))
    )
    # Optimizers in plain ONNX need operators that older opsets do not have.
    version = max(opset_of(model), _OPTIMIZER_OPSET) if isinstance(optimizer, Optimizer) else opset_of(model)
    with empty_base(version) as accessor:
        optimizer((trained, frozen))
        return bytes(accessor.model.SerializeToString())
