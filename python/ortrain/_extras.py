"""Import of optional packages. A missing package is an error that names the extra of ortrain which installs it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["required"]


def required(module: str, package: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module, such as ``PIL.Image``.
        package: the name of the package in the index, such as ``Pillow``.
        extra: the extra of ortrain that installs the package.
        purpose: the subject of the error message, such as ``a folder of images``.

    Raises:
        ImportError: if the package is not installed.

    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'ortrain[{extra}]'",
            name=package,
        ) from error
