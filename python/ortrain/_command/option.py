"""Options of the commands: one description for the flag, the key in a TOML file, and the help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ortrain._suggest import hint

__all__ = ["Option", "UsageError", "add_options", "checked"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class UsageError(Exception):
    """Wrong use of a command; the exit status is 2."""


@dataclass(frozen=True)
class Option:
    """Option of a command."""

    name: str
    """Key in a TOML file; the flag has hyphens instead of underscores."""
    kind: str
    """Type of the value: a key of the table of types."""
    help: str
    """Help of the flag."""
    metavar: str = ""
    """Value in the help."""
    aliases: tuple[str, ...] = ()
    """Further flags."""
    choices: tuple[str, ...] = ()
    """Permitted texts; for a type other than text they are permitted beside its values."""
    default: str = ""
    """Default in the help, if there is one."""

    @property
    def flag(self) -> str:
        """Flag of the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def placeholder(self) -> str:
        """Value in the help."""
        return self.metavar or "|".join(self.choices) or self.name.upper()


def _text(text: str) -> str:
    return text


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _size(text: str) -> list[int]:
    sizes = [int(part) for part in text.lower().split("x")]
    if len(sizes) not in (1, 2):
        raise ValueError(text)
    return sizes * (3 - len(sizes))


def _bytes(text: str) -> int:
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _weights(text: str) -> dict[str, float]:
    pairs = [part.rpartition("=") for part in text.split(",")]
    if not all(name for name, _, _ in pairs):
        raise ValueError(text)
    return {name.strip(): float(weight) for name, _, weight in pairs}


def _named(text: str) -> str | dict[str, Any]:
    """Return a name, or a name with its settings: ``adamw,weight_decay=0.05,betas=0.9,0.95``."""
    name, *settings = re.split(r",(?=[^,]*=)", text)
    if not name.strip() or "=" in name or "," in name:
        raise ValueError(text)
    pairs = (part.partition("=") for part in settings)
    found = {key.strip(): _literal(value) for key, _, value in pairs}
    return {"name": name.strip(), **found} if found else name.strip()


def _ranked(text: str) -> int | dict[str, Any]:
    """Return a rank, or a rank with settings of an adapter: ``8,alpha=16,targets=q_proj,v_proj``."""
    found = _named(text)
    return {"rank": int(found.pop("name")), **found} if isinstance(found, dict) else int(found)


def _literal(text: str) -> Any:
    """Return numbers, true and false, or the text."""
    if "," in text:
        return [_literal(part) for part in text.split(",")]
    text = text.strip()
    for parse in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            return parse(text)
        except (ValueError, KeyError):
            continue
    return text


# Parser of a text, type of the value, and description for error messages.
_KINDS: dict[str, tuple[Callable[[str], Any], tuple[type, ...], str]] = {
    "text": (_text, (str,), "a text"),
    "integer": (_integer, (int,), "an integer"),
    "number": (_number, (int, float), "a number"),
    "texts": (_texts, (list,), "texts with commas between them"),
    "integers": (_integers, (list,), "integers with commas between them"),
    "numbers": (_numbers, (list,), "numbers with commas between them"),
    "size": (_size, (list,), "a number of pixels, or HEIGHTxWIDTH"),
    "bytes": (_bytes, (int,), "a number of bytes, such as 500M or 2G"),
    "weights": (_weights, (dict,), "CLASS=WEIGHT pairs with commas between them"),
    "named": (_named, (dict,), "NAME, or NAME,SETTING=VALUE with commas between settings"),
    "ranked": (_ranked, (int, dict), "RANK, or RANK,SETTING=VALUE with commas between settings"),
    "switch": (_text, (bool,), "true or false"),
}
_ELEMENTS = {"texts": (str,), "integers": (int,), "numbers": (int, float), "size": (int,)}


def parsed(option: Option, text: str) -> Any:
    """Return the value of a flag.

    Raises:
        argparse.ArgumentTypeError: if the text is no value of the option.

    """
    if text in option.choices:
        return text
    parse, _, what = _KINDS[option.kind]
    try:
        if option.choices and option.kind == "text":
            raise ValueError(text)
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {_expected(option, what)}, got {text!r}") from None


def checked(option: Option, value: Any, place: str) -> Any:
    """Return the value of a key of a TOML file; a text is read like the value of a flag.

    Raises:
        UsageError: if the value has another type.

    """
    _, types, what = _KINDS[option.kind]
    if isinstance(value, str) and option.kind != "switch":
        try:
            return parsed(option, value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{place}: {option.name}: {error}") from error
    fits = isinstance(value, types) and (option.kind == "switch" or not isinstance(value, bool))
    if option.kind in _ELEMENTS and not isinstance(value, list):
        value, fits = [value], True
    if fits and isinstance(value, list):
        elements = _ELEMENTS[option.kind]
        fits = all(isinstance(each, elements) and not isinstance(each, bool) for each in value)
        value = value * 2 if option.kind == "size" and len(value) == 1 else value
    if not fits:
        raise UsageError(f"{place}: {option.name}: expected {_expected(option, what)}, got {value!r}")
    return value


def _expected(option: Option, what: str) -> str:
    words = ", ".join(option.choices)
    if not words:
        return what
    return f"one of {words}" if option.kind == "text" else f"{what}, or {words}"


def add_options(parser: argparse.ArgumentParser, title: str, options: Sequence[Option]) -> None:
    """Add the flags of options to a parser, as a group of its help."""
    group = parser.add_argument_group(title)
    for option in options:
        # A flag that is not given leaves no attribute, so that a TOML file can set it.
        arguments: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        text = f"{option.help} (default: {option.default})" if option.default else option.help
        arguments["help"] = text.replace("%", "%%")
        if option.kind == "switch":
            # A switch that is on by default needs a flag that turns it off.
            action: Any = argparse.BooleanOptionalAction if option.default else "store_true"
            group.add_argument(option.flag, *option.aliases, action=action, **arguments)
            continue
        group.add_argument(
            option.flag, *option.aliases, metavar=option.placeholder, type=partial(parsed, option), **arguments
        )


def unknown_key(key: str, options: Sequence[Option], place: str) -> UsageError:
    """Return the error for a key that no option has."""
    return UsageError(f"{place}: unknown key {key!r}{hint(key, [option.name for option in options])}")
