"""Conversion of fitted scikit-learn estimators to trainable ONNX models."""

# ruff: noqa: N803  (X is the name that scikit-learn has for a matrix)

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, helper
from sklearn.pipeline import Pipeline

from ortrain.errors import InvalidArgumentError, UnsupportedError
from ortrain.sklearn import _graphs, _networks
from ortrain.sklearn._graphs import Array, Input
from ortrain.sklearn._networks import Network, Selection

_INPUT = "X"
# Number of probe rows: more than one, to distinguish the batch axis from axes of size 1.
_ROWS = 2


@dataclass(frozen=True)
class Converted:
    """Fitted estimator as an ONNX model, with its trainable network."""

    model: bytes
    output: str | None
    input: Input
    network: Network
    rows: Array
    """Zeros that both of them take."""
    predicted: Array
    """What the estimator predicts for these."""


def converted(fitted: Any, X: Any, train: Selection, *, classifier: bool) -> Converted:
    """Convert an estimator to a model, and check that the model can be trained."""
    features = getattr(fitted, "n_features_in_", None)
    if features is None:
        raise UnsupportedError(f"{type(fitted).__name__} has no n_features_in_, the number of its features")
    rows = np.zeros((_ROWS, features), np.float32 if X is None else _element(X, features))
    with warnings.catch_warnings():
        # An estimator with named features warns about rows without names.
        warnings.simplefilter("ignore")
        predicted = np.asarray(fitted.predict(rows))
    if predicted.ndim > 1 and classifier:
        raise UnsupportedError(
            f"{type(fitted).__name__} predicts {predicted.shape[1]} labels for each row; only one label for each row "
            "is supported"
        )
    proto = _converted(fitted, rows)
    if predicted.ndim > 1:
        _without_reshape(proto)
    model_input = _graphs.input_of(proto)

    def network(output: str | None) -> Network:
        return _networks.network(proto, classifier=classifier, output=output, train=train, rows=rows)

    output = None
    try:
        try:
            found = network(None)
        except InvalidArgumentError:
            output = _logits(fitted, proto) if classifier else None
            if output is None:
                raise
            found = network(output)
    except InvalidArgumentError as error:
        raise UnsupportedError(f"{type(fitted).__name__} cannot be trained: {error}") from error
    return Converted(proto.SerializeToString(), output, model_input, found, rows, predicted)


def _converted(fitted: Any, rows: Array) -> ModelProto:
    """Convert an estimator with skl2onnx."""
    try:
        import skl2onnx
        from skl2onnx.common import data_types, exceptions
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"from_estimator needs the package {error.name!r}, which is not installed: pip install skl2onnx",
            name=error.name,
        ) from error
    kinds = {"float32": data_types.FloatTensorType, "float64": data_types.DoubleTensorType}
    kind = kinds.get(rows.dtype.name, data_types.Int64TensorType)

    def model(**options: Any) -> ModelProto:
        with warnings.catch_warnings():
            # Ignore warnings of packages that the converter uses.
            warnings.simplefilter("ignore")
            proto: ModelProto = skl2onnx.convert_sklearn(
                fitted, initial_types=[(_INPUT, kind([None, rows.shape[1]]))], **options
            )
        return proto

    try:
        try:
            return model(options={"zipmap": False})
        except NameError:
            # Converters without maps of probabilities do not have this option.
            return model()
    except (exceptions.MissingShapeCalculator, exceptions.MissingConverter, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"skl2onnx cannot convert {type(fitted).__name__}: {reason}") from error


def _element(X: Any, features: int) -> np.dtype[Any]:
    """Return the element type of the model input for rows like X."""
    rows = np.asarray(X)
    if rows.ndim != 2 or rows.shape[1] != features or rows.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"X is {rows.dtype}{list(rows.shape)}, but the estimator was fitted to rows of {features} numbers"
        )
    if rows.dtype.kind != "f":
        return np.dtype(np.int64)
    return rows.dtype if rows.dtype in (np.float32, np.float64) else np.dtype(np.float32)


def _without_reshape(proto: ModelProto) -> None:
    """Remove the final Reshape of a regressor with several targets, which may put all predictions into one column.

    The output then has one row for each row of X.
    """
    (output,) = proto.graph.output
    last = _graphs.maker(proto.graph, output.name)
    if last is not None and last.op_type == "Reshape":
        last.op_type = "Identity"
        del last.input[1:], last.attribute[:]
        output.CopyFrom(helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, None))


def _logits(fitted: Any, proto: ModelProto) -> str | None:
    """Return the logits of a classifier without a logits output; add nodes that compute them if necessary."""
    graph = proto.graph
    scores = graph.output[-1].name
    last = _graphs.maker(graph, scores)
    if last is not None and last.op_type == "ArrayFeatureExtractor":
        # The decision values of both classes. The second value is the output.
        return str(last.input[0])
    if not hasattr(fitted, "predict_proba"):
        return None

    def added(op: str, value: str) -> str:
        name = _graphs.unused(graph, "logarithms")
        graph.node.append(helper.make_node(op, [value], [name], name))
        return name

    # softmax(log(p)) is p / sum(p). It restores the probabilities, also from values before the normalization, such as
    # sigmoids.
    exponent = _written_sigmoid(graph)
    if exponent is None:
        return added("Log", scores)
    return added("Neg", added("Softplus", exponent))


def _written_sigmoid(graph: GraphProto) -> str | None:
    """Return e of the last ``1 / (1 + exp(e))`` of a graph; the logarithm of this term is ``-softplus(e)``."""
    for node in reversed(graph.node):
        if node.op_type != "Reciprocal":
            continue
        sum_ = _graphs.maker(graph, node.input[0])
        power = None if sum_ is None or sum_.op_type != "Add" else _graphs.maker(graph, sum_.input[0])
        if power is not None and power.op_type == "Exp":
            return str(power.input[0])
    return None


def takes_nan(fitted: Any) -> bool:
    """Return True if an estimator accepts NaN; the first step of a pipeline decides."""
    while isinstance(fitted, Pipeline):
        fitted = next((step for _, step in fitted.steps if step not in (None, "passthrough")), None)
    if fitted is None:
        return False
    try:
        from sklearn.utils import get_tags
    except ImportError:  # scikit-learn before 1.6
        return bool(fitted._get_tags()["allow_nan"])
    return bool(get_tags(fitted).input_tags.allow_nan)
