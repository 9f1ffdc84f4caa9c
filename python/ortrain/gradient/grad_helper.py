"""Derivatives of models as models, with the names of onnxcustom (``onnxcustom.training.grad_helper``).

:func:`onnx_derivative` turns weights into inputs and gradients into outputs. :class:`DerivativeOptions` selects the
source of the outputs' gradients and the outputs to keep. :func:`ortrain.gradient.grad` and :func:`ortrain.gradient.vjp`
differentiate any values of a model, and do not change weights into inputs.

>>> import ortrain
>>> from ortrain.gradient.grad_helper import onnx_derivative
>>> derivative = onnx_derivative(model, weights=["fc2.bias"])
>>> [value.name for value in derivative.graph.input], [value.name for value in derivative.graph.output]
(['x', 'fc2.bias', 'logits_grad'], ['x_grad', 'fc2.bias_grad'])
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import onnx
from onnx import helper

from ortrain import _ortrain
from ortrain._model_source import PathLike
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient._names import listed
from ortrain.gradient.builder import GradientGraphBuilder
from ortrain.gradient.graph import vjp
from ortrain.gradient.ortgradient import _native
from ortrain.gradient.utils._graphs import (
    FLOATS,
    checked_model,
    model_like,
    names_of,
    needed_nodes,
    rename_in,
    unique_name,
    uses,
)
from ortrain.gradient.utils.onnx_helper import get_onnx_opset

__all__ = ["DerivativeOptions", "onnx_derivative"]

# First opset with ``ConstantOfShape``.
_FILLED_FROM = 9


class DerivativeOptions(enum.IntFlag):
    """Inputs and outputs of a derivative.

    Source: ``onnxcustom.training.grad_helper.DerivativeOptions``.

    >>> from ortrain.gradient.grad_helper import DerivativeOptions
    >>> DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    <DerivativeOptions.KeepOutputs|FillGrad: 6>
    """

    Zero = 0
    """The gradients of outputs are inputs; the outputs themselves are left out."""

    KeepYieldOp = 1
    """A ``YieldOp`` hands the outputs over and takes their gradients. It goes with no other option."""

    KeepOutputs = 2
    """The outputs stay, behind the gradients."""

    FillGrad = 4
    """The gradients of outputs are ones. It goes with ``KeepOutputs``."""

    Loss = 5
    """The model has a loss, which gradients start from."""


def onnx_derivative(
    onx: onnx.ModelProto,
    weights: Iterable[str] | None = None,
    inputs: str | Iterable[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | Iterable[str] | None = None,
    path_name: PathLike | None = None,
) -> onnx.ModelProto:
    """Returns the derivative of a model with respect to its inputs and weights.

    Weights become inputs. For a model with output ``Y``, input ``X`` and weight ``w``, the derivative has

    ============================= ============================== ======================================================
    ``options``                   inputs                         outputs
    ============================= ============================== ======================================================
    ``Zero``                      ``X``, ``w``, ``Y_grad``       ``X_grad``, ``w_grad``
    ``KeepYieldOp``               ``X``, ``w``                   ``X_grad``, ``w_grad``
    ``KeepOutputs``               ``X``, ``w``, ``Y_grad``       ``X_grad``, ``w_grad``, ``Y``
    ``KeepOutputs | FillGrad``    ``X``, ``w``                   ``X_grad``, ``w_grad``, ``Y``
    ============================= ============================== ======================================================

    Each float output has a separate gradient, of its type and shape. The result is plain ONNX that any runtime
    executes. With ``KeepYieldOp``, it is a training graph with operators of ``com.microsoft``, which
    :class:`ortrain.capi.TrainingAgent` runs.

    With ``Loss``, the model already contains a loss, for example from
    :func:`~ortrain.gradient.utils.orttraining_helper.add_loss_output`. Initializers and outputs do not change, and the
    gradients follow the outputs, like in :class:`~ortrain.gradient.GradientGraphBuilder`. The model is also written to
    ``path_name``.

    Args:
        onx: the model; it is not changed.
        weights: names of float initializers; by default, all that a gradient reaches; ``[]`` for no weights.
        inputs: names of float inputs; by default, all that a gradient reaches; ``[]`` for no inputs. With ``Loss``, the
            names of any float values.
        options: the inputs and outputs of the derivative.
        loss: with ``Loss``, the name of the value that gradients start from, with ones.
        label: with ``Loss``, the name of the result that gradients flow from, which is the loss again; or several
            names.
        path_name: with ``Loss``, the file to write the model to.

    Raises:
        TypeError: for options that are not :class:`DerivativeOptions`, for an object that is not a model, and for
            names that are not strings.
        InvalidArgumentError: for options that exclude each other; for unknown names, and values that no gradient
            reaches; with ``Loss``, for weights, and without ``loss``, ``label`` or ``path_name``; for these without
            ``Loss``; for a value with the name of a gradient.
        UnsupportedError: for operators without a gradient, each with its node.

    Source: ``onnxcustom.training.grad_helper.onnx_derivative``, for one output.

    >>> import ortrain
    >>> from ortrain.gradient.grad_helper import DerivativeOptions, onnx_derivative
    >>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
    >>> both = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    >>> session = ortrain.InferenceSession(onnx_derivative(model, weights=["fc2.bias"], options=both))
    >>> x_grad, bias_grad, logits = session.run(None, {"x": x, "fc2.bias": np.zeros(10, np.float32)})
    >>> bias_grad[:3]  # each of the eight rows adds it once
    array([8., 8., 8.], dtype=float32)
    >>> trained = add_loss_output(model)
    >>> names = {"loss": "loss", "label": "loss", "inputs": ["fc2.bias"]}
    >>> made = onnx_derivative(trained, options=DerivativeOptions.Loss, path_name="gradient.onnx", **names)
    >>> [value.name for value in made.graph.output]
    ['loss', 'logits', 'fc2.bias_grad']

    """
    if not isinstance(options, DerivativeOptions):
        raise TypeError(f"options must be DerivativeOptions, got {type(options).__name__}")
    checked_model(onx)
    if options == DerivativeOptions.Loss:
        return _of_loss(onx, weights, inputs, loss, label, path_name)
    loss_arguments = {"loss": loss, "label": label, "path_name": path_name}
    for argument, value in loss_arguments.items():
        if value is not None:
            raise InvalidArgumentError(f"{argument} requires DerivativeOptions.Loss, got {options!r}")
    if options & DerivativeOptions.KeepYieldOp and options != DerivativeOptions.KeepYieldOp:
        raise InvalidArgumentError(
            f"DerivativeOptions.KeepYieldOp cannot be combined with another option, got {options!r}"
        )
    if options & DerivativeOptions.FillGrad and not options & DerivativeOptions.KeepOutputs:
        raise InvalidArgumentError("DerivativeOptions.FillGrad requires DerivativeOptions.KeepOutputs")
    native = _native(
        onx.SerializeToString(),
        None if weights is None else _some(weights, "weights"),
        None if inputs is None else _some(inputs, "inputs"),
        None,
    )
    if options == DerivativeOptions.KeepYieldOp:
        return onnx.load_from_string(native.training_model())
    return _of_outputs(onx, native, options)


def _of_outputs(onx: onnx.ModelProto, native: _ortrain.ForwardBackward, options: DerivativeOptions) -> onnx.ModelProto:
    """Builds the derivative with the gradients of the outputs as inputs, or as ones."""
    weights, outputs = native.weight_names(), native.differentiable_outputs()
    variables = [*native.differentiable_inputs(), *weights]
    model = onnx.load_from_string(vjp(_with_inputs(onx, weights), of=outputs, wrt=variables))
    graph = model.graph
    if options & DerivativeOptions.FillGrad:
        _fill(model, outputs)
    found = {entry.name: entry for entry in graph.output}
    results = [found[f"{name}_grad"] for name in variables]
    if options & DerivativeOptions.KeepOutputs:
        results += [found[entry.name] for entry in onx.graph.output]
    nodes, needed = needed_nodes(
        _without_identities(graph, {entry.name for entry in results}), (o.name for o in results)
    )
    graph = onnx.GraphProto(
        name=graph.name,
        doc_string=graph.doc_string,
        node=nodes,
        input=graph.input,
        output=results,
        initializer=[entry for entry in graph.initializer if entry.name in needed],
        sparse_initializer=[entry for entry in graph.sparse_initializer if entry.values.name in needed],
        value_info=[entry for entry in graph.value_info if entry.name in needed],
    )
    return model_like(model, graph)


def _with_inputs(onx: onnx.ModelProto, weights: list[str]) -> onnx.ModelProto:
    """Returns a model with weights as inputs, in this order after its own inputs."""
    graph = onnx.GraphProto()
    graph.CopyFrom(onx.graph)
    tensors = {entry.name: entry for entry in onx.graph.initializer}
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(entry for entry in onx.graph.initializer if entry.name not in weights)
    graph.input.extend(entry for entry in onx.graph.input if entry.name not in weights)
    graph.input.extend(
        helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims)) for name in weights
    )
    return model_like(onx, graph)


def _fill(model: onnx.ModelProto, outputs: list[str]) -> None:
    """Replaces the inputs for the gradients of outputs by ones of the same shapes."""
    if get_onnx_opset(model) < _FILLED_FROM:
        raise UnsupportedError(
            f"the model has opset {get_onnx_opset(model)}, but DerivativeOptions.FillGrad requires opset "
            f"{_FILLED_FROM} or newer; leave the option out and feed ones"
        )
    graph = model.graph
    gradients = {f"{name}_grad": name for name in outputs}
    existing_names, ones = names_of(graph), []
    for entry in graph.input:
        if entry.name not in gradients:
            continue
        shape = unique_name(existing_names, f"{gradients[entry.name]}_shape")
        one = helper.make_tensor("value", entry.type.tensor_type.elem_type, [1], [1])
        ones.append(helper.make_node("Shape", [gradients[entry.name]], [shape]))
        ones.append(helper.make_node("ConstantOfShape", [shape], [entry.name], value=one))
    # The nodes of the gradients follow all other nodes.
    first = next((at for at, node in enumerate(graph.node) if uses(node) & gradients.keys()), len(graph.node))
    nodes, inputs = list(graph.node), [entry for entry in graph.input if entry.name not in gradients]
    del graph.node[:], graph.input[:]
    graph.node.extend([*nodes[:first], *ones, *nodes[first:]])
    graph.input.extend(inputs)


def _without_identities(graph: onnx.GraphProto, outputs: set[str]) -> list[onnx.NodeProto]:
    """Returns the nodes of a graph without Identity nodes, except for the Identity nodes of outputs."""
    same: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        rename_in(node, same)
        if node.op_type == "Identity" and node.domain in ("", "ai.onnx") and node.output[0] not in outputs:
            same[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    return nodes


def _of_loss(
    onx: onnx.ModelProto,
    weights: Iterable[str] | None,
    inputs: str | Iterable[str] | None,
    loss: str | None,
    label: str | Iterable[str] | None,
    path_name: PathLike | None,
) -> onnx.ModelProto:
    """Builds the model with the gradients of its loss."""
    if weights is not None:
        raise InvalidArgumentError("weights cannot be used with DerivativeOptions.Loss; name them in inputs")
    for argument, value in {"path_name": path_name, "label": label, "loss": loss}.items():
        if value is None:
            raise InvalidArgumentError(f"DerivativeOptions.Loss requires {argument}")
    if not isinstance(loss, str):
        raise InvalidArgumentError(f"loss must be the name of a value, got {type(loss).__name__}")
    assert label is not None
    assert path_name is not None
    results = _some(label, "label")
    there = names_of(onx.graph)
    for argument, name in [("loss", loss), *(("label", name) for name in results)]:
        if name not in there:
            raise InvalidArgumentError(
                f"{argument} {name!r} is not a value of the model; add_loss_output adds a loss{hint(name, there)}"
            )
    for name in results:
        if any(entry.name == name for entry in onx.graph.input):
            raise InvalidArgumentError(
                f"label must name the results that gradients flow from, got the input {name!r}; name the loss, {loss!r}"
            )
    if inputs is None:
        _, reached = needed_nodes(onx.graph.node, results)
        inputs = [
            entry.name
            for entry in onx.graph.input
            if entry.type.tensor_type.elem_type in FLOATS and entry.name in reached
        ]
    variables = [name for name in _some(inputs, "inputs") if name not in results]
    builder = GradientGraphBuilder(onx.SerializeToString(), results, variables, loss)
    builder.build()
    builder.save(path_name)
    return onnx.load_from_string(builder.get_model())


def _some(names: str | Iterable[str], argument: str) -> list[str]:
    return [names] if isinstance(names, str) else listed(names, argument)
