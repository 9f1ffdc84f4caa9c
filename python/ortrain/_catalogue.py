"""Catalogue of the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ortrain import _ortrain
from ortrain._records import record_of

__all__ = ["OperatorInfo", "operators"]


@dataclass(frozen=True)
class OperatorInfo:
    """Operator with its versions, types and gradient.

    >>> import ortrain
    >>> known = {operator.name: operator for operator in ortrain.operators() if operator.domain == "ai.onnx"}
    >>> known["Gather"].versions, known["Gather"].runs, known["Gather"].gradient
    ((1, 11, 13), 'instructions', 'full')
    >>> known["Gather"].types[1]
    ('int32', 'int64')
    >>> known["OneHot"].gradient, known["OneHot"].gradient_inputs
    ('partial', (2,))
    """

    domain: str
    """Domain; ``"ai.onnx"`` for the default domain."""
    name: str
    """Name of the operator."""
    standard: bool
    """True if ONNX defines the operator. ONNX Runtime defines the others, some of them only for its training models."""
    versions: tuple[int, ...]
    """Versions of the domain that changed the definition, oldest first; ortrain reads each of them."""
    runs: Literal["row", "instructions", "decomposition", "host", "control flow"]
    """Implementation: an expression of each element (a row of a table), instructions of its own, a decomposition into
    other operators, a function on the host, or programs that are selected or repeated."""
    gradient: Literal["full", "partial", "zero", "none"]
    """Gradients: to all float inputs; to some of them; none, because the gradient is zero almost everywhere; none,
    because no floats are involved, or the operator is a part of training itself."""
    gradient_inputs: tuple[int, ...]
    """Inputs with a gradient, if only some inputs have one."""
    types: tuple[tuple[str, ...], ...]
    """Element types of each input, in the notation of NumPy."""
    variadic: bool
    """True if any number of inputs like the last one is allowed."""


def operators() -> list[OperatorInfo]:
    """Return all operators, sorted by domain and name. ``docs/operators.md`` is generated from this list.

    The properties are measured: each operator is offered nodes until it accepts one, and this node is differentiated.
    The call takes a moment.

    >>> import ortrain
    >>> [operator.name for operator in ortrain.operators() if operator.runs == "control flow"]
    ['If', 'Loop', 'Scan', 'YieldOp']
    """
    return [
        record_of(
            OperatorInfo,
            info,
            versions=tuple(info.versions),
            gradient_inputs=tuple(info.gradient_inputs),
            types=tuple(map(tuple, info.types)),
        )
        for info in _ortrain.operators()
    ]
