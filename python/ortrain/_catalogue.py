"""Catalogue of the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ortrain import _ortrain

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
    """Its domain: ``"ai.onnx"`` for the default one."""
    name: str
    """Its name."""
    standard: bool
    """Whether ONNX has it. Others are those of ONNX Runtime, some of them for its training models only."""
    versions: tuple[int, ...]
    """The versions of its domain in which its definition changed, oldest first; each is read."""
    runs: Literal["row", "instructions", "decomposition", "host", "control flow"]
    """How it runs: as an expression of each element (a row of a table), as instructions of its own, as other operators,
    as a function on the host, or as programs that are chosen or repeated."""
    gradient: Literal["full", "partial", "zero", "none"]
    """What it passes back: gradients to all inputs of floats; to some; none, for it is zero almost everywhere; none,
    for it has no floats to pass them to or from, or is part of training itself."""
    gradient_inputs: tuple[int, ...]
    """The inputs that get gradients, where only some do."""
    types: tuple[tuple[str, ...], ...]
    """For each input, the element types that it takes, as NumPy spells them."""
    variadic: bool
    """Whether it takes any number of inputs like the last one."""


def operators() -> list[OperatorInfo]:
    """Return all operators, sorted by domain and name. ``docs/operators.md`` is generated from this list.

    The properties are measured: each operator is offered nodes until it accepts one, and this node is differentiated.
    The call takes a moment.

    >>> import ortrain
    >>> [operator.name for operator in ortrain.operators() if operator.runs == "control flow"]
    ['If', 'Loop', 'Scan', 'YieldOp']
    """
    return [
        OperatorInfo(
            domain,
            name,
            standard,
            tuple(versions),
            runs,
            gradient,
            tuple(inputs),
            tuple(tuple(of_input) for of_input in types),
            variadic,
        )
        for domain, name, standard, versions, runs, (gradient, inputs), types, variadic in _ortrain.operators()
    ]
