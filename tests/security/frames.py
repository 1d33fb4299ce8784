"""Attacks with HTTP/2 frames: header blocks, resets, streams that stay open, unread answers."""

import concurrent.futures
import contextlib
import threading

import hpack
import wire
from attack import Attack
from daemon import MIB, until
from http2 import (CONTINUATION, END_HEADERS, HEADERS, INITIAL_WINDOW_SIZE, TESSERA,
                   UNIMPLEMENTED, Connection, envelope, frame, request_headers, reset_frame)
from worker import Session

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
WATCH = "/grpc.health.v1.Health/Watch"
ATTACK_S = 3
ATTACKERS = 4
PAUSE_S = 0.02  # before an attacker that was cut comes again
HEADER_BYTES = 30 * MIB
RESETS = 20_000
STREAMS = 600
THREADS_BAR = 128
FRAME = 16384
TENANTS = [{"name": "alice", "token": "a-token"}, {"name": "bob", "token": "b-token"}]


def header_bomb():
    """One header of 30 MiB, in CONTINUATION frames."""
    block = (request_headers(TESSERA + "Stats") + b"\0" + hpack.encode_integer(1, 7, 0) + b"x"
             + hpack.encode_integer(HEADER_BYTES, 7, 0) + b"y" * HEADER_BYTES)
    parts = [block[at:at + FRAME] for at in range(0, len(block), FRAME)]
    return b"".join(
        frame(HEADERS if number == 0 else CONTINUATION,
              END_HEADERS if number == len(parts) - 1 else 0, 1, part)
        for number, part in enumerate(parts))


class HeaderBlocks(Attack):
    def test_one_connection(self):
        daemon = self.start()
        connection = self.keep(Connection(daemon.socket))
        before = daemon.cpu_s
        connection.send(header_bomb(), ATTACK_S)
        connection.wait(lambda: connection.is_cut, 1)
        cost = daemon.cpu_s - before
        cut = "cut" if connection.is_cut else "not cut"
        self.judge("header of 30 MiB", f"{cost:.1f} s CPU within {ATTACK_S + 1} s, {cut}",
                   "< 1 s CPU, connection cut", cost < 1 and connection.is_cut)

    def test_beside_an_honest_worker(self):
        daemon = self.start()
        honest = self.honest(daemon.socket)
        bomb = header_bomb()
        done = threading.Event()
        at_work = set()  # attackers that were cut or have sent much

        def send_again_and_again(number):
            while not done.is_set():
                with contextlib.suppress(OSError), Connection(daemon.socket) as connection:
                    for at in range(0, len(bomb), MIB):
                        if done.is_set() or not connection.send(bomb[at:at + MIB], ATTACK_S):
                            break
                        if at > len(bomb) // 4:
                            at_work.add(number)
                at_work.add(number)
                done.wait(PAUSE_S)

        with concurrent.futures.ThreadPoolExecutor(ATTACKERS) as pool:
            for number in range(ATTACKERS):
                pool.submit(send_again_and_again, number)
            until(lambda: len(at_work) == ATTACKERS, ATTACK_S)
            figures = honest.measure()
            done.set()
            daemon.process.kill()  # an attacker may wait for a daemon that does not read
        self.judge_honest(f"headers of 30 MiB on {ATTACKERS} connections", figures)


class RapidReset(Attack):
    def test_rapid_reset(self):
        daemon = self.start()
        connection = self.keep(Connection(daemon.socket))
        headers = request_headers(TESSERA + "Stats")
        before = daemon.cpu_s
        sent = 0
        while sent < RESETS and not connection.is_cut:
            batch = range(sent, sent + 500)
            connection.send(b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, headers)
                                     + reset_frame(2 * number + 1) for number in batch))
            sent = batch.stop
        connection.wait(lambda: connection.is_cut, 2)
        cost = daemon.cpu_s - before
        self.judge(f"{RESETS:,} streams opened and reset",
                   f"{'cut' if connection.is_cut else 'not cut'} after {sent:,}, {cost:.2f} s CPU",
                   "connection cut, < 0.5 s CPU", connection.is_cut and cost < 0.5)


class OpenStreams(Attack):
    def hold(self, daemon, path, request=None, settings=None):
        """Opens streams on several connections, and leaves them open."""
        for connection in self.spread(daemon.socket, STREAMS, settings):
            stream = connection.open(path)
            if request is not None:
                connection.send_data(stream, envelope(request), end=True)

    def test_reflection(self):
        daemon = self.start()
        honest = self.honest(daemon.socket)
        self.hold(daemon, REFLECTION)
        figures = honest.measure()
        connection = self.keep(Connection(daemon.socket))
        status, _ = connection.call(REFLECTION, wire.nested(7, ""), 1)
        self.judge_honest(f"{STREAMS} open reflection streams", figures, f", status {status}",
                          f", status {UNIMPLEMENTED}", status == UNIMPLEMENTED)

    def test_health_watch(self):
        daemon = self.start()
        honest = self.honest(daemon.socket)
        self.hold(daemon, WATCH, b"")
        self.judge_honest(f"{STREAMS} open Health Watch streams", honest.measure())

    def test_unread_answers(self):
        daemon = self.start(tenants=TENANTS)
        honest = self.honest(daemon.socket, "a-token")
        bob = self.keep(Session(daemon.socket, "b-token"))
        self.hold(daemon, TESSERA + "Stats", bob.key, {INITIAL_WINDOW_SIZE: 0})
        figures = honest.measure()
        threads = daemon.threads
        self.judge_honest(f"{STREAMS} answers that bob does not read", figures,
                          f", {threads} threads", f", < {THREADS_BAR} threads",
                          threads < THREADS_BAR)
