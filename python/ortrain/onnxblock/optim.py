"""Optimizers as models of their own."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from ortrain import _ortrain
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import current
from ortrain.onnxblock.blocks import import_set

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]


class ClipGradNorm(Block):
    """Gradients scaled so that their norm, over all of them, is at most a number: ``InplaceClipGradNorm``.

    Args:
        max_norm: that number.

    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = max_norm

    def build(self, gradients_name: str) -> str:
        """Return the name of the sequence of clipped gradients."""
        accessor = current()
        clipped = accessor.name("clip_grad_norm_output")
        name = accessor.name("InplaceClipGradNorm")
        graph = self.base.graph
        graph.node.append(
            helper.make_node(
                "InplaceClipGradNorm",
                [gradients_name],
                [clipped],
                name,
                domain="com.microsoft",
                max_norm=self._max_norm,
            )
        )
        graph.value_info.append(helper.make_tensor_sequence_value_info(clipped, TensorProto.FLOAT, None))
        import_set(self.base, "com.microsoft")
        return clipped


class _Optimizer(Block):
    def __init__(
        self,
        kind: str,
        clip_grad: Block | None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        super().__init__()
        self._kind = kind
        self._clip_grad = clip_grad
        self._betas, self._eps = betas, eps
        self._weight_decay, self._bias_correction = weight_decay, bias_correction

    def build(self, parameters: Parameters) -> str:
        """Make the model of the context an optimizer model; return the name of its output.

        Args:
            parameters: trained and frozen ones, as :meth:`TrainingBlock.parameters` returns them. An optimizer model
                is the same for all of them.

        """
        accessor = current()
        graph = self.base.graph
        gradients = "gradients" if self._clip_grad is None else self._clip_grad("gradients")
        made, accessor.last_number = _ortrain.optimizer_model(
            self._kind,
            betas=self._betas,
            epsilon=self._eps,
            weight_decay=self._weight_decay,
            bias_correction=self._bias_correction,
            opset=accessor.opset(),
            last=accessor.last_number,
        )
        added = onnx.ModelProto.FromString(made).graph
        for node in added.node:
            node.input[:] = [gradients if name == "gradients" else name for name in node.input]
        added.ClearField("name")
        graph.MergeFrom(added)
        import_set(self.base, "com.microsoft")
        return str(graph.output[0].name)


class AdamW(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): ``AdamWOptimizer``.

    Args:
        bias_correction: whether the moments are corrected for starting at zero.
        betas: decay rates of the two moments.
        eps: what is added to the root of the second moment.
        weight_decay: the share of a weight, times the learning rate, that a step takes away.
        clip_grad: what is done to the gradients before: a :class:`ClipGradNorm`, say.

    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Block | None = None,
    ) -> None:
        super().__init__("AdamW", clip_grad, betas, eps, weight_decay, bias_correction)


class SGD(_Optimizer):
    """Plain stochastic gradient descent: ``SGDOptimizerV2``.

    Args:
        clip_grad: what is done to the gradients before: a :class:`ClipGradNorm`, say.

    """

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__("SGD", clip_grad)
