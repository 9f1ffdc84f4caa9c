"""Client: trains on its own digits."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from federated_digits.task import build, data
from ortrain import flower

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train with the options of the run."""
    send: Any = context.run_config["send"]
    client = flower.client_app(
        build, data, send=flower.TopK(0.1) if send == "top-k" else send, statistics=True, fit={"batch_size": 16}
    )
    return client(message, context)
