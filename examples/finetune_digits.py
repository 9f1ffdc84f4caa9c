"""Train convnet.onnx on scikit-learn's handwritten digits, and save all results of a typical project.

    python examples/finetune_digits.py [FOLDER]

FOLDER (default: build/digits) receives the artifacts, the checkpoint, the trained model and a learning curve.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from ortrain import artifacts
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

EPOCHS, BATCH, LEARNING_RATE, WARMUP, SEED = 10, 32, 0.003, 50, 0


def accuracy(module: Module, x: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of images that the eval model classifies correctly."""
    _loss, logits = module.eval()(x, labels)
    return float((logits.argmax(axis=1) == labels).mean())


def main(folder: Path) -> None:
    """Prepares, trains, saves, loads, exports, compares and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    images, digits = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), digits.astype(np.int64)
    x, x_held, labels, labels_held = train_test_split(images, digits, stratify=digits, random_state=SEED)

    # Run once, from the plain ONNX model: select the trained parameters, the loss and the optimizer. In training,
    # BatchNormalization uses the statistics of the batch and updates the running statistics, which evaluation uses.
    blocks = [f"block{number}.{kind}" for number in (1, 2, 3) for kind in ("weight", "scale", "bias")]
    artifacts.generate_artifacts(
        Path(__file__).with_name("convnet.onnx"),
        requires_grad=[*blocks, "fc.weight", "fc.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=folder,
    )

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    steps = EPOCHS * (len(x) // BATCH)
    scheduler = LinearLRScheduler(optimizer, WARMUP, steps, LEARNING_RATE)
    print(f"{len(x)} images to train on, {len(x_held)} held out, {module.get_parameters_size()} parameters")
    print(f"accuracy before: {accuracy(module, x_held, labels_held):.2%}")

    rng = np.random.default_rng(SEED)
    losses: list[float] = []
    accuracies: list[float] = []
    with tqdm(total=steps, unit="step") as bar:
        for _ in range(EPOCHS):
            module.train()
            for batch in rng.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
                loss, _logits = module(x[batch], labels[batch])
                optimizer.step()
                scheduler.step()
                module.lazy_reset_grad()
                losses.append(float(loss))
                bar.update()
            accuracies.append(accuracy(module, x_held, labels_held))
            bar.set_postfix(loss=f"{np.mean(losses[-len(x) // BATCH :]):.4f}", held_out=f"{accuracies[-1]:.2%}")
    after = accuracy(module, x_held, labels_held)
    print(f"accuracy after:  {after:.2%}")

    CheckpointState.save_checkpoint(state, folder / "trained", include_optimizer_state=True)
    loaded = CheckpointState.load_checkpoint(folder / "trained")
    again = Module(folder / "training_model.onnx", loaded, folder / "eval_model.onnx")
    print(f"accuracy loaded: {accuracy(again, x_held, labels_held):.2%}")

    exported = folder / "convnet_trained.onnx"
    module.export_model_for_inferencing(exported, ["logits"])
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    theirs = session.run(["logits"], {"x": x_held})[0].argmax(axis=1)
    ours = module.eval()(x_held, labels_held)[1].argmax(axis=1)
    print(f"predictions that agree with onnxruntime: {(theirs == ours).sum()} of {len(ours)}")

    figure = Figure(figsize=(8, 4), layout="constrained")
    left = figure.add_subplot(
        title="Fine-tuning a convolution network on 1347 handwritten digits", xlabel="step", yscale="log"
    )
    left.plot(losses, color="tab:blue", linewidth=0.7)
    left.set_ylabel("training loss", color="tab:blue")
    right = left.twinx()
    right.plot(np.linspace(0, steps, EPOCHS + 1)[1:], accuracies, color="tab:orange", marker="o")
    right.set_ylabel("accuracy on 450 held-out digits", color="tab:orange")
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    figure.savefig(folder / "learning_curve.png", dpi=100)
    print(f"learning curve:  {folder / 'learning_curve.png'}")
    if after < 0.98 or accuracy(again, x_held, labels_held) != after or not np.array_equal(theirs, ours):
        sys.exit("this run is worse than it should be")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits"))
