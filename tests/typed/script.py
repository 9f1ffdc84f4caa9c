"""A user's script for type checkers, which find no Any in results of ortrain: `make types` and test_surface.py."""

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import ortrain
from ortrain import (
    CheckpointState,
    InferenceSession,
    LinearLRScheduler,
    Loss,
    LossType,
    Module,
    Optimizer,
    OrtValue,
    SessionOptions,
    TrainingSession,
    generate_artifacts,
    inspect,
)
from ortrain.api import MemoryUse, Profile
from ortrain.artifacts import AdamW

model = ortrain.examples.perceptron()
found = inspect(model, batch_size=32)
for info in found.parameters:
    print(info.name, info.shape, info.role)
terms = [Loss(LossType.CrossEntropyLoss, name="classes"), Loss(LossType.MSELoss, factor=0.5)]
optimizer_settings = AdamW(formula="pytorch", max_norm=1.0)
generate_artifacts(model, loss=terms, optimizer=optimizer_settings, additional_output_names=["logits"])
options = SessionOptions()
options.memory_limit = 1 << 30
state = CheckpointState.load_checkpoint("checkpoint")
seeds: list[int] = [state.seed]
state.seed = 7
state.seed = "seven"  # type: ignore[assignment]
module = Module("training_model.onnx", state, "eval_model.onnx", session_options=options)
optimizer = Optimizer("optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, 10, 100, 0.01)
x = np.zeros((8, 10), np.float32)
labels = np.zeros(8, np.int64)
losses: list[float] = []
best = float("inf")
for _step in range(100):
    loss, classes, logits = module(x, labels, x)
    losses.append(float(loss) + float(classes))
    accuracy = float((np.asarray(logits).argmax(axis=1) == labels).mean())
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
    if losses[-1] < best:
        best = losses[-1]
        CheckpointState.save_checkpoint(state, "best", include_optimizer_state=True)
outputs = module(x, labels, x)
print(outputs["classes"].shape)
assert_type(outputs.names, tuple[str, ...])
alone = module(x, labels)
assert_type(alone.item(), float)
assert_type(float(alone), float)
assert_type(round(alone, 3), float)
assert_type(alone < 3, np.bool_)
print(f"{float(alone):.3f}")
held = module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels))
assert_type(held.shape(), list[int])
assert_type(module.profile(x, labels), Profile)
assert_type(module.memory(x, labels), MemoryUse)
assert_type(module.input_names(), list[str])
assert_type(optimizer.get_learning_rate(), float)
assert_type(state.to_bytes(), bytes)
for name, parameter in state.parameters.items():
    assert_type(name, str)
    assert_type(parameter.shape, tuple[int, ...])
    assert_type(np.linalg.norm(parameter.data) < 3, np.bool_)
module.export_model_for_inferencing("trained.onnx", ["logits"])
session = InferenceSession("trained.onnx")
(scores,) = session.run(None, {session.get_inputs()[0].name: x})
best_class: npt.NDArray[np.intp] = scores.argmax(axis=1)
with TrainingSession(state, "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx") as training:
    training.train_step([x, labels])
