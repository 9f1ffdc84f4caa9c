"""The commands: their arguments, and how they run and fail."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ortrain._command.option import Option, UsageError, add_options
from ortrain._command.output import complain
from ortrain._command.settings import COMPARE, DATA, EVALUATE, EXPORT, FIT, MODEL, PREDICT, READING, RUN
from ortrain._data_forms import FORMS
from ortrain.errors import OrtrainError

__all__ = ["COMMANDS", "NAMES", "Command", "add_commands", "run_command"]

# Exit status that a shell reports for a program that Ctrl-C (SIGINT) ended.
_INTERRUPTED = 128 + 2


@dataclass(frozen=True)
class Command:
    """Command with its options by group."""

    name: str
    usage: str
    summary: str
    model: str
    groups: Mapping[str, Sequence[Option]]
    has_config: bool = False
    output: str = ""

    @property
    def options(self) -> list[Option]:
        """All options, which are the keys of a TOML file."""
        return [Option("model", "text", self.model), *(option for group in self.groups.values() for option in group)]


COMMANDS = (
    Command(
        "train",
        "MODEL --data PATH [--val PATH|SHARE] [--epochs N] [--out FOLDER] [options]",
        "train a model on files",
        "ONNX model, or a folder that Model.save wrote",
        {"data": DATA, "model": MODEL, "training": FIT, "run": RUN},
        has_config=True,
    ),
    Command(
        "evaluate",
        "MODEL --data PATH [options]",
        "print loss and metrics of a model on files",
        "ONNX model, or the folder of a run with its data settings",
        {"data": READING, "evaluation": EVALUATE},
    ),
    Command(
        "predict",
        "MODEL --data PATH [--out FILE] [options]",
        "write the outputs of a model for files, as CSV, JSON lines or NPZ",
        "ONNX model, or the folder of a run with its data settings",
        {"data": READING, "prediction": PREDICT},
    ),
    Command(
        "export",
        "MODEL OUTPUT [options]",
        "write the trained model of a run in another form",
        "ONNX model, or the folder of a run",
        {"form": EXPORT},
        output="ONNX file to write",
    ),
    Command(
        "compare",
        "MODEL --data PATH [options]",
        "run the same steps here and on other runtimes; print the first tensor that differs",
        "ONNX model, or a folder that Model.save wrote",
        {"data": READING, "comparison": COMPARE},
    ),
)
NAMES = tuple(command.name for command in COMMANDS)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parsers of the commands."""
    for command in COMMANDS:
        has_data = "data" in command.groups
        parser = commands.add_parser(
            command.name,
            usage=f"%(prog)s {command.usage}",
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"data is one of:\n{_indented(FORMS)}" if has_data else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        optional = {"nargs": "?"} if command.has_config else {}
        parser.add_argument("model", metavar="MODEL", help=command.model, **optional)  # type: ignore[arg-type]
        if command.output:
            parser.add_argument("output", metavar="OUTPUT", help=command.output)
        if command.has_config:
            group = parser.add_argument_group("settings in a file")
            group.add_argument("--config", metavar="FILE", help="read settings from a TOML file; flags override them")
            group.add_argument("--save-config", metavar="FILE", help="write all settings to a TOML file")
        for title, options in command.groups.items():
            add_options(parser, title, options)
        parser.add_argument("--debug", action="store_true", help="print the traceback of an error")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def run_command(program: str, options: argparse.Namespace) -> int:
    """Run a command and return its exit status: 0, 1 failed, 2 wrong use, 130 interrupted."""
    given = dict(vars(options))
    name = given.pop("command")
    command = next(command for command in COMMANDS if command.name == name)
    debug = given.pop("debug", False)
    try:
        settings = _settings(command, given)
        if settings is None:
            return 0
        run = getattr(import_module(f"ortrain._command.{command.name}"), command.name)
        status: int = run(settings)
        return status
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as interrupt:
        text = str(interrupt)
        if text:
            kept = text.partition(": fit(")[0]
            complain(program, f"{kept}; --resume goes on" if "saved in" in kept else kept)
        return _INTERRUPTED
    except UsageError as error:
        return _failed(f"{program} {command.name}", error, 2, debug=debug)
    except (OrtrainError, ImportError, OSError) as error:
        return _failed(program, error, 1, debug=debug)
    except Exception as error:
        return _failed(program, f"{type(error).__name__}: {error} (--debug prints the traceback)", 1, debug=debug)


def _failed(program: str, error: object, status: int, *, debug: bool) -> int:
    """Print an error, as one sentence or with its traceback, and return the exit status."""
    if debug:
        traceback.print_exc()
    else:
        complain(program, error)
    return status


def _settings(command: Command, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a file and of the flags; ``None`` if they were only to be written."""
    if not command.has_config:
        return given
    from ortrain._command.config import read_config, write_config

    config, target = given.pop("config", None), given.pop("save_config", None)
    settings = {} if config is None else read_config(Path(config), command.options)
    settings.update(given)
    if target is not None:
        write_config(Path(target), command.options, settings)
        if "model" not in settings or "data" not in settings:
            return None
    return settings
