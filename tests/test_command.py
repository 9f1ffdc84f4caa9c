"""The command ``ortrain``, also as ``python -m ortrain``: its output and its exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from conftest import RECORDS, Run

import ortrain
from ortrain.__main__ import main
from ortrain.api import CheckpointState

MODULE = [sys.executable, "-m", "ortrain"]
COMMANDS = ("checkpoint", "dump", "inspect", "operators")


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


def ran(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_command_is_installed(tmp_path: Path) -> None:
    (entry,) = entry_points(group="console_scripts", name="ortrain")
    assert entry.load() is main
    script = Path(sys.executable).with_name("ortrain")
    for command, name in [([str(script)], "ortrain"), (MODULE, "python -m ortrain")]:
        done = ran([*command, "--version"], tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"ortrain {version('ortrain')}\n", "")
        done = ran(command, tmp_path)
        assert (done.returncode, done.stderr) == (2, "")
        assert done.stdout.startswith(f"usage: {name} [-h] [--version] COMMAND ...")
        done = ran([*command, "checkpoint", "nowhere"], tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{name}: there is no file nowhere\n")


@pytest.mark.parametrize("arguments", [["operators"], ["inspect", ortrain.examples.convnet(), "--all"]])
def test_a_reader_that_leaves(arguments: list[str], tmp_path: Path) -> None:
    """The reader of the output closes the pipe: no traceback, and exit status 141."""
    command = [*MODULE, *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command}" in text
    assert "Run COMMAND --help for the arguments of a command." in text
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out == text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ortrain {ortrain.__version__}\n"


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chekpoint"])
    assert end.value.code == 2
    assert "invalid choice: 'chekpoint'" in capsys.readouterr().err


FRESH = """\
parameter         type     shape         trained
bn1.bias          float32  [6]           yes
bn1.running_mean  float32  [6]           no
bn1.running_var   float32  [6]           no
bn1.weight        float32  [6]           yes
conv1.bias        float32  [6]           yes
conv1.weight      float32  [6, 2, 3, 3]  yes
fc.bias           float32  [4]           yes
fc.weight         float32  [4, 96]       yes

8 parameters: 6 trained, 2 not trained; 2,104 bytes
optimizer state  none (moments start at zero)
optimizer steps  0
training steps   0
learning rate    none
seed             0
"""


def test_a_fresh_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["checkpoint", str(RECORDS / "cnn_bn_adamw_ce" / "checkpoint")], capsys) == FRESH


TRAINED = """\
parameter   type     shape     trained
fc1.bias    float32  [24]      yes
fc1.weight  float32  [10, 24]  yes
fc2.bias    float32  [5]       yes
fc2.weight  float32  [24, 5]   yes

4 parameters: 4 trained, 0 not trained; 1,556 bytes
optimizer state  present
optimizer steps  1
training steps   2
learning rate    0.0125
seed             7
property best    0.25
property epoch   3
property name    'digits'
"""


def test_a_checkpoint_of_a_run(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from test_surface import LABELS, X

    run.module(X, LABELS)
    run.module(X, LABELS)
    run.optimizer.set_learning_rate(0.0125)
    run.optimizer.step()
    run.state.seed = 7
    for name, value in {"epoch": 3, "best": 0.25, "name": "digits"}.items():
        run.state.properties[name] = value
    path = tmp_path / "checkpoint"
    CheckpointState.save_checkpoint(run.state, path, include_optimizer_state=True)
    assert printed(["checkpoint", str(path)], capsys) == TRAINED
    # Without optimizer state the optimizer steps are missing; the training steps and the seed are present.
    CheckpointState.save_checkpoint(run.state, path)
    text = printed(["checkpoint", str(path)], capsys)
    assert "optimizer steps  0\ntraining steps   2\nlearning rate    none\nseed             7\n" in text


def test_a_checkpoint_of_onnxruntime_training(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["checkpoint", str(RECORDS / "checkpoint_resume" / "checkpoint_step3_optim")], capsys)
    assert "\noptimizer state      present\noptimizer steps      3\n" in text


def test_a_nominal_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["checkpoint", str(RECORDS / "checkpoint_resume" / "nominal_checkpoint")], capsys)
    assert "fc1.bias    float32  unknown  no\n" in text
    assert "\n4 parameters: 3 trained, 1 not trained; nominal checkpoint (names and types without values)\n" in text


def test_invalid_checkpoints(capsys: pytest.CaptureFixture[str], ours: Callable[[str], Path], tmp_path: Path) -> None:
    model = ours("mlp_adamw_ce") / "training_model.onnx"
    assert failing(["checkpoint", str(model)], capsys).endswith(
        f"ortrain: {model} is a training model, not a checkpoint; give the file that generate_artifacts wrote beside "
        "it (checkpoint), or one that save_checkpoint wrote\n"
    )
    cut = tmp_path / "cut"
    cut.write_bytes((RECORDS / "mlp_adamw_ce" / "checkpoint").read_bytes()[:100])
    sentence = f"ortrain: {cut}: the checkpoint is cut short or damaged: an offset points past its end ("
    assert sentence in failing(["checkpoint", str(cut)], capsys)
