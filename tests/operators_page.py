"""Write docs/operators.md from the answers of the operators and from the node cases of ONNX that they pass."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from test_nodes import cases, operators_of, suite, types_of

import ortrain
from ortrain import OperatorInfo

PAGE = Path(__file__).parent.parent / "docs" / "operators.md"

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
EVERY = (*FLOATS, *SIGNED, *UNSIGNED, "bool")
GROUPS = [
    ("any", EVERY),
    ("numbers", (*FLOATS, *SIGNED, *UNSIGNED)),
    ("integers", (*SIGNED, *UNSIGNED)),
    ("floats", FLOATS),
]

COLUMNS = {
    "Versions": "opsets of the domain in which the definition changed; ortrain also reads all opsets between them",
    "Types": (
        "element types of the inputs, in order. *floats*: float16, bfloat16, float32, float64. *integers*: 8 to 64 "
        "bits, signed and unsigned. *numbers*: floats and integers. *any*: numbers and bool. An input with the types "
        "of the input before it is left out; *…* is a variable number of inputs"
    ),
    "Gradient": (
        "*yes*: to each float input. *inputs …*: to these inputs, counted from 0. *zero*: zero almost everywhere. "
        "*none*: no float inputs or outputs, or an operator of training itself"
    ),
    "Runs as": (
        "*row*: an expression for each element. *instructions*: its own instructions. *decomposition*: other "
        "operators. *host*: a function on the host, because result shapes depend on values. *control flow*: "
        "selected or repeated programs"
    ),
    "Cases": "node cases of ONNX (tests of one node) with this operator that pass on every backend",
}
INTRODUCTION = "\n".join(
    [
        "# Look up an operator",
        "",
        "This page lists the operators that ortrain reads, runs and differentiates. `ortrain.operators()` returns the",
        "same list in Python. `make operators` writes this page, and a test compares it with the operators.",
        "",
        "| column | meaning |",
        "| --- | --- |",
        *(f"| {column} | {meaning} |" for column, meaning in COLUMNS.items()),
        "",
        "An operator without a gradient for some attributes gives an error with the node's name.",
        "",
        "",
    ]
)


def types_of_inputs(operator: OperatorInfo) -> str:
    """Return the types of the inputs, in as few words as possible."""
    said: list[str] = []
    for types in operator.types:
        rest, words = set(types), []
        for word, group in GROUPS:
            if rest >= set(group):
                words.append(word)
                rest -= set(group)
        words += [name for name in EVERY if name in rest]
        text = ", ".join(words)
        # An optional input that accepts no tried type is left out.
        if text and (not said or said[-1] != text):
            said.append(text)
    return "; ".join(said) + (" …" if operator.variadic else "")


def gradient_of(operator: OperatorInfo) -> str:
    if operator.gradient == "partial":
        many = "s" if len(operator.gradient_inputs) > 1 else ""
        return f"input{many} {', '.join(map(str, operator.gradient_inputs))}"
    return "yes" if operator.gradient == "full" else operator.gradient


def rows(operators: list[OperatorInfo], passed: Counter[str]) -> list[str]:
    table = ["| Operator | Versions | Types | Gradient | Runs as | Cases |", "| --- | --- | --- | --- | --- | ---: |"]
    for operator in operators:
        cells = [
            f"`{operator.name}`",
            ", ".join(map(str, operator.versions)),
            types_of_inputs(operator),
            gradient_of(operator),
            operator.runs,
            str(passed[operator.name]) if operator.standard and passed[operator.name] else "",
        ]
        table.append("| " + " | ".join(cells) + " |")
    return table


def unsupported_reason(case: Any) -> str:
    types = types_of(case.model.graph)
    for sort in ("sequence", "optional"):
        if sort in types:
            return "sequence values" if sort == "sequence" else "optional values"
    if "STRING" in types:
        return "strings"
    return "floats with 8 or 4 bits, integers with 4 or 2 bits"


SEQUENCES = """\
Sequences of tensors work inside of a model if their lengths and positions are known before the run. `SplitToSequence`,
`SequenceConstruct`, `SequenceEmpty`, `SequenceInsert`, `SequenceErase`, `SequenceAt`, `SequenceLength` and
`ConcatFromSequence` become `Split`, `Squeeze`, `Unsqueeze`, `Concat` and `Identity` on reading, also in functions and
subgraphs, and have the gradients of these operators. The failing cases have sequences as inputs or outputs, or build
sequences in loops."""


def page() -> str:
    """Return the text of the page."""
    operators = ortrain.operators()
    supported, unsupported = cases()
    passed: Counter[str] = Counter()
    for case in supported.values():
        passed.update(operators_of(case))
    reasons: Counter[str] = Counter(unsupported_reason(case) for case in unsupported.values())
    known = {operator.name for operator in operators if operator.standard}
    missing: Counter[str] = Counter()
    for case in suite():
        if case.name not in supported and case.name not in unsupported:
            missing[min(operators_of(case) - known)] += 1

    lines = [INTRODUCTION + "## Coverage\n"]
    lines += ["| Domain | Operators | Row | Instructions | Decomposition | Host | Control flow |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    kinds = ["row", "instructions", "decomposition", "host", "control flow"]
    groups = {
        "`ai.onnx`": [operator for operator in operators if operator.standard],
        "`ai.onnx`, of ONNX Runtime": [
            operator for operator in operators if not operator.standard and operator.domain == "ai.onnx"
        ],
    }
    for operator in operators:
        if operator.domain != "ai.onnx":
            groups.setdefault(f"`{operator.domain}`", []).append(operator)
    for title, of_group in groups.items():
        counts = [sum(operator.runs == kind for operator in of_group) for kind in kinds]
        lines.append(f"| {title} | {len(of_group)} | " + " | ".join(map(str, counts)) + " |")
    lines += [
        "",
        f"Of {len(suite())} node cases of ONNX in the default domain, {len(supported)} pass. The other cases need:",
        "",
        "| Feature | Cases |",
        "| --- | ---: |",
    ]
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {reason} | {count} |")
    names = ", ".join(f"`{name}` {count}" for name, count in sorted(missing.items()))
    lines.append(f"| other operators: {names} | {sum(missing.values())} |")
    lines += ["", SEQUENCES]
    for title, of_group in groups.items():
        lines += ["", f"## {title}", "", *rows(of_group, passed)]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
