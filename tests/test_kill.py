"""Processes killed during a save: the file is a complete state at every moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import RECORDS, Run
from replaying import batches_of

from ortrain.api import CheckpointState, Module, Optimizer

CASE = RECORDS / "mlp_adamw_ce"
KILLS = 200

# Program of a parent that forks children which save in a loop, and kills each at a random moment.
PARENT = """
import os, random, signal, sys, time
from ortrain.api import CheckpointState

source, path, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(1)
state = CheckpointState.load_checkpoint(source)


def save_forever(start):
    number = start
    while True:
        number += 1
        for _, parameter in state.parameters:
            parameter.data[...] = number % 1000
        state.properties["number"] = number
        CheckpointState.save_checkpoint(state, path)


def check():
    found = CheckpointState.load_checkpoint(path)
    number = found.properties["number"]
    for name, parameter in found.parameters:
        assert (parameter.data == number % 1000).all(), (number, name)
    return number


state.properties["number"] = 0
for _, parameter in state.parameters:
    parameter.data[...] = 0
CheckpointState.save_checkpoint(state, path)
last, moved = 0, 0
for _ in range(kills):
    child = os.fork()
    if child == 0:
        try:
            save_forever(last)
        finally:
            os._exit(1)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    number = check()
    assert number >= last, (number, last)
    moved += number > last
    last = number
CheckpointState.save_checkpoint(state, path)
print(moved, last)
"""


def test_killed_saves_leave_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    arguments = [sys.executable, "-c", PARENT, str(CASE / "checkpoint"), str(path), str(KILLS)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moved, last = map(int, done.stdout.split())
    assert moved > KILLS / 4, "enough processes reached a save"
    assert last > moved
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"], "a killed save leaves no other file"


# Program that trains from a checkpoint, saves it after each step, and kills itself after some steps.
TRAINER = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[4])
from replaying import batches_of
from ortrain.api import CheckpointState, Module, Optimizer

case, path, kill_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
state = CheckpointState.load_checkpoint(path)
module = Module(case / "training_model.onnx", state)
optimizer = Optimizer(case / "optimizer_model.onnx", module)
begin = state.properties["steps"] if "steps" in state.properties else 0
batches = batches_of(case)
for number in range(begin, 12):
    batch = batches[number % len(batches)]
    module(**{name: batch[name] for name in module.input_names()})
    optimizer.step()
    module.lazy_reset_grad()
    optimizer.set_learning_rate(0.01 / (1 + number))
    state.properties["steps"] = number + 1
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
    if number - begin == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def run(path: Path, kill_after: int) -> int:
        tests = str(Path(__file__).parent)
        arguments = [sys.executable, "-c", TRAINER, str(CASE), str(path), str(kill_after), tests]
        return subprocess.run(arguments, capture_output=True, text=True, check=False).returncode

    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for path in (unbroken, broken):
        path.write_bytes((CASE / "checkpoint").read_bytes())
    assert run(unbroken, 100) == 0
    ends = []
    while not ends or ends[-1] != 0:
        ends.append(run(broken, 3))
    assert len(ends) == 3 + 1
    assert all(end < 0 for end in ends[:-1])
    assert broken.read_bytes() == unbroken.read_bytes()


def test_loaded_state_continues_training(tmp_path: Path) -> None:
    """The loaded state equals the saved one, with moments, step and learning rate."""
    run = Run(CASE)
    batch = batches_of(CASE)[0]
    inputs = [batch[name] for name in run.module.input_names()]
    run.module(*inputs)
    run.optimizer.step()
    run.optimizer.set_learning_rate(0.125)
    CheckpointState.save_checkpoint(run.state, tmp_path / "c", include_optimizer_state=True)
    state = CheckpointState.load_checkpoint(tmp_path / "c")
    module = Module(CASE / "training_model.onnx", state)
    optimizer = Optimizer(CASE / "optimizer_model.onnx", module)
    assert optimizer.get_learning_rate() == 0.125
    for pair in ((run.module, run.optimizer), (module, optimizer)):
        pair[0].lazy_reset_grad()
        pair[0](*inputs)
        pair[1].step()
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, run.state.parameters[name].data)
