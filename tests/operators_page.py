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

INTRODUCTION = """\
# Operators

Every operator that ortrain reads, runs and, where it has a gradient, trains. This page is made by `make operators` of
what the operators answer when they are asked, which is also what `ortrain.operators()` gives; a test compares the two.

- *Versions* are those of its domain in which the definition changed; each is read, and what lies between them.
- *Types* are the element types of its inputs, one after the other: *floats* are float16, bfloat16, float32 and float64,
  *integers* those of 8 to 64 bits with and without a sign, *numbers* both, *any* numbers and bool. Further inputs that
  are like the one before are left out, and *…* stands for any number of them.
- *Gradient*: *yes*, to every input of floats; *inputs …*, to these only, counted from 0; *zero*, for it is zero almost
  everywhere; *none*: it has no floats to pass gradients to or from, or is part of training itself. Where an operator
  cannot be differentiated with certain attributes, the error says so and names the node.
- *Runs as*: a *row* is one expression for each element, from which gradient and program follow; *instructions* of its
  own; a *decomposition* into other operators; a function on the *host*, because the shapes of its results depend on
  values; *control flow*, programs that are chosen or repeated.
- *Cases* are the node cases of ONNX that it is part of and that pass on every backend; one may have several.

"""


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
            return f"values that are {sort}s" if sort == "sequence" else "values that are optional"
    if "STRING" in types:
        return "texts"
    return "floats of 8 and 4 bits, integers of 4 and 2 bits"


SEQUENCES = """\
Sequences of tensors are supported inside of a model where their length and the positions in them are known before it
runs: `SplitToSequence`, `SequenceConstruct`, `SequenceEmpty`, `SequenceInsert`, `SequenceErase`, `SequenceAt`,
`SequenceLength` and `ConcatFromSequence` become `Split`, `Squeeze`, `Unsqueeze`, `Concat` and `Identity` when the model
is read, in its functions and subgraphs too, and have gradients like these. The cases above have sequences as inputs or
outputs, or loops that build them."""


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

    lines = [INTRODUCTION + "## How many\n"]
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
        f"Of {len(suite())} node cases of ONNX in the default domain, {len(supported)} pass. The others use",
        "",
        "| What | Cases |",
        "| --- | ---: |",
    ]
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {reason} | {count} |")
    names = ", ".join(f"`{name}` {count}" for name, count in sorted(missing.items()))
    lines.append(f"| operators that are not here: {names} | {sum(missing.values())} |")
    lines += ["", SEQUENCES]
    for title, of_group in groups.items():
        lines += ["", f"## {title}", "", *rows(of_group, passed)]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
