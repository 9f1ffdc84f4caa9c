"""Loss scalers for mixed precision of :class:`ortrain.trainer.ORTTrainer`.

>>> from ortrain.trainer import amp
>>> amp.DynamicLossScaler(loss_scale=1024).loss_scale
1024.0
"""

from ortrain.trainer.amp import loss_scaler
from ortrain.trainer.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
