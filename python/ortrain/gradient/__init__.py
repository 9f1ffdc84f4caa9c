"""Gradients of models, as ONNX models.

:func:`grad` adds the gradients of values with respect to other values to a model, and :func:`vjp` adds vector-Jacobian
products. :class:`GradientGraphBuilder` adds the gradients of a loss, with the interface of onnxruntime-training. The
result is plain ONNX that any runtime executes. :class:`OrtGradientForwardBackward` runs the forward and the backward
pass as a pair of calls.

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
