"""Attacks with whole, valid messages and frames: more of them than anybody reads or answers."""

import concurrent.futures
import contextlib
import struct
import threading

import wire
from attack import Attack
from daemon import MIB, until
from frames import TENANTS, WATCH
from http2 import (ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE,
                   SETTINGS, TESSERA, WINDOW_UPDATE, Connection, envelope, frame,
                   request_headers, reset_frame)
from worker import Session, rows

ATTACKERS = 2
PAUSE_S = 0.02
CUT_S = 3
# What a peer without a token repeats. Each of these frames is cheap to send.
FRAMES = {
    "GOAWAY frames": frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)) * 8000,
    "headers on stream 2": frame(HEADERS, END_HEADERS, 2, b"") * 8000,
    "data of one byte": frame(DATA, 0, 1, b"x") * 8000,
    "window updates": frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 8000,
    "acknowledgements": frame(SETTINGS, ACK, 0, b"") * 8000,
}


class Unread(Attack):
    def test_messages_behind_a_request(self):
        """Health Watch takes one message; more of them wait in the daemon."""
        daemon = self.start()
        filler = envelope(b"\0" * 65531) * 63
        with self.growth(daemon) as growth:
            for connection in self.spread(daemon.socket, 32):
                connection.send_data(connection.open(WATCH), envelope(b"") + filler, seconds=0.1)
        self.judge_growth("4 MiB behind each of 32 Watch requests", growth)

    def test_large_answers(self):
        daemon = self.start(kept_mib=64, pool_bytes=256 * MIB)  # an extent
        session = self.keep(Session(daemon.socket))
        sequence = session.create(session.register())
        tokens, row = 0, rows(6000)
        while tokens < 100_000:
            tokens = session.append(sequence, tokens, row, 10)
        request = envelope(session.key + wire.fixed64(2, sequence) + wire.number(4, 1))
        with self.growth(daemon) as growth:
            for connection in self.spread(daemon.socket, 200, {INITIAL_WINDOW_SIZE: 0}):
                connection.send_data(connection.open(TESSERA + "Describe"), request, end=True)
            connection.wait(lambda: not daemon.lives, CUT_S)
        self.judge_growth("200 Describe answers of 1 MiB that nobody reads", growth, 160)


class Frames(Attack):
    def flood(self, daemon, payload, done):
        while not done.is_set():
            with contextlib.suppress(OSError), Connection(daemon.socket) as connection:
                connection.wait(lambda one=connection: one.is_configured, 1)
                connection.send(frame(HEADERS, END_HEADERS, 1, request_headers("/x"))
                                + reset_frame(1))
                while not done.is_set() and connection.send(payload, CUT_S):
                    pass
            done.wait(PAUSE_S)

    def test_without_a_token(self):
        for name, payload in FRAMES.items():
            with self.subTest(name):
                daemon = self.start()
                honest = self.honest(daemon.socket)
                done = threading.Event()
                with concurrent.futures.ThreadPoolExecutor(ATTACKERS) as pool:
                    for _ in range(ATTACKERS):
                        pool.submit(self.flood, daemon, payload, done)
                    until(lambda: daemon.metric("tessera_connections_refused_total") > 1, CUT_S)
                    figures = honest.measure()
                    done.set()
                self.judge_honest(f"a flood of {name}", figures)


class UnacknowledgedSettings(Connection):
    def handle(self, kind, flags, number, payload):
        if kind == SETTINGS and not flags & ACK:
            self.apply(payload)
        else:
            super().handle(kind, flags, number, payload)


class Settings(Attack):
    def test_streams_before_an_acknowledgement(self):
        """gRPC limits the streams of those who have acknowledged its limit."""
        daemon = self.start()
        connection = self.keep(UnacknowledgedSettings(daemon.socket))
        Session(daemon.socket, connection=connection)
        headers, opened = request_headers(WATCH), 0
        with self.growth(daemon) as growth:
            while opened < 20_000 and not connection.is_cut:
                for _ in range(500):
                    connection.send(frame(HEADERS, END_HEADERS, connection.next_id, headers)
                                    + frame(DATA, END_STREAM, connection.next_id, envelope(b"")))
                    connection.next_id += 2
                opened += 500
                connection.exchange(0)
        self.judge("20,000 Watch streams, settings not acknowledged",
                   f"{'cut' if connection.is_cut else 'not cut'} after {opened:,}, {growth}",
                   "connection cut, peak <= +64 MiB", connection.is_cut and growth.holds())


class Guesses(Attack):
    def test_on_a_stream_that_has_ended(self):
        """The right token is the last guess: whoever finds it may open more streams."""
        daemon = self.start(tenants=TENANTS)
        connection = self.keep(Connection(daemon.socket))
        connection.wait(lambda: connection.is_configured, 1)
        stream = connection.open("/x/y")
        connection.wait(lambda: stream.ended, 1)
        guesses = [f"wrong{number}" for number in range(10_000)] + ["b-token"]
        data = b"".join(envelope(wire.hello(guess)) for guess in guesses)
        for at in range(0, len(data), 16384):
            if connection.is_cut or not connection.send(
                    frame(DATA, 0, stream.id, data[at:at + 16384]), CUT_S):
                break
        for number in range(40):
            connection.send(frame(HEADERS, END_HEADERS, connection.next_id + 2 * number,
                                  request_headers(TESSERA + "Attach")))
        connection.wait(lambda: connection.is_cut, 1)
        self.judge("10,000 tokens guessed on one stream",
                   "not found, cut" if connection.is_cut else "found", "not found, cut",
                   connection.is_cut)


class OtherTenants(Attack):
    def test_unfinished_messages_of_another(self):
        daemon = self.start(max_sessions=64, tenants=[
            {"name": f"t{number}", "token": f"token{number}"} for number in range(16)])
        session = self.keep(Session(daemon.socket, "token1"))
        sequence = session.create(session.register())
        row = rows(6000)
        session.append(sequence, 0, row, 10)
        greedy = self.keep(Session(daemon.socket, "token0"))
        message = envelope(greedy.key + b"\0" * (15 * MIB))[:-1]
        for _ in range(8):
            if not greedy.connection.is_cut:
                stream = greedy.connection.open(TESSERA + "Append")
                greedy.connection.send_data(stream, message, seconds=CUT_S)
        tokens = session.append(sequence, 6000, row, 10)
        self.judge("120 MiB of unfinished messages of one of 16 tenants",
                   f"another appends to {tokens:,} tokens", "another appends to 12,000 tokens",
                   tokens == 12_000)


class Together(Attack):
    """Honest: workers of a tenant send more at once than it may have in memory."""

    WORKERS, CALLS = 6, 4

    def test_workers_append_at_once(self):
        daemon = self.start(pool_bytes=768 * MIB)
        row = rows(8000)  # messages of 16 MiB less a little: 384 MiB in all
        sessions = [self.keep(Session(daemon.socket)) for _ in range(self.WORKERS)]
        models = [session.register() for session in sessions]
        start = threading.Barrier(self.WORKERS)

        def work(session, model):
            sequences = [session.create(model) for _ in range(self.CALLS)]
            start.wait(5)
            streams = []
            for sequence in sequences:
                message = (session.key + wire.fixed64(2, sequence) + wire.number(5, 0)
                           + wire.nested(6, row) + wire.nested(7, row))
                stream = session.connection.open(TESSERA + "Append")
                session.connection.send_data(stream, envelope(message)[:-1], seconds=30)
                streams.append((stream, envelope(message)[-1:]))
            for stream, last in streams:
                session.connection.send_data(stream, last, end=True, seconds=30)
            answers = [session.connection.finish(stream, 30)[0] for stream, _ in streams]
            return answers, session.connection.is_cut

        with concurrent.futures.ThreadPoolExecutor(self.WORKERS) as pool:
            ended = list(pool.map(work, sessions, models))
        cut = sum(is_cut for _, is_cut in ended)
        done = sum(answers.count(0) for answers, _ in ended)
        self.judge(f"{self.WORKERS} workers append {self.CALLS} x 15 MiB at once",
                   f"{done} of {self.WORKERS * self.CALLS} done, {cut} sessions lost",
                   "no session lost, a quarter done",
                   cut == 0 and done >= self.WORKERS * self.CALLS // 4)
