"""Small messages that become large in memory: parsed, inflated, kept, or never finished."""

import contextlib
import time
import zlib

import wire
from attack import KILLED, MEMORY_BAR_MIB, Attack
from daemon import MIB
from http2 import OK, RESOURCE_EXHAUSTED, TESSERA, Connection, envelope
from worker import Refused, Session

MESSAGE = 16 * MIB
ROOM = 256  # bytes of a message that are left for its key and prefixes
EMPTY = b"\0"
CALL_S = 3
STREAMS = 100
INFLATED = 512 * MIB


def repeat(item, size=MESSAGE - ROOM):
    return item * (size // len(item))


def empty_items(field):
    """Millions of empty sub-messages of one field."""
    return repeat(wire.varint(field << 3 | 2) + EMPTY)


# Method -> what follows its key.
BOMBS = {
    "Attend": empty_items(3),
    "RegisterModel": wire.nested(2, empty_items(3)),
    "CreateSequence": wire.nested(4, empty_items(1)),
    "Fork": wire.nested(4, empty_items(1)),
    "Match": wire.nested(5, empty_items(1)),
    "Observe": repeat(wire.nested(10, b"\1" * 126)),
    # Fields that no message has: empty groups, which a parser keeps.
    "Stats": repeat(b"\xfb\x01\xfc\x01"),
    "Free": repeat(b"\xfb\x01\xfc\x01"),
    # A known field with the wire type of another, which a parser keeps, too.
    "Describe": repeat(b"\x08\x00"),
}
FIRST_BOMBS = ("Attend", "RegisterModel", "CreateSequence", "Stats")


class ParseBombs(Attack):
    def throw(self, daemon, key, methods):
        """Sends each bomb over a connection of its own; returns the methods that answered OK."""
        taken = []
        for method in methods:
            with contextlib.suppress(OSError), Connection(daemon.socket) as connection:
                status, _ = connection.call(TESSERA + method, key + BOMBS[method], CALL_S)
                if status == OK:
                    taken.append(method)
        return taken

    def check(self, name, key_of, methods):
        daemon = self.start()
        session = self.keep(Session(daemon.socket))
        with self.growth(daemon) as growth:
            taken = self.throw(daemon, key_of(session), methods)
        self.judge_growth(name, growth)
        return taken

    def test_without_a_key(self):
        self.assertEqual(self.check("parse bombs, no key", lambda _: b"", BOMBS), [])

    def test_with_a_wrong_key(self):
        self.assertEqual(self.check("parse bombs, wrong key",
                                    lambda session: wire.session_key(session.id, 1), FIRST_BOMBS),
                         [])

    def test_with_a_right_key(self):
        self.check("parse bombs, right key", lambda session: session.key, BOMBS)

    def test_on_the_attach_stream(self):
        daemon = self.start()
        message = wire.nested(1, repeat(b"\xfb\x01\xfc\x01"))
        with self.growth(daemon) as growth, Connection(daemon.socket) as connection:
            status, _ = connection.call(TESSERA + "Attach", message, CALL_S)
        self.judge_growth("parse bomb as Hello", growth)
        self.assertNotEqual(status, OK)


class UnfinishedMessages(Attack):
    """Each stream lacks the last byte of its message."""

    def hold(self, daemon, key):
        whole = envelope(key + b"\0" * (MESSAGE - len(key)))[:-1]
        end = time.monotonic() + CALL_S
        with self.growth(daemon) as growth:
            for connection in self.spread(daemon.socket, STREAMS):
                left = end - time.monotonic()
                if left <= 0:
                    break
                connection.send_data(connection.open(TESSERA + "Append"), whole, seconds=left)
        return growth

    def test_without_a_key(self):
        daemon = self.start()
        self.judge_growth("unfinished messages, no key", self.hold(daemon, b""))

    def test_with_a_key(self):
        daemon = self.start()
        session = self.keep(Session(daemon.socket))
        self.judge_growth("unfinished messages, right key", self.hold(daemon, session.key), 320)


class Compressed(Attack):
    def test_gzip(self):
        packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        zeros = b"\0" * MIB
        packed = b"".join([*(packer.compress(zeros) for _ in range(INFLATED // MIB)),
                           packer.flush()])
        daemon = self.start()
        with self.growth(daemon) as growth, Connection(daemon.socket) as connection:
            status, _ = connection.call(TESSERA + "Stats", packed, CALL_S, flag=1,
                                        extra=[("grpc-encoding", "gzip")])
        self.judge_growth("gzip of 512 MiB of zeros", growth)
        self.assertNotEqual(status, OK)


class Kept(Attack):
    """What the daemon keeps for a session with a right key."""

    def test_models_with_long_strings(self):
        daemon = self.start()
        text = "x" * (MESSAGE - 4096)
        with self.growth(daemon) as growth, Session(daemon.socket) as session:
            for number in range(24):
                rope = wire.real(1, 10000.0) + wire.nested(3, text) + wire.real(5, 0.5)
                try:
                    session.register(wire.model(f"model{number}", 1, 1, rope=rope))
                except Refused:
                    continue
        self.judge_growth("24 models with 16 MiB of text", growth)

    def test_waiting_match_calls(self):
        daemon = self.start()
        count = 16
        ids = wire.nested(3, b"\1" * (MESSAGE - ROOM))
        with Session(daemon.socket) as computing, Session(daemon.socket) as waiting:
            model = computing.register()
            message = wire.fixed64(2, model) + ids
            with self.growth(daemon) as growth:
                before = sum(computing.used_bytes().values())
                computing.request("Match", message + wire.number(7, 1), CALL_S)
                end = time.monotonic() + CALL_S
                for _ in range(count):
                    left = end - time.monotonic()
                    if left <= 0 or waiting.connection.is_cut:
                        break
                    waiting.connection.start(
                        TESSERA + "Match", waiting.key + message + wire.number(6, 60000),
                        seconds=left)
                waiting.connection.wait(lambda: False, 0.5)
                charged = (sum(computing.used_bytes().values()) - before) // MIB
                waiting.close()
                computing.close()
        self.shows_memory = True
        self.judge(f"{count} waiting Match calls of 16 MiB", f"{growth}, charged {charged} MiB",
                   "peak <= charged + 64 MiB", growth.holds(charged + MEMORY_BAR_MIB))


class EmptySequences(Attack):
    """Sequences without a token, of a model with 16,384 lanes."""

    def test_under_mosaickv(self):
        daemon = self.start(tenants=[{"name": "default", "hard_limit_bytes": 128 * MIB}])
        session = self.keep(Session(daemon.socket))
        model = session.register(wire.model("wide", 1024, 16))
        before = daemon.rss
        made = 0
        status = OK
        end = time.monotonic() + 2 * CALL_S
        try:
            while time.monotonic() < end:
                session.create(model, "mosaickv")
                made += 1
        except Refused as refused:
            status = refused.status
        grown = (daemon.rss - before) / MIB / max(made, 1)
        cost = f"{grown:.2f} MiB each" if daemon.lives else KILLED
        self.judge("empty sequences of 16,384 lanes", f"{cost} after {made}, status {status}",
                   "<= 1.2 MiB each, then RESOURCE_EXHAUSTED",
                   daemon.lives and made > 0 and grown <= 1.2 and status == RESOURCE_EXHAUSTED)
