"""Processes that train together: the ranks of MPI, or one process."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ortrain import _ortrain
from ortrain._stacklevel import level_of_user
from ortrain.errors import UnsupportedError

__all__ = ["World", "open_world", "reporting", "warn_of_no_effect"]

# Variables with the number of processes: Open MPI; MPICH, Intel MPI and Cray MPICH; MVAPICH; a step of Slurm.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Digits of the largest number of processes. Longer texts are not from a launcher.
_MAX_DIGITS = 9


@dataclass
class World:
    """Ranks of MPI, one for each process."""

    rank: int
    size: int
    local_rank: int
    """Index of the rank among the ranks on this machine."""
    threads: int
    """Number of threads for this rank, if the user sets none."""
    data: Any
    """Communicator of the data."""
    control: _ortrain.RankControl
    run: int
    """Random number of this job, the same on all ranks."""
    _sessions: int = field(default=0)

    def sizes(self) -> dict[str, int]:
        """Returns the values of the settings of ranks and sizes."""
        return {
            "world_rank": self.rank,
            "local_rank": self.local_rank,
            "world_size": self.size,
            "data_parallel_size": self.size,
        }

    def session_ranks(self, strategy: str, overlaps: bool) -> tuple[_ortrain.RankControl, Any, int, str, bool]:
        """Returns the ranks of a new session for the core. All ranks create their sessions in the same order.

        Args:
            strategy: ``"all-reduce"``, ``"zero"`` or ``"adasum"``.
            overlaps: true to sum gradients while the backward pass still computes others.

        Warns:
            UserWarning: if MPI allows no second thread, so that nothing overlaps.

        """
        if overlaps and strategy != "adasum" and not self.data.allows_threads:
            warnings.warn(
                "MPI allows one thread only, so gradients are summed after the backward pass, not during it",
                UserWarning,
                stacklevel=level_of_user(),
            )
        self._sessions += 1
        return self.control, self.data, self._sessions - 1, strategy, overlaps


# Settings of ranks and sizes, with their values in one process.
_IN_ONE_PROCESS = {"world_rank": 0, "local_rank": 0, "world_size": 1, "data_parallel_size": 1}


def open_world(settings: Mapping[str, int], prefix: str = "") -> World | None:
    """Returns the ranks of MPI; ``None`` for one process.

    Args:
        settings: the user's values of ``world_rank``, ``local_rank``, ``world_size`` and ``data_parallel_size``, or of
            some of them.
        prefix: beginning of the names of the settings in messages.

    Raises:
        UnsupportedError: for more than one process without ``mpi4py``, for more processes of a launcher than ranks of
            MPI, and for settings of several processes in one process.

    Warns:
        UserWarning: for each value that is neither the default nor the value of MPI, which is used.

    """
    world = _world()
    actual = _IN_ONE_PROCESS if world is None else world.sizes()
    for name, value in settings.items():
        if value in (actual[name], _IN_ONE_PROCESS[name]):
            continue
        if world is None:
            if name == "local_rank":
                # The index on a machine chooses nothing in one process.
                continue
            count = value if name.endswith("size") else value + 1
            raise UnsupportedError(
                f"{prefix}{name} is {value}, but the script runs in 1 process: start it with mpiexec -n {count}, with "
                "ortrain[mpi] installed"
            )
        warnings.warn(
            f"{prefix}{name} is {value}, but MPI has {actual[name]} (rank {world.rank} of {world.size}); "
            f"{actual[name]} is used",
            UserWarning,
            stacklevel=level_of_user(),
        )
    return world


@contextmanager
def reporting(world: World | None) -> Iterator[None]:
    """Tells all ranks about an exception, if they wait for this rank's agreement on the current step."""
    if world is None:
        yield
        return
    before = world.control.exchange_count()
    try:
        yield
    except Exception as error:
        if world.control.exchange_count() == before:
            world.control.failed(str(error) or type(error).__name__)
        raise


def _launched() -> tuple[str, int]:
    """Returns the largest number of processes that a variable of a launcher has, with the name of the variable."""
    sizes = [("", 1)]
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS:
            sizes.append((name, int(size)))
    return max(sizes, key=lambda item: item[1])


def _world() -> World | None:
    """Returns the ranks of MPI; ``None`` for one process."""
    name, size = _launched()
    mpi = sys.modules.get("mpi4py.MPI")
    if size == 1 and (mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1):
        return None
    try:
        world = _connected()
    except ImportError as error:
        raise UnsupportedError(
            f"{name} is {size}: a launcher started {size} processes, but they cannot form one training without mpi4py "
            f"({error}); install ortrain[mpi], or remove the variable from the environment of processes that train "
            "independently"
        ) from error
    ranks = 1 if world is None else world.size
    if ranks < size:
        count = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise UnsupportedError(
            f"{name} is {size}: a launcher started {size} processes, but MPI has {count}; use the launcher of "
            "the MPI that mpi4py has loaded, or remove the variable from the environment of processes that train "
            "independently"
        )
    return world


# Result of the first connection, under the key "MPI".
_connections: dict[str, World | None] = {}


def _connected() -> World | None:
    """Returns the ranks of MPI, which the first call connects; ``None`` for one rank."""
    if "MPI" not in _connections:
        _connections["MPI"] = _connect()
    return _connections["MPI"]


def _connect() -> World | None:
    """Connects this process to the other ranks of MPI; ``None`` for one rank."""
    from ortrain.trainer import _mpi

    connection = _mpi.Connection()
    if connection.size == 1:
        return None
    control = _ortrain.RankControl(connection.control)
    _mpi.end_job_after_exceptions(connection.rank, connection.size)
    # After the end of its script, a rank takes part in the exchanges of the others until all scripts have ended.
    atexit.register(_mpi.leave, control)
    return World(
        connection.rank,
        connection.size,
        connection.local_rank,
        connection.threads(),
        connection.data,
        control,
        connection.run,
    )


def warn_of_no_effect(settings: Mapping[str, object]) -> None:
    """Warns of settings, by name, that are set but have no effect in one process.

    Warns:
        UserWarning: for each of these settings.

    """
    for name, value in settings.items():
        if value:
            warnings.warn(f"{name} has no effect in one process", UserWarning, stacklevel=level_of_user())
