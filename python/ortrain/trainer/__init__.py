"""The trainer for large models: options, optimizers, schedules, loss scaling and checkpoints in one object.

>>> from ortrain.trainer import ORTTrainerOptions, TrainStepInfo, optim
>>> scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=100, warmup=0.1)
>>> options = ORTTrainerOptions({"device": {"id": "cpu"}, "lr_scheduler": scheduler})
>>> options.batch.gradient_accumulation_steps
1
>>> TrainStepInfo(optim.AdamConfig(lr=0.001)).optimization_step
0
"""

from ortrain.trainer import amp, checkpoint, distributed, legacy, model_desc_validation, optim, postprocess
from ortrain.trainer.orttrainer import ORTTrainer
from ortrain.trainer.orttrainer_options import ORTTrainerOptions, PropagateCastOpsStrategy
from ortrain.trainer.train_step_info import TrainStepInfo

__all__ = [
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "TrainStepInfo",
    "amp",
    "checkpoint",
    "distributed",
    "legacy",
    "model_desc_validation",
    "optim",
    "postprocess",
]
