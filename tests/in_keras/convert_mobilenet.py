"""Convert a trained classifier of images from an HDF5 file of Keras to ONNX, with an open batch axis.

convert_mobilenet.py MODEL.h5 MODEL.onnx prints the shape of the input.
"""

from __future__ import annotations

import sys

import keras
import tensorflow as tf
import tf2onnx


def main() -> None:
    network = keras.models.load_model(sys.argv[1], compile=False)
    (entry,) = network.inputs
    signature = [tf.TensorSpec([None, *entry.shape[1:]], entry.dtype, name="image")]
    function = tf.function(lambda image: network(image, training=False), input_signature=signature)
    tf2onnx.convert.from_function(function, input_signature=signature, opset=18, output_path=sys.argv[2])
    print(*entry.shape[1:])


if __name__ == "__main__":
    main()
