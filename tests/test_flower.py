"""Federated rounds in one process: clients, server, forms of updates, privacy, bad replies."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flower_stand_in
import numpy as np
import pytest

import ortrain
from ortrain import artifacts, examples, flower
from ortrain.api import CheckpointState, Module, Optimizer
from ortrain.errors import InvalidArgumentError

rng = np.random.default_rng(0)
X = rng.random((160, 64), np.float32)
LABELS = (X @ rng.normal(size=(64, 10))).argmax(1)
CLIENTS = 4


@pytest.fixture(autouse=True)
def flwr(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's module of messages, or the stand-in."""
    for name, module in flower_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("flwr.app")


def build(context: Any) -> ortrain.Model:
    return ortrain.Model(
        examples.perceptron(), loss="cross_entropy", optimizer="sgd", learning_rate=0.5, device="cpu", seed=5
    )


def part(context: Any) -> tuple[Any, Any]:
    at = int(context.node_config["partition-id"])
    # Clients have different numbers of rows.
    rows = slice(40 * at, 40 * at + 10 * (at + 1))
    return X[rows], LABELS[rows]


def context_of(part: int = 0, node: int = 1) -> Any:
    app = importlib.import_module("flwr.app")
    return app.Context(1, node, {"partition-id": part}, app.RecordDict(), {})


class Grid:
    """Nodes in this process."""

    def __init__(
        self,
        app: Any,
        *,
        clients: int = CLIENTS,
        first: int = 100,
        backwards: bool = False,
        spoil: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self.app, self.backwards, self.spoil = app, backwards, spoil
        ids = range(first, first + clients)
        self.contexts = {node: context_of(at, node) for at, node in enumerate(reversed(ids) if backwards else ids)}

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        app = importlib.import_module("flwr.app")
        replies = []
        for message in messages:
            context = self.contexts[message.metadata.dst_node_id]
            try:
                reply = self.app(message, context)
            except Exception as error:
                reply = app.Message(app.Error(1, f"{type(error).__name__}: {error}"), reply_to=message)
            if self.spoil is not None and message.metadata.message_type == "train":
                reply = self.spoil(context.node_config["partition-id"], reply)
            if reply is not None:
                replies.append(reply)
        return replies[::-1] if self.backwards else replies


def run(
    grid: Grid, *, server_build: Callable[[Any], Any] = build, **options: Any
) -> tuple[dict[str, Any], list[flower.Round]]:
    """Run rounds; returns all parameters at the end, and the reports."""
    reports: list[flower.Round] = []
    values: dict[str, Any] = {}

    def on_round(built: Any, report: flower.Round) -> None:
        reports.append(report)
        state = built if isinstance(built, CheckpointState) else built.state
        values.update({name: each.data.copy() for name, each in state.parameters})

    app = flower.server_app(server_build, on_round=on_round, timeout=5, **{"rounds": 2, **options})
    app(grid, context_of())
    return values, reports


def client(**options: Any) -> Any:
    return flower.client_app(build, part, **{"fit": {"batch_size": 10}, **options})


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return set(first) == set(second) and all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_a_round_is_the_mean_of_the_clients() -> None:
    values, reports = run(Grid(client()), rounds=1)
    trained, weights = [], []
    for at in range(CLIENTS):
        model = build(None)
        x, labels = part(context_of(at))
        model.state.seed = 0
        model.fit(x, labels, batch_size=10, verbose=0)
        trained.append({name: each.data for name, each in model.state.parameters})
        weights.append(len(x))
    for name, value in values.items():
        mean = np.average([each[name].astype(np.float64) for each in trained], axis=0, weights=weights)
        assert np.abs(value - mean).max() < 1e-6
    (report,) = reports
    assert (report.sampled, report.accepted, report.refused) == (CLIENTS, CLIENTS, [])
    assert report.bytes_sent == report.bytes_received
    assert 4 * 7210 < report.bytes_sent / CLIENTS < 4 * 7210 + 4 * 200
    assert str(report).startswith("round 1: 4 of 4 clients, ")


def test_order_and_names_of_nodes_change_no_bit() -> None:
    values, reports = run(Grid(client(validation=part)), evaluate=True)
    other, others = run(Grid(client(validation=part), first=7000, backwards=True), evaluate=True)
    assert same(values, other)
    assert [report.metrics for report in reports] == [report.metrics for report in others]
    assert reports[-1].metrics["val_loss"] < reports[0].metrics["val_loss"]


def test_float16_and_top_k_travel_with_fewer_bytes() -> None:
    values, (report, *_) = run(Grid(client()))
    halves, (half, *_) = run(Grid(client(send="float16")), send="float16")
    assert half.bytes_received < 0.52 * report.bytes_received
    assert half.bytes_sent < 0.52 * report.bytes_sent
    assert max(np.abs(halves[name] - values[name]).max() for name in values) < 5e-3
    _, (top, *_) = run(Grid(client(send=flower.TopK(0.05))))
    assert top.bytes_received < 0.12 * report.bytes_received


def test_top_k_feeds_back_what_did_not_travel() -> None:
    grid = Grid(client(send=flower.TopK(0.1)), clients=2)
    _, reports = run(grid, rounds=6)
    record = grid.contexts[100].state["ortrain.remainder"]
    remainder = record["remainder"].numpy()
    assert remainder.shape == (7210,)
    # The elements that travelled last left no remainder.
    assert (remainder == 0).sum() >= 721
    assert reports[-1].metrics["loss"] < reports[0].metrics["loss"] / 2
    everything, _ = run(Grid(client(send=flower.TopK(1.0))))
    plain, _ = run(Grid(client()))
    assert max(np.abs(everything[name] - plain[name]).max() for name in plain) < 1e-6


def network(context: Any) -> ortrain.Model:
    return ortrain.Model(examples.convnet(), loss="cross_entropy", optimizer="sgd", learning_rate=0.1, device="cpu")


def images(context: Any) -> tuple[Any, Any]:
    x, labels = part(context)
    return x.reshape(-1, 1, 8, 8), labels


@pytest.mark.parametrize("statistics", [False, True])
def test_running_statistics_travel_on_request(statistics: bool) -> None:
    app = flower.client_app(network, images, statistics=statistics)
    values, (first, second) = run(Grid(app, clients=2), server_build=network)
    before = {name: each.data for name, each in network(None).state.parameters}
    assert np.array_equal(values["block1.mean"], before["block1.mean"]) != statistics
    assert not np.array_equal(values["block1.weight"], before["block1.weight"])
    # The server sends them from the second round on.
    assert (second.bytes_sent > first.bytes_sent) == statistics


def test_a_nominal_client_starts_without_weights(tmp_path: Path) -> None:
    artifacts.generate_artifacts(
        examples.convnet(),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
        nominal_checkpoint=True,
    )

    def pair(checkpoint: str) -> Callable[[Any], Any]:
        def make(context: Any) -> tuple[Module, Optimizer]:
            state = CheckpointState.load_checkpoint(tmp_path / checkpoint)
            module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
            return module, Optimizer(tmp_path / "optimizer_model.onnx", module)

        return make

    def batches(context: Any) -> list[tuple[Any, Any]]:
        x, labels = images(context)
        return [(x[at : at + 5], labels[at : at + 5]) for at in range(0, len(x), 5)]

    def full(context: Any) -> CheckpointState:
        return CheckpointState.load_checkpoint(tmp_path / "checkpoint")

    fit = {"learning_rate": 0.1}
    values, reports = run(
        Grid(flower.client_app(pair("nominal_checkpoint"), batches, validation=batches, fit=fit)),
        server_build=full,
        send_frozen=True,
        evaluate=True,
    )
    assert [report.accepted for report in reports] == [CLIENTS, CLIENTS]
    assert reports[1].metrics["val_loss"] < reports[0].metrics["val_loss"]
    whole, _ = run(Grid(flower.client_app(pair("checkpoint"), batches, fit=fit)), server_build=full)
    assert same(values, whole)
    _, (report, *_) = run(Grid(flower.client_app(pair("nominal_checkpoint"), batches)), server_build=full)
    assert report.accepted == 0
    assert "the state is nominal and has no values of 'block1.mean'" in report.refused[0]


def test_the_server_configures_the_clients() -> None:
    slow, _ = run(Grid(client()), rounds=1, config={"learning_rate": 0.0, "unknown": 1})
    start = {name: each.data for name, each in build(None).state.parameters}
    assert max(np.abs(slow[name] - start[name]).max() for name in start) < 1e-7


def test_a_share_of_the_clients() -> None:
    values, reports = run(Grid(client()), fraction=0.5, seed=1)
    assert [report.sampled for report in reports] == [2, 2]
    assert same(values, run(Grid(client()), fraction=0.5, seed=1)[0])


def test_numpy_client_is_the_same_client() -> None:
    older = flower.numpy_client(build, part, context_of(), validation=part, fit={"batch_size": 10})
    start = older.get_parameters({})
    assert [each.shape for each in start] == [(96,), (96, 64), (10,), (10, 96)]
    parameters, examples, metrics = older.fit(start, {"server_round": 1})
    assert examples == 10
    assert set(metrics) == {"loss"}
    values, _ = run(Grid(client(), clients=1), rounds=1, min_clients=1)
    assert all(np.array_equal(found, values[name]) for found, name in zip(parameters, sorted(values), strict=True))
    loss, examples, _ = older.evaluate(parameters, {})
    assert loss < older.evaluate(start, {})[0]
    with pytest.raises(InvalidArgumentError, match="the server sent 3 arrays, expected 4 parameters"):
        older.fit(start[:3], {})


# Replies that a client may send instead of its update: a change, and the sentence about it.
BAD = {
    "shape": (lambda a: a | {"fc1.bias": np.zeros(3, np.float32)}, "parameter 'fc1.bias' has the shape (3,), expected"),
    "NaN": (lambda a: a | {"fc2.bias": np.full(10, np.nan, np.float32)}, "parameter 'fc2.bias' has NaN or infinities"),
    "missing": (lambda a: {"fc1.bias": a["fc1.bias"]}, "parameter 'fc1.weight' is missing"),
    "unknown": (lambda a: a | {"fc3.bias": np.zeros(3)}, "there is no parameter 'fc3.bias'; did you mean"),
    "integers": (lambda a: a | {"fc2.bias": np.zeros(10, np.int32)}, "has elements of int32, expected floats"),
    "overflow": (lambda a: a | {"fc2.bias": np.full(10, 1e300)}, "parameter 'fc2.bias' exceeds float32"),
    "nothing": (lambda a: {}, "the reply has no arrays or no metrics"),
}


def spoiled(change: Callable[[Any], Any], **metrics: Any) -> Callable[[int, Any], Any]:
    def spoil(at: int, reply: Any) -> Any:
        if at == 1:
            app = importlib.import_module("flwr.app")
            arrays = change({name: each.numpy() for name, each in reply.content["arrays"].items()})
            reply.content["arrays"] = app.ArrayRecord({name: app.Array(each) for name, each in arrays.items()})
            reply.content["metrics"].update(metrics)
        return reply

    return spoil


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reply_is_left_out_with_a_sentence(bad: str) -> None:
    change, sentence = BAD[bad]
    values, (report,) = run(Grid(client(), spoil=spoiled(change)), rounds=1)
    assert report.accepted == CLIENTS - 1
    (found,) = report.refused
    assert found.startswith("client 101: ")
    assert sentence in found
    assert "\n" not in found
    good, _ = run(Grid(client(), spoil=lambda at, reply: None if at == 1 else reply), rounds=1)
    assert same(values, good)


def test_bytes_that_are_no_array(flwr: Any) -> None:
    def spoil(at: int, reply: Any) -> Any:
        if at == 1:
            array = flwr.Array(np.zeros(10, np.float32))
            array.data = pickle.dumps(np.zeros(10))
            reply.content["arrays"]["fc2.bias"] = array
        return reply

    _, (report,) = run(Grid(client(), spoil=spoil), rounds=1)
    assert report.accepted == CLIENTS - 1
    assert report.refused[0].startswith("client 101: the array 'fc2.bias' cannot be read (")


def test_frozen_parameters_are_not_sent() -> None:
    def head(context: Any) -> ortrain.Model:
        return ortrain.Model(examples.perceptron(), loss="cross_entropy", trainable="head", device="cpu")

    values, (report,) = run(Grid(flower.client_app(head, part)), server_build=head, rounds=1)
    assert report.bytes_received / CLIENTS < 4 * 970 + 400
    start = {name: each.data for name, each in build(None).state.parameters}
    assert not np.array_equal(values["fc2.weight"], start["fc2.weight"])


@pytest.mark.parametrize("examples", [0, -5, 2.5, 1 << 60])
def test_the_weight_of_a_client_is_checked(examples: float) -> None:
    spoil = spoiled(lambda arrays: arrays, **{"num-examples": examples})
    _, (report,) = run(Grid(client(), spoil=spoil), rounds=1)
    assert report.accepted == CLIENTS - 1
    assert f"num-examples must be an integer above 0, got {examples!r}" in report.refused[0]


def test_clients_that_fail_or_are_silent() -> None:
    def broken(context: Any) -> Any:
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("the disk is\nfull")
        return part(context)

    app = flower.client_app(build, broken, fit={"batch_size": 10})
    _, (report,) = run(Grid(app, spoil=lambda at, reply: None if at == 3 else reply), rounds=1)
    assert report.accepted == 2
    assert report.refused == [
        "client 102: the client failed: RuntimeError: the disk is full",
        "client 103: no reply within the time",
    ]


def test_a_round_without_a_good_reply_leaves_the_model() -> None:
    values, reports = run(Grid(client(), spoil=lambda at, reply: None))
    assert [report.accepted for report in reports] == [0, 0]
    assert same(values, {name: each.data for name, each in build(None).state.parameters})


def test_bad_indices_of_top_k() -> None:
    def change(arrays: Any) -> Any:
        return arrays | {"top-k.indices": np.full_like(arrays["top-k.indices"], 7210)}

    _, (report,) = run(Grid(client(send=flower.TopK(0.1)), spoil=spoiled(change)), rounds=1)
    assert "the top-k update has an index outside of the 7210 elements" in report.refused[0]
    twice = spoiled(lambda arrays: arrays | {"top-k.indices": np.zeros_like(arrays["top-k.indices"])})
    _, (report,) = run(Grid(client(send=flower.TopK(0.1)), spoil=twice), rounds=1)
    assert "has an index twice" in report.refused[0]


def test_a_client_refuses_parameters_that_do_not_fit(flwr: Any) -> None:
    app = client()
    content = flwr.RecordDict({"arrays": flwr.ArrayRecord({"fc1.bias": flwr.Array(np.zeros(3, np.float32))})})
    message = flwr.Message(content=content, message_type="train", dst_node_id=1)
    with pytest.raises(InvalidArgumentError, match=r"parameter 'fc1[.]bias' has the shape"):
        app(message, context_of())
    with pytest.raises(InvalidArgumentError, match="no arrays under the key 'arrays'"):
        app(flwr.Message(content=flwr.RecordDict(), message_type="train", dst_node_id=1), context_of())


def pair_of(folder: Path) -> tuple[Module, Optimizer]:
    artifacts.generate_artifacts(
        examples.perceptron(),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=folder,
    )
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def gradients_of_examples(state: CheckpointState, x: Any, labels: Any) -> list[Any]:
    """Return the gradient of each example by vectorized products in NumPy and float64, as one vector each."""
    values = {name: each.data.astype(np.float64) for name, each in state.parameters}
    before = x @ values["fc1.weight"].T + values["fc1.bias"]
    hidden = np.maximum(before, 0)
    logits = hidden @ values["fc2.weight"].T + values["fc2.bias"]
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(x)), labels] -= 1
    inner = (chances @ values["fc2.weight"]) * (before > 0)
    products = (
        inner,
        np.einsum("bi,bj->bij", inner, x),
        chances,
        np.einsum("bi,bj->bij", chances, hidden),
    )
    return [np.concatenate([each[row].ravel() for each in products]) for row in range(len(x))]


def packed(module: Module) -> Any:
    return np.concatenate([each.grad.ravel() for _, each in module._state.parameters])  # type: ignore[union-attr]


def test_clipping_equals_vectorized_products(tmp_path: Path) -> None:
    module, optimizer = pair_of(tmp_path)
    x, labels = X[:8], LABELS[:8]
    each = gradients_of_examples(module._state, x, labels)
    norms = np.array([np.linalg.norm(gradient) for gradient in each])
    bound = float(np.median(norms))
    expected = np.mean([g * min(1, bound / n) for g, n in zip(each, norms, strict=True)], axis=0)
    loss = flower.clip_per_example(module, x, labels, max_norm=bound)
    assert np.abs(packed(module) - expected).max() < 1e-6
    optimizer.step()
    module.lazy_reset_grad()
    assert loss > float(module(x, labels))
    # A bound above all norms: the result is the gradient of the whole batch.
    module.lazy_reset_grad()
    module(x, labels)
    whole = packed(module).copy()
    flower.clip_per_example(module, x, labels, max_norm=1e9)
    assert np.abs(packed(module) - whole).max() < 1e-6


def test_noise_has_its_deviation_and_leaves_gaps_at_zero(tmp_path: Path) -> None:
    module, _ = pair_of(tmp_path)
    x, labels = X[:4], LABELS[:4]
    flower.clip_per_example(module, x, labels, max_norm=0.5)
    plain = packed(module).copy()
    generator = np.random.default_rng(1)
    flower.clip_per_example(module, x, labels, max_norm=0.5, noise_multiplier=2.0, rng=generator)
    noise = packed(module) - plain
    assert abs(noise.std() / (2.0 * 0.5 / 4) - 1) < 0.05
    assert abs(noise.mean()) < 0.02
    (plane,), (layout,) = module.gradient_planes(), module._state.layout().trainable
    covered = np.zeros(plane.size, bool)
    for tensor in layout.tensors:
        covered[tensor.offset : tensor.offset + np.prod(tensor.shape)] = True
    assert not plane[~covered].any()


def test_private_clients() -> None:
    privacy = flower.ExampleClipping(max_norm=0.5, noise_multiplier=0.01, seed=7)
    values, reports = run(Grid(client(privacy=privacy), clients=2), rounds=3)
    assert same(values, run(Grid(client(privacy=privacy), clients=2, first=900, backwards=True), rounds=3)[0])
    assert reports[-1].metrics["loss"] < reports[0].metrics["loss"]
    secret = flower.ExampleClipping(max_norm=0.5, noise_multiplier=0.01)
    assert not same(values, run(Grid(client(privacy=secret), clients=2), rounds=3)[0])


def test_statistics_of_a_batch_are_not_private() -> None:
    app = flower.client_app(network, images, privacy=flower.ExampleClipping(1.0))
    _, (report, *_) = run(Grid(app, clients=2), server_build=network)
    assert "changes the running statistic 'block1.mean' by single examples" in report.refused[0]


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: flower.client_app(build, part, send="int8"), "send must be 'float32', 'float16' or a TopK"),
        (lambda: flower.client_app(build, part, fit={"epoch": 1}), "no training option 'epoch'; did you mean 'epochs'"),
        (lambda: flower.TopK(0), "fraction must be above 0 and at most 1, got 0"),
        (lambda: flower.ExampleClipping(-1.0), "max_norm must be a number above 0, got -1.0"),
        (lambda: flower.ExampleClipping(1.0, float("nan")), "noise_multiplier must be a number of at least 0"),
        (lambda: flower.server_app(build, rounds=0), "rounds must be an integer of at least 1, got 0"),
        (lambda: flower.server_app(build, fraction=2.0), "fraction must be above 0 and at most 1"),
        (lambda: flower.server_app(build, send="top-k"), "the server sends 'float32' or 'float16'"),
        (lambda: flower.server_app(build, timeout=0.0), "timeout must be a number of seconds above 0"),
    ],
)
def test_arguments_are_checked(use: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        use()


def test_build_returns_what_can_be_trained() -> None:
    _, (report,) = run(Grid(flower.client_app(lambda context: 5, part), clients=2), rounds=1)
    assert "build must return an ortrain.Model, or a pair of a Module and an Optimizer, got int" in report.refused[0]


def test_without_flower_the_error_names_the_extra() -> None:
    script = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "flwr":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import ortrain
assert "ortrain.flower" not in sys.modules
try:
    ortrain.flower.server_app(lambda context: None)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    sentence = "ortrain.flower needs the package flwr, which is not installed: pip install 'ortrain[flower]'"
    assert done.stdout.strip() == sentence


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples" / "federated"))
    for name in ("federated_digits", *(f"federated_digits.{part}" for part in ("task", "client_app", "server_app"))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    output = tmp_path / "digits.onnx"
    config = {"rounds": 2, "clients": 2, "epochs": 1, "learning-rate": 0.003, "send": "top-k", "output": str(output)}
    grid = Grid(importlib.import_module("federated_digits.client_app").app, clients=2)
    for context in grid.contexts.values():
        context.run_config.update(config)
        context.node_config["num-partitions"] = 10
    context = context_of()
    context.run_config.update(config)
    importlib.import_module("federated_digits.server_app").app(grid, context)
    assert re.search(r"round 2: test accuracy 0\.\d+, \d+ bytes received\nfinal model \w{64}", capsys.readouterr().out)
    assert ortrain.InferenceSession(output).get_inputs()[0].name == "x"
