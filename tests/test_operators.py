"""The operator registry states types and kinds correctly, and docs/operators.md matches the registry."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper
from operators_page import PAGE, page
from test_nodes import cases

import ortrain
from ortrain.__main__ import main

INFOS = {operator.name: operator for operator in ortrain.operators() if operator.standard}
TYPES = sorted({name for info in INFOS.values() for types in info.types for name in types})


def number(name: str) -> int:
    """Return the ONNX element type of a dtype name."""
    return int(TensorProto.BFLOAT16 if name == "bfloat16" else helper.np_dtype_to_tensor_dtype(np.dtype(name)))


def test_page() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make operators"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ortrain.operators()) + 1
    (conv,) = [line for line in lines if line.split()[:2] == ["ai.onnx", "Conv"]]
    assert "full" in conv
    assert "instructions" in conv


def one_node(case: Any) -> bool:
    return len(case.model.graph.node) == 1 and not any(
        attribute.type == AttributeProto.GRAPH for attribute in case.model.graph.node[0].attribute
    )


def samples() -> dict[str, Any]:
    """Return the case with most inputs for each operator."""
    found: dict[str, Any] = {}
    for case in cases()[0].values():
        if one_node(case):
            node = case.model.graph.node[0]
            known = found.get(node.op_type)
            if known is None or len(known.model.graph.node[0].input) < len(node.input):
                found[node.op_type] = case
    return found


SAMPLES = samples()


def runs(case: Any, k: int, dtype: str, alike: bool = False) -> bool:
    """Return true if the case runs with input ``k`` of another type.

    All values with the same type parameter in the ONNX schema change with the input. With ``alike``, all values with
    the input's type change instead.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    if not defs.get_schema(node.op_type).deprecated:
        # Use the newest types.
        for opset in model.opset_import:
            opset.version = min(defs.onnx_opset_version(), 28)
    schema = defs.get_schema(node.op_type, model.opset_import[0].version)

    def letter(formals: Any, at: int) -> str:
        return str(formals[min(at, len(formals) - 1)].type_str)

    wanted = letter(schema.inputs, k)
    changed = {name for at, name in enumerate(node.input) if name and letter(schema.inputs, at) == wanted}
    changed |= {name for at, name in enumerate(node.output) if name and letter(schema.outputs, at) == wanted}
    values = [*model.graph.input, *model.graph.output]
    if alike:
        (own,) = {value.type.tensor_type.elem_type for value in values if value.name == node.input[k]}
        changed = {value.name for value in values if value.type.tensor_type.elem_type == own}
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = number(dtype)
    for value in values:
        if value.name in changed:
            value.type.tensor_type.elem_type = number(dtype)
        elif value in list(model.graph.output):
            value.type.ClearField("value")
    try:
        session = ortrain.InferenceSession(model, providers=["reference"])
        feeds = {}
        for value, array in zip(session.get_inputs(), case.data_sets[0][0], strict=True):
            array = numpy_helper.to_array(array) if isinstance(array, TensorProto) else np.asarray(array)
            if value.name in changed:
                array = np.abs(array) if array.dtype.kind in "fi" else array
                with np.errstate(all="ignore"):
                    array = array.astype(helper.tensor_dtype_to_np_dtype(number(dtype)))
            feeds[value.name] = array
        session.run(None, feeds)
    except (ortrain.UnsupportedError, ortrain.InvalidModelError, ortrain.InvalidArgumentError):
        return False
    return True


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_types(name: str) -> None:
    """Cases of ONNX run with exactly the declared types, among the types that ONNX allows."""
    info, case = INFOS[name], SAMPLES[name]
    node = case.model.graph.node[0]
    newest = defs.get_schema(name)
    schema = defs.get_schema(name, case.model.opset_import[0].version) if newest.deprecated else newest
    constraints = {constraint.type_param_str: constraint for constraint in schema.type_constraints}
    for k in range(min(len(info.types), len(node.input), len(schema.inputs))):
        constraint = constraints.get(schema.inputs[k].type_str)
        if not node.input[k] or constraint is None:
            continue
        allowed = {text[7:-1] for text in constraint.allowed_type_strs if text.startswith("tensor(")}
        allowed = {{"float": "float32", "double": "float64"}.get(text, text) for text in allowed}
        got = {dtype for dtype in TYPES if dtype in allowed and (runs(case, k, dtype) or runs(case, k, dtype, True))}
        assert got == set(info.types[k]) & allowed, f"input {k}"


def test_kinds() -> None:
    def of(kind: str) -> set[str]:
        return {info.name for info in INFOS.values() if info.runs == kind}

    assert of("control flow") == {"If", "Loop", "Scan"}
    assert of("host") >= {"NonZero", "Unique"}
    assert of("row") >= {"Add", "Relu", "Sum", "Equal"}
