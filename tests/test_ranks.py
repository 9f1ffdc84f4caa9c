"""Trainings on several ranks of MPI: data parallel, ZeRO, Adasum, checkpoints, and failures of a rank.

The jobs are in ``rank_jobs.py``; ``ORTRAIN_MPIEXEC`` names another launcher, with its options.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_jobs
from rank_jobs import Arrays
from test_pages import blocks_of

from ortrain.trainer import checkpoint
from ortrain.trainer.distributed import adasum

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer:FutureWarning")

TESTS = Path(__file__).parent
# Differences of float32 sums in another order, after ten updates of the tests' networks.
SUMS = 1e-5
# The same in half precision, where each product is rounded.
HALF = 1e-3
# One update with float64 sums of deltas in float32.
ADASUM = 1e-6
# Seconds of a job at most. A failure of a rank ends a job within this time.
LIMIT = 60
FAILURE_LIMIT = 30
# Bytes of a resident set that two trainings may differ by, apart from their moments.
NOISE = 12 << 20


def launcher() -> list[str]:
    """Return the command that starts several ranks."""
    given = os.environ.get("ORTRAIN_MPIEXEC")
    return shlex.split(given) if given else [str(Path(sys.executable).parent / "mpiexec")]


def start(ranks: int, script: Sequence[str], folder: Path, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Run a script on some ranks."""
    command = [*launcher(), "-n", str(ranks), os.environ.get("ORTRAIN_RANKS_PYTHON", sys.executable), *script]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=folder, check=False)


def launch(
    ranks: int, job: str, folder: Path, settings: Mapping[str, Any], limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a job on some ranks."""
    folder.mkdir(exist_ok=True)
    script = [str(TESTS / "rank_jobs.py"), job, str(folder), json.dumps(settings)]
    return start(ranks, script, folder, limit)


def run(ranks: int, job: str, folder: Path, settings: Mapping[str, Any]) -> list[Arrays]:
    """Run a job that ends without an error, and return the results of each rank."""
    done = launch(ranks, job, folder, settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(ranks)]


def part(results: Arrays, index: int) -> Arrays:
    """Return the results of one training out of several."""
    return {name.partition("/")[2]: value for name, value in results.items() if name.startswith(f"{index}/")}


def close(found: Arrays, expected: Arrays, prefixes: Sequence[str], tolerance: float) -> None:
    """Assert that arrays are equal up to a tolerance, relative to the largest element of each array."""
    names = [name for name in expected if name.startswith(tuple(prefixes))]
    assert names
    for name in names:
        scale = max(1.0, float(np.abs(expected[name]).max(initial=0)))
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance * scale, err_msg=name)


# Data parallel and ZeRO.


TRAININGS: list[dict[str, Any]] = [
    {"strategy": strategy, "optimizer": optimizer, "clip": clip, "window": window, "every_update": True}
    for strategy in ("data", "zero")
    for optimizer in ("sgd", "adam", "lamb")
    for clip in (False, True)
    for window in (1, 3)
] + [
    {"strategy": strategy, "optimizer": optimizer, "clip": True, "precision": precision, "every_update": True}
    for strategy in ("data", "zero")
    # Adam moves each weight by the rate, however small its gradient. In bfloat16 rounding decides the sign.
    for optimizer, precision in (("adam", "float16"), ("sgd", "float16"), ("sgd", "bfloat16"))
]


@pytest.fixture(scope="module")
def in_one_process() -> list[Arrays]:
    """Return the results of the trainings in one process, on whole batches."""
    results: dict[str, Arrays] = {}
    for settings in TRAININGS:
        key = json.dumps({**settings, "strategy": "one"})
        if key not in results:
            results[key] = rank_jobs.train({**settings, "strategy": "one"})
    return [results[json.dumps({**settings, "strategy": "one"})] for settings in TRAININGS]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_like_one_process(ranks: int, tmp_path: Path, in_one_process: list[Arrays]) -> None:
    results = run(ranks, "trainings", tmp_path / "a", {"trainings": TRAININGS})
    again = [{**settings, "overlap": False} for settings in TRAININGS]
    without_overlap = run(ranks, "trainings", tmp_path / "b", {"trainings": again})
    for index, (settings, expected) in enumerate(zip(TRAININGS, in_one_process, strict=True)):
        each = [part(rank, index) for rank in results]
        tolerance = HALF if "precision" in settings else SUMS
        mean = {"losses": np.mean([rank["losses"] for rank in each], axis=0)}
        close(mean, expected, ["losses"], tolerance)
        close(each[0], expected, ["weight/"], tolerance)
        assert np.abs(expected["weights"][-1] - expected["weights"][0]).max() > SUMS
        for rank in each:
            np.testing.assert_array_equal(rank["weights"], each[0]["weights"], err_msg=str(settings))
        for rank, other in enumerate(without_overlap):
            for name, value in part(other, index).items():
                np.testing.assert_array_equal(value, each[rank][name], err_msg=f"{name} {settings}")


@pytest.mark.parametrize("rows", [(64, 7), (64, 1)])
def test_ranks_with_batches_of_different_sizes(rows: tuple[int, int], tmp_path: Path) -> None:
    """Buckets start in one order on all ranks, although gradients become final in different orders."""
    settings = {"net": "wide", "rows": rows, "updates": 3, "strategy": "data"}
    trainings = [{**settings, "overlap": overlap} for overlap in (True, False)]
    results = run(2, "trainings", tmp_path, {"trainings": trainings})
    for rank in results:
        overlapped, after = part(rank, 0), part(rank, 1)
        assert overlapped.keys() == after.keys()
        for name, value in overlapped.items():
            np.testing.assert_array_equal(value, after[name], err_msg=name)
    weights = {name: value for name, value in part(results[0], 0).items() if name.startswith("weight/")}
    for name, value in weights.items():
        np.testing.assert_array_equal(part(results[1], 0)[name], value, err_msg=name)


def test_an_update_uses_the_mean_over_ranks(tmp_path: Path) -> None:
    """Each rank has the same weight, with more rows or fewer."""
    settings = {"optimizer": "sgd", "rows": (12, 4), "updates": 1}
    found = run(2, "train", tmp_path, settings)[0]
    changes = []
    for rank in range(2):
        lone = rank_jobs.trainer({"optimizer": "sgd"})
        before = rank_jobs.state_of(lone)
        lone.train_step(*rank_jobs.batch(settings, 0, rank, 2).values())
        after = rank_jobs.state_of(lone)
        changes.append({name: after[name] - before[name] for name in before})
    expected = {name: before[name] + (changes[0][name] + changes[1][name]) / 2 for name in before}
    close(found, expected, ["weight/"], SUMS)


def test_running_statistics_are_means_over_ranks(tmp_path: Path) -> None:
    settings = {"net": "normalizing", "updates": 1}
    results = run(2, "train", tmp_path, settings)
    lone = []
    for rank in range(2):
        trained = rank_jobs.trainer(settings)
        trained.train_step(*rank_jobs.batch(settings, 0, rank, 2).values())
        lone.append(rank_jobs.state_of(trained))
    names = [name for name in lone[0] if name.startswith("statistic/")]
    assert len(names) == 2
    for name in names:
        assert np.abs(lone[0][name] - lone[1][name]).max() > SUMS
        np.testing.assert_array_equal(results[0][name], results[1][name])
        np.testing.assert_allclose(results[0][name], (lone[0][name] + lone[1][name]) / 2, rtol=0, atol=SUMS)


def test_each_rank_drops_other_elements(tmp_path: Path) -> None:
    settings = {"net": "dropping", "same_batches": True, "updates": 2}
    first, second = run(2, "train", tmp_path, settings)
    lone = rank_jobs.train(settings)
    assert first["losses"][0] == lone["losses"][0]
    assert abs(first["losses"][0] - second["losses"][0]) > SUMS


def test_all_faces_train_on_ranks(tmp_path: Path) -> None:
    """The classic session and the legacy trainer train like one process, after errors that the ranks handle."""
    results = run(2, "faces", tmp_path, {})
    expected = rank_jobs.faces({})
    for rank, found in enumerate(results):
        close(found, expected, ["weight/"], SUMS)
        np.testing.assert_array_equal(found["sizes"], [rank, 2])
    first, second = (found["errors"].tolist() for found in results)
    assert second[0].startswith('InvalidArgumentError: the model has no input "y"')
    assert second[1].startswith("InvalidArgumentError: node")
    for found, error in zip(first, second, strict=True):
        reason = error.partition(": ")[2]
        assert found == f"RankError: rank 1 of 2 failed in this step, so no rank has changed: {reason}"


def test_mpi_without_threads_sums_after_the_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"net": "wide", "updates": 2}
    expected = run(2, "train", tmp_path / "threads", settings)
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "single")
    found = run(2, "train", tmp_path / "one", settings)
    for rank in range(2):
        for name, value in expected[rank].items():
            np.testing.assert_array_equal(found[rank][name], value, err_msg=name)
    for rank in run(2, "start", tmp_path / "warnings", {"options": {}}):
        assert rank["warnings"].tolist() == [
            "MPI allows one thread only, so gradients are summed after the backward pass, not during it"
        ]


def test_operations_of_the_communicator(tmp_path: Path) -> None:
    results = run(3, "collectives", tmp_path, {})
    sums = 3 * np.arange(6, dtype=np.float32) + 3
    for rank, expected in enumerate((sums[:1], sums[1:3], sums[3:])):
        np.testing.assert_array_equal(results[rank]["own"], expected)
        np.testing.assert_array_equal(results[rank]["root"], [1, 1, 1])
        assert results[rank]["errors"].tolist() == [
            f"MPI cannot combine elements of {name}" for name in ("float16", "bool")
        ]
    assert [found["largest"].tolist() for found in results] == [[2], [1], [2]]
    assert [found["group"].tolist() for found in results] == [[1, 2], [-1, -1], [0, 2]]


# ZeRO.


def test_each_rank_of_zero_has_a_part_of_the_moments(tmp_path: Path) -> None:
    """The moments take half of the bytes on two ranks, in ``memory()`` and in the resident set."""
    results = {
        zero: run(2, "resident", tmp_path / str(zero), {"zero": zero, "hidden": 2048})[0] for zero in (False, True)
    }
    complete = int(results[False]["moments"])
    assert 0 <= int(results[True]["moments"]) - complete // 2 <= 2**12
    saved = int(results[False]["resident"]) - int(results[True]["resident"])
    assert abs(saved - complete // 2) < NOISE, (saved, complete)


def test_ranks_without_a_part(tmp_path: Path) -> None:
    """A rank of ZeRO may have no moments: the network has fewer elements than four aligned parts."""
    settings = {"optimizer": "lamb", "strategy": "zero", "updates": 4, "net": "classifier"}
    results = run(4, "train", tmp_path, settings)
    owned = [sum(value.size for name, value in rank.items() if name.startswith("Moment_1/")) for rank in results]
    assert sum(owned) == sum(value.size for name, value in results[0].items() if name.startswith("weight/"))


# Adasum.


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_adasum_combines_the_changes_of_lone_trainers(optimizer: str, ranks: int, tmp_path: Path) -> None:
    settings = {"optimizer": optimizer, "strategy": "adasum", "updates": 4, "every_update": True}
    results = run(ranks, "train", tmp_path, settings)
    lone = [rank_jobs.trainer({"optimizer": optimizer}) for _ in range(ranks)]
    weights = lone[0].state_dict()["model"]["full_precision"]
    for step in range(4):
        changes = []
        for rank, trained in enumerate(lone):
            assert trained._training_session is not None
            trained._training_session.load_state(weights)
            trained.train_step(*rank_jobs.batch(settings, step, rank, ranks).values())
            new = trained.state_dict()["model"]["full_precision"]
            changes.append({name: new[name] - value for name, value in weights.items()})
        combined = {name: adasum([change[name] for change in changes]) for name in weights}
        expected = {name: value + combined[name] for name, value in weights.items()}
        flat = np.concatenate([expected[name].reshape(-1) for name in sorted(expected)])
        for result in results:
            np.testing.assert_allclose(result["weights"][step], flat, rtol=0, atol=ADASUM)
            np.testing.assert_array_equal(result["weights"][step], results[0]["weights"][step])
        # The next step starts with the bits of the ranks: Adam enlarges differences of small gradients.
        ends = np.cumsum([weights[name].size for name in sorted(weights)])[:-1]
        parts = np.split(results[0]["weights"][step], ends)
        weights = {name: value.reshape(weights[name].shape) for name, value in zip(sorted(weights), parts, strict=True)}


@pytest.mark.parametrize("strategy", ["data", "zero", "adasum"])
def test_all_ranks_skip_an_update_that_is_not_finite(strategy: str, tmp_path: Path) -> None:
    """Gradients overflow float16 at this loss scale. The scale falls until the gradients are finite on all ranks."""
    settings = {"strategy": strategy, "precision": "float16", "loss_scale": 2.0**22, "updates": 8}
    settings["every_update"] = True
    first, second = run(2, "train", tmp_path, settings)
    for name in ("weights", "counts"):
        np.testing.assert_array_equal(first[name], second[name])
    steps, updates = first["counts"]
    assert 0 < updates < steps == 8
    np.testing.assert_array_equal(first["weights"][0], first["weights"][7 - updates])
    assert np.isfinite(first["weights"]).all()
    assert np.abs(first["weights"][7] - first["weights"][0]).max() > SUMS


def test_adasum_needs_a_power_of_two(tmp_path: Path) -> None:
    done = launch(3, "train", tmp_path, {"strategy": "adasum"}, FAILURE_LIMIT)
    assert done.returncode != 0
    assert "InvalidArgumentError: Adasum needs 2, 4, 8, ... ranks, got 3" in done.stderr


# Checkpoints.


@pytest.mark.parametrize("precision", [None, "float16"])
def test_a_checkpoint_continues_on_any_number_of_ranks(precision: str | None, tmp_path: Path) -> None:
    """4, 2, 1 and 2 ranks, one after the other, have the losses and moments of a training that never changed."""
    settings: dict[str, Any] = {"strategy": "zero", "schedule": True, "updates": 3}
    if precision is not None:
        settings["precision"] = precision
    expected = rank_jobs.train({**settings, "strategy": "one", "updates": 12})
    losses: list[float] = []
    files: list[str] = []
    for index, ranks in enumerate((4, 2, 1, 2)):
        here = {**settings, "first": 3 * index, "save": str(tmp_path / f"turn{index}-")}
        if files:
            # The order of the files is free.
            here["load"] = files[::-1]
        results = run(ranks, "train", tmp_path / str(index), here) if ranks > 1 else [rank_jobs.train(here | ONE)]
        losses.extend(np.mean([rank["losses"] for rank in results], axis=0))
        files = [f"{here['save']}{rank}.ortcp" for rank in range(ranks)]
    tolerance = SUMS if precision is None else HALF
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=tolerance)
    merged = checkpoint.aggregate_checkpoints(files, pytorch_format=False)
    assert merged is not None
    assert merged["train_step_info"]["step"] == merged["train_step_info"]["optimization_step"] == 12
    for weight, values in merged["optimizer"].items():
        for name in ("Moment_1", "Moment_2"):
            expected_values = expected[f"{name}/{weight}"]
            np.testing.assert_allclose(values[name], expected_values, rtol=0, atol=tolerance, err_msg=weight)
        assert values["Update_Count"] == [13]


ONE = {"strategy": "one"}


def test_files_of_data_parallel_ranks_are_complete(tmp_path: Path) -> None:
    settings = {"strategy": "data", "updates": 2, "save": str(tmp_path / "data")}
    run(2, "train", tmp_path, settings)
    files = [str(tmp_path / f"data{rank}.ortcp") for rank in (0, 1)]
    expected = rank_jobs.train({"updates": 4})["losses"][2:]
    one_file = rank_jobs.train({"first": 2, "updates": 2, "load": files[1:]})
    all_files = rank_jobs.train({"first": 2, "updates": 2, "load": files})
    for found in (one_file, all_files):
        np.testing.assert_allclose(found["losses"], expected, rtol=0, atol=SUMS)
    again = run(2, "train", tmp_path, {"strategy": "zero", "first": 2, "updates": 2, "load": files})
    losses = np.mean([rank["losses"] for rank in again], axis=0)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=SUMS)


def test_moments_of_adasum_continue_on_their_ranks_only(tmp_path: Path) -> None:
    settings = {"strategy": "adasum", "updates": 2}
    run(2, "train", tmp_path, settings | {"save": str(tmp_path / "adasum")})
    files = [str(tmp_path / f"adasum{rank}.ortcp") for rank in (0, 1)]
    complete = run(2, "train", tmp_path, settings | {"updates": 4})
    continued = run(2, "train", tmp_path, settings | {"first": 2, "load": files})
    for rank in (0, 1):
        np.testing.assert_array_equal(continued[rank]["losses"], complete[rank]["losses"][2:])
    with pytest.raises(RuntimeError, match="has the moments of rank 0 of 2") as refused:
        rank_jobs.train({"updates": 1, "load": files[:1]})
    assert "one process cannot continue from them: start 2 ranks" in str(refused.value)


def test_files_of_zero_that_do_not_belong_together(tmp_path: Path) -> None:
    settings = {"strategy": "zero", "updates": 1, "precision": "float16"}
    for name in "ab":
        run(2, "train", tmp_path, settings | {"save": str(tmp_path / name)})
    a, b = ([str(tmp_path / f"{name}{rank}.ortcp") for rank in (0, 1)] for name in "ab")
    trained = rank_jobs.trainer({"precision": "float16"})
    with pytest.raises(IndexError, match="Expected number of files to aggregate: 2, got 1"):
        trained.load_checkpoint(a[0])
    with pytest.raises(AssertionError, match="Unexpected rank in file"):
        trained.load_checkpoint(a[0], a[0])
    with pytest.raises(AssertionError, match="Files of two different runs cannot be merged"):
        trained.load_checkpoint(a[0], b[1])
    assert trained.load_checkpoint(a[1], a[0]) == {"rank": 0}


def test_one_path_for_all_ranks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ortcp"
    first, second = run(2, "checkpoint_at_one_path", tmp_path, {"path": str(path)})
    assert str(first["message"]) == ""
    expected = f"each of the 2 ranks needs a file of its own, for example {tmp_path / 'checkpoint1.ortcp'}"
    assert str(second["message"]).endswith(expected)


# Failures.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "raise"}, "ortrain: rank 1 of 2 ends the job: ValueError: there is no more data"),
        ({"kind": "exit", "code": 0}, "RankError: rank 1 of 2 has left the training: its script has ended"),
        ({"kind": "exit", "code": 5}, "RankError: rank 1 of 2 has left the training: its script has ended"),
        ({"kind": "kill"}, "signal 9"),
        ({"kind": "weights"}, "the weights of rank 1 differ from the weights of rank 0"),
        ({"kind": "options"}, "the options of rank 1 differ from the options of rank 0"),
        ({"kind": "optimizer"}, "the optimizers of rank 1 differ from the optimizers of rank 0"),
        ({"kind": "label"}, "rank 1 of 2 failed in this step, so no rank has changed: node"),
        ({"kind": "shape"}, "no rank has changed: input 'x' has the shape [8, 3], but ['N', 12] in model_desc"),
        ({"kind": "rate"}, "rank 1 has the learning rate 0.5, but rank 0 has the learning rate 0.01"),
        ({"kind": "load"}, "rank 1 has loaded 0 states, but rank 0 has loaded 1 states"),
        ({"kind": "frozen"}, "the model has no weight to train"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_failure_of_one_rank_ends_the_job(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    done = launch(2, "failing", tmp_path, settings, FAILURE_LIMIT)
    assert done.returncode != 0
    assert sentence in done.stderr + done.stdout


@pytest.mark.parametrize("net", ["classifier", "segmented"])
def test_ranks_continue_after_an_error_that_they_handle(net: str, tmp_path: Path) -> None:
    """In the segmented network the label is found in a later program, after the first one has run."""
    first, second = run(2, "failing", tmp_path, {"kind": "label", "caught": True, "net": net})
    assert len(first["messages"]) == len(second["messages"]) == 1
    assert first["messages"][0].startswith("RankError: rank 1 of 2 failed in this step, so no rank has changed: node")
    assert second["messages"][0].startswith("InvalidArgumentError: node")
    for name, value in first.items():
        if name != "messages":
            np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_a_rank_may_evaluate_after_the_others_have_ended(tmp_path: Path) -> None:
    seconds = 20 if os.environ.get("ORTRAIN_CONFORM") else 2
    run(2, "failing", tmp_path, {"kind": "evaluate", "seconds": seconds})


# Sizes.


def test_sizes_of_mpi_override_options(tmp_path: Path) -> None:
    options = {"world_rank": 3, "world_size": 4, "data_parallel_size": 2}
    for rank, found in enumerate(run(2, "start", tmp_path, {"options": options})):
        np.testing.assert_array_equal(found["sizes"], [rank, 2, rank, 2])
        expected = [
            f"distributed.world_rank is 3, but MPI has {rank} (rank {rank} of 2); {rank} is used",
            f"distributed.world_size is 4, but MPI has 2 (rank {rank} of 2); 2 is used",
        ]
        assert found["warnings"].tolist() == expected
    for found in run(2, "start", tmp_path, {"options": {}}):
        assert found["warnings"].tolist() == []
        # The ranks share the cores of this machine.
        assert found["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"horizontal_parallel_size": 2}, "UnsupportedError: distributed.horizontal_parallel_size must be 1, got 2"),
        ({"horizontal_parallel_size": 3}, "world_size must be a multiple of horizontal_parallel_size"),
        (
            {"pipeline_parallel": {"pipeline_parallel_size": 2, "pipeline_cut_info_string": "active"}},
            "UnsupportedError: distributed.pipeline_parallel.pipeline_parallel_size must be 1, got 2",
        ),
    ],
    ids=["horizontal", "unfit", "pipeline"],
)
def test_divisions_of_a_model_are_refused(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    done = launch(2, "start", tmp_path, {"options": options}, FAILURE_LIMIT)
    assert done.returncode != 0
    assert error in done.stderr


# Documentation.


@pytest.mark.parametrize("arguments", [[], ["--zero"]])
def test_the_example(arguments: list[str], tmp_path: Path) -> None:
    script = [str(TESTS.parent / "examples" / "digits_on_ranks.py"), str(tmp_path), *arguments]
    done = start(2, script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"ranks: 2; accuracy: 9\d\.\d\d%; hidden communication: \d+%", done.stdout.splitlines()[-1])
    assert sorted(path.name for path in tmp_path.glob("*.ortcp")) == ["checkpoint0.ortcp", "checkpoint1.ortcp"]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """The script of the page leaves the same weights on all ranks."""
    (block,) = blocks_of(TESTS.parent / "docs" / "distributed.md")
    check = "assert len(set(comm.allgather(state.trainable_planes()[0].tobytes()))) == 1"
    (tmp_path / "page.py").write_text(f"{block}\n{check}\n")
    done = start(2, ["page.py"], tmp_path)
    assert done.returncode == 0, done.stderr
