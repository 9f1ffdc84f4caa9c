"""Estimators of scikit-learn that train an ONNX model, for pipelines, grid search and cross-validation.

The packages scikit-learn and onnx are required; :meth:`OnnxClassifier.from_estimator` also needs skl2onnx.

>>> import ortrain
>>> from ortrain.sklearn import OnnxClassifier
>>> classifier = OnnxClassifier(ortrain.examples.perceptron(), classes=range(10), max_iter=20, random_state=0)
>>> classifier.fit(x, labels).predict_proba(x).shape
(8, 10)
>>> classifier.loss_curve_[-1] < classifier.loss_curve_[0]
True
"""

try:
    import onnx as _onnx  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"ortrain.sklearn needs the package {_error.name!r}, which is not installed: pip install scikit-learn onnx",
        name=_error.name,
    ) from _error

from ortrain.sklearn._classifier import OnnxClassifier
from ortrain.sklearn._regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]
