#!/usr/bin/env python3
"""Attacks daemons, and prints what each attack costs and the bar that it must hold.

Usage: security_test.py BUILD [--long] [CASE ...]
"""

import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ops"))

import attack  # noqa: E402
import cases  # noqa: E402
from daemon import Daemon  # noqa: E402

# pylint: disable=unused-import
from admin import AdminAddress, WorkerAddresses  # noqa: E402,F401
from bombs import (Compressed, EmptySequences, Kept, ParseBombs,  # noqa: E402,F401
                   UnfinishedMessages)
from deadlines import Deadlines  # noqa: E402,F401
from floods import (Frames, Guesses, OtherTenants, Settings,  # noqa: E402,F401
                    Together, Unread)
from frames import HeaderBlocks, OpenStreams, RapidReset  # noqa: E402,F401
from node import (Descriptors, Files, Log, Metrics, Traces, Vanishing,  # noqa: E402,F401
                  VanishingDaemon)
from tenants import Attaching, DefaultFlags, GreedyTenant, Tokens  # noqa: E402,F401


def main():
    Daemon.build = pathlib.Path(sys.argv.pop(1))
    if "--long" in sys.argv:
        sys.argv.remove("--long")
    results = [word.partition(":")[2] for word in sys.argv if word.startswith(cases.GTEST_OUTPUT)]
    try:
        cases.main()
    finally:
        table = attack.render(attack.TABLE)
        print(table)
        for file in results:
            pathlib.Path(file).with_suffix(".md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
