"""The comparison with other libraries: its workloads and its report. The measured times are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import report  # noqa: E402
import workloads  # noqa: E402

# Checksums of one weight and of the first batch, so that results of different years measure the same workload.
CHECKSUMS = {
    "mlp_tiny": ("net.0.weight", 826583901, 3686702848, 743007526),
    "mlp": ("net.0.weight", 3163971504, 1863637176, 4200808068),
    "lenet": ("c2.weight", 1751442089, 1863637176, 4200808068),
    "mobilenetv2_96": ("features.0.weight", 275632032, 1357939769, 3499238677),
    "mobilenetv2_224": ("features.0.weight", 275632032, 4035020692, 3492214959),
    "mobilenetv2_224_head": ("features.0.weight", 275632032, 4035020692, 3492214959),
    "resnet18_224": ("stem.0.weight", 1004655667, 4035020692, 3492214959),
    "bert_mini": ("blocks.0.att.q.weight", 4021678008, 4127398298, 3067789604),
    "bert_mini_lora8": ("blocks.0.att.q.lora_a", 2503961074, 4127398298, 3067789604),
    "bert_base": ("blocks.0.att.q.weight", 3044407498, 2790617663, 2390350426),
    "gpt2_small6": ("blocks.0.att.q.weight", 754245191, 3759117160, 2027035289),
    "lstm": ("rnn.weight_hh_l0", 543829391, 3043570103, 3302063475),
    "adamw_25m": ("net.0.weight", 2095338384, 2948701369, 954739711),
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


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of a small comparison; ortrain and the reference start from the same losses."""
    folder = tmp_path_factory.mktemp("comparison")
    command = [sys.executable, ROOT / "benches" / "compare.py", "mlp", "--peers", "onnxruntime-training"]
    few = ["--rounds", "2", "--seconds", "0.01", "--starts", "1"]
    done = subprocess.run(
        [*command, *few, "--folder", folder, "--json", folder / "found.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "found.md").read_text() in done.stdout
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_a_comparison_in_small(comparison: dict[str, Any]) -> None:
    assert comparison["machine"]["cores"] >= 1
    (found,) = comparison["workloads"]
    assert found["name"] == "mlp"
    ours, (other,) = found["ours"], found["others"]
    assert other["version"] == "1.19.2"
    assert other["agrees"]
    assert len(other["ratios"]) == 2
    assert len(set(ours["losses"])) == len(ours["losses"]) == 20
    assert max(other["loss_distances"]) < 1e-4
    assert found["limits"]["flops"] > 0
    (start,) = ours["startup"]["seconds"]
    assert start.keys() == {"import", "create", "first_step"}


def test_a_comparison_with_ourselves_in_float32(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benches" / "compare.py", "mlp", "--peers", "ortrain"]
    few = [
        "--rounds",
        "1",
        "--seconds",
        "0.01",
        "--starts",
        "1",
        "--folder",
        tmp_path,
        "--json",
        tmp_path / "found.json",
    ]
    rounded = ["--precision", "bf16", "--bf16-fallback", "emulated"]
    done = subprocess.run([*command, *few, *rounded], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["precision"] == "bf16"
    (workload,) = found["workloads"]
    ours, (exact,) = workload["ours"], workload["others"]
    assert (ours["peer"], ours["precision"], exact["peer"], exact["precision"]) == (
        "ortrain-bf16",
        "bf16",
        "ortrain",
        "f32",
    )
    assert ours["unit"] in ("amx", "avx512_bf16", "emulated")
    assert exact["unit"] is None
    assert exact["agrees"]
    assert 0 < max(exact["loss_distances"]) < 0.1
    done = subprocess.run([*command, *few], capture_output=True, text=True, check=False)
    assert "the peer ortrain needs a --precision other than f32" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux reports the memory")
def test_memory_is_that_of_the_operating_system(comparison: dict[str, Any]) -> None:
    """Anonymous memory is near the floor: at most the first sample is missing, and no gigabytes are added."""
    (found,) = comparison["workloads"]
    for who in (found["ours"], *found["others"]):
        assert 0.9 * found["memory_floor"] < who["startup"]["anonymous"] < 2 * found["memory_floor"] + 64e6


def measured(peer: str, rounds: list[float], losses: list[float] | None = None) -> report.Measured:
    startup = report.Startup([{"import": 0.02, "create": 0.05, "first_step": 0.001}], 10_000_000, 11_000_000)
    return report.Measured(peer, "1", rounds, min(rounds), losses or [2.0] * 20, {"w": 1.0}, startup)


def found(ours: report.Measured, *others: report.Measured, name: str = "mlp") -> report.Workload:
    return report.Workload(name, workloads.about(name), report.Limits(1e11, 1e10), ours, list(others))


def test_ratios_are_those_of_rounds() -> None:
    """A slow minute affects both libraries."""
    ours, theirs = measured("ortrain", [1.0, 2.0, 10.0]), measured("torch", [2.0, 4.0, 20.0])
    assert found(ours, theirs).ratio(theirs) == 0.5


def test_means_are_geometric_and_leave_the_smallest_out() -> None:
    run = report.Run({}, "", 1, 1.0)
    for name, step in (("mlp_tiny", 0.01), ("mlp", 0.5), ("lenet", 2.0)):
        run.workloads.append(found(measured("ortrain", [step]), measured("torch", [1.0]), name=name))
    every, some = report.means(run, "torch")
    assert every == pytest.approx(0.01 ** (1 / 3))
    assert some == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("step", "verdict"), [(0.63, "yes"), (0.65, "tie"), (0.67, "NO")], ids=["reached", "tied", "missed"]
)
def test_an_aim(step: float, verdict: str) -> None:
    run = report.Run({"processor": "one", "cores": 1, "threads": 1}, "2000-01-01", 1, 1.0)
    run.workloads.append(found(measured("ortrain", [step]), measured("onnxruntime-training", [1.0])))
    assert bool(report.missed(run)) == (verdict == "NO")
    (row,) = [line for line in report.text(run).splitlines() if line.startswith("| mlp") and " 0.63 " in line]
    assert f"| {verdict} " in row


def test_aims_are_those_of_the_precision() -> None:
    run = report.Run({"processor": "one", "cores": 1, "threads": 1}, "2000-01-01", 1, 1.0)
    ours = report.Measured("ortrain-bf16x3", "1", [0.7], 0.7, [2.0] * 20, {"w": 1.0}, report.Startup(), "bf16x3", "amx")
    run.workloads.append(found(ours, measured("ortrain", [1.0]), measured("torch", [0.1]), name="bert_base"))
    assert report.missed(run) == ["bert_base: ratio to ortrain 0.70, the aim is 0.60"]
    text = report.text(run)
    assert "ortrain-bf16x3 1 (bf16x3 by amx), ortrain 1, torch 1." in text
    assert "ours in bf16x3" in text
    assert "ortrain-bf16x3, ortrain" in text
    assert report.as_json(run)["precision"] == "bf16x3"


@pytest.mark.parametrize(
    ("precision", "loss", "agrees"),
    [("f32", 2.001, False), ("bf16x3", 2.001, False), ("bf16x3", 2.0001, True), ("bf16", 2.001, True)],
)
def test_loss_tolerance_depends_on_precision(precision: str, loss: float, agrees: bool) -> None:
    ours, theirs = measured("ortrain", [1.0], [loss] * 20), measured("torch", [1.0])
    ours.precision = precision
    assert report.agree(found(ours, theirs), theirs) == agrees
    assert report.agree(found(theirs, ours), ours) == agrees


@pytest.mark.parametrize("losses", [[2.1] * 20, [2.0, 2.2, *[2.0] * 18], [2.0, float("nan"), *[2.0] * 18]])
def test_another_function_is_not_agreed_with(losses: list[float]) -> None:
    ours, theirs = measured("ortrain", [1.0], losses), measured("torch", [1.0])
    assert not report.agree(found(ours, theirs), theirs)
    assert report.agree(found(theirs, theirs), theirs)


# Norms of one gradient: of ortrain and of the other libraries, and the libraries that ortrain agrees with.
GRADIENTS = {
    "alone with another": (1.02, {"torch": 1.0}, ""),
    "as far as the others are from one another": (
        1.02,
        {"torch": 1.0, "torch-channels-last": 0.9798, "jax": 1.01},
        "torch jax",
    ),
    "off, and the others agree": (1.02, {"torch": 1.0, "torch-channels-last": 1.001, "jax": 0.999}, ""),
    "further off than the others are": (1.05, {"torch": 1.0, "jax": 1.02}, ""),
    "one of the others is no rounding": (1.03, {"torch": 1.0, "jax": 1.2}, ""),
    "one of the others has none": (1.03, {"torch": 1.0, "jax": float("nan")}, ""),
    "one of the others is ours": (1.03, {"torch": 1.0, "ortrain-limited": 1.03}, "ortrain-limited"),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradient_tolerance_covers_differences_between_peers(case: str) -> None:
    norm, others, agreed = GRADIENTS[case]
    ours = measured("ortrain", [1.0])
    ours.gradients = {"w": norm, "v": 2.0}
    peers = [measured(peer, [1.0]) for peer in others]
    for peer in peers:
        peer.gradients = {"w": others[peer.peer], "v": 2.0}
    workload = found(ours, *peers)
    assert [peer.peer for peer in peers if report.agree(workload, peer)] == agreed.split()
    run = report.Run({"processor": "one", "cores": 1, "threads": 1}, "2000-01-01", 1, 1.0, [workload])
    assert len(report.disagreements(run)) == len(peers) - len(agreed.split())
    for peer in peers:
        (row,) = [line for line in report.text(run).splitlines() if f" ortrain, {peer.peer} " in line]
        assert ("DIFFER" in row) == (peer.peer not in agreed.split())
        assert f"| {report.gradient_limit(workload, peer):.0e} " in row


def test_a_library_that_computes_another_function_moves_no_limit() -> None:
    """A wrong first loss excludes a library from the limits, regardless of its gradients; so does another precision."""
    ours, torch, other = measured("ortrain", [1.0]), measured("torch", [1.0]), measured("jax", [1.0], [2.1] * 20)
    ours.gradients, other.gradients = {"w": 1.02}, {"w": 1.03}
    assert not report.agree(found(ours, torch, other), torch)
    other.losses = torch.losses
    assert report.agree(found(ours, torch, other), torch)
    other.precision = "bf16"
    assert not report.agree(found(ours, torch, other), torch)
