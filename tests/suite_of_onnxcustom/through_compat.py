"""A pytest plugin: tests for onnxcustom run on ortrain, with an onnxruntime that cannot train.

Loaded with ``-p through_compat`` in the environment of run.py. The tests import five functions of mlprodict, which is
no longer built. This file implements these functions with skl2onnx and the reference evaluator of onnx.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import skl2onnx
from onnx.reference import ReferenceEvaluator
from skl2onnx.helpers import onnx_helper

import ortrain.compat

_results: list[dict[str, Any]] = []


def to_onnx(*arguments: Any, **settings: Any) -> onnx.ModelProto:
    """Return the model of an estimator. A converter that rejects operators chooses another form."""
    made: onnx.ModelProto = skl2onnx.to_onnx(*arguments, **settings)
    return made


def select_model_inputs_outputs(
    model: onnx.ModelProto, outputs: list[str], infer_shapes: bool = False
) -> onnx.ModelProto:
    """Return the part of a model for some results, without unused initializers."""
    part: onnx.ModelProto = onnx_helper.select_model_inputs_outputs(model, outputs=outputs)
    read = {name for node in part.graph.node for name in node.input}
    kept = [entry for entry in part.graph.initializer if entry.name in read]
    del part.graph.initializer[:]
    part.graph.initializer.extend(kept)
    return onnx.shape_inference.infer_shapes(part) if infer_shapes else part


def onnx_simple_text_plot(model: onnx.ModelProto) -> str:
    """Return a model as text: a line for each output and each node."""
    lines = [f"output: name={entry.name!r}" for entry in model.graph.output]
    return "\n".join([*lines, *(f"{node.op_type}({node.input}) -> {node.output}" for node in model.graph.node)])


def random_feed(inputs: Any, batch: int = 10) -> dict[str, Any]:
    """Return arrays for the inputs of a model; an axis without a size has the batch size."""
    generator = np.random.default_rng(0)

    def array(entry: onnx.ValueInfoProto) -> Any:
        shape = [size.dim_value or batch for size in entry.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
        return generator.standard_normal(shape).astype(kind)

    return {entry.name: array(entry) for entry in inputs}


class OnnxInference:
    """A model in the reference evaluator, with outputs by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = ReferenceEvaluator(model)

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs."""
        return dict(zip(self._evaluator.output_names, self._evaluator.run(None, feeds), strict=True))


def stand_in() -> None:
    """Install the functions above as the module `mlprodict`."""
    places = {
        "onnx_conv": {"to_onnx": to_onnx},
        "onnx_tools": {},
        "onnx_tools.onnx_manipulations": {"select_model_inputs_outputs": select_model_inputs_outputs},
        "plotting": {},
        "plotting.text_plot": {"onnx_simple_text_plot": onnx_simple_text_plot},
        "onnxrt": {"OnnxInference": OnnxInference},
        "onnxrt.validate": {},
        "onnxrt.validate.validate_latency": {"random_feed": random_feed},
    }
    sys.modules["mlprodict"] = ModuleType("mlprodict")
    for name, values in places.items():
        module = ModuleType(f"mlprodict.{name}")
        vars(module).update(values)
        sys.modules[module.__name__] = module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", required=True, help="JSON file of test outcomes")


def pytest_configure(config: pytest.Config) -> None:
    stand_in()
    ortrain.compat.install()
    # The attribute tells tests that onnxruntime can train.
    onnxruntime.TrainingSession = type("TrainingSession", (), {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # The same numbers in every run.
    np.random.seed(0)  # noqa: NPY002  (the tests draw by it)
    random.seed(0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    # Setup and teardown count if they fail or skip.
    if report.when == "call" or not report.passed:
        reason = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}".strip()
        _results.append({"test": item.nodeid, "outcome": report.outcome, "reason": reason, "changed": []})
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        reason = str(report.longrepr).strip().splitlines()[-1]
        _results.append({"test": report.nodeid, "outcome": "failed", "reason": reason, "changed": []})


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(session.config.getoption("--results")).write_text(json.dumps(_results))
