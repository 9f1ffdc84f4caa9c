"""Gradient descent on a model without its loss: ``onnxcustom.training.optimizers_partial``.

>>> from ortrain.gradient.optimizers_partial import OrtGradientForwardBackwardOptimizer
>>> np.random.seed(0)
>>> inputs = np.random.randn(40, 2).astype(np.float32)
>>> targets = (inputs @ np.array([[1], [2]]) + 3).astype(np.float32)
>>> nodes = [onnx.helper.make_node("Gemm", ["X", "coef", "intercept"], ["Y"])]
>>> x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, width]) for name, width in (("X", 2), ("Y", 1)))
>>> zeros = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
...          for name, shape in (("coef", (2, 1)), ("intercept", (1,)))]
>>> line = onnx.helper.make_model(onnx.helper.make_graph(nodes, "line", [x], [y], zeros))
>>> descent = OrtGradientForwardBackwardOptimizer(line, learning_rate=0.1).fit(inputs, targets)
>>> {name: value.numpy().round(2).tolist() for name, value in descent.trained_coef_.items()}
{'coef': [[1.0], [2.0]], 'intercept': [3.0]}
"""

from ortrain._estimators.optimizers_partial import OrtGradientForwardBackwardOptimizer

__all__ = ["OrtGradientForwardBackwardOptimizer"]
