"""Checks the English of comments, docstrings, pages and names.

The rules, and the kinds of finding, are in docs/style.md.

    python tests/language.py PATH ...

prints each finding: file, line, kind, text.

    python tests/language.py --count PATH ...

prints the number of findings of each kind, and their share of all texts.

    python tests/language.py --record

stores the findings of today in tests/language.json, and refuses larger numbers.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = ["KINDS", "Finding", "Text", "counted", "findings", "findings_of_text", "recorded", "source_files", "texts"]

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("language.json")
FOLDERS = ("crates", "python", "tests", "benches", "examples", "fuzz", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
#: Generated code, third-party texts, and this check with its examples.
EXCLUDED = ("crates/ortrain-onnx/src/generated", "tests/language.py", "tests/test_language.py")
KINDS = ("opening", "reference", "long", "name")
#: The largest number of lines in the header of a table.
MAX_HEADER_LINES = 2
#: The largest number of words of a sentence.
MAX_WORDS = 30

OPENING = re.compile(
    r"(?:What|Whatever|Whether|How|Where|Those|That|Who|Whoever|Whose|Whom|Such|So|Nobody|Somebody|Neither|Says|Told|Asked)\b"
)
REFERENCE = re.compile(
    r"\b(?:what|whatever|whoever|whomever|whichever|nobody|somebody|everybody|whose|that of|"
    r"those (?:who|that|which|of|for|in|with)|"
    r"who (?:reads?|writes?|needs?|asks?|gives?|makes?|has|have|wants?|can|uses?|takes?)|"
    r"is none|are none|none of (?:it|them|these)|of such|such ones?|so many|as many|in vain)\b",
    re.IGNORECASE,
)
#: Words of names that the field does not use: participles and adverbs in the place of a noun.
RETIRED_WORDS = frozenset(
    """
    alone apart behind doubt doubts far few given held kept least made mend most odd places stays taken told turned
    want wanted wants whole
    """.split()
)
RUST_NAME = re.compile(r"\b(?:fn|struct|enum|union|trait|type|mod|const|static)\s+([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Text:
    """A comment, a docstring, or a paragraph of a page, without its markers."""

    line: int
    content: str
    #: Documentation of an item: its first word opens an entry of a reference.
    is_documentation: bool


@dataclass(frozen=True)
class Finding:
    """A place where the language departs from docs/style.md."""

    line: int
    kind: str
    content: str


def comment_blocks(text: str, marker: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """Yield runs of comment lines: the first line, its marker, the text."""
    start, first, block = 0, "", []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if match := marker.match(line):
            if not block:
                start, first = number, match[1]
            block.append(match[2])
        elif block:
            yield start, first, "\n".join(block)
            block = []


def rust_texts(text: str) -> Iterator[Text]:
    for line, marker, block in comment_blocks(text, re.compile(r"\s*(///|//!|//)\s?(.*)$")):
        yield Text(line, block, marker != "//")


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a text, which two checks of a file share."""
    return ast.parse(text)


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those inside them; expressions have neither docstrings nor definitions."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(statement, field, ()))


def python_texts(text: str) -> Iterator[Text]:
    tree = parsed(text)
    for node in (tree, *statements(tree.body)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documentation = ast.get_docstring(node)
            if documentation is not None:
                yield Text(node.body[0].lineno, documentation, True)
    for line, marker, block in comment_blocks(text, re.compile(r"\s*(#:|#)(?!!)\s?(.*)$")):
        yield Text(line, block, marker == "#:")


def page_texts(text: str) -> Iterator[Text]:
    """Yield paragraphs and list items; tables, headings and code stay out."""
    in_table = False
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token, following in itertools.pairwise(tokens):
        if token.type in ("table_open", "table_close"):
            in_table = token.type == "table_open"
        if token.type != "paragraph_open" or in_table:
            continue
        words = "".join(
            "`code`" if child.type == "code_inline" else "\n" if child.type.endswith("break") else child.content
            for child in following.children or []
        )
        yield Text((token.map or [0])[0] + 1, words, False)


def texts(path: Path) -> list[Text]:
    """The comments, docstrings or paragraphs of a file, by its suffix."""
    reader = {".rs": rust_texts, ".py": python_texts, ".pyi": python_texts, ".md": page_texts}[path.suffix]
    return list(reader(path.read_text(encoding="utf-8")))


def without_tables(content: str) -> str:
    """A text without its tables of reStructuredText: from the first rule of a table to its last one."""
    lines = content.splitlines()
    rules = [k for k, line in enumerate(lines) if re.fullmatch(r"\s*=+(?: +=+)+\s*", line)]
    while len(rules) > 1:
        # A rule that soon follows the first one ends a header.
        last = rules[2] if len(rules) > 2 and rules[1] - rules[0] <= MAX_HEADER_LINES + 1 else rules[1]
        lines[rules[0] : last + 1] = [""] * (last + 1 - rules[0])
        rules = [k for k in rules if k > last]
    return "\n".join(lines)


def prose(content: str) -> str:
    """A text without code and tables: fences, doctests and links go, inline code becomes one word."""
    content = without_tables(content)
    content = re.sub(r"```.*?(?:```|$)", " ", content, flags=re.DOTALL)
    content = "\n".join(line for line in content.splitlines() if not re.match(r"\s*(?:>>>|\.\.\. )", line))
    content = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", content)
    return re.sub(r"``?[^`]*``?", "`code`", content).strip()


def findings_of_text(text: Text) -> Iterator[Finding]:
    """Yield at most one finding of each kind for a text."""
    words = prose(text.content)
    if not re.search(r"[A-Za-z]{3}", words):
        return
    line = " ".join(words.split())
    if text.is_documentation and OPENING.match(words):
        yield Finding(text.line, "opening", line)
    if REFERENCE.search(words):
        yield Finding(text.line, "reference", line)
    sentences = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*#]", words)
    if any(len(sentence.split()) > MAX_WORDS for sentence in sentences):
        yield Finding(text.line, "long", line)


def words_of(name: str) -> set[str]:
    """The words of a name in snake case or camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the name of a file, and the names of its functions, types, modules and constants."""
    yield 1, path.stem
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        for number, line in enumerate(text.splitlines(), 1):
            for match in RUST_NAME.finditer(re.sub(r'//.*|"(?:\\.|[^"\\])*"', "", line)):
                yield number, match[1]
    elif path.suffix in (".py", ".pyi"):
        for node in statements(parsed(text).body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.lineno, node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        yield node.lineno, target.id


def findings(path: Path) -> list[Finding]:
    """The findings of a file, by line."""
    found = [finding for text in texts(path) for finding in findings_of_text(text)]
    found += [Finding(line, "name", name) for line, name in names(path) if words_of(name) & RETIRED_WORDS]
    return sorted(found, key=lambda finding: finding.line)


def source_files(paths: list[Path] | None = None) -> list[Path]:
    """The files that the check reads, below some paths or of the whole project."""
    roots = paths or [ROOT / name for name in (*FOLDERS, *PAGES)]
    candidates = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [
        path
        for path in candidates
        if path.suffix in (".rs", ".py", ".pyi", ".md")
        and not {"target", "__pycache__", "corpus"} & set(path.parts)
        and not name_in_project(path).startswith(EXCLUDED)
    ]


def name_in_project(path: Path) -> str:
    """The path of a file from the root of the project."""
    return path.resolve().relative_to(ROOT).as_posix()


def counted(files: list[Path]) -> dict[str, dict[str, int]]:
    """The number of findings of each kind, for each file that has one."""
    counts = {name_in_project(path): Counter(finding.kind for finding in findings(path)) for path in files}
    return {
        name: {kind: count[kind] for kind in KINDS if count[kind]} for name, count in sorted(counts.items()) if count
    }


def recorded() -> dict[str, dict[str, int]]:
    """The findings that are still allowed, by file and kind."""
    found: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def record() -> int:
    """Store the counts of today; returns 1 if a file has more findings than before."""
    before = recorded() if RECORD.exists() else None
    today = counted(source_files())
    if before is not None:
        more = [
            f"{name}: {count} of kind {kind}, {before.get(name, {}).get(kind, 0)} before"
            for name, kinds in today.items()
            for kind, count in kinds.items()
            if count > before.get(name, {}).get(kind, 0)
        ]
        if more:
            print("\n".join(more))
            return 1
    RECORD.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; none: the whole project")
    parser.add_argument("--count", action="store_true", help="print the number of findings of each kind")
    parser.add_argument("--record", action="store_true", help="store the findings of today")
    arguments = parser.parse_args()
    if arguments.record:
        return record()
    files = source_files(arguments.paths)
    if arguments.count:
        blocks = sum(len(texts(path)) for path in files)
        counts = Counter(finding.kind for path in files for finding in findings(path))
        shares = (f"{kind} {counts[kind]} ({100 * counts[kind] / max(blocks, 1):.1f} %)" for kind in KINDS)
        print(f"{blocks} texts: " + ", ".join(shares))
        return 0
    for path in files:
        for finding in findings(path):
            print(f"{path}:{finding.line}: {finding.kind}: {finding.content[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
