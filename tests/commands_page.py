"""Write the forms of data and the flags of the commands into docs/commands.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ortrain._command.commands import COMMANDS, Command
from ortrain._command.option import Option
from ortrain._data_forms import FORMS

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
FORMS_BEGIN, FORMS_END = "<!-- the forms of data, by make commands -->", "<!-- end of the forms -->"
FLAGS_BEGIN, FLAGS_END = "<!-- the flags of the commands, by make commands -->", "<!-- end of the flags -->"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def row(option: Option) -> str:
    value = "" if option.kind == "switch" else f" {option.placeholder}"
    flags = ", ".join(f"`{escaped(name + value)}`" for name in (*option.aliases, option.flag))
    return f"| {flags} | {escaped(option.help)} | {escaped(option.default)} |"


def table(title: str, options: Sequence[Option]) -> list[str]:
    return [f"| {title} | meaning | default |", "|---|---|---|", *map(row, options), ""]


def section(command: Command, shown: list[Sequence[Option]]) -> list[str]:
    """Return the section of a command. The flags of reading are shown once."""
    lines = [f"### ortrain {command.name}", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
    lines += ["```text", f"ortrain {command.name} {command.usage}", "```", ""]
    lines += [f"`MODEL`: {command.model}." + (f" `OUTPUT`: {command.output}." if command.output else ""), ""]
    for title, options in command.groups.items():
        if options in shown:
            lines += [f"{title.capitalize()}: the flags of `ortrain train` from `--target` on.", ""]
        else:
            lines += table(title, options)
    return lines


def flags() -> str:
    lines: list[str] = []
    shown: list[Sequence[Option]] = []
    for command in COMMANDS:
        lines += section(command, shown)
        shown += [options[2:] for options in command.groups.values()]
    return "\n".join(lines)


def page() -> str:
    """Return the page with its generated parts."""
    text = PAGE.read_text(encoding="utf-8")
    for begin, end, content in (
        (FORMS_BEGIN, FORMS_END, f"```text\n{FORMS}\n```\n"),
        (FLAGS_BEGIN, FLAGS_END, flags()),
    ):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{content}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
