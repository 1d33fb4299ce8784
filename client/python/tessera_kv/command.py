"""The command `tessera`: a function of the wheel's library."""

from __future__ import annotations

import ctypes
import os
import sys

from . import _library


def main() -> int:
    """Runs the command with the arguments of this process. Returns its exit status."""
    command = getattr(_library.slow, "tessera_command", None)
    if command is None:
        print(
            f"tessera: {_library.PATH} has no command inside; install the package tessera",
            file=sys.stderr,
        )
        return 2
    words = ["tessera", *sys.argv[1:]]
    arguments = (ctypes.c_char_p * (len(words) + 1))(*[os.fsencode(word) for word in words], None)
    command.argtypes = [ctypes.c_int, ctypes.c_void_p]
    command.restype = ctypes.c_int
    sys.stdout.flush()
    return int(command(len(words), arguments))
