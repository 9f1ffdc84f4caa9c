"""Checkpoint files: layout as in h5py, existing files, killed saves, damage, links, memory bombs, pickles."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ortrain import _hdf5, _unpickler
from ortrain._hdf5 import _parts, _write
from ortrain.errors import InvalidArgumentError, NoSuchFileError
from ortrain.trainer import _checkpoint_storage

CONFORM = "ORTRAIN_CONFORM" in os.environ
DAMAGES = 10_000 if CONFORM else 500
PICKLES = 10_000 if CONFORM else 500
KILLS = 200 if CONFORM else 20
SEED = 29

EVERYTHING: dict[str, Any] = {
    "int1": 1,
    "int2": 2,
    "int_list": [1, 2, 3, 5, 6],
    "dict1": {"np_array": np.arange(100), "dict2": {"int3": 3, "int4": 4}, "str1": "a text"},
    "bool1": True,
    "int5": 5,
    "float1": 2.345,
    "np_array_float": np.array([1.234, 2.345, 3.456]),
    "np_array_float_3_dim": np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
}
DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 >i2 >u4 >i8 >f2 >f4 >f8".split()


def state(step: int = 2, width: int = 4) -> dict[str, Any]:
    """Return a state of two layers, as a trainer saves one."""
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    weight = np.full((8, width), step, np.float32)
    moments = {"Moment_1": weight, "Moment_2": weight, "Update_Count": np.array([step + 1])}
    return {
        "model": {"full_precision": dict.fromkeys(names, weight)},
        "optimizer": dict.fromkeys(names, moments),
        "trainer_options": {
            "mixed_precision": False,
            "zero_stage": 0,
            "world_rank": 0,
            "world_size": 1,
            "optimizer_name": "AdamOptimizer",
            "data_parallel_size": 1,
            "horizontal_parallel_size": 1,
        },
        "train_step_info": {"optimization_step": step, "step": step},
        "partition_info": {name: {"original_dim": [8, 4], "megatron_row_partition": [-1]} for name in names},
        "user_dict": _checkpoint_storage.to_serialized_hex({"epoch": step}),
    }


def by_h5py(group: h5py.Group) -> dict[str, Any]:
    """Return a group as h5py reads one."""
    return {name: by_h5py(member) if isinstance(member, h5py.Group) else member[()] for name, member in group.items()}


def read_by_h5py(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return by_h5py(file)


def write_by_h5py(path: Path, tree: dict[str, Any], **options: Any) -> None:
    order = {"track_order": options.get("track_order", False)}

    def put(group: h5py.Group, members: dict[str, Any]) -> None:
        for name, value in members.items():
            if isinstance(value, dict):
                put(group.create_group(name, **order), value)
            else:
                group[name] = value

    with h5py.File(path, "w-", **options) as file:
        put(file, tree)


def assert_equal(found: Any, wanted: Any) -> None:
    """Check that kinds, types, shapes and bytes are equal, and the order of dicts."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in wanted:
            assert_equal(found[name], wanted[name])
    elif isinstance(wanted, bytes):
        assert found == wanted
    else:
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


# The layout.


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("int1",),
        ("dict1",),
        ("dict1", "dict2"),
        ("dict1", "dict2", "int4"),
        ("dict1", "str1"),
        ("bool1",),
        ("float1",),
        ("np_array_float",),
    ],
    ids="/".join,
)
@pytest.mark.parametrize("slash", ["", "/"])
def test_saved_dict_matches_loaded(tmp_path: Path, names: tuple[str, ...], slash: str) -> None:
    """S1: saved_dict_matches_loaded."""
    _checkpoint_storage.save(EVERYTHING, tmp_path / "file")
    wanted = read_by_h5py(tmp_path / "file")
    given: Any = EVERYTHING
    for name in names:
        wanted, given = wanted[name], given[name]
    found = _checkpoint_storage.load(tmp_path / "file", key="/".join(names) + slash if names else None)
    assert_equal(found, wanted)

    def check(value: Any, original: Any) -> None:
        if isinstance(original, dict):
            assert value.keys() == original.keys()
            for name in original:
                check(value[name], original[name])
        elif isinstance(original, str):
            assert value == original.encode()
        else:
            assert isinstance(value, np.ndarray | np.generic)
            np.testing.assert_array_equal(value, original)

    check(found, given)


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"int_set": {1, 2, 3}}, TypeError),
        ({"str_set": {"one", "two"}}, TypeError),
        ([1, 2, 3], ValueError),
        (2.352, ValueError),
        (None, ValueError),
        ({"a": {"b": None}}, TypeError),
        ({"a": object()}, TypeError),
        ({"a": [1, "b"]}, TypeError),
        ({"a": [[1], [1, 2]]}, TypeError),
        ({"a": 2**64}, TypeError),
        ({"a": 1j}, TypeError),
        ({"a": np.array(["text"])}, TypeError),
        ({"a": np.array("2020-01-01", "M8[D]")}, TypeError),
        ({"a": np.zeros(2, [("x", "i4")])}, TypeError),
        ({"a": np.zeros(2, np.longdouble)}, TypeError),
        ({1: 2}, TypeError),
        ({"": 2}, ValueError),
        ({"/a": 2}, ValueError),
        ({"a/": 2}, ValueError),
        ({"a//b": 2}, ValueError),
        ({"a/./b": 2}, ValueError),
        ({"a\0": 2}, ValueError),
        ({"\ud800": 2}, ValueError),
        ({"a": "b\0"}, ValueError),
        ({"a": b"\0"}, ValueError),
        ({"a": "\ud800"}, InvalidArgumentError),
        ({"a": 1, "a/b": 2}, ValueError),
        ({"a/b": 2, "a": 1}, ValueError),
        ({"a": {"b": 1}, "a/b": 2}, ValueError),
        ({"/".join("a" * 65): 1}, ValueError),
    ],
)
def test_saving_non_supported_types_fails(tmp_path: Path, tree: Any, error: type[Exception]) -> None:
    """S2: saving_non_supported_types_fails. The error writes no file."""
    with pytest.raises(error):
        _checkpoint_storage.save(tree, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_value() -> None:
    with pytest.raises(TypeError, match="'a/b' is a set, but a checkpoint holds dicts"):
        _checkpoint_storage.save({"a": {"b": {1}}}, "nowhere/file")


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="'a' is a ndarray of bfloat16"):
        _checkpoint_storage.save({"a": np.zeros(2, ml_dtypes.bfloat16)}, tmp_path / "file")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 4), (2, 4, 6), (2, 4, 6, 8), (0,), (3, 0)], ids=str)
def test_saving_tensor_datatype_and_dimensions(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """S3: saving_tensor_datatype, saving_multiple_dimension, with arrays. Ortrain and h5py read each other's files."""
    values = (np.random.default_rng(SEED).random(shape) * 9).astype(dtype)
    _checkpoint_storage.save({"tensor": values}, tmp_path / "ours")
    write_by_h5py(tmp_path / "theirs", {"tensor": values})
    for read in (_checkpoint_storage.load, read_by_h5py):
        for file in ("ours", "theirs"):
            assert_equal(read(tmp_path / file)["tensor"], values[()])


def test_arrays_that_are_not_in_a_row(tmp_path: Path) -> None:
    values = np.random.default_rng(SEED).random((8, 9))
    given = {"columns": np.asfortranarray(values), "steps": values[::2, ::-3]}
    _checkpoint_storage.save(given, tmp_path / "file")
    found = read_by_h5py(tmp_path / "file")
    assert all((found[name] == given[name]).all() for name in given)


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": {}}}], ids=repr)
def test_empty_dictionaries(tmp_path: Path, tree: dict[str, Any]) -> None:
    """S4: empty dictionaries."""
    _checkpoint_storage.save(tree, tmp_path / "file")
    assert _checkpoint_storage.load(tmp_path / "file") == tree == read_by_h5py(tmp_path / "file")


def test_missing_file(tmp_path: Path) -> None:
    """S4: missing file. The error is a ValueError, as in onnxruntime-training, and a FileNotFoundError."""
    for path in (tmp_path / "nowhere", tmp_path / "nowhere" / "file"):
        with pytest.raises(ValueError, match="there is no file") as raised:
            _checkpoint_storage.load(path)
        assert isinstance(raised.value, FileNotFoundError)
        assert isinstance(raised.value, NoSuchFileError)


def test_custom_user_dict(tmp_path: Path) -> None:
    """S4: custom user dict: a pickle of arbitrary values that the user unpickles."""
    user_dict = {
        "tensor1": np.arange(100, dtype=np.float32),
        "fields": collections.OrderedDict(loss=1.23, epoch=12_000),
    }
    given = {"a": np.array([1.0, 2.0], np.float32), "user_dict": pickle.dumps(user_dict).hex()}
    _checkpoint_storage.save(given, tmp_path / "file")
    loaded = _checkpoint_storage.load(tmp_path / "file")
    for found in (
        pickle.loads(bytes.fromhex(loaded["user_dict"].decode())),
        _checkpoint_storage.from_serialized_hex(loaded["user_dict"]),
        _checkpoint_storage.from_serialized_hex(loaded["user_dict"].decode(), allow_pickle=True),
    ):
        assert (found["tensor1"] == user_dict["tensor1"]).all()
        assert found["fields"] == user_dict["fields"]
        assert type(found["fields"]) is collections.OrderedDict


def test_layout_as_h5py_sees_it(tmp_path: Path) -> None:
    """Files have groups and datasets without attributes; the datasets have the types that h5py writes."""
    tree = state() | {"empty": {}, "bytes": b"text", "no text": "", "none": np.zeros((0, 2), np.float16)}
    _checkpoint_storage.save(tree, tmp_path / "ours")
    write_by_h5py(tmp_path / "theirs", tree)

    def described(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def visit(name: str, member: Any) -> None:
            assert not list(member.attrs)
            if isinstance(member, h5py.Group):
                found[name] = "group"
                return
            creation = member.id.get_create_plist()
            found[name] = (
                member.id.get_type(),
                member.shape,
                member.maxshape,
                member.chunks,
                creation.get_layout(),
                creation.fill_value_defined(),
                h5py.check_string_dtype(member.dtype),
            )

        with h5py.File(path) as file:
            assert not list(file.attrs)
            file.visititems(visit)
        return found

    ours = described(tmp_path / "ours")
    assert ours == described(tmp_path / "theirs")
    assert "model/full_precision/fc1.weight" in ours
    with h5py.File(tmp_path / "ours") as file:
        options = file["trainer_options"]
        assert options["optimizer_name"].shape == options["mixed_precision"].shape == options["world_size"].shape == ()
        assert options["world_size"].dtype == np.int64
        assert options["mixed_precision"].id.get_type().get_class() == h5py.h5t.ENUM
        text = h5py.check_string_dtype(options["optimizer_name"].dtype)
        assert (text.encoding, text.length) == ("utf-8", None)
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        assert_equal(_checkpoint_storage.load(path), read_by_h5py(tmp_path / "theirs"))


@pytest.mark.parametrize("letters", ["weight", "größe", "重み"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 256, 257, 3000])
def test_groups_of_many_members(tmp_path: Path, count: int, letters: str) -> None:
    """In B-trees of one leaf, one node or two levels h5py finds each name, and can extend the file.

    For a new name that is not ASCII, h5py converts our group to the newer layout.
    """
    rng = random.Random(SEED)
    tree = {"group": {f"{letters} {rng.random()}": np.array(number) for number in range(count)}}
    _checkpoint_storage.save(tree, tmp_path / "file")
    assert_equal(_checkpoint_storage.load(tmp_path / "file"), read_by_h5py(tmp_path / "file"))
    names = list(tree["group"])
    with h5py.File(tmp_path / "file", "r+") as file:
        group = file["group"]
        assert len(group) == count
        assert [int(group[name][()]) for name in names] == list(range(count))
        for number in range(20):
            group[f"another {letters} {number}"] = number
        for name in names[::3]:
            del group[name]
        group.attrs["note"] = 1
    found = _checkpoint_storage.load(tmp_path / "file")
    assert_equal(found, read_by_h5py(tmp_path / "file"))
    assert set(found["group"]) == {*names, *(f"another {letters} {number}" for number in range(20))} - set(names[::3])


def test_names_and_texts_of_all_letters(tmp_path: Path) -> None:
    tree = {"größe": {"重み": "ü" * 10_000, "a b": ""}, "x.y:0": b"\xff"}
    _checkpoint_storage.save(tree, tmp_path / "file")
    found = _checkpoint_storage.load(tmp_path / "file")
    assert_equal(found, read_by_h5py(tmp_path / "file"))
    assert found["größe"]["重み"].decode() == "ü" * 10_000


# Options of h5py, by the name of each kind of file.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "newest": {"libver": "latest"},
    "1.8": {"libver": "v108"},
    "1.12": {"libver": "v112"},
    "ordered": {"track_order": True},
    "newest and ordered": {"libver": "latest", "track_order": True},
    "pages": {"fs_strategy": "page"},
}
# Signatures of the parts of dense groups: a heap, its blocks, and a tree with one or more levels.
HEAP, DIRECT, INDIRECT, TREE, NODE = b"FRHP", b"FHDB", b"FHIB", b"BTHD", b"BTIN"


def shuffled(count: int, name: str) -> list[str]:
    names = [name.format(number) for number in range(count)]
    random.Random(SEED).shuffle(names)
    return names


@pytest.mark.parametrize("options", OPTIONS)
def test_values_in_files_of_h5py(tmp_path: Path, options: str) -> None:
    """All types of values and a state are read, in groups and names with non-ASCII letters."""
    values = (np.random.default_rng(SEED).random((2, 3)) * 9).astype
    tree = {f"größe {dtype}": values(dtype) for dtype in DTYPES} | {
        "重み": {
            "нет": {},
            "text": "ü" * 10_000,
            "bytes": b"xy",
            "none": np.zeros((0, 2)),
            "": True,
            "x": np.float16(3),
        },
        "state": state() | {"größe": state()},
    }
    tree["重み"]["é"] = tree["重み"].pop("")
    write_by_h5py(tmp_path / "file", tree, **OPTIONS[options])
    found = _checkpoint_storage.load(tmp_path / "file")
    assert_equal(found, read_by_h5py(tmp_path / "file"))
    assert_equal(_checkpoint_storage.load(tmp_path / "file", key="重み/text"), ("ü" * 10_000).encode())
    _checkpoint_storage.save(found, tmp_path / "again")
    names = by_name(found)
    assert by_name(read_by_h5py(tmp_path / "again")).keys() == names.keys()


def by_name(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: by_name(value) if isinstance(value, dict) else value for name, value in sorted(tree.items())}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [0, 1, 8, 9, 50, 3000] + [60_000] * CONFORM)
def test_groups_of_many_members_of_h5py(tmp_path: Path, count: int, options: str) -> None:
    """Links in a header, in a heap of one block or a table of blocks, and in trees of one or more levels are read."""
    tree = {
        "datasets": {name: number for number, name in enumerate(shuffled(count, "ж{}"))},
        "groups": {name: {} for name in shuffled(min(count, 3000), "重み {}")},
        "ascii": {name: number for number, name in enumerate(shuffled(min(count, 50), "w{}"))},
    }
    write_by_h5py(tmp_path / "file", tree, **OPTIONS[options])
    found = _checkpoint_storage.load(tmp_path / "file")
    assert_equal(found, read_by_h5py(tmp_path / "file"))
    assert by_name(found) == by_name(tree)
    content = (tmp_path / "file").read_bytes()
    assert (HEAP in content) == (count > 8)
    assert (INDIRECT in content and NODE in content) == (count >= 50)
    levels = [content[at + 12] for at in range(len(content)) if content.startswith(TREE, at)]
    assert max(levels, default=0) == {50: 1, 3000: 2, 60_000: 3}.get(count, 0)
    if count:
        name = next(iter(tree["datasets"]))
        assert _checkpoint_storage.load(tmp_path / "file", key=f"datasets/{name}") == 0


@pytest.mark.parametrize("options", OPTIONS)
def test_long_names(tmp_path: Path, options: str) -> None:
    """Long names are read from continued headers, from heap blocks, and from separate parts of the file."""
    for count, sizes in [(3, (3000, 32_000, 60_000)), (20, (3000, 4080, 4090, 60_000)), (200, (1000,)), (2, (66_000,))]:
        names = [f"{'ж' * (sizes[number % len(sizes)] // 2 - 2)}{number:03}" for number in range(count)]
        tree = {"group": dict.fromkeys(names, 1) | {"w" * 60_000: 2}}
        (tmp_path / "file").unlink(missing_ok=True)
        write_by_h5py(tmp_path / "file", tree, **OPTIONS[options])
        found = _checkpoint_storage.load(tmp_path / "file")
        assert_equal(found, read_by_h5py(tmp_path / "file"))
        assert found == tree
        # One tree is for names, another for parts; a third tree stores the order.
        trees = (tmp_path / "file").read_bytes().count(TREE)
        assert trees >= 2 if count > 8 or sizes == (66_000,) else trees == 0


def test_long_names_of_ours(tmp_path: Path) -> None:
    tree = {"ж" * 30_000: 1, "w" * 60_000: 2, "重" * 10_000: {"é" * 100_000: 3}}
    _checkpoint_storage.save(tree, tmp_path / "file")
    assert (
        by_name(_checkpoint_storage.load(tmp_path / "file"))
        == by_name(read_by_h5py(tmp_path / "file"))
        == by_name(tree)
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_groups_that_h5py_changed(tmp_path: Path, options: str) -> None:
    """A heap and a tree with holes, a group that shrank, and attributes next to links are read."""
    with h5py.File(tmp_path / "file", "w-", **OPTIONS[options]) as file:
        large, small = file.create_group("groß"), file.create_group("klein")
        for number in range(1000):
            large[f"ж{number}" + "x" * (number % 700)] = number
            if number < 30:
                small[f"ж{number}"] = number
                large.attrs[f"ü{number}"] = "ü" * 100
        for number in range(0, 1000, 3):
            del large[f"ж{number}" + "x" * (number % 700)]
        for number in range(28):
            del small[f"ж{number}"]
        for number in range(300):
            large[f"new {number}"] = number
    found = _checkpoint_storage.load(tmp_path / "file")
    assert_equal(found, read_by_h5py(tmp_path / "file"))
    assert len(found["groß"]) == 966
    assert len(found["klein"]) == 2


def test_newer_versions_of_the_place_of_data(tmp_path: Path) -> None:
    """Other releases of the HDF5 library write version 4 of the data layout with the meaning of version 3."""
    write_by_h5py(tmp_path / "file", {"é": np.arange(5)})
    content = (tmp_path / "file").read_bytes()
    place = b"\x08\0\x18\0\0\0\0\0\x03\x01"
    assert content.count(place) == 1
    (tmp_path / "newer").write_bytes(content.replace(place, place[:8] + b"\x04\x01"))
    assert_equal(_checkpoint_storage.load(tmp_path / "newer"), read_by_h5py(tmp_path / "newer"))


def test_a_slash_in_a_name_is_a_group(tmp_path: Path) -> None:
    """As in HDF5, weight names with slashes become groups, in any order of the names."""
    tree = {"optimizer": {"a/b": {"m": 1}, "a": {"m": 2}, "a/b/c": {"m": 3}, "x/y": {}}, "w": {"c/d": 4, "c/e": 5}}
    _checkpoint_storage.save(tree, tmp_path / "file")
    found = _checkpoint_storage.load(tmp_path / "file")
    assert found == {
        "optimizer": {"a": {"b": {"c": {"m": 3}, "m": 1}, "m": 2}, "x": {"y": {}}},
        "w": {"c": {"d": 4, "e": 5}},
    }
    assert_equal(found, read_by_h5py(tmp_path / "file"))


def test_loaded_tree_can_be_saved_again(tmp_path: Path) -> None:
    _checkpoint_storage.save(EVERYTHING, tmp_path / "first")
    first = _checkpoint_storage.load(tmp_path / "first")
    _checkpoint_storage.save(first, tmp_path / "second")
    assert_equal(_checkpoint_storage.load(tmp_path / "second"), first)


def test_deep_dicts(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(_hdf5.DEEPEST):
        deep = {"a": deep}
    _checkpoint_storage.save(deep, tmp_path / "deep")
    assert _checkpoint_storage.load(tmp_path / "deep") == deep
    with pytest.raises(InvalidArgumentError, match="at most 64 nested dicts"):
        _checkpoint_storage.save({"a": deep}, tmp_path / "deeper")
    write_by_h5py(tmp_path / "deeper", {"a": deep})
    with pytest.raises(InvalidArgumentError, match="more than 64 nested groups"):
        _checkpoint_storage.load(tmp_path / "deeper")


@pytest.mark.parametrize(
    ("key", "near"), [("nowhere", ""), ("model/full_precisions", "full_precision"), ("train_step_info/step/x", "")]
)
def test_a_key_that_is_not_there(tmp_path: Path, key: str, near: str) -> None:
    _checkpoint_storage.save(state(), tmp_path / "file")
    with pytest.raises(KeyError, match=f"has no '{key}'.*{near}"):
        _checkpoint_storage.load(tmp_path / "file", key=key)


def test_files_that_are_no_hdf5(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text that is long enough " * 10)
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for name in ("text", "empty", "pipe", "."):
        with pytest.raises(InvalidArgumentError, match="is not an HDF5 file"):
            _checkpoint_storage.load(tmp_path / name)


def test_h5py_is_not_needed() -> None:
    """A checkpoint or the trainer imports neither h5py, nor pickletools, nor PyTorch."""
    program = """
import sys, tempfile
from ortrain.trainer import _checkpoint_storage, checkpoint
with tempfile.TemporaryDirectory() as folder:
    _checkpoint_storage.save({"a": 1}, folder + "/a")
    assert _checkpoint_storage.load(folder + "/a") == {"a": 1}
assert not {"h5py", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Paths.


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError, match="a checkpoint must be a new file"):
            _checkpoint_storage.save({"a": 1}, tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_file_of_another_process_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = _hdf5.write

    def slow(tree: Any, file: Any) -> None:
        write(tree, file)
        (tmp_path / "file").write_bytes(b"theirs")

    monkeypatch.setattr(_hdf5, "write", slow)
    with pytest.raises(FileExistsError, match="file already"):
        _checkpoint_storage.save({"a": 1}, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file appears complete, and never replaces another file."""

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    _checkpoint_storage.save({"a": 1}, tmp_path / "file")
    assert _checkpoint_storage.load(tmp_path / "file") == {"a": 1}
    with pytest.raises(FileExistsError), _checkpoint_storage.placed(tmp_path / "other"):
        (tmp_path / "other").write_bytes(b"theirs")
    assert (tmp_path / "other").read_bytes() == b"theirs"
    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(PermissionError):
        _checkpoint_storage.save({"a": 1}, tmp_path / "third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoSuchFileError, match=r"there is no folder .*; create it first"):
        _checkpoint_storage.save({"a": 1}, tmp_path / "nowhere" / "file")


def test_a_name_that_is_as_long_as_names_can_be(tmp_path: Path) -> None:
    _checkpoint_storage.save({"a": 1}, tmp_path / ("x" * 255))
    assert _checkpoint_storage.load(tmp_path / ("x" * 255)) == {"a": 1}


def test_a_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _checkpoint_storage.save({"a": 1}, "file")
    assert _checkpoint_storage.load("file") == {"a": 1}


def test_temporary_files_of_running_saves_are_not_removed(tmp_path: Path) -> None:
    """A file of a killed process is removed. Files that are being written and other files stay."""
    left, others = tmp_path / "file.123-4.tmp", tmp_path / "file.tmp"
    left.write_bytes(b"half")
    others.write_bytes(b"mine")
    with _checkpoint_storage.placed(tmp_path / "file") as going:
        assert not left.exists()
        _checkpoint_storage.save({"a": 1}, tmp_path / "file.2")
        with pytest.raises(FileExistsError), _checkpoint_storage.placed(tmp_path / "file"):
            (tmp_path / "file").write_bytes(b"first")
        assert Path(going.name).exists()
        (tmp_path / "file").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.2", "file.tmp"]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """The process continues after the error. The HDF5 library would end the process, so no file is written with it."""
    program = """
import resource, sys
import numpy as np
from ortrain.trainer import _checkpoint_storage
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
for count in (40, 8):
    try:
        _checkpoint_storage.save({str(i): np.ones(10_000, np.float32) for i in range(count)}, sys.argv[1])
    except OSError as error:
        print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["OSError", "OSError"]
    assert not list(tmp_path.iterdir())


# Program of a parent that forks children, which save to new files in a loop. The parent kills each at a random moment.
PARENT = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from ortrain.trainer import _checkpoint_storage

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(1)


def state(number):
    return {"model": {str(i): np.full(5000, number, np.float32) for i in range(40)}, "step": number}


def save_forever(number):
    while True:
        number += 1
        _checkpoint_storage.save(state(number), folder / str(number))


start = time.perf_counter()
for number in range(5):
    _checkpoint_storage.save(state(number), folder / "try")
    (folder / "try").unlink()
often = (time.perf_counter() - start) / 5
whole = half = last = 0
for _ in range(kills):
    child = os.fork()
    if child == 0:
        try:
            save_forever(last)
        finally:
            os._exit(1)
    time.sleep(chance.uniform(0, 5 * often))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    files = {path for path in folder.iterdir() if not path.suffix}
    half += any(path.suffix for path in folder.iterdir())
    for path in files:
        found, number = _checkpoint_storage.load(path), int(path.name)
        assert found["step"] == number and len(found["model"]) == 40
        assert all((weight == number).all() for weight in found["model"].values())
    last = max([last, *(int(path.name) for path in files)])
    whole += len(files)
    # The next save of the same name removes the leftovers of the killed save.
    for path in list(folder.iterdir()):
        name = folder / path.name.partition(".")[0]
        try:
            _checkpoint_storage.save({}, name)
        except FileExistsError:
            pass
        name.unlink(missing_ok=True)
    assert not list(folder.iterdir())
print(whole, half)
"""


def test_killed_saves_leave_no_file_or_a_complete_one(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", PARENT, str(tmp_path), str(KILLS)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, half = map(int, done.stdout.split())
    assert whole > KILLS / 4, "enough processes reached a save"
    assert half > KILLS / 10, "enough processes were killed during a save"


# Damage.


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Truncate a file, or change some of its bits, bytes or numbers."""
    kind = chance.choice(["cut", "bit", "byte", "number", "ones"])
    if kind == "cut":
        return content[: chance.randrange(len(content))]
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(made))
        if kind == "bit":
            made[at] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            made[at] = chance.randrange(256)
        elif kind == "ones":
            made[at] = 255
        else:
            at &= ~7
            number = chance.choice([2**64 - 1, 2**40, chance.randrange(len(made))])
            made[at : at + 8] = number.to_bytes(8, "little")
    return bytes(made)


def leaves(tree: Any) -> list[Any]:
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]


# Files to damage: ours, and h5py's in the older and the newer layout.
NEWER = {f"größe {number}": {"é": number, "重み" * 40: {}} for number in range(12)}
MANY = {f"ж{number}{'x' * (number % 9 * 500)}": {} for number in range(30)}
DAMAGED: dict[str, Callable[[Path], None]] = {
    "ours": lambda path: _checkpoint_storage.save(state(), path),
    "older": lambda path: write_by_h5py(path, state()),
    "newer": lambda path: write_by_h5py(path, NEWER | {"text": "ü", "weight": np.arange(9)}),
    "newest": lambda path: write_by_h5py(path, NEWER | {"text": "ü", "weight": np.arange(9)}, libver="latest"),
    "ordered": lambda path: write_by_h5py(path, NEWER, libver="latest", track_order=True),
    "many": lambda path: write_by_h5py(path, MANY, libver="latest"),
}


@contextlib.contextmanager
def within(memory: int) -> Iterator[None]:
    """Check that the block allocates less than `memory` bytes."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < memory


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading gives an error or values, and needs little memory. Values may be wrong, because checksums are not
    verified.

    The contents themselves must be validated, because anyone can write a correct checksum.
    """
    monkeypatch.setattr(_parts.Parts, "verify", lambda *_: None)
    DAMAGED[kind](tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    with within(20 * len(whole)):
        damage(whole, tmp_path / "damaged", DAMAGES)


@pytest.mark.parametrize("kind", ["newer", "newest", "ordered", "many"])
def test_damaged_files_with_checksums(tmp_path: Path, kind: str) -> None:
    DAMAGED[kind](tmp_path / "file")
    damage((tmp_path / "file").read_bytes(), tmp_path / "damaged", DAMAGES // 5)


def damage(whole: bytes, path: Path, count: int) -> None:
    """Write and load a number of damaged versions of a file."""
    chance = random.Random(SEED)
    errors = cuts = 0
    for _ in range(count):
        content = damaged(whole, chance)
        path.write_bytes(content)
        try:
            found = _checkpoint_storage.load(path)
        except InvalidArgumentError:
            errors += 1
        else:
            assert len(content) == len(whole), "a file that was cut is an error"
            assert all(isinstance(leaf, np.ndarray | np.generic | bytes) for leaf in leaves(found))
        cuts += len(content) < len(whole)
    assert errors > count / 4
    assert cuts > count / 10


@pytest.mark.parametrize("kind", ["newest", "ordered", "many"])
def test_damaged_starts_of_parts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers after signatures locate the parts of a group: each number is damaged, without a check of checksums."""
    monkeypatch.setattr(_parts.Parts, "verify", lambda *_: None)
    DAMAGED[kind](tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    places = [
        at
        for magic in (b"OHDR", b"OCHK", HEAP, DIRECT, INDIRECT, TREE, NODE, b"BTLF")
        for at in range(len(whole))
        if whole.startswith(magic, at)
    ]
    chance = random.Random(SEED)
    errors = 0
    with within(20 * len(whole)):
        for _ in range(DAMAGES):
            content = bytearray(whole)
            at = chance.choice(places) + chance.randrange(150)
            size = chance.choice([1, 1, 2, 4, 8])
            number = chance.choice([0, 1, 2**8 - 1, 2**16, 2**63, chance.randrange(len(whole)), *places])
            content[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
            (tmp_path / "damaged").write_bytes(content[: len(whole)])
            try:
                found = _checkpoint_storage.load(tmp_path / "damaged")
            except InvalidArgumentError:
                errors += 1
            else:
                assert all(isinstance(leaf, np.ndarray | np.generic | bytes) for leaf in leaves(found))
    assert errors > DAMAGES / 10


@pytest.mark.parametrize("kind", ["groups", "links"])
def test_checksums_find_changed_bytes(tmp_path: Path, kind: str) -> None:
    """A changed byte in a file without values is an error, unless nothing reads the byte."""
    tree = {"größe": {"é": {}}, "重み": {}} if kind == "groups" else {f"ж{number}": {} for number in range(9)}
    write_by_h5py(tmp_path / "file", tree, libver="latest")
    whole = (tmp_path / "file").read_bytes()
    wanted = _checkpoint_storage.load(tmp_path / "file")
    errors = 0
    for at in range(0, len(whole), 3):
        (tmp_path / "damaged").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            assert_equal(_checkpoint_storage.load(tmp_path / "damaged"), wanted)
        except InvalidArgumentError:
            errors += 1
    assert errors > len(whole) / 3 / 2


def test_more_checksums_than_a_file_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums take at most seconds for files of any size."""
    DAMAGED["many"](tmp_path / "file")
    monkeypatch.setattr(_parts, "MAX_CHECKED", (tmp_path / "file").stat().st_size // 2)
    with pytest.raises(InvalidArgumentError, match=r"has more than \d+ bytes of names"):
        _checkpoint_storage.load(tmp_path / "file")


def test_the_checksum() -> None:
    """The checksum matches the hash author's value, for lengths around the block size of twelve bytes."""
    assert _parts.checksum(b"Four score and seven years ago") == 0x17770551
    assert len({_parts.checksum(bytes(size)) for size in range(1, 40)}) == 39


def soft_link(file: h5py.File) -> None:
    file["link"] = h5py.SoftLink("/other")
    file["other"] = 1


def external_link(file: h5py.File) -> None:
    file["link"] = h5py.ExternalLink("secret", "/value")


def hard_link(file: h5py.File) -> None:
    file["one"] = 1
    file["two"] = file["one"]


def loop(file: h5py.File) -> None:
    file.create_group("group")["self"] = file["/"]


def data_elsewhere(file: h5py.File) -> None:
    file.create_dataset("value", (8,), "u1", external=[("secret", 0, 8)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((1,), "i8")
    layout[0] = h5py.VirtualSource("secret", "value", ())
    file.create_virtual_dataset("value", layout)


def huge(file: h5py.File) -> None:
    file.create_dataset("value", (10**12,), "f4")


def huge_and_compressed(file: h5py.File) -> None:
    file.create_dataset("value", (10**9,), "u1", chunks=(10**6,), compression="gzip", fillvalue=7)
    file["value"][: 10**6] = 0


def many_names_of_one_text(file: h5py.File) -> None:
    file.create_dataset("value", (10,), h5py.string_dtype())[:] = "x" * 100


def compound(file: h5py.File) -> None:
    file["value"] = np.zeros(3, [("a", "i4"), ("b", "f8")])


def complex_numbers(file: h5py.File) -> None:
    file["value"] = np.zeros(3, np.complex64)


def named_type(file: h5py.File) -> None:
    file["type"] = np.dtype("f4")
    file.create_dataset("value", (3,), file["type"])


def references(file: h5py.File) -> None:
    file["value"] = file.ref


def nothing(file: h5py.File) -> None:
    file["value"] = h5py.Empty("f4")


def soft_link_of_a_newer_group(file: h5py.File) -> None:
    file["größe"] = h5py.SoftLink("/other")


def external_links_of_a_newer_group(file: h5py.File) -> None:
    for number in range(20):
        file[f"größe {number}"] = h5py.ExternalLink("secret", "/value")


def hard_link_of_a_newer_group(file: h5py.File) -> None:
    for number in range(20):
        file[f"größe {number}"] = number
    file["größe"] = file["größe 7"]


def loop_of_newer_groups(file: h5py.File) -> None:
    above = file.create_group("größe")
    above.create_group("é")["größe"] = above


def one_more_bit(file: h5py.File) -> None:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(31)
    space = h5py.h5s.create_simple((3,))
    h5py.h5d.create(file.id, b"value", kind, space).write(space, space, np.ones(3, np.int32))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (soft_link, "symbolic link"),
        (external_link, "a link to another file"),
        (hard_link, "two references have the same address"),
        (loop, "two references have the same address"),
        (data_elsewhere, "data in other files"),
        (virtual, "newer format"),
        (huge, "past its end"),
        (huge_and_compressed, "compressed"),
        (many_names_of_one_text, "an array of texts"),
        (compound, "of a type that ORTTrainer does not write"),
        (complex_numbers, "of a type that ORTTrainer does not write"),
        (named_type, "neither a group nor an array|does not write"),
        (references, "of a type that ORTTrainer does not write"),
        (nothing, "an array of a newer format"),
        (soft_link_of_a_newer_group, "symbolic link"),
        (external_links_of_a_newer_group, "a link to another file"),
        (hard_link_of_a_newer_group, "two references have the same address"),
        (loop_of_newer_groups, "two references have the same address"),
        (one_more_bit, "of a type that ORTTrainer does not write"),
    ],
)
def test_foreign_files(tmp_path: Path, make: Callable[[h5py.File], None], sentence: str) -> None:
    """Links, other files and memory bombs are rejected, without other reads and without large allocations."""
    _checkpoint_storage.save({"value": b"a secret"}, tmp_path / "secret")
    with h5py.File(tmp_path / "file", "w-") as file:
        make(file)
    tracemalloc.start()
    with pytest.raises(InvalidArgumentError, match=sentence) as raised:
        _checkpoint_storage.load(tmp_path / "file")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(raised.value).startswith(str(tmp_path / "file"))
    assert most < 10_000_000


def test_additional_headers_of_older_h5py(tmp_path: Path) -> None:
    """Modification times, attributes and small values in the header are accepted."""
    values = np.arange(5, dtype=np.float32)
    with h5py.File(tmp_path / "file", "w-") as file:
        file.create_dataset("times", data=values, track_times=True)
        file["attributes"] = values
        for number in range(20):
            file["attributes"].attrs[f"note {number}"] = "a note"
        file["filled"] = values
        file.create_dataset("fill", data=values, fillvalue=3)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((5,))
        compact = h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32LE, space, creation)
        compact.write(space, space, values)
    assert_equal(_checkpoint_storage.load(tmp_path / "file"), read_by_h5py(tmp_path / "file"))


# Malicious files.


def with_checksum(data: bytes) -> bytes:
    return data + struct.pack("<I", _parts.checksum(data))


def newest(root: bytes, *others: bytes) -> bytes:
    """Return a file of the newest format with these parts. The first part, at 48, is the header of the root group."""
    parts = b"".join([root, *others])
    return with_checksum(struct.pack("<8s4B4Q", _hdf5.SIGNATURE, 3, 8, 8, 0, 0, 2**64 - 1, 48 + len(parts), 48)) + parts


def header(*messages: tuple[int, bytes]) -> bytes:
    """Return a header of version 2."""
    block = b"".join(struct.pack("<BHB", kind, len(data), 0) + data for kind, data in messages)
    return with_checksum(struct.pack("<4s2BI", b"OHDR", 2, 2, len(block)) + block)


def link(name: bytes, address: int, kind: int = 0) -> tuple[int, bytes]:
    return 0x06, struct.pack("<4BH", 1, 0x19, kind, 1, len(name)) + name + struct.pack("<Q", address)


NO_HEAP = (0x02, bytes(2) + b"\xff" * 16)
EMPTY = header(NO_HEAP)
SIZE_OF_TWO = len(header(NO_HEAP, link(b"a", 0), link(b"a", 0)))


def test_handwritten_file(tmp_path: Path) -> None:
    root = header(NO_HEAP, link("ü".encode(), 48 + SIZE_OF_TWO + 1), link(b"a", 48 + SIZE_OF_TWO + 1 + len(EMPTY)))
    assert len(root) == SIZE_OF_TWO + 1
    (tmp_path / "file").write_bytes(newest(root, EMPTY, EMPTY))
    assert _checkpoint_storage.load(tmp_path / "file") == {"a": {}, "ü": {}} == read_by_h5py(tmp_path / "file")


def going_on(at: int, size: int) -> tuple[int, bytes]:
    return 0x10, struct.pack("<2Q", at, size)


def further(*messages: tuple[int, bytes]) -> bytes:
    block = b"".join(struct.pack("<BHB", kind, len(data), 0) + data for kind, data in messages)
    return with_checksum(b"OCHK" + block)


START = len(header(NO_HEAP, going_on(0, 0)))
HARMFUL: dict[str, tuple[bytes, str]] = {
    "a header that goes on in itself": (
        newest(header(NO_HEAP, going_on(48 + START, 28)), further(going_on(48 + START, 28))),
        "two references have the same address",
    ),
    "a header that goes on past the end": (newest(header(NO_HEAP, going_on(8, 2**63))), "has a header of more than"),
    "a header that goes on in nothing": (newest(header(NO_HEAP, going_on(1, 0))), "a checksum is wrong"),
    "a header that goes on in a header": (
        newest(header(NO_HEAP, going_on(48 + START, len(EMPTY))), EMPTY),
        "the continuation of a header has a wrong signature",
    ),
    "a header of terabytes": (
        newest(struct.pack("<4s2BQ", b"OHDR", 2, 3, 2**40) + bytes(50)),
        "has a header of more than 16777216 bytes",
    ),
    "a header of version 3": (newest(b"OHDR\x03" + EMPTY[5:]), "objects of a newer format"),
    "a name twice": (newest(header(NO_HEAP, link(b"a", 48), link(b"a", 48))), "a group has a name twice"),
    "no name": (newest(header(NO_HEAP, link(b"", 48))), "a link of a group is invalid"),
    "a path for a name": (newest(header(NO_HEAP, link(b"a/b", 48))), "a link of a group is invalid"),
    "a name that ends early": (newest(header(NO_HEAP, link(b"a\0b", 48))), "a link of a group is invalid"),
    "a name that is no text": (newest(header(NO_HEAP, link(b"\xff", 48))), "a name is not UTF-8"),
    "a name that is too long": (
        newest(header(NO_HEAP, (0x06, struct.pack("<3BH", 1, 0x11, 1, 2**16 - 1) + b"a"))),
        "a link of a group is invalid",
    ),
    "a link of another kind": (newest(header(NO_HEAP, link(b"a", 48, 70))), "a link of the kind 70"),
    "a group in itself": (newest(header(NO_HEAP, link(b"a", 48))), "two references have the same address"),
    "links without a group": (newest(header(link(b"a", 48))), "the members of a group are inconsistent"),
    "a group of both layouts": (newest(header(NO_HEAP, (0x11, bytes(16)))), "the members of a group are inconsistent"),
    "a heap past the end": (newest(header((0x02, struct.pack("<2x2Q", 2**62, 48)))), "past its end"),
    "a heap that is a header": (
        newest(header((0x02, struct.pack("<2x2Q", 48, 48)))),
        "two references have the same address",
    ),
    "links here and there": (
        newest(header((0x02, struct.pack("<2x2Q", 48, 48)), link(b"a", 48))),
        "the link information of a group is invalid",
    ),
    "an array that is shorter than it says": (
        newest(
            header(
                (0x01, struct.pack("<4BQ", 2, 1, 0, 1, 4)),
                (0x03, b"\x10\0\0\0" + struct.pack("<I2H", 1, 0, 8)),
                (0x08, b"\x03\0" + struct.pack("<H", 4) + b"a"),
            )
        ),
        "an array in a header is longer than the header",
    ),
    "a file that a program has open": (
        with_checksum(struct.pack("<8s4B4Q", _hdf5.SIGNATURE, 3, 8, 8, 1, 0, 2**64 - 1, 48, 48)),
        "the superblock has unsupported sizes or flags",
    ),
    "a version that is not there yet": (_hdf5.SIGNATURE + b"\x04" + bytes(90), "is HDF5 of a newer format"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_malicious_files(tmp_path: Path, case: str) -> None:
    content, sentence = HARMFUL[case]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=sentence):
        _checkpoint_storage.load(tmp_path / "file")


def test_links_that_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heap objects that extend from their links to the ends of their blocks overlap, and are rejected."""
    write_by_h5py(tmp_path / "file", {f"ж{number:04}": {} for number in range(3000)}, libver="latest")
    made = bytearray((tmp_path / "file").read_bytes())
    at = changed = 0
    while (at := made.find(b"BTLF", at + 1)) >= 0:
        # A record has a hash of four bytes and an ID: 0, an offset of four bytes, and a length of two bytes.
        for record in range(at + 6, at + 6 + 20 * 11, 11):
            offset = int.from_bytes(made[record + 5 : record + 9], "little")
            # A row has four blocks; blocks of the first row have 512 bytes.
            size = 512 << max(offset.bit_length() - 9 - 2 - 1, 0)
            made[record + 9 : record + 11] = (size - offset % size).to_bytes(2, "little")
            changed += 1
    assert changed > 1000
    (tmp_path / "made").write_bytes(made)
    monkeypatch.setattr(_parts.Parts, "verify", lambda *_: None)
    with within(20 * len(made)), pytest.raises(InvalidArgumentError, match="its parts overlap"):
        _checkpoint_storage.load(tmp_path / "made")


def test_parts_that_overlap(tmp_path: Path) -> None:
    """Many names of one large array do not become a large dict of arrays."""
    count, size = 50, 100_000
    _checkpoint_storage.save({str(i): np.full(1 if i else size, i, np.int64) for i in range(count)}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    large = _write.Plan()
    # Small arrays get the layout and shape of the large array.
    large_layout = content[content.index(b"\x03\x01") :][:18]
    assert large_layout[10:] == (8 * size).to_bytes(8, "little")
    assert large.end == 96
    made = bytearray(content)
    at = 0
    while (at := content.find(b"\x03\x01", at + 1)) >= 0:
        if content[at + 10 : at + 18] == (8).to_bytes(8, "little"):
            made[at : at + 18] = large_layout
            shape = content.rindex(b"\x01\x01\x01\0\0\0\0\0", 0, at)
            made[shape + 8 : shape + 24] = 2 * size.to_bytes(8, "little")
    (tmp_path / "made").write_bytes(made)
    with pytest.raises(InvalidArgumentError, match="its parts overlap"):
        _checkpoint_storage.load(tmp_path / "made")
    one = _checkpoint_storage.load(tmp_path / "made", key="7")
    assert one.shape == (size,)


def test_cuts_anywhere(tmp_path: Path) -> None:
    _checkpoint_storage.save({"a": {"b": np.arange(5)}, "c": "text"}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(InvalidArgumentError):
            _checkpoint_storage.load(tmp_path / "cut")


# Pickles.

UTC, EAST = datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=2))
PLAIN: list[Any] = [
    *(None, True, 1, -5, 2**70, -(2**3000), 1.5, float("inf"), 1 + 2j, "x", "ü" * 300, "\ud800", b"abc", b"x" * 70_000),
    *(bytearray(b"abc"), [1, [2]], (), (1,), (1, 2, 3, 4), {1: 2, "a": [3]}, {(1, (2,)): 3}, {1, 2}, set()),
    *(frozenset([1]), frozenset(), bytearray(), collections.OrderedDict(a=1)),
    *(collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: {}})),
    *(collections.deque([1, 2], 5), collections.deque([1])),
    *(collections.Counter("aab"), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4, 5, 6)),
    *(datetime.datetime(2020, 1, 2, tzinfo=UTC), datetime.time(1, 2, tzinfo=EAST), datetime.timedelta(5, 6, 7), UTC),
    *(EAST, float),
    *(np.dtype(code) for code in (">f4", "M8[25us]", "m8", "U", "S3", "V5", "?", "c16")),
    *(np.dtype([("a", "<i4"), ("b", "f4", (2,)), ("c", [("d", ">u2")])]), np.dtype(("f4", (2, 3)))),
    *(np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((4, 3))), np.array("abc"), np.array(["a", "bcd"])),
    *(np.zeros((0, 3)), np.array([True, False]), np.array(5, np.uint8), np.array(["2020", "2021"], "M8[ns]")),
    *(np.zeros(3, [("a", "i4"), ("b", "f4", (2,))]), np.arange(3, dtype=">i2"), np.array([1j]), np.arange(2000.0)),
    *(np.float32(1.5), np.int64(3), np.bool_(True), np.str_("ab"), np.str_(""), np.bytes_(b"x"), np.complex64(1)),
    *(np.datetime64("2020-01-01"), np.timedelta64(5, "s"), np.zeros(1, [("a", "i4")])[0]),
]  # fmt: skip


def assert_same_value(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.flags.writeable) == (wanted.dtype, wanted.shape, True)
        assert found.tobytes("A") == wanted.tobytes("A")
    else:
        assert found == wanted


@pytest.mark.parametrize("protocol", [3, 4])
def test_plain_values(protocol: int) -> None:
    """Values equal pickle's."""
    for value in PLAIN:
        data = pickle.dumps(value, protocol=protocol)
        assert_same_value(_unpickler.loads(data), pickle.loads(data))
    array = np.arange(3)
    found = _unpickler.loads(pickle.dumps({"all": PLAIN, "twice": [array, array]}, protocol=protocol))
    assert found["twice"][0] is found["twice"][1]
    found["twice"][0][0] = 5
    ring: list[Any] = []
    ring.append(ring)
    found = _unpickler.loads(pickle.dumps(ring, protocol=protocol))
    assert found[0] is found


def test_plain_values_in_a_file(tmp_path: Path) -> None:
    text = _checkpoint_storage.to_serialized_hex(PLAIN)
    assert pickle.loads(bytes.fromhex(text))[1] is True
    _checkpoint_storage.save({"user_dict": text}, tmp_path / "file")
    found = _checkpoint_storage.from_serialized_hex(_checkpoint_storage.load(tmp_path / "file", key="user_dict"))
    assert found[:5] == PLAIN[:5]


def test_arrays_of_older_numpy() -> None:
    """NumPy 1's names for the constructors of arrays and numbers are accepted."""
    for value in (np.arange(3), np.float32(2)):
        data = pickle.dumps(value, protocol=3).replace(b"numpy._core.", b"numpy.core.")
        assert b"numpy.core.multiarray" in data
        assert_same_value(_unpickler.loads(data), value)


class Marker:
    """An object with a pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_names_os_system(tmp_path: Path) -> None:
    """The error names the function, and nothing runs."""
    for value in (Marker(tmp_path / "ran"), {"a": [Marker(tmp_path / "ran")]}):
        text = _checkpoint_storage.to_serialized_hex(value)
        with pytest.raises(InvalidArgumentError, match=r"asks for posix\.system.*allow_pickle=True"):
            _checkpoint_storage.from_serialized_hex(text)
    for data in (
        b"cos\nsystem\n(S'touch x'\ntR.",
        b"(S'touch x'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    ):
        with pytest.raises(InvalidArgumentError, match=r"asks for os\.system|STRING"):
            _unpickler.loads(data)
    assert not (tmp_path / "ran").exists()
    _checkpoint_storage.from_serialized_hex(text, allow_pickle=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (print, "builtins.print"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (Path("x"), "pathlib"),
        (ValueError("x"), "builtins.ValueError"),
        (slice(1), "builtins.slice"),
        (np.array([{}], object), "an array of objects"),
        (np.zeros(1, [("a", object)]), "an array of objects"),
        (np.random.default_rng(0), "numpy.random"),
        (np.ma.masked_array([1]), "numpy.ma"),
        (np.load, "numpy.load"),
        (InvalidArgumentError("x"), "ortrain.errors.InvalidArgumentError"),
    ],
)
def test_other_classes_are_named(value: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"the pickle asks for {name}"):
        _checkpoint_storage.from_serialized_hex(_checkpoint_storage.to_serialized_hex(value))


@pytest.mark.parametrize("text", ["", "x", "80", b"\xff", "8004", "80049", "00" * 9], ids=repr)
def test_invalid_pickles(text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="user_dict is"):
        _checkpoint_storage.from_serialized_hex(text)


def nested(count: int, opened: bytes, closed: bytes) -> bytes:
    return b"\x80\x04" + opened * count + closed * count + b"."


# A tuple with itself as both elements, 60 times nested: 2 to the power of 60 parts.
DOUBLED = (
    b"\x80\x04})\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60)) + b"K\x01s."
)
# An array with a million elements in few bytes.
ARRAY = pickle.dumps(np.zeros(1000, np.uint8), 4)
REFUSED = {
    "a key of many parts": DOUBLED,
    "a deep key": b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "a deep frozen set": b"\x80\x04" + b"(" * 100_000 + b"\x91" * 100_000 + b".",
    "a deep deque": b"\x80\x04" + b"ccollections\ndeque\n)R" * 1000 + b"a" * 999 + b".",
    "a deep defaultdict": b"\x80\x04" + b"ccollections\ndefaultdict\n)RK\x01" * 1000 + b"K\x01" + b"s" * 1000 + b".",
    "a text longer than the pickle": b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "bytes longer than the pickle": b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.",
    "a bytearray longer than the pickle": b"\x80\x05\x96" + (2**60).to_bytes(8, "little") + b"x.",
    "a long bytearray by a number": b"\x80\x04cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "many copies of bytes": b"\x80\x04B\x00\x10\x00\x00" + bytes(4096) + b"\x940("
    + b"cbuiltins\nbytearray\nh\x00\x85R" * 1000 + b"t.",
    "many sets of a list": b"\x80\x04](" + b"K\x01" * 4000 + b"e\x940(" + b"cbuiltins\nset\nh\x00\x85R" * 1000 + b"t.",
    "a larger shape": ARRAY.replace(b"M\xe8\x03", b"M\xff\xff"),
    "a negative shape": ARRAY.replace(b"M\xe8\x03", b"J\xff\xff\xff\xff"),
    "a type with a flag": ARRAY.replace(b"u1", b"O8"),
    "a call of data": b"\x80\x04K\x01K\x02\x85R.",
    "a call of a list": b"\x80\x04]K\x02\x85R.",
    "a call of float": b"\x80\x04cbuiltins\nfloat\nX\x01\x00\x00\x001\x85R.",
    "a state of a dict": b"\x80\x04}}b.",
    "no value": b"\x80\x04.",
    "two values": b"\x80\x04NN.",
    "a mark": b"\x80\x04(.",
    "an append to a dict": b"\x80\x04}Na.",
    "an unknown memo": b"\x80\x04h\x07.",
    "a place of the memo far away": b"\x80\x04N\x94r\xff\xff\xff\xff.",
    "many empty sets": b"\x80\x04(" + b"\x8f" * 200_000 + b"t.",
    "an extension": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "a new object": b"\x80\x04cdatetime\ndate\n)\x81.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "a date that is none": b"\x80\x04cdatetime\ndate\nC\x04\x07\xe4\x01\xff\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bombs(case: str) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidArgumentError):
        _unpickler.loads(REFUSED[case])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Each byte needs at most a pointer, an entry and an object.
    assert most < 100 * len(REFUSED[case]) + 5_000_000


@pytest.mark.parametrize(
    "data",
    [
        nested(100_000, b"]", b"a")[:-2] + b".",
        nested(100_000, b"(", b"t"),
        b"\x80\x04" + b"}K\x01" * 50_000 + b"N" + b"s" * 50_000 + b".",
        b"\x80\x04" + b"ccollections\nOrderedDict\n)RK\x01" * 50_000 + b"N" + b"s" * 50_000 + b".",
    ],
    ids=["lists", "tuples", "dicts", "ordered"],
)
def test_deep_values_end_no_process(data: bytes) -> None:
    program = "import sys; from ortrain import _unpickler; _unpickler.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", program], input=data, check=True)


def test_damaged_pickles() -> None:
    whole = pickle.dumps(PLAIN, protocol=4)
    chance = random.Random(SEED)
    errors = 0
    for _ in range(PICKLES):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            # Most bytes belong to one large string.
            data[chance.choice([chance.randrange(len(data)), -chance.randrange(1, 6000)])] = chance.randrange(256)
        try:
            found = _unpickler.loads(bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data))])]))
        except InvalidArgumentError:
            errors += 1
        else:
            with contextlib.suppress(ValueError, OverflowError, RecursionError):
                repr(found)
    assert errors > PICKLES / 5
