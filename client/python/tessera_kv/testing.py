"""A daemon for tests and examples: a tesserad of its own in a temporary folder."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType

# The tesserad that `Daemon` starts, if it is set; else that of PATH.
VARIABLE = "TESSERAD"


def _answers(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(path))
            return True
        except OSError:
            return False


class Daemon:
    """Runs tesserad on host memory until the context is left. `address` is for `attach`."""

    def __init__(self, *flags: str, binary: str = "") -> None:
        program = binary or os.environ.get(VARIABLE) or shutil.which("tesserad")
        if program is None:
            raise FileNotFoundError(f"tesserad was not found: install it, or set {VARIABLE}")
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-")
        path = pathlib.Path(self._folder.name)
        self.address = f"unix:{path}/tesserad.sock"
        self.log = path / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [program, f"--listen={self.address}", "--metrics=", "--device=cpu",
                 "--pool-bytes=512MiB", *flags],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )
        self._wait(path / "tesserad.sock")

    def _wait(self, path: pathlib.Path) -> None:
        deadline = time.monotonic() + 30
        while not _answers(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text(errors="replace")
                self.close()
                raise RuntimeError(f"tesserad did not start:\n{text}")
            time.sleep(0.005)

    def kill(self) -> None:
        """As a crash would: no good-bye to workers."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
