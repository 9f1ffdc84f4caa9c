"""A pytest plugin: tests for onnxruntime-training run on ortrain, on a machine without CUDA.

Loaded with ``-p through_compat`` in the environment of run.py. Each result lists the plugin's changes: torch computes
on the CPU if a test selects "cuda", and error texts are not compared.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import onnx.reference  # noqa: F401  (before onnxruntime is hidden: nothing of onnx is to depend on it)
import pytest
import torch
from torch.overrides import TorchFunctionMode

import ortrain.compat

CUDA = "torch's cuda replaced by the CPU"
WORDING = "a different error message"

_changed: set[str] = set()
_results: list[dict[str, Any]] = []


class Hide(importlib.abc.MetaPathFinder):
    """Import hook that makes onnxruntime appear uninstalled."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


class OnCpu(TorchFunctionMode):
    """Mode that creates GPU tensors on the CPU. Explicit device names for ortrain still contain "cuda"."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(on_cpu, args), **kwargs)


def on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    if is_device and torch.device(value).type == "cuda":
        _changed.add(CUDA)
        return torch.device("cpu")
    return value


class Wording(str):
    """An error text that contains every sentence. run.py inserts it where tests search for a sentence."""

    __slots__ = ()

    def __contains__(self, sentence: object) -> bool:
        if not (isinstance(sentence, str) and super().__contains__(sentence)):
            _changed.add(WORDING)
        return bool(self)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hide-onnxruntime", action="store_true", help="make onnxruntime appear uninstalled")
    parser.addoption("--results", required=True, help="JSON file of test outcomes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hide_onnxruntime"):
        sys.meta_path.insert(0, Hide())
    ortrain.compat.install()
    # The exporter of the tests' time. Since torch 2.9 another exporter is the default.
    torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _changed.clear()
    # The same numbers in every run.
    torch.manual_seed(0)
    if torch.cuda.is_available():
        return (yield)
    with OnCpu():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    # Setup and teardown count if they fail or skip.
    if report.when == "call" or not report.passed:
        reason = ""
        if call.excinfo is not None:
            reason = f"{call.excinfo.typename}: {call.excinfo.value}".strip()
        _results.append(
            {
                "test": item.nodeid,
                "outcome": report.outcome,
                "changed": sorted(_changed),
                "reason": reason,
                "seconds": round(report.duration, 3),
            }
        )
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        reason = str(report.longrepr).strip().splitlines()[-1]
        _results.append({"test": report.nodeid, "outcome": "failed", "changed": [], "reason": reason, "seconds": 0})


def pytest_sessionfinish(session: pytest.Session) -> None:
    with open(session.config.getoption("results"), "w") as file:  # noqa: PTH123
        json.dump(_results, file, indent=1)
