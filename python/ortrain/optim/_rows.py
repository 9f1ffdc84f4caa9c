"""The optimizers of the core's table. `make optimizers` generates this file; a test compares it with the core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ortrain.optim._config import Group, OptimizerConfig, is_onnxruntime

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "ScheduleFreeAdamW",
]


class Adadelta(OptimizerConfig):
    """Adadelta: rates from running averages of squared gradients and squared steps.

    Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012; torch.optim.Adadelta.

    Args:
        lr: the learning rate before any schedule.
        rho: decay rate of both averages; a number from 0 to below 1.
        eps: added to both averages before their square roots; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Adadelta(lr=2.0)
    >>> config
    Adadelta(lr=2.0)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 1.0,
        *,
        rho: float = 0.9,
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"rho": rho, "eps": eps, "weight_decay": weight_decay},
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Adafactor(OptimizerConfig):
    """Adafactor: Adam with second moments of rows and columns instead of elements, which takes little memory.

    Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018; torch.optim.Adafactor.

    Args:
        lr: the learning rate before any schedule.
        beta2_decay: exponent of the weight of new squares in the averages (``t ** beta2_decay`` at step t);
            a finite number.
        eps1: smallest root of the second moment that divides a gradient; a finite number above 0.
        eps2: smallest root mean square of a parameter that scales its steps; a finite number that is not
            negative.
        d: largest root mean square of a step before the learning rate; a finite number above 0.
        weight_decay: decoupled weight decay (a step subtracts ``lr * weight_decay * weight``); a finite
            number that is not negative.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Adafactor(lr=0.02)
    >>> config
    Adafactor(lr=0.02)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.01,
        *,
        beta2_decay: float = -0.8,
        eps1: float = 1.1920928955078125e-07,
        eps2: float = 0.001,
        d: float = 1.0,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"beta2_decay": beta2_decay, "eps1": eps1, "eps2": eps2, "d": d, "weight_decay": weight_decay},
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Adagrad(OptimizerConfig):
    """Adagrad: rates from the sum of all squared gradients.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011; torch.optim.Adagrad.

    Args:
        lr: the learning rate before any schedule.
        lr_decay: decay of the learning rate (divided by ``1 + (t - 1) * lr_decay`` at step t); a finite
            number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        initial_accumulator_value: initial value of the sum of squares; a finite number that is not
            negative.
        eps: added to the square root that divides a step; a finite number that is not negative.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Adagrad(lr=0.02)
    >>> config
    Adagrad(lr=0.02)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.01,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
            },
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Adam(OptimizerConfig):
    """Adam: rates from running averages of gradients and their squares, with an L2 penalty.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; amsgrad: Reddi et al., 2018; torch.optim.Adam.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        amsgrad: whether to divide by the largest average of squares so far.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Adam(lr=0.002)
    >>> config
    Adam(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay},
            {"amsgrad": amsgrad},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Adamax(OptimizerConfig):
    """Adamax: Adam with the largest gradient instead of the average of squares.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 7.1; torch.optim.Adamax.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the absolute value of a gradient; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Adamax(lr=0.004)
    >>> config
    Adamax(lr=0.004)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.002,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay},
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class AdamW(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: decoupled weight decay (a step subtracts ``lr * weight_decay * weight``); a finite
            number that is not negative.
        amsgrad: whether to divide by the largest average of squares so far.
        bias_correction: whether to correct the bias of the averages towards zero.
        formula: the formula of PyTorch or the formula of onnxruntime: see :class:`ortrain.artifacts.AdamW`.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.AdamW(lr=0.002)
    >>> config
    AdamW(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        bias_correction: bool = True,
        formula: Literal["pytorch", "onnxruntime"] = "pytorch",
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay},
            {"amsgrad": amsgrad, "bias_correction": bias_correction, "onnxruntime": is_onnxruntime(formula)},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class LAMB(OptimizerConfig):
    """LAMB: Adam with a learning rate for each tensor, scaled by its norm.

    You et al., Large Batch Optimization for Deep Learning, 2020.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of the weight in the direction of a step (``weight_decay * weight`` is added);
            a finite number that is not negative.
        ratio_min: smallest trust ratio of a tensor; a finite number that is not negative.
        ratio_max: largest trust ratio of a tensor; a finite number that is not negative, or infinity.
        bias_correction: whether to correct the bias of the averages towards zero.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.LAMB(lr=0.002)
    >>> config
    LAMB(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.01,
        ratio_min: float = 0.0,
        ratio_max: float = math.inf,
        bias_correction: bool = True,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "ratio_min": ratio_min, "ratio_max": ratio_max},
            {"bias_correction": bias_correction},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class LARS(OptimizerConfig):
    """LARS: momentum with a learning rate for each tensor, scaled by its norm.

    You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.

    Args:
        lr: the learning rate before any schedule.
        momentum: factor of the previous velocity; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        trust_coefficient: factor of the trust ratio of a tensor; a finite number above 0.
        eps: added to the divisor of the trust ratio; a finite number that is not negative.
        nesterov: whether to use Nesterov's momentum.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.LARS(lr=0.2)
    >>> config
    LARS(lr=0.2)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0001,
        trust_coefficient: float = 0.001,
        eps: float = 1e-08,
        nesterov: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps},
            {"nesterov": nesterov},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Lion(OptimizerConfig):
    """Lion: steps of equal size, with the sign of the momentum.

    Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1.

    Args:
        lr: the learning rate before any schedule.
        betas: weight of the momentum in the direction of a step, and decay rate of the momentum: a number
            from 0 to below 1 each.
        weight_decay: decoupled weight decay (a step subtracts ``lr * weight_decay * weight``); a finite
            number that is not negative.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Lion(lr=0.0002)
    >>> config
    Lion(lr=0.0002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.0001,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "weight_decay": weight_decay},
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class Muon(OptimizerConfig):
    """Muon: orthogonal steps for matrices, AdamW for other parameters and for groups with adamw=1.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; torch.optim.Muon.

    Args:
        lr: the learning rate before any schedule.
        momentum: decay rate of the momentum of matrices; a number from 0 to below 1.
        eps: smallest norm that divides the momentum of a matrix; a finite number above 0.
        weight_decay: decoupled weight decay (a step subtracts ``lr * weight_decay * weight``); a finite
            number that is not negative.
        adamw: 1: train matrices with AdamW (for example embeddings); a finite number that is not negative.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        adamw_eps: added to the square root that divides a step of AdamW; a finite number that is not
            negative.
        nesterov: whether to use Nesterov's momentum.
        match_rms_adamw: whether to scale the steps of matrices to the size of AdamW's steps.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.Muon(lr=0.002)
    >>> config
    Muon(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        momentum: float = 0.95,
        eps: float = 1e-07,
        weight_decay: float = 0.1,
        adamw: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-08,
        nesterov: bool = True,
        match_rms_adamw: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {
                "momentum": momentum,
                "eps": eps,
                "weight_decay": weight_decay,
                "adamw": adamw,
                "betas": betas,
                "adamw_eps": adamw_eps,
            },
            {"nesterov": nesterov, "match_rms_adamw": match_rms_adamw},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class NAdam(OptimizerConfig):
    """NAdam: Adam with Nesterov's momentum.

    Dozat, Incorporating Nesterov Momentum into Adam, 2016; torch.optim.NAdam.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        momentum_decay: rate at which the momentum rises to its full value; a finite number that is not
            negative.
        decoupled_weight_decay: whether to subtract weight decay from the weights instead of adding it to
            the gradients.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.NAdam(lr=0.004)
    >>> config
    NAdam(lr=0.004)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.002,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        momentum_decay: float = 0.004,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay},
            {"decoupled_weight_decay": decoupled_weight_decay},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class RAdam(OptimizerConfig):
    """RAdam: Adam with a rectified adaptive rate in the first steps.

    Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020; torch.optim.RAdam.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        decoupled_weight_decay: whether to subtract weight decay from the weights instead of adding it to
            the gradients.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.RAdam(lr=0.002)
    >>> config
    RAdam(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"betas": betas, "eps": eps, "weight_decay": weight_decay},
            {"decoupled_weight_decay": decoupled_weight_decay},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class RMSprop(OptimizerConfig):
    """RMSprop: rates from a running average of squared gradients.

    Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centred: Graves, 2013; torch.optim.RMSprop.

    Args:
        lr: the learning rate before any schedule.
        alpha: decay rate of the average of squares; a number from 0 to below 1.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        momentum: factor of the previous velocity; a finite number that is not negative.
        centered: whether to divide by the variance of gradients, not by the mean of their squares.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.RMSprop(lr=0.02)
    >>> config
    RMSprop(lr=0.02)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.01,
        *,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum},
            {"centered": centered},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class ScheduleFreeAdamW(OptimizerConfig):
    """ScheduleFreeAdamW: AdamW that averages its weights and needs no learning rate schedule.

    Defazio et al., The Road Less Scheduled, 2024, algorithm 1.

    Args:
        lr: the learning rate before any schedule.
        betas: weight of the average in the point at which gradients are computed, and decay rate of the
            average of squared gradients: a number between 0 and 1 each.
        eps: added to the square root that divides a step; a finite number that is not negative.
        weight_decay: factor of the weight in the direction of a step (``weight_decay * weight`` is added);
            a finite number that is not negative.
        warmup_steps: number of steps over which the learning rate rises; a finite number that is not
            negative.
        r: exponent of the step in the weights of the average; a finite number.
        weight_lr_power: exponent of the largest learning rate in the weights of the average; a finite
            number.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.ScheduleFreeAdamW(lr=0.005)
    >>> config
    ScheduleFreeAdamW(lr=0.005)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.0025,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        warmup_steps: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
                "r": r,
                "weight_lr_power": weight_lr_power,
            },
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )


class SGD(OptimizerConfig):
    """SGD: stochastic gradient descent with optional momentum.

    Sutskever et al., On the importance of initialization and momentum in deep learning, 2013; torch.optim.SGD.

    Args:
        lr: the learning rate before any schedule.
        momentum: factor of the previous velocity; a finite number that is not negative.
        dampening: share of each gradient after the first that is not added to the velocity; a finite
            number.
        weight_decay: factor of an L2 penalty (``weight_decay * weight`` is added to the gradient); a finite
            number that is not negative.
        nesterov: whether to use Nesterov's momentum.
        max_norm: the largest L2 norm of all gradients together; longer ones are scaled, and a step returns
            the norm.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights
            (:attr:`ortrain.api.checkpoint_state.Parameter.average`).
        accumulation: how gradients of several training steps count: their ``"sum"``, or their ``"mean"``.
        groups: groups of parameters with settings of their own, a :class:`Group` each with settings beside
            its keys.
        layer_decay: the share of a layer's rate that the layer before it has; the last layer has the whole
            rate.

    Raises:
        InvalidArgumentError: for a setting outside of its range, and for a group that makes no sense.

    >>> import ortrain
    >>> from ortrain import optim
    >>> config = optim.SGD(lr=0.002)
    >>> config
    SGD(lr=0.002)
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)

    """

    def __init__(
        self,
        lr: float = 0.001,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
    ) -> None:
        super().__init__(
            lr,
            {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            {"nesterov": nesterov},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )
