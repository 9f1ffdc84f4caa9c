"""Batches of `ortrain.gradient.data_loader`: their number, their content, and errors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from ortrain._ortrain import OrtValue
from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.gradient.data_loader import OrtDataLoader


def data(rows: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 10)), rng.standard_normal(rows), rng.uniform(1, 2, rows)


@pytest.mark.parametrize(
    ("rows", "size", "count", "each"), [(100, 5, 20, 5), (101, 5, 21, 5), (11, 100, 1, 11), (12, 0, 1, 12)]
)
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_b21_counts_and_shapes(rows: int, size: int, count: int, each: int, random: bool, weighted: bool) -> None:
    x, y, w = data(rows)
    loader = OrtDataLoader(x, y, w if weighted else None, batch_size=size, random_iter=random)
    shapes = [(each, 10), (each, 1), (each,)][: 3 if weighted else 2]
    batches = list(loader.iter_ortvalue())
    assert all(isinstance(value, OrtValue) for batch in batches for value in batch)
    assert [[tuple(value.shape()) for value in batch] for batch in batches] == [shapes] * count
    assert [[array.shape for array in batch] for batch in loader.iter_numpy()] == [shapes] * count
    assert len(loader) == rows
    assert loader.desc == [((rows, 10), np.float64), ((rows, 1), np.float64), ((rows,), np.float64)][: len(shapes)]
    assert len(loader.data_np) == len(loader.data_ort) == len(shapes)
    assert repr(loader) == f"OrtDataLoader(..., ..., batch_size={size}, device='cpu')"


def test_b21_in_order_values_are_the_arrays() -> None:
    x, y, w = data(12)
    loader = OrtDataLoader(x, y, w, batch_size=5, random_iter=False)
    starts = [0, 5, 7]
    for start, arrays, values in zip(starts, loader.iter_numpy(), loader.iter_ortvalue(), strict=True):
        part = slice(start, start + 5)
        for array, value, whole in zip(arrays, values, (x, y[:, None], w), strict=True):
            assert (array == whole[part]).all()
            assert (value.numpy() == array).all()
            # The values share the memory of the data, without a copy.
            assert value.data_ptr() == array.ctypes.data


def test_every_row_is_drawn() -> None:
    x, y, _ = data(6)
    loader = OrtDataLoader(x, y, batch_size=5)
    np.random.seed(0)  # noqa: NPY002  (what the loader draws by)
    firsts = {float(batch[0][0, 0]) for _ in range(20) for batch in loader.iter_numpy()}
    # Batches of five of six rows begin at the first or the second row.
    assert firsts == {float(x[0, 0]), float(x[1, 0])}


def test_b21_pickled() -> None:
    x, y, w = data(12)
    for weights in (None, w):
        loader = OrtDataLoader(x, y, weights, batch_size=5, random_iter=False)
        again = pickle.loads(pickle.dumps(loader))
        assert (again.desc, repr(again)) == (loader.desc, repr(loader))
        for mine, theirs in zip(again.iter_numpy(), loader.iter_numpy(), strict=True):
            assert all((one == other).all() for one, other in zip(mine, theirs, strict=True))


def test_several_columns_stay() -> None:
    x, _, _ = data(4)
    loader = OrtDataLoader(x, x[:, :3], batch_size=2)
    assert loader.desc[1] == ((4, 3), np.float64)


def test_bound_by_address() -> None:
    x, y, w = data(6)
    bound: list[tuple[str, Any, tuple[int, ...], int]] = []

    class Binding:
        def bind_input(self, name: str, device: object, kind: Any, shape: tuple[int, ...], address: int) -> None:
            bound.append((name, kind, shape, address))

    loader = OrtDataLoader(x, y, w, batch_size=4, random_iter=False)
    assert list(loader.iter_bind(Binding(), ["X", "y", "w", "rate"])) == [4, 4]
    assert [entry[:3] for entry in bound[:3]] == [
        ("X", np.float64, (4, 10)),
        ("y", np.float64, (4, 1)),
        ("w", np.float64, (4,)),
    ]
    # The second batch would reach past the end, so it is shifted back to the third row.
    assert bound[3][3] == loader.data_np[0].ctypes.data + 2 * 10 * 8
    with pytest.raises(NotImplementedError, match=r"expected 3 names .*, got 2"):
        next(loader.iter_bind(Binding(), ["X", "y"]))


def test_b21_refused() -> None:
    x, y, w = data(6)
    with pytest.raises(ValueError, match=r"X has 6 rows, but y has shape \(5,\)"):
        OrtDataLoader(x, y[:5])
    with pytest.raises(ValueError, match=r"X has 6 rows, but sample_weight has shape \(5,\)"):
        OrtDataLoader(x, y, w[:5])
    with pytest.raises(ValueError, match="sample_weight must have one weight for each of the 6 rows"):
        OrtDataLoader(x, y, np.ones((6, 2)))
    with pytest.raises(InvalidArgumentError, match="X must have at least one row"):
        OrtDataLoader(x[:0], y[:0])
    with pytest.raises(ValueError, match="cpu2"):
        OrtDataLoader(x, y, device="cpu2")
    with pytest.raises(UnsupportedError, match="cuda"):
        OrtDataLoader(x, y, device="cuda")
