#!/usr/bin/env python3
"""Attacks a daemon, and prints what each attack costs it.

Usage: security_test.py BUILD [CASE ...]
"""

import atexit
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ops"))

import attack  # noqa: E402
import cases  # noqa: E402
from admin import *  # noqa: E402,F403
from bombs import *  # noqa: E402,F403
from daemon import Daemon  # noqa: E402
from deadlines import *  # noqa: E402,F403
from frames import *  # noqa: E402,F403
from node import *  # noqa: E402,F403
from tenants import *  # noqa: E402,F403

if __name__ == "__main__":
    Daemon.build = pathlib.Path(sys.argv.pop(1))
    atexit.register(lambda: print(attack.render(attack.TABLE)))
    cases.main()
