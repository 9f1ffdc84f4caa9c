"""The history of a training: a mapping of lists, and its files."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortrain._fit.history import History
from ortrain.errors import InvalidArgumentError


def example() -> History:
    """Return a history without a validation in its second epoch."""
    history = History({"epochs": 3})
    history.add_epoch(0, {"loss": 1 / 3, "val_loss": np.float32(0.1)})
    history.add_epoch(1, {"loss": 2e-300})
    history.add_epoch(2, {"loss": math.nan, "val_loss": math.inf})
    return history


def test_mapping_of_lists() -> None:
    """As in Keras: ``history.history`` is a dictionary of lists, ``history.epoch`` a list from zero."""
    history = example()
    assert history.epoch == [0, 1, 2]
    assert list(history) == ["loss", "val_loss"]
    assert history["val_loss"] == [float(np.float32(0.1)), math.inf]
    assert history.history["loss"][:2] == [1 / 3, 2e-300]
    assert dict(history.items()) == history.history
    assert "accuracy" not in history
    assert history.params["epochs"] == 3
    assert repr(history) == "History(3 epochs: loss=nan, val_loss=inf)"
    assert repr(History()) == "History(0 epochs)"
    with pytest.raises(KeyError, match="it has loss, val_loss; did you mean 'val_loss'"):
        history["val_los"]


def test_a_file_holds_the_same_bits(tmp_path: Path) -> None:
    history = example()
    history.to_csv(tmp_path / "history.csv")
    text = (tmp_path / "history.csv").read_text()
    assert text.splitlines()[0] == "epoch,loss,val_loss"
    assert text.splitlines()[2] == "1,2e-300,"
    again = History.read_csv(tmp_path / "history.csv")
    assert repr(again.rows()) == repr(history.rows())
    again.to_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "history.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.csv", "history.csv"]


@pytest.mark.parametrize("text", ["epoch,loss\n0,much\n", "loss\n1\n", "epoch,loss\nfirst,1\n"])
def test_another_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"other\.csv, line 2: not a line of a history"):
        History.read_csv(tmp_path / "other.csv")


def test_a_failed_write_keeps_the_file(tmp_path: Path) -> None:
    history = example()
    history.to_csv(tmp_path / "history.csv")
    before = (tmp_path / "history.csv").read_bytes()
    history.history["loss"].append(0.5)
    with pytest.raises(ValueError, match="argument"):
        history.to_csv(tmp_path / "history.csv")
    assert (tmp_path / "history.csv").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_state() -> None:
    history = example()
    history.add_steps(loss=np.array([0.5, 0.25], np.float32), learning_rate=[0.1, 0.2])
    again = History()
    again.restore(history.state())
    assert repr(again.rows()) == repr(history.rows())
    assert again.steps == history.steps == {"loss": [0.5, 0.25], "learning_rate": [0.1, 0.2]}
    again.add_steps(loss=[1.0])
    assert again.steps["loss"] == [0.5, 0.25, 1.0]


def test_pickle() -> None:
    """The data of the run, for a report, stay behind."""
    history = example()
    history._make_report = lambda: 1 / 0  # type: ignore[assignment,return-value]
    again = pickle.loads(pickle.dumps(history))
    assert repr(again.rows()) == repr(history.rows())
    assert again._make_report is None


class Axes:
    """Axes of matplotlib, which record the calls."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[float], list[float], str]] = []
        self.texts: dict[str, str] = {}

    def plot(self, xs: Any, ys: Any, label: str, marker: str | None) -> None:
        self.lines.append((list(xs), list(ys), label))

    def set(self, **texts: str) -> None:
        self.texts |= texts

    def legend(self) -> None:
        pass


def test_plot() -> None:
    """Training and validation are in one picture, each value at its own epoch."""
    history = example()
    axes = Axes()
    assert history.plot(axes=axes) is axes
    assert [line[0] for line in axes.lines] == [[1, 2, 3], [1, 3]]
    assert [line[2] for line in axes.lines] == ["training", "validation"]
    assert axes.texts == {"xlabel": "epoch", "title": "loss"}
    with pytest.raises(InvalidArgumentError, match="'accuracy' is not in the history"):
        history.plot("accuracy", axes=[axes])
    with pytest.raises(InvalidArgumentError, match="no epoch has ended"):
        History().plot()


def test_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has ``rows``, with the epoch as the index. A stand-in for pandas records it."""
    made: list[Any] = []

    class DataFrame:
        def __init__(self, rows: Any, columns: Any) -> None:
            made.append((rows, columns))

        def set_index(self, name: str) -> str:
            return f"indexed by {name}"

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    history = example()
    assert history.to_pandas() == "indexed by epoch"
    assert repr(made) == repr([(history.rows(), ["epoch", "loss", "val_loss"])])


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed"):
        example().to_pandas()
    with pytest.raises(ImportError, match=r"pip install 'ortrain\[train\]'"):
        example().plot()
