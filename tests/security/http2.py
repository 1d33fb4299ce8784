"""HTTP/2 and gRPC over a raw socket: every frame can be sent, also those that no client would send.

A connection belongs to one thread. It reads while it sends, and answers SETTINGS and PING.
"""

import dataclasses
import select
import socket
import struct
import time

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9)
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 3, 4, 5
WIDEST = (1 << 31) - 1
STANDARD_WINDOW = 65535
BATCH = 1 << 20  # bytes that are handed to the socket at once

OK, PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 7, 8, 12
TESSERA = "/tessera.v1.Tessera/"
ADMIN = "/tessera.v1.TesseraAdmin/"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(
        ">I", stream) + payload


def settings_frame(settings):
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings.items()))


def reset_frame(stream):
    return frame(RST_STREAM, 0, stream, struct.pack(">I", 8))


def request_headers(path, extra=()):
    return hpack.encode([(":method", "POST"), (":scheme", "http"), (":path", path),
                         (":authority", "localhost"), ("te", "trailers"),
                         ("content-type", "application/grpc"), *extra])


def envelope(message, flag=0):
    """A gRPC message with its five bytes of prefix."""
    return struct.pack(">BI", flag, len(message)) + message


def connect(address, seconds=5):
    """A socket to "unix:PATH" or "host:port"."""
    if address.startswith("unix:"):
        raw = socket.socket(socket.AF_UNIX)
        place = address[len("unix:"):]
    else:
        raw = socket.socket()
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, _, port = address.rpartition(":")
        place = (host, int(port))
    raw.settimeout(seconds)
    try:
        raw.connect(place)
    except OSError:
        raw.close()
        raise
    return raw


@dataclasses.dataclass
class Stream:
    id: int
    window: int  # bytes that the server still accepts
    headers: dict = dataclasses.field(default_factory=dict)
    data: bytearray = dataclasses.field(default_factory=bytearray)
    ended: bool = False  # the server has ended or reset it

    @property
    def status(self):
        """The gRPC status, or None where the server has sent none."""
        value = self.headers.get("grpc-status")
        return None if value is None else int(value)

    @property
    def reason(self):
        return self.headers.get("grpc-message", "")

    def messages(self):
        """The whole messages that have arrived."""
        found = []
        at = 0
        while at + 5 <= len(self.data):
            size = int.from_bytes(self.data[at + 1:at + 5], "big")
            if at + 5 + size > len(self.data):
                break
            found.append(bytes(self.data[at + 5:at + 5 + size]))
            at += 5 + size
        return found


class Connection:
    """A client's side of one HTTP/2 connection."""

    def __init__(self, address, settings=None, preface=True):
        self.socket = connect(address)
        self.socket.setblocking(False)
        self.poll = select.poll()
        self.poll.register(self.socket)
        self.decoder = hpack.Decoder()
        self.buffer = bytearray()
        self.replies = b""   # to SETTINGS and PING, not yet sent
        self.block = b""     # of a header block that is not complete
        self.streams = {}
        self.next_id = 1
        self.window = STANDARD_WINDOW
        self.stream_window = STANDARD_WINDOW
        self.max_frame = 16384
        self.max_streams = WIDEST
        self.is_configured = False  # the server's SETTINGS have arrived
        self.closed = False  # the server has closed the socket
        self.away = False    # the server has sent GOAWAY
        if preface:
            settings = {INITIAL_WINDOW_SIZE: WIDEST} if settings is None else settings
            self.send(PREFACE + settings_frame(settings) + frame(
                WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDEST - STANDARD_WINDOW)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        self.closed = True

    @property
    def is_cut(self):
        return self.closed or self.away

    # ---- Sending -----------------------------------------------------------------------------

    def send(self, data, seconds=5):
        """Sends bytes as they are; False where the server has cut or does not read in time."""
        rest = memoryview(data)
        end = time.monotonic() + seconds
        while rest and not self.closed:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.exchange(left, writes=True)
            try:
                rest = rest[self.socket.send(rest[:BATCH]):]
            except BlockingIOError:
                continue
            except OSError:
                self.read()  # what it said before it cut
                self.closed = True
        self.reply(max(0.0, end - time.monotonic()))
        return not self.closed

    def reply(self, seconds):
        replies, self.replies = self.replies, b""
        if replies and not self.closed:
            self.send(replies, seconds)

    def open(self, path, extra=(), end=False):
        stream = Stream(self.next_id, self.stream_window)
        self.streams[stream.id] = stream
        self.next_id += 2
        flags = END_HEADERS | (END_STREAM if end else 0)
        self.send(frame(HEADERS, flags, stream.id, request_headers(path, extra)))
        return stream

    def send_data(self, stream, payload, end=False, seconds=5):
        """Sends DATA within the server's windows; False where it could not all be sent."""
        rest = memoryview(payload)
        deadline = time.monotonic() + seconds
        while rest:
            while (min(self.window, stream.window) <= 0 and not self.closed and not stream.ended):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.exchange(left)
            if self.closed or stream.ended or time.monotonic() > deadline:
                return False
            size = min(len(rest), self.window, stream.window, BATCH)
            batch = [frame(DATA, END_STREAM if end and at + self.max_frame >= len(rest) else 0,
                           stream.id, bytes(rest[at:min(at + self.max_frame, size)]))
                     for at in range(0, size, self.max_frame)]
            rest = rest[size:]
            self.window -= size
            stream.window -= size
            if not self.send(b"".join(batch), max(0, deadline - time.monotonic())):
                return False
        return True

    # ---- Receiving ---------------------------------------------------------------------------

    def exchange(self, seconds, writes=False):
        """Waits until the socket can be read, or written to, and reads what there is."""
        wanted = select.POLLIN | (select.POLLOUT if writes else 0)
        self.poll.modify(self.socket, wanted)
        for _, events in self.poll.poll(max(0, seconds) * 1000):
            if events & ~select.POLLOUT:
                self.read()
        if not writes:  # else the frame that is being sent comes first
            self.reply(seconds)

    def read(self):
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        self.buffer += data
        at = 0
        while at + 9 <= len(self.buffer):
            size = int.from_bytes(self.buffer[at:at + 3], "big")
            if at + 9 + size > len(self.buffer):
                break
            self.handle(self.buffer[at + 3], self.buffer[at + 4],
                        int.from_bytes(self.buffer[at + 5:at + 9], "big") & WIDEST,
                        bytes(self.buffer[at + 9:at + 9 + size]))
            at += 9 + size
        del self.buffer[:at]

    def handle(self, kind, flags, number, payload):
        stream = self.streams.get(number)
        if kind == SETTINGS and not flags & ACK:
            self.apply(payload)
            self.replies += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.replies += frame(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            self.away = True
        elif kind == WINDOW_UPDATE:
            amount = int.from_bytes(payload, "big")
            if number == 0:
                self.window += amount
            elif stream is not None:
                stream.window += amount
        elif kind == RST_STREAM:
            if stream is not None:
                stream.ended = True
        elif kind in (HEADERS, CONTINUATION):
            self.block += payload
            if flags & END_HEADERS:
                headers = self.decoder.decode(self.block)
                self.block = b""
                if stream is not None:
                    stream.headers.update(headers)
        elif kind == DATA and stream is not None:
            stream.data += payload
        if kind in (HEADERS, DATA) and flags & END_STREAM and stream is not None:
            stream.ended = True

    def apply(self, payload):
        self.is_configured = True
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.window += value - self.stream_window
                self.stream_window = value
            elif name == MAX_FRAME_SIZE:
                self.max_frame = min(value, BATCH)
            elif name == MAX_CONCURRENT_STREAMS:
                self.max_streams = value

    def wait(self, condition, seconds):
        """Reads until the condition holds; whether it does in time and before the server cuts."""
        end = time.monotonic() + seconds
        while not condition():
            left = end - time.monotonic()
            if self.closed or left <= 0:
                return condition()
            self.exchange(left)
        return True

    # ---- Calls -------------------------------------------------------------------------------

    def start(self, path, message, flag=0, extra=(), seconds=5):
        """Sends a whole unary request and returns its stream."""
        stream = self.open(path, extra)
        self.send_data(stream, envelope(message, flag), end=True, seconds=seconds)
        return stream

    def finish(self, stream, seconds=5):
        """(status, answer): the status is None where the call was cut or not answered in time."""
        self.wait(lambda: stream.ended, seconds)
        self.streams.pop(stream.id, None)
        messages = stream.messages()
        return stream.status, messages[0] if messages else b""

    def call(self, path, message=b"", seconds=5, **options):
        return self.finish(self.start(path, message, seconds=seconds, **options), seconds)
