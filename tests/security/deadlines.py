"""Connections and streams that stay silent: the daemon closes them. All cases wait at once."""

import contextlib
import time

from attack import STREAMS_PER_CONNECTION, Attack
from daemon import Daemon, until
from http2 import PREFACE, TESSERA, Connection, connect

LIMIT_S = 12  # the daemon allows 10 s
CONNECTIONS = 20
SILENT = 50  # connections of each kind


class Silent:
    """A connection that sends these bytes and nothing more."""

    def __init__(self, address, data):
        self.socket = connect(address)
        with contextlib.suppress(OSError):  # it may be closed already
            self.socket.sendall(data)
        self.socket.setblocking(False)

    def is_closed(self):
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


class Deadlines(Attack):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.close)
        cls.silent = []
        for address in cls.daemon.socket, cls.daemon.tcp:
            for data in b"", PREFACE[:12]:
                for _ in range(SILENT):
                    cls.silent.append(Silent(address, data))
                    cls.addClassCleanup(cls.silent[-1].socket.close)
        cls.connections = []
        cls.opened = 0
        for _ in range(CONNECTIONS):
            connection = Connection(cls.daemon.socket)
            cls.connections.append(connection)
            cls.addClassCleanup(connection.close)
            connection.wait(lambda one=connection: one.is_configured, 1)
            for _ in range(min(STREAMS_PER_CONNECTION, connection.max_streams)):
                connection.open(TESSERA + "Attach")
                cls.opened += 1
        cls.end = time.monotonic() + LIMIT_S

    def left(self):
        return max(0.0, self.end - time.monotonic())

    def test_silent_connections(self):
        def open_ones():
            return [one for one in self.silent if not one.is_closed()]

        until(lambda: not open_ones(), self.left(), 0.2)
        rest = len(open_ones())
        self.judge(f"{len(self.silent)} silent connections", f"{rest} open after {LIMIT_S} s",
                   "none open", rest == 0)

    def test_streams_without_hello(self):
        def open_ones():
            count = 0
            for connection in self.connections:
                connection.exchange(0)
                if not connection.closed:
                    count += sum(not stream.ended for stream in connection.streams.values())
            return count

        until(lambda: open_ones() == 0, self.left(), 0.2)
        rest = open_ones()
        self.judge(f"{self.opened:,} streams without Hello",
                   f"{rest:,} open after {LIMIT_S} s", "none open", rest == 0)
