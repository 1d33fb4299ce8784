"""Starts programs on free ports, waits for them with a deadline, and ends what it started."""

import json
import pathlib
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

POLL_S = 0.05


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(what, deadline_s, attempt):
    """Repeats `attempt` until it returns something true, which is returned."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        found = attempt()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        pause.wait(POLL_S)


def get(url, **parameters):
    """The body of an HTTP answer, or None where nobody answers."""
    if parameters:
        url += "?" + urllib.parse.urlencode(parameters)
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


class Programs:
    """Processes with their logs in a folder; none outlives `close`."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.running = []
        self.newest = {}

    def start(self, name, command):
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL)
        self.running.append(process)
        self.newest[name] = process
        return process

    def has_ended(self, name):
        return self.newest[name].poll() is not None

    def run(self, name, command, code=0, timeout_s=60):
        """Runs a program that ends by itself, with an exit code that is expected."""
        self.check(name, self.start(name, command), code, timeout_s)

    def check(self, name, process, code=0, timeout_s=60):
        found = process.wait(timeout_s)
        if found != code:
            raise AssertionError(f"{name} ended with {found}, not {code}: {self.log(name)[-500:]}")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self):
        """The end of every program's log, for whoever looks into a failure."""
        return "\n".join(f"---- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
                         for file in sorted(self.folder.glob("*.log")))

    def close(self):
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.running:
            process.wait()


class Prometheus:
    """Queries of a running Prometheus."""

    def __init__(self, url):
        self.url = url

    def call(self, path, **parameters):
        url = f"{self.url}/api/v1/{path}?" + urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def instant(self, expr, at=None):
        """[(labels, [(time, value)])], as `range` returns it."""
        moment = {"time": at} if at is not None else {}
        data = self.call("query", query=expr, **moment)
        if data["resultType"] == "scalar":
            return [({}, [sample(data["result"])])]
        return [(row["metric"], [sample(row["value"])]) for row in data["result"]]

    def range(self, expr, start, end, step):
        data = self.call("query_range", query=expr, start=start, end=end, step=step)
        return [(row["metric"], [sample(one) for one in row["values"]])
                for row in data["result"]]


def sample(pair):
    return float(pair[0]), float(pair[1])
