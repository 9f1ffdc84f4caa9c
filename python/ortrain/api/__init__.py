"""Training API with the names and meanings of ``onnxruntime.training.api``.

>>> from ortrain.api import CheckpointState, Module, Optimizer
>>> state = CheckpointState.load_checkpoint("checkpoint")
>>> module = Module("training_model.onnx", state, "eval_model.onnx")
>>> optimizer = Optimizer("optimizer_model.onnx", module)
>>> for epoch in range(3):
...     loss = module(x, labels)
...     optimizer.step()
...     module.lazy_reset_grad()
>>> CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
>>> module.export_model_for_inferencing("trained.onnx", ["logits"])

A :class:`CheckpointState` owns the parameters and moments, a :class:`Module` the gradients. One lock guards a state:
a second thread waits for the first one and releases the interpreter lock meanwhile.
"""

from ortrain.api.checkpoint_state import CheckpointState, LoadReport, PlaneLayout, StateLayout, TensorLayout
from ortrain.api.lr_scheduler import LinearLRScheduler
from ortrain.api.module import Module
from ortrain.api.norms import Norms, ParameterNorms
from ortrain.api.optimizer import Optimizer
from ortrain.api.outputs import Outputs, Scalar
from ortrain.api.profile import Instruction, MemoryUse, Profile
from ortrain.api.quantization import QuantizedTensor

__all__ = [
    "CheckpointState",
    "Instruction",
    "LinearLRScheduler",
    "LoadReport",
    "MemoryUse",
    "Module",
    "Norms",
    "Optimizer",
    "Outputs",
    "ParameterNorms",
    "PlaneLayout",
    "Profile",
    "QuantizedTensor",
    "Scalar",
    "StateLayout",
    "TensorLayout",
]
