"""The norms of parameters and of their gradients, side by side.

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
    """The L2 norms of a parameter that is trained, and of its accumulated gradient.

    >>> import ortrain
    >>> _ = module(x, labels)
    >>> last = ortrain.inspect(module)[-1]
    >>> last.name, last.gradient > 0
    ('fc2.weight', True)
    """

    name: str
    """The parameter."""
    parameter: float
    """Its norm."""
    gradient: float
    """That of its gradient: the sum since :meth:`Module.lazy_reset_grad`."""

    @property
    def ratio(self) -> float:
        """The norm of the gradient beside that of the parameter; times the rate, what a plain step changes of it.

        >>> import ortrain
        >>> _ = module(x, labels)
        >>> bool(0 < ortrain.inspect(module)[-1].ratio < 10)
        True
        """
        if self.parameter == 0:
            return float("inf") if self.gradient else 0.0
        return self.gradient / self.parameter


class Norms(Sequence[ParameterNorms]):
    """What :func:`ortrain.inspect` shows of a module: the norms of each parameter. ``str`` of it is a table.

    A parameter whose gradient is zero is not reached by the loss, or behind a layer that gives zero for every row; one
    whose gradient is large beside it explodes.

    >>> import ortrain
    >>> _ = module(x, labels)
    >>> norms = ortrain.inspect(module)
    >>> [row.name for row in norms]
    ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    >>> print(str(norms).splitlines()[0].split())
    ['parameter', 'norm', 'of', 'gradient', 'ratio']
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
        head = f"{'parameter':<{width}}  {'norm':>10}  {'of gradient':>11}  {'ratio':>10}"
        rows = [
            f"{row.name:<{width}}  {row.parameter:>10.4g}  {row.gradient:>11.4g}  {row.ratio:>10.4g}"
            for row in self._rows
        ]
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        # Only a notebook needs it.
        from ortrain._html import table

        rows = [(row.name, f"{row.parameter:.4g}", f"{row.gradient:.4g}", f"{row.ratio:.4g}") for row in self._rows]
        return table(["parameter", "norm", "of gradient", "ratio"], rows)
