"""Configuration of optimizers: the algorithm, its settings, and parameter groups."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import numpy as np

from ortrain import _ortrain
from ortrain._records import record_of
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ortrain._inspect import ParameterInfo

__all__ = ["Group", "OptimizerConfig", "OptimizerRow", "table"]

# Infinity as files store it: the largest finite float32.
_LARGEST = 3.4028234663852886e38
# Keys of a group that are not settings of the optimizer.
_OF_GROUPS = ("params", "lr", "lr_factor", "frozen_steps")

Choice = str | Sequence[str] | Callable[["ParameterInfo"], bool]
"""Parameters: names or patterns, or a callable that says of each whether it is one of them."""


class Group(TypedDict, total=False):
    """Keys that a parameter group of any optimizer may have; the settings of the optimizer are keys, too.

    >>> from ortrain import optim
    >>> no_decay: optim.Group = {"params": "*.bias", "lr_factor": 2.0}
    >>> len(optim.AdamW(groups=[no_decay]).groups)
    1
    """

    params: Choice
    """Names or patterns (as of :mod:`fnmatch`) of parameters or of nodes that use them, or a callable that is given an
    :class:`~ortrain.ParameterInfo`. They choose from the parameters that are trained."""
    lr: float
    """A learning rate of the group's own, which a schedule scales as it scales that of the optimizer."""
    lr_factor: float
    """The share of the optimizer's learning rate; 1 unless it is given."""
    frozen_steps: int
    """The number of steps of the optimizer before the first one that changes the group."""


@dataclass(frozen=True)
class OptimizerRow:
    """A row of the table of optimizers.

    >>> from ortrain import optim
    >>> lion = next(row for row in optim.table() if row.name == "Lion")
    >>> lion.settings
    {'beta1': 0.9, 'beta2': 0.99, 'weight_decay': 0.0}
    >>> lion.slots
    ['momentum0']
    """

    name: str
    """The name of the class."""
    summary: str
    """The optimizer in a few words."""
    source: str
    """Paper and class that the formula is of."""
    learning_rate: float
    """The learning rate where none is given."""
    slots: list[str]
    """Names of the values that it keeps for each parameter; some only with certain settings."""
    settings: dict[str, float]
    """Settings and their defaults."""
    flags: dict[str, bool]
    """Choices and their defaults."""


def table() -> list[OptimizerRow]:
    """Return the rows of the table of optimizers, sorted by name.

    >>> from ortrain import optim
    >>> [row.name for row in optim.table()][:3]
    ['Adadelta', 'Adafactor', 'Adagrad']
    """
    return [
        record_of(
            OptimizerRow,
            row,
            slots=row.slots,
            settings={setting.name: shown(setting.default) for setting in row.settings},
            flags={flag.name: flag.default for flag in row.flags},
        )
        for row in _ortrain.optimizer_table()
    ]


def number(name: str, value: object, *, bound: bool = False) -> float:
    """Return the number of a setting as files store it; with `bound`, infinity is allowed."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise InvalidArgumentError(f"{name} must be a number, got {value!r}")
    try:
        found = float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name} is a number with more digits than a float can hold") from None
    if bound and found == math.inf:
        return _LARGEST
    if not math.isfinite(found):
        raise InvalidArgumentError(f"{name} must be finite{' or positive infinity' if bound else ''}, got {found}")
    if abs(found) > _LARGEST:
        raise InvalidArgumentError(f"{name} must be in the range of float32, got {found}")
    return found


def choice(name: str, value: object) -> bool:
    """Return the value of a flag of an optimizer."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name} must be True or False, got {value!r:.60}")
    return bool(value)


def bounds(optimizer: str) -> set[str]:
    """Return the names of an optimizer's settings that may be infinite."""
    row = next((row for row in table() if row.name == optimizer), None)
    return set() if row is None else {name for name, default in row.settings.items() if math.isinf(default)}


def shown(value: float) -> float:
    """Convert a number from a file to the number that users see: the largest float32 becomes infinity."""
    return math.copysign(math.inf, value) if abs(value) >= _LARGEST else value


def is_onnxruntime(formula: str) -> bool:
    """Return True for the formula of onnxruntime."""
    if formula not in ("pytorch", "onnxruntime"):
        raise InvalidArgumentError(f"formula must be 'pytorch' or 'onnxruntime', got {formula!r}")
    return formula == "onnxruntime"


def joined(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with ``betas`` split into ``beta1`` and ``beta2``."""
    found = dict(settings)
    if "betas" in found:
        betas = found.pop("betas")
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise InvalidArgumentError(f"betas must be two numbers, got {betas!r}")
        found["beta1"], found["beta2"] = betas
    return found


class OptimizerConfig:
    """Optimizer with its settings, for :func:`ortrain.artifacts.generate_artifacts`.

    Each optimizer of the table is a subclass.

    >>> from ortrain import optim
    >>> config = optim.NAdam(lr=0.01, weight_decay=0.1)
    >>> config
    NAdam(lr=0.01, weight_decay=0.1)
    >>> config.settings["momentum_decay"]
    0.004
    """

    _own: ClassVar[_ortrain.OwnOptimizer | None] = None

    def __init__(
        self,
        lr: float,
        settings: Mapping[str, object],
        flags: Mapping[str, bool],
        *,
        max_norm: float | None,
        max_norm_per_tensor: float | None,
        max_value: float | None,
        ema_decay: float | None,
        accumulation: Literal["sum", "mean"],
        groups: Iterable[Group | Mapping[str, Any]],
        layer_decay: float | None,
    ) -> None:
        if accumulation not in ("sum", "mean"):
            raise InvalidArgumentError(f"accumulation must be 'sum' or 'mean', got {accumulation!r}")
        options = {"max_norm_per_tensor": max_norm_per_tensor, "max_value": max_value, "ema_decay": ema_decay}
        specified = {name: value for name, value in options.items() if value is not None}
        optimizer = type(self).__name__
        unbounded = bounds(optimizer)
        numbers = {
            name: number(name, value, bound=name in unbounded) for name, value in (joined(settings) | specified).items()
        }
        spec: dict[str, Any] = {
            "optimizer": optimizer,
            "learning_rate": number("lr", lr),
            "settings": numbers,
            "flags": {name: choice(name, value) for name, value in flags.items()},
            "mean_of_gathered": accumulation == "mean",
        }
        if max_norm is not None:
            spec["max_norm"] = number("max_norm", max_norm)
        if layer_decay is not None:
            layer_decay = number("layer_decay", layer_decay)
            if not 0 < layer_decay <= 1:
                raise InvalidArgumentError(f"layer_decay must be above 0 and at most 1, got {layer_decay}")
        self._layer_decay = layer_decay
        self._chosen: list[Choice] = []
        described = []
        for at, group in enumerate(groups):
            self._chosen.append(_choice(at, group))
            described.append(_described(at, group, numbers, unbounded))
        # Check the groups now; a placeholder name represents the parameters of each group.
        probe = spec | {"groups": [group | {"parameters": [str(at)]} for at, group in enumerate(described)]}
        self._spec: dict[str, Any] = self._checked(probe)
        self._groups: list[dict[str, Any]] = self._spec.pop("groups")

    def _checked(self, spec: dict[str, Any]) -> dict[str, Any]:
        check = _ortrain.optimizer_spec if self._own is None else self._own.spec
        checked: dict[str, Any] = json.loads(check(json.dumps(spec)))
        return checked

    @classmethod
    def _usual(cls) -> dict[str, float | bool]:
        """Return the defaults of settings and flags."""
        row = next((row for row in table() if row.name == cls.__name__), None)
        return {} if row is None else row.settings | row.flags

    @property
    def lr(self) -> float:
        """The learning rate before any schedule.

        >>> from ortrain import optim
        >>> optim.Lion().lr
        0.0001
        """
        rate: float = self._spec["learning_rate"]
        return rate

    @property
    def settings(self) -> dict[str, float]:
        """The settings of parameters outside of all groups, including the options that the call set.

        >>> from ortrain import optim
        >>> optim.SGD(momentum=0.9, max_value=1.0).settings
        {'dampening': 0.0, 'max_value': 1.0, 'momentum': 0.9, 'weight_decay': 0.0}
        """
        return {name: shown(value) for name, value in self._spec["settings"].items()}

    @property
    def flags(self) -> dict[str, bool]:
        """The flags.

        >>> from ortrain import optim
        >>> optim.SGD(momentum=0.9, nesterov=True).flags
        {'nesterov': True}
        """
        return dict(self._spec["flags"])

    @property
    def slots(self) -> list[str]:
        """Names of the state tensors that the optimizer has for each parameter.

        >>> from ortrain import optim
        >>> optim.SGD().slots, optim.SGD(momentum=0.9).slots
        ([], ['momentum0'])
        """
        return [slot["name"] for slot in self._spec["slots"]]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups as the call passed them, with ``params``.

        >>> from ortrain import optim
        >>> optim.AdamW(groups=[{"params": "*.bias", "weight_decay": 0}]).groups
        [{'params': '*.bias', 'lr_factor': 1.0, 'frozen_steps': 0, 'weight_decay': 0.0}]
        """
        return [
            {"params": chosen}
            | {name: value for name, value in group.items() if name not in ("parameters", "settings")}
            | group["settings"]
            for chosen, group in zip(self._chosen, self._groups, strict=True)
        ]

    def __repr__(self) -> str:
        usual = self._usual()
        said = {"lr": self.lr}
        said |= {name: value for name, value in (self.settings | self.flags).items() if usual.get(name) != value}
        if "max_norm" in self._spec:
            said["max_norm"] = self._spec["max_norm"]
        text = ", ".join(f"{name}={value!r}" for name, value in said.items())
        count = len(self._groups)
        return f"{type(self).__name__}({text}{f', {count} group' if count else ''}{'s' if count > 1 else ''})"

    def _for(
        self,
        trained: Sequence[str],
        select: Callable[[str, Choice], list[str]],
        layers: Callable[[], Mapping[str, int | None]],
    ) -> str:
        """Return the JSON description of the optimizer for the trained parameters.

        `select` resolves a choice to names of trained parameters; its first argument names the choice in errors.
        `layers` returns the layer of each parameter, counted from the last layer.
        """
        groups: list[dict[str, Any]] = []
        owners: dict[str, int] = {}
        for at, (chosen, group) in enumerate(zip(self._chosen, self._groups, strict=True)):
            names = select(f"params of group {at}", chosen)
            for name in names:
                if owners.setdefault(name, at) != at:
                    raise InvalidArgumentError(
                        f"parameter {name!r} is in groups {owners[name]} and {at}; a parameter can be in one group only"
                    )
            groups.append(group | {"parameters": names})
        if self._layer_decay is not None:
            rest = [name for name in trained if name not in owners]
            if rest:
                groups.append({"parameters": rest, "lr_factor": 1.0, "frozen_steps": 0, "settings": {}})
            groups = [part for group in groups for part in _by_layer(group, layers(), self._layer_decay)]
        return json.dumps(self._spec | {"groups": groups})


def _choice(at: int, group: Group | Mapping[str, Any]) -> Choice:
    if not isinstance(group, Mapping):
        raise InvalidArgumentError(f"group {at} must be a dict with params and settings, got {type(group).__name__}")
    chosen: Choice | None = group.get("params")
    if chosen is None:
        raise InvalidArgumentError(f"group {at} has no params; set it to names, patterns, or a callable")
    return chosen


def _described(
    at: int, group: Group | Mapping[str, Any], settings: Mapping[str, float], unbounded: set[str]
) -> dict[str, Any]:
    """Return a group in the format of the core, without its parameters."""
    overrides = joined({name: value for name, value in group.items() if name not in _OF_GROUPS})
    unknown = next((name for name in overrides if name not in settings), None)
    if unknown is not None:
        known = [*_OF_GROUPS, *settings]
        raise InvalidArgumentError(
            f"group {at} has no key {unknown!r}; its keys are {', '.join(known)}{hint(unknown, known)}"
        )
    lr, lr_factor = group.get("lr"), group.get("lr_factor")
    if lr is not None and lr_factor is not None:
        raise InvalidArgumentError(f"group {at} has both lr and lr_factor; set only one")
    frozen = group.get("frozen_steps", 0)
    if isinstance(frozen, bool) or not isinstance(frozen, int) or frozen < 0:
        raise InvalidArgumentError(f"frozen_steps of group {at} must be an integer of at least 0, got {frozen!r}")
    found: dict[str, Any] = {
        "lr_factor": number(f"lr_factor of group {at}", 1.0 if lr_factor is None else lr_factor),
        "frozen_steps": frozen,
        "settings": {
            name: number(f"{name} of group {at}", value, bound=name in unbounded) for name, value in overrides.items()
        },
    }
    return found if lr is None else found | {"lr": number(f"lr of group {at}", lr)}


def _by_layer(group: dict[str, Any], layers: Mapping[str, int | None], decay: float) -> list[dict[str, Any]]:
    """Split a group by layer. The last layer has the full rate; each layer before it has `decay` times the next."""
    parts: dict[int, list[str]] = {}
    for name in group["parameters"]:
        parts.setdefault((layers.get(name) or 1) - 1, []).append(name)
    found = []
    for depth, names in sorted(parts.items()):
        share = decay**depth
        part = group | {"parameters": names, "lr_factor": group["lr_factor"] * share}
        found.append(part | {"lr": group["lr"] * share} if "lr" in group else part)
    return found
