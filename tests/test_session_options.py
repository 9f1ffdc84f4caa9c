"""Options of sessions and runs, and the information of a session."""

from __future__ import annotations

import enum
import itertools
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
from conftest import RECORDS

import ortrain
from ortrain import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    InvalidArgumentError,
    OrtValue,
    RunOptions,
    SessionOptions,
    UnsupportedError,
    _ortrain,
)
from ortrain.api import CheckpointState, Module

CASE = RECORDS / "mlp_adamw_ce"
X = np.random.default_rng(0).standard_normal((4, 64), np.float32)


def perceptron() -> onnx.ModelProto:
    return onnx.load_from_string(Path(ortrain.examples.perceptron()).read_bytes())


# Options and their default values.

DEFAULTS: dict[str, Any] = {
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "enable_mem_reuse": True,
    "enable_profiling": False,
    "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
    "execution_order": ExecutionOrder.DEFAULT,
    "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
    "inter_op_num_threads": 0,
    "intra_op_num_threads": 0,
    "log_severity_level": -1,
    "log_verbosity_level": 0,
    "logid": "",
    "optimized_model_filepath": "",
    "profile_file_prefix": "onnxruntime_profile_",
    "use_deterministic_compute": False,
}
RUN_DEFAULTS: dict[str, Any] = {
    "log_severity_level": -1,
    "log_verbosity_level": 0,
    "logid": "",
    "only_execute_path_to_fetches": False,
    "terminate": False,
    "training_mode": True,
}


@pytest.mark.parametrize(("kind", "defaults"), [(SessionOptions, DEFAULTS), (RunOptions, RUN_DEFAULTS)])
def test_defaults(kind: Any, defaults: dict[str, Any]) -> None:
    options, theirs = kind(), getattr(onnxruntime, kind.__name__)()
    for name, value in defaults.items():
        assert getattr(options, name) == value, name
        assert type(getattr(options, name)) is type(value), name
        # Run options of onnxruntime's inference package have no training mode.
        if hasattr(theirs, name):
            their = getattr(theirs, name)
            assert (their.name if isinstance(value, enum.Enum) else their) == (
                value.name if isinstance(value, enum.Enum) else value
            ), name
        assert f"{name}={value!r}" in repr(options)


@pytest.mark.parametrize("kind", [GraphOptimizationLevel, ExecutionMode, ExecutionOrder])
def test_enumerations(kind: Any) -> None:
    theirs = getattr(onnxruntime, kind.__name__)
    known = {name: int(member) for name, member in theirs.__members__.items()}
    assert {member.name: member.value for member in kind}.items() >= (
        {name: value for name, value in known.items() if name in kind.__members__}
    ).items()
    # Other releases may have more members.
    assert len(known.keys() & kind.__members__.keys()) >= 2


def wrong_values() -> list[Any]:
    found = []
    for kind, defaults in ((SessionOptions, DEFAULTS), (RunOptions, RUN_DEFAULTS)):
        for name, value in defaults.items():
            wrong: list[Any] = [None, [], {}]
            if not isinstance(value, str):
                wrong.append("yes")
            if not isinstance(value, bool):
                wrong.append(True)
            if isinstance(value, bool | str | enum.Enum):
                wrong.append(1)
            wrong.append(1.5)
            found += [pytest.param(kind, name, other, id=f"{kind.__name__}-{name}-{other!r}") for other in wrong]
    return found


@pytest.mark.parametrize(("kind", "name", "value"), wrong_values())
def test_values_of_a_wrong_type(kind: Any, name: str, value: Any) -> None:
    options = kind()
    before = getattr(options, name)
    with pytest.raises(TypeError, match=f"^{name} must be"):
        setattr(options, name, value)
    assert getattr(options, name) == before


def test_options_without_effect_are_stored() -> None:
    """Options about the internals of onnxruntime change no result."""
    (expected,) = ortrain.InferenceSession(ortrain.examples.perceptron()).run(None, {"x": X})
    values: dict[str, list[Any]] = {
        "enable_cpu_mem_arena": [False],
        "enable_mem_pattern": [False],
        "enable_mem_reuse": [False, np.False_],
        "execution_mode": [ExecutionMode.ORT_PARALLEL, onnxruntime.ExecutionMode.ORT_PARALLEL],
        "execution_order": [ExecutionOrder.PRIORITY_BASED, onnxruntime.ExecutionOrder.PRIORITY_BASED],
        "graph_optimization_level": [*GraphOptimizationLevel, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC],
        "inter_op_num_threads": [3, np.int64(2)],
        "intra_op_num_threads": [1, 2],
        "log_severity_level": [4],
        "log_verbosity_level": [1],
        "logid": ["mine"],
        "profile_file_prefix": ["elsewhere"],
        "use_deterministic_compute": [True],
    }
    for name, given in values.items():
        for value in given:
            options = SessionOptions()
            setattr(options, name, value)
            kept = getattr(options, name)
            assert kept.name == value.name if isinstance(kept, enum.Enum) else kept == value
            session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
            assert session.get_session_options() is options
            assert session.run(None, {"x": X})[0].tobytes() == expected.tobytes()


def test_names_that_are_no_option() -> None:
    for options, name, meant in (
        (SessionOptions(), "enable_profilling", "; did you mean 'enable_profiling'?"),
        (SessionOptions(), "_config", ""),
        (SessionOptions(), "anything", ""),
        (RunOptions(), "training_modes", "; did you mean 'training_mode'?"),
    ):
        with pytest.raises(
            AttributeError, match=f"{type(options).__name__}.*has no attribute '{name}'{re.escape(meant)}$"
        ):
            setattr(options, name, True)


@pytest.mark.parametrize(
    ("options", "kind"), [(SessionOptions, "session"), (RunOptions, "run")], ids=["session", "run"]
)
def test_entries_of_a_configuration(options: Any, kind: str) -> None:
    made = options()
    add, get = getattr(made, f"add_{kind}_config_entry"), getattr(made, f"get_{kind}_config_entry")
    add("session.disable_prepacking", "0")
    add("session.disable_prepacking", "1")
    assert get("session.disable_prepacking") == "1"
    with pytest.raises(RuntimeError, match=rf"{options.__name__} has no entry 'nothing'"):
        get("nothing")
    for key, value in ((1, "1"), ("key", 1), ("key", None)):
        with pytest.raises(TypeError, match="of an entry must be a str, got"):
            add(key, value)
    # Each object has its own entries.
    with pytest.raises(InvalidArgumentError):
        getattr(options(), f"get_{kind}_config_entry")("session.disable_prepacking")


def test_a_library_of_operators(tmp_path: Path) -> None:
    options = SessionOptions()
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    options.register_custom_ops_library(str(library))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        options.register_custom_ops_library(str(tmp_path / "nowhere.so"))


def test_training_mode_is_for_trainings() -> None:
    session = ortrain.InferenceSession(ortrain.examples.perceptron())
    options = RunOptions()
    (expected,) = session.run(None, {"x": X}, options)
    options.training_mode = False
    assert session.run(None, {"x": X}, options)[0].tobytes() == expected.tobytes()


# Changes of the model.


def test_sizes_by_name() -> None:
    options = SessionOptions()
    options.add_free_dimension_override_by_name("batch", 4)
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    assert [value.shape for value in (*session.get_inputs(), *session.get_outputs())] == [[4, 64], [4, 10]]
    session.run(None, {"x": X})
    with pytest.raises(InvalidArgumentError, match="axis 0 should be 4 but is 3"):
        session.run(None, {"x": X[:3]})
    options.add_free_dimension_override_by_name("batsh", 4)
    near = 'has an axis "batsh", whose size is given; did you mean "batch"?'
    with pytest.raises(InvalidArgumentError, match=re.escape(near)):
        ortrain.InferenceSession(ortrain.examples.perceptron(), options)


def test_sizes_by_denotation() -> None:
    model = perceptron()
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].denotation, dims[1].denotation = "DATA_BATCH", "DATA_FEATURE"
    options = SessionOptions()
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 4)
    options.add_free_dimension_override_by_denotation("DATA_FEATURE", 64)
    session = ortrain.InferenceSession(model, options)
    assert [value.shape for value in (*session.get_inputs(), *session.get_outputs())] == [[4, 64], [4, 10]]
    theirs = onnxruntime.SessionOptions()
    theirs.add_free_dimension_override_by_denotation("DATA_BATCH", 4)
    other = onnxruntime.InferenceSession(model.SerializeToString(), theirs)
    assert [value.shape for value in other.get_inputs()] == [value.shape for value in session.get_inputs()]
    for name, size, sentence in (
        ("DATA_FEATURE", 63, 'the axis with the denotation "DATA_FEATURE" of input "x" is 64, so it cannot be 63'),
        ("DATA_CHANNEL", 3, 'has an axis with the denotation "DATA_CHANNEL", whose size is given'),
    ):
        options = SessionOptions()
        options.add_free_dimension_override_by_denotation(name, size)
        with pytest.raises(InvalidArgumentError, match=re.escape(sentence)):
            ortrain.InferenceSession(model, options)
    options = SessionOptions()
    options.add_free_dimension_override_by_name("batch", 4)
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 5)
    with pytest.raises(InvalidArgumentError, match='axis "batch" of the model is set to two sizes: 4 and 5'):
        ortrain.InferenceSession(model, options)


@pytest.mark.parametrize("by", ["name", "denotation"])
def test_sizes_that_are_none(by: str) -> None:
    add = getattr(SessionOptions(), f"add_free_dimension_override_by_{by}")
    with pytest.raises(InvalidArgumentError, match="the size of an axis must be at least 0, got -1"):
        add("batch", -1)
    for size in ("4", 4.0, None, True):
        with pytest.raises(TypeError, match="the size of an axis must be an integer, got"):
            add("batch", size)
    with pytest.raises(TypeError, match=f"the {by} of an axis must be a str, got 3"):
        add(3, 3)


def value_of(array: Any) -> OrtValue:
    return OrtValue.ortvalue_from_numpy(np.asarray(array, np.float32))


def test_initializers_that_are_replaced() -> None:
    bias = np.arange(10, dtype=np.float32)
    options = SessionOptions()
    options.add_initializer("fc2.weight", value_of(np.zeros((10, 96))))
    options.add_external_initializers(["fc2.bias"], [value_of(bias)])
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.tile(bias, (4, 1)))
    # The last value counts, and later changes of the array have no effect.
    ones = np.ones(10, np.float32)
    options.add_initializer("fc2.bias", OrtValue.ortvalue_from_numpy(ones))
    ones[:] = 5
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    ones[:] = 9
    assert set(session.run(None, {"x": X})[0].flat) == {5}
    for name, value, sentence in (
        ("fc2.bias", np.zeros(9), r'initializer "fc2.bias" is float32\[10\], but the value is float32\[9\]'),
        ("fc2.bia", np.zeros(10), 'has no initializer "fc2.bia"; did you mean "fc2.bias"'),
    ):
        wrong = SessionOptions()
        wrong.add_initializer(name, value_of(value))
        with pytest.raises(InvalidArgumentError, match=sentence):
            ortrain.InferenceSession(ortrain.examples.perceptron(), wrong)
    wrong = SessionOptions()
    wrong.add_initializer("fc2.bias", OrtValue.ortvalue_from_numpy(np.zeros(10)))
    with pytest.raises(InvalidArgumentError, match=r"but the value is float64\[10\]"):
        ortrain.InferenceSession(ortrain.examples.perceptron(), wrong)
    with pytest.raises(InvalidArgumentError, match="expected one value for each initializer, got 2 names and 1 values"):
        wrong.add_external_initializers(["a", "b"], [value_of([1])])
    with pytest.raises(TypeError, match="the value of an initializer must be an OrtValue, got ndarray"):
        wrong.add_initializer("fc2.bias", ones)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of an initializer must be a str, got 3"):
        wrong.add_initializer(3, value_of([1]))  # type: ignore[arg-type]


def test_files_with_old_values_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = perceptron()
    onnx.save_model(model, str(path), save_as_external_data=True, location="weights", size_threshold=0)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in perceptron().graph.initializer}
    (expected,) = ortrain.InferenceSession(path).run(None, {"x": X})
    (tmp_path / "weights").unlink()
    with pytest.raises(ortrain.OrtrainError):
        ortrain.InferenceSession(path)
    options = SessionOptions()
    options.add_external_initializers(list(arrays), [OrtValue.ortvalue_from_numpy(array) for array in arrays.values()])
    (found,) = ortrain.InferenceSession(path, options).run(None, {"x": X})
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("case", ["mlp_adamw_ce", "cnn_bn_adamw_ce", "tiny_transformer_adamw_ce", "lstm_gru_adamw_mse"])
def test_the_model_as_the_session_runs_it(case: str, tmp_path: Path) -> None:
    source, path = RECORDS / case / "forward.onnx", tmp_path / "optimized.onnx"
    options = SessionOptions()
    options.optimized_model_filepath = str(path)
    session = ortrain.InferenceSession(source, options)
    rng = np.random.default_rng(0)
    feed = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else 4 for size in value.shape]
        feed[value.name] = (
            rng.integers(0, 2, shape) if value.type == "tensor(int64)" else rng.standard_normal(shape, np.float32)
        )
    again = ortrain.InferenceSession(path)
    assert [value.name for value in again.get_inputs()] == [value.name for value in session.get_inputs()]
    for found, expected in zip(again.run(None, feed), session.run(None, feed), strict=True):
        assert found.tobytes() == expected.tobytes()
    written, read = onnx.load(path), onnx.load(source)
    onnx.checker.check_model(written)
    assert written.opset_import[0].version == read.opset_import[0].version
    # Every value has its type.
    described = {value.name for value in (*written.graph.value_info, *written.graph.output)}
    assert described >= set(itertools.chain(*(node.output for node in written.graph.node))) - {""}
    results = onnxruntime.InferenceSession(str(path)).run(None, feed)
    for found, expected in zip(results, session.run(None, feed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# Tolerance of float32 sums over a few hundred elements in another order.
TOLERANCE = 1e-4


def test_functions_are_written_out(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "examples" : 1]>
        net (float[n] x, float[1] scale) => (float[n] y) <float[1] scale = {3}> { y = examples.Square (x, scale) }
        <domain: "examples", opset_import: ["" : 17]>
        Square (a, s) => (b) { squared = Mul (a, a) b = Mul (squared, s) }
    """)
    path = tmp_path / "optimized.onnx"
    options = SessionOptions()
    options.optimized_model_filepath = str(path)
    ortrain.InferenceSession(model, options)
    written = onnx.load(path)
    assert not written.functions
    assert [node.op_type for node in written.graph.node] == ["Mul", "Mul"]
    session = ortrain.InferenceSession(path)
    # Initializers that a run may override stay overridable in the written model.
    assert [value.name for value in session.get_overridable_initializers()] == ["scale"]
    x = np.array([2, 3], np.float32)
    assert session.run(None, {"x": x})[0].tolist() == [12, 27]
    assert session.run(None, {"x": x, "scale": np.ones(1, np.float32)})[0].tolist() == [4, 9]
    options.optimized_model_filepath = str(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(ortrain.OrtrainError, match="nowhere"):
        ortrain.InferenceSession(model, options)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("enable_profiling", lambda options: setattr(options, "enable_profiling", True)),
        ("optimized_model_filepath", lambda options: setattr(options, "optimized_model_filepath", "m.onnx")),
        ("add_initializer", lambda options: options.add_initializer("w", value_of([1]))),
        ("add_free_dimension_override_by_name", lambda o: o.add_free_dimension_override_by_name("batch", 1)),
        ("add_free_dimension_override_by_denotation", lambda o: o.add_free_dimension_override_by_denotation("B", 1)),
    ],
)
def test_options_that_a_module_does_not_support(name: str, change: Any) -> None:
    options = SessionOptions()
    change(options)
    state = CheckpointState.load_checkpoint(CASE / "checkpoint")
    with pytest.raises(
        UnsupportedError, match=f"{name} is not supported here: only an InferenceSession has this option"
    ):
        Module(CASE / "training_model.onnx", state, session_options=options)


# Profiles.


@pytest.mark.parametrize("kind", [SessionOptions, onnxruntime.SessionOptions], ids=["ours", "theirs"])
def test_a_profile(kind: Any, tmp_path: Path) -> None:
    options = kind()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    before = time.time_ns()
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    assert before <= session.get_profiling_start_time_ns() <= time.time_ns()
    for rows in (4, 4, 2):
        session.run(None, {"x": X[:rows]})
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    path = session.end_profiling()
    assert re.fullmatch(r"profile_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.json", Path(path).name)
    assert Path(path).parent == tmp_path
    events = json.loads(Path(path).read_text())
    assert isinstance(events, list)
    for event in events:
        assert list(event) == ["cat", "pid", "tid", "dur", "ts", "ph", "name", "args"]
        assert event["ph"] == "X"
        assert event["dur"] >= 0
    runs = [event for event in events if event["cat"] == "Session"]
    assert [event["name"] for event in runs] == ["model_run"] * 4
    products = [event for event in events if event["args"].get("kind") == "MatMul"]
    assert len(products) == 8
    assert products[0]["args"]["flops"] > 0
    assert 'node "fc1" (Gemm)' in products[0]["args"]["node"]
    # Each call is within the time of its run.
    for event in products[:2]:
        assert runs[0]["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= runs[0]["ts"] + runs[0]["dur"] + 1e-3
    assert session.end_profiling() == ""
    session.run(None, {"x": X})
    assert session.end_profiling() == ""


def test_two_profiles_of_one_second(tmp_path: Path) -> None:
    options = SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    sessions = [ortrain.InferenceSession(ortrain.examples.perceptron(), options) for _ in range(3)]
    paths = [session.end_profiling() for session in sessions]
    assert len(set(paths)) == 3
    assert [json.loads(Path(path).read_text()) for path in paths] == [[], [], []]


def test_a_profile_without_a_folder(tmp_path: Path) -> None:
    options = SessionOptions()
    folder = tmp_path / "later"
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    session.run(None, {"x": X})
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*later for the profile"):
        session.end_profiling()
    # The profile is not lost.
    folder.mkdir()
    assert "model_run" in Path(session.end_profiling()).read_text()


def test_no_profile() -> None:
    session = ortrain.InferenceSession(ortrain.examples.perceptron())
    assert session.get_profiling_start_time_ns() == 0
    assert session.end_profiling() == ""


def test_a_profile_changes_no_bit() -> None:
    options = SessionOptions()
    options.enable_profiling = True
    found = ortrain.InferenceSession(CASE / "forward.onnx", options).run(None, {"x": X[:, :10]})
    expected = ortrain.InferenceSession(CASE / "forward.onnx").run(None, {"x": X[:, :10]})
    assert found[0].tobytes() == expected[0].tobytes()


# Providers.


def session_on(*arguments: Any) -> ortrain.InferenceSession:
    return ortrain.InferenceSession(ortrain.examples.perceptron(), None, *arguments)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {"CPUExecutionProvider": {}}),
        ((None,), {"CPUExecutionProvider": {}}),
        (([],), {"CPUExecutionProvider": {}}),
        ((["reference"],), {"reference": {}}),
        ((("reference", "CPUExecutionProvider"),), {"reference": {}, "CPUExecutionProvider": {}}),
        (([("CPUExecutionProvider", {"arena": 1, 2: True})],), {"CPUExecutionProvider": {"arena": "1", "2": "True"}}),
        ((["CPUExecutionProvider"], [{"a": None}]), {"CPUExecutionProvider": {"a": "None"}}),
    ],
)
def test_providers(arguments: Any, options: dict[str, dict[str, str]]) -> None:
    session = session_on(*arguments)
    assert session.get_providers() == list(options)
    assert session.get_provider_options() == options
    other = session_on()
    other.set_providers(*arguments)
    assert other.get_provider_options() == options
    np.testing.assert_allclose(
        other.run(None, {"x": X})[0], session.run(None, {"x": X})[0], rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("CPUExecutionProvider",), "providers must be a list of names, got 'CPUExecutionProvider'"),
        (({"CPUExecutionProvider"},), "providers must be a list of names, got {'CPUExecutionProvider'}"),
        ((3,), "providers must be a list of names, got 3"),
        ((["CPUExecutionProvider"], {}), "provider_options must be a list of dicts, got {}"),
        ((["CPUExecutionProvider"], [{}, {}]), "expected 1 dicts in provider_options, one for each provider, got 2"),
        (([("CPUExecutionProvider", {})], [{}]), "providers must be names if provider_options is given, got"),
        ((["CPUExecutionProvider"], ["a"]), "the options of provider 'CPUExecutionProvider' must be a dict, got 'a'"),
        (([3],), "a provider must be a name, or a pair of a name and a dict, got 3"),
        (([("CPUExecutionProvider",)],), "a provider must be a name, or a pair of a name and a dict, got"),
        (([("CPUExecutionProvider", "a")],), "a provider must be a name, or a pair of a name and a dict, got"),
        (([["CPUExecutionProvider", {}]],), "a provider must be a name, or a pair of a name and a dict, got"),
    ],
)
def test_invalid_providers(arguments: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        session_on(*arguments)
    session = session_on()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        session.set_providers(*arguments)
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_a_provider_that_is_not_here() -> None:
    with pytest.raises(UnsupportedError, match="unknown provider 'ROCMExecutionProvider'; expected one of"):
        session_on(["ROCMExecutionProvider", "CPUExecutionProvider"])
    session = session_on()
    with pytest.raises(RuntimeError, match="unknown provider 'ROCMExecutionProvider'; expected one of"):
        session.set_providers(["ROCMExecutionProvider"])
    assert session.run(None, {"x": X})[0].shape == (4, 10)
    with pytest.warns(UserWarning, match="provider 'reference' is named twice; the second entry is ignored"):
        session = session_on([("reference", {"a": 1}), "reference"])
    assert session.get_provider_options() == {"reference": {"a": "1"}}


def test_a_precision_goes_along() -> None:
    options = SessionOptions()
    options.precision, options.bf16_fallback = "bf16", "emulated"
    session = ortrain.InferenceSession(ortrain.examples.perceptron(), options)
    (expected,) = session.run(None, {"x": X})
    session.set_providers(["reference"])
    session.set_providers()
    assert session.precision == "bf16"
    assert session.run(None, {"x": X})[0].tobytes() == expected.tobytes()


def test_options_of_other_devices() -> None:
    session = session_on()
    assert session._enable_fallback
    session.disable_fallback()
    assert not session._enable_fallback
    session.enable_fallback()
    assert session._enable_fallback
    assert session.get_tuning_results() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.set_tuning_results([])
        session.set_tuning_results([{"ep": "ROCMExecutionProvider"}])
    with pytest.raises(InvalidArgumentError, match="kernels of the CPU are not tuned"):
        session.set_tuning_results([{"ep": "ROCMExecutionProvider"}], error_on_invalid=True)
    theirs = onnxruntime.SessionOptions()
    assert ortrain.InferenceSession(ortrain.examples.perceptron(), theirs).get_session_options() is theirs


def test_a_session_of_another_kind() -> None:
    """A subclass that overrides the access to the native object inherits everything else."""

    class Doubled(ortrain.InferenceSession):
        def _run_native(self, feeds: Any, wanted: Any, run_options: Any, restricted: bool) -> Any:
            found = super()._run_native(feeds, wanted, run_options, restricted)
            return [OrtValue.ortvalue_from_numpy(2 * value.numpy())._ortvalue for value in found]

        def _described_outputs(self) -> Any:
            return [
                _ortrain.ValueDescription(output.name, output.type, [*output.shape])
                for output in super()._described_outputs()
            ]

    session, plain = Doubled(ortrain.examples.perceptron()), session_on()
    (expected,) = plain.run(None, {"x": X})
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * expected)
    (value,) = session.run_with_ort_values(None, {"x": OrtValue.ortvalue_from_numpy(X)})
    np.testing.assert_array_equal(value.numpy(), 2 * expected)
    assert repr(session).startswith("Doubled(inputs=")
