"""The generated files and their sources in deploy/, and the metrics that they use."""

import importlib.util
import json
import re
import sys

import cases

PROMETHEUS = cases.ROOT / "deploy/prometheus"
GRAFANA = cases.ROOT / "deploy/grafana"
DOCS = cases.ROOT / "deploy/docs"
DASHBOARDS = ("fleet", "node", "tenant")

sys.path.insert(0, str(PROMETHEUS))

from alerts import ALERTS  # noqa: E402
from recording import RECORDINGS  # noqa: E402

METRIC = re.compile(r"\b(?:tessera|process|scrape)_\w+|\bup\b|\bALERTS\b")
RECORDED = re.compile(r"\b(?:node|tenant):tessera_\w+:\w+")
HISTOGRAM_PARTS = re.compile(r"_(?:bucket|sum|count)$")


def load(path):
    """A module by its path; folders have modules of the same names."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dashboards():
    return {name: json.loads((GRAFANA / f"{name}.json").read_text(encoding="utf-8"))
            for name in DASHBOARDS}


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries():
    """(dashboard, panel, target) of every query."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield name, panel, target


def expressions():
    """(where, expression) of every rule and every panel."""
    for rule in RECORDINGS:
        yield f"rule {rule.record}", rule.expr
    for alert in ALERTS:
        yield f"alert {alert.name}", alert.expr
    for name, panel, target in queries():
        yield f"{name} / {panel['title']}", target["expr"]


def used_metrics(expr):
    """Metrics of an expression: names as they are scraped, without recorded ones."""
    bare = re.sub(r'"[^"]*"', '""', RECORDED.sub("", expr))
    return set(METRIC.findall(bare))


def base_name(metric):
    return HISTOGRAM_PARTS.sub("", metric)
