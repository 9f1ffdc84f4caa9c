"""The optimizers of the table. `make optimizers` writes this file of what the core says; a test compares the two."""

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
    """Adadelta: steps in the unit of the weights.

    Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012; torch.optim.Adadelta.

    Args:
        lr: the learning rate before any schedule.
        rho: decay rate of the two averages; a number from 0 to below 1.
        eps: what is added under the roots of both averages; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
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
    """Adafactor: steps by the second moment of rows and columns, which takes little memory.

    Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018; torch.optim.Adafactor.

    Args:
        lr: the learning rate before any schedule.
        beta2_decay: the power of the step by which averages take less of new squares; a finite number.
        eps1: the least root of a squared gradient that is divided by; a finite number above 0.
        eps2: the least size of a parameter that its steps are a share of; a finite number that is not
            negative.
        d: the largest size of a step before the rate; a finite number above 0.
        weight_decay: the share of a weight that a step takes away; a finite number that is not negative.
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
    """Adagrad: rates by the sum of all squared gradients.

    Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011; torch.optim.Adagrad.

    Args:
        lr: the learning rate before any schedule.
        lr_decay: how fast the rate falls: divided by ``1 + (t - 1) * lr_decay`` at step t; a finite number
            that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        initial_accumulator_value: the value that the sum of squares starts from; a finite number that is
            not negative.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
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
    """Adam: rates by averages of gradients and of their squares, with an L2 penalty.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; amsgrad: Reddi et al., 2018; torch.optim.Adam.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
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
    """Adamax: Adam by the largest gradient.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 7.1; torch.optim.Adamax.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: what is added to the size of a gradient; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
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
    """AdamW: Adam whose weights decay apart from the gradient.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the share of a weight that a step takes away; a finite number that is not negative.
        amsgrad: whether to divide by the largest average of squares so far.
        bias_correction: whether to correct the averages for starting at zero.
        formula: the formula of PyTorch, or that of onnxruntime, as :class:`ortrain.artifacts.AdamW` shows
            them.
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
    """LAMB: Adam with a rate for each tensor by its norm.

    You et al., Large Batch Optimization for Deep Learning, 2020.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of the weight that is added to its direction; a finite number that is not
            negative.
        ratio_min: the least trust ratio of a tensor; a finite number that is not negative.
        ratio_max: the largest trust ratio of a tensor; a finite number that is not negative.
        bias_correction: whether to correct the averages for starting at zero.
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
    """LARS: momentum with a rate for each tensor by its norm.

    You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.

    Args:
        lr: the learning rate before any schedule.
        momentum: the share of the velocity that is kept; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        trust_coefficient: what the trust ratio of a tensor is multiplied by; a finite number above 0.
        eps: what is added to the norms that the trust ratio is divided by; a finite number that is not
            negative.
        nesterov: whether to Nesterov's momentum.
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
    """Lion: steps by the sign of a momentum.

    Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1.

    Args:
        lr: the learning rate before any schedule.
        betas: the share of the momentum in the direction of a step, and decay rate of the momentum: a
            number from 0 to below 1 each.
        weight_decay: the share of a weight that a step takes away; a finite number that is not negative.
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
    """Muon: orthogonal steps for matrices, AdamW for other parameters and where a group asks for it.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; torch.optim.Muon.

    Args:
        lr: the learning rate before any schedule.
        momentum: decay rate of the momentum of matrices; a number from 0 to below 1.
        eps: the least norm that the momentum of a matrix is divided by; a finite number above 0.
        weight_decay: the share of a weight that a step takes away; a finite number that is not negative.
        adamw: 1 for matrices that AdamW trains, embeddings say; a finite number that is not negative.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        adamw_eps: the number that AdamW adds to the root that it divides by; a finite number that is not
            negative.
        nesterov: whether to take Nesterov's momentum.
        match_rms_adamw: whether to give steps of matrices the size that those of AdamW have.
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
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        momentum_decay: how fast the momentum reaches its full value; a finite number that is not negative.
        decoupled_weight_decay: whether to take weight decay from the weights, not from gradients.
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
    """RAdam: Adam whose adaptive rate is rectified while few gradients were seen.

    Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020; torch.optim.RAdam.

    Args:
        lr: the learning rate before any schedule.
        betas: decay rate of the average of gradients, and decay rate of the average of squared gradients: a
            number from 0 to below 1 each.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        decoupled_weight_decay: whether to take weight decay from the weights, not from gradients.
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
    """RMSprop: rates by an average of squared gradients.

    Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centred: Graves, 2013; torch.optim.RMSprop.

    Args:
        lr: the learning rate before any schedule.
        alpha: decay rate of the average of squares; a number from 0 to below 1.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        momentum: the share of the velocity that is kept; a finite number that is not negative.
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
    """ScheduleFreeAdamW: AdamW that trains for an average of its weights and needs no falling rate.

    Defazio et al., The Road Less Scheduled, 2024, algorithm 1.

    Args:
        lr: the learning rate before any schedule.
        betas: the share of the average in the point at which gradients are taken, and decay rate of the
            average of squared gradients: a number between 0 and 1 each.
        eps: what is added to the root that a step is divided by; a finite number that is not negative.
        weight_decay: the factor of the weight that is added to its direction; a finite number that is not
            negative.
        warmup_steps: steps over which the rate rises; a finite number that is not negative.
        r: the power of the step in the weights of the average; a finite number.
        weight_lr_power: the power of the largest rate in the weights of the average; a finite number.
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
    """SGD: stochastic gradient descent, with momentum if asked for.

    Sutskever et al., On the importance of initialization and momentum in deep learning, 2013; torch.optim.SGD.

    Args:
        lr: the learning rate before any schedule.
        momentum: the share of the velocity that is kept; a finite number that is not negative.
        dampening: the share of a gradient that is left out of the velocity, after the first; a finite
            number.
        weight_decay: the factor of a penalty on the weights: ``weight_decay * weight`` is added to the
            gradient; a finite number that is not negative.
        nesterov: whether to Nesterov's momentum.
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
