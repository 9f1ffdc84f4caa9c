"""What is trained by default is what PyTorch calls parameters, over networks of timm, transformers and our own.

Each network is exported with its fresh weights by PyTorch's older exporter without folding and by its newer one, which
optimizes (tests/in_torch/zoo.py). A constant that the exporter computed of a parameter counts as this one if it has its
size; others (expanded, looked up, picked) may be trained or not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import environments
import pytest

import ortrain

TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "in_torch" / "zoo.py"
WAYS = ("script", "export", "export-optimized")
# Files whose choice differs: constants that are trained (+) or not (-), and the reason. Patterns of names.
FOLDED = "a fresh parameter of one value, looked up once by the exporter"
NUMBER = "a number that the exporter computed of a parameter"
ZEROS = "zeros that the exporter wrote for a missing bias, or a fresh bias, which it stored once"
SINES = "a table of sines, which is a parameter without training"
DIFFERENCES: dict[str, list[tuple[str, str]]] = {
    "efficientformerv2_s0/export-optimized": [(r"-val_281", "it is read behind the result"), (r"-val_46[45]", FOLDED)],
    "efficientvim_m1/export-optimized": [(r"-select_24", NUMBER)],
    "efficientvit_m0/export-optimized": [(r"-val_152", NUMBER), (r"\+select_12", FOLDED)],
    "levit_128s/export-optimized": [(r"-val_(303|79)", FOLDED)],
    "mamba/export-optimized": [(r"-unsqueeze_5", "minus the exponential of logarithms of 1, 2, 3 ...")],
    "nf_regnet_b0/export-optimized": [(r"\+val_(1067|481)", ZEROS)],
    "nf_resnet26/export-optimized": [(r"\+val_(253|45|459)", ZEROS)],
    "own-groups/export": [(r"-layers\.12\.(weight|bias)", "a normalization of one channel")],
    "own-groups/export-optimized": [(r"-val_10[46]", "a normalization of one channel")],
    "own-numbers/export-optimized": [(r"-exp", NUMBER)],
    "own-written/export-optimized": [(r"-expand", FOLDED)],
    "poolformerv2_s12/export-optimized": [(r"\+val_(153|28|282|710)", ZEROS)],
    "roformer/export-optimized": [(r"-unsqueeze_13", SINES)],
    "whisper-encoder/export-optimized": [(r"-embedding", SINES)],
}


def names() -> list[str]:
    return environments.printed_in_environment(environments.torch(), SCRIPT, "--list").split()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that torch's processes write, one for each network when it is needed."""
    return tmp_path_factory.mktemp("zoo")


def differences(folder: Path, way: str) -> set[str]:
    """Constants that are trained and are no parameters (+), and parameters that are not (-)."""
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


def test_parameters(exported: Path) -> None:
    wrong, files = [], 0
    for name in names():
        environments.in_environment(environments.torch(), SCRIPT, str(exported), name)
        folder = exported / name
        for way in WAYS:
            if not (folder / f"{way}.onnx").exists():
                continue
            files += 1
            known = [pattern for pattern, _ in DIFFERENCES.get(f"{name}/{way}", [])]
            rest = [one for one in differences(folder, way) if not any(re.fullmatch(p, one) for p in known)]
            wrong += [f"{name}/{way}: {one}" for one in sorted(rest)]
        for file in folder.glob("*.onnx*"):
            file.unlink()
    print(f"{files} files, {len(DIFFERENCES)} differ for known reasons")
    assert not wrong, "\n".join(wrong)
