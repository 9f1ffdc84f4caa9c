"""Small untrained ONNX models that come with the package, to try things with.

They are files like those of any exporter. Each function returns the path of one, which everything that reads a model
takes.

>>> import ortrain
>>> ortrain.inspect(ortrain.examples.perceptron()).kind
'forward model'
"""

from pathlib import Path

__all__ = ["convnet", "perceptron", "transformer"]


def convnet() -> Path:
    """Path of a convolution network that names the class, of ten, of an image of 8 x 8 numbers.

    Input ``x``: float32 of shape ``(batch, 1, 8, 8)``. Output ``logits``: ``(batch, 10)``. Three convolutions
    (``block1``, ``block2``, ``block3``), each with BatchNormalization and Relu, and one dense layer (``fc``).

    >>> ortrain.generate_artifacts(ortrain.examples.convnet(), loss=LossType.CrossEntropyLoss)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> module(np.zeros((4, 1, 8, 8), np.float32), np.arange(4)).shape
    ()
    """
    return Path(__file__).with_name("convnet.onnx")


def perceptron() -> Path:
    """Path of a perceptron that names the class, of ten, of 64 numbers.

    Input ``x``: float32 of shape ``(batch, 64)``. Output ``logits``: ``(batch, 10)``. Two dense layers (``fc1``, with
    Relu, and ``fc2``).

    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> (logits,) = session.run(None, {"x": np.zeros((4, 64), np.float32)})
    >>> logits.shape
    (4, 10)
    """
    return Path(__file__).with_name("perceptron.onnx")


def transformer() -> Path:
    """Path of a transformer that names the class, of two, of a text of at most 32 bytes.

    Inputs: ``tokens``, int64 of shape ``(batch, length)``, the bytes of the text; and ``mask``, float32 of the same
    shape, 1 for a byte of the text and 0 for padding. Output ``logits``: ``(batch, 2)``. An embedding
    (``embedding.*``), two layers of attention with two heads (``layer1.*``, ``layer2.*``) and one dense layer
    (``head.*``) over the mean of all positions that are no padding.

    >>> session = ortrain.InferenceSession(ortrain.examples.transformer())
    >>> tokens = np.array([list(b"good"), list(b"bad ")])
    >>> (logits,) = session.run(None, {"tokens": tokens, "mask": np.ones((2, 4), np.float32)})
    >>> logits.shape
    (2, 2)
    """
    return Path(__file__).with_name("transformer.onnx")
