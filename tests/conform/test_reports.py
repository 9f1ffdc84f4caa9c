"""Reports in a browser, and callbacks with the libraries that they write for, in an environment of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import environments
import pytest
import test_report

import ortrain
from ortrain._fit.report import write_report

TESTS = Path(__file__).parent.parent
PACKAGES = Path(ortrain.__file__).parent.parent
# Least contrast of a text (WCAG 2.1, AA).
CONTRAST = 4.5
WINDOWS = ("desktop", "dark", "phone", "phone-dark")


def run(script: str, *arguments: str) -> Any:
    """Run a script in the environment, with ortrain on its path, and return the JSON of its last line."""
    python = environments.reports()
    variables = os.environ | {"PYTHONPATH": str(PACKAGES)}
    command = [python, TESTS / "in_reports" / script, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Findings of the browser on the reports of test_report.py."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "this test needs a browser: apt-get install chromium"
    folder = tmp_path_factory.mktemp("reports")
    for name, make in test_report.CASES.items():
        write_report(folder / f"{name.replace(' ', '-')}.html", make())
    found = run("browser.py", chromium, str(folder))
    print(f"pictures: {folder}")
    assert len(found) == len(test_report.CASES)
    return found


def luminance(color: str) -> float:
    channels = [float(text) / 255 for text in re.findall(r"[\d.]+", color)[:3]]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted([luminance(first), luminance(second)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_nothing_is_loaded_and_nothing_complains(looks: Any) -> None:
    for name, windows in looks.items():
        for window in WINDOWS:
            assert windows[window]["messages"] == [], (name, window)
            assert windows[window]["requests"] == [], (name, window)


def test_pages_fit_their_windows(looks: Any) -> None:
    for name, windows in looks.items():
        for window in WINDOWS:
            measures = windows[window]
            assert measures["width"] <= measures["window"], (name, window)
            assert not [text for text in measures["texts"] if text["outside"]], (name, window)


def test_texts_are_readable(looks: Any) -> None:
    for name, windows in looks.items():
        for window in WINDOWS:
            for text in windows[window]["texts"]:
                found = contrast(text["color"], text["background"])
                assert found >= CONTRAST, (name, window, text, found)
                assert text["size"] >= 11, (name, window, text)


def test_dark_and_paper(looks: Any) -> None:
    for name, windows in looks.items():
        assert luminance(windows["dark"]["texts"][0]["background"]) < 0.05, name
        assert luminance(windows["desktop"]["texts"][0]["background"]) > 0.8, name
        assert windows["paper"] == "rgb(255, 255, 255)", name


def test_data_of_libraries(tmp_path: Path) -> None:
    """The rows of each library train like arrays, to the same bits."""
    found = run("libraries.py", str(tmp_path))
    assert {"datasets", "h5py", "pandas", "polars", "pyarrow", "zarr"} <= {name.split()[0] for name in found}
    expected = found.pop("arrays")
    assert {name: values for name, values in found.items() if values != expected} == {}


def test_trackers(tmp_path: Path) -> None:
    """TensorBoard, MLflow, pandas and matplotlib have the values of the history."""
    found = run("trackers.py", str(tmp_path))
    history = found["history"]
    for epoch in range(3):
        train = {tag: value for tag, value, step in found["train"] if step == epoch and tag.startswith("epoch_")}
        assert train["epoch_loss"] == pytest.approx(history["loss"][epoch], abs=1e-5)
        assert train["epoch_accuracy"] == pytest.approx(history["accuracy"][epoch], abs=1e-5)
        assert {"epoch_learning_rate", "epoch_steps_per_second"} <= set(train)
        validation = {tag: value for tag, value, step in found["validation"] if step == epoch}
        assert validation["epoch_loss"] == pytest.approx(history["val_loss"][epoch], abs=1e-5)
    assert [step for tag, _, step in found["train"] if tag == "batch_loss"] == list(range(6))
    assert sum(tag == "fc2.bias" for tag, _, _ in found["train"]) == 3
    for name, values in history.items():
        assert found["mlflow"][name] == [[epoch, value] for epoch, value in enumerate(values)]
        assert found["frame"][name] == values
    assert found["status"] == "FINISHED"
    assert (found["params"]["kind"], found["params"]["epochs"]) == ("perceptron", "3")
    assert found["frame"]["epoch"] == [0, 1, 2]
    assert found["titles"] == ["loss", "accuracy"]
    assert found["lines"] == [[history["loss"], history["val_loss"]], [history["accuracy"], history["val_accuracy"]]]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
