"""``torch.nn.Module`` of a model."""

from __future__ import annotations

import functools
import keyword
import sys
from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ortrain import _ortrain
from ortrain._bridges import chosen_weights, in_order, source_snapshot, trained_model
from ortrain._model_source import ModelLike, PathLike
from ortrain._operators import Source, with_stops
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.inference import SessionOptions
from ortrain.torch._engine import Engine, Plan, Settings
from ortrain.torch._inputs import value_of

# Cached, so that each function is wrapped once.
_not_compiled: Any = functools.cache(torch.compiler.disable)
_MODES = ("auto", "train", "freeze")


class _Group(torch.nn.Module):  # type: ignore[misc]
    """Parameters and buffers with a common prefix of their names: group ``fc2`` has ``weight`` and ``bias``.

    A name in a model may be any text, even the name of a module attribute (``forward``). Parameters and buffers are
    therefore looked up in the dictionaries of the module, not as attributes.
    """

    def _group(self, names: Sequence[str]) -> _Group:
        """Returns the nested group of some names, which is created if it does not exist."""
        group = self
        for name in names:
            group = group._modules.setdefault(name, _Group())
        return group

    def _tensor(self, name: str) -> torch.Tensor:
        """Returns a parameter or buffer of this group, or the tensor that a parametrization computes for it."""
        found = self._parameters.get(name)
        if found is None:
            found = self._buffers.get(name)
        return getattr(self, name) if found is None else found

    def __getattr__(self, name: str) -> Any:
        # A name of a model may also be the name of a group (``a`` and ``a.b``). ``_tensor`` finds the parameter in this
        # case.
        group = self.__dict__.get("_modules", {}).get(name)
        return super().__getattr__(name) if group is None else group


class OnnxModule(_Group):
    """A model as a ``torch.nn.Module``. Build one with :func:`ortrain.torch.as_module`.

    The model reads the memory of the parameters: a PyTorch optimizer updates the weights in place. Copies
    (``copy.deepcopy``), pickles and worker processes of a ``DataLoader`` build an engine of their own from the same
    bytes at their first call.

    >>> import torch
    >>> from ortrain import examples
    >>> from ortrain.torch import as_module
    >>> net = as_module(examples.perceptron())
    >>> net(torch.zeros(2, 64)).shape
    torch.Size([2, 10])
    >>> net.get_parameter("fc2.bias").shape
    torch.Size([10])
    """

    def __init__(self, plan: Plan, engine: Engine) -> None:
        super().__init__()
        self._plan = plan
        self._engine: Engine | None = engine
        self._closed = False
        for name, value in zip(engine.full_passes.weight_names(), engine.full_passes.initial_weights(), strict=True):
            if name not in plan.statistics:
                group, key = self._slot(name)
                group._parameters[key] = torch.nn.Parameter(torch.from_dlpack(value))
        if plan.statistics:
            stored = dict(_ortrain.initializers(plan.source))
            for name in plan.statistics:
                group, key = self._slot(name)
                group._buffers[key] = torch.from_dlpack(stored[name])
        self._slots = self._all_slots()

    @classmethod
    def _of(
        cls,
        model: ModelLike,
        wrt: str | Iterable[str] | None,
        batch_norm: str,
        seed: int,
        options: SessionOptions | None,
        stop_gradients: Iterable[str] | None,
    ) -> OnnxModule:
        if batch_norm not in _MODES:
            raise InvalidArgumentError(f"batch_norm must be one of {', '.join(map(repr, _MODES))}, got {batch_norm!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
        source = with_stops(source_snapshot(model), stop_gradients)
        settings = Settings(batch_norm, seed, options)
        plan = Plan.of(source, *_weights(source, wrt, settings), settings)
        return cls(plan, Engine(plan))

    def _slot(self, name: str) -> tuple[_Group, str]:
        *groups, key = name.split(".")
        return self._group(groups), key

    def _all_slots(self) -> list[tuple[_Group, str]]:
        return [self._slot(name) for name in [*self._plan.weights, *self._plan.statistics]]

    def _running(self) -> Engine:
        if self._closed:
            raise OrtrainError("this module is closed; make another one with ortrain.torch.as_module")
        if self._engine is None:
            self._engine = Engine(self._plan)
        return self._engine

    def forward(self, *inputs: torch.Tensor, **by_name: torch.Tensor) -> Any:
        """Runs the model.

        Args:
            inputs: tensors for inputs of the model, in the order of the model.
            by_name: tensors for the other inputs of the model, by name.

        Returns:
            The output, or a tuple of the outputs. The tuple has the output names as fields if all names are
            identifiers.

        Raises:
            InvalidArgumentError: for a wrong number of inputs, an unknown name, or a tensor of another type, shape or
                device; also for a parameter that was moved to another type or device.
            OrtrainError: after :meth:`close`.

        >>> import torch
        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> images = torch.ones(2, 64, requires_grad=True)
        >>> net(x=images).sum().backward()
        >>> images.grad.shape
        torch.Size([2, 64])

        """
        # ``torch.compile`` skips this call and compiles the code around it.
        compute = OnnxModule._computed
        if "torch._dynamo" in sys.modules:
            compute = _not_compiled(compute)
        return compute(self, inputs, by_name)

    def _computed(self, inputs: tuple[torch.Tensor, ...], by_name: dict[str, torch.Tensor]) -> Any:
        engine = self._engine or self._running()
        all_positional = not by_name and len(inputs) == len(engine.inputs)
        tensors = list(inputs) if all_positional else in_order([given.name for given in engine.inputs], inputs, by_name)
        if torch.is_autocast_enabled("cpu"):
            tensors = [_cast(tensor, known.dtype) for tensor, known in zip(tensors, engine.given, strict=False)]
        for group, name in self._slots:
            parameter = group._parameters.get(name)
            tensors.append(group._tensor(name) if parameter is None else parameter)
        outputs = engine.run(self.training, tensors)
        if len(outputs) == 1:
            return outputs[0]
        return _named(tuple(output.name for output in engine.outputs), outputs)

    def to_onnx(self, path: PathLike | None = None) -> bytes:
        """Returns the original model with the current parameters and running statistics.

        Args:
            path: optional file to which the model is written as well.

        Returns:
            The bytes of the model. They include external data of the original model.

        Raises:
            OrtrainError: after :meth:`close`.
            InvalidArgumentError: for a parameter that was moved to another type or device.
            NoSuchFileError: if the folder of ``path`` does not exist.

        >>> import torch
        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> with torch.no_grad():
        ...     _ = net.get_parameter("fc2.bias").fill_(0.5)
        >>> trained = as_module(net.to_onnx())
        >>> trained.get_parameter("fc2.bias")[0].item()
        0.5

        """
        engine = self._running()
        values = []
        for argument, (group, name) in zip(engine.given[len(engine.inputs) :], self._slots, strict=True):
            tensor = group._tensor(name)
            argument.check(tensor)
            values.append((argument.name, value_of(tensor)))
        return trained_model(self._plan.source, values, path)

    def close(self) -> None:
        """Frees the memory of the engine; the parameters stay. The module can no longer be called.

        >>> import torch
        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> net.close()
        >>> net(torch.zeros(2, 64))
        Traceback (most recent call last):
        ortrain.errors.OrtrainError: this module is closed; make another one with ortrain.torch.as_module

        """
        self._engine = None
        self._closed = True

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Returns the group with a name prefix: ``"fc2"`` has the parameters ``weight`` and ``bias``.

        Also finds names of a model that are names of module attributes (``forward``).

        Raises:
            AttributeError: if no name has this prefix.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> sorted(net.get_submodule("fc2").state_dict())
        ['bias', 'weight']

        """
        group: torch.nn.Module = self
        for name in target.split(".") if target else []:
            if name not in group._modules:
                raise AttributeError(f"the module has no name that begins with {target!r}")
            group = group._modules[name]
        return group

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """Returns the parameter with a name.

        Raises:
            AttributeError: if there is no parameter with this name.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> net.get_parameter("fc2.bias").shape
        torch.Size([10])

        """
        return self._named(target, "parameter", "_parameters")

    def get_buffer(self, target: str) -> torch.Tensor:
        """Returns the running statistic with a name.

        Raises:
            AttributeError: if there is no running statistic with this name.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.convnet())
        >>> net.get_buffer("block1.mean").shape
        torch.Size([16])

        """
        return self._named(target, "buffer", "_buffers")

    def _named(self, target: str, what: str, attribute: str) -> Any:
        path, _, name = target.rpartition(".")
        found = getattr(self.get_submodule(path), attribute).get(name)
        if found is None:
            known = dict(self.named_parameters() if what == "parameter" else self.named_buffers())
            raise AttributeError(f"the module has no {what} {target!r}{hint(target, known)}")
        return found

    def extra_repr(self) -> str:
        """Returns the names of inputs and outputs for ``repr``.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> as_module(examples.perceptron()).extra_repr()
        'x -> logits'

        """
        if self._closed:
            return "closed"
        engine = self._running()
        inputs, outputs = ([value.name for value in values] for values in (engine.inputs, engine.outputs))
        return f"{', '.join(inputs)} -> {', '.join(outputs)}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_engine", "_slots")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._engine = None
        self._slots = self._all_slots()


def _weights(source: Source, wrt: str | Iterable[str] | None, settings: Settings) -> tuple[list[str], set[str]]:
    """Returns the checked weights in the order of the model, and all initializers that have a gradient."""
    reached = settings.native(source, None, None).weight_names()
    names = chosen_weights(source, wrt, reached)
    for name in names:
        if name.startswith("."):
            raise InvalidArgumentError(
                f"PyTorch cannot use the name {name!r}, which begins with a dot; rename the parameter"
            )
    return names, set(reached)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """Converts a floating-point tensor that autocast produced to the element type of the model."""
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and dtype.is_floating_point:
        return tensor.to(dtype)
    return tensor


def _named(names: tuple[str, ...], outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns a named tuple if all names are valid field names, and the plain tuple otherwise."""
    fields = [name.isidentifier() and not keyword.iskeyword(name) and name[0] != "_" for name in names]
    if not all(fields):
        return outputs
    kind: Any = _KINDS.get(names)
    if kind is None:
        kind = _KINDS[names] = namedtuple("Outputs", names)
    found: tuple[torch.Tensor, ...] = kind(*outputs)
    return found


_KINDS: dict[tuple[str, ...], Any] = {}
