"""The frame of the attacks: a case starts a daemon, attacks it, and reports one row of the table."""

import contextlib
import unittest

from daemon import MIB, Daemon, until
from honest import Honest

RETURN_S = 5        # within which memory must come back
MEMORY_BAR_MIB = 64
P50_BAR_MS, P99_BAR_MS = 5, 50
LATENCY_BAR = f"p50 < {P50_BAR_MS} ms, p99 < {P99_BAR_MS} ms, none refused"
TABLE = []  # (attack, what it costs, bar, held)


class Growth:
    """Resident memory of a daemon during an attack and after it, above what it was before."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.before = daemon.rss
        daemon.reset_peak()
        self.peak_mib = self.after_mib = None  # None: the daemon has died

    def finish(self):
        if self.daemon.lives:
            self.peak_mib = (self.daemon.peak - self.before) // MIB
            until(lambda: self.now_mib() <= MEMORY_BAR_MIB or not self.daemon.lives, RETURN_S)
        if self.daemon.lives:
            self.after_mib = self.now_mib()

    def now_mib(self):
        return (self.daemon.rss - self.before) // MIB

    def holds(self, peak_mib=MEMORY_BAR_MIB, after_mib=MEMORY_BAR_MIB):
        return (self.peak_mib is not None and self.after_mib is not None
                and self.peak_mib <= peak_mib and self.after_mib <= after_mib)

    def __str__(self):
        if self.after_mib is None:
            return "the daemon was killed"
        return f"peak {self.peak_mib:+} MiB, after {self.after_mib:+} MiB"


def memory_bar(peak_mib=MEMORY_BAR_MIB):
    return f"peak <= +{peak_mib} MiB, after <= +{MEMORY_BAR_MIB} MiB"


class Attack(unittest.TestCase):
    """One folder, one cgroup and one daemon per case, unless it starts more."""

    def start(self, **options):
        daemon = Daemon(**options)
        self.addCleanup(daemon.close)
        return daemon

    def keep(self, thing):
        """Closes a connection, session or socket at the end of the case."""
        self.addCleanup(thing.close)
        return thing

    def judge(self, attack, cost, bar, held):
        """Adds a row to the table; the case fails where the bar was not held."""
        TABLE.append((attack, cost, bar, held))
        self.assertTrue(held, f"{attack}: {cost}; bar: {bar}")

    @contextlib.contextmanager
    def growth(self, daemon):
        growth = Growth(daemon)
        yield growth
        growth.finish()

    def judge_growth(self, attack, growth, peak_mib=MEMORY_BAR_MIB):
        self.judge(attack, str(growth), memory_bar(peak_mib), growth.holds(peak_mib))

    def judge_honest(self, attack, figures, also="", also_bar="", also_held=True):
        cost = f"p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.0f} ms"
        if figures["failed"]:
            cost += f", {figures['failed']} of {figures['calls']} calls failed"
        held = (figures["failed"] == 0 and figures["p50_ms"] < P50_BAR_MS
                and figures["p99_ms"] < P99_BAR_MS)
        self.judge(attack, cost + also, LATENCY_BAR + also_bar, held and also_held)

    def honest(self, address, token=""):
        worker = Honest(address, token)
        self.addCleanup(worker.close)
        return worker


def render(table):
    """The table as text, for people and for README.md."""
    rows = [("attack", "what it costs", "bar", "")]
    rows += [(attack, cost, bar, "" if held else "FAILED") for attack, cost, bar, held in table]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(" | ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]])
                     .rstrip(" |") for row in rows)
