"""Blocks, and the models that blocks build."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import DEVICES, RECORDS
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.onnxblock import blocks, loss, optim

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
TRAINED = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
X = np.array([[0.5, -2.0, 3.0], [1.0, 0.25, -1.0]], np.float32)


def of_x(opset: int = 17) -> onnx.ModelProto:
    """Return a model with x, float32[2, 3], as its output ``x_too``."""
    declare = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["x_too"])],
        "graph",
        [declare("x", TensorProto.FLOAT, [2, 3])],
        [declare("x_too", TensorProto.FLOAT, [2, 3])],
    )
    sets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=sets, ir_version=8)


class Of(onnxblock.ForwardBlock):
    """A block applied to x, repeated for each input of the block."""

    def __init__(self, block: onnxblock.Block, inputs: int = 1) -> None:
        super().__init__()
        self.block, self.inputs = block, inputs

    def build(self) -> Any:
        return self.block(*["x"] * self.inputs)


def result(block: onnxblock.Block, inputs: int = 1) -> np.ndarray:
    whole = Of(block, inputs)
    with onnxblock.base(of_x()):
        whole()
    (value,) = ortrain.InferenceSession(whole.to_model_proto()).run(None, {"x": X})
    return value


@pytest.mark.parametrize(
    ("block", "inputs", "expected"),
    [
        (blocks.Add(), 2, X + X),
        (blocks.Sub(), 2, X - X),
        (blocks.Mul(), 2, X * X),
        (blocks.Div(), 2, X / X),
        (blocks.Pow(2.0), 1, X**2),
        (blocks.Neg(), 1, -X),
        (blocks.Abs(), 1, np.abs(X)),
        (blocks.Sigmoid(), 1, 1 / (1 + np.exp(-X))),
        (blocks.ReduceMean(), 1, X.mean(keepdims=True)),
        (blocks.ReduceMean(keepdims=False), 1, X.mean()),
        (blocks.ReduceSum(), 1, X.sum(keepdims=True)),
        (blocks.ReduceSum(keepdims=False), 1, X.sum()),
        (blocks.ReduceAllL2(), 2, np.sqrt(2 * (X**2).sum())),
        (blocks.Clip(-1, 1), 1, X.clip(-1, 1)),
        (blocks.Clip(clip_max=1), 1, X.clip(None, 1)),
        (blocks.Clip(clip_min=0), 1, X.clip(0, None)),
        (blocks.Clip(), 1, X),
        (blocks.Cast(TensorProto.INT64), 1, X.astype(np.int64)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, onnxblock.Block) else "",
)
def test_blocks_of_a_node(block: onnxblock.Block, inputs: int, expected: np.ndarray) -> None:
    got = result(block, inputs)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_logarithm() -> None:
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(result(blocks.Log()), np.log(X), rtol=1e-6)


def test_constant_and_linear() -> None:
    class Net(onnxblock.ForwardBlock):
        def build(self) -> str:
            y = blocks.Linear(3, 4, alpha=2.0, beta=0.5)("x")
            return blocks.Add()(blocks.Linear(4, 1, bias=False)(y), blocks.Constant(7.0)())

    net = Net()
    with onnxblock.base(of_x()):
        net()
    model = net.to_model_proto()
    first, bias, second, seven = map(numpy_helper.to_array, model.graph.initializer)
    assert (first.shape, bias.shape, second.shape, seven.tolist()) == ((3, 4), (4,), (4, 1), [7.0])
    (value,) = ortrain.InferenceSession(model).run(None, {"x": X})
    np.testing.assert_allclose(value, (2 * X @ first + 0.5 * bias) @ second + 7, rtol=1e-5)


def test_nodes_of_other_domains() -> None:
    with onnxblock.base(of_x()) as accessor:
        sequence = blocks.SequenceConstruct()("x", "x_too")
        norm = blocks.ReduceAllL2()("x", "x_too")
        encoder = blocks.LabelEncoder(keys_int64s=[1, 2], values_floats=[0.5, 0.25], default_float=-1.0)
        codes = encoder(blocks.Cast(TensorProto.INT64)("x"))
        nodes = {node.output[0]: node for node in accessor.model.graph.node}
    assert nodes[sequence].op_type == "SequenceConstruct"
    assert (nodes[norm].domain, nodes[norm].op_type) == ("com.microsoft", "ReduceAllL2")
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in nodes[codes].attribute}
    assert attributes == {
        "keys_int64s": [1, 2],
        "values_floats": [0.5, 0.25],
        "default_float": -1.0,
        "default_int64": -1,
        "default_string": b"_Unused",
    }
    assert {entry.domain for entry in accessor.model.opset_import} == {"", "com.microsoft", "ai.onnx.ml"}


def test_inputs() -> None:
    with onnxblock.base(of_x()) as accessor:
        assert blocks.InputLike("x_too")("target") == "target"
        assert blocks.InputLike("x")().startswith("onnx::input::")
        assert blocks.PassThrough()("x", "target") == ("x", "target")
        # A second input of the same name is not added.
        assert blocks.InputLike("x")("target") == "target"
        with pytest.raises(LookupError, match="no input and no output 'z'"):
            blocks.InputLike("z")()
        with pytest.raises(ortrain.InvalidArgumentError, match="'x_too' cannot become an input"):
            blocks.InputLike("x")("x_too")
    inputs = accessor.model.graph.input
    assert [entry.name for entry in inputs][:2] == ["x", "target"]
    assert inputs[1].type == inputs[0].type


class Training(onnxblock.TrainingBlock):
    """A loss on the scores of the perceptron; the block returns the loss and the scores."""

    def __init__(self, of: onnxblock.Block, scores: str = "logits") -> None:
        super().__init__()
        self.of, self.scores = of, scores

    def build(self) -> tuple[str, str]:
        return self.of(self.scores), self.scores


class Decayed(onnxblock.TrainingBlock):
    """A cross-entropy plus a share of the norm of all weights."""

    SHARE = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.loss = loss.CrossEntropyLoss()

    def build(self, scores: str) -> str:
        norm = blocks.ReduceAllL2()(*TRAINED)
        return blocks.Add()(self.loss(scores), blocks.Mul()(norm, blocks.Constant(self.SHARE)()))


class Unknown(onnxblock.ForwardBlock):
    def build(self) -> str:
        return "nothing"


def models(block: Training, trained: Sequence[str] = TRAINED) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    for name in trained:
        block.requires_grad(name)
    with onnxblock.base(onnx.load(PERCEPTRON)):
        block()
    return block.to_model_proto()


@pytest.mark.parametrize("kind", list(artifacts.LossType))
def test_the_same_as_generate_artifacts(kind: artifacts.LossType, tmp_path: Path) -> None:
    """Blocks build exactly the files of generate_artifacts."""
    artifacts.generate_artifacts(
        PERCEPTRON,
        requires_grad=TRAINED,
        loss=kind,
        optimizer=artifacts.OptimType.AdamW,
        additional_output_names=["logits"],
        artifact_directory=tmp_path,
        nominal_checkpoint=True,
    )
    block = Training(getattr(loss, kind.name)())
    training, evaluation = models(block)
    assert training == onnx.load(tmp_path / "training_model.onnx")
    assert evaluation == onnx.load(tmp_path / "eval_model.onnx")
    for nominal, name in [(False, "checkpoint"), (True, "nominal_checkpoint")]:
        onnxblock.save_checkpoint(block.parameters(), tmp_path / "made", nominal)
        assert (tmp_path / "made").read_bytes() == (tmp_path / name).read_bytes()

    optimizer = optim.AdamW()
    with onnxblock.empty_base(17) as accessor:
        optimizer(block.parameters())
        made = onnx.load(tmp_path / "optimizer_model.onnx")
        assert [node.op_type for node in accessor.model.graph.node] == [node.op_type for node in made.graph.node]
        assert accessor.model.graph.node[0].attribute == made.graph.node[0].attribute
        assert accessor.model.graph.input == made.graph.input
        sets = [[(entry.domain, entry.version) for entry in model.opset_import] for model in (accessor.model, made)]
        assert sets[0] == sets[1]


def losses(folder: Path, steps: int = 5) -> list[float]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    rng = np.random.default_rng(0)
    x, labels = rng.random((8, 64), np.float32), rng.integers(0, 10, 8)
    found = []
    for _ in range(steps):
        value = module(x, labels)
        found.append(float(np.asarray(value[0] if isinstance(value, list | tuple) else value).reshape(())))
        optimizer.step()
        module.lazy_reset_grad()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_of_all_weights_is_trained(device: str, tmp_path: Path) -> None:
    """Compared with the plain network, the loss has a share of the norm, and each gradient a share of its weight."""
    found = {}
    x, labels = np.random.default_rng(0).random((8, 64), np.float32), np.arange(8)
    for name, block in (("decayed", Decayed()), ("plain", Training(loss.CrossEntropyLoss()))):
        for trained in TRAINED:
            block.requires_grad(trained)
        with onnxblock.base(onnx.load(PERCEPTRON)):
            block("logits") if name == "decayed" else block()
        folder = tmp_path / name
        folder.mkdir()
        training, evaluation = block.to_model_proto()
        onnxblock.save_checkpoint(block.parameters(), folder / "checkpoint")
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(training, state, evaluation, device=device)
        results = module(x, labels)
        value = float(np.asarray(results[0] if isinstance(results, tuple) else results).reshape(()))
        module.eval()
        results = module(x, labels)
        assert float(np.asarray(results[0] if isinstance(results, tuple) else results).reshape(())) == value
        found[name] = (value, {key: np.array(parameter.grad) for key, parameter in state.parameters})
    weights = {key: np.array(parameter.data, np.float64) for key, parameter in state.parameters}
    norm = np.sqrt(sum((weight**2).sum() for weight in weights.values()))
    (value, gradients), (own, plain) = found["decayed"], found["plain"]
    np.testing.assert_allclose(value, own + Decayed.SHARE * norm, rtol=1e-6)
    for key, weight in weights.items():
        want = plain[key] + Decayed.SHARE * weight / norm
        np.testing.assert_allclose(gradients[key], want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=key)


@pytest.mark.parametrize("opset", [None, 12])
def test_generate_artifacts_with_blocks(opset: int | None, tmp_path: Path) -> None:
    model = onnx.load(PERCEPTRON)
    if opset is not None:
        model.opset_import[0].version = opset
    clip = optim.ClipGradNorm(0.25)
    artifacts.generate_artifacts(
        model,
        requires_grad=TRAINED,
        loss=loss.CrossEntropyLoss(weight=np.linspace(0.5, 1.5, 10)),
        optimizer=optim.AdamW(betas=(0.8, 0.95), eps=1e-7, weight_decay=0.125, bias_correction=False, clip_grad=clip),
        artifact_directory=tmp_path,
    )
    found = losses(tmp_path)
    assert found[-1] < found[0]
    first, second = onnx.load(tmp_path / "optimizer_model.onnx").graph.node
    assert (first.op_type, first.input, first.attribute[0].f) == ("InplaceClipGradNorm", ["gradients"], 0.25)
    assert first.output[0] in second.input
    assert "gradients" not in second.input
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in second.attribute}
    assert attributes["correct_bias"] == 0
    for name, value in [("alpha", 0.8), ("beta", 0.95), ("epsilon", 1e-7), ("weight_decay", 0.125)]:
        assert attributes[name] == np.float32(value)

    artifacts.generate_artifacts(
        model, TRAINED, loss=loss.CrossEntropyLoss(), optimizer=optim.SGD(clip), artifact_directory=tmp_path
    )
    assert [node.op_type for node in onnx.load(tmp_path / "optimizer_model.onnx").graph.node] == [
        "InplaceClipGradNorm",
        "SGDOptimizerV2",
    ]
    assert len(losses(tmp_path)) == 5


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """A weighted sum of losses with constants is a tensor of one element."""

    class Weighted(onnxblock.Block):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = loss.CrossEntropyLoss(), loss.CrossEntropyLoss(reduction="sum")

        def build(self, scores: str) -> str:
            multiply, add = blocks.Mul(), blocks.Add()
            first = multiply(blocks.Constant(0.75)(), self.first(scores))
            return add(first, multiply(blocks.Constant(0.5)(), self.second(scores)))

    optimizer = artifacts.OptimType.AdamW
    artifacts.generate_artifacts(PERCEPTRON, TRAINED, loss=Weighted(), optimizer=optimizer, artifact_directory=tmp_path)
    found = losses(tmp_path)
    terms = [artifacts.Loss(artifacts.LossType.CrossEntropyLoss, factor=0.75 + 0.5 * 8)]
    artifacts.generate_artifacts(PERCEPTRON, TRAINED, loss=terms, optimizer=optimizer, artifact_directory=tmp_path)
    np.testing.assert_allclose(found, losses(tmp_path), rtol=1e-5)


def test_names_count_on() -> None:
    """Numbers in new names continue after the names that another context added to the model."""
    with onnxblock.base(of_x()) as accessor:
        assert loss.MSELoss()("x_too") == "onnx::reducemean_output::6"
        first = accessor.model
    with onnxblock.base(first) as accessor:
        name = loss.MSELoss()("x_too")
        names = [output for node in accessor.model.graph.node for output in node.output]
    assert name == "onnx::reducemean_output::13"
    assert len(names) == len(set(names))
    assert len(first.graph.node) == 4, "the caller's model is not changed"


def test_losses_without_a_reduction() -> None:
    """Losses without a reduction are parts of other losses."""
    target = np.ones((2, 3), np.float32)
    for block, want in [(loss.MSELoss("none"), (X - 1) ** 2), (loss.L1Loss("none"), np.abs(X - 1))]:
        whole = Of(block)
        with onnxblock.base(of_x()):
            whole()
        feeds = {"x": X, "target": target}
        np.testing.assert_allclose(ortrain.InferenceSession(whole.to_model_proto()).run(None, feeds)[0], want)


def test_targets_that_are_there() -> None:
    with onnxblock.base(of_x()) as accessor:
        loss.MSELoss()("x", target_name="x_too")
        assert [entry.name for entry in accessor.model.graph.input] == ["x"]
        # The type of an intermediate value is inferred.
        loss.L1Loss()(blocks.ReduceSum()("x"), target_name="total")
        total = accessor.model.graph.input[1]
    assert [size.dim_value for size in total.type.tensor_type.shape.dim] == [1, 1]


def test_contexts() -> None:
    model = of_x()
    with pytest.raises(ortrain.InvalidArgumentError, match="no model to edit"):
        blocks.Add()("x", "x")
    with onnxblock.base(model, "folder/model.onnx") as accessor:
        assert (accessor.path, accessor.has_path) == ("folder/model.onnx", True)
        for other in (onnxblock.base(model), onnxblock.empty_base()):
            with pytest.raises(ortrain.InvalidArgumentError, match="do not nest"), other:
                pass
        # Another thread has its own context.
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(str(result(blocks.Neg()).shape)))
        thread.start()
        thread.join()
        assert found == ["(2, 3)"]
    with onnxblock.base(model) as accessor:
        assert not accessor.has_path
        with pytest.raises(ortrain.InvalidArgumentError, match="no path"):
            accessor.path  # noqa: B018
    with pytest.raises(ortrain.InvalidArgumentError, match=r"expects an onnx\.ModelProto, got NoneType"):
        onnxblock.base(None).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is a mistake"), onnxblock.base(model):
        raise ValueError("it is a mistake")
    with onnxblock.empty_base() as accessor:
        assert accessor.model.opset_import[1].version == onnx.defs.onnx_opset_version()
        assert (accessor.model.producer_name, accessor.model.graph.name) == ("orttraining", "graph")


def test_a_library_of_operators(tmp_path: Path) -> None:
    """A missing library is an error. Blocks without its operators work as usual; an unknown operator is rejected by
    name."""
    library = tmp_path / "lib.so"
    with pytest.raises(ortrain.NoSuchFileError), onnxblock.custom_op_library(library):
        pass
    library.touch()
    with onnxblock.custom_op_library(library):
        with pytest.raises(ortrain.InvalidArgumentError, match="does not nest"), onnxblock.custom_op_library(library):
            pass
        with onnxblock.base(of_x()):
            assert Of(blocks.Abs())()
    model = of_x()
    model.graph.node[0].op_type, model.graph.node[0].domain, model.graph.node[0].name = "Own", "test.own", "first"
    model.opset_import.append(helper.make_opsetid("test.own", 1))
    with pytest.raises(ortrain.UnsupportedError, match=r'test.own:Own \("first"\)'):
        artifacts.generate_artifacts(model, custom_op_library=library, artifact_directory=tmp_path)


def test_out_of_order() -> None:
    block = Training(loss.CrossEntropyLoss())
    for call in (block.to_model_proto, block.parameters, Of(blocks.Neg()).to_model_proto):
        with pytest.raises(ortrain.InvalidArgumentError, match="there is no model yet"):
            call()
    with pytest.raises(ortrain.InvalidArgumentError, match="there are no parameters to train"):
        models(block, [])
    with pytest.raises(ortrain.InvalidArgumentError, match='has no initializer "w"'):
        models(Training(loss.CrossEntropyLoss()), ["w"])
    with onnxblock.base(of_x()), pytest.raises(LookupError, match="'nothing' cannot be an output"):
        Unknown()()
    with pytest.raises(ortrain.InvalidArgumentError, match="relative path"):
        type("Far", (onnxblock.Block,), {"build": lambda self: None})("/temp.onnx")

    class Wrong(onnxblock.Block):
        def build(self) -> None:
            self.base.graph.node.append(helper.make_node("Add", ["x"], ["y"]))

    with onnxblock.base(of_x()), pytest.raises(onnx.checker.ValidationError):
        Wrong()()


def test_frozen_parameters() -> None:
    block = Training(loss.CrossEntropyLoss())
    block.requires_grad("fc1.weight", False)
    training, _ = models(block, ["fc2.weight", "fc2.bias"])
    trained, frozen = block.parameters()
    assert ([tensor.name for tensor in trained], [tensor.name for tensor in frozen]) == (
        ["fc2.weight", "fc2.bias"],
        ["fc1.weight"],
    )
    names = [entry.name for entry in training.graph.input]
    assert "fc1.weight" in names
    assert "fc1.weight_grad.accumulation.buffer" not in names
    assert "fc1.bias" not in names


def test_checkpoints_into_models(tmp_path: Path) -> None:
    case = RECORDS / "mlp_adamw_ce"
    model = onnx.load(case / "forward.onnx")
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 0, tensor.name))
    names = [tensor.name for tensor in model.graph.initializer]
    onnxblock.load_checkpoint_to_model(case / "checkpoint", model)
    assert [tensor.name for tensor in model.graph.initializer] == names
    values = {
        name: parameter.data for name, parameter in CheckpointState.load_checkpoint(case / "checkpoint").parameters
    }
    loaded = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert values
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)

    parameters = list(model.graph.initializer)
    onnxblock.save_checkpoint((parameters, []), tmp_path / "nominal", nominal_checkpoint=True)
    with pytest.raises(ortrain.InvalidArgumentError, match="is a nominal checkpoint"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", model)
    with pytest.raises(ortrain.OrtrainError, match=names[0]):
        onnxblock.save_checkpoint((parameters, parameters), tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
