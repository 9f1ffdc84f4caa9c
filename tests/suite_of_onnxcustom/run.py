"""onnxcustom's tests of its training, run on ortrain through ``ortrain.compat``.

``make conform ONNXCUSTOM=FOLDER`` runs it; FOLDER is ``_unittests/ut_training`` of a copy of sdpython/onnxcustom. The
tests run on a copy of FOLDER, with scikit-learn and skl2onnx of their time (build/onnxcustom).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import environments  # noqa: E402
import other_suites  # noqa: E402

SHAPES = "the test passes {}; the reference does not check shapes, and ortrain rejects other shapes"
EXPECTED = {
    "TestGradHelper::test_grad_helper_loss": (
        "the test names a loss that its model does not have; the reference ignores this, and ortrain rejects it"
    ),
    "TestOrtTrainingForwardBackward::test_forward_training_linreg": SHAPES.format(
        "a gradient of shape (1, rows) for an output of shape (rows, 1)"
    ),
    "TestOrtTrainingForwardBackward::test_forward_training_logreg": SHAPES.format(
        "a weight of shape (3,) for an initializer of shape (1, 3)"
    ),
}


def main() -> None:
    """Run the tests; fail after unexpected results."""
    parser = argparse.ArgumentParser(description="Run onnxcustom's tests of training with ortrain.")
    parser.add_argument("folder", type=Path, help="_unittests/ut_training in the sources of onnxcustom")
    parser.add_argument("wheel", type=Path, help="wheel of ortrain")
    parser.add_argument("--json", type=Path, default=environments.BUILD / "onnxcustom" / "results.json")
    options = parser.parse_args()
    files = sorted(options.folder.glob("test_*.py"))
    if not files:
        parser.error(
            f"there are no tests in {options.folder}; they are in _unittests/ut_training of sdpython/onnxcustom"
        )
    python = environments.environment("onnxcustom", HERE / "requirements.txt", (3, 11))
    other_suites.install(python, options.wheel)

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for path in files:
            shutil.copy(path, work)
        results = other_suites.run(python, HERE, work, [path.name for path in files])
    print(f"\nut_training of onnxcustom: {time.perf_counter() - start:.0f} s")
    wrong = other_suites.judge(results, EXPECTED)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nall results: {options.json}")
    if wrong:
        sys.exit("\n".join(["unexpected results:", *wrong]))


if __name__ == "__main__":
    main()
