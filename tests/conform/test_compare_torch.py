"""The command ``ortrain compare`` with PyTorch: the losses and gradients of each step agree with autograd.

A DataLoader trains like arrays.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import environments
import pytest

import ortrain

SCRIPT = Path(__file__).parent.parent / "in_torch" / "compare.py"
PACKAGES = Path(ortrain.__file__).parent.parent
# Cases that agree, with the number of compared tensors: the loss and the gradients of two steps.
TENSORS = {
    "labels": 10,
    "floats": 10,
    "zeros and ones": 10,
    "probabilities": 10,
    "absolute": 10,
    "convnet": 24,
    "head": 6,
    "network": 14,
}
REFUSED = {
    "dropout": r"node '.*' \(Dropout\) draws random numbers",
    "lstm": r"onnx2torch cannot convert the model: NotImplementedError: .*LSTM",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("compare"))
    results: dict[str, Any] = json.loads(
        environments.in_environment(environments.torch(), SCRIPT, str(PACKAGES), folder)
    )
    return results


@pytest.mark.parametrize("case", TENSORS)
def test_steps_are_those_of_torch(found: dict[str, Any], case: str) -> None:
    status, out, err = found[case]
    assert status == 0, out + err
    assert f"\ntorch, steps                  {TENSORS[case]} tensors; " in out


def test_data_loader() -> None:
    """Tensors of a DataLoader train like arrays, to the same bits, with workers and with a short last batch."""
    script = SCRIPT.with_name("loader.py")
    results: dict[str, Any] = json.loads(environments.in_environment(environments.torch(), script, str(PACKAGES)))
    expected = results.pop("arrays")
    assert len(results) == 4
    assert {name: values for name, values in results.items() if values != expected} == {}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_compared(found: dict[str, Any], case: str) -> None:
    status, _, err = found[case]
    assert status == 1
    assert re.search(REFUSED[case], err), err
    assert err.count("\n") == 1
