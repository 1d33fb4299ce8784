"""A program on a terminal of its own: what it shows, and how it leaves the terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """Starts a command on a pseudo terminal. `screen` holds what it shows, line by line."""

    def __init__(self, command, columns=80, rows=24, environment=None):
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        self.raw = b""
        self.screen = [""] * rows
        self.seen = 0  # of `raw`, by the emulation

        def own_terminal():
            os.setsid()
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, close_fds=True,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            preexec_fn=own_terminal)

    def resize(self, columns, rows):
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys):
        os.write(self.master, keys)

    def read(self, seconds=0.05):
        if select.select([self.master], [], [], seconds)[0]:
            self.raw += os.read(self.master, 1 << 16)

    def wait_for(self, condition, what, seconds=20):
        """Reads until the condition holds, which is asked about the lines of the last frame."""
        deadline = time.monotonic() + seconds
        while not condition(self.frame()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {seconds} s: {what}; the last frame:\n"
                                     + "\n".join(self.frame()))
            self.read()

    def frame(self):
        """The lines of the newest complete frame, with colours, exactly as they were written."""
        text = self.raw.decode("utf-8", "replace")
        end = text.rfind("\x1b[J")
        start = text.rfind("\x1b[H", 0, max(end, 0))
        if end < 0 or start < 0:
            return []
        # The terminal writes another "\r" before each "\n".
        return [line.replace("\x1b[K", "").rstrip("\r")
                for line in text[start + 3:end].split("\n")]

    def finish(self, seconds=20):
        """Waits for the exit status, and reads what is left."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"still running after {seconds} s")
            self.read()
        while select.select([self.master], [], [], 0)[0]:
            self.read()
        return self.process.returncode

    def is_restored(self):
        """Whether the alternate screen was left, the cursor is shown, and keys echo as before."""
        return (self.raw.count(ENTER) == self.raw.count(LEAVE)
                and self.raw.count(b"\x1b[?25l") == self.raw.count(b"\x1b[?25h")
                and termios.tcgetattr(self.slave) == self.before)

    def close(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)
