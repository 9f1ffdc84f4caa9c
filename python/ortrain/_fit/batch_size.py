"""Largest batch that fits into memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ortrain._fit.data import Data
from ortrain._fit.engine import Engine
from ortrain._fit.feeds import Layout, RowFeed
from ortrain.errors import InvalidArgumentError, MemoryLimitError

__all__ = ["free_bytes", "largest_batch"]

# Share of the free memory that a step may take: other programs grow, too.
_SHARE = 0.8
_MEMORY_INFO = Path("/proc/meminfo")


def largest_batch(engine: Engine, data: Data, layout: Layout, memory_limit: int | None) -> int:
    """Return the largest batch size that fits: a power of two, and at most the number of rows.

    The limit is ``memory_limit`` for all bytes of a step, or the free memory for the bytes that a step still allocates.

    Raises:
        InvalidArgumentError: if the free memory is unknown.
        MemoryLimitError: if a single row does not fit.

    """
    if layout.fixed is not None:
        return layout.fixed
    assert data.source is not None
    rows = len(data.source)
    feed = RowFeed(data.source, layout, batch_size=1, shuffle=False, seed=0, workers=0)
    first = next(iter(feed.epoch(0, 0, 1)))
    free = free_bytes(engine.module.device) if memory_limit is None else 0
    found, size = 0, 1
    while size <= rows:
        arguments = [np.zeros((size, *value.shape[1:]), value.dtype) for value in first.arguments]
        try:
            need = engine.module.memory(*arguments)
        except MemoryLimitError:
            break
        if (need.work + need.scratch > free) if memory_limit is None else (need.total > memory_limit):
            break
        found, size = size, size * 2
    if not found:
        limit = f"memory_limit, {memory_limit} bytes" if memory_limit is not None else f"the free memory, {free} bytes"
        raise MemoryLimitError(f"a step with one row takes more than {limit}; train fewer layers (trainable='head')")
    return found


def free_bytes(device: str) -> int:
    """Return the bytes that a step may allocate.

    Raises:
        InvalidArgumentError: if the device or the system does not say it.

    """
    unknown = "batch_size='auto' needs the free memory, which {} does not report; pass memory_limit"
    if device not in ("cpu", "reference"):
        from ortrain._devices import devices

        memory = next((found.memory for found in devices() if found.name == device), None)
        if memory is None:
            raise InvalidArgumentError(unknown.format(f"the device {device!r}"))
        return int(memory * _SHARE)
    if _MEMORY_INFO.exists():
        for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(int(line.split()[1]) * 1024 * _SHARE)
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        # macOS does not report the available pages; half of the memory is a careful guess.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    raise InvalidArgumentError(unknown.format("this system"))
