"""Models as functions of jax that jax can differentiate.

A program in jax can then train an ONNX model, or use the model as a part of its own network. The module needs jax;
``import ortrain`` does not import it.

>>> import importlib.util
>>> import ortrain.jax
>>> if importlib.util.find_spec("jax"):
...     function = ortrain.jax.as_function(model)
...     logits = function(function.weights, x)
...     assert logits.shape == (8, 10)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ortrain import _ortrain
from ortrain._bridges import chosen_weights, in_order, source_snapshot, trained_model
from ortrain._inputs import Described
from ortrain._model_source import ModelLike, PathLike
from ortrain._operators import OperatorLibrary, Source, with_operators, with_stops
from ortrain._options import native_options
from ortrain._suggest import hint
from ortrain.errors import InvalidArgumentError, OrtrainError, UnsupportedError
from ortrain.inference import SessionOptions

if TYPE_CHECKING:
    import numpy.typing as npt


def _found(name: str) -> Any:
    """Import a module of jax; return ``None`` if jax is not installed or has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("jax", "jaxlib"):
            raise
        return None


jax, jnp = _found("jax"), _found("jax.numpy")
# Only newer versions of jax have this function.
buffer_callback: Any = getattr(_found("jax.experimental.buffer_callback"), "buffer_callback", None)
# Function on the host, from arrays to arrays.
_Host: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]

__all__ = ["OnnxFunction", "as_function"]

# NumPy type of a tensor, by its type in ONNX. bfloat16 is a type of jax.
_DTYPES: dict[str, np.dtype[Any]] = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}.items()
} | {
    f"tensor({name})": np.dtype(name) for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
}
_BFLOAT16 = "tensor(bfloat16)"
_SETTING = 'call jax.config.update("jax_enable_x64", True) at the start of the program'
_WITHOUT_64_BITS = f"jax has no 64-bit integers by default; {_SETTING}"


def as_function(
    model: ModelLike,
    wrt: str | Iterable[str] | None = None,
    *,
    operators: OperatorLibrary | None = None,
    session_options: SessionOptions | None = None,
    stop_gradients: Iterable[str] | None = None,
) -> OnnxFunction:
    """Return a model as a function of jax.

    The function takes weights and inputs. ``jax.grad`` differentiates it with respect to both. ``jax.jit``,
    ``jax.vmap`` and ``jax.checkpoint`` accept it like any other function. ortrain runs the computation, on the CPU.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``. The model needs no loss.
        wrt: the weights: names of float initializers, or patterns (``"encoder.*"``, as of :mod:`fnmatch`). Other
            initializers stay constant. ``None`` selects the weights that
            :func:`ortrain.artifacts.generate_artifacts` trains by default; ``[]`` selects no weight.
        operators: operators and gradients of your own.
        session_options: options for threads, memory and precision.
        stop_gradients: values that pass no gradient: names of results, or patterns (``"*/assigner/*"``), as in
            :func:`ortrain.artifacts.generate_artifacts`.

    Returns:
        The function.

    Raises:
        ImportError: if jax is not installed.
        InvalidArgumentError: for a name or a pattern that matches no initializer, for a running statistic, and for an
            initializer that no gradient reaches; for a model with neither weights nor float inputs.
        InvalidModelError: for an invalid model.
        UnsupportedError: for operators without a gradient, each with its node; for types of inputs or outputs that jax
            does not have, such as strings; for a ``Dropout`` that drops elements, because a jax function must be pure.
        NoSuchFileError: if the path does not exist.
        TypeError: if the argument is not a model.

    Source: ``jax.custom_vjp``, ``jax.pure_callback``.

    >>> import importlib.util
    >>> import ortrain.jax
    >>> if importlib.util.find_spec("jax"):
    ...     import jax
    ...     function = ortrain.jax.as_function(model, wrt=["fc2.*"])
    ...     gradients = jax.grad(lambda weights: function(weights, x).sum())(function.weights)
    ...     assert sorted(gradients) == ["fc2.bias", "fc2.weight"]
    ...     assert (gradients["fc2.bias"] == 8).all()  # each of the eight rows adds the bias once
    ... else:
    ...     try:
    ...         function = ortrain.jax.as_function(model)
    ...     except ImportError as error:
    ...         assert "pip install jax" in str(error)

    """
    _require_jax()
    source = with_stops(with_operators(source_snapshot(model), operators), stop_gradients)
    return OnnxFunction(source, wrt, session_options)


def _require_jax() -> None:
    if jax is None:
        raise ImportError("ortrain.jax needs jax, which is not installed here: pip install jax", name="jax")


class OnnxFunction:
    """Model as a function of jax; :func:`as_function` makes it.

    >>> import importlib.util
    >>> import ortrain.jax
    >>> if importlib.util.find_spec("jax"):
    ...     function = ortrain.jax.as_function(model)
    ...     assert (function.input_names, function.output_names) == (["x"], ["logits"])
    ...     assert function.weight_names == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    """

    input_names: list[str]
    """The names of the model's inputs, in the order in which a call takes them."""
    output_names: list[str]
    """The names of the model's outputs, in the order in which a call returns them."""
    weight_names: list[str]
    """The names of the weights, in the order of the model."""

    def __init__(self, source: Source, wrt: str | Iterable[str] | None, options: SessionOptions | None) -> None:
        _require_jax()
        opened = functools.partial(_opened, options=options)
        native = opened(source, None, None)
        if native.random_nodes():
            # jax may call a function a second time, or not at all.
            raise UnsupportedError(
                f"{', '.join(native.random_nodes())} may drop elements, but a jax function must be pure; set "
                "training_mode to false in the model, and drop elements in jax"
            )
        names = chosen_weights(source, wrt, native.weight_names())
        if names != native.weight_names():
            native = opened(source, names, None)
        self._source = source
        self._initial = dict(zip(native.weight_names(), native.initial_weights(), strict=True))
        self._model = _Model(source, native, opened)
        self.input_names = [given.name for given in native.inputs()]
        self.output_names = [output.name for output in native.outputs()]
        self.weight_names = native.weight_names()

    @property
    def weights(self) -> dict[str, Any]:
        """Weights of the model: a dict with a jax array for each name.

        A dict is a pytree, which jax optimizers accept. Each access makes new arrays.

        Raises:
            UnsupportedError: for weights of float64, which jax only has if ``jax_enable_x64`` is set.

        >>> import importlib.util
        >>> import ortrain.jax
        >>> if importlib.util.find_spec("jax"):
        ...     assert ortrain.jax.as_function(model).weights["fc2.bias"].shape == (10,)

        """
        self._model.check_width()
        return {name: jnp.asarray(value.array()) for name, value in self._initial.items()}

    def __call__(self, weights: Mapping[str, Any], /, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the model.

        Args:
            weights: an array for each name of ``weight_names``, with the element type and shape of the weight in the
                model.
            inputs: arrays for the first inputs, in the order of ``input_names``. Floats have the element type of the
                input. Integers may have a narrower type: jax has int32 for int64 unless ``jax_enable_x64`` is set.
            named: arrays for the other inputs, by their names.

        Returns:
            The output, or a tuple of all outputs if the model has several. Integers of 64 bits become 32 bits unless
            ``jax_enable_x64`` is set.

        Raises:
            InvalidArgumentError: for a weight or an input that is missing, unknown, given twice, or of another element
                type or shape than in the model.
            UnsupportedError: for floats of 64 bits, unless ``jax_enable_x64`` is set; for a second derivative, if an
                operator of the gradient has no gradient.
            TypeError: if the weights are not a dict, or a value is not an array.
            jax.errors.JaxRuntimeError, ValueError: for errors that depend on values, such as an index out of range.
                jax raises them while its program runs; the text ends with ortrain's message.

        >>> import importlib.util
        >>> import ortrain.jax
        >>> if importlib.util.find_spec("jax"):
        ...     function = ortrain.jax.as_function(model)
        ...     weights = function.weights
        ...     assert (function(weights, x) == function(weights, x=x)).all()

        """
        self._model.check_width()
        fitting_weights = self._weights(weights)
        sizes: dict[str, tuple[int, str]] = {}
        fitting_inputs = [
            _fitting("input", described, value, sizes)
            for described, value in zip(self._model.inputs, in_order(self.input_names, inputs, named), strict=True)
        ]
        outputs = self._model.call(*fitting_inputs, *fitting_weights)
        return outputs[0] if len(outputs) == 1 else outputs

    def to_onnx(self, weights: Mapping[str, Any], path: PathLike | None = None) -> bytes:
        """Return the model with these weights; everything else of the model does not change.

        Args:
            weights: as in a call.
            path: the file to write as well; ``None`` writes no file.

        Returns:
            The bytes of the model, including its external data.

        Raises:
            InvalidArgumentError: as for a call.
            TypeError: as for a call.
            NoSuchFileError: if the folder of the path does not exist.

        >>> import importlib.util
        >>> import ortrain.jax
        >>> if importlib.util.find_spec("jax"):
        ...     function = ortrain.jax.as_function(model)
        ...     weights = {name: 0 * value for name, value in function.weights.items()}
        ...     content = function.to_onnx(weights, "zeros.onnx")
        ...     (logits,) = ortrain.InferenceSession("zeros.onnx").run(None, {"x": x})
        ...     assert (logits == 0).all()

        """
        arrays = [_ortrain.OrtValue.from_numpy(np.asarray(value)) for value in self._weights(weights)]
        return trained_model(self._source, list(zip(self.weight_names, arrays, strict=True)), path)

    def _weights(self, weights: Mapping[str, Any]) -> list[Any]:
        """Return the weights of a call, in the order of the names."""
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"the weights must be a dict of arrays by name, as in .weights, got {type(weights).__name__}; they "
                "are the first argument, before the inputs"
            )
        names = self.weight_names
        for name in weights:
            if name not in names:
                raise InvalidArgumentError(f"there is no weight {name!r}{hint(name, names)}")
        missing = [name for name in names if name not in weights]
        if missing:
            raise InvalidArgumentError(f"weights are missing: {', '.join(missing)}")
        described = self._model.values[len(self.input_names) :]
        return [_fitting("weight", weight, weights[weight.name], {}) for weight in described]

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(self.input_names), ", ".join(self.output_names)
        return f"<ortrain.jax.OnnxFunction ({inputs}) -> ({outputs}) of {len(self.weight_names)} weights>"


def _opened(
    source: Source, weights: list[str] | None, inputs: list[str] | None, *, options: SessionOptions | None
) -> _ortrain.ForwardBackward:
    """Open the forward and backward pass of a model."""
    return _ortrain.ForwardBackward(source, weights, inputs, training=None, seed=0, options=native_options(options))


# Function that opens the passes of a model. Its arguments are the source, the weights, and the inputs to differentiate.
_Open: TypeAlias = Callable[[Source, "list[str] | None", "list[str] | None"], _ortrain.ForwardBackward]


def _dtype_of(described: Described) -> np.dtype[Any]:
    """Return the element type of a value of the model."""
    if described.type == _BFLOAT16:
        bfloat16: np.dtype[Any] = np.dtype(jnp.bfloat16)
        return bfloat16
    if described.type not in _DTYPES:
        raise UnsupportedError(f'"{described.name}" has the type {described.type}, which jax does not support')
    return _DTYPES[described.type]


def _is_float(dtype: np.dtype[Any]) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _in_jax(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that jax uses: integers of 64 bits become 32 bits unless ``jax_enable_x64`` is set."""
    if dtype.kind in "iu" and dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        return np.dtype(f"{dtype.kind}4")
    return dtype


def _is_representable(value: npt.NDArray[Any] | np.generic) -> bool:
    """Return True if jax can hold all numbers of an array. jax would wrap other integers silently."""
    dtype = _in_jax(value.dtype)
    return dtype == value.dtype or bool((value.astype(dtype) == value).all())


def _fitting(what: str, described: Described, value: Any, sizes: dict[str, tuple[int, str]]) -> Any:
    """Convert a value to a jax array and check it against the model. ``sizes`` has the known sizes of named axes."""
    name, shape, target = described.name, described.shape, _dtype_of(described)
    if isinstance(value, (np.ndarray, np.generic)) and not _is_representable(value):
        raise InvalidArgumentError(
            f'{what} "{name}" has values outside the range of {_in_jax(value.dtype)}: {_WITHOUT_64_BITS}'
        )
    try:
        array = jnp.asarray(value)
        dtype = np.dtype(array.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f'{what} "{name}" must be an array, got {type(value).__name__} ({error})') from error
    if dtype != target and getattr(array, "weak_type", False) and _is_float(dtype) and _is_float(target):
        # A Python number has no type of its own.
        array = array.astype(target)
    elif dtype != target and not (dtype.kind in "iu" and target.kind in "iu" and np.can_cast(dtype, target)):
        advice = f"the element types differ; to convert it, pass .astype(jnp.{_in_jax(target)})"
        raise InvalidArgumentError(_mismatch(what, described, array) + advice)
    if array.ndim != len(shape):
        raise InvalidArgumentError(_mismatch(what, described, array) + "the numbers of axes differ")
    for axis, (there, size) in enumerate(zip(array.shape, shape, strict=True)):
        expected, whose = sizes.setdefault(size, (there, name)) if isinstance(size, str) else (size, name)
        if expected is not None and there != expected:
            found = f'axis {axis} is {there}, but "{size}" is {expected} in {what} "{whose}"'
            same = f"axis {axis} must be {expected}, got {there}"
            raise InvalidArgumentError(_mismatch(what, described, array) + (found if whose != name else same))
    return array


def _mismatch(what: str, described: Described, array: Any) -> str:
    sizes = ", ".join(map(str, described.shape))
    there = ", ".join(map(str, array.shape))
    return f'{what} "{described.name}" must be {_dtype_of(described)}[{sizes}], got {array.dtype}[{there}]: '


class _Model:
    """Model as a function of its inputs and weights; :attr:`call` is this function in jax."""

    def __init__(
        self, source: Source, native: _ortrain.ForwardBackward, opened: _Open, *, of_gradients: bool = False
    ) -> None:
        self._source, self._native, self._opened, self._of_gradients = source, native, opened, of_gradients
        self._weights = native.weight_names()
        self.inputs = native.inputs()
        initial = native.initial_weights()
        self.values: list[Described] = self.inputs + [
            Described(name, weight.data_type(), list(weight.shape()))
            for name, weight in zip(self._weights, initial, strict=True)
        ]
        self.outputs = native.outputs()
        for described in [*self.values, *self.outputs]:
            _dtype_of(described)
        self._differentiable = {*native.differentiable_inputs(), *self._weights}
        self._pullbacks: dict[tuple[str, ...], _Pullback] = {}
        self._types: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
        names = tuple(output.name for output in self.outputs)
        self.call = _differentiable(_Callback(names, self._evaluated, self.types_of), lambda: (self, names))

    def check_width(self) -> None:
        """Check that jax has the element types of the model."""
        if jax.config.jax_enable_x64:
            return
        for described in [*self.values, *self.outputs]:
            if _dtype_of(described) == np.float64:
                raise UnsupportedError(f'"{described.name}" is float64, which jax does not have by default; {_SETTING}')

    def natives(self, values: Sequence[npt.NDArray[Any]]) -> tuple[list[Any], list[Any]]:
        """Convert inputs and weights for the core."""
        natives = [_native(value, described) for value, described in zip(values, self.values, strict=True)]
        return natives[: len(self.inputs)], natives[len(self.inputs) :]

    def _evaluated(self, values: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        return [value.numpy() for value in self._native.evaluate(*self.natives(values))]

    def types_of(self, values: Sequence[Any]) -> list[Any]:
        """Return shapes and types of the outputs. Only the shapes of the values are used."""
        shapes = tuple(tuple(value.shape) for value in values)
        found = self._types.get(shapes)
        if found is None:
            found = self._types[shapes] = self._declared(shapes) or self._tried(shapes)
        return [
            jax.ShapeDtypeStruct(shape, _in_jax(_dtype_of(described)))
            for shape, described in zip(found, self.outputs, strict=True)
        ]

    def _declared(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        """Return the shapes of the outputs, if the names of axes determine them."""
        sizes: dict[int | str | None, int] = {}
        for shape, value in zip(shapes, self.values, strict=True):
            sizes.update((axis, size) for axis, size in zip(value.shape, shape, strict=True) if isinstance(axis, str))
        known = [
            [size if isinstance(size, int) else sizes.get(size) for size in output.shape] for output in self.outputs
        ]
        found = [tuple(size for size in shape if size is not None) for shape in known]
        return found if [len(shape) for shape in found] == [len(shape) for shape in known] else None

    def _tried(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs for inputs of zeros."""
        zeros = [np.zeros(shape, _dtype_of(described)) for shape, described in zip(shapes, self.values, strict=True)]
        try:
            found = [value.shape for value in self._evaluated(zeros)]
        except OrtrainError as error:
            names = ", ".join(output.name for output in self.outputs)
            raise type(error)(
                f"jax needs the shapes of {names} before a run: the names of input axes do not determine them, and a "
                f"run on zeros fails: {error}"
            ) from error
        # jax drops computations of empty results, so elements that appear in a run would go unnoticed.
        for shape, output in zip(found, self.outputs, strict=True):
            if 0 in shape and not any(0 in input_shape for input_shape in shapes):
                raise UnsupportedError(
                    f'"{output.name}" is empty, {list(shape)}, for inputs of zeros; the shape of a result in jax '
                    "cannot depend on values"
                )
        return found

    def pullback(self, moved: Sequence[bool]) -> _Pullback | None:
        """Return the pullback for the perturbed values; ``None`` if no perturbed value has a gradient."""
        names = (value.name for value, perturbed in zip(self.values, moved, strict=True) if perturbed)
        requested = tuple(name for name in names if name in self._differentiable)
        if requested and requested not in self._pullbacks:
            self._pullbacks.setdefault(requested, self._new_pullback(requested))
        return self._pullbacks.get(requested)

    def _new_pullback(self, requested: tuple[str, ...]) -> _Pullback:
        inputs = [given.name for given in self.inputs if given.name in requested]
        if len(requested) == len(inputs) + len(self._weights):
            return _Pullback(self, self._opened(self._source, self._weights, inputs))
        # Some weights are constant for jax, so here all weights are inputs.
        plain = self._native.evaluation_model()
        model = _Model(plain, self._opened(plain, [], None), self._opened)
        return _Pullback(model, self._opened(plain, [], list(requested)))

    def derivative(self, of: list[str], requested: list[str]) -> tuple[_Model, tuple[str, ...]]:
        """Return the model of the gradients and the names of its gradients. ``of`` become additional inputs."""
        if self._of_gradients:
            raise UnsupportedError(
                "third-order gradients are not supported: ortrain differentiates a model at most twice"
            )
        try:
            source = _ortrain.vjp(self._native.evaluation_model(), of, requested, True)
            model = _Model(source, self._opened(source, [], None), self._opened, of_gradients=True)
        except OrtrainError as error:
            raise UnsupportedError(f"this gradient has no gradient: {error}") from error
        # The gradients follow the other outputs, sorted by the names of their values.
        added = [output.name for output in model.outputs][len(self.outputs) :]
        names = dict(zip(sorted(requested), added, strict=True))
        return model, tuple(names[name] for name in requested)


class _Pullback:
    """Gradients of some values of a model, from the gradients of its outputs; :attr:`call` computes them in jax."""

    def __init__(self, model: _Model, native: _ortrain.ForwardBackward) -> None:
        self.model, self._native = model, native
        self.of = native.differentiable_outputs()
        self.requested = [*native.differentiable_inputs(), *native.weight_names()]
        self._count = len(model.values)
        self._kinds = {output.name: output.type for output in model.outputs}
        positions = {value.name: at for at, value in enumerate(model.values)}
        self._positions = [positions[name] for name in self.requested]
        callback = _Callback(native.gradient_names(), self._pulled, self._types_of)
        self.call = _differentiable(callback, lambda: self._derivative)

    @functools.cached_property
    def _derivative(self) -> tuple[_Model, tuple[str, ...]]:
        return self.model.derivative(self.of, self.requested)

    def _types_of(self, values: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(values[at].shape, values[at].dtype) for at in self._positions]

    def _pulled(self, values: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Run both passes: jax may call this method again, or in another order than the evaluation."""
        inputs, weights = self.model.natives(values[: self._count])
        seeds = [
            _native(seed, Described(name, self._kinds[name], []))
            for seed, name in zip(values[self._count :], self.of, strict=True)
        ]
        live, _ = self._native.forward(inputs, weights)
        return [value.numpy() for value in self._native.backward(live, seeds, None)]


@dataclass(frozen=True)
class _Backward:
    """Backward pass of a jax function. ``names`` are the outputs of the model that the function returns."""

    pullback: _Pullback | None
    names: tuple[str, ...]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        *values, cotangents = arguments
        if self.pullback is None:
            return (None,) * len(values)
        model = self.pullback.model
        cotangents_by_name = dict(zip(self.names, cotangents, strict=True))
        types = dict(zip([output.name for output in model.outputs], model.types_of(values), strict=True))
        seeds = [_seed(cotangents_by_name.get(name), types[name]) for name in self.pullback.of]
        gradients = dict(zip(self.pullback.requested, self.pullback.call(*values, *seeds), strict=True))
        return tuple(gradients.get(value.name) for value in model.values)


def _seed(cotangent: Any, described: Any) -> Any:
    """Return the gradient of an output: zeros if jax has none."""
    if cotangent is None or isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(described.shape, described.dtype)
    return cotangent


def _differentiable(run: Callable[..., Any], model_of: Callable[[], tuple[_Model, tuple[str, ...]]]) -> Any:
    """Return a jax function with the gradients of a model.

    ``model_of`` returns the model and the names of the outputs that ``run`` returns. It is called when jax
    differentiates, which may be never.
    """

    def call(*values: Any) -> Any:
        return run(*values)

    def forward(*primals: Any) -> Any:
        values = [primal.value for primal in primals]
        model, names = model_of()
        pullback = model.pullback([primal.perturbed for primal in primals])
        # Residuals that jax stores for the backward pass: the values, and the constant function that uses them.
        return differentiable(*values), jax.tree_util.Partial(_Backward(pullback, names), *values)

    def backward(pull: Any, cotangents: Any) -> Any:
        return pull(cotangents)

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    return differentiable


class _Callback:
    """Host function on NumPy arrays as a jax function without a gradient. ``names`` are the names of the results."""

    def __init__(self, names: Sequence[str], host: _Host, types_of: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._names, self._host, self._types_of = names, host, types_of
        self._callables: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        types = tuple(self._types_of(values))
        # jax compiles a Python function once and recognizes it by its identity.
        key = tuple((kind.shape, kind.dtype) for kind in types)
        if key not in self._callables:
            self._callables.setdefault(key, _called(self._names, self._host, types))
        return tuple(self._callables[key](*values))


def _called(names: Sequence[str], host: _Host, types: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a jax function that calls a function on NumPy arrays."""

    def checked(values: Sequence[Any]) -> list[npt.NDArray[Any]]:
        # No function of jax may be called here: it could wait for the thread that waits for this callback.
        found = host([np.asarray(value) for value in values])
        return [_as_promised(*result) for result in zip(names, found, types, strict=True)]

    def returned(*values: Any) -> tuple[npt.NDArray[Any], ...]:
        return tuple(checked(values))

    def filled(_: Any, buffers: Sequence[Any], *values: Any) -> None:
        for buffer, value in zip(buffers, checked(values), strict=True):
            np.asarray(buffer)[...] = value

    def anywhere(*values: Any) -> Any:
        return jax.pure_callback(returned, types, *values, vmap_method="sequential")

    def on_the_cpu(*values: Any) -> Any:
        return buffer_callback(filled, types, vmap_method="sequential")(*values)

    if buffer_callback is None:
        return anywhere

    def anywhere_or_on_the_cpu(*values: Any) -> Any:
        # On the CPU, pure_callback copies large arrays on the threads that run callbacks. If all of them wait for a
        # copy, no thread is left to make it. buffer_callback copies nothing.
        return jax.lax.platform_dependent(*values, cpu=on_the_cpu, default=anywhere)

    return anywhere_or_on_the_cpu


def _as_promised(name: str, value: npt.NDArray[Any], promised: Any) -> npt.NDArray[Any]:
    """Return a result with the shape and type that jax was promised; otherwise raise an error."""
    if value.shape != promised.shape:
        raise UnsupportedError(
            f'"{name}" has the shape {list(value.shape)}, but the shapes of the inputs imply {list(promised.shape)}; '
            "the shape of a result in jax cannot depend on values"
        )
    cast = value.astype(promised.dtype, copy=False)
    if value.dtype.kind in "iu" and (cast != value).any():
        raise UnsupportedError(f'"{name}" has values outside the range of {promised.dtype}: {_WITHOUT_64_BITS}')
    return cast


def _native(value: npt.NDArray[Any], described: Described) -> _ortrain.OrtValue:
    """Return a value in place, in the element type of the model."""
    array = value.astype(_dtype_of(described), copy=False)
    device = _ortrain.OrtDevice(_ortrain.OrtDevice.cpu(), _ortrain.OrtDevice.default_memory(), 0)
    return _ortrain.OrtValue.ortvalue_from_numpy(array if array.flags.aligned else array.copy(), device)
