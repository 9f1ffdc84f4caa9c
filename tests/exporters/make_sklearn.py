"""Estimators of scikit-learn as skl2onnx writes them by default: make_sklearn.py FOLDER.

Writes FOLDER/NAME.onnx. For classifiers it also writes FOLDER/NAME-tensors.onnx and FOLDER/logistic-columns.onnx, with
probabilities as a tensor or as a column for each class instead of maps. FOLDER/NAME.npz has the inputs and the results
of scikit-learn. FOLDER/models.json lists the models as classifier, regressor, or rejected model. Needs numpy, onnx,
onnxruntime, scikit-learn and skl2onnx of requirements.txt: `python tests/exporters/make_sklearn.py tests/data/sklearn`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import skl2onnx
from sklearn.ensemble import RandomForestRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, RobustScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.tree import DecisionTreeClassifier

SEED, ROWS = 5, 12
# Estimators without training by gradients.
REFUSED = ("tree", "forest", "svc", "svr")
# Tolerance of float32 records and models, with sums in another order.
TOLERANCE = 1e-4

Estimators = Iterator[tuple[str, Any, np.ndarray, np.ndarray]]


def estimators() -> Estimators:
    """Yield name, estimator, and its training data."""
    rng = np.random.default_rng(SEED)
    x = 3 * rng.standard_normal((60, 4)).astype(np.float32) + np.arange(4, dtype=np.float32)
    signs = x @ rng.standard_normal((4, 3)) + rng.standard_normal((60, 3))
    classes = np.argmax(signs, axis=1)
    names = np.asarray(["ash", "elm", "oak"])[classes]
    values = (x @ rng.standard_normal((4, 2)) + 0.1).astype(np.float32)
    holes = np.where(rng.random(x.shape) < 0.1, np.float32("nan"), x)
    how: dict[str, Any] = {"hidden_layer_sizes": (6, 5), "max_iter": 5, "random_state": SEED}
    yield "scaled_mlp", make_pipeline(StandardScaler(), MLPClassifier(**how)), x, classes
    yield "scaled_mlp_of_names", make_pipeline(StandardScaler(), MLPClassifier(**how)), x, names
    yield "binary_mlp", make_pipeline(StandardScaler(), MLPClassifier(**how)), x, classes > 0
    yield "logistic", LogisticRegression(), x, classes + 4
    yield "logistic_of_names", LogisticRegression(), x, names
    yield "binary_logistic", make_pipeline(StandardScaler(), LogisticRegression()), x, (classes > 0) + 2
    yield "imputed", make_pipeline(SimpleImputer(), Normalizer("l2"), LogisticRegression()), holes, classes
    yield "linear_svc", LinearSVC(), x, classes
    yield "linear", LinearRegression(), x, values
    yield "linear_of_one", make_pipeline(StandardScaler(), LinearRegression()), x, values[:, 0]
    yield "scaled_regressor", make_pipeline(StandardScaler(), MLPRegressor(**how)), x, values[:, 0]
    yield "scaled_twice", make_pipeline(MinMaxScaler(), RobustScaler(), Ridge()), x, values
    whole = np.rint(x).astype(np.int64)
    yield "logistic_of_integers", LogisticRegression(), whole, classes
    yield "linear_of_integers", LinearRegression(), whole, values
    yield "logistic_of_doubles", LogisticRegression(), x.astype(np.float64), classes
    yield "linear_of_doubles", LinearRegression(), x.astype(np.float64), values
    yield "one_against_rest", OneVsRestClassifier(LogisticRegression()), x, classes
    yield "tree", DecisionTreeClassifier(max_depth=2), x, classes
    yield "forest", RandomForestRegressor(2, max_depth=2, random_state=SEED), x, values[:, 0]
    yield "svc", SVC(), x[:20], classes[:20]
    yield "svr", SVR(), x[:20], values[:20, 0]


def checked(content: bytes, feed: np.ndarray, wanted: np.ndarray) -> None:
    """Check that onnxruntime gives the results of scikit-learn."""
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    results = session.run(None, {"X": feed})
    got = results[-1]
    if isinstance(got, list):
        got = np.asarray([list(row.values()) for row in got])
    elif len(results) > 2:
        got = np.stack(results[1:], axis=1)
    np.testing.assert_allclose(np.reshape(got, wanted.shape), wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    models = []
    for name, estimator, x, targets in estimators():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.fit(x, targets)
        feed = x[:ROWS]
        record = {"x": feed}
        is_classifier = hasattr(estimator, "classes_")
        if is_classifier:
            record |= {"label": estimator.predict(feed), "classes": np.asarray(estimator.classes_)}
        predict = next(
            getattr(estimator, how)
            for how in ("predict_proba", "decision_function", "predict")
            if hasattr(estimator, how)
        )
        record["y"] = np.asarray(predict(feed), np.float32)
        np.savez_compressed(folder / f"{name}.npz", **record)
        variants: dict[str, Any] = {"": None}
        if is_classifier:
            variants["-tensors"] = {"zipmap": False}
        if feed.dtype == np.float64 and is_classifier:
            # onnxruntime has no maps of float64.
            del variants[""]
        if name == "logistic":
            variants["-columns"] = {"zipmap": "columns"}
        for variant, options in variants.items():
            try:
                model = skl2onnx.to_onnx(estimator, x[:1], options=options)
            except NameError:
                # An estimator without maps has no such option.
                continue
            content = model.SerializeToString()
            # onnxruntime votes, but scikit-learn uses a decision function.
            if name != "svc":
                checked(content, feed, record["y"])
            (folder / f"{name}{variant}.onnx").write_bytes(content)
            kind = "refused" if name in REFUSED else "classifier" if is_classifier else "regressor"
            models.append({"file": f"{name}{variant}.onnx", "record": f"{name}.npz", "kind": kind})
    (folder / "models.json").write_text(json.dumps(models, indent=1) + "\n")
    print(f"{len(models)} models, {sum(path.stat().st_size for path in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
