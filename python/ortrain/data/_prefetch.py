"""Worker threads that read batches ahead of the training step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ortrain.data._source import Batch, Source

__all__ = ["Prefetcher"]

_MAX_WORKERS = 4


class Prefetcher:
    """Batches of a source, read ahead by threads and returned in order.

    An error of a batch is raised where the batch would be returned. The threads end when the last batch is returned,
    and in :meth:`close`.

    Args:
        source: the rows.
        batches: row indices and seed of each batch. They are read as far ahead as batches are.
        training: True if the batches may be augmented.
        workers: the number of threads; 0 reads each batch when it is asked for. The default leaves a core to the step.
        depth: the number of batches that are read ahead.

    """

    def __init__(
        self,
        source: Source,
        batches: Iterable[tuple[npt.NDArray[np.int64], int]],
        *,
        training: bool,
        workers: int | None = None,
        depth: int | None = None,
    ) -> None:
        if workers is None:
            workers = max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) - 1))
        self._source, self._training = source, training
        self._order = iter(batches)
        self._depth = depth or 2 * workers
        self._ready: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ortrain-data") if workers else None
        self._fill()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._pool is None:
            rows, seed = next(self._order)
            return self._source.take(rows, seed, self._training)
        if not self._ready:
            self.close()
            raise StopIteration
        try:
            batch = self._ready.popleft().result()
            self._fill()
        except BaseException:
            self.close()
            raise
        return batch

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the batches that were not returned, and wait for the threads to end."""
        self._order = iter(())
        self._ready.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        """Hand batches to the threads up to the depth."""
        while self._pool is not None and len(self._ready) < self._depth:
            following = next(self._order, None)
            if following is None:
                return
            rows, seed = following
            self._ready.append(self._pool.submit(self._source.take, rows, seed, self._training))
