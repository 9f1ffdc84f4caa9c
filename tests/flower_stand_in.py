"""Parts of Flower's message interface that ortrain.flower uses, for environments without Flower.

`make conform` runs the same tests with Flower itself.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

IS_REAL = importlib.util.find_spec("flwr") is not None


class Array:
    def __init__(self, ndarray: Any) -> None:
        buffer = io.BytesIO()
        np.save(buffer, ndarray, allow_pickle=False)
        self.data = buffer.getvalue()

    def numpy(self) -> Any:
        return np.load(io.BytesIO(self.data), allow_pickle=False)


class ArrayRecord(dict[str, Array]):
    pass


class MetricRecord(dict[str, Any]):
    pass


class ConfigRecord(dict[str, Any]):
    pass


class RecordDict(dict[str, Any]):
    def _of(self, kind: type) -> dict[str, Any]:
        return {name: record for name, record in self.items() if isinstance(record, kind)}

    @property
    def array_records(self) -> dict[str, Any]:
        return self._of(ArrayRecord)

    @property
    def metric_records(self) -> dict[str, Any]:
        return self._of(MetricRecord)

    @property
    def config_records(self) -> dict[str, Any]:
        return self._of(ConfigRecord)


@dataclass
class Error:
    code: int
    reason: str | None = None


class Message:
    def __init__(
        self,
        content: Any = None,
        *,
        error: Error | None = None,
        dst_node_id: int = 0,
        message_type: str = "",
        group_id: str = "",
        reply_to: Message | None = None,
    ) -> None:
        if isinstance(content, Error):
            content, error = None, content
        self.content, self.error = content, error
        source = 0
        if reply_to is not None:
            source, message_type = reply_to.metadata.dst_node_id, reply_to.metadata.message_type
        self.metadata = SimpleNamespace(
            src_node_id=source,
            dst_node_id=dst_node_id,
            message_type=message_type,
            message_id=f"to {dst_node_id}",
            reply_to_message_id="" if reply_to is None else reply_to.metadata.message_id,
        )

    def has_error(self) -> bool:
        return self.error is not None


@dataclass
class Context:
    run_id: int
    node_id: int
    node_config: dict[str, Any]
    state: RecordDict
    run_config: dict[str, Any] = field(default_factory=dict)


class ClientApp:
    def __init__(self, client_fn: Any = None, mods: Any = None) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, message: Message, context: Context) -> Any:
        return self._functions[message.metadata.message_type](message, context)

    def train(self) -> Callable[[Any], Any]:
        return lambda function: self._functions.setdefault("train", function)

    def evaluate(self) -> Callable[[Any], Any]:
        return lambda function: self._functions.setdefault("evaluate", function)


class Grid:
    pass


class ServerApp:
    def __call__(self, grid: Any, context: Context) -> None:
        self._main(grid, context)

    def main(self) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            self._main = function
            return function

        return register


class NumPyClient:
    def to_client(self) -> Any:
        return self


def modules() -> dict[str, ModuleType]:
    """Return the modules of the stand-in by name; none if Flower is installed."""
    if IS_REAL:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
        return {}
    names = {
        "flwr": (),
        "flwr.app": (Array, ArrayRecord, MetricRecord, ConfigRecord, RecordDict, Error, Message, Context),
        "flwr.clientapp": (ClientApp,),
        "flwr.serverapp": (Grid, ServerApp),
        "flwr.client": (NumPyClient,),
    }
    found = {}
    for name, classes in names.items():
        found[name] = ModuleType(name)
        for each in classes:
            setattr(found[name], each.__name__, each)
    return found
