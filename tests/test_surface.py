"""The Python interface for a user: reprs, notebook tables, copies, numbers, names, hints."""

from __future__ import annotations

import copy
import html.parser
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import RECORDS, Run, generate
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import OrtValue, artifacts
from ortrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Outputs, Scalar
from ortrain.session import TrainingSession

CASE = RECORDS / "mlp_adamw_ce"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 10), np.float32)
LABELS = RNG.integers(0, 5, 8)


def steps(run: Run, count: int = 3) -> list[float]:
    """Train some steps with updates; returns the losses."""
    losses = []
    for _ in range(count):
        losses.append(float(run.module(X, LABELS)))
        run.optimizer.step()
        run.module.lazy_reset_grad()
    return losses


# Reprs.


def test_repr_of_a_state(run: Run) -> None:
    assert repr(run.state) == (
        "CheckpointState(4 parameters, 4 of them trained, 1556 bytes, step 0, learning rate 0.001)"
    )
    steps(run)
    run.optimizer.set_learning_rate(0.05)
    run.state.properties["epoch"] = 3
    assert repr(run.state) == (
        "CheckpointState(4 parameters, 4 of them trained, 1556 bytes, step 3, learning rate 0.05, properties epoch)"
    )


def test_repr_of_a_nominal_state() -> None:
    state = CheckpointState.load_checkpoint(RECORDS / "checkpoint_resume" / "nominal_checkpoint")
    assert repr(state) == "CheckpointState(4 parameters, 3 of them trained, nominal: without values, step 0)"
    assert state.parameters.keys() == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert repr(copy.deepcopy(state)) == repr(state)


def test_repr_of_a_module(run: Run) -> None:
    assert repr(run.module) == "Module(inputs=['x', 'labels'], mode='train', device='cpu', precision='f32')"
    assert repr(run.module.eval()) == "Module(inputs=['x', 'labels'], mode='eval', device='cpu', precision='f32')"
    other = Module(CASE / "training_model.onnx", run.state, device="reference")
    assert repr(other.eval()) == "Module(inputs=[], mode='eval', device='reference', precision='f32')"


def test_repr_of_an_optimizer_and_a_scheduler(run: Run) -> None:
    assert repr(run.optimizer) == "Optimizer(step=0, learning_rate=0.001)"
    scheduler = LinearLRScheduler(run.optimizer, 2, 10, 0.5)
    steps(run, 1)
    scheduler.step()
    assert repr(run.optimizer) == "Optimizer(step=1, learning_rate=0.25)"
    assert repr(scheduler) == "LinearLRScheduler(warmup_step_count=2, total_step_count=10, initial_lr=0.5)"


def test_repr_of_sessions_and_options(run: Run) -> None:
    with TrainingSession(run.state, CASE / "training_model.onnx") as session:
        assert repr(session) == "TrainingSession(inputs=['x', 'labels'], device='cpu', precision='f32')"
    assert repr(session) == (
        "TrainingSession(device='cpu', cannot be used: the training session is closed; make another one on its state)"
    )
    inference = ortrain.InferenceSession(CASE / "forward.onnx")
    assert re.fullmatch(
        r"InferenceSession\(inputs=\[x: tensor\(float\) \['batch', 10\]\], "
        r"outputs=\[\w+: tensor\(float\) \['batch', 5\]\], device='cpu'\)",
        repr(inference),
    )
    options = ortrain.SessionOptions()
    options.memory_limit = 1 << 20
    assert "memory_limit=1048576, optimized_model_filepath='', precision='f32'" in repr(options)
    assert repr(ortrain.RunOptions()).endswith("terminate=False, training_mode=True)")
    assert repr(OrtValue.ortvalue_from_numpy(X)) == "OrtValue(tensor(float), shape=[8, 10])"


# Tables of notebooks.


class Cells(html.parser.HTMLParser):
    """Parser for the table rows of a page; the page must be well formed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.text += data


def test_an_inspection_as_a_table() -> None:
    found = ortrain.inspect(CASE / "forward.onnx")
    page = Cells(found._repr_html_())
    assert page.rows[0] == ["name", "type", "shape", "elements", "role", "confidence", "why"]
    assert len(page.rows) == 1 + len(found.parameters)
    first = found.parameters[0]
    assert page.rows[1][:5] == [first.name, "float32", str(list(first.shape)), "240", "trained"]
    assert page.rows[1][5:] == [first.confidence, first.reason]
    assert "a forward model" in page.text


def test_a_table_of_very_many_constants_has_an_end_and_names_are_text() -> None:
    names = ["<b>&w"] + [f"w{k}" for k in range(400)]
    nodes = [helper.make_node("Add", ["x" if k == 0 else f"y{k - 1}", w], [f"y{k}"]) for k, w in enumerate(names)]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [value("x", TensorProto.FLOAT, [2])],
        [value("y400", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.ones(2, np.float32), name) for name in names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    page = Cells(ortrain.inspect(model)._repr_html_())
    assert page.rows[1][0] == "<b>&w"
    assert len(page.rows) == 301
    assert "and 101 more" in page.text


def test_a_profile_as_a_table(run: Run) -> None:
    profile = run.module.profile(X, LABELS, steps=2)
    page = Cells(profile._repr_html_())
    assert len(page.rows) == 1 + len(profile.instructions)
    slowest = max(profile.instructions, key=lambda instruction: instruction.total)
    assert page.rows[1][:5] == [slowest.node, slowest.kind, slowest.shapes, slowest.kernel, "2"]
    assert page.text.startswith("2 steps, ")
    assert page.text.endswith(f"{profile.memory:,} bytes of memory")


# Parameters.


def test_a_parameter_is_like_an_array(run: Run) -> None:
    weight = run.state.parameters["fc1.weight"]
    assert (weight.shape, weight.dtype) == ((10, 24), np.float32)
    assert np.shares_memory(np.asarray(weight), weight.data)
    assert not np.shares_memory(np.array(weight), weight.data)
    assert np.asarray(weight, np.float64).dtype == np.float64
    assert float(np.linalg.norm(weight)) == float(np.linalg.norm(weight.data))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(
            ValueError, match=r"parameter 'fc1\.weight' is float32; a conversion to another type requires a copy"
        ):
            np.asarray(weight, np.float64, copy=False)
    assert repr(weight) == "Parameter(name=fc1.weight, requires_grad=True, shape=(10, 24), dtype=float32)"


def test_parameters_are_found_as_in_a_dict(run: Run) -> None:
    parameters = run.state.parameters
    names = [name for name, _ in parameters]
    assert parameters.keys() == names == [parameter.name for parameter in parameters.values()]
    assert [(name, parameter.name) for name, parameter in parameters.items()] == [(name, name) for name in names]
    assert list(dict(parameters)) == names
    arrays = {name: np.asarray(parameter) for name, parameter in parameters.items()}
    assert arrays["fc2.bias"].shape == (5,)
    run.state.properties["epoch"] = 3
    run.state.properties["best"] = 0.5
    assert run.state.properties.items() == [("best", 0.5), ("epoch", 3)]
    assert run.state.properties.keys() == ["best", "epoch"]
    assert run.state.properties.values() == [0.5, 3]


# Copies.


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, *(lambda state, p=p: pickle.loads(pickle.dumps(state, p)) for p in (0, 2, 5))],
    ids=["deepcopy", "copy", "pickle 0", "pickle 2", "pickle 5"],
)
def test_a_copy_of_a_state_goes_on_with_the_same_bits(
    duplicate: Callable[[CheckpointState], CheckpointState], ours: Callable[[str], Path]
) -> None:
    folder = ours("mlp_adamw_ce")
    run = Run(folder)
    scheduler = LinearLRScheduler(run.optimizer, 2, 20, 0.05)
    run.state.seed = -3
    run.state.properties["epoch"] = 1
    steps(run)
    scheduler.step()
    twin = duplicate(run.state)
    assert twin is not run.state
    assert twin.to_bytes(True) == run.state.to_bytes(True)
    assert (twin.seed, repr(twin)) == (-3, repr(run.state))
    before = twin.to_bytes(True)
    losses = steps(run)
    # A change of one copy does not change the other.
    assert twin.to_bytes(True) == before
    again = Run(folder)
    again.state = twin
    again.module = Module(folder / "training_model.onnx", twin)
    again.optimizer = Optimizer(folder / "optimizer_model.onnx", again.module)
    assert steps(again) == losses
    assert twin.to_bytes(True) == run.state.to_bytes(True)


# Numbers and outputs.


def test_a_loss_is_a_number(run: Run) -> None:
    loss = run.module(X, LABELS)
    assert isinstance(loss, Scalar)
    assert isinstance(loss, np.ndarray)
    assert (loss.shape, loss.dtype, loss.ndim) == ((), np.float32, 0)
    exact = loss.item()
    assert isinstance(exact, float)
    assert float(loss) == exact
    assert (round(loss, 2), round(loss)) == (round(exact, 2), round(exact))
    assert f"{loss:.3f}" == f"{exact:.3f}"
    assert json.loads(json.dumps(float(loss))) == exact
    assert repr(loss) == f"array({np.float32(exact)!s}, dtype=float32)"
    # Arithmetic follows NumPy.
    for result in (loss * 2, 1 - loss, -loss, loss + loss, np.sqrt(loss), np.add(loss, 1, dtype=np.float64)):
        assert isinstance(result, np.floating)
    assert isinstance(loss < 3, np.bool_)
    assert type(loss + np.ones(2, np.float32)) is np.ndarray
    assert np.mean([loss, loss]) == loss
    total = loss.copy()
    total += loss
    total /= 2
    assert total == loss
    restored = pickle.loads(pickle.dumps(loss))
    assert type(restored) is np.ndarray
    assert restored == loss


def test_losses_of_other_types_are_rounded() -> None:
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        number = np.asarray(1.75, dtype).view(Scalar)
        assert (round(number, 1), type(round(number, 1))) == (1.8, float)
    whole = np.asarray(7).view(Scalar)
    assert (round(whole), type(round(whole))) == (7, int)


def test_a_session_gives_numbers_too(run: Run) -> None:
    session = TrainingSession(run.state, CASE / "training_model.onnx")
    (loss,) = session.train_step([X, LABELS])
    assert isinstance(loss, Scalar)
    assert round(loss, 3) == round(float(loss), 3)


def test_outputs_are_found_by_name(tmp_path: Path) -> None:
    generate("mlp_adamw_ce", tmp_path, additional_output_names=["logits"])
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    outputs = module(X, LABELS)
    assert isinstance(outputs, Outputs)
    assert isinstance(outputs, tuple)
    loss, logits = outputs
    assert outputs.names == tuple(module.output_names())
    assert outputs["logits"] is logits is outputs[1] is outputs.asdict()["logits"]
    assert isinstance(loss, Scalar)
    assert logits.shape == (8, 5)
    assert repr(outputs).startswith(f"Outputs({outputs.names[0]}={loss!r}, logits=array(")
    with pytest.raises(KeyError) as error:
        outputs["logit"]
    assert error.value.args[0] == (
        f"there is no output 'logit'; the outputs are {outputs.names[0]}, logits; did you mean 'logits'?"
    )
    for twin in (copy.deepcopy(outputs), pickle.loads(pickle.dumps(outputs))):
        assert twin.names == outputs.names
        np.testing.assert_array_equal(twin["logits"], logits)
    values = module(OrtValue.ortvalue_from_numpy(X), OrtValue.ortvalue_from_numpy(LABELS))
    assert isinstance(values["logits"], OrtValue)


def test_named_losses_are_outputs(tmp_path: Path) -> None:
    """Named losses without factors follow the total, in training and evaluation. The user can choose the order."""
    kinds = artifacts.LossType
    terms = [
        artifacts.Loss(kinds.CrossEntropyLoss, name="classes"),
        artifacts.Loss(kinds.L1Loss, target="wanted", factor=0.25, name="size"),
        artifacts.Loss(kinds.MSELoss, target="wanted", factor=0.5),
    ]
    forward = CASE / "forward.onnx"
    wanted = RNG.standard_normal((8, 5), np.float32)
    artifacts.generate_artifacts(forward, loss=terms, additional_output_names=["logits"], artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for mode in (True, False):
        outputs = module.train(mode)(X, LABELS, wanted)
        assert outputs.names[1:] == ("classes", "size", "logits")
        logits = np.asarray(outputs["logits"], np.float64)
        chosen = logits[range(8), LABELS]
        classes = np.mean(np.log(np.exp(logits).sum(1)) - chosen)
        size = np.abs(logits - wanted).mean()
        squares = np.square(logits - wanted).mean()
        np.testing.assert_allclose(outputs["classes"], classes, rtol=1e-5)
        np.testing.assert_allclose(outputs["size"], size, rtol=1e-5)
        np.testing.assert_allclose(outputs[0], classes + 0.25 * size + 0.5 * squares, rtol=1e-5)

    def names(losses: Any, others: list[str]) -> list[str]:
        artifacts.generate_artifacts(
            forward, loss=losses, additional_output_names=others, artifact_directory=tmp_path, prefix="b_"
        )
        state = CheckpointState.load_checkpoint(tmp_path / "b_checkpoint")
        return Module(tmp_path / "b_training_model.onnx", state).output_names()

    assert names(terms, ["logits", "size"])[1:] == ["classes", "logits", "size"]
    # A single named loss is an output with its name.
    assert names(terms[0], []) == ["classes"]
    onnx.checker.check_model(onnx.load(tmp_path / "b_eval_model.onnx"), full_check=True)
    for name in ("logits", ""):
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            names(artifacts.Loss(kinds.MSELoss, name=name), [])
        assert str(error.value) == (
            f'a loss cannot be named "{name}": the name must not be empty or the name of another value'
        )


# Names that nearly match.


def saved(run: Run, name: str) -> None:
    run.module.export_model_for_inferencing("x.onnx", [name])


def generate_from_forward(**arguments: Any) -> None:
    artifacts.generate_artifacts(CASE / "forward.onnx", **arguments)


FORWARD_NAMES = [node.name for node in onnx.load(CASE / "forward.onnx").graph.node]
NEAR: dict[str, tuple[Callable[[Run], Any], str]] = {
    "a parameter": (
        lambda run: run.state.parameters["fc1.wieght"],
        "Parameter fc1.wieght not found. Did you mean 'fc1.weight'?",
    ),
    "a parameter that is set": (
        lambda run: run.state.parameters.__setitem__("FC1.bias", np.zeros(24, np.float32)),
        "Parameter FC1.bias not found. Did you mean 'fc1.bias'?",
    ),
    "a property": (
        lambda run: (run.state.properties.__setitem__("epoch", 1), run.state.properties["epohc"]),
        "Property epohc not found. Did you mean 'epoch'?",
    ),
    "a parameter to train": (
        lambda run: generate_from_forward(requires_grad=["fc1.wieght"]),
        'no initializer "fc1.wieght"; did you mean "fc1.weight"?',
    ),
    "a parameter that is renamed": (
        lambda run: run.state.save_safetensors("x.safetensors", {"fc1.biass": "b"}),
        'there is no parameter "fc1.biass" in the state; did you mean "fc1.bias"?',
    ),
    "a value to compare": (
        lambda run: generate_from_forward(loss=artifacts.LossType.CrossEntropyLoss, loss_input_names=["logit"]),
        'the model has no value "logit"; did you mean "logits"?',
    ),
    "scores": (
        lambda run: generate_from_forward(
            requires_grad=["fc1.weight"], loss=artifacts.Loss(artifacts.LossType.MSELoss, scores="logit")
        ),
        'the model has no value "logit" to use as an input of the loss; did you mean "logits"?',
    ),
    "an output": (
        lambda run: generate_from_forward(
            requires_grad=["fc1.weight"], loss=artifacts.LossType.MSELoss, additional_output_names=["Logits"]
        ),
        'the model has no value "Logits" to use as an output; did you mean "logits"?',
    ),
    "a value that is exported": (
        lambda run: saved(run, "logitss"),
        'the evaluation model has no value "logitss" that could be an output; did you mean "logits"?',
    ),
    "an input by name": (
        lambda run: run.module(x=X, label=LABELS),
        "input 'label' is not one of x, labels; did you mean 'labels'?",
    ),
    "an input of a session": (
        lambda run: ortrain.InferenceSession(CASE / "forward.onnx").run(None, {"X": X}),
        "the model has no input \"X\"; it has x; did you mean 'x'?",
    ),
    "an output of a session": (
        lambda run: ortrain.InferenceSession(CASE / "forward.onnx").run(["logit"], {"x": X}),
        "the model has no output 'logit'; it has logits; did you mean 'logits'?",
    ),
    "an input whose shape is given": (
        lambda run: ortrain.inspect(Path(__file__).parent.parent / "examples/convnet.onnx", shapes={"X": [1]}),
        'whose shape is given; it has x: float32[batch, 1, 8, 8]; did you mean "x"?',
    ),
    "an input that is dumped": (
        lambda run: ortrain.dump(CASE / "training_model.onnx", "program", {"lables": [8]}),
        'has no input "lables"; did you mean "labels"?',
    ),
    "a name of the package": (
        lambda run: ortrain.generate_artefacts,
        "module 'ortrain' has no attribute 'generate_artefacts'; did you mean 'generate_artifacts'?",
    ),
    "an option": (
        lambda run: setattr(ortrain.SessionOptions(), "intra_op_threads", 2),
        "'SessionOptions' object has no attribute 'intra_op_threads'; did you mean 'intra_op_num_threads'?",
    ),
    "an option of a run": (
        lambda run: setattr(ortrain.RunOptions(), "terminated", True),
        "'RunOptions' object has no attribute 'terminated'; did you mean 'terminate'?",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_name_that_nearly_matches(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    does, sentence = NEAR[name]
    with pytest.raises((KeyError, AttributeError, ortrain.OrtrainError)) as error:
        does(run)
    text = str(error.value.args[0])
    assert text.endswith(sentence), text


def test_a_node_where_a_value_is_meant() -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["t17"], name="encoder/activation"), helper.make_node("Neg", ["t17"], ["y"])],
        "graph",
        [value("x", TensorProto.FLOAT, [2])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for given, sentence in [
        (
            "encoder/activation",
            'the model has no value "encoder/activation"; a node has this name, and its output is "t17"',
        ),
        (
            "encoder.activatoin",
            'the model has no value "encoder.activatoin"; did you mean "t17", the output of node "encoder/activation"?',
        ),
        ("nothing at all", 'the model has no value "nothing at all"'),
    ]:
        with pytest.raises(ortrain.InvalidArgumentError) as error:
            ortrain.inspect(model, [given])
        assert str(error.value) == sentence


def test_no_suggestion_for_a_dissimilar_name(run: Run) -> None:
    with pytest.raises(KeyError) as error:
        run.state.parameters["decoder.embedding"]
    assert error.value.args == ("Parameter decoder.embedding not found.",)
    with pytest.raises(AttributeError) as missing:
        ortrain.unheard_of  # noqa: B018
    assert missing.value.args == ("module 'ortrain' has no attribute 'unheard_of'",)


# Options.


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("memory_limit", "1GB", "memory_limit must be a number of bytes or None, got '1GB'; 1GB is 1_000_000_000"),
        (
            "memory_limit",
            "1.5 GiB",
            "memory_limit must be a number of bytes or None, got '1.5 GiB'; 1.5 GiB is 1_610_612_736",
        ),
        ("memory_limit", "512m", "memory_limit must be a number of bytes or None, got '512m'; 512m is 512_000_000"),
        ("memory_limit", "1000", "memory_limit must be a number of bytes or None, got '1000'; 1000 is 1_000"),
        ("memory_limit", "much", "memory_limit must be a number of bytes or None, got 'much'"),
        (
            "memory_limit",
            1e9,
            "memory_limit must be a number of bytes or None, got 1000000000.0; 1000000000.0 is 1_000_000_000",
        ),
        ("memory_limit", 0.5, "memory_limit must be a number of bytes or None, got 0.5"),
        ("memory_limit", float("nan"), "memory_limit must be a number of bytes or None, got nan"),
        ("memory_limit", float("inf"), "memory_limit must be a number of bytes or None, got inf"),
        ("memory_limit", True, "memory_limit must be a number of bytes or None, got True"),
        ("memory_limit", b"1GB", "memory_limit must be a number of bytes or None, got b'1GB'"),
        ("intra_op_num_threads", "4", "intra_op_num_threads must be a number of threads, got '4'; 4 is 4"),
        ("intra_op_num_threads", None, "intra_op_num_threads must be a number of threads, got None"),
        ("iteration_limit", "1k", "iteration_limit must be a number of iterations or None, got '1k'"),
        ("precision", 16, "precision must be a str such as 'f32', got 16"),
        ("bf16_fallback", None, "bf16_fallback must be a str such as 'none', got None"),
    ],
)
def test_an_option_of_another_type_is_refused_when_it_is_set(option: str, value: object, sentence: str) -> None:
    options = ortrain.SessionOptions()
    before = getattr(options, option)
    with pytest.raises(TypeError) as error:
        setattr(options, option, value)
    assert str(error.value) == sentence
    assert getattr(options, option) == before


def test_an_argument_of_another_type_is_refused_as_an_option_is(run: Run) -> None:
    with pytest.raises(TypeError, match=r"^precision must be a str such as 'f32', got 16$"):
        Module(CASE / "training_model.onnx", run.state, precision=16)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    options = ortrain.SessionOptions()
    options.memory_limit = np.int64(1 << 20)
    options.intra_op_num_threads = np.int32(1)
    assert type(options.memory_limit) is int
    options.memory_limit = None
    ortrain.InferenceSession(CASE / "forward.onnx", options)


# The seed.


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make artifacts of the perceptron with Dropout on its input."""
    folder = tmp_path_factory.mktemp("dropout")
    model = onnx.load(CASE / "forward.onnx")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "x":
                node.input[at] = "dropped"
    model.graph.node.insert(0, helper.make_node("Dropout", ["x"], ["dropped"]))
    artifacts.generate_artifacts(
        model, loss=artifacts.LossType.CrossEntropyLoss, additional_output_names=["dropped"], artifact_directory=folder
    )
    return folder


def masks(folder: Path, seed: int | None, checkpoint: str | bytes = "checkpoint") -> list[bytes]:
    """Return the dropout masks of three steps."""
    source = checkpoint if isinstance(checkpoint, bytes) else folder / checkpoint
    state = CheckpointState.load_checkpoint(source)
    if seed is not None:
        state.seed = seed
    module = Module(folder / "training_model.onnx", state)
    ones = np.ones((8, 10), np.float32)
    return [(module(ones, LABELS)["dropped"] != 0).tobytes() for _ in range(3)]


def test_the_seed_of_a_state_decides_the_masks(dropout: Path) -> None:
    first = masks(dropout, 7)
    assert len(set(first)) == 3
    assert masks(dropout, 7) == first
    assert masks(dropout, 8) != first
    assert masks(dropout, 0) == masks(dropout, None)
    state = CheckpointState.load_checkpoint(dropout / "checkpoint")
    assert state.seed == 0
    state.seed = np.int64(7)  # type: ignore[assignment]
    for optimizer_too in (False, True):
        assert masks(dropout, None, state.to_bytes(optimizer_too)) == first
    CheckpointState.save_checkpoint(state, dropout / "saved")
    assert CheckpointState.load_checkpoint(dropout / "saved").seed == 7
    with TrainingSession(state, dropout / "training_model.onnx") as session:
        session.set_seed(-1)
    assert state.seed == -1


@pytest.mark.parametrize(
    ("seed", "kind", "sentence"),
    [
        ("7", TypeError, "a seed must be an integer, got '7'"),
        (7.0, TypeError, "a seed must be an integer, got 7.0"),
        (None, TypeError, "a seed must be an integer, got None"),
        (2**63, OverflowError, f"a seed must be a 64-bit integer, from -2**63 to 2**63 - 1, got {2**63}"),
    ],
)
def test_invalid_seeds(seed: Any, kind: type[Exception], sentence: str, run: Run) -> None:
    with pytest.raises(kind) as error:
        run.state.seed = seed
    assert str(error.value) == sentence
    assert run.state.seed == 0


# Types.

SCRIPT = (Path(__file__).parent / "typed" / "script.py").read_text()


def test_a_script_is_typed(tmp_path: Path) -> None:
    """The script passes ``mypy --strict``; no result is ``Any``."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # NumPy types are generic in shape and type; the results of ortrain must not be Any.
    revealed = {
        "module(x, labels)": "ArrayResult",
        "module(OrtValue.ortvalue_from_numpy(x))": "OrtValueResult",
        "session.run(None, {'x': x})": "list[numpy.ndarray",
        "state.parameters['w'].data": "numpy.ndarray",
    }
    script.write_text(SCRIPT + "".join(f"reveal_type({expression})\n" for expression in revealed))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    notes = re.findall(r'Revealed type is "(.+)"', done.stdout)
    assert len(notes) == len(revealed), done.stdout
    for note, wanted in zip(notes, revealed.values(), strict=True):
        assert wanted in note


def test_every_public_name_is_there_in_the_types() -> None:
    """Lazily imported names are declared for type checkers, and ``dir`` lists them."""
    source = inspect.getsource(ortrain)
    for name in ortrain._LATER:
        assert re.search(rf"import (?:\([^)]*|.*)\b{name}\b", source), name
    assert {*ortrain._LATER, *ortrain._MODULES} <= set(dir(ortrain))
