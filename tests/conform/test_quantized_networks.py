"""Files that each tool of onnxruntime.quantization writes for nineteen networks: forward, training, exports."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
from quantized_nets import NETS, Net
from test_quantized_operators import without_optimizer
from test_quantized_training import Calibration

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

SCRIPT = Path(__file__).parent.parent / "in_torch" / "four_bits.py"
# Tool, and its arguments.
TOOLS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "dynamic, per channel": {"per_channel": True},
    "dynamic, unsigned weights": {"weight_type": QuantType.QUInt8},
    "QDQ": {"quant_format": QuantFormat.QDQ},
    "QDQ, per channel": {"quant_format": QuantFormat.QDQ, "per_channel": True},
    "QDQ, activations of 16 bits": {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt16},
    "QOperator": {"quant_format": QuantFormat.QOperator},
    "QOperator, per channel": {"quant_format": QuantFormat.QOperator, "per_channel": True},
    "QOperator, signed activations": {"quant_format": QuantFormat.QOperator, "activation_type": QuantType.QInt8},
}
FOUR_BITS = ("QOperator", "QOperator symmetric", "QDQ", "QOperator with rows")
WITH_PRODUCTS = ("perceptron", "encoder", "decoder", "lstm", "gru", "texts", "gates", "mixer")
WITH_ROWS = ("decoder", "texts")
FILES = [
    *((name, tool) for tool in TOOLS for name in NETS),
    *(
        (name, f"4 bits, {form}")
        for form in FOUR_BITS
        for name in (WITH_ROWS if form == "QOperator with rows" else WITH_PRODUCTS)
    ),
]
# Rounding of float32, relative to the largest element of a value.
TOLERANCE = 1e-5
# Largest share of integers that differ by one: a quotient near the middle of two integers rounds to either of them.
ROUNDED_OTHERWISE = 1e-3
# Tolerance after such an integer, relative to the largest output. The steps of eight bits are 1/255 of a range, and
# later layers add up the differences of a few of them.
AFTER_OTHER_INTEGER = 0.01
# Tolerance of a loss, and of a loss after such an integer.
SAME_LOSS, LOSS_AFTER_OTHER_INTEGER = 1e-5, 1e-3
STEPS, RATE = 15, 5e-3
# Largest ratio of the last loss to the first.
LEARNED = 0.97
LOSSES = {name: artifacts.LossType[name] for name in ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss")}


@dataclass(frozen=True)
class Files:
    """The networks as files, and the files of the tools."""

    folder: Path

    def quantized(self, name: str, tool: str) -> Path:
        """Return the file of a tool for a network; writes the file at the first call."""
        if tool.startswith("4 bits"):
            return self.folder / "four-bits" / f"{name}-{tool.split(', ')[1]}.onnx"
        path = self.folder / f"{name}-{tool}.quantized"
        if path.exists():
            return path
        source, arguments = self.folder / f"{name}.onnx", {"weight_type": QuantType.QInt8, **TOOLS[tool]}
        logging.disable(logging.WARNING)
        try:
            if tool.startswith("dynamic"):
                quantize_dynamic(source, path, **arguments)
            else:
                arguments.setdefault("activation_type", QuantType.QUInt8)
                quantize_static(source, path, Calibration(NETS[name]().x), **arguments)
        finally:
            logging.disable(logging.NOTSET)
        return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the files, after a process with the tool for four bits."""
    folder = tmp_path_factory.mktemp("quantized")
    for name, make in NETS.items():
        onnx.save(make().model, folder / f"{name}.onnx")
    environments.in_environment(environments.torch(), SCRIPT, str(folder))
    return Files(folder)


def test_all_files_are_known(files: Files) -> None:
    """The table of the tools has every file of the tool for four bits, and 19 networks."""
    assert len(NETS) == 19
    found = {path.stem for path in (files.folder / "four-bits").iterdir()}
    assert found == {f"{name}-{tool.split(', ')[1]}" for name, tool in FILES if tool.startswith("4 bits")}
    counts = Counter(tool for _, tool in FILES)
    print(f"{len(FILES)} files:", ", ".join(f"{count} of {tool!r}" for tool, count in counts.items()))


# Values of all nodes.


def with_all_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every value as an output."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    there = {value.name for value in wide.graph.output}
    names = [name for node in wide.graph.node for name in node.output if name and name not in there]
    wide.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return wide


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs in onnxruntime without its optimizer.

    With several threads, its ``DynamicQuantizeLSTM`` has another grid for the sequences of each thread.
    """
    options = without_optimizer()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def separated(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return the model in which each node reads the values of onnxruntime, as inputs with the prefix ``given``."""
    apart = onnx.ModelProto()
    apart.CopyFrom(model)
    read = {name for node in apart.graph.node for name in node.input if name in values}
    for node in apart.graph.node:
        for at, name in enumerate(node.input):
            if name in values:
                node.input[at] = f"given {name}"
    apart.graph.input.extend(
        helper.make_tensor_value_info(
            f"given {name}", helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
        )
        for name in sorted(read)
    )
    return apart


def other_integers(found: np.ndarray, expected: np.ndarray) -> int:
    """Return the number of integers that differ; they may differ by one."""
    difference = np.abs(found.astype(np.int64) - expected.astype(np.int64))
    assert difference.max(initial=0) <= 1
    return int((difference > 0).sum())


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest element."""
    return float(np.abs(found - expected).max(initial=0) / max(1e-6, float(np.abs(expected).max(initial=0))))


def compare(path: Path, x: np.ndarray) -> bool:
    """Compare a model with onnxruntime; returns true if an integer of the whole model differs by one.

    First each node computes from onnxruntime's values, so that differences do not add up. Then the model runs as it is.
    """
    model = onnx.load(path)
    values = run(with_all_values(model), {"x": x})
    apart = separated(with_all_values(model), values)
    session = ortrain.InferenceSession(apart)
    names = [value.name for value in session.get_outputs()]
    feeds = {
        value.name: x if value.name == "x" else values[value.name.removeprefix("given ")]
        for value in session.get_inputs()
    }
    makers = {name: node for node in model.graph.node for name in node.output}
    for name, value in zip(names, session.run(None, feeds), strict=True):
        found, expected = np.asarray(value), values[name]
        where = f"{makers[name].op_type} {makers[name].name!r}, output {name!r}"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        if expected.dtype.kind == "f":
            assert distance(found, expected) <= TOLERANCE, where
        else:
            assert other_integers(found, expected) <= max(1, ROUNDED_OTHERWISE * found.size), where

    whole = ortrain.InferenceSession(with_all_values(model))
    results = dict(zip([value.name for value in whole.get_outputs()], whole.run(None, {"x": x}), strict=True))
    integers = [name for name in results if values[name].dtype.kind != "f"]
    same = all(np.array_equal(results[name], values[name]) for name in integers)
    (logits,) = ortrain.InferenceSession(path).run(None, {"x": x})
    assert distance(np.asarray(logits), values["logits"]) <= (TOLERANCE if same else AFTER_OTHER_INTEGER)
    return not same


@pytest.mark.parametrize(("name", "tool"), FILES)
def test_runs_as_onnxruntime(name: str, tool: str, files: Files) -> None:
    if compare(files.quantized(name, tool), NETS[name]().x):
        print("an integer rounds to the other side")


# Training.


def loss_of(net: Net, logits: np.ndarray) -> float:
    """Return the loss of logits in float64."""
    scores = logits.astype(np.float64)
    if net.loss == "MSELoss":
        return float(np.square(scores - net.target).mean())
    if net.loss == "BCEWithLogitsLoss":
        return float((np.logaddexp(0, scores) - scores * net.target).mean())
    shifted = scores - scores.max(1, keepdims=True)
    log_shares = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-np.take_along_axis(log_shares, net.target[:, None], 1).mean())


def integer_parameters(net: Net, model: onnx.ModelProto) -> set[str]:
    """Return the names of parameters that the tools replaced by integers."""
    names = {tensor.name for tensor in model.graph.initializer}
    return {name for name in net.parameters if f"{name}_quantized" in names}


def description(model: onnx.ModelProto) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Return the nodes and the types of the initializers."""
    nodes = [(node.op_type, node.name) for node in model.graph.node]
    return nodes, {tensor.name: tensor.data_type for tensor in model.graph.initializer}


@pytest.mark.parametrize(("name", "tool"), FILES)
def test_learns(name: str, tool: str, files: Files, tmp_path: Path) -> None:
    """The integer weights are trained, the loss falls, and the export has the loss of the module in onnxruntime."""
    net, path = NETS[name](), files.quantized(name, tool)
    with warnings.catch_warnings():
        # Some constants may be no parameters, which the names below decide.
        warnings.simplefilter("ignore", ortrain.TrainingWarning)
        artifacts.generate_artifacts(
            path,
            loss=LOSSES[net.loss],
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=tmp_path,
            batch_norm="freeze",
            quantized="train",
        )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    trained = {key for key, parameter in state.parameters if parameter.requires_grad}
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(float(module(net.x, net.target)))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    evaluated = float(module(net.x, net.target))
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["logits"])
    original, exported = onnx.load(path), onnx.load(tmp_path / "exported.onnx")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {len(trained)} parameters")
    replaced = integer_parameters(net, original)
    assert replaced or tool.startswith("4 bits")
    # If the model has a value of the parameter's name, the dequantized integers, the trained weight has another name.
    assert replaced <= {key.removesuffix("_float") for key in trained}
    assert losses[-1] < LEARNED * losses[0], losses
    assert description(exported) == description(original)
    logits = run(exported, {"x": net.x})["logits"]
    other = compare(tmp_path / "exported.onnx", net.x)
    tolerance = LOSS_AFTER_OTHER_INTEGER if other else SAME_LOSS
    assert loss_of(net, logits) == pytest.approx(evaluated, rel=tolerance)
