"""The module of PyTorch that a model becomes."""

from __future__ import annotations

import functools
import keyword
import sys
from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ortrain import _ortrain
from ortrain._bridges import chosen_weights, in_order, kept_source, trained_model
from ortrain._near import hint
from ortrain._operators import Source, with_stops
from ortrain._sources import ModelLike, PathLike
from ortrain.errors import InvalidArgumentError, OrtrainError
from ortrain.inference import SessionOptions
from ortrain.torch._engine import Engine, Plan, Settings
from ortrain.torch._given import value_of

# Made once for a function.
_not_compiled: Any = functools.cache(torch.compiler.disable)
_MODES = ("auto", "train", "freeze")


class _Group(torch.nn.Module):  # type: ignore[misc]
    """Parameters and buffers whose names begin alike: ``fc2`` has ``weight`` and ``bias``.

    Names of a model may be any text, those of attributes too (``forward``), so that they go by the dictionaries of the
    module and not by its attributes.
    """

    def _group(self, names: Sequence[str]) -> _Group:
        """The group of some names, made if it is not there."""
        group = self
        for name in names:
            group = group._modules.setdefault(name, _Group())
        return group

    def _tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer of this group, or what a parametrization computes in its place."""
        found = self._parameters.get(name)
        if found is None:
            found = self._buffers.get(name)
        return getattr(self, name) if found is None else found

    def __getattr__(self, name: str) -> Any:
        # A name of a model may be that of a group, too (``a`` and ``a.b``). Parameters are found in another way.
        group = self.__dict__.get("_modules", {}).get(name)
        return super().__getattr__(name) if group is None else group


class OnnxModule(_Group):
    """A model as a ``torch.nn.Module``; :func:`ortrain.torch.as_module` makes one.

    The memory of a parameter is what the model reads: an optimizer of PyTorch changes the weights where they lie.
    Copies (``copy.deepcopy``), pickles and processes of a ``DataLoader`` have a model of their own, made from the same
    bytes when it is first called.

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
        for name, value in zip(engine.whole.weight_names(), engine.whole.initial_weights(), strict=True):
            if name not in plan.statistics:
                group, key = self._place(name)
                group._parameters[key] = torch.nn.Parameter(torch.from_dlpack(value))
        if plan.statistics:
            stored = dict(_ortrain.initializers(plan.source))
            for name in plan.statistics:
                group, key = self._place(name)
                group._buffers[key] = torch.from_dlpack(stored[name])
        self._places = self._all_places()

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
            raise InvalidArgumentError(f"batch_norm is one of {', '.join(map(repr, _MODES))}, not {batch_norm!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is an integer, not {type(seed).__name__}")
        source = with_stops(kept_source(model), stop_gradients)
        settings = Settings(batch_norm, seed, options)
        plan = Plan.of(source, *_weights(source, wrt, settings), settings)
        return cls(plan, Engine(plan))

    def _place(self, name: str) -> tuple[_Group, str]:
        *groups, key = name.split(".")
        return self._group(groups), key

    def _all_places(self) -> list[tuple[_Group, str]]:
        return [self._place(name) for name in [*self._plan.weights, *self._plan.statistics]]

    def _running(self) -> Engine:
        if self._closed:
            raise OrtrainError("this module is closed; make another one with ortrain.torch.as_module")
        if self._engine is None:
            self._engine = Engine(self._plan)
        return self._engine

    def forward(self, *inputs: torch.Tensor, **by_name: torch.Tensor) -> Any:
        """Runs the model.

        Args:
            inputs: a tensor for each input of the model, in the order of the model.
            by_name: tensors for those that are not among ``inputs``, by the names that the model has for them.

        Returns:
            The output, or a tuple of the outputs; its fields have the names of the outputs if those are identifiers.

        Raises:
            InvalidArgumentError: for another number of inputs, an unknown name, a tensor of another type or shape, or
                on another device; also for a parameter that was moved to another type or device.
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
        # PyTorch's compiler, if somebody has it, leaves this out and takes what is around.
        compute = OnnxModule._computed
        if "torch._dynamo" in sys.modules:
            compute = _not_compiled(compute)
        return compute(self, inputs, by_name)

    def _computed(self, inputs: tuple[torch.Tensor, ...], by_name: dict[str, torch.Tensor]) -> Any:
        engine = self._engine or self._running()
        whole = not by_name and len(inputs) == len(engine.inputs)
        tensors = list(inputs) if whole else in_order([name for name, _, _ in engine.inputs], inputs, by_name)
        if torch.is_autocast_enabled("cpu"):
            tensors = [_cast(tensor, known.dtype) for tensor, known in zip(tensors, engine.given, strict=False)]
        for group, name in self._places:
            parameter = group._parameters.get(name)
            tensors.append(group._tensor(name) if parameter is None else parameter)
        outputs = engine.run(self.training, tensors)
        if len(outputs) == 1:
            return outputs[0]
        return _named(tuple(name for name, _, _ in engine.outputs), outputs)

    def to_onnx(self, path: PathLike | None = None) -> bytes:
        """The model as it was given, with the parameters and running statistics as they are now.

        Args:
            path: a file to write the model to, too.

        Returns:
            The bytes of the model. External data of the model is taken in.

        Raises:
            OrtrainError: after :meth:`close`.
            InvalidArgumentError: for a parameter that was moved to another type or device.
            NoSuchFileError: for a folder that is not there.

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
        for given, (group, name) in zip(engine.given[len(engine.inputs) :], self._places, strict=True):
            tensor = group._tensor(name)
            given.check(tensor)
            values.append((given.name, value_of(tensor)))
        return trained_model(self._plan.source, values, path)

    def close(self) -> None:
        """Frees what the model holds beside the parameters. The module cannot be called any more.

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
        """The group of a name's beginning: ``"fc2"`` has the parameters ``weight`` and ``bias``.

        Names of a model that are attributes of modules, too (``forward``), are found as well.

        Raises:
            AttributeError: if no name begins so.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> sorted(net.get_submodule("fc2").state_dict())
        ['bias', 'weight']

        """
        group: torch.nn.Module = self
        for name in target.split(".") if target else []:
            if name not in group._modules:
                raise AttributeError(f"the module has nothing whose name begins with {target!r}")
            group = group._modules[name]
        return group

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter of a name.

        Raises:
            AttributeError: if there is none.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.perceptron())
        >>> net.get_parameter("fc2.bias").shape
        torch.Size([10])

        """
        return self._named(target, "parameter", "_parameters")

    def get_buffer(self, target: str) -> torch.Tensor:
        """The running statistic of a name.

        Raises:
            AttributeError: if there is none.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> net = as_module(examples.convnet())
        >>> net.get_buffer("block1.mean").shape
        torch.Size([16])

        """
        return self._named(target, "buffer", "_buffers")

    def _named(self, target: str, what: str, kept: str) -> Any:
        path, _, name = target.rpartition(".")
        found = getattr(self.get_submodule(path), kept).get(name)
        if found is None:
            known = dict(self.named_parameters() if what == "parameter" else self.named_buffers())
            raise AttributeError(f"the module has no {what} {target!r}{hint(target, known)}")
        return found

    def extra_repr(self) -> str:
        """The names of inputs and outputs, for ``repr``.

        >>> from ortrain import examples
        >>> from ortrain.torch import as_module
        >>> as_module(examples.perceptron()).extra_repr()
        'x -> logits'

        """
        if self._closed:
            return "closed"
        engine = self._running()
        inputs, outputs = ([name for name, _, _ in infos] for infos in (engine.inputs, engine.outputs))
        return f"{', '.join(inputs)} -> {', '.join(outputs)}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_engine", "_places")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._engine = None
        self._places = self._all_places()


def _weights(source: Source, wrt: str | Iterable[str] | None, settings: Settings) -> tuple[list[str], set[str]]:
    """The weights in the order of the model, checked, and all initializers that a gradient reaches."""
    reached = settings.native(source, None, None).weight_names()
    names = chosen_weights(source, wrt, reached)
    for name in names:
        if name.startswith("."):
            raise InvalidArgumentError(f"PyTorch has no name for {name!r}, which begins with a dot; give it another")
    return names, set(reached)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast made of a tensor, as the model takes it: floats of its type."""
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and dtype.is_floating_point:
        return tensor.to(dtype)
    return tensor


def _named(names: tuple[str, ...], outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A tuple with names, if they can be those of fields."""
    fields = [name.isidentifier() and not keyword.iskeyword(name) and name[0] != "_" for name in names]
    if not all(fields):
        return outputs
    kind: Any = _KINDS.get(names)
    if kind is None:
        kind = _KINDS[names] = namedtuple("Outputs", names)
    found: tuple[torch.Tensor, ...] = kind(*outputs)
    return found


_KINDS: dict[tuple[str, ...], Any] = {}
