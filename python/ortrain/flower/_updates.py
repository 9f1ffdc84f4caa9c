"""Updates of clients: values or differences of trained parameters, and their forms in messages."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain.errors import InvalidArgumentError
from ortrain.flower._values import Shapes, Values, check_values, size_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Form", "TopK", "Update", "checked_form", "dense_update", "digest_of", "form_name", "pack"]

INDICES, ELEMENTS = "top-k.indices", "top-k.values"
"""Names of the two arrays of the largest differences."""


@dataclass(frozen=True)
class TopK:
    """Form of an update with the largest differences only; the client adds the others to its next update.

    A client sends the indices (uint32) and the values (float32) of the elements with the largest magnitudes: 8 bytes
    each. The remainder stays in the memory of the client and is added to the update of its next round (*error
    feedback*; Stich et al., "Sparsified SGD with Memory", 2018).

    Args:
        fraction: the share of the elements that travel, above 0 and at most 1; at least one element travels.

    Raises:
        InvalidArgumentError: for another fraction.

    >>> from ortrain.flower import TopK
    >>> TopK(0.01)
    TopK(fraction=0.01)

    """

    fraction: float
    """Share of the elements that travel."""

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not 0 < self.fraction <= 1:
            raise InvalidArgumentError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")


Form = str | TopK
"""``"float32"``, ``"float16"`` or :class:`TopK`."""


def checked_form(form: Form) -> Form:
    """Return the form.

    Raises:
        InvalidArgumentError: if there is no such form.

    """
    if isinstance(form, TopK) or form in ("float32", "float16"):
        return form
    raise InvalidArgumentError(f"send must be 'float32', 'float16' or a TopK, got {form!r}")


def form_name(form: Form) -> str:
    """Return the name of a form in messages."""
    return {"float32": "values", "float16": "difference"}[form] if isinstance(form, str) else "top-k"


@dataclass
class Update:
    """Reply of a client."""

    arrays: dict[str, npt.NDArray[Any]]
    """Arrays that travel: values, differences or a top-k pair of the trained parameters, and running statistics."""
    examples: int
    """Number of training examples, the weight of the client in the mean."""
    form: str
    """``"values"``, ``"difference"`` or ``"top-k"``."""
    metrics: dict[str, float]
    """Mean loss and metrics of the training."""
    client: str = ""
    """Name of the client in messages."""
    byte_count: int = 0
    """Bytes of the arrays in the message."""


def pack(
    form: Form, received: Values, trained: Values, memory: npt.NDArray[Any] | None
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any] | None]:
    """Return the arrays that travel, and the remainder for the next round (float32, a vector; top-k only).

    Args:
        form: the form.
        received: the parameters before the training.
        trained: the parameters after the training.
        memory: the remainder of the round before; ``None`` in the first round.

    Raises:
        InvalidArgumentError: if a value is not finite, or a difference exceeds float16.

    """
    for name, array in trained.items():
        if not np.isfinite(array).all():
            raise InvalidArgumentError(f"the training made NaN or infinities in parameter {name!r}")
    if form == "float32":
        return dict(trained), None
    differences = {name: array - received[name].astype(np.float32) for name, array in trained.items()}
    if form == "float16":
        with np.errstate(over="ignore"):
            halves = {name: np.asarray(array, np.float16) for name, array in differences.items()}
        for name, array in halves.items():
            if not np.isfinite(array).all():
                raise InvalidArgumentError(f"the change of parameter {name!r} exceeds float16; send 'float32'")
        return halves, None
    assert isinstance(form, TopK)
    flat = np.concatenate([differences[name].ravel() for name in sorted(differences)])
    if memory is not None and memory.shape == flat.shape:
        flat = flat + memory
    count = max(1, math.ceil(form.fraction * flat.size))
    # A stable order: of equal magnitudes, the one at the lower index travels.
    chosen = np.sort(np.argsort(-np.abs(flat), kind="stable")[:count]).astype(np.uint32)
    elements = flat[chosen].astype(np.float32)
    remainder = flat.astype(np.float32)
    remainder[chosen] = 0
    return {INDICES: chosen, ELEMENTS: elements}, remainder


def dense_update(update: Update, base: Values, shapes: Shapes) -> dict[str, npt.NDArray[Any]]:
    """Return the parameters of a client from its update, in float64.

    Args:
        update: the update; its arrays contain trained parameters alone.
        base: the parameters that the server sent.
        shapes: the shapes of the parameters.

    Raises:
        InvalidArgumentError: if the update does not fit.

    """
    if update.form == "top-k":
        return _from_top_k(update.arrays, base, shapes)
    if update.form not in ("values", "difference"):
        raise InvalidArgumentError(f"the form {update.form!r} is unknown")
    check_values(update.arrays, shapes)
    found = {name: update.arrays[name].astype(np.float64) for name in shapes}
    if update.form == "values":
        return found
    return {name: base[name].astype(np.float64) + array for name, array in found.items()}


def _from_top_k(arrays: Values, base: Values, shapes: Shapes) -> dict[str, npt.NDArray[Any]]:
    if set(arrays) != {INDICES, ELEMENTS}:
        raise InvalidArgumentError(f"a top-k update has the arrays {INDICES!r} and {ELEMENTS!r}, got {sorted(arrays)}")
    indices, elements = arrays[INDICES], arrays[ELEMENTS]
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or elements.shape != indices.shape:
        raise InvalidArgumentError(
            f"a top-k update has one index for each value, got {indices.shape} of {indices.dtype} and {elements.shape}"
        )
    if elements.dtype.kind != "f" or not np.isfinite(elements).all():
        raise InvalidArgumentError("the values of the top-k update have NaN, infinities or no floats")
    size = size_of(shapes)
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise InvalidArgumentError(f"the top-k update has an index outside of the {size} elements")
    if np.unique(indices).size != indices.size:
        raise InvalidArgumentError("the top-k update has an index twice")
    names = sorted(shapes)
    flat = np.concatenate([base[name].astype(np.float64).ravel() for name in names])
    flat[indices.astype(np.int64)] += elements.astype(np.float64)
    found, at = {}, 0
    for name in names:
        count = math.prod(shapes[name])
        found[name] = flat[at : at + count].reshape(shapes[name])
        at += count
    return found


def digest_of(update: Update) -> bytes:
    """Return a hash of the content of an update, by which the server orders its sums."""
    content = hashlib.sha256(f"{update.form} {update.examples}".encode())
    for name in sorted(update.arrays):
        array = np.ascontiguousarray(update.arrays[name])
        content.update(f"\0{name}\0{array.dtype.str}{array.shape}\0".encode())
        content.update(array.tobytes())
    for name in sorted(update.metrics):
        content.update(f"\0{name}={update.metrics[name]!r}".encode())
    return content.digest()
