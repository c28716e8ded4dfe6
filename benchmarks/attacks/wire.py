"""Damaged protobuf messages, made from raw fields, because protobuf libraries write only valid messages."""

import random
import struct
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32 = range(6)

INTEGERS = (
    *(0, 1, 2, 3, 16, 127, 128, 255, 511, 512, 513, 2**16),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2**31),
)
"""Values of a varint, including negative numbers in 64 bits."""
NUMBERS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 100.0, 1e-3, 1e-45, 5e-324, 1e38, 1e300, 1.7e308, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *(b"", b" ", b"\0", b"a", b"hello", b"1", b"-1", b"{}", b"[]", b"null", b"NaN"),
    *(b'{"n": 1e999}', b"/a/b/c", b"%s%n"),
    *("é日\N{GRINNING FACE}".encode(), "\N{REPLACEMENT CHARACTER}\u202e".encode(), b"[" * 50, b"a" * 128, b"a" * 129),
    *(b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"abc\x80"),
)
# Rare, because they would take most of the run.
_LONG = (b"a" * 2000, b"Once upon a time " * 400, b"/a" * 8000, b"\xff" * 3000, b'{"a":' * 2000)
_SCALARS = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_MESSAGE: BYTES,
}


@dataclass
class Field:
    """Raw field of a protobuf message.

    `wire_type` is a constant such as `VARINT`. `value` is an integer if the field is a varint, else bytes.
    """

    number: int
    wire_type: int
    value: int | bytes


def varint(value: int) -> bytes:
    """Encode an integer from 0 to 2**64 - 1."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def split(data: bytes) -> list[Field]:
    """Return the fields of a well-formed message."""
    fields, place = [], 0

    def read_varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        number, wire_type = divmod(read_varint(), 8)
        if wire_type == VARINT:
            fields.append(Field(number, wire_type, read_varint()))
            continue
        length = {FIXED64: 8, FIXED32: 4}.get(wire_type) or read_varint()
        fields.append(Field(number, wire_type, data[place : place + length]))
        place += length
    return fields


def join(fields: list[Field]) -> bytes:
    """Encode fields as a message."""
    parts = []
    for field in fields:
        parts.append(varint(field.number << 3 | field.wire_type))
        if isinstance(field.value, int):
            parts.append(varint(field.value))
            continue
        if field.wire_type == BYTES:
            parts.append(varint(len(field.value)))
        parts.append(field.value)
    return b"".join(parts)


class Mutator:
    """Generator of damaged messages. Equal seeds and messages give equal results."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def mutate(self, data: bytes, descriptor: Descriptor) -> bytes:
        """Return a message with up to three changed fields, and sometimes with damaged bytes."""
        fields = split(data)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self._change(fields, descriptor)
        data = join(fields)
        return self._damage(data) if self.random.random() < 0.12 else data

    def _change(self, fields: list[Field], descriptor: Descriptor) -> None:
        """Change one field, in the message or in a nested message."""
        dice = self.random.random()
        known = descriptor.fields
        if known and (not fields or dice < 0.25):
            described = self.random.choice(known)
            fields.append(Field(described.number, _wire_type(described), self._value(described)))
        elif not fields or dice < 0.28:
            fields.append(self._stranger())
        elif dice < 0.33:
            fields.append(self.random.choice(fields))
        elif dice < 0.37:
            fields.remove(self.random.choice(fields))
        elif dice < 0.39:
            self.random.shuffle(fields)
        else:
            place = self.random.randrange(len(fields))
            fields[place] = self._changed(fields[place], descriptor)

    def _changed(self, field: Field, descriptor: Descriptor) -> Field:
        described = descriptor.fields_by_number.get(field.number)
        if described is None or self.random.random() < 0.08:
            return self._retyped(field)
        if described.message_type is not None and isinstance(field.value, bytes) and self.random.random() < 0.9:
            inner = split(field.value) if _is_well_formed(field.value) else []
            self._change(inner, described.message_type)
            return Field(field.number, BYTES, join(inner))
        if (
            described.type == FieldDescriptor.TYPE_BYTES
            and isinstance(field.value, bytes)
            and self.random.random() < 0.7
        ):
            return Field(field.number, BYTES, self._damage(field.value))
        return Field(field.number, _wire_type(described), self._value(described))

    def _value(self, described: Any) -> int | bytes:
        """Return a value for a field, often at or beyond its limits. `described`: descriptor of the field."""
        match described.type:
            case FieldDescriptor.TYPE_DOUBLE:
                return struct.pack("<d", self.random.choice(NUMBERS))
            case FieldDescriptor.TYPE_FLOAT:
                return self.random.choice((b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\x3f"))
            case FieldDescriptor.TYPE_STRING | FieldDescriptor.TYPE_BYTES:
                return self.random.choice(_LONG if self.random.random() < 0.02 else TEXTS)
            case FieldDescriptor.TYPE_MESSAGE:
                inner: list[Field] = []
                for _ in range(self.random.choice((0, 1, 1, 2))):
                    self._change(inner, described.message_type)
                return join(inner)
        if described.name == "max_tokens" and self.random.random() < 0.9:
            return self.random.randrange(4)
        value = self.random.choice(INTEGERS)
        if described.is_repeated and self.random.random() < 0.7:
            return value
        return value if self.random.random() < 0.5 else self.random.randrange(8)

    def _retyped(self, field: Field) -> Field:
        wire_type = self.random.choice((VARINT, FIXED64, BYTES, START_GROUP, END_GROUP, FIXED32, 6, 7))
        value: int | bytes
        match wire_type:
            case 0:
                value = self.random.choice(INTEGERS)
            case 1:
                value = bytes(8)
            case 5:
                value = bytes(4)
            case 2:
                value = self.random.choice(TEXTS)
            case _:
                value = b""
        return Field(field.number, wire_type, value)

    def _stranger(self) -> Field:
        number = self.random.choice((0, 15, 23, 99, 19000, 2**29 - 1, 2**29))
        return self._retyped(Field(number, VARINT, 0))

    def _damage(self, data: bytes) -> bytes:
        """Cut bytes, change or add some bytes, or repeat the last bytes."""
        if not data:
            return self.random.randbytes(self.random.randrange(1, 40))
        place = self.random.randrange(len(data))
        match self.random.randrange(5):
            case 0:
                return data[:place]
            case 1:
                return data[:place] + self.random.randbytes(1) + data[place + 1 :]
            case 2:
                return data[:place] + self.random.randbytes(self.random.randrange(1, 9)) + data[place:]
            case 3:
                return data[:place] + bytes([data[place] ^ 1 << self.random.randrange(8)]) + data[place + 1 :]
            case _:
                return data + data[place:]


def _wire_type(described: Any) -> int:
    return _SCALARS.get(described.type, VARINT)


def _is_well_formed(data: bytes) -> bool:
    """Return whether `split` can read a message."""
    try:
        fields = split(data)
    except IndexError:
        return False
    return all(field.wire_type in (VARINT, FIXED64, BYTES, FIXED32) for field in fields) and join(fields) == data
