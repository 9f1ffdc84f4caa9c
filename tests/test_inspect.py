"""Tests of inspect: which parameters would be trained, and how to choose them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortrain
import ortrain._inspect
from ortrain import artifacts, onnxblock
from ortrain.__main__ import main
from ortrain.api import CheckpointState, Module
from ortrain.artifacts import LossType

ROOT = Path(__file__).parent.parent
CONVNET = ROOT / "examples" / "convnet.onnx"
STATISTICS = [f"block{k}.{name}" for k in (1, 2, 3) for name in ("mean", "var")]


def constant(name: str, values: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def everything() -> onnx.ModelProto:
    """Return a model with every kind of constant."""
    declare, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Constant", [], ["kernel"], value=constant("value", np.ones((3, 4)))),
        node("Constant", [], ["half"], value=constant("value", 0.5)),
        node("MatMul", ["x", "kernel"], ["wide"], "first"),
        node("Add", ["wide", "shift"], ["shifted"], "shift it"),
        node("Mul", ["shifted", "half"], ["halved"], "halve"),
        node("Pow", ["halved", "two"], ["squares"], "square"),
        node("Gemm", ["squares", "w", "b"], ["y"], "second"),
        node("Reshape", ["table", "sizes"], ["rows"], "rows"),
        node("Equal", ["x", "limit"], ["same"], "compare"),
        node("Cast", ["same"], ["z"], "cast", to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare("x", TensorProto.FLOAT, ["n", 3])],
        [declare("y", TensorProto.FLOAT, ["n", 1]), declare("z", TensorProto.FLOAT, ["n", 3])],
        [
            constant("shift", np.ones(4)),
            constant("two", [2]),
            constant("w", np.ones((4, 1))),
            constant("b", [1]),
            constant("table", np.ones(6)),
            constant("sizes", [2, 3], np.int64),
            constant("limit", np.ones(3)),
            constant("spare", np.ones(3)),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_every_sort_of_constant() -> None:
    found = {info.name: (info.role, info.reason) for info in ortrain.inspect(everything()).parameters}
    assert found == {
        "shift": ("trained", 'it is a float input of node "shift it" (Add)'),
        "two": ("constant", 'it is a single number in node "square" (Pow)'),
        "w": ("trained", 'it is a weight of node "second" (Gemm)'),
        "b": ("trained", 'it is a weight of node "second" (Gemm)'),
        "table": ("constant", "no gradient of the loss reaches it"),
        "sizes": ("constant", "it is int64, and only floats are trained"),
        "limit": ("constant", "no gradient of the loss reaches it"),
        "spare": ("constant", "nothing uses it"),
        "kernel": ("trained", 'it is a weight of node "first" (MatMul)'),
        "half": ("constant", 'it is a single number in node "halve" (Mul)'),
    }
    only = ortrain.inspect(everything(), ["squares"])
    assert only.names("trained") == ["shift", "kernel"]
    with pytest.raises(ortrain.InvalidArgumentError, match='the model has no value "nothing"'):
        ortrain.inspect(everything(), ["nothing"])


def test_obstacle_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The obstacle equals the error of generate_artifacts."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", output_shape=[8, 8])],
        "graph",
        [declare("x", TensorProto.FLOAT, ["n", 1, "h", "w"])],
        [declare("y", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [constant("w", np.ones((1, 1, 2, 2)))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = ortrain.inspect(model)
    assert found.obstacle is not None
    assert 'node "up" (ConvTranspose)' in found.obstacle
    (obstacle,) = found.obstacles
    assert (obstacle.node, obstacle.operator) == ('node "up" (ConvTranspose)', "ConvTranspose")
    assert found.obstacle == f"the model: {obstacle.what}"
    assert obstacle.fix.startswith(
        'leave the parameters that need its gradient out of requires_grad ("w"), or give the inputs'
    )
    assert str(found).endswith(f"obstacles to training:\n  {obstacle.what}\n    remedy: {obstacle.fix}\n")
    with pytest.raises(ortrain.UnsupportedError) as error:
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert str(error.value) == found.obstacle
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 1
    assert 'node "up" (ConvTranspose)' in capsys.readouterr().out


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(CONVNET)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(str(ortrain.inspect(CONVNET)))
    lines = printed.splitlines()
    assert lines[:2] == [
        "a forward model: generate_artifacts prepares it for training",
        "trained: 11 tensors, 25,978 elements, 103.9 kB",
    ]
    of_last = '  fc.bias: float32[10]: it is a weight of node "fc" (Gemm)'
    assert of_last not in lines
    assert lines[10] == "  and 3 more"
    assert "statistics, in the checkpoint but not trained: 6 tensors, 224 elements, 896 B" in lines
    assert lines[-1] == "(--all prints every tensor and every node)"
    assert main(["inspect", str(CONVNET), "--all"]) == 0
    printed = capsys.readouterr().out
    assert printed == ortrain.inspect(CONVNET).report(everything=True)
    assert of_last in printed.splitlines()
    assert " more" not in printed
    assert main(["inspect", str(CONVNET), "--loss-input", "pool1"]) == 0
    assert "trained: 6 tensors" in capsys.readouterr().out
    assert main(["inspect", "no/such/file.onnx"]) == 1
    assert "no/such/file.onnx" in capsys.readouterr().err


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of a training."""
    folder: Path = tmp_path_factory.mktemp("files")
    artifacts.generate_artifacts(
        CONVNET, loss=LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW, artifact_directory=folder
    )
    (folder / "forward.onnx").write_bytes(CONVNET.read_bytes())
    CheckpointState.load_checkpoint(folder / "checkpoint").save_safetensors(folder / "w.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "first", "counts", "inputs"),
    [
        (
            "forward.onnx",
            "forward model",
            "a forward model: generate_artifacts prepares it for training",
            (11, 6, 0),
            ["x"],
        ),
        (
            "training_model.onnx",
            "training model",
            "a training model: forward, loss and gradients; a Module runs it with the checkpoint of the same artifacts",
            (11, 0, 0),
            None,
        ),
        (
            "eval_model.onnx",
            "evaluation model",
            "an evaluation model: forward and loss, with parameters as inputs; a Module runs it with the "
            "training model of the same artifacts",
            None,
            ["x", "labels"],
        ),
        (
            "optimizer_model.onnx",
            "optimizer model",
            "an optimizer model: it updates the parameters of a checkpoint; an Optimizer runs it on a Module",
            (0, 0, 0),
            ["learning_rate", "step", "params", "gradients", "first_order_moments", "second_order_moments"],
        ),
        (
            "checkpoint",
            "checkpoint",
            "a checkpoint: the values of parameters; CheckpointState.load_checkpoint reads it",
            (11, 0, 6),
            [],
        ),
        (
            "w.safetensors",
            "safetensors file",
            "a safetensors file: named tensors; CheckpointState.load_safetensors reads it",
            (0, 0, 17),
            [],
        ),
    ],
)
def test_kind_of_a_file(
    name: str,
    kind: str,
    first: str,
    counts: tuple[int, int, int] | None,
    inputs: list[str] | None,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = files / name
    for source in (path, path.read_bytes()):
        found = ortrain.inspect(source)
        assert (found.kind, str(found).splitlines()[0]) == (kind, first)
        roles = ("trained", "statistic", "constant")
        assert counts is None or tuple(len(found.names(role)) for role in roles) == counts  # type: ignore[arg-type]
        assert inputs is None or list(found.inputs) == inputs
        assert found.obstacle is None
    assert "trained: 0 tensors" not in str(found)
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.startswith(str(found))
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == kind


def test_parameters_of_artifacts(files: Path) -> None:
    """Every artifact has the trained parameters of the forward model."""
    forward = ortrain.inspect(files / "forward.onnx").names("trained")
    for name in ("training_model.onnx", "eval_model.onnx", "checkpoint"):
        assert set(forward) <= set(ortrain.inspect(files / name).names("trained")), name
    training = ortrain.inspect(files / "training_model.onnx")
    assert training.inputs["labels"] == "int64[batch]"
    sizes = {info.name: info.shape for info in training.parameters}
    assert sizes == {
        info.name: info.shape for info in ortrain.inspect(files / "forward.onnx").parameters if info.name in sizes
    }


def test_parameters_of_any_declared_size(files: Path, tmp_path: Path) -> None:
    """Shapes in a training model are untrusted: the product of their sizes may overflow."""
    model = onnx.load(files / "eval_model.onnx")
    weight = next(info for info in model.graph.input if info.name.endswith(".weight"))
    for axis in weight.type.tensor_type.shape.dim:
        axis.dim_value = 1 << 40
    onnx.save(model, tmp_path / "eval_model.onnx")
    assert "18,446,744,073,709,551,615 elements" in str(ortrain.inspect(tmp_path / "eval_model.onnx"))


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 8}, {"shapes": {"x": [8, 1, 28, 28]}}, {"loss_input_names": ["x"]}]
)
def test_step_needs_a_forward_model(arguments: Any, files: Path) -> None:
    for name, kind, label in (
        ("training_model.onnx", "a training model", "the model"),
        ("optimizer_model.onnx", "an optimizer model", "the model"),
        ("checkpoint", "a checkpoint", "the model"),
    ):
        with pytest.raises(ortrain.InvalidModelError) as error:
            ortrain.inspect(files / name, **arguments)
        assert str(error.value) == (
            f"{label} {files / name} cannot be used here: it is {kind}, but loss_input_names, batch_size and "
            f"shapes are for forward models; give the forward model from which it was made"
        )


def with_open_sizes(op: str) -> onnx.ModelProto:
    """Return a model that cannot express its gradient in its opset if sizes are unknown."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "convolve")]
    if op == "LRN":
        nodes.append(helper.make_node("LRN", ["a"], ["y"], "it", size=3))
    else:
        more: dict[str, Any] = {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "strides": [2, 2]}
        nodes.append(helper.make_node("AveragePool", ["a"], ["y"], "it", **more))
    model = model_of(nodes, {"x": ["n", 4, "h", "k"]}, ["y"], constant("w", np.ones((4, 4, 3, 3))))
    model.opset_import[0].version = 9
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("op", ["LRN", "AveragePool"])
def test_obstacles_of_open_sizes(op: str, tmp_path: Path) -> None:
    """The obstacle of generate_artifacts is reported with unknown sizes as well as with known ones."""
    model = with_open_sizes(op)
    with pytest.raises(ortrain.UnsupportedError) as error:
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    found = ortrain.inspect(model)
    assert found.obstacle is not None
    assert len(found.obstacles) == 1
    assert list(found.open_inputs) == ["x"]
    # Generated value names have numbers, which depend on the loss.
    said, expected = (re.sub(r"_\d+", "", text) for text in (found.obstacle, str(error.value)))
    assert said == expected
    # With known sizes, the obstacle applies to these sizes.
    sized = ortrain.inspect(model, shapes={"x": [2, 4, 9, 9]})
    assert sized.obstacle is not None


def trained(folder: Path) -> tuple[list[str], list[str]]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return (
        [name for name, parameter in state.parameters if parameter.requires_grad],
        [name for name, parameter in state.parameters if not parameter.requires_grad],
    )


HEAD = ["fc.bias", "fc.weight"]
ALL = sorted([*HEAD, *(f"block{k}.{name}" for k in (1, 2, 3) for name in ("weight", "scale", "bias"))])


@pytest.mark.parametrize(
    ("requires_grad", "frozen", "expected", "expected_frozen"),
    [
        (None, None, ALL, STATISTICS),
        (["fc.*"], None, HEAD, []),
        (["fc.weight", "*.bias"], None, sorted(["fc.weight", *(name for name in ALL if name.endswith("bias"))]), None),
        (lambda info: len(info.shape) == 4, None, [f"block{k}.weight" for k in (1, 2, 3)], []),
        (None, ["block[12].*"], [n for n in ALL if n[:6] not in ("block1", "block2")], None),
        (
            HEAD,
            lambda info: info.name.startswith("block3"),
            HEAD,
            sorted(f"block3.{n}" for n in ("bias", "mean", "scale", "var", "weight")),
        ),
    ],
    ids=["all", "pattern", "patterns", "callable", "frozen patterns", "frozen callable"],
)
def test_choices(
    requires_grad: Any, frozen: Any, expected: list[str], expected_frozen: list[str] | None, tmp_path: Path
) -> None:
    artifacts.generate_artifacts(
        CONVNET, requires_grad, frozen, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    found, found_frozen = trained(tmp_path)
    assert found == expected
    assert expected_frozen is None or found_frozen == expected_frozen


@pytest.mark.parametrize(
    ("loss", "inputs", "expected"),
    [
        (LossType.MSELoss, ["squares"], ["kernel", "shift"]),
        (artifacts.Loss(LossType.MSELoss, scores="squares"), None, ["kernel", "shift"]),
        ([artifacts.Loss(LossType.L1Loss, scores="y")], None, ["b", "kernel", "shift", "w"]),
        (onnxblock.loss.MSELoss(), ["squares"], ["kernel", "shift"]),
    ],
)
def test_default_parameters_are_ancestors_of_the_loss(
    loss: Any, inputs: Sequence[str] | None, expected: list[str], tmp_path: Path
) -> None:
    artifacts.generate_artifacts(everything(), loss=loss, loss_input_names=inputs, artifact_directory=tmp_path)
    assert trained(tmp_path) == (expected, [])


def test_patterns_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(CONVNET, ["head.*"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert str(error.value) == (
        "requires_grad: the pattern 'head.*' matches no parameter of the model and no node that uses a parameter"
    )
    with pytest.raises(ortrain.InvalidArgumentError, match="there are no parameters to train"):
        artifacts.generate_artifacts(
            CONVNET, lambda _: False, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
        )
    assert not list(tmp_path.iterdir())


def with_mean(path: Path) -> onnx.ModelProto:
    """Return a model with the mean of the first output as its only output."""
    model = onnx.load(path)
    output = model.graph.output[0].name
    model.graph.node.append(helper.make_node("ReduceMean", [output], ["mean"], keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, []))
    return model


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("name", ["perceptron", "convnet"])
def test_predicted_memory_equals_the_memory_of_a_step(name: str, rows: int, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.onnx"
    step = ortrain.inspect(path, batch_size=rows).step
    assert step is not None
    artifacts.generate_artifacts(with_mean(path), artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x = np.zeros(step.inputs["x"], np.float32)
    module.lazy_reset_grad()
    module(x)
    memory = module.memory()
    assert (step.parameters, step.gradients) == (memory.parameters, memory.gradients)
    assert (step.work, step.scratch) == (memory.work, memory.scratch)
    assert step.total == memory.total + step.moments + step.constants
    module.lazy_reset_grad()
    profile = module.profile(x, steps=1)
    assert step.training_flops == sum(instruction.flops for instruction in profile.instructions)
    module.eval()
    profile = module.profile(x, steps=1)
    assert step.forward_flops == sum(instruction.flops for instruction in profile.instructions)


def model_of(nodes: list[NodeProto], inputs: dict[str, Any], outputs: Sequence[str], *weights: TensorProto) -> Any:
    """Return a model with float inputs and outputs."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_everything_that_is_wrong_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    node = helper.make_node
    model = model_of(
        [
            node("MatMul", ["x", "w"], ["a"], "product"),
            node("Unheard", ["a"], ["b"], "one"),
            node("OfNobody", ["a"], ["c"], "other", domain="of.mine"),
            node("Add", ["b", "c"], ["d"], "after"),
            node("Relu", ["x", "x"], ["e"], "twice"),
            node("Add", ["d", "e"], ["y"], "last"),
        ],
        {"x": ["n", 3]},
        ["y"],
        constant("w", np.ones((3, 3))),
    )
    found = ortrain.inspect(model)
    assert [obstacle.operator for obstacle in found.obstacles] == ["Unheard", "of.mine:OfNobody", "Relu"]
    assert [obstacle.node for obstacle in found.obstacles] == [None, None, 'node "twice" (Relu)']
    assert "expected 1 inputs, got 2" in found.obstacles[2].what
    assert all(obstacle.fix for obstacle in found.obstacles)
    assert found.names("trained") == ["w"]
    assert found.obstacle is not None
    with pytest.raises(ortrain.UnsupportedError) as error:
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert str(error.value) == found.obstacle
    assert "Unheard" in found.obstacle
    assert "OfNobody" in found.obstacle
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["obstacles"][0]["operator"] == "Unheard"


def test_every_node_that_cannot_be_differentiated() -> None:
    up = [
        helper.make_node("ConvTranspose", [of, weight], [result], name, output_shape=[8, 8])
        for of, weight, result, name in [("x", "v", "a", "first"), ("a", "w", "b", "second"), ("x", "u", "c", "third")]
    ]
    weights = [constant(name, np.ones((1, 1, 2, 2))) for name in "uvw"]
    model = model_of([*up, helper.make_node("Add", ["b", "c"], ["y"])], {"x": ["n", 1, "h", "k"]}, ["y"], *weights)
    found = ortrain.inspect(model)
    assert sorted(str(obstacle.node) for obstacle in found.obstacles) == [
        'node "first" (ConvTranspose)',
        'node "third" (ConvTranspose)',
    ]
    # With fixed sizes there is no obstacle.
    fixed = model_of([*up, helper.make_node("Add", ["b", "c"], ["y"])], {"x": [2, 1, 4, 4]}, ["y"], *weights)
    assert ortrain.inspect(fixed).obstacles == []
    assert ortrain.inspect(fixed).step is not None


def test_where_the_gradient_stops() -> None:
    node = helper.make_node
    model = model_of(
        [
            node("Round", ["table"], ["whole"], "round"),
            node("Mul", ["x", "whole"], ["scaled"], "scale"),
            node("Greater", ["scaled", "limit"], ["above"], "compare"),
            node("Where", ["above", "scaled", "shift"], ["y"], "choose"),
        ],
        {"x": ["n", 3]},
        ["y"],
        constant("table", np.ones(3)),
        constant("limit", np.ones(3)),
        constant("shift", np.ones(3)),
    )
    found = ortrain.inspect(model)
    assert found.obstacles == []
    assert found.names("trained") == ["shift"]
    assert [(stop.node, stop.operator, stop.parameters) for stop in found.stops] == [
        ('node "round" (Round)', "Round", ["table"]),
        ('node "compare" (Greater)', "Greater", ["limit"]),
    ]
    assert found.stops[0].reason == "its derivative is zero almost everywhere"
    assert found.stops[1].reason == "its result is bool, and only floats have gradients"
    assert '  node "round" (Round): its derivative is zero' in str(found)


def test_steps_on_the_host_and_sizes_that_are_not_known() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "product"),
        node("NonZero", ["h"], ["where"], "places"),
        node("Transpose", ["where"], ["rows"], "turn"),
        node("GatherND", ["h", "rows"], ["some"], "gather"),
    ]
    model = model_of(nodes, {"x": ["n", "k"]}, ["some"], constant("w", np.ones((3, 3))))
    found = ortrain.inspect(model, batch_size=4)
    assert [(note.node, note.operator) for note in found.host_steps] == [('node "places" (NonZero)', "NonZero")]
    assert found.step is None
    assert found.open_inputs == {"x": "float32[n, k]"}
    assert "of x: float32[n, k]\n" in str(found)
    step = ortrain.inspect(model, shapes={"x": [4, 3]}).step
    assert step is not None
    assert step.inputs == {"x": (4, 3)}
    assert step.training_flops > 0
    assert "programs after functions on the host" in step.without[0]


# Operators after a product; the values of an input decide their shapes.
BY_VALUES: dict[str, tuple[list[NodeProto], dict[str, list[int]]]] = {
    "Reshape": ([helper.make_node("Reshape", ["h", "s"], ["y"])], {"s": [3]}),
    "Expand": ([helper.make_node("Expand", ["h", "s"], ["y"])], {"s": [3]}),
    "Tile": ([helper.make_node("Tile", ["h", "s"], ["y"])], {"s": [2]}),
    "Resize": ([helper.make_node("Resize", ["h", "", "", "s"], ["y"], mode="linear")], {"s": [2]}),
    "Split": ([helper.make_node("Split", ["h", "s"], ["y", "rest"], axis=-1)], {"s": [2]}),
    "Range": (
        [
            helper.make_node("Range", ["zero", "s", "one"], ["counts"]),
            helper.make_node("Cast", ["counts"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["h", "floats"], ["y"]),
        ],
        {"s": []},
    ),
    "ConstantOfShape": (
        [
            helper.make_node("ConstantOfShape", ["s"], ["zeros"]),
            helper.make_node("Add", ["h", "zeros"], ["y"]),
        ],
        {"s": [2]},
    ),
}


@pytest.mark.parametrize("op", BY_VALUES)
def test_shapes_that_follow_from_values(op: str, tmp_path: Path) -> None:
    """These shapes do not prevent training; only a plan needs values."""
    nodes, sizes = BY_VALUES[op]
    declare = helper.make_tensor_value_info
    inputs = [declare("x", TensorProto.FLOAT, ["b", 3])]
    inputs += [declare(name, TensorProto.INT64, dims) for name, dims in sizes.items()]
    weights = [constant("w", np.ones((3, 4))), constant("zero", 0, np.int64), constant("one", 1, np.int64)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "product"), *nodes],
        "graph",
        inputs,
        [declare("y", TensorProto.FLOAT, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    for found in (ortrain.inspect(model), ortrain.inspect(model, shapes={"x": [2, 3], **sizes})):
        assert found.obstacles == []
        assert found.step is None
        assert found.names("trained") == ["w"]
    assert found.value_inputs == ["s"]
    assert "cost of a step: known when it runs; shapes depend on the values of s\n" in str(found)
    artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"batch_size": 0}, ortrain.InvalidArgumentError, "batch_size must be at least 1, got 0"),
        ({"batch_size": -3}, ortrain.InvalidArgumentError, r"batch_size must be from 0 to 2\*\*63 - 1, got -3"),
        (
            {"batch_size": 1 << 70},
            ortrain.InvalidArgumentError,
            r"batch_size must be from 0 to 2\*\*63 - 1, got 1180591620717411303424",
        ),
        ({"batch_size": 1 << 62}, ortrain.InvalidArgumentError, 'input "x"'),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"batch_size": "8"}, TypeError, "batch_size"),
        ({"batch_size": 2.5}, TypeError, "batch_size"),
        ({"shapes": {"z": [1]}}, ortrain.InvalidArgumentError, 'no input "z"'),
        ({"shapes": {"x": [8]}}, ortrain.InvalidArgumentError, "its rank differs"),
        ({"shapes": {"x": [8, 63]}}, ortrain.InvalidArgumentError, "at axis 1"),
        ({"shapes": {"x": [-8, 64]}}, ortrain.InvalidArgumentError, r"must be from 0 to 2\*\*63 - 1, got -8"),
        ({"shapes": {"x": "8,64"}}, TypeError, "list of sizes"),
        ({"shapes": {"x": 8}}, TypeError, "list of sizes"),
        (
            {"shapes": {"x": [8, 64]}, "batch_size": 4},
            ortrain.InvalidArgumentError,
            'batch_size is 4, but batch is 8 in input "x"',
        ),
    ],
)
def test_sizes_that_make_no_sense(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ortrain.inspect(ROOT / "examples" / "perceptron.onnx", **arguments)


def test_a_batch_of_a_fixed_size() -> None:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], constant("w", np.ones((3, 3)))
    )
    step = ortrain.inspect(model).step
    assert step is not None
    assert step.inputs == {"x": (2, 3)}
    with pytest.raises(ortrain.InvalidArgumentError, match=r"no input of the model has an open first axis"):
        ortrain.inspect(model, batch_size=2)


def test_sizes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "examples" / "perceptron.onnx")
    assert main(["inspect", path, "--batch-size", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["inputs"] == {"x": [8, 64]}
    assert main(["inspect", path, "--shape", "x=8,64"]) == 0
    assert "one step on x[8, 64]\n  forward  " in capsys.readouterr().out
    assert main(["inspect", path, "--shape", "x=8"]) == 1
    assert "its rank differs" in capsys.readouterr().err
    assert main(["inspect", path, "--batch-size", "0"]) == 1
    assert "batch_size must be at least 1, got 0" in capsys.readouterr().err


def in_a_body(kind: str, inside: bool) -> onnx.ModelProto:
    """Return weights ``u`` (an initializer) and ``v`` (of a Constant node), in the subgraphs of a node or beside it."""
    node, declare = helper.make_node, helper.make_tensor_value_info
    generator = np.random.default_rng(5)
    u, v = (constant(name, generator.standard_normal((3, 3)) / 2) for name in "uv")
    holder = node("Constant", [], ["v"], "hold", value=v)
    holder.attribute[0].t.name = "value"
    within = ([u], [holder]) if inside else ([], [])
    outside = ([], []) if inside else ([u], [holder])

    def body(given: str, result: str, inputs: list[Any], outputs: list[Any], extra: list[NodeProto], last: str) -> Any:
        nodes = [
            *(within[1] if last == "v" else []),
            *extra,
            node("MatMul", [given, "u" if last == "u" else "v"], [f"{result}_product"]),
            node("Tanh", [f"{result}_product"], [result]),
        ]
        return helper.make_graph(nodes, f"body_{last}", inputs, outputs, within[0] if last == "u" else [])

    row, number = [2, 3], TensorProto.FLOAT
    if kind == "If":
        branches = {
            name: body("x", f"of_{weight}", [], [declare(f"of_{weight}", number, row)], [], weight)
            for name, weight in (("then_branch", "u"), ("else_branch", "v"))
        }
        before = [
            node("ReduceSum", ["x"], ["all"], keepdims=0),
            node("Greater", ["all", "zero"], ["positive"]),
        ]
        nodes = [*before, node("If", ["positive"], ["y"], "control", **branches)]
    else:
        both = [
            node("MatMul", ["state", "u"], ["first"]),
            node("Tanh", ["first"], ["second"]),
            node("MatMul", ["second", "v"], ["next"]),
        ]
        if kind == "Loop":
            inputs = [
                declare("i", TensorProto.INT64, []),
                declare("go", TensorProto.BOOL, []),
                declare("state", number, row),
            ]
            outputs = [declare("go_on", TensorProto.BOOL, []), declare("next", number, row)]
            graph = helper.make_graph(
                [*within[1], *both, node("Identity", ["go"], ["go_on"])], "body", inputs, outputs, within[0]
            )
            nodes = [node("Loop", ["three", "", "x"], ["y"], "control", body=graph)]
        else:
            inputs = [declare("state", number, row), declare("slice", number, [3])]
            outputs = [declare("sum", number, row)]
            graph = helper.make_graph(
                [*within[1], *both, node("Add", ["next", "slice"], ["sum"])], "body", inputs, outputs, within[0]
            )
            nodes = [node("Scan", ["x", "x"], ["y"], "control", body=graph, num_scan_inputs=1)]
    return model_of(
        [*outside[1], *nodes],
        {"x": row},
        ["y"],
        *outside[0],
        constant("zero", 0.0),
        constant("three", 3, np.int64),
    )


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_weights_in_subgraphs(kind: str, tmp_path: Path) -> None:
    """These weights are trained like weights beside the node, to the same values."""
    found = ortrain.inspect(in_a_body(kind, True))
    assert sorted(found.names("trained")) == ["u", "v"]
    assert [(note.node, note.operator) for note in found.control_flow] == [(f'node "control" ({kind})', kind)]
    assert found.step is not None
    results = []
    for inside in (True, False):
        folder = tmp_path / str(inside)
        folder.mkdir()
        model = in_a_body(kind, inside)
        artifacts.generate_artifacts(
            model, loss=LossType.MSELoss, optimizer=artifacts.OptimType.SGD, artifact_directory=folder
        )
        assert trained(folder) == (["u", "v"], [])
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = ortrain.api.Optimizer(folder / "optimizer_model.onnx", module)
        x = np.linspace(-1, 1.5, 6, dtype=np.float32).reshape(2, 3)
        losses = []
        for step in range(4):
            losses.append(module(x if step % 2 else -x, np.ones((2, 3), np.float32)))
            optimizer.step()
            module.lazy_reset_grad()
        results.append((losses, [parameter.data.copy() for _, parameter in state.parameters]))
        assert any(np.any(parameter.grad) for _, parameter in state.parameters)
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_one_name_for_several_weights_of_subgraphs() -> None:
    """Only a weight with a unique name can be a parameter."""
    model = in_a_body("If", True)
    for attribute in model.graph.node[2].attribute:
        for tensor in attribute.g.initializer:
            tensor.name = "w"
        for node in attribute.g.node:
            node.input[:] = ["w" if name in "uv" else name for name in node.input]
            node.output[:] = ["w" if name == "v" else name for name in node.output]
    found = ortrain.inspect(model)
    assert found.names("trained") == []
    assert found.obstacles == []
