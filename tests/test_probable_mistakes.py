"""Warnings and errors for probable mistakes: losses on inputs that they were not made for. Sentences are quoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts, onnxblock
from ortrain.artifacts import Loss, LossType

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CROSS, BINARY = LossType.CrossEntropyLoss, LossType.BCEWithLogitsLoss
CLASSES = 3


def classifier(*behind: tuple[str, dict[str, Any]], element: int = FLOAT, more: list[Any] = []) -> ModelProto:  # noqa: B006
    """Return a model of ``logits = x w + b`` followed by operators, the last of which makes the output ``y``."""
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["logits"], "head")]
    value = "logits"
    for k, (op, attributes) in enumerate(behind):
        made = "y" if k + 1 == len(behind) else f"v{k}"
        nodes.append(helper.make_node(op, [value], [made], op.lower(), **attributes))
        value = made
    weights = {"w": np.ones((4, CLASSES), np.float32), "b": np.zeros(CLASSES, np.float32)}
    graph = helper.make_graph(
        [*nodes, *more],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(value, element, ["N", CLASSES] if element == FLOAT else None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


INSTEAD = '; name "logits" instead (loss_input_names, or the scores of the loss)'
DOUBTFUL: dict[str, tuple[list[tuple[str, dict[str, Any]]], LossType, str]] = {
    "softmax": (
        [("Softmax", {"axis": 1})],
        CROSS,
        'the cross-entropy loss takes logits, but "y" contains probabilities from node "softmax" (Softmax): the '
        "softmax is computed twice, gradients are small, and the loss does not approach zero",
    ),
    "softmax behind a cast": (
        [("Softmax", {"axis": 1}), ("Identity", {}), ("Clip", {})],
        CROSS,
        'the cross-entropy loss takes logits, but "y" contains probabilities from node "softmax" (Softmax): the '
        "softmax is computed twice, gradients are small, and the loss does not approach zero",
    ),
    "log-softmax": (
        [("LogSoftmax", {"axis": 1})],
        CROSS,
        'the cross-entropy loss takes logits, but "y" contains logarithms of probabilities from node "logsoftmax" '
        "(LogSoftmax): the loss is the same as that of the logits, and the softmax is computed twice",
    ),
    "sigmoid": (
        [("Sigmoid", {})],
        CROSS,
        'the cross-entropy loss takes logits, but "y" contains numbers from 0 to 1 from node "sigmoid" (Sigmoid): '
        "their softmax is nearly uniform, and the loss does not approach zero",
    ),
    "binary, sigmoid": (
        [("Sigmoid", {})],
        BINARY,
        'the binary cross-entropy loss takes logits, but "y" contains numbers from 0 to 1 from node "sigmoid" (Sigmoid)'
        ": the sigmoid is computed from values that are not logits, and the loss does not approach zero",
    ),
    "binary, softmax": (
        [("Softmax", {"axis": 1})],
        BINARY,
        'the binary cross-entropy loss takes logits, but "y" contains probabilities from node "softmax" (Softmax): the '
        "sigmoid is computed from values that are not logits, and the loss does not approach zero",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_loss_that_takes_logits(name: str, tmp_path: Path) -> None:
    """The warning names the preceding value; a loss of that value gives no warning."""
    behind, loss, sentence = DOUBTFUL[name]
    model = classifier(*behind)
    with pytest.warns(ortrain.TrainingWarning) as found:
        artifacts.generate_artifacts(model, loss=loss, artifact_directory=tmp_path)
    assert [str(warning.message) for warning in found] == [sentence + INSTEAD]
    assert found[0].filename == __file__
    # The test configuration turns warnings into errors.
    artifacts.generate_artifacts(model, loss=loss, loss_input_names=["logits"], artifact_directory=tmp_path)
    artifacts.generate_artifacts(model, loss=Loss(loss, scores="logits"), artifact_directory=tmp_path)
    # Losses that compare numbers directly may take probabilities.
    artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)


def test_a_block_of_a_loss(tmp_path: Path) -> None:
    with pytest.warns(ortrain.TrainingWarning, match=r'"y" contains probabilities from node "softmax" \(Softmax\)'):
        artifacts.generate_artifacts(
            classifier(("Softmax", {"axis": 1})), loss=onnxblock.loss.CrossEntropyLoss(), artifact_directory=tmp_path
        )


@pytest.mark.parametrize(("op", "element"), [("Hardmax", FLOAT), ("ArgMax", INT64)])
@pytest.mark.parametrize("loss", [CROSS, LossType.MSELoss])
def test_a_choice_has_no_gradient(loss: LossType, op: str, element: int, tmp_path: Path) -> None:
    model = classifier((op, {"axis": 1}), ("Identity", {}), element=element)
    what = "the cross-entropy loss" if loss is CROSS else "the squared error"
    with pytest.raises(ortrain.OrtrainError) as error:
        artifacts.generate_artifacts(model, requires_grad=["w"], loss=loss, artifact_directory=tmp_path)
    assert str(error.value) == (
        f'the model: {what} of "y" has no gradient: it is selected by node "{op.lower()}" ({op}){INSTEAD}'
    )
    assert list(tmp_path.iterdir()) == []


def test_integers_are_no_scores(tmp_path: Path) -> None:
    model = classifier(("Cast", {"to": INT64}), element=INT64)
    with pytest.raises(ortrain.OrtrainError, match='the scores of a loss must be floats, but "y" is int64'):
        artifacts.generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)


@pytest.mark.parametrize(("tail", "helps"), [([], "a LogSoftmax after it, or"), ([("Softmax", {"axis": 1})], "a Log")])
def test_negative_log_likelihood_needs_logarithms(tail: list[Any], helps: str, tmp_path: Path) -> None:
    """The model has a NegativeLogLikelihoodLoss of its own."""

    def with_loss(*tail: Any) -> ModelProto:
        scores = "y" if tail else "logits"
        loss = helper.make_node("NegativeLogLikelihoodLoss", [scores, "labels"], ["loss"], "nll")
        model = classifier(*tail, more=[loss])
        model.graph.input.append(helper.make_tensor_value_info("labels", INT64, ["N"]))
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info("loss", FLOAT, []))
        return model

    name, maker = ("y", '"softmax" (Softmax)') if tail else ("logits", '"head" (Gemm)')
    with pytest.warns(ortrain.TrainingWarning) as found:
        artifacts.generate_artifacts(with_loss(*tail), artifact_directory=tmp_path)
    assert str(found[0].message).startswith(
        f'the negative log-likelihood takes logarithms of probabilities, but "{name}" comes from node {maker}; add '
        f"{helps}"
    )
    artifacts.generate_artifacts(with_loss(("LogSoftmax", {"axis": 1})), artifact_directory=tmp_path)
    artifacts.generate_artifacts(with_loss(("Softmax", {"axis": 1}), ("Log", {})), artifact_directory=tmp_path)


def test_inspect_warns() -> None:
    found = ortrain.inspect(classifier(("Softmax", {"axis": 1})))
    sentence = (
        '"y" is computed by node "softmax" (Softmax): a loss that takes logits (CrossEntropyLoss, BCEWithLogitsLoss) '
        'needs "logits" (loss_input_names)'
    )
    assert found.warnings == [sentence]
    assert f"warnings:\n  {sentence}\n" in str(found)
    assert ortrain.inspect(classifier(("Softmax", {"axis": 1})), ["logits"]).warnings == []
