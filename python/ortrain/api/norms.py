"""Norms of parameters and of their gradients.

>>> import ortrain
>>> _ = module(x, labels)
>>> table = str(ortrain.inspect(module))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

__all__ = ["Norms", "ParameterNorms"]


@dataclass(frozen=True)
class ParameterNorms:
    """L2 norms of a trained parameter and of its accumulated gradient.

    >>> import ortrain
    >>> _ = module(x, labels)
    >>> last = ortrain.inspect(module)[-1]
    >>> last.name, last.gradient > 0
    ('fc2.weight', True)
    """

    name: str
    """Name of the parameter."""
    parameter: float
    """Norm of the parameter."""
    gradient: float
    """Norm of the gradient: the sum since :meth:`Module.lazy_reset_grad`."""

    @property
    def ratio(self) -> float:
        """Gradient norm divided by parameter norm; times the rate, the relative change by a step of plain SGD.

        >>> import ortrain
        >>> _ = module(x, labels)
        >>> bool(0 < ortrain.inspect(module)[-1].ratio < 10)
        True
        """
        if self.parameter == 0:
            return float("inf") if self.gradient else 0.0
        return self.gradient / self.parameter


class Norms(Sequence[ParameterNorms]):
    """Norms of the parameters of a module, as :func:`ortrain.inspect` returns them. ``str`` of it is a table.

    A gradient of zero means that the loss does not reach the parameter, or that the parameter follows a layer with zero
    output for every row. A gradient that is large relative to its parameter explodes.

    >>> import ortrain
    >>> _ = module(x, labels)
    >>> norms = ortrain.inspect(module)
    >>> [row.name for row in norms]
    ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    >>> print(str(norms).splitlines()[0].split())
    ['parameter', 'norm', 'grad', 'norm', 'ratio']
    """

    def __init__(self, rows: Sequence[ParameterNorms]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, at: int) -> ParameterNorms: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ParameterNorms]: ...
    def __getitem__(self, at: int | slice) -> ParameterNorms | Sequence[ParameterNorms]:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ParameterNorms]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Norms({len(self._rows)} parameters)"

    def __str__(self) -> str:
        width = max([len("parameter"), *(len(row.name) for row in self._rows)])
        head = f"{'parameter':<{width}}  {'norm':>10}  {'grad norm':>11}  {'ratio':>10}"
        rows = [
            f"{row.name:<{width}}  {row.parameter:>10.4g}  {row.gradient:>11.4g}  {row.ratio:>10.4g}"
            for row in self._rows
        ]
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from ortrain._html import table

        rows = [(row.name, f"{row.parameter:.4g}", f"{row.gradient:.4g}", f"{row.ratio:.4g}") for row in self._rows]
        return table(["parameter", "norm", "grad norm", "ratio"], rows)
