"""Changes to files that readers do not expect: of their structure, and of single bytes. `rng` draws each change.

ONNX messages change field by field: numbers become extreme, names are swapped, nodes are dropped, doubled and grafted,
raw data is cut. A FlatBuffers file changes word by word, with a corrected checksum if it had one. A safetensors header
changes entry by entry.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.message import EncodeError, Message

NUMBERS = (0, 1, 2, 3, 7, 64, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1)
INTEGERS = (*NUMBERS, *(-number for number in NUMBERS), -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-7, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 2e9)
WORDS = ("", "x", "y", "zz\x00zz", "a" * 300, "../../etc/passwd", "ж" * 20, "batch", "com.microsoft", "ai.onnx.ml")
# Relative frequency of changed messages: messages that compute change more often than descriptions.
WEIGHTS = {"AttributeProto": 4, "TensorProto": 4, "NodeProto": 2}
# Trailer that crates/ortrain-checkpoint writes after a checkpoint.
MAGIC, TRAILER_LENGTH = b"ORTRSUM1", 20


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert, remove, double or overwrite bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        # A header determines more than the bytes after it.
        if rng.random() < 0.4:
            at = min(at, rng.randrange(min(len(changed), 200)))
        length = rng.choice((1, 1, 2, 4, 8, 9, 64))
        kind = rng.randrange(7)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = rng.randbytes(length)
        elif kind == 4:
            del changed[at : at + length]
        elif kind == 5:
            changed[at:at] = changed[at : at + rng.choice((8, 64, 512))]
        else:
            changed[at : at + length] = rng.choice((b"\xff", b"\x00", b"\x80")) * length
    return bytes(changed)


def messages(of: Message) -> Iterator[Message]:
    """Yield a message and all messages inside it."""
    yield of
    for field, value in of.ListFields():
        if field.message_type is not None:
            for inner in value if _repeated(field) else [value]:
                yield from messages(inner)


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _integer(field: Any, old: int, rng: random.Random) -> int:
    if field.enum_type is not None:
        return rng.choice([value.number for value in field.enum_type.values])
    narrow = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32)
    unsigned = field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
    low, high = (0 if unsigned else -(2**31 if narrow else 2**63)), 2 ** ((32 if narrow else 64) - (not unsigned)) - 1
    drawn = rng.choice((*INTEGERS, old + 1, old - 1, old * 2, -old, old, rng.randrange(12)))
    return min(max(drawn, low), high)


class OfModels:
    """Changes to ONNX messages; parts of `others`, which are also models, are grafted."""

    def __init__(self, others: list[onnx.ModelProto]) -> None:
        self.parts: dict[str, list[Message]] = {}
        for model in others:
            for part in messages(model):
                self.parts.setdefault(part.DESCRIPTOR.full_name, []).append(part)
        nodes: list[Any] = self.parts["onnx.NodeProto"]
        self.operators = sorted({node.op_type for node in nodes})

    def change(self, model: Message, rng: random.Random) -> None:
        """Make one to four changes."""
        for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))):
            every = list(messages(model))
            words = sorted({word for part in every for word in _words(part)} - {""})
            (part,) = rng.choices(every, [WEIGHTS.get(part.DESCRIPTOR.name, 1) for part in every])
            self._field(part, rng, words)

    def _field(self, part: Message, rng: random.Random, words: list[str]) -> None:
        present = [field for field, _ in part.ListFields()]
        fields = list(part.DESCRIPTOR.fields) if rng.random() < 0.15 or not present else present
        if not fields:
            return
        field: Any = rng.choice(fields)
        values = getattr(part, field.name)
        if not _repeated(field):
            if rng.random() < 0.1:
                part.ClearField(field.name)
            elif field.message_type is not None:
                pool = self.parts.get(field.message_type.full_name)
                if pool:
                    values.CopyFrom(rng.choice(pool))
            else:
                setattr(part, field.name, self._scalar(field, values, rng, words))
            return
        count, kind = len(values), rng.randrange(6)
        if kind == 0 and count:
            del values[rng.randrange(count)]
        elif kind == 1 and count > 1:
            first, second = rng.sample(range(count), 2)
            every = list(values)
            every[first], every[second] = every[second], every[first]
            _set(values, every, field)
        elif kind == 2 and count:
            _set(values, [*values, *[rng.choice(list(values))] * rng.choice((1, 1, 1, 70))], field)
        elif kind == 3 and rng.random() < 0.3:
            part.ClearField(field.name)
        elif field.message_type is not None:
            pool = self.parts.get(field.message_type.full_name)
            if pool:
                copy = values.add()
                copy.CopyFrom(rng.choice(pool))
        elif count and rng.random() < 0.8:
            at = rng.randrange(count)
            values[at] = self._scalar(field, values[at], rng, words)
        else:
            values.append(self._scalar(field, field.default_value or 0, rng, words))

    def _scalar(self, field: Any, old: Any, rng: random.Random, words: list[str]) -> Any:
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return rng.choice(FLOATS)
        if field.cpp_type == field.CPPTYPE_STRING:
            if field.type == field.TYPE_BYTES:
                data = old if isinstance(old, bytes) else b""
                cut = data[: rng.randrange(len(data) + 1)]
                return rng.choice((cut, data + b"\0", data * 2, b"", of_bytes(data, rng), rng.randbytes(8) + data[8:]))
            if field.name == "op_type":
                return rng.choice(self.operators)
            return rng.choice(words) if words and rng.random() < 0.8 else rng.choice(WORDS)
        return _integer(field, old if isinstance(old, int) else 0, rng)


def _set(values: Any, every: list[Any], field: Any) -> None:
    if field.message_type is None:
        values[:] = every
        return
    copies = []
    for value in every:
        copy = type(value)()
        copy.CopyFrom(value)
        copies.append(copy)
    del values[:]
    values.extend(copies)


def _words(part: Message) -> Iterator[str]:
    for field, value in part.ListFields():
        if field.type == field.TYPE_STRING:
            yield from value if _repeated(field) else [value]


def serialized(model: Message) -> bytes | None:
    """Return the file; `None` if this Python cannot write the message."""
    try:
        return model.SerializeToString()
    except (EncodeError, ValueError):
        return None


def of_buffer(data: bytes, rng: random.Random) -> bytes:
    """Change offsets, table sizes and vector lengths of a FlatBuffers file; a checksum after it is corrected."""
    sealed = len(data) > TRAILER_LENGTH and data[-TRAILER_LENGTH:][:8] == MAGIC
    body = bytearray(data[:-TRAILER_LENGTH] if sealed else data)
    if rng.random() < 0.25:
        body = bytearray(of_bytes(bytes(body), rng))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if len(body) < 16:
            break
        width, form = rng.choice(((2, "<H"), (4, "<I"), (4, "<I"), (8, "<Q")))
        at = rng.randrange(len(body) // width) * width
        old = struct.unpack_from(form, body, at)[0] if at + width <= len(body) else 0
        other = rng.randrange(len(body) // width) * width
        copied = struct.unpack_from(form, body, other)[0] if other + width <= len(body) else 0
        near = old + rng.choice((-16, -8, -4, -2, -1, 1, 2, 4, 8, 16))
        drawn = rng.choice((*NUMBERS, near, near, copied, len(body), len(body) - at, 2**64 - 1))
        if at + width <= len(body):
            struct.pack_into(form, body, at, drawn % 2 ** (8 * width))
    if not sealed or rng.random() < 0.1:
        return bytes(body)
    head = bytes(body) + MAGIC + struct.pack("<Q", len(body))
    return head + struct.pack("<I", zlib.crc32(head))


def of_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the entries of the header, its length, and the bytes after it."""
    (length,) = struct.unpack_from("<Q", data)
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        return (
            struct.pack("<Q", rng.choice((*NUMBERS, length - 1, length + 1, len(data), 2**64 - 1)) % 2**64) + data[8:]
        )
    if kind == 1:
        return of_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _of_entry(header, rng)
    text = json.dumps(header).encode()
    if kind == 2:
        text = of_bytes(text, rng)
    elif kind == 3:
        # Duplicate names, and depths that a recursive parser may follow.
        depth = rng.choice((10, 1000, 100_000))
        text = rng.choice(
            (text[:-1] + b"," + text[1:], b"[" * depth, b'{"a":' * depth, text.replace(b"{", b"{ " * 3, 1))
        )
    return struct.pack("<Q", len(text)) + text + rest


def _of_entry(header: dict[str, Any], rng: random.Random) -> None:
    if not header:
        return
    name = rng.choice(sorted(header))
    entry, kind = header[name], rng.randrange(7)
    if kind == 0:
        del header[name]
    elif kind == 1:
        header[rng.choice(WORDS)] = entry
    elif kind == 2 or not isinstance(entry, dict) or "shape" not in entry:
        header[name] = rng.choice((None, 1, "x", [], {}, [[]], {"dtype": "F32"}, 1e308, -1))
    elif kind == 3:
        entry["dtype"] = rng.choice(("F32", "F64", "I8", "BF16", "F16", "F8_E4M3", "BOOL", "U64", "no", 3, None))
    elif kind in (4, 5):
        numbers: list[Any] = list(entry[rng.choice(("shape", "data_offsets"))])
        key = "shape" if kind == 4 else "data_offsets"
        at = rng.randrange(len(numbers) + 1)
        numbers[at : at + rng.choice((0, 1))] = [rng.choice((*INTEGERS, 2**64 - 1, 2**64, 1.5, "x", None))]
        entry[key] = numbers
    else:
        entry[rng.choice(WORDS)] = rng.choice((1, "x", None, {}, [1]))


def of_external(model: onnx.ModelProto, side: bytes, rng: random.Random) -> tuple[onnx.ModelProto, bytes]:
    """Change the declared location of external data, and the file with the data."""
    tensors: list[onnx.TensorProto] = [
        part for part in messages(model) if isinstance(part, onnx.TensorProto) and part.external_data
    ]
    places = ("", ".", "..", "../model.onnx", "/etc/hostname", "/dev/zero", "model.onnx", "nowhere", "a\0b", "x" * 5000)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tensor = rng.choice(tensors)
        entry = rng.choice(tensor.external_data)
        kind = rng.randrange(9)
        if kind == 0:
            entry.key = rng.choice(("location", "offset", "length", "checksum", "basepath", ""))
        elif kind == 1 and len(tensor.external_data) > 1:
            tensor.external_data.remove(entry)
        elif kind == 2:
            tensor.external_data.add(
                key=rng.choice(("location", "offset", "length", "checksum")), value=rng.choice(places)
            )
        elif kind == 3:
            tensor.data_location = rng.choice((onnx.TensorProto.DEFAULT, onnx.TensorProto.EXTERNAL))
        elif kind == 4 and tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(INTEGERS)
        elif kind == 5:
            side = rng.choice((side[: rng.randrange(len(side) + 1)], b"", side + b"more"))
        elif kind == 6:
            tensor.data_type = rng.choice((0, 1, 2, 3, 7, 8, 9, 10, 11, 16, 17, 22, 99))
        elif entry.key == "location":
            entry.value = rng.choice(places)
        else:
            entry.value = str(rng.choice((*INTEGERS, 2**64 - 1, 2**64, "x", "", "1e3", " 4", "+4", "0x10", len(side))))
    return model, side
