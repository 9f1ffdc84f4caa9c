"""Optimizer settings of :class:`ortrain.trainer.ORTTrainer`: name, settings, and groups of weights.

A config only describes an optimizer. The trainer passes the settings of each weight to the optimizer in
:mod:`ortrain.classic`.

>>> from ortrain.trainer.optim.config import AdamConfig
>>> config = AdamConfig([{"params": ["fc1.bias", "fc2.bias"], "lambda_coef": 0.0}], lr=0.001, lambda_coef=0.01)
>>> config.name
'AdamOptimizer'
>>> config.params[0]["lambda"], config.defaults["lambda"]
(0.0, 0.01)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum, unique
from typing import Any, ClassVar, NamedTuple, TypeGuard

from ortrain._suggest import hint

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig"]

_NAMES = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")
# A group may use the argument name ``lambda_coef``, because ``lambda`` is a keyword of Python.
_ENDING = "_coef"


class _OptimizerConfig:
    """Description of an optimizer: its name, the settings of all weights, and the settings of groups of weights.

    The subclasses below fill in the name and the settings. A setting of a group overrides ``defaults``, and a later
    group overrides an earlier group.

    Args:
        name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        params: groups. A group is a dict. Its key ``params`` is a list of weight names; all other keys are settings
            that ``defaults`` has. The config completes the dicts of the caller: missing settings are added, and a key
            ``lambda_coef`` becomes ``lambda``. Therefore two configs need two lists of groups.
        defaults: settings of weights that are in no group, and ``lr``, the learning rate: an int or a float of 0 or
            more.

    Raises:
        AssertionError: if an argument has another type, name or value; if a group has no ``params``, nothing but
            ``params``, or a setting that ``defaults`` lacks. In this case no group is changed.

    >>> from ortrain.trainer.optim import _OptimizerConfig
    >>> groups = [{"params": ["fc1.weight"], "alpha": 0.8}]
    >>> config = _OptimizerConfig("AdamOptimizer", groups, {"lr": 1, "alpha": 0.9, "beta": 0.99})
    >>> config.lr
    1.0
    >>> groups
    [{'params': ['fc1.weight'], 'alpha': 0.8, 'lr': 1, 'beta': 0.99}]

    """

    name: str
    """Name of the optimizer."""
    lr: float
    """Learning rate, before a scheduler changes it."""
    defaults: dict[str, Any]
    """Settings of weights in no group, and ``lr``."""
    params: list[dict[str, Any]]
    """Groups, each with all settings."""

    def __init__(self, name: str, params: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        if not isinstance(name, str) or name not in _NAMES:
            raise AssertionError(
                f"the name of an optimizer must be one of {', '.join(_NAMES)}, got {name!r}{hint(name, _NAMES)}"
            )
        if not isinstance(defaults, dict) or "lr" not in defaults:
            raise AssertionError(f"'defaults' must be a dict of settings with the key 'lr', got {defaults!r}")
        if not _not_negative(defaults["lr"]):
            raise AssertionError(f"'lr' must be a number of 0 or more, got {defaults['lr']!r}")
        if not isinstance(params, list):
            raise AssertionError(f"'params' must be a list of dicts, got {type(params).__name__}")
        for at, group in enumerate(params):
            self._check_group(at, group, defaults)
        for group in params:
            _complete(group, defaults)
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = defaults
        self.params = params

    def _check_group(self, at: int, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raises an AssertionError if a group is not valid for this optimizer."""
        if not isinstance(group, dict):
            raise AssertionError(
                f"group {at} of 'params' must be a dict with 'params' and settings, got {type(group).__name__}"
            )
        if "params" not in group:
            raise AssertionError(f"group {at} of 'params' has no key 'params', the list of its weights")
        weights = group["params"]
        if not isinstance(weights, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in weights):
            raise AssertionError(f"'params' of group {at} must be a list of names of weights, got {weights!r}")
        if len(group) == 1:
            raise AssertionError(f"group {at} of 'params' has no settings beside 'params'")
        keys = [key for key in group if key != "params"]
        for key in keys:
            setting = _setting(key, defaults)
            if setting not in defaults:
                raise AssertionError(
                    f"group {at} of 'params' has the key {key!r}; the settings of this optimizer are "
                    f"{', '.join(defaults)}{hint(key, defaults)}"
                )
            if setting != key and setting in keys:
                raise AssertionError(f"group {at} of 'params' has {setting!r} and {key!r}; one of them is enough")


class SGDConfig(_OptimizerConfig):
    """Plain gradient descent: ``w - lr * gradient``. No momentum, clipping or decay.

    Args:
        params: an empty list: all weights have the same settings.
        lr: learning rate.

    Raises:
        AssertionError: if ``params`` is not an empty list, or ``lr`` is not a number of 0 or more.

    >>> from ortrain.trainer.optim import SGDConfig
    >>> config = SGDConfig(lr=0.01)
    >>> config.name, config.lr, config.defaults
    ('SGDOptimizer', 0.01, {'lr': 0.01})

    """

    def __init__(self, params: list[dict[str, Any]] | None = None, lr: float = 0.001) -> None:
        params = [] if params is None else params
        if not isinstance(params, list) or params:
            raise AssertionError("'params' must be an empty list for SGD optimizer")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class _Rule(NamedTuple):
    """Rule for the values of a setting of Adam or LAMB."""

    requirement: str
    holds: Callable[[object], bool]
    # Groups accept plain numbers where an argument must have a special type (a bool, an enum member).
    in_group: Callable[[object], bool]


def _is_number(value: object) -> TypeGuard[float]:
    # Excludes NaN, the only value that differs from itself.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _not_negative(value: object) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _positive(value: object) -> bool:
    return _is_number(value) and value > 0


def _is_float(value: object) -> bool:
    return isinstance(value, float) and _is_number(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _zero_or_one(value: object) -> bool:
    return isinstance(value, int) and value in (0, 1)


class _MomentsConfig(_OptimizerConfig):
    """Common part of Adam and LAMB: rules of settings, and no learning rate in groups."""

    _rules: ClassVar[dict[str, _Rule]] = {
        **dict.fromkeys(
            ("lr", "alpha", "beta", "lambda", "epsilon"), _Rule("a number of 0 or more", _not_negative, _not_negative)
        ),
        "max_norm_clip": _Rule("a number above 0", _positive, _positive),
        "do_bias_correction": _Rule("True or False", _is_bool, _zero_or_one),
    }

    def __init__(self, name: str, params: list[dict[str, Any]] | None, defaults: dict[str, Any]) -> None:
        for key, value in defaults.items():
            rule = self._rules[key]
            if not rule.holds(value):
                raise AssertionError(f"{_argument(key)!r} must be {rule.requirement}, got {value!r}")
        super().__init__(name, [] if params is None else params, defaults)

    def _check_group(self, at: int, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        super()._check_group(at, group, defaults)
        if "lr" in group:
            raise AssertionError("'lr' is not supported inside params")
        for key, value in group.items():
            if key == "params":
                continue
            rule = self._rules[_setting(key, defaults)]
            if not rule.in_group(value):
                raise AssertionError(f"{key!r} of group {at} must be {rule.requirement}, got {value!r}")

    @property
    def alpha(self) -> float:
        """Decay rate of the first moment.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig().alpha
        0.9
        """
        return float(self.defaults["alpha"])

    @property
    def beta(self) -> float:
        """Decay rate of the second moment.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig().beta
        0.999
        """
        return float(self.defaults["beta"])

    @property
    def lambda_coef(self) -> float:
        """Weight decay; ``lambda`` in ``defaults``.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig(lambda_coef=0.01).lambda_coef
        0.01
        """
        return float(self.defaults["lambda"])

    @property
    def epsilon(self) -> float:
        """The term that is added to the square root of the second moment.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig().epsilon
        1e-08
        """
        return float(self.defaults["epsilon"])

    @property
    def max_norm_clip(self) -> float:
        """Largest L2 norm of all gradients together. Larger gradients are scaled down to this norm.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig().max_norm_clip
        1.0
        """
        return float(self.defaults["max_norm_clip"])

    @property
    def do_bias_correction(self) -> bool:
        """True if moments are divided by ``1 - alpha ** t`` and ``1 - beta ** t`` at step ``t``.

        >>> from ortrain.trainer.optim import AdamConfig, LambConfig
        >>> AdamConfig().do_bias_correction, LambConfig().do_bias_correction
        (True, False)
        """
        return bool(self.defaults["do_bias_correction"])


def _is_mode(value: object) -> bool:
    return isinstance(value, AdamConfig.DecayMode)


class AdamConfig(_MomentsConfig):
    """Adam with decoupled weight decay. Each weight uses the settings of its group.

    Args:
        params: groups of weights with their own settings, see :class:`_OptimizerConfig`. A group cannot have ``lr``.
        lr: learning rate.
        alpha: decay rate of the first moment.
        beta: decay rate of the second moment.
        lambda_coef: weight decay; ``lambda`` in ``defaults`` and groups.
        epsilon: the term that is added to the square root of the second moment.
        max_norm_clip: largest L2 norm of all gradients together; ``math.inf`` disables clipping.
        do_bias_correction: divide moments by ``1 - alpha ** t`` and ``1 - beta ** t`` at step ``t``.
        weight_decay_mode: ``AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE`` computes the decay from the old weight, and
            adds ``epsilon`` to the bias-corrected root. ``AFTER_WEIGHT_UPDATE`` computes the decay from the new weight,
            and adds ``epsilon`` to the root without correction.

    Raises:
        AssertionError: if a setting is out of its range, or a group is invalid as described in
            :class:`_OptimizerConfig`. In this case no group is changed.

    >>> from ortrain.trainer.optim import AdamConfig
    >>> mode = AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    >>> config = AdamConfig([{"params": ["fc1.bias"], "alpha": 0.8}], lr=0.01, weight_decay_mode=mode)
    >>> config.params[0]["alpha"], config.params[0]["beta"]
    (0.8, 0.999)
    >>> AdamConfig([{"params": ["fc1.bias"], "lr": 0.1}])
    Traceback (most recent call last):
    AssertionError: 'lr' is not supported inside params

    """

    @unique
    class DecayMode(IntEnum):
        """Weights from which the decay is computed: the weights before or after an update."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    _rules: ClassVar[dict[str, _Rule]] = {
        **_MomentsConfig._rules,
        "weight_decay_mode": _Rule("a member of AdamConfig.DecayMode", _is_mode, _zero_or_one),
    }

    def __init__(
        self,
        params: list[dict[str, Any]] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        super().__init__("AdamOptimizer", params, defaults)

    @property
    def weight_decay_mode(self) -> DecayMode:
        """Weights from which the decay is computed: the weights before or after a step.

        >>> from ortrain.trainer.optim import AdamConfig
        >>> AdamConfig().weight_decay_mode.name
        'BEFORE_WEIGHT_UPDATE'
        """
        return AdamConfig.DecayMode(self.defaults["weight_decay_mode"])


class LambConfig(_MomentsConfig):
    """LAMB: a step of Adam, scaled for each weight by the ratio of the norms of weight and step.

    All weights of a training share ``ratio_min``, ``ratio_max`` and ``do_bias_correction``.

    Args:
        params: groups of weights with their own settings, see :class:`_OptimizerConfig`. A group cannot have ``lr``.
        lr: learning rate.
        alpha: decay rate of the first moment.
        beta: decay rate of the second moment.
        lambda_coef: weight decay, a part of the step; ``lambda`` in ``defaults`` and groups.
        ratio_min: smallest ratio, a float.
        ratio_max: largest ratio, a float.
        epsilon: the term that is added to the square root of the second moment.
        max_norm_clip: largest L2 norm of all gradients together; ``math.inf`` disables clipping.
        do_bias_correction: divide moments by ``1 - alpha ** t`` and ``1 - beta ** t`` at step ``t``.

    Raises:
        AssertionError: if a setting is out of its range, or a group is invalid as described in
            :class:`_OptimizerConfig`. In this case no group is changed.

    >>> from ortrain.trainer.optim import LambConfig
    >>> config = LambConfig(lr=0.002, ratio_max=10.0)
    >>> config.name, config.ratio_max, config.epsilon
    ('LambOptimizer', 10.0, 1e-06)

    """

    _rules: ClassVar[dict[str, _Rule]] = {
        **_MomentsConfig._rules,
        **dict.fromkeys(("ratio_min", "ratio_max"), _Rule("a float", _is_float, _is_number)),
    }

    def __init__(
        self,
        params: list[dict[str, Any]] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)

    @property
    def ratio_min(self) -> float:
        """Smallest ratio of the norms of weight and step.

        >>> from ortrain.trainer.optim import LambConfig
        >>> LambConfig().ratio_min
        -inf
        """
        return float(self.defaults["ratio_min"])

    @property
    def ratio_max(self) -> float:
        """Largest ratio of the norms of weight and step.

        >>> from ortrain.trainer.optim import LambConfig
        >>> LambConfig().ratio_max
        inf
        """
        return float(self.defaults["ratio_max"])


def _setting(key: str, defaults: Mapping[str, Any]) -> str:
    """Returns the setting for a key of a group."""
    return key if key in defaults or not isinstance(key, str) else key.removesuffix(_ENDING)


def _argument(setting: str) -> str:
    """Returns the argument of a config for a setting."""
    return setting + _ENDING if setting == "lambda" else setting


def _complete(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Adds all missing settings to a group, in place."""
    for key in [key for key in group if key.endswith(_ENDING) and key not in defaults]:
        group[_setting(key, defaults)] = group.pop(key)
    for key, value in defaults.items():
        group.setdefault(key, value)
