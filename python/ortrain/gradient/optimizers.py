"""Gradient descent on a model with a loss, with the names of onnxcustom (``onnxcustom.training.optimizers``).

>>> from ortrain.gradient.optimizers import OrtGradientOptimizer
>>> from ortrain.gradient.utils.orttraining_helper import add_loss_output
>>> np.random.seed(0)
>>> inputs = np.random.randn(40, 2).astype(np.float32)
>>> targets = (inputs @ np.array([[1], [2]]) + 3).astype(np.float32)
>>> nodes = [onnx.helper.make_node("Gemm", ["X", "coef", "intercept"], ["Y"])]
>>> x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, width]) for name, width in (("X", 2), ("Y", 1)))
>>> zeros = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
...          for name, shape in (("coef", (2, 1)), ("intercept", (1,)))]
>>> graph = onnx.helper.make_graph(nodes, "line", [x], [y], zeros)
>>> line = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])
>>> descent = OrtGradientOptimizer(add_loss_output(line), ["coef", "intercept"], learning_rate=0.05)
>>> {name: value.round(2).tolist() for name, value in descent.fit(inputs, targets).get_state().items()}
{'coef': [[1.0], [2.0]], 'intercept': [3.0]}
"""

from ortrain._estimators.optimizers import OrtGradientOptimizer

__all__ = ["OrtGradientOptimizer"]
