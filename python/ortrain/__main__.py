"""``python -m ortrain``: look inside a model."""

from __future__ import annotations

import argparse
import sys

from ortrain import OrtrainError, dump, inspect, operators


def _shape(text: str) -> tuple[str, list[int]]:
    name, _, sizes = text.rpartition("=")
    try:
        return name, [int(size) for size in sizes.split(",") if size]
    except ValueError:
        name = ""
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=2,3")
    return name, []


def _operators() -> str:
    lines = [("domain", "operator", "gradient", "runs as", "versions")]
    for info in operators():
        versions = ", ".join(map(str, info.versions))
        inputs = ", ".join(map(str, info.gradient_inputs))
        lines.append((info.domain, info.name, f"{info.gradient} {inputs}".rstrip(), info.runs, versions))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"{line.rstrip()}\n" for line in padded)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ortrain", description="Look inside ONNX models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dump", help="print one stage of a model")
    command.add_argument("model", metavar="MODEL", help="an .onnx file")
    command.add_argument(
        "--stage",
        choices=["graph", "gradient", "program"],
        default="graph",
        help="the graph as read, with its gradient, or as the program that runs",
    )
    command.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=2,3",
        help="the sizes of an input; may be repeated",
    )
    command = commands.add_parser(
        "inspect", help="say what a file is, what would be trained, what stands in the way, what a step takes"
    )
    command.add_argument("model", metavar="FILE", help="an .onnx file, a checkpoint, or safetensors")
    command.add_argument(
        "--loss-input",
        action="append",
        default=[],
        metavar="NAME",
        help="a value that the loss is made of, if not the model's outputs; may be repeated",
    )
    command.add_argument("--batch-size", type=int, metavar="N", help="plan a step for this size of open first axes")
    command.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=2,3",
        help="plan a step for these sizes of an input; may be repeated",
    )
    command.add_argument("--all", action="store_true", help="print every tensor and every node")
    command.add_argument("--json", action="store_true", help="print the report as JSON, with exact numbers")
    commands.add_parser("operators", help="list the operators, what they take, pass back, and how they run")
    options = parser.parse_args(arguments)
    try:
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
        print(dump(options.model, options.stage, dict(options.shape)), end="")
    except OrtrainError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
