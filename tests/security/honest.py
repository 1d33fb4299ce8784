"""An honest worker in a process of its own: measures its calls while others attack the daemon.

Usage: honest.py ADDRESS TOKEN. It writes a line when it is ready. For each line that it reads, a
number of calls, it makes those calls and writes their figures as JSON.
"""

import json
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True

from worker import Refused, Session, rows  # noqa: E402

CALLS = 1500
PATIENCE_S = 2.0  # for one call
LIMIT_S = 4.0     # for all of a measurement
PAUSE_S = 0.002   # between rounds of calls, so that the worker itself is no load


class Honest:
    """Starts the process, and asks it for figures."""

    def __init__(self, address, token=""):
        self.process = subprocess.Popen([sys.executable, __file__, address, token],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready":
            raise AssertionError("an honest worker cannot work before the attack")

    def measure(self, calls=CALLS):
        """{"calls", "failed", "p50_ms", "p99_ms"} of its next calls."""
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Work:
    """One sequence that grows by a token at a time."""

    def __init__(self, address, token):
        self.session = Session(address, token)
        self.sequence = self.session.create(self.session.register())
        self.tokens = self.session.append(self.sequence, 0, rows(64))
        self.row = rows(1)

    def append(self):
        self.tokens = self.session.append(self.sequence, self.tokens, self.row, PATIENCE_S)

    def describe(self):
        self.session.describe(self.sequence, PATIENCE_S)

    def stats(self):
        self.session.call("Stats", seconds=PATIENCE_S)

    def measure(self, calls):
        pause = threading.Event()
        times = []
        failed = 0
        end = time.monotonic() + LIMIT_S
        while len(times) < calls and time.monotonic() < end:
            for call in self.append, self.describe, self.stats:
                begun = time.monotonic()
                try:
                    call()
                except Refused:
                    failed += 1
                times.append((time.monotonic() - begun) * 1000)
            pause.wait(PAUSE_S)
        times.sort()
        return {"calls": len(times), "failed": failed, "p50_ms": times[len(times) // 2],
                "p99_ms": times[len(times) * 99 // 100]}


def main():
    work = Work(*sys.argv[1:3])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(work.measure(int(line))), flush=True)


if __name__ == "__main__":
    main()
