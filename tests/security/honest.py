"""An honest worker in a process of its own: measures its calls while others attack the daemon.

Usage: honest.py ADDRESS TOKEN. It writes a line when it works, and figures as JSON when its
standard input is closed.
"""

import json
import select
import subprocess
import sys
import time

sys.dont_write_bytecode = True

from worker import Refused, Session, rows  # noqa: E402

PATIENCE_S = 2.0
PAUSE_S = 0.002


class Honest:
    """Starts the process, and reads its figures."""

    def __init__(self, address, token=""):
        self.process = subprocess.Popen([sys.executable, __file__, address, token],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready":
            raise AssertionError("an honest worker cannot work before the attack")

    def finish(self):
        """{"calls", "failed", "p50_ms", "p99_ms"} of the time until now."""
        self.process.stdin.close()
        figures = json.loads(self.process.stdout.read())
        self.process.wait()
        return figures

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def work(address, token):
    session = Session(address, token)
    sequence = session.create(session.register())
    tokens = session.append(sequence, 0, rows(64))
    one = rows(1)
    calls = (lambda: session.append(sequence, tokens, one, PATIENCE_S),
             lambda: session.describe(sequence, PATIENCE_S),
             lambda: session.call("Stats", seconds=PATIENCE_S))
    print("ready", flush=True)
    times = []
    failed = 0
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        for call in calls:
            begun = time.monotonic()
            try:
                answer = call()
                tokens = answer if isinstance(answer, int) else tokens
            except Refused:
                failed += 1
            times.append(time.monotonic() - begun)
    times.sort()
    print(json.dumps({"calls": len(times), "failed": failed,
                      "p50_ms": times[len(times) // 2] * 1000,
                      "p99_ms": times[len(times) * 99 // 100] * 1000}))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
