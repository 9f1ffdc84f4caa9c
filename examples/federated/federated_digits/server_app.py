"""Server: averages the clients, and tests each new model."""

from __future__ import annotations

import hashlib

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import ortrain
from federated_digits.task import TEST_ROWS, build, digits
from ortrain import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds with the options of the run."""
    config = context.run_config
    x, y = digits()

    def on_round(model: ortrain.Model, report: flower.Round) -> dict[str, float]:
        _, accuracy = model.evaluate(x[-TEST_ROWS:], y[-TEST_ROWS:], verbose=0)
        print(f"round {report.number}: test accuracy {accuracy:.3f}, {report.bytes_received} bytes received")
        if report.number == config["rounds"]:
            content = model.state.to_bytes()
            print(f"final model {hashlib.sha256(content).hexdigest()}")
            if config["output"]:
                model.export(config["output"])
        return {"test_accuracy": accuracy}

    server = flower.server_app(
        build,
        rounds=config["rounds"],
        min_clients=config["clients"],
        config={"epochs": config["epochs"]},
        on_round=on_round,
    )
    server(grid, context)
