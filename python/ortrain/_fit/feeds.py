"""Batches for the steps of a module, from rows in any order or from an iterable of batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ortrain._fit.arrays import ArraySource, Column, to_input
from ortrain._fit.description import Array, Description
from ortrain._fit.losses import IGNORED_LABEL, SAMPLE_WEIGHT, TARGET, RowError, Target
from ortrain._fit.order import batch_seed, permutation
from ortrain.data import Batch, Source
from ortrain.errors import InvalidArgumentError

__all__ = ["BatchFeed", "Feed", "Layout", "RowFeed", "Step"]

# Rows are gathered for several small batches at once, up to these numbers. Larger blocks would push the weights out of
# the cache, and the threads of the step would fall asleep meanwhile.
_BLOCK_BYTES, _BLOCK_BATCHES = 1 << 17, 64


class Step(NamedTuple):
    """Arguments of a step."""

    arguments: Sequence[Array]
    """Inputs of the module, in its order."""
    rows: int
    """Number of rows, without rows that fill up a fixed batch."""
    first: int
    """Index of the first row in the pass, for messages."""


# Faster than the constructor, which a loop over small steps would notice.
_new = tuple.__new__


@dataclass(frozen=True)
class Layout:
    """Inputs of a module, and the form of its batches."""

    names: Sequence[str]
    """Inputs of the module, in its order."""
    description: Description
    targets: tuple[Target, ...]
    class_names: Mapping[str, Sequence[Any]]
    """Texts of the classes by target."""
    class_weight: Mapping[Any, float] | None
    fixed: int | None
    """Size of a fixed batch axis."""
    is_weighted: bool
    """True if the module takes a weight for each row."""

    @property
    def target_positions(self) -> list[int]:
        """Positions of the targets among the arguments."""
        return [list(self.names).index(target.input) for target in self.targets]

    @property
    def weight_position(self) -> int | None:
        """Position of the weights among the arguments."""
        return list(self.names).index(SAMPLE_WEIGHT) if self.is_weighted else None

    def weights_of(self, targets: Mapping[str, Array], weights: Array | None, rows: int) -> Array:
        """Return the weights of rows: sample weights times class weights."""
        found = np.ones(rows, np.float32) if weights is None else np.asarray(weights, np.float32).reshape(rows)
        if self.class_weight is None:
            return found
        return found * self._weights_by_class(next(iter(targets.values())))

    def _weights_by_class(self, labels: Array) -> Array:
        assert self.class_weight is not None
        if labels.ndim > 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
        if labels.ndim != 1:
            raise InvalidArgumentError(
                f"class_weight needs one label for each row, but the targets have the shape {list(labels.shape)}; pass "
                "sample_weight"
            )
        names = next(iter(self.class_names.values()), None)
        index = {name: at for at, name in enumerate(names)} if names is not None else {}
        table = {_class_index(label, index): float(weight) for label, weight in self.class_weight.items()}
        size = int(max(max(table), labels.max(initial=0))) + 1
        factors = np.ones(size, np.float32)
        for label, weight in table.items():
            factors[label] = weight
        return factors[labels.astype(np.int64)]

    def padded(self, arguments: Sequence[Array], rows: int) -> Sequence[Array]:
        """Fill up a batch to the fixed size. The added rows have weight zero, and labels that are ignored."""
        if self.fixed is None or rows == self.fixed:
            return arguments
        if rows > self.fixed:
            raise InvalidArgumentError(
                f"a batch has {rows} rows, but the model takes {self.fixed} (its batch axis is fixed)"
            )
        at = np.arange(self.fixed) % rows
        filled = [value[at] for value in arguments]
        position = self.weight_position
        if position is not None:
            filled[position] = filled[position] * np.float32(self.fixed / rows)
            filled[position][rows:] = 0
        for target, position in zip(self.targets, self.target_positions, strict=True):
            if target.kind == "labels" and target.output is not None and len(target.output.scores.shape) > 2:
                filled[position][rows:] = IGNORED_LABEL
        return filled

    def arguments_of(self, batch: Batch, *, converted: bool) -> Sequence[Array]:
        """Return the inputs of the module for a batch of a source."""
        targets = self._targets_of(batch, converted=converted)
        rows = len(batch)
        values: dict[str, Array] = dict(batch.inputs)
        for target in self.targets:
            values[target.input] = targets[target.name]
        if self.is_weighted:
            values[SAMPLE_WEIGHT] = self.weights_of(targets, batch.weights, rows)
        return self.padded([values[name] for name in self.names], rows)

    def _targets_of(self, batch: Batch, *, converted: bool) -> dict[str, Array]:
        found = {}
        for target in self.targets:
            values = batch.targets.get(target.name)
            if values is None and len(self.targets) == 1 and len(batch.targets) == 1:
                values = next(iter(batch.targets.values()))
            if values is None:
                raise InvalidArgumentError(
                    f"the data has no target {target.name!r}; it has {', '.join(batch.targets) or 'none'}"
                )
            found[target.name] = values if converted else target.convert(values, self.class_names.get(target.name))
        return found

    def converted_batch(self, item: Any, *, needs_targets: bool = True) -> Batch:
        """Convert an element of an iterable of batches: ``(x, y)``, ``(x, y, weights)``, a dict, or ``x``."""
        x, y, weights = _parts_of(item, self.description, self.targets, needs_targets)
        names = self.description.input_names
        if isinstance(x, Mapping):
            arrays = {name: x[name] for name in names if name in x}
            if len(arrays) != len(names):
                missing = next(name for name in names if name not in x)
                raise InvalidArgumentError(
                    f"a batch has no array for input {missing!r}; it has {', '.join(map(str, x))}"
                )
        elif isinstance(x, (list, tuple)) and len(names) > 1:
            if len(x) != len(names):
                raise InvalidArgumentError(
                    f"a batch has {len(x)} inputs, but the model has {len(names)}: {', '.join(names)}"
                )
            arrays = dict(zip(names, x, strict=True))
        else:
            arrays = {names[0]: x}
        values = {value.name: value for value in self.description.inputs}
        inputs = {
            name: to_input(_numpy(array), values[name], f"input {name!r} of a batch") for name, array in arrays.items()
        }
        if y is None:
            targets: dict[str, Array] = {}
        elif isinstance(y, Mapping):
            targets = {str(name): _numpy(value) for name, value in y.items()}
        elif isinstance(y, (list, tuple)) and len(self.targets) > 1:
            targets = {target.name: _numpy(value) for target, value in zip(self.targets, y, strict=True)}
        else:
            targets = {self.targets[0].name if self.targets else TARGET: _numpy(y)}
        return Batch(inputs, targets, None if weights is None else _numpy(weights))


def _class_index(label: Any, index: Mapping[Any, int]) -> int:
    found = index.get(label, label)
    if isinstance(found, bool) or not hasattr(found, "__index__") or operator.index(found) < 0:
        known = ", ".join(map(repr, index)) or "0, 1 and so on"
        raise InvalidArgumentError(f"class_weight has the class {label!r}; the classes are {known}")
    return operator.index(found)


def _parts_of(
    item: Any, description: Description, targets: Sequence[Target], needs_targets: bool
) -> tuple[Any, Any, Any]:
    if isinstance(item, Batch):
        return item.inputs, item.targets or None, item.weights
    if isinstance(item, Mapping):
        inputs = set(description.input_names)
        rest = {name: value for name, value in item.items() if name not in inputs}
        known = {name: rest[name] for name in [target.name for target in targets] if name in rest}
        if not known:
            named = [name for name in rest if str(name).lower() in ("labels", "label", "target", "targets", "y")]
            known = {TARGET: rest[named[0]]} if named else {}
        return item, known or None, rest.get(SAMPLE_WEIGHT)
    if isinstance(item, (list, tuple)):
        if len(item) == 3:
            return item[0], item[1], item[2]
        if len(item) == 2:
            return item[0], item[1], None
        if len(item) == 1:
            return item[0], None, None
        raise InvalidArgumentError(f"a batch must be (x, y) or (x, y, weights), got {len(item)} elements")
    if needs_targets and targets:
        raise InvalidArgumentError(f"a batch must be (x, y), (x, y, weights) or a dict, got {type(item).__name__}")
    return item, None, None


def _numpy(value: Any) -> Array:
    if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    return np.asarray(value)


class Feed:
    """Batches of a training or an evaluation."""

    steps_per_pass: int | None
    """Number of batches in a pass over the data; ``None`` if unknown."""

    def epoch(self, epoch: int, skip: int, steps: int | None) -> Iterator[Step]:
        """Yield the steps of an epoch.

        Args:
            epoch: the number of the epoch, from zero.
            skip: the number of steps of the epoch that are done.
            steps: the number of steps of each epoch; ``None`` for one pass over the data.

        Raises:
            InvalidArgumentError: if the data ends before the epoch.

        """
        raise NotImplementedError

    def row_name(self, step: Step, row: int) -> str:
        """Return the name of a row of a step, for messages."""
        raise NotImplementedError


class RowFeed(Feed):
    """Batches of a source of rows. Passes over the rows follow each other without an end.

    Args:
        source: the rows.
        layout: the inputs of the module.
        batch_size: the number of rows of a batch; the last one of a pass may be smaller.
        shuffle: True if each pass has its own order.
        seed: the seed of the orders and of augmentation.
        first_pass: the number of passes that other trainings have made.
        training: True if batches may be augmented.
        workers: the number of threads that read ahead; ``None`` for the default.

    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        first_pass: int = 0,
        training: bool = True,
        workers: int | None = None,
    ) -> None:
        if not len(source):
            raise InvalidArgumentError("the data has no rows")
        self._source, self._layout = source, layout
        self._size, self._shuffle, self._seed = (
            min(batch_size, len(source)) if layout.fixed is None else batch_size,
            shuffle,
            seed,
        )
        self._first_pass, self._training, self._workers = first_pass, training, workers
        self.steps_per_pass = -(-len(source) // self._size)
        self._order: Array | None = None
        self._columns = self._array_columns() if isinstance(source, ArraySource) else None

    def _array_columns(self) -> list[Column]:
        """Return the columns of the module's inputs, and compute the weights of all rows."""
        source, layout = self._source, self._layout
        assert isinstance(source, ArraySource)
        by_input = dict(source.inputs)
        for target in layout.targets:
            by_input[target.input] = source.targets[target.name]
        if layout.is_weighted:
            labels = (
                {name: column.read_slice(0, len(column)) for name, column in source.targets.items()}
                if layout.class_weight is not None
                else {}
            )
            total = len(next(iter(source.inputs.values())))
            by_input[SAMPLE_WEIGHT] = Column(SAMPLE_WEIGHT, layout.weights_of(labels, source.weights, total))
        return [by_input[name] for name in layout.names]

    def epoch(self, epoch: int, skip: int, steps: int | None) -> Iterator[Step]:
        per_pass = self.steps_per_pass
        assert per_pass is not None
        count = per_pass if steps is None else steps
        first, left = epoch * count + skip, count - skip
        while left > 0:
            pass_index, begin = divmod(first, per_pass)
            end = min(begin + left, per_pass)
            order = permutation(len(self._source), self._seed, self._first_pass + pass_index) if self._shuffle else None
            self._order = order
            if self._columns is None:
                yield from self._source_steps(order, begin, end, first - begin)
            else:
                yield from self._array_steps(order, begin, end)
            first, left = first + end - begin, left - (end - begin)

    def _array_steps(self, order: Array | None, begin: int, end: int) -> Iterator[Step]:
        columns, size, total = self._columns, self._size, len(self._source)
        assert columns is not None
        assert isinstance(self._source, ArraySource)
        offset = self._source.begin
        bytes_of_batch = max(1, sum(column.row_bytes for column in columns) * size)
        batches = max(1, min(_BLOCK_BATCHES, _BLOCK_BYTES // bytes_of_batch))
        fixed, padded = self._layout.fixed, self._layout.padded
        # Only the step reads inputs. Metrics keep targets.
        inputs = set(self._layout.description.input_names)
        pairs = [
            (column, column.buffer(batches * size) if name in inputs else None)
            for name, column in zip(self._layout.names, columns, strict=True)
        ]
        for block in range(begin, end, batches):
            first, last = block * size, min(min(block + batches, end) * size, total)
            try:
                if order is None:
                    values = [column.read_slice(offset + first, offset + last) for column in columns]
                else:
                    rows = order[first:last] + offset if offset else order[first:last]
                    values = [column.read(rows, buffer) for column, buffer in pairs]
            except RowError as error:
                raise self._named(error, first) from error
            if batches == 1 and fixed is None:
                yield _new(Step, (values, last - first, first))
                continue
            for at in range(0, last - first, size):
                arguments: Sequence[Array] = [value[at : at + size] for value in values]
                count = min(size, last - first - at)
                if fixed is not None:
                    arguments = padded(arguments, count)
                yield _new(Step, (arguments, count, first + at))

    def _source_steps(self, order: Array | None, begin: int, end: int, base: int) -> Iterator[Step]:
        from ortrain.data._prefetch import Prefetcher

        total, size = len(self._source), self._size
        base += self._first_pass * (self.steps_per_pass or 0)

        def plans() -> Iterator[tuple[Array, int]]:
            for at in range(begin, end):
                first, last = at * size, min((at + 1) * size, total)
                rows = np.arange(first, last) if order is None else order[first:last]
                yield rows, batch_seed(self._seed, base + at)

        with closing(Prefetcher(self._source, plans(), training=self._training, workers=self._workers)) as batches:
            for at, batch in enumerate(batches, begin):
                try:
                    arguments = self._layout.arguments_of(batch, converted=False)
                except RowError as error:
                    raise self._named(error, at * size) from error
                yield Step(arguments, len(batch), at * size)

    def _named(self, error: RowError, first: int) -> InvalidArgumentError:
        """Return an error about a row of a batch, with the name of the row."""
        return error.named(self._name(first + error.row))

    def row_name(self, step: Step, row: int) -> str:
        return self._name(step.first + row)

    def _name(self, at: int) -> str:
        """Return the name of the row at a place of the pass."""
        at = int(self._order[at]) if self._order is not None else at
        name: Callable[[int], str] | None = getattr(self._source, "row_name", None)
        return f"row {at}" if name is None else str(name(at))


class BatchFeed(Feed):
    """Batches of an iterable. On resume, the batches of the steps that are done are skipped.

    Args:
        batches: the iterable; an iterator can be passed over once.
        layout: the inputs of the module.
        peeked: a first batch that was taken from an iterator, and the iterator.

    """

    def __init__(self, batches: Any, layout: Layout, peeked: tuple[Any, Iterator[Any]] | None = None) -> None:
        self._batches, self._layout, self._peeked = batches, layout, peeked
        self._is_iterator = hasattr(batches, "__next__")
        try:
            self.steps_per_pass = None if self._is_iterator else len(batches)
        except TypeError:
            self.steps_per_pass = None
        self._stream: Iterator[Any] | None = None
        self._at = 0

    def epoch(self, epoch: int, skip: int, steps: int | None) -> Iterator[Step]:
        if steps is None:
            yield from self._pass(epoch, skip)
            return
        first = epoch * steps + skip
        if self._stream is None or (not first and not self._is_iterator):
            self._stream, self._at = self._passes(), 0
        for _ in range(first - self._at):
            self._following(first, epoch, steps)
        for _ in range(steps - skip):
            yield self._step(self._following(first, epoch, steps))

    def _pass(self, epoch: int, skip: int) -> Iterator[Step]:
        if self._is_iterator and self._at:
            raise InvalidArgumentError(
                f"the generator has ended: its {self._at} batches were those of epoch {epoch}; pass steps_per_epoch "
                "or an iterable that can be passed over again"
            )
        iterator = self._start()
        self._at = 0
        for item in iterator:
            self._at += 1
            if self._at > skip:
                yield self._step(item)

    def _passes(self) -> Iterator[Any]:
        """Yield the batches of one pass after the other; an iterator has one pass."""
        while True:
            at = self._at
            yield from self._start()
            if self._is_iterator or at == self._at:
                return

    def _following(self, first: int, epoch: int, steps: int) -> Any:
        assert self._stream is not None
        item = next(self._stream, _END)
        if item is _END:
            raise InvalidArgumentError(
                f"the data has ended after {self._at} batches, but epoch {epoch + 1} of {steps} steps needs "
                f"{(epoch + 1) * steps}; reduce steps_per_epoch or epochs"
            )
        self._at += 1
        return item

    def _step(self, item: Any) -> Step:
        try:
            batch = self._layout.converted_batch(item)
            return Step(self._layout.arguments_of(batch, converted=False), len(batch), 0)
        except RowError as error:
            raise error.named(f"row {error.row} of batch {self._at - 1}") from error

    def _start(self) -> Iterator[Any]:
        if self._peeked is None:
            return iter(self._batches)
        from itertools import chain

        (item, rest), self._peeked = self._peeked, None
        return chain((item,), rest)

    def row_name(self, step: Step, row: int) -> str:
        return f"row {row} of batch {self._at - 1}"


_END = object()
