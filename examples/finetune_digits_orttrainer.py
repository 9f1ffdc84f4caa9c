"""Train convnet.onnx on scikit-learn's handwritten digits with ORTTrainer, stop, resume, and finish with ortrain.api.

    python examples/finetune_digits_orttrainer.py [FOLDER]

FOLDER (default: build/digits_orttrainer) receives the checkpoint, the artifacts, the models and a
learning curve.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from matplotlib.figure import Figure
from onnx import TensorProto, helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from ortrain import artifacts
from ortrain.api import Module, Optimizer
from ortrain.optim import AdamW
from ortrain.trainer import ORTTrainer, ORTTrainerOptions
from ortrain.trainer.optim import AdamConfig, LinearWarmupLRScheduler

EPOCHS, STOP, MORE, BATCH, SEED = 10, 5, 2, 32, 0
LEARNING_RATE, LAST_RATE, WEIGHT_DECAY, MAX_NORM = 0.003, 0.0003, 0.01, 1.0

BLOCKS = ("block1", "block2", "block3")
# BatchNormalization uses the running statistics of the file, which stay frozen.
STATISTICS = [f"{block}.{kind}" for block in BLOCKS for kind in ("mean", "var")]
WITHOUT_DECAY = [f"{block}.{kind}" for block in BLOCKS for kind in ("scale", "bias")] + ["fc.bias"]
TRAINED = [*(f"{block}.weight" for block in BLOCKS), "fc.weight", *WITHOUT_DECAY]

DESCRIPTION = {
    "inputs": [("x", ["batch", 1, 8, 8]), ("labels", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 10])],
}


def with_loss(path: Path) -> onnx.ModelProto:
    """Returns the model of a file with the loss as its first output."""
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]))
    model.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
    model.graph.output.insert(0, helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return model


def new_trainer(steps: int) -> ORTTrainer:
    """Builds a trainer of the original model."""
    options = ORTTrainerOptions(
        {
            "device": {"id": "cpu"},
            "lr_scheduler": LinearWarmupLRScheduler(total_steps=steps, warmup=0.1),
            "utils": {"frozen_weights": STATISTICS},
        }
    )
    no_decay = {"params": WITHOUT_DECAY, "lambda_coef": 0.0}
    adam = AdamConfig([no_decay], lr=LEARNING_RATE, lambda_coef=WEIGHT_DECAY, max_norm_clip=MAX_NORM)
    with warnings.catch_warnings():
        # ORTTrainer warns that new programs should use ortrain.api.
        warnings.simplefilter("ignore", FutureWarning)
        return ORTTrainer(with_loss(Path(__file__).with_name("convnet.onnx")), DESCRIPTION, adam, options=options)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of images that are classified correctly."""
    return float((logits.argmax(axis=1) == labels).mean())


def batches(epoch: int, count: int) -> np.ndarray:
    """Returns the rows of each batch of an epoch. The rows depend only on the epoch."""
    rows = np.random.default_rng([SEED, epoch]).permutation(count)
    return rows[: count // BATCH * BATCH].reshape(-1, BATCH)


def main(folder: Path) -> None:
    """Trains, saves, resumes, converts, trains, exports, compares and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    images, digits = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), digits.astype(np.int64)
    x, x_held, labels, labels_held = train_test_split(images, digits, stratify=digits, random_state=SEED)
    steps = EPOCHS * (len(x) // BATCH)
    losses: list[float] = []
    held: list[float] = []

    trainer = new_trainer(steps)
    print(f"accuracy before: {accuracy(trainer.eval_step(x_held, labels_held)[1], labels_held):.2%}")
    middle = folder / "middle.ortcp"
    middle.unlink(missing_ok=True)  # A checkpoint never replaces a file.
    with tqdm(total=steps, unit="step") as bar:
        for epoch in range(EPOCHS):
            if epoch == STOP:
                trainer.save_checkpoint(str(middle), {"epoch": epoch})
            for batch in batches(epoch, len(x)):
                loss, _logits = trainer.train_step(x[batch], labels[batch])
                losses.append(float(loss))
                bar.update()
            held.append(accuracy(trainer.eval_step(x_held, labels_held)[1], labels_held))
            bar.set_postfix(loss=f"{np.mean(losses[-len(x) // BATCH :]):.4f}", held_out=f"{held[-1]:.2%}")
    trainer.save_as_onnx(str(folder / "with_loss.onnx"))

    # Repeat the second half of the training in a trainer that starts from the checkpoint file.
    resumed = new_trainer(steps)
    for epoch in range(resumed.load_checkpoint(str(middle))["epoch"], EPOCHS):
        for batch in batches(epoch, len(x)):
            resumed.train_step(x[batch], labels[batch])
    first, second = (made.state_dict()["model"]["full_precision"] for made in (trainer, resumed))
    same = sum(np.array_equal(first[name], second[name]) for name in first)
    print(f"weights with the same bits after a resume: {same} of {len(first)}")

    # Continue with ortrain.api, as on a device: the same formula, with the moments and step count of the trainer.
    state = resumed.checkpoint_state()
    no_decay = {"params": WITHOUT_DECAY, "weight_decay": 0}
    artifacts.generate_artifacts(
        Path(__file__).with_name("convnet.onnx"),
        requires_grad=TRAINED,
        frozen_params=STATISTICS,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=AdamW(weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, groups=[no_decay]),
        additional_output_names=["logits"],
        batch_norm="freeze",
        artifact_directory=folder,
    )
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LAST_RATE)
    print(f"handed over: {optimizer}")
    for epoch in range(EPOCHS, EPOCHS + MORE):
        module.train()
        for batch in batches(epoch, len(x)):
            loss, _logits = module(x[batch], labels[batch])
            optimizer.step()
            module.lazy_reset_grad()
            losses.append(float(loss))
        held.append(accuracy(module.eval()(x_held, labels_held)[1], labels_held))
    print(f"accuracy after:  {held[EPOCHS - 1]:.2%} with the trainer, {held[-1]:.2%} in the end")

    exported = folder / "convnet_trained.onnx"
    module.export_model_for_inferencing(exported, ["logits"])
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    theirs = session.run(["logits"], {"x": x_held})[0].argmax(axis=1)
    ours = module.eval()(x_held, labels_held)[1].argmax(axis=1)
    print(f"predictions that agree with onnxruntime: {(theirs == ours).sum()} of {len(ours)}")

    figure = Figure(figsize=(8, 4), layout="constrained")
    left = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    left.plot(losses, color="tab:blue", linewidth=0.7)
    left.axvline(steps, color="tab:gray", linestyle="--", label="on with ortrain.api")
    left.legend()
    right = left.twinx()
    right.plot(np.linspace(0, len(losses), EPOCHS + MORE + 1)[1:], held, color="tab:orange")
    right.set_ylabel("held-out accuracy")
    figure.savefig(folder / "learning_curve.png", dpi=150)
    print(f"learning curve:  {folder / 'learning_curve.png'}")
    if held[-1] < 0.98 or same != len(first) or not np.array_equal(theirs, ours):
        sys.exit("this run is worse than it should be")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits_orttrainer"))
