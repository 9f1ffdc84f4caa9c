"""The transcript of a user's session with TrainingSession: transcript.py onnxruntime | ortrain.

Prints keys, shapes, types and outcomes, one per line, and no number that depends on the order of rounding. The same
lines come from onnxruntime-training 1.15.0 and from ortrain through ``ortrain.compat.install()``. Cases that the
release gets wrong, and cases that it cannot run on a CPU, are not here.

`build/classic-oracle/venv/bin/python tests/classic_oracle/transcript.py onnxruntime` prints the record in
tests/data/classic/transcript-1.15.0.txt.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if sys.argv[1:] == ["ortrain"]:
    import ortrain.compat

    ortrain.compat.install()
elif sys.argv[1:] != ["onnxruntime"]:
    sys.exit(__doc__)

import onnxruntime
from onnxruntime.capi import _pybind_state as extension
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidProtobuf, NoSuchFile

# The exceptions, with the names that scripts import.
CODED = {Fail: "Fail", InvalidArgument: "InvalidArgument", InvalidProtobuf: "InvalidProtobuf", NoSuchFile: "NoSuchFile"}
CPU = ["CPUExecutionProvider"]
SGD, ADAM = "SGDOptimizer", "AdamOptimizer"
RATE, NORM = "Learning_Rate", "global_gradient_norm"
# Tolerance of equal losses: float32 sums in another order.
SAME = 1e-5
# Every column of a trace with fixed contents.
COLUMNS = ["args", "cat", "dur", "name", "ph", "pid", "tid", "ts"]
# Properties of the parameters and of both kinds of options, and the methods of the options.
PARAMETERS = """
    allreduce_post_accumulation attn_dropout_recompute data_parallel_size deepspeed_zero_stage enable_adasum
    enable_grad_norm_clip gelu_recompute gradient_accumulation_steps horizontal_parallel_size immutable_weights
    loss_output_name loss_scale lr_params_feed_name model_after_graph_transforms_path model_with_gradient_graph_path
    model_with_training_graph_path num_pipeline_micro_batches number_recompute_layers optimizer_attributes_map
    optimizer_int_attributes_map pipeline_cut_info_string pipeline_parallel_size propagate_cast_ops_allow
    propagate_cast_ops_level set_gradients_as_graph_outputs sliced_axes sliced_schema sliced_tensor_names
    training_optimizer_name transformer_layer_recompute use_fp16_moments use_memory_efficient_gradient
    use_mixed_precision weights_not_to_train weights_to_train world_rank world_size
"""
SESSION_OPTIONS = """
    enable_cpu_mem_arena enable_mem_pattern enable_mem_reuse enable_profiling execution_mode execution_order
    graph_optimization_level inter_op_num_threads intra_op_num_threads log_severity_level log_verbosity_level logid
    optimized_model_filepath profile_file_prefix use_deterministic_compute add_external_initializers
    add_free_dimension_override_by_denotation add_free_dimension_override_by_name add_initializer
    add_session_config_entry get_session_config_entry register_custom_ops_library
"""
RUN_OPTIONS = """
    log_severity_level log_verbosity_level logid only_execute_path_to_fetches terminate training_mode
    add_run_config_entry get_run_config_entry
"""
Arrays = dict[str, np.ndarray]


def say(title: str, value: object = "") -> None:
    print(f"{title}: {value}" if value != "" else title)


def chapter(title: str) -> None:
    print(f"\n== {title}")


def kind(array: np.ndarray) -> str:
    return f"{array.dtype.name} {tuple(array.shape)}"


def refused(title: str, wanted: type[BaseException], call: Callable[[], object], *names: str) -> None:
    """Print the class that catches an error, the beginning of a message with a code, and the names in the message."""
    try:
        call()
    except Exception as error:
        message = str(error)
        caught = wanted if isinstance(error, wanted) else type(error)
        code = re.match(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", message)
        begins = f" {code[0].rstrip(' :')}" if code and caught in CODED else ""
        named = ", ".join(name for name in names if name in message)
        print(f"{title}: {CODED.get(caught, caught.__name__)}{begins}{f' names {named}' if named else ''}")
    else:
        print(f"{title}: no error")


def warned(title: str, call: Callable[[], object]) -> None:
    """Print the distinct classes of a call's warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call()
            outcome = "made"
        except Exception as error:
            outcome = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
    say(title, f"{sorted({warning.category.__name__ for warning in found})} {outcome}")


# Models.


def tensor(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes: list[onnx.NodeProto],
    weights: Arrays,
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> bytes:
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "transcript", inputs, outputs, initializers)
    model = helper.make_model(graph, producer_name="transcript", opset_imports=[helper.make_opsetid("", 14)])
    model.ir_version = 8
    return bytes(model.SerializeToString())


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


node = helper.make_node
WEIGHTS = {"W1": drawn(4, 12, seed=1), "B1": drawn(12, seed=2), "W2": drawn(12, 3, seed=3)}
FEEDS = {"X": drawn(5, 4, seed=4), "label": drawn(5, 3, seed=5), RATE: np.asarray([0.01], np.float32)}


def network(ratio: float | None = None) -> bytes:
    """Return two layers and a mean squared error; with a ratio, Dropout in training mode between them."""
    dropout = [node("Dropout", ["active", "ratio", "training"], ["dropped", "mask"], name="drop")]
    nodes = [
        node("Gemm", ["X", "W1", "B1"], ["hidden"]),
        node("Relu", ["hidden"], ["active"]),
        *(dropout if ratio is not None else []),
        node("MatMul", ["active" if ratio is None else "dropped", "W2"], ["pred"]),
        node("Sub", ["pred", "label"], ["difference"]),
        node("Mul", ["difference", "difference"], ["square"]),
        node("ReduceMean", ["square"], ["loss"], keepdims=0),
    ]
    extra = {} if ratio is None else {"ratio": np.asarray(ratio, np.float32), "training": np.asarray(True)}
    inputs, outputs = [tensor("X", "N", 4), tensor("label", "N", 3)], [tensor("loss"), tensor("pred", "N", 3)]
    return model_of(nodes, WEIGHTS | extra, inputs, outputs)


NETWORK = network()


def scaled() -> bytes:
    """Return a product with a constant, and a loss that is no output of the graph."""
    nodes = [
        node("MatMul", ["X", "W"], ["product"]),
        node("Mul", ["product", "two"], ["twice"]),
        node("ReduceSum", ["twice"], ["inner"], keepdims=0),
        node("Neg", ["inner"], ["outer"]),
    ]
    weights = {"W": drawn(4, 3, seed=6), "two": np.asarray(2, np.float32)}
    return model_of(nodes, weights, [tensor("X", "N", 4)], [tensor("outer"), tensor("twice", "N", 3)])


def without_gradient() -> bytes:
    nodes = [
        node("MatMul", ["X", "W"], ["product"]),
        node("Det", ["product"], ["determinant"]),
        node("ReduceSum", ["determinant"], ["loss"], keepdims=0),
    ]
    return model_of(nodes, {"W": drawn(4, 4, seed=7)}, [tensor("X", 2, 4, 4)], [tensor("loss")])


def unreachable() -> bytes:
    nodes = [
        node("MatMul", ["X", "W"], ["product"]),
        node("ReduceSum", ["product"], ["loss"], keepdims=0),
        node("MatMul", ["X", "U"], ["beside"]),
    ]
    weights = {"W": drawn(4, 3, seed=8), "U": drawn(4, 3, seed=9)}
    return model_of(nodes, weights, [tensor("X", "N", 4)], [tensor("loss"), tensor("beside", "N", 3)])


# Sessions.


def parameters_of(optimizer: str = ADAM, weights: tuple[str, ...] = tuple(WEIGHTS), **changes: Any) -> Any:
    parameters = onnxruntime.TrainingParameters()
    parameters.loss_output_name = "loss"
    parameters.weights_to_train = set(weights)
    parameters.training_optimizer_name = optimizer
    # Without clipping, because the release ignores clipping on a CPU.
    parameters.enable_grad_norm_clip = False
    parameters.optimizer_attributes_map = {name: {} for name in weights}
    parameters.optimizer_int_attributes_map = {name: {} for name in weights}
    for name, value in changes.items():
        setattr(parameters, name, value)
    return parameters


def options_of() -> Any:
    """Return options for the weights of the release's state and for the order of the graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    return options


def session_of(parameters: Any = None, model: str | bytes = NETWORK, **arguments: Any) -> Any:
    arguments = {"sess_options": options_of(), "providers": CPU} | arguments
    return onnxruntime.TrainingSession(model, parameters or parameters_of(), **arguments)


def session_or_none(parameters: Any) -> Any:
    """Return a session, or print the class of its error and return None."""
    try:
        return session_of(parameters)
    except Exception as error:
        say("refused", CODED.get(type(error), type(error).__name__))
        return None


def run_options(**changes: Any) -> Any:
    options = onnxruntime.RunOptions()
    for name, value in changes.items():
        setattr(options, name, value)
    return options


def same(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Return true if keys, types and bits are equal."""
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype
        and value.shape == second[name].shape
        and value.tobytes() == second[name].tobytes()
        for name, value in first.items()
    )


def describe(session: Any) -> None:
    """Print inputs, outputs and every state of a session."""
    for meta in session.get_inputs():
        say("input", meta)
    # Gradients may have any order, but follow each other.
    gradients = sorted(str(meta) for meta in session.get_outputs() if meta.name.endswith("_grad"))
    for meta in session.get_outputs():
        say("output", gradients.pop(0) if meta.name.endswith("_grad") else meta)
    say("loss_scale_input_name", session.loss_scale_input_name)
    for name, array in session.get_state().items():
        say(f"state {name}", kind(array))
    for flag in (False, True):
        for part, arrays in sorted(session.get_model_state(include_mixed_precision_weights=flag).items()):
            found = {name: kind(array) for name, array in sorted(arrays.items())}
            say(f"model state, flag {flag}, {part}", found or "nothing")
    nested = session.get_optimizer_state()
    for weight, arrays in sorted(nested.items()):
        say(f"optimizer state {weight}", {part: kind(array) for part, array in sorted(arrays.items())})
    if not nested:
        say("optimizer state", nested)
    say("partitions", session.get_partition_info_map())


def started(session: Any) -> None:
    """Print facts about the initial values of states."""
    state = session.get_state()
    say("weights are the model's", all(np.array_equal(state[name], value) for name, value in WEIGHTS.items()))
    say("moments are zero", not any(value.any() for name, value in state.items() if name.startswith("Moment_")))
    say("counts", [value.tolist() for name, value in state.items() if name.startswith("Update_Count_")])


def parameters() -> None:
    chapter("TrainingParameters")
    plain = onnxruntime.TrainingParameters()
    names = PARAMETERS.split()
    for name in names:
        say(name, repr(getattr(plain, name)))
    plain.weights_to_train = {"a"}
    plain.weights_to_train.add("b")
    plain.optimizer_attributes_map["a"] = {}
    say("a getter gives a copy", [plain.weights_to_train, plain.optimizer_attributes_map])
    plain.optimizer_attributes_map = {"a": {"alpha": 1}}
    say("an integer is a float", plain.optimizer_attributes_map)
    wrong: dict[type, object] = {str: 3, bool: "x", int: 1.5, float: "x", set: ["a"], dict: 3, list: 3}
    for name in names:
        value = wrong[type(getattr(plain, name))]
        refused(f"{name} = {value!r}", TypeError, lambda name=name, value=value: setattr(plain, name, value))
    for name, value in (
        ("weights_to_train", {3}),
        ("optimizer_attributes_map", {"a": 3}),
        ("optimizer_attributes_map", {"a": {"alpha": "x"}}),
        ("optimizer_int_attributes_map", {"a": {"weight_decay_mode": 1.5}}),
        ("immutable_weights", {"Mul": [(1, "x")]}),
        ("sliced_axes", {"a": "b"}),
        ("sliced_tensor_names", "abc"),
        ("gradient_accumulation_steps", "x"),
    ):
        refused(f"{name} = {value!r}", TypeError, lambda name=name, value=value: setattr(plain, name, value))
    refused("a property that is not there", AttributeError, lambda: setattr(plain, "nowhere", 3))
    refused("an argument", TypeError, lambda: onnxruntime.TrainingParameters(3))
    refused("an initial state that is no dict", TypeError, lambda: plain.set_optimizer_initial_state(3))


def sessions() -> None:
    settings = {"alpha": 0.8, "beta": 0.98, "lambda": 0.01, "epsilon": 1e-3, "max_norm_clip": 2.0}
    switches = {"weight_decay_mode": 1, "do_bias_correction": 0}
    adam: dict[str, Any] = {
        "optimizer_attributes_map": dict.fromkeys(WEIGHTS, settings),
        "optimizer_int_attributes_map": dict.fromkeys(WEIGHTS, switches),
    }
    for title, given in (
        ("SGD", parameters_of(SGD)),
        ("SGD with a norm", parameters_of(SGD, enable_grad_norm_clip=True)),
        (
            "SGD, an attribute that it does not have",
            parameters_of(SGD, optimizer_attributes_map={name: {"foo": 1.0} for name in WEIGHTS}),
        ),
        ("Adam with settings", parameters_of(**adam)),
        ("Adam with a norm", parameters_of(enable_grad_norm_clip=True)),
        ("Adam, gradients as outputs", parameters_of(enable_grad_norm_clip=True, set_gradients_as_graph_outputs=True)),
        ("no optimizer, gradients as outputs", parameters_of("", set_gradients_as_graph_outputs=True)),
        ("another name of the rate", parameters_of(SGD, lr_params_feed_name="rate")),
        ("a weight that is not trained", parameters_of(weights_not_to_train={"W1"})),
        ("a weight that no node reads", parameters_of(SGD, (*WEIGHTS, "nowhere"))),
    ):
        chapter(title)
        session = session_or_none(given)
        if session is not None:
            describe(session)

    chapter("weights that are chosen, none of them named")
    chosen = parameters_of(
        SGD,
        (),
        optimizer_attributes_map={name: {} for name in WEIGHTS},
        optimizer_int_attributes_map={name: {} for name in WEIGHTS},
    )
    describe(session_of(chosen))

    chapter("a constant that is not trained, and a loss that is no output")
    maps = {"W": {}}
    immutable = parameters_of(
        SGD,
        (),
        loss_output_name="inner",
        immutable_weights={"Mul": [(1, 2.0)]},
        optimizer_attributes_map=maps,
        optimizer_int_attributes_map=maps,
    )
    describe(session_of(immutable, scaled()))

    chapter("a weight that is an input, too")
    listed = onnx.load_model_from_string(NETWORK)
    listed.graph.input.append(tensor("W1", 4, 12))
    describe(session_of(model=listed.SerializeToString()))

    chapter("moments in half precision")
    session = session_or_none(parameters_of(use_fp16_moments=True))
    if session is not None:
        for name, array in session.get_state().items():
            say(f"state {name}", kind(array))

    chapter("values before the first run, and counts after two")
    session = session_of()
    started(session)
    for _ in range(2):
        session.run(None, FEEDS)
    state = session.get_state()
    say("counts", [value.tolist() for name, value in state.items() if name.startswith("Update_Count_")])
    nested = session.get_optimizer_state()
    say(
        "both states hold the same",
        all(same(parts, {part: state[f"{part}_{weight}"] for part in parts}) for weight, parts in nested.items()),
    )
    say(
        "the state of the model holds the same",
        same(session.get_model_state()["full_precision"], {name: state[name] for name in WEIGHTS}),
    )
    say("arrays can be written", all(array.flags.writeable for array in state.values()))
    kept = {name: array.copy() for name, array in state.items()}
    for array in state.values():
        array[...] = 7
    say("arrays are copies", same(session.get_state(), kept))
    state = session.get_state()
    kept = {name: array.copy() for name, array in state.items()}
    session.run(None, FEEDS)
    say("later runs leave them", same(state, kept))

    chapter("the session as a class")
    say("is an InferenceSession", isinstance(session, onnxruntime.InferenceSession))
    say(
        "the classes are one",
        onnxruntime.TrainingSession
        is __import__("onnxruntime.capi.training", fromlist=["TrainingSession"]).TrainingSession,
    )
    say("profile without profiling", repr(session.end_profiling()))
    say("start of profiling", session.get_profiling_start_time_ns())
    say("tuning results", session.get_tuning_results())
    session.disable_fallback()
    say("fallback", session._enable_fallback)
    session.enable_fallback()
    say("fallback", session._enable_fallback)


def loading_with(session: Any, whole: Arrays, strict: bool) -> None:
    """Print the rows of load_state, strict or not."""
    word, weight = f"strict {strict}, ", whole["W1"]

    def load(state: Any) -> object:
        return session.load_state(state, strict)

    say(f"{word}nothing", load({}))
    say(f"{word}a part", load({"W1": weight, "Update_Count_W2": np.asarray([5], np.int64)}))
    state = session.get_state()
    say("  loaded", [np.array_equal(state["W1"], weight), state["Update_Count_W2"].tolist()])
    for title, part in (
        ("unknown", {"nowhere": weight}),
        ("a constant", {"loss_grad": np.asarray(1, np.float32)}),
        ("an input", {"X": FEEDS["X"]}),
    ):
        before = session.get_state()
        refused(f"{word}{title}", RuntimeError, lambda part=part: load(part), *part)
        say("  unchanged", same(session.get_state(), before))
    refused(f"{word}another number of elements", RuntimeError, lambda: load({"W1": weight[:2]}))
    refused(f"{word}another type and size", RuntimeError, lambda: load({"W1": weight.astype(np.float64)}))
    refused(f"{word}no array", RuntimeError, lambda: load({"W1": None}))
    refused(f"{word}no dict", TypeError, lambda: load([1]))
    refused(f"{word}a key that is no name", TypeError, lambda: load({3: weight}))
    say(f"{word}the whole state", load(whole))
    say("  is that one", same(session.get_state(), whole))


def loading() -> None:
    chapter("load_state")
    session = session_of()
    session.run(None, FEEDS)
    first = session.get_state()
    session.run(None, FEEDS)
    later = session.get_state()
    say("returns", session.load_state(first, strict=True))
    say("the state is that one", same(session.get_state(), first))
    session.run(None, FEEDS)
    say("goes on as it did", same(session.get_state(), later))
    weight = first["W1"]
    for strict in (False, True):
        loading_with(session, first, strict)
    before = session.get_state()
    refused(
        "strict, a known key and an unknown one",
        RuntimeError,
        lambda: session.load_state({"W1": weight + 1, "nowhere": weight}, True),
    )
    say("  unchanged", same(session.get_state(), before))
    passed = weight + 1
    session.load_state({"W1": passed})
    passed[...] = 0
    say("values are copied in", np.array_equal(session.get_state()["W1"], weight + 1))
    transposed = np.asfortranarray(weight)
    session.load_state({"W1": transposed})
    say("an array in Fortran's order", np.array_equal(session.get_state()["W1"], weight))

    chapter("set_optimizer_initial_state")
    session = session_of()
    for _ in range(2):
        session.run(None, FEEDS)
    nested = session.get_optimizer_state()
    made = parameters_of()
    say("returns", made.set_optimizer_initial_state(nested))
    again = session_of(made)
    say("the same state", all(same(parts, nested[weight]) for weight, parts in again.get_optimizer_state().items()))
    say("weights are the model's", same(again.get_model_state()["full_precision"], WEIGHTS))
    some = parameters_of()
    moment = np.full((4, 12), 0.5, np.float32)
    some.set_optimizer_initial_state({"W1": {"Moment_1": moment}})
    state = session_of(some).get_state()
    say(
        "a part",
        [
            bool((state["Moment_1_W1"] == 0.5).all()),
            bool(state["Moment_2_W1"].any()),
            state["Update_Count_W1"].tolist(),
            bool(state["Moment_1_W2"].any()),
        ],
    )
    for title, part, value in (
        ("another shape", "Moment_1", np.zeros((2, 2), np.float32)),
        ("another shape of as many elements", "Moment_1", np.zeros((12, 4), np.float32)),
        ("another type", "Moment_1", np.zeros((4, 12), np.float64)),
        ("another type of the count", "Update_Count", np.zeros(1, np.int32)),
    ):
        wrong_parameters = parameters_of()

        def make(wrong_parameters: Any = wrong_parameters, part: str = part, value: np.ndarray = value) -> None:
            wrong_parameters.set_optimizer_initial_state({"W1": {part: value}})
            session_of(wrong_parameters)

        refused(title, RuntimeError, make)


def types() -> None:
    chapter("is_output_fp32_node")
    session = session_of(parameters_of(enable_grad_norm_clip=True))
    for name in (
        "loss",
        "pred",
        "difference",
        "W1_grad",
        "Moment_1_W1_Out",
        "Moment_2_W1_Out",
        "W1_Adam_out",
        NORM,
        "W1_grad_Step_Out",
    ):
        say(name, session.is_output_fp32_node(name))
    for name in ("X", "W1", RATE, "Update_Count_W1", "nowhere"):
        refused(name, RuntimeError, lambda name=name: session.is_output_fp32_node(name), name)
    refused("no name", TypeError, lambda: session.is_output_fp32_node(3))
    say("of SGD", session_of(parameters_of(SGD)).is_output_fp32_node("W1_SGD_out"))


def constructing() -> None:
    chapter("errors of the constructor")
    for model in (None, 3, onnx.load_model_from_string(NETWORK), bytearray(NETWORK)):
        refused(f"a model that is {type(model).__name__}", TypeError, lambda model=model: session_of(model=model))
    refused("no parameters", TypeError, lambda: onnxruntime.TrainingSession(NETWORK, {}, options_of(), CPU))
    refused("no options", TypeError, lambda: session_of(sess_options={"a": 1}))
    say("options may be missing", len(session_of(sess_options=None).get_inputs()))
    for providers in (3, [3], [(CPU[0],)], [(CPU[0], 3)]):
        refused(f"providers {providers}", ValueError, lambda providers=providers: session_of(providers=providers))
    for providers, settings in ((CPU, 3), (CPU, [{}, {}]), ([(CPU[0], {})], [{}]), (CPU, [3])):
        refused(
            f"providers {providers} with {settings}",
            ValueError,
            lambda providers=providers, settings=settings: session_of(providers=providers, provider_options=settings),
        )
    for providers in (["Nowhere"], CPU * 2, tuple(CPU), []):
        warned(f"providers {providers}", lambda providers=providers: session_of(providers=providers))
    refused("a file that is not there", NoSuchFile, lambda: session_of(model="nowhere.onnx"), "nowhere.onnx")
    refused("bytes that are no model", InvalidProtobuf, lambda: session_of(model=b"no model"))
    refused("no bytes", InvalidArgument, lambda: session_of(model=b""))
    for name in ("", "nowhere"):
        refused(
            f"the loss {name!r}",
            RuntimeError,
            lambda name=name: session_of(parameters_of(loss_output_name=name)),
            name or "''",
            "pred",
        )
    missing = {"W1": {}, "B1": {}}
    whole = {name: {} for name in WEIGHTS}
    refused("no settings of a weight", Fail, lambda: session_of(parameters_of(optimizer_attributes_map=missing)), "W2")
    refused(
        "no switches of a weight", Fail, lambda: session_of(parameters_of(optimizer_int_attributes_map=missing)), "W2"
    )
    refused(
        "no settings of a weight that is chosen",
        Fail,
        lambda: session_of(
            parameters_of(ADAM, (), optimizer_attributes_map=missing, optimizer_int_attributes_map=whole)
        ),
        "W2",
    )
    refused("an optimizer that is not there", Fail, lambda: session_of(parameters_of("Nowhere")), "Nowhere")
    refused(
        "an operator without gradient",
        RuntimeError,
        lambda: session_of(parameters_of(SGD, ("W",)), without_gradient()),
        "Det",
    )
    refused(
        "a weight that the loss does not reach",
        InvalidArgument,
        lambda: session_of(parameters_of(SGD, ("W", "U")), unreachable()),
        "U",
    )
    for name in ("data_parallel_size", "horizontal_parallel_size", "pipeline_parallel_size"):
        refused(f"{name} = 2", RuntimeError, lambda name=name: session_of(parameters_of(**{name: 2})), name, "2", "1")


def running() -> None:
    chapter("run")
    session = session_of(parameters_of(enable_grad_norm_clip=True))
    for title, outputs in (
        ("all", None),
        ("none named", []),
        ("in another order", ["pred", "loss"]),
        ("one twice", ["loss", "loss"]),
    ):
        say(title, [kind(array) for array in session.run(outputs, FEEDS)])

    def run(outputs: Any = None, **changes: Any) -> object:
        return session.run(outputs, FEEDS | changes)

    before = session.get_state()
    refused("inputs that are missing", ValueError, lambda: session.run(None, {"X": FEEDS["X"]}), "label", RATE, "X")
    refused("an unknown input", InvalidArgument, lambda: run(nowhere=FEEDS["X"]), "nowhere")
    refused("a weight as an input", InvalidArgument, lambda: run(W1=WEIGHTS["W1"]), "W1")
    refused("an unknown output", InvalidArgument, lambda: run(["nowhere"]), "nowhere")
    refused("a value inside as an output", InvalidArgument, lambda: run(["hidden"]), "hidden")
    refused(
        "another type", InvalidArgument, lambda: run(X=FEEDS["X"].astype(np.float64)), "tensor(double)", "tensor(float)"
    )
    refused("integers", InvalidArgument, lambda: run(X=FEEDS["X"].astype(np.int64)), "tensor(int64)", "tensor(float)")
    refused("another rank", InvalidArgument, lambda: run(X=FEEDS["X"][0]), "X", "1", "2")
    refused("another size", InvalidArgument, lambda: run(X=np.zeros((5, 3), np.float32)), "X", "3", "4")
    refused("a rate without a shape", InvalidArgument, lambda: run(**{RATE: np.asarray(0.1, np.float32)}), RATE)
    refused("two rates", InvalidArgument, lambda: run(**{RATE: np.asarray([0.1, 0.1], np.float32)}), RATE)
    refused("outputs that are no list", TypeError, lambda: run("loss"))
    refused("options that are none", TypeError, lambda: session.run(None, FEEDS, 3))
    say("nothing changed", same(session.get_state(), before))
    say("lists", len(session.run(None, FEEDS | {"X": FEEDS["X"].tolist(), RATE: [0.01]})))
    say("an array in Fortran's order", len(run(X=np.asfortranarray(FEEDS["X"]))))

    chapter("run_with_ort_values")
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in FEEDS.items()}
    for value in session.run_with_ort_values(None, values):
        say(type(value).__name__, [value.shape(), value.data_type(), value.device_name(), value.is_tensor()])
    refused(
        "inputs that are missing",
        ValueError,
        lambda: session.run_with_ort_values(None, {"X": values["X"]}),
        "label",
        RATE,
    )
    refused(
        "an unknown input",
        InvalidArgument,
        lambda: session.run_with_ort_values(None, values | {"nowhere": values["X"]}),
        "nowhere",
    )

    chapter("run_with_ortvaluevector")
    device = extension.OrtDevice(extension.OrtDevice.cpu(), extension.OrtDevice.default_memory(), 0)
    passed, fetched = extension.OrtValueVector(), extension.OrtValueVector()
    for array in FEEDS.values():
        passed.push_back(extension.OrtValue.ortvalue_from_numpy(array, device))
    before = session.get_state()
    devices = [device, device]
    say(
        "returns",
        session.run_with_ortvaluevector(run_options(), list(FEEDS), passed, ["pred", "loss"], fetched, devices),
    )
    say("fetches", [kind(value.numpy()) for value in fetched])
    say("the weights", "unchanged" if same(session.get_state(), before) else "trained")

    chapter("what a run trains")
    for title, outputs, options in (
        ("all outputs", None, None),
        ("a prediction alone", ["pred"], None),
        ("the path to a prediction", ["pred"], run_options(only_execute_path_to_fetches=True)),
        ("the path to the norm", [NORM], run_options(only_execute_path_to_fetches=True)),
    ):
        before = session.get_state()
        session.run(outputs, FEEDS, options)
        say(title, "unchanged" if same(session.get_state(), before) else "trained")
    gradients = session_of(parameters_of("", set_gradients_as_graph_outputs=True))
    plain = {name: value for name, value in FEEDS.items() if name != RATE}
    before = gradients.get_state()
    found = dict(zip([meta.name for meta in gradients.get_outputs()], gradients.run(None, plain), strict=True))
    say("no optimizer", "unchanged" if same(gradients.get_state(), before) else "trained")
    say("shapes of gradients", {name: kind(array) for name, array in sorted(found.items()) if name.endswith("_grad")})
    session = session_of(parameters_of(SGD))
    session.run(None, FEEDS | {RATE: np.asarray([1.0], np.float32)})
    after = session.get_state()
    say(
        "a step of SGD",
        all(np.allclose(after[name], WEIGHTS[name] - found[f"{name}_grad"], rtol=0, atol=SAME) for name in WEIGHTS),
    )
    with_norm = session_of(parameters_of(SGD, enable_grad_norm_clip=True))
    (norm,) = with_norm.run([NORM], FEEDS)
    together = np.sqrt(
        sum(float(np.square(array, dtype=np.float64).sum()) for name, array in found.items() if name.endswith("_grad"))
    )
    say("the norm is of all gradients", abs(float(norm) / together - 1) < SAME)
    session = session_of(parameters_of(SGD))
    losses = [float(session.run(["loss"], FEEDS | {RATE: np.asarray([1e4], np.float32)})[0]) for _ in range(12)]
    say("a rate that is too large: the last loss is finite", bool(np.isfinite(losses[-1])))
    say("  the state can be read", [kind(array) for array in session.get_state().values()])


def evaluating() -> None:
    chapter("a rate of zero")
    for optimizer in (SGD, ADAM):
        session = session_of(parameters_of(optimizer))
        session.run(None, FEEDS)
        before = session.get_state()
        for _ in range(3):
            session.run(None, FEEDS | {RATE: np.zeros(1, np.float32)})
        after = session.get_state()
        say(
            f"{optimizer}, weights keep their bits",
            all(after[name].tobytes() == before[name].tobytes() for name in WEIGHTS),
        )
        counts = {name: value.tolist() for name, value in after.items() if name.startswith("Update_Count_")}
        say("  counts", counts)
        say(
            "  moments go on",
            {
                name: not np.array_equal(value, before[name])
                for name, value in after.items()
                if name.startswith("Moment_")
            },
        )


def binding() -> None:
    chapter("IOBinding")
    session, twin = session_of(), session_of()
    bound = session.io_binding()
    say("class", type(bound).__name__)
    held = {name: array.copy() for name, array in FEEDS.items()}
    for name, array in held.items():
        bound.bind_cpu_input(name, array)
    bound.bind_output("loss")
    before = session.get_state()
    session.run_with_iobinding(bound)
    say("with the loss alone", "unchanged" if same(session.get_state(), before) else "trained")
    (loss,) = bound.copy_outputs_to_cpu()
    (expected,) = twin.run(["loss"], FEEDS)
    say("the loss", [kind(loss), bool(abs(loss / expected - 1) < SAME)])
    say("outputs", [type(value).__name__ for value in bound.get_outputs()])
    for turn in (1, 2):
        other = FEEDS["X"] * (turn + 1)
        held[f"X of turn {turn}"] = other
        bound.bind_cpu_input("X", other)
        session.run_with_iobinding(bound)
        (expected,) = twin.run(["loss"], FEEDS | {"X": other})
        say(f"another input, turn {turn}", bool(abs(bound.copy_outputs_to_cpu()[0] / expected - 1) < SAME))
    other[...] = FEEDS["X"]
    session.run_with_iobinding(bound)
    (expected,) = twin.run(["loss"], FEEDS)
    say("the memory of the caller is read", bool(abs(bound.copy_outputs_to_cpu()[0] / expected - 1) < SAME))
    bound.clear_binding_outputs()
    filled = np.zeros((5, 3), np.float32)
    bound.bind_output("pred", "cpu", 0, np.float32, [5, 3], filled.ctypes.data)
    bound.bind_ortvalue_output("loss", onnxruntime.OrtValue.ortvalue_from_shape_and_type([], np.float32))
    session.run_with_iobinding(bound)
    (prediction, loss) = bound.copy_outputs_to_cpu()
    say("outputs in the order of binding", [kind(prediction), kind(loss)])
    say("the memory of the caller is filled", bool(filled.any()) and np.array_equal(filled, prediction))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(FEEDS["X"])
    bound.bind_ortvalue_input("X", value)
    label = np.ascontiguousarray(FEEDS["label"])
    bound.bind_input("label", "cpu", 0, np.float32, list(label.shape), label.ctypes.data)
    bound.synchronize_inputs()
    session.run_with_iobinding(bound)
    bound.synchronize_outputs()
    say("values of all kinds", len(bound.get_outputs()))
    bound.clear_binding_inputs()
    bound.clear_binding_outputs()
    before = session.get_state()
    refused("an unknown input", RuntimeError, lambda: bound.bind_cpu_input("nowhere", label), "nowhere")
    refused("a weight", RuntimeError, lambda: bound.bind_cpu_input("W1", WEIGHTS["W1"]), "W1")
    refused("memory without a type", ValueError, lambda: bound.bind_output("loss", buffer_ptr=filled.ctypes.data))
    for name, array in FEEDS.items():
        bound.bind_cpu_input(name, array)
    refused("no output", RuntimeError, lambda: session.run_with_iobinding(bound))
    bound.bind_output("nowhere")
    refused("an unknown output", RuntimeError, lambda: session.run_with_iobinding(bound), "nowhere")
    bound.clear_binding_outputs()
    bound.bind_output("loss")
    wide = np.zeros((5, 3), np.float32)
    bound.bind_cpu_input("X", wide)
    refused("another size", RuntimeError, lambda: session.run_with_iobinding(bound), "X", "3", "4")
    double = FEEDS["X"].astype(np.float64)

    def of_another_type() -> None:
        bound.bind_cpu_input("X", double)
        session.run_with_iobinding(bound)

    refused("another type", RuntimeError, of_another_type, "tensor(double)", "tensor(float)")
    say("nothing changed", same(session.get_state(), before))

    chapter("OrtValue")
    say("from NumPy", [value.shape(), value.data_type(), value.element_type(), value.device_name(), value.has_value()])
    say("kinds", [value.is_tensor(), value.is_tensor_sequence(), value.is_sparse_tensor()])
    say("shares memory", value.data_ptr() == FEEDS["X"].ctypes.data)
    for arguments in ({}, {"shape": [2]}, {"element_type": np.float32}):
        refused(
            f"made of {sorted(arguments)}",
            ValueError,
            lambda arguments=arguments: onnxruntime.OrtValue.ortvalue_from_shape_and_type(**arguments),
        )


def dropping() -> None:
    chapter("Dropout and training_mode")
    parameters = parameters_of(SGD)
    session, plain = session_of(parameters, network(0.5)), session_of(parameters)
    say("inputs", [meta.name for meta in session.get_inputs()])
    say("by default", onnxruntime.RunOptions().training_mode)
    feeds = FEEDS | {RATE: np.zeros(1, np.float32)}
    (expected,) = plain.run(["loss"], feeds)
    for mode in (False, True):
        bound = session.io_binding()
        for name, array in feeds.items():
            bound.bind_cpu_input(name, array)
        bound.bind_output("loss")
        losses = []
        for _ in range(3):
            session.run_with_iobinding(bound, run_options(training_mode=mode))
            losses.append(float(bound.copy_outputs_to_cpu()[0]))
        say(f"training_mode {mode}", f"{len(set(losses))} losses")
        say("  the first is that without Dropout", bool(abs(losses[0] / float(expected) - 1) < SAME))
    switched = feeds | {"training_mode": np.asarray(False)}
    say("fed through run", len({float(session.run(["loss"], switched)[0]) for _ in range(3)}))
    say("through run", len({float(session.run(["loss"], feeds)[0]) for _ in range(3)}))
    before = session.get_state()
    bound = session.io_binding()
    for name, array in FEEDS.items():
        bound.bind_cpu_input(name, array)
    bound.bind_output("loss")
    session.run_with_iobinding(bound, run_options(training_mode=False))
    say("training_mode False", "unchanged" if same(session.get_state(), before) else "trained")
    mode = np.asarray(True)
    bound.bind_ortvalue_input("training_mode", onnxruntime.OrtValue.ortvalue_from_numpy(mode))
    bound.bind_cpu_input(RATE, feeds[RATE])
    losses = []
    for _ in range(3):
        session.run_with_iobinding(bound, run_options(training_mode=False))
        losses.append(float(bound.copy_outputs_to_cpu()[0]))
    say("a mode that is bound goes before", len(set(losses)))


def profiling() -> None:
    chapter("profiling")
    options = options_of()
    options.enable_profiling = True
    options.profile_file_prefix = "trace"
    session = session_of(sess_options=options)
    for _ in range(2):
        session.run(None, FEEDS)
    say("start", session.get_profiling_start_time_ns() > 0)
    path = session.end_profiling()
    say("file", re.sub(r"\d", "0", Path(path).name))
    events = json.loads(Path(path).read_text())
    say("events", isinstance(events, list) and len(events) > 0)
    say("columns", sorted(set(COLUMNS).intersection(*events)))
    say("again", repr(session.end_profiling()))


def of_a_weight(name: str) -> bool:
    return any(weight in name for weight in WEIGHTS)


def dumps() -> None:
    chapter("three dumps")
    paths = {name: f"{name}.onnx" for name in ("after_graph_transforms", "with_gradient_graph", "with_training_graph")}
    for optimizer, norm in ((SGD, False), (ADAM, True)):
        changes = {f"model_{name}_path": path for name, path in paths.items()}
        session_of(parameters_of(optimizer, enable_grad_norm_clip=norm, **changes))
        for name, path in paths.items():
            graph = onnx.load(path).graph
            Path(path).unlink()
            outputs = {output for made in graph.node for output in made.output}
            stored = {initializer.name for initializer in graph.initializer}
            say(f"{optimizer}, {name}")
            say("  inputs", [value.name for value in graph.input])
            say("  outputs", [value.name for value in graph.output])
            say("  weights", sorted(stored & WEIGHTS.keys()))
            say("  states", sorted(name for name in stored if name.startswith(("Moment_", "Update_Count_"))))
            say("  the seed of the loss", "loss_grad" in stored)
            say("  gradients", sorted(f"{name}_grad" for name in WEIGHTS if f"{name}_grad" in outputs))
            say("  updates", sorted(name for name in outputs if name.endswith(("_out", "_Out")) and of_a_weight(name)))
            say("  optimizers", sorted(made.op_type for made in graph.node if made.op_type.endswith("Optimizer")))
            say("  norms", [made.op_type for made in graph.node if NORM in made.output])


def options() -> None:
    chapter("SessionOptions")
    plain = onnxruntime.SessionOptions()
    for name in SESSION_OPTIONS.split():
        value = getattr(plain, name)
        say(name, "method" if callable(value) else value.name if hasattr(value, "name") else repr(value))
    plain.add_session_config_entry("a", "b")
    say("an entry", plain.get_session_config_entry("a"))
    refused("an entry that is not there", RuntimeError, lambda: plain.get_session_config_entry("nowhere"), "nowhere")
    for kind_of, names in (
        ("GraphOptimizationLevel", ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")),
        ("ExecutionMode", ("ORT_SEQUENTIAL", "ORT_PARALLEL")),
        ("ExecutionOrder", ("DEFAULT", "PRIORITY_BASED")),
    ):
        say(kind_of, [int(getattr(getattr(onnxruntime, kind_of), name)) for name in names])
    for name, wrong in (("intra_op_num_threads", "x"), ("enable_profiling", "x"), ("logid", 3)):
        refused(f"{name} = {wrong!r}", TypeError, lambda name=name, wrong=wrong: setattr(plain, name, wrong))
    refused("a field that is not there", AttributeError, lambda: setattr(plain, "nowhere", 1))
    fixed = options_of()
    fixed.add_free_dimension_override_by_name("N", 5)
    session = session_of(sess_options=fixed)
    say("a fixed dimension", [meta.shape for meta in [*session.get_inputs(), *session.get_outputs()]])
    written = options_of()
    written.optimized_model_filepath = "optimized.onnx"
    session_of(sess_options=written)
    say("an optimized model", len(onnx.load("optimized.onnx").graph.node) > 0)
    chapter("RunOptions")
    plain = onnxruntime.RunOptions()
    for name in RUN_OPTIONS.split():
        value = getattr(plain, name)
        say(name, "method" if callable(value) else repr(value))
    plain.add_run_config_entry("a", "b")
    say("an entry", plain.get_run_config_entry("a"))
    refused("an entry that is not there", RuntimeError, lambda: plain.get_run_config_entry("nowhere"), "nowhere")


def below() -> None:
    chapter("the classes of the extension module")
    session = extension.TrainingSession(options_of())
    say("is an InferenceSession", isinstance(session, extension.InferenceSession))
    say("the parameters are one class", extension.TrainingParameters is onnxruntime.TrainingParameters)
    result = session.read_bytes(NETWORK, parameters_of(), CPU, [{}])
    say("result", [type(result).__name__, result.loss_scale_input_name])
    say("a plain result", extension.TrainingConfigurationResult().loss_scale_input_name)
    refused("a second model", RuntimeError, lambda: session.read_bytes(NETWORK, parameters_of(), CPU, [{}]))
    say("inputs", [meta.name for meta in session.inputs_meta])
    say("outputs", [meta.name for meta in session.outputs_meta])
    say("overridable", [meta.name for meta in session.overridable_initializers])
    say("providers", [session.get_providers(), session.get_provider_options()])
    say("start of profiling", session.get_profiling_start_time_ns)
    meta = session.model_meta
    say(
        "model",
        [meta.producer_name, meta.graph_name, meta.domain, meta.description, meta.version, meta.custom_metadata_map],
    )
    say("run", [kind(array) for array in session.run(["loss"], FEEDS, None)])
    say("state", sorted(session.get_state()))
    say("model state", {part: sorted(arrays) for part, arrays in session.get_model_state(True).items()})
    say("optimizer state", {weight: sorted(parts) for weight, parts in sorted(session.get_optimizer_state().items())})
    say("load_state", session.load_state(session.get_state(), True))
    say("is_output_fp32_node", session.is_output_fp32_node("loss"))
    say("partitions", session.get_partition_info_map())
    say("finalize", session.finalize())
    refused("no flag", TypeError, lambda: session.load_state({}))
    dropping = extension.TrainingSession(options_of())
    dropping.read_bytes(network(0.5), parameters_of(), CPU, [{}])
    say("overridable with Dropout", [[meta.name, meta.type, meta.shape] for meta in dropping.overridable_initializers])
    empty = extension.TrainingSession(options_of())
    refused("a state before a model", RuntimeError, empty.get_state)
    refused("a run before a model", Fail, lambda: empty.run([], {}, None))
    refused(
        "a file that is not there", NoSuchFile, lambda: empty.load_model("nowhere.onnx", parameters_of(), CPU, [{}])
    )
    Path("model.onnx").write_bytes(NETWORK)
    say("load_model", empty.load_model("model.onnx", parameters_of(), CPU, [{}]).loss_scale_input_name)
    say("a path", [meta.name for meta in session_of(model="model.onnx").get_inputs()])


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for part in (
        parameters,
        sessions,
        loading,
        types,
        constructing,
        running,
        evaluating,
        binding,
        dropping,
        profiling,
        dumps,
        options,
        below,
    ):
        try:
            part()
        except Exception as error:
            # Later chapters are printed nevertheless.
            say("stopped by", f"{type(error).__name__} {str(error).splitlines()[0]}")
    os.chdir("/")
