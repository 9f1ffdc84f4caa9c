"""Helpers for ONNX models, with the names of onnxcustom (``onnxcustom.utils``).

- :mod:`~ortrain.gradient.utils.onnx_function`: small functions as models
- :mod:`~ortrain.gradient.utils.orttraining_helper`: losses and penalties that are added to a model
- :mod:`~ortrain.gradient.utils.onnx_helper`: names and values of initializers
- :mod:`~ortrain.gradient.utils.onnx_rewriter`: replacement of nodes
- :mod:`~ortrain.gradient.utils.onnxruntime_helper`: devices

All modules but the last need the package ``onnx``.

>>> import ortrain
>>> from ortrain.gradient.utils.onnx_function import function_onnx_graph
>>> session = ortrain.InferenceSession(function_onnx_graph("square_error"))
>>> session.run(None, {"X1": np.ones((2, 1), np.float32), "X2": np.zeros((2, 1), np.float32)})
[array([2.], dtype=float32)]
"""

from __future__ import annotations

__all__: list[str] = []
