"""The frame of the attacks: a case starts a daemon, attacks it, and adds a row to the table."""

import contextlib
import dataclasses
import unittest

from daemon import MIB, Daemon, until
from honest import Honest
from http2 import Connection

RETURN_S = 5  # within which memory must come back
MEMORY_BAR_MIB = 64
STREAMS_PER_CONNECTION = 100
P50_BAR_MS, P99_BAR_MS = 5, 50
LATENCY_BAR = f"p50 < {P50_BAR_MS} ms, p99 < {P99_BAR_MS} ms, none failed"
KILLED = "the daemon was killed"


@dataclasses.dataclass
class Row:
    attack: str
    cost: str
    bar: str
    held: bool


TABLE = []


class Growth:
    """Resident memory that a daemon gains while it is attacked."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.before = daemon.rss
        self.peak_mib = None  # None: the daemon has died
        daemon.reset_peak()

    def finish(self):
        peak = self.daemon.peak
        if self.daemon.lives:
            self.peak_mib = (peak - self.before) // MIB

    def holds(self, bar_mib=MEMORY_BAR_MIB):
        return self.peak_mib is not None and self.peak_mib <= bar_mib

    def __str__(self):
        return KILLED if self.peak_mib is None else f"peak {self.peak_mib:+} MiB"


class Attack(unittest.TestCase):
    """One case is one attack, on daemons of its own.

    When the case has closed its connections, the daemon's memory must come back.
    """

    def setUp(self):
        self.row = None
        self.shows_memory = False

    def start(self, kept_mib=0, **options):
        """A daemon; `kept_mib`: of pool memory that it may keep after the attack."""
        daemon = Daemon(**options)
        self.addCleanup(daemon.close)
        self.addCleanup(self.check_return, daemon, daemon.rss + kept_mib * MIB)
        return daemon

    def keep(self, thing):
        """Closes a connection, session or socket at the end of the case."""
        self.addCleanup(thing.close)
        return thing

    def honest(self, address, token=""):
        return self.keep(Honest(address, token))

    def spread(self, address, count, settings=None):
        """Yields a connection for each of so many streams: a new one where the last is full."""
        connection, room = None, 0
        for _ in range(count):
            if room == 0 or connection.is_cut:
                try:
                    connection = self.keep(Connection(address, settings))
                except OSError:  # no more connections are admitted
                    return
                connection.wait(lambda one=connection: one.is_configured or one.is_cut, 1)
                room = min(STREAMS_PER_CONNECTION, connection.max_streams)
            room -= 1
            yield connection

    @contextlib.contextmanager
    def growth(self, daemon):
        growth = Growth(daemon)
        yield growth
        growth.finish()

    def judge(self, attack, cost, bar, held):
        """Adds a row to the table; the case fails where the bar was not held."""
        self.row = Row(attack, cost, bar, held)
        TABLE.append(self.row)
        self.assertTrue(held, f"{attack}: {cost}; bar: {bar}")

    def judge_growth(self, attack, growth, bar_mib=MEMORY_BAR_MIB):
        self.shows_memory = True
        self.judge(attack, str(growth), f"peak <= +{bar_mib} MiB", growth.holds(bar_mib))

    def judge_honest(self, attack, figures, also="", also_bar="", also_held=True):
        cost = f"p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.0f} ms"
        if figures["failed"]:
            cost += f", {figures['failed']} of {figures['calls']} calls failed"
        held = (figures["failed"] == 0 and figures["p50_ms"] < P50_BAR_MS
                and figures["p99_ms"] < P99_BAR_MS)
        self.judge(attack, cost + also, LATENCY_BAR + also_bar, held and also_held)

    def check_return(self, daemon, before):
        """Runs when all connections of the case are closed."""
        def gained_mib():
            return (daemon.rss - before) // MIB

        if self.row is None or not daemon.lives:
            return
        until(lambda: gained_mib() <= MEMORY_BAR_MIB or not daemon.lives, RETURN_S)
        gained = gained_mib()
        has_held, self.row.held = self.row.held, self.row.held and gained <= MEMORY_BAR_MIB
        if self.shows_memory or gained > MEMORY_BAR_MIB:
            self.row.cost += f", after {gained:+} MiB"
        if has_held:
            self.assertLessEqual(gained, MEMORY_BAR_MIB, f"MiB {RETURN_S} s after the attack")


def render(table):
    """The table as Markdown."""
    rows = [("attack", "what it costs", "bar", "held")]
    rows += [(row.attack, row.cost, row.bar, "yes" if row.held else "NO") for row in table]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
             for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
