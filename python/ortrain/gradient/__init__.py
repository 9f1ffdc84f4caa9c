"""The gradient itself: of any model, as a model.

:func:`grad` adds the gradients of some values with respect to others to a model, :func:`vjp` the products of vectors
with its Jacobian, :class:`GradientGraphBuilder` those of a loss, by the names that onnxruntime-training has for it.
What comes out is plain ONNX, which any runtime runs. :class:`OrtGradientForwardBackward` runs the forward and the
backward pass as a pair of calls.

>>> import ortrain
>>> model = ortrain.gradient.grad(ortrain.examples.perceptron(), of="logits", wrt="x")
>>> session = ortrain.InferenceSession(model)
>>> [output.name for output in session.get_outputs()]
['logits', 'x_grad']
>>> logits, x_grad = session.run(None, {"x": x})
>>> x_grad.shape == x.shape
True
"""

from ortrain.gradient.builder import GradientGraphBuilder
from ortrain.gradient.graph import grad, vjp
from ortrain.gradient.ortgradient import OrtGradientForwardBackward, OrtGradientForwardBackwardFunction

__all__ = [
    "GradientGraphBuilder",
    "OrtGradientForwardBackward",
    "OrtGradientForwardBackwardFunction",
    "grad",
    "vjp",
]
