"""Results of a model in onnxruntime, or in the reference implementation of ONNX if onnxruntime has no kernel."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from random_graphs.expanding import expanded

Feeds = dict[str, np.ndarray]

# Log level of onnxruntime that prints only fatal messages. Errors are raised as exceptions.
FATAL = 4


class InvalidGraphError(Exception):
    """No oracle can run the model, so its results are unknown."""


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = FATAL
    return options


class Oracle:
    """Session that runs a model as the ONNX standard defines."""

    def __init__(self, model: ModelProto) -> None:
        model = expanded(model)
        try:
            self._session: Any = onnxruntime.InferenceSession(
                model.SerializeToString(), _options(), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            if "NOT_IMPLEMENTED" not in str(error):
                raise InvalidGraphError(str(error)) from error
            try:
                self._session = ReferenceEvaluator(model)
            except Exception as second:
                raise InvalidGraphError(str(second)) from second

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return [np.asarray(value) for value in self._session.run(None, feeds)]
        except Exception as error:
            raise InvalidGraphError(str(error)) from error
