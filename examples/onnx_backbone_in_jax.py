"""Train an ONNX model as a part of a jax network: `python onnx_backbone_in_jax.py trained.onnx`. Needs jax.

The model computes ten features of an image; a jax layer computes scores of three classes. jax differentiates through
both, a plain loop trains both, and the trained model is written to a file.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ortrain
from ortrain.jax import as_function

try:
    import jax
    from jax import numpy as jnp
except ModuleNotFoundError:
    sys.exit("this example needs jax, which is not installed here: pip install jax")

STEPS, RATE, MOMENTUM, IMAGES, CLASSES = 120, 0.1, 0.9, 96, 3


def images(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8 x 8 images with a bright stripe. The class is the third of the image that contains the stripe."""
    at, classes = rng.integers(0, 8, IMAGES), np.zeros(IMAGES, np.int32)
    x = 0.3 * rng.random((IMAGES, 8, 8), np.float32)
    x[np.arange(IMAGES), :, at] += 1
    classes[at >= 3], classes[at >= 6] = 1, 2
    return x.reshape(IMAGES, 64), classes


def main(path: str) -> None:
    """Trains, prints the decreasing loss, and counts the correctly classified images."""
    features = as_function(ortrain.examples.perceptron())
    rng = np.random.default_rng(0)
    x, classes = images(rng)
    head = jnp.asarray(rng.normal(0, 0.3, (10, CLASSES)).astype(np.float32))
    parameters = {"model": features.weights, "head": head}

    def scores_of(parameters: Any, x: Any) -> Any:
        return jnp.tanh(features(parameters["model"], x)) @ parameters["head"]

    def loss_of(parameters: Any, x: Any, classes: Any) -> Any:
        likely = jax.nn.log_softmax(scores_of(parameters, x))
        return -jnp.take_along_axis(likely, classes[:, None], 1).mean()

    def step_of(parameters: Any, speed: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, classes)
        speed = jax.tree.map(lambda v, gradient: MOMENTUM * v - RATE * gradient, speed, gradients)
        return jax.tree.map(jnp.add, parameters, speed), speed, loss

    speed = jax.tree.map(jnp.zeros_like, parameters)
    stepped = jax.jit(step_of)
    for step in range(STEPS):
        parameters, speed, loss = stepped(parameters, speed)
        if step % 30 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {float(loss):.4f}")

    features.to_onnx(parameters["model"], path)
    (made,) = ortrain.InferenceSession(path).run(None, {"x": x})
    found = (np.tanh(made) @ np.asarray(parameters["head"])).argmax(1)
    print(f"{path} with the layer of jax: {(found == classes).sum()} of {IMAGES} right")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "trained.onnx")
