"""Results of a step: a loss, or several outputs with their names.

>>> from ortrain.api.outputs import Scalar
>>> loss = module(x, labels)
>>> isinstance(loss, Scalar), round(loss, 2)
(True, 2.27)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, SupportsIndex, TypeVar, overload

import numpy as np

from ortrain._suggest import hint

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import disjoint_base

    from ortrain.ortvalue import OrtValue
else:

    def disjoint_base(kind: type) -> type:
        return kind


__all__ = ["Outputs", "Scalar"]

Tensor = TypeVar("Tensor")


class Scalar(np.ndarray[Any, Any]):
    """Single number, such as a loss: an array without axes that is rounded, compared and printed as a number.

    It is an ``ndarray`` of shape ``()``, as in onnxruntime-training. Arithmetic returns NumPy scalars. For JSON, use
    ``float(loss)``.

    >>> loss = module(x, labels)
    >>> round(loss, 2), loss.shape, loss.dtype, type(loss.item()).__name__
    (2.27, (), dtype('float32'), 'float')
    >>> f"{loss:.2f}", isinstance(loss * 2, np.float32), isinstance(loss, np.ndarray)
    ('2.27', True, True)
    """

    # Results of arithmetic are plain NumPy values, not instances of this class.
    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:
            return self
        plain = array.view(np.ndarray)
        return plain if plain.ndim else plain[()]

    def __round__(self, ndigits: SupportsIndex | None = None) -> Any:
        value = self.item()
        return round(value if isinstance(value, int) else float(value), ndigits)

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


# For type checkers: an instance cannot also be an instance of another built-in type, such as an array.
@disjoint_base
class Outputs(tuple[Tensor, ...], Generic[Tensor]):
    """Outputs of a step, in the order of :meth:`Module.output_names <ortrain.api.Module.output_names>`.

    They are a tuple, as in onnxruntime-training, with access to the elements by name as well.

    >>> from ortrain import artifacts
    >>> kinds = artifacts.LossType
    >>> near = artifacts.Loss(kinds.CrossEntropyLoss, name="classes")
    >>> small = artifacts.Loss(kinds.L1Loss, target="wanted", factor=0.01, name="size")
    >>> artifacts.generate_artifacts(
    ...     ortrain.examples.perceptron(), loss=[near, small], additional_output_names=["logits"], prefix="two_"
    ... )
    >>> module = Module("two_training_model.onnx", CheckpointState.load_checkpoint("two_checkpoint"))
    >>> outputs = module(x, labels, np.zeros((8, 10), np.float32))
    >>> outputs.names[1:]
    ('classes', 'size', 'logits')
    >>> round(outputs["classes"], 2), outputs["logits"].shape
    (2.27, (8, 10))
    >>> loss, classes, size, logits = outputs
    >>> bool(abs(loss - (classes + 0.01 * size)) < 1e-6)
    True
    """

    names: tuple[str, ...]
    """Names of the outputs."""

    def __new__(cls, values: Sequence[Tensor], names: Sequence[str]) -> Outputs[Tensor]:  # noqa: D102
        outputs = super().__new__(cls, values)
        outputs.names = tuple(names)
        return outputs

    # The type of the key is Any, because a tuple does not accept names.
    def __getitem__(self, key: Any) -> Any:
        """Return an output by its name, or one or several outputs by position.

        Raises:
            KeyError: if no output has this name.

        >>> from ortrain.api.outputs import Outputs
        >>> outputs = Outputs([0.5, 3], ["loss", "count"])
        >>> outputs["count"], outputs[-1], outputs[:1]
        (3, 3, (0.5,))

        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise KeyError(
                f"there is no output {key!r}; the outputs are {', '.join(self.names)}{hint(key, self.names)}"
            )
        return super().__getitem__(self.names.index(key))

    def asdict(self) -> dict[str, Tensor]:
        """Return the outputs by name.

        >>> from ortrain.api.outputs import Outputs
        >>> Outputs([0.5, 3], ["loss", "count"]).asdict()
        {'loss': 0.5, 'count': 3}
        """
        return dict(zip(self.names, self, strict=True))

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={value!r}' for name, value in zip(self.names, self, strict=True))})"

    def __getnewargs__(self) -> Any:
        return tuple(self), self.names


class ArrayResult(Protocol):
    """Type of a result for type checkers: a :class:`Scalar`, or :class:`Outputs` of a model with several outputs.

    Only the model determines the number of outputs, so this protocol has the members of both classes.
    """

    def __float__(self) -> float: ...
    @overload
    def __round__(self, ndigits: None = None) -> int: ...
    @overload
    def __round__(self, ndigits: SupportsIndex) -> float: ...
    def item(self) -> float: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __array__(self) -> npt.NDArray[Any]: ...
    def __lt__(self, other: Any, /) -> np.bool_: ...
    def __le__(self, other: Any, /) -> np.bool_: ...
    def __gt__(self, other: Any, /) -> np.bool_: ...
    def __ge__(self, other: Any, /) -> np.bool_: ...
    def __add__(self, other: Any, /) -> np.floating[Any]: ...
    def __radd__(self, other: Any, /) -> np.floating[Any]: ...
    def __sub__(self, other: Any, /) -> np.floating[Any]: ...
    def __rsub__(self, other: Any, /) -> np.floating[Any]: ...
    def __mul__(self, other: Any, /) -> np.floating[Any]: ...
    def __rmul__(self, other: Any, /) -> np.floating[Any]: ...
    def __truediv__(self, other: Any, /) -> np.floating[Any]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def asdict(self) -> dict[str, npt.NDArray[Any]]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[npt.NDArray[Any]]: ...
    def __getitem__(self, key: int | str, /) -> npt.NDArray[Any]: ...


class OrtValueResult(Protocol):
    """Type of a result for type checkers: an :class:`~ortrain.OrtValue`, or :class:`Outputs` of several values."""

    def numpy(self) -> npt.NDArray[Any]: ...
    def __array__(self) -> npt.NDArray[Any]: ...
    def shape(self) -> list[int]: ...
    def data_type(self) -> str: ...
    def element_type(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def asdict(self) -> dict[str, OrtValue]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[OrtValue]: ...
    def __getitem__(self, key: int | str, /) -> OrtValue: ...
