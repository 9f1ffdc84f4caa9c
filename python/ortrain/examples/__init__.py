"""Small untrained ONNX models in the package, for experiments.

Each function returns the path of an ordinary ONNX file. Every function of ortrain that reads a model accepts the path.

>>> import ortrain
>>> ortrain.inspect(ortrain.examples.perceptron()).kind
'forward model'
"""

from pathlib import Path

__all__ = ["convnet", "perceptron", "transformer"]


def convnet() -> Path:
    """Returns the path of a convolutional network that classifies an 8 x 8 image into ten classes.

    Input ``x``: float32 of shape ``(batch, 1, 8, 8)``. Output ``logits``: ``(batch, 10)``. Three convolutions
    (``block1``, ``block2``, ``block3``), each with BatchNormalization and Relu, and one dense layer (``fc``).

    >>> ortrain.generate_artifacts(ortrain.examples.convnet(), loss=LossType.CrossEntropyLoss)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> module(np.zeros((4, 1, 8, 8), np.float32), np.arange(4)).shape
    ()
    """
    return Path(__file__).with_name("convnet.onnx")


def perceptron() -> Path:
    """Returns the path of a perceptron that classifies 64 numbers into ten classes.

    Input ``x``: float32 of shape ``(batch, 64)``. Output ``logits``: ``(batch, 10)``. Two dense layers (``fc1``, with
    Relu, and ``fc2``).

    >>> session = ortrain.InferenceSession(ortrain.examples.perceptron())
    >>> (logits,) = session.run(None, {"x": np.zeros((4, 64), np.float32)})
    >>> logits.shape
    (4, 10)
    """
    return Path(__file__).with_name("perceptron.onnx")


def transformer() -> Path:
    """Returns the path of a transformer that classifies a text of at most 32 bytes into two classes.

    Inputs: ``tokens``, int64 of shape ``(batch, length)``, the bytes of the text; and ``mask``, float32 of the same
    shape, 1 for a byte of the text and 0 for padding. Output ``logits``: ``(batch, 2)``. An embedding
    (``embedding.*``), two layers of attention with two heads (``layer1.*``, ``layer2.*``) and one dense layer
    (``head.*``) over the mean of all positions without padding.

    >>> session = ortrain.InferenceSession(ortrain.examples.transformer())
    >>> tokens = np.array([list(b"good"), list(b"bad ")])
    >>> (logits,) = session.run(None, {"tokens": tokens, "mask": np.ones((2, 4), np.float32)})
    >>> logits.shape
    (2, 2)
    """
    return Path(__file__).with_name("transformer.onnx")
