"""Attacks on the process and its surroundings: descriptors, log, metrics, files, memory."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest

from attack import Attack
from daemon import MIB, free_port, until
from http2 import PREFACE, Connection, connect
from worker import Refused, Session, rows

HEALTH = "/tessera.v1.TesseraHealth/Check"
MARKER = bytes.fromhex("4a5b") * 64  # a row of one bf16 value
SEARCHED = MARKER[:32]
TOKENS = 1024
ATTACHES = 200


class Descriptors(Attack):
    def test_they_run_out(self):
        daemon = self.start(descriptors=256)
        flood = []
        for _ in range(400):
            try:
                flood.append(connect(daemon.tcp, 1))
                flood[-1].sendall(PREFACE)
            except OSError:
                break
        until(lambda: daemon.descriptors >= 250, 0.5)
        for raw in flood:
            raw.close()
        begun = time.monotonic()

        def is_served():
            try:
                with Connection(daemon.tcp) as connection:
                    return connection.call(HEALTH, seconds=0.5)[0] is not None
            except OSError:
                return False

        served = until(is_served, 3)
        seconds = time.monotonic() - begun
        self.judge("400 TCP connections at a limit of 256",
                   f"served {seconds:.1f} s after they closed" if served else "not served again",
                   "served within 2 s", served and seconds < 2)


class OtherHost:
    """A network namespace whose only way here is a virtual cable: a host that can vanish."""

    NUMBERS = itertools.count()
    HERE, THERE = "198.18.77.1", "198.18.77.2"  # of a range for tests of networks

    def __init__(self):
        name = f"tessera{os.getpid()}{next(self.NUMBERS)}"
        self.name, self.ours, self.theirs = name, f"{name[-9:]}a", f"{name[-9:]}b"
        self.run("netns", "add", name)
        self.run("link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns",
                 name)
        self.run("address", "add", f"{self.HERE}/30", "dev", self.ours)
        self.run("link", "set", self.ours, "up")
        self.run("-n", name, "address", "add", f"{self.THERE}/30", "dev", self.theirs)
        self.run("-n", name, "link", "set", self.theirs, "up")

    @staticmethod
    def run(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    @contextlib.contextmanager
    def inside(self):
        """Sockets that this thread makes are sockets of the other host."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with open("/proc/thread-self/ns/net", "rb") as here, \
                open(f"/run/netns/{self.name}", "rb") as there:
            if setns(there.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                setns(here.fileno(), 0)

    def vanish(self):
        self.run("-n", self.name, "link", "set", self.theirs, "down")

    def close(self):
        self.run("link", "delete", self.ours)
        self.run("netns", "delete", self.name)


class Vanishing(Attack):
    LIMIT_S = 5

    def test_a_workers_host(self):
        try:
            host = self.keep(OtherHost())
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(f"a network namespace cannot be made: {error}")
        address = f"{host.HERE}:{free_port()}"
        daemon = self.start(listen=[address], tcp_peer_limit_ms=1000 * self.LIMIT_S)
        with host.inside():
            self.keep(Session(address))
        self.assertEqual(daemon.metric("tessera_sessions"), 1)
        host.vanish()
        begun = time.monotonic()
        until(lambda: daemon.metric("tessera_sessions") == 0, 4 * self.LIMIT_S)
        seconds = time.monotonic() - begun
        self.judge(f"a worker's host vanishes, --tcp-peer-limit-ms={1000 * self.LIMIT_S}",
                   f"session ended after {seconds:.0f} s", f"<= {self.LIMIT_S + 2} s",
                   seconds <= self.LIMIT_S + 2)


WORKER = """
import select, sys, time
import tessera_kv
worker = tessera_kv.attach(sys.argv[1], map_memory=False)
print("attached", flush=True)
poll = select.poll()
poll.register(worker.events_fd(), select.POLLIN)
poll.poll(60000)
print([event.kind for event in worker.events()], flush=True)
"""


class VanishingDaemon(Attack):
    LIMIT_S = 30

    def test_the_daemons_host(self):
        try:
            host = self.keep(OtherHost())
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(f"a network namespace cannot be made: {error}")
        address = f"{host.HERE}:{free_port()}"
        daemon = self.start(listen=[address])
        package = pathlib.Path(__file__).resolve().parents[2] / "client/python"
        environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1",
                       "TESSERA_LIBRARY": str(daemon.build / "client/libtessera.so")}
        worker = subprocess.Popen(
            ["ip", "netns", "exec", host.name, sys.executable, "-c", WORKER, address],
            stdout=subprocess.PIPE, text=True, env=environment)
        self.addCleanup(worker.stdout.close)
        self.addCleanup(worker.wait)
        self.addCleanup(worker.kill)
        self.assertEqual(worker.stdout.readline(), "attached\n")
        host.vanish()
        begun = time.monotonic()
        seen = worker.stdout.readline()
        seconds = time.monotonic() - begun
        self.judge("the daemon's host vanishes",
                   f"the worker learns it after {seconds:.0f} s", f"<= {self.LIMIT_S + 2} s",
                   "lease_lost" in seen and seconds <= self.LIMIT_S + 2)


class Log(Attack):
    def test_unread(self):
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        self.addCleanup(os.close, reader)
        daemon = self.start(stderr=writer)
        os.close(writer)
        made = 0
        try:
            for _ in range(ATTACHES):
                Session(daemon.socket, seconds=1).close()
                made += 1
        except Refused:
            pass
        begun = time.monotonic()
        ended = daemon.terminate(3)
        seconds = time.monotonic() - begun
        self.judge("an unread log",
                   f"{made} attaches, {'ended in' if ended else 'SIGTERM ignored for'} "
                   f"{seconds:.1f} s", f"{ATTACHES} attaches, ended within 3 s",
                   made == ATTACHES and ended)


class Metrics(Attack):
    def test_half_requests(self):
        daemon = self.start()
        for _ in range(200):
            half = self.keep(connect(daemon.metrics))
            with contextlib.suppress(OSError):  # it may be closed already
                half.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        begun = time.monotonic()
        page = daemon.scrape(seconds=3)
        seconds = time.monotonic() - begun
        self.judge("200 half requests to the metrics port",
                   f"a scrape takes {seconds:.2f} s" if page else "no scrape within 3 s",
                   "a scrape within 1 s", page is not None and seconds < 1)


class Files(Attack):
    def test_key_file_that_others_may_read(self):
        if shutil.which("openssl") is None:
            raise unittest.SkipTest("openssl is not installed")
        daemon = self.start()
        key, certificate = daemon.folder / "key.pem", daemon.folder / "certificate.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost",
                        "-keyout", key, "-out", certificate], check=True, capture_output=True)
        codes = {}
        for mode in 0o600, 0o644:
            key.chmod(mode)
            codes[mode] = subprocess.run(
                [daemon.build / "bin/tesserad", "--check-config", f"--tls-key-file={key}",
                 f"--tls-certificate-file={certificate}", "--listen=127.0.0.1:0"],
                check=False, capture_output=True).returncode
        self.judge("TLS key file of mode 0644", "taken" if codes[0o644] == 0 else "refused",
                   "refused, and taken with 0600", codes[0o600] == 0 != codes[0o644])


class Traces(Attack):
    def count_markers(self, daemon):
        """Rows of the marker in the daemon's writable memory."""
        count = 0
        with open(f"/proc/{daemon.process.pid}/mem", "rb", buffering=0) as memory:
            for line in daemon.proc("maps").splitlines():
                match = re.match(r"(\w+)-(\w+) rw", line)
                if match is None:
                    continue
                at, end = (int(word, 16) for word in match.groups())
                while at < end:
                    try:
                        memory.seek(at)
                        data = memory.read(min(64 * MIB, end - at))
                    except OSError:  # a guard page, or memory of a device
                        break
                    if not data:
                        break
                    count += data.count(SEARCHED)
                    at += len(data)
        return count

    @unittest.skipIf(os.geteuid() != 0, "reading a process's memory needs root")
    def test_rows_after_free(self):
        daemon = self.start(kept_mib=128, pool_bytes=128 * MIB)  # the search touches it
        session = self.keep(Session(daemon.socket))
        sequence = session.create(session.register())
        for first in range(0, TOKENS, 128):
            session.append(sequence, first, rows(128, value=MARKER[:2]))
        self.assertGreater(self.count_markers(daemon), 0, "no marker is found while they are held")
        session.free(sequence)
        session.close()
        left = 1

        def is_clean():
            nonlocal left
            left = self.count_markers(daemon)
            return left == 0

        until(is_clean, 2, 0.2)
        self.judge("rows in memory after Free", f"{left:,} pieces of 32 bytes", "none", left == 0)
