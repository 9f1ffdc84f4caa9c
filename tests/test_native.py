"""Extension module: in-place results, replaced initializers, running statistics and random nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortrain
from ortrain import InvalidArgumentError, _ortrain
from ortrain.capi import OrtDevice

# Default options of a forward and backward pass.
OPTIONS: dict[str, Any] = {"seed": 0, "options": _ortrain.RunOptions()}


def value_of(array: Any) -> _ortrain.OrtValue:
    return _ortrain.OrtValue.ortvalue_from_numpy(array, OrtDevice(0, 0, 0))


def native_session(model: onnx.ModelProto) -> _ortrain.InferenceSession:
    return ortrain.InferenceSession(model)._native


def halves() -> onnx.ModelProto:
    """Return a model of y = x / 2 and z = x + 1."""
    x, y, z = (onnx.helper.make_tensor_value_info(name, 1, ["n"]) for name in "xyz")
    numbers = [onnx.numpy_helper.from_array(np.array([n], np.float32), name) for n, name in ((0.5, "h"), (1, "o"))]
    nodes = [onnx.helper.make_node("Mul", ["x", "h"], ["y"]), onnx.helper.make_node("Add", ["x", "o"], ["z"])]
    graph = onnx.helper.make_graph(nodes, "halves", [x], [y, z], numbers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])


def test_results_are_written_where_values_lie() -> None:
    session = native_session(halves())
    array = np.array([2, 4], np.float32)
    x = value_of(array)
    # An output may share the memory of an input; another output has its own memory.
    z = value_of(np.zeros(2, np.float32))
    session.run_into({"x": x}, [(0, x), (1, z)])
    assert (array.tolist(), z.numpy().tolist()) == ([1, 2], [3, 5])
    session.run_into({"x": x}, [])
    assert array.tolist() == [1, 2]


def test_results_that_do_not_fit_write_nothing() -> None:
    session = native_session(halves())
    x, short = value_of(np.array([2, 4], np.float32)), value_of(np.zeros(1, np.float32))
    with pytest.raises(InvalidArgumentError, match=r'output "z" is float32\[2\], but its buffer is float32\[1\]'):
        session.run_into({"x": x}, [(0, x), (1, short)])
    fixed = np.zeros(2, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match='the buffer of output "z": it is read-only; give a writable buffer'):
        session.run_into({"x": x}, [(0, x), (1, value_of(fixed))])
    with pytest.raises(InvalidArgumentError, match="output index 2 is out of range: the model has 2 outputs"):
        session.run_into({"x": x}, [(2, x)])
    with pytest.raises(InvalidArgumentError, match='no value was given for input "x"'):
        session.run_into({}, [(0, x)])
    assert x.numpy().tolist() == [2, 4]


def test_who_else_has_the_memory() -> None:
    value = _ortrain.OrtValue.from_numpy(np.zeros(3, np.float32))
    assert not value.is_shared()
    for share in (np.from_dlpack, _ortrain.OrtValue.from_dlpack, lambda shared: shared.numpy()):
        other = share(value)
        assert value.is_shared()
        del other
        assert not value.is_shared()


def test_a_model_with_other_initializers(tmp_path: Path) -> None:
    model = halves()
    other = value_of(np.array([2], np.float32))
    made = onnx.load_from_string(_ortrain.with_initializers(model.SerializeToString(), [("h", other)]))
    assert onnx.numpy_helper.to_array(made.graph.initializer[0]).tolist() == [2]
    assert made.graph.node == model.graph.node
    assert made.graph.initializer[1] == model.graph.initializer[1]
    # External data is read into the new model, also the data of initializers that are not replaced.
    path = tmp_path / "model.onnx"
    onnx.save_model(halves(), path, save_as_external_data=True, size_threshold=0)
    made = onnx.load_from_string(_ortrain.with_initializers(str(path), [("h", other)]))
    assert [onnx.numpy_helper.to_array(entry).tolist() for entry in made.graph.initializer] == [[2], [1]]
    for values, sentence in [
        ([("H", other)], 'the model has no initializer "H"; did you mean "h"'),
        ([("h", other), ("h", other)], 'initializer "h" is given twice'),
        ([("h", value_of(np.zeros(2, np.float32)))], r'initializer "h" is float32\[1\], but the value is float32\[2\]'),
        ([("h", value_of(np.zeros(1)))], r'initializer "h" is float32\[1\], but the value is float64\[1\]'),
    ]:
        with pytest.raises(InvalidArgumentError, match=sentence):
            _ortrain.with_initializers(model.SerializeToString(), values)


def test_weights_in_attributes_are_initializers_of_a_new_model() -> None:
    node = onnx.helper.make_node(
        "LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[1.0, 2.0], intercepts=[3.0], targets=1
    )
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", width]) for name, width in (("x", 2), ("y", 1)))
    opsets = [onnx.helper.make_opsetid("", 15), onnx.helper.make_opsetid("ai.onnx.ml", 2)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "line", [x], [y]), opset_imports=opsets)
    both = _ortrain.ForwardBackward(model.SerializeToString(), training=None, **OPTIONS)
    zeros = [value_of(np.zeros_like(value.numpy())) for value in both.initial_weights()]
    made = _ortrain.with_initializers(model.SerializeToString(), list(zip(both.weight_names(), zeros, strict=True)))
    assert ortrain.InferenceSession(made).run(None, {"x": np.ones((2, 2), np.float32)})[0].tolist() == [[0], [0]]


def test_running_statistics_are_memory_that_is_updated() -> None:
    rng = np.random.default_rng(0)
    vectors = {"scale": np.ones(3), "bias": np.zeros(3), "mean": np.zeros(3), "var": np.ones(3)}
    initializers = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in vectors.items()]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", 3]) for name in "xy")
    node = onnx.helper.make_node("BatchNormalization", ["x", *vectors], ["y"], momentum=0.5)
    graph = onnx.helper.make_graph([node], "norm", [x], [y], initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])
    both = _ortrain.ForwardBackward(model.SerializeToString(), training="auto", **OPTIONS)
    statistics = dict(both.statistics())
    assert list(statistics) == ["mean", "var"]
    batch = rng.standard_normal((40, 3)).astype(np.float32) + 4
    both.forward([value_of(batch)], both.initial_weights())
    assert np.allclose(statistics["mean"].numpy(), 0.5 * batch.mean(axis=0), atol=1e-5)
    # Evaluations read the statistics from this memory.
    statistics["mean"].update_inplace(np.full(3, 4, np.float32))
    statistics["var"].update_inplace(np.ones(3, np.float32))
    (found,) = both.evaluate([value_of(batch)], both.initial_weights())
    assert np.allclose(found.numpy(), batch - 4, atol=1e-4)


def test_nodes_that_draw_random_numbers_are_named() -> None:
    def names(training: str | None, mode: list[str]) -> list[str]:
        x, y, on = (
            onnx.helper.make_tensor_value_info(name, kind, []) for name, kind in (("x", 1), ("y", 1), ("on", 9))
        )
        node = onnx.helper.make_node("Dropout", ["x", "half", *mode], ["y"], "drop")
        constants = {"half": np.array(0.5, np.float32), "yes": np.array(True), "no": np.array(False)}
        initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
        graph = onnx.helper.make_graph([node], "net", [x, on] if mode == ["on"] else [x], [y], initializers)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])
        both = _ortrain.ForwardBackward(model.SerializeToString(), [], training=training, **OPTIONS)
        return both.random_nodes()

    drops = ['node "drop" (Dropout)']
    assert [names(None, mode) for mode in ([], ["no"], ["yes"], ["on"])] == [[], [], drops, drops]
    assert [names("auto", mode) for mode in ([], ["no"])] == [drops, drops]
