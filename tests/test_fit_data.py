"""Forms of data that ``fit`` takes: the same rows give the same history."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fit_models import bound_to_batch, language_model, net, rows, two_ways

import ortrain
from ortrain.data import Batch


def history_of(x: Any, y: Any = None, *, model: bytes | None = None, **arguments: Any) -> dict[str, list[float]]:
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False} | arguments
    return ortrain.Model(model or net(3), learning_rate=0.05).fit(x, y, **arguments).history


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    return history_of(*rows())


class Rows:
    """Source of rows."""

    def __init__(self) -> None:
        self.x, self.y = rows()
        self.seeds: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Any, seed: int, training: bool) -> Batch:
        self.seeds.append(seed)
        return Batch({"x": self.x[rows]}, {"target": self.y[rows]})


class LazyArray:
    """Array that is read in parts by ascending positions, like an array of HDF5 or Zarr."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.largest = 0

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            assert (np.diff(at) > 0).all()
        found = self._array[at]
        self.largest = max(self.largest, len(found))
        return found


class Dataset:
    """Dataset of Hugging Face, in its duck type."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.features = {"label": SimpleNamespace(names=["a", "b", "c"])}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, at: Any) -> Any:
        return {name: np.asarray(column)[at].tolist() for name, column in self._columns.items()}


def batches(size: int = 16) -> list[tuple[Any, Any]]:
    x, y = rows()
    return [(x[at : at + size], y[at : at + size]) for at in range(0, 40, size)]


def generator() -> Iterator[Any]:
    for _ in range(2):
        yield from batches()


def test_forms_of_arrays(expected: Any, tmp_path: Path) -> None:
    x, y = rows()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    lazy = LazyArray(x)
    for form in (x, x.astype(np.float64), x.tolist(), {"x": x}, [*x], mapped, lazy):
        assert history_of(form, y) == expected
        assert history_of(form, y, shuffle=True) == history_of(x, y, shuffle=True)
    assert lazy.largest < 40 or lazy.largest <= 64
    assert history_of({"x": x, "y": y}, "y") == expected
    assert history_of(x, LazyArray(y)) == expected


def test_batches(expected: Any) -> None:
    x, y = rows()
    assert history_of(batches()) == expected
    assert history_of(iter(batches()), epochs=1)["loss"] == expected["loss"][:1]
    assert history_of(generator(), steps_per_epoch=3) == expected
    assert (
        history_of(
            [{"x": x[:16], "labels": y[:16]}, {"x": x[16:32], "labels": y[16:32]}, {"x": x[32:], "labels": y[32:]}]
        )
        == expected
    )
    weighted = [(a, b, np.ones(len(a), np.float32)) for a, b in batches()]
    assert history_of(weighted)["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    # More steps than a pass: the next pass goes on.
    ten = history_of(batches(), steps_per_epoch=10, epochs=1)
    assert ten["loss"][0] < expected["loss"][0]


def test_validation_batches_begin_anew() -> None:
    model = ortrain.Model(net(3), learning_rate=0.05)
    history = model.fit(*rows(), validation_data=batches(), validation_steps=2, epochs=2)
    x, y = rows()
    assert model.evaluate(x[:32], y[:32], batch_size=16) == history["val_loss"][-1]
    assert model.evaluate(batches(), steps=2) == history["val_loss"][-1]
    with pytest.raises(ortrain.InvalidArgumentError, match="learning_rate='find' reads the data before the training"):
        ortrain.Model(net(3), learning_rate="find").fit(generator())
    found = ortrain.Model(net(3), learning_rate="find")
    found.fit(batches(), epochs=2)
    assert found.range_test is not None


def test_hdf5(expected: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    x, y = rows()
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = x, y
    with h5py.File(tmp_path / "data.h5") as file:
        assert history_of(file["x"], file["y"]) == expected
        assert history_of(file["x"], file["y"][:], shuffle=True) == history_of(x, y, shuffle=True)


def test_a_source_of_rows(expected: Any) -> None:
    source = Rows()
    assert history_of(source) == expected
    assert history_of(source, shuffle=True) == history_of(*rows(), shuffle=True)
    first, source.seeds = source.seeds, []
    history_of(source)
    history_of(source, shuffle=True)
    assert source.seeds == first
    assert len(set(first)) > 6
    found = history_of(source, validation_split=0.25)
    assert found == history_of(*rows(), validation_split=0.25)


def test_datasets(expected: Any) -> None:
    x, y = rows()
    assert history_of(Dataset({"x": x, "label": y})) == expected
    assert history_of(Dataset({"pixels": x, "kind": y}), "kind") == expected
    with pytest.raises(ortrain.InvalidArgumentError, match="the columns a, b of the dataset do not fit the inputs x"):
        history_of(Dataset({"a": x, "b": x, "label": y}))


def tables() -> list[Callable[[dict[str, Any]], Any]]:
    found: list[Callable[[dict[str, Any]], Any]] = []
    for module, make in (("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "table")):
        library = pytest.importorskip(module) if module in sys.modules else None
        if library is None:
            try:
                library = __import__(module)
            except ImportError:
                continue
        found.append(getattr(library, make))
    return found


class Frame:
    """Table of pandas, in its duck type."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = {name: np.asarray(column) for name, column in columns.items()}
        self.columns = list(columns)
        self.iloc = None

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]


@pytest.mark.parametrize("make", [Frame, *tables()])
def test_tables(expected: Any, make: Any) -> None:
    x, y = rows()
    columns = {f"c{at}": x[:, at] for at in range(4)}
    assert history_of(make(columns | {"kind": y}), "kind") == expected
    assert history_of(make({"kind": y} | columns), "kind") == expected
    assert history_of(make(columns), y) == expected
    texts = np.array(["ant", "bee", "cat"])[y]
    assert history_of(make(columns | {"kind": texts.tolist()}), "kind") == expected
    # Other tables may have the columns in another order, and the target or not.
    trained = ortrain.Model(net(3), learning_rate=0.05)
    trained.fit(
        make(columns | {"kind": texts.tolist()}), "kind", validation_data=make({"kind": texts.tolist()} | columns)
    )
    other = dict(reversed((columns | {"kind": texts.tolist()}).items()))
    assert trained.evaluate(make(other)) == trained.evaluate(x, texts)
    assert np.array_equal(trained.predict(make(other)), trained.predict(x))
    del other["kind"]
    assert np.array_equal(trained.predict(make(other)), trained.predict(x))
    del other["c2"]
    with pytest.raises(
        ortrain.InvalidArgumentError, match="the table has no column 'c2', which the table of the training"
    ):
        trained.predict(make(other))
    a, b = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    two = make({"a": a, "b": b, "size": a + b})
    with pytest.raises(
        ortrain.InvalidArgumentError, match=r"x\['a'\] has rows of the shape \[\], but input 'a' is float32\[batch, 2\]"
    ):
        history_of(two, "size", model=two_ways())
    with pytest.raises(ortrain.InvalidArgumentError, match="no column 'sizes'; it has a, b, size; did you mean 'size'"):
        history_of(two, "sizes")
    with pytest.raises(ortrain.InvalidArgumentError, match="column 'x' is the target and an input of the model"):
        history_of(make({"x": a, "b": b}), "x")
    with pytest.raises(ortrain.InvalidArgumentError, match=r"column 'c1' has the type .* encode the column"):
        history_of(make(columns | {"c1": texts.tolist(), "kind": y}), "kind")
    broken = x.copy()
    broken[21, 2] = np.nan
    with pytest.raises(ortrain.InvalidArgumentError, match="row 21 has nan in input 'x', column 'c2'"):
        history_of(make({f"c{at}": broken[:, at] for at in range(4)} | {"kind": y}), "kind")


def test_torch_batches(expected: Any) -> None:
    class Tensor:
        """Tensor of another library."""

        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **arguments: Any) -> Any:
            return self._array.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

        shape = property(lambda self: self._array.shape)
        dtype = "torch.float32"

        def __getitem__(self, at: Any) -> Any:
            return Tensor(self._array[at])

    x, y = rows()
    assert history_of(Tensor(x), Tensor(y)) == expected
    assert history_of([(Tensor(a), Tensor(b)) for a, b in batches()]) == expected


def test_a_fixed_batch(expected: Any) -> None:
    # The batch axis can be opened.
    assert history_of(*rows(), model=net(3, batch=4)) == expected
    # It cannot: the last batch is filled up, and the added rows do not count.
    x, y = rows()
    model = ortrain.Model(bound_to_batch(16), metrics=["accuracy"])
    scores = model.predict(x)
    assert scores.shape == (40, 3)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    loss, accuracy = model.evaluate(x, y)
    assert loss == pytest.approx(-np.log(p[np.arange(40), y]).mean(), rel=1e-5)
    assert accuracy == pytest.approx((p.argmax(1) == y).mean())
    weight = np.linspace(0, 2, 40)
    loss, _ = model.evaluate(x, y, sample_weight=weight)
    assert loss == pytest.approx((-np.log(p[np.arange(40), y]) * weight).mean(), rel=1e-5)


def test_a_fixed_batch_trains_like_an_open_one() -> None:
    x, y = rows(10)
    fixed = ortrain.Model(bound_to_batch(4), optimizer="sgd", learning_rate=0.5, trainable=["w", "b"])
    fixed.fit(x, y, shuffle=False)
    weights = {
        name: parameter.data.astype(np.float64)
        for name, parameter in ortrain.Model(bound_to_batch(4), loss="cross_entropy").state.parameters
        if name in "wb"
    }
    for at in range(0, 10, 4):
        xs, ys = x[at : at + 4].astype(np.float64), y[at : at + 4]
        # The added rows are the first ones again, and the model sees them.
        xs = xs + 0.25 * xs[np.arange(4) % len(xs)].mean(0)
        z = xs @ weights["w"] + weights["b"]
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        p[np.arange(len(ys)), ys] -= 1
        weights["w"] -= 0.5 * xs.T @ p / len(ys)
        weights["b"] -= 0.5 * p.mean(0)
    for name, values in weights.items():
        assert fixed.state.parameters[name].data == pytest.approx(values, abs=1e-5)


def test_batches_of_different_lengths() -> None:
    rng = np.random.default_rng(0)
    data = [
        (rng.integers(0, 11, (size, length)), rng.integers(0, 11, (size, length)))
        for size, length in ((4, 3), (2, 7), (4, 5))
    ]
    model = ortrain.Model(language_model(), metrics=["accuracy"], learning_rate=0.1)
    history = model.fit(data, epochs=8)
    assert history["loss"][-1] < history["loss"][0]
    assert history["accuracy"][-1] > history["accuracy"][0]


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.zeros((40, 5), np.float32), r"x has rows of the shape \[5\], but input 'x' is float32\[batch, 4\]"),
        (np.zeros((40, 2, 2), np.float32), r"to change the shape, pass x.reshape\(-1, 4\)"),
        (np.array([["a"] * 4] * 40), "x has the type <U1, but input 'x' is float32"),
        ({"z": np.zeros((40, 4))}, "x has 'z', which is no input of the model; the inputs are x"),
        ({}, "x has no array for input 'x'"),
        ([[1.0, 2.0], [3.0]], "x has rows of different lengths"),
        (3, "x must be an array"),
        (np.zeros((0, 4), np.float32), "x has 0 rows, but y has 40"),
    ],
)
def test_data_that_does_not_fit(x: Any, sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError, match=sentence):
        history_of(x, rows()[1])


def test_bad_rows_are_named() -> None:
    x, y = rows()
    broken = x.copy()
    broken[17, 2] = np.nan
    for shuffle in (False, True):
        with pytest.raises(ortrain.InvalidArgumentError, match="row 17 has nan in input 'x', column 2"):
            history_of(broken, y, shuffle=shuffle)
    model = ortrain.Model(net(3), learning_rate=0.05)
    before = model.fit(x, y) and {name: parameter.data.copy() for name, parameter in model.state.parameters}
    with pytest.raises(ortrain.InvalidArgumentError, match="row 17 has nan"):
        model.evaluate(broken, y)
    assert all(np.array_equal(parameter.data, before[name]) for name, parameter in model.state.parameters)
    targets = rows()[0][:, :1]
    targets[5] = np.inf
    with pytest.raises(ortrain.InvalidArgumentError, match="row 5 has inf in the target"):
        history_of(x, targets, model=net(1))
    labels = y.copy()
    labels[29] = 3

    class Lazy(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.y = labels

        def row_name(self, row: int) -> str:
            return f"line {row + 2} of data.csv"

    # The first rows decide about the loss; the row is found when it is read.
    with pytest.raises(ortrain.InvalidArgumentError, match=r"the label of line 31 of data.csv is 3"):
        history_of(Lazy())
    with pytest.raises(
        ortrain.InvalidArgumentError, match="the data has ended after 6 batches, but epoch 2 of 4 steps needs 8"
    ):
        history_of(generator(), steps_per_epoch=4)
    with pytest.raises(
        ortrain.InvalidArgumentError, match="the generator has ended: its 3 batches were those of epoch 1"
    ):
        history_of(iter(batches()))
    with pytest.raises(ortrain.InvalidArgumentError, match="no batches"):
        history_of([])
    with pytest.raises(ortrain.InvalidArgumentError, match=r"a batch must be \(x, y\)"):
        history_of([(1, 2, 3, 4)])


def test_a_loss_that_diverges() -> None:
    x, y = rows()
    # The loss of a validation may overflow: that is a result.
    history = ortrain.Model(net(1)).fit(x, y * 1.0, validation_data=(x, np.full(40, 1e30)), epochs=2)
    assert not np.isfinite(history["val_loss"]).any()
    with pytest.raises(
        ortrain.AnomalyError, match=r"the loss is (nan|inf) in step \d+ of epoch 1.*; use a smaller learning_rate"
    ):
        ortrain.Model(net(1), optimizer="sgd", learning_rate=1e20).fit(x, y * 1.0, batch_size=8)
