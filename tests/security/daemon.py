"""A daemon under attack: its configuration, its memory cgroup, and what /proc says of it."""

import functools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

MIB = 1 << 20
GIB = 1 << 30
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
V1, V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")


def until(attempt, seconds, pause_s=0.02):
    """Repeats `attempt` until it returns something true, or for so long; returns its result."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        found = attempt()
        if found or time.monotonic() > end:
            return found
        pause.wait(pause_s)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class MemoryGroup:
    """A cgroup of version 1 or 2 with a memory limit. OSError where it cannot be made."""

    def __init__(self, limit_bytes):
        name = f"tessera-security-{os.getpid()}-{id(self)}"
        if (V1 / "memory.limit_in_bytes").exists():
            self.folder, limit = V1 / name, "memory.limit_in_bytes"
        else:
            self.folder, limit = V2 / name, "memory.max"
        self.folder.mkdir()
        try:
            (self.folder / limit).write_text(str(limit_bytes))
        except OSError:
            self.remove()
            raise

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        until(self.is_removed, 5)

    def is_removed(self):
        try:
            self.folder.rmdir()
        except OSError:
            return False
        return True


@functools.cache
def why_unlimited():
    """Why daemons run without a memory limit here; empty: they have one."""
    try:
        MemoryGroup(GIB).remove()
    except OSError as error:
        reason = f"a memory cgroup cannot be made: {error}"
        print(f"daemons run without a memory limit: {reason}", file=sys.stderr)
        return reason
    return ""


class Daemon:
    """One tesserad in a folder of its own. `close` ends it, whatever has become of it."""

    build = None  # the build directory

    def __init__(self, limit_bytes=2 * GIB, descriptors=None, stderr=None, defaults=False,
                 **config):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-attack-"))
        self.socket = f"unix:{self.folder}/d.sock"
        self.admin = f"{self.socket}.admin"
        self.tcp = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        own = {"listen": [self.socket, self.tcp], "metrics_address": self.metrics,
               "device": "cpu"}
        if not defaults:
            own |= {"pool_bytes": 512 * MIB, "host_tier_bytes": 64 * MIB,
                    "raw_copy_bytes": 64 * MIB, "staging_bytes": 2 * MIB,
                    "pool_extent_bytes": 16 * MIB}
        self.config = self.folder / "tesserad.json"
        self.config.write_text(json.dumps(own | config))
        self.group = None
        self.process = None
        try:
            if not why_unlimited():
                self.group = MemoryGroup(limit_bytes)
            self.start(descriptors, stderr)
        except BaseException:
            self.close()
            raise

    def start(self, descriptors, stderr):
        def prepare():
            if self.group is not None:
                self.group.enter()
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [self.build / "bin/tesserad", f"--config={self.config}"], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log if stderr is None else stderr, preexec_fn=prepare)
        if not until(lambda: self.scrape("/readyz") is not None or not self.lives, 10):
            raise AssertionError("the daemon is not ready within 10 s")
        if not self.lives:
            raise AssertionError(f"the daemon does not start: {self.log()[-500:]}")

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.group is not None:
            self.group.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def terminate(self, seconds):
        """Asks it to end; whether it does in time."""
        self.process.send_signal(signal.SIGTERM)
        return bool(until(lambda: not self.lives, seconds))

    @property
    def lives(self):
        """False from its death on, also while the kernel still takes it down."""
        return self.process.poll() is None and self.rss > 0

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def scrape(self, page="/metrics", seconds=5):
        """A page of the HTTP address, or None where nothing answers in time."""
        try:
            with urllib.request.urlopen(f"http://{self.metrics}{page}", timeout=seconds) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, OSError):
            return None

    def metric(self, name):
        """The sum of a metric over its labels, or None where it is missing."""
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.scrape() or "", re.MULTILINE)
        return sum(map(float, rows)) if rows else None

    # ---- What the kernel says ------------------------------------------------------------------

    def proc(self, name):
        try:
            return pathlib.Path(f"/proc/{self.process.pid}/{name}").read_text()
        except OSError:
            return ""

    def status(self, name):
        match = re.search(rf"^{name}:\s+(\d+)", self.proc("status"), re.MULTILINE)
        return int(match[1]) if match else 0

    @property
    def rss(self):
        return self.status("VmRSS") * 1024

    @property
    def peak(self):
        """The largest RSS since `reset_peak`."""
        return self.status("VmHWM") * 1024

    def reset_peak(self):
        pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def threads(self):
        return self.status("Threads")

    @property
    def descriptors(self):
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/fd"))
        except OSError:
            return 0

    @property
    def cpu_s(self):
        words = self.proc("stat").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * TICK_S if words else 0.0
