"""Base class of callbacks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeAlias

Logs: TypeAlias = MutableMapping[str, Any] | None


class Callback:
    """Base class of callbacks: hooks that ``fit``, ``evaluate`` and ``predict`` call.

    The hooks of this class do nothing. Names and order match ``keras.callbacks.Callback``. A hook that no
    callback overrides costs nothing.

    >>> from ortrain.callbacks import Callback
    >>> class Stopwatch(Callback):
    ...     steps = 0
    ...
    ...     def on_train_batch_end(self, batch, logs=None):
    ...         self.steps += 1
    ...         if self.steps == 100:
    ...             self.model.stop_training = True

    """

    model: Any = None
    """Model that is trained, with ``state``, ``module``, ``optimizer``, ``save`` and ``stop_training``."""
    params: Mapping[str, Any] = {}
    """Settings of the run: ``epochs``, ``steps``, ``batch_size``, ``verbose``. An unknown number is ``None``."""

    def set_model(self, model: Any) -> None:
        """Set :attr:`model`.

        >>> from ortrain.callbacks import Callback
        >>> callback = Callback()
        >>> callback.set_model("a model")
        >>> callback.model
        'a model'
        """
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Set :attr:`params`.

        >>> from ortrain.callbacks import Callback
        >>> callback = Callback()
        >>> callback.set_params({"epochs": 3})
        >>> callback.params["epochs"]
        3
        """
        self.params = params

    def on_train_begin(self, logs: Logs = None) -> None:
        """Run code before the first epoch.

        >>> from ortrain.callbacks import Callback
        >>> class Greeting(Callback):
        ...     def on_train_begin(self, logs=None):
        ...         print("start")
        >>> Greeting().on_train_begin()
        start
        """

    def on_train_end(self, logs: Logs = None) -> None:
        """Run code after the last epoch. ``logs`` has the values of the last epoch.

        >>> from ortrain.callbacks import Callback
        >>> class Farewell(Callback):
        ...     def on_train_end(self, logs=None):
        ...         print("end with a loss of", logs["loss"])
        >>> Farewell().on_train_end({"loss": 0.5})
        end with a loss of 0.5
        """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Run code before an epoch. Epochs count from zero.

        >>> from ortrain.callbacks import Callback
        >>> class Announcement(Callback):
        ...     def on_epoch_begin(self, epoch, logs=None):
        ...         print("epoch", epoch)
        >>> Announcement().on_epoch_begin(0)
        epoch 0
        """

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Run code after an epoch and its validation.

        ``logs`` has loss and metrics; names of validation values begin with ``val_``. A value that is added
        to ``logs`` gets into the history.

        >>> from ortrain.callbacks import Callback
        >>> class Gap(Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         logs["gap"] = logs["val_loss"] - logs["loss"]
        >>> logs = {"loss": 0.5, "val_loss": 0.75}
        >>> Gap().on_epoch_end(0, logs)
        >>> logs["gap"]
        0.25
        """

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Run code before a batch. Batches count from zero in each epoch. By default :meth:`on_batch_begin` is called.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_train_batch_begin(0)
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Run code after a batch. ``logs`` has loss and metrics of the epoch so far.

        By default :meth:`on_batch_end` is called.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_train_batch_end(0, {"loss": 0.5})
        """
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Run code before a batch of the training: an older name of :meth:`on_train_batch_begin`.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_batch_begin(0)
        """

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Run code after a batch of the training: an older name of :meth:`on_train_batch_end`.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_batch_end(0)
        """

    def on_test_begin(self, logs: Logs = None) -> None:
        """Run code before an evaluation, also before the validation of an epoch.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_test_begin()
        """

    def on_test_end(self, logs: Logs = None) -> None:
        """Run code after an evaluation. ``logs`` has its loss and metrics, without the prefix ``val_``.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_test_end({"loss": 0.5})
        """

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Run code before a batch of an evaluation.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_test_batch_begin(0)
        """

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Run code after a batch of an evaluation.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_test_batch_end(0)
        """

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Run code before a prediction.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_predict_begin()
        """

    def on_predict_end(self, logs: Logs = None) -> None:
        """Run code after a prediction.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_predict_end()
        """

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Run code before a batch of a prediction.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_predict_batch_begin(0)
        """

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Run code after a batch of a prediction.

        >>> from ortrain.callbacks import Callback
        >>> Callback().on_predict_batch_end(0)
        """

    def state(self) -> dict[str, Any]:
        """Return the values that a resumed run needs: numbers, texts, lists and mappings of them, and NumPy arrays.

        >>> from ortrain.callbacks import EarlyStopping
        >>> EarlyStopping().state()["wait"]
        0
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the values that :meth:`state` returned. A resumed run calls this after ``on_train_begin``.

        >>> from ortrain.callbacks import EarlyStopping
        >>> stopping = EarlyStopping(patience=3)
        >>> stopping.restore(EarlyStopping(patience=3).state() | {"wait": 2})
        >>> stopping.wait
        2
        """
