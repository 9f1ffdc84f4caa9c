"""Number of processes that a launcher started: ``mpiexec`` of Open MPI, MPICH and Intel MPI, or ``srun`` of Slurm."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

from ortrain._stacklevel import level_of_user
from ortrain.errors import UnsupportedError

__all__ = ["check_launcher", "warn_of_no_effect"]

# Variables with the number of processes: Open MPI; MPICH, Intel MPI and Cray MPICH; MVAPICH; a step of Slurm.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Digits of the largest number of processes. Longer texts are not from a launcher.
_MAX_DIGITS = 9


def check_launcher() -> None:
    """Checks that no launcher started several processes of the script: each would train a model of its own.

    ``mpi4py`` is not imported. If the script has imported it, its number of processes counts too.

    Raises:
        UnsupportedError: for more than one process.

    """
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS and int(size) > 1:
            raise UnsupportedError(
                f"{name} is {size}: a launcher started {int(size)} processes, and each would train a model of its own, "
                "because ortrain trains in one process; start one process, or remove the variable from the environment "
                "of processes that train independently"
            )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        world = mpi.COMM_WORLD
        raise UnsupportedError(
            f"this process is rank {world.rank} of {world.size} in MPI, and each rank would train a model of its own, "
            "because ortrain trains in one process; start one process"
        )


def warn_of_no_effect(settings: Mapping[str, object]) -> None:
    """Warns of settings, by name, that are set but have no effect in one process.

    Warns:
        UserWarning: for each of these settings.

    """
    for name, value in settings.items():
        if value:
            warnings.warn(f"{name} has no effect in one process", UserWarning, stacklevel=level_of_user())
