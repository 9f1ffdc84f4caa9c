"""Tables and files of arrays as sources of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

import ortrain
from ortrain import NodeArg, data
from ortrain.errors import InvalidArgumentError, NoSuchFileError

HOUSES = """\
rooms,city,area,price
3,Rome,70.5,210.0
4,Oslo,99.0,400.5
2,Rome,45.25,120.0
"""


def numbers(width: int | str = "features") -> list[NodeArg]:
    return [NodeArg("x", "tensor(float)", ["batch", width])]


def written(folder: Path, text: str, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def take_rows(source: Any, rows: list[int] | None = None) -> Any:
    chosen = range(len(source)) if rows is None else rows
    return source.take(np.array(chosen, np.int64), 0, True)


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(InvalidArgumentError) as error:
        data.open(path, **settings)
    return str(error.value).replace(str(path), path.name)


def test_numbers_and_texts_become_one_input(tmp_path: Path) -> None:
    source = data.open(written(tmp_path, HOUSES), target="price", model_inputs=numbers(4))
    batch = take_rows(source, [1, 2])
    # Rooms, Oslo, Rome, area.
    assert batch.inputs["x"].tolist() == [[4, 1, 0, 99], [2, 0, 1, 45.25]]
    assert batch.inputs["x"].dtype == batch.targets["target"].dtype == np.float32
    assert batch.targets["target"].tolist() == [400.5, 120]
    assert batch.weights is None
    assert source.labels is None
    assert source.preview(1) == {"rooms": 4, "city": "Oslo", "area": 99}


def test_columns_fill_the_inputs_of_their_names(tmp_path: Path) -> None:
    """A text column is an index for an embedding; the other columns fill the other input."""
    inputs = [NodeArg("city", "tensor(int64)", ["batch"]), NodeArg("numbers", "tensor(double)", ["batch", 2])]
    path = written(tmp_path, HOUSES)
    batch = take_rows(data.open(path, target="price", model_inputs=inputs))
    assert batch.inputs["city"].tolist() == [1, 0, 1]
    assert batch.inputs["city"].dtype == np.int64
    assert batch.inputs["numbers"].tolist() == [[3, 70.5], [4, 99], [2, 45.25]]
    texts = [NodeArg("city", "tensor(string)", ["batch", 1])]
    assert take_rows(data.open(path, target="price", model_inputs=texts)).inputs["city"].tolist() == [
        ["Rome"],
        ["Oslo"],
        ["Rome"],
    ]


def test_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "a;label\n1;no\n2;yes\n3;no\n")
    source = data.open(path)
    assert source.classes == ("no", "yes")
    assert take_rows(source).targets["target"].tolist() == [0, 1, 0]
    source = data.open(written(tmp_path, "a,y\n1,2\n2,0\n"))
    assert take_rows(source).targets["target"].dtype == np.int64
    assert source.classes is None
    source = data.open(written(tmp_path, HOUSES), target=("price", "area"))
    assert take_rows(source).targets["target"].tolist() == [[210, 70.5], [400.5, 99], [120, 45.25]]


def test_other_data_is_read_like_the_training_data(tmp_path: Path) -> None:
    train = data.open(written(tmp_path, HOUSES), target="price", model_inputs=numbers(4))
    path = written(tmp_path, "price,area,rooms,city\n1,50,1.5,Rome\n", "other.csv")
    description = json.loads(json.dumps(train.describe()))
    assert (description["kind"], description["rows"], len(description["hash"])) == ("table", 3, 64)
    for like in (train, description):
        batch = take_rows(data.open(path, like=like, model_inputs=numbers(4)))
        assert batch.inputs["x"].tolist() == [[1.5, 0, 1, 50]]
    unlabelled = written(tmp_path, "id,area,rooms,city\n7,50,1,Oslo\n", "new.csv")
    batch = take_rows(data.open(unlabelled, like=train, labelled=False, model_inputs=numbers(4)))
    assert batch.inputs["x"].tolist() == [[1, 1, 0, 50]]
    assert batch.targets == {}


def test_parquet_and_arrow(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array([1.5, 2.5], pa.float32()),
            "b": pa.array([True, False]),
            "c": pa.array(["u", "v"]).dictionary_encode(),
            "label": ["x", "y"],
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    feather.write_feather(table, tmp_path / "t.feather")
    with pa.ipc.new_stream(tmp_path / "t.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("t.parquet", "t.feather", "t.arrow"):
        source = data.open(tmp_path / name, model_inputs=numbers(4))
        batch = take_rows(source)
        assert batch.inputs["x"].tolist() == [[1.5, 1, 1, 0], [2.5, 0, 0, 1]]
        assert batch.targets["target"].tolist() == [0, 1]


def test_a_kind_that_only_later_rows_show(tmp_path: Path) -> None:
    rows = "".join(f"{number},0\n" for number in range(100_000))
    source = data.open(written(tmp_path, f"a,y\n{rows}0.5,1\n"))
    assert take_rows(source, [99_999, 100_000]).inputs["x"].tolist() == [[99_999], [0.5]]


@pytest.mark.parametrize(
    ("text", "settings", "sentence"),
    [
        ("", {}, "data.csv is empty; expected a first line with the names of the columns"),
        ("a,y\n", {}, "data.csv has no rows"),
        ("1,2\n3,4\n", {}, "data.csv: the first line must have the names of the columns, got 1, 2"),
        ("a,a\n1,2\n", {}, "data.csv has two columns with the name 'a'"),
        ("a,y\n1,0\nNA,1\n", {}, "data.csv: the column 'a' has no value in row 1"),
        ("a,y\n1.5,0\nnan,1\n", {}, "data.csv: the column 'a' has no value in row 1"),
        (
            "a,y\n1\n",
            {},
            "data.csv cannot be read as a table: CSV parse error: Expected 2 columns, got 1: 1",
        ),
        (
            "a,b\n1,0\n",
            {},
            "data.csv: no column is named target, label or y; name the column with target= (--target); the file has "
            "a, b",
        ),
        (
            "a,price\n1,0\n",
            {"target": "prize"},
            "data.csv has no column 'prize'; it has a, price; did you mean 'price'?",
        ),
        ("a,y\n1,0\n", {"columns": ["a", "y"]}, "the column 'y' is the target and cannot be an input, too"),
        ("a,y\n1,0\n", {"columns": ["c"]}, "data.csv has no column 'c'; it has a, y"),
        (
            HOUSES,
            {"target": "price", "model_inputs": numbers(3)},
            "data.csv: the model's input 'x' takes 3 numbers per row, the columns give 4: rooms, city (2 categories), "
            "area; choose them with columns= (--columns)",
        ),
        (
            "x,y\n1,0\n",
            {"target": "x", "model_inputs": numbers()},
            "the model's input 'x' is the target; choose another column with target= (--target)",
        ),
        (
            "a,y\n" + "".join(f"{n},{n}\n" for n in range(20)) + "oops,1\n",
            {"model_inputs": numbers(1)},
            "data.csv: the column 'a' has 'oops' in row 20, nearly all other rows have numbers",
        ),
        ("a,y\n1,rose\n2,\n", {}, "data.csv: the column 'y' has no label in row 1"),
        (HOUSES, {"target": "price", "mean": 0.5}, "mean is a setting of images; this data is of the kind table"),
        (
            HOUSES,
            {"kind": "tabel"},
            "kind must be one of images, table, arrays, jsonl, text, audio, got 'tabel'; did you mean 'table'?",
        ),
    ],
)
def test_tables_that_do_not_fit(text: str, settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert refused(written(tmp_path, text), **settings) == sentence


def test_other_data_that_differs(tmp_path: Path) -> None:
    train = data.open(written(tmp_path, HOUSES), target="price")
    for text, sentence in [
        (
            "rooms,city,price\n1,Rome,2\n",
            "val.csv has no column 'area', which the training data has; it has rooms, city, price",
        ),
        (
            "rooms,city,area,price,tax\n1,Rome,2,2,2\n",
            "val.csv has the column 'tax', which the training data does not have; it has rooms, city, area, price",
        ),
        (
            "rooms,city,area,price\n1,Rom,2,2\n",
            "val.csv: the column 'city' has 'Rom' in row 0, which the training data does not have; it has 'Oslo', "
            "'Rome'; did you mean 'Rome'?",
        ),
        (
            "rooms,city,area,price\n1,Rome,2,2\nmany,Rome,2,2\n",
            "val.csv: the column 'rooms' has 'many' in row 1, its other rows are numbers",
        ),
    ]:
        assert refused(written(tmp_path, text, "val.csv"), like=train) == sentence


def test_paths_that_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoSuchFileError, match="there is no file or folder"):
        data.open(tmp_path / "nowhere.csv")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == f"empty is an empty folder; data is one of:\n{data.FORMS}"
    assert refused(written(tmp_path, "", "a.docx")).startswith("a.docx is a file .docx; data is one of:\n")


def arrays(rows: int = 6) -> dict[str, Any]:
    return {
        "x": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4),
        "y": np.arange(rows, dtype=np.int64) % 3,
    }


def write_arrays(folder: Path, form: str) -> Path:
    path = folder / f"data.{form}"
    if form == "npz":
        np.savez(path, **arrays())
    elif form == "h5":
        import h5py

        with h5py.File(path, "w") as file:
            for name, values in arrays().items():
                file[name] = values
    elif form == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            for name, values in arrays().items():
                file.create_dataset(name, data=values, chunks=True, compression="gzip")
    elif form == "safetensors":
        entries, content = {}, b""
        for name, values in arrays().items():
            kind = {"f": "F32", "i": "I64"}[values.dtype.kind]
            begin, content = len(content), content + values.tobytes()
            entries[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [begin, len(content)]}
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    else:
        path.mkdir()
        for name, values in arrays().items():
            np.save(path / name, values)
    return path


@pytest.mark.parametrize("form", ["npz", "h5", "hdf5", "safetensors", "folder"])
def test_arrays(form: str, tmp_path: Path) -> None:
    source = data.open(write_arrays(tmp_path, form), model_inputs=numbers(4))
    batch = take_rows(source, [4, 1, 4])
    assert batch.inputs["x"].tolist() == arrays()["x"][[4, 1, 4]].tolist()
    assert batch.targets["target"].tolist() == [1, 1, 1]
    assert len(source) == 6
    like = data.open(tmp_path / f"data.{form}", like=source, labelled=False, model_inputs=numbers(4))
    assert take_rows(like, [0]).targets == {}


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\xc0\x3f\x00\xc0")
    source = data.open(tmp_path / "a.safetensors", labelled=False)
    assert take_rows(source).inputs["x"].tolist() == [[1.5], [-2]]


def test_arrays_with_other_names_and_types(tmp_path: Path) -> None:
    path = tmp_path / "digits.npz"
    images = np.arange(8, dtype=np.uint8).reshape(2, 4)
    np.savez_compressed(path, x_train=images, y_train=np.array([[1], [0]]), x_test=images, y_test=np.zeros(2))
    source = data.open(path, target="y_train", columns="x_train", model_inputs=numbers(4))
    batch = take_rows(source)
    assert batch.inputs["x"].dtype == np.float32
    assert batch.inputs["x"].tolist() == images.tolist()
    np.savez(path, x=np.zeros((2, 4)), y=np.array([[True, False], [False, True]]))
    assert take_rows(data.open(path)).targets["target"].dtype == np.float32


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    values = arrays()
    for changes, settings, sentence in [
        ({"y": np.zeros(5)}, {}, "data.npz: the array 'x' has 6 rows, 'y' has 5"),
        (
            {},
            {"model_inputs": numbers(5)},
            "data.npz: the array 'x' has the shape [6, 4], the model's input 'x' takes ['batch', 5]",
        ),
        (
            {"z": np.zeros(6)},
            {"model_inputs": [NodeArg("pixels", "tensor(float)", ["batch", 4])]},
            "data.npz has no array for the model's input 'pixels'; it has x, z; name the array like the input, or "
            "choose one with columns= (--columns)",
        ),
        (
            {},
            {"target": "x", "model_inputs": numbers(4)},
            "the model's input 'x' is the target; choose another array with target= (--target)",
        ),
        ({}, {"target": "labels"}, "data.npz has no array 'labels'; it has x, y"),
    ]:
        np.savez(path, **(values | changes))
        assert refused(path, **settings) == sentence
    values["x"][3, 2] = np.nan
    np.savez(path, **values)
    with pytest.raises(InvalidArgumentError, match="the array 'x' is NaN in row 3, column 2"):
        take_rows(data.open(path))
    path.write_bytes(b"PK")
    assert refused(path) == "data.npz cannot be read as arrays: File is not a zip file"
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    assert "the header of a safetensors file is missing" in refused(tmp_path / "a.safetensors")
    (tmp_path / "a.h5").write_bytes(b"HDF5")
    assert refused(tmp_path / "a.h5") == "a.h5 cannot be read as arrays: it is not an HDF5 file"


def test_split_is_stratified_and_depends_on_its_seed(tmp_path: Path) -> None:
    rows = "".join(f"{number},{'ab'[number >= 80]}\n" for number in range(100))
    source = data.open(written(tmp_path, f"x,label\n{rows}"))
    train, validation = data.split(source, 0.2, seed=3)
    assert (len(train), len(validation)) == (80, 20)
    labels = take_rows(validation).targets["target"]
    assert np.bincount(labels).tolist() == [16, 4]
    seen = np.concatenate([take_rows(part).inputs["x"][:, 0] for part in (train, validation)])
    assert sorted(seen.tolist()) == list(range(100))
    again = data.split(source, 0.2, seed=3)[1]
    assert np.array_equal(take_rows(again).inputs["x"], take_rows(validation).inputs["x"])
    other = data.split(source, 0.2, seed=4)[1]
    assert not np.array_equal(take_rows(other).inputs["x"], take_rows(validation).inputs["x"])
    assert train.classes == ("a", "b")
    with pytest.raises(InvalidArgumentError, match=r"must be above 0 and below 1, got 1\.5"):
        data.split(source, 1.5)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError) as error:
        data.open(written(tmp_path, HOUSES), target="price")
    assert str(error.value) == (
        "a table needs the package pyarrow, which is not installed: pip install 'ortrain[train]'"
    )


def test_data_is_imported_at_first_use() -> None:
    from test_import import imported

    libraries = {"PIL", "pyarrow", "tokenizers", "soundfile", "tqdm", "matplotlib", "h5py"}
    found = imported("import ortrain")
    assert not {"ortrain.data", *libraries} & found
    assert not libraries & imported("import ortrain\nortrain.data.open")
    assert ortrain.data is data


def test_weights_of_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "a,w,y\n1,0.5,0\n2,2,1\n")
    batch = take_rows(data.open(path, sample_weight="w"))
    assert batch.weights.tolist() == [0.5, 2]
    assert batch.weights.dtype == np.float32
    assert batch.inputs["x"].tolist() == [[1], [2]]
    assert refused(path, sample_weight="v") == "data.csv has no column 'v'; it has a, w, y"
    np.savez(tmp_path / "data.npz", **arrays(2), w=np.array([1, 3]))
    batch = take_rows(data.open(tmp_path / "data.npz", sample_weight="w"))
    assert batch.weights.tolist() == [1, 3]
    assert list(batch.inputs) == ["x"]
