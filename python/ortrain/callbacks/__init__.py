"""Callbacks of ``Model.fit``, with the names, arguments and hooks of Keras.

- :class:`Callback`: base class; override the hooks that you need.
- :class:`EarlyStopping`: end the training when a value no longer improves.
- :class:`ModelCheckpoint`: save the model after epochs or steps: all, the best, the last few.
- :class:`ReduceLROnPlateau`: reduce the learning rate when a value no longer improves.
- :class:`LambdaCallback`: hooks from functions.
- :class:`CSVLogger`: one line of a CSV file per epoch.
- :class:`TensorBoard`: curves for TensorBoard; needs ``tensorboardX``.
- :class:`MLflow`: curves and settings for MLflow; needs ``mlflow-skinny``.
- :class:`ProgressBar`: bar of the running epoch; needs ``tqdm``.

>>> from ortrain.callbacks import EarlyStopping, ModelCheckpoint
>>> callbacks = [
...     EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
...     ModelCheckpoint("run/epoch-{epoch:02d}", keep=3),
... ]
"""

from ortrain.callbacks._callback import Callback
from ortrain.callbacks._checkpoint import ModelCheckpoint
from ortrain.callbacks._functions import LambdaCallback
from ortrain.callbacks._loggers import CSVLogger, MLflow, TensorBoard
from ortrain.callbacks._monitor import EarlyStopping, ReduceLROnPlateau
from ortrain.callbacks._progress import ProgressBar

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "LambdaCallback",
    "MLflow",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "TensorBoard",
]
