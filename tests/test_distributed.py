"""Scripts under a launcher, and the numbers of a distributed training: groups of ranks, parts of ZeRO, Adasum."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classic_models import classifier
from test_trainer_legacy import legacy_of
from trainer_nets import trainer_of

import ortrain
from ortrain.classic import TrainingParameters, TrainingSession
from ortrain.trainer.distributed import Coordinates, Topology, adasum, zero_partition

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer:FutureWarning")

MAX_WORLD = 32
# Rounding of a product in float64, relative to a vector of length 1.
ROUNDING = 1e-14
# Rounding of the elements of a float32 vector.
ROUNDING_F32 = 2e-7


# Launchers.


def classic_session() -> TrainingSession:
    parameters = TrainingParameters()
    parameters.loss_output_name = "loss"
    return TrainingSession(classifier().model.SerializeToString(), parameters)


FACES: dict[str, Any] = {
    "ORTTrainer": lambda: trainer_of(classifier()),
    "the legacy trainer": lambda: legacy_of(classifier()),
    "the classic session": classic_session,
}


# A script that prints the error of each face.
ALL_FACES = """
import sys, warnings
if "without" in sys.argv:
    sys.modules["mpi4py"] = None
from test_distributed import FACES
warnings.simplefilter("ignore")
for make in FACES.values():
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error)
"""


def errors_of_all_faces(name: str, size: str, *arguments: str) -> set[str]:
    """Return the errors of all faces in a process with a variable of a launcher."""
    command = [sys.executable, "-c", ALL_FACES, *arguments]
    environment = {**os.environ, name: size, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    found = done.stdout.splitlines()
    assert len(found) == len(FACES), done.stdout + done.stderr
    return set(found)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_a_launcher_that_mpi_does_not_join_are_refused(name: str) -> None:
    """The launcher of one MPI with the library of another one starts processes that are alone."""
    assert errors_of_all_faces(name, "4") == {
        f"UnsupportedError {name} is 4: a launcher started 4 processes, but MPI has 1 rank; use the launcher of the "
        "MPI that mpi4py has loaded, or remove the variable from the environment of processes that train independently"
    }


def test_processes_of_a_launcher_need_mpi4py() -> None:
    (error,) = errors_of_all_faces("PMI_SIZE", "4", "without")
    assert error.startswith(
        "UnsupportedError PMI_SIZE is 4: a launcher started 4 processes, but they cannot form one training without "
        "mpi4py ("
    )
    assert "install ortrain[mpi]" in error


def test_the_trainer_does_not_import_mpi4py() -> None:
    check = "import sys, ortrain.trainer; print('mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "value", "count"), [("world_size", 4, 4), ("data_parallel_size", 2, 2), ("world_rank", 3, 4)]
)
def test_sizes_above_one_need_several_processes(name: str, value: int, count: int) -> None:
    reason = f"but the script runs in 1 process: start it with mpiexec -n {count}, with ortrain\\[mpi\\] installed"
    with pytest.raises(ortrain.UnsupportedError, match=f"^distributed.{name} is {value}, {reason}$"):
        trainer_of(classifier(), options={"distributed": {name: value}})
    parameters = TrainingParameters()
    parameters.loss_output_name = "loss"
    setattr(parameters, name, value)
    with pytest.raises(ortrain.UnsupportedError, match=f"^{name} is {value}, {reason}$"):
        TrainingSession(classifier().model.SerializeToString(), parameters)


@pytest.mark.parametrize("text", ["1", "0", "", "four", "-4", "4.0", "\u0664", "9" * 5000])
def test_other_values_are_of_no_launcher(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", text)
    for make in FACES.values():
        make()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("distributed.deepspeed_zero_optimization.stage", {"deepspeed_zero_optimization": {"stage": 1}}),
        ("distributed.enable_adasum", {"enable_adasum": True}),
    ],
)
def test_options_without_effect_in_one_process_warn(name: str, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"^{name} has no effect in one process$") as caught:
        trainer_of(classifier(), options={"distributed": options})
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == [
        f"{name} has no effect in one process"
    ]


def test_warnings_of_a_classic_session_name_the_caller() -> None:
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.deepspeed_zero_stage, parameters.enable_adasum = "loss", 1, True
    with pytest.warns(UserWarning, match="has no effect in one process") as caught:
        TrainingSession(classifier().model.SerializeToString(), parameters)
    names = ["deepspeed_zero_stage", "enable_adasum"]
    assert [str(warning.message) for warning in caught] == [f"{name} has no effect in one process" for name in names]
    assert {warning.filename for warning in caught} == {__file__}


# Groups of ranks.


def grids() -> list[Topology]:
    """Return every topology of at most ``MAX_WORLD`` ranks."""
    return [
        Topology(horizontal * data * pipeline, horizontal, data, pipeline)
        for horizontal, data, pipeline in itertools.product(range(1, MAX_WORLD + 1), repeat=3)
        if horizontal * data * pipeline <= MAX_WORLD
    ]


def test_groups_of_all_topologies() -> None:
    """A group has the ranks that differ in one coordinate only. The horizontal coordinate varies fastest."""
    for topology in grids():
        grid = itertools.product(
            range(topology.pipeline_parallel_size),
            range(topology.data_parallel_size),
            range(topology.horizontal_parallel_size),
        )
        places = [Coordinates(x, y, z) for z, y, x in grid]
        assert [topology.coordinates(rank) for rank in range(topology.world_size)] == places
        groups = (topology.horizontal_group, topology.data_group, topology.pipeline_group)
        for axis, group in enumerate(groups):
            for rank, place in enumerate(places):
                others = place[:axis] + place[axis + 1 :]
                assert group(rank) == [other for other, at in enumerate(places) if at[:axis] + at[axis + 1 :] == others]


def test_the_data_size_is_what_the_other_sizes_leave() -> None:
    for topology in grids():
        sizes = topology.horizontal_parallel_size, topology.pipeline_parallel_size
        assert Topology(topology.world_size, sizes[0], None, sizes[1]) == topology
    assert Topology(4) == Topology(4, 1, 4, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((6, 4), "world_size must be a multiple of horizontal_parallel_size times pipeline_parallel_size, got 6 for 4"),
        ((8, 2, 3), "data_parallel_size must be 4, got 3: 8 ranks are divided by horizontal_parallel_size 2 and"),
        ((0,), "world_size must be at least 1, got 0"),
        ((4, -1), "horizontal_parallel_size must be at least 1, got -1"),
        ((4, 1, 0), "data_parallel_size must be at least 1, got 0"),
        ((4, 1, None, 0), "pipeline_parallel_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Topology(*sizes)


def test_ranks_that_are_not_there() -> None:
    for rank in (-1, 4, 2**70):
        with pytest.raises(ValueError, match=f"^rank must be from 0 to 3, got {rank}$"):
            Topology(4).data_group(rank)
    with pytest.raises(TypeError, match=r"^rank must be an integer, got 1\.0$"):
        Topology(4).coordinates(1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^world_size must be an integer, got '4'$"):
        Topology("4")  # type: ignore[arg-type]


# ZeRO.


def test_partitions_of_random_shapes() -> None:
    """Each element of each tensor belongs to the rank of its position in the sorted, padded sequence."""
    rng = np.random.default_rng(54)
    for _ in range(1000):
        names = [f"{chr(rng.integers(65, 0x250))}{k}" for k in range(rng.integers(0, 6))]
        shapes = {name: [int(size) for size in rng.integers(0, 9, rng.integers(0, 4))] for name in names}
        ranks = int(rng.integers(1, 9))
        partition = zero_partition(shapes, ranks)
        elements = [(name, k) for name in sorted(shapes, key=str.encode) for k in range(math.prod(shapes[name]))]
        block = 32 * ranks
        assert partition.padded == (len(elements) // block + 1) * block
        assert partition.chunk * ranks == partition.padded
        assert [[(name, k) for name, start, stop in own for k in range(start, stop)] for own in partition.ranks] == [
            elements[rank * partition.chunk : (rank + 1) * partition.chunk] for rank in range(ranks)
        ]
        assert all(start < stop for own in partition.ranks for _, start, stop in own)


def test_a_full_block_is_padded_by_another() -> None:
    assert zero_partition({"w": [64]}, 2).padded == 128
    assert zero_partition({"w": [63]}, 2).padded == 64


@pytest.mark.parametrize(
    ("shapes", "ranks", "kind", "message"),
    [
        ({"w": [2, -3]}, 2, ValueError, r"the axes of 'w' must be at least 0, got \[2, -3\]"),
        ({"w": [2.5]}, 2, TypeError, r"the shape of 'w' must be an integer, got 2\.5"),
        ({1: [2]}, 2, TypeError, "the name of a tensor must be a str, got int"),
        ({"w": [2]}, 0, ValueError, "data_parallel_size must be at least 1, got 0"),
    ],
)
def test_shapes_that_are_refused(shapes: Any, ranks: int, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        zero_partition(shapes, ranks)


# Adasum.


def pair(a: Any, b: Any) -> Any:
    """Return the formula of a pair, by sums of products."""
    dot, norm_a, norm_b = (sum(x * y for x, y in zip(p.flat, q.flat, strict=True)) for p, q in ((a, b), (a, a), (b, b)))
    return (1 - dot / (2 * norm_a)) * a + (1 - dot / (2 * norm_b)) * b


def test_adasum_is_a_tree_of_pairs() -> None:
    rng = np.random.default_rng(5)
    a, b, c, d = vectors = rng.uniform(-1, 1, (4, 2, 3))
    assert np.abs(adasum(vectors[:2]) - pair(a, b)).max() < ROUNDING
    assert np.abs(adasum(list(vectors)) - pair(pair(a, b), pair(c, d))).max() < ROUNDING
    narrow = adasum([vector.astype(np.float32) for vector in vectors])
    assert narrow.dtype == np.float32
    assert np.abs(narrow - adasum(list(vectors))).max() < 4 * ROUNDING_F32


def test_adasum_of_orthogonal_equal_and_zero_vectors() -> None:
    a, b = np.array([3.0, 0.0, 0.0]), np.array([0.0, 0.0, 4.0])
    assert adasum([a, b]).tolist() == [3.0, 0.0, 4.0]
    assert adasum([a, a]).tolist() == a.tolist()
    assert adasum([a, np.zeros(3)]).tolist() == a.tolist()
    tiny = np.full(3, 1e-100)
    assert adasum([tiny, tiny]).tolist() == [2e-100] * 3
    assert adasum([np.zeros((0, 2)), np.zeros((0, 2))]).shape == (0, 2)
    alone = adasum([a])
    assert alone.tolist() == a.tolist()
    assert not np.shares_memory(alone, a)


def test_adasum_keeps_nan_and_infinity() -> None:
    for wrong in (np.nan, np.inf):
        assert not np.isfinite(adasum([np.array([wrong, 1.0]), np.ones(2)])).all()
        assert not np.isfinite(adasum([np.ones(2, np.float32), np.array([wrong, 1.0], np.float32)])).all()


@pytest.mark.parametrize(
    ("vectors", "kind", "message"),
    [
        ([], ValueError, "the number of vectors must be a power of two, got 0"),
        ([[1.0], [1.0], [1.0]], ValueError, "the number of vectors must be a power of two, got 3"),
        ([[1.0], [1.0, 2.0]], ValueError, r"vector 1 must be float64\[1\] like vector 0, got float64\[2\]"),
        ([[1, 2], [3, 4]], TypeError, "vector 0 must be of floats, got int64"),
    ],
)
def test_vectors_that_are_refused(vectors: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        adasum(vectors)
