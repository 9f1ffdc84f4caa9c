"""An unpickler that makes data, and calls nothing that a pickle names.

Known are numbers, texts, containers, arrays, types of arrays, and dates. The operations of a pickle are done here, one
by one: a pickle can name what it likes, and nothing of that is imported. The length of a pickle bounds the memory and
the time that its values take.
"""

from __future__ import annotations

import collections
import datetime
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain.errors import InvalidArgumentError

__all__ = ["UnknownClassError", "loads"]

# Tuples and frozen sets within each other that a key may be.
_DEEPEST_KEY = 32
_CODE = re.compile(r"b1|[iufc]\d{1,2}|[SUV]\d*|[mM]8")
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")
_MARK = object()


def loads(data: bytes) -> Any:
    """The value of a pickle.

    Args:
        data: a pickle of protocol 3 or 4. Others are read if there is nothing special in them.

    Raises:
        InvalidArgumentError: for what is no pickle, and for a class that is not known; the error names the class.

    """
    try:
        return _Machine(len(data)).run(data)
    except InvalidArgumentError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the values of the user are damaged: {error}") from error


class UnknownClassError(InvalidArgumentError):
    """A class that a pickle names, and that is not known."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the pickle asks for {name}, which is no class of numbers, texts, containers, arrays or dates; "
            "allow_pickle=True allows all classes, and runs what the file says: only for files of people you trust"
        )
        self.name = name


class _Machine:
    """The stack of a pickle and its memo."""

    def __init__(self, length: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        # Bytes and items that may be copied, and items that may be looked at.
        self.space = length
        self.work = 64 * length

    def run(self, data: bytes) -> Any:
        """The value that the operations make."""
        # Only a checkpoint with values of the user needs it.
        import pickletools

        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in _PUSHED:
                self.stack.append(argument)
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name == "STOP":
                break
            elif name == "INST":
                raise UnknownClassError(str(argument).replace(" ", ".", 1))
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"they need the operation {name}")
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise ValueError("the pickle makes not one value")
        return self.stack[0]

    def pop(self) -> Any:
        """The value on top."""
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def top(self) -> Any:
        """The value on top, which stays."""
        if self.stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """The values above the last mark."""
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def copy(self, count: int) -> None:
        """Take some of the space that a pickle of this length may fill."""
        self.space -= count
        if self.space < 0:
            raise ValueError("they would take more memory than their pickle has bytes")

    def look(self, count: int) -> None:
        """Take some of the time that a pickle of this length may need."""
        self.work -= count
        if self.work < 0:
            raise ValueError("their keys have too many parts")

    def key(self, key: Any) -> Any:
        """A key of a dict or an item of a set. To hash one may take long, or end the process."""
        waiting = [(key, 0)]
        while waiting:
            item, depth = waiting.pop()
            if depth > _DEEPEST_KEY:
                raise ValueError("a key has too many tuples, one in the other")
            self.look(1)
            if isinstance(item, tuple | frozenset):
                self.look(len(item))
                waiting += [(part, depth + 1) for part in item]
            elif isinstance(item, int):
                self.look(item.bit_length() // 8)
        return key

    # Containers.

    def append(self, values: list[Any]) -> None:
        """Put values at the end of a list or a deque."""
        place = self.top()
        if not isinstance(place, list | collections.deque):
            raise TypeError(f"something is appended to a {type(place).__name__}")
        place.extend(_inner(value, place) for value in values)

    def set_items(self, values: list[Any]) -> None:
        """Put keys and values, by turns, into a dict."""
        place = self.top()
        if not isinstance(place, dict) or len(values) % 2:
            raise TypeError(f"items are put into a {type(place).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            place[self.key(key)] = _inner(value, place)

    def add(self, values: list[Any]) -> None:
        """Put values into a set."""
        place = self.top()
        if not isinstance(place, set):
            raise TypeError(f"items are added to a {type(place).__name__}")
        place.update(map(self.key, values))

    def as_dict(self, values: list[Any]) -> None:
        """Push a dict of keys and values, by turns."""
        self.stack.append({})
        self.set_items(values)

    def as_tuple(self, count: int) -> None:
        """Push a tuple of the last values."""
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    # Objects.

    def find(self, module: Any, name: Any) -> None:
        """Push what a pickle names."""
        full = f"{module}.{name}"
        if full not in _NAMED:
            raise UnknownClassError(full)
        self.stack.append(_NAMED[full])

    def find_by_stack(self) -> None:
        """Push what a pickle names by two texts."""
        name, module = self.pop(), self.pop()
        self.find(module, name)

    def call(self) -> None:
        """Push what a known class makes of a tuple of arguments."""
        arguments, called = self.pop(), self.pop()
        # Other values may have no hash.
        maker = _MAKERS.get(called) if callable(called) else None
        if maker is None or not isinstance(arguments, tuple):
            raise TypeError("something is called that makes no value")
        self.stack.append(maker(self, *arguments))

    def build(self) -> None:
        """Give the value on top its state."""
        state, value = self.pop(), self.top()
        if isinstance(value, np.dtype):
            self.build_dtype(value, *state)
        elif isinstance(value, np.ndarray):
            self.build_array(value, *state)
        else:
            raise TypeError(f"a {type(value).__name__} is given a state")

    def build_array(self, array: Any, version: Any, shape: Any, dtype: Any, by_columns: Any, data: Any) -> None:
        """Give an array its shape and its elements."""
        if array.size or not isinstance(dtype, np.dtype) or not all(isinstance(size, int) for size in shape):
            raise TypeError("an array has a wrong state")
        _without_objects(dtype)
        if not isinstance(data, bytes) or min(shape, default=0) < 0 or not dtype.itemsize:
            raise TypeError("an array has wrong elements")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} has {len(data)} bytes")
        self.copy(len(data))
        # The array goes on in the memory of these bytes, which nothing else has.
        array.__setstate__((1, shape, dtype, bool(by_columns), bytes(bytearray(data))))

    def build_dtype(self, dtype: Any, version: Any, order: Any, base: Any, names: Any, fields: Any, *rest: Any) -> None:
        """Give a type of arrays the order of its bytes, its unit, its fields."""
        if base is not None:
            self.look(self.parts(base[0]))
            made: np.dtype[Any] = np.dtype((_without_objects(base[0]), base[1]))
        elif names is not None:
            own = [fields[name][:2] for name in names]
            self.look(sum(self.parts(of) for of, _ in own))
            made = np.dtype(
                {
                    "names": list(names),
                    "formats": [_without_objects(of) for of, _ in own],
                    "offsets": [offset for _, offset in own],
                    "itemsize": rest[0],
                }
            )
        elif dtype.kind in "mM":
            made = np.dtype(f"{_order(order)}{dtype.kind}8{_unit(rest[3][1])}")
        else:
            made = dtype.newbyteorder(_order(order))
        # The state comes from a type that NumPy made: a state of the pickle could lie about objects.
        dtype.__setstate__(made.__reduce__()[2])
        if dtype != made:
            raise ValueError("a type of arrays has a wrong state")

    def parts(self, dtype: Any) -> int:
        """The number of types within a type."""
        self.look(1)
        if not isinstance(dtype, np.dtype):
            raise TypeError("a field has no type")
        if dtype.subdtype is not None:
            return 1 + self.parts(dtype.subdtype[0])
        return 1 + sum(self.parts(field[0]) for field in (dtype.fields or {}).values())


def _inner(value: Any, place: Any) -> Any:
    """A value that is put into a container. A long chain of some kinds ends the process when Python frees the chain."""
    kinds = (collections.deque, collections.defaultdict)
    if isinstance(place, kinds) and isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} lies directly in a {type(place).__name__}")
    return value


def _without_objects(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A type of arrays whose elements are no objects."""
    if not isinstance(dtype, np.dtype):
        raise TypeError("a type of arrays is missing")
    if dtype.hasobject:
        raise UnknownClassError("an array of objects")
    return dtype


def _order(order: Any) -> str:
    if order not in ("<", ">", "|", "="):
        raise ValueError("an order of bytes is unknown")
    return str(order)


def _unit(unit: Any) -> str:
    """The unit of a date or a duration as NumPy writes it."""
    name, count = unit[0].decode() if isinstance(unit[0], bytes) else unit[0], unit[1]
    if name == "generic":
        return ""
    if not _UNIT.fullmatch(name) or not isinstance(count, int):
        raise ValueError("a unit of dates is unknown")
    return f"[{count}{name}]"


# Functions that make values, in the place of classes that a pickle calls.


def _complex(machine: _Machine, real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _set(machine: _Machine, items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError("a set is made of no list")
    machine.copy(len(items))
    return set(map(machine.key, items))


def _frozenset(machine: _Machine, items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(machine, items))


def _bytearray(machine: _Machine, data: bytes = b"") -> bytearray:
    if not isinstance(data, bytes):
        raise TypeError("a bytearray is made of no bytes")
    machine.copy(len(data))
    return bytearray(data)


def _ordered(machine: _Machine) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict()


def _defaultdict(machine: _Machine, factory: Any = None) -> collections.defaultdict[Any, Any]:
    if not (factory is None or any(factory is kind for kind in _FACTORIES)):
        raise TypeError("a defaultdict makes something unknown")
    return collections.defaultdict(factory)


def _deque(machine: _Machine, items: Any = (), longest: Any = None) -> collections.deque[Any]:
    if items != () or not (longest is None or isinstance(longest, int)):
        raise TypeError("a deque has wrong arguments")
    return collections.deque(maxlen=longest)


def _counter(machine: _Machine, counts: dict[Any, Any]) -> collections.Counter[Any]:
    if not isinstance(counts, dict):
        raise TypeError("a Counter is made of no dict")
    machine.copy(len(counts))
    return collections.Counter(counts)


def _date(kind: Any) -> Callable[..., Any]:
    """A function that makes dates of a class."""

    def make(machine: _Machine, *arguments: Any) -> Any:
        known = (int, float, bytes, str, datetime.timedelta, datetime.timezone)
        if not all(isinstance(argument, known) for argument in arguments):
            raise TypeError(f"a {kind.__name__} has wrong arguments")
        made = kind(*arguments)
        # A date that is made of bytes is checked in part only, and whole when it is copied.
        return made.replace() if hasattr(made, "replace") else made

    return make


def _dtype(machine: _Machine, code: str, align: bool = False, copied: bool = False) -> np.dtype[Any]:
    if code in ("O", "O8"):
        raise UnknownClassError("an array of objects")
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise UnknownClassError(f"the type {code!r} of arrays")
    # One of its own, since its state is still to come.
    return np.dtype(code, copy=True)


def _reconstruct(machine: _Machine, kind: Any, shape: Any, code: Any) -> npt.NDArray[Any]:
    if kind is not np.ndarray or shape != (0,):
        raise TypeError("an array is made of something else")
    return np.empty(0, np.int8)


def _scalar(machine: _Machine, dtype: np.dtype[Any], data: bytes) -> Any:
    _without_objects(dtype)
    if not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ValueError("a number has wrong bytes")
    machine.copy(len(data))
    return np.frombuffer(data, dtype)[0].copy() if data else np.zeros((), dtype)[()]


_FACTORIES = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_NAMED: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in _FACTORIES},
    **{
        f"collections.{kind.__name__}": kind
        for kind in (collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
    },
    **{
        f"datetime.{kind.__name__}": kind
        for kind in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
    },
    "numpy.dtype": np.dtype,
    "numpy.ndarray": np.ndarray,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
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
    np.dtype: _dtype,
    _reconstruct: _reconstruct,
    _scalar: _scalar,
}

# Operations that push their argument.
_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_OPERATIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append(set()),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.marked(),
    "LIST": lambda machine, _: machine.stack.append(machine.marked()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.as_tuple(1),
    "TUPLE2": lambda machine, _: machine.as_tuple(2),
    "TUPLE3": lambda machine, _: machine.as_tuple(3),
    "DICT": lambda machine, _: machine.as_dict(machine.marked()),
    "FROZENSET": lambda machine, _: machine.stack.append(frozenset(map(machine.key, machine.marked()))),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.marked()),
    "ADDITEMS": lambda machine, _: machine.add(machine.marked()),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.top()}),
    "GLOBAL": lambda machine, names: machine.find(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.find_by_stack(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, at: machine.memo.update({at: machine.top()})),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, at: machine.stack.append(machine.memo[at])),
}
