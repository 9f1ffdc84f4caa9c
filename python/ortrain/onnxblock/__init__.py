"""Blocks that build losses, optimizers and models from ONNX nodes: ``onnxruntime.training.onnxblock``.

A block is called inside ``with onnxblock.base(model)``. It edits the model of the context and returns the names of its
results. User-defined blocks derive from :class:`Block`, or from :class:`ForwardBlock` and :class:`TrainingBlock`, which
produce models to save. The package ``onnx`` is required.

>>> import numpy as np
>>> import onnx
>>> from ortrain import onnxblock
>>> class WeightedLoss(onnxblock.TrainingBlock):
...     def __init__(self):
...         super().__init__()
...         self.near = onnxblock.loss.L1Loss()
...         self.far = onnxblock.loss.MSELoss()
...         self.half = onnxblock.blocks.Constant(0.5)
...         self.add, self.multiply = onnxblock.blocks.Add(), onnxblock.blocks.Mul()
...
...     def build(self, scores):
...         return self.add(self.near(scores), self.multiply(self.half(), self.far(scores)))
>>> scores = onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["batch", 3])
>>> x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 2])
>>> weight = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "weight")
>>> node = onnx.helper.make_node("MatMul", ["x", "weight"], ["scores"])
>>> model = onnx.helper.make_model(onnx.helper.make_graph([node], "net", [x], [scores], [weight]))
>>> block = WeightedLoss()
>>> block.requires_grad("weight")
>>> with onnxblock.base(model):
...     loss = block("scores")
>>> training_model, eval_model = block.to_model_proto()
>>> [entry.name for entry in training_model.graph.input]
['x', 'target', 'weight', 'weight_grad.accumulation.buffer', 'lazy_reset_grad']
"""

from __future__ import annotations

from ortrain.onnxblock import blocks, loss, optim
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._checkpoint import load_checkpoint_to_model, save_checkpoint
from ortrain.onnxblock._model import base, custom_op_library, empty_base
from ortrain.onnxblock._training_blocks import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
