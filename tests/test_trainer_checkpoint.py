"""Aggregated checkpoints of several processes: ZeRO, Megatron and both; and the older files of PyTorch.

The files are the ones that processes would save: :func:`processes` divides a state by the rules of ZeRO and Megatron.
The aggregate must equal the whole state.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from classic_models import classifier
from trainer_nets import bits_of, flat, losses_of, trainer_of, weights_of

from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.trainer import ORTTrainer, _checkpoint_storage, checkpoint
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig

pytestmark = pytest.mark.filterwarnings("ignore:ORTTrainer is for existing scripts:FutureWarning")

Arrays = dict[str, npt.NDArray[Any]]
RNG = np.random.default_rng(29)
# Shapes of a transformer: weights that Megatron splits by rows or columns, other weights, a scalar, a name with a
# slash.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (40, 6),
    "mlp/up.bias": (12,),
    "mlp/up.weight": (5, 12),
    "mlp/down.weight": (12, 5),
    "mlp/down.bias": (5,),
    "norm": (7,),
    "scale": (),
    "kernel": (4, 3, 8),
}
# 0 for columns and 1 for rows.
MEGATRON = {"mlp/up.bias": 0, "mlp/up.weight": 0, "mlp/down.weight": 1, "kernel": 0}
LAMB = "LambOptimizer"


def state_of_one_process(mixed: bool, optimizer: str = "AdamOptimizer") -> dict[str, Any]:
    """Return the state of one process."""
    weights = {name: RNG.random(shape).astype(np.float32) for name, shape in SHAPES.items()}
    states: dict[str, dict[str, Any]] = {
        name: {key: RNG.random(weight.shape).astype(np.float32) for key in ("Moment_1", "Moment_2")}
        for name, weight in weights.items()
    }
    if optimizer == LAMB:
        states["shared_optimizer_state"] = {"Step": np.array([8])}
    else:
        for values in states.values():
            values["Update_Count"] = np.array([8])
    return {
        "model": {"full_precision": weights},
        "optimizer": states,
        "trainer_options": {"mixed_precision": mixed, "optimizer_name": optimizer} | options_of_one(),
        "train_step_info": {"optimization_step": 7, "step": 7},
    }


def options_of_one() -> dict[str, int]:
    sizes = dict.fromkeys(("world_size", "data_parallel_size", "horizontal_parallel_size"), 1)
    return {"zero_stage": 0, "world_rank": 0} | sizes


def megatron_part(value: npt.NDArray[Any], name: str, x: int, size: int) -> npt.NDArray[Any]:
    """Return the part of a value on process x of a horizontal group."""
    if name not in MEGATRON or size == 1:
        return value
    return np.split(value, size, axis=0 if MEGATRON[name] == 1 else -1)[x]


def zero_parts(weights: Arrays, size: int) -> list[dict[str, slice | None]]:
    """Return the weights of each process of a data group: all of a weight (None), or a range of its elements."""
    names = sorted(weights, key=str.encode)
    total = sum(weights[name].size for name in names)
    align = 32 * size
    chunk = (total + align - total % align) // size
    parts: list[dict[str, slice | None]] = [{} for _ in range(size)]
    start = 0
    for name in names:
        end = start + weights[name].size
        for rank, part in enumerate(parts):
            first, last = max(start, rank * chunk), min(end, (rank + 1) * chunk)
            if first < last:
                part[name] = None if (first, last) == (start, end) else slice(first - start, last - start)
        start = end
    return parts


def processes(whole: dict[str, Any], data: int, horizontal: int, zero: int) -> list[dict[str, Any]]:
    """Return the states of all processes."""
    mixed = whole["trainer_options"]["mixed_precision"]
    states = []
    for y, x in itertools.product(range(data), range(horizontal)):
        state = copy.deepcopy(whole)
        weights = state["model"]["full_precision"]
        optimizer = state["optimizer"]
        info = {
            name: {"original_dim": list(SHAPES[name]), "megatron_row_partition": [by_rows]}
            for name, by_rows in MEGATRON.items()
            if horizontal > 1
        }
        for name in SHAPES:
            weights[name] = megatron_part(weights[name], name, x, horizontal)
            for key in ("Moment_1", "Moment_2"):
                optimizer[name][key] = megatron_part(optimizer[name][key], name, x, horizontal)
        if zero:
            parts = zero_parts(weights, data)
            for name in SHAPES:
                if any(isinstance(part.get(name), slice) for part in parts):
                    info.setdefault(name, {"original_dim": list(SHAPES[name]), "megatron_row_partition": [-1]})
                if name not in parts[y]:
                    del optimizer[name]
                    if mixed:
                        del weights[name]
                    continue
                piece = parts[y][name]
                if piece is not None:
                    for key in ("Moment_1", "Moment_2"):
                        optimizer[name][key] = optimizer[name][key].reshape(-1)[piece]
                    if mixed:
                        weights[name] = weights[name].reshape(-1)[piece]
        state["partition_info"] = info
        state["trainer_options"] |= {
            "zero_stage": zero,
            "world_rank": y * horizontal + x,
            "world_size": data * horizontal,
            "data_parallel_size": data,
            "horizontal_parallel_size": horizontal,
        }
        states.append(state)
    return states


def saved(states: list[dict[str, Any]], folder: Path) -> list[str]:
    """Save states to files; returns the paths, the last process first."""
    paths = [str(folder / f"checkpoint{rank}.ortcp") for rank in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        _checkpoint_storage.save(state, path)
    return paths[::-1]


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that names and values are equal. Strings are loaded as bytes."""
    ours, theirs = flat(found), flat(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        value = value.encode() if isinstance(value, str) else value
        assert np.shape(ours[name]) == np.shape(value), name
        assert np.asarray(ours[name]).dtype == np.asarray(value).dtype, name
        assert np.array_equal(ours[name], value), name


SIZES = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 0), (1, 4, 0), (2, 2, 0), (2, 2, 1), (3, 4, 1), (4, 2, 1)]
EACH_SIZE = pytest.mark.parametrize(("data", "horizontal", "zero"), SIZES, ids=str)


@EACH_SIZE
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("optimizer", ["AdamOptimizer", LAMB])
def test_aggregation_gives_the_state_of_one_process(
    tmp_path: Path, data: int, horizontal: int, zero: int, mixed: bool, optimizer: str
) -> None:
    """Each topology gives the state of one process: weights, moments, counts, options, steps, column-split weights."""
    whole = state_of_one_process(mixed, optimizer)
    states = processes(whole, data, horizontal, zero)
    if zero:
        assert not all(SHAPES.keys() <= state["optimizer"].keys() for state in states)
    paths = saved(states, tmp_path)
    found = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    assert found is not None
    assert_same(found, whole)
    weights = checkpoint.aggregate_checkpoints(paths)
    assert weights is not None
    assert_same(weights, whole["model"]["full_precision"])


def test_checkpoint_aggregation(tmp_path: Path) -> None:
    """C11: test_checkpoint_aggregation: with float32, ZeRO divides only moments."""
    paths = zero_of_two(tmp_path, mixed=False, weights=([1, 2, 3], [1, 2, 3]))
    check_zero_of_two(paths, mixed=False, weight=np.array([1, 2, 3]))


def test_checkpoint_aggregation_mixed_precision(tmp_path: Path) -> None:
    """C11: test_checkpoint_aggregation_mixed_precision: with float16, ZeRO also divides weights."""
    paths = zero_of_two(tmp_path, mixed=True, weights=([1, 2, 3], [4, 5, 6]))
    check_zero_of_two(paths, mixed=True, weight=np.array([[1, 2, 3], [4, 5, 6]]))


def zero_of_two(folder: Path, mixed: bool, weights: tuple[list[int], list[int]]) -> list[str]:
    """Save files of two processes with a weight that ZeRO divides, and one undivided weight."""
    states = []
    for rank in range(2):
        divided = {"Moment_1": [[7, 8, 9], [10, 11, 12]][rank], "Moment_2": [[70, 80, 90], [100, 110, 120]][rank]}
        states.append(
            {
                "model": {"full_precision": {"divided": weights[rank], "whole": [11, 22, 33]}},
                "optimizer": {
                    "divided": divided | {"Step": [5]},
                    "whole": {"Moment_1": [6, 5, 4], "Moment_2": [60, 50, 40], "Step": [55]},
                },
                "trainer_options": options_of_one()
                | {
                    "mixed_precision": mixed,
                    "optimizer_name": "Adam",
                    "zero_stage": 1,
                    "world_rank": rank,
                    "world_size": 2,
                    "data_parallel_size": 2,
                },
                "partition_info": {"divided": {"original_dim": [2, 3]}},
            }
        )
    return saved(states, folder)


def check_zero_of_two(paths: list[str], mixed: bool, weight: npt.NDArray[Any]) -> None:
    state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    assert state is not None
    np.testing.assert_array_equal(state["model"]["full_precision"]["divided"], weight)
    np.testing.assert_array_equal(state["model"]["full_precision"]["whole"], [11, 22, 33])
    divided, whole = state["optimizer"]["divided"], state["optimizer"]["whole"]
    np.testing.assert_array_equal(divided["Moment_1"], [[7, 8, 9], [10, 11, 12]])
    np.testing.assert_array_equal(divided["Moment_2"], [[70, 80, 90], [100, 110, 120]])
    np.testing.assert_array_equal(divided["Step"], [5])
    np.testing.assert_array_equal(whole["Moment_1"], [6, 5, 4])
    np.testing.assert_array_equal(whole["Moment_2"], [60, 50, 40])
    np.testing.assert_array_equal(whole["Step"], [55])
    assert state["trainer_options"] == options_of_one() | {"mixed_precision": mixed, "optimizer_name": b"Adam"}


def test_files_are_loaded_in_the_known_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of loads is fixed, because programs mock ``load``: first options, all options, each state once."""
    paths = zero_of_two(tmp_path, mixed=False, weights=([1], [1]))
    load, calls = _checkpoint_storage.load, []

    def counted(path: str, key: str | None = None) -> Any:
        calls.append((path, key))
        return load(path, key) if key is None else load(path, key=key)

    monkeypatch.setattr(_checkpoint_storage, "load", counted)
    checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    options = "trainer_options"
    assert calls == [
        (paths[0], options),
        (paths[0], options),
        (paths[1], options),
        (paths[1], None),
        (paths[0], None),
    ]


def test_columns_of_megatron_with_zero(tmp_path: Path) -> None:
    """ZeRO pieces get the shape of a process before columns are joined, so that elements keep their order."""
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    states = []
    for rank in range(4):
        part = np.split(weight, 2, axis=1)[rank % 2].reshape(-1)
        piece = np.split(part, 2)[rank // 2]
        states.append(
            {
                "model": {"full_precision": {"w": piece}},
                "trainer_options": options_of_one()
                | {
                    "mixed_precision": True,
                    "optimizer_name": "Adam",
                    "zero_stage": 1,
                    "world_rank": rank,
                    "world_size": 4,
                    "data_parallel_size": 2,
                    "horizontal_parallel_size": 2,
                },
                "partition_info": {"w": {"original_dim": [2, 4], "megatron_row_partition": [0]}},
            }
        )
    found = checkpoint.aggregate_checkpoints(saved(states, tmp_path))
    assert found is not None
    np.testing.assert_array_equal(found["w"], weight)


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """The stages of a pipeline have different weights, and the aggregate has all weights."""
    for zero, (data, horizontal) in [(1, (2, 1)), (1, (2, 2)), (0, (1, 2)), (0, (2, 2))]:
        whole = state_of_one_process(mixed=True)
        first = processes(whole, data, horizontal, zero)
        second = copy.deepcopy(first)
        for state in second:
            for section in (state["model"]["full_precision"], state["optimizer"], state["partition_info"]):
                for name in list(section):
                    section[f"second.{name}"] = section.pop(name)
        for rank, state in enumerate(first + second):
            state["trainer_options"] |= {"world_rank": rank, "world_size": 2 * data * horizontal}
        folder = tmp_path / f"{zero} {data} {horizontal}"
        folder.mkdir()
        found = checkpoint.aggregate_checkpoints(saved(first + second, folder), pytorch_format=False)
        for section in (whole["model"]["full_precision"], whole["optimizer"]):
            section |= {f"second.{name}": value for name, value in section.items()}
        assert found is not None
        assert_same(found, whole)


@pytest.mark.parametrize(
    ("sizes", "data", "horizontal"),
    [
        ((1, 1, 1), [[0]], [[0]]),
        ((4, 1, 4), [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        ((1, 4, 4), [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        ((2, 2, 4), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ((2, 4, 8), [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Two stages of a pipeline.
        ((2, 1, 4), [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        ((2, 2, 8), [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
    ids=str,
)
def test_parallelism_groups(sizes: tuple[int, int, int], data: list[list[int]], horizontal: list[list[int]]) -> None:
    assert checkpoint._get_parallellism_groups(*sizes) == (data, horizontal)
    # x + H k + H D z, k + H y + H D z, of each rank.
    size, width, world = sizes
    for rank in range(world):
        x, y, z = rank % width, rank // width % size, rank // (width * size)
        assert [x + width * k + width * size * z for k in range(size)] in data
        assert [k + width * y + width * size * z for k in range(width)] in horizontal


@pytest.mark.parametrize("sizes", [(3, 1, 4), (0, 1, 1), (1, -1, 1), (2, 2, 2)])
def test_groups_that_do_not_make_up_the_world(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError, match=r"world_size . must be a multiple of"):
        checkpoint._get_parallellism_groups(*sizes)


def test_a_file_may_name_any_number_of_ranks(tmp_path: Path) -> None:
    states = processes(state_of_one_process(False), 2, 1, 1)
    for state in states:
        state[OPTIONS]["world_size"] = 10**15
    with pytest.raises(IndexError, match=r"^Expected number of files to aggregate: 1000000000000000, got 2$"):
        checkpoint.aggregate_checkpoints(saved(states, tmp_path))


def test_complete_checkpoints_are_not_aggregated(tmp_path: Path) -> None:
    assert checkpoint.aggregate_checkpoints(saved(processes(state_of_one_process(False), 2, 1, 0), tmp_path)) is None


def test_common_entries_are_aggregated(tmp_path: Path) -> None:
    """The aggregate has the steps, the scaler, the statistics of the first process, and the user's first values."""
    states = processes(state_of_one_process(True), 2, 1, 1)
    for rank, state in enumerate(states):
        state["loss_scaler"] = {"loss_scale": np.array([1024.0]), "stable_steps": 3}
        state["running_statistics"] = {"bn/mean": np.full(2, float(rank))}
    states[1]["user_dict"] = _checkpoint_storage.to_serialized_hex({"rank": 1})
    found = checkpoint.aggregate_checkpoints(saved(states, tmp_path), pytorch_format=False)
    assert found is not None
    assert found["train_step_info"] == {"optimization_step": 7, "step": 7}
    assert found["loss_scaler"] == {"loss_scale": np.array([1024.0]), "stable_steps": 3}
    np.testing.assert_array_equal(found["running_statistics"]["bn/mean"], [0.0, 0.0])
    assert _checkpoint_storage.from_serialized_hex(found["user_dict"]) == {"rank": 1}


def test_without_states_of_the_optimizer(tmp_path: Path) -> None:
    for horizontal, zero in [(1, 1), (2, 0), (2, 1)]:
        whole = state_of_one_process(True)
        states = processes(whole, 2, horizontal, zero)
        for state in [whole, *states]:
            del state["optimizer"]
        folder = tmp_path / f"{horizontal} {zero}"
        folder.mkdir()
        found = checkpoint.aggregate_checkpoints(saved(states, folder), pytorch_format=False)
        assert found is not None
        assert_same(found, whole)


def test_values_that_are_no_numbers_are_equal(tmp_path: Path) -> None:
    whole = state_of_one_process(False)
    whole["model"]["full_precision"]["norm"][:] = np.nan
    found = checkpoint.aggregate_checkpoints(saved(processes(whole, 2, 2, 1), tmp_path))
    assert found is not None
    assert np.isnan(found["norm"]).all()


def change(*names: str, to: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that changes a value of the last process."""

    def apply(states: list[dict[str, Any]]) -> None:
        place = states[-1]
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = to

    return apply


def drop(*names: str) -> Callable[[list[dict[str, Any]]], None]:
    def apply(states: list[dict[str, Any]]) -> None:
        place = states[-1]
        for name in names[:-1]:
            place = place[name]
        del place[names[-1]]

    return apply


def last_file_twice(states: list[dict[str, Any]]) -> None:
    states[-2] = states[-1]


def one_file_more(states: list[dict[str, Any]]) -> None:
    states.append(states[-1])


def one_file_less(states: list[dict[str, Any]]) -> None:
    states.pop()


OPTIONS = "trainer_options"
MISMATCHES: list[tuple[str, Any, type[Exception], str]] = [
    ("no partition_info", drop("partition_info"), AssertionError, "Missing information: partition_info"),
    ("no options", drop(OPTIONS), KeyError, "has no 'trainer_options'"),
    ("no rank", drop(OPTIONS, "world_rank"), InvalidArgumentError, "a number is missing in trainer_options"),
    ("a rank of text", change(OPTIONS, "world_rank", to="1"),
     InvalidArgumentError, "a number is missing in trainer_options"),
    ("no optimizer name", drop(OPTIONS, "optimizer_name"), AssertionError, "Missing information: trainer_options/"),
    ("another rank", change(OPTIONS, "world_rank", to=7), AssertionError, "Unexpected rank .* Expected 3, got 7"),
    ("a rank twice", last_file_twice, AssertionError, "Unexpected rank in file at path .* Expected 2, got 3"),
    ("another precision", change(OPTIONS, "mixed_precision", to=False), AssertionError, "Mixed precision state mis"),
    ("another world", change(OPTIONS, "world_size", to=8), AssertionError, "World size state mismatch among"),
    ("another stage", change(OPTIONS, "zero_stage", to=2), AssertionError, "Zero stage mismatch among"),
    ("another optimizer", change(OPTIONS, "optimizer_name", to="x"), AssertionError, "Optimizer name mismatch among"),
    ("other steps", change("train_step_info", "step", to=8), AssertionError, "train_step_info mismatch among"),
    ("less files", one_file_less, IndexError, "Expected number of files to aggregate: 4, got 3"),
    ("more files", one_file_more, AssertionError, "Expected number of files to aggregate: 4, got 5"),
    ("gradients", change("accumulated_gradients", to={"w": 1}), UnsupportedError, "save after an update"),
    ("a model of text", change("model", to="x"), InvalidArgumentError, "its groups have another structure"),
    ("partitions of text", change("partition_info", to={"w": "x"}),
     InvalidArgumentError, "its groups have another structure"),
    ("no shape", change("partition_info", to={"w": {"megatron_row_partition": [0]}}),
     InvalidArgumentError, "its groups have another structure"),
    ("a wrong shape", change("partition_info", to={"w": {"original_dim": [-1]}}),
     InvalidArgumentError, "its groups have another structure"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("alter", "error", "sentence"), [row[1:] for row in MISMATCHES], ids=[row[0] for row in MISMATCHES]
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, alter: Callable[[list[dict[str, Any]]], None], error: type[Exception], sentence: str
) -> None:
    states = processes(state_of_one_process(True), 2, 2, 1)
    alter(states)
    with pytest.raises(error, match=sentence):
        checkpoint.aggregate_checkpoints(saved(states, tmp_path)[::-1], pytorch_format=False)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("model", "full_precision", "norm"), "Value mismatch for model state norm"),
        (("optimizer", "norm", "Update_Count"), "Value mismatch for model state norm and optimizer state Update_Count"),
        (("optimizer", "mlp/up.weight", "Update_Count"), "Value mismatch for model state mlp/up.weight and optimizer"),
        (("optimizer", "norm", "Moment_1"), "Value mismatch for model state norm and optimizer state Moment_1"),
    ],
)
def test_values_that_differ(tmp_path: Path, names: tuple[str, ...], sentence: str) -> None:
    for shape in ((7,), (1,)):
        states = processes(state_of_one_process(False), 1, 2, 0)
        change(*names, to=np.ones(shape, np.float32))(states)
        (tmp_path / str(shape)).mkdir()
        with pytest.raises(AssertionError, match=sentence):
            checkpoint.aggregate_checkpoints(saved(states, tmp_path / str(shape)), pytorch_format=False)


def test_parts_that_are_not_those_of_a_weight(tmp_path: Path) -> None:
    for number, (part, sentence) in enumerate(
        [
            (np.zeros((5, 7), np.float32), "the parts of the weight 'mlp/up.weight' have 65 elements"),
            (np.zeros((4, 6), np.float32), "the parts of the weight 'mlp/up.weight' cannot be joined"),
        ]
    ):
        states = processes(state_of_one_process(False), 1, 2, 0)
        change("model", "full_precision", "mlp/up.weight", to=part)(states)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(InvalidArgumentError, match=sentence):
            checkpoint.aggregate_checkpoints(saved(states, tmp_path / str(number)))
    states = processes(state_of_one_process(True), 2, 2, 1)
    for state in states:
        state["partition_info"]["mlp/up.bias"]["original_dim"] = [13]
    (tmp_path / "odd").mkdir()
    with pytest.raises(
        InvalidArgumentError, match=r"'mlp/up.bias' has the shape \(13,\), which cannot be divided into 2 equal parts"
    ):
        checkpoint.aggregate_checkpoints(saved(states, tmp_path / "odd"))


@pytest.mark.parametrize(("paths", "error"), [([], IndexError), ("file", TypeError), (["nowhere"], ValueError)])
def test_paths_that_are_none(paths: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        checkpoint.aggregate_checkpoints(paths)


def test_a_trainer_goes_on_from_files_of_several_processes(tmp_path: Path) -> None:
    """One process loads a state that ZeRO divided, and trains as from the whole state."""
    net = classifier()
    first = trainer_of(net, AdamConfig(lr=0.01))
    losses_of(first, net, 3)
    state = first.state_dict()
    weights = state["model"]["full_precision"]
    parts = zero_parts(weights, 2)
    assert any(isinstance(piece, slice) for part in parts for piece in part.values())
    states = []
    for rank, part in enumerate(parts):
        own = copy.deepcopy(state)
        own["optimizer"] = {name: own["optimizer"][name] for name in part}
        own["partition_info"] = {}
        for name, piece in part.items():
            if piece is not None:
                own["partition_info"][name] = {
                    "original_dim": list(weights[name].shape),
                    "megatron_row_partition": [-1],
                }
                for key in ("Moment_1", "Moment_2"):
                    own["optimizer"][name][key] = own["optimizer"][name][key].reshape(-1)[piece]
        own["trainer_options"] |= {"zero_stage": 1, "world_rank": rank, "world_size": 2, "data_parallel_size": 2}
        states.append(own)
    second = trainer_of(net, AdamConfig(lr=0.01))
    assert second.load_checkpoint(*saved(states, tmp_path)) == {}
    assert losses_of(second, net, 3, first=3) == losses_of(first, net, 3, first=3)
    assert second._train_step_info.step == first._train_step_info.step == 6


# The older files. PyTorch is not installed here: a stub module has the four functions that are used.


class Tensor:
    """An array with the interface of a tensor."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def numpy(self) -> npt.NDArray[Any]:
        return self.array


class Careful(pickle.Unpickler):
    """An unpickler of tensors, arrays and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("numpy", __name__.partition(".")[0]):
            raise pickle.UnpicklingError(
                f"Weights only load failed.\nUnsupported global: GLOBAL {module}.{name} was not"
            )
        return super().find_class(module, name)


def load_by_pickle(path: str, map_location: str, weights_only: bool) -> Any:
    assert map_location == "cpu"
    with Path(path).open("rb") as file:
        return (Careful if weights_only else pickle.Unpickler)(file).load()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("torch")
    made: dict[str, Any] = {"Tensor": Tensor, "from_numpy": Tensor, "save": pickle.dump, "load": load_by_pickle}
    module.__dict__.update(made, nn=types.SimpleNamespace(Module=type("Module", (), {})))
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def deprecated(name: str) -> Any:
    return pytest.warns(DeprecationWarning, match=rf"^{name}\(\) will be deprecated soon\. Please use ORTTrainer\.")


def trained(config: Any = None, steps: int = 3, **options: Any) -> ORTTrainer:
    trainer = trainer_of(classifier(), config, options)
    losses_of(trainer, classifier(), steps)
    return trainer


def flat_state(trainer: ORTTrainer, include_optimizer_state: bool = True) -> dict[str, Any]:
    with deprecated("experimental_state_dict"):
        return checkpoint.experimental_state_dict(trainer, include_optimizer_state)


WEIGHTS = {"fc1.w", "fc1.b", "fc2.w", "fc2.b"}


@pytest.mark.usefixtures("torch")
def test_flat_states() -> None:
    names = {f"{key}_{name}" for key in ("Moment_1", "Moment_2", "Update_Count") for name in WEIGHTS}
    adam, frozen = trained(AdamConfig()), trained(SGDConfig(), utils={"frozen_weights": ["fc1.b"]})
    state = flat_state(adam)
    assert state.keys() == WEIGHTS | names
    assert all(isinstance(value, Tensor) for value in state.values())
    np.testing.assert_array_equal(state["fc1.w"].array, weights_of(adam)["fc1.w"].numpy())
    assert flat_state(adam, False).keys() == flat_state(frozen).keys() == WEIGHTS
    moments = {f"{key}_{name}" for key in ("Moment_1", "Moment_2") for name in WEIGHTS}
    assert flat_state(trained(LambConfig())).keys() == WEIGHTS | moments | {"Step"}


CONFIGS = [AdamConfig, LambConfig, SGDConfig]


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("config", CONFIGS)
def test_flat_states_are_loaded(config: Any) -> None:
    """Losses continue as in the original training."""
    net = classifier()
    first = trained(config(lr=0.01))
    second = trained(config(lr=0.01), steps=1)
    with deprecated("experimental_load_state_dict"):
        checkpoint.experimental_load_state_dict(second, flat_state(first), strict=True)
    assert losses_of(second, net, 3, first=3) == losses_of(first, net, 3, first=3)


@pytest.mark.usefixtures("torch")
def test_a_part_of_a_flat_state() -> None:
    """Frozen weights are loaded; float16 copies and, unless strict, unknown names are ignored; steps do not change."""
    trainer = trained(AdamConfig(), utils={"frozen_weights": ["fc1.b"]})
    before = trainer.state_dict()
    given = {"fc1.b": np.ones(16, np.float32), "fc1.w_fp16": Tensor(np.zeros(3)), "fc3.b": np.zeros(1)}
    with deprecated("experimental_load_state_dict"):
        checkpoint.experimental_load_state_dict(trainer, given)
    after = trainer.state_dict()
    np.testing.assert_array_equal(after["model"]["full_precision"].pop("fc1.b"), given["fc1.b"])
    before["model"]["full_precision"].pop("fc1.b")
    assert bits_of(after) == bits_of(before)
    unknown = "Checkpoint tensor: fc3.b is not present in the model; did you mean 'fc2.b'"
    with deprecated("experimental_load_state_dict"), pytest.raises(RuntimeError, match=unknown):
        checkpoint.experimental_load_state_dict(trainer, given | {"fc1.b": np.zeros(16)}, strict=True)
    assert (weights_of(trainer)["fc1.b"].numpy() == 1).all()
    with (
        deprecated("experimental_load_state_dict"),
        pytest.raises(TypeError, match="a state must be a dict of tensors"),
    ):
        checkpoint.experimental_load_state_dict(trainer, [])  # type: ignore[arg-type]
    with (
        deprecated("experimental_load_state_dict"),
        pytest.raises(InvalidArgumentError, match="weight 'fc1\\.b' is float32"),
    ):
        checkpoint.experimental_load_state_dict(trainer, {"fc1.b": np.zeros(3, np.float32)})


@pytest.mark.usefixtures("torch")
def test_before_there_is_a_session() -> None:
    net = classifier()
    first = trained(AdamConfig(lr=0.01))
    state = flat_state(first)
    second = trainer_of(net, AdamConfig(lr=0.01))
    second._training_session = None
    with deprecated("experimental_state_dict"), pytest.warns(UserWarning, match="session is not initialized yet"):
        assert checkpoint.experimental_state_dict(second) == {}
    with deprecated("experimental_load_state_dict"):
        checkpoint.experimental_load_state_dict(second, state)
    with deprecated("experimental_state_dict"), pytest.warns(UserWarning, match="calling state_dict"):
        assert checkpoint.experimental_state_dict(second).keys() == state.keys()
    assert second._onnx_model is not None
    second._init_onnx_model(second._onnx_model)
    assert second._load_state_dict is not None
    second._load_state_dict()
    assert losses_of(second, net, 3, first=3) == losses_of(first, net, 3, first=3)


def save(trainer: ORTTrainer, folder: Path, *arguments: Any, **more: Any) -> None:
    with deprecated("experimental_save_checkpoint"):
        checkpoint.experimental_save_checkpoint(trainer, folder, *arguments, **more)


def load(trainer: ORTTrainer, folder: Path, *arguments: Any, **more: Any) -> dict[str, Any]:
    with deprecated("experimental_load_checkpoint"):
        return checkpoint.experimental_load_checkpoint(trainer, folder, *arguments, **more)


@pytest.mark.usefixtures("torch")
def test_older_files(tmp_path: Path) -> None:
    net = classifier()
    first, second = trained(AdamConfig(lr=0.01)), trained(AdamConfig(lr=0.01), steps=1)
    others = {"epoch": 3}
    save(first, tmp_path, checkpoint_state_dict=others)
    assert others == {"epoch": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["ORT_checkpoint.ort.pt"]
    assert load(second, tmp_path) == others
    assert losses_of(second, net, 3, first=3) == losses_of(first, net, 3, first=3)
    with pytest.warns(UserWarning, match="already exists, overwriting"):
        save(first, tmp_path)
    assert load(second, tmp_path, "ORT_checkpoint", strict=True) == {}
    save(first, tmp_path, "weights", include_optimizer_state=False)
    with (tmp_path / "weights.ort.pt").open("rb") as file:
        assert pickle.load(file)["model"].keys() == WEIGHTS


@pytest.mark.usefixtures("torch")
def test_older_files_that_cannot_be_read(tmp_path: Path) -> None:
    trainer = trained(SGDConfig())
    for error, folder in [(r"checkpoint_dir \(.*nowhere\) directory doesn't exist", tmp_path / "nowhere")]:
        with pytest.raises(AssertionError, match=error):
            save(trainer, folder)
    with pytest.raises(AssertionError, match="No checkpoint found with prefix 'ORT_checkpoint' at"):
        load(trainer, tmp_path)
    save(trainer, tmp_path, "another")
    with pytest.raises(
        AssertionError, match=r"Couldn't find checkpoint file .*an\.ort\.pt; did you mean .*another\.ort\.pt"
    ):
        load(trainer, tmp_path, "an")
    save(trainer, tmp_path, "objects", {"path": Path("x")})
    with pytest.raises(
        InvalidArgumentError, match=r"cannot be read: the file asks for pathlib\S*; allow_pickle=True allows"
    ):
        load(trainer, tmp_path, "objects")
    assert load(trainer, tmp_path, "objects", allow_pickle=True) == {"path": Path("x")}
    (tmp_path / "text.ort.pt").write_text("x")
    with pytest.raises(InvalidArgumentError, match=r"text.ort.pt cannot be read"):
        load(trainer, tmp_path, "text", allow_pickle=True)
    (tmp_path / "list.ort.pt").write_bytes(pickle.dumps([]))
    with pytest.raises(InvalidArgumentError, match="the file has no dict 'model'"):
        load(trainer, tmp_path, "list")


def flat_processes(trainer: ORTTrainer, size: int) -> list[dict[str, Any]]:
    """Return flat states of ZeRO processes in mixed precision: float16 copies, float32 parts of weights and moments."""
    state = trainer._training_session.get_state()
    weights = {name: state[name] for name in WEIGHTS}
    made = []
    for part in zero_parts(weights, size):
        own: dict[str, Any] = {f"{name}_fp16": Tensor(weight.astype(np.float16)) for name, weight in weights.items()}
        for name, piece in part.items():
            view = "" if piece is None else "_view_1"
            for key in (name, f"Moment_1_{name}", f"Moment_2_{name}"):
                own[key + view] = Tensor(state[key] if piece is None else state[key].reshape(-1)[piece])
            own[f"Update_Count_{name}{view}"] = Tensor(state[f"Update_Count_{name}"])
        made.append(own)
    return made


@pytest.mark.usefixtures("torch")
def test_older_files_of_several_processes(tmp_path: Path) -> None:
    net = classifier()
    first, second = trained(AdamConfig(lr=0.01)), trained(AdamConfig(lr=0.01), steps=1)
    for rank, state in enumerate(flat_processes(first, 3)):
        assert any("_view_" in name for name in state)
        name = checkpoint._get_checkpoint_name("ORT_checkpoint", True, rank, 3)
        assert name == f"ORT_checkpoint.ZeRO.{rank}.2.ort.pt"
        (tmp_path / name).write_bytes(pickle.dumps({"model": state, f"of {rank}": rank, "of all": rank}))
    files = checkpoint._list_checkpoint_files(tmp_path, "ORT")
    assert len(files) == 3
    combined = checkpoint._CombineZeroCheckpoint(files[::-1])
    with pytest.warns(DeprecationWarning, match=r"_CombineZeroCheckpoint\.aggregate_checkpoints"):
        whole = combined.aggregate_checkpoints()
    state = first._training_session.get_state()
    for name, value in state.items():
        assert whole[name].numpy().shape == value.shape
        np.testing.assert_array_equal(whole[name].numpy(), value)
    assert whole.keys() == state.keys() | {f"{name}_fp16" for name in WEIGHTS}
    with pytest.warns(UserWarning, match="Found more than one file with prefix"):
        assert load(second, tmp_path, strict=True) == {"of 0": 0, "of 1": 1, "of 2": 2, "of all": 2}
    assert losses_of(second, net, 3, first=3) == losses_of(first, net, 3, first=3)
    cleaned = checkpoint._CombineZeroCheckpoint(files, lambda state: {"fc1.b_fp16": state["fc1.b_fp16"]})
    assert cleaned.merged().keys() == {"fc1.b_fp16"}
    (tmp_path / files[1]).unlink()
    with (
        pytest.warns(UserWarning, match="more than one"),
        pytest.raises(AssertionError, match="Could not find 3 files"),
    ):
        load(second, tmp_path)
    for none, sentence in [
        ([], "No checkpoint files passed"),
        (["file.ort.pt"], "does not have the name of a ZeRO file"),
    ]:
        with pytest.raises(AssertionError, match=sentence):
            checkpoint._CombineZeroCheckpoint(none)


@pytest.mark.usefixtures("torch")
def test_pieces_without_a_shape(tmp_path: Path) -> None:
    for rank in range(2):
        piece = {"w_view_0": Tensor(np.zeros(3))}
        (tmp_path / f"x.ZeRO.{rank}.1.ort.pt").write_bytes(pickle.dumps({"model": piece}))
    with pytest.raises(InvalidArgumentError, match="the shape of 'w' is unknown: the files have only parts of it"):
        checkpoint._CombineZeroCheckpoint(checkpoint._list_checkpoint_files(tmp_path, "x")).merged()


@pytest.mark.filterwarnings("ignore:distributed.* has no effect in one process:UserWarning")
@pytest.mark.usefixtures("torch")
def test_the_file_of_a_zero_process(tmp_path: Path) -> None:
    """A trainer with ZeRO of one process writes and reads the file of its rank."""
    options = {"distributed": {"deepspeed_zero_optimization": {"stage": 1}}}
    trainer = trained(SGDConfig(), **options)
    save(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ORT_checkpoint.ZeRO.0.0.ort.pt"]
    assert load(trainer, tmp_path) == {}
    assert load(trained(SGDConfig()), tmp_path) == {}


def test_names_of_files(tmp_path: Path) -> None:
    assert checkpoint._get_checkpoint_name("a", False) == "a.ort.pt"
    assert checkpoint._get_checkpoint_name("a", True, 2, 4) == "a.ZeRO.2.3.ort.pt"
    with pytest.raises(InvalidArgumentError, match="world_rank and world_size"):
        checkpoint._get_checkpoint_name("a", True)
    for name in ("ab.x", "ac.x", "ab.y", "b.x"):
        (tmp_path / name).touch()
    assert checkpoint._list_checkpoint_files(tmp_path, "a", ".x") == [str(tmp_path / "ab.x"), str(tmp_path / "ac.x")]


def test_a_flat_state_in_three() -> None:
    names = ["w", "w_fp16", "Moment_1_w", "Moment_2_w", "Update_Count_w", "Step"]
    assert checkpoint._split_state_dict(dict.fromkeys(names, 1)) == {
        "optimizer": dict.fromkeys(names[2:], 1),
        "fp32_param": {"w": 1},
        "fp16_param": {"w_fp16": 1},
    }


def test_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install. A dict of arrays loads without PyTorch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    trainer = trained(SGDConfig())
    (tmp_path / "ORT_checkpoint.ort.pt").touch()
    for call, name in [
        (lambda: checkpoint.experimental_state_dict(trainer), "experimental_state_dict"),
        (lambda: checkpoint.experimental_save_checkpoint(trainer, tmp_path), "experimental_save_checkpoint"),
        (lambda: checkpoint.experimental_load_checkpoint(trainer, tmp_path), "experimental_load_checkpoint"),
    ]:
        with deprecated(name), pytest.raises(ImportError, match="pip install torch"):
            call()
    with deprecated("experimental_load_state_dict"):
        checkpoint.experimental_load_state_dict(trainer, {"fc1.b": np.ones(16, np.float32)})
    assert (weights_of(trainer)["fc1.b"] == 1).all()
