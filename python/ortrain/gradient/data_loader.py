"""Batches of consecutive rows, with the names of onnxcustom (``onnxcustom.training.data_loader``).

>>> from ortrain.gradient.data_loader import OrtDataLoader
>>> batches = OrtDataLoader(x, labels, batch_size=5, random_iter=False)
>>> [(rows.shape, targets.shape) for rows, targets in batches.iter_numpy()]
[((5, 64), (5, 1)), ((5, 64), (5, 1))]
"""

from ortrain._estimators.data_loader import OrtDataLoader

__all__ = ["OrtDataLoader"]
