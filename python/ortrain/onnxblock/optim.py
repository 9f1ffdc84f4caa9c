"""Blocks that build optimizer models.

>>> from ortrain.onnxblock import empty_base, optim
>>> with empty_base(17) as accessor:
...     name = optim.AdamW(weight_decay=0.01, clip_grad=optim.ClipGradNorm(1.0))(([], []))
>>> optimizer = Optimizer(accessor.model, module)
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import onnx
from onnx import TensorProto, helper

from ortrain import _ortrain
from ortrain._suggest import near_to_pattern
from ortrain.errors import InvalidArgumentError
from ortrain.onnxblock._block import Block
from ortrain.onnxblock._model import current
from ortrain.onnxblock.blocks import import_set
from ortrain.optim import OptimizerConfig

__all__ = ["SGD", "AdamW", "ClipGradNorm", "Optimizer"]

# Same message as the error of the core.
NO_SUCH_FORMULA = (
    "PyTorch's formula of AdamW always corrects the bias of the moments; use onnxruntime's formula without "
    "bias_correction"
)

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]


class ClipGradNorm(Block):
    """Gradient clipping by the global norm: ``InplaceClipGradNorm`` of ``com.microsoft`` 1.

    With n the L2 norm of all gradients together, each gradient is multiplied by ``max_norm / (n + 1e-6)`` if this
    factor is less than 1.

    Args:
        max_norm: the maximum norm of the clipped gradients.

    >>> with onnxblock.empty_base(17) as accessor:
    ...     name = onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(1.0))(([], []))
    >>> [node.op_type for node in accessor.model.graph.node]
    ['InplaceClipGradNorm', 'SGDOptimizerV2']

    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = max_norm

    def build(self, gradients_name: str) -> str:
        """Return the name of the sequence of clipped gradients.

        >>> with onnxblock.empty_base(17) as accessor:
        ...     name = onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(0.5))(([], []))
        >>> accessor.model.graph.node[0].attribute[0].f
        0.5
        """
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
        formula: str = "onnxruntime",
    ) -> None:
        super().__init__()
        self._formula = formula
        self._kind = kind
        self._clip_grad = clip_grad
        self._betas, self._eps = betas, eps
        self._weight_decay, self._bias_correction = weight_decay, bias_correction

    def build(self, parameters: Parameters) -> str:
        """Turn the model of the context into an optimizer model; return the name of its output.

        Args:
            parameters: the trained and the frozen parameters, as :meth:`TrainingBlock.parameters` returns them. The
                optimizer model does not depend on them.

        >>> with onnxblock.empty_base(17) as accessor:
        ...     name = onnxblock.optim.SGD()(([], []))
        >>> [entry.name for entry in accessor.model.graph.input]
        ['learning_rate', 'step', 'params', 'gradients', 'first_order_moments']

        """
        accessor = current()
        graph = self.base.graph
        gradients = "gradients" if self._clip_grad is None else self._clip_grad("gradients")
        model_bytes, accessor.last_number = _ortrain.optimizer_model(
            self._kind,
            betas=self._betas,
            epsilon=self._eps,
            weight_decay=self._weight_decay,
            bias_correction=self._bias_correction,
            formula=self._formula,
            opset=accessor.opset(),
            last=accessor.last_number,
        )
        added = onnx.ModelProto.FromString(model_bytes).graph
        for node in added.node:
            node.input[:] = [gradients if name == "gradients" else name for name in node.input]
        added.ClearField("name")
        graph.MergeFrom(added)
        import_set(self.base, "com.microsoft")
        return str(graph.output[0].name)


class AdamW(_Optimizer):
    """Adam with decoupled weight decay: ``AdamWOptimizer`` of ``com.microsoft`` (version 1).

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        bias_correction: True to correct the moments for their start at zero.
        betas: decay rates of the two moments.
        eps: the term added to the root of the second moment.
        weight_decay: the fraction of a weight, times the learning rate, that a step subtracts.
        clip_grad: a block that transforms the gradients first, for example a :class:`ClipGradNorm`.
        formula: ``"onnxruntime"`` or ``"pytorch"``; see :class:`ortrain.artifacts.AdamW`. With ``eps=1e-8`` and
            ``weight_decay=0.01``, the formula of PyTorch is ``torch.optim.AdamW`` with its defaults.

    >>> with onnxblock.empty_base(17) as accessor:
    ...     name = onnxblock.optim.AdamW(weight_decay=0.01)(([], []))
    >>> optimizer = Optimizer(accessor.model, module)
    >>> _ = module(x, labels)
    >>> optimizer.step()

    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Block | None = None,
        formula: Literal["onnxruntime", "pytorch"] = "onnxruntime",
    ) -> None:
        if formula == "pytorch" and not bias_correction:
            raise InvalidArgumentError(NO_SUCH_FORMULA)
        super().__init__("AdamW", clip_grad, betas, eps, weight_decay, bias_correction, formula)


class SGD(_Optimizer):
    """Plain stochastic gradient descent: ``SGDOptimizerV2`` of ``com.microsoft`` (version 1).

    A step subtracts the learning rate times the gradient from each parameter.

    Args:
        clip_grad: a block that transforms the gradients first, for example a :class:`ClipGradNorm`.

    >>> with onnxblock.empty_base(17) as accessor:
    ...     name = onnxblock.optim.SGD()(([], []))
    >>> optimizer = Optimizer(accessor.model, module, replace=True)

    """

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__("SGD", clip_grad)


class Optimizer(Block):
    """Block for an optimizer of :mod:`ortrain.optim`, with settings, parameter groups, clipping and averages.

    Args:
        config: the optimizer. Its groups may select parameters by name or pattern. A block has no access to the nodes
            or layers of a model, so callables and ``layer_decay`` are errors.

    >>> import ortrain
    >>> from ortrain import artifacts, onnxblock, optim
    >>> lion = onnxblock.optim.Optimizer(optim.Lion(groups=[{"params": "*.bias", "weight_decay": 0.1}]))
    >>> loss = artifacts.LossType.CrossEntropyLoss
    >>> artifacts.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=lion)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> _ = module(x, labels)
    >>> optimizer.step()

    """

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__()
        if not isinstance(config, OptimizerConfig):
            raise TypeError(f"config must be an optimizer of ortrain.optim, got {type(config).__name__}")
        self._config = config

    def build(self, parameters: Parameters) -> str:
        """Turn the model of the context into an optimizer model; return the name of its first output.

        Args:
            parameters: the trained and the frozen parameters, as :meth:`TrainingBlock.parameters` returns them.

        Raises:
            InvalidArgumentError: for a group that selects no parameter, or selects parameters by a callable.

        >>> from ortrain import onnxblock, optim
        >>> trained = [onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[3])]
        >>> with onnxblock.empty_base(17) as accessor:
        ...     name = onnxblock.optim.Optimizer(optim.Lion())((trained, []))
        >>> name
        'updated_params'

        """
        accessor = current()
        trained = parameters[0]
        names = [tensor.name for tensor in trained]

        def select(argument: str, selection: str | Sequence[str] | Callable[..., Any]) -> list[str]:
            if callable(selection):
                raise InvalidArgumentError(f"{argument}: a block accepts names and patterns, not a callable")
            patterns = [selection] if isinstance(selection, str) else selection
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    near = near_to_pattern(pattern, names)
                    raise InvalidArgumentError(f"{argument}: {pattern!r} matches no trained parameter{near}")
            return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

        def layers() -> Mapping[str, int | None]:
            raise InvalidArgumentError("layer_decay requires the layers of a model, which a block does not know")

        spec = self._config._for(names, select, layers)
        dtypes = list(dict.fromkeys(tensor.data_type for tensor in trained))
        model_bytes, accessor.last_number = _ortrain.described_optimizer(
            spec, self._config._own, dtypes or [TensorProto.FLOAT], accessor.opset(), accessor.last_number
        )
        model = onnx.ModelProto.FromString(model_bytes)
        needed = next(entry.version for entry in model.opset_import if not entry.domain)
        if needed > accessor.opset():
            raise InvalidArgumentError(
                f"this optimizer requires opset {needed}, but the model of the context has {accessor.opset()}; open "
                f"it with onnxblock.empty_base({needed})"
            )
        model.graph.ClearField("name")
        self.base.graph.MergeFrom(model.graph)
        self.base.metadata_props.extend(model.metadata_props)
        if any(entry.domain == "com.microsoft" for entry in model.opset_import):
            import_set(self.base, "com.microsoft")
        return str(self.base.graph.output[0].name)
