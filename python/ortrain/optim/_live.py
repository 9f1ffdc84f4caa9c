"""Parameter groups of a running optimizer."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any, Protocol

from ortrain import _ortrain
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError
from ortrain.optim._config import bounds, number, shown

__all__ = ["ParameterGroup"]


class _AtWork(Protocol):
    """Interface of a running optimizer: an optimizer of the core, or a session with an optimizer."""

    def spec(self) -> str: ...
    def change(self, text: str) -> None: ...
    def learning_rate(self) -> float: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...


def groups_of(native: _AtWork, state: _ortrain.CheckpointState) -> list[ParameterGroup]:
    """Return the groups of an optimizer, followed by a group of all other trained parameters.

    The last group is omitted if it has no parameters and the optimizer has other groups.
    """
    spec = json.loads(native.spec())
    owned = {name for group in spec["groups"] for name in group["parameters"]}

    def rest() -> list[str]:
        return [name for name in state.parameter_names() if name not in owned and state.requires_grad(name)]

    groups = [ParameterGroup(native, at, rest) for at in range(len(spec["groups"]))]
    return groups if groups and not rest() else [*groups, ParameterGroup(native, None, rest)]


def _replace(group: dict[str, Any], name: str, value: object) -> None:
    """Set a key of a group, or remove the key."""
    if value is None:
        group.pop(name, None)
    else:
        group[name] = value


class ParameterGroup:
    """Parameter group of an :class:`ortrain.Optimizer`; its attributes are its settings, which can be set.

    A change takes effect at the next step. It is stored in the checkpoint state, and saved with the optimizer state.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.AdamW(groups=[{"params": "*.bias", "weight_decay": 0}])
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> biases, others = optimizer.groups
    >>> biases
    ParameterGroup(2 parameters, lr_factor=1.0, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0)
    >>> others.weight_decay
    0.01
    >>> biases.lr = 0.1
    >>> biases.weight_decay = 0.001
    """

    __slots__ = ("_at", "_native", "_rest")

    _at: int | None
    _native: _AtWork
    _rest: Callable[[], list[str]]

    def __init__(self, native: _AtWork, at: int | None, rest: Callable[[], list[str]]) -> None:
        object.__setattr__(self, "_native", native)
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_rest", rest)

    def _read(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the description of the optimizer and the part of this group, or None for the default group."""
        spec = json.loads(self._native.spec())
        return spec, None if self._at is None else spec["groups"][self._at]

    @property
    def parameters(self) -> list[str]:
        """The names of the group's parameters.

        >>> optimizer.groups[0].parameters
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
        """
        group = self._read()[1]
        return self._rest() if group is None else list(group["parameters"])

    @property
    def lr(self) -> float | None:
        """The group's learning rate, which a schedule scales; ``None`` if the group has no separate rate.

        For the default group, of all parameters in no other group, it is the current learning rate of the optimizer.

        >>> round(optimizer.groups[0].lr, 6)
        0.001
        >>> optimizer.groups[0].lr = 0.5
        >>> optimizer.get_learning_rate()
        0.5
        """
        group = self._read()[1]
        if group is None:
            return self._native.learning_rate()
        rate: float | None = group.get("lr")
        return rate

    @lr.setter
    def lr(self, rate: float | None) -> None:
        if self._at is None:
            self._native.set_learning_rate(number("lr", rate))
            return
        self._change_group("lr", lambda group: _replace(group, "lr", None if rate is None else number("lr", rate)))

    @property
    def lr_factor(self) -> float:
        """The factor on the optimizer's learning rate, for a group without a separate learning rate.

        >>> optimizer.groups[0].lr_factor
        1.0
        """
        group = self._read()[1]
        return 1.0 if group is None else float(group["lr_factor"])

    @lr_factor.setter
    def lr_factor(self, share: float) -> None:
        def change(group: dict[str, Any]) -> None:
            group["lr_factor"] = number("lr_factor", share)
            group.pop("lr", None)

        self._change_group("lr_factor", change)

    @property
    def frozen_steps(self) -> int:
        """The last step of the optimizer that leaves the group unchanged.

        To freeze a group later, set the last frozen step; 0 unfreezes the group at once. The optimizer state of a
        frozen group does not change, and the group's step count excludes frozen steps.

        >>> optimizer.groups[0].frozen_steps
        0
        """
        group = self._read()[1]
        return 0 if group is None else int(group["frozen_steps"])

    @frozen_steps.setter
    def frozen_steps(self, step: int) -> None:
        self._change_group("frozen_steps", lambda group: _replace(group, "frozen_steps", operator.index(step)))

    def _change_group(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        spec, group = self._read()
        if group is None:
            raise InvalidArgumentError(
                f"parameters without a group have no {name} of their own; put them in a group in generate_artifacts"
            )
        change(group)
        self._native.change(json.dumps(spec))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        spec, group = self._read()
        settings = spec["settings"] | ({} if group is None else group["settings"])
        if name == "betas" and "beta1" in settings and "beta2" in settings:
            return settings["beta1"], settings["beta2"]
        if name not in settings:
            raise AttributeError(f"{spec['optimizer']} has no setting {name!r}{hint(name, list(settings))}")
        return shown(settings[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "betas":
            self.beta1, self.beta2 = value
            return
        if name == "parameters":
            raise AttributeError("the parameters of a group cannot change; generate_artifacts sets them")
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        spec, group = self._read()
        if name not in spec["settings"]:
            raise AttributeError(f"{spec['optimizer']} has no setting {name!r}{hint(name, list(spec['settings']))}")
        settings = (spec if group is None else group)["settings"]
        settings[name] = number(name, value, bound=name in bounds(spec["optimizer"]))
        self._native.change(json.dumps(spec))

    def __repr__(self) -> str:
        spec, group = self._read()
        said: dict[str, Any] = {}
        if group is None:
            said["lr"] = round(self._native.learning_rate(), 9)
        elif "lr" in group:
            said["lr"] = group["lr"]
        else:
            said["lr_factor"] = group["lr_factor"]
        if group is not None and group["frozen_steps"]:
            said["frozen_steps"] = group["frozen_steps"]
        said |= spec["settings"] | ({} if group is None else group["settings"])
        count = len(self.parameters)
        text = ", ".join(f"{name}={value!r}" for name, value in said.items())
        return f"ParameterGroup({count} parameter{'' if count == 1 else 's'}, {text})"
