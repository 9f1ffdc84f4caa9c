"""Write the generated parts of docs/internals.md and its drawings: make internals.

The first Python block of the page makes a small model. This script prints the model at every stage with
``python -m ortrain dump``, and writes the output between markers. test_internals.py compares page and output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest requires tomli on older Python
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "internals.md"
CRATES = ROOT / "crates"
INSTRUCTIONS = CRATES / "ortrain-program" / "src" / "instruction.rs"
SURROUNDED = r"(<!-- {name}: make internals -->\n)(.*?)(<!-- end -->)"

FORWARD, TRAINING = "net.onnx", "training_model.onnx"
SHAPES = ("--shape", "x=32,8", "--shape", "target=32,4")
# Longer lines are broken after a semicolon, or cut.
COLUMNS = 118
CUT = "…"


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the files that the first block of the page makes."""
    made = tempfile.TemporaryDirectory()
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    subprocess.run([sys.executable, "-c", block[1]], cwd=made.name, check=True)
    return made


@cache
def dump(stage: str, model: str = TRAINING) -> str:
    """Return a stage of a model. The instruction set is the one that every machine has, so the output is the same."""
    shapes = SHAPES if model == TRAINING else ()
    command = [sys.executable, "-m", "ortrain", "dump", model, "--stage", stage, *shapes]
    environment = {name: value for name, value in os.environ.items() if name != "ORTRAIN_PASSES"}
    environment["ORTRAIN_ISA"] = "portable"
    done = subprocess.run(command, cwd=folder().name, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shortened(line: str) -> list[str]:
    """Return the lines of a long line: broken after a semicolon, or else cut."""
    if len(line) <= COLUMNS:
        return [line]
    end = line.rfind("; ", 0, COLUMNS)
    if end < 0:
        return [line[: COLUMNS - 1].rstrip() + CUT]
    indent = re.match(r"[+-]? *", line)
    assert indent is not None
    return [line[: end + 1], *shortened(f"{indent[0]}  {line[end + 2 :]}")]


def text_block(lines: list[str]) -> str:
    return "\n".join(["```text", *(part for line in lines for part in shortened(line)), "```", ""])


def onnx() -> str:
    return text_block(dump("onnx", FORWARD).splitlines())


def graph() -> str:
    return text_block(dump("graph", FORWARD).splitlines())


def gradient() -> str:
    """Return the nodes that the gradient adds: after the node of the loss."""
    lines = dump("gradient").splitlines()
    nodes = [line for line in lines if re.match(r"  \S+: .* = ", line)]
    first = next(k for k, line in enumerate(nodes) if "ReduceMean(" in line)
    return text_block(nodes[first + 1 :])


Instruction = tuple[str, list[str]]


def instructions(text: str, *, numbered: bool) -> list[Instruction]:
    """Return each instruction of a program: its line without costs, and the lines of its computation.

    Instructions of the mode ``accumulate`` are left out: they differ from those before them in one addition.
    """
    found: list[Instruction] = []
    for line in text.splitlines():
        head = re.fullmatch(r" +(\d+) (\w+ +b\d.*?)  \(\d+ flops, \d+ bytes\)(  # .*)?", line)
        if head is not None:
            number = f"{head[1]:>3} " if numbered else ""
            found.append((f"{number}{head[2]}{head[3] or ''}", []))
        elif found and line.startswith(" "):
            found[-1][1].append(line.strip())
    return [(line, parts) for line, parts in found if "(accumulate)" not in line]


def lowered() -> str:
    return text_block([line for line, _ in instructions(dump("lowered"), numbered=True)])


def passes() -> list[tuple[str, str, int, int]]:
    """Return name, description, changes and instructions of each pass, in order."""
    about, table = dump("passes").split("program 0\n")
    described = dict(line.split(maxsplit=1) for line in about.splitlines()[1:])
    rows = [line.split() for line in table.splitlines()[1:]]
    return [(name, described[name], int(changes), int(count)) for name, changes, count in rows]


def pass_table() -> str:
    lines = ["| pass | effect | changes | instructions after it |", "|---|---|--:|--:|"]
    lines += [f"| `{name}` | {about} | {changes} | {count} |" for name, about, changes, count in passes()]
    return "\n".join(["", *lines, "", ""])


def written(line: str) -> set[str]:
    """Return the buffers that an instruction writes."""
    return set(re.findall(r"b\d+", line.partition("<-")[0]))


def changed_lines(before: str, after: str) -> list[str]:
    """Return the first new instruction with the instructions that it replaces, as added and removed lines."""

    def flat(text: str) -> list[tuple[str, ...]]:
        return [(re.sub(r"  # .*", "", line), *parts) for line, parts in instructions(text, numbered=False)]

    old, new = flat(before), flat(after)
    added = next((item for item in new if item not in old), None)
    if added is None:
        return []
    removed = [item for item in old if item not in new]
    end = max(k for k, item in enumerate(removed) if written(item[0]) & written(added[0]))

    def listed(sign: str, items: list[tuple[str, ...]]) -> list[str]:
        return [f"{sign} {'    ' if k else ''}{line}" for item in items for k, line in enumerate(item)]

    return listed("-", removed[: end + 1]) + listed("+", [added])


def pass_changes() -> str:
    """Return the first change of each pass that changes instructions of the model."""
    lines, before = [], dump("lowered")
    for name, _, changes, _ in passes():
        if changes == 0:
            continue
        after = dump(name)
        if shown := changed_lines(before, after):
            lines += [f"{name}:", *shown]
        before = after
    return text_block(lines)


def program() -> str:
    listed = instructions(dump("program"), numbered=True)
    return text_block([line for head, parts in listed for line in [head, *(f"      {part}" for part in parts)]])


def memory_rows() -> list[tuple[int, int, int, int, str]]:
    """Return offset, bytes, first and last position, and name of each buffer of the arena."""
    head, _, *lines = dump("memory").splitlines()
    end = int(re.findall(r"(\d+) instructions", head)[0])
    rows = []
    for line in lines:
        offset, size, first, last, name = line.split(maxsplit=4)
        start = -1 if first == "input" else int(first)
        stop = {"input": -1, "output": end}.get(last)
        rows.append((int(offset), int(size), start, int(last) if stop is None else stop, name))
    return rows


def memory() -> str:
    return text_block(dump("memory").splitlines())


def cpu_kernels() -> str:
    shown = {int(line.split()[0]) for line, _ in instructions(dump("program"), numbered=True)}
    head, *lines = dump("cpu_kernels").splitlines()
    return text_block([head, *(re.sub(r"  # .*", "", line) for line in lines if int(line.split()[0]) in shown)])


def wgsl() -> str:
    """Return the shortest kernel with its launch."""
    launches, *kernels = re.split(r"^kernel \d+: .*\n", dump("kernels"), flags=re.MULTILINE)
    number = min(range(len(kernels)), key=lambda k: len(kernels[k].splitlines()))
    launch = next(line for line in launches.splitlines() if f": kernel {number} in" in line)
    return text_block([launch.strip(), f"kernel {number}", *kernels[number].splitlines()])


def instruction_table() -> str:
    """Return the closed set of instructions, from the enumeration in Rust."""
    body = re.search(r"^pub enum Instruction \{\n(.*?)^\}", INSTRUCTIONS.read_text(), re.DOTALL | re.MULTILINE)
    assert body is not None
    lines = ["| instruction | meaning | file in `crates/ortrain-program/src/instructions` |", "|---|---|---|"]
    for doc, name in re.findall(r"((?:    /// .*\n)+)    (\w+)\(", body[1]):
        meaning = " ".join(line.strip().removeprefix("/// ") for line in doc.splitlines()).split(". ")[0].rstrip(".")
        file = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().replace("mat_mul", "matmul")
        file = {"yield": "yield_values"}.get(file, file)
        assert INSTRUCTIONS.with_name("instructions").joinpath(f"{file}.rs").exists(), file
        lines.append(f"| `{name}` | {meaning} | `{file}.rs` |")
    return "\n".join(["", *lines, "", ""])


BLOCKS: dict[str, Callable[[], str]] = {
    "onnx": onnx,
    "graph": graph,
    "gradient": gradient,
    "lowered": lowered,
    "passes": pass_table,
    "changes of passes": pass_changes,
    "program": program,
    "memory": memory,
    "cpu kernels": cpu_kernels,
    "wgsl": wgsl,
    "instructions": instruction_table,
}


def page() -> str:
    """Return the page with new generated parts."""
    text = PAGE.read_text()
    for name, made in BLOCKS.items():
        pattern = SURROUNDED.format(name=re.escape(name))
        new, count = re.subn(pattern, lambda found, made=made: f"{found[1]}{made()}{found[3]}", text, flags=re.DOTALL)
        assert count == 1, f"docs/internals.md has {count} parts {name!r}"
        text = new
    return text


# Drawings. An image has its own background, so that it is legible in light and in dark pages.
STYLE = """<style>
  .back { fill: #ffffff; }
  .box { fill: #eef3fb; stroke: #44618f; }
  .other { fill: #fbf3e4; stroke: #94701f; }
  .line { stroke: #444444; fill: none; }
  .head { fill: #444444; }
  text { fill: #1c1c1c; font-family: "DejaVu Sans", Verdana, sans-serif; font-size: 12px; }
  .small { font-size: 10.5px; fill: #4a4a4a; }
  .bold { font-weight: bold; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #1b1d21; }
    .box { fill: #24344f; stroke: #8fb0e8; }
    .other { fill: #46391c; stroke: #d8b25c; }
    .line { stroke: #b8b8b8; }
    .head { fill: #b8b8b8; }
    text { fill: #ececec; }
    .small { fill: #bdbdbd; }
  }
</style>"""
# Approximate width of a character, for the sizes of boxes.
CHARACTER = 7.4


class Drawing:
    """An SVG image of boxes, lines and texts."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            STYLE,
            f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')

    def labelled(self, x: float, y: float, width: float, lines: list[str], kind: str = "box") -> None:
        """Draw a box of 44 pixels with a bold line and a small line."""
        self.box(x, y, width, 44, kind)
        self.text(x + width / 2, y + 19, lines[0], "bold")
        self.text(x + width / 2, y + 35, lines[1], "small")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a horizontal or vertical arrow."""
        self.parts.append(f'<path class="line" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')
        if x == to_x:
            back = to_y - 6 if to_y > y else to_y + 6
            points = f"{to_x:g},{to_y:g} {to_x - 4:g},{back:g} {to_x + 4:g},{back:g}"
        else:
            points = f"{to_x:g},{to_y:g} {to_x - 6:g},{to_y - 4:g} {to_x - 6:g},{to_y + 4:g}"
        self.parts.append(f'<polygon class="head" points="{points}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path class="line" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


ROAD = {
    "once for a model": [
        ("model.onnx", "a file"),
        ("message", "ortrain-onnx"),
        ("graph", "ortrain-graph"),
        ("gradient graph", "ortrain-ops"),
        ("training_model.onnx", "a file"),
    ],
    "once for each set of input shapes": [
        ("graph with sizes", "ortrain-ops"),
        ("lowered program", "ortrain-ops"),
        ("passes", "ortrain-program"),
        ("memory plan", "ortrain-program"),
        ("kernels", "-cpu, -kernels, -codegen"),
    ],
    "in each step": [
        ("Module.__call__", "python/ortrain/api"),
        ("Module.step", "ortrain-python"),
        ("train_step", "ortrain"),
        ("executor", "ortrain-program"),
        ("kernels run", "ortrain-cpu, -wgpu, -cuda"),
    ],
}


def road() -> str:
    """Draw the stages between a file and a step, with their crates."""
    width, gap, left = 146, 16, 14
    drawing = Drawing(2 * left + 5 * width + 4 * gap, 272, "The stages between a model and a training step")
    for row, (when, stages) in enumerate(ROAD.items()):
        y = 36 + 86 * row
        drawing.text(left, y - 10, when, "small", "start")
        for k, (stage, crate) in enumerate(stages):
            x = left + k * (width + gap)
            drawing.labelled(x, y, width, [stage, crate], "other" if crate == "a file" else "box")
            if k > 0:
                drawing.arrow(x - gap, y + 22, x, y + 22)
    return drawing.svg()


def fused_map() -> tuple[str, list[int], list[tuple[int, str]], int]:
    """Return the line, the sizes, the registers and the result of the fused bias and activation."""
    for line, parts in instructions(dump("fuse_chains"), numbered=False):
        sizes = re.match(r"Map .*  \[([\d, ]+)\]", line)
        if sizes is not None and "select" in parts[-1]:
            body, _, result = parts[-1].partition(" -> ")
            registers = re.findall(r"%(\d+):\w+ = ([^;]*)", body)
            found = [(int(number), operation) for number, operation in registers]
            return line, [int(size) for size in sizes[1].split(", ")], found, int(result.removeprefix("%"))
    raise AssertionError("no map has an activation")


def element(buffer: str, sizes: list[int]) -> str:
    """Return the element of a buffer at a point: all axes count, or only the last one."""
    found = re.search(rf"^  {buffer}: \w+\[(\d+)\]", dump("fuse_chains"), re.MULTILINE)
    assert found is not None
    rows, columns = sizes
    index = {rows * columns: f"i0 * {columns} + i1", columns: "i1"}[int(found[1])]
    return f"{buffer}[{index}]"


def nest() -> str:
    """Draw the loops of a map, and its expression as a graph. Constants are written where they are used."""
    line, sizes, registers, result = fused_map()
    buffers = re.match(r"Map +(\S+) <- (.*?)  \[", line)
    assert buffers is not None
    loads = [element(name, sizes) for name in buffers[2].split(", ")]
    target = element(buffers[1], sizes)
    constants = {number: operation for number, operation in registers if re.match(r"-?\d", operation)}
    level: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for number, operation in registers:
        uses[number] = [other for other in map(int, re.findall(r"%(\d+)", operation)) if other not in constants]
        level[number] = 1 + max((level[other] for other in uses[number]), default=-1)
    shown = [(number, operation) for number, operation in registers if number not in constants]
    height = 28 + 58 * (level[result] + 1)
    drawing = Drawing(760, height, "A loop nest and its expression")
    drawing.text(14, 22, "loop nest", "bold", "start")
    drawing.text(330, 22, "expression at each point", "bold", "start")
    steps = [f"%{number} = {loads[k]}" for k, (number, _) in enumerate(shown[: len(loads)])]
    steps += ["the expression", f"{target} = %{result}"]
    for k, size in enumerate(sizes):
        inside = 22 * len(steps) + 46 * (len(sizes) - k)
        drawing.box(14 + 20 * k, 34 + 34 * k, 290 - 40 * k, inside, "other")
        drawing.text(26 + 20 * k, 54 + 34 * k, f"for i{k} in 0..{size}", "bold", "start")
    for k, step in enumerate(steps):
        drawing.text(62, 116 + 22 * k, step, anchor="start")
    # Levels alternate between two columns, so that no line crosses a box.
    place: dict[int, tuple[float, float]] = {}
    for row in range(level[result] + 1):
        there = [number for number, _ in shown if level[number] == row]
        for k, number in enumerate(there):
            place[number] = (450 + 190 * (k if len(there) > 1 else (row + 1) % 2), 40 + 58 * row)
    for number, _ in shown:
        for other in uses[number]:
            drawing.line(place[other][0], place[other][1] + 28, place[number][0], place[number][1])
    for number, operation in shown:
        for other, value in constants.items():
            operation = operation.replace(f"%{other}", value)
        if slot := re.fullmatch(r"load (\d+)", operation):
            operation = loads[int(slot[1])]
        label = f"%{number} = {operation}"
        width = CHARACTER * len(label) + 20
        x, y = place[number]
        drawing.box(x - width / 2, y, width, 28)
        drawing.text(x, y + 18, label)
    return drawing.svg()


def arena() -> str:
    """Draw the memory plan: live ranges along the instructions, offsets downwards."""
    rows = memory_rows()
    head = dump("memory").splitlines()[0]
    total, end = (int(number) for number in re.findall(r"(\d+)", head)[-2:])
    left, top, column = 66, 46, (760 - 66 - 14) / (end + 2)
    scale = 260 / total
    drawing = Drawing(760, top + 260 + 24, "The memory plan: live ranges of buffers in the arena")
    drawing.text(14, 20, f"arena of {total} bytes; a column is an instruction", "bold", "start")
    for k in range(-1, end + 1):
        label = "in" if k < 0 else "out" if k == end else str(k)
        drawing.text(left + (k + 1.5) * column, top - 8, label, "small")
    for offset in sorted({row[0] for row in rows} | {total}):
        drawing.line(left - 6, top + offset * scale, 746, top + offset * scale)
        drawing.text(left - 10, top + offset * scale + 4, str(offset), "small", "end")
    for offset, size, first, last, name in rows:
        x, width = left + (first + 1) * column, (last - first + 1) * column
        height = max(size * scale, 3)
        drawing.box(x + 1, top + offset * scale, width - 2, height)
        fits = name if CHARACTER * len(name) < width - 8 else name.split()[0]
        if height >= 13:
            drawing.text(x + 8, top + offset * scale + height / 2 + 4, fits, anchor="start")
        else:
            drawing.text(x + 8, top + total * scale + 14, fits, "small", "start")
    return drawing.svg()


# Crates that no other crate may depend on.
TESTS_ONLY = {"ortrain-testkit"}


def dependencies() -> dict[str, dict[str, bool]]:
    """Return the crates that each crate depends on, and whether the dependency is optional."""
    found = {}
    for manifest in sorted(CRATES.glob("*/Cargo.toml")):
        read = tomllib.loads(manifest.read_text())
        if read["package"]["name"] not in TESTS_ONLY:
            uses = read.get("dependencies", {}).items()
            found[read["package"]["name"]] = {
                name: bool(use.get("optional")) for name, use in uses if name.startswith("ortrain")
            }
    return found


def reached(uses: dict[str, dict[str, bool]], name: str) -> set[str]:
    """Return the crates that a crate always uses, directly or not."""
    always = [other for other, is_optional in uses[name].items() if not is_optional]
    return set(always).union(*(reached(uses, other) for other in always))


def levels(uses: dict[str, dict[str, bool]]) -> Iterator[list[str]]:
    """Return the crates in layers: each depends only on crates of earlier layers."""
    placed: set[str] = set()
    while rest := [name for name in uses if name not in placed]:
        layer = [name for name in rest if uses[name].keys() <= placed]
        assert layer, f"crates with a cycle: {rest}"
        placed |= set(layer)
        yield layer


def layers() -> str:
    """Draw the crates in layers, each above the crates that it uses. Indirect uses are not named."""
    uses = dependencies()
    stack = list(levels(uses))[::-1]
    width, gap = 240, 8
    drawing = Drawing(760, 14 + 58 * len(stack), "The crates, each above the crates that it uses")
    for row, names in enumerate(stack):
        start = (760 - len(names) * width - (len(names) - 1) * gap) / 2
        for k, name in enumerate(names):
            indirect = set().union(*(reached(uses, other) for other, optional in uses[name].items() if not optional))
            direct = [f"{other.removeprefix('ortrain-')}" for other in sorted(uses[name]) if other not in indirect]
            about = f"uses {', '.join(direct)}" if direct else "uses no other crate"
            drawing.labelled(start + k * (width + gap), 12 + 58 * row, width, [name, about])
    return drawing.svg()


DRAWINGS: dict[str, Callable[[], str]] = {
    "internals-road.svg": road,
    "internals-nest.svg": nest,
    "internals-memory.svg": arena,
    "internals-layers.svg": layers,
}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    for name, draw in DRAWINGS.items():
        PAGE.with_name(name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
