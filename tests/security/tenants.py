"""Attacks by workers that may attach, and by those that guess tokens."""

import sys
import time
import unittest

import wire
from attack import KILLED, Attack
from daemon import MIB, until, why_unlimited
from frames import TENANTS
from http2 import (OK, PERMISSION_DENIED, RESOURCE_EXHAUSTED, TESSERA, Connection, envelope)
from worker import Refused, Session, rows

ATTACK_S = 4
GUESSES = 8  # at once on a connection; more are cut
GUESSING = 3  # connections
ATTACHES = 600
SESSIONS_PER_CONNECTION = 16
ATTACH_LOG_BAR = 100  # lines a second


def fill(session, seconds):
    """Appends until the daemon refuses; returns the MiB appended, and the last status."""
    layers, kv_heads, tokens = 8, 8, 512
    model = session.register(wire.model("large", layers, kv_heads))
    chunk = rows(tokens, layers, kv_heads)
    appended = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            sequence = session.create(model)
            for first in range(0, 8 * tokens, tokens):
                session.append(sequence, first, chunk)
                appended += 2 * len(chunk)
        except Refused as refused:
            return appended // MIB, refused.status
    return appended // MIB, OK


class GreedyTenant(Attack):
    """No tenant has limits of its own."""

    def open_sessions(self, daemon):
        """Opens sessions until the daemon refuses one."""
        sessions = []
        connection = None
        end = time.monotonic() + ATTACK_S
        while time.monotonic() < end:
            if len(sessions) % SESSIONS_PER_CONNECTION == 0:
                connection = self.keep(Connection(daemon.socket))
            try:
                sessions.append(Session(daemon.socket, "b-token", connection))
            except Refused:
                break
        return sessions

    def test_two_tenants(self):
        daemon = self.start(kept_mib=32, tenants=TENANTS)
        bob = self.open_sessions(daemon)
        appended, _ = fill(bob[0], ATTACK_S)
        begun = time.monotonic()
        try:
            alice = self.keep(Session(daemon.socket, "a-token"))
            alice.append(alice.create(alice.register()), 0, rows(64))
            done, held = f"{(time.monotonic() - begun) * 1000:.0f} ms", True
        except Refused as refused:
            done, held = str(refused).partition(" ")[0] + f" status {refused.status}", False
        held = held and time.monotonic() - begun < 1
        self.judge("bob takes all sessions and the pool",
                   f"alice: {done} (bob has {len(bob)} sessions, {appended} MiB)",
                   "alice attaches and appends within 1 s", held)


class Tokens(Attack):
    def test_wrong_tokens(self):
        daemon = self.start(tenants=TENANTS)
        lines = daemon.log().count("\n")
        connections = [self.keep(Connection(daemon.socket)) for _ in range(GUESSING)]
        begun = time.monotonic()
        streams = {connection: [connection.open(TESSERA + "Attach") for _ in range(GUESSES)]
                   for connection in connections}
        for connection, mine in streams.items():
            for number, stream in enumerate(mine):
                connection.send_data(stream, envelope(wire.hello(f"guess-{number}")))
        for connection, mine in streams.items():
            connection.wait(lambda mine=mine: all(stream.ended for stream in mine), 5)
        streams = sum(streams.values(), [])
        rate = len(streams) / (time.monotonic() - begun)
        logged = daemon.log().count("\n") - lines
        counted = until(lambda: daemon.metric("tessera_attach_refused_total"), 0.5) or 0
        refused = sum(stream.status == PERMISSION_DENIED for stream in streams)
        self.judge(f"{len(streams)} wrong tokens on {GUESSING} connections",
                   f"{rate:.0f} a second, {counted:.0f} counted, {logged} log lines",
                   "<= 15 a second, all counted, 1 to 5 log lines",
                   rate <= 15 and counted == refused > 0 and 1 <= logged <= 5)


class Attaching(Attack):
    def test_in_a_loop(self):
        daemon = self.start()
        lines = daemon.log().count("\n")
        begun = time.monotonic()
        made = 0
        while made < ATTACHES and time.monotonic() < begun + ATTACK_S:
            Session(daemon.socket).close()
            made += 1
        seconds = time.monotonic() - begun
        logged = daemon.log().count("\n") - lines
        bar = ATTACH_LOG_BAR * (seconds + 1)
        self.judge("attaching in a loop",
                   f"{logged} log lines of {made} attaches in {seconds:.1f} s",
                   f"<= {ATTACH_LOG_BAR} lines a second, and of a second more", logged <= bar)


class DefaultFlags(Attack):
    """A well-behaved tenant fills a daemon with default sizes, in a container."""

    def check(self, gib, seconds):
        if why_unlimited():
            raise unittest.SkipTest(why_unlimited())
        daemon = self.start(limit_bytes=gib << 30, defaults=True, kept_mib=64)
        session = self.keep(Session(daemon.socket))
        appended, status = fill(session, seconds)
        ending = f"status {status}" if daemon.lives else KILLED
        self.judge(f"default flags in {gib} GiB, filled", f"{ending} at {appended} MiB",
                   "RESOURCE_EXHAUSTED, the daemon lives",
                   daemon.lives and status == RESOURCE_EXHAUSTED)

    def test_small(self):
        self.check(1, 15)

    @unittest.skipUnless("--long" in sys.argv, "takes half a minute; --long runs it")
    def test_large(self):
        self.check(4, 45)
