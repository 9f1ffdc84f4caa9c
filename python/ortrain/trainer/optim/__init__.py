"""Optimizers and learning-rate schedulers of :class:`ortrain.trainer.ORTTrainer`.

>>> from ortrain.trainer import optim
>>> config = optim.LambConfig(lr=0.002)
>>> scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=1000, warmup=0.1)
>>> config.name, scheduler.total_steps
('LambOptimizer', 1000)
"""

from ortrain.trainer.optim import config, lr_scheduler
from ortrain.trainer.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

__all__ = [
    "AdamConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
    "config",
    "lr_scheduler",
]
