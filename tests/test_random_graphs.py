"""Random graphs, and the tool that makes, checks and shrinks them.

``ORTRAIN_GRAPH_SEED`` selects other graphs, ``ORTRAIN_GRAPHS`` sets the number of graphs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.parser import parse_model
from random_graphs import checks, shrinking
from random_graphs.cases import Case, Trainable, all_graphs, generate, pruned
from random_graphs.checks import Report
from random_graphs.fused import FUSED
from random_graphs.operators import IGNORED
from random_graphs.quantized import STEPS
from random_graphs.running import Run, default_processes
from random_graphs.workers import INVALID, Worker, check_all, checked

import ortrain

# Every run has the same graphs, so that a new failure is due to a change of the code. (230023 has no other meaning.)
SEED = int(os.environ.get("ORTRAIN_GRAPH_SEED", "230023"))
COUNT = int(os.environ.get("ORTRAIN_GRAPHS", "300"))
# Seconds for a graph in the development profile on a busy machine, and seconds for shrinking a failure.
TIMEOUT, SHRINK = 120, 60
# Minimum number of operators, and minimum share of graphs for each kind of comparison. Fewer comparisons prove less.
OPERATORS = 80
SHARES = {
    "forward": 0.9,
    "slope": 0.6,
    "gradient": 0.6,
    "threads": 0.6,
    "second batch size": 0.6,
    "memory limit": 0.5,
    "step": 0.5,
}
# Maximum share of slopes at kinks, which allow no comparison.
KINKS = 0.05


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    # The number of threads belongs to the process.
    yield
    checks.set_threads(0)


def test_random_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No graph differs between runs, crashes or hangs."""
    run = Run(default_processes(), TIMEOUT, SHRINK, tmp_path)
    lines: list[str] = []
    start = time.monotonic()
    failures = run.over(range(SEED, SEED + COUNT), say=lines.append)
    with capsys.disabled():
        print(f"\n{COUNT} random graphs from seed {SEED} in {time.monotonic() - start:.0f} s (ORTRAIN_GRAPH_SEED)")
    assert not failures, "\n".join(lines)
    assert run.checked == COUNT
    if COUNT >= 300:
        assert len(run.operators) >= OPERATORS
        for what, share in SHARES.items():
            assert run.compared[what] >= share * COUNT, (what, run.summary())
    assert run.compared["slope at a kink"] <= KINKS * run.compared["slope"] + 2, run.summary()


# The generator.


def test_a_seed_makes_one_graph() -> None:
    for seed in range(20):
        assert generate(seed).stored() == generate(seed).stored()
    assert len({generate(seed).model.SerializeToString() for seed in range(20)}) == 20


def test_all_patterns_are_drawn() -> None:
    """The generator draws patterns that a change could easily lose."""
    cases = [generate(seed) for seed in range(400)]
    operators = set().union(*(case.operators() for case in cases))
    assert operators >= {"If", "Loop", "Scan", "RNN", "GRU", "LSTM", "ReverseSequence", "TopK", "GatherND", "ScatterND"}
    assert len(operators) >= OPERATORS
    assert operators >= FUSED | {name for name in STEPS if name.startswith("Q")}
    assert operators >= {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"}
    assert 0.05 < np.mean([case.special for case in cases]) < 0.3
    arrays = [array for case in cases for feed in case.feeds for array in feed.values()]
    assert any(np.isnan(array).any() for array in arrays if array.dtype.kind == "f")
    assert {case.rounding for case in cases} == {None, 2.0**-11, 2.0**-8}
    assert {case.operators() & {"RNN", "GRU", "LSTM"} != set() for case in cases if case.rounding} == {True}
    assert 0.03 < np.mean([bool(case.stops) for case in cases]) < 0.2
    nodes = [node for case in cases for graph in all_graphs(case.model.graph) for node in graph.node]
    assert any(attribute.i == IGNORED for node in nodes for attribute in node.attribute)
    assert any(
        attribute.s == b"cubic" for node in nodes for attribute in node.attribute if node.op_type == "GridSample"
    )
    nested = [len(all_graphs(case.model.graph)) > 4 for case in cases]
    assert any(nested)
    # A recurrent layer over an initializer, with lengths.
    over_parameters = [
        node
        for case in cases
        for node in case.model.graph.node
        if node.op_type in ("RNN", "GRU", "LSTM") and node.input[0] in case.trained and list(node.input[4:5]) > [""]
    ]
    assert {bytes(a.s) for node in over_parameters for a in node.attribute if a.name == "direction"} == {
        b"forward",
        b"reverse",
        b"bidirectional",
    }
    # Values with several readers, and inputs with two batch sizes.
    readers = [sum(name in node.input for node in case.model.graph.node) for case in cases for name in case.trained]
    assert max(readers) >= 3
    assert any(one[name].shape != other[name].shape for case in cases for one, other in [case.feeds] for name in one)


# The checks.


def small_case() -> Case:
    """Return a case with two parameters, an input with a batch axis, and a value with two readers."""
    float_ = TensorProto.FLOAT
    rng = np.random.default_rng(1)
    w, b = rng.uniform(0.2, 1, (3, 2)).astype(np.float32), rng.uniform(0.2, 1, 2).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["y"]),
        helper.make_node("Softplus", ["sum"], ["z"]),
        helper.make_node("Mul", ["y", "z"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", float_, ["batch", 3])],
        [helper.make_tensor_value_info("out", float_, ["batch", 2])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    feeds = [{"x": rng.uniform(-1, 1, (count, 3)).astype(np.float32)} for count in (4, 2)]
    return Case(model, feeds, ["w", "b"])


def test_a_right_graph_passes() -> None:
    report = checks.check(small_case())
    assert report.kind is None, report.detail
    assert report.compared["slope"] == 2
    assert set(report.compared) >= {"forward", "gradient", "threads", "second batch size", "step"}


def lost_part(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove a hundredth of one gradient."""
    return {**gradients, "b": gradients["b"] * gradients["b"].dtype.type(0.99)}


def lost_element(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    changed = gradients["w"].copy()
    changed[0, 0] = 0
    return {**gradients, "w": changed}


@pytest.mark.parametrize("tamper", [lost_part, lost_element])
def test_a_wrong_gradient_is_found(tamper: checks.Slope) -> None:
    report = checks.check(small_case(), tamper)
    assert report.kind == "slope"
    assert "instead of" in report.detail


def only_float32(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return lost_part(gradients) if gradients["b"].dtype == np.float32 else gradients


def test_gradient_error_only_in_float32_is_found() -> None:
    report = checks.check(small_case(), only_float32)
    assert report.kind == "gradient on cpu"
    assert report.detail.startswith("b at batch 0: 2 of 2 elements: ")


def stopped_case() -> Case:
    """Return the small case; one of the two readers of the sum stops the gradient."""
    case = small_case()
    case.stops = ["z"]
    return case


def test_a_graph_with_a_stop_passes() -> None:
    report = checks.check(stopped_case())
    assert report.kind is None, report.detail
    assert report.compared["slope"] == 2


def test_a_stop_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks.with_loss

    def without_stops(*arguments: Any) -> Trainable:
        return replace(made(*arguments), stops=[])

    monkeypatch.setattr(checks, "with_loss", without_stops)
    assert checks.check(stopped_case()).kind == "slope"


def quantized_case() -> Case:
    """Return a case with a product of integers; the integers of ``w`` and of some activations are out of range."""
    rng = np.random.default_rng(1)
    w, b = rng.uniform(-1, 1, (3, 2)).astype(np.float32), rng.uniform(-1, 1, 2).astype(np.float32)
    constants = {
        "s": np.float32(0.013),
        "z": np.uint8(130),
        "ws": np.float32(0.007),
        "wz": np.int8(0),
        "ys": np.float32(0.0061),
        "yz": np.uint8(120),
    }
    nodes = [
        helper.make_node("Add", ["x", "b"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "s", "z"], ["q"]),
        helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"]),
        helper.make_node("QLinearMatMul", ["q", "s", "z", "wq", "ws", "wz", "ys", "yz"], ["yq"]),
        helper.make_node("Transpose", ["yq"], ["moved"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["moved", "ys", "yz"], ["y"]),
        helper.make_node("Tanh", ["y"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [3, "batch"])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in {**constants, "w": w.T, "b": b}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    feeds = [{"x": rng.uniform(-1, 1, (count, 2)).astype(np.float32)} for count in (4, 2)]
    return Case(model, feeds, ["w", "b"])


def test_slopes_pass_a_rounding() -> None:
    report = checks.check(quantized_case())
    assert report.kind is None, report.detail
    assert report.compared["slope"] == 2
    assert "slope at a kink" not in report.compared


@pytest.mark.parametrize("tamper", [lost_part, lost_element])
def test_a_wrong_gradient_before_a_rounding_is_found(tamper: checks.Slope) -> None:
    assert checks.check(quantized_case(), tamper).kind == "slope"


class Wrong:
    """A session that changes the last row of every result slightly."""

    def __init__(self, session: ortrain.InferenceSession) -> None:
        self.session = session

    def run(self, *arguments: object) -> list[np.ndarray]:
        results = [np.array(one) for one in self.session.run(*arguments)]
        for one in results:
            one[-1:] *= 1.001
        return results


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ortrain.InferenceSession
    monkeypatch.setattr(checks.ortrain, "InferenceSession", lambda *a, **k: Wrong(make(*a, **k)))
    report = checks.check(small_case())
    assert report.kind == "forward on cpu"
    assert report.detail.startswith("out at batch 0: ")


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = checks.Artifacts.step

    def other(self: checks.Artifacts, at: int, **arguments: Any) -> checks.Step:
        made = step(self, at, **arguments)
        if "options" in arguments and arguments["options"].intra_op_num_threads == 3:
            made.gradients["w"] = np.nextafter(made.gradients["w"], np.float32(np.inf))
        return made

    monkeypatch.setattr(checks.Artifacts, "step", other)
    report = checks.check(small_case())
    assert report.kind == "threads"
    assert report.detail.startswith("w at 3 threads instead of 1, batch 0: ")


def test_positions_of_nan_and_infinity_are_compared() -> None:
    nan = np.array([1, np.nan, np.inf], np.float32)
    assert checks.close(nan.copy(), nan, 0)
    for other in ([1, 2, np.inf], [1, np.nan, -np.inf], [1, np.inf, np.nan], [np.nan, np.nan, np.inf]):
        assert not checks.close(np.array(other, np.float32), nan, 1)


def kink() -> Case:
    """Return a case with the loss |p| at p = 0, where both one-sided slopes are correct."""
    graph = helper.make_graph(
        [helper.make_node("Abs", ["p"], ["y"])],
        "kink",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.zeros(1, np.float32), "p")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return Case(model, [{}, {}], ["p"])


def test_a_kink_is_not_compared() -> None:
    report = checks.check(kink())
    assert report.kind is None, report.detail
    assert report.compared["slope at a kink"] > 0
    assert "slope" not in report.compared


def test_rounding_errors_of_the_oracle_are_no_failures() -> None:
    """The sum over a period is zero, and onnxruntime returns its rounding error."""
    model = parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        cancelled () => (float[1, 1] y)
        <int64[1, 1, 2] at = {0, 1},
         float[5, 1] p = {-0.9640276, -0.9640276, -0.9640276, -0.9640276, -0.9640276}>
        { spectrum = DFT (p) y = GatherND (spectrum, at) }
    """)
    report = checks.check(Case(model, [{}, {}], []))
    assert report.kind is None, report.detail
    assert report.compared["oracle inexact"] == 4


def test_a_gradient_of_an_unknown_rank_is_a_known_limit() -> None:
    model = parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        squeezed (float[n, 1, 3] x) => (float[n] y)
        <float[3] w = {0.5, 0.25, -0.75}>
        { s = Squeeze (x) y = MatMul (s, w) }
    """)
    feeds = [{"x": np.ones((count, 1, 3), np.float32)} for count in (4, 2)]
    report = checks.check(Case(model, feeds, ["w"]))
    assert report.kind is None, report.detail
    assert report.compared == {
        "forward": 1,
        "gradient of an unknown rank refused": 1,
        "no trained parameter": 1,
    }


# Shrinking.


def fails_with(operator: str, case: Case) -> Report:
    """Fail every graph with an operator."""
    return Report("artificial", "it is there") if operator in case.operators() else Report()


@pytest.mark.parametrize("operator", ["Softplus", "TopK", "LSTM", "Loop", "QGemm", "MoE"])
def test_a_failure_is_shrunk(operator: str) -> None:
    # Half-precision inputs keep their casts, so they are excluded.
    cases = (case for case in map(generate, range(10_000)) if case.rounding is None)
    before = next(case for case in cases if operator in case.operators() and len(case.model.graph.node) > 6)

    def fails(case: Case) -> Case | None:
        report = checked(case.stored(), partial(fails_with, operator))
        return Case.restored(report.settled) if report.kind == "artificial" and report.settled else None

    small = shrinking.shrink(before, fails, 60)
    assert operator in small.operators()
    assert len(small.model.graph.node) == 1
    assert small.size()[0] < before.size()[0]
    assert small.size()[1] <= before.size()[1]
    # The small graph still runs.
    assert checked(small.stored(), partial(fails_with, "nothing")).kind is None
    assert operator in small.text()


def test_unused_nodes_are_removed() -> None:
    case = small_case()
    del case.model.graph.output[:]
    case.model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    assert [node.op_type for node in pruned(case).model.graph.node] == ["MatMul", "Add", "Tanh"]


# Processes.


def dies_or_hangs(case: Case) -> Report:
    if case.seed % 4 == 1:
        os.abort()
    if case.seed % 4 == 2:
        time.sleep(1000)
    if case.seed % 4 == 3:
        raise ZeroDivisionError("no reason")
    return Report(operators=["Add"])


def test_crashes_and_hangs_are_failures() -> None:
    reports = dict(check_all(range(6), 2, 5, dies_or_hangs))
    kinds = [reports[seed].kind for seed in range(6)]
    assert kinds == [None, "crash", "hang", "raised ZeroDivisionError: no reason", None, "crash"]
    assert reports[1].detail == "the process ended with status -6"
    assert reports[2].detail == "no result after 5 s"


def test_a_graph_that_no_oracle_runs_is_no_failure_of_ours() -> None:
    case = small_case()
    case.model.graph.node[0].op_type = "Conv"
    worker = Worker(60)
    try:
        assert worker.check(case.stored()).kind == INVALID
    finally:
        worker.stop()


def test_a_failure_is_written(tmp_path: Path) -> None:
    seed = next(seed for seed in range(1000) if "Softplus" in generate(seed).operators())
    lines: list[str] = []
    run = Run(1, 60, 30, tmp_path, checker=partial(fails_with, "Softplus"))
    [failure] = run.over([seed], say=lines.append)
    assert failure.path is not None
    assert failure.path.name == f"artificial-{seed}.onnx"
    assert f"seed {seed}" in failure.path.with_suffix(".txt").read_text()
    assert "Softplus" in failure.path.with_suffix(".txt").read_text()
    assert Case.restored(failure.path.with_suffix(".case").read_bytes()).operators() == {"Softplus"}
    assert lines[0].startswith(f"seed {seed}, graph 1: artificial: ")
