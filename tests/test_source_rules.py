"""Rules for the source of ``ortrain-program``, checked as text: functions are short, and modules have no cycle."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CRATES = Path(__file__).parent.parent / "crates"
SOURCE = CRATES / "ortrain-program" / "src"

#: Number of lines from which a function is too long.
TOO_LONG = 120

#: A module of the tree, by its path from the root.
Module = tuple[str, ...]


def read(path: Path) -> str:
    """Return a source file without comments, string literals and unit tests; line breaks stay."""
    text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {")[0]
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
        end = next(k for k in range(at, len(lines)) if ends.match(lines[k]) or (k == at and line.endswith((";", "}"))))
        yield start[2], end - at + 1


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


def test_every_file_is_a_module() -> None:
    """A file without a ``mod`` declaration is never compiled."""
    roots = ("lib.rs", "main.rs", "mod.rs")
    files = [path for path in CRATES.glob("*/src/**/*.rs") if path.name not in roots and "generated" not in path.parts]
    assert len(files) > 300
    lost = []
    for path in files:
        parents = [path.parent / name for name in roots] + [path.parent.with_suffix(".rs")]
        declared = re.compile(rf"^\s*(?:pub(?:\([^)]*\))? )?mod {path.stem}\b", re.MULTILINE)
        if not any(parent.exists() and declared.search(parent.read_text(encoding="utf-8")) for parent in parents):
            lost.append(str(path.relative_to(CRATES)))
    assert not lost, lost


def test_functions_are_short() -> None:
    tree = modules(SOURCE)
    lengths = [(lines, at, name) for at, text in tree.items() for name, lines in functions(text)]
    assert len(lengths) > 500
    long = [f"{'/'.join(at)}: {name} has {lines} lines" for lines, at, name in lengths if lines >= TOO_LONG]
    assert not long, long


def test_modules_have_no_cycle() -> None:
    found = cycle(graph(modules(SOURCE)))
    assert not found, " uses ".join("::".join(at) or "lib" for at in [*found, *found[:1]])


def test_a_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod c;\npub use a::A;\n",
        "a.rs": "use std::fmt;\nuse crate::c::{self, C as D};\npub struct A(D);\n",
        "b/mod.rs": "mod d;\npub(crate) use d::D;\n// use crate::c;\n#[cfg(test)]\nmod tests {\n    use crate::c;\n}\n",
        "b/d.rs": "use crate::A;\n",
        "c.rs": 'fn f() {\n    let text = "\n{";\n    crate::b::D::new()\n}\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    tree = modules(tmp_path)
    edges = graph(tree)
    assert edges == {(): set(), ("a",): {("c",)}, ("b",): set(), ("b", "d"): {("a",)}, ("c",): {("b", "d")}}
    assert sorted(cycle(edges)) == [("a",), ("b", "d"), ("c",)]
    assert list(functions(tree[("c",)])) == [("f", 5)]
    edges["c",].clear()
    assert cycle(edges) == []


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("crate::a", ["crate::a"]),
        ("crate::{a::{B, C}, d}", ["crate::a::B", "crate::a::C", "crate::d"]),
        ("super::a::{self, B as D}", ["super::a::self", "super::a::B"]),
    ],
)
def test_the_paths_of_a_use(tree: str, expected: list[str]) -> None:
    assert ["::".join(path) for path in paths(tree)] == expected
