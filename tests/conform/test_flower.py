"""Federated rounds with Flower: its messages, strategies and secure aggregation; simulation and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import environments
import pytest

import ortrain

ROOT = Path(__file__).parent.parent.parent
CHECKS = ROOT / "tests" / "in_flower" / "checks.py"
PACKAGES = Path(ortrain.__file__).parent.parent


@pytest.fixture(scope="module")
def python() -> Path:
    return environments.flower()


def variables(python: Path, home: Path | None = None) -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    found |= {"PYTHONPATH": str(PACKAGES), "PATH": f"{python.parent}{os.pathsep}{found['PATH']}"}
    found |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return found | ({} if home is None else {"FLWR_HOME": str(home)})


def result_of(python: Path, *arguments: str) -> object:
    done = subprocess.run(
        [python, CHECKS, *arguments], env=variables(python), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_tests_of_ci_with_flower_itself(python: Path) -> None:
    done = subprocess.run(
        # Flower 1.42 uses functions that newer versions of click call deprecated.
        [python, "-m", "pytest", "-W", "ignore::DeprecationWarning", ROOT / "tests" / "test_flower.py"],
        env=variables(python),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_secure_aggregation(python: Path) -> None:
    """Clients send masked integers of 22 bits over a range of 16; their mean is the plain one but for rounding."""
    distance = result_of(python, "secure_aggregation")
    print(f"distance from the plain mean: {distance:.1e}")
    assert isinstance(distance, float)
    assert 0 < distance < 5e-4


def test_strategies_of_flower(python: Path) -> None:
    found = result_of(python, "strategies_of_flower")
    assert isinstance(found, list)
    distance, change = found
    print(f"distance from Flower's mean: {distance:.1e}; change of the loss by FedAdam: {change:.3f}")
    assert distance < 1e-5
    assert change < 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def superlink(python: Path, folder: Path, *arguments: str) -> Iterator[int]:
    """Run a SuperLink and configure `flwr run` for it; yields the port."""
    port = free_port()
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with running([*command, "--disable-runtime-dependency-installation"], python, folder, "superlink"):
        wait_for(lambda: is_open(port))
        yield port


@contextmanager
def running(command: list[str], python: Path, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables(python, folder), cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@contextmanager
def supernodes(python: Path, folder: Path, port: int, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        nodes = []
        for part in range(count):
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            command += ["--node-config", f"partition-id={part} num-partitions=10"]
            nodes.append(stack.enter_context(running(command, python, folder, f"node{part}")))
        yield nodes


def app_in(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "federated", folder / "app"))


def final_model(printed: str) -> str:
    found = re.findall(r"final model (\w{64})", printed)
    assert found, printed[-4000:]
    return str(found[-1])


def flwr_run(python: Path, folder: Path, app: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["flwr", "run", str(app), "--stream", *arguments],
        env=variables(python, folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    return done.stdout + done.stderr


def test_simulation_and_processes_give_the_same_bits(python: Path, tmp_path: Path) -> None:
    """10 clients, 5 rounds: on Ray, and on ten SuperNodes with a SuperLink."""
    app = app_in(tmp_path)
    with superlink(python, tmp_path, "--simulation"):
        simulated = flwr_run(python, tmp_path, app, "--federation-config", "num-supernodes=10")
    with superlink(python, tmp_path) as port, supernodes(python, tmp_path, port, 10):
        printed = flwr_run(python, tmp_path, app)
    print("\n".join(re.findall(r"round \d: 10 of 10 clients.*", printed)))
    assert len(re.findall(r"round \d: 10 of 10 clients", printed)) == 5
    assert final_model(printed) == final_model(simulated)


def test_a_supernode_dies_in_a_round(python: Path, tmp_path: Path) -> None:
    app = app_in(tmp_path)
    log = tmp_path / "run.log"
    with superlink(python, tmp_path) as port, supernodes(python, tmp_path, port, 3) as nodes:
        command = ["flwr", "run", str(app), "--stream", "--run-config", "rounds=3 clients=3"]
        with running(command, python, tmp_path, "run") as run:
            wait_for(lambda: "round 1: 3 of 3 clients" in log.read_text())
            # In round 2.
            nodes[2].kill()
            run.wait(600)
    printed = log.read_text()
    assert "round 2: 2 of 3 clients" in printed, printed[-4000:]
    assert re.search(r"round 2: client \d+: the client failed: .*[Nn]ode [Uu]navailable", printed)
    assert final_model(printed) == result_of(python, "killed", "3", "10", "2", "3")


def test_the_page_runs_as_written(python: Path, tmp_path: Path) -> None:
    from test_pages import blocks_of

    (tmp_path / "page.py").write_text("\n".join(blocks_of(ROOT / "docs" / "federated.md")))
    done = subprocess.run(
        [python, "page.py"], env=variables(python), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_docstrings_where_flower_is_there(python: Path, tmp_path: Path) -> None:
    """Examples in docstrings check more if Flower is installed."""
    script = """
import doctest, numpy as np, ortrain, ortrain.flower
given = {"np": np, "ortrain": ortrain, "x": np.zeros((8, 64), np.float32), "labels": np.arange(8)}
for name in ("client_app", "server_app", "numpy_client"):
    doctest.run_docstring_examples(getattr(ortrain.flower, name), dict(given), name=name)
doctest.run_docstring_examples(ortrain.flower, dict(given))
"""
    done = subprocess.run(
        [python, "-c", script], env=variables(python), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
