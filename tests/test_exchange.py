"""Parameters from other checkpoints, and from and to safetensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import RECORDS

import ortrain
from ortrain.api import CheckpointState, LoadReport, Module, Optimizer

CASE = RECORDS / "mlp_adamw_ce"
TYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def state() -> CheckpointState:
    return CheckpointState.load_checkpoint(CASE / "checkpoint")


def values(of: CheckpointState) -> dict[str, np.ndarray]:
    return {name: np.array(parameter.data) for name, parameter in of.parameters}


def changed(of: CheckpointState) -> CheckpointState:
    for _, parameter in of.parameters:
        parameter.data = parameter.data * 2 + 1
    return of


def same(of: CheckpointState, want: dict[str, np.ndarray]) -> None:
    got = values(of)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file after the description of the format."""
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": TYPES[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(value.tobytes() for value in tensors.values()))


def read(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    body = content[8 + length :]
    found = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        start, end = entry["data_offsets"]
        assert entry["dtype"] == "F32"
        found[name] = np.frombuffer(body[start:end], np.float32).reshape(entry["shape"])
    return found


def test_there_and_back(tmp_path: Path) -> None:
    first = changed(state())
    want = values(first)
    first.save_safetensors(tmp_path / "model.safetensors")
    written = read(tmp_path / "model.safetensors")
    assert written.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(written[name], value)

    second = state()
    assert second.load_safetensors(tmp_path / "model.safetensors") == LoadReport(sorted(want), [], [])
    same(second, want)
    CheckpointState.save_checkpoint(first, tmp_path / "checkpoint")
    third = state()
    assert third.load_parameters(tmp_path / "checkpoint").loaded == sorted(want)
    same(third, want)


def test_other_names(tmp_path: Path) -> None:
    first = changed(state())
    names = {name: f"model.{name}" for name in values(first)}
    first.save_safetensors(tmp_path / "model.safetensors", names)
    assert sorted(read(tmp_path / "model.safetensors")) == sorted(names.values())
    second = state()
    second.load_safetensors(tmp_path / "model.safetensors", names)
    same(second, values(first))
    kept = dict(list(names.items())[1:])
    own = next(iter(names))
    report = state().load_safetensors(tmp_path / "model.safetensors", kept, strict=False)
    assert (report.missing, report.unexpected) == ([own], [f"model.{own}"])


def test_load_without_strict(tmp_path: Path) -> None:
    want = values(state())
    name, *others = sorted(want)
    write(tmp_path / "part", {name: want[name] + 1, "head.weight": want[name]})
    fresh = state()
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        fresh.load_safetensors(tmp_path / "part")
    missing = ", ".join(f'"{other}"' for other in others)
    assert str(error.value) == (
        f"{tmp_path / 'part'} does not have the parameters of the state: it lacks {missing}; it has "
        '"head.weight", which the state lacks; without strict, the matching parameters are loaded'
    )
    same(fresh, want)
    assert fresh.load_safetensors(tmp_path / "part", strict=False) == LoadReport([name], others, ["head.weight"])
    same(fresh, want | {name: want[name] + 1})


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_become_wider(narrow: Any, tmp_path: Path) -> None:
    narrowed = {name: value.astype(narrow) for name, value in values(state()).items()}
    write(tmp_path / "narrow", narrowed)
    fresh = state()
    fresh.load_safetensors(tmp_path / "narrow")
    same(fresh, {name: value.astype(np.float32) for name, value in narrowed.items()})


@pytest.mark.parametrize("change", ["shape", "wider", "integers"])
def test_failed_load_changes_nothing(change: str, tmp_path: Path) -> None:
    fresh = state()
    want = values(fresh)
    last = max(want)
    wrong = {
        "shape": want[last].reshape(-1, 1),
        "wider": want[last].astype(np.float64),
        "integers": want[last].astype(np.int64),
    }[change]
    write(tmp_path / "wrong", {name: value + 1 for name, value in want.items()} | {last: wrong})
    with pytest.raises(ortrain.InvalidArgumentError, match=f'parameter "{last}" is float32.*, but a value of '):
        fresh.load_safetensors(tmp_path / "wrong")
    same(fresh, want)


def test_a_trained_module_sees_them(tmp_path: Path) -> None:
    first = state()
    module = Module(CASE / "training_model.onnx", first)
    with np.load(CASE / "inputs.npz") as stored:
        inputs = [stored[f"batch0/{name}"] for name in module.input_names()]
    before = module(*inputs)
    changed(state()).save_safetensors(tmp_path / "other")
    first.load_safetensors(tmp_path / "other")
    assert module(*inputs) != before


@pytest.fixture
def nominal(tmp_path: Path) -> CheckpointState:
    """The same state without its values."""
    from onnx import numpy_helper

    from ortrain import onnxblock

    tensors = [numpy_helper.from_array(value, name) for name, value in values(state()).items()]
    onnxblock.save_checkpoint((tensors, []), tmp_path / "nominal", nominal_checkpoint=True)
    return CheckpointState.load_checkpoint(tmp_path / "nominal")


@pytest.mark.parametrize("module_first", [False, True])
@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_a_nominal_state_takes_its_values(
    kind: str, module_first: bool, nominal: CheckpointState, tmp_path: Path
) -> None:
    """After loading values it trains, has moments, and is saved like a state that was never nominal."""
    full = changed(state())
    want = values(full)
    if kind == "checkpoint":
        CheckpointState.save_checkpoint(full, tmp_path / "values")
    else:
        full.save_safetensors(tmp_path / "values")

    def models(of: CheckpointState) -> tuple[Module, Optimizer]:
        module = Module(CASE / "training_model.onnx", of)
        return module, Optimizer(CASE / "optimizer_model.onnx", module)

    made = models(nominal) if module_first else None
    load = nominal.load_parameters if kind == "checkpoint" else nominal.load_safetensors
    assert load(tmp_path / "values") == LoadReport(sorted(want), [], [])
    same(nominal, want)
    found = []
    for module, optimizer in (made or models(nominal), models(full)):
        with np.load(CASE / "inputs.npz") as stored:
            inputs = [stored[f"batch0/{name}"] for name in module.input_names()]
        module(*inputs)
        optimizer.step()
        found.append(module._state.to_bytes(include_optimizer_state=True))
    assert found[0] == found[1]


def test_a_nominal_state_takes_all_or_nothing(nominal: CheckpointState, tmp_path: Path) -> None:
    want = values(state())
    name, *others = sorted(want)
    write(tmp_path / "part", {name: want[name], "head.weight": want[name]})
    lacks = "it lacks " + ", ".join(f'"{other}"' for other in others)
    also = f'{lacks}; it has "head.weight", which the state lacks'
    for strict, sentence in (
        (
            True,
            f"{tmp_path / 'part'} does not have the parameters of the state: {also}; without strict, the matching "
            f"parameters are ",
        ),
        (False, f"the state stays nominal: {tmp_path / 'part'} does not have all of its parameters: {also}"),
    ):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            nominal.load_safetensors(tmp_path / "part", strict=strict)
        assert str(error.value).startswith(sentence)
        with pytest.raises(ortrain.OrtrainError, match="the state is nominal"):
            nominal.parameters[name]
    write(tmp_path / "more", want | {"head.weight": want[name]})
    assert nominal.load_safetensors(tmp_path / "more", strict=False).unexpected == ["head.weight"]
    same(nominal, want)


def test_bad_files(tmp_path: Path) -> None:
    fresh = state()
    want = values(fresh)
    with pytest.raises(ortrain.NoSuchFileError):
        fresh.load_safetensors(tmp_path / "nothing")
    with pytest.raises(ortrain.NoSuchFileError):
        fresh.load_parameters(tmp_path / "nothing")
    with pytest.raises(ortrain.InvalidArgumentError, match='there is no parameter "w" in the state'):
        fresh.save_safetensors(tmp_path / "new", {"w": "v"})
    one, other, *_ = want
    with pytest.raises(ortrain.OrtrainError, match=one):
        fresh.save_safetensors(tmp_path / "new", {other: one})
    assert not (tmp_path / "new").exists()
    fresh.save_safetensors(tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ortrain.OrtrainError):
            fresh.load_safetensors(tmp_path / "cut")
    with pytest.raises(ortrain.OrtrainError):
        fresh.load_parameters(tmp_path / "good")
    same(fresh, want)
