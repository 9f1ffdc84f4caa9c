"""Tests of the command python -m ortrain dump."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from conftest import RECORDS, Run
from onnx import TensorProto, helper, numpy_helper

import ortrain
from ortrain import artifacts
from ortrain.__main__ import main

PERCEPTRON = Path(__file__).parent.parent / "examples" / "perceptron.onnx"
SHAPES = {"x": [32, 64]}
# All passes in the order in which they run, including optional ones.
PASSES = (
    "remove_unused",
    "inline_constants",
    "dead_elements",
    "compact_pool_indices",
    "sink_scatter_add",
    "fuse_attention",
    "fuse_chains",
    "precompute_derivatives",
    "fusion",
    "choose_precision",
    "weight_prepacking",
    "fallible_first",
    "mask_packing",
    "batch_tiling",
    "horizontal_fusion",
    "memory_plan",
)
STAGES = (
    "onnx",
    "graph",
    "gradient",
    "lowered",
    "program",
    "memory",
    "cpu_kernels",
    "kernels",
    "cuda_kernels",
    "passes",
)
REQUIRED = {"remove_unused", "choose_precision", "fallible_first", "memory_plan"}


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("onnx", ["opset_import", "= Gemm <transB: int = 1> (x, ", "float[96, 64]"]),
        ("lowered", ["draft: 3 instructions", " Map "]),
        ("memory", ["work ", '"x"', "input", "output"]),
        ("cpu_kernels", ["instruction set", "0 MatMul", "epilogue", '(Gemm) + node "relu" (Relu)']),
        ("graph", ["Gemm", "Relu", "fc1.weight", "float32[batch, 64]"]),
        ("program", ["MatMul", "bytes"]),
        (
            "kernels",
            ["2 launches, 2 kernels", "of instruction 0 MatMul (work", '(Gemm) + node "relu" (Relu)', "@compute"],
        ),
        ("cuda_kernels", ["2 launches, 2 kernels", "of instruction 0 MatMul (work", "__global__", "library"]),
    ],
)
def test_stages(stage: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(PERCEPTRON), "--stage", stage, "--shape", "x=32,64"]) == 0
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
    assert printed == ortrain.dump(PERCEPTRON, stage, {"x": [32, 64]})


def test_shapes_decide_sizes() -> None:
    small, large = (ortrain.dump(PERCEPTRON, "program", {"x": [batch, 64]}) for batch in (32, 64))
    assert "float32[2048]" in small
    assert "float32[4096]" in large


def test_gradient() -> None:
    """A model that ends in its loss has a gradient stage, and a training model has its own gradient."""
    loss = ortrain.dump(RECORDS / "mlp_sgd_mse" / "eval_model.onnx", "gradient")
    assert "ReduceMean" in loss
    training = ortrain.dump(RECORDS / "mlp_adamw_ce" / "training_model.onnx", "gradient")
    assert "ReluGrad" in training
    # For an output that is no scalar, its gradient is a further input.
    product = ortrain.dump(PERCEPTRON, "gradient")
    assert "input    logits_grad: float32[batch, 10]" in product
    assert "output   fc1.weight_grad: float32[96, 64]" in product


def test_training_model(run: Run) -> None:
    printed = ortrain.dump(run.folder / "training_model.onnx", "program", {"x": [8, 10], "labels": [8]})
    assert "fc1.weight_grad.accumulation.buffer" in printed
    assert "(overwrite)" in printed
    assert "(accumulate)" in printed


def test_optimizer_model(run: Run) -> None:
    printed = ortrain.dump(run.folder / "optimizer_model.onnx", "program", {"params": [1000]})
    assert "plane" in printed
    assert "Sqrt" in printed


def run_command(*arguments: str, passes: str | None = None, isa: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; ``ORTRAIN_PASSES`` may disable passes."""
    command = [sys.executable, "-m", "ortrain", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "ORTRAIN_PASSES"}
    environment["ORTRAIN_ISA"] = isa
    if passes is not None:
        environment["ORTRAIN_PASSES"] = passes
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the effect, the changes and the instructions after each pass. Fusion merges the activation."""
    assert main(["dump", str(PERCEPTRON), "--passes", "--shape", "x=32,64"]) == 0
    printed = capsys.readouterr().out
    assert printed == ortrain.dump(PERCEPTRON, "passes", SHAPES)
    about, (header, *rows) = (part.splitlines() for part in printed.split("program 0\n"))
    assert about[0] == "passes, in the order in which they run"
    assert tuple(line.split()[0] for line in about[1:]) == PASSES
    assert "fuses maps into the producers of their operands and the consumers of their results" in printed
    assert header.split() == ["pass", "changes", "instructions"]
    assert tuple(row.split()[0] for row in rows) == PASSES
    counts = {name: (int(changes), int(behind)) for name, changes, behind in map(str.split, rows)}
    assert counts["precompute_derivatives"] == (0, 3)
    assert counts["fusion"] == (1, 2)
    assert counts["choose_precision"] == (0, 2)


def test_programs_of_a_pass(run: Run) -> None:
    """A training step consists of several programs; each has its own numbers."""
    shapes = {"x": [8, 10], "labels": [8]}
    printed = ortrain.dump(run.folder / "training_model.onnx", "passes", shapes)
    programs = re.findall(r"^program (\d+)$", printed, re.MULTILINE)
    assert programs == list(map(str, range(len(programs))))
    behind = ortrain.dump(run.folder / "training_model.onnx", "memory_plan", shapes)
    assert re.findall(r"^program (\d+)$", behind, re.MULTILINE) == programs


@pytest.mark.parametrize(
    ("stage", "instructions", "has_offsets"),
    [("compact_pool_indices", 3, False), ("fusion", 2, False), ("memory_plan", 2, True)],
)
def test_program_after_a_pass(
    stage: str, instructions: int, has_offsets: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", str(PERCEPTRON), "--stage", stage, "--shape", "x=32,64"]) == 0
    printed = capsys.readouterr().out
    assert printed == ortrain.dump(PERCEPTRON, stage, SHAPES)
    assert printed.startswith(f"program 0\ndraft: {instructions} instructions, ")
    names = re.findall(r"^ +\d+ (\w+) +b\d+ <- ", printed, re.MULTILINE)
    assert names == (["MatMul", "Map", "MatMul"] if instructions == 3 else ["MatMul", "MatMul"])
    # Work buffers have offsets only after memory planning.
    assert ("work@" in printed) == has_offsets
    assert '"x"  input' in printed


def test_onnx_text_is_onnx() -> None:
    """ONNX's parser reads the text, and finds the nodes, types and values of the model."""
    for text in (BRANCHES, BODY, SHORT):
        model = onnx.parser.parse_model(text)
        read = onnx.parser.parse_model(ortrain.dump(model, "onnx"))
        assert read == model


def test_program_before_the_first_pass() -> None:
    """The first pass starts with the program as lowered."""
    before, after = (ortrain.dump(PERCEPTRON, stage, SHAPES) for stage in ("lowered", PASSES[0]))
    assert before == after
    before, after = (ortrain.dump(PERCEPTRON, stage, SHAPES) for stage in ("lowered", "fusion"))
    assert before != after


def test_memory_plan(run: Run) -> None:
    """Buffers with overlapping live ranges share no byte, and the arena ends with the last byte of a buffer."""
    shapes = {"x": [8, 10], "labels": [8]}
    printed = ortrain.dump(run.folder / "training_model.onnx", "memory", shapes)
    total, instructions = map(int, re.findall(r"work (\d+) bytes, (\d+) instructions", printed)[0])
    position = {"input": -1, "output": instructions}
    rows = [line.split(maxsplit=4) for line in printed.splitlines()[2:]]
    assert len(rows) > 5
    ends = []
    plan = [(int(a), int(b), *(position.get(at, at) for at in (c, d))) for a, b, c, d, _ in rows]
    for offset, size, start, end in plan:
        ends.append(offset + size)
        for other_offset, other_size, other_start, other_end in plan:
            if int(start) < int(other_end) and int(other_start) < int(end) and offset != other_offset:
                assert offset + size <= other_offset or other_offset + other_size <= offset
    assert total - 256 < max(ends) <= total


@pytest.mark.parametrize("level", ["portable", "avx2"])
def test_kernels_of_an_instruction_set(level: str) -> None:
    done = run_command("dump", str(PERCEPTRON), "--stage", "cpu_kernels", "--shape", "x=32,64", isa=level)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.startswith("program 0: instruction set ")
    assert [row.split()[1] for row in rows] == ["MatMul", "MatMul"]
    if level == "portable":
        assert header.endswith("portable")
        assert "product.panels, 4x8" in rows[0]


def test_kernels_are_excluded_and_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ORTRAIN_KERNELS`` changes the kernels of instructions; an unknown name is an error."""

    def first_kernel(kernels: str) -> str:
        monkeypatch.setenv("ORTRAIN_KERNELS", kernels)
        done = run_command("dump", str(PERCEPTRON), "--stage", "cpu_kernels", "--shape", "x=32,64", isa="portable")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()[1]

    assert "product.panels" in first_kernel("")
    assert "product.few_rows" in first_kernel("+product.few_rows")
    assert "product.few_rows" in first_kernel("-product.panels,+product.few_rows")
    monkeypatch.setenv("ORTRAIN_KERNELS", "-conv.winnograd")
    done = run_command("dump", str(PERCEPTRON), "--stage", "cpu_kernels", "--shape", "x=32,64")
    assert done.returncode == 1
    assert 'ORTRAIN_KERNELS has the unknown entry "-conv.winnograd"' in done.stderr
    monkeypatch.setenv("ORTRAIN_KERNELS", "-product.panels")
    done = run_command("dump", str(PERCEPTRON), "--stage", "cpu_kernels", "--shape", "x=32,64", isa="portable")
    assert done.returncode == 1
    assert "ORTRAIN_KERNELS excludes all kernels" in done.stderr


def test_last_pass_makes_the_program() -> None:
    """The program after the last pass is the one that runs: the same instructions over the same buffers."""
    behind, program = (ortrain.dump(PERCEPTRON, stage, SHAPES) for stage in ("memory_plan", "program"))
    lines = [line.strip() for line in behind.splitlines()[2:]]
    assert lines == [line.strip() for line in program.splitlines()[-len(lines) :]]


@pytest.mark.parametrize("device", ["vulkan", "metal:1", "dx12", "webgpu"])
def test_kernels_of_a_device(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of these devices use the same kernels, and do not have to be present."""
    assert main(["dump", str(PERCEPTRON), "--stage", "kernels", "--shape", "x=32,64", "--device", device]) == 0
    assert capsys.readouterr().out == ortrain.dump(PERCEPTRON, "kernels", SHAPES)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_kernels_of_nvidia(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(PERCEPTRON), "--stage", "kernels", "--shape", "x=32,64", "--device", device]) == 0
    assert capsys.readouterr().out == ortrain.dump(PERCEPTRON, "cuda_kernels", SHAPES)


def test_devices_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(PERCEPTRON), "--stage", "kernels", "--device", "cpu"]) == 1
    assert (
        "device must be 'cuda', 'vulkan', 'metal', 'dx12' or 'webgpu' for the stage of kernels, got 'cpu'"
        in capsys.readouterr().err
    )
    with pytest.raises(ortrain.InvalidArgumentError, match='a device requires the stage "kernels"'):
        ortrain.dump(PERCEPTRON, "program", device="vulkan")


def test_unknown_stage() -> None:
    with pytest.raises(ortrain.InvalidArgumentError) as raised:
        ortrain.dump(PERCEPTRON, "fuson")
    sentence = str(raised.value)
    known = f"stages are {', '.join(STAGES)}, and each pass: {', '.join(PASSES)}"
    assert sentence == f'there is no stage "fuson"; {known}; did you mean "fusion"?'
    done = run_command("dump", str(PERCEPTRON), "--stage", "fuson")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"python -m ortrain: {sentence}\n")
    # A name without a similar stage gets no suggestion.
    with pytest.raises(ortrain.InvalidArgumentError, match=r'^there is no stage "assembly"; stages are onnx'):
        ortrain.dump(PERCEPTRON, "assembly")


def test_passes_are_left_out() -> None:
    """The variable disables passes. It is read once, so each case has a process of its own."""
    arguments = ("dump", str(PERCEPTRON), "--passes")
    done = run_command(*arguments, passes=" -fusion,-mask_packing ,")
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout.split("program 0\n")[1]
    left = tuple(name for name in PASSES if name not in {"fusion", "mask_packing"})
    assert tuple(row.split()[0] for row in table.splitlines()[1:]) == left
    assert run_command(*arguments, passes="").stdout == ortrain.dump(PERCEPTRON, "passes")


@pytest.mark.parametrize("name", ["-fuse", "fusion", "-memory_plan"])
def test_passes_that_cannot_be_left_out(name: str) -> None:
    """An unknown pass, a name without its sign, and a pass that every program needs."""
    done = run_command("dump", str(PERCEPTRON), "--stage", "program", passes=f"-mask_packing,{name}")
    known = ", ".join(f"-{other}" for other in PASSES if other not in REQUIRED)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f'python -m ortrain: the model {PERCEPTRON}: ORTRAIN_PASSES: unknown entry "{name}"; expected names of '
        f"optional passes, each after a -: {known}\n"
    )


def test_command_line() -> None:
    done = run_command("dump", str(PERCEPTRON))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ortrain.dump(PERCEPTRON)
    done = run_command("dump", "nowhere.onnx")
    assert (done.returncode, done.stdout) == (1, "")
    sentence = "cannot read nowhere.onnx: No such file or directory (os error 2)"
    assert done.stderr == f"python -m ortrain: {sentence}\n"
    done = run_command("dump", str(PERCEPTRON), "--shape", "x=a,b")
    assert done.returncode == 2
    assert "expected NAME=2,3, got 'x=a,b'" in done.stderr
    assert run_command().returncode == 2


@pytest.mark.parametrize("op", ["Relu", "LeakyRelu", "Elu", "Clip", "Abs", "HardSwish", "Softplus", "Max", "Min"])
def test_activations_keep_no_mask(op: str, tmp_path: Path) -> None:
    """No mask is stored between the forward and the backward pass: the comparison is recomputed from live values."""
    rows, size = 64, 128
    more = {"Clip": ["zero", "six"], "Max": ["other"], "Min": ["other"]}.get(op, [])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["hidden"]),
        helper.make_node("MatMul", ["x", "v"], ["other"]),
        helper.make_node(op, ["hidden", *more], ["active"]),
        helper.make_node("MatMul", ["active", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, size]) for name in "xy")
    weights = {"w": np.eye(size), "v": np.eye(size), "zero": np.zeros(()), "six": np.full((), 6.0)}
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, op, [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model, requires_grad=["w", "v"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    printed = ortrain.dump(tmp_path / "training_model.onnx", "program", {"x": [rows, size], "target": [rows, size]})
    assert f"float32[{rows * size}]" in printed
    assert f"bool[{rows * size}]" not in printed


def test_stage_of_a_pass_that_is_left_out() -> None:
    done = run_command("dump", str(PERCEPTRON), "--stage", "fusion", passes="-fusion")
    assert (done.returncode, done.stdout) == (1, "")
    assert 'the pass "fusion" did not run: ' in done.stderr
    assert "ORTRAIN_PASSES excludes it" in done.stderr


BRANCHES = """
<ir_version: 10, opset_import: ["" : 21]>
graph (float[3, 4] x, bool which) => (float[3, 4] y)
{
    y = If (which) <
        then_branch = then_branch () => (float[3, 4] a) { a = Exp(x) },
        else_branch = else_branch () => (float[3, 4] b) { b = Sin(x) }
    >
}
"""
SHORT = """
<ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
net (float[batch, 2] x, seq(float) s) => (float[batch, 2] y)
<float[2] bias = {0.5, -1.0}, int64[1] "axes.0" = {1}>
{
    ["first/0"] sum = Add (x, bias)
    wide = LeakyRelu <alpha: float = 0.25> (sum)
    one = Constant <value: tensor = float {1.0}> ()
    part, "rest.1" = Split <axis: int = 0> (wide)
    y = mine.Twice <names: strings = ["a", "b"], sizes: ints = [1, 2]> (part)
}
<domain: "mine", opset_import: ["" : 17]>
Twice <names, sizes> (x) => (y)
{
    y = Add (x, x)
}
"""
# More rows than the limit for unrolling.
BODY = """
<ir_version: 10, opset_import: ["" : 21]>
graph (float[3000, 4] x, float[4] start) => (float[4] last, float[3000, 4] sums)
{
    last, sums = Scan <num_scan_inputs = 1, body = body (float[4] old, float[4] row) => (float[4] new, float[4] out)
    {
        new = Add(old, row)
        out = Exp(new)
    }> (start, x)
}
"""


@pytest.mark.parametrize(("text", "instructions"), [(BRANCHES, ["Exp", "Sin"]), (BODY, ["Exp"])])
def test_programs_of_branches_and_bodies(text: str, instructions: list[str]) -> None:
    """Each branch, and the body of a loop, has a program after each pass."""
    model = onnx.parser.parse_model(text)
    printed = ortrain.dump(model, "memory_plan")
    assert re.findall(r"= (Exp|Sin) ", printed) == instructions
    programs = re.findall(r"^program (\d+)$", printed, re.MULTILINE)
    assert programs == list(map(str, range(len(instructions))))
    assert re.findall(r"^program (\d+)$", ortrain.dump(model, "passes"), re.MULTILINE) == programs
