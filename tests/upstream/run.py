"""onnxruntime's tests of its training API, run on ortrain through ``ortrain.compat``.

``make conform UPSTREAM=FOLDER`` runs it; FOLDER is ``orttraining/orttraining/test/python`` of a copy of
microsoft/onnxruntime. The tests run on a copy of FOLDER, in an environment with torch (build/upstream). They run twice:
with and without onnxruntime in the environment. A failing test outside of EXPECTED is an error, and so is a passing
test of EXPECTED.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import environments  # noqa: E402
import other_suites  # noqa: E402

# Current names, and names of older versions.
FILES = ("orttraining_test_ort_apis*.py", "orttraining_test_onnxblock.py", "orttraining_test_python_bindings.py")
# Data of the tests, relative to onnxruntime/test of the repository and to the working folder.
DATA = "testdata/custom_op_library"
# A search for a sentence in an error; the plugin's Wording contains every sentence.
SENTENCE = re.compile(r"\bin str\((\w+)\.value\)")

CUDA = "CUDA only: the test asks ortrain for device='cuda'"
ANYWHERE = {
    "test_cuda_execution_provider": CUDA,
    "test_get_and_set_parameter_values[cuda]": CUDA,
    "test_ort_custom_ops": "CUDA only, and its operators are in a shared library, which ortrain does not load",
    "test_save_ort_format": "ortrain does not write .ort files, the format of onnxruntime's own optimized graphs",
    "test_string_inputs": "ortrain has no tensors of strings",
}
INFERENCE_BUILD = (
    "onnxruntime.InferenceSession is the class of the installed onnxruntime, which cannot run training models"
)
EXPECTED = {
    "with onnxruntime": ANYWHERE
    | {
        "test_mse_loss_training_graph_execution": INFERENCE_BUILD,
        "test_crossentropy_loss_training_graph_execution": INFERENCE_BUILD,
        "test_bcewithlogits_loss_training_graph_execution": INFERENCE_BUILD,
        "test_adamw_optimizer_execution": INFERENCE_BUILD,
        "test_grad_clipping_execution": INFERENCE_BUILD,
    },
    "without onnxruntime": ANYWHERE,
}


def files_with_tests(folder: Path) -> list[Path]:
    """Return the files of the folder that have tests."""
    found = sorted({path for pattern in FILES for path in folder.glob(pattern)})
    return [path for path in found if re.search(r"^ *def test_", path.read_text(), re.MULTILINE)]


def copy(files: list[Path], work: Path) -> None:
    """Prepare a working folder: the files without checks of error texts, and their data."""
    for path in files:
        (work / path.name).write_text(
            SENTENCE.sub(r'in __import__("through_compat").Wording(\1.value)', path.read_text())
        )
    root = next((above for above in files[0].resolve().parents if (above / "onnxruntime" / "test").is_dir()), None)
    if root is not None and (root / "onnxruntime" / "test" / DATA).is_dir():
        shutil.copytree(root / "onnxruntime" / "test" / DATA, work / DATA)


def run(python: Path, files: list[Path], *, hide: bool) -> list[dict[str, Any]]:
    """Run the files; returns the results of each test."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy(files, work)
        names = [path.name for path in files]
        return other_suites.run(python, HERE, work, names, *["--hide-onnxruntime"] * hide)


def main() -> None:
    """Run the tests twice; fail after unexpected results."""
    parser = argparse.ArgumentParser(description="Run onnxruntime's tests of its training API with ortrain.")
    parser.add_argument("folder", type=Path, help="orttraining/orttraining/test/python in the sources of onnxruntime")
    parser.add_argument("wheel", type=Path, help="wheel of ortrain")
    parser.add_argument("--json", type=Path, default=environments.BUILD / "upstream" / "results.json")
    options = parser.parse_args()
    files = files_with_tests(options.folder)
    if not files:
        parser.error(
            f"there are no tests of the training API in {options.folder}: no {', '.join(FILES)}; "
            "they are in orttraining/orttraining/test/python of microsoft/onnxruntime, 1.19 to 1.21"
        )
    python = environments.environment("upstream", HERE / "requirements.txt", (3, 13))
    other_suites.install(python, options.wheel)

    wrong, everything = [], {}
    for way, expected in EXPECTED.items():
        start = time.perf_counter()
        results = run(python, files, hide=way.startswith("without"))
        print(f"\n{', '.join(path.name for path in files)} {way}: {time.perf_counter() - start:.0f} s")
        wrong += [f"{way}: {text}" for text in other_suites.judge(results, expected)]
        everything[way] = results
    options.json.write_text(json.dumps(everything, indent=1) + "\n")
    print(f"\nall results: {options.json}")
    if wrong:
        sys.exit("\n".join(["unexpected results:", *wrong]))


if __name__ == "__main__":
    main()
