"""Requirements of onnxruntime's own tests of its training API that no other file here covers.

`make conform UPSTREAM=...` runs onnxruntime's tests themselves; the tests here need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from ortrain.artifacts import LossType, OptimType

# Tolerance of float32 sums of a few dozen terms, relative to the largest.
TOLERANCE = 2e-6
ROWS, INPUTS, CLASSES = 6, 5, 3
PARAMETERS = ["first.weight", "first.bias", "second.weight", "second.bias"]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, INPUTS)).astype(np.float32)
TARGET = RNG.random((ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS)
VALUES = {
    "first.weight": RNG.standard_normal((INPUTS, 4)).astype(np.float32),
    "first.bias": RNG.standard_normal(4).astype(np.float32),
    "second.weight": RNG.standard_normal((4, CLASSES)).astype(np.float32),
    "second.bias": RNG.standard_normal(CLASSES).astype(np.float32),
}
declare = helper.make_tensor_value_info


def model(nodes: list[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any], **values: Any) -> Any:
    """Return a float32 model of opset 17."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [declare(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [declare(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def perceptron() -> onnx.ModelProto:
    """Return two layers with a ReLU between them."""
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "second.weight", "second.bias"], ["scores"]),
    ]
    return model(nodes, {"x": ["rows", INPUTS]}, {"scores": ["rows", CLASSES]}, **VALUES)


def scores() -> np.ndarray:
    hidden = X @ VALUES["first.weight"] + VALUES["first.bias"]
    return hidden.clip(0) @ VALUES["second.weight"] + VALUES["second.bias"]


def cross_entropy() -> float:
    values = scores()
    logarithms = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return float(-logarithms[np.arange(ROWS), LABELS].mean())


# Target and loss formula of each loss.
LOSSES: dict[LossType, tuple[np.ndarray, Callable[[], float]]] = {
    LossType.CrossEntropyLoss: (LABELS, cross_entropy),
    LossType.MSELoss: (TARGET, lambda: float(((scores() - TARGET) ** 2).mean())),
    LossType.L1Loss: (TARGET, lambda: float(np.abs(scores() - TARGET).mean())),
    LossType.BCEWithLogitsLoss: (
        TARGET,
        lambda: float((np.log1p(np.exp(scores())) - TARGET * scores()).mean()),
    ),
}


class Forward(onnxblock.ForwardBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, *names: str) -> str:
        return self.loss(*names)


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, *names: str) -> str:
        return self.loss(*names)


def block_of(kind: LossType) -> onnxblock.Block:
    block: onnxblock.Block = getattr(onnxblock.loss, kind.name)()
    return block


def trained_block(kind: LossType = LossType.MSELoss) -> Training:
    """Return a block after its call, with all parameters trained."""
    block = Training(block_of(kind))
    for name in PARAMETERS:
        block.requires_grad(name)
    with onnxblock.base(perceptron()):
        block("scores")
    return block


@pytest.mark.parametrize("kind", LOSSES)
def test_models_of_blocks_give_the_loss(kind: LossType) -> None:
    """The forward model gives the loss, and so does the training model in a session without a state."""
    target, loss = LOSSES[kind]
    block = Forward(block_of(kind))
    with onnxblock.base(perceptron()):
        name = block("scores")
    forward = block.to_model_proto()
    assert [entry.name for entry in forward.graph.output] == [name]
    target_name = forward.graph.input[1].name
    (value,) = ortrain.InferenceSession(forward).run([name], {"x": X, target_name: target})
    np.testing.assert_allclose(value, loss(), rtol=TOLERANCE)

    training, _ = trained_block(kind).to_model_proto()
    feeds: dict[str, Any] = {"x": X, target_name: target, "lazy_reset_grad": np.array([True])} | VALUES
    feeds |= {f"{name}_grad.accumulation.buffer": np.zeros_like(value) for name, value in VALUES.items()}
    accumulated = [f"{name}_grad.accumulation.out" for name in PARAMETERS]
    value, *done = ortrain.InferenceSession(training).run([name, *accumulated], feeds)
    np.testing.assert_allclose(value, loss(), rtol=TOLERANCE)
    assert [flag.tolist() for flag in done] == [[True]] * len(PARAMETERS)


def gradients() -> list[np.ndarray]:
    return [RNG.standard_normal(value.shape).astype(np.float32) for value in VALUES.values()]


def clipped(values: list[np.ndarray], most: float) -> list[np.ndarray]:
    norm = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in values))
    return [value * np.float32(min(1, most / (norm + 1e-6))) for value in values]


@pytest.mark.parametrize("max_norm", [None, 2.5, 100.0])
def test_an_optimizer_model_in_a_session(max_norm: float | None) -> None:
    """An optimizer model returns changed sequences of tensors; the input sequences do not change."""
    clip = None if max_norm is None else onnxblock.optim.ClipGradNorm(max_norm)
    trained = trained_block().parameters()
    with onnxblock.empty_base() as accessor:
        updated = onnxblock.optim.AdamW(clip_grad=clip)(trained)
        proto = accessor.model
    # The optimizer names only its flag; its updated sequences are available as further outputs.
    node = proto.graph.node[-1]
    sequences = ["weights", "first", "second"]
    node.output.extend(sequences)
    for output in sequences:
        proto.graph.output.append(helper.make_tensor_sequence_value_info(output, TensorProto.FLOAT, None))
    session = ortrain.InferenceSession(proto)
    kinds = {entry.name: entry.type for entry in session.get_inputs()}
    assert kinds["gradients"] == "seq(tensor(float))"
    given, parameters = gradients(), list(VALUES.values())
    zeros = [np.zeros_like(value) for value in parameters]
    feeds = {
        "learning_rate": np.array([0.125], np.float32),
        "step": np.array([1]),
        "params": parameters,
        "gradients": given,
        "first_order_moments": zeros,
        "second_order_moments": tuple(map(ortrain.OrtValue.ortvalue_from_numpy, zeros)),
    }
    before = [value.copy() for value in parameters]
    done, weights, first, second = session.run(None, feeds)
    assert done.tolist() == [True]
    for value, old in zip(parameters, before, strict=True):
        np.testing.assert_array_equal(value, old)
    wanted = given if max_norm is None else clipped(given, max_norm)
    for at, gradient in enumerate(wanted):
        np.testing.assert_allclose(first[at], 0.1 * gradient, rtol=1e-4)
        np.testing.assert_allclose(second[at], 0.001 * gradient**2, rtol=1e-4)
        # The first step of AdamW has the length of the rate for every gradient.
        np.testing.assert_allclose(weights[at], parameters[at] - 0.125 * np.sign(gradient), rtol=1e-3, atol=1e-3)
    only = session.run([updated], feeds)
    assert [value.tolist() for value in only] == [[True]]
    # A sequence of another length, and an empty sequence.
    for count in (2, 0):
        short = {name: value[:count] if isinstance(value, list | tuple) else value for name, value in feeds.items()}
        assert len(session.run(["weights"], short)[0]) == count


def clipping() -> onnx.ModelProto:
    proto = model([], {}, {})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    proto.graph.input.append(helper.make_tensor_sequence_value_info("gradients", TensorProto.FLOAT, None))
    block = Forward(onnxblock.optim.ClipGradNorm(2.5))
    with onnxblock.base(proto):
        name = block("gradients")
    made = block.to_model_proto()
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None))
    return made


@pytest.mark.parametrize("provider", ["CPUExecutionProvider", "reference"])
def test_gradients_are_clipped_in_a_session(provider: str) -> None:
    session = ortrain.InferenceSession(clipping(), providers=[provider])
    for scale in (0.01, 10):
        given = [value * np.float32(scale) for value in gradients()]
        (found,) = session.run(None, {"gradients": given})
        for got, want in zip(found, clipped(given, 2.5), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (X, 'input "gradients" must be a sequence of float32 tensors, got float32[6, 5]: a tensor is no'),
        ([X, LABELS], "got a sequence with int64[6]: the element types differ"),
    ],
)
def test_sequences_that_do_not_fit(value: Any, sentence: str) -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        ortrain.InferenceSession(clipping()).run(None, {"gradients": value})
    assert sentence in str(error.value)


def clip(source: str, result: str) -> onnx.NodeProto:
    return helper.make_node("InplaceClipGradNorm", [source], [result], domain="com.microsoft", max_norm=1.0)


def branch(name: str) -> onnx.GraphProto:
    output = helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node("Identity", ["given"], [name])], name, [], [output])


IF = helper.make_node("If", ["flag"], ["result"], then_branch=branch("yes"), else_branch=branch("no"))


@pytest.mark.parametrize(
    ("nodes", "outputs", "sentence"),
    [
        ([helper.make_node("SequenceConstruct", ["x", "x"], ["result"])], ["result"], "SequenceConstruct"),
        ([helper.make_node("Identity", ["given"], ["result"])], ["result"], 'it creates the sequence "result", but'),
        ([helper.make_node("Identity", ["given"], ["copy"]), clip("copy", "result")], ["result"], '"copy", but'),
        ([IF], ["result"], "sequences of tensors cannot be used in subgraphs"),
        (
            [clip("given", "first"), clip("given", "result")],
            ["result"],
            '"given" in place, which is also used elsewhere',
        ),
        ([clip("given", "result")], ["result", "given"], '"given" in place, which is also used elsewhere'),
    ],
)
def test_unsupported_uses_of_sequences(nodes: list[onnx.NodeProto], outputs: list[str], sentence: str) -> None:
    """The session rejects these models at its creation."""
    proto = model(nodes, {"x": [2]}, {})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    proto.graph.input.append(declare("flag", TensorProto.BOOL, [1]))
    declared = [helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in ("given", *outputs)]
    proto.graph.input.append(declared[0])
    proto.graph.output.extend(declared[1:])
    with pytest.raises(ortrain.UnsupportedError) as error:
        ortrain.InferenceSession(proto)
    assert sentence in str(error.value)


def test_a_sequence_that_is_passed_on() -> None:
    proto = model([helper.make_node("Neg", ["x"], ["y"])], {"x": [2]}, {"y": [2]})
    entry = helper.make_tensor_sequence_value_info("given", TensorProto.FLOAT, None)
    proto.graph.input.append(entry)
    proto.graph.output.append(entry)
    values = [np.ones((), np.float32), np.zeros((0, 2), np.float32), np.arange(70, dtype=np.float32)]
    y, passed = ortrain.InferenceSession(proto).run(None, {"x": np.ones(2, np.float32), "given": values})
    assert y.tolist() == [-1, -1]
    for got, want in zip(passed, values, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_gradient_of_an_input() -> None:
    """The training model accumulates the gradient of an input like the gradients of parameters."""
    block = Training(block_of(LossType.MSELoss))
    block.requires_grad("x")
    with onnxblock.base(perceptron()):
        block("scores")
    assert block.parameters() == ([], [])
    training, evaluation = block.to_model_proto()
    assert "x_grad.accumulation.buffer" in {entry.name for entry in training.graph.input}
    assert "x_grad.accumulation.out" in {entry.name for entry in training.graph.output}
    assert [entry.name for entry in evaluation.graph.input] == ["x", "target"]

    # Make the accumulated gradient an output.
    (node,) = [node for node in training.graph.node if "x_grad.accumulation.out" in node.output]
    training.graph.output.append(declare(node.input[1], TensorProto.FLOAT, None))
    feeds = {"x": X, "target": TARGET, "lazy_reset_grad": np.array([True])}
    feeds["x_grad.accumulation.buffer"] = np.zeros_like(X)
    (gradient,) = ortrain.InferenceSession(training).run([node.input[1]], feeds)
    active = X @ VALUES["first.weight"] + VALUES["first.bias"] > 0
    behind = 2 * (scores() - TARGET) / TARGET.size @ VALUES["second.weight"].T
    np.testing.assert_allclose(gradient, (behind * active) @ VALUES["first.weight"].T, rtol=1e-4, atol=1e-6)

    # An input is not frozen, because an input is no parameter. An unknown name is an error.
    block.requires_grad("x", False)
    block.requires_grad("second.bias")
    training, _ = block.to_model_proto()
    names = {entry.name for entry in training.graph.input}
    assert "second.bias_grad.accumulation.buffer" in names
    assert "x_grad.accumulation.buffer" not in names
    block.requires_grad("y")
    with pytest.raises(ortrain.InvalidArgumentError, match='has no initializer "y"'):
        block.to_model_proto()


def dropout() -> onnx.ModelProto:
    """Return a model of Dropout in training mode, without trainable values."""
    ratio, mode = np.array(0.5, np.float32), np.array(True)
    nodes = [helper.make_node("Dropout", ["x", "ratio", "mode"], ["scores"])]
    return model(nodes, {"x": ["rows", CLASSES]}, {"scores": ["rows", CLASSES]}, ratio=ratio, mode=mode)


def test_a_model_without_parameters(tmp_path: Path) -> None:
    """The artifacts compute the loss: with dropout in training, and without dropout in evaluation."""
    artifacts.generate_artifacts(dropout(), loss=LossType.MSELoss, artifact_directory=tmp_path)
    evaluation = onnx.load(tmp_path / "eval_model.onnx")
    assert len(evaluation.graph.output) == 1
    (node,) = [node for node in evaluation.graph.node if node.op_type == "Dropout"]
    assert not any(node.input[2:]), "the node has no training mode"
    artifacts.generate_artifacts(
        dropout(), loss=LossType.MSELoss, artifact_directory=tmp_path, additional_output_names=["scores"]
    )
    assert [entry.name for entry in onnx.load(tmp_path / "eval_model.onnx").graph.output][1:] == ["scores"]

    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert len(state.parameters) == 0
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert module.get_parameters_size() == 0
    x, target = np.ones((100, CLASSES), np.float32), np.zeros((100, CLASSES), np.float32)
    loss, kept = module(x, target)
    assert set(kept.ravel().tolist()) == {0.0, 2.0}
    np.testing.assert_allclose(loss, (kept**2).mean(), rtol=TOLERANCE)
    loss, kept = module.eval()(x, target)
    np.testing.assert_array_equal(kept, x)
    assert loss == 1

    with pytest.raises(ortrain.InvalidArgumentError, match="there are no parameters to train"):
        artifacts.generate_artifacts(dropout(), optimizer=OptimType.SGD, artifact_directory=tmp_path)
    with pytest.raises(ortrain.InvalidArgumentError, match="there are no parameters to train"):
        artifacts.generate_artifacts(perceptron(), requires_grad=[], artifact_directory=tmp_path)


@pytest.mark.parametrize("texts", [False, True])
def test_labels_through_a_table(texts: bool) -> None:
    """A block may insert a label encoder with a known output type. Only onnxruntime runs string keys."""
    keys: dict[str, Any] = {"keys_strings": ["a", "b", "c"]} if texts else {"keys_int64s": [10, 20, 30]}

    class Encoded(onnxblock.ForwardBlock):
        def build(self, scores: str) -> str:
            labels = onnxblock.blocks.InputLike("codes")("labels")
            encoder = onnxblock.blocks.LabelEncoder(**keys, values_int64s=[0, 1, 2], default_int64=0)
            return onnxblock.loss.CrossEntropyLoss()(scores, encoder(labels))

    proto = perceptron()
    proto.graph.input.append(declare("codes", TensorProto.STRING if texts else TensorProto.INT64, ["rows"]))
    block = Encoded()
    with onnxblock.base(proto):
        block("scores")
    made = block.to_model_proto()
    assert "LabelEncoder" in [node.op_type for node in made.graph.node]
    assert made.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    if texts:
        with pytest.raises(ortrain.UnsupportedError, match="has type string"):
            ortrain.InferenceSession(made)
        return
    session = ortrain.InferenceSession(made)
    rng = np.random.default_rng(0)
    feeds = {}
    for info in session.get_inputs():
        sizes = [size if isinstance(size, int) else 5 for size in info.shape]
        drawn = rng.standard_normal(sizes).astype(np.float32)
        feeds[info.name] = rng.choice([10, 20, 30], sizes) if "int64" in info.type else drawn
    theirs = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feeds)[0], theirs.run(None, feeds)[0], rtol=TOLERANCE)


def test_a_loss_of_outputs_of_different_ranks(tmp_path: Path) -> None:
    class Both(onnxblock.Block):
        def build(self, image: str, row: str) -> str:
            first = onnxblock.loss.MSELoss()(image, target_name="image_target")
            second = onnxblock.loss.BCEWithLogitsLoss()(row, target_name="row_target")
            return onnxblock.blocks.Add()(first, second)

    image, row = np.ones((2, 3, 4), np.float32), np.ones(5, np.float32)
    nodes = [helper.make_node("Add", ["a", "image"], ["y"]), helper.make_node("Add", ["b", "row"], ["z"])]
    shapes = {"y": [2, 3, 4], "z": [6, 5]}
    proto = model(nodes, {"a": [2, 3, 4], "b": [6, 5]}, shapes, image=image, row=row)
    artifacts.generate_artifacts(proto, loss=Both(), artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    assert module.input_names() == ["a", "b", "image_target", "row_target"]
    zeros = np.zeros((2, 3, 4), np.float32)
    loss = module(zeros, -np.ones((6, 5), np.float32), zeros, np.zeros((6, 5), np.float32))
    np.testing.assert_allclose(loss, 1 + np.log(2), rtol=TOLERANCE)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("one_file", [True, False])
def test_a_model_with_external_data(one_file: bool, kind: LossType, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    onnx.save_model(
        perceptron(),
        tmp_path / "model" / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=one_file,
        size_threshold=0,
    )
    assert len(list((tmp_path / "model").iterdir())) == (2 if one_file else 1 + len(PARAMETERS))
    artifacts.generate_artifacts(
        tmp_path / "model" / "model.onnx",
        requires_grad=PARAMETERS,
        loss=kind,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    target, loss = LOSSES[kind]
    np.testing.assert_allclose(module(X, target), loss(), rtol=TOLERANCE)


class Run:
    """State, module and optimizer of a perceptron. The first layer is frozen unless `everything` is true."""

    def __init__(self, folder: Path, optimizer: OptimType, *, everything: bool = False) -> None:
        self.folder = folder
        trained = PARAMETERS if everything else PARAMETERS[2:]
        artifacts.generate_artifacts(
            perceptron(),
            requires_grad=trained,
            frozen_params=[name for name in PARAMETERS if name not in trained],
            loss=LossType.CrossEntropyLoss,
            optimizer=optimizer,
            artifact_directory=folder,
            nominal_checkpoint=True,
        )
        self.state, self.module, self.optimizer = self.loaded("checkpoint")

    def loaded(self, checkpoint: str) -> tuple[CheckpointState, Module, Optimizer]:
        state = CheckpointState.load_checkpoint(self.folder / checkpoint)
        module = Module(self.folder / "training_model.onnx", state, self.folder / "eval_model.onnx")
        return state, module, Optimizer(self.folder / "optimizer_model.onnx", module)


@pytest.mark.parametrize("kind", OptimType)
def test_steps_and_rates(kind: OptimType, tmp_path: Path) -> None:
    run = Run(tmp_path, kind, everything=True)
    assert run.optimizer.get_learning_rate() == np.float32(0.001)
    run.optimizer.set_learning_rate(0.5)
    assert run.optimizer.get_learning_rate() == 0.5
    before = run.module.get_contiguous_parameters().numpy()
    np.testing.assert_allclose(run.module(X, LABELS), cross_entropy(), rtol=TOLERANCE)
    run.optimizer.step()
    assert (run.module.get_contiguous_parameters().numpy() != before).mean() > 0.5

    state, module, optimizer = run.loaded("checkpoint")
    scheduler = LinearLRScheduler(optimizer, 1, 2, 0.25)
    assert optimizer.get_learning_rate() == 0
    module(X, LABELS)
    optimizer.step()
    scheduler.step()
    assert optimizer.get_learning_rate() == 0.25
    assert len(state.parameters) == len(PARAMETERS)


@pytest.mark.parametrize("kind", OptimType)
@pytest.mark.parametrize("trainable_only", [True, False])
def test_parameters_there_and_back(trainable_only: bool, kind: OptimType, tmp_path: Path) -> None:
    run = Run(tmp_path, kind)
    before = run.module.get_contiguous_parameters(trainable_only=trainable_only)
    run.module(X, LABELS)
    run.optimizer.step()
    after = run.module.get_contiguous_parameters(trainable_only=trainable_only)
    assert not np.array_equal(after.numpy(), before.numpy())
    run.module.copy_buffer_to_parameters(before, trainable_only=trainable_only)
    found = run.module.get_contiguous_parameters(trainable_only=trainable_only)
    np.testing.assert_array_equal(found.numpy(), before.numpy())


def test_parameters_one_by_one(tmp_path: Path) -> None:
    """Gradients are zero before the first step. A frozen parameter has no gradient, but can be set."""
    run = Run(tmp_path, OptimType.AdamW)
    for name, value in VALUES.items():
        parameter = run.state.parameters[name]
        np.testing.assert_array_equal(parameter.data, value)
        assert parameter.requires_grad == name.startswith("second")
        if parameter.requires_grad:
            np.testing.assert_array_equal(parameter.grad, np.zeros_like(value))
        else:
            assert parameter.grad is None
    frozen = run.state.parameters["first.weight"]
    before = frozen.data.copy()
    frozen.data = np.ones_like(before)
    np.testing.assert_array_equal(run.state.parameters["first.weight"].data, np.ones_like(before))
    run.module(X, LABELS)
    for name, parameter in run.state.parameters:
        assert (parameter.grad is None) == name.startswith("first")
        assert parameter.grad is None or parameter.grad.any()
    run.state.parameters["first.weight"] = before
    np.testing.assert_array_equal(frozen.data, before)


def test_a_nominal_state_until_it_has_values(tmp_path: Path) -> None:
    run = Run(tmp_path, OptimType.AdamW, everything=True)
    assert (tmp_path / "nominal_checkpoint").stat().st_size < (tmp_path / "checkpoint").stat().st_size
    state, module, optimizer = run.loaded("nominal_checkpoint")
    assert all(name in state.parameters for name in PARAMETERS)
    assert module.get_parameters_size() == sum(value.size for value in VALUES.values())

    def evaluated() -> None:
        module.eval()(X, LABELS)

    for call in (
        lambda: state.parameters["first.bias"],
        lambda: state.parameters.__setitem__("first.bias", np.ones(4, np.float32)),
        module.get_contiguous_parameters,
        lambda: module(X, LABELS),
        optimizer.step,
        evaluated,
    ):
        with pytest.raises(ortrain.OrtrainError, match="the state is nominal"):
            call()
    module.train()
    module.copy_buffer_to_parameters(run.module.get_contiguous_parameters(), trainable_only=False)
    assert module(X, LABELS) == run.module(X, LABELS)
    optimizer.step()
    run.optimizer.step()
    found, want = (each.get_contiguous_parameters().numpy() for each in (module, run.module))
    np.testing.assert_array_equal(found, want)
