"""Forward, backward and second-order passes of a model as a node of ``torch.autograd``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ortrain import _ortrain
from ortrain._operators import Source
from ortrain._options import native_options
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.inference import SessionOptions
from ortrain.torch._inputs import Argument, dtype_of, tensor_of, value_of

# For each tensor of a call: true if the tensor requires a gradient.
Needs: TypeAlias = tuple[bool, ...]

# Maximum number of cached passes. Each combination of tensors with gradients compiles a program of its own.
_PASSES = 8
_CPU = _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), 0)


@dataclass(frozen=True)
class Settings:
    """Options from which the passes of a model are built."""

    batch_norm: str
    seed: int
    options: SessionOptions | None

    def native(
        self,
        source: Source,
        weights: list[str] | None,
        inputs: list[str] | None,
        *,
        training: bool = False,
        seed_offset: int = 0,
    ) -> _ortrain.ForwardBackward:
        """Builds passes of the engine. Passes with another ``seed_offset`` draw other random numbers."""
        return _ortrain.ForwardBackward(
            source,
            weights,
            inputs,
            training=self.batch_norm if training else None,
            seed=self.seed + seed_offset,
            options=native_options(self.options),
        )


@dataclass(frozen=True)
class Plan:
    """Properties of a model that are known before its first run."""

    source: Source
    settings: Settings
    weights: list[str]
    """The initializers that are parameters, in the order of the model."""
    statistics: dict[str, str]
    """The running statistics that training updates, with their types."""
    evaluated: list[str]
    """The running statistics that the model reads in evaluation mode."""
    trains_otherwise: bool
    """True if a forward pass in training mode differs from evaluation mode."""
    is_gradient: bool = False
    """True if the model is the gradient of another model. Its own gradient is the second order."""

    @staticmethod
    def of(source: Source, weights: list[str], reached: set[str], settings: Settings) -> Plan:
        """Builds the plan for some weights. ``reached`` are the initializers that have a gradient."""
        training = settings.native(source, weights, None, training=True)
        statistics = {name: value.data_type() for name, value in training.statistics()}
        trains_otherwise = bool(statistics or training.random_nodes())
        evaluated = [name for name in statistics if name in reached]
        return Plan(source, settings, weights, statistics, evaluated, trains_otherwise)


class Engine:
    """A model that is called with tensors for its inputs, its parameters and its running statistics."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Every initializer that may change between calls is a weight of these passes.
        self.full_passes = plan.settings.native(plan.source, [*plan.weights, *plan.evaluated], None)
        self.inputs = self.full_passes.inputs()
        self.outputs = self.full_passes.outputs()
        self.output_types = [dtype_of(f"output {output.name!r}", output.type) for output in self.outputs]
        self.reached = self.full_passes.differentiable_inputs()
        types = dict(zip(self.full_passes.weight_names(), self.full_passes.initial_weights(), strict=True))
        self.given = [
            *(Argument("input", given.name, given.type) for given in self.inputs),
            *(Argument("parameter", name, types[name].data_type()) for name in plan.weights),
            *(Argument("statistic", name, kind) for name, kind in plan.statistics.items()),
        ]
        # Input tensors differ at each call, and ``run`` has checked them already.
        count = len(self.inputs)
        self._read = [value_of] * count + [argument.value for argument in self.given[count:]]
        self.at = {argument.name: index for index, argument in enumerate(self.given)}
        self._evaluated = [self.at[name] for name in self.full_passes.weight_names()]
        self.known: dict[tuple[bool, Needs], Passes] = {}
        self._pass_count = 0
        self._gradients: dict[Needs, Gradient] = {}

    def values(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[_ortrain.OrtValue]:
        """Returns the engine's values for the tensors at ``indices``."""
        read = self._read
        return [read[at](tensors[at]) for at in indices]

    def run(self, training: bool, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the model. Gradients flow from the outputs back to the tensors.

        Raises:
            InvalidArgumentError: for a tensor of another type, layout or device.

        """
        training = training and self.plan.trains_otherwise
        for at in range(len(self.inputs)):
            self.given[at].check(tensors[at])
        # The last tensor is usually a parameter that requires a gradient, so it is tested first.
        if torch.is_grad_enabled() and (tensors[-1].requires_grad or any(tensor.requires_grad for tensor in tensors)):
            outputs: tuple[torch.Tensor, ...] = _Run.apply(self, training, *tensors)
            return outputs
        with torch.no_grad():
            if training:
                first = len(self.inputs)
                needs = (False,) * first + tuple(tensor.requires_grad for tensor in tensors[first:])
                _, values = self.passes(True, needs).forward(tensors)
            else:
                inputs = self.values(range(len(self.inputs)), tensors)
                values = self.full_passes.evaluate(inputs, self.values(self._evaluated, tensors))
        return tuple(map(tensor_of, values))

    def passes(self, training: bool, needs: Needs) -> Passes:
        """Returns the passes for a combination of tensors with gradients, from the cache or newly built."""
        found = self.known.get((training, needs))
        if found is None:
            while len(self.known) >= _PASSES:
                del self.known[next(iter(self.known))]
            found = self.known[training, needs] = Passes(self, training, needs, self._pass_count)
            self._pass_count += 1
        return found

    def gradient(self, needs: Needs) -> Gradient:
        """Returns the gradient of the model as a model, from the cache or newly built."""
        found = self._gradients.get(needs)
        if found is None:
            found = self._gradients[needs] = Gradient(self, needs)
        return found

    def named(self, needs: Needs) -> list[str]:
        """Returns the names of the tensors that require a gradient and have one."""
        reached = {*self.reached, *self.plan.weights}
        return [
            argument.name for argument, need in zip(self.given, needs, strict=True) if need and argument.name in reached
        ]


class Passes:
    """Forward and backward passes that compute the gradients of some tensors only.

    Tensors with a gradient are differentiable inputs or weights of the engine. Parameters without a gradient, and
    running statistics that are not updated, may change between calls too: they become additional inputs.
    """

    def __init__(self, engine: Engine, training: bool, needs: Needs, seed_offset: int) -> None:
        self.engine = engine
        self.training = training
        plan, requested = engine.plan, set(engine.named(needs))
        inputs = [name for name in engine.reached if name in requested]
        weights = [name for name in plan.weights if name in requested]
        if not requested:
            # A forward pass without gradients. The engine needs at least one gradient to build passes.
            inputs, weights = (engine.reached, []) if engine.reached else ([], plan.weights)
        rest = [name for name in plan.weights if name not in weights]
        if training:
            native = self._native(rest, weights, inputs, seed_offset)
            updated = {name for name, _ in native.statistics()}
            still = [name for name in plan.evaluated if name not in updated]
        else:
            still = plan.evaluated
        self.native = native if training and not still else self._native([*rest, *still], weights, inputs, seed_offset)
        names = [given.name for given in self.native.inputs()]
        self._inputs = [engine.at[name] for name in names]
        self._weights = [engine.at[name] for name in self.native.weight_names()]
        self._updated = [(engine.at[name], tensor_of(value)) for name, value in self.native.statistics()]
        self.used = [*self._inputs, *self._weights]
        self._of_inputs = len(self.native.differentiable_inputs())
        self.gradients = [engine.at[name] for name in self.native.differentiable_inputs()] + self._weights
        outputs = [output.name for output in self.native.outputs()]
        self.differentiable = [outputs.index(name) for name in self.native.differentiable_outputs()]
        self.others = [index for index in range(len(outputs)) if index not in self.differentiable]
        # Gradient buffers that a later backward pass overwrites once no tensor uses them.
        self._gradient_buffers: list[list[_ortrain.OrtValue]] = []

    def _native(
        self, extra_inputs: list[str], weights: list[str], inputs: list[str], seed_offset: int
    ) -> _ortrain.ForwardBackward:
        """Builds passes of the model in which the initializers ``extra_inputs`` are inputs."""
        plan = self.engine.plan
        source = (
            plan.settings.native(plan.source, extra_inputs, None).evaluation_model() if extra_inputs else plan.source
        )
        return plan.settings.native(source, weights, inputs, training=self.training, seed_offset=seed_offset)

    def forward(
        self, tensors: Sequence[torch.Tensor], *, again: bool = False
    ) -> tuple[_ortrain.LiveForward, list[_ortrain.OrtValue]]:
        """Runs a forward pass. Updates the running statistics, unless the pass repeats an earlier one (``again``)."""
        engine, updated = self.engine, [] if again else self._updated
        for at, statistic in updated:
            engine.given[at].check(tensors[at])
            statistic.copy_(tensors[at])
        inputs, weights = engine.values(self._inputs, tensors), engine.values(self._weights, tensors)
        live, outputs = self.native.forward(inputs, weights)
        for at, statistic in updated:
            tensors[at].copy_(statistic)
        return live, outputs

    def forward_again(self, tensors: Sequence[torch.Tensor]) -> _ortrain.LiveForward:
        """Repeats a forward pass for another backward pass.

        Raises:
            UnsupportedError: if the model draws random numbers, which would differ.

        """
        if self.native.random_nodes():
            raise UnsupportedError(
                "a second backward pass repeats the forward pass, but the model draws random numbers, for example "
                "in a Dropout; add the losses and call backward once, or call eval()"
            )
        return self.forward(tensors, again=True)[0]

    def backward(self, live: _ortrain.LiveForward, seeds: list[_ortrain.OrtValue]) -> list[torch.Tensor]:
        """Runs a backward pass and returns the gradients of inputs, then of weights."""
        try:
            # Removed from the list, so that no other thread uses the same buffers.
            buffers: list[_ortrain.OrtValue] | None = [_writable(buffer) for buffer in self._gradient_buffers.pop()]
        except IndexError:
            buffers = None
        results = self.native.backward(live, seeds, buffers)
        tensors = list(map(tensor_of, results))
        self._gradient_buffers.append(results[self._of_inputs :] if buffers is None else buffers)
        return tensors


def _writable(buffer: _ortrain.OrtValue) -> _ortrain.OrtValue:
    """Returns the same buffer if no tensor shares it, and a new buffer of the same size otherwise."""
    if not buffer.is_shared():
        return buffer
    return _ortrain.OrtValue.ortvalue_from_shape_and_type(buffer.shape(), buffer.element_type(), _CPU)


class Gradient:
    """Gradient of a model as a model itself. The gradient of that model is the second order."""

    def __init__(self, engine: Engine, needs: Needs) -> None:
        plan = engine.plan
        if plan.is_gradient:
            raise UnsupportedError(
                "third-order gradients are not supported; remove create_graph=True from the last backward pass"
            )
        names = engine.named(needs)
        source = engine.full_passes.evaluation_model() if plan.weights or plan.evaluated else plan.source
        self._argument_positions = [engine.at[given.name] for given in engine.inputs] + engine._evaluated
        try:
            self._of = _depending(source, engine.full_passes.differentiable_outputs(), names)
            model = _ortrain.vjp(source, self._of, names, True)
            self._engine = Engine(Plan(model, plan.settings, [], {}, [], trains_otherwise=False, is_gradient=True))
        except OrtrainError as error:
            raise _no_second_order(str(error)) from error
        # The gradients follow the outputs of the model, sorted by name.
        first = len(engine.outputs)
        self._results = {engine.at[name]: first + k for k, name in enumerate(sorted(names))}

    def run(self, tensors: dict[int, torch.Tensor], seeds: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns the gradients by the indices of their tensors. The result can be differentiated again."""
        arguments = [tensors[at] for at in self._argument_positions] + [seeds[name] for name in self._of]
        try:
            found = self._engine.run(False, arguments)
        except UnsupportedError as error:
            raise _no_second_order(str(error)) from error
        return {at: found[k] for at, k in self._results.items()}


def _no_second_order(reason: str) -> UnsupportedError:
    return UnsupportedError(f"this backward pass has no second-order gradient: {reason}")


def _depending(source: Source, outputs: list[str], names: list[str]) -> list[str]:
    """Returns the outputs that depend on at least one of the values ``names``."""

    def depends(output: str) -> bool:
        for name in names:
            try:
                _ortrain.vjp(source, [output], [name], True)
            except InvalidArgumentError:
                continue
            return True
        return False

    return outputs if len(outputs) == 1 else [output for output in outputs if depends(output)]


class _Run(torch.autograd.Function):  # type: ignore[misc]
    """Forward and backward pass as a node of ``torch.autograd``."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, training: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        needs = ctx.needs_input_grad[2:]
        passes = engine.known.get((training, needs)) or engine.passes(training, needs)
        live, values = passes.forward(tensors)
        outputs = tuple(map(tensor_of, values))
        ctx.save_for_backward(*[tensors[at] for at in passes.used])
        ctx.passes, ctx.live = passes, live
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*[outputs[at] for at in passes.others])
            ctx.set_materialize_grads(False)
            ctx.shapes = [output.shape for output in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Reading ``saved_tensors`` makes PyTorch check that no saved tensor was modified since.
        saved = ctx.saved_tensors
        passes = ctx.passes
        engine = passes.engine
        seeds: list[torch.Tensor] = []
        for at in passes.differentiable:
            gradient = gradients[at]
            if gradient is None:
                # PyTorch passes None for an output that has no consumer.
                gradient = torch.zeros(ctx.shapes[at], dtype=engine.output_types[at])
            seeds.append(gradient)
        results: list[torch.Tensor | None] = [None] * len(engine.given)
        if torch.is_grad_enabled():
            if passes.training:
                raise _no_second_order(
                    "in training mode the model drops elements, or uses the statistics of the batch; call eval() first"
                )
            named = dict(zip(engine.full_passes.differentiable_outputs(), seeds, strict=True))
            found = engine.gradient(ctx.needs_input_grad[2:]).run(dict(zip(passes.used, saved, strict=True)), named)
            for at, gradient in found.items():
                results[at] = gradient
            return (None, None, *results)
        live, ctx.live = ctx.live, None
        if live is None:
            tensors: list[Any] = [None] * len(engine.given)
            for at, tensor in zip(passes.used, saved, strict=True):
                tensors[at] = tensor
            live = passes.forward_again(tensors)
        for at, gradient in zip(passes.gradients, passes.backward(live, list(map(value_of, seeds))), strict=True):
            results[at] = gradient
        return (None, None, *results)
