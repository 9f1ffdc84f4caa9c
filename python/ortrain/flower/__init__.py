"""Federated training with Flower: a ready client and server for ONNX models.

The module needs the extra ``ortrain[flower]``. ``import ortrain`` imports neither this module nor Flower. Only trained
parameters travel by default.

==========================  ===================================================================================
:func:`client_app`          Flower's ``ClientApp`` on a ``Model``, or on a module and an optimizer
:func:`server_app`          Flower's ``ServerApp``: rounds, the mean of the updates, a report of each round
:func:`numpy_client`        a ``NumPyClient`` for Flower's older interface
:class:`TopK`               form of an update with its largest elements only, with error feedback
:class:`ExampleClipping`    differentially private training of a client
:func:`clip_per_example`    gradients of single examples, clipped, with noise, for a loop of your own
==========================  ===================================================================================

>>> import importlib.util
>>> import ortrain.flower
>>> def build(context):
...     return ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy", learning_rate=0.1, seed=1)
>>> if importlib.util.find_spec("flwr"):
...     client = ortrain.flower.client_app(build, lambda context: (x, labels))
...     server = ortrain.flower.server_app(build, rounds=2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortrain.errors import InvalidArgumentError
from ortrain.flower._client import LocalRounds
from ortrain.flower._messages import (
    ARRAYS,
    CONFIG,
    FROZEN,
    METRICS,
    array_record,
    arrays_of,
    flower,
    reply_record,
)
from ortrain.flower._privacy import ExampleClipping, clip_per_example
from ortrain.flower._server import Round, ServerRounds
from ortrain.flower._trainee import options_of
from ortrain.flower._updates import Form, TopK, checked_form
from ortrain.flower._values import trained_values

__all__ = ["ExampleClipping", "Round", "TopK", "client_app", "clip_per_example", "numpy_client", "server_app"]

# Key of the remainder of top-k in the memory that Flower keeps for a client during a run.
_MEMORY = "ortrain.remainder"


def client_app(
    build: Callable[[Any], Any],
    data: Callable[[Any], Any],
    *,
    validation: Callable[[Any], Any] | None = None,
    send: Form = "float32",
    statistics: bool = False,
    privacy: ExampleClipping | None = None,
    fit: Mapping[str, Any] | None = None,
    mods: Sequence[Any] = (),
) -> Any:
    """Return a ``ClientApp``: it trains the parameters from the server on local data.

    Each message builds the model anew: the optimizer starts without moments in each round. A round has its own order of
    the rows and its own Dropout masks. Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017.

    Args:
        build: a function that takes Flower's ``Context`` and returns an :class:`ortrain.Model`, or a pair of a
            :class:`~ortrain.Module` and an :class:`~ortrain.Optimizer`. A state may be nominal, without values.
        data: a function that takes the ``Context`` and returns the training data: ``x``, ``(x, y)`` or
            ``(x, y, sample_weight)`` for :meth:`ortrain.Model.fit`; for a module an iterable of tuples, its batches.
            ``context.node_config["partition-id"]`` numbers the clients of a simulation.
        validation: a function that returns the validation data; without it the client does not evaluate.
        send: ``"float32"`` for values, which all strategies of Flower can average; ``"float16"`` for differences
            to the received values; a :class:`TopK` for the largest differences. The last two need :func:`server_app`.
        statistics: True to send running statistics of normalizations, too: parameters that training changes, though
            they are not trained.
        privacy: clipping per example and noise.
        fit: options of the local training: ``epochs``, ``batch_size``, ``learning_rate``, ``clip_norm``,
            ``steps_per_epoch``. Entries of the server's configuration with these names override them.
        mods: Flower's modifiers, such as ``flwr.clientapp.mod.fixedclipping_mod``.

    Returns:
        A ``flwr.clientapp.ClientApp``. Its replies have the ``ArrayRecord`` ``"arrays"`` with the parameters by name,
        and the ``MetricRecord`` ``"metrics"`` with ``"num-examples"``, the loss and the metrics.

    Raises:
        ImportError: if Flower is not installed.
        InvalidArgumentError: for an unknown form or option. In a round, an error of the client is Flower's error reply.

    >>> import importlib.util
    >>> import ortrain
    >>> from ortrain import flower
    >>> if importlib.util.find_spec("flwr"):
    ...     app = flower.client_app(
    ...         lambda context: ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy"),
    ...         lambda context: (x, labels),
    ...         send=flower.TopK(0.1),
    ...         fit={"epochs": 2},
    ...     )

    """
    local = LocalRounds(build, data, validation, checked_form(send), bool(statistics), privacy, dict(fit or {}))
    options_of(local.fit, {})
    app = flower("clientapp").ClientApp(mods=list(mods))
    types = flower("app")

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        received, frozen, config = _received(message)
        memory = context.state.array_records.get(_MEMORY)
        update, remainder = local.train(
            context, received, frozen, config, None if memory is None else arrays_of(memory)["remainder"]
        )
        if remainder is not None:
            context.state[_MEMORY] = array_record({"remainder": remainder})
        return types.Message(reply_record(update), reply_to=message)

    if validation is not None:

        @app.evaluate()  # type: ignore[untyped-decorator]
        def evaluate(message: Any, context: Any) -> Any:
            received, frozen, _ = _received(message)
            examples, metrics = local.evaluate(context, received, frozen)
            record = types.MetricRecord({**metrics, "num-examples": examples})
            return types.Message(types.RecordDict({METRICS: record}), reply_to=message)

    return app


def _received(message: Any) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return parameters, frozen values and configuration of a message of the server."""
    content = message.content
    if ARRAYS not in content.array_records:
        raise InvalidArgumentError(f"the server's message has no arrays under the key {ARRAYS!r}")
    frozen = content.array_records.get(FROZEN)
    config = dict(content.config_records.get(CONFIG) or {})
    return arrays_of(content.array_records[ARRAYS]), {} if frozen is None else arrays_of(frozen), config


def server_app(
    build: Callable[[Any], Any],
    *,
    rounds: int = 3,
    fraction: float = 1.0,
    min_clients: int = 2,
    send: str = "float32",
    send_frozen: bool = False,
    evaluate: bool = False,
    config: Mapping[str, Any] | None = None,
    timeout: float = 3600.0,
    seed: int = 0,
    on_round: Callable[[Any, Round], Mapping[str, float] | None] | None = None,
) -> Any:
    """Return a ``ServerApp``: in each round clients train, and the mean of their updates is the next model.

    The mean is weighted by the numbers of examples. Its bits depend neither on the order of the replies nor on the
    names of the nodes. A reply with another shape, NaN, or nothing is left out with one sentence in Flower's log and in
    :attr:`Round.refused`; a round without a good reply leaves the model as it was.

    Args:
        build: a function that takes Flower's ``Context`` and returns the model of the server: an
            :class:`ortrain.Model` with a loss, a pair of a module and an optimizer, or a state.
        rounds: the number of rounds.
        fraction: the share of the connected clients in each round, above 0 and at most 1.
        min_clients: the number of connected clients that the first round waits for. Later rounds take the clients that
            are still connected.
        send: ``"float32"`` or ``"float16"`` for the parameters that the server sends; its own stay float32.
        send_frozen: True to send all frozen values as well, for clients with nominal states. Clients never return them.
        evaluate: True to let the clients evaluate each new model on their validation data.
        config: entries for the clients, such as ``{"epochs": 2, "learning_rate": 0.1}``: numbers, texts, bytes.
        timeout: the seconds to wait for connected clients and for the replies of a round.
        seed: the seed of the choice of clients if ``fraction`` is less than 1. The choice also depends on the ids that
            Flower draws for the nodes.
        on_round: a function of two arguments: the result of ``build`` with the new parameters, and the
            :class:`Round`. It may save, export or evaluate. If it returns a dict, the metrics get its entries.

    Returns:
        A ``flwr.serverapp.ServerApp``.

    Raises:
        ImportError: if Flower is not installed.
        InvalidArgumentError: for a number out of range.

    >>> import importlib.util
    >>> import ortrain
    >>> from ortrain import flower
    >>> if importlib.util.find_spec("flwr"):
    ...     app = flower.server_app(
    ...         lambda context: ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy"),
    ...         rounds=5,
    ...         config={"epochs": 2},
    ...         on_round=lambda model, report: model.export("global.onnx"),
    ...     )

    """
    for name, number, least in (("rounds", rounds, 1), ("min_clients", min_clients, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InvalidArgumentError(f"{name} must be an integer of at least {least}, got {number!r}")
    if not 0 < fraction <= 1:
        raise InvalidArgumentError(f"fraction must be above 0 and at most 1, got {fraction!r}")
    if not timeout > 0:
        raise InvalidArgumentError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    if send not in ("float32", "float16"):
        raise InvalidArgumentError(f"the server sends 'float32' or 'float16', got {send!r}")
    server = ServerRounds(
        build,
        rounds=rounds,
        fraction=fraction,
        min_clients=min_clients,
        send=send,
        send_frozen=send_frozen,
        evaluate=evaluate,
        config=dict(config or {}),
        timeout=timeout,
        seed=seed,
        on_round=on_round,
    )
    app = flower("serverapp").ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        server.run(grid, context)

    return app


def numpy_client(
    build: Callable[[Any], Any],
    data: Callable[[Any], Any],
    context: Any = None,
    *,
    validation: Callable[[Any], Any] | None = None,
    privacy: ExampleClipping | None = None,
    fit: Mapping[str, Any] | None = None,
) -> Any:
    """Return a ``NumPyClient``, the client of Flower's older interface, which secure aggregation needs.

    ``ClientApp(client_fn=lambda context: numpy_client(build, data, context).to_client(), mods=[secaggplus_mod])`` is a
    client of ``SecAggPlusWorkflow``.

    Args:
        build: a function that returns a model or a pair, as for :func:`client_app`.
        data: a function that returns the training data, as for :func:`client_app`.
        context: Flower's ``Context``, which the functions take.
        validation: a function that returns the validation data; without it the client does not evaluate.
        privacy: clipping per example and noise.
        fit: options of the local training, as for :func:`client_app`.

    Returns:
        A ``flwr.client.NumPyClient``. Its parameters are float32 arrays: the trained parameters, in ascending order of
        their names.

    Raises:
        ImportError: if Flower is not installed.
        InvalidArgumentError: for an unknown option; in a round as for :func:`client_app`.

    >>> import importlib.util
    >>> import ortrain
    >>> from ortrain import flower
    >>> def build(context):
    ...     return ortrain.Model(ortrain.examples.perceptron(), loss="cross_entropy")
    >>> if importlib.util.find_spec("flwr"):
    ...     client = flower.numpy_client(build, lambda context: (x, labels))
    ...     parameters, examples, metrics = client.fit(client.get_parameters({}), {"epochs": 1})

    """
    local = LocalRounds(build, data, validation, privacy=privacy, fit=dict(fit or {}))
    options_of(local.fit, {})
    base = flower("client").NumPyClient

    class OrtrainClient(base):  # type: ignore[misc, valid-type]
        """Client of a ``Model``, or of a module and an optimizer."""

        def get_parameters(self, config: Mapping[str, Any]) -> list[Any]:
            """Return the trained parameters in ascending order of their names."""
            return list(trained_values(local.trainee(context).state).values())

        def fit(self, parameters: Sequence[Any], config: Mapping[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            """Train; returns parameters, number of examples and metrics."""
            update, _ = local.train(context, list(parameters), {}, config, None)
            return [update.arrays[name] for name in sorted(update.arrays)], update.examples, dict(update.metrics)

        if validation is not None:

            def evaluate(
                self, parameters: Sequence[Any], config: Mapping[str, Any]
            ) -> tuple[float, int, dict[str, Any]]:
                """Evaluate; returns loss, number of examples and metrics."""
                examples, metrics = local.evaluate(context, list(parameters), {})
                return metrics.pop("loss"), examples, dict(metrics)

    return OrtrainClient()
