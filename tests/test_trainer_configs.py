"""Optimizers and step counts of the trainer as documented: defaults, groups, order of arguments, bad input."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortrain.trainer import TrainStepInfo, optim
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig

BEFORE, AFTER = AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE, AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE


def one_group(**settings: Any) -> list[dict[str, Any]]:
    return [{"params": ["fc1.weight"], **settings}]


class TestStepInfo:
    """F7: testTrainStepInfo and testTrainStepInfoInvalidInput."""

    def test_defaults(self) -> None:
        config = LambConfig()
        info = TrainStepInfo(config)
        assert info.optimizer_config is config
        assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)

    def test_order_of_arguments(self) -> None:
        config = SGDConfig()
        info = TrainStepInfo(config, False, ["loss"], 3, 7)
        assert info.optimizer_config is config
        assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (False, ["loss"], 3, 7)

    def test_fields_are_plain(self) -> None:
        info = TrainStepInfo(SGDConfig())
        flag = np.array([False])
        info.all_finite, info.fetches, info.optimization_step, info.step = flag, ["logits"], 1, 2
        assert info.all_finite is flag
        assert (info.fetches, info.optimization_step, info.step) == (["logits"], 1, 2)

    def test_two_have_lists_of_their_own(self) -> None:
        first, second = TrainStepInfo(SGDConfig()), TrainStepInfo(SGDConfig())
        first.fetches.append("loss")
        assert second.fetches == []

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (
                {"optimizer_config": 1},
                "'optimizer_config' must be a config of an optimizer, for example AdamConfig(), got int",
            ),
            (
                {"optimizer_config": None},
                "'optimizer_config' must be a config of an optimizer, for example AdamConfig(), got NoneType",
            ),
            ({"all_finite": 1}, "'all_finite' must be True or False, got 1"),
            ({"all_finite": None}, "'all_finite' must be True or False, got None"),
            ({"fetches": None}, "'fetches' must be a list of names of outputs, got None"),
            ({"fetches": "loss"}, "'fetches' must be a list of names of outputs, got 'loss'"),
            ({"fetches": ["loss", 2]}, "'fetches' must be a list of names of outputs, got ['loss', 2]"),
            ({"optimization_step": -1}, "'optimization_step' must be an int of 0 or more, got -1"),
            ({"optimization_step": 1.0}, "'optimization_step' must be an int of 0 or more, got 1.0"),
            ({"step": -1}, "'step' must be an int of 0 or more, got -1"),
            ({"step": "one"}, "'step' must be an int of 0 or more, got 'one'"),
            ({"step": True}, "'step' must be an int of 0 or more, got True"),
        ],
    )
    def test_bad_input(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(AssertionError) as caught:
            TrainStepInfo(**{"optimizer_config": SGDConfig(), **arguments})
        assert str(caught.value) == text


class TestBase:
    """F8: testOptimizerConfig and testOptimizerConfigInvalidInputs."""

    @pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer", "SGDOptimizer"])
    def test_groups_are_completed_in_place(self, name: str) -> None:
        group = {"params": ["fc1.weight", "fc2.weight"], "alpha": 0.5}
        groups, defaults = [group], {"lr": 1, "alpha": 0.3, "lambda": 0.25}
        config = _OptimizerConfig(name, groups, defaults)
        assert (config.name, config.lr, config.defaults) == (name, 1.0, {"lr": 1, "alpha": 0.3, "lambda": 0.25})
        assert isinstance(config.lr, float)
        assert config.params[0] is group
        assert group == {"params": ["fc1.weight", "fc2.weight"], "alpha": 0.5, "lr": 1, "lambda": 0.25}

    def test_arguments_have_names(self) -> None:
        config = _OptimizerConfig(defaults={"lr": 0.0}, params=[], name="SGDOptimizer")
        assert (config.name, config.lr, config.params) == ("SGDOptimizer", 0.0, [])

    def test_coef_is_dropped(self) -> None:
        groups = one_group(lambda_coef=0.5)
        _OptimizerConfig("AdamOptimizer", groups, {"lr": 0.1, "lambda": 0.0})
        assert groups == one_group(**{"lambda": 0.5, "lr": 0.1})

    @pytest.mark.parametrize(
        ("name", "params", "defaults", "text"),
        [
            (
                "AdaOptimizer",
                [],
                {"lr": 0.1},
                "the name of an optimizer must be one of AdamOptimizer, LambOptimizer, SGDOptimizer, "
                "got 'AdaOptimizer'; did you mean 'AdamOptimizer'?",
            ),
            (
                ["Adam"],
                [],
                {"lr": 0.1},
                "the name of an optimizer must be one of AdamOptimizer, LambOptimizer, SGDOptimizer, got ['Adam']",
            ),
            ("SGDOptimizer", [], [], "'defaults' must be a dict of settings with the key 'lr', got []"),
            (
                "SGDOptimizer",
                [],
                {"alpha": 1},
                "'defaults' must be a dict of settings with the key 'lr', got {'alpha': 1}",
            ),
            ("AdamOptimizer", [], {"lr": -1}, "'lr' must be a number of 0 or more, got -1"),
            ("AdamOptimizer", [], {"lr": None}, "'lr' must be a number of 0 or more, got None"),
            ("AdamOptimizer", [], {"lr": "0.1"}, "'lr' must be a number of 0 or more, got '0.1'"),
            ("AdamOptimizer", [], {"lr": math.nan}, "'lr' must be a number of 0 or more, got nan"),
            ("AdamOptimizer", [], {"lr": math.inf}, "'lr' must be a number of 0 or more, got inf"),
            ("AdamOptimizer", [], {"lr": True}, "'lr' must be a number of 0 or more, got True"),
            ("SGDOptimizer", {}, {"lr": 0.1}, "'params' must be a list of dicts, got dict"),
            (
                "AdamOptimizer",
                [[]],
                {"lr": 0.1, "alpha": 2},
                "group 0 of 'params' must be a dict with 'params' and settings, got list",
            ),
            (
                "AdamOptimizer",
                [{"alpha": 1}],
                {"lr": 0.1, "alpha": 2},
                "group 0 of 'params' has no key 'params', the list of its weights",
            ),
            (
                "AdamOptimizer",
                [{"params": ["w"]}],
                {"lr": 0.1, "alpha": 2},
                "group 0 of 'params' has no settings beside 'params'",
            ),
            (
                "AdamOptimizer",
                one_group(alhpa=1),
                {"lr": 0.1, "alpha": 2},
                "group 0 of 'params' has the key 'alhpa'; the settings of this optimizer are lr, alpha; did you mean "
                "'alpha'?",
            ),
            (
                "AdamOptimizer",
                one_group(**{"lambda_coef": 1, "lambda": 2}),
                {"lr": 0.1, "lambda": 0},
                "group 0 of 'params' has 'lambda' and 'lambda_coef'; one of them is enough",
            ),
            (
                "AdamOptimizer",
                [{"params": "param1", "alpha": 1}],
                {"lr": 0.1, "alpha": 2},
                "'params' of group 0 must be a list of names of weights, got 'param1'",
            ),
            (
                "AdamOptimizer",
                [{"params": [1], "alpha": 1}],
                {"lr": 0.1, "alpha": 2},
                "'params' of group 0 must be a list of names of weights, got [1]",
            ),
        ],
    )
    def test_bad_input(self, name: Any, params: Any, defaults: Any, text: str) -> None:
        with pytest.raises(AssertionError) as caught:
            _OptimizerConfig(name, params, defaults)
        assert str(caught.value) == text

    def test_nothing_is_changed_by_an_error(self) -> None:
        groups = [*one_group(alpha=0.5), *one_group(gamma=0.5)]
        before = copy.deepcopy(groups)
        with pytest.raises(AssertionError, match=r"^group 1 of 'params' has the key 'gamma'"):
            AdamConfig(groups)
        assert groups == before


OF_BOTH = {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "max_norm_clip": 1.0}
OF_ADAM = {**OF_BOTH, "lr": 0.001, "epsilon": 1e-8, "do_bias_correction": True, "weight_decay_mode": BEFORE}
OF_LAMB = {
    **OF_BOTH,
    "lr": 0.001,
    "epsilon": 1e-6,
    "do_bias_correction": False,
    "ratio_min": -math.inf,
    "ratio_max": math.inf,
}


class TestKinds:
    """F9: testOptimizerConfigSGD, testOptimizerConfigAdam, testOptimizerConfigLamb."""

    @pytest.mark.parametrize(
        ("kind", "name", "defaults"),
        [
            (SGDConfig, "SGDOptimizer", {"lr": 0.001}),
            (AdamConfig, "AdamOptimizer", OF_ADAM),
            (LambConfig, "LambOptimizer", OF_LAMB),
        ],
    )
    def test_defaults(self, kind: Callable[..., _OptimizerConfig], name: str, defaults: dict[str, Any]) -> None:
        config = kind()
        assert isinstance(config, _OptimizerConfig)
        assert (config.name, config.lr, config.params) == (name, 0.001, [])
        assert config.defaults == defaults
        for key in defaults:
            attribute = "lambda_coef" if key == "lambda" else key
            assert getattr(config, attribute) == defaults[key], key

    @pytest.mark.parametrize(
        ("config", "settings"),
        [
            (SGDConfig([], 0.5), {"lr": 0.5}),
            (
                AdamConfig([], 0.5, 0.1, 0.2, 0.3, 0.4, 5.0, False, AFTER),
                {
                    "lr": 0.5,
                    "alpha": 0.1,
                    "beta": 0.2,
                    "lambda_coef": 0.3,
                    "epsilon": 0.4,
                    "max_norm_clip": 5.0,
                    "do_bias_correction": False,
                    "weight_decay_mode": AFTER,
                },
            ),
            (
                LambConfig([], 0.5, 0.1, 0.2, 0.3, 0.01, 10.0, 0.4, 5.0, True),
                {
                    "lr": 0.5,
                    "alpha": 0.1,
                    "beta": 0.2,
                    "lambda_coef": 0.3,
                    "ratio_min": 0.01,
                    "ratio_max": 10.0,
                    "epsilon": 0.4,
                    "max_norm_clip": 5.0,
                    "do_bias_correction": True,
                },
            ),
        ],
    )
    def test_order_of_arguments(self, config: _OptimizerConfig, settings: dict[str, Any]) -> None:
        assert {name: getattr(config, name) for name in settings} == settings

    def test_sgd_has_no_groups(self) -> None:
        for params in (one_group(lr=0.1), {}, [{}]):
            with pytest.raises(AssertionError) as caught:
                SGDConfig(params)  # type: ignore[arg-type]
            assert str(caught.value) == "'params' must be an empty list for SGD optimizer"

    def test_decay_modes_are_numbers(self) -> None:
        assert [(mode.name, int(mode)) for mode in AdamConfig.DecayMode] == [
            ("BEFORE_WEIGHT_UPDATE", 0),
            ("AFTER_WEIGHT_UPDATE", 1),
        ]

    def test_integers_are_numbers(self) -> None:
        config = AdamConfig(lr=1, alpha=0, epsilon=0, max_norm_clip=2)
        assert (config.lr, config.alpha, config.epsilon, config.max_norm_clip) == (1.0, 0.0, 0.0, 2.0)

    def test_no_clipping(self) -> None:
        assert LambConfig(max_norm_clip=math.inf).max_norm_clip == math.inf

    def test_a_config_is_pickled(self) -> None:
        config = AdamConfig(one_group(alpha=0.5), weight_decay_mode=AFTER)
        again = pickle.loads(pickle.dumps(config))
        assert (again.name, again.defaults, again.params) == (config.name, config.defaults, config.params)

    @pytest.mark.parametrize("kind", [AdamConfig, LambConfig])
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"lr": -0.1}, "'lr' must be a number of 0 or more, got -0.1"),
            ({"alpha": -1}, "'alpha' must be a number of 0 or more, got -1"),
            ({"beta": -1}, "'beta' must be a number of 0 or more, got -1"),
            ({"beta": math.nan}, "'beta' must be a number of 0 or more, got nan"),
            ({"lambda_coef": -1}, "'lambda_coef' must be a number of 0 or more, got -1"),
            ({"epsilon": "small"}, "'epsilon' must be a number of 0 or more, got 'small'"),
            ({"max_norm_clip": 0}, "'max_norm_clip' must be a number above 0, got 0"),
            ({"max_norm_clip": -1.0}, "'max_norm_clip' must be a number above 0, got -1.0"),
            ({"do_bias_correction": 1}, "'do_bias_correction' must be True or False, got 1"),
            ({"params": {}}, "'params' must be a list of dicts, got dict"),
        ],
    )
    def test_bad_input(self, kind: Callable[..., _OptimizerConfig], settings: dict[str, Any], text: str) -> None:
        with pytest.raises(AssertionError) as caught:
            kind(**settings)
        assert str(caught.value) == text

    @pytest.mark.parametrize(
        ("kind", "settings", "text"),
        [
            (
                AdamConfig,
                {"weight_decay_mode": 0},
                "'weight_decay_mode' must be a member of AdamConfig.DecayMode, got 0",
            ),
            (LambConfig, {"ratio_min": 0}, "'ratio_min' must be a float, got 0"),
            (LambConfig, {"ratio_max": 10}, "'ratio_max' must be a float, got 10"),
            (LambConfig, {"ratio_max": math.nan}, "'ratio_max' must be a float, got nan"),
        ],
    )
    def test_bad_input_of_one(self, kind: Callable[..., _OptimizerConfig], settings: dict[str, Any], text: str) -> None:
        with pytest.raises(AssertionError) as caught:
            kind(**settings)
        assert str(caught.value) == text


class TestGroups:
    """F10: testOptimizerConfigParams and testOptimizerConfigInvalidParams."""

    @pytest.mark.parametrize("kind", [AdamConfig, LambConfig])
    def test_a_group_goes_first(self, kind: Callable[..., _OptimizerConfig]) -> None:
        groups = one_group(alpha=0.25, lambda_coef=0.5)
        config = kind(groups, lr=0.2, alpha=0.75)
        assert config.params == [{**config.defaults, "params": ["fc1.weight"], "alpha": 0.25, "lambda": 0.5}]
        assert config.params[0] is groups[0]
        assert config.defaults["alpha"] == 0.75

    def test_plain_numbers_of_groups(self) -> None:
        (group,) = AdamConfig(one_group(weight_decay_mode=1, do_bias_correction=0, max_norm_clip=1)).params
        assert (group["weight_decay_mode"], group["do_bias_correction"], group["max_norm_clip"]) == (1, 0, 1)
        (group,) = LambConfig(one_group(ratio_max=10)).params
        assert group["ratio_max"] == 10

    @pytest.mark.parametrize("kind", [AdamConfig, LambConfig])
    def test_no_rate_of_a_group(self, kind: Callable[..., _OptimizerConfig]) -> None:
        groups = one_group(lr=0.1)
        with pytest.raises(AssertionError) as caught:
            kind(groups, lr=0.2)
        assert str(caught.value) == "'lr' is not supported inside params"
        assert groups == one_group(lr=0.1)

    @pytest.mark.parametrize(
        ("kind", "settings", "text"),
        [
            (AdamConfig, {"alpha": -1}, "'alpha' of group 0 must be a number of 0 or more, got -1"),
            (AdamConfig, {"lambda_coef": "1"}, "'lambda_coef' of group 0 must be a number of 0 or more, got '1'"),
            (AdamConfig, {"max_norm_clip": 0}, "'max_norm_clip' of group 0 must be a number above 0, got 0"),
            (
                AdamConfig,
                {"weight_decay_mode": 2},
                "'weight_decay_mode' of group 0 must be a member of AdamConfig.DecayMode, got 2",
            ),
            (
                LambConfig,
                {"do_bias_correction": "no"},
                "'do_bias_correction' of group 0 must be True or False, got 'no'",
            ),
            (LambConfig, {"ratio_min": math.nan}, "'ratio_min' of group 0 must be a float, got nan"),
        ],
    )
    def test_bad_input(self, kind: Callable[..., _OptimizerConfig], settings: dict[str, Any], text: str) -> None:
        groups = one_group(**settings)
        with pytest.raises(AssertionError) as caught:
            kind(groups)
        assert str(caught.value) == text
        assert groups == one_group(**settings)

    def test_names_of_the_package(self) -> None:
        assert optim.config.AdamConfig is optim.AdamConfig
        assert optim.config._OptimizerConfig is optim._OptimizerConfig
