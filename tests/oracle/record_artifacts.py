"""Artifacts of onnxruntime-training for networks with a division or FakeQuant: record_artifacts.py FOLDER [CASE...].

Writes a folder for each case, with the files of other cases in ``data/ort-1.19.2``, and its training there:

    build/oracle/venv/bin/python tests/oracle/record_artifacts.py tests/data/ort-1.19.2
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent))
from replaying import load_api

api = load_api("onnxruntime.training.api")
artifacts = load_api("onnxruntime.training.artifacts")

FEATURES, HIDDEN, CLASSES, ROWS, BATCHES, STEPS = 10, 24, 5, 6, 5, 5
RECORDED_STEPS = (1, 2, 5)
FLOAT = TensorProto.FLOAT


class Network:
    """Builder of a network with two layers and other nodes between them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.trained: list[str] = []

    def node(self, op: str, inputs: list[str], output: str, outputs: int = 1, **attributes: Any) -> str:
        results = [output, *[f"{output}.{k}" for k in range(1, outputs)]]
        self.nodes.append(helper.make_node(op, inputs, results, name=f"{output}_node", **attributes))
        return output

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        self.weights[name] = np.asarray(value, dtype)
        return name

    def parameter(self, name: str, value: Any) -> str:
        self.trained.append(name)
        return self.constant(name, value)

    def linear(self, name: str, x: str, sizes: tuple[int, int], output: str, weight: str | None = None) -> str:
        own = (
            self.parameter(f"{name}.weight", self.rng.standard_normal(sizes) / np.sqrt(sizes[0]))
            if weight is None
            else weight
        )
        bias = self.parameter(f"{name}.bias", self.rng.standard_normal(sizes[1]) / 10)
        return self.node("Gemm", [x, own, bias], output)

    def model(self, output: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x", FLOAT, ["batch", FEATURES])],
            [helper.make_tensor_value_info(output, FLOAT, ["batch", CLASSES])],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        sets = [helper.make_opsetid("", 17)]
        if any(node.domain for node in self.nodes):
            sets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=sets, ir_version=8)


def l2_norm(network: Network) -> str:
    """Scale rows to length 1, and divide their scores by a trained temperature."""
    h = network.linear("fc1", "x", (FEATURES, HIDDEN), "h")
    square = network.node("Mul", [h, h], "square")
    total = network.node("ReduceSum", [square, network.constant("axes", [1], np.int64)], "total", keepdims=1)
    length = network.node("Sqrt", [total], "length")
    unit = network.node("Div", [h, length], "unit")
    scores = network.linear("fc2", unit, (HIDDEN, CLASSES), "scores")
    return network.node("Div", [scores, network.parameter("temperature", [0.5])], "output")


def silu_by_division(network: Network) -> str:
    """Compute x / (1 + exp(-x))."""
    h = network.linear("fc1", "x", (FEATURES, HIDDEN), "h")
    less = network.node("Exp", [network.node("Neg", [h], "negative")], "less")
    more = network.node("Add", [less, network.constant("one", 1)], "more")
    return network.linear("fc2", network.node("Div", [h, more], "silu"), (HIDDEN, CLASSES), "output")


def rms_norm_by_mul(network: Network) -> str:
    """Compute x / sqrt(mean(x * x) + epsilon) * gain."""
    h = network.linear("fc1", "x", (FEATURES, HIDDEN), "h")
    mean = network.node("ReduceMean", [network.node("Mul", [h, h], "square")], "mean", axes=[1], keepdims=1)
    root = network.node("Sqrt", [network.node("Add", [mean, network.constant("epsilon", 1e-5)], "shifted")], "root")
    normal = network.node("Div", [h, root], "normal")
    gain = network.parameter("gain", network.rng.uniform(0.5, 1.5, HIDDEN))
    return network.linear("fc2", network.node("Mul", [normal, gain], "scaled"), (HIDDEN, CLASSES), "output")


def fake_quant(network: Network) -> str:
    """Round weights and activations to 8 bits, with some values out of range."""
    weight = network.parameter("fc1.weight", network.rng.standard_normal((FEATURES, HIDDEN)) / np.sqrt(FEATURES))
    numbers = [network.constant("weight.scale", 1 / 160), network.constant("weight.zero", 0)]
    rounded = network.node(
        "FakeQuant", [weight, *numbers], "rounded", 2, domain="com.microsoft", quant_min=-128, quant_max=127
    )
    h = network.node("Relu", [network.linear("fc1", "x", (FEATURES, HIDDEN), "h", rounded)], "relu")
    numbers = [network.constant("scale", 1 / 96), network.constant("zero", 3)]
    coarse = network.node("FakeQuant", [h, *numbers], "coarse", 2, domain="com.microsoft")
    return network.linear("fc2", coarse, (HIDDEN, CLASSES), "output")


CASES: dict[str, tuple[Callable[[Network], str], str, str, float]] = {
    "l2_norm_adamw_ce": (l2_norm, "CrossEntropyLoss", "AdamW", 0.002),
    "silu_div_sgd_mse": (silu_by_division, "MSELoss", "SGD", 0.05),
    "rms_norm_adamw_ce": (rms_norm_by_mul, "CrossEntropyLoss", "AdamW", 0.002),
    "fake_quant_sgd_mse": (fake_quant, "MSELoss", "SGD", 0.05),
}


def as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def record(
    folder: Path, seed: int, build: Callable[[Network], str], loss: str, optimizer_type: str, rate: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network = Network(seed)
    output = build(network)
    model = network.model(output)
    onnx.save(model, folder / "forward.onnx")
    artifacts.generate_artifacts(
        model,
        requires_grad=network.trained,
        loss=artifacts.LossType[loss],
        optimizer=artifacts.OptimType[optimizer_type],
        artifact_directory=str(folder),
    )
    target = "labels" if loss == "CrossEntropyLoss" else "target"
    batches = [
        {
            "x": network.rng.standard_normal((ROWS, FEATURES)).astype(np.float32),
            target: network.rng.integers(0, CLASSES, ROWS)
            if target == "labels"
            else network.rng.standard_normal((ROWS, CLASSES)).astype(np.float32),
        }
        for _ in range(BATCHES)
    ]
    np.savez(
        folder / "inputs.npz",
        **{f"batch{k}/{name}": array for k, batch in enumerate(batches) for name, array in batch.items()},
    )

    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    meta: dict[str, Any] = {
        "default_lr": optimizer.get_learning_rate(),
        "inference_inputs": ["x"],
        "inference_outputs": [output],
        "loss": loss,
        "optimizer": optimizer_type,
        "parameters_size": {
            "all": module.get_parameters_size(False),
            "trainable": module.get_parameters_size(True),
        },
        "requires_grad": network.trained,
        "set_learning_rate": rate,
        "train_input_names": module.input_names(),
        "train_output_names": module.output_names(),
    }
    values: dict[str, Any] = {f"param/init/{name}": parameter.data.copy() for name, parameter in state.parameters}
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.set_learning_rate(rate)
        batch = batches[(step - 1) % BATCHES]
        losses.append(as_list(module(*[batch[name] for name in module.input_names()]))[0])
        optimizer.step()
        if step in RECORDED_STEPS:
            for name, parameter in state.parameters:
                values[f"param/step{step}/{name}"] = parameter.data.copy()
                values[f"grad/step{step}/{name}"] = parameter.grad.copy()
        module.lazy_reset_grad()
    values |= {"loss": np.array(losses, np.float32), "lr": np.full(STEPS, rate)}
    values["contiguous_all"] = module.get_contiguous_parameters(False).numpy()
    values["contiguous_trainable"] = module.get_contiguous_parameters(True).numpy()
    module.eval()
    meta |= {"eval_input_names": module.input_names(), "eval_output_names": module.output_names()}
    results = as_list(module(*[batches[0][name] for name in module.input_names()]))
    values |= {f"eval/final/{name}": value for name, value in zip(module.output_names(), results, strict=True)}
    module.export_model_for_inferencing(str(folder / "inference_model.onnx"), [output])
    session = onnxruntime.InferenceSession(str(folder / "inference_model.onnx"), providers=["CPUExecutionProvider"])
    values[f"infer/{output}"] = session.run([output], {"x": batches[0]["x"]})[0]
    np.savez(folder / "trajectory.npz", **values)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
    print(
        folder.name,
        values["loss"],
        sorted({node.op_type for node in onnx.load(folder / "training_model.onnx").graph.node}),
    )


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        build, loss, optimizer_type, rate = CASES[name]
        record(folder / name, list(CASES).index(name), build, loss, optimizer_type, rate)
    # Numbers in value names continue within a process, so each case has its own process.
    for name in CASES if not names else ():
        subprocess.run([sys.executable, __file__, folder, name], check=True)
