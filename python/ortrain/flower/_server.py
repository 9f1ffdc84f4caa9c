"""Rounds of the server: messages to the clients, the mean of their updates, the report of a round."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.flower._aggregation import aggregate, mean_metrics
from ortrain.flower._messages import ARRAYS, CONFIG, FROZEN, METRICS, array_record, bytes_of, flower, update_of
from ortrain.flower._trainee import state_of
from ortrain.flower._updates import Update
from ortrain.flower._values import frozen_values, set_values, shapes_of, trained_values

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Round", "ServerRounds"]

# Logger of Flower; its handlers show the progress of a run.
_LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class Round:
    """Report of a round.

    >>> from ortrain.flower import Round
    >>> print(Round(1, sampled=3, accepted=2, refused=["client 7: parameter 'w' has NaN or infinities"],
    ...             bytes_sent=3000, bytes_received=2000, metrics={"loss": 0.5}))
    round 1: 2 of 3 clients, 1000 bytes to and 1000 bytes from each client, loss 0.5
    """

    number: int
    """Number of the round, from 1."""
    sampled: int
    """Number of clients that the server asked."""
    accepted: int
    """Number of clients whose update is in the mean."""
    refused: list[str]
    """A sentence for each client that is left out."""
    bytes_sent: int
    """Bytes of the arrays of all messages to clients for training."""
    bytes_received: int
    """Bytes of the arrays of the accepted replies."""
    metrics: dict[str, float]
    """Means over the examples of the clients; ``val_`` begins the names of the evaluation."""

    def __str__(self) -> str:
        answers = max(1, self.accepted)
        metrics = "".join(f", {name} {value:.6g}" for name, value in self.metrics.items())
        return (
            f"round {self.number}: {self.accepted} of {self.sampled} clients, "
            f"{self.bytes_sent // max(1, self.sampled)} bytes to and {self.bytes_received // answers} bytes from "
            f"each client{metrics}"
        )


@dataclass
class ServerRounds:
    """The caller's choices for a run of the server."""

    build: Callable[[Any], Any]
    rounds: int = 3
    fraction: float = 1.0
    min_clients: int = 2
    send: str = "float32"
    send_frozen: bool = False
    evaluate: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0
    seed: int = 0
    on_round: Callable[[Any, Round], Mapping[str, float] | None] | None = None

    def run(self, grid: Any, context: Any) -> list[Round]:
        """Run all rounds; returns their reports."""
        built = self.build(context)
        state = state_of(built)
        statistics: set[str] = set()
        reports = []
        for number in range(1, self.rounds + 1):
            nodes = self._sampled(grid, number)
            base = trained_values(state)
            frozen = frozen_values(state)
            sent = {**base, **{name: frozen[name] for name in sorted(statistics)}}
            content = self._content(sent, frozen, number)
            replies = self._exchange(grid, content, nodes, "train", number)
            updates, failures = _updates_of(replies)
            mean = aggregate(updates, base, shapes_of(state, trained=True), shapes_of(state, trained=False))
            refused = sorted(failures + mean.refused)
            for sentence in refused:
                _LOG.warning("round %d: %s", number, sentence)
            if mean.accepted:
                set_values(state, mean.trained, mean.statistics)
                statistics |= set(mean.statistics)
            else:
                _LOG.warning("round %d: no update was accepted; the model is as before", number)
            metrics = mean.metrics
            if self.evaluate:
                metrics |= self._evaluation(grid, state, statistics, nodes, number)
            sent_bytes = bytes_of(content) * len(nodes)
            report = Round(number, len(nodes), mean.accepted, refused, sent_bytes, mean.byte_count, metrics)
            if self.on_round is not None:
                metrics |= {name: float(value) for name, value in (self.on_round(built, report) or {}).items()}
            _LOG.info("%s", report)
            reports.append(report)
        return reports

    def _sampled(self, grid: Any, number: int) -> list[int]:
        """Return the nodes of a round, when enough of them are connected."""
        deadline = time.monotonic() + self.timeout
        # A client that is lost later costs its part, and not the run.
        required = self.min_clients if number == 1 else 1
        while len(nodes := sorted(grid.get_node_ids())) < required:
            if time.monotonic() > deadline:
                raise OrtrainError(
                    f"{len(nodes)} clients are connected after {self.timeout:g} seconds, but round {number} needs "
                    f"{required}; start more, or reduce min_clients"
                )
            time.sleep(0.5)
        if self.fraction == 1:
            return nodes
        count = max(min(self.min_clients, len(nodes)), round(self.fraction * len(nodes)))
        rng = np.random.default_rng([self.seed & (1 << 64) - 1, number])
        return sorted(int(node) for node in rng.choice(np.array(nodes, object), count, replace=False))

    def _content(self, values: dict[str, npt.NDArray[Any]], frozen: Mapping[str, npt.NDArray[Any]], number: int) -> Any:
        app = flower("app")
        if self.send == "float16":
            values = {name: _as_half(name, array) for name, array in values.items()}
        records = {
            ARRAYS: array_record(values),
            CONFIG: app.ConfigRecord({**self.config, "server-round": number}),
        }
        if self.send_frozen:
            records[FROZEN] = array_record({name: array for name, array in frozen.items() if name not in values})
        return app.RecordDict(records)

    def _exchange(self, grid: Any, content: Any, nodes: Sequence[int], kind: str, number: int) -> dict[int, Any]:
        """Send the content to all nodes; returns the reply of each node, ``None`` for no reply within the time."""
        message = flower("app").Message
        messages = [
            message(content=content, message_type=kind, dst_node_id=node, group_id=str(number)) for node in nodes
        ]
        replies: dict[int, Any] = dict.fromkeys(nodes)
        answers = list(grid.send_and_receive(messages, timeout=self.timeout))
        # Flower replies in place of a node that is gone, with a node id of its own.
        asked = {each.metadata.message_id: each.metadata.dst_node_id for each in messages}
        for reply in answers:
            node = reply.metadata.src_node_id
            if node not in replies:
                node = asked.get(reply.metadata.reply_to_message_id, node)
            replies[node] = reply
        return replies

    def _evaluation(
        self, grid: Any, state: Any, statistics: set[str], nodes: Sequence[int], number: int
    ) -> dict[str, float]:
        frozen = frozen_values(state)
        sent = {**trained_values(state), **{name: frozen[name] for name in sorted(statistics)}}
        replies = self._exchange(grid, self._content(sent, frozen, number), nodes, "evaluate", number)
        found = []
        for reply in replies.values():
            if reply is None or reply.has_error() or METRICS not in reply.content.metric_records:
                continue
            metrics = {
                name: float(value)
                for name, value in reply.content.metric_records[METRICS].items()
                if isinstance(value, (int, float)) and math.isfinite(value)
            }
            examples = metrics.pop("num-examples", 0.0)
            if examples > 0:
                found.append((examples, metrics))
        if len(found) < len(nodes):
            _LOG.warning("round %d: %d of %d clients evaluated", number, len(found), len(nodes))
        # The same sum for every order of the replies.
        found.sort(key=lambda each: (each[0], sorted(each[1].items())))
        return {f"val_{name}": value for name, value in mean_metrics(found).items()}


def _as_half(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        raise InvalidArgumentError(f"parameter {name!r} exceeds float16; let the server send 'float32'")
    return half


def _updates_of(replies: Mapping[int, Any]) -> tuple[list[Update], list[str]]:
    """Return the updates in the replies, and a sentence for each client without one."""
    updates, failures = [], []
    for node, reply in replies.items():
        client = f"client {node}"
        if reply is None:
            failures.append(f"{client}: no reply within the time")
            continue
        try:
            updates.append(update_of(reply, client))
        except InvalidArgumentError as error:
            failures.append(f"{client}: {error}")
    return updates, failures
