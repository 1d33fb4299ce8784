"""Alerts, recording rules and dashboards: generated, documented, and right about when to fire."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases  # noqa: E402
import mutants  # noqa: E402
import promtool  # noqa: E402
import record_cases  # noqa: E402
import rule_cases  # noqa: E402
import sources  # noqa: E402

# What promtool has instead of series: a test needs some.
NOTHING = [{"series": 'up{job="other"}', "values": "1x300"}]


def alert_rule(alert, name, expr, wait):
    return {"alert": name, "expr": expr, "for": wait, "labels": {"severity": alert.severity}}


def recording_group(expr):
    """The recording rules that an expression reads."""
    used = sources.RECORDED.findall(expr)
    return ("tessera-recording", [{"record": rule.record, "expr": rule.expr}
                                  for rule in sources.RECORDINGS if rule.record in used])


def alert_tests(alert, names):
    if alert.name == "TesseraAbsent":
        return absent_tests(alert, names)
    return [promtool.alert_test(names, alert.severity, rule_cases.ALERTS[alert.name])]


def absent_tests(alert, names):
    """The only alert without labels of a daemon: nothing is there that could have them."""
    fires = [{"exp_labels": {"severity": alert.severity}}]

    def test(series, *checks):
        return {"interval": "1m", "input_series": series, "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": firing}
            for minute, firing in checks for name in names]}

    def info(values):
        return [{"series": 'tessera_build_info{instance="a"}', "values": values}]

    return [test(NOTHING, (4, []), (5, fires), (60, fires)), test(info("1x300"), (60, [])),
            test(info("1x10 stale"), (15, []), (16, fires))]


def mutant_name(rule, number):
    return f"{rule}_mutant{number}"


def file_of_alert(alert, with_mutants=False):
    rules = [alert_rule(alert, alert.name, alert.expr, alert.wait)]
    if with_mutants:
        rules += [alert_rule(alert, mutant_name(alert.name, i), mutant.expr, mutant.wait)
                  for i, mutant in enumerate(mutants.of_alert(alert))]
    groups = [recording_group(alert.expr), ("tessera-alerts", rules)]
    return promtool.RuleFile(alert.name, [group for group in groups if group[1]],
                             alert_tests(alert, [rule["alert"] for rule in rules]))


def file_of_record(rule, with_mutants=False):
    rules = [{"record": rule.record, "expr": rule.expr}]
    if with_mutants:
        rules += [{"record": mutant_name(rule.record, i), "expr": mutant.expr}
                  for i, mutant in enumerate(mutants.of_record(rule))]
    names = [one["record"] for one in rules]
    return promtool.RuleFile(rule.record.replace(":", "-"), [("tessera-recording", rules)],
                             [promtool.record_test(names, case)
                              for case in record_cases.RECORDS[rule.record]])


class Generated(unittest.TestCase):
    def check_generator(self, folder):
        done = subprocess.run([sys.executable, folder / "generate.py", "--check"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_rule_files_are_those_of_their_source(self):
        self.check_generator(sources.PROMETHEUS)

    def test_dashboards_are_those_of_their_source(self):
        self.check_generator(sources.GRAFANA)

    def test_a_changed_file_is_found(self):
        for folder, name in ((sources.PROMETHEUS, "tessera-alerts.yml"),
                             (sources.GRAFANA, "node.json")):
            with tempfile.TemporaryDirectory() as copy:
                command = [sys.executable, folder / "generate.py", f"--folder={copy}"]
                subprocess.run(command, check=True)
                written = pathlib.Path(copy) / name
                self.assertEqual(written.read_bytes(), (folder / name).read_bytes())
                written.write_text(written.read_text(encoding="utf-8") + " ", encoding="utf-8")
                done = subprocess.run([*command, "--check"], capture_output=True, text=True,
                                      check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn(name, done.stderr)

    def test_the_runbook_may_be_elsewhere(self):
        with tempfile.TemporaryDirectory() as copy:
            subprocess.run([sys.executable, sources.PROMETHEUS / "generate.py",
                            f"--folder={copy}", "--runbook=https://wiki.example.com/t"], check=True)
            text = (pathlib.Path(copy) / "tessera-alerts.yml").read_text(encoding="utf-8")
            self.assertIn('"https://wiki.example.com/t#tesseradown"', text)


class Runbook(unittest.TestCase):
    PARTS = ("Meaning", "Impact", "Look at", "Do", "Ignore when")

    def setUp(self):
        text = (sources.DOCS / "runbook.md").read_text(encoding="utf-8")
        self.sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text,
                                        re.MULTILINE | re.DOTALL))

    def test_every_alert_has_a_section_and_no_other(self):
        self.assertEqual(list(self.sections), [alert.name for alert in sources.ALERTS])

    def test_a_section_says_severity_wait_and_all_parts(self):
        for alert in sources.ALERTS:
            with self.subTest(alert.name):
                text = self.sections[alert.name]
                wait = "at once" if alert.wait == "0m" else f"after {alert.wait}"
                self.assertIn(f"{alert.severity.capitalize()}, {wait}.", text)
                self.assertEqual(tuple(re.findall(r"^- \*\*([^*]+)\.\*\*", text, re.MULTILINE)),
                                 self.PARTS)

    def test_panels_exist(self):
        titles = {f"{board['title'].removeprefix('Tessera / ')} / {panel['title']}"
                  for board in sources.dashboards().values() for panel in sources.panels(board)}
        for name, text in self.sections.items():
            named = re.findall(r"\*\*((?:Fleet|Node|Tenant and policy) / [^*]+)\*\*", text)
            with self.subTest(name):
                self.assertTrue(named)
                self.assertLessEqual(set(named), titles)


class Names(unittest.TestCase):
    def test_recorded_series_have_a_rule(self):
        recorded = {rule.record for rule in sources.RECORDINGS}
        used = set()
        for where, expr in sources.expressions():
            names = set(sources.RECORDED.findall(expr))
            used |= names
            with self.subTest(where):
                self.assertLessEqual(names, recorded)
        self.assertEqual(used, recorded, "recorded, and no alert or panel reads it")


class Boards(unittest.TestCase):
    def test_panels_do_not_overlap(self):
        for name, board in sources.dashboards().items():
            taken = set()
            for panel in board["panels"]:
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24)
                cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])}
                with self.subTest(f"{name} / {panel['title']}"):
                    self.assertFalse(cells & taken)
                taken |= cells

    def test_names_are_unique_and_panels_explain_themselves(self):
        boards = sources.dashboards()
        self.assertEqual(len({board["uid"] for board in boards.values()}), len(boards))
        for name, board in boards.items():
            panels = sources.panels(board)
            self.assertEqual(len({panel["id"] for panel in board["panels"]}),
                             len(board["panels"]))
            self.assertEqual(len({panel["title"] for panel in panels}), len(panels), name)
            for panel in panels:
                with self.subTest(f"{name} / {panel['title']}"):
                    self.assertTrue(panel["description"].endswith("."))
                    self.assertEqual(panel["datasource"]["uid"], "${datasource}")

    def test_variables_are_defined_before_they_are_used(self):
        for name, board in sources.dashboards().items():
            known = {"__rate_interval"}
            for variable in board["templating"]["list"]:
                used = set(re.findall(r"\$\{?(\w+)", str(variable.get("definition", ""))))
                self.assertLessEqual(used, known, f"{name}: {variable['name']}")
                known.add(variable["name"])
            for panel in sources.panels(board):
                for target in panel["targets"]:
                    used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
                    self.assertLessEqual(used, known, f"{name} / {panel['title']}")


class Rules(unittest.TestCase):
    def setUp(self):
        self.promtool = cases.tool("promtool")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_prometheus_accepts_the_files(self):
        files = [sources.PROMETHEUS / name
                 for name in ("tessera-recording-rules.yml", "tessera-alerts.yml")]
        done = subprocess.run([self.promtool, "check", "rules", *files], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"{len(sources.ALERTS)} rules found", done.stdout)
        self.assertIn(f"{len(sources.RECORDINGS)} rules found", done.stdout)

    def test_every_alert_has_cases_that_fire_and_cases_that_do_not(self):
        for alert in sources.ALERTS:
            checks = [check for test in alert_tests(alert, [alert.name])
                      for check in test["alert_rule_test"]]
            with self.subTest(alert.name):
                self.assertTrue([check for check in checks if check["exp_alerts"]])
                self.assertTrue([check for check in checks if not check["exp_alerts"]])

    def test_rules_do_what_the_cases_say(self):
        wrong = promtool.run(self.promtool, self.folder, [
            *(file_of_alert(alert) for alert in sources.ALERTS),
            *(file_of_record(rule) for rule in sources.RECORDINGS)])
        self.assertEqual(wrong, {})

    def test_mistakes_in_rules_are_noticed(self):
        made = {}
        for rules, make, name in ((sources.ALERTS, mutants.of_alert, "name"),
                                  (sources.RECORDINGS, mutants.of_record, "record")):
            for rule in rules:
                of_rule = {mutant_name(getattr(rule, name), i): mutant
                           for i, mutant in enumerate(make(rule))}
                self.assertGreaterEqual(len(of_rule), 2, getattr(rule, name))
                made.update(of_rule)
        self.assertGreater(len(made), 200)
        wrong = promtool.run(self.promtool, self.folder, [
            *(file_of_alert(alert, with_mutants=True) for alert in sources.ALERTS),
            *(file_of_record(rule, with_mutants=True) for rule in sources.RECORDINGS)])
        for name, mutant in made.items():
            with self.subTest(name, mistake=mutant.what):
                self.assertIn(name, wrong, f"no case notices it: {mutant}")


class Routing(unittest.TestCase):
    """The example for Alertmanager."""

    RECEIVERS = {"critical": "page", "warning": "tickets", "info": "nowhere"}

    def amtool(self, *arguments):
        done = subprocess.run([cases.tool("amtool"), *arguments], capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout.strip()

    def test_alertmanager_accepts_the_example(self):
        self.amtool("check-config", sources.PROMETHEUS / "alertmanager-example.yml")

    def test_alerts_reach_the_receiver_of_their_severity(self):
        config = f"--config.file={sources.PROMETHEUS / 'alertmanager-example.yml'}"
        for severity, receiver in self.RECEIVERS.items():
            self.assertEqual(self.amtool("config", "routes", "test", config,
                                         "alertname=TesseraDown", f"severity={severity}"),
                             receiver)
        self.assertEqual(self.amtool("config", "routes", "test", config, "alertname=OtherAlert",
                                     "severity=critical"), "nowhere")
        self.assertLessEqual({alert.severity for alert in sources.ALERTS}, set(self.RECEIVERS))


if __name__ == "__main__":
    cases.main()
