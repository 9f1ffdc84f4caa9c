"""Command line ``ortrain``, or ``python -m ortrain``: train, evaluate and inspect models."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import NoReturn

from ortrain import CheckpointState, OrtrainError, __version__, dump, inspect, operators
from ortrain._command.commands import NAMES, add_commands, run_command
from ortrain._suggest import hint

# Exit status that a shell reports for a program that SIGPIPE ended.
_READER_LEFT = 128 + 13
# Exit status that a shell reports for a program that Ctrl-C (SIGINT) ended.
_INTERRUPTED = 128 + 2


def _shape(text: str) -> tuple[str, list[int]]:
    name, _, sizes = text.rpartition("=")
    try:
        return name, [int(size) for size in sizes.split(",") if size]
    except ValueError:
        name = ""
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME=2,3, got {text!r}")
    return name, []


def _operators() -> str:
    lines: list[tuple[str, ...]] = [("domain", "operator", "gradient", "implementation", "versions")]
    for info in operators():
        versions = ", ".join(map(str, info.versions))
        inputs = ", ".join(map(str, info.gradient_inputs))
        lines.append((info.domain, info.name, f"{info.gradient} {inputs}".rstrip(), info.runs, versions))
    return _table(lines)


def _table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"{line.rstrip()}\n" for line in padded)


def _checkpoint(path: str) -> str:
    state = CheckpointState.load_checkpoint(path)
    native = state._native
    lines: list[tuple[str, ...]] = [("parameter", "type", "shape", "trained")]
    names = native.parameter_names()
    for name in names:
        dtype, shape = native.type_of(name)
        sizes = "unknown" if shape is None else str(list(shape))
        lines.append((name, dtype, sizes, "yes" if native.requires_grad(name) else "no"))
    train_steps, optimizer_steps = native.steps()
    rate = native.learning_rate()
    trained = sum(map(native.requires_grad, names))
    summary = f"{len(names)} parameters: {trained} trained, {len(names) - trained} not trained"
    if native.is_nominal():
        summary += "; nominal checkpoint (names and types without values)"
    else:
        size = sum(parameter.data.nbytes for parameter in state.parameters.values())
        summary += f"; {size:,} bytes"
    optimizer_state = "none (moments start at zero)" if rate is None else "present"
    about: list[tuple[str, ...]] = [
        ("optimizer state", optimizer_state),
        ("optimizer steps", f"{optimizer_steps:,}"),
        ("training steps", f"{train_steps:,}"),
        ("learning rate", "none" if rate is None else f"{rate:.6g}"),
        *((("scheduler", scheduler),) if (scheduler := native.scheduler()) else ()),
        ("seed", str(state.seed)),
        *((f"property {name}", repr(value)) for name, value in state.properties),
    ]
    return f"{_table(lines)}\n{summary}\n{_table(about)}"


def _program() -> str:
    """Return the name of the program as it was called: ``ortrain`` or ``python -m ortrain``."""
    name = os.path.basename(sys.argv[0])  # noqa: PTH119  (a name, not a file)
    return "ortrain" if name.removesuffix(".exe") == "ortrain" else "python -m ortrain"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. A closed pipe (``| head``) ends it without a message."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The parent process closed the stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _READER_LEFT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # Errors of input files are OrtrainErrors with their own messages; this one comes from the standard output.
        _drop_output()
        with contextlib.suppress(OSError):
            print(f"{_program()}: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Discard buffered output, so that the interpreter does not report a broken pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit with the error for unknown arguments, with the usage of the command and the nearest flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    name = unknown[0].partition("=")[0]
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint(name, flags) if name.startswith('-') else ''}")


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Train, evaluate and inspect ONNX models.",
        epilog="Run COMMAND --help for the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"ortrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    add_commands(commands)
    command = commands.add_parser(
        "checkpoint", help="list the parameters, steps, learning rate and properties of a checkpoint"
    )
    command.add_argument(
        "file", metavar="FILE", help="checkpoint; its .data file, if there is one, must be in the same folder"
    )
    command = commands.add_parser("dump", help="print a model at one stage of its compilation")
    command.add_argument("model", metavar="MODEL", help="model file (.onnx)")
    command.add_argument(
        "--stage",
        metavar="STAGE",
        default="graph",
        help="onnx: as read; graph: with the newest operators and all types; gradient: with its gradient; lowered: the "
        "program before the first pass; the name of a pass: the program after it; program: the program that runs; "
        "memory: its memory plan; cpu_kernels: the kernels of this processor; kernels: the launches of a GPU, and the "
        "WGSL of their kernels; cuda_kernels: the same with CUDA C",
    )
    command.add_argument(
        "--passes",
        dest="stage",
        action="store_const",
        const="passes",
        help="describe each compiler pass, with the number of its changes",
    )
    command.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=2,3",
        help="shape of an input; repeatable",
    )
    command.add_argument("--device", help="GPU of the stage kernels: cuda, vulkan, metal, dx12 or webgpu")
    command = commands.add_parser(
        "inspect", help="report the kind of a file, the trained parameters, the obstacles, and the cost of a step"
    )
    command.add_argument("model", metavar="FILE", help="model file (.onnx), checkpoint, or safetensors file")
    command.add_argument(
        "--loss-input",
        action="append",
        default=[],
        metavar="NAME",
        help="value that the loss is computed from (default: the outputs of the model); repeatable",
    )
    command.add_argument(
        "--batch-size", type=int, metavar="N", help="batch size of the planned step, for open first axes of inputs"
    )
    command.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=2,3",
        help="shape of an input of the planned step; repeatable",
    )
    command.add_argument("--all", action="store_true", help="print every tensor and every node")
    command.add_argument("--json", action="store_true", help="print the report as JSON, with exact numbers")
    commands.add_parser("operators", help="list all operators with their gradients, implementations and versions")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(commands.choices.get(options.command, parser), unknown)
    if options.command is None:
        # The exit status tells a script that no command ran.
        parser.print_help()
        return 2
    if options.command in NAMES:
        return run_command(parser.prog, options)
    try:
        if options.command == "checkpoint":
            print(_checkpoint(options.file), end="")
            return 0
        if options.command == "operators":
            print(_operators(), end="")
            return 0
        if options.command == "inspect":
            shapes = dict(options.shape)
            found = inspect(options.model, options.loss_input, batch_size=options.batch_size, shapes=shapes)
            print(f"{found.to_json()}\n" if options.json else found.report(everything=options.all), end="")
            if not options.json and not options.all and found.report() != found.report(everything=True):
                print("(--all prints every tensor and every node)")
            return 0 if found.obstacle is None else 1
        print(dump(options.model, options.stage, dict(options.shape), device=options.device), end="")
    except OrtrainError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
