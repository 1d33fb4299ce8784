#!/usr/bin/env python3
"""The raw client: examples of RFC 7541, and fields that are read as they were written."""

import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ops"))

import cases  # noqa: E402
import hpack  # noqa: E402
import http2  # noqa: E402
import wire  # noqa: E402


class Hpack(unittest.TestCase):
    def test_huffman_and_table(self):  # C.4.1 and C.4.2
        decoder = hpack.Decoder()
        request = [(":method", "GET"), (":scheme", "http"), (":path", "/"),
                   (":authority", "www.example.com")]
        self.assertEqual(decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")),
                         request)
        self.assertEqual(decoder.decode(bytes.fromhex("828684be5886a8eb10649cbf")),
                         [*request, ("cache-control", "no-cache")])

    def test_integers(self):  # C.1
        self.assertEqual(hpack.encode_integer(10, 5, 0), b"\x0a")
        self.assertEqual(hpack.encode_integer(1337, 5, 0), b"\x1f\x9a\x0a")

    def test_literals(self):
        headers = [("name", "value"), ("long", "x" * 300)]
        self.assertEqual(hpack.Decoder().decode(hpack.encode(headers)), headers)


class Wire(unittest.TestCase):
    def test_fields(self):
        message = (wire.number(1, 300) + wire.fixed64(2, 1 << 63) + wire.nested(3, "text")
                   + wire.number(1, 0))
        self.assertEqual(wire.fields(message), {1: [300, 0], 2: [1 << 63], 3: [b"text"]})

    def test_session_key_has_one_size(self):
        self.assertEqual(len(wire.session_key(1, 2)), len(wire.session_key(1 << 63, 1 << 62)))


class Messages(unittest.TestCase):
    def test_only_whole_ones_are_returned(self):
        stream = http2.Stream(1, 0)
        stream.data += http2.envelope(b"one") + http2.envelope(b"two")[:-1]
        self.assertEqual(stream.messages(), [b"one"])


if __name__ == "__main__":
    cases.main()
