"""Weights in files beside their models: frozen weights are stored once, and exports of any size run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.artifacts import LossType, OptimType
from ortrain.session import TrainingSession

WIDTH, ROWS = 64, 4
BASE = WIDTH * WIDTH * 4
# Rounding of float32 sums of some dozen terms.
TOLERANCE = 1e-5
RNG = np.random.default_rng(0)
VALUES = {
    "base.0": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8,
    "base.1": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8,
    "small": RNG.standard_normal(WIDTH).astype(np.float32),
    "head": RNG.standard_normal((WIDTH, 3)).astype(np.float32),
}
FEEDS = {
    "x": RNG.standard_normal((ROWS, WIDTH)).astype(np.float32),
    "target": RNG.standard_normal((ROWS, 3)).astype(np.float32),
}


def forward() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "base.0"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "base.1", "small"], ["c"]),
        helper.make_node("Tanh", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "head"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "deep",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in VALUES.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save_outside(path: Path, *, one_file: bool = True) -> Path:
    """Save the model with all its data in files beside it."""
    path.parent.mkdir(exist_ok=True, parents=True)
    onnx.save_model(
        forward(),
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=one_file,
        location="weights.bin" if one_file else None,
        size_threshold=0,
    )
    return path


def generate(model: object, folder: Path, **arguments: object) -> None:
    folder.mkdir(exist_ok=True)
    settings = {"requires_grad": ["head"], "loss": LossType.MSELoss, "optimizer": OptimType.SGD}
    artifacts.generate_artifacts(model, artifact_directory=folder, **settings | arguments)  # type: ignore[arg-type]


class Training:
    """A short training and its losses."""

    def __init__(self, folder: Path) -> None:
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.losses = []
        for _ in range(3):
            self.losses.append(float(self.module(*[FEEDS[name] for name in self.module.input_names()])))
            optimizer.step()
            self.module.lazy_reset_grad()
        self.module.eval()
        self.losses.append(float(self.module(*[FEEDS[name] for name in self.module.input_names()])))
        self.module.train()


def files_named(path: Path) -> dict[str, str]:
    """Return the external data file of each initializer that has one."""
    initializers = onnx.load(path, load_external_data=False).graph.initializer
    entries = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in initializers}
    return {name: found["location"] for name, found in entries.items() if found}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def untouched(path: Path) -> tuple[int, ...]:
    """Return the metadata of a file that stay the same if it is only read, without the access time."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_ctime_ns


ARTIFACT_FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]
BOTH = ("training_model.onnx", "eval_model.onnx")


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a training without external data."""
    folder = tmp_path_factory.mktemp("inline")
    generate(forward(), folder)
    assert names(folder) == ARTIFACT_FILES
    return Training(folder).losses


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("below", [True, False])
def test_frozen_weights_remain_in_the_external_file(
    one_file: bool, below: bool, inline: list[float], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    path = save_outside(folder / "base" / "m.onnx" if below else folder / "m.onnx", one_file=one_file)
    before = {file: untouched(file) for file in path.parent.iterdir()}
    generate(path, folder)
    for name in BOTH:
        assert (folder / name).stat().st_size < BASE, "no model contains the frozen weights"
        found = files_named(folder / name)
        # Small tensors are read before external files are considered, so they are inside of the model.
        assert sorted(found) == ["base.0", "base.1"]
        for tensor, location in found.items():
            assert (folder / location).samefile(path.parent / ("weights.bin" if one_file else tensor))
    assert {file: untouched(file) for file in before} == before
    assert set(names(folder)) == {*ARTIFACT_FILES, *([] if below else (file.name for file in before))}
    assert Training(folder).losses == inline

    # The folder may be moved as a whole, or copied.
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert Training(moved).losses == inline
    # Without the file of frozen weights, the error names it.
    for file in before:
        if file != path:
            (moved / file.relative_to(folder)).unlink()
    location = files_named(moved / "training_model.onnx")["base.0"]
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(moved / "training_model.onnx", CheckpointState.load_checkpoint(moved / "checkpoint"))
    assert str(error.value) == (
        f"the training model {moved}/training_model.onnx: tensor `base.0` has its data in the file `{location}`, which "
        "cannot be read: No such file or directory (os error 2); it must be beside the model"
    )


@pytest.mark.parametrize("one_file", [True, False])
def test_a_base_elsewhere_is_written_once(one_file: bool, inline: list[float], tmp_path: Path) -> None:
    """ONNX readers do not find data outside of a model's folder, and refuse a file with two names."""
    path = save_outside(tmp_path / "base" / "m.onnx", one_file=one_file)
    folder = tmp_path / "made"
    for prefix in ("p_", "p_", ""):
        generate(path, folder, prefix=prefix)
        assert (folder / f"{prefix}frozen.data").stat().st_nlink == 1
        assert 2 * BASE <= (folder / f"{prefix}frozen.data").stat().st_size < 3 * BASE
        for name in BOTH:
            names_of = dict.fromkeys(["base.0", "base.1"], f"{prefix}frozen.data")
            assert files_named(folder / f"{prefix}{name}") == names_of
    assert names(folder) == sorted(prefix + name for prefix in ("", "p_") for name in [*ARTIFACT_FILES, "frozen.data"])
    assert Training(folder).losses == inline
    onnx.load(folder / "eval_model.onnx")
    # The original files are not needed any more.
    for file in path.parent.iterdir():
        file.unlink()
    assert Training(folder).losses == inline


def test_a_base_inside_the_model_is_written_once_where_that_is_asked_for(inline: list[float], tmp_path: Path) -> None:
    for model in (forward(), forward().SerializeToString()):
        generate(model, tmp_path, external_data=True)
        assert names(tmp_path) == sorted([*ARTIFACT_FILES, "frozen.data"])
        assert 2 * BASE <= (tmp_path / "frozen.data").stat().st_size < 3 * BASE
        for name in BOTH:
            assert files_named(tmp_path / name) == {"base.0": "frozen.data", "base.1": "frozen.data"}
        assert Training(tmp_path).losses == inline


def test_external_data_is_the_default_above_the_limit(inline: list[float], tmp_path: Path) -> None:
    from ortrain import _ortrain

    settings: dict[str, object] = {
        "requires_grad": ["head"], "frozen_params": [], "losses": [artifacts.Loss(LossType.MSELoss)._described()],
        "optimizer": "SGD", "optimizer_model": None, "directory": str(tmp_path), "prefix": "",
        "additional_output_names": [], "nominal_checkpoint": False, "loss_input_names": [], "batch_norm": "auto",
        "optimizer_settings": None,
    }  # fmt: skip
    model = forward().SerializeToString()
    _ortrain.generate_artifacts(model, **settings, external_above=3 * BASE)  # type: ignore[arg-type]
    assert names(tmp_path) == ARTIFACT_FILES
    _ortrain.generate_artifacts(model, **settings, external_above=BASE)  # type: ignore[arg-type]
    assert names(tmp_path) == sorted([*ARTIFACT_FILES, "frozen.data"])
    training = Training(tmp_path)
    assert training.losses == inline
    path = tmp_path / "out.onnx"
    training.module._native.export_model_for_inferencing(str(path), ["y"], 3 * BASE)
    assert not (tmp_path / "out.onnx.data").exists()
    training.module._native.export_model_for_inferencing(str(path), ["y"], BASE)
    assert (tmp_path / "out.onnx.data").exists()


@pytest.mark.parametrize("external", [True, False])
def test_exports_hold_everything(external: bool, tmp_path: Path) -> None:
    """An export needs no files but its own, regardless of external data before, and onnxruntime runs it."""
    generate(save_outside(tmp_path / "base" / "m.onnx"), tmp_path)
    training = Training(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    # The second export replaces the first.
    for _ in range(2):
        training.module.export_model_for_inferencing(folder / "m.onnx", ["y"], external_data=external)
        assert names(folder) == (["m.onnx", "m.onnx.data"] if external else ["m.onnx"])
    assert set(files_named(folder / "m.onnx").values()) == ({"m.onnx.data"} if external else set())
    moved = tmp_path / "moved"
    folder.rename(moved)
    theirs = onnxruntime.InferenceSession(moved / "m.onnx").run(None, {"x": FEEDS["x"]})[0]
    ours = ortrain.InferenceSession(moved / "m.onnx").run(None, {"x": FEEDS["x"]})[0]
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    loss = np.mean((theirs - FEEDS["target"]) ** 2)
    np.testing.assert_allclose(loss, training.losses[-1], rtol=TOLERANCE)


def test_an_export_of_a_session(tmp_path: Path) -> None:
    generate(forward(), tmp_path, external_data=True)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with TrainingSession(state, tmp_path / "training_model.onnx", tmp_path / "eval_model.onnx") as session:
        session.export_model_for_inferencing(tmp_path / "m.onnx", ["y"], external_data=True)
    assert (tmp_path / "m.onnx.data").stat().st_size >= 2 * BASE
    onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": FEEDS["x"]})


def test_onnxruntime_reads_the_artifacts(tmp_path: Path) -> None:
    """The eval model is standard ONNX, wherever its weights are stored."""
    save_outside(tmp_path / "base" / "m.onnx")
    for model, arguments in ((tmp_path / "base" / "m.onnx", {}), (forward(), {"external_data": True})):
        generate(model, tmp_path, **arguments)
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        session = onnxruntime.InferenceSession(tmp_path / "eval_model.onnx")
        (loss,) = session.run(None, FEEDS | {"head": state.parameters["head"].data})
        np.testing.assert_allclose(loss, Training(tmp_path).losses[0], rtol=TOLERANCE)


def test_loss_of_blocks_keeps_the_external_file(inline: list[float], tmp_path: Path) -> None:
    save_outside(tmp_path / "base" / "m.onnx")
    generate(tmp_path / "base" / "m.onnx", tmp_path, loss=onnxblock.loss.MSELoss())
    for name in BOTH:
        assert files_named(tmp_path / name) == {"base.0": "base/weights.bin", "base.1": "base/weights.bin"}
    assert Training(tmp_path).losses == inline


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"location": "gone.bin"}, "has its data in the file `gone.bin`, which cannot be read: No such file or "
         "directory (os error 2); it must be beside the model"),
        ({"location": "../secret"}, "has its data in the file `../secret`, which is refused: it leads out of the "
         "model's folder by `..`"),
        ({"location": "/etc/hostname"}, "has its data in the file `/etc/hostname`, which is refused: it is an absolute "
         "path; it must be relative to the model's folder"),
        ({"location": "link"}, "has its data in the file `link`, which is refused: it is a link that leads out of the "
         "model's folder"),
        ({"offset": str(2 * BASE)}, f"should have {BASE} bytes at offset {2 * BASE} of the file `frozen.data`, which "
         f"has only {2 * BASE} bytes; was it copied or downloaded completely?"),
        ({"length": "7"}, f"should have {BASE} bytes by its dimensions and type, but external_data holds 7"),
    ],
    ids=["missing", "outside", "absolute", "link", "short", "length"],
)  # fmt: skip
def test_damaged_artifacts(model: str, change: dict[str, str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(4 * BASE))
    folder = tmp_path / "made"
    generate(forward(), folder, external_data=True)
    (folder / "link").symlink_to("../secret")
    proto = onnx.load(folder / model, load_external_data=False)
    for tensor in proto.graph.initializer:
        if tensor.name == "base.0":
            for entry in tensor.external_data:
                entry.value = change.get(entry.key, entry.value)
    (folder / model).write_bytes(proto.SerializeToString())
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(folder / BOTH[0], state, folder / BOTH[1])
    kind = "training" if model == BOTH[0] else "evaluation"
    assert str(error.value) == f"the {kind} model {folder / model}: tensor `base.0` {reason}"


def test_files_of_other_models_are_not_overwritten(inline: list[float], tmp_path: Path) -> None:
    """The data file of an export or of artifacts never replaces a file that another model needs."""
    path = save_outside(tmp_path / "m.onnx")
    (tmp_path / "weights.bin").rename(tmp_path / "m.onnx.data")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "m.onnx.data"
    path.write_bytes(proto.SerializeToString())
    generate(path, tmp_path)
    before = (tmp_path / "m.onnx.data").read_bytes()
    training = Training(tmp_path)
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        training.module.export_model_for_inferencing(path, ["y"], external_data=True)
    assert str(error.value) == (
        f"the model cannot be exported to {path}: its weights would replace {tmp_path}/m.onnx.data, which has the "
        f"weights of the training models;"
        " export it under another name, or to another folder"
    )
    assert (tmp_path / "m.onnx.data").read_bytes() == before
    training.module.export_model_for_inferencing(tmp_path / "other.onnx", ["y"], external_data=True)
    assert Training(tmp_path).losses == inline

    # Artifacts of a model with its data in a file of the name that ortrain uses.
    (tmp_path / "m.onnx.data").rename(tmp_path / "frozen.data")
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "frozen.data"
    path.write_bytes(proto.SerializeToString())
    generate(path, tmp_path)
    assert (tmp_path / "frozen.data").read_bytes() == before
    assert files_named(tmp_path / "eval_model.onnx") == {"base.0": "frozen.data", "base.1": "frozen.data"}
    (tmp_path / "frozen.data").rename(tmp_path / "checkpoint")
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "checkpoint"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        generate(path, tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/checkpoint cannot be written: the model has its data in that file; choose another prefix "
        "or another folder"
    )
    assert (tmp_path / "checkpoint").read_bytes() == before


def test_a_file_cut_short(tmp_path: Path) -> None:
    generate(forward(), tmp_path, external_data=True)
    os.truncate(tmp_path / "frozen.data", 2 * BASE - 1)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ortrain.InvalidModelError) as error:
        Module(tmp_path / "training_model.onnx", state)
    assert str(error.value) == (
        f"the training model {tmp_path}/training_model.onnx: tensor `base.1` should have {BASE} bytes at offset {BASE} "
        f"of the file `frozen.data`, which has only {2 * BASE - 1} bytes; was it copied or downloaded completely?"
    )


def test_a_message_that_is_too_large() -> None:
    """protobuf raises an error before ortrain sees the model."""

    class EncodeError(Exception):
        pass

    class Model:
        def SerializeToString(self) -> bytes:  # noqa: N802  (the name protobuf gives it)
            raise EncodeError("Failed to serialize proto")

    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(Model(), loss=LossType.MSELoss)
    assert str(error.value) == (
        "the model has more than 2 GiB, the limit of a protobuf message; save its weights in a separate file "
        "(onnx.save_model(..., save_as_external_data=True)), and pass the path of the model"
    )
