"""Time and memory of a step.

>>> profile = module.profile(x, labels, steps=2)
>>> [instruction.kind for instruction in profile.instructions][:2]
['Inputs', 'MatMul']
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ortrain import _ortrain
from ortrain._model_source import PathLike
from ortrain._records import record_of

__all__ = ["Instruction", "MemoryUse", "Profile"]


@dataclass(frozen=True)
class Instruction:
    """Profile of one instruction of the program, or of the copies of inputs or results.

    >>> profile = module.profile(x, labels, steps=2)
    >>> first = next(instruction for instruction in profile.instructions if instruction.kind == "MatMul")
    >>> first.node, first.calls, first.flops
    ('node "fc1" (Gemm) + node "relu" (Relu)', 2, 99072)
    """

    node: str
    """Node of the instruction; several nodes if they were fused."""
    kind: str
    """``Map``, ``Reduce``, ``MatMul``, ``Conv``, ...; ``Host``, ``Inputs`` and ``Outputs`` are not instructions."""
    shapes: str
    """Sizes of the instruction."""
    kernel: str
    """Kernel of the backend, or the library that computes the instruction; empty if the backend does not say."""
    calls: int
    """Number of calls in all steps."""
    total: float
    """Seconds of all calls."""
    min: float
    """Seconds of the fastest call."""
    median: float
    """Median seconds of a call."""
    flops: int
    """Floating-point operations of a call; a multiply-add is two."""
    bytes: int
    """Minimum bytes that a call moves: each buffer is read once and written once."""
    bound: float
    """Minimum seconds in which this machine could compute these operations and move these bytes."""

    @property
    def share(self) -> float:
        """Share of the machine's bound that a call reaches: 1 is the bound, above 1 if buffers stay in a cache.

        >>> profile = module.profile(x, labels, steps=2)
        >>> all(instruction.share >= 0 for instruction in profile.instructions)
        True
        """
        return self.bound / max(self.median, 1e-9)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a module and the optimizer of its state hold.

    >>> memory = module.memory()
    >>> memory.parameters, memory.gradients
    (29184, 29184)
    """

    parameters: int
    """Bytes of the parameters, including frozen ones and running statistics; they belong to the state."""
    gradients: int
    """Bytes of the gradients."""
    moments: int
    """Bytes of the optimizer's state (moments and other slots), which belongs to the state."""
    work: int
    """Bytes of the arena for the values of a step, as required by the largest step so far."""
    scratch: int
    """Bytes of scratch memory for kernels."""

    @property
    def total(self) -> int:
        """Sum of all parts. ``SessionOptions.memory_limit`` limits the sum without ``moments``.

        >>> memory = module.memory()
        >>> memory.total == sum([memory.parameters, memory.gradients, memory.moments, memory.work, memory.scratch])
        True
        """
        return self.parameters + self.gradients + self.moments + self.work + self.scratch


class Profile:
    """Time of some steps, by instruction; :meth:`Module.profile <ortrain.api.Module.profile>` makes it.

    ``str(profile)`` is the table of :meth:`table`; a notebook shows a table in HTML.

    >>> profile = module.profile(x, labels, steps=2)
    >>> profile
    Profile(12 instructions, 2 steps)
    >>> len(profile.steps), profile.memory < 1 << 20
    (2, True)
    """

    instructions: list[Instruction]
    """Instructions that ran, in the order of the first step."""
    steps: list[float]
    """Seconds of each step."""
    flops_limit: float
    """Maximum floating-point operations per second of the machine, measured after the steps."""
    bandwidth_limit: float
    """Maximum bytes per second of the machine, measured after the steps."""
    memory: int
    """Bytes of a step, which are compared with ``memory_limit``."""
    planning: dict[str, float]
    """Seconds of the parts of planning for new shapes: shapes and lowering, each pass by its name, kernels."""

    def __init__(self, native: _ortrain.Profile) -> None:
        self._native = native
        self.instructions = [record_of(Instruction, profiled) for profiled in native.instructions()]
        self.steps = native.steps()
        self.flops_limit, self.bandwidth_limit = native.flops_limit(), native.bandwidth_limit()
        self.memory = native.memory()
        self.planning = dict(native.planning())

    def table(self) -> str:
        """Return a table: a line for each instruction, the slowest first, then one for the sum and one for planning.

        >>> profile = module.profile(x, labels, steps=2)
        >>> profile.table().splitlines()[1].split()[:3]
        ['ms/step', 'time', 'calls']
        """
        return self._native.table()

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from ortrain._html import paragraph, table

        steps = sorted(self.steps)
        half = steps[len(steps) // 2] * 1e3
        summary = f"{len(steps)} steps, {half:.3f} ms per step (median); {self.memory:,} bytes of memory"
        heads = [
            "node",
            "kind",
            "shapes",
            "kernel",
            "calls",
            "ms/step",
            "share of time",
            "share of the machine's limit",
        ]
        total_time = max(sum(instruction.total for instruction in self.instructions), 1e-12)
        rows = [
            (
                instruction.node,
                instruction.kind,
                instruction.shapes,
                instruction.kernel,
                instruction.calls,
                f"{instruction.total / len(steps) * 1e3:.3f}",
                f"{instruction.total / total_time:.1%}",
                f"{instruction.share:.0%}" if instruction.bound else "",
            )
            for instruction in sorted(self.instructions, key=lambda instruction: -instruction.total)
        ]
        return paragraph(summary) + table(heads, rows)

    def __repr__(self) -> str:
        return f"Profile({len(self.instructions)} instructions, {len(self.steps)} steps)"

    def chrome_trace(self, path: PathLike) -> None:
        """Write every call as an event in Chrome's trace format, for ``chrome://tracing`` and Perfetto.

        Raises:
            NoSuchFileError, OrtrainError: if the file cannot be written.

        >>> import json
        >>> from pathlib import Path
        >>> module.profile(x, labels, steps=2).chrome_trace("step.json")
        >>> trace = json.loads(Path("step.json").read_text())
        >>> sorted({event["ph"] for event in trace["traceEvents"]})
        ['M', 'X']

        """
        self._native.chrome_trace(os.fspath(path))
