"""Virtual environments of other libraries, created under build/, and created again when their versions change.

Needs the standard library alone. Used by the tests and by benches/compare.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
BUILD = TESTS.parent / "build"


def suitable_python(newest: tuple[int, int]) -> str:
    """Return an interpreter that is not newer than the required wheels support."""
    if sys.version_info[:2] <= newest:
        return sys.executable
    name = f"python{newest[0]}.{newest[1]}"
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"the packages have no wheels for this Python; put {name} on the PATH")
    return found


def without_constraints() -> dict[str, str]:
    """Return the environment variables without PIP_CONSTRAINT.

    The versions that this project pins would contradict the requirements of the environment.
    """
    return {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}


def environment(name: str, requirements: Path, newest: tuple[int, int]) -> Path:
    """Return the interpreter of the environment build/NAME.

    `newest` is the newest version of Python for which all requirements have wheels.
    """
    folder = BUILD / name
    stamp = folder / "stamp"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    python = folder / "venv" / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run([suitable_python(newest), "-m", "venv", folder / "venv"], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements],
            env=without_constraints(),
            check=True,
        )
        stamp.write_text(wanted)
    return python


def oracle() -> Path:
    """Return the interpreter with onnxruntime-training 1.19.2, which has wheels up to Python 3.11."""
    return environment("oracle", TESTS / "oracle" / "requirements.txt", (3, 11))


def classic_oracle() -> Path:
    """Return the interpreter with onnxruntime-training 1.15.0, the last release that has TrainingSession."""
    return environment("classic-oracle", TESTS / "classic_oracle" / "requirements.txt", (3, 11))


def trainer_oracle() -> Path:
    """Return the interpreter with onnxruntime-training 1.15.0 and PyTorch 2.0.1, which have ORTTrainer, some 5 GB."""
    return environment("trainer-oracle", TESTS / "trainer_oracle" / "requirements.txt", (3, 11))


def jax() -> Path:
    """Return the interpreter with jax for the CPU."""
    return environment("jax", TESTS / "in_jax" / "requirements.txt", (3, 13))


def torch() -> Path:
    """Return the interpreter with PyTorch, some 6 GB."""
    return environment("torch", TESTS / "in_torch" / "requirements.txt", (3, 13))


def keras() -> Path:
    """Return the interpreter with Keras on TensorFlow and tf2onnx, some 2 GB."""
    return environment("keras", TESTS / "exporters" / "requirements.txt", (3, 13))


def flower() -> Path:
    """Return the interpreter with Flower and Ray, some 0.6 GB."""
    return environment("flower", TESTS / "in_flower" / "requirements.txt", (3, 14))


def reports() -> Path:
    """Return the interpreter with a driver of browsers, and with the libraries that callbacks write for."""
    return environment("reports", TESTS / "in_reports" / "requirements.txt", (3, 13))


def printed_in_environment(python: Path, script: Path, *arguments: str) -> str:
    """Run a script in an environment, without the PYTHON* variables of this process, and return its output."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([python, script, *arguments], env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{script.name} failed: {done.stderr[-4000:]}")
    return done.stdout


def in_environment(python: Path, script: Path, *arguments: str) -> str:
    """Run a script in an environment and return the last line of its output."""
    return printed_in_environment(python, script, *arguments).splitlines()[-1]
