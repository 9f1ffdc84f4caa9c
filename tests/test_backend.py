"""The backend interface that ONNX defines for its runtimes."""

from __future__ import annotations

import unittest
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import helper

import ortrain
from ortrain import backend

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
X = np.random.default_rng(0).random((3, 64), np.float32)


def test_models() -> None:
    model = onnx.load(PERCEPTRON)
    prepared = backend.prepare(model)
    (want,) = ortrain.InferenceSession(model).run(None, {"x": X})
    for inputs in ([X], {"x": X}, X, (X,)):
        got = prepared.run(inputs)
        np.testing.assert_array_equal(got[0], want)
        np.testing.assert_array_equal(got["logits"], want)  # type: ignore[call-overload]
    (reference,) = backend.run_model(model, [X], device="REFERENCE")
    np.testing.assert_allclose(reference, want, atol=1e-5)


def test_nodes() -> None:
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    (got,) = backend.run_node(node, [np.array([1.0, 5.0], np.float32), None, np.array(2.0, np.float32)])
    np.testing.assert_array_equal(got, [1, 2])
    old = helper.make_node("Softmax", ["x"], ["y"])
    x = np.zeros((2, 2, 2), np.float32)
    # Up to version 12, Softmax flattens all axes from the second on.
    assert backend.run_node(old, [x], opset_version=12)[0].max() == 0.25
    assert backend.run_node(old, [x], opset_version=13)[0].max() == 0.5
    own = helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")
    assert backend.run_node(own, {"x": x})[0].shape == (2, 2, 2)


def test_unsupported_devices_and_arguments() -> None:
    model = onnx.load(PERCEPTRON)
    assert backend.supports_device("CPU:0")
    assert not backend.supports_device("CPU:1")
    assert not backend.supports_device("CUDA")
    unknown = helper.make_model(
        helper.make_graph([helper.make_node("Frobnicate", [], ["y"])], "g", [], [onnx.ValueInfoProto(name="y")])
    )
    assert backend.is_compatible(model)
    assert not backend.is_compatible(unknown)
    with pytest.raises(ortrain.OrtrainError, match="expected 1 inputs \\(x\\), got 2"):
        backend.run_model(model, [X, X])
    with pytest.raises(TypeError, match="unknown arguments: precision"):
        backend.prepare(model, precision="half")


def test_the_tests_of_onnx_run() -> None:
    """A few tests of ONNX's suite run; tests/test_nodes.py covers all operators."""
    # ONNX casts numbers beyond the range of float8 to make its cases.
    with np.errstate(all="ignore"):
        runner = onnx.backend.test.BackendTest(backend, __name__)
    runner.include(r"^test_(relu|matmul_2d|softmax_axis_0|gather_0|if|lstm_defaults)_cpu$")
    result = unittest.TestResult()
    runner.test_suite.run(result)
    ran = result.testsRun - len(result.skipped)
    assert not result.failures + result.errors, result.failures + result.errors
    assert ran == 6


def test_meta() -> None:
    model = onnx.load(PERCEPTRON)
    model.producer_name, model.model_version, model.domain, model.doc_string = "test", 3, "org.test", "what it does"
    model.graph.doc_string = "how"
    helper.set_model_props(model, {"epochs": "5"})
    meta = ortrain.InferenceSession(model).get_modelmeta()
    assert meta == ortrain.ModelMetadata("test", "perceptron", "org.test", "what it does", "how", 3, {"epochs": "5"})
