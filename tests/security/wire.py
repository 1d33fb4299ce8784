"""Protobuf by hand: encodes fields, reads fields, and builds the messages that the attacks send."""

import struct

BF16 = 1
PROTOCOL_VERSION = 5


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field, value):
    return varint(field << 3) + varint(value)


def fixed64(field, value):
    return varint(field << 3 | 1) + struct.pack("<Q", value)


def real(field, value):
    return varint(field << 3 | 1) + struct.pack("<d", value)


def nested(field, payload):
    """A string, bytes, a message, or a packed list."""
    if isinstance(payload, str):
        payload = payload.encode()
    return varint(field << 3 | 2) + varint(len(payload)) + payload


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """Field number -> values of a message, in order: ints, or bytes where lengths are given."""
    found = {}
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(data, at)
        elif kind == 1:
            value, at = int.from_bytes(data[at:at + 8], "little"), at + 8
        elif kind == 2:
            size, at = read_varint(data, at)
            value, at = bytes(data[at:at + size]), at + size
        elif kind == 5:
            value, at = int.from_bytes(data[at:at + 4], "little"), at + 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        found.setdefault(key >> 3, []).append(value)
    return found


def first(message, field, default=0):
    return message.get(field, [default])[0]


def hello(token="", name="worker"):
    """The first message of an Attach stream, for a worker that maps no memory."""
    return nested(1, number(1, PROTOCOL_VERSION) + nested(3, token) + nested(4, name))


def session_key(session_id, secret):
    return nested(1, fixed64(1, session_id) + fixed64(2, secret))


def layer(kv_heads, head_dim=64):
    return number(1, kv_heads) + number(2, kv_heads) + number(3, head_dim)


def model(name, layers, kv_heads, head_dim=64, rope=b""):
    """A ModelGeometry of equal layers."""
    text = nested(1, name) + number(2, BF16)
    text += nested(3, layer(kv_heads, head_dim)) * layers
    return text + (nested(4, rope) if rope else b"")


def tensor(shape, data):
    return number(1, BF16) + nested(2, b"".join(map(varint, shape))) + nested(3, data)
