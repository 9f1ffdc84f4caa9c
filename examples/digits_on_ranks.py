"""Train perceptron.onnx on scikit-learn's handwritten digits on several ranks of MPI.

    mpiexec -n 2 python examples/digits_on_ranks.py [FOLDER]

Each rank trains on its own rows of each batch. With ``--zero`` the ranks divide the moments of Adam. Each rank writes a
checkpoint to FOLDER (default: build/digits_on_ranks). Without ``mpiexec`` one process trains on all rows.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from sklearn.datasets import load_digits

import ortrain
from ortrain.trainer import ORTTrainer, ORTTrainerOptions
from ortrain.trainer.optim import AdamConfig

EPOCHS, BATCH, SEED = 8, 64, 0
LEARNING_RATE = 0.003
MIN_ACCURACY = 0.95

DESCRIPTION = {
    "inputs": [("x", ["batch", 64]), ("labels", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 10])],
}


def with_loss() -> onnx.ModelProto:
    """Returns the perceptron with the loss as its first output."""
    model = onnx.load(ortrain.examples.perceptron())
    model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]))
    model.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]))
    model.graph.output.insert(0, helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return model


def main(folder: Path) -> None:
    """Trains, evaluates and saves."""
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    if "--zero" in sys.argv:
        options.distributed.deepspeed_zero_optimization.stage = 1
    with warnings.catch_warnings():
        # ORTTrainer warns that new programs should use ortrain.api.
        warnings.simplefilter("ignore", FutureWarning)
        trainer = ORTTrainer(with_loss(), DESCRIPTION, AdamConfig(lr=LEARNING_RATE), options=options)
    # MPI has set the rank and the number of ranks.
    rank, size = options.distributed.world_rank, options.distributed.world_size

    images, digits = load_digits(return_X_y=True)
    x, labels = (images / 16).astype(np.float32), digits.astype(np.int64)
    for epoch in range(EPOCHS):
        # All ranks draw the same order, and each rank takes every size-th row of a batch.
        order = np.random.default_rng([SEED, epoch]).permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH][rank::size]
            loss, _logits = trainer.train_step(x[rows], labels[rows])
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} on the rows of rank 0")

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / f"checkpoint{rank}.ortcp"
    checkpoint.unlink(missing_ok=True)  # A checkpoint never replaces a file.
    trainer.save_checkpoint(checkpoint)
    if rank == 0:
        logits = trainer.eval_step(x, labels)[1]
        accuracy = float((logits.argmax(axis=1) == labels).mean())
        hidden = trainer.communication_time().hidden_share
        print(f"ranks: {size}; accuracy: {accuracy:.2%}; hidden communication: {hidden:.0%}")
        if accuracy < MIN_ACCURACY:
            sys.exit("this run is worse than it should be")


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main(Path(folders[0] if folders else "build/digits_on_ranks"))
