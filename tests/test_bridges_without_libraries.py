"""The bridges to other libraries where these libraries are not installed: imports work, errors name the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The bridges: an expression that uses each, its error message, its example.
BRIDGES = {
    "jax": (
        "ortrain.jax.as_function(ortrain.examples.perceptron())",
        "ortrain.jax needs jax, which is not installed here: pip install jax",
        "onnx_backbone_in_jax",
    ),
    "torch": (
        "ortrain.torch.as_module(ortrain.examples.perceptron())",
        "ortrain.torch needs PyTorch, which is not installed here; install the package torch: pip install torch",
        "onnx_backbone_in_torch",
    ),
}

HIDDEN = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {libraries!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""


def without_libraries(
    script: str, *arguments: str | Path, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that cannot import the libraries."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        HIDDEN.format(libraries=tuple(BRIDGES)) + script,
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.parametrize("library", BRIDGES)
def test_error_names_the_package_to_install(library: str) -> None:
    use, sentence, _ = BRIDGES[library]
    done = without_libraries(f"""
import ortrain, ortrain.{library}
assert all(getattr(ortrain.{library}, name).__doc__ for name in ortrain.{library}.__all__)
try:
    {use}
except ImportError as error:
    print(error)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sentence


def test_a_library_that_is_broken_is_no_library_that_is_missing(tmp_path: Path) -> None:
    """An import that fails inside of jax is not reported as a missing jax."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import a_part_of_jax_that_is_gone")
    script = "import sys\nsys.path.insert(0, '.')\nimport ortrain.jax"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'a_part_of_jax_that_is_gone'"


def test_ortrain_does_not_import_the_libraries() -> None:
    """This holds where the libraries are installed, too."""
    script = "import sys, ortrain\nfrom ortrain import *\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ortrain.gradient" in loaded
    assert loaded.isdisjoint({*BRIDGES, *(f"ortrain.{library}" for library in BRIDGES)})


@pytest.mark.parametrize("library", BRIDGES)
def test_example_names_the_package_to_install(library: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / f"{BRIDGES[library][2]}.py"
    run = "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    done = without_libraries(run, example, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "needs" in done.stderr
    assert f"pip install {library}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
