"""Tests of importing ortrain."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires, version

import ortrain
import ortrain.compat
import ortrain.onnxblock

HEAVY = (
    *("onnx", "torch", "onnxruntime", "ml_dtypes", "google.protobuf", "scipy"),
    *("PIL", "h5py", "matplotlib", "pyarrow", "soundfile", "tokenizers", "tqdm"),
)


def imported(statements: str) -> set[str]:
    """Return the names of imported modules after some statements in a fresh interpreter."""
    script = f"import sys\n{statements}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_numpy_is_all_it_imports() -> None:
    found = imported("import ortrain")
    assert not found.intersection(HEAVY)
    beyond = {name.partition(".")[0] for name in found - imported("import numpy")}
    assert beyond - set(sys.stdlib_module_names) == {"ortrain"}


def test_training_imports_no_more() -> None:
    found = imported(
        "from ortrain import artifacts, api, InferenceSession, OrtValue\n"
        "from ortrain.api.checkpoint_state import CheckpointState, Parameter, Parameters, Properties\n"
        "from ortrain.api.lr_scheduler import LinearLRScheduler\n"
        "from ortrain.api.module import Module\n"
        "from ortrain.api.optimizer import Optimizer\n"
        "from ortrain.session import TrainingSession\n"
    )
    assert not found.intersection(HEAVY)


def test_lazy_imports() -> None:
    found = imported("import ortrain\nfrom ortrain.api import CheckpointState, Module, Optimizer")
    assert "ortrain.api.module" in found
    assert not {"ortrain.artifacts", "ortrain.session", "ortrain._inspect", "ortrain._catalogue"} & found
    everything = imported("from ortrain import *\nassert artifacts.Loss and session and inspect and operators and dump")
    assert {"ortrain.artifacts", "ortrain.session", "ortrain._inspect", "ortrain._catalogue"} <= everything
    assert set(ortrain.__all__) <= set(dir(ortrain))
    assert ortrain.artifacts is sys.modules["ortrain.artifacts"]
    assert not hasattr(ortrain, "unheard_of")


def test_every_module_is_reached_after_a_bare_import() -> None:
    """Each module is imported on first use, and not before."""
    names = (
        "api",
        "artifacts",
        "backend",
        "capi",
        "compat",
        "errors",
        "examples",
        "inference",
        "onnxblock",
        "ortvalue",
        "session",
    )
    assert set(names) <= set(dir(ortrain))
    later = {
        f"ortrain.{name}" for name in ("artifacts", "backend", "capi", "compat", "examples", "onnxblock", "session")
    }
    assert not later & imported("import ortrain\ndir(ortrain)\nhasattr(ortrain, 'unheard_of')")
    for name in names:
        assert f"ortrain.{name}" in imported(f"import ortrain\nassert ortrain.{name}.__name__ == 'ortrain.{name}'")
    assert "ortrain.onnxblock.blocks" in imported("import ortrain\nadd = ortrain.onnxblock.blocks.Add")


def test_errors_without_onnx() -> None:
    """Access to every name, such as ``help(ortrain)``, works without onnx."""
    script = """
import importlib.abc, pydoc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "onnx":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import ortrain
for name in ("onnxblock", "backend"):
    assert not hasattr(ortrain, name)
    try:
        getattr(ortrain, name)
    except AttributeError as error:
        print(error)
assert "class Module(" in pydoc.render_doc(ortrain, renderer=pydoc.plaintext)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"ortrain.{name} needs the package 'onnx', which is not installed here" for name in ("onnxblock", "backend")
    ]


def test_common_names_are_exported_by_the_package() -> None:
    from ortrain import artifacts, session

    for module, names in [
        (ortrain.api, ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]),
        (artifacts, ["Loss", "LossType", "OptimType", "generate_artifacts"]),
        (session, ["TrainingSession"]),
    ]:
        for name in names:
            assert getattr(ortrain, name) is getattr(module, name)
            assert name in ortrain.__all__
    statement = "from ortrain import CheckpointState, LinearLRScheduler, Module, Optimizer"
    assert not {"ortrain.artifacts", "ortrain.session", "difflib", "html"} & imported(statement)
    assert "ortrain.artifacts" in imported("from ortrain import generate_artifacts, LossType, OptimType")


def test_numpy_is_all_it_requires() -> None:
    needed = [line for line in requires("ortrain") or [] if "extra ==" not in line]
    assert needed == ["numpy>=1.24"]
    assert ortrain.__version__ == version("ortrain")


def test_public_names() -> None:
    assert ortrain.api.__all__ == [
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
    for module in (
        ortrain,
        ortrain.api,
        ortrain.artifacts,
        ortrain.errors,
        ortrain.examples,
        ortrain.lora,
        ortrain.session,
        ortrain.compat,
        ortrain.onnxblock,
    ):
        for name in module.__all__:
            assert getattr(module, name).__doc__ or name == "__version__", name
    for kind in (
        ortrain.InvalidArgumentError,
        ortrain.InvalidModelError,
        ortrain.NoSuchFileError,
        ortrain.UnsupportedError,
    ):
        assert issubclass(kind, ortrain.OrtrainError)
        assert issubclass(kind, RuntimeError)
