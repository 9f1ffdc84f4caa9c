"""Report on the training of a model: its trained parameters, the obstacles, and the cost of a step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, overload

from ortrain import _ortrain
from ortrain._model_source import ModelLike, source_of
from ortrain._operators import OperatorLibrary, Source, with_operators, with_stops
from ortrain._records import record_of
from ortrain.api.module import Module
from ortrain.api.norms import Norms, ParameterNorms
from ortrain.errors import InvalidArgumentError

__all__ = [
    "GradientStop",
    "Inspection",
    "NodeNote",
    "Obstacle",
    "ParameterInfo",
    "StepCost",
    "StopCandidate",
    "inspect",
]


# Maximum number of constants in a notebook table, which keeps the page small.
_ROWS = 300


@dataclass(frozen=True)
class ParameterInfo:
    """Constant of a model, with its role in a training.

    >>> import ortrain
    >>> found = ortrain.inspect(ortrain.examples.perceptron())
    >>> first = found.parameters[0]
    >>> first.name, first.dtype, first.shape, first.role
    ('fc1.weight', 'float32', (96, 64), 'trained')
    >>> first.reason, first.confidence
    ('it is a weight of node "fc1" (Gemm)', 'certain')
    >>> first.nodes, first.layer
    (['fc1'], 2)
    """

    name: str
    """Name of the constant."""
    dtype: str
    """Element type, in the notation of NumPy."""
    shape: tuple[int, ...]
    """Shape of the constant."""
    role: Literal["trained", "statistic", "constant"]
    """Default role: trained; a running statistic, which is in the checkpoint but not trained; or a constant that stays
    in the models."""
    confidence: Literal["certain", "likely", "guess"]
    """Strength of the evidence for the role: the type of the constant or its input of an operator (``"certain"``), its
    name, its values or a pattern of nodes (``"likely"``), or none of these (``"guess"``)."""
    reason: str
    """Reason for the role."""
    nodes: list[str]
    """Names of the nodes that use the constant; a node without a name has the name of its first result."""
    layer: int | None
    """Layer of a trained constant, counted from the end: 1 is the last one. A layer is a node with weights (a
    convolution, a product, a normalization, an embedding, a recurrent layer), together with constants that are added to
    its results or multiplied with them. Layers have the order of their nodes. A constant of several layers belongs to
    the last of them."""


@dataclass(frozen=True)
class Obstacle:
    """Obstacle to the training of a model.

    >>> import ortrain
    >>> from onnx import TensorProto, helper
    >>> y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    >>> graph = helper.make_graph([helper.make_node("Unheard", [], ["y"])], "graph", [], [y])
    >>> found = ortrain.inspect(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    >>> found.obstacles[0].operator
    'Unheard'
    >>> found.obstacles[0].fix.split(" (")[0]
    'export the model without it'
    """

    node: str | None
    """Node, as messages name it; ``None`` if the obstacle is not a node."""
    operator: str | None
    """Operator of the node."""
    what: str
    """Problem."""
    fix: str
    """Repair."""


@dataclass(frozen=True)
class GradientStop:
    """Node that passes no gradient back.

    >>> import ortrain
    >>> ortrain.inspect(ortrain.examples.convnet()).stops  # a gradient reaches everything
    []
    """

    node: str
    """Node, as messages name it."""
    operator: str
    """Operator of the node."""
    reason: str
    """Reason."""
    parameters: list[str]
    """Constants that are not trained because of this node: no other path carries a gradient to them."""
    fix: str
    """Repair, if the stop is not intended."""


@dataclass(frozen=True)
class StopCandidate:
    """Value at which PyTorch may pass no gradient: ``detach`` and ``no_grad`` leave no trace in a file.

    >>> import ortrain
    >>> ortrain.inspect(ortrain.examples.convnet()).stop_candidates  # no result decides about others
    []
    """

    value: str
    """Name of the value, for ``stop_gradients``."""
    reason: str
    """Evidence in the graph."""


@dataclass(frozen=True)
class NodeNote:
    """Node that does not run as a part of one program.

    >>> import ortrain
    >>> ortrain.inspect(ortrain.examples.convnet()).host_steps  # a step is one program
    []
    """

    node: str
    """Node, as messages name it."""
    operator: str
    """Operator of the node."""
    what: str
    """Execution of the node."""


@dataclass(frozen=True)
class StepCost:
    """Operations and memory of a training step, which is planned but not run.

    The plan uses a simple loss: the sum of the means of the loss inputs. A real loss takes a little more.

    >>> import ortrain
    >>> step = ortrain.inspect(ortrain.examples.perceptron(), batch_size=32).step
    >>> step.inputs
    {'x': (32, 64)}
    >>> step.parameters, step.gradients, step.moments
    (29184, 29184, 58368)
    >>> step.training_flops > 2 * step.forward_flops
    True
    """

    inputs: dict[str, tuple[int, ...]]
    """Shapes of the inputs."""
    forward_flops: int
    """Floating-point operations of a forward run; a multiply-add is two."""
    training_flops: int
    """Floating-point operations of a training step: forward and backward."""
    parameters: int
    """Bytes of the parameters, including frozen ones and running statistics."""
    gradients: int
    """Bytes of the gradients."""
    moments: int
    """Bytes of the moments of AdamW."""
    constants: int
    """Bytes of constants of the program."""
    work: int
    """Bytes of inputs, activations and all values between them: the arena of a training step."""
    scratch: int
    """Bytes of scratch memory for kernels."""
    forward_work: int
    """Bytes of the arena of a forward run."""
    without: list[str]
    """Parts of the model that the numbers exclude, because they are planned at run time."""

    @property
    def total(self) -> int:
        """Peak memory of a training step with AdamW, in bytes.

        >>> import ortrain
        >>> small, large = (ortrain.inspect(ortrain.examples.perceptron(), batch_size=rows).step for rows in (32, 256))
        >>> small.total < large.total
        True
        """
        return self.parameters + self.gradients + self.moments + self.constants + self.work + self.scratch


@dataclass(frozen=True)
class Inspection:
    """Result of :func:`inspect`. ``str`` of it is a short report; a notebook shows the report with a table.

    >>> import ortrain
    >>> print(ortrain.inspect(ortrain.examples.perceptron()))
    a forward model: generate_artifacts prepares it for training
    trained: 4 tensors, 7,210 elements, 28.8 kB
      fc1.weight: float32[96, 64]: it is a weight of node "fc1" (Gemm)
      fc1.bias: float32[96]: it is a weight of node "fc1" (Gemm)
      fc2.weight: float32[10, 96]: it is a weight of node "fc2" (Gemm)
      fc2.bias: float32[10]: it is a weight of node "fc2" (Gemm)
    cost of a step: unknown; give sizes (batch_size, shapes) of x: float32[batch, 64]
    <BLANKLINE>
    """

    parameters: list[ParameterInfo]
    """Initializers of the model in its order, initializers of subgraphs last, then the values of Constant nodes."""
    obstacle: str | None
    """Error that making artifacts would raise; ``None`` if the model can be trained as it is."""
    obstacles: list[Obstacle]
    """All obstacles, each with its repair."""
    stops: list[GradientStop]
    """Nodes between constants and the loss that pass no gradient back. This may be intended."""
    stop_candidates: list[StopCandidate]
    """Values at which PyTorch probably passed no gradient: floats that TopK selected, or that are multiplied by
    decisions of the model's own results and then weight other results. If a detector assigns targets to its
    predictions, such values belong in ``stop_gradients``; the weights of experts do not."""
    warnings: list[str]
    """Probably unintended properties, each with the value to name instead: an output that is no logit, a loss in the
    model on an unsuitable input."""
    host_steps: list[NodeNote]
    """Nodes that run on the host."""
    control_flow: list[NodeNote]
    """Nodes that select or repeat subgraphs."""
    open_inputs: dict[str, str]
    """Inputs, with their types, that need a shape before a step can be planned."""
    value_inputs: list[str]
    """Inputs with values that determine shapes: a step cannot be planned before a run."""
    step: StepCost | None
    """Operations and memory of a training step, if all shapes are known."""
    kind: Literal[
        "forward model", "training model", "evaluation model", "optimizer model", "checkpoint", "safetensors file"
    ]
    """Kind of the file. A file that is no forward model only has ``parameters`` and ``inputs``."""
    inputs: dict[str, str]
    """Inputs of a run, with their types."""
    optimizer: dict[str, Any] | None
    """Optimizer with its settings, slots and groups, for an optimizer model and for a checkpoint with settings."""
    _about_guesses: str | None = field(repr=False)
    _text: str = field(repr=False)
    _everything: str = field(repr=False)
    _json: str = field(repr=False)

    def names(self, role: Literal["trained", "statistic", "constant"]) -> list[str]:
        """Return the names of the parameters with a role, in the model's order.

        >>> import ortrain
        >>> ortrain.inspect(ortrain.examples.convnet()).names("statistic")
        ['block1.mean', 'block1.var', 'block2.mean', 'block2.var', 'block3.mean', 'block3.var']
        """
        return [info.name for info in self.parameters if info.role == role]

    def report(self, *, everything: bool = False) -> str:
        """Return the text of ``str``, or with ``everything`` a report of every tensor and every node.

        >>> import ortrain
        >>> found = ortrain.inspect(ortrain.examples.convnet())
        >>> len(found.report().splitlines()) < len(found.report(everything=True).splitlines())
        True
        """
        return self._everything if everything else self._text

    def to_json(self) -> str:
        """Return the complete result as JSON.

        >>> import json, ortrain
        >>> json.loads(ortrain.inspect(ortrain.examples.perceptron()).to_json())["parameters"][1]["shape"]
        [96]
        """
        return self._json

    def __str__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from ortrain._html import paragraph, table

        heads = ["name", "type", "shape", "elements", "role", "confidence", "why"]
        rows = [
            (info.name, info.dtype, list(info.shape), prod(info.shape), info.role, info.confidence, info.reason)
            for info in sorted(self.parameters, key=lambda info: info.confidence != "guess")[:_ROWS]
        ]
        more = len(self.parameters) - _ROWS
        rest = paragraph(f"and {more:,} more: print(report(everything=True)) shows all") if more > 0 else ""
        # The other lines of the report are few, and each is a sentence.
        sentences = [line for line in self._text.splitlines() if line and not line.startswith(" ")]
        return "".join(map(paragraph, sentences)) + table(heads, rows) + rest


@overload
def inspect(model: Module) -> Norms: ...
@overload
def inspect(
    model: ModelLike,
    loss_input_names: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    operators: OperatorLibrary | None = None,
    stop_gradients: Sequence[str] | None = None,
) -> Inspection: ...
def inspect(
    model: ModelLike | Module,
    loss_input_names: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    operators: OperatorLibrary | None = None,
    stop_gradients: Sequence[str] | None = None,
) -> Inspection | Norms:
    """Report the parameters that would be trained, the obstacles, and the cost of a step. Nothing is written.

    For a :class:`~ortrain.api.Module` the report has the norm of each parameter and of its gradient
    (:class:`~ortrain.api.Norms`).

    For another file of a training (a training, evaluation or optimizer model, a checkpoint, safetensors) the report
    names the kind of the file and its tensors.

    Trained are floats that reach the loss through operators with a gradient: initializers and the values of Constant
    nodes, also in subgraphs, unless they were computed from data or by a formula. The report gives a reason for each
    of them. A constant that ``requires_grad`` names is trained in any case. Not trained are

    - running statistics, and the mean, variance or deviation of a normalization that is written as arithmetic;
    - constants that prepare an input of the model element by element before its first layer: a mean, a scale;
    - tables of sines of positions, the frequencies that multiply positions, and other constants that are combined
      with integers only;
    - ones and zeros that an exporter wrote for a normalization without scale and bias, and initial states of recurrent
      layers with equal values;
    - tensors filled with one number that a program then writes into, concatenates or selects from;
    - tables of equal steps, grid points, strides, box sizes, and coordinates that a small network turns into a bias;
    - masks of attention scores, one filter for all channels, and the vectors of a power iteration;
    - single numbers in arithmetic (an epsilon, an exponent). A number of one element is trained if a node
      reads it as a weight, or if it is the bias of one output. It is also trained if its name is typical of a
      parameter: a word (``bias``, ``logit_scale``) or a path of attributes (``blocks.0.gate``), as exporters write it.

    Each reason has a strength of evidence (:attr:`ParameterInfo.confidence`), and reports begin with the guesses.

    A model with unknown operators or invalid nodes is reported as far as possible.

    Args:
        model: a path, the bytes of a file, an ``onnx.ModelProto``, or a module without other arguments.
        loss_input_names: the values that the loss is computed from; by default the model's outputs.
        batch_size: the size of open first axes of inputs, to plan a step with.
        shapes: shapes of inputs by name, to plan a step with. A step is planned if all shapes are then known.
        operators: operators and gradients of your own.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), as in
            :func:`ortrain.artifacts.generate_artifacts`.

    Raises:
        InvalidModelError, UnsupportedError: if the file cannot be read, or if it is no forward model and a loss or a
            step is requested.
        InvalidArgumentError: for an unknown value or input, and if ``batch_size`` or ``shapes`` do not fit the model.
        TypeError: for arguments of other types.

    >>> import ortrain
    >>> found = ortrain.inspect(ortrain.examples.convnet())
    >>> found.names("trained")[:3]
    ['block1.weight', 'block1.scale', 'block1.bias']
    >>> found.names("statistic")[:2]
    ['block1.mean', 'block1.var']
    >>> found.parameters[0].reason
    'it is a weight of node "block1.conv" (Conv)'
    >>> ortrain.inspect(ortrain.examples.convnet(), batch_size=32).step.total < 16 << 20
    True

    """
    if isinstance(model, Module):
        other_arguments = (loss_input_names, batch_size, shapes, operators, stop_gradients)
        if any(argument is not None for argument in other_arguments):
            raise InvalidArgumentError("a module must be the only argument: its loss and its shapes are fixed")
        return Norms([record_of(ParameterNorms, norms) for norms in model._native.norms()])
    if isinstance(loss_input_names, str):
        raise TypeError("loss_input_names must be a list of names, got one name")
    sizes = [(str(name), _sizes(name, dims)) for name, dims in (shapes or {}).items()]
    rows = None if batch_size is None else _size("batch_size", batch_size)
    source = with_stops(with_operators(source_of(model), operators), stop_gradients)
    return inspection(source, list(loss_input_names or []), strict=False, batch_size=rows, shapes=sizes)


def _size(what: str, size: object) -> int:
    """Convert a number to the size of an axis; raise an error if it is not a size."""
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"{what} must be an integer, got {size!r}")
    number = operator.index(size)
    if not 0 <= number < 1 << 63:
        raise InvalidArgumentError(f"{what} must be from 0 to 2**63 - 1, got {number}")
    return number


def _sizes(name: str, dims: object) -> list[int]:
    if isinstance(dims, str) or not isinstance(dims, Iterable):
        raise TypeError(f"the shape of input {name!r} must be a list of sizes, got {dims!r}")
    return [_size(f"a size of input {name!r}", size) for size in dims]


def inspection(
    source: Source,
    values: Sequence[str],
    *,
    first_output: bool = False,
    strict: bool = True,
    batch_size: int | None = None,
    shapes: Sequence[tuple[str, Sequence[int]]] = (),
) -> Inspection:
    """Inspect a model. ``first_output`` uses only the first output; ``strict`` raises an error for wrong operators."""
    import json

    native = _ortrain.inspect(source, values, first_output, strict=strict, batch_size=batch_size, shapes=shapes)
    step, optimizer = native.step(), native.optimizer()
    return Inspection(
        parameters=[record_of(ParameterInfo, info, shape=tuple(info.shape)) for info in native.parameters()],
        obstacle=native.obstacle(),
        obstacles=[record_of(Obstacle, obstacle) for obstacle in native.obstacles()],
        stops=[record_of(GradientStop, stop) for stop in native.stops()],
        stop_candidates=[record_of(StopCandidate, candidate) for candidate in native.stop_candidates()],
        warnings=native.warnings(),
        host_steps=[record_of(NodeNote, note) for note in native.host_steps()],
        control_flow=[record_of(NodeNote, note) for note in native.control_flow()],
        open_inputs=dict(native.open_inputs()),
        value_inputs=native.value_inputs(),
        step=step and record_of(StepCost, step, inputs={name: tuple(shape) for name, shape in step.inputs}),
        kind=native.kind(),
        inputs=dict(native.inputs()),
        optimizer=None if optimizer is None else json.loads(optimizer),
        _about_guesses=native.about_guesses(),
        _text=native.text(),
        _everything=native.complete_text(),
        _json=native.to_json(),
    )
