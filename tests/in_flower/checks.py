"""Checks with Flower itself, in one process: python checks.py NAME; prints a result as JSON."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "examples" / "federated")]

import flower_stand_in  # noqa: E402
import numpy as np  # noqa: E402
from flwr.app import ConfigRecord, Context, RecordDict  # noqa: E402
from flwr.client.mod import secaggplus_mod  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common import ndarrays_to_parameters  # noqa: E402
from flwr.server import LegacyContext, ServerConfig  # noqa: E402
from flwr.server.strategy import FedAvg as OlderFedAvg  # noqa: E402
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow  # noqa: E402
from flwr.serverapp.strategy import FedAdam, FedAvg  # noqa: E402
from test_flower import CLIENTS, Grid, build, client, context_of, part, run  # noqa: E402

from federated_digits import task  # noqa: E402
from ortrain import flower  # noqa: E402
from ortrain.flower._messages import array_record  # noqa: E402


class Nodes(Grid):
    """Grid of a run; clients get copies of the messages, as over a network."""

    run = SimpleNamespace(run_id=1)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        return super().send_and_receive([copy.deepcopy(message) for message in messages], timeout=timeout)


def secure_aggregation() -> float:
    """Return the distance of the mean by secure aggregation from the plain mean."""
    found: list[Any] = []
    app = ClientApp(
        client_fn=lambda context: flower.numpy_client(build, part, context, fit={"batch_size": 10}).to_client(),
        mods=[secaggplus_mod],
    )
    start = flower.numpy_client(build, part, context_of()).get_parameters({})
    strategy = OlderFedAvg(
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(start),
        evaluate_fn=lambda number, parameters, config: found.append(parameters),
        on_fit_config_fn=lambda number: {"server-round": number},
    )
    context = LegacyContext(context_of(), config=ServerConfig(num_rounds=1), strategy=strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(Nodes(app), context)
    values, _ = run(Grid(client()), rounds=1)
    assert len(found) == 2
    return max(float(np.abs(a - values[name]).max()) for a, name in zip(found[-1], sorted(values), strict=True))


def strategies_of_flower() -> list[float]:
    """Return the distance of Flower's mean from ours, and the change of the loss with FedAdam."""
    start = {name: each.data for name, each in build(None).state.parameters}
    settings = {"fraction_evaluate": 0.0, "min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
    theirs = FedAvg(**settings).start(Nodes(client()), array_record(start), num_rounds=2)
    values, _ = run(Grid(client()), rounds=2)
    distance = max(float(np.abs(theirs.arrays[name].numpy() - values[name]).max()) for name in values)
    adam = FedAdam(**settings, eta=0.01).start(
        Nodes(client()), array_record(start), num_rounds=4, train_config=ConfigRecord({"epochs": 1})
    )
    losses = [metrics["loss"] for _, metrics in sorted(adam.train_metrics_clientapp.items())]
    return [distance, losses[-1] - losses[0]]


def killed(clients: int, partitions: int, lost: int, rounds: int) -> str:
    """Return the hash of the model of the example if a client is silent from round 2 on."""
    config = {"learning-rate": 0.003, "send": "float32"}
    client = flower.client_app(task.build, task.data, statistics=True, fit={"batch_size": 16})
    done: list[int] = []
    content = b""

    contexts = {
        node: Context(1, node, {"partition-id": node, "num-partitions": partitions}, RecordDict(), config)
        for node in range(clients)
    }

    class Lossy:
        def get_node_ids(self) -> list[int]:
            return list(contexts)

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
            replies = [client(copy.deepcopy(each), contexts[each.metadata.dst_node_id]) for each in messages]
            return [reply for reply in replies if not done or reply.metadata.src_node_id != lost]

    def on_round(model: Any, report: flower.Round) -> None:
        nonlocal content
        done.append(report.accepted)
        content = model.state.to_bytes()

    server = flower.server_app(task.build, rounds=rounds, min_clients=clients, config={"epochs": 1}, on_round=on_round)
    server(Lossy(), Context(1, 0, {}, RecordDict(), config))
    assert done == [clients, *[clients - 1] * (rounds - 1)]
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    flower_stand_in.modules()
    name, *numbers = sys.argv[1:]
    print(json.dumps(globals()[name](*map(int, numbers))))
