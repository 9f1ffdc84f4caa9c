"""Define a custom operator as an ONNX function: the activation x + sin(slope x)**2 / slope. A network learns a sine.

    python examples/custom_operator.py [FOLDER]

FOLDER (default: build/custom_operator) receives the artifacts and the trained model, which run without the operator
library.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# Each channel trains its own slope. The gradient is derived from the nodes of the function.
SNAKE = """
<domain: "examples", opset_import: ["" : 17]>
Snake (x, slope) => (y)
{
    steep = Mul (x, slope)
    sine = Sin (steep)
    square = Mul (sine, sine)
    wave = Div (square, slope)
    y = Add (x, wave)
}
"""
NET = """
<ir_version: 8, opset_import: ["" : 17, "examples" : 1]>
net (float[batch, 1] x) => (float[batch, 1] y)
{
    first = Gemm (x, first_weight, first_bias)
    hidden = examples.Snake (first, slope)
    y = Gemm (hidden, last_weight, last_bias)
}
"""


def net() -> onnx.ModelProto:
    """Returns the model. It calls the operator but does not contain its function."""
    model = onnx.parser.parse_model(NET)
    rng = np.random.default_rng(0)
    parameters = {
        "first_weight": rng.standard_normal((1, 32)),
        "first_bias": np.zeros(32),
        "slope": np.ones(32),
        "last_weight": rng.standard_normal((32, 1)) / 32,
        "last_bias": np.zeros(1),
    }
    for name, value in parameters.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def main(folder: Path) -> None:
    """Prepares, trains, exports and compares."""
    folder.mkdir(parents=True, exist_ok=True)
    library = ortrain.OperatorLibrary()
    library.add_function(onnx.parser.parse_function(SNAKE))
    artifacts.generate_artifacts(
        net(),
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        operators=library,
    )

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    x = np.linspace(-3, 3, 256, dtype=np.float32)[:, None]
    for step in range(301):
        loss = module(x, np.sin(3 * x))
        optimizer.step()
        module.lazy_reset_grad()
        if step % 100 == 0:
            print(f"step {step:3}  loss {loss:.4f}")

    module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
    (y,) = ortrain.InferenceSession(folder / "trained.onnx").run(None, {"x": x})
    print(f"largest difference to the sine: {np.abs(y - np.sin(3 * x)).max():.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/custom_operator"))
