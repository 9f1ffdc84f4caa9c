"""Pickle reader that creates only data, and calls no function named in a pickle.

Supported values are numbers, texts, containers, arrays, array types (dtypes) and dates. The standard library's
``pickle.Unpickler`` reads the pickle, but finds a checked stand-in (:class:`_Maker`) for each class. Therefore no
Python or NumPy function receives unchecked arguments of the file. A dtype is built once, after its whole description
was checked. An array is built together with its elements, after a check of their size, and owns its memory.

Before reading, :class:`_Checker` runs the operations abstractly, on kinds instead of values. It refuses operations that
a kind does not support, and bounds memory and time by the length of the pickle. ``tests/pickle_grammar.py`` generates
pickles from a grammar and damages others. The tests check both bounds, and that each array owns its bytes.
"""

from __future__ import annotations

import collections
import datetime
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ortrain.errors import InvalidArgumentError

__all__ = ["UnknownClassError", "loads"]

# Maximum nesting of tuples and frozensets in a key: hashing and comparing are recursive.
_MAX_KEY_DEPTH = 32
# Python hashes an integer to its remainder modulo this prime. Smaller integers have different hashes.
_HASH_MODULUS = 2**61 - 1
# Maximum number of keys with one number, where a run of consecutive integers counts once. A file can choose such keys
# so that a dict probes many slots.
_MAX_KNOWN_KEYS = 1 << 17
# Maximum number of comparisons between keys to which a file can give the same hash, counted in parts of a key.
_MAX_COMPARISONS = 1 << 27
# Maximum number of hashed key parts for each byte of a pickle.
_WORK_FACTOR = 64
# Maximum nesting of deques and defaultdicts directly in each other: Python frees such a chain recursively.
_MAX_CHAINED = 512
# Memory bound: bytes for each byte of a pickle, plus a constant allowance.
_MEMORY_FACTOR, _MEMORY_ALLOWANCE = 64, 1 << 22
# Maximum nesting of dtypes, and maximum number of dtypes within one dtype.
_MAX_TYPE_DEPTH, _MAX_TYPE_PARTS = 32, 1 << 16
# Largest value of NumPy's index type.
_MAX_SIZE = 2**63 - 1
_MAX_CODE_POINT = 0x10FFFF
# Size of the FRAME operation and its length field.
_FRAME_BYTES = 9
# Maximum length of a text that the checker stores. A longer text cannot be a class name.
_MAX_NAME = 64
_CODE = re.compile(r"b1|[iufc]\d{1,2}|[SUV]\d*|[mM]8")
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")
_LONGEST_STEP = 2**31 - 1


def loads(data: bytes) -> Any:
    """Reads the value of a pickle.

    Args:
        data: a pickle of protocol 3 or 4. Pickles of other protocols are read if they use only the same operations.

    Raises:
        InvalidArgumentError: for invalid bytes, or an unknown class. The error names the class.

    """
    try:
        _Checker(data).check()
        return _Reader(data).value()
    except InvalidArgumentError:
        raise
    except (
        *(ArithmeticError, AttributeError, BufferError, EOFError, LookupError, MemoryError, pickle.UnpicklingError),
        *(RecursionError, TypeError, ValueError),
    ) as error:
        raise InvalidArgumentError(f"user_dict is damaged: {error}") from error


class UnknownClassError(InvalidArgumentError):
    """Error for a class in a pickle that the reader does not support."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the pickle asks for {name}, which is not a number, text, container, array or date; allow_pickle=True "
            "allows all classes, but runs code of the file: use it only for trusted files"
        )
        self.name = name


# Check of the operations before any of them runs.


class _Keys:
    """Cost of hashing and comparing values as keys of a dict or items of a set."""

    __slots__ = ("chosen", "chosen_work", "depth", "known", "last", "work")

    def __init__(self, values: Iterable[_Abstract] = ()) -> None:
        self.work = self.depth = self.known = self.chosen = self.chosen_work = 0
        # A run of consecutive integers counts once.
        self.last: int | None = None
        for value in values:
            if isinstance(value, str):
                self.work += 1
            elif isinstance(value, int):
                self.work += 1
                self.known += self.last is None or value != self.last + 1
                self.last = value
            else:
                self.work += value.work
                self.depth = max(self.depth, value.depth)
                if value.numbers > 1:
                    self.chosen += 1
                    self.chosen_work += value.work
                else:
                    self.known += value.numbers

    def add(self, other: _Keys) -> None:
        """Adds the cost of further values."""
        self.work += other.work
        self.depth = max(self.depth, other.depth)
        self.known += other.known
        self.chosen += other.chosen
        self.chosen_work += other.chosen_work


class _Kind:
    """Abstract value on the stack, with only the properties that the checker needs.

    Args:
        kind: the kind, which determines the allowed operations.
        numbers: how many numbers the value contains, at most 2. The hash of a text is secret in each process, but a
            file knows the hash of a number. With two numbers, a file can construct many keys with the same hash.
        work: the number of parts that hashing visits.
        depth: the nesting of tuples.
        keys: the items of a list or the keys of a dict, if the container has any.
        only: the part of a tuple with one part, if this part is a list or a dict.

    """

    __slots__ = ("depth", "keys", "kind", "name", "numbers", "only", "work")

    def __init__(self, kind: str, numbers: int = 2, work: int = 1, depth: int = 0, name: str = "") -> None:
        self.kind, self.numbers, self.work, self.depth, self.name = kind, numbers, work, depth, name
        self.keys: _Keys | None = None
        self.only: _Abstract | None = None


# Small integers and short texts represent themselves.
_Abstract: TypeAlias = _Kind | int | str
_SECRET, _FLOAT, _CHOSEN, _BYTES = _Kind("value", 0), _Kind("value", 1), _Kind("value"), _Kind("bytearray")
_SCALAR_WORK = 4

_PUSHED = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES
    SHORT_BINBYTES BINBYTES8 BYTEARRAY8 NONE NEWTRUE NEWFALSE
    """.split()
)
_EMPTY = {"EMPTY_LIST": ("list", 72), "EMPTY_DICT": ("dict", 80), "EMPTY_SET": ("set", 232)}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
# Estimated bytes of objects, memo and stack entries, items, and containers with items.
_PUSHED_BYTES, _TUPLE_BYTES, _SET_BYTES, _MEMO_BYTES, _STACK_BYTES = 40, 56, 232, 24, 8
_LIST_ITEM_BYTES, _DICT_ITEM_BYTES, _SET_ITEM_BYTES = 16, 64, 120
_FILLED_BYTES = {"list": 40, "deque": 0, "dict": 100, "defaultdict": 100, "set": 0}
# Estimated bytes to visit a container again when stand-ins are replaced.
_REPLACED_BYTES = 120


class _Checker:
    """Abstract interpreter of a pickle's operations, with kinds instead of values."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[_Abstract | None] = []  # None marks a MARK.
        self.memo: list[_Abstract | None] = []
        self.puts = 0
        self.memory = _MEMORY_ALLOWANCE + _MEMORY_FACTOR * len(data)
        self.work = _WORK_FACTOR * len(data)
        self.known, self.chosen, self.comparisons = _MAX_KNOWN_KEYS, 0, _MAX_COMPARISONS
        self.chained = _MAX_CHAINED
        self.filled = 0
        self.has_classes = False

    def check(self) -> None:
        """Checks that all operations are known and have operands of the right kinds. Bounds memory and time.

        Raises:
            UnknownClassError: for an unknown class.
            ValueError: for operations that are unknown, damaged or too expensive.

        """
        # Imported late, because only a checkpoint with user values needs it.
        import pickletools

        frame_end = 0
        for operation, argument, at in pickletools.genops(self.data):
            name = operation.name
            if name == "STOP":
                break
            if name == "FRAME":
                begin = int(at or 0)
                # The unpickler reads overlapping frames more than once.
                if begin < frame_end:
                    raise ValueError("a frame overlaps another")
                frame_end = begin + _FRAME_BYTES + _size(argument)
                if frame_end > len(self.data):
                    raise ValueError("a frame is longer than the pickle")
            elif name != "PROTO":
                self.follow(name, argument)
            if self.memory < self.has_classes * self.filled * _REPLACED_BYTES:
                raise ValueError("the values need far more memory than the pickle has bytes")
        if len(self.stack) != 1 or self.stack[0] is None:
            raise ValueError("the pickle must have exactly one value")

    def follow(self, name: str, argument: Any) -> None:
        """Runs one operation."""
        if name in _PUSHED:
            self.push(_pushed(argument), _PUSHED_BYTES)
        elif name in _PUTS:
            self.put(name, argument)
        elif name in _GETS:
            found = self.memo[argument if name != "GET" else _size(argument)]
            if found is None:
                raise ValueError("an index of the memo has no value")
            self.push(found, 0)
        elif name in _EMPTY:
            kind, size = _EMPTY[name]
            self.push(_Kind(kind), size)
        elif name in _TUPLES:
            self.make_tuple([self.pop() for _ in range(_TUPLES[name])][::-1])
        elif name in ("APPEND", "SETITEM"):
            self.fill(name, [self.pop() for _ in range(1 if name == "APPEND" else 2)][::-1])
        elif name in _MARKED:
            _MARKED[name](self, self.marked())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            names = argument.split(" ", 1) if name == "GLOBAL" else [self.pop(), self.pop()][::-1]
            if not all(isinstance(part, str) for part in names):
                raise ValueError("the name of a class is not a text")
            self.push(_class(*names), _PUSHED_BYTES)
            self.has_classes = True
        elif name == "INST":
            raise UnknownClassError(str(argument).replace(" ", ".", 1))
        elif name == "MARK":
            self.push(None, 0)
        elif name == "POP":
            self.stack.pop()
        elif name == "REDUCE":
            self.call()
        elif name == "BUILD":
            self.pop()
            if _kind(self.top()) not in ("type", "array"):
                raise TypeError(f"a {_kind(self.top())} cannot have a state")
        else:
            raise ValueError(f"the operation {name} is not supported")

    def push(self, value: _Abstract | None, size: int) -> None:
        """Pushes a value of ``size`` bytes."""
        self.memory -= size + _STACK_BYTES
        self.stack.append(value)

    def pop(self) -> _Abstract:
        """Removes and returns the top of the stack."""
        value = self.stack.pop()
        if value is None:
            raise ValueError("a value is missing")
        return value

    def top(self) -> _Abstract:
        """Returns the top of the stack without removing it."""
        value = self.stack[-1]
        if value is None:
            raise ValueError("a value is missing")
        return value

    def marked(self) -> list[_Abstract]:
        """Removes and returns the values above the last mark."""
        values: list[_Abstract] = []
        while (value := self.stack.pop()) is not None:
            values.append(value)
        values.reverse()
        return values

    def put(self, name: str, argument: Any) -> None:
        """Stores the top of the stack in the memo."""
        self.memory -= _MEMO_BYTES
        at = len(self.memo) if name == "MEMOIZE" else _size(argument)
        # Python's memo is an array, so its indices must be dense. Some writers start at 1.
        if at > len(self.memo) + 1 or (name == "MEMOIZE" and None in self.memo[:2]):
            raise ValueError("an index of the memo is out of range")
        if at >= len(self.memo):
            if at > 1 and at > len(self.memo):
                raise ValueError("an index of the memo is out of range")
            self.memo += [None] * (at + 1 - len(self.memo))
        self.memo[at] = self.top()

    def make_tuple(self, parts: list[_Abstract]) -> None:
        """Pushes a tuple."""
        self.filled += 1
        value = _joined("tuple", parts)
        if len(parts) == 1 and _kind(parts[0]) in ("list", "dict"):
            value.only = parts[0]
        self.push(value, (_TUPLE_BYTES + 8 * len(parts)) if parts else 0)

    def take_keys(self, keys: _Keys) -> None:
        """Subtracts the cost of hashing and comparing these keys from the limits."""
        self.work -= keys.work
        self.known -= keys.known
        self.chosen += keys.chosen
        self.comparisons -= keys.chosen_work * self.chosen
        if keys.depth > _MAX_KEY_DEPTH:
            raise ValueError("a key has too many nested tuples")
        if self.work < 0:
            raise ValueError("the keys have too many parts")
        if self.known < 0 or self.comparisons < 0:
            raise ValueError("too many keys are numbers that are not consecutive, or tuples of numbers")

    def fill(self, name: str, values: list[_Abstract]) -> None:
        """Adds values to the container at the top of the stack."""
        container = self.top()
        kind = _kind(container)
        if kind not in _FILLED[name] or not isinstance(container, _Kind):
            raise TypeError(f"the operation {name} is not supported for a {kind}")
        is_list = name in ("APPEND", "APPENDS")
        by_pairs = name in ("SETITEM", "SETITEMS")
        if by_pairs and len(values) % 2:
            raise ValueError("a key has no value")
        keys = _Keys(values[::2] if by_pairs else values)
        if not is_list:
            self.take_keys(keys)
        if container.keys is None:
            container.keys = _Keys()
        container.keys.add(keys)
        if kind in _CHAINED:
            self.chained -= sum(_kind(value) in _CHAINED for value in values)
            if self.chained < 0:
                raise ValueError("too many nested deques and defaultdicts")
        each = _LIST_ITEM_BYTES if is_list else _DICT_ITEM_BYTES // 2 if by_pairs else _SET_ITEM_BYTES
        self.memory -= each * len(values) + _FILLED_BYTES[kind]
        self.filled += 1

    def make(self, kind: str, name: str, values: list[_Abstract]) -> None:
        """Pushes a container with values."""
        self.push(_Kind(kind), 80)
        self.fill(name, values)

    def make_frozenset(self, values: list[_Abstract]) -> None:
        """Pushes a frozenset with values."""
        self.take_keys(_Keys(values))
        value = _joined("frozenset", values)
        value.numbers = 2
        self.push(value, _SET_BYTES + _SET_ITEM_BYTES * len(values))

    def call(self) -> None:
        """Pushes the result of calling a class with a tuple of arguments."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Kind) or called.kind != "class" or called.name not in _RESULTS:
            raise TypeError("the called object is not a supported class")
        if not isinstance(arguments, _Kind) or arguments.kind != "tuple":
            raise TypeError(f"the arguments of {called.name} are not a tuple")
        kind, size = _RESULTS[called.name]
        # The call hashes the items of a list or a dict again.
        again = arguments.only.keys if kind in _HASHED and isinstance(arguments.only, _Kind) else None
        work = _SCALAR_WORK if kind == "scalar" else 1 + arguments.work
        result = _Kind(kind, 2, work, 1 + arguments.depth)
        if again is not None:
            self.take_keys(again)
            result.work += again.work
            result.keys = _Keys()
            result.keys.add(again)
        self.push(result, size)


def _pushed(argument: Any) -> _Abstract:
    """Returns the abstract value of an operation's argument."""
    if isinstance(argument, str):
        return argument if len(argument) <= _MAX_NAME else _SECRET
    if isinstance(argument, bool) or argument is None or isinstance(argument, bytes):
        return _SECRET
    if isinstance(argument, int):
        if abs(argument) < _HASH_MODULUS:
            return argument
        return _Kind("value", 2, 1 + argument.bit_length() // 64)
    if isinstance(argument, float):
        return _CHOSEN if math.isnan(argument) else _FLOAT
    return _BYTES


def _class(module: Any, name: Any) -> _Kind:
    """Returns the abstract value of a class."""
    full = f"{module}.{name}"
    if full not in _NAMED:
        raise UnknownClassError(full)
    return _Kind("class", name=full)


def _kind(value: _Abstract) -> str:
    return value.kind if isinstance(value, _Kind) else "number" if isinstance(value, int) else "text"


def _joined(kind: str, parts: list[_Abstract]) -> _Kind:
    """Returns the abstract value of a tuple or a frozenset."""
    work, depth, numbers = 1, 0, 0
    for part in parts:
        if isinstance(part, _Kind):
            work, depth, numbers = work + part.work, max(depth, part.depth), numbers + part.numbers
        else:
            work, numbers = work + 1, numbers + isinstance(part, int)
    return _Kind(kind, min(numbers, 2), work, depth + 1)


_HASHED = ("set", "frozenset", "dict")
_CHAINED = ("deque", "defaultdict")
_FILLED = {
    **dict.fromkeys(("APPEND", "APPENDS"), ("list", "deque")),
    **dict.fromkeys(("SETITEM", "SETITEMS"), ("dict", "defaultdict")),
    "ADDITEMS": ("set",),
}
_MARKED: dict[str, Callable[[_Checker, list[_Abstract]], None]] = {
    "POP_MARK": lambda checker, values: None,
    "TUPLE": lambda checker, values: checker.make_tuple(values),
    "LIST": lambda checker, values: checker.make("list", "APPENDS", values),
    "DICT": lambda checker, values: checker.make("dict", "SETITEMS", values),
    "FROZENSET": lambda checker, values: checker.make_frozenset(values),
    **{
        name: lambda checker, values, name=name: checker.fill(name, values)  # type: ignore[misc]
        for name in ("APPENDS", "SETITEMS", "ADDITEMS")
    },
}


# Stand-ins for classes.


class _Standin:
    """Base class of stand-ins. A pickle cannot set their attributes."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot have new attributes")

    def __setstate__(self, state: Any) -> None:
        raise TypeError(f"a {type(self).__name__} cannot have a state")


class _Maker(_Standin):
    """Stand-in for a class: the class itself, and a function that checks arguments and creates an instance."""

    __slots__ = ("kind", "make")
    kind: Any
    make: Callable[..., Any]

    def __init__(self, kind: Any, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


class _Type(_Standin):
    """Stand-in for a dtype: its code, an optional state, and the dtype, which is built once."""

    __slots__ = ("cached_dtype", "code", "parts", "state")
    code: str
    state: tuple[Any, ...] | None
    cached_dtype: np.dtype[Any] | None
    parts: int

    def __init__(self, code: str) -> None:
        for name, value in (("code", code), ("state", None), ("cached_dtype", None), ("parts", 1)):
            object.__setattr__(self, name, value)

    def __setstate__(self, state: Any) -> None:
        if self.state is not None or self.cached_dtype is not None or not isinstance(state, tuple):
            raise TypeError("a dtype has two states")
        object.__setattr__(self, "state", state)

    def dtype(self, depth: int = 0) -> np.dtype[Any]:
        """Returns the dtype after a check of the whole description."""
        if self.cached_dtype is not None:
            return self.cached_dtype
        if depth > _MAX_TYPE_DEPTH:
            raise ValueError("too many nested dtypes")
        dtype, code = self._dtype(depth), np.dtype(self.code)
        if dtype.hasobject or dtype.itemsize != code.itemsize:
            raise ValueError(
                f"a dtype has {code.itemsize} bytes by its code, but {dtype.itemsize} bytes by its description"
            )
        object.__setattr__(self, "cached_dtype", dtype)
        return dtype

    def _dtype(self, depth: int) -> np.dtype[Any]:
        plain: np.dtype[Any] = np.dtype(self.code)
        if self.state is None:
            return plain
        _, order, base, names, fields, *rest = self.state
        if order not in ("<", ">", "|", "="):
            raise ValueError("a byte order is unknown")
        if base is not None:
            inner, shape = base
            subarray: np.dtype[Any] = np.dtype((self._inner(inner, depth), _sizes(shape)))
            return subarray
        if names is not None:
            if type(names) is not tuple or not all(isinstance(name, str) for name in names):
                raise TypeError("the field names of a dtype are not texts")
            parts = [fields[name] for name in names]
            formats = [self._inner(part[0], depth) for part in parts]
            offsets = [_size(part[1]) for part in parts]
            size = _size(rest[0])
            if any(at + kind.itemsize > size for at, kind in zip(offsets, formats, strict=True)):
                raise ValueError("a field is outside of its dtype")
            structured: np.dtype[Any] = np.dtype(
                {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size}
            )
            return structured
        if plain.kind in "mM":
            return np.dtype(f"{order}{plain.kind}8{_unit(rest[3][1])}")
        # The state of a text or bytes dtype only repeats the length.
        ordered: np.dtype[Any] = plain.newbyteorder(order)
        return ordered

    def _inner(self, kind: Any, depth: int) -> np.dtype[Any]:
        """Returns the dtype of a field or of the elements of a subarray."""
        dtype = _dtype_of(kind, depth)
        object.__setattr__(self, "parts", self.parts + kind.parts)
        if self.parts > _MAX_TYPE_PARTS:
            raise ValueError("a dtype has too many parts")
        return dtype


class _Array(_Standin):
    """Stand-in for an array, which is built from its state, or for a structured scalar."""

    __slots__ = ("array", "reader")
    reader: _Reader
    array: Any

    def __init__(self, reader: _Reader, array: Any = None) -> None:
        object.__setattr__(self, "reader", reader)
        object.__setattr__(self, "array", array)

    def __setstate__(self, state: Any) -> None:
        if self.array is not None:
            raise TypeError("an array has two states")
        _, shape, kind, by_columns, data = state
        dtype, sizes = _dtype_of(kind), _sizes(shape)
        if not isinstance(data, bytes) or not dtype.itemsize or dtype.subdtype is not None:
            raise TypeError("the elements of an array are invalid")
        if math.prod(sizes) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {sizes} has {len(data)} bytes")
        self.reader.copy(len(data))
        array: npt.NDArray[Any] = np.empty(sizes, dtype, order="F" if by_columns else "C")
        if data:
            # View of the array's bytes in memory order.
            elements = (array.T if by_columns else array).reshape(-1)
            elements.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        if dtype.names is None and not dtype.isnative:
            # Converted to native byte order, as NumPy does on reading.
            array = array.astype(dtype.newbyteorder("="))
        _check_elements(array)
        object.__setattr__(self, "array", array)


class _Reader(pickle.Unpickler):
    """Subclass of the standard library's reader that finds only stand-ins."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # Number of bytes and items that may still be copied.
        self.space = len(data)
        self.makers: dict[str, _Maker] = {}

    def value(self) -> Any:
        """Reads the value of the pickle and replaces its stand-ins."""
        value = self.load()
        return _resolved(value) if self.makers else value

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _NAMED:
            raise UnknownClassError(full)
        if full not in self.makers:
            kind, make = _NAMED[full]
            self.makers[full] = _Maker(kind, lambda *arguments: make(self, *arguments))
        return self.makers[full]

    def copy(self, count: int) -> None:
        """Subtracts from the budget of copied bytes and items, which is the length of the pickle."""
        self.space -= count
        if self.space < 0:
            raise ValueError("the values need more memory than the pickle has bytes")


def _resolved(root: Any) -> Any:
    """Returns the value with arrays, dtypes and classes instead of stand-ins.

    All containers except tuples change in place.
    """
    visited: set[int] = set()
    waiting, found = [root], []
    while waiting:
        value = waiting.pop()
        if not isinstance(value, tuple | list | dict | collections.deque) or not value or id(value) in visited:
            continue
        visited.add(id(value))
        found.append(value)
        waiting.extend(value.values() if isinstance(value, dict) else value)
    # New tuples by the id of the old tuple, inner tuples first. Tuples cannot form a cycle without another container.
    tuples: dict[int, tuple[Any, ...] | None] = {}
    for value in found:
        branch = [value] if isinstance(value, tuple) else []
        while branch:
            last = branch[-1]
            if tuples.get(id(last)) is not None:
                branch.pop()
            elif id(last) not in tuples:
                tuples[id(last)] = None
                branch.extend(part for part in last if isinstance(part, tuple) and part and not tuples.get(id(part)))
            else:
                branch.pop()
                rebuilt = tuple(_final(part, tuples) for part in last)
                is_new = any(new is not part for new, part in zip(rebuilt, last, strict=True))
                tuples[id(last)] = rebuilt if is_new else last
    for value in found:
        if isinstance(value, dict):
            for key, part in value.items():
                value[key] = _final(part, tuples)
        elif not isinstance(value, tuple):
            for at, part in enumerate(value):
                value[at] = _final(part, tuples)
    return _final(root, tuples)


def _final(part: Any, tuples: dict[int, tuple[Any, ...] | None]) -> Any:
    """Returns a part of a value, with its stand-in replaced."""
    if isinstance(part, _Array):
        if part.array is None:
            raise TypeError("the elements of an array are missing")
        return part.array
    if isinstance(part, _Type):
        return part.dtype()
    if isinstance(part, _Maker):
        if part.kind not in _FACTORIES:
            raise TypeError("a class is not a supported value")
        return part.kind
    return tuples.get(id(part), part) if isinstance(part, tuple) else part


def _dtype_of(kind: Any, depth: int = 0) -> np.dtype[Any]:
    """Returns the dtype that a stand-in describes."""
    if not isinstance(kind, _Type):
        raise TypeError("a dtype is missing")
    return kind.dtype(depth + 1)


def _check_elements(array: Any) -> None:
    """Checks that elements are valid values of their dtype, which NumPy does not check."""
    if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a boolean is neither 0 nor 1")
    if array.dtype.kind == "U" and array.size and array.dtype.itemsize:
        points = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        if points.max() > _MAX_CODE_POINT:
            raise ValueError("a text has an invalid character")


def _size(size: Any) -> int:
    if type(size) is not int or not 0 <= size <= _MAX_SIZE:
        raise TypeError("a size is not an integer from 0 to 2**63 - 1")
    return size


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple):
        raise TypeError("a shape is not a tuple")
    return tuple(map(_size, shape))


def _unit(unit: Any) -> str:
    """Returns the unit of a date or duration in NumPy's notation."""
    name, count = unit[0].decode() if isinstance(unit[0], bytes) else unit[0], unit[1]
    if name == "generic":
        return ""
    if not _UNIT.fullmatch(name) or type(count) is not int or not 1 <= count <= _LONGEST_STEP:
        raise ValueError("the unit of a date is unknown")
    return f"[{count}{name}]"


# Functions that create instances in place of the classes that a pickle calls.


def _none(reader: _Reader, *arguments: Any) -> NoReturn:
    raise TypeError("the called object is not a supported class")


def _complex(reader: _Reader, real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _set(reader: _Reader, items: Any = ()) -> set[Any]:
    # The checker has already counted the items of a list.
    if items != () and type(items) is not list:
        raise TypeError("the items of a set are not a list")
    reader.copy(len(items))
    return set(items)


def _frozenset(reader: _Reader, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(reader, items))


def _bytearray(reader: _Reader, data: bytes = b"") -> bytearray:
    if not isinstance(data, bytes):
        raise TypeError("the argument of a bytearray is not bytes")
    reader.copy(len(data))
    return bytearray(data)


def _ordered(reader: _Reader) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict()


def _defaultdict(reader: _Reader, factory: Any = None) -> collections.defaultdict[Any, Any]:
    kind = factory.kind if isinstance(factory, _Maker) else factory
    if not (kind is None or any(kind is one for one in _FACTORIES)):
        raise TypeError("the factory of a defaultdict is not a supported class")
    return collections.defaultdict(kind)


def _deque(reader: _Reader, items: Any = (), longest: Any = None) -> collections.deque[Any]:
    if items != () or not (longest is None or isinstance(longest, int)):
        raise TypeError("a deque has wrong arguments")
    return collections.deque(maxlen=longest)


def _counter(reader: _Reader, counts: dict[Any, Any]) -> collections.Counter[Any]:
    if type(counts) is not dict:
        raise TypeError("the argument of a Counter is not a dict")
    reader.copy(len(counts))
    return collections.Counter(counts)


def _date(kind: Any) -> Callable[..., Any]:
    """Returns a function that creates instances of a date class."""

    def make(reader: _Reader, *arguments: Any) -> Any:
        known = (int, float, bytes, str, datetime.timedelta, datetime.timezone)
        if not all(isinstance(argument, known) for argument in arguments):
            raise TypeError(f"a {kind.__name__} has wrong arguments")
        instance = kind(*arguments)
        # The constructor checks the bytes of a date only in part. ``replace`` checks all of them.
        return instance.replace() if hasattr(instance, "replace") else instance

    return make


def _dtype(reader: _Reader, code: str, align: bool = False, copied: bool = False) -> _Type:
    if code in ("O", "O8"):
        raise UnknownClassError("an array of objects")
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise UnknownClassError(f"the dtype {code!r}")
    return _Type(code)


def _reconstruct(reader: _Reader, kind: Any, shape: Any, code: Any) -> _Array:
    if not isinstance(kind, _Maker) or kind.kind is not np.ndarray or shape != (0,):
        raise TypeError("an array has wrong arguments")
    return _Array(reader)


def _scalar(reader: _Reader, kind: Any, data: bytes) -> Any:
    dtype = _dtype_of(kind)
    if not isinstance(data, bytes) or len(data) != dtype.itemsize or dtype.subdtype is not None:
        raise ValueError("the bytes of a number do not match its dtype")
    reader.copy(len(data))
    if not data:
        return np.zeros((), dtype)[()]
    array = np.frombuffer(data, dtype)
    _check_elements(array)
    scalar = array[0].copy()
    # Hashing a structured scalar is slow, and its fields are mutable.
    return _Array(reader, scalar) if dtype.kind == "V" else scalar


_FACTORIES = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_MAKERS: dict[Any, Callable[..., Any]] = {
    complex: _complex,
    set: _set,
    frozenset: _frozenset,
    bytearray: _bytearray,
    collections.OrderedDict: _ordered,
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    collections.Counter: _counter,
    **{
        kind: _date(kind)
        for kind in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
    },
}
_NAMED: dict[str, tuple[Any, Callable[..., Any]]] = {
    **{f"builtins.{kind.__name__}": (kind, _MAKERS.get(kind, _none)) for kind in _FACTORIES},
    **{
        f"{kind.__module__}.{kind.__qualname__}": (kind, make)
        for kind, make in _MAKERS.items()
        if kind not in _FACTORIES
    },
    "numpy.dtype": (np.dtype, _dtype),
    "numpy.ndarray": (np.ndarray, _none),
    **{f"numpy.{core}.multiarray._reconstruct": (None, _reconstruct) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": (None, _scalar) for core in ("core", "_core")},
}
# Kind and bytes of the result of each call. A deque allocates 64 items from the start.
_RESULTS: dict[str, tuple[str, int]] = {
    "builtins.complex": ("value", 32),
    "builtins.set": ("set", _SET_BYTES),
    "builtins.frozenset": ("frozenset", _SET_BYTES),
    "builtins.bytearray": ("bytearray", 80),
    "collections.OrderedDict": ("dict", 400),
    "collections.defaultdict": ("defaultdict", 100),
    "collections.deque": ("deque", 780),
    "collections.Counter": ("dict", 400),
    **{
        f"datetime.{kind.__name__}": ("value", 80)
        for kind in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
    },
    "numpy.dtype": ("type", 300),
    **{f"numpy.{core}.multiarray._reconstruct": ("array", 300) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": ("scalar", 120) for core in ("core", "_core")},
}
