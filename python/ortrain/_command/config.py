"""Settings of a command in a TOML file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortrain import _files
from ortrain._command.option import Option, UsageError, checked, unknown_key
from ortrain._extras import required

__all__ = ["read_config", "write_config"]


def read_config(path: Path, options: Sequence[Option]) -> dict[str, Any]:
    """Return the settings of a TOML file.

    Raises:
        UsageError: if the file is missing or no TOML, or a key or a value does not fit.

    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = required("tomli", "tomli", "train", "a TOML file on Python 3.10")
    try:
        content = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UsageError(f"the file {path} cannot be read: {problem}") from error
    try:
        found: dict[str, Any] = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    by_name = {option.name: option for option in options}
    for key in found:
        if key not in by_name:
            raise unknown_key(key, options, str(path))
    return {key: checked(by_name[key], value, str(path)) for key, value in found.items()}


def write_config(path: Path, options: Sequence[Option], settings: Mapping[str, Any]) -> None:
    """Write settings as a TOML file. Options without a value are comments with their help."""
    lines = []
    for option in options:
        default = f" (default: {option.default})" if option.default else ""
        lines.append(f"# {option.help}{default}")
        value = settings.get(option.name)
        lines.append(f"# {option.name} =" if value is None else f"{option.name} = {_toml(value)}")
        lines.append("")
    _files.write(path, "\n".join(lines).encode())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
