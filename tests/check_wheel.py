"""Install the wheel of a folder beside NumPy alone, in an environment of each Python at hand, and train with it.

python tests/check_wheel.py dist
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (3, 10)
OLDEST_NUMPY = "1.24"
# First minor version of Python 3 that is not looked for. The range includes future releases, because an abi3 wheel
# supports all of them.
NEWEST_LOOKED_FOR = 20
PROGRAM = """
import importlib.metadata, sys
import numpy as np
import ortrain
from ortrain import CheckpointState, LossType, Module, Optimizer, OptimType

installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
assert installed <= {"numpy", "ortrain", "pip", "setuptools"}, installed
model = ortrain.examples.convnet()
ortrain.generate_artifacts(model, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW)
state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
images = np.random.default_rng(0).random((64, 1, 8, 8), np.float32)
labels = images.mean(axis=(1, 3)).argmax(axis=1)
losses = []
for step in range(20):
    losses.append(float(module(images, labels)))
    optimizer.step()
    module.lazy_reset_grad()
assert losses[-1] < losses[0] / 2, losses
module.export_model_for_inferencing("trained.onnx", ["logits"])
(logits,) = ortrain.InferenceSession("trained.onnx").run(None, {"x": images})
assert logits.shape == (64, 10)
python = sys.implementation.name + " " + ".".join(map(str, sys.version_info[:3]))
print(f"{python}, numpy {np.__version__}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
"""


def pythons() -> list[str]:
    """Return the interpreters of this machine that the wheel supports, one for each version."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST_LOOKED_FOR)]
    candidates = [sys.executable, *filter(None, map(shutil.which, names))]
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += map(str, sorted(folder.glob("*/bin/python")))
    found: dict[tuple[int, ...], str] = {}
    ask = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            continue
        *version, without_lock = map(int, done.stdout.split())
        # The limited C API (abi3) does not support free-threaded interpreters yet.
        if tuple(version) >= OLDEST and not without_lock:
            found.setdefault(tuple(version), candidate)
    return [found[version] for version in sorted(found)]


def check(python: str, wheel: Path, numpy: str) -> str:
    """Run the program in a fresh environment and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([python, "-m", "venv", environment], check=True)
        inside = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        subprocess.run([inside, "-m", "pip", "install", "--quiet", wheel, numpy], check=True)
        done = subprocess.run([inside, "-I", "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{python}: {done.stderr}")
        return done.stdout.rstrip()


def main(folder: Path) -> None:
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        sys.exit(f"{folder} must have one wheel and one sdist, not {[path.name for path in (*wheels, *sdists)]}")
    tags = wheels[0].name.removesuffix(".whl").split("-")[2:]
    system = {"Linux": "manylinux", "Darwin": "macosx", "Windows": "win"}[platform.system()]
    if tags[:2] != ["cp310", "abi3"] or not re.match(system, tags[2]):
        sys.exit(f"{wheels[0].name} is not an abi3 wheel for {system} and Python 3.10 or later")
    found = pythons()
    checked = [check(python, wheels[0].resolve(), "numpy") for python in found]
    checked.append(check(found[0], wheels[0].resolve(), f"numpy=={OLDEST_NUMPY}.*"))
    for path in (*sdists, *wheels):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print("\n".join(checked))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
