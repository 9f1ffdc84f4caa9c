"""Decoders of onnxruntime-genai's model builder: logits of onnxruntime, gradients of PyTorch, text with a cache.

Small models of transformers with random weights are converted for several precisions and execution providers
(tests/in_torch/genai_models.py). All of them run on the CPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import environments
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortrain
from ortrain import Loss, LossType, artifacts
from ortrain.api import CheckpointState, Module

SCRIPT = Path(__file__).parent.parent / "in_torch" / "genai_models.py"
ARCHITECTURES = re.findall(r'^    "([a-z0-9-]+)": \{', SCRIPT.read_text(), re.MULTILINE)
# Tolerances relative to the largest value. Rounding of float32 in two layers:
FLOAT = 1e-5
# Rounding of float16 in two layers, where one step is 1e-3 of a value. On a CPU, onnxruntime computes some operators
# in float32. Thus intermediate values of both libraries differ by some steps.
HALF = 1e-2
# Rounding of eight-bit integers in two layers, where one step is 8e-3 of the largest value of a block. onnxruntime
# rounds the inputs of packed weights to such integers at the builder's accuracy level for CPUs, 4; ortrain does not.
INTEGER_INPUTS = 5e-2
TOLERANCES = {
    "fp32": FLOAT,
    "fp16": HALF,
    "fp16-cuda": HALF,
    "int4": INTEGER_INPUTS,
    "int4-floats": FLOAT,
    "int4-asymmetric": FLOAT,
    "int8": INTEGER_INPUTS,
}
# Tolerance of gradients, relative to the largest element of each parameter. PyTorch computes in float64.
GRADIENT_TOLERANCE = 1e-5
# Files that no library loads: the builder lets the embedding read the float weight of the last layer as packed
# integers.
INVALID = ("llama-tied/int4-asymmetric", "gemma2/int4-asymmetric")
# onnxruntime normalizes queries and keys inside of GroupQueryAttention on GPUs only.
NOT_IN_ONNXRUNTIME = ("qwen3/fp16-cuda",)
# The builder masks the attention of these files for a prompt, or for one token after a cache, and not for more tokens.
WITHOUT_CHUNKS = ("fp16",)
# Layers with a window have a cache of the size of the window, unless an option of the builder prevents it.
WINDOWS = ("gemma2", "gpt-oss")
# Text is generated with one export of each precision.
GENERATING = ("fp32", "fp16", "fp16-cuda", "int4")
GENERATED_TOKENS = 20
# Label of the last position, which has no next token.
IGNORED = -100
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}

Arrays = dict[str, np.ndarray]


def cases(exports: Any, without: tuple[str, ...]) -> list[Any]:
    """Return the parameters of a test of an architecture and an export."""
    pairs = [(name, export) for name in ARCHITECTURES for export in exports if f"{name}/{export}" not in without]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the processes of the builder, one for each architecture on demand."""
    return tmp_path_factory.mktemp("genai")


def at(converted: Path, name: str) -> Path:
    if not (converted / name / "record.npz").exists():
        environments.in_environment(environments.torch(), SCRIPT, str(converted), name)
    return converted / name


def recorded(folder: Path) -> Arrays:
    with np.load(folder / "record.npz") as stored:
        return dict(stored)


class Decoder:
    """A session of ortrain or onnxruntime for a converted model."""

    def __init__(self, session: Any, path: Path) -> None:
        self.session = session
        described = json.loads((path.parent / "genai_config.json").read_text())["model"]["decoder"]
        self.heads, self.size = described["num_key_value_heads"], described["head_size"]
        self.inputs = {value.name: value.type for value in session.get_inputs()}
        self.outputs = [value.name for value in session.get_outputs()]

    def feeds(self, tokens: np.ndarray, cache: Arrays) -> Arrays:
        """Return the inputs for the tokens that follow a cache; an empty dict is a cache of no tokens."""
        batch, length = tokens.shape
        past = next(iter(cache.values())).shape[2] if cache else 0
        values = {
            "input_ids": tokens,
            "attention_mask": np.ones((batch, past + length), np.int64),
            "position_ids": np.tile(np.arange(past, past + length), (batch, 1)),
        }
        empty = {
            name: np.zeros((batch, self.heads, 0, self.size), TYPES[kind])
            for name, kind in self.inputs.items()
            if name not in values
        }
        return {name: value for name, value in (values | empty | cache).items() if name in self.inputs}

    def read(self, tokens: np.ndarray, cache: Arrays) -> tuple[np.ndarray, Arrays]:
        """Return the logits of tokens, and the cache with these tokens."""
        outputs = dict(zip(self.outputs, self.session.run(None, self.feeds(tokens, cache)), strict=True))
        logits = outputs.pop("logits")
        return logits, {name.replace("present", "past_key_values"): value for name, value in outputs.items()}


def decoder(path: Path) -> Decoder:
    return Decoder(ortrain.InferenceSession(path), path)


def reference(path: Path) -> Decoder:
    """Return the decoder of onnxruntime without graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    # The builder declares too few rows for the repeated keys of fp16 files, and onnxruntime plans its buffers by that.
    options.enable_mem_reuse = False
    # Errors only: the builder writes initializers that no node reads.
    options.log_severity_level = 3
    return Decoder(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]), path)


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.isfinite(expected).all()
    difference = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert difference <= tolerance, difference


def compare(path: Path, parts: list[np.ndarray], tolerance: float) -> None:
    """Compare the logits of each part of a text, and the caches. Both libraries read the cache of onnxruntime."""
    ours, theirs = decoder(path), reference(path)
    cache: Arrays = {}
    for part in parts:
        logits, grown = ours.read(part, cache)
        expected, cache = theirs.read(part, cache)
        assert_near(logits, expected, tolerance)
        assert list(grown) == list(cache)
        for key, value in grown.items():
            assert_near(value, cache[key], tolerance)


@pytest.mark.parametrize(("name", "export"), cases(TOLERANCES, INVALID + NOT_IN_ONNXRUNTIME))
def test_logits_are_those_of_onnxruntime(name: str, export: str, converted: Path) -> None:
    """Two prompts without a cache, and three tokens after a cache."""
    folder = at(converted, name)
    parts = np.split(recorded(folder)["tokens"], [9, 10, 11], axis=1)
    compare(folder / export / "model.onnx", parts, TOLERANCES[export])


@pytest.mark.parametrize(
    ("name", "export"), cases([key for key in TOLERANCES if key not in WITHOUT_CHUNKS], INVALID + NOT_IN_ONNXRUNTIME)
)
def test_logits_of_chunks_are_those_of_onnxruntime(name: str, export: str, converted: Path) -> None:
    """Several tokens after a cache. onnxruntime allows them for one text at a time."""
    folder = at(converted, name)
    parts = np.split(recorded(folder)["tokens"][:1], [4, 9], axis=1)
    compare(folder / export / "model.onnx", parts, TOLERANCES[export])


@pytest.mark.parametrize(
    ("name", "export"), [*((name, "fp32") for name in ARCHITECTURES), *(case.split("/") for case in NOT_IN_ONNXRUNTIME)]
)
def test_logits_are_those_of_torch(name: str, export: str, converted: Path) -> None:
    folder = at(converted, name)
    record = recorded(folder)
    logits, _ = decoder(folder / export / "model.onnx").read(record["tokens"], {})
    assert_near(logits, record["logits"].astype(logits.dtype), TOLERANCES[export])


@pytest.mark.parametrize("case", INVALID)
def test_invalid_files_are_refused(case: str, converted: Path) -> None:
    name, export = case.split("/")
    path = at(converted, name) / export / "model.onnx"
    with pytest.raises(ortrain.InvalidModelError, match=r"Reshape.*lm_head.MatMul.weight"):
        decoder(path)
    with pytest.raises(Exception, match="does not match expected type"):
        reference(path)


@pytest.mark.parametrize("name", WINDOWS)
def test_caches_of_a_window_are_refused(name: str, converted: Path) -> None:
    with pytest.raises(ortrain.UnsupportedError, match=r"sliding_window_cache .* export the model without it"):
        decoder(at(converted, name) / "window-cache" / "model.onnx")


def initializers(path: Path) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_torch(name: str, converted: Path, tmp_path: Path) -> None:
    """The loss is the cross-entropy of the next tokens. All parameters of torch, and no others, train by default."""
    folder = at(converted, name)
    path, record = folder / "fp32" / "model.onnx", recorded(folder)
    zeros, scaled = (initializers(folder / values / "model.onnx") for values in ("zeros", "gradients"))
    # The builder leaves out a bias of zeros.
    gradients = {
        key: (value - zeros.get(key, np.zeros(1)).astype(np.float64)) / record["gradient_factor"]
        for key, value in scaled.items()
        if not np.array_equal(value, zeros.get(key, ()))
    }
    assert sum(value.size for value in gradients.values()) == record["elements"]
    artifacts.generate_artifacts(
        path,
        loss=Loss(LossType.CrossEntropyLoss, scores="logits", class_axis=-1, ignore_index=IGNORED),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {key for key, value in state.parameters if value.requires_grad} == set(gradients)
    module = Module(tmp_path / "training_model.onnx", state)
    tokens = record["tokens"]
    labels = np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], IGNORED)], axis=1)
    loss = module(**decoder(path).feeds(tokens, {}), labels=labels)
    np.testing.assert_allclose(float(loss), record["loss"], rtol=FLOAT)
    differences = {
        key: float(np.abs(state.parameters[key].grad - value).max() / np.abs(value).max())
        for key, value in gradients.items()
    }
    print(f"{name}: {len(differences)} parameters, difference {max(differences.values()):.1e}")
    assert all(value <= GRADIENT_TOLERANCE for value in differences.values()), differences


@pytest.mark.parametrize(("name", "export"), cases(GENERATING, INVALID))
def test_text_is_the_same_without_a_cache(name: str, export: str, converted: Path) -> None:
    """Greedy generation: each token after a cache, and each token after the whole text again."""
    folder = at(converted, name)
    model = decoder(folder / export / "model.onnx")
    cached = repeated = token = recorded(folder)["tokens"]
    cache: Arrays = {}
    for _ in range(GENERATED_TOKENS):
        logits, cache = model.read(token, cache)
        token = logits[:, -1:].argmax(axis=2)
        cached = np.concatenate([cached, token], axis=1)
        logits, _ = model.read(repeated, {})
        repeated = np.concatenate([repeated, logits[:, -1:].argmax(axis=2)], axis=1)
    np.testing.assert_array_equal(cached, repeated)
