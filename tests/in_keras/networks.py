"""Networks of Keras as tf2onnx writes them, and their training in Keras: networks.py FOLDER.

Writes FOLDER/NAME.onnx with the fresh weights. FOLDER/NAME.npz has an input, a target, the losses of STEPS steps of SGD
in Keras, and the number of trainable elements. Runs in the environment of tests/exporters/requirements.txt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}
import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from keras import layers

SEED, ROWS, STEPS, RATE, OPSET, WORDS = 7, 4, 5, 0.05, 17, 23


def networks() -> Iterator[tuple[str, keras.Model]]:
    x = layers.Input((16, 12, 3), name="x")
    h = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(x)
    h = layers.DepthwiseConv2D(3, padding="same", activation="elu")(h)
    skip = h
    h = layers.SeparableConv2D(6, 3, padding="same", activation="swish")(h)
    h = layers.LayerNormalization()(layers.Add()([h, skip]))
    h = layers.concatenate([layers.MaxPooling2D(2)(h), layers.AveragePooling2D(2)(h)])
    h = layers.PReLU(shared_axes=[1, 2])(layers.Conv2DTranspose(5, 3, strides=2, padding="same")(h))
    yield "channels-last", keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling2D()(h)))

    # One bias becomes two biases in ONNX, and both would be trained: an SGD step would have twice the length.
    x = layers.Input((6, 4), name="x")
    h = layers.LSTM(5, return_sequences=True, use_bias=False)(x)
    h = layers.Bidirectional(layers.LSTM(4, use_bias=False))(h)
    yield "lstm", keras.Model(x, layers.Dense(2)(h))

    x = layers.Input((6, 4), name="x")
    h = layers.GRU(5, return_sequences=True)(x)
    h = layers.GRU(4, reset_after=False, use_bias=False)(h)
    yield "gru", keras.Model(x, layers.Dense(2)(h))

    x = layers.Input((7,), dtype="int32", name="x")
    h = layers.Embedding(WORDS, 8)(x)
    heads = layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(layers.Add()([h, heads]))
    h = layers.LayerNormalization()(layers.Add()([h, layers.Dense(8)(layers.Dense(12, activation="tanh")(h))]))
    yield "attention", keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))

    x = layers.Input((5, 6), name="x")
    query, value = layers.Conv1D(6, 1)(x), layers.Conv1D(6, 3, padding="causal")(x)
    h = layers.concatenate([layers.Attention()([query, value]), layers.AdditiveAttention()([query, value])])
    yield "attention-layers", keras.Model(x, layers.Dense(2)(layers.Flatten()(h)))

    x = layers.Input((4, 6, 6, 2), name="x")
    h = layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True)(x)
    h = layers.ConvLSTM2D(2, 3)(h)
    yield "conv-lstm", keras.Model(x, layers.Dense(2)(layers.Flatten()(h)))

    x = layers.Input((4, 8, 8, 2), name="x")
    h = layers.TimeDistributed(layers.Conv2D(4, 3, activation="relu"))(x)
    h = layers.TimeDistributed(layers.MaxPooling2D(2))(h)
    h = layers.TimeDistributed(layers.Dense(3, activation="tanh"))(layers.TimeDistributed(layers.Flatten())(h))
    yield "time-distributed", keras.Model(x, layers.Dense(2)(layers.LSTM(4, use_bias=False)(h)))


def trained(network: keras.Model, x: Any, target: Any) -> list[float]:
    """Return the losses of steps of SGD."""
    losses = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(network(x, training=False) - target))
        losses.append(float(loss))
        variables = [weight.value for weight in network.trainable_weights]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
    return losses


def main() -> None:
    folder = Path(sys.argv[1])
    names = []
    for name, network in networks():
        rng = np.random.default_rng([SEED, len(names)])
        for weight in network.weights:
            # No bias is zero and no scale is one, because an exporter would omit such nodes.
            fan_in = max(1, int(np.prod(weight.shape[:-1])))
            value = rng.standard_normal(weight.shape) * (fan_in**-0.5 if len(weight.shape) > 1 else 0.2)
            weight.assign(1 + 0.5 * np.tanh(value) if "gamma" in weight.path else value)
        (given,) = network.inputs
        shape = (ROWS, *given.shape[1:])
        x = (
            rng.integers(0, WORDS, shape, np.int32)
            if given.dtype == "int32"
            else rng.standard_normal(shape, np.float32)
        )
        target = rng.standard_normal((ROWS, *network.outputs[0].shape[1:]), np.float32)
        signature = [tf.TensorSpec([None, *given.shape[1:]], given.dtype, name="x")]
        function = tf.function(lambda x, network=network: network(x, training=False), input_signature=signature)
        path = folder / f"{name}.onnx"
        tf2onnx.convert.from_function(function, input_signature=signature, opset=OPSET, output_path=path)
        count = sum(int(np.prod(weight.shape)) for weight in network.trainable_weights)
        np.savez(folder / f"{name}.npz", x=x, target=target, losses=trained(network, x, target), count=count)
        names.append(name)
    print(" ".join(names))


if __name__ == "__main__":
    main()
