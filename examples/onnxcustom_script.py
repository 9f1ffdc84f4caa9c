"""A script for onnxcustom and onnxruntime-training that runs on ortrain: only two lines are new.

    python examples/onnxcustom_script.py

The script converts a scikit-learn network, trains it further with stochastic gradient descent and Nesterov momentum,
and selects a learning rate by cross-validation.
"""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning as NotConverged
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPRegressor

import ortrain.compat

ortrain.compat.install()

# isort: split
# ruff: noqa: E402  (these imports need the call of install above)
from onnxcustom import __max_supported_opset__ as opset
from onnxcustom.training.excs import ConvergenceWarning
from onnxcustom.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
from onnxcustom.training.sgd_learning_rate import LearningRateSGDNesterov
from onnxcustom.utils.onnx_helper import onnx_rename_weights
from onnxruntime import InferenceSession
from skl2onnx import to_onnx

np.random.seed(0)  # noqa: NPY002  (weights and batches are drawn by it)
warnings.simplefilter("ignore", NotConverged)
warnings.simplefilter("ignore", ConvergenceWarning)

X, y = make_regression(1000, n_features=10, bias=2, noise=5, random_state=0)
X, y = X.astype(np.float32), (y / y.std()).astype(np.float32)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

network = MLPRegressor(hidden_layer_sizes=(20,), max_iter=5, random_state=0).fit(X_train, y_train)
onx = onnx_rename_weights(to_onnx(network, X_train[:1], target_opset=opset))
weights = [init.name for init in onx.graph.initializer if "shape" not in init.name]


def error(model) -> float:  # type: ignore[no-untyped-def]
    """Returns the mean squared error on the test rows."""
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(((session.run(None, {"X": X_test})[0].ravel() - y_test) ** 2).mean())


print(f"scikit-learn, 5 passes: {error(onx):.4f}")

trainer = OrtGradientForwardBackwardOptimizer(
    onx,
    weights,
    learning_rate=LearningRateSGDNesterov(1e-2, momentum=0.9),
    learning_loss="square_error",
    warm_start=True,
    max_iter=20,
    batch_size=10,
    exc=False,
)
trainer.fit(X_train, y_train, X_val=X_test, y_val=y_test)
print(f"20 passes more: {error(trainer.get_trained_onnx()):.4f}")

rates = [LearningRateSGDNesterov(rate, momentum=0.9) for rate in (1e-5, 1e-3, 1e-2)]
trainer.set_params(max_iter=5)
search = GridSearchCV(trainer, {"learning_rate": rates}, cv=3).fit(X_train, y_train)
print(f"best of {len(rates)} rates: {search.best_params_['learning_rate'].eta0}")
