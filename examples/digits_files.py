"""Write scikit-learn's handwritten digits to files for the command ``ortrain train``, and check the result.

    python examples/digits_files.py FOLDER
    ortrain train examples/convnet.onnx --data FOLDER/train.npz --val FOLDER/val.npz --out FOLDER/run
    python examples/digits_files.py FOLDER --check

FOLDER receives the files and the folder of the run.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ortrain import History

SEED, LEAST_ACCURACY = 0, 0.98


def write(folder: Path) -> None:
    """Writes train.npz and val.npz, with the arrays x and y."""
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_held, y, y_held = train_test_split(images, digits, stratify=digits, random_state=SEED)
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / "val.npz", x=x_held, y=y_held)


def check(folder: Path) -> None:
    """Ends with an error if the last epoch of the run has a low accuracy."""
    accuracy = History.read_csv(folder / "run" / "history.csv")["val_accuracy"][-1]
    if accuracy < LEAST_ACCURACY:
        sys.exit(f"the accuracy is {accuracy:.2%}, expected at least {LEAST_ACCURACY:.0%}")


if __name__ == "__main__":
    (check if "--check" in sys.argv else write)(Path(sys.argv[1]))
