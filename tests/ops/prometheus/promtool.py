"""Runs cases of rule_cases.py and record_cases.py with promtool, many rule files at a time."""

import json
import re
import subprocess
from dataclasses import dataclass

from rule_cases import END

SERIES = re.compile(r"(\w+)(?:\{(.*)\})?")
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class RuleFile:
    """A file of rules, in a folder of its own, and the cases that promtool runs on it."""

    name: str
    groups: tuple  # (name of the group, rules as YAML's model)
    tests: list


def parse_labels(text):
    return dict(LABEL.findall(text or ""))


def input_series(series, base):
    """promtool's input_series; labels that a series does not name are those of `base`."""
    rows = []
    for text, values in series.items():
        name, labels = SERIES.fullmatch(text).groups()
        merged = {**base, **parse_labels(labels)}
        written = ", ".join(f'{key}="{value}"' for key, value in merged.items())
        rows.append({"series": f"{name}{{{written}}}", "values": values})
    return rows


def base_labels(number, plain=False):
    """The labels of the daemon of scenario `number`."""
    node = {} if plain else {"node": f"n{number}"}
    return {"job": "tesserad", **node, "instance": f"10.0.0.{number}:9464"}


def times_of(scenarios):
    """The minutes at which an alert begins or stops to fire, and those beside them."""
    times = {0, 30}
    for scenario in scenarios:
        for firing in scenario.fires:
            times |= {firing.first - 1, firing.first}
            if firing.last != END:
                times |= {firing.last, firing.last + 1}
    return sorted(time for time in times if time >= 0)


def alert_test(names, severity, scenarios):
    """One promtool test of all scenarios: which of them fire at every time that matters. All of
    `names` are rules that must do the same."""
    series, checks = [], []
    for number, scenario in enumerate(scenarios):
        series += input_series(scenario.series, base_labels(number, scenario.plain))
    for time in times_of(scenarios):
        firing = []
        for number, scenario in enumerate(scenarios):
            for one in scenario.fires:
                if one.first <= time <= one.last:
                    labels = {**base_labels(number, scenario.plain), **one.labels}
                    firing.append({"exp_labels": {**labels, "severity": severity}})
        checks += [{"eval_time": f"{time}m", "alertname": name, "exp_alerts": firing}
                   for name in names]
    return {"interval": "1m", "input_series": series, "alert_rule_test": checks}


def record_test(names, case):
    base = base_labels(0)
    checks = []
    for name in names:
        samples = [{"labels": name + "{" + ", ".join(
            f'{key}="{value}"' for key, value in {**base, **labels}.items()) + "}",
            "value": value} for labels, value in case.samples]
        checks.append({"expr": name, "eval_time": f"{case.minute}m", "exp_samples": samples})
    return {"interval": "1m", "input_series": input_series(case.series, base),
            "promql_expr_test": checks}


def run(promtool, folder, rule_files):
    """Returns {name of a rule: what promtool says against it}, for all rules whose cases fail."""
    paths = []
    for rule_file in rule_files:
        place = folder / rule_file.name
        place.mkdir()
        # JSON is YAML, too.
        (place / "rules.yml").write_text(json.dumps({"groups": [
            {"name": name, "rules": rules} for name, rules in rule_file.groups]}))
        (place / "test.yml").write_text(json.dumps({
            "rule_files": ["rules.yml"], "evaluation_interval": "1m",
            "group_eval_order": [name for name, _ in rule_file.groups],
            "tests": rule_file.tests}))
        paths.append(str(place / "test.yml"))
    done = subprocess.run([promtool, "test", "rules", *paths], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    failures = read_failures(done.stdout)
    # A failure is indented by four; its parts are indented further.
    other = [line for line in done.stdout.splitlines()
             if re.match(r" {4}(?! |alertname: |expr: )", line)]
    if (done.returncode == 0) == bool(failures) or other:
        raise AssertionError("promtool could not run the cases:\n" + "\n".join(other))
    return failures


def read_failures(output):
    """promtool begins each failure with "alertname: NAME, time: T" or "expr: "NAME", time: T"."""
    failures = {}
    for part in re.split(r"\n(?= +(?:alertname|expr): )", output)[1:]:
        name = re.match(r' +(?:alertname: (\S+?)|expr: "([^"]+)"), time: ', part)
        failures.setdefault(name[1] or name[2], part.strip())
    return failures
