"""Estimators of scikit-learn as skl2onnx exports them (tests/exporters/make_sklearn.py).

The models train by default, their labels and maps follow the trained part, and an error names every operator without a
gradient.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import BACKENDS
from onnx import TensorProto, helper
from onnx.backend.test.loader import load_model_tests
from test_nodes import arrays, types_of

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

FOLDER = Path(__file__).parent / "data" / "sklearn"
ENTRIES = {entry["file"].removesuffix(".onnx"): entry for entry in json.loads((FOLDER / "models.json").read_text())}
CLASSIFIERS = [name for name, entry in ENTRIES.items() if entry["kind"] == "classifier"]
BINARY = [name for name in CLASSIFIERS if name.startswith("binary")]
REGRESSORS = [name for name, entry in ENTRIES.items() if entry["kind"] == "regressor"]
# Each model with a default loss.
TRAININGS = [
    *((name, "CrossEntropyLoss") for name in CLASSIFIERS),
    *((name, "BCEWithLogitsLoss") for name in BINARY),
    *((name, loss) for name in REGRESSORS for loss in ("MSELoss", "L1Loss")),
    ("scaled_mlp", "MSELoss"),
]
# Trained parameters of each model, by the beginning of its name. Scalers and imputers have no trained parameters.
NETWORK = {f"{kind}{layer}" for kind in ("coefficient", "intercepts") for layer in ("", "1", "2")}
LINEAR = {"LinearClassifier/coefficients", "LinearClassifier/intercepts"}
REGRESSION = {"LinearRegressor/coefficients", "LinearRegressor/intercepts"}
PARAMETERS = {
    "scaled_mlp": NETWORK,
    "scaled_mlp_of_names": NETWORK,
    "binary_mlp": NETWORK,
    "logistic": LINEAR,
    "logistic_of_names": LINEAR,
    "binary_logistic": LINEAR,
    "imputed": LINEAR,
    "linear_svc": LINEAR,
    "linear": REGRESSION,
    "linear_of_one": REGRESSION,
    "scaled_regressor": NETWORK,
    "scaled_twice": REGRESSION,
    "logistic_of_integers": LINEAR,
    "linear_of_integers": REGRESSION,
    # For float64 the exporter writes standard ONNX operators.
    "logistic_of_doubles": {"coef", "intercept"},
    "linear_of_doubles": {"coef", "intercept"},
    "one_against_rest": {name.replace("r/", f"r{k}/") for name in LINEAR for k in ("", "1", "2")},
}
STEPS, LEARNING_RATE = 20, 1e-3
# Tolerance of outputs relative to the largest, for float32 sums in another order.
TOLERANCE = 1e-4
# Tolerance of a loss of probabilities that were rounded to float32.
LOSS_TOLERANCE = 1e-4
# Central differences of float32 losses. The error is the rounding of losses over twice the distance, relative to the
# largest slope.
DISTANCE, SLOPE_TOLERANCE = 1e-2, 1e-2
# Tolerance of one float32 operation, which onnxruntime may order differently.
OPERATOR_TOLERANCE = 2e-6


class Exported:
    """A model, its inputs, and the results of scikit-learn."""

    def __init__(self, name: str) -> None:
        self.name, entry = name, ENTRIES[name]
        self.path = FOLDER / entry["file"]
        self.model = onnx.load(self.path)
        with np.load(FOLDER / entry["record"]) as stored:
            self.x, self.y = stored["x"], stored["y"]
            self.label, self.classes = stored.get("label"), stored.get("classes")
        self.outputs = [info.name for info in self.model.graph.output]
        self.names = self.label is not None and self.label.dtype.kind == "U"
        maps = [node.input[0] for node in self.model.graph.node if node.op_type == "ZipMap"]
        self.probabilities = "probabilities" if name.endswith("-columns") else maps[0] if maps else self.outputs[-1]
        self.parameters = PARAMETERS[name.split("-")[0]]

    def theirs(self, path: Path) -> dict[str, Any]:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        results = session.run(None, {"X": self.x})
        return dict(zip([info.name for info in session.get_outputs()], results, strict=True))

    def targets(self, loss: str) -> np.ndarray:
        """Return targets that differ from the model's predictions, in the shape of the loss."""
        rng = np.random.default_rng(3)
        if loss == "CrossEntropyLoss":
            return rng.integers(0, self.y.shape[1], len(self.x))
        if loss == "BCEWithLogitsLoss":
            return rng.integers(0, 2, (len(self.x), 1)).astype(np.float32)
        columns = self.y.shape[1] if self.y.ndim == 2 else 1
        dtype = np.float64 if self.x.dtype == np.float64 else np.float32
        return np.asarray(rng.standard_normal((len(self.x), columns)), dtype)

    def loss(self, kind: str, targets: np.ndarray) -> float:
        """Compute the loss from the results of scikit-learn."""
        y = self.y.astype(np.float64)
        if kind == "CrossEntropyLoss":
            rows = np.arange(len(y))
            if self.name == "linear_svc":
                return float(np.mean(np.log(np.exp(y).sum(axis=1)) - y[rows, targets]))
            return float(-np.log(y[rows, targets]).mean())
        if kind == "BCEWithLogitsLoss":
            found = np.where(targets[:, 0] == 1, y[:, 1], y[:, 0])
            return float(-np.log(found).mean())
        gap = y.reshape(targets.shape) - targets
        return float(np.mean(gap**2 if kind == "MSELoss" else np.abs(gap)))


class Training:
    """A model with a loss; every choice is the default."""

    def __init__(self, name: str, loss: str, folder: Path) -> None:
        self.exported, self.folder = Exported(name), folder
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            artifacts.generate_artifacts(
                self.exported.path,
                loss=artifacts.LossType[loss],
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=folder,
            )
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(LEARNING_RATE)
        self.batch = (self.exported.x, self.exported.targets(loss))

    def learn(self) -> list[float]:
        losses = []
        for _ in range(STEPS):
            losses.append(float(self.module(*self.batch)))
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def export(self, outputs: list[str]) -> Path:
        path = self.folder / "exported.onnx"
        self.module.export_model_for_inferencing(path, outputs)
        return path


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize(("name", "loss"), TRAININGS)
def test_trains_by_default(name: str, loss: str, tmp_path: Path) -> None:
    """The first loss follows from scikit-learn's results, only and all weights are trained, and every step helps."""
    training = Training(name, loss, tmp_path)
    exported = training.exported
    trained = {key for key, value in training.state.parameters if value.requires_grad}
    assert trained == exported.parameters
    assert {key for key, value in training.state.parameters} == trained
    before = {key: value.data.copy() for key, value in training.state.parameters}
    losses = training.learn()
    assert losses[0] == pytest.approx(exported.loss(loss, training.batch[1]), rel=LOSS_TOLERANCE)
    assert np.all(np.diff(losses) < 0), losses
    assert all((value.data != before[key]).any() for key, value in training.state.parameters)
    training.module.eval()
    assert float(training.module(*training.batch)) < losses[-1]


@pytest.mark.parametrize(("name", "loss"), TRAININGS)
def test_gradients(name: str, loss: str, tmp_path: Path) -> None:
    """Gradients equal central differences, along the gradient and in a random direction of all parameters."""
    training = Training(name, loss, tmp_path)
    parameters = dict(training.state.parameters)
    training.module(*training.batch)
    gradients = {key: value.grad.astype(np.float64) for key, value in parameters.items()}
    starts = {key: value.data.copy() for key, value in parameters.items()}
    rng = np.random.default_rng(4)
    length = np.sqrt(sum(float(np.square(value).sum()) for value in gradients.values()))
    drawn = {key: rng.standard_normal(value.shape) * np.abs(value) for key, value in gradients.items()}
    for direction in (gradients, drawn):
        size = np.sqrt(sum(float(np.square(value).sum()) for value in direction.values()))
        losses = []
        for sign in (1, -1):
            for key, value in parameters.items():
                value.data = (starts[key] + sign * DISTANCE / size * direction[key]).astype(starts[key].dtype)
            losses.append(float(training.module(*training.batch)))
        slope = (losses[0] - losses[1]) / (2 * DISTANCE)
        wanted = sum(float((gradients[key] * direction[key]).sum()) for key in parameters) / size
        assert abs(slope - wanted) <= SLOPE_TOLERANCE * length, (slope, wanted, length)


def checked_outputs(exported: Exported, found: dict[str, Any]) -> np.ndarray:
    """Check that onnxruntime's outputs have their original form and that labels match the probabilities."""
    last = found[exported.outputs[-1]]
    if exported.name.endswith("-columns"):
        last = np.stack([found[name] for name in exported.outputs[1:]], axis=1)
    if isinstance(last, list):
        assert exported.classes is not None
        assert all(list(row) == exported.classes.tolist() for row in last)
        last = np.asarray([list(row.values()) for row in last], np.float32)
    if exported.classes is not None:
        label = np.asarray(found[exported.outputs[0]])
        np.testing.assert_array_equal(label, exported.classes[last.argmax(axis=1)])
    assert isinstance(last, np.ndarray)
    return last.astype(np.float32)


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_outputs_stay(name: str, tmp_path: Path) -> None:
    """Onnxruntime gives the model's outputs before and after training; our session gives the numeric outputs."""
    loss = "CrossEntropyLoss" if name in CLASSIFIERS else "MSELoss"
    training = Training(name, loss, tmp_path)
    exported = training.exported
    untouched = exported.theirs(training.export(exported.outputs))
    same(checked_outputs(exported, untouched).reshape(exported.y.shape), exported.y)
    if exported.label is not None:
        np.testing.assert_array_equal(
            untouched[exported.outputs[0]], exported.label.astype(untouched[exported.outputs[0]].dtype)
        )
    training.learn()
    trained = exported.theirs(training.export(exported.outputs))
    last = checked_outputs(exported, trained)
    assert np.abs(last.reshape(exported.y.shape) - exported.y).max() > TOLERANCE
    if name in CLASSIFIERS and name != "linear_svc":
        np.testing.assert_allclose(last.sum(axis=1), 1, rtol=1e-6)

    # Onnxruntime's in-place Normalizer of norm L2 loses signs, so training models contain its parts.
    nodes = onnx.load(tmp_path / "training_model.onnx").graph.node
    assert not {node.op_type for node in nodes} & {"Normalizer", "ZipMap", "LinearClassifier", "LinearRegressor"}

    numbers = [exported.outputs[0], exported.probabilities] if name in CLASSIFIERS else exported.outputs
    path = training.export(numbers[1:] if exported.names else numbers)
    theirs = exported.theirs(path)
    for backend in BACKENDS:
        session = ortrain.InferenceSession(path, providers=[backend])
        for info, got in zip(session.get_outputs(), session.run(None, {"X": exported.x}), strict=True):
            same(got, np.asarray(theirs[info.name]))


@pytest.mark.parametrize("name", BINARY)
def test_two_classes_stay_opposite(name: str, tmp_path: Path) -> None:
    """The two probabilities always sum to one: the module and the export have the same cross-entropy."""
    training = Training(name, "CrossEntropyLoss", tmp_path)
    training.learn()
    found = training.exported.theirs(training.export([training.exported.probabilities]))[
        training.exported.probabilities
    ]
    by_hand = -np.log(found[np.arange(len(found)), training.batch[1]].astype(np.float64)).mean()
    assert float(training.module(*training.batch)) == pytest.approx(by_hand, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_inspect(name: str) -> None:
    exported = Exported(name)
    found = ortrain.inspect(exported.path, batch_size=4)
    assert found.obstacle is None
    assert found.warnings == []
    trained = set(found.names("trained"))
    assert trained == exported.parameters


@pytest.mark.parametrize("name", [name for name in REGRESSORS if not name.endswith("-tensors")] + ["linear_svc"])
def test_original_models_run(name: str) -> None:
    exported = Exported(name)
    for backend in BACKENDS:
        found = ortrain.InferenceSession(exported.path, providers=[backend]).run(None, {"X": exported.x})
        same(np.reshape(found[-1], exported.y.shape).astype(np.float32), exported.y)
        if exported.label is not None:
            np.testing.assert_array_equal(found[0], exported.label)


@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if name.endswith("-tensors") and "names" not in name])
def test_original_classifiers_run(name: str) -> None:
    exported = Exported(name)
    assert exported.label is not None
    for backend in BACKENDS:
        label, probabilities = ortrain.InferenceSession(exported.path, providers=[backend]).run(None, {"X": exported.x})
        np.testing.assert_array_equal(label, exported.label)
        same(probabilities.astype(np.float32), exported.y)


def test_loss_uses_the_named_value(tmp_path: Path) -> None:
    """The loss compares the value named in loss_input_names, even if the default is another value."""
    with pytest.warns(ortrain.TrainingWarning, match='name "LinearClassifier/scores" instead'):
        artifacts.generate_artifacts(
            FOLDER / "logistic-tensors.onnx",
            loss=artifacts.LossType.CrossEntropyLoss,
            loss_input_names=["probability_tensor"],
            artifact_directory=tmp_path,
        )


REFUSALS = {
    "tree": (
        'node "TreeEnsembleClassifier" (ai.onnx.ml:TreeEnsembleClassifier) with inputs (X: float32[X.0, 4]): decision '
        "trees cannot be trained or run, because they have no gradient (their results are constant between the "
        "thresholds); fit them in scikit-learn, or train a model with a gradient: MLPClassifier, MLPRegressor, "
        "LogisticRegression, LinearRegression"
    ),
    "svc": (
        'node "SVMc" (ai.onnx.ml:SVMClassifier) with inputs (X: float32[X.0, 4]): support vector machines with a '
        "kernel cannot be trained or run, because they are fitted by a choice of samples, not by gradients; fit "
        "them in scikit-learn, or train a model with a gradient: LinearSVC, LinearSVR, SGDClassifier, "
        "MLPClassifier"
    ),
}
REFUSALS["tree-tensors"], REFUSALS["svc-tensors"] = REFUSALS["tree"], REFUSALS["svc"]
REFUSALS["forest"] = REFUSALS["tree"].replace("TreeEnsembleClassifier", "TreeEnsembleRegressor")
REFUSALS["svr"] = REFUSALS["svc"].replace('"SVMc" (ai.onnx.ml:SVMClassifier)', '"SVM" (ai.onnx.ml:SVMRegressor)')


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry["kind"] == "refused"])
def test_estimators_without_a_gradient_are_an_error(name: str, tmp_path: Path) -> None:
    path = FOLDER / ENTRIES[name]["file"]
    with pytest.raises(ortrain.UnsupportedError) as refused:
        artifacts.generate_artifacts(path, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    assert str(refused.value) == f"the model {path}: {REFUSALS[name]}"
    assert list(tmp_path.iterdir()) == []
    assert ortrain.inspect(path).obstacle == f"the model {path}: {REFUSALS[name]}"
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(path)
    assert str(refused.value) == f"the model {path}: {REFUSALS[name]}"


def test_zipmap_is_an_error() -> None:
    path = FOLDER / "logistic.onnx"
    with pytest.raises(ortrain.UnsupportedError) as refused:
        ortrain.InferenceSession(path)
    assert str(refused.value) == (
        f'the model {path}: node "ZipMap" (ai.onnx.ml:ZipMap) with inputs (probabilities: ?): its result is a sequence '
        "of maps from class to probability, not a tensor; make its input, the probabilities, an output of the model "
        'instead (skl2onnx: options={"zipmap": False}; for a trained model: name it in export_model_for_inferencing)'
    )


def test_string_labels_are_an_error() -> None:
    for name, sentence in (
        (
            "logistic_of_names-tensors",
            'node "LinearClassifier" (ai.onnx.ml:LinearClassifier) with inputs (X: float32[X.0, 4]): string labels '
            "(classlabels_strings) are not supported; use only the output of probabilities, or fit the classifier with "
            "integer classes",
        ),
        (
            "scaled_mlp_of_names-tensors",
            '"classes" has type string[3], which is not supported (node "ArrayFeatureExtractor" (ArrayFeatureExtractor)'
            " uses it); expected a tensor of numbers or a sequence of such tensors; convert strings to numbers outside "
            "of the model (scikit-learn: encode columns before the pipeline, fit with numbers as classes)",
        ),
    ):
        path = FOLDER / f"{name}.onnx"
        with pytest.raises(ortrain.UnsupportedError) as refused:
            ortrain.InferenceSession(path)
        assert str(refused.value) == f"the model {path}: {sentence}"


ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}


def one_node(op: str, x: np.ndarray, outputs: int = 1, version: int = 1, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one node of ai.onnx.ml, with attributes of the schema's types."""
    names = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, ["x"], names, name=op, domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", ONNX_TYPES[x.dtype.name], x.shape)],
        [helper.make_empty_tensor_value_info(name) for name in names],
    )
    sets = [helper.make_opsetid("ai.onnx.ml", version), helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=sets, ir_version=8)


def compared(model: onnx.ModelProto, x: np.ndarray) -> None:
    """Check that both backends give the results of onnxruntime."""
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = theirs.run(None, {"x": x})
    for backend in BACKENDS:
        for got, want in zip(
            ortrain.InferenceSession(model, providers=[backend]).run(None, {"x": x}), wanted, strict=True
        ):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=OPERATOR_TOLERANCE, atol=OPERATOR_TOLERANCE, strict=True)


TABLE = np.asarray([[1, -2, 0], [3, 4, -5], [0, 0, 0], [-1, -2, 0], [-1, -3, -2]], np.float64)


@pytest.mark.parametrize("dtype", sorted(ONNX_TYPES))
@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm: str, dtype: str) -> None:
    compared(one_node("Normalizer", TABLE.astype(dtype), norm=norm), TABLE.astype(dtype))
    compared(one_node("Normalizer", TABLE[1].astype(dtype), norm=norm), TABLE[1].astype(dtype))


@pytest.mark.parametrize("dtype", sorted(ONNX_TYPES))
def test_scaler(dtype: str) -> None:
    x = TABLE.astype(dtype)
    for offset, scale in (([0.5, -1.0, 2.0], [1.5, 0.25, -1.0]), ([0.5], [3.0])):
        compared(one_node("Scaler", x, offset=offset, scale=scale), x)
        compared(one_node("Scaler", x[0], offset=offset, scale=scale), x[0])


def test_imputer() -> None:
    holes = np.where(TABLE == 0, np.nan, TABLE).astype(np.float32)
    for values in ([7.0, 8.0, 9.0], [0.5]):
        compared(one_node("Imputer", holes, imputed_value_floats=values, replaced_value_float=float("nan")), holes)
        x = TABLE.astype(np.float32)
        compared(one_node("Imputer", x, imputed_value_floats=values, replaced_value_float=-2.0), x)
        integers = [int(value) for value in values]
        x = TABLE.astype(np.int64)
        compared(one_node("Imputer", x, imputed_value_int64s=integers, replaced_value_int64=0), x)


POST_TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"]


@pytest.mark.parametrize("dtype", sorted(ONNX_TYPES))
@pytest.mark.parametrize("post", POST_TRANSFORMS)
def test_linear_classifier(post: str, dtype: str) -> None:
    x = TABLE.astype(dtype)
    rng = np.random.default_rng(1)
    for rows, labels in ((1, []), (1, [5, 9]), (2, [5, 9]), (4, [3, 1, 2, 7])):
        # Coefficients in quarters give scores that are exactly zero or clearly nonzero.
        coefficients = np.round(4 * rng.standard_normal((rows, 3))) / 4
        attributes: dict[str, Any] = {"coefficients": coefficients.ravel().tolist(), "post_transform": post}
        attributes |= {"classlabels_ints": labels} if labels else {}
        for multi_class in (0, 1):
            intercepts = [0.25 * k for k in range(rows)]
            compared(
                one_node("LinearClassifier", x, 2, intercepts=intercepts, multi_class=multi_class, **attributes), x
            )
    one = one_node("LinearClassifier", x[1], 2, intercepts=intercepts, **attributes)
    compared(one, x[1])


@pytest.mark.parametrize("post", POST_TRANSFORMS)
def test_linear_regressor(post: str) -> None:
    x = TABLE.astype(np.float32)
    for targets in (1, 2, 3):
        weights = (np.arange(3.0 * targets) / 4 - 1).tolist()
        for intercepts in ({}, {"intercepts": [0.5] * targets}):
            model = one_node(
                "LinearRegressor", x, coefficients=weights, targets=targets, post_transform=post, **intercepts
            )
            compared(model, x)


def test_label_encoder() -> None:
    numbers = np.asarray([[3, 7, -1], [5, 3, 7]])
    floats = np.asarray([0.5, np.nan, 2.0, -0.5], np.float32)
    for version, x, attributes in (
        (2, numbers, {"keys_int64s": [3, 7], "values_floats": [0.5, 1.5], "default_float": -2.0}),
        (2, numbers, {"keys_int64s": [3, 7], "values_floats": [0.5, 1.5]}),
        (2, numbers, {"keys_int64s": [3, 7, 5], "values_int64s": [30, 70, 50], "default_int64": 9}),
        (2, floats, {"keys_floats": [0.5, 2.0], "values_int64s": [1, 2]}),
        (4, floats, {"keys_floats": [float("nan"), 2.0], "values_floats": [10.0, 20.0], "default_float": 0.25}),
        (
            4,
            numbers,
            {
                "keys_tensor": helper.make_tensor("k", TensorProto.INT64, [2], [3, 5]),
                "values_tensor": helper.make_tensor("v", TensorProto.INT64, [2], [-3, -5]),
                "default_tensor": helper.make_tensor("d", TensorProto.INT64, [1], [77]),
            },
        ),
    ):
        compared(one_node("LabelEncoder", x, version=version, **attributes), x)


@pytest.mark.parametrize("shape", [(2, 4), (4,), (2, 3, 4), (1, 4)])
def test_array_feature_extractor(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for positions in ([[2, 0, 2]], [1]):
        model = one_node("ArrayFeatureExtractor", x)
        tensor = onnx.numpy_helper.from_array(np.asarray(positions), "positions")
        model.graph.initializer.append(tensor)
        model.graph.node[0].input.append("positions")
        compared(model, x)


def refused(model: onnx.ModelProto) -> str:
    with pytest.raises((ortrain.UnsupportedError, ortrain.InvalidModelError)) as error:
        ortrain.InferenceSession(model)
    return str(error.value)


def test_unsupported_attributes_of_operators() -> None:
    x = TABLE.astype(np.float32)
    weights: dict[str, Any] = {"coefficients": [1.0, 2.0, 3.0], "intercepts": [0.0]}
    begins = 'the model: node "{0}" (ai.onnx.ml:{0}) with inputs (x: float32[5, 3]): '.format
    assert refused(one_node("LinearRegressor", x, post_transform="PROBIT", **weights)) == begins("LinearRegressor") + (
        "post_transform PROBIT is not supported, because ONNX has no operator for it; fit a model with NONE, SOFTMAX, "
        "LOGISTIC or SOFTMAX_ZERO"
    )
    assert refused(one_node("LinearRegressor", x, post_transform="CUBE", **weights)) == begins("LinearRegressor") + (
        'post_transform must be NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO or PROBIT, got "CUBE"'
    )
    assert refused(one_node("LinearRegressor", x, targets=0, **weights)) == begins("LinearRegressor") + (
        "targets must be at least 1, got 0"
    )
    assert refused(one_node("LinearRegressor", x, targets=2, **weights)) == begins("LinearRegressor") + (
        "got 3 coefficients and 1 intercepts for 2 scores; each score needs one row of coefficients and one intercept"
    )
    assert refused(one_node("LinearRegressor", x[:, :2], **weights)).endswith(
        "input 0 has 2 features, but the model has 1 rows of 3 coefficients"
    )
    assert (
        refused(one_node("LinearClassifier", x, 2, classlabels_ints=[1, 2, 3], **weights))
        == begins("LinearClassifier")
        + "expected one label for each score, or two labels for one score, got 3 labels for 1 scores"
    )
    assert (
        refused(one_node("LinearClassifier", x, 2, classlabels_ints=[1], **weights))
        == begins("LinearClassifier") + "one score needs two labels or none, got one label"
    )
    assert refused(one_node("Normalizer", x, norm="L3")) == begins("Normalizer") + (
        'norm must be MAX, L1 or L2, got "L3"'
    )
    assert refused(one_node("Normalizer", x[None], norm="L1")).endswith(
        "input 0 has shape [1, 5, 3]; [features] or [batch, features] is needed"
    )
    assert refused(one_node("Scaler", x, offset=[1.0, 2.0], scale=[1.0])) == begins("Scaler") + (
        "offset has 2 elements; expected 1 or 3 (the number of features)"
    )
    assert refused(one_node("Imputer", x, imputed_value_int64s=[1])) == begins("Imputer") + (
        "attribute imputed_value_floats is missing; inputs of type float32 need it"
    )
    texts = one_node("LabelEncoder", x, version=2, keys_floats=[1.0], values_strings=["one"])
    assert refused(texts) == begins("LabelEncoder") + (
        "string values (values_strings) are not supported; map the strings to numbers outside of the model"
    )
    uneven = one_node("LabelEncoder", x, version=2, keys_floats=[1.0, 2.0], values_floats=[1.0])
    assert refused(uneven) == begins("LabelEncoder") + (
        "expected at least one key, and one key for each value, got 2 keys and 1 values"
    )
    missing = one_node("LabelEncoder", x, version=2, keys_floats=[1.0])
    assert refused(missing) == begins("LabelEncoder") + (
        "values are missing: values_tensor, values_int64s or values_floats is needed"
    )
    other = one_node("LabelEncoder", x, version=2, keys_int64s=[1], values_floats=[1.0])
    assert refused(other) == begins("LabelEncoder") + "input 0 is of type float32, but the keys are of type int64"


def test_training_through_probit_is_an_error(tmp_path: Path) -> None:
    x = TABLE.astype(np.float32)
    model = one_node("LinearRegressor", x, coefficients=[1.0, 2.0, 3.0], post_transform="PROBIT")
    with pytest.raises(
        ortrain.UnsupportedError, match="post_transform PROBIT is not supported, because ONNX has no operator for it"
    ):
        artifacts.generate_artifacts(model, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)


def of_each_its_own(x: np.ndarray) -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a one-vs-rest classifier of three sigmoids, divided by their sum, and its results."""
    rng = np.random.default_rng(2)
    weights, intercepts = rng.standard_normal((3, 3)).astype(np.float32), np.asarray([0.5, -0.5, 0.0], np.float32)
    model = one_node(
        "LinearClassifier",
        x,
        2,
        coefficients=weights.ravel().tolist(),
        intercepts=intercepts.tolist(),
        post_transform="LOGISTIC",
        classlabels_ints=[0, 1, 2],
    )
    model.graph.node.append(helper.make_node("Normalizer", ["y1"], ["p"], domain="ai.onnx.ml", norm="L1"))
    label, _ = list(model.graph.output)
    label.CopyFrom(helper.make_tensor_value_info("y0", TensorProto.INT64, [len(x)]))
    del model.graph.output[1]
    model.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, [len(x), 3]))
    sigmoids = 1 / (1 + np.exp(-(x @ weights.T + intercepts).astype(np.float64)))
    return model, sigmoids / sigmoids.sum(axis=1, keepdims=True)


def test_one_against_the_rest(tmp_path: Path) -> None:
    """The cross-entropy uses these probabilities before and after training, although the model has no softmax."""
    x = TABLE.astype(np.float32)
    model, probabilities = of_each_its_own(x)
    labels = np.arange(len(x)) % 3
    artifacts.generate_artifacts(
        model,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    rows = np.arange(len(x))
    losses = []
    for _ in range(STEPS):
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[0] == pytest.approx(-np.log(probabilities[rows, labels]).mean(), rel=LOSS_TOLERANCE)
    assert np.all(np.diff(losses) < 0), losses
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["p"])
    (found,) = ortrain.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    by_hand = -np.log(found[rows, labels].astype(np.float64)).mean()
    assert float(module(x, labels)) == pytest.approx(by_hand, rel=LOSS_TOLERANCE)


def test_possible_probabilities_must_be_named(tmp_path: Path) -> None:
    """A loss on logits rejects values that may be probabilities, unless the user names them."""
    x = TABLE.astype(np.float32)
    model, _ = of_each_its_own(x)
    (norm,) = model.graph.node[1].attribute
    norm.s = b"L2"
    for loss, said in (("CrossEntropyLoss", "cross-entropy"), ("BCEWithLogitsLoss", "binary cross-entropy")):
        with pytest.raises(ortrain.InvalidModelError) as error:
            artifacts.generate_artifacts(model, loss=artifacts.LossType[loss], artifact_directory=tmp_path)
        assert str(error.value) == (
            f'the model: the {said} loss takes logits, but "p" is computed by ai.onnx.ml:Normalizer -> "p", which '
            'may return probabilities; name the logits in loss_input_names ("p" itself, if it contains logits)'
        )
    assert list(tmp_path.iterdir()) == []
    kinds = artifacts.LossType
    artifacts.generate_artifacts(
        model, loss=kinds.CrossEntropyLoss, loss_input_names=["p"], artifact_directory=tmp_path
    )
    artifacts.generate_artifacts(model, loss=kinds.MSELoss, artifact_directory=tmp_path)


def test_several_outputs_of_floats_are_not_chosen_from(tmp_path: Path) -> None:
    """With several float outputs, the user must name one."""
    model, _ = of_each_its_own(TABLE.astype(np.float32))
    model.graph.output.append(helper.make_tensor_value_info("y1", TensorProto.FLOAT, [len(TABLE), 3]))
    with pytest.raises(ortrain.InvalidArgumentError) as error:
        artifacts.generate_artifacts(model, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    assert str(error.value) == (
        "a loss takes scores and an optional target, got 3 values (y0, p, y1); choose them with loss_input_names"
    )


def ml_cases() -> dict[str, Any]:
    """Return ONNX's node cases for our operators of ai.onnx.ml, without string cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        listed = load_model_tests(kind="node")
    ours = {operator.name for operator in ortrain.operators() if operator.domain == "ai.onnx.ml"}
    found = {}
    for case in listed:
        nodes = case.model.graph.node
        texts = "STRING" in types_of(case.model.graph) or any("strings" in item.name for item in nodes[0].attribute)
        if all(node.domain == "ai.onnx.ml" and node.op_type in ours for node in nodes) and not texts:
            found[case.name] = case
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_node_cases(backend: str) -> None:
    cases = ml_cases()
    # The cases of LabelEncoder have strings, and the other operators have no cases.
    assert list(cases) == ["test_ai_onnx_ml_array_feature_extractor"]
    for case in cases.values():
        session = ortrain.InferenceSession(case.model, providers=[backend])
        for inputs, outputs in [(arrays(inputs), arrays(outputs)) for inputs, outputs in case.data_sets]:
            feeds = {value.name: array for value, array in zip(session.get_inputs(), inputs, strict=True)}
            for got, want in zip(session.run(None, feeds), outputs, strict=True):
                np.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol, strict=True)
