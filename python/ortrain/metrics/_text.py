"""Metrics of language models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ortrain.metrics._decode import Decoder, log_softmax_at
from ortrain.metrics._metric import Mean


class Perplexity(Decoder, Mean):
    """Exponential of the mean cross-entropy per token.

    Args:
        name: the name in ``logs``.
        logits: False if the outputs are probabilities, otherwise they are scores before a softmax.
        class_axis: the axis of the classes; by default it is found by shapes.
        ignore_index: the label of tokens that do not count, such as padding.

    Raises:
        InvalidArgumentError: at an update, for labels that are no classes.

    >>> from ortrain.metrics import Perplexity
    >>> perplexity = Perplexity(ignore_index=-100)
    >>> perplexity.update([[0, 3, -100]], np.zeros((1, 3, 4)))
    >>> round(perplexity.result(), 6)
    4.0

    """

    higher_is_better = False

    def __init__(
        self,
        name: str = "perplexity",
        *,
        logits: bool | None = None,
        class_axis: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self._set_decoding(task="multiclass", logits=logits, class_axis=class_axis, ignore_index=ignore_index)
        super().__init__(name)

    def update(self, targets: Any, outputs: Any, weights: Any = None) -> None:
        batch = self._decode_classes(targets, outputs, weights)
        labels = batch.labels.astype(np.int64, copy=False)
        if self.logits is False:
            with np.errstate(divide="ignore"):
                logarithms = np.log(np.take_along_axis(batch.scores, labels[:, None], 1)[:, 0], dtype=np.float64)
        else:
            logarithms = log_softmax_at(batch.scores, labels)
        self._add_values(-logarithms, batch.weights)

    def update_loss(self, loss: float, weight: float) -> None:
        """Add a batch by its mean cross-entropy, without its scores.

        Args:
            loss: the mean cross-entropy per token.
            weight: the number of tokens that count.

        >>> import math
        >>> from ortrain.metrics import Perplexity
        >>> perplexity = Perplexity()
        >>> perplexity.update_loss(math.log(8), 10)
        >>> round(perplexity.result(), 6)
        8.0

        """
        self._add(float(loss) * weight, weight)

    def result(self) -> float:
        mean = super().result()
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf
