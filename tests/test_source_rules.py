"""Rules for the structure of the source: see source_rules.py. Violations that are left are in source_rules.json."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import source_rules
from source_rules import CRATES, cycle, functions, graph, in_cycles, modules, paths, python_functions, python_graph


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


def test_violations_become_fewer() -> None:
    """Every violation is in tests/source_rules.json, and every violation there still exists."""
    today, allowed = source_rules.violations(), source_rules.recorded()
    assert not source_rules.new_violations(today, allowed)
    assert today == allowed, "violations have gone: run python tests/source_rules.py --record"


def test_the_model_of_a_crate_has_no_violation() -> None:
    """``ortrain-program`` is the model for other crates."""
    for places in source_rules.violations().values():
        assert not [place for place in places if place.startswith("ortrain-program")]


def test_new_violations_are_described() -> None:
    allowed: source_rules.Violations = {"cycles": {"a": ["x", "y"]}, "operator names": {"f.rs": 2}}
    today: source_rules.Violations = {"cycles": {"a": ["y", "z"], "b": ["x"]}, "operator names": {"f.rs": 3, "g.rs": 1}}
    assert source_rules.new_violations(today, allowed) == [
        "cycles: a: z is new",
        "cycles: b: x is new",
        "operator names: f.rs has 3, 2 allowed",
        "operator names: g.rs has 1, 0 allowed",
    ]
    assert source_rules.new_violations(allowed, allowed) == []


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
    assert sorted(cycle(edges)) == in_cycles(edges) == [("a",), ("b", "d"), ("c",)]
    assert list(functions(tree[("c",)])) == [("f", 5)]
    edges["c",].clear()
    assert cycle(edges) == in_cycles(edges) == []


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


def test_python_modules_and_functions() -> None:
    texts = {
        ("p",): "from p.a import A\n",
        ("p", "a"): "import os\nfrom p import b\n",
        ("p", "b"): "def f():\n    from p import a\n    return a\n",
        ("p", "c"): "import p.b\n",
    }
    edges = python_graph({at: ast.parse(text) for at, text in texts.items()})
    assert edges == {("p",): {("p", "a")}, ("p", "a"): {("p", "b")}, ("p", "b"): set(), ("p", "c"): {("p", "b")}}
    assert in_cycles(edges) == []
    assert in_cycles(edges | {("p", "b"): {("p",)}}) == [("p",), ("p", "a"), ("p", "b")]
    assert list(python_functions(ast.parse(texts["p", "b"]))) == [("f", 2)]
    documented = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    assert list(python_functions(documented)) == [("f", 1)]


def test_operator_names_in_literals() -> None:
    text = 'const A: &[&str] = &["Add", "Add", "other"]; // "Mul"\n#[cfg(test)]\nmod tests {\n    "Add"\n}\n'
    assert source_rules.operator_literals(text, {"Add", "Mul"}) == 2
    assert {"Add", "LSTM", "Gelu"} <= source_rules.operator_names()
