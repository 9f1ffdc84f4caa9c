"""Small networks as tf2onnx and skl2onnx write them: make_models.py FOLDER.

Writes FOLDER/EXPORTER-NET-OPSET.onnx, and FOLDER/EXPORTER-NET.npz with the inputs and the results of TensorFlow or
scikit-learn. FOLDER/models.json names the values that the loss of each model compares. Runs in its own environment
(requirements.txt, about 2 GB): `python tests/exporters/make_models.py tests/data/exporters`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}
import keras
import numpy as np
import onnx
import onnxruntime
import skl2onnx
import tensorflow as tf
import tf2onnx
from keras import layers
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

SEED, ROWS = 5, 6
# Tolerance of float32 records and models, with sums in another order.
TOLERANCE = 1e-4
# Opsets of tf2onnx in addition to the oldest sufficient one: its default, and the newest supported.
OPSETS = (15, 18)
# Older opsets have no cross-entropy.
CROSS_ENTROPY_SINCE = 12

Nets = Iterator[tuple[str, keras.Model, int]]


def keras_nets() -> Nets:
    """Yield name, network, and the oldest opset at which the exporter can write all operators."""
    x = layers.Input((6,), name="x")
    h = layers.Dense(8, activation="relu")(x)
    h = layers.Dense(7, activation="swish")(layers.Dropout(0.2)(h))
    h = layers.PReLU()(layers.Dense(6)(h))
    h = layers.Dense(5, activation="elu")(layers.Dense(6, activation=keras.activations.softplus)(h))
    yield "dense", keras.Model(x, layers.Dense(3, activation="softmax")(h)), 9

    # After a convolution a BatchNormalization is folded; after an activation it becomes Mul and Add.
    x = layers.Input((12, 12, 3), name="x")
    h = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(x)
    h = layers.ReLU(6.0)(layers.BatchNormalization()(h))
    h = layers.BatchNormalization()(layers.LeakyReLU(0.1)(layers.Conv2D(4, 3, padding="same", dilation_rate=2)(h)))
    h = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(h)
    h = layers.Activation("relu")(layers.BatchNormalization()(h))
    h = layers.SeparableConv2D(5, 3, strides=2)(layers.ZeroPadding2D(((0, 1), (2, 1)))(h))
    yield "convolutions", keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(h))), 9

    x = layers.Input((7, 7, 2), name="x")
    h = FusedNorm()(layers.Conv2D(4, 3, activation="relu")(x))
    h = FusedNorm()(layers.Conv2D(5, 3, strides=2)(h))
    yield "fused_norms", keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.ReLU()(h)))), 9

    x = layers.Input((9, 9, 2), name="x")
    h = layers.MaxPooling2D(3, 2, padding="same")(layers.Conv2D(4, 3, padding="same", activation="tanh")(x))
    h = layers.AveragePooling2D(2, 1, padding="same")(layers.Conv2D(6, 3)(h))
    h = layers.concatenate([layers.GlobalMaxPooling2D()(h), layers.Flatten()(h)])
    yield "pools", keras.Model(x, layers.Dense(3)(h)), 9

    x = layers.Input((8, 8, 2), name="x")
    down = layers.Conv2D(3, 3, padding="same", activation="relu")(x)
    h = layers.Conv2D(4, 3, padding="same", activation="relu")(layers.MaxPooling2D()(down))
    h = layers.concatenate([down, layers.Conv2DTranspose(3, 3, strides=2, padding="same")(h)])
    h = layers.UpSampling2D(2, interpolation="bilinear")(layers.Conv2D(3, 1)(h))
    h = layers.UpSampling2D(2, interpolation="nearest")(layers.Cropping2D(2)(h))
    yield "unet", keras.Model(x, layers.Conv2D(1, 3, padding="same")(h)), 11

    x = layers.Input((10, 3), name="x")
    h = layers.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="relu")(x)
    h = layers.MaxPooling1D()(layers.Conv1D(4, 2, activation="sigmoid")(h))
    h = layers.Conv1DTranspose(3, 3, strides=2, padding="same")(h)
    yield "one_dimension", keras.Model(x, layers.Dense(2)(layers.Reshape((-1,))(h))), 11

    x = layers.Input((5, 4), name="x")
    h = layers.LSTM(3, return_sequences=True)(x)
    yield "lstm", keras.Model(x, layers.Dense(2)(layers.LSTM(4)(h))), 9

    x = layers.Input((5, 4), name="x")
    h = layers.Bidirectional(layers.LSTM(3))(x)
    yield "both_directions", keras.Model(x, layers.Dense(2)(h)), 11

    # Layers without a single operator become a Loop.
    x = layers.Input((5, 4), name="x")
    h = layers.GRU(3, return_sequences=True)(x)
    yield "loops", keras.Model(x, layers.Dense(2)(layers.SimpleRNN(3)(h))), 11

    x = layers.Input((5, 4), name="x")
    yield "unrolled", keras.Model(x, layers.Dense(2)(layers.GRU(3, unroll=True)(x))), 9

    x = layers.Input((5,), dtype="int32", name="x")
    h = layers.Embedding(11, 8)(x)
    h = layers.LayerNormalization()(layers.Add()([h, layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)]))
    h = layers.LayerNormalization()(layers.Add()([h, layers.Dense(8)(layers.Dense(12, activation=gelu)(h))]))
    yield "attention", keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h))), 13

    x = layers.Input((6, 6, 4), name="x")
    h = layers.GroupNormalization(2)(layers.Conv2D(4, 3)(x))
    h = layers.multiply([h, layers.Dense(4, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(h))])
    h = layers.UnitNormalization()(layers.EinsumDense("abcd,de->abce", (4, 4, 5))(h))
    yield "norms", keras.Model(x, layers.Dense(3)(layers.Flatten()(h))), 13


class FusedNorm(layers.Layer):
    """A BatchNormalization as TensorFlow's single operator, which remains one operator."""

    def build(self, shape: Any) -> None:
        for name in ("gamma", "beta", "mean", "variance"):
            trainable = name in ("gamma", "beta")
            setattr(self, name, self.add_weight(name=name, shape=(shape[-1],), trainable=trainable))

    def call(self, x: Any) -> Any:
        values = [tf.convert_to_tensor(value) for value in (self.gamma, self.beta, self.mean, self.variance)]
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=values[0],
            offset=values[1],
            mean=values[2],
            variance=values[3],
            is_training=False,
        ).y


def gelu(x: Any) -> Any:
    """Use the tanh form: for the exact form the exporter leaves a TensorFlow operator in the model."""
    return keras.activations.gelu(x, approximate=True)


def drawn(net: keras.Model, rng: np.random.Generator) -> None:
    """Draw weights that are never zero or one, because an exporter would omit neutral nodes."""
    for weight in net.weights:
        shape, path = weight.shape, weight.path
        fan_in = max(1, int(np.prod(shape[:-1])))
        value = rng.standard_normal(shape) * (fan_in**-0.5 if len(shape) > 1 else 0.2)
        if "gamma" in path or "variance" in path:
            value = 1 + 0.5 * np.tanh(value)
        weight.assign(value)


def loss_input(model: onnx.ModelProto, last: str) -> str:
    """Return the input of an operator's last node, or the model output without such a node."""
    found = [node.input[0] for node in model.graph.node if node.op_type == last]
    return found[-1] if found else str(model.graph.output[-1].name)


def checked(model: onnx.ModelProto, feeds: dict[str, np.ndarray], wanted: np.ndarray, output: str) -> None:
    """Check that onnxruntime gives the results of the framework."""
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run([output], feeds)
    if isinstance(got, list):
        got = np.asarray([list(row.values()) for row in got])
    np.testing.assert_allclose(np.reshape(got, wanted.shape), wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def save(folder: Path, name: str, opset: int, model: onnx.ModelProto) -> str:
    file = f"{name}-{opset}.onnx"
    (folder / file).write_bytes(model.SerializeToString())
    return file


def with_tf2onnx(folder: Path) -> list[dict[str, str]]:
    models = []
    for net_name, net, least in keras_nets():
        rng = np.random.default_rng([SEED, len(net_name)])
        drawn(net, rng)
        (x,) = net.inputs
        shape = (ROWS, *x.shape[1:])
        feed = rng.integers(0, 11, shape, np.int32) if x.dtype == "int32" else rng.standard_normal(shape, np.float32)
        wanted = net(feed, training=False).numpy()
        np.savez_compressed(folder / f"tf2onnx-{net_name}.npz", x=feed, y=wanted)
        signature = [tf.TensorSpec([None, *x.shape[1:]], x.dtype, name="x")]
        function = tf.function(lambda x, net=net: net(x, training=False), input_signature=signature)
        for opset in (least, *OPSETS):
            model, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=opset)
            checked(model, {"x": feed}, wanted, model.graph.output[0].name)
            scores = loss_input(model, "Softmax") if net_name == "dense" else str(model.graph.output[0].name)
            classifies = net_name in ("dense", "convolutions", "attention")
            loss = "CrossEntropyLoss" if classifies and opset >= CROSS_ENTROPY_SINCE else "MSELoss"
            file = save(folder, f"tf2onnx-{net_name}", opset, model)
            models.append({"file": file, "record": f"tf2onnx-{net_name}.npz", "scores": scores, "loss": loss})
    return models


Estimators = Iterator[tuple[str, Any, np.ndarray, set[str], str, str]]


def estimators(x: np.ndarray, rng: np.random.Generator) -> Estimators:
    """Yield name, estimator, targets, forbidden operators, the loss, and the operator after the loss's input."""
    classes = rng.integers(0, 3, len(x))
    names = np.asarray(["ash", "elm", "oak"])[classes]
    values = x @ rng.standard_normal((x.shape[1], 2)) + 0.1
    how: dict[str, Any] = {"hidden_layer_sizes": (6, 5), "max_iter": 3, "random_state": SEED}
    cross_entropy, squares, binary = "CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"
    yield "classifier", MLPClassifier(**how), classes, set(), cross_entropy, "Softmax"
    yield "classifier_of_names", MLPClassifier(activation="tanh", **how), names, set(), cross_entropy, "Softmax"
    yield "binary_classifier", MLPClassifier(activation="logistic", **how), classes > 0, set(), binary, "Sigmoid"
    yield "regressor", MLPRegressor(**how), values, set(), squares, ""
    scaled = make_pipeline(StandardScaler(), MLPClassifier(**how))
    yield "pipeline", scaled, classes, {"Scaler"}, cross_entropy, "Softmax"
    # With its own operators the exporter writes weights as attributes.
    yield "logistic_regression", LogisticRegression(), names, {"LinearClassifier"}, cross_entropy, "Softmax"
    yield "linear_regression", LinearRegression(), values, {"LinearRegressor"}, squares, ""
    yield "attributes", LogisticRegression(), names, set(), cross_entropy, ""


def with_skl2onnx(folder: Path) -> list[dict[str, str]]:
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((40, 4), np.float32)
    models = []
    for name, estimator, targets, without, loss, last in estimators(x, rng):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.fit(x, targets)
        feed = x[:ROWS]
        is_classifier = hasattr(estimator, "predict_proba")
        wanted = np.asarray(estimator.predict_proba(feed) if is_classifier else estimator.predict(feed), np.float32)
        record = {"x": feed, "y": wanted}
        if is_classifier:
            record["label"] = estimator.predict(feed)
        np.savez_compressed(folder / f"skl2onnx-{name}.npz", **record)
        for opset in (9, 13, 17, 21):
            model = skl2onnx.to_onnx(estimator, x[:1], target_opset={"": opset, "ai.onnx.ml": 1}, black_op=without)
            # Some models list an opset twice.
            sets = {item.domain: item.version for item in model.opset_import}
            del model.opset_import[:]
            model.opset_import.extend(onnx.helper.make_opsetid(*item) for item in sets.items())
            checked(model, {"X": feed}, wanted, model.graph.output[-1].name)
            scores = loss_input(model, last)
            used = "MSELoss" if loss == "CrossEntropyLoss" and opset < CROSS_ENTROPY_SINCE else loss
            file = save(folder, f"skl2onnx-{name}", opset, model)
            models.append({"file": file, "record": f"skl2onnx-{name}.npz", "scores": scores, "loss": used})
    return models


EXPORTERS: dict[str, Callable[[Path], list[dict[str, str]]]] = {"tf2onnx": with_tf2onnx, "skl2onnx": with_skl2onnx}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    models = [model for make in EXPORTERS.values() for model in make(folder)]
    (folder / "models.json").write_text(json.dumps(models, indent=1) + "\n")
    print(f"{len(models)} models, {sum(path.stat().st_size for path in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
