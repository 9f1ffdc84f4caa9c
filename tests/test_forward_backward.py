"""Forward and backward as a pair of calls: acceptance rows B1 to B13, bitwise equality with a step, live passes."""

from __future__ import annotations

import gc
import logging
import pickle
import re
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from nets import NETS
from onnx import TensorProto, helper, numpy_helper
from sklearn.neural_network import MLPClassifier, MLPRegressor

import ortrain
from ortrain import (
    DeviceUnavailableError,
    InvalidArgumentError,
    OrtrainError,
    SessionOptions,
    artifacts,
    capi,
)
from ortrain.api import CheckpointState, Module
from ortrain.gradient import OrtGradientForwardBackward, OrtGradientForwardBackwardFunction

# Tolerance of analytic gradients of small networks, which differ in the order of sums.
ANALYTIC = {"rtol": 1e-5, "atol": 1e-6}
# Tolerance of the same function computed by onnxruntime.
FORWARD = {"rtol": 1e-5, "atol": 1e-6}


def linear(rows: int | str = "batch") -> onnx.ModelProto:
    """Return ``variable = X coef + intercept``, a linear regression of skl2onnx in operators of ai.onnx."""
    rng = np.random.default_rng(3)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "coef"], ["product"]),
            helper.make_node("Add", ["product", "intercept"], ["variable"]),
        ],
        "linear",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [rows, 10])],
        [helper.make_tensor_value_info("variable", TensorProto.FLOAT, [rows, 1])],
        [
            numpy_helper.from_array(rng.standard_normal((10, 1)).astype(np.float32), "coef"),
            numpy_helper.from_array(rng.standard_normal(1).astype(np.float32), "intercept"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def perceptron() -> onnx.ModelProto:
    """Return two layers with a Relu between; the names of ``W1, b1, W2, b2`` are in alphabetical order."""
    rng = np.random.default_rng(4)
    values = {
        "A_W1": rng.standard_normal((6, 5)),
        "B_b1": rng.standard_normal(5),
        "C_W2": rng.standard_normal((5, 3)),
        "D_b2": rng.standard_normal(3),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["X", "A_W1", "B_b1"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("Gemm", ["active", "C_W2", "D_b2"], ["Y"]),
        ],
        "perceptron",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def embedding() -> onnx.ModelProto:
    """Return a model with integer and float inputs and outputs: ``Y = table[ids] scale``, and its ArgMax by row."""
    rng = np.random.default_rng(5)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("Mul", ["rows", "scale"], ["Y"]),
            helper.make_node("ArgMax", ["Y"], ["best"], axis=1, keepdims=0),
        ],
        "embedding",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, [4]),
        ],
        [
            helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]),
            helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 4]),
        ],
        [numpy_helper.from_array(rng.standard_normal((7, 4)).astype(np.float32), "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rows_of(count: int, width: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def weights_of(both: OrtGradientForwardBackward) -> list[np.ndarray]:
    return [both.get_initializer(name) for name in both.weights_to_train]


def arrays(values: Any) -> list[np.ndarray]:
    return [np.array(value.numpy()) for value in values]


def test_b1_names_of_a_linear_model() -> None:
    both = OrtGradientForwardBackward(linear())
    cls = both.cls_type_
    assert cls._onx_inp == cls._grad_input_names == ["X", "coef", "intercept"]
    assert cls._onx_out == cls._bw_fetches_names == ["X_grad", "coef_grad", "intercept_grad"]
    assert cls._input_names == both.input_names == ["X"]
    assert cls._output_names == both.output_names == ["variable"]
    assert cls._weights_to_train == both.weights_to_train == ["coef", "intercept"]
    assert cls.__name__ == f"OrtGradientForwardBackwardFunction_{id(both)}"
    assert issubclass(cls, OrtGradientForwardBackwardFunction)
    info = cls._graph_info
    assert info.user_input_names == ["X"]
    assert info.user_input_grad_names == {"X": "X_grad"}
    assert info.initializer_names == info.initializer_names_to_train == ["coef", "intercept"]
    assert info.initializer_grad_names_to_train == ["coef_grad", "intercept_grad"]
    assert info.user_output_names == ["variable"]
    assert info.module_output_gradient_name == ["variable_grad"]
    assert info.output_grad_indices_non_differentiable == []
    assert info.output_grad_indices_require_full_shape == [0]
    assert (len(cls._devices), len(cls._fw_outputs_device_info), len(cls._bw_outputs_device_info)) == (3, 1, 3)
    trained = cls._trained_onnx
    assert [value.name for value in trained.graph.input] == ["X", "coef", "intercept"]
    assert [value.name for value in trained.graph.output] == ["X_grad", "coef_grad", "intercept_grad"]
    (handing,) = [node for node in trained.graph.node if node.op_type == "YieldOp"]
    assert (handing.domain, list(handing.input), list(handing.output)) == (
        "com.microsoft",
        ["variable"],
        ["variable_grad"],
    )
    evaluated = cls._optimized_pre_grad_model
    assert [value.name for value in evaluated.graph.input] == ["X", "coef", "intercept"]
    assert [value.name for value in evaluated.graph.output] == ["variable"]


def test_b2_providers_and_repr() -> None:
    with pytest.raises(ValueError, match="unknown provider 'NONE'"):
        OrtGradientForwardBackward(linear(), providers=["NONE"])
    for wrong in ("tpu", 3):
        with pytest.raises(ValueError, match="provider"):
            OrtGradientForwardBackward(linear(), providers=wrong)
    with pytest.raises(DeviceUnavailableError, match='there is no device "cuda:99" here'):
        OrtGradientForwardBackward(linear(), providers="cuda:99")
    assert OrtGradientForwardBackward(linear(), providers="cpu").providers == ["CPUExecutionProvider"]
    both = OrtGradientForwardBackward(linear(), providers=["CPUExecutionProvider"])
    assert repr(both).startswith("OrtGradientForwardBackward(")
    assert repr(both).endswith(")")
    with pytest.raises(ValueError, match="unknown provider 'X'"):
        both._provider_name_to_device_type("X")
    assert both._repr_helper_(None) == "None"
    assert both._repr_helper_(SessionOptions()).startswith("SessionOptions(bf16_fallback=")


def test_b3_arrays_values_and_vectors_are_the_same() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    given = [rows_of(4), *weights_of(both)]
    device = capi.OrtDevice(0, 0, 0)
    values = [capi.OrtValue.ortvalue_from_numpy(array, device) for array in given]
    vector = capi.OrtValueVector()
    for value in values:
        vector.push_back(value)
    wrapped = [ortrain.OrtValue.ortvalue_from_numpy(array) for array in given]
    want = given[0] @ given[1] + given[2]
    for inputs in (given, values, vector, wrapped, [np.asfortranarray(array) for array in given]):
        (got,) = arrays(function.forward(inputs))
        np.testing.assert_allclose(got, want, **FORWARD)
        assert function.states_ == []
        assert function.saved_tensors_ is None
    with pytest.raises(NotImplementedError, match="value 1 is None"):
        function.forward([given[0], None, given[2]])
    with pytest.raises(RuntimeError, match=r"expected 3 values .X, coef, intercept., got 2"):
        function.forward(given[:2])
    with pytest.raises(RuntimeError, match="coef"):
        function.forward([given[0], given[1].astype(np.float64), given[2]])
    with pytest.raises(TypeError, match="value 0 must be an array, an OrtValue or a DLPack tensor, got str"):
        function.forward(["X", *given[1:]])


def test_b4_the_evaluation_session_takes_weights() -> None:
    model = perceptron()
    both = OrtGradientForwardBackward(model)
    session = both.cls_type_._sess_eval
    x = rows_of(5, 6)
    feeds = {"X": x} | {name: both.get_initializer(name) for name in both.weights_to_train}
    (got,) = session.run(None, feeds)
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = plain.run(None, {"X": x})
    np.testing.assert_allclose(got, want, **FORWARD)
    # onnxruntime runs the evaluation graph, too.
    own = onnxruntime.InferenceSession(
        both.cls_type_._optimized_pre_grad_model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(own.run(None, feeds)[0], want, **FORWARD)


@pytest.mark.parametrize("rows", [1, 9])
def test_b5_one_output_and_a_gradient_for_each_input_and_weight(rows: int) -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    x = rows_of(rows)
    outputs = function.forward([x, *weights_of(both)], training=True)
    assert (len(outputs), len(function.states_)) == (1, 1)
    seed = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    gradients = function.backward([seed])
    assert (len(gradients), len(function.states_)) == (3, 0)
    of_x, of_coef, of_intercept = arrays(gradients)
    np.testing.assert_allclose(of_x, seed @ weights_of(both)[0].T, **ANALYTIC)
    np.testing.assert_allclose(of_coef, x.T @ seed, **ANALYTIC)
    np.testing.assert_allclose(of_intercept, seed.sum(axis=0), **ANALYTIC)


def test_b6_gradients_of_two_layers_are_the_analytic_ones() -> None:
    both = OrtGradientForwardBackward(perceptron())
    function = both.new_instance()
    x, seed = rows_of(8, 6), rows_of(8, 3, seed=1)
    weights = weights_of(both)
    function.forward([x, *weights], training=True)
    got = arrays(function.backward([seed]))
    hidden = x @ weights[0] + weights[1]
    active = np.maximum(hidden, 0)
    back = (seed @ weights[2].T) * (hidden > 0)
    want = [back @ weights[0].T, x.T @ back, back.sum(axis=0), active.T @ seed, seed.sum(axis=0)]
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, other, **ANALYTIC)


@pytest.mark.parametrize("kind", [MLPRegressor, MLPClassifier])
def test_b7_gradients_are_those_of_scikit_learn(kind: type[Any]) -> None:
    """The gradients equal scikit-learn's for the loss of a perceptron; a classifier starts from raw scores."""
    both = OrtGradientForwardBackward(perceptron())
    function = both.new_instance()
    weights = weights_of(both)
    x, classes = rows_of(8, 6), np.asarray([0, 1, 2, 0, 1, 2, 1, 0])
    target = rows_of(8, 3, seed=2) if kind is MLPRegressor else np.eye(3, dtype=np.float32)[classes]
    # One step of training creates the layers; the test replaces the weights, and there is no penalty.
    model = kind(hidden_layer_sizes=(5,), alpha=0.0, max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, target if kind is MLPRegressor else classes)
    model.coefs_, model.intercepts_ = weights[::2], weights[1::2]
    layers, rooms = [x, *[np.empty(0)] * 2], [[np.empty(0)] * 2 for _ in range(3)]
    _, coefficients, intercepts = model._backprop(x, target, None, layers, *rooms)

    (scores,) = arrays(function.forward([x, *weights], training=True))
    predicted = scores
    if kind is MLPClassifier:
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        predicted = powers / powers.sum(axis=1, keepdims=True)
    got = arrays(function.backward([(predicted - target) / len(x)]))[1:]
    want = [coefficients[0], intercepts[0], coefficients[1], intercepts[1]]
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, other, **ANALYTIC)


def test_b8_the_last_pass_ends_first() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    with pytest.raises(RuntimeError, match="no saved tensors"):
        function.backward([np.ones((1, 1), np.float32)])
    with pytest.raises(RuntimeError, match="no saved tensors"):
        _ = function.saved_tensors
    first, second = rows_of(2, seed=1), rows_of(3, seed=2)
    given = [second, *weights_of(both)]
    function.forward([first, *weights_of(both)], training=True)
    function.forward(given, training=True)
    assert all(mine is other for mine, other in zip(function.saved_tensors, given, strict=True))
    for x in (second, first):
        gradients = arrays(function.backward([np.ones((len(x), 1), np.float32)]))
        np.testing.assert_allclose(gradients[1], x.sum(axis=0)[:, None], **ANALYTIC)
    assert function.saved_tensors is function.saved_tensors_
    with pytest.raises(IndexError, match="already had its backward pass"):
        function.backward([np.ones((2, 1), np.float32)])
    function.forward(given, training=True)
    for wrong, message in (
        ([], "expected 1 gradients, one for"),
        ([np.ones((3, 1), np.float32)] * 2, ", got 2"),
        ([np.ones((2, 1), np.float32)], r"is float32\[2, 1\], but the output is float32\[3, 1\]"),
        ([np.ones((3, 1))], r"is float64\[3, 1\], but the output is float32\[3, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            function.backward(wrong)
        # The failed call changes nothing: the forward pass still waits for its backward pass.
        assert len(function.states_) == 1
    assert len(function.backward([np.ones((3, 1), np.float32)])) == 3


def test_b9_vectors_are_filled_again() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    outputs = function.forward([rows_of(4), *weights_of(both)], training=True)
    gradients = function.backward([np.ones((4, 1), np.float32)])
    where = gradients[1].data_ptr()
    x = rows_of(4, seed=7)
    again = function.forward([x, *weights_of(both)], training=True, forward_outputs_cache=outputs)
    assert again is outputs
    assert len(outputs) == 1
    np.testing.assert_allclose(arrays(outputs)[0], x @ weights_of(both)[0] + weights_of(both)[1], **FORWARD)
    back = function.backward([np.ones((4, 1), np.float32)], backward_outputs_cache=gradients)
    assert back is gradients
    assert len(gradients) == 3
    assert gradients[1].data_ptr() == where, "gradients of weights reuse their memory"
    np.testing.assert_allclose(arrays(gradients)[1], x.sum(axis=0)[:, None], **ANALYTIC)
    # An empty vector is not used as a cache; results of other shapes are in a new vector.
    empty = capi.OrtValueVector()
    assert function.forward([rows_of(2), *weights_of(both)], training=True, forward_outputs_cache=empty) is not empty
    assert arrays(function.backward([np.ones((2, 1), np.float32)]))[0].shape == (2, 10)
    with pytest.raises(ValueError, match="expected 1 values in forward_outputs_cache, one for each result, got 3"):
        function.forward([rows_of(2), *weights_of(both)], forward_outputs_cache=gradients)


def test_b10_pickle() -> None:
    both = OrtGradientForwardBackward(linear(), class_name="Linear", debug=True)
    state = both.__getstate__()
    assert state["run_options"] is None
    assert state["graph_builder_config"] is None
    assert not any(name.endswith("_") for name in state)
    again = pickle.loads(pickle.dumps(both))
    assert again.cls_type_ is not both.cls_type_
    assert again.cls_type_.__name__ == "Linear"
    for name in ("_onx_inp", "_onx_out", "_input_names", "_output_names", "_weights_to_train", "_debug"):
        assert getattr(again.cls_type_, name) == getattr(both.cls_type_, name)
    assert set(vars(again.cls_type_)) == set(vars(both.cls_type_))
    given = [rows_of(3), *weights_of(both)]
    np.testing.assert_array_equal(
        arrays(again.new_instance().forward(given))[0], arrays(both.new_instance().forward(given))[0]
    )
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(both.new_instance())
    with pytest.raises(ValueError, match="not a pickled OrtGradientForwardBackward"):
        OrtGradientForwardBackward.__new__(OrtGradientForwardBackward).__setstate__({"weights": []})


def test_b11_saving_the_graphs(tmp_path: Path) -> None:
    cls = OrtGradientForwardBackward(linear(), class_name="Linear").cls_type_
    saved = cls.save_onnx_graph(bytes)
    assert sorted(saved) == ["_optimized_pre_grad_model", "_trained_onnx"]
    paths = cls.save_onnx_graph(str(tmp_path), prefix="a_", suffix="_b")
    assert Path(paths["_trained_onnx"]).name == "a_Linear_b._trained_onnx.onnx"
    for name, path in paths.items():
        assert Path(path).read_bytes() == saved[name]
        onnx.load(path)
    with pytest.warns(UserWarning, match="is overwritten"):
        cls.save_onnx_graph(tmp_path, prefix="a_", suffix="_b")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        cls.save_onnx_graph(tmp_path / "none")


def test_b12_and_b30_weights_and_their_order() -> None:
    model = perceptron()
    everything = ["A_W1", "B_b1", "C_W2", "D_b2"]
    assert OrtGradientForwardBackward(model).weights_to_train == everything
    for wrong, message in (
        (set(everything), "must be a list of names"),
        (tuple(everything), "must be a list of names"),
        (everything[::-1], "must be a list in alphabetical order"),
        (["A_W1", "A_W1"], "is named twice"),
        (["A_W2"], "is not an initializer of the model"),
        (["X"], "is not an initializer of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            OrtGradientForwardBackward(model, weights_to_train=wrong)
    shuffled = perceptron()
    for name, other in zip(everything, ["W", "b", "V", "a"], strict=True):
        for tensor in shuffled.graph.initializer:
            tensor.name = other if tensor.name == name else tensor.name
        for node in shuffled.graph.node:
            node.input[:] = [other if given == name else given for given in node.input]
    with pytest.raises(ValueError, match="alphabetical order"):
        OrtGradientForwardBackward(shuffled)
    with pytest.raises(ValueError, match="the order of the initializers in the model"):
        OrtGradientForwardBackward(shuffled, weights_to_train=["V", "W", "a", "b"])
    free = OrtGradientForwardBackward(shuffled, weights_to_train=["a", "W"], ordered=False)
    assert free.cls_type_._bw_fetches_names == ["X_grad", "a_grad", "W_grad"]
    assert OrtGradientForwardBackward(shuffled, ordered=False).weights_to_train == ["W", "b", "V", "a"]
    # Without weights, there are gradients of inputs only.
    none = OrtGradientForwardBackward(model, weights_to_train=[])
    function = none.new_instance()
    function.forward([rows_of(2, 6)], training=True)
    assert len(function.backward([rows_of(2, 3)])) == 1
    with pytest.raises(RuntimeError, match="no float initializer"):
        OrtGradientForwardBackward(
            helper.make_model(
                helper.make_graph(
                    [helper.make_node("Exp", ["X"], ["Y"])],
                    "none",
                    [helper.make_tensor_value_info("X", TensorProto.FLOAT, [2])],
                    [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [2])],
                ),
                opset_imports=[helper.make_opsetid("", 15)],
                ir_version=8,
            )
        )


def test_b13_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="onnxcustom"):
        both = OrtGradientForwardBackward(linear(), enable_logging=True)
        function = both.new_instance()
        function.forward([rows_of(2), *weights_of(both)], training=True)
        function.backward([np.ones((2, 1), np.float32)])
    text = caplog.text
    assert "[OrtGradientForwardBackward] weights_to_train=['coef', 'intercept']" in text
    assert "forward: 3 inputs, training=True" in text
    assert "backward: 3 gradients" in text
    caplog.clear()
    OrtGradientForwardBackward(linear())
    assert not caplog.text


def test_integers_have_no_gradient() -> None:
    both = OrtGradientForwardBackward(embedding())
    assert both.cls_type_._bw_fetches_names == ["scale_grad", "table_grad"]
    assert both.cls_type_._graph_info.output_grad_indices_non_differentiable == [0]
    function = both.new_instance()
    ids, scale = np.asarray([1, 3, 1]), np.asarray([1, 2, 3, 4], np.float32)
    table = both.get_initializer("table")
    best, rows = arrays(function.forward([ids, scale, table], training=True))
    np.testing.assert_array_equal(best, (table[ids] * scale).argmax(axis=1))
    np.testing.assert_allclose(rows, table[ids] * scale, **FORWARD)
    seed = rows_of(3, 4)
    want = np.zeros_like(table)
    np.add.at(want, ids, seed * scale)
    for gradients in ([seed], [np.zeros(3, np.int64), seed]):
        of_scale, of_table = arrays(function.backward(gradients))
        np.testing.assert_allclose(of_scale, (table[ids] * seed).sum(axis=0), **ANALYTIC)
        np.testing.assert_allclose(of_table, want, **ANALYTIC)
        function.forward([ids, scale, table], training=True)
    with pytest.raises(RuntimeError, match="index"):
        function.forward([np.asarray([1, 7, 1]), scale, table], training=True)


def with_loss(net: str, folder: Path, mode: str) -> tuple[Any, Any, bytes]:
    """Return a network of ``tests/nets.py``, the state of its artifacts, and the model with its loss."""
    made = NETS[net]()
    artifacts.generate_artifacts(
        made.model,
        requires_grad=made.trained,
        loss=artifacts.LossType[made.loss],
        optimizer=None,
        artifact_directory=folder,
        batch_norm=mode,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    path = folder / "with_loss.onnx"
    module.export_model_for_inferencing(path, [module.output_names()[0]])
    return made, state, path.read_bytes()


def sufficient_memory_limit(folder: Path, x: np.ndarray, y: np.ndarray) -> int:
    """Return a sufficient memory limit of the joint step with recomputation, from the error of a smaller limit."""
    options = SessionOptions()
    # The scratch memory of kernels depends on the number of threads.
    options.intra_op_num_threads, options.memory_limit = 4, 1 << 18
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ortrain.MemoryLimitError) as caught:
        Module(folder / "training_model.onnx", state, session_options=options)(x, y)
    found = re.search(r"memory_limit = (\d+) is enough", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("net", list(NETS))
@pytest.mark.parametrize("mode", ["auto", "freeze"])
def test_two_calls_have_the_bits_of_a_step(net: str, mode: str, tmp_path: Path) -> None:
    """The bits agree at 1, 2 and 4 threads, with and without a memory limit."""
    made, state, model = with_loss(net, tmp_path, mode)
    x, y = made.batches[0]
    for limit in (None, sufficient_memory_limit(tmp_path, x, y)):
        for threads in (1, 2, 4):
            options = SessionOptions()
            options.intra_op_num_threads, options.memory_limit = threads, limit
            state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
            module = Module(tmp_path / "training_model.onnx", state, session_options=options)
            module.train()
            want = np.asarray(module(x, y))
            native_options = ortrain._ortrain.RunOptions(
                num_threads=threads,
                # The loss and its gradient pass between the two calls, which takes more memory.
                memory_limit=None if limit is None else limit + (1 << 12),
            )
            native = ortrain._ortrain.ForwardBackward(
                model, made.trained, [], training=mode, seed=0, options=native_options
            )
            values = [ortrain.OrtValue.ortvalue_from_numpy(array)._ortvalue for array in (x, np.asarray(y))]
            live, (loss,) = native.forward(values, native.initial_weights())
            assert loss.numpy().tobytes() == want.tobytes(), (threads, limit)
            one = ortrain.OrtValue.ortvalue_from_numpy(np.ones_like(loss.numpy()))._ortvalue
            for name, gradient in zip(made.trained, native.backward(live, [one], None), strict=True):
                expected = state.parameters[name].grad
                assert gradient.numpy().tobytes() == expected.tobytes(), (name, threads, limit)


def test_weights_are_read_where_they_lie() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    x, coef, intercept = rows_of(4), *weights_of(both)
    given = function.input_to_ort([x, coef, intercept], both.cls_type_._devices, True)
    before = arrays(function.forward(given))[0]
    coef += 1
    after = arrays(function.forward(given))[0]
    np.testing.assert_allclose(after - before, x.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5)
    # A value keeps its array alive.
    gone = weakref.ref(coef)
    del coef
    gc.collect()
    assert gone() is not None
    function.forward(given, training=True)
    del given
    function.saved_tensors_ = None
    gc.collect()
    assert gone() is not None, "a pending pass keeps its weights alive"
    function.states_.clear()
    gc.collect()
    assert gone() is None


class OnlyDLPack:
    """A tensor of another library that supports only DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_dlpack_tensors_and_unaligned_arrays() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    x, coef, intercept = rows_of(4), *weights_of(both)
    (want,) = arrays(function.forward([x, coef, intercept]))
    bytes_of_coef = np.frombuffer(b"-" + coef.tobytes(), np.uint8)[1:]
    unaligned = bytes_of_coef.view(np.float32).reshape(coef.shape)
    frozen = coef.copy()
    frozen.flags.writeable = False
    for given in (OnlyDLPack(coef), unaligned, frozen, coef.astype(">f4").astype("=f4"), np.asfortranarray(coef)):
        (got,) = arrays(function.forward([OnlyDLPack(x), given, intercept], training=True))
        np.testing.assert_array_equal(got, want)
        gradients = function.backward([OnlyDLPack(np.ones((4, 1), np.float32))])
        np.testing.assert_allclose(gradients[1].numpy(), x.sum(axis=0)[:, None], **ANALYTIC)
    # Shared memory at an unaligned address is not copied silently.
    value = capi.OrtValue.ortvalue_from_numpy(unaligned, capi.OrtDevice(0, 0, 0))
    with pytest.raises(ValueError, match='address of weight "coef" is not a multiple of 4 bytes'):
        function.forward([x, value, intercept])
    # Gradients are never written to read-only memory, nor over weights.
    function.forward([x, coef, intercept], training=True)
    room = capi.OrtValueVector()
    for array in (np.zeros_like(x), frozen, np.zeros(1, np.float32)):
        room.push_back(capi.OrtValue.ortvalue_from_numpy(array, capi.OrtDevice(0, 0, 0)))
    with pytest.raises(ValueError, match='the gradient of "coef" cannot be written: its memory is read-only'):
        function.backward([np.ones((4, 1), np.float32)], backward_outputs_cache=room)
    shared = capi.OrtValueVector()
    for array in (np.zeros_like(x), coef, np.zeros(1, np.float32)):
        shared.push_back(capi.OrtValue.ortvalue_from_numpy(array, capi.OrtDevice(0, 0, 0)))
    with pytest.raises(ValueError, match="share memory; give each gradient its own memory"):
        function.backward([np.ones((4, 1), np.float32)], backward_outputs_cache=shared)
    assert len(function.backward([np.ones((4, 1), np.float32)])) == 3


def test_the_c_module_of_onnxruntime_has_the_names() -> None:
    script = """
import ortrain.compat
ortrain.compat.install()
from onnxruntime.capi._pybind_state import (
    GradientGraphBuilder, OrtModuleGraphBuilder, OrtModuleGraphBuilderConfiguration, PartialGraphExecutionState,
    TrainingAgent, TrainingGraphTransformerConfiguration,
)
from ortrain import capi
assert TrainingAgent is capi.TrainingAgent and GradientGraphBuilder is ortrain.gradient.GradientGraphBuilder
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_of_other_shapes_are_refused() -> None:
    both = OrtGradientForwardBackward(linear())
    function = both.new_instance()
    x, coef, intercept = rows_of(4), *weights_of(both)
    with pytest.raises(ValueError, match=r"weight \"coef\" should be float32\[10, 1\], but it is float32\[10\]"):
        function.forward([x, coef[:, 0], intercept], training=True)
    with pytest.raises(ValueError, match='"X"'):
        function.forward([x[:, :9], coef, intercept], training=True)
    assert function.states_ == []


def test_passes_that_are_forgotten_leave_no_memory() -> None:
    both = OrtGradientForwardBackward(perceptron())
    native = both.cls_type_._native
    given = [rows_of(64, 6), *weights_of(both)]
    for _ in range(1000):
        both.new_instance().forward(given, training=True)
    assert native.live_bytes() == 0


def test_several_threads_run_their_own_passes() -> None:
    both = OrtGradientForwardBackward(perceptron())
    weights = weights_of(both)
    expected = {}
    function = both.new_instance()
    for rows in (3, 17, 40):
        function.forward([rows_of(rows, 6, seed=rows), *weights], training=True)
        expected[rows] = arrays(function.backward([rows_of(rows, 3, seed=rows)]))
    failures: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            own = both.new_instance()
            for _ in range(50):
                own.forward([rows_of(rows, 6, seed=rows), *weights], training=True)
                got = arrays(own.backward([rows_of(rows, 3, seed=rows)]))
                for mine, other in zip(got, expected[rows], strict=True):
                    np.testing.assert_array_equal(mine, other)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="an identifier, got 'my class'"):
        OrtGradientForwardBackward(linear(), class_name="my class")
    with pytest.raises(ValueError, match="an identifier, got 'class'"):
        OrtGradientForwardBackward(linear(), class_name="class")
    with pytest.raises(TypeError, match=r"a model must be a path, bytes or an onnx\.ModelProto, got int"):
        OrtGradientForwardBackward(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model is empty"):
        OrtGradientForwardBackward(b"")
    with pytest.raises(OrtrainError):
        OrtGradientForwardBackward(b"no model")
    with pytest.raises(ValueError, match="input_names: the model has no 'Z'"):
        OrtGradientForwardBackward(linear(), input_names=["Z"])
    with pytest.raises(RuntimeError, match="no initializer 'coeff'; did you mean 'coef'"):
        OrtGradientForwardBackward(linear()).get_initializer("coeff")
    with pytest.raises(TypeError, match=r"call OrtGradientForwardBackward.new_instance\(\) to create"):
        OrtGradientForwardBackwardFunction()
    stopped = linear()
    stopped.graph.node.append(helper.make_node("Round", ["variable"], ["rounded"]))
    stopped.graph.output[0].name = "rounded"
    with pytest.raises(InvalidArgumentError, match="no gradient"):
        OrtGradientForwardBackward(
            stopped,
            weights_to_train=[],
        )
    cpu = capi.OrtDevice(0, 0, 0)
    debugging = OrtGradientForwardBackward(linear(), debug=True).new_instance()
    with pytest.raises(RuntimeError, match="expected one value for each of 3 devices, got 1"):
        debugging.forward([rows_of(1)])
    with pytest.raises(RuntimeError, match="there is no device of type 7"):
        OrtGradientForwardBackwardFunction.device_name(capi.OrtDevice(7, 0, 0))
    assert OrtGradientForwardBackwardFunction.device_name(cpu) == "Cpu"


def test_a_training_agent_runs_the_training_graph() -> None:
    both = OrtGradientForwardBackward(perceptron())
    cls = both.cls_type_
    agent, cpu = cls._training_agent, capi.OrtDevice(0, 0, 0)
    function = both.new_instance()
    x, seed = rows_of(8, 6), rows_of(8, 3, seed=1)
    given = [x, *weights_of(both)]
    want_outputs = arrays(function.forward(given, training=True))
    want = arrays(function.backward([seed]))
    feeds = cls.input_to_ort(given, cls._devices)
    states = [capi.PartialGraphExecutionState() for _ in range(2)]
    for state in states:
        fetches = capi.OrtValueVector()
        agent.run_forward(feeds, fetches, state, capi.OrtValueCache())
        np.testing.assert_array_equal(arrays(fetches)[0], want_outputs[0])
    for state in states:
        fetches = capi.OrtValueVector()
        agent.run_backward(cls.input_to_ort([seed], [cpu]), fetches, state)
        for mine, other in zip(arrays(fetches), want, strict=True):
            np.testing.assert_allclose(mine, other, **ANALYTIC)
    with pytest.raises(RuntimeError, match="has run already"):
        agent.run_backward(cls.input_to_ort([seed], [cpu]), capi.OrtValueVector(), states[0])
    with pytest.raises(RuntimeError, match="this state has no forward pass"):
        agent.run_backward(cls.input_to_ort([seed], [cpu]), capi.OrtValueVector(), capi.PartialGraphExecutionState())
    with pytest.raises(RuntimeError, match="expected 5 feeds, got 1"):
        agent.run_forward(cls.input_to_ort([x], [cpu]), capi.OrtValueVector(), states[0], None)
    names = cls._grad_input_names
    other = capi.TrainingAgent(cls._sess, names[::-1], [cpu], cls._bw_fetches_names[::-1], [cpu] * 5, 0)
    state, fetches = capi.PartialGraphExecutionState(), capi.OrtValueVector()
    other.run_forward(cls.input_to_ort(given[::-1], cls._devices), fetches, state)
    other.run_backward(cls.input_to_ort([seed], [cpu]), fetches, state)
    for mine, expected in zip(arrays(fetches)[::-1], want, strict=True):
        np.testing.assert_allclose(mine, expected, **ANALYTIC)
    with pytest.raises(ValueError, match="no input 'Q'"):
        capi.TrainingAgent(cls._sess, [*names, "Q"], [cpu], [], [], 0)
    with pytest.raises(ValueError, match="feed_names must have all inputs of the session"):
        capi.TrainingAgent(cls._sess, names[1:], [cpu], [], [], 0)
    with pytest.raises(OrtrainError, match="it has no YieldOp"):
        capi.TrainingAgent(cls._sess_eval, names, [cpu], [], [], 0)
    with pytest.raises(OrtrainError, match="run the two passes separately"):
        cls._sess.run(None, dict(zip(names, given, strict=True)))


def test_a_graph_builder_makes_the_graphs() -> None:
    builder = capi.OrtModuleGraphBuilder()
    with pytest.raises(RuntimeError, match="call initialize first"):
        builder.build()
    config = capi.OrtModuleGraphBuilderConfiguration()
    config.initializer_names = config.initializer_names_to_train = ["coef"]
    config.input_names_require_grad = []
    builder.initialize(linear().SerializeToString(), config)
    with pytest.raises(RuntimeError, match="call build first"):
        builder.get_gradient_model()
    builder.build(capi.TrainingGraphTransformerConfiguration())
    trained = onnx.load_from_string(builder.get_gradient_model())
    assert [value.name for value in trained.graph.output] == ["coef_grad"]
    assert [value.name for value in trained.graph.input] == ["X", "coef"]
    assert "intercept" in [tensor.name for tensor in trained.graph.initializer]
    assert builder.get_graph_info().user_input_grad_names == {}
    with pytest.raises(TypeError, match="must be bytes"):
        builder.initialize(linear(), config)
    config.initializer_names = ["coef", "intercept"]
    with pytest.raises(ValueError, match="intercept are in initializer_names, but not in initializer_names_to_train"):
        builder.initialize(linear().SerializeToString(), config)
    config.initializer_names = []
    config.build_gradient_graph = False
    builder.initialize(linear().SerializeToString(), config)
    builder.build()
    with pytest.raises(RuntimeError, match="build_gradient_graph is False"):
        builder.get_gradient_model()
    assert onnx.load_from_string(builder.get_forward_model()).graph.output[0].name == "variable"


def test_branches_run_in_both_passes() -> None:
    """``Y = If(sum(X) > 0, X w, X - w)``: each pass is a schedule of several segments."""
    then = helper.make_graph(
        [helper.make_node("Mul", ["X", "w"], ["t"])], "t", [], [helper.make_tensor_value_info("t", 1, [3])]
    )
    other = helper.make_graph(
        [helper.make_node("Sub", ["X", "w"], ["e"])], "e", [], [helper.make_tensor_value_info("e", 1, [3])]
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["X"], ["sum"], keepdims=0),
            helper.make_node("Greater", ["sum", "zero"], ["holds"]),
            helper.make_node("If", ["holds"], ["chosen"], then_branch=then, else_branch=other),
            helper.make_node("Exp", ["chosen"], ["Y"]),
        ],
        "branches",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [3])],
        [
            numpy_helper.from_array(np.asarray([0.5, -1, 2], np.float32), "w"),
            numpy_helper.from_array(np.asarray(0, np.float32), "zero"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    both = OrtGradientForwardBackward(model, weights_to_train=["w"])
    function = both.new_instance()
    (w,) = weights_of(both)
    for x in (np.asarray([1, 2, 3], np.float32), np.asarray([-1, -2, -3], np.float32)):
        (y,) = arrays(function.forward([x, w], training=True))
        of_x, of_w = arrays(function.backward([np.ones(3, np.float32)]))
        if x.sum() > 0:
            np.testing.assert_allclose(y, np.exp(x * w), **FORWARD)
            np.testing.assert_allclose(of_x, y * w, **ANALYTIC)
            np.testing.assert_allclose(of_w, y * x, **ANALYTIC)
        else:
            np.testing.assert_allclose(y, np.exp(x - w), **FORWARD)
            np.testing.assert_allclose(of_x, y, **ANALYTIC)
            np.testing.assert_allclose(of_w, -y, **ANALYTIC)


@pytest.mark.parametrize(
    "case", sorted(path.name for path in (Path(__file__).parent / "data/gradient-graph").iterdir() if path.is_dir())
)
def test_seeded_with_one_the_gradients_are_the_recorded_ones(case: str) -> None:
    """Forward and backward with a seed of 1 give the 12 recorded gradient graphs of onnxruntime-training 1.19.2."""
    import json

    folder = Path(__file__).parent / "data/gradient-graph" / case
    meta = json.loads((folder / "meta.json").read_text())
    recorded = np.load(folder / "io.npz")
    model = onnx.load(folder / "forward.onnx")
    wanted = {name.removeprefix("grad/"): recorded[name] for name in recorded.files if name.startswith("grad/")}
    weights = [tensor.name for tensor in model.graph.initializer if tensor.name in wanted]
    both = OrtGradientForwardBackward(model, weights_to_train=weights, ordered=False)
    cls = both.cls_type_
    function = both.new_instance()
    given = [recorded[f"in/{name}"] for name in cls._input_names] + weights_of(both)
    outputs = dict(zip(cls._output_names, arrays(function.forward(given, training=True)), strict=True))
    loss = meta["loss_node_arg_name"]
    seeds = [np.ones_like(value) if name == loss else np.zeros_like(value) for name, value in outputs.items()]
    gradients = dict(zip(cls._bw_fetches_names, arrays(function.backward(seeds)), strict=True))
    checked = 0
    for name, want in wanted.items():
        got = gradients.get(f"{name}_grad")
        if got is not None:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            checked += 1
    assert checked >= len(weights) > 0 or checked > 0
