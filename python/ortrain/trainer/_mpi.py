"""Messages between ranks by MPI. Only this module imports ``mpi4py``.

``ortrain._world`` imports it if several processes train together.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

if TYPE_CHECKING:
    from ortrain._ortrain import RankControl

__all__ = ["Communicator", "Connection", "Operand", "end_job_after_exceptions", "leave"]

# Elements of an operand: address, number of elements, and element type.
Operand = tuple[int, int, str]

# MPI's name and the size in bytes of each element type that MPI can combine. It has no float16 and bfloat16.
_TYPES: dict[str, tuple[MPI.Datatype, int]] = {
    "float32": (MPI.FLOAT, 4),
    "float64": (MPI.DOUBLE, 8),
    "int64": (MPI.INT64_T, 8),
    "uint8": (MPI.BYTE, 1),
}
_REDUCTIONS = {"sum": MPI.SUM, "max": MPI.MAX}
# Elements of one call. MPI counts elements in 32 bits.
_MAX_COUNT = 2**30
# Seconds that a launcher needs to forward the last line of a process before the job ends. MPICH's launcher loses lines
# of processes that end at once.
_FORWARDING = 0.5

ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _Blocking:
    """Collective that runs when a caller waits for it.

    MPI's nonblocking collectives make no progress while the process computes, so they would start here too.
    """

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = calls

    def wait(self) -> None:
        for call in self._calls:
            call()


class _Started:
    """Message that is on its way."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


class Communicator:
    """Communicator of MPI for the core, which passes addresses of host memory.

    Every method returns a handle with a method ``wait``. The memory of the operands must exist until ``wait`` returns.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.allows_threads: bool = MPI.Query_thread() >= MPI.THREAD_SERIALIZED

    def all_reduce(self, operand: Operand, reduction: str) -> _Blocking:
        operation = _REDUCTIONS[reduction]
        return _Blocking(
            *(partial(self._comm.Allreduce, MPI.IN_PLACE, buffer, operation) for buffer in _pieces(operand))
        )

    def reduce_scatter(self, operand: Operand, counts: Sequence[int], result: Operand) -> _Blocking:
        source, target = _buffer(operand), _buffer(result)
        return _Blocking(partial(self._comm.Reduce_scatter, source, target, list(counts), MPI.SUM))

    def all_gather(self, operand: Operand, counts: Sequence[int]) -> _Blocking:
        memory, _, kind = _buffer(operand)
        return _Blocking(partial(self._comm.Allgatherv, MPI.IN_PLACE, [memory, list(counts), kind]))

    def broadcast(self, operand: Operand, root: int) -> _Blocking:
        return _Blocking(*(partial(self._comm.Bcast, buffer, root) for buffer in _pieces(operand)))

    def send(self, operand: Operand, rank: int) -> _Started:
        return _Started([self._comm.Isend(buffer, rank) for buffer in _pieces(operand)])

    def receive(self, operand: Operand, rank: int) -> _Started:
        return _Started([self._comm.Irecv(buffer, rank) for buffer in _pieces(operand)])

    def group(self, ranks: Sequence[int]) -> Communicator:
        return Communicator(self._comm.Create_group(self._comm.group.Incl(list(ranks))))

    def abort(self, sentence: str) -> None:
        end_job(sentence)


def _buffer(operand: Operand) -> tuple[MPI.buffer, int, MPI.Datatype]:
    address, count, name = operand
    if name not in _TYPES:
        raise TypeError(f"MPI cannot combine elements of {name}")
    if count > _MAX_COUNT:
        raise OverflowError(f"MPI cannot divide {count} elements among ranks; it counts at most {_MAX_COUNT}")
    kind, size = _TYPES[name]
    return MPI.buffer.fromaddress(address, count * size), count, kind


def _pieces(operand: Operand) -> list[tuple[MPI.buffer, int, MPI.Datatype]]:
    """Divides an operand into pieces that MPI can count."""
    address, count, name = operand
    size = _TYPES[name][1] if name in _TYPES else 0
    starts = range(0, max(count, 1), _MAX_COUNT)
    return [_buffer((address + start * size, min(count - start, _MAX_COUNT), name)) for start in starts]


class Connection:
    """Rank and size of this process in MPI, and new communicators of all ranks. All ranks create it together."""

    def __init__(self) -> None:
        world = MPI.COMM_WORLD
        self.rank: int = world.rank
        self.size: int = world.size
        if self.size > 1:
            self.control, self.data = Communicator(world.Dup()), Communicator(world.Dup())
            self.run: int = world.bcast(int.from_bytes(os.urandom(8), "little") >> 1)
            with_memory: Any = world.Split_type(MPI.COMM_TYPE_SHARED)
            self.local_rank: int = with_memory.rank
            self._cores_of_node: list[frozenset[int]] = with_memory.allgather(_usable_cores())
            with_memory.Free()

    def threads(self) -> int:
        """Returns the number of threads of this rank: its usable cores, divided by the ranks that share them."""
        own = self._cores_of_node[self.local_rank]
        sharing = sum(bool(own & other) for other in self._cores_of_node)
        return max(1, len(own) // sharing)


def _usable_cores() -> frozenset[int]:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def end_job(sentence: str) -> None:
    """Shows a sentence, and ends all ranks of the job with the exit code 1."""
    sys.stdout.flush()
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    time.sleep(_FORWARDING)
    MPI.COMM_WORLD.Abort(1)


def leave(control: RankControl) -> None:
    """Waits until the scripts of all ranks have ended."""
    if not MPI.Is_finalized():
        control.leave()


def end_job_after_exceptions(rank: int, size: int) -> None:
    """Makes an exception without handler end all ranks. Otherwise the others would wait for this rank forever."""
    previous: ExceptionHook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        end_job(f"ortrain: rank {rank} of {size} ends the job: {kind.__name__}: {error}")

    sys.excepthook = hook
