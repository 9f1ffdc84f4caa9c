"""The parameters trained by default equal PyTorch's parameters, for networks of timm, transformers and our own.

PyTorch exports each network with fresh weights: with its older exporter without folding, and with its newer exporter,
which optimizes (tests/in_torch/zoo.py). A constant computed from a parameter counts as this parameter if it has the
same size. Other computed constants (expanded, looked up, picked) may be trained or not.
"""

from __future__ import annotations

import json
import os
import re
from concurrent import futures
from pathlib import Path

import environments
import pytest

import ortrain

TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "in_torch" / "zoo.py"
# Networks of one process: loading torch takes the time of exporting a small network.
BATCH = 4
WAYS = ("script", "export", "export-optimized")
# Files with another choice: constants that are trained (+) or not (-), and the reason. Names are patterns.
NUMBER = "a number that the exporter computed of a parameter"
ZEROS = "zeros that the exporter wrote for a missing bias, or a fresh bias, which it stored once"
SINES = "a table of sines, which is a parameter without training"
DIFFERENCES: dict[str, list[tuple[str, str]]] = {
    "efficientvim_m1/export-optimized": [(r"-select_24", NUMBER)],
    "mamba/export-optimized": [(r"-unsqueeze_5", "minus the exponential of logarithms of 1, 2, 3 ...")],
    "nf_regnet_b0/export-optimized": [(r"\+val_(1067|481)", ZEROS)],
    "nf_resnet26/export-optimized": [(r"\+val_(253|45|459)", ZEROS)],
    "own-groups/export-optimized": [(r"-val_10[46]", "a normalization of one channel")],
    "own-numbers/export-optimized": [(r"-exp", NUMBER)],
    "poolformerv2_s12/export-optimized": [(r"\+val_(153|28|282|710)", ZEROS)],
    "whisper-encoder/export-optimized": [(r"-embedding", SINES)],
}


def names() -> list[str]:
    return environments.printed_in_environment(environments.torch(), SCRIPT, "--list").split()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the processes of torch, one for each network on demand."""
    return tmp_path_factory.mktemp("zoo")


def differences(folder: Path, way: str) -> set[str]:
    """Return trained constants that are no parameters (+), and parameters that are not trained (-)."""
    torch = json.loads((folder / "parameters.json").read_text())
    found = ortrain.inspect(folder / f"{way}.onnx")
    assert found.obstacle is None
    constants = {info.name for info in found.parameters}
    wanted = set(torch["trained"])
    trained = set(found.names("trained"))
    if way == "export-optimized":
        computed = {name for name in torch["computed"] if name not in (*torch["frozen"], *torch["unreached"])}
        wanted |= {name for name in computed if torch["computed"][name]}
        trained -= computed - wanted
    wanted &= constants
    return {f"+{name}" for name in trained - wanted} | {f"-{name}" for name in wanted - trained}


def found_in(folder: Path, batch: list[str]) -> dict[str, set[str]]:
    """Return the differences of each file of some networks, exported by one PyTorch process; removes the files."""
    environments.in_environment(environments.torch(), SCRIPT, str(folder), *batch)
    found = {}
    for name in batch:
        for way in WAYS:
            if (folder / name / f"{way}.onnx").exists():
                found[f"{name}/{way}"] = differences(folder / name, way)
        for file in (folder / name).glob("*.onnx*"):
            file.unlink()
    return found


def test_parameters(exported: Path) -> None:
    asked = names()
    batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
    found: dict[str, set[str]] = {}
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in futures.as_completed([pool.submit(found_in, exported, batch) for batch in batches]):
            found |= one.result()
            differ = [f"{file}: {sorted(names)}" for file, names in one.result().items() if names]
            print(f"{len(found)} files", *differ, sep="\n")
    expected = {file: [pattern for pattern, _ in DIFFERENCES.get(file, [])] for file in found}
    new = [
        f"{file}: {one}"
        for file, ones in found.items()
        for one in sorted(ones)
        if not any(re.fullmatch(pattern, one) for pattern in expected[file])
    ]
    assert not new, "\n".join(new)
    old = [
        f"{file}: {pattern}"
        for file, patterns in expected.items()
        for pattern in patterns
        if not any(re.fullmatch(pattern, one) for one in found[file])
    ]
    assert not old, "no longer different:\n" + "\n".join(old)
    assert set(DIFFERENCES) <= set(found)
