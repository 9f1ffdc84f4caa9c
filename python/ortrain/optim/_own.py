"""User-defined optimizers: Python functions over symbolic values, or ONNX functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

import numpy as np

from ortrain import _ortrain
from ortrain.errors import InvalidArgumentError
from ortrain.optim._config import Group, OptimizerConfig, number

if TYPE_CHECKING:
    import onnx

__all__ = ["OwnOptimizer", "Value", "register"]

# Domain of the ONNX functions that come from Python functions.
_DOMAIN = "ortrain.optim"
# Opset of these functions. The operators that the tracer emits are unchanged since this version.
_OPSET = 17
# Attribute that passes the element type to a function.
_ELEMENT_TYPE = "element_type"
# Keyword arguments that are not settings.
_NUMBERS = ("rate", "step")


class _Tracer:
    """Recorder of the nodes of a function during tracing."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def node(self, op: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        # A name with a dot cannot collide with an argument of a Python function.
        output = f"{op}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(self, number: float) -> str:
        from onnx import TensorProto, helper

        return self.node("Constant", [], value=helper.make_tensor("number", TensorProto.DOUBLE, [], [float(number)]))

    def as_number(self, name: str) -> str:
        from onnx import TensorProto

        return self.node("Cast", [name], to=TensorProto.DOUBLE)

    def as_element(self, name: str) -> str:
        from onnx import AttributeProto

        output = self.node("Cast", [name])
        to = AttributeProto(name="to", type=AttributeProto.INT, ref_attr_name=_ELEMENT_TYPE)
        self.nodes[-1].attribute.append(to)
        return output


class Value:
    """Symbolic value in the formula of an optimizer: one number for each element of a parameter, or one scalar.

    Values support the operators of Python (``+ - * / ** abs`` and comparisons), and NumPy's functions ``sqrt``,
    ``square``, ``sign``, ``abs``, ``exp``, ``log``, ``minimum``, ``maximum``, ``where``, ``sum`` and ``linalg.norm``.
    Rate, step and settings are float64. An operation that combines them with elements rounds them to the element type.
    A comparison counts as 1 or 0 where a number is required.

    >>> import numpy as np
    >>> from ortrain import optim
    >>> @optim.register
    ... def Normed(parameter, gradient, *, rate, eps=1e-8):
    ...     return parameter - rate * gradient / (np.linalg.norm(gradient) + eps)
    >>> Normed(lr=0.1)
    Normed(lr=0.1)
    """

    __array_priority__ = 1000

    def __init__(self, tracer: _Tracer, name: str, *, is_number: bool, is_truth: bool = False) -> None:
        self._tracer, self._name, self._is_number, self._is_truth = tracer, name, is_number, is_truth

    def _of(self, other: Operand) -> Value:
        if isinstance(other, Value):
            return other
        if isinstance(other, bool) or not isinstance(other, (int, float, np.number)):
            raise TypeError(f"the formula of an optimizer accepts its values and numbers, got {other!r}")
        return Value(self._tracer, self._tracer.constant(float(other)), is_number=True)

    def _as(self, *, is_number: bool) -> str:
        """Return the name of this value, cast to float64 for numbers or to the element type."""
        if self._is_number == is_number and not self._is_truth:
            return self._name
        return self._tracer.as_number(self._name) if is_number else self._tracer.as_element(self._name)

    def _op(self, op: str, *others: Operand, is_truth: bool = False) -> Value:
        values = [self, *map(self._of, others)]
        is_number = all(value._is_number for value in values)
        name = self._tracer.node(op, [value._as(is_number=is_number) for value in values])
        return Value(self._tracer, name, is_number=is_number, is_truth=is_truth)

    def _compared(self, op: str, other: Operand) -> Value:
        return self._op(op, other, is_truth=True)

    def __add__(self, other: Operand) -> Value:
        return self._op("Add", other)

    def __radd__(self, other: Operand) -> Value:
        return self._of(other)._op("Add", self)

    def __sub__(self, other: Operand) -> Value:
        return self._op("Sub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._of(other)._op("Sub", self)

    def __mul__(self, other: Operand) -> Value:
        return self._op("Mul", other)

    def __rmul__(self, other: Operand) -> Value:
        return self._of(other)._op("Mul", self)

    def __truediv__(self, other: Operand) -> Value:
        return self._op("Div", other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self._of(other)._op("Div", self)

    def __pow__(self, other: Operand) -> Value:
        return self._op("Pow", other)

    def __rpow__(self, other: Operand) -> Value:
        return self._of(other)._op("Pow", self)

    def __neg__(self) -> Value:
        return self._op("Neg")

    def __abs__(self) -> Value:
        return self._op("Abs")

    def __lt__(self, other: Operand) -> Value:
        return self._compared("Less", other)

    def __le__(self, other: Operand) -> Value:
        return self._compared("LessOrEqual", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compared("Greater", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compared("GreaterOrEqual", other)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self._compared("Equal", other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        equal = self._compared("Equal", other)
        name = self._tracer.node("Not", [equal._name])
        return Value(self._tracer, name, is_number=equal._is_number, is_truth=True)

    def __bool__(self) -> bool:
        raise TypeError("a symbolic value is neither true nor false; use np.where for a condition")

    def __float__(self) -> float:
        raise TypeError("a symbolic value has no numeric value before the optimizer runs")

    def sum(self) -> Value:
        """The sum over all elements of the parameter.

        >>> from ortrain import optim
        >>> @optim.register
        ... def Centered(parameter, gradient, *, rate):
        ...     return parameter - rate * (gradient - 1e-3 * gradient.sum())
        >>> Centered().lr
        0.001
        """
        name = self._tracer.node("ReduceSum", [self._as(is_number=self._is_number)], keepdims=0)
        return Value(self._tracer, name, is_number=self._is_number)

    def norm(self) -> Value:
        """The L2 norm of all elements of the parameter.

        >>> from ortrain import optim
        >>> @optim.register
        ... def Normalized(parameter, gradient, *, rate):
        ...     return parameter - rate * gradient / gradient.norm()
        >>> Normalized().lr
        0.001
        """
        return (self * self).sum()._op("Sqrt")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        formula = _UFUNCS.get(ufunc.__name__)
        if formula is None or method != "__call__" or options:
            raise TypeError(f"the formula of an optimizer cannot use numpy.{ufunc.__name__}")
        first, *others = inputs
        value = first if isinstance(first, Value) else self._of(first)
        return formula(value, *others)

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if function is np.where and len(args) == 3 and not kwargs:
            condition, yes, no = args
            if not isinstance(condition, Value) or not condition._is_truth:
                raise TypeError(f"the condition of numpy.where must be a comparison of values, got {condition!r}")
            branches = [self._of(yes), self._of(no)]
            is_number = all(value._is_number for value in (condition, *branches))
            names = [value._as(is_number=is_number) for value in branches]
            return Value(self._tracer, self._tracer.node("Where", [condition._name, *names]), is_number=is_number)
        if function is np.sum and len(args) == 1 and not kwargs:
            return self.sum()
        if function is np.linalg.norm and len(args) == 1 and not kwargs:
            return self.norm()
        raise TypeError(f"the formula of an optimizer cannot use numpy.{function.__name__} with these arguments")

    def __repr__(self) -> str:
        return f"Value({self._name})"


Operand: TypeAlias = Value | float

_UFUNCS: dict[str, Callable[..., Value]] = {
    "add": Value.__add__,
    "subtract": Value.__sub__,
    "multiply": Value.__mul__,
    "divide": Value.__truediv__,
    "power": Value.__pow__,
    "negative": Value.__neg__,
    "absolute": Value.__abs__,
    "equal": Value.__eq__,
    "not_equal": Value.__ne__,
    "less": Value.__lt__,
    "less_equal": Value.__le__,
    "greater": Value.__gt__,
    "greater_equal": Value.__ge__,
    "square": lambda value: value * value,
    "sqrt": lambda value: value._op("Sqrt"),
    "sign": lambda value: value._op("Sign"),
    "exp": lambda value: value._op("Exp"),
    "log": lambda value: value._op("Log"),
    "minimum": lambda value, other: value._op("Min", other),
    "maximum": lambda value, other: value._op("Max", other),
}


class OwnOptimizer(OptimizerConfig):
    """User-defined optimizer with its settings; :func:`register` makes a subclass for each function.

    Args:
        lr: the learning rate before any schedule; ``None`` for the default of the optimizer.
        max_norm: the largest L2 norm of all gradients together.
        max_norm_per_tensor: the largest L2 norm of the gradient of one parameter.
        max_value: the largest absolute value of an element of a gradient.
        ema_decay: decay rate of a moving average of the weights.
        accumulation: the reduction of the gradients of several training steps: ``"sum"`` or ``"mean"``.
        groups: parameter groups with separate settings.
        layer_decay: the ratio of a layer's learning rate to the rate of the next layer.
        settings: the settings of the optimizer.

    >>> from ortrain import optim
    >>> @optim.register(lr=0.1)
    ... def Descent(parameter, gradient, *, rate):
    ...     return parameter - rate * gradient
    >>> isinstance(Descent(max_norm=1.0), optim.OwnOptimizer)
    True

    """

    _defaults: ClassVar[dict[str, float]] = {}
    _rate: ClassVar[float] = 1e-3

    def __init__(
        self,
        lr: float | None = None,
        *,
        max_norm: float | None = None,
        max_norm_per_tensor: float | None = None,
        max_value: float | None = None,
        ema_decay: float | None = None,
        accumulation: Literal["sum", "mean"] = "sum",
        groups: Iterable[Group | Mapping[str, Any]] = (),
        layer_decay: float | None = None,
        **settings: float,
    ) -> None:
        super().__init__(
            self._rate if lr is None else lr,
            self._defaults | settings,
            {},
            max_norm=max_norm,
            max_norm_per_tensor=max_norm_per_tensor,
            max_value=max_value,
            ema_decay=ema_decay,
            accumulation=accumulation,
            groups=groups,
            layer_decay=layer_decay,
        )

    @classmethod
    def _usual(cls) -> dict[str, float | bool]:
        return dict(cls._defaults)


@overload
def register(
    function: Callable[..., Any] | onnx.FunctionProto,
    /,
    *,
    lr: float = ...,
    settings: Mapping[str, float] | None = ...,
    starts: Mapping[str, str] | None = ...,
) -> type[OwnOptimizer]: ...
@overload
def register(
    function: None = None,
    /,
    *,
    lr: float = ...,
    settings: Mapping[str, float] | None = ...,
    starts: Mapping[str, str] | None = ...,
) -> Callable[[Callable[..., Any]], type[OwnOptimizer]]: ...
def register(
    function: Callable[..., Any] | onnx.FunctionProto | None = None,
    /,
    *,
    lr: float = 1e-3,
    settings: Mapping[str, float] | None = None,
    starts: Mapping[str, str] | None = None,
) -> type[OwnOptimizer] | Callable[[Callable[..., Any]], type[OwnOptimizer]]:
    """Return the class of a user-defined optimizer, for artifacts like the optimizers of the table.

    A Python function is the formula of one parameter. Its positional arguments are ``parameter``, ``gradient`` and the
    slots: the optimizer state of the parameter, zero before the first step. Its keyword arguments are ``rate`` and
    ``step``, if the formula uses them, and settings, which have defaults. It returns the new parameter and the new
    slots. It is called once, with symbolic values (:class:`Value`). The package ``onnx`` is required to generate
    artifacts, but not to train.

    An ONNX function is used unchanged. Its inputs have the same names; its outputs are ``new_parameter`` and, for each
    slot, ``new_`` followed by the name of the slot. Its rate, step and settings have the element type. If the function
    has an attribute ``element_type``, they are float64 and the attribute is the element type.

    Args:
        function: a Python function or an ``onnx.FunctionProto``; omitted if ``register`` is a decorator with
            arguments.
        lr: the default learning rate.
        settings: the settings of an ONNX function and their defaults.
        starts: the initial values of slots: ``"one"``, ``"parameter"``, or the name of a setting.

    Raises:
        InvalidArgumentError: if the function reads an unknown input, has no new parameter as output, or has the name
            of an optimizer of the table.
        TypeError: if no ONNX operator implements an operation of the formula on symbolic values.

    >>> import numpy as np
    >>> import ortrain
    >>> from ortrain import optim
    >>> @optim.register(lr=1e-4)
    ... def MyLion(parameter, gradient, momentum, *, rate, beta1=0.9, beta2=0.99, weight_decay=0.0):
    ...     direction = np.sign(beta1 * momentum + (1 - beta1) * gradient)
    ...     momentum = beta2 * momentum + (1 - beta2) * gradient
    ...     return parameter - rate * (direction + weight_decay * parameter), momentum
    >>> config = MyLion(weight_decay=0.1, groups=[{"params": "*.bias", "weight_decay": 0}])
    >>> loss = ortrain.LossType.CrossEntropyLoss
    >>> ortrain.generate_artifacts(ortrain.examples.perceptron(), loss=loss, optimizer=config)
    >>> module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"))
    >>> optimizer = Optimizer("optimizer_model.onnx", module)
    >>> _ = module(x, labels)
    >>> optimizer.step()

    """
    if function is None:
        return lambda decorated: register(decorated, lr=lr, settings=settings, starts=starts)
    if inspect.isfunction(function):
        if settings is not None:
            raise InvalidArgumentError("the settings of a Python function are its keyword arguments; omit settings")
        proto, defaults = _traced(function)
    else:
        import onnx

        if not isinstance(function, onnx.FunctionProto):
            raise TypeError(
                f"an optimizer must be a Python function or an onnx.FunctionProto, got {type(function).__name__}"
            )
        proto, defaults = function, {name: number(name, value) for name, value in (settings or {}).items()}
    options = [p for p in inspect.signature(OwnOptimizer).parameters.values() if p.name not in ("lr", "settings")]
    conflict = next((name for name in defaults if name in ("lr", *(option.name for option in options))), None)
    if conflict is not None:
        raise InvalidArgumentError(
            f"the optimizer {proto.name}: {conflict!r} is an option of every optimizer; rename the setting"
        )
    own = _ortrain.OwnOptimizer(proto.SerializeToString(), defaults, float(lr), dict(starts or {}))
    keyword = inspect.Parameter.KEYWORD_ONLY
    ours = [inspect.Parameter(name, keyword, default=value) for name, value in defaults.items()]
    rate = inspect.Parameter("lr", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=float(lr))
    members = {
        "__doc__": getattr(function, "__doc__", None),
        "__module__": getattr(function, "__module__", __name__),
        "__signature__": inspect.Signature([rate, *ours, *options]),
        "_own": own,
        "_defaults": defaults,
        "_rate": float(lr),
    }
    return type(proto.name, (OwnOptimizer,), members)


def _traced(function: Callable[..., Any]) -> tuple[onnx.FunctionProto, dict[str, float]]:
    """Trace a Python function into an ONNX function; return it with the defaults of its settings."""
    from onnx import helper

    name = function.__name__
    positional, defaults, numbers = [], {}, []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is inspect.Parameter.KEYWORD_ONLY:
            if argument.name in _NUMBERS:
                numbers.append(argument.name)
            elif argument.default is inspect.Parameter.empty:
                raise InvalidArgumentError(
                    f"the optimizer {name}: the keyword argument {argument.name!r} has no default; all except rate "
                    "and step require one"
                )
            else:
                defaults[argument.name] = number(f"the optimizer {name}: {argument.name}", argument.default)
        elif argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and argument.default is inspect.Parameter.empty:
            positional.append(argument.name)
        else:
            raise InvalidArgumentError(
                f"the optimizer {name}: {argument} is not a valid argument; parameter, gradient and slots are first "
                "and have no default, settings are keyword-only (after a *)"
            )
    if positional[:2] != ["parameter", "gradient"]:
        raise InvalidArgumentError(
            f"the optimizer {name}: the first arguments must be parameter and gradient, got {', '.join(positional[:2])}"
        )
    tracer = _Tracer()
    values = [Value(tracer, each, is_number=False) for each in positional]
    named = {each: Value(tracer, each, is_number=True) for each in (*numbers, *defaults)}
    results = function(*values, **named)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    slots = positional[2:]
    if len(results) != 1 + len(slots):
        raise InvalidArgumentError(
            f"the optimizer {name} returns {len(results)} values; expected the new parameter"
            + "".join(f", the new {slot}" for slot in slots)
        )
    outputs = []
    for what, value in zip(("parameter", *slots), results, strict=True):
        if not isinstance(value, Value) or value._is_number:
            raise InvalidArgumentError(
                f"the optimizer {name}: the new {what} must have a value for each element, got {value!r}"
            )
        outputs.append(f"new_{what}")
        tracer.nodes.append(helper.make_node("Identity", [value._as(is_number=False)], [outputs[-1]]))
    proto = helper.make_function(
        _DOMAIN,
        name,
        [*positional, *numbers, *defaults],
        outputs,
        tracer.nodes,
        [helper.make_opsetid("", _OPSET)],
        attributes=[_ELEMENT_TYPE],
    )
    return proto, defaults
