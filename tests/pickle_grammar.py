"""Pickles for the reader of legacy checkpoints: harmful pickles, random ones from a grammar, and damaged ones.

Run as a script, it reads any number of them under a memory limit, and prints how many were read and refused:

    python pickle_grammar.py --seed 7 --generated 10000 --damaged 1000000
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import math
import pickle
import random
import resource
import struct
import sys
from typing import Any

import numpy as np

from ortrain import _unpickler
from ortrain.errors import InvalidArgumentError

# Memory limit of the process beyond its size at the start.
ALLOWED_BYTES = 1 << 29
MODULUS = 2**61 - 1
CODES = "V8 V0 V16 i4 f8 u1 b1 S3 U2 M8 m8 c16 O8 V99999999 i3 f16".split()
MANY = 40_000


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def integer(value: int) -> bytes:
    """Encode an integer of any size."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def dtype_of(code: str) -> bytes:
    return named("numpy", "dtype") + text(code) + b"\x89\x88\x87R"


def structure(size: int, offset: int, inner: bytes) -> bytes:
    """Return the state of a data type with one field."""
    fields = b"}" + text("a") + inner + integer(offset) + b"\x86s"
    return b"(K\x03" + text("|") + b"N" + text("a") + b"\x85" + fields + integer(size) + b"K\x01K\x00t"


def subarray(size: int, count: int, inner: bytes) -> bytes:
    """Return the state of a data type of subarrays."""
    base = inner + integer(count) + b"\x85\x86"
    return b"(K\x03" + text("|") + base + b"NN" + integer(size) + b"K\x01K\x00t"


def array_of(dtype: bytes, count: int, data: bytes, at: int = 0) -> bytes:
    """Return an array; its data type is in the memo afterwards."""
    made = named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
    put = b"q" + bytes([at])
    return made + b"(K\x01" + integer(count) + b"\x85" + dtype + put + b"\x89C" + bytes([len(data)]) + data + b"tb"


def rebuilt(state: bytes) -> bytes:
    """Return an array of eight bytes of type V8, and a BUILD of its data type to another state."""
    return b"\x80\x04" + array_of(dtype_of("V8"), 1, bytes(8)) + b"h\x00" + state + b"b\x86."


def with_keys(keys: list[bytes]) -> bytes:
    return b"\x80\x04}(" + b"".join(key + b"N" for key in keys) + b"u."


def probing_keys(size: int) -> list[int]:
    """Return small integers that a dict of `size` slots puts into one chain of slots."""
    chain, at = [], 0
    for _ in range(size // 3):
        chain.append(at)
        at = (5 * at + 1) % size
    return chain + [size * (step + 1) for step in range(size // 3)]


# Crafted pickles. Each one accessed memory out of bounds, took far more memory than its file, or quadratic time.
HARMFUL: dict[str, bytes] = {
    "a field far outside": rebuilt(structure(8, 10**8, dtype_of("i4"))),
    "a field after the array": rebuilt(structure(72, 64, dtype_of("f8"))),
    "a field that fits": rebuilt(structure(8, 0, dtype_of("f8"))),
    "a type of subarrays": rebuilt(subarray(8, 10**6, dtype_of("f8"))),
    "subarrays of the size": rebuilt(subarray(8 * 10**6, 10**6, dtype_of("f8"))),
    "a subarray within a field": rebuilt(structure(8, 0, dtype_of("V8") + subarray(8, 9, dtype_of("f8")) + b"b")),
    "a state before the array": b"\x80\x04"
    + array_of(dtype_of("V8") + structure(8, 10**8, dtype_of("i4")) + b"b", 1, bytes(8))
    + b".",
    "a type that is longer than its code": b"\x80\x04"
    + array_of(dtype_of("V8") + structure(16, 8, dtype_of("f8")) + b"b", 1, bytes(16))
    + b".",
    "two states of a type": b"\x80\x04"
    + array_of(dtype_of("V8") + 2 * (structure(8, 0, dtype_of("f8")) + b"b"), 1, bytes(8))
    + b".",
    "two states of an array": b"\x80\x04"
    + array_of(dtype_of("u1"), 1, b"\x01")[:-1]
    + b"b(K\x01K\x09\x85h\x00\x89C\x09123456789tb.",
    "a type within itself": b"\x80\x04" + dtype_of("V8") + b"q\x00" + structure(8, 0, b"h\x00") + b"b.",
    "keys of one hash": with_keys([integer(i * MODULUS) for i in range(MANY)]),
    "pairs of one hash": with_keys([integer(i * MODULUS) + b"K\x01\x86" for i in range(MANY)]),
    "keys that a dict probes": with_keys([integer(key) for key in probing_keys(1 << 19)]),
    "items of one hash": b"\x80\x04\x8f(" + b"".join(integer(i * MODULUS) for i in range(MANY)) + b"\x90.",
    "a frozen set of one hash": b"\x80\x04(" + b"".join(integer(i * MODULUS) for i in range(MANY)) + b"\x91.",
    "a set of a list of one hash": b"\x80\x03cbuiltins\nset\n]("
    + b"".join(integer(i * MODULUS) for i in range(MANY))
    + b"e\x85R.",
    "empty sets": b"\x80\x04(" + b"\x8f" * 5_000_000 + b"t.",
    "frozen sets": b"\x80\x04(" + b"(\x91" * 500_000 + b"t.",
    "deques": b"\x80\x04ccollections\ndeque\nq\x000(" + b"h\x00)R" * 200_000 + b"t.",
    "an unterminated list of sizes": b"\x80\x04"
    + array_of(dtype_of("u1"), 1, b"\x01").replace(integer(1) + b"\x85", b"\x8b\x10'\0\0" + b"\x7f" * 10_000 + b"\x85")
    + b".",
    "a boolean of 7": b"\x80\x04" + array_of(dtype_of("b1"), 1, b"\x07") + b".",
    "an array with an invalid character": b"\x80\x04" + array_of(dtype_of("U1"), 1, b"\xff" * 4) + b".",
    "a scalar with an invalid character": b"\x80\x04"
    + named("numpy._core.multiarray", "scalar")
    + dtype_of("U1")
    + b"C\x04\xff\xff\xff\xff\x86R.",
    "a date in steps of 0": b"\x80\x04"
    + dtype_of("M8")
    + b"(K\x04"
    + text("<")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}(C\x01sK\x00K\x01K\x01t\x86tb.",
    "frames within each other": b"\x80\x04"
    + b"".join(b"\x95" + struct.pack("<Q", 9 * (MANY - i)) for i in range(MANY))
    + b"N.",
    "attributes of a Counter": b"\x80\x04ccollections\nCounter\n}\x85R}" + text("a") + b"Nsb.",
    "a state of a scalar": b"\x80\x04"
    + named("numpy._core.multiarray", "scalar")
    + dtype_of("f8")
    + b"C\x0812345678\x86R}b.",
    "items of a bytearray": b"\x80\x05\x96\x01\0\0\0\0\0\0\0xK\x01a.",
    "types in types": b"\x80\x04("
    + dtype_of("V0")
    + b"q\x00"
    + b"".join(
        dtype_of("V0")
        + b"(K\x03"
        + text("|")
        + b"N"
        + text("a")
        + text("b")
        + b"\x86}"
        + b"".join(text(name) + b"h" + bytes([at]) + b"K\x00\x86s" for name in "ab")
        + b"K\x00K\x01K\x00tbq"
        + bytes([at + 1])
        for at in range(24)
    )
    + b"t.",
}


class Grammar:
    """Random pickles, mostly of operations in a useful order, often of data types and arrays."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.memo_size = 0

    def pickle(self) -> bytes:
        """Return a pickle, mostly of protocol 4."""
        self.memo_size = 0
        made = self.value(5) + self.more()
        return b"\x80" + self.chance.choice([b"\4", b"\4", b"\3", b"\2", b"\5"]) + made + b"."

    def more(self) -> bytes:
        """Return zero or more states and items for the value on top, some of them from earlier values."""
        made = b""
        while self.chance.random() < 0.4:
            made += self.chance.choice(
                [
                    lambda: self.got() + self.state() + b"b0",
                    lambda: self.state() + b"b",
                    lambda: self.value(2) + b"a",
                    lambda: self.value(1) + self.value(2) + b"s",
                    lambda: b"(" + self.value(1) + b"\x90",
                    lambda: self.put(),
                    lambda: self.value(2) + b"\x86",
                ]
            )()
        return made

    def put(self) -> bytes:
        self.memo_size += 1
        return b"\x94" if self.chance.random() < 0.95 else b"q" + bytes([self.chance.randrange(20)])

    def got(self) -> bytes:
        return b"h" + bytes([self.chance.randrange(max(self.memo_size, 1))]) if self.memo_size else b"N"

    def number(self) -> int:
        return self.chance.choice([0, 1, 2, 3, 4, 8, 8, 8, 16, 64, 100, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**8, -1])

    def value(self, depth: int) -> bytes:
        """Return a value, which may be put into the memo."""
        chance = self.chance
        simple = [
            lambda: integer(self.number()),
            lambda: text(chance.choice(["a", "b", "x" * 70, "<"])),
            lambda: chance.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"G" + struct.pack(">d", 1.5)]),
            lambda: b"C" + bytes([8]) + bytes(8),
            self.got,
            lambda: dtype_of(chance.choice(CODES)),
        ]
        nested = [
            self.dtype,
            self.array,
            self.array,
            self.scalar,
            lambda: self.items(depth),
            lambda: b"(" + b"".join(self.value(depth - 1) for _ in range(chance.randrange(4))) + b"t",
            lambda: self.call(depth),
        ]
        made = chance.choice(nested if depth > 0 and chance.random() < 0.75 else simple)()
        return made + self.put() if chance.random() < 0.5 else made

    def items(self, depth: int) -> bytes:
        count = self.chance.randrange(4)
        opened, closed, twice = self.chance.choice([(b"](", b"e", 1), (b"}(", b"u", 2), (b"\x8f(", b"\x90", 1)])
        return opened + b"".join(self.value(depth - 1) for _ in range(count * twice)) + closed

    def call(self, depth: int) -> bytes:
        module, name = self.chance.choice(list(_unpickler._NAMED)).rsplit(".", 1)
        count = self.chance.randrange(3)
        return (
            named(module, name)
            + b"".join(self.value(depth - 1) for _ in range(count))
            + (b")\x85\x86"[count:][:1] + b"R")
        )

    def state(self) -> bytes:
        """Return the state of a data type or an array."""
        return self.chance.choice([self.structure, self.subarray, self.plain, lambda: self.array_state(8)])()

    def plain(self) -> bytes:
        size = self.chance.choice([-1, self.number()])
        return b"(K\x03" + text(self.chance.choice("<>|=x")) + b"NNN" + integer(size) + integer(size) + b"K\x00t"

    def structure(self) -> bytes:
        made = structure(self.number(), self.number(), self.dtype())
        return made if self.chance.random() < 0.8 else made.replace(b"K\x03", b"K\x04")

    def subarray(self) -> bytes:
        return subarray(self.number(), self.number(), self.dtype())

    def dtype(self) -> bytes:
        """Return a data type from the memo or from a code, with any number of states in any order."""
        kind = self.chance.random()
        if kind < 0.15:
            return self.got()
        made = dtype_of(self.chance.choice(CODES))
        if self.chance.random() < 0.5:
            made += self.put()
        while self.chance.random() < 0.4:
            made += self.state() + b"b"
        return made

    def sized(self, size: int) -> tuple[bytes, int]:
        """Return a data type that is mostly valid, and its size."""
        chance = self.chance
        good = [
            (lambda: dtype_of("f8"), 8),
            (lambda: dtype_of("V8") + structure(8, 0, dtype_of("f8")) + b"b", 8),
            (lambda: dtype_of("V16") + structure(16, 8, dtype_of("i8")) + b"b", 16),
            (
                lambda: (
                    dtype_of("V16") + structure(16, 0, dtype_of("V16") + subarray(16, 2, dtype_of("f8")) + b"b") + b"b"
                ),
                16,
            ),
            (lambda: dtype_of("M8"), 8),
            (lambda: dtype_of("U2"), 8),
            (lambda: dtype_of("b1"), 1),
            (lambda: dtype_of("V8") + structure(8, self.number(), dtype_of("f8")) + b"b", 8),
        ]
        if chance.random() < 0.2:
            return self.dtype(), size
        make, size = chance.choice(good)
        return make() + (self.put() if chance.random() < 0.7 else b""), size

    def array_state(self, size: int) -> bytes:
        made, size = self.sized(size)
        count = self.chance.choice([0, 1, 1, 2, 3])
        length = size * count if self.chance.random() < 0.8 else self.chance.randrange(64)
        shape = self.chance.choice(
            [integer(count) + b"\x85", b"K\x01" + integer(count) + b"\x86", integer(self.number()) + b"\x85"]
        )
        order = self.chance.choice([b"\x88", b"\x89"])
        return b"(K\x01" + shape + made + order + b"C" + bytes([length]) + bytes(length) + b"t"

    def array(self) -> bytes:
        made = named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
        if self.chance.random() < 0.5:
            made += self.put()
        made += self.array_state(8) + b"b"
        if self.chance.random() < 0.2:
            made += self.state() + b"b"
        return made

    def scalar(self) -> bytes:
        made, size = self.sized(8)
        return named("numpy._core.multiarray", "scalar") + made + b"C" + bytes([size]) + bytes(size) + b"\x86R"


def arrays_in(value: Any) -> list[Any]:
    """Return all arrays and scalars of NumPy in a value."""
    seen: set[int] = set()
    waiting, found = [value], []
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray | np.generic):
            found.append(one)
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | collections.deque):
            waiting += one
        else:
            known = (type(None), bool, int, float, complex, str, bytes, bytearray, np.dtype, type)
            dates = (datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
            assert isinstance(one, known + dates), f"a pickle contains a {type(one)}"
    return found


def check_owned(array: Any) -> None:
    """Assert that an array or a scalar owns all of its bytes, and that its fields are within bounds."""
    if isinstance(array, np.ndarray):
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.base is None, type(owner.base)
        assert owner.flags.owndata
        assert array.nbytes == math.prod(array.shape) * array.dtype.itemsize <= owner.nbytes
        # NumPy 1 has this function elsewhere.
        utilities: Any = np.lib.array_utils if hasattr(np.lib, "array_utils") else np
        low, high = utilities.byte_bounds(array)
        begin = owner.__array_interface__["data"][0]
        assert begin <= low <= high <= begin + max(owner.nbytes, 1)
        assert len(array.tobytes()) == array.nbytes
    check_type(array.dtype)
    copied = np.array(array)
    with contextlib.suppress(ValueError, OverflowError, TypeError, NotImplementedError):
        repr(copied)


def check_type(dtype: Any) -> None:
    """Assert that the fields of a data type are within its size."""
    if dtype.subdtype is not None:
        inner, shape = dtype.subdtype
        assert inner.itemsize * math.prod(shape) == dtype.itemsize
        check_type(inner)
    for inner, offset, *_ in (dtype.fields or {}).values():
        assert 0 <= offset <= offset + inner.itemsize <= dtype.itemsize
        check_type(inner)
    assert not dtype.hasobject


def read(data: bytes) -> bool:
    """Read a pickle and check all arrays in it; False if the pickle is refused."""
    try:
        found = _unpickler.loads(data)
    except InvalidArgumentError:
        return False
    for array in arrays_in(found):
        check_owned(array)
    return True


def valid_pickles() -> list[bytes]:
    """Return valid pickles, to be damaged."""
    values = [
        np.zeros(3, [("a", "i4"), ("b", "f4", (2,)), ("c", [("d", ">u2")])]),
        {"epoch": 3, "best": 0.5, "names": ["a", "b"], "set": {1, 2}, "shape": (1, (2, 3))},
        [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(["a", "bcd"]), np.float32(1)],
        [np.array(["2020"], "M8[ns]"), np.array([True]), np.arange(3, dtype=">i2"), np.dtype(("f4", (2, 3)))],
        [collections.deque([1], 5), collections.defaultdict(list, a=[1]), collections.Counter("aab")],
        [datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(5), frozenset([(1, 2)])],
    ]
    return [pickle.dumps(value, protocol=protocol) for value in values for protocol in (3, 4)]


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return a pickle with random changes: bytes replaced, pieces copied elsewhere, or pieces removed."""
    made = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        kind, at = chance.random(), chance.randrange(len(made))
        if kind < 0.6:
            made[at] = chance.randrange(256)
        elif kind < 0.8:
            begin = chance.randrange(len(made))
            made[at:at] = made[begin : begin + chance.randrange(1, 24)]
        elif len(made) > 32:
            del made[at : at + chance.randrange(1, 8)]
    return bytes(made)


def limit_memory() -> None:
    """Limit the memory of this process to ALLOWED_BYTES more than it has."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + ALLOWED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("seed", 1), ("generated", 1000), ("damaged", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    limit_memory()
    chance = random.Random(arguments.seed)
    grammar, sources = Grammar(chance), valid_pickles()
    assert all(map(read, sources)), "valid pickles are accepted"
    counts = {"generated": 0, "damaged": 0}
    for _ in range(arguments.generated):
        data = grammar.pickle()
        try:
            counts["generated"] += read(data)
        except BaseException:
            print(data.hex(), file=sys.stderr)
            raise
    for _ in range(arguments.damaged):
        data = damaged(chance, chance.choice(sources))
        try:
            counts["damaged"] += read(data)
        except BaseException:
            print(data.hex(), file=sys.stderr)
            raise
    print(
        f"seed {arguments.seed}: read {counts['generated']} of {arguments.generated} generated "
        f"and {counts['damaged']} of {arguments.damaged} damaged ones"
    )


if __name__ == "__main__":
    main()
