"""Train an ONNX model with a custom loss in NumPy: `python loss_in_numpy.py`.

ortrain runs the forward and backward passes of the model; the caller computes the loss and applies the gradients. Here
the loss is Huber's, between the logits of a small network and one-hot classes. The optimizer is plain gradient descent.
"""

from __future__ import annotations

import numpy as np

import ortrain
from ortrain.gradient import OrtGradientForwardBackward

STEPS, RATE, DELTA = 60, 0.5, 1.0


def huber(scores: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the mean Huber loss and its gradient with respect to the scores."""
    apart = scores - target
    near = np.abs(apart) <= DELTA
    loss = np.where(near, apart**2 / 2, DELTA * (np.abs(apart) - DELTA / 2)).mean()
    return float(loss), (np.where(near, apart, DELTA * np.sign(apart)) / apart.size).astype(np.float32)


def main() -> None:
    """Trains the network and prints the decreasing loss."""
    rng = np.random.default_rng(0)
    x, classes = rng.random((64, 64), np.float32), rng.integers(0, 10, 64)
    target = np.eye(10, dtype=np.float32)[classes]

    both = OrtGradientForwardBackward(ortrain.examples.perceptron(), ordered=False)
    weights = [np.asarray(both.get_initializer(name)) for name in both.weights_to_train]
    function = both.new_instance()
    losses: list[float] = []
    for step in range(STEPS):
        (scores,) = function.forward([x, *weights], training=True)
        loss, seed = huber(scores.numpy(), target)
        gradients = list(function.backward([seed]))[-len(weights) :]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= RATE * gradient.numpy()
        losses.append(loss)
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss:.4f}")
    assert losses[-1] < losses[0], "the loss falls"


if __name__ == "__main__":
    main()
