"""Define a custom gradient: a straight-through gradient of Sign trains a layer with weights of -1 and 1.

    python examples/custom_gradient.py [FOLDER]

FOLDER (default: build/custom_gradient) receives the artifacts and the trained model, which run without the operator
library.

Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional
Computation", 2013.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# The arguments are the operator's input x, its output y, and the gradient dy of the output. The result is the gradient
# of the input: dy where |x| < 1, and 0 elsewhere.
STRAIGHT_THROUGH = """
<domain: "examples", opset_import: ["" : 17]>
StraightThrough (x, y, dy) => (dx)
{
    distance = Abs (x)
    one = Constant <value_float: float = 1.0> ()
    near = Less (distance, one)
    mask = CastLike (near, dy)
    dx = Mul (dy, mask)
}
"""


def binary(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inserts the sign of the first layer's weights into the model."""
    first = model.graph.node[0]
    weight, first.input[1] = first.input[1], "sign"
    model.graph.node.insert(0, helper.make_node("Sign", [weight], ["sign"]))
    return model


def main(folder: Path) -> None:
    """Prepares, trains, exports and compares."""
    folder.mkdir(parents=True, exist_ok=True)
    model = binary(onnx.load(Path(__file__).with_name("perceptron.onnx")))
    library = ortrain.OperatorLibrary()
    library.add_gradient("Sign", onnx.parser.parse_function(STRAIGHT_THROUGH))
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=folder,
        operators=library,
    )

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    # Task: find the brightest of the first ten pixels.
    x = np.random.default_rng(0).random((512, 64), np.float32)
    labels = x[:, :10].argmax(axis=1)
    for step in range(201):
        loss, logits = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:7.3f}  right {(logits.argmax(axis=1) == labels).mean():.0%}")

    module.export_model_for_inferencing(folder / "trained.onnx", ["logits"])
    (logits,) = ortrain.InferenceSession(folder / "trained.onnx").run(None, {"x": x})
    print(f"exported: right {(logits.argmax(axis=1) == labels).mean():.0%}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/custom_gradient"))
