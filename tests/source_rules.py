"""Checks the structure of the source: import cycles, long functions and files, operator names outside of operators.

    python tests/source_rules.py

prints each violation.

    python tests/source_rules.py --record

stores the violations of today in tests/source_rules.json, and refuses new ones.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ortrain import _ortrain

__all__ = ["RECORD", "cycle", "functions", "graph", "modules", "new_violations", "paths", "recorded", "violations"]

ROOT = Path(__file__).parent.parent
CRATES = ROOT / "crates"
PYTHON = ROOT / "python" / "ortrain"
RECORD = Path(__file__).with_name("source_rules.json")

#: Number of lines from which a function, or a file without its tests, is too long.
TOO_LONG, TOO_LONG_FILE = 120, 800
#: Crates of tests, and generated code.
EXCLUDED = ("ortrain-testkit", "generated")
#: Folders of ortrain-ops for operators.
OPERATOR_FOLDERS = ("families", "support")

#: A module of a tree, by its path from the root.
Module = tuple[str, ...]

#: Violations by rule and place. A list has the names at the place, and a number counts them.
Violations = dict[str, dict[str, "list[str] | int"]]


def read(path: Path) -> str:
    """Return a source file without comments, string literals and unit tests; line breaks stay."""
    text = without_tests(path.read_text(encoding="utf-8"))
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', lambda found: "\n" * found.group().count("\n"), text, flags=re.S)


def modules(root: Path) -> dict[Module, str]:
    """Return the text of each module under a folder, without files of unit tests."""
    found = {}
    for path in sorted(root.rglob("*.rs")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] not in ("tests", "snapshots"):
            found[parts[:-1] if parts[-1] in ("mod", "lib") else parts] = read(path)
    return found


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function; rustfmt aligns its last line with its first."""
    lines = [line.rstrip() for line in text.split("\n")]
    for at, line in enumerate(lines):
        start = re.match(r"( *)(?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?fn (\w+)", line)
        if start is None:
            continue
        # A body ends with a brace below the first line; a declaration or an empty body ends with the signature.
        ends = re.compile(rf"{start[1]}(?:\}}$|\).*[;}}]$)")
        found = (k for k in range(at, len(lines)) if ends.match(lines[k]) or (k == at and line.endswith((";", "}"))))
        # Functions in a macro have no last line in this form.
        yield start[2], next(found, at) - at + 1


def paths(tree: str) -> Iterator[list[str]]:
    """Yield the paths of a ``use``: ``a::{b, c as d}`` has two, ``a::b`` and ``a::c``."""
    head, brace, rest = tree.partition("{")
    if not brace:
        yield [part.split(" as ")[0].strip() for part in tree.split("::")]
        return
    depth, item, items = 0, "", []
    for sign in rest.rpartition("}")[0] + ",":
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            items.append(item.strip())
            item = ""
        else:
            item += sign
    for item in filter(None, items):
        for path in paths(item):
            yield [part.strip() for part in head.split("::")[:-1]] + path


def home(tree: dict[Module, str], at: Module, path: list[str]) -> Module | None:
    """Return the module that defines the item of a path, through re-exports; ``None`` for other crates."""
    if path[0] == "crate":
        at, path = (), path[1:]
    elif path[0] in ("self", "super"):
        while path and path[0] in ("self", "super"):
            at, path = (at[:-1] if path[0] == "super" else at), path[1:]
    elif (*at, path[0]) not in tree:
        return None
    while path and (*at, path[0]) in tree:
        at, path = (*at, path[0]), path[1:]
    if path:
        for statement in re.findall(r"pub(?:\([^)]*\))? use ([^;]+);", tree[at]):
            for other in paths(statement):
                if other[-1] == path[0] and (found := home(tree, at, other)) is not None:
                    return found
    return at


def graph(tree: dict[Module, str]) -> dict[Module, set[Module]]:
    """Return the modules that each module uses. A pure re-export does not count as a use."""
    edges = {}
    for at, text in tree.items():
        own = re.sub(r"pub(?:\([^)]*\))? use [^;]+;", "", text)
        used = [path for statement in re.findall(r"\buse ([^;]+);", own) for path in paths(statement)]
        rest = re.sub(r"\buse [^;]+;", "", own)
        children = [other[-1] for other in tree if other and other[:-1] == at]
        starts = "|".join(["crate", "super", *children])
        used += [found.split("::") for found in re.findall(rf"(?<![\w:])(?:{starts})(?:::\w+)+", rest)]
        edges[at] = {found for path in used if (found := home(tree, at, path)) not in (None, at)}
    return edges


def cycle(edges: dict[Module, set[Module]]) -> list[Module]:
    """Return the shortest cycle of modules, each of which uses the next one; an empty list if there is no cycle."""
    best: list[Module] = []
    for start in edges:
        before: dict[Module, Module] = {}
        fresh = [start]
        while fresh and start not in before:
            for at in fresh:
                for to in sorted(edges.get(at, ())):
                    before.setdefault(to, at)
            fresh = [to for to, at in before.items() if at in fresh and to not in fresh]
        if start in before:
            found = [start]
            while before[found[-1]] != start:
                found.append(before[found[-1]])
            if not best or len(found) < len(best):
                best = found[::-1]
    return best


def in_cycles(edges: dict[Module, set[Module]]) -> list[Module]:
    """Return the modules that use themselves through others, sorted."""
    reached: dict[Module, set[Module]] = {}
    for start in edges:
        found: set[Module] = set()
        fresh = [start]
        while fresh:
            fresh = [to for to in {to for at in fresh for to in edges.get(at, ())} if to not in found]
            found.update(fresh)
        reached[start] = found
    return sorted(at for at, found in reached.items() if at in found)


def python_modules(root: Path) -> dict[Module, ast.Module]:
    """Return the syntax tree of each module of a package."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = ast.parse(path.read_text(encoding="utf-8"))
    # Extension modules import no module of the package.
    extensions = {path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.pyi")}
    return found | {at: ast.Module([], []) for at in extensions - found.keys()}


def python_graph(tree: dict[Module, ast.Module]) -> dict[Module, set[Module]]:
    """Return the modules that each module imports when it is imported itself."""

    def imported(statement: ast.stmt) -> Iterator[Module]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield tuple(alias.name.split("."))
        elif isinstance(statement, ast.ImportFrom) and statement.module and statement.level == 0:
            base = tuple(statement.module.split("."))
            for alias in statement.names:
                yield (*base, alias.name) if (*base, alias.name) in tree else base

    edges = {}
    for at, module in tree.items():
        used = {to for statement in module.body for to in imported(statement)}
        edges[at] = {to for to in used if to in tree and to != at}
    return edges


def python_functions(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function, without its docstring."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1:2] if ast.get_docstring(node) is not None else node.body[:1]
            start = first[0].lineno if first else node.lineno
            yield node.name, (node.end_lineno or node.lineno) - start + 1


def without_tests(text: str) -> str:
    """Return a Rust file without its unit tests."""
    return text.split("#[cfg(test)]\nmod tests {")[0]


def source_files() -> Iterator[tuple[Path, str]]:
    """Yield each source file with its text, without tests."""
    for path in sorted(CRATES.glob("*/src/**/*.rs")):
        if path.stem not in ("tests", "snapshots") and not set(EXCLUDED) & set(path.relative_to(CRATES).parts):
            yield path, without_tests(path.read_text(encoding="utf-8"))
    for path in sorted(PYTHON.rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")


def operator_names() -> set[str]:
    """Return the names of all operators."""
    return {operator.name for operator in _ortrain.operators()}


def operator_literals(text: str, names: set[str]) -> int:
    """Count the string literals of a Rust file that are names of operators."""
    code = re.sub(r"//[^\n]*", "", without_tests(text))
    return sum(found in names for found in re.findall(r'"(\w+)"', code))


def violations() -> Violations:
    """Return the violations of today."""
    found: Violations = {"cycles": {}, "functions": {}, "files": {}, "operator names": {}}
    for crate in sorted(CRATES.iterdir()):
        if crate.name in EXCLUDED or not (crate / "src").is_dir():
            continue
        tree = modules(crate / "src")
        found["cycles"][crate.name] = ["::".join(at) or "lib" for at in in_cycles(graph(tree))]
        for at, text in tree.items():
            names = sorted(name for name, lines in functions(text) if lines >= TOO_LONG)
            found["functions"]["::".join((crate.name, *at))] = names
    python = python_modules(PYTHON)
    found["cycles"]["python"] = [".".join(at) for at in in_cycles(python_graph(python))]
    for at, module in python.items():
        names = sorted(name for name, lines in python_functions(module) if lines >= TOO_LONG)
        found["functions"][".".join(at)] = names
    long = [path for path, text in source_files() if text.count("\n") >= TOO_LONG_FILE]
    found["files"]["lines"] = [str(path.relative_to(ROOT)) for path in long]
    names = operator_names()
    for path, text in source_files():
        parts = path.relative_to(ROOT).parts
        if parts[:3] == ("crates", "ortrain-ops", "src") and parts[3] not in OPERATOR_FOLDERS:
            found["operator names"]["/".join(parts[3:])] = operator_literals(text, names)
    return {rule: {place: one for place, one in places.items() if one} for rule, places in found.items()}


def recorded() -> Violations:
    """Return the violations that are allowed."""
    record: Violations = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def new_violations(today: Violations, allowed: Violations) -> list[str]:
    """Describe the violations of today that are not allowed."""
    messages = []
    for rule, places in today.items():
        for place, found in places.items():
            before = allowed.get(rule, {}).get(place, 0 if isinstance(found, int) else [])
            if isinstance(found, int) and isinstance(before, int):
                if found > before:
                    messages.append(f"{rule}: {place} has {found}, {before} allowed")
            elif isinstance(found, list) and isinstance(before, list):
                added = [name for name in sorted(set(found)) if found.count(name) > before.count(name)]
                messages += [f"{rule}: {place}: {name} is new" for name in added]
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="store the violations of today")
    options = parser.parse_args()
    today = violations()
    if options.record:
        messages = new_violations(today, recorded()) if RECORD.exists() else []
        if messages:
            sys.exit("\n".join(messages))
        RECORD.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
    for rule, places in today.items():
        for place, found in places.items():
            print(f"{rule}: {place}: {found if isinstance(found, int) else ', '.join(found)}")


if __name__ == "__main__":
    main()
