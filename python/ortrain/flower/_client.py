"""A round at a client: parameters in, training, update out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortrain.errors import InvalidArgumentError
from ortrain.flower._privacy import ExampleClipping
from ortrain.flower._trainee import Privacy, Trainee, options_of, trainee_of
from ortrain.flower._updates import Form, Update, form_name, pack
from ortrain.flower._values import Values, frozen_values, set_values, shapes_of, trained_values

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["LocalRounds"]

# Keys of the number of the round in the configuration of Flower's servers.
_ROUND, _OLDER_ROUND = "server-round", "server_round"


@dataclass(frozen=True)
class LocalRounds:
    """The caller's functions and choices for the rounds of a client."""

    build: Callable[[Any], Any]
    data: Callable[[Any], Any]
    validation: Callable[[Any], Any] | None = None
    send: Form = "float32"
    statistics: bool = False
    privacy: ExampleClipping | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)

    def trainee(self, context: Any, data: Callable[[Any], Any] | None = None) -> Trainee:
        """Return the local training of the client of a context."""
        return trainee_of(self.build(context), (data or self.data)(context))

    def train(
        self,
        context: Any,
        received: Values | list[npt.NDArray[Any]],
        frozen: Values,
        config: Mapping[str, Any],
        memory: npt.NDArray[Any] | None,
    ) -> tuple[Update, npt.NDArray[Any] | None]:
        """Train on the parameters that the server sent; returns the update and the remainder of top-k.

        A list of parameters has the order of their names.

        Raises:
            InvalidArgumentError: if the parameters do not fit, there is no data, or the training diverges.

        """
        trainee = self.trainee(context)
        received = _receive(trainee, received, frozen)
        before = frozen_values(trainee.state) if self.statistics else {}
        number = max(1, int(config.get(_ROUND, config.get(_OLDER_ROUND, 1))))
        privacy = None
        if self.privacy is not None:
            privacy = Privacy(self.privacy, self.privacy.generator(_place(context), number))
        examples, metrics = trainee.train(options_of(self.fit, config), number, privacy)
        if examples < 1:
            raise InvalidArgumentError("the client has no training data")
        arrays, remainder = pack(self.send, received, trained_values(trainee.state), memory)
        if self.statistics:
            # Training changes no other frozen values than running statistics.
            after = frozen_values(trainee.state)
            arrays |= {name: after[name] for name in before if after[name].tobytes() != before[name].tobytes()}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Update(arrays, examples, form_name(self.send), finite), remainder

    def evaluate(
        self, context: Any, received: Values | list[npt.NDArray[Any]], frozen: Values
    ) -> tuple[int, dict[str, float]]:
        """Evaluate the parameters that the server sent on the validation data.

        Raises:
            InvalidArgumentError: if the parameters do not fit, or there is no data.

        """
        assert self.validation is not None
        trainee = self.trainee(context, self.validation)
        _receive(trainee, received, frozen)
        examples, metrics = trainee.evaluate()
        if examples < 1:
            raise InvalidArgumentError("the client has no validation data")
        return examples, metrics


def _receive(trainee: Trainee, received: Values | list[npt.NDArray[Any]], frozen: Values) -> Values:
    """Set the parameters that the server sent; returns the trained ones by name."""
    names = shapes_of(trainee.state, trained=True)
    if isinstance(received, list):
        if len(received) != len(names):
            raise InvalidArgumentError(f"the server sent {len(received)} arrays, expected {len(names)} parameters")
        received = dict(zip(sorted(names), received, strict=True))
    others = shapes_of(trainee.state, trained=False)
    # Running statistics travel beside the trained parameters.
    statistics = {name: array for name, array in received.items() if name in others}
    trained = {name: array for name, array in received.items() if name not in others}
    set_values(trainee.state, trained, {**frozen, **statistics})
    return trained


def _place(context: Any) -> int:
    """Return the number of the client: its partition if Flower's node configuration names one, else its node."""
    return 0 if context is None else int(context.node_config.get("partition-id", context.node_id))
