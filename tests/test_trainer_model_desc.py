"""Descriptions of models for the trainer: layouts, messages, types, and the descriptions that a trainer sets."""

from __future__ import annotations

import ast
import sys
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from ortrain.trainer import _dtypes
from ortrain.trainer import model_desc_validation as md_val
from ortrain.trainer.model_desc_validation import _ORTTrainerModelDesc

VALID: list[dict[str, Any]] = [
    {"inputs": [("in0", [])], "outputs": [("out0", []), ("out1", [])]},
    {"inputs": [("in0", ["batch", 2, 3])], "outputs": [("out0", [], True)]},
    {
        "inputs": [
            ("in0", []),
            ("in1", [1]),
            ("in2", [1, 2]),
            ("in3", [1000, "dyn_ax1"]),
            ("in4", ["dyn_ax1", "dyn_ax2", "dyn_ax3"]),
        ],
        "outputs": [("out0", [], True), ("out1", [1], False), ("out2", [1, "dyn_ax1", 3])],
    },
]

SIZE_2 = "must be a tuple with size 2"
SIZE_2_OR_3 = "must be a tuple with size 2 or 3"
NAME = "the first element of the tuple (aka name) must be a string"
NO_NAME = "the first element of the tuple (aka name) must not be an empty string"
SHAPE = "the second element of the tuple (aka shape) must be a list"
SIZE = "each shape must be either a string or integer"
NO_SIZE = "a name in a shape must not be an empty string"
IS_LOSS = "the third element of the tuple (aka is_loss) must be a boolean"
TWO_LOSSES = "only one is_loss can bet set to True"

GOOD_INPUTS, GOOD_OUTPUTS = [("in", [1])], [("out", [], True)]


def described(**parts: Any) -> dict[str, Any]:
    return {"inputs": GOOD_INPUTS, "outputs": GOOD_OUTPUTS} | parts


def error_of(given: Any) -> str:
    with pytest.raises(ValueError, match=r"^Invalid model_desc: ") as caught:
        _ORTTrainerModelDesc(given)
    return str(caught.value)


def problems_of(given: Any) -> Any:
    """Return the layout of an error, with the messages of an element as a set, because they have no order."""

    def without_order(tree: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: [without_order(*problems)] if isinstance(problems[0], dict) else set(problems)
            for key, problems in tree.items()
        }

    return without_order(ast.literal_eval(error_of(given).partition(": ")[2]))


# Valid descriptions.


@pytest.mark.parametrize("schema", VALID)
@pytest.mark.parametrize("kind", [np.int32, np.dtype("float64")], ids=str)
def testORTTrainerModelDescValidSchemas(schema: dict[str, Any], kind: Any) -> None:  # noqa: N802
    """F3."""
    description = _ORTTrainerModelDesc(schema)

    assert description.learning_rate == (md_val.LEARNING_RATE_IO_DESCRIPTION_NAME, [1], np.float32)
    assert isinstance(description.learning_rate, description._InputDescriptionTyped)

    for value, (name, shape) in zip(description.inputs, schema["inputs"], strict=True):
        assert isinstance(value, description._InputDescription)
        assert value == (name, shape)
    for output, (name, shape, *is_loss) in zip(description.outputs, schema["outputs"], strict=True):
        assert isinstance(output, description._OutputDescription)
        assert output == (name, shape, is_loss == [True])

    description.all_finite = md_val.ALL_FINITE_IO_DESCRIPTION_NAME
    assert description.all_finite is not None
    assert description.all_finite[:4] == (md_val.ALL_FINITE_IO_DESCRIPTION_NAME, [1], False, np.bool_)
    description.loss_scale_input = md_val.LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME
    assert description.loss_scale_input == (md_val.LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME, [], np.float32)

    for place in range(len(description.inputs)):
        description.add_type_to_input_description(place, kind)
    for place in range(len(description.outputs)):
        description.add_type_to_output_description(place, kind)
    for value, (name, shape) in zip(description.inputs, schema["inputs"], strict=True):
        assert isinstance(value, description._InputDescriptionTyped)
        assert value == (name, shape, kind)
    for output, (name, shape, *is_loss) in zip(description.outputs, schema["outputs"], strict=True):
        assert isinstance(output, description._OutputDescriptionTyped)
        assert output == (name, shape, is_loss == [True], kind, None)


def test_fields_of_the_tuples() -> None:
    assert md_val.InputDescription._fields == ("name", "shape")
    assert md_val.InputDescriptionTyped._fields == ("name", "shape", "dtype")
    assert md_val.OutputDescription._fields == ("name", "shape", "is_loss")
    assert md_val.OutputDescriptionTyped._fields == ("name", "shape", "is_loss", "dtype", "dtype_amp")


def test_an_input_and_an_output_may_have_one_name() -> None:
    """The graph of a model may return an input."""
    description = _ORTTrainerModelDesc({"inputs": [("x", [0, "n"])], "outputs": [("x", [0, "n"]), ("loss", [], True)]})
    assert description.inputs[0].name == description.outputs[0].name
    assert description.inputs[0].shape == [0, "n"]


def test_dictionary_of_the_user_is_unchanged() -> None:
    given = described()
    description = _ORTTrainerModelDesc(given)
    description.inputs[0].shape.append(7)
    description.add_type_to_input_description(0, np.float32)
    assert given == described()
    assert GOOD_INPUTS == [("in", [1])]


# Invalid descriptions.


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"inputs": [(True, [])], "outputs": [(True, [])]},
            f"{{'inputs': [{{0: ['{NAME}']}}], 'outputs': [{{0: ['{NAME}']}}]}}",
        ),
        (
            {"inputs": [("in1", None)], "outputs": [("out1", None)]},
            f"{{'inputs': [{{0: ['{SHAPE}']}}], 'outputs': [{{0: ['{SHAPE}']}}]}}",
        ),
        ({"inputs": [("in1", [])], "outputs": [("out1", [], None)]}, f"{{'outputs': [{{0: ['{IS_LOSS}']}}]}}"),
        (
            {"inputs": [("in1", [True])], "outputs": [("out1", [True])]},
            f"{{'inputs': [{{0: ['{SIZE}']}}], 'outputs': [{{0: ['{SIZE}']}}]}}",
        ),
        (
            {"inputs": [("in1", [])], "outputs": [("out1", [], True), ("out2", [], True)]},
            f"{{'outputs': [{{1: ['{TWO_LOSSES}']}}]}}",
        ),
        (
            {"inputz": [("in1", [])], "outputs": [("out1", [], True)]},
            "{'inputs': ['required field'], 'inputz': ['unknown field']}",
        ),
        (
            {"inputs": [("in1", [])], "outputz": [("out1", [], True)]},
            "{'outputs': ['required field'], 'outputz': ['unknown field']}",
        ),
    ],
)
def testORTTrainerModelDescInvalidSchemas(schema: dict[str, Any], text: str) -> None:  # noqa: N802
    """F4."""
    assert error_of(schema) == f"Invalid model_desc: {text}"


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        (("x",), {SIZE_2}),
        ((), {SIZE_2}),
        ((3,), {SIZE_2, NAME}),
        (("x", [1], True), {SIZE_2}),
        (["x", [1]], {SIZE_2}),
        ([1, 2], {SIZE_2, NAME, SHAPE}),
        ("x", {SIZE_2}),
        (3, {SIZE_2}),
        ({"name": "x"}, {SIZE_2}),
        ((1, 2), {NAME, SHAPE}),
        (("x", (1, 2)), {SHAPE}),
        (("x", 3), {SHAPE}),
        (("x", [1.5, None, True, object]), {SIZE}),
        (("x", [np.int64(2)]), {SIZE}),
        (("x", [[1]]), {SIZE}),
        (("", [1]), {NO_NAME}),
        (("x", [2, "", ""]), {NO_SIZE}),
        (("x", [-1, 3]), {"a size must not be negative, got -1"}),
        (
            ("x", [-1, -2, -1, "", False]),
            {f"a size must not be negative, got {n}" for n in (-1, -2)} | {NO_SIZE, SIZE},
        ),
    ],
)
def test_elements_of_inputs(value: Any, messages: set[str]) -> None:
    assert problems_of(described(inputs=[("first", []), value])) == {"inputs": [{1: messages}]}


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        (("y",), {SIZE_2_OR_3}),
        ((), {SIZE_2_OR_3}),
        ((3,), {SIZE_2_OR_3, NAME}),
        (("y", [1], False, 1), {SIZE_2_OR_3}),
        (["y", [1], False], {SIZE_2_OR_3}),
        (None, {SIZE_2_OR_3, "null value not allowed"}),
        (("y", [1], 1), {IS_LOSS}),
        (("y", [1], "False"), {IS_LOSS}),
        ((None, None, None), {NAME, SHAPE, IS_LOSS}),
        (("y", [1], True), {TWO_LOSSES}),
        ((1, [1.0, -3], True), {NAME, SIZE, TWO_LOSSES, "a size must not be negative, got -3"}),
    ],
)
def test_elements_of_outputs(value: Any, messages: set[str]) -> None:
    assert problems_of(described(outputs=[("loss", [], True), value])) == {"outputs": [{1: messages}]}


def test_all_wrong_elements_are_named() -> None:
    given = {
        "inputs": [("x",), ("y", [1]), ("y", [])],
        "outputs": [("a", [], True), ("a", [], True), ("b", [], True), "c"],
    }
    assert problems_of(given) == {
        "inputs": [{0: {SIZE_2}, 2: {"the name 'y' is described twice"}}],
        "outputs": [{1: {TWO_LOSSES, "the name 'a' is described twice"}, 2: {TWO_LOSSES}, 3: {SIZE_2_OR_3}}],
    }


def test_a_flag_that_is_no_boolean_is_no_loss() -> None:
    assert problems_of(described(outputs=[("a", [], 1), ("b", [], True)])) == {"outputs": [{0: {IS_LOSS}}]}


@pytest.mark.parametrize("part", ["inputs", "outputs"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "min length is 1"),
        (None, "null value not allowed"),
        ("x", "must be of list type"),
        ((("x", [1]),), "must be of list type"),
        ({"x": [1]}, "must be of list type"),
        (3, "must be of list type"),
    ],
    ids=repr,
)
def test_lists_of_a_description(part: str, value: Any, message: str) -> None:
    assert error_of(described(**{part: value})) == f"Invalid model_desc: {{'{part}': ['{message}']}}"


def test_keys() -> None:
    assert error_of({}) == "Invalid model_desc: {'inputs': ['required field'], 'outputs': ['required field']}"
    assert error_of(described(loss="out")) == "Invalid model_desc: {'loss': ['unknown field']}"


@pytest.mark.parametrize("value", [None, [("inputs", GOOD_INPUTS)], "inputs", 3], ids=repr)
def test_values_that_are_no_dictionary(value: Any) -> None:
    assert error_of(value).endswith(f"expected a dict with the keys 'inputs' and 'outputs', got {type(value).__name__}")


# Descriptions and types that a trainer sets.


SETTABLE = {
    "gradient_accumulation": (md_val.GRADIENT_ACCUMULATION_IO_DESCRIPTION_NAME, ([1], False, np.bool_, None)),
    "all_finite": (md_val.ALL_FINITE_IO_DESCRIPTION_NAME, ([1], False, np.bool_, None)),
    "loss_scale_input": (md_val.LOSS_SCALE_INPUT_IO_DESCRIPTION_NAME, ([], np.float32)),
}


def test_constants() -> None:
    assert md_val.LEARNING_RATE_IO_DESCRIPTION_NAME == "__learning_rate"
    assert {kind: constant for kind, (constant, _) in SETTABLE.items()} == {
        "gradient_accumulation": "__gradient_accumulation_name",
        "all_finite": "__all_finite",
        "loss_scale_input": "__loss_scale_input_name",
    }
    assert set(md_val.MODEL_DESC_SCHEMA) == {"inputs", "outputs"}


@pytest.mark.parametrize("kind", SETTABLE)
def test_settable_descriptions(kind: str) -> None:
    constant, rest = SETTABLE[kind]
    description = _ORTTrainerModelDesc(described())
    assert getattr(description, kind) is None
    for name in ("first", "second"):
        setattr(description, kind, name)
        assert getattr(description, kind) == (name, *rest)
        assert getattr(description, constant) is getattr(description, kind)
    for bad in (None, 3, "", b"name"):
        with pytest.raises(AssertionError, match="a string that is not empty"):
            setattr(description, kind, bad)
    assert getattr(description, kind).name == "second"
    assert all(getattr(description, other) is None for other in SETTABLE if other != kind)


def test_a_type_replaces_a_type() -> None:
    description = _ORTTrainerModelDesc(described())
    for kind, narrow in ((np.float64, None), (np.float32, np.float16)):
        description.add_type_to_input_description(0, kind)
        description.add_type_to_output_description(0, kind, dtype_amp=narrow)
    assert description.inputs == [("in", [1], np.float32)]
    assert description.outputs == [("out", [], True, np.float32, np.float16)]
    assert isinstance(description.outputs[0], md_val.OutputDescriptionTyped)


@pytest.mark.parametrize("index", [-1, "0", 0.0, None, True], ids=repr)
@pytest.mark.parametrize("part", ["input", "output"])
def test_bad_indices(part: str, index: Any) -> None:
    description = _ORTTrainerModelDesc(described())
    add = getattr(description, f"add_type_to_{part}_description")
    with pytest.raises(AssertionError, match=f"'index' must be an int of 0 or more, got {index!r}"):
        add(index, np.float32)
    with pytest.raises(IndexError, match=f"{part} index 1 is out of range: the number of descriptions is 1"):
        add(1, np.float32)


@pytest.mark.parametrize("kind", ["float32", float, None, 1, [np.float32]], ids=repr)
def test_bad_types(kind: Any) -> None:
    description = _ORTTrainerModelDesc(described())
    with pytest.raises(AssertionError, match="'dtype' must be a type of NumPy"):
        description.add_type_to_input_description(0, kind)
    with pytest.raises(AssertionError, match="'dtype' must be a type of NumPy"):
        description.add_type_to_output_description(0, kind)
    if kind is not None:
        with pytest.raises(AssertionError, match="'dtype' must be a type of NumPy"):
            description.add_type_to_output_description(0, np.float32, kind)
    assert description.inputs == GOOD_INPUTS
    assert description.outputs == GOOD_OUTPUTS


def test_repr() -> None:
    description = _ORTTrainerModelDesc(described())
    description.all_finite = "finite"
    lines = repr(description).splitlines()
    assert lines[0] == "Model description:"
    assert [line.strip() for line in lines if not line.startswith("        ")] == [
        "Model description:",
        "Inputs:",
        "Outputs:",
        "Learning rate:",
        "Mixed precision:",
        "Gradient accumulation:",
    ]
    assert f"        {description.all_finite!r}" in lines


# Types of PyTorch, as a stub.


class TorchType:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
TYPES += ["complex64", "complex128", "bool", "qint8"]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("torch")
    module.dtype = TorchType
    for name in TYPES:
        setattr(module, name, TorchType(name))
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_types_of_torch_stay_as_they_are(torch: Any) -> None:
    description = _ORTTrainerModelDesc(described())
    description.add_type_to_input_description(0, torch.int32)
    description.add_type_to_output_description(0, torch.float32, torch.float16)
    assert description.inputs[0] == ("in", [1], torch.int32)
    assert description.outputs[0] == ("out", [], True, torch.float32, torch.float16)


def test_torch_to_numpy(torch: Any) -> None:
    odd = {"bfloat16": np.float16, "int64": np.longlong, "bool": np.bool_}
    for name in TYPES[:-1]:
        kind = _dtypes.dtype_torch_to_numpy(getattr(torch, name))
        assert kind is (odd[name] if name in odd else getattr(np, name))
    for bad in (torch.qint8, "torch.float32", np.float32, None):
        with pytest.raises(ValueError, match="NumPy has no type for"):
            _dtypes.dtype_torch_to_numpy(bad)


ONNX_TO_TORCH = {
    (1, "FLOAT"): "float32",
    (2, "UINT8"): "int8",
    (3, "INT8"): "int8",
    (4, "UINT16"): "int16",
    (5, "INT16"): "int16",
    (6, "INT32"): "int32",
    (7, "INT64"): "int64",
    (9, "BOOL"): "bool",
    (10, "FLOAT16"): "float16",
    (11, "DOUBLE"): "float64",
    (12, "UINT32"): "int32",
    (13, "UINT64"): "int64",
    (14, "COMPLEX64"): "complex64",
    (15, "COMPLEX128"): "complex128",
}


def test_onnx_to_torch(torch: Any) -> None:
    for tokens, name in ONNX_TO_TORCH.items():
        for token in tokens:
            assert _dtypes.dtype_onnx_to_torch(token) is getattr(torch, name)
    for unknown in (-1, 16, 99, "BFLOAT16", "float32"):
        with pytest.raises(AssertionError, match="PyTorch has no type for the ONNX type"):
            _dtypes.dtype_onnx_to_torch(unknown)


def test_numbers_are_those_of_onnx() -> None:
    for number, name in ONNX_TO_TORCH:
        assert onnx.TensorProto.DataType.Value(name) == number


def test_onnx_types_that_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert [_dtypes.dtype_onnx_to_torch(token) for token in (8, "STRING", 0, "UNDEFINED")] == [str, str, None, None]
    for bad in (1.0, None, True, np.float32):
        with pytest.raises(ValueError, match="the number or the name of a TensorProto type"):
            _dtypes.dtype_onnx_to_torch(bad)
    with pytest.raises(ImportError, match="PyTorch, which is not imported"):
        _dtypes.dtype_onnx_to_torch("FLOAT")
