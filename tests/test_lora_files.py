"""Models with adapters in files: the base is written once, and its files are checked."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import ortrain
from ortrain import artifacts, lora
from ortrain.api import CheckpointState, Module, Optimizer

RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((8, 64)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, 8)
TOLERANCE = 1e-5
"""Two programs add the terms of a product in different orders."""


@pytest.fixture(params=["one file", "external data"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the path of a model with its weights in the same file, or in a second file."""
    folder = tmp_path / "base"
    folder.mkdir()
    path = folder / "model.onnx"
    model = onnx.load(ortrain.examples.perceptron())
    external = request.param == "external data"
    onnx.save_model(model, path, save_as_external_data=external, location="weights.bin", size_threshold=1024)
    return path


def weights_of(base: Path) -> Path:
    """Return the file with the weights of a model."""
    external = base.with_name("weights.bin")
    return external if external.exists() else base


def external_data(path: Path) -> dict[str, dict[str, str]]:
    """Return the entries of external data of a model by initializer."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.external_data
    }


def sha1(path: Path) -> str:
    """Return the checksum of a file."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


def check_results(path: Path, expected: Path) -> None:
    """Both programs give the results of another model."""
    reference = onnxruntime.InferenceSession(str(expected)).run(None, {"x": X})[0]
    for session in (onnxruntime.InferenceSession(str(path)), ortrain.InferenceSession(path)):
        np.testing.assert_allclose(session.run(["logits"], {"x": X})[0], reference, rtol=TOLERANCE, atol=TOLERANCE)


def test_model_beside_its_base_refers_to_it(base: Path) -> None:
    """The model has the path of the file relative to its own folder, and the checksum of the file."""
    output = base.with_name("adapted.onnx")
    lora.add(base, rank=2, output=output)
    entries = external_data(output)
    assert "fc1.weight" in entries
    for entry in entries.values():
        assert entry["location"] == weights_of(base).name
        assert entry["checksum"] == sha1(weights_of(base))
    assert sorted(base.parent.iterdir()) == sorted({base, weights_of(base), output})
    check_results(output, base)


def test_model_above_its_base_refers_to_it(base: Path) -> None:
    """A file in a folder below is named by its relative path."""
    output = base.parent.parent / "adapted.onnx"
    lora.add(base, rank=2, output=output)
    locations = {entry["location"] for entry in external_data(output).values()}
    assert locations == {f"base/{weights_of(base).name}"}
    check_results(output, base)


def test_model_elsewhere_has_the_base(base: Path, tmp_path: Path) -> None:
    """Readers of ONNX accept no files outside the folder of a model."""
    output = tmp_path / "elsewhere" / "adapted.onnx"
    output.parent.mkdir()
    lora.add(base, rank=2, output=output)
    assert external_data(output) == {}
    check_results(output, base)
    # The file of the base has one name: onnx refuses files with several.
    onnx.load(base)
    onnx.load(output)


def test_embedded_model_needs_no_base(base: Path, tmp_path: Path) -> None:
    """``embed`` writes the base into the model, and an adapter of PEFT's files can be added so, too."""
    output = tmp_path / "adapted.onnx"
    lora.add(base, rank=2, output=output, embed=True)
    assert external_data(output) == {}
    lora.save_adapter(output, tmp_path / "adapter")
    again = tmp_path / "again.onnx"
    lora.load_adapter(base, tmp_path / "adapter", output=again, embed=True)
    assert external_data(again) == {}
    shutil.rmtree(base.parent)
    for path in (output, again):
        assert ortrain.InferenceSession(path).run(["logits"], {"x": X})[0].shape == (8, 10)


def test_loaded_adapter_refers_to_the_base(base: Path, tmp_path: Path) -> None:
    """``load_adapter`` writes references as ``add`` does."""
    outputs = [base.with_name(name) for name in ("added.onnx", "loaded.onnx")]
    lora.add(base, rank=2, output=outputs[0])
    lora.save_adapter(outputs[0], tmp_path / "adapter")
    lora.load_adapter(base, tmp_path / "adapter", output=outputs[1])
    assert outputs[1].read_bytes() == outputs[0].read_bytes()


def test_model_can_replace_its_base(base: Path) -> None:
    """A model written to the path of its base keeps the weights."""
    expected = base.with_name("copy.onnx")
    shutil.copy(base, expected)
    lora.add(base, rank=2, output=base)
    check_results(base, expected)
    assert [layer.rank for layer in lora.adapters(base).layers] == [2]


def losses(folder: Path) -> list[float]:
    """Return the losses of some steps with the artifacts in a folder."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    found = []
    for _ in range(3):
        found.append(float(module(X, LABELS)))
        optimizer.step()
        module.lazy_reset_grad()
    module.export_model_for_inferencing(folder / "trained.onnx", ["logits"])
    return found


def test_artifacts_write_no_base(base: Path, tmp_path: Path) -> None:
    """Artifacts, checkpoint and export refer to the base, and train as artifacts with a base of their own."""
    adapted = base.with_name("adapted.onnx")
    lora.add(base, rank=2, output=adapted)
    found = {}
    # The base is in a folder below the first artifacts.
    base.parent.rename(tmp_path / "inside_base")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside_base").rename(tmp_path / "inside" / "base")
    base, adapted = (tmp_path / "inside" / "base" / path.name for path in (base, adapted))
    for name, options in {"inside": {}, "elsewhere": {}, "embedded": {"embed": True}}.items():
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        artifacts.generate_artifacts(
            adapted,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
            **options,
        )
        found[name] = losses(folder)
    assert found["inside"] == found["elsewhere"] == found["embedded"]
    assert len(set(found["inside"])) == 3
    inside = tmp_path / "inside"
    for name in ("training_model.onnx", "eval_model.onnx", "trained.onnx"):
        assert external_data(inside / name)["fc1.weight"]["location"] == f"base/{weights_of(base).name}"
    assert (inside / "checkpoint").stat().st_size < 8192
    for name in ("training_model.onnx", "eval_model.onnx"):
        assert external_data(tmp_path / "elsewhere" / name)["fc1.weight"]["location"] == "frozen.data"
    for name in ("elsewhere", "embedded"):
        check_results(inside / "trained.onnx", tmp_path / name / "trained.onnx")


def test_changed_base_is_an_error(base: Path) -> None:
    """The error has both checksums; nothing is computed with other weights."""
    adapted = base.with_name("adapted.onnx")
    lora.add(base, rank=2, output=adapted)
    weights = weights_of(base)
    before = sha1(weights)
    changed = bytearray(weights.read_bytes())
    changed[len(changed) // 2] ^= 1
    weights.write_bytes(changed)
    for use in (ortrain.InferenceSession, lora.merge):
        with pytest.raises(ortrain.errors.InvalidModelError) as caught:
            use(adapted)
        text = str(caught.value)
        for part in (weights.name, before, sha1(weights)):
            assert part in text


def test_model_trains_on_a_base_in_its_files(base: Path, tmp_path: Path) -> None:
    """``Model`` with ``lora`` leaves the base where it is, and exports references."""
    before = sorted(base.parent.iterdir())
    tuned = ortrain.Model(base, lora=2, loss="cross_entropy")
    history = tuned.fit(X, LABELS, epochs=3, verbose=0)
    assert history["loss"][-1] < history["loss"][0]
    assert sorted(base.parent.iterdir()) == before
    exported = base.with_name("trained.onnx")
    tuned.export(exported)
    assert external_data(exported)["fc1.weight"]["location"] == weights_of(base).name
    tuned.export(tmp_path / "alone.onnx", embed=True)
    assert external_data(tmp_path / "alone.onnx") == {}
    check_results(exported, tmp_path / "alone.onnx")
    expected = tuned.predict(X)
    tuned.save(tmp_path / "saved")
    again = ortrain.Model(tmp_path / "saved")
    np.testing.assert_array_equal(again.predict(X), expected)
    assert again.fit(X, LABELS, epochs=1, verbose=0)["loss"][0] < history["loss"][0]


def test_adapter_of_another_base_is_an_error(base: Path, tmp_path: Path) -> None:
    """The hash of the adapted weights is in PEFT's files and in checkpoints."""
    model = onnx.load(base)
    lora.save_adapter(lora.add(base, rank=2)[0], tmp_path / "adapter")
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "fc1.weight")
    other = onnx.numpy_helper.to_array(weight).copy()
    other[0, 0] += 1
    weight.CopyFrom(onnx.numpy_helper.from_array(other, weight.name))
    with pytest.raises(ortrain.errors.InvalidArgumentError, match="trained on weights with the hash"):
        lora.load_adapter(model, tmp_path / "adapter")
    adapted = lora.load_adapter(model, tmp_path / "adapter", check_base=False)
    folders = []
    for name, source in {"own": lora.add(base, rank=2)[0], "other": adapted}.items():
        folder = tmp_path / name
        folder.mkdir()
        artifacts.generate_artifacts(source, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=folder)
        folders.append(folder)
    state = CheckpointState.load_checkpoint(folders[0] / "checkpoint")
    with pytest.raises(ortrain.errors.OrtrainError, match="were trained on a base with the hash"):
        Module(folders[1] / "training_model.onnx", state)
