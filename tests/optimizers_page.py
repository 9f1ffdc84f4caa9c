"""Write the classes of ortrain.optim and the table of docs/optimizers.md, from the table of optimizers."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path

from ortrain import _ortrain
from ortrain.optim import _config

ROOT = Path(__file__).parent.parent
CLASSES = ROOT / "python" / "ortrain" / "optim" / "_rows.py"
PACKAGE = CLASSES.with_name("__init__.py")
PAGE = ROOT / "docs" / "optimizers.md"
# Names of the package that are not optimizers of the table.
OTHERS = ("Group", "OptimizerConfig", "OptimizerRow", "OwnOptimizer", "ParameterGroup", "Value", "register", "table")
GENERATED = "# `make optimizers` writes the rest of this file.\n"
BEGIN, END = "<!-- the table of optimizers, by make optimizers -->", "<!-- end of the table -->"

INTRODUCTION = '''\
"""The optimizers of the core's table. `make optimizers` generates this file; a test compares it with the core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ortrain.optim._config import Group, OptimizerConfig

__all__ = [
{names}
]
'''

CLASS = '''

class {name}(OptimizerConfig):
    """{title}

    {source}

    Args:
{arguments}

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

{example}
    """

    def __init__(
        self,
        lr: float = {rate},
        *,
{parameters}
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {settings},
            {flags},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )
'''

OPTIONS = (
    ("max_norm", "the largest L2 norm of all gradients together; longer ones are scaled, and a step returns the norm"),
    ("max_norm_per_tensor", "the largest L2 norm of the gradient of one parameter"),
    ("max_value", "the largest absolute value of an element of a gradient"),
    (
        "ema_decay",
        "decay rate of a moving average of the weights (:attr:`ortrain.api.checkpoint_state.Parameter.average`)",
    ),
    ("accumulation", 'how gradients of several training steps count: their ``"sum"``, or their ``"mean"``'),
    ("groups", "groups of parameters with settings of their own, a :class:`Group` each with settings beside its keys"),
    ("layer_decay", "the share of a layer's rate that the layer before it has; the last layer has the whole rate"),
)


def rows() -> list[_ortrain.OptimizerRow]:
    """Return the table of optimizers from the Rust core."""
    return _ortrain.optimizer_table()


def literal(value: float) -> str:
    """Return a number as code."""
    return "math.inf" if math.isinf(_config.shown(value)) else repr(value)


def item(name: str, text: str) -> str:
    """Return the docstring entry of an argument."""
    first, rest = " " * 8, " " * 12
    return "\n".join(textwrap.wrap(f"{name}: {text}.", 108, initial_indent=first, subsequent_indent=rest))


def sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def written(row: _ortrain.OptimizerRow) -> str:
    """Return the source of the class of an optimizer."""
    defaults = {setting.name: setting.default for setting in row.settings}
    arguments, parameters, passed, chosen = [item("lr", "the learning rate before any schedule")], [], [], []
    for setting in row.settings:
        if setting.name == "beta2":
            continue
        if setting.name == "beta1":
            other = next(known.meaning for known in row.settings if known.name == "beta2")
            arguments.append(item("betas", f"{setting.meaning}, and {other}: {setting.values} each"))
            parameters.append(f"betas: tuple[float, float] = ({setting.default!r}, {defaults['beta2']!r}),")
            passed.append('"betas": betas')
            continue
        infinity = ", or infinity" if math.isinf(_config.shown(setting.default)) else ""
        arguments.append(item(setting.name, f"{setting.meaning.replace('`', '``')}; {setting.values}{infinity}"))
        parameters.append(f"{setting.name}: float = {literal(setting.default)},")
        passed.append(f'"{setting.name}": {setting.name}')
    for flag in row.flags:
        if flag.name == "onnxruntime":
            text = "the formula of PyTorch or the formula of onnxruntime: see :class:`ortrain.artifacts.AdamW`"
            arguments.append(item("formula", text))
            parameters.append('formula: Literal["pytorch", "onnxruntime"] = "pytorch",')
            chosen.append('"onnxruntime": is_onnxruntime(formula)')
            continue
        arguments.append(item(flag.name, f"whether to {flag.meaning}"))
        parameters.append(f"{flag.name}: bool = {flag.default},")
        chosen.append(f'"{flag.name}": {flag.name}')
    arguments += [item(option, text) for option, text in OPTIONS]
    other_rate = float(f"{row.learning_rate * 2:.6g}")
    example = [
        ">>> import ortrain",
        ">>> from ortrain import optim",
        f">>> config = optim.{row.name}(lr={other_rate!r})",
        ">>> config",
        f"{row.name}(lr={other_rate!r})",
        ">>> loss = ortrain.LossType.CrossEntropyLoss",
        ">>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)",
        "",
    ]
    return CLASS.format(
        name=row.name,
        title=f"{row.name}: {row.summary}.",
        source="\n    ".join(textwrap.wrap(f"{row.source}.", 112)),
        arguments="\n".join(arguments),
        example="\n".join(f"    {line}".rstrip() for line in example),
        rate=repr(row.learning_rate),
        parameters="\n".join(f"        {line}" for line in parameters),
        settings="{" + ", ".join(passed) + "}",
        flags="{" + ", ".join(chosen) + "}",
    )


def classes() -> str:
    """Return the source of the module of classes, formatted."""
    found = rows()
    text = INTRODUCTION.format(names="\n".join(f'    "{name}",' for name in sorted(row.name for row in found)))
    text += "".join(map(written, found))
    if "is_onnxruntime" in text:
        text = text.replace("Group, OptimizerConfig\n", "Group, OptimizerConfig, is_onnxruntime\n")
    if "math." not in text:
        text = text.replace("import math\n", "")
    return formatted(text, CLASSES)


def package() -> str:
    """Return the source of the package with the imports and names of all optimizers, formatted."""
    names = sorted(row.name for row in rows())
    every = "".join(f'    "{name}",\n' for name in sorted((*names, *OTHERS)))
    text = PACKAGE.read_text().split(GENERATED)[0]
    text += f"{GENERATED}from ortrain.optim._rows import ({', '.join(names)})\n\n__all__ = [\n{every}]\n"
    return formatted(text, PACKAGE)


def formatted(text: str, place: Path) -> str:
    """Return Python source as ruff formats it."""
    ruff = [sys.executable, "-m", "ruff"]
    arguments = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(place), "-"]
    for command in (["check", "--fix", "--quiet", "--exit-zero", "--select", "I,RUF022"], ["format", "--quiet"]):
        done = subprocess.run([*ruff, *command, *arguments], input=text, capture_output=True, text=True, check=True)
        text = done.stdout
    return text


def page_table() -> str:
    """Return the Markdown table of the page."""
    lines = ["| optimizer | what it is | settings beside the learning rate | slots |", "|---|---|---|---|"]
    for row in rows():
        shown = [
            f"`{setting.name}={'inf' if literal(setting.default) == 'math.inf' else f'{setting.default:g}'}`"
            for setting in row.settings
        ]
        shown += [f"`{flag.name}={flag.default}`" for flag in row.flags if flag.name != "onnxruntime"]
        shown += ['`formula="pytorch"`' for flag in row.flags if flag.name == "onnxruntime"]
        kept = ", ".join(f"`{slot}`" for slot in row.slots)
        optimizer = f"`{row.name}(lr={row.learning_rate:g})`"
        lines.append(f"| {optimizer} | {row.summary} ({row.source}) | {', '.join(shown)} | {kept} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with the new table."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{page_table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    CLASSES.write_text(classes())
    PACKAGE.write_text(package())
    PAGE.write_text(page())
