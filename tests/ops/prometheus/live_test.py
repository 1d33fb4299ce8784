"""A real Prometheus scrapes a daemon under load and an idle one: every query has an answer.

Usage: live_test.py --binaries=FOLDER
"""

import http.server
import json
import math
import pathlib
import re
import sys
import threading
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
import sources  # noqa: E402
from load import Load  # noqa: E402
from processes import get, until  # noqa: E402
from stage import SCRAPE_S, Stage  # noqa: E402

BINARIES = next((word.partition("=")[2] for word in sys.argv
                 if word.startswith("--binaries=")), None)
LOADED, IDLE = "tesserad", "tesserad-idle"
MAY_BE_EMPTY = re.compile(r"No line: ")
# Panels about faults, and about states that last shorter than a scrape interval.
QUIET = {
    "Daemons down", "Not ready", "Draining", "Failed", "Failed sequences, revoked pins",
    "Tier errors", "Waits and revoked pins", "Strategies lost to the budget", "Retired memory",
    "Background jobs waiting", "Backlog", "Oldest job", "Compression backlog",
    "Waiting for a prefix"}


class Webhook(http.server.BaseHTTPRequestHandler):
    """Keeps what Alertmanager sends: (path, alert)."""

    received = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received += [(self.path, alert) for alert in body["alerts"]]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def setUpModule():
    prometheus, alertmanager = cases.tool("prometheus"), cases.tool("alertmanager")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    unittest.addModuleCleanup(server.server_close)
    unittest.addModuleCleanup(server.shutdown)
    Live.stage = Stage(BINARIES, prometheus, alertmanager,
                       f"http://127.0.0.1:{server.server_port}")
    unittest.addModuleCleanup(Live.stage.close)
    try:
        Load(Live.stage).run_round()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{Live.stage.programs.logs()}") from error
    Live.end = math.floor(time.time())
    stage = Live.stage
    # All that happened until now has been scraped and evaluated.
    until("the last scrape", 20, lambda: stage.prometheus.instant(
        f'min(timestamp(up{{job=~"{LOADED}|{IDLE}"}})) > {Live.end} + {3 * SCRAPE_S}'))


def documented_metrics():
    text = (sources.DOCS / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def fill(expr, job):
    return (expr.replace("$__rate_interval", f"{4 * SCRAPE_S}s").replace("$job", job)
            .replace("$node", ".*").replace("$instance", ".*").replace("$tenant", ".*"))


class Live(unittest.TestCase):
    stage = end = None

    def ask(self, target, job):
        """[(labels, values)] of a panel's query, as Grafana would ask."""
        expr = fill(target["expr"], job)
        if target["instant"]:
            return self.stage.prometheus.instant(expr)
        return self.stage.prometheus.range(expr, math.ceil(self.stage.started), self.end + 3,
                                           SCRAPE_S)

    def check_defined(self, rows):
        for _, values in rows:
            for _, value in values:
                self.assertTrue(math.isfinite(value), value)

    def test_every_panel_has_data_under_load(self):
        for name, panel, target in sources.queries():
            with self.subTest(f"{name} / {panel['title']}", expr=target["expr"]):
                rows = self.ask(target, LOADED)
                self.assertTrue(rows, "no data")
                self.check_defined(rows)

    def test_every_panel_is_defined_when_idle(self):
        for name, panel, target in sources.queries():
            with self.subTest(f"{name} / {panel['title']}", expr=target["expr"]):
                rows = self.ask(target, IDLE)
                if not MAY_BE_EMPTY.search(panel["description"]):
                    self.assertTrue(rows, "no data")
                self.check_defined(rows)

    def test_work_shows_in_the_panels(self):
        """Under load, each panel but those about faults has a value that is not 0."""
        for name, dashboard in sources.dashboards().items():
            for panel in sources.panels(dashboard):
                if panel["title"] in QUIET:
                    continue
                with self.subTest(f"{name} / {panel['title']}"):
                    found = [value for target in panel["targets"]
                             for _, values in self.ask(target, LOADED) for _, value in values]
                    self.assertTrue(any(found), "all values are 0")

    def test_every_recording_rule_has_data(self):
        for rule in sources.RECORDINGS:
            for job in (LOADED, IDLE):
                with self.subTest(rule.record, job=job):
                    rows = self.stage.prometheus.instant(f'{rule.record}{{job="{job}"}}')
                    if job == LOADED or not rule.record.endswith("p99_rate5m"):
                        self.assertTrue(rows, "no data")
                    self.check_defined(rows)

    def test_every_alert_can_be_evaluated(self):
        groups = self.stage.prometheus.call("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        self.assertEqual(len(rules), len(sources.ALERTS) + len(sources.RECORDINGS))
        for rule in rules:
            with self.subTest(rule["name"]):
                self.assertEqual(rule["health"], "ok", rule.get("lastError"))

    def test_documented_metrics_are_scraped_and_scraped_ones_documented(self):
        documented = documented_metrics()
        scraped = {sources.base_name(name) for name in
                   self.stage.prometheus.call(
                       "label/__name__/values", **{"match[]": f'{{job="{LOADED}"}}'})
                   if name.startswith(("tessera_", "process_"))}
        self.assertGreater(len(documented), 60)
        if not self.stage.has_tls:
            scraped.add("tessera_tls_certificate_expiry_timestamp_seconds")
        self.assertEqual(scraped, documented)

    def test_metrics_of_rules_and_panels_exist(self):
        known = set(self.stage.prometheus.call("label/__name__/values"))
        for where, expr in sources.expressions():
            with self.subTest(where):
                self.assertLessEqual(sources.used_metrics(expr), known)

    def test_the_idle_daemon_is_calm(self):
        firing = self.stage.prometheus.instant(
            f'ALERTS{{alertstate="firing", job="{IDLE}", alertname!="TesseraDown"}}')
        self.assertEqual([labels["alertname"] for labels, _ in firing], [])

    def test_the_load_raises_alerts(self):
        firing = self.stage.prometheus.instant(
            f'max_over_time(ALERTS{{alertstate="firing", job="{LOADED}"}}[10m])')
        self.assertIn("TesseraCallsRefused", {labels["alertname"] for labels, _ in firing})


class Page(unittest.TestCase):
    """Runs after Live, by name: it ends the idle daemon."""

    def test_a_killed_daemon_pages(self):
        stage = Live.stage
        stage.idle_daemon.kill()
        stage.idle_daemon.wait()

        def page():
            return [alert for path, alert in Webhook.received
                    if path == "/page" and alert["labels"]["alertname"] == "TesseraDown"]

        alert = until("Alertmanager calls the pager", 30, page)[0]
        self.assertEqual(alert["status"], "firing")
        self.assertEqual(alert["labels"]["job"], IDLE)
        self.assertEqual(alert["labels"]["severity"], "critical")
        self.assertIn(f"127.0.0.1:{stage.idle_port}", alert["annotations"]["summary"])
        self.assertTrue(alert["annotations"]["runbook_url"].endswith("#tesseradown"))
        self.assertIsNone(get(f"http://127.0.0.1:{stage.idle_port}/metrics"))


if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if not word.startswith("--binaries=")]
    cases.main()
