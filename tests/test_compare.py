"""The comparison with other libraries: its workloads and its report. What it measures is asserted nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import workloads  # noqa: E402

# Checksums of one weight and of the first batch, so that numbers of different years are numbers of the same thing.
CHECKSUMS = {
    "mlp_tiny": ("net.0.weight", 826583901, 3686702848, 743007526),
    "mlp": ("net.0.weight", 3163971504, 1863637176, 4200808068),
    "lenet": ("c2.weight", 1751442089, 1863637176, 4200808068),
    "mobilenetv2_96": ("features.0.weight", 275632032, 1357939769, 3499238677),
    "resnet18_224": ("stem.0.weight", 1004655667, 4035020692, 3492214959),
    "lstm": ("rnn.weight_hh_l0", 543829391, 3043570103, 3302063475),
    "bert_mini": ("blocks.0.att.q.weight", 4021678008, 4127398298, 3067789604),
    "gpt2_small6": ("blocks.0.att.q.weight", 754245191, 3759117160, 2027035289),
}


@pytest.mark.parametrize("name", workloads.NAMES)
def test_weights_and_batches_are_always_the_same(name: str) -> None:
    weight, *wanted = CHECKSUMS[name]
    model = workloads.load(name)
    onnx.checker.check_model(model, full_check=True)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert set(workloads.about(name)["trainable_names"]) <= set(values)
    data, labels = workloads.batch(name, 0)
    assert [zlib.crc32(np.ascontiguousarray(array).tobytes()) for array in (values[weight], data, labels)] == wanted


def test_a_comparison_in_small(tmp_path: Path) -> None:
    """Ours and the reference start from the same losses; the report says so, and by what."""
    command = [sys.executable, ROOT / "benches" / "compare.py", "mlp", "--rounds", "2", "--seconds", "0.01"]
    done = subprocess.run(
        [*command, "--folder", tmp_path, "--json", tmp_path / "found.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree" in done.stdout
    run = json.loads((tmp_path / "found.json").read_text())
    assert run["machine"]["cores"] >= 1
    (result,) = run["results"]
    assert result["workload"] == "mlp"
    assert result["version"] == "1.19.2"
    assert len(result["ratios"]) == 2
    assert result["ours_losses"][-1] != result["ours_losses"][0]
