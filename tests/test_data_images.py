"""Folders of images and audio files as sources of rows, and threads that read ahead."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import soundfile
from onnx import TensorProto, helper
from PIL import Image

from ortrain import Model, NodeArg, data, examples
from ortrain.callbacks import LambdaCallback
from ortrain.data._prefetch import Prefetcher
from ortrain.errors import InvalidArgumentError

AUGMENTED: dict[str, Any] = {"flip": "both", "crop": 0.4, "rotation": 30, "colour": 0.3}


def pixels(shape: tuple[int | str, ...] = ("batch", 3, 16, 16), kind: str = "float") -> list[NodeArg]:
    return [NodeArg("image", f"tensor({kind})", list(shape))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with four and two images of noise."""
    rng = np.random.default_rng(0)
    for name, count in {"rose": 2, "iris": 4}.items():
        (tmp_path / "flowers" / name).mkdir(parents=True)
        for number in range(count):
            values = rng.integers(0, 256, (20, 30, 3), np.uint8)
            Image.fromarray(values).save(tmp_path / "flowers" / name / f"{number}.{'png' if number else 'jpg'}")
    return tmp_path / "flowers"


def take_rows(source: Any, rows: list[int] | None = None, seed: int = 0, *, training: bool = False) -> Any:
    return source.take(np.array(range(len(source)) if rows is None else rows, np.int64), seed, training)


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(InvalidArgumentError) as error:
        data.open(path, **settings)
    return str(error.value).replace(str(path), path.name)


def test_a_folder_per_class(folder: Path) -> None:
    source = data.open(folder, model_inputs=pixels())
    assert source.classes == ("iris", "rose")
    batch = take_rows(source)
    assert batch.inputs["image"].shape == (6, 3, 16, 16)
    assert batch.inputs["image"].dtype == np.float32
    assert np.bincount(batch.targets["target"]).tolist() == [4, 2]
    names = [source.row_name(row) for row in range(6)]
    assert [names[row].startswith("rose") for row in range(6)] == batch.targets["target"].astype(bool).tolist()
    # The order is fixed, and does not list one class after the other.
    assert names != sorted(names)
    assert names == [data.open(folder, size=8).row_name(row) for row in range(6)]


def test_layout_and_normalization_follow_the_input(folder: Path) -> None:
    raw = take_rows(data.open(folder, model_inputs=pixels(("n", 16, 16, 3), "uint8"))).inputs["image"]
    assert raw.dtype == np.uint8
    scaled = raw.transpose(0, 3, 1, 2) / 255
    found = take_rows(data.open(folder, model_inputs=pixels())).inputs["image"]
    mean, std = np.array([0.485, 0.456, 0.406])[:, None, None], np.array([0.229, 0.224, 0.225])[:, None, None]
    np.testing.assert_allclose(found, (scaled - mean) / std, atol=1e-5)
    found = take_rows(data.open(folder, model_inputs=pixels(("n", 16, 16, 3)))).inputs["image"]
    np.testing.assert_allclose(found, raw / 127.5 - 1, atol=1e-5)
    found = take_rows(data.open(folder, model_inputs=pixels(), mean=0, std=1)).inputs["image"]
    np.testing.assert_allclose(found, scaled, atol=1e-6)
    grey = take_rows(data.open(folder, model_inputs=pixels(("n", 1, 8, 12)))).inputs["image"]
    assert grey.shape == (6, 1, 8, 12)
    assert 0 <= grey.min() <= grey.max() <= 1


def image_model(path: Path, metadata: dict[str, str], sizes: tuple[int | str, ...] = ("h", "w")) -> Path:
    """Write a model that gives the mean of each channel as scores."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["means"]),
        helper.make_node("Flatten", ["means"], ["scores"]),
    ]
    entry = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, *sizes])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "means", [entry], [scores])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, metadata)
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path)
    return path


ULTRALYTICS = {"author": "Ultralytics", "imgsz": "[8, 8]", "names": "{0: 'rose', 1: 'tulip', 2: 'iris'}"}
TRANSFORMERS = {
    "do_center_crop": True,
    "crop_size": {"height": 12, "width": 10},
    "size": {"shortest_edge": 16},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.2, 0.2],
    "rescale_factor": 1 / 255,
}
TIMM = {
    "label_names": ["iris", "rose"],
    "pretrained_cfg": {"input_size": [3, 6, 6], "mean": [0.1] * 3, "std": [0.2] * 3},
}


def test_preprocessing_of_the_model(folder: Path, tmp_path: Path) -> None:
    """Size, normalization and classes come from the model's files; settings override them."""

    def found(model: Path, **settings: Any) -> tuple[Any, ...]:
        source = data.open(folder, model=model, **settings)
        described = source.describe()
        chosen = described["settings"]
        return (*(chosen[name] for name in ("size", "mean", "std")), source.classes, described.get("preprocessing"))

    model = image_model(tmp_path / "a" / "model.onnx", ULTRALYTICS)
    names = ("rose", "tulip", "iris")
    assert found(model) == ([8, 8], [0] * 3, [1] * 3, names, "the model's metadata")
    assert take_rows(data.open(folder, model=model)).targets["target"].tolist().count(2) == 4
    assert found(model, size=4, mean=0.5, std=0.5) == ([4, 4], [0.5] * 3, [0.5] * 3, names, None)
    assert found(model, model_classes=False)[3] == ("iris", "rose")
    # The sizes of the input count more.
    fixed = image_model(tmp_path / "b" / "model.onnx", {}, (7, 7))
    (fixed.parent / "preprocessor_config.json").write_text(json.dumps(TRANSFORMERS))
    assert found(fixed) == ([7, 7], [0.5, 0.4, 0.3], [0.2] * 3, ("iris", "rose"), "preprocessor_config.json")
    image_model(fixed, {})
    assert found(fixed)[0] == [12, 10]
    timm = image_model(tmp_path / "c" / "model.onnx", {})
    (timm.parent / "config.json").write_text(json.dumps(TIMM))
    assert found(timm) == ([6, 6], [0.1] * 3, [0.2] * 3, ("iris", "rose"), "config.json")
    (timm.parent / "config.json").write_text('{"id2label": {"0": 5}, "pretrained_cfg": [1')
    assert "any size" in refused(folder, model=timm)
    (folder / "iris").rename(folder / "irs")
    assert refused(folder, model=model) == (
        "flowers has the folder 'irs', which is no class of the model: rose, tulip, iris; did you mean 'iris'?; rename "
        "it, or train a new last layer (--classes auto)"
    )


def test_the_middle_of_an_image_remains(tmp_path: Path) -> None:
    values = np.zeros((10, 30, 3), np.uint8)
    values[:, 10:20] = 255
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(values).save(tmp_path / name / "stripe.png")
    Image.fromarray(np.full((10, 10), 65535, np.uint16)).save(tmp_path / "a" / "deep.png")
    found = take_rows(data.open(tmp_path, model_inputs=pixels(("n", 3, 10, 10)), mean=0, std=1)).inputs["image"]
    assert (found == 1).all()


def test_the_orientation_of_the_camera_is_undone(tmp_path: Path) -> None:
    values = np.zeros((10, 10, 3), np.uint8)
    values[:5] = 255
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(values).save(tmp_path / "b.png", exif=exif)
    found = take_rows(data.open(tmp_path, model_inputs=pixels(("n", 1, 10, 10)), labelled=False)).inputs["image"][0, 0]
    assert (found[:5] == 0).all()
    assert (found[5:] == 1).all()


def test_rows_and_seed_determine_a_batch(folder: Path) -> None:
    source = data.open(folder, model_inputs=pixels(), **AUGMENTED)
    first = take_rows(source, [0, 3, 5], 7, training=True).inputs["image"]
    assert np.array_equal(first, take_rows(source, [0, 3, 5], 7, training=True).inputs["image"])
    assert np.array_equal(first[1:2], take_rows(source, [3], 7, training=True).inputs["image"])
    assert not np.array_equal(first, take_rows(source, [0, 3, 5], 8, training=True).inputs["image"])
    plain = take_rows(data.open(folder, model_inputs=pixels())).inputs["image"]
    assert np.array_equal(take_rows(source, training=False).inputs["image"], plain)


@pytest.mark.parametrize("name", AUGMENTED)
def test_each_augmentation_changes_images(name: str, folder: Path) -> None:
    source = data.open(folder, model_inputs=pixels(), **{name: AUGMENTED[name]})
    plain, changed = (take_rows(source, training=training).inputs["image"] for training in (False, True))
    assert plain.shape == changed.shape
    assert not np.array_equal(plain, changed)


def test_mixup_blends_rows_and_labels(folder: Path) -> None:
    source = data.open(folder, model_inputs=pixels(), mixup=0.5)
    batch, plain = take_rows(source, seed=1, training=True), take_rows(source)
    targets = batch.targets["target"]
    assert targets.shape == (6, 2)
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)
    assert ((targets > 0) & (targets < 1)).any()
    assert plain.targets["target"].dtype == np.int64
    assert not np.array_equal(batch.inputs["image"], plain.inputs["image"])


def test_other_images_are_read_like_the_training_images(folder: Path, tmp_path: Path) -> None:
    train = data.open(folder, size=12, mean=0.25, std=2, channels=1)
    (tmp_path / "val" / "rose").mkdir(parents=True)
    Image.new("RGB", (12, 12), "white").save(tmp_path / "val" / "rose" / "white.webp", lossless=True)
    source = data.open(tmp_path / "val", like=train)
    batch = take_rows(source)
    assert batch.inputs["x"].shape == (1, 1, 12, 12)
    np.testing.assert_allclose(batch.inputs["x"], 0.375)
    # The label is an index into the classes of the training images.
    assert batch.targets["target"].tolist() == [1]
    unlabelled = data.open(tmp_path / "val" / "rose", like=train, labelled=False)
    assert take_rows(unlabelled).targets == {}
    (tmp_path / "val" / "lily").mkdir()
    assert refused(tmp_path / "val", like=train) == (
        "val has the folder 'lily', which is no class of the training data: iris, rose"
    )


def test_a_preview_is_a_picture(folder: Path) -> None:
    source = data.open(folder, model_inputs=pixels(("n", 1, 300, 200)))
    with Image.open(io.BytesIO(source.preview(0))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (107, 160))


def test_broken_images_are_named_and_counted(folder: Path) -> None:
    (folder / "iris" / "9.png").write_bytes(b"no image")
    whole = (folder / "iris" / "1.png").read_bytes()
    (folder / "iris" / "1.png").write_bytes(whole[: len(whole) // 2])
    sentence = refused(folder, size=8)
    assert sentence.startswith("flowers: 2 of 7 images cannot be read: iris/1.png (")
    assert sentence.endswith("iris/9.png (not an image); remove them, or pass skip_broken=True (--skip-broken)")
    source = data.open(folder, size=8, skip_broken=True)
    assert (len(source), source.describe()["skipped"]) == (5, 2)
    for path in (folder / "rose").iterdir():
        path.write_bytes(b"")
    assert refused(folder, size=8, skip_broken=True) == "flowers: all images of the class rose are broken"


def test_folders_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    expected = "expected a folder per class with images in it ({0}/CLASS/FILE.jpg)"
    for path, settings, sentence in [
        (folder / "rose", {"size": 8}, f"rose: {expected.format('rose')}, got images without folders"),
        (
            folder,
            {"model_inputs": pixels(("n", 3, "height", "width"))},
            "the model's input 'image' takes images of any size; choose one: size=224 (--size 224)",
        ),
        (
            folder,
            {"model_inputs": pixels(), "size": 32},
            "size is (32, 32), the model's input 'image' takes 16 x 16 pixels",
        ),
        (
            folder,
            {"model_inputs": pixels(("n", 5, 8, 8))},
            "images have 1, 3 or 4 channels, the model's input 'image' has 5",
        ),
        (
            folder,
            {"model_inputs": [NodeArg("x", "tensor(float)", ["n", 64])]},
            "a folder of images fills one input with 4 axes; the model has x: ['n', 64]",
        ),
        (folder, {"size": 8, "crop": 2}, "crop must be from 0 to 1, got 2"),
        (folder, {"size": 8, "flip": "up"}, 'flip must be "horizontal", "vertical" or "both", got \'up\''),
        (folder, {"size": 8, "mean": (1, 2)}, "mean has 2 numbers, the image has 3 channels"),
    ]:
        assert refused(path, **settings) == sentence
    assert "has one folder, flowers; expected a folder per class with images in it" in refused(folder.parent, size=8)
    (folder / "lily").mkdir()
    assert refused(folder, size=8) == "flowers: the class lily has no images; remove the folder, or fill it"


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    times = np.arange(800) / 8000
    for name, pitch in {"high": 440, "low": 110}.items():
        (tmp_path / "sounds" / name).mkdir(parents=True)
        wave = np.sin(2 * np.pi * pitch * times)
        soundfile.write(tmp_path / "sounds" / name / "a.wav", wave, 8000, subtype="FLOAT")
        soundfile.write(tmp_path / "sounds" / name / "b.wav", np.stack([wave[:200]] * 2, axis=1), 8000)
    return tmp_path / "sounds"


def test_audio(sounds: Path) -> None:
    waves = [NodeArg("wave", "tensor(float)", ["n", 1, 400])]
    source = data.open(sounds, model_inputs=waves, sample_rate=8000)
    batch = take_rows(source)
    assert source.classes == ("high", "low")
    assert batch.inputs["wave"].shape == (4, 1, 400)
    row = next(row for row in range(4) if source.row_name(row) == "low/a.wav")
    # The middle of the file.
    expected = np.sin(2 * np.pi * 110 * (np.arange(400) + 200) / 8000)
    np.testing.assert_allclose(batch.inputs["wave"][row, 0], expected, atol=1e-6)
    parts = [take_rows(source, [row], seed, training=True).inputs["wave"] for seed in (1, 1, 2)]
    assert np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0], parts[2])
    # Short files are padded, and another rate is converted.
    short = next(row for row in range(4) if source.row_name(row) == "low/b.wav")
    assert not batch.inputs["wave"][short, 0, 200:].any()
    half = data.open(sounds, sample_rate=4000, seconds=0.1)
    found = take_rows(half).inputs["x"][row]
    np.testing.assert_allclose(found[20:-20], np.sin(2 * np.pi * 110 * np.arange(400) / 4000)[20:-20], atol=0.02)


def test_audio_that_does_not_fit(sounds: Path) -> None:
    any_length = [NodeArg("x", "tensor(float)", ["batch", "samples"])]
    sentence = "the model's input 'x' takes any number of samples; choose one: seconds=1 (--seconds 1)"
    assert refused(sounds, model_inputs=any_length) == sentence
    assert take_rows(data.open(sounds)).inputs["x"].shape == (4, 16000)
    (sounds / "low" / "c.wav").write_bytes(b"RIFF")
    assert "1 of 5 audio files cannot be read: low/c.wav (" in refused(sounds, seconds=0.1)


class Slow:
    """Rows that take some time to read. Row 13 is broken."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> data.Batch:
        time.sleep(self.seconds * (1 + seed % 3) / 2)
        if 13 in rows:
            raise InvalidArgumentError("row 13 is broken")
        return data.Batch({"x": rows + seed}, {})


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ortrain-data")]


def batches(count: int, first: int = 20) -> list[tuple[npt.NDArray[np.int64], int]]:
    return [(np.array([first + number]), number) for number in range(count)]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_batches_keep_their_order(workers: int) -> None:
    with Prefetcher(Slow(0.001), batches(20), training=True, workers=workers) as found:
        assert [int(batch.inputs["x"][0]) for batch in found] == [20 + 2 * number for number in range(20)]
    assert not threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_at_its_batch(workers: int) -> None:
    found = Prefetcher(Slow(), batches(10, 10), training=True, workers=workers)
    assert [int(next(found).inputs["x"][0]) for _ in range(3)] == [10, 12, 14]
    with pytest.raises(InvalidArgumentError, match="row 13 is broken"):
        next(found)
    assert not threads()


def test_no_thread_is_left_after_close() -> None:
    with Prefetcher(Slow(0.01), batches(50), training=True, workers=3) as found:
        next(found)
        assert threads()
    assert not threads()
    with pytest.raises(StopIteration):
        next(found)


def test_read_ahead_has_a_limit() -> None:
    asked = []

    def order() -> Any:
        for batch in batches(50):
            asked.append(batch)
            yield batch

    with Prefetcher(Slow(), order(), training=True, workers=1, depth=3) as found:
        next(found)
        assert len(asked) == 4


class Noted(Slow):
    """Source that notes each batch that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Semaphore(0)

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> data.Batch:
        batch = super().take(rows, seed, training)
        self.read.release()
        return batch


def test_the_step_does_not_wait_for_the_data() -> None:
    """The next batch is read while the step runs, before it is asked for."""
    source = Noted()
    with Prefetcher(source, batches(12), training=True, workers=1) as found:
        for number in range(12):
            assert int(next(found).inputs["x"][0]) == 20 + 2 * number
            # The step: no batch is asked for until another one was read.
            if number == 0:
                assert source.read.acquire(timeout=60)
            assert number == 11 or source.read.acquire(timeout=60), number


class Watched:
    """Source with an event for each batch of two rows, which is set when the batch was read for the training."""

    def __init__(self) -> None:
        self.was_read = [threading.Event() for _ in range(6)]

    def __len__(self) -> int:
        return 2 * len(self.was_read)

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> data.Batch:
        if training:
            self.was_read[rows[0] // 2].set()
        return data.Batch({"x": np.ones((len(rows), 64), np.float32)}, {"target": rows % 10})


def test_fit_reads_the_next_batch_beside_the_step() -> None:
    """No step ends before the next batch was read, so a loop that reads after its step would wait forever."""
    source, waited = Watched(), []

    def wait(batch: int, logs: Any) -> None:
        waited.append(all(event.wait(timeout=30) for event in source.was_read[batch + 1 : batch + 2]))
        assert waited[-1]

    callback = LambdaCallback(on_train_batch_end=wait)
    Model(examples.perceptron()).fit(source, batch_size=2, shuffle=False, callbacks=[callback])
    assert len(waited) == 6


def test_a_resumed_run_reads_the_same_batches(folder: Path, tmp_path: Path) -> None:
    """A run that fails in the middle of an epoch goes on to the same bits, augmentation included."""

    def run(name: str, fails_at: int | None = None) -> Any:
        steps = []

        def count(batch: int, logs: Any) -> None:
            steps.append(batch)
            if len(steps) == fails_at:
                raise InterruptedError

        model = Model(str(examples.convnet()), classes=2, seed=3)
        inputs = [NodeArg("x", "tensor(float)", ["n", 1, 8, 8])]
        source = data.open(folder, model_inputs=inputs, mixup=0.4, **AUGMENTED)
        callback = LambdaCallback(on_train_batch_begin=count)
        history = model.fit(
            source, batch_size=2, epochs=2, resume=tmp_path / name, checkpoint_every=1, callbacks=[callback]
        )
        return history.history, {name: parameter.data.copy() for name, parameter in model.state.parameters}

    history, parameters = run("whole")
    with pytest.raises(InterruptedError):
        run("parts", fails_at=5)
    again, same = run("parts")
    assert again == history
    assert all(np.array_equal(values, same[name]) for name, values in parameters.items())
